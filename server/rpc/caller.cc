#include "server/rpc/caller.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "core/errors.h"
#include "grpc/grpc_security_constants.h"
#include "server/guard/caller_address.h"
#include "server/guard/tenant_encoding_store.h"
#include "server/guard/tenant_statistics_store.h"
#include "server/rpc/audit_log.h"
#include "server/wire/rpcs.h"

namespace quantd::server {
namespace {

absl::string_view ToView(grpc::string_ref text) {
  return absl::string_view(text.data(), text.size());
}

// One that is there for as long as the callers are.
template <typename Store>
std::shared_ptr<Store> Unowned(Store* store) {
  return std::shared_ptr<Store>(std::shared_ptr<Store>(), store);
}

}  // namespace

Authenticator::Authenticator(const AccessFile* access, const TlsFiles* tls,
                             EncodingStore* encodings,
                             StatisticsStore* statistics,
                             const RegionRegistry* regions, Metrics* metrics)
    : access_(access),
      tls_(tls),
      encodings_(encodings),
      statistics_(statistics),
      regions_(regions),
      metrics_(metrics) {}

Credential Authenticator::CredentialOf(
    const grpc::ServerContextBase& context) const {
  const bool revokes = tls_ != nullptr && !tls_->options().client_crl.empty();
  if (access_ == nullptr && !revokes) return Credential("", {});
  absl::string_view token;
  const auto header = context.client_metadata().find("authorization");
  if (header != context.client_metadata().end()) {
    token = BearerToken(ToView(header->second));
  }
  std::vector<std::string> names;
  std::vector<std::string> certificate_ids;
  std::vector<std::vector<std::string>> issuer_ids;
  const std::shared_ptr<const grpc::AuthContext> peer = context.auth_context();
  if (peer != nullptr) {
    for (const char* property :
         {GRPC_X509_CN_PROPERTY_NAME, GRPC_X509_SAN_PROPERTY_NAME}) {
      for (const grpc::string_ref& name : peer->FindPropertyValues(property)) {
        names.emplace_back(name.data(), name.size());
      }
    }
    if (revokes) {
      const std::shared_ptr<const TlsMaterial> material = tls_->material();
      // The client's own may not be among those between it and its authority.
      for (const char* property : {GRPC_X509_PEM_CERT_PROPERTY_NAME,
                                   GRPC_X509_PEM_CERT_CHAIN_PROPERTY_NAME}) {
        for (const grpc::string_ref& pem : peer->FindPropertyValues(property)) {
          for (std::string& id : CertificateIds(ToView(pem))) {
            certificate_ids.push_back(std::move(id));
          }
          // A client need not send certificates that the server has itself.
          for (auto& ids : IssuerIds(*material, ToView(pem))) {
            issuer_ids.push_back(std::move(ids));
          }
        }
      }
    }
  }
  Credential credential(token, std::move(names));
  credential.certificate_ids = std::move(certificate_ids);
  credential.issuer_ids = std::move(issuer_ids);
  return credential;
}

std::string Authenticator::ShareName(const grpc::ServerContextBase& context,
                                     const Credential& credential) const {
  const absl::StatusOr<std::shared_ptr<const Principal>> principal =
      Find(credential);
  // No address has a space in it.
  return principal.ok() && !(*principal)->name().empty()
             ? absl::StrCat("name ", (*principal)->name())
             : CallerAddress(context.peer());
}

absl::StatusOr<std::shared_ptr<const Principal>> Authenticator::Find(
    const Credential& credential) const {
  // Also on a connection that was there before.
  if (!credential.certificate_ids.empty()) {
    const std::shared_ptr<const TlsMaterial> material = tls_->material();
    for (const std::string& id : credential.certificate_ids) {
      if (material->revoked.contains(id)) return core::TokenInvalidError();
    }
    for (const std::vector<std::string>& issuers : credential.issuer_ids) {
      const bool all_revoked =
          absl::c_all_of(issuers, [&material](const std::string& id) {
            return material->revoked.contains(id);
          });
      if (all_revoked) return core::TokenInvalidError();
    }
  }
  if (access_ == nullptr) return Principal::Unrestricted();
  return access_->list()->Find(credential, absl::Now());
}

absl::StatusOr<Caller> Authenticator::Authenticate(
    const grpc::CallbackServerContext& context, const Credential& credential,
    Rpc rpc) const {
  Caller caller;
  caller.method = RpcNameOf(rpc).method;
  caller.context = &context;
  if (regions_ != nullptr) {
    caller.shared_memory = SharedMemoryAccess(regions_, context.peer());
  }
  absl::Status status = Renew(credential, rpc, &caller);
  if (!status.ok()) return status;
  return caller;
}

absl::Status Authenticator::Renew(const Credential& credential, Rpc rpc,
                                  Caller* caller) const {
  absl::StatusOr<std::shared_ptr<const Principal>> principal = Find(credential);
  if (!principal.ok()) return Report(*caller, "", principal.status());
  if (caller->encodings == nullptr || *principal != caller->principal) {
    Bind(*std::move(principal), caller);
  }
  return Report(*caller, "", caller->principal->Check(ScopeOf(rpc)));
}

absl::Status Authenticator::CheckKnown(const grpc::ServerContextBase& context,
                                       const Credential& credential) const {
  Caller caller;
  caller.context = &context;
  return Report(caller, "", Find(credential).status());
}

absl::Status Authenticator::CheckWrite(const Caller& caller,
                                       absl::string_view model) const {
  return Report(caller, model, caller.principal->CheckWrite(model));
}

absl::Status Authenticator::CheckDelete(const Caller& caller,
                                        absl::string_view model) const {
  return Report(caller, model, caller.principal->Check(Scope::kAdmin));
}

absl::Status Authenticator::Report(const Caller& caller,
                                   absl::string_view model,
                                   absl::Status status) const {
  if (!status.ok()) {
    metrics_->AccessDenied(core::ErrorReason(status));
    LogDenied(caller, model, status);
  }
  return status;
}

void Authenticator::Bind(std::shared_ptr<const Principal> principal,
                         Caller* caller) const {
  caller->principal = std::move(principal);
  if (access_ == nullptr) {
    caller->encodings = Unowned(encodings_);
    caller->statistics = Unowned(statistics_);
    return;
  }
  caller->encodings =
      std::make_shared<TenantEncodingStore>(encodings_, caller->principal);
  caller->statistics =
      std::make_shared<TenantStatisticsStore>(statistics_, caller->principal);
}

}  // namespace quantd::server
