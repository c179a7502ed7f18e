#include "server/wire/chunk_reader.h"

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/errors.h"

namespace quantd::server {

ChunkReader::ChunkReader(int64_t begin_bytes, int64_t end_bytes,
                         int64_t unit_bytes, int64_t granule_bytes,
                         int64_t chunk_limit_bytes)
    : end_(end_bytes),
      unit_(unit_bytes),
      granule_(granule_bytes),
      chunk_limit_(chunk_limit_bytes),
      position_(begin_bytes),
      pushed_(begin_bytes) {}

absl::Status ChunkReader::Push(const RequestEnvelope& chunk) {
  if (chunk.data_bytes > chunk_limit_ && !chunk.shared.has_value()) {
    return core::ChunkTooLargeError(chunk_limit_, chunk.data_bytes);
  }
  if (chunk.data_bytes == 0) return absl::OkStatus();
  if (chunk.offset_bytes != static_cast<uint64_t>(pushed_)) {
    return core::ChunkOffsetError(pushed_, chunk.offset_bytes);
  }
  if (chunk.data_bytes > end_ - pushed_) {
    return core::TensorTooLongError(end_, pushed_ + chunk.data_bytes);
  }
  if (chunk.data_bytes % unit_ != 0) {
    return core::ChunkAlignmentError(unit_, chunk.data_bytes);
  }
  pieces_ = chunk.data;
  piece_ = 0;
  pushed_ += chunk.data_bytes;
  return absl::OkStatus();
}

int64_t ChunkReader::ready_bytes() const {
  const int64_t held = pushed_ - position_;
  return pushed_ == end_ ? held : held - held % granule_;
}

void ChunkReader::FillCarry(int64_t bytes) {
  while (bytes > 0 && piece_ < pieces_.size()) {
    absl::Span<const uint8_t>& piece = pieces_[piece_];
    const int64_t taken = std::min(bytes, static_cast<int64_t>(piece.size()));
    carry_.insert(carry_.end(), piece.begin(), piece.begin() + taken);
    piece.remove_prefix(taken);
    if (piece.empty()) ++piece_;
    bytes -= taken;
  }
}

absl::Span<const uint8_t> ChunkReader::Next(int64_t bytes) {
  const int64_t in_piece = piece_ < pieces_.size()
                               ? static_cast<int64_t>(pieces_[piece_].size())
                               : 0;
  const int64_t whole = std::min(bytes, in_piece - in_piece % granule_);
  absl::Span<const uint8_t> next;
  if (carry_.empty() && whole > 0) {
    absl::Span<const uint8_t>& piece = pieces_[piece_];
    next = piece.first(whole);
    piece.remove_prefix(whole);
  } else {
    FillCarry(std::min(bytes, granule_) - static_cast<int64_t>(carry_.size()));
    given_.swap(carry_);
    carry_.clear();
    next = given_;
  }
  position_ += static_cast<int64_t>(next.size());
  return next;
}

void ChunkReader::Retain() {
  FillCarry(granule_);
  pieces_.clear();
  piece_ = 0;
}

absl::Status ChunkReader::CheckComplete() const {
  return pushed_ == end_ ? absl::OkStatus()
                         : core::TensorIncompleteError(end_, pushed_);
}

}  // namespace quantd::server
