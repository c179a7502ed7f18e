#include "client/models/compressed_place.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/files/errors.h"
#include "client/models/compressed_model.h"
#include "client/models/compressed_tensors.h"
#include "nlohmann/json.hpp"

namespace quantd {

absl::StatusOr<std::unique_ptr<CompressedPlace>> CompressedPlace::Reserve(
    uint64_t order, const files::FileTensor& tensor, const Encoding& expected,
    bool packs_all, const ModuleInputs& inputs,
    files::SafetensorsBuilder* builder) {
  auto place = absl::WrapUnique(
      new CompressedPlace(order, tensor, packs_all, inputs, builder));
  absl::StatusOr<CompressedPlan> plan =
      place->model_.PlanOf(tensor.name, tensor.shape, expected);
  if (!plan.ok()) return place;
  for (const CompressedData& data : inputs.parts) {
    plan->parts.push_back(data.part);
  }
  for (const CompressedPart& part : plan->parts) {
    const absl::StatusOr<size_t> index =
        builder->Reserve(order, part.name, part.dtype, part.shape);
    if (!index.ok()) return index.status();
    place->indices_.push_back(*index);
  }
  place->plan_ = *std::move(plan);
  return place;
}

absl::StatusOr<uint64_t> CompressedPlace::Finish(const QuantizeResult& result) {
  absl::StatusOr<uint64_t> size =
      model_.Write(tensor_.name, tensor_.shape, result.header.encoding(),
                   result.scales.view(), result.codes,
                   [this](const std::string& name, files::Dtype dtype,
                          const std::vector<int64_t>& shape,
                          absl::Span<const uint8_t> data) {
                     return AddPart(name, dtype, shape, data);
                   });
  if (!size.ok()) return size;
  for (const auto& [part, data] : inputs_.parts) {
    const absl::Status status =
        AddPart(part.name, part.dtype, part.shape, data);
    if (!status.ok()) return status;
    *size += data.size();
  }
  Drop();
  return size;
}

absl::Status CompressedPlace::CopyFrom(const files::SafetensorsReader& reader,
                                       const std::string& path,
                                       const files::Json& modules) {
  const std::string module(ModuleOf(tensor_.name));
  if (!modules.contains(module)) {
    return files::FileMalformedError(
        path, absl::StrCat("expected the scheme of ", module));
  }
  model_.Restore({{module, modules.at(module)}});
  for (const files::FileTensor& part : reader.tensors()) {
    absl::string_view rest = part.name;
    const bool is_weight = absl::ConsumePrefix(&rest, tensor_.name) &&
                           (rest.empty() || rest[0] == '_');
    const bool is_input =
        std::any_of(inputs_.parts.begin(), inputs_.parts.end(),
                    [&part](const CompressedData& data) {
                      return data.part.name == part.name;
                    });
    if (!is_weight && !is_input) continue;
    const absl::Status status =
        AddPart(part.name, part.dtype, part.shape, part.data);
    if (!status.ok()) return status;
  }
  Drop();
  return absl::OkStatus();
}

void CompressedPlace::Drop() {
  for (const size_t index : indices_) builder_->Drop(index);
  indices_.clear();
  plan_.parts.clear();
}

absl::Status CompressedPlace::AddPart(const std::string& name,
                                      files::Dtype dtype,
                                      const std::vector<int64_t>& shape,
                                      absl::Span<const uint8_t> data) {
  std::vector<CompressedPart>& parts = plan_.parts;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].name != name) continue;
    const size_t index = indices_[i];
    const bool fits = parts[i].dtype == dtype && parts[i].shape == shape;
    parts.erase(parts.begin() + static_cast<ptrdiff_t>(i));
    indices_.erase(indices_.begin() + static_cast<ptrdiff_t>(i));
    if (fits) return builder_->Write(index, 0, data);
    builder_->Drop(index);
    break;
  }
  return builder_->Add(order_, name, dtype, shape, data);
}

}  // namespace quantd
