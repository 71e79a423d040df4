// How a token chooses its experts: `reference_route` of `experts.py`, for one token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "vec.h"

namespace stepgraph {

enum class Scores { kSoftmax, kSigmoid, kSoftmaxChosen };

// See `Routing` in `ops/experts.py`.
struct Routing {
  int64_t experts;  // that a token chooses from
  int64_t top_k;
  Scores scores;
  bool normalised;
  float scale;
  int64_t groups, top_groups;
  bool sums_of_two;       // the score of a group is the sum of its two largest; else its largest
  bool chooses_by_logits; // else by scores plus correction

  // Words that `route_row` works in.
  int64_t scratch_words() const { return 2 * experts + 2 * groups; }
};

// Orders floats as integers: NaN is the largest, and zeros of both signs are equal.
inline int32_t order_of(float value) {
  if (value != value) return std::numeric_limits<int32_t>::max();
  const int32_t raw = bits<int32_t>(value + 0.0f);
  return raw < 0 ? raw ^ 0x7fffffff : raw;
}

// The indices of the `most` largest keys, in descending order; of equal ones the first comes first.
inline void largest(const int32_t* keys, int64_t count, int64_t most, int32_t* found) {
  int64_t size = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (size == most && keys[i] <= keys[found[size - 1]]) continue;
    int64_t place = size < most ? size++ : size - 1;
    for (; place > 0 && keys[i] > keys[found[place - 1]]; --place) found[place] = found[place - 1];
    found[place] = static_cast<int32_t>(i);
  }
}

// Experts outside of the best groups get the key of minus infinity.
inline void keep_best_groups(const Routing& routing, const float* choice, int32_t* keys,
                             int32_t* scratch) {
  const int64_t size = routing.experts / routing.groups;
  int32_t *scores = scratch, *best = scratch + routing.groups;
  for (int64_t group = 0; group < routing.groups; ++group) {
    int32_t two[2];
    const int64_t most = routing.sums_of_two ? 2 : 1;
    largest(keys + group * size, size, most, two);
    const float* own = choice + group * size;
    scores[group] = order_of(routing.sums_of_two ? own[two[0]] + own[two[1]] : own[two[0]]);
  }
  largest(scores, routing.groups, routing.top_groups, best);
  std::sort(best, best + routing.top_groups);
  const int32_t excluded = order_of(kMinusInfinity);
  for (int64_t group = 0, next = 0; group < routing.groups; ++group) {
    if (next < routing.top_groups && best[next] == group) ++next;
    else std::fill_n(keys + group * size, size, excluded);
  }
}

// exp(x - maximum) / sum, in place.
inline void softmax(float* x, int64_t count) {
  const float maximum = *std::max_element(x, x + count);
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += x[i] = std::exp(x[i] - maximum);
  for (int64_t i = 0; i < count; ++i) x[i] /= sum;
}

// The experts of a token and their weights, [top_k] each. `logits` become scores; `correction` and
// `expert_scales` may be null.
inline void route_row(const Routing& routing, float* logits, const float* correction,
                      const float* expert_scales, int32_t* scratch, int32_t* experts,
                      float* weights) {
  constexpr float kLeastSum = 1e-20f;  // all sigmoids of a token may be zero
  const int64_t count = routing.experts, top_k = routing.top_k;
  int32_t *keys = scratch, *of_groups = scratch + 2 * count;
  float* choice = reinterpret_cast<float*>(scratch + count);
  if (routing.chooses_by_logits) std::copy_n(logits, count, choice);
  if (routing.scores == Scores::kSoftmax) softmax(logits, count);
  if (routing.scores == Scores::kSigmoid) {
    for (int64_t i = 0; i < count; ++i) logits[i] = 1.0f / (1.0f + std::exp(-logits[i]));
  }
  if (!routing.chooses_by_logits) std::copy_n(logits, count, choice);
  if (correction != nullptr) {
    for (int64_t i = 0; i < count; ++i) choice[i] += correction[i];
  }
  for (int64_t i = 0; i < count; ++i) keys[i] = order_of(choice[i]);
  if (routing.top_groups < routing.groups) keep_best_groups(routing, choice, keys, of_groups);
  largest(keys, count, top_k, experts);
  for (int64_t i = 0; i < top_k; ++i) weights[i] = logits[experts[i]];
  if (routing.scores == Scores::kSoftmaxChosen) softmax(weights, top_k);
  if (routing.normalised) {
    float sum = kLeastSum;
    for (int64_t i = 0; i < top_k; ++i) sum += weights[i];
    for (int64_t i = 0; i < top_k; ++i) weights[i] /= sum;
  }
  for (int64_t i = 0; i < top_k; ++i) weights[i] *= routing.scale;
  if (expert_scales == nullptr) return;
  for (int64_t i = 0; i < top_k; ++i) weights[i] *= expert_scales[experts[i]];
}

}  // namespace stepgraph
