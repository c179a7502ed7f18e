#include <algorithm>
#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/compressed_scheme.h"
#include "client/cli/importance_options.h"
#include "client/cli/interrupt.h"
#include "client/cli/progress.h"
#include "client/cli/quantize_activations.h"
#include "client/cli/quantize_folder.h"
#include "client/cli/quantize_gguf.h"
#include "client/cli/quantize_options.h"
#include "client/cli/quantize_output.h"
#include "client/cli/quantize_parts.h"
#include "client/cli/quantize_plan.h"
#include "client/cli/quantize_publish.h"
#include "client/cli/quantize_report.h"
#include "client/cli/quantize_rounding.h"
#include "client/cli/quantize_server.h"
#include "client/cli/selection.h"
#include "client/cli/session.h"
#include "client/cli/streams.h"
#include "client/files/mapped_file.h"
#include "client/files/safetensors.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"

namespace quantd::cli {
namespace {

std::vector<std::string> SchemeNames() {
  std::vector<std::string> names;
  for (const SchemePreset& preset : SchemePresets()) {
    names.push_back(preset.name);
  }
  return names;
}

// Adds the options for the input and for the files of the output.
// Returns --layout.
const Option* AddFileOptions(Command* command, QuantizeOptions* options) {
  AddInputArgument(command, &options->input);
  options->output
      .AddOptions(command,
                  "safetensors or .gguf file, or - for standard output; a "
                  "folder for a folder, whose finished shards the next run "
                  "keeps, and for compressed-tensors")
      ->Required();
  command->AddFlag("--keep-going", &options->keep_going,
                   "Write the output even if tensors fail, with these as they "
                   "were");
  const Option* const layout =
      command
          ->AddOption("--layout", &options->layout, "",
                      "How the codes lie in the file: as quantctl dequantize "
                      "takes them, or as compressed-tensors models have them, "
                      "with config.json; pack-quantized packs 8 bits too")
          ->OneOf({"quantd", "compressed-tensors", "pack-quantized"})
          ->ShowDefault();
  command
      ->AddOption("--scheme", &options->scheme, "",
                  "What vLLM calls it: sets --spec, --activations and --layout "
                  "compressed-tensors")
      ->OneOf(SchemeNames());
  command->AddOption(
      "--activations", &options->activations, "WHEN[=SPEC]",
      "How runtimes quantize the inputs of modules (compressed-tensors): none; "
      "dynamic, by what they see; or static, by the stored encodings of "
      "MODULE.input of --model. By default as the weights");
  command->AddOption("--kv-cache", &options->kv_cache, "SPEC",
                     "Quantize the cache of keys and values by the stored "
                     "encodings of X.k_proj.output and X.v_proj.output, or of "
                     "norms behind them, X.k_norm.output: float8_e4m3fn");
  command->AddOption("--metadata", &options->metadata, "FILE",
                     "GGUF file whose metadata a .gguf file gets; by default "
                     "the input");
  command->AddFlag("--requantize", &options->requantize,
                   "Quantize what is quantized already too, as `quantctl "
                   "dequantize` makes floats of it: blocks of GGUF, and "
                   "models of other programs");
  command->AddFlag("--restart", &options->restart,
                   "Do finished shards again as well");
  return layout;
}

// How the work is shared out. Returns --part.
const Option* AddShareOptions(Command* command, QuantizeOptions* options) {
  options->streams.AddOption(command);
  const Option* const part = command->AddOption(
      "--part", &options->parts.part, "I/N",
      "Do share I of N, from 0/N on: whole shards where they can be shared out "
      "evenly, otherwise a range of the tensors. Every part has the same "
      "options; any may run again, at any time, on any machine that has the "
      "input and the output");
  command->AddFlag("--join", &options->parts.join,
                   "Make the output of the parts, once all are done; calls the "
                   "server only to publish encodings and to read what is "
                   "stored of activations. Otherwise the same options as "
                   "the parts");
  return part;
}

// Adds the options that decide what becomes of which tensors. Returns --store.
const Option* AddTensorOptions(Command* command, QuantizeOptions* options) {
  options->name.AddOptions(command, /*required=*/false);
  options->spec.takes_gguf_types = true;
  options->spec.AddOptions(command);
  options->filter.AddOptions(command);
  const Option* const store = command->AddFlag(
      "--store,!--no-store", &options->store,
      "Keep the encodings on the server (the default with --model)");
  command
      ->AddOption("--nan-policy", &options->nan_policy, "",
                  "What becomes of NaN: the code of 0, or of the lowest "
                  "number; reject fails a tensor with NaN or an infinity. By "
                  "default the format's code of NaN, or else that of 0. With "
                  "the formats of MX, all elements of a block with NaN or an "
                  "infinity become NaN, unless rejected")
      ->OneOf({"zero-point", "qmin", "reject"});
  AddRoundingOptions(command, options);
  AddImportanceOption(command, &options->importance);
  options->ties.AddOptions(command, "Tensors that share one outer scale");
  command->AddFlag("--evaluate", &options->evaluate,
                   "Measure the error of every quantized tensor");
  return store;
}

void AddExamplesAndNotes(Command* command) {
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
      "quantctl quantize llm/ -o llm-fp8/ --scheme FP8 --model acme/llm",
      "a model for vLLM; the ranges of activations are those of acme/llm");
  command->AddExample(
      "quantctl quantize model-f16.gguf -o model-q4_0.gguf --spec q4_0",
      "with the metadata of the input; specs that GGUF has no type for are "
      "refused");
  command->AddExample(
      "quantctl quantize model-f16.gguf -o model-q4_k.gguf \\\n"
      "  --spec q4_K --spec 'output.weight=q6_K'",
      "quantctl makes these blocks itself, without a server");
  command->AddExample(
      "quantctl quantize model.safetensors -o model.int4.safetensors \\\n"
      "  --spec int4:group:128 --rounding compensated --inputs acme/net",
      "for the outputs of layers; the hook of torch stores their inputs");
  command->AddExample(
      "quantctl quantize model-f16.gguf -o model-q4_k.gguf --spec q4_K \\\n"
      "  --importance imatrix.gguf",
      "as llama.cpp's imatrix says which inputs matter");
  command->AddNote(
      "Of an ONNX model the initializers are quantized, to a safetensors file. "
      "To get an ONNX model with codes, calibrate it and use quantctl export "
      "--onnx.");
  command->AddNote(
      "With --model the encodings of a run become visible all at once, at its "
      "end; with --part, when --join is done. If a run fails or is stopped, "
      "the revision is as it was. Encodings of tensors that the run does not "
      "have stay.");
  command->AddNote(
      "Smaller blocks cost scales: int4 takes 4.25 bits for an element with "
      "group:128, 5 with group:32; see quantctl help specs.");
}

// One run of `quantctl quantize`. Not thread-safe.
class Quantizer {
 public:
  Quantizer(const QuantizeOptions& options, Session* session)
      : options_(options), session_(*session) {}

  void Run() {
    const absl::StatusOr<SpecSet> specs = options_.spec.ParseSet();
    if (!specs.ok()) return session_.FailUsage(specs.status());
    const absl::StatusOr<std::optional<Part>> part = ParsePartOptions(options_);
    if (!part.ok()) return session_.FailUsage(part.status());
    absl::Status status = CheckGgufOptions(options_, *specs);
    if (status.ok()) status = CheckRounding(options_, *specs);
    if (!status.ok()) return session_.FailUsage(status);
    std::optional<Connections> connections;
    if (NeedsActivations(options_) || NeedsInputs(options_, *specs)) {
      status = Connect(&connections);
      if (!status.ok()) return session_.FailUsage(status);
    }
    absl::StatusOr<QuantizePlan> plan = MakePlan(
        options_, *specs, *part,
        connections.has_value() ? connections->first() : nullptr, &session_);
    if (!plan.ok()) return FailEarly(plan.status(), &session_);
    plan_ = *std::move(plan);
    // A tensor that cannot be done ends the run before it costs anything.
    if (!plan_.AnyFailed() || options_.keep_going) {
      if (NeedsServer()) {
        if (!connections.has_value()) status = Connect(&connections);
        if (!status.ok()) return session_.FailUsage(status);
        if (options_.store && options_.output.IsStandardOutput()) {
          // A reader that closes the pipe is an error then, after which the
          // draft can be deleted.
          std::signal(SIGPIPE, SIG_IGN);
          // So is a user who stops it.
          interrupt_note_.Defer();
        }
        const absl::StatusOr<std::string> key =
            DraftKeyOf(options_, plan_, connections->first());
        if (!key.ok()) return ReportRefused(key.status(), options_, &session_);
        server_ = std::make_unique<QuantizeServer>(
            options_, *std::move(connections), *key, plan_);
        status = Check();
        if (!status.ok()) return ReportRefused(status, options_, &session_);
      }
      status = Write();
      const absl::Status unchanged = files::CheckMappedFiles();
      if (!unchanged.ok()) status = unchanged;
      // The output may be whole by now, but whoever stopped the run may not
      // keep it.
      if (status.ok() && InterruptNote::stopped()) {
        status = absl::CancelledError("stopped");
      }
      if (status.ok()) status = Publish();
    }
    DropDraft();
    if (InterruptNote::stopped()) return InterruptNote::End();
    if (status.ok()) {
      ReportRun(options_, plan_, server_.get(), &session_);
    } else {
      ReportError(status, options_, plan_, server_.get(), &session_);
    }
  }

 private:
  // Not where the parts are done, or all blocks are made here.
  bool NeedsServer() const {
    if (options_.store) return true;
    const auto is_made_here = [](const std::unique_ptr<Shard>& shard) {
      return !shard->blocks.empty() && shard->selected.empty();
    };
    return !options_.parts.join &&
           !std::all_of(plan_.shards.begin(), plan_.shards.end(), is_made_here);
  }

  absl::Status Connect(std::optional<Connections>* connections) const {
    absl::StatusOr<Connections> connected = options_.streams.Connect(session_);
    if (!connected.ok()) return connected.status();
    *connections = *std::move(connected);
    return absl::OkStatus();
  }

  // Sets the message for a run that is stopped now.
  void SetNote() {
    interrupt_note_.Set(UnfinishedText(options_, plan_, server_.get()));
  }

  // Before anything is done.
  absl::Status Check() const {
    return server_->draft() == nullptr
               ? absl::OkStatus()
               : CheckDraft(options_, plan_, *server_->draft(),
                            server_->client());
  }

  // Errors end the run and leave the shards that are complete; so does a tensor
  // that fails, unless the run is to keep going.
  absl::Status Write() {
    QuantizeFolder folder(options_, plan_, session_);
    absl::Status status = folder.Make();
    if (!status.ok()) return status;
    SetNote();
    bool is_written = false;
    status = WriteTargets(&folder, &is_written);
    if (!status.ok() || !is_written) {
      folder.RemoveIfEmpty();
      return status;
    }
    // A part leaves the rest to --join.
    if (!plan_.part.has_value()) status = folder.Complete();
    plan_.is_complete = status.ok();
    return status;
  }

  // Sets *is_written unless a tensor failed.
  absl::Status WriteTargets(QuantizeFolder* folder, bool* is_written) {
    uint64_t total_bytes = 0;
    for (const Target& target : plan_.targets) {
      if (target.IsDone()) continue;
      for (const files::FileTensor* const tensor : target.tensors) {
        total_bytes += tensor->data.size();
      }
      for (const auto& [tensor, type] : target.shard->blocks) {
        total_bytes += tensor->data.size();
      }
    }
    Progress progress(total_bytes, !session_.quiet);
    for (const Target& target : plan_.targets) {
      if (target.IsDone()) continue;
      const absl::Status status =
          options_.IsGguf()
              ? WriteGguf(options_, session_, server_.get(), &plan_, &progress)
              : WriteSafetensors(options_, target, server_.get(), folder,
                                 &plan_, &progress);
      if (!status.ok() || !target.shard->is_written) return status;
      SetNote();
    }
    *is_written = true;
    return absl::OkStatus();
  }

  // Makes the encodings of all shards visible, where they are stored. A part
  // alone is not what readers are to see.
  absl::Status Publish() {
    if (!plan_.is_complete || plan_.part.has_value() || server_ == nullptr ||
        server_->draft() == nullptr) {
      return absl::OkStatus();
    }
    const absl::Status status =
        PublishDraft(options_, *server_->draft(), server_->client(), &plan_);
    SetNote();
    return status;
  }

  // No later run goes on with what went to standard output. If it is not whole,
  // nobody needs its draft. The report tells of one that cannot be deleted.
  void DropDraft() const {
    if (!options_.output.IsStandardOutput() || server_ == nullptr ||
        server_->draft() == nullptr) {
      return;
    }
    // Encodings under way when the run was stopped may be stored too.
    const bool is_dropped =
        InterruptNote::stopped()
            ? !plan_.is_published
            : !plan_.is_complete && server_->stored_count() > 0;
    if (!is_dropped) return;
    server_->DeleteDraft().IgnoreError();
  }

  const QuantizeOptions& options_;
  Session& session_;
  QuantizePlan plan_;
  // Null where none is called.
  std::unique_ptr<QuantizeServer> server_;
  InterruptNote interrupt_note_;
};

}  // namespace

void AddQuantizeCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "quantize",
      "Quantize the tensors of a file into a safetensors or GGUF file, and "
      "copy the others; nothing is written when a tensor fails");
  const auto options = std::make_shared<QuantizeOptions>();
  const Option* const layout = AddFileOptions(command, options.get());
  const Option* const part = AddShareOptions(command, options.get());
  const Option* const store = AddTensorOptions(command, options.get());
  const Option* const ignore = command->AddOption(
      "--ignore", &options->ignore, "PATTERN",
      "Modules that a compressed-tensors model leaves as they are, in place of "
      "the default: the head, embeddings, routers, and what vLLM has no "
      "quantized layers for, unless --spec PATTERN=SPEC or --include names "
      "them. '' for none");
  AddExamplesAndNotes(command);
  command->OnRun([options, session, store, part, layout, ignore] {
    options->parts.has_part = part->IsGiven();
    options->has_layout = layout->IsGiven();
    options->has_ignore = ignore->IsGiven();
    if (!store->IsGiven()) options->store = !options->name.model.empty();
    const bool has_model = !options->name.model.empty();
    if (!has_model) {
      options->name.model = FileStem(options->input);
    }
    ResolveInputs(has_model, options.get());
    const absl::Status status = ApplyScheme(options.get());
    if (!status.ok()) return session->FailUsage(status);
    Quantizer(*options, session).Run();
  });
}

}  // namespace quantd::cli
