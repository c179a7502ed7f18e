// ImportEncodings: a file of an interchange format, in pieces > store.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/parallel/time_slice.h"
#include "core/types/block_layout.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/interchange/interchange.h"
#include "server/rpc/caller.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/interchange_rpcs.h"
#include "server/rpc/patterns.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr int64_t kMostFileBytes = int64_t{256} << 20;
// Of the file that is there, on gRPC's threads.
constexpr size_t kMostCopiedBytes = size_t{1} << 20;
constexpr size_t kMostHints = 100'000;
constexpr size_t kMostLossBytes = size_t{1} << 20;
// What a string takes while it grows.
constexpr int64_t kMemoryPerFileByte = 2;
// What hints take beside their names and numbers.
constexpr int64_t kMemoryPerHintByte = 4;
constexpr int64_t kMemoryPerHint = 512;
constexpr char kWayOut[] =
    "send the file in parts of fewer tensors, or try again when fewer calls "
    "are under way";

// Hints by tensor. Not thread-safe.
class HintTable {
 public:
  // `budget` must outlive the table.
  explicit HintTable(MemoryBudget* budget) : patterns_(budget) {}

  // Errors: PATTERN_INVALID, SHAPE_INVALID, MEMORY_BUDGET.
  absl::Status Add(const v1::TensorHint& proto) {
    const std::string field = absl::StrCat("hints[", hints_.size(), "]");
    if (hints_.size() == kMostHints) {
      return core::WithField(core::PatternInvalidError(absl::StrCat(
                                 "more than ", kMostHints, " hints")),
                             "hints");
    }
    if (proto.shape_size() > core::kMaxRank ||
        proto.block_size_size() > core::kMaxRank) {
      return core::WithField(core::ShapeInvalidError(absl::StrCat(
                                 "more than ", core::kMaxRank, " dimensions")),
                             field + ".shape");
    }
    // A name is looked up; most hints are of one tensor.
    if (proto.pattern().find_first_of("*?") == std::string::npos) {
      if (proto.pattern().empty()) {
        return core::WithField(core::PatternInvalidError("an empty pattern"),
                               field + ".pattern");
      }
      by_name_[proto.pattern()].push_back(hints_.size());
    } else {
      if (absl::Status s = patterns_.Add(proto.pattern()); !s.ok()) {
        return core::WithField(s, field + ".pattern");
      }
      pattern_hints_.push_back(hints_.size());
    }
    LayoutHint hint;
    hint.shape.assign(proto.shape().begin(), proto.shape().end());
    hint.shape_known = !hint.shape.empty();
    hint.block_size.assign(proto.block_size().begin(),
                           proto.block_size().end());
    if (proto.has_axis()) hint.axis = proto.axis();
    if (hint.shape_known) {
      const absl::StatusOr<int64_t> count = core::ElementCount(hint.shape);
      if (!count.ok()) {
        return core::WithField(count.status(), field + ".shape");
      }
    }
    hints_.push_back(std::move(hint));
    return absl::OkStatus();
  }

  // All that is known of a tensor.
  LayoutHint Find(const std::string& tensor) const {
    std::vector<size_t> matches;
    const auto named = by_name_.find(tensor);
    if (named != by_name_.end()) matches = named->second;
    for (size_t i = 0; i < pattern_hints_.size(); ++i) {
      if (patterns_.globs()[i].Matches(tensor)) {
        matches.push_back(pattern_hints_[i]);
      }
    }
    std::sort(matches.begin(), matches.end());
    LayoutHint merged;
    for (const size_t index : matches) {
      const LayoutHint& hint = hints_[index];
      if (!merged.shape_known && hint.shape_known) {
        merged.shape_known = true;
        merged.shape = hint.shape;
      }
      if (merged.block_size.empty()) merged.block_size = hint.block_size;
      if (!merged.axis.has_value()) merged.axis = hint.axis;
    }
    return merged;
  }

 private:
  std::vector<LayoutHint> hints_;
  absl::flat_hash_map<std::string, std::vector<size_t>> by_name_;
  // Those that are not names, and the hints they are of.
  PatternList patterns_;
  std::vector<size_t> pattern_hints_;
};

// Takes the file in, then parses it on the workers, then completes and stores
// the encodings on the store's pool.
class ImportEncodingsCall final : public EncodingCall {
 public:
  explicit ImportEncodingsCall(const CallArguments& arguments)
      : EncodingCall(arguments, Rpc::kImportEncodings, &request_),
        hints_(env().budget) {}

 private:
  void Took(bool more) override {
    if (!more) return env().pool->Schedule([this] { Parse(); });
    // A text that outgrows its room is copied, which is work for a worker.
    const size_t size = text_.size() + request_.data().size();
    if (text_.size() > kMostCopiedBytes && size > text_.capacity()) {
      return env().pool->Schedule([this] { Take(); });
    }
    Take();
  }

  void Take() {
    absl::Status status = is_open_ ? absl::OkStatus() : Open();
    if (status.ok()) status = Append();
    status.ok() ? Read() : End(std::move(status));
  }

  // The answer is the end.
  void Sent() override {}

  // Of the first message.
  absl::Status Open() {
    is_open_ = true;
    model_ = request_.model();
    revision_ = request_.revision().empty() ? std::string(kDefaultRevision)
                                            : request_.revision();
    if (absl::Status s = CheckPathName("model", model_); !s.ok()) {
      return core::WithField(s, "model");
    }
    if (absl::Status s = CheckPathName("revision", revision_); !s.ok()) {
      return core::WithField(s, "revision");
    }
    if (!v1::InterchangeFormat_IsValid(request_.format())) {
      return core::WithField(
          core::EnumUnknownError("InterchangeFormat", request_.format()),
          "format");
    }
    format_ = static_cast<InterchangeFormat>(request_.format());
    is_dry_run_ = request_.dry_run();
    absl::Status status = env().authenticator->CheckWrite(caller(), model_);
    return core::WithField(std::move(status), "model");
  }

  absl::Status Append() {
    const auto size_bytes =
        static_cast<int64_t>(text_.size() + request_.data().size());
    if (size_bytes > kMostFileBytes) {
      return core::InterchangeTooLargeError(kMostFileBytes);
    }
    hint_bytes_ +=
        kMemoryPerHint * request_.hints_size() +
        kMemoryPerHintByte * static_cast<int64_t>(request_.ByteSizeLong() -
                                                  request_.data().size());
    absl::Status status = env().budget->Grow(
        &text_lease_, kMemoryPerFileByte * size_bytes + hint_bytes_, kWayOut);
    if (!status.ok()) return status;
    for (const v1::TensorHint& hint : request_.hints()) {
      if (status = hints_.Add(hint); !status.ok()) return status;
    }
    text_.append(request_.data());
    return absl::OkStatus();
  }

  void Parse() {
    if (!IsWanted()) return;
    if (!is_open_) {
      if (absl::Status s = Open(); !s.ok()) return End(std::move(s));
    }
    absl::Status status =
        ChargeParseMemory(text_, [this](int64_t bytes) -> absl::Status {
          if (stopped()) return absl::CancelledError();
          return env().budget->Grow(&tree_lease_, bytes, kWayOut);
        });
    if (!IsWanted()) return;
    if (!status.ok()) return End(std::move(status));
    absl::StatusOr<ParsedEncodings> parsed = ParseEncodings(text_, format_);
    if (!parsed.ok()) return End(parsed.status());
    parsed_ = *std::move(parsed);
    std::string().swap(text_);
    for (const PendingEncoding& pending : parsed_.encodings) {
      const auto scale_count = static_cast<int64_t>(std::max(
          pending.encoding.scale.size(), pending.encoding.scale_code.size()));
      if (scale_count > env().limits.scale_count) {
        return End(
            core::ScaleCountLimitError(env().limits.scale_count, scale_count));
      }
      if (status = CheckTensorName(pending.tensor); !status.ok()) {
        return End(core::InterchangeInvalidError(
            absl::StrCat(pending.place, ": ", core::ErrorText(status))));
      }
    }
    env().store_pool->Schedule([this] { Resolve(); });
  }

  // Completes all encodings, so that a file that is not sound stores nothing.
  void Resolve() {
    if (!MayGoOn()) return;
    const core::TimeSlice slice(kNamesSlice);
    while (next_ < parsed_.encodings.size() && !slice.over()) {
      absl::Status status = ResolveOne(&parsed_.encodings[next_++]);
      if (!status.ok()) return End(std::move(status));
    }
    if (next_ < parsed_.encodings.size()) {
      return env().store_pool->Schedule([this] { Resolve(); });
    }
    Answer();
    if (is_dry_run_) return EndWith(response_);
    next_ = 0;
    Put();
  }

  // What is known before anything is stored.
  void Answer() {
    response_.set_encoding_count(parsed_.encodings.size());
    response_.set_format(static_cast<v1::InterchangeFormat>(parsed_.format));
    response_.set_loss_count(parsed_.losses.size());
    size_t loss_bytes = 0;
    for (const InterchangeLoss& loss : parsed_.losses) {
      loss_bytes += loss.tensor.size() + loss.what.size() + 16;
      if (loss_bytes > kMostLossBytes) break;
      v1::InterchangeLoss* const proto = response_.add_losses();
      // Names that the file has may not be text.
      const bool is_text = CheckTensorName(loss.tensor).ok();
      if (is_text) proto->set_tensor(loss.tensor);
      proto->set_what(loss.what);
      proto->set_left_out(loss.left_out);
    }
  }

  absl::Status ResolveOne(PendingEncoding* pending) {
    LayoutHint hint = hints_.Find(pending->tensor);
    if (pending->open != PendingEncoding::Open::kNothing && !hint.shape_known &&
        hint.block_size.empty()) {
      const absl::StatusOr<StoredEncoding> stored =
          caller().encodings->Get({model_, revision_, pending->tensor});
      if (stored.ok() && stored->encoding->scale.size() ==
                             std::max(pending->encoding.scale.size(),
                                      pending->encoding.scale_code.size())) {
        LayoutHint from_store = hint;
        from_store.block_size = stored->encoding->block_size;
        absl::Status status = ResolveLayout(from_store, pending);
        // One of another layout decides nothing.
        if (status.ok()) return status;
      } else if (!stored.ok() &&
                 core::ErrorReason(stored.status()) != "ENCODING_NOT_FOUND") {
        return stored.status();
      }
    }
    return ResolveLayout(hint, pending);
  }

  void Put() {
    if (!MayGoOn()) return;
    const core::TimeSlice slice(kNamesSlice);
    while (next_ < parsed_.encodings.size() && !slice.over()) {
      PendingEncoding& pending = parsed_.encodings[next_++];
      const absl::StatusOr<StoredEncoding> stored = caller().encodings->Put(
          {model_, revision_, pending.tensor},
          std::make_shared<const core::Encoding>(std::move(pending.encoding)),
          Precondition());
      if (!stored.ok()) return End(stored.status());
    }
    if (next_ < parsed_.encodings.size()) {
      return env().store_pool->Schedule([this] { Put(); });
    }
    EndWith(response_);
  }

  v1::ImportEncodingsRequest request_;
  bool is_open_ = false;
  std::string model_;
  std::string revision_;
  InterchangeFormat format_ = InterchangeFormat::kUnspecified;
  bool is_dry_run_ = false;
  HintTable hints_;
  int64_t hint_bytes_ = 0;
  std::string text_;
  MemoryBudget::Lease text_lease_;
  MemoryBudget::Lease tree_lease_;
  ParsedEncodings parsed_;
  // The encoding that is completed, then stored, next.
  size_t next_ = 0;
  v1::ImportEncodingsResponse response_;
};

}  // namespace

EncodingCall* StartImportEncodings(const CallArguments& arguments) {
  return EncodingCall::Start<ImportEncodingsCall>(arguments);
}

}  // namespace quantd::server
