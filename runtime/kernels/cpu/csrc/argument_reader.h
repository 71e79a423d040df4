// Reads the tensors, integers and numbers that describe layers, for the operators over them. Part of
// `ops.cpp`.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include "checks.h"
#include "linear_ops.h"
#include "mixture.h"
#include "stack_math.h"

namespace stepgraph {

// Takes what `OperatorArguments` of `experts_operator.py` lists, one after another, and checks each
// tensor. Errors name the operator.
class ArgumentReader {
 public:
  ArgumentReader(const char* op, const c10::List<std::optional<at::Tensor>>& tensors,
                 at::IntArrayRef integers, c10::ArrayRef<double> numbers, at::ScalarType dtype)
      : op_(op), tensors_(tensors), integers_(integers), numbers_(numbers), dtype_(dtype) {
    check_model_type(op, dtype);
  }

  int64_t integer() { return integers_.at(next_integer_++); }
  bool flag() { return integer() != 0; }
  float number() { return static_cast<float>(numbers_.at(next_number_++)); }

  // [size] of the model's type, or null.
  const void* vector(int64_t size, const char* name) { return dense({size}, name, dtype_); }

  NormWeights norm(int64_t size, const char* name) {
    NormWeights weights;
    weights.weight = vector(size, name);
    weights.eps = number();
    weights.offset = flag();
    return weights;
  }

  // A packed weight [columns, inputs], its scales if it is int8, and its bias. With `count` the first
  // of `count` that follow one another.
  Weights linear(int64_t columns, int64_t inputs, const char* name, int64_t count = 1) {
    const std::optional<at::Tensor> packed = take(), scales = take(), bias = take();
    TORCH_CHECK(packed, op_, ": the weight of ", name, " is missing");
    return packed_weights(op_, name, dtype_, columns, inputs, *packed, scales, bias, count);
  }

  Activation activation() {
    Activation read;
    read.gelu = flag();
    read.limit = number();
    read.alpha = number();
    read.up_offset = number();
    return read;
  }

  Mixture mixture(int64_t hidden) {
    Mixture read{};
    Routing& routing = read.routing;
    read.hidden = hidden;
    routing.experts = integer();
    read.shared = integer();
    read.inner = integer();
    read.scaled_inputs = flag();
    routing.top_k = integer();
    routing.scores = static_cast<Scores>(integer());
    routing.normalised = flag();
    routing.scale = number();
    routing.groups = integer();
    routing.top_groups = integer();
    routing.sums_of_two = flag();
    routing.chooses_by_logits = flag();
    read.router = dense({routing.experts, hidden}, "the router", dtype_);
    TORCH_CHECK(read.router != nullptr, op_, ": the router is missing");
    read.router_bias = vector(routing.experts, "the bias of the router");
    read.correction =
        static_cast<const float*>(dense({routing.experts}, "the correction", at::kFloat));
    read.gate_up = linear(read.inner, hidden, "gate and up of experts", 2 * read.total());
    read.activation = activation();
    read.down = linear(hidden, read.inner, "down of experts", read.total());
    return read;
  }

  // What was read, to be kept as long as the pointers into it.
  std::vector<at::Tensor> finish() {
    TORCH_CHECK(next_ == tensors_.size() && next_integer_ == integers_.size() &&
                    next_number_ == numbers_.size(),
                op_, ": more tensors, integers or numbers than the layers have");
    return std::move(kept_);
  }

 private:
  // A contiguous tensor, or null.
  const void* dense(at::IntArrayRef sizes, const char* name, at::ScalarType dtype) {
    const std::optional<at::Tensor> tensor = take();
    if (!tensor) return nullptr;
    TORCH_CHECK(tensor->scalar_type() == dtype && tensor->is_contiguous() &&
                    tensor->sizes() == sizes,
                op_, ": ", name, " is a contiguous ", sizes, " of ", dtype, ", got ",
                tensor->sizes(), " of ", tensor->scalar_type());
    return tensor->const_data_ptr();
  }

  std::optional<at::Tensor> take() {
    std::optional<at::Tensor> tensor = tensors_.get(next_++);
    if (tensor) kept_.push_back(*tensor);
    return tensor;
  }

  const char* op_;
  const c10::List<std::optional<at::Tensor>>& tensors_;
  at::IntArrayRef integers_;
  c10::ArrayRef<double> numbers_;
  at::ScalarType dtype_;
  size_t next_ = 0, next_integer_ = 0, next_number_ = 0;
  std::vector<at::Tensor> kept_;
};

}  // namespace stepgraph
