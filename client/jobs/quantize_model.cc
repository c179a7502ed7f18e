#include "client/jobs/quantize_model.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/client_options.h"
#include "client/cpp/errors.h"
#include "client/jobs/connections.h"
#include "client/jobs/job_events.h"
#include "client/jobs/model_tensors.h"
#include "client/jobs/quantize_notes.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"
#include "client/jobs/quantize_run.h"

namespace quantd::jobs {
namespace {

absl::StatusOr<Connections> ConnectAll(const ClientOptions& options,
                                       int count) {
  if (count < 1) {
    return ArgumentInvalidError(
        absl::StrCat("expected at least one stream, got ", count));
  }
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < count; ++i) {
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(options);
    if (!client.ok()) return client.status();
    clients.push_back(*std::move(client));
  }
  return Connections(std::move(clients));
}

// The error of the first tensor that failed; OK where there is none, or the
// output has all others.
absl::Status FailureOf(const QuantizeOptions& options,
                       const std::vector<ModelTensor>& tensors) {
  if (options.keep_going) return absl::OkStatus();
  for (const ModelTensor& tensor : tensors) {
    if (!tensor.status.ok()) {
      return absl::Status(
          tensor.status.code(),
          absl::StrCat(tensor.status.message(), ", in tensor ", tensor.name));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<QuantizedModel> QuantizeModel(const QuantizeOptions& options,
                                             const ClientOptions& client,
                                             const JobEvents& events,
                                             int streams) {
  QuantizeRun run(
      options, client.target,
      [&client, streams] { return ConnectAll(client, streams); }, events);
  absl::Status status = run.Prepare();
  if (status.ok()) status = run.Write();
  if (!status.ok()) return status;
  QuantizedModel model;
  model.tensors = TensorsOf(run.plan());
  status = FailureOf(options, model.tensors);
  if (!status.ok()) return status;
  for (const QuantizeNote& note : NotesOf(run.options(), run.plan())) {
    const bool is_expected = note.kind == QuantizeNote::Kind::kExpected;
    for (const std::string& line : note.lines) {
      is_expected ? events.Note(line) : events.Warn(line);
    }
  }
  if (run.plan().QuantizedNothing()) {
    return ArgumentInvalidError(NothingQuantizedText(options));
  }
  for (const std::unique_ptr<Shard>& shard : run.plan().shards) {
    model.file_bytes += shard->file_bytes;
  }
  return model;
}

}  // namespace quantd::jobs
