// `stepgraph::packed_experts`, as `experts_operator.py` declares it. Part of `ops.cpp`.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "argument_reader.h"
#include "checks.h"
#include "mixture.h"

namespace stepgraph {
namespace {

at::Tensor packed_experts_cpu(const at::Tensor& x, const std::optional<at::Tensor>& live,
                              const c10::List<std::optional<at::Tensor>>& tensors,
                              at::IntArrayRef integers, c10::ArrayRef<double> numbers) {
  TORCH_CHECK(x.dim() == 2, "packed_experts: x is [tokens, hidden], got ", x.sizes());
  const int64_t tokens = x.size(0), hidden = x.size(1);
  ArgumentReader reader("packed_experts", tensors, integers, numbers, x.scalar_type());
  const Mixture mixture = reader.mixture(hidden);
  auto keep = std::make_shared<std::vector<at::Tensor>>(reader.finish());
  TORCH_CHECK(!live || (live->scalar_type() == at::kBool && live->is_contiguous() &&
                        live->dim() == 1 && live->size(0) == tokens),
              "packed_experts: live is a contiguous bool [", tokens, "]");
  // The kernel reads whole words: an odd last element gets a zero beside it.
  const at::Tensor inputs =
      hidden % 2 != 0 ? at::constant_pad_nd(x, {0, 1}).contiguous() : x.contiguous();
  at::Tensor out = at::empty({tokens, hidden}, x.options());
  keep->push_back(inputs);
  if (live) keep->push_back(*live);
  for_model_type("packed_experts", x.scalar_type(), [&]<class T>(T) {
    run_mixture(MixtureArgs<T>{mixture, inputs.const_data_ptr<T>(), inputs.size(1),
                               live ? live->const_data_ptr<bool>() : nullptr,
                               out.mutable_data_ptr<T>(), tokens, threads()},
                keep);
  });
  return out;
}

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  library.impl("packed_experts", &stepgraph::packed_experts_cpu);
}
