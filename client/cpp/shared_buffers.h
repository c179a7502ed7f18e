// The memory that one client shares with its server.

#ifndef QUANTD_CLIENT_CPP_SHARED_BUFFERS_H_
#define QUANTD_CLIENT_CPP_SHARED_BUFFERS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/cpp/client_options.h"
#include "client/cpp/shared_memory.h"
#include "quantd/v1/shared_memory.pb.h"

namespace quantd::internal {

// Knows which memory is shared. Thread-safe.
class SharedBuffers : public std::enable_shared_from_this<SharedBuffers> {
 public:
  // Errors: ARGUMENT_INVALID for a size of 0 or without
  // options.shared_memory; SHARED_MEMORY_UNAVAILABLE where the server has none
  // or is not on a unix socket; TIMEOUT; those of a RegionReply.
  absl::StatusOr<std::unique_ptr<SharedBuffer>> Allocate(
      const ClientOptions& options, uint64_t size_bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // The name of `bytes` for the server; none unless they are within one buffer
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

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_SHARED_BUFFERS_H_
