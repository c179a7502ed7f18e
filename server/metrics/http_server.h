// The second port: metrics and probes over HTTP.

#ifndef QUANTD_SERVER_METRICS_HTTP_SERVER_H_
#define QUANTD_SERVER_METRICS_HTTP_SERVER_H_

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "server/metrics/metrics.h"
#include "server/net/file_descriptor.h"
#include "server/net/listening_socket.h"
#include "server/net/stop_signal.h"

namespace quantd::server {

// Answers GET and HEAD of
//   /         a page with links to the others
//   /metrics  the Prometheus text format 0.0.4
//   /healthz  200, or 503 and why the process has to be restarted
//   /readyz   200, or 503 and the reason. /readyz?exclude=store does not ask
//             the store. Otherwise it is 503 if the store does not answer, and
//             for a minute after a write to it failed, unless one succeeded.
// and 404 elsewhere.
//
// It has a thread of its own, where a slow client delays no
// other: probes are answered first, and all that wait for metrics get the same
// text. A connection carries one request and lasts five seconds at most. Beyond
// 64 connections, or 32 of one address, one is closed: the oldest of those that
// have got furthest. Thread-safe.
class HttpServer {
 public:
  // The time since some moment; never goes back.
  using Clock = std::function<absl::Duration()>;

  // Checks that the probes make. Called from the thread.
  struct Probes {
    // Not OK when only a restart helps.
    std::function<absl::Status()> live;
    // OK if further callers get through.
    std::function<absl::Status()> ready;
    // OK if the store answers.
    std::function<absl::Status()> store;
  };

  // `address` is host:port; port 0 takes a free one. `metrics` and what
  // `probes` use must outlive this.
  // Errors: CONFIG_INVALID, with what hindered.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(
      const std::string& address, const Metrics* metrics, Probes probes,
      Clock clock = &core::SteadyNow);

  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;
  // Breaks off what is being read and written.
  ~HttpServer();

  int port() const { return port_; }
  // host:port, with the port that was bound.
  const std::string& address() const { return address_; }

 private:
  struct Connection {
    FileDescriptor socket;
    // Address of the client; see AddressKey.
    std::string address;
    // Time at which the connection is closed.
    absl::Duration end;
    std::string request;
    // All of it is there, or too much.
    bool has_request = false;
    // Rest of the response that is to be written, once there is one.
    absl::Cord response;
    bool has_response = false;
    // All is written: the client is to read it before the connection goes.
    bool is_written = false;
  };

  HttpServer(const Metrics* metrics, Probes probes, Clock clock);
  void Run();
  // Accepts connections, and reads what is there already. True when there was
  // no room for one. `metrics`: see AnswerAll.
  bool AcceptAll(absl::Cord* metrics);
  // Answers the connections that wait for metrics. Renders them into `metrics`
  // if it is empty. One turn renders once: a probe may wait behind thousands
  // who ask for them. So the text is older than the question by a part of one
  // turn, and only where more connections come in one turn than the server
  // keeps.
  void AnswerAll(absl::Cord* metrics);
  // Lets go of those that are too many.
  void MakeRoom();
  // Drops one connection of `address`, or of any address when null.
  void DropOne(const std::string* address);
  // Goes on as far as the client allows; false when the connection is over.
  bool Serve(Connection& connection);
  bool Read(Connection& connection);
  bool Write(Connection& connection);
  bool Reply(Connection& connection, absl::Cord* metrics);
  // Fills in `metrics` when that is empty and IsForMetrics.
  absl::Cord Answer(absl::string_view request, absl::Cord* metrics);
  absl::Status AskStore();
  // Not OK for some time after a write to the store failed.
  absl::Status LatestWrite() const;

  const Metrics* const metrics_;
  const Probes probes_;
  const Clock clock_;
  // Set before Start returns, and not changed from then on.
  std::vector<std::unique_ptr<ListeningSocket>> sockets_;
  int port_ = 0;
  std::string address_;
  // Used by thread_ only; the oldest first.
  std::list<Connection> connections_;
  // The store's last answer, and how long it is good.
  absl::Status store_status_;
  absl::Duration store_end_ = -absl::InfiniteDuration();
  StopSignal stop_;
  std::thread thread_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_METRICS_HTTP_SERVER_H_
