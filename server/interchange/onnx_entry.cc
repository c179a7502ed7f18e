// Entries with the parameters of ONNX QuantizeLinear: AIMET encodings 2.0.0,
// and the same for all types that ONNX has.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "server/interchange/entry_format.h"
#include "server/interchange/json_text.h"

namespace quantd::server {
namespace {

constexpr int64_t kMaxBlock = int64_t{1} << 53;

// Types of ONNX tensors that codes may have, as quantd calls them.
constexpr absl::string_view kOnnxTypes[] = {
    "int2",          "uint2",           "int4",        "uint4",
    "int8",          "uint8",           "int16",       "uint16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float4_e2m1"};

// Values in lists, one list a dimension.
template <typename T>
Json Nest(const std::vector<T>& values, const std::vector<int64_t>& shape,
          size_t depth, size_t* next) {
  if (depth == shape.size()) return values[(*next)++];
  Json list = Json::array();
  for (int64_t i = 0; i < shape[depth]; ++i) {
    list.push_back(Nest(values, shape, depth + 1, next));
  }
  return list;
}

template <typename T>
Json Nest(const std::vector<T>& values, const std::vector<int64_t>& shape) {
  size_t next = 0;
  return Nest(values, shape, 0, &next);
}

// The dimensions of nested scales as block sizes: one scale is a whole
// dimension, several are one for each index, but along `axis` blocks.
std::vector<int64_t> BlockSizeOf(const std::vector<int64_t>& shape, size_t axis,
                                 int64_t block) {
  std::vector<int64_t> block_size(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    block_size[d] = d == axis ? block : shape[d] == 1 ? 0 : 1;
  }
  return block_size;
}

class OnnxFormat final : public EntryFormat {
 public:
  // `is_aimet`: integers and LPBQ only, of any width.
  explicit OnnxFormat(bool is_aimet) : is_aimet_(is_aimet) {}

  absl::Status Write(const std::string& tensor, const core::Encoding& encoding,
                     Json* entry) const override {
    const core::FormatInfo& info = *core::FindFormat(encoding.format);
    *entry = {{"name", tensor}};
    if (is_aimet_ && IsLpbq(encoding)) return WriteLpbq(encoding, entry);
    if (absl::Status s = CheckFormat(encoding, info); !s.ok()) return s;
    (*entry)["output_dtype"] = std::string(info.name);
    // The shape of the lists.
    std::vector<int64_t> shape;
    if (encoding.scale.size() > 1) {
      const int channel = ChannelAxis(encoding);
      if (channel >= 0) {
        shape = {static_cast<int64_t>(encoding.scale.size())};
        (*entry)["axis"] = channel;
      } else {
        absl::Status status = AddBlocks(encoding, &shape, entry);
        if (!status.ok()) return status;
      }
    }
    (*entry)["y_scale"] = Nest(encoding.scale, shape);
    if (!encoding.zero_point.empty()) {
      (*entry)["y_zero_point"] = Nest(encoding.zero_point, shape);
    }
    if (encoding.no_saturation) (*entry)["saturate"] = false;
    if (!is_aimet_ && (encoding.scale_type == core::ScaleType::kFloat16 ||
                       encoding.scale_type == core::ScaleType::kBfloat16)) {
      (*entry)["scale_dtype"] = encoding.scale_type == core::ScaleType::kFloat16
                                    ? "float16"
                                    : "bfloat16";
    }
    return absl::OkStatus();
  }

  absl::Status Read(const Json& entry, const std::string& place,
                    PendingEncoding* pending,
                    std::vector<std::string>* notes) const override {
    ObjectReader reader(entry, place);
    pending->tensor = reader.String("name");
    const std::string type = reader.String("output_dtype");
    if (!reader.status().ok()) return reader.status();
    if (reader.Has("per_block_int_scale")) {
      return ReadLpbq(&reader, type, pending, notes);
    }
    core::Encoding& encoding = pending->encoding;
    if (absl::Status s = ReadType(&reader, type, &encoding); !s.ok()) return s;
    int64_t rounded = 0;
    std::vector<int64_t> shape;
    for (const double value : reader.Nested("y_scale", &shape)) {
      encoding.scale.push_back(ToFloat(value, &rounded));
    }
    absl::Status status = ReadZeroPoints(&reader, shape, &encoding);
    if (!status.ok()) return status;
    ReadLayout(&reader, shape, pending);
    if (reader.Has("saturate")) {
      encoding.no_saturation = !reader.Boolean("saturate");
    }
    if (reader.Has("scale_dtype")) {
      const std::string name = reader.String("scale_dtype");
      if (name == "float16") {
        encoding.scale_type = core::ScaleType::kFloat16;
      } else if (name == "bfloat16") {
        encoding.scale_type = core::ScaleType::kBfloat16;
      } else if (name != "float32") {
        reader.Fail("scale_dtype",
                    absl::StrCat("expected float32, float16 or bfloat16, got ",
                                 QuotedText(name)));
      }
    }
    NoteRounded(rounded, notes);
    return reader.status();
  }

 private:
  absl::string_view target() const {
    return is_aimet_ ? "AIMET 2.0.0" : "ONNX";
  }

  absl::Status CheckFormat(const core::Encoding& encoding,
                           const core::FormatInfo& info) const {
    if (is_aimet_) return CheckIsInteger(encoding, target());
    if (std::find(std::begin(kOnnxTypes), std::end(kOnnxTypes), info.name) !=
        std::end(kOnnxTypes)) {
      return absl::OkStatus();
    }
    return core::InterchangeUnsupportedError(
        absl::StrCat("ONNX has no type for ", info.name));
  }

  // Blocks along one dimension. Sets `shape` to that of the scales.
  absl::Status AddBlocks(const core::Encoding& encoding,
                         std::vector<int64_t>* shape, Json* entry) const {
    const std::vector<int64_t>& block_size = encoding.block_size;
    int axis = -1;
    int blocked_count = 0;
    for (size_t d = 0; d < block_size.size(); ++d) {
      if (block_size[d] <= 1) continue;
      // A dimension of one block stands for itself unless another has more.
      if (axis >= 0 && IsWhole(encoding, d)) continue;
      if (!IsWhole(encoding, d)) ++blocked_count;
      axis = static_cast<int>(d);
    }
    if (encoding.scale_shape.empty()) {
      return core::InterchangeUnsupportedError(absl::StrCat(
          target(), " nests the scales of blocks, whose shape is not known"));
    }
    bool is_held = blocked_count <= 1;
    for (size_t d = 0; d < block_size.size(); ++d) {
      // In ONNX every index has a scale, but along the axis.
      is_held &= is_aimet_ || block_size[d] != 0;
    }
    if (!is_held) {
      return core::InterchangeUnsupportedError(
          absl::StrCat(target(), is_aimet_ ? " has blocks along one dimension"
                                           : " has blocks along one dimension, "
                                             "and a scale for every index of "
                                             "the others"));
    }
    *shape = encoding.scale_shape;
    if (axis >= 0) {
      (*entry)["axis"] = axis;
      (*entry)["block_size"] = block_size[static_cast<size_t>(axis)];
    }
    return absl::OkStatus();
  }

  absl::Status ReadType(ObjectReader* reader, const std::string& type,
                        core::Encoding* encoding) const {
    const core::FormatInfo* const info = core::FindFormatByName(type);
    const bool is_known =
        is_aimet_ ? info != nullptr && info->kind == core::CodeKind::kInteger &&
                        info->step_exponent == 0 && info->name != "lpbq"
                  : std::find(std::begin(kOnnxTypes), std::end(kOnnxTypes),
                              type) != std::end(kOnnxTypes);
    if (!is_known) {
      absl::string_view width = type;
      int bits = 0;
      if (absl::ConsumePrefix(&width, "float") &&
          absl::SimpleAtoi(width, &bits)) {
        return core::InterchangeUnsupportedError(
            absl::StrCat(reader->PlaceOf("output_dtype"), ": a float of ", bits,
                         " bits without scale, nothing to keep"));
      }
      reader->Fail("output_dtype", absl::StrCat("no type ", QuotedText(type)));
      return reader->status();
    }
    encoding->format = info->format;
    encoding->qmin = info->qmin;
    encoding->qmax = info->qmax;
    return absl::OkStatus();
  }

  static absl::Status ReadZeroPoints(ObjectReader* reader,
                                     const std::vector<int64_t>& scale_shape,
                                     core::Encoding* encoding) {
    if (!reader->Has("y_zero_point")) return reader->status();
    const core::FormatInfo& info = *core::FindFormat(encoding->format);
    std::vector<int64_t> shape;
    const std::vector<double> values = reader->Nested("y_zero_point", &shape);
    if (!reader->status().ok()) return reader->status();
    if (shape != scale_shape) {
      reader->Fail("y_zero_point", "expected lists of the lengths of y_scale");
      return reader->status();
    }
    const bool is_integer = info.kind == core::CodeKind::kInteger;
    for (size_t i = 0; i < values.size(); ++i) {
      const double low = is_integer ? info.qmin : 0;
      const double high = is_integer ? info.qmax : 0;
      if (!(values[i] >= low && values[i] <= high) ||
          values[i] != static_cast<double>(static_cast<int64_t>(values[i]))) {
        reader->Fail(
            "y_zero_point",
            absl::StrCat("entry ", i, " is ", values[i],
                         ", expected an integer of ", low, " to ", high,
                         "; it is the zero point, not the offset, which is its "
                         "negative"));
        return reader->status();
      }
      encoding->zero_point.push_back(static_cast<int32_t>(values[i]));
    }
    NormalizeZeroPoints(encoding);
    return absl::OkStatus();
  }

  static void ReadLayout(ObjectReader* reader,
                         const std::vector<int64_t>& shape,
                         PendingEncoding* pending) {
    const auto rank = static_cast<int64_t>(shape.size());
    if (!reader->status().ok() || rank == 0) return;
    if (rank > core::kMaxRank) {
      return reader->Fail("y_scale", absl::StrCat("lists of ", rank,
                                                  " dimensions, expected at "
                                                  "most ",
                                                  core::kMaxRank));
    }
    const int64_t block = reader->Has("block_size")
                              ? reader->Integer("block_size", 0, kMaxBlock)
                              : 0;
    if (rank == 1 && block == 0) {
      // ONNX's default axis.
      pending->axis =
          reader->Has("axis")
              ? reader->Integer("axis", -core::kMaxRank, core::kMaxRank - 1)
              : 1;
      pending->open = PendingEncoding::Open::kChannels;
      return;
    }
    // Past all of them.
    int64_t axis = rank;
    if (block != 0) {
      axis = reader->Integer("axis", -rank, rank - 1);
      if (axis < 0) axis += rank;
    }
    if (!reader->status().ok()) return;
    pending->encoding.block_size =
        BlockSizeOf(shape, static_cast<size_t>(axis), block);
    pending->encoding.scale_shape = shape;
  }

  static absl::Status WriteLpbq(const core::Encoding& encoding, Json* entry) {
    int axis = -1;
    for (size_t d = 0; d < encoding.block_size.size(); ++d) {
      if (encoding.block_size[d] > 1)
        axis = axis < 0 ? static_cast<int>(d) : -2;
      if (axis == -2) break;
    }
    if (axis < 0 || encoding.scale_shape.empty()) {
      return core::InterchangeUnsupportedError(
          "AIMET 2.0.0 has LPBQ in blocks along one dimension, with the shape "
          "of its scales");
    }
    const absl::StatusOr<core::BlockLayout> outer =
        core::OuterLayout(encoding, encoding.scale_shape);
    if (!outer.ok()) {
      return core::InterchangeUnsupportedError(core::ErrorText(outer.status()));
    }
    const std::vector<int64_t> outer_shape(outer->scale_shape().begin(),
                                           outer->scale_shape().end());
    (*entry)["output_dtype"] = "int4";
    (*entry)["per_block_int_scale"] =
        Nest(encoding.scale_code, encoding.scale_shape);
    (*entry)["per_channel_float_scale"] =
        Nest(encoding.outer_scale, outer_shape);
    (*entry)["axis"] = axis;
    (*entry)["block_size"] = encoding.block_size[static_cast<size_t>(axis)];
    return absl::OkStatus();
  }

  static absl::Status ReadLpbq(ObjectReader* reader, const std::string& type,
                               PendingEncoding* pending,
                               std::vector<std::string>* notes) {
    if (type != "int4") {
      return core::InterchangeUnsupportedError(absl::StrCat(
          reader->PlaceOf("output_dtype"), ": integer scales over ",
          QuotedText(type), ", expected int4"));
    }
    std::vector<int64_t> shape;
    std::vector<int64_t> outer_shape;
    const std::vector<double> numbers =
        reader->Nested("per_block_int_scale", &shape);
    std::vector<int64_t> codes;
    for (const double number : numbers) {
      if (!(number >= 1 && number <= core::kMaxIntegerScale) ||
          number != static_cast<double>(static_cast<int64_t>(number))) {
        reader->Fail("per_block_int_scale",
                     absl::StrCat("entry ", codes.size(), " is ", number,
                                  ", expected an integer of 1 to ",
                                  core::kMaxIntegerScale));
        return reader->status();
      }
      codes.push_back(static_cast<int64_t>(number));
    }
    int64_t rounded = 0;
    std::vector<float> outer;
    for (const double number :
         reader->Nested("per_channel_float_scale", &outer_shape)) {
      outer.push_back(ToFloat(number, &rounded));
    }
    const auto rank = static_cast<int64_t>(shape.size());
    if (reader->status().ok() && (rank == 0 || rank > core::kMaxRank)) {
      reader->Fail("per_block_int_scale",
                   absl::StrCat("lists of ", rank,
                                " dimensions, expected 1 to ", core::kMaxRank));
    }
    const int64_t block = reader->Integer("block_size", 1, kMaxBlock);
    int64_t axis = reader->Integer("axis", -rank, rank - 1);
    if (!reader->status().ok()) return reader->status();
    if (axis < 0) axis += rank;
    if (outer_shape.size() != shape.size()) {
      reader->Fail("per_channel_float_scale",
                   absl::StrCat("lists of ", outer_shape.size(),
                                " dimensions, expected ", shape.size()));
      return reader->status();
    }
    core::Encoding& encoding = pending->encoding;
    SetLpbq(codes, std::move(outer), &encoding);
    encoding.block_size = BlockSizeOf(shape, static_cast<size_t>(axis), block);
    encoding.scale_shape = shape;
    encoding.outer_block_size.resize(shape.size());
    for (size_t d = 0; d < shape.size(); ++d) {
      if (outer_shape[d] != 1 && outer_shape[d] != shape[d]) {
        reader->Fail("per_channel_float_scale",
                     absl::StrCat("dimension ", d, " has ", outer_shape[d],
                                  " entries, expected 1 or ", shape[d]));
        return reader->status();
      }
      encoding.outer_block_size[d] =
          outer_shape[d] == 1 ? 0 : encoding.block_size[d];
    }
    NoteRounded(rounded, notes);
    return absl::OkStatus();
  }

  const bool is_aimet_;
};

}  // namespace

const EntryFormat& Aimet200EntryFormat() {
  static const OnnxFormat& format = *new OnnxFormat(/*is_aimet=*/true);
  return format;
}

const EntryFormat& OnnxQdqEntryFormat() {
  static const OnnxFormat& format = *new OnnxFormat(/*is_aimet=*/false);
  return format;
}

}  // namespace quantd::server
