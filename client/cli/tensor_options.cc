#include "client/cli/tensor_options.h"

#include <string>

#include "client/cli/command_line.h"
#include "client/jobs/revision_name.h"
#include "client/jobs/spec_options.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/spec_syntax.h"

namespace quantd::cli {
void AddFilterOptions(Command* command, jobs::TensorFilter* filter) {
  command->AddOption("--include", &filter->include, "PATTERN",
                     "Only tensors whose name matches this pattern (* and ?); "
                     "may be repeated");
  command->AddOption("--exclude", &filter->exclude, "PATTERN",
                     "Not tensors whose name matches this pattern; may be "
                     "repeated");
  command
      ->AddOption("--min-rank", &filter->min_rank, "N",
                  "Only tensors of at least that many dimensions")
      ->NotNegative()
      ->ShowDefault();
  command->AddFlag("--all", &filter->all, "Tensors of any rank");
}

void AddRevisionOptions(Command* command, bool required,
                        jobs::RevisionName* name) {
  Option* const option = command->AddOption(
      "--model", &name->model, "NAME",
      required ? "Model" : "Model that encodings are kept under");
  if (required) option->Required();
  command
      ->AddOption("--revision", &name->revision, "NAME",
                  "Revision of the model")
      ->ShowDefault();
}

void AddInputArgument(Command* command, std::string* input) {
  command
      ->AddArgument("file", input, "FILE",
                    "safetensors, .npy, .gguf or .onnx file, or a folder with "
                    "model.safetensors.index.json or model.safetensors")
      ->Required();
}

void AddTensorArgument(Command* command, std::string* tensor) {
  command->AddArgument("tensor", tensor, "TENSOR", "Name of the tensor")
      ->Required();
}

void AddSpecOptions(Command* command, jobs::SpecOptions* options) {
  command
      ->AddOption("--spec", &options->specs, "[PATTERN=]SPEC",
                  "What tensors become, such as int8:per-channel, for all of "
                  "them; with PATTERN= for those whose name matches (* and ?). "
                  "@FILE has one on each line. May be repeated; see quantctl "
                  "help specs")
      ->Suggest(FormatNames());
}

}  // namespace quantd::cli
