#include "server/quantd_server.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "google/protobuf/stubs/logging.h"
#include "grpc/compression.h"
#include "grpc/grpc.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "server/config.h"
#include "server/goodbye.h"
#include "server/guard/free_memory.h"
#include "server/logging.h"
#include "server/ports.h"
#include "server/rpc/builtin_guard.h"
#include "server/rpc/stream_transport.h"

namespace quantd::server {
namespace {

// Threads that read encodings from the store, as many that read statistics, and
// as many that write: calls block on the disk, and those that write on the lock
// of the writer. A caller has half of them at most, so that those who read much
// do not keep others waiting.
constexpr int kStoreThreads = 4;
// So many callers have all the threads that they may have; more take turns.
constexpr int kCallersAtOnce = 8;
// Long computations of one caller that run at a time; admission lets in far
// fewer. More would take turns.
constexpr int kLongThreads = 64;
// Nice value of the threads of long computations and of statistics: about a
// quarter of a processor's time where others want all of it.
constexpr int kLongNice = 6;
// How often streams that wait for memory try again.
constexpr absl::Duration kWatchInterval = absl::Milliseconds(20);
// How long a changed access file or certificate may go unseen.
constexpr absl::Duration kFollowInterval = absl::Seconds(1);
// From when on, and how often, it is told that the certificate expires.
constexpr absl::Duration kExpiryWarning = absl::Hours(14 * 24);
constexpr absl::Duration kExpiryInterval = absl::Hours(24);
// For streams that are out of time to be told so.
constexpr absl::Duration kEndGrace = absl::Milliseconds(500);
// Clients that make no call for so long are taken to have heard that they are
// sent away; and how long to wait for that. A client on a busy machine takes
// notice late.
constexpr absl::Duration kQuietTime = absl::Milliseconds(500);
constexpr absl::Duration kMaxQuietWait = absl::Seconds(5);
// For connections to end when no call of ours is left: what comes later gRPC
// cancels without a word.
constexpr absl::Duration kLeaveTime = absl::Milliseconds(500);
constexpr absl::Duration kLeaveInterval = absl::Milliseconds(5);
// And for those that still have not.
constexpr auto kGoAwayTime = std::chrono::milliseconds(100);
// For calls that take no notice.
constexpr auto kCutTime = std::chrono::seconds(1);
// For threads to let go of calls that gRPC has done with: they take no longer
// than it takes to run.
constexpr absl::Duration kLetGoTime = absl::Seconds(10);
// A frame of HTTP/2: a default chunk fits into one. The default of 16 KiB costs
// a look at the connection for each.
constexpr int kFrameBytes = 2 << 20;
// Bytes that may be in transit beside the memory budget: little enough to leave
// room for the server itself within 64 MiB of it.
constexpr int64_t kTransitBytes = int64_t{16} << 20;
// Share of the budget that gRPC may hold when leases leave less of it, one in
// this many. With less, many streams that wait for memory, each with a chunk
// that nobody has read, made gRPC close connections: those without an open call
// first, so callers who held nothing lost theirs.
constexpr int64_t kLeastTransitShare = 8;
// gRPC's threads for calls that hold one each, which only those of reflection
// do; it refuses what is more.
constexpr int kReflectionThreads = 16;
// A connection has to be set up within this time.
constexpr int kHandshakeTimeoutMs = 10'000;
// After this long without a sign of life a connection is asked for one, and
// closed when none comes.
constexpr int kKeepaliveTimeMs = 60'000;
constexpr int kKeepaliveTimeoutMs = 20'000;
// Clients may ask as often; those that do it more often are sent away.
constexpr int kMinPingIntervalMs = 10'000;
constexpr int kMaxPingStrikes = 2;

// How long a port may take to answer its own server.
constexpr absl::Duration kDialTimeout = absl::Seconds(5);

// Registers gRPC's plugins, which are global, once.
void InitGrpc() {
  static const bool done = [] {
    // Kept: otherwise the end of the last server shuts gRPC down, which may
    // wait 10 s for a poll of its own to end.
    grpc_init();
    // Malformed strings are answered to the client, not logged.
    google::protobuf::SetLogHandler(nullptr);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  static_cast<void>(done);
}

// Number of connections to take: as many as were asked for, or as the system
// has descriptors.
int64_t ConnectionLimit(const ServerOptions& options) {
  constexpr int64_t kLeast = 16;
  // gRPC's own, those of files that are being read, and listening sockets.
  constexpr int64_t kOwnDescriptors = 64;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return options.limits.connections;
  const auto all = static_cast<int64_t>(
      std::min<rlim_t>(limit.rlim_cur, std::numeric_limits<int>::max()));
  const int64_t others =
      kOwnDescriptors + options.other_descriptors +
      (options.shared_memory ? options.limits.shared_connections : 0);
  const int64_t room = std::max(all - others, kLeast);
  if (room < options.limits.connections) {
    Log(LogLevel::kWarning,
        "fewer connections than asked for: the system has too few descriptors",
        {{"asked_for", options.limits.connections},
         {"connections", room},
         {"descriptors", all}});
  }
  return std::min(options.limits.connections, room);
}

// Bytes that a client may send ahead on a stream. They are in no budget: a
// thousand streams may take as much as the budget is.
int LookAheadBytes(const Limits& limits) {
  constexpr int64_t kStreams = 1024;
  constexpr int64_t kMinBytes = 64 << 10;
  return static_cast<int>(std::clamp(limits.memory_budget_bytes / kStreams,
                                     kMinBytes, kLookAheadBytes));
}

// gRPC has milliseconds, and a largest number for never.
int Milliseconds(absl::Duration duration) {
  return static_cast<int>(
      std::min<int64_t>(absl::ToInt64Milliseconds(duration), INT_MAX));
}

// A few bytes may stand for a thousand times as many, and gRPC's limit is on
// those that come. Calls that are compressed end with UNIMPLEMENTED; without
// the filter nothing of them is unpacked until they do.
void RefuseCompression(grpc::ServerBuilder* builder) {
  for (const grpc_compression_algorithm algorithm :
       {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder->SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  builder->AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
}

void LimitConnections(const Limits& limits, grpc::ServerBuilder* builder) {
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                              static_cast<int>(limits.connection_streams));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                              Milliseconds(limits.connection_idle));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                              Milliseconds(limits.connection_age));
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE,
                              static_cast<int>(limits.metadata_bytes));
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                              kHandshakeTimeoutMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                              kKeepaliveTimeoutMs);
  builder->AddChannelArgument(
      GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
      kMinPingIntervalMs);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, kMaxPingStrikes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<QuantdServer>> QuantdServer::Start(
    const ServerOptions& options, EncodingStore* store,
    StatisticsStore* statistics, Metrics* metrics) {
  InitGrpc();
  std::unique_ptr<AccessFile> access;
  if (!options.access_file.empty()) {
    absl::StatusOr<std::unique_ptr<AccessFile>> opened =
        AccessFile::Open(options.access_file);
    if (!opened.ok()) return opened.status();
    access = *std::move(opened);
  }
  std::unique_ptr<TlsFiles> tls;
  if (!options.tls.certificate.empty()) {
    absl::StatusOr<std::unique_ptr<TlsFiles>> opened =
        TlsFiles::Open(options.tls);
    if (!opened.ok()) return opened.status();
    tls = *std::move(opened);
  }
  std::unique_ptr<QuantdServer> server(new QuantdServer(
      options, std::move(access), std::move(tls), store, statistics, metrics));
  if (absl::Status s = server->Listen(); !s.ok()) return s;
  return server;
}

QuantdServer::QuantdServer(const ServerOptions& options,
                           std::unique_ptr<AccessFile> access,
                           std::unique_ptr<TlsFiles> tls, EncodingStore* store,
                           StatisticsStore* statistics, Metrics* metrics)
    : options_(options),
      metrics_(metrics),
      budget_(options.limits.memory_budget_bytes, kTransitBytes),
      shares_(std::max(1, options.threads), options.limits.queue_delay,
              options.limits.tensor_count),
      imports_(options.limits.memory_budget_bytes / 4),
      pool_(std::max(1, options.threads),
            kCallersAtOnce * std::max(1, options.threads)),
      store_pool_(kStoreThreads / 2, kStoreThreads),
      write_pool_(kStoreThreads / 2, kStoreThreads),
      long_write_pool_(kStoreThreads / 4, kStoreThreads / 2),
      statistics_pool_(kStoreThreads / 2, kStoreThreads, kLongNice),
      long_pool_(kLongThreads, kCallersAtOnce * kLongThreads, kLongNice),
      helper_pool_(options.threads > 1
                       ? std::make_unique<core::ThreadPool>(
                             options.threads - 1,
                             kCallersAtOnce * (options.threads - 1), kLongNice)
                       : nullptr),
      access_(std::move(access)),
      tls_(std::move(tls)),
      authenticator_(access_.get(), tls_.get(), store, statistics,
                     options.shared_memory ? &regions_ : nullptr, metrics),
      env_{options.limits,
           &authenticator_,
           metrics,
           &budget_,
           &shares_,
           &pool_,
           &store_pool_,
           &write_pool_,
           &long_write_pool_,
           &statistics_pool_,
           &long_pool_,
           helper_pool_.get(),
           options.shared_memory ? &regions_ : nullptr,
           &imports_,
           Version()},
      registry_(options.limits.calls),
      quantization_service_(env_, &registry_),
      encoding_service_(env_, &registry_),
      housekeeper_(MakeHousekeeper(store, statistics)) {}

std::unique_ptr<Housekeeper> QuantdServer::MakeHousekeeper(
    EncodingStore* encodings, StatisticsStore* statistics) {
  if (options_.keeper == nullptr) return nullptr;
  Housekeeper::Options options;
  options.retention_interval = options_.retention_interval;
  return std::make_unique<Housekeeper>(
      options_.keeper, encodings, statistics,
      [this] { return access_ == nullptr ? nullptr : access_->list(); },
      std::move(options), metrics_);
}

absl::Status QuantdServer::Listen() {
  if (stopping_.fd() < 0)
    return core::ListenError("any address", "no descriptor is left");
  if (options_.shared_memory) {
    // First, so that who finds the one socket finds the other.
    if (absl::Status s = ShareMemory(); !s.ok()) return s;
  }
  PortOptions port_options;
  port_options.listen = options_.listen;
  port_options.shared_memory = options_.shared_memory;
  port_options.connections = ConnectionLimit(options_);
  port_options.address_connections =
      std::min(options_.limits.address_connections, port_options.connections);
  absl::StatusOr<std::unique_ptr<Ports>> ports =
      Ports::Bind(std::move(port_options), tls_.get(), metrics_);
  if (!ports.ok()) return ports.status();
  ports_ = *std::move(ports);
  grpc::ServerBuilder builder;
  ports_->AddTo(&builder);
  builder.RegisterService(&quantization_service_);
  builder.RegisterService(&encoding_service_);
  builder.SetMaxReceiveMessageSize(
      static_cast<int>(options_.limits.message_bytes));
  builder.SetMaxSendMessageSize(-1);
  RefuseCompression(&builder);
  // Otherwise the transport reads ahead of a handler without bound.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES,
                             LookAheadBytes(options_.limits));
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  LimitConnections(options_.limits, &builder);
  FitQuota();
  quota_.SetMaxThreads(kReflectionThreads);
  builder.SetResourceQuota(quota_);
  std::vector<
      std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
      interceptors;
  interceptors.push_back(MakeBuiltinGuard(env_, &registry_));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  server_ = builder.BuildAndStart();
  if (server_ == nullptr)
    return core::ListenError(ports_->addresses()[0], "gRPC did not start");
  if (absl::Status s = ports_->Open(server_.get()); !s.ok()) return s;
  // Before the first scrape, which may come before the first look.
  metrics_->MemoryBudget(budget_.total_bytes(), budget_.used_bytes());
  metrics_->ActiveTensorsLimit(options_.limits.tensor_count);
  // Balancers that watch one service ask for it by name.
  grpc::HealthCheckServiceInterface* const health =
      server_->GetHealthCheckService();
  health->SetServingStatus(v1::QuantizationService::service_full_name(), true);
  health->SetServingStatus(v1::EncodingService::service_full_name(), true);
  watcher_ = std::thread([this] { Watch(); });
  TellExpiry();
  follower_ = std::thread([this] { Follow(); });
  if (housekeeper_ != nullptr) housekeeper_->Start();
  return absl::OkStatus();
}

absl::Status QuantdServer::ShareMemory() {
  std::vector<std::string> control_paths;
  for (absl::string_view path : options_.listen) {
    if (absl::ConsumePrefix(&path, kUnixScheme)) {
      control_paths.push_back(ControlPath(std::string(path)));
    }
  }
  absl::StatusOr<std::unique_ptr<ControlServer>> control = ControlServer::Start(
      control_paths, options_.limits, &regions_, &budget_, metrics_);
  if (!control.ok()) return control.status();
  control_server_ = *std::move(control);
  return absl::OkStatus();
}

QuantdServer::~QuantdServer() {
  if (!stopping_.WaitFor(absl::ZeroDuration())) Stop(absl::ZeroDuration());
}

void QuantdServer::Drain() {
  draining_.store(true);
  metrics_->Draining();
  server_->GetHealthCheckService()->SetServingStatus(false);
  absl::SleepFor(options_.drain_delay);
  // New connections go to another replica, and so do further calls of those
  // that are there. What was sent before they heard of it is served.
  ports_->Close();
  SayGoodbye(server_.get());
  AwaitFarewell();
  Stop(options_.drain_grace);
}

void QuantdServer::AwaitFarewell() {
  const absl::Duration begin = core::SteadyNow();
  while (HasConnections(server_.get())) {
    const absl::Duration now = core::SteadyNow();
    if (now - std::max(registry_.last_arrival(), begin) >= kQuietTime ||
        now - begin >= kMaxQuietWait) {
      return;
    }
    absl::SleepFor(kLeaveInterval);
  }
}

void QuantdServer::Stop(absl::Duration grace) {
  draining_.store(true);
  if (server_ != nullptr) {
    registry_.Drain();
    bool is_empty = registry_.WaitUntilEmpty(grace);
    if (!is_empty) {
      registry_.EndAll();
      is_empty = registry_.WaitUntilEmpty(kEndGrace);
    }
    const absl::Duration end = core::SteadyNow() + std::min(grace, kLeaveTime);
    while (HasConnections(server_.get()) && core::SteadyNow() < end) {
      absl::SleepFor(kLeaveInterval);
    }
    // gRPC takes no connections any more once it is shut down.
    ports_->Close();
    // Peers that are silent, and those that watch our health, do not leave by
    // themselves.
    server_->Shutdown(std::chrono::system_clock::now() +
                      (is_empty ? kGoAwayTime : kCutTime));
    server_->Wait();
    registry_.WaitUntilEmpty(kLetGoTime);
    control_server_.reset();
  }
  stopping_.Send();
  housekeeper_.reset();
  if (watcher_.joinable()) watcher_.join();
  if (follower_.joinable()) follower_.join();
}

void QuantdServer::FitQuota() {
  const int64_t total_bytes = budget_.total_bytes();
  quota_.Resize(kTransitBytes + std::max(total_bytes - budget_.leased_bytes(),
                                         total_bytes / kLeastTransitShare));
}

void QuantdServer::Watch() {
  while (!stopping_.WaitFor(kWatchInterval)) {
    registry_.LookAfterMemory();
    registry_.EndOverdue(options_.limits);
    FitQuota();
    metrics_->MemoryBudget(budget_.total_bytes(), budget_.used_bytes());
    metrics_->QueueDelay(shares_.Delay(Admission::kUnknownWork));
    LogLeftOut();
  }
}

void QuantdServer::Follow() {
  const auto take = [this](ReloadedFile file, absl::string_view name,
                           const absl::StatusOr<bool>& changed) {
    if (changed.ok() && !*changed) return;
    metrics_->Reloaded(file, changed.ok());
    if (changed.ok()) {
      Log(LogLevel::kInfo, absl::StrCat("took the new ", name));
    } else {
      Log(LogLevel::kError, absl::StrCat("keeping the old ", name),
          {{"error", changed.status().message()}});
    }
  };
  absl::Duration told = core::SteadyNow();
  FreeMemory free_memory;
  while (!stopping_.WaitFor(kFollowInterval)) {
    CheckPorts();
    free_memory.Look(budget_.used_bytes());
    if (access_ != nullptr) {
      take(ReloadedFile::kAccess, "access file", access_->Reload());
    }
    if (tls_ != nullptr) {
      const absl::StatusOr<bool> changed = tls_->Reload();
      take(ReloadedFile::kCertificate, "certificates", changed);
      const bool is_new = changed.ok() && *changed;
      if (is_new || core::SteadyNow() - told >= kExpiryInterval) {
        TellExpiry();
        told = core::SteadyNow();
      }
    }
  }
}

void QuantdServer::CheckPorts() {
  bool refused = false;
  absl::Status status = ports_->Check(kDialTimeout, &refused);
  if (draining_.load()) return;
  const bool reachable = status.ok() || refused;
  bool was_reachable;
  {
    absl::MutexLock lock(&reachable_mutex_);
    was_reachable = live_.ok();
    live_ = reachable ? absl::OkStatus() : status;
    ready_ = status;
  }
  if (reachable == was_reachable) return;
  Log(reachable ? LogLevel::kInfo : LogLevel::kError,
      reachable ? "all ports answer again" : "a port does not answer",
      {{"error", status.message()}});
  // Who is connected already would leave for a limit on connections, too; so
  // it does not count here.
  server_->GetHealthCheckService()->SetServingStatus(reachable);
  if (draining_.load())
    server_->GetHealthCheckService()->SetServingStatus(false);
}

absl::Status QuantdServer::CheckReady() const {
  if (draining_.load()) return core::DrainingError();
  absl::MutexLock lock(&reachable_mutex_);
  return ready_;
}

absl::Status QuantdServer::CheckLive() const {
  absl::MutexLock lock(&reachable_mutex_);
  return live_;
}

void QuantdServer::TellExpiry() {
  if (tls_ == nullptr) return;
  const absl::Time expires = tls_->material()->expires;
  metrics_->CertificateExpiry(expires);
  const absl::Duration left = expires - absl::Now();
  if (left < kExpiryWarning) {
    Log(LogLevel::kWarning, "the server's certificate expires soon",
        {{"expires", absl::FormatTime(expires, absl::UTCTimeZone())}});
  }
}

}  // namespace quantd::server
