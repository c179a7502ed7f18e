#include "client/cli/streams.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/cpp/client.h"
#include "client/jobs/connections.h"

namespace quantd::cli {
namespace {

constexpr int kMostStreams = 64;

}  // namespace

void StreamsOption::AddOption(Command* command) {
  command
      ->AddOption("--streams", &count, "N",
                  "Tensors under way at once, each over a connection of its "
                  "own")
      ->Between(1, kMostStreams)
      ->ShowDefault();
}

absl::StatusOr<jobs::Connections> StreamsOption::Connect(
    const Session& session) const {
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < count; ++i) {
    absl::StatusOr<std::unique_ptr<Client>> client = session.Connect();
    if (!client.ok()) return client.status();
    clients.push_back(*std::move(client));
  }
  return jobs::Connections(std::move(clients));
}

}  // namespace quantd::cli
