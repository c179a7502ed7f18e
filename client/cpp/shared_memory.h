// Memory that the client shares with a server on the same machine.

#ifndef QUANTD_CLIENT_CPP_SHARED_MEMORY_H_
#define QUANTD_CLIENT_CPP_SHARED_MEMORY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/cpp/client_options.h"
#include "quantd/v1/shared_memory.pb.h"

namespace quantd {

namespace internal {
class SharedBuffers;
}  // namespace internal

// Memory of Client::AllocateShared, all zero at first. It has to be kept until
// every tensor in it has its result; what is written into it, or read of an
// output, before that is undefined. Fresh pages cost more than quantizing does:
// use it for many tensors. Thread-safe.
class SharedBuffer {
 public:
  // Gives the memory back, on both sides.
  ~SharedBuffer();
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;

  // At least as large as asked for; starts at a page.
  absl::Span<uint8_t> bytes() const { return bytes_; }

 private:
  friend class internal::SharedBuffers;
  SharedBuffer(int connection, std::string region_id, absl::Span<uint8_t> bytes,
               std::shared_ptr<internal::SharedBuffers> owner);

  // Its end is the region's.
  const int connection_;
  const std::string region_id_;
  const absl::Span<uint8_t> bytes_;
  const std::shared_ptr<internal::SharedBuffers> owner_;
};

namespace internal {

// Knows which memory is shared. Thread-safe.
class SharedBuffers : public std::enable_shared_from_this<SharedBuffers> {
 public:
  // Errors: ARGUMENT_INVALID for a size of 0 or without
  // options.shared_memory; SHARED_MEMORY_UNAVAILABLE where the server has none
  // or is not on a unix socket; TIMEOUT; those of a RegionReply.
  absl::StatusOr<std::unique_ptr<SharedBuffer>> Allocate(
      const ClientOptions& options, uint64_t size_bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // What to call `bytes` to the server; none unless they are within one buffer
  // and begin at a multiple of 8 in it.
  std::optional<v1::SharedSpan> Name(absl::Span<const uint8_t> bytes) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class quantd::SharedBuffer;
  void Add(const SharedBuffer* buffer) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(const SharedBuffer* buffer) ABSL_LOCKS_EXCLUDED(mutex_);

  mutable absl::Mutex mutex_;
  // By where they begin.
  std::map<const uint8_t*, const SharedBuffer*> buffers_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace internal
}  // namespace quantd

#endif  // QUANTD_CLIENT_CPP_SHARED_MEMORY_H_
