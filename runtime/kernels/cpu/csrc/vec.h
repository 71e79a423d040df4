// Vectors of 16 lanes and element types, which all kernels share, and the inner loop of linear
// layers over weights of the model's type.
//
// The code is written in the vector extension of GCC and Clang, which both lower to whatever the
// target has; the few intrinsics are instructions that the extension cannot name.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#if defined(__AVX512F__)
#define STEPGRAPH_AVX512 1
#include <immintrin.h>
#else
#define STEPGRAPH_AVX512 0
#endif

#if STEPGRAPH_AVX512 && defined(__AVX512BF16__)
#define STEPGRAPH_AVX512_BF16 1
#else
#define STEPGRAPH_AVX512_BF16 0
#endif

// The name of what the vector extension becomes, as `features.py` names instruction sets.
#if STEPGRAPH_AVX512
#define STEPGRAPH_VECTORS "avx512f"
#elif defined(__AVX2__)
#define STEPGRAPH_VECTORS "avx2"
#elif defined(__SSE2__)
#define STEPGRAPH_VECTORS "sse2"
#elif defined(__ARM_NEON)
#define STEPGRAPH_VECTORS "asimd"
#else
#define STEPGRAPH_VECTORS "portable"
#endif

// For helpers of a few instructions. GCC stops inlining when a unit has grown a lot, and a call in
// an inner loop passes vectors through memory: products on AVX2 took up to four times as long.
#define STEPGRAPH_INLINE __attribute__((always_inline)) inline

namespace stepgraph {

typedef float F32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));

// A packed block holds 32 columns; one step of it is 128 bytes: 32 words, one a column. A word is
// two bf16 of consecutive k, or one float. Rows of x are read in the same words.
constexpr int kBlock = 32;
constexpr int kStepBytes = 4 * kBlock;

// Accumulators of one tile: kTileRows x 32 columns, or half the rows by 64 columns. With 32
// registers of 512 bits that is 24 accumulators; narrower machines spill beyond a few.
#if STEPGRAPH_AVX512
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 4;
#endif

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

STEPGRAPH_INLINE F32x16 broadcast(float value) { return value - F32x16{}; }
STEPGRAPH_INLINE U32x16 broadcast(uint32_t value) { return value - U32x16{}; }

template <class V>
STEPGRAPH_INLINE V load(const void* address) {
  V value;
  std::memcpy(&value, address, sizeof(V));
  return value;
}

template <class V>
STEPGRAPH_INLINE void store(void* address, V value) {
  std::memcpy(address, &value, sizeof(V));
}

template <class To, class From>
STEPGRAPH_INLINE To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

// The sum is of halves, again and again, everywhere in the same order.
inline float lane_sum(F32x16 value) {
#if STEPGRAPH_AVX512
  return _mm512_reduce_add_ps((__m512)value);
#else
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) value[i] += value[i + width];
  return value[0];
#endif
}

inline float lane_max(F32x16 value) {
#if STEPGRAPH_AVX512
  return _mm512_reduce_max_ps((__m512)value);
#else
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) value[i] = std::max(value[i], value[i + width]);
  return value[0];
#endif
}

// ---- element types -----------------------------------------------------------------------------

STEPGRAPH_INLINE F32x16 low_bf16(U32x16 words) { return bits<F32x16>(words << 16); }
STEPGRAPH_INLINE F32x16 high_bf16(U32x16 words) { return bits<F32x16>(words & 0xffff0000u); }

// Round to nearest even, in the upper half of each word. NaN stays NaN; where an instruction rounds,
// what is too small to be normal becomes 0.
STEPGRAPH_INLINE U32x16 round_to_bf16(F32x16 value) {
#if STEPGRAPH_AVX512_BF16
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)value);
  return (U32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
#else
  const U32x16 raw = bits<U32x16>(value);
  const U32x16 rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) & 0xffff0000u;
  return value == value ? rounded : (U32x16{} + 0x7fc00000u);
#endif
}

// 32 floats as bf16 in their order: a, then b.
inline U32x16 pack_bf16(F32x16 a, F32x16 b) {
#if STEPGRAPH_AVX512_BF16
  return bits<U32x16>(_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
  const U32x16 first = round_to_bf16(a), second = round_to_bf16(b);
  uint16_t out[32];
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<uint16_t>(first[i] >> 16);
    out[i + 16] = static_cast<uint16_t>(second[i] >> 16);
  }
  return load<U32x16>(out);
#endif
}

// What a kernel needs to know of an element type T:
//   Word        the 32-bit word of a packed step (`uint32_t`: a pair of bf16; else a float)
//   kPerWord    elements a word holds
//   words       16 words from consecutive elements
//   rounded     16 floats as the bits of elements
//   store32     32 elements from two vectors, which are what `columns` of `Plain` makes of them
//   store32_in_order  the same of two vectors in the order of the elements
//   load32      32 elements as two vectors in their order; of types whose words are floats
template <class T>
struct Element;

template <>
struct Element<c10::BFloat16> {
  using Word = uint32_t;
  static constexpr int kPerWord = 2;
  static U32x16 words(const c10::BFloat16* p) { return load<U32x16>(p); }
  static U16x16 rounded(F32x16 value) {
#if STEPGRAPH_AVX512_BF16
    return (U16x16)_mm512_cvtneps_pbh((__m512)value);
#else
    return __builtin_convertvector(round_to_bf16(value) >> 16, U16x16);
#endif
  }
  static void store32(c10::BFloat16* p, F32x16 a, F32x16 b) {  // even elements, odd ones
    store(p, (round_to_bf16(a) >> 16) | round_to_bf16(b));
  }
  static void store32_in_order(c10::BFloat16* p, F32x16 a, F32x16 b) { store(p, pack_bf16(a, b)); }
};

template <>
struct Element<float> {
  using Word = float;
  static constexpr int kPerWord = 1;
  static F32x16 words(const float* p) { return load<F32x16>(p); }
  static F32x16 rounded(F32x16 value) { return value; }
  static void load32(const float* p, F32x16& a, F32x16& b) {
    a = load<F32x16>(p);
    b = load<F32x16>(p + 16);
  }
  static void store32(float* p, F32x16 a, F32x16 b) {
    store(p, a);
    store(p + 16, b);
  }
  static void store32_in_order(float* p, F32x16 a, F32x16 b) { store32(p, a, b); }
};

template <>
struct Element<c10::Half> {
  using Word = float;
  static constexpr int kPerWord = 1;
  static F32x16 words(const c10::Half* p) {
#if STEPGRAPH_AVX512
    return (F32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    F32x16 value;
    for (int i = 0; i < 16; ++i) value[i] = static_cast<float>(p[i]);
    return value;
#endif
  }
  static U16x16 rounded(F32x16 value) {
#if STEPGRAPH_AVX512
    return (U16x16)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
#else
    U16x16 result;
    for (int i = 0; i < 16; ++i) result[i] = static_cast<c10::Half>(value[i]).x;
    return result;
#endif
  }
  static void load32(const c10::Half* p, F32x16& a, F32x16& b) {
    a = words(p);
    b = words(p + 16);
  }
  static void store32(c10::Half* p, F32x16 a, F32x16 b) {
    store(p, rounded(a));
    store(p + 16, rounded(b));
  }
  static void store32_in_order(c10::Half* p, F32x16 a, F32x16 b) { store32(p, a, b); }
};

// ---- the inner loop ----------------------------------------------------------------------------

// acc + x.w for one word of each lane: two products for a pair of bf16, one for a float.
STEPGRAPH_INLINE F32x16 multiply_add(F32x16 acc, U32x16 w, U32x16 x) {
#if STEPGRAPH_AVX512_BF16
  return (F32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#else
  acc += low_bf16(w) * low_bf16(x);
  return acc + high_bf16(w) * high_bf16(x);
#endif
}
STEPGRAPH_INLINE F32x16 multiply_add(F32x16 acc, F32x16 w, F32x16 x) { return acc + w * x; }
STEPGRAPH_INLINE F32x16 multiply_add(F32x16 acc, U32x16 w, uint32_t x) {
  return multiply_add(acc, w, broadcast(x));
}
STEPGRAPH_INLINE F32x16 multiply_add(F32x16 acc, F32x16 w, float x) {
  return multiply_add(acc, w, broadcast(x));
}

STEPGRAPH_INLINE U32x16 load_words(const uint32_t* p) { return load<U32x16>(p); }
STEPGRAPH_INLINE F32x16 load_words(const float* p) { return load<F32x16>(p); }

// acc[m][.] = row m of x times one packed block of 32 columns. Each output is one chain of
// multiply-adds in the order of k, so its value does not depend on M.
//
// x_stride in words. Meanwhile memory from `prefetch` on is brought near, Lines cache lines a step.
template <int M, int Lines, class Word>
inline void dot_tile(const Word* x, ptrdiff_t x_stride, const Word* w, int64_t steps,
                     const char* prefetch, F32x16 (&acc)[M][2]) {
  F32x16 sum[M][2] = {};
  for (int64_t k = 0; k < steps; ++k) {
    const auto first = load_words(w + k * kBlock), second = load_words(w + k * kBlock + 16);
#pragma GCC unroll 2
    for (int line = 0; line < Lines; ++line) {
      __builtin_prefetch(prefetch + (k * Lines + line) * 64, 0, 2);
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      Word word;
      std::memcpy(&word, x + m * x_stride + k, sizeof(Word));
      sum[m][0] = multiply_add(sum[m][0], first, word);
      sum[m][1] = multiply_add(sum[m][1], second, word);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    acc[m][0] = sum[m][0];
    acc[m][1] = sum[m][1];
  }
}

}  // namespace stepgraph
