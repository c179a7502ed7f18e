#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/interchange.h"
#include "client/cli/message_json.h"
#include "client/cli/printable.h"
#include "client/cli/progress.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_notes.h"
#include "client/cli/tensor_options.h"
#include "client/cli/tie_options.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/cpp/text_file.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/jobs/file_ties.h"
#include "client/jobs/revision_name.h"
#include "client/jobs/selection.h"
#include "client/jobs/spec_options.h"
#include "client/models/spec_syntax.h"
#include "client/models/text.h"
#include "client/models/tie_groups.h"
#include "google/protobuf/util/json_util.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct EncodingsOptions {
  jobs::RevisionName name;
  std::string tensor;
  std::string file = "-";
  std::string if_match;
  jobs::SpecOptions spec;
  jobs::TieFlags ties;
  bool dry_run = false;
};

void PrintStored(const v1::StoredEncoding& stored, const char* verb,
                 Session* session) {
  if (session->json) {
    session->PrintMessage(stored);
  } else {
    session->Print(absl::StrCat(verb, " ", Printable(stored.name().tensor()),
                                ", etag ", Printable(stored.etag()),
                                ", generation ", stored.generation(), "\n"));
  }
}

// The granularity in the words of a spec.
std::string GranularityText(const Encoding& encoding) {
  const auto& block = encoding.block_size();
  const int rank = block.size();
  const auto whole = std::count(block.begin(), block.end(), 0);
  if (whole == rank) return "per-tensor";
  const auto ones = std::count(block.begin(), block.end(), 1);
  if (whole == rank - 1 && ones == 1) {
    const auto axis = std::find(block.begin(), block.end(), 1) - block.begin();
    return axis == 0 ? "per-channel" : absl::StrCat("per-channel:", axis);
  }
  if (ones == rank - 1 && block[rank - 1] > 1) {
    return absl::StrCat("group:", block[rank - 1]);
  }
  return absl::StrCat("block=", absl::StrJoin(block, ","));
}

// How an encoding was made, in few words; empty where nobody knows.
std::string ProvenanceText(const v1::EncodingProvenance& provenance) {
  const v1::EncodingSpec& spec = provenance.spec();
  const std::string method = absl::StrCat(
      MethodName(spec.method()), spec.has_importance() ? ", importance" : "");
  switch (provenance.origin()) {
    case v1::ENCODING_ORIGIN_ELEMENTS:
      return method;
    case v1::ENCODING_ORIGIN_STATISTICS:
      return absl::StrCat(method, ", statistics");
    case v1::ENCODING_ORIGIN_CLIENT:
      return "put by a client";
    case v1::ENCODING_ORIGIN_IMPORT: {
      v1::InterchangeFormat format = v1::INTERCHANGE_FORMAT_UNSPECIFIED;
      v1::InterchangeFormat_Parse(provenance.interchange_format(), &format);
      return absl::StrCat("imported from ", InterchangeFormatName(format));
    }
    default:
      return "";
  }
}

// The encodings themselves, which lists leave out, as long as they are not too
// large for a glance. Those that are gone by then stay without.
void ReadEncodings(Client* client, std::vector<v1::StoredEncoding>* list) {
  constexpr size_t kMostCalls = 1000;
  constexpr uint64_t kMostScales = uint64_t{1} << 20;
  uint64_t scale_count = 0;
  for (const v1::StoredEncoding& stored : *list) {
    scale_count += stored.scale_count();
  }
  if (list->size() > kMostCalls || scale_count > kMostScales) return;
  for (v1::StoredEncoding& stored : *list) {
    if (stored.has_error()) continue;
    absl::StatusOr<v1::StoredEncoding> read =
        client->GetEncoding(stored.name());
    // A connection that broke has shown that already.
    if (IsServerUnreachable(read.status())) return;
    if (read.ok() && read->etag() == stored.etag()) {
      stored.mutable_encoding()->Swap(read->mutable_encoding());
      if (read->has_provenance()) {
        stored.mutable_provenance()->Swap(read->mutable_provenance());
      }
    }
  }
}

void RunListEncodings(const EncodingsOptions& options, Session* session) {
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  absl::StatusOr<std::vector<v1::StoredEncoding>> encodings =
      client->ListEncodings(options.name.model, options.name.revision);
  if (!encodings.ok()) return session->Fail(encodings.status());
  std::sort(encodings->begin(), encodings->end(),
            [](const v1::StoredEncoding& a, const v1::StoredEncoding& b) {
              return NaturalLess(a.name().tensor(), b.name().tensor());
            });
  if (!session->json && !session->quiet) {
    ReadEncodings(client.get(), &*encodings);
  }
  Json list = Json::array();
  Table table;
  table.AddColumn("TENSOR", Table::Align::kLeft);
  table.AddColumn("FORMAT", Table::Align::kLeft);
  table.AddColumn("GRANULARITY", Table::Align::kLeft);
  table.AddColumn("SCALES", Table::Align::kRight);
  table.AddColumn("METHOD", Table::Align::kLeft);
  table.AddColumn("UPDATED UTC", Table::Align::kLeft);
  table.AddColumn("ETAG", Table::Align::kLeft);
  for (const v1::StoredEncoding& stored : *encodings) {
    list.push_back(MessageJson(stored));
    table.AddRow(
        {stored.name().tensor(),
         stored.has_error() ? "damaged" : FormatName(stored.format()),
         stored.has_encoding() ? GranularityText(stored.encoding()) : "",
         CountText(stored.scale_count()), ProvenanceText(stored.provenance()),
         TimeText(stored.update_time()), stored.etag()});
    if (stored.has_error()) session->TellDamage(stored.error());
  }
  if (session->json) {
    session->PrintJson({{"model", options.name.model},
                        {"revision", options.name.revision},
                        {"encodings", list}});
  } else {
    session->Print(table.empty() ? "no encodings\n"
                                 : table.Render(StdoutHasStyle()));
  }
}

void RunGetEncoding(const EncodingsOptions& options, Session* session) {
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  const absl::StatusOr<v1::StoredEncoding> stored =
      client->GetEncoding(options.name.NameOf(options.tensor));
  if (!stored.ok()) return session->Fail(stored.status());
  // JSON in either case: it is what `put` reads.
  session->PrintMessage(*stored);
}

// Reads an Encoding, or a StoredEncoding as `get` prints it.
absl::StatusOr<Encoding> ReadEncoding(const std::string& path) {
  const absl::StatusOr<std::string> text = internal::ReadDocument(path);
  if (!text.ok()) return text.status();
  Json document = files::ParseJson(*text);
  if (!document.is_object()) {
    return files::FileMalformedError(path, "expected a JSON object");
  }
  const auto inner = document.find("encoding");
  const std::string encoding_text =
      (inner == document.end() ? document : *inner)
          .dump(-1, ' ', false, Json::error_handler_t::replace);
  Encoding encoding;
  const auto status =
      google::protobuf::util::JsonStringToMessage(encoding_text, &encoding);
  if (!status.ok()) {
    return files::FileMalformedError(
        path,
        absl::StrCat("expected an encoding: ", std::string(status.message())));
  }
  return encoding;
}

void Put(const EncodingsOptions& options, Session* session) {
  const absl::StatusOr<Encoding> encoding = ReadEncoding(options.file);
  if (!encoding.ok()) return session->Fail(encoding.status());
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  const absl::StatusOr<v1::StoredEncoding> stored = client->PutEncoding(
      options.name.NameOf(options.tensor), *encoding, options.if_match);
  if (!stored.ok()) return session->Fail(stored.status());
  PrintStored(*stored, "put", session);
}

void RunDeleteEncoding(const EncodingsOptions& options, Session* session) {
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  const absl::Status status = client->DeleteEncoding(
      options.name.NameOf(options.tensor), options.if_match);
  if (!status.ok()) return session->Fail(status);
  if (session->json) {
    session->PrintJson({{"deleted", options.tensor}});
  } else {
    session->Print(absl::StrCat("deleted ", Printable(options.tensor), "\n"));
  }
}

absl::StatusOr<v1::ComputeEncodingsRequest> MakeComputeRequest(
    const EncodingsOptions& options) {
  const absl::StatusOr<SpecSet> specs = options.spec.ParseSet();
  if (!specs.ok()) return specs.status();
  v1::ComputeEncodingsRequest request;
  request.set_model(options.name.model);
  request.set_revision(options.name.revision);
  request.set_dry_run(options.dry_run);
  if (specs->has_base) {
    const absl::StatusOr<EncodingSpec> base = specs->base.SpecOfAny();
    if (!base.ok()) return base.status();
    *request.mutable_default_spec() = *base;
  }
  for (const SpecSet::Override& entry : specs->overrides) {
    const absl::StatusOr<EncodingSpec> spec = entry.spec.SpecOfAny();
    if (!spec.ok()) return spec.status();
    v1::SpecOverride* const added = request.add_overrides();
    added->set_pattern(entry.pattern);
    *added->mutable_spec() = *spec;
  }
  return request;
}

// The spec of the first override that matches, or the default; null where a
// tensor is left out.
const EncodingSpec* SpecOfTensor(const v1::ComputeEncodingsRequest& request,
                                 const std::string& tensor) {
  for (const v1::SpecOverride& entry : request.overrides()) {
    if (MatchesGlob(entry.pattern(), tensor)) return &entry.spec();
  }
  return request.has_default_spec() ? &request.default_spec() : nullptr;
}

absl::StatusOr<std::vector<NamedTies>> AddTies(
    const EncodingsOptions& options, Client* client,
    v1::ComputeEncodingsRequest* request) {
  std::vector<EncodingSpec> specs;
  if (request->has_default_spec()) specs.push_back(request->default_spec());
  for (const v1::SpecOverride& entry : request->overrides()) {
    specs.push_back(entry.spec());
  }
  return AddStoredTies(
      options.ties, specs, options.name, client,
      [request](const std::string& tensor) {
        return SpecOfTensor(*request, tensor);
      },
      request->mutable_ties());
}

void Compute(const EncodingsOptions& options, Session* session) {
  absl::StatusOr<v1::ComputeEncodingsRequest> request =
      MakeComputeRequest(options);
  if (!request.ok()) return session->FailUsage(request.status());
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  std::vector<std::string> patterns;
  for (const v1::SpecOverride& entry : request->overrides()) {
    patterns.push_back(entry.pattern());
  }
  absl::Status status = jobs::CheckStoredPatterns(
      "--spec", patterns, jobs::Stored::kStatistics, options.name, client.get(),
      jobs::PatternRule::kFirstTakes);
  if (!status.ok()) return FailEarly(status, session);
  const absl::StatusOr<std::vector<NamedTies>> ties =
      AddTies(options, client.get(), &*request);
  if (!ties.ok()) return FailEarly(ties.status(), session);
  Json list = Json::array();
  std::vector<TensorError> errors;
  Table table;
  table.AddColumn("TENSOR", Table::Align::kLeft);
  table.AddColumn("FORMAT", Table::Align::kLeft);
  table.AddColumn("SCALES", Table::Align::kRight);
  table.AddColumn("SQNR DB", Table::Align::kRight);
  table.AddColumn("AT LEAST", Table::Align::kRight);
  if (!options.dry_run) table.AddColumn("ETAG", Table::Align::kLeft);
  {
    Progress progress(Progress::Unit::kTensors, !session->quiet);
    status = client->ComputeEncodings(
        *request, [&](const v1::ComputeEncodingsResponse& response) {
          const std::string& name = response.name().tensor();
          progress.Set(response.done_count(), response.total_count(), name);
          Json json = {{"name", name}};
          if (response.has_error()) {
            const absl::Status error = FromTensorError(response.error());
            json["error"] = ErrorJson(error);
            errors.push_back({name, error});
            table.AddRow({name, "failed"});
          } else {
            const v1::StoredEncoding& stored = response.stored_encoding();
            const int scale_count = stored.encoding().scale_size();
            json["format"] = FormatName(stored.encoding().format());
            json["scale_count"] = scale_count;
            if (!options.dry_run) {
              json["etag"] = stored.etag();
              json["generation"] = stored.generation();
            }
            json["prediction"] = PredictionJson(response.prediction());
            table.AddRow({name, FormatName(stored.encoding().format()),
                          CountText(static_cast<uint64_t>(scale_count)),
                          DecibelText(response.prediction().sqnr_db()),
                          DecibelText(response.prediction().sqnr_db_low()),
                          stored.etag()});
          }
          list.push_back(std::move(json));
          return true;
        });
  }
  if (!status.ok()) return session->Fail(status);
  if (!errors.empty()) session->Note(kServerError);
  table.SortRows();
  if (session->json) {
    return session->PrintJson({{"model", options.name.model},
                               {"revision", options.name.revision},
                               {"dry_run", options.dry_run},
                               {"ties", TiesJson(*ties)},
                               {"tensors", list}});
  }
  session->Print(table.empty() ? "no tensors\n"
                               : table.Render(StdoutHasStyle()));
  PrintTies(*ties, *session);
  PrintTensorErrors(errors, session);
}

}  // namespace

void AddEncodingsCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "encodings", "List, get, put, delete and compute a model's encodings");
  const auto options = std::make_shared<EncodingsOptions>();
  const auto add = [&](const char* name, const char* text,
                       void (*run)(const EncodingsOptions&, Session*)) {
    Command* const sub = command->AddCommand(name, text);
    AddRevisionOptions(sub, /*required=*/true, &options->name);
    sub->OnRun([options, session, run] { run(*options, session); });
    return sub;
  };
  add("list", "List the encodings of a revision", &RunListEncodings)
      ->AddExample("quantctl encodings list --model acme/net");
  Command* const compute =
      add("compute", "Compute encodings from stored statistics and store them",
          &Compute);
  AddSpecOptions(compute, &options->spec);
  AddTieOptions(compute,
                "Tensors that share one outer scale, or one "
                "encoding where the spec has none",
                &options->ties);
  compute->AddFlag("--dry-run", &options->dry_run,
                   "Show what to expect and store nothing");
  compute->AddExample(
      "quantctl encodings compute --model acme/net \\\n"
      "  --spec uint8:percentile=0.999 --spec 'conv*=int8:mse'");
  Command* const get =
      add("get", "Print one encoding as JSON", &RunGetEncoding);
  AddTensorArgument(get, &options->tensor);
  get->AddExample(
      "quantctl encodings get --model acme/net conv1.weight > conv1.json");
  Command* const put =
      add("put", "Store one encoding, as `get` prints it", &Put);
  AddTensorArgument(put, &options->tensor);
  put->AddExample(
      "quantctl encodings put --model acme/net conv1.weight -f conv1.json");
  put->AddOption("-f,--file", &options->file, "FILE", "JSON file, - for stdin")
      ->ShowDefault();
  put->AddOption("--if-match", &options->if_match, "ETAG",
                 "Only over the encoding of this etag; absent: only where "
                 "there is none");
  Command* const remove =
      add("delete", "Delete one encoding", &RunDeleteEncoding);
  AddTensorArgument(remove, &options->tensor);
  remove->AddExample("quantctl encodings delete --model acme/net conv1.weight");
  remove->AddOption("--if-match", &options->if_match, "ETAG",
                    "Only the encoding of this etag");
}

}  // namespace quantd::cli
