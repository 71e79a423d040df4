// Linear layers over packed weights, as phases of a job (`phases.h`).
//
// A packed weight is a row of blocks of 32 columns. A unit is one block times a group of rows. It is
// computed in tiles of up to 12 rows into a buffer of the thread; publishing it adds the residual,
// applies the activation, rounds and stores. Each sum is one chain of multiply-adds in the order of
// k, so it depends neither on the tile it is in nor on the number of rows or threads.
//
// A block is read from first byte to last, each step once for all rows of a tile, while the block
// that the thread takes next is asked for: a decode step streams its weights.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "phases.h"
#include "vec.h"

namespace stepgraph {

// Rows that share a weight block while it is near: eight tiles of twelve.
constexpr int64_t kGroupRows = 96;

// Elements from row to row of what a linear layer reads: a cache line more than the row takes, so
// that the rows of a tile do not fall into the same set of the first cache.
inline int64_t padded(int64_t columns) { return (columns + kBlock - 1) / kBlock * kBlock + kBlock; }

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
  int64_t rows_without_prefetch;  // up to this many, the hardware prefetcher keeps up alone
};

template <class T>
const TileSet& tile_set(WeightKind kind);

template <class T>
int64_t block_bytes(const Weights& weights) {
  return weights.steps * tile_set<T>(weights.kind).step_lines * 64;
}

template <class T>
int64_t bytes_of(const Weights& weights) {
  return weights.blocks() * block_bytes<T>(weights);
}

// The 32 numbers of a block of columns; what lies behind the last column is 0.
template <class T>
inline void load_columns(const T* of_block, int64_t columns, F32x16 (&vectors)[2]) {
  float padded[kBlock] = {};
  std::copy_n(of_block, std::min<int64_t>(columns, kBlock), padded);
  vectors[0] = load<F32x16>(padded);
  vectors[1] = load<F32x16>(padded + 16);
}

// Sums of one block for some rows, bias and scales applied, to `sums` [rows][32]. The thread reads
// `next` afterwards (null: unknown).
template <class T>
inline void run_block(const Weights& weights, int64_t block, const T* x, int64_t x_stride,
                      int64_t rows, const char* next, float* sums) {
  const TileSet& set = tile_set<T>(weights.kind);
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
         tiles > 1 ? next + i * weights.steps * 64 : next, sums + from * kBlock});
  }
  if (weights.scales == nullptr && weights.bias == nullptr) return;
  F32x16 scale[2] = {broadcast(1.0f), broadcast(1.0f)}, bias[2] = {};
  if (weights.scales != nullptr) load_columns(weights.scales + block * kBlock, columns, scale);
  if (weights.bias != nullptr) {
    load_columns(static_cast<const T*>(weights.bias) + block * kBlock, columns, bias);
  }
  for (int64_t m = 0; m < rows; ++m) {
    for (int half = 0; half < 2; ++half) {
      float* place = sums + m * kBlock + 16 * half;
      store(place, load<F32x16>(place) * scale[half] + bias[half]);
    }
  }
}

inline int64_t row_groups(int64_t rows) { return (rows + kGroupRows - 1) / kGroupRows; }

// A linear layer as a phase: publish(block, first row, rows, sums [rows][32]) for each block and
// group of rows. `after`: what this thread reads once there are no more units. `sums` is memory of
// this thread, [kGroupRows][32].
template <class T, class Publish>
inline void linear_phase(Phases& phases, int64_t phase, const Weights& weights, const T* x,
                         int64_t x_stride, int64_t rows, const char* after, float* sums,
                         Publish publish) {
  const int64_t groups = row_groups(rows), bytes = block_bytes<T>(weights);
  const int64_t units = weights.blocks() * groups;
  const auto first_of = [&](int64_t unit) { return unit % groups * kGroupRows; };
  const auto rows_of = [&](int64_t unit) { return std::min(rows - first_of(unit), kGroupRows); };
  phases.run(
      phase, units,
      [&](int64_t unit, int64_t next) {
        const char* then = next < units ? weights.packed + next / groups * bytes : after;
        run_block(weights, unit / groups, x + first_of(unit) * x_stride, x_stride, rows_of(unit),
                  then, sums);
      },
      [&](int64_t unit) {
        publish(unit / groups, first_of(unit), rows_of(unit), static_cast<const float*>(sums));
      });
}

}  // namespace stepgraph
