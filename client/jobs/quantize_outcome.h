// The work of `quantctl quantize`: shards, the outcomes of their tensors, and
// what files tell later runs of those.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_OUTCOME_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_OUTCOME_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "client/files/atomic_file.h"
#include "client/files/gguf_types.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "client/jobs/codes_outcome.h"
#include "client/models/compressed_tensors.h"
#include "client/models/tensor_input.h"
#include "nlohmann/json.hpp"

namespace quantd::jobs {

// The outcome of one tensor.
struct Outcome : CodesOutcome {
  // A tensor that failed is copied, like one that was not selected.
  absl::Status status;
  bool is_quantized = false;
  uint64_t output_bytes = 0;
};

// By name.
using Outcomes = absl::flat_hash_map<std::string, Outcome>;

// Metadata of a shard, or of a part of one, for the runs after this one:
//
// The input's path and the options that decide on the codes: a run goes on in a
// folder whose shards have its own, and replaces no others.
constexpr char kCommandKey[] = "quantctl.command";
// Stands for what a shard was made from and how. A run with the same one keeps
// the shard of an earlier run. Absent where a tensor failed.
constexpr char kRunKey[] = "quantctl.run";
// XXH3 of its data, in hexadecimal; there where kRunKey is.
constexpr char kChecksumKey[] = "quantctl.checksum";
// Outcomes of the tensors of a shard: an object of their names, and of
// RecordOf.
constexpr char kTensorsKey[] = "quantctl.tensors";
// The schemes of a compressed-tensors shard.
constexpr char kModulesKey[] = "quantctl.modules";
// Its CompressedModel::rounded_count().
constexpr char kRoundedKey[] = "quantctl.rounded";

// Empty where the file does not have it.
std::string MetadataOf(const files::SafetensorsReader& file, const char* key);

// The value of kChecksumKey.
std::string ChecksumText(uint64_t checksum);
// Checks that a file of that path still has the data that its checksum is of;
// reads all of them. Errors: FILE_MALFORMED.
absl::Status CheckData(const files::SafetensorsReader& file,
                       const std::string& path);

// The record of a quantized tensor in its shard.
files::Json RecordOf(const Outcome& outcome);
// Nothing where the record is not sound.
std::optional<Outcome> ParseRecord(const files::Json& record);

// The records of modules in a compressed-tensors shard.
struct ModuleRecords {
  // Scheme by module.
  files::Json modules;
  int64_t rounded_count = 0;
};
// Nothing where they are not sound.
std::optional<ModuleRecords> ReadModules(const files::SafetensorsReader& file);

// One file of the input and what it becomes.
struct Shard {
  Shard(std::string from, TensorInput tensors)
      : input_path(std::move(from)), input(std::move(tensors)) {}

  std::string input_path;
  TensorInput input;
  // All files that its floats were made of, where it had codes.
  std::set<std::string> sources;
  // In a folder.
  std::string name;
  std::string output_path;
  std::vector<const files::FileTensor*> selected;
  // Tensors that become blocks of GGUF without the server, with their types.
  std::vector<std::pair<const files::FileTensor*, const files::GgufType*>>
      blocks;
  // Tensors for the caches of keys and values in a compressed-tensors shard,
  // whether their projections are quantized or not.
  std::vector<CompressedData> cache;
  // Values of kCommandKey and kRunKey.
  std::string command;
  std::string run;
  // For the file of the output.
  files::IfExists if_exists = files::IfExists::kRefuse;
  // The shard belongs to another part.
  bool is_skipped = false;
  // An earlier run has done it.
  bool is_kept = false;
  // It is in its place, kept or new.
  bool is_written = false;
  uint64_t file_bytes = 0;
  // Schemes of the modules of a compressed-tensors shard.
  files::Json modules = files::Json::object();
  // Tensors whose numbers its layout rounds.
  int64_t rounded_count = 0;
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_OUTCOME_H_
