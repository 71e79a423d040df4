// A job as a sequence of phases, each a number of units. No thread begins a phase before all units
// of the one before are done.
//
// Units are claimed from a shared counter. A thread computes a claimed unit into memory of its own
// and then publishes it: writes the result to where all threads read it. Each unit is published
// exactly once, which a stamp per unit decides. So a thread may lose its core in the middle of a
// unit without holding up the others: a thread that waits for the end of a phase computes the unit
// again and publishes it, and the late thread, once it continues, finds its unit published and its
// phase over. Only a thread that loses its core while it publishes, a small part of a unit, is waited
// for.
//
// A late thread reads what later phases overwrite. Nothing of what it computes from that is used; all
// that matters is that the memory is still there, see `Job` in `pool.h`.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

#include "pool.h"

namespace stepgraph {

class Phases {
 public:
  // Makes room for phases and for the units of the largest one, on up to `threads` threads. To be
  // called before each run, by one thread.
  void prepare(int64_t phases, int64_t units, int threads) {
    threads_ = threads;
    reached_.store(0, std::memory_order_relaxed);
    if (threads == 1) return;
    if (phases > num_phases_) {
      counters_.reset(new Counter[phases]);
      num_phases_ = phases;
    }
    for (int64_t i = 0; i < phases; ++i) {
      counters_[i].claimed.store(0, std::memory_order_relaxed);
      counters_[i].done.store(0, std::memory_order_relaxed);
    }
    // Stamps of few units have cache lines of their own. Many units are long ones.
    stamp_stride_ = units <= kOwnLines ? 8 : 1;
    if (units * stamp_stride_ > num_stamps_) {
      num_stamps_ = units * stamp_stride_;
      stamps_.reset(new std::atomic<uint64_t>[num_stamps_]());
    }
    base_ += last_;
    last_ = 2 * static_cast<uint64_t>(phases);
  }

  int threads() const { return threads_; }

  // Whether all units of a phase are done: what they read may have changed.
  bool over(int64_t phase) const { return reached_.load(std::memory_order_acquire) > phase; }

  // Takes part in a phase until all of its units are done. compute(unit, next) computes a unit;
  // `next` is the one that this thread computes afterwards, or not less than `units` where none is
  // known. publish(unit) writes the result of the unit that this thread computed last.
  template <class Compute, class Publish>
  void run(int64_t phase, int64_t units, Compute compute, Publish publish) {
    if (threads_ == 1) {
      for (int64_t unit = 0; unit < units; ++unit) {
        compute(unit, unit + 1);
        publish(unit);
      }
      return;
    }
    if (over(phase)) return;
    const auto began = Clock::now();
    Counter& counter = counters_[phase];
    const uint64_t publishing = base_ + 2 * static_cast<uint64_t>(phase), done = publishing + 1;
    int64_t own = 0;
    const auto finish = [&](int64_t unit) {
      std::atomic<uint64_t>& stamp = stamp_of(unit);
      uint64_t before = stamp.load(std::memory_order_relaxed);
      if (before >= publishing || !stamp.compare_exchange_strong(before, publishing,
                                                                 std::memory_order_acq_rel)) {
        return;
      }
      publish(unit);
      stamp.store(done, std::memory_order_release);
      ++own;
    };
    const auto claim = [&] { return counter.claimed.fetch_add(1, std::memory_order_relaxed); };
    // The next unit is claimed early, so that what it reads can be prefetched; but not the last ones,
    // of which each thread takes one.
    for (int64_t unit = claim(), next; unit < units; unit = next) {
      __builtin_prefetch(&stamp_of(unit), 1);
      next = unit + threads_ < units ? claim() : units;
      compute(unit, next);
      finish(unit);
      if (next == units) next = claim();
    }
    if (own > 0) counter.done.fetch_add(own, std::memory_order_acq_rel);
    const auto ended = [&] {
      return counter.done.load(std::memory_order_acquire) == units || over(phase);
    };
    if (!wait(ended, began)) {
      for (int64_t unit = 0; unit < units && !over(phase); ++unit) {
        if (stamp_of(unit).load(std::memory_order_acquire) >= publishing) continue;
        compute(unit, units);
        finish(unit);
      }
      for (int64_t unit = 0; unit < units && !over(phase); ++unit) {
        wait_for_stamp(stamp_of(unit), done);
      }
    }
    int64_t reached = reached_.load(std::memory_order_relaxed);
    while (reached <= phase && !reached_.compare_exchange_weak(reached, phase + 1,
                                                               std::memory_order_acq_rel)) {
    }
  }

  // The same for units that are published without being computed before.
  template <class Publish>
  void run(int64_t phase, int64_t units, Publish publish) {
    run(phase, units, [](int64_t, int64_t) {}, publish);
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct alignas(64) Counter {
    std::atomic<int64_t> claimed{0}, done{0};
  };

  std::atomic<uint64_t>& stamp_of(int64_t unit) { return stamps_[unit * stamp_stride_]; }

  // Waits for others about as long as the phase took so far; returns whether it ended.
  template <class Ended>
  static bool wait(Ended ended, Clock::time_point began) {
    for (int i = 0; i < 32; ++i) {
      if (ended()) return true;
      pause_thread();
    }
    const auto now = Clock::now();
    const auto until = now + std::clamp<Clock::duration>((now - began) / 2, kLeastPatience,
                                                         kMostPatience);
    while (!ended()) {
      if (Clock::now() >= until) return false;
      for (int i = 0; i < 8; ++i) pause_thread();
    }
    return true;
  }

  static void wait_for_stamp(const std::atomic<uint64_t>& stamp, uint64_t done) {
    for (int i = 0; stamp.load(std::memory_order_acquire) < done; ++i) {
      if (i < 200) pause_thread();
      else std::this_thread::sleep_for(kNap);
    }
  }

  static constexpr Clock::duration kLeastPatience = std::chrono::microseconds(10);
  static constexpr Clock::duration kMostPatience = std::chrono::milliseconds(1);
  static constexpr Clock::duration kNap = std::chrono::microseconds(50);

  static constexpr int64_t kOwnLines = 2048;

  int threads_ = 1;
  int64_t num_phases_ = 0, num_stamps_ = 0, stamp_stride_ = 8;
  uint64_t base_ = 1, last_ = 0;  // stamps of this run begin at base_; stamps of the last run
  std::unique_ptr<Counter[]> counters_;
  std::unique_ptr<std::atomic<uint64_t>[]> stamps_;
  alignas(64) std::atomic<int64_t> reached_{0};  // phases that are over
};

}  // namespace stepgraph
