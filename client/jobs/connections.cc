#include "client/jobs/connections.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"

namespace quantd::jobs {

absl::StatusOr<Connections> Connections::Open(
    int count,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Client>>()> connect) {
  if (count < 1 || count > kMostConnections) {
    return ArgumentInvalidError(absl::StrCat("expected 1 to ", kMostConnections,
                                             " streams, got ", count));
  }
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < count; ++i) {
    absl::StatusOr<std::unique_ptr<Client>> client = connect();
    if (!client.ok()) return client.status();
    clients.push_back(*std::move(client));
  }
  return Connections(std::move(clients));
}

std::vector<Client*> Connections::clients() const {
  std::vector<Client*> clients;
  for (const std::unique_ptr<Client>& client : clients_) {
    clients.push_back(client.get());
  }
  return clients;
}

}  // namespace quantd::jobs
