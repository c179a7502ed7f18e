// The connections of a job.

#ifndef QUANTD_CLIENT_JOBS_CONNECTIONS_H_
#define QUANTD_CLIENT_JOBS_CONNECTIONS_H_

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"

namespace quantd::jobs {

constexpr int kMostConnections = 64;
// Those by the threads of the server. Even for one thread: writing a tensor and
// reading the next one go on beside it.
constexpr int kLeastByThreads = 2;
constexpr int kMostByThreads = 16;

// Every stream has a connection of its own, so that several replicas behind one
// name are busy too.
class Connections {
 public:
  // Connects `count` times; nothing: as often as the server has threads for a
  // caller, within the limits above.
  // Errors: ARGUMENT_INVALID for a count below 1 or above kMostConnections;
  // those of `connect`.
  static absl::StatusOr<Connections> Open(
      std::optional<int> count,
      absl::FunctionRef<absl::StatusOr<std::unique_ptr<Client>>()> connect);

  // The clients for the engine; valid while this lives.
  std::vector<Client*> clients() const;
  Client* first() const { return clients_[0].get(); }

 private:
  explicit Connections(std::vector<std::unique_ptr<Client>> clients)
      : clients_(std::move(clients)) {}

  std::vector<std::unique_ptr<Client>> clients_;
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_CONNECTIONS_H_
