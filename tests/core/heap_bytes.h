// What the heap of a program holds. Include it in one file of the program.

#ifndef QUANTD_TESTS_CORE_HEAP_BYTES_H_
#define QUANTD_TESTS_CORE_HEAP_BYTES_H_

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "absl/base/attributes.h"

namespace quantd::core {

// What the heap holds, and the most that it held.
inline std::atomic<int64_t> live_bytes{0};
inline std::atomic<int64_t> peak_bytes{0};

// With the size that the heap notes before it.
inline int64_t HeapBytes(void* memory) {
  return static_cast<int64_t>(malloc_usable_size(memory) + sizeof(size_t));
}

}  // namespace quantd::core

// Not inline: g++ takes free() of what `new` gave for a mistake.
ABSL_ATTRIBUTE_NOINLINE void* operator new(size_t size) {
  void* const memory = std::malloc(size);
  if (memory == nullptr) std::abort();
  using quantd::core::live_bytes;
  using quantd::core::peak_bytes;
  live_bytes += quantd::core::HeapBytes(memory);
  peak_bytes = std::max(peak_bytes.load(), live_bytes.load());
  return memory;
}

ABSL_ATTRIBUTE_NOINLINE void operator delete(void* memory) noexcept {
  if (memory == nullptr) return;
  quantd::core::live_bytes -= quantd::core::HeapBytes(memory);
  std::free(memory);
}

void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

#endif  // QUANTD_TESTS_CORE_HEAP_BYTES_H_
