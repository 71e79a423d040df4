// Attention over an arena of fp8 numbers with a scale each vector.
#include "attention.h"

namespace stepgraph {

template <class T>
using Codec = Scaled<Fp8, typename Element<T>::Word>;

template <class T>
void attend_fp8(const AttentionArgs<T>& args, AttentionPlan& plan, Phases& phases, int64_t phase,
                 int64_t index) {
  attend_paged<T, Codec<T>>(args, plan, phases, phase, index);
}

template <class T>
void store_fp8(const AttentionStep& step, const T* x, const int64_t (&strides)[2], uint8_t* side,
                int64_t head, int64_t first, int64_t count) {
  write_slots<T, Codec<T>>(step, x, strides, side, head, first, count);
}

template void attend_fp8(const AttentionArgs<c10::BFloat16>&, AttentionPlan&, Phases&, int64_t, int64_t);
template void store_fp8(const AttentionStep&, const c10::BFloat16*, const int64_t (&)[2], uint8_t*, int64_t,
                        int64_t, int64_t);
template void attend_fp8(const AttentionArgs<c10::Half>&, AttentionPlan&, Phases&, int64_t, int64_t);
template void store_fp8(const AttentionStep&, const c10::Half*, const int64_t (&)[2], uint8_t*, int64_t,
                        int64_t, int64_t);
template void attend_fp8(const AttentionArgs<float>&, AttentionPlan&, Phases&, int64_t, int64_t);
template void store_fp8(const AttentionStep&, const float*, const int64_t (&)[2], uint8_t*, int64_t,
                        int64_t, int64_t);

}  // namespace stepgraph
