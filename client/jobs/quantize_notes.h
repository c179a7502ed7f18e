// Lines for people on a run that did not do quite what one may expect.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_NOTES_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_NOTES_H_

#include <string>
#include <vector>

#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"

namespace quantd::jobs {

// Lines of one kind.
struct QuantizeNote {
  enum class Kind {
    // As the options and the layout of the output have it.
    kExpected,
    // The output is worse than one may think.
    kWarning,
    // Something did not happen that was asked for by name.
    kFailure,
  };

  Kind kind;
  // One line for each tensor, or one for all.
  std::vector<std::string> lines;
};

// The notes on a run that wrote what it could.
std::vector<QuantizeNote> NotesOf(const QuantizeOptions& options,
                                  const QuantizePlan& plan);

// The note on an output without codes.
std::string NothingQuantizedText(const QuantizeOptions& options);

// Warnings of what vLLM makes of a compressed-tensors model.
std::vector<std::string> RuntimeWarnings(const QuantizePlan& plan);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_NOTES_H_
