#include "server/rpc/statistics_rpcs.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/page_bytes.h"
#include "server/wire/names.h"

namespace quantd::server {

absl::Status RevisionStatistics::Open(const std::string& model,
                                      const std::string& revision) {
  model_ = model;
  revision_ = revision.empty() ? std::string(kDefaultRevision) : revision;
  if (absl::Status s = CheckPathName("model", model_); !s.ok()) {
    return core::WithField(s, "model");
  }
  return core::WithField(CheckPathName("revision", revision_), "revision");
}

absl::Status RevisionStatistics::List(
    StatisticsStore* store, absl::FunctionRef<bool(const std::string&)> wanted,
    core::StopToken stop) {
  constexpr int kPageSize = 1000;
  std::string after;
  for (bool is_last = false; !is_last;) {
    absl::StatusOr<std::vector<StatisticsListEntry>> page =
        store->ListStatistics(model_, revision_, after, kPageSize);
    if (!page.ok()) return page.status();
    if (page->empty() && after.empty()) {
      return core::StatisticsNotFoundError(model_, revision_, "");
    }
    is_last = page->size() < kPageSize;
    if (!is_last) after = page->back().tensor;
    MemoryBudget::Lease page_lease;
    absl::Status status = env_.budget->Grow(
        &page_lease,
        PageBytes(*page,
                  [](const StatisticsListEntry& entry) -> const std::string& {
                    return entry.tensor;
                  }),
        kWayOutWithFewerCalls);
    if (!status.ok()) return status;
    int64_t bytes = entries_lease_.bytes();
    for (StatisticsListEntry& entry : *page) {
      // To try all patterns may take 20 ms.
      if (stop.stopped()) return core::StoppedError();
      if (!wanted(entry.tensor)) continue;
      bytes += static_cast<int64_t>(sizeof(entry) + entry.tensor.size());
      entries_.push_back(std::move(entry));
    }
    status = env_.budget->Grow(&entries_lease_, bytes, kWayOutWithFewerCalls);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

EncodingKey RevisionStatistics::KeyOf(const std::string& tensor) const {
  return {model_, revision_, tensor};
}

absl::Status RevisionStatistics::Load(StatisticsStore* store,
                                      const std::string& tensor,
                                      absl::FunctionRef<bool()> stopped,
                                      StoredStatistics* stored) {
  Unload();
  absl::StatusOr<StoredStatistics> got = store->ReadStatistics(
      KeyOf(tensor), /*with_moments=*/false,
      [&](int64_t memory_bytes) -> absl::Status {
        if (stopped()) return absl::CancelledError();
        return env_.budget->Grow(&lease_, memory_bytes, kWayOutWithFewerCalls);
      });
  if (!got.ok()) return got.status();
  // Themselves, and at the granularity of a spec.
  absl::Status status = env_.budget->Grow(
      &lease_, 2 * got->state.statistics.memory_bytes(), kWayOutWithFewerCalls);
  if (!status.ok()) return status;
  *stored = *std::move(got);
  return absl::OkStatus();
}

}  // namespace quantd::server
