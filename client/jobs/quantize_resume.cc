#include "client/jobs/quantize_resume.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/cpp/errors.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
#include "client/jobs/importance.h"
#include "client/jobs/output.h"
#include "client/jobs/quantize_outcome.h"
#include "client/jobs/quantize_parts.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/compressed_tensors.h"
#include "client/models/fused_experts.h"
#include "client/models/spec_syntax.h"
#include "client/models/tie_groups.h"
#include "nlohmann/json.hpp"
#include "xxhash.h"

namespace quantd::jobs {
namespace {

constexpr size_t kMostResumedNames = 10;

std::string TextHash(const std::string& text) {
  return absl::StrFormat("%016x", XXH3_64bits(text.data(), text.size()));
}

std::string SpecFingerprint(const SpecTemplate& spec) {
  return absl::StrCat(spec.spec.SerializeAsString(), " ",
                      static_cast<int>(spec.granularity.kind), " ",
                      spec.granularity.axis, " ", spec.granularity.group, " ",
                      absl::StrJoin(spec.granularity.block_size, ","));
}

// A text of all that decides on the codes, whatever is in the input now.
std::string CommandText(const QuantizeOptions& options, const SpecSet& specs) {
  std::string text = absl::StrCat(options.layout, "\n", options.nan_policy);
  for (const SpecSet::Override& entry : specs.overrides) {
    absl::StrAppend(&text, "\n", entry.pattern, "=",
                    SpecFingerprint(entry.spec));
  }
  if (specs.has_base)
    absl::StrAppend(&text, "\n=", SpecFingerprint(specs.base));
  if (options.IsCompressed()) {
    absl::StrAppend(&text, "\nactivations=", options.activations,
                    "\nkv-cache=", options.kv_cache);
    for (const std::string& ignore :
         options.ignore.value_or(std::vector<std::string>())) {
      absl::StrAppend(&text, "\nignore=", ignore);
    }
  }
  const RoundingOptions& rounding = options.rounding;
  if (rounding.IsCompensated()) {
    absl::StrAppend(&text, "\nrounding=", rounding.method, " ",
                    options.inputs.model, "@", options.inputs.revision, " ",
                    rounding.damping.has_value()
                        ? absl::StrFormat("%.17g", *rounding.damping)
                        : "",
                    " ", rounding.column_order);
  }
  if (!options.importance.empty()) absl::StrAppend(&text, "\nimportance");
  if (HasImportance(specs)) {
    absl::StrAppend(&text, "\nimportance=", options.inputs.model, "@",
                    options.inputs.revision);
  }
  if (options.ties.no_defaults) absl::StrAppend(&text, "\nno-ties");
  for (const std::string& tie : options.ties.patterns) {
    absl::StrAppend(&text, "\ntie=", tie);
  }
  const TensorFilter& filter = options.filter;
  return absl::StrCat(text, "\n", absl::StrJoin(filter.include, "\n+"), "\n",
                      absl::StrJoin(filter.exclude, "\n-"), "\n",
                      filter.all ? 0 : filter.min_rank);
}

void AppendData(const CompressedData& data, std::string* text) {
  absl::StrAppend(
      text, data.part.name, " ",
      absl::string_view(reinterpret_cast<const char*>(data.data.data()),
                        data.data.size()),
      "\n");
}

std::string RunText(const QuantizePlan& plan) {
  std::string text;
  for (const std::unique_ptr<Shard>& shard : plan.shards) {
    absl::StrAppend(&text, shard->run);
  }
  return text;
}

// A path whose last name need not be there, from the root on.
std::string PlaceOf(absl::string_view path) {
  while (path.size() > 1 && absl::ConsumeSuffix(&path, "/")) {
  }
  const size_t slash = path.rfind('/');
  const std::string folder = slash == absl::string_view::npos ? "."
                             : slash == 0                     ? "/"
                                          : std::string(path.substr(0, slash));
  char* const real_folder = realpath(folder.c_str(), nullptr);
  std::string place = absl::StrCat(
      real_folder == nullptr ? folder : real_folder, "/",
      path.substr(slash == absl::string_view::npos ? 0 : slash + 1));
  std::free(real_folder);
  return place;
}

// A text that tells the contents of a file from those of another time.
std::string FileText(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0) return "";
  return absl::StrCat(status.st_size, " ", status.st_mtim.tv_sec, " ",
                      status.st_mtim.tv_nsec, "\n");
}

bool HasAnyOf(const TieGroup& group, const Shard& shard) {
  return std::any_of(group.tensors.begin(), group.tensors.end(),
                     [&shard](const files::FileTensor* tensor) {
                       return shard.input.Find(tensor->name) == tensor;
                     });
}

absl::Status ExistsError(const Shard& shard, bool is_quantctls) {
  const absl::Status status = files::FileExistsError(shard.output_path);
  if (!is_quantctls) return status;
  return absl::AlreadyExistsError(absl::StrCat(
      status.message(),
      ", made from another input or with other options (--spec, --include, "
      "--exclude, --min-rank, --all, --layout, --activations, --kv-cache, "
      "--ignore, --nan-policy, --tie, --rounding, --inputs, --importance); "
      "give those of that run to go on with it, or another folder with -o"));
}

absl::Status OtherPartError(const std::string& path, absl::StatusCode code) {
  return absl::Status(
      code,
      absl::StrCat(
          code == absl::StatusCode::kAlreadyExists ? "FILE_EXISTS: "
                                                   : "FILE_INCOMPLETE: ",
          path,
          " was made from another input, with other options, or with other "
          "stored encodings or statistics of activations than these; all parts "
          "need the same ones"));
}

// Looks at the files of the output. Not thread-safe.
class Earlier {
 public:
  Earlier(const QuantizeOptions& options, QuantizePlan* plan)
      : options_(options), plan_(*plan) {}

  // Keeps or does again what an earlier run of the same command wrote. Replaces
  // nothing else without --force.
  absl::Status CheckFolder() {
    bool has_own = false;
    for (const std::unique_ptr<Shard>& shard : plan_.shards) {
      if (shard->is_skipped || !FileExists(shard->output_path)) continue;
      const absl::StatusOr<files::SafetensorsReader> written =
          files::SafetensorsReader::Open(shard->output_path);
      shard->is_kept =
          !options_.restart && written.ok() && Keep(*written, shard.get());
      shard->is_written = shard->is_kept;
      const std::string command =
          written.ok() ? MetadataOf(*written, kCommandKey) : "";
      const bool is_own =
          shard->is_kept || (written.ok() && command == shard->command);
      has_own = has_own || is_own;
      if (!is_own && !options_.output.force) {
        return ExistsError(*shard, !command.empty());
      }
      shard->if_exists = files::IfExists::kReplace;
    }
    const std::string index =
        files::PathIn(options_.output.path, files::kShardIndexName);
    if (plan_.weight_map.empty() && FileExists(index)) {
      return ArgumentInvalidError(
          absl::StrCat("expected a folder for a model in one file, but ", index,
                       " is there"));
    }
    if (!has_own && !options_.output.force && !plan_.targets.empty()) {
      if (FileExists(index)) return files::FileExistsError(index);
      const std::string config =
          files::PathIn(options_.output.path, kModelConfigName);
      if (options_.IsCompressed() && FileExists(config)) {
        return files::FileExistsError(config);
      }
    }
    return CheckOthers();
  }

  // Files of parts that are there are kept, or done again.
  absl::Status CheckParts() {
    for (Target& target : plan_.targets) {
      if (!target.part.has_value()) continue;
      if (target.shard->is_kept) {
        target.is_kept = true;
        continue;
      }
      if (!FileExists(target.path)) continue;
      const absl::StatusOr<files::SafetensorsReader> written =
          files::SafetensorsReader::Open(target.path);
      const bool is_own =
          written.ok() && MetadataOf(*written, kRunKey) == target.shard->run;
      if (!is_own && !options_.output.force) {
        return OtherPartError(target.path, absl::StatusCode::kAlreadyExists);
      }
      target.is_kept = !options_.restart && is_own &&
                       IsIntact(*written, target.path) &&
                       TakeRecords(target.tensors, *written);
      target.if_exists = files::IfExists::kReplace;
      target.shard->is_written = target.is_kept;
    }
    return absl::OkStatus();
  }

  // All parts of all shards are there and belong together.
  absl::Status CheckJoin() {
    std::vector<std::string> missing;
    for (size_t i = 0; i < plan_.shards.size(); ++i) {
      const absl::Status status = plan_.shards[i]->is_kept
                                      ? CheckKept(*plan_.shards[i])
                                      : CheckPartsOf(i, &missing);
      if (!status.ok()) return status;
    }
    if (missing.empty()) return absl::OkStatus();
    const size_t count = missing.size();
    if (count > kMostResumedNames) missing.resize(kMostResumedNames);
    return files::FileIncompleteError(
        options_.output.path,
        absl::StrCat(
            "not there: ", absl::StrJoin(missing, ", "),
            count > kMostResumedNames
                ? absl::StrCat(" and ", count - kMostResumedNames, " more")
                : "",
            "; run these parts, then join again"));
  }

 private:
  // No weights are to stay beside those of this run that loaders take for a
  // part of the model: they prefer model.safetensors to an index, and some read
  // all files, above all where there is no index. With --force those of
  // quantctl are taken away.
  absl::Status CheckOthers() const {
    for (const std::string& name : FilesIn(options_.output.path)) {
      const bool is_read =
          absl::EndsWith(name, ".safetensors") &&
          (plan_.weight_map.empty() || absl::StartsWith(name, "model"));
      if (!is_read || plan_.HasShard(name)) continue;
      const std::string path = files::PathIn(options_.output.path, name);
      const absl::StatusOr<files::SafetensorsReader> reader =
          files::SafetensorsReader::Open(path);
      if (!reader.ok() || MetadataOf(*reader, kCommandKey).empty()) {
        return ArgumentInvalidError(absl::StrCat(
            "expected a folder without weights of others, which loaders would "
            "take for a part of the model, but ",
            path, " is there"));
      }
      if (!options_.output.force) return files::FileExistsError(path);
    }
    return absl::OkStatus();
  }

  // A part that has a shard to itself wrote it in its place.
  static absl::Status CheckKept(const Shard& shard) {
    const absl::StatusOr<files::SafetensorsReader> reader =
        files::SafetensorsReader::Open(shard.output_path);
    if (!reader.ok()) return reader.status();
    return CheckData(*reader, shard.output_path);
  }

  // Checks the parts of shard number i.
  absl::Status CheckPartsOf(size_t i, std::vector<std::string>* missing) {
    const Shard& shard = *plan_.shards[i];
    const std::vector<Part> parts = FindParts(shard);
    if (parts.empty() && FileExists(shard.output_path)) {
      return OtherPartError(shard.output_path,
                            absl::StatusCode::kFailedPrecondition);
    }
    if (parts.empty()) {
      missing->push_back(shard.output_path);
      return absl::OkStatus();
    }
    const int64_t count = parts.front().count;
    if (parts.back().count != count) {
      return files::FileIncompleteError(
          shard.output_path,
          absl::StrCat("there are files of ", count, " parts and of ",
                       parts.back().count,
                       " parts; delete those that are of no use"));
    }
    const std::vector<std::vector<Share>> shares =
        ShareOut(plan_.shards, count);
    for (const Share& share : shares[i]) {
      const Part part = {share.part, count};
      const std::string path = PartPath(shard, part);
      if (!FileExists(path)) {
        missing->push_back(
            absl::StrCat("part ", PartText(part), " of ", shard.output_path));
        continue;
      }
      const absl::StatusOr<files::SafetensorsReader> reader =
          files::SafetensorsReader::Open(path);
      if (!reader.ok()) return reader.status();
      if (MetadataOf(*reader, kRunKey) != shard.run ||
          !TakeRecords(share.tensors, *reader)) {
        return OtherPartError(path, absl::StatusCode::kFailedPrecondition);
      }
    }
    return absl::OkStatus();
  }

  // Takes over what a file tells of the tensors that it has; false where it is
  // not all there.
  bool TakeRecords(const std::vector<const files::FileTensor*>& tensors,
                   const files::SafetensorsReader& written) {
    const files::Json records =
        files::ParseJson(MetadataOf(written, kTensorsKey));
    if (!records.is_object() || records.size() != tensors.size()) return false;
    std::map<std::string, Outcome> outcomes;
    for (const files::FileTensor* const tensor : tensors) {
      const auto found = records.find(tensor->name);
      const std::optional<Outcome> outcome =
          found == records.end() ? std::nullopt : ParseRecord(*found);
      if (!outcome.has_value() ||
          (options_.evaluate && !outcome->metrics.has_value())) {
        return false;
      }
      outcomes[tensor->name] = *outcome;
    }
    for (const auto& [name, outcome] : outcomes) plan_.outcomes[name] = outcome;
    return true;
  }

  // True if a file has the data that were written; reads all of them. Makes a
  // note where it does not.
  bool IsIntact(const files::SafetensorsReader& written,
                const std::string& path) {
    if (CheckData(written, path).ok()) return true;
    plan_.warnings.push_back(absl::StrCat(
        path, ": done again, as its data are not those that were written"));
    return false;
  }

  // True if an earlier run has written that shard; takes over what it tells.
  bool Keep(const files::SafetensorsReader& written, Shard* shard) {
    if (MetadataOf(written, kRunKey) != shard->run || plan_.AnyFailed(*shard)) {
      return false;
    }
    // A join fails of it instead.
    if (!options_.join && !IsIntact(written, shard->output_path)) {
      return false;
    }
    if (!TakeRecords(shard->selected, written)) return false;
    if (options_.IsCompressed()) {
      const std::optional<ModuleRecords> records = ReadModules(written);
      if (!records.has_value()) return false;
      shard->modules = records->modules;
      shard->rounded_count = records->rounded_count;
    }
    for (const files::FileTensor& tensor : shard->input.tensors()) {
      Outcome& outcome = plan_.outcomes[tensor.name];
      if (!outcome.is_quantized) outcome.output_bytes = tensor.data.size();
    }
    struct stat status;
    if (stat(shard->output_path.c_str(), &status) == 0) {
      shard->file_bytes = static_cast<uint64_t>(status.st_size);
    }
    return true;
  }

  const QuantizeOptions& options_;
  QuantizePlan& plan_;
};

}  // namespace

void SetKeys(const QuantizeOptions& options, const std::string& server,
             const QuantizePlan& plan, Shard* shard) {
  const std::string command = CommandText(options, plan.specs);
  char* const real_path = realpath(shard->input_path.c_str(), nullptr);
  shard->command = TextHash(
      absl::StrCat(real_path == nullptr ? "" : real_path, "\n", command));
  std::free(real_path);
  std::string text =
      absl::StrCat(command, "\n", options.name.model, "\n",
                   options.name.revision, "\n", options.evaluate, "\n",
                   // The place of the encodings.
                   options.store ? server : "", "\n");
  absl::StrAppend(&text, FileText(shard->input_path));
  for (const std::string& source : shard->sources) {
    absl::StrAppend(&text, "source ", source.substr(source.rfind('/') + 1), " ",
                    FileText(source));
  }
  for (const files::FileTensor* const tensor : shard->selected) {
    absl::StrAppend(&text, tensor->name, "\n",
                    plan.SpecOf(*tensor).SerializeAsString(), "\n");
    const auto inputs = plan.inputs.find(tensor->name);
    if (inputs == plan.inputs.end()) continue;
    for (const CompressedData& data : inputs->second.parts) {
      AppendData(data, &text);
    }
  }
  for (const CompressedData& data : shard->cache) AppendData(data, &text);
  for (const files::FileTensor* const tensor : shard->selected) {
    const auto found = plan.roundings.find(tensor->name);
    if (found == plan.roundings.end()) continue;
    absl::StrAppend(&text, "rounding ", tensor->name, " ",
                    found->second.rounding.inputs().tensor(), " ",
                    found->second.state, "\n");
  }
  for (const files::FileTensor* const tensor : shard->selected) {
    const auto found = plan.importance.states.find(tensor->name);
    if (found == plan.importance.states.end()) continue;
    absl::StrAppend(&text, "importance ", tensor->name, " ", found->second,
                    "\n");
  }
  // The shapes of both tensors of experts say how each lies.
  for (const FusedExperts& experts : plan.experts) {
    absl::StrAppend(&text, "experts ", experts.name, " ", experts.is_transposed,
                    "\n");
  }
  // The other tensors of a group decide on its scale too.
  for (const TieGroup& group : plan.ties) {
    if (!HasAnyOf(group, *shard)) continue;
    absl::StrAppend(&text, "tie ", group.label, "\n");
    for (const std::unique_ptr<Shard>& other : plan.shards) {
      if (HasAnyOf(group, *other)) {
        absl::StrAppend(&text, other->name, " ", FileText(other->input_path));
      }
    }
    for (const files::FileTensor* const tensor : group.tensors) {
      absl::StrAppend(&text, tensor->name, "\n");
    }
  }
  shard->run = TextHash(text);
}

std::string RunKey(const QuantizePlan& plan) { return TextHash(RunText(plan)); }

std::string OwnRunKey(const QuantizePlan& plan, const std::string& output) {
  // Nobody goes on with what went to a pipe.
  const std::string place =
      output == "-"
          ? absl::StrCat("- ", getpid(), " ", absl::GetCurrentTimeNanos())
          : PlaceOf(output);
  return TextHash(absl::StrCat(RunText(plan), "\n", place));
}

absl::Status FindEarlier(const QuantizeOptions& options, QuantizePlan* plan) {
  Earlier earlier(options, plan);
  absl::Status status;
  if (plan->is_folder) status = earlier.CheckFolder();
  if (status.ok() && plan->part.has_value()) status = earlier.CheckParts();
  if (status.ok() && options.join) status = earlier.CheckJoin();
  return status;
}

}  // namespace quantd::jobs
