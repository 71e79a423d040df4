// A step of all layers (`stack.h`) as a job: its memory, and the counters of what is left to do.
#pragma once

#include <variant>

#include "mixture.h"
#include "stack.h"

namespace stepgraph {

constexpr int64_t kOwnRows = 16;  // up to so many rows are normed by every thread for itself
static_assert(kOwnRows <= kFewMixtureRows);
// Below this a layer's second thread costs more than it brings: bytes of weights, times the tiles
// of rows that pass over them.
constexpr int64_t kLayerBytesPerThread = 128 * 1024;
constexpr int kMostPhases = 8 + kMixturePhases;  // of a layer
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
  const int64_t counter = rotated + shape.kv_heads;  // after those of single heads
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
  WorkSpace mixtures_;
  MixtureLayout mixtures_at_;
  Phases phases_;
  uint32_t first_sum_ = 0;   // number of the step's first operation of ranks
  int64_t summed_rows_ = 0;  // of an operation
  // Blocks of qkv that are not done yet in the layer: [ranges of heads][groups of rows].
  std::unique_ptr<std::atomic<int64_t>[]> blocks_left_;
  int64_t counted_ = 0;
};

}  // namespace stepgraph
