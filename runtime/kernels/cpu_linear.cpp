// Linear layers over packed weights, for few tokens (bound by the bytes of the weights) and for
// many (bound by multiply-adds).
//
// A packed block of 32 columns is read from first byte to last, each step once for all rows of a
// tile, so a decode step streams the weights in the order in which they lie in memory.
#include <algorithm>
#include <array>
#include <utility>

#include <omp.h>

#include "cpu_kernels.h"
#include "cpu_vec.h"

namespace stepgraph {
namespace {

// Rows that share a weight block while it is near: eight tiles of twelve.
constexpr int64_t kGroupRows = 96;
// How far ahead of use the stream of weights is asked for where a block is used by one tile only:
// measured on Zen 5, where the hardware alone keeps up with two rows but not with more.
constexpr int64_t kPrefetchBytes = 16384;
constexpr int64_t kRowsWithoutPrefetch = 2;
// Below this a second thread costs more than it brings.
constexpr int64_t kBytesPerThread = 32 * 1024;

template <class T>
struct Tile {
  const T* x;
  int64_t x_stride;  // words
  const void* w;
  const char* prefetch;
  const T* bias;
  T* out;
  int64_t columns;  // of this block, 32 but for the last one
  int64_t out_stride, steps;
};

template <class T, int M, int Lines>
void run_tile(const Tile<T>& tile) {
  using Word = typename Element<T>::Word;
  F32x16 acc[M][2];
  dot_tile<M, 1, Lines>(reinterpret_cast<const Word*>(tile.x), tile.x_stride,
                        static_cast<const Word*>(tile.w), 0, tile.steps, tile.prefetch, acc);
  F32x16 bias[2] = {};
  if (tile.bias != nullptr) {
    float padded[kBlock] = {};
    std::copy_n(tile.bias, tile.columns, padded);
    bias[0] = load<F32x16>(padded);
    bias[1] = load<F32x16>(padded + 16);
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
template <class T, int Lines, size_t... Index>
void run_rows(const Tile<T>& tile, int64_t rows, std::index_sequence<Index...>) {
  static constexpr std::array<void (*)(const Tile<T>&), sizeof...(Index)> kTiles = {
      run_tile<T, Index + 1, Lines>...};
  kTiles[rows - 1](tile);
}

// Units are numbered block by block, within a block group by group of rows.
template <class T>
void run_units(const LinearArgs<T>& args, int64_t groups, int64_t begin, int64_t end) {
  constexpr auto kSizes = std::make_index_sequence<kTileRows>();
  const int64_t block_bytes = args.steps * kStepBytes;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t block = unit / groups;
    const int64_t first_row = unit % groups * kGroupRows;
    const int64_t rows = std::min(args.rows - first_row, kGroupRows);
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    const char* w = static_cast<const char*>(args.packed) + block * block_bytes;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t from = first_row + rows * i / tiles, to = first_row + rows * (i + 1) / tiles;
      // With more tiles than one, the first two ask for a half each of the next block.
      const Tile<T> tile{
          args.x + from * args.x_stride,
          args.x_stride / Element<T>::kPerWord,
          w,
          tiles == 1 ? w + kPrefetchBytes : w + block_bytes + i * (block_bytes / 2),
          args.bias == nullptr ? nullptr : args.bias + block * kBlock,
          args.out + from * args.columns + block * kBlock,
          std::min<int64_t>(args.columns - block * kBlock, kBlock),
          args.columns,
          args.steps};
      if (tiles == 1 && rows > kRowsWithoutPrefetch) {
        run_rows<T, 2>(tile, to - from, kSizes);
      } else if (tiles > 1 && i < 2) {
        run_rows<T, 1>(tile, to - from, kSizes);
      } else {
        run_rows<T, 0>(tile, to - from, kSizes);
      }
    }
  }
}

}  // namespace

template <class T>
void packed_linear(const LinearArgs<T>& args) {
  const int64_t blocks = (args.columns + kBlock - 1) / kBlock;
  const int64_t groups = (args.rows + kGroupRows - 1) / kGroupRows;
  const int64_t units = blocks * groups;
  const int64_t tiles = (args.rows + kTileRows - 1) / kTileRows;
  const int64_t useful = blocks * args.steps * kStepBytes * tiles / kBytesPerThread;
  const int threads =
      static_cast<int>(std::clamp<int64_t>(std::min(useful, units), 1, args.threads));
  if (threads == 1) return run_units(args, groups, 0, units);
#pragma omp parallel num_threads(threads)
  {
    const int64_t index = omp_get_thread_num(), count = omp_get_num_threads();
    run_units(args, groups, units * index / count, units * (index + 1) / count);
  }
}

template void packed_linear(const LinearArgs<c10::BFloat16>&);
template void packed_linear(const LinearArgs<float>&);

}  // namespace stepgraph
