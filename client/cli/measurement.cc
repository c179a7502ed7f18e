#include "client/cli/measurement.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/cli/spec_syntax.h"
#include "client/cli/table.h"
#include "client/cli/tensor_input.h"
#include "client/cpp/client.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/files/safetensors.h"

namespace quantd::cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Enough to keep the workers of a server busy while answers travel.
constexpr size_t kStreams = 4;
// Of the tensors in flight; one that is larger goes alone.
constexpr uint64_t kMostBytesInFlight = uint64_t{128} << 20;

uint64_t NonFiniteCount(const v1::TensorStatistics& statistics) {
  return statistics.nan_count() + statistics.positive_infinity_count() +
         statistics.negative_infinity_count();
}

double NoiseToSignal(const v1::ErrorMetrics& metrics,
                     const v1::TensorStatistics& statistics) {
  if (metrics.non_finite_count() > NonFiniteCount(statistics)) return kInfinity;
  if (metrics.sum_squared_error() == 0) return 0;
  return std::pow(10, -metrics.sqnr_db() / 10);
}

double SqnrDb(const MeasuredCandidate& candidate) {
  return candidate.noise_to_signal == kInfinity ? -kInfinity
                                                : candidate.metrics.sqnr_db();
}

// One run over the tensors. Its workers call Work.
class Measurer {
 public:
  Measurer(const std::vector<const files::FileTensor*>& tensors,
           const std::vector<SpecTemplate>& specs, Client* client,
           absl::FunctionRef<void(const files::FileTensor&)> on_tensor)
      : tensors_(tensors),
        specs_(specs),
        client_(*client),
        on_tensor_(on_tensor),
        measured_(tensors.size()) {}

  absl::StatusOr<std::vector<MeasuredTensor>> Run() {
    std::vector<std::thread> workers;
    while (workers.size() < std::min(kStreams, tensors_.size())) {
      workers.emplace_back([this] { Work(); });
    }
    for (std::thread& worker : workers) worker.join();
    absl::MutexLock lock(&mutex_);
    if (!fatal_.ok()) return fatal_;
    return std::move(measured_);
  }

 private:
  void Work() {
    const std::unique_ptr<EvaluateStream> stream = client_.OpenEvaluate();
    size_t i = 0;
    while (Take(&i)) {
      MeasuredTensor measured;
      measured.tensor = tensors_[i];
      measured.candidates.resize(specs_.size());
      absl::Status status = Measure(stream.get(), &measured);
      absl::MutexLock lock(&mutex_);
      in_flight_bytes_ -= tensors_[i]->data.size();
      if (!status.ok() && fatal_.ok()) fatal_ = std::move(status);
      measured_[i] = std::move(measured);
      on_tensor_(*tensors_[i]);
    }
  }

  // Waits until the next tensor has room; false when there is none to measure.
  bool Take(size_t* i) {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &Measurer::HasRoom));
    if (!fatal_.ok() || next_ == tensors_.size()) return false;
    *i = next_++;
    in_flight_bytes_ += tensors_[*i]->data.size();
    return true;
  }

  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !fatal_.ok() || next_ == tensors_.size() || in_flight_bytes_ == 0 ||
           in_flight_bytes_ + tensors_[next_]->data.size() <=
               kMostBytesInFlight;
  }

  // Only what ends the run is an error.
  absl::Status Measure(EvaluateStream* stream, MeasuredTensor* measured) {
    std::vector<size_t> candidates;
    for (size_t i = 0; i < specs_.size(); ++i) {
      absl::Status& status = measured->candidates[i].status;
      status = specs_[i].SpecOf(measured->tensor->shape).status();
      if (status.ok()) candidates.push_back(i);
    }
    if (candidates.empty()) return absl::OkStatus();
    absl::Status status = Evaluate(stream, candidates, measured);
    if (status.ok() || ExitCodeOf(status) == kUnreachable) return status;
    if (candidates.size() == 1) {
      measured->candidates[candidates[0]].status = status;
      return absl::OkStatus();
    }
    // One fails all: each by itself.
    for (const size_t i : candidates) {
      status = Evaluate(stream, {i}, measured);
      if (ExitCodeOf(status) == kUnreachable) return status;
      measured->candidates[i].status = status;
    }
    return absl::OkStatus();
  }

  absl::Status Evaluate(EvaluateStream* stream,
                        const std::vector<size_t>& candidates,
                        MeasuredTensor* measured) {
    const files::FileTensor& tensor = *measured->tensor;
    EvaluateJob job;
    job.tensor = MakeTensor(tensor, TensorName());
    job.omit_encodings = true;
    for (const size_t i : candidates) {
      job.candidates.push_back({*specs_[i].SpecOf(tensor.shape), ""});
    }
    stream->Send(job);
    const absl::StatusOr<EvaluateResult> result = stream->Receive();
    if (!result.ok()) return result.status();
    measured->statistics = result->statistics();
    for (size_t k = 0; k < candidates.size(); ++k) {
      const v1::CandidateMetrics& answer =
          result->candidates(static_cast<int>(k));
      MeasuredCandidate& candidate = measured->candidates[candidates[k]];
      candidate.metrics = answer.overall();
      candidate.size_bytes =
          answer.size_bytes() > 0
              ? answer.size_bytes()
              : EncodedSizeBytes(answer.encoding(), measured->element_count());
      candidate.noise_to_signal =
          NoiseToSignal(answer.overall(), result->statistics());
    }
    return absl::OkStatus();
  }

  const std::vector<const files::FileTensor*>& tensors_;
  const std::vector<SpecTemplate>& specs_;
  Client& client_;
  const absl::FunctionRef<void(const files::FileTensor&)> on_tensor_;

  absl::Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t in_flight_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<MeasuredTensor> measured_ ABSL_GUARDED_BY(mutex_);
  absl::Status fatal_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

uint64_t MeasuredTensor::element_count() const {
  return static_cast<uint64_t>(ElementCount(tensor->shape).value_or(0));
}

uint64_t EncodedSizeBytes(const Encoding& encoding, uint64_t element_count) {
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok()) return 0;
  const int64_t bytes =
      format->SizeBytes(static_cast<int64_t>(element_count)) +
      encoding.scale_size() * ScaleSizeBytes(ScaleTypeOf(encoding)) +
      encoding.outer_scale_size() * static_cast<int64_t>(sizeof(float)) +
      format->SizeBytes(encoding.zero_point_size());
  return static_cast<uint64_t>(bytes);
}

absl::StatusOr<std::vector<MeasuredTensor>> MeasureTensors(
    const std::vector<const files::FileTensor*>& tensors,
    const std::vector<SpecTemplate>& specs, Client* client,
    absl::FunctionRef<void(const files::FileTensor&)> on_tensor) {
  return Measurer(tensors, specs, client, on_tensor).Run();
}

std::string Budget::Number() const { return absl::StrCat(value); }

std::string Budget::Flag() const {
  switch (kind) {
    case Kind::kMinSqnr:
      return absl::StrCat("--min-sqnr ", Number());
    case Kind::kMaxBytes:
      return absl::StrCat("--max-bytes ", static_cast<uint64_t>(value));
    case Kind::kMaxBitsPerElement:
      break;
  }
  return absl::StrCat("--max-bits-per-element ", Number());
}

std::string Budget::Text() const {
  switch (kind) {
    case Kind::kMinSqnr:
      return absl::StrCat("at least ", Number(), " dB");
    case Kind::kMaxBytes:
      return absl::StrCat("at most ", BytesText(static_cast<uint64_t>(value)));
    case Kind::kMaxBitsPerElement:
      break;
  }
  return absl::StrCat("at most ", Number(), " bits per element");
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

void BudgetOptions::AddOptions(Command* command) {
  Option* const min_sqnr = command->AddOption(
      "--min-sqnr", &min_sqnr_db, "DB",
      "Choose the fewest bytes with at least this SQNR in every tensor");
  Option* const bytes =
      command
          ->AddOption("--max-bytes", &max_bytes, "N",
                      "Choose the least noise with at most this many bytes of "
                      "codes and scales")
          ->Bytes();
  Option* const bits =
      command
          ->AddOption("--max-bits-per-element", &max_bits_per_element, "X",
                      "The same, as bits of codes and scales for each element")
          ->Positive();
  command->AddAlternatives("Mixture", {min_sqnr, bytes, bits});
}

std::vector<Budget> BudgetOptions::Parse() const {
  std::vector<Budget> budgets;
  for (const double db : min_sqnr_db) {
    budgets.push_back({Budget::Kind::kMinSqnr, db});
  }
  for (const uint64_t bytes : max_bytes) {
    budgets.push_back({Budget::Kind::kMaxBytes, static_cast<double>(bytes)});
  }
  for (const double bits : max_bits_per_element) {
    budgets.push_back({Budget::Kind::kMaxBitsPerElement, bits});
  }
  return budgets;
}

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

std::vector<v1::SweepTotal> TotalsOf(const std::vector<MeasuredTensor>& tensors,
                                     size_t spec_count) {
  std::vector<v1::SweepTotal> totals(spec_count);
  for (size_t i = 0; i < spec_count; ++i) {
    v1::SweepTotal& total = totals[i];
    total.set_spec_index(static_cast<uint32_t>(i));
    for (const MeasuredTensor& tensor : tensors) {
      const MeasuredCandidate& candidate = tensor.candidates[i];
      if (!candidate.status.ok()) {
        total.set_failed_count(total.failed_count() + 1);
        continue;
      }
      total.set_size_bytes(total.size_bytes() + candidate.size_bytes);
      total.set_noise_to_signal_sum(total.noise_to_signal_sum() +
                                    candidate.noise_to_signal);
      const double sqnr_db = SqnrDb(candidate);
      if (total.min_sqnr_tensor().empty() || sqnr_db < total.min_sqnr_db()) {
        total.set_min_sqnr_db(sqnr_db);
        total.set_min_sqnr_tensor(tensor.tensor->name);
      }
    }
  }
  absl::c_stable_sort(
      totals, [](const v1::SweepTotal& a, const v1::SweepTotal& b) {
        const bool failed_a = a.failed_count() > 0;
        const bool failed_b = b.failed_count() > 0;
        if (failed_a != failed_b) return failed_b;
        return a.noise_to_signal_sum() < b.noise_to_signal_sum();
      });
  return totals;
}

absl::StatusOr<std::vector<SpecTemplate>> ParseSpecs(
    const std::vector<std::string>& texts, const SpecOptions& options) {
  std::vector<SpecTemplate> specs;
  for (const std::string& text : texts) {
    absl::StatusOr<SpecTemplate> spec = ParseSpec(text);
    if (!spec.ok()) return spec.status();
    const absl::Status status = options.AddCodebook(&*spec);
    if (!status.ok()) return status;
    specs.push_back(*std::move(spec));
  }
  return specs;
}

}  // namespace quantd::cli
