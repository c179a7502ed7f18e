// ComputeEncodings: stored statistics > encodings > store.

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "server/rpc/statistics_rpcs.h"
#include "server/rpc/stored_calibration.h"
#include "server/rpc/tensor_input.h"
#include "server/rpc/tensorwise_call.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/glob.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

class ComputeEncodingsCall final
    : public TensorwiseCall<v1::ComputeEncodingsResponse> {
 public:
  ComputeEncodingsCall(const RpcEnvironment& env, StreamRegistry* registry,
                       grpc::CallbackServerContext* context,
                       const v1::ComputeEncodingsRequest& request)
      : TensorwiseCall(env, Rpc::kComputeEncodings, registry, context),
        request_(request),
        revision_(env) {}

 protected:
  absl::StatusOr<bool> Load() override {
    if (!opened_) {
      opened_ = true;
      if (absl::Status s = Open(); !s.ok()) return s;
    }
    if (next_ == revision_.entries().size()) return false;
    tensor_status_ = revision_.Load(
        revision_.entries()[next_], [this] { return stopped(); }, &stored_);
    return true;
  }

  bool Compute(v1::ComputeEncodingsResponse* response) override {
    if (!calibrator_.has_value()) {
      encoding_.reset();
      if (tensor_status_.ok()) tensor_status_ = BeginCalibrating();
    }
    if (tensor_status_.ok()) {
      const absl::StatusOr<bool> calibrated = calibrator_->Step();
      if (calibrated.ok() && !*calibrated) return false;
      tensor_status_ = calibrated.status();
      if (!tensor_status_.ok()) {
        tensor_status_ = core::WithField(tensor_status_, SpecField());
      }
    }
    key_ = revision_.KeyOf(revision_.entries()[next_++]);
    v1::TensorName& name = *response->mutable_name();
    name.set_model(key_.model);
    name.set_revision(key_.revision);
    name.set_tensor(key_.tensor);
    response->set_done_count(next_);
    response->set_total_count(revision_.entries().size());
    if (tensor_status_.ok()) {
      TakeResult(response);
    } else {
      Fail(tensor_status_, response);
    }
    calibrator_.reset();
    stored_ = StoredStatistics();
    revision_.Unload();
    return true;
  }

  bool stores() const override {
    return encoding_ != nullptr && !request_.dry_run();
  }

  void Store(v1::ComputeEncodingsResponse* response) override {
    absl::StatusOr<StoredEncoding> stored =
        caller().encodings->Put(key_, std::move(encoding_), Precondition());
    if (!stored.ok()) return Fail(stored.status(), response);
    StoredEncodingToProto(key_, *stored, /*with_encoding=*/true,
                          response->mutable_stored_encoding());
  }

 private:
  struct Override {
    Glob pattern;
    core::EncodingSpec spec;
  };

  absl::Status Open() {
    if (!request_.has_default_spec() && request_.overrides().empty()) {
      return core::WithField(core::SpecMissingError(), "default_spec");
    }
    if (request_.overrides_size() > kMaxPatterns) {
      return core::WithField(
          core::PatternInvalidError(
              absl::StrCat(request_.overrides_size(),
                           " overrides, expected at most ", kMaxPatterns)),
          "overrides");
    }
    if (request_.has_default_spec()) {
      absl::StatusOr<core::EncodingSpec> spec =
          SpecFromProto(request_.default_spec());
      if (!spec.ok()) return core::WithField(spec.status(), "default_spec");
      default_spec_ = *std::move(spec);
    }
    for (const v1::SpecOverride& proto : request_.overrides()) {
      const std::string field =
          absl::StrCat("overrides[", overrides_.size(), "]");
      absl::StatusOr<Glob> pattern = Glob::Create(proto.pattern());
      if (!pattern.ok()) {
        return core::WithField(pattern.status(), field + ".pattern");
      }
      if (!proto.has_spec()) {
        return core::WithField(core::SpecMissingError(), field + ".spec");
      }
      absl::StatusOr<core::EncodingSpec> spec = SpecFromProto(proto.spec());
      if (!spec.ok()) return core::WithField(spec.status(), field + ".spec");
      overrides_.push_back({*std::move(pattern), *std::move(spec)});
    }
    absl::Status status = revision_.Open(caller().statistics, request_.model(),
                                         request_.revision());
    if (!status.ok()) return status;
    std::vector<StatisticsListEntry>& entries = revision_.entries();
    const auto unwanted = [this](const StatisticsListEntry& entry) {
      return FieldAndSpecOf(entry.tensor).second == nullptr;
    };
    entries.erase(std::remove_if(entries.begin(), entries.end(), unwanted),
                  entries.end());
    return absl::OkStatus();
  }

  // The spec of the first override that matches, or the default one, and where
  // it stands; null when there is none.
  std::pair<std::string, const core::EncodingSpec*> FieldAndSpecOf(
      const std::string& tensor) const {
    for (size_t i = 0; i < overrides_.size(); ++i) {
      if (overrides_[i].pattern.Matches(tensor)) {
        return {absl::StrCat("overrides[", i, "].spec"), &overrides_[i].spec};
      }
    }
    return {"default_spec",
            default_spec_.has_value() ? &*default_spec_ : nullptr};
  }

  // Of the tensor under way.
  std::string SpecField() const {
    return FieldAndSpecOf(revision_.entries()[next_].tensor).first;
  }

  absl::Status BeginCalibrating() {
    const auto [field, spec] =
        FieldAndSpecOf(revision_.entries()[next_].tensor);
    calibrator_.emplace(env(), stored_);
    return core::WithField(calibrator_->Begin(*spec), field);
  }

  void TakeResult(v1::ComputeEncodingsResponse* response) {
    CalibratedEncoding calibrated = calibrator_->Take();
    if (calibrated.prediction.has_value()) {
      PredictionToProto(*calibrated.prediction, response->mutable_prediction());
    }
    encoding_ = std::move(calibrated.resolved.encoding);
    if (request_.dry_run()) {
      v1::StoredEncoding* proto = response->mutable_stored_encoding();
      *proto->mutable_name() = response->name();
      EncodingToProto(*encoding_, proto->mutable_encoding());
      proto->set_format(static_cast<v1::NumberFormat>(encoding_->format));
      proto->set_scale_count(encoding_->scale.size());
    }
  }

  void Fail(const absl::Status& status,
            v1::ComputeEncodingsResponse* response) {
    env().metrics->LimitRejected(core::ErrorReason(status));
    response->clear_prediction();
    *response->mutable_error() = ToTensorError(status);
  }

  const v1::ComputeEncodingsRequest request_;
  bool opened_ = false;
  absl::optional<core::EncodingSpec> default_spec_;
  std::vector<Override> overrides_;
  RevisionStatistics revision_;
  // Index of the tensor that comes next.
  size_t next_ = 0;
  // Of the tensor under way.
  absl::Status tensor_status_;
  StoredStatistics stored_;
  absl::optional<StoredCalibrator> calibrator_;
  EncodingKey key_;
  std::shared_ptr<const core::Encoding> encoding_;
};

}  // namespace

grpc::ServerWriteReactor<v1::ComputeEncodingsResponse>* StartComputeEncodings(
    const RpcEnvironment& env, StreamRegistry* registry,
    grpc::CallbackServerContext* context,
    const v1::ComputeEncodingsRequest& request) {
  auto* call = new ComputeEncodingsCall(env, registry, context, request);
  call->Begin();
  return call;
}

}  // namespace quantd::server
