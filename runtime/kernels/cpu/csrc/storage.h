// How the arena stores vectors, as the attention kernels see it: a codec for each storage.
//
// Plain is the model's own type. Quantised vectors are bytes times a bfloat16 scale, laid out as
// `kv_storage.py` says: of each head of a block first the bytes of all its slots, then the scales.
// The kernels apply a key's scale to its score and a value's scale to its weight, so decoding
// is a conversion of bytes to numbers, and exact in bfloat16 too.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vec.h"

namespace stepgraph {

typedef uint8_t U8x16 __attribute__((vector_size(16)));
typedef int8_t I8x16 __attribute__((vector_size(16)));

// ---- formats of a byte -------------------------------------------------------------------------

// What a format tells:
//   kLargest  the largest number
//   kUnit     what a decoded 1 stands for
//   decode    16 bytes as numbers
//   encode    numbers within +-kLargest, rounded half to even, in the low byte of each word

struct Int8 {
  static constexpr float kLargest = 127.0f, kUnit = 1.0f;
  static F32x16 decode(const uint8_t* p) {
#if STEPGRAPH_AVX512
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (F32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
    return __builtin_convertvector(load<I8x16>(p), F32x16);
#endif
  }
  static U32x16 encode(F32x16 value) {
    const F32x16 number = value == value ? value : F32x16{};
    return bits<U32x16>(number + 12582912.0f) - 0x4b400000u;  // 1.5 * 2**23 rounds
  }
};

// float8_e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity. Decoded numbers are
// 2**-8 of what they stand for: moved into a half, whose exponent has bias 15, the bits mean that.
// NaN decodes to a number: where data is NaN, so is the scale.
struct Fp8 {
  static constexpr float kLargest = 448.0f, kUnit = 256.0f;
  static F32x16 decode(const uint8_t* p) {
#if STEPGRAPH_AVX512
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
    const __m256i sign_kept = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
    return (F32x16)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), sign_kept));
#else
    const U32x16 code = __builtin_convertvector(load<U8x16>(p), U32x16);
    const F32x16 steps = __builtin_convertvector(code & 7u, F32x16) * 0x1p-17f;  // exponent bits 0
    const U32x16 normal = ((code & 0x7fu) << 20) + (112u << 23);
    const U32x16 magnitude = (code & 0x78u) == 0 ? bits<U32x16>(steps) : normal;
    return bits<F32x16>(magnitude | (code & 0x80u) << 24);
#endif
  }
  static U32x16 encode(F32x16 value) {
    const U32x16 raw = bits<U32x16>(value), sign = raw & 0x80000000u, magnitude = raw ^ sign;
    // Added to 2**14, a float rounds to multiples of 2**-9, the steps below 2**-6.
    const U32x16 small = bits<U32x16>(bits<F32x16>(magnitude) + 0x1p14f) - (141u << 23);
    const U32x16 odd = (magnitude >> 20) & 1u;
    const U32x16 normal = (magnitude - (120u << 23) + 0x7ffffu + odd) >> 20;
    const U32x16 code = magnitude < (121u << 23) ? small : normal;
    return (value == value ? code : (U32x16{} + 0x7fu)) | sign >> 24;
  }
};

// ---- codecs ------------------------------------------------------------------------------------

// What a codec tells the kernels:
//   Data      element of a stored vector
//   Word      32-bit word of a packed step, as `Element` has it
//   kScaled   whether a number has to be multiplied by a scale
//   words     16 words from consecutive elements
//   columns   32 elements from `at` on of a value (of two, if a word holds a pair) as two vectors
//             of words, in an order that `store32` of the codec undoes

template <class T>
struct Plain : Element<T> {
  using Data = T;
  static constexpr bool kScaled = false;
  static void columns(const T* const (&value)[1], int64_t at, F32x16& a, F32x16& b) {
    Element<T>::load32(value[0] + at, a, b);
  }
};

template <>
struct Plain<c10::BFloat16> : Element<c10::BFloat16> {
  using Data = c10::BFloat16;
  static constexpr bool kScaled = false;
  static void columns(const Data* const (&value)[2], int64_t at, U32x16& a, U32x16& b) {
    const U32x16 first = load<U32x16>(value[0] + at), second = load<U32x16>(value[1] + at);
#if STEPGRAPH_AVX512_BF16
    a = (U32x16)_mm512_unpacklo_epi16((__m512i)first, (__m512i)second);  // 4 of each 8 elements
    b = (U32x16)_mm512_unpackhi_epi16((__m512i)first, (__m512i)second);  // the 4 behind them
#else
    a = (first & 0xffffu) | (second << 16);          // even elements
    b = (first >> 16) | (second & 0xffff0000u);      // odd elements
#endif
  }
#if STEPGRAPH_AVX512_BF16
  static void store32(Data* p, F32x16 a, F32x16 b) {
    const U32x16 first = round_to_bf16(a) >> 16, second = round_to_bf16(b) >> 16;
    store(p, _mm512_packus_epi32((__m512i)first, (__m512i)second));
  }
#endif
};

// W: the word of the queries. Codecs of one format differ in nothing else.
template <class Format, class W>
struct Scaled {
  using Data = uint8_t;
  using Word = W;
  using Number = Format;
  static constexpr bool kScaled = true;
  static constexpr int kPerWord = std::is_same_v<Word, uint32_t> ? 2 : 1;
  static auto words(const uint8_t* p) {
    if constexpr (kPerWord == 2) {
      return pack_bf16(Format::decode(p), Format::decode(p + 16));
    } else {
      return Format::decode(p);
    }
  }
  static void columns(const uint8_t* const (&value)[1], int64_t at, F32x16& a, F32x16& b) {
    a = Format::decode(value[0] + at);
    b = Format::decode(value[0] + at + 16);
  }
  static void columns(const uint8_t* const (&value)[2], int64_t at, U32x16& a, U32x16& b) {
    const auto pairs = [&](int64_t from) {  // numbers of a byte are exact in bf16
      return bits<U32x16>(Format::decode(value[0] + from)) >> 16 |
             bits<U32x16>(Format::decode(value[1] + from));
    };
    a = pairs(at);
    b = pairs(at + 16);
  }
  template <class T>
  static void store32(T* p, F32x16 a, F32x16 b) {
    Element<T>::store32_in_order(p, a, b);
  }
};

// 16 words that start at element `from` of a row of `size` elements, zeros behind its end.
template <class Codec>
inline auto words_of(const typename Codec::Data* row, int64_t from, int64_t size) {
  constexpr int64_t kSpan = 16 * Codec::kPerWord;
  if (from + kSpan <= size) return Codec::words(row + from);
  typename Codec::Data padded[kSpan] = {};
  std::copy_n(row + from, size - from, padded);
  return Codec::words(padded);
}

// ---- writing -----------------------------------------------------------------------------------

inline uint16_t round_up_to_bf16(float value) {  // of values that are not negative
  return value == value ? (bits<uint32_t>(value) + 0xffffu) >> 16 : 0x7fc0;
}

inline float from_bf16(uint16_t value) { return bits<float>(static_cast<uint32_t>(value) << 16); }

// 16 elements from `at` on of a row of `size`, zeros behind its end.
template <class T>
inline F32x16 floats_of(const T* row, int64_t at, int64_t size) {
  T padded[16] = {};
  const T* from = row + at;
  if (at + 16 > size) {
    std::copy_n(from, size - at, padded);
    from = padded;
  }
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    return bits<F32x16>(__builtin_convertvector(load<U16x16>(from), U32x16) << 16);
  } else {
    return Element<T>::words(from);
  }
}

// data * scale is close to x, `size` elements; byte for byte what `kv_storage.quantise` makes.
template <class Format, class T>
void quantise(const T* x, int64_t size, uint8_t* data, uint8_t* scale) {
  F32x16 lanes = {};
  for (int64_t i = 0; i < size; i += 16) {
    const F32x16 value = floats_of(x, i, size), magnitude = value < 0.0f ? -value : value;
    lanes = (magnitude <= lanes) | (lanes != lanes) ? lanes : magnitude;  // NaN comes and stays
  }
  float amax = 0.0f;
  for (int i = 0; i < 16; ++i) amax = lanes[i] <= amax || amax != amax ? amax : lanes[i];
  const uint16_t rounded = round_up_to_bf16(amax / Format::kLargest);
  std::memcpy(scale, &rounded, sizeof(rounded));
  const float divisor = rounded == 0 ? 1.0f : from_bf16(rounded);
  for (int64_t i = 0; i < size; i += 16) {
    F32x16 value = floats_of(x, i, size) / broadcast(divisor);
    value = value > Format::kLargest ? (F32x16{} + Format::kLargest) : value;
    value = value < -Format::kLargest ? (F32x16{} - Format::kLargest) : value;
    const U8x16 codes = __builtin_convertvector(Format::encode(value), U8x16);
    std::memcpy(data + i, &codes, std::min<int64_t>(size - i, 16));
  }
}

}  // namespace stepgraph
