#include "client/cli/quantize_rounding.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cli/quantize_outcome.h"
#include "client/cli/session.h"
#include "client/cpp/errors.h"
#include "client/cpp/text_file.h"
#include "client/files/errors.h"
#include "client/files/safetensors.h"
#include "client/models/tie_groups.h"
#include "nlohmann/json.hpp"
#include "quantd/v1/encoding_service.pb.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::cli {
namespace {

constexpr absl::string_view kWeight = ".weight";

// The file of --inputs-map: an object of weights and the names of their inputs.
absl::StatusOr<std::map<std::string, std::string>> ReadMap(
    const std::string& path) {
  std::map<std::string, std::string> map;
  if (path.empty()) return map;
  const absl::StatusOr<std::string> text = internal::ReadDocument(path);
  if (!text.ok()) return text.status();
  const Json json = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
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

// Where the inputs of weights are.
class StoredInputs {
 public:
  // `entries`  all of the model.
  StoredInputs(std::map<std::string, std::string> map,
               const std::vector<v1::StatisticsEntry>& entries)
      : map_(std::move(map)) {
    for (const v1::StatisticsEntry& entry : entries) {
      if (entry.gram_size_bytes() == 0) continue;
      states_[entry.tensor()] = absl::StrCat(
          entry.source_count(), " ", entry.size_bytes(), " ",
          entry.update_time().seconds(), " ", entry.update_time().nanos());
    }
    for (const std::string& text : DefaultTies()) {
      patterns_.push_back(*TiePattern::Parse(text));
    }
    for (const auto& [inputs, state] : states_) {
      absl::string_view module = inputs;
      if (!absl::ConsumeSuffix(&module, ".input")) continue;
      const std::string label = LabelOf(absl::StrCat(module, kWeight));
      if (!label.empty()) fused_[label].push_back(inputs);
    }
  }

  // Empty where there are none. Inputs that a layer shares with those that it
  // is fused with lie under the name of one of them.
  std::string Of(const std::string& tensor) const {
    const auto mapped = map_.find(tensor);
    if (mapped != map_.end()) return Has(mapped->second) ? mapped->second : "";
    absl::string_view module = tensor;
    if (!absl::ConsumeSuffix(&module, kWeight)) {
      // Of a module without a name.
      return tensor == "weight" && Has("input") ? "input" : "";
    }
    std::string own = absl::StrCat(module, ".input");
    if (Has(own)) return own;
    const auto fused = fused_.find(LabelOf(tensor));
    return fused != fused_.end() && fused->second.size() == 1 ? fused->second[0]
                                                              : "";
  }

  // Tells the statistics from those of another time.
  const std::string& StateOf(const std::string& inputs) const {
    return states_.at(inputs);
  }

 private:
  bool Has(const std::string& inputs) const {
    return states_.find(inputs) != states_.end();
  }

  std::string LabelOf(const std::string& tensor) const {
    for (const TiePattern& pattern : patterns_) {
      std::optional<std::string> label = pattern.LabelOf(tensor);
      if (label.has_value()) return *std::move(label);
    }
    return "";
  }

  const std::map<std::string, std::string> map_;
  std::map<std::string, std::string> states_;
  std::vector<TiePattern> patterns_;
  // Names of inputs by label.
  std::map<std::string, std::vector<std::string>> fused_;
};

v1::ColumnOrder ColumnOrderOf(absl::string_view text) {
  v1::ColumnOrder order = v1::COLUMN_ORDER_UNSPECIFIED;
  v1::ColumnOrder_Parse(
      absl::StrCat("COLUMN_ORDER_", absl::AsciiStrToUpper(text)), &order);
  return order;
}

v1::Rounding MakeRounding(const RoundingOptions& options,
                          const std::string& inputs) {
  v1::Rounding rounding;
  rounding.set_method(v1::ROUNDING_METHOD_COMPENSATED);
  rounding.mutable_inputs()->set_model(options.model);
  rounding.mutable_inputs()->set_revision(options.revision);
  rounding.mutable_inputs()->set_tensor(inputs);
  if (options.damping.has_value()) rounding.set_damping(*options.damping);
  rounding.set_column_order(ColumnOrderOf(options.column_order));
  return rounding;
}

}  // namespace

void AddRoundingOptions(Command* command, RoundingOptions* options) {
  command
      ->AddOption("--rounding", &options->method, "",
                  "To the nearest code, or compensated: each column of a "
                  "weight makes up for the errors of those before it (GPTQ), "
                  "with the Gram matrix of its layer's inputs. Tensors without "
                  "one go to the nearest, and are told")
      ->OneOf({"nearest", "compensated"})
      ->ShowDefault();
  command->AddOption(
      "--inputs", &options->inputs, "MODEL[@REVISION]",
      "Where the Gram matrices are: for MODULE.weight under MODULE.input, or "
      "under that of a layer that runtimes fuse with it. By default --model");
  command->AddOption("--inputs-map", &options->map, "FILE",
                     "JSON object that says of weights under which name their "
                     "inputs are");
  command->AddOption("--damping", &options->damping, "FRACTION",
                     "What is added to the diagonal of a Gram matrix, of its "
                     "mean; default 0.01");
  command
      ->AddOption("--column-order", &options->column_order, "",
                  "Columns by falling power of their input, or as they are; "
                  "default activation")
      ->OneOf({"activation", "natural"});
}

absl::Status CheckRounding(bool has_model, QuantizeOptions* options) {
  RoundingOptions& rounding = options->rounding;
  if (!rounding.IsCompensated()) {
    if (rounding.inputs.empty() && rounding.map.empty() &&
        !rounding.damping.has_value() && rounding.column_order.empty()) {
      return absl::OkStatus();
    }
    return ArgumentInvalidError(
        "expected --inputs, --inputs-map, --damping and --column-order with "
        "--rounding compensated");
  }
  if (rounding.damping.has_value() &&
      !(*rounding.damping >= 0 && std::isfinite(*rounding.damping))) {
    return ArgumentInvalidError("expected --damping of at least 0");
  }
  if (options->evaluate) {
    return ArgumentInvalidError(
        "expected --rounding compensated without --evaluate, which measures "
        "rounding to the nearest; `quantctl dequantize` and `quantctl evaluate "
        "--reference` measure the output");
  }
  rounding.model = options->name.model;
  rounding.revision = options->name.revision;
  if (!rounding.inputs.empty()) {
    const size_t at = rounding.inputs.rfind('@');
    rounding.model = rounding.inputs.substr(0, at);
    rounding.revision =
        at == std::string::npos ? "main" : rounding.inputs.substr(at + 1);
  } else if (!has_model) {
    return ArgumentInvalidError(
        "expected --inputs or --model with --rounding compensated: where the "
        "Gram matrices are");
  }
  return absl::OkStatus();
}

absl::Status FindRoundings(
    const QuantizeOptions& options, Client* client,
    absl::FunctionRef<bool(const std::string& tensor)> is_named,
    QuantizePlan* plan) {
  if (!options.rounding.IsCompensated()) return absl::OkStatus();
  absl::StatusOr<std::map<std::string, std::string>> map =
      ReadMap(options.rounding.map);
  if (!map.ok()) return map.status();
  const absl::StatusOr<std::vector<v1::StatisticsEntry>> entries =
      client->ListStatistics(options.rounding.model, options.rounding.revision);
  if (!entries.ok()) return entries.status();
  const StoredInputs stored(*std::move(map), *entries);
  for (const std::unique_ptr<Shard>& shard : plan->shards) {
    for (const files::FileTensor* const tensor : shard->selected) {
      const std::string inputs = stored.Of(tensor->name);
      if (!inputs.empty()) {
        plan->roundings[tensor->name] = {MakeRounding(options.rounding, inputs),
                                         stored.StateOf(inputs)};
      } else if (is_named(tensor->name)) {
        plan->named_nearest.push_back(tensor->name);
      } else {
        plan->nearest.push_back(tensor->name);
      }
    }
  }
  if (!plan->roundings.empty()) return absl::OkStatus();
  return ArgumentInvalidError(absl::StrCat(
      "expected Gram matrices of inputs in model \"", options.rounding.model,
      "\", revision ", options.rounding.revision,
      ", got none for the tensors that are quantized; quantd.torch.calibrate "
      "with features=\"gram\" stores them"));
}

}  // namespace quantd::cli
