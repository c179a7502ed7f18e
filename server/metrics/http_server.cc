#include "server/metrics/http_server.h"

#include <civetweb.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "prometheus/text_serializer.h"

namespace quantd::server {
namespace {

struct Response {
  int code;
  absl::string_view reason;
  absl::string_view content_type;
  std::string body;
  absl::string_view extra_header;
};

constexpr absl::string_view kPlainText = "text/plain; charset=utf-8";
constexpr absl::string_view kMetricsText =
    "text/plain; version=0.0.4; charset=utf-8";

// The library writes its errors to stderr unless told otherwise; what matters
// comes back from mg_start2.
int DropMessage(const mg_connection*, const char*) { return 1; }

void Write(mg_connection* connection, const Response& response,
           bool with_body) {
  std::string text =
      absl::StrCat("HTTP/1.1 ", response.code, " ", response.reason,
                   "\r\nContent-Type: ", response.content_type,
                   "\r\nContent-Length: ", response.body.size(), "\r\n",
                   response.extra_header, "Cache-Control: no-store\r\n",
                   "Connection: close\r\n\r\n");
  if (with_body) text += response.body;
  mg_write(connection, text.data(), text.size());
}

absl::Status BadAddress(const std::string& address, absl::string_view why) {
  return core::ConfigInvalidError(
      absl::StrCat("cannot serve metrics on \"", address, "\": ", why));
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(
    const std::string& address, const Metrics* metrics,
    std::function<absl::Status()> ready) {
  const size_t colon = address.rfind(':');
  int port = 0;
  // The library takes more than one address and flags in the port; here it is
  // one plain address.
  if (colon == std::string::npos || colon == 0 ||
      address.find_first_of(", \t") != std::string::npos ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 ||
      port > 65535) {
    return BadAddress(address, "expected host:port");
  }
  const std::string host = address.substr(0, colon);

  std::unique_ptr<HttpServer> server(new HttpServer(metrics, std::move(ready)));
  mg_callbacks callbacks = {};
  callbacks.begin_request = &HttpServer::HandleRequest;
  callbacks.log_message = &DropMessage;
  const std::string listening = absl::StrCat(host, ":", port);
  // No document root is given, so that no file is ever served. Connections are
  // not kept alive: one that idles would hold one of the few threads.
  const char* options[] = {"listening_ports",
                           listening.c_str(),
                           "num_threads",
                           "4",
                           "request_timeout_ms",
                           "5000",
                           "enable_keep_alive",
                           "no",
                           nullptr};
  std::array<char, 256> text = {};
  unsigned code = 0;
  mg_error_data error = {};
  error.code = &code;
  error.text = text.data();
  error.text_buffer_size = text.size();
  mg_init_data init = {};
  init.callbacks = &callbacks;
  init.user_data = server.get();
  init.configuration_options = options;
  server->context_ = mg_start2(&init, &error);
  if (server->context_ == nullptr) {
    return BadAddress(address, text[0] == '\0' ? "cannot bind" : text.data());
  }
  mg_server_port bound = {};
  if (mg_get_server_ports(server->context_, 1, &bound) != 1) {
    return BadAddress(address, "nothing was bound");
  }
  server->host_ = host;
  server->port_ = bound.port;
  server->address_ = absl::StrCat(host, ":", bound.port);
  return server;
}

HttpServer::HttpServer(const Metrics* metrics,
                       std::function<absl::Status()> ready)
    : metrics_(metrics), ready_(std::move(ready)) {}

HttpServer::~HttpServer() {
  if (context_ == nullptr) return;
  // The library looks for its stop flag every 2 seconds, or when somebody
  // connects.
  absl::Notification stopped;
  std::thread stopper([this, &stopped] {
    mg_stop(context_);
    stopped.Notify();
  });
  while (!stopped.WaitForNotificationWithTimeout(absl::Milliseconds(10))) {
    std::array<char, 256> error;
    mg_connection* connection = mg_connect_client(
        host_.c_str(), port_, /*use_ssl=*/0, error.data(), error.size());
    if (connection != nullptr) mg_close_connection(connection);
  }
  stopper.join();
}

int HttpServer::HandleRequest(mg_connection* connection) {
  const mg_request_info* request = mg_get_request_info(connection);
  const auto* server = static_cast<const HttpServer*>(request->user_data);
  const absl::string_view method = request->request_method;
  const absl::string_view path =
      request->local_uri == nullptr ? "" : request->local_uri;
  Response response{404, "Not Found", kPlainText, "not found\n", ""};
  if (path == "/metrics" || path == "/healthz" || path == "/readyz") {
    response = {200, "OK", kPlainText, "ok\n", ""};
    if (method != "GET" && method != "HEAD") {
      response = {405, "Method Not Allowed", kPlainText,
                  "expected GET or HEAD\n", "Allow: GET, HEAD\r\n"};
    } else if (path == "/metrics") {
      response.content_type = kMetricsText;
      response.body =
          prometheus::TextSerializer().Serialize(server->metrics_->Collect());
    } else if (path == "/readyz") {
      const absl::Status ready = server->ready_();
      if (!ready.ok()) {
        response = {503, "Service Unavailable", kPlainText,
                    absl::StrCat(ready.message(), "\n"), ""};
      }
    }
  }
  Write(connection, response, method != "HEAD");
  return response.code;
}

}  // namespace quantd::server
