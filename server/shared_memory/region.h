// Memory that the server shares with one client process.

#ifndef QUANTD_SERVER_SHARED_MEMORY_REGION_H_
#define QUANTD_SERVER_SHARED_MEMORY_REGION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/guard/memory_budget.h"
#include "server/metrics/metrics.h"
#include "server/net/file_descriptor.h"

namespace quantd::server {

// A mapping of memory whose pages are all allocated from the beginning, and
// which no process can shrink, grow or seal further. The client may write to
// it, or punch holes into it, while the server uses it. Results are then
// undefined; code that reads nothing twice stays memory-safe. The mapping, and
// its part of the memory budget, are released with the object. Thread-safe.
class Region {
 public:
  static constexpr size_t kIdBytes = 16;

  // A region, and the file that the client is to map.
  struct Created;
  // `size_bytes` is rounded up to whole pages. `budget` and `metrics` must
  // outlive the region.
  // Errors: REGION_INVALID for a size of 0, MEMORY_BUDGET, REGION_LIMIT where
  // the system has no more.
  static absl::StatusOr<Created> Create(uint64_t size_bytes,
                                        MemoryBudget* budget, Metrics* metrics);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // kIdBytes of randomness.
  const std::string& id() const { return id_; }
  absl::Span<uint8_t> bytes() const { return bytes_; }

 private:
  Region(std::string id, absl::Span<uint8_t> bytes, MemoryBudget::Lease lease,
         Metrics* metrics);

  const std::string id_;
  const absl::Span<uint8_t> bytes_;
  const MemoryBudget::Lease lease_;
  Metrics* const metrics_;
};

struct Region::Created {
  std::shared_ptr<const Region> region;
  FileDescriptor file;
};

// Bytes of a region, which they keep mapped. Plain value.
struct SharedBytes {
  std::shared_ptr<const Region> region;
  absl::Span<uint8_t> bytes;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_SHARED_MEMORY_REGION_H_
