// `stepgraph::stack_create`, `stack_destroy`, `stack_workspace` and `decoder_stack`: what
// `stack.py` declares, checked here and handed to `stack.h`. Part of `ops.cpp`.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <unistd.h>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "checks.h"
#include "stack.h"

namespace stepgraph {

// A stack and the tensors that it points into.
struct OwnedStack {
  std::vector<at::Tensor> tensors;
  std::unique_ptr<Stack> stack;  // goes first: it waits for threads that read the tensors
  at::ScalarType dtype;
  int64_t groups, ropes;  // at least so many are expected of a step
  pid_t process = getpid();
};

// All stacks of the process, by handle.
class Stacks {
 public:
  // Never destroyed: a stack waits for its threads, which a forked child does not have.
  static Stacks& instance() {
    static auto* stacks = new Stacks;
    return *stacks;
  }

  int64_t add(OwnedStack stack) {
    const std::lock_guard<std::mutex> alone(mutex_);
    stacks_.emplace(++last_, std::make_shared<OwnedStack>(std::move(stack)));
    return last_;
  }

  void remove(int64_t handle) {
    std::shared_ptr<OwnedStack> removed;
    {
      const std::lock_guard<std::mutex> alone(mutex_);
      const auto found = stacks_.find(handle);
      TORCH_CHECK(found != stacks_.end(), "stack_destroy: there is no stack ", handle);
      removed = std::move(found->second);
      stacks_.erase(found);
    }
    if (removed->process != getpid()) new std::shared_ptr<OwnedStack>(std::move(removed));
  }

  std::shared_ptr<OwnedStack> find(int64_t handle) {
    const std::lock_guard<std::mutex> alone(mutex_);
    const auto found = stacks_.find(handle);
    TORCH_CHECK(found != stacks_.end(), "decoder_stack: stack ", handle,
                " has been destroyed, or never was; the model it belongs to is closed");
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<OwnedStack>> stacks_;
  int64_t last_ = 0;
};

// Takes the tensors of a stack one after another, checking each.
class StackReader {
 public:
  StackReader(const c10::List<std::optional<at::Tensor>>& tensors, at::ScalarType dtype)
      : tensors_(tensors), dtype_(dtype) {}

  // [size] of the model's type, or null.
  const void* vector(int64_t size, const char* name, bool required = false) {
    const std::optional<at::Tensor> tensor = take();
    if (!tensor) {
      TORCH_CHECK(!required, "stack_create: ", name, " is missing");
      return nullptr;
    }
    TORCH_CHECK(tensor->scalar_type() == dtype_ && tensor->is_contiguous() && tensor->dim() == 1 &&
                    tensor->size(0) == size,
                "stack_create: ", name, " is a contiguous [", size, "] of ", dtype_, ", got ",
                tensor->sizes(), " of ", tensor->scalar_type());
    return keep(*tensor);
  }

  // A packed weight [columns, inputs], its scales if it is int8, and its bias.
  Weights linear(int64_t columns, int64_t inputs, const char* name) {
    const std::optional<at::Tensor> packed = take(), scales = take();
    const at::ScalarType stored = scales ? at::kChar : dtype_;
    const int64_t per_step = stored == at::kFloat ? 1 : 2;
    Weights weights;
    weights.columns = columns;
    weights.steps = (inputs + per_step - 1) / per_step;
    weights.kind = scales ? WeightKind::kInt8 : WeightKind::kModel;
    TORCH_CHECK(packed && packed->scalar_type() == stored && packed->is_contiguous() &&
                    packed->sizes() == at::IntArrayRef({weights.blocks(), weights.steps,
                                                        kBlock, per_step}),
                "stack_create: the weight of ", name, " is not a packed [", columns, ", ", inputs,
                "] of ", stored, "; pack it with pack_linear");
    TORCH_CHECK(!scales || (scales->scalar_type() == at::kFloat && scales->is_contiguous() &&
                            scales->dim() == 1 && scales->size(0) == columns),
                "stack_create: the scales of ", name, " are a contiguous [", columns,
                "] of float32");
    weights.packed = static_cast<const char*>(keep(*packed));
    weights.scales = scales ? static_cast<const float*>(keep(*scales)) : nullptr;
    weights.bias = vector(columns, name);
    return weights;
  }

  // What was read, to be kept as long as the pointers into it.
  std::vector<at::Tensor> finish() {
    TORCH_CHECK(next_ == tensors_.size(), "stack_create: ", tensors_.size(),
                " weights are too many, the layers have ", next_);
    return std::move(kept_);
  }

 private:
  std::optional<at::Tensor> take() {
    TORCH_CHECK(next_ < tensors_.size(), "stack_create: ", tensors_.size(), " weights are too few");
    return tensors_.get(next_++);
  }

  const void* keep(const at::Tensor& tensor) {
    kept_.push_back(tensor);
    return tensor.const_data_ptr();
  }

  const c10::List<std::optional<at::Tensor>>& tensors_;
  at::ScalarType dtype_;
  size_t next_ = 0;
  std::vector<at::Tensor> kept_;
};

inline int64_t stack_create(const at::Tensor& norm,
                            const c10::List<std::optional<at::Tensor>>& weights,
                            at::IntArrayRef places, at::IntArrayRef sizes,
                            c10::ArrayRef<double> numbers, bool offset_norms, bool gelu,
                            std::string_view storage) {
  TORCH_CHECK(norm.scalar_type() == at::kBFloat16 || norm.scalar_type() == at::kFloat,
              "stack_create: bfloat16 or float32 expected, the norm is ", norm.scalar_type());
  TORCH_CHECK(sizes.size() == 5 && numbers.size() == 3 && !places.empty() && places.size() % 4 == 0,
              "stack_create: 5 sizes, 3 numbers and 4 places a layer expected, got ", sizes.size(),
              ", ", numbers.size(), " and ", places.size());
  const StackShape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
                         static_cast<float>(numbers[0]), static_cast<float>(numbers[1]),
                         static_cast<float>(numbers[2]), offset_norms, gelu,
                         storage_named("stack_create", storage)};
  TORCH_CHECK(shape.hidden > 0 && shape.inner > 0 && shape.kv_heads > 0 && shape.heads > 0 &&
                  shape.heads % shape.kv_heads == 0 && shape.head_dim > 0 &&
                  shape.head_dim % 2 == 0,
              "stack_create: sizes ", sizes, " are not those of a decoder");
  OwnedStack owned{{}, nullptr, norm.scalar_type(), 0, 0};
  StackReader reader(weights, owned.dtype);
  std::vector<StackLayer> layers;
  std::vector<StackPlan> plans;
  for (size_t i = 0; i < places.size(); i += 4) {
    const int64_t group = places[i], position = places[i + 1], window = places[i + 2];
    const int64_t rope = places[i + 3];
    TORCH_CHECK(group >= 0 && position >= 0 && window >= 0 && rope >= 0,
                "stack_create: places ", places, " are not negative");
    size_t plan = 0;
    while (plan < plans.size() && (plans[plan].group != group || plans[plan].window != window)) {
      ++plan;
    }
    if (plan == plans.size()) plans.push_back({group, window});
    owned.groups = std::max(owned.groups, group + 1);
    owned.ropes = std::max(owned.ropes, rope + 1);
    StackLayer layer{};
    layer.input_norm = reader.vector(shape.hidden, "the input norm", true);
    layer.qkv = reader.linear(shape.qkv_size(), shape.hidden, "qkv");
    layer.q_norm = reader.vector(shape.head_dim, "the norm of queries");
    layer.k_norm = reader.vector(shape.head_dim, "the norm of keys", layer.q_norm != nullptr);
    layer.output = reader.linear(shape.hidden, shape.query_size(), "the attention's output");
    layer.attention_output_norm = reader.vector(shape.hidden, "the attention's output norm");
    layer.mlp_norm = reader.vector(shape.hidden, "the norm of the MLP", true);
    layer.gate_up = reader.linear(2 * shape.inner, shape.hidden, "gate and up");
    layer.down = reader.linear(shape.hidden, shape.inner, "down");
    layer.mlp_output_norm = reader.vector(shape.hidden, "the MLP's output norm");
    layer.position = position;
    layer.plan = static_cast<int64_t>(plan);
    layer.rope = rope;
    TORCH_CHECK((layer.attention_output_norm == nullptr) == (layer.mlp_output_norm == nullptr),
                "stack_create: a layer has both output norms or none");
    TORCH_CHECK(layers.empty() || (layers.front().mlp_output_norm == nullptr) ==
                                      (layer.mlp_output_norm == nullptr),
                "stack_create: all layers have output norms or none has");
    layers.push_back(layer);
  }
  TORCH_CHECK(norm.is_contiguous() && norm.dim() == 1 && norm.size(0) == shape.hidden,
              "stack_create: the final norm is a contiguous [", shape.hidden, "], got ",
              norm.sizes());
  owned.stack = std::make_unique<Stack>(shape, std::move(layers), std::move(plans),
                                        norm.const_data_ptr());
  owned.tensors = reader.finish();
  owned.tensors.push_back(norm);
  return Stacks::instance().add(std::move(owned));
}

inline void stack_destroy(int64_t handle) {
  Stacks::instance().remove(handle);
  sweep_linear_jobs();
  sweep_attention_jobs();
}

inline int64_t stack_workspace(int64_t handle, int64_t tokens) {
  const std::shared_ptr<OwnedStack> owned = Stacks::instance().find(handle);
  return owned->stack->workspace_bytes(tokens, c10::elementSize(owned->dtype), threads());
}

inline at::Tensor decoder_stack_cpu(const at::Tensor& x, at::Tensor& arena,
                                    const at::Tensor& positions, const at::Tensor& slots,
                                    const at::Tensor& block_tables, const at::Tensor& token_rows,
                                    const at::Tensor& cos, const at::Tensor& sin,
                                    int64_t read_blocks, const at::Tensor& handle) {
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
  const at::Tensor inputs = x.contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options());
  const auto keep = std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{
      inputs, arena, positions, slots, block_tables, token_rows, cos, sin});
  const auto run = [&]<class T>(T) {
    owned->stack->run(StackStep<T>{
        inputs.const_data_ptr<T>(), out.mutable_data_ptr<T>(),
        static_cast<uint8_t*>(arena.mutable_data_ptr()), arena.stride(0) * arena.element_size(),
        arena.stride(1) * arena.element_size(), positions.const_data_ptr<int64_t>(),
        slots.const_data_ptr<int64_t>(), block_tables.const_data_ptr<int32_t>(),
        block_tables.size(1), block_tables.size(2), token_rows.const_data_ptr<int64_t>(),
        cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), tokens, num_blocks, block_size,
        threads()}, keep);
  };
  if (owned->dtype == at::kBFloat16) run(at::BFloat16());
  else run(float());
  return out;
}

}  // namespace stepgraph
