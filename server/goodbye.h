// Tells connections that the server is about to stop.

#ifndef QUANTD_SERVER_GOODBYE_H_
#define QUANTD_SERVER_GOODBYE_H_

#include "grpcpp/grpcpp.h"

namespace quantd::server {

// Stops gRPC's own listeners, and sends every connection a GOAWAY: its client
// makes no further calls on it, but those on their way are served, and so are
// those under way. A connection closes when its last call has ended. Call
// before Shutdown, which would cancel the calls that are on their way.
void SayGoodbye(grpc::Server* server);

// True if some client is still connected.
bool HasConnections(grpc::Server* server);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GOODBYE_H_
