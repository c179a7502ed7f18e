// Quantizes a whole model, from files to files.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_MODEL_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_MODEL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client_options.h"
#include "client/files/safetensors.h"
#include "client/jobs/codes_outcome.h"
#include "client/jobs/job_events.h"
#include "client/jobs/quantize_options.h"

namespace quantd::jobs {

// The outcome of one tensor of the input; that of its codes is empty unless it
// was quantized. Plain value.
struct ModelTensor : CodesOutcome {
  enum class Result {
    kQuantized,
    kCopied,
    // An earlier run has written its file.
    kKept,
    // Has an error in `status`, and is copied if the output is written, or has
    // codes of an error that came behind them.
    kFailed,
    // Another tensor failed.
    kNotWritten,
  };

  std::string name;
  std::vector<int64_t> shape;
  // As safetensors calls it, such as "BF16".
  std::string dtype;
  Result result = Result::kNotWritten;
  absl::Status status;
  // True if the output has the tensor.
  bool is_written = false;
  // True if codes were made, also of one that is kept, is not written, or
  // failed behind them.
  bool is_quantized = false;
  uint64_t bytes_before = 0;
  // All that the output has of the tensor; 0 if that is not written.
  uint64_t bytes_after = 0;
  // True if importance weighed the errors in the search for scales.
  bool is_weighed = false;
};

// Lines of one kind for people on an output that is not quite what one may
// expect. Plain value.
struct QuantizeNote {
  enum class Kind {
    // As the options and the layout of the output have it.
    kExpected,
    // The output is worse than one may think.
    kWarning,
    // A runtime does not take the output.
    kRuntime,
    // Something did not happen that was asked for by name.
    kFailure,
  };

  Kind kind;
  // One line for each tensor, or one for all.
  std::vector<std::string> lines;
};

// Result of QuantizeModel. Plain value.
struct QuantizedModel {
  // In the order of the files.
  std::vector<ModelTensor> tensors;
  // Tensors of the input that are not read, so that the output lacks them; only
  // with keep_going.
  std::vector<files::UnreadTensor> unread;
  std::vector<QuantizeNote> notes;
  // Size of the files that have tensors.
  uint64_t file_bytes = 0;
};

// Quantizes the tensors of a file, or of the folder of a model, into another,
// and copies the others, with the bytes that `quantctl quantize` writes. A
// model may be larger than memory: only the tensors under way are in it. A
// folder keeps finished shards after an error, and the next call with the same
// options goes on from there. Texts name the options of quantctl.
//
// `streams`  connections to the server, each for a tensor under way, 1 to 64;
//            nothing: as many as the server has threads for a caller, 2 to 16.
//
// An input that is cut short while it is read ends the process with SIGBUS,
// unless it has called files::ExplainCutFiles. Any file that the process reads
// through quantd::files and that was changed makes the error FILE_CHANGED.
// Errors: ARGUMENT_INVALID, also if nothing is quantized, once the output has
// all tensors as they were; CANCELLED after JobEvents::is_stopped; the error of
// a tensor, without keep_going, and then its file is not written; those of
// files and of the client.
absl::StatusOr<QuantizedModel> QuantizeModel(const QuantizeOptions& options,
                                             const ClientOptions& client,
                                             const JobEvents& events = {},
                                             std::optional<int> streams = {});

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_MODEL_H_
