// The threads that all CPU operators of a process share.
//
// An operator runs a job on its calling thread and on as many pool threads as join it. Nothing waits
// for a thread that has not joined, so an operator never depends on when the scheduler of the
// operating system starts one. Pool threads sleep while there is no job.
//
// A thread that has joined may lose its core at any time. The caller does not wait for it either: a
// job outlives the call that ran it, and is used again once every thread has left it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace stepgraph {

// A hint to the processor that the thread waits for another one.
inline void pause_thread() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether a job is in use, in memory that is never freed: a pool thread may look at it after the job
// is gone.
struct JobControl {
  static constexpr uint32_t kBusy = 1 << 16;     // a call runs or prepares the job
  static constexpr uint32_t kRetired = 1 << 17;  // the call is over, some threads have not left
  std::atomic<uint32_t> state{0};                // flags, and the number of pool threads inside
  std::atomic<int32_t> next_index{0};            // of the thread that joins next
  class Job* job = nullptr;
  int threads = 0;  // that may take part
};

// Work for several threads. One call uses it at a time. It lives in a `JobPointer`.
class Job {
 public:
  Job();
  virtual ~Job();  // of an acquired job
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Takes the job for a call. False: a call or a late thread uses it.
  bool try_acquire();
  void acquire();  // waits for late threads

  // Drops what an unused job still refers to.
  void sweep();

  // Calls prepare() for an acquired job. If it throws, the job is given back.
  template <class Prepare>
  void prepare_or_release(Prepare prepare) {
    try {
      prepare();
    } catch (...) {
      give_back();
      throw;
    }
  }

  // Runs an acquired job on this thread and at most `threads - 1` pool threads, and gives it back.
  // With `wait` no thread is inside when it returns.
  void run(int threads, bool wait);

 protected:
  // What each thread does, with an index of its own below `threads`. The work is complete when the
  // caller, whose index is 0, returns. Other threads may return later, and must not write to memory
  // of the caller's after that.
  virtual void work(int64_t index) = 0;

  // Drops what the job refers to. Called by threads that call operators, after the last pool thread
  // has left: a pool thread must not free tensors, which may need Python's lock.
  virtual void clear() { keep_.reset(); }

  std::shared_ptr<const void> keep_;  // owns what the job points to; or null

 private:
  friend class Pool;

  // Takes a job whose last thread has left, and clears it.
  bool try_clear();
  void give_back();

  JobControl* control_;
};

// Waits until every thread has left a job before any part of it is destroyed. (A destructor of `Job`
// would wait too late: the members of the derived class, which threads read, go before it.)
struct DeleteJob {
  template <class J>
  void operator()(J* job) const {
    job->acquire();
    delete job;
  }
};
template <class J>
using JobPointer = std::unique_ptr<J, DeleteJob>;

// Jobs of one kind, for calls that may overlap.
template <class J>
class JobList {
 public:
  // A job that is acquired, made of `arguments` if all others are in use. It stays valid.
  template <class... Arguments>
  J& acquire(Arguments&... arguments) {
    const std::lock_guard<std::mutex> alone(mutex_);
    for (const JobPointer<J>& job : jobs_) {
      if (job->try_acquire()) return *job;
    }
    jobs_.push_back(JobPointer<J>(new J(arguments...)));
    jobs_.back()->acquire();
    return *jobs_.back();
  }

  // Calls visit(job) for all of them.
  template <class Visit>
  void each(Visit visit) {
    const std::lock_guard<std::mutex> alone(mutex_);
    for (const JobPointer<J>& job : jobs_) visit(*job);
  }

 private:
  std::mutex mutex_;
  std::vector<JobPointer<J>> jobs_;
};

// The jobs of a kind. Never destroyed: threads may use them until the process ends.
template <class J>
JobList<J>& jobs_of() {
  static auto* jobs = new JobList<J>;
  return *jobs;
}

// Calls `sweep` whenever `sweep_jobs` is called.
void add_sweep(void (*sweep)());

// Drops what late threads may have read after earlier calls of `run_job`, as far as they have left.
void sweep_jobs();

// Runs a job of its kind, which `prepare` makes ready and returns the number of threads of. What its
// arguments keep may be read by late threads after the call.
template <class J, class... Arguments>
void run_job(Arguments&&... arguments) {
  [[maybe_unused]] static const bool swept = (
      add_sweep([] { jobs_of<J>().each([](J& job) { job.sweep(); }); }), true);
  J& job = jobs_of<J>().acquire();
  int threads = 1;
  job.prepare_or_release([&] { threads = job.prepare(std::forward<Arguments>(arguments)...); });
  job.run(threads, false);
}

// How many of `threads` are worth while where more than `useful` bring nothing; at least 1.
inline int useful_threads(int64_t useful, int threads) {
  return static_cast<int>(std::clamp<int64_t>(useful, 1, threads));
}

// Threads that an operator may use, the calling one included. 0 (as at first): as many as torch.
void set_thread_limit(int threads);
int thread_limit();

// Calls run(index, thread) for 0 <= index < count on up to `threads` threads, 0 <= thread < threads.
using UnitFunction = void (*)(void* context, int64_t index, int64_t thread);
void run_units(int64_t count, int threads, UnitFunction run, void* context);

template <class Run>
inline void parallel_for(int64_t count, int threads, Run run) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) run(i, 0);
    return;
  }
  run_units(count, threads, [](void* context, int64_t index, int64_t thread) {
    (*static_cast<Run*>(context))(index, thread);
  }, &run);
}

// Memory that threads of a job work in: floats on a cache line of their own, kept from one use to
// the next as long as they suffice.
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
