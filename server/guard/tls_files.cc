#include "server/guard/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "server/guard/text_file.h"

namespace quantd::server {
namespace tls_internal {

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Certificate = std::unique_ptr<X509, Deleter<X509_free>>;

}  // namespace tls_internal

struct ClientAuthorities {
  std::vector<tls_internal::Certificate> certificates;
};

namespace {

using tls_internal::Certificate;
using tls_internal::Deleter;
using Bio = std::unique_ptr<BIO, Deleter<BIO_free>>;
using Crl = std::unique_ptr<X509_CRL, Deleter<X509_CRL_free>>;
using Key = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY_free>>;

Bio Reader(absl::string_view text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Instead of asking on the terminal.
int NoPassphrase(char*, int, int, void*) { return -1; }

absl::Status TlsFileInvalid(absl::string_view flag, const std::string& path,
                            absl::string_view expected) {
  // Nobody else looks at what OpenSSL has noted.
  ERR_clear_error();
  return core::ConfigInvalidError(absl::StrCat(
      "--", flag, ": expected ", expected, ", got \"", path, "\""));
}

// True if the last read found nothing more, rather than something broken.
// Forgets the errors that OpenSSL has noted, which nobody else looks at.
bool IsAtEnd() {
  const uint64_t error = ERR_peek_last_error();
  ERR_clear_error();
  return ERR_GET_LIB(error) == ERR_LIB_PEM &&
         ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
}

// All that are there; none when one of them is broken.
std::vector<Certificate> ParseCertificates(absl::string_view pem) {
  const Bio reader = Reader(pem);
  std::vector<Certificate> certificates;
  while (X509* const certificate =
             PEM_read_bio_X509(reader.get(), nullptr, NoPassphrase, nullptr)) {
    certificates.emplace_back(certificate);
  }
  if (!IsAtEnd()) certificates.clear();
  return certificates;
}

std::string PemOf(const Certificate& certificate) {
  const Bio writer(BIO_new(BIO_s_mem()));
  PEM_write_bio_X509(writer.get(), certificate.get());
  char* text = nullptr;
  const auto size = static_cast<size_t>(BIO_get_mem_data(writer.get(), &text));
  return std::string(text, size);
}

std::string IdOf(const X509_NAME* issuer, const ASN1_INTEGER* serial) {
  uint8_t* der = nullptr;
  const int size = i2d_X509_NAME(issuer, &der);
  std::string id;
  if (size > 0) id.assign(reinterpret_cast<const char*>(der), size);
  OPENSSL_free(der);
  absl::StrAppend(&id, "#",
                  absl::string_view(reinterpret_cast<const char*>(
                                        ASN1_STRING_get0_data(serial)),
                                    ASN1_STRING_length(serial)));
  return id;
}

std::string IdOf(const X509* certificate) {
  return IdOf(X509_get_issuer_name(certificate),
              X509_get0_serialNumber(certificate));
}

absl::Time ToTime(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

absl::Status LoadCertificate(const TlsOptions& options, absl::Time now,
                             TlsMaterial* material) {
  const std::vector<Certificate> chain =
      ParseCertificates(material->certificate_pem);
  if (chain.empty()) {
    return TlsFileInvalid("tls-certificate", options.certificate,
                          "a certificate in PEM");
  }
  const Bio reader = Reader(material->key_pem);
  const Key key(
      PEM_read_bio_PrivateKey(reader.get(), nullptr, NoPassphrase, nullptr));
  if (key == nullptr) {
    return TlsFileInvalid("tls-key", options.key,
                          "a private key in PEM without a passphrase");
  }
  if (X509_check_private_key(chain[0].get(), key.get()) != 1) {
    return TlsFileInvalid("tls-key", options.key,
                          absl::StrCat("the key of the certificate \"",
                                       options.certificate, "\""));
  }
  material->expires = ToTime(X509_get0_notAfter(chain[0].get()));
  const absl::Time begins = ToTime(X509_get0_notBefore(chain[0].get()));
  if (now < begins || now >= material->expires) {
    return TlsFileInvalid(
        "tls-certificate", options.certificate,
        absl::StrCat("a certificate that is valid now, not from ",
                     absl::FormatTime(begins), " to ",
                     absl::FormatTime(material->expires)));
  }
  return absl::OkStatus();
}

absl::Status LoadRevoked(const TlsOptions& options, absl::string_view pem,
                         TlsMaterial* material) {
  const Bio reader = Reader(pem);
  int lists = 0;
  while (X509_CRL* const list = PEM_read_bio_X509_CRL(reader.get(), nullptr,
                                                      NoPassphrase, nullptr)) {
    const Crl crl(list);
    ++lists;
    const STACK_OF(X509_REVOKED)* const revoked = X509_CRL_get_REVOKED(list);
    for (int i = 0; i < sk_X509_REVOKED_num(revoked); ++i) {
      material->revoked.insert(IdOf(
          X509_CRL_get_issuer(list),
          X509_REVOKED_get0_serialNumber(sk_X509_REVOKED_value(revoked, i))));
    }
  }
  // One that is left out would let in again what it revokes.
  if (IsAtEnd() && lists > 0) return absl::OkStatus();
  return TlsFileInvalid("tls-client-crl", options.client_crl,
                        "certificate revocation lists in PEM");
}

// Loads the authorities; client_ca_pem leaves out those that are revoked. A
// client need not send the certificates between its own and the first
// authority, so that nothing else would tell of a revoked one.
absl::Status LoadAuthorities(const TlsOptions& options, absl::string_view pem,
                             TlsMaterial* material) {
  auto authorities = std::make_shared<ClientAuthorities>();
  authorities->certificates = ParseCertificates(pem);
  for (const Certificate& certificate : authorities->certificates) {
    if (!material->revoked.contains(IdOf(certificate.get()))) {
      material->client_ca_pem += PemOf(certificate);
    }
  }
  material->authorities = std::move(authorities);
  if (!material->client_ca_pem.empty()) return absl::OkStatus();
  return TlsFileInvalid("tls-client-ca", options.client_ca,
                        "certificates of authorities in PEM, not all revoked");
}

// Texts of the files.
struct TlsTexts {
  std::string certificate;
  std::string key;
  std::string client_ca;
  std::string client_crl;

  // Differs when one of them does.
  std::string Joined() const {
    return absl::StrCat(certificate, "\n", key, "\n", client_ca, "\n",
                        client_crl);
  }
};

absl::StatusOr<TlsTexts> ReadTexts(const TlsOptions& options) {
  TlsTexts texts;
  const struct {
    const char* flag;
    const std::string& path;
    std::string* text;
  } kFiles[] = {
      {"tls-certificate", options.certificate, &texts.certificate},
      {"tls-key", options.key, &texts.key},
      {"tls-client-ca", options.client_ca, &texts.client_ca},
      {"tls-client-crl", options.client_crl, &texts.client_crl},
  };
  for (const auto& file : kFiles) {
    if (file.path.empty()) continue;
    absl::optional<std::string> text = ReadTextFile(file.path);
    if (!text.has_value()) {
      return TlsFileInvalid(file.flag, file.path, "a file that can be read");
    }
    *file.text = *std::move(text);
  }
  return texts;
}

absl::StatusOr<std::shared_ptr<const TlsMaterial>> Check(
    const TlsOptions& options, TlsTexts texts, absl::Time now) {
  auto material = std::make_shared<TlsMaterial>();
  material->certificate_pem = std::move(texts.certificate);
  material->key_pem = std::move(texts.key);
  absl::Status status = LoadCertificate(options, now, material.get());
  if (!status.ok()) return status;
  if (!options.client_crl.empty()) {
    status = LoadRevoked(options, texts.client_crl, material.get());
    if (!status.ok()) return status;
  }
  if (!options.client_ca.empty()) {
    status = LoadAuthorities(options, texts.client_ca, material.get());
    if (!status.ok()) return status;
  }
  return material;
}

}  // namespace

ClientAuth TlsOptions::EffectiveClientAuth() const {
  if (client_auth != ClientAuth::kAuto) return client_auth;
  return client_ca.empty() ? ClientAuth::kNone : ClientAuth::kRequire;
}

absl::StatusOr<std::shared_ptr<const TlsMaterial>> LoadTlsMaterial(
    const TlsOptions& options, absl::Time now) {
  absl::StatusOr<TlsTexts> texts = ReadTexts(options);
  if (!texts.ok()) return texts.status();
  return Check(options, *std::move(texts), now);
}

std::vector<std::string> CertificateIds(absl::string_view pem) {
  std::vector<std::string> ids;
  for (const Certificate& certificate : ParseCertificates(pem)) {
    ids.push_back(IdOf(certificate.get()));
  }
  return ids;
}

std::vector<std::vector<std::string>> IssuerIds(const TlsMaterial& material,
                                                absl::string_view pem) {
  std::vector<std::vector<std::string>> ids;
  if (material.authorities == nullptr) return ids;
  const std::vector<Certificate> own = ParseCertificates(pem);
  // Certificates whose issuers are looked for.
  std::vector<X509*> issued;
  for (const Certificate& certificate : own) {
    issued.push_back(certificate.get());
  }
  for (size_t i = 0; i < issued.size(); ++i) {
    X509* const certificate = issued[i];
    std::vector<X509*> issuers;
    for (const Certificate& authority : material.authorities->certificates) {
      if (X509_check_issued(authority.get(), certificate) == X509_V_OK) {
        issuers.push_back(authority.get());
      }
    }
    // If several have one name, the signature tells; checking it takes far
    // longer.
    if (issuers.size() > 1) {
      issuers.erase(std::remove_if(issuers.begin(), issuers.end(),
                                   [certificate](X509* issuer) {
                                     return X509_verify(
                                                certificate,
                                                X509_get0_pubkey(issuer)) != 1;
                                   }),
                    issuers.end());
      ERR_clear_error();
    }
    if (issuers.empty()) continue;
    std::vector<std::string>& group = ids.emplace_back();
    for (const X509* issuer : issuers) group.push_back(IdOf(issuer));
    // If there are several ways up, one that is revoked decides nothing.
    if (issuers.size() == 1 && !absl::c_linear_search(issued, issuers[0])) {
      issued.push_back(issuers[0]);
    }
  }
  return ids;
}

absl::StatusOr<std::unique_ptr<TlsFiles>> TlsFiles::Open(TlsOptions options) {
  std::unique_ptr<TlsFiles> files(new TlsFiles(std::move(options)));
  if (absl::Status s = files->Reload().status(); !s.ok()) return s;
  return files;
}

std::shared_ptr<const TlsMaterial> TlsFiles::material() const {
  absl::MutexLock lock(&mutex_);
  return material_;
}

absl::StatusOr<bool> TlsFiles::Reload() {
  absl::StatusOr<TlsTexts> texts = ReadTexts(options_);
  absl::MutexLock lock(&mutex_);
  // One that can't be read is a change, too.
  const std::string seen = texts.ok() ? texts->Joined() : "";
  if (material_ != nullptr && seen == seen_) return false;
  seen_ = seen;
  if (!texts.ok()) return texts.status();
  absl::StatusOr<std::shared_ptr<const TlsMaterial>> material =
      Check(options_, *std::move(texts), absl::Now());
  if (!material.ok()) return material.status();
  material_ = *std::move(material);
  return true;
}

}  // namespace quantd::server
