// Threads and their scratch memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "sleepers.h"

namespace kd {

// body(thread, team) on each thread of a team. The team may be smaller than asked for. All threads
// of the process are called, even if some have nothing to do: with a number that changes from call
// to call, libgomp would end and start threads.
template <class Body>
static inline void in_parallel(int threads, const Body& body) {
#if defined(_OPENMP)
  if (threads > 1) {
    const int called = omp_get_max_threads() > threads ? omp_get_max_threads() : threads;
#pragma omp parallel num_threads(called)
    {
      const int got = omp_get_num_threads(), team = got < threads ? got : threads;
      if (omp_get_thread_num() < team) body(omp_get_thread_num(), team);
    }
    Sleepers::mine().team_worked();
    return;
  }
#endif
  body(0, 1);
}

// As many of `threads` as have something to do that outweighs waking them.
static inline int useful_threads(int threads, double work, double work_per_thread) {
  const double useful = work / work_per_thread;
  return useful >= threads ? threads : useful > 1 ? static_cast<int>(useful) : 1;
}

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// The index-th of `parts` almost equal parts of 0..size-1.
static inline Range part_of(int64_t size, int64_t index, int64_t parts) {
  return {size * index / parts, size * (index + 1) / parts};
}

static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls body(item) once for each item below `count`. Every thread begins with a share of its own,
// whose memory is in its cache from the operation before, and then helps the others: on a machine
// that does something else besides, even shares would wait for the thread that was disturbed.
template <class Body>
static inline void for_each_item(int64_t count, int threads, const Body& body) {
  constexpr int most = 128;
  const int shares = static_cast<int>(std::min<int64_t>({count, threads, most}));
  if (shares <= 1) {
    for (int64_t item = 0; item < count; item++) body(item);
    return;
  }
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  Share share[most];
  for (int i = 0; i < shares; i++) {
    const Range mine = part_of(count, i, shares);
    share[i].next.store(mine.begin, std::memory_order_relaxed);
    share[i].end = mine.end;
  }
  in_parallel(threads, [&](int thread, int) {
    for (int i = 0; i < shares; i++) {
      Share& from = share[(thread + i) % shares];
      while (from.next.load(std::memory_order_relaxed) < from.end) {
        const int64_t item = from.next.fetch_add(1, std::memory_order_relaxed);
        if (item < from.end) body(item);
      }
    }
  });
}

// Floats of this thread's own, at least `size`, aligned to a cache line, kept between calls. Each
// slot is one buffer, so that nested users do not meet.
template <int slot>
static inline float* scratch(int64_t size) {
  struct Owned {
    float* data = nullptr;
    int64_t size = 0;
    ~Owned() { std::free(data); }
  };
  static thread_local Owned owned;
  if (owned.size < size) {
    std::free(owned.data);
    owned.data = nullptr;
    owned.size = 0;
    const size_t bytes = (static_cast<size_t>(size) * sizeof(float) + 4095) / 4096 * 4096;
    owned.data = static_cast<float*>(std::aligned_alloc(4096, bytes));
    if (owned.data == nullptr) throw std::bad_alloc();
    owned.size = static_cast<int64_t>(bytes / sizeof(float));
  }
  return owned.data;
}

}  // namespace kd
