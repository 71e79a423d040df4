// `stepgraph::stack_create`, `stack_destroy`, `stack_workspace` and `decoder_stack`: what `stack.py`
// declares, checked here and handed to `stack.h`. Part of `ops.cpp`.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <unistd.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "argument_reader.h"
#include "checks.h"
#include "collective_ops.h"
#include "stack.h"

namespace stepgraph {

// A stack and the tensors that it points into.
struct OwnedStack {
  static constexpr const char* kKind = "stack";
  std::vector<at::Tensor> tensors;
  std::shared_ptr<OwnedCommunicator> communicator;  // null: no layer sums over ranks
  std::unique_ptr<Stack> stack;  // goes first: it waits for threads that read the tensors
  at::ScalarType dtype;
  int64_t groups, ropes;  // the least a step must have
  pid_t process = getpid();
};

inline AttentionBlock read_attention(ArgumentReader& reader, const StackShape& shape) {
  AttentionBlock block{};
  block.embedding_norm = reader.norm(shape.hidden, "the norm of embeddings");
  block.input_norm = reader.norm(shape.hidden, "the input norm");
  const int64_t inputs = (block.embedding_norm.weight == nullptr ? 1 : 2) * shape.hidden;
  block.qkv = reader.linear(shape.qkv_size(), inputs, "qkv");
  block.all_heads = reader.flag();
  block.head_ranks = reader.integer();
  const int64_t queries = block.all_heads ? shape.heads : 1;
  const int64_t keys = block.all_heads ? shape.kv_heads : 1;
  block.q_norm = reader.norm(queries * shape.head_dim, "the norm of queries");
  block.k_norm = reader.norm(keys * shape.head_dim, "the norm of keys");
  block.scale = reader.number();
  block.softcap = reader.number();
  block.sinks = reader.vector(shape.heads, "the sinks");
  block.temperature_floor = reader.integer();
  block.temperature_scale = reader.number();
  block.output = reader.linear(shape.hidden, shape.query_size(), "the attention's output");
  return block;
}

inline MlpBlock read_mlp(ArgumentReader& reader, const StackShape& shape) {
  MlpBlock block{};
  block.norm = reader.norm(shape.hidden, "the norm of the MLP");
  if (reader.flag()) {
    block.mixture = reader.mixture(shape.hidden);
  } else {
    block.inner = reader.integer();
    block.gate_up = reader.linear(2 * block.inner, shape.hidden, "gate and up");
    block.activation = reader.activation();
    block.down = reader.linear(shape.hidden, block.inner, "down");
  }
  return block;
}

inline int64_t stack_create(const c10::List<std::optional<at::Tensor>>& tensors,
                            at::IntArrayRef integers, c10::ArrayRef<double> numbers,
                            at::ScalarType dtype, std::string_view storage) {
  OwnedStack owned{{}, nullptr, nullptr, dtype, 0, 0};
  ArgumentReader reader("stack_create", tensors, integers, numbers, dtype);
  StackShape shape{};
  shape.hidden = reader.integer();
  shape.heads = reader.integer();
  shape.kv_heads = reader.integer();
  shape.head_dim = reader.integer();
  shape.storage = storage_named("stack_create", storage);
  Communicator* communicator = nullptr;
  if (const int64_t number = reader.integer(); number != 0) {
    owned.communicator = Handles<OwnedCommunicator>::instance().find("stack_create", number);
    communicator = &owned.communicator->communicator;
    const int64_t row_bytes = shape.hidden * static_cast<int64_t>(c10::elementSize(dtype));
    TORCH_CHECK(communicator->part_bytes() >= std::max(row_bytes, kMeansBytes),
                "stack_create: the region of the communicator has no room for a row of ",
                shape.hidden, " elements of ", dtype);
  }
  std::vector<StackBlock> blocks(reader.integer());
  std::vector<StackPlan> plans;
  int64_t mixtures = 0;
  for (StackBlock& block : blocks) {
    if (reader.flag()) {
      const int64_t group = reader.integer(), position = reader.integer();
      const int64_t window = reader.integer(), chunk = reader.integer();
      const int64_t rope = reader.integer();
      const StackPlan plan{group, window, chunk};
      const auto found = std::find(plans.begin(), plans.end(), plan);
      const int64_t index = found - plans.begin();
      if (found == plans.end()) plans.push_back(plan);
      owned.groups = std::max(owned.groups, group + 1);
      owned.ropes = std::max(owned.ropes, rope + 1);
      AttentionBlock attention = read_attention(reader, shape);
      attention.position = position;
      attention.plan = index;
      attention.rope = rope;
      block.product = attention;
    } else {
      MlpBlock mlp = read_mlp(reader, shape);
      mlp.mixture_place = mixtures;
      mixtures += mlp.mixture.has_value();
      block.product = std::move(mlp);
    }
    block.summed = reader.flag();
    block.output_norm = reader.norm(shape.hidden, "the output norm");
    block.factor = reader.number();
    block.ends_layer = reader.flag();
  }
  const NormWeights norm = reader.norm(shape.hidden, "the final norm");
  owned.tensors = reader.finish();
  owned.stack = std::make_unique<Stack>(shape, std::move(blocks), std::move(plans), norm,
                                        communicator);
  return Handles<OwnedStack>::instance().add(std::make_shared<OwnedStack>(std::move(owned)));
}

inline void stack_destroy(int64_t handle) {
  std::shared_ptr<OwnedStack> removed = Handles<OwnedStack>::instance().remove("stack_destroy", handle);
  // A forked child has none of the threads that it would wait for.
  if (removed->process != getpid()) new std::shared_ptr<OwnedStack>(removed);
  removed.reset();
  sweep_jobs();
}

inline int64_t stack_workspace(int64_t handle) {
  return Handles<OwnedStack>::instance().find("stack_workspace", handle)->stack->workspace_bytes();
}

// The final hidden states, and the outputs of the aux layers side by side.
inline std::tuple<at::Tensor, at::Tensor> decoder_stack_cpu(
    const at::Tensor& x, at::Tensor& arena, const at::Tensor& positions, const at::Tensor& slots,
    const at::Tensor& block_tables, const at::Tensor& token_rows, const at::Tensor& cos,
    const at::Tensor& sin, int64_t read_blocks, const at::Tensor& handle, at::IntArrayRef aux_layers,
    const std::optional<at::Tensor>& embeddings) {
  const auto owned = Handles<OwnedStack>::instance().find("decoder_stack", handle);
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
  check_index("decoder_stack", slots.view({-1}), groups * tokens,
              num_blocks * block_size, "slots");
  check_index("decoder_stack", token_rows, tokens, block_tables.size(1), "token_rows");
  check_index("decoder_stack", positions, tokens, read_blocks * block_size,
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
              "decoder_stack: layers that join embeddings need the embeddings of all tokens, in the shape and "
              "dtype of x; others need none");
  for (size_t i = 0; i < aux_layers.size(); ++i) {
    TORCH_CHECK(aux_layers[i] >= 0 && aux_layers[i] < owned->stack->layers() &&
                    (i == 0 || aux_layers[i] > aux_layers[i - 1]),
                "decoder_stack: aux_layers are layers below ", owned->stack->layers(),
                " in ascending order, got ", aux_layers);
  }
  const at::Tensor inputs = x.contiguous();
  const at::Tensor joined = embeddings ? embeddings->contiguous() : at::Tensor();
  at::Tensor out = at::empty(x.sizes(), x.options());
  const int64_t width = static_cast<int64_t>(aux_layers.size()) * shape.hidden;
  at::Tensor outputs = at::empty({tokens, width}, x.options());
  const at::Tensor taken = aux_layers.size() > 1 ? at::empty({tokens * width}, x.options()) : outputs;
  const auto keep = std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{
      inputs, joined, out, outputs, taken, arena, positions, slots, block_tables, token_rows, cos, sin});
  for_model_type("decoder_stack", owned->dtype, [&]<class T>(T) {
    owned->stack->run(StackStep<T>{
        inputs.const_data_ptr<T>(), joined.defined() ? joined.const_data_ptr<T>() : nullptr,
        out.mutable_data_ptr<T>(), aux_layers.empty() ? nullptr : taken.mutable_data_ptr<T>(),
        aux_layers.size() > 1 ? outputs.mutable_data_ptr<T>() : nullptr, aux_layers.vec(),
        static_cast<uint8_t*>(arena.mutable_data_ptr()), arena.stride(0) * arena.element_size(),
        arena.stride(1) * arena.element_size(), positions.const_data_ptr<int64_t>(),
        slots.const_data_ptr<int64_t>(), block_tables.const_data_ptr<int32_t>(),
        block_tables.size(1), block_tables.size(2), token_rows.const_data_ptr<int64_t>(),
        cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), tokens, num_blocks, block_size,
        threads()}, keep);
  });
  return {out, outputs};
}

}  // namespace stepgraph
