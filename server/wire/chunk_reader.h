// From chunks, cut anywhere, to whole granules.

#ifndef QUANTD_SERVER_WIRE_CHUNK_READER_H_
#define QUANTD_SERVER_WIRE_CHUNK_READER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/wire/envelope.h"

namespace quantd::server {

// Checks that the chunks of one tensor are contiguous, and gives their bytes on
// in whole granules. A granule is what a kernel can work on by itself: an
// element, the elements of one byte of packed codes, or a leaf of a sum. A
// granule that straddles two pieces or two chunks is put together in a small
// buffer; everything else is given in place. Not thread-safe.
class ChunkReader {
 public:
  // The tensor's bytes [begin_bytes, end_bytes) will come, cut at multiples of
  // `unit_bytes` into chunks of at most `chunk_limit_bytes`, or of any size in
  // shared memory.
  // Requires: begin_bytes is a multiple of granule_bytes, granule_bytes of
  // unit_bytes; the last granule may be short.
  ChunkReader(int64_t begin_bytes, int64_t end_bytes, int64_t unit_bytes,
              int64_t granule_bytes, int64_t chunk_limit_bytes);

  // Takes the next chunk; its pieces must stay valid until Retain.
  // Errors: CHUNK_TOO_LARGE, CHUNK_OFFSET, CHUNK_ALIGNMENT, TENSOR_TOO_LONG.
  // Requires: ready_bytes() == 0.
  absl::Status Push(const RequestEnvelope& chunk);

  // Bytes that can be given now: whole granules, or all up to the end.
  int64_t ready_bytes() const;

  // The next piece of whole granules, of at most `bytes`; it begins at
  // position_bytes(), which goes on behind it. Valid until Next or Retain.
  // Requires: 0 < bytes <= ready_bytes(), and a multiple of the granule or
  // ready_bytes().
  absl::Span<const uint8_t> Next(int64_t bytes);

  // Keeps what is left of the chunk (less than a granule), so that the chunk
  // may go away.
  // Requires: ready_bytes() == 0.
  void Retain();

  // Offset of the next byte to give.
  int64_t position_bytes() const { return position_; }
  // All bytes have been given.
  bool complete() const { return position_ == end_; }
  // Errors: TENSOR_INCOMPLETE unless all bytes have been pushed.
  absl::Status CheckComplete() const;

 private:
  // Moves up to `bytes` from the pieces to carry_.
  void FillCarry(int64_t bytes);

  const int64_t end_;
  const int64_t unit_;
  const int64_t granule_;
  const int64_t chunk_limit_;
  int64_t position_;            // next byte to give; carry_ starts here
  int64_t pushed_;              // next byte to arrive
  std::vector<uint8_t> carry_;  // less than a granule between calls
  std::vector<uint8_t> given_;  // the last piece, if it was put together
  absl::InlinedVector<absl::Span<const uint8_t>, 16> pieces_;
  size_t piece_ = 0;  // first piece that is not used up
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_CHUNK_READER_H_
