// The recurrence of linear attention with decay over the state of rows, see `ops/recurrence.py`.
//
// For one value head and the tokens of a block, with S at the block's start, d(i, p) = exp(g_i+1 +
// ... + g_p) and d(p) = exp of the sum from the block's start:
//
//     u_p = beta_p (v_p - d(p) k_p . S - sum over i < p of d(i, p) (k_p . k_i) u_i)
//     o_p = d(p) q_p . S + sum over i <= p of d(i, p) (q_p . k_i) u_i
//     S'  = d(C - 1) S + sum over i of d(i, C - 1) k_i u_i^T
//
// So S is read once for all tokens of a block, and a decode step does not write it. Each output is
// one chain of multiply-adds in the order of channels or tokens, the same in any step: results do
// not depend on how a sequence is cut. Sums of g run backwards from p, so there are no differences of
// large numbers.
#pragma once

#include "row_states.h"
#include "stack_math.h"

namespace stepgraph {

struct RecurrenceShape {
  int64_t key_heads, heads, key, value;
  int64_t decays;  // of a head: 1, or one of each channel of the key
  bool delta;
  int64_t snapshot_place, input_places[3];  // bytes; of the state, and of k, u and g

  int64_t key_head(int64_t head) const { return head / (heads / key_heads); }
  bool first_of_key(int64_t head) const { return head % (heads / key_heads) == 0; }
  int64_t state_bytes() const { return heads * key * value * static_cast<int64_t>(sizeof(float)); }

  // Value heads of a unit of work: more than one where their states are small.
  int64_t unit_heads() const {
    constexpr int64_t kUnitElements = 4096;
    return std::clamp<int64_t>(kUnitElements / (key * padded16(value)), 1, heads);
  }
  int64_t units() const { return (heads + unit_heads() - 1) / unit_heads(); }

  static int64_t padded16(int64_t size) { return (size + 15) / 16 * 16; }
};

// Where a head of a unit has its numbers: rows of tokens, numbered as in the run, padded with zeros.
struct HeadRows {
  float *q, *k, *u;  // u: the values, before they are replaced
  float *g, *beta;
  float* out;
  int64_t key_stride, value_stride, decay_stride;
};

// What one thread needs for one unit after another: some heads of a run.
class RecurrenceWorker {
 public:
  static int64_t floats(const RecurrenceShape& shape, const StatePlan& plan) {
    return Sizes(shape, plan).total();
  }

  RecurrenceWorker(const RecurrenceShape& shape, const StatePlan& plan, float* space)
      : shape_(shape), plan_(plan), sizes_(shape, plan), space_(space) {
    const int64_t rows = 2 * plan.block_size;
    const auto take = [&](int64_t count) { return std::exchange(space, space + count); };
    take(sizes_.head * shape.unit_heads());
    products_in_ = take(rows * sizes_.key);
    products_ = take(rows * sizes_.value);
    dots_ = take(2 * plan.block_size * sizes_.block);
    decays_ = take(sizes_.block + 16);
    weights_ = take(plan.block_size * sizes_.key);
    factors_ = take(sizes_.key);
    lanes_ = take(2 * plan.block_size * 16);
  }

  // fill(head, rows) writes q, k, u, g and beta of the tokens of the run; finish(head, rows) may
  // change the results.
  template <class Fill, class Finish>
  void compute(const StateRun& run, int64_t unit, Fill fill, Finish finish) {
    each_head(unit, [&](int64_t head, float* space) {
      const HeadRows rows = rows_of(space);
      load_inputs(run, head, rows);
      fill(head, rows);
      compute_head(run, head, rows, space + sizes_.states_at());
      finish(head, rows);
    });
  }

  // Stores the inputs and snapshots of what was computed last. visit(head, rows) takes the results.
  template <class Visit>
  void publish(const StateRun& run, int64_t unit, Visit visit) {
    each_head(unit, [&](int64_t head, float* space) {
      const HeadRows rows = rows_of(space);
      for (int64_t j = run.offset; j < run.end(); ++j) {
        uint8_t* block = plan_.inputs(run, j / plan_.block_size);
        if (block == nullptr) continue;
        const int64_t offset = j % plan_.block_size;
        if (shape_.first_of_key(head)) {
          std::copy_n(rows.k + j * rows.key_stride, shape_.key, key_at(block, offset, head));
        }
        std::copy_n(rows.u + j * rows.value_stride, shape_.value, update_at(block, offset, head));
        std::copy_n(rows.g + j * rows.decay_stride, shape_.decays, decay_at(block, offset, head));
      }
      const float* state = space + sizes_.states_at() + sizes_.state;
      for (int64_t column = 1; column < run.columns; ++column) {
        uint8_t* snapshot = plan_.snapshot(run, column);
        if (snapshot == nullptr) continue;
        float* to = state_at(snapshot, head);
        for (int64_t c = 0; c < shape_.key; ++c) {
          std::copy_n(state + c * sizes_.value, shape_.value, to + c * shape_.value);
        }
        state += sizes_.state;
      }
      visit(head, rows);
    });
  }

 private:
  // Floats of the parts of the memory of a thread.
  struct Sizes {
    Sizes(const RecurrenceShape& shape, const StatePlan& plan)
        : key(RecurrenceShape::padded16(shape.key)),
          value(RecurrenceShape::padded16(shape.value)),
          decay(shape.decays == 1 ? 1 : key),
          block(RecurrenceShape::padded16(plan.block_size + 1)),
          block_size(plan.block_size),
          tokens(RecurrenceShape::padded16(plan.most_tokens)),
          state(shape.key * value),
          head(tokens * (2 * key + 2 * value + decay + 1) + state * (1 + plan.most_snapshots)),
          unit_heads(shape.unit_heads()) {}

    // The state of a head that is carried on, followed by its snapshots.
    int64_t states_at() const { return tokens * (2 * key + 2 * value + decay + 1); }

    int64_t total() const {
      return unit_heads * head +
             block_size * (3 * key + 2 * value + 2 * block + 2 * 16) + block + 16 + key;
    }

    int64_t key, value, decay;  // of a row of a token
    int64_t block;              // numbers of the tokens of a block, and one
    int64_t block_size, tokens, state, head, unit_heads;
  };

  template <class Visit>
  void each_head(int64_t unit, Visit visit) {
    const int64_t first = unit * sizes_.unit_heads;
    const int64_t end = std::min(first + sizes_.unit_heads, shape_.heads);
    for (int64_t head = first; head < end; ++head) {
      visit(head, space_ + (head - first) * sizes_.head);
    }
  }

  HeadRows rows_of(float* space) const {
    const auto take = [&](int64_t size) {
      return std::exchange(space, space + sizes_.tokens * size);
    };
    HeadRows rows{};
    rows.q = take(sizes_.key);
    rows.k = take(sizes_.key);
    rows.u = take(sizes_.value);
    rows.out = take(sizes_.value);
    rows.g = take(sizes_.decay);
    rows.beta = take(1);
    rows.key_stride = sizes_.key;
    rows.value_stride = sizes_.value;
    rows.decay_stride = sizes_.decay;
    return rows;
  }

  float* part(uint8_t* block, int which) const {
    return reinterpret_cast<float*>(block + shape_.input_places[which]);
  }
  float* key_at(uint8_t* block, int64_t offset, int64_t head) const {
    return part(block, 0) + (offset * shape_.key_heads + shape_.key_head(head)) * shape_.key;
  }
  float* update_at(uint8_t* block, int64_t offset, int64_t head) const {
    return part(block, 1) + (offset * shape_.heads + head) * shape_.value;
  }
  float* decay_at(uint8_t* block, int64_t offset, int64_t head) const {
    return part(block, 2) + (offset * shape_.heads + head) * shape_.decays;
  }
  float* state_at(uint8_t* snapshot, int64_t head) const {
    return reinterpret_cast<float*>(snapshot + shape_.snapshot_place) +
           head * shape_.key * shape_.value;
  }

  static void copy_padded(const float* from, int64_t size, float* to, int64_t padded) {
    std::fill(std::copy_n(from, size, to), to + padded, 0.0f);
  }

  // k, u and g of the tokens before the run.
  void load_inputs(const StateRun& run, int64_t head, const HeadRows& rows) const {
    for (int64_t j = 0; j < run.offset; ++j) {
      uint8_t* block = plan_.inputs(run, j / plan_.block_size);
      if (block == nullptr) continue;
      const int64_t offset = j % plan_.block_size;
      copy_padded(key_at(block, offset, head), shape_.key, rows.k + j * sizes_.key, sizes_.key);
      copy_padded(update_at(block, offset, head), shape_.value, rows.u + j * sizes_.value,
                  sizes_.value);
      copy_padded(decay_at(block, offset, head), shape_.decays, rows.g + j * sizes_.decay,
                  sizes_.decay);
    }
  }

  // `carried`: memory for the state, followed by that of snapshots.
  void compute_head(const StateRun& run, int64_t head, const HeadRows& rows, float* carried) {
    float* snapshots = carried + sizes_.state;
    const float* state = carried;
    const uint8_t* stored = plan_.state(run);
    if (stored == nullptr) {
      std::fill_n(carried, sizes_.state, 0.0f);
    } else {
      const float* from = state_at(const_cast<uint8_t*>(stored), head);
      if (sizes_.value == shape_.value) {
        state = from;  // read in place
      } else {
        for (int64_t c = 0; c < shape_.key; ++c) {
          copy_padded(from + c * shape_.value, shape_.value, carried + c * sizes_.value,
                      sizes_.value);
        }
      }
    }
    for (int64_t begin = 0, column = 1;; begin += plan_.block_size, ++column) {
      const int64_t end = std::min(begin + plan_.block_size, run.end());
      const int64_t first = std::max(begin, run.offset);
      if (first < end) compute_tokens(rows, begin, first, end, state);
      if (end == run.end()) return;
      replay(rows, begin, state, carried);
      state = carried;
      if (plan_.snapshot(run, column) != nullptr) {
        std::copy_n(carried, sizes_.state, snapshots);
        snapshots += sizes_.state;
      }
    }
  }

  // d of the start of the block, then of each of its tokens before p, to `decays_`.
  void head_decays(const HeadRows& rows, int64_t begin, int64_t p) {
    float sum = 0.0f;
    for (int64_t i = p; i >= begin; --i) decays_[i - begin] = sum += rows.g[i];
    for (int64_t i = 0; i <= p - begin; i += 16) {
      store(decays_ + i, exp_nonpositive(load<F32x16>(decays_ + i)));
    }
  }

  // Calls visit(token or begin - 1 for the state, channel, d of 16 channels), p's own d of 1 excepted.
  template <class Visit>
  void channel_decays(const HeadRows& rows, int64_t begin, int64_t p, Visit visit) {
    for (int64_t c = 0; c < sizes_.key; c += 16) {
      F32x16 sum = {};
      for (int64_t i = p; i >= begin; --i) {
        sum += load<F32x16>(rows.g + i * sizes_.decay + c);
        visit(i - 1, c, exp_nonpositive(sum));
      }
    }
  }

  static float dot(const float* a, const float* b, int64_t size) {
    F32x16 lanes = {};
    for (int64_t c = 0; c < size; c += 16) lanes += load<F32x16>(a + c) * load<F32x16>(b + c);
    return lane_sum(lanes);
  }

  // The rows that are multiplied by the state (d k, with the delta rule, and d q), and the products
  // d (k_p . k_i) and d (q_p . k_i) with the tokens of the block up to p.
  void prepare_token(const HeadRows& rows, int64_t begin, int64_t p, float* state_key,
                     float* state_query, float* key_dots, float* query_dots) {
    const float *k = rows.k + p * sizes_.key, *q = rows.q + p * sizes_.key;
    if (shape_.decays == 1) {
      head_decays(rows, begin, p);
      const float decay = decays_[0];
      for (int64_t c = 0; c < sizes_.key; c += 16) {
        if (shape_.delta) store(state_key + c, load<F32x16>(k + c) * decay);
        store(state_query + c, load<F32x16>(q + c) * decay);
      }
      for (int64_t i = begin; i < p; ++i) {
        const float* other = rows.k + i * sizes_.key;
        const float own = decays_[i - begin + 1];
        if (shape_.delta) key_dots[i - begin] = dot(k, other, sizes_.key) * own;
        query_dots[i - begin] = dot(q, other, sizes_.key) * own;
      }
    } else {
      std::fill_n(lanes_, 32 * (p - begin), 0.0f);
      channel_decays(rows, begin, p, [&](int64_t i, int64_t c, F32x16 decay) {
        const F32x16 key = load<F32x16>(k + c) * decay, query = load<F32x16>(q + c) * decay;
        if (i < begin) {
          if (shape_.delta) store(state_key + c, key);
          store(state_query + c, query);
          return;
        }
        const F32x16 other = load<F32x16>(rows.k + i * sizes_.key + c);
        float* lanes = lanes_ + 32 * (i - begin);
        store(lanes, load<F32x16>(lanes) + key * other);
        store(lanes + 16, load<F32x16>(lanes + 16) + query * other);
      });
      for (int64_t i = 0; i < p - begin; ++i) {
        key_dots[i] = lane_sum(load<F32x16>(lanes_ + 32 * i));
        query_dots[i] = lane_sum(load<F32x16>(lanes_ + 32 * i + 16));
      }
    }
    query_dots[p - begin] = dot(q, k, sizes_.key);
  }

  // u and out of the tokens first ... end - 1 of the block that starts at `begin`, with `state`.
  __attribute__((noinline)) void compute_tokens(const HeadRows& rows, int64_t begin, int64_t first,
                                                int64_t end, const float* state) {
    const int64_t count = end - first, queries = shape_.delta ? count : 0;
    float* query_dots = dots_ + plan_.block_size * sizes_.block;
    for (int64_t p = first; p < end; ++p) {
      const int64_t i = p - first;
      prepare_token(rows, begin, p, products_in_ + i * sizes_.key,
                    products_in_ + (queries + i) * sizes_.key, dots_ + i * sizes_.block,
                    query_dots + i * sizes_.block);
    }
    multiply_state(queries + count, state);
    for (int64_t p = first; p < end; ++p) {
      const int64_t i = p - first;
      const float *keys = dots_ + i * sizes_.block, *of_query = query_dots + i * sizes_.block;
      const float* product = products_ + i * sizes_.value;
      for (int64_t v = 0; v < sizes_.value; v += 16) {
        float* update = rows.u + p * sizes_.value + v;
        const float* updates = rows.u + begin * sizes_.value + v;
        F32x16 own = load<F32x16>(update);
        F32x16 out = load<F32x16>(product + queries * sizes_.value + v);
        if (shape_.delta) {
          own -= load<F32x16>(product + v);
          for (int64_t j = 0; j < p - begin; ++j) {
            own -= keys[j] * load<F32x16>(updates + j * sizes_.value);
          }
          own *= rows.beta[p];
          store(update, own);
        }
        for (int64_t j = 0; j < p - begin; ++j) {
          out += of_query[j] * load<F32x16>(updates + j * sizes_.value);
        }
        store(rows.out + p * sizes_.value + v, out + of_query[p - begin] * own);
      }
    }
  }

  // products_ = products_in_ . state, for some rows.
  void multiply_state(int64_t rows, const float* state) {
    const int64_t vectors = sizes_.value / 16;
    const auto tiles = [&]<int Rows, int Columns>(int64_t row, int64_t& v) {
      for (; v + Columns <= vectors; v += Columns) product_tile<Rows, Columns>(row, v, state);
    };
    for (int64_t row = 0; row < rows;) {
      int64_t v = 0;
      if (rows - row >= 4) {
        tiles.template operator()<4, 4>(row, v);
        tiles.template operator()<4, 1>(row, v);
        row += 4;
      } else if (rows - row >= 2) {
        tiles.template operator()<2, 8>(row, v);
        tiles.template operator()<2, 4>(row, v);
        tiles.template operator()<2, 1>(row, v);
        row += 2;
      } else {
        tiles.template operator()<1, 8>(row, v);
        tiles.template operator()<1, 4>(row, v);
        tiles.template operator()<1, 1>(row, v);
        row += 1;
      }
    }
  }

  template <int Rows, int Columns>
  void product_tile(int64_t row, int64_t vector, const float* state) {
    const float* x = products_in_ + row * sizes_.key;
    F32x16 sum[Rows][Columns] = {};
    for (int64_t c = 0; c < shape_.key; ++c) {
      const float* from = state + c * sizes_.value + vector * 16;
      F32x16 own[Columns];
#pragma GCC unroll 8
      for (int n = 0; n < Columns; ++n) own[n] = load<F32x16>(from + 16 * n);
#pragma GCC unroll 4
      for (int m = 0; m < Rows; ++m) {
        const F32x16 number = broadcast(x[m * sizes_.key + c]);
#pragma GCC unroll 8
        for (int n = 0; n < Columns; ++n) sum[m][n] += own[n] * number;
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < Rows; ++m) {
      float* to = products_ + (row + m) * sizes_.value + vector * 16;
#pragma GCC unroll 8
      for (int n = 0; n < Columns; ++n) store(to + 16 * n, sum[m][n]);
    }
  }

  // The state after a block, of all of its tokens; `to` may be `state`.
  __attribute__((noinline)) void replay(const HeadRows& rows, int64_t begin, const float* state,
                                        float* to) {
    const int64_t size = plan_.block_size, last = begin + size - 1;
    const float* k = rows.k + begin * sizes_.key;
    if (shape_.decays == 1) {
      head_decays(rows, begin, last);
      std::fill_n(factors_, sizes_.key, decays_[0]);
      for (int64_t i = 0; i < size; ++i) {
        const F32x16 decay = broadcast(i + 1 < size ? decays_[i + 1] : 1.0f);
        for (int64_t c = i * sizes_.key; c < (i + 1) * sizes_.key; c += 16) {
          store(weights_ + c, load<F32x16>(k + c) * decay);
        }
      }
    } else {
      channel_decays(rows, begin, last, [&](int64_t i, int64_t c, F32x16 decay) {
        const int64_t at = (i - begin) * sizes_.key + c;
        if (i < begin) store(factors_ + c, decay);
        else store(weights_ + at, load<F32x16>(k + at) * decay);
      });
      std::copy_n(k + (size - 1) * sizes_.key, sizes_.key, weights_ + (size - 1) * sizes_.key);
    }
    const float* u = rows.u + begin * sizes_.value;
    int64_t c = 0;
    const auto tiles = [&]<int Channels>() {
      for (; c + Channels <= shape_.key; c += Channels) {
        int64_t v = 0;
        for (; v + 64 <= sizes_.value; v += 64) replay_tile<Channels, 4>(c, v, u, state, to);
        for (; v < sizes_.value; v += 16) replay_tile<Channels, 1>(c, v, u, state, to);
      }
    };
    tiles.template operator()<4>();
    tiles.template operator()<1>();
  }

  template <int Channels, int Columns>
  void replay_tile(int64_t channel, int64_t v, const float* u, const float* state, float* to) {
    F32x16 sum[Channels][Columns];
#pragma GCC unroll 4
    for (int m = 0; m < Channels; ++m) {
      const float* from = state + (channel + m) * sizes_.value + v;
#pragma GCC unroll 4
      for (int n = 0; n < Columns; ++n) {
        sum[m][n] = load<F32x16>(from + 16 * n) * factors_[channel + m];
      }
    }
    for (int64_t i = 0; i < plan_.block_size; ++i) {
      F32x16 own[Columns];
#pragma GCC unroll 4
      for (int n = 0; n < Columns; ++n) own[n] = load<F32x16>(u + i * sizes_.value + v + 16 * n);
#pragma GCC unroll 4
      for (int m = 0; m < Channels; ++m) {
        const F32x16 weight = broadcast(weights_[i * sizes_.key + channel + m]);
#pragma GCC unroll 4
        for (int n = 0; n < Columns; ++n) sum[m][n] += own[n] * weight;
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < Channels; ++m) {
      float* into = to + (channel + m) * sizes_.value + v;
#pragma GCC unroll 4
      for (int n = 0; n < Columns; ++n) store(into + 16 * n, sum[m][n]);
    }
  }

  const RecurrenceShape& shape_;
  const StatePlan& plan_;
  Sizes sizes_;
  float* space_;
  float *products_in_, *products_, *dots_, *decays_, *weights_, *factors_, *lanes_;
};

}  // namespace stepgraph
