#include "client/jobs/stored_inputs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cpp/errors.h"
#include "client/cpp/tensor.h"
#include "client/cpp/text_file.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/models/text.h"
#include "client/models/tie_groups.h"
#include "nlohmann/json.hpp"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd::jobs {
namespace {

constexpr absl::string_view kWeight = ".weight";
constexpr absl::string_view kInputSuffix = ".input";

// True if a weight may have the tensor as its inputs.
bool MayBeInputs(const std::string& tensor,
                 const std::map<std::string, std::string>& map) {
  return tensor == "input" || absl::EndsWith(tensor, kInputSuffix) ||
         std::any_of(map.begin(), map.end(), [&tensor](const auto& entry) {
           return entry.second == tensor;
         });
}

// Errors: of the client.
absl::StatusOr<bool> HasMoments(const InputsOptions& options,
                                const std::string& tensor, Client* client) {
  TensorName name;
  name.set_model(options.model);
  name.set_revision(options.revision);
  name.set_tensor(tensor);
  const absl::StatusOr<v1::GetStatisticsResponse> stored =
      client->GetStatistics(name, /*with_state=*/false, /*per_tensor=*/false,
                            /*with_moments=*/true);
  if (!stored.ok()) return stored.status();
  return stored->has_moments();
}

}  // namespace

void InputsOptions::Resolve() {
  const size_t at = text.rfind('@');
  model = text.substr(0, at);
  revision = at == std::string::npos ? "main" : text.substr(at + 1);
}

absl::StatusOr<std::map<std::string, std::string>> ReadInputsMap(
    const std::string& path) {
  std::map<std::string, std::string> map;
  if (path.empty()) return map;
  const absl::StatusOr<std::string> text = internal::ReadDocument(path);
  if (!text.ok()) return text.status();
  const files::Json json = files::ParseJson(*text);
  bool is_sound = json.is_object();
  for (const auto& [weight, inputs] : json.items()) {
    is_sound = is_sound && inputs.is_string();
    if (is_sound) map[weight] = inputs.get<std::string>();
  }
  if (!is_sound) {
    return files::FileMalformedError(
        path, "expected a JSON object of weights and names of inputs");
  }
  return map;
}

absl::StatusOr<std::map<std::string, double>> ReadOutputWeights(
    const std::string& path) {
  const absl::StatusOr<std::string> text = internal::ReadDocument(path);
  if (!text.ok()) return text.status();
  const files::Json json = files::ParseJson(*text);
  std::map<std::string, double> weights;
  bool is_sound = json.is_object();
  for (const auto& [weight, value] : json.items()) {
    is_sound = is_sound && value.is_number() && value.get<double>() >= 0 &&
               std::isfinite(value.get<double>());
    if (is_sound) weights[weight] = value.get<double>();
  }
  if (!is_sound) {
    return files::FileMalformedError(
        path,
        "expected a JSON object of weights and finite numbers of at least 0");
  }
  return weights;
}

absl::StatusOr<StoredInputs> StoredInputs::Read(const InputsOptions& options,
                                                Need need, Client* client) {
  StoredInputs stored;
  absl::StatusOr<std::map<std::string, std::string>> map =
      ReadInputsMap(options.map);
  if (!map.ok()) return map.status();
  stored.map_ = *std::move(map);
  const absl::StatusOr<std::vector<v1::StatisticsEntry>> entries =
      client->ListStatistics(options.model, options.revision);
  if (!entries.ok()) return entries.status();
  for (const v1::StatisticsEntry& entry : *entries) {
    stored.states_[entry.tensor()] = absl::StrCat(
        entry.source_count(), " ", entry.size_bytes(), " ",
        entry.update_time().seconds(), " ", entry.update_time().nanos());
    absl::StatusOr<bool> is_usable = entry.gram_size_bytes() > 0;
    if (!*is_usable && need == Need::kMoments &&
        MayBeInputs(entry.tensor(), stored.map_)) {
      is_usable = HasMoments(options, entry.tensor(), client);
    }
    if (!is_usable.ok()) return is_usable.status();
    if (*is_usable) stored.usable_.insert(entry.tensor());
  }
  for (const std::string& text : DefaultTies()) {
    stored.patterns_.push_back(*TiePattern::Parse(text));
  }
  for (const std::string& inputs : stored.usable_) {
    absl::string_view module = inputs;
    if (!absl::ConsumeSuffix(&module, kInputSuffix)) continue;
    const std::string label = stored.LabelOf(absl::StrCat(module, kWeight));
    if (!label.empty()) stored.fused_[label].push_back(inputs);
  }
  return stored;
}

std::string StoredInputs::Of(const std::string& tensor) const {
  const auto mapped = map_.find(tensor);
  if (mapped != map_.end()) return Has(mapped->second) ? mapped->second : "";
  absl::string_view module = tensor;
  if (!absl::ConsumeSuffix(&module, kWeight)) {
    // The weight of a module without a name.
    return tensor == "weight" && Has("input") ? "input" : "";
  }
  std::string own = absl::StrCat(module, kInputSuffix);
  if (Has(own)) return own;
  const auto fused = fused_.find(LabelOf(tensor));
  return fused != fused_.end() && fused->second.size() == 1 ? fused->second[0]
                                                            : "";
}

std::string StoredInputs::StateOf(const std::string& inputs) const {
  const auto found = states_.find(inputs);
  return found == states_.end() ? "" : found->second;
}

std::string StoredInputs::LabelOf(const std::string& tensor) const {
  for (const TiePattern& pattern : patterns_) {
    std::optional<std::string> label = pattern.LabelOf(tensor);
    if (label.has_value()) return *std::move(label);
  }
  return "";
}

absl::Status NoInputsError(const InputsOptions& options,
                           StoredInputs::Need need) {
  const bool is_gram = need == StoredInputs::Need::kGram;
  return ArgumentInvalidError(absl::StrCat(
      "expected ", is_gram ? "" : "moments or ",
      "Gram matrices of inputs in model \"", options.model, "\", revision ",
      options.revision, ", got none for the tensors; quantctl calibrate ",
      is_gram ? "--gram" : "--moments or --gram",
      " and quantd.torch.calibrate with features=\"gram\" store them"));
}

double OutputSqnrDb(const v1::OutputNoise& noise) {
  return -10 * std::log10(noise.noise_to_signal());
}

std::string ClippedInputsText(const std::string& tensor,
                              const v1::OutputNoise& noise) {
  if (noise.clipped_input_count() == 0) return "";
  return absl::StrCat(
      "tensor ", tensor,
      " has inputs that are larger than its Gram matrix holds, and count as "
      "smaller: ",
      CountText(noise.clipped_input_count()),
      "; contribute again, with inputs like all of them first");
}

}  // namespace quantd::jobs
