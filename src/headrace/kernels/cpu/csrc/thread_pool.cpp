#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kSpin{50};  // longer than from one operator of a step to the next, shorter than from step to step
constexpr int kLooks = 32;                      // between two readings of the clock
constexpr uint32_t kPlace = 1 << 16;            // state: places that workers may still take << 16 | workers that compute
constexpr int64_t kMostWorkers = 1023;

thread_local bool busy = false;  // this thread is inside of a call already

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `done()` became true within kSpin.
template <class Done>
bool spin_until(const Done& done) {
  for (auto end = Clock::now() + kSpin;;) {
    for (int i = 0; i < kLooks; ++i) {
      if (done()) return true;
      relax();
    }
    if (Clock::now() >= end) return false;
  }
}

class Pool {
 public:
  void run(int64_t threads, void (*work)(void*), void* context) {
    const std::unique_lock<std::mutex> lock(calls_, std::try_to_lock);
    if (busy || !lock.owns_lock()) return work(context);
    const uint32_t places = hire(threads - 1);
    work_ = work;
    context_ = context;
    error_ = nullptr;
    state_.store(places * kPlace);
    announced_.fetch_add(1);
    if (sleepers_.load() > 0) announced_.notify_all();
    compute();
    state_.fetch_and(kPlace - 1);  // who has not begun need not
    if (!spin_until([&] { return state_.load() == 0; })) {
      caller_sleeps_.store(true);
      for (uint32_t seen = state_.load(); seen != 0; seen = state_.load()) state_.wait(seen);
      caller_sleeps_.store(false);
    }
    if (error_) std::rethrow_exception(error_);
  }

 private:
  // Workers that there are of those that are wanted. Where the system gives no more threads, fewer have to do.
  uint32_t hire(int64_t wanted) {
    if (wanted > kMostWorkers) wanted = kMostWorkers;
    if (workers_ < wanted) {
      sigset_t all, before;  // signals are for the threads that the program knows
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        for (; workers_ < wanted; ++workers_) std::thread(&Pool::serve, this).detach();
      } catch (const std::system_error&) {
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    return static_cast<uint32_t>(workers_ < wanted ? workers_ : wanted);
  }

  void serve() {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "headrace-cpu");
#endif
    for (;;) {
      const uint32_t seen = announced_.load();  // before the look at the state: an announcement after it is not slept through
      if (take_place()) {
        compute();
        if (state_.fetch_sub(1) == 1 && caller_sleeps_.load()) state_.notify_all();
        continue;
      }
      if (spin_until([&] { return announced_.load() != seen; })) continue;
      sleepers_.fetch_add(1);
      announced_.wait(seen);
      sleepers_.fetch_sub(1);
    }
  }

  bool take_place() {
    uint32_t state = state_.load();
    while (state >= kPlace)
      if (state_.compare_exchange_weak(state, state - kPlace + 1)) return true;
    return false;
  }

  void compute() {
    busy = true;
    try {
      work_(context_);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(errors_);
      if (!error_) error_ = std::current_exception();
    }
    busy = false;
  }

  std::mutex calls_, errors_;
  int64_t workers_ = 0;
  void (*work_)(void*) = nullptr;  // these three change only while no worker computes and none may begin
  void* context_ = nullptr;
  std::exception_ptr error_;
  alignas(64) std::atomic<uint32_t> state_{0};
  alignas(64) std::atomic<uint32_t> announced_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
};

// Never destroyed: workers use it until the process ends.
std::atomic<Pool*> pool{nullptr};

// The child of a fork has none of the workers, and maybe a lock that nobody will open.
void begin_anew() { pool.store(new Pool, std::memory_order_release); }

}  // namespace

void work_together(int64_t threads, void (*work)(void*), void* context) {
  static const int registered = [] {
    begin_anew();
    return pthread_atfork(nullptr, nullptr, begin_anew);
  }();
  (void)registered;
  pool.load(std::memory_order_acquire)->run(threads, work, context);
}

}  // namespace headrace
