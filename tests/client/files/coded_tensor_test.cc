#include "client/files/coded_tensor.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/lazy_bytes.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd::files::coded_tensor_test {
namespace {

using ::testing::ElementsAre;

template <typename T>
std::vector<uint8_t> BytesOf(const std::vector<T>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Bit `index` of words whose lowest bits come first: on a little-endian machine
// that is bit index % 8 of byte index / 8, whatever the words.
uint32_t BitOf(const std::vector<uint8_t>& bytes, int64_t index) {
  return bytes[static_cast<size_t>(index / 8)] >> (index % 8) & 1;
}

TEST(CodeStreamTest, ReadsValuesAcrossWords) {
  std::minstd_rand random(1);
  std::vector<uint8_t> bytes(240);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  for (const int word_bytes : {1, 4}) {
    for (const int bits : {1, 2, 3, 4, 5, 6, 7, 8}) {
      constexpr int64_t kLineBytes = 24;
      CodeStream stream;
      stream.bytes = bytes;
      stream.bits = bits;
      stream.word_bytes = word_bytes;
      stream.line_words = kLineBytes / word_bytes;
      for (int64_t line = 0; line < 10; ++line) {
        for (int64_t i = 0; i < kLineBytes * 8 / bits; ++i) {
          uint32_t expected = 0;
          for (int bit = 0; bit < bits; ++bit) {
            expected |= BitOf(bytes, line * kLineBytes * 8 + i * bits + bit)
                        << bit;
          }
          ASSERT_EQ(stream.Get(line, i), expected)
              << word_bytes << " " << bits << " " << line << " " << i;
        }
      }
    }
  }
}

TEST(CodeStreamTest, GoesDownColumnsOfWords) {
  // Two rows of three words of eight codes; lines are columns.
  const std::vector<uint8_t> bytes =
      BytesOf<uint32_t>({0x76543210, 0x11111111, 0x22222222,  //
                         0xFEDCBA98, 0x33333333, 0x44444444});
  CodeStream stream;
  stream.bytes = bytes;
  stream.bits = 4;
  stream.word_bytes = 4;
  stream.line_words = 1;
  stream.stride_words = 3;
  for (int64_t row = 0; row < 16; ++row) {
    EXPECT_EQ(stream.Get(0, row), row);
    EXPECT_EQ(stream.Get(2, row), row < 8 ? 2u : 4u);
  }
}

TEST(CodeStreamTest, LinesNeedNoWordsOfTheirOwn) {
  const std::vector<uint8_t> bytes = {0x10, 0x32, 0x54};
  CodeStream stream;
  stream.bytes = bytes;
  stream.bits = 4;
  stream.line_values = 3;
  EXPECT_EQ(stream.Get(0, 2), 2u);
  EXPECT_EQ(stream.Get(1, 0), 3u);
  EXPECT_EQ(stream.Get(1, 2), 5u);
}

TEST(CodeStreamTest, ValuesMayLieInAnotherOrderInTheirWord) {
  const std::vector<uint8_t> bytes =
      BytesOf<uint32_t>({0x76543210, 0xFEDCBA98});
  constexpr uint8_t kPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  CodeStream stream;
  stream.bytes = bytes;
  stream.bits = 4;
  stream.word_bytes = 4;
  stream.places = kPlaces;
  for (int64_t i = 0; i < 16; ++i) {
    EXPECT_EQ(stream.Get(0, i), i / 8 * 8 + kPlaces[i % 8]) << i;
  }
}

// [2, 2, 4] codes of 4 bits, 0 to 15, with a scale for each row of a matrix.
class CodedTensorTest : public ::testing::Test {
 protected:
  CodedTensorTest() {
    tensor_.shape = {2, 2, 4};
    tensor_.matrices = 2;
    tensor_.rows = 2;
    tensor_.columns = 4;
    tensor_.codes.bytes = codes_;
    tensor_.codes.bits = 4;
    tensor_.codes.line_words = 2;
    tensor_.scales.data = scales_;
    tensor_.scales.columns = 4;
    tensor_.scales.matrix_step = 2;
    tensor_.scales.row_step = 1;
    tensor_.scales.column_step = 1;
  }

  template <typename T = float>
  std::vector<T> Decode(int64_t begin, int64_t end) const {
    std::vector<T> values(static_cast<size_t>((end - begin) * tensor_.columns));
    tensor_.DecodeRows(
        begin, end,
        {reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(T)});
    return values;
  }

  const std::vector<uint8_t> codes_ = {0x10, 0x32, 0x54, 0x76,
                                       0x98, 0xBA, 0xDC, 0xFE};
  const std::vector<uint8_t> scales_ = BytesOf<float>({1, 10, 100, 1000});
  CodedTensor tensor_;
};

TEST_F(CodedTensorTest, MultipliesByTheScaleOfTheRow) {
  EXPECT_THAT(Decode(0, 4),
              ElementsAre(0, 1, 2, 3, 40, 50, 60, 70, 800, 900, 1000, 1100,
                          12000, 13000, 14000, 15000));
  // Any rows by themselves, also over the end of a matrix.
  EXPECT_THAT(Decode(1, 3), ElementsAre(40, 50, 60, 70, 800, 900, 1000, 1100));
  EXPECT_THAT(Decode(2, 2), ElementsAre());
}

TEST_F(CodedTensorTest, SubtractsZeroPointsBefore) {
  const std::vector<int32_t> zero_points = {1, 4, 8, 16};
  tensor_.zero_points = zero_points;
  EXPECT_THAT(Decode(1, 4), ElementsAre(0, 10, 20, 30, 0, 100, 200, 300, -4000,
                                        -3000, -2000, -1000));
}

TEST_F(CodedTensorTest, ZeroPointsMayBeCodesToo) {
  // Blocks of two columns; a line of zero points for each, a value to a row.
  const std::vector<uint8_t> zero_points = {0x10, 0x32};
  tensor_.matrices = 1;
  tensor_.scales.columns = 2;
  tensor_.scales.row_step = 2;
  tensor_.zero_point_stream = CodeStream{zero_points, 4};
  tensor_.zero_point_stream->line_words = 1;
  tensor_.zero_point_add = 1;
  // Zero points 1 and 3 of row 0, 2 and 4 of row 1.
  EXPECT_THAT(Decode(0, 2), ElementsAre(-1, 0, -10, 0, 200, 300, 2000, 3000));
}

TEST_F(CodedTensorTest, ColumnsMayNameTheirBlocks) {
  const std::vector<uint8_t> blocks = BytesOf<int32_t>({1, 0, 1, 0});
  tensor_.scales.columns = 2;
  tensor_.scales.row_step = 2;
  tensor_.scales.column_blocks = blocks;
  EXPECT_THAT(Decode(0, 2), ElementsAre(0, 1, 20, 3, 4000, 500, 6000, 700));
}

TEST_F(CodedTensorTest, LinesMayBeColumns) {
  // One [2, 4] matrix, column by column.
  tensor_.matrices = 1;
  tensor_.lines_are_columns = true;
  tensor_.codes.line_words = 1;
  EXPECT_THAT(Decode(0, 2), ElementsAre(0, 2, 4, 6, 10, 30, 50, 70));
}

TEST_F(CodedTensorTest, OuterScalesAreOfAllOrOfAMatrix) {
  const std::vector<uint8_t> one = BytesOf<float>({0.5f});
  tensor_.scales.outer = one;
  EXPECT_THAT(Decode(2, 3), ElementsAre(400, 450, 500, 550));
  const std::vector<uint8_t> two = BytesOf<float>({0.5f, 0.25f});
  tensor_.scales.outer = two;
  EXPECT_THAT(Decode(0, 1), ElementsAre(0, 0.5f, 1, 1.5f));
  EXPECT_THAT(Decode(2, 3), ElementsAre(200, 225, 250, 275));
}

TEST_F(CodedTensorTest, CodesStandForWhatTheirTypeSays) {
  tensor_.scales.row_step = 0;
  tensor_.scales.matrix_step = 0;
  tensor_.values = CodeValues::kSigned;
  EXPECT_THAT(Decode(1, 3), ElementsAre(4, 5, 6, 7, -8, -7, -6, -5));
  tensor_.values = CodeValues::kE2M1;
  EXPECT_THAT(Decode(0, 2), ElementsAre(0, 0.5f, 1, 1.5f, 2, 3, 4, 6));
  EXPECT_THAT(Decode(3, 4), ElementsAre(-2, -3, -4, -6));
  tensor_.codes.bits = 8;
  tensor_.codes.line_words = 4;
  tensor_.matrices = 1;
  tensor_.rows = 1;
  const std::vector<uint8_t> bytes = {0x38, 0x7E, 0x01, 0xFF};
  tensor_.codes.bytes = bytes;
  tensor_.values = CodeValues::kE4M3;
  std::vector<float> values = Decode(0, 1);
  EXPECT_EQ(values[0], 1);
  EXPECT_EQ(values[1], 448);
  EXPECT_EQ(values[2], 0x1p-9f);
  EXPECT_TRUE(std::isnan(values[3]));
  tensor_.values = CodeValues::kE5M2;
  const std::vector<uint8_t> wide = {0x3C, 0x7B, 0xFC, 0x7D};
  tensor_.codes.bytes = wide;
  values = Decode(0, 1);
  EXPECT_EQ(values[0], 1);
  EXPECT_EQ(values[1], 57344);
  EXPECT_EQ(values[2], -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(values[3]));
}

TEST_F(CodedTensorTest, ScalesMayBeOfAnyTypeThatFilesHave) {
  const struct {
    Dtype dtype;
    std::vector<uint8_t> data;
  } cases[] = {
      {Dtype::kF16, BytesOf<uint16_t>({0x4000})},
      {Dtype::kBF16, BytesOf<uint16_t>({0x4000})},
      {Dtype::kF8E4M3, {0x40}},
      {Dtype::kU8, {128}},
  };
  tensor_.scales.row_step = 0;
  tensor_.scales.matrix_step = 0;
  for (const auto& c : cases) {
    tensor_.scales.dtype = c.dtype;
    tensor_.scales.data = c.data;
    EXPECT_THAT(Decode(0, 1), ElementsAre(0, 2, 4, 6));
  }
  const std::vector<uint8_t> nan = {255};
  tensor_.scales.data = nan;
  EXPECT_TRUE(std::isnan(Decode(0, 1)[1]));
}

TEST_F(CodedTensorTest, RoundsRealsToNearestTiesToEven) {
  tensor_.scales.row_step = 0;
  tensor_.scales.matrix_step = 0;
  const auto decode = [this](float scale) {
    const std::vector<uint8_t> data = BytesOf<float>({scale});
    tensor_.scales.data = data;
    return Decode<uint16_t>(0, 1)[1];
  };
  tensor_.dtype = Dtype::kBF16;
  EXPECT_EQ(decode(0x1.01p0f), 0x3F80);
  EXPECT_EQ(decode(0x1.03p0f), 0x3F82);
  EXPECT_EQ(decode(0x1.0302p0f), 0x3F82);
  EXPECT_EQ(decode(0x1.0102p0f), 0x3F81);
  EXPECT_EQ(decode(std::numeric_limits<float>::max()), 0x7F80);
  tensor_.dtype = Dtype::kF16;
  EXPECT_EQ(decode(1), 0x3C00);
  EXPECT_EQ(decode(0x1.002p0f), 0x3C00);
  EXPECT_EQ(decode(0x1.006p0f), 0x3C02);
  EXPECT_EQ(decode(65504), 0x7BFF);
  EXPECT_EQ(decode(65519.996f), 0x7BFF);
  EXPECT_EQ(decode(65520), 0x7C00);
  EXPECT_EQ(decode(-65520), 0xFC00);
  // Subnormals: half of the smallest is a tie with 0.
  EXPECT_EQ(decode(0x1p-24f), 0x0001);
  EXPECT_EQ(decode(0x1p-25f), 0x0000);
  EXPECT_EQ(decode(0x1.8p-24f), 0x0002);
  EXPECT_EQ(decode(-0x1p-14f), 0x8400);
  EXPECT_EQ(decode(std::numeric_limits<float>::quiet_NaN()) & 0x7E00, 0x7E00);
  tensor_.dtype = Dtype::kF64;
  const std::vector<uint8_t> data = BytesOf<float>({0.1f});
  tensor_.scales.data = data;
  EXPECT_EQ(Decode<double>(0, 1)[1], double{0.1f});
}

TEST_F(CodedTensorTest, MakesCodesOnlyWhileSomebodyHoldsThem) {
  int fills = 0;
  tensor_.lazy =
      std::make_shared<LazyBytes>(codes_.size(), [&](absl::Span<uint8_t> out) {
        ++fills;
        std::memcpy(out.data(), codes_.data(), codes_.size());
      });
  tensor_.codes.bytes = tensor_.lazy->span();
  EXPECT_THAT(Decode(0, 1), ElementsAre(0, 1, 2, 3));
  Decode(1, 2);
  EXPECT_EQ(fills, 2);
  const std::shared_ptr<const void> hold = tensor_.Hold();
  Decode(0, 1);
  Decode(1, 2);
  EXPECT_EQ(fills, 3);
}

}  // namespace
}  // namespace quantd::files::coded_tensor_test
