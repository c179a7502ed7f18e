#include "server/goodbye.h"

#include "grpcpp/grpcpp.h"

namespace grpc_core {

// The part of gRPC's core that its C++ interface leaves out. The library
// exports these functions, but no header of theirs is installed; a version of
// gRPC without them does not link.
class Server {
 public:
  void StopListening();
  void SendGoaways();
  bool HasOpenConnections();
};

}  // namespace grpc_core

namespace quantd::server {
namespace {

// gRPC casts it the same way.
grpc_core::Server* CoreOf(grpc::Server* server) {
  return reinterpret_cast<grpc_core::Server*>(server->c_server());
}

}  // namespace

void SayGoodbye(grpc::Server* server) {
  // gRPC's core works only in a context that its C functions set up. Destroying
  // a buffer is one of those, and calls what its slices brought to free them.
  static char byte = 0;
  grpc::Slice slice(
      &byte, sizeof(byte),
      [](void* pointer) {
        auto* const core = static_cast<grpc_core::Server*>(pointer);
        core->StopListening();
        core->SendGoaways();
      },
      CoreOf(server));
  grpc::ByteBuffer buffer(&slice, 1);
  slice = grpc::Slice();
  buffer.Clear();
}

bool HasConnections(grpc::Server* server) {
  return CoreOf(server)->HasOpenConnections();
}

}  // namespace quantd::server
