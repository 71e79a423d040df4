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
// With a sliding window a tile begins at the first position that one of its tokens sees. What lies
// before a token's own window is left out of its sums like what lies behind it: by bounds, never by
// a factor of 0.
#pragma once

#include <algorithm>
#include <vector>

#include <c10/util/Exception.h>
#include <omp.h>

#include "cpu_attention_worker.h"
#include "cpu_kernels.h"

namespace stepgraph {

constexpr int64_t kTileQueries = 48;  // query rows that share one packed chunk of keys
constexpr int64_t kMostHeads = 64;    // query heads of a tile; more of a group go to several
constexpr int64_t kBytesPerThread = 64 * 1024;  // below, a second thread costs more than it brings
constexpr int64_t kItemsPerThread = 4;  // fewer tiles than this are split into chunks
// A split call keeps the state of every chunk of every tile until all are there. If that took more
// than this it is not split: the memory plan leaves 64 MiB for such work space, and no more.
constexpr int64_t kMostSplitBytes = 32 << 20;

// Tiles of one kv head.
inline int64_t head_parts(int64_t group) { return (group + kMostHeads - 1) / kMostHeads; }

// Cuts the tokens into tiles; all heads of some tokens lie together. What a tile will read is
// checked here, before any thread starts.
template <class T>
std::vector<Tile> cut_tiles(const AttentionArgs<T>& args) {
  const int64_t group = args.heads / args.kv_heads, parts = head_parts(group);
  const int64_t most = std::max<int64_t>(1, kTileQueries / group);
  std::vector<Tile> tiles;
  tiles.reserve(args.tokens * args.kv_heads * parts);
  for (int64_t first = 0, tokens; first < args.tokens; first += tokens) {
    const int64_t row = args.token_rows[first];
    Span seen = seen_from(args.positions[first], args.window);
    for (tokens = 1; tokens < most && first + tokens < args.tokens &&
                     args.token_rows[first + tokens] == row; ++tokens) {
      const Span own = seen_from(args.positions[first + tokens], args.window);
      seen = {std::min(seen.begin, own.begin), std::max(seen.end, own.end)};
    }
    const int32_t* table = args.block_tables + row * args.max_blocks;
    for (int64_t i = seen.begin / args.block_size; i * args.block_size < seen.end; ++i) {
      TORCH_CHECK_INDEX(0 <= table[i] && table[i] < args.num_blocks, "block_tables[", row, ", ", i,
                        "] is ", table[i], ", the arena has ", args.num_blocks, " blocks");
    }
    for (int64_t kv_head = 0; kv_head < args.kv_heads; ++kv_head) {
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t from = group * part / parts, to = group * (part + 1) / parts;
        tiles.push_back({first, tokens, seen.begin, seen.end, kv_head, kv_head * group + from,
                         to - from});
      }
    }
  }
  return tiles;
}

template <class T, class Codec>
void write_slots(const AttentionArgs<T>& args, int64_t head) {
  const auto put = [&](const T* x, uint8_t* side, int64_t slot) {
    const int64_t index = slot / args.block_size * args.kv_heads + head;
    const int64_t offset = slot % args.block_size, d = args.head_dim;
    if constexpr (Codec::kScaled) {
      uint8_t* place = side + index * args.block_size * (d + 2);
      quantise<typename Codec::Number>(x, d, place + offset * d,
                                       place + args.block_size * d + offset * 2);
    } else {
      std::copy_n(x, d, reinterpret_cast<T*>(side) + (index * args.block_size + offset) * d);
    }
  };
  for (int64_t t = 0; t < args.tokens; ++t) {
    put(args.k + t * args.k_strides[0] + head * args.k_strides[1], args.keys, args.slots[t]);
    if (args.v == nullptr) continue;
    put(args.v + t * args.v_strides[0] + head * args.v_strides[1], args.values, args.slots[t]);
  }
}

template <class T, class Codec>
void attend_paged(const AttentionArgs<T>& args) {
  const std::vector<Tile> tiles = cut_tiles(args);
  const int64_t heads = args.kv_heads, items = static_cast<int64_t>(tiles.size());
  const int64_t together = heads * head_parts(args.heads / heads);  // tiles of the same tokens
  int64_t positions = 0, most_chunks = 1, most_queries = 1;
  for (const Tile& tile : tiles) {
    // As often as rows of queries pass over what is read.
    positions += (tile.end - tile.begin) * ((tile.queries() + kTileRows - 1) / kTileRows);
    most_chunks = std::max(most_chunks, tile.chunks());
    most_queries = std::max(most_queries, tile.queries());
  }
  // Work in bytes of the model's type; quantised ones are not decoded faster than they are counted.
  const int64_t bytes = positions * args.head_dim * 2 * static_cast<int64_t>(sizeof(T));
  const int64_t useful = std::min(bytes / kBytesPerThread, items * most_chunks);
  const int threads = static_cast<int>(std::clamp<int64_t>(useful, 1, args.threads));
  const int64_t stride = state_floats(most_queries, state_width(args.value_dim));
  const int64_t part_floats = items * most_chunks * stride;
  const bool split = threads > 1 && most_chunks > 1 && items < threads * kItemsPerThread &&
                     part_floats * static_cast<int64_t>(sizeof(float)) <= kMostSplitBytes;

  std::vector<Piece> pieces;  // of a split call, in the order in which memory is read
  for (int64_t i = 0; split && i < items; i += together) {
    for (int64_t chunk = tiles[i].first_chunk(); chunk < tiles[i].end_chunk(); ++chunk) {
      for (int64_t j = i; j < i + together; ++j) pieces.push_back({&tiles[j], chunk});
    }
  }
  // Here, where a failure can still be told to the caller.
  const Floats parts = split ? allocate(part_floats) : nullptr;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    // A head at a time, so that of two writes to one slot (padding) the later token's stays.
#pragma omp for schedule(static)
    for (int64_t head = 0; head < heads; ++head) write_slots<T, Codec>(args, head);

    Worker<T, Codec> worker(args, tiles);
    if (!split) {
#pragma omp for schedule(dynamic)
      for (int64_t i = items - 1; i >= 0; --i) worker.attend(tiles[i]);
    } else {
      const int64_t index = omp_get_thread_num(), count = omp_get_num_threads();
      const int64_t end = pieces.size() * (index + 1) / count;
      for (int64_t i = pieces.size() * index / count; i < end; ++i) {
        const Piece& piece = pieces[i];
        const int64_t place = (piece.tile - tiles.data()) * most_chunks + piece.chunk -
                              piece.tile->first_chunk();
        worker.attend_piece(piece, pieces[std::min(i + 1, end - 1)],
                            worker.state_at(parts.get() + place * stride, piece.tile->queries()));
      }
#pragma omp barrier
#pragma omp for schedule(static)
      for (int64_t i = 0; i < items; ++i) {
        worker.attend_merged(tiles[i], parts.get() + i * most_chunks * stride, stride);
      }
    }
  }
}

// Defined in a unit for each storage, which the compiler works on at the same time.
template <class T>
void attend_int8(const AttentionArgs<T>& args);
template <class T>
void attend_fp8(const AttentionArgs<T>& args);

}  // namespace stepgraph
