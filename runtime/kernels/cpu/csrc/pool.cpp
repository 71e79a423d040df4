#include "pool.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

#include <pthread.h>
#include <signal.h>

namespace stepgraph {

namespace {

constexpr int kSeats = 16;           // calls that pool threads join at the same time
constexpr int kMostThreads = 1024;
// Before an idle pool thread sleeps: about as long as the host works between two steps, since a
// sleeping thread takes some 70 us to wake up on a virtual machine.
constexpr auto kIdleSpin = std::chrono::microseconds(200);
constexpr auto kNap = std::chrono::microseconds(50);

// Waits until `done` holds: briefly on the core, then by giving it up.
template <class Done>
void wait_until(Done done) {
  for (int i = 0; i < 200; ++i) {
    if (done()) return;
    pause_thread();
  }
  while (!done()) std::this_thread::sleep_for(kNap);
}

}  // namespace

// Threads and the calls they may join. Never destroyed: threads use it until the process ends.
class Pool {
 public:
  static Pool& instance() {
    static std::atomic<Pool*> pool = [] {
      // The threads do not exist in a forked child, which starts over with a pool of its own.
      pthread_atfork(nullptr, nullptr, [] { forked() = true; });
      return new Pool;
    }();
    if (forked()) {
      forked() = false;
      pool = new Pool;
    }
    return *pool;
  }

  void run(Job& job, int threads) {
    const int callers = callers_.fetch_add(1, std::memory_order_relaxed) + 1;
    Seat* seat = threads > callers ? open_seat(job.control_) : nullptr;
    if (seat != nullptr) {
      start(threads - 1);
      signal_.fetch_add(1, std::memory_order_seq_cst);
      signal_.notify_all();
    }
    job.work(0);
    if (seat != nullptr) seat->close();
    callers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  // A call that threads may join while its generation is odd.
  struct alignas(64) Seat {
    std::atomic<bool> taken{false};
    std::atomic<uint64_t> generation{0};
    std::atomic<JobControl*> control{nullptr};

    void close() {
      // In one order with what `join` does: either it sees the seat closed, or the caller sees it
      // inside.
      generation.fetch_add(1, std::memory_order_seq_cst);
      taken.store(false, std::memory_order_release);
    }
  };

  static bool& forked() {
    static bool value = false;
    return value;
  }

  Seat* open_seat(JobControl* control) {
    for (Seat& seat : seats_) {
      if (seat.taken.exchange(true, std::memory_order_acquire)) continue;
      seat.control.store(control, std::memory_order_relaxed);
      seat.generation.fetch_add(1, std::memory_order_release);
      return &seat;
    }
    return nullptr;
  }

  void start(int threads) {
    if (started_.load(std::memory_order_acquire) >= std::min(threads, kMostThreads)) return;
    const std::lock_guard<std::mutex> alone(starting_);
    // Signals are for the threads of the program, except fault signals: were they blocked, the
    // system would end the process without calling a handler, which says where it was.
    sigset_t all, before;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started_ < std::min(threads, kMostThreads)) {
      try {
        std::thread([this, index = started_ + 1] { serve(index); }).detach();
      } catch (const std::system_error&) {
        break;  // a limit of the system; the caller does the work
      }
      ++started_;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // What a pool thread does for ever.
  void serve(int index) {
    std::array<uint64_t, kSeats> joined{};
    for (;;) {
      const int signal = signal_.load(std::memory_order_seq_cst);
      for (int i = 0; i < kSeats; ++i) join(seats_[i], joined[i], index);
      const auto until = std::chrono::steady_clock::now() + kIdleSpin;
      do {
        for (int i = 0; i < 64 && signal_.load(std::memory_order_relaxed) == signal; ++i) {
          pause_thread();
        }
      } while (signal_.load(std::memory_order_relaxed) == signal &&
               std::chrono::steady_clock::now() < until);
      signal_.wait(signal, std::memory_order_seq_cst);
    }
  }

  void join(Seat& seat, uint64_t& joined, int index) {
    const uint64_t generation = seat.generation.load(std::memory_order_acquire);
    if (generation % 2 == 0 || generation == joined) return;
    JobControl* control = seat.control.load(std::memory_order_relaxed);
    control->state.fetch_add(1, std::memory_order_seq_cst);
    if (seat.generation.load(std::memory_order_seq_cst) != generation) {
      leave(control);
      return;
    }
    joined = generation;
    // Every other call works on a thread of its own.
    if (index <= control->threads - callers_.load(std::memory_order_relaxed)) {
      const int64_t place = control->next_index.fetch_add(1, std::memory_order_relaxed);
      if (place < control->threads) control->job->work(place);
    }
    leave(control);
  }

  static void leave(JobControl* control) {
    control->state.fetch_sub(1, std::memory_order_release);
  }

 public:
  static JobControl* new_control() {
    const std::lock_guard<std::mutex> alone(controls_mutex());
    std::vector<JobControl*>& spare = spare_controls();
    if (spare.empty()) return new JobControl;
    JobControl* control = spare.back();
    spare.pop_back();
    return control;
  }

  static void keep_control(JobControl* control) {
    const std::lock_guard<std::mutex> alone(controls_mutex());
    spare_controls().push_back(control);
  }

 private:
  static std::mutex& controls_mutex() {
    static std::mutex* mutex = new std::mutex;
    return *mutex;
  }
  static std::vector<JobControl*>& spare_controls() {
    static auto* spare = new std::vector<JobControl*>;
    return *spare;
  }

  alignas(64) std::atomic<int> signal_{0};  // counts jobs
  alignas(64) std::atomic<int> callers_{0};
  std::array<Seat, kSeats> seats_;
  std::mutex starting_;
  std::atomic<int> started_{0};
};

Job::Job() : control_(Pool::new_control()) { control_->job = this; }

Job::~Job() {
  control_->job = nullptr;
  give_back();
  Pool::keep_control(control_);
}

bool Job::try_acquire() {
  uint32_t free = 0;
  return control_->state.compare_exchange_strong(free, JobControl::kBusy,
                                                 std::memory_order_acq_rel) ||
         try_clear();
}

void Job::acquire() {
  wait_until([this] { return try_acquire(); });
}

bool Job::try_clear() {
  uint32_t retired = JobControl::kRetired;
  if (!control_->state.compare_exchange_strong(retired, JobControl::kBusy,
                                               std::memory_order_acq_rel)) {
    return false;
  }
  clear();
  return true;
}

void Job::give_back() { control_->state.fetch_sub(JobControl::kBusy, std::memory_order_release); }

void Job::sweep() {
  if (try_clear()) give_back();
}

void Job::run(int threads, bool wait) {
  control_->threads = threads;
  control_->next_index.store(1, std::memory_order_relaxed);
  if (threads > 1) Pool::instance().run(*this, threads);
  else work(0);
  if (wait) {
    wait_until([this] {
      return control_->state.load(std::memory_order_acquire) == JobControl::kBusy;
    });
  }
  constexpr uint32_t kChange = JobControl::kRetired - JobControl::kBusy;
  control_->state.fetch_add(kChange, std::memory_order_acq_rel);
  sweep();
}

namespace {

// Never destroyed: stacks may be closed while the process ends.
struct Sweeps {
  std::mutex mutex;
  std::vector<void (*)()> functions;

  static Sweeps& instance() {
    static auto* sweeps = new Sweeps;
    return *sweeps;
  }
};

std::atomic<int> limit{0};

class UnitsJob : public Job {
 public:
  int prepare(int64_t count, int threads, UnitFunction run, void* context) {
    count_ = count;
    run_ = run;
    context_ = context;
    taken_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    return static_cast<int>(std::min<int64_t>(threads, count));
  }

 protected:
  void work(int64_t index) override {
    int64_t own = 0;
    for (int64_t i; (i = taken_.fetch_add(1, std::memory_order_relaxed)) < count_; ++own) {
      run_(context_, i, index);
    }
    if (own > 0) done_.fetch_add(own, std::memory_order_acq_rel);
    if (index == 0) {
      wait_until([this] { return done_.load(std::memory_order_acquire) == count_; });
    }
  }

 private:
  int64_t count_ = 0;
  UnitFunction run_ = nullptr;
  void* context_ = nullptr;
  std::atomic<int64_t> taken_{0}, done_{0};
};

}  // namespace

void add_sweep(void (*sweep)()) {
  Sweeps& sweeps = Sweeps::instance();
  const std::lock_guard<std::mutex> alone(sweeps.mutex);
  sweeps.functions.push_back(sweep);
}

void sweep_jobs() {
  Sweeps& sweeps = Sweeps::instance();
  const std::lock_guard<std::mutex> alone(sweeps.mutex);
  for (void (*sweep)() : sweeps.functions) sweep();
}

void set_thread_limit(int threads) { limit.store(threads, std::memory_order_relaxed); }
int thread_limit() { return limit.load(std::memory_order_relaxed); }

void run_units(int64_t count, int threads, UnitFunction run, void* context) {
  run_job<UnitsJob>(count, threads, run, context);
}

}  // namespace stepgraph
