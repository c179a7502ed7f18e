// Calibrate: chunks > statistics > encoding > store.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/rpc/stream_rpcs.h"
#include "server/rpc/tensor_input.h"
#include "server/rpc/tensor_job.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/names.h"
#include "server/wire/statistics_proto.h"

namespace quantd::server {
namespace {

class CalibrateJob final : public TensorJob {
 public:
  // `key` is where the encoding goes; without it only statistics are answered.
  CalibrateJob(const RpcEnvironment& env, v1::TensorName name,
               const TensorDescription& description,
               absl::optional<EncodingKey> key,
               std::unique_ptr<SpecCalibration> calibration)
      : env_(env),
        name_(std::move(name)),
        key_(std::move(key)),
        calibration_(std::move(calibration)) {
    const int64_t element_bytes =
        core::ElementSizeBytes(description.element_type);
    frame_.end_bytes = description.element_count * element_bytes;
    frame_.unit_bytes = element_bytes;
    frame_.granule_bytes = element_bytes;
    frame_.quantum_bytes = env_.limits.chunk_bytes;
  }

  absl::Status Consume(int64_t offset_bytes,
                       absl::Span<const uint8_t> data) override {
    calibration_->Update(offset_bytes, data);
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Finish(ChunkWriter* out) override {
    v1::CalibrateSummary summary;
    *summary.mutable_name() = name_;
    if (key_.has_value()) {
      absl::StatusOr<ResolvedEncoding> resolved = calibration_->Calibrate();
      if (!resolved.ok()) return resolved.status();
      absl::StatusOr<StoredEncoding> stored =
          env_.store->Put(*key_, resolved->encoding, Precondition());
      if (!stored.ok()) return stored.status();
      StoredEncodingToProto(*key_, *stored, /*with_encoding=*/true,
                            summary.mutable_stored_encoding());
    }
    const core::TensorStatistics& statistics = calibration_->statistics();
    StatisticsToProto(statistics, summary.mutable_statistics());
    out->SetSummary(summary);
    const core::ElementCounts& counts = statistics.counts();
    env_.metrics->Elements(Rpc::kCalibrate, nullptr, counts.total);
    env_.metrics->NonFinite(counts.nan + counts.positive_infinity +
                            counts.negative_infinity);
    return true;
  }

 private:
  const RpcEnvironment& env_;
  const v1::TensorName name_;
  const absl::optional<EncodingKey> key_;
  const std::unique_ptr<SpecCalibration> calibration_;
};

class CalibrateRpc final : public TensorRpc {
 public:
  explicit CalibrateRpc(const RpcEnvironment& env) : env_(env) {}

  Rpc id() const override { return Rpc::kCalibrate; }

  absl::StatusOr<std::unique_ptr<TensorJob>> Open(const std::string& bytes,
                                                  ChunkWriter* out) override {
    absl::StatusOr<v1::CalibrateHeader> header =
        ParseHeader<v1::CalibrateHeader>(bytes);
    if (!header.ok()) return header.status();
    if (header->has_contribution()) {
      return core::WithField(
          core::FeatureNotImplementedError("contribution to a calibration"),
          "header.contribution");
    }
    absl::StatusOr<TensorDescription> description =
        CheckDescription(env_, header->tensor());
    if (!description.ok()) return description.status();
    absl::optional<EncodingKey> key;
    v1::EncodingSpec spec = header->spec();
    if (header->has_spec()) {
      absl::StatusOr<EncodingKey> checked =
          KeyFromProto(header->tensor().name());
      if (!checked.ok()) {
        return core::WithField(checked.status(), "header.tensor.name");
      }
      key = *std::move(checked);
    } else {
      // Statistics of the whole tensor do not depend on the format.
      spec.set_format(v1::NUMBER_FORMAT_INT8);
    }
    absl::StatusOr<std::unique_ptr<SpecCalibration>> calibration =
        SpecCalibration::Create(env_, spec, *description);
    if (!calibration.ok()) {
      return core::WithField(calibration.status(), "header.spec");
    }
    return std::make_unique<CalibrateJob>(env_, header->tensor().name(),
                                          *description, std::move(key),
                                          *std::move(calibration));
  }

 private:
  const RpcEnvironment& env_;
};

}  // namespace

std::unique_ptr<TensorRpc> MakeCalibrateRpc(const RpcEnvironment& env) {
  return std::make_unique<CalibrateRpc>(env);
}

}  // namespace quantd::server
