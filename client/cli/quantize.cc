#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/compressed_tensors.h"
#include "client/cli/progress.h"
#include "client/cli/quantized_tensor.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_input.h"
#include "client/cli/tensor_loop.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/atomic_file.h"
#include "client/files/errors.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
#include "nlohmann/json.hpp"
#include "xxhash.h"

namespace quantd::cli {
namespace {

struct Options {
  std::string input;
  std::string output;
  NameOptions name;
  SpecOptions spec;
  TensorFilter filter;
  std::string layout = "quantd";
  bool store = true;
  bool evaluate = false;
  bool restart = false;
};

// What a shard was made from and how; with the same, an earlier run's is kept.
constexpr char kRunKey[] = "quantctl.run";
// What --evaluate has measured of the tensors of a shard: an object of their
// names, and of v1.ErrorMetrics in base64.
constexpr char kMetricsKey[] = "quantctl.metrics";
// The schemes of a compressed-tensors shard.
constexpr char kModulesKey[] = "quantctl.modules";

// What became of one tensor.
struct Outcome {
  // A tensor that failed is copied, like one that was not selected.
  absl::Status status;
  bool is_quantized = false;
  // An earlier run has done it.
  bool is_kept = false;
  // Of the codes; an encoding may have turned to the unsigned format.
  std::string format;
  uint64_t output_bytes = 0;
  v1::QuantizeSummary summary;
  std::optional<v1::ErrorMetrics> metrics;
};

// One run of `quantctl quantize`. Not thread-safe.
class Quantizer {
 public:
  Quantizer(const Options& options, Session* session)
      : options_(options), session_(*session) {}

  void Run() {
    absl::StatusOr<SpecSet> specs = options_.spec.ParseSet();
    if (!specs.ok()) return session_.FailUsage(specs.status());
    specs_ = *std::move(specs);
    absl::StatusOr<std::unique_ptr<Client>> client = session_.Connect();
    if (!client.ok()) return session_.FailUsage(client.status());
    client_ = *std::move(client);
    const absl::Status status = RunFiles();
    if (!status.ok()) return session_.Fail(status);
    Report();
  }

 private:
  bool IsCompressed() const { return options_.layout != "quantd"; }

  // Errors end the run and leave the shards that are complete.
  absl::Status RunFiles() {
    const bool is_folder = files::IsFolder(options_.input);
    if (!is_folder && !IsCompressed()) {
      return RunFile(options_.input, options_.output);
    }
    if (mkdir(options_.output.c_str(), 0777) != 0 && errno != EEXIST) {
      return files::FileUnwritableError(options_.output, errno);
    }
    files::ShardIndex shards;
    shards.shards = {files::kSingleShardName};
    if (is_folder) {
      absl::StatusOr<files::ShardIndex> index =
          files::ReadShardIndex(options_.input);
      if (!index.ok()) return index.status();
      shards = *std::move(index);
    }
    for (const std::string& shard : shards.shards) {
      absl::Status status = RunFile(
          is_folder ? absl::StrCat(options_.input, "/", shard) : options_.input,
          absl::StrCat(options_.output, "/", shard));
      if (!status.ok()) return status;
    }
    if (!shards.weight_map.empty()) {
      absl::Status status = WriteIndex(shards);
      if (!status.ok()) return status;
    }
    return IsCompressed() ? WriteConfig() : absl::OkStatus();
  }

  absl::Status WriteIndex(const files::ShardIndex& shards) {
    std::map<std::string, std::string> weight_map;
    uint64_t total_bytes = 0;
    for (const std::string& shard : shards.shards) {
      const absl::StatusOr<files::SafetensorsReader> written =
          files::SafetensorsReader::Open(
              absl::StrCat(options_.output, "/", shard));
      if (!written.ok()) return written.status();
      for (const files::FileTensor& tensor : written->tensors()) {
        weight_map[tensor.name] = shard;
        total_bytes += tensor.data.size();
      }
    }
    return files::WriteShardIndex(options_.output, weight_map, total_bytes);
  }

  // The model's configuration with the schemes of its modules.
  absl::Status WriteConfig() {
    Json config = Json::object();
    if (files::IsFolder(options_.input)) {
      const std::string path = absl::StrCat(options_.input, "/config.json");
      std::ifstream file(path, std::ios::binary);
      if (file) {
        const std::string text(std::istreambuf_iterator<char>(file), {});
        config = Json::parse(text, nullptr, /*allow_exceptions=*/false);
        if (!config.is_object()) {
          return files::FileMalformedError(path, "expected a JSON object");
        }
      }
    }
    config["quantization_config"] = compressed_.Config();
    absl::StatusOr<files::AtomicFile> file = files::AtomicFile::Create(
        absl::StrCat(options_.output, "/config.json"));
    if (!file.ok()) return file.status();
    absl::Status status = file->Append(absl::StrCat(
        config.dump(2, ' ', false, Json::error_handler_t::replace), "\n"));
    return status.ok() ? file->Commit() : status;
  }

  // Everything that the shard of an input depends on.
  std::string RunOf(const std::string& path) const {
    std::string text =
        absl::StrCat(options_.layout, "\n", options_.name.model, "\n",
                     options_.name.revision, "\n", options_.evaluate, "\n",
                     // Where the encodings are.
                     options_.store ? session_.server : "", "\n");
    struct stat status;
    if (stat(path.c_str(), &status) == 0) {
      absl::StrAppend(&text, status.st_size, " ", status.st_mtim.tv_sec, " ",
                      status.st_mtim.tv_nsec, "\n");
    }
    for (const files::FileTensor& tensor : input_->tensors()) {
      if (!options_.filter.Takes(tensor)) continue;
      const absl::StatusOr<EncodingSpec> spec =
          specs_.For(tensor.name).SpecOf(tensor.shape);
      absl::StrAppend(&text, tensor.name, "\n",
                      spec.ok() ? spec->SerializeAsString() : "", "\n");
    }
    return absl::StrFormat("%016x", XXH3_64bits(text.data(), text.size()));
  }

  // Whether an earlier run has written that shard.
  bool Keep(const std::string& path, const std::string& run) {
    if (options_.restart) return false;
    const absl::StatusOr<files::SafetensorsReader> written =
        files::SafetensorsReader::Open(path);
    if (!written.ok()) return false;
    const auto found = written->metadata().find(kRunKey);
    if (found == written->metadata().end() || found->second != run) {
      return false;
    }
    if (options_.evaluate && !RestoreMetrics(*written)) return false;
    const auto modules = written->metadata().find(kModulesKey);
    if (modules != written->metadata().end()) {
      const Json json =
          Json::parse(modules->second, nullptr, /*allow_exceptions=*/false);
      if (json.is_object()) compressed_.Restore(json);
    }
    for (const files::FileTensor& tensor : written->tensors()) {
      outcomes_[tensor.name].output_bytes = tensor.data.size();
      file_bytes_ += tensor.data.size();
    }
    for (const files::FileTensor& tensor : input_->tensors()) {
      outcomes_[tensor.name].is_kept = true;
    }
    return true;
  }

  // False, and nothing is restored, where a shard does not tell them.
  bool RestoreMetrics(const files::SafetensorsReader& written) {
    const auto found = written.metadata().find(kMetricsKey);
    if (found == written.metadata().end()) return false;
    const Json json =
        Json::parse(found->second, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) return false;
    std::map<std::string, v1::ErrorMetrics> metrics;
    for (const auto& [name, value] : json.items()) {
      std::string bytes;
      if (!value.is_string() ||
          !absl::Base64Unescape(value.get<std::string>(), &bytes) ||
          !metrics[name].ParseFromString(bytes)) {
        return false;
      }
    }
    for (const auto& [name, value] : metrics) outcomes_[name].metrics = value;
    return true;
  }

  // Of the shard under way.
  std::string MetricsText() const {
    Json json = Json::object();
    for (const files::FileTensor& tensor : input_->tensors()) {
      const Outcome& outcome = outcomes_.at(tensor.name);
      if (!outcome.metrics.has_value()) continue;
      json[tensor.name] =
          absl::Base64Escape(outcome.metrics->SerializeAsString());
    }
    return json.dump();
  }

  absl::Status RunFile(const std::string& input_path,
                       const std::string& output_path) {
    absl::StatusOr<TensorInput> input = TensorInput::Open(input_path);
    if (!input.ok()) return input.status();
    inputs_.push_back(std::make_unique<const TensorInput>(*std::move(input)));
    input_ = inputs_.back().get();
    ReportUnread(*input_, &session_);
    const bool is_shard = output_path != options_.output;
    const std::string run = is_shard ? RunOf(input_path) : "";
    if (is_shard && Keep(output_path, run)) return absl::OkStatus();
    absl::StatusOr<files::SafetensorsWriter> writer =
        files::SafetensorsWriter::Create(output_path);
    if (!writer.ok()) return writer.status();
    for (const auto& [key, value] : input_->metadata()) {
      writer->SetMetadata(key, value);
    }
    CompressedModel shard(options_.layout == "pack-quantized");
    shard_ = &shard;
    absl::Status status = Quantize(&*writer);
    if (!status.ok()) return status;
    status = CopyOthers(&*writer);
    if (!status.ok()) return status;
    compressed_.Restore(shard.modules());
    if (IsCompressed()) {
      writer->SetMetadata("format", "pt");
      writer->SetMetadata(kModulesKey, shard.modules().dump());
    }
    // One that failed in part is done again.
    const bool is_whole =
        std::all_of(input_->tensors().begin(), input_->tensors().end(),
                    [this](const files::FileTensor& tensor) {
                      return outcomes_[tensor.name].status.ok();
                    });
    if (is_shard && is_whole) {
      writer->SetMetadata(kRunKey, run);
      if (options_.evaluate) writer->SetMetadata(kMetricsKey, MetricsText());
    }
    const absl::StatusOr<uint64_t> size = writer->Finish();
    if (!size.ok()) return size.status();
    file_bytes_ += *size;
    return absl::OkStatus();
  }

  absl::Status Quantize(files::SafetensorsWriter* writer) {
    std::vector<const files::FileTensor*> selected;
    uint64_t total_bytes = 0;
    for (const files::FileTensor& tensor : input_->tensors()) {
      if (!options_.filter.Takes(tensor)) continue;
      absl::Status status = CheckNames(tensor.name);
      if (status.ok()) {
        status = specs_.For(tensor.name).SpecOf(tensor.shape).status();
      }
      if (!status.ok()) {
        outcomes_[tensor.name].status = status;
        continue;
      }
      selected.push_back(&tensor);
      total_bytes += tensor.data.size();
    }
    Progress progress(total_bytes, !session_.quiet);
    const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
    const std::unique_ptr<EvaluateStream> evaluate_stream =
        client_->OpenEvaluate();
    absl::Status fatal;
    ForEachTensor(
        stream.get(), selected,
        [this](const files::FileTensor& tensor) { return MakeJob(tensor); },
        [&](const files::FileTensor& tensor,
            const absl::StatusOr<QuantizeResult>& result) {
          progress.Add(tensor.data.size(), tensor.name);
          fatal = TakeResult(tensor, result, evaluate_stream.get(), writer);
          return fatal.ok();
        });
    return fatal;
  }

  // The names that a quantized tensor takes must be free.
  absl::Status CheckNames(const std::string& name) const {
    for (const absl::string_view suffix : kSuffixes) {
      const std::string taken = absl::StrCat(name, suffix);
      if (input_->Find(taken) != nullptr) {
        return ArgumentInvalidError(
            absl::StrCat("the file has a tensor \"", taken, "\" of its own"));
      }
    }
    return absl::OkStatus();
  }

  QuantizeJob MakeJob(const files::FileTensor& tensor) const {
    QuantizeJob job;
    job.tensor = MakeTensor(tensor, options_.name.NameOf(tensor.name));
    // CheckNames' caller has left out what has no spec.
    job.source = *specs_.For(tensor.name).SpecOf(tensor.shape);
    job.store = options_.store;
    return job;
  }

  // Errors end the run; those of the tensor alone go to its outcome.
  absl::Status TakeResult(const files::FileTensor& tensor,
                          const absl::StatusOr<QuantizeResult>& result,
                          EvaluateStream* evaluate_stream,
                          files::SafetensorsWriter* writer) {
    Outcome& outcome = outcomes_[tensor.name];
    if (!result.ok()) {
      outcome.status = result.status();
      return ExitCodeOf(result.status()) == kUnreachable ? result.status()
                                                         : absl::OkStatus();
    }
    const absl::StatusOr<uint64_t> size =
        IsCompressed()
            ? shard_->Write(tensor.name, tensor.shape,
                            result->header.encoding(), result->codes, writer)
            : WriteQuantized(tensor.name, *ElementTypeOf(tensor.dtype),
                             tensor.shape, result->header.encoding(),
                             result->codes, writer);
    if (ErrorReason(size.status()) == "ARGUMENT_INVALID") {
      outcome.status = size.status();
      return absl::OkStatus();
    }
    if (!size.ok()) return size.status();
    outcome.is_quantized = true;
    outcome.format = FormatName(result->header.encoding().format());
    outcome.output_bytes = *size;
    outcome.summary = result->summary;
    if (!options_.evaluate) return absl::OkStatus();
    EvaluateJob job;
    job.tensor = MakeTensor(tensor, options_.name.NameOf(tensor.name));
    job.candidates.push_back({result->header.encoding(), ""});
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

  absl::Status CopyOthers(files::SafetensorsWriter* writer) {
    for (const files::FileTensor& tensor : input_->tensors()) {
      Outcome& outcome = outcomes_[tensor.name];
      if (outcome.is_quantized) continue;
      const absl::Status status =
          writer->AddView(tensor.name, tensor.dtype, tensor.shape, tensor.data);
      if (!status.ok()) return status;
      outcome.output_bytes = tensor.data.size();
    }
    return absl::OkStatus();
  }

  void Report() {
    Json list = Json::array();
    Table table;
    table.AddColumn("TENSOR", Table::Align::kLeft);
    table.AddColumn("SHAPE", Table::Align::kLeft);
    table.AddColumn("DTYPE", Table::Align::kLeft);
    table.AddColumn("RESULT", Table::Align::kLeft);
    table.AddColumn("BEFORE", Table::Align::kRight);
    table.AddColumn("AFTER", Table::Align::kRight);
    if (options_.evaluate) {
      table.AddColumn("SQNR DB", Table::Align::kRight);
      table.AddColumn("MAX ERROR", Table::Align::kRight);
    }
    uint64_t before = 0;
    uint64_t after = 0;
    uint64_t quantized_count = 0;
    uint64_t failed_count = 0;
    std::set<std::string> formats;
    std::vector<const files::FileTensor*> tensors;
    for (const std::unique_ptr<const TensorInput>& input : inputs_) {
      for (const files::FileTensor& tensor : input->tensors()) {
        tensors.push_back(&tensor);
      }
    }
    for (const files::FileTensor* const one : tensors) {
      const files::FileTensor& tensor = *one;
      const Outcome& outcome = outcomes_[tensor.name];
      before += tensor.data.size();
      after += outcome.output_bytes;
      quantized_count += outcome.is_quantized ? 1 : 0;
      if (outcome.is_quantized) formats.insert(outcome.format);
      failed_count += outcome.status.ok() ? 0 : 1;
      list.push_back(OutcomeJson(tensor, outcome));
      table.AddRow(OutcomeRow(tensor, outcome));
    }
    if (failed_count > 0) session_.Note(kServerError);
    if (session_.json) {
      return session_.PrintJson({{"input", options_.input},
                                 {"output", options_.output},
                                 {"formats", formats},
                                 {"bytes_before", before},
                                 {"bytes_after", after},
                                 {"file_bytes", file_bytes_},
                                 {"quantized_count", quantized_count},
                                 {"failed_count", failed_count},
                                 {"retries", session_.retries()},
                                 {"tensors", list}});
    }
    session_.Print(table.Render(StdoutHasStyle()));
    session_.Print(
        absl::StrCat(CountText(quantized_count), " of ",
                     CountText(tensors.size()), " tensors to ",
                     formats.empty() ? "codes" : absl::StrJoin(formats, ", "),
                     ", ", BytesText(before), " to ", BytesText(after),
                     ", written to ", Printable(options_.output), "\n"));
    for (const files::FileTensor* const tensor : tensors) {
      const absl::Status& status = outcomes_[tensor->name].status;
      if (status.ok()) continue;
      session_.PrintError(absl::StrCat("quantctl: tensor ", tensor->name, ": ",
                                       status.message()));
    }
  }

  const char* ResultName(const Outcome& outcome) const {
    if (outcome.is_quantized) return outcome.format.c_str();
    if (outcome.is_kept) return "kept";
    return outcome.status.ok() ? "copied" : "failed, copied";
  }

  std::vector<std::string> OutcomeRow(const files::FileTensor& tensor,
                                      const Outcome& outcome) const {
    std::vector<std::string> row = {Printable(tensor.name),
                                    ShapeText(tensor.shape),
                                    std::string(DtypeName(tensor.dtype)),
                                    ResultName(outcome),
                                    BytesText(tensor.data.size()),
                                    BytesText(outcome.output_bytes)};
    if (outcome.metrics.has_value()) {
      row.push_back(DecibelText(outcome.metrics->sqnr_db()));
      row.push_back(NumberText(outcome.metrics->max_absolute_error()));
    }
    return row;
  }

  Json OutcomeJson(const files::FileTensor& tensor,
                   const Outcome& outcome) const {
    Json json = {{"name", tensor.name},
                 {"shape", tensor.shape},
                 {"dtype", std::string(DtypeName(tensor.dtype))},
                 {"result", outcome.is_quantized  ? "quantized"
                            : outcome.is_kept     ? "kept"
                            : outcome.status.ok() ? "copied"
                                                  : "failed"},
                 {"bytes_before", tensor.data.size()},
                 {"bytes_after", outcome.output_bytes}};
    if (outcome.is_quantized) {
      const v1::QuantizeSummary& summary = outcome.summary;
      json["format"] = outcome.format;
      json["clipped_low_count"] = summary.clipped_low_count();
      json["clipped_high_count"] = summary.clipped_high_count();
      json["nan_count"] = summary.nan_count();
      json["infinity_count"] =
          summary.positive_infinity_count() + summary.negative_infinity_count();
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
  SpecSet specs_;
  std::unique_ptr<Client> client_;
  // Of all shards; the one under way.
  std::vector<std::unique_ptr<const TensorInput>> inputs_;
  const TensorInput* input_ = nullptr;
  // What a compressed-tensors configuration will have; that of the shard under
  // way.
  CompressedModel compressed_{false};
  CompressedModel* shard_ = nullptr;
  absl::flat_hash_map<std::string, Outcome> outcomes_;
  uint64_t file_bytes_ = 0;
};

}  // namespace

void AddQuantizeCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "quantize",
      "Quantize the tensors of a file into a safetensors file; others, and "
      "those that fail, are copied as they are");
  const auto options = std::make_shared<Options>();
  command
      ->AddArgument("file", &options->input, "FILE",
                    "safetensors, .npy or .gguf file, or a folder with "
                    "model.safetensors.index.json or model.safetensors")
      ->Required();
  command
      ->AddOption("-o,--output", &options->output, "FILE",
                  "safetensors file; a folder for a folder, whose finished "
                  "shards the next run keeps, and for compressed-tensors")
      ->Required();
  command
      ->AddOption("--layout", &options->layout, "",
                  "How the codes lie in the file: as quantctl dequantize "
                  "takes them, or as compressed-tensors models have them, "
                  "with config.json; pack-quantized packs 8 bits too")
      ->OneOf({"quantd", "compressed-tensors", "pack-quantized"})
      ->ShowDefault();
  command->AddFlag("--restart", &options->restart,
                   "Do finished shards again as well");
  options->name.AddOptions(command, /*required=*/false);
  options->spec.AddOptionsWithPatterns(command);
  options->filter.AddOptions(command);
  command->AddFlag("--store,!--no-store", &options->store,
                   "Keep the encodings on the server (the default)");
  command->AddFlag("--evaluate", &options->evaluate,
                   "Measure the error of every quantized tensor");
  command->OnRun([options, session] {
    if (options->name.model.empty()) {
      options->name.model = FileStem(options->input);
    }
    Quantizer(*options, session).Run();
  });
}

}  // namespace quantd::cli
