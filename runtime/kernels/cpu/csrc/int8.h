// Weights of one byte: how a packed block of them becomes what `multiply_add` takes.
//
// A step of a packed int8 block holds two consecutive k of 32 columns, `[32][2]`: 64 bytes, half of
// what bf16 takes. A number from -127 to 127 is a bf16 (and a float) exactly, so a step is expanded
// once for all rows of a tile and then multiplied as any other; the scale of a column is applied to
// its sum.
#pragma once

#include "vec.h"

#if STEPGRAPH_AVX512 && defined(__AVX512BW__) && defined(__AVX512VBMI__)
#define STEPGRAPH_AVX512_VBMI 1
#else
#define STEPGRAPH_AVX512_VBMI 0
#endif

namespace stepgraph {

constexpr int kInt8StepBytes = 2 * kBlock;

typedef int16_t I16x16 __attribute__((vector_size(32)));

// Both numbers of 16 columns from 32 bytes: the even k and the odd.
inline void expand_int8(const int8_t* p, F32x16& even, F32x16& odd) {
  const I32x16 pairs = __builtin_convertvector(load<I16x16>(p), I32x16);
  even = __builtin_convertvector(pairs << 24 >> 24, F32x16);
  odd = __builtin_convertvector(pairs >> 8, F32x16);
}

// The steps of int8 blocks as words of two bf16. `expand` gives the 32 columns in an order of its
// own; `in_order` undoes it on what became of them.
#if STEPGRAPH_AVX512_VBMI
// Of a magnitude of seven bits both bytes of its bf16 are looked up, which two instructions do for
// 64 of them; interleaved within 128 bits they are words. Measured on Zen 5 this hides behind the
// multiplications, whether there is one row or twelve.
struct Bf16Bytes {
  uint8_t low[128] = {}, high[128] = {};

  constexpr Bf16Bytes() {
    for (int magnitude = 0; magnitude < 128; ++magnitude) {
      const uint32_t raw = __builtin_bit_cast(uint32_t, static_cast<float>(magnitude));
      low[magnitude] = static_cast<uint8_t>(raw >> 16);
      high[magnitude] = static_cast<uint8_t>(raw >> 24);
    }
  }
};

class Int8Words {
 public:
  Int8Words() {
    static constexpr Bf16Bytes kTables;
    for (int half = 0; half < 2; ++half) {
      low_[half] = _mm512_loadu_si512(kTables.low + 64 * half);
      high_[half] = _mm512_loadu_si512(kTables.high + 64 * half);
    }
  }

  void expand(const int8_t* p, U32x16& a, U32x16& b) const {
    const __m512i value = _mm512_loadu_si512(p), magnitude = _mm512_abs_epi8(value);
    const __m512i low = _mm512_permutex2var_epi8(low_[0], magnitude, low_[1]);
    const __m512i high = _mm512_permutex2var_epi8(high_[0], magnitude, high_[1]);
    constexpr int kOrAnd = 0xf8;  // first | (second & third)
    const __m512i with_sign =
        _mm512_ternarylogic_epi64(high, value, _mm512_set1_epi8(-128), kOrAnd);
    a = (U32x16)_mm512_unpacklo_epi8(low, with_sign);
    b = (U32x16)_mm512_unpackhi_epi8(low, with_sign);
  }

  // Of each eight columns a has the first four and b the others.
  static void in_order(F32x16& a, F32x16& b) {
    const __m512i first =
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const F32x16 columns = (F32x16)_mm512_permutex2var_ps((__m512)a, first, (__m512)b);
    b = (F32x16)_mm512_permutex2var_ps((__m512)a, second, (__m512)b);
    a = columns;
  }

 private:
  __m512i low_[2], high_[2];
};
#else
class Int8Words {
 public:
  void expand(const int8_t* p, U32x16& a, U32x16& b) const {
    a = words(p);
    b = words(p + kInt8StepBytes / 2);
  }

  static void in_order(F32x16&, F32x16&) {}

 private:
  static U32x16 words(const int8_t* p) {
    F32x16 even, odd;
    expand_int8(p, even, odd);
    return (bits<U32x16>(even) >> 16) | (bits<U32x16>(odd) & 0xffff0000u);
  }
};
#endif

// As `dot_tile` in `vec.h`, over one packed int8 block: acc[m][.] = row m of x times 32
// columns, before their scales. A step is one word of x, two bf16.
template <int M, int Lines>
inline void dot_tile_int8(const uint32_t* x, ptrdiff_t x_stride, const int8_t* w, int64_t steps,
                          const char* prefetch, F32x16 (&acc)[M][2]) {
  const Int8Words words;
  F32x16 sum[M][2] = {};
  for (int64_t k = 0; k < steps; ++k) {
    U32x16 first, second;
    words.expand(w + k * kInt8StepBytes, first, second);
    if (Lines > 0) __builtin_prefetch(prefetch + k * 64, 0, 2);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      uint32_t word;
      std::memcpy(&word, x + m * x_stride + k, sizeof(word));
      sum[m][0] = multiply_add(sum[m][0], first, word);
      sum[m][1] = multiply_add(sum[m][1], second, word);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    Int8Words::in_order(sum[m][0], sum[m][1]);
    acc[m][0] = sum[m][0];
    acc[m][1] = sum[m][1];
  }
}

// The same for float rows: a step is two words of x.
template <int M, int Lines>
inline void dot_tile_int8(const float* x, ptrdiff_t x_stride, const int8_t* w, int64_t steps,
                          const char* prefetch, F32x16 (&acc)[M][2]) {
  F32x16 sum[M][2] = {};
  for (int64_t k = 0; k < steps; ++k) {
    F32x16 even[2], odd[2];
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      expand_int8(w + k * kInt8StepBytes + c * (kInt8StepBytes / 2), even[c], odd[c]);
    }
    if (Lines > 0) __builtin_prefetch(prefetch + k * 64, 0, 2);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const float* row = x + m * x_stride + 2 * k;
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        sum[m][c] = multiply_add(sum[m][c], even[c], row[0]);
        sum[m][c] = multiply_add(sum[m][c], odd[c], row[1]);
      }
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) acc[m][c] = sum[m][c];
}

}  // namespace stepgraph
