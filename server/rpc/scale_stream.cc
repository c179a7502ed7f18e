#include "server/rpc/scale_stream.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/formats/scale_type.h"
#include "core/types/scale_bytes.h"
#include "server/rpc/encoding_source.h"
#include "server/wire/encoding_proto.h"

namespace quantd::server {

absl::StatusOr<core::BlockLayout> OuterLayoutOf(
    const core::Encoding& encoding, const core::BlockLayout& layout) {
  if (!core::HasOuterScales(encoding.scale_type)) {
    return core::BlockLayout::Create({}, {});
  }
  return core::OuterLayout(encoding, layout.scale_shape());
}

absl::StatusOr<std::unique_ptr<IncomingScales>> IncomingScales::Create(
    const RpcEnvironment& env, const core::Encoding& encoding,
    const core::BlockLayout& layout, bool has_zero_points, int64_t begin,
    int64_t end, bool keep_all) {
  absl::StatusOr<core::BlockLayout> outer_layout =
      OuterLayoutOf(encoding, layout);
  if (!outer_layout.ok()) return outer_layout.status();
  core::ScaleWindow window(encoding, layout, *std::move(outer_layout),
                           has_zero_points, begin, end);
  return std::unique_ptr<IncomingScales>(
      new IncomingScales(env, std::move(window), keep_all));
}

absl::Status IncomingScales::Push(absl::Span<const std::string> parts) {
  v1::ScaleChunk chunk;
  for (const std::string& part : parts) {
    if (!chunk.MergeFromString(part)) {
      return core::MessageMalformedError(
          "scales are not protobuf, expected a ScaleChunk");
    }
  }
  return Push(chunk);
}

absl::Status IncomingScales::Push(const v1::ScaleChunk& chunk) {
  int64_t count = static_cast<int64_t>(chunk.scale().size()) /
                  core::ScaleSizeBytes(window_.encoding().scale_type);
  // All of them, if all are kept: they do not move then.
  const int64_t held = static_cast<int64_t>(window_.encoding().scale.size());
  if (keep_all_) {
    count =
        std::max(count, window_.needed().end - window_.needed().first - held);
  }
  const int64_t bytes = window_.MemoryBytes(count) +
                        static_cast<int64_t>(chunk.outer_scale().size());
  if (bytes > std::max(kSmallBytes, lease_.bytes())) {
    absl::Status status =
        env_.budget->Grow(&lease_, bytes,
                          "send scales beside the elements that use them, or "
                          "fewer tensors at once");
    if (!status.ok()) return status;
  }
  if (keep_all_) window_.Reserve();
  return window_.Append(ScaleBytesOf(chunk));
}

absl::Status IncomingScales::Advance(int64_t first, int64_t count,
                                     int64_t keep) {
  if (!keep_all_) window_.Drop(first, keep);
  absl::Status status = window_.CheckCovers(first, count);
  return status.ok() ? status : core::WithField(status, "scales");
}

absl::StatusOr<std::shared_ptr<const core::Encoding>>
IncomingScales::TakeWhole() {
  const int64_t count = window_.layout().scale_count();
  if (window_.begin() != 0 || window_.end() != count) {
    return core::WithField(
        core::ScaleCountError(count, window_.end() - window_.begin()),
        "scales");
  }
  return std::make_shared<const core::Encoding>(window_.TakeEncoding());
}

ScaleAnswer::ScaleAnswer(const RpcEnvironment& env,
                         core::BlockLayout outer_layout,
                         const core::BlockLayout::ScaleRange& needed)
    : most_bytes_(std::min(env.limits.response_chunk_bytes,
                           env.limits.chunk_bytes / 2)),
      outer_layout_(std::move(outer_layout)),
      next_(needed.first) {
  if (needed.first < needed.end &&
      outer_layout_.element_count() >= needed.end) {
    next_outer_ =
        outer_layout_.ScaleBounds(needed.first, needed.end - needed.first)
            .first;
  }
}

void ScaleAnswer::Send(const v1::ScaleChunk& chunk, ChunkWriter* out) {
  const core::ScaleWindow::Bytes bytes = ScaleBytesOf(chunk);
  scale_checksum_.Update(bytes.scale);
  zero_point_checksum_.Update(bytes.zero_point);
  outer_scale_checksum_.Update(bytes.outer_scale);
  out->AddScales(chunk);
}

void ScaleAnswer::SendUpTo(int64_t end, const core::Encoding& encoding,
                           int64_t first, int64_t first_outer,
                           ChunkWriter* out) {
  const bool has_outer = core::HasOuterScales(encoding.scale_type);
  const auto float_bytes = static_cast<int64_t>(sizeof(float));
  const int64_t bytes_per_scale =
      core::ScaleSizeBytes(encoding.scale_type) +
      (core::HasZeroPoints(encoding) ? core::ZeroPointSizeBytes(encoding) : 0) +
      (has_outer ? float_bytes : 0);
  const int64_t at_once = std::max<int64_t>(1, most_bytes_ / bytes_per_scale);
  while (next_ < end) {
    const int64_t count = std::min(at_once, end - next_);
    v1::ScaleChunk chunk;
    if (has_outer) {
      const int64_t outer_end = outer_layout_.ScaleBounds(next_, count).end;
      // More than bytes_per_scale has reckoned with.
      while (outer_end - next_outer_ > count) {
        const int64_t outer_count =
            std::min(std::max<int64_t>(1, most_bytes_ / float_bytes),
                     outer_end - next_outer_);
        v1::ScaleChunk outer;
        OuterScalesToProto(encoding, first_outer, next_outer_,
                           next_outer_ + outer_count, &outer);
        Send(outer, out);
        next_outer_ += outer_count;
      }
      if (next_outer_ < outer_end) {
        OuterScalesToProto(encoding, first_outer, next_outer_, outer_end,
                           &chunk);
        next_outer_ = outer_end;
      }
    }
    ScalesToProto(encoding, first, next_, next_ + count, &chunk);
    Send(chunk, out);
    next_ += count;
  }
}

void ScaleAnswer::WriteSummary(v1::QuantizeSummary* summary) const {
  summary->set_scale_checksum_xxh3(scale_checksum_.Digest());
  summary->set_zero_point_checksum_xxh3(zero_point_checksum_.Digest());
  summary->set_outer_scale_checksum_xxh3(outer_scale_checksum_.Digest());
}

}  // namespace quantd::server
