// Sweep: stored statistics > the expected error of many specs, ranked.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/calibrate/mixed_precision.h"
#include "core/calibrate/prediction.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "core/types/block_layout.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/mixture.h"
#include "server/rpc/patterns.h"
#include "server/rpc/statistics_rpcs.h"
#include "server/rpc/stored_calibration.h"
#include "server/rpc/tensor_calibration.h"
#include "server/rpc/tensorwise_call.h"
#include "server/rpc/tied_statistics.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/names.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

// A spec on one tensor.
struct SpecResult {
  int spec_index = 0;
  absl::Status status;
  // Only when the status is OK.
  core::Prediction prediction;
  int64_t size_bytes = 0;
};

// Highest expected SQNR first, then the smaller; failures last.
bool RanksBefore(const SpecResult& a, const SpecResult& b) {
  if (a.status.ok() != b.status.ok()) return a.status.ok();
  if (!a.status.ok()) return a.spec_index < b.spec_index;
  const double sqnr_a = a.prediction.SqnrDb();
  const double sqnr_b = b.prediction.SqnrDb();
  if (sqnr_a != sqnr_b) return sqnr_a > sqnr_b;
  if (a.size_bytes != b.size_bytes) return a.size_bytes < b.size_bytes;
  return a.spec_index < b.spec_index;
}

int64_t QuantizedSizeBytes(const core::Encoding& encoding,
                           int64_t element_count) {
  return core::FindFormat(encoding.format)->SizeBytes(element_count) +
         core::ScalesSizeBytes(encoding);
}

class SweepCall final
    : public TensorwiseCall<v1::SweepRequest, v1::SweepResponse> {
 public:
  explicit SweepCall(const CallArguments& arguments)
      : TensorwiseCall(arguments, Rpc::kSweep),
        patterns_(env().budget),
        revision_(env()),
        ties_(env()) {}

 protected:
  absl::Status Open() override {
    if (absl::Status s = CheckRequest(); !s.ok()) return s;
    absl::Status status = revision_.List(
        caller().statistics.get(),
        [this](const std::string& tensor) {
          const bool is_wanted =
              patterns_.empty() || patterns_.MatchesAny(tensor);
          ties_.See(tensor, is_wanted ? 0 : -1);
          return is_wanted;
        },
        stop());
    if (!status.ok()) return status;
    return ties_.CheckSeen(request().model(), request().revision());
  }

  StepKind load_step() const override { return StepKind::kStatistics; }
  absl::StatusOr<bool> Load() override {
    if (next_ < revision_.entries().size()) {
      const StatisticsListEntry& entry = revision_.entries()[next_];
      const std::string* const tied = ties_.NextToTakeIn(entry.tensor, specs_);
      takes_in_ = tied != nullptr;
      tensor_status_ = revision_.Load(
          caller().statistics.get(), takes_in_ ? *tied : entry.tensor,
          [this] { return stopped(); }, &stored_);
      return true;
    }
    takes_in_ = false;
    return !summarized_;
  }

  absl::Status Compute(v1::SweepResponse* response) override {
    if (takes_in_) return TakeIn();
    response->set_total_count(revision_.entries().size());
    if (next_ == revision_.entries().size()) {
      response->set_done_count(next_);
      summarized_ = true;
      return Summarize(response->mutable_summary());
    }
    const StatisticsListEntry& entry = revision_.entries()[next_++];
    const EncodingKey key = revision_.KeyOf(entry.tensor);
    v1::TensorName& name = *response->mutable_name();
    name.set_model(key.model);
    name.set_revision(key.revision);
    name.set_tensor(ShownName(key.tensor));
    response->set_done_count(next_);
    std::vector<SpecResult> results;
    if (tensor_status_.ok()) tensor_status_ = ChargeTensor(entry);
    if (tensor_status_.ok()) {
      tensor_status_ = CalibrateSpecs(entry.tensor, &results);
    }
    if (tensor_status_.ok()) {
      TakeResults(entry, &results, response);
    } else {
      env().metrics->LimitRejected(core::ErrorReason(tensor_status_));
      *response->mutable_error() = ToTensorError(tensor_status_);
      for (v1::SweepTotal& total : totals_) {
        total.set_failed_count(total.failed_count() + 1);
      }
    }
    ties_.Done(entry.tensor);
    Unload();
    return absl::OkStatus();
  }

  bool answers() const override { return !takes_in_; }

 private:
  // A tensor that a mixture is chosen from, beside its options.
  struct Tensor {
    std::string name;
    // [options] expected SQNR.
    std::vector<double> sqnr_db;
  };

  absl::Status CheckRequest() {
    if (request().specs().empty()) {
      return core::WithField(core::SpecMissingError(), "specs");
    }
    if (request().specs_size() > kMaxSweepSpecs) {
      return core::WithField(core::CandidatesInvalidError(absl::StrCat(
                                 request().specs_size(),
                                 " specs, expected 1 to ", kMaxSweepSpecs)),
                             "specs");
    }
    for (const v1::EncodingSpec& proto : request().specs()) {
      const std::string field = absl::StrCat("specs[", specs_.size(), "]");
      absl::StatusOr<core::EncodingSpec> spec =
          ParseSpec(env(), proto, &ranges_lease_);
      if (!spec.ok()) return core::WithField(spec.status(), field);
      totals_.emplace_back().set_spec_index(specs_.size());
      specs_.push_back(*std::move(spec));
    }
    if (absl::Status s = TakeTarget(); !s.ok()) return s;
    if (request().mixture_case() == v1::SweepRequest::kMaxSizeBytes) {
      absl::Status charged =
          env().budget->Grow(&options_lease_, core::MixtureBytes(specs_.size()),
                             "sweep without max_size_bytes");
      if (!charged.ok()) return charged;
    }
    absl::Status status = patterns_.AddAll(request().patterns(), "patterns");
    if (!status.ok()) return status;
    status = ties_.Open(request().ties());
    if (!status.ok()) return status;
    return revision_.Open(request().model(), request().revision());
  }

  // Takes the target, if there is one.
  absl::Status TakeTarget() {
    switch (request().mixture_case()) {
      case v1::SweepRequest::kMinSqnrDb:
        target_.emplace().set_min_sqnr_db(request().min_sqnr_db());
        break;
      case v1::SweepRequest::kMaxSizeBytes:
        target_.emplace().set_max_size_bytes(request().max_size_bytes());
        break;
      case v1::SweepRequest::MIXTURE_NOT_SET:
        return absl::OkStatus();
    }
    return CheckTarget(*target_);
  }

  // The statistics of a tied tensor that are loaded.
  absl::Status TakeIn() {
    absl::Status status =
        ties_.TakeIn(revision_.entries()[next_].tensor, tensor_status_, stored_,
                     specs_, ScaleTransport::kChunks, stop());
    Unload();
    return status;
  }

  void Unload() {
    stored_ = StoredStatistics();
    revision_.Unload();
  }

  // Calibrates the specs on the tensor that is loaded. Only its own failure,
  // not that of specs, is an error.
  absl::Status CalibrateSpecs(const std::string& tensor,
                              std::vector<SpecResult>* results) {
    const absl::StatusOr<int64_t> element_count =
        core::ElementCount(stored_.state.shape);
    if (!element_count.ok()) return element_count.status();
    StoredCalibrator calibrator(env(), stored_);
    for (size_t i = 0; i < specs_.size(); ++i) {
      SpecResult& result = results->emplace_back();
      result.spec_index = static_cast<int>(i);
      const absl::StatusOr<TiedScale> tied = ties_.ScaleOf(tensor, i);
      if (!tied.ok()) {
        result.status = tied.status();
        continue;
      }
      const absl::StatusOr<CalibratedEncoding> calibrated =
          calibrator.Calibrate(specs_[i], ScaleTransport::kChunks,
                               env().helper_pool, stop(), *tied);
      if (stopped()) return core::StoppedError();
      if (calibrated.ok()) {
        result.prediction = calibrated->prediction.value_or(core::Prediction());
        result.size_bytes =
            QuantizedSizeBytes(*calibrated->resolved.encoding, *element_count);
      } else {
        result.status =
            core::WithField(calibrated.status(),
                            absl::StrCat("specs[", result.spec_index, "]"));
      }
    }
    return absl::OkStatus();
  }

  // Charges the memory that the tensor leaves for the mixture.
  absl::Status ChargeTensor(const StatisticsListEntry& entry) {
    // The name and the SQNR of the options lie on the heap.
    constexpr int64_t kTensorBytes = sizeof(Tensor) + 2 * 32;
    const auto options = static_cast<int64_t>(specs_.size());
    const int64_t kept_bytes = static_cast<int64_t>(entry.tensor.size()) +
                               kTensorBytes +
                               options * static_cast<int64_t>(sizeof(double)) +
                               MixtureTensorBytes(options);
    return env().budget->Grow(&options_lease_,
                              options_lease_.bytes() + kept_bytes,
                              "sweep fewer tensors at once, by patterns");
  }

  void TakeResults(const StatisticsListEntry& entry,
                   std::vector<SpecResult>* results,
                   v1::SweepResponse* response) {
    // Without more room than is charged: vectors that grow double it.
    if (tensors_.empty()) {
      tensors_.reserve(revision_.entries().size());
      options_.reserve(revision_.entries().size());
    }
    Tensor tensor{entry.tensor, {}};
    core::TensorOptions options;
    tensor.sqnr_db.reserve(results->size());
    options.reserve(results->size());
    for (const SpecResult& result : *results) {
      AddResult(result, &tensor, &options);
    }
    if (!options.empty()) {
      tensors_.push_back(std::move(tensor));
      options_.push_back(std::move(options));
    }
    absl::c_sort(*results, RanksBefore);
    for (const SpecResult& result : *results) {
      v1::SweepCandidate* candidate = response->add_candidates();
      candidate->set_spec_index(result.spec_index);
      if (!result.status.ok()) {
        *candidate->mutable_error() = ToTensorError(result.status);
        continue;
      }
      PredictionToProto(result.prediction, candidate->mutable_prediction());
      candidate->set_size_bytes(result.size_bytes);
    }
  }

  // Adds a result to its total and to what a mixture may choose.
  void AddResult(const SpecResult& result, Tensor* tensor,
                 core::TensorOptions* options) {
    v1::SweepTotal& total = totals_[result.spec_index];
    if (!result.status.ok()) {
      total.set_failed_count(total.failed_count() + 1);
      return;
    }
    const core::PrecisionOption option{result.spec_index, result.size_bytes,
                                       result.prediction.NoiseToSignal()};
    const double sqnr_db = result.prediction.SqnrDb();
    const bool first = total.min_sqnr_tensor().empty();
    if (first || sqnr_db < total.min_sqnr_db()) {
      total.set_min_sqnr_tensor(tensor->name);
    }
    AddToFigures(option, sqnr_db, first, &total);
    options->push_back(option);
    tensor->sqnr_db.push_back(sqnr_db);
  }

  absl::Status Summarize(v1::SweepSummary* summary) {
    absl::c_stable_sort(
        totals_, [](const v1::SweepTotal& a, const v1::SweepTotal& b) {
          const bool failed_a = a.failed_count() > 0;
          const bool failed_b = b.failed_count() > 0;
          if (failed_a != failed_b) return failed_b;
          return a.noise_to_signal_sum() < b.noise_to_signal_sum();
        });
    for (const v1::SweepTotal& total : totals_) *summary->add_totals() = total;
    if (!target_.has_value()) return absl::OkStatus();
    return MakeMixture(
        options_, *target_,
        [this](size_t tensor) -> const std::string& {
          return tensors_[tensor].name;
        },
        [this](size_t tensor, int option) {
          return tensors_[tensor].sqnr_db[option];
        },
        stop(), summary->mutable_mixture());
  }

  bool summarized_ = false;
  std::vector<core::EncodingSpec> specs_;
  // Lease of the ranges in the specs.
  MemoryBudget::Lease ranges_lease_;
  // Set when a mixture is asked for.
  absl::optional<v1::MixtureTarget> target_;
  PatternList patterns_;
  RevisionStatistics revision_;
  TiedStatistics ties_;
  // Index of the tensor that comes next.
  size_t next_ = 0;
  // True if the loaded statistics are of a tensor that the next one is tied to.
  bool takes_in_ = false;
  // State of the tensor under way.
  absl::Status tensor_status_;
  StoredStatistics stored_;
  // Over the tensors so far: [specs], and those on which a spec succeeded.
  std::vector<v1::SweepTotal> totals_;
  std::vector<Tensor> tensors_;
  std::vector<core::TensorOptions> options_;
  // Lease of tensors_, options_ and the choice of a mixture.
  MemoryBudget::Lease options_lease_;
};

}  // namespace

EncodingCall* StartSweep(const CallArguments& arguments) {
  return EncodingCall::Start<SweepCall>(arguments);
}

}  // namespace quantd::server
