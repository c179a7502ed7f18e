// Evaluate: bytes > error of each candidate, as they arrive or, when a
// candidate is a spec, when the tensor is complete.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/evaluate/evaluate.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/rpc/stream_rpcs.h"
#include "server/rpc/tensor_buffer.h"
#include "server/rpc/tensor_input.h"
#include "server/rpc/tensor_job.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/statistics_proto.h"

namespace quantd::server {
namespace {

constexpr int kMaxCandidates = 64;

void MetricsToProto(const core::ErrorSums& sums, v1::ErrorMetrics* proto) {
  proto->set_count(sums.count);
  proto->set_non_finite_count(sums.non_finite);
  proto->set_clipped_low_count(sums.clipped_low);
  proto->set_clipped_high_count(sums.clipped_high);
  proto->set_zero_flushed_count(sums.zero_flushed);
  proto->set_sum_squared_error(sums.squared_error);
  proto->set_mean_squared_error(sums.MeanSquaredError());
  proto->set_mean_absolute_error(sums.MeanAbsoluteError());
  proto->set_max_absolute_error(sums.max_absolute_error);
  proto->set_mean_relative_error(sums.MeanRelativeError());
  proto->set_max_relative_error(sums.max_relative_error);
  proto->set_sqnr_db(sums.SqnrDb());
  proto->set_cosine_similarity(sums.CosineSimilarity());
}

// A candidate: an encoding from the start, or a spec until the tensor is
// complete.
struct Candidate {
  std::string label;
  std::unique_ptr<SpecCalibration> calibration;  // null unless a spec
  ResolvedEncoding resolved;
  std::unique_ptr<core::Evaluator> evaluator;
};

class EvaluateJob final : public TensorJob {
 public:
  EvaluateJob(const RpcEnvironment& env, const v1::EvaluateHeader& header,
              const TensorDescription& description,
              std::unique_ptr<SpecCalibration> statistics,
              std::vector<Candidate> candidates)
      : env_(env),
        name_(header.tensor().name()),
        per_scale_index_(header.per_scale_index()),
        element_type_(description.element_type),
        element_bytes_(core::ElementSizeBytes(element_type_)),
        statistics_(std::move(statistics)),
        candidates_(std::move(candidates)) {
    frame_.end_bytes = description.element_count * element_bytes_;
    frame_.unit_bytes = element_bytes_;
    frame_.granule_bytes = core::Evaluator::kLeafElements * element_bytes_;
    frame_.quantum_bytes = TensorBuffer::kBlockBytes;
    bool buffered = false;
    for (Candidate& candidate : candidates_) {
      if (candidate.calibration == nullptr) {
        StartEvaluator(candidate);
      } else {
        buffered = true;
      }
    }
    if (buffered) {
      buffer_ = std::make_unique<TensorBuffer>(env_, frame_.end_bytes);
    }
  }

  absl::Status Reserve(int64_t bytes) override {
    return buffer_ != nullptr ? buffer_->Reserve(bytes) : absl::OkStatus();
  }

  absl::Status Consume(int64_t offset_bytes,
                       absl::Span<const uint8_t> data) override {
    statistics_->Update(offset_bytes, data);
    for (Candidate& candidate : candidates_) {
      if (candidate.calibration == nullptr) {
        Evaluate(candidate, offset_bytes, data);
      } else {
        candidate.calibration->Update(offset_bytes, data);
      }
    }
    if (buffer_ != nullptr) buffer_->Append(data);
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Finish(ChunkWriter* out) override {
    if (buffer_ != nullptr) {
      if (next_block_ == 0) {
        absl::Status status = CalibrateCandidates();
        if (!status.ok()) return status;
      }
      if (next_block_ < buffer_->block_count()) {
        const absl::Span<const uint8_t> block = buffer_->block(next_block_);
        for (Candidate& candidate : candidates_) {
          if (candidate.calibration != nullptr) {
            Evaluate(candidate, next_block_ * TensorBuffer::kBlockBytes, block);
          }
        }
        ++next_block_;
      }
      if (next_block_ < buffer_->block_count()) return false;
    }
    WriteSummary(out);
    return true;
  }

 private:
  void StartEvaluator(Candidate& candidate) {
    candidate.evaluator = std::make_unique<core::Evaluator>(
        *candidate.resolved.encoding, *candidate.resolved.layout, element_type_,
        core::EvaluateOptions{per_scale_index_, false});
  }

  void Evaluate(Candidate& candidate, int64_t offset_bytes,
                absl::Span<const uint8_t> data) {
    candidate.evaluator->Update(
        offset_bytes / element_bytes_,
        static_cast<int64_t>(data.size()) / element_bytes_, data.data(),
        env_.pool);
  }

  absl::Status CalibrateCandidates() {
    for (Candidate& candidate : candidates_) {
      if (candidate.calibration == nullptr) continue;
      absl::StatusOr<ResolvedEncoding> resolved =
          candidate.calibration->Calibrate();
      if (!resolved.ok()) return resolved.status();
      candidate.resolved = *std::move(resolved);
      StartEvaluator(candidate);
    }
    return absl::OkStatus();
  }

  void WriteSummary(ChunkWriter* out) {
    v1::EvaluateSummary summary;
    *summary.mutable_name() = name_;
    StatisticsToProto(statistics_->statistics(), summary.mutable_statistics());
    for (const Candidate& candidate : candidates_) {
      v1::CandidateMetrics* metrics = summary.add_candidates();
      metrics->set_label(candidate.label);
      metrics->set_etag(candidate.resolved.etag);
      MetricsToProto(candidate.evaluator->overall(),
                     metrics->mutable_overall());
      for (const core::ErrorSums& sums :
           candidate.evaluator->per_scale_index()) {
        MetricsToProto(sums, metrics->add_per_scale_index());
      }
      if (candidate.calibration != nullptr) {
        EncodingToProto(*candidate.resolved.encoding,
                        metrics->mutable_encoding());
      }
      env_.metrics->Elements(
          Rpc::kEvaluate, core::FindFormat(candidate.resolved.encoding->format),
          statistics_->statistics().counts().total);
    }
    out->SetSummary(summary);
  }

  const RpcEnvironment& env_;
  const v1::TensorName name_;
  const bool per_scale_index_;
  const core::ElementType element_type_;
  const int64_t element_bytes_;
  const std::unique_ptr<SpecCalibration> statistics_;
  std::vector<Candidate> candidates_;
  // Only when a candidate is a spec.
  std::unique_ptr<TensorBuffer> buffer_;
  int64_t next_block_ = 0;
};

class EvaluateRpc final : public TensorRpc {
 public:
  explicit EvaluateRpc(const RpcEnvironment& env) : env_(env) {}

  Rpc id() const override { return Rpc::kEvaluate; }

  absl::StatusOr<std::unique_ptr<TensorJob>> Open(const std::string& bytes,
                                                  ChunkWriter* out) override {
    absl::StatusOr<v1::EvaluateHeader> header =
        ParseHeader<v1::EvaluateHeader>(bytes);
    if (!header.ok()) return header.status();
    absl::StatusOr<TensorDescription> description =
        CheckDescription(env_, header->tensor());
    if (!description.ok()) return description.status();
    if (header->candidates().empty() ||
        header->candidates_size() > kMaxCandidates) {
      return core::WithField(
          core::CandidatesInvalidError(
              absl::StrCat(header->candidates_size(),
                           " candidates, expected 1 to ", kMaxCandidates)),
          "header.candidates");
    }
    std::vector<Candidate> candidates;
    int64_t metrics_count = 0;
    for (const v1::EvaluateCandidate& proto : header->candidates()) {
      const std::string field =
          absl::StrCat("header.candidates[", candidates.size(), "]");
      absl::StatusOr<Candidate> candidate =
          OpenCandidate(proto, header->tensor().name(), *description);
      if (!candidate.ok()) return core::WithField(candidate.status(), field);
      metrics_count += candidate->calibration != nullptr
                           ? candidate->calibration->scale_count()
                           : candidate->resolved.layout->scale_count();
      candidates.push_back(*std::move(candidate));
    }
    if (header->per_scale_index() &&
        metrics_count > env_.limits.metrics_count) {
      env_.metrics->LimitRejected("SCALE_COUNT_LIMIT");
      return core::WithField(
          core::ScaleCountLimitError(env_.limits.metrics_count, metrics_count),
          "header.per_scale_index");
    }
    // Statistics of the whole tensor do not depend on the format.
    v1::EncodingSpec per_tensor;
    per_tensor.set_format(v1::NUMBER_FORMAT_INT8);
    absl::StatusOr<std::unique_ptr<SpecCalibration>> statistics =
        SpecCalibration::Create(env_, per_tensor, *description);
    if (!statistics.ok()) return statistics.status();
    return std::make_unique<EvaluateJob>(env_, *header, *description,
                                         *std::move(statistics),
                                         std::move(candidates));
  }

 private:
  absl::StatusOr<Candidate> OpenCandidate(
      const v1::EvaluateCandidate& proto, const v1::TensorName& name,
      const TensorDescription& description) {
    Candidate candidate;
    candidate.label = proto.label();
    absl::StatusOr<ResolvedEncoding> resolved;
    absl::string_view field;
    switch (proto.encoding_source_case()) {
      case v1::EvaluateCandidate::kReference:
        field = "reference";
        resolved =
            ResolveReference(env_, proto.reference(), name, description.shape);
        break;
      case v1::EvaluateCandidate::kEncoding:
        field = "encoding";
        resolved = ResolveInline(env_, proto.encoding(), description.shape);
        break;
      case v1::EvaluateCandidate::kSpec: {
        absl::StatusOr<std::unique_ptr<SpecCalibration>> calibration =
            SpecCalibration::Create(env_, proto.spec(), description);
        if (!calibration.ok()) {
          return core::WithField(calibration.status(), "spec");
        }
        candidate.calibration = *std::move(calibration);
        return candidate;
      }
      case v1::EvaluateCandidate::ENCODING_SOURCE_NOT_SET:
        return core::EncodingMissingError();
    }
    if (!resolved.ok()) return core::WithField(resolved.status(), field);
    candidate.resolved = *std::move(resolved);
    return candidate;
  }

  const RpcEnvironment& env_;
};

}  // namespace

std::unique_ptr<TensorRpc> MakeEvaluateRpc(const RpcEnvironment& env) {
  return std::make_unique<EvaluateRpc>(env);
}

}  // namespace quantd::server
