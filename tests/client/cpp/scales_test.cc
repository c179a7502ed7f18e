#include "client/cpp/scales.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "tests/client/cpp/scale_helpers.h"

namespace quantd {
namespace {

TEST(ScalesTest, ScalesComeBackWithTheSameBits) {
  for (const v1::ScaleType type :
       {v1::SCALE_TYPE_FLOAT32, v1::SCALE_TYPE_FLOAT16,
        v1::SCALE_TYPE_BFLOAT16}) {
    Encoding encoding = MakeEncoding(v1::NUMBER_FORMAT_UINT8, {1, 0});
    encoding.set_scale_type(type);
    for (const float scale : {0.5f, 1.5f, 0.25f}) encoding.add_scale(scale);
    for (const int zero_point : {0, 7, 255}) {
      encoding.add_zero_point(zero_point);
    }
    const ScaleBuffers scales = TakeScales(encoding);
    EXPECT_EQ(static_cast<int64_t>(scales.scale.size_bytes),
              3 * ScaleSizeBytes(type));
    Encoding bare = encoding;
    bare.clear_scale();
    bare.clear_zero_point();
    bare.set_scales_in_chunks(true);
    EXPECT_EQ(WithScales(bare, scales.view()).SerializeAsString(),
              encoding.SerializeAsString());
  }
}

}  // namespace
}  // namespace quantd
