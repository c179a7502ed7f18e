#include "core/formats/packing.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core {
namespace {

TEST(PackingTest, StoresAndLoadsEveryCodeOfEveryFormat) {
  for (const FormatInfo& format : AllFormats()) {
    if (format.kind != CodeKind::kInteger) continue;
    SCOPED_TRACE(format.name);
    std::vector<int32_t> codes;
    // Of wide ones those about the ends and about powers of two.
    const int64_t step = IsWideInteger(format) ? 65535 : 1;
    for (int64_t code = format.qmin; code <= format.qmax; code += step) {
      codes.push_back(static_cast<int32_t>(code));
    }
    codes.push_back(format.qmax);
    const int64_t count = static_cast<int64_t>(codes.size());
    std::vector<uint8_t> bytes(format.SizeBytes(count));
    for (int64_t i = 0; i < count; ++i) {
      StoreCode(format, codes[i], i, bytes.data());
    }
    EXPECT_TRUE(bytes == NaivePack(format, codes));
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(LoadCode(format, bytes.data(), i), codes[i]);
    }
  }
}

TEST(PackingTest, PutsTheFirstCodeInTheLowestBits) {
  std::vector<uint8_t> bytes(8);
  for (int i = 0; i < 4; ++i) {
    StoreCode(IntegerFormat(2, false), i, i, bytes.data());
  }
  EXPECT_EQ(bytes[0], 0xE4);
  bytes.assign(8, 0);
  StoreCode(IntegerFormat(4, true), -1, 0, bytes.data());
  StoreCode(IntegerFormat(4, true), 3, 1, bytes.data());
  EXPECT_EQ(bytes[0], 0x3F);
}

}  // namespace
}  // namespace quantd::core
