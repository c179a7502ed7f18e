// Blocks of GGUF that quantctl makes itself: q4_0 and the like, as their scales
// and codes are searched for together, and K-quants, as no encoding of quantd
// has their integer scales and minima.

#ifndef QUANTD_CLIENT_MODELS_GGUF_BLOCKS_H_
#define QUANTD_CLIENT_MODELS_GGUF_BLOCKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/gguf_types.h"
#include "client/files/safetensors.h"
#include "client/models/spec_syntax.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd {

// The type whose blocks a tensor becomes: SpecTemplate::gguf_type, or what
// llama.cpp takes in its place where rows have no whole blocks. Null for rows
// that have none of these either.
const files::GgufType* BlockTypeFor(const SpecTemplate& spec,
                                    absl::Span<const int64_t> shape);

// Text for people about a tensor whose rows have no whole blocks of
// SpecTemplate::gguf_type: the type in its place, or `otherwise`. Empty for
// other tensors and specs. `type` is what BlockTypeFor says of it.
std::string NoWholeBlocksText(const SpecTemplate& spec,
                              const files::FileTensor& tensor,
                              const files::GgufType* type,
                              absl::string_view otherwise);

// Makes the blocks of a tensor, on all cores. The same bytes, and the same
// metrics, on any number of them. `metrics` gets the errors of what the blocks
// decode to: count, means and maxima of absolute errors, and the SQNR.
// `importance`  how much squared errors in each column count in the search: one
//               number for each, at least 0 and finite, of which only the
//               ratios within a block count. Within a block none counts less
//               than a millionth of another. Empty: all count the same.
// `coarse_scale_count`  gets the number of blocks, not all 0, whose elements
//               are so small that float16 has few numbers for their d; null:
//               not counted.
// Requires: FindGgufEncoder(type); elements of floats, in rows of whole blocks.
// Errors: ARGUMENT_INVALID for an element that is not finite, or above
// GgufEncoder::most_element in magnitude.
absl::StatusOr<std::vector<uint8_t>> MakeGgufBlocks(
    const files::FileTensor& tensor, const files::GgufType& type,
    v1::ErrorMetrics* metrics, absl::Span<const double> importance = {},
    uint64_t* coarse_scale_count = nullptr);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_GGUF_BLOCKS_H_
