// How a client reaches its server.

#ifndef QUANTD_CLIENT_CPP_CLIENT_OPTIONS_H_
#define QUANTD_CLIENT_CPP_CLIENT_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "grpcpp/security/credentials.h"

namespace quantd {

// Plain value, not synchronised.
struct ClientOptions {
  // "host:port", or "unix:/path/to/socket".
  std::string target = "127.0.0.1:8430";
  // Deadline of a unary call; of a tensor, the longest time in which nothing
  // moves either way.
  absl::Duration timeout = absl::Seconds(60);
  // Payload of a message in bytes, 64 to 32 MiB, cut down to a multiple of 64.
  // A server takes 4 MiB by default.
  int64_t chunk_bytes = int64_t{1} << 20;
  // Attempts after the first, on UNAVAILABLE and where the server asks for a
  // retry. Every call may be repeated without harm.
  int max_retries = 4;
  // Pause before the first retry; it doubles up to max_backoff and varies by
  // half, so that clients do not come back all at once.
  absl::Duration initial_backoff = absl::Milliseconds(50);
  absl::Duration max_backoff = absl::Seconds(5);
  // Lets Client::AllocateShared hand out memory that the server reads and
  // writes in place. Needs a unix socket and a server with --shared-memory.
  bool shared_memory = false;
  // TLS, tokens. Default: none.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
};

}  // namespace quantd

#endif  // QUANTD_CLIENT_CPP_CLIENT_OPTIONS_H_
