#include "server/net/acceptor.h"

#include <poll.h>

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/errors.h"

namespace quantd::server {

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Start(
    std::vector<Port> ports, std::function<void()> on_exhausted) {
  std::unique_ptr<Acceptor> acceptor(
      new Acceptor(std::move(ports), std::move(on_exhausted)));
  if (acceptor->stop_.fd() < 0) {
    return core::ListenError("any address", "no descriptor is left");
  }
  acceptor->thread_ = std::thread([a = acceptor.get()] { a->Run(); });
  return acceptor;
}

Acceptor::Acceptor(std::vector<Port> ports, std::function<void()> on_exhausted)
    : ports_(std::move(ports)), on_exhausted_(std::move(on_exhausted)) {}

Acceptor::~Acceptor() {
  stop_.Send();
  if (thread_.joinable()) thread_.join();
}

void Acceptor::Run() {
  bool pauses = false;
  std::vector<pollfd> polled;
  while (true) {
    polled.clear();
    polled.push_back({stop_.fd(), POLLIN, 0});
    for (const Port& port : ports_) {
      polled.push_back({pauses ? -1 : port.socket->fd(), POLLIN, 0});
    }
    poll(polled.data(), polled.size(), pauses ? kExhaustedPauseMs : -1);
    if (polled[0].revents != 0) {
      // Who has connected must not be cut off: a proxy sends its call at once.
      for (const Port& port : ports_) AcceptFrom(port);
      return;
    }
    const bool all = pauses;
    pauses = false;
    for (size_t i = 0; i < ports_.size(); ++i) {
      if (!all && polled[1 + i].revents == 0) continue;
      if (!AcceptFrom(ports_[i])) pauses = true;
    }
    if (pauses) on_exhausted_();
  }
}

bool Acceptor::AcceptFrom(const Port& port) {
  // Then the others have their turn.
  constexpr int kMost = 64;
  for (int i = 0; i < kMost; ++i) {
    FileDescriptor connection;
    PeerAddress peer;
    switch (port.socket->Accept(&connection, &peer)) {
      case ListeningSocket::Outcome::kNothing:
        return true;
      case ListeningSocket::Outcome::kExhausted:
        return false;
      case ListeningSocket::Outcome::kAccepted:
        port.on_connection(std::move(connection), peer);
    }
  }
  return true;
}

}  // namespace quantd::server
