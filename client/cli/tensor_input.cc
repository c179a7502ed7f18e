#include "client/cli/tensor_input.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "client/cli/spec_syntax.h"
#include "client/cpp/tensor.h"
#include "client/files/dtype.h"
#include "client/files/npy.h"
#include "client/files/safetensors.h"

namespace quantd::cli {

bool IsNpyPath(absl::string_view path) {
  return absl::EndsWithIgnoreCase(path, ".npy");
}

std::string FileStem(absl::string_view path) {
  const size_t slash = path.rfind('/');
  if (slash != absl::string_view::npos) path.remove_prefix(slash + 1);
  const size_t dot = path.rfind('.');
  if (dot != absl::string_view::npos && dot > 0) path = path.substr(0, dot);
  return std::string(path);
}

absl::StatusOr<TensorInput> TensorInput::Open(const std::string& path) {
  if (IsNpyPath(path)) {
    absl::StatusOr<files::NpyReader> reader = files::NpyReader::Open(path);
    if (!reader.ok()) return reader.status();
    const files::FileTensor tensor = {FileStem(path), reader->dtype(),
                                      reader->shape(), reader->data()};
    TensorInput input(*std::move(reader));
    input.tensors_.push_back(tensor);
    return input;
  }
  absl::StatusOr<files::SafetensorsReader> reader =
      files::SafetensorsReader::Open(path);
  if (!reader.ok()) return reader.status();
  TensorInput input(*std::move(reader));
  const auto& file = std::get<files::SafetensorsReader>(input.file_);
  input.tensors_ = file.tensors();
  input.metadata_ = file.metadata();
  return input;
}

const files::FileTensor* TensorInput::Find(absl::string_view name) const {
  if (const auto* file = std::get_if<files::SafetensorsReader>(&file_)) {
    return file->Find(name);
  }
  return tensors_[0].name == name ? &tensors_[0] : nullptr;
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

void TensorFilter::AddOptions(CLI::App* command) {
  command
      ->add_option("--include", include,
                   "Only tensors whose name matches this pattern (* and ?); "
                   "may be repeated")
      ->allow_extra_args(false)
      ->type_name("PATTERN");
  command
      ->add_option("--exclude", exclude,
                   "Not tensors whose name matches this pattern; may be "
                   "repeated")
      ->allow_extra_args(false)
      ->type_name("PATTERN");
  command
      ->add_option("--min-rank", min_rank,
                   "Only tensors of at least that many dimensions")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N")
      ->capture_default_str();
  command->add_flag("--all", all, "Tensors of any rank");
}

bool TensorFilter::Takes(const files::FileTensor& tensor) const {
  if (!ElementTypeOf(tensor.dtype).has_value()) return false;
  if (!all && static_cast<int64_t>(tensor.shape.size()) < min_rank) {
    return false;
  }
  const auto matches = [&tensor](const std::string& pattern) {
    return MatchesGlob(pattern, tensor.name);
  };
  if (!include.empty() &&
      std::none_of(include.begin(), include.end(), matches)) {
    return false;
  }
  return std::none_of(exclude.begin(), exclude.end(), matches);
}

void NameOptions::AddOptions(CLI::App* command, bool required) {
  CLI::Option* const option =
      command
          ->add_option("--model", model,
                       required ? "Model"
                                : "Model to keep encodings under; default the "
                                  "file's name without extension")
          ->type_name("NAME");
  if (required) option->required();
  command->add_option("--revision", revision, "Revision of the model")
      ->type_name("NAME")
      ->capture_default_str();
}

TensorName NameOptions::NameOf(const std::string& tensor) const {
  TensorName name;
  name.set_model(model);
  name.set_revision(revision);
  name.set_tensor(tensor);
  return name;
}

void SpecOptions::AddOptions(CLI::App* command) {
  command->add_option("--format", format, "int2 to int16, uint2 to uint16")
      ->type_name("FORMAT")
      ->capture_default_str();
  CLI::Option* const option =
      command
          ->add_option("--granularity", granularity,
                       "per-tensor, per-channel (axis 0), per-channel:AXIS or "
                       "group:N (along the last axis); tensors of rank below "
                       "2 are per tensor")
          ->type_name("GRANULARITY")
          ->capture_default_str();
  command
      ->add_option("--block-size", block_size,
                   "A number per dimension instead, 0 for the whole "
                   "dimension, e.g. 1,0,32")
      ->type_name("N,N,...")
      ->excludes(option);
  command
      ->add_option("--symmetry", symmetry,
                   "default (strict for signed formats, asymmetric for "
                   "unsigned ones), asymmetric, strict, full-range, half-step")
      ->type_name("SYMMETRY")
      ->capture_default_str();
}

absl::StatusOr<SpecTemplate> SpecOptions::Parse() const {
  SpecTemplate spec;
  const absl::StatusOr<v1::NumberFormat> parsed_format = ParseFormat(format);
  if (!parsed_format.ok()) return parsed_format.status();
  spec.format = *parsed_format;
  const absl::StatusOr<Granularity> parsed_granularity =
      block_size.empty() ? ParseGranularity(granularity)
                         : ParseBlockSize(block_size);
  if (!parsed_granularity.ok()) return parsed_granularity.status();
  spec.granularity = *parsed_granularity;
  const absl::StatusOr<v1::Symmetry> parsed_symmetry = ParseSymmetry(symmetry);
  if (!parsed_symmetry.ok()) return parsed_symmetry.status();
  spec.symmetry = *parsed_symmetry;
  return spec;
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

}  // namespace quantd::cli
