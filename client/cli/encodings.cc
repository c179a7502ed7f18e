#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_input.h"
#include "client/cpp/client.h"
#include "client/files/errors.h"
#include "google/protobuf/util/json_util.h"

namespace quantd::cli {
namespace {

struct Options {
  NameOptions name;
  std::string tensor;
  std::string file = "-";
  std::string if_match;
};

// The protobuf JSON of a message, which any client can read back.
Json MessageJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string text;
  // It fails only for Any of an unknown type, of which there is none.
  static_cast<void>(
      google::protobuf::util::MessageToJsonString(message, &text, options));
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

// Connects; null when that was reported.
std::unique_ptr<Client> Connect(Session* session) {
  absl::StatusOr<std::unique_ptr<Client>> client = session->Connect();
  if (client.ok()) return *std::move(client);
  session->FailUsage(client.status());
  return nullptr;
}

void PrintStored(const v1::StoredEncoding& stored, const char* verb,
                 Session* session) {
  if (session->json) {
    session->PrintJson(MessageJson(stored));
  } else {
    session->Print(absl::StrCat(verb, " ", Printable(stored.name().tensor()),
                                ", etag ", Printable(stored.etag()),
                                ", generation ", stored.generation(), "\n"));
  }
}

void List(const Options& options, Session* session) {
  const std::unique_ptr<Client> client = Connect(session);
  if (client == nullptr) return;
  const absl::StatusOr<std::vector<v1::StoredEncoding>> encodings =
      client->ListEncodings(options.name.model, options.name.revision);
  if (!encodings.ok()) return session->Fail(encodings.status());
  Json list = Json::array();
  Table table;
  table.AddColumn("TENSOR", Table::Align::kLeft);
  table.AddColumn("FORMAT", Table::Align::kLeft);
  table.AddColumn("SCALES", Table::Align::kRight);
  table.AddColumn("GENERATION", Table::Align::kRight);
  table.AddColumn("ETAG", Table::Align::kLeft);
  for (const v1::StoredEncoding& stored : *encodings) {
    list.push_back(MessageJson(stored));
    table.AddRow({Printable(stored.name().tensor()),
                  FormatName(stored.format()), CountText(stored.scale_count()),
                  absl::StrCat(stored.generation()), Printable(stored.etag())});
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

void Get(const Options& options, Session* session) {
  const std::unique_ptr<Client> client = Connect(session);
  if (client == nullptr) return;
  const absl::StatusOr<v1::StoredEncoding> stored =
      client->GetEncoding(options.name.NameOf(options.tensor));
  if (!stored.ok()) return session->Fail(stored.status());
  // JSON in either case: it is what `put` reads.
  session->PrintJson(MessageJson(*stored));
}

// Reads an Encoding, or a StoredEncoding as `get` prints it.
absl::StatusOr<Encoding> ReadEncoding(const std::string& path) {
  std::string text;
  if (path == "-") {
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
  } else {
    std::ifstream file(path, std::ios::binary);
    if (!file) return files::FileUnreadableError(path, errno);
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  Json document = Json::parse(text, nullptr, /*allow_exceptions=*/false);
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

void Put(const Options& options, Session* session) {
  const absl::StatusOr<Encoding> encoding = ReadEncoding(options.file);
  if (!encoding.ok()) return session->Fail(encoding.status());
  const std::unique_ptr<Client> client = Connect(session);
  if (client == nullptr) return;
  const absl::StatusOr<v1::StoredEncoding> stored = client->PutEncoding(
      options.name.NameOf(options.tensor), *encoding, options.if_match);
  if (!stored.ok()) return session->Fail(stored.status());
  PrintStored(*stored, "put", session);
}

void Delete(const Options& options, Session* session) {
  const std::unique_ptr<Client> client = Connect(session);
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

}  // namespace

void AddEncodingsCommand(CLI::App* app, Session* session) {
  CLI::App* const command = app->add_subcommand(
      "encodings", "List, get, put and delete the encodings of a model");
  command->require_subcommand(1);
  const auto options = std::make_shared<Options>();
  const auto add = [&](const char* name, const char* text,
                       void (*run)(const Options&, Session*)) {
    CLI::App* const sub = command->add_subcommand(name, text);
    options->name.AddOptions(sub, /*required=*/true);
    sub->callback([options, session, run] { run(*options, session); });
    return sub;
  };
  const auto add_tensor = [&](CLI::App* sub) {
    sub->add_option("tensor", options->tensor, "Name of the tensor")
        ->required()
        ->type_name("TENSOR");
  };
  add("list", "List the encodings of a revision", &List);
  add_tensor(add("get", "Print one encoding as JSON", &Get));
  CLI::App* const put =
      add("put", "Store one encoding, as `get` prints it", &Put);
  add_tensor(put);
  put->add_option("-f,--file", options->file, "JSON file, - for stdin")
      ->type_name("FILE")
      ->capture_default_str();
  put->add_option("--if-match", options->if_match,
                  "Only over the encoding of this etag; absent: only where "
                  "there is none")
      ->type_name("ETAG");
  CLI::App* const remove = add("delete", "Delete one encoding", &Delete);
  add_tensor(remove);
  remove
      ->add_option("--if-match", options->if_match,
                   "Only the encoding of this etag")
      ->type_name("ETAG");
}

}  // namespace quantd::cli
