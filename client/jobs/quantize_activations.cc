#include "client/jobs/quantize_activations.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cpp/errors.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
#include "client/jobs/compressed_scheme.h"
#include "client/jobs/quantize_outcome.h"
#include "client/models/compressed_model.h"
#include "client/models/compressed_tensors.h"
#include "client/models/model_config.h"
#include "client/models/tensor_input.h"
#include "client/models/text.h"
#include "client/models/tie_groups.h"
#include "quantd/v1/encoding.pb.h"

namespace quantd::jobs {
namespace {

constexpr size_t kMostActivationNames = 5;

// Reads stored encodings. Not thread-safe.
class StoredRanges {
 public:
  // Both must stay.
  StoredRanges(const RevisionName& name, Client* client)
      : name_(name), client_(*client) {}

  // Adds RangeParts of a tensor's encoding to `parts`. What is missing or does
  // not fit is told by Finish.
  // Errors: of the client.
  absl::Status Add(const std::string& tensor, const std::string& prefix,
                   files::Json* arguments, std::vector<CompressedData>* parts) {
    const absl::StatusOr<v1::StoredEncoding> stored =
        client_.GetEncoding(name_.NameOf(tensor));
    if (absl::IsNotFound(stored.status())) {
      bad_.push_back(absl::StrCat("\"", tensor, "\" is not there"));
      return absl::OkStatus();
    }
    if (!stored.ok()) return stored.status();
    absl::StatusOr<std::vector<CompressedData>> found =
        RangeParts(prefix, stored->encoding(), arguments);
    if (!found.ok()) {
      bad_.push_back(
          absl::StrCat("\"", tensor, "\" ", ErrorText(found.status())));
      return absl::OkStatus();
    }
    for (CompressedData& data : *found) parts->push_back(std::move(data));
    return absl::OkStatus();
  }

  absl::Status Finish() {
    if (bad_.empty()) return absl::OkStatus();
    const size_t count = bad_.size();
    if (count > kMostActivationNames) bad_.resize(kMostActivationNames);
    return ArgumentInvalidError(absl::StrCat(
        "expected stored encodings of the activations in model \"", name_.model,
        "\": ", absl::StrJoin(bad_, "; "),
        count > kMostActivationNames
            ? absl::StrCat(" and ", count - kMostActivationNames, " more")
            : "",
        "; quantctl encodings compute --spec '*.input=FORMAT', or "
        "'*.output=FORMAT' for --kv-cache, makes them from statistics"));
  }

 private:
  const RevisionName& name_;
  Client& client_;
  std::vector<std::string> bad_;
};

// Projections to queries, keys and values in one.
constexpr absl::string_view kFusedProjections[] = {
    ".qkv_proj.weight", ".query_key_value.weight", ".c_attn.weight",
    ".Wqkv.weight", ".W_pack.weight"};
// Behind X.k and X.v: norms between the projection and the cache.
constexpr absl::string_view kCacheNorms[] = {"_norm", "_layernorm"};

// The name of the cache that a projection fills, "X.k" for X.k_proj.weight;
// empty for another tensor.
std::string CacheOf(absl::string_view tensor) {
  if (!absl::ConsumeSuffix(&tensor, "_proj.weight") ||
      !(absl::EndsWith(tensor, ".k") || absl::EndsWith(tensor, ".v"))) {
    return "";
  }
  return std::string(tensor);
}

// The module whose output goes to the cache `cache`.
std::string SourceOf(const QuantizePlan& plan, const std::string& cache) {
  for (const absl::string_view norm : kCacheNorms) {
    std::string module = absl::StrCat(cache, norm);
    if (plan.Find(absl::StrCat(module, ".weight")) != nullptr) return module;
  }
  return absl::StrCat(cache, "_proj");
}

// A cache has both keys and values, and the projections to them.
absl::Status CheckCache(const QuantizePlan& plan) {
  std::vector<std::string> missing;
  bool has_cache = false;
  for (const std::unique_ptr<Shard>& shard : plan.shards) {
    for (const files::FileTensor& tensor : shard->input.tensors()) {
      for (const absl::string_view fused : kFusedProjections) {
        if (!absl::EndsWith(tensor.name, fused)) continue;
        // Nobody measured the range of the part that goes to the cache.
        return ArgumentInvalidError(absl::StrCat(
            "expected X.k_proj.weight and X.v_proj.weight for --kv-cache, got "
            "\"",
            tensor.name, "\", which has keys and values in one"));
      }
      std::string other = CacheOf(tensor.name);
      if (other.empty()) continue;
      has_cache = true;
      other.back() = other.back() == 'k' ? 'v' : 'k';
      absl::StrAppend(&other, "_proj.weight");
      if (plan.Find(other) == nullptr) missing.push_back(std::move(other));
    }
  }
  if (!has_cache) {
    return ArgumentInvalidError(
        "expected X.k_proj.weight and X.v_proj.weight for --kv-cache, got "
        "none");
  }
  if (missing.empty()) return absl::OkStatus();
  const size_t count = missing.size();
  if (count > kMostActivationNames) missing.resize(kMostActivationNames);
  return ArgumentInvalidError(absl::StrCat(
      "expected X.k_proj.weight and X.v_proj.weight for --kv-cache; not "
      "there: ",
      absl::StrJoin(missing, ", "),
      count > kMostActivationNames
          ? absl::StrCat(" and ", count - kMostActivationNames, " more")
          : ""));
}

// Sets what the shards have of the cache. Runtimes take "kv_cache_scheme" for
// the whole model, whichever of its matrices are quantized.
absl::Status FindCache(StoredRanges* stored, QuantizePlan* plan) {
  absl::Status status = CheckCache(*plan);
  if (!status.ok()) return status;
  for (const std::unique_ptr<Shard>& shard : plan->shards) {
    for (const files::FileTensor& tensor : shard->input.tensors()) {
      const std::string cache = CacheOf(tensor.name);
      if (cache.empty()) continue;
      const std::string source =
          absl::StrCat(SourceOf(*plan, cache), ".output");
      files::Json arguments = plan->kv_cache;
      status = stored->Add(source, cache, &arguments, &shard->cache);
      if (!status.ok()) return status;
      if (arguments["symmetric"] != true) {
        return ArgumentInvalidError(
            absl::StrCat("expected a symmetric encoding of \"", source, "\""));
      }
    }
  }
  return absl::OkStatus();
}

// The tensors that vLLM fuses, by the usual names, and the matrices of all
// experts of a layer.
std::vector<TieGroup> FindFused(const QuantizePlan& plan) {
  std::vector<const files::FileTensor*> tensors;
  for (const std::unique_ptr<Shard>& shard : plan.shards) {
    for (const files::FileTensor& tensor : shard->input.tensors()) {
      tensors.push_back(&tensor);
    }
  }
  // Only patterns of a user can be wrong.
  return *FindTiedTensors(TieOptions(), tensors);
}

// True if the rows of a matrix in blocks end within a block.
bool IsRagged(const files::FileTensor& tensor, const files::Json& weights) {
  return weights["strategy"] == "block" &&
         tensor.shape[0] % weights["block_structure"][0].get<int64_t>() != 0;
}

// The rows of the matrices that a tensor of the file has in one, as vLLM tells
// them apart; empty where that is not known, or for other tensors.
std::vector<int64_t> PartRows(const files::FileTensor& tensor,
                              const std::optional<AttentionRows>& attention) {
  const int64_t rows = tensor.shape[0];
  if (absl::EndsWith(tensor.name, ".gate_up_proj.weight")) {
    return {rows / 2, rows - rows / 2};
  }
  if (!attention.has_value() ||
      rows != attention->queries + 2 * attention->keys ||
      !absl::c_any_of(kFusedProjections, [&tensor](absl::string_view fused) {
        return absl::EndsWith(tensor.name, fused);
      })) {
    return {};
  }
  return {attention->queries, attention->keys, attention->keys};
}

// True if one of these parts, but for the last, ends within a block.
bool IsRaggedInside(const files::FileTensor& tensor, const files::Json& weights,
                    const std::optional<AttentionRows>& attention) {
  if (weights["strategy"] != "block") return false;
  std::vector<int64_t> parts = PartRows(tensor, attention);
  if (parts.empty()) return false;
  parts.pop_back();
  const int64_t block = weights["block_structure"][0].get<int64_t>();
  return absl::c_any_of(parts,
                        [block](int64_t rows) { return rows % block != 0; });
}

// The name of the tensor that comes last where vLLM fuses those of a group:
// that of the label's last choice.
std::string LastOf(const TieGroup& group) {
  const absl::string_view label = group.label;
  const size_t open = label.rfind('{');
  const size_t close = label.rfind('}');
  const size_t last = label.rfind(',', close) + 1;
  return absl::StrCat(label.substr(0, open), label.substr(last, close - last),
                      label.substr(close + 1));
}

// The labels of fused tensors that vLLM does not load for such rows. It lets
// those of the last of them pass.
std::vector<std::string> FindRagged(
    const std::vector<TieGroup>& fused,
    const absl::flat_hash_set<const files::FileTensor*>& ragged) {
  std::vector<std::string> labels;
  for (const TieGroup& group : fused) {
    if (!group.shares_scale) continue;
    const std::string last = LastOf(group);
    if (std::any_of(group.tensors.begin(), group.tensors.end(),
                    [&](const files::FileTensor* const tensor) {
                      return tensor->name != last && ragged.contains(tensor);
                    })) {
      labels.push_back(group.label);
    }
  }
  return labels;
}

// Schemes of the tensors that are quantized: what config.json says of the
// module, and of its inputs.
using Schemes = absl::flat_hash_map<const files::FileTensor*,
                                    std::pair<files::Json, files::Json>>;

// Tensors, and labels of fused ones, that do not keep limits of the kernels, by
// LimitsText. Experts have other kernels as well.
std::map<std::string, std::vector<std::string>> FindBeyondLimits(
    const std::vector<TieGroup>& fused, const QuantizePlan& plan,
    const Schemes& schemes) {
  absl::flat_hash_map<const files::FileTensor*, const TieGroup*> group_of;
  for (const TieGroup& group : fused) {
    if (!group.shares_scale) continue;
    for (const files::FileTensor* const tensor : group.tensors) {
      group_of[tensor] = &group;
    }
  }
  std::map<std::string, std::vector<std::string>> found;
  for (const std::unique_ptr<Shard>& shard : plan.shards) {
    for (const files::FileTensor* const tensor : shard->selected) {
      const auto scheme = schemes.find(tensor);
      if (scheme == schemes.end() || tensor->shape.size() != 2 ||
          !ExpertsOf(tensor->name).empty()) {
        continue;
      }
      const auto& [module, inputs] = scheme->second;
      const auto group = group_of.find(tensor);
      const bool is_fused = group != group_of.end();
      int64_t rows = is_fused ? 0 : tensor->shape[0];
      for (const files::FileTensor* const member :
           is_fused ? group->second->tensors : decltype(TieGroup::tensors)()) {
        if (schemes.contains(member)) rows += member->shape[0];
      }
      if (!HasKernels(module, inputs)) continue;
      const std::string text =
          LimitsText(module, inputs, rows, tensor->shape[1]);
      if (text.empty()) continue;
      const std::string& name = is_fused ? group->second->label : tensor->name;
      std::vector<std::string>& names = found[text];
      if (!absl::c_linear_search(names, name)) names.push_back(name);
    }
  }
  return found;
}

// Layers of experts whose schemes are not that of the first one: experts that
// are not quantized have none.
std::vector<std::string> FindUnlikeExperts(const std::vector<TieGroup>& fused,
                                           const Schemes& schemes) {
  std::vector<std::string> labels;
  std::optional<Schemes::mapped_type> first;
  for (const TieGroup& group : fused) {
    if (group.shares_scale) continue;
    const auto found = schemes.find(group.tensors[0]);
    const Schemes::mapped_type scheme =
        found == schemes.end() ? Schemes::mapped_type() : found->second;
    if (!first.has_value()) first = scheme;
    if (scheme != *first) labels.push_back(group.label);
  }
  return labels;
}

// Checks that fused tensors have the same scheme or none.
// Errors: ARGUMENT_INVALID.
absl::Status CheckFused(const Schemes& schemes,
                        const std::vector<TieGroup>& fused,
                        const QuantizePlan& plan) {
  std::vector<std::string> unlike;
  for (const TieGroup& group : fused) {
    // A tensor with an error reports it by itself.
    if (std::any_of(group.tensors.begin(), group.tensors.end(),
                    [&plan](const files::FileTensor* const tensor) {
                      return !plan.outcomes.at(tensor->name).status.ok();
                    })) {
      continue;
    }
    const auto first = schemes.find(group.tensors[0]);
    const bool is_one =
        std::all_of(group.tensors.begin(), group.tensors.end(),
                    [&](const files::FileTensor* const tensor) {
                      const auto other = schemes.find(tensor);
                      return first == schemes.end() || other == schemes.end()
                                 ? first == other
                                 : first->second == other->second;
                    });
    if (!is_one) unlike.push_back(group.label);
  }
  if (unlike.empty()) return absl::OkStatus();
  return ArgumentInvalidError(absl::StrCat(
      "expected one scheme for all tensors of ", unlike[0],
      unlike.size() > 1 ? absl::StrCat(" and of ", CountText(unlike.size() - 1),
                                       " more groups")
                        : "",
      ", got different ones, or some that are not quantized; vLLM fuses such a "
      "group and does not load it then; `quantctl sweep FILE` chooses one spec "
      "for all, and --no-ties leaves them as they are asked for; groups that "
      "are longer than some of the rows make a scheme of their own"));
}

absl::Status OnlyCompressedError(const char* option) {
  return ArgumentInvalidError(absl::StrCat(
      "expected ", option, " with --layout compressed-tensors or --scheme"));
}

}  // namespace

absl::Status ApplyScheme(QuantizeOptions* options) {
  if (!options->scheme.empty()) {
    const SchemePreset* const found = FindPreset(options->scheme);
    if (found == nullptr) {
      return ArgumentInvalidError(
          absl::StrCat("expected a scheme of vLLM, such as W4A16, got \"",
                       options->scheme, "\""));
    }
    const SchemePreset& preset = *found;
    if (options->layout == "quantd") {
      return OnlyCompressedError("--scheme");
    }
    // Without packing, no runtime has kernels for the weights of W8A16.
    if (options->layout.empty() || preset.layout == "pack-quantized") {
      options->layout = preset.layout;
    }
    if (options->activations.empty()) options->activations = preset.activations;
    options->spec.specs.push_back(preset.spec);
  }
  if (!options->IsCompressed()) {
    if (!options->activations.empty()) {
      return OnlyCompressedError("--activations");
    }
    if (!options->kv_cache.empty()) return OnlyCompressedError("--kv-cache");
    if (options->ignore.has_value()) return OnlyCompressedError("--ignore");
  }
  if (options->layout.empty()) options->layout = "quantd";
  if (options->activations.empty()) options->activations = "none";
  return ParseActivations(options->activations).status();
}

bool NeedsActivations(const QuantizeOptions& options) {
  return absl::StartsWith(options.activations, "static") ||
         !options.kv_cache.empty();
}

absl::Status FindActivations(const QuantizeOptions& options, Client* client,
                             QuantizePlan* plan) {
  if (!options.IsCompressed()) return absl::OkStatus();
  const absl::StatusOr<ActivationsChoice> choice =
      ParseActivations(options.activations);
  if (!choice.ok()) return choice.status();
  if (!options.kv_cache.empty()) {
    absl::StatusOr<files::Json> cache = CacheArguments(options.kv_cache);
    if (!cache.ok()) return cache.status();
    plan->kv_cache = *std::move(cache);
  }
  std::optional<StoredRanges> stored;
  if (client != nullptr) stored.emplace(options.name, client);
  const std::optional<AttentionRows> attention = AttentionRowsOf(plan->config);
  Schemes schemes;
  absl::flat_hash_set<const files::FileTensor*> ragged;
  for (const std::unique_ptr<Shard>& shard : plan->shards) {
    for (const files::FileTensor* const tensor : shard->selected) {
      ModuleInputs& inputs = plan->inputs[tensor->name];
      const auto plan_of = [&](bool packs_all) {
        return CompressedModel(packs_all).PlanOf(
            tensor->name, tensor->shape,
            ExpectedEncoding(plan->SpecOf(*tensor), tensor->shape));
      };
      const absl::StatusOr<CompressedPlan> planned =
          plan_of(options.PacksAll());
      // It fails later, with that error.
      if (!planned.ok()) continue;
      absl::StatusOr<files::Json> arguments =
          InputArguments(*choice, planned->module["weights"]);
      if (!arguments.ok()) return arguments.status();
      inputs.arguments = *std::move(arguments);
      const auto has_kernels = [&](const files::Json& module) {
        return HasKernels(module, inputs.arguments) &&
               (ExpertsOf(tensor->name).empty() ||
                HasExpertKernels(module, inputs.arguments));
      };
      if (!has_kernels(planned->module)) {
        ++plan->no_kernels_count;
        const absl::StatusOr<CompressedPlan> packed =
            plan_of(/*packs_all=*/true);
        plan->packable_count +=
            packed.ok() && has_kernels(packed->module) ? 1 : 0;
      }
      if (TakesStored(inputs.arguments)) {
        const std::string input =
            absl::StrCat(ModuleOf(tensor->name), ".input");
        const absl::Status status =
            stored->Add(input, input, &inputs.arguments, &inputs.parts);
        if (!status.ok()) return status;
      }
      schemes[tensor] = {planned->module, inputs.arguments};
      if (IsRagged(*tensor, planned->module["weights"])) ragged.insert(tensor);
      if (IsRaggedInside(*tensor, planned->module["weights"], attention)) {
        plan->ragged.push_back(tensor->name);
      }
    }
  }
  const std::vector<TieGroup> fused = FindFused(*plan);
  for (std::string& label : FindRagged(fused, ragged)) {
    plan->ragged.push_back(std::move(label));
  }
  plan->beyond_limits = FindBeyondLimits(fused, *plan, schemes);
  plan->unlike_experts = FindUnlikeExperts(fused, schemes);
  if (!options.ties.no_defaults) {
    const absl::Status status = CheckFused(schemes, fused, *plan);
    if (!status.ok()) return status;
  }
  if (!plan->kv_cache.is_null()) {
    const absl::Status status = FindCache(&*stored, plan);
    if (!status.ok()) return status;
  }
  return stored.has_value() ? stored->Finish() : absl::OkStatus();
}

}  // namespace quantd::jobs
