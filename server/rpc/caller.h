// Who makes a call, and what of the server it gets to see.

#ifndef QUANTD_SERVER_RPC_CALLER_H_
#define QUANTD_SERVER_RPC_CALLER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"
#include "server/guard/access_list.h"
#include "server/guard/tls_files.h"
#include "server/metrics/metrics.h"
#include "server/shared_memory/region_registry.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

struct Caller {
  // Never null.
  std::shared_ptr<const Principal> principal = Principal::Unrestricted();
  // The name of the RPC, from RpcRow.
  absl::string_view method;
  // Context of the call; null in tests.
  const grpc::ServerContextBase* context = nullptr;
  // To what the caller may name in shared memory.
  SharedMemoryAccess shared_memory;
  // The stores as the caller sees them.
  std::shared_ptr<EncodingStore> encodings;
  std::shared_ptr<StatisticsStore> statistics;
};

// Tells who makes a call. The only way to the stores. Thread-safe.
class Authenticator {
 public:
  // Without `access` everybody may do everything. `tls` may be null; it refuses
  // certificates that are revoked, or that a revoked one issued. Without
  // `regions` nobody has shared memory. All must outlive the object and its
  // callers.
  Authenticator(const AccessFile* access, const TlsFiles* tls,
                EncodingStore* encodings, StatisticsStore* statistics,
                const RegionRegistry* regions, Metrics* metrics);

  // The token and certificate by which the call says who makes it.
  Credential CredentialOf(const grpc::ServerContextBase& context) const;

  // Whose share of the server the call takes from: the caller's name in the
  // access file or, where it has none, its address.
  std::string ShareName(const grpc::ServerContextBase& context,
                        const Credential& credential) const;

  // Errors: TOKEN_MISSING, TOKEN_INVALID, SCOPE_MISSING, all of them counted
  // and logged; so are those of the next ones.
  absl::StatusOr<Caller> Authenticate(
      const grpc::CallbackServerContext& context, const Credential& credential,
      Rpc rpc) const;
  // Like Authenticate, for a call that goes on, by the access file as it is
  // now.
  absl::Status Renew(const Credential& credential, Rpc rpc,
                     Caller* caller) const;
  // For calls that are not one of ours: checks that the caller is known.
  // Errors: TOKEN_MISSING, TOKEN_INVALID.
  absl::Status CheckKnown(const grpc::ServerContextBase& context,
                          const Credential& credential) const;

  // Checks that the caller may delete what is stored under that model's names.
  // Errors: SCOPE_MISSING.
  absl::Status CheckDelete(const Caller& caller, absl::string_view model) const;

  // Checks that the caller may store something under that model's names; to be
  // asked before there is work for it.
  // Errors: SCOPE_MISSING, MODEL_DENIED.
  absl::Status CheckWrite(const Caller& caller, absl::string_view model) const;

 private:
  // Errors: TOKEN_MISSING, TOKEN_INVALID.
  absl::StatusOr<std::shared_ptr<const Principal>> Find(
      const Credential& credential) const;
  // Counts and logs an error.
  absl::Status Report(const Caller& caller, absl::string_view model,
                      absl::Status status) const;
  // Makes the caller that one, with the stores as that one sees them.
  void Bind(std::shared_ptr<const Principal> principal, Caller* caller) const;

  const AccessFile* const access_;
  const TlsFiles* const tls_;
  EncodingStore* const encodings_;
  StatisticsStore* const statistics_;
  const RegionRegistry* const regions_;
  Metrics* const metrics_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_CALLER_H_
