#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/message_json.h"
#include "client/cli/printable.h"
#include "client/cli/report_data.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_options.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/jobs/revision_name.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct StatisticsOptions {
  jobs::RevisionName name;
  std::string tensor;
  bool with_state = false;
  std::string source;
};

constexpr double kFractions[] = {0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999};
constexpr size_t kHistogramRows = 12;
constexpr size_t kHistogramWidth = 50;

// Rows of the same width in the elements, with a bar each.
std::string HistogramText(const Distribution& distribution) {
  std::vector<double> rows(kHistogramRows);
  for (size_t i = 0; i < distribution.counts.size(); ++i) {
    rows[i * kHistogramRows / distribution.counts.size()] +=
        distribution.counts[i];
  }
  const double most = *std::max_element(rows.begin(), rows.end());
  if (!(most > 0)) return "";
  Table table;
  table.AddColumn("FROM", Table::Align::kRight);
  table.AddColumn("ELEMENTS", Table::Align::kRight);
  table.AddColumn("", Table::Align::kLeft);
  const double width = (distribution.last_edge - distribution.first_edge) /
                       static_cast<double>(kHistogramRows);
  for (size_t i = 0; i < kHistogramRows; ++i) {
    const double bar = rows[i] / most * static_cast<double>(kHistogramWidth);
    table.AddRow(
        {NumberText(distribution.first_edge + width * static_cast<double>(i)),
         CountText(static_cast<uint64_t>(std::llround(rows[i]))),
         // A few elements are not none.
         rows[i] > 0 && bar < 1 ? "."
                                : std::string(static_cast<size_t>(bar), '#')});
  }
  return table.Render(StdoutHasStyle());
}

std::string SummaryText(const v1::StatisticsState& state) {
  const Summary summary = SummaryOf(state, kFractions);
  std::string text =
      absl::StrCat("mean ", NumberText(summary.mean), ", standard deviation ",
                   NumberText(summary.deviation), "\n");
  if (summary.quantiles.empty()) return text;
  Table table;
  table.AddColumn("PART", Table::Align::kLeft);
  std::vector<std::string> row = {"below"};
  for (size_t i = 0; i < summary.quantiles.size(); ++i) {
    table.AddColumn(absl::StrCat(kFractions[i] * 100, "%"),
                    Table::Align::kRight);
    row.push_back(NumberText(summary.quantiles[i]));
  }
  table.AddRow(std::move(row));
  return absl::StrCat(text, "\n", table.Render(StdoutHasStyle()), "\n",
                      HistogramText(DistributionOf(state)));
}

Json SummaryJson(const v1::StatisticsState& state) {
  const Summary summary = SummaryOf(state, kFractions);
  Json quantiles = Json::array();
  for (size_t i = 0; i < summary.quantiles.size(); ++i) {
    quantiles.push_back(
        {{"part", kFractions[i]}, {"below", summary.quantiles[i]}});
  }
  const Distribution distribution = DistributionOf(state);
  return {{"mean", summary.mean},
          {"standard_deviation", summary.deviation},
          {"quantiles", quantiles},
          {"histogram",
           {{"first_edge", distribution.first_edge},
            {"last_edge", distribution.last_edge},
            {"counts", distribution.counts}}}};
}

void RunListStatistics(const StatisticsOptions& options, Session* session) {
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  absl::StatusOr<std::vector<v1::StatisticsEntry>> entries =
      client->ListStatistics(options.name.model, options.name.revision);
  if (!entries.ok()) return session->Fail(entries.status());
  std::sort(entries->begin(), entries->end(),
            [](const v1::StatisticsEntry& a, const v1::StatisticsEntry& b) {
              return NaturalLess(a.tensor(), b.tensor());
            });
  Json list = Json::array();
  Table table;
  table.AddColumn("TENSOR", Table::Align::kLeft);
  table.AddColumn("SOURCES", Table::Align::kRight);
  table.AddColumn("SIZE", Table::Align::kBytes);
  table.AddColumn("GRAM", Table::Align::kBytes);
  table.AddColumn("UPDATED UTC", Table::Align::kLeft);
  for (const v1::StatisticsEntry& entry : *entries) {
    Json item = {{"tensor", entry.tensor()},
                 {"source_count", entry.source_count()},
                 {"size_bytes", entry.size_bytes()},
                 {"gram_size_bytes", entry.gram_size_bytes()},
                 {"update_time", TimeText(entry.update_time())}};
    if (entry.has_error()) item["error"] = MessageJson(entry.error());
    list.push_back(std::move(item));
    if (entry.has_error()) session->TellDamage(entry.error());
    table.AddRow(
        {entry.tensor(), CountText(entry.source_count()),
         BytesCell(entry.size_bytes()),
         entry.gram_size_bytes() > 0 ? BytesCell(entry.gram_size_bytes()) : "",
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

// A line, or nothing where there is no Gram matrix.
std::string GramText(const v1::GetStatisticsResponse& response) {
  if (!response.has_gram()) return "";
  const v1::StoredGram& gram = response.gram();
  return absl::StrCat(
      "Gram matrix of ", CountText(gram.feature_count()), " features",
      gram.part_count() > 1
          ? absl::StrCat(" in ", CountText(gram.part_count()), " parts")
          : "",
      ": ", CountText(gram.rows()), " rows, ", CountText(gram.left_out_rows()),
      " left out, ", CountText(gram.clipped_count()), " elements clipped, ",
      BytesText(gram.size_bytes()), "\n");
}

void RunGetStatistics(const StatisticsOptions& options, Session* session) {
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  const absl::StatusOr<v1::GetStatisticsResponse> response =
      client->GetStatistics(options.name.NameOf(options.tensor),
                            options.with_state,
                            /*per_tensor=*/!options.with_state);
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
    table.AddRow({source.source(), CountText(source.sequence()),
                  TimeText(source.update_time())});
  }
  const v1::TensorStatistics& statistics = response->statistics();
  if (session->json) {
    Json json = {{"name", options.tensor},
                 {"statistics", StatisticsJson(statistics)},
                 {"summary", SummaryJson(response->state())},
                 {"sources", sources}};
    if (response->has_gram()) json["gram"] = MessageJson(response->gram());
    if (options.with_state) json["state"] = MessageJson(response->state());
    return session->PrintJson(json);
  }
  session->Print(absl::StrCat(
      CountText(statistics.count()), " elements from ",
      NumberText(statistics.min()), " to ", NumberText(statistics.max()), ", ",
      CountText(statistics.zero_count()), " zeros, ",
      CountText(statistics.nan_count()), " NaN, ",
      CountText(statistics.positive_infinity_count() +
                statistics.negative_infinity_count()),
      " infinities\n", GramText(*response), SummaryText(response->state()),
      "\n", table.Render(StdoutHasStyle())));
}

void RunDeleteStatistics(const StatisticsOptions& options, Session* session) {
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
  const auto options = std::make_shared<StatisticsOptions>();
  const auto add = [&](const char* name, const char* text,
                       void (*run)(const StatisticsOptions&, Session*)) {
    Command* const sub = command->AddCommand(name, text);
    AddRevisionOptions(sub, /*required=*/true, &options->name);
    sub->OnRun([options, session, run] { run(*options, session); });
    return sub;
  };
  add("list", "List the tensors of a revision that have statistics",
      &RunListStatistics)
      ->AddExample("quantctl statistics list --model acme/net");
  Command* const get =
      add("get", "Show the statistics of a tensor over all sources",
          &RunGetStatistics);
  AddTensorArgument(get, &options->tensor);
  get->AddExample("quantctl statistics get --model acme/net conv1.input");
  get->AddFlag("--state", &options->with_state,
               "With --json: the histograms of all scales as well");
  Command* const remove =
      add("delete", "Delete the statistics of a tensor", &RunDeleteStatistics);
  AddTensorArgument(remove, &options->tensor);
  remove->AddExample(
      "quantctl statistics delete --model acme/net conv1.input \\\n"
      "  --source rank-3");
  remove->AddOption("--source", &options->source, "NAME",
                    "Only those of this source");
}

}  // namespace quantd::cli
