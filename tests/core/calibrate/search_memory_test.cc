// What a search of long blocks holds, beside what its caller was told.

#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/calibrate.h"
#include "core/cpu.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/held_tensor.h"
#include "core/statistics/tensor_statistics.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"
#include "tests/support/heap_bytes.h"

namespace quantd::core::search_memory_test {
namespace {

constexpr int64_t kRows = 3;
constexpr auto kPercentile = CalibrationMethod::kPercentile;
constexpr auto kEntropy = CalibrationMethod::kEntropy;
constexpr auto kMse = CalibrationMethod::kMse;

EncodingSpec Spec(const std::vector<CalibrationMethod>& methods,
                  std::vector<int64_t> block_size) {
  EncodingSpec spec;
  spec.format = FindFormatByName("int8")->format;
  spec.method = methods.size() == 1 ? methods[0] : CalibrationMethod::kBestOf;
  if (methods.size() > 1) spec.methods = methods;
  // Not among those that are kept in order.
  spec.tail_fraction = 0.01f;
  spec.search_steps = 16;
  spec.block_size = std::move(block_size);
  return spec;
}

// Blocks of which the first has elements that are left out, and the second has
// magnitudes that float32 is too coarse for.
std::vector<uint8_t> MakeBlocks(ElementType type, const BlockLayout& layout) {
  std::vector<uint8_t> reals(
      static_cast<size_t>(layout.element_count() * ElementSizeBytes(type)));
  std::mt19937 random(5);
  std::normal_distribution<double> normal(0, 1);
  layout.ForEachRun(
      0, layout.element_count(), [&](const BlockLayout::Run& run) {
        for (int64_t k = 0; k < run.count; ++k) {
          const int64_t block = run.scale_index + k * run.scale_step;
          double x = normal(random);
          if (block == 0 && random() % 3 == 0) {
            x = std::numeric_limits<double>::infinity();
          }
          if (block == 1) x *= 1e-20;
          StoreReal(type, x, reals.data(), run.begin + k);
        }
      });
  return reals;
}

// What `work` holds at most beside what was there.
template <typename Work>
int64_t HeldBy(const Work& work) {
  // Tables that are made once.
  work();
  const int64_t before = testing::live_bytes;
  testing::peak_bytes = before;
  work();
  return testing::peak_bytes - before;
}

TEST(SearchMemoryTest, IsWhatWasTold) {
  constexpr int64_t kFixedBytes = 400 << 10;
  const std::vector<std::vector<CalibrationMethod>> all_methods = {
      {kPercentile}, {kEntropy}, {kMse}, {kPercentile, kEntropy, kMse}};
  for (const char* target : {"auto", "scalar"}) {
    ASSERT_TRUE(SetSimdTarget(target).ok());
    for (const int64_t size : {kMaxDirectElements - 1, kMaxDirectElements}) {
      for (const ElementType type :
           {ElementType::kFloat64, ElementType::kFloat32}) {
        for (const auto& methods : all_methods) {
          SCOPED_TRACE(absl::StrCat(
              target, " ", size, " ", ElementTypeName(type), " ",
              static_cast<int>(methods[0]), " of ", methods.size()));
          const std::vector<int64_t> shape = {kRows, size};
          const EncodingSpec spec = *ResolveSpec(Spec(methods, {1, 0}), shape);
          const BlockLayout layout =
              *BlockLayout::Create(shape, spec.block_size);
          const auto reals = MakeBlocks(type, layout);
          TensorStatistics statistics(layout.scale_count());
          statistics.Update(layout, type, 0, layout.element_count(),
                            reals.data(), nullptr);
          const HeldTensor held(layout, type, layout.element_count(),
                                {reals.data()});
          const int64_t told = BlockElements::MemoryBytes(spec, size);
          const int64_t held_bytes = HeldBy([&] {
            EXPECT_TRUE(Calibrate(spec, layout, statistics, {}, nullptr,
                                  StopToken(), &held)
                            .ok());
          });
          EXPECT_LE(held_bytes, told + kFixedBytes);
          // Nor much more than is needed.
          EXPECT_GT(held_bytes, told / 3);
        }
      }
    }
  }
  ASSERT_TRUE(SetSimdTarget("auto").ok());
}

}  // namespace
}  // namespace quantd::core::search_memory_test
