#include "server/rpc/unexpected.h"

#include <cstdint>
#include <string>

#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "server/logging.h"

namespace quantd::server {

absl::Status Unexpected(absl::string_view rpc, absl::string_view what) {
  absl::BitGen random;
  const std::string id = absl::StrCat(
      absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
  Log(LogLevel::kError, "a handler threw; this is a defect",
      {{"request_id", id}, {"rpc", rpc}, {"error", what}});
  return core::UnexpectedError(id);
}

}  // namespace quantd::server
