#include "server/rpc/encoding_call.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "grpcpp/support/proto_buffer_writer.h"
#include "server/guard/memory_budget.h"
#include "server/guard/size_text.h"
#include "server/wire/parsed_bytes.h"
#include "server/wire/rpcs.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

// Requests up to this size are parsed on gRPC's threads.
constexpr int64_t kLightRequestBytes = int64_t{8} << 10;

// The most memory that a request may take, once it is parsed.
int64_t MostRequestBytes(Rpc rpc, const Limits& limits) {
  switch (RequestSizeOf(rpc)) {
    case RequestSize::kPatterns:
      return 16 * kMiB;
    case RequestSize::kScales:
      return 8 * limits.message_bytes;
    case RequestSize::kNames:
    case RequestSize::kTensors:
      break;
  }
  return 64 << 10;
}

}  // namespace

absl::Duration SendTime(int64_t bytes, absl::Duration idle_timeout) {
  constexpr absl::Duration kMostPerPart = absl::Seconds(1);
  return idle_timeout + bytes / kMiB * std::min(idle_timeout, kMostPerPart);
}

EncodingCall::EncodingCall(const CallArguments& arguments, Rpc rpc,
                           google::protobuf::Message* request)
    : env_(arguments.env),
      rpc_(rpc),
      registry_(arguments.registry),
      context_(arguments.context),
      request_(request),
      credential_(env_.authenticator->CredentialOf(*context_)),
      share_(env_.shares->Find(
          env_.authenticator->ShareName(*context_, credential_))),
      caller_(env_.authenticator->Authenticate(*context_, credential_, rpc)) {
  env_.metrics->RpcStarted(rpc_);
}

void EncodingCall::Begin() {
  self_ = shared_from_this();
  absl::Status entered =
      registry_->Enter(this, share_->group, CallRegistry::Kind::kCall);
  if (!caller_.ok()) return End(caller_.status());
  if (!entered.ok()) return End(std::move(entered));
  Read();
}

void EncodingCall::Read() {
  // The read may end the call before the mutex is released.
  const std::shared_ptr<EncodingCall> self = shared_from_this();
  absl::MutexLock lock(&mutex_);
  if (registry_->draining()) return EndLocked(core::DrainingError());
  reading_ = true;
  read_start_time_ = core::SteadyNow();
  StartRead(&request_bytes_);
}

void EncodingCall::OnReadDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    if (!std::exchange(reading_, false)) return;
  }
  const core::ThreadPool::GroupScope scope(share_->group);
  // A call that broke off has not ended its requests.
  if (!ok && context_->IsCancelled()) return End(absl::CancelledError());
  const int64_t bytes =
      ok ? static_cast<int64_t>(request_bytes_.Length()) : int64_t{0};
  if (bytes <= kLightRequestBytes) {
    const std::shared_ptr<EncodingCall> self = shared_from_this();
    return RunStep([this, ok] { TakeRequest(ok); });
  }
  if (bytes > kUnchargedBytes) {
    absl::Status status =
        env_.budget->Grow(&arrival_lease_, bytes, kWayOutWithFewerCalls);
    if (!status.ok()) return End(std::move(status));
  }
  Schedule(StepKind::kQuantum, [this, ok] { TakeRequest(ok); });
}

void EncodingCall::TakeRequest(bool more) {
  if (!MayGoOn()) return;
  if (more) {
    absl::Status status = ParseRequest();
    request_bytes_.Clear();
    arrival_lease_.Release();
    if (!status.ok()) return End(std::move(status));
  }
  Took(more);
}

absl::Status EncodingCall::ParseRequest() {
  request_->Clear();
  request_lease_.Release();
  const absl::StatusOr<int64_t> bytes =
      ParsedBytes(&request_bytes_, *request_->GetDescriptor(),
                  MostRequestBytes(rpc_, env_.limits));
  if (!bytes.ok()) return bytes.status();
  if (*bytes > kUnchargedBytes) {
    absl::Status status =
        env_.budget->Grow(&request_lease_, *bytes, kWayOutWithFewerCalls);
    if (!status.ok()) return status;
  }
  grpc::ProtoBufferReader reader(&request_bytes_);
  if (!request_->ParseFromZeroCopyStream(&reader)) {
    return core::MessageMalformedError(
        "the request is not protobuf, or has text that is not UTF-8");
  }
  return absl::OkStatus();
}

absl::Status EncodingCall::Serialize(
    const google::protobuf::Message& response) {
  const auto bytes = static_cast<int64_t>(response.ByteSizeLong());
  if (bytes > kUnchargedBytes) {
    absl::Status status =
        env_.budget->Grow(&response_lease_, bytes, kWayOutWithFewerCalls);
    if (!status.ok()) return status;
  }
  grpc::ProtoBufferWriter writer(&response_bytes_, kMiB,
                                 static_cast<int>(bytes));
  if (response.SerializeToZeroCopyStream(&writer)) return absl::OkStatus();
  return absl::InternalError("the answer could not be written");
}

void EncodingCall::BeginSending() {
  send_end_time_ = core::SteadyNow() +
                   SendTime(static_cast<int64_t>(response_bytes_.Length()),
                            env_.limits.idle_timeout);
}

void EncodingCall::Write(const google::protobuf::Message& response) {
  if (absl::Status s = Serialize(response); !s.ok()) return End(std::move(s));
  const std::shared_ptr<EncodingCall> self = shared_from_this();
  absl::MutexLock lock(&mutex_);
  BeginSending();
  StartWrite(&response_bytes_);
}

void EncodingCall::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    send_end_time_ = absl::InfiniteDuration();
  }
  const core::ThreadPool::GroupScope scope(share_->group);
  response_bytes_.Clear();
  response_lease_.Release();
  if (!ok) return End(absl::CancelledError());
  const std::shared_ptr<EncodingCall> self = shared_from_this();
  RunStep([this] { Sent(); });
}

void EncodingCall::EndWith(const google::protobuf::Message& response) {
  if (absl::Status s = Serialize(response); !s.ok()) return End(std::move(s));
  const std::shared_ptr<EncodingCall> self = shared_from_this();
  absl::MutexLock lock(&mutex_);
  BeginSending();
  StartWriteAndFinish(&response_bytes_, grpc::WriteOptions(), grpc::Status::OK);
}

void EncodingCall::End(absl::Status status) {
  const std::shared_ptr<EncodingCall> self = shared_from_this();
  absl::MutexLock lock(&mutex_);
  EndLocked(std::move(status));
}

void EncodingCall::EndLocked(absl::Status status) {
  env_.metrics->LimitRejected(core::ErrorReason(status));
  end_ = std::move(status);
  Finish(ToGrpcStatus(end_));
}

void EncodingCall::EndRead(absl::Status status) {
  if (std::exchange(reading_, false)) EndLocked(std::move(status));
}

void EncodingCall::OnCancel() {
  stopped_.store(true);
  cancelled_.store(true);
}

void EncodingCall::OnDone() {
  int code;
  {
    absl::MutexLock lock(&mutex_);
    // Nothing is to be done with the context any more.
    send_end_time_ = absl::InfiniteDuration();
    code = static_cast<int>(end_.code());
  }
  // After OnCancel, if that was called, is done with the call.
  cancelled_.exchange(true);
  if (context_->IsCancelled()) {
    const bool late = context_->deadline() <= std::chrono::system_clock::now();
    code = late ? grpc::StatusCode::DEADLINE_EXCEEDED
                : grpc::StatusCode::CANCELLED;
  }
  env_.metrics->RpcHandled(rpc_, code, core::SteadyNow() - start_time_);
  self_.reset();
}

bool EncodingCall::IsWanted() {
  if (cancelled_.load()) {
    End(absl::CancelledError());
  } else if (out_of_time_.load()) {
    End(core::DrainingError());
  } else {
    return true;
  }
  return false;
}

absl::Status EncodingCall::CheckGoesOn() {
  if (stopped()) return core::StoppedError();
  if (registry_->draining()) return core::DrainingError();
  const absl::Duration limit = env_.limits.stream_age;
  if (core::SteadyNow() - start_time_ >= limit) {
    return core::StreamAgeError(limit);
  }
  return env_.authenticator->Renew(credential_, rpc_, &*caller_);
}

bool EncodingCall::MayGoOn() {
  if (!IsWanted()) return false;
  absl::Status status = CheckGoesOn();
  if (status.ok()) return true;
  End(std::move(status));
  return false;
}

void EncodingCall::Drain() {
  absl::MutexLock lock(&mutex_);
  EndRead(core::DrainingError());
}

void EncodingCall::EndNow() {
  out_of_time_.store(true);
  stopped_.store(true);
  Drain();
}

void EncodingCall::EndIfOverdue(const Limits& limits) {
  const absl::Duration now = core::SteadyNow();
  absl::MutexLock lock(&mutex_);
  // A status can't follow an answer that the client does not read.
  const bool is_sending = send_end_time_ != absl::InfiniteDuration();
  const bool is_too_old = now - start_time_ >= 2 * limits.stream_age;
  if (now >= send_end_time_ || (is_sending && is_too_old)) {
    context_->TryCancel();
  }
  if (!reading_) return;
  if (now - start_time_ >= limits.stream_age) {
    EndRead(core::StreamAgeError(limits.stream_age));
  } else if (now - read_start_time_ >= limits.idle_timeout) {
    EndRead(core::StreamIdleError(limits.idle_timeout));
  }
}

}  // namespace quantd::server
