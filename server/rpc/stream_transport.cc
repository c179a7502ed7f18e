#include "server/rpc/stream_transport.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

constexpr int64_t kMaxQueuedBytes = int64_t{2} << 20;
// Most queued bytes when a quarter of the memory budget is in use.
constexpr int64_t kShortQueuedBytes = int64_t{256} << 10;
// Memory of a queued message beside its bytes.
constexpr int64_t kQueuedMessageBytes = 512;

}  // namespace

StreamTransport::StreamTransport(Reactor* reactor)
    : reactor_(reactor), last_progress_(core::SteadyNow()) {}

void StreamTransport::MadeProgress() { last_progress_ = core::SteadyNow(); }

void StreamTransport::ReadDone(bool ok) {
  reading_ = false;
  MadeProgress();
  if (ok) {
    inbox_.emplace(std::move(read_buffer_));
    read_buffer_.Clear();
  } else {
    reads_done_ = true;
  }
}

void StreamTransport::WriteDone(bool ok) {
  write_start_time_.reset();
  has_written_ = true;
  MadeProgress();
  queued_bytes_ -= writes_.front().charge_bytes;
  writes_.pop_front();
  if (!ok) Cancelled();
}

void StreamTransport::Cancelled() { cancelled_ = true; }

grpc::ByteBuffer StreamTransport::TakeMessage() {
  taken_bytes_ = message_bytes();
  grpc::ByteBuffer message = *std::move(inbox_);
  inbox_.reset();
  return message;
}

void StreamTransport::Answer(std::vector<grpc::ByteBuffer> messages) {
  for (const grpc::ByteBuffer& message : messages) {
    const int64_t charge_bytes =
        static_cast<int64_t>(message.Length()) + kQueuedMessageBytes;
    queued_bytes_ += charge_bytes;
    writes_.push_back({message, charge_bytes});
  }
}

bool StreamTransport::QueueIsFull(bool roomy) const {
  return queued_bytes_ >= (roomy ? kMaxQueuedBytes : kShortQueuedBytes);
}

int64_t StreamTransport::held_bytes() const {
  const int64_t bytes = queued_bytes_ + taken_bytes_ + message_bytes();
  // A stream that is worth counting has more behind these bytes.
  return bytes > kShortQueuedBytes ? bytes + kLookAheadBytes : bytes;
}

void StreamTransport::EndWith(absl::Status status) {
  if (!end_.has_value()) end_ = std::move(status);
}

void StreamTransport::WriteNext() {
  if (write_start_time_.has_value() || writes_.empty() || cancelled_) return;
  write_start_time_ = core::SteadyNow();
  // Answers that are ready go out together. Not with the first, which brings
  // the initial metadata: gRPC completes such a write only when it is sent,
  // and the hint says not to send it yet.
  grpc::WriteOptions options;
  if (writes_.size() > 1 && has_written_) options.set_buffer_hint();
  reactor_->StartWrite(&writes_.front().message, options);
}

void StreamTransport::ReadNext(bool ahead) {
  if (reading_ || reads_done_ || inbox_.has_value() || end_.has_value() ||
      (taken_bytes_ > 0 && !ahead)) {
    return;
  }
  reading_ = true;
  reactor_->StartRead(&read_buffer_);
}

void StreamTransport::Finish() {
  if (!end_.has_value() || write_start_time_.has_value() ||
      !(writes_.empty() || cancelled_)) {
    return;
  }
  finished_ = true;
  reactor_->Finish(ToGrpcStatus(*end_));
}

}  // namespace quantd::server
