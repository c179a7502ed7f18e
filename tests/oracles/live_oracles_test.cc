// The published tables through a live server, over TCP and the generated
// stubs: what a client in any language gets.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/formats/number_format.h"
#include "core/types/float_convert.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/paths.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing {
namespace {

using nlohmann::json;

json ReadOracles(const std::string& name) {
  std::ifstream file(absl::StrCat(OraclesFolder(), "/", name));
  return json::parse(file).at("cases");
}

v1::NumberFormat FormatByName(const std::string& name) {
  const core::FormatInfo* format = core::FindFormatByName(name);
  return format == nullptr ? v1::NUMBER_FORMAT_UNSPECIFIED
                           : static_cast<v1::NumberFormat>(format->format);
}

// Codes of a format as they are on the wire, one by one.
std::vector<int64_t> Unpack(const std::string& bytes, v1::NumberFormat format,
                            int64_t count) {
  const core::FormatInfo& info =
      *core::FindFormat(static_cast<core::NumberFormat>(format));
  std::vector<int64_t> codes;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t bit = i * info.storage_bits;
    uint32_t code = 0;
    for (int b = 0; b < info.storage_bits; ++b) {
      const auto byte = static_cast<uint8_t>(bytes.at((bit + b) / 8));
      code |= uint32_t{(byte >> ((bit + b) % 8)) & 1u} << b;
    }
    const int64_t half = int64_t{1} << (info.storage_bits - 1);
    codes.push_back(info.is_signed && code >= half ? code - 2 * half : code);
  }
  return codes;
}

class SeedTables : public ::testing::Test {
 protected:
  // A case: its tensor in float32, and what was printed for it.
  struct Table {
    explicit Table(const json& printed) : printed(printed) {
      name = printed.at("name");
      for (const double x : printed.value("x", std::vector<double>())) {
        values.push_back(static_cast<float>(x));
      }
      tensor.mutable_name()->set_model("oracles/seed");
      tensor.mutable_name()->set_tensor(name);
      tensor.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
      for (const int64_t d : printed.value("shape", std::vector<int64_t>())) {
        tensor.add_shape(d);
      }
      if (printed.contains("bits")) {
        format = FormatByName(
            absl::StrCat(printed.at("signed").get<bool>() ? "int" : "uint",
                         printed.at("bits").get<int>()));
      }
    }

    const json& printed;
    std::string name;
    std::vector<float> values;
    v1::TensorDescription tensor;
    v1::NumberFormat format = v1::NUMBER_FORMAT_UNSPECIFIED;
  };

  // The whole way with a given or a computed encoding: codes, reals and errors
  // against what was printed. `input_error` is how far the printed inputs may
  // lie from those that the printed results were computed with.
  void CheckTable(const Table& table, const v1::Encoding& encoding,
                  double input_error) {
    const std::string data = ToBytes(table.values);
    v1::QuantizeHeader quantize;
    *quantize.mutable_tensor() = table.tensor;
    *quantize.mutable_encoding() = encoding;
    const auto codes = Quantize(stub(), quantize, data);
    ASSERT_TRUE(codes.ok()) << codes.status();
    EXPECT_EQ(Unpack(codes->codes, table.format, table.values.size()),
              table.printed.at("q").get<std::vector<int64_t>>());

    v1::DequantizeHeader dequantize;
    *dequantize.mutable_tensor() = table.tensor;
    *dequantize.mutable_encoding() = encoding;
    const auto answer = Dequantize(stub(), dequantize, codes->codes);
    ASSERT_TRUE(answer.ok()) << answer.status();
    const std::vector<float> reals = FromBytes<float>(answer->reals);
    const auto printed_reals =
        table.printed.at("dq").get<std::vector<double>>();
    ASSERT_EQ(reals.size(), printed_reals.size());
    for (size_t i = 0; i < reals.size(); ++i) {
      EXPECT_NEAR(reals[i], printed_reals[i], kFourDigits + input_error) << i;
    }

    v1::EvaluateHeader evaluate;
    *evaluate.mutable_tensor() = table.tensor;
    *evaluate.add_candidates()->mutable_encoding() = encoding;
    const auto evaluated = Evaluate(stub(), evaluate, data);
    ASSERT_TRUE(evaluated.ok()) << evaluated.status();
    const v1::ErrorMetrics& metrics = evaluated->candidates(0).overall();
    ASSERT_EQ(metrics.count(), table.values.size());
    CheckPerElementErrors(table, reals, metrics);
    if (table.printed.contains("sse_printed")) {
      EXPECT_NEAR(metrics.sum_squared_error(),
                  table.printed.at("sse_printed").get<double>(), kFourDigits);
    }
    if (table.printed.contains("mse_printed")) {
      const double printed = table.printed.at("mse_printed");
      // Printed with four decimals, or with five digits where those were zeros.
      const double half_unit = printed < 1e-4 ? 0.5e-9 : 0.5e-4;
      // Every error moves by no more than its input and its code's value do.
      EXPECT_NEAR(std::sqrt(metrics.mean_squared_error()), std::sqrt(printed),
                  std::sqrt(printed + half_unit) - std::sqrt(printed) +
                      kFourDigits + input_error);
    }
  }

  // Absolute errors, and relative ones in percent, where they were printed.
  void CheckPerElementErrors(const Table& table,
                             const std::vector<float>& reals,
                             const v1::ErrorMetrics& metrics) {
    if (!table.printed.contains("abs_error")) return;
    const auto absolute =
        table.printed.at("abs_error").get<std::vector<double>>();
    const auto percent =
        table.printed.at("percent_error").get<std::vector<double>>();
    double absolute_sum = 0;
    double absolute_max = 0;
    double percent_sum = 0;
    double percent_max = 0;
    ASSERT_EQ(absolute.size(), reals.size());
    for (size_t i = 0; i < reals.size(); ++i) {
      const double x = table.values[i];
      const double error = std::abs(reals[i] - x);
      EXPECT_NEAR(error, absolute[i], kFourDigits) << i;
      // Printed with the sign of x.
      EXPECT_NEAR(x == 0 ? 0 : 100 * error / x, percent[i], kFourDigits) << i;
      absolute_sum += absolute[i];
      absolute_max = std::max(absolute_max, absolute[i]);
      percent_sum += std::abs(percent[i]);
      percent_max = std::max(percent_max, std::abs(percent[i]));
    }
    const double count = reals.size();
    EXPECT_NEAR(metrics.mean_absolute_error(), absolute_sum / count,
                kFourDigits);
    EXPECT_NEAR(metrics.max_absolute_error(), absolute_max, kFourDigits);
    EXPECT_NEAR(100 * metrics.mean_relative_error(), percent_sum / count,
                kFourDigits);
    EXPECT_NEAR(100 * metrics.max_relative_error(), percent_max, kFourDigits);
  }

  // The encoding that Calibrate answers, which is also the one that it keeps
  // and that Quantize computes by itself.
  v1::Encoding Calibrated(const Table& table, const v1::EncodingSpec& spec) {
    const std::string data = ToBytes(table.values);
    v1::CalibrateHeader header;
    *header.mutable_tensor() = table.tensor;
    *header.mutable_spec() = spec;
    const auto summary = Calibrate(stub(), header, data);
    EXPECT_TRUE(summary.ok()) << summary.status();
    if (!summary.ok()) return {};
    const v1::Encoding& encoding = summary->stored_encoding().encoding();

    v1::QuantizeHeader by_spec;
    *by_spec.mutable_tensor() = table.tensor;
    *by_spec.mutable_spec() = spec;
    const auto codes = Quantize(stub(), by_spec, data);
    EXPECT_TRUE(codes.ok()) << codes.status();
    if (!codes.ok()) return {};
    EXPECT_EQ(codes->header.encoding().SerializeAsString(),
              encoding.SerializeAsString());

    v1::QuantizeHeader by_reference;
    *by_reference.mutable_tensor() = table.tensor;
    by_reference.mutable_reference();
    const auto again = Quantize(stub(), by_reference, data);
    EXPECT_TRUE(again.ok()) << again.status();
    if (!again.ok()) return {};
    EXPECT_EQ(again->codes, codes->codes);
    return encoding;
  }

  // "quantize" and "compare": with the encoding as printed.
  void CheckGivenEncoding(const Table& table) {
    v1::Encoding encoding;
    encoding.set_format(table.format);
    encoding.add_scale(table.printed.at("scale").get<float>());
    encoding.add_zero_point(table.printed.at("zero_point").get<int>());
    // A scale that was computed from the printed inputs carries their error.
    const bool computed = table.printed.at("kind") == "compare";
    CheckTable(table, encoding, computed ? 128 * kFourDigits / 255 : 0);
  }

  // "calibrate+quantize".
  void CheckCalibration(const Table& table) {
    v1::EncodingSpec spec;
    spec.set_format(table.format);
    const bool symmetric = table.printed.at("symmetric");
    spec.set_symmetry(symmetric ? v1::SYMMETRY_STRICT
                                : v1::SYMMETRY_ASYMMETRIC);
    const v1::Encoding encoding = Calibrated(table, spec);
    ASSERT_EQ(encoding.scale_size(), 1);
    // Both ends of the range are off by what was cut off after four digits.
    constexpr double kScaleError = 2 * kFourDigits / 254;
    if (table.printed.contains("scale_printed")) {
      EXPECT_NEAR(encoding.scale(0),
                  table.printed.at("scale_printed").get<double>(), kScaleError);
    }
    const int zero_point =
        encoding.zero_point_size() == 0 ? 0 : encoding.zero_point(0);
    EXPECT_EQ(zero_point, table.printed.value("zero_point", 0));
    CheckTable(table, encoding, 256 * kScaleError);
  }

  // seed000_affine_float_zero_point: the seed takes [min, max] = [1.345, 3.453]
  // as the range although it leaves out zero, which is exclude_zero, and keeps
  // the zero point -min / scale as a real number.
  void CheckRealZeroPoint(const Table& table) {
    v1::EncodingSpec spec;
    spec.set_format(table.format);
    spec.set_symmetry(v1::SYMMETRY_ASYMMETRIC);
    spec.set_exclude_zero(true);
    spec.set_real_zero_point(true);
    const v1::Encoding encoding = Calibrated(table, spec);
    ASSERT_EQ(encoding.scale_size(), 1);
    EXPECT_NEAR(encoding.scale(0),
                table.printed.at("scale_printed").get<double>(), kFourDigits);
    ASSERT_EQ(encoding.real_zero_point_size(), 1);
    EXPECT_EQ(encoding.zero_point_size(), 0);
    EXPECT_NEAR(encoding.real_zero_point(0),
                table.printed.at("zero_point_real").get<double>(), 0.5e-4);
    EXPECT_TRUE(encoding.zero_points_are_real());

    v1::QuantizeHeader quantize;
    *quantize.mutable_tensor() = table.tensor;
    *quantize.mutable_encoding() = encoding;
    const auto codes = Quantize(stub(), quantize, ToBytes(table.values));
    ASSERT_TRUE(codes.ok()) << codes.status();
    const std::vector<int64_t> q = Unpack(codes->codes, table.format, 3);
    EXPECT_EQ(q, (std::vector<int64_t>{0, 90, 255}));
    v1::DequantizeHeader dequantize;
    *dequantize.mutable_tensor() = table.tensor;
    *dequantize.mutable_encoding() = encoding;
    const auto reals = Dequantize(stub(), dequantize, codes->codes);
    ASSERT_TRUE(reals.ok()) << reals.status();
    const std::vector<float> back = FromBytes<float>(reals->reals);
    const double low = table.values.front();
    const double step = (double{table.values.back()} - low) / 255;
    for (size_t i = 0; i < back.size(); ++i) {
      // Both ends of the range are met.
      const auto exact = static_cast<float>(low + q[i] * step);
      EXPECT_NEAR(back[i], exact, std::nextafter(exact, 9.0f) - exact) << i;
    }
  }

  // "ranges": each scale has a range of its own, given by hand.
  void CheckManualRanges(const Table& table) {
    const json& printed = table.printed;
    v1::EncodingSpec spec;
    spec.set_format(table.format);
    spec.set_method(v1::CALIBRATION_METHOD_FIXED_RANGE);
    for (const int64_t size : printed.at("block_size")) {
      spec.add_block_size(size);
    }
    for (const double end : printed.at("min")) spec.add_scale_range_min(end);
    for (const double end : printed.at("max")) spec.add_scale_range_max(end);
    Table filled = table;
    filled.values.assign(50, 0.25f);
    const v1::Encoding encoding = Calibrated(filled, spec);
    ASSERT_EQ(encoding.scale_size(), 5);
    for (int i = 0; i < encoding.scale_size(); ++i) {
      EXPECT_EQ(encoding.scale(i),
                static_cast<float>(printed.at("scale").get<double>()));
      EXPECT_EQ(encoding.zero_point(i), printed.at("zero_point").get<int>());
    }
  }

  // seed001_percentile_99_9: the seed scales by the percentile of x itself, not
  // of its magnitude, so that the lower end is cut off much earlier; its codes
  // are not clamped.
  void CheckPercentile(const Table& table) {
    v1::EncodingSpec spec;
    spec.set_format(v1::NUMBER_FORMAT_INT8);
    spec.set_symmetry(v1::SYMMETRY_STRICT);
    spec.set_method(v1::CALIBRATION_METHOD_PERCENTILE);
    spec.set_tail_fraction(1 -
                           table.printed.at("percentile").get<double>() / 100);
    spec.set_tail(v1::TAIL_UPPER);
    const v1::Encoding encoding = Calibrated(table, spec);
    ASSERT_EQ(encoding.scale_size(), 1);
    // Printed with ten digits, of which float32 has seven.
    EXPECT_NEAR(127.0 * encoding.scale(0),
                table.printed.at("alpha").get<double>(), 5e-7);

    v1::QuantizeHeader header;
    *header.mutable_tensor() = table.tensor;
    *header.mutable_encoding() = encoding;
    const auto codes = Quantize(stub(), header, ToBytes(table.values));
    ASSERT_TRUE(codes.ok()) << codes.status();
    auto clamped = table.printed.at("q_unclamped").get<std::vector<int64_t>>();
    for (int64_t& code : clamped) code = std::clamp<int64_t>(code, -127, 127);
    EXPECT_EQ(Unpack(codes->codes, encoding.format(), table.values.size()),
              clamped);
    EXPECT_EQ(codes->summary.clipped_low_count(), 1u);
  }

  // "shape": a block of 5 columns of a 5 by 10 tensor has a scale of its own.
  void CheckBlockShape(const json& printed) {
    const auto shape = printed.at("input_shape").get<std::vector<int64_t>>();
    const auto block = printed.at("block_size").get<std::vector<int64_t>>();
    const auto scale_shape =
        printed.at("scale_shape").get<std::vector<int64_t>>();
    Table table(printed);
    table.tensor.mutable_shape()->Assign(shape.begin(), shape.end());
    table.tensor.mutable_name()->set_tensor("blocks");
    // The largest magnitude of a block tells which it is.
    for (int64_t i = 0; i < shape[0]; ++i) {
      for (int64_t j = 0; j < shape[1]; ++j) {
        const int64_t index = i / block[0] * scale_shape[1] + j / block[1];
        table.values.push_back(static_cast<float>(
            127 * (index + 1) - (i * shape[1] + j) % block[1]));
      }
    }
    v1::EncodingSpec spec;
    spec.set_format(v1::NUMBER_FORMAT_INT8);
    spec.mutable_block_size()->Assign(block.begin(), block.end());
    const v1::Encoding encoding = Calibrated(table, spec);
    ASSERT_EQ(encoding.scale_size(), scale_shape[0] * scale_shape[1]);
    for (int i = 0; i < encoding.scale_size(); ++i) {
      EXPECT_EQ(encoding.scale(i), i + 1) << i;
    }
  }

  v1::QuantizationService::Stub& stub() { return server_.quantization(); }

  // Half a unit of the last of four printed digits, and float32's share.
  static constexpr double kFourDigits = 0.5e-4 + 1e-5;

 private:
  TestServer server_;
};

TEST_F(SeedTables, AreReproducedByALiveServer) {
  int ran = 0;
  for (const json& printed : ReadOracles("seed_tables.json")) {
    const Table table(printed);
    SCOPED_TRACE(table.name);
    const std::string kind = printed.at("kind");
    if (kind == "quantize" || kind == "compare") {
      CheckGivenEncoding(table);
    } else if (kind == "calibrate+quantize") {
      CheckCalibration(table);
    } else if (table.name == "seed000_affine_float_zero_point") {
      CheckRealZeroPoint(table);
    } else if (table.name == "seed001_percentile_99_9") {
      CheckPercentile(table);
    } else if (kind == "shape") {
      CheckBlockShape(printed);
    } else if (kind == "ranges") {
      CheckManualRanges(table);
    } else {
      ADD_FAILURE() << "a case of a new kind: " << kind;
    }
    ++ran;
  }
  EXPECT_EQ(ran, 10);
}

// ONNX backend node tests: tensors as little-endian hex, packed as on the wire.
class OnnxNodeTests : public ::testing::Test {
 protected:
  struct Tensor {
    explicit Tensor(const json& data)
        : dtype(data.at("dtype")),
          shape(data.at("shape").get<std::vector<int64_t>>()),
          bytes(absl::HexStringToBytes(data.at("hex").get<std::string>())) {}

    int64_t element_count() const {
      int64_t count = 1;
      for (const int64_t d : shape) count *= d;
      return count;
    }

    std::string dtype;
    std::vector<int64_t> shape;
    std::string bytes;
  };

  static Tensor Get(const json& node, const std::string& name) {
    return Tensor(node.at("data").at(name));
  }

  // float32 or float16, as float32.
  static std::vector<float> ToFloats(const Tensor& tensor) {
    if (tensor.dtype == "float32") return FromBytes<float>(tensor.bytes);
    EXPECT_EQ(tensor.dtype, "float16");
    std::vector<float> values;
    for (const uint16_t half : FromBytes<uint16_t>(tensor.bytes)) {
      values.push_back(core::HalfToFloat(half));
    }
    return values;
  }

  // What stands for the node's x_scale, x_zero_point, axis and block_size on a
  // tensor of `shape`.
  static v1::Encoding MakeEncoding(const json& node,
                                   const std::vector<int64_t>& shape,
                                   v1::NumberFormat format,
                                   const std::string& prefix) {
    const json& attributes = node.at("attributes");
    v1::Encoding encoding;
    encoding.set_format(format);
    const Tensor scale = Get(node, prefix + "_scale");
    for (const float s : ToFloats(scale)) encoding.add_scale(s);
    const int64_t rank = shape.size();
    int64_t axis = attributes.value("axis", 1);
    if (axis < 0) axis += rank;
    if (attributes.contains("block_size")) {
      for (int64_t d = 0; d < rank; ++d) {
        encoding.add_block_size(
            d == axis ? attributes.at("block_size").get<int64_t>() : 1);
      }
    } else if (scale.shape.size() == 1) {
      for (int64_t d = 0; d < rank; ++d) encoding.add_block_size(d == axis);
    }
    for (const std::string& name :
         {prefix + "_zero_point", std::string("zero_point")}) {
      if (!node.at("data").contains(name)) continue;
      const Tensor zero_point = Get(node, name);
      if (absl::StartsWith(zero_point.dtype, "float")) {
        // It says what type the codes have and is zero.
        EXPECT_EQ(zero_point.bytes, std::string(zero_point.bytes.size(), '\0'));
        continue;
      }
      for (const int64_t z :
           Unpack(zero_point.bytes, format, zero_point.element_count())) {
        encoding.add_zero_point(static_cast<int32_t>(z));
      }
      // ONNX's dimensions of one element are a tensor of one scale.
      EXPECT_EQ(encoding.zero_point_size(), encoding.scale_size());
    }
    return encoding;
  }

  // The tensor of reals.
  static v1::TensorDescription Describe(const Tensor& reals) {
    v1::TensorDescription tensor;
    tensor.set_element_type(reals.dtype == "float16"
                                ? v1::ELEMENT_TYPE_FLOAT16
                                : v1::ELEMENT_TYPE_FLOAT32);
    tensor.mutable_shape()->Assign(reals.shape.begin(), reals.shape.end());
    return tensor;
  }

  void CheckQuantize(const json& node) {
    const Tensor x = Get(node, "x");
    const Tensor y = Get(node, "y");
    EXPECT_EQ(x.dtype, "float32");
    // The one output_dtype of these cases is 5, INT16.
    if (node.at("attributes").contains("output_dtype")) {
      EXPECT_EQ(node.at("attributes").at("output_dtype"), 5);
      EXPECT_EQ(y.dtype, "int16");
    }
    v1::QuantizeHeader header;
    *header.mutable_tensor() = Describe(x);
    *header.mutable_encoding() =
        MakeEncoding(node, x.shape, FormatByName(y.dtype), "y");
    const auto answer = Quantize(server_.quantization(), header, x.bytes);
    ASSERT_TRUE(answer.ok()) << answer.status();
    ExpectBytes(y.bytes, answer->codes);
  }

  void CheckDequantize(const json& node) {
    const Tensor x = Get(node, "x");
    const Tensor y = Get(node, "y");
    v1::DequantizeHeader header;
    *header.mutable_tensor() = Describe(y);
    *header.mutable_encoding() =
        MakeEncoding(node, x.shape, FormatByName(x.dtype), "x");
    const auto answer = Dequantize(server_.quantization(), header, x.bytes);
    ASSERT_TRUE(answer.ok()) << answer.status();
    ExpectBytes(y.bytes, answer->reals);
  }

  // The encoding is computed from the tensor: uint8, asymmetric, min-max.
  void CheckDynamic(const json& node) {
    const Tensor x = Get(node, "x");
    v1::QuantizeHeader header;
    *header.mutable_tensor() = Describe(x);
    header.mutable_spec()->set_format(v1::NUMBER_FORMAT_UINT8);
    header.mutable_spec()->set_symmetry(v1::SYMMETRY_ASYMMETRIC);
    const auto answer = Quantize(server_.quantization(), header, x.bytes);
    ASSERT_TRUE(answer.ok()) << answer.status();
    const v1::Encoding& encoding = answer->header.encoding();
    ASSERT_EQ(encoding.scale_size(), 1);
    ASSERT_EQ(encoding.zero_point_size(), 1);
    ExpectBytes(Get(node, "y").bytes, answer->codes);
    ExpectBytes(Get(node, "y_scale").bytes,
                ToBytes(std::vector<float>{encoding.scale(0)}));
    ExpectBytes(Get(node, "y_zero_point").bytes,
                std::string(1, static_cast<char>(encoding.zero_point(0))));
  }

  static void ExpectBytes(const std::string& expected,
                          const std::string& actual) {
    EXPECT_EQ(absl::BytesToHexString(expected), absl::BytesToHexString(actual));
  }

 private:
  TestServer server_;
};

TEST_F(OnnxNodeTests, AreReproducedBitForBitByALiveServer) {
  int ran = 0;
  std::set<std::string> formats;
  for (const json& node : ReadOracles("onnx_quantize_linear.json")) {
    SCOPED_TRACE(node.at("name").get<std::string>());
    const std::string op = node.at("op");
    if (op == "QuantizeLinear") {
      CheckQuantize(node);
    } else if (op == "DequantizeLinear") {
      CheckDequantize(node);
    } else if (op == "DynamicQuantizeLinear") {
      CheckDynamic(node);
    } else {
      ADD_FAILURE() << "a case of a new operator: " << op;
    }
    ++ran;
    formats.insert(Get(node, op == "DequantizeLinear" ? "x" : "y").dtype);
  }
  EXPECT_EQ(ran, 30);
  EXPECT_EQ(formats,
            (std::set<std::string>{"float4_e2m1", "float8_e4m3fn",
                                   "float8_e5m2", "int2", "int4", "int16",
                                   "uint2", "uint4", "uint8", "uint16"}));
}

}  // namespace
}  // namespace quantd::testing
