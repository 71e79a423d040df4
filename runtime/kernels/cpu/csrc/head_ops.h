// All drafts of an EAGLE-3 head after a step, as `drafted.py`. Part of `ops.cpp`.
//
// The same work as the other operators called one after another: from C++, where a call costs a
// tenth of what it does from Python.
#pragma once

#include <optional>
#include <tuple>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "draft_ops.h"
#include "elementwise_ops.h"
#include "linear_ops.h"
#include "sampling_ops.h"
#include "stack_ops.h"

namespace stepgraph {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// Rows of a weight, [tokens, k] of `dtype`: int8 ones times their scale.
at::Tensor embeddings_of(const at::Tensor& tokens, const at::Tensor& packed,
                         const OptionalTensor& scales, int64_t k, at::ScalarType dtype) {
  const at::Tensor rows = packed_embedding_cpu(tokens, packed, k);
  if (!scales) return rows;
  return rows.to(at::kFloat).mul_(scales->index_select(0, tokens).unsqueeze(1)).to(dtype);
}

// All rows of x in a norm.
at::Tensor normed_rows(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t size = x.size(1);
  TORCH_CHECK(weight.scalar_type() == x.scalar_type() && weight.is_contiguous() &&
                  weight.numel() == size,
              "head_drafts: the input norm is a contiguous [", size, "] of ", x.scalar_type());
  at::Tensor out = at::empty(x.sizes(), x.options());
  const NormWeights norm{weight.const_data_ptr(), static_cast<float>(eps)};
  for_model_type("head_drafts", x.scalar_type(), [&]<class T>(T) {
    const T* from = x.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for (int64_t t = 0; t < x.size(0); ++t) norm_row<T>(from + t * size, norm, size, to + t * size);
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> head_drafts_cpu(
    const at::Tensor& features, const at::Tensor& next_ids, const at::Tensor& positions,
    const at::Tensor& slots, const at::Tensor& token_rows,
    const at::Tensor& rows, const at::Tensor& row_positions, const at::Tensor& first,
    const at::Tensor& stops, const at::Tensor& block_tables, int64_t read_blocks,
    int64_t block_size, at::Tensor& arena, int64_t count, const at::Tensor& fuse,
    const OptionalTensor& fuse_scales, const OptionalTensor& input_norm, double eps,
    int64_t hidden_size, const at::Tensor& embedding, const OptionalTensor& embedding_scales,
    const at::Tensor& stack, const at::Tensor& frequencies, const OptionalTensor& amplitudes,
    const at::Tensor& head, const OptionalTensor& head_scales, const OptionalTensor& head_bias,
    int64_t head_features, const OptionalTensor& target_ids) {
  constexpr const char* kName = "head_drafts";
  const int64_t num_rows = rows.size(0);
  TORCH_CHECK(count > 0, kName, ": ", count, " drafts a row, 1 or more expected");
  TORCH_CHECK(!target_ids || (target_ids->scalar_type() == at::kLong && target_ids->dim() == 1 &&
                              target_ids->is_contiguous() &&
                              target_ids->size(0) == head_features),
              kName, ": target_ids are a contiguous int64 [", head_features, "]");
  // Of each row the token before its newest one, among the tokens of the step.
  const at::Tensor at = row_positions.index_select(0, rows);
  const at::Tensor index = first + (at - positions.index_select(0, first) - 1).clamp_min(0);
  const at::ScalarType dtype = features.scalar_type();
  const int64_t last = Handles<OwnedStack>::instance().find(kName, stack)->stack->layers() - 1;
  at::Tensor drafts = at::empty({num_rows, count}, rows.options());
  at::Tensor probabilities = at::empty({num_rows, count}, features.options().dtype(at::kFloat));
  at::Tensor hidden = packed_linear_cpu(features, fuse, std::nullopt, hidden_size, fuse_scales);
  at::Tensor next = next_ids.flatten().clamp_min(0);
  at::Tensor position = positions, slot = slots, token_row = token_rows;
  for (int64_t place = 0; place < count; ++place) {
    if (place > 0) {
      std::tie(position, slot, token_row) = drafted_inputs_cpu(rows, row_positions, stops,
                                                               block_tables, block_size, place - 1, 1);
    }
    if (input_norm) hidden = normed_rows(hidden, *input_norm, eps);
    const at::Tensor embeddings = embeddings_of(next, embedding, embedding_scales, hidden_size, dtype);
    auto [cos, sin] = rotations_cpu(position, frequencies);
    if (amplitudes) {
      cos = cos * *amplitudes;
      sin = sin * *amplitudes;
    }
    auto [normed, output] = decoder_stack_cpu(hidden, arena, position, slot, block_tables, token_row,
                                              cos, sin, read_blocks, stack, {last}, embeddings);
    if (place == 0) {
      normed = normed.index_select(0, index);
      output = output.index_select(0, index);
    }
    hidden = output;
    const auto [tokens, likely] =
        most_likely_cpu(packed_linear_cpu(normed, head, head_bias, head_features, head_scales));
    next = tokens;
    int64_t* id = next.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < num_rows; ++i) {
      if (target_ids) id[i] = target_ids->const_data_ptr<int64_t>()[id[i]];
      drafts.mutable_data_ptr<int64_t>()[i * count + place] = id[i];
      probabilities.mutable_data_ptr<float>()[i * count + place] = likely.const_data_ptr<float>()[i];
    }
  }
  return {drafts, probabilities};
}

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  library.impl("head_drafts", &stepgraph::head_drafts_cpu);
}
