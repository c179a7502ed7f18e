// The edge of the handlers: what is thrown ends a call, not the process.

#ifndef QUANTD_SERVER_RPC_UNEXPECTED_H_
#define QUANTD_SERVER_RPC_UNEXPECTED_H_

#include <exception>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace quantd::server {

// Logs what a handler of `rpc` has thrown, under a new request id, and answers
// the error with that id. Errors: INTERNAL, always.
absl::Status Unexpected(absl::string_view rpc, absl::string_view what);

// Runs a part of a handler. Our own functions do not throw; libraries may, and
// so may the allocator.
// Errors: that of `body`; INTERNAL when it throws.
template <typename Body>
absl::Status Guarded(absl::string_view rpc, Body body) {
  try {
    return body();
  } catch (const std::exception& e) {
    return Unexpected(rpc, e.what());
  } catch (...) {
    return Unexpected(rpc, "what is not an exception");
  }
}

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_UNEXPECTED_H_
