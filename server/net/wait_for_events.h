// Waiting for a descriptor, whatever is done to the time of day meanwhile.

#ifndef QUANTD_SERVER_NET_WAIT_FOR_EVENTS_H_
#define QUANTD_SERVER_NET_WAIT_FOR_EVENTS_H_

#include "absl/time/time.h"

namespace quantd::server {

// True when one of `events`, as poll(2) has them, came before the SteadyNow of
// `end`. Otherwise errno says why not: ETIMEDOUT, or that of poll.
bool WaitForEvents(int fd, short events, absl::Duration end);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_NET_WAIT_FOR_EVENTS_H_
