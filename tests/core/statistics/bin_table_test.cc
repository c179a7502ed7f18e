#include "core/statistics/bin_table.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"
#include "tests/core/statistics/naive_histogram.h"

namespace quantd::core {
namespace {

void ExpectDrains(BinTable* table, const NaiveHistogram& want) {
  const absl::Span<const PackedBin> bins = table->Drain();
  ASSERT_EQ(bins.size(), want.size());
  size_t i = 0;
  for (const auto& [key, bin] : want) {
    ASSERT_EQ(bins[i].key, key);
    ASSERT_EQ(bins[i].count, bin.count) << "key " << key;
    ASSERT_EQ(bins[i].low_sum, bin.low_sum) << "key " << key;
    ASSERT_TRUE(bin.low_square_sum == bins[i].low_square_sum) << "key " << key;
    ++i;
  }
  EXPECT_TRUE(table->empty());
  EXPECT_TRUE(table->Drain().empty());
}

TEST(BinTableTest, EqualsTheDefinitionForEveryLengthAndAlignment) {
  std::mt19937 random(1);
  std::vector<uint8_t> bytes(300 * 4 + 8);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  const uint32_t minus_zero = 0x80000000;
  std::memcpy(bytes.data() + 40, &minus_zero, 4);
  for (int m = kMinMantissaBits; m <= kMaxMantissaBits; ++m) {
    BinTable table(m);
    for (int64_t count = 0; count <= 300; count += count < 40 ? 1 : 13) {
      for (int offset = 0; offset < 4; ++offset) {
        NaiveHistogram want;
        for (int64_t i = 0; i < count; ++i) {
          NaiveAdd(NaiveReal(ElementType::kFloat32, bytes.data() + offset, i),
                   m, &want);
        }
        ForEachSimdTarget([&] {
          EXPECT_EQ(table.room(), BinTable::kCapacity);
          table.Add(bytes.data() + offset, count);
          EXPECT_EQ(table.room(), BinTable::kCapacity - count);
          ExpectDrains(&table, want);
        });
        if (HasFailure()) return;
      }
    }
  }
}

// Runs of one bin among others, of all lengths: they may go another way.
TEST(BinTableTest, EqualsTheDefinitionForRunsOfEqualBins) {
  std::mt19937 random(1);
  std::vector<float> x;
  for (int run = 0; run < 400; ++run) {
    const float values[] = {0.0f, -0.0f, -1.5f, 3.0f, NAN, 1e-40f};
    const float value = values[random() % std::size(values)];
    for (uint32_t length = random() % 200; length > 0; --length) {
      // Mostly the same bin with other low bits.
      x.push_back(value + static_cast<float>(random() % 4) * 1e-5f);
      if (value == 0) x.back() = value;
    }
  }
  const int64_t count = static_cast<int64_t>(x.size());
  for (const int m : {2, 7, 10}) {
    NaiveHistogram want;
    for (const float value : x) NaiveAdd(value, m, &want);
    ForEachSimdTarget([&] {
      BinTable table(m);
      table.Add(reinterpret_cast<const uint8_t*>(x.data()), count);
      ExpectDrains(&table, want);
    });
  }
}

TEST(BinTableTest, FindsABinThatOnlyARunTouched) {
  const std::vector<float> x(128, 0.3f);
  NaiveHistogram want;
  for (const float value : x) NaiveAdd(value, 7, &want);
  ForEachSimdTarget([&] {
    BinTable table(7);
    table.Add(reinterpret_cast<const uint8_t*>(x.data()), 128);
    ExpectDrains(&table, want);
  });
}

// As many elements as there is room for, with the largest low bits.
TEST(BinTableTest, HoldsItsCapacityInOneBin) {
  std::vector<uint8_t> bytes(BinTable::kCapacity * 4);
  const uint32_t bits = 0xBF9FFFFF;
  for (int64_t i = 0; i < BinTable::kCapacity; ++i) {
    std::memcpy(bytes.data() + i * 4, &bits, 4);
  }
  ForEachSimdTarget([&] {
    BinTable table(kMinMantissaBits);
    table.Add(bytes.data(), BinTable::kCapacity);
    const absl::Span<const PackedBin> bins = table.Drain();
    ASSERT_EQ(bins.size(), 1u);
    const uint64_t low = 0x1FFFFF;
    EXPECT_EQ(bins[0].count, BinTable::kCapacity);
    EXPECT_EQ(bins[0].low_sum, BinTable::kCapacity * low);
    EXPECT_EQ(bins[0].low_square_sum, BinTable::kCapacity * low * low);
  });
}

TEST(BinTableTest, LeasesAreApartAndEmpty) {
  const float x = 1;
  const uint8_t* in = reinterpret_cast<const uint8_t*>(&x);
  for (int round = 0; round < 2; ++round) {
    const BinTableLease a(7), b(7), c(3);
    EXPECT_NE(a.get(), b.get());
    EXPECT_EQ(c.get()->mantissa_bits(), 3);
    EXPECT_TRUE(a.get()->empty());
    a.get()->Add(in, 1);
    EXPECT_TRUE(b.get()->Drain().empty());
    EXPECT_EQ(a.get()->Drain().size(), 1u);
  }
}

TEST(BinTableTest, RoundsFloat64AndWidensTheOthersExactly) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  const double in[] = {0.1,      -1e300,    kLargest,          1.0 + 0x1p-24,
                       1e-50,    -INFINITY, 1.0 + 0x3p-24,     3.5e38,
                       INFINITY, -0x1p-150, kLargest * 1.00001};
  const float want[] = {0.1f,
                        -std::numeric_limits<float>::max(),
                        std::numeric_limits<float>::max(),
                        1.0f,
                        0.0f,
                        -INFINITY,
                        1.0f + 0x1p-22f,
                        std::numeric_limits<float>::max(),
                        INFINITY,
                        -0.0f,
                        std::numeric_limits<float>::max()};
  const auto all_types = MakeReals(ElementType::kFloat16, 1000, 0.1, true, 1);
  ForEachSimdTarget([&] {
    float out[std::size(want)];
    ToHistogramFloats(ElementType::kFloat64,
                      reinterpret_cast<const uint8_t*>(in), std::size(want),
                      out);
    for (size_t i = 0; i < std::size(want); ++i) EXPECT_EQ(out[i], want[i]);
    std::vector<float> wide(1000);
    ToHistogramFloats(ElementType::kFloat16, all_types.data(), 1000,
                      wide.data());
    for (int i = 0; i < 1000; ++i) {
      const double exact =
          NaiveReal(ElementType::kFloat16, all_types.data(), i);
      EXPECT_TRUE(wide[i] == exact || std::isnan(exact));
    }
  });
}

}  // namespace
}  // namespace quantd::core
