// How the ranks of a tensor-parallel group, each a process of its own, exchange data through memory
// that they share.
//
// Operations are numbered; all ranks run the same ones in the same order. In an operation each rank
// writes its part into its own memory and publishes the number. Then it waits for the numbers of the
// others and reads their parts. Each rank computes the whole result in the order of ranks, so the
// result has the same bits on all of them.
//
// A rank has room for two parts, which operations use in turn. That suffices: a rank that writes its
// part of operation n + 2 has waited for all others to publish n + 1, which they do after they have
// read the parts of n.
//
// A waiting thread spins for a moment, then sleeps. It gives up when the abort word of the group is
// set or a deadline passes; it then sets the abort word, so that the others give up as well.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "pool.h"
#include "storage.h"

namespace stepgraph {

enum class OperationKind : uint32_t { kSum = 1, kGather };

class Communicator {
 public:
  static constexpr int64_t kMostRanks = 64;
  static constexpr int64_t kAlignment = 128;  // two cache lines, which processors fetch together

  // The region consists of a line of kAlignment bytes for each rank, and two parts for each.
  //
  // `region` is aligned to kAlignment and zero before the first rank begins; `abort` is shared too.
  Communicator(uint8_t* region, int64_t bytes, int rank, int ranks, std::atomic<uint32_t>* abort,
               double timeout_seconds);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int64_t part_bytes() const { return part_bytes_; }
  void set_timeout(double seconds) {
    timeout_.store(std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)),
                   std::memory_order_relaxed);
  }

  // The first of `operations` numbers, which follow one another and wrap around.
  uint32_t reserve(int64_t operations) {
    return next_.fetch_add(static_cast<uint32_t>(operations), std::memory_order_relaxed);
  }

  uint8_t* part(uint32_t number, int rank) const {
    return region_ + ranks_ * kAlignment + (number % 2 * ranks_ + rank) * part_bytes_;
  }

  // What all ranks agree on in an operation.
  static uint32_t signature(OperationKind kind, int64_t elements, int64_t element_bytes) {
    return static_cast<uint32_t>(elements << 8 | element_bytes << 4) | static_cast<uint32_t>(kind);
  }

  // Publishes this rank's part of an operation, which is complete. Several threads of the rank may
  // call it, also late ones.
  void publish(uint32_t number, uint32_t signature);

  // Waits for the parts of all others. False: it failed, or over() holds, which tells a late thread
  // that its rank has finished the operation.
  template <class Over>
  bool wait(uint32_t number, uint32_t signature, Over over) {
    for (int other = 0; other < ranks_; ++other) {
      if (other == rank_) continue;
      const std::atomic<uint64_t>& slot = lines_[other].slots[number % 2];
      uint64_t seen = slot.load(std::memory_order_acquire);
      if (!reached(seen, number)) {
        Patience patience(*this, other, number);
        do {
          if (over() || !patience.pass()) return false;
          seen = slot.load(std::memory_order_acquire);
        } while (!reached(seen, number));
      }
      // A slot of a later operation: the thread is late.
      if (seen >> 32 == number && static_cast<uint32_t>(seen) != signature) {
        fail(Reason::kDisagrees, other);
        return false;
      }
    }
    return true;
  }

  // Why this rank gave up: what another one did, or did not do.
  struct Failure {
    int rank;
    std::string reason;  // empty: it did not give up
    bool ended_before;   // the group had already ended
  };
  Failure failure() const;

  // Raises std::runtime_error with the failure, also if the group was aborted.
  void check();

 private:
  // What a rank publishes.
  struct alignas(kAlignment) Line {
    // Of its newest operations of even and of odd numbers: number, then signature.
    std::atomic<uint64_t> slots[2];
    std::atomic<uint32_t> sleepers;  // threads of other ranks that sleep until a slot changes
  };
  static_assert(sizeof(Line) == kAlignment);

  enum class Reason : uint32_t { kNone, kLate, kDisagrees, kAborted };

  // One wait for another rank.
  class Patience {
   public:
    Patience(Communicator& communicator, int other, uint32_t number)
        : communicator_(communicator), other_(other), number_(number) {}
    // Lets a moment pass. False: the group is aborted, or the time is up.
    bool pass();

   private:
    Communicator& communicator_;
    int other_;
    uint32_t number_;
    int64_t passes_ = 0;
    std::chrono::steady_clock::time_point began_, looked_;
  };

  static bool reached(uint64_t slot, uint32_t number) {
    return static_cast<int32_t>(static_cast<uint32_t>(slot >> 32) - number) >= 0;
  }

  static void sleep(Line& line, uint32_t number, std::chrono::nanoseconds most);

  // Keeps the first reason, and aborts the group.
  void fail(Reason reason, int rank);

  uint8_t* region_;
  Line* lines_;
  int64_t part_bytes_;
  int rank_, ranks_;
  std::atomic<uint32_t>* abort_;
  std::atomic<std::chrono::nanoseconds> timeout_;
  std::atomic<uint32_t> next_{1};
  std::atomic<uint64_t> failure_{0};  // the reason, and the rank in the upper half
};

// out[i] = the sum of x[i] over ranks, in float and in the order of ranks, rounded once. T is float,
// c10::BFloat16 or c10::Half. Both operations raise std::runtime_error if they fail.
template <class T>
void all_reduce(Communicator& communicator, const T* x, T* out, int64_t count, int threads);

// The rows of all ranks side by side: this rank's x has [rows, sizes[rank]] bytes, `out` has
// [rows, sum of sizes].
void gather(Communicator& communicator, const uint8_t* x, uint8_t* out, int64_t rows,
            const int64_t* sizes, int threads);

// The parts of all ranks of an operation.
template <class T>
struct Parts {
  const T* ranks[Communicator::kMostRanks];
  int count;

  Parts(const Communicator& communicator, uint32_t number) : count(communicator.ranks()) {
    for (int rank = 0; rank < count; ++rank) {
      ranks[rank] = reinterpret_cast<const T*>(communicator.part(number, rank));
    }
  }

  // The sums of 16 elements from `at` on of parts of `size`, not rounded.
  F32x16 sum(int64_t at, int64_t size) const {
    F32x16 total = floats_of(ranks[0], at, size);
    for (int rank = 1; rank < count; ++rank) total += floats_of(ranks[rank], at, size);
    return total;
  }
};

}  // namespace stepgraph
