// Results over fixed inputs, which every machine and SIMD target has to give:
// hashes of them are in tests/oracles/golden_hashes.txt.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/calibrate/block_quantizer.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/importance.h"
#include "core/calibrate/prediction.h"
#include "core/dequantize/dequantize.h"
#include "core/errors.h"
#include "core/evaluate/comparison.h"
#include "core/evaluate/evaluate.h"
#include "core/evaluate/output_noise.h"
#include "core/formats/number_format.h"
#include "core/quantize/compensated_rounding.h"
#include "core/quantize/quantize.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/held_tensor.h"
#include "core/statistics/histogram.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"
#include "tests/support/paths.h"

namespace quantd::core {
namespace {

constexpr const char* kFile = "golden_hashes.txt";

// FNV-1a.
class Hash {
 public:
  void AddBytes(const void* data, size_t size) {
    const auto* const bytes = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < size; ++i) {
      state_ = (state_ ^ bytes[i]) * 0x100000001B3u;
    }
  }
  void Add(absl::Span<const uint8_t> bytes) {
    AddBytes(bytes.data(), bytes.size());
  }
  void Add(absl::string_view text) { AddBytes(text.data(), text.size()); }
  void Add(int64_t value) { AddBytes(&value, sizeof(value)); }
  // All NaN are one: their sign and payload are nobody's.
  void Add(double value) {
    if (std::isnan(value)) value = std::numeric_limits<double>::quiet_NaN();
    AddBytes(&value, sizeof(value));
  }
  template <typename T>
  void AddAll(const std::vector<T>& values) {
    Add(static_cast<int64_t>(values.size()));
    for (const T value : values) AddNumber(value);
  }
  void AddReals(ElementType type, const std::vector<uint8_t>& reals) {
    const auto count =
        static_cast<int64_t>(reals.size()) / ElementSizeBytes(type);
    for (int64_t i = 0; i < count; ++i) Add(NaiveReal(type, reals.data(), i));
  }

  // Shorter than the state, for a small file.
  std::string Text() const {
    return absl::StrFormat("%08x",
                           static_cast<uint32_t>(state_ ^ (state_ >> 32)));
  }

 private:
  void AddNumber(double value) { Add(value); }
  void AddNumber(float value) { Add(double{value}); }
  void AddNumber(int64_t value) { Add(value); }
  void AddNumber(int32_t value) { Add(int64_t{value}); }
  void AddNumber(uint8_t value) { Add(int64_t{value}); }

  uint64_t state_ = 0xCBF29CE484222325u;
};

// SplitMix64, and numbers of it that need no library: those of the standard
// one's distributions differ between libraries.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // Below `end`.
  int Below(int end) {
    return static_cast<int>(Next() % static_cast<uint64_t>(end));
  }
  // Nearly normal, with a standard deviation of about 1: a sum of 12 numbers of
  // 16 bits, without rounding.
  double Normal() {
    int64_t sum = 0;
    for (int i = 0; i < 3; ++i) {
      const uint64_t bits = Next();
      for (int k = 0; k < 4; ++k) {
        sum += static_cast<int64_t>(bits >> (16 * k) & 0xFFFF);
      }
    }
    return std::ldexp(static_cast<double>(sum - 6 * 0xFFFF), -16);
  }

 private:
  uint64_t state_;
};

// Columns of a row of the table.
using Hashes = std::vector<std::string>;
// All rows, by name.
using Table = std::map<std::string, Hashes>;

// Around the range of codes: ordinary numbers, ties, and what lies far outside;
// with `specials` what no ordinary tensor has.
std::vector<uint8_t> Reals(ElementType type, int64_t count, double scale,
                           bool specials, Random* random) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double special[] = {std::nan(""), kInfinity,
                            -kInfinity,   0.0,
                            -0.0,         3e38,
                            -3e38,        std::ldexp(1, -149),
                            65504,        std::ldexp(-1, -126),
                            1e300,        std::ldexp(1, -24)};
  std::vector<uint8_t> reals(count * ElementSizeBytes(type));
  for (int64_t i = 0; i < count; ++i) {
    double value = random->Normal() * 40 * scale;
    switch (random->Below(16)) {
      case 0:
        if (specials) value = special[random->Below(std::size(special))];
        break;
      case 1:
        value = (random->Below(300) - 150 + 0.5) * scale;
        break;
      case 2:
        value = random->Normal() * 40000 * scale;
        break;
      case 3:
        value = random->Normal() * scale;
        break;
      default:
        break;
    }
    StoreReal(type, value, reals.data(), i);
  }
  return reals;
}

// Correlated features [rows, columns], each with a power of its own.
std::vector<uint8_t> Features(ElementType type, int64_t rows, int64_t columns,
                              Random* random) {
  std::vector<uint8_t> reals(rows * columns * ElementSizeBytes(type));
  for (int64_t row = 0; row < rows; ++row) {
    const double signal = random->Normal();
    for (int64_t k = 0; k < columns; ++k) {
      const double value = std::ldexp(random->Normal() + signal * (k % 3),
                                      static_cast<int>(k % 5) - 2);
      StoreReal(type, value, reals.data(), row * columns + k);
    }
  }
  return reals;
}

std::vector<float> Codebook(int entries) {
  std::vector<float> codebook;
  for (int i = 0; i < entries; ++i) {
    // Uneven, and without rounding.
    const int x = 2 * i - entries + 1;
    codebook.push_back(
        std::ldexp(static_cast<float>(x * (entries + (x < 0 ? -x : x))), -10));
  }
  return codebook;
}

// Scales around `scale`, and every kind of scale and zero point that the format
// may have.
Encoding MakeGolden(const FormatInfo& format, const BlockLayout& layout,
                    const LayoutCase& layout_case, double scale,
                    Random* random) {
  Encoding encoding;
  encoding.format = format.format;
  encoding.block_size = layout_case.block;
  encoding.scale_shape.assign(layout.scale_shape().begin(),
                              layout.scale_shape().end());
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  encoding.scale_type = format.scale_type == ScaleType::kDefault
                            ? ScaleType::kFloat32
                            : format.scale_type;
  if (format.kind == CodeKind::kCodebook && format.codebook.empty()) {
    encoding.codebook = Codebook((1 << format.bits) - 1);
    encoding.qmax = static_cast<int32_t>(encoding.codebook.size()) - 1;
  }
  const bool has_zero_points = format.kind == CodeKind::kInteger &&
                               !HasScaleCodes(encoding.scale_type) &&
                               !IsWideInteger(format);
  if (HasOuterScales(encoding.scale_type)) {
    encoding.outer_scale = {static_cast<float>(scale / 16)};
  }
  for (int64_t i = 0; i < layout.scale_count(); ++i) {
    switch (encoding.scale_type) {
      case ScaleType::kE8m0: {
        const int kind = random->Below(10);
        encoding.scale_code.push_back(
            kind == 0 ? kE8m0Nan
                      : static_cast<uint8_t>(kind == 1 ? random->Below(255)
                                                       : 118 + kind));
        break;
      }
      case ScaleType::kE4m3:
        // Normal numbers of E4M3FN.
        encoding.scale_code.push_back(
            static_cast<uint8_t>(8 + random->Below(0x7F - 8)));
        break;
      case ScaleType::kInteger:
        encoding.scale_code.push_back(
            static_cast<uint8_t>(1 + random->Below(kMaxIntegerScale)));
        break;
      default: {
        // One after the other: compilers differ in the order of arguments.
        const int mantissa = 1024 + random->Below(1024);
        const int exponent = random->Below(5) - 12;
        encoding.scale.push_back(
            static_cast<float>(scale * std::ldexp(mantissa, exponent)));
      }
    }
    if (has_zero_points) {
      encoding.zero_point.push_back(
          format.qmin + random->Below(format.qmax - format.qmin + 1));
    }
  }
  EXPECT_TRUE(DeriveScales(&encoding).ok());
  EXPECT_TRUE(ValidateEncoding(encoding).ok()) << ValidateEncoding(encoding);
  return encoding;
}

void AddCounts(const QuantizeCounts& counts, Hash* hash) {
  hash->AddAll<int64_t>({counts.total, counts.clipped_low, counts.clipped_high,
                         counts.nan, counts.positive_infinity,
                         counts.negative_infinity});
}

void AddSums(const ErrorSums& sums, Hash* hash) {
  hash->AddAll<int64_t>({sums.count, sums.non_finite, sums.clipped_low,
                         sums.clipped_high, sums.zero_flushed});
  hash->AddAll<double>(
      {sums.squared_error, sums.absolute_error, sums.relative_error,
       sums.signal, sums.reconstructed, sums.product, sums.max_absolute_error,
       sums.max_relative_error, sums.SqnrDb(), sums.CosineSimilarity()});
}

void AddDistribution(const ErrorDistribution& distribution, Hash* hash) {
  hash->Add(distribution.kl_divergence);
  hash->Add(distribution.zero);
  hash->Add(int64_t{distribution.first_exponent});
  hash->AddAll(distribution.count);
}

void AddEncoding(const Encoding& encoding, Hash* hash) {
  hash->AddAll(encoding.scale);
  hash->AddAll(encoding.zero_point);
  hash->AddAll(encoding.real_zero_point);
  hash->AddAll(encoding.scale_code);
  hash->AddAll(encoding.outer_scale);
  hash->Add(int64_t{encoding.qmin});
  hash->Add(int64_t{encoding.qmax});
  hash->Add(encoding.degenerate_count);
}

void AddPrediction(const Prediction& prediction, Hash* hash) {
  hash->Add(static_cast<int64_t>(prediction.count));
  hash->AddAll<double>({prediction.squared_error, prediction.squared_error_low,
                        prediction.squared_error_high, prediction.signal,
                        prediction.SqnrDb()});
}

// Adds codes and counts of the elements under each policy for NaN, and returns
// those of the default.
std::vector<uint8_t> AddCodes(const Encoding& encoding,
                              const BlockLayout& layout, ElementType type,
                              const std::vector<uint8_t>& reals, Hash* hash) {
  std::vector<uint8_t> first;
  for (const NanPolicy policy : {NanPolicy::kDefault, NanPolicy::kZeroPoint,
                                 NanPolicy::kQmin, NanPolicy::kReject}) {
    const int64_t count = layout.element_count();
    std::vector<uint8_t> codes(FindFormat(encoding.format)->SizeBytes(count));
    QuantizeCounts counts;
    const absl::Status status =
        Quantize(encoding, layout, type, policy, 0, count, reals.data(),
                 codes.data(), &counts, nullptr);
    hash->Add(ErrorReason(status));
    if (!status.ok()) continue;
    hash->Add(codes);
    AddCounts(counts, hash);
    if (policy == NanPolicy::kDefault) first = std::move(codes);
  }
  return first;
}

// For each type of elements: codes, what codes stand for, errors.
Hashes QuantizeRow(const FormatInfo& format, const LayoutCase& layout_case,
                   bool real_zero_points) {
  const BlockLayout layout = layout_case.Layout();
  const int64_t count = layout.element_count();
  Hashes row;
  for (const ElementType type : kAllElementTypes) {
    Random random(static_cast<uint64_t>(count) * 8 +
                  static_cast<uint64_t>(type));
    const double scale = 0.0625 * format.max_value / 127;
    Encoding encoding = MakeGolden(format, layout, layout_case, scale, &random);
    if (real_zero_points) {
      encoding.zero_points_are_real = true;
      for (const int32_t zero_point : encoding.zero_point) {
        encoding.real_zero_point.push_back(
            static_cast<float>(zero_point) +
            (zero_point < format.qmax ? 0.25f : 0.0f));
      }
      encoding.zero_point.clear();
    }
    const auto ordinary = Reals(type, count, scale, false, &random);
    const auto strange = Reals(type, count, scale, true, &random);

    Hash codes;
    AddCodes(encoding, layout, type, ordinary, &codes);
    std::vector<uint8_t> bytes =
        AddCodes(encoding, layout, type, strange, &codes);
    row.push_back(codes.Text());

    Hash restored;
    for (int round = 0; round < 2; ++round) {
      std::vector<uint8_t> reals(count * ElementSizeBytes(type));
      Dequantize(encoding, layout, type, 0, count, bytes.data(), reals.data(),
                 nullptr);
      restored.AddReals(type, reals);
      // Then codes that nobody made.
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Next());
    }
    row.push_back(restored.Text());

    Hash errors;
    for (const auto* const reals : {&ordinary, &strange}) {
      EvaluateOptions options;
      options.per_scale_index = true;
      options.with_distribution = reals == &strange;
      Evaluator evaluator(encoding, layout, type, options);
      evaluator.Update(0, count, reals->data(), nullptr);
      AddSums(evaluator.overall(), &errors);
      if (options.with_distribution) {
        AddDistribution(evaluator.distribution(), &errors);
      }
      for (const ErrorSums& sums : evaluator.per_scale_index()) {
        AddSums(sums, &errors);
      }
    }
    row.push_back(errors.Text());
  }
  return row;
}

void AddQuantizeRows(Table* table) {
  const LayoutCase layouts[] = {
      {{2, 1100}, {}},    {{5, 33}, {1, 0}},       {{4, 75}, {1, 32}},
      {{12, 37}, {0, 1}}, {{5, 7, 11}, {2, 3, 4}}, {{6, 1, 5}, {1, 1, 1}},
  };
  for (const FormatInfo& format : AllFormats()) {
    for (const LayoutCase& layout : layouts) {
      (*table)[absl::StrCat("quantize ", format.name, " ", layout.Name())] =
          QuantizeRow(format, layout, false);
    }
    if (format.kind == CodeKind::kInteger && !IsWideInteger(format) &&
        format.scale_type == ScaleType::kDefault) {
      (*table)[absl::StrCat("quantize ", format.name, " ", layouts[2].Name(),
                            " real zero points")] =
          QuantizeRow(format, layouts[2], true);
    }
  }
}

// What a spec makes of a tensor: from its statistics, from the tensor at hand,
// and in one pass. "-" if there is no such spec.
std::string CalibrateHash(const EncodingSpec& spec,
                          const LayoutCase& layout_case, ElementType type,
                          const Importance* importance = nullptr) {
  Hash hash;
  // Without random tails: those of a search would be all that counts.
  Random random(static_cast<uint64_t>(type));
  const BlockLayout plain = layout_case.Layout();
  const int64_t count = plain.element_count();
  std::vector<uint8_t> reals(count * ElementSizeBytes(type));
  for (int64_t i = 0; i < count; ++i) {
    StoreReal(type, random.Normal() + 0.25, reals.data(), i);
  }
  EncodingSpec filled = spec;
  filled.block_size = layout_case.block;
  if (!ValidateSpec(filled).ok()) return "-";
  const absl::StatusOr<EncodingSpec> resolved =
      ResolveSpec(filled, layout_case.shape);
  if (!resolved.ok()) return "-";
  const BlockLayout layout =
      *BlockLayout::Create(layout_case.shape, resolved->block_size);

  const auto add = [&](const absl::StatusOr<Calibration>& calibration) {
    hash.Add(ErrorReason(calibration.status()));
    if (!calibration.ok()) return;
    AddEncoding(calibration->encoding, &hash);
    if (calibration->prediction.has_value()) {
      AddPrediction(*calibration->prediction, &hash);
    }
  };
  TensorStatistics statistics(
      layout.scale_count(),
      importance == nullptr ? DefaultMantissaBits(layout.scale_count()) : 0);
  statistics.Update(layout, type, 0, count, reals.data(), nullptr);
  if (importance == nullptr) {
    add(Calibrate(*resolved, layout, statistics, {}, nullptr));
  }
  const HeldTensor held(layout, type, count, {reals.data()});
  add(Calibrate(*resolved, layout, statistics.WithoutHistograms(), {}, nullptr,
                StopToken(), &held, {}, importance));
  std::vector<float> outer_maximum;
  if (HasOuterScales(EffectiveScaleType(*resolved))) {
    const absl::StatusOr<BlockLayout> outer_layout = OuterLayout(
        EncodingWithoutScales(*resolved, layout, false), layout.scale_shape());
    EXPECT_TRUE(outer_layout.ok());
    outer_maximum.assign(outer_layout->scale_count(), 8.0f);
  }
  if (BlockQuantizer::Takes(*resolved, layout, !outer_maximum.empty())) {
    absl::StatusOr<std::unique_ptr<BlockQuantizer>> quantizer =
        BlockQuantizer::Create(*resolved, layout, type, NanPolicy::kDefault,
                               outer_maximum, importance);
    hash.Add(ErrorReason(quantizer.status()));
    if (quantizer.ok()) {
      std::vector<uint8_t> codes(FindFormat(spec.format)->SizeBytes(count));
      hash.Add(ErrorReason(
          (*quantizer)->Add(0, count, reals.data(), codes.data(), nullptr)));
      hash.Add(codes);
      AddEncoding((*quantizer)->encoding(), &hash);
      AddCounts((*quantizer)->counts(), &hash);
    }
  }
  return hash.Text();
}

// Ranges that searches try: few, so that this is fast.
constexpr int kSteps = 10;

// Types by column, then methods, then symmetries and options.
Hashes CalibrateRow(const FormatInfo& format, const LayoutCase& layout) {
  Hashes row;
  EncodingSpec spec;
  spec.format = format.format;
  if (format.kind == CodeKind::kCodebook && format.codebook.empty()) {
    spec.codebook = Codebook((1 << format.bits) - 1);
  }
  for (const ElementType type : kAllElementTypes) {
    row.push_back(CalibrateHash(spec, layout, type));
  }
  for (const CalibrationMethod method :
       {CalibrationMethod::kPercentile, CalibrationMethod::kMse,
        CalibrationMethod::kSqnr, CalibrationMethod::kEntropy,
        CalibrationMethod::kFixedRange, CalibrationMethod::kBestOf}) {
    EncodingSpec other = spec;
    other.method = method;
    other.search_steps = kSteps;
    other.tail_fraction = 0.01;
    if (method == CalibrationMethod::kFixedRange) {
      other.range_min = -1.5;
      other.range_max = 2.25;
    }
    if (method == CalibrationMethod::kBestOf) {
      other.methods = {CalibrationMethod::kMinMax,
                       CalibrationMethod::kPercentile};
    }
    if (method != CalibrationMethod::kMse &&
        method != CalibrationMethod::kSqnr &&
        method != CalibrationMethod::kEntropy) {
      other.search_steps = 0;
    }
    row.push_back(CalibrateHash(other, layout, ElementType::kFloat32));
  }
  EncodingSpec mse = spec;
  mse.method = CalibrationMethod::kMse;
  mse.search_steps = kSteps;
  row.push_back(CalibrateHash(mse, layout, ElementType::kFloat64));
  std::vector<double> weights;
  for (int64_t k = 0; k < layout.shape[1]; ++k) {
    weights.push_back(static_cast<double>(k % 7));
  }
  const absl::StatusOr<Importance> importance =
      Importance::Create(layout.shape, 1, weights);
  EXPECT_TRUE(importance.ok());
  row.push_back(
      CalibrateHash(mse, layout, ElementType::kFloat32, &*importance));

  for (int i = 0; i < 8; ++i) {
    EncodingSpec other = spec;
    if (i < 5) other.symmetry = static_cast<Symmetry>(i + 1);
    if (i == 5) other.exclude_zero = true;
    if (i == 6) other.power_of_two_scale = true;
    if (i == 7) other.real_zero_point = true;
    if (i == 5 || i == 7) other.symmetry = Symmetry::kAsymmetric;
    row.push_back(CalibrateHash(other, layout, ElementType::kFloat32));
  }
  return row;
}

void AddCalibrateRows(Table* table) {
  const LayoutCase layouts[] = {
      {{7, 60}, {}}, {{4, 75}, {1, 32}}, {{9, 40}, {1, 0}}};
  for (const FormatInfo& format : AllFormats()) {
    for (const LayoutCase& layout : layouts) {
      (*table)[absl::StrCat("calibrate ", format.name, " ", layout.Name())] =
          CalibrateRow(format, layout);
    }
  }
}

// Extremes and counts, histograms of two widths, moments and the Gram matrix of
// features, errors against another tensor.
Hashes StatisticsRow(ElementType type, int64_t rows, int64_t columns) {
  Hashes row;
  Random random(static_cast<uint64_t>(rows));
  const int64_t count = rows * columns;
  const std::vector<int64_t> shape = {rows, columns};
  const auto reals = Reals(type, count, 0.01, true, &random);
  const std::vector<int64_t> block = {1, 32};
  const BlockLayout layout = *BlockLayout::Create(shape, block);
  for (const int mantissa_bits : {0, 3, 7}) {
    Hash hash;
    TensorStatistics statistics(layout.scale_count(), mantissa_bits);
    statistics.Update(layout, type, 0, count, reals.data(), nullptr);
    const ElementCounts& counts = statistics.counts();
    hash.AddAll<int64_t>({counts.total, counts.nan, counts.positive_infinity,
                          counts.negative_infinity, counts.zero});
    for (const Extremes& extremes : statistics.extremes()) {
      hash.AddAll<double>({extremes.min, extremes.max});
    }
    for (const Histogram& histogram : statistics.histograms()) {
      histogram.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
        hash.AddAll<int64_t>(
            {key, static_cast<int64_t>(bin.count),
             static_cast<int64_t>(bin.low_sum),
             static_cast<int64_t>(absl::Uint128Low64(bin.low_square_sum))});
      });
      const Moments moments = HistogramMoments(histogram);
      hash.AddAll<double>({moments.sum, moments.square_sum});
    }
    row.push_back(hash.Text());
  }
  Hash moments_hash;
  const absl::StatusOr<FeatureAxis> axis = FeatureAxis::Create(shape, 1);
  EXPECT_TRUE(axis.ok());
  FeatureMoments moments(columns);
  moments.Update(*axis, type, 0, count, reals.data(), nullptr);
  for (int64_t k = 0; k < columns; ++k) {
    moments_hash.AddAll<int64_t>({moments.count(k), moments.left_out(k)});
    moments_hash.AddAll<double>({moments.sum(k), moments.square_sum(k)});
  }
  row.push_back(moments_hash.Text());

  Hash gram_hash;
  const auto features = Features(type, rows, columns, &random);
  absl::StatusOr<GramState> gram =
      GramState::Create(GramState::ExponentsFor(GramState::LargestMagnitudes(
                            type, rows, columns, features.data())),
                        GramState::PartSize(columns));
  EXPECT_TRUE(gram.ok());
  gram->Update(type, rows, features.data(), nullptr);
  gram->Update(type, rows, reals.data(), nullptr);
  gram->Finish(nullptr);
  const GramState::Parts parts = gram->ToParts();
  gram_hash.AddAll<int64_t>({parts.rows, parts.left_out_rows, parts.clipped});
  gram_hash.AddAll(parts.code_sums);
  gram_hash.AddAll(gram->Dense());
  row.push_back(gram_hash.Text());

  Hash comparison_hash;
  Comparison comparison(type, /*with_distribution=*/true);
  const auto pairs = Reals(type, 2 * count, 0.01, true, &random);
  comparison.Update(0, count, pairs.data(), nullptr);
  AddSums(comparison.overall(), &comparison_hash);
  AddDistribution(comparison.distribution(), &comparison_hash);
  row.push_back(comparison_hash.Text());
  return row;
}

// Codes that make up for one another's errors, and what they cost at the
// layer's output.
Hashes LayerRow(const FormatInfo& format, ElementType type) {
  constexpr int64_t kRows = 26;
  constexpr int64_t kColumns = 48;
  Random random(static_cast<uint64_t>(format.bits));
  const auto inputs =
      Features(ElementType::kFloat32, 3 * kColumns, kColumns, &random);
  absl::StatusOr<GramState> gram = GramState::Create(
      GramState::ExponentsFor(GramState::LargestMagnitudes(
          ElementType::kFloat32, 3 * kColumns, kColumns, inputs.data())),
      GramState::PartSize(kColumns));
  EXPECT_TRUE(gram.ok());
  gram->Update(ElementType::kFloat32, 3 * kColumns, inputs.data(), nullptr);
  gram->Finish(nullptr);
  Hashes row;
  const LayoutCase layout_case = {{kRows, kColumns}, {1, 16}};
  const BlockLayout layout = layout_case.Layout();
  const double scale = 0.25 / (format.qmax == 0 ? 1 : format.max_value);
  const Encoding encoding =
      MakeGolden(format, layout, layout_case, scale, &random);
  const auto reals = Features(type, kRows, kColumns, &random);
  for (const ColumnOrder order :
       {ColumnOrder::kFallingDiagonal, ColumnOrder::kNatural}) {
    Hash hash;
    std::vector<double> dense = gram->Dense();
    CompensationOptions options;
    options.order = order;
    const absl::StatusOr<CompensationFactor> factor =
        CompensationFactor::Create(kColumns,
                                   {GramBlock{kColumns, absl::MakeSpan(dense)}},
                                   options, nullptr);
    EXPECT_TRUE(factor.ok());
    std::vector<uint8_t> codes(format.SizeBytes(kRows * kColumns));
    std::vector<double> output_errors(kRows);
    QuantizeCounts counts;
    EXPECT_TRUE(QuantizeCompensated(*factor, encoding, layout, type,
                                    NanPolicy::kDefault, 0, kRows, reals.data(),
                                    codes.data(), output_errors.data(), &counts,
                                    nullptr)
                    .ok());
    hash.Add(codes);
    AddCounts(counts, &hash);
    const ElementType arithmetic = ArithmeticType(type);
    std::vector<uint8_t> restored(kRows * kColumns *
                                  ElementSizeBytes(arithmetic));
    Dequantize(encoding, layout, arithmetic, 0, kRows * kColumns, codes.data(),
               restored.data(), nullptr);
    const absl::StatusOr<OutputGram> output =
        OutputGram::Create(*gram, nullptr);
    EXPECT_TRUE(output.ok());
    for (const uint8_t* other :
         {static_cast<const uint8_t*>(nullptr),
          static_cast<const uint8_t*>(restored.data())}) {
      OutputPower power;
      EXPECT_TRUE(AddOutputPower(*output, type, kRows, reals.data(), other,
                                 &power, nullptr)
                      .ok());
      hash.AddAll<double>({power.exact, power.diagonal});
    }
    row.push_back(hash.Text());
  }
  return row;
}

void AddOtherRows(Table* table) {
  for (const ElementType type : kAllElementTypes) {
    for (const std::pair<int64_t, int64_t>& shape :
         {std::pair<int64_t, int64_t>{7, 75}, {40, 33}, {150, 9}}) {
      (*table)[absl::StrCat("statistics ", ElementTypeName(type), " ",
                            shape.first, "x", shape.second)] =
          StatisticsRow(type, shape.first, shape.second);
    }
    for (const char* name : {"int2", "int4", "uint8", "int16", "int32",
                             "float8_e4m3fn", "mxfp4_e2m1", "nvfp4", "nf4"}) {
      (*table)[absl::StrCat("layer ", name, " ", ElementTypeName(type))] =
          LayerRow(*FindFormatByName(name), type);
    }
  }
}

Table Compute() {
  Table table;
  AddQuantizeRows(&table);
  AddCalibrateRows(&table);
  AddOtherRows(&table);
  return table;
}

Table Read() {
  Table table;
  std::ifstream in(OraclesFolder() + "/" + kFile);
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(line, absl::MaxSplits(": ", 1));
    table[parts.first] = absl::StrSplit(parts.second, ' ');
  }
  return table;
}

void Write(const Table& table, const std::string& path) {
  std::ofstream out(path);
  out << "# Of core's results over fixed inputs: see tests/core/golden_test.cc."
      << "\n";
  for (const auto& [name, hashes] : table) {
    out << name << ": " << absl::StrJoin(hashes, " ") << "\n";
  }
}

TEST(GoldenTest, EveryTargetGivesTheResultsOfAllMachines) {
  const Table want = Read();
  int64_t hashes = 0;
  for (const auto& row : want) {
    hashes += static_cast<int64_t>(row.second.size()) -
              std::count(row.second.begin(), row.second.end(), "-");
  }
  EXPECT_GT(hashes, 5000);
  ForEachSimdTarget([&] {
    const Table got = Compute();
    EXPECT_EQ(got.size(), want.size());
    int64_t wrong = 0;
    for (const auto& [name, row] : got) {
      const auto found = want.find(name);
      if (found == want.end()) {
        ADD_FAILURE() << kFile << " has no row for " << name;
        continue;
      }
      EXPECT_EQ(row.size(), found->second.size()) << name;
      for (size_t k = 0; k < std::min(row.size(), found->second.size()); ++k) {
        if (row[k] != found->second[k]) ++wrong;
        // The first few say what it is about.
        if (row[k] != found->second[k] && wrong <= 10) {
          ADD_FAILURE() << name << ", column " << k << ": got " << row[k]
                        << ", expected " << found->second[k];
        }
      }
    }
    EXPECT_EQ(wrong, 0) << "hashes of " << hashes;
  });
  std::printf("%s: %d hashes on %s\n", kFile, static_cast<int>(hashes),
              absl::StrJoin(AvailableSimdTargets(), ", ").c_str());
  // How the file is made anew when results are to change.
  if (const char* path = std::getenv("QUANTD_TEST_GOLDEN_OUT");
      path != nullptr) {
    Write(Compute(), path);
  }
}

}  // namespace
}  // namespace quantd::core
