// What core and the client know of number formats is what the options of
// quantd.v1.NumberFormat say.

#include <algorithm>
#include <cstddef>

#include "absl/status/statusor.h"
#include "client/cpp/tensor.h"
#include "core/formats/number_format.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding.pb.h"

namespace quantd::server {
namespace {

// The proto's kinds begin with that of no format.
template <typename Enum>
int ProtoValue(Enum value) {
  return static_cast<int>(value) + 1;
}

TEST(NumberFormatsTest, EveryRowOfCoreIsWhatTheOptionsSay) {
  const auto* values = v1::NumberFormat_descriptor();
  // All but NUMBER_FORMAT_UNSPECIFIED.
  EXPECT_EQ(core::AllFormats().size(),
            static_cast<size_t>(values->value_count() - 1));
  for (const core::FormatInfo& row : core::AllFormats()) {
    SCOPED_TRACE(row.name);
    const auto* value = values->FindValueByNumber(static_cast<int>(row.format));
    ASSERT_NE(value, nullptr);
    ASSERT_TRUE(value->options().HasExtension(v1::number_format));
    const v1::NumberFormatInfo& options =
        value->options().GetExtension(v1::number_format);
    EXPECT_EQ(options.kind(), ProtoValue(row.kind));
    EXPECT_EQ(options.bits(), row.bits);
    EXPECT_EQ(options.storage_bits(), row.storage_bits);
    EXPECT_EQ(options.is_signed(), row.is_signed);
    if (options.has_qmin()) {
      EXPECT_EQ(options.qmin(), row.qmin);
    }
    EXPECT_EQ(options.scale_type(), static_cast<int>(row.scale_type));
    EXPECT_EQ(options.default_group(), row.default_group);
    EXPECT_EQ(options.step_exponent(), row.step_exponent);
    EXPECT_TRUE(std::equal(row.codebook.begin(), row.codebook.end(),
                           options.codebook().begin(),
                           options.codebook().end()));
    EXPECT_EQ(options.has_float_layout(), row.kind == core::CodeKind::kFloat);
    if (!options.has_float_layout()) continue;
    const v1::FloatLayout& layout = options.float_layout();
    EXPECT_EQ(layout.exponent_bits(), row.float_layout.exponent_bits);
    EXPECT_EQ(layout.mantissa_bits(), row.float_layout.mantissa_bits);
    EXPECT_EQ(layout.bias(), row.float_layout.bias);
    EXPECT_EQ(layout.specials(), ProtoValue(row.float_layout.specials));
  }
}

TEST(NumberFormatsTest, TheClientReadsTheSameFromTheOptions) {
  for (const core::FormatInfo& row : core::AllFormats()) {
    SCOPED_TRACE(row.name);
    const auto format = static_cast<v1::NumberFormat>(row.format);
    EXPECT_EQ(FormatName(format), row.name);
    const absl::StatusOr<FormatInfo> info = GetFormatInfo(format);
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(static_cast<int>(info->kind), ProtoValue(row.kind));
    EXPECT_EQ(info->bits, row.bits);
    EXPECT_EQ(info->storage_bits, row.storage_bits);
    EXPECT_EQ(info->is_signed, row.is_signed);
    EXPECT_EQ(info->qmin, row.qmin);
    EXPECT_EQ(info->qmax, row.qmax);
    EXPECT_EQ(info->max_value, row.max_value);
    EXPECT_EQ(info->default_group, row.default_group);
    EXPECT_EQ(static_cast<int>(info->scale_type),
              static_cast<int>(row.scale_type));
    EXPECT_EQ(info->carries_codebook,
              row.kind == core::CodeKind::kCodebook && row.codebook.empty());
    EXPECT_EQ(
        info->IsPlainInteger(),
        row.format == core::IntegerFormat(row.bits, row.is_signed).format &&
            row.kind == core::CodeKind::kInteger);
    if (info->IsPlainInteger()) {
      EXPECT_EQ(IntegerFormat(row.bits, row.is_signed).value(), format);
    }
  }
  EXPECT_FALSE(IntegerFormat(17, true).ok());
  EXPECT_FALSE(GetFormatInfo(v1::NUMBER_FORMAT_UNSPECIFIED).ok());
}

}  // namespace
}  // namespace quantd::server
