// Entries with the parameters of ONNX QuantizeLinear: AIMET encodings 2.0.0 and
// 2.1.0, and the same for all types that ONNX has.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "core/formats/codec.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "server/interchange/entry_format.h"
#include "server/interchange/json_text.h"

namespace quantd::server {
namespace {

constexpr int64_t kMaxOnnxBlock = int64_t{1} << 53;

// Types of ONNX tensors that codes may have, as quantd calls them.
constexpr absl::string_view kOnnxTypes[] = {
    "int2",          "uint2",           "int4",        "uint4",
    "int8",          "uint8",           "int16",       "uint16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float4_e2m1"};

bool IsOnnxType(absl::string_view name) {
  return std::find(std::begin(kOnnxTypes), std::end(kOnnxTypes), name) !=
         std::end(kOnnxTypes);
}

enum class Dialect {
  kOnnx,
  // Integers of any width, the floats of ONNX, and LPBQ.
  kAimet200,
  // And scales that are codes of int or float8 under other scales.
  kAimet210,
};

// The type of meta scales that are floats.
constexpr char kAimetE4m3[] = "float8e4m3fn";

// AIMET's name for the type of codes; empty where it has none.
std::string AimetType(const core::FormatInfo& info) {
  if (info.name == "lpbq") return "int4";
  if (info.name == "nvfp4") return "float4e2m1";
  if (info.kind == core::CodeKind::kInteger) {
    return info.step_exponent == 0 ? std::string(info.name) : "";
  }
  return IsOnnxType(info.name) ? absl::StrReplaceAll(info.name, {{"_", ""}})
                               : "";
}

const core::FormatInfo* FindAimetType(absl::string_view type) {
  // The empty type is that of formats that AIMET has no type for.
  if (type.empty()) return nullptr;
  for (const core::FormatInfo& info : core::AllFormats()) {
    if (info.scale_type == core::ScaleType::kDefault &&
        AimetType(info) == type) {
      return &info;
    }
  }
  return nullptr;
}

// The shortest decimal that is nearest to the same float32.
double Decimal(float value) {
  if (!std::isfinite(value)) return static_cast<double>(value);
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  double decimal = 0;
  std::from_chars(text, end, decimal);
  return decimal;
}

std::vector<double> Decimals(const std::vector<float>& values) {
  std::vector<double> decimals(values.size());
  std::transform(values.begin(), values.end(), decimals.begin(), Decimal);
  return decimals;
}

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
  explicit OnnxFormat(Dialect dialect) : dialect_(dialect) {}

  absl::Status Write(const std::string& tensor, const core::Encoding& encoding,
                     Json* entry) const override {
    const core::FormatInfo& info = *core::FindFormat(encoding.format);
    *entry = {{"name", tensor}};
    if (absl::Status s = CheckFormat(encoding, info); !s.ok()) return s;
    (*entry)["output_dtype"] =
        is_aimet() ? AimetType(info) : std::string(info.name);
    if (core::HasOuterScales(encoding.scale_type)) {
      return WriteDoubleScales(encoding, entry);
    }
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
    (*entry)["y_scale"] = is_aimet() ? Nest(Decimals(encoding.scale), shape)
                                     : Nest(encoding.scale, shape);
    if (!encoding.zero_point.empty()) {
      (*entry)["y_zero_point"] = Nest(encoding.zero_point, shape);
    } else if (!encoding.real_zero_point.empty()) {
      (*entry)["y_zero_point"] =
          Nest(Decimals(encoding.real_zero_point), shape);
    }
    if (is_aimet()) return absl::OkStatus();
    if (encoding.no_saturation) (*entry)["saturate"] = false;
    if (encoding.scale_type == core::ScaleType::kFloat16 ||
        encoding.scale_type == core::ScaleType::kBfloat16) {
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
    core::Encoding& encoding = pending->encoding;
    if (absl::Status s = ReadType(&reader, type, &encoding); !s.ok()) return s;
    if (is_aimet() && reader.Has("per_block_int_scale")) {
      return ReadIntegerScales(&reader, pending, notes);
    }
    const Json* const scale = reader.Find("y_scale");
    if (is_aimet() && scale != nullptr && scale->is_object()) {
      return ReadMetaScales(&reader, *scale, pending, notes);
    }
    int64_t rounded = 0;
    std::vector<int64_t> shape;
    for (const double value : reader.Nested("y_scale", &shape)) {
      encoding.scale.push_back(ScaleOf(value, &rounded));
    }
    absl::Status status = ReadZeroPoints(&reader, shape, &encoding, &rounded);
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
  bool is_aimet() const { return dialect_ != Dialect::kOnnx; }

  absl::string_view target() const {
    switch (dialect_) {
      case Dialect::kAimet200:
        return "AIMET 2.0.0";
      case Dialect::kAimet210:
        return "AIMET 2.1.0";
      case Dialect::kOnnx:
        break;
    }
    return "ONNX";
  }

  // AIMET's scales are written as the shortest decimals, which lose nothing.
  float ScaleOf(double value, int64_t* rounded) const {
    int64_t changed = 0;
    const float scale = ToFloat(value, &changed);
    if (changed != 0 && !(is_aimet() && Decimal(scale) == value)) ++*rounded;
    return scale;
  }

  absl::Status CheckFormat(const core::Encoding& encoding,
                           const core::FormatInfo& info) const {
    if (!is_aimet()) {
      if (IsOnnxType(info.name)) {
        return CheckZeroPointsAreCodes(encoding, target());
      }
      return core::InterchangeUnsupportedError(
          absl::StrCat("ONNX has no type for ", info.name));
    }
    if (AimetType(info).empty()) {
      return core::InterchangeUnsupportedError(
          absl::StrCat(target(), " has nothing for ", info.name));
    }
    if (dialect_ == Dialect::kAimet200 &&
        encoding.scale_type == core::ScaleType::kE4m3) {
      return core::InterchangeUnsupportedError(
          absl::StrCat("AIMET 2.0.0 has no scales of float8 for ", info.name,
                       "; AIMET 2.1.0 has"));
    }
    return absl::OkStatus();
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
      is_held &= is_aimet() || block_size[d] != 0;
    }
    if (!is_held) {
      return core::InterchangeUnsupportedError(absl::StrCat(
          target(), is_aimet() ? " has blocks along one dimension"
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
    const core::FormatInfo* const info = is_aimet() ? FindAimetType(type)
                                         : IsOnnxType(type)
                                             ? core::FindFormatByName(type)
                                             : nullptr;
    if (info == nullptr) {
      absl::string_view width = type;
      int bits = 0;
      if (absl::ConsumePrefix(&width, "float") &&
          absl::SimpleAtoi(width, &bits)) {
        return core::InterchangeUnsupportedError(
            absl::StrCat(reader->PlaceOf("output_dtype"), ": a float of ", bits,
                         " bits without scale, nothing to keep"));
      }
      if (type == "int32" || type == "uint32") {
        return core::InterchangeUnsupportedError(
            absl::StrCat(reader->PlaceOf("output_dtype"), ": ", type,
                         ", expected integers of 2 to 16 bits",
                         is_aimet() ? ", or int32" : ""));
      }
      reader->Fail("output_dtype", absl::StrCat("no type ", QuotedText(type)));
      return reader->status();
    }
    encoding->format = info->format;
    encoding->qmin = info->qmin;
    encoding->qmax = info->qmax;
    return absl::OkStatus();
  }

  absl::Status ReadZeroPoints(ObjectReader* reader,
                              const std::vector<int64_t>& scale_shape,
                              core::Encoding* encoding,
                              int64_t* rounded) const {
    if (!reader->Has("y_zero_point")) return reader->status();
    const core::FormatInfo& info = *core::FindFormat(encoding->format);
    std::vector<int64_t> shape;
    const std::vector<double> values = reader->Nested("y_zero_point", &shape);
    if (!reader->status().ok()) return reader->status();
    if (shape != scale_shape) {
      reader->Fail("y_zero_point", "expected lists of the lengths of y_scale");
      return reader->status();
    }
    const bool is_integer =
        info.kind == core::CodeKind::kInteger && !core::IsWideInteger(info);
    const double low = is_integer ? info.qmin : 0;
    const double high = is_integer ? info.qmax : 0;
    // All of them, if one is.
    encoding->zero_points_are_real =
        is_aimet() && is_integer && absl::c_any_of(values, [](double value) {
          return value != std::trunc(value);
        });
    for (size_t i = 0; i < values.size(); ++i) {
      if (!(values[i] >= low && values[i] <= high) ||
          (!encoding->zero_points_are_real &&
           values[i] != std::trunc(values[i]))) {
        reader->Fail(
            "y_zero_point",
            absl::StrCat(
                "entry ", i, " is ", values[i], ", expected ",
                encoding->zero_points_are_real ? "a number" : "an integer",
                " of ", low, " to ", high,
                "; it is the zero point, not the offset, which is its "
                "negative"));
        return reader->status();
      }
      if (encoding->zero_points_are_real) {
        encoding->real_zero_point.push_back(ScaleOf(values[i], rounded));
      } else {
        encoding->zero_point.push_back(static_cast<int32_t>(values[i]));
      }
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
                              ? reader->Integer("block_size", 0, kMaxOnnxBlock)
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

  // Codes of scales, and the scales over them.
  absl::Status WriteDoubleScales(const core::Encoding& encoding,
                                 Json* entry) const {
    std::vector<int64_t> shape;
    if (absl::Status s = AddBlocks(encoding, &shape, entry); !s.ok()) return s;
    if (!entry->contains("axis")) {
      return core::InterchangeUnsupportedError(
          absl::StrCat(target(),
                       " has scales under other scales for blocks along a "
                       "dimension, and these are for whole rows"));
    }
    const absl::StatusOr<core::BlockLayout> outer =
        core::OuterLayout(encoding, shape);
    if (!outer.ok()) {
      return core::InterchangeUnsupportedError(core::ErrorText(outer.status()));
    }
    const std::vector<int64_t> outer_shape(outer->scale_shape().begin(),
                                           outer->scale_shape().end());
    const std::vector<double> outer_scale = Decimals(encoding.outer_scale);
    if (dialect_ == Dialect::kAimet200) {
      (*entry)["per_block_int_scale"] = Nest(encoding.scale_code, shape);
      (*entry)["per_channel_float_scale"] = Nest(outer_scale, outer_shape);
      return absl::OkStatus();
    }
    Json meta = Json::object();
    if (encoding.scale_type == core::ScaleType::kInteger) {
      meta["x"] = Nest(encoding.scale_code, shape);
    } else {
      std::vector<double> values;
      values.reserve(encoding.scale_code.size());
      for (const uint8_t code : encoding.scale_code) {
        values.push_back(core::DecodeFloat(E4m3(), code));
      }
      meta["x"] = Nest(values, shape);
      meta["input_dtype"] = kAimetE4m3;
    }
    if (outer_scale.size() == 1) {
      meta["x_scale"] = outer_scale[0];
    } else if (absl::Status s = AddOuterScales(encoding, outer_scale, shape,
                                               outer_shape, &meta);
               !s.ok()) {
      return s;
    }
    (*entry)["y_scale"] = std::move(meta);
    return absl::OkStatus();
  }

  // Several: one for each index of a dimension, or blocks along one.
  absl::Status AddOuterScales(const core::Encoding& encoding,
                              const std::vector<double>& outer_scale,
                              const std::vector<int64_t>& shape,
                              const std::vector<int64_t>& outer_shape,
                              Json* meta) const {
    std::vector<size_t> split;
    std::vector<size_t> blocked;
    for (size_t d = 0; d < shape.size(); ++d) {
      if (outer_shape[d] != 1) split.push_back(d);
      if (outer_shape[d] != shape[d]) blocked.push_back(d);
    }
    if (split.size() == 1 && outer_shape[split[0]] == shape[split[0]]) {
      (*meta)["x_scale"] = outer_scale;
      (*meta)["axis"] = split[0];
      return absl::OkStatus();
    }
    if (blocked.size() > 1) {
      return core::InterchangeUnsupportedError(
          absl::StrCat(target(),
                       " has outer scales in blocks along one "
                       "dimension, or for each index of one"));
    }
    (*meta)["x_scale"] = Nest(outer_scale, outer_shape);
    if (blocked.empty()) return absl::OkStatus();
    const size_t axis = blocked[0];
    const int64_t block = encoding.outer_block_size[axis];
    (*meta)["axis"] = axis;
    (*meta)["block_size"] =
        block == 0 ? shape[axis] : block / encoding.block_size[axis];
    return absl::OkStatus();
  }

  static const core::FloatLayout& E4m3() {
    static const core::FloatLayout& layout =
        core::FindFormatByName("float8_e4m3fn")->float_layout;
    return layout;
  }

  // Sets the scale type, and the format that is called after both.
  static void SetScaleType(core::ScaleType type, core::Encoding* encoding) {
    encoding->scale_type = type;
    const absl::string_view name = core::FindFormat(encoding->format)->name;
    const bool is_integer = type == core::ScaleType::kInteger;
    const core::FormatInfo* info = nullptr;
    if (is_integer && name == "int4") info = core::FindFormatByName("lpbq");
    if (!is_integer && name == "float4_e2m1") {
      info = core::FindFormatByName("nvfp4");
    }
    if (info == nullptr) return;
    encoding->format = info->format;
    encoding->qmin = info->qmin;
    encoding->qmax = info->qmax;
  }

  // Integers from 1.
  static void ReadIntegerCodes(ObjectReader* reader, absl::string_view key,
                               std::vector<int64_t>* shape,
                               core::Encoding* encoding) {
    SetScaleType(core::ScaleType::kInteger, encoding);
    for (const double number : reader->Nested(key, shape)) {
      if (!(number >= 1 && number <= core::kMaxIntegerScale) ||
          number != std::trunc(number)) {
        return reader->Fail(
            key, absl::StrCat("entry ", encoding->scale_code.size(), " is ",
                              number, ", expected an integer of 1 to ",
                              core::kMaxIntegerScale));
      }
      encoding->scale_code.push_back(static_cast<uint8_t>(number));
    }
  }

  // Numbers of float8.
  static void ReadE4m3Codes(ObjectReader* reader, absl::string_view key,
                            std::vector<int64_t>* shape,
                            core::Encoding* encoding) {
    SetScaleType(core::ScaleType::kE4m3, encoding);
    for (const double number : reader->Nested(key, shape)) {
      const uint32_t code = core::EncodeFloat(E4m3(), number, true);
      if (static_cast<double>(core::DecodeFloat(E4m3(), code)) != number) {
        return reader->Fail(
            key, absl::StrCat("entry ", encoding->scale_code.size(), " is ",
                              number, ", expected a number of ", kAimetE4m3));
      }
      encoding->scale_code.push_back(static_cast<uint8_t>(code));
    }
  }

  // The layout of scales under others: blocks along `axis`.
  static void ReadBlocks(ObjectReader* reader, absl::string_view key,
                         const std::vector<int64_t>& shape,
                         PendingEncoding* pending) {
    const auto rank = static_cast<int64_t>(shape.size());
    if (reader->status().ok() && (rank == 0 || rank > core::kMaxRank)) {
      reader->Fail(
          key, absl::StrCat("lists of ", rank, " dimensions, expected 1 to ",
                            core::kMaxRank));
    }
    const int64_t block = reader->Integer("block_size", 1, kMaxOnnxBlock);
    int64_t axis = reader->Integer("axis", -rank, rank - 1);
    if (!reader->status().ok()) return;
    if (axis < 0) axis += rank;
    pending->encoding.block_size =
        BlockSizeOf(shape, static_cast<size_t>(axis), block);
    pending->encoding.scale_shape = shape;
  }

  // Reads outer scales. A list of one dimension has one for each index of
  // `axis`; others have as many dimensions as the scales, in blocks of `block`
  // along `axis`.
  void ReadOuterScales(ObjectReader* reader, absl::string_view key,
                       absl::optional<int64_t> axis, int64_t block,
                       core::Encoding* encoding,
                       std::vector<std::string>* notes) const {
    int64_t rounded = 0;
    std::vector<int64_t> outer_shape;
    for (const double number : reader->Nested(key, &outer_shape)) {
      encoding->outer_scale.push_back(ScaleOf(number, &rounded));
    }
    if (!reader->status().ok()) return;
    NoteRounded(rounded, notes);
    const std::vector<int64_t>& shape = encoding->scale_shape;
    if (outer_shape.empty()) return;
    if (axis.has_value() && block == 0 && outer_shape.size() == 1 &&
        shape.size() > 1) {
      const int64_t count = outer_shape[0];
      outer_shape.assign(shape.size(), 1);
      outer_shape[static_cast<size_t>(*axis)] = count;
    }
    if (outer_shape.size() != shape.size()) {
      return reader->Fail(key,
                          absl::StrCat("lists of ", outer_shape.size(),
                                       " dimensions, expected ", shape.size()));
    }
    encoding->outer_block_size.resize(shape.size());
    for (size_t d = 0; d < shape.size(); ++d) {
      const bool is_blocked =
          block != 0 && static_cast<int64_t>(d) == axis.value_or(-1);
      const int64_t expected =
          is_blocked ? shape[d] / block + (shape[d] % block != 0) : shape[d];
      if (outer_shape[d] != 1 && outer_shape[d] != expected) {
        return reader->Fail(
            key, absl::StrCat("dimension ", d, " has ", outer_shape[d],
                              " entries, expected 1 or ", expected));
      }
      encoding->outer_block_size[d] =
          outer_shape[d] == 1
              ? 0
              : (is_blocked ? block : 1) * encoding->block_size[d];
    }
  }

  // Only zeros have a place beside codes of scales.
  static absl::Status CheckNoZeroPoints(ObjectReader* reader,
                                        absl::string_view key) {
    if (!reader->Has(key)) return absl::OkStatus();
    std::vector<int64_t> shape;
    for (const double zero_point : reader->Nested(key, &shape)) {
      if (zero_point != 0) {
        return core::InterchangeUnsupportedError(
            absl::StrCat(reader->PlaceOf(key), ": a zero point of ", zero_point,
                         " beside scales that have codes, expected 0"));
      }
    }
    return reader->status();
  }

  // LPBQ of 2.0.0.
  absl::Status ReadIntegerScales(ObjectReader* reader, PendingEncoding* pending,
                                 std::vector<std::string>* notes) const {
    constexpr char kCodes[] = "per_block_int_scale";
    std::vector<int64_t> shape;
    ReadIntegerCodes(reader, kCodes, &shape, &pending->encoding);
    ReadBlocks(reader, kCodes, shape, pending);
    if (!reader->status().ok()) return reader->status();
    ReadOuterScales(reader, "per_channel_float_scale", absl::nullopt, 0,
                    &pending->encoding, notes);
    if (!reader->status().ok()) return reader->status();
    return CheckNoZeroPoints(reader, "y_zero_point");
  }

  // The meta encoding of 2.1.0.
  absl::Status ReadMetaScales(ObjectReader* reader, const Json& scale,
                              PendingEncoding* pending,
                              std::vector<std::string>* notes) const {
    ObjectReader meta(scale, reader->PlaceOf("y_scale"));
    const std::string type =
        meta.Has("input_dtype") ? meta.String("input_dtype") : "";
    std::vector<int64_t> shape;
    if (type == kAimetE4m3) {
      ReadE4m3Codes(&meta, "x", &shape, &pending->encoding);
    } else if (type.empty() || absl::StartsWith(type, "int") ||
               absl::StartsWith(type, "uint")) {
      ReadIntegerCodes(&meta, "x", &shape, &pending->encoding);
    } else {
      return core::InterchangeUnsupportedError(absl::StrCat(
          meta.PlaceOf("input_dtype"), ": scales of ", QuotedText(type),
          ", expected integers or ", kAimetE4m3));
    }
    const auto rank = static_cast<int64_t>(shape.size());
    absl::optional<int64_t> axis;
    if (meta.status().ok() && meta.Has("axis") && rank > 0) {
      axis = meta.Integer("axis", -rank, rank - 1);
      if (*axis < 0) *axis += rank;
    }
    const int64_t block = meta.Has("block_size")
                              ? meta.Integer("block_size", 1, kMaxOnnxBlock)
                              : 0;
    if (!meta.status().ok()) return meta.status();
    ReadBlocks(reader, "y_scale", shape, pending);
    if (!reader->status().ok()) return reader->status();
    ReadOuterScales(&meta, "x_scale", axis, block, &pending->encoding, notes);
    if (!meta.status().ok()) return meta.status();
    if (absl::Status s = CheckNoZeroPoints(&meta, "x_zero_point"); !s.ok()) {
      return s;
    }
    return CheckNoZeroPoints(reader, "y_zero_point");
  }

  const Dialect dialect_;
};

}  // namespace

const EntryFormat& Aimet200EntryFormat() {
  static const OnnxFormat& format = *new OnnxFormat(Dialect::kAimet200);
  return format;
}

const EntryFormat& Aimet210EntryFormat() {
  static const OnnxFormat& format = *new OnnxFormat(Dialect::kAimet210);
  return format;
}

const EntryFormat& OnnxQdqEntryFormat() {
  static const OnnxFormat& format = *new OnnxFormat(Dialect::kOnnx);
  return format;
}

}  // namespace quantd::server
