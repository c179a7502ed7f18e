#include "server/config.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "core/statistics/gram_state.h"
#include "core/types/block_layout.h"
#include "server/guard/limits.h"
#include "server/guard/size_text.h"
#include "server/guard/text_file.h"
#include "server/logging.h"

namespace quantd::server {
namespace {

std::string QuoteToml(absl::string_view text) {
  return absl::StrCat("\"", text, "\"");
}

// A row of the table of flags.
struct Flag {
  // Without dashes.
  std::string name;
  std::string group;
  // Placeholder of the value in the help; empty for a switch.
  std::string value_name;
  std::string help;
  std::string default_text;
  // May be given more than once.
  bool repeatable;
  // Errors: what was expected, without the flag's name and what came.
  std::function<absl::Status(const std::vector<std::string>&, Config*)> parse;
  // Writes the flag's value in TOML.
  std::function<std::string(const Config&)> show;
};

using Values = std::vector<std::string>;

absl::Status Expected(absl::string_view what) {
  return absl::InvalidArgumentError(what);
}

template <typename Accessor>
Flag SizeFlag(const char* name, const char* group, const char* help,
              int64_t default_bytes, int64_t min_bytes, int64_t max_bytes,
              Accessor field) {
  return {name,
          group,
          "SIZE",
          help,
          FormatSize(default_bytes),
          false,
          [=](const Values& values, Config* config) {
            int64_t bytes = 0;
            if (!ParseSize(values[0], &bytes) || bytes < min_bytes ||
                bytes > max_bytes) {
              return Expected(absl::StrCat(
                  "a size from ", FormatSize(min_bytes), " to ",
                  FormatSize(max_bytes), ", in bytes or with KiB, MiB or GiB"));
            }
            field(*config) = bytes;
            return absl::OkStatus();
          },
          [=](const Config& config) {
            return QuoteToml(FormatSize(field(config)));
          }};
}

template <typename Accessor>
Flag CountFlag(const char* name, const char* group, const char* help,
               int64_t default_count, int64_t min_count, int64_t max_count,
               Accessor field) {
  return {name,
          group,
          "COUNT",
          help,
          absl::StrCat(default_count),
          false,
          [=](const Values& values, Config* config) {
            int64_t count = 0;
            if (!absl::SimpleAtoi(values[0], &count) || count < min_count ||
                count > max_count) {
              return Expected(absl::StrCat("a whole number from ", min_count,
                                           " to ", max_count));
            }
            field(*config) =
                static_cast<std::decay_t<decltype(field(*config))>>(count);
            return absl::OkStatus();
          },
          [=](const Config& config) { return absl::StrCat(field(config)); }};
}

template <typename Accessor>
Flag DurationFlag(const char* name, const char* group, const char* help,
                  absl::Duration default_value, absl::Duration min_value,
                  absl::Duration max_value, Accessor field) {
  return {name,
          group,
          "DURATION",
          help,
          absl::FormatDuration(default_value),
          false,
          [=](const Values& values, Config* config) {
            absl::Duration value;
            if (!absl::ParseDuration(values[0], &value) || value < min_value ||
                value > max_value) {
              return Expected(absl::StrCat(
                  "a duration from ", absl::FormatDuration(min_value), " to ",
                  absl::FormatDuration(max_value), ", such as 200ms or 30s"));
            }
            field(*config) = value;
            return absl::OkStatus();
          },
          [=](const Config& config) {
            return QuoteToml(absl::FormatDuration(field(config)));
          }};
}

template <typename Accessor>
Flag SwitchFlag(const char* name, const char* group, const char* help,
                Accessor field) {
  return {name,
          group,
          "",
          help,
          "false",
          false,
          [=](const Values& values, Config* config) {
            if (!absl::SimpleAtob(values[0], &field(*config))) {
              return Expected("true or false");
            }
            return absl::OkStatus();
          },
          [=](const Config& config) -> std::string {
            return field(config) ? "true" : "false";
          }};
}

// The host and the port of host:port or [host]:port; false for anything else.
bool SplitHostPort(absl::string_view address, std::string* host) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return false;
  const absl::string_view port_text = address.substr(colon + 1);
  int port = 0;
  if (!std::all_of(port_text.begin(), port_text.end(), absl::ascii_isdigit) ||
      !absl::SimpleAtoi(port_text, &port) || port > 65535) {
    return false;
  }
  absl::string_view name = address.substr(0, colon);
  if (absl::ConsumePrefix(&name, "[")) {
    if (!absl::ConsumeSuffix(&name, "]")) return false;
    in6_addr parsed;
    *host = std::string(name);
    return inet_pton(AF_INET6, host->c_str(), &parsed) == 1;
  }
  if (name.find_first_not_of("abcdefghijklmnopqrstuvwxyz"
                             "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_") !=
      absl::string_view::npos) {
    return false;
  }
  *host = std::string(name);
  return true;
}

bool IsLoopback(const std::string& host) {
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) {
    return (ntohl(v4.s_addr) >> 24) == 127;
  }
  in6_addr v6;
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) {
    return IN6_IS_ADDR_LOOPBACK(&v6);
  }
  return host == "localhost";
}

absl::Status ParseListen(const Values& values, Config* config) {
  for (const std::string& value : values) {
    for (const absl::string_view address : absl::StrSplit(value, ',')) {
      absl::string_view path = address;
      std::string host;
      if (absl::ConsumePrefix(&path, "unix:")) {
        // With its end, a path has to fit into the address of a socket.
        if (path.empty() || path[0] != '/' ||
            path.size() >= sizeof(sockaddr_un::sun_path)) {
          return Expected("unix: and an absolute path of at most 107 bytes");
        }
      } else if (!SplitHostPort(address, &host)) {
        return Expected("host:port or unix:/path");
      }
      config->listen.emplace_back(address);
    }
  }
  return absl::OkStatus();
}

absl::Status ParseMetricsListen(const Values& values, Config* config) {
  std::string host;
  if (values[0] == "off") {
    config->metrics_listen.clear();
  } else if (SplitHostPort(values[0], &host)) {
    config->metrics_listen = values[0];
  } else {
    return Expected("host:port or off");
  }
  return absl::OkStatus();
}

absl::Status ParseStore(const Values& values, Config* config) {
  absl::string_view path = values[0];
  config->store_is_default = false;
  if (absl::StartsWith(path, "postgresql://") ||
      absl::StartsWith(path, "postgres://")) {
    config->store_url = std::string(path);
    config->store_path.clear();
    return absl::OkStatus();
  }
  if (!absl::ConsumePrefix(&path, "sqlite:") || path.empty() ||
      path == ":memory:") {
    return Expected("sqlite:PATH or postgresql://HOST/DATABASE");
  }
  config->store_path = std::string(path);
  config->store_url.clear();
  return absl::OkStatus();
}

// Bytes for %XX; what is no such sequence stays.
std::string PercentDecode(absl::string_view text) {
  std::string decoded;
  for (size_t i = 0; i < text.size(); ++i) {
    std::string byte;
    if (text[i] == '%' && i + 2 < text.size() &&
        absl::ascii_isxdigit(text[i + 1]) &&
        absl::ascii_isxdigit(text[i + 2])) {
      byte = absl::HexStringToBytes(text.substr(i + 1, 2));
      i += 2;
    } else {
      byte = text[i];
    }
    decoded += byte;
  }
  return decoded;
}

// Returns the parts of a store's URL that may be shown: all but passwords.
// Shows only parts that are known to be no passwords, so that a slip of the pen
// shows no secret either.
std::string ShowStoreUrl(absl::string_view url) {
  constexpr absl::string_view kHidden = "***";
  constexpr absl::string_view kOpenParameters[] = {"application_name",
                                                   "channel_binding",
                                                   "connect_timeout",
                                                   "dbname",
                                                   "gssencmode",
                                                   "host",
                                                   "hostaddr",
                                                   "keepalives",
                                                   "keepalives_count",
                                                   "keepalives_idle",
                                                   "options",
                                                   "keepalives_interval",
                                                   "passfile",
                                                   "port",
                                                   "requirepeer",
                                                   "service",
                                                   "sslcert",
                                                   "sslcrl",
                                                   "sslkey",
                                                   "sslmode",
                                                   "sslrootcert",
                                                   "target_session_attrs",
                                                   "user",
                                                   "tcp_user_timeout"};
  const auto plain = [&](absl::string_view text,
                         absl::string_view extra) -> absl::string_view {
    const bool is_plain =
        std::all_of(text.begin(), text.end(), [extra](char c) {
          return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-' ||
                 absl::StrContains(extra, c);
        });
    return is_plain ? text : kHidden;
  };
  const size_t begin = url.find("://") + 3;
  const size_t query = std::min(url.find('?', begin), url.size());
  std::string shown(url.substr(0, begin));
  absl::string_view place = url.substr(begin, query - begin);
  if (const size_t at = place.rfind('@'); at != absl::string_view::npos) {
    const absl::string_view who = place.substr(0, at);
    const size_t colon = who.find(':');
    absl::StrAppend(&shown, plain(who.substr(0, colon), ""),
                    colon == absl::string_view::npos ? "" : ":***", "@");
    place.remove_prefix(at + 1);
  }
  const size_t slash = std::min(place.find('/'), place.size());
  // A unix socket's folder has its slashes encoded.
  absl::StrAppend(&shown, plain(place.substr(0, slash), ":,[]%"),
                  plain(place.substr(slash), "/"));
  if (query == url.size()) return shown;
  char separator = '?';
  for (const absl::string_view parameter :
       absl::StrSplit(url.substr(query + 1), '&')) {
    const size_t equals = std::min(parameter.find('='), parameter.size());
    const absl::string_view name = parameter.substr(0, equals);
    const std::string decoded = PercentDecode(name);
    const bool is_open =
        std::find(std::begin(kOpenParameters), std::end(kOpenParameters),
                  decoded) != std::end(kOpenParameters);
    shown += separator;
    separator = '&';
    if (is_open) {
      absl::StrAppend(&shown, parameter);
    } else if (equals < parameter.size()) {
      absl::StrAppend(&shown, plain(name, "%"), "=", kHidden);
    } else {
      absl::StrAppend(&shown, kHidden);
    }
  }
  return shown;
}

template <typename Enum>
using Choices = std::vector<std::pair<std::string, Enum>>;

template <typename Enum, typename Accessor>
Flag ChoiceFlag(const char* name, const char* group, const char* value_name,
                const char* help, const Choices<Enum>& choices,
                const char* default_text, Accessor field) {
  return {
      name,
      group,
      value_name,
      help,
      default_text,
      false,
      [=](const Values& values, Config* config) {
        std::vector<std::string> names;
        for (const auto& [choice, value] : choices) {
          if (values[0] == choice) {
            field(*config) = value;
            return absl::OkStatus();
          }
          names.push_back(choice);
        }
        return Expected(absl::StrCat("one of ", absl::StrJoin(names, ", ")));
      },
      [=](const Config& config) {
        for (const auto& [choice, value] : choices) {
          if (field(config) == value) return QuoteToml(choice);
        }
        return QuoteToml(default_text);
      }};
}

template <typename Accessor>
Flag FileFlag(const char* name, const char* group, const char* help,
              Accessor field) {
  return {name,
          group,
          "FILE",
          help,
          "",
          false,
          [=](const Values& values, Config* config) {
            field(*config) = values[0];
            return absl::OkStatus();
          },
          [=](const Config& config) { return QuoteToml(field(config)); }};
}

// A member of Config, or of its Limits, const or not.
#define QUANTD_FIELD(path) \
  [](auto& config) -> auto& { return config.path; }

std::vector<Flag> MakeFlags() {
  const Limits limits;
  const int cores =
      std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const char* const kServing = "Serving";
  const char* const kSecurity = "Security";
  const char* const kStore = "Store";
  const char* const kLimits = "Limits";
  const char* const kStopping = "Stopping";
  const char* const kLog = "Log";
  return {
      {"listen", kServing, "ADDRESS",
       "Where to serve gRPC: host:port or unix:/path; port 0 takes a free one. "
       "Give it more than once, or separate addresses with commas.",
       "127.0.0.1:8430", true, &ParseListen,
       [](const Config& config) {
         return absl::StrCat(
             "[",
             absl::StrJoin(config.listen, ", ",
                           [](std::string* out, const std::string& address) {
                             absl::StrAppend(out, QuoteToml(address));
                           }),
             "]");
       }},
      SwitchFlag("insecure-listen", kServing,
                 "Serve addresses other than loopback and unix sockets without "
                 "client certificates. Only behind a proxy or on a network "
                 "that you trust.",
                 QUANTD_FIELD(insecure_listen)),
      SwitchFlag("shared-memory", kServing,
                 "Share memory with clients on unix sockets. Beside each "
                 "unix:/path, a socket /path.memory hands it out.",
                 QUANTD_FIELD(shared_memory)),
      {"metrics-listen", kServing, "ADDRESS",
       "Where to serve /metrics, /healthz and /readyz over HTTP: host:port, or "
       "off.",
       "127.0.0.1:8431", false, &ParseMetricsListen,
       [](const Config& config) {
         return QuoteToml(
             config.metrics_listen.empty() ? "off" : config.metrics_listen);
       }},
      CountFlag("threads", kServing, "Worker threads of each caller.", cores, 1,
                1024, QUANTD_FIELD(threads)),
      {"simd", kServing, "TARGET",
       "Instructions of the kernels: auto, or a name such as avx2 or scalar. "
       "The results are the same.",
       "auto", false,
       [](const Values& values, Config* config) {
         config->simd = values[0];
         return absl::OkStatus();
       },
       [](const Config& config) { return QuoteToml(config.simd); }},
      FileFlag("ready-file", kServing,
               "Write the bound addresses to FILE once the server serves: "
               "{\"grpc\":[\"host:port\"],\"metrics\":\"host:port\"}.",
               QUANTD_FIELD(ready_file)),

      FileFlag("tls-certificate", kSecurity,
               "Server certificate with its chain (PEM). Serves TLS on every "
               "host:port; unix sockets stay plaintext. This file and the "
               "other TLS files are read again when they change.",
               QUANTD_FIELD(tls.certificate)),
      FileFlag("tls-key", kSecurity, "Private key of the certificate (PEM).",
               QUANTD_FIELD(tls.key)),
      FileFlag("tls-client-ca", kSecurity,
               "Trusted authorities of client certificates (PEM).",
               QUANTD_FIELD(tls.client_ca)),
      FileFlag("tls-client-crl", kSecurity,
               "Revocation lists of these authorities (PEM).",
               QUANTD_FIELD(tls.client_crl)),
      ChoiceFlag<ClientAuth>(
          "tls-client-auth", kSecurity, "MODE",
          "Client certificates: none; request, where a token will do instead; "
          "require; auto, which is require with --tls-client-ca and otherwise "
          "none.",
          {{"auto", ClientAuth::kAuto},
           {"none", ClientAuth::kNone},
           {"request", ClientAuth::kRequest},
           {"require", ClientAuth::kRequire}},
          "auto", QUANTD_FIELD(tls.client_auth)),
      FileFlag("access-file", kSecurity,
               "Who may do what, and quotas. A line has NAME, sha256:HEX of a "
               "token or certificate:SUBJECT, scopes, models and optionally an "
               "expiry. Without a file everybody may do everything. The file "
               "is read again when it changes.",
               QUANTD_FIELD(access_file)),

      {"store", kStore, "URL",
       "Where encodings and statistics are kept: sqlite:PATH, or for replicas "
       "postgresql://USER@HOST/DATABASE.",
       "sqlite:$XDG_STATE_HOME/quantd/encodings.db", false, &ParseStore,
       [](const Config& config) {
         return QuoteToml(config.store_url.empty()
                              ? absl::StrCat("sqlite:", config.store_path)
                              : ShowStoreUrl(config.store_url));
       }},
      CountFlag("store-connections", kStore, "Most connections to PostgreSQL.",
                12, 1, 1000, QUANTD_FIELD(store_connections)),
      DurationFlag("store-timeout", kStore,
                   "How long PostgreSQL may not respond, or a lock may be "
                   "held.",
                   absl::Milliseconds(800), absl::Milliseconds(10),
                   absl::Minutes(1), QUANTD_FIELD(store_timeout)),
      SizeFlag("cache-bytes", kStore,
               "Memory that caches encodings and, a quarter of it, merged "
               "statistics; 0 for none.",
               256 * kMiB, 0, kTiB, QUANTD_FIELD(cache_bytes)),
      DurationFlag("cache-max-age", kStore,
                   "A cached encoding older than this is checked against the "
                   "store, because other processes may have replaced it.",
                   absl::Seconds(1), absl::ZeroDuration(), absl::Hours(1),
                   QUANTD_FIELD(cache_max_age)),
      DurationFlag("retention-interval", kStore,
                   "How often revisions are deleted that the access file no "
                   "longer keeps. What a new line will delete is in the log "
                   "one interval before.",
                   absl::Hours(1), absl::Seconds(1), absl::Hours(24),
                   QUANTD_FIELD(retention_interval)),

      SizeFlag("message-bytes", kLimits, "Largest gRPC message.",
               limits.message_bytes, 64 * kKiB, kGiB,
               QUANTD_FIELD(limits.message_bytes)),
      SizeFlag("chunk-bytes", kLimits, "Most tensor data in one message.",
               limits.chunk_bytes, kKiB, kGiB,
               QUANTD_FIELD(limits.chunk_bytes)),
      SizeFlag("response-chunk-bytes", kLimits,
               "Most tensor data in one message of an answer.",
               limits.response_chunk_bytes, kKiB, 64 * kMiB,
               QUANTD_FIELD(limits.response_chunk_bytes)),
      SizeFlag("tensor-bytes", kLimits, "Largest tensor.", limits.tensor_bytes,
               kKiB, 1024 * kTiB, QUANTD_FIELD(limits.tensor_bytes)),
      CountFlag("tensor-rank", kLimits, "Most dimensions of a tensor.",
                limits.tensor_rank, 0, core::kMaxRank,
                QUANTD_FIELD(limits.tensor_rank)),
      CountFlag("metrics-count", kLimits,
                "Most metrics of one Evaluate: candidates times scales.",
                limits.metrics_count, 1, int64_t{1} << 30,
                QUANTD_FIELD(limits.metrics_count)),
      SizeFlag("statistics-limit", kLimits,
               "Largest stored statistics of one tensor and source; moments "
               "and Gram matrix of its features do not count.",
               limits.statistics_bytes, kKiB, 512 * kMiB,
               QUANTD_FIELD(limits.statistics_bytes)),
      CountFlag("gram-features", kLimits,
                "Most features that a Gram matrix sees together, a multiple of "
                "128; of more features it has only the blocks along its "
                "diagonal. n take 4 n^2 bytes of memory and of the store.",
                limits.gram_features, core::GramState::kPartUnit, 32768,
                QUANTD_FIELD(limits.gram_features)),
      SizeFlag("memory-budget-bytes", kLimits,
               "Memory that all requests together make the server hold.",
               limits.memory_budget_bytes, kMiB, 1024 * kTiB,
               QUANTD_FIELD(limits.memory_budget_bytes)),
      DurationFlag("memory-wait", kLimits,
                   "How long a request waits for memory before it is refused.",
                   limits.memory_wait, absl::ZeroDuration(), absl::Minutes(1),
                   QUANTD_FIELD(limits.memory_wait)),
      CountFlag("tensor-count", kLimits, "Most tensors that are open at once.",
                limits.tensor_count, 1, int64_t{1} << 30,
                QUANTD_FIELD(limits.tensor_count)),
      DurationFlag("queue-delay", kLimits,
                   "How long a tensor may queue in a burst, behind tensors of "
                   "its caller that take no longer than itself; or for 0.65 - "
                   "0.5 / threads of its own time, at least 1 ms, if that is "
                   "longer. Under sustained load only that part of its own "
                   "time counts. All tensors of the caller together may delay "
                   "it by this or, if that is longer, by five times its own "
                   "time.",
                   limits.queue_delay, absl::ZeroDuration(), absl::Hours(1),
                   QUANTD_FIELD(limits.queue_delay)),
      CountFlag("shared-connections", kLimits,
                "Most clients that hold shared memory at once.",
                limits.shared_connections, 1, 1 << 14,
                QUANTD_FIELD(limits.shared_connections)),
      CountFlag("shared-regions", kLimits,
                "Most regions of shared memory of one client.",
                limits.shared_regions, 1, 1 << 12,
                QUANTD_FIELD(limits.shared_regions)),
      DurationFlag("idle-timeout", kLimits,
                   "Ends a stream that made no progress for this long.",
                   limits.idle_timeout, absl::Milliseconds(100),
                   absl::Hours(24), QUANTD_FIELD(limits.idle_timeout)),
      DurationFlag("stream-age", kLimits,
                   "Ends a stream of this age between two tensors, so that "
                   "the client opens another; at twice the age at once. inf "
                   "for never.",
                   limits.stream_age, absl::Milliseconds(100),
                   absl::InfiniteDuration(), QUANTD_FIELD(limits.stream_age)),
      CountFlag("connections", kLimits,
                "Most connections at once, if there are file descriptors for "
                "them. A sixteenth is reserved for unix sockets.",
                limits.connections, 16, 1 << 20,
                QUANTD_FIELD(limits.connections)),
      CountFlag("address-connections", kLimits,
                "Most connections of one address (in IPv6 of one /64), and of "
                "all unix sockets. A proxy is one address.",
                limits.address_connections, 1, 1 << 20,
                QUANTD_FIELD(limits.address_connections)),
      CountFlag("calls", kLimits,
                "Calls that are open at once, streams among them; one caller "
                "has at most half of them. An eighth as many may watch the "
                "health besides.",
                limits.calls, 16, 1 << 24, QUANTD_FIELD(limits.calls)),
      CountFlag("connection-streams", kLimits,
                "Most streams and calls of one connection at once.",
                limits.connection_streams, 1, 1 << 20,
                QUANTD_FIELD(limits.connection_streams)),
      DurationFlag("connection-idle", kLimits,
                   "Closes a connection that had no call for this long. inf "
                   "for never.",
                   limits.connection_idle, absl::Seconds(1),
                   absl::InfiniteDuration(),
                   QUANTD_FIELD(limits.connection_idle)),
      DurationFlag("connection-age", kLimits,
                   "Age at which a connection takes no new calls, so that "
                   "clients spread over replicas again. inf for never.",
                   limits.connection_age, absl::Seconds(1),
                   absl::InfiniteDuration(),
                   QUANTD_FIELD(limits.connection_age)),
      SizeFlag("metadata-bytes", kLimits, "Largest headers of one call.",
               limits.metadata_bytes, kKiB, kMiB,
               QUANTD_FIELD(limits.metadata_bytes)),

      DurationFlag("drain-delay", kStopping,
                   "Time between reporting NOT_SERVING and sending clients "
                   "elsewhere, so that load balancers notice.",
                   absl::Milliseconds(500), absl::ZeroDuration(),
                   absl::Minutes(10), QUANTD_FIELD(drain_delay)),
      DurationFlag("drain-grace", kStopping,
                   "Time for running tensors to finish.", absl::Seconds(30),
                   absl::ZeroDuration(), absl::Hours(1),
                   QUANTD_FIELD(drain_grace)),

      ChoiceFlag<LogLevel>("log-level", kLog, "LEVEL",
                           "debug, info, warning or error.",
                           {{"debug", LogLevel::kDebug},
                            {"info", LogLevel::kInfo},
                            {"warning", LogLevel::kWarning},
                            {"error", LogLevel::kError}},
                           "info", QUANTD_FIELD(log_level)),
      ChoiceFlag<LogFormat>(
          "log-format", kLog, "FORMAT", "text, or json: one object per line.",
          {{"text", LogFormat::kText}, {"json", LogFormat::kJson}}, "text",
          QUANTD_FIELD(log_format)),
  };
}

#undef QUANTD_FIELD

// `text` with line breaks so that no line exceeds `width` where words allow.
std::string Wrap(absl::string_view text, size_t width) {
  std::string wrapped;
  size_t column = 0;
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    if (column > 0 && column + 1 + word.size() > width) {
      wrapped += '\n';
      column = 0;
    } else if (column > 0) {
      wrapped += ' ';
      ++column;
    }
    absl::StrAppend(&wrapped, word);
    column += word.size();
  }
  return wrapped;
}

// Fits a terminal of 80 columns, defaults in their own words.
class HelpFormatter : public CLI::Formatter {
 public:
  static constexpr size_t kNameWidth = 30;

  HelpFormatter() { column_width(kNameWidth); }

  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string value = option->get_type_name();
    return value.empty() ? "" : absl::StrCat(" ", value);
  }

  std::string make_option_desc(const CLI::Option* option) const override {
    std::string text = option->get_description();
    if (const std::string value = option->get_default_str(); !value.empty()) {
      absl::StrAppend(&text, " Default: ", value);
    }
    return Wrap(text, 80 - kNameWidth);
  }
};

std::string VariableName(absl::string_view flag) {
  return absl::StrCat("QUANTD_", absl::AsciiStrToUpper(
                                     absl::StrReplaceAll(flag, {{"-", "_"}})));
}

// $XDG_STATE_HOME, which counts only when absolute, or ~/.local/state.
std::string DefaultStorePath() {
  constexpr absl::string_view kFile = "/quantd/encodings.db";
  const char* state_home = std::getenv("XDG_STATE_HOME");
  if (state_home != nullptr && state_home[0] == '/') {
    return absl::StrCat(state_home, kFile);
  }
  const char* home = std::getenv("HOME");
  if (home == nullptr || home[0] != '/') return "";
  return absl::StrCat(home, "/.local/state", kFile);
}

// The values of a configuration file, by flag.
absl::StatusOr<std::map<std::string, Values>> ReadConfigFile(
    const std::string& path, const std::vector<Flag>& flags) {
  const auto invalid = [&path](absl::string_view what) {
    return core::ConfigInvalidError(
        absl::StrCat("--config ", path, ": ", what));
  };
  const absl::optional<std::string> text = ReadTextFile(path);
  if (!text.has_value()) {
    return invalid("expected a file that can be read");
  }
  std::istringstream file(*text);
  std::vector<CLI::ConfigItem> items;
  try {
    items = CLI::ConfigTOML().from_config(file);
  } catch (const CLI::Error& error) {
    return invalid(error.what());
  }
  std::map<std::string, Values> values;
  for (const CLI::ConfigItem& item : items) {
    // The parser's marks for where a section begins and ends.
    if (item.name == "++" || item.name == "--") continue;
    const bool known =
        item.parents.empty() &&
        std::any_of(flags.begin(), flags.end(), [&item](const Flag& flag) {
          return flag.name == item.name;
        });
    if (!known) {
      Values names = item.parents;
      names.push_back(item.name);
      return invalid(absl::StrCat("expected names of flags, got \"",
                                  absl::StrJoin(names, "."), "\""));
    }
    Values& flag_values = values[item.name];
    flag_values.insert(flag_values.end(), item.inputs.begin(),
                       item.inputs.end());
  }
  return values;
}

absl::Status CheckTls(const TlsOptions& tls) {
  const auto needs = [](absl::string_view flag, absl::string_view other) {
    return core::ConfigInvalidError(absl::StrCat(
        "--", flag, ": expected together with --", other, ", got it alone"));
  };
  if (tls.certificate.empty()) {
    if (!tls.key.empty()) return needs("tls-key", "tls-certificate");
    if (!tls.client_ca.empty()) {
      return needs("tls-client-ca", "tls-certificate");
    }
  } else if (tls.key.empty()) {
    return needs("tls-certificate", "tls-key");
  }
  if (tls.client_ca.empty()) {
    if (!tls.client_crl.empty()) {
      return needs("tls-client-crl", "tls-client-ca");
    }
    if (tls.EffectiveClientAuth() != ClientAuth::kNone) {
      return needs("tls-client-auth", "tls-client-ca");
    }
  } else if (tls.EffectiveClientAuth() == ClientAuth::kNone) {
    return core::ConfigInvalidError(
        "--tls-client-auth: expected request or require with --tls-client-ca, "
        "got \"none\"");
  }
  return absl::OkStatus();
}

// gRPC works through what a stranger sends before quantd can ask for a token,
// so that only a certificate keeps strangers out.
absl::Status CheckListen(const Config& config) {
  if (config.insecure_listen ||
      config.tls.EffectiveClientAuth() == ClientAuth::kRequire) {
    return absl::OkStatus();
  }
  for (const std::string& address : config.listen) {
    std::string host;
    if (SplitHostPort(address, &host) && !IsLoopback(host)) {
      return core::ConfigInvalidError(absl::StrCat(
          "--listen: expected a loopback address or a unix socket ",
          config.tls.certificate.empty() ? "for plaintext"
                                         : "where clients need no certificate",
          ", got \"", address,
          "\"; require certificates (--tls-client-ca), put a TLS proxy in "
          "front, or give --insecure-listen on a network that you trust"));
    }
  }
  return absl::OkStatus();
}

// Checks what has to hold between flags.
absl::Status CheckTogether(const Config& config) {
  if (absl::Status status = CheckTls(config.tls); !status.ok()) return status;
  if (absl::Status status = CheckListen(config); !status.ok()) return status;
  if (config.shared_memory &&
      std::none_of(config.listen.begin(), config.listen.end(),
                   [](const std::string& address) {
                     return absl::StartsWith(address, "unix:");
                   })) {
    return core::ConfigInvalidError(
        absl::StrCat("--shared-memory: expected a unix socket in --listen, "
                     "because memory can't be shared over others, got \"",
                     absl::StrJoin(config.listen, ","), "\""));
  }
  const Limits& limits = config.limits;
  // Headers and envelopes need room beside the data.
  constexpr int64_t kEnvelopeBytes = 16 * kKiB;
  if (limits.chunk_bytes + kEnvelopeBytes > limits.message_bytes) {
    return core::ConfigInvalidError(absl::StrCat(
        "--chunk-bytes: expected at most --message-bytes less 16KiB (",
        FormatSize(limits.message_bytes), " less 16KiB), got ",
        FormatSize(limits.chunk_bytes)));
  }
  if (limits.gram_features % core::GramState::kPartUnit != 0) {
    return core::ConfigInvalidError(absl::StrCat(
        "--gram-features: expected a multiple of ", core::GramState::kPartUnit,
        ", got ", limits.gram_features));
  }
  if (limits.message_bytes > limits.memory_budget_bytes) {
    return core::ConfigInvalidError(absl::StrCat(
        "--memory-budget-bytes: expected at least --message-bytes (",
        FormatSize(limits.message_bytes), "), got ",
        FormatSize(limits.memory_budget_bytes)));
  }
  if (config.store_path.empty() && config.store_url.empty()) {
    return core::ConfigInvalidError(
        "--store: expected sqlite:PATH, because neither XDG_STATE_HOME nor "
        "HOME is set, got nothing");
  }
  return absl::OkStatus();
}

std::string ShowConfig(const std::vector<Flag>& flags, const Config& config) {
  std::string text;
  std::string group;
  for (const Flag& flag : flags) {
    if (flag.group != group) {
      absl::StrAppend(&text, group.empty() ? "" : "\n", "# ", flag.group, "\n");
      group = flag.group;
    }
    absl::StrAppend(&text, flag.name, " = ", flag.show(config), "\n");
  }
  return text;
}

// Text that shows a bad value: another store's URL may hold a password.
std::string ShowValues(const Flag& flag, const Values& values) {
  std::string shown = absl::StrJoin(values, ",");
  const size_t scheme = shown.find("://");
  if (flag.name == "store" && scheme != std::string::npos) {
    shown = absl::StrCat(shown.substr(0, scheme), "://...");
  } else if (flag.name == "store" && absl::StrContains(shown, '=')) {
    // libpq takes this form, too.
    shown = absl::StrCat(shown.substr(0, shown.find('=')), "=...");
  }
  return absl::StrCat("\"", shown, "\"");
}

absl::Status ApplyFlag(const Flag& flag, const Values& values,
                       absl::string_view source, Config* config) {
  absl::Status status =
      values.size() == 1 || (flag.repeatable && !values.empty())
          ? flag.parse(values, config)
          : Expected("one value");
  if (status.ok()) return status;
  const std::string shown = ShowValues(flag, values);
  return core::ConfigInvalidError(absl::StrCat("--", flag.name, source,
                                               ": expected ", status.message(),
                                               ", got ", shown));
}

}  // namespace

absl::string_view Version() { return QUANTD_VERSION; }

namespace {

// True if Kubernetes sets the variable for a service, such as
// QUANTD_SERVICE_HOST or QUANTD_PORT_8430_TCP_ADDR.
bool IsOfKubernetes(absl::string_view name, absl::string_view value) {
  return absl::EndsWith(name, "_SERVICE_HOST") ||
         absl::StrContains(name, "_SERVICE_PORT") ||
         absl::StrContains(name, "_TCP") || absl::StartsWith(value, "tcp://");
}

std::vector<std::string> UnknownVariables(const std::vector<Flag>& flags) {
  // The others are quantctl's, which often runs beside quantd.
  absl::flat_hash_set<std::string> known = {
      "QUANTD_CONFIG",     "QUANTD_SERVER",
      "QUANTD_TLS_CA",     "QUANTD_CLIENT_CERTIFICATE",
      "QUANTD_CLIENT_KEY", "QUANTD_TOKEN_FILE"};
  for (const Flag& flag : flags) known.insert(VariableName(flag.name));
  std::vector<std::string> unknown;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(*variable, absl::MaxSplits('=', 1));
    if (absl::StartsWith(pair.first, "QUANTD_") &&
        !known.contains(pair.first) &&
        !IsOfKubernetes(pair.first, pair.second)) {
      unknown.emplace_back(pair.first);
    }
  }
  std::sort(unknown.begin(), unknown.end());
  return unknown;
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(int argc,
                                             const char* const* argv) {
  const std::vector<Flag> flags = MakeFlags();
  CLI::App app("quantd: calibrates, quantizes and keeps encodings, over gRPC.",
               "quantd");
  app.set_help_flag();
  app.formatter(std::make_shared<HelpFormatter>());
  bool help = false;
  bool version = false;
  bool print_config = false;
  bool check_store = false;
  std::string config_path;
  app.add_flag("-h,--help", help, "Print this and end.");
  app.add_flag("--version", version, "Print the version and end.");
  app.add_flag("--print-config", print_config,
               "Print the effective configuration, as a file for --config, and "
               "end.");
  app.add_flag("--check-store", check_store,
               "Read all of --store, print a line for each place that is "
               "damaged and a summary, and end: with 0 if nothing is, with 1 "
               "if something is. Others may use the store meanwhile.");
  app.add_option("--config", config_path,
                 "A file of lines key = \"value\" (TOML); the keys are the "
                 "flags below without dashes in front.")
      ->type_name("FILE");
  std::map<std::string, Values> given;
  std::map<std::string, CLI::Option*> options;
  for (const Flag& flag : flags) {
    const std::string dashed = absl::StrCat("--", flag.name);
    Values& values = given[flag.name];
    CLI::Option* option = nullptr;
    if (flag.value_name.empty()) {
      option = app.add_flag(dashed, values, flag.help);
    } else {
      option = app.add_option(dashed, values, flag.help)
                   ->type_name(flag.value_name)
                   ->allow_extra_args(false);
      if (!flag.default_text.empty()) option->default_str(flag.default_text);
    }
    option->group(flag.group);
    options[flag.name] = option;
  }
  app.footer(
      Wrap("Every flag --some-flag is also the environment variable "
           "QUANTD_SOME_FLAG. The flag wins over the variable, the variable "
           "over the file, the file over the default. SIZE is in bytes or with "
           "KiB, MiB or GiB; DURATION is such as 200ms or 30s.",
           80));
  try {
    app.parse(argc, argv);
  } catch (const CLI::Error& error) {
    return core::ConfigInvalidError(absl::StrCat(error.what(), "; see --help"));
  }

  CommandLine result;
  if (help || version) {
    result.action = CommandLine::Action::kPrint;
    result.text = help ? app.help() : absl::StrCat("quantd ", Version(), "\n");
    return result;
  }

  if (config_path.empty()) {
    const char* path = std::getenv("QUANTD_CONFIG");
    if (path != nullptr) config_path = path;
  }
  std::map<std::string, Values> from_file;
  if (!config_path.empty()) {
    absl::StatusOr<std::map<std::string, Values>> read =
        ReadConfigFile(config_path, flags);
    if (!read.ok()) return read.status();
    from_file = *std::move(read);
  }

  Config& config = result.config;
  for (const Flag& flag : flags) {
    const std::string variable = VariableName(flag.name);
    absl::Status status;
    if (options[flag.name]->count() > 0) {
      status = ApplyFlag(flag, given[flag.name], "", &config);
    } else if (const char* value = std::getenv(variable.c_str())) {
      status = ApplyFlag(flag, {value}, absl::StrCat(" (from ", variable, ")"),
                         &config);
    } else if (const auto it = from_file.find(flag.name);
               it != from_file.end()) {
      status = ApplyFlag(flag, it->second,
                         absl::StrCat(" (from ", config_path, ")"), &config);
    } else if (flag.name == "store") {
      config.store_path = DefaultStorePath();
      config.store_is_default = true;
    } else {
      status = ApplyFlag(flag, {flag.default_text}, "", &config);
    }
    if (!status.ok()) return status;
  }
  if (absl::Status status = CheckTogether(config); !status.ok()) return status;
  result.unknown_variables = UnknownVariables(flags);
  if (print_config) {
    result.action = CommandLine::Action::kPrint;
    result.text = ShowConfig(flags, config);
  } else if (check_store) {
    result.action = CommandLine::Action::kCheckStore;
  }
  return result;
}

}  // namespace quantd::server
