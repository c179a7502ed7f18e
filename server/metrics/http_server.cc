#include "server/metrics/http_server.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "prometheus/text_serializer.h"
#include "server/net/connection_table.h"

namespace quantd::server {
namespace {

constexpr size_t kMaxConnections = 64;
// Most connections of one address.
constexpr size_t kMaxOfAddress = 32;
// From the connection to the last byte of the answer.
constexpr absl::Duration kTimeout = absl::Seconds(5);
// For the client to read what is written.
constexpr absl::Duration kLingerTime = absl::Seconds(1);
constexpr size_t kMaxHttpRequestBytes = 8 << 10;
constexpr absl::string_view kRequestEnd = "\r\n\r\n";

struct Response {
  int code;
  absl::string_view reason;
  absl::string_view content_type;
  absl::Cord body;
  absl::string_view extra_header;
};

constexpr absl::string_view kPlainText = "text/plain; charset=utf-8";
constexpr absl::string_view kMetricsText =
    "text/plain; version=0.0.4; charset=utf-8";
constexpr absl::string_view kHtml = "text/html; charset=utf-8";

// Page with links to what there is, for people.
constexpr absl::string_view kContents =
    "<!DOCTYPE html>\n<html lang=\"en\"><title>quantd</title>\n"
    "<h1>quantd</h1>\n<ul>\n"
    "<li><a href=\"/metrics\">/metrics</a>: for Prometheus</li>\n"
    "<li><a href=\"/healthz\">/healthz</a>: whether the process has to be "
    "restarted</li>\n"
    "<li><a href=\"/readyz\">/readyz</a>: whether it takes calls; "
    "<a href=\"/readyz?exclude=store\">without the store</a></li>\n"
    "</ul></html>\n";

// Shares the body.
absl::Cord ToText(const Response& response, bool with_body) {
  absl::Cord text(absl::StrCat("HTTP/1.1 ", response.code, " ", response.reason,
                               "\r\nContent-Type: ", response.content_type,
                               "\r\nContent-Length: ", response.body.size(),
                               "\r\n", response.extra_header,
                               "Cache-Control: no-store\r\n",
                               "Connection: close\r\n\r\n"));
  if (with_body) text.Append(response.body);
  return text;
}

// Or may be; what is not costs little.
bool IsForMetrics(absl::string_view request) {
  return absl::StrContains(request.substr(0, request.find("\r\n")),
                           " /metrics");
}

absl::Status BadAddress(const std::string& address, absl::string_view why) {
  return core::ConfigInvalidError(
      absl::StrCat("cannot serve metrics on \"", address, "\": ", why));
}

bool IsHostPort(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  return colon != std::string::npos && colon != 0 &&
         address.find_first_of(", \t") == std::string::npos &&
         absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= 0 &&
         port <= 65535;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(
    const std::string& address, const Metrics* metrics, Probes probes,
    Clock clock) {
  if (!IsHostPort(address)) return BadAddress(address, "expected host:port");
  absl::StatusOr<std::vector<std::unique_ptr<ListeningSocket>>> sockets =
      ListeningSocket::Tcp(address);
  if (!sockets.ok()) return BadAddress(address, sockets.status().message());
  std::unique_ptr<HttpServer> server(
      new HttpServer(metrics, std::move(probes), std::move(clock)));
  if (server->stop_.fd() < 0) {
    return BadAddress(address, "there is no descriptor to stop by");
  }
  server->sockets_ = *std::move(sockets);
  server->port_ = server->sockets_[0]->port();
  server->address_ =
      absl::StrCat(address.substr(0, address.rfind(':')), ":", server->port_);
  server->thread_ = std::thread([s = server.get()] { s->Run(); });
  return server;
}

HttpServer::HttpServer(const Metrics* metrics, Probes probes, Clock clock)
    : metrics_(metrics), probes_(std::move(probes)), clock_(std::move(clock)) {}

HttpServer::~HttpServer() {
  stop_.Send();
  if (thread_.joinable()) thread_.join();
}

void HttpServer::Run() {
  bool pauses = false;
  std::vector<pollfd> polled;
  while (true) {
    polled.clear();
    polled.push_back({stop_.fd(), POLLIN, 0});
    for (const std::unique_ptr<ListeningSocket>& socket : sockets_) {
      polled.push_back({pauses ? -1 : socket->fd(), POLLIN, 0});
    }
    absl::Duration end = absl::InfiniteDuration();
    for (const Connection& connection : connections_) {
      const bool writes = connection.has_response && !connection.is_written;
      polled.push_back({connection.socket.get(),
                        static_cast<short>(writes ? POLLOUT : POLLIN), 0});
      end = std::min(end, connection.end);
    }
    int64_t wait_ms = pauses ? kExhaustedPauseMs : -1;
    if (end < absl::InfiniteDuration()) {
      const int64_t left_ms =
          std::max<int64_t>(absl::ToInt64Milliseconds(end - clock_()), 0) + 1;
      wait_ms = pauses ? std::min(wait_ms, left_ms) : left_ms;
    }
    poll(polled.data(), polled.size(), static_cast<int>(wait_ms));
    if (polled[0].revents != 0) return;
    const absl::Duration now = clock_();
    size_t index = 1 + sockets_.size();
    for (auto it = connections_.begin(); it != connections_.end(); ++index) {
      const bool goes_on =
          (polled[index].revents == 0 || Serve(*it)) && now < it->end;
      it = goes_on ? std::next(it) : connections_.erase(it);
    }
    absl::Cord metrics;
    pauses = AcceptAll(&metrics);
    AnswerAll(&metrics);
    MakeRoom();
  }
}

bool HttpServer::AcceptAll(absl::Cord* metrics) {
  // Then the others have their turn. Who only has to be let go of costs little,
  // and a probe may wait behind thousands of them.
  constexpr int kMost = 1024;
  bool exhausted = false;
  for (const std::unique_ptr<ListeningSocket>& socket : sockets_) {
    for (int i = 0; i < kMost; ++i) {
      Connection connection;
      PeerAddress peer;
      const ListeningSocket::Outcome outcome =
          socket->Accept(&connection.socket, &peer);
      if (outcome == ListeningSocket::Outcome::kExhausted) exhausted = true;
      if (outcome != ListeningSocket::Outcome::kAccepted) break;
      connection.address = AddressKey(peer);
      connection.end = clock_() + kTimeout;
      if (Read(connection)) connections_.push_back(std::move(connection));
      if (connections_.size() >= 2 * kMaxConnections) {
        AnswerAll(metrics);
        MakeRoom();
      }
    }
  }
  return exhausted;
}

void HttpServer::AnswerAll(absl::Cord* metrics) {
  for (auto it = connections_.begin(); it != connections_.end();) {
    bool goes_on = true;
    if (it->has_request && !it->has_response) goes_on = Reply(*it, metrics);
    it = goes_on ? std::next(it) : connections_.erase(it);
  }
}

void HttpServer::MakeRoom() {
  absl::flat_hash_map<std::string, size_t> counts;
  for (const Connection& connection : connections_) {
    ++counts[connection.address];
  }
  for (const auto& [address, count] : counts) {
    for (size_t i = kMaxOfAddress; i < count; ++i) DropOne(&address);
  }
  while (connections_.size() > kMaxConnections) DropOne(nullptr);
}

void HttpServer::DropOne(const std::string* address) {
  const auto progress = [](const Connection& connection) {
    return connection.is_written ? 0 : connection.has_response ? 1 : 2;
  };
  auto dropped = connections_.end();
  for (auto it = connections_.begin(); it != connections_.end(); ++it) {
    if (address != nullptr && it->address != *address) continue;
    if (dropped == connections_.end() || progress(*it) < progress(*dropped)) {
      dropped = it;
    }
  }
  connections_.erase(dropped);
}

bool HttpServer::Serve(Connection& connection) {
  if (!connection.has_request) return Read(connection);
  if (!connection.is_written) return Write(connection);
  // A connection that is closed with something unread is reset, and the answer
  // with it.
  std::array<char, 4096> dropped;
  const ssize_t size =
      recv(connection.socket.get(), dropped.data(), dropped.size(), 0);
  return size > 0 || (size < 0 && (errno == EAGAIN || errno == EINTR));
}

bool HttpServer::Read(Connection& connection) {
  std::array<char, 4096> buffer;
  const ssize_t size =
      recv(connection.socket.get(), buffer.data(), buffer.size(), 0);
  if (size < 0) return errno == EAGAIN || errno == EINTR;
  if (size == 0) return false;
  connection.request.append(buffer.data(), static_cast<size_t>(size));
  connection.has_request = absl::StrContains(connection.request, kRequestEnd) ||
                           connection.request.size() > kMaxHttpRequestBytes;
  if (!connection.has_request || IsForMetrics(connection.request)) return true;
  return Reply(connection, nullptr);
}

bool HttpServer::Reply(Connection& connection, absl::Cord* metrics) {
  connection.response = Answer(connection.request, metrics);
  connection.has_response = true;
  return Write(connection);
}

bool HttpServer::Write(Connection& connection) {
  const int fd = connection.socket.get();
  while (!connection.response.empty()) {
    const absl::string_view piece = *connection.response.chunk_begin();
    const bool is_last = piece.size() == connection.response.size();
    const ssize_t size = send(fd, piece.data(), piece.size(),
                              MSG_NOSIGNAL | (is_last ? 0 : MSG_MORE));
    if (size < 0) return errno == EAGAIN || errno == EINTR;
    connection.response.RemovePrefix(static_cast<size_t>(size));
  }
  shutdown(fd, SHUT_WR);
  connection.is_written = true;
  connection.end = std::min(connection.end, clock_() + kLingerTime);
  return true;
}

absl::Cord HttpServer::Answer(absl::string_view request, absl::Cord* metrics) {
  if (!absl::StrContains(request, kRequestEnd)) {
    return ToText({431, "Request Header Fields Too Large", kPlainText,
                   absl::Cord("expected less\n"), ""},
                  true);
  }
  const std::vector<absl::string_view> words =
      absl::StrSplit(request.substr(0, request.find("\r\n")), ' ');
  if (words.size() != 3 || !absl::StartsWith(words[2], "HTTP/1.")) {
    return ToText(
        {400, "Bad Request", kPlainText, absl::Cord("expected HTTP/1.1\n"), ""},
        true);
  }
  const absl::string_view method = words[0];
  const std::pair<absl::string_view, absl::string_view> target =
      absl::StrSplit(words[1], absl::MaxSplits('?', 1));
  const auto [path, query] = target;
  Response response{404, "Not Found", kPlainText, absl::Cord("not found\n"),
                    ""};
  if (path == "/" || path == "/metrics" || path == "/healthz" ||
      path == "/readyz") {
    response = {200, "OK", kPlainText, absl::Cord("ok\n"), ""};
    if (method != "GET" && method != "HEAD") {
      response = {405, "Method Not Allowed", kPlainText,
                  absl::Cord("expected GET or HEAD\n"), "Allow: GET, HEAD\r\n"};
    } else if (path == "/") {
      response.content_type = kHtml;
      response.body = absl::Cord(kContents);
    } else if (path == "/metrics") {
      response.content_type = kMetricsText;
      if (metrics->empty()) {
        *metrics = absl::Cord(
            prometheus::TextSerializer().Serialize(metrics_->Collect()));
      }
      response.body = *metrics;
    } else {
      absl::Status status =
          path == "/healthz" ? probes_.live() : probes_.ready();
      if (path == "/readyz" && query != "exclude=store" && status.ok()) {
        status = AskStore();
        if (status.ok()) status = LatestWrite();
      }
      if (!status.ok()) {
        response = {503, "Service Unavailable", kPlainText,
                    absl::Cord(absl::StrCat(status.message(), "\n")), ""};
      }
    }
  }
  return ToText(response, method != "HEAD");
}

absl::Status HttpServer::LatestWrite() const {
  // Whoever sends no more calls to a server that is not ready has to send some
  // again, or no write could ever tell that it has become so.
  constexpr absl::Duration kCounts = absl::Minutes(1);
  const absl::optional<Metrics::FailedWrite> failed = metrics_->failed_write();
  if (!failed.has_value() || failed->age >= kCounts) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      "the latest write to the store failed ",
      absl::FormatDuration(absl::Trunc(failed->age, absl::Seconds(1))),
      " ago: ", failed->status.message()));
}

absl::Status HttpServer::AskStore() {
  // A look at the store that took its time is good for all who ask meanwhile.
  const absl::Duration start = clock_();
  if (start >= store_end_) {
    store_status_ = probes_.store();
    const absl::Duration now = clock_();
    store_end_ = now + (now - start);
  }
  return store_status_;
}

}  // namespace quantd::server
