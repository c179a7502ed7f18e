// ImportEncodings: a file of an interchange format, in pieces > store.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "core/parallel/stop_token.h"
#include "core/types/block_layout.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/interchange/interchange.h"
#include "server/rpc/caller.h"
#include "server/rpc/encoding_call.h"
#include "server/rpc/import_queue.h"
#include "server/rpc/interchange_rpcs.h"
#include "server/rpc/patterns.h"
#include "server/rpc/provenance.h"
#include "server/store/encoding_store.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr int64_t kMostFileBytes = int64_t{256} << 20;
constexpr size_t kMostHints = 100'000;
constexpr size_t kMostLossBytes = size_t{1} << 20;
// Smaller pieces of the file are put together.
constexpr size_t kSmallPieceBytes = size_t{64} << 10;
// Memory of a piece beside its bytes.
constexpr int64_t kMemoryPerPiece = 128;
// Memory of hints: per byte of their message, and per hint beside its names and
// numbers.
constexpr int64_t kMemoryPerHintByte = 4;
constexpr int64_t kMemoryPerHint = 512;
// When to come again where files of others take their share of the memory.
constexpr absl::Duration kImportRetryAfter = absl::Seconds(1);
constexpr char kWayOutOfImport[] =
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
  // Patterns that are not names, and the indices of their hints.
  PatternList patterns_;
  std::vector<size_t> pattern_hints_;
};

int64_t ScaleCountOf(const PendingEncoding& pending) {
  return static_cast<int64_t>(std::max(pending.encoding.scale.size(),
                                       pending.encoding.scale_code.size()));
}

// True for losses that have room in an answer: first those of tensors that are
// left out, which nobody may miss.
std::vector<bool> ToldLosses(const std::vector<InterchangeLoss>& losses) {
  std::vector<bool> is_told(losses.size());
  size_t bytes = 0;
  for (const bool left_out : {true, false}) {
    for (size_t i = 0; i < losses.size(); ++i) {
      if (losses[i].left_out != left_out) continue;
      bytes += losses[i].tensor.size() + losses[i].what.size() + 16;
      if (bytes > kMostLossBytes) return is_told;
      is_told[i] = true;
    }
  }
  return is_told;
}

// True if the layout of `stored` may be that of `pending`, of which `hint` does
// not know the shape.
bool MayBeLaidOutAs(const EncodingReader& stored,
                    const PendingEncoding& pending, const LayoutHint& hint) {
  return stored.scale_count() == ScaleCountOf(pending) &&
         (hint.block_size.empty() ||
          hint.block_size == stored.stored().encoding->block_size);
}

// Takes the file in and waits for its turn; then parses it, completes the
// encodings and stores them, on a thread for what takes long.
class ImportEncodingsCall final : public EncodingCall {
 public:
  explicit ImportEncodingsCall(const CallArguments& arguments)
      : EncodingCall(arguments, Rpc::kImportEncodings, &request_),
        hints_(env().budget) {}
  ~ImportEncodingsCall() override {
    env().imports->Leave(this, group());
    env().imports->ReturnText(this, &queued_bytes_);
  }

 private:
  void Took(bool more) override {
    if (!more) return Schedule(StepKind::kQuantum, [this] { TakeFile(); });
    absl::Status status = is_open_ ? absl::OkStatus() : Open();
    if (status.ok()) status = Append();
    if (!status.ok()) return End(std::move(status));
    wait_end_time_ = core::SteadyNow() + env().limits.idle_timeout;
    TakePiece();
  }

  // The answer is the end.
  void Sent() override {}

  // Opens the import by the first message.
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
    file_bytes_ += static_cast<int64_t>(request_.data().size());
    if (file_bytes_ > kMostFileBytes) {
      return core::InterchangeTooLargeError(kMostFileBytes);
    }
    hint_bytes_ +=
        kMemoryPerHint * request_.hints_size() +
        kMemoryPerHintByte * static_cast<int64_t>(request_.ByteSizeLong() -
                                                  request_.data().size());
    AddPiece(std::move(*request_.mutable_data()));
    return absl::OkStatus();
  }

  // Reads on once there is room for what came.
  void TakePiece() {
    if (!IsWanted()) return;
    const int64_t held_bytes = piece_bytes_ + hint_bytes_;
    absl::Status status = NoRoom();
    if (env().imports->GrowText(this, &queued_bytes_, held_bytes)) {
      status = env().budget->Grow(&text_lease_, held_bytes, kWayOutOfImport);
    }
    if (!status.ok()) return WaitOrEnd(std::move(status));
    for (const v1::TensorHint& hint : request_.hints()) {
      if (status = hints_.Add(hint); !status.ok()) {
        return End(std::move(status));
      }
    }
    Read();
  }

  absl::Status NoRoom() const {
    return core::MemoryBudgetError(env().budget->total_bytes(), kWayOutOfImport,
                                   kImportRetryAfter);
  }

  // Waits for memory, or ends the call. An error that has no retry time means
  // that something is wrong, or never fits.
  void WaitOrEnd(absl::Status status) {
    if (core::ErrorRetryAfter(status) == absl::ZeroDuration() ||
        core::SteadyNow() >= wait_end_time_) {
      return End(std::move(status));
    }
    is_waiting_.store(true);
  }

  void LookAfterMemory() override {
    if (!is_waiting_.exchange(false)) return;
    if (has_file_) return Schedule(StepKind::kLong, [this] { TakeTurn(); });
    Schedule(StepKind::kQuantum, [this] { TakePiece(); });
  }

  // Without copying what is large.
  void AddPiece(std::string piece) {
    if (piece.empty()) return;
    const bool is_small = piece.size() < kSmallPieceBytes;
    if (is_small && !pieces_.empty() &&
        pieces_.back().size() < kSmallPieceBytes) {
      piece_bytes_ -= static_cast<int64_t>(pieces_.back().capacity());
      pieces_.back() += piece;
    } else {
      // A string that was read may have twice the room that it needs.
      if (piece.capacity() > piece.size() + piece.size() / 4) {
        piece.shrink_to_fit();
      }
      pieces_.push_back(std::move(piece));
      piece_bytes_ += kMemoryPerPiece;
    }
    piece_bytes_ += static_cast<int64_t>(pieces_.back().capacity());
  }

  void TakeFile() {
    if (!IsWanted()) return;
    if (!is_open_) {
      if (absl::Status s = Open(); !s.ok()) return End(std::move(s));
    }
    views_.assign(pieces_.begin(), pieces_.end());
    has_file_ = true;
    wait_end_time_ = core::SteadyNow() + env().limits.idle_timeout;
    Schedule(StepKind::kLong, [this] { TakeTurn(); });
  }

  // Parses once there is room, and those of the caller that wait for that are
  // done. On a thread for what takes long.
  void TakeTurn() {
    absl::Status status = NoRoom();
    if (env().imports->MayTry(this, group())) status = Charge();
    const bool has_room = status.ok();
    if (has_room) {
      env().imports->Leave(this, group());
      status = Import();
    }
    Schedule(StepKind::kQuantum,
             [this, has_room, status] { EndTurn(has_room, status); });
  }

  void EndTurn(bool has_room, const absl::Status& status) {
    if (!IsWanted()) return;
    if (has_room) return status.ok() ? EndWith(response_) : End(status);
    tree_lease_.Release();
    env().imports->LineUp(this, group());
    WaitOrEnd(status);
  }

  // For parsing; from the second time on at least for what was missing before.
  absl::Status Charge() {
    if (absl::Status s = GrowTree(); !s.ok()) return s;
    return ChargeParseMemory(views_, [this](int64_t bytes) -> absl::Status {
      if (stopped()) return core::StoppedError();
      parse_bytes_ = std::max(parse_bytes_, bytes);
      return GrowTree();
    });
  }

  absl::Status GrowTree() {
    const int64_t total_bytes = env().budget->total_bytes();
    // Beside the file it never fits, whoever gives back what.
    if (text_lease_.bytes() + parse_bytes_ > total_bytes) {
      return core::MemoryBudgetError(total_bytes, kWayOutOfImport,
                                     absl::ZeroDuration());
    }
    return env().budget->Grow(&tree_lease_, parse_bytes_, kWayOutOfImport);
  }

  absl::Status Import() {
    absl::StatusOr<ParsedEncodings> parsed = Parse();
    if (!parsed.ok()) return parsed.status();
    // All are completed first, so that a file that is not sound stores nothing.
    if (absl::Status s = CompleteAll(&*parsed); !s.ok()) return s;
    Answer(*parsed);
    if (is_dry_run_) return absl::OkStatus();
    if (parsed->encodings.empty()) return absl::OkStatus();
    // All of them or none.
    const std::string draft = absl::StrCat(
        "import-",
        absl::Hex(absl::Uniform<uint64_t>(random_), absl::kZeroPad16));
    absl::Status status = PutAll(draft, &*parsed);
    if (status.ok()) {
      status = caller()
                   .encodings
                   ->PublishRevision(model_, draft, revision_,
                                     /*keep_others=*/true)
                   .status();
    }
    if (!status.ok()) {
      caller().encodings->DeleteRevision(model_, draft).status().IgnoreError();
    }
    return status;
  }

  absl::Status PutAll(const std::string& revision, ParsedEncodings* parsed) {
    const Precondition put = MadeOfFile(env(), response_.format());
    for (PendingEncoding& pending : parsed->encodings) {
      if (absl::Status s = CheckGoesOn(); !s.ok()) return s;
      const absl::StatusOr<StoredEncoding> stored = caller().encodings->Put(
          {model_, revision, pending.tensor},
          std::make_shared<const core::Encoding>(std::move(pending.encoding)),
          put);
      if (!stored.ok()) return stored.status();
    }
    return absl::OkStatus();
  }

  absl::StatusOr<ParsedEncodings> Parse() {
    absl::StatusOr<ParsedEncodings> parsed =
        ParseEncodings(views_, format_, stop());
    if (!parsed.ok()) return parsed;
    std::vector<absl::string_view>().swap(views_);
    std::vector<std::string>().swap(pieces_);
    env().imports->ReturnText(this, &queued_bytes_);
    text_lease_.Release();
    env().budget->Count(&text_lease_, hint_bytes_);
    return parsed;
  }

  // Leaves out what is not sound, where the format allows that.
  absl::Status CompleteAll(ParsedEncodings* parsed) {
    size_t kept = 0;
    for (PendingEncoding& pending : parsed->encodings) {
      if (absl::Status s = CheckGoesOn(); !s.ok()) return s;
      absl::Status status = Complete(&pending);
      if (status.ok()) {
        PendingEncoding& place = parsed->encodings[kept++];
        if (&place != &pending) place = std::move(pending);
        continue;
      }
      if (!parsed->leaves_out_unsound ||
          core::ErrorReason(status) != "INTERCHANGE_INVALID") {
        return status;
      }
      parsed->losses.push_back(
          {pending.tensor, std::string(core::ErrorText(status)), true});
    }
    parsed->encodings.resize(kept);
    return absl::OkStatus();
  }

  absl::Status Complete(PendingEncoding* pending) {
    if (absl::Status s = CheckTensorName(pending->tensor); !s.ok()) {
      return core::InterchangeInvalidError(
          absl::StrCat(pending->place, ": ", core::ErrorText(s)));
    }
    return Resolve(pending);
  }

  // Fills in the answer, which is known before anything is stored.
  void Answer(const ParsedEncodings& parsed) {
    response_.set_encoding_count(parsed.encodings.size());
    response_.set_format(static_cast<v1::InterchangeFormat>(parsed.format));
    response_.set_loss_count(parsed.losses.size());
    const std::vector<bool> is_told = ToldLosses(parsed.losses);
    for (size_t i = 0; i < parsed.losses.size(); ++i) {
      if (!is_told[i]) continue;
      const InterchangeLoss& loss = parsed.losses[i];
      v1::InterchangeLoss* const proto = response_.add_losses();
      // Names that the file has may not be text.
      const bool is_text = CheckTensorName(loss.tensor).ok();
      if (is_text) proto->set_tensor(loss.tensor);
      proto->set_what(loss.what);
      proto->set_left_out(loss.left_out);
    }
  }

  absl::Status Resolve(PendingEncoding* pending) {
    LayoutHint hint = hints_.Find(pending->tensor);
    if (pending->open != PendingEncoding::Open::kNothing && !hint.shape_known) {
      const absl::StatusOr<std::unique_ptr<EncodingReader>> stored =
          caller().encodings->OpenReader({model_, revision_, pending->tensor});
      if (stored.ok() && MayBeLaidOutAs(**stored, *pending, hint)) {
        LayoutHint from_store =
            HintOf(*(*stored)->stored().encoding, pending->open);
        from_store.axis = hint.axis;
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

  v1::ImportEncodingsRequest request_;
  bool is_open_ = false;
  std::string model_;
  std::string revision_;
  InterchangeFormat format_ = InterchangeFormat::kUnspecified;
  bool is_dry_run_ = false;
  HintTable hints_;
  absl::BitGen random_;
  int64_t hint_bytes_ = 0;
  // The file, what it takes, and what of that is known to the queue.
  std::vector<std::string> pieces_;
  std::vector<absl::string_view> views_;
  int64_t file_bytes_ = 0;
  int64_t piece_bytes_ = 0;
  int64_t queued_bytes_ = 0;
  bool has_file_ = false;
  // Least memory that parsing takes, as far as that is known.
  int64_t parse_bytes_ = 0;
  // For memory.
  absl::Duration wait_end_time_;
  // Whoever sets it to false goes on with the call.
  std::atomic<bool> is_waiting_{false};
  MemoryBudget::Lease text_lease_;
  MemoryBudget::Lease tree_lease_;
  v1::ImportEncodingsResponse response_;
};

}  // namespace

EncodingCall* StartImportEncodings(const CallArguments& arguments) {
  return EncodingCall::Start<ImportEncodingsCall>(arguments);
}

}  // namespace quantd::server
