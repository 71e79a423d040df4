// What one thread does in the phases of a mixture of experts; they are explained in `mixture.h`.
#pragma once

#include "mixture.h"
#include "storage.h"

namespace stepgraph {

// What the mixtures of a step have in common.
struct MixtureStep {
  Phases* phases;
  const MixtureLayout* at;
  int32_t* memory;
  int64_t tokens;
};

template <class T>
class MixtureThread {
 public:
  // `sums` and `gates` are memory of this thread, [kGroupRows][32] each.
  MixtureThread(const MixtureStep& step, int64_t index, float* sums, float* gates)
      : step_(step), phases_(*step.phases), at_(*step.at), index_(index), sums_(sums),
        gates_(gates), own_(step.memory + at_.own + index * at_.own_stride) {}

  // Runs the phases from `phase` on. `place`: of the mixture among those of the step. `x`: rows
  // `x_stride` apart, an even number, as `router_x`, which the router reads. is_live(row) is false for padding. publish(block, first row,
  // rows, sums [rows][32]) receives the result. `after`: what this thread reads next.
  template <class Live, class Publish>
  void run(const Mixture& mixture, int64_t place, const T* x, const T* router_x, int64_t x_stride,
           int64_t& phase, const char* after, Live is_live, Publish publish) {
    const ExpertPairs pairs(step_.memory + at_.pairs + place * at_.pairs_stride, mixture,
                            step_.tokens);
    route(mixture, router_x, x_stride, phase, pairs, is_live);
    gate_and_up(mixture, pairs, x, x_stride, phase++);
    down(mixture, pairs, phase++, after, publish);
  }

 private:
  float* logits_of(int64_t row, const Mixture& mixture) const {
    return reinterpret_cast<float*>(step_.memory + at_.logits) + row * mixture.routing.experts;
  }
  int32_t* experts_of(int64_t row, const Mixture& mixture) const {
    return step_.memory + at_.experts + row * mixture.routing.top_k;
  }
  float* weights_of(int64_t row, const Mixture& mixture) const {
    return reinterpret_cast<float*>(step_.memory + at_.weights) + row * mixture.routing.top_k;
  }
  T* inner_of(int64_t pair, const Mixture& mixture) const {
    return reinterpret_cast<T*>(step_.memory + at_.inner) + pair * padded(mixture.inner);
  }

  template <class Live>
  void route(const Mixture& mixture, const T* x, int64_t x_stride, int64_t& phase,
             const ExpertPairs& pairs, Live is_live) {
    router(mixture, x, x_stride, phase++);
    const auto choose = [&](int64_t row) {
      int32_t* experts = experts_of(row, mixture);
      if (is_live(row)) {
        route_row(mixture.routing, logits_of(row, mixture), mixture.correction,
                  mixture.expert_scales, own_ + at_.scratch, experts, weights_of(row, mixture));
      } else {
        experts[0] = -1;
      }
    };
    const int64_t tokens = step_.tokens;
    if (tokens <= kFewMixtureRows) {
      phases_.run(phase++, 1, [&](int64_t) {
        for (int64_t row = 0; row < tokens; ++row) choose(row);
        sort_pairs(mixture, pairs);
      });
      return;
    }
    const int64_t units = (tokens + kMixtureRowsPerUnit - 1) / kMixtureRowsPerUnit;
    phases_.run(phase++, units, [&](int64_t unit) {
      const int64_t end = std::min(tokens, (unit + 1) * kMixtureRowsPerUnit);
      for (int64_t row = unit * kMixtureRowsPerUnit; row < end; ++row) choose(row);
    });
    phases_.run(phase++, 1, [&](int64_t) { sort_pairs(mixture, pairs); });
  }

  // The logits of all rows, in float.
  void router(const Mixture& mixture, const T* x, int64_t x_stride, int64_t phase) {
    const int64_t groups = row_groups(step_.tokens), experts = mixture.routing.experts;
    const int64_t blocks = (experts + kRouterExperts - 1) / kRouterExperts;
    const T* router = static_cast<const T*>(mixture.router);
    const T* bias = static_cast<const T*>(mixture.router_bias);
    // Calls visit(row, expert, place in sums_) for a unit.
    const auto visit_unit = [&](int64_t unit, auto visit) {
      const int64_t first = unit % groups * kGroupRows, expert = unit / groups * kRouterExperts;
      const int64_t end = std::min(step_.tokens, first + kGroupRows);
      for (int64_t row = first; row < end; ++row) {
        for (int64_t e = expert; e < std::min(expert + kRouterExperts, experts); ++e) {
          visit(row, e, sums_ + (row - first) * kRouterExperts + e - expert);
        }
      }
    };
    phases_.run(
        phase, blocks * groups,
        [&](int64_t unit, int64_t) {
          visit_unit(unit, [&](int64_t row, int64_t expert, float* place) {
            *place = dot(x + row * x_stride, router + expert * mixture.hidden, mixture.hidden);
          });
        },
        [&](int64_t unit) {
          visit_unit(unit, [&](int64_t row, int64_t expert, const float* place) {
            const float added = bias == nullptr ? 0.0f : static_cast<float>(bias[expert]);
            logits_of(row, mixture)[expert] = *place + added;
          });
        });
  }

  // One copy of the code: the compiler may contract an inlined one into other multiply-adds than the
  // next, and the bits of a result must not depend on the number of threads.
  __attribute__((noinline)) static float dot(const T* a, const T* b, int64_t size) {
    constexpr int64_t kStep = 16 * Plain<T>::kPerWord;
    F32x16 lanes[2] = {};
    for (int64_t i = 0; i < size; i += 2 * kStep) {
      lanes[0] = multiply_add(lanes[0], words_of<Plain<T>>(a, i, size),
                              words_of<Plain<T>>(b, i, size));
      if (i + kStep >= size) break;
      lanes[1] = multiply_add(lanes[1], words_of<Plain<T>>(a, i + kStep, size),
                              words_of<Plain<T>>(b, i + kStep, size));
    }
    return lane_sum(lanes[0] + lanes[1]);
  }

  void sort_pairs(const Mixture& mixture, const ExpertPairs& pairs) const {
    const int64_t total = mixture.total(), routed = mixture.routing.experts;
    const auto visit_pairs = [&](auto visit) {
      for (int64_t row = 0; row < step_.tokens; ++row) {
        const int32_t* experts = experts_of(row, mixture);
        if (experts[0] < 0) continue;
        const float* weights = weights_of(row, mixture);
        for (int64_t i = 0; i < mixture.routing.top_k; ++i) visit(row, experts[i], weights[i]);
        for (int64_t expert = routed; expert < total; ++expert) visit(row, expert, 1.0f);
      }
    };
    std::fill_n(pairs.begin, total + 1, 0);
    visit_pairs([&](int64_t, int64_t expert, float) { ++pairs.begin[expert + 1]; });
    for (int64_t e = 0; e < total; ++e) pairs.begin[e + 1] += pairs.begin[e];
    int32_t* next = pairs.first_tile;
    std::copy_n(pairs.begin, total, next);
    visit_pairs([&](int64_t row, int64_t expert, float weight) {
      const int32_t pair = next[expert]++;
      pairs.rows[pair] = static_cast<int32_t>(row);
      pairs.weights[pair] = weight;
    });
    int64_t tiles = 0;
    for (int64_t e = 0; e <= total; ++e) {
      pairs.first_tile[e] = static_cast<int32_t>(tiles);
      if (e < total) tiles += row_groups(pairs.begin[e + 1] - pairs.begin[e]);
    }
  }

  // A unit is a block of gates and the block of their ups, for a tile. A tile's units are consecutive.
  void gate_and_up(const Mixture& mixture, const ExpertPairs& pairs, const T* x, int64_t x_stride,
                   int64_t phase) {
    const int64_t blocks = mixture.gate_up.blocks(), total = mixture.total();
    const int64_t units = pairs.first_tile[total] * blocks;
    const int64_t stride = padded(mixture.inner);
    const auto expert_of = [&](int64_t tile) {
      return std::upper_bound(pairs.first_tile, pairs.first_tile + total, tile) -
             pairs.first_tile - 1;
    };
    int64_t tile = -1, expert = 0, first = 0, rows = 0;  // what was computed last
    const T* inputs = nullptr;
    int64_t inputs_stride = 0;
    GroupedInputs<T> grouped;
    const auto enter = [&](int64_t next) {
      if (next == tile) return;
      tile = next;
      grouped.clear();
      expert = expert_of(tile);
      first = pairs.begin[expert] + (tile - pairs.first_tile[expert]) * kGroupRows;
      rows = std::min<int64_t>(pairs.begin[expert + 1] - first, kGroupRows);
      inputs = x + pairs.rows[first] * x_stride;
      inputs_stride = x_stride;
      if (rows > 1 || mixture.scaled_inputs) {
        inputs_stride = padded(mixture.hidden);
        inputs = gather(mixture, pairs, first, rows, x, x_stride);
      }
    };
    phases_.run(
        phase, units,
        [&](int64_t unit, int64_t next) {
          enter(unit / blocks);
          const Weights gate = nth<T>(mixture.gate_up, 2 * expert);
          const Weights up = nth<T>(mixture.gate_up, 2 * expert + 1);
          const int64_t block = unit % blocks;
          const char* then =
              next < units ? block_of(nth<T>(mixture.gate_up, 2 * expert_of(next / blocks)),
                                         next % blocks)
                           : first_of_down(mixture, pairs);
          run_block(gate, block, inputs, inputs_stride, rows, block_of(up, block), grouped,
                    gates_);
          run_block(up, block, inputs, inputs_stride, rows, then, grouped, sums_);
        },
        [&](int64_t unit) {
          T* out = inner_of(first, mixture) + unit % blocks * kBlock;
          put_gated(gates_, sums_, rows, mixture.activation, out, stride);
          const int64_t left = mixture.inner - unit % blocks * kBlock;
          if (left >= kBlock || left % 2 == 0) return;
          for (int64_t m = 0; m < rows; ++m) out[m * stride + left] = T(0.0f);  // half of a word
        });
  }

  // The inputs of some pairs, one after another.
  const T* gather(const Mixture& mixture, const ExpertPairs& pairs, int64_t first, int64_t rows,
                  const T* x, int64_t x_stride) const {
    const int64_t hidden = mixture.hidden;
    T* out = reinterpret_cast<T*>(own_ + at_.gathered);
    for (int64_t m = 0; m < rows; ++m) {
      const T* from = x + pairs.rows[first + m] * x_stride;
      T* to = out + m * padded(hidden);
      if (mixture.scaled_inputs) {
        for (int64_t i = 0; i < hidden; i += 16) {
          put(to + i, floats_of(from, i, hidden) * pairs.weights[first + m], hidden - i);
        }
      } else {
        std::copy_n(from, hidden, to);
      }
      if (hidden % 2 != 0) to[hidden] = T(0.0f);  // read as half of a word
    }
    return out;
  }

  // The block that this thread probably begins with.
  const char* first_of_down(const Mixture& mixture, const ExpertPairs& pairs) const {
    const int64_t block = std::min(index_, mixture.down.blocks() - 1);
    const int64_t expert = next_expert(mixture, pairs, 0);
    if (expert == mixture.total()) return nullptr;
    return block_of(nth<T>(mixture.down, expert), block);
  }

  // The first expert from `expert` on that has pairs.
  static int64_t next_expert(const Mixture& mixture, const ExpertPairs& pairs, int64_t expert) {
    while (expert < mixture.total() && pairs.begin[expert] == pairs.begin[expert + 1]) ++expert;
    return expert;
  }

  // A unit is a block of columns for some rows.
  template <class Publish>
  void down(const Mixture& mixture, const ExpertPairs& pairs, int64_t phase, const char* after,
            Publish publish) {
    const int64_t groups = (step_.tokens + kSummedRows - 1) / kSummedRows;
    const int64_t blocks = mixture.down.blocks();
    const int64_t units = blocks * groups, total = mixture.total(), stride = padded(mixture.inner);
    float* summed = reinterpret_cast<float*>(own_ + at_.sums);
    const auto rows_of = [&](int64_t unit) {
      return std::min(step_.tokens - unit % groups * kSummedRows, kSummedRows);
    };
    // The first pair of an expert whose row is `row` or a later one.
    const auto pair_from = [&](int64_t expert, int64_t row) -> int64_t {
      if (row >= step_.tokens) return pairs.begin[expert + 1];
      int32_t* begin = pairs.rows + pairs.begin[expert];
      return std::lower_bound(begin, pairs.rows + pairs.begin[expert + 1], row) - pairs.rows;
    };
    GroupedInputs<T> grouped;
    phases_.run(
        phase, units,
        [&](int64_t unit, int64_t next) {
          const int64_t row = unit % groups * kSummedRows, block = unit / groups;
          std::fill_n(summed, rows_of(unit) * kBlock, 0.0f);
          const int64_t first = next_expert(mixture, pairs, 0);
          for (int64_t expert = first; expert < total;) {
            const int64_t following = next_expert(mixture, pairs, expert + 1);
            const Weights weights = nth<T>(mixture.down, expert);
            const char* then = after;
            if (following < total) {
              then = block_of(nth<T>(mixture.down, following), block);
            } else if (next < units) {
              then = block_of(nth<T>(mixture.down, first), next / groups);
            }
            const int64_t end = pair_from(expert, row + kSummedRows);
            for (int64_t pair = pair_from(expert, row); pair < end; pair += kGroupRows) {
              const int64_t rows = std::min(end - pair, kGroupRows);
              grouped.clear();
              run_block(weights, block, inner_of(pair, mixture), stride, rows, then, grouped,
                        sums_);
              for (int64_t m = 0; m < rows; ++m) {
                const float weight = mixture.scaled_inputs ? 1.0f : pairs.weights[pair + m];
                float* place = summed + (pairs.rows[pair + m] - row) * kBlock;
                for (int64_t half = 0; half < kBlock; half += 16) {
                  store(place + half, load<F32x16>(place + half) +
                                          load<F32x16>(sums_ + m * kBlock + half) * weight);
                }
              }
            }
            expert = following;
          }
        },
        [&](int64_t unit) {
          publish(unit / groups, unit % groups * kSummedRows, rows_of(unit),
                  static_cast<const float*>(summed));
        });
  }

  const MixtureStep& step_;
  Phases& phases_;
  const MixtureLayout& at_;
  int64_t index_;
  float *sums_, *gates_;
  int32_t* own_;
};

}  // namespace stepgraph
