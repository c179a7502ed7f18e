// Flags, environment and file to one struct.

#ifndef QUANTD_SERVER_CONFIG_H_
#define QUANTD_SERVER_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/guard/limits.h"
#include "server/guard/tls_files.h"
#include "server/logging.h"

namespace quantd::server {

// Version of quantd, e.g. "0.1.0".
absl::string_view Version();

// Everything that main needs. The defaults are in config.cc, one table row per
// flag.
struct Config {
  // host:port or unix:/path; never empty.
  std::vector<std::string> listen;
  bool insecure_listen = false;
  // Empty for no TLS.
  TlsOptions tls;
  // Empty for none.
  std::string access_file;
  // On unix sockets.
  bool shared_memory = false;
  // host:port; empty for none.
  std::string metrics_listen;
  // Path of the SQLite file; empty with a store_url.
  std::string store_path;
  // URL of a PostgreSQL database; empty with a store_path.
  std::string store_url;
  int store_connections = 0;
  absl::Duration store_timeout;
  // The store is where nobody named it: its directories may be made.
  bool store_is_default = false;
  int64_t cache_bytes = 0;
  absl::Duration cache_max_age;
  absl::Duration retention_interval;
  int threads = 0;
  // A name of core::AvailableSimdTargets or "auto"; not checked yet.
  std::string simd;
  LogLevel log_level{};
  LogFormat log_format{};
  Limits limits;
  absl::Duration drain_delay;
  absl::Duration drain_grace;
  // Empty for none.
  std::string ready_file;
};

// Action that the command line asks for, and what it needs.
struct CommandLine {
  enum class Action {
    kRun,
    // Print `text` on stdout and end well.
    kPrint,
    // Read the store, tell what is damaged and end.
    kCheckStore,
  };

  Action action{};
  // Not of kPrint.
  Config config;
  // Variables QUANTD_... that neither quantd nor quantctl reads: misspelt, or
  // of another version. Those that Kubernetes sets for a service of the name
  // quantd are not among them. Sorted; not of kPrint.
  std::vector<std::string> unknown_variables;
  // Text to print, for kPrint only: the help, the version, or the effective
  // configuration in the form of a configuration file.
  std::string text;
};

// A flag --some-flag is also the variable QUANTD_SOME_FLAG and the key
// some-flag of the file named by --config. The flag wins over the variable,
// the variable over the file, the file over the default.
// Errors: CONFIG_INVALID, naming the flag and where its value came from, what
// was expected and what came.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_CONFIG_H_
