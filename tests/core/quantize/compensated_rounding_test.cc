#include "core/quantize/compensated_rounding.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "core/cpu.h"
#include "core/dequantize/dequantize.h"
#include "core/errors.h"
#include "core/formats/packing.h"
#include "core/quantize/compensated_rounding_kernel.h"
#include "core/statistics/gram_state.h"
#include "gtest/gtest.h"
#include "tests/core/formats/format_test_util.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::compensated_rounding_test {
namespace {

using Matrix = std::vector<double>;

constexpr uint8_t kCanary = 0xA5;

// X^T X of inputs [tokens, size] that are mixtures of `size` / 3 signals, each
// feature with a power of its own.
Matrix MakeGram(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, 1);
  const int64_t signals = std::max<int64_t>(size / 3, 1);
  Matrix mix(signals * size);
  for (double& m : mix) m = normal(random);
  Matrix power(size);
  for (double& p : power) p = std::exp(normal(random));
  Matrix gram(size * size);
  for (int64_t token = 0; token < 2 * size; ++token) {
    Matrix x(size);
    for (int64_t s = 0; s < signals; ++s) {
      const double signal = normal(random);
      for (int64_t i = 0; i < size; ++i) x[i] += signal * mix[s * size + i];
    }
    for (int64_t i = 0; i < size; ++i) {
      x[i] = (x[i] + 0.3 * normal(random)) * power[i];
    }
    for (int64_t i = 0; i < size; ++i) {
      for (int64_t j = 0; j < size; ++j) gram[i * size + j] += x[i] * x[j];
    }
  }
  return gram;
}

absl::StatusOr<CompensationFactor> Factor(Matrix gram,
                                          CompensationOptions options = {},
                                          ThreadPool* pool = nullptr) {
  const auto size = static_cast<int64_t>(
      std::lround(std::sqrt(static_cast<double>(gram.size()))));
  return CompensationFactor::Create(
      size, {GramBlock{size, absl::MakeSpan(gram)}}, options, pool);
}

bool operator==(const QuantizeCounts& a, const QuantizeCounts& b) {
  return a.total == b.total && a.clipped_low == b.clipped_low &&
         a.clipped_high == b.clipped_high && a.nan == b.nan &&
         a.positive_infinity == b.positive_infinity &&
         a.negative_infinity == b.negative_infinity;
}

struct Result {
  std::vector<uint8_t> codes;
  std::vector<double> output_errors;
  QuantizeCounts counts;
};

// A layer, quantized as it is asked for.
struct Layer {
  int64_t rows() const {
    return layout.element_count() / std::max<int64_t>(factor.columns(), 1);
  }
  const FormatInfo& format() const { return *FindFormat(encoding.format); }

  // In bands of so many rows, from odd addresses; nothing past the codes is
  // touched.
  Result Run(int64_t band_rows, ThreadPool* pool = nullptr,
             NanPolicy policy = NanPolicy::kDefault) const {
    Result result;
    for (int64_t row = 0; row < rows(); row += band_rows) {
      const int64_t count =
          std::min(band_rows, rows() - row) * factor.columns();
      const int64_t bytes = count * ElementSizeBytes(type);
      std::vector<uint8_t> in(bytes + 1);
      std::memcpy(
          in.data() + 1,
          reals.data() + row * factor.columns() * ElementSizeBytes(type),
          bytes);
      const int64_t size = format().SizeBytes(count);
      std::vector<uint8_t> out(size + 65, kCanary);
      std::vector<double> output_errors(count / factor.columns());
      EXPECT_TRUE(QuantizeCompensated(
                      factor, encoding, layout, type, policy, row,
                      count / factor.columns(), in.data() + 1, out.data() + 1,
                      output_errors.data(), &result.counts, pool)
                      .ok());
      for (const double error : output_errors) {
        // NaN does not equal itself.
        result.output_errors.push_back(std::isnan(error) ? -1 : error);
      }
      EXPECT_EQ(out[0], kCanary);
      EXPECT_EQ(std::count(out.end() - 64, out.end(), kCanary), 64);
      result.codes.insert(result.codes.end(), out.begin() + 1,
                          out.begin() + 1 + size);
    }
    return result;
  }

  CompensationFactor factor;
  Encoding encoding;
  BlockLayout layout;
  ElementType type;
  std::vector<uint8_t> reals;
};

// --- The published algorithm -------------------------------------------------

// What a weight becomes: float32 numbers.
struct NaiveLayer {
  int64_t rows;
  int64_t columns;
  int64_t group;
  int32_t qmax;
  std::vector<float> weight;
  std::vector<float> scale;

  double Round(int64_t row, int64_t column, double x) const {
    const float s = scale[row * (columns / group) + column / group];
    return double{s * static_cast<float>(NaiveCode(
                          ElementType::kFloat32, double{static_cast<float>(x)},
                          s, 0, -qmax - 1, qmax))};
  }
  double OutputError(const Matrix& gram, const Matrix& quantized) const {
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) {
      Matrix error(columns);
      for (int64_t i = 0; i < columns; ++i) {
        error[i] = double{weight[r * columns + i]} - quantized[r * columns + i];
      }
      for (int64_t i = 0; i < columns; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          sum += error[i] * gram[i * columns + j] * error[j];
        }
      }
    }
    return sum;
  }
};

// Upper triangular R with R^T R = A.
Matrix NaiveCholesky(const Matrix& a, int64_t n) {
  Matrix r(n * n);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = j; i < n; ++i) {
      double sum = a[j * n + i];
      for (int64_t k = 0; k < j; ++k) sum -= r[k * n + j] * r[k * n + i];
      r[j * n + i] = i == j ? std::sqrt(sum) : sum / r[j * n + j];
    }
  }
  return r;
}

// By Gauss and Jordan; A is positive definite and needs no pivots.
Matrix NaiveInverse(Matrix a, int64_t n) {
  Matrix inverse(n * n);
  for (int64_t i = 0; i < n; ++i) inverse[i * n + i] = 1;
  for (int64_t k = 0; k < n; ++k) {
    const double pivot = a[k * n + k];
    for (int64_t i = 0; i < n; ++i) {
      a[k * n + i] /= pivot;
      inverse[k * n + i] /= pivot;
    }
    for (int64_t j = 0; j < n; ++j) {
      const double factor = a[j * n + k];
      if (j == k) continue;
      for (int64_t i = 0; i < n; ++i) {
        a[j * n + i] -= factor * a[k * n + i];
        inverse[j * n + i] -= factor * inverse[k * n + i];
      }
    }
  }
  return inverse;
}

// OPTQ as it was published (arXiv 2210.17323, algorithm 1, without its blocks):
// Cholesky's factor of the inverse, and one column after the other.
Matrix NaiveOptq(const NaiveLayer& layer, const Matrix& gram, double damping,
                 bool by_activation) {
  const int64_t n = layer.columns;
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  double mean = 0;
  for (int64_t i = 0; i < n; ++i) mean += gram[i * n + i] / double(n);
  if (by_activation) {
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return gram[a * n + a] > gram[b * n + b];
    });
  }
  Matrix h(n * n);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < n; ++i) {
      h[j * n + i] =
          gram[order[j] * n + order[i]] + (i == j ? damping * mean : 0);
    }
  }
  const Matrix u = NaiveCholesky(NaiveInverse(h, n), n);
  Matrix quantized(layer.rows * n);
  for (int64_t r = 0; r < layer.rows; ++r) {
    Matrix w(n);
    for (int64_t k = 0; k < n; ++k) w[k] = layer.weight[r * n + order[k]];
    for (int64_t k = 0; k < n; ++k) {
      const double q = layer.Round(r, order[k], w[k]);
      quantized[r * n + order[k]] = q;
      const double error = (w[k] - q) / u[k * n + k];
      for (int64_t i = k; i < n; ++i) w[i] -= error * u[k * n + i];
    }
  }
  return quantized;
}

TEST(CompensatedRoundingTest, LosesAtTheOutputWhatThePublishedAlgorithmDoes) {
  std::mt19937 random(1);
  double ours_of_nearest = 0;
  constexpr int kLayers = 50;
  for (int trial = 0; trial < kLayers; ++trial) {
    SCOPED_TRACE(trial);
    NaiveLayer layer;
    layer.group = 8 << (trial % 3);
    layer.columns = layer.group * (1 + random() % (96 / layer.group));
    layer.rows = 4 + static_cast<int64_t>(random() % 30);
    const char* name =
        std::vector<const char*>{"int2", "int3", "int4", "int8"}[trial % 4];
    const FormatInfo& format = *FindFormatByName(name);
    layer.qmax = format.qmax;
    const int64_t count = layer.rows * layer.columns;
    std::normal_distribution<float> normal(0, 1);
    for (int64_t i = 0; i < count; ++i) {
      layer.weight.push_back(normal(random));
      if (i % layer.group == layer.group - 1) {
        const auto largest = std::max_element(
            layer.weight.end() - layer.group, layer.weight.end(),
            [](float a, float b) { return std::fabs(a) < std::fabs(b); });
        layer.scale.push_back(std::fabs(*largest) /
                              (static_cast<float>(format.qmax) + 0.5f));
      }
    }
    const Matrix gram = MakeGram(layer.columns, trial);
    const bool by_activation = trial % 2 == 0;
    const Matrix naive = NaiveOptq(layer, gram, 0.01, by_activation);

    const LayoutCase layout{{layer.rows, layer.columns}, {1, layer.group}};
    Encoding encoding;
    encoding.format = format.format;
    encoding.block_size = layout.block;
    encoding.scale = layer.scale;
    encoding.qmin = format.qmin;
    encoding.qmax = format.qmax;
    std::vector<uint8_t> reals(count * 4);
    std::memcpy(reals.data(), layer.weight.data(), reals.size());
    const Layer ours{
        *Factor(gram, {0.01, by_activation ? ColumnOrder::kFallingDiagonal
                                           : ColumnOrder::kNatural}),
        encoding, layout.Layout(), ElementType::kFloat32, reals};
    const Result result = ours.Run(layer.rows);
    const auto dequantized = [&](const std::vector<uint8_t>& codes) {
      std::vector<float> floats(count);
      Dequantize(encoding, ours.layout, ours.type, 0, count, codes.data(),
                 reinterpret_cast<uint8_t*>(floats.data()), nullptr);
      return Matrix(floats.begin(), floats.end());
    };
    std::vector<uint8_t> nearest(format.SizeBytes(count));
    QuantizeCounts counts;
    ASSERT_TRUE(Quantize(encoding, ours.layout, ours.type, NanPolicy::kDefault,
                         0, count, reals.data(), nearest.data(), &counts,
                         nullptr)
                    .ok());
    const double error = layer.OutputError(gram, dequantized(result.codes));
    const double naive_error = layer.OutputError(gram, naive);
    EXPECT_NEAR(error / naive_error, 1, 0.01);
    const double told = std::accumulate(result.output_errors.begin(),
                                        result.output_errors.end(), 0.0);
    EXPECT_NEAR(told / error, 1, 1e-4);
    ours_of_nearest += error / layer.OutputError(gram, dequantized(nearest));
  }
  EXPECT_LT(ours_of_nearest / kLayers, 0.3);
}

// --- The same bits -----------------------------------------------------------

// Bands of so many rows begin with whole bytes of any codes.
constexpr int64_t kBandRows = 4;

// Everything that there is of a factor.
std::vector<uint8_t> Bytes(const CompensationFactor& factor) {
  std::vector<uint8_t> bytes;
  const auto append = [&](const void* data, size_t size) {
    const auto* begin = static_cast<const uint8_t*>(data);
    bytes.insert(bytes.end(), begin, begin + size);
  };
  int64_t floats = 0;
  for (const CompensationFactor::Block& block : factor.blocks()) {
    floats += PanelOffset(PanelCount(block.live));
  }
  append(factor.panels(), floats * sizeof(float));
  append(factor.order().data(), factor.order().size() * sizeof(int32_t));
  append(factor.position().data(), factor.position().size() * sizeof(int32_t));
  return bytes;
}

TEST(CompensationFactorTest, IsTheSameOnAllTargetsAndThreads) {
  ThreadPool pool(3);
  // Below and above the sizes that kernels work with at a time.
  for (const int64_t size : {1, 2, 7, 8, 9, 24, 25, 127, 128, 129, 151, 331}) {
    SCOPED_TRACE(size);
    const Matrix gram = MakeGram(size, static_cast<uint32_t>(size));
    ASSERT_TRUE(SetSimdTarget("scalar").ok());
    const std::vector<uint8_t> expected = Bytes(*Factor(gram));
    ForEachSimdTarget([&] {
      EXPECT_EQ(Bytes(*Factor(gram)), expected);
      EXPECT_EQ(Bytes(*Factor(gram, {}, &pool)), expected);
    });
  }
}

TEST(CompensatedRoundingTest, GivesTheSameCodesOnAllTargetsThreadsAndBands) {
  ThreadPool pool(3);
  const std::vector<LayoutCase> layouts = {
      {{50, 21}, {1, 0}},      // channel, odd rows, more than a task of them
      {{9, 64}, {1, 16}},      // group
      {{7, 39}, {1, 16}},      // group, ragged last
      {{26, 20}, {}},          // per tensor
      {{13, 40}, {0, 1}},      // channel on the last axis
      {{11, 6, 2, 3}, {}},     // convolution
      {{8, 5, 7}, {3, 2, 4}},  // blocks
      {{49, 1}, {1, 0}},       // one feature
  };
  for (const LayoutCase& layout_case : layouts) {
    SCOPED_TRACE(layout_case.Name());
    const BlockLayout layout = layout_case.Layout();
    const int64_t columns = layout.element_count() / layout_case.shape[0];
    Matrix gram = MakeGram(columns, 3);
    for (int64_t dead = 4; dead < columns; dead += 7) {
      for (int64_t i = 0; i < columns; ++i) {
        gram[dead * columns + i] = gram[i * columns + dead] = 0;
      }
    }
    const CompensationFactor factor = *Factor(gram);
    for (const FormatInfo& format : AllFormats()) {
      SCOPED_TRACE(format.name);
      const double scale = 0.02 * (1 << (8 - std::min(format.bits, 8)));
      std::vector<Encoding> encodings = {
          MakeFormatEncoding(format, layout, scale, 5)};
      if (format.kind == CodeKind::kInteger && !IsWideInteger(format) &&
          format.scale_type == ScaleType::kDefault) {
        encodings.push_back(MakeRealEncoding(format, layout, scale, 7));
      }
      for (const Encoding& encoding : encodings) {
        for (const ElementType type : kAllElementTypes) {
          for (const bool specials : {true, false}) {
            if (!specials && type != ElementType::kFloat32) continue;
            const Layer layer{factor, encoding, layout, type,
                              MakeReals(type, layout.element_count(),
                                        scale * 0.1, specials, 11)};
            ASSERT_TRUE(SetSimdTarget("scalar").ok());
            const NanPolicy policy = static_cast<NanPolicy>(
                specials ? static_cast<int>(NanPolicy::kQmin) : 0);
            const Result expected = layer.Run(layer.rows(), nullptr, policy);
            ForEachSimdTarget([&] {
              for (const Result& result :
                   {layer.Run(layer.rows(), &pool, policy),
                    layer.Run(kBandRows, nullptr, policy)}) {
                EXPECT_EQ(result.codes, expected.codes);
                EXPECT_EQ(result.output_errors, expected.output_errors);
                EXPECT_TRUE(result.counts == expected.counts);
              }
            });
          }
        }
      }
    }
  }
}

TEST(CompensatedRoundingTest, TakesTheScalesOfItsRowsAlone) {
  const LayoutCase layout_case{{40, 24}, {2, 8}};
  const BlockLayout layout = layout_case.Layout();
  const FormatInfo& format = *FindFormatByName("int4");
  const Layer layer{*Factor(MakeGram(24, 2)),
                    MakeEncoding(format, layout, 1, true, 3), layout,
                    ElementType::kFloat32,
                    MakeReals(ElementType::kFloat32, 40 * 24, 0.1, false, 4)};
  const Result expected = layer.Run(layer.rows());
  for (const int64_t row : {0, 10, 24}) {
    const int64_t count = 16 * 24;
    const BlockLayout::ScaleRange scales = layout.ScaleBounds(row * 24, count);
    Encoding window = layer.encoding;
    const auto cut = [&](auto* all) {
      all->erase(all->begin() + scales.end, all->end());
      all->erase(all->begin(), all->begin() + scales.first);
    };
    cut(&window.scale);
    cut(&window.zero_point);
    std::vector<uint8_t> out(count / 2);
    std::vector<double> output_errors(16);
    QuantizeCounts counts;
    ASSERT_TRUE(
        QuantizeCompensated(layer.factor, window, layout.Window(scales.first),
                            layer.type, NanPolicy::kDefault, row, 16,
                            layer.reals.data() + row * 24 * 4, out.data(),
                            output_errors.data(), &counts, nullptr)
            .ok());
    EXPECT_TRUE(std::equal(out.begin(), out.end(),
                           expected.codes.begin() + row * 24 / 2));
  }
}

// --- What is rounded to nearest ----------------------------------------------

TEST(CompensatedRoundingTest, IsQuantizeWhereNoFeaturesAreCorrelated) {
  const LayoutCase layout_case{{50, 30}, {1, 16}};
  const BlockLayout layout = layout_case.Layout();
  for (const bool is_dead : {false, true}) {
    Matrix gram(30 * 30);
    for (int64_t i = 0; i < 30; ++i) {
      gram[i * 30 + i] = is_dead ? 0 : 1 + static_cast<double>(i % 4);
    }
    const CompensationFactor factor = *Factor(gram);
    for (const FormatInfo& format : AllFormats()) {
      SCOPED_TRACE(format.name);
      const double scale = 0.02 * (1 << (8 - std::min(format.bits, 8)));
      const Encoding encoding = MakeFormatEncoding(format, layout, scale, 5);
      for (const ElementType type : kAllElementTypes) {
        const Layer layer{
            factor, encoding, layout, type,
            MakeReals(type, layout.element_count(), scale, true, 2)};
        for (const NanPolicy policy :
             {NanPolicy::kDefault, NanPolicy::kZeroPoint, NanPolicy::kQmin}) {
          Result expected;
          expected.codes.resize(format.SizeBytes(layout.element_count()));
          ASSERT_TRUE(Quantize(encoding, layout, type, policy, 0,
                               layout.element_count(), layer.reals.data(),
                               expected.codes.data(), &expected.counts, nullptr)
                          .ok());
          const Result result = layer.Run(layer.rows(), nullptr, policy);
          EXPECT_EQ(result.codes, expected.codes);
          EXPECT_TRUE(result.counts == expected.counts);
        }
      }
    }
  }
}

// A float32 weight [1, size] in int8 with scale 1.
Layer Int8Layer(CompensationFactor factor, const std::vector<float>& weight) {
  const int64_t size = factor.columns();
  const LayoutCase layout{{static_cast<int64_t>(weight.size()) / size, size},
                          {}};
  const FormatInfo& format = *FindFormatByName("int8");
  Encoding encoding;
  encoding.format = format.format;
  encoding.scale = {1};
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  std::vector<uint8_t> reals(weight.size() * 4);
  std::memcpy(reals.data(), weight.data(), reals.size());
  return {std::move(factor), encoding, layout.Layout(), ElementType::kFloat32,
          reals};
}

std::vector<int> Codes(const Layer& layer) {
  std::vector<int> codes;
  for (const uint8_t code : layer.Run(layer.rows()).codes) {
    codes.push_back(static_cast<int8_t>(code));
  }
  return codes;
}

TEST(CompensatedRoundingTest, RoundsThePowerfulFeatureFirstUnlessToldNot) {
  // U_01 = H_01 / H_11 in the order of rounding.
  const Matrix gram = {1, 1.5, 1.5, 4};
  const std::vector<float> weight = {0.3f, 10.4f};
  // 10.4 is rounded to 10, then .3 + .4 * 1.5 = .9.
  EXPECT_EQ(Codes(Int8Layer(*Factor(gram, {0}), weight)),
            (std::vector<int>{1, 10}));
  // .3 is rounded to 0, then 10.4 + .3 * .375 = 10.5125.
  EXPECT_EQ(Codes(Int8Layer(*Factor(gram, {0, ColumnOrder::kNatural}), weight)),
            (std::vector<int>{0, 11}));
  // Damping adds 2.5: U_01 is 1.5 / 3.5 and 1.5 / 6.5.
  EXPECT_EQ(Codes(Int8Layer(*Factor(gram, {1}), weight)),
            (std::vector<int>{0, 10}));
  EXPECT_EQ(Codes(Int8Layer(*Factor(gram, {1, ColumnOrder::kNatural}), weight)),
            (std::vector<int>{0, 10}));
}

TEST(CompensatedRoundingTest, TakesDeadFeaturesAsTheyAre) {
  // The same with a dead feature between the two.
  const Matrix gram = {1, 0, 1.5, 0, 0, 0, 1.5, 0, 4};
  for (const ColumnOrder order :
       {ColumnOrder::kFallingDiagonal, ColumnOrder::kNatural}) {
    const CompensationFactor factor = *Factor(gram, {0, order});
    EXPECT_EQ(factor.blocks()[0].live, 2);
    const std::vector<int> codes =
        Codes(Int8Layer(factor, {0.3f, 5.4f, 10.4f}));
    EXPECT_EQ(codes, order == ColumnOrder::kNatural
                         ? (std::vector<int>{0, 5, 11})
                         : (std::vector<int>{1, 5, 10}));
  }
}

TEST(CompensatedRoundingTest, KeepsBlocksOfFeaturesApart) {
  constexpr int64_t kSizes[] = {19, 1, 40};
  constexpr int64_t kColumns = 60;
  constexpr int64_t kRows = 52;
  constexpr double kDamping = 0.01;
  std::vector<Matrix> parts;
  std::vector<GramBlock> blocks;
  Matrix whole(kColumns * kColumns);
  int64_t first = 0;
  for (const int64_t size : kSizes) {
    parts.push_back(MakeGram(size, static_cast<uint32_t>(size)));
    for (int64_t j = 0; j < size; ++j) {
      for (int64_t i = 0; i < size; ++i) {
        whole[(first + j) * kColumns + first + i] = parts.back()[j * size + i];
      }
    }
    first += size;
  }
  for (size_t b = 0; b < parts.size(); ++b) {
    blocks.push_back({kSizes[b], absl::MakeSpan(parts[b])});
  }
  std::mt19937 random(4);
  std::normal_distribution<float> normal(0, 20);
  std::vector<float> weight(kRows * kColumns);
  for (float& w : weight) w = normal(random);
  const CompensationFactor factor =
      *CompensationFactor::Create(kColumns, blocks, {kDamping}, nullptr);
  const std::vector<int64_t> sizes(std::begin(kSizes), std::end(kSizes));
  EXPECT_EQ(CompensationFactor::MemoryBytes(sizes), factor.memory_bytes());
  EXPECT_GT(CompensatedTaskBytes(kColumns, kSizes[0]),
            kPanelWidth<float> * kColumns);

  EXPECT_NE(Codes(Int8Layer(factor, weight)),
            Codes(Int8Layer(*Factor(whole, {kDamping}), weight)));
  // Zeros between the features change no bit. Creating has overwritten the
  // matrices.
  for (size_t b = 0; b < parts.size(); ++b) {
    const Matrix again = MakeGram(kSizes[b], static_cast<uint32_t>(kSizes[b]));
    std::copy(again.begin(), again.end(), parts[b].begin());
  }
  EXPECT_EQ(
      Codes(Int8Layer(
          *CompensationFactor::Create(kColumns, blocks, {0}, nullptr), weight)),
      Codes(Int8Layer(*Factor(whole, {0}), weight)));
}

TEST(CompensatedRoundingTest, TakesNoErrorFromWhatIsNotFinite) {
  constexpr int64_t kColumns = 33;
  constexpr int64_t kRows = 50;
  const CompensationFactor factor = *Factor(MakeGram(kColumns, 8));
  std::mt19937 random(4);
  std::normal_distribution<float> normal(0, 20);
  std::vector<float> weight(kRows * kColumns);
  for (float& w : weight) w = normal(random);
  // The column that is rounded first: a code has no error.
  const int64_t first = factor.order()[0];
  for (int64_t row = 0; row < kRows; ++row) weight[row * kColumns + first] = 5;
  const std::vector<int> expected = Codes(Int8Layer(factor, weight));
  const float infinity = std::numeric_limits<float>::infinity();
  const std::pair<float, int> cases[] = {
      {std::nanf(""), 0}, {infinity, 127}, {-infinity, -128}, {5, 5}};
  for (int64_t row = 0; row < kRows; ++row) {
    weight[row * kColumns + first] = cases[row % 4].first;
  }
  const Layer layer = Int8Layer(factor, weight);
  ForEachSimdTarget([&] {
    const std::vector<int> codes = Codes(layer);
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      ASSERT_EQ(codes[i], i % kColumns == first ? cases[i / kColumns % 4].second
                                                : expected[i]);
    }
    EXPECT_EQ(layer.Run(kRows).counts.nan, (kRows + 3) / 4);
    std::vector<uint8_t> out(kRows * kColumns);
    std::vector<double> output_errors(kRows);
    QuantizeCounts counts;
    const absl::Status status = QuantizeCompensated(
        layer.factor, layer.encoding, layer.layout, layer.type,
        NanPolicy::kReject, 0, kRows, layer.reals.data(), out.data(),
        output_errors.data(), &counts, nullptr);
    EXPECT_EQ(status, NonFiniteRejectedError(first, std::nan("")));
  });
}

TEST(CompensatedRoundingTest, TakesTheElementWhereTheSumOverflows) {
  // The second feature is tiny: U_01 is 2^100.
  const Matrix gram = {1, 0x1p-101, 0x1p-101, 0x1p-201};
  const CompensationFactor factor = *Factor(gram, {0, ColumnOrder::kNatural});
  ForEachSimdTarget([&] {
    EXPECT_EQ(Codes(Int8Layer(factor, {0x1p100f, 3.2f, 0x1p-10f, 3.2f})),
              (std::vector<int>{127, 3, 0, 127}));
  });
}

TEST(CompensatedRoundingTest, TakesNoRowsAndNoColumns) {
  const CompensationFactor none =
      *CompensationFactor::Create(0, {}, {}, nullptr);
  EXPECT_EQ(none.columns(), 0);
  QuantizeCounts counts;
  double output_errors[5];
  const Layer layer = Int8Layer(*Factor({1}), {2});
  for (const CompensationFactor* factor : {&none, &layer.factor}) {
    EXPECT_TRUE(QuantizeCompensated(*factor, layer.encoding, layer.layout,
                                    layer.type, NanPolicy::kDefault, 0,
                                    factor == &none ? 5 : 0, nullptr, nullptr,
                                    output_errors, &counts, nullptr)
                    .ok());
  }
  EXPECT_EQ(counts.total, 0);
}

// --- What fails --------------------------------------------------------------

std::string ErrorOf(int64_t columns, Matrix gram, double damping = 0.01) {
  const auto size =
      static_cast<int64_t>(std::sqrt(static_cast<double>(gram.size())));
  const absl::Status status =
      CompensationFactor::Create(columns, {{size, absl::MakeSpan(gram)}},
                                 {damping}, nullptr)
          .status();
  return std::string(status.message());
}

TEST(CompensationFactorTest, RefusesWhatIsNoGramMatrix) {
  const double nan = std::nan("");
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(ErrorOf(3, {1, 0, 0, 1}),
            "GRAM_INVALID: the matrix has 2 features, expected 3, one per "
            "column of the weight");
  EXPECT_EQ(ErrorOf(2, {1, 0, 0, 1, 2}),
            "GRAM_INVALID: a matrix of 2 features has 5 elements; expected the "
            "square of at least 1 feature");
  EXPECT_EQ(ErrorOf(0, {}),
            "GRAM_INVALID: a matrix of 0 features has 0 elements; expected the "
            "square of at least 1 feature");
  EXPECT_EQ(ErrorOf(2, {1, nan, nan, 1}),
            "GRAM_INVALID: element [0, 1] is nan; expected finite elements");
  EXPECT_EQ(ErrorOf(2, {1, 0, 0, infinity}),
            "GRAM_INVALID: element [1, 1] is inf; expected finite elements");
  EXPECT_EQ(ErrorOf(2, {1, 0.5, 0.25, 1}),
            "GRAM_INVALID: element [0, 1] is 0.5, but element [1, 0] is 0.25; "
            "expected a symmetric matrix");
  EXPECT_EQ(ErrorOf(2, {1, 0, nan, 1}),
            "GRAM_INVALID: element [0, 1] is 0, but element [1, 0] is nan; "
            "expected a symmetric matrix");
  EXPECT_EQ(ErrorOf(2, {1, 0, 0, -1}),
            "GRAM_INVALID: element [1, 1] is -1; expected a diagonal of at "
            "least 0");
  EXPECT_EQ(ErrorOf(2, {1, 2, 2, 0}),
            "GRAM_INVALID: element [0, 1] is 2, but one of the two features "
            "has 0 on the diagonal");
  for (const double damping : {-0.1, nan, infinity}) {
    EXPECT_EQ(ErrorOf(1, {1}, damping).substr(0, 14), "METHOD_INVALID");
  }
}

TEST(CompensationFactorTest, RefusesWhatIsNotPositiveDefinite) {
  EXPECT_EQ(ErrorOf(2, {4, 3, 3, 1}),
            "GRAM_INVALID: the matrix is not positive definite at feature 0 "
            "with 0.025 added to its diagonal; expected X^T X of inputs X, or "
            "more damping");
  EXPECT_EQ(ErrorOf(2, {4, 3, 3, 1}, 1), "");
  // Two features that are equal need some damping.
  for (const int64_t size : {2, 140}) {
    const Matrix equal(size * size, 3.0);
    ForEachSimdTarget([&] {
      EXPECT_EQ(ErrorOf(size, equal, 0).substr(0, 12), "GRAM_INVALID");
      EXPECT_EQ(ErrorOf(size, equal), "");
    });
  }
  // Of many, the first in reversed order whose pivot is bad.
  Matrix gram = MakeGram(200, 1);
  gram[7 * 200 + 7] *= 0.5;
  const std::string expected = ErrorOf(200, gram, 0);
  EXPECT_EQ(expected.substr(0, 12), "GRAM_INVALID");
  ForEachSimdTarget([&] { EXPECT_EQ(ErrorOf(200, gram, 0), expected); });
}

// Three features of which each pair may be correlated like that, the others as
// they come.
GramState IndefiniteGram(int64_t features, int64_t part_size, int64_t first) {
  GramState::Parts parts;
  parts.exponents.assign(features, 0);
  parts.part_size = part_size;
  parts.rows = 1000;
  for (int64_t i = 0; i < features; ++i) {
    const int64_t end = std::min((i / part_size + 1) * part_size, features);
    for (int64_t j = i; j < end; ++j) {
      const bool is_one = i >= first && j < first + 3;
      parts.code_sums.push_back(i == j       ? 100
                                : !is_one    ? 0
                                : i == first ? 90
                                             : -90);
    }
  }
  return *GramState::FromParts(parts);
}

TEST(CheckSemidefiniteTest, TakesWhatRowsGive) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 1);
  ThreadPool pool(2);
  for (const int64_t features : {1, 3, 40, 300}) {
    for (const int64_t rows : {1, 7, 500}) {
      std::vector<float> inputs(rows * features);
      for (float& x : inputs) x = std::exp(3 * normal(random));
      // One that is dead, and two that are equal.
      for (int64_t r = 0; features > 2 && r < rows; ++r) {
        inputs[r * features] = 0;
        inputs[r * features + 1] = inputs[r * features + 2];
      }
      const int64_t part_size = GramState::PartSize(features, 128);
      GramState gram = *GramState::Create(
          GramState::ExponentsFor(GramState::LargestMagnitudes(
              ElementType::kFloat32, rows, features,
              reinterpret_cast<const uint8_t*>(inputs.data()))),
          part_size);
      gram.Update(ElementType::kFloat32, rows,
                  reinterpret_cast<const uint8_t*>(inputs.data()), nullptr);
      gram.Finish(nullptr);
      EXPECT_EQ(CheckSemidefinite(gram, &pool), absl::OkStatus())
          << features << " " << rows;
    }
  }
}

TEST(CheckSemidefiniteTest, TakesAsLongAsTheFactorsOfItsParts) {
  // 5e9 fused multiply-adds a second, size^3 / 6 of them.
  EXPECT_EQ(CompensationFactor::Time({3000}), absl::Milliseconds(900));
  EXPECT_EQ(SemidefiniteCheckTime(7000, 3000),
            CompensationFactor::Time({3000, 3000, 1000}));
  EXPECT_EQ(SemidefiniteCheckTime(300, 8192), CompensationFactor::Time({300}));
}

TEST(CheckSemidefiniteTest, RefusesWhatNoRowsGive) {
  EXPECT_EQ(CheckSemidefinite(IndefiniteGram(3, 3, 0), nullptr),
            StatisticsInvalidError(
                "the Gram state of features 0 to 2 is not positive "
                "semidefinite, expected the sum of x x^T over rows x"));
  EXPECT_EQ(
      ErrorReason(CheckSemidefinite(IndefiniteGram(300, 256, 290), nullptr)),
      "STATISTICS_INVALID");
  const std::atomic<bool> flag{true};
  EXPECT_EQ(
      CheckSemidefinite(IndefiniteGram(3, 3, 0), nullptr, StopToken(&flag)),
      StoppedError());
}

TEST(CompensatedRoundingTest, StopsWhenNobodyWaits) {
  const std::atomic<bool> flag{true};
  const StopToken stop(&flag);
  constexpr int64_t kColumns = 40;
  constexpr int64_t kRows = 100;
  Matrix gram = MakeGram(kColumns, 1);
  const Layer layer =
      Int8Layer(*Factor(gram), std::vector<float>(kRows * kColumns, 5));
  std::vector<uint8_t> out(kRows * kColumns, kCanary);
  std::vector<double> output_errors(kRows);
  QuantizeCounts counts;
  ForEachSimdTarget([&] {
    EXPECT_EQ(CompensationFactor::Create(
                  kColumns, {GramBlock{kColumns, absl::MakeSpan(gram)}}, {},
                  nullptr, stop)
                  .status(),
              StoppedError());
    EXPECT_EQ(QuantizeCompensated(layer.factor, layer.encoding, layer.layout,
                                  layer.type, NanPolicy::kDefault, 0, kRows,
                                  layer.reals.data(), out.data(),
                                  output_errors.data(), &counts, nullptr, stop),
              StoppedError());
  });
  // No task has begun.
  EXPECT_EQ(std::count(out.begin(), out.end(), kCanary), kRows * kColumns);

  // Those that have begun end as well.
  const QuantizeRange range{layer.encoding,   layer.format(),      layer.layout,
                            layer.type,       NanPolicy::kDefault, 0,
                            kRows * kColumns, layer.reals.data(),  out.data()};
  const std::vector<int64_t> column_scale(kColumns);
  QuantizeCompensatedScalar(
      {layer.factor, range, column_scale.data(), output_errors.data(), stop},
      &counts);
  EXPECT_EQ(counts.total, 0);
  const double last = gram.back();
  const std::vector<double> least_pivot(kColumns);
  CholeskyScalar({gram.data(), kColumns, kColumns}, least_pivot.data(), stop);
  EXPECT_EQ(gram.back(), last);
}

}  // namespace
}  // namespace quantd::core::compensated_rounding_test
