// Attention over an arena of the model's own type, and the choice among the storages.
#include "cpu_attention.h"

namespace stepgraph {

template <class T>
void paged_attention(const AttentionArgs<T>& args) {
  switch (args.storage) {
    case Storage::kModel: return attend_paged<T, Plain<T>>(args);
    case Storage::kInt8: return attend_int8(args);
    case Storage::kFp8: return attend_fp8(args);
  }
}

template void paged_attention(const AttentionArgs<c10::BFloat16>&);
template void paged_attention(const AttentionArgs<c10::Half>&);
template void paged_attention(const AttentionArgs<float>&);

}  // namespace stepgraph
