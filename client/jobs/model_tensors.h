// The outcomes of a plan, for callers and for reports.

#ifndef QUANTD_CLIENT_JOBS_MODEL_TENSORS_H_
#define QUANTD_CLIENT_JOBS_MODEL_TENSORS_H_

#include <vector>

#include "client/jobs/quantize_model.h"
#include "client/jobs/quantize_plan.h"

namespace quantd::jobs {

// The tensors that the run has to do with, in the order of the files.
std::vector<ModelTensor> TensorsOf(const QuantizePlan& plan);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_MODEL_TENSORS_H_
