#include "server/net/listening_socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "server/net/file_descriptor.h"
#include "tests/support/temporary_directory.h"

namespace quantd::server {
namespace {

bool Exists(const std::string& path) {
  struct stat file {};
  return lstat(path.c_str(), &file) == 0;
}

class UnixSocketTest : public ::testing::TestWithParam<int> {
 protected:
  auto Listen() const { return ListeningSocket::Unix(path_, GetParam()); }

  testing::TemporaryDirectory directory_;
  const std::string path_ = directory_.File("s.sock");
};

TEST_P(UnixSocketTest, LeavesAPathAloneThatSomebodyServes) {
  auto first = Listen();
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(core::ErrorReason(Listen().status()), "LISTEN");
  EXPECT_TRUE(Exists(path_));
  first->reset();
  EXPECT_FALSE(Exists(path_));
}

TEST_P(UnixSocketTest, ReplacesWhatNobodyServesAnyMore) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
  {
    const FileDescriptor left(socket(AF_UNIX, GetParam(), 0));
    ASSERT_EQ(bind(left.get(), reinterpret_cast<const sockaddr*>(&address),
                   sizeof(address)),
              0);
  }
  ASSERT_TRUE(Exists(path_));
  EXPECT_TRUE(Listen().ok());
}

TEST_P(UnixSocketTest, LeavesWhatIsNoSocketAlone) {
  std::ofstream(path_) << "a file";
  EXPECT_EQ(core::ErrorReason(Listen().status()), "LISTEN");
  EXPECT_TRUE(Exists(path_));
}

TEST_P(UnixSocketTest, DoesNotRemoveWhatAnotherPutThere) {
  auto first = Listen();
  ASSERT_TRUE(first.ok());
  // Somebody cleans up, and another server comes.
  ASSERT_EQ(unlink(path_.c_str()), 0);
  const auto second = Listen();
  ASSERT_TRUE(second.ok());
  first->reset();
  EXPECT_TRUE(Exists(path_));
}

INSTANTIATE_TEST_SUITE_P(Types, UnixSocketTest,
                         ::testing::Values(SOCK_STREAM, SOCK_SEQPACKET));

TEST(TcpSocketTest, TakesOnePortForAllAddresses) {
  for (const char* host : {"127.0.0.1", "localhost", "0.0.0.0"}) {
    const auto sockets = ListeningSocket::Tcp(absl::StrCat(host, ":0"));
    ASSERT_TRUE(sockets.ok()) << host;
    const int port = sockets->front()->port();
    EXPECT_GT(port, 0);
    for (const auto& socket : *sockets) EXPECT_EQ(socket->port(), port);
    // It is theirs alone.
    const auto other = ListeningSocket::Tcp(absl::StrCat(host, ":", port));
    EXPECT_EQ(core::ErrorReason(other.status()), "LISTEN") << host;
    EXPECT_THAT(std::string(other.status().message()),
                ::testing::HasSubstr(": address already in use;"));
  }
}

TEST(TcpSocketTest, RefusesWhatIsNoAddressOfThisMachine) {
  for (const char* address :
       {"127.0.0.1", ":1", "127.0.0.1:x", "127.0.0.1:70000", "[::1:0",
        "192.0.2.1:0", "no-such-host.invalid:0"}) {
    EXPECT_EQ(core::ErrorReason(ListeningSocket::Tcp(address).status()),
              "LISTEN")
        << address;
  }
}

}  // namespace
}  // namespace quantd::server
