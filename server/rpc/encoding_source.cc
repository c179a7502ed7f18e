#include "server/rpc/encoding_source.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/encoding_spec.h"
#include "core/errors.h"
#include "core/formats/scale_type.h"
#include "core/parallel/stop_token.h"
#include "core/types/encoding_memory.h"
#include "core/types/tensor_slice.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

// Far more than the store gives one.
constexpr size_t kMostEtagBytes = 256;
// Far more than a tensor has: what comes after is not made for longer lists.
constexpr int kMostDimensions = 1024;
// Most bytes of a message beside scales, such as names, shapes and a codebook.
constexpr int64_t kMostFrameBytes = int64_t{8} << 10;
// Scales that are written into an answer within microseconds.
constexpr size_t kSmallScaleCount = 1024;

absl::StatusOr<MemoryBudget::Lease> ChargeEncoding(const RpcEnvironment& env,
                                                   int64_t bytes) {
  if (bytes <= kSmallBytes) return MemoryBudget::Lease();
  return env.budget->Acquire(bytes, kEncodingWayOut);
}

// Errors: SCALE_COUNT_LIMIT, unless so many scales go into an answer.
absl::Status CheckTransport(const RpcEnvironment& env, ScaleTransport transport,
                            int64_t scale_count, core::ScaleType scale_type,
                            bool has_zero_points, int64_t outer_count) {
  if (transport == ScaleTransport::kChunks) return absl::OkStatus();
  const int64_t most = env.limits.chunk_bytes;
  // In a message they take no more than in memory.
  const int64_t bytes =
      scale_count * core::MemoryPerScale(scale_type, has_zero_points) +
      outer_count * static_cast<int64_t>(sizeof(float)) +
      std::min(kMostFrameBytes, most / 8);
  return bytes <= most ? absl::OkStatus()
                       : core::MessageScaleLimitError(most, bytes);
}

// The encoding of the whole becomes that of the slice, charged.
absl::Status CutEncoding(const RpcEnvironment& env,
                         const core::TensorSlice& slice,
                         std::shared_ptr<const core::Encoding>* encoding,
                         std::shared_ptr<const MemoryBudget::Lease>* lease) {
  const absl::StatusOr<core::BlockLayout> whole =
      CheckedLayout(slice.global_shape, (*encoding)->block_size);
  if (!whole.ok()) return whole.status();
  const absl::StatusOr<core::BlockLayout> part =
      CheckedLayout(slice.shape, (*encoding)->block_size);
  if (!part.ok()) return part.status();
  absl::Status status = core::CheckEncodingFits(**encoding, *whole);
  if (!status.ok()) return status;
  const int64_t scale_count = whole->scale_count();
  absl::StatusOr<MemoryBudget::Lease> charged =
      ChargeEncoding(env, (core::MemoryBytes(**encoding) + scale_count - 1) /
                              scale_count * part->scale_count());
  if (!charged.ok()) return charged.status();
  absl::StatusOr<core::Encoding> cut = core::CutToSlice(slice, **encoding);
  if (!cut.ok()) return cut.status();
  *encoding = std::make_shared<const core::Encoding>(*std::move(cut));
  *lease = std::make_shared<const MemoryBudget::Lease>(*std::move(charged));
  return absl::OkStatus();
}

// An encoding, with the layout that it has on this tensor. Errors are at no
// field.
absl::StatusOr<ResolvedEncoding> Fit(
    const RpcEnvironment& env, std::shared_ptr<const core::Encoding> encoding,
    bool in_chunks, const TensorDescription& description,
    ScaleTransport transport) {
  std::shared_ptr<const MemoryBudget::Lease> lease;
  if (description.slice.has_value()) {
    if (in_chunks) {
      return core::ShapeInvalidError(
          "a slice with scales in chunks, expected them in the encoding");
    }
    absl::Status status =
        CutEncoding(env, *description.slice, &encoding, &lease);
    if (!status.ok()) return status;
  }
  absl::StatusOr<core::BlockLayout> layout =
      CheckedLayout(description.shape, encoding->block_size);
  if (!layout.ok()) return layout.status();
  if (in_chunks) {
    const absl::Span<const int64_t> scale_shape = layout->scale_shape();
    if (!encoding->scale_shape.empty() &&
        encoding->scale_shape != scale_shape) {
      return core::ScaleShapeError(
          absl::StrCat("encoding has scales of shape [",
                       absl::StrJoin(encoding->scale_shape, ","),
                       "], expected [", absl::StrJoin(scale_shape, ","), "]"));
    }
    core::Encoding shaped = *encoding;
    shaped.scale_shape.assign(scale_shape.begin(), scale_shape.end());
    encoding = std::make_shared<const core::Encoding>(std::move(shaped));
  } else {
    absl::Status status = core::CheckEncodingFits(*encoding, *layout);
    if (!status.ok()) return status;
    status =
        CheckTransport(env, transport, layout->scale_count(),
                       encoding->scale_type, core::HasZeroPoints(*encoding),
                       static_cast<int64_t>(encoding->outer_scale.size()));
    if (!status.ok()) return status;
  }
  return ResolvedEncoding{
      std::move(encoding),
      std::make_shared<const core::BlockLayout>(*std::move(layout)), "",
      std::move(lease)};
}

// Like ParseSpec, whatever the importance.
absl::StatusOr<core::EncodingSpec> ParseElementSpec(
    const RpcEnvironment& env, const v1::EncodingSpec& proto,
    MemoryBudget::Lease* lease) {
  constexpr int64_t kCopies = 2;
  const int64_t count = int64_t{proto.scale_range_min_size()} +
                        int64_t{proto.scale_range_max_size()};
  const int64_t bytes = kCopies * count * static_cast<int64_t>(sizeof(double));
  if (bytes > kSmallBytes) {
    absl::Status charged = env.budget->Grow(
        lease, lease->bytes() + bytes, "send fewer ranges of scales at once");
    if (!charged.ok()) return charged;
  }
  return SpecFromProto(proto);
}

}  // namespace

absl::StatusOr<core::BlockLayout> CheckedLayout(
    absl::Span<const int64_t> shape, absl::Span<const int64_t> block_size) {
  absl::StatusOr<core::BlockLayout> layout =
      core::BlockLayout::Create(shape, block_size);
  if (!layout.ok()) return layout.status();
  if (layout->scale_count() == 0) {
    return core::BlockSizeInvalidError(
        "a dimension of 0 is split into blocks, which leaves no scale; "
        "expected block size 0 there");
  }
  return layout;
}

absl::Status OpenIncoming(const RpcEnvironment& env, int64_t begin, int64_t end,
                          bool keep_all, ResolvedEncoding* resolved) {
  if (!resolved->in_chunks) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<IncomingScales>> incoming =
      IncomingScales::Create(env, *resolved->encoding, *resolved->layout,
                             resolved->chunks_have_zero_points, begin, end,
                             keep_all);
  if (!incoming.ok()) return incoming.status();
  resolved->incoming = *std::move(incoming);
  const core::ScaleWindow& window = resolved->incoming->window();
  resolved->encoding = std::shared_ptr<const core::Encoding>(
      resolved->incoming, &window.encoding());
  resolved->layout = std::shared_ptr<const core::BlockLayout>(
      resolved->incoming, &window.layout());
  return absl::OkStatus();
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
      ChargeEncoding(env, EncodingMemoryBytes(proto));
  if (!lease.ok()) return lease.status();
  absl::StatusOr<core::Encoding> encoding =
      proto.scales_in_chunks() ? EncodingWithoutScalesFromProto(proto)
                               : EncodingFromProto(proto);
  if (!encoding.ok()) return encoding.status();
  encoding->degenerate_count = 0;
  EncodingSource source;
  source.in_chunks_ = proto.scales_in_chunks();
  source.chunks_have_zero_points_ = proto.chunks_have_zero_points();
  source.lease_ = *std::move(lease);
  source.encoding_ =
      std::make_shared<const core::Encoding>(*std::move(encoding));
  return source;
}

bool EncodingSource::is_large() const {
  return encoding_ != nullptr && encoding_->scale.size() > kSmallScaleCount;
}

absl::StatusOr<ResolvedEncoding> EncodingSource::Resolve(
    const RpcEnvironment& env, const TensorDescription& description,
    ScaleTransport transport) const {
  std::shared_ptr<const core::Encoding> encoding = encoding_;
  std::string etag = etag_;
  MemoryBudget::Lease read_lease;
  if (encoding == nullptr) {
    absl::Status refused;
    absl::StatusOr<StoredEncoding> stored =
        store_->Read(key_, [&](int64_t bytes) {
          if (bytes > kSmallBytes) {
            refused = env.budget->Grow(&read_lease, bytes, kEncodingWayOut);
          }
          return refused;
        });
    if (!refused.ok()) return refused;
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
        env.budget->AcquireFor(encoding, bytes, kEncodingWayOut,
                               std::move(read_lease));
    if (!charged.ok()) return charged.status();
    lease = *std::move(charged);
  }
  absl::StatusOr<ResolvedEncoding> resolved =
      Fit(env, std::move(encoding), in_chunks_, description, transport);
  if (resolved.ok()) {
    resolved->in_chunks = in_chunks_;
    resolved->chunks_have_zero_points = chunks_have_zero_points_;
    resolved->etag = std::move(etag);
    // A slice's part has its own.
    if (!description.slice.has_value()) resolved->lease = std::move(lease);
    return resolved;
  }
  if (core::ErrorReason(resolved.status()) == "SHAPE_INVALID") return resolved;
  if (is_reference_) return resolved;
  if (core::ErrorReason(resolved.status()) != "SCALE_COUNT") {
    return core::WithField(resolved.status(), "block_size");
  }
  if (in_chunks_) return core::WithField(resolved.status(), "scale_shape");
  return core::WithField(
      resolved.status(),
      core::HasScaleCodes(encoding_->scale_type) ? "scale_code" : "scale");
}

absl::StatusOr<core::EncodingSpec> ParseSpec(const RpcEnvironment& env,
                                             const v1::EncodingSpec& proto,
                                             MemoryBudget::Lease* lease) {
  if (proto.has_importance()) {
    return core::WithField(
        core::MethodInvalidError(
            "importance needs the elements, which statistics do not have; "
            "quantize the tensor itself, with store, or evaluate it"),
        "importance");
  }
  return ParseElementSpec(env, proto, lease);
}

absl::StatusOr<ResolvedSpec> ResolveSpec(const RpcEnvironment& env,
                                         const core::EncodingSpec& spec,
                                         absl::Span<const int64_t> shape,
                                         ScaleTransport transport) {
  const absl::string_view field =
      spec.granularity.has_value() ? "granularity" : "block_size";
  absl::StatusOr<core::EncodingSpec> resolved = core::ResolveSpec(spec, shape);
  if (!resolved.ok()) {
    // METHOD_INVALID has a field of its own.
    return core::ErrorReason(resolved.status()) == "METHOD_INVALID"
               ? resolved.status()
               : core::WithField(resolved.status(), field);
  }
  absl::StatusOr<core::BlockLayout> layout =
      CheckedLayout(shape, resolved->block_size);
  if (!layout.ok()) return core::WithField(layout.status(), field);
  core::Encoding outline;
  outline.scale_type = core::EffectiveScaleType(spec);
  outline.block_size = resolved->block_size;
  outline.outer_block_size = resolved->outer_block_size;
  absl::StatusOr<core::BlockLayout> outer_layout =
      OuterLayoutOf(outline, *layout);
  if (!outer_layout.ok()) return outer_layout.status();
  absl::Status status = CheckTransport(
      env, transport, layout->scale_count(), outline.scale_type,
      core::EffectiveSymmetry(spec) == core::Symmetry::kAsymmetric,
      outer_layout->scale_count());
  if (!status.ok()) return core::WithField(std::move(status), field);
  return ResolvedSpec{
      *std::move(resolved),
      std::make_shared<const core::BlockLayout>(*std::move(layout))};
}

namespace {

// With `lease` of the ranges of its scales.
absl::StatusOr<ResolvedSpec> ResolveCharged(const RpcEnvironment& env,
                                            const core::EncodingSpec& spec,
                                            absl::Span<const int64_t> shape,
                                            ScaleTransport transport,
                                            MemoryBudget::Lease lease) {
  absl::StatusOr<ResolvedSpec> resolved =
      ResolveSpec(env, spec, shape, transport);
  if (resolved.ok() && lease.bytes() > 0) {
    resolved->lease =
        std::make_shared<const MemoryBudget::Lease>(std::move(lease));
  }
  return resolved;
}

// A spec for the whole, and the outer maxima that come with it, become those of
// the slice.
// Errors: as ResolveElementSpec.
absl::Status CutSpec(const RpcEnvironment& env, const core::TensorSlice& slice,
                     core::EncodingSpec* spec,
                     std::vector<float>* outer_maximum) {
  const absl::string_view field =
      spec->granularity.has_value() ? "granularity" : "block_size";
  if (spec->unsigned_if_non_negative) {
    return core::WithField(
        core::SymmetryInvalidError(
            "unsigned_if_non_negative depends on elements that a slice does "
            "not have, expected an unsigned or a signed format"),
        "unsigned_if_non_negative");
  }
  absl::StatusOr<ResolvedSpec> whole =
      ResolveSpec(env, *spec, slice.global_shape, ScaleTransport::kChunks);
  if (!whole.ok()) return whole.status();
  *spec = std::move(whole->spec);
  const bool has_ranges = spec->method == core::CalibrationMethod::kFixedRange;
  absl::Status status =
      has_ranges ? core::CheckCutsNoBlock(slice, spec->block_size)
                 : core::CheckHasWholeBlocks(slice, spec->block_size);
  if (!status.ok()) return core::WithField(status, field);
  spec->scale_range_min = core::CutToSlice(
      slice, spec->block_size, absl::MakeConstSpan(spec->scale_range_min));
  spec->scale_range_max = core::CutToSlice(
      slice, spec->block_size, absl::MakeConstSpan(spec->scale_range_max));
  if (!core::HasOuterScales(core::EffectiveScaleType(*spec))) {
    return absl::OkStatus();
  }
  if (outer_maximum->empty()) {
    return core::WithField(
        core::CheckHasWholeBlocks(slice, spec->outer_block_size),
        "outer_block_size");
  }
  status = core::CheckOuterMaxima(*spec, *whole->layout, *outer_maximum);
  if (!status.ok()) return status;
  status = core::CheckCutsNoBlock(slice, spec->outer_block_size);
  if (!status.ok()) return core::WithField(status, "outer_block_size");
  *outer_maximum = core::CutToSlice(slice, spec->outer_block_size,
                                    absl::MakeConstSpan(*outer_maximum));
  return absl::OkStatus();
}

}  // namespace

StoreUse ImportanceUse(const ResolvedSpec& spec) {
  return spec.importance != nullptr && spec.importance->waits()
             ? StoreUse::kReadStatistics
             : StoreUse::kNone;
}

absl::Status ReadImportance(const RpcEnvironment& env, const ResolvedSpec& spec,
                            absl::string_view field, core::StopToken stop) {
  return spec.importance == nullptr
             ? absl::OkStatus()
             : core::WithField(spec.importance->Read(env, stop), field);
}

absl::StatusOr<ResolvedSpec> ResolveSpec(const RpcEnvironment& env,
                                         const v1::EncodingSpec& proto,
                                         absl::Span<const int64_t> shape,
                                         ScaleTransport transport) {
  MemoryBudget::Lease lease;
  absl::StatusOr<core::EncodingSpec> spec = ParseSpec(env, proto, &lease);
  if (!spec.ok()) return spec.status();
  return ResolveCharged(env, *spec, shape, transport, std::move(lease));
}

absl::StatusOr<ResolvedSpec> ResolveElementSpec(
    const RpcEnvironment& env, const Caller& caller, const v1::TensorName& name,
    const v1::EncodingSpec& proto, absl::Span<const float> maxima,
    const TensorDescription& description, ScaleTransport transport) {
  MemoryBudget::Lease lease;
  absl::StatusOr<core::EncodingSpec> spec =
      ParseElementSpec(env, proto, &lease);
  if (!spec.ok()) return spec.status();
  std::vector<float> outer_maximum(maxima.begin(), maxima.end());
  if (description.slice.has_value()) {
    absl::Status status =
        CutSpec(env, *description.slice, &*spec, &outer_maximum);
    if (!status.ok()) return status;
  }
  absl::StatusOr<ResolvedSpec> resolved = ResolveCharged(
      env, *spec, description.shape, transport, std::move(lease));
  if (!resolved.ok()) return resolved;
  absl::Status status =
      core::CheckOuterMaxima(resolved->spec, *resolved->layout, outer_maximum);
  if (!status.ok()) return status;
  resolved->outer_maximum = std::move(outer_maximum);
  if (!proto.has_importance()) return resolved;
  absl::StatusOr<std::shared_ptr<SpecImportance>> importance =
      SpecImportance::Create(env, caller, proto.importance(), name,
                             resolved->spec, *resolved->layout, description);
  if (!importance.ok()) {
    return core::WithField(importance.status(), "importance");
  }
  resolved->importance = *std::move(importance);
  return resolved;
}

}  // namespace quantd::server
