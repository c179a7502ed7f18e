#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/session.h"
#include "client/cpp/client.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

const char* HealthName(Client::Health health) {
  switch (health) {
    case Client::Health::kServing:
      return "SERVING";
    case Client::Health::kNotServing:
      return "NOT_SERVING";
    case Client::Health::kUnknown:
      break;
  }
  return "UNKNOWN";
}

void RunHealth(const std::string& service, Session* session) {
  const absl::StatusOr<std::unique_ptr<Client>> client = session->Connect();
  if (!client.ok()) return session->FailUsage(client.status());
  const absl::StatusOr<Client::Health> health = (*client)->CheckHealth(service);
  if (!health.ok()) return session->Fail(health.status());
  if (*health != Client::Health::kServing) session->Note(kServerError);
  if (session->json) {
    session->PrintJson(
        {{"server", session->server}, {"status", HealthName(*health)}});
  } else {
    session->Print(absl::StrCat(HealthName(*health), "\n"));
  }
}

}  // namespace

void AddHealthCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "health", "Ask whether the server serves; exit code 0 only if it does");
  const auto service = std::make_shared<std::string>();
  command->AddOption("--service", service.get(), "NAME",
                     "One service, e.g. quantd.v1.QuantizationService; default "
                     "the whole server");
  command->AddExample("quantctl health --server unix:/run/quantd/quantd.sock");
  command->OnRun([service, session] { RunHealth(*service, session); });
}

}  // namespace quantd::cli
