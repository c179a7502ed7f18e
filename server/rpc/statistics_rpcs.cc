#include "server/rpc/statistics_rpcs.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "core/parallel/time_slice.h"
#include "server/rpc/page_bytes.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr char kWayOut[] = "try again when fewer calls are under way";

}  // namespace

absl::Status RevisionStatistics::Open(const std::string& model,
                                      const std::string& revision) {
  model_ = model;
  revision_ = revision.empty() ? std::string(kDefaultRevision) : revision;
  if (absl::Status s = CheckPathName("model", model_); !s.ok()) {
    return core::WithField(s, "model");
  }
  return core::WithField(CheckPathName("revision", revision_), "revision");
}

absl::StatusOr<bool> RevisionStatistics::List(
    StatisticsStore* store,
    absl::FunctionRef<bool(const std::string&)> wanted) {
  constexpr int kPageSize = 1000;
  if (next_ == page_.size()) {
    absl::StatusOr<std::vector<StatisticsListEntry>> page =
        store->ListStatistics(model_, revision_, last_tensor_, kPageSize);
    if (!page.ok()) return page.status();
    if (page->empty() && last_tensor_.empty()) {
      return core::StatisticsNotFoundError(model_, revision_, "");
    }
    page_ = *std::move(page);
    next_ = 0;
    is_last_page_ = page_.size() < kPageSize;
    if (!page_.empty()) last_tensor_ = page_.back().tensor;
    page_lease_.Release();
    absl::Status status = env_.budget->Grow(
        &page_lease_,
        PageBytes(page_,
                  [](const StatisticsListEntry& entry) -> const std::string& {
                    return entry.tensor;
                  }),
        kWayOut);
    if (!status.ok()) return status;
  }
  const core::TimeSlice slice(kNamesSlice);
  int64_t bytes = entries_lease_.bytes();
  for (; next_ < page_.size() && !slice.over(); ++next_) {
    StatisticsListEntry& entry = page_[next_];
    if (!wanted(entry.tensor)) continue;
    bytes += static_cast<int64_t>(sizeof(entry) + entry.tensor.size());
    entries_.push_back(std::move(entry));
  }
  absl::Status status = env_.budget->Grow(&entries_lease_, bytes, kWayOut);
  if (!status.ok()) return status;
  const bool is_last = is_last_page_ && next_ == page_.size();
  if (is_last) {
    std::vector<StatisticsListEntry>().swap(page_);
    next_ = 0;
    page_lease_.Release();
  }
  return is_last;
}

EncodingKey RevisionStatistics::KeyOf(const StatisticsListEntry& entry) const {
  return {model_, revision_, entry.tensor};
}

absl::Status RevisionStatistics::Load(StatisticsStore* store,
                                      const StatisticsListEntry& entry,
                                      absl::FunctionRef<bool()> stopped,
                                      StoredStatistics* stored) {
  Unload();
  absl::StatusOr<StoredStatistics> got = store->ReadStatistics(
      KeyOf(entry), [&](int64_t memory_bytes) -> absl::Status {
        if (stopped()) return absl::CancelledError();
        return env_.budget->Grow(&lease_, memory_bytes, kWayOut);
      });
  if (!got.ok()) return got.status();
  // Themselves, and at the granularity of a spec.
  absl::Status status = env_.budget->Grow(
      &lease_, 2 * got->state.statistics.memory_bytes(), kWayOut);
  if (!status.ok()) return status;
  *stored = *std::move(got);
  return absl::OkStatus();
}

}  // namespace quantd::server
