// The regions that each process may name.

#ifndef QUANTD_SERVER_SHARED_MEMORY_REGION_REGISTRY_H_
#define QUANTD_SERVER_SHARED_MEMORY_REGION_REGISTRY_H_

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "quantd/v1/shared_memory.pb.h"
#include "server/shared_memory/peer_process.h"
#include "server/shared_memory/region.h"

namespace quantd::server {

// Thread-safe.
class RegionRegistry {
 public:
  void Add(std::shared_ptr<const Region> region, PeerProcess owner)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Nobody can name it any more; who uses it already keeps it.
  void Remove(const Region& region) ABSL_LOCKS_EXCLUDED(mutex_);

  // Null unless `process` has such a region.
  std::shared_ptr<const Region> Find(const std::string& id,
                                     PeerProcess process) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::shared_ptr<const Region> region;
    PeerProcess owner;
  };

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

// The regions that one call may name. Thread-safe.
class SharedMemoryAccess {
 public:
  // Nothing.
  SharedMemoryAccess() = default;
  // Regions of the process that makes the call; `peer` is
  // grpc::ServerContext::peer() of it. Null `registry`: no regions. It must
  // outlive the object.
  SharedMemoryAccess(const RegionRegistry* registry, absl::string_view peer);

  // The bytes of a span.
  // Errors: REGION_NOT_FOUND, in the same words whether there is no such region
  // or another process has it; REGION_INVALID for a span that is unaligned or
  // not within its region.
  absl::StatusOr<SharedBytes> Find(const v1::SharedSpan& span) const;

 private:
  const RegionRegistry* registry_ = nullptr;
  absl::optional<PeerProcess> process_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_SHARED_MEMORY_REGION_REGISTRY_H_
