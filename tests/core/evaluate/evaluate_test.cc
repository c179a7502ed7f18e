#include "core/evaluate/evaluate.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core {
namespace {

// To the last bit.
void ExpectSame(const ErrorSums& got, const ErrorSums& want) {
  EXPECT_EQ(got.count, want.count);
  EXPECT_EQ(got.non_finite, want.non_finite);
  EXPECT_EQ(got.clipped_low, want.clipped_low);
  EXPECT_EQ(got.clipped_high, want.clipped_high);
  EXPECT_EQ(got.zero_flushed, want.zero_flushed);
  EXPECT_EQ(got.squared_error, want.squared_error);
  EXPECT_EQ(got.absolute_error, want.absolute_error);
  EXPECT_EQ(got.relative_error, want.relative_error);
  EXPECT_EQ(got.signal, want.signal);
  EXPECT_EQ(got.reconstructed, want.reconstructed);
  EXPECT_EQ(got.product, want.product);
  EXPECT_EQ(got.max_absolute_error, want.max_absolute_error);
  EXPECT_EQ(got.max_relative_error, want.max_relative_error);
}

// Sums of one leaf or portion: element k in lane k mod 16, then the tree.
class NaiveLanes {
 public:
  void Add(int64_t k, ElementType type, double x, float scale,
           int32_t zero_point, const Encoding& encoding) {
    if (!std::isfinite(x)) {
      ++sums_.non_finite;
      return;
    }
    const int32_t code =
        NaiveCode(type, x, scale, zero_point, encoding.qmin, encoding.qmax);
    const double unclamped =
        NaiveRound(NaiveQuotient(type, x, scale)) + double{1} * zero_point;
    ++sums_.count;
    sums_.clipped_low += unclamped < encoding.qmin;
    sums_.clipped_high += unclamped > encoding.qmax;
    double restored;
    if (type == ElementType::kFloat64) {
      restored = (code - zero_point) * double{scale};
    } else {
      restored = static_cast<float>(code - zero_point) * scale;
    }
    sums_.zero_flushed += x != 0 && restored == 0;
    const double error = restored - x;
    const double relative = x == 0 ? 0 : std::fabs(error / x);
    const double terms[6] = {error * error, std::fabs(error),    relative,
                             x * x,         restored * restored, x * restored};
    for (int t = 0; t < 6; ++t) lanes_[t][k % 16] += terms[t];
    sums_.max_absolute_error =
        std::max(sums_.max_absolute_error, std::fabs(error));
    sums_.max_relative_error = std::max(sums_.max_relative_error, relative);
  }

  ErrorSums Total() {
    double* totals[6] = {&sums_.squared_error,  &sums_.absolute_error,
                         &sums_.relative_error, &sums_.signal,
                         &sums_.reconstructed,  &sums_.product};
    for (int t = 0; t < 6; ++t) {
      const double* l = lanes_[t];
      double pair[8], quad[4];
      for (int i = 0; i < 8; ++i) pair[i] = l[i] + l[i + 8];
      for (int i = 0; i < 4; ++i) quad[i] = pair[i] + pair[i + 4];
      *totals[t] = (quad[0] + quad[2]) + (quad[1] + quad[3]);
    }
    return sums_;
  }

 private:
  ErrorSums sums_;
  double lanes_[6][16] = {};
};

void AddNaive(const ErrorSums& part, ErrorSums* sums) {
  sums->count += part.count;
  sums->non_finite += part.non_finite;
  sums->clipped_low += part.clipped_low;
  sums->clipped_high += part.clipped_high;
  sums->zero_flushed += part.zero_flushed;
  sums->squared_error += part.squared_error;
  sums->absolute_error += part.absolute_error;
  sums->relative_error += part.relative_error;
  sums->signal += part.signal;
  sums->reconstructed += part.reconstructed;
  sums->product += part.product;
  sums->max_absolute_error =
      std::max(sums->max_absolute_error, part.max_absolute_error);
  sums->max_relative_error =
      std::max(sums->max_relative_error, part.max_relative_error);
}

struct Expected {
  ErrorSums overall;
  std::vector<ErrorSums> per_scale_index;
};

// By the words of the header. A portion ends where the scale index changes, or
// the leaf, or, where scale indices step, with each element.
Expected Naive(const LayoutCase& layout_case, const Encoding& encoding,
               ElementType type, const std::vector<uint8_t>& reals) {
  const BlockLayout layout = layout_case.Layout();
  Expected expected;
  expected.per_scale_index.resize(layout.scale_count());
  NaiveLanes leaf;
  NaiveLanes portion;
  int64_t portion_first = 0;
  for (int64_t i = 0; i < layout.element_count(); ++i) {
    const int64_t scale_index = NaiveScaleIndex(layout_case, i);
    const double x = NaiveReal(type, reals.data(), i);
    const int32_t zero_point =
        encoding.zero_point.empty() ? 0 : encoding.zero_point[scale_index];
    leaf.Add(i % 1024, type, x, encoding.scale[scale_index], zero_point,
             encoding);
    portion.Add(i - portion_first, type, x, encoding.scale[scale_index],
                zero_point, encoding);
    const bool is_last = i + 1 == layout.element_count();
    const bool ends_leaf = is_last || (i + 1) % 1024 == 0;
    if (ends_leaf) {
      AddNaive(leaf.Total(), &expected.overall);
      leaf = NaiveLanes();
    }
    if (ends_leaf || NaiveScaleIndex(layout_case, i + 1) != scale_index) {
      AddNaive(portion.Total(), &expected.per_scale_index[scale_index]);
      portion = NaiveLanes();
      portion_first = i + 1;
    }
  }
  return expected;
}

TEST(EvaluateTest, EqualsTheDefinitionToTheLastBit) {
  for (const LayoutCase& layout_case : AllLayoutCases()) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    for (const char* name : {"int2", "int4", "uint8", "int8", "int16"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      for (const ElementType type : kAllElementTypes) {
        SCOPED_TRACE(ElementTypeName(type));
        const Encoding encoding =
            MakeEncoding(format, layout, 0.05, name[0] == 'u', 3);
        auto reals = MakeReals(type, layout.element_count(), 0.05, true, 13);
        // 1e300 squared is beyond float64: its sums are compared elsewhere.
        for (int64_t i = 0; i < layout.element_count(); ++i) {
          if (NaiveReal(type, reals.data(), i) == 1e300) {
            StoreReal(type, 1, reals.data(), i);
          }
        }
        const Expected want = Naive(layout_case, encoding, type, reals);
        ForEachSimdTarget([&] {
          for (const bool per_scale_index : {false, true}) {
            Evaluator evaluator(encoding, layout, type, per_scale_index);
            evaluator.Update(0, layout.element_count(), reals.data(), nullptr);
            ExpectSame(evaluator.overall(), want.overall);
            ASSERT_EQ(evaluator.per_scale_index().size(),
                      per_scale_index ? want.per_scale_index.size() : 0);
            for (size_t i = 0; i < evaluator.per_scale_index().size(); ++i) {
              ExpectSame(evaluator.per_scale_index()[i],
                         want.per_scale_index[i]);
            }
          }
        });
        if (HasFailure()) return;
      }
    }
  }
}

TEST(EvaluateTest, DoesNotDependOnThreadsOrChunking) {
  const LayoutCase cases[] = {
      {{600007}, {}}, {{300, 1001}, {0, 1}}, {{300, 1001}, {1, 32}}};
  ThreadPool pool(2);
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    const Encoding encoding =
        MakeEncoding(*FindFormatByName("int8"), layout, 0.05, true, 3);
    const auto reals = MakeReals(ElementType::kFloat32, count, 0.05, true, 1);
    const Expected want =
        Naive(layout_case, encoding, ElementType::kFloat32, reals);
    for (ThreadPool* p : {static_cast<ThreadPool*>(nullptr), &pool}) {
      for (const int64_t chunk : {count, int64_t{1024}, int64_t{77 * 1024}}) {
        Evaluator evaluator(encoding, layout, ElementType::kFloat32, true);
        for (int64_t first = 0; first < count; first += chunk) {
          evaluator.Update(first, std::min(chunk, count - first),
                           reals.data() + first * 4, p);
        }
        ExpectSame(evaluator.overall(), want.overall);
        for (size_t i = 0; i < want.per_scale_index.size(); ++i) {
          ExpectSame(evaluator.per_scale_index()[i], want.per_scale_index[i]);
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST(EvaluateTest, MeansAndRatiosFollowFromTheSums) {
  ErrorSums sums;
  sums.count = 4;
  sums.squared_error = 0.04;
  sums.absolute_error = 0.4;
  sums.relative_error = 0.2;
  sums.signal = 4;
  sums.reconstructed = 9;
  sums.product = 3;
  EXPECT_DOUBLE_EQ(sums.MeanSquaredError(), 0.01);
  EXPECT_DOUBLE_EQ(sums.MeanAbsoluteError(), 0.1);
  EXPECT_DOUBLE_EQ(sums.MeanRelativeError(), 0.05);
  EXPECT_DOUBLE_EQ(sums.SqnrDb(), 20);
  EXPECT_DOUBLE_EQ(sums.CosineSimilarity(), 0.5);
}

TEST(EvaluateTest, RatiosOfNothingAreDefined) {
  ErrorSums sums;
  EXPECT_EQ(sums.MeanSquaredError(), 0);
  EXPECT_EQ(sums.MeanAbsoluteError(), 0);
  EXPECT_EQ(sums.MeanRelativeError(), 0);
  EXPECT_EQ(sums.SqnrDb(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(sums.CosineSimilarity(), 1);
  sums.signal = 1;
  EXPECT_EQ(sums.CosineSimilarity(), 0);
}

}  // namespace
}  // namespace quantd::core
