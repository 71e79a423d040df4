// The tiles of `linear.h` for each kind of weight, and linear layers on their own.
#include "linear.h"

#include <utility>

#include "stack_math.h"

namespace stepgraph {
namespace {

// Below this a second thread costs more than it brings.
constexpr int64_t kBytesPerThread = 32 * 1024;

// Sums of long groups are added up this often, so that chains of multiply-adds are short enough to
// overlap.
constexpr int64_t kStepsPerSum = 64;

// Codes in groups: the sum of a group is multiplied by its scale, and its minimum times the sum of
// its inputs is subtracted. Totals are in memory, since the sums of twelve rows take all registers.
template <class T, int Bits, bool Signed, int M>
void run_codes(const LinearTile& tile) {
  using Word = typename Element<T>::Word;
  constexpr int kWordsPerStep = 2 / Element<T>::kPerWord;
  constexpr bool kExpandsFirst = !STEPGRAPH_AVX512;  // few registers are left for codes
  const Word* x = static_cast<const Word*>(tile.x);
  const char *w = tile.w, *ahead = tile.prefetch;
  typename CodeWordsOf<Bits, Signed>::Type words(*tile.part, tile.levels);
  ScaleReader scales(tile.part->scales), minimums(tile.part->minimums);
  std::fill_n(tile.sums, M * kBlock, 0.0f);
  for (int64_t step = 0, group = 0; step < tile.steps; ++group) {
    F32x16 scale[2], minimum[2];
    scales.next(w, scale);
    if (!minimums.none()) minimums.next(w, minimum);
    const int64_t end = std::min(step + tile.part->group_steps, tile.steps);
    while (step < end) {
      F32x16 sum[M][2] = {};
      const auto add = [&](int i) __attribute__((always_inline)) {
        U32x16 first, second;
        words.expand(i, first, second);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          Word word[kWordsPerStep];
          std::memcpy(word, x + m * tile.x_stride + (step + i) * kWordsPerStep, sizeof(word));
          if constexpr (kWordsPerStep == 1) {
            sum[m][0] = multiply_add(sum[m][0], first, word[0]);
            sum[m][1] = multiply_add(sum[m][1], second, word[0]);
          } else {
            sum[m][0] = multiply_add(sum[m][0], low_bf16(first), word[0]);
            sum[m][1] = multiply_add(sum[m][1], low_bf16(second), word[0]);
            sum[m][0] = multiply_add(sum[m][0], high_bf16(first), word[1]);
            sum[m][1] = multiply_add(sum[m][1], high_bf16(second), word[1]);
          }
        }
      };
      const int64_t first_step = step, stop = std::min(step + kStepsPerSum, end);
      alignas(64) uint32_t expanded[kExpandsFirst ? kStepsPerSum * kBlock : 1];
      for (; step < stop; step += kChunkSteps, w += kChunkBytes<Bits>) {
        words.load(w);
        const char* until = tile.prefetch + (w - tile.w) + kChunkBytes<Bits>;
        for (; ahead < until; ahead += 64) __builtin_prefetch(ahead, 0, 2);
        if constexpr (kExpandsFirst) {
          words.store(expanded + (step - first_step) * kBlock);
        } else if (step + kChunkSteps <= stop) {
#pragma GCC unroll 4
          for (int i = 0; i < kChunkSteps; ++i) add(i);
        } else {
          for (int i = 0; i < stop - step; ++i) add(i);
        }
      }
      step = stop;
      if constexpr (kExpandsFirst) {
        dot_tile<M, 0>(x + first_step * kWordsPerStep, tile.x_stride, expanded, stop - first_step,
                       nullptr, reinterpret_cast<float*>(sum));
      }
      const auto finish = [&](auto with_minimum) __attribute__((always_inline)) {
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          for (int half = 0; half < 2; ++half) {
            float* place = tile.sums + m * kBlock + 16 * half;
            F32x16 total = load<F32x16>(place) + sum[m][half] * scale[half];
            if (with_minimum) total -= minimum[half] * tile.input_sums[group * tile.rows + m];
            store(place, total);
          }
        }
      };
      if (step == end && !minimums.none()) finish(std::true_type());
      else finish(std::false_type());
    }
  }
}

// A total with the sum of a group, of the integers by which codes exceed the lowest one.
STEPGRAPH_INLINE F32x16 add_group(F32x16 total, I32x16 sum, F32x16 scale, float input_scale,
                                  F32x16 minimum, float input_sum) {
  total += __builtin_convertvector(sum, F32x16) * (scale * input_scale);
  return total - minimum * input_sum;
}

#if STEPGRAPH_AVX512_VNNI
// As `run_codes` with inputs in int8, whose sums of a group are integers: four products an
// instruction.
template <int Bits, int M>
void run_int8_inputs(const LinearTile& tile) {
  const int8_t* x = static_cast<const int8_t*>(tile.x);
  const char *w = tile.w, *ahead = tile.prefetch;
  const int64_t x_stride = 4 * tile.x_stride, steps = tile.steps, rows = tile.rows;
  const int64_t group_steps = tile.part->group_steps;
  const float lowest = static_cast<float>(tile.part->lowest);
  const float *input_scales = tile.input_scales, *input_sums = tile.input_sums;
  CodeBytes<Bits> bytes(*tile.part, tile.levels);
  ScaleReader scales(tile.part->scales), minimums(tile.part->minimums);
  F32x16 total[M][2] = {};
  for (int64_t step = 0; step < steps; input_scales += rows, input_sums += rows) {
    F32x16 scale[2], minimum[2] = {};
    scales.next(w, scale);
    if (!minimums.none()) minimums.next(w, minimum);
    I32x16 sum[M][2] = {};
    const int64_t end = std::min(step + group_steps, steps);
    for (; step < end; step += kChunkSteps, w += kChunkBytes<Bits>) {
      bytes.load(w);
      const char* until = tile.prefetch + (w - tile.w) + kChunkBytes<Bits>;
      for (; ahead < until; ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        U32x16 first, second;
        bytes.expand(odd, first, second);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          int32_t word;
          std::memcpy(&word, x + m * x_stride + 2 * step + 4 * odd, sizeof(word));
          const __m512i words = _mm512_set1_epi32(word);
          sum[m][0] = (I32x16)_mm512_dpbusd_epi32((__m512i)sum[m][0], (__m512i)first, words);
          sum[m][1] = (I32x16)_mm512_dpbusd_epi32((__m512i)sum[m][1], (__m512i)second, words);
        }
      }
    }
    for (int half = 0; half < 2; ++half) minimum[half] -= lowest * scale[half];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      for (int half = 0; half < 2; ++half) {
        total[m][half] = add_group(total[m][half], sum[m][half], scale[half], input_scales[m],
                                   minimum[half], input_sums[m]);
      }
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    store(tile.sums + m * kBlock, total[m][0]);
    store(tile.sums + m * kBlock + 16, total[m][1]);
  }
}

template <int Bits, size_t... Index>
constexpr TileSet make_int8_input_tile_set(std::index_sequence<Index...>) {
  return {{{run_int8_inputs<Bits, Index + 1>...}, {run_int8_inputs<Bits, Index + 1>...}}, 1};
}

template <int Bits>
constexpr TileSet kInt8InputTileSet =
    make_int8_input_tile_set<Bits>(std::make_index_sequence<kTileRows>());
#endif

template <class T, int Bits, bool Signed, size_t... Index>
constexpr TileSet make_code_tile_set(std::index_sequence<Index...>) {
  return {{{run_codes<T, Bits, Signed, Index + 1>...}, {run_codes<T, Bits, Signed, Index + 1>...}},
          1};
}

template <class T, int Bits, bool Signed = false>
constexpr TileSet kCodeTileSet =
    make_code_tile_set<T, Bits, Signed>(std::make_index_sequence<kTileRows>());

// Numbers of the model's type.
template <class T, int M, int Lines>
void run_tile(const LinearTile& tile) {
  using Word = typename Element<T>::Word;
  dot_tile<M, Lines>(static_cast<const Word*>(tile.x), tile.x_stride,
                     reinterpret_cast<const Word*>(tile.w), tile.steps, tile.prefetch, tile.sums);
}

template <class T, size_t... Index>
constexpr TileSet make_tile_set(std::index_sequence<Index...>) {
  return {{{run_tile<T, Index + 1, 0>...},
           {run_tile<T, Index + 1, 1>...},
           {run_tile<T, Index + 1, 2>...}},
          kStepBytes / 64};
}

template <class T>
constexpr TileSet kTileSet = make_tile_set<T>(std::make_index_sequence<kTileRows>());

// Numbers of bf16 as matrix tiles: a block has the layout of tiles.
template <class Tiles>
void run_matrix(const LinearTile& unit) {
  Tiles tiles(*unit.state);
  const char* prefetch = unit.prefetch != unit.w ? unit.prefetch : nullptr;
  tile_product<Tiles, false>(tiles, unit.x, 4 * unit.x_stride, unit.rows, unit.w, unit.steps,
                             prefetch, unit.sums, kStepBytes, false);
}

// Codes as matrix tiles, expanded once for all rows. The sums of a long group are in memory from one
// part of it to the next.
template <class Tiles, class Codes, int Bits, bool Int8>
void run_matrix_codes(const LinearTile& unit) {
  constexpr int64_t kStepsPerWord = Int8 ? 2 : 1, kWordsPerChunk = kChunkSteps / kStepsPerWord;
  constexpr int64_t kWords = 128;
  alignas(64) char expanded[kWords * kStepBytes];
  alignas(64) float sums[kGroupRows * kBlock];
  const char *x = static_cast<const char*>(unit.x), *w = unit.w, *ahead = unit.prefetch;
  const PackedPart& part = *unit.part;
  const float *input_scales = unit.input_scales, *input_sums = unit.input_sums;
  Codes codes(part, unit.levels);
  ScaleReader scales(part.scales), minimums(part.minimums);
  Tiles tiles(*unit.state);
  std::fill_n(unit.sums, unit.rows * kBlock, 0.0f);
  for (int64_t step = 0; step < unit.steps; input_scales += unit.rows, input_sums += unit.rows) {
    F32x16 scale[2], minimum[2] = {};
    scales.next(w, scale);
    if (!minimums.none()) minimums.next(w, minimum);
    const int64_t end = std::min(step + part.group_steps, unit.steps);
    for (bool more = false; step < end; more = true) {
      const int64_t first = step, stop = std::min(step + kWords * kStepsPerWord, end);
      for (char* to = expanded; step < stop; step += kChunkSteps, w += kChunkBytes<Bits>) {
        codes.load(w);
        const char* until = unit.prefetch + (w - unit.w) + kChunkBytes<Bits>;
        for (; ahead < until; ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < kWordsPerChunk; ++i, to += kStepBytes) {
          U32x16 half[2];
          codes.expand(i, half[0], half[1]);
          store(to, half[0]);
          store(to + 64, half[1]);
        }
      }
      step = stop;
      // A chunk's inputs are in an order of its own if they are int8, and zeros follow the last ones.
      const int64_t chunks = (stop - first + kChunkSteps - 1) / kChunkSteps;
      const int64_t words = Int8 ? chunks * kWordsPerChunk : stop - first;
      tile_product<Tiles, Int8>(tiles, x + 4 * first / kStepsPerWord, 4 * unit.x_stride,
                                 unit.rows, expanded, words, nullptr, sums, kStepBytes, more);
    }
    if constexpr (Int8) {
      const float lowest = static_cast<float>(part.lowest);
      for (int half = 0; half < 2; ++half) minimum[half] -= lowest * scale[half];
    }
    for (int64_t m = 0; m < unit.rows; ++m) {
      for (int half = 0; half < 2; ++half) {
        const int64_t place = m * kBlock + 16 * half;
        F32x16 total = load<F32x16>(unit.sums + place);
        if constexpr (Int8) {
          total = add_group(total, load<I32x16>(sums + place), scale[half], input_scales[m],
                            minimum[half], input_sums[m]);
        } else {
          total += load<F32x16>(sums + place) * scale[half];
          if (!minimums.none()) total -= minimum[half] * input_sums[m];
        }
        store(unit.sums + place, total);
      }
    }
  }
}

template <class T, class Tiles>
TileSet::Run run_of(const PackedPart& part) {
  using Run = TileSet::Run;
#if STEPGRAPH_AVX512_VNNI
  if (part.int8_inputs != 0) {
    return for_bits(part.bits, [](auto kept) -> Run {
      return run_matrix_codes<Tiles, CodeBytes<kept()>, kept(), true>;
    });
  }
#endif
  if constexpr (std::is_same_v<T, float>) return nullptr;
  if (part.bits == 0) return run_matrix<Tiles>;
  if (part.is_signed()) {
    return run_matrix_codes<Tiles, CodeWordsOf<8, true>::Type, 8, false>;
  }
  return for_bits(part.bits, [](auto kept) -> Run {
    return run_matrix_codes<Tiles, typename CodeWordsOf<kept(), false>::Type, kept(), false>;
  });
}

}  // namespace

template <class T>
TileSet::Run matrix_run(const PackedPart& part) {
  TileSet::Run run = nullptr;
  with_tiles(tile_use(), [&]<class Tiles>(std::type_identity<Tiles>) {
    run = run_of<T, Tiles>(part);
  });
  return run;
}

template <class T>
const TileSet& tile_set(const PackedPart& part) {
  if (part.bits == 0) return kTileSet<T>;
#if STEPGRAPH_AVX512_VNNI
  if (part.int8_inputs != 0) {
    return for_bits(part.bits, [](auto kept) -> const TileSet& { return kInt8InputTileSet<kept()>; });
  }
#endif
  if (part.is_signed()) return kCodeTileSet<T, 8, true>;
  return for_bits(part.bits, [](auto kept) -> const TileSet& { return kCodeTileSet<T, kept()>; });
}

namespace {

template <class T>
class LinearJob : public Job {
 public:
  int prepare(const LinearArgs<T>& args, std::shared_ptr<const void> keep) {
    args_ = args;
    keep_ = std::move(keep);
    const int64_t tiles = (args.rows + kTileRows - 1) / kTileRows;
    const int64_t units = args.weights.blocks() * row_groups(args.rows);
    const int64_t useful = std::min(bytes_of(args.weights) * tiles / kBytesPerThread, units);
    const int threads = useful_threads(useful, args.threads);
    phases_.prepare(1, units, threads);
    return threads;
  }

 protected:
  void work(int64_t) override {
    alignas(64) float sums[kGroupRows * kBlock];
    const LinearArgs<T> args = args_;
    linear_phase(phases_, 0, args.weights, args.x, args.x_stride, args.rows, nullptr, sums,
                 to_rows(args.out, args.weights.columns));
  }

 private:
  LinearArgs<T> args_;
  Phases phases_;
};

}  // namespace

template <class T>
void packed_linear(const LinearArgs<T>& args, std::shared_ptr<const void> keep) {
  run_job<LinearJob<T>>(args, std::move(keep));
}

template TileSet::Run matrix_run<c10::BFloat16>(const PackedPart&);
template TileSet::Run matrix_run<float>(const PackedPart&);
template const TileSet& tile_set<c10::BFloat16>(const PackedPart&);
template const TileSet& tile_set<float>(const PackedPart&);
template void packed_linear(const LinearArgs<c10::BFloat16>&, std::shared_ptr<const void>);
template void packed_linear(const LinearArgs<float>&, std::shared_ptr<const void>);

}  // namespace stepgraph
