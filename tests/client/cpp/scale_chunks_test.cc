#include "client/cpp/scale_chunks.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/client/cpp/scale_helpers.h"

namespace quantd::internal::scale_chunks_test {
namespace {

TEST(ScaleChunksTest, ZeroPointsComeBackFromTheirCodes) {
  const std::vector<int32_t> negative = {-128, -1, 0, 127};
  const struct {
    v1::NumberFormat format;
    bool exclude_zero;
    int64_t size_bytes;
    std::vector<int32_t> values;
  } cases[] = {
      {v1::NUMBER_FORMAT_INT8, false, 1, negative},
      {v1::NUMBER_FORMAT_UINT8, false, 1, {0, 128, 255}},
      {v1::NUMBER_FORMAT_UINT4, false, 1, {0, 15}},
      {v1::NUMBER_FORMAT_INT16, false, 2, {-32768, 32767}},
      {v1::NUMBER_FORMAT_UINT16, false, 2, {0, 65535}},
      {v1::NUMBER_FORMAT_UINT8, true, 4, {-4194304, 4194304}},
      {v1::NUMBER_FORMAT_INT32, false, 4, {0, 0}},
  };
  for (const auto& c : cases) {
    Encoding encoding = MakeEncoding(c.format, {});
    encoding.set_exclude_zero(c.exclude_zero);
    const std::string narrow = NarrowZeroPoints(encoding, BytesOf(c.values));
    EXPECT_EQ(narrow.size(),
              c.values.size() * static_cast<size_t>(c.size_bytes));
    EXPECT_EQ(WidenZeroPoints(
                  encoding, absl::MakeConstSpan(
                                reinterpret_cast<const uint8_t*>(narrow.data()),
                                narrow.size())),
              c.values);
  }
}

// By trying all elements.
int64_t SlowScalesOfFirst(const std::vector<int64_t>& shape,
                          const std::vector<int64_t>& block_size,
                          int64_t count) {
  const std::vector<int64_t> scales = *ScaleShape(shape, block_size);
  int64_t largest = 0;
  for (int64_t element = 0; element < count; ++element) {
    int64_t rest = element;
    int64_t index = 0;
    int64_t stride = 1;
    for (size_t d = shape.size(); d-- > 0;) {
      const int64_t at = rest % shape[d];
      rest /= shape[d];
      index += (block_size[d] == 0 ? 0 : at / block_size[d]) * stride;
      stride *= scales[d];
    }
    largest = std::max(largest, index);
  }
  return largest + 1;
}

TEST(ScaleChunksTest, CountsTheScalesOfAnyBeginning) {
  const struct {
    std::vector<int64_t> shape;
    std::vector<int64_t> block_size;
  } cases[] = {
      {{4, 6}, {1, 4}}, {{4, 6}, {1, 0}},       {{5, 7}, {2, 3}},
      {{5, 7}, {0, 3}}, {{3, 4, 5}, {2, 0, 2}}, {{3, 4, 5}, {0, 3, 0}},
      {{9}, {2}},       {{1, 9}, {1, 2}},       {{2, 3}, {0, 0}},
  };
  for (const auto& c : cases) {
    int64_t elements = 1;
    for (const int64_t size : c.shape) elements *= size;
    for (int64_t count = 1; count <= elements; ++count) {
      EXPECT_EQ(ScalesOfFirst(c.shape, c.block_size, count),
                SlowScalesOfFirst(c.shape, c.block_size, count))
          << count;
    }
  }
}

}  // namespace
}  // namespace quantd::internal::scale_chunks_test
