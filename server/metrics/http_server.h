// The second port: metrics and probes over HTTP.

#ifndef QUANTD_SERVER_METRICS_HTTP_SERVER_H_
#define QUANTD_SERVER_METRICS_HTTP_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/metrics/metrics.h"

struct mg_context;
struct mg_connection;

namespace quantd::server {

// Answers GET and HEAD of
//   /metrics  the Prometheus text format 0.0.4
//   /healthz  200 as long as the process lives
//   /readyz   200, or 503 and the reason
// and 404 elsewhere, on a few threads of its own. Thread-safe.
class HttpServer {
 public:
  // `address` is host:port; port 0 takes a free one. `metrics` and what
  // `ready` uses must outlive this; `ready` is called from any thread.
  // Errors: CONFIG_INVALID, with what hindered.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(
      const std::string& address, const Metrics* metrics,
      std::function<absl::Status()> ready);

  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;
  // Waits for answers that are being written.
  ~HttpServer();

  int port() const { return port_; }
  // host:port, with the port that was bound.
  const std::string& address() const { return address_; }

 private:
  HttpServer(const Metrics* metrics, std::function<absl::Status()> ready);

  static int HandleRequest(mg_connection* connection);

  const Metrics* const metrics_;
  const std::function<absl::Status()> ready_;
  // Set before Start returns, and not changed from then on.
  mg_context* context_ = nullptr;
  std::string host_;
  int port_ = 0;
  std::string address_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_METRICS_HTTP_SERVER_H_
