#include "server/rpc/tensor_sequence.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/errors.h"

namespace quantd::server {

TensorSequence::TensorSequence(const RpcEnvironment& env, TensorRpc* rpc,
                               Credential credential, const Stream& stream)
    : env_(env),
      rpc_(rpc),
      credential_(std::move(credential)),
      stream_(stream) {}

void TensorSequence::Take(grpc::ByteBuffer message) {
  message_.emplace();
  message_->buffer.Swap(&message);
}

absl::Status TensorSequence::Step(StepKind kind, bool over_share) {
  if (message_.has_value() && !message_->opened) {
    if (absl::Status s = OpenMessage(kind); !s.ok()) return s;
    if (!message_->opened) return absl::OkStatus();
  }
  // A step that waits is a task of its own, so that no kernel runs beside it.
  if (has_job() && MayDo(kind, next_step())) {
    if (absl::Status s = WorkOnTensor(kind, over_share); !s.ok()) FailTensor(s);
  }
  // The chunk is used up, dropped, or the tensor has all its bytes.
  if (message_.has_value() && (!has_job() || tensor_->needs_message())) {
    if (has_job()) tensor_->Retain();
    message_.reset();
  }
  return absl::OkStatus();
}

absl::Status TensorSequence::WorkOnTensor(StepKind kind, bool over_share) {
  if (!tensor_->finishing()) {
    if (!tensor_->resolved()) {
      absl::Status status = tensor_->Resolve(message_->envelope, &writer_);
      if (!status.ok()) return status;
    }
    if (MayWait(kind)) return absl::OkStatus();
    absl::Status status = tensor_->Feed(message_->region, over_share, &writer_);
    if (!status.ok()) return status;
    if (!tensor_->finishing() || !MayDo(kind, next_step())) {
      return absl::OkStatus();
    }
  }
  const absl::StatusOr<bool> done = tensor_->Finish(over_share, &writer_);
  if (done.ok() && *done) CloseTensor(/*ok=*/true);
  return done.status();
}

absl::Status TensorSequence::OpenMessage(StepKind kind) {
  RequestEnvelope& envelope = message_->envelope;
  if (!message_->parsed) {
    absl::Status status = ParseRequestEnvelope(&message_->buffer, &envelope);
    if (!status.ok()) return status;
    message_->parsed = true;
  }
  if (envelope.has_header && !message_->admitted) {
    if (tensor_.has_value()) FailTensor(tensor_->CheckComplete());
    if (absl::Status s = stream_.watchdog->CheckMayOpen(); !s.ok()) return s;
    absl::Status status =
        env_.authenticator->Renew(credential_, rpc_->id(), &caller_);
    if (!status.ok()) return status;
    message_->admitted = AdmitTensor();
  }
  if (message_->admitted && kind == StepKind::kLight &&
      message_->size_bytes() > kLightMessageBytes) {
    return absl::OkStatus();
  }
  message_->opened = true;
  // How much they are decides whether there is time for the tensor.
  absl::Status shared;
  if ((message_->admitted || has_job()) && envelope.shared.has_value()) {
    shared = FindShared();
  }
  if (message_->admitted) {
    absl::Status status = tensor_->Check(std::exchange(envelope.header, {}),
                                         caller_, envelope.data_bytes);
    if (!status.ok()) FailTensor(status);
  } else if (!envelope.has_header && !has_job() && !skips_) {
    return core::HeaderMissingError();
  }
  if (has_job() && !shared.ok()) {
    FailTensor(core::WithField(shared, "shared"));
  }
  env_.metrics->PayloadIn(envelope.data_bytes);
  if (has_job() && !envelope.has_header) {
    if (absl::Status s = tensor_->Push(envelope); !s.ok()) FailTensor(s);
  }
  return absl::OkStatus();
}

bool TensorSequence::AdmitTensor() {
  skips_ = false;
  cut_off_ = false;
  tensor_.emplace(env_, rpc_, stream_.account, stream_.stopped);
  absl::Status status =
      tensor_->Admit(message_->envelope.data_bytes, message_->size_bytes());
  if (!status.ok()) FailTensor(status);
  return status.ok();
}

absl::Status TensorSequence::FindShared() {
  RequestEnvelope& envelope = message_->envelope;
  if (envelope.data_bytes > 0) {
    return core::RegionInvalidError(
        "both data and shared in one message, expected one of them");
  }
  absl::StatusOr<SharedBytes> found =
      caller_.shared_memory.Find(*envelope.shared);
  if (!found.ok()) return found.status();
  message_->region = std::move(found->region);
  envelope.data.assign(1, found->bytes);
  envelope.data_bytes = static_cast<int64_t>(found->bytes.size());
  return absl::OkStatus();
}

void TensorSequence::End() {
  if (tensor_.has_value()) FailTensor(tensor_->CheckComplete());
}

void TensorSequence::Abandon() {
  if (tensor_.has_value()) CloseTensor(/*ok=*/false);
}

void TensorSequence::FailTensor(const absl::Status& status) {
  // Work that was stopped is nobody's error: the answer goes nowhere.
  if (!absl::IsCancelled(status) || !stream_.stopped->load()) {
    env_.metrics->LimitRejected(core::ErrorReason(status));
    env_.metrics->TensorFailed(rpc_->id(), status.raw_code());
  }
  writer_.SetError(status);
  skips_ = true;
  cut_off_ = tensor_->cut_off();
  CloseTensor(/*ok=*/false);
}

void TensorSequence::CloseTensor(bool ok) {
  tensor_->Close(ok);
  tensor_.reset();
}

StepKind TensorSequence::next_step() const {
  if (!has_job()) return StepKind::kQuantum;
  const StepKind next = tensor_->next_step();
  // A short message may name any amount of shared data.
  return next == StepKind::kLight && message_.has_value() &&
                 message_->region != nullptr
             ? StepKind::kQuantum
             : next;
}

TensorSequence::Outlook TensorSequence::outlook() const {
  Outlook outlook;
  outlook.has_more = message_.has_value() || finishing();
  outlook.has_tensor = tensor_.has_value();
  outlook.skips = skips_;
  outlook.waits_for_memory = tensor_.has_value() && tensor_->waits_for_memory();
  const StepKind next = next_step();
  outlook.next_step = next == StepKind::kLight ? StepKind::kQuantum : next;
  return outlook;
}

absl::Duration TensorSequence::PendingWork() const {
  if (!tensor_.has_value()) return absl::ZeroDuration();
  return tensor_->PendingWork(
      message_.has_value() ? message_->envelope.data_bytes : 0);
}

absl::Duration TensorSequence::finish_time() const {
  return tensor_.has_value() ? tensor_->finish_time() : absl::ZeroDuration();
}

}  // namespace quantd::server
