#include "client/files/gguf_encoders.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/files/dtype.h"
#include "client/files/gguf_types.h"
#include "gtest/gtest.h"

namespace quantd::files::gguf_encoders_test {
namespace {

constexpr size_t kElements = 256;
constexpr absl::string_view kTypes[] = {"q4_0", "q4_1", "q5_0", "q5_1",
                                        "q8_0", "q4_K", "q5_K", "q6_K"};

// Nearly normal: sums of uniform numbers, the same everywhere.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed) {}

  float Uniform() {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<float>(state_ >> 40) * 0x1p-24F;
  }
  float Normal() {
    float sum = -6;
    for (int i = 0; i < 12; ++i) sum += Uniform();
    return sum;
  }

 private:
  uint64_t state_;
};

std::vector<float> Normals(size_t count, uint64_t seed) {
  Numbers numbers(seed);
  std::vector<float> elements(count);
  for (float& element : elements) element = numbers.Normal();
  return elements;
}

std::vector<uint8_t> Encode(const GgufType& type,
                            const std::vector<float>& elements,
                            const std::vector<float>& weights) {
  const GgufEncoder& encoder = *FindGgufEncoder(type);
  const auto block_bytes = static_cast<size_t>(type.block_bytes);
  const auto block_elements = static_cast<size_t>(type.block_elements);
  const size_t count = elements.size() / block_elements;
  // What was there before is of no account.
  std::vector<uint8_t> bytes(count * block_bytes, 0xA5);
  for (size_t b = 0; b < count; ++b) {
    encoder.encode(&elements[b * block_elements], &weights[b * block_elements],
                   &bytes[b * block_bytes]);
  }
  return bytes;
}

std::vector<uint8_t> Encode(const GgufType& type,
                            const std::vector<float>& elements) {
  return Encode(type, elements, std::vector<float>(elements.size(), 1));
}

std::vector<float> Decode(const GgufType& type,
                          const std::vector<uint8_t>& bytes) {
  const auto block_bytes = static_cast<size_t>(type.block_bytes);
  const auto block_elements = static_cast<size_t>(type.block_elements);
  std::vector<float> elements(bytes.size() / block_bytes * block_elements);
  for (size_t b = 0; b < bytes.size() / block_bytes; ++b) {
    type.decode(&bytes[b * block_bytes], &elements[b * block_elements]);
  }
  return elements;
}

std::vector<float> Restored(absl::string_view name,
                            const std::vector<float>& elements) {
  const GgufType& type = *FindGgufType(name);
  return Decode(type, Encode(type, elements));
}

double SquaredError(const std::vector<float>& elements,
                    const std::vector<float>& restored) {
  double noise = 0;
  for (size_t i = 0; i < elements.size(); ++i) {
    const double error = double{restored[i]} - double{elements[i]};
    noise += error * error;
  }
  return noise;
}

double SqnrDb(const std::vector<float>& elements,
              const std::vector<float>& restored) {
  const std::vector<float> zeros(elements.size());
  return 10 * std::log10(SquaredError(elements, zeros) /
                         SquaredError(elements, restored));
}

float AsHalf(float value) {
  const uint16_t half = NearestHalf(value);
  uint8_t bytes[2];
  std::memcpy(bytes, &half, sizeof(half));
  return ReadHalf(bytes);
}

// What ggml's reference makes of blocks of 32: codes of the unrounded scale and
// minimum, decoded with those of float16.
std::vector<float> RestoredByGgml(absl::string_view name,
                                  const std::vector<float>& elements) {
  std::vector<float> restored;
  for (size_t b = 0; b < elements.size(); b += 32) {
    const float* const x = &elements[b];
    const float low = *std::min_element(x, x + 32);
    const float high = *std::max_element(x, x + 32);
    const float largest = std::fabs(low) > high ? low : high;
    const float levels = name[1] == '4' ? 16 : name[1] == '5' ? 32 : 256;
    const bool has_minimum = name[3] == '1';
    const float minimum = has_minimum ? low : 0;
    const float d = has_minimum     ? (high - low) / (levels - 1)
                    : levels == 256 ? std::fabs(largest) / 127
                                    : -largest / (levels / 2);
    const float zero = has_minimum ? 0 : levels / 2;
    for (size_t i = 0; i < 32; ++i) {
      const float code =
          std::floor((d == 0 ? 0 : (x[i] - minimum) / d) + zero + 0.5F);
      restored.push_back(AsHalf(d) * (std::min(code, levels - 1) - zero) +
                         AsHalf(minimum));
    }
  }
  return restored;
}

// FNV-1a.
uint64_t Hash(const std::vector<uint8_t>& bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

TEST(GgufEncodersTest, AreThereForTypesThatAreWritten) {
  size_t count = 0;
  for (const GgufType& type : GgufTypes()) {
    count += FindGgufEncoder(type) != nullptr ? 1 : 0;
  }
  EXPECT_EQ(count, std::size(kTypes));
  for (const absl::string_view name : kTypes) {
    EXPECT_NE(FindGgufEncoder(*FindGgufType(name)), nullptr) << name;
  }
}

// What ggml reaches on the same numbers.
TEST(GgufEncodersTest, LoseNoMoreThanGgml) {
  const std::vector<float> elements = Normals(64 * kElements, 1);
  const std::pair<absl::string_view, double> ggml[] = {
      {"q4_K", 23.14}, {"q5_K", 28.98}, {"q6_K", 35.19}};
  for (const auto& [name, least] : ggml) {
    EXPECT_GT(SqnrDb(elements, Restored(name, elements)), least) << name;
  }
}

// Of all kinds, elements of none of which are ordinary.
std::vector<std::pair<std::string, std::vector<float>>> Tensors() {
  const std::vector<float> normal = Normals(16 * kElements, 7);
  Numbers numbers(8);
  std::vector<std::pair<std::string, std::vector<float>>> tensors;
  const auto add = [&](const char* name, const auto& element) {
    std::vector<float> elements;
    for (const float x : normal) elements.push_back(element(x));
    tensors.emplace_back(name, std::move(elements));
  };
  add("normal", [](float x) { return x; });
  add("heavy-tailed", [&](float x) { return x / (0.01F + numbers.Uniform()); });
  add("sparse", [](float x) { return x > 1.5F ? 1.0F : 0.0F; });
  add("ternary",
      [](float x) { return std::fabs(x) > 1.5F ? std::copysign(1.0F, x) : 0; });
  add("constant", [](float) { return 0.3F; });
  add("asymmetric", [](float x) { return std::fabs(x) + 1; });
  add("exponential", [](float x) { return std::exp(x); });
  add("below", [](float x) { return -10 - x; });
  add("whole", [](float x) { return std::rint(2 * x); });
  add("tiny", [](float x) { return x * 0x1p-22F; });
  return tensors;
}

TEST(GgufEncodersTest, HaveNoMoreErrorThanTheRuleOfGgml) {
  for (const absl::string_view name :
       {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0"}) {
    for (const auto& [kind, elements] : Tensors()) {
      const double of_ggml =
          SquaredError(elements, RestoredByGgml(name, elements));
      EXPECT_LE(SquaredError(elements, Restored(name, elements)),
                of_ggml * (1 + 1e-6))
          << name << " " << kind;
      if (kind == "normal") {
        EXPECT_LT(SquaredError(elements, Restored(name, elements)),
                  of_ggml * 0.95)
            << name;
      }
    }
  }
}

TEST(GgufEncodersTest, KeepZerosAndOnes) {
  for (const auto& [kind, elements] : Tensors()) {
    if (kind != "sparse" && kind != "ternary") continue;
    for (const absl::string_view name : kTypes) {
      EXPECT_EQ(SquaredError(elements, Restored(name, elements)), 0)
          << name << " " << kind;
    }
  }
}

// On every compiler and processor; those that the Python package makes too.
TEST(GgufEncodersTest, GiveTheSameBytesEverywhere) {
  constexpr uint64_t kHashes[] = {0x2cf124e336d52395, 0x2cbe1961498e78da,
                                  0xeecc07915f037866, 0xbbf9efc913e485a0,
                                  0xf69742c01a4a59c9, 0xd5c63a3b8b32c39b,
                                  0x84583e2aac4111a2, 0xeec42d16b5c9f092};
  const std::vector<float> elements = Normals(64 * kElements, 2);
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    EXPECT_EQ(Hash(Encode(*FindGgufType(kTypes[i]), elements)), kHashes[i])
        << kTypes[i];
  }
}

// With weights the weighed error is less than without, and only their ratios
// count.
TEST(GgufEncodersTest, WeighErrors) {
  const std::vector<float> elements = Normals(64 * kElements, 4);
  std::vector<float> weights;
  for (const float number : Normals(elements.size(), 5)) {
    weights.push_back(std::exp2(std::fmin(3 * number, 12) - 12));
  }
  for (const absl::string_view name : kTypes) {
    const GgufType& type = *FindGgufType(name);
    const auto error = [&](const std::vector<uint8_t>& bytes) {
      const std::vector<float> restored = Decode(type, bytes);
      double sum = 0;
      for (size_t i = 0; i < elements.size(); ++i) {
        const double one = double{restored[i]} - double{elements[i]};
        sum += double{weights[i]} * one * one;
      }
      return sum;
    };
    const std::vector<uint8_t> weighed = Encode(type, elements, weights);
    EXPECT_LT(error(weighed), 0.9 * error(Encode(type, elements))) << name;
    std::vector<float> halves = weights;
    for (float& weight : halves) weight /= 2;
    EXPECT_EQ(Encode(type, elements, halves), weighed) << name;
  }
}

// The bytes of blocks stay where they are: nothing is written behind them.
TEST(GgufEncodersTest, WriteOneBlock) {
  const std::vector<float> elements = Normals(kElements, 3);
  const std::vector<float> weights(kElements, 1);
  for (const absl::string_view name : kTypes) {
    const GgufType& type = *FindGgufType(name);
    std::vector<uint8_t> bytes(static_cast<size_t>(type.block_bytes) + 8, 0xA5);
    FindGgufEncoder(type)->encode(elements.data(), weights.data(),
                                  bytes.data());
    EXPECT_EQ(std::count(bytes.end() - 8, bytes.end(), 0xA5), 8) << name;
  }
}

TEST(GgufEncodersTest, KeepZeros) {
  const std::vector<float> zeros(kElements);
  for (const absl::string_view name : kTypes) {
    EXPECT_EQ(Restored(name, zeros), zeros) << name;
  }
}

// Blocks of one number, and of none above or below zero.
TEST(GgufEncodersTest, KeepBlocksWithoutARange) {
  for (const absl::string_view name : kTypes) {
    for (const float value : {1.0F, -1.0F, 0.375F, -6e4F}) {
      const std::vector<float> elements(kElements, value);
      EXPECT_GT(SqnrDb(elements, Restored(name, elements)), 55)
          << name << " " << value;
    }
    for (const float sign : {1.0F, -1.0F}) {
      std::vector<float> elements = Normals(kElements, 4);
      for (float& element : elements) element = sign * (std::fabs(element) + 1);
      EXPECT_GT(SqnrDb(elements, Restored(name, elements)), 23)
          << name << " " << sign;
    }
  }
}

// Blocks of two numbers lose what float16 rounds off, and not all of that:
// there are many products of d, an integer and a code.
TEST(GgufEncodersTest, KeepTwoNumbers) {
  std::vector<float> elements(kElements);
  for (const float upper : {0.37F, 0.7F, -0.37F, 12.3F}) {
    Numbers numbers(7);
    for (float& element : elements) {
      element = numbers.Uniform() < 0.4F ? upper : 0;
    }
    for (const absl::string_view name : {"q4_K", "q5_K", "q6_K"}) {
      EXPECT_GT(SqnrDb(elements, Restored(name, elements)), 85)
          << name << " " << upper;
    }
  }
}

// Some blocks are much smaller than their neighbours: the integers of blocks
// go down to 0.
TEST(GgufEncodersTest, TakeBlocksOfAllSizes) {
  std::vector<float> elements = Normals(kElements, 5);
  for (size_t i = 0; i < kElements; ++i) {
    elements[i] *= std::ldexp(1.0F, -static_cast<int>(i / 32) * 4);
  }
  for (const absl::string_view name : kTypes) {
    const std::vector<float> restored = Restored(name, elements);
    EXPECT_GT(SqnrDb(elements, restored), 18) << name;
    for (size_t i = 0; i < kElements; ++i) {
      EXPECT_LE(std::fabs(restored[i]), 2 * 4) << name;
    }
  }
}

// The same relative error from numbers that are nearly too large to those
// whose scales are near the end of float16; below, all become zero.
TEST(GgufEncodersTest, TakeMagnitudesThatFloat16ScalesHave) {
  const std::vector<float> normal = Normals(kElements, 6);
  for (const absl::string_view name : kTypes) {
    const double least = SqnrDb(normal, Restored(name, normal)) - 1.5;
    const float most = FindGgufEncoder(*FindGgufType(name))->most_element;
    for (const float factor : {most * 0x1p-3F, 0x1p8F, 0x1p-4F, 0x1p-8F}) {
      std::vector<float> elements = normal;
      for (float& element : elements) element *= factor;
      EXPECT_GT(SqnrDb(elements, Restored(name, elements)), least)
          << name << " " << factor;
    }
    for (const float factor : {0x1p-30F, 0x1p-70F, 0x1p-140F}) {
      std::vector<float> elements = normal;
      for (float& element : elements) element *= factor;
      const std::vector<float> restored = Restored(name, elements);
      for (const float element : restored) {
        EXPECT_LE(std::fabs(element), 8 * factor + 0x1p-18F) << name;
      }
    }
    std::vector<float> largest(kElements, most);
    for (size_t i = 0; i < kElements; i += 3) largest[i] = -most;
    EXPECT_GT(SqnrDb(largest, Restored(name, largest)), 22) << name;
  }
}

}  // namespace
}  // namespace quantd::files::gguf_encoders_test
