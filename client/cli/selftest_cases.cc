#include "client/cli/selftest_cases.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/tensor.h"
#include "client/models/spec_syntax.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::cli {
namespace {

constexpr ElementType kTypes[] = {ElementType::kFloat32, ElementType::kFloat16,
                                  ElementType::kBfloat16,
                                  ElementType::kFloat64};

// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

// A sum of four numbers of 16 bits, nearly normal: 19 bits and no rounding.
double Normal(Random* random) {
  const uint64_t bits = random->Next();
  int64_t sum = 0;
  for (int k = 0; k < 4; ++k) {
    sum += static_cast<int64_t>(bits >> (16 * k) & 0xFFFF);
  }
  return std::ldexp(static_cast<double>(sum - 2 * 0xFFFF), -16);
}

// Numbers of every type, by their bits in float32: NaN, both infinities and
// zeros, the smallest normal and the smallest of all numbers of float16.
constexpr uint32_t kSpecials[] = {0x7FC00000, 0x7F800000, 0xFF800000,
                                  0x00000000, 0x80000000, 0x38800000,
                                  0xB3800000};

float Special(Random* random) {
  const uint32_t bits = kSpecials[random->Next() % std::size(kSpecials)];
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Cuts off the digits that the type does not have.
void Store(ElementType type, double value, uint8_t* out) {
  if (type == ElementType::kFloat64) {
    std::memcpy(out, &value, sizeof(value));
    return;
  }
  const auto single = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &single, sizeof(bits));
  if (type == ElementType::kFloat32) {
    std::memcpy(out, &bits, sizeof(bits));
    return;
  }
  auto half = static_cast<uint16_t>(bits >> 16);
  if (type == ElementType::kFloat16) {
    half = static_cast<uint16_t>(bits >> 31 << 15);
    const double magnitude = std::fabs(value);
    if (!std::isfinite(value)) {
      half |= std::isnan(value) ? 0x7E00 : 0x7C00;
    } else if (magnitude < std::ldexp(1, -14)) {
      half |= static_cast<uint16_t>(std::ldexp(magnitude, 24));
    } else {
      int exponent;
      const double mantissa = std::frexp(magnitude, &exponent);
      half |= static_cast<uint16_t>(
          (exponent + 14) << 10 |
          (static_cast<int>(std::ldexp(mantissa, 11)) & 1023));
    }
  }
  std::memcpy(out, &half, sizeof(half));
}

// Formats, then what else a spec may say.
std::vector<std::string> FormatSpecs() {
  std::vector<std::string> specs;
  for (const std::string& name : FormatNames()) {
    const auto format = ParseFormat(name);
    if (!format.ok()) continue;
    const auto info = GetFormatInfo(*format);
    if (!info.ok()) continue;
    specs.push_back(info->carries_codebook
                        ? absl::StrCat(name, ":entries=-1,-0.375,0.0625,0.75")
                        : name);
  }
  return specs;
}

constexpr const char* kOtherSpecs[] = {
    "int8:percentile=0.99",
    "int8:per-channel:percentile=0.99:tail=upper",
    "int4:group:32:mse",
    "int4:group:32:half-step:mse",
    "int3:per-channel:mse",
    "uint4:group:32:mse",
    "uint8:mse",
    "int8:sqnr",
    "int4:group:32:sqnr=2",
    "int8:entropy",
    "int4:per-channel:entropy",
    "int8:fixed=-2,2",
    "int8:best-of=minmax,percentile,mse",
    "int8:asymmetric",
    "int8:full-range",
    "int8:half-step",
    "int8:aimet",
    "int8:power-of-two",
    "int8:scale=float16",
    "int8:scale=bfloat16",
    "int8:block=5,7",
    "uint8:real-zero-point",
    "nf4:mse",
    "nvfp4:mse",
    "lpbq:mse",
    "float8_e4m3fn:group:128:mse",
    "float8_e5m2:no-saturation",
    "mxfp8_e4m3:rule=ceil",
    "mxfp4_e2m1:rule=even",
    "mxfp4_e2m1:rule=rceil",
    "mxfp4_e2m1:mse",
};

constexpr const char* kStrangeSpecs[] = {
    "int8",  "uint4:group:32", "int16:per-channel", "float8_e4m3fn",
    "nvfp4", "mxfp4_e2m1",     "float8_e5m2",       "nf4",
};

constexpr std::pair<v1::NanPolicy, const char*> kPolicies[] = {
    {v1::NAN_POLICY_UNSPECIFIED, ""},
    {v1::NAN_POLICY_ZERO_POINT, " zero-point"},
    {v1::NAN_POLICY_QMIN, " qmin"},
};

// With as few scales as a server answers metrics of.
constexpr const char* kLargeSpecs[] = {
    "int8",
    "int8:per-channel",
    "int8:mse",
    "int8:entropy",
};

}  // namespace

std::vector<SelftestCase> SelftestCases() {
  std::vector<SelftestCase> cases;
  const auto add = [&](const std::string& spec, ElementType type) {
    SelftestCase c;
    c.name = absl::StrCat(spec, " ", ElementTypeName(type));
    c.spec = spec;
    c.type = type;
    cases.push_back(c);
  };
  for (const std::string& format : FormatSpecs()) {
    for (const ElementType type : kTypes) add(format, type);
    for (const char* granularity : {":per-channel", ":group:32"}) {
      add(format + granularity, ElementType::kFloat32);
    }
  }
  for (const char* spec : kOtherSpecs) {
    add(spec, ElementType::kFloat32);
    add(spec, ElementType::kFloat64);
  }
  for (const char* spec : kStrangeSpecs) {
    for (const auto& [policy, name] : kPolicies) {
      for (const ElementType type : kTypes) {
        add(spec, type);
        cases.back().data = SelftestData::kStrange;
        cases.back().nan_policy = policy;
        absl::StrAppend(&cases.back().name, " strange", name);
      }
    }
  }
  for (const char* spec : kLargeSpecs) {
    add(spec, ElementType::kFloat32);
    cases.back().data = SelftestData::kLarge;
    cases.back().name += " large";
  }
  return cases;
}

std::vector<int64_t> SelftestShape(SelftestData data) {
  if (data == SelftestData::kLarge) return {517, 1100};
  return {23, 101};
}

std::vector<uint8_t> SelftestElements(SelftestData data, ElementType type) {
  int64_t count = 1;
  for (const int64_t size : SelftestShape(data)) count *= size;
  const int64_t element_bytes = ElementSizeBytes(type);
  std::vector<uint8_t> elements(static_cast<size_t>(count * element_bytes));
  Random random(static_cast<uint64_t>(data));
  for (int64_t i = 0; i < count; ++i) {
    double value = Normal(&random);
    const uint64_t kind = random.Next() % 64;
    if (kind == 0) value *= 8;
    if (kind < 8 && data == SelftestData::kStrange) {
      value = double{Special(&random)};
    }
    Store(type, value, elements.data() + i * element_bytes);
  }
  return elements;
}

}  // namespace quantd::cli
