// What the registration in `ops.cpp` asks of the kernels. Plain pointers and sizes: the kernels
// themselves know no tensors. Strides are in elements.
#pragma once

#include <cstdint>
#include <memory>

#include "vec.h"

namespace stepgraph {

struct PackedHeader;

// A packed weight and what is applied to its sums. Pointers are the owner's.
struct Weights {
  const PackedHeader* header = nullptr;  // see `codes.h`; of the first of several matrices
  const char* packed = nullptr;          // begins with a header
  const void* bias = nullptr;            // [columns] of the model's type, or null
  int64_t columns = 0;

  int64_t blocks() const { return (columns + kBlock - 1) / kBlock; }
};

// out[t, n] = sum_k x[t, k] * weight[n, k] + bias[n], weight packed as `pack_parts` does.
template <class T>
struct LinearArgs {
  Weights weights;
  const T* x;        // [rows, k], last dimension dense; an odd k is followed by a zero
  int64_t x_stride;  // from row to row
  T* out;            // [rows, columns], contiguous
  int64_t rows;
  int threads;
};

// `keep` owns what the arguments point to. A late thread may read it after the call.
template <class T>
void packed_linear(const LinearArgs<T>& args, std::shared_ptr<const void> keep);

// How the arena stores vectors; see `storage.h`.
enum class Storage { kModel, kInt8, kFp8 };

// What paged attention is over, the same for all layers of a step that share a block table and a
// window. See `attention.py` for the meaning.
struct AttentionStep {
  const int64_t* slots;        // [tokens]
  const int32_t* block_tables; // [.., max_blocks]
  int64_t max_blocks;
  const int64_t* token_rows;   // [tokens]
  const int64_t* positions;    // [tokens]
  int64_t tokens, heads, kv_heads, head_dim, value_dim, num_blocks, block_size;
  int64_t window;              // positions that a token sees, itself included; 0: all
  int64_t chunk;               // positions of a chunk; a token sees its own chunk only; 0: all
  int64_t element_bytes;       // of the model's type
  Storage storage;
  int threads;                 // that use a plan of this step at most
};

// One layer's tensors; the arena is written first.
template <class T>
struct AttentionArgs {
  const T* q;                  // [tokens, heads, head_dim], last dimension dense, as k and v
  const T* k;                  // [tokens, kv_heads, head_dim]; null: the arena has all of them
  const T* v;                  // likewise, or null: values are the first value_dim of the keys
  int64_t q_strides[2], k_strides[2], v_strides[2];  // token, head
  uint8_t* keys;               // one side of a layer: [num_blocks, kv_heads, bytes of a head]
  uint8_t* values;             // likewise; without v the keys
  T* out;                      // [tokens, heads, value_dim], contiguous
  float scale, softcap;        // softcap 0: none
  const T* sinks = nullptr;    // [heads] a softmax logit without a value; or null
};

// How a step's attention is cut into work, and the work space for it (`attention_plan.h`). One
// plan serves all layers whose step is the same, one after another.
class AttentionPlan;
class Phases;

// Attention as a phase of a job, over an arena that holds the keys and values of the step. `index`
// is that of the thread.
template <class T>
void attend(const AttentionArgs<T>& args, AttentionPlan& plan, Phases& phases, int64_t phase,
            int64_t index);

// Writes keys (or values) of one kv head of the tokens first ... first + count - 1 to the arena.
template <class T>
void store_head(const AttentionArgs<T>& args, const AttentionStep& step, bool values, int64_t head,
                int64_t first, int64_t count);

// Stores the keys and values of a step, and attends. `keep` owns what the arguments point to. A late
// thread may read it after the call.
//
// Raises IndexError if a block that will be read is not of the arena.
template <class T>
void paged_attention(const AttentionArgs<T>& args, const AttentionStep& step,
                     std::shared_ptr<const void> keep);

}  // namespace stepgraph
