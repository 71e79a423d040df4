// Paged attention for decode steps and prefill chunks alike.
//
// Work is cut into tiles: consecutive tokens of one row, times the query heads that share a kv
// head. A tile walks its row in chunks of kChunk positions. Of each chunk it makes a partial
// softmax (maximum, sum, weighted values), and partials are merged in order (the log-sum-exp merge
// of FlashAttention, arXiv 2205.14135, section 3.1). Chunks start at multiples of kChunk and every
// sum runs in the order of positions, so a token's result depends on nothing but its own row: not
// on the tile it is in, the number of tokens, or whether chunks went to several threads
// (flash-decoding), which is done when there are fewer tiles than keep the threads busy.
#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <omp.h>

#include "cpu_attention_math.h"
#include "cpu_kernels.h"

namespace stepgraph {
namespace {

constexpr int64_t kTileQueries = 48;  // query rows that share one packed chunk of keys
constexpr int64_t kBytesPerThread = 64 * 1024;  // below, a second thread costs more than it brings
constexpr int64_t kItemsPerThread = 4;  // fewer work items than this are split into chunks

struct Tile {
  int64_t first, tokens;  // tokens first ... first + tokens - 1, all of one row
  int64_t longest;        // positions that the one that sees most of them sees
  int64_t chunks() const { return (longest + kChunk - 1) / kChunk; }
};

// Cuts the tokens into tiles. What a tile will read is checked here, before any thread starts.
template <class T>
std::vector<Tile> cut_tiles(const AttentionArgs<T>& args) {
  const int64_t most = std::max<int64_t>(1, kTileQueries / (args.heads / args.kv_heads));
  std::vector<Tile> tiles;
  tiles.reserve(args.tokens);
  for (int64_t t = 0; t < args.tokens; ++t) {
    const int64_t length = args.positions[t] + 1;
    const bool joins =
        t > 0 && args.token_rows[t] == args.token_rows[t - 1] && tiles.back().tokens < most;
    if (joins) {
      tiles.back().tokens += 1;
      tiles.back().longest = std::max(tiles.back().longest, length);
    } else {
      tiles.push_back({t, 1, length});
    }
  }
  for (const Tile& tile : tiles) {
    const int64_t row = args.token_rows[tile.first];
    const int32_t* table = args.block_tables + row * args.max_blocks;
    for (int64_t i = 0; i * args.block_size < tile.longest; ++i) {
      TORCH_CHECK_INDEX(0 <= table[i] && table[i] < args.num_blocks, "block_tables[", row, ", ", i,
                        "] is ", table[i], ", the arena has ", args.num_blocks, " blocks");
    }
  }
  return tiles;
}

// One chunk of a tile for one kv head.
struct Piece {
  const Tile* tile;
  int64_t head, chunk;
};

struct Free {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Floats = std::unique_ptr<float[], Free>;

Floats allocate(int64_t count) {
  return Floats(static_cast<float*>(
      ::operator new[](static_cast<size_t>(count) * sizeof(float), std::align_val_t(64))));
}

// Softmax state of the query rows of a tile: maximum and sum of each, and its weighted values.
struct State {
  Partial* partial;  // [queries]
  float* acc;        // [queries, width]
};

// What one thread needs to work on one (tile, kv head) after another.
template <class T>
class Worker {
 public:
  Worker(const AttentionArgs<T>& args, const std::vector<Tile>& tiles)
      : args_(args),
        group_(args.heads / args.kv_heads),
        words_((args.head_dim + Element<T>::kPerWord - 1) / Element<T>::kPerWord),
        width_((args.head_dim + kBlock - 1) / kBlock * kBlock) {
    int64_t tokens = 1;
    for (const Tile& tile : tiles) tokens = std::max(tokens, tile.tokens);
    const int64_t queries = tokens * group_;
    lengths_.resize(queries);
    // Transposing writes 16 words at a time: up to 15 * kBlock words behind the last block.
    const int64_t key_words = kChunk * words_ + 16 * kBlock;
    const int64_t state = state_floats(queries);
    storage_ = allocate(key_words + queries * (words_ + kChunk) + 2 * state + 64);
    float* next = storage_.get();
    packed_keys_ = reinterpret_cast<Word*>(std::exchange(next, next + key_words));
    scores_ = std::exchange(next, next + queries * kChunk);
    chunk_ = state_at(std::exchange(next, next + state), queries);
    running_ = state_at(std::exchange(next, next + state), queries);
    q_ = reinterpret_cast<Word*>(next);
  }

  int64_t state_floats(int64_t queries) const {
    return queries * width_ + (2 * queries + 15) / 16 * 16;
  }
  State state_at(float* place, int64_t queries) const {
    return {reinterpret_cast<Partial*>(place + queries * width_), place};
  }

  // The whole of a tile, chunk after chunk.
  void attend(const Tile& tile, int64_t head) {
    const int64_t chunks = tile.chunks();
    load_queries(tile, head);
    find_keys({&tile, head, 0}, keys_);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (chunk + 1 < chunks) find_keys({&tile, head, chunk + 1}, next_keys_);
      attend_chunk({&tile, head, chunk}, chunk == 0 ? running_ : chunk_);
      if (chunk > 0) merge_chunk(tile, chunk, chunk_);
    }
    write(tile, head, running_);
  }

  // One piece into `state`, for `attend_merged` to put together; `next` is this thread's next one.
  void attend_piece(const Piece& piece, const Piece& next, State state) {
    load_queries(*piece.tile, piece.head);
    find_keys(piece, keys_);
    find_keys(next, next_keys_);
    attend_chunk(piece, state);
  }

  // `parts`: the states of all chunks of a tile, `stride` floats apart; the first one is used up.
  void attend_merged(const Tile& tile, int64_t head, float* parts, int64_t stride) {
    const int64_t queries = tile.tokens * group_;
    const State own = std::exchange(running_, state_at(parts, queries));
    for (int64_t chunk = 1; chunk < tile.chunks(); ++chunk) {
      merge_chunk(tile, chunk, state_at(parts + chunk * stride, queries));
    }
    write(tile, head, running_);
    running_ = own;
  }

 private:
  using Word = typename Element<T>::Word;

  void load_queries(const Tile& tile, int64_t head) {
    for (int64_t query = 0; query < tile.tokens * group_; ++query) {
      const T* q = args_.q + (tile.first + query / group_) * args_.q_strides[0] +
                   (head * group_ + query % group_) * args_.q_strides[1];
      for (int64_t word = 0; word < words_; word += 16) {
        const auto words = words_of(q, word * Element<T>::kPerWord, args_.head_dim);
        std::memcpy(q_ + query * words_ + word, &words,
                    std::min<int64_t>(words_ - word, 16) * sizeof(Word));
      }
    }
  }

  // Its keys have been found in keys_; those in next_keys_ are brought near meanwhile, and take
  // their place.
  void attend_chunk(const Piece& piece, State state) {
    const Tile& tile = *piece.tile;
    const int64_t start = piece.chunk * kChunk;
    pack_keys(std::min<int64_t>(tile.longest - start, kChunk));
    const int64_t queries = tile.tokens * group_;
    for (int64_t query = 0; query < queries; ++query) {
      const int64_t length = args_.positions[tile.first + query / group_] + 1;
      lengths_[query] = std::clamp<int64_t>(length - start, 0, kChunk);
    }
    const int64_t parts = (queries + kTileRows - 1) / kTileRows;
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t from = queries * i / parts, to = queries * (i + 1) / parts;
      const ChunkRows<T> rows{q_ + from * words_, packed_keys_, words_, keys_, next_keys_,
                              args_.values - args_.keys, &lengths_[from], args_.head_dim,
                              args_.scale, scores_ + from * kChunk, state.partial + from,
                              state.acc + from * width_, width_};
      attend_rows(rows, to - from, std::make_index_sequence<kTileRows>());
    }
    std::swap(keys_, next_keys_);
  }

  // Where the keys of each position of a piece lie. Up to a multiple of 16 the last one is
  // repeated: its scores are computed and not looked at, and stale memory is not read.
  void find_keys(const Piece& piece, const T** keys) {
    const int32_t* table =
        args_.block_tables + args_.token_rows[piece.tile->first] * args_.max_blocks;
    const int64_t start = piece.chunk * kChunk;
    const int64_t count = std::min<int64_t>(piece.tile->longest - start, kChunk);
    for (int64_t j = 0; j < count;) {
      const int64_t block = (start + j) / args_.block_size, offset = (start + j) % args_.block_size;
      const int64_t end = std::min(count, j + args_.block_size - offset);
      const T* key = args_.keys + ((table[block] * args_.kv_heads + piece.head) *
                                       args_.block_size + offset) * args_.head_dim;
      for (; j < end; ++j, key += args_.head_dim) keys[j] = key;
    }
    for (int64_t j = count; j % 16 != 0; ++j) keys[j] = keys[count - 1];
  }

  // Keys as a linear layer's packed weight: [positions / 32][words][32]. Values come near.
  void pack_keys(int64_t count) {
    const ptrdiff_t value_offset = args_.values - args_.keys;
    for (int64_t j = 0; j < count; j += 16) {
      const T* const* ahead = keys_ + std::min<int64_t>(j + 16, kChunk - 16);
      Word* block = packed_keys_ + j / kBlock * words_ * kBlock + j % kBlock;
      for (int64_t word = 0; word < words_; word += 16) {
        const int64_t from = word * Element<T>::kPerWord;
        decltype(words_of(args_.keys, 0, 0)) rows[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          rows[i] = words_of(keys_[j + i], from, args_.head_dim);
          __builtin_prefetch(ahead[i] + from);
          __builtin_prefetch(keys_[j + i] + value_offset + from);
        }
        transpose_store(rows, block + word * kBlock, kBlock);
      }
    }
  }

  void merge_chunk(const Tile& tile, int64_t chunk, State part) {
    for (int64_t query = 0; query < tile.tokens * group_; ++query) {
      if (args_.positions[tile.first + query / group_] < chunk * kChunk) continue;
      merge(running_.partial[query], running_.acc + query * width_, part.partial[query],
            part.acc + query * width_, width_);
    }
  }

  void write(const Tile& tile, int64_t head, State state) {
    for (int64_t query = 0; query < tile.tokens * group_; ++query) {
      T* out = args_.out + ((tile.first + query / group_) * args_.heads + head * group_ +
                            query % group_) * args_.head_dim;
      for (int64_t dim = 0; dim < args_.head_dim; dim += kBlock) {
        const float* acc = state.acc + query * width_ + dim;
        const F32x16 sum = broadcast(state.partial[query].sum);
        T values[kBlock];
        Element<T>::store32(values, load<F32x16>(acc) / sum, load<F32x16>(acc + 16) / sum);
        std::copy_n(values, std::min<int64_t>(args_.head_dim - dim, kBlock), out + dim);
      }
    }
  }

  const AttentionArgs<T>& args_;
  int64_t group_, words_, width_;  // query heads a kv head; words of a query; floats of a result
  Floats storage_;
  std::vector<int64_t> lengths_;
  std::array<const T*, kChunk> key_rows_[2] = {};
  const T **keys_ = key_rows_[0].data(), **next_keys_ = key_rows_[1].data();
  Word *packed_keys_, *q_;
  float* scores_;
  State chunk_, running_;
};

template <class T>
void write_slots(const AttentionArgs<T>& args, int64_t head) {
  for (int64_t t = 0; t < args.tokens; ++t) {
    const int64_t block = args.slots[t] / args.block_size, offset = args.slots[t] % args.block_size;
    const int64_t at =
        ((block * args.kv_heads + head) * args.block_size + offset) * args.head_dim;
    const T* k = args.k + t * args.k_strides[0] + head * args.k_strides[1];
    const T* v = args.v + t * args.v_strides[0] + head * args.v_strides[1];
    std::copy_n(k, args.head_dim, args.keys + at);
    std::copy_n(v, args.head_dim, args.values + at);
  }
}

}  // namespace

template <class T>
void paged_attention(const AttentionArgs<T>& args) {
  const std::vector<Tile> tiles = cut_tiles(args);
  const int64_t heads = args.kv_heads, items = static_cast<int64_t>(tiles.size()) * heads;
  int64_t positions = 0, most_chunks = 1, most_tokens = 1;
  for (const Tile& tile : tiles) {
    positions += tile.longest;
    most_chunks = std::max(most_chunks, tile.chunks());
    most_tokens = std::max(most_tokens, tile.tokens);
  }
  const int64_t bytes = positions * heads * args.head_dim * 2 * static_cast<int64_t>(sizeof(T));
  const int64_t useful = std::min(bytes / kBytesPerThread, items * most_chunks);
  const int threads = static_cast<int>(std::clamp<int64_t>(useful, 1, args.threads));
  const bool split = threads > 1 && most_chunks > 1 && items < threads * kItemsPerThread;

  std::vector<Piece> pieces;  // of a split call, in the order in which memory is read
  for (const Tile& tile : tiles) {
    for (int64_t chunk = 0; split && chunk < tile.chunks(); ++chunk) {
      for (int64_t head = 0; head < heads; ++head) pieces.push_back({&tile, head, chunk});
    }
  }
  int64_t stride = 0;
  Floats parts;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    // A head at a time, so that of two writes to one slot (padding) the later token's stays.
#pragma omp for schedule(static)
    for (int64_t head = 0; head < heads; ++head) write_slots(args, head);

    Worker<T> worker(args, tiles);
    if (!split) {
#pragma omp for schedule(dynamic)
      for (int64_t i = items - 1; i >= 0; --i) worker.attend(tiles[i / heads], i % heads);
    } else {
#pragma omp single
      {
        stride = worker.state_floats(most_tokens * (args.heads / heads));
        parts = allocate(items * most_chunks * stride);
      }
      const int64_t index = omp_get_thread_num(), count = omp_get_num_threads();
      const int64_t end = pieces.size() * (index + 1) / count;
      for (int64_t i = pieces.size() * index / count; i < end; ++i) {
        const Piece& piece = pieces[i];
        const int64_t item = (piece.tile - tiles.data()) * heads + piece.head;
        float* part = parts.get() + (item * most_chunks + piece.chunk) * stride;
        worker.attend_piece(piece, pieces[std::min(i + 1, end - 1)],
                            worker.state_at(part, piece.tile->tokens * (args.heads / heads)));
      }
#pragma omp barrier
#pragma omp for schedule(static)
      for (int64_t i = 0; i < items; ++i) {
        worker.attend_merged(tiles[i / heads], i % heads, parts.get() + i * most_chunks * stride,
                             stride);
      }
    }
  }
}

template void paged_attention(const AttentionArgs<c10::BFloat16>&);
template void paged_attention(const AttentionArgs<c10::Half>&);
template void paged_attention(const AttentionArgs<float>&);

}  // namespace stepgraph
