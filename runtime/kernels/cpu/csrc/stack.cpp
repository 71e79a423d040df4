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
  const int64_t tiles = (step.tokens + kTileRows - 1) / kTileRows;
  int threads =
      useful_threads(stack_.layer_bytes<T>() * tiles / kLayerBytesPerThread, step.threads);
  int64_t units = stack_.units(step.tokens);
  for (size_t i = 0; i < plans_.size(); ++i) {
    const auto [group, window, chunk] = stack_.plan_keys_[i];
    plans_[i].prepare({step.slots + group * step.tokens,
                       step.block_tables + group * step.rows * step.max_blocks, step.max_blocks,
                       step.token_rows, step.positions, step.tokens, shape.heads, shape.kv_heads,
                       shape.head_dim, shape.head_dim, step.num_blocks, step.block_size, window,
                       chunk, sizeof(T), shape.storage, step.threads}, attention_space_);
    threads = std::max(threads, plans_[i].threads);
    units = std::max(units, plans_[i].units());
  }
  int64_t recurrent_floats = 0;
  if (step.states.snapshots != nullptr) {
    states_.prepare(step.states, step.positions, step.token_rows, step.tokens);
    const int64_t runs = static_cast<int64_t>(states_.runs.size());
    const int64_t padding = static_cast<int64_t>(states_.padding.size());
    stack_.each<RecurrentBlock>([&](const RecurrentBlock& block) {
      recurrent_floats = std::max(recurrent_floats, block.recurrent.floats<T>(states_));
      units = std::max(units, runs * block.recurrent.units() + padding);
    });
  }
  recurrent_floats_ = recurrent_floats;
  recurrent_.reserve(recurrent_floats * threads);
  at_ = stack_.layout(step.tokens, threads);
  workspace_.reserve(at_.total * static_cast<int64_t>(sizeof(T)) / sizeof(float));
  mixtures_at_ = stack_.mixtures(step.tokens, sizeof(T), threads);
  mixtures_.reserve(mixtures_at_.total);
  phases_.prepare(stack_.phases(step.tokens, sizeof(T)), units, threads);
  // A counter for each head, and for all queries and all keys.
  const int64_t groups = row_groups(step.tokens);
  const int64_t counters = (shape.qkv_size() / shape.head_dim + 2) * groups;
  if (counters > counted_) {
    counted_ = counters;
    blocks_left_.reset(new std::atomic<int64_t>[counters]);
  }
  for (const bool all_heads : {false, true}) {
    for (int64_t column = 0; column < shape.qkv_size();) {
      const HeadRange range = head_range(shape, all_heads, column);
      for (int64_t group = 0; group < groups; ++group) {
        blocks_left_[range.index * groups + group].store(range.blocks(), std::memory_order_relaxed);
      }
      column = range.end;
    }
  }
  bytes_.store(workspace_.bytes() + mixtures_.bytes() + recurrent_.bytes() + attention_space_.scratch.bytes() +
                   attention_space_.parts.bytes(),
               std::memory_order_relaxed);
  step_ = step;
  keep_ = std::move(keep);
  if (stack_.communicator_ != nullptr) {
    summed_rows_ = stack_.summed_rows(step.tokens, sizeof(T));
    const int64_t chunks = (step.tokens + summed_rows_ - 1) / summed_rows_;
    first_sum_ = stack_.communicator_->reserve(stack_.sums() * chunks);
  }
}

Stack::Stack(const StackShape& shape, std::vector<StackBlock> blocks, std::vector<StackPlan> plans,
             NormWeights norm, Communicator* communicator)
    : shape_(shape),
      blocks_(std::move(blocks)),
      layers_(std::count_if(blocks_.begin(), blocks_.end(),
                            [](const StackBlock& block) { return block.ends_layer; })),
      plan_keys_(std::move(plans)),
      norm_(norm),
      communicator_(communicator),
      large_job_(new StackJob(*this)) {}

Stack::~Stack() = default;

bool Stack::reads_embeddings() const {
  bool reads = false;
  each<AttentionBlock>([&](const AttentionBlock& block) {
    reads |= block.embedding_norm.weight != nullptr;
  });
  return reads;
}

int64_t Stack::phases(int64_t tokens, int64_t element_bytes) const {
  int64_t phases = static_cast<int64_t>(blocks_.size()) * kMostPhases + 1;
  if (communicator_ != nullptr) {
    const int64_t rows = summed_rows(tokens, element_bytes);
    phases += sums() * 2 * ((tokens + rows - 1) / rows);
  }
  return phases;
}

int64_t Stack::sums() const {
  int64_t sums = 0;
  for (const StackBlock& block : blocks_) sums += block.summed;
  each<AttentionBlock>([&](const AttentionBlock& block) { sums += block.head_ranks > 1; });
  return sums;
}

int64_t Stack::summed_rows(int64_t tokens, int64_t element_bytes) const {
  const int64_t row_bytes = std::max(shape_.hidden * element_bytes, kMeansBytes);
  return std::min(tokens, communicator_->part_bytes() / row_bytes);
}

int64_t Stack::units(int64_t tokens) const {
  int64_t blocks = 0, of_mixtures = 0;
  each<AttentionBlock>([&](const AttentionBlock& block) {
    blocks = std::max({blocks, block.qkv.blocks(), block.output.blocks()});
  });
  each<RecurrentBlock>([&](const RecurrentBlock& block) {
    blocks = std::max({blocks, block.inputs.blocks(), block.output.blocks()});
  });
  each<MlpBlock>([&](const MlpBlock& block) {
    if (block.mixture) of_mixtures = std::max(of_mixtures, block.mixture->units(tokens));
    blocks = std::max({blocks, block.gate_up.blocks(), block.down.blocks()});
  });
  const int64_t row_units = (tokens + kRowsPerUnit - 1) / kRowsPerUnit;
  const int64_t summed_columns = (shape_.hidden + kSummedColumns - 1) / kSummedColumns;
  return std::max({blocks * row_groups(tokens),
                   row_units * (communicator_ == nullptr ? 1 : summed_columns), of_mixtures});
}

template <class T>
int64_t Stack::layer_bytes() const {
  int64_t bytes = 0;
  each<AttentionBlock>([&](const AttentionBlock& block) {
    bytes += bytes_of(block.qkv) + bytes_of(block.output);
  });
  each<RecurrentBlock>([&](const RecurrentBlock& block) {
    bytes += bytes_of(block.inputs) + bytes_of(block.output);
  });
  each<MlpBlock>([&](const MlpBlock& block) {
    if (block.mixture) bytes += block.mixture->token_bytes();
    if (block.inner > 0) bytes += bytes_of(block.gate_up) + bytes_of(block.down);
  });
  return bytes / layers_;
}

MixtureLayout Stack::mixtures(int64_t tokens, int64_t element_bytes, int threads) const {
  MixtureLayout at;
  each<MlpBlock>([&](const MlpBlock& block) {
    if (block.mixture) at.add(*block.mixture, tokens, element_bytes);
  });
  at.finish(threads);
  return at;
}

Stack::Layout Stack::layout(int64_t tokens, int threads) const {
  Layout at{};
  const auto take = [&](int64_t elements) {
    const int64_t begin = at.total;
    at.total += (elements + kBlock - 1) / kBlock * kBlock;
    return begin;
  };
  const bool own = tokens <= kOwnRows;
  int64_t inner = 0, unaligned = 0;  // the widest MLP, and of those with incomplete blocks
  bool shared = false;
  bool projected = false;  // a product is written as a whole before it is added
  for (const StackBlock& block : blocks_) {
    projected |= block.output_norm.weight != nullptr || block.summed;
  }
  each<MlpBlock>([&](const MlpBlock& block) {
    if (block.inner > 0) inner = std::max(inner, padded(block.inner));
    shared |= block.is_shared();
    if (block.inner % kBlock != 0) unaligned = std::max(unaligned, 2 * block.inner);
  });
  int64_t qkv = shape_.qkv_size(), attended = shape_.query_size();
  bool gated = false;
  each<AttentionBlock>([&](const AttentionBlock& block) { gated |= block.gate.has_value(); });
  each<RecurrentBlock>([&](const RecurrentBlock& block) {
    qkv = std::max(qkv, block.inputs.columns);
    attended = std::max(attended, padded(block.recurrent.features()));
  });
  at.normed_stride = padded((reads_embeddings() ? 2 : 1) * shape_.hidden);
  at.own_size = tokens * at.normed_stride;
  at.x = take(tokens * shape_.hidden);
  at.normed = take(own ? 0 : at.own_size);
  at.own = take(own ? threads * at.own_size : 0);
  at.qkv = take(tokens * qkv);
  at.attended = take(tokens * attended);
  at.gate = take(gated ? tokens * shape_.query_size() : 0);
  at.projected = take(projected ? tokens * shape_.hidden : 0);
  at.inner = take(tokens * inner);
  at.gate_up = take(tokens * unaligned);
  at.shared = take(shared ? tokens * shape_.hidden : 0);
  at.shared_gates = take(shared ? tokens : 0);
  return at;
}

int64_t Stack::workspace_bytes() {
  int64_t bytes = large_job_->bytes();
  jobs_.each([&](const StackJob& job) { bytes += job.bytes(); });
  return bytes;
}

Stack::StateSizes Stack::state_sizes(int64_t element_bytes) const {
  StateSizes most;
  const auto reserve = [&](int64_t snapshot_end, int64_t token_end) {
    most = {std::max(most.snapshot, snapshot_end), std::max(most.token, token_end)};
  };
  each<RecurrentBlock>([&](const RecurrentBlock& block) {
    const ConvWeights& conv = block.recurrent.conv;
    const int64_t bytes = conv.features * element_bytes;
    reserve(conv.snapshot_place + (conv.count - 1) * bytes, conv.input_place + bytes);
    if (block.recurrent.is_conv()) return;
    const RecurrenceShape& shape = block.recurrent.shape;
    const int64_t sizes[3] = {shape.key_heads * shape.key, shape.heads * shape.value,
                              shape.heads * shape.decays};
    for (int i = 0; i < 3; ++i) {
      reserve(shape.snapshot_place + shape.state_bytes(),
              shape.input_places[i] + sizes[i] * static_cast<int64_t>(sizeof(float)));
    }
  });
  return most;
}

int64_t Stack::positions() const {
  int64_t most = 0;
  each<AttentionBlock>([&](const AttentionBlock& block) {
    most = std::max(most, block.position + 1);
  });
  return most;
}

template <class T>
void Stack::run(const StackStep<T>& step, std::shared_ptr<const void> keep) {
  if (step.tokens == 0) return;
  const std::lock_guard<std::mutex> alone(busy_);
  if (communicator_ != nullptr) communicator_->check();
  // A step of many tokens waits for late threads before and after.
  const bool large = step.tokens > kMostLateTokens;
  if (large) large_job_->acquire();
  StackJob& job = large ? *large_job_ : jobs_.acquire(*this);
  job.prepare_or_release([&] { job.prepare(step, std::move(keep)); });
  job.run(job.threads(), large);
  if (communicator_ != nullptr) communicator_->check();
}

template void Stack::run(const StackStep<c10::BFloat16>&, std::shared_ptr<const void>);
template void Stack::run(const StackStep<float>&, std::shared_ptr<const void>);

}  // namespace stepgraph
