#include "core/statistics/feature_moments.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "core/statistics/histogram.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::feature_moments_test {
namespace {

using ::testing::HasSubstr;

// A sum of integers that counts how often each bit is set.
class BitSum {
 public:
  void Add(int64_t sign, uint64_t integer, int shift) {
    for (int bit = 0; bit < 64; ++bit) {
      if (integer >> bit & 1) bits_[bit + shift] += sign;
    }
  }
  // Two's complement.
  std::vector<bool> Bits() const {
    std::vector<bool> bits;
    int64_t carry = 0;
    for (const int64_t bit : bits_) {
      carry += bit;
      bits.push_back(carry & 1);
      carry >>= 1;
    }
    return bits;
  }

 private:
  std::vector<int64_t> bits_ = std::vector<int64_t>(700);
};

struct NaiveMoments {
  int64_t count = 0;
  int64_t left_out = 0;
  BitSum sum;
  BitSum square_sum;
};

std::vector<NaiveMoments> Naive(const FeatureAxis& axis, ElementType type,
                                int64_t count,
                                const std::vector<uint8_t>& reals) {
  std::vector<NaiveMoments> features(axis.count);
  for (int64_t i = 0; i < count; ++i) {
    NaiveMoments& feature = features[i / axis.inner % axis.count];
    const double real = NaiveReal(type, reals.data(), i);
    if (!std::isfinite(real)) {
      ++feature.left_out;
      continue;
    }
    ++feature.count;
    constexpr double kLargest = std::numeric_limits<float>::max();
    const double x =
        static_cast<float>(std::min(std::max(real, -kLargest), kLargest));
    if (x == 0) continue;
    int exponent;
    const double fraction = std::frexp(std::fabs(x), &exponent);
    // Every float32 is a multiple of 2^-149.
    const int shift = std::max(exponent + 125, 0);
    const auto integer =
        static_cast<uint64_t>(std::ldexp(fraction, exponent + 149 - shift));
    feature.sum.Add(x < 0 ? -1 : 1, integer, shift);
    feature.square_sum.Add(1, integer * integer, 2 * shift);
  }
  return features;
}

void ExpectSums(const ExactSums& got, int unit,
                const std::vector<std::vector<bool>>& want) {
  // The lowest bit that is set, and the highest that is not the sign.
  int lowest = 1000;
  int highest = -1;
  for (const std::vector<bool>& bits : want) {
    for (int bit = 0; bit < 700; ++bit) {
      if (bits[bit]) lowest = std::min(lowest, bit);
      if (bits[bit] != bits[699]) highest = std::max(highest, bit);
    }
  }
  if (lowest == 1000) {
    EXPECT_EQ(got.exponent, 0);
    EXPECT_EQ(got.width, 0);
    EXPECT_TRUE(got.integers.empty());
    return;
  }
  ASSERT_EQ(got.exponent, unit + lowest);
  const int width = (std::max(highest, lowest - 1) + 2 - lowest + 7) / 8;
  ASSERT_EQ(got.width, width);
  ASSERT_EQ(got.integers.size(), want.size() * width);
  for (size_t i = 0; i < want.size(); ++i) {
    for (int bit = 0; bit < 8 * width; ++bit) {
      ASSERT_EQ((got.integers[i * width + bit / 8] >> bit % 8 & 1) != 0,
                want[i][std::min(lowest + bit, 699)])
          << "feature " << i << ", bit " << bit;
    }
  }
}

void ExpectMoments(const FeatureMoments& got,
                   const std::vector<NaiveMoments>& want) {
  const FeatureMoments::Parts parts = got.ToParts();
  std::vector<std::vector<bool>> sums;
  std::vector<std::vector<bool>> square_sums;
  ASSERT_EQ(parts.count.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(parts.count[i], want[i].count) << i;
    ASSERT_EQ(parts.left_out[i], want[i].left_out) << i;
    sums.push_back(want[i].sum.Bits());
    square_sums.push_back(want[i].square_sum.Bits());
  }
  ExpectSums(parts.sum, -149, sums);
  ExpectSums(parts.square_sum, -298, square_sums);
}

void ExpectSame(const FeatureMoments& got, const FeatureMoments& want) {
  const FeatureMoments::Parts a = got.ToParts();
  const FeatureMoments::Parts b = want.ToParts();
  ASSERT_EQ(a.count, b.count);
  ASSERT_EQ(a.left_out, b.left_out);
  ASSERT_EQ(a.sum.exponent, b.sum.exponent);
  ASSERT_EQ(a.sum.width, b.sum.width);
  ASSERT_EQ(a.sum.integers, b.sum.integers);
  ASSERT_EQ(a.square_sum.exponent, b.square_sum.exponent);
  ASSERT_EQ(a.square_sum.width, b.square_sum.width);
  ASSERT_EQ(a.square_sum.integers, b.square_sum.integers);
}

struct AxisCase {
  std::vector<int64_t> shape;
  int64_t axis;
};

const std::vector<AxisCase>& AxisCases() {
  static const auto& cases = *new std::vector<AxisCase>{
      {{700}, 0},          {{300, 1}, 1},        {{3, 0, 2}, 0},
      {{7, 33}, 1},        {{600, 16}, 1},       {{530, 37}, -1},
      {{40, 37}, 0},       {{5, 7, 9}, 1},       {{3, 4, 300}, 1},
      {{2, 3, 17, 16}, 1}, {{3, 2, 5, 700}, -1}, {{270, 3, 2}, -2}};
  return cases;
}

int64_t Elements(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1},
                         std::multiplies<>());
}

enum class Kind { kNormal, kSpecial, kWide, kBits, kMixed };

std::vector<uint8_t> Make(Kind kind, ElementType type, int64_t count,
                          uint32_t seed) {
  if (kind == Kind::kNormal || kind == Kind::kSpecial) {
    return MakeReals(type, count, 0.1, kind == Kind::kSpecial, seed);
  }
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<uint8_t> reals(count * ElementSizeBytes(type));
  if (kind == Kind::kBits) {
    for (uint8_t& byte : reals) byte = static_cast<uint8_t>(random());
    return reals;
  }
  for (int64_t i = 0; i < count; ++i) {
    // Most in a window, few beside it: or all over.
    const int exponent =
        kind == Kind::kWide  ? static_cast<int>(random() % 60) - 40
        : random() % 64 == 0 ? static_cast<int>(random() % 90) - 60
                             : 0;
    StoreReal(type, std::ldexp(normal(random), exponent), reals.data(), i);
  }
  return reals;
}

constexpr Kind kAllKinds[] = {Kind::kNormal, Kind::kSpecial, Kind::kWide,
                              Kind::kBits, Kind::kMixed};

TEST(FeatureMomentsTest, AreExactForEveryTypeAxisAndTarget) {
  for (const AxisCase& axis_case : AxisCases()) {
    SCOPED_TRACE(absl::StrCat("shape [", absl::StrJoin(axis_case.shape, ","),
                              "] axis ", axis_case.axis));
    const FeatureAxis axis =
        *FeatureAxis::Create(axis_case.shape, axis_case.axis);
    const int64_t count = Elements(axis_case.shape);
    for (const ElementType type : kAllElementTypes) {
      SCOPED_TRACE(ElementTypeName(type));
      for (const Kind kind : kAllKinds) {
        SCOPED_TRACE(static_cast<int>(kind));
        const auto reals = Make(kind, type, count, 7);
        const auto want = Naive(axis, type, count, reals);
        ForEachSimdTarget([&] {
          FeatureMoments got(axis.count);
          got.Update(axis, type, 0, count, reals.data(), nullptr);
          ExpectMoments(got, want);
        });
        if (HasFailure()) return;
      }
    }
  }
}

TEST(FeatureMomentsTest, DoNotDependOnThreadsChunkingOrOrder) {
  ThreadPool pool(2);
  for (const AxisCase& axis_case :
       {AxisCase{{301, 1101}, 1}, AxisCase{{3, 211, 501}, 1}}) {
    SCOPED_TRACE(axis_case.shape.size());
    const FeatureAxis axis =
        *FeatureAxis::Create(axis_case.shape, axis_case.axis);
    const int64_t count = Elements(axis_case.shape);
    for (const Kind kind : {Kind::kSpecial, Kind::kMixed}) {
      for (const ElementType type :
           {ElementType::kFloat32, ElementType::kFloat64}) {
        const auto reals = Make(kind, type, count, 11);
        FeatureMoments want(axis.count);
        want.Update(axis, type, 0, count, reals.data(), nullptr);
        FeatureMoments threads(axis.count);
        threads.Update(axis, type, 0, count, reals.data(), &pool);
        ExpectSame(threads, want);
        std::mt19937 random(5);
        struct Chunk {
          int64_t first;
          int64_t count;
        };
        std::vector<Chunk> chunks;
        for (int64_t first = 0; first < count;) {
          const int64_t size =
              std::min<int64_t>(count - first, 1 + random() % 70001);
          chunks.push_back({first, size});
          first += size;
        }
        std::shuffle(chunks.begin(), chunks.end(), random);
        // Of two sources, which are merged.
        FeatureMoments sources[] = {FeatureMoments(axis.count),
                                    FeatureMoments(axis.count)};
        for (const Chunk& chunk : chunks) {
          sources[random() % 2].Update(
              axis, type, chunk.first, chunk.count,
              reals.data() + chunk.first * ElementSizeBytes(type),
              chunk.first % 2 ? &pool : nullptr);
        }
        FeatureMoments merged(axis.count);
        merged.Merge(sources[1]);
        merged.Merge(sources[0]);
        ExpectSame(merged, want);
        // What is merged goes on.
        sources[0].Merge(sources[1]);
        sources[0].Update(axis, type, 0, count, reals.data(), nullptr);
        want.Merge(want);
        ExpectSame(sources[0], want);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(FeatureMomentsTest, SlicesAddToTheWhole) {
  const FeatureAxis axis{9, 1};
  const auto reals = MakeReals(ElementType::kFloat64, 9 * 50, 0.1, true, 7);
  FeatureMoments whole(9);
  whole.Update(axis, ElementType::kFloat64, 0, 9 * 50, reals.data(), nullptr);
  FeatureMoments merged(9);
  for (const int64_t first : {5, 0}) {
    const int64_t width = first == 0 ? 5 : 4;
    FeatureMoments part(width);
    for (int64_t row = 0; row < 50; ++row) {
      part.Update({width, 1}, ElementType::kFloat64, row * width, width,
                  reals.data() + (row * 9 + first) * sizeof(double), nullptr);
    }
    merged.Merge(part, first);
  }
  ExpectSame(merged, whole);
}

TEST(FeatureMomentsTest, AddUpToTheSumsOfHistograms) {
  ForEachSimdTarget([] {
    for (const ElementType type : kAllElementTypes) {
      for (const int bits : {2, 3, 10}) {
        const int64_t count = 11 * 300;
        const auto reals = MakeReals(type, count, 0.1, true, 9);
        const BlockLayout layout = *BlockLayout::Create({300, 11}, {100, 0});
        TensorStatistics statistics(3, bits);
        statistics.Update(layout, type, 0, count, reals.data(), nullptr);
        FeatureMoments moments(11);
        moments.Update({11, 1}, type, 0, count, reals.data(), nullptr);
        EXPECT_TRUE(moments.AddUpTo(statistics.histograms()));
        // The smallest number there is.
        std::vector<Histogram> more(statistics.histograms().begin(),
                                    statistics.histograms().end());
        const float tiny = -std::numeric_limits<float>::denorm_min();
        more[1].Add(&tiny, 1);
        EXPECT_FALSE(moments.AddUpTo(more));
      }
    }
  });
}

TEST(FeatureMomentsTest, TakeUnalignedData) {
  const FeatureAxis axis{37, 1};
  const int64_t count = 37 * 19;
  const auto reals = Make(Kind::kNormal, ElementType::kFloat32, count, 3);
  FeatureMoments want(axis.count);
  want.Update(axis, ElementType::kFloat32, 0, count, reals.data(), nullptr);
  std::vector<uint8_t> moved(reals.size() + 1);
  std::memcpy(moved.data() + 1, reals.data(), reals.size());
  FeatureMoments got(axis.count);
  got.Update(axis, ElementType::kFloat32, 0, count, moved.data() + 1, nullptr);
  ExpectSame(got, want);
}

// What Python's fractions say.
TEST(FeatureMomentsTest, RoundOnce) {
  const auto moments = [](const std::vector<float>& x) {
    FeatureMoments moments(1);
    moments.Update({1, 1}, ElementType::kFloat32, 0,
                   static_cast<int64_t>(x.size()),
                   reinterpret_cast<const uint8_t*>(x.data()), nullptr);
    return moments;
  };
  constexpr float kLargest = std::numeric_limits<float>::max();
  constexpr float kSmallest = 0x1p-149f;
  // A double would lose the small one, twice.
  const FeatureMoments lost = moments({kLargest, kSmallest, -kLargest});
  EXPECT_EQ(lost.sum(0), 0x1p-149);
  EXPECT_EQ(lost.square_sum(0), 2.0 * kLargest * kLargest);
  // 2^53 + 1 is a tie, which goes to even; a bit far below breaks it.
  EXPECT_EQ(moments({0x1p53f, 1.0f}).sum(0), 0x1p53);
  EXPECT_EQ(moments({0x1p53f, 1.0f, kSmallest}).sum(0), 0x1p53 + 2);
  EXPECT_EQ(moments({-0x1p53f, -1.0f, -kSmallest}).sum(0), -0x1p53 - 2);
  EXPECT_EQ(moments({0x1p53f, 1.0f, -kSmallest}).sum(0), 0x1p53);
  EXPECT_EQ(moments({kSmallest}).square_sum(0), 0x1p-298);
  EXPECT_EQ(moments({}).sum(0), 0);
}

TEST(FeatureMomentsTest, ComeBackFromTheirParts) {
  for (const Kind kind : kAllKinds) {
    const FeatureAxis axis{37, 1};
    const int64_t count = 37 * 90;
    const auto reals = Make(kind, ElementType::kFloat32, count, 9);
    FeatureMoments want(axis.count);
    want.Update(axis, ElementType::kFloat32, 0, count, reals.data(), nullptr);
    auto got = FeatureMoments::FromParts(want.ToParts());
    ASSERT_TRUE(got.ok()) << got.status();
    ExpectSame(*got, want);
    // They go on as if nothing had been.
    got->Update(axis, ElementType::kFloat32, 0, count, reals.data(), nullptr);
    want.Update(axis, ElementType::kFloat32, 0, count, reals.data(), nullptr);
    ExpectSame(*got, want);
  }
  const auto empty = FeatureMoments::FromParts(FeatureMoments(0).ToParts());
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ(empty->feature_count(), 0);
}

TEST(FeatureMomentsTest, RefusePartsThatContradictThemselves) {
  const FeatureAxis axis{4, 1};
  const auto reals = Make(Kind::kNormal, ElementType::kFloat32, 40, 9);
  FeatureMoments moments(axis.count);
  moments.Update(axis, ElementType::kFloat32, 0, 40, reals.data(), nullptr);
  const FeatureMoments::Parts good = moments.ToParts();
  ASSERT_TRUE(FeatureMoments::FromParts(good).ok());
  const auto expect_refused = [&](const char* what, auto change) {
    FeatureMoments::Parts parts = good;
    change(parts);
    const absl::Status status = FeatureMoments::FromParts(parts).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("STATISTICS_INVALID"));
    EXPECT_THAT(status.message(), HasSubstr(what));
  };
  using Parts = FeatureMoments::Parts;
  expect_refused("counts", [](Parts& p) { p.left_out.pop_back(); });
  expect_refused("at least 0", [](Parts& p) { p.count[1] = -1; });
  expect_refused("at most", [](Parts& p) { p.left_out[1] = int64_t{1} << 62; });
  expect_refused("which no", [](Parts& p) { p.count[2] = 0; });
  expect_refused("bytes", [](Parts& p) { p.sum.integers.pop_back(); });
  expect_refused("bytes", [](Parts& p) { p.sum.width = -1; });
  expect_refused("bytes", [](Parts& p) {
    p.sum.width = 1 << 20;
    p.sum.integers.resize(4 << 20);
  });
  expect_refused("exponent", [](Parts& p) { p.sum.exponent = -150; });
  expect_refused("exponent", [](Parts& p) {
    p.square_sum.exponent = std::numeric_limits<int>::max();
  });
  expect_refused("beyond", [](Parts& p) { p.sum.exponent = 180; });
  // The sum is too large for the sum of squares.
  expect_refused("which no", [](Parts& p) { p.sum.exponent += 8; });
  expect_refused("which no", [](Parts& p) {
    p.square_sum.integers[p.square_sum.width - 1] |= 0x80;
  });
  expect_refused("which no", [](Parts& p) { p.square_sum = {}; });
  // The same sums in another form.
  expect_refused("one form", [](Parts& p) {
    const int width = p.square_sum.width;
    std::vector<uint8_t> wide;
    for (size_t i = 0; i < p.square_sum.integers.size(); ++i) {
      wide.push_back(p.square_sum.integers[i]);
      if (static_cast<int>(i) % width == width - 1) wide.push_back(0);
    }
    p.square_sum.integers = wide;
    ++p.square_sum.width;
  });
}

TEST(FeatureMomentsTest, KnowTheAxes) {
  const FeatureAxis middle = *FeatureAxis::Create({2, 3, 4, 5}, 1);
  EXPECT_EQ(middle.count, 3);
  EXPECT_EQ(middle.inner, 20);
  const FeatureAxis last = *FeatureAxis::Create({2, 3, 4, 5}, -1);
  EXPECT_EQ(last.count, 5);
  EXPECT_EQ(last.inner, 1);
  for (const int64_t axis :
       {int64_t{4}, int64_t{-5}, std::numeric_limits<int64_t>::min(),
        std::numeric_limits<int64_t>::max()}) {
    EXPECT_THAT(FeatureAxis::Create({2, 3, 4, 5}, axis).status().message(),
                HasSubstr("AXIS_UNKNOWN"));
  }
  EXPECT_FALSE(FeatureAxis::Create({}, 0).ok());
  EXPECT_FALSE(FeatureAxis::Create({-1}, 0).ok());
}

}  // namespace
}  // namespace quantd::core::feature_moments_test
