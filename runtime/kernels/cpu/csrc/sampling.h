// What the registration in `ops.cpp` asks of the sampler. Plain pointers and sizes.
#pragma once

#include <cstdint>

namespace stepgraph {

// Tokens that one running maximum or sum is kept of.
constexpr int64_t kSampleChunk = 128;

inline int64_t sample_chunks(int64_t vocab_size) {
  return (vocab_size + kSampleChunk - 1) / kSampleChunk;
}

// In the place of a token: `NON_FINITE` of `feedback.py`.
constexpr int64_t kNonFinite = -1;

// Columns of `SamplingState`, before the values and ids of logit biases and the stop ids.
enum Real { kTemperature, kTopP, kMinP, kRepetition, kPresence, kFrequency, kReals };
enum Integer { kTopK, kSeed, kBanUntil, kIntegers };

// Tokens of a word of a mask.
constexpr int64_t kMaskBits = 32;

// Which tokens each lane may sample: bit i % 32 of word i / 32 is set for token i. The words of a
// lane begin at `bits + rows[lane] * stride`. Without bits, all tokens.
struct LaneMasks {
  const int32_t* bits;
  int64_t stride;
  const int64_t* rows;  // [lanes]

  const int32_t* of(int64_t lane) const {
    return bits == nullptr ? nullptr : bits + rows[lane] * stride;
  }
};

// T is the type of the logits. For the meaning see `sample_full` in `sampling.py`.
template <class T>
struct SampleArgs {
  const T* logits;            // [lanes, vocab_size], last dimension dense
  int64_t logits_stride;      // from lane to lane
  LaneMasks masks;
  const float* reals;         // [.., kReals + biases]
  const int64_t* integers;    // [.., kIntegers + biases + stops]
  int32_t* counts;            // [.., vocab_size]
  const int64_t* rows;        // [lanes]
  const int64_t* positions;   // [lanes]
  const int64_t* inputs;      // [lanes] of a verify step: the tokens that they follow; or null
  int64_t lanes, vocab_size, biases, stops, tops;
  int64_t* tokens;            // [lanes]
  float* logprob;             // [lanes]
  float* top_logprobs;        // [lanes, tops]
  int64_t* top_ids;           // [lanes, tops]
  float* scratch;             // threads times `sample_scratch_floats`, aligned to 64 bytes
  int threads;
};

// Floats that each thread works in.
int64_t sample_scratch_floats(int64_t vocab_size);

// In a verify step lanes of a row lie together. Those of a row with penalties are drawn one after the
// other, each with the counts of the tokens before it, until one differs from the draft in its place;
// what follows it is left NON_FINITE.
template <class T>
void sample_full(const SampleArgs<T>& args);

// tokens[b] = first index of the largest of logits[b] that its mask allows, or kNonFinite, and unless
// `probabilities` is null its probability, or 0.
template <class T>
void sample_greedy(const T* logits, int64_t logits_stride, const LaneMasks& masks, int64_t lanes,
                   int64_t vocab_size, int64_t* tokens, float* probabilities, int threads);

}  // namespace stepgraph
