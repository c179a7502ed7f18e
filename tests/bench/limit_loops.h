// Loops that do nothing but move a kernel's traffic, at the width of the best
// SIMD target: what the memory allows.

#ifndef QUANTD_TESTS_BENCH_LIMIT_LOOPS_H_
#define QUANTD_TESTS_BENCH_LIMIT_LOOPS_H_

#include <cstdint>

namespace quantd::bench {

// Sizes are multiples of 1 KiB. Thread-safe.
uint64_t ReadAndSum(const uint8_t* in, int64_t size_bytes);
// The same, prefetching.
uint64_t ReadAheadAndSum(const uint8_t* in, int64_t size_bytes);
// `out`  [size_bytes / 4].
void FourInOneOut(const uint8_t* in, int64_t size_bytes, uint8_t* out);
// `in`  [size_bytes / 4].
void OneInFourOut(const uint8_t* in, int64_t size_bytes, uint8_t* out);

// Adds the squares of each column, in float32.
// `rows`     a multiple of 4.
// `columns`  a multiple of 16.
void SquareSums(const float* in, int64_t rows, int64_t columns, float* out);

}  // namespace quantd::bench

#endif  // QUANTD_TESTS_BENCH_LIMIT_LOOPS_H_
