#include "tests/bench/bench_main.h"

#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "benchmark/benchmark.h"
#include "core/cpu.h"

namespace quantd::bench {

int RunBenchmarks(int argc, char** argv, void (*register_all)(bool is_large)) {
  bool is_large = false;
  char** const end = std::remove_if(argv + 1, argv + argc, [&](char* argument) {
    const bool is_flag = absl::string_view(argument) == "--large";
    is_large |= is_flag;
    return is_flag;
  });
  argc = static_cast<int>(end - argv);
  if (const char* target = std::getenv("QUANTD_SIMD"); target != nullptr) {
    const absl::Status status = core::SetSimdTarget(target);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      return 1;
    }
  }
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  benchmark::AddCustomContext("simd_target", core::SimdTarget());
  register_all(is_large);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace quantd::bench
