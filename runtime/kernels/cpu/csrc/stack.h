// All layers of a decoder as one piece of work: what it is made of, and what a step gives it.
//
// Like `kernels.h` this knows no tensors. The arithmetic and every rounding are those of the
// modules in `models/operations.py`; how the work is shared out is explained in `stack_thread.h`.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "linear.h"

namespace stepgraph {

// Weights of norms are of the model's type; null: there is no such norm.
struct StackLayer {
  const void *input_norm, *mlp_norm;
  const void *q_norm, *k_norm;
  const void *attention_output_norm, *mlp_output_norm;
  Weights qkv, output, gate_up, down;
  int64_t position;  // in its layer group: the first coordinate of the arena
  int64_t plan;      // among the stack's plans
  int64_t rope;      // kind of rotation
};

// What layers share a plan of attention by.
struct StackPlan {
  int64_t group, window;
};

struct StackShape {
  int64_t hidden, inner, heads, kv_heads, head_dim;
  float eps, scale, softcap;
  bool offset_norms;  // multiply by one plus the weight, in float
  bool gelu;          // tanh's approximation of it; else silu
  Storage storage;

  int64_t query_size() const { return heads * head_dim; }
  int64_t qkv_size() const { return (heads + 2 * kv_heads) * head_dim; }
};

// One step. Everything is dense; T is the model's type.
template <class T>
struct StackStep {
  const T* x;                  // [tokens, hidden]
  T* out;                      // [tokens, hidden]
  uint8_t* arena;              // [layers of a group, sides, num_blocks, ...]
  int64_t layer_bytes, side_bytes;
  const int64_t* positions;    // [tokens]
  const int64_t* slots;        // [groups, tokens]
  const int32_t* block_tables; // [groups, rows, max_blocks]
  int64_t rows, max_blocks;
  const int64_t* token_rows;   // [tokens]
  const float *cos, *sin;      // [kinds, tokens, head_dim / 2]
  int64_t tokens, num_blocks, block_size;
  int threads;
};

class StackJob;

// The stack of one model. Steps of one stack exclude each other.
class Stack {
 public:
  Stack(const StackShape& shape, std::vector<StackLayer> layers, std::vector<StackPlan> plans,
        const void* norm);
  ~Stack();  // waits for late threads

  // `keep` owns what the step points to. A late thread may read it after the call.
  //
  // Raises IndexError, before anything is written, if a block to read is not of the arena.
  template <class T>
  void run(const StackStep<T>& step, std::shared_ptr<const void> keep);

  // Bytes that steps of up to so many tokens keep at most: activations, and what attention needs.
  int64_t workspace_bytes(int64_t tokens, int64_t element_bytes, int threads) const;

  const StackShape& shape() const { return shape_; }

  // Layers of the largest layer group: what the arena has to have.
  int64_t positions() const;

 private:
  friend class StackJob;
  template <class T>
  friend class StackThread;

  // Where the activations of a step lie; elements from the start of the workspace.
  struct Layout {
    int64_t x, normed, qkv, attended, projected, inner, gate_up, own, own_size, total;
    int64_t normed_stride, inner_stride;
  };
  Layout layout(int64_t tokens, int threads) const;

  // Phases of a step, and units of its largest one that is no attention.
  int64_t phases() const;
  int64_t units(int64_t tokens) const;

  StackShape shape_;
  std::vector<StackLayer> layers_;
  std::vector<StackPlan> plan_keys_;
  const void* norm_;
  bool output_norms_;
  std::mutex busy_;
  JobList<StackJob> jobs_;
  std::unique_ptr<StackJob> large_job_;  // for steps that need a large workspace
};

}  // namespace stepgraph
