#include "client/models/quantized_layout.h"

#include <cstdint>
#include <string>
#include <vector>

#include "client/cpp/scales.h"
#include "client/cpp/tensor_stream.h"
#include "client/files/safetensors_builder.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd {
namespace {

class QuantizedTensorTest : public ::testing::Test {
 protected:
  // Writes one tensor "w" and reads it again.
  QuantizedTensor RoundTrip(const std::vector<int64_t>& shape,
                            const Encoding& encoding,
                            const std::vector<uint8_t>& codes) {
    const auto builder =
        files::SafetensorsBuilder::Create(path_, files::IfExists::kReplace)
            .value();
    const ScaleBuffers scales = TakeScales(encoding);
    const auto place =
        QuantizedPlace::Reserve(
            1, "w", ElementType::kBfloat16, shape,
            WithoutScales(encoding, encoding.zero_point_size() > 0),
            builder.get())
            .value();
    EXPECT_TRUE(builder->PlaceAll(0).ok());
    QuantizeJob job;
    place->SetSinks(&job);
    EXPECT_TRUE(job.sink(0, codes).ok());
    EXPECT_TRUE(job.scale_sinks.scale(0, scales.scale.span()).ok());
    if (scales.zero_point.size_bytes > 0) {
      EXPECT_TRUE(job.scale_sinks.zero_point(0, scales.zero_point.span()).ok());
    }
    if (scales.outer_scale.size_bytes > 0) {
      EXPECT_TRUE(
          job.scale_sinks.outer_scale(0, scales.outer_scale.span()).ok());
    }
    size_bytes_ = place->Finish(encoding).value();
    EXPECT_TRUE(builder->Finish().ok());
    input_.emplace(TensorInput::Open(path_).value());
    const absl::StatusOr<QuantizedTensor> tensor =
        ReadQuantized(*input_, path_, "w", input_->metadata().at("quantd.w"));
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    return tensor.ok() ? *tensor : QuantizedTensor();
  }

  files::Dtype DtypeOfTensor(const std::string& name) const {
    return input_->Find(name)->dtype;
  }

  const testing::TemporaryDirectory directory_;
  const std::string path_ = directory_.File("quantized.safetensors");
  std::optional<TensorInput> input_;
  uint64_t size_bytes_ = 0;
};

Encoding MakeEncoding(v1::NumberFormat format,
                      const std::vector<int64_t>& block_size) {
  Encoding encoding;
  encoding.set_format(format);
  for (const int64_t size : block_size) encoding.add_block_size(size);
  return encoding;
}

TEST_F(QuantizedTensorTest, FloatsOfEightBitsHaveTheirOwnTypes) {
  const struct {
    v1::NumberFormat format;
    files::Dtype dtype;
  } cases[] = {
      {v1::NUMBER_FORMAT_FLOAT8_E4M3FN, files::Dtype::kF8E4M3},
      {v1::NUMBER_FORMAT_FLOAT8_E5M2, files::Dtype::kF8E5M2},
      {v1::NUMBER_FORMAT_FLOAT8_E4M3FNUZ, files::Dtype::kU8},
      {v1::NUMBER_FORMAT_FLOAT6_E3M2, files::Dtype::kU8},
      {v1::NUMBER_FORMAT_INT8, files::Dtype::kI8},
  };
  for (const auto& c : cases) {
    Encoding encoding = MakeEncoding(c.format, {});
    encoding.add_scale(0.5f);
    encoding.set_no_saturation(true);
    const std::vector<uint8_t> codes = {1, 2, 3, 4, 5, 6};
    const QuantizedTensor tensor = RoundTrip({2, 3}, encoding, codes);
    EXPECT_EQ(DtypeOfTensor("w"), c.dtype) << FormatName(c.format);
    EXPECT_EQ(tensor.encoding.format(), c.format);
    EXPECT_EQ(tensor.Whole().scale(0), 0.5f);
    EXPECT_TRUE(tensor.encoding.no_saturation());
    EXPECT_EQ(std::vector<uint8_t>(tensor.codes.begin(), tensor.codes.end()),
              codes);
    EXPECT_EQ(size_bytes_, 6u + 4u);
  }
}

TEST_F(QuantizedTensorTest, KeepsE8m0ScalesAsBytes) {
  Encoding encoding = MakeEncoding(v1::NUMBER_FORMAT_MXFP4_E2M1, {1, 32});
  const std::string scale_code("\x7f\x80\xff\x00", 4);
  encoding.set_scale_code(scale_code);
  for (int i = 0; i < 4; ++i) encoding.add_scale(1);
  const QuantizedTensor tensor =
      RoundTrip({2, 64}, encoding, std::vector<uint8_t>(64));
  EXPECT_EQ(DtypeOfTensor("w.scale"), files::Dtype::kU8);
  EXPECT_EQ(tensor.Whole().scale_code(), scale_code);
  EXPECT_EQ(tensor.encoding.scale_type(), v1::SCALE_TYPE_E8M0);
  EXPECT_TRUE(tensor.Whole().scale().empty());
  EXPECT_EQ(size_bytes_, 64u + 4u);
}

TEST_F(QuantizedTensorTest, KeepsScalesUnderOuterScales) {
  Encoding encoding = MakeEncoding(v1::NUMBER_FORMAT_LPBQ, {1, 4});
  encoding.set_scale_code("\1\2\3\4");
  encoding.add_outer_block_size(1);
  encoding.add_outer_block_size(0);
  encoding.add_outer_scale(0.25f);
  encoding.add_outer_scale(0.5f);
  QuantizedTensor tensor = RoundTrip({2, 8}, encoding, std::vector<uint8_t>(8));
  EXPECT_EQ(tensor.Whole().scale_code(), "\1\2\3\4");
  EXPECT_EQ(tensor.Whole().outer_scale_size(), 2);
  EXPECT_EQ(tensor.Whole().outer_scale(1), 0.5f);
  EXPECT_EQ(tensor.encoding.outer_block_size_size(), 2);
  EXPECT_EQ(tensor.encoding.scale_shape_size(), 2);
  EXPECT_EQ(tensor.encoding.scale_shape(1), 2);

  encoding = MakeEncoding(v1::NUMBER_FORMAT_NVFP4, {1, 16});
  encoding.set_scale_code("\x38\x39");
  encoding.add_outer_scale(0.125f);
  tensor = RoundTrip({2, 16}, encoding, std::vector<uint8_t>(16));
  EXPECT_EQ(DtypeOfTensor("w.scale"), files::Dtype::kF8E4M3);
  EXPECT_EQ(tensor.Whole().scale_code(), "\x38\x39");
  EXPECT_EQ(tensor.Whole().outer_scale(0), 0.125f);
}

TEST_F(QuantizedTensorTest, KeepsTheCodebook) {
  Encoding encoding = MakeEncoding(v1::NUMBER_FORMAT_CODEBOOK4, {});
  encoding.add_scale(2);
  for (const float entry : {-1.0f, -0.25f, 0.5f}) encoding.add_codebook(entry);
  const QuantizedTensor tensor = RoundTrip({3}, encoding, {0x10, 0x02});
  ASSERT_EQ(tensor.encoding.codebook_size(), 3);
  EXPECT_EQ(tensor.encoding.codebook(1), -0.25f);
  EXPECT_EQ(size_bytes_, 2u + 4u + 12u);
}

TEST_F(QuantizedTensorTest, NarrowScalesAreKeptExactly) {
  Encoding encoding = MakeEncoding(v1::NUMBER_FORMAT_INT8, {1});
  encoding.set_scale_type(v1::SCALE_TYPE_FLOAT16);
  // The smallest subnormal, subnormals, the smallest normal, the largest.
  const std::vector<float> halves = {0x1p-24f, 0x1.8p-23f, 0x1.ff8p-15f,
                                     0x1p-14f, 1.5f,       0x1.ffcp15f};
  encoding.mutable_scale()->Add(halves.begin(), halves.end());
  QuantizedTensor tensor = RoundTrip({6}, encoding, std::vector<uint8_t>(6));
  EXPECT_EQ(DtypeOfTensor("w.scale"), files::Dtype::kF16);
  Encoding whole = tensor.Whole();
  EXPECT_EQ(std::vector<float>(whole.scale().begin(), whole.scale().end()),
            halves);
  encoding.set_scale_type(v1::SCALE_TYPE_BFLOAT16);
  const std::vector<float> bfloats = {0x1p-126f,   0x1.02p-3f, 1.5f,
                                      0x1.fep127f, 1,          2};
  encoding.clear_scale();
  encoding.mutable_scale()->Add(bfloats.begin(), bfloats.end());
  tensor = RoundTrip({6}, encoding, std::vector<uint8_t>(6));
  whole = tensor.Whole();
  EXPECT_EQ(std::vector<float>(whole.scale().begin(), whole.scale().end()),
            bfloats);
  EXPECT_EQ(size_bytes_, 6u + 12u);
}

}  // namespace
}  // namespace quantd
