// What drafters compute outside of their layers, as `drafted.py` declares it. Plain pointers and
// sizes, as in `kernels.h`.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "stack_math.h"

namespace stepgraph {

// The most likely token after a linear layer, whose outputs are not kept.
template <class T>
struct ChoiceArgs {
  LinearArgs<T> linear;  // without `out`
  int64_t* tokens;       // [rows]: the first of the largest; 0 if one is NaN or all are infinite
  float* probabilities;  // [rows]: likewise
};

// `keep` owns what the arguments point to. A late thread may read it after the call.
template <class T>
void most_likely_after(const ChoiceArgs<T>& args, std::shared_ptr<const void> keep);

// Keys and values of tokens of the context, made of features of the target:
//
//     features -> fuse -> norm -> keys and values of all layers -> norm and rotation of keys -> arena
template <class T>
struct ContextArgs {
  Weights fuse, context;       // context.columns = layers * 2 * kv_heads * head_dim
  NormWeights norm;
  const T* features;           // [tokens, ..], dense rows of whole words
  int64_t features_stride;
  const T* key_norms;          // [layers, head_dim]
  const float *cos, *sin;      // [tokens, head_dim / 2]
  std::vector<uint8_t*> keys;  // of the arena, for each layer
  int64_t side_bytes;          // from the keys of a layer to its values
  AttentionStep step;          // of which `store_head` reads slots, sizes and storage
  T* scratch;                  // context_scratch(args) elements
};

template <class T>
int64_t context_scratch(const ContextArgs<T>& args);

// `keep` as above, the scratch included.
template <class T>
void store_context(const ContextArgs<T>& args, std::shared_ptr<const void> keep);

// As `sweep_linear_jobs`.
void sweep_drafting_jobs();

}  // namespace stepgraph
