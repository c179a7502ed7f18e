#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/message_json.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_input.h"
#include "client/cpp/client.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct Options {
  NameOptions name;
  std::string tensor;
  bool with_state = false;
  std::string source;
};

std::string TimeText(const google::protobuf::Timestamp& time) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S",
                          absl::FromUnixSeconds(time.seconds()),
                          absl::UTCTimeZone());
}

void List(const Options& options, Session* session) {
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  const absl::StatusOr<std::vector<v1::StatisticsEntry>> entries =
      client->ListStatistics(options.name.model, options.name.revision);
  if (!entries.ok()) return session->Fail(entries.status());
  Json list = Json::array();
  Table table;
  table.AddColumn("TENSOR", Table::Align::kLeft);
  table.AddColumn("SOURCES", Table::Align::kRight);
  table.AddColumn("SIZE", Table::Align::kRight);
  table.AddColumn("UPDATED UTC", Table::Align::kLeft);
  for (const v1::StatisticsEntry& entry : *entries) {
    list.push_back({{"tensor", entry.tensor()},
                    {"source_count", entry.source_count()},
                    {"size_bytes", entry.size_bytes()},
                    {"update_time", TimeText(entry.update_time())}});
    table.AddRow({Printable(entry.tensor()), CountText(entry.source_count()),
                  BytesText(entry.size_bytes()),
                  TimeText(entry.update_time())});
  }
  if (session->json) {
    return session->PrintJson({{"model", options.name.model},
                               {"revision", options.name.revision},
                               {"statistics", list}});
  }
  session->Print(table.empty() ? "no statistics\n"
                               : table.Render(StdoutHasStyle()));
}

void Get(const Options& options, Session* session) {
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  const absl::StatusOr<v1::GetStatisticsResponse> response =
      client->GetStatistics(options.name.NameOf(options.tensor),
                            options.with_state);
  if (!response.ok()) return session->Fail(response.status());
  Json sources = Json::array();
  Table table;
  table.AddColumn("SOURCE", Table::Align::kLeft);
  table.AddColumn("SEQUENCE", Table::Align::kRight);
  table.AddColumn("UPDATED UTC", Table::Align::kLeft);
  for (const v1::StatisticsSource& source : response->sources()) {
    sources.push_back({{"source", source.source()},
                       {"sequence", source.sequence()},
                       {"update_time", TimeText(source.update_time())}});
    table.AddRow({Printable(source.source()), CountText(source.sequence()),
                  TimeText(source.update_time())});
  }
  const v1::TensorStatistics& statistics = response->statistics();
  if (session->json) {
    Json json = {{"name", options.tensor},
                 {"statistics", StatisticsJson(statistics)},
                 {"sources", sources}};
    if (response->has_state()) json["state"] = MessageJson(response->state());
    return session->PrintJson(json);
  }
  session->Print(absl::StrCat(CountText(statistics.count()), " elements from ",
                              NumberText(statistics.min()), " to ",
                              NumberText(statistics.max()), ", ",
                              CountText(statistics.zero_count()), " zeros, ",
                              CountText(statistics.nan_count()), " NaN, ",
                              CountText(statistics.positive_infinity_count() +
                                        statistics.negative_infinity_count()),
                              " infinities\n", table.Render(StdoutHasStyle())));
}

void Delete(const Options& options, Session* session) {
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  const absl::Status status = client->DeleteStatistics(
      options.name.NameOf(options.tensor), options.source);
  if (!status.ok()) return session->Fail(status);
  if (session->json) {
    session->PrintJson({{"deleted", options.tensor}});
  } else {
    session->Print(absl::StrCat("deleted statistics of ",
                                Printable(options.tensor), "\n"));
  }
}

}  // namespace

void AddStatisticsCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "statistics", "List, get and delete the statistics of a model");
  const auto options = std::make_shared<Options>();
  const auto add = [&](const char* name, const char* text,
                       void (*run)(const Options&, Session*)) {
    Command* const sub = command->AddCommand(name, text);
    options->name.AddOptions(sub, /*required=*/true);
    sub->OnRun([options, session, run] { run(*options, session); });
    return sub;
  };
  add("list", "List the tensors of a revision that have statistics", &List);
  Command* const get =
      add("get", "Show the statistics of a tensor over all sources", &Get);
  AddTensorArgument(get, &options->tensor);
  get->AddFlag("--state", &options->with_state,
               "With --json: the histograms as well");
  Command* const remove =
      add("delete", "Delete the statistics of a tensor", &Delete);
  AddTensorArgument(remove, &options->tensor);
  remove->AddOption("--source", &options->source, "NAME",
                    "Only those of this source");
}

}  // namespace quantd::cli
