// Quantizes a whole model, from files to files.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_RUN_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_RUN_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/jobs/connections.h"
#include "client/jobs/job_events.h"
#include "client/jobs/quantize_folder.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"
#include "client/jobs/quantize_server.h"

namespace quantd::jobs {

// One run of `quantctl quantize`. Not thread-safe.
class QuantizeRun {
 public:
  // Called once at most, and only where a server is needed.
  using Connect = std::function<absl::StatusOr<Connections>()>;

  // `events` must stay. `server` is the address that `connect` goes to.
  QuantizeRun(QuantizeOptions options, std::string server, Connect connect,
              const JobEvents& events);
  QuantizeRun(const QuantizeRun&) = delete;
  QuantizeRun& operator=(const QuantizeRun&) = delete;

  // Checks the options and the inputs, decides what is to be done with each
  // tensor, and finds what earlier runs have done. Writes nothing.
  // Errors: ARGUMENT_INVALID; those of files and of the client.
  absl::Status Prepare();

  // Writes the output, and publishes the encodings where they are stored.
  // Finished shards of a folder stay after an error. Tensors that fail have
  // their errors in plan().outcomes, and without keep_going there is no output
  // then, although this is no error of the run.
  // Requires: Prepare.
  // Errors: CANCELLED after JobEvents::is_stopped; those of files and of the
  // client.
  absl::Status Write();

  // With what stands for options that are not given, once Prepare is done.
  const QuantizeOptions& options() const { return options_; }
  const QuantizePlan& plan() const { return plan_; }
  // Null where none is called.
  const QuantizeServer* server() const { return server_.get(); }
  // False while an error is one of what the server allows before any work.
  bool has_begun() const { return has_begun_; }

 private:
  // Sets the options that are not given.
  absl::Status Resolve();
  // False if a tensor cannot be done: that ends the run before it costs
  // anything, unless the run is to keep going.
  bool IsDoable() const;
  // False where the parts are done, or all blocks are made here.
  bool NeedsServer() const;
  absl::Status ConnectOnce();
  // Checks that the encodings can be published in the end.
  absl::Status Begin();
  // Errors end the run and leave the shards that are complete; so does a tensor
  // that fails, unless the run is to keep going.
  absl::Status WriteFiles();
  // Sets *is_written unless a tensor failed.
  absl::Status WriteTargets(QuantizeFolder* folder, bool* is_written);
  // Makes the encodings of all shards visible, where they are stored. A part
  // alone is not what readers are to see.
  absl::Status Publish();
  // No later run goes on with what went to standard output. If it is not whole,
  // nobody needs its draft.
  void DropDraft() const;

  QuantizeOptions options_;
  const std::string address_;
  const Connect connect_;
  const JobEvents& events_;
  QuantizePlan plan_;
  std::optional<Connections> connections_;
  std::unique_ptr<QuantizeServer> server_;
  bool has_begun_ = false;
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_RUN_H_
