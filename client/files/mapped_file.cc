#include "client/files/mapped_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/files/errors.h"

namespace quantd::files {

// A place for what is mapped; it is never freed, because a signal handler reads
// all of them.
struct Mapping {
  // Bytes of a tensor of the file.
  struct Region {
    std::string name;
    // Name as an error has it.
    std::string quoted_name;
    const uint8_t* begin;
    const uint8_t* end;
  };

  // Null while the place is free. Set last.
  std::atomic<const uint8_t*> data{nullptr};
  std::atomic<size_t> size{0};
  std::string path;
  struct stat status = {};
  // In the order of the file, or null.
  std::atomic<const std::vector<Region>*> regions{nullptr};
  Mapping* next = nullptr;
};

namespace {

ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);
std::atomic<Mapping*> g_mappings{nullptr};
// Error of the first file that had changed when it was let go of.
absl::Status* g_changed ABSL_GUARDED_BY(g_mutex) = nullptr;

const char* g_program = nullptr;
int g_exit_code = 1;
std::atomic_flag g_is_ending = ATOMIC_FLAG_INIT;

// The first tensor that has bytes from there on; null if none is known.
const Mapping::Region* RegionFrom(const Mapping& mapping, const uint8_t* at) {
  const std::vector<Mapping::Region>* const regions = mapping.regions.load();
  if (regions == nullptr) return nullptr;
  for (const Mapping::Region& region : *regions) {
    if (region.end > at) return &region;
  }
  return nullptr;
}

// Errors: FILE_CHANGED.
absl::Status CheckMapping(const Mapping& mapping) {
  struct stat now;
  // Whoever is not there any more has not changed either.
  if (stat(mapping.path.c_str(), &now) != 0 ||
      now.st_dev != mapping.status.st_dev ||
      now.st_ino != mapping.status.st_ino ||
      (now.st_size == mapping.status.st_size &&
       now.st_mtim.tv_sec == mapping.status.st_mtim.tv_sec &&
       now.st_mtim.tv_nsec == mapping.status.st_mtim.tv_nsec)) {
    return absl::OkStatus();
  }
  // Nobody knows which tensor was rewritten; a file that was cut short tells
  // it.
  const Mapping::Region* const cut =
      now.st_size < mapping.status.st_size
          ? RegionFrom(mapping, mapping.data.load() + now.st_size)
          : nullptr;
  return FileChangedError(mapping.path, cut == nullptr ? "" : cut->name);
}

Mapping* Register(const std::string& path, const struct stat& status,
                  const uint8_t* data, size_t size) {
  absl::MutexLock lock(&g_mutex);
  Mapping* mapping = g_mappings.load();
  while (mapping != nullptr && mapping->data.load() != nullptr) {
    mapping = mapping->next;
  }
  if (mapping == nullptr) {
    mapping = new Mapping;
    mapping->next = g_mappings.load();
    g_mappings.store(mapping);
  }
  mapping->path = path;
  mapping->status = status;
  mapping->size.store(size);
  mapping->data.store(data);
  return mapping;
}

// Calls only what a signal handler may.
void Write(const char* text) {
  [[maybe_unused]] const ssize_t written =
      write(STDERR_FILENO, text, std::strlen(text));
}

// Lets one thread end the process: of threads that find a change at the same
// time, the first one tells of it, and the process ends with that one.
void BeTheOneThatEnds() {
  if (!g_is_ending.test_and_set()) return;
  while (true) pause();
}

void ExplainBusError(int signal_number, siginfo_t* info, void* /*context*/) {
  const auto* const at = static_cast<const uint8_t*>(info->si_addr);
  for (const Mapping* mapping = g_mappings.load(); mapping != nullptr;
       mapping = mapping->next) {
    const uint8_t* const data = mapping->data.load();
    if (data == nullptr || at < data || at >= data + mapping->size.load()) {
      continue;
    }
    BeTheOneThatEnds();
    Write(g_program);
    Write(": FILE_CHANGED: ");
    Write(mapping->path.c_str());
    const Mapping::Region* const region = RegionFrom(*mapping, at);
    if (region != nullptr && at >= region->begin) {
      Write(": tensor ");
      Write(region->quoted_name.c_str());
      Write(": the file");
    }
    Write(" was cut short while it was read\n");
    _exit(g_exit_code);
  }
  // No file's.
  signal(signal_number, SIG_DFL);
}

}  // namespace

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileUnreadableError(path, errno);
  struct stat status;
  if (fstat(fd, &status) != 0) {
    const int error_number = errno;
    close(fd);
    return FileUnreadableError(path, error_number);
  }
  if (!S_ISREG(status.st_mode)) {
    close(fd);
    return FileUnsupportedError(path, "expected a regular file");
  }
  const size_t size = static_cast<size_t>(status.st_size);
  if (size == 0) {
    close(fd);
    return MappedFile(nullptr, 0, nullptr);
  }
  void* const data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error_number = errno;
  close(fd);
  if (data == MAP_FAILED) return FileUnreadableError(path, error_number);
  const auto* const bytes = static_cast<const uint8_t*>(data);
  return MappedFile(bytes, size, Register(path, status, bytes, size));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapping_(std::exchange(other.mapping_, nullptr)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapping_, other.mapping_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  {
    absl::MutexLock lock(&g_mutex);
    // A process that goes on may map other files.
    if (g_program != nullptr && g_changed == nullptr) {
      absl::Status unchanged = CheckMapping(*mapping_);
      if (!unchanged.ok()) g_changed = new absl::Status(std::move(unchanged));
    }
    delete mapping_->regions.exchange(nullptr);
    mapping_->data.store(nullptr);
  }
  munmap(const_cast<uint8_t*>(data_), size_);
}

void MappedFile::SetTensors(std::vector<TensorBytes> tensors) {
  if (mapping_ == nullptr) return;
  auto regions = std::make_unique<std::vector<Mapping::Region>>();
  for (TensorBytes& tensor : tensors) {
    const uint8_t* const begin = tensor.bytes.data();
    const uint8_t* const end = begin + tensor.bytes.size();
    if (begin == end || begin < data_ || end > data_ + size_) continue;
    std::string quoted_name = QuotedName(tensor.name);
    regions->push_back(
        {std::move(tensor.name), std::move(quoted_name), begin, end});
  }
  std::sort(regions->begin(), regions->end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  absl::MutexLock lock(&g_mutex);
  mapping_->regions.store(regions.release());
}

absl::Status CheckMappedFiles() {
  absl::MutexLock lock(&g_mutex);
  if (g_changed != nullptr) return *g_changed;
  for (const Mapping* mapping = g_mappings.load(); mapping != nullptr;
       mapping = mapping->next) {
    if (mapping->data.load() == nullptr) continue;
    absl::Status unchanged = CheckMapping(*mapping);
    if (!unchanged.ok()) return unchanged;
  }
  return absl::OkStatus();
}

void EndOverChangedFile(const absl::Status& changed) {
  BeTheOneThatEnds();
  const std::string line =
      absl::StrCat(g_program, ": ", changed.message(), "\n");
  Write(line.c_str());
  _exit(g_exit_code);
}

void ExplainCutFiles(const char* program, int exit_code) {
  g_program = program;
  g_exit_code = exit_code;
  struct sigaction action {};
  action.sa_sigaction = &ExplainBusError;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace quantd::files
