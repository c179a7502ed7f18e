#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/input_options.h"
#include "client/cli/interrupt.h"
#include "client/cli/output_options.h"
#include "client/cli/progress.h"
#include "client/cli/quantize_report.h"
#include "client/cli/session.h"
#include "client/cli/streams.h"
#include "client/cli/tensor_notes.h"
#include "client/cli/tensor_options.h"
#include "client/cli/tie_options.h"
#include "client/files/safetensors.h"
#include "client/jobs/compressed_scheme.h"
#include "client/jobs/job_events.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_run.h"
#include "client/jobs/spec_options.h"

namespace quantd::cli {
namespace {

// The options of the command.
struct QuantizeCommand {
  jobs::QuantizeOptions options;
  // Those that count if they are given.
  std::string layout = "quantd";
  std::string part;
  std::vector<std::string> ignore;
  StreamsOption streams;
};

std::vector<std::string> SchemeNames() {
  std::vector<std::string> names;
  for (const jobs::SchemePreset& preset : jobs::SchemePresets()) {
    names.push_back(preset.name);
  }
  return names;
}

// Adds the options for the input and for the files of the output.
// Returns --layout.
const Option* AddFileOptions(Command* command, QuantizeCommand* quantize) {
  jobs::QuantizeOptions* const options = &quantize->options;
  AddInputArgument(command, &options->input);
  AddOutputOptions(command,
                   "safetensors or .gguf file, or - for standard output; a "
                   "folder for a folder, whose finished shards the next run "
                   "keeps, and for compressed-tensors",
                   &options->output)
      ->Required();
  command->AddFlag("--keep-going", &options->keep_going,
                   "Write the output even if tensors fail, with these as they "
                   "were");
  const Option* const layout =
      command
          ->AddOption("--layout", &quantize->layout, "",
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
const Option* AddShareOptions(Command* command, QuantizeCommand* quantize) {
  const Option* const part = command->AddOption(
      "--part", &quantize->part, "I/N",
      "Do share I of N, from 0/N on: whole shards where they can be shared out "
      "evenly, otherwise a range of the tensors. Every part has the same "
      "options; any may run again, at any time, on any machine that has the "
      "input and the output");
  command->AddFlag("--join", &quantize->options.join,
                   "Make the output of the parts, once all are done; calls the "
                   "server only to publish encodings and to read what is "
                   "stored of activations. Otherwise the same options as "
                   "the parts");
  return part;
}

// Adds --rounding and what goes with it, and --inputs.
void AddRoundingOptions(Command* command, jobs::QuantizeOptions* options) {
  jobs::RoundingOptions* const rounding = &options->rounding;
  command
      ->AddOption("--rounding", &rounding->method, "",
                  "To the nearest code, or compensated: each column of a "
                  "weight makes up for the errors of those before it (GPTQ), "
                  "with the Gram matrix of its layer's inputs. Tensors without "
                  "one go to the nearest, and are told")
      ->OneOf({"nearest", "compensated"})
      ->ShowDefault();
  AddInputsOptions(
      command,
      "Where the Gram matrices for --rounding are, and the moments for specs "
      "with importance: for MODULE.weight under MODULE.input, or under that of "
      "a layer that runtimes fuse with it. By default --model",
      &options->inputs);
  command->AddOption("--damping", &rounding->damping, "FRACTION",
                     "What is added to the diagonal of a Gram matrix, of its "
                     "mean; default 0.01");
  command
      ->AddOption("--column-order", &rounding->column_order, "",
                  "Columns by falling power of their input, or as they are; "
                  "default activation")
      ->OneOf({"activation", "natural"});
}

// Adds the options that decide what becomes of which tensors. Returns --store.
const Option* AddTensorOptions(Command* command,
                               jobs::QuantizeOptions* options) {
  AddRevisionOptions(command, /*required=*/false, &options->name);
  AddSpecOptions(command, &options->spec);
  AddFilterOptions(command, &options->filter);
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
  AddTieOptions(command, "Tensors that share one outer scale", &options->ties);
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

// Runs `quantctl quantize` and reports what became of it. Not thread-safe.
class Quantizer {
 public:
  Quantizer(const QuantizeCommand& command, Session* session)
      : streams_(command.streams),
        session_(*session),
        events_(MakeEvents()),
        run_(
            command.options, session->server,
            [this] { return streams_.Connect(session_); }, events_) {}

  void Run() {
    const jobs::QuantizeOptions& options = run_.options();
    const bool is_piped = options.output.IsStandardOutput();
    // A file of specs that cannot be read is an error of usage.
    absl::Status status = CheckSpecs();
    if (!status.ok()) return session_.FailUsage(status);
    status = run_.Prepare();
    if (!status.ok()) return FailEarly(status, &session_);
    if (is_piped) session_.stdout_is_data = true;
    if (options.store && is_piped) {
      // A reader that closes the pipe is an error then, after which the draft
      // can be deleted.
      std::signal(SIGPIPE, SIG_IGN);
      // So is a user who stops it.
      interrupt_note_.Defer();
    }
    status = run_.Write();
    progress_.reset();
    if (InterruptNote::stopped()) return InterruptNote::End();
    if (status.ok()) {
      ReportRun(options, run_.plan(), run_.server(), &session_);
    } else if (run_.has_begun()) {
      ReportError(status, options, run_.plan(), run_.server(), &session_);
    } else {
      ReportRefused(status, options, &session_);
    }
  }

 private:
  absl::Status CheckSpecs() const {
    jobs::SpecOptions specs = run_.options().spec;
    specs.takes_gguf_types = true;
    return specs.ParseSet().status();
  }

  jobs::JobEvents MakeEvents() {
    jobs::JobEvents events;
    events.on_warning = [this](absl::string_view text) {
      progress_.reset();
      session_.PrintError(absl::StrCat("quantctl: ", text));
    };
    events.on_unread = [this](const files::UnreadTensor& tensor) {
      ReportUnread(tensor, &session_);
    };
    if (!session_.quiet) events.on_note = events.on_warning;
    events.on_progress = [this](uint64_t done_bytes, uint64_t total_bytes,
                                absl::string_view tensor) {
      if (done_bytes == 0) {
        progress_.emplace(Progress::Unit::kBytes, !session_.quiet);
      }
      if (progress_.has_value()) {
        progress_->Set(done_bytes, total_bytes, tensor);
        if (done_bytes == total_bytes) progress_.reset();
      }
    };
    events.on_step = [this] {
      interrupt_note_.Set(
          UnfinishedText(run_.options(), run_.plan(), run_.server()));
    };
    events.is_stopped = &InterruptNote::stopped;
    return events;
  }

  const StreamsOption& streams_;
  Session& session_;
  InterruptNote interrupt_note_;
  std::optional<Progress> progress_;
  const jobs::JobEvents events_;
  jobs::QuantizeRun run_;
};

}  // namespace

void AddQuantizeCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "quantize",
      "Quantize the tensors of a file into a safetensors or GGUF file, and "
      "copy the others; nothing is written when a tensor fails");
  const auto quantize = std::make_shared<QuantizeCommand>();
  jobs::QuantizeOptions* const options = &quantize->options;
  const Option* const layout = AddFileOptions(command, quantize.get());
  quantize->streams.AddOption(command);
  const Option* const part = AddShareOptions(command, quantize.get());
  const Option* const store = AddTensorOptions(command, options);
  const Option* const ignore = command->AddOption(
      "--ignore", &quantize->ignore, "PATTERN",
      "Modules that a compressed-tensors model leaves as they are, in place of "
      "the default: the head, embeddings, routers, and what vLLM has no "
      "quantized layers for, unless --spec PATTERN=SPEC or --include names "
      "them. '' for none");
  AddExamplesAndNotes(command);
  command->OnRun([quantize, session, store, part, layout, ignore] {
    jobs::QuantizeOptions* const options = &quantize->options;
    if (part->IsGiven()) options->part = quantize->part;
    if (layout->IsGiven()) options->layout = quantize->layout;
    if (ignore->IsGiven()) options->ignore = quantize->ignore;
    if (!store->IsGiven()) options->store = !options->name.model.empty();
    Quantizer(*quantize, session).Run();
  });
}

}  // namespace quantd::cli
