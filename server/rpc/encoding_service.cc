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
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "server/rpc/interchange_rpcs.h"
#include "server/rpc/statistics_rpcs.h"
#include "server/rpc/tensor_input.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/names.h"
#include "server/wire/statistics_proto.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

constexpr int kDefaultPageSize = 100;
constexpr int kMaxPageSize = 1000;
// What clients of gRPC take by default.
constexpr int64_t kClientMessageBytes = int64_t{4} << 20;

// A page of a list: entries after the name `after`.
struct Page {
  int size = 0;
  std::string after;
};

// The token of the page after `name`; opaque to clients.
std::string PageToken(absl::string_view name) {
  return absl::WebSafeBase64Escape(name);
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
  if (!absl::WebSafeBase64Unescape(page_token, &page.after)) {
    return core::WithField(
        core::PageInvalidError("page_token is not one that a page answered"),
        "page_token");
  }
  return page;
}

// Lists one entry more than the page has, to know whether there is a next one.
// `list(after, limit)` lists; `name(entry)` names; `add(entry)` answers.
template <typename List, typename Name, typename Add>
absl::Status FillPage(int page_size, absl::string_view page_token, List list,
                      Name name, Add add, std::string* next_page_token) {
  absl::StatusOr<Page> page = CheckPage(page_size, page_token);
  if (!page.ok()) return page.status();
  auto entries = list(page->after, page->size + 1);
  if (!entries.ok()) return entries.status();
  const auto shown =
      std::min<size_t>(entries->size(), static_cast<size_t>(page->size));
  for (size_t i = 0; i < shown; ++i) add((*entries)[i]);
  if (shown < entries->size()) {
    *next_page_token = PageToken(name((*entries)[shown - 1]));
  }
  return absl::OkStatus();
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

}  // namespace

EncodingService::EncodingService(const RpcEnvironment& env,
                                 StreamRegistry* registry)
    : env_(env), registry_(registry) {}

grpc::ServerUnaryReactor* EncodingService::Run(
    Rpc rpc, grpc::CallbackServerContext* context,
    std::function<absl::Status(const Caller&)> body) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  env_.metrics->RpcStarted(rpc);
  const absl::Time start = absl::Now();
  absl::StatusOr<Caller> caller = env_.authenticator->Authenticate(
      *context, env_.authenticator->CredentialOf(*context), rpc);
  if (!caller.ok()) {
    env_.metrics->RpcHandled(rpc, caller.status().raw_code(),
                             absl::Now() - start);
    reactor->Finish(ToGrpcStatus(caller.status()));
    return reactor;
  }
  env_.store_pool->Schedule([this, rpc, context, reactor, start,
                             caller = *std::move(caller),
                             body = std::move(body)] {
    const absl::Status status = context->IsCancelled()  ? absl::CancelledError()
                                : registry_->draining() ? core::DrainingError()
                                                        : body(caller);
    env_.metrics->LimitRejected(core::ErrorReason(status));
    env_.metrics->RpcHandled(rpc, static_cast<int>(status.code()),
                             absl::Now() - start);
    reactor->Finish(ToGrpcStatus(status));
  });
  return reactor;
}

grpc::ServerUnaryReactor* EncodingService::ListEncodings(
    grpc::CallbackServerContext* context,
    const v1::ListEncodingsRequest* request,
    v1::ListEncodingsResponse* response) {
  return Run(
      Rpc::kListEncodings, context, [request, response](const Caller& caller) {
        const std::string& model = request->model();
        const absl::StatusOr<std::string> revision = CheckRevision(*request);
        if (!revision.ok()) return revision.status();
        return FillPage(
            request->page_size(), request->page_token(),
            [&](absl::string_view after, int limit) {
              return caller.encodings->ListEncodings(model, *revision, after,
                                                     limit);
            },
            [](const EncodingListEntry& entry) { return entry.tensor; },
            [&](const EncodingListEntry& entry) {
              v1::StoredEncoding* proto = response->add_encodings();
              StoredEncodingToProto({model, *revision, entry.tensor},
                                    entry.stored,
                                    /*with_encoding=*/false, proto);
              proto->set_format(static_cast<v1::NumberFormat>(entry.format));
              proto->set_scale_count(entry.scale_count);
            },
            response->mutable_next_page_token());
      });
}

grpc::ServerUnaryReactor* EncodingService::GetEncoding(
    grpc::CallbackServerContext* context, const v1::GetEncodingRequest* request,
    v1::GetEncodingResponse* response) {
  return Run(
      Rpc::kGetEncoding, context, [request, response](const Caller& caller) {
        absl::StatusOr<EncodingKey> key = KeyFromProto(request->name());
        if (!key.ok()) return core::WithField(key.status(), "name");
        absl::StatusOr<StoredEncoding> stored = caller.encodings->Get(*key);
        if (!stored.ok()) return stored.status();
        StoredEncodingToProto(*key, *stored, /*with_encoding=*/true,
                              response->mutable_stored_encoding());
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* EncodingService::PutEncoding(
    grpc::CallbackServerContext* context, const v1::PutEncodingRequest* request,
    v1::PutEncodingResponse* response) {
  return Run(
      Rpc::kPutEncoding, context,
      [this, request, response](const Caller& caller) {
        absl::StatusOr<EncodingKey> key = KeyFromProto(request->name());
        if (!key.ok()) return core::WithField(key.status(), "name");
        absl::Status status =
            env_.authenticator->CheckWrite(caller, key->model);
        if (!status.ok()) return core::WithField(status, "name");
        if (!request->has_encoding()) {
          return core::WithField(core::EncodingMissingError(), "encoding");
        }
        if (request->encoding().scale_size() > env_.limits.scale_count) {
          return core::WithField(
              core::ScaleCountLimitError(env_.limits.scale_count,
                                         request->encoding().scale_size()),
              "encoding.scale");
        }
        absl::StatusOr<core::Encoding> encoding =
            EncodingFromProto(request->encoding());
        if (!encoding.ok()) {
          return core::WithField(encoding.status(), "encoding");
        }
        // Only quantd itself sets it.
        encoding->degenerate_count = 0;
        absl::StatusOr<StoredEncoding> stored = caller.encodings->Put(
            *key, std::make_shared<const core::Encoding>(*std::move(encoding)),
            Precondition{request->if_match()});
        if (!stored.ok()) return stored.status();
        StoredEncodingToProto(*key, *stored, /*with_encoding=*/false,
                              response->mutable_stored_encoding());
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* EncodingService::DeleteEncoding(
    grpc::CallbackServerContext* context,
    const v1::DeleteEncodingRequest* request,
    v1::DeleteEncodingResponse* response) {
  return Run(Rpc::kDeleteEncoding, context, [request](const Caller& caller) {
    absl::StatusOr<EncodingKey> key = KeyFromProto(request->name());
    if (!key.ok()) return core::WithField(key.status(), "name");
    return caller.encodings->Delete(*key, Precondition{request->if_match()});
  });
}

grpc::ServerUnaryReactor* EncodingService::ListModels(
    grpc::CallbackServerContext* context, const v1::ListModelsRequest* request,
    v1::ListModelsResponse* response) {
  return Run(Rpc::kListModels, context,
             [request, response](const Caller& caller) {
               return FillPage(
                   request->page_size(), request->page_token(),
                   [&](absl::string_view after, int limit) {
                     return caller.encodings->ListModels(after, limit);
                   },
                   [](const ModelListEntry& entry) { return entry.model; },
                   [&](const ModelListEntry& entry) {
                     v1::Model* proto = response->add_models();
                     proto->set_model(entry.model);
                     proto->set_revision_count(entry.revision_count);
                     proto->set_encoding_count(entry.encoding_count);
                   },
                   response->mutable_next_page_token());
             });
}

grpc::ServerUnaryReactor* EncodingService::ListRevisions(
    grpc::CallbackServerContext* context,
    const v1::ListRevisionsRequest* request,
    v1::ListRevisionsResponse* response) {
  return Run(
      Rpc::kListRevisions, context, [request, response](const Caller& caller) {
        if (absl::Status s = CheckModel(request->model()); !s.ok()) return s;
        return FillPage(
            request->page_size(), request->page_token(),
            [&](absl::string_view after, int limit) {
              return caller.encodings->ListRevisions(request->model(), after,
                                                     limit);
            },
            [](const RevisionListEntry& entry) { return entry.revision; },
            [&](const RevisionListEntry& entry) {
              v1::Revision* proto = response->add_revisions();
              proto->set_revision(entry.revision);
              proto->set_encoding_count(entry.encoding_count);
            },
            response->mutable_next_page_token());
      });
}

grpc::ServerWriteReactor<v1::ComputeEncodingsResponse>*
EncodingService::ComputeEncodings(grpc::CallbackServerContext* context,
                                  const v1::ComputeEncodingsRequest* request) {
  return StartComputeEncodings(env_, registry_, context, *request);
}

grpc::ServerWriteReactor<v1::SweepResponse>* EncodingService::Sweep(
    grpc::CallbackServerContext* context, const v1::SweepRequest* request) {
  return StartSweep(env_, registry_, context, *request);
}

grpc::ServerUnaryReactor* EncodingService::GetStatistics(
    grpc::CallbackServerContext* context,
    const v1::GetStatisticsRequest* request,
    v1::GetStatisticsResponse* response) {
  return Run(
      Rpc::kGetStatistics, context,
      [context, request, response](const Caller& caller) {
        absl::StatusOr<EncodingKey> key = KeyFromProto(request->name());
        if (!key.ok()) return core::WithField(key.status(), "name");
        absl::StatusOr<StoredStatistics> stored =
            caller.statistics->ReadStatistics(
                *key, [context] { return context->IsCancelled(); });
        if (!stored.ok()) return stored.status();
        StatisticsToProto(stored->state.statistics,
                          response->mutable_statistics());
        for (const SourceListEntry& source : stored->sources) {
          v1::StatisticsSource* proto = response->add_sources();
          proto->set_source(source.source);
          proto->set_sequence(source.sequence);
          *proto->mutable_update_time() = ToTimestamp(source.update_time);
        }
        if (!request->with_state()) return absl::OkStatus();
        StateToProto(stored->state, response->mutable_state());
        const auto size_bytes = static_cast<int64_t>(response->ByteSizeLong());
        if (size_bytes > kClientMessageBytes) {
          response->Clear();
          return core::WithField(core::StatisticsTooLargeError(
                                     kClientMessageBytes, size_bytes,
                                     "leave with_state out, or contribute with "
                                     "a coarser granularity "
                                     "or fewer mantissa bits"),
                                 "with_state");
        }
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* EncodingService::ListStatistics(
    grpc::CallbackServerContext* context,
    const v1::ListStatisticsRequest* request,
    v1::ListStatisticsResponse* response) {
  return Run(
      Rpc::kListStatistics, context, [request, response](const Caller& caller) {
        const std::string& model = request->model();
        const absl::StatusOr<std::string> revision = CheckRevision(*request);
        if (!revision.ok()) return revision.status();
        return FillPage(
            request->page_size(), request->page_token(),
            [&](absl::string_view after, int limit) {
              return caller.statistics->ListStatistics(model, *revision, after,
                                                       limit);
            },
            [](const StatisticsListEntry& entry) { return entry.tensor; },
            [&](const StatisticsListEntry& entry) {
              v1::StatisticsEntry* proto = response->add_entries();
              proto->set_tensor(entry.tensor);
              proto->set_source_count(entry.source_count);
              proto->set_size_bytes(entry.size_bytes);
              *proto->mutable_update_time() = ToTimestamp(entry.update_time);
            },
            response->mutable_next_page_token());
      });
}

grpc::ServerUnaryReactor* EncodingService::DeleteStatistics(
    grpc::CallbackServerContext* context,
    const v1::DeleteStatisticsRequest* request,
    v1::DeleteStatisticsResponse* response) {
  return Run(Rpc::kDeleteStatistics, context, [request](const Caller& caller) {
    absl::StatusOr<EncodingKey> key = KeyFromProto(request->name());
    if (!key.ok()) return core::WithField(key.status(), "name");
    if (!request->source().empty()) {
      absl::Status status = CheckPathName("source", request->source());
      if (!status.ok()) return core::WithField(status, "source");
    }
    return caller.statistics->DeleteStatistics(*key, request->source());
  });
}

grpc::ServerWriteReactor<v1::ExportEncodingsResponse>*
EncodingService::ExportEncodings(grpc::CallbackServerContext* context,
                                 const v1::ExportEncodingsRequest* request) {
  return StartExportEncodings(env_, registry_, context, *request);
}

grpc::ServerReadReactor<v1::ImportEncodingsRequest>*
EncodingService::ImportEncodings(grpc::CallbackServerContext* context,
                                 v1::ImportEncodingsResponse* response) {
  return StartImportEncodings(env_, registry_, context, response);
}

}  // namespace quantd::server
