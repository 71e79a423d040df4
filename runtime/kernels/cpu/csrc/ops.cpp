// The CPU kernels as implementations of `torch.ops.stepgraph.*`, most of which are in headers of
// their own. Schemas are declared in Python; here arguments are checked and tensors become
// pointers. One unit, since torch's headers take longer to compile than the kernels.
#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "collective_ops.h"
#include "draft_ops.h"
#include "elementwise_ops.h"
#include "kernels.h"
#include "linear_ops.h"
#include "recurrent_ops.h"
#include "sampling_ops.h"
#include "stack_ops.h"

namespace stepgraph {
namespace {

// Without k nothing is written: the arena has the keys and values of the step already.
at::Tensor paged_attention_cpu(const at::Tensor& q, const std::optional<at::Tensor>& k,
                               const std::optional<at::Tensor>& v, at::Tensor& arena, int64_t layer,
                               const at::Tensor& positions, const at::Tensor& slots,
                               const at::Tensor& token_rows, const at::Tensor& /*rows*/,
                               const at::Tensor& block_tables, int64_t read_blocks,
                               int64_t block_size, std::optional<int64_t> /*tokens_per_row*/,
                               const std::optional<at::Tensor>& /*query_start_loc*/, double scale,
                               int64_t window, double softcap, std::string_view storage_name,
                               int64_t value_dim, int64_t chunk,
                               const std::optional<at::Tensor>& sinks) {
  const Storage storage = storage_named("paged_attention", storage_name);
  TORCH_CHECK(arena.dim() > 3 && (k || !v), "paged_attention: the arena is ", arena.sizes(),
              k ? "" : ", and v has no k");
  const auto sizes = [](const auto& x) { return x ? x->sizes() : at::IntArrayRef(); };
  TORCH_CHECK(q.dim() == 3 && (!k || k->dim() == 3) && (!v || v->dim() == 3),
              "paged_attention: q, k, v are [tokens, heads, head_dim]; got ", q.sizes(), ", ",
              sizes(k), v ? ", " : "", sizes(v));
  const int64_t tokens = q.size(0), kv_heads = k ? k->size(1) : arena.size(3), head_dim = q.size(2);
  const bool has_values = k ? v.has_value() : arena.size(1) == 2;
  TORCH_CHECK((!v || k->sizes() == v->sizes()) &&
                  (!k || (k->size(0) == tokens && k->size(2) == head_dim)) && kv_heads > 0 &&
                  q.size(1) % kv_heads == 0,
              "paged_attention: q ", q.sizes(), ", k ", sizes(k), " and v ", sizes(v),
              " do not fit together");
  TORCH_CHECK(has_values ? value_dim == head_dim : 0 < value_dim && value_dim <= head_dim,
              "paged_attention: value_dim is ", value_dim,
              has_values ? ", that of v is " : ", keys have ", head_dim);
  if (sinks) check_tensor("paged_attention", *sinks, q.scalar_type(), {q.size(1)}, "sinks");
  check_arena("paged_attention", arena, q.scalar_type(), has_values ? 2 : 1, kv_heads, block_size, head_dim,
              storage);
  const int64_t num_blocks = arena.size(2);
  check_tables("paged_attention", block_tables, 2, read_blocks);
  TORCH_CHECK_INDEX(0 <= layer && layer < arena.size(0), "paged_attention: layer ", layer,
                    " of an arena of ", arena.size(0), " layers");
  check_index("paged_attention", slots, tokens, num_blocks * block_size, "slots");
  check_index("paged_attention", token_rows, tokens, block_tables.size(0), "token_rows");
  check_index("paged_attention", positions, tokens, read_blocks * block_size,
              "positions");
  at::Tensor out = at::empty({tokens, q.size(1), value_dim}, q.options());

  const auto dense = [](const at::Tensor& x) { return x.stride(2) == 1 ? x : x.contiguous(); };
  const at::Tensor queries = dense(q), new_keys = k ? dense(*k) : queries;
  const at::Tensor new_values = v ? dense(*v) : new_keys;
  uint8_t* keys = static_cast<uint8_t*>(arena.mutable_data_ptr()) +
                  layer * arena.stride(0) * arena.element_size();
  const AttentionStep step{
      slots.const_data_ptr<int64_t>(), block_tables.const_data_ptr<int32_t>(),
      block_tables.size(1), token_rows.const_data_ptr<int64_t>(),
      positions.const_data_ptr<int64_t>(), tokens, q.size(1), kv_heads, head_dim,
      value_dim, num_blocks, block_size, window, chunk, q.element_size(), storage, threads()};
  const auto keep = std::make_shared<std::vector<at::Tensor>>(std::vector<at::Tensor>{
      queries, new_keys, new_values, arena, slots, block_tables, token_rows, positions});
  if (sinks) keep->push_back(*sinks);
  for_float_type("paged_attention", q.scalar_type(), [&]<class T>(T) {
    paged_attention(AttentionArgs<T>{
        queries.const_data_ptr<T>(), k ? new_keys.const_data_ptr<T>() : nullptr,
        v ? new_values.const_data_ptr<T>() : nullptr,
        {queries.stride(0), queries.stride(1)}, {new_keys.stride(0), new_keys.stride(1)},
        {new_values.stride(0), new_values.stride(1)},
        keys, has_values ? keys + arena.stride(1) * arena.element_size() : keys, out.mutable_data_ptr<T>(),
        static_cast<float>(scale), static_cast<float>(softcap),
        sinks ? sinks->const_data_ptr<T>() : nullptr}, step, keep);
  });
  return out;
}

// The instruction set of each kind of product, for a model in bf16 or not.
c10::Dict<std::string, std::string> instruction_sets(bool bf16) {
  const std::string multiply =
      bf16 && STEPGRAPH_AVX512_BF16 ? "avx512bf16" : STEPGRAPH_VECTORS;
  const std::string look_up =
      STEPGRAPH_AVX512_VBMI ? ", avx512vbmi" : STEPGRAPH_AVX512_BW ? ", avx512bw" : "";
  const TileUse use = tile_use();
  const std::string tiles = !bf16                          ? ""
                            : use == TileUse::kProcessor ? "amx"
                            : use == TileUse::kEmulated  ? "emulated amx"
                                                         : "";
  c10::Dict<std::string, std::string> found;
  const std::string products = tiles.empty() ? multiply : tiles;
  found.insert("weights", products);
  found.insert("codes", products + look_up);
  found.insert("int8 inputs", int8_instructions());  // or unsupported
  found.insert("attention", products);
  found.insert("faulty", use == TileUse::kDifferent ? "amx" : "");
  return found;
}

// A hint, which systems without huge pages do without.
void advise_huge_pages(const at::Tensor& memory) {
#if __has_include(<sys/mman.h>) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.const_data_ptr());
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const uintptr_t end = (address + memory.nbytes()) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace
}  // namespace stepgraph

TORCH_LIBRARY_IMPL(stepgraph, CPU, library) {
  using namespace stepgraph;
  library.impl("advance_rows", &advance_rows_cpu);
  library.impl("advise_huge_pages", &advise_huge_pages);
  library.impl("all_reduce", &all_reduce_cpu);
  library.impl("cap_logits", &cap_logits_cpu);
  library.impl("communicator_create", &communicator_create);
  library.impl("cpu_causal_conv", &cpu_causal_conv);
  library.impl("cpu_recurrence", &cpu_recurrence);
  library.impl("decoder_stack", &decoder_stack_cpu);
  library.impl("drafted_inputs", &drafted_inputs_cpu);
  library.impl("gather_columns", &gather_columns_cpu);
  library.impl("head_drafts", &head_drafts_cpu);
  library.impl("most_likely", &most_likely_cpu);
  library.impl("packed_embedding", &packed_embedding_cpu);
  library.impl("packed_experts", &packed_experts_cpu);
  library.impl("packed_linear", &packed_linear_cpu);
  library.impl("paged_attention", &paged_attention_cpu);
  library.impl("rotations", &rotations_cpu);
  library.impl("row_inputs", &row_inputs_cpu);
  library.impl("sample_full", &sample_full_cpu);
  library.impl("sample_greedy", &sample_greedy_cpu);
  library.impl("stack_create", &stack_create);
}

TORCH_LIBRARY_IMPL(stepgraph, CompositeExplicitAutograd, library) {
  using namespace stepgraph;
  using Communicators = Handles<OwnedCommunicator>;
  library.impl("communicator_destroy", [](int64_t handle) {
    Communicators::instance().remove("communicator_destroy", handle);
  });
  library.impl("communicator_failure", &communicator_failure);
  library.impl("communicator_set_timeout", [](int64_t handle, double seconds) {
    const auto owned = Communicators::instance().find("communicator_set_timeout", handle);
    owned->communicator.set_timeout(seconds);
  });
  library.impl("emulate_tiles", &emulate_tiles);
  library.impl("instruction_sets", &instruction_sets);
  library.impl("set_thread_limit", [](int64_t threads) {
    set_thread_limit(static_cast<int>(threads));
  });
  library.impl("stack_destroy", &stack_destroy);
  library.impl("stack_workspace", &stack_workspace);
}
