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
#include <type_traits>

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

// What the vector extension becomes, as `features.py` names instruction sets, and the bytes of the
// largest vector that fits into a register.
#if STEPGRAPH_AVX512
#define STEPGRAPH_VECTORS "avx512f"
#define STEPGRAPH_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define STEPGRAPH_VECTORS "avx2"
#define STEPGRAPH_VECTOR_BYTES 32
#elif defined(__SSE2__)
#define STEPGRAPH_VECTORS "sse2"
#define STEPGRAPH_VECTOR_BYTES 16
#elif defined(__ARM_NEON)
#define STEPGRAPH_VECTORS "asimd"
#define STEPGRAPH_VECTOR_BYTES 16
#else
#define STEPGRAPH_VECTORS "portable"
#define STEPGRAPH_VECTOR_BYTES 16
#endif

// For helpers of a few instructions. GCC stops inlining when a unit has grown a lot, and a call in
// an inner loop passes vectors through memory: products on AVX2 took up to four times as long.
#define STEPGRAPH_INLINE __attribute__((always_inline)) inline

namespace stepgraph {

typedef float F32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));

// Vectors that fit into a register, of which compilers keep sums there: GCC keeps larger ones in
// memory from one iteration of a loop to the next, which takes about ten times as long.
typedef float FloatLanes __attribute__((vector_size(STEPGRAPH_VECTOR_BYTES)));
typedef uint32_t WordLanes __attribute__((vector_size(STEPGRAPH_VECTOR_BYTES)));
constexpr int kLanes = STEPGRAPH_VECTOR_BYTES / 4;

// A packed block holds 32 columns; one step of it is 128 bytes: 32 words, one a column. A word is
// two bf16 of consecutive k, or one float. Rows of x are read in the same words.
constexpr int kBlock = 32;
constexpr int kStepBytes = 4 * kBlock;

// Accumulators of one tile: kTileRows by two vectors, or half the rows by four. With 32 registers
// that is 24 accumulators, with 16 registers 12.
constexpr int kTileRows = STEPGRAPH_AVX512 ? 12 : 6;

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
#if !STEPGRAPH_AVX512
STEPGRAPH_INLINE FloatLanes low_bf16(WordLanes words) { return bits<FloatLanes>(words << 16); }
STEPGRAPH_INLINE FloatLanes high_bf16(WordLanes words) {
  return bits<FloatLanes>(words & 0xffff0000u);
}
#endif

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

#if !STEPGRAPH_AVX512
STEPGRAPH_INLINE FloatLanes multiply_add(FloatLanes acc, WordLanes w, uint32_t x) {
  const WordLanes words = x - WordLanes{};
  acc += low_bf16(w) * low_bf16(words);
  return acc + high_bf16(w) * high_bf16(words);
}
STEPGRAPH_INLINE FloatLanes multiply_add(FloatLanes acc, FloatLanes w, float x) {
  return acc + w * (x - FloatLanes{});
}
#endif

STEPGRAPH_INLINE U32x16 load_words(const uint32_t* p) { return load<U32x16>(p); }
STEPGRAPH_INLINE F32x16 load_words(const float* p) { return load<F32x16>(p); }

// sums[m][.] = row m of x times one packed block of 32 columns, as many columns at a time as two
// vectors have, or four for the few rows of a step that reads weights at the speed of the memory. Each
// output is one chain of multiply-adds in the order of k, so its value does not depend on M.
//
// A step of x is a word, or two floats where one of w is a pair of bf16. x_stride in words. Meanwhile
// memory from `prefetch` on is brought near, Lines cache lines a step.
template <int M, int Lines, class X, class W>
inline void dot_tile(const X* x, ptrdiff_t x_stride, const W* w, int64_t steps,
                     const char* prefetch, float* sums) {
  using Words = std::conditional_t<std::is_same_v<W, float>, FloatLanes, WordLanes>;
  constexpr int kWords = std::is_same_v<X, W> ? 1 : 2;
  constexpr int kVectors = std::min(kBlock / kLanes, M <= 2 ? 4 : 2);
  for (int column = 0; column < kBlock; column += kVectors * kLanes) {
    FloatLanes sum[M][kVectors] = {};
    for (int64_t k = 0; k < steps; ++k) {
      Words words[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        words[v] = load<Words>(w + k * kBlock + column + v * kLanes);
      }
#pragma GCC unroll 2
      for (int line = 0; line < Lines && column == 0; ++line) {
        __builtin_prefetch(prefetch + (k * Lines + line) * 64, 0, 2);
      }
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        X word[kWords];
        std::memcpy(word, x + m * x_stride + k * kWords, sizeof(word));
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          if constexpr (kWords == 1) {
            sum[m][v] = multiply_add(sum[m][v], words[v], word[0]);
          } else {
            sum[m][v] = multiply_add(sum[m][v], low_bf16(words[v]), word[0]);
            sum[m][v] = multiply_add(sum[m][v], high_bf16(words[v]), word[1]);
          }
        }
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        store(sums + m * kBlock + column + v * kLanes, sum[m][v]);
      }
    }
  }
}

}  // namespace stepgraph
