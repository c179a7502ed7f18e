// Quantize: bytes > encoding > codes, as they arrive or, with a spec, when the
// tensor is complete.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/block_quantizer.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/search_time.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/quantize.h"
#include "core/statistics/tensor_statistics.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/answer_bytes.h"
#include "server/rpc/caller.h"
#include "server/rpc/code_geometry.h"
#include "server/rpc/encoding_source.h"
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

CodeGeometry Geometry(const TensorDescription& description,
                      const core::FormatInfo& format) {
  return {description.element_count,
          core::ElementSizeBytes(description.element_type),
          format.codes_per_byte(), format.SizeBytes(format.codes_per_byte())};
}

// What a header asks for, checked.
struct QuantizeTask {
  v1::TensorName name;
  TensorDescription description;
  core::NanPolicy nan_policy = core::NanPolicy::kDefault;
  bool omit_encoding = false;
  // Where the encoding is to be stored, if it is.
  absl::optional<EncodingKey> store_key;
  // The caller's.
  std::shared_ptr<EncodingStore> store;
  // Where the codes go, if not into messages.
  absl::optional<SharedBytes> output;
};

absl::StatusOr<QuantizeTask> CheckTask(const RpcEnvironment& env,
                                       const v1::QuantizeHeader& header,
                                       const Caller& caller) {
  absl::StatusOr<TensorDescription> description =
      CheckDescription(env, header.tensor());
  if (!description.ok()) return description.status();
  if (!v1::NanPolicy_IsValid(header.nan_policy())) {
    return core::WithField(
        core::EnumUnknownError("NanPolicy", header.nan_policy()),
        "header.nan_policy");
  }
  absl::StatusOr<absl::optional<SharedBytes>> output =
      FindOutput(header, caller.shared_memory);
  if (!output.ok()) return output.status();
  QuantizeTask task;
  task.output = *std::move(output);
  task.name = header.tensor().name();
  task.description = *std::move(description);
  task.nan_policy = static_cast<core::NanPolicy>(header.nan_policy());
  task.omit_encoding = header.omit_encoding();
  if (header.store() && !header.has_reference()) {
    absl::StatusOr<EncodingKey> key = KeyFromProto(task.name);
    if (!key.ok()) {
      return core::WithField(key.status(), "header.tensor.name");
    }
    absl::Status status = env.authenticator->CheckWrite(caller, key->model);
    if (!status.ok()) return core::WithField(status, "header.tensor.name");
    task.store_key = *std::move(key);
    task.store = caller.encodings;
  }
  return task;
}

// Reals of a quantum: their codes fill at most one message, if they go there.
int64_t QuantumRealBytes(const RpcEnvironment& env, const QuantizeTask& task,
                         const CodeGeometry& geometry) {
  const int64_t granules =
      task.output.has_value()
          ? kSharedQuantumBytes / geometry.granule_real_bytes()
          : std::min(
                env.limits.chunk_bytes / geometry.granule_real_bytes(),
                env.limits.response_chunk_bytes / geometry.granule_code_bytes);
  return std::max<int64_t>(1, granules) * geometry.granule_real_bytes();
}

// Turns reals into codes where they go out.
class CodeProducer {
 public:
  // The answer is the codes of the reals [range).
  CodeProducer(const RpcEnvironment& env, const QuantizeTask& task,
               ResolvedEncoding resolved, const v1::ByteRange& range)
      : env_(env),
        task_(task),
        resolved_(std::move(resolved)),
        format_(*core::FindFormat(resolved_.encoding->format)),
        geometry_(Geometry(task.description, format_)),
        range_(range),
        answer_(task.output, geometry_.CodesOffsetOfReal(range.begin_bytes())) {
  }

  // The answer's header. `mantissa_bits` of the histograms that the encoding
  // comes from; 0 for none.
  void WriteHeader(ChunkWriter* out, int mantissa_bits = 0) const {
    v1::QuantizeResponseHeader header;
    header.set_mantissa_bits(static_cast<uint32_t>(mantissa_bits));
    *header.mutable_name() = task_.name;
    if (!task_.omit_encoding) {
      EncodingToProto(*resolved_.encoding, header.mutable_encoding());
    }
    header.set_etag(resolved_.etag);
    header.mutable_shape()->Assign(task_.description.shape.begin(),
                                   task_.description.shape.end());
    header.set_size_bytes(geometry_.codes_size_bytes());
    header.mutable_range()->set_begin_bytes(
        geometry_.CodesOffsetOfReal(range_.begin_bytes()));
    header.mutable_range()->set_end_bytes(
        geometry_.CodesOffsetOfReal(range_.end_bytes()));
    out->SetHeader(header);
  }

  // Makes room for the codes of `bytes` of reals at `offset_bytes`.
  void Begin(int64_t offset_bytes, int64_t bytes, ChunkWriter* out) {
    const int64_t begin = geometry_.CodesOffsetOfReal(offset_bytes);
    answer_.Begin(
        begin, geometry_.CodesOffsetOfReal(offset_bytes + bytes) - begin, out);
  }

  // `counts`  what is added to; the answer's are counts().
  absl::Status Quantize(int64_t offset_bytes, absl::Span<const uint8_t> data,
                        core::QuantizeCounts* counts, core::ThreadPool* pool) {
    const int64_t first = offset_bytes / geometry_.real_bytes;
    return core::Quantize(
        *resolved_.encoding, *resolved_.layout, task_.description.element_type,
        task_.nan_policy, first,
        static_cast<int64_t>(data.size()) / geometry_.real_bytes, data.data(),
        answer_.At(geometry_.CodesOffset(first)), counts, pool);
  }
  core::QuantizeCounts* counts() { return &counts_; }

  // Of data that may change meanwhile, which core::Quantize allows for.
  absl::Status QuantizeShared(int64_t offset_bytes,
                              absl::Span<const uint8_t> shared) {
    const int64_t block_bytes =
        kSharedBlockBytes - kSharedBlockBytes % geometry_.granule_real_bytes();
    const int64_t end_bytes =
        offset_bytes + static_cast<int64_t>(shared.size());
    const int64_t blocks =
        (end_bytes - offset_bytes + block_bytes - 1) / block_bytes;
    std::vector<core::QuantizeCounts> counts(blocks);
    std::vector<absl::Status> statuses(blocks);
    ForEachBlock(
        env_.pool, shared, block_bytes,
        [&](int64_t block, absl::Span<const uint8_t> part) {
          statuses[block] = Quantize(offset_bytes + block * block_bytes, part,
                                     &counts[block], nullptr);
        },
        [&](int64_t block) {
          answer_.Made(geometry_.CodesOffsetOfReal(
              std::min(offset_bytes + (block + 1) * block_bytes, end_bytes)));
        });
    for (int64_t block = 0; block < blocks; ++block) {
      if (!statuses[block].ok()) return statuses[block];
      counts_.Merge(counts[block]);
    }
    return absl::OkStatus();
  }

  // Takes codes that were made before, `counts` in all, instead.
  void Take(int64_t offset_bytes, absl::Span<const uint8_t> codes) {
    std::memcpy(answer_.At(geometry_.CodesOffsetOfReal(offset_bytes)),
                codes.data(), codes.size());
  }
  void Take(const core::QuantizeCounts& counts) { counts_ = counts; }

  void End() { answer_.End(env_.metrics); }

  void WriteSummary(ChunkWriter* out) const {
    v1::QuantizeSummary summary;
    summary.set_count(counts_.total);
    summary.set_clipped_low_count(counts_.clipped_low);
    summary.set_clipped_high_count(counts_.clipped_high);
    summary.set_nan_count(counts_.nan);
    summary.set_positive_infinity_count(counts_.positive_infinity);
    summary.set_negative_infinity_count(counts_.negative_infinity);
    summary.set_checksum_xxh3(answer_.Digest());
    out->SetSummary(summary);
    env_.metrics->Elements(Rpc::kQuantize, &format_, counts_.total);
    env_.metrics->NonFinite(counts_.nan + counts_.positive_infinity +
                            counts_.negative_infinity);
    // The infinities, all of which are clipped, were counted above.
    env_.metrics->Clipped(counts_.clipped_low + counts_.clipped_high -
                          counts_.positive_infinity -
                          counts_.negative_infinity);
  }

 private:
  const RpcEnvironment& env_;
  const QuantizeTask& task_;
  const ResolvedEncoding resolved_;
  const core::FormatInfo& format_;
  const CodeGeometry geometry_;
  const v1::ByteRange range_;
  core::QuantizeCounts counts_;
  AnswerBytes answer_;
};

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

  bool ResolveWaits() const override {
    return source_.waits() || task_.store_key.has_value();
  }
  bool ResolveWrites() const override { return task_.store_key.has_value(); }
  // What is stored must not be turned away after it was stored.
  bool light() const override {
    return !task_.store_key.has_value() &&
           (task_.omit_encoding || !source_.is_large());
  }

  absl::Status Resolve(ChunkWriter* out) override {
    absl::StatusOr<ResolvedEncoding> resolved =
        source_.Resolve(env_, task_.description.shape);
    if (!resolved.ok()) {
      return core::WithField(resolved.status(), source_field_);
    }
    const CodeGeometry geometry = Geometry(
        task_.description, *core::FindFormat(resolved->encoding->format));
    absl::StatusOr<v1::ByteRange> range =
        CheckRange(range_.has_value() ? &*range_ : nullptr,
                   geometry.reals_size_bytes(), geometry.granule_real_bytes());
    if (!range.ok()) return core::WithField(range.status(), "header.range");
    absl::Status status = CheckOutput(
        task_.output, geometry.CodesOffsetOfReal(range->end_bytes()) -
                          geometry.CodesOffsetOfReal(range->begin_bytes()));
    if (!status.ok()) return status;
    if (task_.store_key.has_value()) {
      absl::StatusOr<StoredEncoding> stored = task_.store->Put(
          *task_.store_key, resolved->encoding, Precondition());
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

  void BeginQuantum(int64_t offset_bytes, int64_t bytes,
                    ChunkWriter* out) override {
    producer_->Begin(offset_bytes, bytes, out);
  }

  absl::Status Feed(int64_t offset_bytes,
                    absl::Span<const uint8_t> data) override {
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
    return producer_->QuantizeShared(offset_bytes, shared);
  }

  void EndQuantum() override { producer_->End(); }

  absl::StatusOr<bool> Finish(ChunkWriter* out) override {
    producer_->WriteSummary(out);
    return true;
  }

 private:
  const RpcEnvironment& env_;
  const QuantizeTask task_;
  const EncodingSource source_;
  const absl::string_view source_field_;
  const absl::optional<v1::ByteRange> range_;
  // From Resolve on.
  absl::optional<CodeProducer> producer_;
};

// With a spec, which needs the whole tensor: it is held in one form or another,
// and answered block by block when its encoding is known.
class BufferedQuantizeJob : public TensorJob {
 public:
  bool FinishWaits() const final { return step_ == Step::kPut; }
  bool FinishIsLong() const final {
    return step_ == Step::kEncode && EncodeIsLong();
  }

  absl::StatusOr<bool> Finish(ChunkWriter* out) final {
    switch (step_) {
      case Step::kEncode: {
        const bool was_long = EncodeIsLong();
        absl::StatusOr<ResolvedEncoding> encoded = Encode();
        if (!encoded.ok()) return encoded.status();
        resolved_ = *std::move(encoded);
        if (task_.store_key.has_value() && !WillReject()) {
          step_ = Step::kPut;
          return false;
        }
        OpenAnswer(out);
        // Blocks are answered by workers.
        if (was_long) return false;
        break;
      }
      case Step::kPut: {
        absl::StatusOr<StoredEncoding> stored = task_.store->Put(
            *task_.store_key, resolved_.encoding, Precondition());
        if (!stored.ok()) return stored.status();
        resolved_.etag = stored->etag;
        OpenAnswer(out);
        return false;
      }
      case Step::kAnswer:
        break;
    }
    if (next_block_ < buffer_.block_count()) {
      const int64_t begin = RealsOffset(next_block_);
      const int64_t end = std::min(RealsOffset(next_block_ + 1), SizeBytes());
      producer_->Begin(begin, end - begin, out);
      absl::Status status =
          Answer(begin, buffer_.block(next_block_), &*producer_);
      if (!status.ok()) return status;
      producer_->End();
      ++next_block_;
    }
    if (next_block_ < buffer_.block_count()) return false;
    producer_->WriteSummary(out);
    return true;
  }

 protected:
  // `buffered_bytes`  of the tensor in the form that is held.
  BufferedQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                      int64_t buffered_bytes)
      : env_(env), task_(std::move(task)), buffer_(env, buffered_bytes) {
    frame_.end_bytes = SizeBytes();
    frame_.unit_bytes = core::ElementSizeBytes(task_.description.element_type);
  }

  const RpcEnvironment& env() const { return env_; }
  const QuantizeTask& task() const { return task_; }
  TensorBuffer& buffer() { return buffer_; }
  // Of the reals.
  int64_t SizeBytes() const {
    return task_.description.element_count *
           core::ElementSizeBytes(task_.description.element_type);
  }

  // The encoding, once all is held.
  virtual absl::StatusOr<ResolvedEncoding> Encode() = 0;
  // That may take more than kShortWork.
  virtual bool EncodeIsLong() const { return false; }
  // Of the histograms that the encoding comes from.
  void SetMantissaBits(int bits) { mantissa_bits_ = bits; }
  // Quantizing is going to fail: the tensor must leave nothing behind.
  virtual bool WillReject() const { return false; }
  // Offset of the real that begins that block of what is held.
  virtual int64_t RealsOffset(int64_t block) const = 0;
  // Gives `out` the codes of a block that begins with the real at
  // `offset_bytes`.
  virtual absl::Status Answer(int64_t offset_bytes,
                              absl::Span<const uint8_t> block,
                              CodeProducer* out) = 0;

 private:
  enum class Step { kEncode, kPut, kAnswer };

  void OpenAnswer(ChunkWriter* out) {
    v1::ByteRange whole;
    whole.set_end_bytes(SizeBytes());
    producer_.emplace(env_, task_, std::move(resolved_), whole);
    producer_->WriteHeader(out, mantissa_bits_);
    step_ = Step::kAnswer;
  }

  const RpcEnvironment& env_;
  const QuantizeTask task_;
  TensorBuffer buffer_;
  Step step_ = Step::kEncode;
  ResolvedEncoding resolved_;
  int mantissa_bits_ = 0;
  absl::optional<CodeProducer> producer_;
  int64_t next_block_ = 0;
};

// With any spec: reals are held.
class CalibratingQuantizeJob final : public BufferedQuantizeJob {
 public:
  CalibratingQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                         ResolvedSpec spec,
                         std::unique_ptr<TensorAccumulator> accumulator)
      : BufferedQuantizeJob(
            env, task,
            task.description.element_count *
                core::ElementSizeBytes(task.description.element_type)),
        spec_(std::move(spec)),
        accumulator_(std::move(accumulator)),
        takes_long_(TakesLong(spec_.spec, spec_.layout->scale_count(),
                              this->task().description.element_count)) {
    frame_.granule_bytes = frame_.unit_bytes;
    frame_.quantum_bytes = QuantumBytes(env, *accumulator_);
    search_time_ = core::SearchTime(spec_.spec, spec_.layout->scale_count(),
                                    this->task().description.element_count);
  }

  absl::Status Reserve(int64_t bytes) override {
    if (absl::Status s = accumulator_->Reserve(); !s.ok()) return s;
    return buffer().Reserve(bytes);
  }

  absl::Status Feed(int64_t offset_bytes,
                    absl::Span<const uint8_t> data) override {
    accumulator_->Update(offset_bytes, data);
    buffer().Append(data);
    return absl::OkStatus();
  }

 protected:
  bool EncodeIsLong() const override { return takes_long_; }

  absl::StatusOr<ResolvedEncoding> Encode() override {
    const core::HeldTensor held =
        buffer().Held(*spec_.layout, task().description.element_type);
    absl::StatusOr<CalibratedEncoding> calibrated = CalibrateTensor(
        env(), spec_, accumulator_->statistics(), {},
        takes_long_ ? env().helper_pool : nullptr, stop(), &held);
    if (!calibrated.ok()) return calibrated.status();
    SetMantissaBits(calibrated->mantissa_bits);
    return std::move(calibrated->resolved);
  }

  bool WillReject() const override {
    const core::ElementCounts& counts = accumulator_->statistics().counts();
    return task().nan_policy == core::NanPolicy::kReject &&
           counts.nan + counts.positive_infinity + counts.negative_infinity > 0;
  }

  int64_t RealsOffset(int64_t block) const override {
    return block * TensorBuffer::kBlockBytes;
  }

  absl::Status Answer(int64_t offset_bytes, absl::Span<const uint8_t> block,
                      CodeProducer* out) override {
    return out->Quantize(offset_bytes, block, out->counts(), env().pool);
  }

 private:
  const ResolvedSpec spec_;
  const std::unique_ptr<TensorAccumulator> accumulator_;
  const bool takes_long_;
};

// With a spec whose scales follow from their own blocks: reals become codes as
// they come, and those are held.
class BlockQuantizeJob final : public BufferedQuantizeJob {
 public:
  // The largest blocks that are put together from chunks.
  static constexpr int64_t kMaxGranuleBytes = 64 << 10;

  // `geometry`  of the codes.
  // `lease`     of the memory that the encoding takes.
  // Requires: BlockQuantizer::Takes the spec.
  BlockQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                   ResolvedSpec spec, const CodeGeometry& geometry,
                   MemoryBudget::Lease lease)
      : BufferedQuantizeJob(env, std::move(task), geometry.codes_size_bytes()),
        spec_(std::move(spec)),
        geometry_(geometry),
        lease_(std::move(lease)),
        quantizer_(spec_.spec, *spec_.layout,
                   this->task().description.element_type,
                   this->task().nan_policy) {
    frame_.granule_bytes = GranuleBytes();
    frame_.quantum_bytes =
        std::max<int64_t>(1, env.limits.chunk_bytes / frame_.granule_bytes) *
        frame_.granule_bytes;
  }

  int64_t GranuleBytes() const {
    return quantizer_.granule() * geometry_.real_bytes;
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
    quantizer_.Add(offset_bytes / geometry_.real_bytes,
                   bytes / geometry_.real_bytes, data.data(), made_.data(),
                   env().pool);
    buffer().Append(made_);
    return absl::OkStatus();
  }

 protected:
  absl::StatusOr<ResolvedEncoding> Encode() override {
    absl::StatusOr<core::Encoding> encoding = quantizer_.Finish();
    if (!encoding.ok()) return encoding.status();
    return ResolvedEncoding{
        std::make_shared<const core::Encoding>(*std::move(encoding)),
        spec_.layout, ""};
  }

  int64_t RealsOffset(int64_t block) const override {
    return block * (TensorBuffer::kBlockBytes / geometry_.granule_code_bytes) *
           geometry_.granule_real_bytes();
  }

  absl::Status Answer(int64_t offset_bytes, absl::Span<const uint8_t> block,
                      CodeProducer* out) override {
    out->Take(offset_bytes, block);
    out->Take(quantizer_.counts());
    return absl::OkStatus();
  }

 private:
  const ResolvedSpec spec_;
  const CodeGeometry geometry_;
  const MemoryBudget::Lease lease_;
  core::BlockQuantizer quantizer_;
  // Codes of the latest reals.
  std::vector<uint8_t> made_;
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
    absl::StatusOr<QuantizeTask> task = CheckTask(env_, header, caller);
    if (!task.ok()) return task.status();
    switch (header.encoding_source_case()) {
      case v1::QuantizeHeader::kReference: {
        absl::StatusOr<EncodingSource> source =
            EncodingSource::Open(caller, header.reference(), task->name);
        return OpenStreaming(header, *std::move(task), std::move(source),
                             "header.reference");
      }
      case v1::QuantizeHeader::kEncoding:
        return OpenStreaming(header, *std::move(task),
                             EncodingSource::Open(env_, header.encoding()),
                             "header.encoding");
      case v1::QuantizeHeader::kSpec:
        return OpenCalibrating(header, *std::move(task));
      case v1::QuantizeHeader::ENCODING_SOURCE_NOT_SET:
        break;
    }
    return core::WithField(core::EncodingMissingError(), "header");
  }

 private:
  // `field` outlives everything.
  absl::StatusOr<std::unique_ptr<TensorJob>> OpenStreaming(
      const v1::QuantizeHeader& header, QuantizeTask task,
      absl::StatusOr<EncodingSource> source, absl::string_view field) {
    if (!source.ok()) return core::WithField(source.status(), field);
    absl::optional<v1::ByteRange> range;
    if (header.has_range()) range = header.range();
    return std::make_unique<StreamingQuantizeJob>(
        env_, std::move(task), *std::move(source), field, std::move(range));
  }

  absl::StatusOr<std::unique_ptr<TensorJob>> OpenCalibrating(
      const v1::QuantizeHeader& header, QuantizeTask task) {
    if (header.has_range()) {
      return core::WithField(
          core::RangeInvalidError("a range needs a fixed encoding; expected a "
                                  "reference or an encoding"),
          "header.range");
    }
    absl::StatusOr<ResolvedSpec> spec =
        ResolveSpec(env_, header.spec(), task.description.shape);
    if (!spec.ok()) return core::WithField(spec.status(), "header.spec");
    const CodeGeometry geometry =
        Geometry(task.description, *core::FindFormat(spec->spec.format));
    absl::Status status = CheckOutput(task.output, geometry.codes_size_bytes());
    if (!status.ok()) return status;
    if (core::ValidateSpec(spec->spec).ok() &&
        core::BlockQuantizer::Takes(spec->spec, *spec->layout)) {
      constexpr int64_t kBytesPerScale =
          sizeof(float) + sizeof(int32_t) + sizeof(uint8_t);
      absl::StatusOr<MemoryBudget::Lease> lease =
          env_.budget->Acquire(spec->layout->scale_count() * kBytesPerScale,
                               "send fewer tensors at once");
      if (!lease.ok()) return lease.status();
      auto job = std::make_unique<BlockQuantizeJob>(env_, task, *spec, geometry,
                                                    *std::move(lease));
      if (job->GranuleBytes() <= BlockQuantizeJob::kMaxGranuleBytes) {
        return job;
      }
    }
    absl::StatusOr<std::unique_ptr<TensorAccumulator>> accumulator =
        TensorAccumulator::Create(env_, task.description.element_type,
                                  spec->layout, MantissaBitsWhereHeld(*spec),
                                  SearchBytes(env_, *spec));
    if (!accumulator.ok()) return accumulator.status();
    return std::make_unique<CalibratingQuantizeJob>(
        env_, std::move(task), *std::move(spec), *std::move(accumulator));
  }

  const RpcEnvironment& env_;
};

}  // namespace

std::unique_ptr<TensorRpc> MakeQuantizeRpc(const RpcEnvironment& env) {
  return std::make_unique<QuantizeRpc>(env);
}

}  // namespace quantd::server
