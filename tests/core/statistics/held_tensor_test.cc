#include "core/statistics/held_tensor.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/statistics/tensor_statistics.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core {
namespace {

std::vector<uint8_t> Reals(ElementType type, int64_t count) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0, 1);
  std::vector<uint8_t> reals(
      static_cast<size_t>(count * ElementSizeBytes(type)));
  const double special[] = {NAN, INFINITY, -INFINITY, 0.0, -0.0, 1e-44, 1e300};
  for (int64_t i = 0; i < count; ++i) {
    const double x =
        random() % 50 == 0 ? special[random() % 7] : normal(random);
    StoreReal(type, x, reals.data(), i);
  }
  return reals;
}

void ExpectSameHistograms(const LayoutCase& layout_case, ElementType type,
                          int64_t piece_elements, int mantissa_bits) {
  const BlockLayout layout = layout_case.Layout();
  const int64_t count = layout.element_count();
  const std::vector<uint8_t> reals = Reals(type, count);
  TensorStatistics statistics(layout.scale_count(), mantissa_bits);
  statistics.Update(layout, type, 0, count, reals.data(), nullptr);
  // Each piece in memory of its own, so that nothing is read past its end.
  const int64_t piece_bytes = piece_elements * ElementSizeBytes(type);
  std::vector<std::vector<uint8_t>> pieces;
  std::vector<const uint8_t*> pointers;
  for (size_t i = 0; i < reals.size(); i += static_cast<size_t>(piece_bytes)) {
    pieces.emplace_back(
        reals.begin() + static_cast<int64_t>(i),
        reals.begin() + std::min(static_cast<int64_t>(i) + piece_bytes,
                                 static_cast<int64_t>(reals.size())));
  }
  for (const auto& piece : pieces) pointers.push_back(piece.data());
  const HeldTensor held(layout, type, piece_elements, pointers);
  for (int64_t i = 0; i < layout.scale_count(); ++i) {
    ASSERT_TRUE(held.HistogramOf(i, mantissa_bits) ==
                statistics.histograms()[static_cast<size_t>(i)])
        << i;
  }
}

TEST(HeldTensorTest, MakesTheHistogramsOfStatistics) {
  for (const LayoutCase& layout_case : AllLayoutCases()) {
    SCOPED_TRACE(layout_case.Name());
    for (const ElementType type : kAllElementTypes) {
      for (const int64_t piece_elements : {1, 7, 64, 1 << 18}) {
        ExpectSameHistograms(layout_case, type, piece_elements, 7);
      }
      ExpectSameHistograms(layout_case, type, 100, 2);
    }
    if (HasFatalFailure()) return;
  }
}

TEST(HeldTensorTest, MakesTheSameOnEverySimdTarget) {
  ForEachSimdTarget([] {
    for (const ElementType type : kAllElementTypes) {
      ExpectSameHistograms({{3, 9000}, {1, 0}}, type, 4096, 7);
      ExpectSameHistograms({{3000, 5}, {0, 1}}, type, 1000, 10);
    }
  });
}

}  // namespace
}  // namespace quantd::core
