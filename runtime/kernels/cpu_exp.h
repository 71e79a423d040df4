// The exponential function of sixteen numbers at a time, for activations and sampling. (Attention has
// one of its own, to the base 2.)
#pragma once

#include "cpu_vec.h"

namespace stepgraph {

// Cephes' expf on [-87, 0] (argument reduction by ln 2 in two parts, polynomial of degree 5,
// below 2 ulp); 0 below; NaN stays NaN.
inline F32x16 exp_nonpositive(F32x16 x) {
  const I32x16 underflow = x < -87.0f;
  const F32x16 clamped = underflow ? (F32x16{} - 87.0f) : x;
  const F32x16 shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2**23 rounds
  const F32x16 n = shifted - 12582912.0f;
  F32x16 r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  F32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const I32x16 exponent = (bits<I32x16>(shifted) - 0x4b400000 + 127) << 23;
  return underflow ? F32x16{} : p * bits<F32x16>(exponent);
}

}  // namespace stepgraph
