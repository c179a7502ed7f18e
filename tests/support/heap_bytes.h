// What the heap of a program holds. Counted in programs that use this.

#ifndef QUANTD_TESTS_SUPPORT_HEAP_BYTES_H_
#define QUANTD_TESTS_SUPPORT_HEAP_BYTES_H_

#include <atomic>
#include <cstdint>

namespace quantd::testing {

// What the heap holds, and the most that it held.
extern std::atomic<int64_t> live_bytes;
extern std::atomic<int64_t> peak_bytes;

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_HEAP_BYTES_H_
