#include "server/run_quantd.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/cpu.h"
#include "core/errors.h"
#include "server/config.h"
#include "server/logging.h"
#include "server/metrics/http_server.h"
#include "server/metrics/metrics.h"
#include "server/quantd_server.h"
#include "server/store/caching_encoding_store.h"
#include "server/store/caching_statistics_store.h"
#include "server/store/file_system.h"
#include "server/store/metering_encoding_store.h"
#include "server/store/metering_statistics_store.h"
#include "server/store/postgresql_database.h"
#include "server/store/sql_database.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/store/sqlite_database.h"
#include "server/store/store_check.h"
#include "server/store/store_keeper.h"

namespace quantd::server {
namespace {

// Share of --cache-bytes that statistics get, one in this many; the rest is for
// encodings, which are read far more often.
constexpr int64_t kStatisticsCacheShare = 4;

constexpr int kExitDrained = 0;
constexpr int kExitFailed = 1;
constexpr int kExitBadConfig = 2;

// glibc gives every freed chunk of a tensor back to the kernel and faults it
// in again; kept, the same chunks serve the next message. FreeMemory gives back
// what stays free.
void TuneAllocator() {
  // Above every message; what is larger goes back to the kernel at once.
  constexpr int kMmapThresholdBytes = 64 << 20;
  constexpr int kTrimThresholdBytes = 1 << 30;
  constexpr int kTopPadBytes = 16 << 20;
  // Memory that one arena keeps is of no use to another.
  constexpr int kArenas = 2;
  const bool tuned = mallopt(M_MMAP_THRESHOLD, kMmapThresholdBytes) == 1 &&
                     mallopt(M_TRIM_THRESHOLD, kTrimThresholdBytes) == 1 &&
                     mallopt(M_TOP_PAD, kTopPadBytes) == 1 &&
                     mallopt(M_ARENA_MAX, kArenas) == 1;
  Log(tuned ? LogLevel::kDebug : LogLevel::kWarning,
      tuned ? "allocator tuned" : "allocator could not be tuned",
      {{"mmap_threshold_bytes", kMmapThresholdBytes},
       {"trim_threshold_bytes", kTrimThresholdBytes},
       {"top_pad_bytes", kTopPadBytes},
       {"arenas", kArenas}});
}

// Threads reserve their stacks: with the default of 8 MiB gRPC's would take
// more of the address space than the memory budget does. Nothing here recurses
// deeply.
void TuneThreads() {
  constexpr size_t kStackBytes = size_t{1} << 20;
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return;
  if (pthread_attr_setstacksize(&attributes, kStackBytes) == 0) {
    pthread_setattr_default_np(&attributes);
  }
  pthread_attr_destroy(&attributes);
}

// A server has a descriptor for each connection; more are there for the asking.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// gRPC otherwise wakes up for every few packets of a large frame; with these
// it sleeps until most of the frame is there. It reads them from the
// environment once; what the operator has set there stays.
void TuneTransport() {
  setenv("GRPC_EXPERIMENTS", "tcp_frame_size_tuning,tcp_rcv_lowat",
         /*overwrite=*/0);
}

// The distribution's Abseil looks for cycles in the order of all locks, gRPC's
// among them, with one lock for the whole process. Debug builds keep that.
void TuneLocks() {
#ifdef NDEBUG
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
#endif
}

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// Stores that the server keeps things in, and what keeps them in order.
struct Stores {
  std::unique_ptr<EncodingStore> encodings;
  std::unique_ptr<StatisticsStore> statistics;
  std::unique_ptr<StoreKeeper> keeper;
};

absl::StatusOr<std::shared_ptr<SqlDatabase>> OpenDatabase(
    const Config& config) {
  if (!config.store_url.empty()) {
    PostgresqlDatabase::Options options;
    options.url = config.store_url;
    options.connections = config.store_connections;
    options.timeout = config.store_timeout;
    return PostgresqlDatabase::Open(std::move(options));
  }
  if (config.store_is_default) {
    absl::Status status = MakeDefaultDirectory(config.store_path);
    if (!status.ok()) return status;
  }
  const bool is_new = access(config.store_path.c_str(), F_OK) != 0;
  absl::StatusOr<std::shared_ptr<SqlDatabase>> database =
      SqliteDatabase::Open(config.store_path);
  // A path with a typo is a store that has nothing.
  if (database.ok() && is_new) {
    Log(LogLevel::kInfo, "created a new store", {{"path", config.store_path}});
  }
  return database;
}

absl::StatusOr<Stores> OpenStores(const Config& config, Metrics* metrics) {
  absl::StatusOr<std::shared_ptr<SqlDatabase>> database = OpenDatabase(config);
  if (!database.ok()) return database.status();
  const int64_t statistics_cache_bytes =
      config.cache_bytes / kStatisticsCacheShare;
  // Inside the cache, so that the latencies are those of the disk.
  auto metering = std::make_unique<MeteringEncodingStore>(
      std::make_unique<SqlEncodingStore>(*database), metrics);
  CachingEncodingStore::Options options;
  options.cap_bytes = config.cache_bytes - statistics_cache_bytes;
  options.max_age = config.cache_max_age;
  Stores stores;
  stores.encodings = std::make_unique<CachingEncodingStore>(std::move(metering),
                                                            options, metrics);
  stores.statistics = std::make_unique<CachingStatisticsStore>(
      std::make_unique<MeteringStatisticsStore>(
          std::make_unique<SqlStatisticsStore>(*database,
                                               config.limits.statistics_bytes),
          metrics),
      statistics_cache_bytes, metrics);
  stores.keeper = std::make_unique<StoreKeeper>(*database);
  return stores;
}

// Readers see the whole file or none.
absl::Status WriteReadyFile(const std::string& path, const QuantdServer& server,
                            const HttpServer* http) {
  nlohmann::json addresses = {{"grpc", server.addresses()}};
  if (http != nullptr) addresses["metrics"] = http->address();
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  std::ofstream file(temporary);
  file << addresses.dump() << '\n';
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error_number = errno;
    std::remove(temporary.c_str());
    return core::ConfigInvalidError(
        absl::StrCat("--ready-file: cannot write \"", path,
                     "\": ", std::strerror(error_number)));
  }
  return absl::OkStatus();
}

int Fail(absl::string_view message, const absl::Status& status) {
  const std::string detail = core::ErrorDetail(status);
  if (detail.empty()) {
    Log(LogLevel::kError, message, {{"error", status.message()}});
  } else {
    Log(LogLevel::kError, message,
        {{"error", status.message()}, {"detail", detail}});
  }
  return core::ErrorReason(status) == "CONFIG_INVALID" ? kExitBadConfig
                                                       : kExitFailed;
}

int Serve(const CommandLine& command_line) {
  const Config& config = command_line.config;
  for (const std::string& variable : command_line.unknown_variables) {
    Log(LogLevel::kWarning, "no flag has the name of this variable; see --help",
        {{"variable", variable}});
  }
  TuneAllocator();
  TuneThreads();
  RaiseDescriptorLimit();
  TuneTransport();
  TuneLocks();
  if (absl::Status status = core::SetSimdTarget(config.simd); !status.ok()) {
    Log(LogLevel::kError, "bad configuration",
        {{"error", absl::StrCat("--simd: ", status.message())}});
    return kExitBadConfig;
  }
  std::signal(SIGPIPE, SIG_IGN);
  // Before any thread starts, so that none of them gets these.
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  Metrics metrics;
  absl::StatusOr<Stores> stores = OpenStores(config, &metrics);
  if (!stores.ok()) return Fail("cannot open the store", stores.status());

  ServerOptions options;
  options.listen = config.listen;
  options.tls = config.tls;
  options.access_file = config.access_file;
  options.shared_memory = config.shared_memory;
  options.keeper = stores->keeper.get();
  options.retention_interval = config.retention_interval;
  options.limits = config.limits;
  options.threads = config.threads;
  options.other_descriptors += config.store_connections;
  options.drain_delay = config.drain_delay;
  options.drain_grace = config.drain_grace;
  absl::StatusOr<std::unique_ptr<QuantdServer>> server = QuantdServer::Start(
      options, stores->encodings.get(), stores->statistics.get(), &metrics);
  if (!server.ok()) return Fail("cannot serve", server.status());

  if (config.insecure_listen && config.tls.certificate.empty() &&
      !config.access_file.empty()) {
    Log(LogLevel::kWarning,
        "tokens come in plaintext: whoever reads the network has them");
  }

  std::unique_ptr<HttpServer> http;
  if (!config.metrics_listen.empty()) {
    HttpServer::Probes probes;
    probes.live = [server = server->get()] { return server->CheckLive(); };
    probes.ready = [server = server->get()] { return server->CheckReady(); };
    probes.store = [store = stores->encodings.get()] { return store->Ping(); };
    absl::StatusOr<std::unique_ptr<HttpServer>> started =
        HttpServer::Start(config.metrics_listen, &metrics, std::move(probes));
    if (!started.ok()) return Fail("cannot serve metrics", started.status());
    http = *std::move(started);
  }
  if (!config.ready_file.empty()) {
    if (absl::Status status =
            WriteReadyFile(config.ready_file, **server, http.get());
        !status.ok()) {
      return Fail("cannot tell that quantd is ready", status);
    }
  }
  Log(LogLevel::kInfo, "serving",
      {{"version", Version()},
       {"grpc", absl::StrJoin((*server)->addresses(), ",")},
       {"metrics", http == nullptr ? "off" : http->address()},
       // Without the URL, which may hold a password.
       {"store", config.store_url.empty()
                     ? absl::StrCat("sqlite:", config.store_path)
                     : "postgresql"},
       {"threads", config.threads},
       {"simd", core::SimdTarget()}});

  int signal = 0;
  sigwait(&signals, &signal);
  // From here on a signal ends the process at once, also where the parent had
  // it ignored.
  std::signal(SIGTERM, SIG_DFL);
  std::signal(SIGINT, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  Log(LogLevel::kInfo, "draining; a second signal ends at once",
      {{"signal", strsignal(signal)}});
  (*server)->Drain();
  if (!config.ready_file.empty()) std::remove(config.ready_file.c_str());
  Log(LogLevel::kInfo, "drained");
  return kExitDrained;
}

int Check(Config config) {
  // Nobody waits for an answer, and some take as long as the tables are large.
  config.store_timeout = std::max(config.store_timeout, absl::Minutes(30));
  absl::StatusOr<std::shared_ptr<SqlDatabase>> database = OpenDatabase(config);
  if (!database.ok()) return Fail("cannot open the store", database.status());
  const absl::StatusOr<StoreCheck> check =
      CheckStore(*database, [](absl::string_view line) {
        std::printf("damaged: %s\n", std::string(line).c_str());
      });
  if (!check.ok()) return Fail("cannot read the store", check.status());
  std::printf("%s\n", absl::StrCat(check->encodings, " encodings and ",
                                   check->statistics, " statistics, ",
                                   check->damaged, " places damaged")
                          .c_str());
  const bool written = std::fflush(stdout) == 0;
  return check->damaged == 0 && written ? kExitDrained : kExitFailed;
}

}  // namespace

int RunQuantd(int argc, const char* const* argv) {
  const absl::StatusOr<CommandLine> command_line = ParseCommandLine(argc, argv);
  if (!command_line.ok()) {
    const std::string message(command_line.status().message());
    std::fprintf(stderr, "quantd: %s\n", message.c_str());
    return kExitBadConfig;
  }
  if (command_line->action == CommandLine::Action::kPrint) {
    const std::string& text = command_line->text;
    const bool written =
        std::fwrite(text.data(), 1, text.size(), stdout) == text.size() &&
        std::fflush(stdout) == 0;
    return written ? kExitDrained : kExitFailed;
  }
  StartLogging(command_line->config.log_level, command_line->config.log_format);
  switch (command_line->action) {
    case CommandLine::Action::kCheckStore:
      return Check(command_line->config);
    default:
      return Serve(*command_line);
  }
}

}  // namespace quantd::server
