// Checks of tensors that several operations share; part of `ops.cpp`. Each raises RuntimeError,
// or IndexError for an index out of range, in the name of the operation.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string_view>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include "kernels.h"
#include "pool.h"

namespace stepgraph {

// That an operator may use.
inline int threads() {
  if (at::in_parallel_region()) return 1;
  const int limit = thread_limit();
  return limit > 0 ? limit : at::get_num_threads();
}

inline void check_model_type(const char* op, at::ScalarType dtype) {
  TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kFloat, op,
              ": bfloat16 or float32 expected, got ", dtype);
}

// Calls run(T()) for the type of a model whose weights are packed.
template <class Run>
void for_model_type(const char* op, at::ScalarType dtype, const Run& run) {
  check_model_type(op, dtype);
  if (dtype == at::kBFloat16) run(at::BFloat16());
  else run(float());
}

// The same for float16 as well.
template <class Run>
void for_float_type(const char* op, at::ScalarType dtype, const Run& run) {
  TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat, op,
              ": bfloat16, float16 or float32 expected, got ", dtype);
  if (dtype == at::kHalf) run(at::Half());
  else for_model_type(op, dtype, run);
}

// Objects of the process by handle. T::kKind names one in messages.
template <class T>
class Handles {
 public:
  // Never destroyed: a stack waits for its threads, which a forked child does not have.
  static Handles& instance() {
    static auto* handles = new Handles;
    return *handles;
  }

  int64_t add(std::shared_ptr<T> object) {
    const std::lock_guard<std::mutex> alone(mutex_);
    objects_.emplace(++last_, std::move(object));
    return last_;
  }

  std::shared_ptr<T> remove(const char* op, int64_t handle) {
    const std::lock_guard<std::mutex> alone(mutex_);
    return std::move(objects_.extract(present(op, handle)).mapped());
  }

  std::shared_ptr<T> find(const char* op, int64_t handle) {
    const std::lock_guard<std::mutex> alone(mutex_);
    return present(op, handle)->second;
  }

  std::shared_ptr<T> find(const char* op, const at::Tensor& handle) {
    TORCH_CHECK(handle.scalar_type() == at::kLong && handle.numel() == 1, op, ": the handle of a ",
                T::kKind, " is one int64");
    return find(op, *handle.const_data_ptr<int64_t>());
  }

 private:
  // Under the lock.
  auto present(const char* op, int64_t handle) {
    const auto found = objects_.find(handle);
    TORCH_CHECK(found != objects_.end(), op, ": ", T::kKind, " ", handle,
                " has been destroyed, or never was");
    return found;
  }

  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<T>> objects_;
  int64_t last_ = 0;
};

// That a tensor is contiguous, of a type and of these sizes, where -1 stands for any. `name` may
// have several parts.
template <class... Name>
void check_tensor(const char* op, const at::Tensor& tensor, at::ScalarType dtype,
                  at::IntArrayRef sizes, const Name&... name) {
  bool fits = tensor.scalar_type() == dtype && tensor.is_contiguous() &&
              tensor.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = sizes[i] == -1 || sizes[i] == tensor.size(i);
  }
  TORCH_CHECK(fits, op, ": a contiguous ", sizes, " of ", dtype, " is expected for ", name...,
              ", got ", tensor.sizes(), " of ", tensor.scalar_type(),
              tensor.is_contiguous() ? "" : " that is not contiguous");
}

// Returns the indices.
inline const int64_t* check_index(const char* op, const at::Tensor& index, int64_t count,
                                  int64_t end, const char* name) {
  check_tensor(op, index, at::kLong, {count}, name);
  const int64_t* value = index.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < count; ++t) {
    TORCH_CHECK_INDEX(0 <= value[t] && value[t] < end, op, ": ", name, "[", t, "] is ", value[t],
                      ", outside 0 ... ", end - 1);
  }
  return value;
}

inline Storage storage_named(const char* op, std::string_view name) {
  if (name == "model") return Storage::kModel;
  if (name == "int8") return Storage::kInt8;
  TORCH_CHECK(name == "fp8", op, ": storage is model, int8 or fp8, got '", name, "'");
  return Storage::kFp8;
}

// The arena is [layers, sides, num_blocks, kv_heads, block_size, head_dim] of the dtype of q, or
// bytes [.., block_size * (head_dim + 2)]; one side without v.
inline void check_arena(const char* op, const at::Tensor& arena, at::ScalarType dtype,
                        int64_t sides, int64_t kv_heads, int64_t block_size, int64_t head_dim,
                        Storage storage) {
  TORCH_CHECK(block_size > 0, op, ": block_size is ", block_size, ", 1 or more expected");
  if (storage == Storage::kModel) {
    TORCH_CHECK(arena.scalar_type() == dtype, op, ": q, k, v and arena share one dtype; got ",
                dtype, " and an arena of ", arena.scalar_type());
    TORCH_CHECK(arena.dim() == 6 && arena.is_contiguous() && arena.size(1) == sides &&
                    arena.size(3) == kv_heads && arena.size(4) == block_size &&
                    arena.size(5) == head_dim,
                op, ": arena is a contiguous [layers, ", sides, ", num_blocks, ", kv_heads, ", ",
                block_size, ", ", head_dim, "], got ", arena.sizes());
    return;
  }
  TORCH_CHECK(head_dim % 2 == 0, op, ": quantised storage asks for an even head_dim, got ",
              head_dim);
  const int64_t bytes = block_size * (head_dim + 2);
  TORCH_CHECK(arena.scalar_type() == at::kByte && arena.dim() == 5 && arena.is_contiguous() &&
                  arena.size(1) == sides && arena.size(3) == kv_heads && arena.size(4) == bytes,
              op, ": a quantised arena is a contiguous uint8 [layers, ", sides, ", num_blocks, ",
              kv_heads, ", ", bytes, "], got ", arena.sizes(), " of ", arena.scalar_type());
}

inline void check_tables(const char* op, const at::Tensor& block_tables, int64_t dims,
                         int64_t read_blocks) {
  TORCH_CHECK(block_tables.dim() == dims && block_tables.scalar_type() == at::kInt &&
                  block_tables.is_contiguous() && 0 < read_blocks &&
                  read_blocks <= block_tables.size(dims - 1),
              op, ": block_tables is a contiguous int32 [", dims == 3 ? "groups, " : "",
              "rows, max_blocks] with read_blocks in 1 ... max_blocks; got ",
              block_tables.sizes(), " of ", block_tables.scalar_type(), " and ", read_blocks);
}

}  // namespace stepgraph
