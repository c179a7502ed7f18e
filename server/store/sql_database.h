// The SQL that stores are written in, whatever database runs it.
//
// Statements use what SQLite and PostgreSQL have in common: parameters $1, $2,
// ... that first occur in that order, integers of 64 bits, text in UTF-8 that
// is compared bytewise, bytes, ON CONFLICT and RETURNING.

#ifndef QUANTD_SERVER_STORE_SQL_DATABASE_H_
#define QUANTD_SERVER_STORE_SQL_DATABASE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "server/store/encoding_store.h"

namespace quantd::server {

// A prepared statement in use. Parameters count from 1, columns from 0. Bound
// text and bytes must outlive it, and it must not outlive its connection. Not
// thread-safe.
class SqlStatement {
 public:
  virtual ~SqlStatement() = default;

  virtual void BindText(int index, absl::string_view text) = 0;
  virtual void BindBytes(int index, absl::string_view bytes) = 0;
  virtual void BindInt(int index, int64_t value) = 0;
  // Parameters 1, 2 and 3.
  void BindKey(const EncodingKey& key) {
    BindText(1, key.model);
    BindText(2, key.revision);
    BindText(3, key.tensor);
  }

  // True when there is a row, false at the end. `what` opens an error's text.
  // Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
  virtual absl::StatusOr<bool> Step(absl::string_view what) = 0;

  virtual int64_t Int(int column) const = 0;
  // Text or bytes; valid until the next Step.
  virtual absl::string_view Bytes(int column) const = 0;
};

// Not thread-safe.
class SqlConnection {
 public:
  virtual ~SqlConnection() = default;

  // `sql` must outlive the connection; it is prepared once per address. Never
  // null: what fails here, Step reports.
  virtual std::unique_ptr<SqlStatement> Prepare(const char* sql) = 0;

  // In a transaction that writes: until its end no other transaction holds the
  // same tensor's lock or that of its revision, and what those before wrote is
  // seen from now on.
  // Errors: STORE_UNAVAILABLE.
  virtual absl::Status LockTensor(const EncodingKey& key) = 0;

  // Locks revisions of a model with all of their tensors, like LockTensor:
  // before any tensor's lock, and all at once, so that nobody waits in a
  // circle.
  // Errors: STORE_UNAVAILABLE.
  virtual absl::Status LockRevisions(absl::string_view model,
                                     std::vector<std::string> revisions) = 0;

  // Locks a model with all of its revisions, however many, like LockTensor:
  // before their locks.
  // Errors: STORE_UNAVAILABLE.
  virtual absl::Status LockModel(absl::string_view model) = 0;

  // Locks one source of the tensor's statistics, like LockTensor: before the
  // tensor's lock.
  // Errors: STORE_UNAVAILABLE.
  virtual absl::Status LockSource(const EncodingKey& key,
                                  absl::string_view source) = 0;

  // Locks any other name, such as the scope of a quota, like LockTensor. Comes
  // after the locks of all tensors, and in order of name, so that nobody waits
  // in a circle.
  // Errors: STORE_UNAVAILABLE.
  virtual absl::Status LockName(absl::string_view name) = 0;

  // In a transaction that writes: a number above all that were committed under
  // the locks held.
  // Errors: STORE_UNAVAILABLE, STORE_CORRUPT.
  virtual absl::StatusOr<int64_t> NextGeneration() = 0;

  // In a transaction that writes: other handles hear of it when it commits; see
  // SqlDatabase::ForeignVersion.
  // Errors: STORE_UNAVAILABLE.
  virtual absl::Status Announce() = 0;
};

// In bytes. What is free within the database takes part of its size.
struct DatabaseSize {
  int64_t size_bytes = 0;
  int64_t free_bytes = 0;
};

// Thread-safe. Errors of every call: STORE_UNAVAILABLE, STORE_CORRUPT.
class SqlDatabase {
 public:
  virtual ~SqlDatabase() = default;

  // Runs `body` on a connection that only reads; waits for one.
  virtual absl::Status Read(
      absl::FunctionRef<absl::Status(SqlConnection&)> body) = 0;

  // Runs `body` in a transaction; durable when it returns, without effect when
  // `body` fails. Where the database went away at the very end it may have
  // taken effect all the same.
  virtual absl::Status Write(
      absl::FunctionRef<absl::Status(SqlConnection&)> body) = 0;

  // Runs `body` like Write, for what is not urgent: fails rather than to wait
  // for others who write, where one writes at a time.
  virtual absl::Status WriteNow(
      absl::FunctionRef<absl::Status(SqlConnection&)> body) {
    return Write(body);
  }

  // Runs `body` like Write, for what makes room in the end, such as deleting:
  // on a full disk it uses what the database has reserved for that.
  virtual absl::Status WriteToFree(
      absl::FunctionRef<absl::Status(SqlConnection&)> body) {
    return Write(body);
  }

  // A number that changes soon after another handle committed what it had
  // announced, and perhaps at other times, never back to one that it had; none
  // where that can't be told now. Does not wait.
  virtual absl::optional<int64_t> ForeignVersion() = 0;

  // Tells, a line each, what the database itself finds wrong with its file;
  // nothing where it keeps none of its own.
  virtual absl::Status CheckFile(
      absl::FunctionRef<void(absl::string_view line)> tell) {
    return absl::OkStatus();
  }

  // Size of the database on disk.
  virtual absl::StatusOr<DatabaseSize> Size() = 0;

  // Gives a few MiB that are free back to the file system; false where there is
  // nothing to give back, or the database does that itself. Fails rather than
  // to wait for others who write.
  virtual absl::StatusOr<bool> Shrink() { return false; }

  // OK if the database answers now.
  virtual absl::Status Ping() = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_SQL_DATABASE_H_
