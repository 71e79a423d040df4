// A mixture of experts as an operator of its own.
#pragma once

#include <memory>

#include "mixture.h"

namespace stepgraph {

template <class T>
struct MixtureArgs {
  Mixture mixture;
  const T* x;          // [tokens, hidden], rows x_stride apart, an even number
  int64_t x_stride;
  const bool* live;    // [tokens], false for padding; null: there is none
  T* out;              // [tokens, hidden], contiguous
  int64_t tokens;
  int threads;
};

// out = the weighted sum of the experts of each row; 0 for padding. `keep` owns what the arguments
// point to. A late thread may read it after the call.
template <class T>
void run_mixture(const MixtureArgs<T>& args, std::shared_ptr<const void> keep);

// Drops what late threads may have read after earlier calls, as far as they have left.
void sweep_mixture_jobs();

}  // namespace stepgraph
