// ReadEncoding: an encoding of any size, a piece of its scales at a time.

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
#include "server/rpc/scale_rpcs.h"
#include "server/rpc/stored_encoding_proto.h"
#include "server/store/encoding_store.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

// A piece as it is read, and in its message.
constexpr int64_t kMostPieceMemory = int64_t{2} << 20;
// Memory of a scale in both, with a zero point.
constexpr int64_t kMemoryPerReadScale = 16;

class ReadEncodingCall final : public EncodingCall {
 public:
  explicit ReadEncodingCall(const CallArguments& arguments)
      : EncodingCall(arguments, Rpc::kReadEncoding, &request_) {}

 private:
  void Took(bool more) override {
    if (!more) {
      return End(core::MessageMalformedError("expected a request, got none"));
    }
    Schedule(StepKind::kStore, [this] { Open(); });
  }

  void Sent() override {
    Schedule(StepKind::kStore, [this] { WriteNext(); });
  }

  void Open() {
    if (!MayGoOn()) return;
    absl::StatusOr<EncodingKey> key = KeyFromProto(request_.name());
    if (!key.ok()) return End(core::WithField(key.status(), "name"));
    absl::StatusOr<std::unique_ptr<EncodingReader>> reader =
        caller().encodings->OpenReader(*key);
    if (!reader.ok()) return End(reader.status());
    reader_ = *std::move(reader);
    const int64_t bytes = std::min(
        kMostPieceMemory, kMemoryPerReadScale * reader_->scale_count());
    if (bytes > kUnchargedBytes) {
      absl::Status status =
          env().budget->Grow(&lease_, bytes, kWayOutWithFewerCalls);
      if (!status.ok()) return End(std::move(status));
    }
    v1::StoredEncoding* const stored = response_.mutable_stored_encoding();
    StoredEncodingToProto(*key, reader_->stored(), /*with_encoding=*/true,
                          stored);
    stored->set_scale_count(static_cast<uint64_t>(reader_->scale_count()));
    stored->mutable_encoding()->set_scales_in_chunks(true);
    stored->mutable_encoding()->set_chunks_have_zero_points(
        reader_->has_zero_points());
    WriteNext();
  }

  void WriteNext() {
    if (!MayGoOn()) return;
    absl::StatusOr<absl::optional<ScalePiece>> piece = reader_->Next();
    if (!piece.ok()) return End(piece.status());
    if (!piece->has_value()) return End(absl::OkStatus());
    v1::ScaleChunk* const chunk = response_.mutable_scales();
    chunk->set_first(static_cast<uint64_t>((*piece)->first));
    chunk->set_scale(std::move((*piece)->scale));
    chunk->set_zero_point(std::move((*piece)->zero_point));
    chunk->set_first_outer(static_cast<uint64_t>((*piece)->first_outer));
    chunk->set_outer_scale(std::move((*piece)->outer_scale));
    const v1::ReadEncodingResponse response =
        std::exchange(response_, v1::ReadEncodingResponse());
    Write(response);
  }

  v1::ReadEncodingRequest request_;
  // Used by the steps, one at a time.
  MemoryBudget::Lease lease_;
  std::unique_ptr<EncodingReader> reader_;
  v1::ReadEncodingResponse response_;
};

}  // namespace

EncodingCall* StartReadEncoding(const CallArguments& arguments) {
  return EncodingCall::Start<ReadEncodingCall>(arguments);
}

}  // namespace quantd::server
