// What drafters compute outside of their layers, as `drafted.py`. Part of `ops.cpp`.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "drafting.h"
#include "linear_ops.h"

namespace stepgraph {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> drafted_inputs_cpu(
    const at::Tensor& rows, const at::Tensor& positions, const at::Tensor& stops,
    const at::Tensor& block_tables, int64_t block_size, int64_t first, int64_t count) {
  const int64_t num_rows = rows.size(0);
  check_tables("drafted_inputs", block_tables, 3, 1);
  const int64_t groups = block_tables.size(0), all_rows = block_tables.size(1),
                columns = block_tables.size(2);
  TORCH_CHECK(block_size > 0 && count > 0, "drafted_inputs: ", count, " tokens a row, blocks of ",
              block_size);
  check_index("drafted_inputs", rows, at::kLong, num_rows, all_rows, "rows");
  check_index("drafted_inputs", positions, at::kLong, all_rows, columns * block_size, "positions");
  check_index("drafted_inputs", stops, at::kLong, num_rows, columns * block_size + 1, "stops");
  const int64_t tokens = num_rows * count;
  at::Tensor position = at::empty({tokens}, rows.options()), token_rows = at::empty_like(position);
  at::Tensor slots = at::empty({groups, tokens}, rows.options());
  const int32_t* table = block_tables.const_data_ptr<int32_t>();
  int64_t t = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = rows.const_data_ptr<int64_t>()[i];
    const int64_t stop = stops.const_data_ptr<int64_t>()[i];
    const int64_t newest = positions.const_data_ptr<int64_t>()[row];
    for (int64_t j = 0; j < count; ++j, ++t) {
      const int64_t wanted = newest + first + j;
      const int64_t at = std::max<int64_t>(std::min(wanted, stop - 1), 0);
      position.mutable_data_ptr<int64_t>()[t] = at;
      token_rows.mutable_data_ptr<int64_t>()[t] = row;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t block = table[(group * all_rows + row) * columns + at / block_size];
        slots.mutable_data_ptr<int64_t>()[group * tokens + t] =
            at == wanted ? block * block_size + at % block_size : 0;
      }
    }
  }
  return {position, slots, token_rows};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> newest_tokens_cpu(
    const at::Tensor& rows, const at::Tensor& positions, const at::Tensor& first,
    const at::Tensor& token_positions, const at::Tensor& token_ids, const at::Tensor& next_ids) {
  constexpr const char* kName = "newest_tokens";
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  const int64_t num_rows = rows.size(0), tokens = token_ids.size(0);
  check_index(kName, rows, at::kLong, num_rows, positions.size(0), "rows");
  check_index(kName, positions, at::kLong, positions.size(0), kAny, "positions");
  check_index(kName, first, at::kLong, num_rows, tokens, "first");
  check_index(kName, token_positions, at::kLong, tokens, kAny, "token_positions");
  check_index(kName, token_ids, at::kLong, tokens, kAny, "token_ids");
  TORCH_CHECK(next_ids.scalar_type() == at::kLong && next_ids.is_contiguous() &&
                  next_ids.numel() == tokens,
              kName, ": next_ids are ", tokens, " contiguous int64");
  at::Tensor sampled = at::empty({tokens}, rows.options()), newest = at::empty_like(rows);
  at::Tensor previous = at::empty_like(rows), index = at::empty_like(rows);
  int64_t* to = sampled.mutable_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    to[t] = std::max<int64_t>(next_ids.const_data_ptr<int64_t>()[t], 0);
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t begin = first.const_data_ptr<int64_t>()[i];
    const int64_t at = positions.const_data_ptr<int64_t>()[rows.const_data_ptr<int64_t>()[i]];
    const int64_t steps = at - token_positions.const_data_ptr<int64_t>()[begin];
    const int64_t last = begin + std::max<int64_t>(steps - 1, 0);
    TORCH_CHECK_INDEX(last < tokens, kName, ": row ", i, " is at position ", at, ", ", steps,
                      " after its first token, of which there are ", tokens - begin);
    index.mutable_data_ptr<int64_t>()[i] = last;
    newest.mutable_data_ptr<int64_t>()[i] = to[last];
    previous.mutable_data_ptr<int64_t>()[i] = token_ids.const_data_ptr<int64_t>()[last];
  }
  return {sampled, newest, previous, index};
}

std::tuple<at::Tensor, at::Tensor> linear_most_likely_cpu(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
    int64_t out_features, const std::optional<at::Tensor>& scales) {
  const PackedLayer layer = packed_layer("linear_most_likely", x.sizes(), x.scalar_type(), packed,
                                         bias, scales, out_features);
  const at::Tensor inputs = layer_inputs(x, layer.weights);
  at::Tensor tokens = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  at::Tensor probabilities = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
  auto keep = std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{inputs});
  layer.keep_in(*keep);
  const auto run = [&]<class T>(T) {
    most_likely_after(
        ChoiceArgs<T>{{layer.weights, inputs.const_data_ptr<T>(), inputs.stride(0), nullptr,
                       x.size(0), threads()},
                      tokens.mutable_data_ptr<int64_t>(), probabilities.mutable_data_ptr<float>()},
        keep);
  };
  if (x.scalar_type() == at::kBFloat16) run(at::BFloat16());
  else run(float());
  return {tokens, probabilities};
}

void drafter_context_cpu(const at::Tensor& features, const at::Tensor& fuse,
                         const std::optional<at::Tensor>& fuse_scales,
                         const at::Tensor& hidden_norm, const at::Tensor& context,
                         const std::optional<at::Tensor>& context_scales,
                         const at::Tensor& key_norms, double eps, const at::Tensor& cos,
                         const at::Tensor& sin, const at::Tensor& slots, at::Tensor& arena,
                         at::IntArrayRef places, int64_t block_size, std::string_view storage_name) {
  constexpr const char* kName = "drafter_context";
  const at::ScalarType dtype = features.scalar_type();
  const int64_t tokens = features.size(0), hidden = hidden_norm.numel();
  const int64_t layers = static_cast<int64_t>(places.size());
  for (const at::Tensor* weight : {&hidden_norm, &key_norms}) {
    TORCH_CHECK(weight->scalar_type() == dtype && weight->is_contiguous(), kName,
                ": weights of norms are contiguous and of ", dtype);
  }
  TORCH_CHECK(key_norms.dim() == 2 && key_norms.size(0) == layers && arena.dim() >= 5, kName,
              ": key_norms are [", layers, ", head_dim] and the arena has 5 or 6 dimensions, got ",
              key_norms.sizes(), " and ", arena.sizes());
  const int64_t head_dim = key_norms.size(1), heads = arena.size(3);
  const Storage storage = storage_named(kName, storage_name);
  check_arena(kName, arena, dtype, 2, heads, block_size, head_dim, storage);
  check_index(kName, slots, at::kLong, tokens, arena.size(2) * block_size, "slots");
  for (const at::Tensor* table : {&cos, &sin}) {
    TORCH_CHECK(table->scalar_type() == at::kFloat && table->is_contiguous() &&
                    table->sizes() == at::IntArrayRef({tokens, head_dim / 2}),
                kName, ": cos and sin are contiguous float32 [", tokens, ", ", head_dim / 2,
                "], got ", table->sizes());
  }
  const PackedLayer fused =
      packed_layer(kName, features.sizes(), dtype, fuse, std::nullopt, fuse_scales, hidden);
  const PackedLayer projected = packed_layer(kName, {tokens, hidden}, dtype, context, std::nullopt,
                                             context_scales, layers * 2 * heads * head_dim);
  const at::Tensor inputs = layer_inputs(features, fused.weights);
  auto keep = std::make_shared<std::vector<at::Tensor>>(
      std::vector<at::Tensor>{inputs, hidden_norm, key_norms, cos, sin, slots, arena});
  fused.keep_in(*keep);
  projected.keep_in(*keep);
  uint8_t* data = static_cast<uint8_t*>(arena.mutable_data_ptr());
  std::vector<uint8_t*> keys;
  for (const int64_t place : places) {
    TORCH_CHECK_INDEX(0 <= place && place < arena.size(0), kName, ": layer ", place,
                      " of an arena of ", arena.size(0), " layers");
    keys.push_back(data + place * arena.stride(0) * arena.element_size());
  }
  AttentionStep step{};
  step.slots = slots.const_data_ptr<int64_t>();
  step.tokens = tokens;
  step.heads = step.kv_heads = heads;
  step.head_dim = step.value_dim = head_dim;
  step.num_blocks = arena.size(2);
  step.block_size = block_size;
  step.element_bytes = features.element_size();
  step.storage = storage;
  step.threads = threads();
  const auto run = [&]<class T>(T) {
    ContextArgs<T> args{fused.weights, projected.weights,
                        {hidden_norm.const_data_ptr(), static_cast<float>(eps)},
                        inputs.const_data_ptr<T>(), inputs.stride(0),
                        key_norms.const_data_ptr<T>(), cos.const_data_ptr<float>(),
                        sin.const_data_ptr<float>(), keys,
                        arena.stride(1) * arena.element_size(), step, nullptr};
    keep->push_back(at::empty({context_scratch(args)}, features.options()));
    args.scratch = keep->back().mutable_data_ptr<T>();
    store_context(args, keep);
  };
  if (dtype == at::kBFloat16) run(at::BFloat16());
  else run(float());
}

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  library.impl("drafted_inputs", &stepgraph::drafted_inputs_cpu);
  library.impl("newest_tokens", &stepgraph::newest_tokens_cpu);
  library.impl("linear_most_likely", &stepgraph::linear_most_likely_cpu);
  library.impl("drafter_context", &stepgraph::drafter_context_cpu);
}
