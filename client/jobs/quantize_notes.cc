#include "client/jobs/quantize_notes.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/jobs/importance.h"
#include "client/jobs/quantize_model.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"
#include "client/jobs/stored_inputs.h"
#include "client/models/fused_experts.h"
#include "client/models/text.h"

namespace quantd::jobs {
namespace {

// Collects the notes on one run. Not thread-safe.
class Notes {
 public:
  using Kind = QuantizeNote::Kind;

  Notes(const QuantizeOptions& options, const QuantizePlan& plan,
        const std::vector<ModelTensor>& tensors)
      : options_(options), plan_(plan), tensors_(tensors) {}

  std::vector<QuantizeNote> Collect() {
    Add(Kind::kWarning, plan_.input_notes);
    Add(Kind::kWarning, plan_.warnings);
    AddNotFinite();
    AddCoarseScales();
    AddClippedInputs();
    AddLeftOut();
    AddNearest();
    AddUnweighted();
    if (plan_.is_complete) {
      AddModel();
      AddTies();
      AddRounded();
    }
    return std::move(notes_);
  }

 private:
  void Add(Kind kind, std::vector<std::string> lines) {
    if (!lines.empty()) notes_.push_back({kind, std::move(lines)});
  }

  void AddNotFinite() {
    std::vector<std::string> lines;
    for (const ModelTensor& tensor : tensors_) {
      if (tensor.nan_count + tensor.infinity_count == 0) continue;
      lines.push_back(
          absl::StrCat("tensor ", tensor.name, " ",
                       NotFiniteText(tensor.nan_count, tensor.infinity_count),
                       absl::StartsWith(tensor.format, "mx")
                           ? ": all elements of their blocks become NaN"
                           : ""));
    }
    Add(Kind::kWarning, std::move(lines));
  }

  void AddCoarseScales() {
    std::vector<std::string> lines;
    for (const ModelTensor& tensor : tensors_) {
      if (tensor.coarse_scale_count == 0) continue;
      lines.push_back(absl::StrCat(
          "tensor ", tensor.name, ": ", CountText(tensor.coarse_scale_count),
          " scales are below 2^-20, where float16 has few numbers: their "
          "elements lose much"));
    }
    Add(Kind::kWarning, std::move(lines));
  }

  // The inputs that compensated rounding was done for are not quite those that
  // were seen.
  void AddClippedInputs() {
    std::vector<std::string> lines;
    for (const ModelTensor& tensor : tensors_) {
      if (!tensor.output_noise.has_value()) continue;
      std::string text = ClippedInputsText(tensor.name, *tensor.output_noise);
      if (!text.empty()) lines.push_back(std::move(text));
    }
    Add(Kind::kWarning, std::move(lines));
  }

  // Tensors that are copied in place of what was asked for. It is a failure
  // where somebody named them, or where nothing else was quantized.
  void AddLeftOut() {
    Add(Kind::kExpected, plan_.notes);
    const size_t count = plan_.left_out_notes.size();
    Add(Kind::kFailure, plan_.left_out_notes);
    if (count > 0) {
      Add(Kind::kFailure,
          {absl::StrCat(CountText(count),
                        " tensors that were asked for are copied")});
    }
    if (plan_.QuantizedNothing()) {
      Add(Kind::kFailure, {NothingQuantizedText(options_)});
    }
  }

  // Tensors that no inputs were found for.
  void AddNearest() {
    if (!plan_.nearest.empty()) {
      Add(Kind::kWarning,
          {absl::StrCat("rounded to the nearest, as no Gram matrix of their "
                        "inputs is stored: ",
                        NamesText(plan_.nearest))});
    }
    if (!plan_.named_nearest.empty()) {
      Add(Kind::kFailure,
          {absl::StrCat("asked for, but rounded to the nearest, as no Gram "
                        "matrix of their inputs is stored: ",
                        NamesText(plan_.named_nearest),
                        "; see --inputs-map and --exclude")});
    }
  }

  // Tensors whose errors nothing weighs, although that was asked for.
  void AddUnweighted() {
    const FoundImportance& found = plan_.importance;
    if (!found.missing.empty()) {
      Add(Kind::kWarning,
          {MissingImportanceText("quantized", options_.importance,
                                 found.missing)});
    }
    if (!found.untaken.empty()) {
      Add(Kind::kWarning, {UntakenImportanceText("quantized", found.untaken)});
    }
    if (!plan_.named_unweighted.empty()) {
      Add(Kind::kFailure,
          {absl::StrCat("asked for, but ",
                        MissingImportanceText("quantized", options_.importance,
                                              plan_.named_unweighted),
                        "; see --exclude")});
    }
  }

  // What one may not expect of a compressed-tensors model.
  void AddModel() {
    if (!plan_.ignored.empty() && !options_.ignore.has_value()) {
      Add(Kind::kExpected,
          {absl::StrCat("left as they are: ", NamesText(plan_.ignored),
                        options_.IsGguf() ? "; a --spec for them takes them"
                                          : "; see --ignore")});
    }
    if (!plan_.no_linear.empty()) {
      Add(Kind::kExpected,
          {absl::StrCat("left as they are, as no matrices MODULE.weight: ",
                        NamesText(plan_.no_linear))});
    }
    if (!plan_.conv1d.empty()) {
      Add(Kind::kExpected,
          {absl::StrCat("left as they are: ", NamesText(plan_.conv1d), "; ",
                        kConv1dText)});
    }
    if (!plan_.experts.empty()) {
      const FusedExperts& first = plan_.experts[0];
      const size_t count = plan_.experts.size();
      Add(Kind::kExpected,
          {absl::StrCat(
              "written as one matrix for each expert, as vLLM reads them: ",
              first.name, " (", first.expert_count, " experts",
              first.is_transposed ? ", transposed" : "", ")",
              count > 1
                  ? absl::StrCat(" and ", CountText(count - 1), " more tensors")
                  : "")});
    }
    for (std::string& warning : RuntimeWarnings(plan_)) {
      Add(Kind::kRuntime, {std::move(warning)});
    }
  }

  void AddTies() {
    if (plan_.ties.empty()) return;
    const size_t count = plan_.ties.size();
    Add(Kind::kExpected,
        {absl::StrCat(
            "tensors that share an outer scale: ", plan_.ties[0].label,
            count > 1
                ? absl::StrCat(" and ", CountText(count - 1), " more groups")
                : "",
            options_.ties.no_defaults ? "" : "; see --tie and --no-ties")});
  }

  // The output is not quite what was measured.
  void AddRounded() {
    const int64_t rounded = plan_.RoundedCount();
    if (rounded == 0) return;
    const std::string count = CountText(static_cast<uint64_t>(rounded));
    Add(Kind::kWarning,
        {options_.IsGguf()
             ? absl::StrCat(count,
                            " tensors have minima, which are float16 in GGUF "
                            "and were rounded: reals may differ from quantd's "
                            "by 1% of a scale")
             : absl::StrCat(count,
                            " of the nvfp4 tensors: readers divide by "
                            "weight_global_scale, the inverse of the outer "
                            "scale, and get reals that may differ from "
                            "quantd's in the last bit")});
  }

  const QuantizeOptions& options_;
  const QuantizePlan& plan_;
  const std::vector<ModelTensor>& tensors_;
  std::vector<QuantizeNote> notes_;
};

}  // namespace

std::vector<QuantizeNote> NotesOf(const QuantizeOptions& options,
                                  const QuantizePlan& plan,
                                  const std::vector<ModelTensor>& tensors) {
  return Notes(options, plan, tensors).Collect();
}

std::string NothingQuantizedText(const QuantizeOptions& options) {
  return absl::StrCat("nothing is quantized: ", options.output.path,
                      " has all tensors as they were");
}

std::vector<std::string> RuntimeWarnings(const QuantizePlan& plan) {
  std::vector<std::string> warnings;
  if (!plan.ragged.empty()) {
    warnings.push_back(absl::StrCat(
        "vLLM does not load fused matrices whose rows, but for the last "
        "one's, are no whole blocks: ",
        NamesText(plan.ragged), "; take --scheme FP8_DYNAMIC"));
  }
  for (const auto& [text, names] : plan.beyond_limits) {
    warnings.push_back(absl::StrCat(text, ": ", NamesText(names),
                                    "; --exclude leaves them as they are"));
  }
  if (!plan.unlike_experts.empty()) {
    warnings.push_back(absl::StrCat(
        "vLLM up to 0.11.0 takes one scheme for the experts of all layers; "
        "not that of the first layer have ",
        NamesText(plan.unlike_experts)));
  }
  if (plan.no_kernels_count > 0) {
    warnings.push_back(absl::StrCat(
        "vLLM has no kernels for the weights and inputs of ",
        CountText(plan.no_kernels_count), " modules",
        plan.packable_count == 0
            ? "; see --scheme for what it has"
            : absl::StrCat(
                  "; with --layout pack-quantized it has them for ",
                  CountText(plan.packable_count),
                  ", and with --activations dynamic where all weights are "
                  "int8:per-channel")));
  }
  return warnings;
}

}  // namespace quantd::jobs
