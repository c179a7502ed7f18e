// The first pass over a tensor whose scales stand under outer scales.

#ifndef QUANTD_CLIENT_MODELS_OUTER_MAXIMUM_H_
#define QUANTD_CLIENT_MODELS_OUTER_MAXIMUM_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/tensor.h"
#include "client/files/safetensors.h"

namespace quantd {

// The largest magnitude of the finite elements of each block, 0 where there is
// none, in row-major order: v1::QuantizeHeader.outer_maximum. An empty block
// size is one block.
// Requires: float32, float16 or bfloat16; a block size that fits the shape, and
// data of that shape.
std::vector<float> OuterMaximum(ElementType type,
                                absl::Span<const int64_t> shape,
                                absl::Span<const int64_t> block_size,
                                absl::Span<const uint8_t> data);

// The outer maximum to send with a tensor and a spec, so that the server need
// not hold the tensor: where the outer scales follow from the extremes alone.
// Methods that search find their ranges first, and float64 is not read: empty
// for those and where there are no outer scales.
std::vector<float> OuterMaximumFor(const EncodingSpec& spec,
                                   const files::FileTensor& tensor);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_OUTER_MAXIMUM_H_
