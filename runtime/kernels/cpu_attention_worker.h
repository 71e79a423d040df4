// Where `cpu_attention_math.h` gets its rows from: the tiles a call is cut into, and what a thread
// does with one. The order of all sums is explained in `cpu_attention.h`.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "cpu_attention_math.h"
#include "cpu_kernels.h"

namespace stepgraph {

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

// The positions that a token at `position` sees.
inline Span seen_from(int64_t position, int64_t window) {
  return {window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0, position + 1};
}

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

struct Free {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Floats = std::unique_ptr<float[], Free>;

inline Floats allocate(int64_t count) {
  return Floats(static_cast<float*>(
      ::operator new[](static_cast<size_t>(count) * sizeof(float), std::align_val_t(64))));
}

// Softmax state of the query rows of a tile: maximum and sum of each, and its weighted values.
struct State {
  Partial* partial;  // [queries]
  float* acc;        // [queries, width]
};

// Floats of a row of weighted values, and of the state of `queries` rows of that width.
inline int64_t state_width(int64_t value_dim) { return (value_dim + kBlock - 1) / kBlock * kBlock; }
inline int64_t state_floats(int64_t queries, int64_t width) {
  return queries * width + (2 * queries + 15) / 16 * 16;
}

// What one thread needs to work on one tile after another.
template <class T, class Codec>
class Worker {
 public:
  Worker(const AttentionArgs<T>& args, const std::vector<Tile>& tiles)
      : args_(args),
        words_((args.head_dim + Codec::kPerWord - 1) / Codec::kPerWord),
        width_(state_width(args.value_dim)),
        head_elements_(args.block_size * (args.head_dim + (Codec::kScaled ? 2 : 0))),
        arena_(reinterpret_cast<const Data*>(args.keys)),
        value_offset_(reinterpret_cast<const Data*>(args.values) - arena_) {
    int64_t queries = 1;
    for (const Tile& tile : tiles) queries = std::max(queries, tile.queries());
    seen_.resize(queries);
    // Transposing writes 16 words at a time: up to 15 * kBlock words behind the last block.
    const int64_t key_words = kChunk * words_ + 16 * kBlock;
    const int64_t state = state_floats(queries, width_);
    storage_ = allocate(key_words + queries * (words_ + kChunk) + 2 * state + 64);
    float* next = storage_.get();
    // Keys are packed 16 at a time and scored 32 at a time: what is computed with the other half is
    // not looked at, but it is to be a number.
    std::fill_n(next, key_words, 0.0f);
    packed_keys_ = reinterpret_cast<Word*>(std::exchange(next, next + key_words));
    scores_ = std::exchange(next, next + queries * kChunk);
    chunk_ = state_at(std::exchange(next, next + state), queries);
    running_ = state_at(std::exchange(next, next + state), queries);
    q_ = reinterpret_cast<Word*>(next);
  }

  State state_at(float* place, int64_t queries) const {
    return {reinterpret_cast<Partial*>(place + queries * width_), place};
  }

  // The whole of a tile, chunk after chunk.
  void attend(const Tile& tile) {
    const int64_t first = tile.first_chunk(), end = tile.end_chunk();
    load_queries(tile);
    find_keys({&tile, first}, keys_);
    for (int64_t chunk = first; chunk < end; ++chunk) {
      if (chunk + 1 < end) find_keys({&tile, chunk + 1}, next_keys_);
      attend_chunk({&tile, chunk}, chunk == first ? running_ : chunk_);
      if (chunk > first) merge_chunk(tile, chunk, chunk_);
    }
    write(tile, running_);
  }

  // One piece into `state`, for `attend_merged` to put together; `next` is this thread's next one.
  void attend_piece(const Piece& piece, const Piece& next, State state) {
    load_queries(*piece.tile);
    find_keys(piece, keys_);
    find_keys(next, next_keys_);
    attend_chunk(piece, state);
  }

  // `parts`: the states of all chunks of a tile, `stride` floats apart; the first one is used up.
  void attend_merged(const Tile& tile, float* parts, int64_t stride) {
    const State own = std::exchange(running_, state_at(parts, tile.queries()));
    for (int64_t i = 1; i < tile.chunks(); ++i) {
      merge_chunk(tile, tile.first_chunk() + i, state_at(parts + i * stride, tile.queries()));
    }
    write(tile, running_);
    running_ = own;
  }

 private:
  using Data = typename Codec::Data;
  using Word = typename Codec::Word;

  // Calls visit(query row of the tile, token, query head), token after token.
  template <class Visit>
  static void visit_queries(const Tile& tile, Visit visit) {
    int64_t query = 0;
    for (int64_t token = tile.first; token < tile.first + tile.tokens; ++token) {
      for (int64_t i = 0; i < tile.heads; ++i) visit(query++, token, tile.head + i);
    }
  }

  void load_queries(const Tile& tile) {
    visit_queries(tile, [&](int64_t query, int64_t token, int64_t head) {
      const T* q = args_.q + token * args_.q_strides[0] + head * args_.q_strides[1];
      for (int64_t word = 0; word < words_; word += 16) {
        const auto words = words_of<Plain<T>>(q, word * Codec::kPerWord, args_.head_dim);
        std::memcpy(q_ + query * words_ + word, &words,
                    std::min<int64_t>(words_ - word, 16) * sizeof(Word));
      }
    });
  }

  // Its keys have been found in keys_; those in next_keys_ are brought near meanwhile, and take
  // their place.
  void attend_chunk(const Piece& piece, State state) {
    const Tile& tile = *piece.tile;
    const int64_t start = piece.chunk * kChunk, queries = tile.queries();
    pack_keys(piece.read());
    if constexpr (Codec::kScaled) load_scales(piece);
    visit_queries(tile, [&](int64_t query, int64_t token, int64_t) {
      const Span seen = seen_from(args_.positions[token], args_.window);
      seen_[query] = {std::clamp<int64_t>(seen.begin - start, 0, kChunk),
                      std::clamp<int64_t>(seen.end - start, 0, kChunk)};
    });
    const int64_t parts = (queries + kTileRows - 1) / kTileRows;
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t from = queries * i / parts, to = queries * (i + 1) / parts;
      const ChunkRows<Codec> rows{
          q_ + from * words_, packed_keys_, words_, keys_, next_keys_, value_offset_, &seen_[from],
          args_.value_dim, args_.scale, args_.softcap, score_scales_, value_scales_,
          scores_ + from * kChunk, state.partial + from, state.acc + from * width_, width_};
      attend_rows(rows, to - from, std::make_index_sequence<kTileRows>());
    }
    std::swap(keys_, next_keys_);
  }

  // Calls visit(head of a block in the arena, offset, j, count) for each run of positions
  // j ... j + count - 1 of the piece's chunk that lie in one block, from `offset` on.
  template <class Visit>
  void visit_blocks(const Piece& piece, Visit visit) const {
    const int64_t row = args_.token_rows[piece.tile->first], start = piece.chunk * kChunk;
    const int32_t* table = args_.block_tables + row * args_.max_blocks;
    const Span read = piece.read();
    for (int64_t j = read.begin; j < read.end;) {
      const int64_t column = (start + j) / args_.block_size;
      const int64_t offset = (start + j) % args_.block_size;
      const int64_t count = std::min(read.end - j, args_.block_size - offset);
      const int64_t head = table[column] * args_.kv_heads + piece.tile->kv_head;
      visit(arena_ + head * head_elements_, offset, j, count);
      j += count;
    }
  }

  // Where the keys of each position of a piece lie. Down and up to multiples of 16 the nearest one
  // is repeated: its scores are computed and not looked at, and memory that is not the tile's own
  // is not read.
  void find_keys(const Piece& piece, const Data** keys) const {
    visit_blocks(piece, [&](const Data* head, int64_t offset, int64_t j, int64_t count) {
      const Data* key = head + offset * args_.head_dim;
      for (int64_t i = j; i < j + count; ++i, key += args_.head_dim) keys[i] = key;
      if constexpr (Codec::kScaled) {
        const Data* scales = head + args_.block_size * args_.head_dim + offset * 2;
        __builtin_prefetch(scales);
        __builtin_prefetch(scales + value_offset_);
      }
    });
    const Span read = piece.read();
    for (int64_t j = read.begin / 16 * 16; j < read.begin; ++j) keys[j] = keys[read.begin];
    for (int64_t j = read.end; j % 16 != 0; ++j) keys[j] = keys[read.end - 1];
  }

  void load_scales(const Piece& piece) {
    const float key_unit = args_.scale * Codec::Number::kUnit, value_unit = Codec::Number::kUnit;
    visit_blocks(piece, [&](const Data* head, int64_t offset, int64_t j, int64_t count) {
      const Data* scales = head + args_.block_size * args_.head_dim + offset * 2;
      for (int64_t i = 0; i < count; ++i) {
        const Data* scale = scales + 2 * i;
        score_scales_[j + i] = from_bf16(load<uint16_t>(scale)) * key_unit;
        value_scales_[j + i] = from_bf16(load<uint16_t>(scale + value_offset_)) * value_unit;
      }
    });
  }

  // Keys as a linear layer's packed weight: [positions / 32][words][32]. Values come near.
  void pack_keys(Span read) {
    for (int64_t j = read.begin / 16 * 16; j < read.end; j += 16) {
      const Data* const* ahead = keys_ + std::min<int64_t>(j + 16, kChunk - 16);
      Word* block = packed_keys_ + j / kBlock * words_ * kBlock + j % kBlock;
      for (int64_t word = 0; word < words_; word += 16) {
        const int64_t from = word * Codec::kPerWord;
        decltype(words_of<Codec>(arena_, 0, 0)) rows[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          rows[i] = words_of<Codec>(keys_[j + i], from, args_.head_dim);
          __builtin_prefetch(ahead[i] + from);
          __builtin_prefetch(keys_[j + i] + value_offset_ + from);
        }
        transpose_store(rows, block + word * kBlock, kBlock);
      }
    }
  }

  // A row that sees nothing before `chunk` takes its part as it is, whatever the others saw.
  void merge_chunk(const Tile& tile, int64_t chunk, State part) {
    visit_queries(tile, [&](int64_t query, int64_t token, int64_t) {
      const Span seen = seen_from(args_.positions[token], args_.window);
      if (seen.end <= chunk * kChunk || seen.begin >= (chunk + 1) * kChunk) return;
      float* acc = running_.acc + query * width_;
      const float* next = part.acc + query * width_;
      if (seen.begin >= chunk * kChunk) {
        running_.partial[query] = part.partial[query];
        std::copy_n(next, width_, acc);
      } else {
        merge(running_.partial[query], acc, part.partial[query], next, width_);
      }
    });
  }

  void write(const Tile& tile, State state) {
    visit_queries(tile, [&](int64_t query, int64_t token, int64_t head) {
      T* out = args_.out + (token * args_.heads + head) * args_.value_dim;
      for (int64_t dim = 0; dim < args_.value_dim; dim += kBlock) {
        const float* acc = state.acc + query * width_ + dim;
        const F32x16 sum = broadcast(state.partial[query].sum);
        T values[kBlock];
        Codec::store32(values, load<F32x16>(acc) / sum, load<F32x16>(acc + 16) / sum);
        std::copy_n(values, std::min<int64_t>(args_.value_dim - dim, kBlock), out + dim);
      }
    });
  }

  const AttentionArgs<T>& args_;
  int64_t words_, width_;  // words of a query; floats of a result
  int64_t head_elements_;  // of one head of a block in the arena
  const Data* arena_;      // the keys
  ptrdiff_t value_offset_;  // from a key (or its scale) to its value
  Floats storage_;
  std::vector<Span> seen_;
  std::array<const Data*, kChunk> key_rows_[2] = {};
  const Data **keys_ = key_rows_[0].data(), **next_keys_ = key_rows_[1].data();
  alignas(64) float score_scales_[kChunk] = {}, value_scales_[kChunk] = {};
  Word *packed_keys_, *q_;
  float* scores_;
  State chunk_, running_;
};

}  // namespace stepgraph
