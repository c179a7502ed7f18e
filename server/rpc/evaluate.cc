// Evaluate: bytes > error of each candidate, as they arrive or, when a
// candidate is a spec that needs all of them, when the tensor is complete; or
// pairs > error of one tensor against another.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/block_quantizer.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/encoding_spec.h"
#include "core/errors.h"
#include "core/evaluate/comparison.h"
#include "core/evaluate/evaluate.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/quantize.h"
#include "core/statistics/held_tensor.h"
#include "core/types/block_layout.h"
#include "core/types/encoding_memory.h"
#include "core/types/scale_window.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/caller.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/output_meter.h"
#include "server/rpc/scale_stream.h"
#include "server/rpc/steps.h"
#include "server/rpc/stream_rpcs.h"
#include "server/rpc/tensor_accumulator.h"
#include "server/rpc/tensor_buffer.h"
#include "server/rpc/tensor_calibration.h"
#include "server/rpc/tensor_header.h"
#include "server/rpc/tensor_job.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/error_metrics_proto.h"
#include "server/wire/statistics_proto.h"

namespace quantd::server {
namespace {

constexpr int kMaxCandidates = 64;
constexpr size_t kMaxLabelBytes = 1024;
constexpr char kInputsField[] = "header.inputs";
// Most memory that counting a distribution takes.
constexpr int64_t kDistributionBytes = int64_t{5} << 18;
// Memory of a scale of a spec's encoding: in the encoding, in the summary, and
// in the message.
constexpr int64_t kEncodingCopies = 3;
constexpr int64_t kBytesPerScale = kEncodingCopies * core::kMostMemoryPerScale;

// A spec whose scales follow from their own blocks: they are found as elements
// arrive, and those that were measured are let go.
class LocalScales {
 public:
  // The largest bands that are put together, charged.
  static constexpr int64_t kMaxBandBytes = int64_t{64} << 20;

  // True if LocalScales takes the spec.
  static bool Takes(const ResolvedSpec& spec, int64_t element_bytes) {
    return core::ValidateSpec(spec.spec).ok() &&
           core::BlockQuantizer::Takes(spec.spec, *spec.layout,
                                       !spec.outer_maximum.empty()) &&
           BandBytes(spec, element_bytes) <= kMaxBandBytes;
  }
  // Most bytes of the tensor that it holds, except for a few KiB.
  static int64_t HeldBytes(const ResolvedSpec& spec, int64_t element_bytes) {
    const int64_t band_bytes = BandBytes(spec, element_bytes);
    return band_bytes <= kSmallBytes ? 0 : 2 * band_bytes;
  }

  // `spec` outlives it. Errors: those of BlockQuantizer::Create.
  static absl::StatusOr<std::unique_ptr<LocalScales>> Create(
      const ResolvedSpec& spec, core::ElementType type) {
    absl::StatusOr<std::unique_ptr<core::BlockQuantizer>> quantizer =
        core::BlockQuantizer::Create(spec.spec, *spec.layout, type,
                                     core::NanPolicy::kDefault,
                                     spec.outer_maximum, ImportanceOf(spec));
    if (!quantizer.ok()) return quantizer.status();
    absl::StatusOr<core::BlockLayout> outer_layout =
        OuterLayoutOf((*quantizer)->encoding(), *spec.layout);
    if (!outer_layout.ok()) return outer_layout.status();
    core::ScaleWindow window(
        (*quantizer)->encoding(), *spec.layout, *std::move(outer_layout),
        (*quantizer)->has_zero_points(), 0, spec.layout->element_count());
    return std::unique_ptr<LocalScales>(new LocalScales(
        *std::move(quantizer), std::move(window), core::ElementSizeBytes(type),
        spec.layout->element_count()));
  }

  // Memory that the searching threads need. `spec`  that of Create.
  int64_t SearchBytes(const RpcEnvironment& env,
                      const ResolvedSpec& spec) const {
    // Elements of a quantum and of what was left of those before it.
    return LocalSearchBytes(
        env, spec,
        std::max(SearchQuantumElements(spec), core::Evaluator::kLeafElements) +
            quantizer_->granule());
  }

  const core::ScaleWindow& window() const { return window_; }
  bool has_zero_points() const { return quantizer_->has_zero_points(); }

  // Finds the scales of the next elements, as far as bands are complete, and
  // has what is complete measured.
  // Errors: those of BlockQuantizer::Add.
  absl::Status Update(absl::Span<const uint8_t> data,
                      core::Evaluator* evaluator, core::ThreadPool* pool,
                      core::StopToken stop) {
    absl::Span<const uint8_t> all = data;
    if (!held_.empty()) {
      held_.insert(held_.end(), data.begin(), data.end());
      all = held_;
    }
    const int64_t end =
        measured_end_ + static_cast<int64_t>(all.size()) / element_bytes_;
    const auto at = [&](int64_t element) {
      return all.data() + (element - measured_end_) * element_bytes_;
    };
    const auto whole = [&](int64_t element, int64_t unit) {
      return element == element_count_ ? element : element - element % unit;
    };
    const int64_t found_end = whole(end, quantizer_->granule());
    if (found_end > found_end_) {
      absl::Status status =
          quantizer_->Add(found_end_, found_end - found_end_, at(found_end_),
                          nullptr, pool, stop);
      if (!status.ok()) return status;
      window_.Append(quantizer_->encoding());
      found_end_ = found_end;
    }
    const int64_t measured_end =
        whole(found_end_, core::Evaluator::kLeafElements);
    if (measured_end > measured_end_) {
      evaluator->Update(measured_end_, measured_end - measured_end_,
                        at(measured_end_), pool);
      window_.Drop(measured_end, std::numeric_limits<int64_t>::max());
    }
    const int64_t done_bytes = (measured_end - measured_end_) * element_bytes_;
    if (!held_.empty()) {
      held_.erase(held_.begin(), held_.begin() + done_bytes);
    } else {
      held_.assign(data.begin() + done_bytes, data.end());
    }
    measured_end_ = measured_end;
    return absl::OkStatus();
  }

 private:
  static int64_t BandBytes(const ResolvedSpec& spec, int64_t element_bytes) {
    return spec.layout->band_size() * element_bytes;
  }

  LocalScales(std::unique_ptr<core::BlockQuantizer> quantizer,
              core::ScaleWindow window, int64_t element_bytes,
              int64_t element_count)
      : quantizer_(std::move(quantizer)),
        window_(std::move(window)),
        element_bytes_(element_bytes),
        element_count_(element_count) {}

  const std::unique_ptr<core::BlockQuantizer> quantizer_;
  core::ScaleWindow window_;
  const int64_t element_bytes_;
  const int64_t element_count_;
  // Elements before which scales are found, and all is measured.
  int64_t found_end_ = 0;
  int64_t measured_end_ = 0;
  // Elements from measured_end_ on.
  std::vector<uint8_t> held_;
};

// A candidate: an encoding from the start, or a spec until the tensor is
// complete, or a spec with the scales that were found by now.
struct Candidate {
  std::string label;
  // Source of a reference or an encoding.
  absl::optional<EncodingSource> source;
  // The spec, for a candidate that is one.
  absl::optional<ResolvedSpec> spec;
  // Scales of a spec that needs no held tensor.
  std::shared_ptr<LocalScales> local;
  // Statistics that the spec is calibrated on; candidates share those that they
  // can.
  TensorAccumulator* accumulator = nullptr;
  // Field that names the data that is read for it:
  // "header.candidates[3].reference".
  std::string field;
  ResolvedEncoding resolved;
  // Mantissa bits of the histograms that the encoding of a spec comes from; 0
  // for none.
  int mantissa_bits = 0;
  std::unique_ptr<core::Evaluator> evaluator;

  // It is a spec that needs the whole tensor first.
  bool is_held() const { return spec.has_value() && local == nullptr; }
};

// The part of a task that both kinds of a job need.
struct EvaluateTask {
  v1::TensorName name;
  TensorDescription description;
  bool per_scale_index = false;
  bool with_distribution = false;
  bool omit_encodings = false;
  MetricSet metrics;

  int64_t element_bytes() const {
    return core::ElementSizeBytes(description.element_type);
  }
};

// Errors are at the fields of a candidate, `field` is its own.
absl::StatusOr<Candidate> CheckCandidate(const RpcEnvironment& env,
                                         const Caller& caller,
                                         const v1::EvaluateCandidate& proto,
                                         absl::string_view field,
                                         const EvaluateTask& task) {
  Candidate candidate;
  if (proto.label().size() > kMaxLabelBytes) {
    return core::WithField(core::CandidatesInvalidError(absl::StrCat(
                               "a label of ", proto.label().size(),
                               " bytes, expected at most ", kMaxLabelBytes)),
                           "label");
  }
  candidate.label = proto.label();
  absl::StatusOr<EncodingSource> source;
  absl::string_view source_field;
  switch (proto.encoding_source_case()) {
    case v1::EvaluateCandidate::kReference:
      source_field = "reference";
      source = EncodingSource::Open(caller, proto.reference(), task.name);
      break;
    case v1::EvaluateCandidate::kEncoding:
      source_field = "encoding";
      source = EncodingSource::Open(env, proto.encoding());
      break;
    case v1::EvaluateCandidate::kSpec: {
      absl::StatusOr<ResolvedSpec> spec =
          ResolveElementSpec(env, caller, task.name, proto.spec(),
                             proto.outer_maximum(), task.description,
                             task.omit_encodings ? ScaleTransport::kChunks
                                                 : ScaleTransport::kOneMessage);
      if (!spec.ok()) {
        const bool at_maxima =
            core::ErrorReason(spec.status()) == "OUTER_MAXIMUM";
        return core::WithField(spec.status(),
                               at_maxima ? "outer_maximum" : "spec");
      }
      candidate.spec = *std::move(spec);
      candidate.field = absl::StrCat(field, ".spec.importance");
      return candidate;
    }
    case v1::EvaluateCandidate::ENCODING_SOURCE_NOT_SET:
      return core::EncodingMissingError();
  }
  if (!source.ok()) return core::WithField(source.status(), source_field);
  candidate.source = *std::move(source);
  candidate.field = absl::StrCat(field, ".", source_field);
  return candidate;
}

class EvaluateJob final : public TensorJob {
 public:
  // The statistics of the tensor are those of the first of `accumulators`.
  EvaluateJob(const RpcEnvironment& env, EvaluateTask task,
              std::vector<std::unique_ptr<TensorAccumulator>> accumulators,
              std::vector<Candidate> candidates,
              std::unique_ptr<OutputMeter> meter, MemoryBudget::Lease lease)
      : env_(env),
        task_(std::move(task)),
        accumulators_(std::move(accumulators)),
        candidates_(std::move(candidates)),
        meter_(std::move(meter)),
        lease_(std::move(lease)) {
    const int64_t element_bytes = task_.element_bytes();
    frame_.end_bytes = task_.description.element_count * element_bytes;
    frame_.unit_bytes = element_bytes;
    frame_.granule_bytes = core::Evaluator::kLeafElements * element_bytes;
    frame_.quantum_bytes = TensorBuffer::kBlockBytes;
    int64_t held_elements = 0;
    for (const Candidate& candidate : candidates_) {
      feed_only_searches_ &= candidate.local != nullptr;
      if (candidate.local != nullptr) {
        feed_search_time_ += ElementSearchTime(*candidate.spec);
      }
      if (candidate.local != nullptr &&
          core::NeedsHistograms(candidate.spec->spec)) {
        const int64_t leaves =
            std::max<int64_t>(1, SearchQuantumElements(*candidate.spec) /
                                     core::Evaluator::kLeafElements);
        frame_.quantum_bytes =
            std::min(frame_.quantum_bytes, leaves * frame_.granule_bytes);
      }
      if (!candidate.is_held()) continue;
      const int64_t scale_count = candidate.spec->layout->scale_count();
      search_time_ += ElementSearchTime(*candidate.spec);
      // And evaluated.
      held_elements += task_.description.element_count;
      finish_is_long_ |= TakesLong(candidate.spec->spec, scale_count,
                                   task_.description.element_count);
      if (buffer_ == nullptr) {
        buffer_ = std::make_unique<TensorBuffer>(env_, frame_.end_bytes,
                                                 LeasedBytes());
      }
    }
    constexpr int64_t kFewElements = int64_t{1} << 18;
    finish_is_long_ |=
        search_time_ > kShortWork || held_elements > kFewElements;
    if (meter_ == nullptr) return;
    search_time_ += meter_->Time(static_cast<int64_t>(candidates_.size()));
    finish_is_long_ = true;
    if (buffer_ == nullptr) {
      buffer_ =
          std::make_unique<TensorBuffer>(env_, frame_.end_bytes, LeasedBytes());
    }
  }

  StoreUse ResolveUse() const override {
    if (meter_ != nullptr) return StoreUse::kReadStatistics;
    StoreUse use = StoreUse::kNone;
    for (const Candidate& candidate : candidates_) {
      if (candidate.spec.has_value() &&
          ImportanceUse(*candidate.spec) != StoreUse::kNone) {
        return StoreUse::kReadStatistics;
      }
      if (candidate.source.has_value() && candidate.source->waits()) {
        use = StoreUse::kRead;
      }
    }
    return use;
  }

  absl::Status Resolve(ChunkWriter* out) override {
    int64_t metrics_count = 0;
    for (Candidate& candidate : candidates_) {
      if (candidate.spec.has_value()) {
        absl::Status status =
            ReadImportance(env_, *candidate.spec, candidate.field, stop());
        if (!status.ok()) return status;
        metrics_count += candidate.spec->layout->scale_count();
        if (!candidate.is_held()) StartLocal(candidate);
        continue;
      }
      absl::StatusOr<ResolvedEncoding> resolved = candidate.source->Resolve(
          env_, task_.description, ScaleTransport::kChunks);
      if (!resolved.ok()) {
        return core::WithField(resolved.status(), candidate.field);
      }
      candidate.resolved = *std::move(resolved);
      absl::Status status =
          OpenIncoming(env_, 0, task_.description.element_count,
                       /*keep_all=*/meter_ != nullptr, &candidate.resolved);
      if (!status.ok()) return core::WithField(status, candidate.field);
      metrics_count += candidate.resolved.layout->scale_count();
    }
    if (task_.per_scale_index && metrics_count > env_.limits.metrics_count) {
      return core::WithField(
          core::ScaleCountLimitError(env_.limits.metrics_count, metrics_count),
          "header.per_scale_index");
    }
    constexpr int64_t kFewMetrics = int64_t{1} << 14;
    finish_is_long_ |= task_.per_scale_index && metrics_count > kFewMetrics;
    for (Candidate& candidate : candidates_) {
      if (!candidate.is_held()) StartEvaluator(candidate);
    }
    return meter_ == nullptr ? absl::OkStatus()
                             : core::WithField(meter_->Find(), kInputsField);
  }

  absl::Status PushScales(absl::Span<const std::string> scales) override {
    for (; pushed_scales_ < scales.size(); ++pushed_scales_) {
      v1::CandidateScales chunk;
      if (!chunk.ParseFromString(scales[pushed_scales_])) {
        return core::MessageMalformedError(
            "scales are not protobuf, expected CandidateScales");
      }
      if (chunk.candidate() >= candidates_.size() ||
          candidates_[chunk.candidate()].resolved.incoming == nullptr) {
        return core::WithField(
            core::ScaleShapeError(absl::StrCat(
                "scales of candidate ", chunk.candidate(),
                " came, expected those of one that has an encoding with "
                "scales_in_chunks")),
            "candidate");
      }
      absl::Status status =
          candidates_[chunk.candidate()].resolved.incoming->Push(
              chunk.scales());
      if (!status.ok()) return core::WithField(status, "scales");
    }
    pushed_scales_ = 0;
    return absl::OkStatus();
  }

  absl::Status Reserve(int64_t bytes) override {
    // The first bytes wait for all memory that will be needed, so that nothing
    // is sent in vain.
    if (meter_ != nullptr) {
      if (absl::Status s = meter_->Reserve(); !s.ok()) return s;
    }
    for (const std::unique_ptr<TensorAccumulator>& accumulator :
         accumulators_) {
      if (absl::Status s = accumulator->Reserve(); !s.ok()) return s;
    }
    return buffer_ != nullptr ? buffer_->Reserve(bytes) : absl::OkStatus();
  }

  absl::Status Feed(int64_t offset_bytes,
                    absl::Span<const uint8_t> data) override {
    for (const std::unique_ptr<TensorAccumulator>& accumulator :
         accumulators_) {
      accumulator->Update(offset_bytes, data);
    }
    for (Candidate& candidate : candidates_) {
      if (candidate.is_held()) continue;
      if (candidate.local != nullptr) {
        absl::Status status = candidate.local->Update(
            data, candidate.evaluator.get(), env_.pool, stop());
        if (!status.ok()) return status;
        continue;
      }
      if (candidate.resolved.incoming != nullptr) {
        absl::Status status = candidate.resolved.incoming->Advance(
            offset_bytes / task_.element_bytes(),
            static_cast<int64_t>(data.size()) / task_.element_bytes(),
            std::numeric_limits<int64_t>::max());
        if (!status.ok()) return status;
      }
      Evaluate(candidate, offset_bytes, data, env_.pool);
    }
    if (buffer_ != nullptr) buffer_->Append(data);
    return absl::OkStatus();
  }

  StoreUse FinishUse() const override {
    return meter_ != nullptr && !meter_->has_read() ? StoreUse::kReadStatistics
                                                    : StoreUse::kNone;
  }
  bool FinishIsLong() const override {
    return finish_is_long_ && FinishUse() == StoreUse::kNone;
  }

  absl::StatusOr<bool> Finish(ChunkWriter* out) override {
    if (FinishUse() == StoreUse::kReadStatistics) {
      absl::Status status = meter_->Read(stop());
      if (!status.ok()) return core::WithField(status, kInputsField);
      return false;
    }
    for (Candidate& candidate : candidates_) {
      if (!candidate.is_held()) continue;
      if (absl::Status s = CalibrateCandidate(&candidate); !s.ok()) return s;
    }
    if (buffer_ != nullptr) {
      if (absl::Status s = EvaluateBuffer(); !s.ok()) return s;
    }
    std::vector<double> output_noise;
    if (meter_ != nullptr) {
      std::vector<const ResolvedEncoding*> encodings;
      for (const Candidate& candidate : candidates_) {
        encodings.push_back(&candidate.resolved);
      }
      absl::StatusOr<std::vector<double>> measured =
          meter_->Measure(*buffer_, encodings, stop());
      if (!measured.ok()) return measured.status();
      output_noise = *std::move(measured);
    }
    v1::EvaluateSummary summary;
    *summary.mutable_name() = task_.name;
    task_.metrics.ListIn(&summary);
    StatisticsToProto(accumulators_[0]->statistics(),
                      summary.mutable_statistics());
    for (const Candidate& candidate : candidates_) {
      if (stop().stopped()) return core::StoppedError();
      v1::CandidateMetrics* const metrics = summary.add_candidates();
      AddMetrics(candidate, metrics);
      if (meter_ == nullptr) continue;
      v1::OutputNoise* const noise = metrics->mutable_output_noise();
      noise->set_noise_to_signal(output_noise[summary.candidates_size() - 1]);
      noise->set_source(v1::OUTPUT_NOISE_SOURCE_GRAM);
      noise->set_clipped_input_count(
          static_cast<uint64_t>(meter_->clipped_input_count()));
    }
    out->SetSummary(summary);
    return true;
  }

 private:
  int64_t LeasedBytes() const {
    int64_t bytes = lease_.bytes();
    for (const auto& accumulator : accumulators_) {
      bytes += accumulator->leased_bytes();
    }
    return bytes;
  }

  // Begins to find the scales of a spec that needs no held tensor.
  void StartLocal(Candidate& candidate) {
    ResolvedEncoding& resolved = candidate.resolved;
    const core::ScaleWindow& window = candidate.local->window();
    resolved.encoding = std::shared_ptr<const core::Encoding>(
        candidate.local, &window.encoding());
    resolved.layout = std::shared_ptr<const core::BlockLayout>(
        candidate.local, &window.layout());
    resolved.in_chunks = true;
    resolved.chunks_have_zero_points = candidate.local->has_zero_points();
  }

  void StartEvaluator(Candidate& candidate) {
    candidate.evaluator = std::make_unique<core::Evaluator>(
        *candidate.resolved.encoding, *candidate.resolved.layout,
        task_.description.element_type,
        core::EvaluateOptions{task_.per_scale_index, task_.with_distribution,
                              task_.metrics.sums()});
  }

  void Evaluate(Candidate& candidate, int64_t offset_bytes,
                absl::Span<const uint8_t> data, core::ThreadPool* pool) {
    candidate.evaluator->Update(
        offset_bytes / task_.element_bytes(),
        static_cast<int64_t>(data.size()) / task_.element_bytes(), data.data(),
        pool);
  }

  // Helps with the end.
  core::ThreadPool* finish_pool() const {
    return finish_is_long_ ? env_.helper_pool : nullptr;
  }

  absl::Status CalibrateCandidate(Candidate* candidate) {
    const core::HeldTensor held =
        buffer_->Held(*candidate->spec->layout, task_.description.element_type);
    absl::StatusOr<CalibratedEncoding> calibrated = CalibrateTensor(
        env_, *candidate->spec, candidate->accumulator->statistics(), {},
        finish_pool(), stop(), &held);
    if (!calibrated.ok()) return calibrated.status();
    candidate->resolved = std::move(calibrated->resolved);
    candidate->mantissa_bits = calibrated->mantissa_bits;
    StartEvaluator(*candidate);
    return absl::OkStatus();
  }

  // Evaluates the held tensor, for the candidates that waited for it.
  absl::Status EvaluateBuffer() {
    for (int64_t block = 0; block < buffer_->block_count(); ++block) {
      for (Candidate& candidate : candidates_) {
        if (!candidate.is_held()) continue;
        if (stop().stopped()) return core::StoppedError();
        Evaluate(candidate, block * TensorBuffer::kBlockBytes,
                 buffer_->block(block), finish_pool());
      }
    }
    return absl::OkStatus();
  }

  void AddMetrics(const Candidate& candidate,
                  v1::CandidateMetrics* metrics) const {
    metrics->set_label(candidate.label);
    metrics->set_etag(candidate.resolved.etag);
    MetricsToProto(candidate.evaluator->overall(), task_.metrics,
                   metrics->mutable_overall());
    if (task_.with_distribution) {
      DistributionToProto(candidate.evaluator->distribution(),
                          metrics->mutable_overall());
    }
    for (const core::ErrorSums& sums : candidate.evaluator->per_scale_index()) {
      MetricsToProto(sums, task_.metrics, metrics->add_per_scale_index());
    }
    metrics->set_mantissa_bits(static_cast<uint32_t>(candidate.mantissa_bits));
    metrics->set_size_bytes(SizeBytes(candidate.resolved));
    if (candidate.spec.has_value() && !task_.omit_encodings) {
      EncodingToProto(*candidate.resolved.encoding,
                      metrics->mutable_encoding());
    }
    env_.metrics->Elements(
        Rpc::kEvaluate, core::FindFormat(candidate.resolved.encoding->format),
        accumulators_[0]->statistics().counts().total);
  }

  // Size of the codes and scales.
  int64_t SizeBytes(const ResolvedEncoding& resolved) const {
    const core::Encoding& encoding = *resolved.encoding;
    const int64_t scale_count = resolved.layout->scale_count();
    const int64_t outer_count = core::HasOuterScales(encoding.scale_type)
                                    ? OuterScaleCount(resolved)
                                    : 0;
    const core::FormatInfo& format = *core::FindFormat(encoding.format);
    const bool has_zero_points = resolved.in_chunks
                                     ? resolved.chunks_have_zero_points
                                     : core::HasZeroPoints(encoding);
    return format.SizeBytes(task_.description.element_count) +
           scale_count * core::ScaleSizeBytes(encoding.scale_type) +
           outer_count * static_cast<int64_t>(sizeof(float)) +
           (has_zero_points ? core::ZeroPointsSizeBytes(encoding, scale_count)
                            : 0);
  }

  static int64_t OuterScaleCount(const ResolvedEncoding& resolved) {
    const absl::StatusOr<core::BlockLayout> layout =
        OuterLayoutOf(*resolved.encoding, *resolved.layout);
    // An encoding that is measured has one.
    return layout.ok() ? layout->scale_count() : 0;
  }

  const RpcEnvironment& env_;
  const EvaluateTask task_;
  const std::vector<std::unique_ptr<TensorAccumulator>> accumulators_;
  std::vector<Candidate> candidates_;
  // Null without inputs.
  const std::unique_ptr<OutputMeter> meter_;
  const MemoryBudget::Lease lease_;
  // Only when a candidate is a spec, or with inputs.
  std::unique_ptr<TensorBuffer> buffer_;
  // Number of scale chunks of a message that were pushed, while the others wait
  // for memory.
  size_t pushed_scales_ = 0;
  // To calibrate and evaluate what is held, or to write the answer, may take
  // more than kShortWork.
  bool finish_is_long_ = false;
};

// Two tensors against each other, their elements in pairs.
class CompareJob final : public TensorJob {
 public:
  CompareJob(const RpcEnvironment& env, EvaluateTask task,
             MemoryBudget::Lease lease)
      : env_(env),
        task_(std::move(task)),
        lease_(std::move(lease)),
        comparison_(task_.description.element_type, task_.with_distribution,
                    task_.metrics.sums()) {
    const int64_t element_bytes = task_.element_bytes();
    frame_.end_bytes = task_.description.element_count * 2 * element_bytes;
    frame_.unit_bytes = element_bytes;
    frame_.granule_bytes = core::Evaluator::kLeafElements * 2 * element_bytes;
    frame_.quantum_bytes = TensorBuffer::kBlockBytes;
  }

  absl::Status Feed(int64_t offset_bytes,
                    absl::Span<const uint8_t> data) override {
    const int64_t pair_bytes = 2 * task_.element_bytes();
    comparison_.Update(offset_bytes / pair_bytes,
                       static_cast<int64_t>(data.size()) / pair_bytes,
                       data.data(), env_.pool);
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Finish(ChunkWriter* out) override {
    v1::EvaluateSummary summary;
    *summary.mutable_name() = task_.name;
    task_.metrics.ListIn(&summary);
    StatisticsToProto(comparison_.reference(), summary.mutable_statistics());
    MetricsToProto(comparison_.overall(), task_.metrics,
                   summary.mutable_comparison());
    if (task_.with_distribution) {
      DistributionToProto(comparison_.distribution(),
                          summary.mutable_comparison());
    }
    out->SetSummary(summary);
    env_.metrics->Elements(Rpc::kEvaluate, nullptr,
                           comparison_.reference().counts().total);
    return true;
  }

 private:
  const RpcEnvironment& env_;
  const EvaluateTask task_;
  const MemoryBudget::Lease lease_;
  core::Comparison comparison_;
};

class EvaluateRpc final : public TensorRpc {
 public:
  explicit EvaluateRpc(const RpcEnvironment& env) : env_(env) {}

  Rpc id() const override { return Rpc::kEvaluate; }

  absl::StatusOr<std::unique_ptr<TensorJob>> Check(
      const std::string& bytes, const Caller& caller) override {
    absl::StatusOr<ParsedHeader<v1::EvaluateHeader>> parsed =
        ParseHeader<v1::EvaluateHeader>(env_, bytes);
    if (!parsed.ok()) return parsed.status();
    const v1::EvaluateHeader& header = parsed->header;
    absl::StatusOr<TensorDescription> description =
        CheckDescription(env_, header.tensor());
    if (!description.ok()) return description.status();
    absl::StatusOr<MetricSet> metrics = MetricSet::Of(header);
    if (!metrics.ok()) return core::WithField(metrics.status(), "header");
    EvaluateTask task;
    task.metrics = *metrics;
    task.name = header.tensor().name();
    task.description = *std::move(description);
    task.per_scale_index = header.per_scale_index();
    task.with_distribution = header.with_distribution();
    task.omit_encodings = header.omit_encodings();
    return header.comparison()
               ? OpenComparison(header, std::move(task))
               : OpenCandidates(caller, header, std::move(task));
  }

 private:
  // Leases the memory of `candidate_count` candidates: their specs have
  // `scale_count` scales and their labels `label_bytes` in all, and they take
  // `search_bytes` one at a time.
  absl::StatusOr<MemoryBudget::Lease> Charge(const EvaluateTask& task,
                                             int64_t candidate_count,
                                             int64_t scale_count,
                                             int64_t label_bytes,
                                             int64_t search_bytes) {
    int64_t bytes = scale_count * kBytesPerScale + search_bytes;
    if (label_bytes > kSmallBytes) bytes += label_bytes;
    if (task.with_distribution) bytes += candidate_count * kDistributionBytes;
    return env_.budget->Acquire(bytes,
                                "send fewer candidates with each tensor");
  }

  absl::StatusOr<std::unique_ptr<TensorJob>> OpenComparison(
      const v1::EvaluateHeader& header, EvaluateTask task) {
    if (!header.candidates().empty()) {
      return core::WithField(
          core::CandidatesInvalidError(
              absl::StrCat(header.candidates_size(),
                           " candidates with a comparison, expected none")),
          "header.candidates");
    }
    const int64_t size_bytes =
        task.description.element_count * 2 * task.element_bytes();
    if (size_bytes > env_.limits.tensor_bytes) {
      return core::WithField(
          core::TensorTooLargeError(size_bytes, env_.limits.tensor_bytes),
          "header.tensor.shape");
    }
    if (header.has_inputs()) {
      return core::WithField(
          core::CandidatesInvalidError(
              "inputs with a comparison, expected candidates"),
          kInputsField);
    }
    absl::StatusOr<MemoryBudget::Lease> lease = Charge(task, 1, 0, 0, 0);
    if (!lease.ok()) return lease.status();
    return std::make_unique<CompareJob>(env_, std::move(task),
                                        *std::move(lease));
  }

  absl::StatusOr<std::unique_ptr<TensorJob>> OpenCandidates(
      const Caller& caller, const v1::EvaluateHeader& header,
      EvaluateTask task) {
    if (header.candidates().empty() ||
        header.candidates_size() > kMaxCandidates) {
      return core::WithField(
          core::CandidatesInvalidError(
              absl::StrCat(header.candidates_size(),
                           " candidates, expected 1 to ", kMaxCandidates)),
          "header.candidates");
    }
    std::unique_ptr<OutputMeter> meter;
    if (header.has_inputs()) {
      if (absl::Status s = CheckWholeRows(task.description); !s.ok()) {
        return core::WithField(s, "header.tensor.global_shape");
      }
      absl::StatusOr<std::unique_ptr<OutputMeter>> created =
          OutputMeter::Create(env_, caller, header.inputs(), task.name,
                              task.description);
      if (!created.ok()) {
        return core::WithField(created.status(), kInputsField);
      }
      meter = *std::move(created);
    }
    std::vector<Candidate> candidates;
    int64_t scale_count = 0;
    int64_t label_bytes = 0;
    // They are calibrated one after the other.
    int64_t search_bytes = 0;
    // True for candidates whose scales are found as elements arrive: they hold
    // bands.
    std::vector<bool> is_local;
    int64_t local_bytes = 0;
    for (const v1::EvaluateCandidate& proto : header.candidates()) {
      const std::string field =
          absl::StrCat("header.candidates[", candidates.size(), "]");
      absl::StatusOr<Candidate> candidate =
          CheckCandidate(env_, caller, proto, field, task);
      if (!candidate.ok()) return core::WithField(candidate.status(), field);
      if (candidate->spec.has_value()) {
        const ResolvedSpec& spec = *candidate->spec;
        if (task.omit_encodings && !task.per_scale_index &&
            !header.has_inputs() &&
            LocalScales::Takes(spec, task.element_bytes())) {
          is_local.push_back(true);
          local_bytes += LocalScales::HeldBytes(spec, task.element_bytes());
        } else {
          is_local.push_back(false);
          scale_count += spec.layout->scale_count();
          search_bytes = std::max(search_bytes, SearchBytes(env_, spec));
        }
      } else {
        is_local.push_back(false);
      }
      label_bytes += static_cast<int64_t>(candidate->label.size());
      candidates.push_back(*std::move(candidate));
    }
    // They stay where they are from now on, as what is local needs.
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (!is_local[i]) continue;
      absl::StatusOr<std::unique_ptr<LocalScales>> local = LocalScales::Create(
          *candidates[i].spec, task.description.element_type);
      if (!local.ok()) {
        return core::WithField(local.status(),
                               absl::StrCat("header.candidates[", i, "]"));
      }
      candidates[i].local = *std::move(local);
      search_bytes = std::max(search_bytes, candidates[i].local->SearchBytes(
                                                env_, *candidates[i].spec));
    }
    absl::StatusOr<std::vector<std::unique_ptr<TensorAccumulator>>>
        accumulators = OpenAccumulators(task, absl::MakeSpan(candidates));
    if (!accumulators.ok()) return accumulators.status();
    absl::StatusOr<MemoryBudget::Lease> lease =
        Charge(task, header.candidates_size(), scale_count, label_bytes,
               search_bytes + local_bytes);
    if (!lease.ok()) return lease.status();
    return std::make_unique<EvaluateJob>(
        env_, std::move(task), *std::move(accumulators), std::move(candidates),
        std::move(meter), *std::move(lease));
  }

  // One for each block size of the specs, and each number of mantissa bits
  // where they need histograms as the tensor arrives; at least one, for the
  // statistics of the tensor.
  absl::StatusOr<std::vector<std::unique_ptr<TensorAccumulator>>>
  OpenAccumulators(const EvaluateTask& task, absl::Span<Candidate> candidates) {
    struct Group {
      const ResolvedSpec* spec;
      int mantissa_bits;
      std::vector<Candidate*> members;
    };
    std::vector<Group> groups;
    for (Candidate& candidate : candidates) {
      if (!candidate.is_held()) continue;
      const int mantissa_bits = MantissaBitsWhereHeld(*candidate.spec);
      const auto same = [&](const Group& group) {
        return group.spec->spec.block_size == candidate.spec->spec.block_size &&
               (group.mantissa_bits == 0 || mantissa_bits == 0 ||
                group.mantissa_bits == mantissa_bits);
      };
      auto group = absl::c_find_if(groups, same);
      if (group == groups.end()) {
        groups.push_back({&*candidate.spec, 0, {}});
        group = groups.end() - 1;
      }
      if (mantissa_bits != 0) group->mantissa_bits = mantissa_bits;
      group->members.push_back(&candidate);
    }
    std::vector<std::unique_ptr<TensorAccumulator>> accumulators;
    const auto add = [&](std::shared_ptr<const core::BlockLayout> layout,
                         int mantissa_bits) -> absl::Status {
      absl::StatusOr<std::unique_ptr<TensorAccumulator>> accumulator =
          TensorAccumulator::Create(env_, task.description.element_type,
                                    std::move(layout), mantissa_bits);
      if (!accumulator.ok()) return accumulator.status();
      accumulators.push_back(*std::move(accumulator));
      return absl::OkStatus();
    };
    for (const Group& group : groups) {
      absl::Status status = add(group.spec->layout, group.mantissa_bits);
      if (!status.ok()) return status;
      for (Candidate* member : group.members) {
        member->accumulator = accumulators.back().get();
      }
    }
    if (accumulators.empty()) {
      absl::StatusOr<core::BlockLayout> layout =
          CheckedLayout(task.description.shape, {});
      if (!layout.ok()) return layout.status();
      absl::Status status =
          add(std::make_shared<const core::BlockLayout>(*std::move(layout)),
              TensorAccumulator::kNoHistograms);
      if (!status.ok()) return status;
    }
    return accumulators;
  }

  const RpcEnvironment& env_;
};

}  // namespace

std::unique_ptr<TensorRpc> MakeEvaluateRpc(const RpcEnvironment& env) {
  return std::make_unique<EvaluateRpc>(env);
}

}  // namespace quantd::server
