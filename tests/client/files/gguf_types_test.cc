#include "client/files/gguf_types.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/files/dtype.h"
#include "gtest/gtest.h"

namespace quantd::files::gguf_types_test {
namespace {

constexpr size_t kBlocks = 100;

// FNV-1a over the bits of the elements that ggml makes of the blocks of
// RandomBlocks. tests/e2e/python/gguf_test.py compares with ggml itself.
struct Expected {
  absl::string_view name;
  uint64_t hash;
};
constexpr Expected kExpected[] = {
    {"q4_0", 0xdb1d4db27af1d925},   {"q4_1", 0xb1e650789859a512},
    {"q5_0", 0x4882994851802925},   {"q5_1", 0x544da6e8f44c7e8e},
    {"q8_0", 0x872911bca88c37e5},   {"q2_K", 0xbf34095e49a946ec},
    {"q3_K", 0x6075f11e8e902c25},   {"q4_K", 0x66f0e36538bb3587},
    {"q5_K", 0x5ed65980406bcaa6},   {"q6_K", 0x8c00c650f31bd6e3},
    {"q8_K", 0xaf1653c95fdf5b7c},   {"iq2_xxs", 0x36c935deb7ae2bc9},
    {"iq2_xs", 0xf1d03915da8bedf1}, {"iq3_xxs", 0x339baa7a2b556c05},
    {"iq1_s", 0xfe22411916990205},  {"iq4_nl", 0xc5beb998ecaf1025},
    {"iq3_s", 0x03f7ffc7dd280565},  {"iq2_s", 0x2149d7c20723c2f5},
    {"iq4_xs", 0x109ca5fb6db74773}, {"iq1_m", 0x48ec31983e28b1c5},
    {"tq1_0", 0x377bdf12ca309325},  {"tq2_0", 0x0bf2d3f6c0855325},
    {"mxfp4", 0x883ef4cda46fdd25},  {"nvfp4", 0x408f881a19ed9725},
    {"q1_0", 0xcef142bac65f0b25},   {"q2_0", 0xae6ecd72171b9725},
};

// All bits of scales occur: infinities, NaN, subnormal numbers.
std::vector<uint8_t> RandomBlocks(const GgufType& type) {
  std::vector<uint8_t> bytes(kBlocks * static_cast<size_t>(type.block_bytes));
  uint64_t state = type.number;
  for (uint8_t& byte : bytes) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    byte = static_cast<uint8_t>(state >> 56);
  }
  return bytes;
}

std::vector<float> Decode(const GgufType& type,
                          const std::vector<uint8_t>& bytes) {
  const size_t elements = static_cast<size_t>(type.block_elements);
  std::vector<float> out(kBlocks * elements);
  for (size_t b = 0; b < kBlocks; ++b) {
    type.decode(&bytes[b * static_cast<size_t>(type.block_bytes)],
                &out[b * elements]);
  }
  return out;
}

// All NaN are alike: which of two comes through is the compiler's choice.
uint64_t Hash(const std::vector<float>& elements) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const float element : elements) {
    uint32_t bits = 0x7fc00000;
    if (!std::isnan(element)) std::memcpy(&bits, &element, sizeof(bits));
    hash = (hash ^ bits) * 0x100000001b3;
  }
  return hash;
}

TEST(GgufTypesTest, DecodesTheBitsOfGgml) {
  for (const Expected& expected : kExpected) {
    const GgufType* const type = FindGgufType(expected.name);
    ASSERT_NE(type, nullptr) << expected.name;
    EXPECT_EQ(Hash(Decode(*type, RandomBlocks(*type))), expected.hash)
        << expected.name;
  }
}

// ggml has no decoder of it: it is for activations.
TEST(GgufTypesTest, DecodesQ8_1WithoutItsSum) {
  std::vector<uint8_t> block = {0x00, 0xB8, 0xFF, 0xFF};  // d = -0.5
  for (int i = 0; i < 32; ++i) {
    block.push_back(static_cast<uint8_t>(i * 8 - 128));
  }
  float elements[32];
  FindGgufType("q8_1")->decode(block.data(), elements);
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(elements[i], -0.5F * static_cast<float>(i * 8 - 128));
  }
}

TEST(GgufTypesTest, EveryTypeIsPlainOrHasADecoder) {
  size_t decoder_count = 0;
  for (const GgufType& type : GgufTypes()) {
    EXPECT_EQ(FindGgufType(type.number), &type) << type.name;
    EXPECT_EQ(FindGgufType(type.name), &type) << type.name;
    EXPECT_NE(type.IsPlain(), type.decode != nullptr) << type.name;
    decoder_count += type.decode != nullptr ? 1 : 0;
    if (!type.IsPlain()) continue;
    EXPECT_EQ(type.block_elements, 1) << type.name;
    EXPECT_EQ(type.block_bytes, DtypeSizeBytes(*type.dtype)) << type.name;
  }
  // All but q8_1 are compared with ggml.
  EXPECT_EQ(decoder_count, std::size(kExpected) + 1);
  EXPECT_EQ(FindGgufType(31U), nullptr);
  EXPECT_EQ(FindGgufType("q4_k"), nullptr);
}

}  // namespace
}  // namespace quantd::files::gguf_types_test
