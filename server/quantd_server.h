// The gRPC server: services, health, reflection, drain.

#ifndef QUANTD_SERVER_QUANTD_SERVER_H_
#define QUANTD_SERVER_QUANTD_SERVER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/parallel/thread_pool.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/resource_quota.h"
#include "server/guard/access_list.h"
#include "server/guard/admission.h"
#include "server/guard/limits.h"
#include "server/guard/memory_budget.h"
#include "server/guard/tls_files.h"
#include "server/metrics/metrics.h"
#include "server/rpc/caller.h"
#include "server/rpc/encoding_service.h"
#include "server/rpc/quantization_service.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_stream.h"
#include "server/shared_memory/control_server.h"
#include "server/shared_memory/region_registry.h"
#include "server/shared_memory/unix_socket.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

struct ServerOptions {
  // "host:port" or "unix:path"; port 0 takes a free one.
  std::vector<std::string> listen;
  // For host:port; plaintext without a certificate. Unix sockets are always
  // plaintext.
  TlsOptions tls;
  // Path of an access file; empty lets everybody do everything.
  std::string access_file;
  // Share memory with clients on the unix sockets.
  bool shared_memory = false;
  Limits limits;
  // Worker threads for kernels, at least 1.
  int threads = 1;
  // From health NOT_SERVING to the first refused call.
  absl::Duration drain_delay = absl::Milliseconds(500);
  // How long running tensors may take to finish after that.
  absl::Duration drain_grace = absl::Seconds(30);
};

// Thread-safe.
class QuantdServer {
 public:
  // Starts listening. The stores and `metrics` must outlive the server.
  // Errors: LISTEN, CONFIG_INVALID (the files of `options`).
  static absl::StatusOr<std::unique_ptr<QuantdServer>> Start(
      const ServerOptions& options, EncodingStore* store,
      StatisticsStore* statistics, Metrics* metrics);

  // Drains without delay or grace if Drain was not called.
  ~QuantdServer();

  QuantdServer(const QuantdServer&) = delete;
  QuantdServer& operator=(const QuantdServer&) = delete;

  // host:port or unix:path that is listened on, one per `listen`.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // Health goes NOT_SERVING, drain_delay passes, then running tensors finish
  // within drain_grace and new ones get UNAVAILABLE. Blocks until done; call
  // once.
  void Drain();

  // What requests hold of the memory budget now.
  int64_t memory_used_bytes() const { return budget_.used_bytes(); }

  // False from the beginning of Drain on.
  bool serving() const { return !draining_.load(); }

 private:
  // Either of the files may be null.
  QuantdServer(const ServerOptions& options, std::unique_ptr<AccessFile> access,
               std::unique_ptr<TlsFiles> tls, EncodingStore* store,
               StatisticsStore* statistics, Metrics* metrics);
  absl::Status Listen();
  // Unix sockets whose clients may share memory, and their control sockets.
  absl::Status ShareMemory(const std::vector<std::string>& paths);
  void Stop(absl::Duration grace);
  // Leaves to gRPC what tensors do not hold.
  void FitQuota();
  // Looks after memory, overdue streams and gauges.
  void Watch();
  // Follows the files while they change.
  void Follow();
  void TellExpiry();

  const ServerOptions options_;
  Metrics* const metrics_;
  MemoryBudget budget_;
  Admission admission_;
  RegionRegistry regions_;
  core::ThreadPool pool_;
  core::ThreadPool store_pool_;
  const std::unique_ptr<AccessFile> access_;
  const std::unique_ptr<TlsFiles> tls_;
  const Authenticator authenticator_;
  const RpcEnvironment env_;
  StreamRegistry registry_;
  QuantizationService quantization_service_;
  EncodingService encoding_service_;
  std::vector<std::string> addresses_;
  std::vector<std::shared_ptr<grpc::ServerCredentials>> credentials_;
  // Shrinks by what tensors hold.
  grpc::ResourceQuota quota_{"quantd"};
  std::unique_ptr<grpc::Server> server_;
  // Only with shared memory, for which gRPC's own do not tell enough.
  std::vector<std::unique_ptr<UnixListener>> unix_listeners_;
  std::unique_ptr<ControlServer> control_server_;
  std::atomic<bool> draining_{false};
  absl::Notification stopping_;
  std::thread watcher_;
  // Files may be on a slow disk: not the watcher's business.
  std::thread follower_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_QUANTD_SERVER_H_
