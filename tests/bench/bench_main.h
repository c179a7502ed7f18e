// What the programs of Google Benchmark here have in common.

#ifndef QUANTD_TESTS_BENCH_BENCH_MAIN_H_
#define QUANTD_TESTS_BENCH_BENCH_MAIN_H_

namespace quantd::bench {

// Runs what `register_all` registers, the rows of 256 MiB only with --large, on
// the SIMD target that QUANTD_SIMD names. Memory stays with the process, as in
// the server. Returns the exit code.
int RunBenchmarks(int argc, char** argv, void (*register_all)(bool is_large));

}  // namespace quantd::bench

#endif  // QUANTD_TESTS_BENCH_BENCH_MAIN_H_
