#include "server/rpc/audit_log.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "server/guard/access_list.h"
#include "server/guard/caller_address.h"
#include "server/logging.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

std::string AddressOf(const Caller& caller) {
  return caller.context == nullptr ? "" : CallerAddress(caller.context->peer());
}

// The client's name for the call, in x-request-id.
std::string RequestIdOf(const Caller& caller) {
  if (caller.context == nullptr) return "";
  const auto& metadata = caller.context->client_metadata();
  const auto id = metadata.find("x-request-id");
  if (id == metadata.end()) return "";
  // A log line is not to be as long as a client likes.
  constexpr size_t kMostBytes = 128;
  return std::string(id->second.data(),
                     std::min(id->second.size(), kMostBytes));
}

}  // namespace

void LogChange(const Caller& caller, absl::string_view what,
               const EncodingKey& key) {
  Log(LogLevel::kInfo, what,
      {{"rpc", caller.method},
       {"model", key.model},
       {"revision", key.revision},
       {"tensor", key.tensor},
       {"caller", caller.principal->name()},
       {"address", AddressOf(caller)},
       {"request_id", RequestIdOf(caller)}});
}

void LogDenied(const Caller& caller, absl::string_view model,
               const absl::Status& status) {
  Log(LogLevel::kWarning, "a call was denied",
      {{"rpc", caller.method},
       {"reason", core::ErrorReason(status)},
       {"model", ShownName(model)},
       {"caller", caller.principal->name()},
       {"address", AddressOf(caller)},
       {"request_id", RequestIdOf(caller)}});
}

}  // namespace quantd::server
