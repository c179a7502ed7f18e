// The connections of a job.

#ifndef QUANTD_CLIENT_JOBS_CONNECTIONS_H_
#define QUANTD_CLIENT_JOBS_CONNECTIONS_H_

#include <memory>
#include <utility>
#include <vector>

#include "client/cpp/client.h"

namespace quantd::jobs {

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

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_CONNECTIONS_H_
