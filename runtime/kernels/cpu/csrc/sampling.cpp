// The sampler of `sampling.py` for logits that a CPU holds: a few passes over each lane, each of
// which skips what it can. A lane is read in chunks of 128 tokens whose maxima and sums are kept,
// so that looking for the largest tokens, or for the one drawn, enters few of them.
#include "sampling.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"
#include "sampling_math.h"

namespace stepgraph {
namespace {

using namespace sampling_math;

constexpr int32_t kInPrompt = 1 << 30;  // in an element of the counts, beside the occurrences

// What a row asks for.
struct Wishes {
  const float* reals;
  const int64_t* integers;
  int64_t position;

  bool bans() const { return position < integers[kBanUntil]; }
  bool penalised() const {
    return reals[kRepetition] != 1.0f || reals[kPresence] != 0.0f || reals[kFrequency] != 0.0f;
  }
};

// Logit biases, stop ids that may not come yet, penalties: in place, with the maxima of the chunks
// that change. Returns whether anything has.
template <class T>
bool change_logits(const SampleArgs<T>& args, const Wishes& wishes, const int32_t* counts,
                   float* logits, float* maxima) {
  bool changed = false;
  const int64_t vocab_size = args.vocab_size, *ids = wishes.integers + kIntegers;
  const auto add = [&](int64_t id, float value) {
    logits[id] += value;
    changed = true;
  };
  for (int64_t i = 0; i < args.biases; ++i) {
    if (wishes.reals[kReals + i] != 0.0f) add(ids[i], wishes.reals[kReals + i]);
  }
  for (int64_t i = 0; wishes.bans() && i < args.stops; ++i) {
    add(ids[args.biases + i], kMinusInfinity);
  }
  if (wishes.penalised()) {
    const float repetition = wishes.reals[kRepetition], presence = wishes.reals[kPresence],
                frequency = wishes.reals[kFrequency];
    changed = true;
    for (int64_t i = 0; i < vocab_size; ++i) {
      if (counts[i] == 0) continue;
      float logit = logits[i];
      logit = logit > 0.0f ? logit / repetition : logit * repetition;
      const int32_t outputs = counts[i] & (kInPrompt - 1);
      if (outputs > 0) logit -= presence;
      logits[i] = logit - frequency * static_cast<float>(outputs);
    }
  }
  for (int64_t chunk = 0; changed && chunk < sample_chunks(vocab_size); ++chunk) {
    maxima[chunk] = chunk_maximum(logits + chunk * kSampleChunk);
  }
  return changed;
}

template <class T>
void end_lane(const SampleArgs<T>& args, int64_t lane) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  args.tokens[lane] = kNonFinite;
  args.logprob[lane] = kNaN;
  std::fill_n(args.top_logprobs + lane * args.tops, args.tops, kNaN);
  std::fill_n(args.top_ids + lane * args.tops, args.tops, int64_t{0});
}

template <class T>
void sample_lane(const SampleArgs<T>& args, int64_t lane, const Scratch& at) {
  const int64_t vocab_size = args.vocab_size, chunks = sample_chunks(vocab_size);
  const int64_t row = args.rows[lane];
  const Wishes wishes{args.reals + row * (kReals + args.biases),
                      args.integers + row * (kIntegers + args.biases + args.stops),
                      args.positions[lane]};
  int32_t* counts = args.counts + row * vocab_size;
  const T* logits = args.logits + lane * args.logits_stride;

  read_logits(logits, args.masks.of(lane), vocab_size, at.logits, at.logit_maxima);
  float most = largest(at.logit_maxima, chunks);
  if (!std::isfinite(most)) return end_lane(args, lane);
  double total = weigh(at.logits, most, 1.0f, chunks, at.weights, at.sums);
  const float log_mass = static_cast<float>(most + std::log(total));
  float* top_logprobs = args.top_logprobs + lane * args.tops;
  find_tops(at.logits, at.logit_maxima, vocab_size, args.tops, top_logprobs,
            args.top_ids + lane * args.tops);
  for (int64_t i = 0; i < args.tops; ++i) top_logprobs[i] -= log_mass;

  std::copy(at.logit_maxima, at.logit_maxima + chunks, at.wanted_maxima);
  const bool changed = change_logits(args, wishes, counts, at.logits, at.wanted_maxima);
  if (changed) most = largest(at.wanted_maxima, chunks);
  if (!std::isfinite(most)) return end_lane(args, lane);
  const float temperature = wishes.reals[kTemperature];
  int64_t token;
  if (temperature == 0.0f) {
    token = first_of(most, at.logits, at.wanted_maxima, vocab_size);
  } else {
    if (changed || temperature != 1.0f) {
      total = weigh(at.logits, most, temperature, chunks, at.weights, at.sums);
    }
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      at.weight_maxima[chunk] = chunk_maximum(at.weights + chunk * kSampleChunk);
    }
    const float least = threshold(at, chunks, total, vocab_size, wishes.integers[kTopK],
                                  wishes.reals[kTopP]);
    token = draw(at, chunks, vocab_size, std::max(least, wishes.reals[kMinP]),
                 uniform(wishes.integers[kSeed], wishes.position));
  }
  args.tokens[lane] = token;
  args.logprob[lane] = static_cast<float>(logits[token]) - log_mass;
  if (wishes.penalised()) counts[token] += 1;
}

}  // namespace

int64_t sample_scratch_floats(int64_t vocab_size) {
  return Scratch::floats(sample_chunks(vocab_size));
}

template <class T>
void sample_full(const SampleArgs<T>& args) {
  struct Lanes {
    int64_t first, count;
  };
  std::vector<Lanes> units;  // lanes of a row with penalties, or one lane
  for (int64_t lane = 0; lane < args.lanes; ++lane) {
    const int64_t row = args.rows[lane];
    const Wishes wishes{args.reals + row * (kReals + args.biases), nullptr, 0};
    const bool follows = args.inputs != nullptr && lane > 0 && args.rows[lane - 1] == row;
    if (follows && wishes.penalised()) ++units.back().count;
    else units.push_back({lane, 1});
  }
  const int64_t floats = sample_scratch_floats(args.vocab_size);
  const int64_t count = static_cast<int64_t>(units.size());
  parallel_for(count, useful_threads(count, args.threads), [&](int64_t unit, int64_t thread) {
    const Scratch scratch(args.scratch + thread * floats, sample_chunks(args.vocab_size));
    const auto [first, lanes] = units[unit];
    bool accepted = true;
    for (int64_t lane = first; lane < first + lanes; ++lane) {
      if (!accepted) {
        end_lane(args, lane);
        continue;
      }
      sample_lane(args, lane, scratch);
      accepted = lane + 1 < first + lanes && args.tokens[lane] == args.inputs[lane + 1];
    }
  });
}

// visit(chunk of float32, its maximum, first token) for the chunks of a lane, filled up with -inf;
// `mask` as of `read_logits`.
template <class T, class Visit>
void each_chunk(const T* logits, const int32_t* mask, int64_t vocab_size, Visit visit) {
  alignas(64) float chunk[kSampleChunk];
  for (int64_t from = 0; from < vocab_size; from += kSampleChunk) {
    float maximum;
    read_logits(logits + from, mask == nullptr ? nullptr : mask + from / kMaskBits,
                std::min(kSampleChunk, vocab_size - from), chunk, &maximum);
    visit(chunk, maximum, from);
  }
}

template <class T>
void sample_greedy(const T* logits, int64_t logits_stride, const LaneMasks& masks, int64_t lanes,
                   int64_t vocab_size, int64_t* tokens, float* probabilities, int threads) {
  constexpr int64_t kLogitsPerThread = 1 << 17;
  const int used =
      useful_threads(std::min(lanes, lanes * vocab_size / kLogitsPerThread), threads);
  parallel_for(lanes, used, [&](int64_t lane, int64_t) {
    const T* own = logits + lane * logits_stride;
    float most = kMinusInfinity;
    int64_t best = 0;
    each_chunk(own, masks.of(lane), vocab_size,
               [&](const float* chunk, float maximum, int64_t from) {
                 if (!(maximum > most)) return;
                 most = maximum;
                 best = from + (std::find(chunk, chunk + kSampleChunk, maximum) - chunk);
               });
    const bool finite = std::isfinite(most);
    tokens[lane] = finite ? best : kNonFinite;
    if (probabilities == nullptr) return;
    float total = 0.0f;
    if (finite) {
      F32x16 sums{};
      each_chunk(own, masks.of(lane), vocab_size, [&](const float* chunk, float, int64_t) {
        for (int64_t i = 0; i < kVectors; ++i) {
          sums += exp_nonpositive(load<F32x16>(chunk + 16 * i) - most);
        }
      });
      for (int64_t i = 0; i < 16; ++i) total += sums[i];
    }
    probabilities[lane] = finite ? 1.0f / total : 0.0f;
  });
}

template void sample_full(const SampleArgs<c10::BFloat16>&);
template void sample_full(const SampleArgs<c10::Half>&);
template void sample_full(const SampleArgs<float>&);
template void sample_greedy(const c10::BFloat16*, int64_t, const LaneMasks&, int64_t, int64_t,
                            int64_t*, float*, int);
template void sample_greedy(const c10::Half*, int64_t, const LaneMasks&, int64_t, int64_t, int64_t*,
                            float*, int);
template void sample_greedy(const float*, int64_t, const LaneMasks&, int64_t, int64_t, int64_t*,
                            float*, int);

}  // namespace stepgraph
