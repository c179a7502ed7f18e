#include "client/files/coded_tensor.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#include "absl/types/span.h"
#include "client/files/dtype.h"

namespace quantd::files {
namespace {

using Table = std::array<float, 256>;

template <typename T>
T ElementAt(absl::Span<const uint8_t> data, int64_t index) {
  T value;
  std::memcpy(&value, data.data() + index * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

// A small float: sign, exponent, mantissa; without its special values.
float SmallFloat(uint32_t code, int exponent_bits, int mantissa_bits,
                 int bias) {
  const uint32_t mantissa_size = 1U << mantissa_bits;
  const uint32_t mantissa = code & (mantissa_size - 1);
  const uint32_t exponent =
      (code >> mantissa_bits) & ((1U << exponent_bits) - 1);
  const bool is_negative = (code >> (exponent_bits + mantissa_bits) & 1) != 0;
  const float fraction =
      static_cast<float>(exponent == 0 ? mantissa : mantissa + mantissa_size);
  const int power =
      (exponent == 0 ? 1 : static_cast<int>(exponent)) - bias - mantissa_bits;
  const float value = std::ldexp(fraction, power);
  return is_negative ? -value : value;
}

float E4M3(uint32_t code) {
  return (code & 127) == 127 ? std::numeric_limits<float>::quiet_NaN()
                             : SmallFloat(code, 4, 3, 7);
}

float E5M2(uint32_t code) {
  const uint32_t magnitude = code & 127;
  if (magnitude > 0x7C) return std::numeric_limits<float>::quiet_NaN();
  if (magnitude < 0x7C) return SmallFloat(code, 5, 2, 15);
  const float infinity = std::numeric_limits<float>::infinity();
  return code == magnitude ? infinity : -infinity;
}

float ValueOf(CodeValues values, int bits, uint32_t code) {
  switch (values) {
    case CodeValues::kUnsigned:
      return static_cast<float>(code);
    case CodeValues::kSigned:
      return static_cast<float>(static_cast<int32_t>(code << (32 - bits)) >>
                                (32 - bits));
    case CodeValues::kE2M1:
      return SmallFloat(code, 2, 1, 1);
    case CodeValues::kE4M3:
      return E4M3(code);
    case CodeValues::kE5M2:
      return E5M2(code);
  }
  return 0;
}

Table TableOf(CodeValues values, int bits) {
  Table table = {};
  for (uint32_t code = 0; code < (1U << bits); ++code) {
    table[code] = ValueOf(values, bits, code);
  }
  return table;
}

// To nearest, ties to even; a NaN stays one.
uint16_t ToBfloat16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 64);
  bits += 0x7FFF + (bits >> 16 & 1);
  return static_cast<uint16_t>(bits >> 16);
}

uint16_t ToHalf(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (std::isnan(value)) {
    return static_cast<uint16_t>(sign | 0x7E00 | (bits >> 13 & 0x3FF));
  }
  const float magnitude = std::fabs(value);
  // Halfway between the largest and what would be the next.
  if (magnitude >= 65520) return static_cast<uint16_t>(sign | 0x7C00);
  if (magnitude < 0x1p-14F) {
    // In steps of the smallest; the sum rounds.
    const float shifted = magnitude * 0x1p24F + 0x1p23F;
    uint32_t steps = 0;
    std::memcpy(&steps, &shifted, sizeof(steps));
    return static_cast<uint16_t>(sign | (steps & 0x7FFF));
  }
  uint32_t rounded = (bits & 0x7FFFFFFF) + 0xFFF + (bits >> 13 & 1);
  rounded -= 112U << 23;
  return static_cast<uint16_t>(sign | rounded >> 13);
}

void Store(float value, Dtype dtype, uint8_t* out) {
  switch (dtype) {
    case Dtype::kF16: {
      const uint16_t half = ToHalf(value);
      std::memcpy(out, &half, sizeof(half));
      return;
    }
    case Dtype::kBF16: {
      const uint16_t bfloat16 = ToBfloat16(value);
      std::memcpy(out, &bfloat16, sizeof(bfloat16));
      return;
    }
    case Dtype::kF64: {
      const double wide = value;
      std::memcpy(out, &wide, sizeof(wide));
      return;
    }
    default:
      std::memcpy(out, &value, sizeof(value));
  }
}

}  // namespace

uint32_t CodeStream::Get(int64_t line, int64_t position) const {
  // Bits of a word, as a power of two.
  const int word_bits_log2 = word_bytes == 1 ? 3 : 5;
  const int64_t word_bits = int64_t{1} << word_bits_log2;
  if (places != nullptr) {
    // Codes with places have 4 or 8 bits.
    const int64_t in_word = position & (bits == 4 ? 7 : 3);
    position += places[in_word] - in_word;
  }
  const int64_t bit = (line * line_values + position) * bits;
  const int64_t word =
      line * line_words + (bit >> word_bits_log2) * stride_words;
  const int shift = static_cast<int>(bit & (word_bits - 1));
  const auto at = [this](int64_t index) {
    return word_bytes == 1 ? uint32_t{bytes[static_cast<size_t>(index)]}
                           : ElementAt<uint32_t>(bytes, index);
  };
  uint64_t value = at(word) >> shift;
  if (shift + bits > word_bits) {
    value |= uint64_t{at(word + stride_words)} << (word_bits - shift);
  }
  return static_cast<uint32_t>(value) & ((1U << bits) - 1);
}

int64_t CodeScales::BlockOf(int64_t column) const {
  return column_blocks.empty() ? column / columns
                               : ElementAt<int32_t>(column_blocks, column);
}

float CodeScales::At(int64_t matrix, int64_t index) const {
  float scale = 0;
  switch (dtype) {
    case Dtype::kF16:
      scale = ReadHalf(data.data() + index * 2);
      break;
    case Dtype::kBF16: {
      const uint32_t bits = uint32_t{ElementAt<uint16_t>(data, index)} << 16;
      std::memcpy(&scale, &bits, sizeof(scale));
      break;
    }
    case Dtype::kF8E4M3:
      scale = E4M3(data[static_cast<size_t>(index)]);
      break;
    case Dtype::kU8: {
      const uint8_t code = data[static_cast<size_t>(index)];
      scale = code == 255 ? std::numeric_limits<float>::quiet_NaN()
                          : std::ldexp(1.0F, code - 127);
      break;
    }
    default:
      scale = ElementAt<float>(data, index);
  }
  if (!outer.empty()) {
    const float by = ElementAt<float>(outer, outer.size() == 4 ? 0 : matrix);
    scale = divides_by_outer ? scale / by : scale * by;
  }
  return scale;
}

void CodedTensor::DecodeRows(int64_t begin, int64_t end,
                             absl::Span<uint8_t> out) const {
  const std::shared_ptr<const void> hold = Hold();
  const Table table = TableOf(values, codes.bits);
  const int64_t element_bytes = DtypeSizeBytes(dtype);
  uint8_t* next = out.data();
  for (int64_t number = begin; number < end; ++number) {
    const int64_t matrix = number / rows;
    const int64_t row = number % rows;
    const int64_t of_row = scales.IndexOf(matrix, row, 0);
    float scale = 0;
    float zero_point = 0;
    // Column where the next scale begins.
    int64_t change = 0;
    for (int64_t column = 0; column < columns; ++column) {
      if (column == change) {
        const int64_t block = scales.BlockOf(column);
        const int64_t index = of_row + block * scales.column_step;
        scale = scales.At(matrix, index);
        if (zero_point_stream.has_value()) {
          zero_point = static_cast<float>(
              static_cast<int32_t>(zero_point_stream->Get(block, row)) +
              zero_point_add);
        } else if (!zero_points.empty()) {
          zero_point =
              static_cast<float>(zero_points[static_cast<size_t>(index)]);
        }
        change += scales.column_blocks.empty() ? scales.columns : 1;
      }
      const uint32_t code = lines_are_columns
                                ? codes.Get(matrix * columns + column, row)
                                : codes.Get(number, column);
      Store((table[code] - zero_point) * scale, dtype, next);
      next += element_bytes;
    }
  }
}

}  // namespace quantd::files
