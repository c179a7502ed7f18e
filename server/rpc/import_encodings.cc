// ImportEncodings: a file of an interchange format, in pieces > store.

#include <algorithm>
#include <atomic>
#include <chrono>
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
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/types/block_layout.h"
#include "server/guard/memory_budget.h"
#include "server/interchange/interchange.h"
#include "server/rpc/caller.h"
#include "server/rpc/interchange_rpcs.h"
#include "server/rpc/statistics_rpcs.h"
#include "server/wire/glob.h"
#include "server/wire/names.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

constexpr int64_t kMostFileBytes = int64_t{256} << 20;
constexpr size_t kMostHints = 100'000;
constexpr size_t kMostLossBytes = size_t{1} << 20;
// What a string takes while it grows.
constexpr int64_t kMemoryPerFileByte = 2;
// What hints take beside their names and numbers.
constexpr int64_t kMemoryPerHintByte = 4;
constexpr int64_t kMemoryPerHint = 512;
// Encodings that are stored before other calls get their turn.
constexpr size_t kPutsPerStep = 64;
constexpr char kWayOut[] =
    "send the file in parts of fewer tensors, or try again when fewer calls "
    "are under way";

// Hints by tensor. Not thread-safe.
class HintTable {
 public:
  size_t size() const { return hints_.size(); }

  // Errors: PATTERN_INVALID, SHAPE_INVALID.
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
      if (globs_.size() == kMaxPatterns) {
        return core::WithField(
            core::PatternInvalidError(absl::StrCat(
                "more than ", kMaxPatterns, " patterns that are not names")),
            "hints");
      }
      absl::StatusOr<Glob> glob = Glob::Create(proto.pattern());
      if (!glob.ok()) {
        return core::WithField(glob.status(), field + ".pattern");
      }
      globs_.emplace_back(hints_.size(), *std::move(glob));
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
    for (const auto& [index, glob] : globs_) {
      if (glob.Matches(tensor)) matches.push_back(index);
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
  std::vector<std::pair<size_t, Glob>> globs_;
};

// Takes the file in, then parses it on the workers, then completes and stores
// the encodings on the store's pool. One step at a time: reads, steps and the
// end follow one another; deletes itself at the end.
class ImportEncodingsCall final
    : public grpc::ServerReadReactor<v1::ImportEncodingsRequest>,
      private WatchedCall {
 public:
  ImportEncodingsCall(const RpcEnvironment& env, StreamRegistry* registry,
                      grpc::CallbackServerContext* context,
                      v1::ImportEncodingsResponse* response)
      : env_(env),
        registry_(registry),
        context_(context),
        response_(response),
        caller_(env.authenticator->Authenticate(
            *context, env.authenticator->CredentialOf(*context),
            Rpc::kImportEncodings)) {
    env_.metrics->RpcStarted(Rpc::kImportEncodings);
  }

  // To be called once, when the object is complete.
  void Begin() {
    registry_->Enter(this);
    if (!caller_.ok()) return End(caller_.status());
    Read();
  }

  void OnReadDone(bool ok) override {
    // Otherwise the call has ended while it waited.
    if (read_start_ns_.exchange(0) == 0) return;
    // A file that broke off is not one that ended.
    if (!ok && context_->IsCancelled()) return End(absl::CancelledError());
    env_.pool->Schedule([this, ok] { ok ? Take() : Parse(); });
  }

  void OnCancel() override { cancelled_.store(true); }

  void OnDone() override {
    // After OnCancel, if that was called, is done with the call.
    cancelled_.exchange(true);
    registry_->Leave(this);
    int code = static_cast<int>(end_.code());
    if (context_->IsCancelled()) {
      const bool late =
          context_->deadline() <= std::chrono::system_clock::now();
      code = late ? grpc::StatusCode::DEADLINE_EXCEEDED
                  : grpc::StatusCode::CANCELLED;
    }
    env_.metrics->RpcHandled(Rpc::kImportEncodings, code,
                             absl::Now() - start_time_);
    delete this;
  }

 private:
  ~ImportEncodingsCall() override = default;

  void Read() {
    request_.Clear();
    read_start_ns_.store(absl::GetCurrentTimeNanos());
    StartRead(&request_);
  }

  // Whether the call is of no more use; then it has been ended.
  bool Stopped() {
    if (cancelled_.load()) {
      End(absl::CancelledError());
    } else if (registry_->draining()) {
      End(core::DrainingError());
    } else {
      return false;
    }
    return true;
  }

  void Take() {
    if (Stopped()) return;
    absl::Status status = is_open_ ? absl::OkStatus() : Open();
    if (status.ok()) status = Append();
    if (!status.ok()) return End(std::move(status));
    Read();
  }

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
    absl::Status status = env_.authenticator->CheckWrite(*caller_, model_);
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
    absl::Status status = env_.budget->Grow(
        &text_lease_, kMemoryPerFileByte * size_bytes + hint_bytes_, kWayOut);
    if (!status.ok()) return status;
    for (const v1::TensorHint& hint : request_.hints()) {
      if (status = hints_.Add(hint); !status.ok()) return status;
    }
    text_.append(request_.data());
    return absl::OkStatus();
  }

  void Parse() {
    if (Stopped()) return;
    if (!is_open_) {
      if (absl::Status s = Open(); !s.ok()) return End(std::move(s));
    }
    const absl::StatusOr<int64_t> bytes = ParseMemoryBytes(text_);
    if (!bytes.ok()) return End(bytes.status());
    absl::Status status = env_.budget->Grow(&tree_lease_, *bytes, kWayOut);
    if (!status.ok()) return End(std::move(status));
    absl::StatusOr<ParsedEncodings> parsed = ParseEncodings(text_, format_);
    if (!parsed.ok()) return End(parsed.status());
    parsed_ = *std::move(parsed);
    text_ = std::string();
    for (const PendingEncoding& pending : parsed_.encodings) {
      const auto scale_count = static_cast<int64_t>(std::max(
          pending.encoding.scale.size(), pending.encoding.scale_code.size()));
      if (scale_count > env_.limits.scale_count) {
        return End(
            core::ScaleCountLimitError(env_.limits.scale_count, scale_count));
      }
      if (status = CheckTensorName(pending.tensor); !status.ok()) {
        return End(core::InterchangeInvalidError(
            absl::StrCat(pending.place, ": ", core::ErrorText(status))));
      }
    }
    env_.store_pool->Schedule([this] { Resolve(); });
  }

  // Completes all encodings, so that a file that is not sound stores nothing.
  void Resolve() {
    if (Stopped()) return;
    for (PendingEncoding& pending : parsed_.encodings) {
      if (absl::Status s = ResolveOne(&pending); !s.ok()) {
        return End(std::move(s));
      }
    }
    response_->set_format(static_cast<v1::InterchangeFormat>(parsed_.format));
    response_->set_loss_count(parsed_.losses.size());
    size_t loss_bytes = 0;
    for (const InterchangeLoss& loss : parsed_.losses) {
      loss_bytes += loss.tensor.size() + loss.what.size() + 16;
      if (loss_bytes > kMostLossBytes) break;
      v1::InterchangeLoss* const proto = response_->add_losses();
      // Names that the file has may not be text.
      const bool is_text = CheckTensorName(loss.tensor).ok();
      if (is_text) proto->set_tensor(loss.tensor);
      proto->set_what(loss.what);
      proto->set_left_out(loss.left_out);
    }
    if (is_dry_run_) {
      response_->set_encoding_count(parsed_.encodings.size());
      return End(absl::OkStatus());
    }
    Put();
  }

  absl::Status ResolveOne(PendingEncoding* pending) {
    LayoutHint hint = hints_.Find(pending->tensor);
    if (pending->open != PendingEncoding::Open::kNothing && !hint.shape_known &&
        hint.block_size.empty()) {
      const absl::StatusOr<StoredEncoding> stored =
          caller_->encodings->Get({model_, revision_, pending->tensor});
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
    if (Stopped()) return;
    const size_t end =
        std::min(parsed_.encodings.size(), next_put_ + kPutsPerStep);
    for (; next_put_ < end; ++next_put_) {
      PendingEncoding& pending = parsed_.encodings[next_put_];
      const absl::StatusOr<StoredEncoding> stored = caller_->encodings->Put(
          {model_, revision_, pending.tensor},
          std::make_shared<const core::Encoding>(std::move(pending.encoding)),
          Precondition());
      if (!stored.ok()) return End(stored.status());
    }
    if (next_put_ < parsed_.encodings.size()) {
      return env_.store_pool->Schedule([this] { Put(); });
    }
    response_->set_encoding_count(next_put_);
    End(absl::OkStatus());
  }

  void End(absl::Status status) {
    env_.metrics->LimitRejected(core::ErrorReason(status));
    end_ = std::move(status);
    Finish(ToGrpcStatus(end_));
  }

  // A client that sends nothing.
  void EndIfIdle(absl::Duration idle_timeout) override {
    int64_t start_ns = read_start_ns_.load();
    if (start_ns != 0 &&
        absl::Nanoseconds(absl::GetCurrentTimeNanos() - start_ns) >=
            idle_timeout &&
        read_start_ns_.compare_exchange_strong(start_ns, 0)) {
      End(core::StreamIdleError(idle_timeout));
    }
  }

  const RpcEnvironment& env_;
  StreamRegistry* const registry_;
  grpc::CallbackServerContext* const context_;
  v1::ImportEncodingsResponse* const response_;
  const absl::StatusOr<Caller> caller_;
  const absl::Time start_time_ = absl::Now();
  std::atomic<bool> cancelled_{false};
  // When the read that is under way began; 0 when none is. Whoever sets it to 0
  // goes on with the call.
  std::atomic<int64_t> read_start_ns_{0};
  // Used by the steps, one at a time.
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
  size_t next_put_ = 0;
  absl::Status end_;
};

}  // namespace

grpc::ServerReadReactor<v1::ImportEncodingsRequest>* StartImportEncodings(
    const RpcEnvironment& env, StreamRegistry* registry,
    grpc::CallbackServerContext* context,
    v1::ImportEncodingsResponse* response) {
  auto* call = new ImportEncodingsCall(env, registry, context, response);
  call->Begin();
  return call;
}

}  // namespace quantd::server
