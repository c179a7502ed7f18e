#include "client/jobs/output.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cpp/errors.h"
#include "client/files/atomic_file.h"
#include "client/files/errors.h"
#include "client/files/shard_index.h"

namespace quantd::jobs {
namespace {

// Extensions that say what is in a file.
constexpr absl::string_view kExtensions[] = {
    ".safetensors", ".npy", ".npz", ".gguf", ".onnx", ".pt",  ".pth",
    ".bin",         ".h5",  ".pkl", ".json", ".html", ".csv", ".zip",
};

bool StandsForAnotherFormat(const std::string& path,
                            absl::string_view extension) {
  return std::any_of(std::begin(kExtensions), std::end(kExtensions),
                     [&](absl::string_view other) {
                       return other != extension &&
                              absl::EndsWithIgnoreCase(path, other);
                     });
}

absl::Status InputError(const std::string& path) {
  return ArgumentInvalidError(absl::StrCat(
      "expected an output other than the input, got \"", path, "\""));
}

}  // namespace

bool FileExists(const std::string& path) {
  struct stat status;
  return lstat(path.c_str(), &status) == 0;
}

std::vector<std::string> FilesIn(const std::string& folder) {
  std::vector<std::string> names;
  DIR* const opened = opendir(folder.c_str());
  if (opened == nullptr) return names;
  while (const dirent* const entry = readdir(opened)) {
    names.emplace_back(entry->d_name);
  }
  closedir(opened);
  std::sort(names.begin(), names.end());
  return names;
}

bool IsSameFile(const std::string& a, const std::string& b) {
  struct stat of_a;
  struct stat of_b;
  return stat(a.c_str(), &of_a) == 0 && stat(b.c_str(), &of_b) == 0 &&
         of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
}

absl::Status OutputOptions::CheckFile(const std::vector<std::string>& inputs,
                                      absl::string_view extension) const {
  if (IsStandardOutput()) {
    const bool is_binary = extension == ".safetensors" || extension == ".npy" ||
                           extension == ".onnx";
    if (is_binary && isatty(STDOUT_FILENO) != 0) {
      return ArgumentInvalidError(
          "expected a pipe or a file as standard output, got a terminal");
    }
    return absl::OkStatus();
  }
  for (const std::string& input : inputs) {
    if (IsSameFile(input, path)) return InputError(path);
  }
  if (absl::EndsWith(path, "/") || files::IsFolder(path)) {
    return ArgumentInvalidError(absl::StrCat(
        "expected the name of a file as the output, got a folder, \"", path,
        "\"; name a file in it, such as ",
        files::PathIn(path, absl::StrCat("FILE", extension))));
  }
  if (StandsForAnotherFormat(path, extension)) {
    return ArgumentInvalidError(absl::StrCat(
        "expected a name that ends with ", extension, ", got \"", path, "\""));
  }
  return files::CheckWritable(path, if_exists());
}

absl::Status OutputOptions::CheckFolder(
    const std::vector<std::string>& inputs) const {
  if (IsStandardOutput()) {
    return ArgumentInvalidError(
        "expected the name of a folder, got - for standard output");
  }
  for (const std::string& input : inputs) {
    if (IsSameFile(input, path)) return InputError(path);
    const size_t slash = input.rfind('/');
    const std::string folder =
        slash == std::string::npos ? "." : input.substr(0, slash + 1);
    if (!files::IsFolder(input) && IsSameFile(folder, path)) {
      return ArgumentInvalidError(absl::StrCat(
          "expected an output folder other than that of the input, got \"",
          path, "\""));
    }
  }
  if (files::IsFolder(path)) return absl::OkStatus();
  if (FileExists(path)) return files::FileUnwritableError(path, ENOTDIR);
  if (StandsForAnotherFormat(path, "")) {
    return ArgumentInvalidError(absl::StrCat(
        "expected the name of a folder, got that of a file, \"", path, "\""));
  }
  return absl::OkStatus();
}

}  // namespace quantd::jobs
