// The embeddings of a packed weight (`linear.py`), the rotations of a step and the soft cap of logits
// (`sampling.py`). Part of `ops.cpp`.
#pragma once

#include <algorithm>
#include <cmath>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "stack_math.h"

namespace stepgraph {
namespace {

// Words are of a step: two bf16, one float or two int8. A row's words are kBlock words apart, each
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
  check_index("packed_embedding", tokens, count, packed.size(0) * kBlock, "tokens");
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

std::tuple<at::Tensor, at::Tensor> rotations_cpu(const at::Tensor& positions,
                                                 const at::Tensor& frequencies) {
  TORCH_CHECK(positions.dim() == 1 && positions.is_contiguous() && frequencies.dim() == 2 &&
                  frequencies.is_contiguous(),
              "rotations: positions [tokens] and frequencies [kinds, pairs] are contiguous, got ",
              positions.sizes(), " and ", frequencies.sizes());
  const int64_t kinds = frequencies.size(0), pairs = frequencies.size(1), tokens = positions.size(0);
  at::Tensor cos = at::empty({kinds, tokens, pairs}, frequencies.options());
  at::Tensor sin = at::empty({kinds, tokens, pairs}, frequencies.options());
  const int64_t* position = positions.const_data_ptr<int64_t>();
  const float* frequency = frequencies.const_data_ptr<float>();
  float *cosines = cos.mutable_data_ptr<float>(), *sines = sin.mutable_data_ptr<float>();
  constexpr int64_t kPairsPerThread = 1 << 13;
  const int used = static_cast<int>(
      std::clamp<int64_t>(kinds * tokens * pairs / kPairsPerThread, 1, threads()));
  parallel_for(kinds * tokens, used, [=](int64_t row, int64_t) {
    const float at = static_cast<float>(position[row % tokens]);
    const float* own = frequency + row / tokens * pairs;
    for (int64_t i = 0; i < pairs; ++i) {
      cosines[row * pairs + i] = std::cos(at * own[i]);
      sines[row * pairs + i] = std::sin(at * own[i]);
    }
  });
  return {cos, sin};
}

void cap_logits_cpu(at::Tensor& logits, double cap) {
  TORCH_CHECK(logits.is_contiguous() && cap > 0.0, "cap_logits: contiguous logits and a positive cap"
              " expected, got ", logits.sizes(), " and ", cap);
  for_model_type("cap_logits", logits.scalar_type(), [&]<class T>(T) {
    T* data = logits.mutable_data_ptr<T>();
    constexpr int64_t kPiece = 1 << 12;
    const int64_t count = logits.numel(), pieces = (count + kPiece - 1) / kPiece;
    const F32x16 limit = broadcast(static_cast<float>(cap));
    parallel_for(pieces, static_cast<int>(std::min<int64_t>(pieces, threads())),
                 [=](int64_t piece, int64_t) {
                   const int64_t end = std::min(count, (piece + 1) * kPiece);
                   for (int64_t i = piece * kPiece; i < end; i += 16) {
                     const F32x16 x = floats_of(data, i, end) / limit;
                     put(data + i, tanh_of(x) * limit, end - i);
                   }
                 });
  });
}

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  library.impl("packed_embedding", &stepgraph::packed_embedding_cpu);
  library.impl("rotations", &stepgraph::rotations_cpu);
  library.impl("cap_logits", &stepgraph::cap_logits_cpu);
}
