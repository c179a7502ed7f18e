#include "client/cli/session.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cli/message_json.h"
#include "client/cli/printable.h"
#include "client/cli/progress.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/mapped_file.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

// Advice on an error.
struct NextStep {
  absl::string_view reason;
  absl::string_view text;
};

constexpr NextStep kNextSteps[] = {
    {"ENCODING_NOT_FOUND",
     "`quantctl models` and `quantctl encodings list` show what there is; "
     "`quantctl calibrate` makes encodings"},
    {"STATISTICS_NOT_FOUND",
     "`quantctl statistics list` shows what there is; `quantctl calibrate "
     "--source` adds statistics"},
    {"FILE_EXISTS", "--force replaces it"},
};

std::string StepOf(const absl::Status& status) {
  if (IsServerUnreachable(status)) {
    switch (UnreachableCauseOf(status)) {
      case UnreachableCause::kWantsTls:
        return "say --tls, or --tls-ca FILE with its authority";
      case UnreachableCause::kNoTls:
        return "leave out --tls and --tls-ca, or name the port that has TLS";
      case UnreachableCause::kUntrusted:
        return "name its authority with --tls-ca FILE, and the server as its "
               "certificate does";
      case UnreachableCause::kTlsFilesUnusable:
        return "check that --tls-key is the key of --tls-certificate, and that "
               "--tls-ca holds certificates";
      case UnreachableCause::kWantsCertificate:
        return "show a certificate with --tls-certificate FILE and --tls-key "
               "FILE";
      case UnreachableCause::kNotQuantd:
      case UnreachableCause::kNameUnknown:
        return "say where quantd is with --server or QUANTD_SERVER";
      default:
        return "start quantd there, or say where it is with --server or "
               "QUANTD_SERVER";
    }
  }
  for (const NextStep& step : kNextSteps) {
    if (step.reason == ErrorReason(status)) return std::string(step.text);
  }
  return "";
}

}  // namespace

void RetryLine::Show(const Retry& retry) {
  absl::MutexLock lock(&mutex_);
  ++count_;
  if (is_quiet_) return;
  const bool is_terminal = StderrIsTerminal();
  if (!is_terminal && retry.number > 1) return;
  const std::string why = Printable(ErrorText(retry.status));
  const std::string until = absl::StrCat(
      "; trying again for ",
      absl::ToInt64Seconds(absl::Ceil(retry.left, absl::Seconds(1))), " s");
  if (!is_terminal) {
    std::fprintf(stderr, "quantctl: %s%s\n", why.c_str(), until.c_str());
    return;
  }
  // In place of the progress bar, which comes back in the same line.
  const size_t width = StderrWidth();
  const size_t room = width - std::min(width, until.size() + 11);
  std::fprintf(stderr, "\r\x1b[Kquantctl: %s%s", why.substr(0, room).c_str(),
               until.c_str());
  is_shown_ = true;
}

void RetryLine::Clear() {
  absl::MutexLock lock(&mutex_);
  if (!is_shown_) return;
  std::fputs("\r\x1b[K", stderr);
  is_shown_ = false;
}

void RetryLine::SetQuiet(bool quiet) {
  absl::MutexLock lock(&mutex_);
  is_quiet_ = quiet;
}

int64_t RetryLine::count() const {
  absl::MutexLock lock(&mutex_);
  return count_;
}

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

absl::StatusOr<std::unique_ptr<Client>> Session::Connect(
    int64_t chunk_bytes, bool shared_memory) const {
  ClientOptions options;
  options.target = server;
  options.timeout = absl::Seconds(timeout_seconds);
  if (deadline_seconds > 0) options.deadline = absl::Seconds(deadline_seconds);
  options.max_retries = max_retries;
  options.balance = balance;
  options.retry_for = absl::Seconds(retry_seconds);
  retry_line_->SetQuiet(quiet);
  options.on_retry = [line = retry_line_](const Retry& retry) {
    // A file that cannot be read cannot be sent, however often.
    const absl::Status unchanged = files::CheckMappedFiles();
    if (!unchanged.ok()) {
      line->Clear();
      files::EndOverChangedFile(unchanged);
    }
    line->Show(retry);
  };
  options.chunk_bytes = chunk_bytes;
  options.shared_memory = shared_memory;
  options.token_file = token_file;
  if (tls || !tls_paths.ca.empty() || !tls_paths.certificate.empty() ||
      !tls_paths.key.empty()) {
    options.tls = tls_paths;
  }
  return Client::Connect(std::move(options));
}

std::unique_ptr<Client> Session::ConnectOrFail() {
  absl::StatusOr<std::unique_ptr<Client>> client = Connect();
  if (client.ok()) return *std::move(client);
  FailUsage(client.status());
  return nullptr;
}

void Session::Fail(const absl::Status& error) {
  // If a file was changed, that is reported, and not the error that it led to.
  const absl::Status unchanged = files::CheckMappedFiles();
  const absl::Status& status = unchanged.ok() ? error : unchanged;
  Note(ExitCodeOf(status));
  retry_line_->Clear();
  if (json) {
    PrintJson({{"error", ErrorJson(status)}});
  } else {
    PrintError(absl::StrCat("quantctl: ", status.message()));
    const std::string step = StepOf(status);
    if (!step.empty()) PrintError(absl::StrCat("quantctl: ", step));
  }
}

void Session::FailUsage(const absl::Status& status) {
  Note(kUsageError);
  Fail(status);
}

void Session::TellDamage(const v1::TensorError& error) {
  Note(kServerError);
  if (json) return;
  PrintError(absl::StrCat("quantctl: ", Printable(error.message())));
}

void Session::Note(ExitCode code) {
  if (exit_code == kSuccess) exit_code = code;
}

namespace {

void PrintDocument(const Json& document, std::FILE* file) {
  // Names that are not UTF-8 must not throw.
  const std::string text = PrintableJson(
      document.dump(2, ' ', false, Json::error_handler_t::replace));
  std::fprintf(file, "%s\n", text.c_str());
}

}  // namespace

void Session::PrintJson(const Json& document) const {
  retry_line_->Clear();
  Json whole = {{"json_version", kJsonVersion}};
  whole.update(document);
  PrintDocument(whole, stdout_is_data ? stderr : stdout);
}

void Session::PrintMessage(const google::protobuf::Message& message) const {
  retry_line_->Clear();
  PrintDocument(MessageJson(message), stdout);
}

void Session::Print(absl::string_view text) const {
  retry_line_->Clear();
  if (quiet) return;
  std::fwrite(text.data(), 1, text.size(), stdout_is_data ? stderr : stdout);
}

void Session::PrintError(absl::string_view text) const {
  retry_line_->Clear();
  std::fprintf(stderr, "%s\n", Printable(text).c_str());
}

}  // namespace quantd::cli
