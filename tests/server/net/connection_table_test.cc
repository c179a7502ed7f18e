#include "server/net/connection_table.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/net/file_descriptor.h"

namespace quantd::server {
namespace {

using Outcome = ConnectionTable::Outcome;

FileDescriptor NewSocket() {
  return FileDescriptor(socket(AF_UNIX, SOCK_STREAM, 0));
}

PeerAddress V4(const char* text) {
  PeerAddress peer;
  auto& address = reinterpret_cast<sockaddr_in&>(peer.address);
  address.sin_family = AF_INET;
  EXPECT_EQ(inet_pton(AF_INET, text, &address.sin_addr), 1);
  return peer;
}

PeerAddress V6(const char* text) {
  PeerAddress peer;
  auto& address = reinterpret_cast<sockaddr_in6&>(peer.address);
  address.sin6_family = AF_INET6;
  EXPECT_EQ(inet_pton(AF_INET6, text, &address.sin6_addr), 1);
  return peer;
}

PeerAddress Unix() {
  PeerAddress peer;
  peer.address.ss_family = AF_UNIX;
  return peer;
}

class ConnectionTableTest : public ::testing::Test {
 protected:
  // Opens a socket, and keeps it, for the table to add.
  Outcome Add(const PeerAddress& peer) {
    sockets_.push_back(NewSocket());
    return table_.Add(sockets_.back().get(), peer);
  }
  void Wait() { now_ += absl::Seconds(1); }

  absl::Duration now_;
  ConnectionTable table_{8, 3, 2, [this] { return now_; }};
  std::vector<FileDescriptor> sockets_;
};

TEST_F(ConnectionTableTest, HasAShareForEachAddress) {
  for (const char* address : {"10.0.0.1", "10.0.0.1", "10.0.0.1"}) {
    EXPECT_EQ(Add(V4(address)), Outcome::kAdded);
  }
  EXPECT_EQ(Add(V4("10.0.0.1")), Outcome::kAddressFull);
  // The same in the words of IPv6.
  EXPECT_EQ(Add(V6("::ffff:10.0.0.1")), Outcome::kAddressFull);
  EXPECT_EQ(Add(V4("10.0.0.2")), Outcome::kAdded);
  EXPECT_EQ(table_.CountOpen(), 4);
}

TEST_F(ConnectionTableTest, TakesANetworkOfIpv6ForOneAddress) {
  for (const char* address : {"2001:db8::1", "2001:db8::2", "2001:db8::3"}) {
    EXPECT_EQ(Add(V6(address)), Outcome::kAdded);
  }
  EXPECT_EQ(Add(V6("2001:db8::4")), Outcome::kAddressFull);
  EXPECT_EQ(Add(V6("2001:db8:0:1::4")), Outcome::kAdded);
}

TEST_F(ConnectionTableTest, KeepsRoomForUnixSockets) {
  for (const char* address : {"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4",
                              "10.0.0.5", "10.0.0.6"}) {
    EXPECT_EQ(Add(V4(address)), Outcome::kAdded);
  }
  EXPECT_EQ(Add(V4("10.0.0.7")), Outcome::kFull);
  EXPECT_EQ(Add(Unix()), Outcome::kAdded);
  EXPECT_EQ(Add(Unix()), Outcome::kAdded);
  EXPECT_EQ(Add(Unix()), Outcome::kFull);
}

TEST_F(ConnectionTableTest, ForgetsWhatWasClosed) {
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Add(V4("10.0.0.1")), Outcome::kAdded);
  EXPECT_EQ(Add(V4("10.0.0.1")), Outcome::kAddressFull);
  sockets_.clear();
  Wait();
  EXPECT_EQ(Add(V4("10.0.0.1")), Outcome::kAdded);
  EXPECT_EQ(table_.CountOpen(), 1);
}

TEST_F(ConnectionTableTest, DoesNotLookAtAllDescriptorsForEveryStranger) {
  for (int i = 0; i < 4; ++i) Add(V4("10.0.0.1"));
  sockets_.pop_back();
  sockets_.pop_back();
  EXPECT_EQ(Add(V6("2001:db8::1")), Outcome::kAdded);
  // That descriptor was one of the two; the other is not looked for yet.
  EXPECT_EQ(Add(V4("10.0.0.1")), Outcome::kAdded);
  EXPECT_EQ(Add(V4("10.0.0.1")), Outcome::kAddressFull);
}

TEST_F(ConnectionTableTest, KnowsANewOwnerOfAnOldDescriptor) {
  FileDescriptor first = NewSocket();
  const int fd = first.get();
  EXPECT_EQ(table_.Add(fd, V4("10.0.0.1")), Outcome::kAdded);
  first = FileDescriptor();
  const FileDescriptor other = NewSocket();
  ASSERT_EQ(other.get(), fd);
  EXPECT_EQ(table_.CountOpen(), 0);
  EXPECT_EQ(table_.Add(fd, V4("10.0.0.2")), Outcome::kAdded);
  EXPECT_EQ(table_.CountOpen(), 1);
}

}  // namespace
}  // namespace quantd::server
