// Linear layers over packed weights, as `packed_linear` in `linear.py`. Part of `ops.cpp`.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "kernels.h"

namespace stepgraph {
namespace {

// A linear layer of an operator, and the tensors that it points into.
struct PackedLayer {
  Weights weights;
  at::Tensor packed;
  std::optional<at::Tensor> bias, scales;

  void keep_in(std::vector<at::Tensor>& kept) const {
    kept.push_back(packed);
    for (const std::optional<at::Tensor>& tensor : {bias, scales}) {
      if (tensor) kept.push_back(*tensor);
    }
  }
};

// Checks a layer from x, [tokens, in_features] of `dtype`, to `columns` features.
PackedLayer packed_layer(const char* op, at::IntArrayRef x, at::ScalarType dtype,
                         const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& scales, int64_t columns) {
  TORCH_CHECK(x.size() == 2, op, ": x is [tokens, in_features], got ", x.size(), " dimensions");
  TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kFloat, op,
              ": bfloat16 or float32 expected, x is ", dtype);
  const at::ScalarType stored = scales ? at::kChar : dtype;
  const int64_t per_step = stored == at::kFloat ? 1 : 2, steps = (x[1] + per_step - 1) / per_step;
  TORCH_CHECK(packed.scalar_type() == stored && packed.is_contiguous() && packed.dim() == 4 &&
                  packed.size(1) == steps && packed.size(2) == kBlock &&
                  packed.size(3) == per_step && columns > (packed.size(0) - 1) * kBlock &&
                  columns <= packed.size(0) * kBlock,
              op, ": packed weight ", packed.sizes(), " of ", packed.scalar_type(),
              " does not fit x ", x, " of ", dtype, " and out_features ", columns,
              scales ? " with scales; pack an int8 weight with pack_linear"
                     : "; pack the weight with pack_linear in the dtype of x");
  const auto fits = [&](const std::optional<at::Tensor>& given, at::ScalarType wanted) {
    return !given || (given->dim() == 1 && given->size(0) == columns &&
                      given->scalar_type() == wanted && given->is_contiguous());
  };
  TORCH_CHECK(fits(bias, dtype), op, ": bias is a contiguous [", columns, "] of ", dtype);
  TORCH_CHECK(fits(scales, at::kFloat), op, ": scales are a contiguous [", columns,
              "] of float32");
  PackedLayer layer{{}, packed, bias, scales};
  layer.weights.packed = static_cast<const char*>(packed.const_data_ptr());
  layer.weights.scales = scales ? scales->const_data_ptr<float>() : nullptr;
  layer.weights.bias = bias ? bias->const_data_ptr() : nullptr;
  layer.weights.columns = columns;
  layer.weights.steps = steps;
  layer.weights.kind = scales ? WeightKind::kInt8 : WeightKind::kModel;
  return layer;
}

// x as a layer reads it: whole words, and of int8 weights two elements at a time, so an odd last
// element gets a zero beside it. Rows of bf16 begin at whole words.
at::Tensor layer_inputs(const at::Tensor& x, const Weights& weights) {
  const int64_t per_word = x.scalar_type() == at::kBFloat16 ? 2 : 1;
  const int64_t per_step = weights.kind == WeightKind::kInt8 ? 2 : per_word;
  if (x.size(1) % per_step != 0) return at::constant_pad_nd(x, {0, 1}).contiguous();
  return x.stride(1) != 1 || x.stride(0) % per_word != 0 ? x.contiguous() : x;
}

at::Tensor packed_linear_cpu(const at::Tensor& x, const at::Tensor& packed,
                             const std::optional<at::Tensor>& bias, int64_t out_features,
                             const std::optional<at::Tensor>& scales) {
  const PackedLayer layer = packed_layer("packed_linear", x.sizes(), x.scalar_type(), packed, bias,
                                         scales, out_features);
  const at::Tensor inputs = layer_inputs(x, layer.weights);
  at::Tensor out = at::empty({x.size(0), out_features}, x.options());
  auto keep = std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{inputs});
  layer.keep_in(*keep);
  const auto run = [&]<class T>(T) {
    packed_linear(LinearArgs<T>{layer.weights, inputs.const_data_ptr<T>(), inputs.stride(0),
                                out.mutable_data_ptr<T>(), x.size(0), threads()},
                  keep);
  };
  if (x.scalar_type() == at::kBFloat16) run(at::BFloat16());
  else run(float());
  return out;
}

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  library.impl("packed_linear", &stepgraph::packed_linear_cpu);
}
