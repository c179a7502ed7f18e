// Reads one quantized module of a compressed-tensors model.

#ifndef QUANTD_CLIENT_MODELS_COMPRESSED_MODULE_H_
#define QUANTD_CLIENT_MODELS_COMPRESSED_MODULE_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/files/json.h"
#include "client/models/quantized_layout.h"
#include "client/models/tensor_input.h"

namespace quantd {

// The weight of a module by its "weights" of config.json, which is null where
// no group targets it. `path` is what the input was opened as, for errors.
// Requires: the input has "MODULE.weight_scale".
// Errors: FILE_MALFORMED, FILE_UNSUPPORTED.
absl::StatusOr<QuantizedTensor> ReadCompressedModule(const TensorInput& input,
                                                     const std::string& path,
                                                     const std::string& module,
                                                     const files::Json* scheme);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_COMPRESSED_MODULE_H_
