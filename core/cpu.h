// The CPU that this is, and which of its SIMD instructions the kernels use.

#ifndef QUANTD_CORE_CPU_H_
#define QUANTD_CORE_CPU_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace quantd::core {

// Names of the targets that this build and this CPU have, best first; "scalar"
// (the plain definitions) is always the last. E.g. {"avx3", "avx2", "sse4",
// "scalar"}.
std::vector<std::string> AvailableSimdTargets();

// Makes all kernels use this target, for the whole process; "auto" or empty
// takes the best. Call before other threads run kernels. The results are the
// same to the last bit on every target.
// Errors: SIMD_TARGET, naming the available ones.
absl::Status SetSimdTarget(absl::string_view name);

// The target in use.
std::string SimdTarget();

// Architecture and model of this CPU as it names itself, for people to read:
// "x86-64, Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz", or "aarch64, implementer
// 0x41, part 0xd40".
std::string CpuName();

}  // namespace quantd::core

#endif  // QUANTD_CORE_CPU_H_
