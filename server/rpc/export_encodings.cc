// ExportEncodings: store > a file of an interchange format, in pieces.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/interchange/interchange.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/interchange_rpcs.h"
#include "server/rpc/page_bytes.h"
#include "server/rpc/patterns.h"
#include "server/rpc/tensorwise_call.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;
// Losses of one message; with names and texts some 100 KiB.
constexpr size_t kMostLosses = 256;
// Memory of a scale as it is read and as text, beside the writer's share.
constexpr int64_t kMemoryPerExportedScale = 50;
constexpr int64_t kMemoryPerEncoding = 4096;

const std::string& EncodingName(const EncodingListEntry& entry) {
  return entry.tensor;
}

bool IsParameterByDefault(absl::string_view tensor,
                          const core::Encoding& encoding) {
  return absl::EndsWith(tensor, "weight") || absl::EndsWith(tensor, "bias") ||
         encoding.scale.size() > 1;
}

class ExportEncodingsCall final
    : public TensorwiseCall<v1::ExportEncodingsRequest,
                            v1::ExportEncodingsResponse> {
 public:
  explicit ExportEncodingsCall(const CallArguments& arguments)
      : TensorwiseCall(arguments, Rpc::kExportEncodings),
        patterns_(env().budget),
        parameter_patterns_(env().budget) {}

 protected:
  // Reading is a part of writing.
  StepKind load_step() const override { return StepKind::kQuantum; }
  absl::StatusOr<bool> Load() override {
    return !is_finished_ || Pending() > 0 || !losses_.empty();
  }

  absl::Status Compute(v1::ExportEncodingsResponse* response) override {
    while (!is_finished_ && Pending() < kPieceBytes &&
           losses_.size() <= kMostLosses) {
      if (stopped()) return core::StoppedError();
      if (absl::Status s = WriteNext(); !s.ok()) return s;
    }
    const size_t size = std::min(Pending(), kPieceBytes);
    response->set_data(text_.data() + text_begin_, size);
    text_begin_ += size;
    if (Pending() < kPieceBytes) {
      std::string(text_, text_begin_).swap(text_);
      text_begin_ = 0;
    }
    // The client may take its time for the text, and holds no more than that
    // and what the writer keeps.
    lease_.Release();
    env().budget->Count(&lease_, KeptBytes());
    const size_t loss_count = std::min(losses_.size(), kMostLosses);
    for (size_t i = 0; i < loss_count; ++i) {
      v1::InterchangeLoss* const loss = response->add_losses();
      loss->set_tensor(losses_[i].tensor);
      loss->set_what(losses_[i].what);
      loss->set_left_out(losses_[i].left_out);
    }
    losses_.erase(losses_.begin(),
                  losses_.begin() + static_cast<int64_t>(loss_count));
    response->set_encoding_count(
        static_cast<uint64_t>(writer_->encoding_count()));
    return absl::OkStatus();
  }

  absl::Status Open() override {
    revision_ = request().revision().empty() ? std::string(kDefaultRevision)
                                             : request().revision();
    if (absl::Status s = CheckPathName("model", request().model()); !s.ok()) {
      return core::WithField(s, "model");
    }
    if (absl::Status s = CheckPathName("revision", revision_); !s.ok()) {
      return core::WithField(s, "revision");
    }
    if (!v1::InterchangeFormat_IsValid(request().format())) {
      return core::WithField(
          core::EnumUnknownError("InterchangeFormat", request().format()),
          "format");
    }
    absl::Status status = patterns_.AddAll(request().patterns(), "patterns");
    if (!status.ok()) return status;
    status = parameter_patterns_.AddAll(request().parameter_patterns(),
                                        "parameter_patterns");
    if (!status.ok()) return status;
    ExportOptions options;
    options.model = request().model();
    options.revision = revision_;
    options.is_parameter = &IsParameterByDefault;
    if (!parameter_patterns_.empty()) {
      options.is_parameter = [this](absl::string_view tensor,
                                    const core::Encoding&) {
        return parameter_patterns_.MatchesAny(tensor);
      };
    }
    absl::StatusOr<std::unique_ptr<EncodingsWriter>> writer =
        EncodingsWriter::Create(
            static_cast<InterchangeFormat>(request().format()),
            std::move(options));
    if (!writer.ok()) return core::WithField(writer.status(), "format");
    if (absl::Status s = ListPage(); !s.ok()) return s;
    if (page_.empty()) {
      return core::EncodingNotFoundError(request().model(), revision_, "");
    }
    writer_ = *std::move(writer);
    writer_->Begin(pass_, &text_);
    return absl::OkStatus();
  }

 private:
  size_t Pending() const { return text_.size() - text_begin_; }

  absl::Status ListPage() {
    constexpr int kPageSize = 1000;
    absl::StatusOr<std::vector<EncodingListEntry>> page =
        caller().encodings->ListEncodings(request().model(), revision_,
                                          last_tensor_, kPageSize);
    if (!page.ok()) return page.status();
    is_last_page_ = page->size() < kPageSize;
    page_ = *std::move(page);
    next_ = 0;
    if (!page_.empty()) last_tensor_ = page_.back().tensor;
    page_lease_.Release();
    return env().budget->Grow(&page_lease_, PageBytes(page_, EncodingName),
                              kWayOutWithFewerCalls);
  }

  // The next encoding, or the end of the pass.
  absl::Status WriteNext() {
    if (next_ == page_.size()) return is_last_page_ ? EndPass() : ListPage();
    const EncodingListEntry& entry = page_[next_++];
    if (!patterns_.empty() && !patterns_.MatchesAny(entry.tensor)) {
      return absl::OkStatus();
    }
    const absl::StatusOr<StoredEncoding> stored = caller().encodings->Read(
        {request().model(), revision_, entry.tensor}, [&](int64_t bytes) {
          return env().budget->Grow(&lease_, KeptBytes() + bytes,
                                    kWayOutWithFewerCalls);
        });
    // It was deleted in between.
    if (core::ErrorReason(stored.status()) == "ENCODING_NOT_FOUND") {
      return absl::OkStatus();
    }
    if (!stored.ok()) return stored.status();
    const auto scale_count = static_cast<int64_t>(std::max(
        stored->encoding->scale.size(), stored->encoding->scale_code.size()));
    if (absl::Status s = Charge(scale_count); !s.ok()) return s;
    return writer_->Add(pass_, entry.tensor, *stored->encoding, stop(), &text_,
                        &losses_);
  }

  int64_t MemoryOf(int64_t scale_count) const {
    return kMemoryPerEncoding +
           (kMemoryPerExportedScale + writer_->memory_per_scale()) *
               scale_count;
  }

  // Bytes that stay between two messages.
  int64_t KeptBytes() const {
    return static_cast<int64_t>(text_.capacity()) + writer_->memory_bytes();
  }

  // For an encoding of so many scales.
  absl::Status Charge(int64_t scale_count) {
    return env().budget->Grow(&lease_, KeptBytes() + MemoryOf(scale_count),
                              kWayOutWithFewerCalls);
  }

  absl::Status EndPass() {
    if (pass_ + 1 == writer_->pass_count()) {
      is_finished_ = true;
      // The end is as long as what the writer kept for it.
      absl::Status status =
          env().budget->Grow(&lease_, KeptBytes() + writer_->memory_bytes(),
                             kWayOutWithFewerCalls);
      return status.ok() ? writer_->Finish(stop(), &text_) : status;
    }
    writer_->Begin(++pass_, &text_);
    // From the first page again.
    last_tensor_.clear();
    return ListPage();
  }

  std::string revision_;
  PatternList patterns_;
  PatternList parameter_patterns_;
  std::unique_ptr<EncodingsWriter> writer_;
  int pass_ = 0;
  bool is_finished_ = false;
  // The page under way, and the entry that comes next.
  std::vector<EncodingListEntry> page_;
  size_t next_ = 0;
  bool is_last_page_ = false;
  std::string last_tensor_;
  // Written, and sent up to text_begin_.
  std::string text_;
  size_t text_begin_ = 0;
  std::vector<InterchangeLoss> losses_;
  // Lease of text_, the writer and the encoding under way.
  MemoryBudget::Lease lease_;
  MemoryBudget::Lease page_lease_;
};

}  // namespace

EncodingCall* StartExportEncodings(const CallArguments& arguments) {
  return EncodingCall::Start<ExportEncodingsCall>(arguments);
}

}  // namespace quantd::server
