// What the folder of a model has beside its tensors, such as a tokenizer.

#ifndef QUANTD_CLIENT_JOBS_MODEL_FOLDER_H_
#define QUANTD_CLIENT_JOBS_MODEL_FOLDER_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/files/json.h"

namespace quantd::jobs {

// How CopyFilesBeside copies. Plain value.
struct FilesBeside {
  // Both are folders.
  std::string from;
  std::string to;
  // False: nothing is copied.
  bool is_model = true;
  // Replaces other files that are there.
  bool force = false;
  // True for a name in `from` whose place the caller fills.
  std::function<bool(const std::string& name)> is_replaced;
};

// Copies the files of a model beside its tensors, such as a tokenizer and code:
// no weights, and nothing that says how they were quantized. Folders that have
// no weights and those of modules of sentence-transformers are copied too.
// Returns one line that names the rest; empty where there is none.
// Errors: of files.
absl::StatusOr<std::string> CopyFilesBeside(const FilesBeside& beside);

// Writes the config.json of a folder, of files::ParsePythonJson. Replaces what
// is there.
// Errors: of files.
absl::Status WriteModelConfig(const files::Json& config,
                              const std::string& folder);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_MODEL_FOLDER_H_
