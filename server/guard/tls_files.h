// The server's certificate and the clients' authorities, from files that may
// change while it runs.

#ifndef QUANTD_SERVER_GUARD_TLS_FILES_H_
#define QUANTD_SERVER_GUARD_TLS_FILES_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace quantd::server {

// Says if the server asks clients for a certificate, and if it requires one.
enum class ClientAuth {
  // kRequire if there is a client_ca, else kNone.
  kAuto,
  kNone,
  kRequest,
  kRequire,
};

// All are paths of PEM files.
struct TlsOptions {
  // The certificate, then its chain; empty without TLS.
  std::string certificate;
  std::string key;
  // Trusted authorities of client certificates; empty for none.
  std::string client_ca;
  // Revocation lists of these authorities; empty for none.
  std::string client_crl;
  ClientAuth client_auth = ClientAuth::kAuto;

  // client_auth, or what kAuto means.
  ClientAuth EffectiveClientAuth() const;
};

// Certificates of authorities, parsed.
struct ClientAuthorities;

// Contents of the files, checked. Immutable, thread-safe.
struct TlsMaterial {
  std::string certificate_pem;
  std::string key_pem;
  // Without authorities that are revoked.
  std::string client_ca_pem;
  // End of the validity of the server's certificate.
  absl::Time expires;
  // CertificateIds of certificates that are revoked.
  absl::flat_hash_set<std::string> revoked;
  // All authorities, also those that are revoked; null without client_ca.
  std::shared_ptr<const ClientAuthorities> authorities;
};

// Errors: CONFIG_INVALID, in words: a file that can't be read, is not what it
// is given for, a key that is not the certificate's, a certificate that is not
// valid at `now`.
absl::StatusOr<std::shared_ptr<const TlsMaterial>> LoadTlsMaterial(
    const TlsOptions& options, absl::Time now);

// Issuer and serial number of each certificate; none at all when one is broken.
std::vector<std::string> CertificateIds(absl::string_view pem);

// For each certificate of `pem`, and each authority that those come from: the
// CertificateIds of the authorities that may have issued it, as far as
// `material` has them.
std::vector<std::vector<std::string>> IssuerIds(const TlsMaterial& material,
                                                absl::string_view pem);

// Thread-safe.
class TlsFiles {
 public:
  // Errors: those of LoadTlsMaterial.
  static absl::StatusOr<std::unique_ptr<TlsFiles>> Open(TlsOptions options);

  const TlsOptions& options() const { return options_; }
  std::shared_ptr<const TlsMaterial> material() const
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Reads the files again if one has changed: true when they have. After an
  // error what was there stays: a key that came before its certificate is
  // taken together with it.
  // Errors: as Open, once for every change.
  absl::StatusOr<bool> Reload() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  explicit TlsFiles(TlsOptions options) : options_(std::move(options)) {}

  const TlsOptions options_;
  mutable absl::Mutex mutex_;
  // Contents of the files when they were looked at last.
  std::string seen_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const TlsMaterial> material_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_TLS_FILES_H_
