#include "server/shared_memory/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

absl::Status SystemError(const char* what) {
  return core::RegionLimitError(absl::StrCat(
      "the system has no more regions: ", what, ": ", std::strerror(errno)));
}

// Makes every page of the mapping now, so that no kernel runs into one that is
// missing, or into the end of the machine's memory.
absl::Status Populate(int file, void* address, size_t size_bytes) {
  if (madvise(address, size_bytes, MADV_POPULATE_WRITE) == 0) {
    return absl::OkStatus();
  }
  // Before Linux 5.14.
  if (errno == EINVAL &&
      fallocate(file, 0, 0, static_cast<off_t>(size_bytes)) == 0) {
    return absl::OkStatus();
  }
  return SystemError("populate");
}

}  // namespace

absl::StatusOr<Region::Created> Region::Create(uint64_t size_bytes,
                                               MemoryBudget* budget,
                                               Metrics* metrics) {
  if (size_bytes == 0) {
    return core::WithField(
        core::RegionInvalidError("a region of 0 bytes, expected at least 1"),
        "size_bytes");
  }
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  // More than the budget stays more than the budget, without an overflow.
  const int64_t wanted_bytes = static_cast<int64_t>(
      std::min(size_bytes, static_cast<uint64_t>(budget->total_bytes()) + 1));
  const int64_t mapped_bytes =
      (wanted_bytes + page_bytes - 1) / page_bytes * page_bytes;
  absl::StatusOr<MemoryBudget::Lease> lease =
      budget->Acquire(mapped_bytes, "ask for smaller regions, or for fewer");
  if (!lease.ok()) return lease.status();

  std::string id(kIdBytes, '\0');
  if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
    return SystemError("getrandom");
  }
  FileDescriptor file(
      memfd_create("quantd-region", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) return SystemError("memfd_create");
  if (ftruncate(file.get(), mapped_bytes) != 0) return SystemError("ftruncate");
  if (fcntl(file.get(), F_ADD_SEALS,
            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return SystemError("seals");
  }
  void* const address = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE,
                             MAP_SHARED, file.get(), 0);
  if (address == MAP_FAILED) return SystemError("mmap");
  std::shared_ptr<const Region> region(new Region(
      std::move(id),
      {static_cast<uint8_t*>(address), static_cast<size_t>(mapped_bytes)},
      *std::move(lease), metrics));
  // Fewer faults, where the system has huge pages for who asks; no matter
  // otherwise.
  madvise(address, mapped_bytes, MADV_HUGEPAGE);
  if (absl::Status s = Populate(file.get(), address, mapped_bytes); !s.ok()) {
    return s;
  }
  return Created{std::move(region), std::move(file)};
}

Region::Region(std::string id, absl::Span<uint8_t> bytes,
               MemoryBudget::Lease lease, Metrics* metrics)
    : id_(std::move(id)),
      bytes_(bytes),
      lease_(std::move(lease)),
      metrics_(metrics) {
  metrics_->SharedMemory(1, static_cast<int64_t>(bytes_.size()));
}

Region::~Region() {
  munmap(bytes_.data(), bytes_.size());
  metrics_->SharedMemory(-1, -static_cast<int64_t>(bytes_.size()));
}

}  // namespace quantd::server
