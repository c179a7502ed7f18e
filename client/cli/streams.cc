#include "client/cli/streams.h"

#include "absl/status/statusor.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/jobs/connections.h"

namespace quantd::cli {

void StreamsOption::AddOption(Command* command) {
  command
      ->AddOption("--streams", &count, "N",
                  "Tensors under way at once, each over a connection of its "
                  "own. Default: as many as the server has threads for a "
                  "caller, 2 to 16")
      ->Between(1, jobs::kMostConnections);
}

absl::StatusOr<jobs::Connections> StreamsOption::Connect(
    const Session& session) const {
  return jobs::Connections::Open(count,
                                 [&session] { return session.Connect(); });
}

}  // namespace quantd::cli
