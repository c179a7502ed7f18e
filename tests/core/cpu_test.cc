#include "core/cpu.h"

#include <string>
#include <vector>

#include "core/errors.h"
#include "gtest/gtest.h"

namespace quantd::core {
namespace {

TEST(CpuTest, ListsScalarLastAndTheBestFirst) {
  const std::vector<std::string> targets = AvailableSimdTargets();
  ASSERT_FALSE(targets.empty());
  EXPECT_EQ(targets.back(), "scalar");
  ASSERT_TRUE(SetSimdTarget("auto").ok());
  EXPECT_EQ(SimdTarget(), targets.front());
}

TEST(CpuTest, TakesEveryTargetItLists) {
  const std::vector<std::string> targets = AvailableSimdTargets();
  for (const std::string& target : targets) {
    ASSERT_TRUE(SetSimdTarget(target).ok()) << target;
    EXPECT_EQ(SimdTarget(), target);
    // What there is does not depend on what is in use.
    EXPECT_EQ(AvailableSimdTargets(), targets);
  }
  for (const char* automatic : {"auto", ""}) {
    ASSERT_TRUE(SetSimdTarget("scalar").ok());
    ASSERT_TRUE(SetSimdTarget(automatic).ok());
    EXPECT_EQ(SimdTarget(), targets.front());
  }
}

TEST(CpuTest, TakesAvx512AsAnotherNameOfTheBestAvx3) {
  const std::string best = AvailableSimdTargets().front();
  if (best.rfind("avx3", 0) != 0) {
    EXPECT_FALSE(SetSimdTarget("avx512").ok());
    return;
  }
  ASSERT_TRUE(SetSimdTarget("scalar").ok());
  ASSERT_TRUE(SetSimdTarget("avx512").ok());
  EXPECT_EQ(SimdTarget(), best);
  ASSERT_TRUE(SetSimdTarget("auto").ok());
}

TEST(CpuTest, RefusesAnUnknownTargetAndNamesTheOthers) {
  ASSERT_TRUE(SetSimdTarget("scalar").ok());
  const absl::Status status = SetSimdTarget("avx9");
  EXPECT_EQ(ErrorReason(status), "SIMD_TARGET");
  EXPECT_NE(status.message().find("scalar"), absl::string_view::npos);
  EXPECT_EQ(SimdTarget(), "scalar");
  ASSERT_TRUE(SetSimdTarget("auto").ok());
}

TEST(CpuTest, NamesTheCpuInPrintableText) {
  const std::string name = CpuName();
#if defined(__x86_64__)
  EXPECT_EQ(name.rfind("x86-64", 0), 0) << name;
#else
  EXPECT_EQ(name.rfind("aarch64", 0), 0) << name;
#endif
  for (const char c : name) EXPECT_TRUE(c >= ' ' && c <= '~') << name;
}

}  // namespace
}  // namespace quantd::core
