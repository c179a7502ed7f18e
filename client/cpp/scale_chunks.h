// Scales as they go over the wire, in chunks beside the elements.

#ifndef QUANTD_CLIENT_CPP_SCALE_CHUNKS_H_
#define QUANTD_CLIENT_CPP_SCALE_CHUNKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/tensor.h"
#include "quantd/v1/encoding.pb.h"

namespace quantd::internal {

// Bytes of a zero point in a v1::ScaleChunk: those of one unpacked code, or 4
// with exclude_zero.
int64_t ZeroPointSizeBytes(const Encoding& encoding);

// Number of scales in a chunk that belongs to that encoding.
// Errors: RESPONSE_MALFORMED for a part of a scale, or zero points that are not
// as many.
absl::StatusOr<uint64_t> CountOfChunk(const Encoding& encoding,
                                      const v1::ScaleChunk& chunk);

// Zero points of a v1::ScaleChunk as int32, and back.
// Requires: a known format; `bytes` is a multiple of their size.
std::vector<int32_t> WidenZeroPoints(const Encoding& encoding,
                                     absl::Span<const uint8_t> bytes);
std::string NarrowZeroPoints(const Encoding& encoding,
                             absl::Span<const uint8_t> int32s);

// How many scales the first `count` elements of a tensor use: 1 plus the
// largest scale index among them, in row-major order.
// Requires: block sizes that fit the shape; 0 < count <= the elements.
int64_t ScalesOfFirst(absl::Span<const int64_t> shape,
                      absl::Span<const int64_t> block_size, int64_t count);

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_SCALE_CHUNKS_H_
