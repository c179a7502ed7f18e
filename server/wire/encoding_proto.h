// Encodings, specs and tensor descriptions from and to their messages.

#ifndef QUANTD_SERVER_WIRE_ENCODING_PROTO_H_
#define QUANTD_SERVER_WIRE_ENCODING_PROTO_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/prediction.h"
#include "core/quantize/quantize.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "core/types/scale_window.h"
#include "core/types/tensor_slice.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd::server {

void EncodingToProto(const core::Encoding& encoding, v1::Encoding* proto);

// With scale codes `scale` is made from them, whatever the message has there.
// Errors: ENUM_UNKNOWN and those of core::ValidateEncoding, at the message's
// fields.
absl::StatusOr<core::Encoding> EncodingFromProto(const v1::Encoding& proto);

// An encoding without its scales, which come in chunks.
void EncodingWithoutScalesToProto(const core::Encoding& encoding,
                                  bool has_zero_points, v1::Encoding* proto);

// Reads an encoding without its scales, which come in chunks.
// Errors: ENUM_UNKNOWN, SCALE_COUNT if it has scales all the same, and those of
// core::ValidateWithoutScales, at the message's fields.
absl::StatusOr<core::Encoding> EncodingWithoutScalesFromProto(
    const v1::Encoding& proto);

// Scales [begin, end) of those that `encoding` has, of which the first has
// index `first`.
void ScalesToProto(const core::Encoding& encoding, int64_t first, int64_t begin,
                   int64_t end, v1::ScaleChunk* proto);
// Outer scales in the same way.
void OuterScalesToProto(const core::Encoding& encoding, int64_t first,
                        int64_t begin, int64_t end, v1::ScaleChunk* proto);

// Bytes that a chunk has; they point into it.
core::ScaleWindow::Bytes ScaleBytesOf(const v1::ScaleChunk& chunk);

// Everything but scales, zero points and outer scales, unchecked.
// Errors: FORMAT_UNKNOWN, ENUM_UNKNOWN, at the message's fields.
absl::StatusOr<core::Encoding> EncodingOutlineFromProto(
    const v1::Encoding& proto);

// Number of scales in `proto`, as numbers or as codes.
int64_t ScaleCount(const v1::Encoding& proto);
// Memory of `proto` as core::Encoding.
int64_t EncodingMemoryBytes(const v1::Encoding& proto);

// Charges nothing: for specs of requests call ParseSpec.
// Errors: ENUM_UNKNOWN and those of core::ValidateSpec, at the message's
// fields.
absl::StatusOr<core::EncodingSpec> SpecFromProto(const v1::EncodingSpec& proto);

void SpecToProto(const core::EncodingSpec& spec, v1::EncodingSpec* proto);

core::Granularity GranularityFromProto(const v1::Granularity& proto);

void PredictionToProto(const core::Prediction& prediction,
                       v1::Prediction* proto);

// Description of a tensor in a header.
struct TensorDescription {
  core::ElementType element_type{};
  std::vector<int64_t> shape;
  int64_t element_count = 0;
  // Slice that a tensor is, if it is not whole; of `shape`, and valid.
  absl::optional<core::TensorSlice> slice = absl::nullopt;

  // Shape of the whole tensor.
  const std::vector<int64_t>& global_shape() const {
    return slice.has_value() ? slice->global_shape : shape;
  }
  // Null where it is whole.
  const core::TensorSlice* slice_or_null() const {
    return slice.has_value() ? &*slice : nullptr;
  }
};

// Errors: NAME_INVALID, ELEMENT_TYPE_UNKNOWN, SHAPE_INVALID, at the message's
// fields.
absl::StatusOr<TensorDescription> DescriptionFromProto(
    const v1::TensorDescription& proto);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_ENCODING_PROTO_H_
