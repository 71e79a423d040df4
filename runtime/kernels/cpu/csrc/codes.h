// Weights as codes in groups (`weights/grouped.py`), packed as `ops/packed_parts.py` does.
//
// A packed weight begins with a header that describes its parts: rows of one format, in blocks of
// 32 output features. A block is read from first byte to last. For each group of inputs it has
// scales and minimums of the 32 features, and then chunks of codes. A chunk is 8 consecutive
// inputs, 4 steps of two, in planes:
//
//   4, 5, 6 bits  pairs of bytes [half][16 columns][2 inputs]: 4 bits of each step
//   5 bits        after these, bytes [16 columns][2 inputs]: a bit of each step of each half
//   6 bits        after these, bytes [16 columns][2 inputs][half]: 2 bits of each step
//   8 bits        bytes [step][4][half][4 columns][2 inputs]
//
// A code stands for one of up to 256 levels, all exact in bf16: a step becomes words as of any
// other weight, once for all rows of a tile. Codes of consecutive integers can be multiplied by
// inputs in int8, 4 bytes of a column at a time.
#pragma once

#include "kernels.h"
#include "storage.h"

#if STEPGRAPH_AVX512 && defined(__AVX512BW__)
#define STEPGRAPH_AVX512_BW 1
#else
#define STEPGRAPH_AVX512_BW 0
#endif
#if STEPGRAPH_AVX512_BW && defined(__AVX512VBMI__)
#define STEPGRAPH_AVX512_VBMI 1
#else
#define STEPGRAPH_AVX512_VBMI 0
#endif
#if STEPGRAPH_AVX512_BW && defined(__AVX512VNNI__)
#define STEPGRAPH_AVX512_VNNI 1
#else
#define STEPGRAPH_AVX512_VNNI 0
#endif

namespace stepgraph {

constexpr int kChunkSteps = 4;

// Numbers of groups: `outer` of `run` groups times `inner` of each. Types as in `packed_parts.py`.
struct ScaleLayout {
  enum Outer : int64_t { kNone, kHalf, kBfloat16, kFloat };
  enum Inner : int64_t { kOnes, kInt8, kUint8, kE4m3 };
  int64_t outer, inner, run;
};

// Rows of one format.
struct PackedPart {
  int64_t first_block, begin, block_bytes;  // begin: bytes from the header on
  int64_t bits;                             // 0: not codes, but numbers of the model's type
  int64_t group_steps;                      // a multiple of kChunkSteps
  ScaleLayout scales, minimums;             // minimums of type kNone: all 0
  int64_t levels;                           // bytes from the header on to bf16 [256]
  int64_t int8_inputs;                      // 1: inputs are rounded to int8
  int64_t integers;                         // 1: a code stands for lowest + (code ^ flipped)
  int64_t lowest, flipped;

  // Whether codes are the numbers from -128 to 127 themselves.
  bool is_signed() const { return bits == 8 && integers != 0 && lowest == -128 && flipped == 128; }
};

// What a packed weight begins with.
struct PackedHeader {
  static constexpr int64_t kMagic = 0x337374726170;
  int64_t magic, columns, inputs, element_bytes;  // element_bytes: of the model's type
  int64_t bytes, count;                           // bytes: of the whole; count: of parts
  PackedPart parts[];

  const PackedPart& part_of(int64_t block) const {
    const PackedPart* part = parts + count - 1;
    while (part->first_block > block) --part;
    return *part;
  }
  const uint16_t* levels_of(const PackedPart& part) const {
    return reinterpret_cast<const uint16_t*>(reinterpret_cast<const char*>(this) + part.levels);
  }
};

template <int Bits>
constexpr int64_t kChunkBytes = Bits * kBlock * 2 * kChunkSteps / 8;

// A code of a chunk. `lane`: of 32, which are two inputs of 16 columns.
template <int Bits>
STEPGRAPH_INLINE int code_of(const uint8_t* chunk, int step, int half, int lane) {
  if constexpr (Bits == 8) return chunk[64 * step + lane / 8 * 16 + half * 8 + lane % 8];
  const auto pair = [&](int at) __attribute__((always_inline)) {
    uint16_t bytes;
    std::memcpy(&bytes, chunk + at, sizeof(bytes));
    return static_cast<int>(bytes);
  };
  int code = pair(64 * half + 2 * lane) >> 4 * step & 15;
  if constexpr (Bits == 5) code |= (chunk[128 + lane] >> (4 * half + step) & 1) << 4;
  if constexpr (Bits == 6) code |= (pair(128 + 2 * lane) >> (8 * half + 2 * step) & 3) << 4;
  return code;
}

// The same of one column and one of the 8 inputs of a chunk.
template <int Bits>
STEPGRAPH_INLINE int code_at(const char* chunk, int column, int input) {
  return code_of<Bits>(reinterpret_cast<const uint8_t*>(chunk), input / 2, column / 16,
                       column % 16 * 2 + input % 2);
}

// Codes become words of two bf16. `expand` gives a step of the chunk that was loaded last, as two
// vectors of 16 columns.
//
// Consecutive integers are computed; other levels are looked up one by one. Loops over lanes are
// plain ones, which compilers make vectors of as large as registers are.
template <int Bits>
class PortableCodeWords {
 public:
  PortableCodeWords(const PackedPart& part, const uint16_t* levels)
      : levels_(levels),
        computed_(part.integers != 0),
        flipped_(static_cast<int>(part.flipped)),
        lowest_(static_cast<float>(part.lowest)) {}

  // Apart from the multiplications, which need all registers.
  __attribute__((noinline)) void load(const char* p) {
    const uint8_t* chunk = reinterpret_cast<const uint8_t*>(p);
    const int flipped = flipped_;
    const float lowest = lowest_;
    for (int step = 0; step < kChunkSteps; ++step) {
      for (int half = 0; half < 2; ++half) {
        uint16_t* out = words_[step][half];
        if (!computed_) {
          for (int i = 0; i < 32; ++i) out[i] = levels_[code_of<Bits>(chunk, step, half, i)];
          continue;
        }
        int codes[32];
        for (int i = 0; i < 32; i += 8) {
          for (int j = 0; j < 8; ++j) codes[i + j] = code_of<Bits>(chunk, step, half, i + j);
        }
        for (int i = 0; i < 32; ++i) {
          const float level = static_cast<float>(codes[i] ^ flipped) + lowest;
          out[i] = bits<uint32_t>(level) >> 16;  // bf16 represents it
        }
      }
    }
  }

  STEPGRAPH_INLINE void expand(int step, U32x16& first, U32x16& second) const {
    first = stepgraph::load<U32x16>(words_[step][0]);
    second = stepgraph::load<U32x16>(words_[step][1]);
  }

  // All steps of the chunk, in the layout of a block of bf16.
  STEPGRAPH_INLINE void store(uint32_t* out) const { std::memcpy(out, words_, sizeof(words_)); }

 private:
  const uint16_t* levels_;
  alignas(64) uint16_t words_[kChunkSteps][2][32];
  bool computed_;
  int flipped_;
  float lowest_;
};

#if STEPGRAPH_AVX512_BW
typedef uint16_t U16x32 __attribute__((vector_size(64)));

// Of 4, 5 or 6 bits: an instruction looks up 32 codes.
template <int Bits>
class Avx512CodeWords {
 public:
  Avx512CodeWords(const PackedPart&, const uint16_t* levels) {
    for (int i = 0; i < 2; ++i) table_[i] = _mm512_loadu_si512(levels + 32 * i);
  }

  void load(const char* chunk) {
    for (int half = 0; half < 2; ++half) low_[half] = stepgraph::load<U16x32>(chunk + 64 * half);
    if constexpr (Bits == 5) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunk + 128));
      high_ = (U16x32)_mm512_cvtepu8_epi16(bytes);
    }
    if constexpr (Bits == 6) high_ = stepgraph::load<U16x32>(chunk + 128);
  }

  STEPGRAPH_INLINE void expand(int step, U32x16& first, U32x16& second) const {
    first = words(step, 0);
    second = words(step, 1);
  }

 private:
  // Instructions use the lowest 5 or 6 bits of an index. A table of 16 levels repeats them.
  STEPGRAPH_INLINE U32x16 words(int step, int half) const {
    __m512i index = (__m512i)(low_[half] >> 4 * step);
    if constexpr (Bits > 4) {
      const int shift = Bits == 5 ? 4 * half + step - 4 : 8 * half + 2 * step - 4;
      const U16x32 high = shift < 0 ? high_ << -shift : high_ >> shift;
      constexpr int kChoose = 0xca;  // first ? second : third
      index = _mm512_ternarylogic_epi64(_mm512_set1_epi16(Bits == 5 ? 16 : 48), (__m512i)high,
                                        index, kChoose);
    }
    if constexpr (Bits < 6) return (U32x16)_mm512_permutexvar_epi16(index, table_[0]);
    else return (U32x16)_mm512_permutex2var_epi16(table_[0], index, table_[1]);
  }

  __m512i table_[2];
  U16x32 low_[2], high_;
};
#endif

#if STEPGRAPH_AVX512_VBMI
// Of 8 bits: both bytes of a level are looked up, by codes below 128 and by others. Those of signed
// numbers are looked up by magnitude, which leaves registers for the sums of twelve rows.
template <bool Signed>
class VbmiCodeWords {
 public:
  VbmiCodeWords(const PackedPart&, const uint16_t* levels) {
    uint8_t bytes[2][64 * kVectors];
    for (int i = 0; i < 64 * kVectors; ++i) {
      bytes[0][i] = static_cast<uint8_t>(levels[i]);
      bytes[1][i] = static_cast<uint8_t>(levels[i] >> 8);
    }
    // Indices have seven bits, so a magnitude of 128, 0x4300 in bf16, is found in the place of 0.
    if (Signed) bytes[1][0] = 0x43;
    for (int i = 0; i < kVectors; ++i) {
      low_[i] = _mm512_loadu_si512(bytes[0] + 64 * i);
      high_[i] = _mm512_loadu_si512(bytes[1] + 64 * i);
    }
  }

  void load(const char* chunk) { chunk_ = chunk; }

  STEPGRAPH_INLINE void expand(int step, U32x16& first, U32x16& second) const {
    const __m512i codes = _mm512_loadu_si512(chunk_ + 64 * step);
    __m512i low, high;
    if constexpr (Signed) {
      const __m512i magnitude = _mm512_abs_epi8(codes);
      const __mmask64 not_zero = _mm512_test_epi8_mask(codes, codes);
      low = _mm512_permutex2var_epi8(low_[0], magnitude, low_[1]);
      high = _mm512_maskz_permutex2var_epi8(not_zero, high_[0], magnitude, high_[1]);
      constexpr int kOrAnd = 0xf8;  // first | (second & third)
      high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8(-128), kOrAnd);
    } else {
      const __mmask64 above = _mm512_movepi8_mask(codes);
      const auto look_up = [&](const __m512i* table) {
        return _mm512_mask_blend_epi8(above, _mm512_permutex2var_epi8(table[0], codes, table[1]),
                                      _mm512_permutex2var_epi8(table[2], codes, table[3]));
      };
      low = look_up(low_);
      high = look_up(high_);
    }
    first = (U32x16)_mm512_unpacklo_epi8(low, high);
    second = (U32x16)_mm512_unpackhi_epi8(low, high);
  }

 private:
  static constexpr int kVectors = Signed ? 2 : 4;
  __m512i low_[kVectors], high_[kVectors];
  const char* chunk_;
};
#endif

#if STEPGRAPH_AVX512_VNNI
// Codes become bytes, of which a vector has 4 inputs of 16 columns. `expand` gives two vectors of
// inputs 0, 4, 1 and 5 of the chunk that was loaded last (0), or of inputs 2, 6, 3 and 7 (1).
template <int Bits>
class CodeBytes {
 public:
  CodeBytes(const PackedPart& part, const uint16_t*)
      : flipped_(_mm512_set1_epi8(static_cast<char>(part.flipped))) {}

  STEPGRAPH_INLINE void load(const char* chunk) {
    for (int i = 0; i < (Bits == 8 ? kChunkSteps : 2); ++i) {
      codes_[i] = _mm512_loadu_si512(chunk + 64 * i);
      if constexpr (Bits == 8) codes_[i] = _mm512_xor_si512(codes_[i], flipped_);
    }
    // Each byte of the upper bits twice.
    if constexpr (Bits == 5) {
      const __m512i bytes = _mm512_cvtepu8_epi16(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunk + 128)));
      high_[0] = high_[1] = _mm512_or_si512(bytes, _mm512_slli_epi16(bytes, 8));
    }
    if constexpr (Bits == 6) {
      const __m512i pairs = _mm512_loadu_si512(chunk + 128);
      high_[0] = choose(_mm512_set1_epi16(0xff), pairs, _mm512_slli_epi16(pairs, 8));
      high_[1] = choose(_mm512_set1_epi16(0xff), _mm512_srli_epi16(pairs, 8), pairs);
    }
  }

  STEPGRAPH_INLINE void expand(int odd, U32x16& first, U32x16& second) const {
    if constexpr (Bits == 8) {
      first = (U32x16)_mm512_unpacklo_epi8(codes_[odd], codes_[odd + 2]);
      second = (U32x16)_mm512_unpackhi_epi8(codes_[odd], codes_[odd + 2]);
    } else {
      first = (U32x16)bytes(odd, 0);
      second = (U32x16)bytes(odd, 1);
    }
  }

 private:
  STEPGRAPH_INLINE static __m512i choose(__m512i mask, __m512i ones, __m512i zeros) {
    return _mm512_ternarylogic_epi64(mask, ones, zeros, 0xca);
  }

  STEPGRAPH_INLINE __m512i bytes(int odd, int half) const {
    const __m512i low = _mm512_and_si512(_mm512_srli_epi16(codes_[half], 4 * odd),
                                         _mm512_set1_epi8(15));
    if constexpr (Bits == 5) {
      const int bit = 1 << 4 * half + odd;
      const __mmask64 high = _mm512_test_epi8_mask(
          high_[half], _mm512_set1_epi16(static_cast<int16_t>(bit | bit << 10)));
      return _mm512_mask_add_epi8(low, high, low, _mm512_set1_epi8(16));
    }
    if constexpr (Bits == 6) {  // of two steps, in the lower and the upper bytes
      const __m512i high =
          choose(_mm512_set1_epi16(0xff), _mm512_slli_epi16(high_[half], odd ? 2 : 4),
                 _mm512_srli_epi16(high_[half], odd ? 2 : 0));
      return choose(_mm512_set1_epi8(48), high, low);
    }
    return low;
  }

  __m512i flipped_, codes_[kChunkSteps], high_[2];
};
#endif

template <int Bits, bool Signed>
struct CodeWordsOf {
#if STEPGRAPH_AVX512_BW
  using Type = std::conditional_t<Bits == 8, PortableCodeWords<8>, Avx512CodeWords<Bits>>;
#else
  using Type = PortableCodeWords<Bits>;
#endif
};
#if STEPGRAPH_AVX512_VBMI
template <bool Signed>
struct CodeWordsOf<8, Signed> {
  using Type = VbmiCodeWords<Signed>;
};
#endif

// Reads the scales (or minimums) of a block group by group.
class ScaleReader {
 public:
  explicit ScaleReader(const ScaleLayout& layout) : layout_(layout) {}

  bool none() const { return layout_.outer == ScaleLayout::kNone; }

  // Of the group that begins at p, which moves on.
  void next(const char*& p, F32x16 (&scale)[2]) {
    if (left_ == 0) {
      left_ = layout_.run;
      for (F32x16& outer : outer_) {
        if (layout_.outer == ScaleLayout::kFloat) outer = stepgraph::load<F32x16>(p);
        else if (layout_.outer == ScaleLayout::kHalf) outer = numbers<c10::Half>(p);
        else outer = numbers<c10::BFloat16>(p);
        p += layout_.outer == ScaleLayout::kFloat ? 64 : 32;
      }
    }
    --left_;
    for (int half = 0; half < 2; ++half) {
      scale[half] = outer_[half];
      if (layout_.inner == ScaleLayout::kOnes) continue;
      const uint8_t* bytes = reinterpret_cast<const uint8_t*>(p);
      if (layout_.inner == ScaleLayout::kInt8) scale[half] *= Int8::decode(bytes);
      else if (layout_.inner == ScaleLayout::kE4m3) scale[half] *= Fp8::decode(bytes) * Fp8::kUnit;
      else scale[half] *= unsigned_numbers(bytes);
      p += 16;
    }
  }

 private:
  template <class T>
  static F32x16 numbers(const char* p) {
    return floats_of(reinterpret_cast<const T*>(p), 0, 16);
  }

  static F32x16 unsigned_numbers(const uint8_t* p) {
#if STEPGRAPH_AVX512
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (F32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
#else
    return __builtin_convertvector(stepgraph::load<U8x16>(p), F32x16);
#endif
  }

  const ScaleLayout& layout_;
  int64_t left_ = 0;
  F32x16 outer_[2] = {};
};

// Calls visit(k, number) for the first `count` numbers of a column of a block.
template <int Bits, class Visit>
void visit_column(const PackedPart& part, const uint16_t* levels, const char* p, int column,
                  int64_t count, Visit visit) {
  ScaleReader scales(part.scales), minimums(part.minimums);
  for (int64_t k = 0; k < count;) {
    F32x16 scale[2], minimum[2] = {};
    scales.next(p, scale);
    if (!minimums.none()) minimums.next(p, minimum);
    const float factor = scale[column / 16][column % 16];
    const float subtracted = minimum[column / 16][column % 16];
    for (const int64_t end = std::min(k + 2 * part.group_steps, count); k < end;) {
      for (int i = 0; i < 2 * kChunkSteps && k < end; ++i, ++k) {
        visit(k, from_bf16(levels[code_at<Bits>(p, column, i)]) * factor - subtracted);
      }
      p += kChunkBytes<Bits>;
    }
  }
}

// Calls run(std::integral_constant<int, bits>()).
template <class Run>
decltype(auto) for_bits(int64_t bits, Run run) {
  switch (bits) {
    case 4: return run(std::integral_constant<int, 4>());
    case 5: return run(std::integral_constant<int, 5>());
    case 6: return run(std::integral_constant<int, 6>());
    default: return run(std::integral_constant<int, 8>());
  }
}

}  // namespace stepgraph
