// The error of several specs on the tensors of a file, measured in one pass
// over the data, and the mixtures that they make.

#ifndef QUANTD_CLIENT_CLI_MEASUREMENT_H_
#define QUANTD_CLIENT_CLI_MEASUREMENT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/command_line.h"
#include "client/cli/spec_syntax.h"
#include "client/cli/tensor_input.h"
#include "client/cpp/client.h"
#include "client/files/safetensors.h"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd::cli {

// One spec on one tensor. Plain value.
struct MeasuredCandidate {
  // Why it failed; then nothing else is set.
  absl::Status status;
  v1::ErrorMetrics metrics;
  // Of codes and scales.
  uint64_t size_bytes = 0;
  // sum e^2 / sum x^2; infinity where finite elements came back as others.
  double noise_to_signal = 0;
};

// One tensor. Plain value.
struct MeasuredTensor {
  // Of the input, which outlives it.
  const files::FileTensor* tensor = nullptr;
  // Of the elements, unless every candidate failed.
  v1::TensorStatistics statistics;
  // In the order of the specs.
  std::vector<MeasuredCandidate> candidates;

  uint64_t element_count() const;
};

// Size in bytes of the codes and scales of a tensor with that encoding.
uint64_t EncodedSizeBytes(const Encoding& encoding, uint64_t element_count);

// Measures all specs on all tensors, several tensors at a time over streams of
// their own. What the tensors in flight take is bounded, whatever the file.
// `on_tensor` is told of each tensor that is done, one at a time, in any order.
// Where some candidates fail on a tensor the others are measured all the same.
// Errors: that the server cannot be reached.
absl::StatusOr<std::vector<MeasuredTensor>> MeasureTensors(
    const std::vector<const files::FileTensor*>& tensors,
    const std::vector<SpecTemplate>& specs, Client* client,
    absl::FunctionRef<void(const files::FileTensor&)> on_tensor);

// What a mixture has to reach. Plain value.
struct Budget {
  enum class Kind { kMinSqnr, kMaxBytes, kMaxBitsPerElement };
  Kind kind;
  double value;

  // "at least 18 dB", "at most 5 bits per element".
  std::string Text() const;
  // "--min-sqnr 18", "--max-bits-per-element 5".
  std::string Flag() const;
  // "18", "5": for names of files.
  std::string Number() const;
  v1::MixtureTarget TargetFor(uint64_t element_count) const;
};

// --min-sqnr, --max-bytes, --max-bits-per-element, of which one may be given,
// several times.
struct BudgetOptions {
  std::vector<double> min_sqnr_db;
  std::vector<uint64_t> max_bytes;
  std::vector<double> max_bits_per_element;

  void AddOptions(Command* command);
  // In the order of the command line.
  std::vector<Budget> Parse() const;
};

// A mixture for each budget, over the tensors on which a spec succeeded.
// Errors: of ChooseMixture.
absl::StatusOr<std::vector<v1::SweepMixture>> ChooseMixtures(
    const std::vector<MeasuredTensor>& tensors,
    const std::vector<Budget>& budgets, Client* client);

// The figures of each spec over all tensors, least noise first; those that
// failed anywhere last.
std::vector<v1::SweepTotal> TotalsOf(const std::vector<MeasuredTensor>& tensors,
                                     size_t spec_count);

// The specs of a command line, with the codebook for those that need one.
// Errors: ARGUMENT_INVALID, FILE_UNREADABLE.
absl::StatusOr<std::vector<SpecTemplate>> ParseSpecs(
    const std::vector<std::string>& texts, const SpecOptions& options);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_MEASUREMENT_H_
