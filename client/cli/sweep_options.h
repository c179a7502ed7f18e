// Options that say what a sweep measures and what its mixtures have to reach.

#ifndef QUANTD_CLIENT_CLI_SWEEP_OPTIONS_H_
#define QUANTD_CLIENT_CLI_SWEEP_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/command_line.h"
#include "client/jobs/revision_name.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/model_sweep.h"
#include "client/models/spec_syntax.h"

namespace quantd::cli {

// Source of errors: FILE, on which they are measured, or --model and
// --revision, from whose statistics they are predicted, with --pattern.
struct ErrorSourceOptions {
  jobs::RevisionName name;
  std::vector<std::string> patterns;

  // FILE sets `input`.
  void AddOptions(Command* command, std::string* input);
  void AddPatternOption(Command* command);
  bool HasFile() const { return file_->IsGiven(); }
  // Errors: ARGUMENT_INVALID unless there is one of both, and what chooses
  // tensors goes with it. `filter`  of a file.
  absl::Status Check(const jobs::TensorFilter& filter) const;

 private:
  Option* file_ = nullptr;
  Option* pattern_ = nullptr;
};

// "at least 18 dB", "at most 5 bits per element".
std::string BudgetText(const Budget& budget);
// "--min-sqnr 18", "--max-bits-per-element 5".
std::string BudgetFlag(const Budget& budget);
// "18", "5": for names of files.
std::string BudgetNumber(const Budget& budget);

// --min-sqnr, --max-bytes, --max-bits-per-element, each any number of times.
struct BudgetOptions {
  std::vector<double> min_sqnr_db;
  std::vector<uint64_t> max_bytes;
  std::vector<double> max_bits_per_element;

  void AddOptions(Command* command);
  // The values of one option after those of the one before.
  std::vector<Budget> Parse() const;
};

// The specs of a command line.
// Errors: ARGUMENT_INVALID, FILE_UNREADABLE.
absl::StatusOr<std::vector<SpecTemplate>> ParseSpecs(
    const std::vector<std::string>& texts, bool takes_gguf_types);
// Specs that are predicted from statistics: whatever the tensor's shape.
// Errors: also ARGUMENT_INVALID for specs that need the tensor.
absl::StatusOr<std::vector<EncodingSpec>> ParseSpecsOfStatistics(
    const std::vector<std::string>& texts);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_SWEEP_OPTIONS_H_
