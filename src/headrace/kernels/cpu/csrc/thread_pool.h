// The operators' own threads.
//
// A thread that calls an operator computes, and workers help it. Nobody waits for a worker that has not begun: where its core is taken by
// something else, the others do its share. Workers that find nothing to do look for work for kSpin, then sleep until they are woken.
#pragma once

#include <atomic>
#include <cstdint>

namespace headrace {

// Calls work(context) here and on up to `threads - 1` workers, at once, and returns when all calls that began have ended. So `work` must take
// what is to be done in pieces and return when none is left. Called from within `work`, or while another thread's call is running, it
// calls `work` here alone. The first exception of a call is thrown on; the pool stays as it was.
void work_together(int64_t threads, void (*work)(void*), void* context);

// f(first, last) for pieces of [0, n) on `threads` threads; who is free takes the next `grain` items.
template <class Function>
void share_items(int64_t threads, int64_t n, int64_t grain, const Function& f) {
  if (threads <= 1 || n <= grain) {
    if (n > 0) f(0, n);
    return;
  }
  struct Loop {
    alignas(64) std::atomic<int64_t> next;
    int64_t n, grain;
    const Function* f;
  } loop{{0}, n, grain, &f};
  const auto work = [](void* context) {
    Loop& l = *static_cast<Loop*>(context);
    try {
      for (int64_t i = l.next.fetch_add(l.grain, std::memory_order_relaxed); i < l.n; i = l.next.fetch_add(l.grain, std::memory_order_relaxed)) {
        (*l.f)(i, i + l.grain < l.n ? i + l.grain : l.n);
      }
    } catch (...) {
      l.next.store(l.n, std::memory_order_relaxed);  // the result is lost: nobody begins another piece
      throw;
    }
  };
  const int64_t pieces = (n + grain - 1) / grain;
  work_together(threads < pieces ? threads : pieces, work, &loop);
}

}  // namespace headrace
