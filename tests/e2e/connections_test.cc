// Connections: too many of them, from one place or at all.

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "server/net/file_descriptor.h"
#include "tests/support/http_get.h"
#include "tests/support/metric_value.h"
#include "tests/support/paths.h"
#include "tests/support/server_process.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/test_server.h"

namespace quantd::testing::connections_test {
namespace {

using server::FileDescriptor;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// A connection to "127.0.0.1:port", from an address of this machine.
FileDescriptor Connect(const std::string& to, const char* from = "127.0.0.1") {
  FileDescriptor connection(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  EXPECT_EQ(inet_pton(AF_INET, from, &address.sin_addr), 1);
  EXPECT_EQ(bind(connection.get(), reinterpret_cast<const sockaddr*>(&address),
                 sizeof(address)),
            0);
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(to.substr(to.rfind(':') + 1), &port));
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(
      connect(connection.get(), reinterpret_cast<const sockaddr*>(&address),
              sizeof(address)),
      0);
  return connection;
}

// gRPC greets on the connection; false when that ends instead.
bool IsTaken(const FileDescriptor& connection) {
  pollfd polled = {connection.get(), POLLIN, 0};
  EXPECT_EQ(poll(&polled, 1, absl::ToInt64Milliseconds(kLongEnough)), 1);
  char byte = 0;
  return recv(connection.get(), &byte, 1, 0) == 1;
}

grpc::Status ListModels(const std::shared_ptr<grpc::Channel>& channel,
                        absl::Duration timeout = kLongEnough) {
  const auto stub = v1::EncodingService::NewStub(channel);
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  v1::ListModelsResponse response;
  return stub->ListModels(&context, v1::ListModelsRequest(), &response);
}

std::shared_ptr<grpc::Channel> NewChannel(const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(),
                                   arguments);
}

int64_t DescriptorsOf(pid_t pid) {
  const std::filesystem::directory_iterator all(
      absl::StrCat("/proc/", pid, "/fd"));
  return std::distance(begin(all), end(all));
}

TEST(ConnectionsTest, ServesAgainAfterItWasOutOfDescriptors) {
  const TemporaryDirectory directory;
  const std::string unix_target = "unix:" + directory.File("s.sock");
  ServerProcess server(QuantdBinary(), directory.File("encodings.db"),
                       {"--listen", unix_target});
  // Files of the store are open from here on.
  ASSERT_EQ(ListModels(NewChannel(unix_target)).error_message(), "");
  const rlim_t most = DescriptorsOf(server.pid()) + 20;
  const rlimit limit = {most, most};
  ASSERT_EQ(prlimit(server.pid(), RLIMIT_NOFILE, &limit, nullptr), 0);
  std::vector<FileDescriptor> connections;
  for (int i = 0; i < 60; ++i) connections.push_back(Connect(server.address()));
  // The first that have no descriptor have been tried.
  ASSERT_TRUE(PollUntil(kLongEnough, [&] {
    return DescriptorsOf(server.pid()) >= static_cast<int64_t>(most);
  }));
  EXPECT_FALSE(
      ListModels(NewChannel(unix_target), absl::Milliseconds(300)).ok());
  EXPECT_FALSE(
      ListModels(NewChannel(server.address()), absl::Milliseconds(300)).ok());
  connections.clear();
  for (const std::string& target : {server.address(), unix_target}) {
    EXPECT_EQ(ListModels(NewChannel(target)).error_message(), "") << target;
  }
  EXPECT_EQ(server.Terminate(), 0);
}

TEST(ConnectionsTest, LimitsThoseOfOneAddress) {
  server::ServerOptions options;
  options.limits.address_connections = 4;
  TestServer server(options);
  std::vector<FileDescriptor> connections;
  for (int i = 0; i < 4; ++i) {
    connections.push_back(Connect(server.address(), "127.0.0.2"));
    EXPECT_TRUE(IsTaken(connections.back()));
  }
  EXPECT_FALSE(IsTaken(Connect(server.address(), "127.0.0.2")));
  EXPECT_TRUE(IsTaken(Connect(server.address(), "127.0.0.3")));
  EXPECT_EQ(ListModels(server.NewChannel()).error_message(), "");
  EXPECT_EQ(MetricValue(server.metrics(), "quantd_limit_rejections_total"), 1);
  connections.pop_back();
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    return IsTaken(Connect(server.address(), "127.0.0.2"));
  }));
}

TEST(ConnectionsTest, LimitsAllOfThemAndSaysThatItIsNotReady) {
  const TemporaryDirectory directory;
  const std::string unix_target = "unix:" + directory.File("s.sock");
  server::ServerOptions options;
  options.listen = {"127.0.0.1:0", unix_target};
  options.limits.connections = 32;
  TestServer server(options);
  // Two of the 32 are kept for the unix socket.
  std::vector<FileDescriptor> connections;
  for (int i = 0; i < 30; ++i) {
    connections.push_back(Connect(server.address()));
    // The server's call of its own port may be there, too.
    if (!IsTaken(connections.back())) break;
  }
  EXPECT_GE(connections.size(), 29u);
  EXPECT_FALSE(IsTaken(Connect(server.address())));
  EXPECT_TRUE(PollUntil(kLongEnough,
                        [&] { return !server.server().CheckReady().ok(); }));
  EXPECT_EQ(MetricValue(server.metrics(), "quantd_connections_limit"), 32);
  EXPECT_GE(MetricValue(server.metrics(), "quantd_connections"), 29);
  // Who looks after the server gets in.
  EXPECT_EQ(ListModels(NewChannel(unix_target)).error_message(), "");
  connections.clear();
  EXPECT_TRUE(PollUntil(kLongEnough,
                        [&] { return server.server().CheckReady().ok(); }));
  EXPECT_EQ(ListModels(server.NewChannel()).error_message(), "");
}

TEST(ConnectionsTest, AnswersProbesWhileItIsFull) {
  const TemporaryDirectory directory;
  ServerProcess server(QuantdBinary(), directory.File("encodings.db"),
                       {"--connections", "16"});
  const auto answer = [&server](const std::string& path) {
    return HttpGet(server.metrics_address(), path);
  };
  EXPECT_THAT(answer("/readyz"), StartsWith("HTTP/1.1 200 "));
  std::vector<FileDescriptor> connections;
  for (int i = 0; i < 16; ++i) connections.push_back(Connect(server.address()));
  ASSERT_TRUE(PollUntil(kLongEnough, [&] {
    // The server's call of its own port may have taken one's place.
    connections.push_back(Connect(server.address()));
    return absl::StartsWith(answer("/readyz?exclude=store"), "HTTP/1.1 503 ");
  }));
  // A restart would break what is connected, and help nobody.
  EXPECT_THAT(answer("/healthz"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(answer("/readyz"),
              HasSubstr("UNREACHABLE: " + server.address() +
                        " takes no more connections: 16 are open"));
  connections.clear();
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    return absl::StartsWith(answer("/readyz"), "HTTP/1.1 200 ");
  }));
}

// The socket of this process that listens on "127.0.0.1:port".
int ListeningDescriptor(const std::string& address) {
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    int fd = -1;
    int listens = 0;
    socklen_t size = sizeof(listens);
    sockaddr_in local{};
    socklen_t local_size = sizeof(local);
    if (absl::SimpleAtoi(entry.path().filename().string(), &fd) &&
        getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 &&
        listens != 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&local), &local_size) ==
            0 &&
        local.sin_family == AF_INET &&
        absl::StrCat("127.0.0.1:", ntohs(local.sin_port)) == address) {
      return fd;
    }
  }
  return -1;
}

TEST(ConnectionsTest, SaysOnTheOtherPortsThatOneIsDeaf) {
  const TemporaryDirectory directory;
  const std::string unix_target = "unix:" + directory.File("s.sock");
  server::ServerOptions options;
  options.listen = {"127.0.0.1:0", unix_target};
  TestServer server(options);
  ClientOptions client_options;
  client_options.target = unix_target;
  const auto client = Client::Connect(client_options);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto serves = [&client] {
    return *(*client)->CheckHealth("") == Client::Health::kServing;
  };
  EXPECT_TRUE(serves());
  const int deaf = ListeningDescriptor(server.address());
  ASSERT_EQ(shutdown(deaf, SHUT_RDWR), 0);
  EXPECT_TRUE(PollUntil(kLongEnough, [&] { return !serves(); }));
  EXPECT_THAT(std::string(server.server().CheckReady().message()),
              StartsWith("UNREACHABLE: nobody answers on " + server.address()));
  EXPECT_EQ(server.server().CheckLive(), server.server().CheckReady());
  // Calls are served on, where they come in.
  EXPECT_EQ(ListModels(NewChannel(unix_target)).error_message(), "");
}

TEST(ConnectionsTest, TakesNoMoreThanThereAreDescriptorsFor) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  const rlimit few = {200, old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  {
    TestServer server;
    const double limit =
        MetricValue(server.metrics(), "quantd_connections_limit");
    EXPECT_GE(limit, 16);
    EXPECT_LT(limit, 150);
  }
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
}

TEST(ConnectionsTest, LeavesAUnixSocketToTheServerThatHasIt) {
  const TemporaryDirectory directory;
  const std::string target = "unix:" + directory.File("s.sock");
  for (const bool shared_memory : {false, true}) {
    server::ServerOptions options;
    options.listen = {target};
    options.shared_memory = shared_memory;
    TestServer first(options);
    server::Metrics metrics;
    const absl::Status second =
        server::QuantdServer::Start(options, &first.store(),
                                    &first.statistics(), &metrics)
            .status();
    EXPECT_THAT(std::string(second.message()), StartsWith("LISTEN: "));
    EXPECT_THAT(std::string(second.message()), HasSubstr("s.sock"));
    EXPECT_EQ(ListModels(NewChannel(target)).error_message(), "");
  }
  EXPECT_TRUE(std::filesystem::is_empty(
      std::filesystem::path(directory.File("s.sock")).parent_path()));
}

}  // namespace
}  // namespace quantd::testing::connections_test
