// The side of compensated_rounding_bench.py that is quantd's.
//
//   compensated_rounding_bench GRAM WEIGHT SCALES COLUMNS GROUP THREADS CODES
//
// GRAM has float64 elements [columns, columns], WEIGHT float32 [rows, columns]
// and SCALES float32 [rows, columns / group]. Waits for lines on the standard
// input, each the name of a SIMD target or "auto". Makes int4 codes of the
// weight, writes them to CODES, and answers
//
//   FACTOR_SECONDS FACTOR_CPU ROUNDING_SECONDS ROUNDING_CPU
//
// CPU seconds are those of all threads.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/cpu.h"
#include "core/formats/number_format.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/compensated_rounding.h"
#include "core/quantize/compensation_factor.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {
namespace {

// A word of the answer each.
struct Times {
  double seconds;
  double cpu;

  static Times Now() {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return {std::chrono::duration<double>(
                std::chrono::steady_clock::now().time_since_epoch())
                .count(),
            static_cast<double>(time.tv_sec) +
                static_cast<double>(time.tv_nsec) * 1e-9};
  }
};

std::ostream& operator<<(std::ostream& out, const Times& times) {
  return out << times.seconds << " " << times.cpu;
}

Times operator-(const Times& a, const Times& b) {
  return {a.seconds - b.seconds, a.cpu - b.cpu};
}

template <typename T>
std::vector<T> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<T> elements(static_cast<size_t>(file.tellg()) / sizeof(T));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(elements.data()),
            static_cast<std::streamsize>(elements.size() * sizeof(T)));
  return elements;
}

void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << status << "\n";
  std::exit(1);
}

}  // namespace

int Run(const std::vector<std::string>& words) {
  const std::vector<double> gram = ReadFile<double>(words[0]);
  const std::vector<float> weight = ReadFile<float>(words[1]);
  const int64_t columns = std::stoll(words[3]);
  const int64_t group = std::stoll(words[4]);
  const auto rows = static_cast<int64_t>(weight.size()) / columns;
  // The calling thread works as well.
  const int threads = std::stoi(words[5]);
  ThreadPool pool(threads - 1 > 0 ? threads - 1 : 1);
  ThreadPool* const workers = threads > 1 ? &pool : nullptr;
  const FormatInfo& format = *FindFormatByName("int4");
  Encoding encoding;
  encoding.format = format.format;
  encoding.block_size = {1, group};
  encoding.scale = ReadFile<float>(words[2]);
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  const BlockLayout layout =
      *BlockLayout::Create({rows, columns}, encoding.block_size);
  std::vector<uint8_t> codes(format.SizeBytes(rows * columns));
  std::vector<double> output_errors(rows);
  for (std::string target; std::cin >> target;) {
    Require(SetSimdTarget(target));
    std::vector<double> overwritten = gram;
    const Times begin = Times::Now();
    const auto factor = CompensationFactor::Create(
        columns, {GramBlock{columns, absl::MakeSpan(overwritten)}}, {},
        workers);
    Require(factor.status());
    const Times between = Times::Now();
    QuantizeCounts counts;
    Require(QuantizeCompensated(
        *factor, encoding, layout, ElementType::kFloat32, NanPolicy::kDefault,
        0, rows, reinterpret_cast<const uint8_t*>(weight.data()), codes.data(),
        output_errors.data(), &counts, workers));
    const Times end = Times::Now();
    std::ofstream(words[6], std::ios::binary)
        .write(reinterpret_cast<const char*>(codes.data()),
               static_cast<std::streamsize>(codes.size()));
    std::cout << between - begin << " " << end - between << std::endl;
  }
  return 0;
}

}  // namespace quantd::core

int main(int argc, char** argv) {
  if (argc != 8) {
    std::cerr << "see the top of compensated_rounding_bench.cc\n";
    return 1;
  }
  return quantd::core::Run({argv + 1, argv + argc});
}
