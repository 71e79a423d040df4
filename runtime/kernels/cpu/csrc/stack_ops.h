// `stepgraph::stack_destroy`, `stack_workspace` and `decoder_stack`: what `stack.py` declares,
// checked here and handed to `stack.h`. Part of `ops.cpp`, as `stack_create.h`.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "checks.h"
#include "mixture_job.h"
#include "stack_create.h"

namespace stepgraph {

inline void stack_destroy(int64_t handle) {
  Stacks::instance().remove(handle);
  sweep_linear_jobs();
  sweep_attention_jobs();
  sweep_mixture_jobs();
}

inline int64_t stack_workspace(int64_t handle, int64_t tokens) {
  const std::shared_ptr<OwnedStack> owned = Stacks::instance().find(handle);
  return owned->stack->workspace_bytes(tokens, c10::elementSize(owned->dtype), threads());
}

// The final hidden states, and the outputs of the tapped layers side by side.
inline std::tuple<at::Tensor, at::Tensor> decoder_stack_cpu(
    const at::Tensor& x, at::Tensor& arena, const at::Tensor& positions, const at::Tensor& slots,
    const at::Tensor& block_tables, const at::Tensor& token_rows, const at::Tensor& cos,
    const at::Tensor& sin, int64_t read_blocks, const at::Tensor& handle, at::IntArrayRef taps,
    const std::optional<at::Tensor>& embeddings) {
  TORCH_CHECK(handle.scalar_type() == at::kLong && handle.numel() == 1,
              "decoder_stack: the handle is one int64");
  const std::shared_ptr<OwnedStack> owned =
      Stacks::instance().find(*handle.const_data_ptr<int64_t>());
  const StackShape& shape = owned->stack->shape();
  TORCH_CHECK(x.dim() == 2 && x.size(1) == shape.hidden && x.scalar_type() == owned->dtype,
              "decoder_stack: x is [tokens, ", shape.hidden, "] of ", owned->dtype, ", got ",
              x.sizes(), " of ", x.scalar_type());
  const int64_t tokens = x.size(0), half = shape.head_dim / 2;
  TORCH_CHECK(arena.dim() >= 5, "decoder_stack: arena has 5 or 6 dimensions, got ", arena.sizes());
  const int64_t block_size =
      shape.storage == Storage::kModel ? arena.size(4) : arena.size(4) / (shape.head_dim + 2);
  check_arena("decoder_stack", arena, owned->dtype, 2, shape.kv_heads, block_size, shape.head_dim,
              shape.storage);
  check_tables("decoder_stack", block_tables, 3, read_blocks);
  const int64_t num_blocks = arena.size(2), groups = block_tables.size(0);
  TORCH_CHECK(groups >= owned->groups && owned->stack->positions() <= arena.size(0),
              "decoder_stack: the stack has ", owned->groups, " layer groups of up to ",
              owned->stack->positions(), " layers, block_tables ", groups, " and the arena ",
              arena.size(0));
  TORCH_CHECK(slots.dim() == 2 && slots.size(0) == groups && slots.is_contiguous(),
              "decoder_stack: slots is a contiguous [", groups, ", ", tokens, "], got ",
              slots.sizes());
  check_index("decoder_stack", slots.view({-1}), at::kLong, groups * tokens,
              num_blocks * block_size, "slots");
  check_index("decoder_stack", token_rows, at::kLong, tokens, block_tables.size(1), "token_rows");
  check_index("decoder_stack", positions, at::kLong, tokens, read_blocks * block_size,
              "positions");
  for (const at::Tensor& table : {cos, sin}) {
    TORCH_CHECK(table.scalar_type() == at::kFloat && table.is_contiguous() && table.dim() == 3 &&
                    table.size(0) >= owned->ropes && table.size(1) == tokens &&
                    table.size(2) == half,
                "decoder_stack: cos and sin are contiguous float32 [", owned->ropes, ", ", tokens,
                ", ", half, "], got ", table.sizes(), " of ", table.scalar_type());
  }
  TORCH_CHECK(owned->stack->reads_embeddings() == embeddings.has_value() &&
                  (!embeddings || (embeddings->sizes() == x.sizes() &&
                                   embeddings->scalar_type() == x.scalar_type())),
              "decoder_stack: layers that join embeddings need those of all tokens, in the shape and "
              "dtype of x; others need none");
  for (size_t i = 0; i < taps.size(); ++i) {
    TORCH_CHECK(taps[i] >= 0 && taps[i] < owned->stack->layers() &&
                    (i == 0 || taps[i] > taps[i - 1]),
                "decoder_stack: taps are layers below ", owned->stack->layers(),
                " in ascending order, got ", taps);
  }
  const at::Tensor inputs = x.contiguous();
  const at::Tensor joined = embeddings ? embeddings->contiguous() : at::Tensor();
  at::Tensor out = at::empty(x.sizes(), x.options());
  const int64_t tapped = static_cast<int64_t>(taps.size()) * shape.hidden;
  at::Tensor outputs = at::empty({tokens, tapped}, x.options());
  const at::Tensor taken = taps.size() > 1 ? at::empty({tokens * tapped}, x.options()) : outputs;
  const auto keep = std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{
      inputs, joined, out, outputs, taken, arena, positions, slots, block_tables, token_rows, cos, sin});
  const auto run = [&]<class T>(T) {
    owned->stack->run(StackStep<T>{
        inputs.const_data_ptr<T>(), joined.defined() ? joined.const_data_ptr<T>() : nullptr,
        out.mutable_data_ptr<T>(), taps.empty() ? nullptr : taken.mutable_data_ptr<T>(),
        taps.size() > 1 ? outputs.mutable_data_ptr<T>() : nullptr, taps.vec(),
        static_cast<uint8_t*>(arena.mutable_data_ptr()), arena.stride(0) * arena.element_size(),
        arena.stride(1) * arena.element_size(), positions.const_data_ptr<int64_t>(),
        slots.const_data_ptr<int64_t>(), block_tables.const_data_ptr<int32_t>(),
        block_tables.size(1), block_tables.size(2), token_rows.const_data_ptr<int64_t>(),
        cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), tokens, num_blocks, block_size,
        threads()}, keep);
  };
  if (owned->dtype == at::kBFloat16) run(at::BFloat16());
  else run(float());
  return {out, outputs};
}

}  // namespace stepgraph
