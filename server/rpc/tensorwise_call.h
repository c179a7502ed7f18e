// A call that answers a message per tensor.

#ifndef QUANTD_SERVER_RPC_TENSORWISE_CALL_H_
#define QUANTD_SERVER_RPC_TENSORWISE_CALL_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "server/rpc/encoding_call.h"

namespace quantd::server {

// What a step of TensorwiseCall::Load has come to.
enum class Loaded {
  // More steps are needed.
  kPart,
  kMessage,
  // There is no further message.
  kNothing,
};

// Makes one message at a time, and the next one when the client has taken it:
// Load on the store's pool, Compute on the workers, Store on the store's pool.
// Between steps it ends when the client is gone or the server is out of time,
// between steps of Load also when the server drains or the caller may not make
// the call any more.
template <typename Request, typename Response>
class TensorwiseCall : public EncodingCall {
 protected:
  TensorwiseCall(const CallArguments& arguments, Rpc rpc)
      : EncodingCall(arguments, rpc, &request_) {}

  // Whole from the first step on.
  const Request& request() const { return request_; }

  // Does the next part, of bounded size, of reading what the next message
  // needs. An error ends the call.
  virtual absl::StatusOr<Loaded> Load() = 0;
  // Does the next part of the message, of bounded size; answers whether that
  // was the last.
  virtual bool Compute(Response* response) = 0;
  // Whether Store is to be called.
  virtual bool stores() const { return false; }
  virtual void Store(Response* response) {}

 private:
  void Took(bool more) final {
    if (!more)
      return End(core::MessageMalformedError("expected a request, got none"));
    ScheduleLoad();
  }

  void Sent() final { ScheduleLoad(); }

  void ScheduleLoad() {
    this->Schedule(env().store_pool, [this] { LoadStep(); });
  }

  void LoadStep() {
    if (!MayGoOn()) return;
    const absl::StatusOr<Loaded> loaded = Load();
    if (!IsWanted()) return;
    if (!loaded.ok()) return End(loaded.status());
    switch (*loaded) {
      case Loaded::kPart:
        return ScheduleLoad();
      case Loaded::kNothing:
        return End(absl::OkStatus());
      case Loaded::kMessage:
        this->Schedule(env().pool, [this] { ComputeStep(); });
    }
  }

  void ComputeStep() {
    if (!IsWanted()) return;
    if (!Compute(&response_)) {
      this->Schedule(env().pool, [this] { ComputeStep(); });
    } else if (stores()) {
      this->Schedule(env().store_pool, [this] { StoreStep(); });
    } else {
      WriteResponse();
    }
  }

  void StoreStep() {
    if (!IsWanted()) return;
    Store(&response_);
    WriteResponse();
  }

  // Its bytes are charged while the client takes them; nothing else of it
  // stays.
  void WriteResponse() {
    const Response response = std::exchange(response_, Response());
    Write(response);
  }

  Request request_;
  // Used by the steps, one at a time.
  Response response_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TENSORWISE_CALL_H_
