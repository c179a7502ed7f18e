#include "server/metrics/http_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "server/metrics/metrics.h"
#include "tests/support/metric_value.h"
#include "tests/support/sanitizers.h"

namespace quantd::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

int Connect(int port, const char* from = "127.0.0.1") {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  EXPECT_EQ(inet_pton(AF_INET, from, &address.sin_addr), 1);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)),
            0);
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)),
            0);
  return fd;
}

void Send(int fd, const std::string& bytes) {
  EXPECT_EQ(write(fd, bytes.data(), bytes.size()),
            static_cast<ssize_t>(bytes.size()));
}

// Until the server closes the connection.
std::string ReadAll(int fd) {
  std::string response;
  char buffer[4096];
  ssize_t count;
  while ((count = read(fd, buffer, sizeof(buffer))) > 0) {
    response.append(buffer, static_cast<size_t>(count));
  }
  close(fd);
  return response;
}

// The whole response to one request.
std::string Request(int port, const std::string& method,
                    const std::string& path) {
  const int fd = Connect(port);
  Send(fd,
       absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  return ReadAll(fd);
}

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    absl::StatusOr<std::unique_ptr<HttpServer>> server =
        HttpServer::Start("127.0.0.1:0", &metrics_, Probes(), Clock());
    EXPECT_TRUE(server.ok()) << server.status();
    if (server.ok()) server_ = *std::move(server);
  }

  // Stands still unless a test moves it: none of the server's times is over
  // because the machine is slow.
  HttpServer::Clock Clock() {
    return [this] { return absl::Milliseconds(now_ms_.load()); };
  }

  HttpServer::Probes Probes() {
    HttpServer::Probes probes;
    probes.live = [this] {
      const absl::MutexLock lock(&busy_);
      return live_ ? absl::OkStatus() : absl::UnavailableError("deaf");
    };
    probes.ready = [this] {
      return ready_ ? absl::OkStatus() : core::DrainingError();
    };
    probes.store = [this] {
      return store_ ? absl::OkStatus()
                    : core::StoreUnavailableError("disk is away");
    };
    return probes;
  }

  std::string Get(const std::string& path) {
    return Request(server_->port(), "GET", path);
  }

  std::atomic<int64_t> now_ms_{0};
  Metrics metrics_{Clock()};
  // Held, /healthz waits, and the server with it.
  absl::Mutex busy_;
  std::atomic<bool> live_{true};
  std::atomic<bool> ready_{true};
  std::atomic<bool> store_{true};
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, TellsTheBoundPort) {
  EXPECT_GT(server_->port(), 0);
  EXPECT_EQ(server_->address(), absl::StrCat("127.0.0.1:", server_->port()));
}

TEST_F(HttpServerTest, ServesMetricsInTextFormat) {
  metrics_.PayloadIn(4321);
  const std::string response = Get("/metrics");
  EXPECT_THAT(response, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(response, HasSubstr("text/plain; version=0.0.4"));
  EXPECT_THAT(response,
              HasSubstr("quantd_payload_bytes_total{direction=\"in\"} 4321"));
  EXPECT_THAT(response, HasSubstr("# TYPE quantd_store_seconds histogram"));
}

TEST_F(HttpServerTest, LinksToWhatThereIs) {
  const std::string response = Get("/");
  EXPECT_THAT(response, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(response, HasSubstr("text/html"));
  for (const char* path : {"/metrics", "/healthz", "/readyz"}) {
    EXPECT_THAT(response, HasSubstr(absl::StrCat("href=\"", path, "\"")));
    EXPECT_THAT(Get(path), StartsWith("HTTP/1.1 200 OK\r\n"));
  }
}

TEST_F(HttpServerTest, IsHealthyUnlessARestartHelps) {
  ready_ = false;
  store_ = false;
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  live_ = false;
  const std::string response = Get("/healthz");
  EXPECT_THAT(response, StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(response, HasSubstr("\r\n\r\ndeaf\n"));
}

TEST_F(HttpServerTest, IsReadyOrSaysWhyNot) {
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  store_ = false;
  const std::string response = Get("/readyz");
  EXPECT_THAT(response, StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(response, HasSubstr("STORE_UNAVAILABLE: disk is away"));
  EXPECT_THAT(Get("/readyz?exclude=store"), StartsWith("HTTP/1.1 200 OK\r\n"));
  ready_ = false;
  for (const char* path : {"/readyz", "/readyz?exclude=store"}) {
    const std::string draining = Get(path);
    EXPECT_THAT(draining, StartsWith("HTTP/1.1 503 ")) << path;
    EXPECT_THAT(draining, HasSubstr("DRAINING")) << path;
  }
}

TEST_F(HttpServerTest, IsNotReadyForAMinuteAfterAWriteFailed) {
  metrics_.StoreWritten(core::StoreUnavailableError("disk is full"));
  now_ms_ = 12345;
  const std::string response = Get("/readyz");
  EXPECT_THAT(response, StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(response,
              HasSubstr("\r\n\r\nthe latest write to the store failed 12s ago: "
                        "STORE_UNAVAILABLE: "));
  EXPECT_THAT(Get("/readyz?exclude=store"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(Get("/metrics"), HasSubstr("\nquantd_store_write_failed 1\n"));
  // It is to be tried again; that it failed is still known.
  now_ms_ = 60000;
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(Get("/metrics"), HasSubstr("\nquantd_store_write_failed 1\n"));
  metrics_.StoreWritten(core::StoreUnavailableError("disk is full"));
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 503 "));
  metrics_.StoreWritten(absl::OkStatus());
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(Get("/metrics"), HasSubstr("\nquantd_store_write_failed 0\n"));
}

TEST_F(HttpServerTest, HasNothingElse) {
  for (const char* path : {"/metrics/", "/metrics/x", "/../etc/passwd",
                           "/healthz.html", "/favicon.ico"}) {
    EXPECT_THAT(Get(path), StartsWith("HTTP/1.1 404 ")) << path;
  }
}

TEST_F(HttpServerTest, OnlyReads) {
  const std::string posted = Request(server_->port(), "POST", "/metrics");
  EXPECT_THAT(posted, StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(posted, HasSubstr("Allow: GET, HEAD\r\n"));
  const std::string head = Request(server_->port(), "HEAD", "/metrics");
  EXPECT_THAT(head, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(head, Not(HasSubstr("# HELP")));
}

TEST_F(HttpServerTest, ServesWhileOthersAreSlow) {
  // Some say nothing, some half of a request, some do not read the answer.
  std::vector<int> slow;
  for (const char* words : {"", "GET /met", "GET /metrics HTTP/1.1\r\n\r\n"}) {
    for (int i = 0; i < 100; ++i) {
      slow.push_back(Connect(server_->port()));
      Send(slow.back(), words);
    }
  }
  // By its clock the slow ones may stay for ever. Waiting for any of them would
  // not end.
  EXPECT_THAT(Get("/metrics"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  for (const int fd : slow) close(fd);
}

TEST_F(HttpServerTest, AnswersWhoeverAskedBeforeItMakesRoom) {
  // The server is busy while a hundred ask for metrics and many say nothing.
  busy_.Lock();
  const int probe = Connect(server_->port(), "127.0.0.2");
  Send(probe, "GET /healthz HTTP/1.1\r\n\r\n");
  std::vector<int> asked;
  std::vector<int> silent;
  for (int i = 0; i < 100; ++i) {
    silent.push_back(Connect(server_->port()));
    asked.push_back(Connect(server_->port()));
    Send(asked.back(), "GET /metrics HTTP/1.1\r\n\r\n");
  }
  busy_.Unlock();
  EXPECT_THAT(ReadAll(probe), StartsWith("HTTP/1.1 200 OK\r\n"));
  for (const int fd : asked) {
    EXPECT_THAT(ReadAll(fd), StartsWith("HTTP/1.1 200 OK\r\n"));
  }
  for (const int fd : silent) close(fd);
}

TEST_F(HttpServerTest, LetsGoFirstOfThoseThatHaveTheirAnswer) {
  const int fd = Connect(server_->port());
  Send(fd, "GET /hea");
  std::vector<int> answered;
  for (int i = 0; i < 100; ++i) {
    answered.push_back(Connect(server_->port()));
    Send(answered.back(), "GET /healthz HTTP/1.1\r\n\r\n");
  }
  // They have come before.
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  Send(fd, "lthz HTTP/1.1\r\n\r\n");
  EXPECT_THAT(ReadAll(fd), StartsWith("HTTP/1.1 200 OK\r\n"));
  // Whoever was let go of has the answer nevertheless.
  for (const int other : answered) {
    EXPECT_THAT(ReadAll(other), StartsWith("HTTP/1.1 200 OK\r\n"));
  }
}

TEST_F(HttpServerTest, LeavesRoomForOtherAddresses) {
  const int fd = Connect(server_->port(), "127.0.0.2");
  Send(fd, "GET /hea");
  std::vector<int> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(Connect(server_->port()));
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  Send(fd, "lthz HTTP/1.1\r\n\r\n");
  EXPECT_THAT(ReadAll(fd), StartsWith("HTTP/1.1 200 OK\r\n"));
  for (const int other : silent) close(other);
}

TEST_F(HttpServerTest, HearsProbesWhileOthersAskForMetricsWithoutEnd) {
  std::atomic<bool> done{false};
  std::atomic<int64_t> asked{0};
  std::vector<std::thread> floods;
  for (int i = 0; i < 2; ++i) {
    floods.emplace_back([this, &done, &asked] {
      std::deque<int> unread;
      while (!done) {
        unread.push_back(Connect(server_->port()));
        Send(unread.back(), "GET /metrics HTTP/1.1\r\n\r\n");
        ++asked;
        if (unread.size() < 500) continue;
        close(unread.front());
        unread.pop_front();
      }
      for (const int fd : unread) close(fd);
    });
  }
  for (int i = 0; i < (testing::kSanitized ? 5 : 20); ++i) {
    // There are always some before the probe.
    const int64_t before = asked;
    EXPECT_TRUE(testing::PollUntil(absl::Seconds(120),
                                   [&] { return asked >= before + 20; }));
    EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  }
  done = true;
  for (std::thread& flood : floods) flood.join();
}

TEST_F(HttpServerTest, ReadsARequestThatComesInPieces) {
  const int fd = Connect(server_->port());
  for (const char* piece :
       {"GET /hea", "lthz HTTP/1.1\r", "\nHost: x\r\n", "\r", "\n"}) {
    Send(fd, piece);
    // The server reads what came before this.
    EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  }
  EXPECT_THAT(ReadAll(fd), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpServerTest, AnswersWhatIsNoRequest) {
  int fd = Connect(server_->port());
  Send(fd, "nonsense\r\n\r\n");
  EXPECT_THAT(ReadAll(fd), StartsWith("HTTP/1.1 400 "));
  fd = Connect(server_->port());
  Send(fd, "GET /metrics HTTP/1.1\r\nX: " + std::string(20'000, 'x'));
  EXPECT_THAT(ReadAll(fd), StartsWith("HTTP/1.1 431 "));
}

TEST_F(HttpServerTest, DropsWhoGivesNoRequest) {
  const int silent = Connect(server_->port());
  // It looks at its clock whenever something comes.
  const auto look_at = [this](int64_t time_ms) {
    now_ms_ = time_ms;
    EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  };
  look_at(0);
  look_at(4999);
  char byte;
  EXPECT_EQ(recv(silent, &byte, 1, MSG_DONTWAIT), -1);
  EXPECT_EQ(errno, EAGAIN);
  look_at(5000);
  EXPECT_EQ(ReadAll(silent), "");
}

TEST_F(HttpServerTest, RefusesABadAddress) {
  for (const std::string& address :
       {std::string("127.0.0.1"), std::string(":8431"),
        std::string("127.0.0.1:http"), std::string("127.0.0.1:70000"),
        std::string("127.0.0.1:0,127.0.0.1:0"), std::string("192.0.2.1:0"),
        absl::StrCat("127.0.0.1:", server_->port())}) {
    const absl::Status status =
        HttpServer::Start(address, &metrics_, Probes(), Clock()).status();
    EXPECT_EQ(core::ErrorReason(status), "CONFIG_INVALID") << address;
    EXPECT_THAT(std::string(status.message()), HasSubstr(address));
  }
}

}  // namespace
}  // namespace quantd::server
