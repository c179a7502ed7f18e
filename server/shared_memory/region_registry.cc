#include "server/shared_memory/region_registry.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

// So that an element never straddles more cache lines than it must.
constexpr uint64_t kAlignmentBytes = 8;

}  // namespace

void RegionRegistry::Add(std::shared_ptr<const Region> region,
                         PeerProcess owner) {
  absl::MutexLock lock(&mutex_);
  const std::string& id = region->id();
  entries_.insert_or_assign(id, Entry{std::move(region), owner});
}

void RegionRegistry::Remove(const Region& region) {
  // The last reference unmaps, which takes a while.
  std::shared_ptr<const Region> removed;
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(region.id());
  if (it == entries_.end()) return;
  removed = std::move(it->second.region);
  entries_.erase(it);
}

std::shared_ptr<const Region> RegionRegistry::Find(const std::string& id,
                                                   PeerProcess process) const {
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(id);
  if (it == entries_.end() || !(it->second.owner == process)) return nullptr;
  return it->second.region;
}

SharedMemoryAccess::SharedMemoryAccess(const RegionRegistry* registry,
                                       absl::string_view peer)
    : registry_(registry) {
  if (registry_ != nullptr) process_ = PeerOfCall(peer);
}

absl::StatusOr<SharedBytes> SharedMemoryAccess::Find(
    const v1::SharedSpan& span) const {
  std::shared_ptr<const Region> region;
  if (process_.has_value()) {
    region = registry_->Find(span.region_id(), *process_);
  }
  if (region == nullptr) {
    return core::WithField(core::RegionNotFoundError(), "region_id");
  }
  if (span.offset_bytes() % kAlignmentBytes != 0) {
    return core::WithField(core::RegionInvalidError(absl::StrCat(
                               "offset ", span.offset_bytes(),
                               ", expected a multiple of ", kAlignmentBytes)),
                           "offset_bytes");
  }
  const absl::Span<uint8_t> bytes = region->bytes();
  // No sum, which could overflow.
  if (span.offset_bytes() > bytes.size() ||
      span.size_bytes() > bytes.size() - span.offset_bytes()) {
    return core::WithField(
        core::RegionInvalidError(absl::StrCat(
            span.size_bytes(), " bytes from ", span.offset_bytes(),
            " on, expected them within a region of ", bytes.size(), " bytes")),
        "size_bytes");
  }
  return SharedBytes{std::move(region),
                     bytes.subspan(span.offset_bytes(), span.size_bytes())};
}

}  // namespace quantd::server
