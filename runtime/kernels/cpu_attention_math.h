// The arithmetic of `cpu_attention.h` for one chunk of positions: scores, softmax, weighted values,
// and the merge of two chunks. Everything here sees rows; blocks and threads are not its concern.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "cpu_attention_plan.h"
#include "cpu_storage.h"

namespace stepgraph {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Cephes' expf on [-87, 0] (argument reduction by ln 2 in two parts, polynomial of degree 5,
// below 2 ulp); 0 below; NaN stays NaN.
inline F32x16 exp_nonpositive(F32x16 x) {
  const I32x16 underflow = x < -87.0f;
  const F32x16 clamped = underflow ? (F32x16{} - 87.0f) : x;
  const F32x16 shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2**23 rounds
  const F32x16 n = shifted - 12582912.0f;
  F32x16 r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  F32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const I32x16 exponent = (bits<I32x16>(shifted) - 0x4b400000 + 127) << 23;
  return underflow ? F32x16{} : p * bits<F32x16>(exponent);
}

// softcap * tanh(s / softcap), in place. Cephes' tanhf: an odd polynomial of degree 11 below 0.625,
// else 1 - 2 / (exp(2 |x|) + 1); absolute error below 2e-7 of tanh.
__attribute__((noinline)) inline void cap_scores(float* scores, int64_t begin, int64_t end,
                                                 float softcap) {
  for (int64_t j = begin / 16 * 16; j < end; j += 16) {
    const F32x16 x = load<F32x16>(scores + j) / broadcast(softcap);
    const F32x16 magnitude = x < 0.0f ? -x : x, square = x * x;
    F32x16 p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    p = p * square * x + x;
    const F32x16 e = exp_nonpositive(magnitude * -2.0f);
    const F32x16 far = 1.0f - 2.0f * e / (e + 1.0f);
    const F32x16 tanh = magnitude < 0.625f ? p : (x < 0.0f ? -far : far);
    store(scores + j, tanh * softcap);
  }
}

inline float lane_sum(F32x16 value) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) value[i] += value[i + width];
  return value[0];
}

inline float lane_max(F32x16 value) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) value[i] = std::max(value[i], value[i + width]);
  return value[0];
}

struct Partial {
  float maximum, sum;
};

// exp(score - maximum) in place over the seen ones of kChunk scores; the others are not looked at.
// With kScaled each weight is multiplied by its entry of `value_scales`, the sum is not.
template <bool kScaled>
__attribute__((noinline)) Partial softmax_chunk(float* scores, Span seen,
                                                const float* value_scales) {
  if (seen.empty()) return {kMinusInfinity, 0.0f};
  const I32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F32x16 unseen = F32x16{} + kMinusInfinity;
  const int64_t first = seen.begin / 16 * 16, n = seen.end;
  if (seen.begin != first) {
    const F32x16 value = load<F32x16>(scores + first);
    store(scores + first, lane < static_cast<int32_t>(seen.begin - first) ? unseen : value);
  }
  if (n % 16 != 0) {
    float* last = scores + n / 16 * 16;
    const F32x16 value = load<F32x16>(last);
    store(last, lane < static_cast<int32_t>(n % 16) ? value : unseen);
  }
  F32x16 lane_maximum = F32x16{} + kMinusInfinity;
  for (int64_t j = first; j < n; j += 16) {
    const F32x16 value = load<F32x16>(scores + j);
    lane_maximum = value > lane_maximum ? value : lane_maximum;
  }
  const float maximum = lane_max(lane_maximum);
  F32x16 sum = {};
  for (int64_t j = first; j < n; j += 16) {
    F32x16 weight = exp_nonpositive(load<F32x16>(scores + j) - maximum);
    sum += weight;
    if constexpr (kScaled) weight *= load<F32x16>(value_scales + j);
    store(scores + j, weight);
  }
  return {maximum, lane_sum(sum)};
}

// Folds the partial (next, next_acc) of one query row into the running one.
__attribute__((noinline)) inline void merge(Partial& run, float* run_acc, const Partial& next,
                                     const float* next_acc, int64_t width) {
  const float maximum = std::max(run.maximum, next.maximum);
  const float a = exp_nonpositive(F32x16{} + (run.maximum - maximum))[0];
  const float b = exp_nonpositive(F32x16{} + (next.maximum - maximum))[0];
  run = {maximum, run.sum * a + next.sum * b};
  for (int64_t d = 0; d < width; d += 16) {
    store(run_acc + d, load<F32x16>(run_acc + d) * a + load<F32x16>(next_acc + d) * b);
  }
}

// 16 rows of 16 words become 16 columns, `stride` words apart.
template <class V, class Word>
inline void transpose_store(const V (&rows)[16], Word* out, int64_t stride) {
#if STEPGRAPH_AVX512
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = (__m512i)rows[i];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 * g + c] now holds words c, c + 4, c + 8, c + 12 of rows 4 * g ... 4 * g + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    const __m512i high23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    store(out + c * stride, _mm512_shuffle_i32x4(low01, low23, 0x88));
    store(out + (c + 4) * stride, _mm512_shuffle_i32x4(high01, high23, 0x88));
    store(out + (c + 8) * stride, _mm512_shuffle_i32x4(low01, low23, 0xdd));
    store(out + (c + 12) * stride, _mm512_shuffle_i32x4(high01, high23, 0xdd));
  }
#else
  for (int word = 0; word < 16; ++word)
    for (int row = 0; row < 16; ++row) out[word * stride + row] = rows[row][word];
#endif
}

// 16 words that start at element `from` of a row of `size` elements, zeros behind its end.
template <class Codec>
inline auto words_of(const typename Codec::Data* row, int64_t from, int64_t size) {
  constexpr int64_t kSpan = 16 * Codec::kPerWord;
  if (from + kSpan <= size) return Codec::words(row + from);
  typename Codec::Data padded[kSpan] = {};
  std::copy_n(row + from, size - from, padded);
  return Codec::words(padded);
}

// One chunk for a few query rows of a tile.
template <class Codec>
struct ChunkRows {
  using Data = typename Codec::Data;
  using Word = typename Codec::Word;
  const Word* q;            // [rows, words]
  const Word* packed_keys;  // [kChunk / 32, words, 32]
  int64_t words;
  const Data* const* keys;       // [kChunk] the keys of each position
  const Data* const* next_keys;  // [kChunk] what to bring near for later
  ptrdiff_t value_offset;        // from the key of a position to its value
  const Span* seen;              // [rows] positions of the chunk that the row sees
  int64_t value_dim;
  float scale, softcap;       // softcap 0: none
  const float* score_scales;  // [kChunk] what replaces `scale` with a scaled codec
  const float* value_scales;  // [kChunk] likewise, of each value
  float* scores;              // [rows, kChunk] work space
  Partial* partial;           // [rows] result
  float* acc;                 // [rows, acc_stride] result
  int64_t acc_stride;
};

// scores[m][j] = scale * q[m] . k[j] for B packed blocks of 32 positions from `block` on.
template <class Codec, int M, int B>
void score_blocks(const ChunkRows<Codec>& rows, int64_t block) {
  F32x16 acc[M][2 * B];
  const int64_t block_words = rows.words * kBlock;
  dot_tile<M, B, 0>(rows.q, rows.words, rows.packed_keys + block * block_words, block_words,
                    rows.words, nullptr, acc);
  for (int m = 0; m < M; ++m) {
    for (int c = 0; c < 2 * B; ++c) {
      const int64_t j = block * kBlock + c * 16;
      if constexpr (Codec::kScaled) {
        store(rows.scores + m * kChunk + j, acc[m][c] * load<F32x16>(rows.score_scales + j));
      } else {
        store(rows.scores + m * kChunk + j, acc[m][c] * rows.scale);
      }
    }
  }
}

// acc[m][:] += sum_j weights[m][j] * values[j][:] for M rows from `row` on and the positions of a
// span, over one block of 32 dimensions. Meanwhile the keys that come next are brought near.
template <class Codec, int M>
void add_values(const ChunkRows<Codec>& rows, int row, Span span, int64_t dim) {
  using Data = typename Codec::Data;
  const float* weights = rows.scores + row * kChunk;
  float* acc = rows.acc + row * rows.acc_stride + dim;
  const int64_t acc_stride = rows.acc_stride;
  const int64_t valid = std::min<int64_t>(rows.value_dim - dim, kBlock);
  const ptrdiff_t value_offset = rows.value_offset;
  const Data *const *keys = rows.keys, *const *next_keys = rows.next_keys;
  F32x16 sum[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    sum[m][0] = load<F32x16>(acc + m * acc_stride);
    sum[m][1] = load<F32x16>(acc + m * acc_stride + 16);
  }
  Data padded[kBlock] = {};
  for (int64_t j = span.begin; j < span.end; ++j) {
    const Data* value = keys[j] + value_offset + dim;
    if (valid < kBlock) {
      std::copy_n(value, valid, padded);
      value = padded;
    }
    F32x16 first, second;
    Codec::load32(value, first, second);
    __builtin_prefetch(next_keys[j] + dim);
    if (sizeof(Data) * kBlock > 64) __builtin_prefetch(next_keys[j] + dim + kBlock / 2);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const F32x16 weight = broadcast(weights[m * kChunk + j]);
      sum[m][0] = sum[m][0] + weight * first;
      sum[m][1] = sum[m][1] + weight * second;
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    store(acc + m * acc_stride, sum[m][0]);
    store(acc + m * acc_stride + 16, sum[m][1]);
  }
}

// Likewise row by row, what each row sees of `span`.
template <class Codec, int M>
__attribute__((noinline)) void add_ragged(const ChunkRows<Codec>& rows, Span span, int64_t dim) {
  for (int m = 0; m < M; ++m) {
    const Span seen = {std::max(span.begin, rows.seen[m].begin),
                       std::min(span.end, rows.seen[m].end)};
    if (!seen.empty()) add_values<Codec, 1>(rows, m, seen, dim);
  }
}

template <class Codec, int M>
void attend_rows_of(const ChunkRows<Codec>& rows) {
  Span any = {kChunk, 0}, common = {0, kChunk};  // positions that some row sees, that all see
  for (int m = 0; m < M; ++m) {
    const Span seen = rows.seen[m];
    if (!seen.empty()) any = {std::min(any.begin, seen.begin), std::max(any.end, seen.end)};
    common = {std::max(common.begin, seen.begin), std::min(common.end, seen.end)};
  }
  common.end = std::max(common.begin, common.end);
  int64_t block = any.begin / kBlock;
  const int64_t blocks = (any.end + kBlock - 1) / kBlock;
  if constexpr (M <= kTileRows / 2) {
    for (; block + 1 < blocks; block += 2) score_blocks<Codec, M, 2>(rows, block);
  }
  for (; block < blocks; ++block) score_blocks<Codec, M, 1>(rows, block);
  for (int m = 0; m < M; ++m) {
    float* scores = rows.scores + m * kChunk;
    const Span seen = rows.seen[m];
    if (rows.softcap > 0.0f) cap_scores(scores, seen.begin, seen.end, rows.softcap);
    rows.partial[m] = softmax_chunk<Codec::kScaled>(scores, seen, rows.value_scales);
    std::fill_n(rows.acc + m * rows.acc_stride, rows.acc_stride, 0.0f);
  }
  // Positions that not every row sees are added row by row, those before the common ones first, so
  // that each row adds in the order of positions: selected, never multiplied by 0.
  const bool ragged = any.begin != common.begin || any.end != common.end;
  for (int64_t dim = 0; dim < rows.value_dim; dim += kBlock) {
    if (ragged) add_ragged<Codec, M>(rows, {0, common.begin}, dim);
    add_values<Codec, M>(rows, 0, common, dim);
    if (ragged) add_ragged<Codec, M>(rows, {common.end, kChunk}, dim);
  }
}

// For 1 ... kTileRows rows.
template <class Codec, size_t... Index>
void attend_rows(const ChunkRows<Codec>& rows, int64_t count, std::index_sequence<Index...>) {
  static constexpr std::array<void (*)(const ChunkRows<Codec>&), sizeof...(Index)> kKernels = {
      attend_rows_of<Codec, Index + 1>...};
  kKernels[count - 1](rows);
}

}  // namespace stepgraph
