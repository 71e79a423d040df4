// The definitions of `attend_scaled` and `store_scaled`, which a unit instantiates for one kind of
// number.
#pragma once

#include "attention.h"

namespace stepgraph {

template <class Number, class T>
void attend_scaled(const AttentionArgs<T>& args, AttentionPlan& plan, Phases& phases,
                   int64_t phase, int64_t index) {
  using Codec = Scaled<Number, typename Element<T>::Word>;
  attend_paged<T, Codec>(args, plan, phases, phase, index);
}

template <class Number, class T>
void store_scaled(const AttentionStep& step, const T* x, const int64_t (&strides)[2],
                  uint8_t* side, int64_t head, int64_t first, int64_t count) {
  using Codec = Scaled<Number, typename Element<T>::Word>;
  write_slots<T, Codec>(step, x, strides, side, head, first, count);
}

}  // namespace stepgraph

#define STEPGRAPH_ATTENTION_OF(Number, T)                                                        \
  template void stepgraph::attend_scaled<stepgraph::Number, T>(                                  \
      const stepgraph::AttentionArgs<T>&, stepgraph::AttentionPlan&, stepgraph::Phases&, int64_t, \
      int64_t);                                                                                  \
  template void stepgraph::store_scaled<stepgraph::Number, T>(                                   \
      const stepgraph::AttentionStep&, const T*, const int64_t (&)[2], uint8_t*, int64_t,        \
      int64_t, int64_t)

#define STEPGRAPH_SCALED_ATTENTION(Number)         \
  STEPGRAPH_ATTENTION_OF(Number, c10::BFloat16);   \
  STEPGRAPH_ATTENTION_OF(Number, c10::Half);       \
  STEPGRAPH_ATTENTION_OF(Number, float)
