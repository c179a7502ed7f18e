#include "client/files/gguf_encoders.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/files/gguf_types.h"
#include "gtest/gtest.h"

namespace quantd::files::gguf_encoders_test {
namespace {

constexpr size_t kElements = 256;
constexpr absl::string_view kTypes[] = {"q4_K", "q5_K", "q6_K"};

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
                            const std::vector<float>& elements) {
  const GgufEncoder encode = FindGgufEncoder(type);
  const auto block_bytes = static_cast<size_t>(type.block_bytes);
  // What was there before is of no account.
  std::vector<uint8_t> bytes(elements.size() / kElements * block_bytes, 0xA5);
  for (size_t b = 0; b < elements.size() / kElements; ++b) {
    encode(&elements[b * kElements], &bytes[b * block_bytes]);
  }
  return bytes;
}

std::vector<float> Decode(const GgufType& type,
                          const std::vector<uint8_t>& bytes) {
  const auto block_bytes = static_cast<size_t>(type.block_bytes);
  std::vector<float> elements(bytes.size() / block_bytes * kElements);
  for (size_t b = 0; b < bytes.size() / block_bytes; ++b) {
    type.decode(&bytes[b * block_bytes], &elements[b * kElements]);
  }
  return elements;
}

std::vector<float> Restored(absl::string_view name,
                            const std::vector<float>& elements) {
  const GgufType& type = *FindGgufType(name);
  return Decode(type, Encode(type, elements));
}

double SqnrDb(const std::vector<float>& elements,
              const std::vector<float>& restored) {
  double signal = 0;
  double noise = 0;
  for (size_t i = 0; i < elements.size(); ++i) {
    const double error = double{restored[i]} - double{elements[i]};
    signal += double{elements[i]} * double{elements[i]};
    noise += error * error;
  }
  return 10 * std::log10(signal / noise);
}

// FNV-1a.
uint64_t Hash(const std::vector<uint8_t>& bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

TEST(GgufEncodersTest, AreThereForThreeTypes) {
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
  constexpr double kGgml[] = {23.14, 28.98, 35.19};
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    EXPECT_GT(SqnrDb(elements, Restored(kTypes[i], elements)), kGgml[i])
        << kTypes[i];
  }
}

// On every compiler and processor; those that the Python package makes too.
TEST(GgufEncodersTest, GiveTheSameBytesEverywhere) {
  constexpr uint64_t kHashes[] = {0xd5c63a3b8b32c39b, 0x84583e2aac4111a2,
                                  0xeec42d16b5c9f092};
  const std::vector<float> elements = Normals(64 * kElements, 2);
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    EXPECT_EQ(Hash(Encode(*FindGgufType(kTypes[i]), elements)), kHashes[i])
        << kTypes[i];
  }
}

// The bytes of blocks stay where they are: nothing is written behind them.
TEST(GgufEncodersTest, WriteOneBlock) {
  const std::vector<float> elements = Normals(kElements, 3);
  for (const absl::string_view name : kTypes) {
    const GgufType& type = *FindGgufType(name);
    std::vector<uint8_t> bytes(static_cast<size_t>(type.block_bytes) + 8, 0xA5);
    FindGgufEncoder(type)(elements.data(), bytes.data());
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
    for (const float value : {1.0F, -1.0F, 0.375F, -3e5F}) {
      const std::vector<float> elements(kElements, value);
      EXPECT_GT(SqnrDb(elements, Restored(name, elements)), 55)
          << name << " " << value;
    }
    for (const float sign : {1.0F, -1.0F}) {
      std::vector<float> elements = Normals(kElements, 4);
      for (float& element : elements) element = sign * (std::fabs(element) + 1);
      EXPECT_GT(SqnrDb(elements, Restored(name, elements)), 24)
          << name << " " << sign;
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
    for (const float factor : {0x1p18F, 0x1p8F, 0x1p-4F, 0x1p-8F}) {
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
    std::vector<float> largest(kElements, kMostGgufElement);
    for (size_t i = 0; i < kElements; i += 3) largest[i] = -kMostGgufElement;
    EXPECT_GT(SqnrDb(largest, Restored(name, largest)), 25) << name;
  }
}

}  // namespace
}  // namespace quantd::files::gguf_encoders_test
