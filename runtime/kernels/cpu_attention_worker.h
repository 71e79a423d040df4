// Where `cpu_attention_math.h` gets its rows from: what a thread does with one tile of a plan. The order of all sums is explained in `cpu_attention.h`.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "cpu_attention_math.h"

namespace stepgraph {

// Softmax state of the query rows of a tile: maximum and sum of each, and its weighted values.
struct State {
  Partial* partial;  // [queries]
  float* acc;        // [queries, width]
};

// What one thread needs to work on one tile after another.
template <class T, class Codec>
class Worker {
 public:
  // `scratch`: plan.scratch_floats floats of its own.
  Worker(const AttentionArgs<T>& args, const AttentionPlan& plan, float* scratch)
      : args_(args),
        step_(plan.step),
        words_((step_.head_dim + Codec::kPerWord - 1) / Codec::kPerWord),
        width_(state_width(step_.value_dim)),
        head_elements_(step_.block_size * (step_.head_dim + (Codec::kScaled ? 2 : 0))),
        arena_(reinterpret_cast<const Data*>(args.keys)),
        value_offset_(reinterpret_cast<const Data*>(args.values) - arena_) {
    const int64_t queries = plan.most_queries, state = state_floats(queries, width_);
    const auto take = [&](int64_t floats) { return std::exchange(scratch, scratch + floats); };
    packed_keys_ = reinterpret_cast<Word*>(take(packed_key_words(words_)));
    scores_ = take(queries * kChunk);
    chunk_ = state_at(take(state), queries);
    running_ = state_at(take(state), queries);
    seen_ = reinterpret_cast<Span*>(take(queries * kSpanFloats));
    q_ = reinterpret_cast<Word*>(take(queries * words_));
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
        const auto words = words_of<Plain<T>>(q, word * Codec::kPerWord, step_.head_dim);
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
      const Span seen = seen_from(step_.positions[token], step_.window);
      seen_[query] = {std::clamp<int64_t>(seen.begin - start, 0, kChunk),
                      std::clamp<int64_t>(seen.end - start, 0, kChunk)};
    });
    const int64_t parts = (queries + kTileRows - 1) / kTileRows;
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t from = queries * i / parts, to = queries * (i + 1) / parts;
      const ChunkRows<Codec> rows{
          q_ + from * words_, packed_keys_, words_, keys_, next_keys_, value_offset_, &seen_[from],
          step_.value_dim, args_.scale, args_.softcap, score_scales_, value_scales_,
          scores_ + from * kChunk, state.partial + from, state.acc + from * width_, width_};
      attend_rows(rows, to - from, std::make_index_sequence<kTileRows>());
    }
    std::swap(keys_, next_keys_);
  }

  // Calls visit(head of a block in the arena, offset, j, count) for each run of positions
  // j ... j + count - 1 of the piece's chunk that lie in one block, from `offset` on.
  template <class Visit>
  void visit_blocks(const Piece& piece, Visit visit) const {
    const int64_t row = step_.token_rows[piece.tile->first], start = piece.chunk * kChunk;
    const int32_t* table = step_.block_tables + row * step_.max_blocks;
    const Span read = piece.read();
    for (int64_t j = read.begin; j < read.end;) {
      const int64_t column = (start + j) / step_.block_size;
      const int64_t offset = (start + j) % step_.block_size;
      const int64_t count = std::min(read.end - j, step_.block_size - offset);
      const int64_t head = table[column] * step_.kv_heads + piece.tile->kv_head;
      visit(arena_ + head * head_elements_, offset, j, count);
      j += count;
    }
  }

  // Where the keys of each position of a piece lie. Down and up to multiples of 16 the nearest one
  // is repeated: its scores are computed and not looked at, and memory that is not the tile's own
  // is not read.
  void find_keys(const Piece& piece, const Data** keys) const {
    visit_blocks(piece, [&](const Data* head, int64_t offset, int64_t j, int64_t count) {
      const Data* key = head + offset * step_.head_dim;
      for (int64_t i = j; i < j + count; ++i, key += step_.head_dim) keys[i] = key;
      if constexpr (Codec::kScaled) {
        const Data* scales = head + step_.block_size * step_.head_dim + offset * 2;
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
      const Data* scales = head + step_.block_size * step_.head_dim + offset * 2;
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
          rows[i] = words_of<Codec>(keys_[j + i], from, step_.head_dim);
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
      const Span seen = seen_from(step_.positions[token], step_.window);
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
      T* out = args_.out + (token * step_.heads + head) * step_.value_dim;
      for (int64_t dim = 0; dim < step_.value_dim; dim += kBlock) {
        const float* acc = state.acc + query * width_ + dim;
        const F32x16 sum = broadcast(state.partial[query].sum);
        T values[kBlock];
        Codec::store32(values, load<F32x16>(acc) / sum, load<F32x16>(acc + 16) / sum);
        std::copy_n(values, std::min<int64_t>(step_.value_dim - dim, kBlock), out + dim);
      }
    });
  }

  const AttentionArgs<T>& args_;
  const AttentionStep& step_;
  int64_t words_, width_;  // words of a query; floats of a result
  int64_t head_elements_;  // of one head of a block in the arena
  const Data* arena_;      // the keys
  ptrdiff_t value_offset_;  // from a key (or its scale) to its value
  std::array<const Data*, kChunk> key_rows_[2] = {};
  const Data **keys_ = key_rows_[0].data(), **next_keys_ = key_rows_[1].data();
  alignas(64) float score_scales_[kChunk] = {}, value_scales_[kChunk] = {};
  Word *packed_keys_, *q_;
  float* scores_;
  Span* seen_;
  State chunk_, running_;
};

}  // namespace stepgraph
