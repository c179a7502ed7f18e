#include <cstdio>
#include <map>
#include <string>

#include "CLI/CLI.hpp"
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

}  // namespace

CLI::Validator SecondsWithUnit() {
  return CLI::AsNumberWithUnit(
      std::map<std::string, double>{{"ms", 1e-3}, {"s", 1}, {"m", 60}},
      CLI::AsNumberWithUnit::CASE_SENSITIVE, "SECONDS");
}

int RunQuantctl(int argc, const char* const* argv) {
  Session session;
  CLI::App app("Quantize tensors with a quantd server.", "quantctl");
  app.set_version_flag("--version", "quantctl " QUANTD_VERSION);
  app.footer(kFooter);
  app.require_subcommand(1);
  // Global options may also stand behind the command.
  app.fallthrough();
  app.add_option("--server", session.server,
                 "host:port, or unix:/path/to/socket")
      ->envname("QUANTD_SERVER")
      ->default_val("127.0.0.1:8430")
      ->type_name("TARGET");
  app.add_flag("--tls", session.tls,
               "TLS, with the system's authorities unless there is --tls-ca");
  app.add_option("--tls-ca", session.tls_paths.ca,
                 "TLS, and the PEM file of the authorities to believe")
      ->envname("QUANTD_TLS_CA")
      ->type_name("FILE");
  app.add_option("--tls-certificate", session.tls_paths.certificate,
                 "PEM file of a certificate to show; with --tls-key")
      ->envname("QUANTD_CLIENT_CERTIFICATE")
      ->type_name("FILE");
  app.add_option("--tls-key", session.tls_paths.key,
                 "PEM file of the certificate's key")
      ->envname("QUANTD_CLIENT_KEY")
      ->type_name("FILE");
  app.add_option("--token-file", session.token_file,
                 "File with the token to bring; needs TLS, but to this machine")
      ->envname("QUANTD_TOKEN_FILE")
      ->type_name("FILE");
  app.add_flag("--json", session.json, "One JSON document on stdout");
  app.add_flag("-q,--quiet", session.quiet,
               "Nothing on stdout but what was asked for with --json");
  app.add_option("--timeout", session.timeout_seconds,
                 "Time for a call, or for a tensor without any progress, such "
                 "as 60 or 60s")
      ->transform(SecondsWithUnit())
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS")
      ->capture_default_str();
  app.add_option("--deadline", session.deadline_seconds,
                 "Time for a call or a tensor over all attempts, such as 10m; "
                 "default none")
      ->transform(SecondsWithUnit())
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS");
  app.add_option("--retries", session.max_retries,
                 "Attempts after the first without an answer, when the server "
                 "is away or busy")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N")
      ->capture_default_str();
  app.add_flag("--balance", session.balance,
               "Call all addresses of the server's name in turn that are "
               "healthy; always so for several, ipv4:HOST:PORT,HOST:PORT");
  AddQuantizeCommand(&app, &session);
  AddDequantizeCommand(&app, &session);
  AddCalibrateCommand(&app, &session);
  AddEvaluateCommand(&app, &session);
  AddEncodingsCommand(&app, &session);
  AddExportCommand(&app, &session);
  AddImportCommand(&app, &session);
  AddSweepCommand(&app, &session);
  AddStatisticsCommand(&app, &session);
  AddModelsCommand(&app, &session);
  AddHealthCommand(&app, &session);
  AddBenchCommand(&app, &session);
  // CLI11 reports by exception; none leaves this function.
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? kSuccess : kUsageError;
  }
  if (std::fflush(stdout) != 0) session.Note(kFileError);
  return session.exit_code;
}

}  // namespace quantd::cli
