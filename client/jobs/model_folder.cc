#include "client/jobs/model_folder.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/cpp/text_file.h"
#include "client/files/atomic_file.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
#include "client/jobs/output.h"
#include "client/models/compressed_tensors.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::jobs {
namespace {

// Extensions of files that hold the weights as they were.
constexpr absl::string_view kWeightExtensions[] = {
    ".safetensors", ".index.json", ".bin",  ".pt",        ".pth",
    ".ckpt",        ".gguf",       ".onnx", ".onnx_data", ".h5",
    ".msgpack",     ".npy",        ".npz",  ".tflite",    ".ot"};
constexpr size_t kCopiedAtOnce = 1 << 20;
constexpr size_t kMostFolderNames = 10;
// Folders within a folder that is copied.
constexpr int kMostFolderDepth = 8;

// Files that say how the input was quantized: they do not belong to the output.
constexpr absl::string_view kNotBeside[] = {
    "hf_quant_config.json", "quant_config.json", "quantize_config.json"};

// True if a file goes with the tensors of a model.
bool IsBeside(absl::string_view name) {
  return std::find(std::begin(kNotBeside), std::end(kNotBeside), name) ==
             std::end(kNotBeside) &&
         std::none_of(std::begin(kWeightExtensions),
                      std::end(kWeightExtensions),
                      [name](absl::string_view extension) {
                        return absl::EndsWith(name, extension);
                      });
}

// Fills `piece` from a file, as far as that goes.
size_t ReadPiece(std::ifstream* file, std::vector<char>* piece) {
  file->read(piece->data(), static_cast<std::streamsize>(piece->size()));
  return static_cast<size_t>(file->gcount());
}

bool HaveSameContents(const std::string& a, const std::string& b) {
  std::ifstream first(a, std::ios::binary);
  std::ifstream second(b, std::ios::binary);
  std::vector<char> ours(kCopiedAtOnce);
  std::vector<char> theirs(kCopiedAtOnce);
  while (first && second) {
    const size_t size = ReadPiece(&first, &ours);
    if (ReadPiece(&second, &theirs) != size ||
        !std::equal(ours.begin(), ours.begin() + static_cast<ptrdiff_t>(size),
                    theirs.begin())) {
      return false;
    }
  }
  return first.eof() && second.eof();
}

// Replaces what is there.
absl::Status CopyFile(const std::string& from, const std::string& to) {
  std::ifstream source(from, std::ios::binary);
  if (!source) return files::FileUnreadableError(from, errno);
  absl::StatusOr<files::AtomicFile> file =
      files::AtomicFile::Create(to, files::IfExists::kReplace);
  if (!file.ok()) return file.status();
  std::vector<char> piece(kCopiedAtOnce);
  while (source) {
    const size_t size = ReadPiece(&source, &piece);
    const absl::Status status =
        file->Append(absl::string_view(piece.data(), size));
    if (!status.ok()) return status;
  }
  return source.bad() ? files::FileUnreadableError(from, EIO) : file->Commit();
}

// The folders of further modules that a model of sentence-transformers lists,
// such as 1_Pooling.
std::set<std::string> ModuleFolders(const std::string& input) {
  const files::Json modules = files::ParseJson(
      internal::ReadTextFile(files::PathIn(input, "modules.json"))
          .value_or(""));
  std::set<std::string> folders;
  if (!modules.is_array()) return folders;
  for (const files::Json& module : modules) {
    if (!module.is_object()) continue;
    const files::Json path = module.value("path", files::Json());
    if (!path.is_string()) continue;
    std::string name = path.get<std::string>();
    if (files::IsFolder(files::PathIn(input, name))) {
      folders.insert(std::move(name));
    }
  }
  return folders;
}

// The paths, from the input on, of what is in one of its folders and is not
// hidden: all files, and folders that lie too deep or are links.
std::vector<std::string> FilesOf(const std::string& input,
                                 const std::string& folder, int depth = 0) {
  std::vector<std::string> paths;
  for (const std::string& name : FilesIn(files::PathIn(input, folder))) {
    if (name[0] == '.') continue;
    const std::string path = files::PathIn(folder, name);
    struct stat info;
    const bool is_folder =
        lstat(files::PathIn(input, path).c_str(), &info) == 0 &&
        S_ISDIR(info.st_mode);
    if (!is_folder || depth == kMostFolderDepth) {
      paths.push_back(path);
      continue;
    }
    for (std::string& inner : FilesOf(input, path, depth + 1)) {
      paths.push_back(std::move(inner));
    }
  }
  return paths;
}

// True if a folder of the input has files, and none of them are weights.
bool IsFolderBeside(const std::string& input, const std::string& name) {
  if (!files::IsFolder(files::PathIn(input, name))) return false;
  const std::vector<std::string> paths = FilesOf(input, name);
  return !paths.empty() && absl::c_all_of(paths, IsBeside);
}

// False for what is no file, or that another file is in the place of.
// `name`  the path from the input on.
absl::StatusOr<bool> CopyBeside(const FilesBeside& beside,
                                const std::string& name) {
  const std::string from = files::PathIn(beside.from, name);
  struct stat info;
  if (stat(from.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return false;
  const std::string to = files::PathIn(beside.to, name);
  const std::string folder = to.substr(0, to.rfind('/'));
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return files::FileUnwritableError(folder, error.value());
  if (FileExists(to)) {
    if (HaveSameContents(from, to)) return true;
    if (!beside.force) return false;
  }
  const absl::Status status = CopyFile(from, to);
  if (!status.ok()) return status;
  return true;
}

}  // namespace

absl::StatusOr<std::string> CopyFilesBeside(const FilesBeside& beside) {
  std::vector<std::string> left_out;
  const std::set<std::string> of_modules = ModuleFolders(beside.from);
  for (const std::string& name : FilesIn(beside.from)) {
    if (name[0] == '.' || beside.is_replaced(name)) continue;
    const bool is_of_modules = of_modules.count(name) > 0;
    std::vector<std::string> paths = {name};
    if (beside.is_model &&
        (is_of_modules || IsFolderBeside(beside.from, name))) {
      paths = FilesOf(beside.from, name);
    }
    for (const std::string& path : paths) {
      bool is_copied = false;
      if (beside.is_model && (is_of_modules || IsBeside(path))) {
        const absl::StatusOr<bool> copied = CopyBeside(beside, path);
        if (!copied.ok()) return copied.status();
        is_copied = *copied;
      }
      if (!is_copied) left_out.push_back(path);
    }
  }
  if (left_out.empty()) return std::string();
  const size_t count = left_out.size();
  if (count > kMostFolderNames) left_out.resize(kMostFolderNames);
  return absl::StrCat(
      "of ", beside.from, " not copied: ", absl::StrJoin(left_out, ", "),
      count > kMostFolderNames
          ? absl::StrCat(" and ", CountText(count - kMostFolderNames), " more")
          : "");
}

absl::Status WriteModelConfig(const files::Json& config,
                              const std::string& folder) {
  absl::StatusOr<files::AtomicFile> file = files::AtomicFile::Create(
      files::PathIn(folder, kModelConfigName), files::IfExists::kReplace);
  if (!file.ok()) return file.status();
  const absl::Status status =
      file->Append(absl::StrCat(files::PythonJsonText(config), "\n"));
  return status.ok() ? file->Commit() : status;
}

}  // namespace quantd::jobs
