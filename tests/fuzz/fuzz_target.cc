#include "tests/fuzz/fuzz_target.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/message.h"
#include "tests/fuzz/message_mutator.h"

namespace quantd::fuzz {

std::vector<FuzzTarget> AllFuzzTargets() {
  return {StatisticsTarget(),  ContributionTarget(), EncodingTarget(),
          SpecTarget(),        ChunksTarget(),       EnvelopeTarget(),
          InterchangeTarget(), SafetensorsTarget(),  NpyTarget(),
          GgufTarget(),        OnnxTarget()};
}

std::string MutateMessageOf(const FuzzTarget& target,
                            absl::Span<const uint8_t> input,
                            std::mt19937_64& random) {
  std::string mutated(input.begin(), input.end());
  if (target.prototype == nullptr) return mutated;
  const size_t at = std::min(target.message_at(input), input.size());
  const std::unique_ptr<google::protobuf::Message> message(
      target.prototype->New());
  if (!message->ParseFromString(mutated.substr(at))) return mutated;
  MutateMessage(message.get(), random);
  mutated.resize(at);
  return mutated + message->SerializeAsString();
}

void Require(bool holds, absl::string_view promise) {
  if (holds) return;
  std::fprintf(stderr, "broken: %.*s\n", static_cast<int>(promise.size()),
               promise.data());
  std::abort();
}

std::vector<float> MakeFloats(int64_t count, float scale, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values(count);
  for (float& value : values) {
    const auto bits = static_cast<uint32_t>(random() >> 32);
    const int small = static_cast<int>(bits % 512) - 256;
    switch (bits >> 28) {
      case 0:
        std::memcpy(&value, &bits, sizeof(value));
        break;
      case 1:
        value = static_cast<float>(small) * 1e-44f;
        break;
      case 2:
        value = 0;
        break;
      case 3:
        value = (static_cast<float>(small) + 0.5f) * scale;
        break;
      case 4:
        value = static_cast<float>(small) * 1000 * scale;
        break;
      default:
        value = static_cast<float>(small) * 0.37f * scale;
    }
  }
  return values;
}

uint64_t Fingerprint(absl::Span<const uint8_t> bytes) {
  // FNV-1a.
  uint64_t hash = 0xCBF29CE484222325;
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001B3;
  return hash;
}

MemoryFile::MemoryFile(absl::Span<const uint8_t> bytes)
    : fd_(memfd_create("fuzz", MFD_CLOEXEC)),
      path_(absl::StrCat("/proc/self/fd/", fd_)) {
  Require(fd_ >= 0, "memfd_create works");
  while (!bytes.empty()) {
    const ssize_t written = write(fd_, bytes.data(), bytes.size());
    Require(written > 0, "a file in memory can be written");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

MemoryFile::~MemoryFile() { close(fd_); }

}  // namespace quantd::fuzz
