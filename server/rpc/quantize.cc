// Quantize: bytes > encoding > codes, as they arrive or, with a spec, when the
// tensor is complete.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/block_quantizer.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/encoding_spec.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/quantize.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/encoding_memory.h"
#include "core/types/scale_bytes.h"
#include "core/types/scale_window.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/buffered_quantize.h"
#include "server/rpc/caller.h"
#include "server/rpc/code_geometry.h"
#include "server/rpc/code_producer.h"
#include "server/rpc/compensated_quantize.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/held_quantize.h"
#include "server/rpc/scale_stream.h"
#include "server/rpc/stream_rpcs.h"
#include "server/rpc/tensor_accumulator.h"
#include "server/rpc/tensor_buffer.h"
#include "server/rpc/tensor_calibration.h"
#include "server/rpc/tensor_header.h"
#include "server/rpc/tensor_job.h"
#include "server/shared_memory/region.h"
#include "server/shared_memory/region_registry.h"
#include "server/shared_memory/shared_blocks.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

// With an encoding that is known: codes go down while reals come up.
class StreamingQuantizeJob final : public TensorJob {
 public:
  // `range` of the reals will come; null for all of them.
  StreamingQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                       EncodingSource source, absl::string_view source_field,
                       absl::optional<v1::ByteRange> range)
      : env_(env),
        task_(std::move(task)),
        source_(std::move(source)),
        source_field_(source_field),
        range_(std::move(range)) {}

  StoreUse ResolveUse() const override {
    if (task_.store_key.has_value()) return StoreUse::kWrite;
    return source_.waits() ? StoreUse::kRead : StoreUse::kNone;
  }
  // A tensor must not be turned away after its encoding was stored.
  bool light() const override {
    return !task_.store_key.has_value() &&
           ((task_.omit_encoding && !task_.scales_in_chunks) ||
            !source_.is_large());
  }

  absl::Status Resolve(ChunkWriter* out) override {
    absl::StatusOr<ResolvedEncoding> resolved =
        source_.Resolve(env_, task_.description, task_.transport());
    if (!resolved.ok()) {
      return core::WithField(resolved.status(), source_field_);
    }
    const CodeGeometry geometry = QuantizeGeometry(
        task_.description, *core::FindFormat(resolved->encoding->format));
    absl::StatusOr<v1::ByteRange> range =
        CheckRange(range_.has_value() ? &*range_ : nullptr,
                   geometry.reals_size_bytes(), geometry.granule_real_bytes());
    if (!range.ok()) return core::WithField(range.status(), "header.range");
    absl::Status status = CheckOutput(
        task_.output, geometry.CodesOffsetOfReal(range->end_bytes()) -
                          geometry.CodesOffsetOfReal(range->begin_bytes()));
    if (!status.ok()) return status;
    status = OpenIncoming(env_, range->begin_bytes() / geometry.real_bytes,
                          range->end_bytes() / geometry.real_bytes,
                          /*keep_all=*/task_.store_key.has_value(), &*resolved);
    if (!status.ok()) return core::WithField(status, source_field_);
    incoming_ = resolved->incoming;
    if (task_.store_key.has_value() && incoming_ == nullptr) {
      absl::StatusOr<StoredEncoding> stored =
          task_.store->Put(*task_.store_key, resolved->encoding, task_.put);
      if (!stored.ok()) return stored.status();
      resolved->etag = stored->etag;
    }
    frame_.begin_bytes = range->begin_bytes();
    frame_.end_bytes = range->end_bytes();
    frame_.unit_bytes = geometry.real_bytes;
    frame_.granule_bytes = geometry.granule_real_bytes();
    frame_.quantum_bytes = QuantumRealBytes(env_, task_, geometry);
    producer_.emplace(env_, task_, *std::move(resolved), *range);
    producer_->WriteHeader(out);
    return absl::OkStatus();
  }

  absl::Status PushScales(absl::Span<const std::string> scales) override {
    if (incoming_ == nullptr) return TensorJob::PushScales(scales);
    return incoming_->Push(scales);
  }

  void BeginQuantum(int64_t offset_bytes, int64_t bytes,
                    ChunkWriter* out) override {
    producer_->Begin(offset_bytes, bytes, out);
  }

  absl::Status Feed(int64_t offset_bytes,
                    absl::Span<const uint8_t> data) override {
    absl::Status status =
        producer_->Advance(offset_bytes, static_cast<int64_t>(data.size()));
    if (!status.ok()) return status;
    return producer_->Quantize(offset_bytes, data, producer_->counts(),
                               env_.pool);
  }

  absl::Status FeedShared(int64_t offset_bytes,
                          const std::shared_ptr<const Region>& region,
                          absl::Span<const uint8_t> shared,
                          core::ThreadPool* pool, PrivateCopy* copy) override {
    if (absl::Status status = CheckApart(task_.output, region, shared);
        !status.ok()) {
      return status;
    }
    absl::Status status =
        producer_->Advance(offset_bytes, static_cast<int64_t>(shared.size()));
    if (!status.ok()) return status;
    return producer_->QuantizeShared(offset_bytes, shared);
  }

  void EndQuantum() override { producer_->End(); }

  // Scales that came in chunks are stored when all are there.
  StoreUse FinishUse() const override {
    return StoresAtTheEnd() ? StoreUse::kWrite : StoreUse::kNone;
  }

  absl::StatusOr<bool> Finish(ChunkWriter* out) override {
    if (StoresAtTheEnd()) {
      absl::StatusOr<std::shared_ptr<const core::Encoding>> whole =
          incoming_->TakeWhole();
      if (!whole.ok()) return whole.status();
      absl::StatusOr<StoredEncoding> stored =
          task_.store->Put(*task_.store_key, *std::move(whole), task_.put);
      if (!stored.ok()) return stored.status();
      etag_ = stored->etag;
      stored_ = true;
      return false;
    }
    producer_->WriteSummary(out, etag_);
    return true;
  }

 private:
  bool StoresAtTheEnd() const {
    return incoming_ != nullptr && task_.store_key.has_value() && !stored_;
  }

  const RpcEnvironment& env_;
  const QuantizeTask task_;
  const EncodingSource source_;
  const absl::string_view source_field_;
  const absl::optional<v1::ByteRange> range_;
  // From Resolve on.
  absl::optional<CodeProducer> producer_;
  // Scales of an encoding whose scales come in chunks.
  std::shared_ptr<IncomingScales> incoming_;
  // It was stored when its scales were there.
  bool stored_ = false;
  std::string etag_;
};

// With any spec.
class CalibratingQuantizeJob final : public HeldQuantizeJob {
 public:
  CalibratingQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                         std::shared_ptr<const ResolvedSpec> resolved,
                         std::unique_ptr<TensorAccumulator> accumulator)
      : HeldQuantizeJob(env, std::move(task), std::move(resolved),
                        std::move(accumulator)),
        takes_long_(TakesLong(spec()->spec, spec()->layout->scale_count(),
                              this->task().description.element_count)) {
    search_time_ = ElementSearchTime(*spec());
  }

 protected:
  bool EncodeIsLong() const override { return takes_long_; }

  absl::StatusOr<ResolvedEncoding> Encode() override {
    return Calibrate(takes_long_ ? env().helper_pool : nullptr);
  }

  bool WillReject() const override {
    const core::ElementCounts& counts = accumulator().statistics().counts();
    return task().nan_policy == core::NanPolicy::kReject &&
           counts.nan + counts.positive_infinity + counts.negative_infinity > 0;
  }

  absl::Status Answer(int64_t offset_bytes, absl::Span<const uint8_t> block,
                      CodeProducer* out) override {
    return out->Quantize(offset_bytes, block, out->counts(), env().pool);
  }

 private:
  const bool takes_long_;
};

// The largest blocks that are put together from chunks without a charge.
constexpr int64_t kMaxGranuleBytes = 64 << 10;
// The largest bands that are put together, charged; a tensor of larger ones is
// held.
constexpr int64_t kMaxBandBytes = int64_t{64} << 20;

// Threads that search the blocks of one quantum, if they have nothing else to
// do: when they have, one does the work of all, and others of the caller wait.
constexpr int kMostSearchThreads = 8;

// Reals of a quantum where scales are found as they come, of at most `bytes`
// and at least a granule.
int64_t LocalQuantumBytes(const RpcEnvironment& env, const ResolvedSpec& spec,
                          int64_t granule_bytes, int64_t real_bytes,
                          int64_t bytes) {
  if (core::NeedsHistograms(spec.spec)) {
    bytes = std::min(
        bytes, SearchQuantumElements(spec) * real_bytes *
                   std::min(env.pool->thread_count(), kMostSearchThreads));
  }
  return std::max<int64_t>(1, bytes / granule_bytes) * granule_bytes;
}

// About how long one worker searches while `bytes` of reals come.
absl::Duration LocalSearchTime(const ResolvedSpec& spec, int64_t real_bytes,
                               int64_t bytes) {
  const int64_t elements = spec.layout->element_count();
  if (elements == 0) return absl::ZeroDuration();
  return ElementSearchTime(spec) * (static_cast<double>(bytes) /
                                    static_cast<double>(elements * real_bytes));
}

// With a spec whose scales follow from their own blocks: reals become codes as
// they come, and those are held, because the scales go before them.
class BlockQuantizeJob final : public BufferedQuantizeJob {
 public:
  // `geometry`  of the codes.
  // `lease`     of what the encoding and searches take.
  BlockQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                   std::shared_ptr<const ResolvedSpec> spec,
                   const CodeGeometry& geometry, int64_t quantum_bytes,
                   std::unique_ptr<core::BlockQuantizer> quantizer,
                   MemoryBudget::Lease lease)
      : BufferedQuantizeJob(env, std::move(task), geometry.codes_size_bytes(),
                            lease.bytes()),
        spec_(std::move(spec)),
        geometry_(geometry),
        lease_(std::move(lease)),
        quantizer_(std::move(quantizer)),
        encoding_(quantizer_->encoding()) {
    frame_.granule_bytes = quantizer_->granule() * geometry_.real_bytes;
    frame_.quantum_bytes = quantum_bytes;
    frame_.joins_quantum = core::NeedsHistograms(spec_->spec);
    feed_search_time_ = LocalSearchTime(*spec_, geometry_.real_bytes,
                                        geometry_.reals_size_bytes());
    core::ReserveScales(spec_->layout->scale_count(),
                        quantizer_->has_zero_points(), &encoding_);
  }

  StoreUse ResolveUse() const override { return ImportanceUse(*spec_); }
  absl::Status Resolve(ChunkWriter* out) override {
    return ReadImportance(env(), *spec_, "header.spec.importance", stop());
  }

  absl::Status Reserve(int64_t bytes) override {
    return buffer().Reserve(geometry_.CodesOffsetOfReal(bytes));
  }

  absl::Status Feed(int64_t offset_bytes,
                    absl::Span<const uint8_t> data) override {
    const int64_t bytes = static_cast<int64_t>(data.size());
    made_.resize(
        static_cast<size_t>(geometry_.CodesOffsetOfReal(offset_bytes + bytes) -
                            geometry_.CodesOffsetOfReal(offset_bytes)));
    absl::Status status = quantizer_->Add(
        offset_bytes / geometry_.real_bytes, bytes / geometry_.real_bytes,
        data.data(), made_.data(), env().pool, stop());
    if (!status.ok()) return status;
    core::AppendScales(quantizer_->encoding(), &encoding_);
    buffer().Append(made_);
    return absl::OkStatus();
  }

 protected:
  absl::StatusOr<ResolvedEncoding> Encode() override {
    encoding_.degenerate_count = quantizer_->degenerate_count();
    return ResolvedEncoding{
        std::make_shared<const core::Encoding>(std::move(encoding_)),
        spec_->layout, ""};
  }

  int64_t RealsOffset(int64_t block) const override {
    return block * (TensorBuffer::kBlockBytes / geometry_.granule_code_bytes) *
           geometry_.granule_real_bytes();
  }

  absl::Status Answer(int64_t offset_bytes, absl::Span<const uint8_t> block,
                      CodeProducer* out) override {
    out->Take(offset_bytes, block);
    out->Take(quantizer_->counts());
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<const ResolvedSpec> spec_;
  const CodeGeometry geometry_;
  const MemoryBudget::Lease lease_;
  const std::unique_ptr<core::BlockQuantizer> quantizer_;
  // Encoding with the scales of all reals that came.
  core::Encoding encoding_;
  // Codes of the latest reals.
  std::vector<uint8_t> made_;
};

// Like BlockQuantizeJob, where the scales go beside the codes, or nowhere: both
// go down while reals come up.
class LocalQuantizeJob final : public TensorJob {
 public:
  // `range`  of the reals, which begins and ends with a granule.
  // `lease`  of what is held: a band, what searches need, and all scales if
  //          they are to be stored.
  LocalQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                   std::shared_ptr<const ResolvedSpec> spec,
                   const CodeGeometry& geometry, const v1::ByteRange& range,
                   int64_t quantum_bytes,
                   std::unique_ptr<core::BlockQuantizer> quantizer,
                   MemoryBudget::Lease lease)
      : env_(env),
        task_(std::move(task)),
        spec_(std::move(spec)),
        geometry_(geometry),
        range_(range),
        lease_(std::move(lease)),
        quantizer_(std::move(quantizer)),
        scales_(quantizer_->encoding()),
        whole_(quantizer_->encoding()) {
    frame_.begin_bytes = range.begin_bytes();
    frame_.end_bytes = range.end_bytes();
    frame_.unit_bytes = geometry_.real_bytes;
    frame_.granule_bytes = quantizer_->granule() * geometry_.real_bytes;
    frame_.quantum_bytes = quantum_bytes;
    frame_.joins_quantum = core::NeedsHistograms(spec_->spec);
    feed_search_time_ = LocalSearchTime(
        *spec_, geometry_.real_bytes, range.end_bytes() - range.begin_bytes());
    if (task_.store_key.has_value()) {
      core::ReserveScales(spec_->layout->scale_count(),
                          quantizer_->has_zero_points(), &whole_);
    }
  }

  StoreUse ResolveUse() const override { return ImportanceUse(*spec_); }
  absl::Status Resolve(ChunkWriter* out) override {
    absl::Status status =
        ReadImportance(env_, *spec_, "header.spec.importance", stop());
    if (!status.ok()) return status;
    ResolvedEncoding resolved;
    // Its scales are not looked at.
    resolved.encoding = std::make_shared<const core::Encoding>(scales_);
    resolved.layout = spec_->layout;
    resolved.in_chunks = true;
    resolved.chunks_have_zero_points = quantizer_->has_zero_points();
    producer_.emplace(env_, task_, std::move(resolved), range_);
    producer_->WriteHeader(out);
    return absl::OkStatus();
  }

  void BeginQuantum(int64_t offset_bytes, int64_t bytes,
                    ChunkWriter* out) override {
    out_ = out;
    begin_bytes_ = offset_bytes;
    end_bytes_ = offset_bytes + bytes;
    first_scale_ = -1;
    made_.resize(
        static_cast<size_t>(geometry_.CodesOffsetOfReal(end_bytes_) -
                            geometry_.CodesOffsetOfReal(begin_bytes_)));
  }

  absl::Status Feed(int64_t offset_bytes,
                    absl::Span<const uint8_t> data) override {
    const int64_t codes_begin = geometry_.CodesOffsetOfReal(offset_bytes) -
                                geometry_.CodesOffsetOfReal(begin_bytes_);
    absl::Status status = quantizer_->Add(
        offset_bytes / geometry_.real_bytes,
        static_cast<int64_t>(data.size()) / geometry_.real_bytes, data.data(),
        made_.data() + codes_begin, env_.pool, stop());
    if (!status.ok()) return status;
    if (first_scale_ < 0) first_scale_ = quantizer_->first_scale();
    core::AppendScales(quantizer_->encoding(), &scales_);
    return absl::OkStatus();
  }

  absl::Status FeedShared(int64_t offset_bytes,
                          const std::shared_ptr<const Region>& region,
                          absl::Span<const uint8_t> shared,
                          core::ThreadPool* pool, PrivateCopy* copy) override {
    if (absl::Status status = CheckApart(task_.output, region, shared);
        !status.ok()) {
      return status;
    }
    return TensorJob::FeedShared(offset_bytes, region, shared, pool, copy);
  }

  void EndQuantum() override {
    producer_->SendScales(
        first_scale_ + static_cast<int64_t>(scales_.scale.size()), scales_,
        first_scale_, out_);
    if (task_.store_key.has_value()) core::AppendScales(scales_, &whole_);
    // A band may have more codes than a message.
    const int64_t piece_bytes =
        std::max<int64_t>(1, env_.limits.response_chunk_bytes /
                                 geometry_.granule_code_bytes) *
        geometry_.granule_real_bytes();
    const absl::Span<const uint8_t> codes = made_;
    for (int64_t begin = begin_bytes_; begin < end_bytes_;
         begin += piece_bytes) {
      const int64_t bytes = std::min(piece_bytes, end_bytes_ - begin);
      producer_->Begin(begin, bytes, out_);
      const int64_t codes_begin = geometry_.CodesOffsetOfReal(begin) -
                                  geometry_.CodesOffsetOfReal(begin_bytes_);
      producer_->Take(begin,
                      codes.subspan(codes_begin,
                                    geometry_.CodesOffsetOfReal(begin + bytes) -
                                        geometry_.CodesOffsetOfReal(begin)));
      producer_->End();
    }
    // Not kept: there are as many as workers, and not as streams.
    std::vector<uint8_t>().swap(made_);
    std::vector<float>().swap(scales_.scale);
    std::vector<int32_t>().swap(scales_.zero_point);
    std::vector<float>().swap(scales_.real_zero_point);
    std::vector<uint8_t>().swap(scales_.scale_code);
  }

  StoreUse FinishUse() const override {
    return StoresAtTheEnd() ? StoreUse::kWrite : StoreUse::kNone;
  }

  absl::StatusOr<bool> Finish(ChunkWriter* out) override {
    if (StoresAtTheEnd()) {
      whole_.degenerate_count = quantizer_->degenerate_count();
      absl::StatusOr<StoredEncoding> stored = task_.store->Put(
          *task_.store_key,
          std::make_shared<const core::Encoding>(std::move(whole_)), task_.put);
      if (!stored.ok()) return stored.status();
      etag_ = stored->etag;
      stored_ = true;
      return false;
    }
    producer_->Take(quantizer_->counts());
    producer_->WriteSummary(out, etag_, quantizer_->degenerate_count());
    return true;
  }

 private:
  bool StoresAtTheEnd() const {
    return task_.store_key.has_value() && !stored_;
  }

  const RpcEnvironment& env_;
  const QuantizeTask task_;
  const std::shared_ptr<const ResolvedSpec> spec_;
  const CodeGeometry geometry_;
  const v1::ByteRange range_;
  const MemoryBudget::Lease lease_;
  const std::unique_ptr<core::BlockQuantizer> quantizer_;
  absl::optional<CodeProducer> producer_;
  // State of the quantum: where its answer goes, its reals, its codes and
  // scales.
  ChunkWriter* out_ = nullptr;
  int64_t begin_bytes_ = 0;
  int64_t end_bytes_ = 0;
  std::vector<uint8_t> made_;
  int64_t first_scale_ = -1;
  core::Encoding scales_;
  // All scales, if they are to be stored.
  core::Encoding whole_;
  bool stored_ = false;
  std::string etag_;
};

class QuantizeRpc final : public TensorRpc {
 public:
  explicit QuantizeRpc(const RpcEnvironment& env) : env_(env) {}

  Rpc id() const override { return Rpc::kQuantize; }

  absl::StatusOr<std::unique_ptr<TensorJob>> Check(
      const std::string& bytes, const Caller& caller) override {
    absl::StatusOr<ParsedHeader<v1::QuantizeHeader>> parsed =
        ParseHeader<v1::QuantizeHeader>(env_, bytes);
    if (!parsed.ok()) return parsed.status();
    const v1::QuantizeHeader& header = parsed->header;
    absl::StatusOr<QuantizeTask> task = CheckQuantizeTask(env_, header, caller);
    if (!task.ok()) return task.status();
    absl::StatusOr<absl::optional<CompensatedRounding>> rounding =
        CheckRounding(header.rounding(), task->name, caller);
    if (!rounding.ok()) {
      return core::WithField(rounding.status(), "header.rounding");
    }
    if (rounding->has_value()) {
      return OpenCompensated(header, *std::move(task), **std::move(rounding),
                             caller);
    }
    return header.has_spec() ? OpenCalibrating(header, *std::move(task), caller)
                             : OpenStreaming(header, *std::move(task), caller);
  }

 private:
  // An encoding, by name or in full, and the field that has it.
  struct HeaderEncoding {
    EncodingSource source;
    absl::string_view field;
  };

  // Errors: those of EncodingSource::Open, ENCODING_MISSING; at fields of the
  // header.
  absl::StatusOr<HeaderEncoding> OpenEncoding(const v1::QuantizeHeader& header,
                                              const QuantizeTask& task,
                                              const Caller& caller) {
    if (!header.has_reference() && !header.has_encoding()) {
      return core::WithField(core::EncodingMissingError(), "header");
    }
    const absl::string_view field =
        header.has_reference() ? "header.reference" : "header.encoding";
    absl::StatusOr<EncodingSource> source =
        header.has_reference()
            ? EncodingSource::Open(caller, header.reference(), task.name)
            : EncodingSource::Open(env_, header.encoding());
    if (!source.ok()) return core::WithField(source.status(), field);
    return HeaderEncoding{*std::move(source), field};
  }

  absl::StatusOr<std::unique_ptr<TensorJob>> OpenStreaming(
      const v1::QuantizeHeader& header, QuantizeTask task,
      const Caller& caller) {
    absl::StatusOr<HeaderEncoding> encoding =
        OpenEncoding(header, task, caller);
    if (!encoding.ok()) return encoding.status();
    absl::optional<v1::ByteRange> range;
    if (header.has_range()) range = header.range();
    return std::make_unique<StreamingQuantizeJob>(
        env_, std::move(task), std::move(encoding->source), encoding->field,
        std::move(range));
  }

  // With its outer maxima. Errors are at fields of the header.
  absl::StatusOr<std::shared_ptr<const ResolvedSpec>> ResolveHeaderSpec(
      const v1::QuantizeHeader& header, const QuantizeTask& task,
      const Caller& caller) {
    absl::StatusOr<ResolvedSpec> resolved = ResolveElementSpec(
        env_, caller, task.name, header.spec(), header.outer_maximum(),
        task.description, task.transport());
    if (!resolved.ok()) {
      return core::WithField(
          resolved.status(),
          core::ErrorReason(resolved.status()) == "OUTER_MAXIMUM"
              ? "header.outer_maximum"
              : "header.spec");
    }
    return std::make_shared<const ResolvedSpec>(*std::move(resolved));
  }

  absl::StatusOr<std::unique_ptr<TensorJob>> OpenCalibrating(
      const v1::QuantizeHeader& header, QuantizeTask task,
      const Caller& caller) {
    const absl::StatusOr<std::shared_ptr<const ResolvedSpec>> resolved =
        ResolveHeaderSpec(header, task, caller);
    if (!resolved.ok()) return resolved.status();
    const std::shared_ptr<const ResolvedSpec>& spec = *resolved;
    const CodeGeometry geometry = QuantizeGeometry(
        task.description, *core::FindFormat(spec->spec.format));
    const bool goes_beside =
        task.scales_in_chunks ||
        (task.omit_encoding && !task.store_key.has_value());
    if (core::ValidateSpec(spec->spec).ok() &&
        core::BlockQuantizer::Takes(spec->spec, *spec->layout,
                                    !spec->outer_maximum.empty())) {
      const int64_t granule_bytes =
          std::lcm(spec->layout->band_size(), geometry.codes_per_granule) *
          geometry.real_bytes;
      if (granule_bytes <= (goes_beside ? kMaxBandBytes : kMaxGranuleBytes)) {
        return OpenLocal(header, std::move(task), spec, geometry, granule_bytes,
                         goes_beside);
      }
    }
    if (header.has_range()) {
      return core::WithField(
          core::RangeInvalidError(
              "a range needs a fixed encoding, or a spec whose scales depend "
              "on their own small block, with scales_in_chunks or "
              "omit_encoding; expected one of these"),
          "header.range");
    }
    absl::Status status = CheckOutput(task.output, geometry.codes_size_bytes());
    if (!status.ok()) return status;
    absl::StatusOr<std::unique_ptr<TensorAccumulator>> accumulator =
        MakeHeldAccumulator(env_, task.description.element_type, spec.get());
    if (!accumulator.ok()) return accumulator.status();
    return std::make_unique<CalibratingQuantizeJob>(env_, std::move(task), spec,
                                                    *std::move(accumulator));
  }

  // With rounding that needs the whole tensor.
  absl::StatusOr<std::unique_ptr<TensorJob>> OpenCompensated(
      const v1::QuantizeHeader& header, QuantizeTask task,
      CompensatedRounding rounding, const Caller& caller) {
    if (header.has_range()) {
      return core::WithField(
          core::RangeInvalidError(
              "a range with ROUNDING_METHOD_COMPENSATED, expected the whole "
              "tensor: each column makes up for those before it"),
          "header.range");
    }
    if (absl::Status s = CheckWholeRows(task.description); !s.ok()) {
      return core::WithField(s, "header.tensor.global_shape");
    }
    std::shared_ptr<const ResolvedSpec> spec;
    absl::optional<EncodingSource> source;
    absl::string_view field;
    if (header.has_spec()) {
      absl::StatusOr<std::shared_ptr<const ResolvedSpec>> resolved =
          ResolveHeaderSpec(header, task, caller);
      if (!resolved.ok()) return resolved.status();
      spec = *std::move(resolved);
    } else {
      if (header.encoding().scales_in_chunks()) {
        return core::WithField(
            core::ScaleShapeError("scales in chunks with "
                                  "ROUNDING_METHOD_COMPENSATED, expected them "
                                  "in the encoding"),
            "header.encoding.scales_in_chunks");
      }
      absl::StatusOr<HeaderEncoding> encoding =
          OpenEncoding(header, task, caller);
      if (!encoding.ok()) return encoding.status();
      source = std::move(encoding->source);
      field = encoding->field;
    }
    return MakeCompensatedQuantizeJob(env_, std::move(task),
                                      std::move(rounding), std::move(spec),
                                      std::move(source), field);
  }

  // With a spec that core::BlockQuantizer takes. `goes_beside`  the scales do
  // not go before the codes.
  absl::StatusOr<std::unique_ptr<TensorJob>> OpenLocal(
      const v1::QuantizeHeader& header, QuantizeTask task,
      std::shared_ptr<const ResolvedSpec> spec, const CodeGeometry& geometry,
      int64_t granule_bytes, bool goes_beside) {
    if (header.has_range() && (!goes_beside || task.store_key.has_value())) {
      return core::WithField(
          core::RangeInvalidError("a range of a spec gives a part of its "
                                  "scales; expected scales_in_chunks or "
                                  "omit_encoding, and nothing to store"),
          "header.range");
    }
    absl::StatusOr<v1::ByteRange> range =
        CheckRange(header.has_range() ? &header.range() : nullptr,
                   geometry.reals_size_bytes(), granule_bytes);
    if (!range.ok()) return core::WithField(range.status(), "header.range");
    absl::Status status = CheckOutput(
        task.output, geometry.CodesOffsetOfReal(range->end_bytes()) -
                         geometry.CodesOffsetOfReal(range->begin_bytes()));
    if (!status.ok()) return status;
    int64_t bytes = 0;
    // A band that is put together from chunks, and the one in work with its
    // codes.
    if (granule_bytes > kMaxGranuleBytes) bytes += 3 * granule_bytes;
    const int64_t quantum_bytes =
        LocalQuantumBytes(env_, *spec, granule_bytes, geometry.real_bytes,
                          goes_beside ? QuantumRealBytes(env_, task, geometry)
                                      : env_.limits.chunk_bytes);
    bytes += LocalSearchBytes(env_, *spec, quantum_bytes / geometry.real_bytes);
    if (!goes_beside || task.store_key.has_value()) {
      bytes += spec->layout->scale_count() * core::kMostMemoryPerScale;
    }
    const int64_t outer_bytes =
        static_cast<int64_t>(2 * spec->outer_maximum.size() * sizeof(float));
    if (outer_bytes > kSmallBytes) bytes += outer_bytes;
    absl::StatusOr<MemoryBudget::Lease> lease =
        env_.budget->Acquire(bytes, "send fewer tensors at once");
    if (!lease.ok()) return lease.status();
    absl::StatusOr<std::unique_ptr<core::BlockQuantizer>> quantizer =
        core::BlockQuantizer::Create(
            spec->spec, *spec->layout, task.description.element_type,
            task.nan_policy, spec->outer_maximum, ImportanceOf(*spec));
    if (!quantizer.ok()) return quantizer.status();
    if (goes_beside) {
      return std::make_unique<LocalQuantizeJob>(
          env_, std::move(task), std::move(spec), geometry, *range,
          quantum_bytes, *std::move(quantizer), *std::move(lease));
    }
    return std::make_unique<BlockQuantizeJob>(
        env_, std::move(task), std::move(spec), geometry, quantum_bytes,
        *std::move(quantizer), *std::move(lease));
  }

  const RpcEnvironment& env_;
};

}  // namespace

std::unique_ptr<TensorRpc> MakeQuantizeRpc(const RpcEnvironment& env) {
  return std::make_unique<QuantizeRpc>(env);
}

}  // namespace quantd::server
