// The arithmetic of `attention.h` for one chunk of positions: scores, softmax, weighted values,
// and the merge of two chunks. Everything here sees rows; blocks and threads are not its concern.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "attention_plan.h"
#include "exp.h"
#include "storage.h"

namespace stepgraph {

// softcap * tanh(s / softcap) in units of ln 2, in place.
__attribute__((noinline)) inline void cap_scores(float* scores, int64_t begin, int64_t end,
                                                 float softcap) {
  for (int64_t j = begin / 16 * 16; j < end; j += 16) {
    const F32x16 x = load<F32x16>(scores + j) / broadcast(softcap);
    store(scores + j, tanh_of(x) * (softcap * kLog2E));
  }
}

struct Partial {
  float maximum, sum;
};

// The weights 2**(score - maximum) of the seen ones of kChunk scores, in the place of the scores: a
// word each, or a word of two bf16 for each pair of positions. What is not seen gets weight 0 in
// the blocks of kBlock that hold something seen; other blocks are left alone. With a scaled codec
// each weight is multiplied by its entry of `value_scales`, the sum is not: a weight of 0 becomes
// NaN by a scale that is not finite, and is not to be used.
template <class Codec>
__attribute__((noinline)) Partial softmax_chunk(float* scores, Span seen,
                                                const float* value_scales) {
  if (seen.empty()) return {kMinusInfinity, 0.0f};
  const I32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t begin = seen.begin / kBlock * kBlock;
  const int64_t end = (seen.end + kBlock - 1) / kBlock * kBlock;
  const auto hide = [&](int64_t from, int64_t to) {  // what is not seen of from ... to - 1
    for (int64_t j = from; j < to; j += 16) {
      const I32x16 position = lane + static_cast<int32_t>(j);
      const I32x16 is_seen = (position >= static_cast<int32_t>(seen.begin)) &
                             (position < static_cast<int32_t>(seen.end));
      store(scores + j, is_seen ? load<F32x16>(scores + j) : (F32x16{} + kMinusInfinity));
    }
  };
  if (seen.begin != begin) hide(begin, begin + kBlock);
  if (seen.end != end) hide(end - kBlock, end);
  F32x16 lane_maximum = F32x16{} + kMinusInfinity;
  for (int64_t j = begin; j < end; j += 16) {
    const F32x16 value = load<F32x16>(scores + j);
    lane_maximum = value > lane_maximum ? value : lane_maximum;
  }
  const float maximum = lane_max(lane_maximum);
  F32x16 sum = {};
  for (int64_t j = begin; j < end; j += kBlock) {
    F32x16 first = exp2_nonpositive(load<F32x16>(scores + j) - maximum);
    F32x16 second = exp2_nonpositive(load<F32x16>(scores + j + 16) - maximum);
    sum = sum + first + second;
    if constexpr (Codec::kScaled) {
      first *= load<F32x16>(value_scales + j);
      second *= load<F32x16>(value_scales + j + 16);
    }
    if constexpr (Codec::kPerWord == 2) {
      store(scores + j / 2, pack_bf16(first, second));
    } else {
      store(scores + j, first);
      store(scores + j + 16, second);
    }
  }
  return {maximum, lane_sum(sum)};
}

// Folds the partial (next, next_acc) of one query row into the running one.
__attribute__((noinline)) inline void merge(Partial& run, float* run_acc, const Partial& next,
                                     const float* next_acc, int64_t width) {
  const float maximum = std::max(run.maximum, next.maximum);
  const float a = exp2_nonpositive(F32x16{} + (run.maximum - maximum))[0];
  const float b = exp2_nonpositive(F32x16{} + (next.maximum - maximum))[0];
  run = {maximum, run.sum * a + next.sum * b};
  for (int64_t d = 0; d < width; d += 16) {
    store(run_acc + d, load<F32x16>(run_acc + d) * a + load<F32x16>(next_acc + d) * b);
  }
}

// Adds a logit without a value to the sum of a row; returns the factor of its weighted values.
inline float add_sink(Partial& run, float logit) {
  const float sink = logit * kLog2E, maximum = std::max(run.maximum, sink);
  const float factor = exp2_nonpositive(F32x16{} + (run.maximum - maximum))[0];
  run = {maximum, run.sum * factor + exp2_nonpositive(F32x16{} + (sink - maximum))[0]};
  return factor;
}

// Keys are packed 16 positions by 16 words at a time, as four times four vectors: lane l of the
// four lanes of 128 bits of vector [c][g] holds word 4 * l + c of positions 4 * g ... 4 * g + 3. It
// takes half of the shuffles of a transposition; the other half is done with the scores, which are
// fewer. So a score is the sum of four chains of multiply-adds, one for each l.
//
// Four positions of these, `out` being [0][g].
template <class V, class Word>
inline void pack_4x16(const V (&rows)[4], Word* out) {
#if STEPGRAPH_AVX512
  const __m512i r0 = (__m512i)rows[0], r1 = (__m512i)rows[1];
  const __m512i r2 = (__m512i)rows[2], r3 = (__m512i)rows[3];
  const __m512i low01 = _mm512_unpacklo_epi32(r0, r1), high01 = _mm512_unpackhi_epi32(r0, r1);
  const __m512i low23 = _mm512_unpacklo_epi32(r2, r3), high23 = _mm512_unpackhi_epi32(r2, r3);
  store(out, _mm512_unpacklo_epi64(low01, low23));
  store(out + 64, _mm512_unpackhi_epi64(low01, low23));
  store(out + 128, _mm512_unpacklo_epi64(high01, high23));
  store(out + 192, _mm512_unpackhi_epi64(high01, high23));
#else
  for (int word = 0; word < 16; ++word)
    for (int row = 0; row < 4; ++row) out[word % 4 * 64 + word / 4 * 4 + row] = rows[row][word];
#endif
}

// Words of a query in the order of packed keys: word 4 * l + c in all of lane l of vector [c].
template <class V, class Word>
inline void pack_query(V words, Word* out) {
#if STEPGRAPH_AVX512
  store(out, _mm512_permute_ps((__m512)words, 0x00));
  store(out + 16, _mm512_permute_ps((__m512)words, 0x55));
  store(out + 32, _mm512_permute_ps((__m512)words, 0xaa));
  store(out + 48, _mm512_permute_ps((__m512)words, 0xff));
#else
  for (int c = 0; c < 4; ++c)
    for (int i = 0; i < 16; ++i) out[c * 16 + i] = words[i / 4 * 4 + c];
#endif
}

// The sums of the four lanes of 128 bits of acc[0] ... acc[3], one beside the other.
inline F32x16 add_lanes(const F32x16 (&acc)[4]) {
#if STEPGRAPH_AVX512
  const __m512 a = (__m512)acc[0], b = (__m512)acc[1], c = (__m512)acc[2], d = (__m512)acc[3];
  const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  const __m512 cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xee);
  return (F32x16)(_mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd));
#else
  F32x16 sum;
  for (int i = 0; i < 16; ++i) {
    const F32x16 a = acc[i / 4];
    sum[i] = (a[i % 4] + a[i % 4 + 8]) + (a[i % 4 + 4] + a[i % 4 + 12]);
  }
  return sum;
#endif
}

// One chunk for a few query rows of a tile.
template <class Codec>
struct ChunkRows {
  using Data = typename Codec::Data;
  using Word = typename Codec::Word;
  const Word* q;  // [rows, groups, 4, 16], packed; a group is 16 words
  int64_t groups;
  const Data* const* keys;       // [kChunk] the keys of each position
  const Data* const* next_keys;  // [kChunk] what to bring near for later
  ptrdiff_t value_offset;        // from the key of a position to its value
  const Data* const* tails;      // [kChunk] what is left of a value behind whole blocks, padded
  const Span* seen;              // [rows] positions of the chunk that the row sees
  int64_t value_dim;
  float scale, softcap;       // softcap 0: none; then `scale` turns scores into units of ln 2
  const float* score_scales;  // [kChunk] what replaces `scale` with a scaled codec
  const float* value_scales;  // [kChunk] likewise, of each value
  float* scores;              // [rows, kChunk] work space
  Partial* partial;           // [rows] result
  float* acc;                 // [rows, acc_stride] result
  int64_t acc_stride;
};

// scores[m][j] = scale * q[m] . k[j] for M rows and positions begin ... end - 1, multiples of 16;
// `packed`: their keys, [.., groups, 4, 4, 16].
template <class Codec, int M>
void score_rows_of(const ChunkRows<Codec>& rows, const typename Codec::Word* packed, int64_t begin,
                   int64_t end) {
  const int64_t row_words = rows.groups * 64;
  for (int64_t j = begin; j < end; j += 16) {
    F32x16 acc[M][4] = {};
    const typename Codec::Word* q = rows.q;
    for (int64_t i = 0; i < rows.groups * 4; ++i, packed += 64, q += 16) {
      decltype(load_words(packed)) column[4];
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) column[g] = load_words(packed + g * 16);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const auto words = load_words(q + m * row_words);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) acc[m][g] = multiply_add(acc[m][g], column[g], words);
      }
    }
    F32x16 scale = broadcast(rows.scale);
    if constexpr (Codec::kScaled) scale = load<F32x16>(rows.score_scales + j);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) store(rows.scores + m * kChunk + j, add_lanes(acc[m]) * scale);
  }
}

// Where the values of a chunk lie, from some dimension on.
template <class Codec>
struct ChunkValues {
  using Data = typename Codec::Data;
  const Data* const* rows;       // [kChunk]
  ptrdiff_t offset;              // from rows[j] to a value
  const Data* const* next_rows;  // [kChunk] likewise, what to bring near for later
  ptrdiff_t next_offset;
};

// acc[m][:] += sum_j weights[m][j] * values[j][:] for M rows and the positions of a span, over D
// blocks of 32 dimensions. Meanwhile the keys that come next are brought near.
//
// Where a word is a pair of bf16 (the weights are rounded as the values are), positions go in
// pairs that begin at even ones. Only with kEdges may the span divide a pair: of the position
// outside both weight and value are taken as 0.
template <class Codec, int M, int D, bool kEdges>
void add_values(const ChunkValues<Codec>& values, const float* scores, Span span, float* acc,
                int64_t acc_stride) {
  using Data = typename Codec::Data;
  using Word = typename Codec::Word;
  constexpr int kStep = Codec::kPerWord;
  constexpr int64_t kRowWords = kChunk;
  static constexpr Data kZeros[D * kBlock] = {};
  F32x16 sum[M][2 * D];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < 2 * D; ++c) sum[m][c] = load<F32x16>(acc + m * acc_stride + 16 * c);
  const Word* weights = reinterpret_cast<const Word*>(scores);
  const uint64_t end = (span.end + kStep - 1) / kStep;
  const Data *const *rows = values.rows, *const *next_rows = values.next_rows;
  const ptrdiff_t offset = values.offset, next_offset = values.next_offset;
  for (uint64_t word = span.begin / kStep; word < end; ++word) {
    const Data* value[kStep];
#pragma GCC unroll 2
    for (int i = 0; i < kStep; ++i) {
      const int64_t j = word * kStep + i;
      value[i] = rows[j] + offset;
      if (kEdges && (j < span.begin || j >= span.end)) value[i] = kZeros;
      const Data* next = next_rows[j] + next_offset;
#pragma GCC unroll 4
      for (size_t byte = 0; byte < D * kBlock * sizeof(Data); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(next) + byte);
      }
    }
    decltype(load_words(weights)) column[2 * D];
#pragma GCC unroll 2
    for (int d = 0; d < D; ++d) {
      Codec::columns(value, d * kBlock, column[2 * d], column[2 * d + 1]);
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      Word weight = weights[m * kRowWords + word];
      if constexpr (kEdges && kStep == 2) {  // 0 times a scale that is not finite is none
        const int64_t j = word * 2;
        if (j < span.begin) weight &= 0xffff0000u;
        if (j + 1 >= span.end) weight &= 0x0000ffffu;
      }
#pragma GCC unroll 4
      for (int c = 0; c < 2 * D; ++c) sum[m][c] = multiply_add(sum[m][c], column[c], weight);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < 2 * D; ++c) store(acc + m * acc_stride + 16 * c, sum[m][c]);
}

// Likewise over a block of dimensions row by row, what each row sees of `span`.
template <class Codec>
__attribute__((noinline)) void add_ragged(const ChunkRows<Codec>& rows, int64_t count,
                                          const ChunkValues<Codec>& values, Span span,
                                          int64_t dim) {
  for (int64_t m = 0; m < count; ++m) {
    const Span seen = {std::max(span.begin, rows.seen[m].begin),
                       std::min(span.end, rows.seen[m].end)};
    if (seen.empty()) continue;
    add_values<Codec, 1, 1, true>(values, rows.scores + m * kChunk, seen,
                                  rows.acc + m * rows.acc_stride + dim, 0);
  }
}

// D blocks of dimensions. Positions that not every row sees are added row by row, those before the
// common ones first, so that each row adds in the order of positions: selected, never multiplied by
// 0.
template <class Codec, int M, int D>
void add_blocks(const ChunkRows<Codec>& rows, Span any, Span common, int64_t dim) {
  using Values = ChunkValues<Codec>;
  const Values values = dim + kBlock <= rows.value_dim
                            ? Values{rows.keys, rows.value_offset + dim, rows.next_keys, dim}
                            : Values{rows.tails, 0, rows.next_keys, dim};
  const auto add_outside = [&](Span outside) {
    Values block = values;
    for (int d = 0; d < D; ++d, block.offset += kBlock, block.next_offset += kBlock) {
      add_ragged(rows, M, block, outside, dim + d * kBlock);
    }
  };
  if (any.begin < common.begin) add_outside({0, common.begin});
  add_values<Codec, M, D, false>(values, rows.scores, common, rows.acc + dim, rows.acc_stride);
  if (any.end > common.end) add_outside({common.end, kChunk});
}

// Softmax and weighted values of M rows whose scores are there.
template <class Codec, int M>
void weigh_rows_of(const ChunkRows<Codec>& rows) {
  Span any = {kChunk, 0}, common = {0, kChunk};  // positions that some row sees, that all see
  for (int m = 0; m < M; ++m) {
    const Span seen = rows.seen[m];
    if (!seen.empty()) any = {std::min(any.begin, seen.begin), std::max(any.end, seen.end)};
    common = {std::max(common.begin, seen.begin), std::min(common.end, seen.end)};
    float* scores = rows.scores + m * kChunk;
    if (rows.softcap > 0.0f) cap_scores(scores, seen.begin, seen.end, rows.softcap);
    rows.partial[m] = softmax_chunk<Codec>(scores, seen, rows.value_scales);
    std::fill_n(rows.acc + m * rows.acc_stride, rows.acc_stride, 0.0f);
  }
  common.begin += common.begin % Codec::kPerWord;  // no pair of positions is divided
  common.end -= common.end % Codec::kPerWord;
  common.end = std::max(common.begin, common.end);
  int64_t dim = 0;
  if constexpr (M <= kTileRows / 2) {
    for (; dim + 2 * kBlock <= rows.value_dim; dim += 2 * kBlock) {
      add_blocks<Codec, M, 2>(rows, any, common, dim);
    }
  }
  for (; dim < rows.value_dim; dim += kBlock) add_blocks<Codec, M, 1>(rows, any, common, dim);
}

// For 1 ... kScoreRows rows.
constexpr int kScoreRows = kTileRows / 2;
template <class Codec, size_t... Index>
void score_rows(const ChunkRows<Codec>& rows, int64_t count, const typename Codec::Word* packed,
                int64_t begin, int64_t end, std::index_sequence<Index...>) {
  static constexpr std::array<decltype(&score_rows_of<Codec, 1>), sizeof...(Index)> kKernels = {
      score_rows_of<Codec, Index + 1>...};
  kKernels[count - 1](rows, packed, begin, end);
}

// For 1 ... kTileRows rows.
template <class Codec, size_t... Index>
void weigh_rows(const ChunkRows<Codec>& rows, int64_t count, std::index_sequence<Index...>) {
  static constexpr std::array<void (*)(const ChunkRows<Codec>&), sizeof...(Index)> kKernels = {
      weigh_rows_of<Codec, Index + 1>...};
  kKernels[count - 1](rows);
}

}  // namespace stepgraph
