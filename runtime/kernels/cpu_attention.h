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

#include <omp.h>

#include "cpu_attention_worker.h"

namespace stepgraph {

// One side of one kv head. A later token's vector stays where two go to one slot (padding).
template <class T, class Codec>
void write_slots(const AttentionStep& step, const T* x, const int64_t (&strides)[2], uint8_t* side,
                 int64_t head) {
  const int64_t d = step.head_dim;
  x += head * strides[1];
  for (int64_t t = 0; t < step.tokens; ++t, x += strides[0]) {
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
void attend_paged(const AttentionArgs<T>& args, AttentionPlan& plan) {
  const AttentionStep& step = plan.step;
  const int64_t index = omp_get_thread_num(), count = omp_get_num_threads();
  const int64_t heads = step.kv_heads, sides = args.v == nullptr ? 1 : 2;
  const int64_t items = static_cast<int64_t>(plan.tiles.size());
  if (index == 0) plan.taken = 0;  // all threads have left the layer before
#pragma omp for schedule(static)
  for (int64_t i = 0; i < heads * sides; ++i) {
    if (i < heads) {
      write_slots<T, Codec>(step, args.k, args.k_strides, args.keys, i);
    } else {
      write_slots<T, Codec>(step, args.v, args.v_strides, args.values, i - heads);
    }
  }

  Worker<T, Codec> worker(args, plan, plan.space->scratch.get() + index * plan.scratch_floats);
  if (plan.pieces.empty()) {
    // From the last tile on, which is a long one in prefill. The next one is taken early, so that
    // its keys can be brought near.
    const auto take = [&] {
      int64_t before;
#pragma omp atomic capture
      before = plan.taken++;
      return items - 1 - before;
    };
    int64_t i = take();
    if (i >= 0) worker.begin({&plan.tiles[i], plan.tiles[i].first_chunk()});
    for (int64_t next; i >= 0; i = next) {
      next = take();
      worker.attend(plan.tiles[i], plan.tiles[std::max<int64_t>(next, 0)]);
    }
#pragma omp barrier
  } else {
    const auto states = [&](const Tile& tile) {
      const int64_t index = &tile - plan.tiles.data();
      return plan.space->parts.get() + index * plan.most_chunks * plan.part_floats;
    };
    const int64_t pieces = plan.pieces.size(), end = pieces * (index + 1) / count;
    int64_t i = pieces * index / count;
    if (i < end) worker.begin(plan.pieces[i]);
    for (; i < end; ++i) {
      const Piece& piece = plan.pieces[i];
      const Tile& tile = *piece.tile;
      float* place = states(tile) + (piece.chunk - tile.first_chunk()) * plan.part_floats;
      worker.attend_piece(piece, plan.pieces[std::min(i + 1, end - 1)],
                          worker.state_at(place, tile.queries()));
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t i = 0; i < items; ++i) {
      worker.attend_merged(plan.tiles[i], states(plan.tiles[i]), plan.part_floats);
    }
  }
}

// Defined in a unit for each storage, which the compiler works on at the same time.
template <class T>
void attend_int8(const AttentionArgs<T>& args, AttentionPlan& plan);
template <class T>
void attend_fp8(const AttentionArgs<T>& args, AttentionPlan& plan);

}  // namespace stepgraph
