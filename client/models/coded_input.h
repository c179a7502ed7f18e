// Inputs that other programs quantized, as the floats that they stand for.

#ifndef QUANTD_CLIENT_MODELS_CODED_INPUT_H_
#define QUANTD_CLIENT_MODELS_CODED_INPUT_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/files/coded_tensor.h"
#include "client/models/tensor_input.h"

namespace quantd {

// The metadata of a file without what quantctl says there of codes.
std::map<std::string, std::string> PlainMetadata(const TensorInput& input);

// All tensors of a compressed-tensors model, or of one of the layouts of
// quantized_checkpoint.h; empty where there are none. `path` is what the input
// was opened as.
// Errors: of ReadCompressed and ReadCheckpoint.
absl::StatusOr<std::vector<files::CodedTensor>> ReadCoded(
    const TensorInput& input, const std::string& path);

// The tensors that ReadCoded found, and the files that they point into.
// Immutable.
struct CodedInput {
  std::shared_ptr<const TensorInput> input;
  std::vector<files::CodedTensor> tensors;
};

// The notes on them, for people: "tensor NAME: ...".
std::vector<std::string> NotesOf(const CodedInput& coded);

// Opens the path for ReadCoded.
// Errors: of TensorInput::Open and ReadCoded.
absl::StatusOr<CodedInput> OpenCoded(const std::string& path);

// The tensors of a file, or of all files, as they would lie in the file that
// `quantctl dequantize` makes of it: with floats in place of the codes that are
// in `input`. Floats are made when they are held.
TensorInput Decoded(TensorInput input, const CodedInput& coded);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_CODED_INPUT_H_
