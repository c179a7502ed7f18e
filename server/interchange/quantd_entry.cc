// Our own JSON: the fields of quantd.v1.Encoding by name. Nothing is lost.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "server/interchange/entry_format.h"
#include "server/interchange/json_text.h"

namespace quantd::server {
namespace {

// In order of core::ScaleType; the first is not a type.
constexpr absl::string_view kScaleTypes[] = {
    "", "float32", "float16", "bfloat16", "e8m0", "e4m3", "integer"};

constexpr int64_t kMaxDimension = int64_t{1} << 53;

class QuantdFormat final : public EntryFormat {
 public:
  absl::Status Write(const std::string& tensor, const core::Encoding& encoding,
                     Json* entry) const override {
    const core::FormatInfo& info = *core::FindFormat(encoding.format);
    *entry = {{"name", tensor},
              {"format", std::string(info.name)},
              {"qmin", encoding.qmin},
              {"qmax", encoding.qmax}};
    Json& json = *entry;
    if (core::HasScaleCodes(encoding.scale_type)) {
      json["scale_code"] = encoding.scale_code;
    } else {
      json["scale"] = encoding.scale;
    }
    json["scale_type"] =
        std::string(kScaleTypes[static_cast<size_t>(encoding.scale_type)]);
    const auto add = [&json](const char* key, const auto& values) {
      if (!values.empty()) json[key] = values;
    };
    add("block_size", encoding.block_size);
    add("scale_shape", encoding.scale_shape);
    add("zero_point", encoding.zero_point);
    add("real_zero_point", encoding.real_zero_point);
    add("outer_scale", encoding.outer_scale);
    add("outer_block_size", encoding.outer_block_size);
    add("codebook", encoding.codebook);
    if (encoding.exclude_zero) json["exclude_zero"] = true;
    if (encoding.no_saturation) json["no_saturation"] = true;
    if (encoding.degenerate_count != 0) {
      json["degenerate_count"] = encoding.degenerate_count;
    }
    return absl::OkStatus();
  }

  absl::Status Read(const Json& entry, const std::string& place,
                    PendingEncoding* pending,
                    std::vector<std::string>* notes) const override {
    constexpr int64_t kInt32Min = std::numeric_limits<int32_t>::min();
    constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
    ObjectReader reader(entry, place);
    core::Encoding& encoding = pending->encoding;
    int64_t rounded = 0;
    pending->tensor = reader.String("name");
    const std::string format = reader.String("format");
    const core::FormatInfo* const info = core::FindFormatByName(format);
    if (info == nullptr) {
      reader.Fail("format", absl::StrCat("no format ", QuotedText(format)));
      return reader.status();
    }
    encoding.format = info->format;
    const auto floats = [&](absl::string_view key) {
      return reader.Has(key) ? reader.Floats(key, &rounded)
                             : std::vector<float>();
    };
    const auto integers = [&](absl::string_view key, int64_t min, int64_t max) {
      return reader.Has(key) ? reader.Integers(key, min, max)
                             : std::vector<int64_t>();
    };
    encoding.scale_type = info->scale_type == core::ScaleType::kDefault
                              ? core::ScaleType::kFloat32
                              : info->scale_type;
    if (reader.Has("scale_type")) {
      const std::string name = reader.String("scale_type");
      const auto found =
          std::find(std::begin(kScaleTypes) + 1, std::end(kScaleTypes), name);
      if (found == std::end(kScaleTypes)) {
        reader.Fail("scale_type",
                    absl::StrCat("no scale type ", QuotedText(name)));
        return reader.status();
      }
      encoding.scale_type =
          static_cast<core::ScaleType>(found - std::begin(kScaleTypes));
    }
    if (core::HasScaleCodes(encoding.scale_type)) {
      const std::vector<int64_t> codes = reader.Integers("scale_code", 0, 255);
      encoding.scale_code.assign(codes.begin(), codes.end());
    } else {
      encoding.scale = reader.Floats("scale", &rounded);
    }
    encoding.block_size = integers("block_size", 0, kMaxDimension);
    encoding.scale_shape = integers("scale_shape", 0, kMaxDimension);
    const std::vector<int64_t> zero_point =
        integers("zero_point", kInt32Min, kInt32Max);
    encoding.zero_point.assign(zero_point.begin(), zero_point.end());
    encoding.real_zero_point = floats("real_zero_point");
    encoding.zero_points_are_real = !encoding.real_zero_point.empty();
    encoding.outer_scale = floats("outer_scale");
    encoding.outer_block_size = integers("outer_block_size", 0, kMaxDimension);
    encoding.codebook = floats("codebook");
    const bool has_codebook = !encoding.codebook.empty();
    encoding.qmin =
        reader.Has("qmin")
            ? static_cast<int32_t>(reader.Integer("qmin", kInt32Min, kInt32Max))
            : info->qmin;
    encoding.qmax =
        reader.Has("qmax")
            ? static_cast<int32_t>(reader.Integer("qmax", kInt32Min, kInt32Max))
        : has_codebook ? static_cast<int32_t>(std::min<size_t>(
                             encoding.codebook.size() - 1, info->qmax))
                       : info->qmax;
    encoding.exclude_zero =
        reader.Has("exclude_zero") && reader.Boolean("exclude_zero");
    encoding.no_saturation =
        reader.Has("no_saturation") && reader.Boolean("no_saturation");
    const auto scale_count = static_cast<int64_t>(
        std::max(encoding.scale.size(), encoding.scale_code.size()));
    encoding.degenerate_count =
        reader.Has("degenerate_count")
            ? reader.Integer("degenerate_count", 0, scale_count)
            : 0;
    NoteRounded(rounded, notes);
    return reader.status();
  }
};

}  // namespace

const EntryFormat& QuantdEntryFormat() {
  static const QuantdFormat& format = *new QuantdFormat;
  return format;
}

}  // namespace quantd::server
