// Selects the tensors that a command takes from its inputs, and reports those
// that fail.

#ifndef QUANTD_CLIENT_CLI_SELECTION_H_
#define QUANTD_CLIENT_CLI_SELECTION_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/session.h"
#include "client/cli/tensor_options.h"
#include "client/cpp/client.h"
#include "client/files/safetensors.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"

namespace quantd::cli {

// The tensors of all inputs that the filter takes, in order. With `specs` only
// those that have a spec. Patterns of specs then count too.
// Errors: ARGUMENT_INVALID for a pattern that takes no tensor, or when no
// tensor is left.
absl::StatusOr<std::vector<const files::FileTensor*>> SelectTensors(
    const std::vector<const TensorInput*>& inputs, const TensorFilter& filter,
    const SpecSet* specs);

// Like SelectTensors for one input, without the tensors that have no elements:
// there is nothing to measure. Says which they are.
// Errors: also ARGUMENT_INVALID when none is left.
absl::StatusOr<std::vector<const files::FileTensor*>> SelectMeasurable(
    const TensorInput& input, const TensorFilter& filter, const SpecSet* specs,
    Session* session);

enum class Stored { kStatistics, kEncodings };

// The rule for patterns that match one name: each of them selects it, or the
// first takes it.
enum class PatternRule { kAllSelect, kFirstTakes };

// Checks that each pattern matches the name of a tensor that has statistics, or
// an encoding, on the server; with kFirstTakes that each takes one. `option`
// has the patterns. Who may not list names is not held up.
// Errors: ARGUMENT_INVALID; those of the client.
absl::Status CheckStoredPatterns(const char* option,
                                 const std::vector<std::string>& patterns,
                                 Stored stored, const NameOptions& name,
                                 Client* client,
                                 PatternRule rule = PatternRule::kAllSelect);

// A tensor that failed.
struct TensorError {
  std::string tensor;
  absl::Status status;
};

// The first names, and how many more there are.
std::string NamesText(std::vector<std::string> names);

// A note on a tensor of one dimension that has one scale, although the
// spec has one for each channel or group; empty for others.
std::string OneScaleText(const SpecTemplate& spec,
                         const files::FileTensor& tensor);

// Prints the first notes, and how many more there are.
void PrintNotes(const std::vector<std::string>& notes, Session* session);

// Prints the first ones, a line each, and how many more there are.
void PrintTensorErrors(const std::vector<TensorError>& errors,
                       Session* session);

// Reports an error that ends the run before anything is sent, as one of usage
// where the command line is wrong.
void FailEarly(const absl::Status& status, Session* session);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_SELECTION_H_
