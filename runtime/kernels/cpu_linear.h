// Linear layers over packed weights, as work for the threads of a region that is there already.
//
// A packed weight is a row of blocks of 32 columns. Work is cut into units: one block times a group
// of rows, handed out to whoever is free. Of a unit a tile of up to 12 rows at a time is computed
// into a small buffer, and whoever asked for it finishes the sums from there: adds the residual,
// applies the activation, rounds and stores. Each sum is one chain of multiply-adds in the order of
// k, so it depends neither on the tile it is in nor on the number of rows or threads.
//
// A block is read from first byte to last, each step once for all rows of a tile, while the block
// that the thread takes next is asked for: a decode step streams its weights.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include <omp.h>

#include "cpu_kernels.h"
#include "cpu_vec.h"

namespace stepgraph {

// Rows that share a weight block while it is near: eight tiles of twelve.
constexpr int64_t kGroupRows = 96;

// The sums of one tile: rows of x times one block.
struct LinearTile {
  const void* x;
  int64_t x_stride;  // words
  const char* w;
  int64_t steps;
  const char* prefetch;  // asked for: `lines` cache lines a step, from here on
  float* sums;           // [rows][32]
};

// The tiles of a kind of weight for one type of x: `run[lines][rows - 1]`.
struct TileSet {
  using Run = void (*)(const LinearTile&);
  Run run[3][kTileRows];
  int64_t step_lines;  // cache lines that a step of a block takes, 2 at most
  int64_t rows_without_prefetch;  // up to so many the hardware alone keeps up
};

template <class T>
const TileSet& tile_set(WeightKind kind);

template <class T>
int64_t block_bytes(const Weights& weights) {
  return weights.steps * tile_set<T>(weights.kind).step_lines * 64;
}

// The 32 numbers of a block of columns; what lies behind the last column is 0.
template <class T>
inline void load_columns(const T* of_block, int64_t columns, F32x16 (&vectors)[2]) {
  float padded[kBlock] = {};
  std::copy_n(of_block, std::min<int64_t>(columns, kBlock), padded);
  vectors[0] = load<F32x16>(padded);
  vectors[1] = load<F32x16>(padded + 16);
}

// Sums of one block for some rows, bias and scales applied, tile by tile:
// finish(first row, rows, sums [rows][32]). The thread reads `next` afterwards (null: unknown).
template <class T, class Finish>
inline void run_block(const Weights& weights, int64_t block, const T* x, int64_t x_stride,
                      int64_t rows, const char* next, Finish finish) {
  const TileSet& set = tile_set<T>(weights.kind);
  alignas(64) float sums[kTileRows * kBlock];
  const char* w = weights.packed + block * block_bytes<T>(weights);
  const int64_t columns = weights.columns - block * kBlock;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t from = rows * i / tiles, to = rows * (i + 1) / tiles;
    int64_t lines = 0;
    if (next != nullptr && next != w) {
      // With more tiles than one, the first ones ask for a line a step each.
      if (tiles > 1) lines = i < set.step_lines ? 1 : 0;
      else if (rows > set.rows_without_prefetch) lines = set.step_lines;
    }
    set.run[lines][to - from - 1](
        {x + from * x_stride, x_stride / Element<T>::kPerWord, w, weights.steps,
         tiles > 1 ? next + i * weights.steps * 64 : next, sums});
    if (weights.scales != nullptr || weights.bias != nullptr) {
      F32x16 scale[2] = {broadcast(1.0f), broadcast(1.0f)}, bias[2] = {};
      if (weights.scales != nullptr) load_columns(weights.scales + block * kBlock, columns, scale);
      if (weights.bias != nullptr) {
        load_columns(static_cast<const T*>(weights.bias) + block * kBlock, columns, bias);
      }
      for (int64_t m = 0; m < to - from; ++m) {
        for (int half = 0; half < 2; ++half) {
          float* place = sums + m * kBlock + 16 * half;
          store(place, load<F32x16>(place) * scale[half] + bias[half]);
        }
      }
    }
    finish(from, to - from, static_cast<const float*>(sums));
  }
}

// Calls run(unit, unit this thread takes next) for the units a thread of the region gets: first
// one each, then who is free takes the next one. `taken` is 0 at first, and its own for each phase.
template <class Run>
inline void take_units(int64_t units, std::atomic<int64_t>& taken, Run run) {
  const int64_t threads = omp_get_num_threads();
  for (int64_t unit = omp_get_thread_num(), next; unit < units; unit = next) {
    next = threads == 1 ? unit + 1 : threads + taken.fetch_add(1, std::memory_order_relaxed);
    run(unit, next);
  }
}

// A linear layer by all threads of a region: finish(block, first row, rows, sums [rows][32]).
// `after`: what this thread reads once there are no more units. No barrier at the end.
template <class T, class Finish>
inline void linear_in_region(const Weights& weights, const T* x, int64_t x_stride, int64_t rows,
                             std::atomic<int64_t>& taken, const char* after, Finish finish) {
  const int64_t groups = (rows + kGroupRows - 1) / kGroupRows;
  const int64_t units = weights.blocks() * groups, bytes = block_bytes<T>(weights);
  take_units(units, taken, [&](int64_t unit, int64_t next) {
    const int64_t block = unit / groups, first = unit % groups * kGroupRows;
    const char* then = next < units ? weights.packed + next / groups * bytes : after;
    run_block(weights, block, x + first * x_stride, x_stride,
              std::min(rows - first, kGroupRows), then,
              [&](int64_t row, int64_t count, const float* sums) {
                finish(block, first + row, count, sums);
              });
  });
}

}  // namespace stepgraph
