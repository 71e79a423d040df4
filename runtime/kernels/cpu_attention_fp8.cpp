// Attention over an arena of fp8 numbers with a scale each vector.
#include "cpu_attention.h"

namespace stepgraph {

template <class T>
void attend_fp8(const AttentionArgs<T>& args, AttentionPlan& plan) {
  attend_paged<T, Scaled<Fp8, typename Element<T>::Word>>(args, plan);
}

template void attend_fp8(const AttentionArgs<c10::BFloat16>&, AttentionPlan&);
template void attend_fp8(const AttentionArgs<c10::Half>&, AttentionPlan&);
template void attend_fp8(const AttentionArgs<float>&, AttentionPlan&);

}  // namespace stepgraph
