#include "client/models/quantized_layout.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "client/cpp/element_bytes.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"
#include "nlohmann/json.hpp"

namespace quantd {
namespace {

using Json = nlohmann::ordered_json;

files::Dtype CodeDtype(const FormatInfo& format) {
  if (format.kind == CodeKind::kFloat && format.bits == 8) {
    const FloatLayout& layout = format.float_layout;
    if (layout.exponent_bits == 4 && layout.specials == FloatSpecials::kNan) {
      return files::Dtype::kF8E4M3;
    }
    if (layout.exponent_bits == 5 && layout.specials == FloatSpecials::kIeee) {
      return files::Dtype::kF8E5M2;
    }
  }
  if (format.storage_bits < 8) return files::Dtype::kU8;
  if (format.storage_bits == 8) {
    return format.is_signed ? files::Dtype::kI8 : files::Dtype::kU8;
  }
  if (format.storage_bits == 32) return files::Dtype::kI32;
  return format.is_signed ? files::Dtype::kI16 : files::Dtype::kU16;
}

// Reads members of one JSON object; the first that is missing or has the wrong
// type is kept as the error.
class Members {
 public:
  explicit Members(const Json& object) : object_(object) {}

  const std::string& error() const { return error_; }

  bool Has(const char* key) const { return Find(key) != nullptr; }

  std::string String(const char* key) {
    const Json* const member = Find(key);
    if (member == nullptr || !member->is_string()) {
      return Fail(key, "a string"), "";
    }
    return member->get<std::string>();
  }

  std::vector<int64_t> Integers(const char* key) {
    std::vector<int64_t> values;
    const Json* const member = Find(key);
    if (member == nullptr || !member->is_array()) {
      return Fail(key, "an array"), values;
    }
    for (const Json& item : *member) {
      if (!item.is_number_integer()) return Fail(key, "integers"), values;
      values.push_back(item.get<int64_t>());
    }
    return values;
  }

  int32_t Integer(const char* key) {
    const Json* const member = Find(key);
    if (member == nullptr || !member->is_number_integer()) {
      return Fail(key, "an integer"), 0;
    }
    const int64_t value = member->get<int64_t>();
    if (value < INT32_MIN || value > INT32_MAX) {
      return Fail(key, "an integer of 32 bits"), 0;
    }
    return static_cast<int32_t>(value);
  }

  bool Boolean(const char* key) {
    const Json* const member = Find(key);
    if (member == nullptr || !member->is_boolean()) {
      return Fail(key, "a boolean"), false;
    }
    return member->get<bool>();
  }

 private:
  const Json* Find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }

  void Fail(const char* key, absl::string_view expected) {
    if (error_.empty()) {
      error_ = absl::StrCat("expected ", expected, " for \"", key, "\"");
    }
  }

  const Json& object_;
  std::string error_;
};

}  // namespace

files::Dtype ScaleDtype(v1::ScaleType type) {
  switch (type) {
    case v1::SCALE_TYPE_FLOAT16:
      return files::Dtype::kF16;
    case v1::SCALE_TYPE_BFLOAT16:
      return files::Dtype::kBF16;
    case v1::SCALE_TYPE_E8M0:
    case v1::SCALE_TYPE_INTEGER:
      return files::Dtype::kU8;
    case v1::SCALE_TYPE_E4M3:
      return files::Dtype::kF8E4M3;
    default:
      return files::Dtype::kF32;
  }
}

bool ReadScales(const files::FileTensor& tensor, Encoding* encoding) {
  switch (tensor.dtype) {
    case files::Dtype::kF32:
      encoding->set_scale_type(v1::SCALE_TYPE_FLOAT32);
      break;
    case files::Dtype::kF16:
      encoding->set_scale_type(v1::SCALE_TYPE_FLOAT16);
      break;
    case files::Dtype::kBF16:
      encoding->set_scale_type(v1::SCALE_TYPE_BFLOAT16);
      break;
    default:
      return false;
  }
  *encoding = WithScales(*encoding, {tensor.data, {}, {}});
  return true;
}

std::string QuantizedMetadata(ElementType element_type,
                              const std::vector<int64_t>& shape,
                              const Encoding& encoding) {
  const FormatInfo format = *GetFormatInfo(encoding.format());
  const v1::ScaleType scale_type = ScaleTypeOf(encoding);
  const std::vector<int64_t> block_size(encoding.block_size().begin(),
                                        encoding.block_size().end());
  const std::vector<int64_t> outer_block_size(
      encoding.outer_block_size().begin(), encoding.outer_block_size().end());
  Json metadata = {
      {"version", 1},
      {"format", FormatName(encoding.format())},
      {"shape", shape},
      {"block_size", block_size},
      {"qmin", encoding.has_qmin() ? encoding.qmin() : format.qmin},
      {"qmax", encoding.has_qmax() ? encoding.qmax() : format.qmax},
      {"exclude_zero", encoding.exclude_zero()},
      {"element_type", std::string(ElementTypeName(element_type))}};
  if (scale_type != v1::SCALE_TYPE_FLOAT32) {
    metadata["scale_type"] = ScaleTypeName(scale_type);
  }
  if (!outer_block_size.empty()) {
    metadata["outer_block_size"] = outer_block_size;
  }
  if (encoding.no_saturation()) metadata["no_saturation"] = true;
  return metadata.dump();
}

absl::StatusOr<std::unique_ptr<QuantizedPlace>> QuantizedPlace::Reserve(
    uint64_t order, const std::string& name, ElementType element_type,
    const std::vector<int64_t>& shape, const Encoding& expected,
    files::SafetensorsBuilder* builder) {
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(expected.format());
  if (!format.ok()) return format.status();
  const absl::StatusOr<int64_t> count = ElementCount(shape);
  if (!count.ok()) return count.status();
  const std::vector<int64_t> block_size(expected.block_size().begin(),
                                        expected.block_size().end());
  const absl::StatusOr<std::vector<int64_t>> scale_shape =
      ScaleShape(shape, block_size);
  if (!scale_shape.ok()) return scale_shape.status();
  std::unique_ptr<QuantizedPlace> place(
      new QuantizedPlace(name, element_type, shape, builder));
  absl::Status status;
  const auto reserve = [&](absl::string_view suffix, files::Dtype dtype,
                           const std::vector<int64_t>& entry_shape) {
    if (!status.ok()) return;
    const absl::StatusOr<size_t> index =
        builder->Reserve(order, absl::StrCat(name, suffix), dtype, entry_shape);
    status = index.status();
    if (!status.ok()) return;
    place->entries_.push_back(
        {suffix, *index,
         static_cast<uint64_t>(*files::TensorSizeBytes(dtype, entry_shape))});
  };
  reserve("", CodeDtype(*format),
          format->storage_bits < 8
              ? std::vector<int64_t>{format->SizeBytes(*count)}
              : shape);
  const v1::ScaleType scale_type = ScaleTypeOf(expected);
  reserve(kScaleSuffix, ScaleDtype(scale_type), *scale_shape);
  if (HasOuterScales(scale_type)) {
    const std::vector<int64_t> outer(expected.outer_block_size().begin(),
                                     expected.outer_block_size().end());
    const absl::StatusOr<std::vector<int64_t>> outer_shape =
        ScaleShape(shape, outer);
    if (!outer_shape.ok()) return outer_shape.status();
    reserve(kOuterScaleSuffix, files::Dtype::kF32, *outer_shape);
  }
  if (!expected.codebook().empty()) {
    reserve(kCodebookSuffix, files::Dtype::kF32, {expected.codebook_size()});
  }
  if (expected.chunks_have_zero_points()) {
    reserve(kZeroPointSuffix,
            expected.zero_points_are_real() ? files::Dtype::kF32
                                            : files::Dtype::kI32,
            *scale_shape);
  }
  if (!status.ok()) return status;
  return place;
}

void QuantizedPlace::SetSinks(QuantizeJob* job) {
  job->scales_in_chunks = true;
  const auto refuse = [this](uint64_t, absl::Span<const uint8_t>) {
    return ResponseMalformedError(
        absl::StrCat("scales that the spec of \"", name_, "\" does not have"));
  };
  job->scale_sinks.zero_point = refuse;
  job->scale_sinks.outer_scale = refuse;
  for (const Entry& entry : entries_) {
    const Sink write = [builder = builder_, index = entry.index](
                           uint64_t offset_bytes,
                           absl::Span<const uint8_t> bytes) {
      return builder->Write(index, offset_bytes, bytes);
    };
    if (entry.suffix.empty()) {
      job->sink = write;
    } else if (entry.suffix == kScaleSuffix) {
      job->scale_sinks.scale = write;
    } else if (entry.suffix == kOuterScaleSuffix) {
      job->scale_sinks.outer_scale = write;
    } else if (entry.suffix == kZeroPointSuffix) {
      job->scale_sinks.zero_point = [this, write](
                                        uint64_t offset_bytes,
                                        absl::Span<const uint8_t> bytes) {
        if (std::any_of(bytes.begin(), bytes.end(),
                        [](uint8_t byte) { return byte != 0; })) {
          has_zero_point_ = true;
        }
        return write(offset_bytes, bytes);
      };
    }
  }
}

absl::StatusOr<uint64_t> QuantizedPlace::Finish(const Encoding& encoding) {
  uint64_t size_bytes = 0;
  for (const Entry& entry : entries_) {
    if (entry.suffix.empty()) {
      builder_->SetDtype(entry.index,
                         CodeDtype(*GetFormatInfo(encoding.format())));
    } else if (entry.suffix == kCodebookSuffix) {
      const absl::Status status =
          builder_->Write(entry.index, 0, BytesOf(encoding.codebook()));
      if (!status.ok()) return status;
    } else if (entry.suffix == kZeroPointSuffix && !has_zero_point_) {
      builder_->Drop(entry.index);
      continue;
    }
    size_bytes += entry.size_bytes;
  }
  builder_->SetMetadata(absl::StrCat(kQuantizedKeyPrefix, name_),
                        QuantizedMetadata(element_type_, shape_, encoding));
  return size_bytes;
}

absl::Status QuantizedPlace::CopyFrom(const files::SafetensorsReader& reader) {
  for (const Entry& entry : entries_) {
    const files::FileTensor* const tensor =
        reader.Find(absl::StrCat(name_, entry.suffix));
    if (tensor == nullptr && entry.suffix == kZeroPointSuffix) {
      builder_->Drop(entry.index);
      continue;
    }
    if (tensor == nullptr || tensor->data.size() != entry.size_bytes) {
      return files::FileMalformedError(name_,
                                       "a part has not what the spec comes to");
    }
    builder_->SetDtype(entry.index, tensor->dtype);
    const absl::Status status = builder_->Write(entry.index, 0, tensor->data);
    if (!status.ok()) return status;
  }
  const std::string key = absl::StrCat(kQuantizedKeyPrefix, name_);
  const auto metadata = reader.metadata().find(key);
  if (metadata == reader.metadata().end()) {
    return files::FileMalformedError(name_, "a part has no metadata of it");
  }
  builder_->SetMetadata(key, metadata->second);
  return absl::OkStatus();
}

void QuantizedPlace::Drop() {
  for (const Entry& entry : entries_) builder_->Drop(entry.index);
}

Encoding QuantizedTensor::Whole() const {
  return scales.has_value() ? WithScales(encoding, *scales) : encoding;
}

absl::StatusOr<QuantizedTensor> ReadQuantized(const TensorInput& input,
                                              const std::string& path,
                                              const std::string& name,
                                              absl::string_view json) {
  const auto malformed = [&path, &name](absl::string_view what) {
    return files::FileMalformedError(
        path, absl::StrCat("quantized tensor \"", name, "\": ", what));
  };
  const Json object = files::ParseJson(json);
  if (!object.is_object()) return malformed("the metadata are not an object");
  Members members(object);
  if (members.Integer("version") != 1 && members.error().empty()) {
    return malformed("expected version 1");
  }
  const std::string format_name = members.String("format");
  const std::string element_type_name = members.String("element_type");
  QuantizedTensor tensor;
  tensor.name = name;
  tensor.parts.push_back(name);
  for (const absl::string_view suffix : kSuffixes) {
    tensor.parts.push_back(absl::StrCat(name, suffix));
  }
  tensor.shape = members.Integers("shape");
  const std::vector<int64_t> block_size = members.Integers("block_size");
  tensor.encoding.set_qmin(members.Integer("qmin"));
  tensor.encoding.set_qmax(members.Integer("qmax"));
  tensor.encoding.set_exclude_zero(members.Boolean("exclude_zero"));
  const std::string scale_type_name =
      members.Has("scale_type") ? members.String("scale_type") : "float32";
  std::vector<int64_t> outer_block_size;
  if (members.Has("outer_block_size")) {
    outer_block_size = members.Integers("outer_block_size");
  }
  if (members.Has("no_saturation")) {
    tensor.encoding.set_no_saturation(members.Boolean("no_saturation"));
  }
  if (!members.error().empty()) return malformed(members.error());

  const absl::StatusOr<v1::ScaleType> scale_type =
      ParseScaleType(scale_type_name);
  if (!scale_type.ok()) return malformed(ErrorText(scale_type.status()));
  const absl::StatusOr<v1::NumberFormat> number_format =
      ParseFormat(format_name);
  if (!number_format.ok()) {
    return malformed(ErrorText(number_format.status()));
  }
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(*number_format);
  if (!format.ok()) return malformed(ErrorText(format.status()));
  const absl::StatusOr<ElementType> element_type =
      ParseElementType(element_type_name);
  if (!element_type.ok()) return malformed(ErrorText(element_type.status()));
  const absl::StatusOr<int64_t> count = ElementCount(tensor.shape);
  if (!count.ok()) return malformed(ErrorText(count.status()));
  const absl::StatusOr<std::vector<int64_t>> scale_shape =
      ScaleShape(tensor.shape, block_size);
  if (!scale_shape.ok()) return malformed(ErrorText(scale_shape.status()));

  tensor.element_type = *element_type;
  tensor.encoding.set_format(*number_format);
  for (const int64_t size : block_size) tensor.encoding.add_block_size(size);

  const files::FileTensor* const codes = input.Find(name);
  if (codes == nullptr) return malformed("the codes are missing");
  if (codes->dtype != CodeDtype(*format) ||
      static_cast<int64_t>(codes->data.size()) != format->SizeBytes(*count)) {
    return malformed(absl::StrCat("expected ", format->SizeBytes(*count),
                                  " bytes of ", DtypeName(CodeDtype(*format)),
                                  ", got ", codes->data.size(), " of ",
                                  DtypeName(codes->dtype)));
  }
  tensor.codes = codes->data;

  const files::FileTensor* const scale =
      input.Find(absl::StrCat(name, kScaleSuffix));
  const files::Dtype scale_dtype = ScaleDtype(*scale_type);
  if (scale == nullptr || scale->dtype != scale_dtype ||
      scale->shape != *scale_shape) {
    return malformed(absl::StrCat("expected scales, ", DtypeName(scale_dtype),
                                  " in the shape of the blocks"));
  }
  tensor.encoding.set_scale_type(*scale_type);
  tensor.encoding.set_scales_in_chunks(true);
  tensor.scales.emplace().scale = scale->data;
  if (HasOuterScales(*scale_type)) {
    const absl::StatusOr<std::vector<int64_t>> outer_shape =
        ScaleShape(tensor.shape, outer_block_size);
    if (!outer_shape.ok()) return malformed(ErrorText(outer_shape.status()));
    const files::FileTensor* const outer =
        input.Find(absl::StrCat(name, kOuterScaleSuffix));
    if (outer == nullptr || outer->dtype != files::Dtype::kF32 ||
        outer->shape != *outer_shape) {
      return malformed(
          "expected outer scales, F32 in the shape of the outer blocks");
    }
    tensor.scales->outer_scale = outer->data;
    for (const int64_t size : outer_block_size) {
      tensor.encoding.add_outer_block_size(size);
    }
    for (const int64_t size : *scale_shape) {
      tensor.encoding.add_scale_shape(size);
    }
  }
  const files::FileTensor* const codebook =
      input.Find(absl::StrCat(name, kCodebookSuffix));
  if (codebook != nullptr && format->kind == CodeKind::kCodebook) {
    if (codebook->dtype != files::Dtype::kF32 || codebook->shape.size() != 1) {
      return malformed("expected a codebook, F32 of one dimension");
    }
    const std::vector<float> entries = CopyElements<float>(codebook->data);
    tensor.encoding.mutable_codebook()->Add(entries.begin(), entries.end());
  }

  const files::FileTensor* const zero_point =
      input.Find(absl::StrCat(name, kZeroPointSuffix));
  if (zero_point != nullptr) {
    const bool is_real = zero_point->dtype == files::Dtype::kF32;
    if ((!is_real && zero_point->dtype != files::Dtype::kI32) ||
        zero_point->shape != *scale_shape) {
      return malformed(
          "expected zero points, I32 or F32 in the shape of the blocks");
    }
    tensor.encoding.set_zero_points_are_real(is_real);
    tensor.scales->zero_point = zero_point->data;
    tensor.encoding.set_chunks_have_zero_points(true);
  }
  return tensor;
}

absl::StatusOr<std::vector<QuantizedTensor>> ReadAllQuantized(
    const TensorInput& input, const std::string& path) {
  std::vector<QuantizedTensor> tensors;
  for (const auto& [key, value] : input.metadata()) {
    absl::string_view name = key;
    if (!absl::ConsumePrefix(&name, kQuantizedKeyPrefix)) continue;
    absl::StatusOr<QuantizedTensor> tensor =
        ReadQuantized(input, path, std::string(name), value);
    if (!tensor.ok()) return tensor.status();
    tensors.push_back(*std::move(tensor));
  }
  return tensors;
}

}  // namespace quantd
