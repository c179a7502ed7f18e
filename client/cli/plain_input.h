// Refuses inputs that somebody has quantized already.

#ifndef QUANTD_CLIENT_CLI_PLAIN_INPUT_H_
#define QUANTD_CLIENT_CLI_PLAIN_INPUT_H_

#include <string>

#include "absl/status/status.h"
#include "client/models/tensor_input.h"

namespace quantd::cli {

// Whether the input has plain tensors alone; what somebody has quantized is not
// to be quantized again, scales and all. `path` is what the input was opened
// as.
// Errors: FILE_UNSUPPORTED, with what to do.
absl::Status CheckPlain(const TensorInput& input, const std::string& path);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_PLAIN_INPUT_H_
