// The rotations of a step and the soft cap of logits, see `sampling.py`. Part of `ops.cpp`.
#pragma once

#include <algorithm>
#include <cmath>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "stack_math.h"

namespace stepgraph {
namespace {

std::tuple<at::Tensor, at::Tensor> rotations_cpu(const at::Tensor& positions,
                                                 const at::Tensor& frequencies) {
  TORCH_CHECK(positions.scalar_type() == at::kLong && positions.dim() == 1 &&
                  positions.is_contiguous(),
              "rotations: positions are a contiguous int64 [tokens], got ", positions.sizes(),
              " of ", positions.scalar_type());
  TORCH_CHECK(frequencies.scalar_type() == at::kFloat && frequencies.dim() == 2 &&
                  frequencies.is_contiguous(),
              "rotations: frequencies are a contiguous float32 [kinds, pairs], got ",
              frequencies.sizes());
  const int64_t kinds = frequencies.size(0), pairs = frequencies.size(1), tokens = positions.size(0);
  at::Tensor cos = at::empty({kinds, tokens, pairs}, frequencies.options());
  at::Tensor sin = at::empty({kinds, tokens, pairs}, frequencies.options());
  const int64_t* position = positions.const_data_ptr<int64_t>();
  const float* frequency = frequencies.const_data_ptr<float>();
  float *cosines = cos.mutable_data_ptr<float>(), *sines = sin.mutable_data_ptr<float>();
  constexpr int64_t kPairsPerThread = 1 << 13;
  const int used = static_cast<int>(
      std::clamp<int64_t>(kinds * tokens * pairs / kPairsPerThread, 1, threads()));
  parallel_for(kinds * tokens, used, [=](int64_t row, int64_t) {
    const float at = static_cast<float>(position[row % tokens]);
    const float* own = frequency + row / tokens * pairs;
    for (int64_t i = 0; i < pairs; ++i) {
      cosines[row * pairs + i] = std::cos(at * own[i]);
      sines[row * pairs + i] = std::sin(at * own[i]);
    }
  });
  return {cos, sin};
}

void cap_logits_cpu(at::Tensor& logits, double cap) {
  TORCH_CHECK(logits.is_contiguous() && cap > 0.0, "cap_logits: contiguous logits and a positive cap"
              " expected, got ", logits.sizes(), " and ", cap);
  const auto run = [&]<class T>(T* data) {
    constexpr int64_t kPiece = 1 << 12;
    const int64_t count = logits.numel(), pieces = (count + kPiece - 1) / kPiece;
    const F32x16 limit = broadcast(static_cast<float>(cap));
    parallel_for(pieces, static_cast<int>(std::min<int64_t>(pieces, threads())),
                 [=](int64_t piece, int64_t) {
                   const int64_t end = std::min(count, (piece + 1) * kPiece);
                   for (int64_t i = piece * kPiece; i < end; i += 16) {
                     const F32x16 x = floats_of(data, i, end) / limit;
                     put(data + i, tanh_of(x) * limit, end - i);
                   }
                 });
  };
  if (logits.scalar_type() == at::kBFloat16) return run(logits.mutable_data_ptr<at::BFloat16>());
  TORCH_CHECK(logits.scalar_type() == at::kFloat, "cap_logits: bfloat16 or float32 expected, got ",
              logits.scalar_type());
  run(logits.mutable_data_ptr<float>());
}

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  library.impl("rotations", &stepgraph::rotations_cpu);
  library.impl("cap_logits", &stepgraph::cap_logits_cpu);
}
