// Attention's two products as matrix tiles (`tiles.h`), for one chunk of positions: of queries with
// keys, and of weights with values, in words of two bf16. Scores, softmax and results are where
// `attention_math.h` has them.
//
// A sum goes over 32 numbers at a time, whatever part of them a row sees: the weights of other
// positions are 0. As long as values are finite, this changes no sum but the sign of a zero that was
// a number below 2**-126.
#pragma once

#include <algorithm>

#include "attention_math.h"
#include "tiles.h"

namespace stepgraph {

// 16 words of 16 keys to 16 rows of `out`, kBlock words apart, of a word of each key.
inline void pack_16x16(const U32x16 (&keys)[16], uint32_t* out) {
  uint32_t packed[256];
  for (int g = 0; g < 4; ++g) {
    pack_4x16({keys[4 * g], keys[4 * g + 1], keys[4 * g + 2], keys[4 * g + 3]}, packed + 16 * g);
  }
  for (int word = 0; word < 16; ++word) {
    for (int g = 0; g < 4; ++g) {
      std::memcpy(out + word * kBlock + 4 * g, packed + word % 4 * 64 + 16 * g + word / 4 * 4, 16);
    }
  }
}

// All rows of a tile.
template <class Codec>
struct TileChunk {
  ChunkRows<Codec> rows;   // from the first one; `q` is [queries][words], not packed
  int64_t queries, words;  // words of a query
  uint32_t* packed;        // packed_words(words) of work space

  const Span& seen(int64_t row) const { return rows.seen[row]; }
  float* scores(int64_t row) const { return rows.scores + row * kChunk; }
};

// Scores of the positions begin ... begin + kBlock - 1, whose keys are packed, [words][kBlock].
template <class Tiles, class Codec>
void tile_scores(const TileChunk<Codec>& chunk, int64_t begin, TileState& state) {
  const auto sees = [&](int64_t row) {
    const Span seen = {std::max(chunk.seen(row).begin, begin),
                       std::min(chunk.seen(row).end, begin + kBlock)};
    return !seen.empty();
  };
  int64_t first = 0, end = chunk.queries;  // rows that see some of them
  while (first < end && !sees(first)) ++first;
  while (first < end && !sees(end - 1)) --end;
  if (first == end) return;
  Tiles tiles(state);
  tile_product<Tiles, false>(tiles, chunk.rows.q + first * chunk.words, 4 * chunk.words, end - first,
                             chunk.packed, chunk.words, nullptr, chunk.scores(first) + begin,
                             kChunk * sizeof(float), false);
  for (int64_t j = begin; j < begin + kBlock; j += 16) {
    F32x16 scale = broadcast(chunk.rows.scale);
    if constexpr (Codec::kScaled) scale = load<F32x16>(chunk.rows.score_scales + j);
    for (int64_t row = first; row < end; ++row) {
      float* place = chunk.scores(row) + j;
      store(place, load<F32x16>(place) * scale);
    }
  }
}

// Packs the values of a span of whole blocks from dimension `dim` on, zeros for positions outside
// `used`. Meanwhile the keys that come next are brought near. Returns whether all are finite.
template <class Codec>
bool pack_values(const ChunkRows<Codec>& rows, Span span, Span used, int64_t dim, uint32_t* out) {
  using Data = typename Codec::Data;
  static constexpr Data kZeros[kBlock] = {};
  const bool whole = dim + kBlock <= rows.value_dim;
  U32x16 infinite = {};
  for (int64_t j = span.begin; j < span.end; j += 2, out += kBlock) {
    const Data* value[2] = {kZeros, kZeros};
    for (int64_t i = j; i < j + 2; ++i) {
      if (i < used.begin || i >= used.end) continue;
      value[i - j] = whole ? rows.keys[i] + rows.value_offset + dim : rows.tails[i];
      __builtin_prefetch(rows.next_keys[i] + dim);
    }
    U32x16 words[2];
    Codec::columns(value, 0, words[0], words[1]);
    for (int half = 0; half < 2; ++half) {
      store(out + 16 * half, words[half]);
      infinite |= U32x16((words[half] & 0x7f80u) == 0x7f80u) |
                  U32x16((words[half] & 0x7f800000u) == 0x7f800000u);
    }
  }
  return lane_max(bits<F32x16>(infinite & 0x3f800000u)) == 0.0f;
}

// Weights times values of rows whose weights are there, all dimensions.
template <class Tiles, class Codec>
void tile_values(const TileChunk<Codec>& chunk, Span any, Span read, TileState& state) {
  const ChunkRows<Codec>& rows = chunk.rows;
  const bool same = Codec::kScaled ||  // values of all rows, finite or not
                    std::all_of(rows.seen, rows.seen + chunk.queries, [&](const Span& seen) {
                      return seen.begin == read.begin && seen.end == read.end;
                    });
  const Span span = {any.begin / kBlock * kBlock, (any.end + kBlock - 1) / kBlock * kBlock};
  Tiles tiles(state);
  for (int64_t dim = 0; dim < rows.value_dim; dim += kBlock) {
    const auto multiply = [&](int64_t row, int64_t count) {
      tile_product<Tiles, false>(tiles, chunk.scores(row) + span.begin / 2, kChunk * sizeof(float),
                                 count, chunk.packed, (span.end - span.begin) / 2, nullptr,
                                 rows.acc + row * rows.acc_stride + dim,
                                 rows.acc_stride * sizeof(float), false);
    };
    if (pack_values(rows, span, read, dim, chunk.packed) || same) {
      multiply(0, chunk.queries);
      continue;
    }
    // 0 times an infinite value is none: each row has the values that it sees.
    for (int64_t row = 0; row < chunk.queries; ++row) {
      pack_values(rows, span, chunk.seen(row), dim, chunk.packed);
      multiply(row, 1);
    }
  }
}

// Softmax and weighted values of all rows of a tile, whose scores are there.
template <class Tiles, class Codec>
void tile_weigh(const TileChunk<Codec>& chunk, Span read, TileState& state) {
  Span any = {kChunk, 0};  // positions that some row sees
  for (int64_t row = 0; row < chunk.queries; ++row) {
    const Span seen = chunk.seen(row);
    if (!seen.empty()) any = {std::min(any.begin, seen.begin), std::max(any.end, seen.end)};
  }
  if (any.empty()) return;
  for (int64_t row = 0; row < chunk.queries; ++row) {
    const Span seen = chunk.seen(row);
    float* scores = chunk.scores(row);
    if (chunk.rows.softcap > 0.0f) cap_scores(scores, seen.begin, seen.end, chunk.rows.softcap);
    chunk.rows.partial[row] = softmax_chunk<Codec>(scores, seen, chunk.rows.value_scales);
    uint16_t* weights = reinterpret_cast<uint16_t*>(scores);
    const int64_t begin = seen.empty() ? kChunk : seen.begin;
    std::fill(weights, weights + begin, uint16_t(0));
    if (!seen.empty()) std::fill(weights + seen.end, weights + kChunk, uint16_t(0));
  }
  tile_values<Tiles>(chunk, any, read, state);
}

}  // namespace stepgraph
