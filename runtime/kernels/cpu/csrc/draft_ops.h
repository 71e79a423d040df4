// The tokens of verify steps, their acceptance, and the tokens that drafters compute, as
// `drafted.py` declares them. Part of `ops.cpp`.
#pragma once

#include <algorithm>
#include <optional>
#include <tuple>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "elementwise_ops.h"
#include "linear_ops.h"
#include "sampling_ops.h"
#include "stack_ops.h"

namespace stepgraph {
namespace {

// The block tables of all rows, [groups, rows, max_blocks].
struct RowTables {
  const int32_t* blocks;
  int64_t groups, rows, columns, block_size;

  RowTables(const char* op, const at::Tensor& block_tables, int64_t size) : block_size(size) {
    check_tables(op, block_tables, 3, 1);
    TORCH_CHECK(size > 0, op, ": block_size is ", size, ", 1 or more expected");
    blocks = block_tables.const_data_ptr<int32_t>();
    groups = block_tables.size(0);
    rows = block_tables.size(1);
    columns = block_tables.size(2);
  }

  int64_t positions() const { return columns * block_size; }
  int64_t slot(int64_t group, int64_t row, int64_t position) const {
    const int64_t block = blocks[(group * rows + row) * columns + position / block_size];
    return block * block_size + position % block_size;
  }
};

// The drafts of the rows of a verify step, and the tokens of each row, 1 to drafts + 1.
struct RowDrafts {
  const int64_t *counts, *ids;
  int64_t most, stride, tokens = 0;

  RowDrafts(const char* op, const at::Tensor& drafts, const at::Tensor& tokens_of_rows) {
    const int64_t rows = tokens_of_rows.size(0);
    TORCH_CHECK(drafts.scalar_type() == at::kLong && drafts.dim() == 2 && drafts.size(0) == rows &&
                    drafts.stride(1) == 1,
                op, ": drafts are an int64 [", rows, ", most] with a dense last dimension, got ",
                drafts.sizes());
    ids = drafts.const_data_ptr<int64_t>();
    most = drafts.size(1);
    stride = drafts.stride(0);
    counts = check_index(op, tokens_of_rows, rows, most + 2, "counts");
    for (int64_t row = 0; row < rows; ++row) {
      TORCH_CHECK_INDEX(counts[row] >= 1, op, ": counts[", row, "] is ", counts[row],
                        ", a row has 1 token or more");
      tokens += counts[row];
    }
  }
};

// Positions, write index and rows of the tokens of a step, as `RaggedBatch` has them.
struct TokenPlaces {
  at::Tensor positions, slots, token_rows;
  int64_t tokens, *position, *slot, *token_row;

  TokenPlaces(int64_t count, int64_t groups, const at::Tensor& like)
      : positions(at::empty({count}, like.options())),
        slots(at::empty({groups, count}, like.options())),
        token_rows(at::empty_like(positions)),
        tokens(count),
        position(positions.mutable_data_ptr<int64_t>()),
        slot(slots.mutable_data_ptr<int64_t>()),
        token_row(token_rows.mutable_data_ptr<int64_t>()) {}

  // Without `stored` the token is written to the null block.
  void set(int64_t t, int64_t row, int64_t at, const RowTables& tables, bool stored) {
    position[t] = at;
    token_row[t] = row;
    for (int64_t group = 0; group < tables.groups; ++group) {
      slot[group * tokens + t] = stored ? tables.slot(group, row, at) : 0;
    }
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> row_inputs_cpu(
    const at::Tensor& rows, const at::Tensor& drafts, const at::Tensor& counts,
    const at::Tensor& token_ids, const at::Tensor& positions, const at::Tensor& block_tables,
    int64_t block_size) {
  constexpr const char* kName = "row_inputs";
  const int64_t all_rows = token_ids.size(0), num_rows = rows.size(0);
  const RowTables tables(kName, block_tables, block_size);
  TORCH_CHECK(tables.rows == all_rows, kName, ": block tables ", block_tables.sizes(), " of ",
              all_rows, " rows");
  const int64_t* row = check_index(kName, rows, num_rows, all_rows, "rows");
  const int64_t* newest =
      check_index(kName, positions, all_rows, tables.positions(), "positions");
  check_tensor(kName, token_ids, at::kLong, {all_rows}, "token_ids");
  const RowDrafts drafted(kName, drafts, counts);
  TokenPlaces places(drafted.tokens, tables.groups, rows);
  at::Tensor tokens = at::empty_like(places.positions);
  at::Tensor starts = at::empty({num_rows + 1}, rows.options());
  int64_t *token = tokens.mutable_data_ptr<int64_t>(), *start = starts.mutable_data_ptr<int64_t>();
  int64_t t = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t count = drafted.counts[i], first = newest[row[i]];
    TORCH_CHECK_INDEX(first + count <= tables.positions(), kName, ": row ", row[i], " has ", count,
                      " tokens from position ", first, " on, its table ", tables.columns,
                      " blocks of ", block_size);
    start[i] = t;
    for (int64_t j = 0; j < count; ++j, ++t) {
      token[t] = j == 0 ? token_ids.const_data_ptr<int64_t>()[row[i]]
                        : drafted.ids[i * drafted.stride + j - 1];
      places.set(t, row[i], first + j, tables, true);
    }
  }
  start[num_rows] = t;
  return {tokens, places.positions, places.slots, places.token_rows, starts};
}

at::Tensor advance_rows_cpu(const at::Tensor& sampled, const at::Tensor& rows,
                            const at::Tensor& drafts, const at::Tensor& counts,
                            at::Tensor& token_ids, at::Tensor& positions,
                            const std::optional<at::Tensor>& stored, int64_t block_size) {
  constexpr const char* kName = "advance_rows";
  const int64_t all_rows = token_ids.size(0), num_rows = rows.size(0);
  const RowDrafts drafted(kName, drafts, counts);
  const int64_t* row = check_index(kName, rows, num_rows, all_rows, "rows");
  check_tensor(kName, sampled, at::kLong, {drafted.tokens}, "tokens");
  check_tensor(kName, token_ids, at::kLong, {all_rows}, "token_ids");
  check_tensor(kName, positions, at::kLong, {all_rows}, "positions");
  if (stored) check_tensor(kName, *stored, at::kLong, {all_rows}, "stored");
  at::Tensor lanes = at::empty({drafted.most + 1, num_rows}, rows.options());
  int64_t* lane = lanes.mutable_data_ptr<int64_t>();
  const int64_t* token = sampled.const_data_ptr<int64_t>();
  int64_t t = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t count = drafted.counts[i], *draft = drafted.ids + i * drafted.stride;
    int64_t accepted = 0;
    while (accepted + 1 < count && token[t + accepted] == draft[accepted]) ++accepted;
    token_ids.mutable_data_ptr<int64_t>()[row[i]] = std::max<int64_t>(token[t + accepted], 0);
    int64_t& position = positions.mutable_data_ptr<int64_t>()[row[i]];
    if (stored) stored->mutable_data_ptr<int64_t>()[row[i]] = position / block_size;
    position = row[i] == all_rows - 1 ? 0 : position + accepted + 1;
    for (int64_t j = 0; j <= drafted.most; ++j) {
      lane[j * num_rows + i] = t + std::min(j, count - 1);
    }
    t += count;
  }
  return lanes;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> drafted_inputs_cpu(
    const at::Tensor& rows, const at::Tensor& positions, const at::Tensor& stops,
    const at::Tensor& block_tables, int64_t block_size, int64_t first, int64_t count) {
  constexpr const char* kName = "drafted_inputs";
  const int64_t num_rows = rows.size(0);
  const RowTables tables(kName, block_tables, block_size);
  TORCH_CHECK(count > 0, kName, ": ", count, " tokens a row");
  const int64_t* row = check_index(kName, rows, num_rows, tables.rows, "rows");
  const int64_t* newest =
      check_index(kName, positions, tables.rows, tables.positions(), "positions");
  const int64_t* stop = check_index(kName, stops, num_rows, tables.positions() + 1, "stops");
  TokenPlaces places(num_rows * count, tables.groups, rows);
  for (int64_t t = 0; t < num_rows * count; ++t) {
    const int64_t i = t / count, wanted = newest[row[i]] + first + t % count;
    const int64_t at = std::max<int64_t>(std::min(wanted, stop[i] - 1), 0);
    places.set(t, row[i], at, tables, at == wanted);
  }
  return {places.positions, places.slots, places.token_rows};
}

using OptionalTensor = std::optional<at::Tensor>;

// All rows of x in a norm.
at::Tensor normed_rows(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t size = x.size(1);
  check_tensor("head_drafts", weight, x.scalar_type(), {size}, "the input norm");
  at::Tensor out = at::empty(x.sizes(), x.options());
  const NormWeights norm{weight.const_data_ptr(), static_cast<float>(eps)};
  for_model_type("head_drafts", x.scalar_type(), [&]<class T>(T) {
    const T* from = x.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for (int64_t t = 0; t < x.size(0); ++t) norm_row<T>(from + t * size, norm, size, to + t * size);
  });
  return out;
}

// All drafts of an EAGLE-3 head after a step: the same work as the other operators called one after
// another, from C++, where a call costs a tenth of what it does from Python.
std::tuple<at::Tensor, at::Tensor> head_drafts_cpu(
    const at::Tensor& features, const at::Tensor& next_ids, const at::Tensor& positions,
    const at::Tensor& slots, const at::Tensor& token_rows,
    const at::Tensor& rows, const at::Tensor& row_positions, const at::Tensor& first,
    const at::Tensor& stops, const at::Tensor& block_tables, int64_t read_blocks,
    int64_t block_size, at::Tensor& arena, int64_t count, const at::Tensor& fuse,
    const OptionalTensor& input_norm, double eps, int64_t hidden_size, const at::Tensor& embedding,
    const at::Tensor& stack, const at::Tensor& frequencies, const OptionalTensor& amplitudes,
    const at::Tensor& head, const OptionalTensor& head_bias, int64_t head_features,
    const OptionalTensor& target_ids) {
  constexpr const char* kName = "head_drafts";
  const int64_t num_rows = rows.size(0);
  TORCH_CHECK(count > 0, kName, ": ", count, " drafts a row, 1 or more expected");
  if (target_ids) check_tensor(kName, *target_ids, at::kLong, {head_features}, "target_ids");
  // Of each row the token before its newest one, among the tokens of the step.
  const at::Tensor at = row_positions.index_select(0, rows);
  const at::Tensor index = first + (at - positions.index_select(0, first) - 1).clamp_min(0);
  const at::ScalarType dtype = features.scalar_type();
  const int64_t last = Handles<OwnedStack>::instance().find(kName, stack)->stack->layers() - 1;
  at::Tensor drafts = at::empty({num_rows, count}, rows.options());
  at::Tensor probabilities = at::empty({num_rows, count}, features.options().dtype(at::kFloat));
  at::Tensor hidden = packed_linear_cpu(features, fuse, std::nullopt, hidden_size);
  at::Tensor next = next_ids.flatten().clamp_min(0);
  at::Tensor position = positions, slot = slots, token_row = token_rows;
  for (int64_t place = 0; place < count; ++place) {
    if (place > 0) {
      std::tie(position, slot, token_row) = drafted_inputs_cpu(rows, row_positions, stops,
                                                               block_tables, block_size, place - 1, 1);
    }
    if (input_norm) hidden = normed_rows(hidden, *input_norm, eps);
    const at::Tensor embeddings = packed_embedding_cpu(next, embedding, hidden_size, dtype);
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
        most_likely_cpu(packed_linear_cpu(normed, head, head_bias, head_features));
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
