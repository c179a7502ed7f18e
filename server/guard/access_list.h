// Who may do what.
//
// An access file has a line per caller; # begins a comment:
//
//   NAME  sha256:HEX       SCOPES          MODELS  [EXPIRES]
//   NAME  certificate:CN   SCOPES          MODELS  [EXPIRES]
//
// HEX is the SHA-256 of a bearer token (64 digits), CN the common name or a
// subject alternative name of a client's certificate. SCOPES are some of read,
// quantize, calibrate and admin, separated by commas. MODELS is the prefix of
// the names of the models that the caller may see, or * for all. EXPIRES is a
// time as RFC 3339 has it, e.g. 2027-01-31T00:00:00Z.

#ifndef QUANTD_SERVER_GUARD_ACCESS_LIST_H_
#define QUANTD_SERVER_GUARD_ACCESS_LIST_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace quantd::server {

// What a call does; each RPC needs one of them.
enum class Scope : uint8_t {
  // Get and list encodings, statistics and models; dequantize, evaluate.
  kRead = 1,
  // Quantize, and store the encodings that come of it.
  kQuantize = 2,
  // Calibrate, contribute statistics, compute and put encodings.
  kCalibrate = 4,
  // Delete.
  kAdmin = 8,
};

// One caller. Immutable, thread-safe.
class Principal {
 public:
  // Everything: who calls where no access file is.
  static std::shared_ptr<const Principal> Unrestricted();

  // For logs; never secret.
  const std::string& name() const { return name_; }
  // Whether names of that model mean anything to the caller. What it may not
  // see does not exist for it.
  bool MaySee(absl::string_view model) const;
  // Errors: SCOPE_MISSING.
  absl::Status Check(Scope scope) const;
  // Errors: TOKEN_INVALID once it has expired.
  absl::Status CheckTime(absl::Time now) const;

 private:
  friend class AccessList;

  std::string name_;
  uint8_t scopes_ = 0;
  // Empty for all models.
  std::string model_prefix_;
  absl::Time expires_ = absl::InfiniteFuture();
};

// An access file, parsed. Immutable, thread-safe.
class AccessList {
 public:
  // Errors: CONFIG_INVALID, which names the line.
  static absl::StatusOr<std::shared_ptr<const AccessList>> Parse(
      absl::string_view text);

  // The caller of a token, or with one of a certificate's names.
  // Errors: TOKEN_MISSING (no credential of any kind), TOKEN_INVALID (unknown,
  // or expired at `now`).
  absl::StatusOr<std::shared_ptr<const Principal>> Find(
      absl::string_view token, absl::Span<const std::string> certificate_names,
      absl::Time now) const;

  size_t size() const { return principals_.size(); }

 private:
  // Under the digest of the token, or "certificate:" and the name.
  absl::flat_hash_map<std::string, std::shared_ptr<const Principal>>
      principals_;
};

// An access file that may change while the server runs. Thread-safe.
class AccessFile {
 public:
  // Errors: CONFIG_INVALID (also a file that can't be read).
  static absl::StatusOr<std::unique_ptr<AccessFile>> Open(
      const std::string& path);

  std::shared_ptr<const AccessList> list() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Reads the file again if it has changed: true when it has. After an error
  // the last good list stays.
  // Errors: as Open, once for every change.
  absl::StatusOr<bool> Reload() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  explicit AccessFile(std::string path) : path_(std::move(path)) {}

  const std::string path_;
  mutable absl::Mutex mutex_;
  std::string text_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const AccessList> list_ ABSL_GUARDED_BY(mutex_);
};

// The token of an "authorization" header: what follows "Bearer "; empty if it
// is something else.
absl::string_view BearerToken(absl::string_view authorization);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_ACCESS_LIST_H_
