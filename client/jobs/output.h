// The output of a command: -o and --force, and what they may name.

#ifndef QUANTD_CLIENT_JOBS_OUTPUT_H_
#define QUANTD_CLIENT_JOBS_OUTPUT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/files/atomic_file.h"

namespace quantd::jobs {

struct OutputOptions {
  std::string path;
  bool force = false;

  bool IsStandardOutput() const { return path == files::kStandardOutput; }
  files::IfExists if_exists() const {
    return force ? files::IfExists::kReplace : files::IfExists::kRefuse;
  }

  // Checks that a job may write a file there; to be called before it does
  // anything else. `inputs` are the files that it reads, of data and of
  // options, which need not be there; `extension` is that of what it writes,
  // such as ".json": another one that stands for a format is refused. Errors:
  // ARGUMENT_INVALID, FILE_EXISTS, FILE_UNWRITABLE.
  absl::Status CheckFile(const std::vector<std::string>& inputs,
                         absl::string_view extension) const;
  // Like CheckFile for a folder, of which the job writes some files: these are
  // not looked at.
  absl::Status CheckFolder(const std::vector<std::string>& inputs) const;
};

// True if there is anything at the path, be it a link to nothing.
bool FileExists(const std::string& path);

// Names in a folder, in order; none where it cannot be read.
std::vector<std::string> FilesIn(const std::string& folder);

// True if both paths lead to one file or folder.
bool IsSameFile(const std::string& a, const std::string& b);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_OUTPUT_H_
