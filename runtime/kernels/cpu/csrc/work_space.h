// Memory that threads of a job work in.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace stepgraph {

// Floats on a cache line of their own, kept from one use to the next as long as they suffice.
class WorkSpace {
 public:
  // At least `count` floats, of any content.
  float* reserve(int64_t count) {
    if (count > size_) {
      floats_.reset();
      const size_t bytes = static_cast<size_t>(count) * sizeof(float);
      floats_.reset(static_cast<float*>(::operator new[](bytes, std::align_val_t(64))));
      size_ = count;
    }
    return floats_.get();
  }
  float* get() const { return floats_.get(); }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(float)); }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<float[], Free> floats_;
  int64_t size_ = 0;
};

}  // namespace stepgraph
