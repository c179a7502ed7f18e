#include "client/models/coded_input.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/files/lazy_bytes.h"
#include "client/files/safetensors.h"
#include "client/models/compressed_reader.h"
#include "client/models/plain_input.h"
#include "client/models/quantized_checkpoint.h"
#include "client/models/quantized_layout.h"

namespace quantd {

std::map<std::string, std::string> PlainMetadata(const TensorInput& input) {
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : input.metadata()) {
    if (!absl::StartsWith(key, kQuantizedKeyPrefix) &&
        !absl::StartsWith(key, "quantctl.")) {
      metadata[key] = value;
    }
  }
  return metadata;
}

absl::StatusOr<std::vector<files::CodedTensor>> ReadCoded(
    const TensorInput& input, const std::string& path) {
  const absl::StatusOr<std::string> method = QuantizationMethod(path);
  if (!method.ok()) return method.status();
  if (*method != kCompressedMethod) return ReadCheckpoint(input, path);
  const absl::StatusOr<std::vector<QuantizedTensor>> quantized =
      ReadCompressed(input, path);
  if (!quantized.ok()) return quantized.status();
  std::vector<files::CodedTensor> tensors;
  for (const QuantizedTensor& tensor : *quantized) {
    absl::StatusOr<files::CodedTensor> coded = CodedTensorOf(tensor, path);
    if (!coded.ok()) return coded.status();
    tensors.push_back(*std::move(coded));
  }
  return tensors;
}

absl::StatusOr<CodedInput> OpenCoded(const std::string& path) {
  absl::StatusOr<TensorInput> input = TensorInput::Open(path);
  if (!input.ok()) return input.status();
  CodedInput coded;
  coded.input = std::make_shared<const TensorInput>(*std::move(input));
  absl::StatusOr<std::vector<files::CodedTensor>> tensors =
      ReadCoded(*coded.input, path);
  if (!tensors.ok()) return tensors.status();
  coded.tensors = *std::move(tensors);
  return coded;
}

std::vector<std::string> NotesOf(const CodedInput& coded) {
  std::vector<std::string> notes;
  for (const files::CodedTensor& tensor : coded.tensors) {
    if (tensor.note.empty()) continue;
    notes.push_back(absl::StrCat("tensor ", tensor.name, ": ", tensor.note));
  }
  return notes;
}

TensorInput Decoded(TensorInput input, const CodedInput& coded) {
  std::vector<std::string> parts;
  std::vector<files::FileTensor> floats;
  for (const files::CodedTensor& tensor : coded.tensors) {
    parts.insert(parts.end(), tensor.parts.begin(), tensor.parts.end());
    if (input.Find(tensor.parts[0]) == nullptr) continue;
    files::FileTensor decoded = {tensor.name, tensor.dtype, tensor.shape, {}};
    const size_t size_bytes =
        static_cast<size_t>(tensor.row_count() * tensor.row_bytes());
    if (size_bytes > 0) {
      decoded.lazy = std::make_shared<files::LazyBytes>(
          size_bytes, [tensor, file = coded.input](absl::Span<uint8_t> out) {
            tensor.DecodeRows(0, tensor.row_count(), out);
          });
      decoded.data = decoded.lazy->span();
    }
    floats.push_back(std::move(decoded));
  }
  input.Replace(parts, std::move(floats), PlainMetadata(input));
  return input;
}

}  // namespace quantd
