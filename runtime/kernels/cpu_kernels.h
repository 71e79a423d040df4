// What the registration in `cpu_ops.cpp` asks of the kernels. Plain pointers and sizes: the kernels
// themselves know no tensors. Strides are in elements.
#pragma once

#include <cstdint>

namespace stepgraph {

// out[t, n] = sum_k x[t, k] * weight[n, k] + bias[n], weight packed as `pack_linear` does.
template <class T>
struct LinearArgs {
  const T* x;           // [rows, k], last dimension dense; k even for bf16
  int64_t x_stride;     // from row to row
  const void* packed;   // [ceil(columns / 32)][steps][32] words
  const T* bias;        // [columns] or null
  T* out;               // [rows, columns], contiguous
  int64_t rows, columns;
  int64_t steps;        // words in a row of x
  int threads;
};

template <class T>
void packed_linear(const LinearArgs<T>& args);

// Paged attention over one layer; the arena is written first. See `attention.py` for the meaning.
template <class T>
struct AttentionArgs {
  const T* q;                  // [tokens, heads, head_dim], last dimension dense, as k and v
  const T* k;                  // [tokens, kv_heads, head_dim]
  const T* v;
  int64_t q_strides[2], k_strides[2], v_strides[2];  // token, head
  T* keys;                     // [num_blocks, kv_heads, block_size, head_dim], contiguous
  T* values;                   // likewise
  const int64_t* slots;        // [tokens]
  const int32_t* block_tables; // [.., max_blocks]
  int64_t max_blocks;
  const int64_t* token_rows;   // [tokens]
  const int64_t* positions;    // [tokens]
  T* out;                      // [tokens, heads, head_dim], contiguous
  int64_t tokens, heads, kv_heads, head_dim, num_blocks, block_size;
  float scale;
  int threads;
};

template <class T>
void paged_attention(const AttentionArgs<T>& args);

}  // namespace stepgraph
