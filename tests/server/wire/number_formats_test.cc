// The three lists of number formats, in the proto, in core and in the client,
// are one.

#include <cstddef>

#include "absl/status/statusor.h"
#include "client/cpp/tensor.h"
#include "core/formats/number_format.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding.pb.h"

namespace quantd::server {
namespace {

TEST(NumberFormatsTest, AreTheSameToProtoCoreAndClient) {
  const auto* values = v1::NumberFormat_descriptor();
  // All but NUMBER_FORMAT_UNSPECIFIED.
  EXPECT_EQ(core::AllFormats().size(),
            static_cast<size_t>(values->value_count() - 1));
  for (const core::FormatInfo& row : core::AllFormats()) {
    SCOPED_TRACE(row.name);
    const auto format = static_cast<v1::NumberFormat>(row.format);
    EXPECT_EQ(FormatName(format), row.name);
    const absl::StatusOr<FormatInfo> info = GetFormatInfo(format);
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(static_cast<int>(info->kind), static_cast<int>(row.kind));
    EXPECT_EQ(info->bits, row.bits);
    EXPECT_EQ(info->storage_bits, row.storage_bits);
    EXPECT_EQ(info->is_signed, row.is_signed);
    EXPECT_EQ(info->qmin, row.qmin);
    EXPECT_EQ(info->qmax, row.qmax);
    EXPECT_EQ(info->max_value, row.max_value);
    EXPECT_EQ(info->default_group, row.default_group);
    EXPECT_EQ(static_cast<int>(info->scale_type),
              static_cast<int>(row.scale_type));
  }
}

}  // namespace
}  // namespace quantd::server
