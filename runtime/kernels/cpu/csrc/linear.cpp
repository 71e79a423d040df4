// The tiles of `linear.h` for each kind of weight, and linear layers on their own.
#include "linear.h"

#include <utility>

#include "int8.h"
#include "stack_math.h"

namespace stepgraph {
namespace {

// Below this a second thread costs more than it brings.
constexpr int64_t kBytesPerThread = 32 * 1024;

// How a packed weight is stored: what a step of a block takes, and its dot tile.
template <class T>
struct ModelCodec {
  using Word = typename Element<T>::Word;
  static constexpr int kStepLines = kStepBytes / 64;
  static constexpr int64_t kRowsWithoutPrefetch = 2;  // measured on Zen 5

  template <int M, int Lines>
  static void dot(const Word* x, int64_t x_stride, const char* w, int64_t steps,
                  const char* prefetch, F32x16 (&acc)[M][2]) {
    dot_tile<M, Lines>(x, x_stride, reinterpret_cast<const Word*>(w), steps, prefetch, acc);
  }
};

// Of half the bytes a step, which the hardware does not ask for early enough.
template <class T>
struct Int8Codec {
  using Word = typename Element<T>::Word;
  static constexpr int kStepLines = kInt8StepBytes / 64;
  static constexpr int64_t kRowsWithoutPrefetch = 0;  // measured on Zen 5

  template <int M, int Lines>
  static void dot(const Word* x, int64_t x_stride, const char* w, int64_t steps,
                  const char* prefetch, F32x16 (&acc)[M][2]) {
    dot_tile_int8<M, Lines>(x, x_stride, reinterpret_cast<const int8_t*>(w), steps, prefetch, acc);
  }
};

template <class Codec, int M, int Lines>
void run_tile(const LinearTile& tile) {
  F32x16 acc[M][2];
  Codec::template dot<M, Lines>(static_cast<const typename Codec::Word*>(tile.x), tile.x_stride,
                                tile.w, tile.steps, tile.prefetch, acc);
  for (int m = 0; m < M; ++m) {
    store(tile.sums + m * kBlock, acc[m][0]);
    store(tile.sums + m * kBlock + 16, acc[m][1]);
  }
}

template <class Codec, size_t... Index>
constexpr TileSet make_tile_set(std::index_sequence<Index...>) {
  return {{{run_tile<Codec, Index + 1, 0>...},
           {run_tile<Codec, Index + 1, 1>...},
           {run_tile<Codec, Index + 1, Codec::kStepLines>...}},
          Codec::kStepLines,
          Codec::kRowsWithoutPrefetch};
}

template <class Codec>
constexpr TileSet kTileSet = make_tile_set<Codec>(std::make_index_sequence<kTileRows>());

}  // namespace

template <class T>
const TileSet& tile_set(WeightKind kind) {
  return kind == WeightKind::kInt8 ? kTileSet<Int8Codec<T>> : kTileSet<ModelCodec<T>>;
}

namespace {

template <class T>
class LinearJob : public Job {
 public:
  int prepare(const LinearArgs<T>& args, std::shared_ptr<const void> keep) {
    args_ = args;
    keep_ = std::move(keep);
    const int64_t tiles = (args.rows + kTileRows - 1) / kTileRows;
    const int64_t units = args.weights.blocks() * row_groups(args.rows);
    const int64_t useful = std::min(bytes_of<T>(args.weights) * tiles / kBytesPerThread, units);
    const int threads = useful_threads(useful, args.threads);
    phases_.prepare(1, units, threads);
    return threads;
  }

 protected:
  void work(int64_t) override {
    alignas(64) float sums[kGroupRows * kBlock];
    const LinearArgs<T> args = args_;
    linear_phase(phases_, 0, args.weights, args.x, args.x_stride, args.rows, nullptr, sums,
                 to_rows(args.out, args.weights.columns));
  }

 private:
  LinearArgs<T> args_;
  Phases phases_;
};

}  // namespace

template <class T>
void packed_linear(const LinearArgs<T>& args, std::shared_ptr<const void> keep) {
  run_job<LinearJob<T>>(args, std::move(keep));
}

template const TileSet& tile_set<c10::BFloat16>(WeightKind);
template const TileSet& tile_set<float>(WeightKind);
template void packed_linear(const LinearArgs<c10::BFloat16>&, std::shared_ptr<const void>);
template void packed_linear(const LinearArgs<float>&, std::shared_ptr<const void>);

}  // namespace stepgraph
