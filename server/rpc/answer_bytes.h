// The bytes of an answer: where they go, and their checksum.

#ifndef QUANTD_SERVER_RPC_ANSWER_BYTES_H_
#define QUANTD_SERVER_RPC_ANSWER_BYTES_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "server/metrics/metrics.h"
#include "server/shared_memory/region.h"
#include "server/shared_memory/region_registry.h"
#include "server/wire/chunk_writer.h"
#include "xxhash.h"

namespace quantd::server {

// XXH3 (64 bits, seed 0) of bytes that come in pieces. Not thread-safe.
class Checksum {
 public:
  Checksum();
  void Update(absl::Span<const uint8_t> data);
  uint64_t Digest() const;

 private:
  struct Deleter {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Deleter> state_;
};

// The shared memory that a header names for the answer's bytes; none if they go
// in messages.
// Errors: those of SharedMemoryAccess::Find, at "header.output".
template <typename Header>
absl::StatusOr<absl::optional<SharedBytes>> FindOutput(
    const Header& header, const SharedMemoryAccess& access) {
  if (!header.has_output()) return absl::optional<SharedBytes>();
  absl::StatusOr<SharedBytes> output = access.Find(header.output());
  if (!output.ok()) return core::WithField(output.status(), "header.output");
  return absl::make_optional(*std::move(output));
}

// Errors: REGION_INVALID, at "header.output", for one that is there and has
// less than `size_bytes`.
absl::Status CheckOutput(const absl::optional<SharedBytes>& output,
                         int64_t size_bytes);
// Errors: REGION_INVALID, at "shared", where answers would overwrite `shared`
// data of `region` that is still to be read.
absl::Status CheckApart(const absl::optional<SharedBytes>& output,
                        const std::shared_ptr<const Region>& region,
                        absl::Span<const uint8_t> shared);

// The bytes of an answer as they are made, quantum by quantum: in the messages
// that go out, or in shared memory. Counts them and their checksum. Not
// thread-safe.
class AnswerBytes {
 public:
  // The answer is [begin_bytes, ...) of what the RPC makes of the tensor; all
  // of it fits into `output`, which may be none.
  AnswerBytes(absl::optional<SharedBytes> output, int64_t begin_bytes)
      : output_(std::move(output)), begin_bytes_(begin_bytes) {}

  // Makes room for the next `size_bytes` at `offset_bytes`.
  void Begin(int64_t offset_bytes, int64_t size_bytes, ChunkWriter* out);
  // The place of the byte at `offset_bytes`.
  // Requires: within what Begin made room for.
  uint8_t* At(int64_t offset_bytes) const {
    return quantum_.data() + (offset_bytes - quantum_begin_bytes_);
  }
  // All bytes before `offset_bytes` are made. May be called while others behind
  // them are being made.
  void Made(int64_t offset_bytes);
  // All bytes since Begin are made.
  void End(Metrics* metrics);

  // XXH3 of all bytes.
  uint64_t Digest() const { return checksum_.Digest(); }

 private:
  const absl::optional<SharedBytes> output_;
  const int64_t begin_bytes_;
  Checksum checksum_;
  // Since Begin, and how much of it the checksum has.
  absl::Span<uint8_t> quantum_;
  int64_t quantum_begin_bytes_ = 0;
  int64_t hashed_bytes_ = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_ANSWER_BYTES_H_
