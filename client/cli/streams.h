// --streams: how many tensors are under way at once.

#ifndef QUANTD_CLIENT_CLI_STREAMS_H_
#define QUANTD_CLIENT_CLI_STREAMS_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/cpp/client.h"

namespace quantd::cli {

// Every stream has a connection of its own, so that several replicas behind one
// name are busy too.
class Connections {
 public:
  explicit Connections(std::vector<std::unique_ptr<Client>> clients)
      : clients_(std::move(clients)) {}

  // The clients for the engine; valid while this lives.
  std::vector<Client*> clients() const;
  Client* first() const { return clients_[0].get(); }

 private:
  std::vector<std::unique_ptr<Client>> clients_;
};

struct StreamsOption {
  // The default, where the command line says nothing else.
  int count;

  void AddOption(Command* command);
  // Errors: of Session::Connect.
  absl::StatusOr<Connections> Connect(const Session& session) const;
};

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_STREAMS_H_
