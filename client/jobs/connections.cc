#include "client/jobs/connections.h"

#include <memory>
#include <vector>

#include "client/cpp/client.h"

namespace quantd::jobs {

std::vector<Client*> Connections::clients() const {
  std::vector<Client*> clients;
  for (const std::unique_ptr<Client>& client : clients_) {
    clients.push_back(client.get());
  }
  return clients;
}

}  // namespace quantd::jobs
