#include "core/evaluate/evaluate.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "core/dequantize/dequantize.h"
#include "core/formats/codec.h"
#include "core/quantize/quantize.h"
#include "gtest/gtest.h"
#include "tests/core/evaluate/evaluate_test_util.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::evaluate_test {
namespace {

// What codes other than integers stand for, in ascending order: the codes of
// their magnitudes, or the entries.
class NaiveValues {
 public:
  explicit NaiveValues(const Encoding& encoding)
      : format_(*FindFormat(encoding.format)),
        saturates_(!encoding.no_saturation) {
    if (format_.kind == CodeKind::kCodebook) {
      for (const float entry : CodebookOf(encoding)) values_.push_back(entry);
    } else if (format_.kind == CodeKind::kFloat) {
      for (int code = 0; code < 1 << (format_.bits - 1); ++code) {
        const float value = DecodeFloat(format_.float_layout, code);
        if (std::isfinite(value)) values_.push_back(value);
      }
    }
  }

  // The value for a quotient, and whether it is beyond the range.
  double Nearest(double quotient, bool* low, bool* high) const {
    *low = *high = false;
    if (std::isnan(quotient)) return quotient;
    if (format_.kind == CodeKind::kCodebook) {
      *low = quotient < values_.front();
      *high = quotient > values_.back();
      // Further away the distances to all entries would round to the same.
      const double near =
          std::max(values_.front(), std::min(quotient, values_.back()));
      return values_[NearestIndex(near, /*ties_to_even=*/false)];
    }
    const double magnitude = std::fabs(quotient);
    const double largest = values_.back();
    const double step = largest - values_[values_.size() - 2];
    const bool is_odd = values_.size() % 2 == 0;
    const double end = largest + step / 2;
    if (magnitude > end || (magnitude == end && is_odd)) {
      *low = quotient < 0;
      *high = quotient > 0;
      if (!saturates_) return std::numeric_limits<double>::infinity();
      return std::copysign(largest, quotient);
    }
    return std::copysign(values_[NearestIndex(magnitude, true)], quotient);
  }

 private:
  size_t NearestIndex(double x, bool ties_to_even) const {
    size_t best = 0;
    for (size_t i = 1; i < values_.size(); ++i) {
      const double better = std::fabs(x - values_[i]);
      const double so_far = std::fabs(x - values_[best]);
      if (better < so_far || (better == so_far && ties_to_even && i % 2 == 0)) {
        best = i;
      }
    }
    return best;
  }

  const FormatInfo& format_;
  const bool saturates_;
  std::vector<double> values_;
};

// Sums of one leaf or portion: element k in lane k mod 16, then the tree.
class NaiveLanes {
 public:
  void Add(int64_t k, ElementType type, double x, float scale,
           int32_t zero_point, const Encoding& encoding,
           const NaiveValues& values) {
    double restored;
    bool low;
    bool high;
    const double quotient = NaiveQuotient(type, x, scale);
    if (FindFormat(encoding.format)->kind == CodeKind::kInteger) {
      const double unclamped = NaiveRound(quotient) + double{1} * zero_point;
      low = unclamped < encoding.qmin;
      high = unclamped > encoding.qmax;
      // Of a NaN, and of anything under the scale that stands for none.
      restored = std::isnan(quotient)
                     ? quotient
                     : NaiveCode(type, x, scale, zero_point, encoding.qmin,
                                 encoding.qmax) -
                           zero_point;
    } else {
      restored = values.Nearest(quotient, &low, &high);
    }
    // volatile: the value is to be a float32, whatever the compiler's mind.
    volatile float product = static_cast<float>(restored) * scale;
    restored =
        type == ElementType::kFloat64 ? restored * double{scale} : product;
    if (!std::isfinite(x) || !std::isfinite(restored)) {
      ++sums_.non_finite;
      return;
    }
    ++sums_.count;
    sums_.clipped_low += low;
    sums_.clipped_high += high;
    sums_.zero_flushed += x != 0 && restored == 0;
    const double error = std::fabs(restored - x);
    const double relative = NaiveRelative(type, x, error);
    const double terms[6] = {error * error,       error,       relative, x * x,
                             restored * restored, x * restored};
    for (int t = 0; t < 6; ++t) lanes_[t][k % 16] += terms[t];
    sums_.max_absolute_error = std::max(sums_.max_absolute_error, error);
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
  const NaiveValues values(encoding);
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
             encoding, values);
    portion.Add(i - portion_first, type, x, encoding.scale[scale_index],
                zero_point, encoding, values);
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

// With int32 and with real zero points: what quantizing and dequantizing make
// of the elements, in order.
TEST(EvaluateTest, IsOfWhatQuantizingAndDequantizingGive) {
  for (const LayoutCase& layout_case : AllLayoutCases()) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    for (const char* name : {"int32", "int2", "uint8"}) {
      SCOPED_TRACE(name);
      const FormatInfo& format = *FindFormatByName(name);
      const Encoding encoding =
          IsWideInteger(format) ? MakeEncoding(format, layout, 1e-8, true, 3)
                                : MakeRealEncoding(format, layout, 0.05, 3);
      for (const ElementType type :
           {ElementType::kFloat32, ElementType::kFloat64}) {
        const auto reals = MakeReals(type, count, 0.05, false, 13);
        std::vector<uint8_t> codes(format.SizeBytes(count));
        QuantizeCounts counts;
        ASSERT_TRUE(Quantize(encoding, layout, type, NanPolicy::kDefault, 0,
                             count, reals.data(), codes.data(), &counts,
                             nullptr)
                        .ok());
        std::vector<uint8_t> back(reals.size());
        Dequantize(encoding, layout, type, 0, count, codes.data(), back.data(),
                   nullptr);
        double squared = 0;
        std::vector<double> per_scale(layout.scale_count());
        for (int64_t i = 0; i < count; ++i) {
          const double error = NaiveReal(type, back.data(), i) -
                               NaiveReal(type, reals.data(), i);
          squared += error * error;
          per_scale[NaiveScaleIndex(layout_case, i)] += error * error;
        }
        ForEachSimdTarget([&] {
          Evaluator evaluator(encoding, layout, type,
                              EvaluateOptions{true, false});
          evaluator.Update(0, count, reals.data(), nullptr);
          EXPECT_EQ(evaluator.overall().count, count);
          EXPECT_EQ(evaluator.overall().clipped_low, counts.clipped_low);
          EXPECT_EQ(evaluator.overall().clipped_high, counts.clipped_high);
          EXPECT_NEAR(evaluator.overall().squared_error, squared,
                      1e-12 * squared);
          for (size_t i = 0; i < per_scale.size(); ++i) {
            EXPECT_NEAR(evaluator.per_scale_index()[i].squared_error,
                        per_scale[i], 1e-12 * per_scale[i]);
          }
        });
        if (HasFailure()) return;
      }
    }
  }
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
          for (const ErrorSumSet sums : kAllSumSets) {
            for (const bool per_scale_index : {false, true}) {
              Evaluator evaluator(
                  encoding, layout, type,
                  EvaluateOptions{per_scale_index, false, sums});
              evaluator.Update(0, layout.element_count(), reals.data(),
                               nullptr);
              ExpectSame(evaluator.overall(), want.overall, sums);
              ASSERT_EQ(evaluator.per_scale_index().size(),
                        per_scale_index ? want.per_scale_index.size() : 0);
              for (size_t i = 0; i < evaluator.per_scale_index().size(); ++i) {
                ExpectSame(evaluator.per_scale_index()[i],
                           want.per_scale_index[i], sums);
              }
            }
          }
        });
        if (HasFailure()) return;
      }
    }
  }
}

TEST(EvaluateTest, EqualsTheDefinitionForEveryKindOfCode) {
  struct Case {
    const char* name;
    bool no_saturation;
  };
  const Case cases[] = {
      {"float8_e4m3fn", false},   {"float8_e4m3fn", true},
      {"float8_e5m2", false},     {"float8_e5m2", true},
      {"float8_e4m3fnuz", false}, {"float8_e5m2fnuz", true},
      {"float6_e2m3", false},     {"float6_e3m2", false},
      {"float4_e2m1", false},     {"mxfp4_e2m1", false},
      {"mxint8", false},          {"nf4", false},
      {"codebook8", false},
  };
  const LayoutCase layouts[] = {
      {{700}, {}}, {{3, 2500}, {0, 1}}, {{4, 75}, {1, 32}}, {{6, 5}, {1, 1}}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const FormatInfo& format = *FindFormatByName(c.name);
    for (const LayoutCase& layout_case : layouts) {
      SCOPED_TRACE(layout_case.Name());
      const BlockLayout layout = layout_case.Layout();
      Encoding encoding =
          MakeEncoding(format, layout, 3 / format.max_value, false, 3);
      encoding.no_saturation = c.no_saturation;
      if (format.name == "codebook8") {
        encoding.codebook = {-1, -0.3f, -0.1f, -1e-4f, 0, 0.25f, 1};
      }
      if (format.scale_type == ScaleType::kE8m0) {
        encoding.scale.back() = std::numeric_limits<float>::quiet_NaN();
      }
      for (const ElementType type : kAllElementTypes) {
        SCOPED_TRACE(ElementTypeName(type));
        auto reals = MakeReals(type, layout.element_count(), 0.05, true, 17);
        // Ties, and what lies about the end of the range.
        for (int64_t i = 0; i < layout.element_count(); ++i) {
          const double x = NaiveReal(type, reals.data(), i);
          // Squares of the largest numbers would hide all others.
          const bool is_large = std::isfinite(x) && std::fabs(x) > 1e30;
          if (x == 1e300 || (is_large && layout_case.shape.size() > 1)) {
            StoreReal(type, 1, reals.data(), i);
          }
          if (i % 3 != 0 || std::isnan(encoding.scale[0])) continue;
          const double steps = static_cast<double>(i % 257 - 128) / 64;
          StoreReal(type, steps * format.max_value * encoding.scale[0],
                    reals.data(), i);
        }
        const Expected want = Naive(layout_case, encoding, type, reals);
        ForEachSimdTarget([&] {
          for (const ErrorSumSet sums : kAllSumSets) {
            Evaluator evaluator(encoding, layout, type,
                                EvaluateOptions{true, false, sums});
            evaluator.Update(0, layout.element_count(), reals.data(), nullptr);
            ExpectSame(evaluator.overall(), want.overall, sums);
            for (size_t i = 0; i < want.per_scale_index.size(); ++i) {
              ExpectSame(evaluator.per_scale_index()[i],
                         want.per_scale_index[i], sums);
            }
          }
        });
        if (HasFailure()) return;
      }
    }
  }
}

// All targets, per tensor and per element of rows, against the definition.
void ExpectDefinition(const Encoding& encoding, ElementType type,
                      const std::vector<uint8_t>& reals) {
  const int64_t count = reals.size() / ElementSizeBytes(type);
  const LayoutCase per_tensor = {{count}, {}};
  const LayoutCase columns = {{count / 40, 40}, {0, 1}};
  Encoding wide = encoding;
  wide.scale.assign(40, encoding.scale[0]);
  if (!encoding.zero_point.empty()) {
    wide.zero_point.assign(40, encoding.zero_point[0]);
  }
  for (const LayoutCase& layout_case : {per_tensor, columns}) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const Encoding& used = layout.scale_count() == 1 ? encoding : wide;
    const Expected want = Naive(layout_case, used, type, reals);
    ForEachSimdTarget([&] {
      for (const ErrorSumSet sums : kAllSumSets) {
        Evaluator evaluator(used, layout, type,
                            EvaluateOptions{true, false, sums});
        evaluator.Update(0, layout.element_count(), reals.data(), nullptr);
        ExpectSame(evaluator.overall(), want.overall, sums);
        for (size_t i = 0; i < want.per_scale_index.size(); ++i) {
          ExpectSame(evaluator.per_scale_index()[i], want.per_scale_index[i],
                     sums);
        }
      }
    });
  }
}

TEST(EvaluateTest, RoundsTiesAndTheirNeighboursAsTheQuotientIs) {
  std::mt19937 random(1);
  for (const char* name : {"int4", "int8", "uint8", "int16"}) {
    SCOPED_TRACE(name);
    const FormatInfo& format = *FindFormatByName(name);
    for (const ElementType type :
         {ElementType::kFloat32, ElementType::kFloat64}) {
      SCOPED_TRACE(ElementTypeName(type));
      for (int round = 0; round < 20; ++round) {
        SCOPED_TRACE(round);
        Encoding encoding;
        encoding.format = format.format;
        encoding.qmin = format.qmin;
        encoding.qmax = format.qmax;
        // The ends of the exponents too.
        const int exponent[] = {0, -5, 3, -101, 99, -126, 127};
        encoding.scale = {
            std::ldexp(1 + static_cast<float>(random() % (1 << 23)) * 0x1p-23f,
                       exponent[round % 7])};
        if (name[0] == 'u') encoding.zero_point = {round * 10};
        std::vector<uint8_t> reals(4000 * ElementSizeBytes(type));
        for (int64_t i = 0; i < 4000; ++i) {
          const auto span =
              static_cast<uint32_t>(format.qmax - format.qmin + 8);
          const double tie =
              static_cast<double>(random() % span) + format.qmin - 4 + 0.5;
          double x = tie * encoding.scale[0];
          for (int64_t step = i % 5; step < 2; ++step) {
            x = type == ElementType::kFloat64
                    ? std::nextafter(x, 1e300)
                    : std::nextafter(static_cast<float>(x), 3e38f);
          }
          for (int64_t step = i % 5; step > 2; --step) {
            x = type == ElementType::kFloat64
                    ? std::nextafter(x, -1e300)
                    : std::nextafter(static_cast<float>(x), -3e38f);
          }
          StoreReal(type, x, reals.data(), i);
        }
        ExpectDefinition(encoding, type, reals);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(EvaluateTest, ErrorsBeyondFloat32AreThoseOfFloat64) {
  Encoding encoding;
  encoding.format = FindFormatByName("codebook8")->format;
  encoding.qmax = 1;
  encoding.codebook = {1, 1.5};
  for (const float scale : {0x1p127f, 0x1p-1f}) {
    SCOPED_TRACE(scale);
    encoding.scale = {scale};
    std::vector<uint8_t> reals(2000 * 4);
    for (int64_t i = 0; i < 2000; ++i) {
      const double odd = scale > 1 ? -3e38 : 1e-45;
      StoreReal(ElementType::kFloat32, i % 300 == 7 ? odd : scale * (i % 3),
                reals.data(), i);
    }
    ExpectDefinition(encoding, ElementType::kFloat32, reals);
    const BlockLayout layout = *BlockLayout::Create({2000}, {});
    Evaluator evaluator(encoding, layout, ElementType::kFloat32, {});
    evaluator.Update(0, 2000, reals.data(), nullptr);
    if (scale > 1) {
      EXPECT_GT(evaluator.overall().max_absolute_error, 4e38);
    } else {
      EXPECT_GT(evaluator.overall().max_relative_error, 3e44);
    }
    EXPECT_TRUE(std::isfinite(evaluator.overall().squared_error));
  }
}

TEST(EvaluateTest, LeavesOutWhatComesBackAsNotFinite) {
  const BlockLayout layout = *BlockLayout::Create({4, 2}, {1, 0});
  Encoding encoding;
  encoding.format = FindFormatByName("float8_e5m2")->format;
  encoding.qmax = 255;
  encoding.no_saturation = true;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  encoding.scale = {1, nan, 1, 1};
  const float reals[] = {1, 2, 3, 4, nan, 5, 60000, 70000};
  ForEachSimdTarget([&] {
    Evaluator evaluator(encoding, layout, ElementType::kFloat32,
                        EvaluateOptions{false, true});
    evaluator.Update(0, 8, reinterpret_cast<const uint8_t*>(reals), nullptr);
    EXPECT_EQ(evaluator.overall().count, 4);
    EXPECT_EQ(evaluator.overall().non_finite, 4);
    EXPECT_EQ(evaluator.overall().clipped_high, 0);
    EXPECT_EQ(evaluator.overall().signal, 1 + 4 + 25 + 60000.0 * 60000);
    // 60000 comes back as 57344.
    const ErrorDistribution distribution = evaluator.distribution();
    EXPECT_EQ(distribution.zero, 3);
    EXPECT_EQ(distribution.first_exponent, 11);
    EXPECT_EQ(distribution.count, std::vector<int64_t>{1});
  });
}

// By the words of distribution.h.
ErrorDistribution NaiveDistribution(const std::vector<double>& real,
                                    const std::vector<double>& restored) {
  const auto cut = [](double value) {
    constexpr double kLargest = std::numeric_limits<float>::max();
    const auto single =
        static_cast<float>(std::max(-kLargest, std::min(value, kLargest)));
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    bits &= 0xFFFF0000;
    float result;
    std::memcpy(&result, &bits, 4);
    return double{result};
  };
  ErrorDistribution want;
  std::map<int, int64_t> errors;
  double min = std::numeric_limits<double>::infinity();
  double max = -min;
  for (size_t i = 0; i < real.size(); ++i) {
    const double error = std::fabs(restored[i] - real[i]);
    if (error == 0) {
      ++want.zero;
    } else {
      ++errors[std::ilogb(error)];
    }
    min = std::min(min, cut(real[i]));
    max = std::max(max, cut(real[i]));
  }
  if (!errors.empty()) {
    want.first_exponent = errors.begin()->first;
    want.count.resize(errors.rbegin()->first - want.first_exponent + 1);
    for (const auto& [exponent, count] : errors) {
      want.count[exponent - want.first_exponent] = count;
    }
  }
  std::vector<double> p(256, 0.5), q(256, 0.5);
  const auto bin = [&](double value) {
    const double at = max > min ? (cut(value) - min) * (256 / (max - min)) : 0;
    return static_cast<int>(std::max(0.0, std::min(std::floor(at), 255.0)));
  };
  for (size_t i = 0; i < real.size(); ++i) {
    ++p[bin(real[i])];
    ++q[bin(restored[i])];
  }
  for (int i = 0; !real.empty() && i < 256; ++i) {
    want.kl_divergence += p[i] / (real.size() + 128.0) * std::log(p[i] / q[i]);
  }
  return want;
}

void ExpectSame(const ErrorDistribution& got, const ErrorDistribution& want) {
  EXPECT_EQ(got.kl_divergence, want.kl_divergence);
  EXPECT_EQ(got.zero, want.zero);
  EXPECT_EQ(got.first_exponent, want.first_exponent);
  EXPECT_EQ(got.count, want.count);
}

TEST(EvaluateTest, DistributionEqualsTheDefinitionOnEveryTargetAndThread) {
  const LayoutCase layout_case = {{300, 1001}, {1, 32}};
  const BlockLayout layout = layout_case.Layout();
  const int64_t count = layout.element_count();
  const Encoding encoding =
      MakeEncoding(*FindFormatByName("int4"), layout, 0.05, true, 3);
  ThreadPool pool(2);
  for (const ElementType type :
       {ElementType::kFloat32, ElementType::kBfloat16, ElementType::kFloat64}) {
    SCOPED_TRACE(ElementTypeName(type));
    const auto reals = MakeReals(type, count, 0.05, true, 1);
    std::vector<double> real, restored;
    for (int64_t i = 0; i < count; ++i) {
      const double x = NaiveReal(type, reals.data(), i);
      if (!std::isfinite(x)) continue;
      const int64_t s = NaiveScaleIndex(layout_case, i);
      const int32_t steps =
          NaiveCode(type, x, encoding.scale[s], encoding.zero_point[s],
                    encoding.qmin, encoding.qmax) -
          encoding.zero_point[s];
      real.push_back(x);
      if (type == ElementType::kFloat64) {
        restored.push_back(steps * double{encoding.scale[s]});
      } else {
        restored.push_back(static_cast<float>(steps) * encoding.scale[s]);
      }
    }
    const ErrorDistribution want = NaiveDistribution(real, restored);
    ForEachSimdTarget([&] {
      for (ThreadPool* p : {static_cast<ThreadPool*>(nullptr), &pool}) {
        for (const int64_t chunk : {count, int64_t{77 * 1024}}) {
          Evaluator evaluator(encoding, layout, type,
                              EvaluateOptions{false, true});
          for (int64_t first = 0; first < count; first += chunk) {
            evaluator.Update(first, std::min(chunk, count - first),
                             reals.data() + first * ElementSizeBytes(type), p);
          }
          ExpectSame(evaluator.distribution(), want);
        }
      }
    });
    if (HasFailure()) return;
  }
}

TEST(EvaluateTest, DivergenceIsThatOfTheFormula) {
  const float real[] = {0, 1};
  const float restored[] = {0, 0};
  DistributionCounts counts;
  counts.Add(real, restored, 2, 0);
  const ErrorDistribution distribution = counts.Distribution();
  // 1.5 of 130 in the first and the last bin become 2.5 and 0.5.
  EXPECT_DOUBLE_EQ(distribution.kl_divergence,
                   1.5 / 130 * (std::log(1.5 / 2.5) + std::log(1.5 / 0.5)));
  EXPECT_EQ(distribution.zero, 1);
  EXPECT_EQ(distribution.first_exponent, 0);
  EXPECT_EQ(distribution.count, std::vector<int64_t>{1});
}

TEST(EvaluateTest, ValuesOutsideGoToTheOuterBins) {
  const double real[] = {-1, 1, -1, 1};
  const double restored[] = {-3, 3, -1, 1e300};
  DistributionCounts counts;
  counts.Add(real, restored, 4, 0);
  EXPECT_EQ(counts.Distribution().kl_divergence, 0);
  EXPECT_EQ(counts.Distribution().first_exponent, 1);
  EXPECT_EQ(counts.Distribution().count.size(), 996);
}

TEST(EvaluateTest, DistributionOfNothingIsEmpty) {
  const ErrorDistribution distribution = DistributionCounts().Distribution();
  EXPECT_EQ(distribution.kl_divergence, 0);
  EXPECT_EQ(distribution.zero, 0);
  EXPECT_TRUE(distribution.count.empty());
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
        Evaluator evaluator(encoding, layout, ElementType::kFloat32,
                            EvaluateOptions{true, false});
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
  EXPECT_TRUE(std::isnan(sums.SqnrDb()));
  EXPECT_TRUE(std::isnan(sums.CosineSimilarity()));
  sums.count = 1;
  EXPECT_EQ(sums.SqnrDb(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(sums.CosineSimilarity(), 1);
  sums.signal = 1;
  EXPECT_EQ(sums.CosineSimilarity(), 0);
  // Of doubles, whose squares underflow.
  sums.max_absolute_error = 1e-170;
  EXPECT_TRUE(std::isnan(sums.SqnrDb()));
}

}  // namespace
}  // namespace quantd::core::evaluate_test
