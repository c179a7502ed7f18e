#include "core/calibrate/block_quantizer.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/calibrate/calibrate.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/held_tensor.h"
#include "core/statistics/tensor_statistics.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::block_quantizer_test {
namespace {

// What both ways come to.
struct Quantized {
  absl::Status status;
  Encoding encoding;
  std::vector<uint8_t> codes;
  QuantizeCounts counts;
};

// The largest magnitude of each outer block, or of float32; empty without outer
// scales.
std::vector<float> OuterMaximum(const EncodingSpec& spec,
                                const BlockLayout& layout, ElementType type,
                                const std::vector<uint8_t>& reals) {
  if (!HasOuterScales(EffectiveScaleType(spec))) return {};
  const BlockLayout outer_layout = *OuterLayout(
      EncodingWithoutScales(spec, layout, false), layout.scale_shape());
  std::vector<float> maximum(static_cast<size_t>(outer_layout.scale_count()));
  TensorStatistics statistics(layout.scale_count());
  statistics.Update(layout, type, 0, layout.element_count(), reals.data(),
                    nullptr);
  for (int64_t i = 0; i < layout.scale_count(); ++i) {
    const Extremes& extremes = statistics.extremes()[i];
    float& most = maximum[outer_layout.ScaleBounds(i, 1).first];
    if (extremes.empty()) continue;
    const double magnitude = std::max(-extremes.min, extremes.max);
    most = std::max(most, static_cast<float>(std::min<double>(
                              magnitude, std::numeric_limits<float>::max())));
  }
  return maximum;
}

Quantized InTwoSteps(const EncodingSpec& spec, const BlockLayout& layout,
                     ElementType type, NanPolicy nan_policy,
                     const std::vector<uint8_t>& reals) {
  Quantized result;
  const int64_t count = layout.element_count();
  TensorStatistics statistics(layout.scale_count());
  statistics.Update(layout, type, 0, count, reals.data(), nullptr);
  const HeldTensor held(layout, type, std::max<int64_t>(count, 1),
                        {reals.data()});
  absl::StatusOr<Calibration> calibration =
      Calibrate(spec, layout, statistics, {}, nullptr, StopToken(), &held,
                OuterMaximum(spec, layout, type, reals));
  result.status = calibration.status();
  if (!result.status.ok()) return result;
  result.encoding = calibration->encoding;
  result.codes.resize(FindFormat(result.encoding.format)->SizeBytes(count));
  result.status =
      Quantize(result.encoding, layout, type, nan_policy, 0, count,
               reals.data(), result.codes.data(), &result.counts, nullptr);
  return result;
}

// In ranges of about `range_elements`.
Quantized InOnePass(const EncodingSpec& spec, const BlockLayout& layout,
                    ElementType type, NanPolicy nan_policy,
                    const std::vector<uint8_t>& reals, int64_t range_elements,
                    ThreadPool* pool) {
  Quantized result;
  const int64_t count = layout.element_count();
  const FormatInfo& format = *FindFormat(spec.format);
  // A canary past the end.
  result.codes.assign(format.SizeBytes(count) + 1, 0xA5);
  const std::unique_ptr<BlockQuantizer> quantizer = *BlockQuantizer::Create(
      spec, layout, type, nan_policy, OuterMaximum(spec, layout, type, reals));
  const int64_t step = (range_elements + quantizer->granule() - 1) /
                       quantizer->granule() * quantizer->granule();
  result.encoding = quantizer->encoding();
  for (int64_t first = 0; first < count && result.status.ok(); first += step) {
    result.status =
        quantizer->Add(first, std::min(step, count - first),
                       reals.data() + first * ElementSizeBytes(type),
                       result.codes.data() + format.SizeBytes(first), pool);
    const Encoding& added = quantizer->encoding();
    EXPECT_EQ(quantizer->first_scale(),
              static_cast<int64_t>(result.encoding.scale.size()));
    const auto append = [](const auto& from, auto* to) {
      to->insert(to->end(), from.begin(), from.end());
    };
    append(added.scale, &result.encoding.scale);
    append(added.zero_point, &result.encoding.zero_point);
    append(added.scale_code, &result.encoding.scale_code);
  }
  EXPECT_EQ(result.codes.back(), 0xA5);
  result.codes.pop_back();
  result.encoding.degenerate_count = quantizer->degenerate_count();
  result.counts = quantizer->counts();
  return result;
}

void ExpectSame(const Quantized& got, const Quantized& want) {
  ASSERT_EQ(got.status, want.status);
  if (!want.status.ok()) return;
  // Compared by their bits, because NaN is a scale too.
  ASSERT_EQ(got.encoding.scale.size(), want.encoding.scale.size());
  for (size_t i = 0; i < want.encoding.scale.size(); ++i) {
    ASSERT_EQ(std::memcmp(&got.encoding.scale[i], &want.encoding.scale[i],
                          sizeof(float)),
              0)
        << "scale " << i << ": " << got.encoding.scale[i] << ", expected "
        << want.encoding.scale[i];
  }
  Encoding got_rest = got.encoding, want_rest = want.encoding;
  got_rest.scale.clear();
  want_rest.scale.clear();
  ASSERT_TRUE(got_rest == want_rest);
  EXPECT_EQ(got.encoding.degenerate_count, want.encoding.degenerate_count);
  for (size_t i = 0; i < want.codes.size(); ++i) {
    ASSERT_EQ(got.codes[i], want.codes[i]) << "byte " << i;
  }
  EXPECT_EQ(got.counts.total, want.counts.total);
  EXPECT_EQ(got.counts.clipped_low, want.counts.clipped_low);
  EXPECT_EQ(got.counts.clipped_high, want.counts.clipped_high);
  EXPECT_EQ(got.counts.nan, want.counts.nan);
  EXPECT_EQ(got.counts.positive_infinity, want.counts.positive_infinity);
  EXPECT_EQ(got.counts.negative_infinity, want.counts.negative_infinity);
}

// Blocks of every size of the kernel and others, ragged at the tensor's end and
// in every row; two tasks and more.
std::vector<LayoutCase> BlockCases() {
  return {{{8, 256}, {1, 16}},     {{9, 160}, {1, 32}},   {{3, 320}, {1, 64}},
          {{5, 384}, {1, 128}},    {{20, 96}, {1, 48}},   {{40, 24}, {1, 8}},
          {{7, 40}, {1, 20}},      {{3, 1024}, {1, 256}}, {{1003}, {32}},
          {{5, 75}, {1, 32}},      {{9, 33}, {1, 0}},     {{700}, {}},
          {{2, 6, 32}, {1, 0, 0}}, {{70, 2048}, {1, 32}}, {{9, 40}, {2, 16}},
          {{5, 3, 7}, {2, 0, 3}},  {{6, 20}, {0, 1}},     {{300}, {1}}};
}

std::vector<EncodingSpec> AllSpecs() {
  std::vector<EncodingSpec> specs;
  for (const FormatInfo& format : AllFormats()) {
    EncodingSpec spec;
    spec.format = format.format;
    if (format.kind == CodeKind::kCodebook && format.codebook.empty()) {
      spec.codebook = {-1, -0.25f, 0.5f};
    }
    specs.push_back(spec);
    if (format.scale_type == ScaleType::kE8m0) {
      for (const MxScaleRule rule :
           {MxScaleRule::kCeil, MxScaleRule::kEven, MxScaleRule::kRceil}) {
        spec.mx_scale_rule = rule;
        specs.push_back(spec);
      }
      continue;
    }
    if (format.kind != CodeKind::kInteger) continue;
    spec.symmetry = Symmetry::kAsymmetric;
    if (!IsWideInteger(format)) specs.push_back(spec);
    if (format.is_signed) {
      for (const Symmetry symmetry :
           {Symmetry::kFullRange, Symmetry::kHalfStep, Symmetry::kAimet}) {
        spec.symmetry = symmetry;
        specs.push_back(spec);
      }
    }
    if (format.bits != 4) continue;
    spec.symmetry = Symmetry::kDefault;
    spec.power_of_two_scale = true;
    specs.push_back(spec);
    spec.power_of_two_scale = false;
    spec.scale_type = ScaleType::kFloat16;
    specs.push_back(spec);
    spec.scale_type = ScaleType::kDefault;
    spec.symmetry = Symmetry::kAsymmetric;
    spec.exclude_zero = true;
    specs.push_back(spec);
  }
  return specs;
}

std::string Name(const EncodingSpec& spec) {
  return absl::StrCat(FindFormat(spec.format)->name, " symmetry ",
                      static_cast<int>(spec.symmetry), " rule ",
                      static_cast<int>(spec.mx_scale_rule));
}

// Data that ties, huge and tiny scales, blocks of zeros, of one sign, and, if
// asked for, elements that are not finite in some blocks.
std::vector<uint8_t> MakeBlocks(ElementType type, int64_t count,
                                bool specials) {
  std::vector<uint8_t> reals = MakeReals(type, count, 0.1, false, 7);
  const std::vector<uint8_t> special = MakeReals(type, count, 0.1, true, 9);
  const int64_t size = ElementSizeBytes(type);
  for (int64_t i = 0; i < count; ++i) {
    const double x = NaiveReal(type, reals.data(), i);
    switch (i / 512 % 8) {
      case 1:
        StoreReal(type, 0, reals.data(), i);
        break;
      case 2:
        StoreReal(type, std::abs(x), reals.data(), i);
        break;
      case 3:
        StoreReal(type, -std::abs(x) - 1, reals.data(), i);
        break;
      case 4:
        StoreReal(type, x * 1e-38, reals.data(), i);
        break;
      case 5:
        if (specials) std::memcpy(&reals[i * size], &special[i * size], size);
        break;
      case 6:
        // Ties of ranges whose scale is 1 or 1/2.
        StoreReal(type, static_cast<double>(i * 7 % 31 - 15) / 4, reals.data(),
                  i);
        break;
      default:
        break;
    }
  }
  return reals;
}

TEST(BlockQuantizerTest, EqualsStatisticsCalibrationAndQuantizing) {
  for (const LayoutCase& layout_case : BlockCases()) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    for (const ElementType type : kAllElementTypes) {
      SCOPED_TRACE(ElementTypeName(type));
      for (const bool specials : {false, true}) {
        if (!specials && type != ElementType::kFloat32) continue;
        const auto reals = MakeBlocks(type, layout.element_count(), specials);
        for (EncodingSpec spec : AllSpecs()) {
          SCOPED_TRACE(Name(spec));
          spec.block_size = layout_case.block;
          spec = *ResolveSpec(spec, layout_case.shape);
          if (!ValidateSpec(spec).ok() ||
              !BlockQuantizer::Takes(spec, layout, true)) {
            continue;
          }
          // The large layout only where the kernel for groups may take it.
          if (layout.element_count() > 100000 &&
              (type != ElementType::kFloat32 ||
               FindFormat(spec.format)->kind != CodeKind::kInteger)) {
            continue;
          }
          ASSERT_TRUE(SetSimdTarget("scalar").ok());
          const Quantized want =
              InTwoSteps(spec, layout, type, NanPolicy::kDefault, reals);
          ForEachSimdTarget([&] {
            ExpectSame(InOnePass(spec, layout, type, NanPolicy::kDefault, reals,
                                 layout.element_count(), nullptr),
                       want);
          });
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(BlockQuantizerTest, EqualsThemForEveryMethod) {
  EncodingSpec fixed;
  fixed.method = CalibrationMethod::kFixedRange;
  fixed.range_min = -0.25;
  fixed.range_max = 0.5;
  EncodingSpec best;
  best.method = CalibrationMethod::kBestOf;
  best.methods = {CalibrationMethod::kMinMax, CalibrationMethod::kEntropy,
                  CalibrationMethod::kPercentile, CalibrationMethod::kMse};
  std::vector<EncodingSpec> methods = {fixed, best};
  for (const CalibrationMethod method :
       {CalibrationMethod::kPercentile, CalibrationMethod::kMse,
        CalibrationMethod::kSqnr, CalibrationMethod::kEntropy}) {
    methods.emplace_back();
    methods.back().method = method;
  }
  const LayoutCase cases[] = {{{4, 96}, {1, 32}}, {{5, 75}, {1, 32}},
                              {{40, 3}, {1, 1}},  {{700}, {}},
                              {{7, 30}, {2, 16}}, {{6, 8, 4}, {1, 0, 2}}};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    for (const ElementType type : kAllElementTypes) {
      SCOPED_TRACE(ElementTypeName(type));
      const auto reals = MakeBlocks(type, layout.element_count(), true);
      for (const char* format :
           {"int4", "uint4", "int16", "nf4", "float8_e4m3fn", "mxfp4_e2m1",
            "nvfp4", "lpbq"}) {
        for (EncodingSpec spec : methods) {
          spec.format = FindFormatByName(format)->format;
          spec.block_size = layout_case.block;
          spec.search_steps = 9;
          SCOPED_TRACE(Name(spec));
          SCOPED_TRACE(static_cast<int>(spec.method));
          spec = *ResolveSpec(spec, layout_case.shape);
          ASSERT_TRUE(BlockQuantizer::Takes(spec, layout, true));
          ASSERT_TRUE(SetSimdTarget("scalar").ok());
          const Quantized want =
              InTwoSteps(spec, layout, type, NanPolicy::kDefault, reals);
          ForEachSimdTarget([&] {
            ExpectSame(InOnePass(spec, layout, type, NanPolicy::kDefault, reals,
                                 layout.element_count(), nullptr),
                       want);
          });
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(BlockQuantizerTest, EqualsThemOnLongBlocks) {
  ThreadPool pool(2);
  const LayoutCase cases[] = {{{3, 6001}, {1, 0}}, {{6001, 3}, {0, 1}}};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    for (const ElementType type :
         {ElementType::kFloat32, ElementType::kBfloat16,
          ElementType::kFloat64}) {
      SCOPED_TRACE(ElementTypeName(type));
      const auto reals = MakeBlocks(type, layout.element_count(), true);
      for (const auto& [format, method] :
           {std::pair("int8", CalibrationMethod::kMse),
            std::pair("uint8", CalibrationMethod::kSqnr),
            std::pair("int16", CalibrationMethod::kMse),
            std::pair("int4", CalibrationMethod::kPercentile),
            std::pair("nf4", CalibrationMethod::kEntropy)}) {
        EncodingSpec spec;
        spec.format = FindFormatByName(format)->format;
        spec.method = method;
        spec.block_size = layout_case.block;
        SCOPED_TRACE(Name(spec));
        spec = *ResolveSpec(spec, layout_case.shape);
        ASSERT_TRUE(BlockQuantizer::Takes(spec, layout, false));
        const Quantized want =
            InTwoSteps(spec, layout, type, NanPolicy::kDefault, reals);
        ExpectSame(InOnePass(spec, layout, type, NanPolicy::kDefault, reals,
                             layout.element_count(), &pool),
                   want);
        if (HasFailure()) return;
      }
    }
  }
}

// The worker that searches has others to serve.
TEST(BlockQuantizerTest, TakesNoSearchThatIsLong) {
  const auto takes = [](int64_t columns, int steps, int64_t blocks = 1) {
    EncodingSpec spec;
    spec.format = FindFormatByName("int8")->format;
    spec.symmetry = Symmetry::kAsymmetric;
    spec.method = CalibrationMethod::kMse;
    spec.search_steps = steps;
    spec.block_size = {1, 0, 1};
    const std::vector<int64_t> shape = {3, columns, blocks};
    const BlockLayout layout = *BlockLayout::Create(shape, spec.block_size);
    return BlockQuantizer::Takes(*ResolveSpec(spec, shape), layout, false);
  };
  EXPECT_TRUE(takes(kMaxDirectElements, 0));
  EXPECT_TRUE(takes(kFewDirectElements, 128));
  EXPECT_FALSE(takes(kMaxDirectElements, 128));
  EXPECT_FALSE(takes(kMaxDirectElements + 1, 0));
  // Nor one of many blocks that come together, which are searched together.
  EXPECT_TRUE(takes(kMaxDirectElements, 0, 4));
  EXPECT_FALSE(takes(kMaxDirectElements, 0, 8));
  EXPECT_TRUE(takes(2 * kFewDirectElements, 0, 32));
  EXPECT_FALSE(takes(2 * kFewDirectElements, 0, 64));
  // Short ones are, as they always were.
  EXPECT_TRUE(takes(kFewDirectElements, 0, 4096));
}

TEST(BlockQuantizerTest, DoesNotDependOnRangesOrThreads) {
  ThreadPool pool(2);
  const LayoutCase cases[] = {{{300, 2048}, {1, 32}}, {{300, 1001}, {1, 128}}};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const auto reals =
        MakeBlocks(ElementType::kFloat32, layout.element_count(), true);
    for (const char* format : {"int4", "uint8", "mxfp4_e2m1", "int5"}) {
      SCOPED_TRACE(format);
      EncodingSpec spec;
      spec.format = FindFormatByName(format)->format;
      spec.block_size = layout_case.block;
      spec = *ResolveSpec(spec, layout_case.shape);
      ASSERT_TRUE(BlockQuantizer::Takes(spec, layout, true));
      const Quantized want = InTwoSteps(spec, layout, ElementType::kFloat32,
                                        NanPolicy::kDefault, reals);
      for (const int64_t step : {1, 5000, 70000, 1000000}) {
        ExpectSame(InOnePass(spec, layout, ElementType::kFloat32,
                             NanPolicy::kDefault, reals, step, &pool),
                   want);
      }
    }
  }
}

TEST(BlockQuantizerTest, RefusesTheFirstElementThatIsNotFinite) {
  ThreadPool pool(2);
  const BlockLayout layout = *BlockLayout::Create({200, 1024}, {1, 32});
  auto reals = MakeReals(ElementType::kFloat32, 200 * 1024, 0.1, false, 3);
  EncodingSpec spec;
  spec.format = FindFormatByName("int4")->format;
  spec.block_size = {1, 32};
  for (const int64_t i : {190000, 150001, 150000, 70000}) {
    StoreReal(ElementType::kFloat32, NAN, reals.data(), i);
    const Quantized want = InTwoSteps(spec, layout, ElementType::kFloat32,
                                      NanPolicy::kReject, reals);
    ASSERT_FALSE(want.status.ok());
    ForEachSimdTarget([&] {
      ExpectSame(InOnePass(spec, layout, ElementType::kFloat32,
                           NanPolicy::kReject, reals, 50000, &pool),
                 want);
    });
  }
}

TEST(BlockQuantizerTest, TellsTheFirstScaleThatThereIsNoneOf) {
  ThreadPool pool(2);
  const BlockLayout layout = *BlockLayout::Create({200, 1024}, {1, 32});
  auto reals = MakeReals(ElementType::kFloat32, 200 * 1024, 0.1, false, 3);
  EncodingSpec spec;
  spec.format = FindFormatByName("int4")->format;
  spec.block_size = {1, 32};
  spec.scale_type = ScaleType::kFloat16;
  // The scale comes before what is refused, wherever that is.
  StoreReal(ElementType::kFloat32, INFINITY, reals.data(), 5);
  for (const int64_t i : {190000, 150001, 70000}) {
    StoreReal(ElementType::kFloat32, 1e30, reals.data(), i);
    const Quantized want = InTwoSteps(spec, layout, ElementType::kFloat32,
                                      NanPolicy::kReject, reals);
    ASSERT_FALSE(want.status.ok());
    ExpectSame(
        InOnePass(spec, layout, ElementType::kFloat32, NanPolicy::kReject,
                  reals, layout.element_count(), &pool),
        want);
  }
}

TEST(BlockQuantizerTest, RefusesElementsBeyondTheOuterMaximum) {
  const BlockLayout layout = *BlockLayout::Create({2, 32}, {1, 16});
  EncodingSpec spec;
  spec.format = FindFormatByName("nvfp4")->format;
  spec = *ResolveSpec(spec, {2, 32});
  std::vector<uint8_t> reals(64 * sizeof(float));
  StoreReal(ElementType::kFloat32, 3, reals.data(), 50);
  std::vector<uint8_t> codes(32);
  for (const float maximum : {3.0f, 2.5f}) {
    const std::unique_ptr<BlockQuantizer> quantizer = *BlockQuantizer::Create(
        spec, layout, ElementType::kFloat32, NanPolicy::kDefault, {maximum});
    const absl::Status status =
        quantizer->Add(0, 64, reals.data(), codes.data(), nullptr);
    EXPECT_EQ(ErrorReason(status), maximum < 3 ? "OUTER_MAXIMUM" : "");
    if (maximum < 3) {
      EXPECT_NE(status.message().find("scale 3 "), std::string::npos) << status;
    }
  }
}

// Whether it was stopped before the range came, or while it is searched: then
// after as many looks at the stop token as half of the scales. It looks before
// each scale.
TEST(BlockQuantizerTest, FindsFewScalesOnceItIsStopped) {
  ThreadPool pool(2);
  EncodingSpec spec;
  spec.format = FindFormatByName("int16")->format;
  spec.symmetry = Symmetry::kAsymmetric;
  spec.method = CalibrationMethod::kMse;
  spec.search_steps = 128;
  // A range of rows, and a band of columns.
  const LayoutCase cases[] = {{{4096, 256}, {1, 0}}, {{256, 4096}, {0, 1}}};
  for (const LayoutCase& layout_case : cases) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    const auto reals = MakeReals(ElementType::kFloat32, count, 0.1, false, 3);
    spec.block_size = layout_case.block;
    const EncodingSpec resolved = *ResolveSpec(spec, layout_case.shape);
    ASSERT_TRUE(BlockQuantizer::Takes(resolved, layout, false));
    for (const bool at_once : {true, false}) {
      for (ThreadPool* const threads :
           {static_cast<ThreadPool*>(nullptr), &pool}) {
        std::vector<uint8_t> codes(2 * static_cast<size_t>(count), 0xA5);
        const auto quantizer = *BlockQuantizer::Create(
            resolved, layout, ElementType::kFloat32, NanPolicy::kDefault, {});
        constexpr int64_t kScales = 4096;
        std::atomic<int64_t> looks_left{at_once ? 0 : kScales / 2};
        const absl::Status status =
            quantizer->Add(0, count, reals.data(), codes.data(), threads,
                           StopToken::AfterLooks(&looks_left));
        EXPECT_TRUE(absl::IsCancelled(status)) << status;
        // A scale that was not found is 0.
        const std::vector<float>& scale = quantizer->encoding().scale;
        ASSERT_EQ(scale.size(), size_t{kScales});
        const auto missing = std::count(scale.begin(), scale.end(), 0.0f);
        EXPECT_GE(missing, at_once ? kScales : kScales / 2);
        if (at_once) {
          EXPECT_EQ(std::count(codes.begin(), codes.end(), 0xA5), 2 * count);
        }
      }
    }
  }
}

TEST(BlockQuantizerTest, TakesNoSpecWhoseScalesNeedMoreThanTheirBlock) {
  const std::vector<int64_t> shape = {8, 64};
  const auto takes = [&](EncodingSpec spec, std::vector<int64_t> block) {
    spec.block_size = block;
    spec = *ResolveSpec(spec, shape);
    return BlockQuantizer::Takes(
        spec, *BlockLayout::Create(shape, spec.block_size), false);
  };
  EncodingSpec spec;
  spec.format = FindFormatByName("int8")->format;
  EXPECT_TRUE(takes(spec, {1, 32}));
  EXPECT_TRUE(takes(spec, {}));
  EXPECT_TRUE(takes(spec, {0, 1}));
  EXPECT_TRUE(takes(spec, {2, 32}));
  EncodingSpec other = spec;
  other.method = CalibrationMethod::kMse;
  EXPECT_TRUE(takes(other, {1, 32}));
  other.method = CalibrationMethod::kMovingAverage;
  EXPECT_FALSE(takes(other, {1, 32}));
  other = spec;
  other.unsigned_if_non_negative = true;
  EXPECT_FALSE(takes(other, {1, 32}));
  other = EncodingSpec();
  other.format = FindFormatByName("nvfp4")->format;
  EXPECT_FALSE(takes(other, {1, 16}));
}

}  // namespace
}  // namespace quantd::core::block_quantizer_test
