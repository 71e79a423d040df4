// The plan of a step's attention, the choice among the storages, and attention over an arena of the
// model's own type.
#include "attention.h"

#include <c10/util/Exception.h>

STEPGRAPH_SCALED_ATTENTION(extern, Int8);
STEPGRAPH_SCALED_ATTENTION(extern, Fp8);

namespace stepgraph {
namespace {

constexpr int64_t kTileQueries = 48;  // query rows that share one packed chunk of keys
constexpr int64_t kMostHeads = 64;    // query heads of a tile; more of a group go to several
constexpr int64_t kBytesPerThread = 64 * 1024;  // below, a second thread costs more than it brings
constexpr int64_t kItemsPerThread = 4;  // fewer tiles than this are split into chunks
// A split call keeps the state of every chunk of every tile until all are there. If that took more
// than this it is not split: the memory plan has a reserve for such work space.
constexpr int64_t kMostSplitBytes = 32 << 20;

// Tiles of one kv head.
int64_t head_parts(int64_t group) { return (group + kMostHeads - 1) / kMostHeads; }

// Tokens of a tile at most.
int64_t tile_tokens(int64_t group) { return std::max<int64_t>(1, kTileQueries / group); }

// Floats that a thread works in whose tiles have at most `queries` rows of queries.
int64_t scratch_floats_of(const AttentionStep& step, int64_t queries) {
  const int64_t most_words = (step.head_dim + 15) / 16 * 16;  // a word is an element or two
  const int64_t floats = packed_words(most_words) + kChunk * kBlock +
                         2 * state_floats(queries, state_width(step.value_dim)) +
                         queries * (4 * most_words + kChunk + kSpanFloats);
  return (floats + 15) / 16 * 16;
}

}  // namespace

void AttentionPlan::prepare(const AttentionStep& new_step, AttentionSpace& new_space) {
  step = new_step;
  space = &new_space;
  cut_tiles();
  share_out();
  // The same for all plans: a late thread works in its own part while others are in a later layer.
  space->thread_floats = std::max(space->thread_floats, scratch_floats_of(step, most_queries));
  space->scratch.reserve(space->thread_floats * step.threads);
}

// All heads of some tokens lie together.
void AttentionPlan::cut_tiles() {
  const int64_t group = step.heads / step.kv_heads, head_tiles = head_parts(group);
  const int64_t most = tile_tokens(group);
  tiles.clear();
  for (int64_t first = 0, tokens; first < step.tokens; first += tokens) {
    const int64_t row = step.token_rows[first];
    Span seen = seen_from(step.positions[first], step);
    for (tokens = 1; tokens < most && first + tokens < step.tokens &&
                     step.token_rows[first + tokens] == row; ++tokens) {
      const Span own = seen_from(step.positions[first + tokens], step);
      seen = {std::min(seen.begin, own.begin), std::max(seen.end, own.end)};
    }
    const int32_t* table = step.block_tables + row * step.max_blocks;
    for (int64_t i = seen.begin / step.block_size; i * step.block_size < seen.end; ++i) {
      TORCH_CHECK_INDEX(0 <= table[i] && table[i] < step.num_blocks, "block_tables[", row, ", ", i,
                        "] is ", table[i], ", the arena has ", step.num_blocks, " blocks");
    }
    for (int64_t kv_head = 0; kv_head < step.kv_heads; ++kv_head) {
      for (int64_t part = 0; part < head_tiles; ++part) {
        const int64_t from = group * part / head_tiles, to = group * (part + 1) / head_tiles;
        tiles.push_back({first, tokens, seen.begin, seen.end, kv_head, kv_head * group + from,
                         to - from});
      }
    }
  }
}

// How many threads are worth while, and whether a tile's chunks go to several of them.
void AttentionPlan::share_out() {
  const int64_t items = static_cast<int64_t>(tiles.size());
  int64_t positions = 0;
  most_chunks = most_queries = 1;
  for (const Tile& tile : tiles) {
    // As often as rows of queries pass over what is read.
    positions += (tile.end - tile.begin) * ((tile.queries() + kTileRows - 1) / kTileRows);
    most_chunks = std::max(most_chunks, tile.chunks());
    most_queries = std::max(most_queries, tile.queries());
  }
  // Work in bytes of the model's type; quantised ones are not decoded faster than they are counted.
  const int64_t bytes = positions * step.head_dim * 2 * step.element_bytes;
  const int64_t useful = std::min(bytes / kBytesPerThread, items * most_chunks);
  threads = useful_threads(useful, step.threads);
  part_floats = state_floats(most_queries, state_width(step.value_dim));
  const int64_t floats = items * most_chunks * part_floats;
  const bool split = threads > 1 && most_chunks > 1 && items < threads * kItemsPerThread &&
                     floats * static_cast<int64_t>(sizeof(float)) <= kMostSplitBytes;
  pieces.clear();
  if (!split) return;
  space->parts.reserve(floats);
  const int64_t together = step.kv_heads * head_parts(step.heads / step.kv_heads);
  for (int64_t i = 0; i < items; i += together) {  // tiles of the same tokens
    for (int64_t chunk = tiles[i].first_chunk(); chunk < tiles[i].end_chunk(); ++chunk) {
      for (int64_t j = i; j < i + together; ++j) pieces.push_back({&tiles[j], chunk});
    }
  }
  if (items > counted_tiles_) {
    chunks_left.reset(new std::atomic<int64_t>[items]);
    counted_tiles_ = items;
  }
  for (int64_t i = 0; i < items; ++i) {
    chunks_left[i].store(tiles[i].chunks(), std::memory_order_relaxed);
  }
}

// Calls run(codec) with the one of a storage.
template <class T, class Run>
void with_codec(Storage storage, const Run& run) {
  switch (storage) {
    case Storage::kModel: return run(Plain<T>());
    case Storage::kInt8: return run(ScaledOf<Int8, T>());
    case Storage::kFp8: return run(ScaledOf<Fp8, T>());
  }
}

template <class T>
void attend(const AttentionArgs<T>& args, AttentionPlan& plan, Phases& phases, int64_t phase,
            int64_t index) {
  with_codec<T>(plan.step.storage, [&]<class Codec>(Codec) {
    attend_paged<T, Codec>(args, plan, phases, phase, index);
  });
}

template <class T>
void store_head(const AttentionArgs<T>& args, const AttentionStep& step, bool values, int64_t head,
                int64_t first, int64_t count) {
  const T* x = values ? args.v : args.k;
  const int64_t(&strides)[2] = values ? args.v_strides : args.k_strides;
  uint8_t* side = values ? args.values : args.keys;
  with_codec<T>(step.storage, [&]<class Codec>(Codec) {
    write_slots<T, Codec>(step, x, strides, side, head, first, count);
  });
}

namespace {

template <class T>
class AttentionJob : public Job {
 public:
  int prepare(const AttentionArgs<T>& args, const AttentionStep& step,
              std::shared_ptr<const void> keep) {
    args_ = args;
    plan_.prepare(step, space_);
    heads_ = step.kv_heads;
    sides_ = args.k == nullptr ? 0 : args.v == nullptr ? 1 : 2;
    phases_.prepare(2, std::max(plan_.units(), heads_ * sides_), plan_.threads);
    keep_ = std::move(keep);
    return plan_.threads;
  }

 protected:
  void work(int64_t index) override {
    const AttentionArgs<T> args = args_;
    phases_.run(0, heads_ * sides_, [&](int64_t unit) {
      store_head(args, plan_.step, unit >= heads_, unit % heads_, 0, plan_.step.tokens);
    });
    attend(args, plan_, phases_, 1, index);
  }

  void clear() override {
    space_ = AttentionSpace();
    Job::clear();
  }

 private:
  AttentionArgs<T> args_;
  AttentionSpace space_;
  AttentionPlan plan_;
  int64_t heads_, sides_;
  Phases phases_;
};

}  // namespace

template <class T>
void paged_attention(const AttentionArgs<T>& args, const AttentionStep& step,
                     std::shared_ptr<const void> keep) {
  run_job<AttentionJob<T>>(args, step, std::move(keep));
}

template void attend(const AttentionArgs<c10::BFloat16>&, AttentionPlan&, Phases&, int64_t, int64_t);
template void attend(const AttentionArgs<float>&, AttentionPlan&, Phases&, int64_t, int64_t);
template void store_head(const AttentionArgs<c10::BFloat16>&, const AttentionStep&, bool, int64_t,
                         int64_t, int64_t);
template void store_head(const AttentionArgs<float>&, const AttentionStep&, bool, int64_t, int64_t,
                         int64_t);
template void paged_attention(const AttentionArgs<c10::BFloat16>&, const AttentionStep&,
                              std::shared_ptr<const void>);
template void paged_attention(const AttentionArgs<c10::Half>&, const AttentionStep&,
                              std::shared_ptr<const void>);
template void paged_attention(const AttentionArgs<float>&, const AttentionStep&,
                              std::shared_ptr<const void>);

}  // namespace stepgraph
