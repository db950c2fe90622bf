// Threads that fell asleep in a pause between calls, woken where they can run at once.
//
// Linux may wake a thread on the CPU of the one that wakes it, though others are idle. The two then
// take turns, by slices of some milliseconds, until the scheduler moves one of them: a call of 3 ms
// takes 14 after a pause of 50 ms (two virtual cores, Linux 6.18). So for the moment of waking up
// that CPU is taken off the sleepers' lists.
#pragma once

#include <cstdint>
#include <vector>
#if defined(_OPENMP) && defined(__linux__)
#include <omp.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace kd {

#if defined(_OPENMP) && defined(__linux__)

class Sleepers {
 public:
  // Of the thread that calls: every one has a team of its own.
  static Sleepers& mine() {
    static thread_local Sleepers sleepers;
    return sleepers;
  }

  void team_worked() { last_work_ = now(); }

  // Returns whether threads were woken.
  bool wake() {
    const int threads = omp_get_max_threads();
    if (threads < 2 || omp_in_parallel() || now() - last_work_ < kPause) {
      team_worked();
      return false;
    }
    std::vector<Moved> moved;
    for (const pid_t thread : team_) keep_off_this_cpu(thread, moved);
    team_.assign(static_cast<size_t>(threads), 0);
#pragma omp parallel num_threads(threads)
    if (const int number = omp_get_thread_num(); number > 0)
      team_[static_cast<size_t>(number)] = static_cast<pid_t>(syscall(SYS_gettid));
    for (const Moved& one : moved) sched_setaffinity(one.thread, sizeof one.cpus, &one.cpus);
    team_worked();
    return true;
  }

 private:
  // OpenMP's threads look for work for some ten milliseconds before they sleep.
  static constexpr int64_t kPause = 8;
  struct Moved {
    pid_t thread;
    cpu_set_t cpus;
  };

  // In milliseconds, good to four of them: asked after every product.
  static int64_t now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return time.tv_sec * 1000 + time.tv_nsec / 1000000;
  }

  // Nothing is done to a thread that has ended (its number may be another process's now), to one
  // that was bound elsewhere, or where the system forbids it.
  static void keep_off_this_cpu(pid_t thread, std::vector<Moved>& moved) {
    Moved one{thread, {}};
    if (thread == 0 || syscall(SYS_tgkill, getpid(), thread, 0) != 0) return;
    const int here = sched_getcpu();
    if (here < 0 || sched_getaffinity(thread, sizeof one.cpus, &one.cpus) != 0) return;
    if (here >= CPU_SETSIZE || !CPU_ISSET(here, &one.cpus) || CPU_COUNT(&one.cpus) < 2) return;
    cpu_set_t others = one.cpus;
    CPU_CLR(here, &others);
    if (sched_setaffinity(thread, sizeof others, &others) == 0) moved.push_back(one);
  }

  std::vector<pid_t> team_;  // 0: the calling thread itself
  int64_t last_work_ = -kPause;
};

#else

class Sleepers {
 public:
  static Sleepers& mine() {
    static thread_local Sleepers sleepers;
    return sleepers;
  }
  void team_worked() {}
  bool wake() { return false; }
};

#endif

}  // namespace kd
