// All layers of a decoder as one job: its workspace, and how a step is shared out among threads.
#include "stack_thread.h"

namespace stepgraph {

void StackJob::work(int64_t index) {
  std::visit([&]<class T>(const StackStep<T>& step) { StackThread<T>(*this, step, index).run(); },
             step_);
}

template <class T>
void StackJob::prepare(const StackStep<T>& step, std::shared_ptr<const void> keep) {
  const StackShape& shape = stack_.shape_;
  const StackLayer& first = stack_.layers_.front();
  const int64_t bytes = bytes_of<T>(first.qkv) + bytes_of<T>(first.output) +
                        bytes_of<T>(first.gate_up) + bytes_of<T>(first.down);
  const int64_t tiles = (step.tokens + kTileRows - 1) / kTileRows;
  int threads = static_cast<int>(
      std::clamp<int64_t>(bytes * tiles / kLayerBytesPerThread, 1, step.threads));
  int64_t units = stack_.units(step.tokens);
  for (size_t i = 0; i < plans_.size(); ++i) {
    const auto [group, window] = stack_.plan_keys_[i];
    plans_[i].prepare({step.slots + group * step.tokens,
                       step.block_tables + group * step.rows * step.max_blocks, step.max_blocks,
                       step.token_rows, step.positions, step.tokens, shape.heads, shape.kv_heads,
                       shape.head_dim, shape.head_dim, step.num_blocks, step.block_size, window,
                       sizeof(T), shape.storage, step.threads}, attention_space_);
    threads = std::max(threads, plans_[i].threads);
    units = std::max(units, plans_[i].units());
  }
  at_ = stack_.layout(step.tokens, threads);
  workspace_.reserve(at_.total * static_cast<int64_t>(sizeof(T)) / sizeof(float));
  phases_.prepare(stack_.phases(), units, threads);
  const int64_t heads = shape.heads + 2 * shape.kv_heads, groups = row_groups(step.tokens);
  if (heads * groups > counted_) {
    counted_ = heads * groups;
    blocks_left_.reset(new std::atomic<int64_t>[counted_]);
  }
  for (int64_t i = 0; i < heads * groups; ++i) {
    blocks_left_[i].store(blocks_of_head(i / groups, shape.head_dim), std::memory_order_relaxed);
  }
  step_ = step;
  keep_ = std::move(keep);
}

Stack::Stack(const StackShape& shape, std::vector<StackLayer> layers, std::vector<StackPlan> plans,
             const void* norm)
    : shape_(shape),
      layers_(std::move(layers)),
      plan_keys_(std::move(plans)),
      norm_(norm),
      output_norms_(layers_.front().mlp_output_norm != nullptr),
      large_job_(std::make_unique<StackJob>(*this)) {}

Stack::~Stack() = default;

int64_t Stack::phases() const { return static_cast<int64_t>(layers_.size()) * kMostPhases + 1; }

int64_t Stack::units(int64_t tokens) const {
  const StackLayer& layer = layers_.front();
  int64_t blocks = 0;
  for (const Weights& weights : {layer.qkv, layer.output, layer.gate_up, layer.down}) {
    blocks = std::max(blocks, weights.blocks());
  }
  return blocks * row_groups(tokens);
}

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
  AttentionStep step{};
  step.heads = shape_.heads;
  step.kv_heads = shape_.kv_heads;
  step.head_dim = step.value_dim = shape_.head_dim;
  step.threads = threads;
  const auto bytes = [&](int64_t most) {
    // A few rows may take more than many, since each thread norms them for itself.
    const int64_t few = std::min(most, kOwnRows);
    const int64_t elements = std::max(layout(most, threads).total, layout(few, threads).total);
    step.tokens = most;
    return elements * element_bytes + AttentionPlan::scratch_bytes(step) +
           Phases::bytes(phases(), units(most));
  };
  // A step of few tokens may find each pool thread late in a step of its own.
  const int64_t large = tokens > kMostLateTokens ? bytes(tokens) : 0;
  return large + threads * bytes(std::min(tokens, kMostLateTokens));
}

int64_t Stack::positions() const {
  int64_t most = 0;
  for (const StackLayer& layer : layers_) most = std::max(most, layer.position + 1);
  return most;
}

template <class T>
void Stack::run(const StackStep<T>& step, std::shared_ptr<const void> keep) {
  if (step.tokens == 0) return;
  const std::lock_guard<std::mutex> alone(busy_);
  // A step of many tokens waits for late threads before and after.
  const bool large = step.tokens > kMostLateTokens;
  if (large) large_job_->acquire();
  StackJob& job = large ? *large_job_ : jobs_.acquire(*this);
  job.prepare_or_release([&] { job.prepare(step, std::move(keep)); });
  job.run(job.threads(), large);
}

template void Stack::run(const StackStep<c10::BFloat16>&, std::shared_ptr<const void>);
template void Stack::run(const StackStep<float>&, std::shared_ptr<const void>);

}  // namespace stepgraph
