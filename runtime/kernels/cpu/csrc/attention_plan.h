// How a step's attention is cut into work: made before the threads start, and used by every layer
// whose step is the same. How and why it is cut is explained in `attention.h`.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "vec.h"

namespace stepgraph {

constexpr int kChunk = 128;  // positions; a multiple of 2 * kBlock

// Positions begin ... end - 1, of a row or of a chunk.
struct Span {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

// The positions that a token at `position` sees.
inline Span seen_from(int64_t position, const AttentionStep& step) {
  int64_t begin = step.window > 0 ? std::max<int64_t>(position - step.window + 1, 0) : 0;
  if (step.chunk > 0) begin = std::max(begin, position / step.chunk * step.chunk);
  return {begin, position + 1};
}

// Query heads that share a kv head, for consecutive tokens of one row.
struct Tile {
  int64_t first, tokens;         // tokens first ... first + tokens - 1
  int64_t begin, end;            // positions begin ... end - 1: what any of them sees
  int64_t kv_head, head, heads;  // query heads head ... head + heads - 1
  int64_t queries() const { return tokens * heads; }
  int64_t first_chunk() const { return begin / kChunk; }
  int64_t end_chunk() const { return (end + kChunk - 1) / kChunk; }
  int64_t chunks() const { return end_chunk() - first_chunk(); }
};

// One chunk of a tile.
struct Piece {
  const Tile* tile;
  int64_t chunk;
  // What the tile reads of the chunk.
  Span read() const {
    const int64_t start = chunk * kChunk;
    return {std::max<int64_t>(tile->begin - start, 0),
            std::min<int64_t>(tile->end - start, kChunk)};
  }
};

// Floats of a row of weighted values, and of the softmax state of `queries` rows of that width:
// the values, then maximum and sum of each row.
inline int64_t state_width(int64_t value_dim) { return (value_dim + kBlock - 1) / kBlock * kBlock; }
inline int64_t state_floats(int64_t queries, int64_t width) {
  return queries * width + (2 * queries + 15) / 16 * 16;
}

constexpr int64_t kPackedPositions = 64;  // packed at a time, for all rows of a tile to use
// Words that they take, or the values of a chunk packed as matrix tiles, with keys of `words` words.
inline int64_t packed_words(int64_t words) {
  return std::max<int64_t>(kPackedPositions * words, kChunk / 2 * kBlock);
}
constexpr int64_t kSpanFloats = sizeof(Span) / sizeof(float);

// What threads work in during one layer. Plans of layers that run one after another share it.
struct AttentionSpace {
  WorkSpace scratch;           // [threads, thread_floats]
  int64_t thread_floats = 0;   // the most that a plan needs
  WorkSpace parts;             // states of a split call, [tiles, most_chunks, part_floats] of a plan
};

class AttentionPlan {
 public:
  // Cuts a step into work. Allocates nothing where plan and space have been as large before. The
  // space, and what the step points to, are used until the last thread has left.
  //
  // Raises IndexError if a block that will be read is not of the arena.
  void prepare(const AttentionStep& step, AttentionSpace& space);

  AttentionStep step;
  AttentionSpace* space;
  std::vector<Tile> tiles;
  std::vector<Piece> pieces;  // of a split call, in the order in which memory is read; else empty
  // Of a split call: chunks of each tile that are not done yet in the layer.
  std::unique_ptr<std::atomic<int64_t>[]> chunks_left;
  int64_t most_queries;       // of a tile
  int64_t most_chunks;        // likewise
  int threads;                // that have something to do
  int64_t units() const { return pieces.empty() ? tiles.size() : pieces.size(); }
  int64_t part_floats;        // of the state of a piece

 private:
  void cut_tiles();
  void share_out();

  int64_t counted_tiles_ = 0;  // that chunks_left has room for
};

}  // namespace stepgraph
