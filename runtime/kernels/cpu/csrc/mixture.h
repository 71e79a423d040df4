// A mixture of experts as phases of a job (`phases.h`), over packed weights:
//
//     logits of the router | choice of each row | pairs by expert | gate, up, activation | down + sum
//
// A pair is a row and one of its experts. Pairs are sorted by expert, so that the weights of an expert
// that is chosen are read once for all of its rows; other experts' weights are not read. Gate and up work
// on tiles: up to kGroupRows pairs of an expert, times a block of columns. Down works on a block of
// columns for all experts of some rows, since it sums what they give: in the order of the experts,
// which depends on nothing but the row. Padding chooses no expert, and its sum is zero.
//
// Each mixture of a step has memory of its own for its pairs: a late thread (`phases.h`) may read it
// while others are in a later layer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "linear.h"
#include "routing.h"
#include "stack_math.h"

namespace stepgraph {

constexpr int64_t kSummedRows = 4 * kGroupRows;  // rows of a unit that sums experts
constexpr int64_t kRouterExperts = 8;            // experts of a unit of the router
constexpr int64_t kMixtureRowsPerUnit = 8;       // rows of a unit that chooses experts
constexpr int64_t kFewMixtureRows = 16;          // up to this many are routed and sorted in one unit
constexpr int kMixturePhases = 5;
constexpr int64_t kMixtureInputPhases = 3;  // of few rows, which read the inputs: up to gate and up

// See `Experts` in `ops/experts.py`. After the routed experts come the shared ones.
struct Mixture {
  const void* router;       // [routed, hidden] of the model's type
  const void* router_bias;  // [routed] of the model's type, or null
  const float* correction;  // [routed], or null
  const float* expert_scales;  // [routed], factors of the weights of chosen experts, or null
  Weights gate_up;          // of one gate; its up follows, then the gate of the next expert
  Weights down;             // of one expert; all experts follow one another
  int64_t hidden, inner, shared;
  Routing routing;
  Activation activation;
  bool scaled_inputs;  // scores multiply the input of an expert, not its output

  int64_t total() const { return routing.experts + shared; }
  int64_t per_token() const { return routing.top_k + shared; }
  // Bytes of weights that one token reads, the router's apart.
  int64_t token_bytes() const {
    return per_token() * (2 * bytes_of(gate_up) + bytes_of(down));
  }
  // The most tiles of `tokens` tokens.
  int64_t most_tiles(int64_t tokens) const {
    const int64_t pairs = tokens * per_token();
    return std::min(total(), pairs) + pairs / kGroupRows;
  }
  // Units of the largest phase.
  int64_t units(int64_t tokens) const {
    const int64_t groups = (tokens + kSummedRows - 1) / kSummedRows;
    return std::max({(routing.experts + kRouterExperts - 1) / kRouterExperts * row_groups(tokens),
                     (tokens + kMixtureRowsPerUnit - 1) / kMixtureRowsPerUnit,
                     most_tiles(tokens) * gate_up.blocks(), down.blocks() * groups});
  }
};

// The matrices of equal shape and formats that follow one another.
template <class T>
Weights nth(Weights weights, int64_t index) {
  weights.packed += index * bytes_of(weights);
  if (weights.bias != nullptr) {
    weights.bias = static_cast<const T*>(weights.bias) + index * weights.columns;
  }
  return weights;
}

// The pairs of a mixture, sorted by expert and then by row.
struct ExpertPairs {
  int32_t* begin;       // [total + 1] first pair of each expert
  int32_t* first_tile;  // [total + 1] likewise, first tile
  int32_t* rows;        // [pairs]
  float* weights;       // [pairs]

  static int64_t words(const Mixture& mixture, int64_t tokens) {
    return 2 * (mixture.total() + 1) + 2 * tokens * mixture.per_token();
  }
  ExpertPairs(int32_t* memory, const Mixture& mixture, int64_t tokens)
      : begin(memory),
        first_tile(begin + mixture.total() + 1),
        rows(first_tile + mixture.total() + 1),
        weights(reinterpret_cast<float*>(rows + tokens * mixture.per_token())) {}
};

// Where the mixtures of a step work, in words from the start of their memory. Mixtures that run one
// after another share all but their pairs.
struct MixtureLayout {
  int64_t logits = 0, experts = 0, weights = 0, inner = 0, scratch = 0, gathered = 0, sums = 0;
  int64_t pairs = 0, pairs_stride = 0, own = 0, own_stride = 0, total = 0;

  // Makes room for one more mixture. Afterwards `finish` once.
  void add(const Mixture& mixture, int64_t tokens, int64_t element_bytes) {
    const auto most = [](int64_t& size, int64_t own) { size = std::max(size, (own + 15) / 16 * 16); };
    const int64_t pairs_of_tokens = tokens * mixture.per_token();
    most(logits, tokens * mixture.routing.experts);
    most(experts, pairs_of_tokens);
    most(weights, pairs_of_tokens);
    most(inner, pairs_of_tokens * padded(mixture.inner) * element_bytes / 4);
    most(pairs_stride, ExpertPairs::words(mixture, tokens));
    most(scratch, mixture.routing.scratch_words());
    most(gathered, std::min(tokens, kGroupRows) * padded(mixture.hidden) * element_bytes / 4);
    most(sums, std::min(tokens, kSummedRows) * kBlock);
    pairs += 1;
  }

  // Sizes become places.
  void finish(int threads) {
    const auto take = [&](int64_t& size) {
      total += size;
      size = total - size;
    };
    const int64_t count = pairs, scratch_size = scratch, gathered_size = gathered;
    for (int64_t* size : {&logits, &experts, &weights, &inner}) take(*size);
    pairs = total;
    total += count * pairs_stride;
    own = total;
    own_stride = scratch + gathered + sums;
    scratch = 0;
    gathered = scratch_size;
    sums = scratch_size + gathered_size;
    total += threads * own_stride;
  }
};

// A mixture as an operator of its own.
template <class T>
struct MixtureArgs {
  Mixture mixture;
  const T* x;          // [tokens, hidden], rows x_stride apart, an even number
  const T* router_x;   // likewise, what the router reads: x, or other inputs
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

}  // namespace stepgraph
