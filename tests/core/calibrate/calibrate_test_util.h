// What the tests of the calibrators share: data of many shapes, and its
// statistics.

#ifndef QUANTD_TESTS_CORE_CALIBRATE_CALIBRATE_TEST_UTIL_H_
#define QUANTD_TESTS_CORE_CALIBRATE_CALIBRATE_TEST_UTIL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/calibrate/encoding_spec.h"
#include "core/formats/codec.h"
#include "core/formats/number_format.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "nlohmann/json.hpp"
#include "tests/core/kernel_test_util.h"
#include "tests/support/sanitizers.h"

namespace quantd::core {

inline EncodingSpec Spec(const char* format,
                         Symmetry symmetry = Symmetry::kDefault) {
  EncodingSpec spec;
  spec.format = FindFormatByName(format)->format;
  spec.symmetry = symmetry;
  return spec;
}

// The widest range that searches try, in whole ranges.
inline double NaiveWidest(const EncodingSpec& spec) {
  const CodeKind kind = FindFormat(spec.format)->kind;
  return kind == CodeKind::kFloat ? 2 : kind == CodeKind::kCodebook ? 1.5 : 1;
}

// A tensor with its statistics.
struct Sample {
  Sample(ElementType type_in, const std::vector<double>& values,
         int mantissa_bits, std::vector<int64_t> shape = {},
         const std::vector<int64_t>& block_size = {})
      : type(type_in),
        layout(*BlockLayout::Create(
            shape.empty()
                ? std::vector<int64_t>{static_cast<int64_t>(values.size())}
                : shape,
            block_size)),
        reals(values.size() * ElementSizeBytes(type)),
        statistics(layout.scale_count(), mantissa_bits) {
    for (size_t i = 0; i < values.size(); ++i) {
      StoreReal(type, values[i], reals.data(), static_cast<int64_t>(i));
      x.push_back(NaiveReal(type, reals.data(), static_cast<int64_t>(i)));
    }
    statistics.Update(layout, type, 0, layout.element_count(), reals.data(),
                      nullptr);
  }

  ElementType type;
  BlockLayout layout;
  std::vector<uint8_t> reals;
  // The elements as the type holds them.
  std::vector<double> x;
  TensorStatistics statistics;
};

enum class Shape {
  kNormal,
  kStudent2,
  kLogNormal,
  kRelu,
  kSpiky,
  kUniform,
  kGrid,
  kOffset,
};
constexpr Shape kAllShapes[] = {
    Shape::kNormal, Shape::kStudent2, Shape::kLogNormal, Shape::kRelu,
    Shape::kSpiky,  Shape::kUniform,  Shape::kGrid,      Shape::kOffset};

inline std::vector<double> Draw(Shape shape, int64_t count,
                                std::mt19937* random) {
  std::normal_distribution<double> normal(0, 1);
  std::student_t_distribution<double> student(2);
  std::uniform_real_distribution<double> uniform(-1, 1);
  const double size = std::ldexp(1.0, static_cast<int>((*random)() % 40) - 20);
  const double step = 0.01 * (1 + (*random)() % 100);
  const double offset = uniform(*random) * 10;
  std::vector<double> x;
  for (int64_t i = 0; i < count; ++i) {
    double value = 0;
    switch (shape) {
      case Shape::kNormal:
        value = normal(*random);
        break;
      case Shape::kStudent2:
        value = student(*random);
        break;
      case Shape::kLogNormal:
        value = std::exp(2 * normal(*random));
        break;
      case Shape::kRelu:
        value = std::max(0.0, normal(*random));
        break;
      case Shape::kSpiky:
        // Few values, and now and then a huge one.
        value = (*random)() % 500 == 0 ? 100 * normal(*random)
                                       : step * ((*random)() % 4);
        break;
      case Shape::kUniform:
        value = uniform(*random);
        break;
      case Shape::kGrid:
        // Next to where numbers of codes meet.
        value = step * (0.5 + std::floor(20 * normal(*random))) *
                (1 + 1e-7 * normal(*random));
        break;
      case Shape::kOffset:
        value = offset + 0.1 * normal(*random);
        break;
    }
    x.push_back(value * size);
  }
  return x;
}

// The float32 tensors of a safetensors file, by name.
inline std::map<std::string, std::vector<double>> ReadSafetensors(
    const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)),
                          std::istreambuf_iterator<char>());
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  const auto header =
      nlohmann::json::parse(bytes.substr(sizeof(header_bytes), header_bytes));
  std::map<std::string, std::vector<double>> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const uint64_t begin = entry["data_offsets"][0];
    const uint64_t end = entry["data_offsets"][1];
    std::vector<float> values((end - begin) / sizeof(float));
    std::memcpy(values.data(),
                bytes.data() + sizeof(header_bytes) + header_bytes + begin,
                end - begin);
    tensors[name].assign(values.begin(), values.end());
  }
  return tensors;
}

// The numbers that codes stand for, before scale and zero point, ascending.
inline std::vector<double> NaiveNumbers(const Encoding& encoding) {
  const FormatInfo& format = *FindFormat(encoding.format);
  std::vector<double> numbers;
  if (format.kind == CodeKind::kInteger) {
    for (int q = encoding.qmin; q <= encoding.qmax; ++q) numbers.push_back(q);
  } else if (format.kind == CodeKind::kFloat) {
    for (uint32_t code = 0; code < 1u << format.bits; ++code) {
      const double number = DecodeFloat(format.float_layout, code);
      if (std::isfinite(number)) numbers.push_back(number);
    }
  } else {
    const auto codebook =
        format.codebook.empty() ? encoding.codebook : format.codebook;
    numbers.assign(codebook.begin(), codebook.end());
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

// The errors of a tensor, one after the other in the arithmetic of its type.
struct NaiveErrors {
  double squared = 0;
  // The part of clipped elements.
  double clipped = 0;
};

inline NaiveErrors NaiveSquaredError(const Sample& sample,
                                     const Encoding& encoding) {
  const std::vector<double> numbers = NaiveNumbers(encoding);
  const FormatInfo& format = *FindFormat(encoding.format);
  NaiveErrors errors;
  sample.layout.ForEachRun(
      0, sample.layout.element_count(), [&](const BlockLayout::Run& run) {
        for (int64_t k = 0; k < run.count; ++k) {
          const double x = sample.x[static_cast<size_t>(run.begin + k)];
          const int64_t i = run.scale_index + k * run.scale_step;
          const float scale = encoding.scale[static_cast<size_t>(i)];
          const int32_t zero_point =
              encoding.zero_point.empty()
                  ? 0
                  : encoding.zero_point[static_cast<size_t>(i)];
          if (!std::isfinite(x) || std::isnan(scale)) continue;
          const double quotient = NaiveQuotient(sample.type, x, scale);
          double number;
          bool clips;
          if (!encoding.real_zero_point.empty()) {
            const bool is_double = sample.type == ElementType::kFloat64;
            const float zero = encoding.real_zero_point[static_cast<size_t>(i)];
            // volatile: the values are to be float32, whatever the compiler's
            // mind.
            volatile float narrow = static_cast<float>(quotient) + zero;
            const double q =
                NaiveRound(is_double ? quotient + double{zero} : narrow);
            clips = q < encoding.qmin || q > encoding.qmax;
            const double code =
                std::clamp<double>(q, encoding.qmin, encoding.qmax);
            volatile float difference = static_cast<float>(code) - zero;
            number = is_double ? code - double{zero} : difference;
          } else if (format.kind == CodeKind::kInteger) {
            const double q = NaiveRound(quotient) + zero_point;
            clips = q < encoding.qmin || q > encoding.qmax;
            number = std::clamp<double>(q, encoding.qmin, encoding.qmax) -
                     zero_point;
          } else {
            auto above =
                std::lower_bound(numbers.begin(), numbers.end(), quotient);
            if (above == numbers.end() ||
                (above != numbers.begin() &&
                 quotient - above[-1] < *above - quotient)) {
              --above;
            }
            number = *above;
            clips =
                format.kind == CodeKind::kFloat
                    ? std::fabs(quotient) >=
                          OverflowThreshold(format.float_layout)
                    : quotient < numbers.front() || quotient > numbers.back();
          }
          double restored;
          if (sample.type == ElementType::kFloat64) {
            restored = number * scale;
          } else {
            volatile float product = static_cast<float>(number) * scale;
            restored = product;
          }
          const double squared = (restored - x) * (restored - x);
          errors.squared += squared;
          if (clips) errors.clipped += squared;
        }
      });
  return errors;
}

// Rounds of a random test: fewer where they take long.
inline int Rounds(int in_release) {
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
  return in_release;
#else
  return std::max(1, in_release / 20);
#endif
}

}  // namespace quantd::core

#endif  // QUANTD_TESTS_CORE_CALIBRATE_CALIBRATE_TEST_UTIL_H_
