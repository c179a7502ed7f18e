#include "client/jobs/quantize_plan.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cpp/errors.h"
#include "client/files/coded_tensor.h"
#include "client/files/errors.h"
#include "client/files/gguf_builder.h"
#include "client/files/gguf_types.h"
#include "client/files/shard_index.h"
#include "client/jobs/compressed_scheme.h"
#include "client/jobs/gguf_output.h"
#include "client/jobs/importance.h"
#include "client/jobs/job_events.h"
#include "client/jobs/quantize_activations.h"
#include "client/jobs/quantize_resume.h"
#include "client/jobs/quantize_rounding.h"
#include "client/jobs/selection.h"
#include "client/jobs/spec_options.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/coded_input.h"
#include "client/models/compressed_model.h"
#include "client/models/compressed_tensors.h"
#include "client/models/fused_experts.h"
#include "client/models/gguf_blocks.h"
#include "client/models/model_config.h"
#include "client/models/plain_input.h"
#include "client/models/quantized_layout.h"
#include "client/models/tensor_input.h"
#include "client/models/text.h"
#include "client/models/tie_groups.h"

namespace quantd::jobs {
namespace {

// Blocks of GGUF have lost something already.
absl::Status CheckBlocks(const QuantizeOptions& options,
                         const TensorInput& input) {
  if (options.requantize || input.blocks().empty()) return absl::OkStatus();
  const auto& [name, blocks] = *input.blocks().begin();
  return files::FileUnsupportedError(
      options.input,
      absl::StrCat("expected plain tensors, but ", files::QuotedName(name),
                   " is quantized already, to ", blocks.type->name,
                   "; begin with the model that it was made from, or take "
                   "--requantize, which quantizes what `quantctl "
                   "dequantize` makes of it"));
}

// The index must not name what is nowhere.
absl::Status CheckIndex(const QuantizeOptions& options,
                        const QuantizePlan& plan) {
  for (const auto& [tensor, name] : plan.weight_map) {
    if (plan.Find(tensor) == nullptr) {
      return files::FileMalformedError(
          options.input, absl::StrCat("the index has tensor \"", tensor,
                                      "\" in ", name, ", where it is not"));
    }
  }
  return absl::OkStatus();
}

// Advice on an input that is not plain.
constexpr char kTakeRequantize[] = ", or take --requantize, which does both";

// Takes the codes of other programs for floats, where that is asked for, in
// the index too. Nothing where there are none.
absl::StatusOr<std::optional<CodedInput>> OpenRequantized(
    const QuantizeOptions& options) {
  if (!options.requantize || IsGgufPath(options.input) ||
      IsNpyPath(options.input)) {
    return std::nullopt;
  }
  absl::StatusOr<CodedInput> coded = OpenCoded(options.input);
  if (!coded.ok()) return coded.status();
  if (coded->tensors.empty()) return std::nullopt;
  return std::optional<CodedInput>(*std::move(coded));
}

// The index of what the codes stand for: a tensor is where its codes are.
void ReindexDecoded(const CodedInput& coded,
                    std::map<std::string, std::string>* weight_map) {
  for (const files::CodedTensor& tensor : coded.tensors) {
    const auto codes = weight_map->find(tensor.parts[0]);
    if (codes == weight_map->end()) continue;
    const std::string shard = codes->second;
    for (const std::string& part : tensor.parts) weight_map->erase(part);
    (*weight_map)[tensor.name] = shard;
  }
}

// Files that say of tensors what these do not say themselves.
constexpr const char* kCopiedConfigFiles[] = {
    "config.json", "hf_quant_config.json", "quant_config.json",
    "quantize_config.json"};

// Sources of the floats of each shard: all files that hold a part of one of its
// tensors, and the configuration.
std::map<std::string, std::set<std::string>> SourcesOf(
    const CodedInput& coded, const QuantizeOptions& options,
    const std::map<std::string, std::string>& weight_map) {
  const std::string folder =
      files::IsFolder(options.input)
          ? options.input
          : options.input.substr(0, options.input.rfind('/') + 1);
  std::map<std::string, std::set<std::string>> sources;
  for (const files::CodedTensor& tensor : coded.tensors) {
    const auto codes = weight_map.find(tensor.parts[0]);
    std::set<std::string>& files =
        sources[codes == weight_map.end() ? std::string(files::kSingleShardName)
                                          : codes->second];
    for (const char* const name : kCopiedConfigFiles) {
      files.insert(folder.empty() ? name : files::PathIn(folder, name));
    }
    for (const std::string& part : tensor.parts) {
      const auto shard = weight_map.find(part);
      if (shard == weight_map.end()) continue;
      files.insert(files::PathIn(folder, shard->second));
    }
  }
  return sources;
}

// Codes and their scales may be in different shards of a folder, so they are
// looked for in all together.
absl::Status CheckFolder(const QuantizeOptions& options) {
  const absl::StatusOr<TensorInput> input = TensorInput::Open(options.input);
  // A fault of the folder comes up where its shards are opened.
  if (!input.ok()) return absl::OkStatus();
  return CheckPlain(*input, options.input, kTakeRequantize);
}

// Makes specs of a tensor, as `sweep` writes them, those of the matrices that
// it became.
void RenameSpecs(const FusedExperts& experts, SpecSet* specs) {
  std::vector<SpecSet::Override> overrides;
  for (SpecSet::Override& entry : specs->overrides) {
    if (entry.pattern != experts.name) {
      overrides.push_back(std::move(entry));
      continue;
    }
    for (const std::string& pattern : experts.patterns) {
      overrides.push_back({pattern, entry.spec, entry.is_from_file});
    }
  }
  specs->overrides = std::move(overrides);
}

absl::Status OpenInputs(const QuantizeOptions& options, QuantizePlan* plan) {
  std::vector<std::string> names = {files::kSingleShardName};
  const bool reads_folder = files::IsFolder(options.input);
  if (reads_folder) {
    absl::StatusOr<files::ShardIndex> index =
        files::ReadShardIndex(options.input);
    if (!index.ok()) return index.status();
    plan->weight_map = std::move(index->weight_map);
    plan->total_parameters = index->total_parameters;
    plan->index_fields = std::move(index->other_fields);
    names = std::move(index->shards);
  }
  const absl::StatusOr<std::optional<CodedInput>> coded =
      OpenRequantized(options);
  if (!coded.ok()) return coded.status();
  std::map<std::string, std::set<std::string>> sources;
  if (coded->has_value()) {
    plan->input_notes = NotesOf(**coded);
    sources = SourcesOf(**coded, options, plan->weight_map);
    ReindexDecoded(**coded, &plan->weight_map);
  } else if (reads_folder) {
    const absl::Status status = CheckFolder(options);
    if (!status.ok()) return status;
  }
  for (const std::string& name : names) {
    std::string path =
        reads_folder ? files::PathIn(options.input, name) : options.input;
    absl::StatusOr<TensorInput> input = TensorInput::Open(path);
    if (!input.ok()) return input.status();
    absl::Status status;
    if (coded->has_value()) {
      input = Decoded(*std::move(input), **coded);
      status = CheckNoCodes(*input, options.input);
    } else {
      status = CheckPlain(*input, options.input, kTakeRequantize);
    }
    if (status.ok()) status = CheckBlocks(options, *input);
    if (!status.ok()) return status;
    auto shard = std::make_unique<Shard>(std::move(path), *std::move(input));
    shard->output_path = plan->is_folder
                             ? files::PathIn(options.output.path, name)
                             : options.output.path;
    shard->name = name;
    shard->sources = std::move(sources[name]);
    plan->shards.push_back(std::move(shard));
  }
  const absl::Status status = CheckIndex(options, *plan);
  if (!status.ok() || !options.IsCompressed()) return status;
  std::vector<TensorInput*> inputs;
  for (const std::unique_ptr<Shard>& shard : plan->shards) {
    inputs.push_back(&shard->input);
  }
  if (files::IsFolder(options.input)) {
    absl::StatusOr<files::Json> config =
        ReadConfig(options.input, kModelConfigName);
    if (!config.ok()) return config.status();
    plan->config = *std::move(config);
  }
  plan->experts = SplitExperts(inputs, ModelTypeOf(plan->config));
  for (const FusedExperts& experts : plan->experts) {
    RenameSpecs(experts, &plan->specs);
  }
  return absl::OkStatus();
}

absl::Status CheckOutput(const QuantizeOptions& options, QuantizePlan* plan) {
  if (plan->is_folder) return options.output.CheckFolder({options.input});
  std::vector<std::string> inputs = options.spec.Files();
  const std::vector<std::string>& paths = plan->shards[0]->input.paths();
  inputs.insert(inputs.end(), paths.begin(), paths.end());
  plan->shards[0]->if_exists = options.output.if_exists();
  inputs.insert(inputs.end(),
                {options.metadata, options.importance, options.inputs.map});
  return options.output.CheckFile(inputs,
                                  options.IsGguf() ? ".gguf" : ".safetensors");
}

// A name that the output takes must be free in all shards.
absl::Status CheckName(const QuantizePlan& plan, const std::string& name) {
  if (plan.Find(name) == nullptr) return absl::OkStatus();
  return ArgumentInvalidError(
      absl::StrCat("the file has a tensor \"", name, "\" of its own"));
}

// Checks the names that a quantized tensor takes.
absl::Status CheckNames(const QuantizeOptions& options,
                        const QuantizePlan& plan,
                        const files::FileTensor& tensor) {
  std::vector<std::string> names;
  if (options.IsCompressed()) {
    const absl::StatusOr<CompressedPlan> compressed =
        CompressedModel(options.PacksAll())
            .PlanOf(tensor.name, tensor.shape,
                    ExpectedEncoding(plan.SpecOf(tensor), tensor.shape));
    // It fails later, with that error.
    if (!compressed.ok()) return absl::OkStatus();
    for (const CompressedPart& part : compressed->parts) {
      if (part.name != tensor.name) names.push_back(part.name);
    }
    // Some get zero points only once their range is known.
    names.push_back(absl::StrCat(tensor.name, "_zero_point"));
  } else {
    for (const absl::string_view suffix : kSuffixes) {
      names.push_back(absl::StrCat(tensor.name, suffix));
    }
  }
  for (const std::string& name : names) {
    const absl::Status status = CheckName(plan, name);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Checks the names of tensors that say how inputs and the cache are quantized.
absl::Status CheckAddedNames(const QuantizePlan& plan) {
  absl::Status status;
  for (const std::unique_ptr<Shard>& shard : plan.shards) {
    for (const files::FileTensor* const tensor : shard->selected) {
      const auto inputs = plan.inputs.find(tensor->name);
      if (inputs == plan.inputs.end()) continue;
      for (const CompressedData& data : inputs->second.parts) {
        status.Update(CheckName(plan, data.part.name));
      }
    }
    for (const CompressedData& data : shard->cache) {
      status.Update(CheckName(plan, data.part.name));
    }
  }
  return status;
}

// Checks that the output can hold a tensor that is quantized. An error of this
// tensor alone goes to `tensor_status`.
absl::Status CheckSelected(const QuantizeOptions& options,
                           const QuantizePlan& plan, const TensorInput& input,
                           const files::FileTensor& tensor,
                           absl::Status* tensor_status) {
  const absl::StatusOr<EncodingSpec> spec =
      plan.specs.For(tensor.name)->SpecOf(tensor.shape);
  *tensor_status = spec.status();
  if (spec.ok() && !options.IsGguf()) {
    *tensor_status = CheckNames(options, plan, tensor);
  }
  if (spec.ok() && options.IsCompressed()) {
    tensor_status->Update(CheckGroups(*spec, tensor.shape));
  }
  if (spec.ok() && options.IsGguf()) {
    const absl::Status status =
        GgufEntryOf(options.output.path, input, tensor, &*spec).status();
    // A fault of the command concerns more than this tensor.
    if (absl::IsInvalidArgument(status)) return status;
    tensor_status->Update(status);
  }
  return absl::OkStatus();
}

// True if somebody asked for this tensor and not only for all, as a mixture
// does.
bool IsNamed(const QuantizeOptions& options, const SpecSet& specs,
             const std::string& tensor) {
  return MatchesAny(options.filter.include, tensor) ||
         std::any_of(specs.overrides.begin(), specs.overrides.end(),
                     [&tensor](const SpecSet::Override& entry) {
                       return !entry.is_from_file &&
                              MatchesGlob(entry.pattern, tensor);
                     });
}

// Sets *type if the tensor becomes blocks of GGUF without the server. Sets
// *is_copied for one that no type has whole blocks for. Such tensors become
// what llama.cpp makes of them, but for those that are copied.
absl::Status FindBlocks(const QuantizeOptions& options,
                        const files::FileTensor& tensor, QuantizePlan* plan,
                        const files::GgufType** type, bool* is_copied) {
  const SpecTemplate& spec = *plan->specs.For(tensor.name);
  *type = nullptr;
  *is_copied = false;
  if (spec.gguf_type.empty()) return absl::OkStatus();
  *type = BlockTypeFor(spec, tensor.shape);
  *is_copied = *type == nullptr;
  if (*is_copied || (*type)->name != spec.gguf_type) {
    const bool is_left_out =
        *is_copied && IsNamed(options, plan->specs, tensor.name);
    auto& said = is_left_out ? plan->left_out_notes : plan->notes;
    said.push_back(NoWholeBlocksText(spec, tensor, *type, "copied"));
  }
  if (*is_copied) return absl::OkStatus();
  return files::CheckGgufEntry(options.output.path,
                               {tensor.name, *type, tensor.shape});
}

// Heads of language models and embeddings, which lose much where they are
// quantized.
constexpr absl::string_view kHeads[] = {"lm_head",
                                        "*.lm_head",
                                        "output",
                                        "language_model.output",
                                        "output_layer",
                                        "*.output_layer",
                                        "*transformer.ff_out",
                                        "embed_out",
                                        "*.embed_out"};
constexpr absl::string_view kEmbeddings[] = {"emb",
                                             "*.emb",
                                             "embed",
                                             "*.embed",
                                             "embed_in",
                                             "*.embed_in",
                                             "wte",
                                             "*.wte",
                                             "wpe",
                                             "*.wpe",
                                             "*embedding*",
                                             "*embed_tokens*",
                                             "*embed_positions*",
                                             "pos_embed",
                                             "*.pos_embed",
                                             "query_embed",
                                             "*.query_embed",
                                             "*relative_attention_bias",
                                             "shared",
                                             "*.shared"};

// Other modules that lose much where they are quantized, or that no runtime has
// kernels for: other heads and routers, and what vLLM builds without
// quantization: the head of SigLIP's text model, audio towers (Gemma 3n,
// Qwen2-Audio), the vision towers of Gemma 4 and of Mistral's own files,
// projectors of images and audio, the projections in front of layers that
// predict further tokens, those that merge patches (Mistral 3), those around
// the short convolutions of LFM2, and those of an indexer's keys and weights
// (DeepSeek V3.2), which it fuses.
constexpr absl::string_view kIgnoredModules[] = {
    "lm_head.*",
    "head",
    "*.head",
    "head.dense",
    "proj_out",
    "decoder",
    "*.decoder",
    "cls.*",
    "score",
    "*.score",
    "classifier",
    "*.classifier",
    "classifier.*",
    "v_head.summary",
    "*.v_head.summary",
    "*pooler.dense",
    "*.eh_proj",
    "*.mtp_linear_proj",
    "*.mtp_layers.*.input_proj",
    "audio_tower.*",
    "*.audio_tower.*",
    "*vision_tower.*.linear",
    "*vision_tower.patch_embedder.*",
    "vision_encoder.transformer.*",
    "vision_language_adapter.*",
    "*multi_modal_projector.*",
    "projector.*",
    "mlp1.*",
    "*patch_merger.merging_layer",
    "*.conv.in_proj",
    "*.conv.out_proj",
    "*.indexer.wk",
    "*.indexer.weights_proj",
    "*.router",
    "*.router.*",
    "*_router",
    "*.gate.wg",
    "*shared_expert_gate"};

constexpr absl::string_view kSiglipModules[] = {
    "*encoder.layers.*.mlp.fc1", "*encoder.layers.*.mlp.fc2", "*.head.mlp.fc1",
    "*.head.mlp.fc2"};

// Modules of a kind of layer of which vLLM has no quantized ones.
struct UnquantizedLayer {
  // Suffixes of their names, behind that of the layer.
  std::array<absl::string_view, 4> modules;
  // The modules that tell the kind of the layer: it has both.
  std::array<absl::string_view, 2> marks;
};

constexpr UnquantizedLayer kUnquantizedLayers[] = {
    // A mixer of Mamba 1. One of Mamba 2 has no x_proj.
    {{".in_proj", ".x_proj", ".dt_proj", ".out_proj"}, {".x_proj", ".dt_proj"}},
    // ModernBERT.
    {{".attn.Wqkv", ".attn.Wo", ".mlp.Wi", ".mlp.Wo"},
     {".attn.Wqkv", ".mlp.Wi"}}};

bool IsOfUnquantizedLayer(const QuantizePlan& plan, absl::string_view module) {
  for (const UnquantizedLayer& kind : kUnquantizedLayers) {
    for (const absl::string_view name : kind.modules) {
      absl::string_view layer = module;
      if (absl::ConsumeSuffix(&layer, name) &&
          absl::c_all_of(kind.marks, [&](absl::string_view mark) {
            return plan.Find(absl::StrCat(layer, mark, ".weight")) != nullptr;
          })) {
        return true;
      }
    }
  }
  return false;
}

// True if the module is in a vision tower that vLLM builds without
// quantization. That of Llama 4 has no convolution of patches, those of
// InternVL and its kin, of which it quantizes some, are beside mlp1, and that
// of DeepSeek-VL2 is beside a projector of its name. Others, which it
// quantizes, have the names too.
bool IsOfVision(const QuantizePlan& plan, absl::string_view module) {
  if (absl::StartsWith(module, "vision.")) {
    return plan.Find("projector.layers.0.weight") != nullptr;
  }
  return absl::StartsWith(module, "vision_model.") &&
         (plan.Find("vision_model.patch_embedding.linear.weight") != nullptr ||
          plan.Find("mlp1.1.weight") != nullptr);
}

// True if the module projects what comes out of torch's MultiheadAttention,
// which reads the weight itself.
bool IsOfTorchAttention(const QuantizePlan& plan, absl::string_view module) {
  return absl::ConsumeSuffix(&module, ".out_proj") &&
         plan.Find(absl::StrCat(module, ".in_proj_weight")) != nullptr;
}

// True if a matrix is one of SigLIP that vLLM builds without quantization for
// its size, as Gemma 3 has them.
bool IsOfRaggedSiglip(const files::FileTensor& tensor) {
  constexpr int64_t kMultiple = 64;
  return MatchesAny(kSiglipModules, ModuleOf(tensor.name)) &&
         absl::c_any_of(tensor.shape,
                        [](int64_t size) { return size % kMultiple != 0; });
}

// True if a matrix is X.gate.weight, the router of experts: of X.experts, or of
// stacks X.Y of as many matrices as it has rows (Step3). Others of this name,
// as RWKV has them, are like any Linear.
bool IsGateOfExperts(const QuantizePlan& plan, const files::FileTensor& gate) {
  absl::string_view layer = ModuleOf(gate.name);
  if (gate.shape.size() != 2 || !absl::ConsumeSuffix(&layer, ".gate")) {
    return false;
  }
  for (const std::unique_ptr<Shard>& shard : plan.shards) {
    for (const files::FileTensor& tensor : shard->input.tensors()) {
      absl::string_view rest = tensor.name;
      if (absl::ConsumePrefix(&rest, layer) &&
          absl::ConsumePrefix(&rest, ".") &&
          (absl::StartsWith(rest, "experts.") ||
           (tensor.shape.size() == 3 && tensor.shape[0] == gate.shape[0]))) {
        return true;
      }
    }
  }
  return false;
}

// The linear layers of GPT-2 and its kin, whose weights lie [in, out].
constexpr absl::string_view kConv1dModules[] = {".c_attn", ".q_attn", ".c_proj",
                                                ".c_fc", ".c_fc2"};

// True if the model has such weights. Other models have modules of these names,
// whose weights lie [out, in]: c_attn, with queries, keys and values, tells.
bool HasConv1d(const QuantizePlan& plan) {
  for (const std::unique_ptr<Shard>& shard : plan.shards) {
    for (const files::FileTensor& tensor : shard->input.tensors()) {
      if (absl::EndsWith(ModuleOf(tensor.name), kConv1dModules[0]) &&
          tensor.shape.size() == 2 && tensor.shape[1] == 3 * tensor.shape[0]) {
        return true;
      }
    }
  }
  return false;
}

bool IsOfConv1d(const files::FileTensor& tensor) {
  return tensor.shape.size() == 2 &&
         std::any_of(std::begin(kConv1dModules), std::end(kConv1dModules),
                     [&tensor](absl::string_view name) {
                       return absl::EndsWith(ModuleOf(tensor.name), name);
                     });
}

bool MatchesAnyOf(absl::string_view pattern,
                  const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(),
                     [pattern](const std::string& name) {
                       return MatchesGlob(pattern, name);
                     });
}

// True if a tensor that is selected stays as it is. The defaults give way to
// whoever names the tensor.
bool IsIgnored(const QuantizeOptions& options, const QuantizePlan& plan,
               const files::FileTensor& tensor) {
  if (options.IsGguf()) {
    return !IsNamed(options, plan.specs, tensor.name) &&
           IsLeftInGguf(options.filter, tensor);
  }
  if (!options.IsCompressed()) return false;
  const absl::string_view module = ModuleOf(tensor.name);
  if (options.ignore.has_value()) return MatchesAny(*options.ignore, module);
  return !IsNamed(options, plan.specs, tensor.name) &&
         (MatchesAny(kHeads, module) || MatchesAny(kEmbeddings, module) ||
          MatchesAny(kIgnoredModules, module) ||
          IsOfUnquantizedLayer(plan, module) || IsOfVision(plan, module) ||
          IsOfTorchAttention(plan, module) || IsOfRaggedSiglip(tensor) ||
          IsGateOfExperts(plan, tensor));
}

// True if a tensor that is selected can be no weight of a Linear, which is all
// that vLLM has quantized layers for. Stacks of experts are weights of several.
// Gives way to whoever names the tensor.
bool IsNoLinear(const QuantizeOptions& options, const SpecSet& specs,
                const files::FileTensor& tensor) {
  if (!options.IsCompressed() || IsNamed(options, specs, tensor.name)) {
    return false;
  }
  if (absl::StrContains(tensor.name, ".experts.")) {
    return absl::EndsWith(tensor.name, "bias");
  }
  return tensor.shape.size() != 2 || ModuleOf(tensor.name).empty();
}

// Each pattern of --ignore leaves out a module, and they do not leave out all:
// no runtime reads a model of this kind without a quantized module.
absl::Status CheckIgnore(const QuantizeOptions& options,
                         const QuantizePlan& plan) {
  for (const std::string& pattern :
       options.ignore.value_or(std::vector<std::string>())) {
    if (pattern.empty() || MatchesAnyOf(pattern, plan.ignored)) continue;
    return ArgumentInvalidError(
        absl::StrCat("expected modules for --ignore \"", pattern,
                     "\", got none that would be quantized"));
  }
  const auto has_selected = [](const std::unique_ptr<Shard>& shard) {
    return !shard->selected.empty();
  };
  std::vector<std::string> kept = plan.ignored;
  kept.insert(kept.end(), plan.no_linear.begin(), plan.no_linear.end());
  kept.insert(kept.begin(), plan.conv1d.begin(), plan.conv1d.end());
  if (kept.empty() || plan.AnyFailed() || options.IsGguf() ||
      std::any_of(plan.shards.begin(), plan.shards.end(), has_selected)) {
    return absl::OkStatus();
  }
  if (!plan.conv1d.empty()) {
    return ArgumentInvalidError(absl::StrCat(
        "expected modules to quantize, but all that are selected are left as "
        "they are (",
        CountText(kept.size()), ", such as ", kept[0], "); ", kConv1dText));
  }
  return ArgumentInvalidError(absl::StrCat(
      "expected modules to quantize, but all that are selected are left as "
      "they are (",
      CountText(kept.size()), ", such as ", kept[0],
      plan.ignored.empty() ? "), none of them a matrix MODULE.weight"
                           : "); --ignore '' takes them"));
}

absl::Status SelectAll(const QuantizeOptions& options, QuantizePlan* plan) {
  std::vector<const TensorInput*> inputs;
  for (const std::unique_ptr<Shard>& shard : plan->shards) {
    inputs.push_back(&shard->input);
  }
  const absl::StatusOr<std::vector<const files::FileTensor*>> selected =
      SelectTensors(inputs, options.filter, &plan->specs);
  if (!selected.ok()) return selected.status();
  const absl::flat_hash_set<const files::FileTensor*> is_selected(
      selected->begin(), selected->end());
  const bool has_conv1d = options.IsCompressed() && HasConv1d(*plan);
  for (const std::unique_ptr<Shard>& shard : plan->shards) {
    for (const files::FileTensor& tensor : shard->input.tensors()) {
      const auto [outcome, is_new] = plan->outcomes.try_emplace(tensor.name);
      if (!is_new) {
        return files::FileMalformedError(
            options.input, absl::StrCat("tensor \"", tensor.name,
                                        "\" is in two of its files"));
      }
      absl::Status* const status = &outcome->second.status;
      bool is_copied = !is_selected.contains(&tensor);
      if (is_selected.contains(&tensor) && IsIgnored(options, *plan, tensor)) {
        plan->ignored.emplace_back(options.IsGguf() ? tensor.name
                                                    : ModuleOf(tensor.name));
        if (!options.IsGguf()) continue;
        is_copied = true;
      }
      if (is_selected.contains(&tensor) &&
          IsNoLinear(options, plan->specs, tensor)) {
        plan->no_linear.push_back(tensor.name);
        continue;
      }
      if (has_conv1d && is_selected.contains(&tensor) && IsOfConv1d(tensor)) {
        if (IsNamed(options, plan->specs, tensor.name)) {
          *status = ArgumentInvalidError(kConv1dText);
        } else {
          plan->conv1d.push_back(tensor.name);
        }
        continue;
      }
      const files::GgufType* type = nullptr;
      if (!is_copied && absl::c_linear_search(tensor.shape, 0)) {
        is_copied = true;
        plan->notes.push_back(
            absl::StrCat("tensor ", tensor.name, ": no elements: copied"));
      }
      if (!is_copied) {
        *status = FindBlocks(options, tensor, plan, &type, &is_copied);
      }
      if (type != nullptr) {
        if (status->ok()) shard->blocks.emplace_back(&tensor, type);
      } else if (!is_copied) {
        const absl::Status checked =
            CheckSelected(options, *plan, shard->input, tensor, status);
        if (!checked.ok()) return checked;
        if (status->ok()) {
          shard->selected.push_back(&tensor);
          const std::string text =
              OneScaleText(*plan->specs.For(tensor.name), tensor);
          if (!text.empty()) plan->warnings.push_back(text);
        }
      } else if (options.IsGguf()) {
        *status =
            GgufEntryOf(options.output.path, shard->input, tensor, nullptr)
                .status();
      }
    }
  }
  return CheckIgnore(options, *plan);
}

// Notes the heads and embeddings that somebody asked for.
void NoteHeadsAndEmbeddings(const QuantizeOptions& options,
                            QuantizePlan* plan) {
  if (!options.IsCompressed()) return;
  for (const std::unique_ptr<Shard>& shard : plan->shards) {
    for (const files::FileTensor* const tensor : shard->selected) {
      const absl::string_view module = ModuleOf(tensor->name);
      if (MatchesAny(kHeads, module)) {
        plan->beyond_limits
            ["vLLM before mid-2026 has no quantized heads, and "
             "later ones not for all schemes"]
                .push_back(tensor->name);
      } else if (MatchesAny(kEmbeddings, module)) {
        plan->beyond_limits["vLLM has no quantized embeddings"].push_back(
            tensor->name);
      }
    }
  }
}

absl::Status FindAllTies(const QuantizeOptions& options, QuantizePlan* plan) {
  absl::StatusOr<TieOptions> ties = options.ties.Parse();
  if (!ties.ok()) return ties.status();
  ties->is_strict = options.IsCompressed();
  std::vector<TieCandidate> candidates;
  for (const std::unique_ptr<Shard>& shard : plan->shards) {
    for (const files::FileTensor* const tensor : shard->selected) {
      candidates.push_back({tensor, plan->SpecOf(*tensor)});
    }
  }
  absl::StatusOr<std::vector<TieGroup>> groups = FindTies(*ties, candidates);
  if (!groups.ok()) return groups.status();
  plan->ties = *std::move(groups);
  return absl::OkStatus();
}

// Sets how much errors count.
// Errors: those of FindImportance.
absl::Status WeighAll(
    const QuantizeOptions& options, Client* client,
    absl::FunctionRef<bool(const std::string& tensor)> is_named,
    QuantizePlan* plan) {
  std::vector<const files::FileTensor*> tensors;
  for (const std::unique_ptr<Shard>& shard : plan->shards) {
    tensors.insert(tensors.end(), shard->selected.begin(),
                   shard->selected.end());
    for (const auto& [tensor, type] : shard->blocks) tensors.push_back(tensor);
  }
  absl::StatusOr<FoundImportance> found = FindImportance(
      options.importance, options.inputs, tensors,
      [plan](const files::FileTensor& tensor) {
        return std::vector<const SpecTemplate*>{plan->specs.For(tensor.name)};
      },
      client);
  if (!found.ok()) return found.status();
  const auto named = std::stable_partition(
      found->missing.begin(), found->missing.end(),
      [&](const std::string& tensor) { return !is_named(tensor); });
  plan->named_unweighted.assign(named, found->missing.end());
  found->missing.erase(named, found->missing.end());
  plan->importance = *std::move(found);
  return absl::OkStatus();
}

// Sets the targets of this run: all shards, or a part of them.
void MakeTargets(QuantizePlan* plan) {
  std::vector<std::vector<Share>> shares;
  if (plan->part.has_value()) {
    shares = ShareOut(plan->shards, plan->part->count);
  }
  for (size_t i = 0; i < plan->shards.size(); ++i) {
    Shard* const shard = plan->shards[i].get();
    if (!plan->part.has_value()) {
      plan->targets.push_back({shard, shard->selected, shard->output_path});
      continue;
    }
    const auto own = std::find_if(
        shares[i].begin(), shares[i].end(),
        [plan](const Share& share) { return share.part == plan->part->index; });
    shard->is_skipped = own == shares[i].end();
    if (shard->is_skipped) continue;
    // A part that has a shard to itself covers also what is not quantized. A
    // single file is there once it is joined, never before.
    if (shares[i].size() == 1 && plan->is_folder) {
      plan->targets.push_back({shard, shard->selected, shard->output_path});
      for (const files::FileTensor& tensor : shard->input.tensors()) {
        plan->scope.insert(&tensor);
      }
    } else {
      plan->targets.push_back({shard, own->tensors,
                               PartPath(*shard, *plan->part),
                               files::IfExists::kRefuse, plan->part});
      plan->scope.insert(own->tensors.begin(), own->tensors.end());
    }
  }
}

// No tensor is to be missing from the output because it is not read.
absl::Status CheckUnread(const QuantizeOptions& options,
                         const QuantizePlan& plan, const JobEvents& events) {
  size_t unread_count = 0;
  for (const std::unique_ptr<Shard>& shard : plan.shards) {
    for (const files::UnreadTensor& tensor : shard->input.unread()) {
      if (events.on_unread) events.on_unread(tensor);
      ++unread_count;
    }
    const std::string codes = CastCodesText(shard->input);
    if (!codes.empty()) events.Warn(codes);
  }
  if (unread_count == 0 || options.keep_going) return absl::OkStatus();
  return files::FileUnsupportedError(
      options.input,
      absl::StrCat(CountText(unread_count),
                   " tensors are not read; --keep-going leaves them out"));
}

}  // namespace

const files::FileTensor* QuantizePlan::Find(const std::string& name) const {
  for (const std::unique_ptr<Shard>& shard : shards) {
    const files::FileTensor* const tensor = shard->input.Find(name);
    if (tensor != nullptr) return tensor;
  }
  return nullptr;
}

bool QuantizePlan::HasShard(const std::string& name) const {
  return std::any_of(
      shards.begin(), shards.end(),
      [&](const std::unique_ptr<Shard>& shard) { return shard->name == name; });
}

bool QuantizePlan::AnyFailed() const {
  return std::any_of(outcomes.begin(), outcomes.end(), [](const auto& entry) {
    return !entry.second.status.ok();
  });
}

bool QuantizePlan::QuantizedNothing() const {
  return is_complete && !part.has_value() &&
         std::none_of(outcomes.begin(), outcomes.end(), [](const auto& entry) {
           return entry.second.is_quantized;
         });
}

int64_t QuantizePlan::RoundedCount() const {
  int64_t count = 0;
  for (const std::unique_ptr<Shard>& shard : shards) {
    count += shard->rounded_count;
  }
  return count;
}

bool QuantizePlan::AnyFailed(const Shard& shard) const {
  return std::any_of(shard.input.tensors().begin(), shard.input.tensors().end(),
                     [this](const files::FileTensor& tensor) {
                       return !outcomes.at(tensor.name).status.ok();
                     });
}

EncodingSpec QuantizePlan::SpecOf(const files::FileTensor& tensor) const {
  const SpecTemplate& of_tensor = *specs.For(tensor.name);
  EncodingSpec spec = *of_tensor.SpecOf(tensor.shape);
  if (has_model_scales && &of_tensor == &specs.base) {
    if (tensor.dtype == files::Dtype::kBF16) {
      spec.set_scale_type(v1::SCALE_TYPE_BFLOAT16);
    } else if (tensor.dtype == files::Dtype::kF16) {
      spec.set_scale_type(v1::SCALE_TYPE_FLOAT16);
    }
  }
  importance.importance.Apply(tensor.name, &spec);
  return spec;
}

bool QuantizePlan::IsWeighed(const files::FileTensor& tensor) const {
  return specs.For(tensor.name)->gguf_type.empty()
             ? SpecOf(tensor).has_importance()
             : !importance.importance.WeightsOf(tensor.name).empty();
}

absl::StatusOr<std::optional<Part>> ParsePartOptions(
    const QuantizeOptions& options) {
  std::optional<Part> result;
  if (!options.part.has_value() && !options.join) return result;
  if (options.part.has_value()) {
    const absl::StatusOr<Part> part = ParsePart(*options.part);
    if (!part.ok()) return part.status();
    result = *part;
  }
  if (result.has_value() && options.join) {
    return ArgumentInvalidError("expected --part or --join, got both");
  }
  if (options.keep_going || options.output.IsStandardOutput()) {
    return ArgumentInvalidError(
        "expected --part and --join without --keep-going and without "
        "standard output");
  }
  return result;
}

absl::StatusOr<QuantizePlan> MakePlan(const QuantizeOptions& options,
                                      const SpecSet& specs,
                                      const std::optional<Part>& part,
                                      const std::string& server, Client* client,
                                      const JobEvents& events) {
  QuantizePlan plan;
  plan.is_folder = files::IsFolder(options.input) || options.IsCompressed();
  plan.specs = specs;
  plan.has_model_scales =
      !options.scheme.empty() && FindPreset(options.scheme)->has_model_scales;
  plan.part = part;
  absl::Status status = OpenInputs(options, &plan);
  if (status.ok()) status = CheckOutput(options, &plan);
  if (status.ok()) status = SelectAll(options, &plan);
  if (status.ok()) status = FindAllTies(options, &plan);
  if (status.ok()) status = FindActivations(options, client, &plan);
  NoteHeadsAndEmbeddings(options, &plan);
  if (status.ok()) status = CheckAddedNames(plan);
  const auto is_named = [&](const std::string& tensor) {
    return IsNamed(options, plan.specs, tensor);
  };
  if (status.ok()) status = FindRoundings(options, client, is_named, &plan);
  // Behind the ties: tensors that share a scale may weigh errors differently.
  if (status.ok()) status = WeighAll(options, client, is_named, &plan);
  if (!status.ok()) return status;
  for (const std::unique_ptr<Shard>& shard : plan.shards) {
    SetKeys(options, server, plan, shard.get());
  }
  MakeTargets(&plan);
  status = FindEarlier(options, &plan);
  if (status.ok()) status = CheckUnread(options, plan, events);
  if (!status.ok()) return status;
  return plan;
}

}  // namespace quantd::jobs
