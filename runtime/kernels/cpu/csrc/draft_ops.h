// The tokens of verify steps, their acceptance, and the tokens that drafters compute, as `drafted.py`.
// Part of `ops.cpp`.
#pragma once

#include <algorithm>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "checks.h"

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

// Tokens of each row of a verify step, 1 to drafts + 1.
int64_t check_counts(const char* op, const at::Tensor& counts, const at::Tensor& drafts) {
  const int64_t rows = counts.size(0);
  TORCH_CHECK(drafts.scalar_type() == at::kLong && drafts.dim() == 2 && drafts.size(0) == rows &&
                  drafts.stride(1) == 1,
              op, ": drafts are an int64 [", rows, ", most] with a dense last dimension, got ",
              drafts.sizes());
  check_index(op, counts, rows, drafts.size(1) + 2, "counts");
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
  const RowTables tables("row_inputs", block_tables, block_size);
  TORCH_CHECK(tables.rows == all_rows, "row_inputs: block tables ", block_tables.sizes(), " of ",
              all_rows, " rows");
  check_index("row_inputs", rows, num_rows, all_rows, "rows");
  check_index("row_inputs", positions, all_rows, tables.positions(), "positions");
  TORCH_CHECK(token_ids.scalar_type() == at::kLong && token_ids.is_contiguous(),
              "row_inputs: token_ids are a contiguous int64 [rows]");
  const int64_t tokens = check_counts("row_inputs", counts, drafts);
  at::Tensor token = at::empty({tokens}, rows.options()), position = at::empty_like(token);
  at::Tensor slots = at::empty({tables.groups, tokens}, rows.options());
  at::Tensor token_rows = at::empty_like(token), starts = at::empty({num_rows + 1}, rows.options());
  int64_t *to_token = token.mutable_data_ptr<int64_t>(),
          *to_position = position.mutable_data_ptr<int64_t>(),
          *to_slot = slots.mutable_data_ptr<int64_t>(),
          *to_row = token_rows.mutable_data_ptr<int64_t>(),
          *start = starts.mutable_data_ptr<int64_t>();
  int64_t t = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = rows.const_data_ptr<int64_t>()[i];
    const int64_t count = counts.const_data_ptr<int64_t>()[i];
    const int64_t first = positions.const_data_ptr<int64_t>()[row];
    const int64_t* draft = drafts.const_data_ptr<int64_t>() + i * drafts.stride(0);
    TORCH_CHECK_INDEX(first + count <= tables.positions(), "row_inputs: row ", row, " has ", count,
                      " tokens from position ", first, " on, its table ", tables.columns,
                      " blocks of ", block_size);
    start[i] = t;
    for (int64_t j = 0; j < count; ++j, ++t) {
      to_token[t] = j == 0 ? token_ids.const_data_ptr<int64_t>()[row] : draft[j - 1];
      to_position[t] = first + j;
      to_row[t] = row;
      for (int64_t group = 0; group < tables.groups; ++group) {
        to_slot[group * tokens + t] = tables.slot(group, row, first + j);
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
  check_index("advance_rows", rows, num_rows, all_rows, "rows");
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

std::tuple<at::Tensor, at::Tensor, at::Tensor> drafted_inputs_cpu(
    const at::Tensor& rows, const at::Tensor& positions, const at::Tensor& stops,
    const at::Tensor& block_tables, int64_t block_size, int64_t first, int64_t count) {
  const int64_t num_rows = rows.size(0);
  const RowTables tables("drafted_inputs", block_tables, block_size);
  TORCH_CHECK(count > 0, "drafted_inputs: ", count, " tokens a row");
  check_index("drafted_inputs", rows, num_rows, tables.rows, "rows");
  check_index("drafted_inputs", positions, tables.rows, tables.positions(), "positions");
  check_index("drafted_inputs", stops, num_rows, tables.positions() + 1, "stops");
  const int64_t tokens = num_rows * count;
  at::Tensor position = at::empty({tokens}, rows.options()), token_rows = at::empty_like(position);
  at::Tensor slots = at::empty({tables.groups, tokens}, rows.options());
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
      for (int64_t group = 0; group < tables.groups; ++group) {
        slots.mutable_data_ptr<int64_t>()[group * tokens + t] =
            at == wanted ? tables.slot(group, row, at) : 0;
      }
    }
  }
  return {position, slots, token_rows};
}

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  library.impl("row_inputs", &stepgraph::verify_inputs_cpu);
  library.impl("advance_rows", &stepgraph::accept_drafts_cpu);
  library.impl("drafted_inputs", &stepgraph::drafted_inputs_cpu);
}
