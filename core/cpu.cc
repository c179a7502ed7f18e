#include "core/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <atomic>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/simd_internal.h"
#include "hwy/highway.h"

// Elsewhere nobody tried whether the kernels give the same bytes.
#if !defined(__x86_64__) && !defined(__aarch64__)
#error "quantd computes on x86-64 and aarch64"
#endif
// Such flags let the compiler compute something else than what is written.
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || \
    defined(__RECIPROCAL_MATH__) || __FINITE_MATH_ONLY__ + 0 != 0
#error "quantd is to be compiled without -ffast-math and its parts"
#endif

namespace quantd::core {
namespace {

// Assumptions of the whole code.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "elements lie in memory as they do on the wire");
static_assert(sizeof(void*) == 8 && sizeof(size_t) == 8,
              "sizes of tensors need 64 bits");
static_assert(std::numeric_limits<float>::is_iec559 &&
                  std::numeric_limits<double>::is_iec559 &&
                  FLT_EVAL_METHOD == 0,
              "float and double are those of IEEE 754, and rounded as such");

constexpr absl::string_view kScalar = "scalar";
constexpr absl::string_view kAvx512 = "avx512";

std::atomic<bool> scalar_forced{false};

// The targets of this build and CPU, less Highway's own emulations: where
// nothing else is left the kernels run their scalar definitions.
int64_t SimdTargets() {
  static const int64_t targets =
      hwy::SupportedTargets() & HWY_TARGETS & ~(HWY_EMU128 | HWY_SCALAR);
  return targets;
}

std::string NameOf(int64_t target) {
  return absl::AsciiStrToLower(hwy::TargetName(target));
}

int64_t LowestBit(int64_t targets) { return targets & -targets; }

}  // namespace

namespace internal {

bool UsesScalarKernels() {
  return scalar_forced.load(std::memory_order_relaxed);
}

}  // namespace internal

std::vector<std::string> AvailableSimdTargets() {
  std::vector<std::string> names;
  // Lower bits are better targets.
  for (int64_t rest = SimdTargets(); rest != 0; rest &= rest - 1) {
    names.push_back(NameOf(LowestBit(rest)));
  }
  names.emplace_back(kScalar);
  return names;
}

absl::Status SetSimdTarget(absl::string_view name) {
  const int64_t all = SimdTargets();
  if (name.empty() || name == "auto") {
    hwy::SetSupportedTargetsForTest(0);
    scalar_forced = false;
    return absl::OkStatus();
  }
  if (name == kScalar) {
    scalar_forced = true;
    return absl::OkStatus();
  }
  for (int64_t rest = all; rest != 0; rest &= rest - 1) {
    const int64_t target = LowestBit(rest);
    const std::string target_name = NameOf(target);
    if (target_name == name ||
        (name == kAvx512 && absl::StartsWith(target_name, "avx3"))) {
      hwy::SetSupportedTargetsForTest(target);
      scalar_forced = false;
      return absl::OkStatus();
    }
  }
  return SimdTargetError(name, absl::StrJoin(AvailableSimdTargets(), ", "));
}

std::string SimdTarget() {
  // Read before the override is: it decides what there is at all.
  const int64_t all = SimdTargets();
  const int64_t chosen = LowestBit(hwy::SupportedTargets() & all);
  return internal::UsesScalarKernels() || chosen == 0 ? std::string(kScalar)
                                                      : NameOf(chosen);
}

std::string CpuName() {
#if defined(__x86_64__)
  // 16 characters in each of three leaves.
  constexpr uint32_t kFirstLeaf = 0x80000002;
  uint32_t registers[3][4] = {};
  for (uint32_t i = 0; i < 3; ++i) {
    __get_cpuid(kFirstLeaf + i, &registers[i][0], &registers[i][1],
                &registers[i][2], &registers[i][3]);
  }
  std::string name(sizeof(registers), '\0');
  std::memcpy(name.data(), registers, sizeof(registers));
  name.resize(std::strlen(name.c_str()));
  absl::RemoveExtraAsciiWhitespace(&name);
  return name.empty() ? "x86-64" : absl::StrCat("x86-64, ", name);
#else
  // The kernel lets programs read what identifies the CPU, and says so.
  if ((getauxval(AT_HWCAP) & HWCAP_CPUID) == 0) return "aarch64";
  uint64_t id = 0;
  asm("mrs %0, MIDR_EL1" : "=r"(id));
  return absl::StrCat("aarch64, implementer 0x", absl::Hex(id >> 24 & 0xFF),
                      ", part 0x", absl::Hex(id >> 4 & 0xFFF));
#endif
}

}  // namespace quantd::core
