// Linear layers over packed weights, as phases of a job (`phases.h`).
//
// A packed weight is a row of blocks of 32 columns. A unit is one block times a group of rows. It is
// computed in tiles of up to 12 rows into a buffer of the thread; publishing it adds the residual,
// applies the activation, rounds and stores. Each sum is one chain of multiply-adds in the order of
// k, so it depends neither on the tile it is in nor on the number of rows or threads.
//
// On processors with AMX all rows of a unit are computed as matrix tiles (`tiles.h`), whose sums have
// an order of their own, whatever the number of rows.
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
#include "tiles.h"
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
  const char* prefetch;  // asked for: `lines` cache lines a step, from here on; w: none
  float* sums;           // [rows][32]
  int64_t rows;          // of the unit
  TileState* state;
  // Of codes:
  const PackedPart* part;
  const uint16_t* levels;
  const float* input_sums;    // [groups][rows] of x, if the part has minimums or x is int8
  const float* input_scales;  // [groups][rows] if x is int8
};

// The tiles of a kind of weight for one type of x: `run[lines][rows - 1]`.
struct TileSet {
  using Run = void (*)(const LinearTile&);
  Run run[3][kTileRows];
  int64_t step_lines;  // cache lines that a step of a block takes, 2 at most
};

// A step of codes is a chunk, which may take more cache lines.
template <class T>
const TileSet& tile_set(const PackedPart& part);

// What computes all rows of a unit as matrix tiles (`tiles.h`). Null: the unit is cut into tiles of
// the set.
template <class T>
TileSet::Run matrix_run(const PackedPart& part);

inline void run_tiles(const TileSet& set, const LinearTile& unit) {
  // Sums of integers have totals beside them, which is twice the registers.
  const bool halved = unit.input_scales != nullptr && unit.rows > kTileRows;
  const int64_t tile_rows = halved ? kTileRows / 2 : kTileRows;
  const int64_t tiles = (unit.rows + tile_rows - 1) / tile_rows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t from = unit.rows * i / tiles, to = unit.rows * (i + 1) / tiles;
    int64_t lines = 0;
    if (unit.prefetch != unit.w) {
      // With more tiles than one, the first ones ask for a line a step each.
      lines = tiles == 1 ? set.step_lines : i < set.step_lines ? 1 : 0;
    }
    LinearTile own = unit;
    own.x = static_cast<const char*>(unit.x) + from * unit.x_stride * 4;
    own.prefetch = lines == 0 ? unit.w : unit.prefetch + i * unit.steps * 64;
    own.sums += from * kBlock;
    if (unit.input_sums != nullptr) own.input_sums += from;
    if (unit.input_scales != nullptr) own.input_scales += from;
    set.run[lines][to - from - 1](own);
  }
}

inline int64_t bytes_of(const Weights& weights) { return weights.header->bytes; }

inline const char* block_of(const Weights& weights, int64_t block) {
  const PackedPart& part = weights.header->part_of(block);
  return weights.packed + part.begin + (block - part.first_block) * part.block_bytes;
}

// Inputs as products over codes take them. A thread prepares some rows once for all blocks. An object
// must not outlive the contents of x.
template <class T>
class GroupedInputs {
 public:
  struct Rows {
    const void* x;
    int64_t rows, group_steps;
    bool int8;
    int64_t stride;                   // of `data`
    std::vector<float> sums, scales;  // [groups][rows]
    std::vector<int8_t> data;  // [rows][stride], 8 inputs in the order of `CodeBytes`
  };

  void clear() { used_ = 0; }

  // With `int8` inputs are rounded to it, with a scale for each group, and sums are of what that
  // makes of them.
  const Rows& of(const T* x, int64_t x_stride, int64_t rows, int64_t steps, int64_t group_steps,
                 bool int8) {
    for (int64_t i = 0; i < used_; ++i) {
      const Rows& kept = all()[i];
      if (kept.x == x && kept.rows == rows && kept.group_steps == group_steps &&
          kept.int8 == int8) {
        return kept;
      }
    }
    if (used_ == static_cast<int64_t>(all().size())) all().emplace_back();
    Rows& own = all()[used_++];
    own.x = x;
    own.rows = rows;
    own.group_steps = group_steps;
    own.int8 = int8;
    const int64_t groups = (steps + group_steps - 1) / group_steps;
    own.stride = (2 * steps + 63) / 64 * 64 + 64;  // a cache line more, see `padded`
    const auto reserve = [](auto& numbers, int64_t size) {
      numbers.resize(std::max<size_t>(numbers.size(), size));
    };
    reserve(own.sums, rows * groups);
    if (int8) {
      reserve(own.scales, rows * groups);
      reserve(own.data, rows * own.stride);
    }
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t from = 2 * g * group_steps, at = g * rows + m;
        const int64_t size = std::min(2 * group_steps, 2 * steps - from);
        const T* group = x + m * x_stride + from;
        if (!int8) {
          own.sums[at] = sum(group, size);
          continue;
        }
        int8_t* data = &own.data[m * own.stride + from];
        own.scales[at] = round_to_int8(group, size, data, own.sums[at]);
      }
      if (int8) reorder(&own.data[m * own.stride], 2 * steps);
    }
    return own;
  }

  TileState tiles;  // of this thread as long as the object lives

 private:
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

  // Returns the scale, NaN unless all are finite. Behind `size` numbers, up to 15 are overwritten.
  __attribute__((noinline)) static float round_to_int8(const T* x, int64_t size, int8_t* data,
                                                       float& sum) {
    F32x16 largest = {}, zero = {};
    for (int64_t i = 0; i < size; i += 16) {
      const F32x16 value = floats_of(x, i, size), magnitude = value < 0.0f ? -value : value;
      largest = magnitude > largest ? magnitude : largest;
      zero += value * 0.0f;
    }
    const float limit = lane_max(largest), factor = limit > 0.0f ? Int8::kLargest / limit : 0.0f;
    I32x16 total = {};
    for (int64_t i = 0; i < size; i += 16) {
      const U32x16 number = Int8::encode(floats_of(x, i, size) * factor);
      store(data + i, __builtin_convertvector(number, U8x16));
      total += bits<I32x16>(number);
    }
    const float scale = limit / Int8::kLargest + lane_sum(zero);
    sum = scale * lane_sum(__builtin_convertvector(total, F32x16));
    return scale;
  }

  static void reorder(int8_t* row, int64_t size) {
    std::fill_n(row + size, -size & 63, 0);
    for (int64_t i = 0; i < size; i += 64) {
#if STEPGRAPH_AVX512_VNNI
      const __m512i order = _mm512_set4_epi32(0x0f0b0e0a, 0x0d090c08, 0x07030602, 0x05010400);
      store(row + i, _mm512_shuffle_epi8(_mm512_loadu_si512(row + i), order));
#endif
    }
  }

  int64_t used_ = 0;
};

// Sums of one block for some rows, bias added, to `sums` [rows][32]. The thread reads
// `next` afterwards (null: unknown).
template <class T>
inline void run_block(const Weights& weights, int64_t block, const T* x, int64_t x_stride,
                      int64_t rows, const char* next, GroupedInputs<T>& inputs, float* sums) {
  const PackedHeader& header = *weights.header;
  const PackedPart& part = header.part_of(block);
  const int64_t steps = (header.inputs + 1) / 2;
  LinearTile unit{};
  unit.x = x;
  unit.x_stride = x_stride / Element<T>::kPerWord;
  unit.w = block_of(weights, block);
  unit.steps = part.bits == 0 && Element<T>::kPerWord == 1 ? header.inputs : steps;
  unit.prefetch = next != nullptr ? next : unit.w;
  unit.sums = sums;
  unit.rows = rows;
  unit.state = &inputs.tiles;
  unit.part = &part;
  unit.levels = header.levels_of(part);
  const bool int8 = STEPGRAPH_AVX512_VNNI && part.int8_inputs != 0;
  if (int8 || part.minimums.outer != ScaleLayout::kNone) {
    const auto& grouped = inputs.of(x, x_stride, rows, steps, part.group_steps, int8);
    unit.input_sums = grouped.sums.data();
    if (int8) {
      unit.x = grouped.data.data();
      unit.x_stride = grouped.stride / 4;
      unit.input_scales = grouped.scales.data();
    }
  }
  if (const TileSet::Run run = matrix_run<T>(part)) run(unit);
  else run_tiles(tile_set<T>(part), unit);
  if (weights.bias == nullptr) return;
  for (int half = 0; half < 2; ++half) {
    const int64_t first = block * kBlock + 16 * half;
    if (first >= weights.columns) return;
    const F32x16 bias = floats_of(static_cast<const T*>(weights.bias), first, weights.columns);
    for (int64_t m = 0; m < rows; ++m) {
      float* place = sums + m * kBlock + 16 * half;
      store(place, load<F32x16>(place) + bias);
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
  GroupedInputs<T> inputs;
  const auto first_of = [&](int64_t unit) { return unit % groups * kGroupRows; };
  const auto rows_of = [&](int64_t unit) { return std::min(rows - first_of(unit), kGroupRows); };
  phases.run(
      phase, units,
      [&](int64_t unit, int64_t next) {
        const char* then = next < units ? block_of(weights, next / groups) : after;
        run_block(weights, unit / groups, x + first_of(unit) * x_stride, x_stride, rows_of(unit),
                  then, inputs, sums);
      },
      [&](int64_t unit) {
        publish(unit / groups, first_of(unit), rows_of(unit), static_cast<const float*>(sums));
      });
}

}  // namespace stepgraph
