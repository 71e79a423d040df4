// `stepgraph::stack_create`: checks the weights of a stack and registers it under a handle. Part of
// `ops.cpp`.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <unistd.h>

#include <ATen/core/Tensor.h>

#include "argument_reader.h"
#include "checks.h"
#include "collective_ops.h"
#include "stack.h"

namespace stepgraph {

// A stack and the tensors that it points into.
struct OwnedStack {
  std::vector<at::Tensor> tensors;
  std::shared_ptr<OwnedCommunicator> communicator;  // null: no layer sums over ranks
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

inline StackLayer read_layer(ArgumentReader& reader, const StackShape& shape) {
  StackLayer layer{};
  layer.embedding_norm = reader.norm(shape.hidden, "the norm of embeddings");
  layer.input_norm = reader.norm(shape.hidden, "the input norm");
  const int64_t inputs = (layer.embedding_norm.weight == nullptr ? 1 : 2) * shape.hidden;
  layer.qkv = reader.linear(shape.qkv_size(), inputs, "qkv");
  layer.all_heads = reader.integer("all_heads") != 0;
  layer.head_ranks = reader.integer("the ranks of a norm", 1);
  const int64_t queries = layer.all_heads ? shape.heads : 1;
  const int64_t keys = layer.all_heads ? shape.kv_heads : 1;
  layer.q_norm = reader.norm(queries * shape.head_dim, "the norm of queries");
  layer.k_norm = reader.norm(keys * shape.head_dim, "the norm of keys");
  TORCH_CHECK(layer.head_ranks == 1 || (layer.all_heads && layer.q_norm.weight != nullptr &&
                                        layer.k_norm.weight != nullptr),
              "stack_create: a norm over heads of ", layer.head_ranks, " ranks is over all heads");
  layer.scale = reader.number();
  layer.softcap = reader.number();
  layer.sinks = reader.vector(shape.heads, "the sinks");
  layer.temperature_floor = reader.integer("the floor of the temperature");
  layer.temperature_scale = reader.number();
  layer.output = reader.linear(shape.hidden, shape.query_size(), "the attention's output");
  layer.attention_summed = reader.integer("attention_summed") != 0;
  layer.attention_output_norm = reader.norm(shape.hidden, "the attention's output norm");
  layer.attention_factor = reader.number();
  layer.mlp_norm = reader.norm(shape.hidden, "the norm of the MLP");
  if (reader.integer("has_experts") != 0) {
    layer.mixture = reader.mixture(shape.hidden);
  } else {
    layer.inner = reader.integer("the features of the MLP", 1);
    layer.gate_up = reader.linear(2 * layer.inner, shape.hidden, "gate and up");
    layer.activation = reader.activation();
    layer.down = reader.linear(shape.hidden, layer.inner, "down");
  }
  layer.mlp_summed = reader.integer("mlp_summed") != 0;
  layer.mlp_output_norm = reader.norm(shape.hidden, "the MLP's output norm");
  layer.mlp_factor = reader.number();
  return layer;
}

inline int64_t stack_create(const c10::List<std::optional<at::Tensor>>& tensors,
                            at::IntArrayRef integers, c10::ArrayRef<double> numbers,
                            at::ScalarType dtype, std::string_view storage) {
  OwnedStack owned{{}, nullptr, nullptr, dtype, 0, 0};
  ArgumentReader reader("stack_create", tensors, integers, numbers, dtype);
  StackShape shape{};
  shape.hidden = reader.integer("the hidden size", 1);
  shape.heads = reader.integer("the number of heads", 1);
  shape.kv_heads = reader.integer("the number of kv heads", 1);
  shape.head_dim = reader.integer("the head size", 1);
  shape.storage = storage_named("stack_create", storage);
  TORCH_CHECK(shape.heads % shape.kv_heads == 0 && shape.head_dim % 2 == 0, "stack_create: ",
              shape.heads, " heads of ", shape.head_dim, " and ", shape.kv_heads,
              " kv heads are not those of a decoder");
  Communicator* communicator = nullptr;
  if (const int64_t number = reader.integer("the communicator"); number != 0) {
    owned.communicator = Communicators::instance().find("stack_create", number);
    communicator = &owned.communicator->communicator;
    const int64_t row_bytes = shape.hidden * static_cast<int64_t>(c10::elementSize(dtype));
    TORCH_CHECK(communicator->part_bytes() >= std::max(row_bytes, kMeansBytes),
                "stack_create: the region of the communicator has no room for a row of ",
                shape.hidden, " elements of ", dtype);
  }
  std::vector<StackLayer> layers(reader.integer("the number of layers", 1));
  std::vector<StackPlan> plans;
  int64_t mixtures = 0;
  for (StackLayer& layer : layers) {
    const int64_t group = reader.integer("a layer group"), position = reader.integer("a position");
    const int64_t window = reader.integer("a window"), chunk = reader.integer("a chunk");
    const int64_t rope = reader.integer("a rotation");
    const StackPlan plan{group, window, chunk};
    const auto found = std::find(plans.begin(), plans.end(), plan);
    const int64_t index = found - plans.begin();
    if (found == plans.end()) plans.push_back(plan);
    owned.groups = std::max(owned.groups, group + 1);
    owned.ropes = std::max(owned.ropes, rope + 1);
    layer = read_layer(reader, shape);
    const bool sums = layer.attention_summed || layer.mlp_summed || layer.head_ranks > 1;
    TORCH_CHECK(communicator != nullptr || !sums,
                "stack_create: layers that sum over ranks need a communicator");
    layer.position = position;
    layer.plan = index;
    layer.rope = rope;
    layer.mixture_place = mixtures;
    mixtures += layer.mixture.has_value();
  }
  const NormWeights norm = reader.norm(shape.hidden, "the final norm");
  TORCH_CHECK(norm.weight != nullptr, "stack_create: the final norm is missing");
  owned.tensors = reader.finish();
  owned.stack = std::make_unique<Stack>(shape, std::move(layers), std::move(plans), norm,
                                        communicator);
  return Stacks::instance().add(std::move(owned));
}

}  // namespace stepgraph
