// Sweep: stored statistics > the expected error of many specs, ranked.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/calibrate/mixed_precision.h"
#include "core/calibrate/prediction.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "core/types/block_layout.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/patterns.h"
#include "server/rpc/statistics_rpcs.h"
#include "server/rpc/stored_calibration.h"
#include "server/rpc/tensor_calibration.h"
#include "server/rpc/tensorwise_call.h"
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

int64_t SizeBytes(const core::Encoding& encoding, int64_t element_count) {
  return core::FindFormat(encoding.format)->SizeBytes(element_count) +
         core::ScalesSizeBytes(encoding);
}

// Adds one tensor to figures over several: those of SweepTotal and
// SweepMixture.
template <typename Figures>
void AddTensor(const core::PrecisionOption& option, double sqnr_db, bool first,
               Figures* figures) {
  figures->set_size_bytes(figures->size_bytes() + option.size_bytes);
  figures->set_noise_to_signal_sum(figures->noise_to_signal_sum() +
                                   option.noise_to_signal);
  if (first || sqnr_db < figures->min_sqnr_db()) {
    figures->set_min_sqnr_db(sqnr_db);
  }
}

class SweepCall final
    : public TensorwiseCall<v1::SweepRequest, v1::SweepResponse> {
 public:
  explicit SweepCall(const CallArguments& arguments)
      : TensorwiseCall(arguments, Rpc::kSweep),
        patterns_(env().budget),
        revision_(env()) {}

 protected:
  absl::Status Open() override {
    if (absl::Status s = CheckRequest(); !s.ok()) return s;
    return revision_.List(
        caller().statistics.get(),
        [this](const std::string& tensor) {
          return patterns_.empty() || patterns_.MatchesAny(tensor);
        },
        stop());
  }

  absl::StatusOr<bool> Load() override {
    if (next_ < revision_.entries().size()) {
      tensor_status_ = revision_.Load(
          caller().statistics.get(), revision_.entries()[next_],
          [this] { return stopped(); }, &stored_);
      return true;
    }
    return !summarized_;
  }

  absl::Status Compute(v1::SweepResponse* response) override {
    response->set_total_count(revision_.entries().size());
    if (next_ == revision_.entries().size()) {
      response->set_done_count(next_);
      summarized_ = true;
      return Summarize(response->mutable_summary());
    }
    const StatisticsListEntry& entry = revision_.entries()[next_++];
    const EncodingKey key = revision_.KeyOf(entry);
    v1::TensorName& name = *response->mutable_name();
    name.set_model(key.model);
    name.set_revision(key.revision);
    name.set_tensor(ShownName(key.tensor));
    response->set_done_count(next_);
    std::vector<SpecResult> results;
    if (tensor_status_.ok()) tensor_status_ = ChargeTensor(entry);
    if (tensor_status_.ok()) tensor_status_ = CalibrateSpecs(&results);
    if (tensor_status_.ok()) {
      TakeResults(entry, &results, response);
    } else {
      env().metrics->LimitRejected(core::ErrorReason(tensor_status_));
      *response->mutable_error() = ToTensorError(tensor_status_);
      for (v1::SweepTotal& total : totals_) {
        total.set_failed_count(total.failed_count() + 1);
      }
    }
    stored_ = StoredStatistics();
    revision_.Unload();
    return absl::OkStatus();
  }

 private:
  // What a mixture is chosen from, beside its options.
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
      absl::StatusOr<core::EncodingSpec> spec = SpecFromProto(proto);
      if (!spec.ok()) return core::WithField(spec.status(), field);
      totals_.emplace_back().set_spec_index(specs_.size());
      specs_.push_back(*std::move(spec));
    }
    if (absl::Status s = CheckTarget(); !s.ok()) return s;
    if (request().mixture_case() == v1::SweepRequest::kMaxSizeBytes) {
      absl::Status charged =
          env().budget->Grow(&options_lease_, core::MixtureBytes(specs_.size()),
                             "sweep without max_size_bytes");
      if (!charged.ok()) return charged;
    }
    absl::Status status = patterns_.AddAll(request().patterns(), "patterns");
    if (!status.ok()) return status;
    return revision_.Open(request().model(), request().revision());
  }

  absl::Status CheckTarget() {
    switch (request().mixture_case()) {
      case v1::SweepRequest::kMinSqnrDb:
        if (!std::isfinite(request().min_sqnr_db())) {
          return core::WithField(core::TargetInvalidError(absl::StrCat(
                                     "min_sqnr_db is ", request().min_sqnr_db(),
                                     ", expected a finite number")),
                                 "min_sqnr_db");
        }
        break;
      case v1::SweepRequest::kMaxSizeBytes: {
        constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
        if (request().max_size_bytes() == 0 ||
            request().max_size_bytes() > kMax) {
          return core::WithField(
              core::TargetInvalidError(absl::StrCat("max_size_bytes is ",
                                                    request().max_size_bytes(),
                                                    ", expected 1 to ", kMax)),
              "max_size_bytes");
        }
        break;
      }
      case v1::SweepRequest::MIXTURE_NOT_SET:
        break;
    }
    return absl::OkStatus();
  }

  // Of the tensor that is loaded. Only its own failure, not that of specs, is
  // an error.
  absl::Status CalibrateSpecs(std::vector<SpecResult>* results) {
    const absl::StatusOr<int64_t> element_count =
        core::ElementCount(stored_.state.shape);
    if (!element_count.ok()) return element_count.status();
    StoredCalibrator calibrator(env(), stored_);
    for (const core::EncodingSpec& spec : specs_) {
      const absl::StatusOr<CalibratedEncoding> calibrated =
          calibrator.Calibrate(spec, env().helper_pool, stop());
      if (stopped()) return core::StoppedError();
      SpecResult& result = results->emplace_back();
      result.spec_index = static_cast<int>(results->size()) - 1;
      if (calibrated.ok()) {
        result.prediction = calibrated->prediction.value_or(core::Prediction());
        result.size_bytes =
            SizeBytes(*calibrated->resolved.encoding, *element_count);
      } else {
        result.status =
            core::WithField(calibrated.status(),
                            absl::StrCat("specs[", result.spec_index, "]"));
      }
    }
    return absl::OkStatus();
  }

  // What the tensor leaves for the mixture.
  absl::Status ChargeTensor(const StatisticsListEntry& entry) {
    // The name, the options and their SQNR lie on the heap.
    constexpr int64_t kHeapBytes = 3 * 32;
    constexpr int64_t kTensorBytes = sizeof(Tensor) +
                                     sizeof(core::TensorOptions) + kHeapBytes +
                                     core::kMixtureTensorBytes;
    constexpr int64_t kOptionBytes = sizeof(core::PrecisionOption) +
                                     sizeof(double) + core::kMixtureOptionBytes;
    const int64_t kept_bytes =
        static_cast<int64_t>(entry.tensor.size()) + kTensorBytes +
        static_cast<int64_t>(specs_.size()) * kOptionBytes;
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
    AddTensor(option, sqnr_db, first, &total);
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
    if (request().mixture_case() == v1::SweepRequest::MIXTURE_NOT_SET) {
      return absl::OkStatus();
    }
    const absl::StatusOr<core::Mixture> mixture =
        request().mixture_case() == v1::SweepRequest::kMinSqnrDb
            ? core::SmallestMixture(options_, request().min_sqnr_db(), stop())
            : core::BestMixture(
                  options_, static_cast<int64_t>(request().max_size_bytes()),
                  stop());
    if (!mixture.ok()) return mixture.status();
    v1::SweepMixture* const proto = summary->mutable_mixture();
    proto->set_target_met(mixture->target_met);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor& tensor = tensors_[i];
      const int choice = mixture->choice[i];
      const core::PrecisionOption& option = options_[i][choice];
      v1::SweepMixture::Choice* chosen = proto->add_choices();
      chosen->set_tensor(tensor.name);
      chosen->set_spec_index(option.spec_index);
      AddTensor(option, tensor.sqnr_db[choice], i == 0, proto);
    }
    return absl::OkStatus();
  }

  bool summarized_ = false;
  std::vector<core::EncodingSpec> specs_;
  PatternList patterns_;
  RevisionStatistics revision_;
  // Index of the tensor that comes next.
  size_t next_ = 0;
  // Of the tensor under way.
  absl::Status tensor_status_;
  StoredStatistics stored_;
  // Over the tensors so far: [specs], and those on which a spec succeeded.
  std::vector<v1::SweepTotal> totals_;
  std::vector<Tensor> tensors_;
  std::vector<core::TensorOptions> options_;
  // What tensors_, options_ and the choice of a mixture take.
  MemoryBudget::Lease options_lease_;
};

}  // namespace

EncodingCall* StartSweep(const CallArguments& arguments) {
  return EncodingCall::Start<SweepCall>(arguments);
}

}  // namespace quantd::server
