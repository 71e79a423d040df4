// Attention over an arena of int8 numbers with a scale each vector.
#include "cpu_attention.h"

namespace stepgraph {

template <class T>
void attend_int8(const AttentionArgs<T>& args) {
  attend_paged<T, Scaled<Int8, typename Element<T>::Word>>(args);
}

template void attend_int8(const AttentionArgs<c10::BFloat16>&);
template void attend_int8(const AttentionArgs<c10::Half>&);
template void attend_int8(const AttentionArgs<float>&);

}  // namespace stepgraph
