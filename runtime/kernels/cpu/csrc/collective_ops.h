// Communicators and their operations, as `cpu/collectives.py` declares them. Part of `ops.cpp`.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "checks.h"
#include "communicator.h"

namespace stepgraph {

// A communicator and the shared memory that it points into.
struct OwnedCommunicator {
  static constexpr const char* kKind = "communicator";
  at::Tensor region, abort;
  Communicator communicator;
};

namespace {

int64_t communicator_create(const at::Tensor& region, const at::Tensor& abort, int64_t rank,
                            int64_t ranks, double timeout_seconds) {
  TORCH_CHECK(2 <= ranks && ranks <= Communicator::kMostRanks && 0 <= rank && rank < ranks,
              "communicator_create: rank ", rank, " of ", ranks, "; 2 to ",
              Communicator::kMostRanks, " ranks expected");
  const auto address = reinterpret_cast<uintptr_t>(region.const_data_ptr());
  TORCH_CHECK(address % Communicator::kAlignment == 0 &&
                  region.numel() >= ranks * 3 * Communicator::kAlignment,
              "communicator_create: the region is memory at a multiple of ",
              Communicator::kAlignment, " bytes with a line and two parts for each rank");
  auto* word = reinterpret_cast<std::atomic<uint32_t>*>(abort.mutable_data_ptr<int32_t>());
  std::shared_ptr<OwnedCommunicator> owned(new OwnedCommunicator{
      region, abort,
      {region.mutable_data_ptr<uint8_t>(), region.numel(), static_cast<int>(rank),
       static_cast<int>(ranks), word, timeout_seconds}});
  return Handles<OwnedCommunicator>::instance().add(std::move(owned));
}

std::tuple<int64_t, std::string, bool> communicator_failure(int64_t handle) {
  const auto owned = Handles<OwnedCommunicator>::instance().find("communicator_failure", handle);
  const auto [rank, reason, ended_before] = owned->communicator.failure();
  return {rank, reason, ended_before};
}

at::Tensor all_reduce_cpu(const at::Tensor& x, at::Tensor& handle) {
  const auto owned = Handles<OwnedCommunicator>::instance().find("all_reduce", handle);
  const at::Tensor own = x.contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options());
  for_float_type("all_reduce", x.scalar_type(), [&]<class T>(T) {
    all_reduce(owned->communicator, own.const_data_ptr<T>(), out.mutable_data_ptr<T>(),
               own.numel(), threads());
  });
  return out;
}

at::Tensor gather_columns_cpu(const at::Tensor& x, at::IntArrayRef sizes, at::Tensor& handle) {
  const auto owned = Handles<OwnedCommunicator>::instance().find("gather_columns", handle);
  Communicator& communicator = owned->communicator;
  TORCH_CHECK(static_cast<int64_t>(sizes.size()) == communicator.ranks(),
              "gather_columns: a size for each of ", communicator.ranks(), " ranks expected, got ",
              sizes);
  TORCH_CHECK(x.dim() == 2 && x.size(1) == sizes[communicator.rank()],
              "gather_columns: x is [rows, ", sizes[communicator.rank()], "], got ", x.sizes());
  const at::Tensor own = x.contiguous();
  std::vector<int64_t> bytes;
  int64_t width = 0;
  for (const int64_t size : sizes) {
    width += size;
    bytes.push_back(size * x.element_size());
  }
  at::Tensor out = at::empty({x.size(0), width}, x.options());
  gather(communicator, static_cast<const uint8_t*>(own.const_data_ptr()),
         static_cast<uint8_t*>(out.mutable_data_ptr()), x.size(0), bytes.data(), threads());
  return out;
}

}  // namespace
}  // namespace stepgraph
