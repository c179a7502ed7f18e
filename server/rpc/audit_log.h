// Log lines about changes and denied calls.

#ifndef QUANTD_SERVER_RPC_AUDIT_LOG_H_
#define QUANTD_SERVER_RPC_AUDIT_LOG_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/rpc/caller.h"
#include "server/store/encoding_store.h"

namespace quantd::server {

// Logs that a caller deleted or replaced what was stored. `key`  empty where
// it is of all tensors, or of all revisions.
void LogChange(const Caller& caller, absl::string_view what,
               const EncodingKey& key);

// Logs that a call was denied. `model`  empty where it is of none.
void LogDenied(const Caller& caller, absl::string_view model,
               const absl::Status& status);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_AUDIT_LOG_H_
