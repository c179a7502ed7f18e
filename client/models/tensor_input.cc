#include "client/models/tensor_input.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cpp/tensor.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/gguf.h"
#include "client/files/npy.h"
#include "client/files/onnx_tensors.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"

namespace quantd {

bool IsNpyPath(absl::string_view path) {
  return absl::EndsWithIgnoreCase(path, ".npy");
}

bool IsGgufPath(absl::string_view path) {
  return absl::EndsWithIgnoreCase(path, ".gguf");
}

bool IsOnnxPath(absl::string_view path) {
  return absl::EndsWithIgnoreCase(path, ".onnx");
}

std::string FileStem(absl::string_view path) {
  while (absl::ConsumeSuffix(&path, "/")) {
  }
  const size_t slash = path.rfind('/');
  if (slash != absl::string_view::npos) path.remove_prefix(slash + 1);
  const size_t dot = path.rfind('.');
  if (dot != absl::string_view::npos && dot > 0) path = path.substr(0, dot);
  return std::string(path);
}

absl::StatusOr<TensorInput> TensorInput::Open(const std::string& path) {
  TensorInput input;
  input.paths_.push_back(path);
  if (IsNpyPath(path)) {
    absl::StatusOr<files::NpyReader> reader = files::NpyReader::Open(path);
    if (!reader.ok()) return reader.status();
    input.tensors_.push_back(
        {FileStem(path), reader->dtype(), reader->shape(), reader->data()});
    input.index_[input.tensors_[0].name] = 0;
    input.files_.emplace_back(*std::move(reader));
    return input;
  }
  if (!files::IsFolder(path)) {
    absl::Status status = IsGgufPath(path)   ? input.AddGguf(path)
                          : IsOnnxPath(path) ? input.AddOnnx(path)
                                             : input.Add(path);
    if (!status.ok()) return status;
    return input;
  }
  const absl::StatusOr<files::ShardIndex> shards = files::ReadShardIndex(path);
  if (!shards.ok()) return shards.status();
  input.paths_.push_back(files::PathIn(path, files::kShardIndexName));
  for (const std::string& shard : shards->shards) {
    input.paths_.push_back(files::PathIn(path, shard));
    absl::Status status = input.Add(input.paths_.back());
    if (!status.ok()) return status;
  }
  for (const auto& [tensor, shard] : shards->weight_map) {
    if (input.Find(tensor) != nullptr) continue;
    return files::FileMalformedError(
        path, absl::StrCat("the index has tensor \"", tensor, "\" in ", shard,
                           ", where it is not"));
  }
  return input;
}

absl::Status TensorInput::Add(const std::string& path) {
  absl::StatusOr<files::SafetensorsReader> reader =
      files::SafetensorsReader::Open(path);
  if (!reader.ok()) {
    if (!absl::IsInvalidArgument(reader.status()) ||
        absl::EndsWithIgnoreCase(path, ".safetensors")) {
      return reader.status();
    }
    return files::FileMalformedError(
        path,
        "expected a safetensors file; .npy, .gguf and .onnx files are known "
        "by their names");
  }
  for (const files::FileTensor& tensor : reader->tensors()) {
    if (!index_.emplace(tensor.name, tensors_.size()).second) {
      return files::FileMalformedError(
          path,
          absl::StrCat("tensor \"", tensor.name, "\" is in another file too"));
    }
    tensors_.push_back(tensor);
  }
  metadata_.insert(reader->metadata().begin(), reader->metadata().end());
  files_.emplace_back(*std::move(reader));
  return absl::OkStatus();
}

absl::Status TensorInput::AddGguf(const std::string& path) {
  absl::StatusOr<files::GgufReader> reader = files::GgufReader::Open(path);
  if (!reader.ok()) return reader.status();
  const absl::Status status = reader->CheckWhole(path);
  if (!status.ok()) return status;
  for (const files::GgufTensor& tensor : reader->tensors()) {
    if (tensor.type == nullptr) {
      unread_.push_back({tensor.name, std::string(files::kTypeNotKnown)});
      continue;
    }
    files::FileTensor added = {tensor.name,
                               tensor.type->dtype.value_or(files::Dtype::kF32),
                               tensor.shape, tensor.data};
    if (!tensor.type->IsPlain()) {
      blocks_[tensor.name] = tensor;
      dequantized_.push_back(files::DequantizeGguf(tensor));
      const std::vector<float>& elements = dequantized_.back();
      added.data = {reinterpret_cast<const uint8_t*>(elements.data()),
                    elements.size() * sizeof(float)};
    }
    tensors_.push_back(std::move(added));
  }
  // Puts them in the order of the file that `quantctl dequantize` makes of
  // them.
  Sort();
  files_.emplace_back(*std::move(reader));
  return absl::OkStatus();
}

absl::Status TensorInput::AddOnnx(const std::string& path) {
  absl::StatusOr<files::OnnxTensors> model = files::OnnxTensors::Open(path);
  if (!model.ok()) return model.status();
  tensors_ = model->tensors();
  for (size_t i = 0; i < tensors_.size(); ++i) index_[tensors_[i].name] = i;
  unread_ = model->unread();
  unread_.insert(unread_.end(), model->elsewhere().begin(),
                 model->elsewhere().end());
  onnx_codes_ = model->codes();
  onnx_cast_codes_ = model->cast_codes();
  paths_.insert(paths_.end(), model->data_paths().begin(),
                model->data_paths().end());
  files_.emplace_back(*std::move(model));
  return absl::OkStatus();
}

void TensorInput::Replace(const std::vector<std::string>& names,
                          std::vector<files::FileTensor> tensors,
                          std::map<std::string, std::string> metadata) {
  const absl::flat_hash_set<std::string> gone(names.begin(), names.end());
  for (files::FileTensor& tensor : tensors_) {
    if (!gone.contains(tensor.name)) tensors.push_back(std::move(tensor));
  }
  tensors_ = std::move(tensors);
  metadata_ = std::move(metadata);
  Sort();
}

void TensorInput::Sort() {
  std::stable_sort(tensors_.begin(), tensors_.end(),
                   [](const files::FileTensor& a, const files::FileTensor& b) {
                     return DtypeSizeBytes(a.dtype) > DtypeSizeBytes(b.dtype);
                   });
  index_.clear();
  for (size_t i = 0; i < tensors_.size(); ++i) index_[tensors_[i].name] = i;
}

const files::FileTensor* TensorInput::Find(absl::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const files::GgufReader* TensorInput::gguf() const {
  return files_.empty() ? nullptr : std::get_if<files::GgufReader>(&files_[0]);
}

std::optional<ElementType> ElementTypeOf(files::Dtype dtype) {
  switch (dtype) {
    case files::Dtype::kF32:
      return ElementType::kFloat32;
    case files::Dtype::kF16:
      return ElementType::kFloat16;
    case files::Dtype::kBF16:
      return ElementType::kBfloat16;
    case files::Dtype::kF64:
      return ElementType::kFloat64;
    default:
      return std::nullopt;
  }
}

files::Dtype DtypeOf(ElementType type) {
  switch (type) {
    case ElementType::kFloat16:
      return files::Dtype::kF16;
    case ElementType::kBfloat16:
      return files::Dtype::kBF16;
    case ElementType::kFloat64:
      return files::Dtype::kF64;
    case ElementType::kFloat32:
      break;
  }
  return files::Dtype::kF32;
}

Tensor MakeTensor(const files::FileTensor& tensor, TensorName name) {
  Tensor result;
  result.name = std::move(name);
  result.element_type =
      ElementTypeOf(tensor.dtype).value_or(ElementType::kFloat32);
  result.shape = tensor.shape;
  result.data = tensor.data;
  return result;
}

}  // namespace quantd
