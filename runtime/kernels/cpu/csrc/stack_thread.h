// What the threads of a step of all layers (`stack.cpp`) do.
//
// A layer is five phases (`phases.h`):
//
//     qkv | attention | output + residual | gate, up, activation | down + residual
//
// What follows a linear layer is done to the sums of a unit before they are published. Queries and
// keys are normed and rotated, and keys and values stored, by the thread that publishes the last
// block of their head. Norms come before a linear layer: for the few rows of a decode step every
// thread norms all of them for itself, which costs less than a phase; of more rows they are a phase.
// So are norms of outputs, and gates and ups whose columns do not share out in blocks.
#pragma once

#include <variant>

#include "stack.h"
#include "stack_math.h"

namespace stepgraph {

constexpr int64_t kOwnRows = 16;  // up to so many rows are normed by every thread for itself
// Below this a layer's second thread costs more than it brings: bytes of weights, times the tiles
// of rows that pass over them.
constexpr int64_t kLayerBytesPerThread = 128 * 1024;
constexpr int kMostPhases = 10;        // of a layer
constexpr int64_t kRowsPerUnit = 8;    // of phases that work on rows
// Steps of more tokens wait for late threads: a second workspace of theirs would be large.
constexpr int64_t kMostLateTokens = kGroupRows;

// Elements from row to row of what a linear layer reads: a cache line more than the row takes, so
// that the rows of a tile do not fall into the same set of the first cache.
inline int64_t padded(int64_t columns) { return (columns + kBlock - 1) / kBlock * kBlock + kBlock; }

template <class T>
int64_t bytes_of(const Weights& weights) {
  return weights.blocks() * block_bytes<T>(weights);
}

// Blocks of columns that a head has a part in, when heads of `size` lie one after another.
inline int64_t blocks_of_head(int64_t head, int64_t size) {
  return ((head + 1) * size - 1) / kBlock - head * size / kBlock + 1;
}

// A step, and what its threads work in.
class StackJob : public Job {
 public:
  explicit StackJob(Stack& stack) : stack_(stack), plans_(stack.plan_keys_.size()) {}

  template <class T>
  void prepare(const StackStep<T>& step, std::shared_ptr<const void> keep);

  int threads() const { return phases_.threads(); }

 protected:
  void work(int64_t index) override;
  void clear() override { keep_.reset(); }

 private:
  template <class T>
  friend class StackThread;

  Stack& stack_;
  std::variant<StackStep<c10::BFloat16>, StackStep<float>> step_;
  std::shared_ptr<const void> keep_;
  std::vector<AttentionPlan> plans_;
  AttentionSpace attention_space_;  // of all plans
  Stack::Layout at_;
  WorkSpace workspace_;
  Phases phases_;
  // Blocks of qkv that are not done yet in the layer: [heads][groups of rows].
  std::unique_ptr<std::atomic<int64_t>[]> blocks_left_;
  int64_t counted_ = 0;
};

// What one thread does in a step.
template <class T>
class StackThread {
 public:
  StackThread(StackJob& job, const StackStep<T>& step, int64_t index)
      : job_(job), stack_(job.stack_), shape_(stack_.shape_), step_(step), at_(job.at_),
        phases_(job.phases_), workspace_(reinterpret_cast<T*>(job.workspace_.get())),
        index_(index) {}

  void run() {
    const T* x = step_.x;
    T* residual = workspace_ + at_.x;
    const size_t layers = stack_.layers_.size();
    for (size_t i = 0; i < layers; ++i) {
      const StackLayer& layer = stack_.layers_[i];
      attention(layer, x);
      add_linear(layer.output, workspace_ + at_.attended, shape_.query_size(), layer.gate_up,
                 layer.attention_output_norm, x, residual);
      x = residual;
      mlp(layer, x);
      const StackLayer& next = i + 1 < layers ? stack_.layers_[i + 1] : stack_.layers_.front();
      add_linear(layer.down, workspace_ + at_.inner, at_.inner_stride, next.qkv,
                 layer.mlp_output_norm, x, residual);
    }
    each_row([&](int64_t t) {
      norm(x + t * shape_.hidden, stack_.norm_, shape_.hidden, step_.out + t * shape_.hidden);
    });
  }

 private:
  // A phase that calls visit(row) for all rows.
  template <class Visit>
  void each_row(Visit visit) {
    const int64_t units = (step_.tokens + kRowsPerUnit - 1) / kRowsPerUnit;
    phases_.run(phase_++, units, [&](int64_t unit) {
      const int64_t end = std::min(step_.tokens, (unit + 1) * kRowsPerUnit);
      for (int64_t t = unit * kRowsPerUnit; t < end; ++t) visit(t);
    });
  }

  void norm(const T* x, const void* weight, int64_t size, T* out) const {
    norm_row<T>(x, static_cast<const T*>(weight), size, shape_.eps, shape_.offset_norms, nullptr,
                out);
  }

  // All rows normed, `normed_stride` apart, for the phase that comes next.
  const T* normed(const T* x, const void* weight) {
    const bool own = step_.tokens <= kOwnRows;
    T* out = workspace_ + (own ? at_.own + index_ * at_.own_size : at_.normed);
    const auto row = [&](int64_t t) {
      T* place = out + t * at_.normed_stride;
      norm(x + t * shape_.hidden, weight, shape_.hidden, place);
      if (shape_.hidden % 2 != 0) place[shape_.hidden] = T(0.0f);  // read as half of a word
    };
    if (!own) {
      each_row(row);
    } else if (!phases_.over(phase_)) {
      for (int64_t t = 0; t < step_.tokens; ++t) row(t);
    }
    return out;
  }

  // What this thread probably begins with of a linear layer to come.
  const char* begin_of(const Weights& weights) const {
    const int64_t block = std::min(index_, weights.blocks() - 1);
    return weights.packed + block_bytes<T>(weights) * block;
  }

  // Rounded sums of some rows of a block to `out`, rows `stride` apart.
  static void put_sums(const float* sums, int64_t rows, int64_t columns, T* out, int64_t stride) {
    for (int64_t m = 0; m < rows; ++m, sums += kBlock, out += stride) {
      if (columns >= kBlock) {
        Element<T>::store32_in_order(out, load<F32x16>(sums), load<F32x16>(sums + 16));
      } else {
        for (int64_t c = 0; c < columns; c += 16) put(out + c, load<F32x16>(sums + c), columns - c);
      }
    }
  }

  // publish(block, first row, rows, sums)
  template <class Publish>
  void linear(const Weights& weights, const T* x, int64_t x_stride, const Weights& next,
              Publish publish) {
    linear_phase(phases_, phase_++, weights, x, x_stride, step_.tokens, begin_of(next), sums_,
                 publish);
  }

  // The same to `out`, rows one after another.
  void linear_to(const Weights& weights, const T* x, int64_t x_stride, const Weights& next,
                 T* out) {
    linear(weights, x, x_stride, next,
           [&](int64_t block, int64_t row, int64_t rows, const float* sums) {
             put_sums(sums, rows, weights.columns - block * kBlock,
                      out + row * weights.columns + block * kBlock, weights.columns);
           });
  }

  void attention(const StackLayer& layer, const T* x) {
    T* qkv = workspace_ + at_.qkv;
    const int64_t size = shape_.qkv_size(), d = shape_.head_dim;
    uint8_t* keys = step_.arena + layer.position * step_.layer_bytes;
    const AttentionArgs<T> args{qkv, qkv + shape_.query_size(),
                                qkv + shape_.query_size() + shape_.kv_heads * d,
                                {size, d}, {size, d}, {size, d}, keys, keys + step_.side_bytes,
                                workspace_ + at_.attended, shape_.scale, shape_.softcap};
    AttentionPlan& plan = job_.plans_[layer.plan];
    const int64_t groups = row_groups(step_.tokens);
    linear(layer.qkv, normed(x, layer.input_norm), at_.normed_stride, layer.output,
           [&](int64_t block, int64_t row, int64_t rows, const float* sums) {
             const int64_t begin = block * kBlock, end = std::min(begin + kBlock, size);
             put_sums(sums, rows, end - begin, qkv + row * size + begin, size);
             for (int64_t head = begin / d; head * d < end; ++head) {
               auto& left = job_.blocks_left_[head * groups + row / kGroupRows];
               if (phases_.threads() == 1) {
                 if ((head + 1) * d <= end) finish_head(layer, args, plan.step, head, row, rows);
               } else if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                 left.store(blocks_of_head(head, d), std::memory_order_relaxed);
                 finish_head(layer, args, plan.step, head, row, rows);
               }
             }
           });
    attend(args, plan, phases_, phase_++, index_);
  }

  // Of rows whose projections are all there: queries and keys are normed and rotated, keys and
  // values stored.
  void finish_head(const StackLayer& layer, const AttentionArgs<T>& args, const AttentionStep& step,
                   int64_t head, int64_t row, int64_t rows) const {
    const int64_t d = shape_.head_dim, rotated = shape_.heads + shape_.kv_heads;
    if (head < rotated) {
      const void* weight = head < shape_.heads ? layer.q_norm : layer.k_norm;
      for (int64_t t = row; t < row + rows; ++t) {
        T* vector = workspace_ + at_.qkv + t * shape_.qkv_size() + head * d;
        if (weight != nullptr) norm(vector, weight, d, vector);
        const int64_t angles = (layer.rope * step_.tokens + t) * (d / 2);
        rotate_row(vector, step_.cos + angles, step_.sin + angles, d / 2);
      }
    }
    if (head < shape_.heads) return;
    const bool values = head >= rotated;
    store_head(args, step, values, head - (values ? rotated : shape_.heads), row, rows);
  }

  // residual = x + linear layer, which an output norm may follow.
  void add_linear(const Weights& weights, const T* inputs, int64_t stride, const Weights& next,
                  const void* output_norm, const T* x, T* residual) {
    const int64_t hidden = shape_.hidden;
    if (output_norm != nullptr) {
      T* projected = workspace_ + at_.projected;
      linear_to(weights, inputs, stride, next, projected);
      each_row([&](int64_t t) {
        norm_row<T>(projected + t * hidden, static_cast<const T*>(output_norm), hidden, shape_.eps,
                    shape_.offset_norms, x + t * hidden, residual + t * hidden);
      });
      return;
    }
    linear(weights, inputs, stride, next,
           [&](int64_t block, int64_t row, int64_t rows, const float* sums) {
             const int64_t columns = std::min<int64_t>(hidden - block * kBlock, kBlock);
             int64_t at = row * hidden + block * kBlock;
             if (columns == kBlock) {
               for (int64_t m = 0; m < rows; ++m, sums += kBlock, at += hidden) {
                 const auto half = [&](int64_t c) {
                   return floats_of(x + at, c, kBlock) + rounded<T>(load<F32x16>(sums + c));
                 };
                 Element<T>::store32_in_order(residual + at, half(0), half(16));
               }
               return;
             }
             for (int64_t m = 0; m < rows; ++m, sums += kBlock, at += hidden) {
               for (int64_t c = 0; c < columns; c += 16) {
                 const F32x16 old = floats_of(x + at, c, columns);
                 put(residual + at + c, old + rounded<T>(load<F32x16>(sums + c)), columns - c);
               }
             }
           });
  }

  // act(gate) * up of all rows, `inner_stride` apart.
  void mlp(const StackLayer& layer, const T* x) {
    const T* inputs = normed(x, layer.mlp_norm);
    T* inner = workspace_ + at_.inner;
    if (shape_.inner % kBlock == 0) {
      gate_and_up(layer.gate_up, inputs, begin_of(layer.down), inner);
      return;
    }
    // Columns of a gate and of its up lie in blocks that do not match.
    T* both = workspace_ + at_.gate_up;
    linear_to(layer.gate_up, inputs, at_.normed_stride, layer.down, both);
    each_row([&](int64_t t) {
      const T *gate = both + t * 2 * shape_.inner, *up = gate + shape_.inner;
      T* out = inner + t * at_.inner_stride;
      for (int64_t i = 0; i < shape_.inner; i += 16) {
        put(out + i, gated<T>(floats_of(gate, i, shape_.inner), floats_of(up, i, shape_.inner),
                              shape_.gelu), shape_.inner - i);
      }
      if (shape_.inner % 2 != 0) out[shape_.inner] = T(0.0f);  // read as half of a word
    });
  }

  // A unit is a block of gates and that of their ups.
  void gate_and_up(const Weights& weights, const T* inputs, const char* after, T* inner) {
    const int64_t groups = row_groups(step_.tokens);
    const int64_t pairs = shape_.inner / kBlock, units = pairs * groups;
    const int64_t bytes = block_bytes<T>(weights);
    const auto first_of = [&](int64_t unit) { return unit % groups * kGroupRows; };
    const auto rows_of = [&](int64_t unit) {
      return std::min(step_.tokens - first_of(unit), kGroupRows);
    };
    phases_.run(
        phase_++, units,
        [&](int64_t unit, int64_t next) {
          const int64_t pair = unit / groups, rows = rows_of(unit);
          const T* x = inputs + first_of(unit) * at_.normed_stride;
          const char* up = weights.packed + (pairs + pair) * bytes;
          const char* then = next < units ? weights.packed + next / groups * bytes : after;
          run_block(weights, pair, x, at_.normed_stride, rows, up, gates_);
          run_block(weights, pairs + pair, x, at_.normed_stride, rows, then, sums_);
        },
        [&](int64_t unit) {
          const int64_t first = first_of(unit), rows = rows_of(unit);
          T* out = inner + first * at_.inner_stride + unit / groups * kBlock;
          for (int64_t m = 0; m < rows; ++m, out += at_.inner_stride) {
            const auto half = [&](int64_t at) {
              return gated<T>(load<F32x16>(gates_ + m * kBlock + at),
                              load<F32x16>(sums_ + m * kBlock + at), shape_.gelu);
            };
            Element<T>::store32_in_order(out, half(0), half(16));
          }
        });
  }

  StackJob& job_;
  const Stack& stack_;
  const StackShape& shape_;
  const StackStep<T>& step_;
  const Stack::Layout& at_;
  Phases& phases_;
  T* workspace_;
  int64_t index_;
  int64_t phase_ = 0;  // the next one
  alignas(64) float sums_[kGroupRows * kBlock];
  alignas(64) float gates_[kGroupRows * kBlock];
};

}  // namespace stepgraph
