// Recurrences and convolutions over the state of rows, as `cpu/recurrent.py` declares them. Part of
// `ops.cpp`.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "checks.h"
#include "recurrent.h"

namespace stepgraph {

// The state of the rows of a step, from the tensors of `RowStates` in `ops/batch.py`.
inline RowStates row_states(const char* op, const at::Tensor& snapshots, const at::Tensor& inputs,
                            const at::Tensor& snapshot_tables, const at::Tensor& input_tables,
                            const at::Tensor& stored, int64_t block_size) {
  TORCH_CHECK(block_size > 0, op, ": block_size is ", block_size, ", 1 or more expected");
  check_tensor(op, snapshots, at::kByte, {-1, -1}, "snapshots");
  check_tensor(op, inputs, at::kByte, {-1, -1}, "inputs of blocks");
  check_tensor(op, snapshot_tables, at::kInt, {-1, -1}, "snapshot_tables");
  check_tensor(op, input_tables, at::kInt, snapshot_tables.sizes(), "input_tables");
  check_tensor(op, stored, at::kLong, {snapshot_tables.size(0)}, "stored");
  return {static_cast<uint8_t*>(snapshots.mutable_data_ptr()), snapshots.size(0),
          snapshots.size(1), static_cast<uint8_t*>(inputs.mutable_data_ptr()), inputs.size(0),
          inputs.size(1), snapshot_tables.const_data_ptr<int32_t>(),
          input_tables.const_data_ptr<int32_t>(), stored.const_data_ptr<int64_t>(),
          snapshot_tables.size(0), snapshot_tables.size(1), block_size};
}

// Checks that a part of an entry, from `place` on, lies in it.
inline int64_t check_place(const char* op, at::IntArrayRef places, size_t index, int64_t bytes,
                           int64_t entry_bytes) {
  TORCH_CHECK(index < places.size() && places[index] >= 0 && places[index] % 4 == 0 &&
                  places[index] + bytes <= entry_bytes,
              op, ": part ", index, " of ", bytes, " bytes has no place in an entry of ",
              entry_bytes, " bytes, of parts at ", places);
  return places[index];
}

// The batch of `SCHEMA` in `ops/row_states.py`.
struct StateTensors {
  at::Tensor snapshots, inputs, snapshot_tables, input_tables, stored, positions, token_rows;
  int64_t block_size;
  at::IntArrayRef snapshot_places, input_places;

  StateStep step(const char* op, int64_t tokens) const {
    const RowStates states = row_states(op, snapshots, inputs, snapshot_tables, input_tables,
                                        stored, block_size);
    check_tensor(op, positions, at::kLong, {tokens}, "positions");
    check_index(op, token_rows, tokens, states.rows, "token_rows");
    return {states, positions.const_data_ptr<int64_t>(), token_rows.const_data_ptr<int64_t>(),
            tokens, threads()};
  }

  std::shared_ptr<std::vector<at::Tensor>> keep() const {
    return std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{
        snapshots, inputs, snapshot_tables, input_tables, stored, positions, token_rows});
  }
};

inline at::Tensor cpu_recurrence(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
    const std::optional<at::Tensor>& beta, at::Tensor& snapshots, at::Tensor& inputs,
    const at::Tensor& snapshot_tables, const at::Tensor& input_tables, const at::Tensor& stored,
    const at::Tensor& positions, const at::Tensor& token_rows, const at::Tensor& /*rows*/,
    const std::optional<at::Tensor>& /*query_start_loc*/, std::optional<int64_t> /*tokens_per_row*/,
    int64_t block_size, at::IntArrayRef snapshot_places, at::IntArrayRef input_places) {
  constexpr const char* kOp = "cpu_recurrence";
  TORCH_CHECK(k.dim() == 3 && v.dim() == 3 && g.dim() == 3,
              kOp, ": k, v and g are [tokens, heads, elements]; got ", k.sizes(), ", ", v.sizes(),
              ", ", g.sizes());
  const StateTensors tensors{snapshots, inputs, snapshot_tables, input_tables, stored, positions,
                             token_rows, block_size, snapshot_places, input_places};
  const int64_t tokens = v.size(0);
  RecurrenceShape shape{k.size(1), v.size(1), k.size(2), v.size(2), g.size(2), beta.has_value()};
  TORCH_CHECK(shape.key_heads > 0 && shape.heads % shape.key_heads == 0 && shape.key > 0 &&
                  shape.value > 0 && (shape.decays == 1 || shape.decays == shape.key),
              kOp, ": k ", k.sizes(), ", v ", v.sizes(), " and g ", g.sizes(),
              " do not fit together");
  const StateStep step = tensors.step(kOp, tokens);
  shape.snapshot_place =
      check_place(kOp, snapshot_places, 0, shape.state_bytes(), step.states.snapshot_bytes);
  const int64_t elements[] = {shape.key_heads * shape.key, shape.heads * shape.value,
                              shape.heads * shape.decays};
  for (size_t i = 0; i < 3; ++i) {
    shape.input_places[i] =
        check_place(kOp, input_places, i, block_size * elements[i] * 4, step.states.input_bytes);
  }
  const auto keep = tensors.keep();
  const auto dense = [&](const at::Tensor& x, at::IntArrayRef sizes, const char* name) {
    keep->push_back(x.contiguous());
    check_tensor(kOp, keep->back(), at::kFloat, sizes, name);
    return keep->back().const_data_ptr<float>();
  };
  at::Tensor out = at::zeros(v.sizes(), v.options());  // tokens of padding are zero
  RecurrenceArgs args{shape};
  args.q = dense(q, {tokens, shape.key_heads, shape.key}, "q");
  args.k = dense(k, {tokens, shape.key_heads, shape.key}, "k");
  args.v = dense(v, {tokens, shape.heads, shape.value}, "v");
  args.g = dense(g, {tokens, shape.heads, shape.decays}, "g");
  if (beta) args.beta = dense(*beta, {tokens, shape.heads}, "beta");
  args.out = out.mutable_data_ptr<float>();
  run_recurrence(args, step, keep);
  return out;
}

inline at::Tensor cpu_causal_conv(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool silu,
    at::Tensor& snapshots, at::Tensor& inputs, const at::Tensor& snapshot_tables,
    const at::Tensor& input_tables, const at::Tensor& stored, const at::Tensor& positions,
    const at::Tensor& token_rows, const at::Tensor& /*rows*/,
    const std::optional<at::Tensor>& /*query_start_loc*/, std::optional<int64_t> /*tokens_per_row*/,
    int64_t block_size, at::IntArrayRef snapshot_places, at::IntArrayRef input_places) {
  constexpr const char* kOp = "cpu_causal_conv";
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 3,
              kOp, ": x is [tokens, features] and the weight [features, 1, taps]; got ", x.sizes(),
              " and ", weight.sizes());
  const StateTensors tensors{snapshots, inputs, snapshot_tables, input_tables, stored, positions,
                             token_rows, block_size, snapshot_places, input_places};
  const int64_t tokens = x.size(0), features = x.size(1);
  const StateStep step = tensors.step(kOp, tokens);
  ConvWeights weights{};
  weights.count = weight.size(2);
  weights.features = features;
  weights.silu = silu;
  const int64_t bytes = features * x.element_size();
  weights.snapshot_place = check_place(kOp, snapshot_places, 0, (weights.count - 1) * bytes,
                                       step.states.snapshot_bytes);
  weights.input_place =
      check_place(kOp, input_places, 0, block_size * bytes, step.states.input_bytes);
  check_tensor(kOp, weight, x.scalar_type(), {features, 1, weights.count}, "the weight");
  weights.taps = weight.const_data_ptr();
  if (bias) {
    check_tensor(kOp, *bias, x.scalar_type(), {features}, "the bias");
    weights.bias = bias->const_data_ptr();
  }
  const auto keep = tensors.keep();
  const at::Tensor own = x.contiguous();
  keep->insert(keep->end(), {weight, own});
  if (bias) keep->push_back(*bias);
  at::Tensor out = at::zeros(x.sizes(), x.options());
  for_float_type(kOp, x.scalar_type(), [&]<class T>(T) {
    run_causal_conv(ConvArgs<T>{weights, own.const_data_ptr<T>(), out.mutable_data_ptr<T>()}, step,
                    keep);
  });
  return out;
}

}  // namespace stepgraph
