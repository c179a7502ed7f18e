// The parts that all commands share: global options, the connection, exit
// codes, output.

#ifndef QUANTD_CLIENT_CLI_SESSION_H_
#define QUANTD_CLIENT_CLI_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/client_options.h"
#include "google/protobuf/message.h"
#include "nlohmann/json_fwd.hpp"
#include "quantd/v1/tensor.pb.h"

namespace quantd::cli {

using Json = nlohmann::ordered_json;

// Grows when a field of a document goes or changes its meaning; new ones do not
// count.
constexpr int kJsonVersion = 1;

enum ExitCode : int {
  kSuccess = 0,
  // The server or at least one tensor reported an error.
  kServerError = 1,
  kUsageError = 2,
  // The server could not be reached or did not go on in time.
  kUnreachable = 3,
  // A file could not be read or written.
  kFileError = 4,
};

// The code that an error ends the process with.
ExitCode ExitCodeOf(const absl::Status& status);

// {"code": "NOT_FOUND", "reason": "...", "message": "..."}.
Json ErrorJson(const absl::Status& status);

// Tells on stderr that calls are tried again: on a terminal in one line that is
// written over, elsewhere once for each time that the server is away.
// Thread-safe.
class RetryLine {
 public:
  void Show(const Retry& retry) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes the line away, for other output.
  void Clear() ABSL_LOCKS_EXCLUDED(mutex_);
  void SetQuiet(bool quiet) ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t count() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable absl::Mutex mutex_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_quiet_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_shown_ ABSL_GUARDED_BY(mutex_) = false;
};

// One run of quantctl. Not thread-safe.
class Session {
 public:
  // Set by the command line.
  std::string server = "127.0.0.1:8430";
  bool json = false;
  bool quiet = false;
  // A file goes to standard output; what else is printed goes to stderr.
  bool stdout_is_data = false;
  double timeout_seconds = 60;
  // 0 for none.
  double deadline_seconds = 0;
  double retry_seconds = absl::ToDoubleSeconds(ClientOptions().retry_for);
  int max_retries = ClientOptions().max_retries;
  bool balance = false;
  // With the authorities of the system where `tls_paths` names none.
  bool tls = false;
  TlsPaths tls_paths;
  // Empty for no token.
  std::string token_file;
  ExitCode exit_code = kSuccess;

  // Errors: ARGUMENT_INVALID.
  absl::StatusOr<std::unique_ptr<Client>> Connect(
      int64_t chunk_bytes = ClientOptions().chunk_bytes,
      bool shared_memory = false) const;

  // Like Connect; null when the error was reported as one of usage.
  std::unique_ptr<Client> ConnectOrFail();

  // Attempts of the clients after the first one, so far.
  int64_t retries() const { return retry_line_->count(); }

  // Reports the error that ends the run: to stderr, with --json as a document.
  void Fail(const absl::Status& status);
  // Like Fail for a command line that makes no sense.
  void FailUsage(const absl::Status& status);
  // Tells of a damaged row of a list, whose others are shown all the same.
  void TellDamage(const v1::TensorError& error);
  // Notes an error that was reported otherwise. The first one counts.
  void Note(ExitCode code);

  // Prints an object to stdout, also with --quiet, behind the version of what
  // such documents have in them. Infinities and NaN are null.
  void PrintJson(const Json& document) const;
  // Prints the protobuf JSON of a message, which has no such version.
  void PrintMessage(const google::protobuf::Message& message) const;
  // Prints text to stdout, unless --quiet.
  void Print(absl::string_view text) const;
  // Prints a line to stderr.
  void PrintError(absl::string_view text) const;

 private:
  // Clients may outlive the session.
  const std::shared_ptr<RetryLine> retry_line_ = std::make_shared<RetryLine>();
};

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_SESSION_H_
