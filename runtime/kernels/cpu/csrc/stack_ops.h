// Operators over layers that lists of tensors, integers and numbers describe: the stack, as
// `stack.py` declares it, and `packed_experts`, as `experts_operator.py`. Part of `ops.cpp`.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <unistd.h>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include "collective_ops.h"
#include "linear_ops.h"
#include "mixture.h"
#include "recurrent_ops.h"
#include "stack.h"

namespace stepgraph {

// Takes what `OperatorArguments` of `experts_operator.py` lists, one after another, and checks each
// tensor. Errors name the operator.
class ArgumentReader {
 public:
  ArgumentReader(const char* op, const c10::List<std::optional<at::Tensor>>& tensors,
                 at::IntArrayRef integers, c10::ArrayRef<double> numbers, at::ScalarType dtype)
      : op_(op), tensors_(tensors), integers_(integers), numbers_(numbers), dtype_(dtype) {
    check_model_type(op, dtype);
  }

  int64_t integer() { return integers_.at(next_integer_++); }
  bool flag() { return integer() != 0; }
  float number() { return static_cast<float>(numbers_.at(next_number_++)); }

  // [size] of the model's type, or null.
  const void* vector(int64_t size, const char* name) { return dense({size}, name, dtype_); }

  NormWeights norm(int64_t size, const char* name) {
    NormWeights weights;
    weights.weight = vector(size, name);
    weights.eps = number();
    weights.offset = flag();
    return weights;
  }

  // A packed weight [columns, inputs] and its bias. With `count` the first of `count` that follow one
  // another.
  Weights linear(int64_t columns, int64_t inputs, const char* name, int64_t count = 1) {
    const std::optional<at::Tensor> packed = take(), scales = take(), bias = take();
    TORCH_CHECK(packed && !scales, op_, ": the weight of ", name,
                packed ? " has scales, packed weights have none" : " is missing");
    return packed_weights(op_, name, dtype_, columns, inputs, *packed, bias, count);
  }

  Activation activation() {
    Activation read;
    read.gelu = flag();
    read.limit = number();
    read.alpha = number();
    read.up_offset = number();
    return read;
  }

  Mixture mixture(int64_t hidden) {
    Mixture read{};
    Routing& routing = read.routing;
    read.hidden = hidden;
    routing.experts = integer();
    read.shared = integer();
    read.inner = integer();
    read.scaled_inputs = flag();
    routing.top_k = integer();
    routing.scores = static_cast<Scores>(integer());
    routing.normalised = flag();
    routing.scale = number();
    routing.groups = integer();
    routing.top_groups = integer();
    routing.sums_of_two = flag();
    routing.chooses_by_logits = flag();
    read.router = dense({routing.experts, hidden}, "the router", dtype_);
    TORCH_CHECK(read.router != nullptr, op_, ": the router is missing");
    read.router_bias = vector(routing.experts, "the bias of the router");
    read.correction =
        static_cast<const float*>(dense({routing.experts}, "the correction", at::kFloat));
    read.expert_scales =
        static_cast<const float*>(dense({routing.experts}, "the scales of experts", at::kFloat));
    read.gate_up = linear(read.inner, hidden, "gate and up of experts", 2 * read.total());
    read.activation = activation();
    read.down = linear(hidden, read.inner, "down of experts", read.total());
    return read;
  }

  // [sizes] in float32.
  const float* numbers(at::IntArrayRef sizes, const char* name) {
    return static_cast<const float*>(dense(sizes, name, at::kFloat));
  }

  ConvWeights convolution() {
    ConvWeights read{};
    read.features = integer();
    read.count = integer();
    read.silu = flag();
    read.snapshot_place = integer();
    read.input_place = integer();
    read.taps = dense({read.features, 1, read.count}, "the convolution", dtype_);
    TORCH_CHECK(read.taps != nullptr, op_, ": the convolution has no weight");
    read.bias = vector(read.features, "the bias of the convolution");
    return read;
  }

  GatedNormWeights gated_norm() {
    GatedNormWeights read;
    read.group = integer();
    read.size = integer();
    read.weight = vector(read.size, "the gated norm");
    read.eps = number();
    read.sigmoid = flag();
    read.gate_first = flag();
    read.in_float32 = flag();
    return read;
  }

  Recurrent recurrent() {
    Recurrent read{};
    const int64_t kind = integer();
    TORCH_CHECK(0 <= kind && kind <= 2, op_, ": recurrent kind ", kind);
    read.kind = static_cast<RecurrentKind>(kind);
    read.conv = convolution();
    if (read.is_conv()) return read;
    RecurrenceShape& shape = read.shape;
    shape.key_heads = integer();
    shape.heads = integer();
    shape.key = integer();
    shape.value = integer();
    shape.decays = integer();
    shape.delta = read.kind == RecurrentKind::kDeltaRule;
    shape.snapshot_place = integer();
    for (int64_t& place : shape.input_places) place = integer();
    read.log_rates = numbers({shape.heads}, "the decay of heads");
    read.time_bias = numbers({shape.heads * shape.decays}, "the bias of decays");
    read.skip = numbers({shape.heads}, "the skip of a state space");
    TORCH_CHECK(read.log_rates != nullptr && read.time_bias != nullptr, op_,
                ": a recurrence has no decay");
    read.gate = integer();
    read.decay = integer();
    read.beta = integer();
    read.beta_scale = number();
    read.least_time = number();
    read.largest_time = number();
    read.query_scale = number();
    read.gated = flag();
    read.norm = gated_norm();
    return read;
  }

  // What was read, to be kept as long as the pointers into it.
  std::vector<at::Tensor> finish() {
    TORCH_CHECK(next_ == tensors_.size() && next_integer_ == integers_.size() &&
                    next_number_ == numbers_.size(),
                op_, ": more tensors, integers or numbers than the layers have");
    return std::move(kept_);
  }

 private:
  // A contiguous tensor, or null.
  const void* dense(at::IntArrayRef sizes, const char* name, at::ScalarType dtype) {
    const std::optional<at::Tensor> tensor = take();
    if (!tensor) return nullptr;
    check_tensor(op_, *tensor, dtype, sizes, name);
    return tensor->const_data_ptr();
  }

  std::optional<at::Tensor> take() {
    std::optional<at::Tensor> tensor = tensors_.get(next_++);
    if (tensor) kept_.push_back(*tensor);
    return tensor;
  }

  const char* op_;
  const c10::List<std::optional<at::Tensor>>& tensors_;
  at::IntArrayRef integers_;
  c10::ArrayRef<double> numbers_;
  at::ScalarType dtype_;
  size_t next_ = 0, next_integer_ = 0, next_number_ = 0;
  std::vector<at::Tensor> kept_;
};

inline at::Tensor packed_experts_cpu(const at::Tensor& x, const std::optional<at::Tensor>& live,
                                     const std::optional<at::Tensor>& router_x,
                                     const c10::List<std::optional<at::Tensor>>& tensors,
                                     at::IntArrayRef integers, c10::ArrayRef<double> numbers) {
  TORCH_CHECK(x.dim() == 2, "packed_experts: x is [tokens, hidden], got ", x.sizes());
  const int64_t tokens = x.size(0), hidden = x.size(1);
  ArgumentReader reader("packed_experts", tensors, integers, numbers, x.scalar_type());
  const Mixture mixture = reader.mixture(hidden);
  auto keep = std::make_shared<std::vector<at::Tensor>>(reader.finish());
  if (live) check_tensor("packed_experts", *live, at::kBool, {tokens}, "live");
  if (router_x) {
    check_tensor("packed_experts", *router_x, x.scalar_type(), {tokens, hidden}, "router_x");
  }
  // The kernel reads whole words: an odd last element gets a zero beside it.
  const auto in_words = [&](const at::Tensor& rows) {
    return hidden % 2 != 0 ? at::constant_pad_nd(rows, {0, 1}).contiguous() : rows.contiguous();
  };
  const at::Tensor inputs = in_words(x), routed = router_x ? in_words(*router_x) : inputs;
  at::Tensor out = at::empty({tokens, hidden}, x.options());
  keep->push_back(inputs);
  keep->push_back(routed);
  if (live) keep->push_back(*live);
  for_model_type("packed_experts", x.scalar_type(), [&]<class T>(T) {
    run_mixture(MixtureArgs<T>{mixture, inputs.const_data_ptr<T>(), routed.const_data_ptr<T>(),
                               inputs.size(1), live ? live->const_data_ptr<bool>() : nullptr,
                               out.mutable_data_ptr<T>(), tokens, threads()},
                keep);
  });
  return out;
}

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

// `plans` are those of the blocks before.
inline AttentionBlock read_attention(ArgumentReader& reader, OwnedStack& owned,
                                     std::vector<StackPlan>& plans, const StackShape& shape) {
  AttentionBlock block{};
  StackPlan plan{};
  plan.group = reader.integer();
  block.position = reader.integer();
  plan.window = reader.integer();
  plan.chunk = reader.integer();
  block.rope = reader.integer();
  block.plan = std::find(plans.begin(), plans.end(), plan) - plans.begin();
  if (block.plan == static_cast<int64_t>(plans.size())) plans.push_back(plan);
  owned.groups = std::max(owned.groups, plan.group + 1);
  owned.ropes = std::max(owned.ropes, block.rope + 1);
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
  if (reader.flag()) {
    block.gate = reader.linear(shape.query_size(), shape.hidden, "the attention's gate");
  }
  block.output = reader.linear(shape.hidden, shape.query_size(), "the attention's output");
  return block;
}

inline RecurrentBlock read_recurrent(ArgumentReader& reader, const StackShape& shape) {
  RecurrentBlock block{};
  block.norm = reader.norm(shape.hidden, "the norm of a recurrence");
  block.recurrent = reader.recurrent();
  block.inputs = reader.linear(reader.integer(), shape.hidden, "the inputs of a recurrence");
  block.output =
      reader.linear(shape.hidden, block.recurrent.features(), "the output of a recurrence");
  return block;
}

// `mixtures` counts them.
inline MlpBlock read_mlp(ArgumentReader& reader, int64_t& mixtures, const StackShape& shape) {
  MlpBlock block{};
  block.norm = reader.norm(shape.hidden, "the norm of the MLP");
  if (reader.flag()) {
    block.mixture = reader.mixture(shape.hidden);
    block.mixture_place = mixtures++;
    if (reader.flag()) block.shared_gate = reader.linear(1, shape.hidden, "the shared gate");
  }
  if (reader.flag()) {
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
    switch (reader.integer()) {
      case 0: block.product = read_mlp(reader, mixtures, shape); break;
      case 1: block.product = read_attention(reader, owned, plans, shape); break;
      default: block.product = read_recurrent(reader, shape);
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
    const std::optional<at::Tensor>& embeddings, const std::optional<at::Tensor>& snapshots = {},
    const std::optional<at::Tensor>& state_inputs = {},
    const std::optional<at::Tensor>& snapshot_tables = {},
    const std::optional<at::Tensor>& input_tables = {},
    const std::optional<at::Tensor>& stored = {}) {
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
  // Tables of recurrent state follow, whose slots are not of the arena.
  check_index("decoder_stack", slots.narrow(0, 0, owned->groups).view({-1}),
              owned->groups * tokens, num_blocks * block_size, "slots");
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
  const Stack::StateSizes sizes = owned->stack->state_sizes(x.element_size());
  RowStates states{};
  if (sizes.snapshot > 0) {
    TORCH_CHECK(snapshots && state_inputs && snapshot_tables && input_tables && stored,
                "decoder_stack: layers with recurrent state need the memory and tables of it");
    states = row_states("decoder_stack", *snapshots, *state_inputs, *snapshot_tables,
                        *input_tables, *stored, block_size);
    TORCH_CHECK(states.rows == block_tables.size(1) && sizes.snapshot <= states.snapshot_bytes &&
                    sizes.token * block_size <= states.input_bytes,
                "decoder_stack: recurrent state of ", sizes.snapshot, " bytes and ", sizes.token,
                " bytes of each token's inputs needs larger entries than ", snapshots->sizes(),
                " and ", state_inputs->sizes(), ", and tables of ", block_tables.size(1),
                " rows, got ", snapshot_tables->sizes());
  }
  const at::Tensor inputs = x.contiguous();
  const at::Tensor joined = embeddings ? embeddings->contiguous() : at::Tensor();
  at::Tensor out = at::empty(x.sizes(), x.options());
  const int64_t width = static_cast<int64_t>(aux_layers.size()) * shape.hidden;
  at::Tensor outputs = at::empty({tokens, width}, x.options());
  const at::Tensor taken = aux_layers.size() > 1 ? at::empty({tokens * width}, x.options()) : outputs;
  const auto keep = std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{
      inputs, joined, out, outputs, taken, arena, positions, slots, block_tables, token_rows, cos, sin});
  if (sizes.snapshot > 0) keep->insert(keep->end(), {*snapshots, *state_inputs});
  for_model_type("decoder_stack", owned->dtype, [&]<class T>(T) {
    owned->stack->run(StackStep<T>{
        inputs.const_data_ptr<T>(), joined.defined() ? joined.const_data_ptr<T>() : nullptr,
        out.mutable_data_ptr<T>(), aux_layers.empty() ? nullptr : taken.mutable_data_ptr<T>(),
        aux_layers.size() > 1 ? outputs.mutable_data_ptr<T>() : nullptr, aux_layers.vec(),
        static_cast<uint8_t*>(arena.mutable_data_ptr()), arena.stride(0) * arena.element_size(),
        arena.stride(1) * arena.element_size(), positions.const_data_ptr<int64_t>(),
        slots.const_data_ptr<int64_t>(), block_tables.const_data_ptr<int32_t>(),
        block_tables.size(1), block_tables.size(2), token_rows.const_data_ptr<int64_t>(),
        cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), states, tokens, num_blocks,
        block_size, threads()}, keep);
  });
  return {out, outputs};
}

}  // namespace stepgraph
