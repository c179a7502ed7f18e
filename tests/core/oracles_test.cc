// Figures that others published, through the core.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "core/calibrate/calibrate.h"
#include "core/dequantize/dequantize.h"
#include "core/evaluate/evaluate.h"
#include "core/formats/number_format.h"
#include "core/formats/packing.h"
#include "core/quantize/quantize.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/core/kernel_test_util.h"
#include "tests/support/paths.h"

namespace quantd::core {
namespace {

using Json = nlohmann::json;

Json ReadCases(const std::string& file) {
  std::ifstream in(OraclesFolder() + "/" + file);
  return Json::parse(in, nullptr, /*allow_exceptions=*/false)["cases"];
}

std::vector<uint8_t> Bytes(const std::vector<float>& values) {
  std::vector<uint8_t> bytes(values.size() * 4);
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::vector<float> Floats(const std::vector<uint8_t>& bytes) {
  std::vector<float> values(bytes.size() / 4);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::vector<uint8_t> QuantizeAll(const Encoding& encoding,
                                 const BlockLayout& layout,
                                 const std::vector<uint8_t>& x) {
  const int64_t count = layout.element_count();
  std::vector<uint8_t> codes(FindFormat(encoding.format)->SizeBytes(count));
  QuantizeCounts counts;
  EXPECT_TRUE(Quantize(encoding, layout, ElementType::kFloat32,
                       NanPolicy::kDefault, 0, count, x.data(), codes.data(),
                       &counts, nullptr)
                  .ok());
  return codes;
}

std::vector<uint8_t> DequantizeAll(const Encoding& encoding,
                                   const BlockLayout& layout,
                                   const std::vector<uint8_t>& codes,
                                   ElementType type = ElementType::kFloat32) {
  const int64_t count = layout.element_count();
  std::vector<uint8_t> out(count * ElementSizeBytes(type));
  Dequantize(encoding, layout, type, 0, count, codes.data(), out.data(),
             nullptr);
  return out;
}

absl::StatusOr<Encoding> CalibrateOn(const EncodingSpec& spec,
                                     const BlockLayout& layout,
                                     const std::vector<uint8_t>& x) {
  TensorStatistics statistics(layout.scale_count(), /*mantissa_bits=*/7);
  statistics.Update(layout, ElementType::kFloat32, 0, layout.element_count(),
                    x.data(), nullptr);
  absl::StatusOr<Calibration> calibration =
      Calibrate(spec, layout, statistics, {}, nullptr);
  if (!calibration.ok()) return calibration.status();
  return calibration->encoding;
}

std::vector<int32_t> Codes(const Encoding& encoding,
                           const std::vector<uint8_t>& bytes, int64_t count) {
  std::vector<int32_t> codes;
  for (int64_t i = 0; i < count; ++i) {
    codes.push_back(LoadCode(*FindFormat(encoding.format), bytes.data(), i));
  }
  return codes;
}

// --- Tables of the seed documents ------------------------------------------

// Half a unit of four printed decimals, and what the rounding of the inputs to
// four decimals adds on top of it.
constexpr double kPrinted = 0.5e-4 + 0.5e-4;

// The document's codes are not clamped, and its percentile is one-sided.
void CheckPercentileCase(const Json& c, const BlockLayout& layout,
                         const std::vector<uint8_t>& x) {
  EncodingSpec spec;
  spec.format = FindFormatByName("int8")->format;
  spec.method = CalibrationMethod::kPercentile;
  spec.tail = Tail::kUpper;
  spec.tail_fraction = 1 - c["percentile"].get<double>() / 100;
  const absl::StatusOr<Encoding> encoding = CalibrateOn(spec, layout, x);
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_NEAR(encoding->scale[0] * 127, c["alpha"].get<double>(), kPrinted);
  const auto unclamped = c["q_unclamped"].get<std::vector<int32_t>>();
  const int64_t count = layout.element_count();
  const std::vector<int32_t> codes =
      Codes(*encoding, QuantizeAll(*encoding, layout, x), count);
  for (int64_t i = 0; i < count; ++i) {
    EXPECT_EQ(codes[i], std::max(unclamped[i], -127));
  }
}

// The document rounds x / scale + zero point, and the zero point not at all.
void CheckRealZeroPoint(const Json& c, const Encoding& encoding,
                        const BlockLayout& layout,
                        const std::vector<uint8_t>& x) {
  ASSERT_EQ(encoding.real_zero_point.size(), 1);
  EXPECT_NEAR(encoding.real_zero_point[0], c["zero_point_real"].get<double>(),
              0.5e-4);
  const std::vector<uint8_t> bytes = QuantizeAll(encoding, layout, x);
  const std::vector<int32_t> codes =
      Codes(encoding, bytes, layout.element_count());
  EXPECT_EQ(codes, (std::vector<int32_t>{0, 90, 255}));
  const std::vector<float> restored =
      Floats(DequantizeAll(encoding, layout, bytes));
  const auto reals = c["x"].get<std::vector<float>>();
  const double low = reals.front();
  const double step = (double{reals.back()} - low) / 255;
  for (size_t i = 0; i < restored.size(); ++i) {
    const auto exact = static_cast<float>(low + codes[i] * step);
    EXPECT_NEAR(restored[i], exact, std::nextafter(exact, 9.0f) - exact) << i;
  }
}

// A range for each scale, given by hand.
void CheckManualRanges(const Json& c) {
  EncodingSpec spec;
  spec.format = IntegerFormat(c["bits"], c["signed"]).format;
  spec.method = CalibrationMethod::kFixedRange;
  spec.block_size = c["block_size"].get<std::vector<int64_t>>();
  spec.scale_range_min = c["min"].get<std::vector<double>>();
  spec.scale_range_max = c["max"].get<std::vector<double>>();
  const auto shape = c["shape"].get<std::vector<int64_t>>();
  const BlockLayout layout = *BlockLayout::Create(shape, spec.block_size);
  const std::vector<float> x(static_cast<size_t>(layout.element_count()), 3);
  const absl::StatusOr<EncodingSpec> resolved = ResolveSpec(spec, shape);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  const absl::StatusOr<Encoding> encoding =
      CalibrateOn(*resolved, layout, Bytes(x));
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_EQ(encoding->scale,
            std::vector<float>(spec.scale_range_min.size(),
                               static_cast<float>(c["scale"].get<double>())));
  EXPECT_EQ(encoding->zero_point,
            std::vector<int32_t>(spec.scale_range_min.size(), c["zero_point"]));
}

void CheckSeedCase(const Json& c) {
  if (c["kind"] == "ranges") return CheckManualRanges(c);
  const std::vector<int64_t> shape = c.value("shape", std::vector<int64_t>{});
  if (c["kind"] == "shape") {
    const auto layout =
        BlockLayout::Create(c["input_shape"].get<std::vector<int64_t>>(),
                            c["block_size"].get<std::vector<int64_t>>());
    ASSERT_TRUE(layout.ok());
    EXPECT_EQ(layout->scale_shape(),
              c["scale_shape"].get<std::vector<int64_t>>());
    return;
  }
  const std::vector<uint8_t> x = Bytes(c["x"].get<std::vector<float>>());
  const BlockLayout layout = *BlockLayout::Create(shape, {});
  const int64_t count = layout.element_count();
  if (c.contains("percentile")) {
    CheckPercentileCase(c, layout, x);
    return;
  }
  const FormatInfo& format = IntegerFormat(c["bits"], c["signed"]);

  Encoding encoding;
  if (c.contains("scale")) {
    encoding.format = format.format;
    encoding.scale = {c["scale"].get<float>()};
    encoding.zero_point = {c["zero_point"].get<int32_t>()};
    encoding.qmin = format.qmin;
    encoding.qmax = format.qmax;
  } else {
    EncodingSpec spec;
    spec.format = format.format;
    spec.symmetry =
        c.value("symmetric", false) ? Symmetry::kStrict : Symmetry::kAsymmetric;
    spec.exclude_zero = !c.value("include_zero", true);
    spec.real_zero_point = c.contains("zero_point_real");
    const absl::StatusOr<Encoding> calibrated = CalibrateOn(spec, layout, x);
    ASSERT_TRUE(calibrated.ok()) << calibrated.status();
    encoding = *calibrated;
  }
  ASSERT_TRUE(ValidateEncoding(encoding).ok());
  if (c.contains("scale_printed")) {
    const double printed = c["scale_printed"];
    // As many digits as are printed and as the inputs' four decimals bear.
    EXPECT_NEAR(encoding.scale[0], printed,
                printed == 0.0083 ? 0.5e-4 : printed * 1e-4);
  }
  if (c.contains("zero_point") && !c.contains("scale")) {
    EXPECT_EQ(encoding.zero_point[0], c["zero_point"].get<int32_t>());
  }
  if (c.contains("zero_point_real")) {
    CheckRealZeroPoint(c, encoding, layout, x);
    return;
  }

  const std::vector<uint8_t> bytes = QuantizeAll(encoding, layout, x);
  EXPECT_EQ(Codes(encoding, bytes, count), c["q"].get<std::vector<int32_t>>());
  const std::vector<float> restored =
      Floats(DequantizeAll(encoding, layout, bytes));
  const auto dq = c["dq"].get<std::vector<double>>();
  const auto reals = c["x"].get<std::vector<double>>();
  for (int64_t i = 0; i < count; ++i) {
    // A code of 127 carries the scale's own print error 127 times.
    EXPECT_NEAR(restored[i], dq[i], kPrinted) << i;
    if (c.contains("abs_error")) {
      EXPECT_NEAR(std::fabs(restored[i] - reals[i]),
                  c["abs_error"][i].get<double>(), kPrinted);
    }
    if (c.contains("percent_error") && reals[i] != 0) {
      EXPECT_NEAR(100 * std::fabs(restored[i] - reals[i]) / reals[i],
                  c["percent_error"][i].get<double>(), kPrinted);
    }
  }
  Evaluator evaluator(encoding, layout, ElementType::kFloat32, {});
  evaluator.Update(0, count, x.data(), nullptr);
  if (c.contains("sse_printed")) {
    EXPECT_NEAR(evaluator.overall().squared_error,
                c["sse_printed"].get<double>(), kPrinted);
  }
  if (c.contains("mse_printed")) {
    const double printed = c["mse_printed"];
    // Either four decimals or five significant digits are printed.
    EXPECT_NEAR(evaluator.overall().MeanSquaredError(), printed,
                printed > 1e-4 ? 0.5e-4 : printed * 0.02);
  }
}

TEST(OraclesTest, MeetsTheTablesOfTheSeedDocuments) {
  int cases = 0;
  for (const Json& c : ReadCases("seed_tables.json")) {
    const std::string name = c["name"];
    SCOPED_TRACE(name);
    CheckSeedCase(c);
    ++cases;
  }
  std::printf("seed_tables.json: %d cases\n", cases);
  EXPECT_EQ(cases, 10);
}

// --- ONNX backend node tests -----------------------------------------------

std::vector<uint8_t> FromHex(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(
        static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

struct Tensor {
  std::string type;
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;

  int64_t count() const {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    return count;
  }
};

Tensor ToTensor(const Json& data, const std::string& name) {
  const Json& t = data[name];
  return {t["dtype"], t["shape"].get<std::vector<int64_t>>(),
          FromHex(t["hex"].get<std::string>())};
}

// Per tensor, per axis or blocked, as ONNX tells them apart.
std::vector<int64_t> BlockSize(const Json& attributes, const Tensor& x,
                               const Tensor& scale) {
  const int64_t rank = static_cast<int64_t>(x.shape.size());
  int64_t axis = attributes.value("axis", 1);
  if (axis < 0) axis += rank;
  const int64_t block = attributes.value("block_size", 0);
  if (block > 0) {
    std::vector<int64_t> block_size(rank, 1);
    block_size[axis] = block;
    return block_size;
  }
  if (scale.shape.empty() || scale.count() == 1) return {};
  std::vector<int64_t> block_size(rank, 0);
  block_size[axis] = 1;
  return block_size;
}

ElementType ToElementType(const std::string& type) {
  return type == "float16" ? ElementType::kFloat16 : ElementType::kFloat32;
}

std::vector<float> Scales(const Tensor& scale) {
  std::vector<float> scales;
  for (int64_t i = 0; i < scale.count(); ++i) {
    scales.push_back(static_cast<float>(
        NaiveReal(ToElementType(scale.type), scale.bytes.data(), i)));
  }
  return scales;
}

Encoding ToEncoding(const FormatInfo& format, std::vector<int64_t> block_size,
                    const Tensor& scale, const Tensor* zero_point) {
  Encoding encoding;
  encoding.format = format.format;
  encoding.block_size = std::move(block_size);
  encoding.scale = Scales(scale);
  for (int64_t i = 0; zero_point != nullptr && i < zero_point->count(); ++i) {
    const int32_t code = LoadCode(format, zero_point->bytes.data(), i);
    if (format.kind == CodeKind::kInteger) {
      encoding.zero_point.push_back(code);
    } else {
      // Of floats it names the type only.
      EXPECT_EQ(code, 0);
    }
  }
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  return encoding;
}

void CheckDynamicCase(const Json& data, const Tensor& x, const Tensor& y) {
  EncodingSpec spec;
  spec.format = FindFormatByName("uint8")->format;
  const BlockLayout layout = *BlockLayout::Create(x.shape, {});
  const absl::StatusOr<Encoding> encoding = CalibrateOn(spec, layout, x.bytes);
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_EQ(encoding->scale, Floats(ToTensor(data, "y_scale").bytes));
  EXPECT_EQ(encoding->zero_point[0],
            int32_t{ToTensor(data, "y_zero_point").bytes[0]});
  EXPECT_EQ(QuantizeAll(*encoding, layout, x.bytes), y.bytes);
}

void CheckOnnxCase(const Json& c) {
  const std::string op = c["op"];
  const Json& data = c["data"];
  const Json& attributes = c["attributes"];
  const Tensor x = ToTensor(data, "x");
  const Tensor y = ToTensor(data, "y");
  if (op == "DynamicQuantizeLinear") {
    CheckDynamicCase(data, x, y);
    return;
  }
  const bool is_quantize = op == "QuantizeLinear";
  const auto inputs = c["inputs"].get<std::vector<std::string>>();
  const Tensor scale = ToTensor(data, inputs[1]);
  const bool has_zero_point = inputs.size() > 2;
  const Tensor zero_point =
      has_zero_point ? ToTensor(data, inputs[2]) : Tensor{};
  const FormatInfo* format = FindFormatByName(is_quantize ? y.type : x.type);
  ASSERT_NE(format, nullptr);
  const Encoding encoding =
      ToEncoding(*format, BlockSize(attributes, x, scale), scale,
                 has_zero_point ? &zero_point : nullptr);
  ASSERT_TRUE(ValidateEncoding(encoding).ok()) << ValidateEncoding(encoding);
  const absl::StatusOr<BlockLayout> layout =
      BlockLayout::Create(x.shape, encoding.block_size);
  ASSERT_TRUE(layout.ok() && CheckEncodingFits(encoding, *layout).ok());
  if (attributes.contains("output_dtype")) {
    EXPECT_EQ(attributes["output_dtype"], 5);  // INT16
    EXPECT_EQ(format->name, "int16");
  }
  if (!is_quantize) {
    EXPECT_EQ(DequantizeAll(encoding, *layout, x.bytes, ToElementType(y.type)),
              y.bytes);
    return;
  }
  EXPECT_EQ(QuantizeAll(encoding, *layout, x.bytes), y.bytes);
}

TEST(OraclesTest, EqualsEveryCaseOfOnnx) {
  const Json all = ReadCases("onnx_quantize_linear.json");
  EXPECT_EQ(all.size(), 30u);
  ForEachSimdTarget([&] {
    for (const Json& c : all) {
      SCOPED_TRACE(c["name"].get<std::string>());
      CheckOnnxCase(c);
    }
  });
}

}  // namespace
}  // namespace quantd::core
