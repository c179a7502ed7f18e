#include "client/cpp/scale_feed.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "client/cpp/scale_chunks.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"

namespace quantd::internal {
namespace {

constexpr uint64_t kPieceBytes = 512 << 10;
constexpr uint64_t kOuterBytes = sizeof(float);

absl::Status CheckSize(absl::string_view what, int64_t count, int64_t each,
                       size_t got) {
  if (static_cast<uint64_t>(count * each) == got) return absl::OkStatus();
  return ArgumentInvalidError(absl::StrCat("expected ", count, " ", what,
                                           " of ", each, " bytes, got ", got,
                                           " bytes"));
}

}  // namespace

ScalePieces::ScalePieces(const Encoding& encoding, const Scales& scales)
    : scales_(scales),
      scale_bytes_(
          static_cast<uint64_t>(ScaleSizeBytes(ScaleTypeOf(encoding)))) {
  encoding_.set_format(encoding.format());
  encoding_.set_exclude_zero(encoding.exclude_zero());
  encoding_.set_zero_points_are_real(encoding.zero_points_are_real());
}

void ScalePieces::Rewind() {
  sent_ = 0;
  sent_outer_ = 0;
}

std::optional<v1::ScaleChunk> ScalePieces::Next(uint64_t end) {
  const auto text = [](absl::Span<const uint8_t> bytes) {
    return absl::string_view(reinterpret_cast<const char*>(bytes.data()),
                             bytes.size());
  };
  v1::ScaleChunk chunk;
  // All of them first: there are few.
  const uint64_t outer_count = scales_.outer_scale.size() / kOuterBytes;
  if (sent_outer_ < outer_count) {
    const uint64_t count =
        std::min(kPieceBytes / kOuterBytes, outer_count - sent_outer_);
    chunk.set_first(sent_);
    chunk.set_first_outer(sent_outer_);
    chunk.set_outer_scale(std::string(text(scales_.outer_scale.subspan(
        sent_outer_ * kOuterBytes, count * kOuterBytes))));
    sent_outer_ += count;
    return chunk;
  }
  if (sent_ >= end) return std::nullopt;
  const bool has_zero_points = !scales_.zero_point.empty();
  const uint64_t each = scale_bytes_ + (has_zero_points ? sizeof(int32_t) : 0);
  const uint64_t count = std::min(kPieceBytes / each, end - sent_);
  chunk.set_first(sent_);
  chunk.set_first_outer(sent_outer_);
  chunk.set_scale(std::string(
      text(scales_.scale.subspan(sent_ * scale_bytes_, count * scale_bytes_))));
  if (has_zero_points) {
    chunk.set_zero_point(NarrowZeroPoints(
        encoding_, scales_.zero_point.subspan(sent_ * sizeof(int32_t),
                                              count * sizeof(int32_t))));
  }
  sent_ += count;
  return chunk;
}

absl::StatusOr<ScaleFeed> ScaleFeed::Create(absl::Span<const int64_t> shape,
                                            const Encoding& encoding,
                                            const Scales& scales,
                                            int64_t payload_bits) {
  ScaleFeed feed(encoding, scales);
  feed.shape_.assign(shape.begin(), shape.end());
  feed.block_size_.assign(encoding.block_size().begin(),
                          encoding.block_size().end());
  const absl::StatusOr<int64_t> elements = ElementCount(shape);
  if (!elements.ok()) return elements.status();
  feed.element_count_ = static_cast<uint64_t>(*elements);
  feed.payload_bits_ = static_cast<uint64_t>(payload_bits);
  const absl::StatusOr<ScaleCounts> counts = CountScales(shape, encoding);
  if (!counts.ok()) return counts.status();
  absl::Status status =
      CheckSize("scales", counts->scale, ScaleSizeBytes(ScaleTypeOf(encoding)),
                scales.scale.size());
  status.Update(CheckSize("outer scales", counts->outer_scale, kOuterBytes,
                          scales.outer_scale.size()));
  if (!scales.zero_point.empty()) {
    status.Update(CheckSize("zero points", counts->scale, sizeof(int32_t),
                            scales.zero_point.size()));
  }
  if (!status.ok()) return status;
  return feed;
}

std::optional<v1::ScaleChunk> ScaleFeed::Next(uint64_t end_bytes) {
  if (element_count_ == 0) return std::nullopt;
  const uint64_t elements = std::min(
      element_count_, (end_bytes * 8 + payload_bits_ - 1) / payload_bits_);
  return pieces_.Next(elements == 0 ? 0
                                    : static_cast<uint64_t>(ScalesOfFirst(
                                          shape_, block_size_,
                                          static_cast<int64_t>(elements))));
}

}  // namespace quantd::internal
