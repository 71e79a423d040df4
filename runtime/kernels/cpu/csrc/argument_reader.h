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

// Takes what `Arguments` of `operator_arguments.py` lists, one after another, checking each. Errors
// name the operator.
class ArgumentReader {
 public:
  ArgumentReader(const char* op, const c10::List<std::optional<at::Tensor>>& tensors,
                 at::IntArrayRef integers, c10::ArrayRef<double> numbers, at::ScalarType dtype)
      : op_(op), tensors_(tensors), integers_(integers), numbers_(numbers), dtype_(dtype) {
    check_model_type(op, dtype);
  }

  // Of `least` or more.
  int64_t integer(const char* name, int64_t least = 0) {
    TORCH_CHECK(next_integer_ < integers_.size(), op_, ": ", integers_.size(),
                " integers are too few");
    const int64_t value = integers_[next_integer_++];
    TORCH_CHECK(value >= least, op_, ": ", name, " is ", value, ", ", least,
                " or more expected");
    return value;
  }

  float number() {
    TORCH_CHECK(next_number_ < numbers_.size(), op_, ": ", numbers_.size(),
                " numbers are too few");
    return static_cast<float>(numbers_[next_number_++]);
  }

  // A contiguous tensor of the model's type, or null.
  const void* dense(at::IntArrayRef sizes, const char* name) {
    return dense(sizes, name, dtype_);
  }
  const void* vector(int64_t size, const char* name) { return dense({size}, name); }

  // [size] of float32, or null.
  const float* floats(int64_t size, const char* name) {
    return static_cast<const float*>(dense({size}, name, at::kFloat));
  }

  NormWeights norm(int64_t size, const char* name) {
    NormWeights weights;
    weights.weight = vector(size, name);
    weights.eps = number();
    weights.offset = integer(name) != 0;
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
    read.gelu = integer("the activation") != 0;
    read.limit = number();
    read.alpha = number();
    read.up_offset = number();
    return read;
  }

  Mixture mixture(int64_t hidden) {
    Mixture read{};
    Routing& routing = read.routing;
    read.hidden = hidden;
    routing.experts = integer("the number of experts", 1);
    read.shared = integer("the number of shared experts");
    read.inner = integer("the features of an expert", 1);
    read.scaled_inputs = integer("scaled_inputs") != 0;
    routing.top_k = integer("top_k", 1);
    routing.scores = static_cast<Scores>(integer("the scores"));
    routing.normalised = integer("normalised") != 0;
    routing.scale = number();
    routing.groups = integer("the number of groups", 1);
    routing.top_groups = integer("top_groups", 1);
    routing.sums_of_two = integer("the score of a group") != 0;
    routing.chooses_by_logits = integer("chooses_by_logits") != 0;
    TORCH_CHECK(routing.top_k <= routing.experts && routing.experts % routing.groups == 0 &&
                    routing.top_groups <= routing.groups &&
                    (!routing.sums_of_two || routing.experts >= 2 * routing.groups),
                op_, ": ", routing.top_k, " of ", routing.experts, " experts from ",
                routing.top_groups, " of ", routing.groups, " groups cannot be chosen");
    read.router = dense({routing.experts, hidden}, "the router");
    TORCH_CHECK(read.router != nullptr, op_, ": the router is missing");
    read.router_bias = vector(routing.experts, "the bias of the router");
    read.correction = floats(routing.experts, "the correction");
    read.gate_up = linear(read.inner, hidden, "gate and up of experts", 2 * read.total());
    read.activation = activation();
    read.down = linear(hidden, read.inner, "down of experts", read.total());
    return read;
  }

  // What was read, to be kept as long as the pointers into it.
  std::vector<at::Tensor> finish() {
    TORCH_CHECK(next_ == tensors_.size() && next_integer_ == integers_.size() &&
                    next_number_ == numbers_.size(),
                op_, ": ", tensors_.size(), " tensors, ", integers_.size(),
                " integers and ", numbers_.size(), " numbers are too many, the layers have ",
                next_, ", ", next_integer_, " and ", next_number_);
    return std::move(kept_);
  }

 private:
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
    TORCH_CHECK(next_ < tensors_.size(), op_, ": ", tensors_.size(), " tensors are too few");
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
