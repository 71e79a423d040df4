// The CPU kernels as implementations of `torch.ops.stepgraph.*`. Schemas are declared in Python
// (`attention.py`, `linear.py`); here arguments are checked and tensors become pointers.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu_kernels.h"
#include "cpu_sampling_ops.h"

namespace stepgraph {
namespace {

constexpr int64_t kBlockColumns = 32;

int threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

template <class T>
void run_linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor* bias,
                at::Tensor& out, int64_t steps) {
  packed_linear(LinearArgs<T>{x.const_data_ptr<T>(), x.stride(0), packed.const_data_ptr(),
                              bias == nullptr ? nullptr : bias->const_data_ptr<T>(),
                              out.mutable_data_ptr<T>(), x.size(0), out.size(1), steps, threads()});
}

at::Tensor packed_linear_cpu(const at::Tensor& x, const at::Tensor& packed,
                             const std::optional<at::Tensor>& bias, int64_t out_features) {
  TORCH_CHECK(x.dim() == 2, "packed_linear: x is [tokens, in_features], got ", x.dim(), " dimensions");
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat,
              "packed_linear: bfloat16 or float32 expected, x is ", x.scalar_type());
  const int64_t per_word = x.scalar_type() == at::kBFloat16 ? 2 : 1;
  const int64_t steps = (x.size(1) + per_word - 1) / per_word;
  TORCH_CHECK(packed.scalar_type() == x.scalar_type() && packed.is_contiguous() &&
                  packed.dim() == 4 && packed.size(1) == steps && packed.size(2) == kBlockColumns &&
                  packed.size(3) == per_word && out_features > (packed.size(0) - 1) * kBlockColumns &&
                  out_features <= packed.size(0) * kBlockColumns,
              "packed_linear: packed weight ", packed.sizes(), " of ", packed.scalar_type(),
              " does not fit x ", x.sizes(), " of ", x.scalar_type(), " and out_features ",
              out_features, "; pack the weight with pack_linear in the dtype of x");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == out_features &&
                        bias->scalar_type() == x.scalar_type() && bias->is_contiguous()),
              "packed_linear: bias is a contiguous [", out_features, "] of ", x.scalar_type());
  at::Tensor out = at::empty({x.size(0), out_features}, x.options());
  // The kernel reads whole words, so an odd last element gets a zero beside it.
  at::Tensor padded;
  const at::Tensor* input = &x;
  if (x.size(1) % per_word != 0) {
    padded = at::constant_pad_nd(x, {0, 1}).contiguous();
    input = &padded;
  } else if (x.stride(1) != 1 || x.stride(0) % per_word != 0) {
    padded = x.contiguous();
    input = &padded;
  }
  const at::Tensor* added = bias ? &*bias : nullptr;
  if (per_word == 2) {
    run_linear<at::BFloat16>(*input, packed, added, out, steps);
  } else {
    run_linear<float>(*input, packed, added, out, steps);
  }
  return out;
}

void check_index(const at::Tensor& index, at::ScalarType dtype, int64_t tokens, int64_t end,
                 const char* name) {
  TORCH_CHECK(index.scalar_type() == dtype && index.is_contiguous() && index.dim() == 1 &&
                  index.size(0) == tokens,
              "paged_attention: ", name, " is a contiguous [", tokens, "] of ", dtype);
  const int64_t* value = index.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    TORCH_CHECK_INDEX(0 <= value[t] && value[t] < end, "paged_attention: ", name, "[", t, "] is ",
                      value[t], ", outside 0 ... ", end - 1);
  }
}

Storage storage_named(std::string_view name) {
  if (name == "model") return Storage::kModel;
  if (name == "int8") return Storage::kInt8;
  TORCH_CHECK(name == "fp8", "paged_attention: storage is model, int8 or fp8, got '", name, "'");
  return Storage::kFp8;
}

// The arena is [layers, sides, num_blocks, kv_heads, block_size, head_dim] of the dtype of q, or
// bytes [.., block_size * (head_dim + 2)]; one side without v.
void check_arena(const at::Tensor& arena, const at::Tensor& q, int64_t sides, int64_t kv_heads,
                 int64_t block_size, Storage storage) {
  const int64_t head_dim = q.size(2);
  TORCH_CHECK(block_size > 0, "paged_attention: block_size is ", block_size,
              ", 1 or more expected");
  if (storage == Storage::kModel) {
    TORCH_CHECK(arena.scalar_type() == q.scalar_type(),
                "paged_attention: q, k, v and arena share one dtype; got ", q.scalar_type(),
                " and an arena of ", arena.scalar_type());
    TORCH_CHECK(arena.dim() == 6 && arena.is_contiguous() && arena.size(1) == sides &&
                    arena.size(3) == kv_heads && arena.size(4) == block_size &&
                    arena.size(5) == head_dim,
                "paged_attention: arena is a contiguous [layers, ", sides, ", num_blocks, ",
                kv_heads, ", ", block_size, ", ", head_dim, "], got ", arena.sizes());
    return;
  }
  TORCH_CHECK(head_dim % 2 == 0,
              "paged_attention: quantised storage asks for an even head_dim, got ", head_dim);
  const int64_t bytes = block_size * (head_dim + 2);
  TORCH_CHECK(arena.scalar_type() == at::kByte && arena.dim() == 5 && arena.is_contiguous() &&
                  arena.size(1) == sides && arena.size(3) == kv_heads && arena.size(4) == bytes,
              "paged_attention: a quantised arena is a contiguous uint8 [layers, ", sides,
              ", num_blocks, ", kv_heads, ", ", bytes, "], got ", arena.sizes(), " of ",
              arena.scalar_type());
}

at::Tensor paged_attention_cpu(const at::Tensor& q, const at::Tensor& k,
                               const std::optional<at::Tensor>& v, at::Tensor& arena, int64_t layer,
                               const at::Tensor& slots, const at::Tensor& block_tables,
                               const at::Tensor& token_rows, const at::Tensor& /*rows*/,
                               const at::Tensor& positions, int64_t read_blocks, int64_t block_size,
                               double scale, int64_t window, double softcap,
                               std::string_view storage_name, int64_t value_dim) {
  const Storage storage = storage_named(storage_name);
  TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && (!v || v->dim() == 3),
              "paged_attention: q, k, v are [tokens, heads, head_dim]; got ", q.sizes(), ", ",
              k.sizes(), v ? ", " : "", v ? v->sizes() : at::IntArrayRef());
  const int64_t tokens = q.size(0), kv_heads = k.size(1), head_dim = q.size(2);
  TORCH_CHECK((!v || k.sizes() == v->sizes()) && k.size(0) == tokens && k.size(2) == head_dim &&
                  kv_heads > 0 && q.size(1) % kv_heads == 0,
              "paged_attention: q ", q.sizes(), ", k ", k.sizes(), " and v ",
              v ? v->sizes() : at::IntArrayRef(), " do not fit together");
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && (!v || q.scalar_type() == v->scalar_type()),
              "paged_attention: q, k, v and arena share one dtype; got ", q.scalar_type(), ", ",
              k.scalar_type(), ", ", v ? v->scalar_type() : q.scalar_type());
  TORCH_CHECK(v ? value_dim == head_dim : 0 < value_dim && value_dim <= head_dim,
              "paged_attention: value_dim is ", value_dim, v ? ", that of v is " : ", keys have ",
              head_dim);
  TORCH_CHECK(window >= 0 && softcap >= 0, "paged_attention: window ", window, " and softcap ",
              softcap, " are 0 (none) or more");
  check_arena(arena, q, v ? 2 : 1, kv_heads, block_size, storage);
  const int64_t num_blocks = arena.size(2);
  TORCH_CHECK(block_tables.dim() == 2 && block_tables.scalar_type() == at::kInt &&
                  block_tables.is_contiguous() && 0 < read_blocks &&
                  read_blocks <= block_tables.size(1),
              "paged_attention: block_tables is a contiguous int32 [rows, max_blocks] with "
              "read_blocks in 1 ... max_blocks; got ", block_tables.sizes(), " of ",
              block_tables.scalar_type(), " and ", read_blocks);
  TORCH_CHECK_INDEX(0 <= layer && layer < arena.size(0), "paged_attention: layer ", layer,
                    " of an arena of ", arena.size(0), " layers");
  check_index(slots, at::kLong, tokens, num_blocks * block_size, "slots");
  check_index(token_rows, at::kLong, tokens, block_tables.size(0), "token_rows");
  check_index(positions, at::kLong, tokens, read_blocks * block_size, "positions");
  at::Tensor out = at::empty({tokens, q.size(1), value_dim}, q.options());

  const auto dense = [](const at::Tensor& x) { return x.stride(2) == 1 ? x : x.contiguous(); };
  const at::Tensor queries = dense(q), new_keys = dense(k), new_values = v ? dense(*v) : new_keys;
  uint8_t* keys = static_cast<uint8_t*>(arena.mutable_data_ptr()) +
                  layer * arena.stride(0) * arena.element_size();
  const auto run = [&]<class T>(T) {
    paged_attention(AttentionArgs<T>{
        queries.const_data_ptr<T>(), new_keys.const_data_ptr<T>(),
        v ? new_values.const_data_ptr<T>() : nullptr,
        {queries.stride(0), queries.stride(1)}, {new_keys.stride(0), new_keys.stride(1)},
        {new_values.stride(0), new_values.stride(1)},
        keys, v ? keys + arena.stride(1) * arena.element_size() : keys,
        slots.const_data_ptr<int64_t>(), block_tables.const_data_ptr<int32_t>(),
        block_tables.size(1), token_rows.const_data_ptr<int64_t>(),
        positions.const_data_ptr<int64_t>(), out.mutable_data_ptr<T>(), tokens, q.size(1), kv_heads,
        head_dim, value_dim, num_blocks, block_size, window, static_cast<float>(scale),
        static_cast<float>(softcap), storage, threads()});
  };
  switch (q.scalar_type()) {
    case at::kBFloat16: run(at::BFloat16()); break;
    case at::kHalf: run(at::Half()); break;
    case at::kFloat: run(float()); break;
    default:
      TORCH_CHECK(false, "paged_attention: bfloat16, float16 or float32 expected, got ",
                  q.scalar_type());
  }
  return out;
}

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  library.impl("packed_linear", &stepgraph::packed_linear_cpu);
  library.impl("paged_attention", &stepgraph::paged_attention_cpu);
}
