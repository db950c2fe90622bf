// Big tensors that compiled graphs make: their memory is kept for the next call, which asks for the
// same sizes again. The system would take it back in between, and hand out zeroed pages anew.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>

#include "pages.h"

namespace torch::autograd {
TORCH_API int get_current_graph_task_id();  // -1 outside of a backward
}

namespace kd {

class Pool final : public c10::Allocator {
 public:
  explicit Pool(c10::Allocator* otherwise) : otherwise_(otherwise) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kSmallest || !wanted()) return otherwise_->allocate(bytes);
    void* const data = take(pages_for(bytes));
    if (data == nullptr) return otherwise_->allocate(bytes);  // it says what is wrong, as without us
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // How many bytes that nobody uses may be kept. Returns what it was.
  size_t set_limit(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t before = limit_;
    limit_ = bytes;
    drop_beyond_limit();
    return before;
  }
  // The largest limit that was asked for holds.
  void keep(size_t bytes, bool backward) {
    const std::lock_guard<std::mutex> lock(mutex_);
    limit_ = std::max(limit_, bytes);
    if (backward) backward_ = true;
  }
  void forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (!idle_.empty()) drop(idle_.begin());
  }
  int64_t idle_bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(idle_bytes_);
  }

  // Above 0 while this thread runs a graph that wants its memory kept.
  static int64_t& depth() {
    static thread_local int64_t depth = 0;
    return depth;
  }

  // Becomes torch's allocator of CPU memory, once. For all but the tensors above it asks the one
  // that was there before.
  static Pool& installed() {
    static Pool* pool = [] {
      auto* made = new Pool(c10::GetCPUAllocator());  // never destroyed: tensors outlive main()
      c10::SetCPUAllocator(made, 0);
      // A fork must not find the lock taken by a thread that the child does not have.
      pthread_atfork([] { installed().mutex_.lock(); }, [] { installed().mutex_.unlock(); },
                     [] { installed().mutex_.unlock(); });
      return made;
    }();
    return *pool;
  }

 private:
  static constexpr size_t kSmallest = size_t{1} << 18;
  struct Idle {
    void* data;
    uint64_t since;
  };
  using Blocks = std::multimap<size_t, Idle>;

  bool wanted() const {
    return depth() > 0 || (backward_ && torch::autograd::get_current_graph_task_id() >= 0);
  }

  void* take(size_t size) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto found = idle_.lower_bound(size);
      if (found != idle_.end() && found->first <= size + size / 4) {
        found = std::prev(idle_.upper_bound(found->first));  // the last one may be in the cache yet
        void* const data = found->second.data;
        used_.emplace(data, found->first);
        idle_bytes_ -= found->first;
        idle_.erase(found);
        return data;
      }
    }
    void* data = take_pages(size);
    if (data == nullptr) {
      forget();
      data = take_pages(size);
    }
    if (data != nullptr) {
      const std::lock_guard<std::mutex> lock(mutex_);
      used_.emplace(data, size);
    }
    return data;
  }

  static void release(void* data) {
    if (data == nullptr) return;
    Pool& pool = installed();
    size_t size = 0;
    {
      const std::lock_guard<std::mutex> lock(pool.mutex_);
      const auto found = pool.used_.find(data);
      if (found != pool.used_.end()) {
        size = found->second;
        pool.used_.erase(found);
      }
    }
    if (size == 0) return pool.otherwise_->raw_deallocate(data);
    c10::profiledCPUMemoryReporter().Delete(data);
    pool.put(data, size);
  }

  void put(void* data, size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.emplace(size, Idle{data, clock_++});
    idle_bytes_ += size;
    drop_beyond_limit();
  }

  void drop_beyond_limit() {
    while (idle_bytes_ > limit_) drop(oldest());
  }

  Blocks::iterator oldest() {
    auto oldest = idle_.begin();
    for (auto it = idle_.begin(); it != idle_.end(); ++it)
      if (it->second.since < oldest->second.since) oldest = it;
    return oldest;
  }

  void drop(Blocks::iterator block) {
    give_pages_back(block->second.data, block->first);
    idle_bytes_ -= block->first;
    idle_.erase(block);
  }

  c10::Allocator* const otherwise_;
  std::mutex mutex_;
  Blocks idle_;
  std::unordered_map<void*, size_t> used_;
  size_t idle_bytes_ = 0, limit_ = 0;
  uint64_t clock_ = 0;
  std::atomic<bool> backward_{false};  // read without the lock, at every allocation
};

}  // namespace kd
