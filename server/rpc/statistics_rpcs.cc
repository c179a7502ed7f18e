#include "server/rpc/statistics_rpcs.h"

#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr char kWayOut[] = "try again when fewer calls are under way";

}  // namespace

absl::Status RevisionStatistics::Open(std::shared_ptr<StatisticsStore> store,
                                      const std::string& model,
                                      const std::string& revision) {
  store_ = std::move(store);
  model_ = model;
  revision_ = revision.empty() ? std::string(kDefaultRevision) : revision;
  if (absl::Status s = CheckPathName("model", model_); !s.ok()) {
    return core::WithField(s, "model");
  }
  if (absl::Status s = CheckPathName("revision", revision_); !s.ok()) {
    return core::WithField(s, "revision");
  }
  constexpr int kPageSize = 1000;
  while (true) {
    absl::StatusOr<std::vector<StatisticsListEntry>> page =
        store_->ListStatistics(model_, revision_,
                               entries_.empty() ? "" : entries_.back().tensor,
                               kPageSize);
    if (!page.ok()) return page.status();
    int64_t bytes = entries_lease_.bytes();
    for (const StatisticsListEntry& entry : *page) {
      bytes += static_cast<int64_t>(sizeof(entry) + entry.tensor.size());
    }
    absl::Status status = env_.budget->Grow(&entries_lease_, bytes, kWayOut);
    if (!status.ok()) return status;
    const bool last = page->size() < kPageSize;
    entries_.insert(entries_.end(), std::make_move_iterator(page->begin()),
                    std::make_move_iterator(page->end()));
    if (last) break;
  }
  if (entries_.empty()) {
    return core::StatisticsNotFoundError(model_, revision_, "");
  }
  return absl::OkStatus();
}

EncodingKey RevisionStatistics::KeyOf(const StatisticsListEntry& entry) const {
  return {model_, revision_, entry.tensor};
}

absl::Status RevisionStatistics::Load(const StatisticsListEntry& entry,
                                      absl::FunctionRef<bool()> stopped,
                                      StoredStatistics* stored) {
  // A bin takes about four times as much as its varints.
  constexpr int64_t kMemoryPerStoredByte = 4;
  Unload();
  absl::Status status = env_.budget->Grow(
      &lease_, kMemoryPerStoredByte * entry.size_bytes, kWayOut);
  if (!status.ok()) return status;
  absl::StatusOr<StoredStatistics> got =
      store_->ReadStatistics(KeyOf(entry), stopped);
  if (!got.ok()) return got.status();
  // Themselves, and at the granularity of a spec.
  status = env_.budget->Grow(&lease_, 2 * got->state.statistics.memory_bytes(),
                             kWayOut);
  if (!status.ok()) return status;
  *stored = *std::move(got);
  return absl::OkStatus();
}

}  // namespace quantd::server
