#include "server/rpc/audit_log.h"

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "server/guard/access_list.h"
#include "server/logging.h"
#include "server/wire/names.h"

namespace quantd::server {

void LogChange(const Caller& caller, absl::string_view what,
               const EncodingKey& key) {
  Log(LogLevel::kInfo, what,
      {{"rpc", caller.method},
       {"model", key.model},
       {"revision", key.revision},
       {"tensor", key.tensor},
       {"caller", caller.principal->name()},
       {"address", caller.address},
       {"request_id", caller.request_id}});
}

void LogDenied(const Caller& caller, absl::string_view model,
               const absl::Status& status) {
  Log(LogLevel::kWarning, "a call was denied",
      {{"rpc", caller.method},
       {"reason", core::ErrorReason(status)},
       {"model", ShownName(model)},
       {"caller", caller.principal->name()},
       {"address", caller.address},
       {"request_id", caller.request_id}});
}

}  // namespace quantd::server
