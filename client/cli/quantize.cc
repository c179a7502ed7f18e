#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/compressed_tensors.h"
#include "client/cli/draft_revision.h"
#include "client/cli/gguf_output.h"
#include "client/cli/interrupt.h"
#include "client/cli/output.h"
#include "client/cli/plain_input.h"
#include "client/cli/printable.h"
#include "client/cli/progress.h"
#include "client/cli/quantize_outcome.h"
#include "client/cli/quantize_parts.h"
#include "client/cli/selection.h"
#include "client/cli/session.h"
#include "client/cli/streams.h"
#include "client/cli/table.h"
#include "client/cli/tensor_options.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/cpp/text_file.h"
#include "client/files/atomic_file.h"
#include "client/files/errors.h"
#include "client/files/gguf.h"
#include "client/files/gguf_builder.h"
#include "client/files/gguf_types.h"
#include "client/files/safetensors.h"
#include "client/files/safetensors_builder.h"
#include "client/files/shard_index.h"
#include "client/models/outer_maximum.h"
#include "client/models/quantized_layout.h"
#include "client/models/tensor_engine.h"
#include "client/models/tensor_input.h"
#include "nlohmann/json.hpp"
#include "xxhash.h"

namespace quantd::cli {
namespace {

constexpr char kConfigName[] = "config.json";
// Of the files beside a model's tensors that go with it: configurations,
// vocabularies, SentencePiece models and templates of chats.
constexpr absl::string_view kBesideExtensions[] = {".json", ".txt", ".model",
                                                   ".jinja"};
constexpr int64_t kMostBesideBytes = 64 << 20;
constexpr size_t kMostNames = 10;
constexpr char kGgufFileTypeKey[] = "general.file_type";
constexpr char kGgufVersionKey[] = "general.quantization_version";
// Of the layout of blocks.
constexpr uint32_t kGgufVersion = 2;

struct Options {
  std::string input;
  OutputOptions output;
  NameOptions name;
  SpecOptions spec;
  TensorFilter filter;
  std::string layout = "quantd";
  std::string metadata;
  bool store = false;
  std::string nan_policy;
  bool evaluate = false;
  bool requantize = false;
  bool restart = false;
  bool keep_going = false;
  StreamsOption streams = {2};
  bool has_part = false;
  std::string part;
  bool join = false;
};

// The proto's name of a --nan-policy; empty is the default.
v1::NanPolicy NanPolicyOf(absl::string_view text) {
  v1::NanPolicy policy = v1::NAN_POLICY_UNSPECIFIED;
  v1::NanPolicy_Parse(
      absl::StrCat("NAN_POLICY_", absl::AsciiStrToUpper(
                                      absl::StrReplaceAll(text, {{"-", "_"}}))),
      &policy);
  return policy;
}

// The input's path and the options that decide on the codes: a run goes on in a
// folder whose shards have its own, and replaces no others.
constexpr char kCommandKey[] = "quantctl.command";
// What a shard was made from and how; with the same, an earlier run's is kept.
// Not there where a tensor failed.
constexpr char kRunKey[] = "quantctl.run";
// What became of the tensors of a shard: an object of their names, and of
// RecordOf.
constexpr char kTensorsKey[] = "quantctl.tensors";
// The schemes of a compressed-tensors shard.
constexpr char kModulesKey[] = "quantctl.modules";
// Its CompressedModel::rounded_count().
constexpr char kRoundedKey[] = "quantctl.rounded";

// Data from which a file's header gets room before its text is known; below
// that, copying the file costs nothing.
constexpr uint64_t kRoomFromBytes = uint64_t{16} << 20;
// Room for base64 of v1::ErrorMetrics without a distribution.
constexpr size_t kMetricsRoom = 400;
// Behind all that is quantized.
constexpr uint64_t kFirstCopiedOrder = uint64_t{1} << 32;

// One file that a run writes: a shard, or a part of one.
struct Target {
  Shard* shard;
  // Those that are quantized.
  std::vector<const files::FileTensor*> tensors;
  std::string path;
  files::IfExists if_exists = files::IfExists::kRefuse;
  // Nothing for the whole shard.
  std::optional<Part> part = std::nullopt;
  bool is_kept = false;
};

// One tensor on its way into a target.
struct TensorTask {
  const files::FileTensor* tensor;
  uint64_t order;
  EncodingSpec spec;
  Outcome* outcome;
  std::vector<float> outer_maximum = {};
  // One of these, as the layout has it.
  std::unique_ptr<QuantizedPlace> place = nullptr;
  std::unique_ptr<CompressedModel> compressed = nullptr;
  const files::GgufType* gguf = nullptr;
  // Of gguf: where it is in the file, and whether a minimum was rounded.
  size_t gguf_index = 0;
  bool is_rounded = false;
  // Of `compressed`: where its parts lie, as far as that is known before.
  CompressedPlan plan = {};
  std::vector<size_t> part_indices = {};
};

// Names in a folder, in order; none where it cannot be read.
std::vector<std::string> FilesIn(const std::string& folder) {
  std::vector<std::string> names;
  DIR* const opened = opendir(folder.c_str());
  if (opened == nullptr) return names;
  while (const dirent* const entry = readdir(opened)) {
    names.emplace_back(entry->d_name);
  }
  closedir(opened);
  std::sort(names.begin(), names.end());
  return names;
}

// Whether a config.json is of a compressed-tensors model.
bool IsOfCompressed(const std::string& path) {
  const Json document =
      Json::parse(internal::ReadTextFile(path).value_or(""), nullptr,
                  /*allow_exceptions=*/false);
  if (!document.is_object()) return false;
  const auto config = document.find("quantization_config");
  return config != document.end() && config->is_object() &&
         config->value("quant_method", Json()) == "compressed-tensors";
}

std::string TextHash(const std::string& text) {
  return absl::StrFormat("%016x", XXH3_64bits(text.data(), text.size()));
}

bool FileExists(const std::string& path) {
  struct stat status;
  return lstat(path.c_str(), &status) == 0;
}

using TensorSet = absl::flat_hash_set<std::string>;

// One run of `quantctl quantize`. Not thread-safe.
class Quantizer {
 public:
  Quantizer(const Options& options, Session* session)
      : options_(options),
        session_(*session),
        is_folder_(files::IsFolder(options.input) || IsCompressed()) {}

  void Run() {
    absl::StatusOr<SpecSet> specs = options_.spec.ParseSet();
    if (!specs.ok()) return session_.FailUsage(specs.status());
    specs_ = *std::move(specs);
    absl::Status status = ParsePartOptions();
    status.Update(CheckGgufOptions());
    if (!status.ok()) return session_.FailUsage(status);
    status = Plan();
    if (!status.ok()) return FailEarly(status, &session_);
    // A tensor that cannot be done ends the run before it costs anything.
    if (!AnyFailed() || options_.keep_going) {
      if (!options_.join || options_.store) {
        absl::StatusOr<Connections> connections =
            options_.streams.Connect(session_);
        if (!connections.ok()) return session_.FailUsage(connections.status());
        connections_.emplace(*std::move(connections));
        engine_.emplace(connections_->clients());
      }
      if (options_.store) {
        draft_.emplace(options_.name, RunKey());
        status = CheckDraft();
        if (!status.ok()) {
          ReportRefused({status});
          return session_.Fail(status);
        }
      }
      status = Write();
      // A part alone is not what readers are to see.
      if (status.ok() && is_complete_ && draft_.has_value() &&
          !part_.has_value()) {
        status = Publish();
      }
    }
    if (!status.ok()) {
      ReportRefused({status});
      session_.Fail(status);
      return ReportUnfinished();
    }
    Report();
  }

 private:
  bool IsCompressed() const { return options_.layout != "quantd"; }
  bool IsGguf() const {
    return !IsCompressed() && IsGgufPath(options_.output.path);
  }

  // What GGUF has no place for, and what has a place nowhere else.
  // Errors: ARGUMENT_INVALID.
  absl::Status CheckGgufOptions() const {
    if (!IsGguf()) {
      return options_.metadata.empty()
                 ? absl::OkStatus()
                 : ArgumentInvalidError(
                       "expected --metadata with a .gguf file as the output");
    }
    if (is_folder_) {
      return ArgumentInvalidError(
          "expected a file as the input of a .gguf file, got a folder");
    }
    if (options_.has_part || options_.join || options_.keep_going) {
      return ArgumentInvalidError(
          "expected a .gguf file without --part, --join and --keep-going");
    }
    return absl::OkStatus();
  }

  // What the encodings of all shards, and of all parts, are made from.
  std::string RunKey() const {
    std::string text;
    for (const std::unique_ptr<Shard>& shard : shards_) {
      absl::StrAppend(&text, shard->run);
    }
    return TextHash(text);
  }

  // Before a run costs anything: whether the caller may do what Publish does,
  // and whether the encodings of what is kept can be published.
  // Errors: of the client, FILE_INCOMPLETE.
  absl::Status CheckDraft() const {
    const absl::StatusOr<TensorSet> drafted =
        draft_->Tensors(connections_->first());
    if (!drafted.ok()) return drafted.status();
    if (part_.has_value() || !IsCompressed()) return absl::OkStatus();
    const absl::StatusOr<bool> is_published = IsPublished(*drafted);
    if (!is_published.ok()) return is_published.status();
    for (const std::unique_ptr<Shard>& shard : shards_) {
      if (*is_published || !(shard->is_kept || options_.join)) continue;
      const std::vector<std::string> missing = Missing(*shard, *drafted);
      if (!missing.empty()) return LackingError(*shard, missing.size());
    }
    return absl::OkStatus();
  }

  // Whether an earlier run has done it all.
  absl::StatusOr<bool> IsPublished(const TensorSet& drafted) const {
    if (!drafted.empty() ||
        !std::all_of(shards_.begin(), shards_.end(),
                     [](const auto& shard) { return shard->is_kept; })) {
      return false;
    }
    const absl::StatusOr<TensorSet> there =
        draft_->TargetTensors(connections_->first());
    if (!there.ok()) return there.status();
    return std::all_of(shards_.begin(), shards_.end(), [&](const auto& shard) {
      return Missing(*shard, *there).empty();
    });
  }

  // The tensors of a shard whose encodings are not there.
  std::vector<std::string> Missing(const Shard& shard,
                                   const TensorSet& there) const {
    std::vector<std::string> missing;
    for (const files::FileTensor* const tensor : shard.selected) {
      if (outcomes_.at(tensor->name).is_quantized &&
          !there.contains(tensor->name)) {
        missing.push_back(tensor->name);
      }
    }
    return missing;
  }

  absl::Status LackingError(const Shard& shard, size_t count) const {
    return files::FileIncompleteError(
        shard.output_path,
        absl::StrCat("revision ", draft_->revision(),
                     " lacks the encodings of ", CountText(count),
                     " of its tensors, which are not read back from such a "
                     "file; ",
                     options_.join ? "do its parts again with "
                                   : "quantize it again with ",
                     is_folder_ ? "--restart" : "--force"));
  }

  // Makes the encodings of all shards visible.
  absl::Status Publish() {
    Client* const client = connections_->first();
    const absl::StatusOr<TensorSet> drafted = draft_->Tensors(client);
    if (!drafted.ok()) return drafted.status();
    const absl::StatusOr<bool> is_published = IsPublished(*drafted);
    if (!is_published.ok()) return is_published.status();
    absl::Status status;
    if (!*is_published) {
      for (const std::unique_ptr<Shard>& shard : shards_) {
        const std::vector<std::string> missing = Missing(*shard, *drafted);
        if (missing.empty()) continue;
        is_lacking_ = true;
        status = PutMissing(*shard, missing, client);
        if (!status.ok()) return status;
      }
      is_lacking_ = false;
      status = draft_->Publish(client);
    }
    is_published_ = status.ok();
    interrupt_note_.Set(UnfinishedText());
    return status;
  }

  // Puts encodings into the draft from the file that was written: those that an
  // earlier run published, or that somebody deleted.
  absl::Status PutMissing(const Shard& shard,
                          const std::vector<std::string>& missing,
                          Client* client) const {
    if (IsCompressed() || IsGguf() || options_.output.IsStandardOutput()) {
      return LackingError(shard, missing.size());
    }
    const absl::StatusOr<TensorInput> written =
        TensorInput::Open(shard.output_path);
    if (!written.ok()) return written.status();
    for (const std::string& name : missing) {
      const auto json =
          written->metadata().find(absl::StrCat(kQuantizedKeyPrefix, name));
      const absl::StatusOr<QuantizedTensor> quantized =
          ReadQuantized(*written, shard.output_path, name,
                        json == written->metadata().end() ? "" : json->second);
      if (!quantized.ok()) return quantized.status();
      Encoding encoding = quantized->Whole();
      // As the server sets it where it knows the shape.
      const std::vector<int64_t> block_size(encoding.block_size().begin(),
                                            encoding.block_size().end());
      const absl::StatusOr<std::vector<int64_t>> scale_shape =
          ScaleShape(quantized->shape, block_size);
      if (!scale_shape.ok()) return scale_shape.status();
      encoding.mutable_scale_shape()->Assign(scale_shape->begin(),
                                             scale_shape->end());
      const absl::Status status =
          client->PutEncoding(draft_->NameOf(name), encoding, "").status();
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Errors: ARGUMENT_INVALID.
  absl::Status ParsePartOptions() {
    if (!options_.has_part && !options_.join) return absl::OkStatus();
    if (options_.has_part) {
      const absl::StatusOr<Part> part = ParsePart(options_.part);
      if (!part.ok()) return part.status();
      part_ = *part;
    }
    if (part_.has_value() && options_.join) {
      return ArgumentInvalidError("expected --part or --join, got both");
    }
    if (options_.keep_going || options_.output.IsStandardOutput()) {
      return ArgumentInvalidError(
          "expected --part and --join without --keep-going and without "
          "standard output");
    }
    return absl::OkStatus();
  }

  bool AnyFailed() const {
    return std::any_of(
        outcomes_.begin(), outcomes_.end(),
        [](const auto& entry) { return !entry.second.status.ok(); });
  }

  bool AnyFailed(const Shard& shard) {
    return std::any_of(shard.input.tensors().begin(),
                       shard.input.tensors().end(),
                       [this](const files::FileTensor& tensor) {
                         return !outcomes_[tensor.name].status.ok();
                       });
  }

  // Opens all inputs and decides what is to be done with each, and what is
  // there already. Nothing has been sent or written.
  absl::Status Plan() {
    absl::Status status = OpenInputs();
    if (!status.ok()) return status;
    status = CheckOutput();
    if (!status.ok()) return status;
    status = SelectAll();
    if (!status.ok()) return status;
    for (const std::unique_ptr<Shard>& shard : shards_) SetKeys(shard.get());
    if (part_.has_value()) shares_ = ShareOut(shards_, part_->count);
    status = MakeTargets();
    if (status.ok() && is_folder_) status = CheckFolder();
    if (status.ok() && part_.has_value()) status = CheckParts();
    if (status.ok() && options_.join) status = CheckJoin();
    return status.ok() ? CheckUnread() : status;
  }

  // What this run writes: all shards, or a part of them.
  absl::Status MakeTargets() {
    for (size_t i = 0; i < shards_.size(); ++i) {
      Shard* const shard = shards_[i].get();
      if (!part_.has_value()) {
        targets_.push_back({shard, shard->selected, shard->output_path});
        continue;
      }
      const std::vector<Share>& shares = shares_[i];
      const auto own = std::find_if(
          shares.begin(), shares.end(),
          [this](const Share& share) { return share.part == part_->index; });
      shard->is_skipped = own == shares.end();
      if (shard->is_skipped) continue;
      // Of a shard of its own also what is not quantized. A single file is
      // there once it is joined, never before.
      if (shares.size() == 1 && is_folder_) {
        targets_.push_back({shard, shard->selected, shard->output_path});
      } else {
        targets_.push_back({shard, own->tensors, PartPath(*shard, *part_),
                            files::IfExists::kRefuse, part_});
        scope_.insert(own->tensors.begin(), own->tensors.end());
        continue;
      }
      for (const files::FileTensor& tensor : shard->input.tensors()) {
        scope_.insert(&tensor);
      }
    }
    return absl::OkStatus();
  }

  // Whether this run has to do with the tensor.
  bool IsInScope(const files::FileTensor& tensor) const {
    return !part_.has_value() || scope_.contains(&tensor);
  }

  // Files of parts that are there are kept, or done again.
  absl::Status CheckParts() {
    for (Target& target : targets_) {
      if (!target.part.has_value()) continue;
      if (target.shard->is_kept) {
        target.is_kept = true;
        continue;
      }
      if (!FileExists(target.path)) continue;
      const absl::StatusOr<files::SafetensorsReader> written =
          files::SafetensorsReader::Open(target.path);
      const bool is_own =
          written.ok() && Metadata(*written, kRunKey) == target.shard->run;
      if (!is_own && !options_.output.force) {
        return OtherPartError(target.path, absl::StatusCode::kAlreadyExists);
      }
      target.is_kept = !options_.restart && is_own &&
                       TakeRecords(*target.shard, target.tensors, *written);
      target.if_exists = files::IfExists::kReplace;
      target.shard->is_written = target.is_kept;
    }
    return absl::OkStatus();
  }

  static absl::Status OtherPartError(const std::string& path,
                                     absl::StatusCode code) {
    return absl::Status(
        code,
        absl::StrCat(
            code == absl::StatusCode::kAlreadyExists ? "FILE_EXISTS: "
                                                     : "FILE_INCOMPLETE: ",
            path,
            " was made from another input or with other options than these; "
            "all parts need the same ones"));
  }

  // All parts of all shards are there and belong together.
  absl::Status CheckJoin() {
    std::vector<std::string> missing;
    for (size_t i = 0; i < shards_.size(); ++i) {
      const Shard& shard = *shards_[i];
      if (shard.is_kept) continue;
      const std::vector<Part> parts = FindParts(shard);
      if (parts.empty()) {
        missing.push_back(shard.output_path);
        continue;
      }
      const int64_t count = parts.front().count;
      if (parts.back().count != count) {
        return files::FileIncompleteError(
            shard.output_path,
            absl::StrCat("there are files of ", count, " parts and of ",
                         parts.back().count,
                         " parts; delete those that are of no use"));
      }
      const std::vector<std::vector<Share>> shares = ShareOut(shards_, count);
      for (const Share& share : shares[i]) {
        const Part part = {share.part, count};
        const std::string path = PartPath(shard, part);
        if (!FileExists(path)) {
          missing.push_back(
              absl::StrCat("part ", PartText(part), " of ", shard.output_path));
          continue;
        }
        absl::StatusOr<files::SafetensorsReader> reader =
            files::SafetensorsReader::Open(path);
        if (!reader.ok()) return reader.status();
        if (Metadata(*reader, kRunKey) != shard.run ||
            !TakeRecords(shard, share.tensors, *reader)) {
          return OtherPartError(path, absl::StatusCode::kFailedPrecondition);
        }
      }
    }
    if (missing.empty()) return absl::OkStatus();
    const size_t count = missing.size();
    if (count > kMostNames) missing.resize(kMostNames);
    return files::FileIncompleteError(
        options_.output.path,
        absl::StrCat("not there: ", absl::StrJoin(missing, ", "),
                     count > kMostNames
                         ? absl::StrCat(" and ", count - kMostNames, " more")
                         : "",
                     "; run these parts, then join again"));
  }

  // No tensor is to be missing from the output because its type is not read.
  absl::Status CheckUnread() {
    size_t unread_count = 0;
    for (const std::unique_ptr<Shard>& shard : shards_) {
      ReportUnread(shard->input, &session_);
      unread_count += shard->input.unread().size();
    }
    if (unread_count == 0 || options_.keep_going) return absl::OkStatus();
    return files::FileUnsupportedError(
        options_.input,
        absl::StrCat(CountText(unread_count),
                     " tensors are of types that are not read; --keep-going "
                     "leaves them out"));
  }

  absl::Status OpenInputs() {
    std::vector<std::string> names = {files::kSingleShardName};
    const bool reads_folder = files::IsFolder(options_.input);
    if (reads_folder) {
      absl::StatusOr<files::ShardIndex> index =
          files::ReadShardIndex(options_.input);
      if (!index.ok()) return index.status();
      weight_map_ = std::move(index->weight_map);
      names = std::move(index->shards);
    }
    for (const std::string& name : names) {
      std::string path =
          reads_folder ? files::PathIn(options_.input, name) : options_.input;
      absl::StatusOr<TensorInput> input = TensorInput::Open(path);
      if (!input.ok()) return input.status();
      shards_.push_back(
          std::make_unique<Shard>(std::move(path), *std::move(input)));
      shards_.back()->output_path =
          is_folder_ ? OutputPath(name) : options_.output.path;
      shards_.back()->name = name;
      absl::Status status = CheckPlain(shards_.back()->input, options_.input);
      if (status.ok()) status = CheckBlocks(shards_.back()->input);
      if (!status.ok()) return status;
    }
    return CheckIndex();
  }

  // Blocks of GGUF have lost something already.
  absl::Status CheckBlocks(const TensorInput& input) const {
    if (options_.requantize || input.blocks().empty()) return absl::OkStatus();
    const auto& [name, blocks] = *input.blocks().begin();
    return files::FileUnsupportedError(
        options_.input,
        absl::StrCat("expected plain tensors, but ", files::QuotedName(name),
                     " is quantized already, to ", blocks.type->name,
                     "; begin with the model that it was made from, or take "
                     "--requantize, which quantizes what `quantctl "
                     "dequantize` makes of it"));
  }

  // The index must not name what is nowhere.
  absl::Status CheckIndex() {
    for (const auto& [tensor, name] : weight_map_) {
      const auto has_tensor =
          [&tensor = tensor](const std::unique_ptr<Shard>& shard) {
            return shard->input.Find(tensor) != nullptr;
          };
      if (std::none_of(shards_.begin(), shards_.end(), has_tensor)) {
        return files::FileMalformedError(
            options_.input, absl::StrCat("the index has tensor \"", tensor,
                                         "\" in ", name, ", where it is not"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckOutput() {
    std::vector<std::string> inputs = {options_.input};
    if (is_folder_) return options_.output.CheckFolder(inputs);
    shards_[0]->if_exists = options_.output.if_exists();
    if (!options_.metadata.empty()) inputs.push_back(options_.metadata);
    return options_.output.CheckFile(
        inputs, IsGguf() ? ".gguf" : ".safetensors", &session_);
  }

  absl::Status SelectAll() {
    std::vector<const TensorInput*> inputs;
    for (const std::unique_ptr<Shard>& shard : shards_) {
      inputs.push_back(&shard->input);
    }
    const absl::StatusOr<std::vector<const files::FileTensor*>> selected =
        SelectTensors(inputs, options_.filter, &specs_);
    if (!selected.ok()) return selected.status();
    const absl::flat_hash_set<const files::FileTensor*> is_selected(
        selected->begin(), selected->end());
    for (const std::unique_ptr<Shard>& shard : shards_) {
      for (const files::FileTensor& tensor : shard->input.tensors()) {
        const auto [outcome, is_new] = outcomes_.try_emplace(tensor.name);
        if (!is_new) {
          return files::FileMalformedError(
              options_.input, absl::StrCat("tensor \"", tensor.name,
                                           "\" is in two of its files"));
        }
        if (!is_selected.contains(&tensor)) {
          if (IsGguf()) {
            outcome->second.status =
                GgufEntryOf(shard->input, tensor, nullptr).status();
          }
          continue;
        }
        if (!IsGguf()) {
          outcome->second.status = CheckNames(shard->input, tensor.name);
        }
        const absl::StatusOr<EncodingSpec> spec =
            specs_.For(tensor.name)->SpecOf(tensor.shape);
        outcome->second.status.Update(spec.status());
        if (spec.ok() && IsCompressed()) {
          outcome->second.status.Update(CheckGroups(*spec, tensor.shape));
        }
        if (spec.ok() && IsGguf()) {
          const absl::Status status =
              GgufEntryOf(shard->input, tensor, &*spec).status();
          // What the command says is wrong of more than this tensor.
          if (absl::IsInvalidArgument(status)) return status;
          outcome->second.status.Update(status);
        }
        if (outcome->second.status.ok()) shard->selected.push_back(&tensor);
      }
    }
    return absl::OkStatus();
  }

  // What a tensor is in a GGUF file, quantized or, without a spec, as it is.
  absl::StatusOr<files::GgufEntry> GgufEntryOf(const TensorInput& input,
                                               const files::FileTensor& tensor,
                                               const EncodingSpec* spec) const {
    files::GgufEntry entry = {tensor.name, nullptr, tensor.shape};
    const auto blocks = input.blocks().find(tensor.name);
    if (spec != nullptr) {
      entry.type = GgufTypeOf(*spec, tensor.shape);
      if (entry.type == nullptr) {
        return ArgumentInvalidError(absl::StrCat(
            "expected a spec that has a type in GGUF for ",
            files::QuotedName(tensor.name), ": one of ", GgufSpecs()));
      }
    } else if (blocks != input.blocks().end()) {
      entry.type = blocks->second.type;
    } else {
      entry.type = files::FindGgufType(tensor.dtype);
    }
    if (entry.type == nullptr) {
      return files::FileUnsupportedError(
          options_.output.path,
          absl::StrCat("tensor ", files::QuotedName(tensor.name),
                       ": GGUF has no type for ", DtypeName(tensor.dtype)));
    }
    const absl::Status status =
        files::CheckGgufEntry(options_.output.path, entry);
    if (!status.ok()) return status;
    return entry;
  }

  // The names that a quantized tensor takes must be free.
  static absl::Status CheckNames(const TensorInput& input,
                                 const std::string& name) {
    for (const absl::string_view suffix : kSuffixes) {
      const std::string taken = absl::StrCat(name, suffix);
      if (input.Find(taken) != nullptr) {
        return ArgumentInvalidError(
            absl::StrCat("the file has a tensor \"", taken, "\" of its own"));
      }
    }
    return absl::OkStatus();
  }

  // What an earlier run of the same command wrote is kept, or done again; of
  // anything else nothing is replaced without --force.
  absl::Status CheckFolder() {
    bool has_own = false;
    for (const std::unique_ptr<Shard>& shard : shards_) {
      if (shard->is_skipped || !FileExists(shard->output_path)) continue;
      const absl::StatusOr<files::SafetensorsReader> written =
          files::SafetensorsReader::Open(shard->output_path);
      shard->is_kept =
          !options_.restart && written.ok() && Keep(*shard, *written);
      shard->is_written = shard->is_kept;
      const bool is_own =
          shard->is_kept ||
          (written.ok() && Metadata(*written, kCommandKey) == shard->command);
      has_own = has_own || is_own;
      if (!is_own && !options_.output.force) {
        return ExistsError(
            *shard, written.ok() && !Metadata(*written, kCommandKey).empty());
      }
      shard->if_exists = files::IfExists::kReplace;
    }
    const std::string index = OutputPath(files::kShardIndexName);
    if (weight_map_.empty() && FileExists(index)) {
      return ArgumentInvalidError(
          absl::StrCat("expected a folder for a model in one file, but ", index,
                       " is there"));
    }
    if (has_own || options_.output.force || targets_.empty()) {
      return absl::OkStatus();
    }
    if (FileExists(index)) return files::FileExistsError(index);
    const std::string config = OutputPath(kConfigName);
    return IsCompressed() && FileExists(config) ? files::FileExistsError(config)
                                                : absl::OkStatus();
  }

  static absl::Status ExistsError(const Shard& shard, bool is_quantctls) {
    const absl::Status status = files::FileExistsError(shard.output_path);
    if (!is_quantctls) return status;
    return absl::AlreadyExistsError(absl::StrCat(
        status.message(),
        ", made from another input or with other options (--spec, --include, "
        "--exclude, --min-rank, --all, --layout, --nan-policy); give those of "
        "that run to go "
        "on with it, or another folder with -o"));
  }

  std::string OutputPath(absl::string_view name) const {
    return files::PathIn(options_.output.path, name);
  }

  static std::string Metadata(const files::SafetensorsReader& reader,
                              const char* key) {
    const auto found = reader.metadata().find(key);
    return found == reader.metadata().end() ? "" : found->second;
  }

  static std::string SpecText(const SpecTemplate& spec) {
    return absl::StrCat(spec.spec.SerializeAsString(), " ",
                        static_cast<int>(spec.granularity.kind), " ",
                        spec.granularity.axis, " ", spec.granularity.group, " ",
                        absl::StrJoin(spec.granularity.block_size, ","));
  }

  // What decides on the codes, whatever is in the input now.
  std::string CommandText() const {
    std::string text = absl::StrCat(options_.layout, "\n", options_.nan_policy);
    for (const SpecSet::Override& entry : specs_.overrides) {
      absl::StrAppend(&text, "\n", entry.pattern, "=", SpecText(entry.spec));
    }
    if (specs_.has_base) absl::StrAppend(&text, "\n=", SpecText(specs_.base));
    const TensorFilter& filter = options_.filter;
    return absl::StrCat(text, "\n", absl::StrJoin(filter.include, "\n+"), "\n",
                        absl::StrJoin(filter.exclude, "\n-"), "\n",
                        filter.all ? 0 : filter.min_rank);
  }

  void SetKeys(Shard* shard) const {
    char* const real_path = realpath(shard->input_path.c_str(), nullptr);
    shard->command = TextHash(absl::StrCat(
        real_path == nullptr ? "" : real_path, "\n", CommandText()));
    std::free(real_path);
    std::string text =
        absl::StrCat(CommandText(), "\n", options_.name.model, "\n",
                     options_.name.revision, "\n", options_.evaluate, "\n",
                     // Where the encodings are.
                     options_.store ? session_.server : "", "\n");
    struct stat status;
    if (stat(shard->input_path.c_str(), &status) == 0) {
      absl::StrAppend(&text, status.st_size, " ", status.st_mtim.tv_sec, " ",
                      status.st_mtim.tv_nsec, "\n");
    }
    for (const files::FileTensor* const tensor : shard->selected) {
      absl::StrAppend(
          &text, tensor->name, "\n",
          specs_.For(tensor->name)->SpecOf(tensor->shape)->SerializeAsString(),
          "\n");
    }
    shard->run = TextHash(text);
  }

  // Takes over what a file tells of the tensors that it has; false where it is
  // not all there.
  bool TakeRecords(const Shard& shard,
                   const std::vector<const files::FileTensor*>& tensors,
                   const files::SafetensorsReader& written) {
    const Json records = Json::parse(Metadata(written, kTensorsKey), nullptr,
                                     /*allow_exceptions=*/false);
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
    for (const auto& [name, outcome] : outcomes) outcomes_[name] = outcome;
    return true;
  }

  // Whether an earlier run has written that shard; takes over what it tells.
  bool Keep(const Shard& shard, const files::SafetensorsReader& written) {
    if (Metadata(written, kRunKey) != shard.run || AnyFailed(shard)) {
      return false;
    }
    if (!TakeRecords(shard, shard.selected, written)) return false;
    if (IsCompressed()) {
      const Json modules = Json::parse(Metadata(written, kModulesKey), nullptr,
                                       /*allow_exceptions=*/false);
      int64_t rounded_count = 0;
      if (!modules.is_object() ||
          !absl::SimpleAtoi(Metadata(written, kRoundedKey), &rounded_count)) {
        return false;
      }
      modules_[&shard] = modules;
      rounded_count_ += rounded_count;
    }
    for (const files::FileTensor& tensor : shard.input.tensors()) {
      Outcome& outcome = outcomes_[tensor.name];
      if (!outcome.is_quantized) outcome.output_bytes = tensor.data.size();
    }
    struct stat status;
    if (stat(shard.output_path.c_str(), &status) == 0) {
      file_bytes_ += static_cast<uint64_t>(status.st_size);
    }
    return true;
  }

  // Errors end the run and leave the shards that are complete; so does a tensor
  // that fails, unless the run is to keep going.
  absl::Status Write() {
    if (is_folder_) {
      made_folder_ = mkdir(options_.output.path.c_str(), 0777) == 0;
      if (!made_folder_ && errno != EEXIST) {
        return files::FileUnwritableError(options_.output.path, errno);
      }
    }
    interrupt_note_.Set(UnfinishedText());
    uint64_t total_bytes = 0;
    for (const Target& target : targets_) {
      if (target.is_kept || target.shard->is_kept) continue;
      for (const files::FileTensor* const tensor : target.tensors) {
        total_bytes += tensor->data.size();
      }
    }
    {
      Progress progress(total_bytes, !session_.quiet);
      for (const Target& target : targets_) {
        if (target.is_kept || target.shard->is_kept) continue;
        absl::Status status = WriteTarget(target, &progress);
        if (!status.ok() || !target.shard->is_written) {
          // A folder with nothing in it is of no use.
          if (made_folder_) rmdir(options_.output.path.c_str());
          return status;
        }
      }
    }
    if (part_.has_value()) {
      is_complete_ = true;
      return absl::OkStatus();
    }
    if (options_.join) RemoveParts();
    absl::Status status = CopyBesides();
    if (status.ok() && IsCompressed()) status = WriteConfig();
    // The last, because it makes a model of the shards.
    if (status.ok() && !weight_map_.empty()) status = WriteIndex();
    is_complete_ = status.ok();
    return status;
  }

  // Before the first shard is in its place: takes away what would make a model
  // of new and old shards, and with --force what an earlier run left that this
  // one does not replace.
  absl::Status ClearFolder() {
    if (!is_folder_ || is_cleared_) return absl::OkStatus();
    is_cleared_ = true;
    std::vector<std::string> paths;
    if (!weight_map_.empty()) {
      paths.push_back(OutputPath(files::kShardIndexName));
    }
    const std::string config = OutputPath(kConfigName);
    if (IsCompressed() || (options_.output.force && IsOfCompressed(config))) {
      paths.push_back(config);
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

  // One that quantctl wrote and that is none of this run.
  bool IsStaleShard(const std::string& name) const {
    if (!absl::EndsWith(name, ".safetensors") ||
        std::any_of(shards_.begin(), shards_.end(),
                    [&](const std::unique_ptr<Shard>& shard) {
                      return shard->name == name;
                    })) {
      return false;
    }
    const absl::StatusOr<files::SafetensorsReader> reader =
        files::SafetensorsReader::Open(OutputPath(name));
    return reader.ok() && !Metadata(*reader, kCommandKey).empty();
  }

  absl::Status WriteTarget(const Target& target, Progress* progress) {
    if (IsGguf()) return WriteGguf(target, progress);
    Shard* const shard = target.shard;
    absl::StatusOr<std::unique_ptr<files::SafetensorsBuilder>> builder =
        files::SafetensorsBuilder::Create(target.path, target.part.has_value()
                                                           ? target.if_exists
                                                           : shard->if_exists);
    if (!builder.ok()) return builder.status();
    std::vector<TensorTask> tasks;
    std::vector<std::pair<const files::FileTensor*, size_t>> copies;
    absl::Status status = Reserve(target, builder->get(), &tasks, &copies);
    if (!status.ok()) return status;

    absl::Status copy_status;
    std::thread copier([&copies, &copy_status, &builder] {
      for (const auto& [tensor, index] : copies) {
        copy_status.Update((*builder)->Write(index, 0, tensor->data));
      }
    });
    status = options_.join ? TakeParts(*shard, builder->get(), &tasks)
                           : Quantize(&tasks, progress, builder->get());
    copier.join();
    status.Update(copy_status);
    if (!status.ok()) return status;
    const bool has_failed = AnyFailed(*shard);
    if (has_failed && !options_.keep_going) return absl::OkStatus();
    for (const auto& [tensor, index] : copies) {
      outcomes_[tensor->name].output_bytes = tensor->data.size();
    }
    for (TensorTask& task : tasks) {
      if (task.outcome->is_quantized) continue;
      // It failed: it stays as it was.
      if (task.place != nullptr) task.place->Drop();
      DropParts(builder->get(), &task);
      const files::FileTensor& tensor = *task.tensor;
      status = (*builder)->Add(kFirstCopiedOrder + task.order, tensor.name,
                               tensor.dtype, tensor.shape, tensor.data);
      if (!status.ok()) return status;
      task.outcome->output_bytes = tensor.data.size();
    }
    SetAllMetadata(target, tasks, has_failed, builder->get());
    if (!target.part.has_value()) {
      status = ClearFolder();
      if (!status.ok()) return status;
    }
    const absl::StatusOr<uint64_t> size = (*builder)->Finish();
    if (!size.ok()) return size.status();
    file_bytes_ += *size;
    shard->is_written = true;
    interrupt_note_.Set(UnfinishedText());
    return absl::OkStatus();
  }

  // The same for GGUF, whose places follow from shapes and types.
  absl::Status WriteGguf(const Target& target, Progress* progress) {
    Shard* const shard = target.shard;
    const absl::flat_hash_set<const files::FileTensor*> selected(
        target.tensors.begin(), target.tensors.end());
    std::vector<TensorTask> tasks;
    std::vector<files::GgufEntry> entries;
    for (const files::FileTensor& tensor : shard->input.tensors()) {
      std::optional<EncodingSpec> spec;
      if (selected.contains(&tensor)) {
        spec = *specs_.For(tensor.name)->SpecOf(tensor.shape);
      }
      absl::StatusOr<files::GgufEntry> entry = GgufEntryOf(
          shard->input, tensor, spec.has_value() ? &*spec : nullptr);
      if (!entry.ok()) return entry.status();
      if (spec.has_value()) {
        TensorTask task = {&tensor, entries.size(), *spec,
                           &outcomes_.at(tensor.name)};
        task.gguf = entry->type;
        task.gguf_index = entries.size();
        tasks.push_back(std::move(task));
      }
      entries.push_back(*std::move(entry));
    }
    absl::Status status = CreateGguf(*shard, tasks, entries);
    if (!status.ok()) return status;
    for (size_t i = 0; i < entries.size(); ++i) {
      const files::FileTensor& tensor = shard->input.tensors()[i];
      if (selected.contains(&tensor)) continue;
      const auto blocks = shard->input.blocks().find(tensor.name);
      const absl::Span<const uint8_t> data =
          blocks == shard->input.blocks().end() ? tensor.data
                                                : blocks->second.data;
      status = gguf_->Write(i, data);
      if (!status.ok()) return status;
      outcomes_[tensor.name].output_bytes = data.size();
    }
    status = Quantize(&tasks, progress, nullptr);
    if (!status.ok() || AnyFailed(*shard)) return status;
    for (const TensorTask& task : tasks) rounded_count_ += task.is_rounded;
    const absl::StatusOr<uint64_t> size = gguf_->Finish();
    if (!size.ok()) return size.status();
    file_bytes_ += *size;
    shard->is_written = true;
    interrupt_note_.Set(UnfinishedText());
    return absl::OkStatus();
  }

  // Begins the file with the metadata of the input, or of --metadata.
  absl::Status CreateGguf(const Shard& shard,
                          const std::vector<TensorTask>& tasks,
                          const std::vector<files::GgufEntry>& entries) {
    std::optional<files::GgufReader> given;
    if (!options_.metadata.empty()) {
      absl::StatusOr<files::GgufReader> opened =
          files::GgufReader::Open(options_.metadata);
      if (!opened.ok()) return opened.status();
      given.emplace(*std::move(opened));
    }
    const files::GgufReader* const source =
        given.has_value() ? &*given : shard.input.gguf();
    if (source == nullptr && !session_.quiet) {
      session_.PrintError(absl::StrCat(
          "quantctl: ", options_.output.path,
          " gets no metadata of a model, without which llama.cpp does not "
          "load it; --metadata FILE.gguf takes those of another file"));
    }
    const std::vector<std::string> own = GgufPairs(tasks);
    std::vector<absl::string_view> pairs(own.begin(), own.end());
    if (source != nullptr) {
      for (const files::GgufPair& pair : source->pairs()) {
        if (!IsOwnGgufKey(pair.key)) {
          pairs.emplace_back(reinterpret_cast<const char*>(pair.bytes.data()),
                             pair.bytes.size());
        }
      }
    }
    absl::StatusOr<std::unique_ptr<files::GgufBuilder>> builder =
        files::GgufBuilder::Create(
            options_.output.path, shard.if_exists, pairs,
            source != nullptr ? source->alignment() : files::kGgufAlignment,
            entries);
    if (!builder.ok()) return builder.status();
    gguf_ = *std::move(builder);
    return absl::OkStatus();
  }

  static bool IsOwnGgufKey(absl::string_view key) {
    return key == kGgufFileTypeKey || key == kGgufVersionKey;
  }

  // What the output says of itself: the type that most elements have.
  static std::vector<std::string> GgufPairs(
      const std::vector<TensorTask>& tasks) {
    std::map<const files::GgufType*, uint64_t> sizes;
    for (const TensorTask& task : tasks) {
      sizes[task.gguf] += task.tensor->data.size();
    }
    const auto most = std::max_element(
        sizes.begin(), sizes.end(),
        [](const auto& a, const auto& b) { return a.second < b.second; });
    std::vector<std::string> pairs = {
        files::GgufUint32Pair(kGgufVersionKey, kGgufVersion)};
    if (most != sizes.end()) {
      pairs.push_back(
          files::GgufUint32Pair(kGgufFileTypeKey, GgufFileType(*most->first)));
    }
    return pairs;
  }

  // Gives what the target will have its place.
  absl::Status Reserve(
      const Target& target, files::SafetensorsBuilder* builder,
      std::vector<TensorTask>* tasks,
      std::vector<std::pair<const files::FileTensor*, size_t>>* copies) {
    const Shard& shard = *target.shard;
    const absl::flat_hash_set<const files::FileTensor*> selected(
        target.tensors.begin(), target.tensors.end());
    uint64_t order = 0;
    for (const files::FileTensor& tensor : shard.input.tensors()) {
      ++order;
      if (!selected.contains(&tensor)) continue;
      TensorTask task = {&tensor, order,
                         *specs_.For(tensor.name)->SpecOf(tensor.shape),
                         &outcomes_.at(tensor.name)};
      if (IsCompressed()) {
        task.compressed = std::make_unique<CompressedModel>(options_.layout ==
                                                            "pack-quantized");
        const absl::Status status = ReserveParts(builder, &task);
        if (!status.ok()) return status;
      } else {
        absl::StatusOr<std::unique_ptr<QuantizedPlace>> place =
            QuantizedPlace::Reserve(
                order, tensor.name, *ElementTypeOf(tensor.dtype), tensor.shape,
                ExpectedEncoding(task.spec, tensor.shape), builder);
        if (!place.ok()) return place.status();
        task.place = *std::move(place);
      }
      tasks->push_back(std::move(task));
    }
    order = kFirstCopiedOrder;
    for (const files::FileTensor& tensor : shard.input.tensors()) {
      ++order;
      if (target.part.has_value() || selected.contains(&tensor)) continue;
      const absl::StatusOr<size_t> index =
          builder->Reserve(order, tensor.name, tensor.dtype, tensor.shape);
      if (!index.ok()) return index.status();
      copies->emplace_back(&tensor, *index);
    }
    if (builder->reserved_bytes() < kRoomFromBytes) return builder->PlaceAll(0);
    const absl::StatusOr<uint64_t> room = HeaderRoom(target, *tasks, *builder);
    return room.ok() ? builder->PlaceAll(*room) : room.status();
  }

  // One that the layout does not hold fails when it is written.
  static absl::Status ReserveParts(files::SafetensorsBuilder* builder,
                                   TensorTask* task) {
    const files::FileTensor& tensor = *task->tensor;
    absl::StatusOr<CompressedPlan> plan = task->compressed->PlanOf(
        tensor.name, tensor.shape, ExpectedEncoding(task->spec, tensor.shape));
    if (!plan.ok()) return absl::OkStatus();
    for (const CompressedPart& part : plan->parts) {
      const absl::StatusOr<size_t> index =
          builder->Reserve(task->order, part.name, part.dtype, part.shape);
      if (!index.ok()) return index.status();
      task->part_indices.push_back(*index);
    }
    task->plan = *std::move(plan);
    return absl::OkStatus();
  }

  // Writes a part to its place. An encoding may have turned to the unsigned
  // format, whose parts are others.
  static absl::Status AddPart(const std::string& name, files::Dtype dtype,
                              const std::vector<int64_t>& shape,
                              absl::Span<const uint8_t> data,
                              files::SafetensorsBuilder* builder,
                              TensorTask* task) {
    std::vector<CompressedPart>& parts = task->plan.parts;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].name != name) continue;
      const size_t index = task->part_indices[i];
      const bool fits = parts[i].dtype == dtype && parts[i].shape == shape;
      parts.erase(parts.begin() + static_cast<ptrdiff_t>(i));
      task->part_indices.erase(task->part_indices.begin() +
                               static_cast<ptrdiff_t>(i));
      if (fits) return builder->Write(index, 0, data);
      builder->Drop(index);
      break;
    }
    return builder->Add(task->order, name, dtype, shape, data);
  }

  // Leaves out what was reserved and not written.
  static void DropParts(files::SafetensorsBuilder* builder, TensorTask* task) {
    for (const size_t index : task->part_indices) builder->Drop(index);
    task->part_indices.clear();
    task->plan.parts.clear();
  }

  // Enough for the header, whatever becomes of the tensors. It follows from the
  // input and the options alone, so that the file does too.
  absl::StatusOr<uint64_t> HeaderRoom(
      const Target& target, const std::vector<TensorTask>& tasks,
      const files::SafetensorsBuilder& builder) const {
    Outcome most;
    most.output_bytes = UINT64_MAX;
    most.clipped_low_count = UINT64_MAX;
    most.clipped_high_count = UINT64_MAX;
    most.nan_count = UINT64_MAX;
    most.infinity_count = UINT64_MAX;
    most.mantissa_bits = UINT64_MAX;
    std::map<std::string, std::string> metadata =
        target.shard->input.metadata();
    Json records = Json::object();
    Json modules = Json::object();
    for (const TensorTask& task : tasks) {
      const std::string& name = task.tensor->name;
      const ElementType element_type = *ElementTypeOf(task.tensor->dtype);
      Encoding encoding = ExpectedEncoding(task.spec, task.tensor->shape);
      encoding.set_qmin(INT32_MIN);
      encoding.set_qmax(INT32_MIN);
      // The unsigned format of that width has one letter more.
      most.format = absl::StrCat("u", FormatName(encoding.format()));
      if (IsCompressed()) {
        metadata[absl::StrCat(kElementTypeKeyPrefix, name)] =
            std::string(ElementTypeName(element_type));
        modules[std::string(ModuleOf(name))] = task.plan.module;
      } else {
        metadata[absl::StrCat(kQuantizedKeyPrefix, name)] = absl::StrCat(
            "u", QuantizedMetadata(element_type, task.tensor->shape, encoding));
      }
      Json& record = records[name] = RecordOf(most);
      if (options_.evaluate) record["metrics"] = std::string(kMetricsRoom, 'x');
    }
    if (IsCompressed()) {
      metadata["format"] = "pt";
      metadata[kRoundedKey] = absl::StrCat(tasks.size());
      // "symmetric" may turn to false, which has one letter more.
      metadata[kModulesKey] = absl::StrCat(
          modules.dump(-1, ' ', false, Json::error_handler_t::replace),
          std::string(tasks.size(), ' '));
    }
    if (is_folder_ || target.part.has_value()) {
      metadata[kCommandKey] = target.shard->command;
      metadata[kRunKey] = target.shard->run;
      metadata[kTensorsKey] =
          records.dump(-1, ' ', false, Json::error_handler_t::replace);
    }
    if (target.part.has_value()) metadata[kPartKey] = PartText(*target.part);
    return builder.HeaderBytes(metadata);
  }

  void SetAllMetadata(const Target& target,
                      const std::vector<TensorTask>& tasks, bool has_failed,
                      files::SafetensorsBuilder* builder) {
    const Shard& shard = *target.shard;
    for (const auto& [key, value] : shard.input.metadata()) {
      builder->SetMetadata(key, value);
    }
    if (IsCompressed()) {
      CompressedModel model(options_.layout == "pack-quantized");
      for (const TensorTask& task : tasks) {
        model.Restore(task.compressed->modules());
        rounded_count_ += task.compressed->rounded_count();
        model.AddRounded(task.compressed->rounded_count());
        builder->SetMetadata(
            absl::StrCat(kElementTypeKeyPrefix, task.tensor->name),
            std::string(ElementTypeName(*ElementTypeOf(task.tensor->dtype))));
      }
      modules_[&shard] = model.modules();
      builder->SetMetadata(kRoundedKey, absl::StrCat(model.rounded_count()));
      builder->SetMetadata("format", "pt");
      builder->SetMetadata(
          kModulesKey,
          model.modules().dump(-1, ' ', false, Json::error_handler_t::replace));
    }
    if (is_folder_ || target.part.has_value()) {
      builder->SetMetadata(kCommandKey, shard.command);
      // One that failed in part is done again.
      if (!has_failed) {
        builder->SetMetadata(kRunKey, shard.run);
        builder->SetMetadata(kTensorsKey, RecordsText(tasks));
      }
    }
    if (target.part.has_value()) {
      builder->SetMetadata(kPartKey, PartText(*target.part));
    }
  }

  static std::string RecordsText(const std::vector<TensorTask>& tasks) {
    Json records = Json::object();
    for (const TensorTask& task : tasks) {
      if (task.outcome->is_quantized) {
        records[task.tensor->name] = RecordOf(*task.outcome);
      }
    }
    return records.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

  absl::Status Quantize(std::vector<TensorTask>* tasks, Progress* progress,
                        files::SafetensorsBuilder* builder) {
    internal::QuantizeEngine::Work work;
    work.count = tasks->size();
    work.size_bytes = [tasks](size_t i) {
      return (*tasks)[i].tensor->data.size();
    };
    work.make_job = [this, tasks](size_t i) { return MakeJob(&(*tasks)[i]); };
    work.take = [this, tasks, progress, builder](
                    size_t i, absl::StatusOr<QuantizeResult> result,
                    EvaluateStream* evaluate) {
      TensorTask& task = (*tasks)[i];
      const absl::Status status = TakeResult(&task, result, evaluate, builder);
      absl::MutexLock lock(&mutex_);
      stored_count_ += result.ok() && options_.store ? 1 : 0;
      progress->Add(task.tensor->data.size(), task.tensor->name);
      return status;
    };
    return engine_->Run(work);
  }

  // A tensor has a name on the server where its encoding is kept.
  TensorName NameOf(const files::FileTensor& tensor) const {
    return draft_.has_value() ? draft_->NameOf(tensor.name) : TensorName();
  }

  QuantizeJob MakeJob(TensorTask* task) const {
    const files::FileTensor& tensor = *task->tensor;
    task->outer_maximum = OuterMaximumFor(task->spec, tensor);
    QuantizeJob job;
    job.tensor = MakeTensor(tensor, NameOf(tensor));
    job.source = task->spec;
    job.store = options_.store;
    job.nan_policy = NanPolicyOf(options_.nan_policy);
    job.scales_in_chunks = true;
    job.outer_maximum = task->outer_maximum;
    if (task->place != nullptr) task->place->SetSinks(&job);
    return job;
  }

  // Errors end the run; those of the tensor alone go to its outcome.
  absl::Status TakeResult(TensorTask* task,
                          const absl::StatusOr<QuantizeResult>& result,
                          EvaluateStream* evaluate_stream,
                          files::SafetensorsBuilder* builder) const {
    const files::FileTensor& tensor = *task->tensor;
    Outcome& outcome = *task->outcome;
    if (!result.ok()) {
      outcome.status = result.status();
      const int code = ExitCodeOf(result.status());
      return code == kUnreachable || code == kFileError ? result.status()
                                                        : absl::OkStatus();
    }
    const Encoding& encoding = result->header.encoding();
    const absl::StatusOr<uint64_t> size =
        task->gguf != nullptr ? PutGguf(task, *result)
        : task->place != nullptr
            ? task->place->Finish(encoding)
            : task->compressed->Write(
                  tensor.name, tensor.shape, encoding, result->scales.view(),
                  result->codes,
                  [&](const std::string& name, files::Dtype dtype,
                      const std::vector<int64_t>& shape,
                      absl::Span<const uint8_t> data) {
                    return AddPart(name, dtype, shape, data, builder, task);
                  });
    if (size.ok()) DropParts(builder, task);
    if (ErrorReason(size.status()) == "ARGUMENT_INVALID") {
      outcome.status = size.status();
      return absl::OkStatus();
    }
    if (!size.ok()) return size.status();
    const v1::QuantizeSummary& summary = result->summary;
    outcome.is_quantized = true;
    outcome.format = FormatName(encoding.format());
    outcome.output_bytes = *size;
    outcome.clipped_low_count = summary.clipped_low_count();
    outcome.clipped_high_count = summary.clipped_high_count();
    outcome.nan_count = summary.nan_count();
    outcome.infinity_count =
        summary.positive_infinity_count() + summary.negative_infinity_count();
    outcome.mantissa_bits = result->header.mantissa_bits();
    if (!options_.evaluate) return absl::OkStatus();
    // The same encoding, which would be much to send.
    EvaluateJob job;
    job.tensor = MakeTensor(tensor, NameOf(tensor));
    job.candidates.push_back({task->spec, "", task->outer_maximum, {}});
    job.omit_encodings = true;
    evaluate_stream->Send(job);
    const absl::StatusOr<EvaluateResult> evaluation =
        evaluate_stream->Receive();
    if (!evaluation.ok()) {
      outcome.status = evaluation.status();
    } else if (evaluation->candidates_size() == 1) {
      outcome.metrics = evaluation->candidates(0).overall();
    }
    return absl::OkStatus();
  }

  // Writes a tensor as blocks. Returns its size in bytes.
  absl::StatusOr<uint64_t> PutGguf(TensorTask* task,
                                   const QuantizeResult& result) const {
    const absl::StatusOr<std::vector<uint8_t>> blocks =
        PackGguf(*task->gguf, result.header.encoding(), result.scales.view(),
                 result.codes, &task->is_rounded);
    if (!blocks.ok()) return blocks.status();
    const absl::Status status = gguf_->Write(task->gguf_index, *blocks);
    if (!status.ok()) return status;
    return blocks->size();
  }

  // Fills a shard from the files of its parts, which CheckJoin has seen.
  absl::Status TakeParts(const Shard& shard, files::SafetensorsBuilder* builder,
                         std::vector<TensorTask>* tasks) {
    for (const Part& part : FindParts(shard)) {
      const absl::StatusOr<files::SafetensorsReader> reader =
          files::SafetensorsReader::Open(PartPath(shard, part));
      if (!reader.ok()) return reader.status();
      const Json modules = Json::parse(Metadata(*reader, kModulesKey), nullptr,
                                       /*allow_exceptions=*/false);
      int64_t rounded_count = 0;
      if (IsCompressed() &&
          (!modules.is_object() ||
           !absl::SimpleAtoi(Metadata(*reader, kRoundedKey), &rounded_count))) {
        return files::FileMalformedError(PartPath(shard, part),
                                         "expected the schemes of its modules");
      }
      const Json records = Json::parse(Metadata(*reader, kTensorsKey), nullptr,
                                       /*allow_exceptions=*/false);
      for (TensorTask& task : *tasks) {
        const std::string& name = task.tensor->name;
        if (!records.contains(name)) continue;
        if (task.place != nullptr) {
          const absl::Status status = task.place->CopyFrom(*reader);
          if (!status.ok()) return status;
          continue;
        }
        const std::string module(ModuleOf(name));
        if (!modules.contains(module)) {
          return files::FileMalformedError(
              PartPath(shard, part),
              absl::StrCat("expected the scheme of ", module));
        }
        task.compressed->Restore({{module, modules.at(module)}});
        task.compressed->AddRounded(std::exchange(rounded_count, 0));
        for (const files::FileTensor& tensor : reader->tensors()) {
          absl::string_view rest = tensor.name;
          if (!absl::ConsumePrefix(&rest, name) ||
              !(rest.empty() || rest[0] == '_')) {
            continue;
          }
          const absl::Status status =
              AddPart(tensor.name, tensor.dtype, tensor.shape, tensor.data,
                      builder, &task);
          if (!status.ok()) return status;
        }
        DropParts(builder, &task);
      }
    }
    return absl::OkStatus();
  }

  // What the shards are made of now has no use any more.
  void RemoveParts() const {
    for (const std::unique_ptr<Shard>& shard : shards_) {
      for (const Part& part : FindParts(*shard)) {
        const std::string path = PartPath(*shard, part);
        const absl::StatusOr<files::SafetensorsReader> reader =
            files::SafetensorsReader::Open(path);
        if (reader.ok() && Metadata(*reader, kRunKey) == shard->run) {
          unlink(path.c_str());
        }
      }
    }
  }

  absl::Status WriteIndex() {
    std::map<std::string, std::string> weight_map;
    uint64_t total_bytes = 0;
    for (const std::unique_ptr<Shard>& shard : shards_) {
      const absl::StatusOr<files::SafetensorsReader> written =
          files::SafetensorsReader::Open(shard->output_path);
      if (!written.ok()) return written.status();
      for (const files::FileTensor& tensor : written->tensors()) {
        weight_map[tensor.name] = shard->name;
        total_bytes += tensor.data.size();
      }
    }
    return files::WriteShardIndex(options_.output.path,
                                  files::IfExists::kReplace, weight_map,
                                  total_bytes);
  }

  // The modules whose matrix was left as it is.
  std::vector<std::string> IgnoredModules() const {
    std::vector<std::string> modules;
    for (const auto& [name, outcome] : outcomes_) {
      const absl::string_view module = ModuleOf(name);
      if (outcome.is_quantized || module.empty()) continue;
      const auto is_matrix = [&name =
                                  name](const std::unique_ptr<Shard>& shard) {
        const files::FileTensor* const tensor = shard->input.Find(name);
        return tensor != nullptr && tensor->shape.size() == 2;
      };
      if (std::any_of(shards_.begin(), shards_.end(), is_matrix)) {
        modules.emplace_back(module);
      }
    }
    std::sort(modules.begin(), modules.end(), NaturalLess);
    return modules;
  }

  // What a folder has beside its tensors, such as a tokenizer: with
  // compressed-tensors, whose folder is a model that others load, it is copied
  // where it is text and small. One line names the rest.
  absl::Status CopyBesides() {
    if (!files::IsFolder(options_.input)) return absl::OkStatus();
    std::vector<std::string> left_out;
    for (const std::string& name : FilesIn(options_.input)) {
      const bool is_replaced =
          name == files::kShardIndexName ||
          (IsCompressed() && name == kConfigName) ||
          std::any_of(shards_.begin(), shards_.end(),
                      [&](const std::unique_ptr<Shard>& shard) {
                        return shard->name == name;
                      });
      if (name[0] == '.' || is_replaced) continue;
      bool is_copied = false;
      if (IsCompressed() && IsBeside(name)) {
        const absl::StatusOr<bool> copied = CopyBeside(name);
        if (!copied.ok()) return copied.status();
        is_copied = *copied;
      }
      if (!is_copied) left_out.push_back(name);
    }
    if (left_out.empty() || session_.quiet) return absl::OkStatus();
    const size_t count = left_out.size();
    if (count > kMostNames) left_out.resize(kMostNames);
    session_.PrintError(absl::StrCat(
        "quantctl: of ", options_.input,
        " not copied: ", absl::StrJoin(left_out, ", "),
        count > kMostNames
            ? absl::StrCat(" and ", CountText(count - kMostNames), " more")
            : ""));
    return absl::OkStatus();
  }

  static bool IsBeside(absl::string_view name) {
    return !absl::EndsWith(name, ".index.json") &&
           std::any_of(std::begin(kBesideExtensions),
                       std::end(kBesideExtensions),
                       [name](absl::string_view extension) {
                         return absl::EndsWith(name, extension);
                       });
  }

  // False for one that is too large, or that another file is in the place of.
  absl::StatusOr<bool> CopyBeside(const std::string& name) {
    const std::string from = files::PathIn(options_.input, name);
    struct stat status;
    if (stat(from.c_str(), &status) != 0 || !S_ISREG(status.st_mode) ||
        status.st_size > kMostBesideBytes) {
      return false;
    }
    absl::StatusOr<std::string> text =
        internal::ReadTextFile(from, kMostBesideBytes);
    if (!text.ok()) return text.status();
    const std::string to = OutputPath(name);
    if (FileExists(to)) {
      const absl::StatusOr<std::string> there =
          internal::ReadTextFile(to, kMostBesideBytes);
      if (there.ok() && *there == *text) return true;
      if (!options_.output.force) return false;
    }
    absl::StatusOr<files::AtomicFile> file =
        files::AtomicFile::Create(to, files::IfExists::kReplace);
    if (!file.ok()) return file.status();
    absl::Status written = file->Append(*text);
    if (written.ok()) written = file->Commit();
    if (!written.ok()) return written;
    return true;
  }

  // The model's configuration with the schemes of its modules.
  absl::Status WriteConfig() {
    Json config = Json::object();
    if (files::IsFolder(options_.input)) {
      const std::string path = files::PathIn(options_.input, kConfigName);
      const absl::StatusOr<std::string> text = internal::ReadTextFile(path);
      if (text.ok()) {
        config = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
        if (!config.is_object()) {
          return files::FileMalformedError(path, "expected a JSON object");
        }
      } else if (!absl::IsNotFound(text.status())) {
        return text.status();
      }
    }
    CompressedModel model(/*packs_all=*/false);
    for (const std::unique_ptr<Shard>& shard : shards_) {
      model.Restore(modules_[shard.get()]);
    }
    config["quantization_config"] = model.Config(IgnoredModules());
    absl::StatusOr<files::AtomicFile> file = files::AtomicFile::Create(
        OutputPath(kConfigName), files::IfExists::kReplace);
    if (!file.ok()) return file.status();
    absl::Status status = file->Append(absl::StrCat(
        config.dump(2, ' ', false, Json::error_handler_t::replace), "\n"));
    return status.ok() ? file->Commit() : status;
  }

  // What is counted of all tensors.
  struct Totals {
    size_t tensor_count = 0;
    uint64_t before = 0;
    uint64_t after = 0;
    uint64_t quantized_count = 0;
    uint64_t kept_count = 0;
    uint64_t kept_shards = 0;
    uint64_t written_shards = 0;
    uint64_t clipped_count = 0;
    uint64_t nan_count = 0;
    uint64_t infinity_count = 0;
    std::set<std::string> formats;
    std::vector<TensorError> errors;
    // Of those, what is in the output as it was.
    uint64_t copied_count = 0;
  };

  Totals Count() const {
    Totals totals;
    for (const std::unique_ptr<Shard>& shard : shards_) {
      totals.kept_shards += shard->is_kept ? 1 : 0;
      totals.written_shards += shard->is_written ? 1 : 0;
      for (const files::FileTensor& tensor : shard->input.tensors()) {
        if (!IsInScope(tensor)) continue;
        const Outcome& outcome = outcomes_.at(tensor.name);
        ++totals.tensor_count;
        totals.before += tensor.data.size();
        if (!outcome.status.ok()) {
          totals.errors.push_back({tensor.name, outcome.status});
          totals.copied_count += outcome.is_quantized ? 0 : 1;
        }
        totals.clipped_count +=
            outcome.clipped_low_count + outcome.clipped_high_count;
        totals.nan_count += outcome.nan_count;
        totals.infinity_count += outcome.infinity_count;
        if (!shard->is_written) continue;
        totals.after += outcome.output_bytes;
        totals.kept_count += shard->is_kept ? 1 : 0;
        if (!outcome.is_quantized) continue;
        ++totals.quantized_count;
        totals.formats.insert(outcome.format);
      }
    }
    return totals;
  }

  void Report() {
    const Totals totals = Count();
    if (!totals.errors.empty()) session_.Note(kServerError);
    if (session_.json) {
      Json list = Json::array();
      for (const std::unique_ptr<Shard>& shard : shards_) {
        for (const files::FileTensor& tensor : shard->input.tensors()) {
          if (IsInScope(tensor)) list.push_back(OutcomeJson(*shard, tensor));
        }
      }
      session_.PrintJson({{"input", options_.input},
                          {"output", options_.output.path},
                          {"written", is_complete_},
                          {"formats", totals.formats},
                          {"bytes_before", totals.before},
                          {"bytes_after", totals.after},
                          {"file_bytes", file_bytes_},
                          {"quantized_count", totals.quantized_count},
                          {"kept_count", totals.kept_count},
                          {"failed_count", totals.errors.size()},
                          {"rounded_count", rounded_count_},
                          {"retries", session_.retries()},
                          {"tensors", list}});
    } else {
      session_.Print(TableText(totals));
      if (is_complete_) session_.Print(SummaryText(totals));
    }
    ReportNotFinite();
    if (rounded_count_ > 0 && is_complete_ && IsGguf()) {
      session_.PrintError(absl::StrCat(
          "quantctl: ", CountText(static_cast<uint64_t>(rounded_count_)),
          " tensors have minima, which are float16 in GGUF and were rounded: "
          "reals may differ from quantd's by 1% of a scale"));
    } else if (rounded_count_ > 0 && is_complete_) {
      session_.PrintError(absl::StrCat(
          "quantctl: ", CountText(static_cast<uint64_t>(rounded_count_)),
          " of the nvfp4 tensors: readers divide by weight_global_scale, the "
          "inverse of the outer scale, and get reals that may differ from "
          "quantd's in the last bit"));
    }
    if (totals.errors.empty()) return;
    if (!session_.json) PrintTensorErrors(totals.errors, &session_);
    const std::string failed =
        absl::StrCat(CountText(totals.errors.size()), " of ",
                     CountText(totals.tensor_count), " tensors failed");
    if (is_complete_) {
      session_.PrintError(absl::StrCat(
          "quantctl: ", failed, "; ", options_.output.path, " has ",
          CountText(totals.copied_count), " of them as they were"));
      return;
    }
    std::vector<absl::Status> statuses;
    for (const TensorError& error : totals.errors) {
      statuses.push_back(error.status);
    }
    ReportRefused(statuses);
    ReportUnfinished();
    session_.PrintError(
        absl::StrCat("quantctl: ", failed, ", so ", options_.output.path,
                     is_folder_ ? " is not complete" : " is not written",
                     IsGguf() ? ""
                              : "; --keep-going leaves such tensors as they "
                                "are"));
  }

  // Says what to do where the server refused to store.
  void ReportRefused(const std::vector<absl::Status>& statuses) {
    const bool is_refused = std::any_of(
        statuses.begin(), statuses.end(), [](const absl::Status& status) {
          const absl::string_view reason = ErrorReason(status);
          return reason == "SCOPE_MISSING" || reason == "MODEL_DENIED";
        });
    if (options_.store && is_refused) {
      session_.PrintError(
          "quantctl: --no-store quantizes without keeping the encodings on "
          "the server");
    }
  }

  // What there is of an output that is not complete.
  void ReportUnfinished() {
    const Totals totals = Count();
    if (is_complete_ && draft_.has_value()) {
      return session_.PrintError(UnpublishedText());
    }
    if (stored_count_ > 0) {
      session_.PrintError(absl::StrCat(
          "quantctl: the server has the new encodings of ",
          CountText(stored_count_), " tensors in revision ", draft_->revision(),
          " of model \"", options_.name.model, "\"; revision ",
          options_.name.revision, " is as it was"));
    }
    if (is_folder_ && totals.written_shards > 0) {
      session_.PrintError(UnfinishedText());
    }
  }

  // Of an output that is complete.
  std::string UnpublishedText() const {
    const std::string how =
        is_folder_    ? "the same command publishes them"
        : is_lacking_ ? "the same command with --force does so"
                      : absl::StrCat(
                            "to publish them: quantctl revisions publish "
                            "--keep-others ",
                            options_.name.model, " ", draft_->revision(), " ",
                            options_.name.revision);
    return absl::StrCat("quantctl: ", options_.output.path,
                        " is written, but its encodings are not published; ",
                        how);
  }

  // One line, also where there is nothing.
  std::string UnfinishedText() const {
    const auto count = std::count_if(
        shards_.begin(), shards_.end(),
        [](const std::unique_ptr<Shard>& shard) { return shard->is_written; });
    if (!is_folder_) {
      const bool is_written = count == 1 && !part_.has_value();
      if (is_written && draft_.has_value() && !is_published_) {
        return UnpublishedText();
      }
      return absl::StrCat("quantctl: stopped; ", options_.output.path,
                          is_written ? " is written" : " is not written");
    }
    return absl::StrCat("quantctl: ", options_.output.path, " has ",
                        CountText(static_cast<uint64_t>(count)), " of ",
                        CountText(shards_.size()),
                        " shards; the same command goes on from there");
  }

  // Codes do not say that there was something else.
  void ReportNotFinite() {
    std::vector<std::string> notes;
    for (const std::unique_ptr<Shard>& shard : shards_) {
      for (const files::FileTensor& tensor : shard->input.tensors()) {
        const Outcome& outcome = outcomes_[tensor.name];
        if (outcome.nan_count + outcome.infinity_count == 0) continue;
        notes.push_back(absl::StrCat("quantctl: tensor ", tensor.name, " has ",
                                     CountText(outcome.nan_count), " NaN and ",
                                     CountText(outcome.infinity_count),
                                     " infinities"));
      }
    }
    PrintNotes(notes, &session_);
  }

  std::string SummaryText(const Totals& totals) const {
    return absl::StrCat(
        CountText(totals.quantized_count), " of ",
        CountText(totals.tensor_count), " tensors to ",
        totals.formats.empty() ? "codes" : absl::StrJoin(totals.formats, ", "),
        ", ", BytesText(totals.before), " to ", BytesText(totals.after),
        part_.has_value() ? absl::StrCat(", part ", PartText(*part_)) : "",
        ", written to ", Printable(options_.output.path),
        totals.kept_shards == 0
            ? ""
            : absl::StrCat("; ", CountText(totals.kept_shards), " of ",
                           CountText(shards_.size()),
                           " shards kept from an earlier run"),
        part_.has_value() ? "; with all parts done, the same command with "
                            "--join in place of --part completes it"
                          : "",
        "\n");
  }

  std::string TableText(const Totals& totals) const {
    Table table;
    table.AddColumn("TENSOR", Table::Align::kLeft);
    table.AddColumn("SHAPE", Table::Align::kLeft);
    table.AddColumn("DTYPE", Table::Align::kLeft);
    table.AddColumn("RESULT", Table::Align::kLeft);
    table.AddColumn("BEFORE", Table::Align::kBytes);
    table.AddColumn("AFTER", Table::Align::kBytes);
    if (options_.evaluate) {
      table.AddColumn("SQNR DB", Table::Align::kRight);
      table.AddColumn("MAX ERROR", Table::Align::kRight);
    }
    const bool has_clipped = totals.clipped_count > 0;
    const bool has_not_finite = totals.nan_count + totals.infinity_count > 0;
    if (has_clipped) table.AddColumn("CLIPPED", Table::Align::kRight);
    if (has_not_finite) {
      table.AddColumn("NAN", Table::Align::kRight);
      table.AddColumn("INF", Table::Align::kRight);
    }
    for (const std::unique_ptr<Shard>& shard : shards_) {
      for (const files::FileTensor& tensor : shard->input.tensors()) {
        if (!IsInScope(tensor)) continue;
        const Outcome& outcome = outcomes_.at(tensor.name);
        std::vector<std::string> row = {
            tensor.name,
            ShapeText(tensor.shape),
            std::string(DtypeName(tensor.dtype)),
            ResultText(*shard, outcome),
            BytesCell(tensor.data.size()),
            shard->is_written ? BytesCell(outcome.output_bytes) : ""};
        if (options_.evaluate) {
          const bool is_measured = outcome.metrics.has_value();
          row.push_back(is_measured ? DecibelText(outcome.metrics->sqnr_db())
                                    : "");
          row.push_back(is_measured
                            ? NumberText(outcome.metrics->max_absolute_error())
                            : "");
        }
        const auto add_count = [&](uint64_t count) {
          row.push_back(outcome.is_quantized ? CountText(count) : "");
        };
        if (has_clipped) {
          add_count(outcome.clipped_low_count + outcome.clipped_high_count);
        }
        if (has_not_finite) {
          add_count(outcome.nan_count);
          add_count(outcome.infinity_count);
        }
        table.AddRow(std::move(row));
      }
    }
    return table.Render(StdoutHasStyle());
  }

  static std::string ResultText(const Shard& shard, const Outcome& outcome) {
    if (!shard.is_written) {
      return outcome.status.ok() ? "not written" : "failed";
    }
    if (!outcome.status.ok() && !outcome.is_quantized) return "failed, copied";
    return absl::StrCat(outcome.is_quantized ? outcome.format : "copied",
                        shard.is_kept ? ", kept" : "");
  }

  Json OutcomeJson(const Shard& shard, const files::FileTensor& tensor) const {
    const Outcome& outcome = outcomes_.at(tensor.name);
    const char* const result = shard.is_kept          ? "kept"
                               : !outcome.status.ok() ? "failed"
                               : !shard.is_written    ? "not written"
                               : outcome.is_quantized ? "quantized"
                                                      : "copied";
    Json json = {{"name", tensor.name},
                 {"shape", tensor.shape},
                 {"dtype", std::string(DtypeName(tensor.dtype))},
                 {"result", result},
                 {"bytes_before", tensor.data.size()},
                 {"bytes_after", shard.is_written ? outcome.output_bytes : 0}};
    if (outcome.is_quantized) {
      json["format"] = outcome.format;
      json["mantissa_bits"] = outcome.mantissa_bits;
      json["clipped_low_count"] = outcome.clipped_low_count;
      json["clipped_high_count"] = outcome.clipped_high_count;
      json["nan_count"] = outcome.nan_count;
      json["infinity_count"] = outcome.infinity_count;
    }
    if (outcome.metrics.has_value()) {
      json["sqnr_db"] = outcome.metrics->sqnr_db();
      json["max_absolute_error"] = outcome.metrics->max_absolute_error();
      json["mean_squared_error"] = outcome.metrics->mean_squared_error();
    }
    if (!outcome.status.ok()) json["error"] = ErrorJson(outcome.status);
    return json;
  }

  const Options& options_;
  Session& session_;
  // Whether the output is one.
  const bool is_folder_;
  SpecSet specs_;
  // Nothing for all.
  std::optional<Part> part_;
  // None where no server is called.
  std::optional<Connections> connections_;
  std::optional<internal::QuantizeEngine> engine_;
  // Where encodings are stored, if they are.
  std::optional<DraftRevision> draft_;
  // With a .gguf file as the output, once it is begun.
  std::unique_ptr<files::GgufBuilder> gguf_;
  std::vector<std::unique_ptr<Shard>> shards_;
  // Of part_, for each shard.
  std::vector<std::vector<Share>> shares_;
  std::vector<Target> targets_;
  // With part_, the tensors of this part.
  absl::flat_hash_set<const files::FileTensor*> scope_;
  // Of the input; empty where it has no index.
  std::map<std::string, std::string> weight_map_;
  bool made_folder_ = false;
  bool is_cleared_ = false;
  bool is_complete_ = false;
  // Whether the draft is known not to have all encodings.
  bool is_lacking_ = false;
  bool is_published_ = false;
  InterruptNote interrupt_note_;
  // The schemes of a compressed-tensors model, by shard.
  std::map<const Shard*, Json> modules_;
  // See CompressedModel.
  int64_t rounded_count_ = 0;
  // Has all tensors from the beginning; different ones may change at once.
  Outcomes outcomes_;
  absl::Mutex mutex_;
  // Under mutex_ while streams run.
  uint64_t stored_count_ = 0;
  uint64_t file_bytes_ = 0;
};

}  // namespace

void AddQuantizeCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "quantize",
      "Quantize the tensors of a file into a safetensors or GGUF file, and "
      "copy the others; nothing is written when a tensor fails");
  const auto options = std::make_shared<Options>();
  command
      ->AddArgument("file", &options->input, "FILE",
                    "safetensors, .npy or .gguf file, or a folder with "
                    "model.safetensors.index.json or model.safetensors")
      ->Required();
  options->output
      .AddOptions(command,
                  "safetensors or .gguf file, or - for standard output; a "
                  "folder for a folder, whose finished shards the next run "
                  "keeps, and for compressed-tensors")
      ->Required();
  command->AddFlag("--keep-going", &options->keep_going,
                   "Write the output even if tensors fail, with these as they "
                   "were");
  command
      ->AddOption("--layout", &options->layout, "",
                  "How the codes lie in the file: as quantctl dequantize "
                  "takes them, or as compressed-tensors models have them, "
                  "with config.json; pack-quantized packs 8 bits too")
      ->OneOf({"quantd", "compressed-tensors", "pack-quantized"})
      ->ShowDefault();
  command->AddOption("--metadata", &options->metadata, "FILE",
                     "GGUF file whose metadata a .gguf file gets; by default "
                     "the input");
  command->AddFlag("--requantize", &options->requantize,
                   "Quantize blocks of GGUF too, after dequantizing them");
  command->AddFlag("--restart", &options->restart,
                   "Do finished shards again as well");
  options->streams.AddOption(command);
  const Option* const part = command->AddOption(
      "--part", &options->part, "I/N",
      "Do share I of N, from 0/N on: whole shards where they can be shared out "
      "evenly, otherwise a range of the tensors. Every part has the same "
      "options; any may run again, at any time, on any machine that has the "
      "input and the output");
  command->AddFlag("--join", &options->join,
                   "Make the output of the parts, once all are done; calls the "
                   "server only to publish encodings. Otherwise the same "
                   "options as the parts");
  options->name.AddOptions(command, /*required=*/false);
  options->spec.AddOptionsWithPatterns(command);
  options->filter.AddOptions(command);
  const Option* const store = command->AddFlag(
      "--store,!--no-store", &options->store,
      "Keep the encodings on the server (the default with --model)");
  command
      ->AddOption("--nan-policy", &options->nan_policy, "",
                  "What becomes of NaN: the code of 0, or of the lowest "
                  "number; reject fails a tensor with NaN or an infinity. By "
                  "default the format's code of NaN, or else that of 0")
      ->OneOf({"zero-point", "qmin", "reject"});
  command->AddFlag("--evaluate", &options->evaluate,
                   "Measure the error of every quantized tensor");
  command->AddExample(
      "quantctl quantize model.safetensors -o model.int8.safetensors \\\n"
      "  --spec int8:per-channel");
  command->AddExample(
      "quantctl quantize llm/ -o llm-w4a16/ --layout compressed-tensors \\\n"
      "  --spec '*proj.weight=int4:group:128'",
      "a model in shards, by the names of its tensors");
  command->AddExample(
      "quantctl quantize model.safetensors -o mixed.safetensors \\\n"
      "  --spec @mixture.txt",
      "as quantctl sweep chose");
  command->AddExample(
      "quantctl quantize model-f16.gguf -o model-q4_0.gguf \\\n"
      "  --spec int4:group:32:scale=float16",
      "with the metadata of the input; specs that GGUF has no type for are "
      "refused");
  command->AddNote(
      "With --model the encodings of a run become visible all at once, at its "
      "end; with --part, when --join is done. If a run fails or is stopped, "
      "the revision is as it was. Encodings of tensors that the run does not "
      "have stay.");
  command->AddNote(
      "Smaller blocks cost scales: int4 takes 4.25 bits for an element with "
      "group:128, 5 with group:32; see quantctl help specs.");
  command->OnRun([options, session, store, part] {
    options->has_part = part->IsGiven();
    if (!store->IsGiven()) options->store = !options->name.model.empty();
    if (options->name.model.empty()) {
      options->name.model = FileStem(options->input);
    }
    Quantizer(*options, session).Run();
  });
}

}  // namespace quantd::cli
