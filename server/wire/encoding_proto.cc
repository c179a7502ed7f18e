#include "server/wire/encoding_proto.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/types/block_layout.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

// Which field of an Encoding or EncodingSpec an error of core is about.
absl::Status AtField(absl::Status status) {
  const absl::string_view reason = core::ErrorReason(status);
  absl::string_view field;
  if (reason == "FORMAT_UNKNOWN") {
    field = "format";
  } else if (reason == "BLOCK_SIZE_INVALID") {
    field = "block_size";
  } else if (reason == "SCALE_INVALID" || reason == "SCALE_COUNT") {
    field = "scale";
  } else if (reason == "ZERO_POINT_RANGE") {
    field = "zero_point";
  } else if (reason == "CODE_RANGE_INVALID") {
    field = "qmin";
  } else if (reason == "SYMMETRY_INVALID") {
    field = "symmetry";
  } else if (reason == "METHOD_INVALID") {
    field = "method";
  } else {
    return status;
  }
  return core::WithField(std::move(status), field);
}

}  // namespace

void EncodingToProto(const core::Encoding& encoding, v1::Encoding* proto) {
  proto->set_format(static_cast<v1::NumberFormat>(encoding.format));
  proto->mutable_block_size()->Assign(encoding.block_size.begin(),
                                      encoding.block_size.end());
  proto->mutable_scale()->Assign(encoding.scale.begin(), encoding.scale.end());
  proto->mutable_zero_point()->Assign(encoding.zero_point.begin(),
                                      encoding.zero_point.end());
  proto->set_qmin(encoding.qmin);
  proto->set_qmax(encoding.qmax);
  proto->set_exclude_zero(encoding.exclude_zero);
  proto->set_degenerate_count(encoding.degenerate_count);
  proto->set_scale_type(static_cast<v1::ScaleType>(encoding.scale_type));
  proto->set_scale_code(encoding.scale_code.data(), encoding.scale_code.size());
  proto->mutable_outer_scale()->Assign(encoding.outer_scale.begin(),
                                       encoding.outer_scale.end());
  proto->mutable_outer_block_size()->Assign(encoding.outer_block_size.begin(),
                                            encoding.outer_block_size.end());
  proto->mutable_codebook()->Assign(encoding.codebook.begin(),
                                    encoding.codebook.end());
  proto->set_no_saturation(encoding.no_saturation);
  proto->mutable_scale_shape()->Assign(encoding.scale_shape.begin(),
                                       encoding.scale_shape.end());
}

absl::StatusOr<core::Encoding> EncodingFromProto(const v1::Encoding& proto) {
  core::Encoding encoding;
  encoding.format = static_cast<core::NumberFormat>(proto.format());
  encoding.block_size.assign(proto.block_size().begin(),
                             proto.block_size().end());
  encoding.scale.assign(proto.scale().begin(), proto.scale().end());
  encoding.zero_point.assign(proto.zero_point().begin(),
                             proto.zero_point().end());
  const core::FormatInfo* info = core::FindFormat(encoding.format);
  if (info != nullptr) {
    encoding.qmin = proto.has_qmin() ? proto.qmin() : info->qmin;
    encoding.qmax = proto.has_qmax() ? proto.qmax() : info->qmax;
  }
  encoding.exclude_zero = proto.exclude_zero();
  encoding.degenerate_count = static_cast<int64_t>(proto.degenerate_count());
  if (!v1::ScaleType_IsValid(proto.scale_type())) {
    return core::WithField(
        core::EnumUnknownError("ScaleType", proto.scale_type()), "scale_type");
  }
  encoding.scale_type = static_cast<core::ScaleType>(proto.scale_type());
  if (encoding.scale_type == core::ScaleType::kDefault) {
    encoding.scale_type =
        info == nullptr || info->scale_type == core::ScaleType::kDefault
            ? core::ScaleType::kFloat32
            : info->scale_type;
  }
  encoding.scale_code.assign(proto.scale_code().begin(),
                             proto.scale_code().end());
  encoding.outer_scale.assign(proto.outer_scale().begin(),
                              proto.outer_scale().end());
  encoding.outer_block_size.assign(proto.outer_block_size().begin(),
                                   proto.outer_block_size().end());
  encoding.codebook.assign(proto.codebook().begin(), proto.codebook().end());
  encoding.no_saturation = proto.no_saturation();
  encoding.scale_shape.assign(proto.scale_shape().begin(),
                              proto.scale_shape().end());
  if (absl::Status s = core::DeriveScales(&encoding); !s.ok()) {
    return AtField(std::move(s));
  }
  if (absl::Status s = core::ValidateEncoding(encoding); !s.ok()) {
    // Two fields share each of these reasons.
    const absl::string_view reason = core::ErrorReason(s);
    if (reason == "SCALE_COUNT" && !encoding.scale.empty()) {
      return core::WithField(std::move(s), "zero_point");
    }
    if (reason == "CODE_RANGE_INVALID" && encoding.qmax > info->qmax) {
      return core::WithField(std::move(s), "qmax");
    }
    return AtField(std::move(s));
  }
  return encoding;
}

absl::StatusOr<core::EncodingSpec> SpecFromProto(
    const v1::EncodingSpec& proto) {
  if (!v1::Symmetry_IsValid(proto.symmetry())) {
    return core::WithField(core::EnumUnknownError("Symmetry", proto.symmetry()),
                           "symmetry");
  }
  if (!v1::CalibrationMethod_IsValid(proto.method())) {
    return core::WithField(
        core::EnumUnknownError("CalibrationMethod", proto.method()), "method");
  }
  core::EncodingSpec spec;
  spec.format = static_cast<core::NumberFormat>(proto.format());
  spec.block_size.assign(proto.block_size().begin(), proto.block_size().end());
  spec.symmetry = static_cast<core::Symmetry>(proto.symmetry());
  spec.method = static_cast<core::CalibrationMethod>(proto.method());
  spec.exclude_zero = proto.exclude_zero();
  spec.unsigned_if_non_negative = proto.unsigned_if_non_negative();
  if (absl::Status s = core::ValidateSpec(spec); !s.ok()) {
    return AtField(std::move(s));
  }
  return spec;
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
}

}  // namespace quantd::server
