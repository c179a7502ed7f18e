#include <cerrno>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/help_topics.h"
#include "client/cli/progress.h"
#include "client/cli/session.h"
#include "client/cpp/errors.h"
#include "client/cpp/text_file.h"
#include "client/files/errors.h"
#include "client/files/mapped_file.h"

namespace quantd::cli {
namespace {

void AddGlobalOptions(Command* quantctl, Session* session) {
  quantctl
      ->AddOption("--server", &session->server, "TARGET",
                  "Where quantd is: HOST, HOST:PORT or unix:PATH; see quantctl "
                  "help servers")
      ->FromEnvironment("QUANTD_SERVER")
      ->ShowDefault();
  quantctl->AddFlag("--tls", &session->tls,
                    "Use TLS; trust the system's CA certificates unless there "
                    "is --tls-ca");
  quantctl
      ->AddOption("--tls-ca", &session->tls_paths.ca, "FILE",
                  "Use TLS; trusted CA certificates (PEM)")
      ->FromEnvironment("QUANTD_TLS_CA");
  quantctl
      ->AddOption("--tls-certificate", &session->tls_paths.certificate, "FILE",
                  "Client certificate (PEM); with --tls-key")
      ->FromEnvironment("QUANTD_CLIENT_CERTIFICATE");
  quantctl
      ->AddOption("--tls-key", &session->tls_paths.key, "FILE",
                  "Private key of the client certificate (PEM)")
      ->FromEnvironment("QUANTD_CLIENT_KEY");
  quantctl
      ->AddOption("--token-file", &session->token_file, "FILE",
                  "File with the bearer token; needs TLS, except to loopback "
                  "and unix sockets")
      ->FromEnvironment("QUANTD_TOKEN_FILE");
  quantctl->AddFlag("--json", &session->json,
                    "Print one JSON document; see quantctl help json");
  quantctl->AddFlag("-q,--quiet", &session->quiet,
                    "Print nothing but errors, and what --json asks for");
  quantctl
      ->AddOption("--progress-fd", ProgressFd(), "N",
                  "Write how far the command is to this file descriptor, as "
                  "lines of JSON; see quantctl help json")
      ->NotNegative();
  quantctl
      ->AddOption("--timeout", &session->timeout_seconds, "SECONDS",
                  "Time for a call, or for a tensor without progress, such as "
                  "90s")
      ->Seconds()
      ->Positive()
      ->ShowDefault();
  quantctl
      ->AddOption("--deadline", &session->deadline_seconds, "SECONDS",
                  "Time for a call or a tensor over all attempts, such as 10m; "
                  "default none")
      ->Seconds()
      ->Positive();
  quantctl
      ->AddOption("--retry-for", &session->retry_seconds, "SECONDS",
                  "How long to try again while the server is away or busy, "
                  "such as 5m; 0 for not at all")
      ->Seconds()
      ->NotNegative()
      ->ShowDefault();
  quantctl
      ->AddOption("--retries", &session->max_retries, "N",
                  "The most attempts in that time; default any number")
      ->NotNegative();
  quantctl->AddFlag("--balance", &session->balance,
                    "Call all healthy addresses of the server's name in turn");
}

// The words of the command line; of --arguments FILE those of the file, each
// ended by a NUL.
// Errors: ARGUMENT_INVALID, FILE_UNREADABLE.
absl::StatusOr<std::vector<std::string>> WordsOf(int argc,
                                                 const char* const* argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() != 2 || words[0] != "--arguments") return words;
  const absl::StatusOr<std::string> text = internal::ReadDocument(words[1]);
  if (!text.ok()) return text.status();
  words = absl::StrSplit(*text, '\0');
  if (!words.back().empty()) {
    return ArgumentInvalidError(
        absl::StrCat("expected words that each end with a NUL in ", argv[2]));
  }
  words.pop_back();
  return words;
}

}  // namespace

int RunQuantctl(int argc, const char* const* argv) {
  files::ExplainCutFiles("quantctl", kFileError);
  Session session;
  absl::StatusOr<std::vector<std::string>> words = WordsOf(argc, argv);
  if (!words.ok()) {
    session.FailUsage(words.status());
    return session.exit_code;
  }
  CommandLine command_line("quantctl", "Quantize tensors with a quantd server.",
                           "quantctl " QUANTD_VERSION, HelpTopics());
  Command* const quantctl = command_line.program();
  AddGlobalOptions(quantctl, &session);
  AddQuantizeCommand(quantctl, &session);
  AddDequantizeCommand(quantctl, &session);
  AddCalibrateCommand(quantctl, &session);
  AddEvaluateCommand(quantctl, &session);
  AddEncodingsCommand(quantctl, &session);
  AddExportCommand(quantctl, &session);
  AddImportCommand(quantctl, &session);
  AddSweepCommand(quantctl, &session);
  AddStatisticsCommand(quantctl, &session);
  AddModelsCommand(quantctl, &session);
  AddRevisionsCommand(quantctl, &session);
  AddHealthCommand(quantctl, &session);
  AddReportCommand(quantctl, &session);
  AddSelftestCommand(quantctl, &session);
  AddBenchCommand(quantctl, &session);
  AddCompletionCommand(quantctl);
  AddHelpCommand(&command_line, &session);
  AddManCommand(&command_line);
  switch (command_line.Run(*std::move(words))) {
    case CommandLine::Outcome::kHelped:
      return kSuccess;
    case CommandLine::Outcome::kWrong:
      return kUsageError;
    case CommandLine::Outcome::kRan:
      break;
  }
  const absl::Status unchanged = files::CheckMappedFiles();
  if (!unchanged.ok() && session.exit_code != kFileError) {
    session.exit_code = kFileError;
    session.PrintError(absl::StrCat("quantctl: ", unchanged.message()));
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    session.Note(kFileError);
    session.PrintError(absl::StrCat(
        "quantctl: ",
        files::FileUnwritableError("standard output", errno).message()));
  }
  return session.exit_code;
}

}  // namespace quantd::cli
