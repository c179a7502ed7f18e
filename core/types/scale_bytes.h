// Scales and zero points from raw bytes; AppendScaleBytes of scale_window.h
// makes them.

#ifndef QUANTD_CORE_TYPES_SCALE_BYTES_H_
#define QUANTD_CORE_TYPES_SCALE_BYTES_H_

#include "absl/strings/string_view.h"
#include "core/types/encoding.h"

namespace quantd::core {

// Appends what the bytes stand for to the encoding's scales, or to its scale
// codes, from which DeriveScales makes scales.
// Requires: a whole number of them; a valid format and scale type.
void AppendScales(absl::string_view bytes, Encoding* encoding);
// The same to its zero points.
void AppendZeroPoints(absl::string_view bytes, Encoding* encoding);

}  // namespace quantd::core

#endif  // QUANTD_CORE_TYPES_SCALE_BYTES_H_
