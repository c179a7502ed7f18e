#include "core/types/scale_bytes.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/types/span.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

// Appends `to_value(values[begin..end))`, of the type that it has.
template <typename Value, typename ToValue>
void AppendValues(const std::vector<Value>& values, int64_t begin, int64_t end,
                  const ToValue& to_value, std::string* bytes) {
  using Stored = std::decay_t<decltype(to_value(values[0]))>;
  const size_t size = bytes->size();
  bytes->resize(size + static_cast<size_t>(end - begin) * sizeof(Stored));
  auto* out = reinterpret_cast<uint8_t*>(bytes->data()) + size;
  for (int64_t i = begin; i < end; ++i, out += sizeof(Stored)) {
    StoreUnaligned(to_value(values[i]), out);
  }
}

// Appends `from_stored(value)` of each value that the bytes hold.
template <typename Stored, typename FromStored, typename Value>
void ReadValues(absl::Span<const uint8_t> bytes, const FromStored& from_stored,
                std::vector<Value>* values) {
  const size_t count = bytes.size() / sizeof(Stored);
  const size_t begin = values->size();
  values->resize(begin + count);
  Value* const out = values->data() + begin;
  for (size_t i = 0; i < count; ++i) {
    out[i] =
        from_stored(LoadUnaligned<Stored>(bytes.data() + i * sizeof(Stored)));
  }
}

template <typename Stored>
void ReadZeroPoints(absl::Span<const uint8_t> bytes,
                    std::vector<int32_t>* zero_points) {
  ReadValues<Stored>(
      bytes, [](Stored value) { return static_cast<int32_t>(value); },
      zero_points);
}

}  // namespace

int64_t ZeroPointSizeBytes(const Encoding& encoding) {
  if (encoding.zero_points_are_real) return sizeof(float);
  if (encoding.exclude_zero) return sizeof(int32_t);
  return std::max(FindFormat(encoding.format)->storage_bits / 8, 1);
}

void AppendScaleBytes(const Encoding& encoding, int64_t begin, int64_t end,
                      std::string* scale, std::string* zero_point) {
  switch (encoding.scale_type) {
    case ScaleType::kDefault:
    case ScaleType::kFloat32:
      AppendValues(
          encoding.scale, begin, end, [](float value) { return value; }, scale);
      break;
    case ScaleType::kFloat16:
      AppendValues(encoding.scale, begin, end, FloatToHalf, scale);
      break;
    case ScaleType::kBfloat16:
      AppendValues(encoding.scale, begin, end, FloatToBfloat, scale);
      break;
    case ScaleType::kE8m0:
    case ScaleType::kE4m3:
    case ScaleType::kInteger:
      scale->append(
          reinterpret_cast<const char*>(encoding.scale_code.data()) + begin,
          static_cast<size_t>(end - begin));
      break;
  }
  if (!encoding.real_zero_point.empty()) {
    AppendValues(
        encoding.real_zero_point, begin, end, [](float value) { return value; },
        zero_point);
  }
  if (encoding.zero_point.empty()) return;
  const std::vector<int32_t>& values = encoding.zero_point;
  switch (ZeroPointSizeBytes(encoding)) {
    case 1:
      AppendValues(
          values, begin, end,
          [](int32_t value) { return static_cast<uint8_t>(value); },
          zero_point);
      break;
    case 2:
      AppendValues(
          values, begin, end,
          [](int32_t value) { return static_cast<uint16_t>(value); },
          zero_point);
      break;
    default:
      AppendValues(
          values, begin, end, [](int32_t value) { return value; }, zero_point);
      break;
  }
}

void ReserveScales(int64_t scale_count, bool has_zero_points,
                   Encoding* encoding) {
  const auto count = static_cast<size_t>(scale_count);
  encoding->scale.reserve(count);
  if (has_zero_points && encoding->zero_points_are_real) {
    encoding->real_zero_point.reserve(count);
  } else if (has_zero_points) {
    encoding->zero_point.reserve(count);
  }
  if (HasScaleCodes(encoding->scale_type)) encoding->scale_code.reserve(count);
}

void AppendScales(absl::Span<const uint8_t> bytes, Encoding* encoding) {
  std::vector<float>& scale = encoding->scale;
  switch (encoding->scale_type) {
    case ScaleType::kFloat16:
      return ReadValues<uint16_t>(bytes, HalfToFloat, &scale);
    case ScaleType::kBfloat16:
      return ReadValues<uint16_t>(bytes, BfloatToFloat, &scale);
    case ScaleType::kE8m0:
    case ScaleType::kE4m3:
    case ScaleType::kInteger:
      encoding->scale_code.insert(encoding->scale_code.end(), bytes.begin(),
                                  bytes.end());
      return;
    case ScaleType::kDefault:
    case ScaleType::kFloat32:
      break;
  }
  ReadValues<float>(
      bytes, [](float value) { return value; }, &scale);
}

void AppendZeroPoints(absl::Span<const uint8_t> bytes, Encoding* encoding) {
  if (encoding->zero_points_are_real) {
    return ReadValues<float>(
        bytes, [](float value) { return value; }, &encoding->real_zero_point);
  }
  std::vector<int32_t>* const zero_point = &encoding->zero_point;
  const bool is_signed = FindFormat(encoding->format)->is_signed;
  switch (ZeroPointSizeBytes(*encoding)) {
    case 1:
      return is_signed ? ReadZeroPoints<int8_t>(bytes, zero_point)
                       : ReadZeroPoints<uint8_t>(bytes, zero_point);
    case 2:
      return is_signed ? ReadZeroPoints<int16_t>(bytes, zero_point)
                       : ReadZeroPoints<uint16_t>(bytes, zero_point);
    default:
      return ReadZeroPoints<int32_t>(bytes, zero_point);
  }
}

void AppendOuterScales(absl::Span<const uint8_t> bytes, Encoding* encoding) {
  ReadValues<float>(
      bytes, [](float value) { return value; }, &encoding->outer_scale);
}

void AppendScales(const Encoding& from, Encoding* to) {
  const auto append = [](const auto& values, auto* all) {
    all->insert(all->end(), values.begin(), values.end());
  };
  append(from.scale, &to->scale);
  append(from.zero_point, &to->zero_point);
  append(from.real_zero_point, &to->real_zero_point);
  append(from.scale_code, &to->scale_code);
}

}  // namespace quantd::core
