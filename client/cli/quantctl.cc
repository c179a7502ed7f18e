#include <cstdio>

#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/session.h"

namespace quantd::cli {
namespace {

constexpr char kFooter[] =
    "Specs:\n"
    "  FORMAT[:GRANULARITY][:SYMMETRY][:METHOD[=PARAMETER]][:OPTION...]\n"
    "    int8:per-channel:mse        one scale per channel, least squared "
    "error\n"
    "    uint8:percentile=0.999      all but a thousandth of the elements\n"
    "    int4:group:32:asymmetric    groups of 32 along the last axis\n"
    "    int8:best-of=mse,percentile the better of the two\n"
    "    mxfp4_e2m1:rule=even        blocks of 32 under E8M0 scales\n"
    "    float8_e4m3fn:scale=float16:power-of-two\n"
    "  Formats and methods: quantctl quantize --help.\n"
    "\n"
    "Exit codes:\n"
    "  0  success\n"
    "  1  the server or at least one tensor reported an error\n"
    "  2  the command line makes no sense\n"
    "  3  the server could not be reached\n"
    "  4  a file could not be read or written\n"
    "\n"
    "Environment:\n"
    "  QUANTD_SERVER              default of --server\n"
    "  QUANTD_TLS_CA              default of --tls-ca\n"
    "  QUANTD_CLIENT_CERTIFICATE  default of --tls-certificate\n"
    "  QUANTD_CLIENT_KEY          default of --tls-key\n"
    "  QUANTD_TOKEN_FILE          default of --token-file\n"
    "  NO_COLOR                   no emphasis in tables\n";

void AddGlobalOptions(Command* quantctl, Session* session) {
  quantctl
      ->AddOption("--server", &session->server, "TARGET",
                  "host:port, or unix:/path/to/socket")
      ->FromEnvironment("QUANTD_SERVER")
      ->ShowDefault();
  quantctl->AddFlag("--tls", &session->tls,
                    "TLS, with the system's authorities unless there is "
                    "--tls-ca");
  quantctl
      ->AddOption("--tls-ca", &session->tls_paths.ca, "FILE",
                  "TLS, and the PEM file of the authorities to believe")
      ->FromEnvironment("QUANTD_TLS_CA");
  quantctl
      ->AddOption("--tls-certificate", &session->tls_paths.certificate, "FILE",
                  "PEM file of a certificate to show; with --tls-key")
      ->FromEnvironment("QUANTD_CLIENT_CERTIFICATE");
  quantctl
      ->AddOption("--tls-key", &session->tls_paths.key, "FILE",
                  "PEM file of the certificate's key")
      ->FromEnvironment("QUANTD_CLIENT_KEY");
  quantctl
      ->AddOption("--token-file", &session->token_file, "FILE",
                  "File with the token to bring; needs TLS, but to this "
                  "machine")
      ->FromEnvironment("QUANTD_TOKEN_FILE");
  quantctl->AddFlag("--json", &session->json, "One JSON document on stdout");
  quantctl->AddFlag("-q,--quiet", &session->quiet,
                    "Nothing on stdout but what was asked for with --json");
  quantctl
      ->AddOption("--timeout", &session->timeout_seconds, "SECONDS",
                  "Time for a call, or for a tensor without any progress, such "
                  "as 60 or 60s")
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
      ->AddOption("--retries", &session->max_retries, "N",
                  "Attempts after the first without an answer, when the server "
                  "is away or busy")
      ->NotNegative()
      ->ShowDefault();
  quantctl->AddFlag("--balance", &session->balance,
                    "Call all addresses of the server's name in turn that are "
                    "healthy; always so for several, ipv4:HOST:PORT,HOST:PORT");
}

}  // namespace

int RunQuantctl(int argc, const char* const* argv) {
  Session session;
  CommandLine command_line("quantctl", "Quantize tensors with a quantd server.",
                           "quantctl " QUANTD_VERSION, kFooter);
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
  AddHealthCommand(quantctl, &session);
  AddReportCommand(quantctl, &session);
  AddBenchCommand(quantctl, &session);
  AddCompletionCommand(quantctl);
  AddManCommand(&command_line);
  switch (command_line.Run(argc, argv)) {
    case CommandLine::Outcome::kHelped:
      return kSuccess;
    case CommandLine::Outcome::kWrong:
      return kUsageError;
    case CommandLine::Outcome::kRan:
      break;
  }
  if (std::fflush(stdout) != 0) session.Note(kFileError);
  return session.exit_code;
}

}  // namespace quantd::cli
