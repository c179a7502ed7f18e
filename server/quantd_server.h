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
#include "absl/time/time.h"
#include "core/parallel/thread_pool.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/resource_quota.h"
#include "server/guard/access_list.h"
#include "server/guard/caller_share.h"
#include "server/guard/limits.h"
#include "server/guard/memory_budget.h"
#include "server/guard/tls_files.h"
#include "server/housekeeper.h"
#include "server/metrics/metrics.h"
#include "server/net/stop_signal.h"
#include "server/ports.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/caller.h"
#include "server/rpc/encoding_service.h"
#include "server/rpc/import_queue.h"
#include "server/rpc/quantization_service.h"
#include "server/rpc/rpc_environment.h"
#include "server/shared_memory/control_server.h"
#include "server/shared_memory/region_registry.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"
#include "server/store/store_keeper.h"

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
  // Keeper of the stores, to keep them in order; null where nobody does. Must
  // outlive the server.
  StoreKeeper* keeper = nullptr;
  // Between two looks at the revisions that need not be kept.
  absl::Duration retention_interval = absl::Hours(1);
  Limits limits;
  // Worker threads for kernels, at least 1.
  int threads = 1;
  // Descriptors that others need, such as the store; fewer connections are
  // taken than --connections says where the system does not have them.
  int64_t other_descriptors = 64;
  // From health NOT_SERVING to when clients are sent elsewhere.
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
  const std::vector<std::string>& addresses() const {
    return ports_->addresses();
  }

  // Reports NOT_SERVING and waits for drain_delay. Then takes no more
  // connections, sends clients elsewhere (GOAWAY), and lets running tensors
  // finish within drain_grace. Streams end with DRAINING between two tensors.
  // Blocks until done; call once.
  void Drain();

  // Bytes of the memory budget that requests hold now.
  int64_t memory_used_bytes() const { return budget_.used_bytes(); }

  // OK if new callers get through. Not OK from the beginning of Drain on, and
  // while a port does not answer the server's own calls, also when it has as
  // many connections as it takes.
  // Errors: DRAINING, UNAVAILABLE.
  absl::Status CheckReady() const ABSL_LOCKS_EXCLUDED(reachable_mutex_);
  // OK if the ports take calls, or refuse them for a limit only: a server that
  // is full or drains is as it should be. Errors: UNAVAILABLE.
  absl::Status CheckLive() const ABSL_LOCKS_EXCLUDED(reachable_mutex_);

 private:
  // Either of the files may be null.
  QuantdServer(const ServerOptions& options, std::unique_ptr<AccessFile> access,
               std::unique_ptr<TlsFiles> tls, EncodingStore* store,
               StatisticsStore* statistics, Metrics* metrics);
  absl::Status Listen();
  // The control sockets beside the unix sockets, where memory is handed out.
  absl::Status ShareMemory();
  // Waits until clients that were sent away have left, or make no more calls.
  void AwaitFarewell();
  void Stop(absl::Duration grace);
  // Leaves to gRPC what tensors do not hold.
  void FitQuota();
  // Looks after memory, overdue streams and gauges.
  void Watch();
  // Follows the files while they change, and calls the ports.
  void Follow();
  void CheckPorts() ABSL_LOCKS_EXCLUDED(reachable_mutex_);
  void TellExpiry();
  std::unique_ptr<Housekeeper> MakeHousekeeper(EncodingStore* encodings,
                                               StatisticsStore* statistics);

  const ServerOptions options_;
  Metrics* const metrics_;
  MemoryBudget budget_;
  CallerShares shares_;
  RegionRegistry regions_;
  ImportQueue imports_;
  core::ThreadPool pool_;
  core::ThreadPool store_pool_;
  core::ThreadPool write_pool_;
  core::ThreadPool long_write_pool_;
  core::ThreadPool statistics_pool_;
  core::ThreadPool long_pool_;
  const std::unique_ptr<core::ThreadPool> helper_pool_;
  const std::unique_ptr<AccessFile> access_;
  const std::unique_ptr<TlsFiles> tls_;
  const Authenticator authenticator_;
  const RpcEnvironment env_;
  CallRegistry registry_;
  QuantizationService quantization_service_;
  EncodingService encoding_service_;
  // Shrinks by what tensors hold.
  grpc::ResourceQuota quota_{"quantd"};
  std::unique_ptr<Ports> ports_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<ControlServer> control_server_;
  std::atomic<bool> draining_{false};
  mutable absl::Mutex reachable_mutex_;
  // Results of the last look at the ports, for CheckReady and CheckLive.
  absl::Status ready_ ABSL_GUARDED_BY(reachable_mutex_);
  absl::Status live_ ABSL_GUARDED_BY(reachable_mutex_);
  StopSignal stopping_;
  std::thread watcher_;
  // Files may be on a slow disk: not the watcher's business.
  std::thread follower_;
  // Null without a keeper.
  std::unique_ptr<Housekeeper> housekeeper_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_QUANTD_SERVER_H_
