#include "core/types/scale_bytes.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/float_convert.h"
#include "core/types/scale_window.h"

namespace quantd::core {
namespace {

// Calls `append(value)` for each value that the bytes hold.
template <typename Value, typename Append>
void ForEachValue(absl::string_view bytes, Append append) {
  const auto* in = reinterpret_cast<const uint8_t*>(bytes.data());
  for (size_t i = 0; i < bytes.size() / sizeof(Value); ++i) {
    append(LoadUnaligned<Value>(in + i * sizeof(Value)));
  }
}

}  // namespace

void AppendScales(absl::string_view bytes, Encoding* encoding) {
  std::vector<float>& scale = encoding->scale;
  switch (encoding->scale_type) {
    case ScaleType::kFloat16:
      return ForEachValue<uint16_t>(
          bytes, [&](uint16_t value) { scale.push_back(HalfToFloat(value)); });
    case ScaleType::kBfloat16:
      return ForEachValue<uint16_t>(bytes, [&](uint16_t value) {
        scale.push_back(BfloatToFloat(value));
      });
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
  ForEachValue<float>(bytes, [&](float value) { scale.push_back(value); });
}

void AppendZeroPoints(absl::string_view bytes, Encoding* encoding) {
  std::vector<int32_t>& zero_point = encoding->zero_point;
  const FormatInfo* format = FindFormat(encoding->format);
  const bool is_signed = format != nullptr && format->is_signed;
  switch (ZeroPointSizeBytes(*encoding)) {
    case 1:
      return ForEachValue<uint8_t>(bytes, [&](uint8_t value) {
        zero_point.push_back(is_signed ? static_cast<int8_t>(value) : value);
      });
    case 2:
      return ForEachValue<uint16_t>(bytes, [&](uint16_t value) {
        zero_point.push_back(is_signed ? static_cast<int16_t>(value) : value);
      });
    default:
      return ForEachValue<int32_t>(
          bytes, [&](int32_t value) { zero_point.push_back(value); });
  }
}

}  // namespace quantd::core
