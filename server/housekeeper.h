// Keeps the store in order while the server runs: tells how full it is, and
// deletes the revisions that the access file says need not be kept.

#ifndef QUANTD_SERVER_HOUSEKEEPER_H_
#define QUANTD_SERVER_HOUSEKEEPER_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "server/guard/access_list.h"
#include "server/metrics/metrics.h"
#include "server/net/stop_signal.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"
#include "server/store/store_keeper.h"

namespace quantd::server {

// Revisions of one model that a rule no longer keeps, oldest first.
std::vector<RevisionUsage> BeyondRule(const RetentionRule& rule,
                                      std::vector<RevisionUsage> revisions,
                                      absl::Time now);

// The rule of a model: the one with the longest scope; null for none.
const RetentionRule* RuleOf(absl::string_view model,
                            const std::vector<RetentionRule>& rules);

// Steps are for one thread; Start runs them on its own.
class Housekeeper {
 public:
  struct Options {
    // Between two looks at what is used.
    absl::Duration usage_interval = absl::Seconds(5);
    // Between two looks at what can be freed: what is replaced meanwhile takes
    // space that no quota counts.
    absl::Duration space_interval = absl::Seconds(1);
    // Between two looks at what is kept.
    absl::Duration retention_interval = absl::Hours(1);
    // After which an encoding that is still being written is given up, unless
    // scales came meanwhile.
    absl::Duration staged_age = absl::Minutes(10);
    // Between two steps that free space.
    absl::Duration step_pause = absl::Milliseconds(5);
    // The time of the day, and one that never jumps.
    std::function<absl::Time()> clock = &absl::Now;
    std::function<absl::Duration()> steady_clock = &core::SteadyNow;
  };

  // `encodings` is the store that callers have, so that no cache answers what
  // is gone. `access`: the list as it is now; null for none. All must outlive
  // the object.
  Housekeeper(StoreKeeper* keeper, EncodingStore* encodings,
              StatisticsStore* statistics,
              std::function<std::shared_ptr<const AccessList>()> access,
              Options options, Metrics* metrics);
  ~Housekeeper();

  void Start();

  // Tells what is used and what the store takes on disk, and in the log when a
  // quota is nearly used up.
  void LookAtUsage();

  // Frees what deleted encodings and statistics have left, in steps between
  // which others write.
  void LookAtSpace();

  // Deletes the revisions that the rules no longer keep, each logged, and
  // nothing of them that was written since they were looked at. When the rules
  // are not those of the time before, which holds for the first time, it only
  // logs what it would delete: whoever made a mistake has until the next time.
  // Does nothing while the clock is not to be trusted.
  void LookAtRevisions();

 private:
  void Work();
  bool stopping() const { return stopping_.WaitFor(absl::ZeroDuration()); }
  bool ClockIsSound();
  absl::Status LookAtModel(const std::string& model,
                           const std::vector<RetentionRule>& rules,
                           bool only_tell);
  absl::Status DeleteRevision(const RevisionUsage& revision);

  StoreKeeper* const keeper_;
  EncodingStore* const encodings_;
  StatisticsStore* const statistics_;
  const std::function<std::shared_ptr<const AccessList>()> access_;
  const Options options_;
  Metrics* const metrics_;
  // By the two clocks.
  const absl::Time start_time_;
  const absl::Duration start_steady_;
  std::vector<RetentionRule> known_rules_;
  // Scopes of quotas that are nearly used up, as the log has said.
  absl::flat_hash_set<std::string> told_;
  StopSignal stopping_;
  std::thread thread_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_HOUSEKEEPER_H_
