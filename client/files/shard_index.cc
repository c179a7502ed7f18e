#include "client/files/shard_index.h"

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <system_error>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/files/atomic_file.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/files/mapped_file.h"
#include "nlohmann/json.hpp"

namespace quantd::files {
namespace {

// Extensions of files that are read.
constexpr absl::string_view kTensorExtensions[] = {".safetensors", ".npy",
                                                   ".gguf", ".onnx"};

// A name in the folder itself.
bool IsShardName(absl::string_view name) {
  return absl::EndsWith(name, ".safetensors") &&
         !absl::StrContains(name, '/') && !absl::StartsWith(name, ".") &&
         !absl::StrContains(name, '\0');
}

// Files of tensors in a folder and in the folders in it, by their paths from
// there, in order.
std::set<std::string> TensorFilesIn(const std::string& folder) {
  std::set<std::string> files;
  std::error_code error;
  const std::filesystem::recursive_directory_iterator end;
  for (std::filesystem::recursive_directory_iterator entry(
           folder, std::filesystem::directory_options::skip_permission_denied,
           error);
       !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (entry.depth() > 0 || absl::StartsWith(name, ".")) {
      entry.disable_recursion_pending();
    }
    if (absl::StartsWith(name, ".")) continue;
    for (const absl::string_view extension : kTensorExtensions) {
      if (!absl::EndsWithIgnoreCase(name, extension)) continue;
      files.insert(entry->path().lexically_relative(folder).string());
    }
  }
  return files;
}

// The index of a folder without an index file.
absl::StatusOr<ShardIndex> SingleShard(const std::string& folder) {
  ShardIndex index;
  index.shards.push_back(kSingleShardName);
  struct stat status;
  if (stat(PathIn(folder, kSingleShardName).c_str(), &status) == 0) {
    return index;
  }
  const std::set<std::string> files = TensorFilesIn(folder);
  return FileMalformedError(
      folder,
      absl::StrCat(
          "expected ", kSingleShardName, ", or ", kShardIndexName,
          ", which tells the files of a model, got ",
          files.empty()
              ? absl::StrCat("no ", absl::StrJoin(kTensorExtensions, ", "),
                             " file")
              : absl::StrCat(files.size(), " other files of tensors, such as ",
                             absl::Utf8SafeCHexEscape(*files.begin()),
                             "; to take one, give the file itself")));
}

// Notes what an index says besides the files of tensors and their size.
void NoteOthers(const nlohmann::json& document, ShardIndex* index) {
  for (const auto& [name, value] : document.items()) {
    if (name == "weight_map") continue;
    if (name != "metadata" || !value.is_object()) {
      index->other_fields.push_back(name);
      continue;
    }
    for (const auto& [key, entry] : value.items()) {
      if (key == "total_size") continue;
      if (key == "total_parameters" && entry.is_number_unsigned()) {
        index->total_parameters = entry.get<uint64_t>();
      } else {
        index->other_fields.push_back(absl::StrCat("metadata.", key));
      }
    }
  }
}

}  // namespace

bool IsFolder(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

std::string PathIn(absl::string_view folder, absl::string_view name) {
  return absl::StrCat(folder, absl::EndsWith(folder, "/") ? "" : "/", name);
}

absl::StatusOr<ShardIndex> ReadShardIndex(const std::string& folder) {
  const std::string path = PathIn(folder, kShardIndexName);
  struct stat status;
  if (stat(path.c_str(), &status) != 0) return SingleShard(folder);
  ShardIndex index;
  const absl::StatusOr<MappedFile> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  const absl::string_view text(
      reinterpret_cast<const char*>(file->bytes().data()),
      file->bytes().size());
  const auto document = ParsePythonJson<nlohmann::json>(text);
  if (!document.is_object()) {
    return FileMalformedError(path, ExpectedObjectText(text));
  }
  const auto weight_map = document.find("weight_map");
  if (weight_map == document.end() || !weight_map->is_object() ||
      weight_map->empty()) {
    return FileMalformedError(path, "expected a weight_map of tensors");
  }
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : weight_map->items()) {
    if (!shard.is_string() ||
        !IsShardName(shard.get_ref<const std::string&>())) {
      return FileMalformedError(
          path, absl::StrCat("weight_map[\"", absl::Utf8SafeCHexEscape(tensor),
                             "\"]: expected the name of a .safetensors file in "
                             "the folder"));
    }
    index.weight_map[tensor] = shard.get<std::string>();
    shards.insert(shard.get<std::string>());
  }
  index.shards.assign(shards.begin(), shards.end());
  NoteOthers(document, &index);
  return index;
}

absl::Status WriteShardIndex(
    const std::string& folder, IfExists if_exists,
    const std::map<std::string, std::string>& weight_map, uint64_t total_bytes,
    std::optional<uint64_t> total_parameters) {
  nlohmann::ordered_json metadata = {{"total_size", total_bytes}};
  if (total_parameters.has_value()) {
    metadata["total_parameters"] = *total_parameters;
  }
  const nlohmann::ordered_json document = {{"metadata", metadata},
                                           {"weight_map", weight_map}};
  absl::StatusOr<AtomicFile> file =
      AtomicFile::Create(PathIn(folder, kShardIndexName), if_exists);
  if (!file.ok()) return file.status();
  absl::Status appended = file->Append(absl::StrCat(
      document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace),
      "\n"));
  if (!appended.ok()) return appended;
  return file->Commit();
}

}  // namespace quantd::files
