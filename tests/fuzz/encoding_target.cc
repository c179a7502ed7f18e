// Encodings from outside: whatever is taken is valid, the same after a round
// trip, and quantizes and dequantizes a tensor that it fits: to the same bytes
// on the best SIMD target as by the plain definitions, and in two parts as in
// one.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/cpu.h"
#include "core/dequantize/dequantize.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/quantize/quantize.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "core/types/float_convert.h"
#include "quantd/v1/encoding.pb.h"
#include "server/wire/encoding_proto.h"
#include "tests/fuzz/fuzz_target.h"

namespace quantd::fuzz {
namespace encoding_target {
namespace {

// Large enough for every vector loop and tail.
constexpr int64_t kMostElements = 5000;
// The extent of a dimension that is one block.
constexpr int64_t kWhole = 37;

// A shape that the encoding may fit: of its scale shape, or with all scales
// along the first dimension of blocks.
std::vector<int64_t> ShapeFor(const core::Encoding& encoding) {
  if (encoding.block_size.empty()) return {2, kWhole};
  std::vector<int64_t> shape;
  auto scales = static_cast<int64_t>(encoding.scale.size());
  for (size_t d = 0; d < encoding.block_size.size(); ++d) {
    const int64_t block = encoding.block_size[d];
    int64_t blocks = 1;
    if (d < encoding.scale_shape.size()) {
      blocks = encoding.scale_shape[d];
    } else if (block > 0) {
      blocks = scales;
      scales = 1;
    }
    if (block == 0) {
      shape.push_back(kWhole);
    } else {
      // The last block is ragged; no product overflows.
      const int64_t size = std::min<int64_t>(block, 1 << 20);
      const int64_t count = std::min<int64_t>(blocks, 1 << 20);
      shape.push_back(count == 0 ? 0 : size * (count - 1) + (size + 1) / 2);
    }
  }
  return shape;
}

struct Quantized {
  absl::Status status;
  std::vector<uint8_t> codes;
  core::QuantizeCounts counts;
};

bool operator==(const Quantized& a, const Quantized& b) {
  return a.status == b.status &&
         (!a.status.ok() ||
          (a.codes == b.codes && a.counts.total == b.counts.total &&
           a.counts.clipped_low == b.counts.clipped_low &&
           a.counts.clipped_high == b.counts.clipped_high &&
           a.counts.nan == b.counts.nan &&
           a.counts.positive_infinity == b.counts.positive_infinity &&
           a.counts.negative_infinity == b.counts.negative_infinity));
}

// What all calls on one tensor have in common.
struct Tensor {
  const core::Encoding& encoding;
  const core::FormatInfo& format;
  const core::BlockLayout& layout;
  core::ElementType type;
};

// In parts that end before element `middle` and after the last.
Quantized Quantize(const Tensor& tensor, core::NanPolicy policy, int64_t middle,
                   const std::vector<uint8_t>& reals) {
  const int64_t count = tensor.layout.element_count();
  Quantized result;
  result.codes.resize(tensor.format.SizeBytes(count));
  for (const auto& [first, last] :
       {std::pair<int64_t, int64_t>{0, middle}, {middle, count}}) {
    if (first == last || !result.status.ok()) continue;
    result.status = core::Quantize(
        tensor.encoding, tensor.layout, tensor.type, policy, first,
        last - first, reals.data() + first * ElementSizeBytes(tensor.type),
        result.codes.data() + tensor.format.SizeBytes(first), &result.counts,
        nullptr);
  }
  return result;
}

std::vector<uint8_t> Dequantize(const Tensor& tensor, int64_t middle,
                                const std::vector<uint8_t>& codes) {
  const int64_t count = tensor.layout.element_count();
  std::vector<uint8_t> reals(count * ElementSizeBytes(tensor.type));
  for (const auto& [first, last] :
       {std::pair<int64_t, int64_t>{0, middle}, {middle, count}}) {
    if (first == last) continue;
    core::Dequantize(
        tensor.encoding, tensor.layout, tensor.type, first, last - first,
        codes.data() + tensor.format.SizeBytes(first),
        reals.data() + first * ElementSizeBytes(tensor.type), nullptr);
  }
  return reals;
}

void UseSimd(bool simd) {
  Require(core::SetSimdTarget(simd ? "auto" : "scalar").ok(),
          "there are vectors and plain definitions");
}

void RequireTheSameEitherWay(const Tensor& tensor, core::NanPolicy policy,
                             uint64_t seed) {
  const int64_t count = tensor.layout.element_count();
  const float scale =
      tensor.encoding.scale[seed % tensor.encoding.scale.size()];
  const std::vector<float> values = MakeFloats(count, scale, seed);
  std::vector<uint8_t> reals(count * ElementSizeBytes(tensor.type));
  for (int64_t i = 0; i < count; ++i) {
    if (tensor.type == core::ElementType::kFloat64) {
      core::StoreElement<double>(tensor.type, values[i], reals.data(), i);
    } else {
      core::StoreElement<float>(tensor.type, values[i], reals.data(), i);
    }
  }
  int64_t middle = count / 3;
  middle -= middle % tensor.format.codes_per_byte();

  UseSimd(false);
  const Quantized plain = Quantize(tensor, policy, 0, reals);
  UseSimd(true);
  Require(Quantize(tensor, policy, 0, reals) == plain,
          "vectors quantize to the same codes");
  if (plain.status.ok()) {
    Require(Quantize(tensor, policy, middle, reals) == plain,
            "two parts quantize to the same codes");
  } else {
    Require(core::ErrorReason(plain.status) == "NON_FINITE_REJECTED",
            "only NaN and infinities are refused");
  }

  // Any byte may come as a code.
  std::vector<uint8_t> codes = plain.codes;
  for (size_t i = 0; i < codes.size(); i += 3) {
    codes[i] = static_cast<uint8_t>(seed >> i % 57);
  }
  UseSimd(false);
  const std::vector<uint8_t> back = Dequantize(tensor, 0, codes);
  UseSimd(true);
  Require(Dequantize(tensor, 0, codes) == back,
          "vectors dequantize to the same reals");
  Require(Dequantize(tensor, middle, codes) == back,
          "two parts dequantize to the same reals");
}

void Run(absl::Span<const uint8_t> input) {
  ByteSource source(input);
  const auto type = static_cast<core::ElementType>(1 + source.Byte() % 4);
  const auto policy = static_cast<core::NanPolicy>(source.Byte() % 4);
  v1::Encoding proto;
  if (!proto.ParseFromArray(source.rest().data(),
                            static_cast<int>(source.rest().size()))) {
    return;
  }
  const absl::StatusOr<core::Encoding> encoding =
      server::EncodingFromProto(proto);
  if (!encoding.ok()) {
    Require(!core::ErrorReason(encoding.status()).empty(),
            "errors have a reason");
    return;
  }
  Require(core::ValidateEncoding(*encoding).ok(), "what is taken is valid");
  v1::Encoding written;
  server::EncodingToProto(*encoding, &written);
  const absl::StatusOr<core::Encoding> again =
      server::EncodingFromProto(written);
  Require(again.ok(), "what is written is read");
  v1::Encoding rewritten;
  server::EncodingToProto(*again, &rewritten);
  Require(rewritten.SerializeAsString() == written.SerializeAsString(),
          "a round trip changes nothing");

  const absl::StatusOr<core::BlockLayout> layout =
      core::BlockLayout::Create(ShapeFor(*encoding), encoding->block_size);
  if (!layout.ok() || layout->element_count() > kMostElements ||
      !core::CheckEncodingFits(*encoding, *layout).ok()) {
    return;
  }
  RequireTheSameEitherWay(
      {*encoding, *core::FindFormat(encoding->format), *layout, type}, policy,
      Fingerprint(input));
}

std::string Seed(uint8_t type, uint8_t policy, const v1::Encoding& encoding) {
  return std::string{static_cast<char>(type), static_cast<char>(policy)} +
         encoding.SerializeAsString();
}

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds = {""};
  for (const core::FormatInfo& format : core::AllFormats()) {
    // Per tensor, and in blocks of one dimension of two.
    for (const bool blocks : {false, true}) {
      v1::Encoding encoding;
      encoding.set_format(static_cast<v1::NumberFormat>(format.format));
      const int count = blocks ? 3 : 1;
      const auto type = static_cast<v1::ScaleType>(format.scale_type);
      encoding.set_scale_type(type);
      if (blocks) {
        encoding.add_block_size(1);
        encoding.add_block_size(0);
        encoding.add_scale_shape(count);
        encoding.add_scale_shape(1);
      }
      for (int i = 0; i < count; ++i) {
        if (core::HasScaleCodes(format.scale_type)) {
          encoding.mutable_scale_code()->push_back(static_cast<char>(
              format.scale_type == core::ScaleType::kE8m0 ? 120 + i : 9 + i));
        } else {
          encoding.add_scale(0.5f + static_cast<float>(i) / 7);
        }
        if (format.kind == core::CodeKind::kInteger) {
          encoding.add_zero_point(
              core::IsWideInteger(format) ? 0 : format.qmin + i);
        }
      }
      if (core::HasOuterScales(format.scale_type)) {
        encoding.add_outer_scale(0.125f);
      }
      if (format.kind == core::CodeKind::kCodebook && format.codebook.empty()) {
        for (const float entry : {-1.0f, -0.25f, 0.5f}) {
          encoding.add_codebook(entry);
        }
      }
      seeds.push_back(Seed(static_cast<uint8_t>(seeds.size()), 0, encoding));
    }
  }
  v1::Encoding narrow;
  narrow.set_format(v1::NUMBER_FORMAT_INT8);
  narrow.add_scale(std::numeric_limits<float>::min());
  narrow.add_zero_point(1 << 22);
  narrow.set_qmin(-127);
  narrow.set_qmax(3);
  narrow.set_exclude_zero(true);
  seeds.push_back(Seed(0, 3, narrow));
  v1::Encoding real;
  real.set_format(v1::NUMBER_FORMAT_INT2);
  real.add_scale(2);
  real.add_real_zero_point(-0.5f);
  seeds.push_back(Seed(0, 0, real));
  real.set_exclude_zero(true);
  real.set_real_zero_point(0, 162.7016f);
  seeds.push_back(Seed(3, 3, real));
  narrow.set_scale_type(v1::SCALE_TYPE_BFLOAT16);
  narrow.set_scale(0, std::numeric_limits<float>::infinity());
  seeds.push_back(Seed(0, 2, narrow));
  return seeds;
}

size_t MessageAt(absl::Span<const uint8_t>) { return 2; }

}  // namespace
}  // namespace encoding_target

FuzzTarget EncodingTarget() {
  return {"encoding", encoding_target::Run, encoding_target::Seeds,
          encoding_target::MessageAt, &v1::Encoding::default_instance()};
}

}  // namespace quantd::fuzz
