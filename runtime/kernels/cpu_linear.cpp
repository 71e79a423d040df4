// Linear layers over packed weights, for few tokens (bound by the bytes of the weights) and for
// many (bound by multiply-adds).
//
// A packed block of 32 columns is read from first byte to last, each step once for all rows of a
// tile, so a decode step streams the weights in the order in which they lie in memory.
#include <algorithm>
#include <array>
#include <utility>

#include <omp.h>

#include "cpu_int8.h"
#include "cpu_kernels.h"
#include "cpu_vec.h"

namespace stepgraph {
namespace {

// Rows that share a weight block while it is near: eight tiles of twelve.
constexpr int64_t kGroupRows = 96;
// How far ahead of use the stream of weights is asked for where a block is used by one tile only.
// Measured on Zen 5, where the hardware alone keeps up with two rows of bf16 but not with more, and
// not with int8.
constexpr int64_t kPrefetchBytes = 16384;
// Below this a second thread costs more than it brings.
constexpr int64_t kBytesPerThread = 32 * 1024;

// How a packed weight is stored: what a step of a block takes, and its dot tile.
template <class T>
struct AsElements {
  using Word = typename Element<T>::Word;
  static constexpr int kStepLines = kStepBytes / 64;
  static constexpr int64_t kRowsWithoutPrefetch = 2;

  template <int M, int Lines>
  static void dot(const Word* x, ptrdiff_t x_stride, const char* w, int64_t steps,
                  const char* prefetch, F32x16 (&acc)[M][2]) {
    dot_tile<M, 1, Lines>(x, x_stride, reinterpret_cast<const Word*>(w), 0, steps, prefetch, acc);
  }
};

template <class T>
struct AsInt8 {
  using Word = typename Element<T>::Word;
  static constexpr int kStepLines = kInt8StepBytes / 64;
  static constexpr int64_t kRowsWithoutPrefetch = 0;

  template <int M, int Lines>
  static void dot(const Word* x, ptrdiff_t x_stride, const char* w, int64_t steps,
                  const char* prefetch, F32x16 (&acc)[M][2]) {
    dot_tile_int8<M, Lines>(x, x_stride, reinterpret_cast<const int8_t*>(w), steps, prefetch, acc);
  }
};

template <class T>
struct Tile {
  const T* x;
  int64_t x_stride;  // words
  const char* w;
  const char* prefetch;
  const float* scales;
  const T* bias;
  T* out;
  int64_t columns;  // of this block, 32 but for the last one
  int64_t out_stride, steps;
};

// What belongs to the columns of a block, as two vectors; null: zeros.
template <class T>
void load_columns(const T* of_block, int64_t columns, F32x16 (&vectors)[2]) {
  float padded[kBlock] = {};
  if (of_block != nullptr) std::copy_n(of_block, columns, padded);
  vectors[0] = load<F32x16>(padded);
  vectors[1] = load<F32x16>(padded + 16);
}

template <class T, template <class> class Stored, int M, int Lines>
void run_tile(const Tile<T>& tile) {
  using Word = typename Element<T>::Word;
  F32x16 acc[M][2], scale[2], bias[2];
  Stored<T>::template dot<M, Lines>(reinterpret_cast<const Word*>(tile.x), tile.x_stride, tile.w,
                                    tile.steps, tile.prefetch, acc);
  load_columns(tile.bias, tile.columns, bias);
  if (tile.scales != nullptr) {
    load_columns(tile.scales, tile.columns, scale);
    for (int m = 0; m < M; ++m)
      for (int c = 0; c < 2; ++c) acc[m][c] *= scale[c];
  }
  for (int m = 0; m < M; ++m) {
    const F32x16 first = acc[m][0] + bias[0], second = acc[m][1] + bias[1];
    T* out = tile.out + m * tile.out_stride;
    if (tile.columns == kBlock) {
      Element<T>::store32_in_order(out, first, second);
    } else {
      T padded[kBlock];
      Element<T>::store32_in_order(padded, first, second);
      std::copy_n(padded, tile.columns, out);
    }
  }
}

// For 1 ... kTileRows rows.
template <class T, template <class> class Stored, int Lines, size_t... Index>
void run_rows(const Tile<T>& tile, int64_t rows, std::index_sequence<Index...>) {
  static constexpr std::array<void (*)(const Tile<T>&), sizeof...(Index)> kTiles = {
      run_tile<T, Stored, Index + 1, Lines>...};
  kTiles[rows - 1](tile);
}

// Units are numbered block by block, within a block group by group of rows.
template <class T, template <class> class Stored>
void run_units(const LinearArgs<T>& args, int64_t groups, int64_t begin, int64_t end) {
  constexpr auto kSizes = std::make_index_sequence<kTileRows>();
  constexpr int kLines = Stored<T>::kStepLines;
  const int64_t block_bytes = args.steps * kLines * 64;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t block = unit / groups;
    const int64_t first_row = unit % groups * kGroupRows;
    const int64_t rows = std::min(args.rows - first_row, kGroupRows);
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    const char* w = static_cast<const char*>(args.packed) + block * block_bytes;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t from = first_row + rows * i / tiles, to = first_row + rows * (i + 1) / tiles;
      // With more tiles than one, the first ones ask for a line a step each of the next block.
      const Tile<T> tile{
          args.x + from * args.x_stride,
          args.x_stride / Element<T>::kPerWord,
          w,
          tiles == 1 ? w + kPrefetchBytes : w + block_bytes + i * (args.steps * 64),
          args.scales == nullptr ? nullptr : args.scales + block * kBlock,
          args.bias == nullptr ? nullptr : args.bias + block * kBlock,
          args.out + from * args.columns + block * kBlock,
          std::min<int64_t>(args.columns - block * kBlock, kBlock),
          args.columns,
          args.steps};
      if (tiles == 1 && rows > Stored<T>::kRowsWithoutPrefetch) {
        run_rows<T, Stored, kLines>(tile, to - from, kSizes);
      } else if (tiles > 1 && i < kLines) {
        run_rows<T, Stored, 1>(tile, to - from, kSizes);
      } else {
        run_rows<T, Stored, 0>(tile, to - from, kSizes);
      }
    }
  }
}

template <class T, template <class> class Stored>
void run(const LinearArgs<T>& args) {
  const int64_t blocks = (args.columns + kBlock - 1) / kBlock;
  const int64_t groups = (args.rows + kGroupRows - 1) / kGroupRows;
  const int64_t units = blocks * groups;
  const int64_t tiles = (args.rows + kTileRows - 1) / kTileRows;
  const int64_t bytes = blocks * args.steps * Stored<T>::kStepLines * 64;
  const int64_t useful = bytes * tiles / kBytesPerThread;
  const int threads =
      static_cast<int>(std::clamp<int64_t>(std::min(useful, units), 1, args.threads));
  if (threads == 1) return run_units<T, Stored>(args, groups, 0, units);
#pragma omp parallel num_threads(threads)
  {
    const int64_t index = omp_get_thread_num(), count = omp_get_num_threads();
    run_units<T, Stored>(args, groups, units * index / count, units * (index + 1) / count);
  }
}

}  // namespace

template <class T>
void packed_linear(const LinearArgs<T>& args) {
  args.scales == nullptr ? run<T, AsElements>(args) : run<T, AsInt8>(args);
}

template void packed_linear(const LinearArgs<c10::BFloat16>&);
template void packed_linear(const LinearArgs<float>&);

}  // namespace stepgraph
