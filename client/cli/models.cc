#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/message_json.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cpp/client.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

void ListModels(Client* client, Session* session) {
  absl::StatusOr<std::vector<v1::Model>> models = client->ListModels();
  if (!models.ok()) return session->Fail(models.status());
  std::sort(models->begin(), models->end(),
            [](const v1::Model& a, const v1::Model& b) {
              return NaturalLess(a.model(), b.model());
            });
  Json list = Json::array();
  Table table;
  table.AddColumn("MODEL", Table::Align::kLeft);
  table.AddColumn("REVISIONS", Table::Align::kRight);
  table.AddColumn("ENCODINGS", Table::Align::kRight);
  table.AddColumn("STATISTICS", Table::Align::kRight);
  for (const v1::Model& model : *models) {
    Json item = {{"model", model.model()},
                 {"revision_count", model.revision_count()},
                 {"encoding_count", model.encoding_count()},
                 {"statistics_count", model.statistics_count()}};
    if (model.has_error()) item["error"] = MessageJson(model.error());
    list.push_back(std::move(item));
    table.AddRow({model.model(), CountText(model.revision_count()),
                  CountText(model.encoding_count()),
                  CountText(model.statistics_count())});
    if (model.has_error()) session->TellDamage(model.error());
  }
  if (session->json) {
    session->PrintJson({{"models", list}});
  } else {
    session->Print(table.empty() ? "no models\n"
                                 : table.Render(StdoutHasStyle()));
  }
}

void ListRevisions(Client* client, const std::string& model, Session* session) {
  absl::StatusOr<std::vector<v1::Revision>> revisions =
      client->ListRevisions(model);
  if (!revisions.ok()) return session->Fail(revisions.status());
  std::sort(revisions->begin(), revisions->end(),
            [](const v1::Revision& a, const v1::Revision& b) {
              return NaturalLess(a.revision(), b.revision());
            });
  Json list = Json::array();
  Table table;
  table.AddColumn("REVISION", Table::Align::kLeft);
  table.AddColumn("ENCODINGS", Table::Align::kRight);
  table.AddColumn("STATISTICS", Table::Align::kRight);
  for (const v1::Revision& revision : *revisions) {
    Json item = {{"revision", revision.revision()},
                 {"encoding_count", revision.encoding_count()},
                 {"statistics_count", revision.statistics_count()}};
    if (revision.has_error()) item["error"] = MessageJson(revision.error());
    list.push_back(std::move(item));
    table.AddRow({revision.revision(), CountText(revision.encoding_count()),
                  CountText(revision.statistics_count())});
    if (revision.has_error()) session->TellDamage(revision.error());
  }
  if (session->json) {
    session->PrintJson({{"model", model}, {"revisions", list}});
  } else {
    session->Print(table.empty() ? "no revisions\n"
                                 : table.Render(StdoutHasStyle()));
  }
}

void RunModels(const std::string& model, Session* session) {
  const absl::StatusOr<std::unique_ptr<Client>> client = session->Connect();
  if (!client.ok()) return session->FailUsage(client.status());
  if (model.empty()) {
    ListModels(client->get(), session);
  } else {
    ListRevisions(client->get(), model, session);
  }
}

}  // namespace

void AddModelsCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "models", "List models, or the revisions of one model");
  const auto model = std::make_shared<std::string>();
  command->AddArgument("model", model.get(), "NAME",
                       "List the revisions of this model");
  command->AddExample("quantctl models");
  command->AddExample("quantctl models acme/net", "its revisions");
  command->OnRun([model, session] { RunModels(*model, session); });
}

}  // namespace quantd::cli
