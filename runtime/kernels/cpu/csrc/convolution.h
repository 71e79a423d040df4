// Short causal convolutions over the tokens of a sequence, see `ops/convolution.py`.
#pragma once

#include <type_traits>

#include "row_states.h"
#include "stack_math.h"

namespace stepgraph {

// A depthwise convolution and the place of its state.
struct ConvWeights {
  const void* taps;  // [features, taps] of the model's type, the newest last
  const void* bias;  // [features], or null
  int64_t count;     // of taps
  int64_t features;
  bool silu;
  int64_t snapshot_place, input_place;  // bytes
};

// Tap k of 16 features from `feature` on.
template <class T>
inline F32x16 tap_of(const ConvWeights& weights, int64_t k, int64_t feature) {
  const T* taps = static_cast<const T*>(weights.taps) + feature * weights.count;
  const int64_t size = std::min<int64_t>(weights.features - feature, 16);
#if STEPGRAPH_AVX512
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    if (weights.count == 4 && size == 16) {  // two words of a pair of taps each
      const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
      const __m512i index = _mm512_add_epi32(even, _mm512_set1_epi32(static_cast<int>(k / 2)));
      const U32x16 words = (U32x16)_mm512_permutex2var_epi32(
          _mm512_loadu_si512(taps), index, _mm512_loadu_si512(taps + 32));
      return k % 2 == 0 ? low_bf16(words) : high_bf16(words);
    }
  }
#endif
  float found[16] = {};
  for (int64_t i = 0; i < size; ++i) found[i] = static_cast<float>(taps[i * weights.count + k]);
  return load<F32x16>(found);
}

// Some features of the tokens of a run, in memory of a thread.
template <class T>
class ConvWorker {
 public:
  ConvWorker(const ConvWeights& weights, const StatePlan& plan) : weights_(weights), plan_(plan) {}

  // Elements of T that `load` needs for `size` features.
  static int64_t elements(const ConvWeights& weights, const StatePlan& plan, int64_t size) {
    return (plan.most_tokens + weights.count) * padded_size(size);
  }

  // Takes the inputs of features begin ... begin + size - 1: those of earlier tokens from memory,
  // those of the batch by input(token of the batch, out).
  template <class Input>
  void load(const StateRun& run, int64_t begin, int64_t size, T* space, Input input) {
    run_ = &run;
    begin_ = begin;
    size_ = size;
    stride_ = padded_size(size);
    space_ = space;
    // A snapshot to store may reach back further than the first token does.
    first_ = std::min(run.offset, plan_.block_size) - (weights_.count - 1);
    for (int64_t j = first_; j < run.offset; ++j) {
      const T* from = earlier(j);
      if (from == nullptr) std::fill_n(row(j), size, T(0.0f));
      else std::copy_n(from, size, row(j));
    }
    for (int64_t j = run.offset; j < run.end(); ++j) input(run.first + j - run.offset, row(j));
  }

  // 16 results from feature `at` on of a token, numbered as in the run; of the loaded features.
  F32x16 result(int64_t j, int64_t at) const {
    const int64_t feature = begin_ + at, last = weights_.count - 1;
    F32x16 sum = tap(last, feature) * load16(j, at);
    for (int64_t lag = 1; lag <= last; ++lag) {
      sum += tap(last - lag, feature) * load16(j - lag, at);
    }
    if (weights_.bias != nullptr) {
      sum += floats_of(static_cast<const T*>(weights_.bias), feature, weights_.features);
    }
    return weights_.silu ? times_sigmoid(sum, sum) : sum;
  }

  // Stores the inputs of the run, and the snapshots of its blocks.
  void publish() const {
    const StateRun& run = *run_;
    for (int64_t j = run.offset; j < run.end(); ++j) {
      uint8_t* block = plan_.inputs(run, j / plan_.block_size);
      if (block != nullptr) std::copy_n(row(j), size_, input_at(block, j % plan_.block_size));
    }
    for (int64_t column = 1; column < run.columns; ++column) {
      uint8_t* snapshot = plan_.snapshot(run, column);
      if (snapshot == nullptr) continue;
      const int64_t begin = column * plan_.block_size - (weights_.count - 1);
      for (int64_t i = 0; i < weights_.count - 1; ++i) {
        std::copy_n(row(begin + i), size_, snapshot_at(snapshot, i));
      }
    }
  }

 private:
  static int64_t padded_size(int64_t size) { return (size + 15) / 16 * 16; }

  T* row(int64_t j) const { return space_ + (j - first_) * stride_; }

  F32x16 load16(int64_t j, int64_t at) const { return floats_of(row(j), at, size_); }

  F32x16 tap(int64_t k, int64_t feature) const { return tap_of<T>(weights_, k, feature); }

  T* input_at(uint8_t* block, int64_t offset) const {
    return reinterpret_cast<T*>(block + weights_.input_place) + offset * weights_.features + begin_;
  }

  T* snapshot_at(uint8_t* snapshot, int64_t i) const {
    return reinterpret_cast<T*>(snapshot + weights_.snapshot_place) + i * weights_.features +
           begin_;
  }

  // The input of a token before the run; null: zero.
  const T* earlier(int64_t j) const {
    if (j >= 0) {
      uint8_t* block = plan_.inputs(*run_, j / plan_.block_size);
      return block == nullptr ? nullptr : input_at(block, j % plan_.block_size);
    }
    const uint8_t* state = plan_.state(*run_);
    if (state == nullptr) return nullptr;
    return snapshot_at(const_cast<uint8_t*>(state), weights_.count - 1 + j);
  }

  const ConvWeights& weights_;
  const StatePlan& plan_;
  const StateRun* run_ = nullptr;
  T* space_ = nullptr;
  int64_t begin_ = 0, size_ = 0, stride_ = 0, first_ = 0;
};

}  // namespace stepgraph
