// One code of a format at a time: the definition that the kernels equal.
//
// Small floats: the number nearest to x; of two equally near the one with an
// even mantissa. Overflow, that is a number that rounds beyond the largest,
// and infinity: the largest number with saturation; without it infinity, or
// NaN where the format has no infinity. NaN stays NaN where the format has one,
// otherwise it is +0. FNUZ formats have no negative zero: it becomes +0.
// Source: OCP 8-bit floating point (OFP8) 1.0 and Microscaling (MX) 1.0; ONNX
// Cast for the FNUZ formats.
//
// Codebooks: the nearest entry, in exact arithmetic; of two equally near the
// lower one. NaN takes the entry nearest to 0.

#ifndef QUANTD_CORE_FORMATS_CODEC_H_
#define QUANTD_CORE_FORMATS_CODEC_H_

#include <cstdint>

#include "absl/types/span.h"
#include "core/formats/number_format.h"

namespace quantd::core {

// The value of a code, exact; may be NaN or infinite.
// Requires: code < 2^(1 + exponent_bits + mantissa_bits).
float DecodeFloat(const FloatLayout& layout, uint32_t code);

// The code of x. NaN has no sign.
// Requires: saturate, for formats that have neither infinity nor NaN.
uint32_t EncodeFloat(const FloatLayout& layout, double x, bool saturate);

// The largest number, and the smallest magnitude that rounds beyond it.
double LargestFloat(const FloatLayout& layout);
double OverflowThreshold(const FloatLayout& layout);

// The value of every byte [256] as a code of a row of AllFormats(); bits past
// those of a code are ignored.
// Requires: CodeKind::kFloat.
const float* FloatValues(const FormatInfo& format);

// The index of the entry for x.
// Requires: ascending, finite, not empty.
uint32_t EncodeCodebook(absl::Span<const float> codebook, double x);

// The largest float64 that is nearer to `lower` than to `upper`, or as near.
// Requires: lower < upper, both finite.
double LargestNearLower(float lower, float upper);

}  // namespace quantd::core

#endif  // QUANTD_CORE_FORMATS_CODEC_H_
