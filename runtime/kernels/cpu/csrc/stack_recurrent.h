// The recurrent part of a layer in a step of all layers: what lies between its projections.
//
//     inputs | convolution, gates, recurrence, norm of each head | output + residual
//
// is a unit for each head, or some features, of the tokens of a row. So a unit computes what it needs
// of the convolution itself: for the few taps that costs less than a phase. A norm over more than a
// head is a phase of rows.
#pragma once

#include <array>

#include "convolution.h"
#include "phases.h"
#include "recurrence.h"
#include "stack_math.h"

namespace stepgraph {

enum class RecurrentKind { kGatedConv, kDeltaRule, kStateSpace };

// See `GatedNorm` in `ops/norms.py`.
struct GatedNormWeights {
  const void* weight = nullptr;  // [group] or [features] of the model's type; null: there is none
  float eps = 0.0f;
  int64_t group = 0, size = 0;  // elements that are normed together, and of the weight
  bool sigmoid = false, gate_first = false, in_float32 = false;
};

// The recurrent part of a layer, without its input norm and its projections.
struct Recurrent {
  RecurrentKind kind;
  ConvWeights conv;       // `input_place` is divided by the tokens of a block, here and below
  RecurrenceShape shape;  // not of a gated convolution
  // Where the input projection has the gate, the decays and beta; of a gated convolution it is (b, c,
  // x), of a delta rule (q, k, v; gate; decays; beta), of a state space (x, B, C; gate; dt).
  int64_t gate, decay, beta;
  const float* log_rates;  // [heads]: the logarithm of the negative factor of the log decay
  const float* time_bias;  // [heads * decays]
  const float* skip;       // [heads], of a state space
  float beta_scale, least_time, largest_time;
  float query_scale;       // of queries of length 1
  bool gated;              // the result is multiplied by silu(gate)
  GatedNormWeights norm;

  static constexpr int64_t kConvFeatures = 128;  // of a unit of a gated convolution
  // Added to the sum of squares that a query or key is divided by the root of.
  static constexpr float kLeastSquares = 1e-6f;

  bool is_conv() const { return kind == RecurrentKind::kGatedConv; }
  bool norms_heads() const { return norm.weight != nullptr && norm.group == shape.value; }
  bool norms_rows() const { return norm.weight != nullptr && !norms_heads(); }
  int64_t features() const { return is_conv() ? conv.features : shape.heads * shape.value; }
  int64_t units() const {
    return is_conv() ? (conv.features + kConvFeatures - 1) / kConvFeatures : shape.units();
  }

  // Floats that a thread works in.
  template <class T>
  int64_t floats(const StatePlan& plan) const {
    const auto floats_of = [](int64_t elements) {
      return (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 16;
    };
    if (is_conv()) {
      return floats_of(ConvWorker<T>::elements(conv, plan, kConvFeatures)) +
             floats_of(plan.most_tokens * kConvFeatures);
    }
    return (RecurrenceWorker::floats(shape, plan) + 15) / 16 * 16 +
           shape.unit_heads() * floats_of(conv_elements<T>(plan));
  }

  // Elements that the convolution of a head is computed in.
  template <class T>
  int64_t conv_elements(const StatePlan& plan) const {
    return 2 * ConvWorker<T>::elements(conv, plan, shape.key) +
           ConvWorker<T>::elements(conv, plan, shape.value);
  }
};

// softplus(x) = log(1 + exp(x)), as torch computes it.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Multiplies 16 numbers by the activation of a gate.
inline F32x16 times_gate(F32x16 value, F32x16 gate, bool sigmoid) {
  return times_sigmoid(sigmoid ? value : value * gate, gate);
}

// The norm of a row of `size` elements in place, with the gate that belongs to it.
template <class T>
void gated_norm_row(T* x, const T* gate, const GatedNormWeights& norm, int64_t size) {
  for (int64_t first = 0; first < size; first += norm.group) {
    T* own = x + first;
    const T* weight = static_cast<const T*>(norm.weight) + first % norm.size;
    const auto value = [&](int64_t i) {
      const F32x16 number = floats_of(own, i, norm.group);
      if (!norm.gate_first) return number;
      return times_gate(number, floats_of(gate + first, i, norm.group), norm.sigmoid);
    };
    F32x16 lanes = {};
    for (int64_t i = 0; i < norm.group; i += 16) lanes += value(i) * value(i);
    const float mean = lane_sum(lanes) / static_cast<float>(norm.group);
    const F32x16 inverse = broadcast(1.0f / std::sqrt(mean + norm.eps));
    for (int64_t i = 0; i < norm.group; i += 16) {
      const F32x16 normed = value(i) * inverse, w = floats_of(weight, i, norm.group);
      F32x16 result = norm.in_float32 ? w * normed : rounded<T>(w * rounded<T>(normed));
      if (!norm.gate_first) {
        result = times_gate(result, floats_of(gate + first, i, norm.group), norm.sigmoid);
      }
      put(own + i, result, norm.group - i);
    }
  }
}

// What a thread does in a phase of recurrent units.
template <class T>
class RecurrentThread {
 public:
  // `in`: the input projection of all tokens; `out` [tokens, out_stride]. `space`: of this thread.
  RecurrentThread(const Recurrent& block, const StatePlan& plan, const T* in, int64_t in_stride,
                  T* out, int64_t out_stride, float* space)
      : block_(block), conv_(block.conv), plan_(plan), in_(in), in_stride_(in_stride), out_(out),
        out_stride_(out_stride), space_(space) {
    conv_.input_place *= plan.block_size;
    for (int64_t& place : block_.shape.input_places) place *= plan.block_size;
  }

  // Tokens of padding get zeros.
  void run(Phases& phases, int64_t phase) {
    if (block_.is_conv()) run_conv(phases, phase);
    else run_heads(phases, phase);
  }

 private:
  // compute(run, unit of the run) and publish likewise.
  template <class Compute, class Publish>
  void run_units(Phases& phases, int64_t phase, Compute compute, Publish publish) {
    const int64_t each = block_.units(), count = static_cast<int64_t>(plan_.runs.size()) * each;
    phases.run(
        phase, count + static_cast<int64_t>(plan_.padding.size()),
        [&](int64_t unit, int64_t) {
          if (unit < count) compute(plan_.runs[unit / each], unit % each);
        },
        [&](int64_t unit) {
          if (unit < count) publish(plan_.runs[unit / each], unit % each);
          else std::fill_n(out_ + plan_.padding[unit - count] * out_stride_, out_stride_, T(0.0f));
        });
  }

  const T* input(int64_t token) const { return in_ + token * in_stride_; }

  void run_conv(Phases& phases, int64_t phase) {
    constexpr int64_t kSize = Recurrent::kConvFeatures;
    const int64_t features = conv_.features;
    T* inputs = reinterpret_cast<T*>(space_);
    T* results = inputs + ConvWorker<T>::elements(conv_, plan_, kSize);
    ConvWorker<T> worker(conv_, plan_);
    const auto size_of = [&](int64_t begin) { return std::min(features - begin, kSize); };
    run_units(
        phases, phase,
        [&](const StateRun& run, int64_t unit) {
          const int64_t begin = unit * kSize, size = size_of(begin);
          worker.load(run, begin, size, inputs, [&](int64_t t, T* to) {
            const T *b = input(t) + begin, *x = b + 2 * features;
            for (int64_t i = 0; i < size; i += 16) {
              put(to + i, floats_of(b, i, size) * floats_of(x, i, size), size - i);
            }
          });
          for (int64_t i = 0; i < run.count; ++i) {
            const T* c = input(run.first + i) + features + begin;
            for (int64_t at = 0; at < size; at += 16) {
              const F32x16 sum = rounded<T>(worker.result(run.offset + i, at));
              put(results + i * kSize + at, floats_of(c, at, size) * sum, size - at);
            }
          }
        },
        [&](const StateRun& run, int64_t unit) {
          const int64_t begin = unit * kSize, size = size_of(begin);
          worker.publish();
          for (int64_t i = 0; i < run.count; ++i) {
            T* row = out_ + (run.first + i) * out_stride_;
            std::copy_n(results + i * kSize, size, row + begin);
            if (features % 2 != 0) row[features] = T(0.0f);  // read as half of a word
          }
        });
  }

  using HeadConv = std::array<ConvWorker<T>, 3>;  // of queries, keys and values

  void run_heads(Phases& phases, int64_t phase) {
    const RecurrenceShape& shape = block_.shape;
    RecurrenceWorker worker(shape, plan_, space_);
    const int64_t heads = shape.unit_heads(), elements = block_.template conv_elements<T>(plan_);
    T* conv_space =
        reinterpret_cast<T*>(space_ + (RecurrenceWorker::floats(shape, plan_) + 15) / 16 * 16);
    const ConvWorker<T> empty(conv_, plan_);
    std::vector<HeadConv> convs(heads, HeadConv{empty, empty, empty});
    run_units(
        phases, phase,
        [&](const StateRun& run, int64_t unit) {
          worker.compute(run, unit, [&](int64_t head, const HeadRows& rows) {
            HeadConv& conv = convs[head % heads];
            load_conv(run, head, conv, conv_space + head % heads * elements);
            fill(run, head, conv, rows);
          }, [&](int64_t head, const HeadRows& rows) { finish(run, head, convs[head % heads], rows); });
        },
        [&](const StateRun& run, int64_t unit) {
          worker.publish(run, unit, [&](int64_t head, const HeadRows& rows) {
            const HeadConv& conv = convs[head % heads];
            conv[2].publish();
            if (shape.first_of_key(head)) {
              conv[0].publish();
              conv[1].publish();
            }
            for (int64_t j = run.offset; j < run.end(); ++j) {
              T* row = out_ + (run.first + j - run.offset) * out_stride_;
              std::copy_n(result_of(rows, j), shape.value, row + head * shape.value);
              if (block_.features() % 2 != 0) row[block_.features()] = T(0.0f);
            }
          });
        });
  }

  // Results of the model's type take the place of those in float.
  T* result_of(const HeadRows& rows, int64_t j) const {
    return reinterpret_cast<T*>(rows.out + j * rows.value_stride);
  }

  void load_conv(const StateRun& run, int64_t head, HeadConv& conv, T* space) const {
    const RecurrenceShape& shape = block_.shape;
    const int64_t key = shape.key_head(head) * shape.key, keys = shape.key_heads * shape.key;
    const int64_t values = shape.heads * shape.value, value = head * shape.value;
    const bool delta = block_.kind == RecurrentKind::kDeltaRule;
    // (q, k, v), or of a state space (x, B, C), of which C is the query.
    const int64_t begin[3] = {delta ? key : values + keys + key, delta ? keys + key : values + key,
                              delta ? 2 * keys + value : value};
    const int64_t sizes[3] = {shape.key, shape.key, shape.value};
    for (int i = 0; i < 3; ++i) {
      conv[i].load(run, begin[i], sizes[i], space, [&](int64_t t, T* to) {
        std::copy_n(input(t) + begin[i], sizes[i], to);
      });
      space += ConvWorker<T>::elements(conv_, plan_, sizes[i]);
    }
  }

  // 16 results of a convolution, zeros behind its features.
  static void put_conv(const ConvWorker<T>& conv, int64_t j, int64_t size, int64_t padded,
                       float* to) {
    for (int64_t i = 0; i < size; i += 16) store(to + i, rounded<T>(conv.result(j, i)));
    std::fill(to + size, to + padded, 0.0f);
  }

  // Scales a vector to length 1, times a factor.
  static void scale_to_unit(float* x, int64_t size, float factor) {
    F32x16 lanes = {};
    for (int64_t i = 0; i < size; i += 16) lanes += load<F32x16>(x + i) * load<F32x16>(x + i);
    const float inverse = 1.0f / std::sqrt(lane_sum(lanes) + Recurrent::kLeastSquares);
    for (int64_t i = 0; i < size; i += 16) store(x + i, load<F32x16>(x + i) * inverse * factor);
  }

  void fill(const StateRun& run, int64_t head, const HeadConv& conv, const HeadRows& rows) const {
    const RecurrenceShape& shape = block_.shape;
    const float rate = -std::exp(block_.log_rates[head]);
    for (int64_t j = run.offset; j < run.end(); ++j) {
      const T* in = input(run.first + j - run.offset);
      float *q = rows.q + j * rows.key_stride, *k = rows.k + j * rows.key_stride;
      float *u = rows.u + j * rows.value_stride, *g = rows.g + j * rows.decay_stride;
      put_conv(conv[0], j, shape.key, rows.key_stride, q);
      put_conv(conv[1], j, shape.key, rows.key_stride, k);
      put_conv(conv[2], j, shape.value, rows.value_stride, u);
      const T* times = in + block_.decay + head * shape.decays;
      const float* bias = block_.time_bias + head * shape.decays;
      for (int64_t c = 0; c < shape.decays; ++c) {
        const float time = softplus(static_cast<float>(times[c]) + bias[c]);
        g[c] = std::clamp(time, block_.least_time, block_.largest_time);
      }
      if (block_.kind == RecurrentKind::kDeltaRule) {
        scale_to_unit(q, rows.key_stride, block_.query_scale);
        scale_to_unit(k, rows.key_stride, 1.0f);
        const F32x16 b = broadcast(static_cast<float>(in[block_.beta + head]));
        const F32x16 beta = rounded<T>(times_sigmoid(F32x16{} + 1.0f, b));
        rows.beta[j] = rounded<T>(beta * block_.beta_scale)[0];
      } else {
        for (int64_t v = 0; v < shape.value; v += 16) store(u + v, load<F32x16>(u + v) * g[0]);
      }
      for (int64_t c = 0; c < shape.decays; ++c) g[c] *= rate;
      std::fill(g + shape.decays, g + rows.decay_stride, 0.0f);
    }
  }

  void finish(const StateRun& run, int64_t head, const HeadConv& conv, const HeadRows& rows) const {
    const RecurrenceShape& shape = block_.shape;
    const int64_t size = shape.value;
    for (int64_t j = run.offset; j < run.end(); ++j) {
      const T* gate = input(run.first + j - run.offset) + block_.gate + head * size;
      const float* from = rows.out + j * rows.value_stride;
      T* to = result_of(rows, j);
      for (int64_t i = 0; i < size; i += 16) {
        F32x16 value = load<F32x16>(from + i);
        if (block_.skip != nullptr) value += rounded<T>(conv[2].result(j, i)) * block_.skip[head];
        if (block_.gated) value = times_gate(value, floats_of(gate, i, size), false);
        put(to + i, value, size - i);
      }
      if (!block_.norms_heads()) continue;
      GatedNormWeights norm = block_.norm;
      if (norm.size != norm.group) {  // a weight of its own for each head
        norm.weight = static_cast<const T*>(norm.weight) + head * size;
        norm.size = norm.group;
      }
      gated_norm_row(to, gate, norm, size);
    }
  }

  Recurrent block_;  // copies, whose places are of blocks
  ConvWeights conv_;
  const StatePlan& plan_;
  const T* in_;
  int64_t in_stride_;
  T* out_;
  int64_t out_stride_;
  float* space_;
};

}  // namespace stepgraph
