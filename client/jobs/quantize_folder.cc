#include "client/jobs/quantize_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/files/atomic_file.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
#include "client/jobs/model_folder.h"
#include "client/jobs/output.h"
#include "client/jobs/quantize_outcome.h"
#include "client/jobs/quantize_parts.h"
#include "client/models/compressed_model.h"
#include "client/models/compressed_tensors.h"
#include "client/models/fused_experts.h"
#include "client/models/model_config.h"
#include "client/models/text.h"
#include "client/models/tie_groups.h"
#include "nlohmann/json.hpp"

namespace quantd::jobs {
namespace {

// True if the config.json of a folder is that of a compressed-tensors model.
bool IsOfCompressed(const std::string& folder) {
  const absl::StatusOr<files::Json> document =
      ReadConfig(folder, kModelConfigName);
  if (!document.ok()) return false;
  const files::Json* const config = FindQuantization(*document);
  return config != nullptr &&
         config->value("quant_method", files::Json()) == "compressed-tensors";
}

}  // namespace

absl::Status QuantizeFolder::Make() {
  if (!plan_.is_folder) return absl::OkStatus();
  is_made_ = mkdir(options_.output.path.c_str(), 0777) == 0;
  return is_made_ || errno == EEXIST
             ? absl::OkStatus()
             : files::FileUnwritableError(options_.output.path, errno);
}

void QuantizeFolder::RemoveIfEmpty() const {
  if (is_made_) rmdir(options_.output.path.c_str());
}

absl::Status QuantizeFolder::Clear() {
  if (!plan_.is_folder || is_cleared_) return absl::OkStatus();
  is_cleared_ = true;
  std::vector<std::string> paths;
  if (!plan_.weight_map.empty()) {
    paths.push_back(OutputPath(files::kShardIndexName));
  }
  if (options_.IsCompressed() ||
      (options_.output.force && IsOfCompressed(options_.output.path))) {
    paths.push_back(OutputPath(kModelConfigName));
  }
  if (options_.output.force) {
    for (const std::string& name : FilesIn(options_.output.path)) {
      if (IsStaleShard(name)) paths.push_back(OutputPath(name));
    }
  }
  for (const std::string& path : paths) {
    if (unlink(path.c_str()) != 0 && errno != ENOENT) {
      return files::FileUnwritableError(path, errno);
    }
  }
  return absl::OkStatus();
}

absl::Status QuantizeFolder::Complete() const {
  if (options_.join) RemoveParts();
  absl::Status status = CopyFiles();
  if (status.ok() && options_.IsCompressed()) status = WriteConfig();
  if (status.ok() && !plan_.weight_map.empty()) status = WriteIndex();
  return status;
}

std::string QuantizeFolder::OutputPath(absl::string_view name) const {
  return files::PathIn(options_.output.path, name);
}

bool QuantizeFolder::IsStaleShard(const std::string& name) const {
  if (!absl::EndsWith(name, ".safetensors") || plan_.HasShard(name)) {
    return false;
  }
  const absl::StatusOr<files::SafetensorsReader> reader =
      files::SafetensorsReader::Open(OutputPath(name));
  return reader.ok() && !MetadataOf(*reader, kCommandKey).empty();
}

void QuantizeFolder::RemoveParts() const {
  for (const std::unique_ptr<Shard>& shard : plan_.shards) {
    for (const Part& part : FindParts(*shard)) {
      const std::string path = PartPath(*shard, part);
      const absl::StatusOr<files::SafetensorsReader> reader =
          files::SafetensorsReader::Open(path);
      if (reader.ok() && MetadataOf(*reader, kRunKey) == shard->run) {
        unlink(path.c_str());
      }
    }
  }
}

absl::Status QuantizeFolder::CopyFiles() const {
  if (!files::IsFolder(options_.input)) return absl::OkStatus();
  FilesBeside beside;
  beside.from = options_.input;
  beside.to = options_.output.path;
  beside.is_model = options_.IsCompressed();
  beside.force = options_.output.force;
  beside.is_replaced = [this](const std::string& name) {
    return name == files::kShardIndexName ||
           (options_.IsCompressed() && name == kModelConfigName) ||
           plan_.HasShard(name);
  };
  const absl::StatusOr<std::string> left_out = CopyFilesBeside(beside);
  if (!left_out.ok()) return left_out.status();
  if (!left_out->empty()) events_.Note(*left_out);
  return absl::OkStatus();
}

std::vector<std::string> QuantizeFolder::IgnoredModules() const {
  std::vector<std::string> modules;
  // Layers of experts. vLLM also looks up those that stay.
  std::set<std::string> quantized;
  std::set<std::string> kept;
  for (const auto& [name, outcome] : plan_.outcomes) {
    const files::FileTensor* const tensor = plan_.Find(name);
    if (tensor == nullptr) continue;
    (outcome.is_quantized ? quantized : kept).insert(LayerOfExperts(*tensor));
    const absl::string_view module = ModuleOf(name);
    if (outcome.is_quantized || module.empty()) continue;
    if (tensor->shape.size() == 2) modules.emplace_back(module);
  }
  for (const std::string& experts : kept) {
    if (experts.empty() || quantized.count(experts) > 0) continue;
    for (std::string& module : ModulesOfLayer(experts)) {
      if (absl::c_linear_search(modules, module)) continue;
      modules.push_back(std::move(module));
    }
  }
  std::sort(modules.begin(), modules.end(), NaturalLess);
  return modules;
}

absl::Status QuantizeFolder::WriteConfig() const {
  CompressedModel model(/*packs_all=*/false);
  for (const std::unique_ptr<Shard>& shard : plan_.shards) {
    model.Restore(shard->modules);
  }
  files::Json config = plan_.config;
  RemoveQuantization(&config);
  config["quantization_config"] =
      model.Config(IgnoredModules(), plan_.kv_cache);
  return WriteModelConfig(config, options_.output.path);
}

absl::Status QuantizeFolder::WriteIndex() const {
  std::map<std::string, std::string> weight_map;
  uint64_t total_bytes = 0;
  for (const std::unique_ptr<Shard>& shard : plan_.shards) {
    const absl::StatusOr<files::SafetensorsReader> written =
        files::SafetensorsReader::Open(shard->output_path);
    if (!written.ok()) return written.status();
    for (const files::FileTensor& tensor : written->tensors()) {
      weight_map[tensor.name] = shard->name;
      total_bytes += tensor.data.size();
    }
  }
  if (!plan_.index_fields.empty()) {
    events_.Warn(absl::StrCat(
        "of ", files::PathIn(options_.input, files::kShardIndexName),
        " not kept: ", NamesText(plan_.index_fields)));
  }
  return files::WriteShardIndex(options_.output.path, files::IfExists::kReplace,
                                weight_map, total_bytes,
                                plan_.total_parameters);
}

}  // namespace quantd::jobs
