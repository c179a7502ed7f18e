// Who may do what.
//
// An access file has a line per credential; # begins a comment:
//
//   NAME  sha256:HEX           SCOPES  MODELS  [EXPIRES]
//   NAME  certificate:SUBJECT  SCOPES  MODELS  [EXPIRES]
//
// NAME is for people, and may come more than once: two tokens while one
// replaces the other. HEX is the SHA-256 of a bearer token (64 digits), SUBJECT
// the common name or a subject alternative name of a client's certificate.
// SCOPES are some of read, quantize, calibrate and admin, separated by commas.
// MODELS is * for all models, PREFIX/ for all whose names begin so, or the name
// of one. EXPIRES is a time as RFC 3339 has it, e.g. 2027-01-31T00:00:00Z. The
// last line has to end, too: what is empty or breaks off is half written, and
// would take callers away.
//
// Other lines say what the store may hold, and until when it keeps it:
//
//   quota principal:NAME    [bytes=SIZE] [rows=COUNT]
//   quota models:PREFIX/    [bytes=SIZE] [rows=COUNT]
//   retain models:PREFIX/   [revisions=COUNT] [age=DURATION]
//
// with models:* for all models. NAME is that of a credential; a row counts for
// whoever wrote it last, and for all prefixes of its model. A revision goes
// when it is beyond all that its line says: not one of the COUNT of its model
// that were written last, and not written for DURATION.

#ifndef QUANTD_SERVER_GUARD_ACCESS_LIST_H_
#define QUANTD_SERVER_GUARD_ACCESS_LIST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "server/store/encoding_store.h"
#include "server/wire/rpcs.h"

namespace quantd::server {

// One caller. Immutable, thread-safe.
class Principal {
 public:
  // All quotas of its file.
  using Quotas = std::vector<Quota>;

  // May do everything: who calls where no access file is.
  static std::shared_ptr<const Principal> Unrestricted();

  // NAME; empty of one that is unrestricted.
  const std::string& name() const { return name_; }

  // True if names of that model mean anything to the caller. A model that it
  // may not see does not exist for it.
  bool MaySee(absl::string_view model) const;
  // Comes before all models that the caller may see, which lie together, and
  // after all others before them; in the order of names, bytewise.
  std::string BeforeModels() const;
  // Comes after all of them, and before all others after them; empty where none
  // are.
  std::string AfterModels() const;
  // Errors: SCOPE_MISSING.
  absl::Status Check(Scope scope) const;
  // Checks that the caller may store something under the names of that model.
  // Errors: SCOPE_MISSING; MODEL_DENIED, whether there is such a model or not.
  absl::Status CheckWrite(absl::string_view model) const;
  // Errors: TOKEN_INVALID once it has expired.
  absl::Status CheckTime(absl::Time now) const;
  // Account that the caller's writes under the names of that model count for.
  WriteAccount AccountFor(absl::string_view model) const;

 private:
  friend class AccessList;

  // Empty for who is unrestricted.
  std::string name_;
  // By scope; null for none.
  std::shared_ptr<const Quotas> quotas_;
  uint8_t scopes_ = 0;
  // A prefix that ends in a slash, one name, or empty for all.
  std::string models_;
  absl::Time expires_ = absl::InfiniteFuture();
};

// Token digest and certificate by which a call says who makes it. Holds no
// secret.
struct Credential {
  // `token`  of an "authorization: Bearer" header; empty for none.
  Credential(absl::string_view token,
             std::vector<std::string> certificate_names);

  // SHA-256; empty without a token.
  std::string token_digest;
  // Names in the client's certificate: common name, then alternative names.
  std::vector<std::string> certificate_names;
  // CertificateIds of that certificate and of those that came with it; empty
  // where nobody wants to know.
  std::vector<std::string> certificate_ids;
  // IssuerIds of those.
  std::vector<std::vector<std::string>> issuer_ids;
};

// Revisions of models that need not be kept for ever.
struct RetentionRule {
  // "models:*" or "models:PREFIX/".
  std::string scope;
  // Kept of each model, those that were written last; none said: infinite.
  absl::optional<int64_t> revisions;
  // Kept since the last write.
  absl::optional<absl::Duration> age;

  friend bool operator==(const RetentionRule& a, const RetentionRule& b) {
    return a.scope == b.scope && a.revisions == b.revisions && a.age == b.age;
  }
};

constexpr absl::string_view kAllModels = "models:*";

// True if a scope of models counts that model.
bool ScopeHolds(absl::string_view scope, absl::string_view model);

// An access file, parsed. Immutable, thread-safe.
class AccessList {
 public:
  // Errors: CONFIG_INVALID, which names the line but not what is in it.
  static absl::StatusOr<std::shared_ptr<const AccessList>> Parse(
      absl::string_view text);

  // The caller of a credential: who its token belongs to; without one, who the
  // first name of its certificate belongs to that is in the list.
  // Errors: TOKEN_MISSING (no credential of any kind), TOKEN_INVALID (unknown,
  // or expired at `now`).
  absl::StatusOr<std::shared_ptr<const Principal>> Find(
      const Credential& credential, absl::Time now) const;

  // By scope.
  const std::vector<Quota>& quotas() const { return *quotas_; }
  // In the order of the file.
  const std::vector<RetentionRule>& retention() const { return retention_; }

 private:
  // A line that begins with quota or retain.
  absl::Status ParseRule(int line, absl::Span<const absl::string_view> fields);

  std::shared_ptr<Principal::Quotas> quotas_ =
      std::make_shared<Principal::Quotas>();
  std::vector<RetentionRule> retention_;
  // Under the digest of the token, or "certificate:" and the name. Comparing
  // digests takes a time that depends on how much of them is equal. That is no
  // way in: whoever could choose a digest to compare would have to know a token
  // with that digest.
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
  // Text of the file at the last look; none if the file could not be read.
  absl::optional<std::string> text_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const AccessList> list_ ABSL_GUARDED_BY(mutex_);
};

// The token of an "authorization" header: what follows "Bearer "; empty if it
// is something else.
absl::string_view BearerToken(absl::string_view authorization);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_ACCESS_LIST_H_
