// One target as a fuzzer. With --write-seeds=DIRECTORY it only writes the
// target's seeds there.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "google/protobuf/stubs/logging.h"
#include "tests/fuzz/fuzz_target.h"

namespace quantd::fuzz {
namespace {

const FuzzTarget& Target() {
  static const FuzzTarget target = [] {
    FuzzTarget found{};
    for (const FuzzTarget& each : AllFuzzTargets()) {
      if (each.name == QUANTD_FUZZ_TARGET) found = each;
    }
    return found;
  }();
  return target;
}

void WriteSeeds(absl::string_view directory) {
  int n = 0;
  for (const std::string& seed : Target().seeds()) {
    std::ofstream file(absl::StrCat(directory, "/seed-", n++),
                       std::ios::binary);
    file << seed;
    file.close();
    Require(file.good(), "seeds can be written");
  }
}

}  // namespace
}  // namespace quantd::fuzz

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  // protobuf logs what it refuses.
  google::protobuf::SetLogHandler(nullptr);
  for (int i = 1; i < *argc; ++i) {
    absl::string_view argument = (*argv)[i];
    if (absl::ConsumePrefix(&argument, "--write-seeds=")) {
      quantd::fuzz::WriteSeeds(argument);
      std::exit(0);
    }
  }
  return 0;
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size,
                                          size_t max_size, unsigned int seed) {
  std::mt19937_64 random(seed);
  if (random() % 2 == 0) {
    const std::string mutated = quantd::fuzz::MutateMessageOf(
        quantd::fuzz::Target(), {data, size}, random);
    if (mutated.size() <= max_size &&
        mutated != std::string(data, data + size)) {
      std::copy(mutated.begin(), mutated.end(), data);
      return mutated.size();
    }
  }
  return LLVMFuzzerMutate(data, size, max_size);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  quantd::fuzz::Target().run({data, size});
  return 0;
}
