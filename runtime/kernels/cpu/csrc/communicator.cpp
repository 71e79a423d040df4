#include "communicator.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "stack_math.h"

namespace stepgraph {

namespace {

using Clock = std::chrono::steady_clock;

// Longer than ranks of equal work wait for each other; a sleeping thread takes some 50 us to wake.
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kLongestSleep = std::chrono::milliseconds(20);  // then the abort word is read again
// A waiting thread looks at the clock more often than this, unless its process is stopped, for which
// the other rank cannot be blamed: the group may have been stopped as a whole.
constexpr auto kStoodStill = std::chrono::milliseconds(500);
constexpr int64_t kPassesPerLook = 64;  // of a spinning thread at the clock and the abort word
// Below this a second thread costs more than it brings.
constexpr int64_t kBytesPerThread = 64 * 1024;

constexpr auto kNap = std::chrono::microseconds(50);  // where a word cannot wake a thread

static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Calls run(begin, end) for pieces of 0 ... count - 1, which begin at multiples of 16.
template <class Run>
void in_pieces(int64_t count, int64_t element_bytes, int threads, Run run) {
  if (count == 0) return;
  const int64_t bytes = count * element_bytes;
  const int64_t most = std::clamp<int64_t>(bytes / kBytesPerThread, 1, threads);
  const int64_t size = ((count + most - 1) / most + 15) / 16 * 16;
  const int64_t pieces = (count + size - 1) / size;
  parallel_for(pieces, static_cast<int>(pieces), [&](int64_t piece, int64_t) {
    run(piece * size, std::min(count, (piece + 1) * size));
  });
}

// Sleeping until the upper half of a word has another value than `seen`, or for a while.
#if defined(__linux__)
uint32_t* upper_half(std::atomic<uint64_t>& word) {
  return reinterpret_cast<uint32_t*>(&word) + (std::endian::native == std::endian::little);
}
void wake(std::atomic<uint64_t>& word) {
  syscall(SYS_futex, upper_half(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
void sleep_on(std::atomic<uint64_t>& word, uint32_t seen, std::chrono::nanoseconds most) {
  const timespec time{static_cast<time_t>(most.count() / 1000000000),
                      static_cast<long>(most.count() % 1000000000)};
  syscall(SYS_futex, upper_half(word), FUTEX_WAIT, seen, &time, nullptr, 0);
}
#else
void wake(std::atomic<uint64_t>&) {}
void sleep_on(std::atomic<uint64_t>&, uint32_t, std::chrono::nanoseconds most) {
  std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(most, kNap));
}
#endif

void exchange(Communicator& communicator, uint32_t number, uint32_t signature) {
  communicator.publish(number, signature);
  if (!communicator.wait(number, signature, [] { return false; })) communicator.check();
}

}  // namespace

Communicator::Communicator(uint8_t* region, int64_t bytes, int rank, int ranks,
                           std::atomic<uint32_t>* abort, double timeout_seconds)
    : region_(region),
      lines_(reinterpret_cast<Line*>(region)),
      part_bytes_((bytes / ranks - kAlignment) / 2 / kAlignment * kAlignment),
      rank_(rank),
      ranks_(ranks),
      abort_(abort) {
  set_timeout(timeout_seconds);
}

void Communicator::publish(uint32_t number, uint32_t signature) {
  Line& line = lines_[rank_];
  std::atomic<uint64_t>& slot = line.slots[number % 2];
  const uint64_t own = static_cast<uint64_t>(number) << 32 | signature;
  uint64_t before = slot.load(std::memory_order_relaxed);
  do {
    if (reached(before, number)) return;
  } while (!slot.compare_exchange_weak(before, own, std::memory_order_seq_cst));
  // In one order with what `sleep` does: either it sees the slot, or this sees the sleeper.
  if (line.sleepers.load(std::memory_order_seq_cst) > 0) wake(slot);
}

void Communicator::sleep(Line& line, uint32_t number, std::chrono::nanoseconds most) {
  std::atomic<uint64_t>& slot = line.slots[number % 2];
  line.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint64_t seen = slot.load(std::memory_order_seq_cst);
  if (!reached(seen, number)) sleep_on(slot, static_cast<uint32_t>(seen >> 32), most);
  line.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

bool Communicator::Patience::pass() {
  pause_thread();
  if (passes_++ % kPassesPerLook != 0) return true;
  Communicator& communicator = communicator_;
  const uint32_t aborted = communicator.abort_->load(std::memory_order_acquire);
  if (aborted != 0) {
    communicator.fail(Reason::kAborted, static_cast<int>(aborted - 1));
    return false;
  }
  const Clock::time_point now = Clock::now();
  if (passes_ == 1) began_ = now;
  else if (now - looked_ > kStoodStill) began_ += now - looked_;
  looked_ = now;
  const auto left = communicator.timeout_.load(std::memory_order_relaxed) - (now - began_);
  if (left <= left.zero()) {
    communicator.fail(Reason::kLate, other_);
    return false;
  }
  if (now - began_ >= kSpin) {
    passes_ = kPassesPerLook;  // looks again after each sleep
    sleep(communicator.lines_[other_], number_,
          std::min<std::chrono::nanoseconds>(left, kLongestSleep));
  }
  return true;
}

void Communicator::fail(Reason reason, int rank) {
  uint64_t none = 0;
  const uint64_t own = static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(reason);
  failure_.compare_exchange_strong(none, own, std::memory_order_acq_rel);
  uint32_t fine = 0;
  abort_->compare_exchange_strong(fine, static_cast<uint32_t>(rank_) + 1,
                                  std::memory_order_acq_rel);
}

Communicator::Failure Communicator::failure() const {
  const uint64_t failure = failure_.load(std::memory_order_acquire);
  const int rank = static_cast<int>(failure >> 32);
  switch (static_cast<Reason>(static_cast<uint32_t>(failure))) {
    case Reason::kNone: break;
    case Reason::kLate: {
      const double seconds = std::chrono::duration<double>(timeout_.load()).count();
      char text[32];
      std::snprintf(text, sizeof(text), "%g", seconds);
      return {rank, std::string("did not take part in an operation of the group within ") + text + " s",
              false};
    }
    case Reason::kDisagrees: return {rank, "runs another operation of the group", false};
    case Reason::kAborted: return {rank, "aborted the group", true};
  }
  return {-1, "", false};
}

void Communicator::check() {
  const uint32_t aborted = abort_->load(std::memory_order_acquire);
  if (aborted != 0) fail(Reason::kAborted, static_cast<int>(aborted - 1));
  const Failure failure = this->failure();
  if (!failure.reason.empty())
    throw std::runtime_error("rank " + std::to_string(failure.rank) + " " + failure.reason);
}

template <class T>
void all_reduce(Communicator& communicator, const T* x, T* out, int64_t count, int threads) {
  communicator.check();
  const int64_t most = communicator.part_bytes() / static_cast<int64_t>(sizeof(T));
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t size = std::min(most, count - begin);
    const uint32_t number = communicator.reserve(1);
    T* own = reinterpret_cast<T*>(communicator.part(number, communicator.rank()));
    in_pieces(size, sizeof(T), threads, [&](int64_t from, int64_t to) {
      std::copy(x + begin + from, x + begin + to, own + from);
    });
    exchange(communicator, number,
             Communicator::signature(OperationKind::kSum, size, sizeof(T)));
    const Parts<T> parts(communicator, number);
    in_pieces(size, sizeof(T), threads, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i += 16) {
        put(out + begin + i, parts.sum(i, to), to - i);
      }
    });
  }
}

template void all_reduce(Communicator&, const float*, float*, int64_t, int);
template void all_reduce(Communicator&, const c10::BFloat16*, c10::BFloat16*, int64_t, int);
template void all_reduce(Communicator&, const c10::Half*, c10::Half*, int64_t, int);

void gather(Communicator& communicator, const uint8_t* x, uint8_t* out, int64_t rows,
            const int64_t* sizes, int threads) {
  communicator.check();
  const int ranks = communicator.ranks(), rank = communicator.rank();
  int64_t widest = 0, width = 0;
  for (int other = 0; other < ranks; ++other) {
    widest = std::max(widest, sizes[other]);
    width += sizes[other];
  }
  const int64_t most = communicator.part_bytes();
  for (int64_t begin = 0; begin < rows * widest; begin += most) {
    const uint32_t number = communicator.reserve(1);
    uint8_t* own = communicator.part(number, rank);
    const int64_t bytes = std::clamp<int64_t>(rows * sizes[rank] - begin, 0, most);
    in_pieces(bytes, 1, threads, [&](int64_t from, int64_t to) {
      std::memcpy(own + from, x + begin + from, to - from);
    });
    exchange(communicator, number, Communicator::signature(OperationKind::kGather, rows * width, 1));
    int64_t column = 0;
    for (int other = 0; other < ranks; column += sizes[other], ++other) {
      const uint8_t* part = communicator.part(number, other);
      const int64_t size = sizes[other];
      const int64_t received = std::clamp<int64_t>(rows * size - begin, 0, most);
      in_pieces(received, 1, threads, [&](int64_t from, int64_t to) {
        for (int64_t at = from; at < to;) {
          const int64_t row = (begin + at) / size, offset = (begin + at) % size;
          const int64_t count = std::min(size - offset, to - at);
          std::memcpy(out + row * width + column + offset, part + at, count);
          at += count;
        }
      });
    }
  }
}

}  // namespace stepgraph
