// The arithmetic of `cpu_attention.cpp` for one chunk of positions: scores, softmax, weighted values,
// and the merge of two chunks. Everything here sees plain rows; blocks and threads are not its concern.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "cpu_vec.h"

namespace stepgraph {

constexpr int kChunk = 128;  // positions; a multiple of 2 * kBlock
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

// exp(score - maximum) in place over the first n of kChunk scores; what lies behind n is not read.
__attribute__((noinline)) inline Partial softmax_chunk(float* scores, int64_t n) {
  const I32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  if (n % 16 != 0) {
    float* last = scores + n / 16 * 16;
    const F32x16 value = load<F32x16>(last);
    store(last, lane < static_cast<int32_t>(n % 16) ? value : (F32x16{} + kMinusInfinity));
  }
  F32x16 lane_maximum = F32x16{} + kMinusInfinity;
  for (int64_t j = 0; j < n; j += 16) {
    const F32x16 value = load<F32x16>(scores + j);
    lane_maximum = value > lane_maximum ? value : lane_maximum;
  }
  const float maximum = lane_max(lane_maximum);
  F32x16 sum = {};
  for (int64_t j = 0; j < n; j += 16) {
    const F32x16 weight = exp_nonpositive(load<F32x16>(scores + j) - maximum);
    store(scores + j, weight);
    sum += weight;
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
template <class T>
inline auto words_of(const T* row, int64_t from, int64_t size) {
  constexpr int64_t kSpan = 16 * Element<T>::kPerWord;
  if (from + kSpan <= size) return Element<T>::words(row + from);
  T padded[kSpan] = {};
  std::copy_n(row + from, size - from, padded);
  return Element<T>::words(padded);
}

// acc[m][:] += sum_j weights[m][j] * values[j][:] for positions begin <= j < end, over one block of
// 32 dimensions, `valid` of which exist. The value of a position lies `value_offset` behind its key;
// meanwhile the keys that come next are brought near.
template <class T, int M>
void add_values(const float* weights, const T* const* keys, const T* const* next_keys,
                ptrdiff_t value_offset, int64_t begin, int64_t end, int64_t dim, int64_t valid,
                float* acc, int64_t acc_stride) {
  F32x16 sum[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    sum[m][0] = load<F32x16>(acc + m * acc_stride + dim);
    sum[m][1] = load<F32x16>(acc + m * acc_stride + dim + 16);
  }
  T padded[kBlock] = {};
  for (int64_t j = begin; j < end; ++j) {
    const T* value = keys[j] + value_offset + dim;
    if (valid < kBlock) {
      std::copy_n(value, valid, padded);
      value = padded;
    }
    F32x16 first, second;
    Element<T>::load32(value, first, second);
    __builtin_prefetch(next_keys[j] + dim);
    if (sizeof(T) * kBlock > 64) __builtin_prefetch(next_keys[j] + dim + kBlock / 2);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const F32x16 weight = broadcast(weights[m * kChunk + j]);
      sum[m][0] = sum[m][0] + weight * first;
      sum[m][1] = sum[m][1] + weight * second;
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    store(acc + m * acc_stride + dim, sum[m][0]);
    store(acc + m * acc_stride + dim + 16, sum[m][1]);
  }
}

// scores[m][j] = scale * q[m] . k[j] for j < n, rounded up to whole packed blocks of 32 positions.
template <int M, int B, class Word>
void score_blocks(const Word* q, const Word* keys, int64_t words, float scale, float* scores) {
  F32x16 acc[M][2 * B];
  dot_tile<M, B, 0>(q, words, keys, words * kBlock, words, nullptr, acc);
  for (int m = 0; m < M; ++m)
    for (int c = 0; c < 2 * B; ++c) store(scores + m * kChunk + c * 16, acc[m][c] * scale);
}

// One chunk for a few query rows of a tile.
template <class T>
struct ChunkRows {
  const typename Element<T>::Word* q;            // [rows, words]
  const typename Element<T>::Word* packed_keys;  // [kChunk / 32, words, 32]
  int64_t words;
  const T* const* keys;       // [kChunk] the keys of each position
  const T* const* next_keys;  // [kChunk] what to bring near for later
  ptrdiff_t value_offset;     // from the key of a position to its value
  const int64_t* lengths;     // [rows] positions of the chunk that the row sees
  int64_t head_dim;
  float scale;
  float* scores;     // [rows, kChunk] work space
  Partial* partial;  // [rows] result
  float* acc;        // [rows, acc_stride] result
  int64_t acc_stride;
};

template <class T, int M>
void attend_rows_of(const ChunkRows<T>& rows) {
  int64_t longest = rows.lengths[0], common = rows.lengths[0];
  for (int m = 1; m < M; ++m) {
    longest = std::max(longest, rows.lengths[m]);
    common = std::min(common, rows.lengths[m]);
  }
  const int64_t blocks = (longest + kBlock - 1) / kBlock, block_words = rows.words * kBlock;
  int64_t block = 0;
  if constexpr (M <= kTileRows / 2) {
    for (; block + 1 < blocks; block += 2) {
      score_blocks<M, 2>(rows.q, rows.packed_keys + block * block_words, rows.words, rows.scale,
                         rows.scores + block * kBlock);
    }
  }
  for (; block < blocks; ++block) {
    score_blocks<M, 1>(rows.q, rows.packed_keys + block * block_words, rows.words, rows.scale,
                       rows.scores + block * kBlock);
  }
  for (int m = 0; m < M; ++m) {
    rows.partial[m] = softmax_chunk(rows.scores + m * kChunk, rows.lengths[m]);
    std::fill_n(rows.acc + m * rows.acc_stride, rows.acc_stride, 0.0f);
  }
  for (int64_t dim = 0; dim < rows.head_dim; dim += kBlock) {
    const int64_t valid = std::min<int64_t>(rows.head_dim - dim, kBlock);
    add_values<T, M>(rows.scores, rows.keys, rows.next_keys, rows.value_offset, 0, common, dim,
                     valid, rows.acc, rows.acc_stride);
    // Positions that not every row sees are added row by row: selected, never multiplied by 0.
    for (int m = 0; m < M; ++m) {
      if (rows.lengths[m] == common) continue;
      add_values<T, 1>(rows.scores + m * kChunk, rows.keys, rows.next_keys, rows.value_offset,
                       common, rows.lengths[m], dim, valid, rows.acc + m * rows.acc_stride,
                       rows.acc_stride);
    }
  }
}

// For 1 ... kTileRows rows.
template <class T, size_t... Index>
void attend_rows(const ChunkRows<T>& rows, int64_t count, std::index_sequence<Index...>) {
  static constexpr std::array<void (*)(const ChunkRows<T>&), sizeof...(Index)> kKernels = {
      attend_rows_of<T, Index + 1>...};
  kKernels[count - 1](rows);
}

}  // namespace stepgraph
