#include "client/cli/session.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cli/progress.h"
#include "client/cpp/client.h"
#include "client/cpp/credentials.h"
#include "client/cpp/errors.h"
#include "client/cpp/utf8.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

// What to do about an error.
struct NextStep {
  absl::string_view reason;
  absl::string_view text;
};

constexpr NextStep kNextSteps[] = {
    {"SERVER_UNREACHABLE",
     "start quantd there, or say where it is with --server or QUANTD_SERVER"},
    {"ENCODING_NOT_FOUND",
     "`quantctl models` and `quantctl encodings list` show what there is; "
     "`quantctl calibrate` makes encodings"},
    {"STATISTICS_NOT_FOUND",
     "`quantctl statistics list` shows what there is; `quantctl calibrate "
     "--source` adds statistics"},
};

}  // namespace

ExitCode ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return kSuccess;
  if (IsServerUnreachable(status) || ErrorReason(status) == "TIMEOUT") {
    return kUnreachable;
  }
  if (absl::StartsWith(ErrorReason(status), "FILE_")) return kFileError;
  return kServerError;
}

Json ErrorJson(const absl::Status& status) {
  return {{"code", absl::StatusCodeToString(status.code())},
          {"reason", std::string(ErrorReason(status))},
          {"message", std::string(ErrorText(status))}};
}

std::string Printable(absl::string_view text) {
  const bool is_utf8 = internal::IsValidUtf8(text);
  std::string printable;
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char byte = static_cast<unsigned char>(text[i]);
    // U+0080 to U+009F control terminals too; in UTF-8 they begin with 0xC2.
    const bool is_c1 = byte == 0xC2 && i + 1 < text.size() &&
                       static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (byte < 0x20 || byte == 0x7F || is_c1 || (byte >= 0x80 && !is_utf8)) {
      absl::StrAppendFormat(&printable, "\\x%02x", byte);
      if (is_c1 && is_utf8) {
        absl::StrAppendFormat(&printable, "\\x%02x",
                              static_cast<unsigned char>(text[++i]));
      }
    } else {
      printable.push_back(text[i]);
    }
  }
  return printable;
}

absl::StatusOr<std::unique_ptr<Client>> Session::Connect(
    int64_t chunk_bytes, bool shared_memory) const {
  ClientOptions options;
  options.target = server;
  options.timeout = absl::Seconds(timeout_seconds);
  if (deadline_seconds > 0) options.deadline = absl::Seconds(deadline_seconds);
  options.max_retries = max_retries;
  options.balance = balance;
  options.on_retry = [retries = retries_, shows = !quiet && StderrIsTerminal()](
                         const Retry& retry) {
    ++*retries;
    if (!shows) return;
    // In place of the progress bar, which comes back below.
    std::fprintf(stderr, "\r\x1b[Kquantctl: %s; trying again (%d of %d)\n",
                 Printable(retry.status.message()).c_str(), retry.number,
                 retry.max_number);
  };
  options.chunk_bytes = chunk_bytes;
  options.shared_memory = shared_memory;
  options.token_file = token_file;
  if (tls || !tls_paths.ca.empty() || !tls_paths.certificate.empty() ||
      !tls_paths.key.empty()) {
    absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> credentials =
        TlsCredentials(tls_paths);
    if (!credentials.ok()) return credentials.status();
    options.credentials = *std::move(credentials);
  }
  return Client::Connect(std::move(options));
}

std::unique_ptr<Client> Session::ConnectOrFail() {
  absl::StatusOr<std::unique_ptr<Client>> client = Connect();
  if (client.ok()) return *std::move(client);
  FailUsage(client.status());
  return nullptr;
}

void Session::Fail(const absl::Status& status) {
  Note(ExitCodeOf(status));
  if (json) {
    PrintJson({{"error", ErrorJson(status)}});
  } else {
    PrintError(absl::StrCat("quantctl: ", status.message()));
    for (const NextStep& step : kNextSteps) {
      if (step.reason == ErrorReason(status)) {
        PrintError(absl::StrCat("quantctl: ", step.text));
      }
    }
  }
}

void Session::FailUsage(const absl::Status& status) {
  Note(kUsageError);
  Fail(status);
}

void Session::Note(ExitCode code) {
  if (exit_code == kSuccess) exit_code = code;
}

void Session::PrintJson(const Json& document) const {
  // Names that are not UTF-8 must not throw.
  const std::string text =
      document.dump(2, ' ', false, Json::error_handler_t::replace);
  std::printf("%s\n", text.c_str());
}

void Session::Print(absl::string_view text) const {
  if (!quiet) std::fwrite(text.data(), 1, text.size(), stdout);
}

void Session::PrintError(absl::string_view text) const {
  std::fprintf(stderr, "%s\n", Printable(text).c_str());
}

}  // namespace quantd::cli
