#include "client/models/two_passes.h"

#include <cstdint>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"

namespace quantd::internal {

bool CannotHold(const absl::Status& status) {
  return ErrorReason(status) == "MEMORY_BUDGET";
}

bool CanFindEncoding(const EncodingSpec& spec, const Tensor& tensor) {
  // Scales that a server takes in one message by default.
  constexpr int64_t kMostScales = int64_t{1} << 20;
  const absl::StatusOr<ScaleCounts> counts =
      CountScales(tensor.shape, ExpectedEncoding(spec, tensor.shape));
  return !spec.has_importance() && counts.ok() && counts->scale <= kMostScales;
}

absl::StatusOr<Encoding> FindEncoding(const Tensor& tensor,
                                      const EncodingSpec& spec,
                                      Client* client) {
  CalibrateJob job;
  job.tensor = tensor;
  // Nothing is stored.
  job.tensor.name = TensorName();
  job.spec = spec;
  absl::StatusOr<CalibrateResult> result = client->Calibrate(job);
  if (!result.ok()) return result.status();
  return std::move(*result->mutable_stored_encoding()->mutable_encoding());
}

absl::StatusOr<EvaluateResult> EvaluateInTwoPasses(EvaluateJob job,
                                                   Client* client) {
  for (EvaluateCandidate& candidate : job.candidates) {
    const auto* const spec = std::get_if<EncodingSpec>(&candidate.source);
    if (spec == nullptr || !candidate.outer_maximum.empty() ||
        !CanFindEncoding(*spec, job.tensor)) {
      continue;
    }
    absl::StatusOr<Encoding> encoding = FindEncoding(job.tensor, *spec, client);
    if (!encoding.ok()) return encoding.status();
    candidate.source = *std::move(encoding);
  }
  return client->Evaluate(job);
}

}  // namespace quantd::internal
