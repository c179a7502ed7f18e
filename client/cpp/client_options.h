// How a client reaches its server.

#ifndef QUANTD_CLIENT_CPP_CLIENT_OPTIONS_H_
#define QUANTD_CLIENT_CPP_CLIENT_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace quantd {

// A retry that is about to begin. Plain value, not synchronised.
struct Retry {
  // Why.
  absl::Status status;
  // 1 for the first one since something was answered.
  int number = 0;
  // How long until then.
  absl::Duration pause;
  // How long retries go on without an answer.
  absl::Duration left;
};

// Paths of PEM files. Plain value.
struct TlsPaths {
  // Trusted CA certificates; empty for those of the system.
  std::string ca;
  // The client's own certificate and its key: both or neither.
  std::string certificate;
  std::string key;
};

// Plain value, not synchronised.
struct ClientOptions {
  // "host", "host:port", "unix:/path/to/socket", or several replicas as
  // "ipv4:10.0.0.1:8430,10.0.0.2:8430"; see ParseTarget.
  std::string target = "127.0.0.1:8430";
  // Sends calls to all addresses of the target in turn, and to none that does
  // not report itself healthy: for replicas without a proxy in front of them.
  // Always so when the target lists several. A name that stands for several is
  // "dns:///name:port".
  bool balance = false;
  // Deadline of an attempt of a unary call; of a tensor, the longest time in
  // which nothing moves either way.
  absl::Duration timeout = absl::Seconds(60);
  // Time for a unary call or a tensor over all attempts, the latter from when
  // those before it on its stream were received.
  absl::Duration deadline = absl::InfiniteDuration();
  // Payload of a message in bytes, 64 to 32 MiB, cut down to a multiple of 64.
  // A server takes 4 MiB by default.
  int64_t chunk_bytes = int64_t{1} << 20;
  // How long a call without an answer is tried again, on UNAVAILABLE and where
  // the server asks for a retry: long enough for a server to be started again,
  // also elsewhere. Zero for not at all. Every call may be repeated without
  // harm. What only a person can mend, such as TLS on one side alone, ends at
  // once.
  absl::Duration retry_for = absl::Seconds(60);
  // The most attempts after the first without an answer. Default: as many as
  // there is time for.
  int max_retries = std::numeric_limits<int>::max();
  // Pause before the first retry; it doubles up to max_backoff and varies by
  // half, so that clients do not come back all at once.
  absl::Duration initial_backoff = absl::Milliseconds(50);
  absl::Duration max_backoff = absl::Seconds(5);
  // A larger tensor with a fixed encoding, inline or stored, goes up in parts
  // of that many bytes; parts are larger if the encoding is large. Each part
  // has an answer and a checksum of its own. A retry goes on after the last
  // answered part, on whichever replica. The result is the same as that of the
  // whole. At least chunk_bytes, rounded up to a multiple of 64.
  int64_t part_bytes = int64_t{32} << 20;
  // Told of every retry, on the thread that waits for it, which may be several
  // threads at once. Default: nobody.
  std::function<void(const Retry&)> on_retry;
  // Lets Client::AllocateShared hand out memory that the server reads and
  // writes in place. Needs a unix socket and a server with --shared-memory.
  bool shared_memory = false;
  // TLS. The files are read once: connect again when they change. Default:
  // plaintext.
  std::optional<TlsPaths> tls;
  // Path of a file with the token that every call brings; read again when it
  // changes. Needs TLS, but to loopback and unix sockets. Default: no token.
  std::string token_file;
};

}  // namespace quantd

#endif  // QUANTD_CLIENT_CPP_CLIENT_OPTIONS_H_
