#include "server/quantd_server.h"

#include <algorithm>
#include <chrono>
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
#include "google/protobuf/stubs/logging.h"
#include "grpc/grpc.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server_posix.h"

namespace quantd::server {
namespace {

// Store calls block on the disk, one of them on the lock of the writer.
constexpr int kStoreThreads = 4;
// How often streams that wait for memory try again.
constexpr absl::Duration kWatchInterval = absl::Milliseconds(20);
// For streams that are out of time to be told so.
constexpr absl::Duration kEndGrace = absl::Milliseconds(500);
// How far a client may send ahead of what the server reads: about one chunk.
constexpr int kLookAheadBytes = 1 << 20;
// A frame of HTTP/2: a default chunk fits into one. The default of 16 KiB costs
// a look at the connection for each.
constexpr int kFrameBytes = 2 << 20;
// For what gRPC itself holds beside the messages of requests.
constexpr int64_t kTransportBytes = int64_t{64} << 20;

constexpr absl::string_view kUnixScheme = "unix:";
// What stands for the port of a socket that is not gRPC's own.
constexpr int kSharedPort = 1;

// Registers gRPC's plugins, which are global, once.
void InitPlugins() {
  static const bool done = [] {
    // Malformed strings are answered to the client, not logged.
    google::protobuf::SetLogHandler(nullptr);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  static_cast<void>(done);
}

// `address` with the port that was taken for 0.
std::string BoundAddress(const std::string& address, int port) {
  if (absl::StartsWith(address, kUnixScheme)) return address;
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

}  // namespace

absl::StatusOr<std::unique_ptr<QuantdServer>> QuantdServer::Start(
    const ServerOptions& options, EncodingStore* store,
    StatisticsStore* statistics, Metrics* metrics) {
  InitPlugins();
  std::unique_ptr<QuantdServer> server(
      new QuantdServer(options, store, statistics, metrics));
  if (absl::Status s = server->Listen(); !s.ok()) return s;
  return server;
}

QuantdServer::QuantdServer(const ServerOptions& options, EncodingStore* store,
                           StatisticsStore* statistics, Metrics* metrics)
    : options_(options),
      metrics_(metrics),
      budget_(options.limits.memory_budget_bytes),
      pool_(std::max(1, options.threads)),
      store_pool_(kStoreThreads),
      env_{options.limits, store,
           statistics,     metrics,
           &budget_,       &pool_,
           &store_pool_,   options.shared_memory ? &regions_ : nullptr},
      quantization_service_(env_, &registry_),
      encoding_service_(env_, &registry_) {}

absl::Status QuantdServer::Listen() {
  grpc::ServerBuilder builder;
  std::vector<int> ports(options_.listen.size(), 0);
  std::vector<std::string> shared_paths;
  for (size_t i = 0; i < ports.size(); ++i) {
    absl::string_view path = options_.listen[i];
    if (options_.shared_memory && absl::ConsumePrefix(&path, kUnixScheme)) {
      shared_paths.emplace_back(path);
      ports[i] = kSharedPort;
    } else {
      builder.AddListeningPort(options_.listen[i],
                               grpc::InsecureServerCredentials(), &ports[i]);
    }
  }
  builder.RegisterService(&quantization_service_);
  builder.RegisterService(&encoding_service_);
  builder.SetMaxReceiveMessageSize(
      static_cast<int>(options_.limits.message_bytes));
  builder.SetMaxSendMessageSize(-1);
  // Otherwise the transport reads ahead of a handler without bound.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES,
                             kLookAheadBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  // Two servers must not share one port unnoticed.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  grpc::ResourceQuota quota("quantd");
  quota.Resize(options_.limits.memory_budget_bytes + kTransportBytes);
  builder.SetResourceQuota(quota);
  server_ = builder.BuildAndStart();
  for (size_t i = 0; i < ports.size(); ++i) {
    if (server_ == nullptr || ports[i] == 0) {
      return core::ListenError(options_.listen[i]);
    }
    addresses_.push_back(BoundAddress(options_.listen[i], ports[i]));
  }
  if (options_.shared_memory) {
    if (absl::Status s = ShareMemory(shared_paths); !s.ok()) return s;
  }
  // Before the first scrape, which may come before the first look.
  metrics_->MemoryBudget(budget_.total_bytes(), budget_.used_bytes());
  // Balancers that watch one service ask for it by name.
  grpc::HealthCheckServiceInterface* const health =
      server_->GetHealthCheckService();
  health->SetServingStatus(v1::QuantizationService::service_full_name(), true);
  health->SetServingStatus(v1::EncodingService::service_full_name(), true);
  watcher_ = std::thread([this] { Watch(); });
  return absl::OkStatus();
}

absl::Status QuantdServer::ShareMemory(const std::vector<std::string>& paths) {
  std::vector<std::string> control_paths;
  for (const std::string& path : paths) {
    control_paths.push_back(ControlPath(path));
  }
  // First, so that who finds the one socket finds the other.
  absl::StatusOr<std::unique_ptr<ControlServer>> control = ControlServer::Start(
      control_paths, options_.limits, &regions_, &budget_, metrics_);
  if (!control.ok()) return control.status();
  control_server_ = *std::move(control);
  for (const std::string& path : paths) {
    absl::StatusOr<std::unique_ptr<UnixListener>> listener =
        UnixListener::Start(path, [this](FileDescriptor connection) {
          grpc::AddInsecureChannelFromFd(server_.get(), connection.Release());
        });
    if (!listener.ok()) return listener.status();
    unix_listeners_.push_back(*std::move(listener));
  }
  return absl::OkStatus();
}

QuantdServer::~QuantdServer() {
  if (!stopping_.HasBeenNotified()) Stop(absl::ZeroDuration());
}

void QuantdServer::Drain() {
  draining_.store(true);
  server_->GetHealthCheckService()->SetServingStatus(false);
  absl::SleepFor(options_.drain_delay);
  Stop(options_.drain_grace);
}

void QuantdServer::Stop(absl::Duration grace) {
  draining_.store(true);
  if (server_ != nullptr) {
    registry_.Drain();
    if (!registry_.WaitUntilEmpty(grace)) {
      registry_.EndAll();
      registry_.WaitUntilEmpty(kEndGrace);
    }
    // gRPC takes no connections any more once it is shut down.
    unix_listeners_.clear();
    // What is left does not even read its status; unary calls are short.
    server_->Shutdown(std::chrono::system_clock::now() +
                      std::chrono::seconds(1));
    server_->Wait();
    control_server_.reset();
  }
  stopping_.Notify();
  if (watcher_.joinable()) watcher_.join();
}

void QuantdServer::Watch() {
  while (!stopping_.WaitForNotificationWithTimeout(kWatchInterval)) {
    registry_.WakeParked();
    registry_.EndIdle(options_.limits.idle_timeout);
    metrics_->MemoryBudget(budget_.total_bytes(), budget_.used_bytes());
  }
}

}  // namespace quantd::server
