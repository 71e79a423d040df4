// All layers of a decoder by one team of threads.
//
// A layer is a few phases, and no thread begins one before all have ended the one before:
//
//     qkv | rotate | attention | output + residual | gate, up, activation | down + residual
//
// Some wait within for one another too: where many rows are normed, new keys written, parts of long
// rows merged, sums normed, or gates and ups do not share out in blocks.
//
// Linear layers hand out units of work (`cpu_linear.h`). What their outputs go through next is done
// to the sums of a tile, before they are stored. Norms come before a linear layer: for the few rows
// of a decode step every thread norms all of them for itself, which costs less than a barrier; of
// more rows each thread takes its part. While a thread waits, the weights it reads next come near.
#include "cpu_stack.h"

#include <omp.h>

#include "cpu_stack_math.h"

namespace stepgraph {
namespace {

constexpr int64_t kOwnRows = 16;  // up to so many rows are normed by every thread for itself
// Below this a layer's second thread costs more than it brings: bytes of weights, times the tiles
// of rows that pass over them.
constexpr int64_t kLayerBytesPerThread = 128 * 1024;
constexpr int kPhases = 4;  // of a layer that hand out units: its linear layers

// Elements from row to row of what a linear layer reads: a cache line more than the row takes, so
// that the rows of a tile do not fall into the same set of the first cache.
int64_t padded(int64_t columns) { return (columns + kBlock - 1) / kBlock * kBlock + kBlock; }

template <class T>
int64_t bytes_of(const Weights& weights) {
  return weights.blocks() * block_bytes<T>(weights);
}

}  // namespace

// What one thread does in a step.
template <class T>
class StackThread {
 public:
  StackThread(Stack& stack, const StackStep<T>& step, T* workspace, const Stack::Layout& at)
      : stack_(stack), shape_(stack.shape_), step_(step), at_(at), workspace_(workspace),
        index_(omp_get_thread_num()), count_(omp_get_num_threads()) {}

  void run() {
    const T* x = step_.x;
    T* residual = workspace_ + at_.x;
    const size_t layers = stack_.layers_.size();
    for (size_t i = 0; i < layers; ++i) {
      const StackLayer& layer = stack_.layers_[i];
      taken_ = stack_.taken_.get() + i * kPhases;
      attention(layer, x);
      add_linear(layer.output, workspace_ + at_.attended, shape_.query_size(), taken_[1],
                 layer.gate_up, layer.attention_output_norm, x, residual);
      x = residual;
      mlp(layer, x);
      const StackLayer& next = i + 1 < layers ? stack_.layers_[i + 1] : stack_.layers_.front();
      add_linear(layer.down, workspace_ + at_.inner, at_.inner_stride, taken_[3],
                 next.qkv, layer.mlp_output_norm, x, residual);
    }
    own_rows([&](int64_t t) {
      norm(x + t * shape_.hidden, stack_.norm_, shape_.hidden, step_.out + t * shape_.hidden);
    });
  }

 private:
  // Consecutive rows for each thread.
  template <class Visit>
  void own_rows(Visit visit) const {
    const int64_t end = step_.tokens * (index_ + 1) / count_;
    for (int64_t t = step_.tokens * index_ / count_; t < end; ++t) visit(t);
  }

  void norm(const T* x, const void* weight, int64_t size, T* out) const {
    norm_row<T>(x, static_cast<const T*>(weight), size, shape_.eps, shape_.offset_norms, nullptr,
                out);
  }

  // All rows normed, `normed_stride` apart; complete when it returns.
  const T* normed(const T* x, const void* weight) const {
    const bool own = step_.tokens <= kOwnRows;
    T* out = workspace_ + (own ? at_.own + index_ * at_.own_size : at_.normed);
    const auto row = [&](int64_t t) {
      T* place = out + t * at_.normed_stride;
      norm(x + t * shape_.hidden, weight, shape_.hidden, place);
      if (shape_.hidden % 2 != 0) place[shape_.hidden] = T(0.0f);  // read as half of a word
    };
    if (own) {
      for (int64_t t = 0; t < step_.tokens; ++t) row(t);
    } else {
      own_rows(row);
#pragma omp barrier
    }
    return out;
  }

  // What this thread begins with of a linear layer to come.
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

  void linear(const Weights& weights, const T* x, int64_t x_stride, std::atomic<int64_t>& taken,
              const Weights& next, T* out) const {
    linear_in_region(weights, x, x_stride, step_.tokens, taken, begin_of(next),
                     [&](int64_t block, int64_t row, int64_t rows, const float* sums) {
                       put_sums(sums, rows, weights.columns - block * kBlock,
                                out + row * weights.columns + block * kBlock, weights.columns);
                     });
  }

  void attention(const StackLayer& layer, const T* x) const {
    T* qkv = workspace_ + at_.qkv;
    linear(layer.qkv, normed(x, layer.input_norm), at_.normed_stride, taken_[0], layer.output, qkv);
#pragma omp barrier
    const int64_t size = shape_.qkv_size(), d = shape_.head_dim;
    const int64_t heads = shape_.heads + shape_.kv_heads, rows = step_.tokens * heads;
    const int64_t end = rows * (index_ + 1) / count_;
    for (int64_t row = rows * index_ / count_; row < end; ++row) {
      const int64_t t = row / heads, head = row % heads;
      T* vector = qkv + t * size + head * d;
      const void* weight = head < shape_.heads ? layer.q_norm : layer.k_norm;
      if (weight != nullptr) norm(vector, weight, d, vector);
      const int64_t angles = (layer.rope * step_.tokens + t) * (d / 2);
      rotate_row(vector, step_.cos + angles, step_.sin + angles, d / 2);
    }
#pragma omp barrier
    uint8_t* keys = step_.arena + layer.position * step_.layer_bytes;
    attend_in_region(
        AttentionArgs<T>{qkv, qkv + shape_.query_size(),
                         qkv + shape_.query_size() + shape_.kv_heads * d,
                         {size, d}, {size, d}, {size, d}, keys, keys + step_.side_bytes,
                         workspace_ + at_.attended, shape_.scale, shape_.softcap},
        stack_.plans_[layer.plan]);
  }

  // residual = x + linear layer, which an output norm may follow; complete when it returns.
  void add_linear(const Weights& weights, const T* inputs, int64_t stride,
                  std::atomic<int64_t>& taken, const Weights& next, const void* output_norm,
                  const T* x, T* residual) const {
    const int64_t hidden = shape_.hidden;
    if (output_norm != nullptr) {
      T* projected = workspace_ + at_.projected;
      linear(weights, inputs, stride, taken, next, projected);
#pragma omp barrier
      own_rows([&](int64_t t) {
        norm_row<T>(projected + t * hidden, static_cast<const T*>(output_norm), hidden, shape_.eps,
                    shape_.offset_norms, x + t * hidden, residual + t * hidden);
      });
#pragma omp barrier
      return;
    }
    linear_in_region(
        weights, inputs, stride, step_.tokens, taken, begin_of(next),
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
#pragma omp barrier
  }

  // act(gate) * up of all rows, `inner_stride` apart; complete when it returns.
  void mlp(const StackLayer& layer, const T* x) const {
    const T* inputs = normed(x, layer.mlp_norm);
    T* inner = workspace_ + at_.inner;
    if (shape_.inner % kBlock == 0) {
      gate_and_up(layer.gate_up, inputs, begin_of(layer.down), inner);
    } else {
      // Columns of a gate and of its up lie in blocks that do not match.
      T* both = workspace_ + at_.gate_up;
      linear(layer.gate_up, inputs, at_.normed_stride, taken_[2], layer.down, both);
#pragma omp barrier
      own_rows([&](int64_t t) {
        const T *gate = both + t * 2 * shape_.inner, *up = gate + shape_.inner;
        T* out = inner + t * at_.inner_stride;
        for (int64_t i = 0; i < shape_.inner; i += 16) {
          put(out + i, gated<T>(floats_of(gate, i, shape_.inner), floats_of(up, i, shape_.inner),
                                shape_.gelu), shape_.inner - i);
        }
        if (shape_.inner % 2 != 0) out[shape_.inner] = T(0.0f);  // read as half of a word
      });
    }
#pragma omp barrier
  }

  // A unit is a block of gates and that of their ups.
  void gate_and_up(const Weights& weights, const T* inputs, const char* after, T* inner) const {
    const int64_t groups = (step_.tokens + kGroupRows - 1) / kGroupRows;
    const int64_t pairs = shape_.inner / kBlock, units = pairs * groups;
    const int64_t bytes = block_bytes<T>(weights);
    alignas(64) float gates[kGroupRows * kBlock];
    take_units(units, taken_[2], [&](int64_t unit, int64_t next) {
      const int64_t pair = unit / groups, first = unit % groups * kGroupRows;
      const int64_t rows = std::min(step_.tokens - first, kGroupRows);
      const T* x = inputs + first * at_.normed_stride;
      const char* up = weights.packed + (pairs + pair) * bytes;
      const char* then = next < units ? weights.packed + next / groups * bytes : after;
      run_block(weights, pair, x, at_.normed_stride, rows, up,
                [&](int64_t row, int64_t count, const float* sums) {
                  std::copy_n(sums, count * kBlock, gates + row * kBlock);
                });
      run_block(weights, pairs + pair, x, at_.normed_stride, rows, then,
                [&](int64_t row, int64_t count, const float* sums) {
                  const float* gate = gates + row * kBlock;
                  T* out = inner + (first + row) * at_.inner_stride + pair * kBlock;
                  for (int64_t m = 0; m < count; ++m, out += at_.inner_stride) {
                    const auto half = [&](int64_t at) {
                      return gated<T>(load<F32x16>(gate + m * kBlock + at),
                                      load<F32x16>(sums + m * kBlock + at), shape_.gelu);
                    };
                    Element<T>::store32_in_order(out, half(0), half(16));
                  }
                });
    });
  }

  Stack& stack_;
  const StackShape& shape_;
  const StackStep<T>& step_;
  const Stack::Layout& at_;
  T* workspace_;
  std::atomic<int64_t>* taken_ = nullptr;  // of the layer's phases
  int64_t index_, count_;
};

Stack::Stack(const StackShape& shape, std::vector<StackLayer> layers, std::vector<StackPlan> plans,
             const void* norm)
    : shape_(shape),
      layers_(std::move(layers)),
      plan_keys_(std::move(plans)),
      norm_(norm),
      output_norms_(layers_.front().mlp_output_norm != nullptr),
      plans_(plan_keys_.size()),
      taken_(new std::atomic<int64_t>[layers_.size() * kPhases]) {}

Stack::Layout Stack::layout(int64_t tokens, int threads) const {
  Layout at{};
  const auto take = [&](int64_t elements) {
    const int64_t begin = at.total;
    at.total += (elements + kBlock - 1) / kBlock * kBlock;
    return begin;
  };
  const bool own = tokens <= kOwnRows;
  at.normed_stride = padded(shape_.hidden);
  at.inner_stride = padded(shape_.inner);
  at.own_size = tokens * at.normed_stride;
  at.x = take(tokens * shape_.hidden);
  at.normed = take(own ? 0 : at.own_size);
  at.own = take(own ? threads * at.own_size : 0);
  at.qkv = take(tokens * shape_.qkv_size());
  at.attended = take(tokens * shape_.query_size());
  at.projected = take(output_norms_ ? tokens * shape_.hidden : 0);
  at.inner = take(tokens * at.inner_stride);
  at.gate_up = take(shape_.inner % kBlock == 0 ? 0 : tokens * 2 * shape_.inner);
  return at;
}

int64_t Stack::workspace_bytes(int64_t tokens, int64_t element_bytes, int threads) const {
  // A few rows may take more than many, since each thread norms them for itself.
  const int64_t few = std::min(tokens, kOwnRows);
  const int64_t elements = std::max(layout(tokens, threads).total, layout(few, threads).total);
  AttentionStep step{};
  step.tokens = tokens;
  step.heads = shape_.heads;
  step.kv_heads = shape_.kv_heads;
  step.head_dim = step.value_dim = shape_.head_dim;
  step.threads = threads;
  return elements * element_bytes + AttentionPlan::scratch_bytes(step);
}

int64_t Stack::positions() const {
  int64_t most = 0;
  for (const StackLayer& layer : layers_) most = std::max(most, layer.position + 1);
  return most;
}

template <class T>
void Stack::run(const StackStep<T>& step) {
  if (step.tokens == 0) return;
  const std::lock_guard<std::mutex> alone(busy_);
  const StackLayer& first = layers_.front();
  const int64_t bytes = bytes_of<T>(first.qkv) + bytes_of<T>(first.output) +
                        bytes_of<T>(first.gate_up) + bytes_of<T>(first.down);
  const int64_t tiles = (step.tokens + kTileRows - 1) / kTileRows;
  int threads = static_cast<int>(
      std::clamp<int64_t>(bytes * tiles / kLayerBytesPerThread, 1, step.threads));
  for (size_t i = 0; i < plans_.size(); ++i) {
    const auto [group, window] = plan_keys_[i];
    plans_[i].prepare({step.slots + group * step.tokens,
                       step.block_tables + group * step.rows * step.max_blocks, step.max_blocks,
                       step.token_rows, step.positions, step.tokens, shape_.heads, shape_.kv_heads,
                       shape_.head_dim, shape_.head_dim, step.num_blocks, step.block_size, window,
                       sizeof(T), shape_.storage, step.threads}, attention_space_);
    threads = std::max(threads, plans_[i].threads);
  }
  const Layout at = layout(step.tokens, threads);
  T* workspace = reinterpret_cast<T*>(
      workspace_.reserve(at.total * static_cast<int64_t>(sizeof(T)) / sizeof(float)));
  for (size_t i = 0; i < layers_.size() * kPhases; ++i) taken_[i] = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  StackThread<T>(*this, step, workspace, at).run();
}

template void Stack::run(const StackStep<c10::BFloat16>&);
template void Stack::run(const StackStep<float>&);

}  // namespace stepgraph
