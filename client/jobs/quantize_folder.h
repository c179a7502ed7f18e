// The output folder of `quantctl quantize`, and what it has beside its shards:
// the index, config.json, and the files of the model that are no tensors.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_FOLDER_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_FOLDER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/jobs/job_events.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"

namespace quantd::jobs {

// The folder of the output. Where the output is one file, most of it does
// nothing. Not thread-safe.
class QuantizeFolder {
 public:
  // All must stay.
  QuantizeFolder(const QuantizeOptions& options, const QuantizePlan& plan,
                 const JobEvents& events)
      : options_(options), plan_(plan), events_(events) {}

  // Makes the folder where there is none.
  // Errors: FILE_UNWRITABLE.
  absl::Status Make();
  // Takes away a folder that Make has made and that has nothing in it.
  void RemoveIfEmpty() const;

  // To be called before the first shard is in its place. Takes away what would
  // make a model of new and old shards. With --force also what an earlier run
  // left and this one does not replace. Does nothing the second time.
  // Errors: FILE_UNWRITABLE.
  absl::Status Clear();

  // Once all shards are in their places: deletes the files of parts and writes
  // what goes beside the shards. The index is the last, because it makes a
  // model of them. Errors: of files.
  absl::Status Complete() const;

 private:
  std::string OutputPath(absl::string_view name) const;
  // A shard that quantctl wrote and that is none of this run.
  bool IsStaleShard(const std::string& name) const;
  // Removes the parts that the shards are made of, which have no use any more.
  void RemoveParts() const;
  // Copies what is beside the tensors of the input, and notes the rest.
  absl::Status CopyFiles() const;
  // The modules whose matrix was left as it is.
  std::vector<std::string> IgnoredModules() const;
  // The input's config.json with the schemes of the modules.
  absl::Status WriteConfig() const;
  absl::Status WriteIndex() const;

  const QuantizeOptions& options_;
  const QuantizePlan& plan_;
  const JobEvents& events_;
  bool is_made_ = false;
  bool is_cleared_ = false;
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_FOLDER_H_
