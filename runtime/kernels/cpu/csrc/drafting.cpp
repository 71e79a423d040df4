// The jobs of `drafting.h`. The arithmetic and every rounding are those of the modules in
// `models/drafters/`.
#include "drafting.h"

#include <algorithm>
#include <cmath>

#include "linear.h"
#include "stack_job.h"
#include "work_space.h"

namespace stepgraph {
namespace {

// Below this a second thread costs more than it brings.
constexpr int64_t kBytesPerThread = 32 * 1024;

template <class T>
int useful_threads(int64_t bytes, int64_t rows, int64_t units, int most) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  return static_cast<int>(
      std::clamp<int64_t>(std::min(bytes * tiles / kBytesPerThread, units), 1, most));
}

// The largest logits of each block and row, first one or with their sum: what all threads write.
class Parts {
 public:
  void prepare(int64_t blocks, int64_t rows) {
    stride_ = (blocks + 15) / 16 * 16;
    maxima_ = space_.reserve(3 * rows * stride_);
    sums_ = maxima_ + rows * stride_;
    ids_ = reinterpret_cast<int32_t*>(sums_ + rows * stride_);
    for (int64_t row = 0; row < rows; ++row) {
      std::fill_n(maxima_ + row * stride_ + blocks, stride_ - blocks, kMinusInfinity);
      std::fill_n(sums_ + row * stride_ + blocks, stride_ - blocks, 0.0f);
    }
  }

  // Logits of a block as sums before they are rounded; those behind the last column do not count.
  template <class T>
  void put(int64_t row, int64_t block, const float* sums, int64_t columns) {
    alignas(64) float logits[kBlock];
    F32x16 first = rounded<T>(load<F32x16>(sums)), second = rounded<T>(load<F32x16>(sums + 16));
    store(logits, first);
    store(logits + 16, second);
    if (columns < kBlock) {
      std::fill(logits + columns, logits + kBlock, kMinusInfinity);
      first = load<F32x16>(logits);
      second = load<F32x16>(logits + 16);
    }
    float most = std::max(lane_max(first), lane_max(second)), sum = 0.0f;
    const F32x16 zeros = (first - first) + (second - second);  // NaN where one is not finite
    if (columns == kBlock && std::isfinite(lane_sum(zeros))) {
      sum = lane_sum(exp_nonpositive(first - most) + exp_nonpositive(second - most));
    } else {
      most = kMinusInfinity;
      for (int64_t i = 0; i < kBlock; ++i) {
        most = std::isnan(logits[i]) ? -kMinusInfinity : std::max(most, logits[i]);
      }
      for (int64_t i = 0; i < kBlock && std::isfinite(most); ++i) sum += std::exp(logits[i] - most);
    }
    const int64_t place = row * stride_ + block;
    maxima_[place] = most;
    sums_[place] = sum;
    const auto found = std::find(logits, logits + kBlock, most);
    ids_[place] = static_cast<int32_t>(block * kBlock + (found - logits));
  }

  // The most likely token of a row whose blocks are all there.
  void choose(int64_t row, int64_t* token, float* probability) const {
    const float *maxima = maxima_ + row * stride_, *sums = sums_ + row * stride_;
    const float* best = std::max_element(maxima, maxima + stride_);
    *token = 0;
    *probability = 0.0f;
    if (!std::isfinite(*best)) return;
    F32x16 total{};
    for (int64_t i = 0; i < stride_; i += 16) {
      total += load<F32x16>(sums + i) * exp_nonpositive(load<F32x16>(maxima + i) - *best);
    }
    *token = ids_[row * stride_ + (best - maxima)];
    *probability = 1.0f / lane_sum(total);
  }

 private:
  WorkSpace space_;
  int64_t stride_ = 0;
  float *maxima_ = nullptr, *sums_ = nullptr;  // [rows][stride]
  int32_t* ids_ = nullptr;
};

template <class T>
class ChoiceJob : public Job {
 public:
  int prepare(const ChoiceArgs<T>& args, std::shared_ptr<const void> keep) {
    const LinearArgs<T>& linear = args.linear;
    const int64_t units = linear.weights.blocks() * row_groups(linear.rows);
    const int threads =
        useful_threads<T>(bytes_of<T>(linear.weights), linear.rows, units, linear.threads);
    args_ = args;
    keep_ = std::move(keep);
    parts_.prepare(linear.weights.blocks(), linear.rows);
    phases_.prepare(2, std::max(units, linear.rows), threads);
    return threads;
  }

 protected:
  void work(int64_t) override {
    alignas(64) float sums[kGroupRows * kBlock];
    const LinearArgs<T>& linear = args_.linear;
    linear_phase(phases_, 0, linear.weights, linear.x, linear.x_stride, linear.rows, nullptr, sums,
                 [&](int64_t block, int64_t row, int64_t rows, const float* sum) {
                   const int64_t columns = linear.weights.columns - block * kBlock;
                   for (int64_t m = 0; m < rows; ++m) {
                     parts_.put<T>(row + m, block, sum + m * kBlock, columns);
                   }
                 });
    phases_.run(1, linear.rows, [&](int64_t row) {
      parts_.choose(row, args_.tokens + row, args_.probabilities + row);
    });
  }

  void clear() override { keep_.reset(); }

 private:
  ChoiceArgs<T> args_;
  std::shared_ptr<const void> keep_;
  Parts parts_;
  Phases phases_;
};

template <class T>
class ContextJob : public Job {
 public:
  int prepare(const ContextArgs<T>& args, std::shared_ptr<const void> keep) {
    const int64_t tokens = args.step.tokens;
    const int64_t units = std::max(args.fuse.blocks(), args.context.blocks()) * row_groups(tokens);
    const int64_t bytes = bytes_of<T>(args.fuse) + bytes_of<T>(args.context);
    const int threads = useful_threads<T>(bytes, tokens, units, args.step.threads);
    args_ = args;
    keep_ = std::move(keep);
    phases_.prepare(4, std::max(units, (tokens + kRowsPerUnit - 1) / kRowsPerUnit), threads);
    return threads;
  }

 protected:
  void work(int64_t index) override {
    alignas(64) float sums[kGroupRows * kBlock];
    const ContextArgs<T>& args = args_;
    const int64_t tokens = args.step.tokens, hidden = args.fuse.columns;
    const int64_t stride = padded(hidden), size = args.context.columns;
    T *fused = args.scratch, *all = fused + tokens * stride, *normed = all + tokens * size;
    const auto put_to = [&](T* out, int64_t columns, int64_t out_stride) {
      return [=](int64_t block, int64_t row, int64_t rows, const float* sum) {
        put_sums(sum, rows, columns - block * kBlock, out + row * out_stride + block * kBlock,
                 out_stride);
      };
    };
    const int64_t begin = std::min(index, args.context.blocks() - 1) * block_bytes<T>(args.context);
    linear_phase(phases_, 0, args.fuse, args.features, args.features_stride, tokens,
                 args.context.packed + begin, sums, put_to(fused, hidden, stride));
    const auto norm = [&](int64_t t) {
      norm_row<T>(fused + t * stride, args.norm, hidden, normed + t * stride);
      if (hidden % 2 != 0) normed[t * stride + hidden] = T(0.0f);  // read as half of a word
    };
    if (tokens > kOwnRows) {
      each_row(1, norm);
    } else {  // few rows are normed by every thread for itself
      normed += index * tokens * stride;
      for (int64_t t = 0; t < tokens && !phases_.over(2); ++t) norm(t);
    }
    linear_phase(phases_, 2, args.context, normed, stride, tokens, nullptr, sums,
                 put_to(all, size, size));
    each_row(3, [&](int64_t t) { store_token(t, all); });
  }

  void clear() override { keep_.reset(); }

 private:
  template <class Visit>
  void each_row(int64_t phase, Visit visit) {
    const int64_t rows = args_.step.tokens;
    phases_.run(phase, (rows + kRowsPerUnit - 1) / kRowsPerUnit, [&](int64_t unit) {
      const int64_t end = std::min(rows, (unit + 1) * kRowsPerUnit);
      for (int64_t t = unit * kRowsPerUnit; t < end; ++t) visit(t);
    });
  }

  // Norms and rotates the keys of a token in all layers, and stores them and its values.
  void store_token(int64_t t, T* all) const {
    const ContextArgs<T>& args = args_;
    const int64_t d = args.step.head_dim, heads = args.step.kv_heads;
    const int64_t size = args.context.columns, angles = t * (d / 2);
    for (size_t layer = 0; layer < args.keys.size(); ++layer) {
      T* k = all + static_cast<int64_t>(layer) * 2 * heads * d;
      const NormWeights norm{args.key_norms + static_cast<int64_t>(layer) * d, args.norm.eps};
      const AttentionArgs<T> side{nullptr, k, k + heads * d, {0, 0}, {size, d}, {size, d},
                                  args.keys[layer], args.keys[layer] + args.side_bytes, nullptr,
                                  0.0f, 0.0f};
      for (int64_t head = 0; head < heads; ++head) {
        T* key = k + t * size + head * d;
        norm_row<T>(key, norm, d, key);
        rotate_row(key, args.cos + angles, args.sin + angles, d / 2);
        store_head(side, args.step, false, head, t, 1);
        store_head(side, args.step, true, head, t, 1);
      }
    }
  }

  ContextArgs<T> args_;
  std::shared_ptr<const void> keep_;
  Phases phases_;
};

template <class J>
JobList<J>& jobs_of() {
  static auto* jobs = new JobList<J>;
  return *jobs;
}

}  // namespace

void sweep_drafting_jobs() {
  jobs_of<ChoiceJob<c10::BFloat16>>().sweep();
  jobs_of<ChoiceJob<float>>().sweep();
  jobs_of<ContextJob<c10::BFloat16>>().sweep();
  jobs_of<ContextJob<float>>().sweep();
}

template <class T>
void most_likely_after(const ChoiceArgs<T>& args, std::shared_ptr<const void> keep) {
  if (args.linear.rows == 0) return;
  ChoiceJob<T>& job = jobs_of<ChoiceJob<T>>().acquire();
  const int threads = job.prepare(args, std::move(keep));
  job.run(threads, false);
}

template <class T>
int64_t context_scratch(const ContextArgs<T>& args) {
  const int64_t tokens = args.step.tokens, stride = padded(args.fuse.columns);
  const int64_t copies = tokens > kOwnRows ? 1 : args.step.threads;
  return tokens * (stride + args.context.columns + copies * stride);
}

template <class T>
void store_context(const ContextArgs<T>& args, std::shared_ptr<const void> keep) {
  if (args.step.tokens == 0) return;
  ContextJob<T>& job = jobs_of<ContextJob<T>>().acquire();
  const int threads = job.prepare(args, std::move(keep));
  job.run(threads, false);
}

template void most_likely_after(const ChoiceArgs<c10::BFloat16>&, std::shared_ptr<const void>);
template void most_likely_after(const ChoiceArgs<float>&, std::shared_ptr<const void>);
template int64_t context_scratch(const ContextArgs<c10::BFloat16>&);
template int64_t context_scratch(const ContextArgs<float>&);
template void store_context(const ContextArgs<c10::BFloat16>&, std::shared_ptr<const void>);
template void store_context(const ContextArgs<float>&, std::shared_ptr<const void>);

}  // namespace stepgraph
