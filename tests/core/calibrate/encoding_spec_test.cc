#include "core/calibrate/encoding_spec.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/errors.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"

namespace quantd::core {
namespace {

// The reason for which a spec of that format is refused after a change; empty
// for a valid one.
std::string Reason(const char* format,
                   const std::function<void(EncodingSpec&)>& change) {
  EncodingSpec spec = Spec(format);
  change(spec);
  return std::string(ErrorReason(ValidateSpec(spec)));
}

TEST(EncodingSpecTest, TakesEveryFormatAsItIs) {
  for (const FormatInfo& format : AllFormats()) {
    EncodingSpec spec;
    spec.format = format.format;
    if (format.kind == CodeKind::kCodebook && format.codebook.empty()) {
      EXPECT_EQ(ErrorReason(ValidateSpec(spec)), "CODEBOOK_INVALID");
      spec.codebook = {-1, 0, 1};
    }
    EXPECT_TRUE(ValidateSpec(spec).ok()) << format.name;
  }
  EXPECT_EQ(ErrorReason(ValidateSpec(EncodingSpec{})), "FORMAT_UNKNOWN");
}

TEST(EncodingSpecTest, TakesInt32WithSymmetricRangesThatAreNotSearched) {
  for (const Symmetry symmetry : {Symmetry::kStrict, Symmetry::kFullRange,
                                  Symmetry::kHalfStep, Symmetry::kAimet}) {
    EXPECT_EQ(Reason("int32",
                     [&](EncodingSpec& s) {
                       s.symmetry = symmetry;
                       s.method = CalibrationMethod::kPercentile;
                     }),
              "");
  }
  EXPECT_EQ(Reason("int32",
                   [](EncodingSpec& s) { s.symmetry = Symmetry::kAsymmetric; }),
            "SYMMETRY_INVALID");
  EXPECT_EQ(Reason("int32",
                   [](EncodingSpec& s) { s.unsigned_if_non_negative = true; }),
            "SYMMETRY_INVALID");
  for (const CalibrationMethod method :
       {CalibrationMethod::kMse, CalibrationMethod::kSqnr,
        CalibrationMethod::kEntropy}) {
    EXPECT_EQ(Reason("int32", [&](EncodingSpec& s) { s.method = method; }),
              "METHOD_INVALID");
  }
  EXPECT_EQ(Reason("int32",
                   [](EncodingSpec& s) {
                     s.method = CalibrationMethod::kBestOf;
                     s.methods = {CalibrationMethod::kMinMax};
                   }),
            "METHOD_INVALID");
}

TEST(EncodingSpecTest, TakesRealZeroPointsOfRangesThatAreNotSearched) {
  const auto reason = [](const char* format, CalibrationMethod method) {
    return Reason(format, [&](EncodingSpec& s) {
      s.real_zero_point = true;
      s.method = method;
      s.range_max = 1;
    });
  };
  for (const CalibrationMethod method :
       {CalibrationMethod::kDefault, CalibrationMethod::kMinMax,
        CalibrationMethod::kPercentile, CalibrationMethod::kFixedRange,
        CalibrationMethod::kMovingAverage}) {
    EXPECT_EQ(reason("uint8", method), "");
    EXPECT_EQ(reason("int8", method), "SYMMETRY_INVALID");
    EXPECT_EQ(reason("float4_e2m1", method), "SYMMETRY_INVALID");
  }
  for (const CalibrationMethod method :
       {CalibrationMethod::kMse, CalibrationMethod::kSqnr,
        CalibrationMethod::kEntropy}) {
    EXPECT_EQ(reason("uint8", method), "METHOD_INVALID");
  }
}

TEST(EncodingSpecTest, TakesAFixedRangeForEachScale) {
  EncodingSpec spec = Spec("uint8");
  spec.method = CalibrationMethod::kFixedRange;
  spec.block_size = {1, 0};
  spec.scale_range_min = {-1, 0};
  spec.scale_range_max = {1, 2};
  EXPECT_TRUE(ValidateSpec(spec).ok());
  EXPECT_TRUE(ResolveSpec(spec, {2, 5}).ok());
  const auto status = ResolveSpec(spec, {3, 5}).status();
  EXPECT_EQ(ErrorReason(status), "METHOD_INVALID");
  EXPECT_EQ(ErrorField(status), "scale_range_min");
  const auto reason = [&](const std::function<void(EncodingSpec&)>& change) {
    EncodingSpec changed = spec;
    change(changed);
    return std::string(ErrorReason(ValidateSpec(changed)));
  };
  EXPECT_EQ(reason([](EncodingSpec& s) { s.scale_range_max.pop_back(); }),
            "METHOD_INVALID");
  EXPECT_EQ(reason([](EncodingSpec& s) { s.scale_range_min[1] = 2; }),
            "METHOD_INVALID");
  EXPECT_EQ(reason([](EncodingSpec& s) { s.scale_range_max[0] = NAN; }),
            "METHOD_INVALID");
  EXPECT_EQ(reason([](EncodingSpec& s) { s.method = CalibrationMethod::kMse; }),
            "METHOD_INVALID");
  EXPECT_EQ(
      reason([](EncodingSpec& s) {
        s.method = CalibrationMethod::kBestOf;
        s.methods = {CalibrationMethod::kMse, CalibrationMethod::kFixedRange};
      }),
      "");
}

TEST(EncodingSpecTest, RefusesUnknownEnums) {
  const auto reason = [](const std::function<void(EncodingSpec&)>& change) {
    return Reason("int8", change);
  };
  const std::string unknown = "ENUM_UNKNOWN";
  for (const int value : {-1, 99}) {
    EXPECT_EQ(reason([&](EncodingSpec& s) {
                s.symmetry = static_cast<Symmetry>(value);
              }),
              unknown);
    EXPECT_EQ(reason([&](EncodingSpec& s) {
                s.method = static_cast<CalibrationMethod>(value);
              }),
              unknown);
    EXPECT_EQ(reason([&](EncodingSpec& s) {
                s.scale_type = static_cast<ScaleType>(value);
              }),
              unknown);
    EXPECT_EQ(reason([&](EncodingSpec& s) {
                s.mx_scale_rule = static_cast<MxScaleRule>(value);
              }),
              unknown);
    EXPECT_EQ(
        reason([&](EncodingSpec& s) { s.tail = static_cast<Tail>(value); }),
        unknown);
    EXPECT_EQ(reason([&](EncodingSpec& s) {
                s.objective = static_cast<Objective>(value);
              }),
              unknown);
    EXPECT_EQ(reason([&](EncodingSpec& s) {
                s.methods = {static_cast<CalibrationMethod>(value)};
              }),
              unknown);
  }
}

TEST(EncodingSpecTest, RefusesASymmetryThatTheFormatDoesNotHave) {
  const std::string invalid = "SYMMETRY_INVALID";
  const auto with = [](Symmetry symmetry) {
    return [symmetry](EncodingSpec& s) { s.symmetry = symmetry; };
  };
  for (const Symmetry symmetry : {Symmetry::kStrict, Symmetry::kFullRange,
                                  Symmetry::kHalfStep, Symmetry::kAimet}) {
    EXPECT_EQ(Reason("uint8", with(symmetry)), invalid);
    EXPECT_EQ(Reason("int8", with(symmetry)), "");
  }
  for (const char* format : {"float8_e5m2", "nf4", "nvfp4", "mxfp4_e2m1"}) {
    EXPECT_EQ(Reason(format, with(Symmetry::kAsymmetric)), invalid);
    EXPECT_EQ(Reason(format, with(Symmetry::kFullRange)), invalid);
    EXPECT_EQ(Reason(format, with(Symmetry::kStrict)), "");
    EXPECT_EQ(Reason(format, [](EncodingSpec& s) { s.exclude_zero = true; }),
              invalid);
  }
  EXPECT_EQ(Reason("int8", [](EncodingSpec& s) { s.exclude_zero = true; }),
            invalid);
  EXPECT_EQ(Reason("uint8", [](EncodingSpec& s) { s.exclude_zero = true; }),
            "");
  for (const char* format : {"uint8", "float8_e5m2", "mxint8", "lpbq", "nf4"}) {
    EXPECT_EQ(
        Reason(format,
               [](EncodingSpec& s) { s.unsigned_if_non_negative = true; }),
        invalid)
        << format;
  }
}

TEST(EncodingSpecTest, RefusesBlockSizesThatContradictThemselves) {
  const std::string invalid = "BLOCK_SIZE_INVALID";
  const auto with = [](std::vector<int64_t> block_size) {
    return [block_size](EncodingSpec& s) { s.block_size = block_size; };
  };
  EXPECT_EQ(Reason("int8", with({1, -2})), invalid);
  EXPECT_EQ(Reason("int8", with(std::vector<int64_t>(17, 1))), invalid);
  const auto outer = [](std::vector<int64_t> inner_size,
                        std::vector<int64_t> outer_size) {
    return [=](EncodingSpec& s) {
      s.block_size = inner_size;
      s.outer_block_size = outer_size;
    };
  };
  EXPECT_EQ(Reason("nvfp4", outer({1, 16}, {1, 40})), invalid);
  EXPECT_EQ(Reason("nvfp4", outer({1, 16}, {1, -16})), invalid);
  EXPECT_EQ(Reason("nvfp4", outer({1, 16}, {32})), invalid);
  EXPECT_EQ(Reason("nvfp4", outer({1, 16}, {4, 48})), "");
  EXPECT_EQ(Reason("nvfp4", outer({1, 16}, {1, 0})), "");
  EXPECT_EQ(Reason("int8",
                   [](EncodingSpec& s) {
                     s.granularity = Granularity{0, -4};
                   }),
            invalid);
  EXPECT_EQ(Reason("int8",
                   [](EncodingSpec& s) {
                     s.granularity = Granularity{0, 4};
                     s.block_size = {1, 0};
                   }),
            invalid);
}

TEST(EncodingSpecTest, RefusesScaleTypesThatDoNotApply) {
  const std::string invalid = "SCALE_TYPE_INVALID";
  const auto with = [](ScaleType type) {
    return [type](EncodingSpec& s) { s.scale_type = type; };
  };
  EXPECT_EQ(Reason("mxfp8_e4m3", with(ScaleType::kFloat32)), invalid);
  EXPECT_EQ(Reason("mxfp8_e4m3", with(ScaleType::kE8m0)), "");
  EXPECT_EQ(Reason("lpbq", with(ScaleType::kE4m3)), invalid);
  EXPECT_EQ(Reason("int8", with(ScaleType::kE8m0)), "");
  EXPECT_EQ(Reason("int8", with(ScaleType::kFloat16)), "");
  EXPECT_EQ(Reason("uint8", with(ScaleType::kBfloat16)), "");
  EXPECT_EQ(Reason("uint8", with(ScaleType::kE8m0)), invalid);
  const auto rule = [](EncodingSpec& s) {
    s.mx_scale_rule = MxScaleRule::kCeil;
  };
  EXPECT_EQ(Reason("int8", rule), invalid);
  EXPECT_EQ(Reason("mxint8", rule), "");
  const auto power = [](EncodingSpec& s) { s.power_of_two_scale = true; };
  EXPECT_EQ(Reason("uint8", power), "");
  EXPECT_EQ(Reason("mxint8", power), invalid);
  EXPECT_EQ(Reason("nvfp4", power), invalid);
  const auto most = [](int value) {
    return [value](EncodingSpec& s) { s.integer_scale_max = value; };
  };
  EXPECT_EQ(Reason("int8", most(16)), invalid);
  EXPECT_EQ(Reason("lpbq", most(128)), "");
  EXPECT_EQ(Reason("lpbq", most(129)), invalid);
  EXPECT_EQ(Reason("lpbq", most(-1)), invalid);
  EXPECT_EQ(Reason("int8", [](EncodingSpec& s) { s.outer_block_size = {0}; }),
            invalid);
}

TEST(EncodingSpecTest, RefusesCodebooksThatAreNone) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::string invalid = "CODEBOOK_INVALID";
  const auto with = [](std::vector<float> codebook) {
    return [codebook](EncodingSpec& s) { s.codebook = codebook; };
  };
  EXPECT_EQ(Reason("codebook2", with({0, 1, 2, 3})), "");
  EXPECT_EQ(Reason("codebook2", with({0, 1, 2, 3, 4})), invalid);
  EXPECT_EQ(Reason("codebook2", with({1})), invalid);
  EXPECT_EQ(Reason("codebook2", with({1, 1})), invalid);
  EXPECT_EQ(Reason("codebook2", with({1, 0})), invalid);
  EXPECT_EQ(Reason("codebook2", with({0, nan})), invalid);
  EXPECT_EQ(Reason("codebook2", with({nan, 0})), invalid);
  EXPECT_EQ(Reason("codebook2", with({0, infinity})), invalid);
  EXPECT_EQ(Reason("nf4", with({0, 1})), invalid);
  EXPECT_EQ(Reason("int8", with({0, 1})), invalid);
}

TEST(EncodingSpecTest, SaturatesWhereThereIsNothingElse) {
  const auto with = [](EncodingSpec& s) { s.no_saturation = true; };
  for (const char* format : {"float8_e4m3fn", "mxfp8_e5m2"}) {
    EXPECT_EQ(Reason(format, with), "") << format;
  }
  for (const char* format : {"float4_e2m1", "int8", "nf4", "mxfp6_e2m3"}) {
    EXPECT_EQ(Reason(format, with), "CODE_RANGE_INVALID") << format;
  }
}

TEST(EncodingSpecTest, RefusesParametersOutOfTheirRange) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const std::string invalid = "METHOD_INVALID";
  for (const double value : {-0.1, 1.0, nan, infinity}) {
    EXPECT_EQ(Reason("int8", [&](EncodingSpec& s) { s.tail_fraction = value; }),
              invalid);
  }
  for (const double value : {0.0, -1.0, nan, infinity}) {
    EXPECT_EQ(Reason("int8", [&](EncodingSpec& s) { s.gamma = value; }),
              invalid);
  }
  for (const int value : {-1, 1, 2049}) {
    EXPECT_EQ(Reason("int8", [&](EncodingSpec& s) { s.search_steps = value; }),
              invalid);
  }
  EXPECT_EQ(Reason("int8", [](EncodingSpec& s) { s.search_steps = 2048; }), "");
  EXPECT_EQ(Reason("uint8", [](EncodingSpec& s) { s.search_steps = 128; }), "");
  EXPECT_EQ(Reason("uint8", [](EncodingSpec& s) { s.search_steps = 129; }),
            invalid);
  for (const int value : {-1, 16385}) {
    EXPECT_EQ(Reason("int8", [&](EncodingSpec& s) { s.entropy_bins = value; }),
              invalid);
  }
  const auto range = [&](double low, double high) {
    return Reason("int8", [&](EncodingSpec& s) {
      s.method = CalibrationMethod::kFixedRange;
      s.range_min = low;
      s.range_max = high;
    });
  };
  EXPECT_EQ(range(-1, 2), "");
  EXPECT_EQ(range(1, 1), invalid);
  EXPECT_EQ(range(2, 1), invalid);
  EXPECT_EQ(range(nan, 1), invalid);
  EXPECT_EQ(range(0, nan), invalid);
  EXPECT_EQ(range(-infinity, 1), invalid);
  const auto best = [&](std::vector<CalibrationMethod> methods,
                        CalibrationMethod method) {
    return Reason("int8", [&](EncodingSpec& s) {
      s.method = method;
      s.methods = methods;
    });
  };
  using Method = CalibrationMethod;
  EXPECT_EQ(best({}, Method::kBestOf), invalid);
  EXPECT_EQ(best({Method::kMse}, Method::kMse), invalid);
  EXPECT_EQ(best({Method::kMse, Method::kBestOf}, Method::kBestOf), invalid);
  EXPECT_EQ(best({Method::kMse, Method::kMse}, Method::kBestOf), invalid);
  EXPECT_EQ(best({Method::kDefault, Method::kMinMax}, Method::kBestOf),
            invalid);
  EXPECT_EQ(best({Method::kFixedRange}, Method::kBestOf), invalid);
  EXPECT_EQ(best({Method::kMse, Method::kMinMax}, Method::kBestOf), "");
}

TEST(EncodingSpecTest, ResolvesBlocksForEveryRank) {
  const auto resolve = [](EncodingSpec spec, std::vector<int64_t> shape) {
    const auto resolved = ResolveSpec(spec, shape);
    EXPECT_TRUE(resolved.ok()) << resolved.status();
    // Resolving once is enough.
    const auto again = ResolveSpec(*resolved, shape);
    EXPECT_EQ(again->block_size, resolved->block_size);
    EXPECT_EQ(again->outer_block_size, resolved->outer_block_size);
    return *resolved;
  };
  using Blocks = std::vector<int64_t>;
  EXPECT_EQ(resolve(Spec("int8"), {3, 4}).block_size, Blocks{});
  EXPECT_EQ(resolve(Spec("mxfp4_e2m1"), {3, 64}).block_size, (Blocks{1, 32}));
  EXPECT_EQ(resolve(Spec("mxfp4_e2m1"), {64}).block_size, Blocks{32});
  EXPECT_EQ(resolve(Spec("mxfp4_e2m1"), {}).block_size, Blocks{});
  EXPECT_EQ(resolve(Spec("nvfp4"), {2, 3, 64}).block_size, (Blocks{1, 1, 16}));
  EXPECT_EQ(resolve(Spec("nvfp4"), {2, 3, 64}).outer_block_size, Blocks{});
  EXPECT_EQ(resolve(Spec("nf4"), {2, 64}).block_size, (Blocks{1, 64}));
  EXPECT_EQ(resolve(Spec("lpbq"), {2, 64}).block_size, (Blocks{1, 64}));
  EXPECT_EQ(resolve(Spec("lpbq"), {2, 3, 64}).outer_block_size,
            (Blocks{1, 0, 0}));
  EXPECT_EQ(resolve(Spec("lpbq"), {64}).outer_block_size, Blocks{});

  EncodingSpec spec = Spec("lpbq");
  spec.block_size = {4, 16};
  EXPECT_EQ(resolve(spec, {8, 64}).outer_block_size, (Blocks{4, 0}));
  spec.outer_block_size = {8, 32};
  EXPECT_EQ(resolve(spec, {8, 64}).outer_block_size, (Blocks{8, 32}));

  spec = Spec("mxint8");
  spec.granularity = Granularity{-1, 8};
  EXPECT_EQ(resolve(spec, {3, 64}).block_size, (Blocks{1, 8}));
  EXPECT_FALSE(resolve(spec, {3, 64}).granularity.has_value());
  // A rank below 2 is per tensor, whatever the format's own group.
  EXPECT_EQ(resolve(spec, {64}).block_size, Blocks{0});
  spec = Spec("int8");
  spec.granularity = Granularity{0, 0};
  EXPECT_EQ(resolve(spec, {3, 64}).block_size, (Blocks{1, 0}));
  EXPECT_EQ(resolve(spec, {64}).block_size, Blocks{});
}

TEST(EncodingSpecTest, RefusesBlocksOfAnotherRank) {
  const auto reason = [](const EncodingSpec& spec, std::vector<int64_t> shape) {
    return std::string(ErrorReason(ResolveSpec(spec, shape).status()));
  };
  EncodingSpec spec = Spec("int8");
  spec.block_size = {1, 0};
  EXPECT_EQ(reason(spec, {3, 4}), "");
  EXPECT_EQ(reason(spec, {3, 4, 5}), "BLOCK_SIZE_INVALID");
  spec = Spec("int8");
  spec.granularity = Granularity{2, 0};
  EXPECT_EQ(reason(spec, {3, 4, 5}), "");
  EXPECT_EQ(reason(spec, {3, 4}), "BLOCK_SIZE_INVALID");
  spec.granularity = Granularity{-3, 0};
  EXPECT_EQ(reason(spec, {3, 4}), "BLOCK_SIZE_INVALID");
  spec = Spec("nvfp4");
  spec.outer_block_size = {1, 40};
  EXPECT_EQ(reason(spec, {3, 64}), "BLOCK_SIZE_INVALID");
  spec.outer_block_size = {32};
  EXPECT_EQ(reason(spec, {3, 64}), "BLOCK_SIZE_INVALID");
  EXPECT_EQ(reason(EncodingSpec{}, {3}), "FORMAT_UNKNOWN");
}

TEST(EncodingSpecTest, NeedsHistogramsForWhatIsNotInTheExtremes) {
  EncodingSpec spec = Spec("int8");
  for (int method = 0; method <= 8; ++method) {
    spec.method = static_cast<CalibrationMethod>(method);
    EXPECT_EQ(NeedsHistograms(spec),
              method != 0 && method != 1 && method != 6 && method != 7)
        << method;
  }
}

TEST(EncodingSpecTest, ErrorsSayWhatWasExpectedAtTheFieldAtFault) {
  const struct {
    const char* format;
    std::function<void(EncodingSpec&)> change;
    const char* field;
    const char* message;
  } cases[] = {
      {"int8", [](EncodingSpec& s) { s.mx_scale_rule = MxScaleRule::kFloor; },
       "mx_scale_rule",
       "SCALE_TYPE_INVALID: mx_scale_rule needs E8M0 scales, but the scales "
       "are FLOAT32"},
      {"mxint8", [](EncodingSpec& s) { s.scale_type = ScaleType::kE4m3; },
       "scale_type",
       "SCALE_TYPE_INVALID: scale_type is E4M3, expected E8M0 with mxint8"},
      {"int8", [](EncodingSpec& s) { s.exclude_zero = true; }, "exclude_zero",
       "SYMMETRY_INVALID: exclude_zero needs an asymmetric range, but the "
       "range is symmetric"},
      {"int8",
       [](EncodingSpec& s) {
         s.method = CalibrationMethod::kBestOf;
         s.methods = {CalibrationMethod::kMse, CalibrationMethod::kMse};
       },
       "methods",
       "METHOD_INVALID: methods has method 3 twice, expected each once"},
      {"lpbq",
       [](EncodingSpec& s) {
         s.block_size = {0, 4};
         s.outer_block_size = {0, 6};
       },
       "outer_block_size",
       "BLOCK_SIZE_INVALID: entry 1 of outer_block_size is 6, expected 0 or a "
       "multiple of 4, that of block_size"},
  };
  for (const auto& c : cases) {
    EncodingSpec spec = Spec(c.format);
    c.change(spec);
    const absl::Status status = ValidateSpec(spec);
    EXPECT_EQ(status.message(), c.message);
    EXPECT_EQ(ErrorField(status), c.field) << c.message;
  }
}

}  // namespace
}  // namespace quantd::core
