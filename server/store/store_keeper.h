// The calls with which others keep the store in order.

#ifndef QUANTD_SERVER_STORE_STORE_KEEPER_H_
#define QUANTD_SERVER_STORE_STORE_KEEPER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/store/encoding_store.h"
#include "server/store/sql_database.h"

namespace quantd::server {

// A revision of a model, with encodings, statistics or both.
struct RevisionUsage {
  std::string model;
  std::string revision;
  // Update time of what it holds or has held; never older than the newest row.
  absl::Time update_time;
  Usage usage;
  // STORE_CORRUPT where a row is damaged; time and usage are of the others
  // then.
  absl::Status error{};
};

// Thread-safe. Errors of every call: STORE_UNAVAILABLE, STORE_CORRUPT.
class StoreKeeper {
 public:
  explicit StoreKeeper(std::shared_ptr<SqlDatabase> database);

  // Bytes and rows that a scope holds; see Quota.
  absl::StatusOr<Usage> ReadUsage(absl::string_view scope);

  // The first model after `after`, bytewise; empty if there is none.
  absl::StatusOr<std::string> NextModel(absl::string_view after);
  // Revisions of one model, in order of name.
  absl::StatusOr<std::vector<RevisionUsage>> ListRevisions(
      absl::string_view model);

  // Size of the store on disk.
  absl::StatusOr<DatabaseSize> ReadSize();
  // Frees a few MiB of what deleted encodings and statistics have left, and of
  // encodings whose writers have not been heard of for `staged_age`. False if
  // there is nothing left to free.
  absl::StatusOr<bool> FreeStep(absl::Duration staged_age);
  // Gives a few MiB that are free back to the file system. False if there is
  // nothing to give back.
  absl::StatusOr<bool> Shrink();

 private:
  // Frees rows of a set that was lost. False if there is none left.
  absl::StatusOr<bool> FreeSetStep();

  const std::shared_ptr<SqlDatabase> database_;
  // The last set that could not be freed because it is damaged; 0 where a look
  // begins with the first one.
  std::atomic<int64_t> passed_set_ = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_STORE_KEEPER_H_
