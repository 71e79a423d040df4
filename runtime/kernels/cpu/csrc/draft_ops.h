// The tokens that a drafter computes next, as `drafted.py`. Part of `ops.cpp`.
#pragma once

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"

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

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  library.impl("drafted_inputs", &stepgraph::drafted_inputs_cpu);
}
