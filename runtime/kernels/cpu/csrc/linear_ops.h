// Linear layers over packed weights, as `packed_linear` in `linear.py`. Part of `ops.cpp`.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include "checks.h"
#include "codes.h"
#include "kernels.h"

namespace stepgraph {
namespace {

// What `pack_parts` packed, or null.
inline const PackedHeader* packed_header(const at::Tensor& packed) {
  if (packed.scalar_type() != at::kByte || packed.dim() != 1 || !packed.is_contiguous() ||
      packed.size(0) < static_cast<int64_t>(sizeof(PackedHeader))) {
    return nullptr;
  }
  const auto* header = static_cast<const PackedHeader*>(packed.const_data_ptr());
  return header->magic == PackedHeader::kMagic ? header : nullptr;
}

// Checks a layer that `pack_linear` packed from [columns, inputs], or `count` of them that follow
// one another: of the model's type `dtype`, or int8 with scales; or one that `pack_parts` packed,
// without scales. Returns the first.
inline Weights packed_weights(const char* op, const char* name, at::ScalarType dtype,
                              int64_t columns, int64_t inputs, const at::Tensor& packed,
                              const std::optional<at::Tensor>& scales,
                              const std::optional<at::Tensor>& bias, int64_t count = 1) {
  const at::ScalarType stored = scales ? at::kChar : dtype;
  const int64_t per_step = stored == at::kFloat ? 1 : 2;
  Weights weights;
  weights.columns = columns;
  weights.steps = (inputs + per_step - 1) / per_step;
  weights.kind = scales ? WeightKind::kInt8 : WeightKind::kModel;
  if (packed.scalar_type() == at::kByte) {
    const PackedHeader* header = packed_header(packed);
    weights.kind = WeightKind::kParts;
    weights.header = header;
    weights.steps = (inputs + 1) / 2;
    TORCH_CHECK(!scales && header != nullptr && header->columns == columns &&
                    header->inputs == inputs && packed.size(0) == count * header->bytes &&
                    header->element_bytes == static_cast<int64_t>(c10::elementSize(dtype)),
                op, ": the weight of ", name, " is not a packed [", columns, ", ", inputs,
                "] for a model in ", dtype, ", without scales; pack it with pack_parts");
  }
  TORCH_CHECK(weights.header != nullptr ||
                  (packed.scalar_type() == stored && packed.is_contiguous() &&
                   packed.sizes() == at::IntArrayRef({count * weights.blocks(), weights.steps,
                                                      kBlock, per_step})),
              op, ": the weight of ", name, " is not a packed [", columns, ", ", inputs, "] of ",
              stored, "; pack it with pack_linear");
  const auto values = [&](const std::optional<at::Tensor>& given, at::ScalarType wanted,
                          const char* what) -> const void* {
    if (!given) return nullptr;
    check_tensor(op, *given, wanted, {count * columns}, what, name);
    return given->const_data_ptr();
  };
  weights.packed = static_cast<const char*>(packed.const_data_ptr());
  weights.scales = static_cast<const float*>(values(scales, at::kFloat, "the scales of "));
  weights.bias = values(bias, dtype, "the biases of ");
  return weights;
}

// x as a layer reads it: whole words, and of weights in 8 bits or parts two elements at a time, so
// an odd last element gets a zero after it. Rows of bf16 begin at whole words.
at::Tensor layer_inputs(const at::Tensor& x, const Weights& weights) {
  const int64_t per_word = x.scalar_type() == at::kBFloat16 ? 2 : 1;
  const int64_t per_step = weights.kind == WeightKind::kModel ? per_word : 2;
  if (x.size(1) % per_step != 0) return at::constant_pad_nd(x, {0, 1}).contiguous();
  return x.stride(1) != 1 || x.stride(0) % per_word != 0 ? x.contiguous() : x;
}

at::Tensor packed_linear_cpu(const at::Tensor& x, const at::Tensor& packed,
                             const std::optional<at::Tensor>& bias, int64_t out_features,
                             const std::optional<at::Tensor>& scales) {
  TORCH_CHECK(x.dim() == 2, "packed_linear: x is [tokens, in_features], got ", x.sizes());
  check_model_type("packed_linear", x.scalar_type());
  const Weights weights = packed_weights("packed_linear", "the layer", x.scalar_type(),
                                         out_features, x.size(1), packed, scales, bias);
  const at::Tensor inputs = layer_inputs(x, weights);
  at::Tensor out = at::empty({x.size(0), out_features}, x.options());
  auto keep = std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{inputs, packed});
  for (const auto& tensor : {bias, scales}) {
    if (tensor) keep->push_back(*tensor);
  }
  for_model_type("packed_linear", x.scalar_type(), [&]<class T>(T) {
    packed_linear(LinearArgs<T>{weights, inputs.const_data_ptr<T>(), inputs.stride(0),
                                out.mutable_data_ptr<T>(), x.size(0), threads()},
                  keep);
  });
  return out;
}

}  // namespace
}  // namespace stepgraph
