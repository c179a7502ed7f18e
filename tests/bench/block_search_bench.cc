// The sides of block_search_bench.py that are quantd's, on one thread.
//
//   block_search_bench FILE   waits for lines on the standard input
//   direct|histogram FORMAT METHOD SYMMETRY GROUP
//                                     answers SECONDS SQUARED_ERROR
//
// Seconds are of the processor. FILE has float32 elements. "direct" searches
// groups on their elements, "histogram" on the histograms of all groups; both
// end with codes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "core/calibrate/block_quantizer.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/encoding_spec.h"
#include "core/dequantize/dequantize.h"
#include "core/formats/number_format.h"
#include "core/quantize/quantize.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"

namespace quantd::core {
namespace {

constexpr ElementType kType = ElementType::kFloat32;
constexpr int kMantissaBits = 7;

const std::map<std::string, CalibrationMethod> kMethods = {
    {"minmax", CalibrationMethod::kMinMax},
    {"percentile", CalibrationMethod::kPercentile},
    {"mse", CalibrationMethod::kMse},
    {"sqnr", CalibrationMethod::kSqnr},
    {"entropy", CalibrationMethod::kEntropy}};

struct Side {
  const std::vector<float>& data;
  EncodingSpec spec;
  BlockLayout layout;
  // Of outer blocks, where scales need them.
  std::vector<float> outer_maximum;
  std::vector<uint8_t> codes;

  int64_t count() const { return static_cast<int64_t>(data.size()); }
  const uint8_t* bytes() const {
    return reinterpret_cast<const uint8_t*>(data.data());
  }

  Encoding Direct() {
    const auto quantizer = *BlockQuantizer::Create(
        spec, layout, kType, NanPolicy::kDefault, outer_maximum);
    quantizer->Add(0, count(), bytes(), codes.data(), nullptr).IgnoreError();
    return quantizer->encoding();
  }

  Encoding ByHistograms() {
    TensorStatistics statistics(layout.scale_count(), kMantissaBits);
    statistics.Update(layout, kType, 0, count(), bytes(), nullptr);
    Encoding encoding =
        Calibrate(spec, layout, statistics, {}, nullptr)->encoding;
    QuantizeCounts counts;
    Quantize(encoding, layout, kType, NanPolicy::kDefault, 0, count(), bytes(),
             codes.data(), &counts, nullptr)
        .IgnoreError();
    return encoding;
  }

  double SquaredError(const Encoding& encoding) const {
    std::vector<float> restored(data.size());
    Dequantize(encoding, layout, kType, 0, count(), codes.data(),
               reinterpret_cast<uint8_t*>(restored.data()), nullptr);
    double sum = 0;
    for (size_t i = 0; i < data.size(); ++i) {
      const double distance = double{data[i]} - restored[i];
      sum += distance * distance;
    }
    return sum;
  }
};

int Main(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)),
                          std::istreambuf_iterator<char>());
  std::vector<float> data(bytes.size() / sizeof(float));
  std::copy_n(bytes.data(), data.size() * sizeof(float),
              reinterpret_cast<char*>(data.data()));
  const auto count = static_cast<int64_t>(data.size());
  std::string side, format, method, symmetry;
  int64_t group = 0;
  while (std::cin >> side >> format >> method >> symmetry >> group) {
    EncodingSpec spec;
    spec.format = FindFormatByName(format)->format;
    spec.method = kMethods.at(method);
    if (symmetry == "asymmetric") spec.symmetry = Symmetry::kAsymmetric;
    spec.block_size = {group};
    spec = *ResolveSpec(spec, {count});
    Side run{
        data, spec, *BlockLayout::Create({count}, spec.block_size), {}, {}};
    run.codes.resize(
        static_cast<size_t>(FindFormat(run.spec.format)->SizeBytes(count)));
    if (HasOuterScales(EffectiveScaleType(spec))) {
      const BlockLayout outer =
          *OuterLayout(EncodingWithoutScales(spec, run.layout, false),
                       run.layout.scale_shape());
      float most = 0;
      for (const float x : data) most = std::max(most, std::fabs(x));
      run.outer_maximum.assign(static_cast<size_t>(outer.scale_count()), most);
    }
    const std::clock_t begin = std::clock();
    const Encoding encoding =
        side == "direct" ? run.Direct() : run.ByHistograms();
    const std::clock_t end = std::clock();
    std::cout.precision(12);
    std::cout << static_cast<double>(end - begin) / CLOCKS_PER_SEC << ' '
              << run.SquaredError(encoding) << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace quantd::core

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: block_search_bench FILE\n";
    return 2;
  }
  return quantd::core::Main(argv[1]);
}
