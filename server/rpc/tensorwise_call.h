// A call that answers a message per tensor.

#ifndef QUANTD_SERVER_RPC_TENSORWISE_CALL_H_
#define QUANTD_SERVER_RPC_TENSORWISE_CALL_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "server/rpc/encoding_call.h"

namespace quantd::server {

// Makes one message at a time, and the next one when the client has taken it.
// Between steps it ends if the client is gone or the server is out of time.
// Before Open and Load it also ends if the server drains, or if the caller may
// no longer make the call.
template <typename Request, typename Response>
class TensorwiseCall : public EncodingCall {
 protected:
  TensorwiseCall(const CallArguments& arguments, Rpc rpc)
      : EncodingCall(arguments, rpc, &request_) {}

  // Whole from the first step on.
  const Request& request() const { return request_; }

  // Checks the request and finds the tensors that it is about. May take long or
  // wait for a store, as may Compute: both look at stop(). An error ends the
  // call.
  virtual absl::Status Open() = 0;
  // Reads what the next message needs, in a step of that kind; false when there
  // is no further one. An error ends the call.
  virtual StepKind load_step() const = 0;
  virtual absl::StatusOr<bool> Load() = 0;
  // Makes the message. An error ends the call.
  virtual absl::Status Compute(Response* response) = 0;
  // True if Compute made a message; if not, Load comes next.
  virtual bool answers() const { return true; }
  // True if Store is to be called, in a step of the store.
  virtual bool stores() const { return false; }
  virtual void Store(Response* response) {}

 private:
  void Took(bool more) final {
    if (!more)
      return End(core::MessageMalformedError("expected a request, got none"));
    this->Schedule(StepKind::kLong, [this] { OpenStep(); });
  }

  void Sent() final { ScheduleLoad(); }

  void OpenStep() {
    absl::Status status = Open();
    this->Schedule(StepKind::kQuantum, [this, status] { EndOpen(status); });
  }

  void EndOpen(const absl::Status& status) {
    if (!IsWanted()) return;
    status.ok() ? ScheduleLoad() : End(status);
  }

  void ScheduleLoad() {
    this->Schedule(load_step(), [this] { LoadStep(); });
  }

  void LoadStep() {
    absl::StatusOr<bool> loaded = false;
    if (absl::Status s = CheckGoesOn(); !s.ok()) {
      loaded = std::move(s);
    } else {
      loaded = Load();
    }
    if (loaded.ok() && *loaded) {
      return this->Schedule(StepKind::kLong, [this] { ComputeStep(); });
    }
    this->Schedule(StepKind::kQuantum, [this, status = loaded.status()] {
      if (IsWanted()) End(status);
    });
  }

  void ComputeStep() {
    absl::Status status = Compute(&response_);
    const StepKind next =
        status.ok() && stores() ? StepKind::kWrite : StepKind::kQuantum;
    this->Schedule(next, [this, status] { EndCompute(status); });
  }

  void EndCompute(const absl::Status& status) {
    if (!IsWanted()) return;
    if (!status.ok()) return End(status);
    if (!answers()) return ScheduleLoad();
    if (stores()) Store(&response_);
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
