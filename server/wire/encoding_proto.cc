#include "server/wire/encoding_proto.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/types/block_layout.h"
#include "core/types/scale_bytes.h"
#include "core/types/tensor_slice.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

// Errors: ENUM_UNKNOWN, at the field.
template <typename ToEnum, typename ProtoEnum>
absl::StatusOr<ToEnum> EnumFromProto(ProtoEnum value, bool (*is_valid)(int),
                                     absl::string_view enum_name,
                                     absl::string_view field) {
  if (!is_valid(value)) {
    return core::WithField(core::EnumUnknownError(enum_name, value), field);
  }
  return static_cast<ToEnum>(value);
}

// Counts beyond int stay beyond every limit that core has.
int ClampToInt(uint32_t value) {
  return static_cast<int>(
      std::min<uint32_t>(value, std::numeric_limits<int>::max()));
}

// The codes that quantizing produces by default.
int32_t DefaultQmax(const core::FormatInfo& format,
                    const core::Encoding& encoding) {
  const bool has_codebook = format.kind == core::CodeKind::kCodebook &&
                            format.codebook.empty() &&
                            !encoding.codebook.empty();
  // A codebook longer than the format's codes is refused as such.
  return has_codebook ? static_cast<int32_t>(std::min<size_t>(
                            encoding.codebook.size(),
                            static_cast<size_t>(format.qmax) + 1)) -
                            1
                      : format.qmax;
}

}  // namespace

namespace {

void FrameToProto(const core::Encoding& encoding, v1::Encoding* proto) {
  proto->set_format(static_cast<v1::NumberFormat>(encoding.format));
  proto->mutable_block_size()->Assign(encoding.block_size.begin(),
                                      encoding.block_size.end());
  proto->set_qmin(encoding.qmin);
  proto->set_qmax(encoding.qmax);
  proto->set_exclude_zero(encoding.exclude_zero);
  proto->set_scale_type(static_cast<v1::ScaleType>(encoding.scale_type));
  proto->mutable_outer_block_size()->Assign(encoding.outer_block_size.begin(),
                                            encoding.outer_block_size.end());
  proto->mutable_codebook()->Assign(encoding.codebook.begin(),
                                    encoding.codebook.end());
  proto->set_no_saturation(encoding.no_saturation);
  proto->set_zero_points_are_real(encoding.zero_points_are_real);
  proto->mutable_scale_shape()->Assign(encoding.scale_shape.begin(),
                                       encoding.scale_shape.end());
}

// Everything but scales, zero points and outer scales, with the errors of its
// enums.
absl::StatusOr<core::Encoding> FrameFromProto(const v1::Encoding& proto) {
  core::Encoding encoding;
  encoding.format = static_cast<core::NumberFormat>(proto.format());
  const core::FormatInfo* info = core::FindFormat(encoding.format);
  if (info == nullptr) {
    return core::WithField(core::FormatUnknownError(proto.format()), "format");
  }
  const absl::StatusOr<core::ScaleType> scale_type =
      EnumFromProto<core::ScaleType>(proto.scale_type(), v1::ScaleType_IsValid,
                                     "ScaleType", "scale_type");
  if (!scale_type.ok()) return scale_type.status();
  encoding.scale_type = *scale_type;
  if (encoding.scale_type == core::ScaleType::kDefault) {
    encoding.scale_type = info->scale_type == core::ScaleType::kDefault
                              ? core::ScaleType::kFloat32
                              : info->scale_type;
  }
  encoding.block_size.assign(proto.block_size().begin(),
                             proto.block_size().end());
  encoding.codebook.assign(proto.codebook().begin(), proto.codebook().end());
  encoding.qmin = proto.has_qmin() ? proto.qmin() : info->qmin;
  encoding.qmax =
      proto.has_qmax() ? proto.qmax() : DefaultQmax(*info, encoding);
  encoding.exclude_zero = proto.exclude_zero();
  encoding.outer_block_size.assign(proto.outer_block_size().begin(),
                                   proto.outer_block_size().end());
  encoding.no_saturation = proto.no_saturation();
  encoding.zero_points_are_real =
      proto.zero_points_are_real() || proto.real_zero_point_size() > 0;
  encoding.scale_shape.assign(proto.scale_shape().begin(),
                              proto.scale_shape().end());
  return encoding;
}

}  // namespace

void EncodingToProto(const core::Encoding& encoding, v1::Encoding* proto) {
  FrameToProto(encoding, proto);
  proto->mutable_scale()->Assign(encoding.scale.begin(), encoding.scale.end());
  proto->mutable_zero_point()->Assign(encoding.zero_point.begin(),
                                      encoding.zero_point.end());
  proto->mutable_real_zero_point()->Assign(encoding.real_zero_point.begin(),
                                           encoding.real_zero_point.end());
  proto->set_degenerate_count(encoding.degenerate_count);
  proto->set_scale_code(encoding.scale_code.data(), encoding.scale_code.size());
  proto->mutable_outer_scale()->Assign(encoding.outer_scale.begin(),
                                       encoding.outer_scale.end());
}

absl::StatusOr<core::Encoding> EncodingFromProto(const v1::Encoding& proto) {
  absl::StatusOr<core::Encoding> encoding = FrameFromProto(proto);
  if (!encoding.ok()) return encoding;
  encoding->scale.assign(proto.scale().begin(), proto.scale().end());
  encoding->zero_point.assign(proto.zero_point().begin(),
                              proto.zero_point().end());
  encoding->real_zero_point.assign(proto.real_zero_point().begin(),
                                   proto.real_zero_point().end());
  encoding->degenerate_count = static_cast<int64_t>(proto.degenerate_count());
  encoding->scale_code.assign(proto.scale_code().begin(),
                              proto.scale_code().end());
  encoding->outer_scale.assign(proto.outer_scale().begin(),
                               proto.outer_scale().end());
  if (absl::Status s = core::DeriveScales(&*encoding); !s.ok()) return s;
  if (absl::Status s = core::ValidateEncoding(*encoding); !s.ok()) return s;
  return encoding;
}

core::ScaleWindow::Bytes ScaleBytesOf(const v1::ScaleChunk& chunk) {
  const auto bytes = [](const std::string& field) {
    return absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(field.data()),
                               field.size());
  };
  return {chunk.first(), bytes(chunk.scale()), bytes(chunk.zero_point()),
          chunk.first_outer(), bytes(chunk.outer_scale())};
}

absl::StatusOr<core::Encoding> EncodingOutlineFromProto(
    const v1::Encoding& proto) {
  absl::StatusOr<core::Encoding> encoding = FrameFromProto(proto);
  if (encoding.ok()) {
    encoding->degenerate_count = static_cast<int64_t>(proto.degenerate_count());
  }
  return encoding;
}

void EncodingWithoutScalesToProto(const core::Encoding& encoding,
                                  bool has_zero_points, v1::Encoding* proto) {
  FrameToProto(encoding, proto);
  proto->set_scales_in_chunks(true);
  proto->set_chunks_have_zero_points(has_zero_points);
}

absl::StatusOr<core::Encoding> EncodingWithoutScalesFromProto(
    const v1::Encoding& proto) {
  absl::StatusOr<core::Encoding> encoding = FrameFromProto(proto);
  if (!encoding.ok()) return encoding;
  for (const auto& [field, count] :
       {std::pair<const char*, size_t>{"scale", proto.scale_size()},
        {"zero_point", proto.zero_point_size()},
        {"real_zero_point", proto.real_zero_point_size()},
        {"scale_code", proto.scale_code().size()},
        {"outer_scale", proto.outer_scale_size()}}) {
    if (count == 0) continue;
    return core::WithField(
        core::ScaleShapeError(absl::StrCat(field, " has ", count,
                                           " entries, expected none with "
                                           "scales_in_chunks")),
        field);
  }
  absl::Status status =
      core::ValidateWithoutScales(*encoding, proto.chunks_have_zero_points());
  if (!status.ok()) return status;
  return encoding;
}

void ScalesToProto(const core::Encoding& encoding, int64_t first, int64_t begin,
                   int64_t end, v1::ScaleChunk* proto) {
  proto->set_first(begin);
  core::AppendScaleBytes(encoding, begin - first, end - first,
                         proto->mutable_scale(), proto->mutable_zero_point());
}

void OuterScalesToProto(const core::Encoding& encoding, int64_t first,
                        int64_t begin, int64_t end, v1::ScaleChunk* proto) {
  proto->set_first_outer(begin);
  std::string* bytes = proto->mutable_outer_scale();
  bytes->assign(reinterpret_cast<const char*>(encoding.outer_scale.data() +
                                              (begin - first)),
                static_cast<size_t>(end - begin) * sizeof(float));
}

int64_t ScaleCount(const v1::Encoding& proto) {
  return std::max<int64_t>(proto.scale_size(),
                           static_cast<int64_t>(proto.scale_code().size()));
}

int64_t EncodingMemoryBytes(const v1::Encoding& proto) {
  const auto dimension_count = static_cast<int64_t>(proto.block_size_size()) +
                               proto.outer_block_size_size() +
                               proto.scale_shape_size();
  return static_cast<int64_t>(sizeof(core::Encoding)) +
         static_cast<int64_t>(proto.scale_code().size()) +
         static_cast<int64_t>(sizeof(float)) *
             (ScaleCount(proto) + proto.zero_point_size() +
              proto.real_zero_point_size() + proto.outer_scale_size() +
              proto.codebook_size()) +
         static_cast<int64_t>(sizeof(int64_t)) * dimension_count;
}

absl::StatusOr<core::EncodingSpec> SpecFromProto(
    const v1::EncodingSpec& proto) {
  core::EncodingSpec spec;
  spec.format = static_cast<core::NumberFormat>(proto.format());
  spec.block_size.assign(proto.block_size().begin(), proto.block_size().end());
  const auto symmetry = EnumFromProto<core::Symmetry>(
      proto.symmetry(), v1::Symmetry_IsValid, "Symmetry", "symmetry");
  if (!symmetry.ok()) return symmetry.status();
  spec.symmetry = *symmetry;
  const auto method = EnumFromProto<core::CalibrationMethod>(
      proto.method(), v1::CalibrationMethod_IsValid, "CalibrationMethod",
      "method");
  if (!method.ok()) return method.status();
  spec.method = *method;
  spec.exclude_zero = proto.exclude_zero();
  spec.unsigned_if_non_negative = proto.unsigned_if_non_negative();
  if (proto.has_granularity()) {
    spec.granularity = GranularityFromProto(proto.granularity());
  }
  const auto scale_type = EnumFromProto<core::ScaleType>(
      proto.scale_type(), v1::ScaleType_IsValid, "ScaleType", "scale_type");
  if (!scale_type.ok()) return scale_type.status();
  spec.scale_type = *scale_type;
  const auto mx_scale_rule = EnumFromProto<core::MxScaleRule>(
      proto.mx_scale_rule(), v1::MxScaleRule_IsValid, "MxScaleRule",
      "mx_scale_rule");
  if (!mx_scale_rule.ok()) return mx_scale_rule.status();
  spec.mx_scale_rule = *mx_scale_rule;
  spec.power_of_two_scale = proto.power_of_two_scale();
  spec.outer_block_size.assign(proto.outer_block_size().begin(),
                               proto.outer_block_size().end());
  spec.integer_scale_max = ClampToInt(proto.integer_scale_max());
  spec.codebook.assign(proto.codebook().begin(), proto.codebook().end());
  if (proto.has_tail_fraction()) spec.tail_fraction = proto.tail_fraction();
  const auto tail =
      EnumFromProto<core::Tail>(proto.tail(), v1::Tail_IsValid, "Tail", "tail");
  if (!tail.ok()) return tail.status();
  spec.tail = *tail;
  if (proto.has_gamma()) spec.gamma = proto.gamma();
  spec.search_steps = ClampToInt(proto.search_steps());
  spec.entropy_bins = ClampToInt(proto.entropy_bins());
  spec.mantissa_bits = ClampToInt(proto.mantissa_bits());
  spec.range_min = proto.range_min();
  spec.range_max = proto.range_max();
  spec.scale_range_min.assign(proto.scale_range_min().begin(),
                              proto.scale_range_min().end());
  spec.scale_range_max.assign(proto.scale_range_max().begin(),
                              proto.scale_range_max().end());
  for (const int value : proto.methods()) {
    const auto one = EnumFromProto<core::CalibrationMethod>(
        value, v1::CalibrationMethod_IsValid, "CalibrationMethod", "methods");
    if (!one.ok()) return one.status();
    spec.methods.push_back(*one);
  }
  const auto objective = EnumFromProto<core::Objective>(
      proto.objective(), v1::Objective_IsValid, "Objective", "objective");
  if (!objective.ok()) return objective.status();
  spec.objective = *objective;
  spec.no_saturation = proto.no_saturation();
  spec.real_zero_point = proto.real_zero_point();
  if (absl::Status s = core::ValidateSpec(spec); !s.ok()) return s;
  return spec;
}

void SpecToProto(const core::EncodingSpec& spec, v1::EncodingSpec* proto) {
  proto->Clear();
  proto->set_format(static_cast<v1::NumberFormat>(spec.format));
  proto->mutable_block_size()->Assign(spec.block_size.begin(),
                                      spec.block_size.end());
  proto->set_symmetry(static_cast<v1::Symmetry>(spec.symmetry));
  proto->set_method(static_cast<v1::CalibrationMethod>(spec.method));
  proto->set_exclude_zero(spec.exclude_zero);
  proto->set_unsigned_if_non_negative(spec.unsigned_if_non_negative);
  if (spec.granularity.has_value()) {
    proto->mutable_granularity()->set_axis(
        static_cast<int32_t>(spec.granularity->axis));
    proto->mutable_granularity()->set_group_size(spec.granularity->group_size);
  }
  proto->set_scale_type(static_cast<v1::ScaleType>(spec.scale_type));
  proto->set_mx_scale_rule(static_cast<v1::MxScaleRule>(spec.mx_scale_rule));
  proto->set_power_of_two_scale(spec.power_of_two_scale);
  proto->mutable_outer_block_size()->Assign(spec.outer_block_size.begin(),
                                            spec.outer_block_size.end());
  proto->set_integer_scale_max(static_cast<uint32_t>(spec.integer_scale_max));
  proto->mutable_codebook()->Assign(spec.codebook.begin(), spec.codebook.end());
  proto->set_tail_fraction(spec.tail_fraction);
  proto->set_tail(static_cast<v1::Tail>(spec.tail));
  proto->set_gamma(spec.gamma);
  proto->set_search_steps(static_cast<uint32_t>(spec.search_steps));
  proto->set_entropy_bins(static_cast<uint32_t>(spec.entropy_bins));
  proto->set_mantissa_bits(static_cast<uint32_t>(spec.mantissa_bits));
  proto->set_range_min(spec.range_min);
  proto->set_range_max(spec.range_max);
  proto->mutable_scale_range_min()->Assign(spec.scale_range_min.begin(),
                                           spec.scale_range_min.end());
  proto->mutable_scale_range_max()->Assign(spec.scale_range_max.begin(),
                                           spec.scale_range_max.end());
  for (const core::CalibrationMethod method : spec.methods) {
    proto->add_methods(static_cast<v1::CalibrationMethod>(method));
  }
  proto->set_objective(static_cast<v1::Objective>(spec.objective));
  proto->set_no_saturation(spec.no_saturation);
  proto->set_real_zero_point(spec.real_zero_point);
}

absl::StatusOr<TensorDescription> DescriptionFromProto(
    const v1::TensorDescription& proto) {
  if (absl::Status s = CheckOptionalName(proto.name()); !s.ok()) {
    return core::WithField(std::move(s), "name");
  }
  if (proto.element_type() == v1::ELEMENT_TYPE_UNSPECIFIED ||
      !v1::ElementType_IsValid(proto.element_type())) {
    return core::WithField(core::ElementTypeUnknownError(proto.element_type()),
                           "element_type");
  }
  TensorDescription description;
  description.element_type =
      static_cast<core::ElementType>(proto.element_type());
  description.shape.assign(proto.shape().begin(), proto.shape().end());
  absl::StatusOr<int64_t> count = core::ElementCount(description.shape);
  if (!count.ok()) return core::WithField(count.status(), "shape");
  description.element_count = *count;
  if (proto.global_shape().empty()) {
    if (proto.offset().empty()) return description;
    return core::WithField(
        core::ShapeInvalidError("an offset without the shape of the whole"),
        "global_shape");
  }
  core::TensorSlice& slice = description.slice.emplace();
  slice.shape = description.shape;
  slice.global_shape.assign(proto.global_shape().begin(),
                            proto.global_shape().end());
  slice.offset.assign(proto.offset().begin(), proto.offset().end());
  if (slice.offset.empty()) slice.offset.resize(slice.shape.size());
  if (absl::Status s = core::CheckSlice(slice); !s.ok()) {
    return core::WithField(s, "global_shape");
  }
  return description;
}

core::Granularity GranularityFromProto(const v1::Granularity& proto) {
  return {proto.axis(), proto.group_size()};
}

void PredictionToProto(const core::Prediction& prediction,
                       v1::Prediction* proto) {
  proto->set_count(prediction.count);
  proto->set_mean_squared_error(prediction.MeanSquaredError());
  proto->set_mean_squared_error_low(prediction.MeanSquaredErrorLow());
  proto->set_mean_squared_error_high(prediction.MeanSquaredErrorHigh());
  proto->set_sqnr_db(prediction.SqnrDb());
  proto->set_sqnr_db_low(prediction.SqnrDbLow());
  proto->set_sqnr_db_high(prediction.SqnrDbHigh());
  proto->set_mantissa_bits(static_cast<uint32_t>(prediction.mantissa_bits));
}

}  // namespace quantd::server
