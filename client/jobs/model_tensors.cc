#include "client/jobs/model_tensors.h"

#include <memory>
#include <string>
#include <vector>

#include "client/files/dtype.h"
#include "client/files/safetensors.h"
#include "client/jobs/codes_outcome.h"
#include "client/jobs/quantize_model.h"
#include "client/jobs/quantize_outcome.h"
#include "client/jobs/quantize_plan.h"

namespace quantd::jobs {
namespace {

ModelTensor::Result ResultOf(const Shard& shard, const Outcome& outcome) {
  if (shard.is_kept) return ModelTensor::Result::kKept;
  if (!outcome.status.ok()) return ModelTensor::Result::kFailed;
  if (!shard.is_written) return ModelTensor::Result::kNotWritten;
  return outcome.is_quantized ? ModelTensor::Result::kQuantized
                              : ModelTensor::Result::kCopied;
}

ModelTensor TensorOf(const QuantizePlan& plan, const Shard& shard,
                     const files::FileTensor& tensor) {
  const Outcome& outcome = plan.outcomes.at(tensor.name);
  ModelTensor made;
  made.name = tensor.name;
  made.shape = tensor.shape;
  made.dtype = std::string(files::DtypeName(tensor.dtype));
  made.result = ResultOf(shard, outcome);
  made.status = outcome.status;
  made.is_written = shard.is_written;
  made.is_quantized = outcome.is_quantized;
  made.bytes_before = tensor.data.size();
  made.bytes_after = shard.is_written ? outcome.output_bytes : 0;
  if (outcome.is_quantized) {
    static_cast<CodesOutcome&>(made) = outcome;
    made.is_weighed = plan.IsWeighed(tensor);
  }
  return made;
}

}  // namespace

std::vector<ModelTensor> TensorsOf(const QuantizePlan& plan) {
  std::vector<ModelTensor> tensors;
  for (const std::unique_ptr<Shard>& shard : plan.shards) {
    for (const files::FileTensor& tensor : shard->input.tensors()) {
      if (!plan.IsInScope(tensor)) continue;
      tensors.push_back(TensorOf(plan, *shard, tensor));
    }
  }
  return tensors;
}

}  // namespace quantd::jobs
