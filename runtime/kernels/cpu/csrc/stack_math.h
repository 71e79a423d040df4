// What a decoder layer does to single rows between its linear layers: norms, rotation, activation.
// Sums are in float, results are rounded where the modules in `models/` round.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "exp.h"
#include "storage.h"

namespace stepgraph {

// As T and back.
template <class T>
inline F32x16 rounded(F32x16 value) {
  if constexpr (std::is_same_v<T, float>) return value;
  else return bits<F32x16>(round_to_bf16(value));
}

// The first `count` of 16 numbers, rounded to T.
template <class T>
inline void put(T* out, F32x16 value, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    if (count >= 16) return store(out, value);
    std::memcpy(out, &value, count * sizeof(T));
  } else {
    const U16x16 half = __builtin_convertvector(round_to_bf16(value) >> 16, U16x16);
    if (count >= 16) return store(out, half);
    std::memcpy(out, &half, count * sizeof(T));
  }
}

// One row of RMSNorm: out = weight * (x / sqrt(mean(x**2) + eps)), see `models/modules.py`. With
// `added` that is rounded and added to it. `out` may be `x`.
template <class T>
void norm_row(const T* x, const T* weight, int64_t size, float eps, bool offset, const T* added,
              T* out) {
  F32x16 lanes[2] = {};
  int64_t i = 0;
  for (; i + 32 <= size; i += 32) {
    const F32x16 a = floats_of(x, i, size), b = floats_of(x, i + 16, size);
    lanes[0] += a * a;
    lanes[1] += b * b;
  }
  for (; i < size; i += 16) {
    const F32x16 value = floats_of(x, i, size);
    lanes[0] += value * value;
  }
  const float mean = lane_sum(lanes[0] + lanes[1]) / static_cast<float>(size);
  const F32x16 factor = broadcast(1.0f / std::sqrt(mean + eps));
  for (i = 0; i < size; i += 16) {
    const F32x16 w = floats_of(weight, i, size), normed = floats_of(x, i, size) * factor;
    F32x16 result = offset ? normed * (w + 1.0f) : w * rounded<T>(normed);
    if (added != nullptr) result = rounded<T>(result) + floats_of(added, i, size);
    put(out + i, result, size - i);
  }
}

// Turns the pairs (i, i + half) of one head in place.
template <class T>
void rotate_row(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += 16) {
    const F32x16 first = floats_of(x, i, half), second = floats_of(x + half, i, half);
    const F32x16 c = floats_of(cos, i, half), s = floats_of(sin, i, half);
    put(x + i, first * c - second * s, half - i);
    put(x + half + i, second * c + first * s, half - i);
  }
}

// x / (1 + exp(-y)), of either sign without overflow.
inline F32x16 times_sigmoid(F32x16 x, F32x16 y) {
  const F32x16 e = exp_nonpositive(y < 0.0f ? y : -y);
  return x * (y < 0.0f ? e : F32x16{} + 1.0f) / (e + 1.0f);
}

// gelu(x) = x (1 + tanh(z)) / 2 with z = sqrt(2 / pi) (x + 0.044715 x**3), and (1 + tanh(z)) / 2 is
// the sigmoid of 2 z.
inline F32x16 activated(F32x16 gate, bool gelu) {
  if (!gelu) return times_sigmoid(gate, gate);
  const F32x16 z = gate * 0.7978845608028654f * (gate * gate * 0.044715f + 1.0f);
  return times_sigmoid(gate, z + z);
}

// What the MLP multiplies: act(gate) * up, both rounded before and after.
template <class T>
inline F32x16 gated(F32x16 gate, F32x16 up, bool gelu) {
  return rounded<T>(activated(rounded<T>(gate), gelu)) * rounded<T>(up);
}

}  // namespace stepgraph
