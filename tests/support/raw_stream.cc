#include "tests/support/raw_stream.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/create_channel_posix.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"

namespace quantd::testing {

RawStream::RawStream(const std::shared_ptr<grpc::Channel>& channel,
                     const std::string& method, absl::Duration timeout)
    : stub_(channel) {
  context_.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  call_ = stub_.PrepareCall(&context_, method, &queue_);
  call_->StartCall(this);
  Wait();
}

RawStream::~RawStream() {
  if (!finished_) {
    context_.TryCancel();
    Finish();
  }
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

bool RawStream::Wait() {
  void* tag = nullptr;
  bool ok = false;
  return queue_.Next(&tag, &ok) && ok;
}

bool RawStream::Write(const std::string& message) {
  const grpc::Slice slice(message);
  call_->Write(grpc::ByteBuffer(&slice, 1), this);
  return Wait();
}

void RawStream::WritesDone() {
  call_->WritesDone(this);
  Wait();
}

bool RawStream::Read(std::string* message) {
  grpc::ByteBuffer buffer;
  call_->Read(&buffer, this);
  if (!Wait()) return false;
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  message->clear();
  for (const grpc::Slice& slice : slices) {
    message->append(slice.begin(), slice.end());
  }
  return true;
}

grpc::Status RawStream::Finish() {
  grpc::Status status;
  call_->Finish(&status, this);
  Wait();
  finished_ = true;
  return status;
}

CuttableChannel::CuttableChannel(const std::string& address) {
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  sockaddr_in peer = {};
  peer.sin_family = AF_INET;
  socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool connected =
      absl::SimpleAtoi(address.substr(colon + 1), &port) &&
      inet_pton(AF_INET, address.substr(0, colon).c_str(), &peer.sin_addr) ==
          1 &&
      (peer.sin_port = htons(static_cast<uint16_t>(port)),
       connect(socket_, reinterpret_cast<const sockaddr*>(&peer),
               sizeof(peer)) == 0) &&
      fcntl(socket_, F_SETFL, O_NONBLOCK) == 0;
  if (!connected) std::abort();
  channel_ = grpc::CreateInsecureChannelFromFd(address, socket_);
}

void CuttableChannel::Cut() { shutdown(socket_, SHUT_RDWR); }

}  // namespace quantd::testing
