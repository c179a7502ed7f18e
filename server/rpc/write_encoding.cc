// WriteEncoding: an encoding of any size > store, a piece at a time.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/caller.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/provenance.h"
#include "server/rpc/scale_checker.h"
#include "server/rpc/scale_rpcs.h"
#include "server/rpc/stored_encoding_proto.h"
#include "server/store/encoding_store.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

// Memory of what the writer keeps until a piece is full, and of that piece: at
// most so much, and no more than a multiple of the bytes that came, beside the
// memory that it begins with.
constexpr int64_t kMostWriterMemory = int64_t{4} << 20;
constexpr int64_t kLeastWriterMemory = int64_t{16} << 10;
constexpr int64_t kWriterMemoryPerByte = 4;
// A chunk as floats while it is checked, and on its way to the writer.
constexpr int64_t kMemoryPerChunkByte = 10;

class WriteEncodingCall final : public EncodingCall {
 public:
  explicit WriteEncodingCall(const CallArguments& arguments)
      : EncodingCall(arguments, Rpc::kWriteEncoding, &request_) {}

 private:
  void Took(bool more) override {
    Schedule(StepKind::kWrite, [this, more] { more ? Take() : Finish(); });
  }

  // The answer is the end.
  void Sent() override {}

  void Take() {
    if (!MayGoOn()) return;
    absl::Status status = writer_ == nullptr ? Open() : CheckLater();
    if (status.ok() && request_.has_scales()) status = Add(request_.scales());
    if (!status.ok()) return End(std::move(status));
    Read();
  }

  // By the first message.
  absl::Status Open() {
    absl::StatusOr<EncodingKey> key = KeyFromProto(request_.name());
    if (!key.ok()) return core::WithField(key.status(), "name");
    absl::Status status = env().authenticator->CheckWrite(caller(), key->model);
    if (!status.ok()) return core::WithField(std::move(status), "name");
    if (!request_.has_encoding()) {
      return core::WithField(core::EncodingMissingError(), "encoding");
    }
    v1::Encoding* const proto = request_.mutable_encoding();
    // Only quantd itself sets it.
    proto->clear_degenerate_count();
    absl::StatusOr<ScaleChecker> checker = ScaleChecker::Create(*proto);
    if (!checker.ok()) return core::WithField(checker.status(), "encoding");
    status = env().budget->Grow(&lease_, WriterMemory(), kWayOutWithFewerCalls);
    if (!status.ok()) return status;
    absl::StatusOr<std::unique_ptr<EncodingWriter>> writer =
        caller().encodings->OpenWriter(
            *key, std::make_shared<const core::Encoding>(checker->outline()),
            checker->has_zero_points(),
            MadeByClient(env(), request_.if_match()));
    if (!writer.ok()) return writer.status();
    key_ = *std::move(key);
    format_ = proto->format();
    checker_.emplace(*std::move(checker));
    // It asks the store that the caller had when it was opened.
    store_ = caller().encodings;
    writer_ = *std::move(writer);
    return absl::OkStatus();
  }

  int64_t WriterMemory() const {
    return std::min(
        kMostWriterMemory,
        kLeastWriterMemory + kWriterMemoryPerByte * received_bytes_);
  }

  absl::Status CheckLater() const {
    if (request_.has_name() || request_.has_encoding() ||
        !request_.if_match().empty()) {
      return core::MessageMalformedError(
          "name, encoding and if_match are in the first message only");
    }
    return absl::OkStatus();
  }

  absl::Status Add(const v1::ScaleChunk& chunk) {
    const auto bytes = static_cast<int64_t>(chunk.ByteSizeLong());
    most_chunk_bytes_ = std::max(most_chunk_bytes_, bytes);
    received_bytes_ += bytes;
    absl::Status status =
        env().budget->Grow(&lease_,
                           WriterMemory() + checker_->memory_bytes() +
                               kMemoryPerChunkByte * most_chunk_bytes_,
                           kWayOutWithFewerCalls);
    if (!status.ok()) return status;
    status = checker_->Check(chunk);
    if (!status.ok()) return core::WithField(std::move(status), "scales");
    ScalePiece piece;
    piece.scale = chunk.scale();
    piece.zero_point = chunk.zero_point();
    piece.outer_scale = chunk.outer_scale();
    return writer_->Add(piece);
  }

  void Finish() {
    if (!MayGoOn()) return;
    if (writer_ == nullptr) {
      return End(core::MessageMalformedError("expected a request, got none"));
    }
    if (absl::Status s = checker_->Finish(); !s.ok()) {
      return End(std::move(s));
    }
    absl::StatusOr<StoredEncoding> stored = writer_->Finish();
    if (!stored.ok()) return End(stored.status());
    v1::WriteEncodingResponse response;
    v1::StoredEncoding* const proto = response.mutable_stored_encoding();
    StoredEncodingToProto(key_, *stored, /*with_encoding=*/false, proto);
    proto->set_format(format_);
    proto->set_scale_count(static_cast<uint64_t>(checker_->scale_count()));
    EndWith(response);
  }

  v1::WriteEncodingRequest request_;
  // Used by the steps, one at a time.
  MemoryBudget::Lease lease_;
  EncodingKey key_;
  v1::NumberFormat format_ = v1::NUMBER_FORMAT_UNSPECIFIED;
  absl::optional<ScaleChecker> checker_;
  int64_t received_bytes_ = 0;
  // The largest so far: what checked it keeps its memory.
  int64_t most_chunk_bytes_ = 0;
  std::shared_ptr<EncodingStore> store_;
  std::unique_ptr<EncodingWriter> writer_;
};

}  // namespace

EncodingCall* StartWriteEncoding(const CallArguments& arguments) {
  return EncodingCall::Start<WriteEncodingCall>(arguments);
}

}  // namespace quantd::server
