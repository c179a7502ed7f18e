// Reads compressed-tensors models.

#ifndef QUANTD_CLIENT_MODELS_COMPRESSED_READER_H_
#define QUANTD_CLIENT_MODELS_COMPRESSED_READER_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/models/quantized_layout.h"
#include "client/models/tensor_input.h"

namespace quantd {

// Reads all quantized tensors of a model. Empty where the folder has no
// config.json of compressed-tensors. A tensor has the element type that it came
// from, as the file, its scales or config.json tell it; otherwise float32.
// Errors: FILE_MALFORMED, FILE_UNSUPPORTED.
absl::StatusOr<std::vector<QuantizedTensor>> ReadCompressed(
    const TensorInput& input, const std::string& path);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_COMPRESSED_READER_H_
