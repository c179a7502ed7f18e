#include "server/wire/rpcs.h"

#include <array>

#include "google/protobuf/descriptor.h"
#include "quantd/v1/access.pb.h"
#include "quantd/v1/encoding_service.pb.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::server {
namespace {

struct RpcFacts {
  RpcName name;
  Scope scope;
};

const char* TypeOf(const google::protobuf::MethodDescriptor& method) {
  if (method.client_streaming()) {
    return method.server_streaming() ? "bidi_stream" : "client_stream";
  }
  return method.server_streaming() ? "server_stream" : "unary";
}

// Without a scope nobody but who may do most.
Scope ScopeFromProto(v1::Scope scope) {
  switch (scope) {
    case v1::SCOPE_READ:
      return Scope::kRead;
    case v1::SCOPE_QUANTIZE:
      return Scope::kQuantize;
    case v1::SCOPE_CALIBRATE:
      return Scope::kCalibrate;
    default:
      return Scope::kAdmin;
  }
}

std::array<RpcFacts, kRpcCount> ReadFacts() {
  // Through messages, so that the linker leaves no file out.
  const google::protobuf::FileDescriptor* const files[] = {
      v1::QuantizeRequest::descriptor()->file(),
      v1::SweepRequest::descriptor()->file()};
  std::array<RpcFacts, kRpcCount> facts = {};
  for (int i = 0; i < kRpcCount; ++i) {
    for (const google::protobuf::FileDescriptor* file : files) {
      const google::protobuf::ServiceDescriptor* service = file->service(0);
      const google::protobuf::MethodDescriptor* method =
          service->FindMethodByName(kRpcs[i].method);
      if (method == nullptr) continue;
      facts[i] = {{TypeOf(*method), service->full_name().c_str(),
                   method->name().c_str()},
                  ScopeFromProto(method->options().GetExtension(v1::scope))};
    }
  }
  return facts;
}

const RpcFacts& FactsOf(Rpc rpc) {
  static const std::array<RpcFacts, kRpcCount> facts = ReadFacts();
  return facts[static_cast<size_t>(rpc)];
}

}  // namespace

Scope ScopeOf(Rpc rpc) { return FactsOf(rpc).scope; }

const RpcName& RpcNameOf(Rpc rpc) { return FactsOf(rpc).name; }

}  // namespace quantd::server
