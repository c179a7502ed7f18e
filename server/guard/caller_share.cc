#include "server/guard/caller_share.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace quantd::server {
namespace {

// From when on callers that have nothing under way are forgotten.
constexpr size_t kMostShares = 1024;

}  // namespace

CallerShares::CallerShares(int threads, absl::Duration max_delay,
                           int64_t max_tensors)
    : threads_(threads), max_delay_(max_delay), open_tensors_(max_tensors) {}

std::shared_ptr<CallerShare> CallerShares::Find(absl::string_view caller) {
  absl::MutexLock lock(&mutex_);
  const auto found = shares_.find(caller);
  if (found != shares_.end()) return found->second;
  if (shares_.size() >= kMostShares) {
    absl::erase_if(
        shares_, [](const auto& item) { return item.second.use_count() == 1; });
  }
  auto share = std::make_shared<CallerShare>(++last_group_, threads_,
                                             max_delay_, &open_tensors_);
  shares_.emplace(caller, share);
  return share;
}

absl::Duration CallerShares::Delay(absl::Duration work) const {
  absl::MutexLock lock(&mutex_);
  absl::Duration most;
  for (const auto& [caller, share] : shares_) {
    most = std::max(most, share->admission.Delay(work));
  }
  return most;
}

}  // namespace quantd::server
