// ComputeEncodings: stored statistics > encodings > store.

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/hash/hash.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/patterns.h"
#include "server/rpc/provenance.h"
#include "server/rpc/statistics_rpcs.h"
#include "server/rpc/stored_calibration.h"
#include "server/rpc/stored_encoding_proto.h"
#include "server/rpc/tensor_calibration.h"
#include "server/rpc/tensorwise_call.h"
#include "server/rpc/tied_statistics.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/names.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

class ComputeEncodingsCall final
    : public TensorwiseCall<v1::ComputeEncodingsRequest,
                            v1::ComputeEncodingsResponse> {
 public:
  explicit ComputeEncodingsCall(const CallArguments& arguments)
      : TensorwiseCall(arguments, Rpc::kComputeEncodings),
        patterns_(env().budget),
        revision_(env()),
        ties_(env()) {}

 protected:
  absl::Status Open() override {
    if (absl::Status s = CheckRequest(); !s.ok()) return s;
    const std::vector<int> numbers = NumberSpecs();
    absl::Status status = revision_.List(
        caller().statistics.get(),
        [&](const std::string& tensor) {
          const size_t index = SpecIndexOf(tensor);
          const bool is_wanted = index < specs_.size();
          ties_.See(tensor, is_wanted ? numbers[index] : -1);
          return is_wanted;
        },
        stop());
    if (!status.ok()) return status;
    return ties_.CheckSeen(request().model(), request().revision());
  }

  StepKind load_step() const override { return StepKind::kStatistics; }
  absl::StatusOr<bool> Load() override {
    if (next_ == revision_.entries().size()) return false;
    const StatisticsListEntry& entry = revision_.entries()[next_];
    const std::string* const tied =
        ties_.empty() ? nullptr
                      : ties_.NextToTakeIn(entry.tensor, SpecOf(entry.tensor));
    takes_in_ = tied != nullptr;
    tensor_status_ = revision_.Load(
        caller().statistics.get(), takes_in_ ? *tied : entry.tensor,
        [this] { return stopped(); }, &stored_);
    return true;
  }

  absl::Status Compute(v1::ComputeEncodingsResponse* response) override {
    encoding_.reset();
    if (takes_in_) return TakeIn();
    key_ = revision_.KeyOf(revision_.entries()[next_++].tensor);
    v1::TensorName& name = *response->mutable_name();
    name.set_model(key_.model);
    name.set_revision(key_.revision);
    name.set_tensor(ShownName(key_.tensor));
    response->set_done_count(next_);
    response->set_total_count(revision_.entries().size());
    if (tensor_status_.ok()) tensor_status_ = Calibrate(response);
    if (!tensor_status_.ok()) Fail(tensor_status_, response);
    ties_.Done(key_.tensor);
    Unload();
    return absl::OkStatus();
  }

  bool answers() const override { return !takes_in_; }

  bool stores() const override {
    return encoding_ != nullptr && !request().dry_run();
  }

  void Store(v1::ComputeEncodingsResponse* response) override {
    absl::StatusOr<StoredEncoding> stored =
        caller().encodings->Put(key_, std::move(encoding_), put_);
    if (!stored.ok()) return Fail(stored.status(), response);
    StoredEncodingToProto(key_, *stored, /*with_encoding=*/true,
                          response->mutable_stored_encoding());
  }

 private:
  absl::Status CheckRequest() {
    if (!request().has_default_spec() && request().overrides().empty()) {
      return core::WithField(core::SpecMissingError(), "default_spec");
    }
    absl::Status status = PatternList::CheckCount(request().overrides_size());
    if (!status.ok()) return core::WithField(status, "overrides");
    for (const v1::SpecOverride& proto : request().overrides()) {
      const std::string field = absl::StrCat("overrides[", specs_.size(), "]");
      if (absl::Status s = patterns_.Add(proto.pattern()); !s.ok()) {
        return core::WithField(s, field + ".pattern");
      }
      if (!proto.has_spec()) {
        return core::WithField(core::SpecMissingError(), field + ".spec");
      }
      if (absl::Status s = AddSpec(proto.spec()); !s.ok()) {
        return core::WithField(s, field + ".spec");
      }
    }
    if (request().has_default_spec()) {
      if (absl::Status s = AddSpec(request().default_spec()); !s.ok()) {
        return core::WithField(s, "default_spec");
      }
    }
    if (absl::Status s = ties_.Open(request().ties()); !s.ok()) return s;
    return revision_.Open(request().model(), request().revision());
  }

  absl::Status AddSpec(const v1::EncodingSpec& proto) {
    absl::StatusOr<core::EncodingSpec> spec =
        ParseSpec(env(), proto, &ranges_lease_);
    if (!spec.ok()) return spec.status();
    specs_.push_back(*std::move(spec));
    return absl::OkStatus();
  }

  // Index of the spec of the first override that matches, else of the default;
  // past specs_ when there is none.
  size_t SpecIndexOf(const std::string& tensor) const {
    const std::vector<Glob>& globs = patterns_.globs();
    return static_cast<size_t>(absl::c_find_if(globs,
                                               [&tensor](const Glob& glob) {
                                                 return glob.Matches(tensor);
                                               }) -
                               globs.begin());
  }

  // Requires: it has one.
  absl::Span<const core::EncodingSpec> SpecOf(const std::string& tensor) const {
    return absl::MakeConstSpan(&specs_[SpecIndexOf(tensor)], 1);
  }

  // A number for each spec, the same for equal specs, only where there are
  // ties.
  std::vector<int> NumberSpecs() const {
    std::vector<int> numbers(specs_.size(), 0);
    if (ties_.empty()) return numbers;
    std::vector<size_t> hashes;
    for (size_t i = 0; i < specs_.size(); ++i) {
      const std::string text = SpecProto(i).SerializeAsString();
      hashes.push_back(absl::HashOf(text));
      size_t same = 0;
      while (hashes[same] != hashes[i] ||
             (same < i && SpecProto(same).SerializeAsString() != text)) {
        ++same;
      }
      numbers[i] = static_cast<int>(same);
    }
    return numbers;
  }

  const v1::EncodingSpec& SpecProto(size_t index) const {
    return index < patterns_.globs().size()
               ? request().overrides(static_cast<int>(index)).spec()
               : request().default_spec();
  }

  // The statistics of a tied tensor that are loaded.
  absl::Status TakeIn() {
    const std::string& tensor = revision_.entries()[next_].tensor;
    absl::Status status =
        ties_.TakeIn(tensor, tensor_status_, stored_, SpecOf(tensor),
                     ScaleTransport::kOneMessage, stop());
    Unload();
    return status;
  }

  void Unload() {
    stored_ = StoredStatistics();
    revision_.Unload();
  }

  // The tensor that is loaded.
  absl::Status Calibrate(v1::ComputeEncodingsResponse* response) {
    const size_t spec_index = SpecIndexOf(key_.tensor);
    const absl::StatusOr<TiedScale> tied = ties_.ScaleOf(key_.tensor, 0);
    if (!tied.ok()) return tied.status();
    absl::StatusOr<CalibratedEncoding> calibrated =
        StoredCalibrator(env(), stored_)
            .Calibrate(specs_[spec_index], ScaleTransport::kOneMessage,
                       env().helper_pool, stop(), *tied);
    if (!calibrated.ok()) {
      return core::WithField(
          calibrated.status(),
          spec_index < patterns_.globs().size()
              ? absl::StrCat("overrides[", spec_index, "].spec")
              : "default_spec");
    }
    if (calibrated->prediction.has_value()) {
      PredictionToProto(*calibrated->prediction,
                        response->mutable_prediction());
    }
    encoding_ = std::move(calibrated->resolved.encoding);
    if (stores()) {
      put_ = MadeOfStatistics(env(), SpecProto(spec_index), stored_,
                              calibrated->prediction.has_value()
                                  ? &response->prediction()
                                  : nullptr);
    }
    if (request().dry_run()) {
      v1::StoredEncoding* proto = response->mutable_stored_encoding();
      *proto->mutable_name() = response->name();
      EncodingToProto(*encoding_, proto->mutable_encoding());
      proto->set_format(static_cast<v1::NumberFormat>(encoding_->format));
      proto->set_scale_count(encoding_->scale.size());
    }
    return absl::OkStatus();
  }

  void Fail(const absl::Status& status,
            v1::ComputeEncodingsResponse* response) {
    env().metrics->LimitRejected(core::ErrorReason(status));
    response->clear_prediction();
    *response->mutable_error() = ToTensorError(status);
  }

  PatternList patterns_;
  // Specs of the patterns, then the default one.
  std::vector<core::EncodingSpec> specs_;
  // Lease of the ranges in the specs.
  MemoryBudget::Lease ranges_lease_;
  RevisionStatistics revision_;
  TiedStatistics ties_;
  // Index of the tensor that comes next.
  size_t next_ = 0;
  // True if the loaded statistics are of a tensor that the next one is tied to.
  bool takes_in_ = false;
  // State of the tensor under way.
  absl::Status tensor_status_;
  StoredStatistics stored_;
  EncodingKey key_;
  std::shared_ptr<const core::Encoding> encoding_;
  // Precondition and provenance for storing encoding_.
  Precondition put_;
};

}  // namespace

EncodingCall* StartComputeEncodings(const CallArguments& arguments) {
  return EncodingCall::Start<ComputeEncodingsCall>(arguments);
}

}  // namespace quantd::server
