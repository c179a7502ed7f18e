// The decoders of outside bytes as functions of bytes. Each target is a fuzzer
// of its own in the build that has them (preset asan, ./run), and its seeds and
// their mutations are an ordinary test everywhere else.

#ifndef QUANTD_TESTS_FUZZ_FUZZ_TARGET_H_
#define QUANTD_TESTS_FUZZ_FUZZ_TARGET_H_

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "google/protobuf/message.h"

namespace quantd::fuzz {

struct FuzzTarget {
  absl::string_view name;
  // Takes any input; ends the process when a promise is broken.
  void (*run)(absl::Span<const uint8_t> input);
  // Inputs that get past the first checks, for a fuzzer to start from.
  std::vector<std::string> (*seeds)();
  // Of inputs that end with a message: where it begins, and what it is; null
  // otherwise.
  size_t (*message_at)(absl::Span<const uint8_t> input) = nullptr;
  const google::protobuf::Message* prototype = nullptr;
};

// Mutates the message at the end of the input, which stays as it is where it
// has none.
std::string MutateMessageOf(const FuzzTarget& target,
                            absl::Span<const uint8_t> input,
                            std::mt19937_64& random);

FuzzTarget StatisticsTarget();
FuzzTarget ContributionTarget();
FuzzTarget EncodingTarget();
FuzzTarget SpecTarget();
FuzzTarget ChunksTarget();
FuzzTarget EnvelopeTarget();
FuzzTarget InterchangeTarget();
FuzzTarget SafetensorsTarget();
FuzzTarget NpyTarget();
FuzzTarget GgufTarget();
FuzzTarget OnnxTarget();

std::vector<FuzzTarget> AllFuzzTargets();

// Ends the process and says so unless `holds`.
void Require(bool holds, absl::string_view promise);

// Choices that are made from an input. Not thread-safe.
class ByteSource {
 public:
  explicit ByteSource(absl::Span<const uint8_t> bytes) : rest_(bytes) {}

  // The next byte; 0 behind the last.
  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const uint8_t byte = rest_.front();
    rest_.remove_prefix(1);
    return byte;
  }
  // The next `size` bytes, or what is left.
  absl::Span<const uint8_t> Take(size_t size) {
    const absl::Span<const uint8_t> taken =
        rest_.first(std::min(size, rest_.size()));
    rest_.remove_prefix(taken.size());
    return taken;
  }
  bool empty() const { return rest_.empty(); }
  absl::Span<const uint8_t> rest() const { return rest_; }

 private:
  absl::Span<const uint8_t> rest_;
};

// `count` float32 of all kinds, the same for the same seed: about `scale`, far
// from it, ties, subnormal numbers, NaN and infinities.
std::vector<float> MakeFloats(int64_t count, float scale, uint64_t seed);

// A seed of MakeFloats that depends on every byte.
uint64_t Fingerprint(absl::Span<const uint8_t> bytes);

// A file without a name that has `bytes`, for readers that take a path.
class MemoryFile {
 public:
  explicit MemoryFile(absl::Span<const uint8_t> bytes);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  const std::string& path() const { return path_; }

 private:
  int fd_;
  std::string path_;
};

}  // namespace quantd::fuzz

#endif  // QUANTD_TESTS_FUZZ_FUZZ_TARGET_H_
