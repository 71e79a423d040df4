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
#include <vector>

#include "codes.h"
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
  // Of codes:
  const PackedPart* part;
  const uint16_t* levels;
  const float* input_sums;  // [rows][groups] of x, if the part has minimums
  int64_t groups;
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

// Of codes. A step of theirs is a chunk, whose number of cache lines is their own affair.
template <class T>
const TileSet& code_tile_set(int64_t bits);

template <class T>
int64_t bytes_of(const Weights& weights) {
  if (weights.header != nullptr) return weights.header->bytes;
  return weights.blocks() * weights.steps * tile_set<T>(weights.kind).step_lines * 64;
}

template <class T>
const char* block_of(const Weights& weights, int64_t block) {
  if (weights.header != nullptr) {
    const PackedPart& part = weights.header->part_of(block);
    return weights.packed + part.begin + (block - part.first_block) * part.block_bytes;
  }
  return weights.packed + block * weights.steps * tile_set<T>(weights.kind).step_lines * 64;
}

// Sums of the inputs of groups, which minimums multiply. A thread computes those of some rows once
// for all blocks. An object must not outlive the contents of x.
template <class T>
class InputSums {
 public:
  // [rows][groups]
  const float* of(const T* x, int64_t x_stride, int64_t rows, int64_t steps, int64_t group_steps) {
    for (int64_t i = 0; i < used_; ++i) {
      const Rows& kept = all()[i];
      if (kept.x == x && kept.rows == rows && kept.group_steps == group_steps) {
        return kept.sums.data();
      }
    }
    if (used_ == static_cast<int64_t>(all().size())) all().emplace_back();
    Rows& own = all()[used_++];
    const int64_t groups = (steps + group_steps - 1) / group_steps;
    own.x = x;
    own.rows = rows;
    own.group_steps = group_steps;
    own.sums.resize(std::max<size_t>(own.sums.size(), rows * groups));
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t from = 2 * g * group_steps;
        const int64_t end = std::min(from + 2 * group_steps, 2 * steps);
        own.sums[m * groups + g] = sum(x + m * x_stride + from, end - from);
      }
    }
    return own.sums.data();
  }

 private:
  struct Rows {
    const void* x;
    int64_t rows, group_steps;
    std::vector<float> sums;
  };

  // Memory that the thread keeps, since steps follow one another.
  static std::vector<Rows>& all() {
    static thread_local std::vector<Rows> all;
    return all;
  }

  // One copy of the code: a row has the same sums in any batch.
  __attribute__((noinline)) static float sum(const T* x, int64_t size) {
    F32x16 lanes = {};
    for (int64_t i = 0; i < size; i += 16) lanes += floats_of(x, i, size);
    return lane_sum(lanes);
  }

  int64_t used_ = 0;
};

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
                      int64_t rows, const char* next, InputSums<T>& input_sums, float* sums) {
  LinearTile tile{};
  tile.w = block_of<T>(weights, block);
  tile.steps = weights.steps;
  const TileSet* set = &tile_set<T>(weights.kind);
  if (weights.header != nullptr) {
    const PackedPart& part = weights.header->part_of(block);
    set = part.bits == 0 ? &tile_set<T>(WeightKind::kModel) : &code_tile_set<T>(part.bits);
    if (part.bits == 0 && Element<T>::kPerWord == 1) tile.steps = weights.header->inputs;
    tile.part = &part;
    tile.levels = weights.header->levels_of(part);
    if (part.minimums.outer != ScaleLayout::kNone) {
      tile.groups = (weights.steps + part.group_steps - 1) / part.group_steps;
      tile.input_sums = input_sums.of(x, x_stride, rows, weights.steps, part.group_steps);
    }
  }
  const int64_t columns = weights.columns - block * kBlock;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  tile.x_stride = x_stride / Element<T>::kPerWord;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t from = rows * i / tiles, to = rows * (i + 1) / tiles;
    int64_t lines = 0;
    if (next != nullptr && next != tile.w) {
      // With more tiles than one, the first ones ask for a line a step each.
      if (tiles > 1) lines = i < set->step_lines ? 1 : 0;
      else if (rows > set->rows_without_prefetch) lines = set->step_lines;
    }
    LinearTile own = tile;
    own.x = x + from * x_stride;
    own.prefetch = lines == 0 ? tile.w : next + i * tile.steps * 64;
    own.sums = sums + from * kBlock;
    if (tile.input_sums != nullptr) own.input_sums += from * tile.groups;
    set->run[lines][to - from - 1](own);
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
  const int64_t groups = row_groups(rows), units = weights.blocks() * groups;
  InputSums<T> input_sums;
  const auto first_of = [&](int64_t unit) { return unit % groups * kGroupRows; };
  const auto rows_of = [&](int64_t unit) { return std::min(rows - first_of(unit), kGroupRows); };
  phases.run(
      phase, units,
      [&](int64_t unit, int64_t next) {
        const char* then = next < units ? block_of<T>(weights, next / groups) : after;
        run_block(weights, unit / groups, x + first_of(unit) * x_stride, x_stride, rows_of(unit),
                  then, input_sums, sums);
      },
      [&](int64_t unit) {
        publish(unit / groups, first_of(unit), rows_of(unit), static_cast<const float*>(sums));
      });
}

}  // namespace stepgraph
