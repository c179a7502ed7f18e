// --streams: how many tensors are under way at once.

#ifndef QUANTD_CLIENT_CLI_STREAMS_H_
#define QUANTD_CLIENT_CLI_STREAMS_H_

#include <optional>

#include "absl/status/statusor.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/cpp/client.h"
#include "client/jobs/connections.h"

namespace quantd::cli {

struct StreamsOption {
  std::optional<int> count;

  void AddOption(Command* command);
  // Errors: of Session::Connect.
  absl::StatusOr<jobs::Connections> Connect(const Session& session) const;
};

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_STREAMS_H_
