#include "client/cli/sweep_options.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command_line.h"
#include "client/cli/table.h"
#include "client/cpp/errors.h"
#include "client/jobs/spec_options.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/model_sweep.h"
#include "client/models/spec_syntax.h"

namespace quantd::cli {

std::string BudgetNumber(const Budget& budget) {
  return absl::StrCat(budget.value);
}

std::string BudgetFlag(const Budget& budget) {
  switch (budget.kind) {
    case Budget::Kind::kMinSqnr:
      return absl::StrCat("--min-sqnr ", BudgetNumber(budget));
    case Budget::Kind::kMaxBytes:
      return absl::StrCat("--max-bytes ", static_cast<uint64_t>(budget.value));
    case Budget::Kind::kMaxBitsPerElement:
      break;
  }
  return absl::StrCat("--max-bits-per-element ", BudgetNumber(budget));
}

std::string BudgetText(const Budget& budget) {
  switch (budget.kind) {
    case Budget::Kind::kMinSqnr:
      return absl::StrCat("at least ", BudgetNumber(budget), " dB");
    case Budget::Kind::kMaxBytes:
      return absl::StrCat("at most ",
                          BytesText(static_cast<uint64_t>(budget.value)));
    case Budget::Kind::kMaxBitsPerElement:
      break;
  }
  return absl::StrCat("at most ", BudgetNumber(budget), " bits per element");
}

void ErrorSourceOptions::AddOptions(Command* command, std::string* input) {
  file_ = command->AddArgument(
      "file", input, "FILE",
      "Measure on this safetensors, .npy, .gguf or .onnx file, or a folder "
      "with model.safetensors.index.json or model.safetensors; without it "
      "predict from the statistics of --model");
  command->AddOption("--model", &name.model, "NAME",
                     "Predict from the stored statistics of this model");
  command
      ->AddOption("--revision", &name.revision, "NAME", "Revision of the model")
      ->ShowDefault();
}

void ErrorSourceOptions::AddPatternOption(Command* command) {
  pattern_ = command->AddOption(
      "--pattern", &patterns, "PATTERN",
      "With --model: only tensors whose name matches (* and ?); may be "
      "repeated");
}

absl::Status ErrorSourceOptions::Check(const jobs::TensorFilter& filter) const {
  if (HasFile() == !name.model.empty()) {
    return ArgumentInvalidError(absl::StrCat(
        "expected a file to measure on, or --model to predict from its "
        "statistics; got ",
        HasFile() ? "both" : "neither"));
  }
  if (HasFile() && pattern_->IsGiven()) {
    return ArgumentInvalidError(
        "expected --include and --exclude with a file, got --pattern");
  }
  if (!HasFile() && filter.IsGiven()) {
    return ArgumentInvalidError(
        "expected --pattern with --model; --include, --exclude, --min-rank "
        "and --all are for files");
  }
  return absl::OkStatus();
}

void BudgetOptions::AddOptions(Command* command) {
  command->AddOption(
      "--min-sqnr", &min_sqnr_db, "DB",
      "Choose the fewest bytes with at least this SQNR in every tensor");
  command
      ->AddOption("--max-bytes", &max_bytes, "N",
                  "Choose the least noise with at most this many bytes of "
                  "codes and scales")
      ->Bytes();
  command
      ->AddOption("--max-bits-per-element", &max_bits_per_element, "X",
                  "The same, as bits of codes and scales for each element")
      ->Positive();
}

std::vector<Budget> BudgetOptions::Parse() const {
  std::vector<Budget> budgets;
  for (const double db : min_sqnr_db) {
    budgets.push_back({Budget::Kind::kMinSqnr, db});
  }
  for (const uint64_t bytes : max_bytes) {
    budgets.push_back({Budget::Kind::kMaxBytes, static_cast<double>(bytes)});
  }
  for (const double bits : max_bits_per_element) {
    budgets.push_back({Budget::Kind::kMaxBitsPerElement, bits});
  }
  return budgets;
}

absl::StatusOr<std::vector<SpecTemplate>> ParseSpecs(
    const std::vector<std::string>& texts, bool takes_gguf_types) {
  std::vector<SpecTemplate> specs;
  for (const std::string& text : texts) {
    absl::StatusOr<SpecTemplate> spec = ParseSpecOrGgufType(text);
    if (!spec.ok()) return spec.status();
    if (!takes_gguf_types) {
      const absl::Status status = jobs::CheckNoGgufType(*spec);
      if (!status.ok()) return status;
    }
    specs.push_back(*std::move(spec));
  }
  return specs;
}

absl::StatusOr<std::vector<EncodingSpec>> ParseSpecsOfStatistics(
    const std::vector<std::string>& texts) {
  // Statistics do not tell what blocks of GGUF lose.
  const absl::StatusOr<std::vector<SpecTemplate>> parsed =
      ParseSpecs(texts, /*takes_gguf_types=*/false);
  if (!parsed.ok()) return parsed.status();
  std::vector<EncodingSpec> specs;
  for (const SpecTemplate& spec : *parsed) {
    absl::StatusOr<EncodingSpec> any = spec.SpecOfAny();
    if (!any.ok()) return any.status();
    specs.push_back(*std::move(any));
  }
  return specs;
}

}  // namespace quantd::cli
