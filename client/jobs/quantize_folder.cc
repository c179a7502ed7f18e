#include "client/jobs/quantize_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/cpp/text_file.h"
#include "client/files/atomic_file.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
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

// Extensions of files that hold the weights as they were.
constexpr absl::string_view kWeightExtensions[] = {
    ".safetensors", ".index.json", ".bin",  ".pt",        ".pth",
    ".ckpt",        ".gguf",       ".onnx", ".onnx_data", ".h5",
    ".msgpack",     ".npy",        ".npz",  ".tflite",    ".ot"};
constexpr size_t kCopiedAtOnce = 1 << 20;
constexpr size_t kMostFolderNames = 10;
// Folders within a folder that is copied.
constexpr int kMostFolderDepth = 8;

// Files that say how the input was quantized: they do not belong to the output.
constexpr absl::string_view kNotBeside[] = {
    "hf_quant_config.json", "quant_config.json", "quantize_config.json"};

// True if a file goes with the tensors of a model.
bool IsBeside(absl::string_view name) {
  return std::find(std::begin(kNotBeside), std::end(kNotBeside), name) ==
             std::end(kNotBeside) &&
         std::none_of(std::begin(kWeightExtensions),
                      std::end(kWeightExtensions),
                      [name](absl::string_view extension) {
                        return absl::EndsWith(name, extension);
                      });
}

// Fills `piece` from a file, as far as that goes.
size_t ReadPiece(std::ifstream* file, std::vector<char>* piece) {
  file->read(piece->data(), static_cast<std::streamsize>(piece->size()));
  return static_cast<size_t>(file->gcount());
}

bool HaveSameContents(const std::string& a, const std::string& b) {
  std::ifstream first(a, std::ios::binary);
  std::ifstream second(b, std::ios::binary);
  std::vector<char> ours(kCopiedAtOnce);
  std::vector<char> theirs(kCopiedAtOnce);
  while (first && second) {
    const size_t size = ReadPiece(&first, &ours);
    if (ReadPiece(&second, &theirs) != size ||
        !std::equal(ours.begin(), ours.begin() + static_cast<ptrdiff_t>(size),
                    theirs.begin())) {
      return false;
    }
  }
  return first.eof() && second.eof();
}

// Replaces what is there.
absl::Status CopyFile(const std::string& from, const std::string& to) {
  std::ifstream source(from, std::ios::binary);
  if (!source) return files::FileUnreadableError(from, errno);
  absl::StatusOr<files::AtomicFile> file =
      files::AtomicFile::Create(to, files::IfExists::kReplace);
  if (!file.ok()) return file.status();
  std::vector<char> piece(kCopiedAtOnce);
  while (source) {
    const size_t size = ReadPiece(&source, &piece);
    const absl::Status status =
        file->Append(absl::string_view(piece.data(), size));
    if (!status.ok()) return status;
  }
  return source.bad() ? files::FileUnreadableError(from, EIO) : file->Commit();
}

// True if the config.json of a folder is that of a compressed-tensors model.
bool IsOfCompressed(const std::string& folder) {
  const absl::StatusOr<files::Json> document =
      ReadConfig(folder, kModelConfigName);
  if (!document.ok()) return false;
  const files::Json* const config = FindQuantization(*document);
  return config != nullptr &&
         config->value("quant_method", files::Json()) == "compressed-tensors";
}

// Replaces what is there.
absl::Status WriteText(const std::string& path, absl::string_view text) {
  absl::StatusOr<files::AtomicFile> file =
      files::AtomicFile::Create(path, files::IfExists::kReplace);
  if (!file.ok()) return file.status();
  const absl::Status status = file->Append(text);
  return status.ok() ? file->Commit() : status;
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
  absl::Status status = CopyBesides();
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

absl::Status QuantizeFolder::CopyBesides() const {
  if (!files::IsFolder(options_.input)) return absl::OkStatus();
  std::vector<std::string> left_out;
  const std::set<std::string> of_modules = ModuleFolders();
  for (const std::string& name : FilesIn(options_.input)) {
    const bool is_replaced =
        name == files::kShardIndexName ||
        (options_.IsCompressed() && name == kModelConfigName) ||
        plan_.HasShard(name);
    if (name[0] == '.' || is_replaced) continue;
    const bool is_of_modules = of_modules.count(name) > 0;
    std::vector<std::string> paths = {name};
    if (options_.IsCompressed() && (is_of_modules || IsFolderBeside(name))) {
      paths = FilesOf(name);
    }
    for (const std::string& path : paths) {
      bool is_copied = false;
      if (options_.IsCompressed() && (is_of_modules || IsBeside(path))) {
        const absl::StatusOr<bool> copied = CopyBeside(path);
        if (!copied.ok()) return copied.status();
        is_copied = *copied;
      }
      if (!is_copied) left_out.push_back(path);
    }
  }
  if (left_out.empty()) return absl::OkStatus();
  const size_t count = left_out.size();
  if (count > kMostFolderNames) left_out.resize(kMostFolderNames);
  events_.Note(absl::StrCat(
      "of ", options_.input, " not copied: ", absl::StrJoin(left_out, ", "),
      count > kMostFolderNames
          ? absl::StrCat(" and ", CountText(count - kMostFolderNames), " more")
          : ""));
  return absl::OkStatus();
}

std::set<std::string> QuantizeFolder::ModuleFolders() const {
  const files::Json modules = files::ParseJson(
      internal::ReadTextFile(files::PathIn(options_.input, "modules.json"))
          .value_or(""));
  std::set<std::string> folders;
  if (!modules.is_array()) return folders;
  for (const files::Json& module : modules) {
    if (!module.is_object()) continue;
    const files::Json path = module.value("path", files::Json());
    if (!path.is_string()) continue;
    std::string name = path.get<std::string>();
    if (files::IsFolder(files::PathIn(options_.input, name))) {
      folders.insert(std::move(name));
    }
  }
  return folders;
}

std::vector<std::string> QuantizeFolder::FilesOf(const std::string& folder,
                                                 int depth) const {
  std::vector<std::string> paths;
  for (const std::string& name :
       FilesIn(files::PathIn(options_.input, folder))) {
    if (name[0] == '.') continue;
    const std::string path = files::PathIn(folder, name);
    struct stat info;
    const bool is_folder =
        lstat(files::PathIn(options_.input, path).c_str(), &info) == 0 &&
        S_ISDIR(info.st_mode);
    if (!is_folder || depth == kMostFolderDepth) {
      paths.push_back(path);
      continue;
    }
    for (std::string& inner : FilesOf(path, depth + 1)) {
      paths.push_back(std::move(inner));
    }
  }
  return paths;
}

bool QuantizeFolder::IsFolderBeside(const std::string& name) const {
  if (!files::IsFolder(files::PathIn(options_.input, name))) return false;
  const std::vector<std::string> paths = FilesOf(name);
  return !paths.empty() && absl::c_all_of(paths, IsBeside);
}

absl::StatusOr<bool> QuantizeFolder::CopyBeside(const std::string& name) const {
  const std::string from = files::PathIn(options_.input, name);
  struct stat info;
  if (stat(from.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return false;
  const std::string to = OutputPath(name);
  const std::string folder = to.substr(0, to.rfind('/'));
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return files::FileUnwritableError(folder, error.value());
  if (FileExists(to)) {
    if (HaveSameContents(from, to)) return true;
    if (!options_.output.force) return false;
  }
  const absl::Status status = CopyFile(from, to);
  if (!status.ok()) return status;
  return true;
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
  return WriteText(OutputPath(kModelConfigName),
                   absl::StrCat(files::PythonJsonText(config), "\n"));
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
