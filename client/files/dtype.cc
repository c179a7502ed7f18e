#include "client/files/dtype.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/half.h"

namespace quantd::files {
namespace {

struct DtypeRow {
  Dtype dtype;
  absl::string_view name;
  int64_t size_bits;
};

// In the order of the enum.
constexpr DtypeRow kRows[] = {
    {Dtype::kBool, "BOOL", 8},      {Dtype::kU8, "U8", 8},
    {Dtype::kI8, "I8", 8},          {Dtype::kF8E5M2, "F8_E5M2", 8},
    {Dtype::kF8E4M3, "F8_E4M3", 8}, {Dtype::kF8E8M0, "F8_E8M0", 8},
    {Dtype::kI16, "I16", 16},       {Dtype::kU16, "U16", 16},
    {Dtype::kF16, "F16", 16},       {Dtype::kBF16, "BF16", 16},
    {Dtype::kI32, "I32", 32},       {Dtype::kU32, "U32", 32},
    {Dtype::kF32, "F32", 32},       {Dtype::kF64, "F64", 64},
    {Dtype::kI64, "I64", 64},       {Dtype::kU64, "U64", 64},
    {Dtype::kC64, "C64", 64},       {Dtype::kF4, "F4", 4},
    {Dtype::kF6E2M3, "F6_E2M3", 6}, {Dtype::kF6E3M2, "F6_E3M2", 6},
};

int64_t SizeBits(Dtype dtype) {
  return kRows[static_cast<int>(dtype)].size_bits;
}

// Elements whose bits but for the sign are these.
template <typename Bits>
uint64_t CountMagnitudes(absl::Span<const uint8_t> data, Bits magnitude) {
  constexpr auto kAllButSign =
      static_cast<Bits>(std::numeric_limits<Bits>::max() >> 1);
  uint64_t count = 0;
  for (size_t i = 0; i + sizeof(Bits) <= data.size(); i += sizeof(Bits)) {
    Bits bits = 0;
    std::memcpy(&bits, data.data() + i, sizeof(bits));
    count += (bits & kAllButSign) == magnitude ? 1 : 0;
  }
  return count;
}

}  // namespace

int64_t DtypeSizeBytes(Dtype dtype) { return (SizeBits(dtype) + 7) / 8; }

bool IsPowerScale(Dtype dtype) {
  return dtype == Dtype::kU8 || dtype == Dtype::kF8E8M0;
}

absl::string_view DtypeName(Dtype dtype) {
  return kRows[static_cast<int>(dtype)].name;
}

std::optional<Dtype> ParseDtype(absl::string_view name) {
  for (const DtypeRow& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

std::optional<int64_t> TensorSizeBytes(Dtype dtype,
                                       absl::Span<const int64_t> shape) {
  int64_t size = DtypeSizeBytes(dtype);
  bool is_empty = false;
  for (const int64_t dimension : shape) {
    if (dimension < 0) return std::nullopt;
    if (dimension == 0) {
      is_empty = true;
      continue;
    }
    if (size > std::numeric_limits<int64_t>::max() / dimension) {
      return std::nullopt;
    }
    size *= dimension;
  }
  if (is_empty) return 0;
  const int64_t bits = SizeBits(dtype);
  if (bits % 8 == 0) return size;
  // Here `size` is that of elements of a byte each.
  if (size % 8 * bits % 8 != 0) return std::nullopt;
  return size / 8 * bits + size % 8 * bits / 8;
}

float ReadHalf(const uint8_t* bytes) {
  return HalfValue(static_cast<uint16_t>(bytes[0] | bytes[1] << 8));
}

uint16_t NearestHalf(float value) {
  if (value == 0) return 0;
  const float magnitude = std::fabs(value);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  // Exponent of the last bit.
  exponent = std::max(exponent - 11, -24);
  // 2^10 and more but for subnormal numbers; 2^11 where it rounds up to the
  // next power of two, which carries into the exponent.
  const int steps =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, -exponent)));
  const int bits = ((exponent + 24) << 10) + steps;
  return static_cast<uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0));
}

std::vector<uint8_t> Widen(Dtype from, absl::Span<const uint8_t> data,
                           Dtype to) {
  if (from == to) return {data.begin(), data.end()};
  const size_t from_bytes = static_cast<size_t>(DtypeSizeBytes(from));
  const size_t to_bytes = static_cast<size_t>(DtypeSizeBytes(to));
  const size_t count = data.size() / from_bytes;
  std::vector<uint8_t> wide(count * to_bytes);
  for (size_t i = 0; i < count; ++i) {
    const uint8_t* const element = data.data() + i * from_bytes;
    float value = 0;
    if (from == Dtype::kF16) {
      value = ReadHalf(element);
    } else if (from == Dtype::kBF16) {
      // The upper half of a float32.
      std::memcpy(reinterpret_cast<uint8_t*>(&value) + 2, element, 2);
    } else {
      std::memcpy(&value, element, sizeof(value));
    }
    if (to == Dtype::kF64) {
      const double as_double = value;
      std::memcpy(wide.data() + i * to_bytes, &as_double, sizeof(as_double));
    } else {
      std::memcpy(wide.data() + i * to_bytes, &value, sizeof(value));
    }
  }
  return wide;
}

uint64_t CountInfinities(Dtype dtype, absl::Span<const uint8_t> data) {
  switch (dtype) {
    case Dtype::kF16:
      return CountMagnitudes<uint16_t>(data, 0x7C00);
    case Dtype::kBF16:
      return CountMagnitudes<uint16_t>(data, 0x7F80);
    case Dtype::kF64:
      return CountMagnitudes<uint64_t>(data, uint64_t{0x7FF} << 52);
    default:
      return CountMagnitudes<uint32_t>(data, uint32_t{0xFF} << 23);
  }
}

double LargestNumber(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF16:
      return kMostHalf;
    case Dtype::kBF16:
      return 0x1.FEp127;
    case Dtype::kF64:
      return std::numeric_limits<double>::max();
    default:
      return std::numeric_limits<float>::max();
  }
}

}  // namespace quantd::files
