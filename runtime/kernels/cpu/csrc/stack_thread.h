// What the threads of a step of all layers (`stack.cpp`) do.
//
// A block is two or three phases (`phases.h`):
//
//     qkv | attention | output + residual        gate, up, activation | down + residual
//
// or more with a mixture of experts (`mixture.h`), a gate of the attention's result (two phases) or a
// recurrent part (`stack_recurrent.h`). On a rank of several, output and down are a phase
// that writes this rank's part of the sum to shared memory, and, once the parts of all ranks are
// there (`communicator.h`), one that adds the sum to the residual.
//
// What follows a linear layer is done to the sums of a unit before they are published. Queries and
// keys are normed and rotated, and keys and values stored, by the thread that publishes the last
// block of their head, or of all heads that are normed together. Norms come before a linear layer:
// for the few rows of a decode step every thread norms all of them for itself, which costs less than
// a phase; of more rows they are a phase. So are norms of outputs, and gates and ups whose columns do
// not share out in blocks.
#pragma once

#include <variant>

#include "mixture_thread.h"
#include "stack.h"
#include "stack_math.h"

namespace stepgraph {

constexpr int64_t kOwnRows = 16;  // every thread norms up to this many rows itself
static_assert(kOwnRows <= kFewMixtureRows);
// Below this a layer's second thread costs more than it brings: bytes of weights, times the tiles
// of rows that pass over them.
constexpr int64_t kLayerBytesPerThread = 128 * 1024;
constexpr int kSharedPhases = 4;  // of a shared MLP beside a mixture, and its gate
constexpr int kMostPhases = 2 + kMixturePhases + kSharedPhases;  // of a block, with norms
constexpr int64_t kRowsPerUnit = 8;    // of phases that work on rows
constexpr int64_t kSummedColumns = 512;  // of a unit that sums over ranks, of kRowsPerUnit rows
// Steps of more tokens wait for late threads: a second workspace of theirs would be large.
constexpr int64_t kMostLateTokens = kGroupRows;

// Heads of a row's queries, keys and values that are finished together: one, or all queries or keys
// where a norm is over all of them.
struct HeadRange {
  int64_t index;        // of its counter
  int64_t begin, end;   // columns
  int64_t head, heads;  // queries first, then keys, then values

  // Blocks of columns that it has a part in.
  int64_t blocks() const { return (end - 1) / kBlock - begin / kBlock + 1; }
};

// The range with a column.
inline HeadRange head_range(const StackShape& shape, bool all_heads, int64_t column) {
  const int64_t d = shape.head_dim, head = column / d, rotated = shape.heads + shape.kv_heads;
  if (!all_heads || head >= rotated) return {head, head * d, (head + 1) * d, head, 1};
  const int64_t counter = rotated + shape.kv_heads;  // after the counters of single heads
  if (head < shape.heads) return {counter, 0, shape.query_size(), 0, shape.heads};
  return {counter + 1, shape.query_size(), rotated * d, shape.heads, shape.kv_heads};
}

// A step, and what its threads work in.
class StackJob : public Job {
 public:
  explicit StackJob(Stack& stack) : stack_(stack), plans_(stack.plan_keys_.size()) {}

  template <class T>
  void prepare(const StackStep<T>& step, std::shared_ptr<const void> keep);

  int threads() const { return phases_.threads(); }
  // Of its workspaces, since it was prepared last.
  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 protected:
  void work(int64_t index) override;

 private:
  template <class T>
  friend class StackThread;

  Stack& stack_;
  std::variant<StackStep<c10::BFloat16>, StackStep<float>> step_;
  std::vector<AttentionPlan> plans_;
  AttentionSpace attention_space_;  // of all plans
  Stack::Layout at_;
  WorkSpace workspace_;
  WorkSpace mixtures_;
  MixtureLayout mixtures_at_;
  StatePlan states_;
  WorkSpace recurrent_;
  int64_t recurrent_floats_ = 0;  // of a thread
  Phases phases_;
  uint32_t first_sum_ = 0;   // number of the step's first operation of ranks
  int64_t summed_rows_ = 0;  // of an operation
  // Blocks of qkv that are not done yet in the layer: [ranges of heads][groups of rows].
  std::unique_ptr<std::atomic<int64_t>[]> blocks_left_;
  int64_t counted_ = 0;
  std::atomic<int64_t> bytes_{0};
};

// What one thread does in a step.
template <class T>
class StackThread {
 public:
  StackThread(StackJob& job, const StackStep<T>& step, int64_t index)
      : job_(job), stack_(job.stack_), shape_(stack_.shape_), step_(step), at_(job.at_),
        phases_(job.phases_), workspace_(reinterpret_cast<T*>(job.workspace_.get())),
        index_(index), sum_(job.first_sum_) {}

  void run() {
    const T* x = step_.x;
    T *residual = workspace_ + at_.x, *aux = step_.aux;
    size_t taken = 0;
    int64_t layer = 0;
    const std::vector<StackBlock>& blocks = stack_.blocks_;
    for (size_t i = 0; i < blocks.size(); ++i) {
      const StackBlock &block = blocks[i], &next = blocks[i + 1 < blocks.size() ? i + 1 : 0];
      T* output = residual;
      if (block.ends_layer && taken < step_.aux_layers.size() &&
          step_.aux_layers[taken] == layer) {
        output = aux;  // where the next block reads it, too
        aux += step_.tokens * shape_.hidden;
        ++taken;
      }
      layer += block.ends_layer;
      const auto run = [&](const auto& product) { return add(block, product, next, x, output); };
      if (!std::visit(run, block.product)) return;
      x = output;
    }
    each_row([&](int64_t t) {
      norm_row<T>(x + t * shape_.hidden, stack_.norm_, shape_.hidden, step_.out + t * shape_.hidden);
      if (step_.joined_aux == nullptr) return;
      T* joined = step_.joined_aux + t * taken * shape_.hidden;
      for (size_t i = 0; i < taken; ++i) {
        const T* from = step_.aux + (i * step_.tokens + t) * shape_.hidden;
        joined = std::copy_n(from, shape_.hidden, joined);
      }
    });
  }

 private:
  // A phase that calls visit(row) for some rows.
  template <class Visit>
  void each_row(int64_t first, int64_t rows, Visit visit) {
    const int64_t units = (rows + kRowsPerUnit - 1) / kRowsPerUnit;
    phases_.run(phase_++, units, [&](int64_t unit) {
      const int64_t end = std::min(rows, (unit + 1) * kRowsPerUnit);
      for (int64_t t = unit * kRowsPerUnit; t < end; ++t) visit(first + t);
    });
  }

  template <class Visit>
  void each_row(Visit visit) {
    each_row(0, step_.tokens, visit);
  }

  // All rows, normed unless the norm is none, `normed_stride` apart, for so many phases from the one
  // that comes next. With `before`, the embeddings of the step come first, in that norm.
  const T* normed(const T* x, const NormWeights& norm, int64_t phases = 1,
                  const NormWeights& before = {}) {
    const bool own = step_.tokens <= kOwnRows;
    T* out = workspace_ + (own ? at_.own + index_ * at_.own_size : at_.normed);
    const auto row = [&](int64_t t) {
      const T* from = x + t * shape_.hidden;
      T* place = out + t * at_.normed_stride;
      if (before.weight != nullptr) {
        norm_row<T>(step_.embeddings + t * shape_.hidden, before, shape_.hidden, place);
        place += shape_.hidden;
      }
      if (norm.weight != nullptr) norm_row<T>(from, norm, shape_.hidden, place);
      else std::copy_n(from, shape_.hidden, place);
      // Read as half of a word.
      if (shape_.hidden % 2 != 0 && before.weight == nullptr) place[shape_.hidden] = T(0.0f);
    };
    if (!own) {
      each_row(row);
    } else if (!phases_.over(phase_ + phases - 1)) {
      for (int64_t t = 0; t < step_.tokens; ++t) row(t);
    }
    return out;
  }

  // What this thread probably begins with of a linear layer to come.
  const char* begin_of(const Weights& weights) const {
    return block_of(weights, std::min(index_, weights.blocks() - 1));
  }

  const char* begin_of(const StackBlock& block) const {
    if (const auto* attention = std::get_if<AttentionBlock>(&block.product)) {
      return begin_of(attention->qkv);
    }
    if (const auto* recurrent = std::get_if<RecurrentBlock>(&block.product)) {
      return begin_of(recurrent->inputs);
    }
    const MlpBlock& mlp = std::get<MlpBlock>(block.product);
    if (mlp.inner > 0) return begin_of(mlp.gate_up);
    const int64_t bytes = shape_.hidden * static_cast<int64_t>(sizeof(T));
    return static_cast<const char*>(mlp.mixture->router) + index_ * kRouterExperts * bytes;
  }

  // publish(block, first row, rows, sums)
  template <class Publish>
  void linear(const Weights& weights, const T* x, int64_t x_stride, const char* after,
              Publish publish) {
    linear_phase(phases_, phase_++, weights, x, x_stride, step_.tokens, after, sums_, publish);
  }

  // False: another rank does not take part.
  bool project_and_attend(const AttentionBlock& attention, const T* x) {
    T* qkv = workspace_ + at_.qkv;
    const int64_t size = shape_.qkv_size(), d = shape_.head_dim;
    uint8_t* keys = step_.arena + attention.position * step_.layer_bytes;
    const AttentionArgs<T> args{qkv, qkv + shape_.query_size(),
                                qkv + shape_.query_size() + shape_.kv_heads * d,
                                {size, d}, {size, d}, {size, d}, keys, keys + step_.side_bytes,
                                workspace_ + at_.attended, attention.scale, attention.softcap,
                                static_cast<const T*>(attention.sinks)};
    AttentionPlan& plan = job_.plans_[attention.plan];
    const int64_t groups = row_groups(step_.tokens);
    const bool gated = attention.gate.has_value();
    const T* inputs = normed(x, attention.input_norm, gated ? 2 : 1, attention.embedding_norm);
    const Weights& following = gated ? *attention.gate : attention.output;
    linear(attention.qkv, inputs, at_.normed_stride, begin_of(following),
           [&](int64_t block, int64_t row, int64_t rows, const float* sums) {
             const int64_t begin = block * kBlock, end = std::min(begin + kBlock, size);
             put_sums(sums, rows, end - begin, qkv + row * size + begin, size);
             for (int64_t column = begin; column < end;) {
               const HeadRange range = head_range(shape_, attention.all_heads, column);
               column = range.end;
               auto& left = job_.blocks_left_[range.index * groups + row / kGroupRows];
               if (phases_.threads() == 1) {
                 if (range.end <= end) finish_heads(attention, args, plan.step, range, row, rows);
               } else if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                 left.store(range.blocks(), std::memory_order_relaxed);
                 finish_heads(attention, args, plan.step, range, row, rows);
               }
             }
           });
    if (attention.head_ranks > 1 && !finish_heads_of_ranks(attention, args, plan.step)) {
      return false;
    }
    if (gated) {
      linear(following, inputs, at_.normed_stride, begin_of(attention.output),
             to_rows(workspace_ + at_.gate, shape_.query_size()));
    }
    attend(args, plan, phases_, phase_++, index_);
    if (gated) {
      each_row([&](int64_t t) {
        const int64_t width = shape_.query_size();
        T* row = workspace_ + at_.attended + t * width;
        const T* gate = workspace_ + at_.gate + t * width;
        for (int64_t i = 0; i < width; i += 16) {
          const F32x16 factor = times_sigmoid(F32x16{} + 1.0f, floats_of(gate, i, width));
          put(row + i, floats_of(row, i, width) * rounded<T>(factor), width - i);
        }
      });
    }
    return true;
  }

  // The phases of a norm over the heads of all ranks. False: another rank does not take part.
  bool finish_heads_of_ranks(const AttentionBlock& attention, const AttentionArgs<T>& args,
                             const AttentionStep& step) {
    const HeadRange queries = head_range(shape_, true, 0);
    const HeadRange keys = head_range(shape_, true, queries.end);
    for (int64_t first = 0; first < step_.tokens; first += job_.summed_rows_) {
      const int64_t rows = std::min(job_.summed_rows_, step_.tokens - first);
      each_row(first, rows, [&](int64_t t) {
        float* means = own_part<float>() + 2 * (t - first);
        const T* row = workspace_ + at_.qkv + t * shape_.qkv_size();
        means[0] = mean_square(row, queries.end);
        means[1] = mean_square(row + keys.begin, keys.end - keys.begin);
      });
      if (!exchange(2 * rows, sizeof(float))) return false;
      const Parts<float> parts(*stack_.communicator_, sum_++);
      each_row(first, rows, [&](int64_t t) {
        const F32x16 sums = parts.sum(2 * (t - first), 2 * rows);
        const float ranks = static_cast<float>(attention.head_ranks);
        const float means[2] = {sums[0] / ranks, sums[1] / ranks};
        finish_heads(attention, args, step, queries, t, 1, &means[0]);
        finish_heads(attention, args, step, keys, t, 1, &means[1]);
      });
    }
    return true;
  }

  // Of rows whose projections are all there: queries and keys are normed and rotated, keys and
  // values stored. `mean`: of the squares of the longer row that the norm is over.
  void finish_heads(const AttentionBlock& attention, const AttentionArgs<T>& args,
                    const AttentionStep& step, const HeadRange& range, int64_t row, int64_t rows,
                    const float* mean = nullptr) const {
    const int64_t d = shape_.head_dim, size = range.end - range.begin;
    const bool queries = range.head < shape_.heads;
    const bool values = range.head >= shape_.heads + shape_.kv_heads;
    if (!values) {
      if (attention.head_ranks > 1 && mean == nullptr) return;  // `finish_heads_of_ranks` does
      const NormWeights& norm = queries ? attention.q_norm : attention.k_norm;
      for (int64_t t = row; t < row + rows; ++t) {
        T* vectors = workspace_ + at_.qkv + t * shape_.qkv_size() + range.begin;
        if (mean != nullptr) norm_part<T>(vectors, norm, *mean, size, vectors);
        else if (norm.weight != nullptr) norm_row<T>(vectors, norm, size, vectors);
        const int64_t angles = (attention.rope * step_.tokens + t) * (d / 2);
        for (int64_t i = 0; i < size; i += d) {
          rotate_row(vectors + i, step_.cos + angles, step_.sin + angles, d / 2);
        }
        if (queries && attention.temperature_floor > 0) temper_row(attention, vectors, size, t);
      }
    }
    if (queries) return;
    const int64_t before = shape_.heads + (values ? shape_.kv_heads : 0);
    for (int64_t head = range.head; head < range.head + range.heads; ++head) {
      store_head(args, step, values, head - before, row, rows);
    }
  }

  // Multiplies queries by the temperature of their token's position.
  void temper_row(const AttentionBlock& attention, T* queries, int64_t size, int64_t token) const {
    const float place = static_cast<float>(step_.positions[token]) + 1.0f;
    const float floors = std::floor(place / static_cast<float>(attention.temperature_floor));
    const float factor = std::log1p(floors) * attention.temperature_scale + 1.0f;
    for (int64_t i = 0; i < size; i += 16) {
      put(queries + i, floats_of(queries, i, size) * factor, size - i);
    }
  }

  // What the blocks add to the hidden states. False: another rank does not take part.
  bool add(const StackBlock& block, const AttentionBlock& attention, const StackBlock& next,
           const T* x, T* residual) {
    if (!project_and_attend(attention, x)) return false;
    const T* attended = workspace_ + at_.attended;
    return add(block, [&](auto publish) {
      linear(attention.output, attended, shape_.query_size(), begin_of(next), publish);
    }, x, residual);
  }

  bool add(const StackBlock& block, const MlpBlock& mlp, const StackBlock& next, const T* x,
           T* residual) {
    const int64_t shared_phases = mlp.is_shared() ? kSharedPhases : 0;
    const T* inputs =
        normed(x, mlp.norm, mlp.mixture ? kMixtureInputPhases + shared_phases : 1);
    if (mlp.inner > 0) gated_mlp(mlp, inputs);
    if (mlp.is_shared()) shared_mlp(mlp, inputs);
    return add(block, [&](auto publish) {
      if (mlp.is_shared()) {
        mixture(mlp, inputs, begin_of(next), with_shared(mlp, publish));
      } else if (mlp.mixture) {
        mixture(mlp, inputs, begin_of(next), publish);
      } else {
        linear(mlp.down, workspace_ + at_.inner, padded(mlp.inner), begin_of(next), publish);
      }
    }, x, residual);
  }

  // The result of the MLP beside a mixture, and its gates.
  void shared_mlp(const MlpBlock& mlp, const T* inputs) {
    const Weights& following = mlp.shared_gate ? *mlp.shared_gate : mlp.down;
    linear(mlp.down, workspace_ + at_.inner, padded(mlp.inner), begin_of(following),
           to_rows(workspace_ + at_.shared, shape_.hidden));
    if (mlp.shared_gate) {
      linear(*mlp.shared_gate, inputs, at_.normed_stride, begin_of(following),
             to_rows(workspace_ + at_.shared_gates, 1));
    }
  }

  // Adds the shared MLP to the sums of a mixture.
  template <class Publish>
  auto with_shared(const MlpBlock& mlp, Publish publish) const {
    return [this, &mlp, publish](int64_t block, int64_t row, int64_t rows, const float* sums) {
      constexpr int64_t kRows = 16;  // a unit may have more than a tile
      alignas(64) float joined[kRows * kBlock];
      const int64_t hidden = shape_.hidden, first = block * kBlock;
      for (int64_t begin = 0; begin < rows; begin += kRows) {
        const int64_t count = std::min(kRows, rows - begin);
        for (int64_t m = 0; m < count; ++m) {
          const int64_t token = row + begin + m;
          const T* shared = workspace_ + at_.shared + token * hidden;
          F32x16 factor = F32x16{} + 1.0f;
          if (mlp.shared_gate) {
            const T gate = workspace_[at_.shared_gates + token];
            factor = rounded<T>(times_sigmoid(factor, broadcast(static_cast<float>(gate))));
          }
          for (int64_t c = 0; c < kBlock && first + c < hidden; c += 16) {
            const F32x16 added = rounded<T>(floats_of(shared, first + c, hidden) * factor);
            const F32x16 sum = load<F32x16>(sums + (begin + m) * kBlock + c);
            store(joined + m * kBlock + c, rounded<T>(sum) + added);
          }
        }
        publish(block, row + begin, count, static_cast<const float*>(joined));
      }
    };
  }

  bool add(const StackBlock& block, const RecurrentBlock& recurrent, const StackBlock& next,
           const T* x, T* residual) {
    const Recurrent& inner = recurrent.recurrent;
    const int64_t width = recurrent.inputs.columns, size = inner.features(), stride = padded(size);
    T *projected = workspace_ + at_.qkv, *out = workspace_ + at_.attended;
    const T* inputs = normed(x, recurrent.norm);
    linear(recurrent.inputs, inputs, at_.normed_stride, begin_of(recurrent.output),
           to_rows(projected, width));
    if (!phases_.over(phase_)) {
      float* space = job_.recurrent_.get() + index_ * job_.recurrent_floats_;
      RecurrentThread<T>(inner, job_.states_, projected, width, out, stride, space)
          .run(phases_, phase_);
    }
    ++phase_;
    if (inner.norms_rows()) {
      each_row([&](int64_t t) {
        gated_norm_row(out + t * stride, projected + t * width + inner.gate, inner.norm, size);
      });
    }
    return add(block, [&](auto publish) {
      linear(recurrent.output, out, stride, begin_of(next), publish);
    }, x, residual);
  }

  // residual = x + factor * product, which may be summed over ranks and normed before. `product` runs
  // phases that publish the product as `linear` does. False: another rank does not take part.
  template <class Product>
  bool add(const StackBlock& block, Product product, const T* x, T* residual) {
    if (block.summed) return add_sum(product, block.output_norm, block.factor, x, residual);
    add_own(product, block.output_norm, block.factor, x, residual);
    return true;
  }

  // The sum over ranks is exchanged in chunks of rows. The only chunk is published straight to where
  // other ranks read it, of more chunks each is copied there.
  template <class Product>
  bool add_sum(Product product, const NormWeights& output_norm, float factor, const T* x,
               T* residual) {
    const int64_t hidden = shape_.hidden, chunk = job_.summed_rows_;
    T* projected = chunk == step_.tokens ? own_part<T>() : workspace_ + at_.projected;
    product(to_rows(projected, hidden));
    for (int64_t first = 0; first < step_.tokens; first += chunk) {
      const int64_t rows = std::min(chunk, step_.tokens - first);
      if (chunk != step_.tokens) {
        each_row(first, rows, [&](int64_t t) {
          std::copy_n(projected + t * hidden, hidden, own_part<T>() + (t - first) * hidden);
        });
      }
      if (!exchange(rows * hidden, sizeof(T))) return false;
      add_parts(Parts<T>(*stack_.communicator_, sum_++), first, rows, output_norm, factor, x,
                residual);
    }
    return true;
  }

  // This rank's part of the next operation of ranks.
  template <class U>
  U* own_part() const {
    const Communicator& communicator = *stack_.communicator_;
    return reinterpret_cast<U*>(communicator.part(sum_, communicator.rank()));
  }

  // Publishes it once its phase is over, and waits for the parts of other ranks. False: another
  // rank does not take part.
  bool exchange(int64_t elements, int64_t element_bytes) {
    Communicator& communicator = *stack_.communicator_;
    const uint32_t signature =
        Communicator::signature(OperationKind::kSum, elements, element_bytes);
    const auto over = [&] { return phases_.over(phase_); };
    communicator.publish(sum_, signature);
    return communicator.wait(sum_, signature, over) || over();
  }

  // A phase that adds the sums of some rows, of which all parts are there.
  void add_parts(const Parts<T>& parts, int64_t first, int64_t rows, const NormWeights& output_norm,
                 float factor, const T* x, T* residual) {
    const int64_t hidden = shape_.hidden;
    if (output_norm.weight != nullptr) {
      T* projected = workspace_ + at_.projected;
      each_row(first, rows, [&](int64_t t) {
        T* row = projected + t * hidden;
        const int64_t begin = (t - first) * hidden, end = begin + hidden;
        for (int64_t i = 0; i < hidden; i += 16) {
          put(row + i, parts.sum(begin + i, end), hidden - i);
        }
        norm_row<T>(row, output_norm, hidden, residual + t * hidden, x + t * hidden, factor);
      });
      return;
    }
    const int64_t pieces = (hidden + kSummedColumns - 1) / kSummedColumns;
    const int64_t units = (rows + kRowsPerUnit - 1) / kRowsPerUnit * pieces;
    phases_.run(phase_++, units, [&](int64_t unit) {
      const int64_t row = unit / pieces * kRowsPerUnit, column = unit % pieces * kSummedColumns;
      const int64_t end = std::min(column + kSummedColumns, hidden);
      for (int64_t t = row; t < std::min(row + kRowsPerUnit, rows); ++t) {
        const int64_t part = t * hidden, at = (first + t) * hidden;
        for (int64_t i = column; i < end; i += 16) {
          const F32x16 sum = rounded<T>(parts.sum(part + i, part + end));
          put(residual + at + i, floats_of(x + at, i, end) + scaled<T>(sum, factor), end - i);
        }
      }
    });
  }

  template <class Product>
  void add_own(Product product, const NormWeights& output_norm, float factor, const T* x,
               T* residual) {
    const int64_t hidden = shape_.hidden;
    if (output_norm.weight != nullptr) {
      T* projected = workspace_ + at_.projected;
      product(to_rows(projected, hidden));
      each_row([&](int64_t t) {
        norm_row<T>(projected + t * hidden, output_norm, hidden, residual + t * hidden,
                    x + t * hidden, factor);
      });
      return;
    }
    product([&](int64_t block, int64_t row, int64_t rows, const float* sums) {
      const int64_t columns = std::min<int64_t>(hidden - block * kBlock, kBlock);
      int64_t at = row * hidden + block * kBlock;
      if (columns == kBlock) {
        for (int64_t m = 0; m < rows; ++m, sums += kBlock, at += hidden) {
          const auto half = [&](int64_t c) {
            return floats_of(x + at, c, kBlock) + scaled<T>(load<F32x16>(sums + c), factor);
          };
          Element<T>::store32_in_order(residual + at, half(0), half(16));
        }
        return;
      }
      for (int64_t m = 0; m < rows; ++m, sums += kBlock, at += hidden) {
        for (int64_t c = 0; c < columns; c += 16) {
          const F32x16 old = floats_of(x + at, c, columns);
          put(residual + at + c, old + scaled<T>(load<F32x16>(sums + c), factor), columns - c);
        }
      }
    });
  }

  template <class Publish>
  void mixture(const MlpBlock& mlp, const T* inputs, const char* after, Publish publish) {
    const MixtureStep step{&phases_, &job_.mixtures_at_,
                           reinterpret_cast<int32_t*>(job_.mixtures_.get()), step_.tokens};
    MixtureThread<T> thread(step, index_, sums_, gates_);
    const auto is_live = [&](int64_t row) { return step_.token_rows[row] != step_.rows - 1; };
    thread.run(*mlp.mixture, mlp.mixture_place, inputs, inputs, at_.normed_stride, phase_, after,
               is_live, publish);
  }

  // act(gate) * up of all rows, padded(inner) apart.
  void gated_mlp(const MlpBlock& mlp, const T* inputs) {
    T* inner = workspace_ + at_.inner;
    const int64_t size = mlp.inner;
    if (size % kBlock == 0) {
      gate_and_up(mlp, inputs, begin_of(mlp.down), inner);
      return;
    }
    // Columns of a gate and of its up lie in blocks that do not match.
    T* both = workspace_ + at_.gate_up;
    linear(mlp.gate_up, inputs, at_.normed_stride, begin_of(mlp.down), to_rows(both, 2 * size));
    each_row([&](int64_t t) {
      const T *gate = both + t * 2 * size, *up = gate + size;
      T* out = inner + t * padded(size);
      for (int64_t i = 0; i < size; i += 16) {
        put(out + i, gated<T>(floats_of(gate, i, size), floats_of(up, i, size), mlp.activation),
            size - i);
      }
      if (size % 2 != 0) out[size] = T(0.0f);  // read as half of a word
    });
  }

  // A unit is a block of gates and the block of their ups.
  void gate_and_up(const MlpBlock& mlp, const T* inputs, const char* after, T* inner) {
    const Weights& weights = mlp.gate_up;
    const int64_t groups = row_groups(step_.tokens), stride = padded(mlp.inner);
    const int64_t pairs = mlp.inner / kBlock, units = pairs * groups;
    GroupedInputs<T> grouped;
    const auto first_of = [&](int64_t unit) { return unit % groups * kGroupRows; };
    const auto rows_of = [&](int64_t unit) {
      return std::min(step_.tokens - first_of(unit), kGroupRows);
    };
    phases_.run(
        phase_++, units,
        [&](int64_t unit, int64_t next) {
          const int64_t pair = unit / groups, rows = rows_of(unit);
          const T* x = inputs + first_of(unit) * at_.normed_stride;
          const char* up = block_of(weights, pairs + pair);
          const char* then = next < units ? block_of(weights, next / groups) : after;
          run_block(weights, pair, x, at_.normed_stride, rows, up, grouped, gates_);
          run_block(weights, pairs + pair, x, at_.normed_stride, rows, then, grouped, sums_);
        },
        [&](int64_t unit) {
          T* out = inner + first_of(unit) * stride + unit / groups * kBlock;
          put_gated(gates_, sums_, rows_of(unit), mlp.activation, out, stride);
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
  uint32_t sum_;       // the next operation of ranks
  alignas(64) float sums_[kGroupRows * kBlock];
  alignas(64) float gates_[kGroupRows * kBlock];
};

}  // namespace stepgraph
