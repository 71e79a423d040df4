// Exponential functions of sixteen numbers at a time: to the base e for activations and sampling, to
// the base 2 for attention, and the hyperbolic tangent of soft caps.
#pragma once

#include "vec.h"

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

// 2**x of x <= 0: x is rounded to an integer, the rest goes into a polynomial of degree 6 (Cephes'
// exp2f, below 2 ulp). NaN stays NaN, far below it is 0.
inline F32x16 exp2_nonpositive(F32x16 x) {
  const auto polynomial = [](F32x16 r) {
    F32x16 p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    return p * r + 1.0f;
  };
#if STEPGRAPH_AVX512
  const __m512 low = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // of NaN the second
  const __m512 n = _mm512_roundscale_ps(low, 0);
  return (F32x16)_mm512_scalef_ps((__m512)polynomial((F32x16)(low - n)), n);
#else
  const I32x16 underflow = x < -126.0f;
  const F32x16 clamped = underflow ? (F32x16{} - 126.0f) : x;
  const F32x16 shifted = clamped + 12582912.0f;  // 1.5 * 2**23 rounds
  const I32x16 exponent = (bits<I32x16>(shifted) - 0x4b400000 + 127) << 23;
  const F32x16 p = polynomial(clamped - (shifted - 12582912.0f));
  return underflow ? F32x16{} : p * bits<F32x16>(exponent);
#endif
}

constexpr float kLog2E = 1.44269504088896341f;  // attention keeps its scores in units of ln 2

// Cephes' tanhf: an odd polynomial of degree 11 below 0.625, else 1 - 2 / (exp(2 |x|) + 1); absolute
// error below 2e-7. NaN stays NaN.
inline F32x16 tanh_of(F32x16 x) {
  const F32x16 magnitude = x < 0.0f ? -x : x, square = x * x;
  F32x16 p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  p = p * square * x + x;
  const F32x16 e = exp2_nonpositive(magnitude * (-2.0f * kLog2E));
  const F32x16 far = 1.0f - 2.0f * e / (e + 1.0f);
  return magnitude < 0.625f ? p : (x < 0.0f ? -far : far);
}

}  // namespace stepgraph
