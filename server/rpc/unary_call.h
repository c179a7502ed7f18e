// A call that answers one message with one.

#ifndef QUANTD_SERVER_RPC_UNARY_CALL_H_
#define QUANTD_SERVER_RPC_UNARY_CALL_H_

#include <utility>

#include "absl/status/status.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/caller.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/steps.h"
#include "server/wire/rpcs.h"

namespace quantd::server {

// Arguments of the body of a unary call.
struct UnaryContext {
  const RpcEnvironment& env;
  const Caller& caller;
  // Stopped when the answer is of no use any more.
  core::StopToken stop;
  // Memory of the body, its answer included, until that is in bytes.
  MemoryBudget::Lease* lease;
};

// Runs a body, which waits for the store, as a step of that kind.
template <typename Request, typename Response>
class UnaryCall final : public EncodingCall {
 public:
  using Body = absl::Status (*)(const UnaryContext& context,
                                const Request& request, Response* response);

  UnaryCall(const CallArguments& arguments, Rpc rpc, StepKind kind, Body body)
      : EncodingCall(arguments, rpc, &request_), kind_(kind), body_(body) {}

 private:
  void Took(bool more) override {
    if (!more)
      return End(core::MessageMalformedError("expected a request, got none"));
    this->Schedule(kind_, [this] { Run(); });
  }

  void Run() {
    absl::Status status = CheckGoesOn();
    if (status.ok()) {
      status = body_({env(), caller(), stop(), &lease_}, request_, &response_);
    }
    if (!IsLowPriority(kind_)) return Answer(status);
    this->Schedule(StepKind::kQuantum, [this, status] { Answer(status); });
  }

  void Answer(const absl::Status& status) {
    {
      const Response response = std::exchange(response_, Response());
      if (IsWanted()) status.ok() ? EndWith(response) : End(status);
    }
    lease_.Release();
  }

  // The answer is the end.
  void Sent() override {}

  const StepKind kind_;
  const Body body_;
  Request request_;
  // Memory of response_, until that is in bytes.
  MemoryBudget::Lease lease_;
  Response response_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_UNARY_CALL_H_
