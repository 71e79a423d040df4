// Paged attention for decode steps and prefill chunks alike.
//
// Work is cut into tiles: consecutive tokens of one row, times the query heads that share a kv
// head. A tile walks what its tokens see in chunks of kChunk positions. Of each chunk it makes a
// partial softmax (maximum, sum, weighted values), and partials are merged in order (the
// log-sum-exp merge of FlashAttention, arXiv 2205.14135, section 3.1). Chunks start at multiples of
// kChunk and every sum runs in the order of positions, so a token's result depends on nothing but
// its own row: not on the tile it is in, the number of tokens, or whether chunks went to several
// threads (flash-decoding), which is done when there are fewer tiles than keep the threads busy.
//
// In a bfloat16 model the weights are rounded to bfloat16 too, and both products run in the dot
// instruction over pairs; the sum of the weights and all accumulators are float32.
//
// With a sliding window a tile begins at the first position that one of its tokens sees. What lies
// before a token's own window is left out of its sums like what lies behind it: by bounds, never by
// a factor of 0.
#pragma once

#include "attention_worker.h"
#include "phases.h"

namespace stepgraph {

// One side of one kv head, of the tokens first ... first + count - 1. A later token's vector stays
// where two go to one slot (padding).
template <class T, class Codec>
void write_slots(const AttentionStep& step, const T* x, const int64_t (&strides)[2], uint8_t* side,
                 int64_t head, int64_t first, int64_t count) {
  const int64_t d = step.head_dim;
  x += head * strides[1] + first * strides[0];
  for (int64_t t = first; t < first + count; ++t, x += strides[0]) {
    const int64_t slot = step.slots[t], offset = slot % step.block_size;
    const int64_t index = slot / step.block_size * step.kv_heads + head;
    if constexpr (Codec::kScaled) {
      uint8_t* place = side + index * step.block_size * (d + 2);
      quantise<typename Codec::Number>(x, d, place + offset * d,
                                       place + step.block_size * d + offset * 2);
    } else {
      std::copy_n(x, d, reinterpret_cast<T*>(side) + (index * step.block_size + offset) * d);
    }
  }
}

template <class T, class Codec>
void attend_paged(const AttentionArgs<T>& args, AttentionPlan& plan, Phases& phases, int64_t phase,
                  int64_t index) {
  if (phases.over(phase)) return;
  Worker<T, Codec> worker(args, plan, plan.space->scratch.get() + index * plan.space->thread_floats);
  const int64_t units = plan.units();
  if (plan.pieces.empty()) {
    // From the last tile on, which is a long one in prefill.
    const auto tile_of = [&](int64_t unit) -> const Tile& {
      return plan.tiles[units - 1 - std::min(unit, units - 1)];
    };
    phases.run(
        phase, units,
        [&](int64_t unit, int64_t next) { worker.attend(tile_of(unit), tile_of(next)); },
        [&](int64_t unit) { worker.write(tile_of(unit)); });
    return;
  }
  const auto piece_of = [&](int64_t unit) -> const Piece& {
    return plan.pieces[std::min(unit, units - 1)];
  };
  phases.run(
      phase, units,
      [&](int64_t unit, int64_t next) { worker.attend_piece(piece_of(unit), piece_of(next)); },
      [&](int64_t unit) {
        const Piece& piece = piece_of(unit);
        const int64_t tile = piece.tile - plan.tiles.data();
        float* parts = plan.space->parts.get() + tile * plan.most_chunks * plan.part_floats;
        worker.write_piece(piece,
                           parts + (piece.chunk - piece.tile->first_chunk()) * plan.part_floats);
        // Whoever publishes the last chunk of a tile merges them.
        if (plan.chunks_left[tile].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        plan.chunks_left[tile].store(piece.tile->chunks(), std::memory_order_relaxed);
        worker.write_merged(*piece.tile, parts, plan.part_floats);
      });
}

// The codec of an arena of 8-bit numbers with a scale each vector.
template <class Format, class T>
using ScaledOf = Scaled<Format, typename Element<T>::Word>;

}  // namespace stepgraph

// Instantiates attention over an arena of one kind of number; `extern` declares that a unit of its own
// does, which the compiler works on at the same time.
#define STEPGRAPH_ATTENTION_OF(prefix, Format, T)                                                  \
  prefix template void stepgraph::attend_paged<T, stepgraph::ScaledOf<stepgraph::Format, T>>(      \
      const stepgraph::AttentionArgs<T>&, stepgraph::AttentionPlan&, stepgraph::Phases&, int64_t,  \
      int64_t);                                                                                    \
  prefix template void stepgraph::write_slots<T, stepgraph::ScaledOf<stepgraph::Format, T>>(       \
      const stepgraph::AttentionStep&, const T*, const int64_t (&)[2], uint8_t*, int64_t, int64_t, \
      int64_t)
#define STEPGRAPH_SCALED_ATTENTION(prefix, Format)         \
  STEPGRAPH_ATTENTION_OF(prefix, Format, c10::BFloat16);   \
  STEPGRAPH_ATTENTION_OF(prefix, Format, c10::Half);       \
  STEPGRAPH_ATTENTION_OF(prefix, Format, float)
