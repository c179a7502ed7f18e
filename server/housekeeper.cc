#include "server/housekeeper.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "server/logging.h"

namespace quantd::server {
namespace {

// From when on the log says that a quota is nearly used up, and below which it
// forgets that.
constexpr double kNearlyUsed = 0.9;
constexpr double kNoLongerUsed = 0.85;
constexpr int kPage = 500;
// Limit on how far a clock may be set while the server runs.
constexpr absl::Duration kMostClockChange = absl::Minutes(5);

double Ratio(int64_t used, int64_t limit) {
  if (limit == 0) return used > 0 ? 1 : 0;
  return static_cast<double>(used) / static_cast<double>(limit);
}

// True if a deletion is settled: it succeeded, or another deleted or wrote the
// thing meanwhile, or the thing is damaged. What is damaged stays.
bool IsSettled(const absl::Status& status) {
  return status.ok() || absl::IsNotFound(status) || absl::IsDataLoss(status) ||
         core::ErrorReason(status) == "ETAG_MISMATCH";
}

}  // namespace

std::vector<RevisionUsage> BeyondRule(const RetentionRule& rule,
                                      std::vector<RevisionUsage> revisions,
                                      absl::Time now) {
  std::sort(revisions.begin(), revisions.end(),
            [](const RevisionUsage& a, const RevisionUsage& b) {
              return a.update_time != b.update_time
                         ? a.update_time < b.update_time
                         : a.revision < b.revision;
            });
  size_t count = revisions.size();
  if (rule.revisions.has_value()) {
    const auto kept = static_cast<size_t>(*rule.revisions);
    count -= std::min(count, kept);
  }
  revisions.resize(count);
  if (rule.age.has_value()) {
    const auto is_young = [&](const RevisionUsage& revision) {
      return now - revision.update_time <= *rule.age;
    };
    revisions.erase(std::find_if(revisions.begin(), revisions.end(), is_young),
                    revisions.end());
  }
  return revisions;
}

const RetentionRule* RuleOf(absl::string_view model,
                            const std::vector<RetentionRule>& rules) {
  const RetentionRule* found = nullptr;
  for (const RetentionRule& rule : rules) {
    if (ScopeHolds(rule.scope, model) &&
        (found == nullptr || rule.scope.size() > found->scope.size())) {
      found = &rule;
    }
  }
  return found;
}

Housekeeper::Housekeeper(
    StoreKeeper* keeper, EncodingStore* encodings, StatisticsStore* statistics,
    std::function<std::shared_ptr<const AccessList>()> access, Options options,
    Metrics* metrics)
    : keeper_(keeper),
      encodings_(encodings),
      statistics_(statistics),
      access_(std::move(access)),
      options_(std::move(options)),
      metrics_(metrics),
      start_time_(options_.clock()),
      start_steady_(options_.steady_clock()) {}

Housekeeper::~Housekeeper() {
  stopping_.Send();
  if (thread_.joinable()) thread_.join();
}

void Housekeeper::Start() {
  thread_ = std::thread([this] { Work(); });
}

void Housekeeper::Work() {
  absl::Duration next_usage = options_.steady_clock();
  absl::Duration next_look = next_usage;
  do {
    if (options_.steady_clock() >= next_usage) {
      LookAtUsage();
      next_usage = options_.steady_clock() + options_.usage_interval;
    }
    LookAtSpace();
    if (options_.steady_clock() >= next_look) {
      LookAtRevisions();
      next_look = options_.steady_clock() + options_.retention_interval;
    }
  } while (!stopping_.WaitFor(
      std::min(options_.space_interval, options_.retention_interval)));
}

void Housekeeper::LookAtUsage() {
  const absl::StatusOr<Usage> all = keeper_->ReadUsage(kAllModels);
  if (!all.ok()) return;
  metrics_->StoreUsage(all->bytes, all->rows);
  const absl::StatusOr<DatabaseSize> size = keeper_->ReadSize();
  if (size.ok()) metrics_->StoreSize(size->size_bytes, size->free_bytes);
  const std::shared_ptr<const AccessList> access = access_();
  double fullest = 0;
  if (access != nullptr) {
    for (const Quota& quota : access->quotas()) {
      const absl::StatusOr<Usage> usage = keeper_->ReadUsage(quota.scope);
      if (!usage.ok()) return;
      const double ratio = std::max(Ratio(usage->bytes, quota.max_bytes),
                                    Ratio(usage->rows, quota.max_rows));
      fullest = std::max(fullest, ratio);
      if (ratio < kNoLongerUsed) told_.erase(quota.scope);
      if (ratio >= kNearlyUsed && told_.insert(quota.scope).second) {
        Log(LogLevel::kWarning, "a quota is nearly used up",
            {{"quota", quota.scope},
             {"used_bytes", usage->bytes},
             {"used_rows", usage->rows},
             {"ratio", ratio}});
      }
    }
  }
  metrics_->QuotaUsed(fullest);
}

void Housekeeper::LookAtSpace() {
  // A step may fail; there is a next look.
  constexpr int kMostFailures = 100;
  const auto repeat = [&](auto step) {
    int failures = 0;
    while (!stopping() && failures < kMostFailures) {
      const absl::StatusOr<bool> is_more = step();
      if (is_more.ok() && !*is_more) return;
      failures += !is_more.ok();
      stopping_.WaitFor(options_.step_pause);
    }
  };
  repeat([&] { return keeper_->FreeStep(options_.staged_age); });
  repeat([&] { return keeper_->Shrink(); });
}

bool Housekeeper::ClockIsSound() {
  const absl::Duration change = (options_.clock() - start_time_) -
                                (options_.steady_clock() - start_steady_);
  return change < kMostClockChange;
}

void Housekeeper::LookAtRevisions() {
  const std::shared_ptr<const AccessList> access = access_();
  if (access == nullptr) return;
  const std::vector<RetentionRule>& rules = access->retention();
  const bool only_tell = rules != known_rules_;
  known_rules_ = rules;
  if (rules.empty()) return;
  if (!ClockIsSound()) {
    Log(LogLevel::kError,
        "no revision is deleted: the clock was set forward since quantd "
        "started; restart quantd once it is right");
    return;
  }
  std::string model;
  while (!stopping()) {
    absl::StatusOr<std::string> next = keeper_->NextModel(model);
    absl::Status status = next.status();
    if (status.ok()) {
      model = *std::move(next);
      if (model.empty()) return;
      status = LookAtModel(model, rules, only_tell);
    }
    if (!status.ok()) {
      Log(LogLevel::kError, "cannot look after revisions; trying again later",
          {{"error", status.message()}});
      return;
    }
  }
}

absl::Status Housekeeper::LookAtModel(const std::string& model,
                                      const std::vector<RetentionRule>& rules,
                                      bool only_tell) {
  const RetentionRule* const rule = RuleOf(model, rules);
  if (rule == nullptr) return absl::OkStatus();
  absl::StatusOr<std::vector<RevisionUsage>> revisions =
      keeper_->ListRevisions(model);
  if (!revisions.ok()) return revisions.status();
  // It is not known how old one is of which something is damaged.
  const auto is_damaged = [](const RevisionUsage& revision) {
    if (revision.error.ok()) return false;
    Log(LogLevel::kError, "a damaged revision is kept, whatever its age",
        {{"model", revision.model},
         {"revision", revision.revision},
         {"error", revision.error.message()}});
    return true;
  };
  revisions->erase(
      std::remove_if(revisions->begin(), revisions->end(), is_damaged),
      revisions->end());
  for (const RevisionUsage& revision :
       BeyondRule(*rule, *std::move(revisions), options_.clock())) {
    if (stopping()) return absl::OkStatus();
    if (!only_tell) {
      if (absl::Status s = DeleteRevision(revision); !s.ok()) return s;
      metrics_->RevisionDeleted();
    }
    Log(LogLevel::kInfo,
        only_tell ? "the next look will delete a revision"
                  : "deleted a revision",
        {{"model", revision.model},
         {"revision", revision.revision},
         {"rule", rule->scope},
         {"last_write",
          absl::FormatTime(revision.update_time, absl::UTCTimeZone())},
         {"rows", revision.usage.rows},
         {"bytes", revision.usage.bytes}});
  }
  return absl::OkStatus();
}

// Tensor by tensor: others write in between, and what one of them writes stays.
absl::Status Housekeeper::DeleteRevision(const RevisionUsage& revision) {
  std::string after;
  while (!stopping()) {
    const absl::StatusOr<std::vector<EncodingListEntry>> page =
        encodings_->ListEncodings(revision.model, revision.revision, after,
                                  kPage);
    if (!page.ok()) return page.status();
    if (page->empty()) break;
    for (const EncodingListEntry& entry : *page) {
      if (stopping()) return absl::OkStatus();
      if (entry.stored.update_time > revision.update_time) continue;
      Precondition precondition;
      precondition.if_match = entry.stored.etag;
      precondition.not_updated_after = revision.update_time;
      absl::Status status = encodings_->Delete(
          {revision.model, revision.revision, entry.tensor}, precondition);
      if (!IsSettled(status)) return status;
    }
    after = page->back().tensor;
  }
  after.clear();
  while (!stopping()) {
    const absl::StatusOr<std::vector<StatisticsListEntry>> page =
        statistics_->ListStatistics(revision.model, revision.revision, after,
                                    kPage);
    if (!page.ok()) return page.status();
    if (page->empty()) break;
    for (const StatisticsListEntry& entry : *page) {
      if (stopping()) return absl::OkStatus();
      absl::Status status = statistics_->DeleteStatisticsUpTo(
          {revision.model, revision.revision, entry.tensor},
          revision.update_time);
      if (!IsSettled(status)) return status;
    }
    after = page->back().tensor;
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
