// Where a test keeps its files.

#ifndef QUANTD_TESTS_SUPPORT_TEMPORARY_DIRECTORY_H_
#define QUANTD_TESTS_SUPPORT_TEMPORARY_DIRECTORY_H_

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "gtest/gtest.h"

namespace quantd::testing {

// A new directory that goes away with the object, and all in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory() : path_(::testing::TempDir() + "/quantd-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }
  // The path of a file in it, which need not exist.
  std::string File(const std::string& name) const { return path_ + "/" + name; }
  // Writes a file, and answers its path.
  std::string Write(const std::string& name, const std::string& bytes) const {
    const std::string path = File(name);
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

 private:
  std::string path_;
};

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_TEMPORARY_DIRECTORY_H_
