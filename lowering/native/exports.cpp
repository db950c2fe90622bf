// What Python calls without torch: counters, kept memory, packed and watched weights, sleeping threads.

#include "counters.h"
#include "half_product.h"
#include "pool.h"
#include "sleepers.h"
#include "watched.h"

extern "C" {
int64_t* kernel_dispatch_counters() { return kd::counters(); }
// Above 0 while this thread runs a graph whose big tensors are to come from the pool.
int64_t* kernel_dispatch_pool_depth() { return &kd::Pool::depth(); }
void kernel_dispatch_keep_memory(int64_t bytes, bool backward) {
  kd::Pool::installed().keep(static_cast<size_t>(bytes), backward);
}
int64_t kernel_dispatch_limit_memory(int64_t bytes) {
  return static_cast<int64_t>(kd::Pool::installed().set_limit(static_cast<size_t>(bytes)));
}
int64_t kernel_dispatch_idle_bytes() { return kd::Pool::installed().idle_bytes(); }
void kernel_dispatch_forget() {
  kd::weights().forget();
  kd::Pool::installed().forget();
}
void kernel_dispatch_forget_watched(int64_t number) { kd::watched().remove(number); }
int64_t kernel_dispatch_packed_bytes() { return kd::weights().bytes(); }
int64_t kernel_dispatch_packed_count() { return kd::weights().made(); }
bool kernel_dispatch_multiplies_bfloat16() { return kd::halves::multiplied<kd::BFloat16>(); }
bool kernel_dispatch_multiplies_float16() { return kd::halves::multiplied<kd::Half>(); }
bool kernel_dispatch_wake_threads() { return kd::Sleepers::mine().wake(); }
}
