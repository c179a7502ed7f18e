#include "server/net/dial.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/net/acceptor.h"
#include "server/net/listening_socket.h"

namespace quantd::server {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Milliseconds(100);

class DialTest : public ::testing::TestWithParam<bool> {
 protected:
  static std::vector<std::unique_ptr<ListeningSocket>> Listen() {
    return std::move(ListeningSocket::Tcp("127.0.0.1:0")).value();
  }
  static std::string Outcome(const PeerAddress& address) {
    return std::string(Dial(address, GetParam(), kTimeout).message());
  }
};

TEST_P(DialTest, SeesThatNobodyTakesTheConnection) {
  const auto sockets = Listen();
  EXPECT_THAT(Outcome(sockets[0]->address()), HasSubstr("no answer"));
}

TEST_P(DialTest, SeesThatNobodyListens) {
  auto sockets = Listen();
  const PeerAddress address = sockets[0]->address();
  sockets.clear();
  EXPECT_THAT(Outcome(address), HasSubstr("cannot connect"));
}

TEST_P(DialTest, SeesThatItIsTurnedAway) {
  auto sockets = Listen();
  const PeerAddress address = sockets[0]->address();
  std::vector<Acceptor::Port> ports;
  ports.push_back({std::move(sockets[0]),
                   [](FileDescriptor connection, const PeerAddress& peer) {}});
  const auto acceptor = Acceptor::Start(std::move(ports), [] {});
  ASSERT_TRUE(acceptor.ok());
  EXPECT_FALSE(Dial(address, GetParam(), absl::Seconds(10)).ok());
}

INSTANTIATE_TEST_SUITE_P(PlainAndSecure, DialTest, ::testing::Bool());

}  // namespace
}  // namespace quantd::server
