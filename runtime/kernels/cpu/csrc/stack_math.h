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

// A rounded number times a factor, rounded again.
template <class T>
inline F32x16 scaled(F32x16 value, float factor) {
  value = rounded<T>(value);
  return factor == 1.0f ? value : rounded<T>(value * factor);
}

// The first `count` of 16 numbers, rounded to T.
template <class T>
inline void put(T* out, F32x16 value, int64_t count) {
  const auto result = Element<T>::rounded(value);
  if (count >= 16) store(out, result);
  else std::memcpy(static_cast<void*>(out), &result, count * sizeof(T));
}

// Rounded sums of some rows of a block of columns to `out`, rows `stride` apart.
template <class T>
inline void put_sums(const float* sums, int64_t rows, int64_t columns, T* out, int64_t stride) {
  for (int64_t m = 0; m < rows; ++m, sums += kBlock, out += stride) {
    if (columns >= kBlock) {
      Element<T>::store32_in_order(out, load<F32x16>(sums), load<F32x16>(sums + 16));
    } else {
      for (int64_t c = 0; c < columns; c += 16) put(out + c, load<F32x16>(sums + c), columns - c);
    }
  }
}

// publish(block, first row, rows, sums [rows][32]) of a linear layer without more to do: rounds the
// sums to rows of `columns` elements.
template <class T>
inline auto to_rows(T* out, int64_t columns) {
  return [=](int64_t block, int64_t row, int64_t rows, const float* sums) {
    const int64_t first = block * kBlock;
    put_sums(sums, rows, columns - first, out + row * columns + first, columns);
  };
}

// A norm, whose weight is of the model's type; null: there is none.
struct NormWeights {
  const void* weight = nullptr;
  float eps = 0.0f;
  bool offset = false;  // multiply by one plus the weight, in float
};

// The mean of the squares of a row.
template <class T>
float mean_square(const T* x, int64_t size) {
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
  return lane_sum(lanes[0] + lanes[1]) / static_cast<float>(size);
}

// One row of RMSNorm: out = weight * (x / sqrt(mean(x**2) + eps)), see `ops/norms.py`, where
// the mean belongs to the row that x is a part of. With `added` that is rounded, multiplied by
// `factor`, rounded and added to it. `out` may be `x`.
template <class T>
void norm_part(const T* x, const NormWeights& norm, float mean, int64_t size, T* out,
               const T* added = nullptr, float factor = 1.0f) {
  const T* weight = static_cast<const T*>(norm.weight);
  const bool offset = norm.offset;
  const F32x16 inverse = broadcast(1.0f / std::sqrt(mean + norm.eps));
  for (int64_t i = 0; i < size; i += 16) {
    const F32x16 w = floats_of(weight, i, size), normed = floats_of(x, i, size) * inverse;
    F32x16 result = offset ? normed * (w + 1.0f) : w * rounded<T>(normed);
    if (added != nullptr) result = floats_of(added, i, size) + scaled<T>(result, factor);
    put(out + i, result, size - i);
  }
}

// The same of a whole row.
template <class T>
void norm_row(const T* x, const NormWeights& norm, int64_t size, T* out, const T* added = nullptr,
              float factor = 1.0f) {
  norm_part(x, norm, mean_square(x, size), size, out, added, factor);
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

// What an MLP computes of gate and up, see `Activate` in `ops/activation.py`.
struct Activation {
  bool gelu = false;  // tanh's approximation of it; else silu
  float limit = 0.0f, alpha = 1.0f, up_offset = 0.0f;
};

// gelu(x) = x (1 + tanh(z)) / 2 with z = sqrt(2 / pi) (x + 0.044715 x**3), and (1 + tanh(z)) / 2 is
// the sigmoid of 2 z.
template <class T>
inline F32x16 activated(F32x16 gate, const Activation& activation) {
  const bool factored = !activation.gelu && activation.alpha != 1.0f;  // rounds the sigmoid too
  F32x16 z = gate;
  if (activation.gelu) {
    z = gate * 0.7978845608028654f * (gate * gate * 0.044715f + 1.0f);
    z += z;
  } else if (factored) {
    z = rounded<T>(gate * activation.alpha);
  }
  const F32x16 result = times_sigmoid(factored ? F32x16{} + 1.0f : gate, z);
  return factored ? gate * rounded<T>(result) : result;
}

// What the MLP multiplies: act(gate) * up, both rounded before and after. NaN stays NaN.
template <class T>
inline F32x16 gated(F32x16 gate, F32x16 up, const Activation& activation) {
  gate = rounded<T>(gate);
  up = rounded<T>(up);
  if (activation.limit > 0.0f) {
    const F32x16 limit = rounded<T>(broadcast(activation.limit));
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
  }
  if (activation.up_offset != 0.0f) up = rounded<T>(up + activation.up_offset);
  return rounded<T>(activated<T>(gate, activation)) * up;
}

// The same of the sums of some rows of a block of columns, to `out`, rows `stride` apart.
template <class T>
inline void put_gated(const float* gates, const float* ups, int64_t rows, Activation activation,
                      T* out, int64_t stride) {
  for (int64_t m = 0; m < rows; ++m, gates += kBlock, ups += kBlock, out += stride) {
    const auto half = [&](int64_t at) {
      return gated<T>(load<F32x16>(gates + at), load<F32x16>(ups + at), activation);
    };
    Element<T>::store32_in_order(out, half(0), half(16));
  }
}

}  // namespace stepgraph
