#include "client/models/model_sweep.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/files/safetensors.h"
#include "client/models/outer_maximum.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_engine.h"
#include "client/models/tensor_input.h"

namespace quantd {
namespace {

using internal::EvaluateEngine;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Enough to keep the workers of a server busy while answers travel.
constexpr size_t kStreams = 4;
// A server holds a tensor whose scales are not found as it comes.
constexpr uint64_t kMostBytesUnderWay = uint64_t{128} << 20;

double NoiseToSignal(const v1::ErrorMetrics& metrics,
                     const v1::TensorStatistics& statistics) {
  if (metrics.non_finite_count() > NonFiniteCount(statistics)) return kInfinity;
  if (metrics.sum_squared_error() == 0) return 0;
  return std::pow(10, -metrics.sqnr_db() / 10);
}

// Whether an error is not that of a tensor but of all.
bool EndsTheRun(const absl::Status& status) {
  return IsServerUnreachable(status) || ErrorReason(status) == "TIMEOUT";
}

// Size in bytes of the codes and scales of a tensor with that encoding.
uint64_t EncodedSizeBytes(const Encoding& encoding, uint64_t element_count) {
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok()) return 0;
  const int64_t bytes =
      format->SizeBytes(static_cast<int64_t>(element_count)) +
      encoding.scale_size() * ScaleSizeBytes(ScaleTypeOf(encoding)) +
      encoding.outer_scale_size() * static_cast<int64_t>(sizeof(float)) +
      format->SizeBytes(encoding.zero_point_size()) +
      encoding.real_zero_point_size() * static_cast<int64_t>(sizeof(float));
  return static_cast<uint64_t>(bytes);
}

// One run over the tensors.
class Measurer {
 public:
  Measurer(const std::vector<const files::FileTensor*>& tensors,
           const std::vector<SpecTemplate>& specs, const OnTensor& on_tensor)
      : specs_(specs), on_tensor_(on_tensor), measured_(tensors.size()) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      MeasuredTensor& measured = measured_[i];
      measured.tensor = tensors[i];
      for (const SpecTemplate& spec : specs) {
        measured.candidates.emplace_back().status =
            spec.SpecOf(tensors[i]->shape).status();
      }
    }
  }

  absl::StatusOr<std::vector<MeasuredTensor>> Run(Client* client) {
    // Those of which something can be measured.
    std::vector<MeasuredTensor*> tasks;
    for (MeasuredTensor& measured : measured_) {
      if (Candidates(measured).empty()) {
        Tell(measured);
      } else {
        tasks.push_back(&measured);
      }
    }
    EvaluateEngine::Work work;
    work.count = tasks.size();
    work.most_bytes = kMostBytesUnderWay;
    work.size_bytes = [&tasks](size_t i) {
      return tasks[i]->tensor->data.size();
    };
    work.make_job = [this, &tasks](size_t i) {
      return MakeJob(*tasks[i], Candidates(*tasks[i]));
    };
    work.take = [this, &tasks](size_t i, absl::StatusOr<EvaluateResult> result,
                               EvaluateStream* evaluate) {
      absl::Status status = Take(result, evaluate, tasks[i]);
      Tell(*tasks[i]);
      return status;
    };
    EvaluateEngine engine(std::vector<Client*>(kStreams, client));
    const absl::Status status = engine.Run(work);
    if (!status.ok()) return status;
    return std::move(measured_);
  }

 private:
  void Tell(const MeasuredTensor& measured) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (on_tensor_) on_tensor_(*measured.tensor);
  }

  // Those that have not failed.
  static std::vector<size_t> Candidates(const MeasuredTensor& measured) {
    std::vector<size_t> candidates;
    for (size_t i = 0; i < measured.candidates.size(); ++i) {
      if (measured.candidates[i].status.ok()) candidates.push_back(i);
    }
    return candidates;
  }

  EvaluateJob MakeJob(const MeasuredTensor& measured,
                      const std::vector<size_t>& candidates) const {
    const files::FileTensor& tensor = *measured.tensor;
    EvaluateJob job;
    job.tensor = MakeTensor(tensor, TensorName());
    job.omit_encodings = true;
    for (const size_t i : candidates) {
      const EncodingSpec spec = *specs_[i].SpecOf(tensor.shape);
      job.candidates.push_back({spec, "", OuterMaximumFor(spec, tensor)});
    }
    return job;
  }

  // Only what ends the run is an error.
  absl::Status Take(const absl::StatusOr<EvaluateResult>& result,
                    EvaluateStream* evaluate, MeasuredTensor* measured) const {
    const std::vector<size_t> candidates = Candidates(*measured);
    if (result.ok()) return Fill(*result, candidates, measured);
    if (EndsTheRun(result.status())) return result.status();
    if (candidates.size() == 1) {
      measured->candidates[candidates[0]].status = result.status();
      return absl::OkStatus();
    }
    // One fails all: each by itself.
    for (const size_t i : candidates) {
      evaluate->Send(MakeJob(*measured, {i}));
      const absl::StatusOr<EvaluateResult> one = evaluate->Receive();
      absl::Status status = one.ok() ? Fill(*one, {i}, measured) : one.status();
      if (EndsTheRun(status)) return status;
      measured->candidates[i].status = std::move(status);
    }
    return absl::OkStatus();
  }

  static absl::Status Fill(const EvaluateResult& result,
                           const std::vector<size_t>& candidates,
                           MeasuredTensor* measured) {
    measured->statistics = result.statistics();
    for (size_t k = 0; k < candidates.size(); ++k) {
      const v1::CandidateMetrics& answer =
          result.candidates(static_cast<int>(k));
      MeasuredCandidate& candidate = measured->candidates[candidates[k]];
      candidate.metrics = answer.overall();
      candidate.size_bytes =
          answer.size_bytes() > 0
              ? answer.size_bytes()
              : EncodedSizeBytes(answer.encoding(), measured->element_count());
      candidate.noise_to_signal =
          NoiseToSignal(answer.overall(), result.statistics());
    }
    return absl::OkStatus();
  }

  const std::vector<SpecTemplate>& specs_;
  absl::Mutex mutex_;
  const OnTensor& on_tensor_;
  // Different ones may change at once.
  std::vector<MeasuredTensor> measured_;
};

// A mixture for each budget, over the tensors on which a spec succeeded.
// Errors: of ChooseMixture.
absl::StatusOr<std::vector<v1::SweepMixture>> ChooseMixtures(
    const std::vector<MeasuredTensor>& tensors,
    const std::vector<Budget>& budgets, Client* client) {
  v1::ChooseMixtureRequest request;
  uint64_t element_count = 0;
  for (const MeasuredTensor& tensor : tensors) {
    v1::MixtureTensor added;
    added.set_tensor(tensor.tensor->name);
    for (size_t i = 0; i < tensor.candidates.size(); ++i) {
      const MeasuredCandidate& candidate = tensor.candidates[i];
      if (!candidate.status.ok()) continue;
      v1::MixtureOption* const option = added.add_options();
      option->set_spec_index(static_cast<uint32_t>(i));
      option->set_size_bytes(candidate.size_bytes);
      option->set_noise_to_signal(candidate.noise_to_signal);
    }
    if (added.options().empty()) continue;
    element_count += tensor.element_count();
    *request.add_tensors() = std::move(added);
  }
  if (budgets.empty() || request.tensors().empty()) {
    return std::vector<v1::SweepMixture>(budgets.size());
  }
  for (const Budget& budget : budgets) {
    *request.add_targets() = budget.TargetFor(element_count);
  }
  const absl::StatusOr<v1::ChooseMixtureResponse> response =
      client->ChooseMixture(request);
  if (!response.ok()) return response.status();
  return std::vector<v1::SweepMixture>(response->mixtures().begin(),
                                       response->mixtures().end());
}

}  // namespace

uint64_t NonFiniteCount(const v1::TensorStatistics& statistics) {
  return statistics.nan_count() + statistics.positive_infinity_count() +
         statistics.negative_infinity_count();
}

uint64_t MeasuredTensor::element_count() const {
  return static_cast<uint64_t>(ElementCount(tensor->shape).value_or(0));
}

v1::MixtureTarget Budget::TargetFor(uint64_t element_count) const {
  v1::MixtureTarget target;
  switch (kind) {
    case Kind::kMinSqnr:
      target.set_min_sqnr_db(value);
      break;
    case Kind::kMaxBytes:
      target.set_max_size_bytes(static_cast<uint64_t>(value));
      break;
    case Kind::kMaxBitsPerElement:
      target.set_max_size_bytes(static_cast<uint64_t>(
          value * static_cast<double>(element_count) / 8));
      break;
  }
  return target;
}

std::vector<const files::FileTensor*> WeightsOf(const TensorInput& input) {
  std::vector<const files::FileTensor*> weights;
  for (const files::FileTensor& tensor : input.tensors()) {
    if (tensor.shape.size() >= 2 && ElementTypeOf(tensor.dtype).has_value()) {
      weights.push_back(&tensor);
    }
  }
  return weights;
}

absl::StatusOr<ModelSweep> SweepTensors(
    const std::vector<const files::FileTensor*>& tensors,
    const std::vector<SpecTemplate>& specs, const std::vector<Budget>& budgets,
    Client* client, const OnTensor& on_tensor) {
  absl::StatusOr<std::vector<MeasuredTensor>> measured =
      Measurer(tensors, specs, on_tensor).Run(client);
  if (!measured.ok()) return measured.status();
  absl::StatusOr<std::vector<v1::SweepMixture>> mixtures =
      ChooseMixtures(*measured, budgets, client);
  if (!mixtures.ok()) return mixtures.status();
  return ModelSweep{*std::move(measured), *std::move(mixtures)};
}

}  // namespace quantd
