#include "client/jobs/quantize_model.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cpp/client.h"
#include "client/cpp/client_options.h"
#include "client/cpp/errors.h"
#include "client/files/safetensors.h"
#include "client/jobs/connections.h"
#include "client/jobs/job_events.h"
#include "client/jobs/model_tensors.h"
#include "client/jobs/quantize_notes.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"
#include "client/jobs/quantize_run.h"

namespace quantd::jobs {
namespace {

// The error of the first tensor that failed, and how many more there are; OK
// where there is none, or the output has all others.
absl::Status FailureOf(const QuantizeOptions& options,
                       const std::vector<ModelTensor>& tensors) {
  const auto has_failed = [](const ModelTensor& tensor) {
    return !tensor.status.ok();
  };
  const auto first = absl::c_find_if(tensors, has_failed);
  if (options.keep_going || first == tensors.end()) return absl::OkStatus();
  const int64_t count = absl::c_count_if(tensors, has_failed);
  absl::Status status(
      first->status.code(),
      absl::StrCat(first->status.message(), ", in tensor ", first->name,
                   count > 1 ? absl::StrCat(" and ", count - 1, " more") : ""));
  first->status.ForEachPayload(
      [&status](absl::string_view url, const absl::Cord& payload) {
        status.SetPayload(url, payload);
      });
  return status;
}

}  // namespace

absl::StatusOr<QuantizedModel> QuantizeModel(const QuantizeOptions& options,
                                             const ClientOptions& client,
                                             const JobEvents& events,
                                             std::optional<int> streams) {
  QuantizeRun run(
      options, client.target,
      [&client, streams] {
        return Connections::Open(streams,
                                 [&client] { return Client::Connect(client); });
      },
      events);
  absl::Status status = run.Prepare();
  if (status.ok()) status = run.Write();
  if (!status.ok()) return status;
  QuantizedModel model;
  model.tensors = TensorsOf(run.plan());
  status = FailureOf(options, model.tensors);
  if (!status.ok()) return status;
  if (run.plan().QuantizedNothing()) {
    return ArgumentInvalidError(NothingQuantizedText(options));
  }
  model.notes = NotesOf(run.options(), run.plan(), model.tensors);
  for (const std::unique_ptr<Shard>& shard : run.plan().shards) {
    const std::vector<files::UnreadTensor>& unread = shard->input.unread();
    model.unread.insert(model.unread.end(), unread.begin(), unread.end());
    model.file_bytes += shard->file_bytes;
  }
  return model;
}

}  // namespace quantd::jobs
