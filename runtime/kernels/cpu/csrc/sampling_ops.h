// The sampler, as `sampling.py` declares it. Part of `ops.cpp`.
#pragma once

#include <limits>
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "checks.h"
#include "sampling.h"

namespace stepgraph {
namespace {

void check_logits(const at::Tensor& logits, const char* name) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1, name,
              ": logits are [lanes, vocab_size] with a dense last dimension, got ", logits.sizes());
}

LaneMasks checked_masks(const char* name, const std::optional<at::Tensor>& bits,
                        const std::optional<at::Tensor>& mask_rows, int64_t lanes,
                        int64_t vocab_size) {
  TORCH_CHECK(bits.has_value() == mask_rows.has_value(), name,
              ": mask bits and their rows are given together");
  if (!bits.has_value()) return {nullptr, 0, nullptr};
  TORCH_CHECK(bits->scalar_type() == at::kInt && bits->dim() == 2 && bits->stride(1) == 1 &&
                  bits->size(1) == (vocab_size + kMaskBits - 1) / kMaskBits,
              name, ": mask bits are an int32 [rows, ", (vocab_size + kMaskBits - 1) / kMaskBits,
              "] with a dense last dimension, got ", bits->sizes());
  return {bits->const_data_ptr<int32_t>(), bits->stride(0),
          check_index(name, *mask_rows, lanes, bits->size(0), "mask rows")};
}

at::Tensor greedy(const char* name, const at::Tensor& logits, const std::optional<at::Tensor>& bits,
                  const std::optional<at::Tensor>& mask_rows, float* probabilities) {
  check_logits(logits, name);
  const int64_t lanes = logits.size(0), vocab_size = logits.size(1);
  const LaneMasks masks = checked_masks(name, bits, mask_rows, lanes, vocab_size);
  at::Tensor tokens = at::empty({lanes}, logits.options().dtype(at::kLong));
  for_float_type(name, logits.scalar_type(), [&]<class T>(T) {
    sample_greedy(logits.const_data_ptr<T>(), logits.stride(0), masks, lanes, vocab_size,
                  tokens.mutable_data_ptr<int64_t>(), probabilities, threads());
  });
  return tokens;
}

at::Tensor sample_greedy_cpu(const at::Tensor& logits, const std::optional<at::Tensor>& bits,
                             const std::optional<at::Tensor>& mask_rows) {
  return greedy("sample_greedy", logits, bits, mask_rows, nullptr);
}

// 0 in the place of a token that is not finite.
std::tuple<at::Tensor, at::Tensor> most_likely_cpu(const at::Tensor& logits) {
  at::Tensor probabilities = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
  const at::Tensor tokens = greedy("most_likely", logits, std::nullopt, std::nullopt,
                                   probabilities.mutable_data_ptr<float>());
  return {tokens.clamp_min(0), probabilities};
}

// `inputs`: the tokens that the lanes follow, of a verify step.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> sample_full_cpu(
    const at::Tensor& logits, const at::Tensor& reals, const at::Tensor& integers,
    at::Tensor& counts, const at::Tensor& rows, const at::Tensor& positions,
    const std::optional<at::Tensor>& inputs, int64_t tops, const std::optional<at::Tensor>& bits,
    const std::optional<at::Tensor>& mask_rows) {
  check_logits(logits, "sample_full");
  const int64_t lanes = logits.size(0), vocab_size = logits.size(1), num_rows = counts.size(0);
  check_tensor("sample_full", reals, at::kFloat, {num_rows, -1}, "reals");
  check_tensor("sample_full", integers, at::kLong, {num_rows, -1}, "integers");
  check_tensor("sample_full", counts, at::kInt, {num_rows, vocab_size}, "token_counts");
  const int64_t biases = reals.size(1) - kReals;
  const int64_t stops = integers.size(1) - kIntegers - biases;
  TORCH_CHECK(biases >= 0 && stops >= 0, "sample_full: the state has ", reals.sizes(), " and ",
              integers.sizes(), ", expected are 6 + biases and 3 + biases + stops");
  TORCH_CHECK(0 <= tops && tops <= vocab_size, "sample_full: ", tops,
              " log-probabilities of a vocabulary of ", vocab_size);
  const int64_t* row = check_index("sample_full", rows, lanes, num_rows, "rows");
  check_index("sample_full", positions, lanes, std::numeric_limits<int64_t>::max(), "positions");
  if (inputs) check_index("sample_full", *inputs, lanes, vocab_size, "inputs");
  const LaneMasks masks = checked_masks("sample_full", bits, mask_rows, lanes, vocab_size);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t* ids = integers.const_data_ptr<int64_t>() + row[lane] * integers.size(1);
    for (int64_t i = kIntegers; i < integers.size(1); ++i) {
      TORCH_CHECK_INDEX(0 <= ids[i] && ids[i] < vocab_size, "sample_full: row ", row[lane],
                        " names token ", ids[i], " of a vocabulary of ", vocab_size);
    }
    TORCH_CHECK_INDEX(ids[kTopK] >= 1, "sample_full: top_k of row ", row[lane], " is ", ids[kTopK]);
  }
  const auto floats = logits.options().dtype(at::kFloat);
  const auto longs = logits.options().dtype(at::kLong);
  at::Tensor tokens = at::empty({lanes}, longs), logprob = at::empty({lanes}, floats);
  at::Tensor top_logprobs = at::empty({lanes, tops}, floats);
  at::Tensor top_ids = at::empty({lanes, tops}, longs);
  const int used = useful_threads(lanes, threads());
  at::Tensor scratch = at::empty({used * sample_scratch_floats(vocab_size)}, floats);
  for_float_type("sample_full", logits.scalar_type(), [&]<class T>(T) {
    sample_full(SampleArgs<T>{
        logits.const_data_ptr<T>(), logits.stride(0), masks, reals.const_data_ptr<float>(),
        integers.const_data_ptr<int64_t>(), counts.mutable_data_ptr<int32_t>(), row,
        positions.const_data_ptr<int64_t>(), inputs ? inputs->const_data_ptr<int64_t>() : nullptr,
        lanes, vocab_size, biases, stops, tops,
        tokens.mutable_data_ptr<int64_t>(), logprob.mutable_data_ptr<float>(),
        top_logprobs.mutable_data_ptr<float>(), top_ids.mutable_data_ptr<int64_t>(),
        scratch.mutable_data_ptr<float>(), used});
  });
  return {tokens, logprob, top_logprobs, top_ids};
}

}  // namespace
}  // namespace stepgraph
