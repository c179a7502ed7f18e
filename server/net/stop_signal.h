// Stopping a thread that polls.

#ifndef QUANTD_SERVER_NET_STOP_SIGNAL_H_
#define QUANTD_SERVER_NET_STOP_SIGNAL_H_

#include "absl/time/time.h"
#include "server/net/file_descriptor.h"

namespace quantd::server {

// Thread-safe.
class StopSignal {
 public:
  StopSignal();
  void Send();
  // True when it was sent before `timeout`, whatever is done to the time of day
  // meanwhile.
  bool WaitFor(absl::Duration timeout) const;
  // Readable from Send on; -1 when the system had none to give.
  int fd() const { return event_.get(); }

 private:
  const FileDescriptor event_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_NET_STOP_SIGNAL_H_
