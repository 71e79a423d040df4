// The inputs of a verify step and its acceptance, as `drafted.py`. Part of `ops.cpp`.
#pragma once

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"

namespace stepgraph {
namespace {

// Tokens of each row of a verify step, 1 to drafts + 1.
int64_t check_counts(const char* op, const at::Tensor& counts, const at::Tensor& drafts) {
  const int64_t rows = counts.size(0);
  TORCH_CHECK(drafts.scalar_type() == at::kLong && drafts.dim() == 2 && drafts.size(0) == rows &&
                  drafts.stride(1) == 1,
              op, ": drafts are an int64 [", rows, ", most] with a dense last dimension, got ",
              drafts.sizes());
  check_index(op, counts, at::kLong, rows, drafts.size(1) + 2, "counts");
  const int64_t* count = counts.const_data_ptr<int64_t>();
  int64_t tokens = 0;
  for (int64_t row = 0; row < rows; ++row) {
    TORCH_CHECK_INDEX(count[row] >= 1, op, ": counts[", row, "] is ", count[row],
                      ", a row has 1 token or more");
    tokens += count[row];
  }
  return tokens;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> verify_inputs_cpu(
    const at::Tensor& rows, const at::Tensor& drafts, const at::Tensor& counts,
    const at::Tensor& token_ids, const at::Tensor& positions, const at::Tensor& block_tables,
    int64_t block_size) {
  const int64_t all_rows = token_ids.size(0), num_rows = rows.size(0);
  check_tables("row_inputs", block_tables, 3, 1);
  TORCH_CHECK(block_size > 0 && block_tables.size(1) == all_rows,
              "row_inputs: block tables ", block_tables.sizes(), " of ", all_rows, " rows");
  check_index("row_inputs", rows, at::kLong, num_rows, all_rows, "rows");
  check_index("row_inputs", positions, at::kLong, all_rows,
              block_tables.size(2) * block_size, "positions");
  TORCH_CHECK(token_ids.scalar_type() == at::kLong && token_ids.is_contiguous(),
              "row_inputs: token_ids are a contiguous int64 [rows]");
  const int64_t tokens = check_counts("row_inputs", counts, drafts);
  const int64_t groups = block_tables.size(0), columns = block_tables.size(2);
  at::Tensor token = at::empty({tokens}, rows.options()), position = at::empty_like(token);
  at::Tensor slots = at::empty({groups, tokens}, rows.options());
  at::Tensor token_rows = at::empty_like(token), starts = at::empty({num_rows + 1}, rows.options());
  int64_t *to_token = token.mutable_data_ptr<int64_t>(),
          *to_position = position.mutable_data_ptr<int64_t>(),
          *to_slot = slots.mutable_data_ptr<int64_t>(),
          *to_row = token_rows.mutable_data_ptr<int64_t>(),
          *start = starts.mutable_data_ptr<int64_t>();
  const int32_t* table = block_tables.const_data_ptr<int32_t>();
  int64_t t = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = rows.const_data_ptr<int64_t>()[i];
    const int64_t count = counts.const_data_ptr<int64_t>()[i];
    const int64_t first = positions.const_data_ptr<int64_t>()[row];
    const int64_t* draft = drafts.const_data_ptr<int64_t>() + i * drafts.stride(0);
    TORCH_CHECK_INDEX((first + count - 1) / block_size < columns, "row_inputs: row ", row,
                      " has ", count, " tokens from position ", first, " on, its table ", columns,
                      " blocks of ", block_size);
    start[i] = t;
    for (int64_t j = 0; j < count; ++j, ++t) {
      to_token[t] = j == 0 ? token_ids.const_data_ptr<int64_t>()[row] : draft[j - 1];
      to_position[t] = first + j;
      to_row[t] = row;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t block = table[(group * all_rows + row) * columns + to_position[t] / block_size];
        to_slot[group * tokens + t] = block * block_size + to_position[t] % block_size;
      }
    }
  }
  start[num_rows] = t;
  return {token, position, slots, token_rows, starts};
}

at::Tensor accept_drafts_cpu(const at::Tensor& sampled, const at::Tensor& rows,
                             const at::Tensor& drafts, const at::Tensor& counts,
                             at::Tensor& token_ids, at::Tensor& positions) {
  const int64_t all_rows = token_ids.size(0), num_rows = rows.size(0);
  const int64_t tokens = check_counts("advance_rows", counts, drafts);
  check_index("advance_rows", rows, at::kLong, num_rows, all_rows, "rows");
  TORCH_CHECK(sampled.scalar_type() == at::kLong && sampled.is_contiguous() &&
                  sampled.dim() == 1 && sampled.size(0) == tokens,
              "advance_rows: tokens are a contiguous int64 [", tokens, "], got ",
              sampled.sizes());
  TORCH_CHECK(token_ids.is_contiguous() && positions.is_contiguous() &&
                  token_ids.scalar_type() == at::kLong && positions.scalar_type() == at::kLong &&
                  positions.size(0) == all_rows,
              "advance_rows: token_ids and positions are a contiguous int64 [rows]");
  const int64_t most = drafts.size(1) + 1;
  at::Tensor lanes = at::empty({most, num_rows}, rows.options());
  int64_t* lane = lanes.mutable_data_ptr<int64_t>();
  const int64_t* token = sampled.const_data_ptr<int64_t>();
  int64_t t = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = rows.const_data_ptr<int64_t>()[i];
    const int64_t count = counts.const_data_ptr<int64_t>()[i];
    const int64_t* draft = drafts.const_data_ptr<int64_t>() + i * drafts.stride(0);
    int64_t accepted = 0;
    while (accepted + 1 < count && token[t + accepted] == draft[accepted]) ++accepted;
    token_ids.mutable_data_ptr<int64_t>()[row] = std::max<int64_t>(token[t + accepted], 0);
    int64_t& position = positions.mutable_data_ptr<int64_t>()[row];
    position = row == all_rows - 1 ? 0 : position + accepted + 1;
    for (int64_t j = 0; j < most; ++j) lane[j * num_rows + i] = t + std::min(j, count - 1);
    t += count;
  }
  return lanes;
}

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  library.impl("row_inputs", &stepgraph::verify_inputs_cpu);
  library.impl("advance_rows", &stepgraph::accept_drafts_cpu);
}
