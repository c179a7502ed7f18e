// A call that answers one message with one.

#ifndef QUANTD_SERVER_RPC_UNARY_CALL_H_
#define QUANTD_SERVER_RPC_UNARY_CALL_H_

#include "absl/status/status.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/caller.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/rpc_environment.h"
#include "server/wire/rpcs.h"

namespace quantd::server {

// What the body of a unary call works with.
struct UnaryContext {
  const RpcEnvironment& env;
  const Caller& caller;
  // Whether the answer is of no use any more.
  core::StopToken stop;
  // What the body takes, its answer included, until that is in bytes.
  MemoryBudget::Lease* lease;
};

// Runs a body, which waits for the store, as a step of the store.
template <typename Request, typename Response>
class UnaryCall final : public EncodingCall {
 public:
  using Body = absl::Status (*)(const UnaryContext& context,
                                const Request& request, Response* response);

  UnaryCall(const CallArguments& arguments, Rpc rpc, Body body)
      : EncodingCall(arguments, rpc, &request_),
        writes_(ScopeOf(rpc) != Scope::kRead),
        body_(body) {}

 private:
  void Took(bool more) override {
    if (!more)
      return End(core::MessageMalformedError("expected a request, got none"));
    this->Schedule(writes_ ? StepKind::kWrite : StepKind::kStore,
                   [this] { Run(); });
  }

  void Run() {
    if (!MayGoOn()) return;
    // The answer goes before what it was charged for.
    MemoryBudget::Lease lease;
    Response response;
    absl::Status status =
        body_({env(), caller(), stop(), &lease}, request_, &response);
    status.ok() ? EndWith(response) : End(std::move(status));
  }

  // The answer is the end.
  void Sent() override {}

  const bool writes_;
  const Body body_;
  Request request_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_UNARY_CALL_H_
