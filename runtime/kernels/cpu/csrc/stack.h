// All layers of a decoder as one piece of work: what it is made of, and what a step gives it.
//
// Like `kernels.h` this knows no tensors. Arithmetic and rounding follow the modules in
// `ops/operation.py`; how the work is shared out is explained in `stack_thread.h`.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <variant>
#include <vector>

#include "attention_plan.h"
#include "communicator.h"
#include "kernels.h"
#include "linear.h"
#include "mixture.h"
#include "stack_math.h"
#include "stack_recurrent.h"

namespace stepgraph {

// What ranks exchange of a token whose heads are normed over ranks.
constexpr int64_t kMeansBytes = 2 * sizeof(float);

// Attention, from its input norm to its output projection.
struct AttentionBlock {
  NormWeights embedding_norm;  // where the input is the normed embeddings, then the normed x
  NormWeights input_norm, q_norm, k_norm;
  Weights qkv, output;
  float scale, softcap;       // as in `AttentionArgs`
  const void* sinks;          // [heads] of the model's type, or null
  int64_t temperature_floor;  // of `AttentionTemperature` in `ops/attention.py`; 0: none
  float temperature_scale;
  bool all_heads;             // q_norm and k_norm are of all heads of a token together
  int64_t head_ranks;         // with all_heads: ranks that hold these heads
  std::optional<Weights> gate; // of the input, whose sigmoid multiplies the result
  int64_t position;           // in its layer group: the first coordinate of the arena
  int64_t plan;               // among the stack's plans
  int64_t rope;               // kind of rotation
};

// A gated MLP, or a mixture of them, or both: a shared MLP beside a mixture.
struct MlpBlock {
  NormWeights norm;
  std::optional<Mixture> mixture;
  int64_t mixture_place;      // among the mixtures of the stack
  Weights gate_up, down;      // of the MLP, as what follows
  int64_t inner;              // features; 0: a mixture only
  Activation activation;
  std::optional<Weights> shared_gate;  // [1, hidden], whose sigmoid multiplies the shared MLP

  bool is_shared() const { return mixture.has_value() && inner > 0; }
};

// A recurrence or convolution, from its input norm to its output projection.
struct RecurrentBlock {
  NormWeights norm;
  Weights inputs, output;
  Recurrent recurrent;
};

// One of them, and how its product is added to the hidden states.
struct StackBlock {
  std::variant<AttentionBlock, MlpBlock, RecurrentBlock> product;
  bool summed;                // over ranks, before the output norm
  NormWeights output_norm;
  float factor;
  bool ends_layer;
};

// What layers share a plan of attention by.
struct StackPlan {
  int64_t group, window, chunk;
  bool operator==(const StackPlan&) const = default;
};

struct StackShape {
  int64_t hidden, heads, kv_heads, head_dim;
  Storage storage;

  int64_t query_size() const { return heads * head_dim; }
  int64_t qkv_size() const { return (heads + 2 * kv_heads) * head_dim; }
};

// One step. Everything is dense; T is the model's type.
template <class T>
struct StackStep {
  const T* x;                  // [tokens, hidden]
  const T* embeddings;         // [tokens, hidden], or null: no layer needs them
  T* out;                      // [tokens, hidden]
  T* aux;                      // [aux layers, tokens, hidden]: the outputs of these layers
  T* joined_aux;               // [tokens, aux layers, hidden]: copies of them; or null
  std::vector<int64_t> aux_layers; // ascending
  uint8_t* arena;              // [layers of a group, sides, num_blocks, ...]
  int64_t layer_bytes, side_bytes;
  const int64_t* positions;    // [tokens]
  const int64_t* slots;        // [groups, tokens]
  const int32_t* block_tables; // [groups, rows, max_blocks]
  int64_t rows, max_blocks;
  const int64_t* token_rows;   // [tokens]
  const float *cos, *sin;      // [kinds, tokens, head_dim / 2]
  RowStates states;            // without a recurrent block all null
  int64_t tokens, num_blocks, block_size;
  int threads;
};

class StackJob;

// The stack of one model. Steps of one stack exclude each other.
class Stack {
 public:
  // `communicator` is the rank's; null: no layer sums over ranks. A part has room for a row.
  Stack(const StackShape& shape, std::vector<StackBlock> blocks, std::vector<StackPlan> plans,
        NormWeights norm, Communicator* communicator);
  ~Stack();  // waits for late threads

  // `keep` owns what the step points to. A late thread may read it after the call.
  //
  // Raises IndexError, before anything is written, if a block to read is not of the arena, and
  // std::runtime_error if another rank does not take part.
  template <class T>
  void run(const StackStep<T>& step, std::shared_ptr<const void> keep);

  // Bytes that steps have left allocated for the next ones.
  int64_t workspace_bytes();

  const StackShape& shape() const { return shape_; }
  int64_t layers() const { return layers_; }

  // Whether a block reads the embeddings of the step.
  bool reads_embeddings() const;

  // Whether a block has recurrent state, and the bytes that it needs of a snapshot and of the inputs
  // of a token.
  struct StateSizes {
    int64_t snapshot = 0, token = 0;
  };
  StateSizes state_sizes(int64_t element_bytes) const;

  // Layers of the largest layer group: what the arena has to have.
  int64_t positions() const;

 private:
  friend class StackJob;
  template <class T>
  friend class StackThread;

  // Where the activations of a step lie; elements from the start of the workspace.
  struct Layout {
    int64_t x, normed, qkv, attended, gate, projected, inner, gate_up, shared, shared_gates, own,
        own_size, total;
    int64_t normed_stride;
  };
  Layout layout(int64_t tokens, int threads) const;
  MixtureLayout mixtures(int64_t tokens, int64_t element_bytes, int threads) const;

  // Phases of a step, and units of its largest one that is no attention.
  int64_t phases(int64_t tokens, int64_t element_bytes) const;
  int64_t units(int64_t tokens) const;

  // Sums over ranks of a step of one token.
  int64_t sums() const;
  // Rows of a sum that ranks exchange at once; all, if they have room for them.
  int64_t summed_rows(int64_t tokens, int64_t element_bytes) const;

  // Bytes of weights of an average layer.
  template <class T>
  int64_t layer_bytes() const;

  // Calls visit(block) for all blocks of a type.
  template <class Block, class Visit>
  void each(Visit visit) const {
    for (const StackBlock& block : blocks_) {
      if (const Block* found = std::get_if<Block>(&block.product)) visit(*found);
    }
  }

  StackShape shape_;
  std::vector<StackBlock> blocks_;
  int64_t layers_;
  std::vector<StackPlan> plan_keys_;
  NormWeights norm_;
  Communicator* communicator_;
  std::mutex busy_;
  JobList<StackJob> jobs_;
  JobPointer<StackJob> large_job_;  // for steps that need a large workspace
};

}  // namespace stepgraph
