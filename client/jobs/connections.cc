#include "client/jobs/connections.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"

namespace quantd::jobs {
namespace {

// Threads that the server has for one caller; 0 where it does not say. Tries
// once: if the server is not there, the job itself says so.
int ThreadsOf(const ClientOptions& options) {
  ClientOptions once = options;
  once.max_retries = 0;
  once.timeout = std::min(once.timeout, absl::Seconds(5));
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(once);
  if (!client.ok()) return 0;
  const absl::StatusOr<v1::GetServerInfoResponse> info =
      (*client)->GetServerInfo();
  if (!info.ok()) return 0;
  return static_cast<int>(std::min<uint32_t>(info->thread_count(), 1 << 10));
}

}  // namespace

absl::StatusOr<Connections> Connections::Open(
    std::optional<int> count,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Client>>()> connect) {
  int wanted = count.value_or(kLeastByThreads);
  if (wanted < 1 || wanted > kMostConnections) {
    return ArgumentInvalidError(absl::StrCat("expected 1 to ", kMostConnections,
                                             " streams, got ", wanted));
  }
  std::vector<std::unique_ptr<Client>> clients;
  while (static_cast<int>(clients.size()) < wanted) {
    absl::StatusOr<std::unique_ptr<Client>> client = connect();
    if (!client.ok()) return client.status();
    clients.push_back(*std::move(client));
    if (clients.size() > 1 || count.has_value()) continue;
    wanted = std::clamp(ThreadsOf(clients.front()->options()), kLeastByThreads,
                        kMostByThreads);
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
