#include "client/cli/tensor_options.h"

#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cpp/errors.h"
#include "client/cpp/tensor.h"
#include "client/files/safetensors.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"

namespace quantd::cli {
namespace {

// The option of a spec that may name a file.
constexpr char kEntries[] = ":entries=";

}  // namespace

absl::Status CheckNoGgufType(const SpecTemplate& spec) {
  if (spec.gguf_type.empty()) return absl::OkStatus();
  return ArgumentInvalidError(absl::StrCat(
      "expected a spec of the server's formats, got ", spec.gguf_type,
      ", which quantize -o OUT.gguf, sweep FILE and evaluate alone take"));
}

void ReportUnread(const files::UnreadTensor& tensor, Session* session) {
  session->Note(kServerError);
  session->PrintError(absl::StrCat("quantctl: tensor ", tensor.name,
                                   ": left out: ", tensor.why));
}

void ReportUnread(const TensorInput& input, const TensorFilter& filter,
                  Session* session) {
  for (const files::UnreadTensor& tensor : input.unread()) {
    if (filter.TakesName(tensor.name)) ReportUnread(tensor, session);
  }
  ReportCastCodes(input, session);
}

void ReportCastCodes(const TensorInput& input, Session* session) {
  const auto& found = input.onnx_cast_codes();
  if (found.empty()) return;
  session->PrintError(absl::StrCat(
      "quantctl: note: the model makes floats of the integers ", found[0].codes,
      " by a Cast and a Mul with ", found[0].scales,
      found.size() == 1
          ? ""
          : absl::StrCat(", and of ", CountText(found.size() - 1), " more"),
      ": if they are codes, these weights are quantized already, and are left "
      "as they are"));
}

void TensorFilter::AddOptions(Command* command) {
  command->AddOption("--include", &include, "PATTERN",
                     "Only tensors whose name matches this pattern (* and ?); "
                     "may be repeated");
  command->AddOption("--exclude", &exclude, "PATTERN",
                     "Not tensors whose name matches this pattern; may be "
                     "repeated");
  command
      ->AddOption("--min-rank", &min_rank, "N",
                  "Only tensors of at least that many dimensions")
      ->NotNegative()
      ->ShowDefault();
  command->AddFlag("--all", &all, "Tensors of any rank");
}

bool TensorFilter::IsGiven() const {
  return !include.empty() || !exclude.empty() || all ||
         min_rank != TensorFilter().min_rank;
}

bool TensorFilter::Takes(const files::FileTensor& tensor) const {
  if (!ElementTypeOf(tensor.dtype).has_value()) return false;
  if (!all && static_cast<int64_t>(tensor.shape.size()) < min_rank) {
    return false;
  }
  return TakesName(tensor.name);
}

bool TensorFilter::TakesName(absl::string_view name) const {
  return (include.empty() || MatchesAny(include, name)) &&
         !MatchesAny(exclude, name);
}

void NameOptions::AddOptions(Command* command, bool required) {
  Option* const option = command->AddOption(
      "--model", &model, "NAME",
      required ? "Model" : "Model that encodings are kept under");
  if (required) option->Required();
  command->AddOption("--revision", &revision, "NAME", "Revision of the model")
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

TensorName NameOptions::NameOf(const std::string& tensor) const {
  TensorName name;
  name.set_model(model);
  name.set_revision(revision);
  name.set_tensor(tensor);
  return name;
}

void SpecOptions::AddOptions(Command* command) {
  command
      ->AddOption("--spec", &specs, "[PATTERN=]SPEC",
                  "What tensors become, such as int8:per-channel, for all of "
                  "them; with PATTERN= for those whose name matches (* and ?). "
                  "@FILE has one on each line. May be repeated; see quantctl "
                  "help specs")
      ->Suggest(FormatNames());
}

absl::StatusOr<SpecSet> SpecOptions::ParseSet() const {
  SpecSet set;
  bool has_base = false;
  std::vector<std::string> texts = specs;
  if (texts.empty()) texts = {kDefaultSpec};
  for (const std::string& text : texts) {
    const absl::Status status = AddSpec(text, &set, &has_base);
    if (!status.ok()) return status;
  }
  if (!takes_gguf_types) {
    absl::Status status = CheckNoGgufType(set.base);
    for (const SpecSet::Override& entry : set.overrides) {
      status.Update(CheckNoGgufType(entry.spec));
    }
    if (!status.ok()) return status;
  }
  set.has_base = has_base;
  return set;
}

std::vector<std::string> SpecOptions::Files() const {
  // Numbers in the place of a file are no file's name, as a rule, and do no
  // harm.
  std::vector<std::string> names;
  for (const std::string& spec : specs) {
    if (absl::StartsWith(spec, "@")) {
      names.push_back(spec.substr(1));
      continue;
    }
    const size_t entries = spec.find(kEntries);
    if (entries == std::string::npos) continue;
    const size_t begin = entries + std::size(kEntries) - 1;
    names.push_back(spec.substr(begin, spec.find(':', begin) - begin));
  }
  return names;
}

}  // namespace quantd::cli
