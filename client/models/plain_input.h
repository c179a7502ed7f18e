// Refuses inputs that somebody has quantized already.

#ifndef QUANTD_CLIENT_MODELS_PLAIN_INPUT_H_
#define QUANTD_CLIENT_MODELS_PLAIN_INPUT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/files/safetensors.h"
#include "client/models/tensor_input.h"

namespace quantd {

// The name of compressed-tensors in config.json.
constexpr char kCompressedMethod[] = "compressed-tensors";

// The quantization method of a model, from config.json, quantize_config.json,
// quant_config.json or hf_quant_config.json in its folder, or beside a file;
// empty where they say nothing.
// Errors: of ReadConfig.
absl::StatusOr<std::string> QuantizationMethod(const std::string& path);

// The tensor that holds codes, or what lies beside codes, in the layouts of
// others; null where there is none.
const files::FileTensor* FindCodes(const TensorInput& input);

// Checks that the input has plain tensors alone; a quantized input is not to be
// quantized again, scales and all. `path` is what the input was opened as.
// Errors: FILE_UNSUPPORTED, with what to do: `more` says what the command has
// for it; those of ReadConfig.
absl::Status CheckPlain(const TensorInput& input, const std::string& path,
                        absl::string_view more = "");
// Like CheckPlain, by the tensors alone.
absl::Status CheckNoCodes(const TensorInput& input, const std::string& path,
                          absl::string_view more = "");

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_PLAIN_INPUT_H_
