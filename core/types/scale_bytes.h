// Scales and zero points as raw bytes, little-endian, in the types that they
// are stored in.

#ifndef QUANTD_CORE_TYPES_SCALE_BYTES_H_
#define QUANTD_CORE_TYPES_SCALE_BYTES_H_

#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "core/types/encoding.h"

namespace quantd::core {

// Size in bytes of a stored zero point: that of an unpacked code, with
// exclude_zero that of an int32; a real one is a float32.
int64_t ZeroPointSizeBytes(const Encoding& encoding);

// Appends scales [begin, end) of `encoding` as bytes, or their scale codes, and
// their zero points if it has some.
// Requires: a valid encoding, or one of a ScaleWindow.
void AppendScaleBytes(const Encoding& encoding, int64_t begin, int64_t end,
                      std::string* scale, std::string* zero_point);

// Makes room for so many scales in all: appending them takes no more memory
// than they have in the end.
void ReserveScales(int64_t scale_count, bool has_zero_points,
                   Encoding* encoding);

// Appends what the bytes stand for to the encoding's scales, or to its scale
// codes, from which DeriveScales makes scales.
// Requires: a whole number of them; a valid format and scale type.
void AppendScales(absl::Span<const uint8_t> bytes, Encoding* encoding);
// Appends what the bytes stand for to the encoding's zero points.
void AppendZeroPoints(absl::Span<const uint8_t> bytes, Encoding* encoding);
// Appends what the bytes stand for to the encoding's outer scales.
void AppendOuterScales(absl::Span<const uint8_t> bytes, Encoding* encoding);

// Appends all that `from` has of scales, scale codes and zero points.
void AppendScales(const Encoding& from, Encoding* to);

}  // namespace quantd::core

#endif  // QUANTD_CORE_TYPES_SCALE_BYTES_H_
