// Linear layers over packed weights, as `packed_linear` in `linear.py`. Part of `ops.cpp`.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include "checks.h"
#include "codes.h"
#include "kernels.h"
#include "tiles.h"

namespace stepgraph {
namespace {

// What multiplies codes by inputs in int8, or empty.
std::string int8_instructions() {
  if (tile_use() == TileUse::kProcessor) return "amx";
  return STEPGRAPH_AVX512_VNNI ? "avx512vnni" : "";
}

// Of what `pack_parts` packed from rows of `inputs` for a model in `dtype`, or null.
inline const PackedHeader* packed_header(const at::Tensor& packed, int64_t inputs,
                                         at::ScalarType dtype) {
  if (packed.scalar_type() != at::kByte || packed.dim() != 1 || !packed.is_contiguous() ||
      packed.size(0) < static_cast<int64_t>(sizeof(PackedHeader))) {
    return nullptr;
  }
  const auto* header = static_cast<const PackedHeader*>(packed.const_data_ptr());
  const bool fits = header->magic == PackedHeader::kMagic && header->inputs == inputs &&
                    header->element_bytes == static_cast<int64_t>(c10::elementSize(dtype));
  return fits ? header : nullptr;
}

// Checks a layer that `pack_parts` packed from [columns, inputs], or `count` of them that follow one
// another. Returns the first.
inline Weights packed_weights(const char* op, const char* name, at::ScalarType dtype,
                              int64_t columns, int64_t inputs, const at::Tensor& packed,
                              const std::optional<at::Tensor>& bias, int64_t count = 1) {
  Weights weights;
  weights.columns = columns;
  weights.header = packed_header(packed, inputs, dtype);
  TORCH_CHECK(weights.header != nullptr && weights.header->columns == columns &&
                  packed.size(0) == count * weights.header->bytes,
              op, ": the weight of ", name, " is not a packed [", columns, ", ", inputs,
              "] for a model in ", dtype, "; pack it with pack_parts");
  weights.packed = static_cast<const char*>(packed.const_data_ptr());
  if (bias) {
    check_tensor(op, *bias, dtype, {count * columns}, "the biases of ", name);
    weights.bias = bias->const_data_ptr();
  }
  return weights;
}

// x as a layer reads it, two elements at a time: an odd last one gets a zero after it. Rows of bf16
// begin at whole words.
at::Tensor layer_inputs(const at::Tensor& x) {
  const int64_t per_word = x.scalar_type() == at::kBFloat16 ? 2 : 1;
  if (x.size(1) % 2 != 0) return at::constant_pad_nd(x, {0, 1}).contiguous();
  return x.stride(1) != 1 || x.stride(0) % per_word != 0 ? x.contiguous() : x;
}

at::Tensor packed_linear_cpu(const at::Tensor& x, const at::Tensor& packed,
                             const std::optional<at::Tensor>& bias, int64_t out_features) {
  TORCH_CHECK(x.dim() == 2, "packed_linear: x is [tokens, in_features], got ", x.sizes());
  check_model_type("packed_linear", x.scalar_type());
  const Weights weights = packed_weights("packed_linear", "the layer", x.scalar_type(),
                                         out_features, x.size(1), packed, bias);
  const at::Tensor inputs = layer_inputs(x);
  at::Tensor out = at::empty({x.size(0), out_features}, x.options());
  auto keep = std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{inputs, packed});
  if (bias) keep->push_back(*bias);
  for_model_type("packed_linear", x.scalar_type(), [&]<class T>(T) {
    packed_linear(LinearArgs<T>{weights, inputs.const_data_ptr<T>(), inputs.stride(0),
                                out.mutable_data_ptr<T>(), x.size(0), threads()},
                  keep);
  });
  return out;
}

}  // namespace
}  // namespace stepgraph
