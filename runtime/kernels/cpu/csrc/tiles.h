// Matrix tiles: the operations of Intel AMX that linear layers use, by the processor
// (`ProcessorTiles`) or in portable code with the same bits (`EmulatedTiles`), which tests run and
// which the processor is compared with before it is used.
//
// A tile has up to 16 rows of up to 16 words. `dot` adds the product of A and B to C. A row of A has
// words of two bf16 or four int8 of consecutive inputs, a row of B has such words (of four uint8) of
// 16 columns, and C has floats or int32. `configure` shapes all tiles for up to 32 rows of two A,
// and a depth of words, which are the rows of B:
//
//              B0  B1
//          A0  C00 C01
//          A1  C10 C11
//
// The contents of tiles do not survive it.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vec.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && STEPGRAPH_AVX512
#define STEPGRAPH_AMX 1
#else
#define STEPGRAPH_AMX 0
#endif

namespace stepgraph {

constexpr int64_t kTileSize = 16;  // rows, and words of a row

// Which tiles the products of this process use. None unless the library was compiled for AMX, the
// system lets the process use it, and the processor computes the bits of the emulation.
enum class TileUse { kNone, kDifferent, kProcessor, kEmulated };
TileUse tile_use();
void emulate_tiles(bool emulated);  // for tests

class ProcessorTiles;
class EmulatedTiles;

// Calls visit(std::type_identity<Tiles>()) with the class of the tiles in use; false: there are none.
template <class Visit>
bool with_tiles(TileUse use, Visit visit) {
  if (use == TileUse::kEmulated) visit(std::type_identity<EmulatedTiles>());
#if STEPGRAPH_AMX
  else if (use == TileUse::kProcessor) visit(std::type_identity<ProcessorTiles>());
#endif
  else return false;
  return true;
}

enum TileRegister { kC00, kC01, kC10, kC11, kA0, kA1, kB0, kB1, kTileRegisters };

// What LDTILECFG reads. Tiles without rows have no words.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileShapes(int64_t count, int64_t depth) {
    const int64_t upper = std::min(count, kTileSize);
    for (const TileRegister tile : {kC00, kC01}) set(tile, upper, kTileSize);
    for (const TileRegister tile : {kC10, kC11}) set(tile, count - upper, kTileSize);
    set(kA0, upper, depth);
    set(kA1, count - upper, depth);
    for (const TileRegister tile : {kB0, kB1}) set(tile, depth, kTileSize);
  }

 private:
  void set(TileRegister tile, int64_t height, int64_t words) {
    rows[tile] = static_cast<uint8_t>(height);
    row_bytes[tile] = static_cast<uint16_t>(height > 0 ? 4 * words : 0);
  }
};

// How a thread has configured the tiles of its processor, which it releases in the end: the system
// then saves no tiles when it switches to another thread.
struct TileState {
  int64_t rows = 0, depth = 0;

  TileState() = default;
  TileState(const TileState&) = delete;
  TileState& operator=(const TileState&) = delete;
  ~TileState() {
#if STEPGRAPH_AMX
    if (rows > 0) asm volatile("tilerelease");
#endif
  }
};

#if STEPGRAPH_AMX
// Not by intrinsics: GCC's take only literals for tiles, and do not say that they access memory.
class ProcessorTiles {
 public:
  explicit ProcessorTiles(TileState& state) : state_(state) {}

  // Takes some 200 cycles, unless nothing changes.
  void configure(int64_t rows, int64_t depth) {
    if (state_.rows == rows && state_.depth == depth) return;
    state_.rows = rows;
    state_.depth = depth;
    const TileShapes shapes(rows, depth);
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  template <TileRegister To>
  STEPGRAPH_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(To));
  }
  template <TileRegister To>
  STEPGRAPH_INLINE void load(const void* rows, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(To) : "memory");
  }
  template <TileRegister From>
  STEPGRAPH_INLINE void store(void* rows, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(From) : "memory");
  }
  template <bool Int8, TileRegister C, TileRegister A, TileRegister B>
  STEPGRAPH_INLINE void dot() {
    if constexpr (Int8) {
      asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    } else {
      asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
  }

 private:
  TileState& state_;
};
#endif

// As Intel's manual (SDM, volume 2) describes TDPBSUD and TDPBF16PS, up to the payload of NaN. Sums
// of bf16 begin at zero in each `dot`: a chain of multiply-adds of the first halves of words and one
// of the second halves, whose sum is added to C. Numbers are rounded to nearest even, and those
// below 2**-126 are zero, whether they come in or out.
class EmulatedTiles {
 public:
  explicit EmulatedTiles(TileState&) {}

  void configure(int64_t rows, int64_t depth) {
    shapes_ = TileShapes(rows, depth);
    std::memset(words_, 0xff, sizeof(words_));  // NaN
  }
  template <TileRegister To>
  void zero() {
    std::memset(words_[To], 0, sizeof(words_[To]));
  }
  template <TileRegister To>
  void load(const void* rows, int64_t stride) {
    for (int i = 0; i < shapes_.rows[To]; ++i) {
      std::memcpy(words_[To][i], static_cast<const char*>(rows) + i * stride,
                  shapes_.row_bytes[To]);
    }
  }
  template <TileRegister From>
  void store(void* rows, int64_t stride) {
    for (int i = 0; i < shapes_.rows[From]; ++i) {
      std::memcpy(static_cast<char*>(rows) + i * stride, words_[From][i], shapes_.row_bytes[From]);
    }
  }
  template <bool Int8, TileRegister C, TileRegister A, TileRegister B>
  void dot() {
    for (int m = 0; m < shapes_.rows[C]; ++m) {
      if constexpr (Int8) dot_int8(words_[C][m], words_[A][m], words_[B], shapes_.rows[B]);
      else dot_bf16(words_[C][m], words_[A][m], words_[B], shapes_.rows[B]);
    }
  }

 private:
  using Row = uint32_t[kTileSize];

  static void dot_int8(Row& c, const Row& a, const Row* b, int depth) {
    for (int k = 0; k < depth; ++k) {
      for (int n = 0; n < kTileSize; ++n) {
        for (int shift = 0; shift < 32; shift += 8) {
          const int32_t product = static_cast<int8_t>(a[k] >> shift) * (b[k][n] >> shift & 255);
          c[n] += static_cast<uint32_t>(product);
        }
      }
    }
  }

  static void dot_bf16(Row& c, const Row& a, const Row* b, int depth) {
    float even[kTileSize] = {}, odd[kTileSize] = {};
    for (int k = 0; k < depth; ++k) {
      for (int n = 0; n < kTileSize; ++n) {
        even[n] = multiply_add(even[n], a[k] << 16, b[k][n] << 16);
        odd[n] = multiply_add(odd[n], a[k] & 0xffff0000u, b[k][n] & 0xffff0000u);
      }
    }
    for (int n = 0; n < kTileSize; ++n) {
      const float sum = flushed(even[n] + odd[n]);
      c[n] = bits<uint32_t>(flushed(flushed(bits<float>(c[n])) + sum));
    }
  }

  static float flushed(float value) {
    return std::fabs(value) < FLT_MIN ? std::copysign(0.0f, value) : value;
  }

  // A double has enough bits for rounding twice to equal rounding once. What would be below 2**-126
  // if floats had smaller exponents is zero.
  static float multiply_add(float sum, uint32_t a, uint32_t b) {
    const double factor = flushed(bits<float>(a));
    const double exact = factor * flushed(bits<float>(b)) + sum;
    const bool tiny = std::fabs(exact) < 0x1p-126 - 0x1p-151;
    return static_cast<float>(tiny ? std::copysign(0.0, exact) : exact);
  }

  TileShapes shapes_{0, 0};
  Row words_[kTileRegisters][kTileSize];
};

// sums = x times w of some rows and 32 columns, added to the sums of before if there are `more`:
//
//   x     [rows][words], rows `x_stride` bytes apart
//   w     [words][32]
//   sums  [rows][32], of float or int32, rows `sums_stride` bytes apart
//
// Nothing behind these is read. The first rows ask for cache lines from `prefetch` on (null: none),
// as many as w has. The words of a row are multiplied 16 at a time, and then the rest: its sums
// depend neither on other rows nor on how many there are.
template <class Tiles, bool Int8>
void tile_product(Tiles& tiles, const void* x, int64_t x_stride, int64_t rows, const void* w,
                  int64_t words, const char* prefetch, void* sums, int64_t sums_stride,
                  bool more) {
  constexpr int64_t kHalf = kTileSize * 4;
  const int64_t parts = (rows + 2 * kTileSize - 1) / (2 * kTileSize);
  const int64_t part = (rows + parts - 1) / parts;  // few sizes: each takes a configuration
  for (int64_t begin = 0, end; begin < words; begin = end, more = true) {
    const int64_t depth = std::min(words - begin, kTileSize);
    end = words - (words - begin) % depth;
    for (int64_t row = 0; row < rows; row += part) {
      const int64_t count = std::min(rows - row, part);
      const bool two = count > kTileSize;
      const char* a = static_cast<const char*>(x) + row * x_stride;
      const auto each = [&](auto visit) {
        char* c = static_cast<char*>(sums) + row * sums_stride;
        visit.template operator()<kC00>(c);
        visit.template operator()<kC01>(c + kHalf);
        if (!two) return;
        visit.template operator()<kC10>(c + kTileSize * sums_stride);
        visit.template operator()<kC11>(c + kTileSize * sums_stride + kHalf);
      };
      tiles.configure(count, depth);
      each([&]<TileRegister C>(const char* c) {
        if (more) tiles.template load<C>(c, sums_stride);
        else tiles.template zero<C>();
      });
      for (int64_t k = begin; k < end; k += depth) {
        const char* b = static_cast<const char*>(w) + k * kStepBytes;
        if (row == 0 && prefetch != nullptr) {
          for (int64_t at = 0; at < depth * kStepBytes; at += 64) {
            __builtin_prefetch(prefetch + k * kStepBytes + at, 0, 2);
          }
        }
        tiles.template load<kB0>(b, kStepBytes);
        tiles.template load<kA0>(a + 4 * k, x_stride);
        tiles.template dot<Int8, kC00, kA0, kB0>();
        tiles.template load<kB1>(b + kHalf, kStepBytes);
        tiles.template dot<Int8, kC01, kA0, kB1>();
        if (!two) continue;
        tiles.template load<kA1>(a + 4 * k + kTileSize * x_stride, x_stride);
        tiles.template dot<Int8, kC10, kA1, kB0>();
        tiles.template dot<Int8, kC11, kA1, kB1>();
      }
      each([&]<TileRegister C>(char* c) { tiles.template store<C>(c, sums_stride); });
    }
  }
}

}  // namespace stepgraph
