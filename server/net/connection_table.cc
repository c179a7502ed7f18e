#include "server/net/connection_table.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace quantd::server {
namespace {

// Looking at thousands of descriptors takes a millisecond.
constexpr absl::Duration kSweepInterval = absl::Milliseconds(50);

// 0 for what is not a socket.
ino_t SocketInode(int fd) {
  struct stat file {};
  if (fstat(fd, &file) != 0 || !S_ISSOCK(file.st_mode)) return 0;
  return file.st_ino;
}

std::string Bytes(const void* from, size_t size) {
  return std::string(static_cast<const char*>(from), size);
}

}  // namespace

std::string AddressKey(const PeerAddress& peer) {
  constexpr size_t kNetworkBytes = 8;
  if (peer.address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer.address);
    return Bytes(&v4.sin_addr, sizeof(v4.sin_addr));
  }
  if (peer.address.ss_family != AF_INET6) return "";
  const in6_addr& v6 =
      reinterpret_cast<const sockaddr_in6&>(peer.address).sin6_addr;
  if (!IN6_IS_ADDR_V4MAPPED(&v6)) return Bytes(&v6, kNetworkBytes);
  constexpr size_t kV4Offset = 12;
  return Bytes(v6.s6_addr + kV4Offset, sizeof(in_addr));
}

ConnectionTable::ConnectionTable(int64_t limit, int64_t address_limit,
                                 int64_t unix_room, Clock clock)
    : limit_(limit),
      address_limit_(address_limit),
      unix_room_(unix_room),
      clock_(std::move(clock)) {}

ConnectionTable::Outcome ConnectionTable::Add(int fd, const PeerAddress& peer) {
  const std::string address = AddressKey(peer);
  absl::MutexLock lock(&mutex_);
  const auto index = static_cast<size_t>(fd);
  if (index >= connections_.size()) connections_.resize(index + 1);
  // Who had the descriptor before has closed it.
  Forget(connections_[index]);
  Outcome outcome = RoomFor(address);
  if (outcome != Outcome::kAdded && clock_() - last_sweep_ >= kSweepInterval) {
    Sweep();
    outcome = RoomFor(address);
  }
  if (outcome != Outcome::kAdded) return outcome;
  connections_[index] = {SocketInode(fd), address};
  ++counts_[address];
  ++count_;
  return outcome;
}

int64_t ConnectionTable::CountOpen() {
  absl::MutexLock lock(&mutex_);
  Sweep();
  return count_;
}

ConnectionTable::Outcome ConnectionTable::RoomFor(const std::string& address) {
  const auto own = counts_.find(address);
  if (own != counts_.end() && own->second >= address_limit_) {
    return Outcome::kAddressFull;
  }
  const int64_t limit = address.empty() ? limit_ : limit_ - unix_room_;
  return count_ < limit ? Outcome::kAdded : Outcome::kFull;
}

void ConnectionTable::Sweep() {
  last_sweep_ = clock_();
  for (size_t i = 0; i < connections_.size(); ++i) {
    Connection& connection = connections_[i];
    if (connection.inode != 0 &&
        SocketInode(static_cast<int>(i)) != connection.inode) {
      Forget(connection);
    }
  }
}

void ConnectionTable::Forget(Connection& connection) {
  if (connection.inode == 0) return;
  const auto own = counts_.find(connection.address);
  if (--own->second == 0) counts_.erase(own);
  --count_;
  connection = Connection();
}

}  // namespace quantd::server
