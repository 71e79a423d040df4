// The embeddings of a packed weight (`linear.py`), the rotations of a step and the soft cap of logits
// (`sampling.py`). Part of `ops.cpp`.
#pragma once

#include <algorithm>
#include <cmath>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "checks.h"
#include "linear_ops.h"
#include "stack_math.h"

namespace stepgraph {
namespace {

// Rows of a packed weight, decoded.
template <class T>
void decode_rows(const PackedHeader& header, const int64_t* tokens, int64_t count, T* out,
                 int threads) {
  const char* packed = reinterpret_cast<const char*>(&header);
  const int64_t inputs = header.inputs;
  parallel_for(count, threads, [&, inputs](int64_t t, int64_t) {
    const int64_t block = tokens[t] / kBlock, column = tokens[t] % kBlock;
    const PackedPart& part = header.part_of(block);
    const char* w = packed + part.begin + (block - part.first_block) * part.block_bytes;
    T* row = out + t * inputs;
    if (part.bits == 0) {
      constexpr int64_t kPerWord = Element<T>::kPerWord;
      const T* numbers = reinterpret_cast<const T*>(w) + column * kPerWord;
      for (int64_t k = 0; k < inputs; ++k) {
        row[k] = numbers[k / kPerWord * kBlock * kPerWord + k % kPerWord];
      }
      return;
    }
    for_bits(part.bits, [&](auto bits) {
      visit_column<bits()>(part, header.levels_of(part), w, static_cast<int>(column), inputs,
                           [&](int64_t k, float number) { row[k] = static_cast<T>(number); });
    });
  });
}

at::Tensor packed_embedding_cpu(const at::Tensor& tokens, const at::Tensor& packed, int64_t k,
                                at::ScalarType dtype) {
  const PackedHeader* header = packed_header(packed, k, dtype);
  TORCH_CHECK(header != nullptr, "packed_embedding: the weight ", packed.sizes(), " was not packed ",
              "by pack_parts as rows of ", k, " for a model in ", dtype);
  const int64_t count = tokens.size(0), rows = (header->columns + kBlock - 1) / kBlock * kBlock;
  const int64_t* token = check_index("packed_embedding", tokens, count, rows, "tokens");
  at::Tensor out = at::empty({count, k}, packed.options().dtype(dtype));
  constexpr int64_t kNumbersPerThread = 1 << 12;
  const int used = useful_threads(count * k / kNumbersPerThread, threads());
  for_model_type("packed_embedding", dtype, [&]<class T>(T) {
    decode_rows(*header, token, count, out.mutable_data_ptr<T>(), used);
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> rotations_cpu(const at::Tensor& positions,
                                                 const at::Tensor& frequencies) {
  check_tensor("rotations", positions, at::kLong, {-1}, "positions");
  check_tensor("rotations", frequencies, at::kFloat, {-1, -1}, "frequencies [kinds, pairs]");
  const int64_t kinds = frequencies.size(0), pairs = frequencies.size(1), tokens = positions.size(0);
  at::Tensor cos = at::empty({kinds, tokens, pairs}, frequencies.options());
  at::Tensor sin = at::empty({kinds, tokens, pairs}, frequencies.options());
  const int64_t* position = positions.const_data_ptr<int64_t>();
  const float* frequency = frequencies.const_data_ptr<float>();
  float *cosines = cos.mutable_data_ptr<float>(), *sines = sin.mutable_data_ptr<float>();
  constexpr int64_t kPairsPerThread = 1 << 13;
  const int used = useful_threads(kinds * tokens * pairs / kPairsPerThread, threads());
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
