#include "client/cli/tensor_options.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
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

bool AnyGiven(const std::vector<Option*>& options) {
  return std::any_of(options.begin(), options.end(),
                     [](const Option* option) { return option->IsGiven(); });
}

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
  // In place of --spec, for scripts of earlier versions.
  const auto count = [this](Option* option) {
    given_.push_back(option->Hidden());
  };
  count(command->AddOption("--format", &format, "FORMAT", FormatList().c_str())
            ->Suggest(FormatNames())
            ->ShowDefault());
  Option* const granularity_option =
      command
          ->AddOption("--granularity", &granularity, "GRANULARITY",
                      "default (per tensor, or the format's own blocks), "
                      "per-tensor, per-channel (axis 0), per-channel:AXIS or "
                      "group:N (along the last axis); tensors of rank below 2 "
                      "are per tensor")
          ->Suggest(GranularityNames())
          ->ShowDefault();
  Option* const block_size_option =
      command
          ->AddOption("--block-size", &block_size, "N,N,...",
                      "A number per dimension instead, 0 for the whole "
                      "dimension, e.g. 1,0,32")
          ->Excludes(granularity_option);
  granularity_given_ = {granularity_option->Hidden(),
                        block_size_option->Hidden()};
  count(command
            ->AddOption("--symmetry", &symmetry, "SYMMETRY",
                        "default (strict for signed formats, asymmetric for "
                        "unsigned ones), asymmetric, strict, full-range, "
                        "half-step, aimet (AIMET's own: the least scale on "
                        "all codes that clips nothing)")
            ->Suggest(SymmetryNames())
            ->ShowDefault());
  count(command
            ->AddOption("--method", &method, "METHOD",
                        "How the range is found: minmax, percentile[=KEPT], "
                        "mse[=STEPS], sqnr[=GAMMA], entropy[=STEPS], fixed, "
                        "moving-average, best-of:METHOD,METHOD,...")
            ->Suggest(MethodNames())
            ->ShowDefault());
  count(command->AddOption("--tail", &tail_fraction, "FRACTION",
                           "percentile: the part that is cut off; default "
                           "0.001"));
  count(command
            ->AddOption("--tail-side", &tail_side, "SIDE",
                        "percentile: where: default (magnitude for symmetric "
                        "ranges, otherwise both), magnitude, both, upper, "
                        "lower")
            ->Suggest(TailNames())
            ->ShowDefault());
  count(command->AddOption("--gamma", &gamma, "WEIGHT",
                           "sqnr: weight of clipped elements; default 3"));
  count(command->AddOption("--steps", &search_steps, "N",
                           "mse, sqnr, entropy: candidate ranges; default "
                           "128, or 32 for each end"));
  count(command->AddOption("--bins", &entropy_bins, "N",
                           "entropy: linear bins; default 2048 or more"));
  count(command->AddOption("--range", &range, "MIN,MAX", "fixed: the range"));
  count(command->AddFlag("--power-of-two", &power_of_two,
                         "Round scales up to powers of two"));
  count(command->AddFlag("--no-saturation", &no_saturation,
                         "Floats: overflow becomes infinity or NaN"));
  count(command
            ->AddOption("--scale-type", &scale_type, "TYPE",
                        "How scales are stored: default, float32, float16, "
                        "bfloat16, e8m0, e4m3, integer")
            ->Suggest(ScaleTypeNames())
            ->ShowDefault());
  count(command
            ->AddOption("--mx-rule", &mx_rule, "RULE",
                        "e8m0 scales: default (floor), floor, ceil, even, "
                        "rceil")
            ->Suggest(MxScaleRuleNames())
            ->ShowDefault());
  AddCodebookOption(command);
}

void SpecOptions::AddCodebookOption(Command* command) {
  command
      ->AddOption("--codebook", &codebook, "FILE|N,N,...",
                  "codebook formats: the entries in ascending order, or a "
                  "file that has them")
      ->Hidden();
}

void SpecOptions::AddOptionsWithPatterns(Command* command) {
  AddOptions(command);
  command
      ->AddOption("--spec", &specs, "[PATTERN=]SPEC",
                  "What tensors become, such as int8:per-channel, for all of "
                  "them; with PATTERN= for those whose name matches (* and ?). "
                  "@FILE has one on each line. May be repeated; see quantctl "
                  "help specs")
      ->Suggest(FormatNames());
}

void SpecOptions::ShowGranularity() {
  granularity_given_[0]->Shown(
      "Granularity of the statistics: per-tensor, per-channel[:AXIS] or "
      "group:N");
  granularity_given_[1]->Shown(
      "The same as a number for each dimension, 0 for the whole of it");
}

bool SpecOptions::IsGiven() const { return AnyGiven(given_); }

absl::StatusOr<Granularity> SpecOptions::ParseGranularityOptions() const {
  return block_size.empty() ? ParseGranularity(granularity)
                            : ParseBlockSize(block_size);
}

absl::Status SpecOptions::AddCodebook(SpecTemplate* spec) const {
  const absl::StatusOr<FormatInfo> info = GetFormatInfo(spec->spec.format());
  if (codebook.empty() || !info.ok() || !info->carries_codebook) {
    return absl::OkStatus();
  }
  const absl::StatusOr<std::vector<float>> entries = ParseCodebook(codebook);
  if (!entries.ok()) return entries.status();
  spec->spec.mutable_codebook()->Assign(entries->begin(), entries->end());
  return absl::OkStatus();
}

absl::StatusOr<SpecTemplate> SpecOptions::Parse() const {
  SpecTemplate result;
  EncodingSpec& spec = result.spec;
  const absl::StatusOr<v1::NumberFormat> parsed_format = ParseFormat(format);
  if (!parsed_format.ok()) return parsed_format.status();
  spec.set_format(*parsed_format);
  const absl::StatusOr<Granularity> parsed_granularity =
      ParseGranularityOptions();
  if (!parsed_granularity.ok()) return parsed_granularity.status();
  result.granularity = *parsed_granularity;
  const absl::StatusOr<v1::Symmetry> parsed_symmetry = ParseSymmetry(symmetry);
  if (!parsed_symmetry.ok()) return parsed_symmetry.status();
  spec.set_symmetry(*parsed_symmetry);
  absl::Status status = ParseMethod(method, &spec);
  if (status.ok() && !range.empty()) status = ParseRange(range, &spec);
  if (!status.ok()) return status;
  if (tail_fraction.has_value()) spec.set_tail_fraction(*tail_fraction);
  const absl::StatusOr<v1::Tail> tail = ParseTail(tail_side);
  if (!tail.ok()) return tail.status();
  spec.set_tail(*tail);
  if (gamma.has_value()) spec.set_gamma(*gamma);
  if (search_steps != 0) spec.set_search_steps(search_steps);
  spec.set_entropy_bins(entropy_bins);
  spec.set_power_of_two_scale(power_of_two);
  spec.set_no_saturation(no_saturation);
  const absl::StatusOr<v1::ScaleType> parsed_scale_type =
      ParseScaleType(scale_type);
  if (!parsed_scale_type.ok()) return parsed_scale_type.status();
  spec.set_scale_type(*parsed_scale_type);
  const absl::StatusOr<v1::MxScaleRule> rule = ParseMxScaleRule(mx_rule);
  if (!rule.ok()) return rule.status();
  spec.set_mx_scale_rule(*rule);
  status = AddCodebook(&result);
  if (!status.ok()) return status;
  return result;
}

absl::StatusOr<SpecSet> SpecOptions::ParseSet(bool granularity_is_apart) const {
  SpecSet set;
  bool has_base = false;
  for (const std::string& text : specs) {
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
  const bool has_granularity =
      !granularity_is_apart && AnyGiven(granularity_given_);
  if (has_base && (IsGiven() || has_granularity)) {
    return ArgumentInvalidError(
        "expected --format and the like or a --spec without a pattern, got "
        "both");
  }
  set.has_base =
      has_base || IsGiven() || has_granularity || set.overrides.empty();
  if (!has_base) {
    const absl::StatusOr<SpecTemplate> base = Parse();
    if (!base.ok()) return base.status();
    set.base = *base;
  }
  absl::Status status = AddCodebook(&set.base);
  for (SpecSet::Override& entry : set.overrides) {
    status.Update(AddCodebook(&entry.spec));
  }
  if (!status.ok()) return status;
  return set;
}

std::vector<std::string> SpecOptions::Files() const {
  // Numbers in the place of a file are no file's name, as a rule, and do no
  // harm.
  std::vector<std::string> names = {codebook};
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
