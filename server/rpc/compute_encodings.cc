// ComputeEncodings: stored statistics > encodings > store.

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/patterns.h"
#include "server/rpc/statistics_rpcs.h"
#include "server/rpc/stored_calibration.h"
#include "server/rpc/stored_encoding_proto.h"
#include "server/rpc/tensor_calibration.h"
#include "server/rpc/tensorwise_call.h"
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
        revision_(env()) {}

 protected:
  absl::Status Open() override {
    if (absl::Status s = CheckRequest(); !s.ok()) return s;
    return revision_.List(
        caller().statistics.get(),
        [this](const std::string& tensor) {
          return SpecIndexOf(tensor) < specs_.size();
        },
        stop());
  }

  absl::StatusOr<bool> Load() override {
    if (next_ == revision_.entries().size()) return false;
    tensor_status_ = revision_.Load(
        caller().statistics.get(), revision_.entries()[next_],
        [this] { return stopped(); }, &stored_);
    return true;
  }

  absl::Status Compute(v1::ComputeEncodingsResponse* response) override {
    key_ = revision_.KeyOf(revision_.entries()[next_++]);
    v1::TensorName& name = *response->mutable_name();
    name.set_model(key_.model);
    name.set_revision(key_.revision);
    name.set_tensor(ShownName(key_.tensor));
    response->set_done_count(next_);
    response->set_total_count(revision_.entries().size());
    encoding_.reset();
    if (tensor_status_.ok()) tensor_status_ = Calibrate(response);
    if (!tensor_status_.ok()) Fail(tensor_status_, response);
    stored_ = StoredStatistics();
    revision_.Unload();
    return absl::OkStatus();
  }

  bool stores() const override {
    return encoding_ != nullptr && !request().dry_run();
  }

  void Store(v1::ComputeEncodingsResponse* response) override {
    absl::StatusOr<StoredEncoding> stored =
        caller().encodings->Put(key_, std::move(encoding_), Precondition());
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
    return revision_.Open(request().model(), request().revision());
  }

  absl::Status AddSpec(const v1::EncodingSpec& proto) {
    absl::StatusOr<core::EncodingSpec> spec =
        ParseSpec(env(), proto, &ranges_lease_);
    if (!spec.ok()) return spec.status();
    specs_.push_back(*std::move(spec));
    return absl::OkStatus();
  }

  // Of the first override that matches, else of the default; past specs_ when
  // there is none.
  size_t SpecIndexOf(const std::string& tensor) const {
    const std::vector<Glob>& globs = patterns_.globs();
    return static_cast<size_t>(absl::c_find_if(globs,
                                               [&tensor](const Glob& glob) {
                                                 return glob.Matches(tensor);
                                               }) -
                               globs.begin());
  }

  // The tensor that is loaded.
  absl::Status Calibrate(v1::ComputeEncodingsResponse* response) {
    const size_t spec_index = SpecIndexOf(key_.tensor);
    absl::StatusOr<CalibratedEncoding> calibrated =
        StoredCalibrator(env(), stored_)
            .Calibrate(specs_[spec_index], ScaleTransport::kOneMessage,
                       env().helper_pool, stop());
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
  // Of the patterns, then the default one.
  std::vector<core::EncodingSpec> specs_;
  // Of the ranges in them.
  MemoryBudget::Lease ranges_lease_;
  RevisionStatistics revision_;
  // Index of the tensor that comes next.
  size_t next_ = 0;
  // Of the tensor under way.
  absl::Status tensor_status_;
  StoredStatistics stored_;
  EncodingKey key_;
  std::shared_ptr<const core::Encoding> encoding_;
};

}  // namespace

EncodingCall* StartComputeEncodings(const CallArguments& arguments) {
  return EncodingCall::Start<ComputeEncodingsCall>(arguments);
}

}  // namespace quantd::server
