// The server that clients ask for regions: see
// proto/quantd/v1/shared_memory.proto.

#ifndef QUANTD_SERVER_SHARED_MEMORY_CONTROL_SERVER_H_
#define QUANTD_SERVER_SHARED_MEMORY_CONTROL_SERVER_H_

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "server/guard/limits.h"
#include "server/guard/memory_budget.h"
#include "server/metrics/metrics.h"
#include "server/net/file_descriptor.h"
#include "server/net/listening_socket.h"
#include "server/net/stop_signal.h"
#include "server/shared_memory/peer_process.h"
#include "server/shared_memory/region.h"
#include "server/shared_memory/region_registry.h"

namespace quantd::server {

// The control socket of the gRPC socket at `path`.
std::string ControlPath(const std::string& path);

// Serves all control sockets on one thread. A region is in the registry as long
// as the connection that asked for it. A client that does not read its replies
// loses its connection. Thread-safe.
class ControlServer {
 public:
  // Listens at `paths`. What the pointers name must outlive the server, and
  // `budget` and `metrics` every region.
  // Errors: LISTEN.
  static absl::StatusOr<std::unique_ptr<ControlServer>> Start(
      const std::vector<std::string>& paths, const Limits& limits,
      RegionRegistry* registry, MemoryBudget* budget, Metrics* metrics);
  // Closes all connections.
  ~ControlServer();

 private:
  struct Connection {
    FileDescriptor socket;
    PeerProcess peer;
    std::vector<std::shared_ptr<const Region>> regions;
  };

  ControlServer(const Limits& limits, RegionRegistry* registry,
                MemoryBudget* budget, Metrics* metrics)
      : limits_(limits),
        registry_(registry),
        budget_(budget),
        metrics_(metrics) {}

  void Run();
  void Accept(FileDescriptor socket);
  // Answers the next packet; false when the connection is over. `events` is
  // what poll() said.
  bool Serve(Connection& connection, int events);
  void Close(Connection& connection);

  const Limits limits_;
  RegionRegistry* const registry_;
  MemoryBudget* const budget_;
  Metrics* const metrics_;
  std::vector<std::unique_ptr<ListeningSocket>> sockets_;
  // Used by thread_ only.
  std::vector<Connection> connections_;
  StopSignal stop_;
  std::thread thread_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_SHARED_MEMORY_CONTROL_SERVER_H_
