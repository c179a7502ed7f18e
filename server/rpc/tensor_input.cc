#include "server/rpc/tensor_input.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/scale_indices.h"
#include "core/calibrate/search_time.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/held_tensor.h"
#include "core/types/encoding_memory.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "server/wire/names.h"
#include "server/wire/parsed_bytes.h"

namespace quantd::server {
namespace {

constexpr char kEncodingWayOut[] =
    "put encodings with PutEncoding and name them by reference, or send fewer "
    "tensors at once";
// Far more than the store gives one.
constexpr size_t kMostEtagBytes = 256;
// Far more than a tensor has: what comes after is not made for longer lists.
constexpr int kMostDimensions = 1024;
// Scales that are written into an answer within microseconds.
constexpr size_t kSmallScaleCount = 1024;

// What `proto` takes as core::Encoding.
int64_t EncodingBytes(const v1::Encoding& proto) {
  const auto dimension_count = static_cast<int64_t>(proto.block_size_size()) +
                               proto.outer_block_size_size() +
                               proto.scale_shape_size();
  return static_cast<int64_t>(sizeof(core::Encoding)) +
         static_cast<int64_t>(proto.scale_code().size()) +
         static_cast<int64_t>(sizeof(float)) *
             (ScaleCount(proto) + proto.zero_point_size() +
              proto.outer_scale_size() + proto.codebook_size()) +
         static_cast<int64_t>(sizeof(int64_t)) * dimension_count;
}

absl::StatusOr<MemoryBudget::Lease> ChargeEncoding(const RpcEnvironment& env,
                                                   int64_t bytes) {
  if (bytes <= kSmallBytes) return MemoryBudget::Lease();
  return env.budget->Acquire(bytes, kEncodingWayOut);
}

// An encoding, with the layout that it has on this tensor. Errors are at no
// field.
absl::StatusOr<ResolvedEncoding> Fit(
    const RpcEnvironment& env, std::shared_ptr<const core::Encoding> encoding,
    absl::Span<const int64_t> shape) {
  absl::StatusOr<core::BlockLayout> layout =
      CheckedLayout(env, shape, encoding->block_size);
  if (!layout.ok()) return layout.status();
  absl::Status status = core::CheckEncodingFits(*encoding, *layout);
  if (!status.ok()) return status;
  return ResolvedEncoding{
      std::move(encoding),
      std::make_shared<const core::BlockLayout>(*std::move(layout)), ""};
}

}  // namespace

absl::Status HeaderBrokenError() {
  return core::HeaderInvalidError(
      "the header is not a valid message; expected protobuf with UTF-8 "
      "strings");
}

absl::StatusOr<MemoryBudget::Lease> ChargeHeader(
    const RpcEnvironment& env, const google::protobuf::Descriptor& type,
    const std::string& bytes) {
  // Takes a few MiB at most, of as many threads as there are workers.
  constexpr size_t kSmallHeaderBytes = 128 << 10;
  if (bytes.size() <= kSmallHeaderBytes) return MemoryBudget::Lease();
  // Encodings grow less than that when they are parsed.
  constexpr int64_t kMostGrowth = 8;
  const grpc::Slice slice(bytes.data(), bytes.size(),
                          grpc::Slice::STATIC_SLICE);
  grpc::ByteBuffer buffer(&slice, 1);
  const absl::StatusOr<int64_t> parsed_bytes =
      ParsedBytes(&buffer, type,
                  std::min(env.budget->total_bytes(),
                           kMostGrowth * env.limits.message_bytes));
  // Parsing it would make everything before the place where it breaks.
  if (absl::IsInvalidArgument(parsed_bytes.status())) {
    return HeaderBrokenError();
  }
  return env.budget->Acquire(
      parsed_bytes.ok() ? *parsed_bytes + static_cast<int64_t>(bytes.size())
                        : std::numeric_limits<int64_t>::max(),
      kEncodingWayOut);
}

absl::StatusOr<TensorDescription> CheckDescription(
    const RpcEnvironment& env, const v1::TensorDescription& proto) {
  absl::StatusOr<TensorDescription> description = DescriptionFromProto(proto);
  if (!description.ok()) {
    return core::WithField(description.status(), "header.tensor");
  }
  const int64_t size_bytes = description->element_count *
                             core::ElementSizeBytes(description->element_type);
  if (size_bytes > env.limits.tensor_bytes) {
    return core::WithField(
        core::TensorTooLargeError(size_bytes, env.limits.tensor_bytes),
        "header.tensor.shape");
  }
  const auto rank = static_cast<int64_t>(description->shape.size());
  if (rank > env.limits.tensor_rank) {
    return core::WithField(core::RankLimitError(env.limits.tensor_rank, rank),
                           "header.tensor.shape");
  }
  return description;
}

absl::StatusOr<core::BlockLayout> CheckedLayout(
    const RpcEnvironment& env, absl::Span<const int64_t> shape,
    absl::Span<const int64_t> block_size) {
  absl::StatusOr<core::BlockLayout> layout =
      core::BlockLayout::Create(shape, block_size);
  if (!layout.ok()) return layout.status();
  if (layout->scale_count() == 0) {
    return core::BlockSizeInvalidError(
        "a dimension of 0 is split into blocks, which leaves no scale; "
        "expected "
        "block size 0 there");
  }
  if (layout->scale_count() > env.limits.scale_count) {
    return core::ScaleCountLimitError(env.limits.scale_count,
                                      layout->scale_count());
  }
  return layout;
}

absl::StatusOr<EncodingSource> EncodingSource::Open(
    const Caller& caller, const v1::EncodingReference& reference,
    const v1::TensorName& tensor_name) {
  v1::TensorName name = tensor_name;
  // Fields that the reference leaves out are the tensor's own.
  name.MergeFrom(reference.name());
  absl::StatusOr<EncodingKey> key = KeyFromProto(name);
  if (!key.ok()) return core::WithField(key.status(), "name");
  EncodingSource source;
  source.is_reference_ = true;
  source.key_ = *std::move(key);
  // No etag is longer: what is cut off matches none either.
  source.if_match_ = reference.etag().substr(0, kMostEtagBytes);
  source.store_ = caller.encodings;
  absl::optional<StoredEncoding> cached = source.store_->Cached(source.key_);
  if (cached.has_value()) {
    source.encoding_ = std::move(cached->encoding);
    source.etag_ = std::move(cached->etag);
  }
  return source;
}

absl::StatusOr<EncodingSource> EncodingSource::Open(const RpcEnvironment& env,
                                                    const v1::Encoding& proto) {
  const int64_t scale_count = ScaleCount(proto);
  if (scale_count > env.limits.scale_count) {
    return core::WithField(
        core::ScaleCountLimitError(env.limits.scale_count, scale_count),
        "block_size");
  }
  for (const auto& [field, count] :
       {std::pair<const char*, int>{"block_size", proto.block_size_size()},
        {"outer_block_size", proto.outer_block_size_size()},
        {"scale_shape", proto.scale_shape_size()}}) {
    if (count > kMostDimensions) {
      return core::WithField(
          core::BlockSizeInvalidError(
              absl::StrCat(count, " dimensions, expected those of the tensor")),
          field);
    }
  }
  absl::StatusOr<MemoryBudget::Lease> lease =
      ChargeEncoding(env, EncodingBytes(proto));
  if (!lease.ok()) return lease.status();
  absl::StatusOr<core::Encoding> encoding = EncodingFromProto(proto);
  if (!encoding.ok()) return encoding.status();
  encoding->degenerate_count = 0;
  EncodingSource source;
  source.lease_ = *std::move(lease);
  source.encoding_ =
      std::make_shared<const core::Encoding>(*std::move(encoding));
  return source;
}

bool EncodingSource::is_large() const {
  return encoding_ != nullptr && encoding_->scale.size() > kSmallScaleCount;
}

absl::StatusOr<ResolvedEncoding> EncodingSource::Resolve(
    const RpcEnvironment& env, absl::Span<const int64_t> shape) const {
  std::shared_ptr<const core::Encoding> encoding = encoding_;
  std::string etag = etag_;
  if (encoding == nullptr) {
    absl::StatusOr<StoredEncoding> stored = store_->Get(key_);
    if (!stored.ok()) return core::WithField(stored.status(), "name");
    encoding = std::move(stored->encoding);
    etag = std::move(stored->etag);
  }
  if (!if_match_.empty() && if_match_ != etag) {
    return core::WithField(core::EtagMismatchError(if_match_, etag), "etag");
  }
  std::shared_ptr<const MemoryBudget::Lease> lease;
  const int64_t bytes = core::MemoryBytes(*encoding);
  if (is_reference_ && bytes > kSmallBytes) {
    absl::StatusOr<std::shared_ptr<const MemoryBudget::Lease>> charged =
        env.budget->AcquireFor(encoding, bytes, kEncodingWayOut);
    if (!charged.ok()) return charged.status();
    lease = *std::move(charged);
  }
  absl::StatusOr<ResolvedEncoding> resolved =
      Fit(env, std::move(encoding), shape);
  if (resolved.ok()) {
    resolved->etag = std::move(etag);
    resolved->lease = std::move(lease);
    return resolved;
  }
  if (is_reference_) return resolved;
  if (core::ErrorReason(resolved.status()) != "SCALE_COUNT") {
    return core::WithField(resolved.status(), "block_size");
  }
  return core::WithField(
      resolved.status(),
      core::HasScaleCodes(encoding_->scale_type) ? "scale_code" : "scale");
}

absl::StatusOr<ResolvedSpec> ResolveSpec(const RpcEnvironment& env,
                                         const core::EncodingSpec& spec,
                                         absl::Span<const int64_t> shape) {
  const absl::string_view field =
      spec.granularity.has_value() ? "granularity" : "block_size";
  absl::StatusOr<core::EncodingSpec> resolved = core::ResolveSpec(spec, shape);
  if (!resolved.ok()) return core::WithField(resolved.status(), field);
  absl::StatusOr<core::BlockLayout> layout =
      CheckedLayout(env, shape, resolved->block_size);
  if (!layout.ok()) return core::WithField(layout.status(), field);
  return ResolvedSpec{
      *std::move(resolved),
      std::make_shared<const core::BlockLayout>(*std::move(layout))};
}

absl::StatusOr<ResolvedSpec> ResolveSpec(const RpcEnvironment& env,
                                         const v1::EncodingSpec& proto,
                                         absl::Span<const int64_t> shape) {
  absl::StatusOr<core::EncodingSpec> spec = SpecFromProto(proto);
  if (!spec.ok()) return spec.status();
  return ResolveSpec(env, *spec, shape);
}

absl::StatusOr<std::unique_ptr<TensorAccumulator>> TensorAccumulator::Create(
    const RpcEnvironment& env, core::ElementType element_type,
    std::shared_ptr<const core::BlockLayout> layout, int mantissa_bits,
    int64_t more_bytes) {
  const int64_t scale_count = layout->scale_count();
  int64_t bytes_per_scale =
      sizeof(core::Extremes) + sizeof(float) + sizeof(int32_t);
  if (mantissa_bits != kNoHistograms) {
    bytes_per_scale += sizeof(core::Histogram);
  }
  if (mantissa_bits == kDefaultMantissaBits) {
    mantissa_bits = core::DefaultMantissaBits(scale_count);
  }
  absl::StatusOr<MemoryBudget::Lease> lease = env.budget->Acquire(
      scale_count * bytes_per_scale + more_bytes, "send fewer tensors at once");
  if (!lease.ok()) return lease.status();
  return std::unique_ptr<TensorAccumulator>(new TensorAccumulator(
      env, element_type, std::move(layout), mantissa_bits, *std::move(lease)));
}

TensorAccumulator::TensorAccumulator(
    const RpcEnvironment& env, core::ElementType element_type,
    std::shared_ptr<const core::BlockLayout> layout, int mantissa_bits,
    MemoryBudget::Lease lease)
    : env_(env),
      element_type_(element_type),
      layout_(std::move(layout)),
      lease_(std::move(lease)),
      statistics_(layout_->scale_count(), mantissa_bits) {}

absl::Status TensorAccumulator::Reserve(int copies) {
  if (statistics_.mantissa_bits() == kNoHistograms) return absl::OkStatus();
  unasked_lease_.Release();
  absl::Status status = env_.budget->Grow(
      &lease_, copies * statistics_.memory_bytes(),
      "take a coarser granularity, fewer mantissa bits or min-max");
  if (!status.ok()) CountUnasked();
  return status;
}

void TensorAccumulator::CountUnasked() {
  env_.budget->Count(&unasked_lease_,
                     statistics_.memory_bytes() - lease_.bytes());
}

void TensorAccumulator::Update(int64_t offset_bytes,
                               absl::Span<const uint8_t> data) {
  const int64_t element_bytes = core::ElementSizeBytes(element_type_);
  statistics_.Update(*layout_, element_type_, offset_bytes / element_bytes,
                     static_cast<int64_t>(data.size()) / element_bytes,
                     data.data(), env_.pool);
  if (statistics_.mantissa_bits() != kNoHistograms) CountUnasked();
}

int64_t QuantumBytes(const RpcEnvironment& env,
                     const TensorAccumulator& accumulator) {
  constexpr int64_t kHistogramQuantumBytes = int64_t{1} << 20;
  return accumulator.statistics().mantissa_bits() == 0
             ? env.limits.chunk_bytes
             : std::min(env.limits.chunk_bytes, kHistogramQuantumBytes);
}

int MantissaBitsFor(const core::EncodingSpec& spec) {
  if (!core::NeedsHistograms(spec)) return TensorAccumulator::kNoHistograms;
  return spec.mantissa_bits != 0 ? spec.mantissa_bits
                                 : TensorAccumulator::kDefaultMantissaBits;
}

int MantissaBitsWhereHeld(const ResolvedSpec& spec) {
  constexpr int64_t kMostElements = int64_t{1} << 18;
  if (spec.layout->largest_block() <= kMostElements) {
    return TensorAccumulator::kNoHistograms;
  }
  return core::MantissaBitsAtHand(spec.spec);
}

int64_t SearchBytes(const RpcEnvironment& env, const ResolvedSpec& spec) {
  if (!core::NeedsHistograms(spec.spec) ||
      MantissaBitsWhereHeld(spec) != TensorAccumulator::kNoHistograms) {
    return 0;
  }
  return std::min(core::LaneCount(env.helper_pool),
                  spec.layout->scale_count()) *
         core::HeldTensor::TableBytes(*spec.layout,
                                      core::MantissaBitsAtHand(spec.spec));
}

bool TakesLong(const core::EncodingSpec& spec, int64_t scale_count,
               int64_t element_count) {
  // What is no search takes some nanoseconds for each scale and, where it needs
  // their histograms, for each element.
  constexpr int64_t kScales = int64_t{1} << 15;
  constexpr int64_t kElements = int64_t{1} << 17;
  return scale_count > kScales ||
         (core::NeedsHistograms(spec) && element_count > kElements) ||
         core::SearchTime(spec, scale_count, element_count) > kShortWork;
}

absl::StatusOr<CalibratedEncoding> CalibrateTensor(
    const RpcEnvironment& env, const ResolvedSpec& spec,
    const core::TensorStatistics& statistics,
    absl::Span<const core::Extremes> moving_average, core::ThreadPool* pool,
    core::StopToken stop, const core::HeldTensor* held) {
  MemoryBudget::Lease lease;
  env.budget->Count(&lease, core::CalibrationBytes(spec.spec, *spec.layout,
                                                   statistics, pool));
  absl::StatusOr<core::Calibration> calibration = core::Calibrate(
      spec.spec, *spec.layout, statistics, moving_average, pool, stop, held);
  if (!calibration.ok()) return calibration.status();
  return CalibratedEncoding{
      {std::make_shared<const core::Encoding>(std::move(calibration->encoding)),
       spec.layout, ""},
      std::move(calibration->prediction),
      calibration->mantissa_bits};
}

google::protobuf::Timestamp ToTimestamp(absl::Time time) {
  // What a Timestamp can say: years 1 to 9999.
  constexpr absl::Time kFirst = absl::FromUnixSeconds(-62135596800);
  constexpr absl::Time kLast = absl::FromUnixSeconds(253402300799);
  const int64_t us =
      absl::ToUnixMicros(std::min(std::max(time, kFirst), kLast));
  constexpr int64_t kSecond = 1'000'000;
  const int64_t fraction = (us % kSecond + kSecond) % kSecond;
  google::protobuf::Timestamp timestamp;
  timestamp.set_seconds((us - fraction) / kSecond);
  timestamp.set_nanos(static_cast<int32_t>(fraction * 1000));
  return timestamp;
}

void StoredEncodingToProto(const EncodingKey& key, const StoredEncoding& stored,
                           bool with_encoding, v1::StoredEncoding* proto) {
  proto->mutable_name()->set_model(key.model);
  proto->mutable_name()->set_revision(key.revision);
  proto->mutable_name()->set_tensor(key.tensor);
  proto->set_etag(stored.etag);
  proto->set_generation(stored.generation);
  *proto->mutable_update_time() = ToTimestamp(stored.update_time);
  if (stored.encoding == nullptr) return;
  proto->set_format(static_cast<v1::NumberFormat>(stored.encoding->format));
  proto->set_scale_count(stored.encoding->scale.size());
  if (with_encoding) {
    EncodingToProto(*stored.encoding, proto->mutable_encoding());
  }
}

}  // namespace quantd::server
