#include "server/guard/caller_address.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace quantd::server {
namespace {

TEST(CallerAddressTest, LeavesOutThePort) {
  EXPECT_EQ(CallerAddress("ipv4:10.0.0.1:4711"), "ipv4:10.0.0.1");
  EXPECT_EQ(CallerAddress("ipv6:%5B::1%5D:4711"), "ipv6:%5B::1%5D");
  EXPECT_EQ(CallerAddress("unix:/run/quantd.sock"), "unix");
  EXPECT_EQ(CallerAddress("unix:"), "unix");
  EXPECT_EQ(CallerAddress("fd:-1"), "");
}

TEST(CallerAddressTest, AsksTheSocketOfAConnectionThatGrpcWasGiven) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  EXPECT_EQ(CallerAddress(absl::StrCat("fd:", pair[0])), "unix");
  close(pair[0]);
  close(pair[1]);

  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size),
            0);
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(connect(client, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(CallerAddress(absl::StrCat("fd:", client)), "ipv4:127.0.0.1");
  close(client);
  close(listener);
}

}  // namespace
}  // namespace quantd::server
