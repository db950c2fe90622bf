// Memory from the system for big blocks: in huge pages where the system has them, since a page fault
// for each 4 KiB, and an entry of the TLB for each, cost more than many operators compute.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace kd {

constexpr size_t kHugePage = size_t{2} << 20;

static inline size_t rounded_up(size_t size, size_t step) { return (size + step - 1) / step * step; }

// Inductor's code may read a whole vector where a row has fewer elements (masked loads at the end of a
// row), so the last one may reach beyond the block. What is there is not used, but it has to be there.
constexpr size_t kReadBeyond = 256;

// What a block of so many bytes takes.
static inline size_t pages_for(size_t bytes) {
  return rounded_up(bytes + kReadBeyond, size_t{1} << 16);
}

// `size` is what pages_for() said; nullptr where there is no memory.
static inline void* take_pages(size_t size) {
  const size_t slack = size >= kHugePage ? kHugePage : 0;
  void* const all =
      mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  if (slack == 0) return all;
  const auto first = reinterpret_cast<uintptr_t>(all);
  const uintptr_t begin = rounded_up(first, kHugePage), end = begin + size;
  if (begin > first) munmap(all, begin - first);
  if (end < first + size + slack) munmap(reinterpret_cast<void*>(end), first + size + slack - end);
  void* const data = reinterpret_cast<void*>(begin);
#if defined(MADV_HUGEPAGE)
  madvise(data, size, MADV_HUGEPAGE);  // a wish; it may be declined
#endif
  return data;
}

static inline void give_pages_back(void* data, size_t size) { munmap(data, size); }

}  // namespace kd
