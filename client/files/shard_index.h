// Folders of safetensors files that make one model:
//
//   model.safetensors.index.json   {"metadata": {"total_size": bytes},
//                                   "weight_map": {tensor: file}}
//   model-00001-of-00002.safetensors ...
//
// or model.safetensors alone.

#ifndef QUANTD_CLIENT_FILES_SHARD_INDEX_H_
#define QUANTD_CLIENT_FILES_SHARD_INDEX_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/files/atomic_file.h"

namespace quantd::files {

constexpr char kShardIndexName[] = "model.safetensors.index.json";
constexpr char kSingleShardName[] = "model.safetensors";

struct ShardIndex {
  // Names of the files in the folder, each once, in order of name.
  std::vector<std::string> shards;
  // The file of every tensor; empty without an index.
  std::map<std::string, std::string> weight_map;
  // "metadata.total_parameters", if it is an integer.
  std::optional<uint64_t> total_parameters;
  // All others but "metadata.total_size", in order.
  std::vector<std::string> other_fields;
};

bool IsFolder(const std::string& path);

// The path of a file in a folder, whose own may end with "/".
std::string PathIn(absl::string_view folder, absl::string_view name);

// Errors: FILE_UNREADABLE, FILE_MALFORMED (also names that lead out of the
// folder, and neither of the two files above, as in the folder of a model that
// is being written: it tells the files of tensors that are there).
absl::StatusOr<ShardIndex> ReadShardIndex(const std::string& folder);

// Errors: FILE_EXISTS, FILE_UNWRITABLE.
absl::Status WriteShardIndex(
    const std::string& folder, IfExists if_exists,
    const std::map<std::string, std::string>& weight_map, uint64_t total_bytes,
    std::optional<uint64_t> total_parameters);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_SHARD_INDEX_H_
