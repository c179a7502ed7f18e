// Lines for people on a run that did not do quite what one may expect.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_NOTES_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_NOTES_H_

#include <string>
#include <vector>

#include "client/jobs/quantize_model.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"

namespace quantd::jobs {

// The notes on a run that wrote what it could.
// `tensors`  of TensorsOf.
std::vector<QuantizeNote> NotesOf(const QuantizeOptions& options,
                                  const QuantizePlan& plan,
                                  const std::vector<ModelTensor>& tensors);

// The note on an output without codes.
std::string NothingQuantizedText(const QuantizeOptions& options);

// Warnings of what vLLM makes of a compressed-tensors model.
std::vector<std::string> RuntimeWarnings(const QuantizePlan& plan);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_NOTES_H_
