#include "server/rpc/tensor_input.h"

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "google/protobuf/util/time_util.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

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

absl::StatusOr<TensorDescription> CheckDescription(
    const RpcEnvironment& env, const v1::TensorDescription& proto) {
  absl::StatusOr<TensorDescription> description = DescriptionFromProto(proto);
  if (!description.ok()) {
    return core::WithField(description.status(), "header.tensor");
  }
  const int64_t size_bytes = description->element_count *
                             core::ElementSizeBytes(description->element_type);
  if (size_bytes > env.limits.tensor_bytes) {
    env.metrics->LimitRejected("TENSOR_TOO_LARGE");
    return core::WithField(
        core::TensorTooLargeError(size_bytes, env.limits.tensor_bytes),
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
    env.metrics->LimitRejected("SCALE_COUNT_LIMIT");
    return core::ScaleCountLimitError(env.limits.scale_count,
                                      layout->scale_count());
  }
  return layout;
}

absl::StatusOr<ResolvedEncoding> ResolveReference(
    const RpcEnvironment& env, const v1::EncodingReference& reference,
    const v1::TensorName& tensor_name, absl::Span<const int64_t> shape) {
  v1::TensorName name = tensor_name;
  // Fields that the reference leaves out are the tensor's own.
  name.MergeFrom(reference.name());
  absl::StatusOr<EncodingKey> key = KeyFromProto(name);
  if (!key.ok()) return core::WithField(key.status(), "name");
  absl::StatusOr<StoredEncoding> stored = env.store->Get(*key);
  if (!stored.ok()) return core::WithField(stored.status(), "name");
  if (!reference.etag().empty() && reference.etag() != stored->etag) {
    return core::WithField(
        core::EtagMismatchError(reference.etag(), stored->etag), "etag");
  }
  absl::StatusOr<ResolvedEncoding> resolved =
      Fit(env, std::move(stored->encoding), shape);
  if (resolved.ok()) resolved->etag = std::move(stored->etag);
  return resolved;
}

absl::StatusOr<ResolvedEncoding> ResolveInline(
    const RpcEnvironment& env, const v1::Encoding& proto,
    absl::Span<const int64_t> shape) {
  absl::StatusOr<core::Encoding> encoding = EncodingFromProto(proto);
  if (!encoding.ok()) return encoding.status();
  encoding->degenerate_count = 0;
  absl::StatusOr<ResolvedEncoding> resolved = Fit(
      env, std::make_shared<const core::Encoding>(*std::move(encoding)), shape);
  if (resolved.ok()) return resolved;
  const bool at_scale = core::ErrorReason(resolved.status()) == "SCALE_COUNT";
  return core::WithField(resolved.status(), at_scale ? "scale" : "block_size");
}

absl::StatusOr<std::unique_ptr<SpecCalibration>> SpecCalibration::Create(
    const RpcEnvironment& env, const v1::EncodingSpec& proto,
    const TensorDescription& description) {
  absl::StatusOr<core::EncodingSpec> spec = SpecFromProto(proto);
  if (!spec.ok()) return spec.status();
  absl::StatusOr<core::BlockLayout> layout =
      CheckedLayout(env, description.shape, spec->block_size);
  if (!layout.ok()) return core::WithField(layout.status(), "block_size");
  constexpr int64_t kBytesPerScale =
      sizeof(core::Extremes) + sizeof(float) + sizeof(int32_t);
  absl::StatusOr<MemoryBudget::Lease> lease = env.budget->Acquire(
      layout->scale_count() * kBytesPerScale, "send fewer tensors at once");
  if (!lease.ok()) {
    env.metrics->LimitRejected("MEMORY_BUDGET");
    return lease.status();
  }
  return std::unique_ptr<SpecCalibration>(
      new SpecCalibration(env, *std::move(spec), *std::move(layout),
                          description.element_type, *std::move(lease)));
}

SpecCalibration::SpecCalibration(const RpcEnvironment& env,
                                 core::EncodingSpec spec,
                                 core::BlockLayout layout,
                                 core::ElementType element_type,
                                 MemoryBudget::Lease lease)
    : env_(env),
      spec_(std::move(spec)),
      layout_(std::make_shared<const core::BlockLayout>(std::move(layout))),
      element_type_(element_type),
      lease_(std::move(lease)),
      statistics_(layout_->scale_count()) {}

void SpecCalibration::Update(int64_t offset_bytes,
                             absl::Span<const uint8_t> data) {
  const int64_t element_bytes = core::ElementSizeBytes(element_type_);
  statistics_.Update(*layout_, element_type_, offset_bytes / element_bytes,
                     static_cast<int64_t>(data.size()) / element_bytes,
                     data.data(), env_.pool);
}

absl::StatusOr<ResolvedEncoding> SpecCalibration::Calibrate() const {
  absl::StatusOr<core::Calibration> calibration =
      core::Calibrate(spec_, *layout_, statistics_, {}, env_.pool);
  if (!calibration.ok()) return calibration.status();
  return ResolvedEncoding{
      std::make_shared<const core::Encoding>(std::move(calibration->encoding)),
      layout_, ""};
}

void StoredEncodingToProto(const EncodingKey& key, const StoredEncoding& stored,
                           bool with_encoding, v1::StoredEncoding* proto) {
  proto->mutable_name()->set_model(key.model);
  proto->mutable_name()->set_revision(key.revision);
  proto->mutable_name()->set_tensor(key.tensor);
  proto->set_etag(stored.etag);
  proto->set_generation(stored.generation);
  *proto->mutable_update_time() =
      google::protobuf::util::TimeUtil::MicrosecondsToTimestamp(
          absl::ToUnixMicros(stored.update_time));
  if (stored.encoding == nullptr) return;
  proto->set_format(static_cast<v1::NumberFormat>(stored.encoding->format));
  proto->set_scale_count(stored.encoding->scale.size());
  if (with_encoding) {
    EncodingToProto(*stored.encoding, proto->mutable_encoding());
  }
}

}  // namespace quantd::server
