// Recurrences and convolutions on their own: one phase, whose units are heads or features of a run.
#include "recurrent.h"

#include "phases.h"
#include "pool.h"

namespace stepgraph {
namespace {

constexpr int64_t kBytesPerThread = 32 * 1024;  // below, a second thread costs more than it brings
constexpr int64_t kConvFeatures = 256;          // of a unit
constexpr int64_t kConvElementsPerThread = 16 * 1024;

// What both kinds of job have: a plan, and the units of one phase on memory of each thread.
class StateJob : public Job {
 protected:
  // Returns the number of threads.
  int prepare_units(const StateStep& step, int64_t units_of_run, int64_t useful,
                    std::shared_ptr<const void> keep) {
    units_of_run_ = units_of_run;
    const int64_t units = static_cast<int64_t>(plan_.runs.size()) * units_of_run;
    const int threads = useful_threads(std::min(useful, units), step.threads);
    phases_.prepare(1, units, threads);
    keep_ = std::move(keep);
    return threads;
  }

  // compute(run, unit of the run), publish(run, unit of the run)
  template <class Compute, class Publish>
  void run_units(Compute compute, Publish publish) {
    const int64_t units = static_cast<int64_t>(plan_.runs.size()) * units_of_run_;
    phases_.run(
        0, units,
        [&](int64_t unit, int64_t) {
          compute(plan_.runs[unit / units_of_run_], unit % units_of_run_);
        },
        [&](int64_t unit) { publish(plan_.runs[unit / units_of_run_], unit % units_of_run_); });
  }

  StatePlan plan_;
  WorkSpace space_;

 private:
  int64_t units_of_run_ = 1;
  Phases phases_;
};

class RecurrenceJob : public StateJob {
 public:
  int prepare(const RecurrenceArgs& args, const StateStep& step,
              std::shared_ptr<const void> keep) {
    args_ = args;
    plan_.prepare(step.states, step.positions, step.token_rows, step.tokens);
    const int64_t runs = static_cast<int64_t>(plan_.runs.size());
    const int64_t bytes =
        args.shape.state_bytes() * (runs + step.tokens / plan_.block_size) / kBytesPerThread;
    const int threads = prepare_units(step, args.shape.units(), bytes, std::move(keep));
    floats_ = RecurrenceWorker::floats(args.shape, plan_);
    space_.reserve(floats_ * threads);
    return threads;
  }

 protected:
  void work(int64_t index) override {
    const RecurrenceArgs args = args_;
    const RecurrenceShape& shape = args.shape;
    RecurrenceWorker worker(shape, plan_, space_.get() + index * floats_);
    const StateRun* own = nullptr;
    const auto fill = [&](int64_t head, const HeadRows& rows) {
      const auto copy = [](const float* from, int64_t size, float* to, int64_t padded) {
        std::fill(std::copy_n(from, size, to), to + padded, 0.0f);
      };
      for (int64_t j = own->offset; j < own->end(); ++j) {
        const int64_t t = own->first + j - own->offset, value_head = t * shape.heads + head;
        const int64_t key = (t * shape.key_heads + shape.key_head(head)) * shape.key;
        copy(args.q + key, shape.key, rows.q + j * rows.key_stride, rows.key_stride);
        copy(args.k + key, shape.key, rows.k + j * rows.key_stride, rows.key_stride);
        copy(args.v + value_head * shape.value, shape.value, rows.u + j * rows.value_stride,
             rows.value_stride);
        copy(args.g + value_head * shape.decays, shape.decays, rows.g + j * rows.decay_stride,
             rows.decay_stride);
        if (shape.delta) rows.beta[j] = args.beta[value_head];
      }
    };
    run_units(
        [&](const StateRun& run, int64_t unit) {
          own = &run;
          worker.compute(run, unit, fill, [](int64_t, const HeadRows&) {});
        },
        [&](const StateRun& run, int64_t unit) {
          worker.publish(run, unit, [&](int64_t head, const HeadRows& rows) {
            for (int64_t j = run.offset; j < run.end(); ++j) {
              const int64_t t = run.first + j - run.offset;
              std::copy_n(rows.out + j * rows.value_stride, shape.value,
                          args.out + (t * shape.heads + head) * shape.value);
            }
          });
        });
  }

 private:
  RecurrenceArgs args_;
  int64_t floats_ = 0;  // of a thread
};

template <class T>
class ConvJob : public StateJob {
 public:
  int prepare(const ConvArgs<T>& args, const StateStep& step, std::shared_ptr<const void> keep) {
    args_ = args;
    plan_.prepare(step.states, step.positions, step.token_rows, step.tokens);
    const int64_t features = args.weights.features, elements = step.tokens * features;
    const int threads =
        prepare_units(step, (features + kConvFeatures - 1) / kConvFeatures,
                      elements / kConvElementsPerThread, std::move(keep));
    elements_ = ConvWorker<T>::elements(args.weights, plan_, kConvFeatures);
    results_at_ = elements_;
    elements_ += plan_.most_tokens * kConvFeatures;
    elements_ = (elements_ + 31) / 32 * 32;
    space_.reserve(elements_ * threads);
    return threads;
  }

 protected:
  void work(int64_t index) override {
    const ConvArgs<T> args = args_;
    const int64_t features = args.weights.features;
    T* space = reinterpret_cast<T*>(space_.get()) + index * elements_;
    T* results = space + results_at_;
    ConvWorker<T> worker(args.weights, plan_);
    const auto size_of = [&](int64_t begin) { return std::min(features - begin, kConvFeatures); };
    run_units(
        [&](const StateRun& run, int64_t unit) {
          const int64_t begin = unit * kConvFeatures, size = size_of(begin);
          worker.load(run, begin, size, space, [&](int64_t t, T* out) {
            std::copy_n(args.x + t * features + begin, size, out);
          });
          for (int64_t i = 0; i < run.count; ++i) {
            for (int64_t at = 0; at < size; at += 16) {
              put(results + i * kConvFeatures + at, worker.result(run.offset + i, at), size - at);
            }
          }
        },
        [&](const StateRun& run, int64_t unit) {
          const int64_t begin = unit * kConvFeatures, size = size_of(begin);
          worker.publish();
          for (int64_t i = 0; i < run.count; ++i) {
            std::copy_n(results + i * kConvFeatures, size,
                        args.out + (run.first + i) * features + begin);
          }
        });
  }

 private:
  ConvArgs<T> args_;
  int64_t elements_ = 0, results_at_ = 0;  // of a thread
};

}  // namespace

void run_recurrence(const RecurrenceArgs& args, const StateStep& step,
                    std::shared_ptr<const void> keep) {
  run_job<RecurrenceJob>(args, step, std::move(keep));
}

template <class T>
void run_causal_conv(const ConvArgs<T>& args, const StateStep& step,
                     std::shared_ptr<const void> keep) {
  run_job<ConvJob<T>>(args, step, std::move(keep));
}

template void run_causal_conv(const ConvArgs<c10::BFloat16>&, const StateStep&,
                              std::shared_ptr<const void>);
template void run_causal_conv(const ConvArgs<c10::Half>&, const StateStep&,
                              std::shared_ptr<const void>);
template void run_causal_conv(const ConvArgs<float>&, const StateStep&,
                              std::shared_ptr<const void>);

}  // namespace stepgraph
