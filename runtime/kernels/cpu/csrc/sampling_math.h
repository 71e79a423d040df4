// The passes of the sampler (`sampling.cpp`) over one lane of logits: maxima and sums of chunks, the
// largest tokens, thresholds and draws.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "exp.h"
#include "sampling.h"
#include "vec.h"

namespace stepgraph::sampling_math {

constexpr int64_t kVectors = kSampleChunk / 16;
// Weights are grouped by the upper bits of their bit patterns, which are ordered like their values:
// eight of the exponent, six of the mantissa. 1 is the largest weight there is.
constexpr int kGroupShift = 17;
constexpr int64_t kGroups = (std::bit_cast<uint32_t>(1.0f) >> kGroupShift) + 1;

// Where a thread works. Vectors of the vocabulary are filled up to whole chunks.
struct Scratch {
  float* logits;         // [chunks, 128] in float32
  float* weights;        // [chunks, 128]
  float* found;          // [chunks, 128]: some of the weights
  float* logit_maxima;   // [chunks]
  float* wanted_maxima;  // [chunks]
  float* weight_maxima;  // [chunks]
  float* sums;           // [chunks]
  double* masses;        // [kGroups]

  static int64_t floats(int64_t chunks) {
    return 3 * chunks * kSampleChunk + (4 * chunks + 2 * kGroups + 15) / 16 * 16;
  }

  // `at`: this many floats, aligned to 64 bytes.
  Scratch(float* at, int64_t chunks) {
    const auto take = [&](int64_t count) { return std::exchange(at, at + count); };
    for (float** all : {&logits, &weights, &found}) *all = take(chunks * kSampleChunk);
    masses = reinterpret_cast<double*>(take(2 * kGroups));
    for (float** few : {&logit_maxima, &wanted_maxima, &weight_maxima, &sums}) *few = take(chunks);
  }
};

// Largest of a chunk; +inf if one of them is NaN.
inline float chunk_maximum(const float* values) {
  const F32x16 infinity = F32x16{} - kMinusInfinity;
  F32x16 most = -infinity;
  for (int64_t i = 0; i < kVectors; ++i) {
    F32x16 value = load<F32x16>(values + 16 * i);
    value = value == value ? value : infinity;
    most = value > most ? value : most;
  }
  return lane_max(most);
}

// Adds 0 to what a mask allows of a chunk, and -inf to the rest, so that NaN and +inf of forbidden
// tokens become NaN. Without branches on bits, so that it is vectorised.
inline void mask_chunk(const int32_t* mask, int64_t words, float* values) {
  for (int64_t word = 0; word < words; ++word, values += kMaskBits) {
    const uint32_t allowed = static_cast<uint32_t>(mask[word]);
    if (allowed == ~0u) continue;
    for (uint32_t i = 0; i < kMaskBits; ++i) {
      const uint32_t forbidden = ((allowed >> i) & 1u) - 1u;  // all bits set, or none
      values[i] += std::bit_cast<float>(forbidden & 0xff800000u);
    }
  }
}

// The logits of a lane as float32, filled up with -inf, and the maxima of its chunks. With a mask,
// those of the tokens that it allows; see `mask_chunk`.
template <class T>
void read_logits(const T* logits, const int32_t* mask, int64_t vocab_size, float* values,
                 float* maxima) {
  const int64_t chunks = sample_chunks(vocab_size);
  std::fill(values + vocab_size, values + chunks * kSampleChunk, kMinusInfinity);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t from = chunk * kSampleChunk, to = std::min(from + kSampleChunk, vocab_size);
    for (int64_t i = from; i < to; ++i) values[i] = static_cast<float>(logits[i]);
    if (mask != nullptr) {
      mask_chunk(mask + from / kMaskBits, (to - from + kMaskBits - 1) / kMaskBits, values + from);
    }
    maxima[chunk] = chunk_maximum(values + from);
  }
}

inline float largest(const float* maxima, int64_t chunks) {
  float most = kMinusInfinity;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) most = std::max(most, maxima[chunk]);
  return most;
}

inline int64_t first_of(float value, const float* values, const float* maxima, int64_t vocab_size) {
  for (int64_t chunk = 0; chunk < sample_chunks(vocab_size); ++chunk) {
    if (maxima[chunk] != value) continue;
    for (int64_t i = chunk * kSampleChunk; i < vocab_size; ++i) {
      if (values[i] == value) return i;
    }
  }
  return 0;  // not reached: the largest is one of them
}

// weights[i] = exp((logits[i] - most) / divisor), with the sums of chunks; returns the sum of all.
inline double weigh(const float* logits, float most, float divisor, int64_t chunks, float* weights,
             float* sums) {
  const bool divides = divisor != 1.0f;
  double total = 0.0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    F32x16 sum{};
    for (int64_t i = chunk * kSampleChunk; i < (chunk + 1) * kSampleChunk; i += 16) {
      F32x16 below = load<F32x16>(logits + i) - most;
      if (divides) below = below / divisor;
      const F32x16 weight = exp_nonpositive(below);
      store(weights + i, weight);
      sum += weight;
    }
    sums[chunk] = lane_sum(sum);
    total += sums[chunk];
  }
  return total;
}

// The largest logits in descending order, of equal ones the lower id first; tops <= vocab_size.
inline void find_tops(const float* logits, const float* maxima, int64_t vocab_size, int64_t tops,
               float* top_logits, int64_t* top_ids) {
  if (tops == 0) return;
  int64_t found = 0;
  const auto insert = [&](float logit, int64_t id) {
    found = std::min(found + 1, tops);
    int64_t at = found - 1;
    for (; at > 0 && logit > top_logits[at - 1]; --at) {
      top_logits[at] = top_logits[at - 1];
      top_ids[at] = top_ids[at - 1];
    }
    top_logits[at] = logit;
    top_ids[at] = id;
  };
  for (int64_t chunk = 0; chunk < sample_chunks(vocab_size); ++chunk) {
    if (found == tops && !(maxima[chunk] > top_logits[tops - 1])) continue;
    const int64_t from = chunk * kSampleChunk, to = std::min(from + kSampleChunk, vocab_size);
    for (int64_t i = from; i < to; ++i) {
      if (found < tops || logits[i] > top_logits[tops - 1]) insert(logits[i], i);
    }
  }
}

// Those of the weights that are at least `least`; returns their number.
inline int64_t collect(const float* weights, const float* maxima, int64_t chunks, float least,
                float* found) {
  int64_t count = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (maxima[chunk] < least) continue;
    for (int64_t i = chunk * kSampleChunk; i < (chunk + 1) * kSampleChunk; ++i) {
      found[count] = weights[i];
      count += weights[i] >= least;
    }
  }
  return count;
}

// The k-th largest weight, or the smallest if there are fewer. Leaves in `found` the `count`
// weights that it was looked for among: all that are as large, and some smaller ones.
inline float kth_weight(const Scratch& at, int64_t chunks, int64_t k, int64_t* count) {
  float least = 0.0f;
  if (k <= chunks) {  // as many chunks have a weight of at least the k-th largest maximum
    std::copy(at.weight_maxima, at.weight_maxima + chunks, at.found);
    std::nth_element(at.found, at.found + k - 1, at.found + chunks, std::greater<>());
    least = at.found[k - 1];
  }
  *count = collect(at.weights, at.weight_maxima, chunks, least, at.found);
  if (*count == 0) return 0.0f;
  const int64_t index = std::min(k, *count) - 1;
  std::nth_element(at.found, at.found + index, at.found + *count, std::greater<>());
  return at.found[index];
}

// The largest weight w such that those of `found` from w on hold `enough`; 0 if not even all do.
inline float weight_that_holds(float* found, int64_t count, double enough, double* masses) {
  const auto group = [](float weight) {
    return std::min<int64_t>(std::bit_cast<uint32_t>(weight) >> kGroupShift, kGroups - 1);
  };
  std::fill(masses, masses + kGroups, 0.0);
  for (int64_t i = 0; i < count; ++i) masses[group(found[i])] += found[i];
  double held = 0.0;
  int64_t last = kGroups - 1;
  for (; last >= 0 && !(held + masses[last] >= enough && masses[last] > 0.0); --last) {
    held += masses[last];
  }
  if (last < 0) return 0.0f;
  float* end = std::partition(found, found + count, [&](float w) { return group(w) == last; });
  std::sort(found, end, std::greater<>());
  float* weight = found;
  for (; weight + 1 < end; ++weight) {
    held += *weight;
    if (held >= enough) break;
  }
  return *weight;
}

// The weight from which top-k, top-p and min-p keep tokens; see `bisect_thresholds`.
inline float threshold(const Scratch& at, int64_t chunks, double total, int64_t vocab_size, int64_t top_k,
                float top_p) {
  float kth = 0.0f;
  int64_t count = -1;
  if (top_k < vocab_size) {
    kth = kth_weight(at, chunks, top_k, &count);
    count = std::partition(at.found, at.found + count, [&](float w) { return w >= kth; }) -
            at.found;
  }
  if (!(top_p < 1.0f)) return kth;
  if (count < 0) {
    // All that is lighter than this weighs less, together, than what top-p may leave out.
    const double least = 0.999 * (1.0 - top_p) * total / vocab_size;
    count = collect(at.weights, at.weight_maxima, chunks, static_cast<float>(least), at.found);
  } else {
    total = 0.0;
    for (int64_t i = 0; i < count; ++i) total += at.found[i];
  }
  return std::max(kth, weight_that_holds(at.found, count, top_p * total, at.masses));
}

// SplitMix64, as `uniform` in `draws.py`.
inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

inline double uniform(int64_t seed, int64_t position) {
  constexpr uint64_t kGamma = 0x9e3779b97f4a7c15u;
  const uint64_t start = mix64(static_cast<uint64_t>(seed) + kGamma);
  const uint64_t number = mix64(start + static_cast<uint64_t>(position) * kGamma);
  return static_cast<double>(number >> 11) * 0x1p-53;
}

// The first index with mass whose running sum is above the target, else the last one with mass,
// else 0; `before` becomes the running sum in front of it.
template <class Mass>
int64_t first_above(int64_t count, double target, const Mass& mass, double* before) {
  double until = 0.0;
  int64_t index = 0;
  *before = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double own = mass(i);
    if (!(own > 0.0)) continue;
    index = i;
    *before = until;
    until += own;
    if (until > target) break;
  }
  return index;
}

// Inverts the distribution function of the weights that are at least `least`.
inline int64_t draw(const Scratch& at, int64_t chunks, int64_t vocab_size, float least, double u) {
  double total = 0.0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (least > 0.0f) {
      F32x16 sum{};
      if (at.weight_maxima[chunk] >= least) {
        for (int64_t i = chunk * kSampleChunk; i < (chunk + 1) * kSampleChunk; i += 16) {
          const F32x16 weight = load<F32x16>(at.weights + i);
          sum += weight >= least ? weight : F32x16{};
        }
      }
      at.sums[chunk] = lane_sum(sum);
    }
    total += at.sums[chunk];
  }
  double before = 0.0, within = 0.0;
  const double target = u * total;
  const int64_t chunk =
      first_above(chunks, target, [&](int64_t i) { return at.sums[i]; }, &before);
  const float* weights = at.weights + chunk * kSampleChunk;
  const auto kept = [&](int64_t i) { return weights[i] >= least ? weights[i] : 0.0f; };
  const int64_t token = chunk * kSampleChunk +
                        first_above(kSampleChunk, target - before, kept, &within);
  return std::min(token, vocab_size - 1);
}

}  // namespace stepgraph::sampling_math
