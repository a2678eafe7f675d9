// What Python can't reach of the kernels' thread pool. Prints nothing and returns 0, or says what is wrong and returns 1.
#include "thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>

using headrace::share_items;

static int failures = 0;

static void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  ++failures;
}

// Each of n items is seen once.
static bool all_once(int64_t threads, int64_t n, int64_t grain) {
  std::vector<std::atomic<int>> seen(static_cast<size_t>(n));
  share_items(threads, n, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) ++seen[static_cast<size_t>(i)];
  });
  for (const auto& count : seen)
    if (count != 1) return false;
  return true;
}

int main() {
  for (int round = 0; round < 500; ++round)
    for (int64_t threads : {1, 2, 3, 8})
      for (int64_t n : {0, 1, 2, 17, 100}) expect(all_once(threads, n, 1) && all_once(threads, n, 3), "an item is lost or done twice");

  int caught = 0;
  for (int round = 0; round < 500; ++round) {
    try {
      share_items(3, 100, 1, [](int64_t first, int64_t) {
        if (first == 50) throw std::runtime_error("fifty");
      });
    } catch (const std::runtime_error&) {
      ++caught;
    }
    expect(all_once(3, 40, 1), "the pool is broken after an exception");
  }
  expect(caught == 500, "an exception is lost");

  std::atomic<int64_t> sum{0};
  share_items(3, 10, 1, [&](int64_t, int64_t) { share_items(3, 10, 1, [&](int64_t first, int64_t last) { sum += last - first; }); });
  expect(sum == 100, "nested calls lose work");

  std::vector<std::thread> callers;
  std::atomic<int> right{0};
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&] {
      for (int round = 0; round < 300; ++round) right += all_once(3, 25, 1);
    });
  for (std::thread& caller : callers) caller.join();
  expect(right == 1200, "calls from several threads disturb each other");

  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the workers sleep
  expect(all_once(3, 100, 1), "who sleeps is not woken");

  const pid_t child = fork();
  if (child == 0) _exit(all_once(3, 100, 1) ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  expect(status == 0, "the child of a fork can't compute");
  expect(all_once(3, 100, 1), "a fork breaks the parent's pool");
  return failures != 0;
}
