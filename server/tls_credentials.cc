#include "server/tls_credentials.h"

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "grpc/grpc.h"
#include "grpc/grpc_security.h"

namespace quantd::server {
namespace {

grpc_ssl_client_certificate_request_type RequestType(ClientAuth client_auth) {
  switch (client_auth) {
    case ClientAuth::kNone:
      return GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE;
    case ClientAuth::kRequest:
      return GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY;
    case ClientAuth::kAuto:
    case ClientAuth::kRequire:
      break;
  }
  return GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
}

// gRPC's C++ layer has credentials that do not change, and some that read files
// by themselves: key and certificate one after the other, so that between the
// two being replaced every handshake fails. Its C layer asks before each
// handshake.
class TlsCredentials final : public grpc::ServerCredentials {
 public:
  explicit TlsCredentials(const TlsFiles* files) : files_(files) {}

  // Calls bring tokens, which gRPC need not look at.
  void SetAuthMetadataProcessor(
      const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address,
                      grpc_server* server) override {
    grpc_server_credentials* const credentials =
        grpc_ssl_server_credentials_create_with_options(
            grpc_ssl_server_credentials_create_options_using_config_fetcher(
                RequestType(files_->options().EffectiveClientAuth()), &Fetch,
                this));
    if (credentials == nullptr) return 0;
    const int port =
        grpc_server_add_http2_port(server, address.c_str(), credentials);
    grpc_server_credentials_release(credentials);
    return port;
  }

  static grpc_ssl_certificate_config_reload_status Fetch(
      void* self, grpc_ssl_server_certificate_config** config) {
    return static_cast<TlsCredentials*>(self)->FetchConfig(config);
  }

  grpc_ssl_certificate_config_reload_status FetchConfig(
      grpc_ssl_server_certificate_config** config) ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<const TlsMaterial> material = files_->material();
    absl::MutexLock lock(&mutex_);
    if (material == used_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    used_ = std::move(material);
    const grpc_ssl_pem_key_cert_pair pair = {used_->key_pem.c_str(),
                                             used_->certificate_pem.c_str()};
    // gRPC wants authorities also where it asks clients for no certificate.
    *config = grpc_ssl_server_certificate_config_create(
        used_->client_ca_pem.empty() ? used_->certificate_pem.c_str()
                                     : used_->client_ca_pem.c_str(),
        &pair, 1);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const TlsFiles* const files_;
  absl::Mutex mutex_;
  std::shared_ptr<const TlsMaterial> used_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> MakeTlsCredentials(
    const TlsFiles* files) {
  return std::make_shared<TlsCredentials>(files);
}

}  // namespace quantd::server
