// How many connections there are, and whose.

#ifndef QUANTD_SERVER_NET_CONNECTION_TABLE_H_
#define QUANTD_SERVER_NET_CONNECTION_TABLE_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "server/net/listening_socket.h"

namespace quantd::server {

// Key of the place that a connection comes from: the address of IPv4, the
// network of IPv6 (its first 64 bits); empty for all unix sockets.
std::string AddressKey(const PeerAddress& peer);

// Counts connections that somebody else owns and closes without a word: one is
// there for as long as its descriptor is that of the same socket. Thread-safe.
class ConnectionTable {
 public:
  using Clock = std::function<absl::Duration()>;
  enum class Outcome { kAdded, kFull, kAddressFull };

  // `limit`          of all connections.
  // `address_limit`  of those with one AddressKey.
  // `unix_room`      how many of `limit` only unix sockets may have.
  ConnectionTable(int64_t limit, int64_t address_limit, int64_t unix_room,
                  Clock clock = &core::SteadyNow);

  // Counts the connection if there is room for it. Looks for connections that
  // have gone when there is none, but not all the time.
  Outcome Add(int fd, const PeerAddress& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  // Forgets those that have gone; how many there are.
  int64_t CountOpen() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Connection {
    // Inode of the socket; 0 for none.
    ino_t inode = 0;
    // A key of counts_.
    std::string address;
  };

  void Sweep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Outcome RoomFor(const std::string& address)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t limit_;
  const int64_t address_limit_;
  const int64_t unix_room_;
  const Clock clock_;
  absl::Mutex mutex_;
  // By descriptor.
  std::vector<Connection> connections_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, int64_t> counts_ ABSL_GUARDED_BY(mutex_);
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration last_sweep_ ABSL_GUARDED_BY(mutex_) =
      -absl::InfiniteDuration();
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_NET_CONNECTION_TABLE_H_
