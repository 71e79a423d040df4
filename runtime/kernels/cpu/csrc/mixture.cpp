#include "mixture_thread.h"

namespace stepgraph {
namespace {

// Below this a second thread costs more than it brings: bytes of weights, times the tiles of rows
// that pass over them.
constexpr int64_t kBytesPerThread = 32 * 1024;

template <class T>
class MixtureJob : public Job {
 public:
  int prepare(const MixtureArgs<T>& args, std::shared_ptr<const void> keep) {
    args_ = args;
    const Mixture& mixture = args.mixture;
    const int64_t tiles = (args.tokens + kTileRows - 1) / kTileRows;
    const int threads =
        useful_threads(mixture.token_bytes() * tiles / kBytesPerThread, args.threads);
    at_ = MixtureLayout();
    at_.add(mixture, args.tokens, sizeof(T));
    at_.finish(threads);
    space_.reserve(at_.total);
    phases_.prepare(kMixturePhases, mixture.units(args.tokens), threads);
    keep_ = std::move(keep);
    return threads;
  }

 protected:
  void work(int64_t index) override {
    alignas(64) float sums[kGroupRows * kBlock];
    alignas(64) float gates[kGroupRows * kBlock];
    const MixtureArgs<T> args = args_;
    const MixtureStep step{&phases_, &at_, reinterpret_cast<int32_t*>(space_.get()), args.tokens};
    int64_t phase = 0;
    MixtureThread<T>(step, index, sums, gates).run(
        args.mixture, 0, args.x, args.router_x, args.x_stride, phase, nullptr,
        [&](int64_t row) { return args.live == nullptr || args.live[row]; },
        to_rows(args.out, args.mixture.hidden));
  }

  void clear() override {
    space_ = WorkSpace();
    Job::clear();
  }

 private:
  MixtureArgs<T> args_;
  MixtureLayout at_;
  WorkSpace space_;
  Phases phases_;
};

}  // namespace

template <class T>
void run_mixture(const MixtureArgs<T>& args, std::shared_ptr<const void> keep) {
  if (args.tokens > 0) run_job<MixtureJob<T>>(args, std::move(keep));
}

template void run_mixture(const MixtureArgs<c10::BFloat16>&, std::shared_ptr<const void>);
template void run_mixture(const MixtureArgs<float>&, std::shared_ptr<const void>);

}  // namespace stepgraph
