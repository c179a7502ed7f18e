#include "tests/support/heap_bytes.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "absl/base/attributes.h"

namespace quantd::testing {

std::atomic<int64_t> live_bytes{0};
std::atomic<int64_t> peak_bytes{0};

namespace {

// With the size that the heap notes before it.
int64_t HeapBytes(void* memory) {
  return static_cast<int64_t>(malloc_usable_size(memory) + sizeof(size_t));
}

// Not inline: g++ takes free() of what `new` gave for a mistake.
ABSL_ATTRIBUTE_NOINLINE void* Allocate(size_t size) {
  void* const memory = std::malloc(size);
  if (memory == nullptr) std::abort();
  live_bytes += HeapBytes(memory);
  peak_bytes = std::max(peak_bytes.load(), live_bytes.load());
  return memory;
}

ABSL_ATTRIBUTE_NOINLINE void Free(void* memory) {
  if (memory == nullptr) return;
  live_bytes -= HeapBytes(memory);
  std::free(memory);
}

}  // namespace
}  // namespace quantd::testing

void* operator new(size_t size) { return quantd::testing::Allocate(size); }

void operator delete(void* memory) noexcept { quantd::testing::Free(memory); }

void operator delete(void* memory, size_t) noexcept {
  quantd::testing::Free(memory);
}
