// Rows of a packed weight, as `packed_embedding` in `linear.py`. Part of `ops.cpp`.
#pragma once

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"

namespace stepgraph {
namespace {

// Words are of a step: two bf16, one float or two int8. Those of a row are kBlock words apart, each
// in a cache line of its own.
template <class Word>
void gather_words(const Word* packed, int64_t steps, const int64_t* tokens, int64_t count,
                  int64_t words, Word* out, int threads) {
  parallel_for(count, threads, [&](int64_t t, int64_t) {
    const Word* row = packed + tokens[t] / kBlock * steps * kBlock + tokens[t] % kBlock;
    for (int64_t k = 0; k < words; ++k) out[t * words + k] = row[k * kBlock];
  });
}

at::Tensor packed_embedding_cpu(const at::Tensor& tokens, const at::Tensor& packed, int64_t k) {
  TORCH_CHECK(packed.dim() == 4 && packed.size(2) == kBlock && packed.is_contiguous() && 0 <= k &&
                  k <= packed.size(1) * packed.size(3),
              "packed_embedding: packed weight ", packed.sizes(), " has no rows of ", k);
  const int64_t count = tokens.size(0), steps = packed.size(1), width = packed.size(3);
  const int64_t word_bytes = width * packed.element_size();
  TORCH_CHECK(word_bytes == 4 || word_bytes == 2, "packed_embedding: words of ", word_bytes,
              " bytes; 4 or 2 expected");
  check_index("packed_embedding", tokens, at::kLong, count, packed.size(0) * kBlock, "tokens");
  const int64_t words = (k + width - 1) / width;
  at::Tensor out = at::empty({count, words * width}, packed.options());
  const int64_t* token = tokens.const_data_ptr<int64_t>();
  constexpr int64_t kWordsPerThread = 1 << 13;
  const int used =
      static_cast<int>(std::clamp<int64_t>(count * words / kWordsPerThread, 1, threads()));
  if (word_bytes == 4) {
    gather_words(static_cast<const uint32_t*>(packed.const_data_ptr()), steps, token, count, words,
                 static_cast<uint32_t*>(out.mutable_data_ptr()), used);
  } else {
    gather_words(static_cast<const uint16_t*>(packed.const_data_ptr()), steps, token, count, words,
                 static_cast<uint16_t*>(out.mutable_data_ptr()), used);
  }
  return words * width == k ? out : out.narrow(1, 0, k).contiguous();
}

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  library.impl("packed_embedding", &stepgraph::packed_embedding_cpu);
}
