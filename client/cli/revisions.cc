#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/message_json.h"
#include "client/cli/printable.h"
#include "client/cli/session.h"
#include "client/cpp/client.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct RevisionsOptions {
  std::string model;
  // The revision to publish or delete.
  std::string revision;
  std::string target = "main";
  bool keep_others = false;
  bool all = false;
};

void Publish(const RevisionsOptions& options, Session* session) {
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  const absl::StatusOr<v1::PublishRevisionResponse> published =
      client->PublishRevision(options.model, options.revision, options.target,
                              options.keep_others);
  if (!published.ok()) return session->Fail(published.status());
  if (session->json) {
    return session->PrintJson(
        {{"model", options.model},
         {"revision", options.target},
         {"source_revision", options.revision},
         {"encoding_count", published->encoding_count()},
         {"replaced_count", published->replaced_count()}});
  }
  const std::string replaced = CountText(published->replaced_count());
  session->Print(absl::StrCat(
      "published ", Printable(options.revision), " as ",
      Printable(options.target), ": ", CountText(published->encoding_count()),
      options.keep_others
          ? absl::StrCat(" encodings now, ", replaced, " replaced")
          : absl::StrCat(" encodings in place of ", replaced),
      "\n"));
}

void PrintDeleted(const RevisionsOptions& options, uint64_t encoding_count,
                  uint64_t statistics_count, Session* session) {
  if (session->json) {
    Json document = {{"model", options.model},
                     {"encoding_count", encoding_count},
                     {"statistics_count", statistics_count}};
    if (!options.all) document["revision"] = options.revision;
    return session->PrintJson(document);
  }
  session->Print(absl::StrCat(
      "deleted ",
      Printable(options.all ? absl::StrCat("all of ", options.model)
                            : options.revision),
      ": ", CountText(encoding_count), " encodings, ",
      CountText(statistics_count), " statistics\n"));
}

void RunDeleteRevision(const RevisionsOptions& options, Session* session) {
  if (options.all != options.revision.empty()) {
    return session->FailUsage(absl::InvalidArgumentError(
        "expected either the name of a revision or --all"));
  }
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  if (options.all) {
    const absl::StatusOr<v1::DeleteModelResponse> deleted =
        client->DeleteModel(options.model);
    if (!deleted.ok()) return session->Fail(deleted.status());
    return PrintDeleted(options, deleted->encoding_count(),
                        deleted->statistics_count(), session);
  }
  const absl::StatusOr<v1::DeleteRevisionResponse> deleted =
      client->DeleteRevision(options.model, options.revision);
  if (!deleted.ok()) return session->Fail(deleted.status());
  PrintDeleted(options, deleted->encoding_count(), deleted->statistics_count(),
               session);
}

}  // namespace

void AddRevisionsCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "revisions", "Publish and delete a model's revisions");
  const auto options = std::make_shared<RevisionsOptions>();
  Command* const publish = command->AddCommand(
      "publish",
      "Make the encodings of one revision those of another, all at once");
  publish->AddArgument("model", &options->model, "NAME", "The model")
      ->Required();
  publish
      ->AddArgument("source", &options->revision, "REVISION",
                    "The revision that is published; it is empty then")
      ->Required();
  publish->AddArgument("target", &options->target, "REVISION",
                       "The revision whose encodings they replace; main by "
                       "default");
  publish->AddFlag("--keep-others", &options->keep_others,
                   "Keep the encodings that the target has of tensors that the "
                   "source does not have; otherwise they are deleted");
  publish->AddNote(
      "Readers see all encodings that were there before, or all that are there "
      "after. Statistics stay where they are.");
  publish->AddExample("quantctl revisions publish acme/net draft");
  publish->OnRun([options, session] { Publish(*options, session); });
  Command* const remove = command->AddCommand(
      "delete", "Delete the encodings and statistics of a revision or a model");
  remove->AddArgument("model", &options->model, "NAME", "The model")
      ->Required();
  remove->AddArgument("revision", &options->revision, "REVISION",
                      "The revision");
  remove->AddFlag("--all", &options->all, "All revisions of the model");
  remove->AddExample("quantctl revisions delete acme/net draft");
  remove->AddExample("quantctl revisions delete acme/net --all",
                     "the whole model");
  remove->OnRun([options, session] { RunDeleteRevision(*options, session); });
}

}  // namespace quantd::cli
