#include "client/jobs/gguf_output.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/files/dtype.h"
#include "client/files/gguf_types.h"
#include "client/models/spec_syntax.h"
#include "gtest/gtest.h"

namespace quantd::jobs {
namespace {

const std::vector<int64_t> kShape = {2, 64};

std::string TypeName(absl::string_view text) {
  const absl::StatusOr<SpecTemplate> spec = ParseSpec(text);
  if (!spec.ok()) return std::string(spec.status().message());
  const files::GgufType* const type = GgufTypeOf(*spec->SpecOf(kShape), kShape);
  return type == nullptr ? "none" : std::string(type->name);
}

TEST(GgufOutputTest, SpecsHaveTheirTypes) {
  EXPECT_EQ(TypeName("int8:group:32:scale=float16"), "q8_0");
  EXPECT_EQ(TypeName("int8:group:32:scale=float16:mse:full-range"), "q8_0");
  EXPECT_EQ(TypeName("int5:block=1,32:scale=float16"), "q5_0");
  EXPECT_EQ(TypeName("int4:group:32:scale=float16"), "q4_0");
  EXPECT_EQ(TypeName("uint4:group:32:scale=float16"), "q4_1");
  EXPECT_EQ(TypeName("uint5:group:32:scale=float16"), "q5_1");
  EXPECT_EQ(TypeName("mxfp4_e2m1"), "mxfp4");
}

TEST(GgufOutputTest, OtherSpecsHaveNone) {
  for (const char* const spec :
       {"int8", "int8:group:32", "int8:per-channel:scale=float16",
        "int8:group:64:scale=float16", "int8:group:32:asymmetric:scale=float16",
        "int8:block=2,32:scale=float16", "int4:group:32:scale=bfloat16",
        "int6:group:32:scale=float16", "uint8:group:32:scale=float16", "nvfp4",
        "mxfp8_e4m3", "nf4"}) {
    EXPECT_EQ(TypeName(spec), "none") << spec;
  }
  EXPECT_TRUE(
      absl::StrContains(GgufSpecs(), "int4:group:32:scale=float16 (q4_0)"));
}

TEST(GgufOutputTest, FilesHaveTheNumbersOfLlamaCpp) {
  EXPECT_EQ(GgufFileType(*files::FindGgufType("q8_0")), 7u);
  EXPECT_EQ(GgufFileType(*files::FindGgufType("q4_K")), 14u);
  EXPECT_EQ(GgufFileType(*files::FindGgufType("q5_K")), 16u);
  EXPECT_EQ(GgufFileType(*files::FindGgufType("q6_K")), 18u);
  EXPECT_EQ(GgufFileType(*files::FindGgufType("q2_K")), 0u);
  EXPECT_TRUE(absl::StrContains(GgufSpecs(), "q4_0, q4_1, q5_0, q5_1, q8_0"));
  EXPECT_TRUE(absl::StrContains(GgufSpecs(), "q4_K"));
}

// Codes 0 to 31 in one block, as they are stored, under a scale and a zero
// point; the elements that the block decodes to.
std::vector<float> Elements(absl::string_view type_name,
                            v1::NumberFormat format, uint16_t scale,
                            int32_t zero_point, bool* is_rounded,
                            absl::Status* status) {
  const files::GgufType& type = *files::FindGgufType(type_name);
  const FormatInfo info = *GetFormatInfo(format);
  Encoding encoding;
  encoding.set_format(format);
  encoding.set_scale_type(info.scale_type == v1::SCALE_TYPE_UNSPECIFIED
                              ? v1::SCALE_TYPE_FLOAT16
                              : info.scale_type);
  const uint8_t scale_bytes[] = {static_cast<uint8_t>(scale & 255),
                                 static_cast<uint8_t>(scale >> 8)};
  uint8_t zero_bytes[sizeof(zero_point)];
  std::memcpy(zero_bytes, &zero_point, sizeof(zero_point));
  Scales scales;
  scales.scale = absl::MakeConstSpan(
      scale_bytes, encoding.scale_type() == v1::SCALE_TYPE_E8M0 ? 1 : 2);
  scales.zero_point = zero_bytes;
  std::vector<uint8_t> codes;
  for (int i = 0; i < 32; ++i) {
    if (info.storage_bits == 8) {
      const int code = info.is_signed ? i - 16 : i;
      codes.push_back(static_cast<uint8_t>(code));
    } else if (i % 2 == 0) {
      codes.push_back(static_cast<uint8_t>((i & 15) | ((i + 1) & 15) << 4));
    }
  }
  *is_rounded = false;
  const absl::StatusOr<std::vector<uint8_t>> blocks =
      PackGguf(type, encoding, scales, codes, is_rounded);
  *status = blocks.status();
  std::vector<float> elements(32);
  if (blocks.ok()) {
    EXPECT_EQ(blocks->size(), static_cast<size_t>(type.block_bytes));
    type.decode(blocks->data(), elements.data());
  }
  return elements;
}

constexpr uint16_t kOne = 0x3C00;
constexpr uint16_t kTwo = 0x4000;
// 1 + 2^-10.
constexpr uint16_t kOdd = 0x3C01;

TEST(GgufOutputTest, BlocksDecodeToTheRealsOfTheCodes) {
  bool is_rounded = false;
  absl::Status status;
  const std::vector<float> q8 =
      Elements("q8_0", v1::NUMBER_FORMAT_INT8, kTwo, 0, &is_rounded, &status);
  const std::vector<float> q5 =
      Elements("q5_0", v1::NUMBER_FORMAT_INT5, kTwo, 0, &is_rounded, &status);
  const std::vector<float> q51 =
      Elements("q5_1", v1::NUMBER_FORMAT_UINT5, kTwo, 3, &is_rounded, &status);
  const std::vector<float> q4 =
      Elements("q4_0", v1::NUMBER_FORMAT_INT4, kTwo, 0, &is_rounded, &status);
  const std::vector<float> q41 =
      Elements("q4_1", v1::NUMBER_FORMAT_UINT4, kTwo, 3, &is_rounded, &status);
  ASSERT_TRUE(status.ok()) << status;
  for (int i = 0; i < 32; ++i) {
    const size_t at = static_cast<size_t>(i);
    EXPECT_EQ(q8[at], static_cast<float>(2 * (i - 16)));
    EXPECT_EQ(q5[at], static_cast<float>(2 * (i - 16)));
    EXPECT_EQ(q51[at], static_cast<float>(2 * (i - 3)));
    EXPECT_EQ(q41[at], static_cast<float>(2 * (i % 16 - 3)));
    const int code = (i % 16 ^ 8) - 8;
    EXPECT_EQ(q4[at], static_cast<float>(2 * code));
  }
  EXPECT_FALSE(is_rounded);
}

TEST(GgufOutputTest, Mxfp4KeepsCodesAndExponents) {
  bool is_rounded = false;
  absl::Status status;
  const std::vector<float> elements = Elements(
      "mxfp4", v1::NUMBER_FORMAT_MXFP4_E2M1, 128, 0, &is_rounded, &status);
  ASSERT_TRUE(status.ok()) << status;
  const float values[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  for (int i = 0; i < 32; ++i) {
    const float value = 2 * values[i % 8];
    EXPECT_EQ(elements[static_cast<size_t>(i)], i % 16 < 8 ? value : -value);
  }
  Elements("mxfp4", v1::NUMBER_FORMAT_MXFP4_E2M1, 255, 0, &is_rounded, &status);
  EXPECT_TRUE(absl::StrContains(status.message(), "NaN")) << status;
}

TEST(GgufOutputTest, AMinimumIsTheNearestFloat16) {
  bool is_rounded = false;
  absl::Status status;
  // 7 + 7 * 2^-10 has a float16 every 2^-8.
  std::vector<float> elements =
      Elements("q4_1", v1::NUMBER_FORMAT_UINT4, kOdd, 7, &is_rounded, &status);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(is_rounded);
  EXPECT_EQ(elements[0], -7 - 2 * 0x1p-8F);
  // Half way between two: 5 * (1 + 2^-10) and 2^-8 apart; the even one.
  elements = Elements("q4_1", v1::NUMBER_FORMAT_UINT4, 0x3C02, 5, &is_rounded,
                      &status);
  EXPECT_TRUE(is_rounded);
  EXPECT_EQ(elements[0], -5 - 2 * 0x1p-8F);
  // Subnormal ones, and none.
  elements = Elements("q4_1", v1::NUMBER_FORMAT_UINT4, 0x0001, 15, &is_rounded,
                      &status);
  EXPECT_FALSE(is_rounded);
  EXPECT_EQ(elements[0], -15 * 0x1p-24F);
  elements =
      Elements("q4_1", v1::NUMBER_FORMAT_UINT4, kOne, 0, &is_rounded, &status);
  EXPECT_EQ(elements[0], 0);
  // More than float16 has.
  Elements("q4_1", v1::NUMBER_FORMAT_UINT4, 0x7BFF, 2, &is_rounded, &status);
  EXPECT_TRUE(absl::StrContains(status.message(), "more than float16 has"));
}

TEST(GgufOutputTest, ZeroPointsHaveNoPlaceInSymmetricTypes) {
  bool is_rounded = false;
  absl::Status status;
  Elements("q4_0", v1::NUMBER_FORMAT_INT4, kOne, 1, &is_rounded, &status);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "no zero points"));
}

}  // namespace
}  // namespace quantd::jobs
