// Where `attention_math.h` gets its rows from: what a thread does with one tile of a plan. The
// order of all sums is explained in `attention.h`.
#pragma once

#include <algorithm>
#include <utility>

#include "attention_tiles.h"

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
  // `scratch`: thread_floats of its own.
  Worker(const AttentionArgs<T>& args, const AttentionPlan& plan, float* scratch)
      : args_(args),
        step_(plan.step),
        groups_((step_.head_dim + kGroupElements - 1) / kGroupElements),
        width_(state_width(step_.value_dim)),
        head_elements_(step_.block_size * (step_.head_dim + (Codec::kScaled ? 2 : 0))),
        arena_(reinterpret_cast<const Data*>(args.keys)),
        value_offset_(reinterpret_cast<const Data*>(args.values) - arena_),
        scale_(args.softcap > 0.0f ? args.scale : args.scale * kLog2E) {
    const int64_t queries = plan.most_queries, state = state_floats(queries, width_);
    const auto take = [&](int64_t floats) { return std::exchange(scratch, scratch + floats); };
    packed_keys_ = reinterpret_cast<Word*>(take(packed_words(groups_ * 16)));
    tails_ = reinterpret_cast<Data*>(take(kChunk * kBlock));
    for (int64_t j = 0; j < kChunk; ++j) tail_rows_[j] = tails_ + j * kBlock;
    q_ = reinterpret_cast<Word*>(take(queries * groups_ * 64));
    scores_ = take(queries * kChunk);
    chunk_ = state_at(take(state), queries);
    running_ = state_at(take(state), queries);
    seen_ = reinterpret_cast<Span*>(take(queries * kSpanFloats));
    std::fill_n(key_rows_, 2 * kChunk, arena_);  // any address will do to prefetch
  }

  // The whole of a tile, chunk after chunk, into memory of this thread: `write` publishes it. `next`
  // is this thread's next tile, or any.
  void attend(const Tile& tile, const Tile& next) {
    const int64_t first = tile.first_chunk(), end = tile.end_chunk();
    begin({&tile, first});
    load_queries(tile);
    for (int64_t chunk = first; chunk < end; ++chunk) {
      const bool last = chunk + 1 == end;
      const Piece after = last ? Piece{&next, next.first_chunk()} : Piece{&tile, chunk + 1};
      attend_chunk({&tile, chunk}, after, chunk == first ? running_ : chunk_);
      if (chunk > first) merge_chunk(tile, chunk, chunk_);
    }
  }

  // Writes what the tile attended last gives.
  void write(const Tile& tile) { write(tile, running_); }

  // One chunk of a tile; `next` is this thread's next one, or any.
  void attend_piece(const Piece& piece, const Piece& next) {
    begin(piece);
    load_queries(*piece.tile);
    attend_chunk(piece, next, chunk_);
  }

  // Copies the state of the piece attended last to a part.
  void write_piece(const Piece& piece, float* part) const {
    const State to = state_at(part, piece.tile->queries());
    std::copy_n(chunk_.acc, piece.tile->queries() * width_, to.acc);
    std::copy_n(chunk_.partial, piece.tile->queries(), to.partial);
  }

  // `parts`: the states of all chunks of a tile, `stride` floats apart; the first one is used up.
  void write_merged(const Tile& tile, float* parts, int64_t stride) {
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
  static constexpr int64_t kGroupElements = 16 * Codec::kPerWord;

  State state_at(float* place, int64_t queries) const {
    return {reinterpret_cast<Partial*>(place + queries * width_), place};
  }

  // Finds the keys of the piece that is attended now, unless the one before did.
  void begin(const Piece& piece) {
    if (found_.tile != piece.tile || found_.chunk != piece.chunk) find_keys(piece, keys_);
  }

  // Calls visit(query row of the tile, token, query head), token after token.
  template <class Visit>
  static void visit_queries(const Tile& tile, Visit visit) {
    int64_t query = 0;
    for (int64_t token = tile.first; token < tile.first + tile.tokens; ++token) {
      for (int64_t i = 0; i < tile.heads; ++i) visit(query++, token, tile.head + i);
    }
  }

  // Calls visit(row, count) for parts of at most `most` rows, as even as they can be.
  template <class Visit>
  static void visit_parts(int64_t rows, int64_t most, Visit visit) {
    const int64_t parts = (rows + most - 1) / most;
    for (int64_t i = 0; i < parts; ++i) {
      visit(rows * i / parts, rows * (i + 1) / parts - rows * i / parts);
    }
  }

  void load_queries(const Tile& tile) {
    const bool tiles = as_tiles();
    visit_queries(tile, [&](int64_t query, int64_t token, int64_t head) {
      const T* q = args_.q + token * args_.q_strides[0] + head * args_.q_strides[1];
      for (int64_t i = 0; i < groups_; ++i) {
        const auto words = words_of<Plain<T>>(q, i * kGroupElements, step_.head_dim);
        if (tiles) store(q_ + (query * groups_ + i) * 16, words);
        else pack_query(words, q_ + (query * groups_ + i) * 64);
      }
    });
  }

  // Its keys have been found in keys_; the keys of the next piece are found and prefetched
  // meanwhile, and take their place.
  void attend_chunk(const Piece& piece, const Piece& next, State state) {
    const Tile& tile = *piece.tile;
    const int64_t start = piece.chunk * kChunk, queries = tile.queries();
    find_keys(next, next_keys_);
    if constexpr (Codec::kScaled) load_scales(piece);
    visit_queries(tile, [&](int64_t query, int64_t token, int64_t) {
      const Span seen = seen_from(step_.positions[token], step_);
      seen_[query] = {std::clamp<int64_t>(seen.begin - start, 0, kChunk),
                      std::clamp<int64_t>(seen.end - start, 0, kChunk)};
    });
    const auto rows_from = [&](int64_t row) {
      return ChunkRows<Codec>{
          q_ + row * groups_ * 64, groups_, keys_, next_keys_, value_offset_, tail_rows_,
          seen_ + row, step_.value_dim, scale_, args_.softcap, score_scales_, value_scales_,
          scores_ + row * kChunk, state.partial + row, state.acc + row * width_, width_};
    };
    const Span read = piece.read();
    if (as_tiles()) {
      attend_tiles(rows_from(0), queries, read);
      std::swap(keys_, next_keys_);
      found_ = next;
      return;
    }
    for (int64_t j = 0; j < read.end; j += kPackedPositions) {
      const Span block = {std::max(j, read.begin / 16 * 16),
                          std::min(j + kPackedPositions, (read.end + 15) / 16 * 16)};
      if (block.empty()) continue;
      pack_keys(block);
      visit_parts(queries, kScoreRows, [&](int64_t row, int64_t count) {
        Span any = {block.end, block.begin};  // what one of the rows sees
        for (int64_t i = row; i < row + count; ++i) {
          if (seen_[i].empty()) continue;
          any = {std::min(any.begin, seen_[i].begin / 16 * 16), std::max(any.end, seen_[i].end)};
        }
        any = {std::max(any.begin, block.begin), std::min(any.end, block.end)};
        if (any.empty()) return;
        score_rows(rows_from(row), count, packed_keys_ + (any.begin - block.begin) * groups_ * 16,
                   any.begin, any.end, std::make_index_sequence<kScoreRows>());
      });
    }
    copy_tails(read);
    visit_parts(queries, kTileRows, [&](int64_t row, int64_t count) {
      weigh_rows(rows_from(row), count, std::make_index_sequence<kTileRows>());
    });
    std::swap(keys_, next_keys_);
    found_ = next;
  }

  // Whether products are matrix tiles.
  bool as_tiles() const {
    return Codec::kPerWord == 2 &&
           (tile_use_ == TileUse::kProcessor || tile_use_ == TileUse::kEmulated);
  }

  // A chunk as matrix tiles. Apart from the code for vectors, which it must not change.
  __attribute__((noinline)) void attend_tiles(const ChunkRows<Codec>& rows, int64_t queries, Span read) {
    if constexpr (Codec::kPerWord == 2) {
      const TileChunk<Codec> chunk{rows, queries, groups_ * 16, packed_keys_};
      with_tiles(tile_use_, [&]<class Tiles>(std::type_identity<Tiles>) {
        for (int64_t j = read.begin / kBlock * kBlock; j < read.end; j += kBlock) {
          pack_block(j, read);
          tile_scores<Tiles>(chunk, j, tile_state_);
        }
        copy_tails(read);
        tile_weigh<Tiles>(chunk, read, tile_state_);
      });
    }
  }

  // Keys of a block of positions, one in each column. Their values come near. What `find_keys` does
  // not know of it is left alone.
  void pack_block(int64_t begin, Span read) {
    for (int64_t j = begin; j < begin + kBlock; j += 16) {
      if (j + 16 <= read.begin || j >= read.end) continue;
      for (int64_t i = 0; i < groups_; ++i) {
        U32x16 keys[16];
        for (int64_t k = 0; k < 16; ++k) {
          keys[k] = words_of<Codec>(keys_[j + k], i * kGroupElements, step_.head_dim);
          __builtin_prefetch(keys_[j + k] + i * kGroupElements + value_offset_);
        }
        pack_16x16(keys, packed_keys_ + i * 16 * kBlock + (j - begin));
      }
    }
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
    const float key_unit = scale_ * Codec::Number::kUnit, value_unit = Codec::Number::kUnit;
    visit_blocks(piece, [&](const Data* head, int64_t offset, int64_t j, int64_t count) {
      const Data* scales = head + step_.block_size * step_.head_dim + offset * 2;
      for (int64_t i = 0; i < count; ++i) {
        const Data* scale = scales + 2 * i;
        score_scales_[j + i] = from_bf16(load<uint16_t>(scale)) * key_unit;
        value_scales_[j + i] = from_bf16(load<uint16_t>(scale + value_offset_)) * value_unit;
      }
    });
  }

  // Keys of a span of whole sixteens. Their values come near.
  void pack_keys(Span span) {
    Word* out = packed_keys_;
    const int64_t whole = step_.head_dim / kGroupElements;
    for (int64_t j = span.begin; j < span.end; j += 16) {
      for (int64_t i = 0; i < whole; ++i, out += 256) {
        pack_group(j, i, out, [](const Data* key) { return Codec::words(key); });
      }
      if (whole == groups_) continue;
      const int64_t left = step_.head_dim - whole * kGroupElements;
      pack_group(j, whole, out, [&](const Data* key) { return words_of<Codec>(key, 0, left); });
      out += 256;
    }
  }

  template <class Load>
  void pack_group(int64_t j, int64_t group, Word* out, Load load) {
    const int64_t from = group * kGroupElements;
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      decltype(load(arena_)) rows[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Data* key = keys_[j + 4 * g + i] + from;
        rows[i] = load(key);
        __builtin_prefetch(key + value_offset_);
      }
      pack_4x16(rows, out + g * 16);
    }
  }

  // What is left of each value behind whole blocks, with zeros behind it.
  void copy_tails(Span read) {
    const int64_t whole = step_.value_dim / kBlock * kBlock, left = step_.value_dim - whole;
    if (left == 0) return;
    for (int64_t j = read.begin; j < read.end; ++j) {
      Data* tail = tails_ + j * kBlock;
      std::copy_n(keys_[j] + value_offset_ + whole, left, tail);
      std::fill_n(tail + left, kBlock - left, Data());
    }
  }

  // A row that sees nothing before `chunk` takes its part as it is, whatever the others saw.
  void merge_chunk(const Tile& tile, int64_t chunk, State part) {
    visit_queries(tile, [&](int64_t query, int64_t token, int64_t) {
      const Span seen = seen_from(step_.positions[token], step_);
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
      Partial partial = state.partial[query];
      const float factor = args_.sinks == nullptr
                               ? 1.0f
                               : add_sink(partial, static_cast<float>(args_.sinks[head]));
      for (int64_t dim = 0; dim < step_.value_dim; dim += kBlock) {
        const float* acc = state.acc + query * width_ + dim;
        const F32x16 sum = broadcast(partial.sum);
        T values[kBlock];
        Codec::store32(values, load<F32x16>(acc) * factor / sum,
                       load<F32x16>(acc + 16) * factor / sum);
        std::copy_n(values, std::min<int64_t>(step_.value_dim - dim, kBlock), out + dim);
      }
    });
  }

  const AttentionArgs<T>& args_;
  const AttentionStep& step_;
  int64_t groups_, width_;  // groups of 16 words of a query; floats of a result
  int64_t head_elements_;  // of one head of a block in the arena
  const Data* arena_;      // the keys
  ptrdiff_t value_offset_;  // from a key (or its scale) to its value
  float scale_;            // of scores; in units of ln 2 unless they are capped first
  const Data* key_rows_[2 * kChunk];
  const Data **keys_ = key_rows_, **next_keys_ = key_rows_ + kChunk;
  alignas(64) float score_scales_[kChunk] = {}, value_scales_[kChunk] = {};
  Word *packed_keys_, *q_;
  Data* tails_;
  const Data* tail_rows_[kChunk];
  float* scores_;
  Span* seen_;
  State chunk_, running_;
  Piece found_{nullptr, 0};  // whose keys keys_ has
  TileUse tile_use_ = tile_use();
  TileState tile_state_;
};

}  // namespace stepgraph
