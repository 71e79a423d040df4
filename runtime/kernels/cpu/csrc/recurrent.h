// Recurrences and convolutions on their own, as `ops.cpp` calls them. Plain pointers and sizes.
#pragma once

#include <memory>

#include "convolution.h"
#include "recurrence.h"

namespace stepgraph {

// The tokens of a step and the state of their rows.
struct StateStep {
  RowStates states;
  const int64_t *positions, *token_rows;  // [tokens]
  int64_t tokens;
  int threads;
};

struct RecurrenceArgs {
  RecurrenceShape shape;
  const float *q, *k;  // [tokens, key_heads, key]
  const float* v;      // [tokens, heads, value]
  const float* g;      // [tokens, heads, decays]
  const float* beta;   // [tokens, heads]; null without the delta rule
  float* out;          // [tokens, heads, value]
};

template <class T>
struct ConvArgs {
  ConvWeights weights;
  const T* x;  // [tokens, features]
  T* out;
};

// `keep` owns what the arguments point to. A late thread may read it after the call.
//
// Raises IndexError, before anything is written, for an entry that is out of range.
void run_recurrence(const RecurrenceArgs& args, const StateStep& step,
                    std::shared_ptr<const void> keep);
template <class T>
void run_causal_conv(const ConvArgs<T>& args, const StateStep& step,
                     std::shared_ptr<const void> keep);

}  // namespace stepgraph
