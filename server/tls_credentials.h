// TLS for a port of gRPC.

#ifndef QUANTD_SERVER_TLS_CREDENTIALS_H_
#define QUANTD_SERVER_TLS_CREDENTIALS_H_

#include <memory>

#include "grpcpp/grpcpp.h"
#include "server/guard/tls_files.h"

namespace quantd::server {

// Every handshake takes what `files` has then. Each port needs its own; they
// and `files` must outlive the server.
std::shared_ptr<grpc::ServerCredentials> MakeTlsCredentials(
    const TlsFiles* files);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_TLS_CREDENTIALS_H_
