#include "server/rpc/encoding_service.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/cpu.h"
#include "core/errors.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/statistics_state.h"
#include "core/statistics/tensor_statistics.h"
#include "grpcpp/impl/codegen/server_callback_handlers.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/audit_log.h"
#include "server/rpc/interchange_rpcs.h"
#include "server/rpc/page_bytes.h"
#include "server/rpc/provenance.h"
#include "server/rpc/scale_rpcs.h"
#include "server/rpc/statistics_rpcs.h"
#include "server/rpc/stored_encoding_proto.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/names.h"
#include "server/wire/statistics_proto.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

constexpr int kDefaultPageSize = 100;
constexpr int kMaxPageSize = 1000;
// Most bytes of a tensor's name.
constexpr size_t kMostNameBytes = 1024;
// Bytes of a message that clients of gRPC take by default.
constexpr int64_t kClientMessageBytes = int64_t{4} << 20;

// A page of a list: entries after the name `after`.
struct Page {
  int size = 0;
  std::string after;
};

// Before what was a name until it was damaged: no name begins with it.
constexpr absl::string_view kDamaged = "\xff:";

// The token of the page after `name`; opaque to clients.
std::string PageToken(absl::string_view name) {
  return absl::WebSafeBase64Escape(CheckTensorName(name).ok()
                                       ? std::string(name)
                                       : absl::StrCat(kDamaged, name));
}

// Sets the error of a damaged model or revision: `error`, unless its name is
// damaged. Such a name can't be asked for, nor can it be a proto's text.
template <typename Proto>
void SetListError(absl::string_view kind, absl::string_view name,
                  const absl::Status& error, Proto* proto) {
  if (!CheckPathName(kind, name).ok()) {
    *proto->mutable_error() = ToTensorError(core::StoreCorruptError(
        absl::StrCat("the name of the ", kind, " \"", ShownName(name),
                     "\" is damaged; run quantd --check-store")));
  } else if (!error.ok()) {
    *proto->mutable_error() = ToTensorError(error);
  }
}

// Errors: PAGE_INVALID.
absl::StatusOr<Page> CheckPage(int page_size, absl::string_view page_token) {
  if (page_size < 0 || page_size > kMaxPageSize) {
    return core::WithField(
        core::PageInvalidError(absl::StrCat("page_size is ", page_size,
                                            ", expected 0 to ", kMaxPageSize)),
        "page_size");
  }
  Page page;
  page.size = page_size == 0 ? kDefaultPageSize : page_size;
  // Pages end with names, or with what was one. Anything else is not for a
  // database to see.
  const bool is_text = absl::WebSafeBase64Unescape(page_token, &page.after);
  const bool is_damaged = absl::StartsWith(page.after, kDamaged) &&
                          page.after.size() <= kDamaged.size() + kMostNameBytes;
  if (is_damaged) page.after.erase(0, kDamaged.size());
  if (!is_text || (!is_damaged && !page.after.empty() &&
                   !CheckTensorName(page.after).ok())) {
    return core::WithField(
        core::PageInvalidError("page_token is not one that a page answered"),
        "page_token");
  }
  return page;
}

// Charges what an answer takes beside its text, unless that is little.
absl::Status Charge(const UnaryContext& context, int64_t bytes) {
  if (bytes <= kUnchargedBytes) return absl::OkStatus();
  return context.env.budget->Grow(context.lease, bytes,
                                  "try again when fewer calls are under way");
}

// Lists one entry more than the page has, to know whether there is a next one.
// `list(after, limit)` lists; `name(entry)` names; `add(entry)` answers.
template <typename Request, typename Response, typename List, typename Name,
          typename Add>
absl::Status FillPage(const UnaryContext& context, const Request& request,
                      List list, Name name, Add add, Response* response) {
  absl::StatusOr<Page> page =
      CheckPage(request.page_size(), request.page_token());
  if (!page.ok()) return page.status();
  auto entries = list(page->after, page->size + 1);
  if (absl::IsInvalidArgument(entries.status())) {
    return core::WithField(entries.status(), "page_token");
  }
  if (!entries.ok()) return entries.status();
  const auto shown =
      std::min<size_t>(entries->size(), static_cast<size_t>(page->size));
  // An entry takes about as much again in the answer.
  absl::Status status = Charge(context, 2 * PageBytes(*entries, name));
  if (!status.ok()) return status;
  for (size_t i = 0; i < shown; ++i) add((*entries)[i]);
  if (shown < entries->size()) {
    response->set_next_page_token(PageToken(name((*entries)[shown - 1])));
  }
  return Charge(context, PageBytes(*entries, name) +
                             static_cast<int64_t>(response->SpaceUsedLong()));
}

absl::Status CheckModel(const std::string& model) {
  return core::WithField(CheckPathName("model", model), "model");
}

// The revision, or the default, of a request that names a model and a revision.
template <typename Request>
absl::StatusOr<std::string> CheckRevision(const Request& request) {
  if (absl::Status s = CheckModel(request.model()); !s.ok()) return s;
  std::string revision = request.revision().empty()
                             ? std::string(kDefaultRevision)
                             : request.revision();
  absl::Status status = CheckPathName("revision", revision);
  if (!status.ok()) return core::WithField(std::move(status), "revision");
  return revision;
}

absl::Status ListEncodings(const UnaryContext& context,
                           const v1::ListEncodingsRequest& request,
                           v1::ListEncodingsResponse* response) {
  const absl::StatusOr<std::string> revision = CheckRevision(request);
  if (!revision.ok()) return revision.status();
  return FillPage(
      context, request,
      [&](absl::string_view after, int limit) {
        return context.caller.encodings->ListEncodings(request.model(),
                                                       *revision, after, limit);
      },
      [](const EncodingListEntry& entry) { return entry.tensor; },
      [&](const EncodingListEntry& entry) {
        v1::StoredEncoding* proto = response->add_encodings();
        if (!entry.error.ok()) {
          proto->mutable_name()->set_model(request.model());
          proto->mutable_name()->set_revision(*revision);
          proto->mutable_name()->set_tensor(ShownName(entry.tensor));
          *proto->mutable_error() = ToTensorError(entry.error);
          return;
        }
        StoredEncodingToProto({request.model(), *revision, entry.tensor},
                              entry.stored, /*with_encoding=*/false, proto);
        proto->set_format(static_cast<v1::NumberFormat>(entry.format));
        proto->set_scale_count(entry.scale_count);
      },
      response);
}

absl::Status GetEncoding(const UnaryContext& context,
                         const v1::GetEncodingRequest& request,
                         v1::GetEncodingResponse* response) {
  absl::StatusOr<EncodingKey> key = KeyFromProto(request.name());
  if (!key.ok()) return core::WithField(key.status(), "name");
  // Encodings that are cached are small.
  const absl::StatusOr<StoredEncoding> stored =
      context.caller.encodings->Read(*key, [&](int64_t bytes) {
        const int64_t limit = context.env.limits.chunk_bytes;
        return bytes > limit
                   ? core::WithField(core::AnswerScaleLimitError(limit, bytes),
                                     "name")
                   : Charge(context, 2 * bytes);
      });
  if (!stored.ok()) return stored.status();
  StoredEncodingToProto(*key, *stored, /*with_encoding=*/true,
                        response->mutable_stored_encoding());
  return absl::OkStatus();
}

absl::Status PutEncoding(const UnaryContext& context,
                         const v1::PutEncodingRequest& request,
                         v1::PutEncodingResponse* response) {
  absl::StatusOr<EncodingKey> key = KeyFromProto(request.name());
  if (!key.ok()) return core::WithField(key.status(), "name");
  absl::Status status =
      context.env.authenticator->CheckWrite(context.caller, key->model);
  if (!status.ok()) return core::WithField(status, "name");
  if (!request.has_encoding()) {
    return core::WithField(core::EncodingMissingError(), "encoding");
  }
  status = Charge(context, EncodingMemoryBytes(request.encoding()));
  if (!status.ok()) return status;
  absl::StatusOr<core::Encoding> encoding =
      EncodingFromProto(request.encoding());
  if (!encoding.ok()) return core::WithField(encoding.status(), "encoding");
  // Only quantd itself sets it.
  encoding->degenerate_count = 0;
  absl::StatusOr<StoredEncoding> stored = context.caller.encodings->Put(
      *key, std::make_shared<const core::Encoding>(*std::move(encoding)),
      MadeByClient(context.env, request.if_match()));
  if (!stored.ok()) return stored.status();
  StoredEncodingToProto(*key, *stored, /*with_encoding=*/false,
                        response->mutable_stored_encoding());
  return absl::OkStatus();
}

absl::Status DeleteEncoding(const UnaryContext& context,
                            const v1::DeleteEncodingRequest& request,
                            v1::DeleteEncodingResponse* /*response*/) {
  absl::StatusOr<EncodingKey> key = KeyFromProto(request.name());
  if (!key.ok()) return core::WithField(key.status(), "name");
  absl::Status status =
      context.caller.encodings->Delete(*key, Precondition{request.if_match()});
  if (status.ok()) LogChange(context.caller, "an encoding was deleted", *key);
  return status;
}

absl::Status ListModels(const UnaryContext& context,
                        const v1::ListModelsRequest& request,
                        v1::ListModelsResponse* response) {
  return FillPage(
      context, request,
      [&](absl::string_view after, int limit) {
        return context.caller.encodings->ListModels({after, ""}, limit);
      },
      [](const ModelListEntry& entry) { return entry.model; },
      [&](const ModelListEntry& entry) {
        v1::Model* proto = response->add_models();
        proto->set_model(ShownName(entry.model));
        SetListError("model", entry.model, entry.error, proto);
        proto->set_revision_count(entry.revision_count);
        proto->set_encoding_count(entry.encoding_count);
        proto->set_statistics_count(entry.statistics_count);
      },
      response);
}

absl::Status ListRevisions(const UnaryContext& context,
                           const v1::ListRevisionsRequest& request,
                           v1::ListRevisionsResponse* response) {
  if (absl::Status s = CheckModel(request.model()); !s.ok()) return s;
  return FillPage(
      context, request,
      [&](absl::string_view after, int limit) {
        return context.caller.encodings->ListRevisions(request.model(), after,
                                                       limit);
      },
      [](const RevisionListEntry& entry) { return entry.revision; },
      [&](const RevisionListEntry& entry) {
        v1::Revision* proto = response->add_revisions();
        proto->set_revision(ShownName(entry.revision));
        SetListError("revision", entry.revision, entry.error, proto);
        proto->set_encoding_count(entry.encoding_count);
        proto->set_statistics_count(entry.statistics_count);
      },
      response);
}

absl::Status PublishRevision(const UnaryContext& context,
                             const v1::PublishRevisionRequest& request,
                             v1::PublishRevisionResponse* response) {
  const absl::StatusOr<std::string> revision = CheckRevision(request);
  if (!revision.ok()) return revision.status();
  absl::Status status = CheckPathName("revision", request.source_revision());
  if (!status.ok()) return core::WithField(status, "source_revision");
  status =
      context.env.authenticator->CheckWrite(context.caller, request.model());
  if (!status.ok()) return core::WithField(status, "model");
  if (request.source_revision() == *revision) {
    return core::WithField(
        core::RevisionInvalidError(absl::StrCat(
            "revision \"", *revision,
            "\" is the source as well, expected another revision")),
        "source_revision");
  }
  if (!request.keep_others()) {
    const absl::StatusOr<std::vector<EncodingListEntry>> there =
        context.caller.encodings->ListEncodings(request.model(), *revision, "",
                                                1);
    if (!there.ok()) return there.status();
    if (!there->empty()) {
      status = context.env.authenticator->CheckDelete(context.caller,
                                                      request.model());
      if (!status.ok()) return core::WithField(status, "keep_others");
    }
  }
  const absl::StatusOr<PublishedRevision> published =
      context.caller.encodings->PublishRevision(
          request.model(), request.source_revision(), *revision,
          request.keep_others());
  if (!published.ok()) return published.status();
  LogChange(context.caller, "a revision was published",
            {request.model(), *revision, ""});
  response->set_encoding_count(
      static_cast<uint64_t>(published->encoding_count));
  response->set_replaced_count(
      static_cast<uint64_t>(published->replaced_count));
  return absl::OkStatus();
}

absl::Status DeleteRevision(const UnaryContext& context,
                            const v1::DeleteRevisionRequest& request,
                            v1::DeleteRevisionResponse* response) {
  if (absl::Status s = CheckModel(request.model()); !s.ok()) return s;
  // There is no default: what is deleted is named.
  absl::Status status = CheckPathName("revision", request.revision());
  if (!status.ok()) return core::WithField(status, "revision");
  const absl::StatusOr<DeletedRows> deleted =
      context.caller.encodings->DeleteRevision(request.model(),
                                               request.revision());
  if (!deleted.ok()) return deleted.status();
  LogChange(context.caller, "a revision was deleted",
            {request.model(), request.revision(), ""});
  response->set_encoding_count(static_cast<uint64_t>(deleted->encoding_count));
  response->set_statistics_count(
      static_cast<uint64_t>(deleted->statistics_count));
  return absl::OkStatus();
}

absl::Status DeleteModel(const UnaryContext& context,
                         const v1::DeleteModelRequest& request,
                         v1::DeleteModelResponse* response) {
  if (absl::Status s = CheckModel(request.model()); !s.ok()) return s;
  const absl::StatusOr<DeletedRows> deleted =
      context.caller.encodings->DeleteModel(request.model());
  if (!deleted.ok()) return deleted.status();
  LogChange(context.caller, "a model was deleted", {request.model(), "", ""});
  response->set_encoding_count(static_cast<uint64_t>(deleted->encoding_count));
  response->set_statistics_count(
      static_cast<uint64_t>(deleted->statistics_count));
  return absl::OkStatus();
}

void StoredGramToProto(const core::GramState::Parts& gram, int64_t size_bytes,
                       v1::StoredGram* proto) {
  const uint64_t features = gram.exponents.size();
  const auto part_size = static_cast<uint64_t>(gram.part_size);
  proto->set_feature_count(features);
  proto->set_part_size(part_size);
  proto->set_part_count((features + part_size - 1) / part_size);
  proto->set_rows(static_cast<uint64_t>(gram.rows));
  proto->set_left_out_rows(static_cast<uint64_t>(gram.left_out_rows));
  proto->set_clipped_count(static_cast<uint64_t>(gram.clipped));
  proto->set_size_bytes(static_cast<uint64_t>(size_bytes));
  proto->mutable_step_exponent()->Assign(gram.exponents.begin(),
                                         gram.exponents.end());
}

// Errors: STATISTICS_TOO_LARGE.
absl::Status AnswerMoments(const core::AxisMoments& moments,
                           v1::GetStatisticsResponse* response) {
  MomentsToProto(moments, response->mutable_moments());
  const auto size_bytes = static_cast<int64_t>(response->ByteSizeLong());
  if (size_bytes <= kClientMessageBytes) return absl::OkStatus();
  response->Clear();
  return core::WithField(
      core::StatisticsTooLargeError(kClientMessageBytes, size_bytes,
                                    "leave with_moments out"),
      "with_moments");
}

absl::Status GetStatistics(const UnaryContext& context,
                           const v1::GetStatisticsRequest& request,
                           v1::GetStatisticsResponse* response) {
  absl::StatusOr<EncodingKey> key = KeyFromProto(request.name());
  if (!key.ok()) return core::WithField(key.status(), "name");
  absl::StatusOr<StoredStatistics> stored =
      context.caller.statistics->ReadStatistics(
          *key, request.with_moments(),
          [&](int64_t memory_bytes) -> absl::Status {
            if (context.stop.stopped()) return core::StoppedError();
            return context.env.budget->Grow(
                context.lease, memory_bytes,
                "try again when fewer calls are under way");
          });
  if (!stored.ok()) return stored.status();
  StatisticsToProto(stored->state.statistics, response->mutable_statistics());
  response->set_state_digest_xxh3(StateDigest(stored->state));
  if (stored->gram.has_value()) {
    StoredGramToProto(*stored->gram, stored->gram_size_bytes,
                      response->mutable_gram());
  }
  for (const SourceListEntry& source : stored->sources) {
    v1::StatisticsSource* proto = response->add_sources();
    proto->set_source(source.source);
    proto->set_sequence(source.sequence);
    *proto->mutable_update_time() = ToTimestamp(source.update_time);
  }
  if (stored->moments.has_value()) {
    absl::Status status = AnswerMoments(*stored->moments, response);
    if (!status.ok()) return status;
  }
  if (request.per_tensor()) {
    absl::StatusOr<core::TensorStatistics> merged =
        core::StatisticsAt(stored->state, /*block_size=*/{}, context.stop);
    if (!merged.ok()) return merged.status();
    stored->state = {{}, std::move(stored->state.shape), *std::move(merged)};
  } else if (!request.with_state()) {
    return absl::OkStatus();
  }
  StateToProto(stored->state, response->mutable_state());
  const auto size_bytes = static_cast<int64_t>(response->ByteSizeLong());
  if (size_bytes > kClientMessageBytes) {
    response->Clear();
    return core::WithField(
        core::StatisticsTooLargeError(kClientMessageBytes, size_bytes,
                                      "leave with_state out, or contribute "
                                      "with a coarser granularity or fewer "
                                      "mantissa bits"),
        "with_state");
  }
  return absl::OkStatus();
}

absl::Status ListStatistics(const UnaryContext& context,
                            const v1::ListStatisticsRequest& request,
                            v1::ListStatisticsResponse* response) {
  const absl::StatusOr<std::string> revision = CheckRevision(request);
  if (!revision.ok()) return revision.status();
  return FillPage(
      context, request,
      [&](absl::string_view after, int limit) {
        return context.caller.statistics->ListStatistics(
            request.model(), *revision, after, limit);
      },
      [](const StatisticsListEntry& entry) { return entry.tensor; },
      [&](const StatisticsListEntry& entry) {
        v1::StatisticsEntry* proto = response->add_entries();
        proto->set_tensor(ShownName(entry.tensor));
        if (!entry.error.ok()) {
          *proto->mutable_error() = ToTensorError(entry.error);
        }
        proto->set_source_count(entry.source_count);
        proto->set_size_bytes(entry.size_bytes);
        proto->set_gram_size_bytes(entry.gram_size_bytes);
        *proto->mutable_update_time() = ToTimestamp(entry.update_time);
      },
      response);
}

absl::Status DeleteStatistics(const UnaryContext& context,
                              const v1::DeleteStatisticsRequest& request,
                              v1::DeleteStatisticsResponse* /*response*/) {
  absl::StatusOr<EncodingKey> key = KeyFromProto(request.name());
  if (!key.ok()) return core::WithField(key.status(), "name");
  if (!request.source().empty()) {
    absl::Status status = CheckPathName("source", request.source());
    if (!status.ok()) return core::WithField(status, "source");
  }
  absl::Status status =
      context.caller.statistics->DeleteStatistics(*key, request.source());
  if (status.ok()) LogChange(context.caller, "statistics were deleted", *key);
  return status;
}

absl::Status GetServerInfo(const UnaryContext& context,
                           const v1::GetServerInfoRequest& /*request*/,
                           v1::GetServerInfoResponse* response) {
  response->set_version(QUANTD_VERSION);
  response->set_cpu(core::CpuName());
  response->set_simd_target(core::SimdTarget());
  for (std::string& target : core::AvailableSimdTargets()) {
    response->add_available_simd_targets(std::move(target));
  }
  response->set_thread_count(context.env.pool->thread_count());
  return absl::OkStatus();
}

// The kind of step that the body of a unary call is.
StepKind KindOf(Rpc rpc) {
  if (ScopeOf(rpc) != Scope::kRead) return StepKind::kWrite;
  return rpc == Rpc::kGetStatistics || rpc == Rpc::kListStatistics
             ? StepKind::kStatistics
             : StepKind::kStore;
}

}  // namespace

EncodingService::EncodingService(const RpcEnvironment& env,
                                 CallRegistry* registry)
    : env_(env), registry_(registry) {
  AddUnary(Rpc::kListEncodings, &ListEncodings);
  AddUnary(Rpc::kGetEncoding, &GetEncoding);
  AddUnary(Rpc::kPutEncoding, &PutEncoding);
  Add(Rpc::kReadEncoding, &StartReadEncoding);
  Add(Rpc::kWriteEncoding, &StartWriteEncoding);
  AddUnary(Rpc::kDeleteEncoding, &DeleteEncoding);
  AddUnary(Rpc::kListModels, &ListModels);
  AddUnary(Rpc::kListRevisions, &ListRevisions);
  AddUnary(Rpc::kPublishRevision, &PublishRevision);
  AddUnary(Rpc::kDeleteRevision, &DeleteRevision);
  AddUnary(Rpc::kDeleteModel, &DeleteModel);
  Add(Rpc::kComputeEncodings, &StartComputeEncodings);
  Add(Rpc::kSweep, &StartSweep);
  Add(Rpc::kChooseMixture, &StartChooseMixture);
  AddUnary(Rpc::kGetStatistics, &GetStatistics);
  AddUnary(Rpc::kListStatistics, &ListStatistics);
  AddUnary(Rpc::kDeleteStatistics, &DeleteStatistics);
  Add(Rpc::kExportEncodings, &StartExportEncodings);
  Add(Rpc::kImportEncodings, &StartImportEncodings);
  AddUnary(Rpc::kGetServerInfo, &GetServerInfo);
}

void EncodingService::Add(
    Rpc rpc, std::function<EncodingCall*(const CallArguments&)> start) {
  using Handler =
      grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, grpc::ByteBuffer>;
  const auto index = static_cast<int>(paths_.size());
  const RpcName& name = RpcNameOf(rpc);
  paths_.push_back(absl::StrCat("/", name.service, "/", name.method));
  AddMethod(new grpc::internal::RpcServiceMethod(
      paths_.back().c_str(), grpc::internal::RpcMethod::BIDI_STREAMING,
      nullptr));
  MarkMethodRawCallback(index,
                        new Handler([this, start = std::move(start)](
                                        grpc::CallbackServerContext* context) {
                          return start({env_, registry_, context});
                        }));
}

template <typename Request, typename Response>
void EncodingService::AddUnary(Rpc rpc,
                               absl::Status (*body)(const UnaryContext& context,
                                                    const Request& request,
                                                    Response* response)) {
  const StepKind kind = KindOf(rpc);
  Add(rpc, [rpc, kind, body](const CallArguments& arguments) {
    return EncodingCall::Start<UnaryCall<Request, Response>>(arguments, rpc,
                                                             kind, body);
  });
}

}  // namespace quantd::server
