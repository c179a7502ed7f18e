// Specs from outside: whatever is taken and fits a small tensor calibrates to a
// valid encoding that fits it too, with an error within the bounds that were
// predicted, or is refused with a reason.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/prediction.h"
#include "core/dequantize/dequantize.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "core/quantize/quantize.h"
#include "core/statistics/held_tensor.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "quantd/v1/encoding.pb.h"
#include "server/wire/encoding_proto.h"
#include "tests/fuzz/fuzz_target.h"

namespace quantd::fuzz {
namespace spec_target {
namespace {

// The search costs in proportion; what a fuzzer is after is elsewhere.
constexpr int kMostSearchSteps = 8;
constexpr int kMostEntropyBins = 256;

// What the calibration promises of its encoding on `values`.
void RequirePromises(const core::Calibration& calibration,
                     const core::BlockLayout& layout,
                     const std::vector<float>& values) {
  const core::Encoding& encoding = calibration.encoding;
  Require(core::ValidateEncoding(encoding).ok(), "what is calibrated is valid");
  Require(core::CheckEncodingFits(encoding, layout).ok(),
          "what is calibrated fits");
  v1::Encoding proto;
  server::EncodingToProto(encoding, &proto);
  Require(server::EncodingFromProto(proto).ok(), "what is calibrated is taken");

  const int64_t count = layout.element_count();
  std::vector<uint8_t> codes(
      core::FindFormat(encoding.format)->SizeBytes(count));
  std::vector<float> back(count);
  core::QuantizeCounts counts;
  if (count > 0) {
    Require(core::Quantize(encoding, layout, core::ElementType::kFloat32,
                           core::NanPolicy::kDefault, 0, count,
                           reinterpret_cast<const uint8_t*>(values.data()),
                           codes.data(), &counts, nullptr)
                .ok(),
            "what is calibrated quantizes");
    core::Dequantize(encoding, layout, core::ElementType::kFloat32, 0, count,
                     codes.data(), reinterpret_cast<uint8_t*>(back.data()),
                     nullptr);
  }
  if (!calibration.prediction.has_value()) return;
  const core::Prediction& prediction = *calibration.prediction;
  double error = 0;
  uint64_t finite = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) continue;
    ++finite;
    // What an unsaturated format or a marked block makes of a number is not a
    // matter of bounds.
    if (!std::isfinite(back[i])) return;
    const double e = double{back[i]} - double{values[i]};
    error += e * e;
  }
  // The order of the sums is not the prediction's.
  constexpr double kSlack = 1e-9;
  Require(prediction.count == finite, "a prediction is about all elements");
  Require(prediction.squared_error_low <= prediction.squared_error_high &&
              prediction.squared_error_low <= error * (1 + kSlack) &&
              prediction.squared_error_high >= error * (1 - kSlack),
          "the error is within the bounds predicted");
}

void Run(absl::Span<const uint8_t> input) {
  ByteSource source(input);
  std::vector<int64_t> shape;
  for (int d = source.Byte() % 4; d > 0; --d) {
    shape.push_back(source.Byte() % 20);
  }
  const uint8_t kind = source.Byte();
  v1::EncodingSpec proto;
  if (!proto.ParseFromArray(source.rest().data(),
                            static_cast<int>(source.rest().size()))) {
    return;
  }
  if (proto.search_steps() <= 2048) {
    proto.set_search_steps(
        std::min<uint32_t>(proto.search_steps(), kMostSearchSteps));
  }
  if (proto.entropy_bins() <= 16384) {
    proto.set_entropy_bins(
        std::min<uint32_t>(proto.entropy_bins(), kMostEntropyBins));
  }
  const absl::StatusOr<core::EncodingSpec> parsed =
      server::SpecFromProto(proto);
  if (!parsed.ok()) {
    Require(!core::ErrorReason(parsed.status()).empty(),
            "errors have a reason");
    return;
  }
  const absl::StatusOr<core::EncodingSpec> spec =
      core::ResolveSpec(*parsed, shape);
  if (!spec.ok()) {
    Require(core::ErrorReason(spec.status()) == "BLOCK_SIZE_INVALID" ||
                !parsed->scale_range_min.empty(),
            "a spec fits unless its blocks or ranges do not");
    return;
  }
  const absl::StatusOr<core::BlockLayout> layout =
      core::BlockLayout::Create(shape, spec->block_size);
  Require(layout.ok(), "what is resolved has a layout");
  // A tensor without scales has no encoding; the server refuses it by then.
  if (layout->scale_count() == 0) return;
  std::vector<float> values =
      MakeFloats(layout->element_count(), std::ldexp(1.0f, kind % 64 - 32),
                 Fingerprint(input));
  for (float& value : values) {
    if (kind & 0x40) value = std::abs(value);
    if (kind & 0x80 && !std::isfinite(value)) value = 1;
  }
  core::TensorStatistics statistics(
      layout->scale_count(), core::NeedsHistograms(*spec) ? 2 + kind % 9 : 0);
  statistics.Update(*layout, core::ElementType::kFloat32, 0,
                    layout->element_count(),
                    reinterpret_cast<const uint8_t*>(values.data()), nullptr);
  const absl::StatusOr<core::Calibration> calibration =
      core::Calibrate(*spec, *layout, statistics, {}, nullptr);
  if (!calibration.ok()) {
    Require(!core::ErrorReason(calibration.status()).empty(),
            "errors have a reason");
    return;
  }
  RequirePromises(*calibration, *layout, values);

  // Of the tensor itself, one scale index at a time.
  core::EncodingSpec as_fine = *spec;
  as_fine.mantissa_bits = statistics.mantissa_bits();
  core::TensorStatistics extremes(layout->scale_count());
  extremes.Update(*layout, core::ElementType::kFloat32, 0,
                  layout->element_count(),
                  reinterpret_cast<const uint8_t*>(values.data()), nullptr);
  const core::HeldTensor held(
      *layout, core::ElementType::kFloat32,
      std::max<int64_t>(1, layout->element_count()),
      {reinterpret_cast<const uint8_t*>(values.data())});
  const absl::StatusOr<core::Calibration> same = core::Calibrate(
      as_fine, *layout, extremes, {}, nullptr, core::StopToken(), &held);
  if (core::IsSearchedDirectly(*spec, *layout)) {
    // Not by histograms: the range is another one, and so is its scale.
    if (same.ok()) {
      RequirePromises(*same, *layout, values);
    } else {
      Require(core::ErrorReason(same.status()) == "SCALE_OVERFLOW",
              "a held tensor has a range unless its scale does not fit");
    }
    return;
  }
  Require(same.ok(), "a held tensor is as good as its histograms");
  Require(same->encoding == calibration->encoding,
          "a held tensor is as good as its histograms");
}

std::string Seed(const std::string& shape_and_kind,
                 const v1::EncodingSpec& spec) {
  return shape_and_kind + spec.SerializeAsString();
}

std::vector<std::string> Seeds() {
  const std::string matrix("\x02\x03\x11\x60", 4);
  const std::string cube("\x03\x02\x13\x03\xa3", 5);
  const std::string scalar("\x00\x21", 2);
  std::vector<std::string> seeds = {""};
  for (const core::FormatInfo& format : core::AllFormats()) {
    v1::EncodingSpec spec;
    spec.set_format(static_cast<v1::NumberFormat>(format.format));
    if (format.kind == core::CodeKind::kCodebook && format.codebook.empty()) {
      for (const float entry : {-1.0f, 0.0f, 0.5f}) spec.add_codebook(entry);
    }
    // Every method with some format.
    spec.set_method(static_cast<v1::CalibrationMethod>(1 + seeds.size() % 7));
    spec.set_range_min(-2);
    spec.set_range_max(3);
    seeds.push_back(Seed(seeds.size() % 2 ? matrix : cube, spec));
  }
  v1::EncodingSpec spec;
  spec.set_format(v1::NUMBER_FORMAT_INT8);
  spec.set_symmetry(v1::SYMMETRY_ASYMMETRIC);
  spec.set_exclude_zero(true);
  seeds.push_back(Seed(cube, spec));
  spec.set_method(v1::CALIBRATION_METHOD_BEST_OF);
  spec.add_methods(v1::CALIBRATION_METHOD_MSE);
  spec.add_methods(v1::CALIBRATION_METHOD_PERCENTILE);
  spec.set_objective(v1::OBJECTIVE_SQNR);
  spec.set_gamma(2);
  spec.set_tail(v1::TAIL_BOTH);
  spec.set_tail_fraction(0.25);
  spec.mutable_granularity()->set_axis(-1);
  spec.mutable_granularity()->set_group_size(4);
  seeds.push_back(Seed(matrix, spec));
  v1::EncodingSpec real;
  real.set_format(v1::NUMBER_FORMAT_UINT8);
  real.set_real_zero_point(true);
  real.set_method(v1::CALIBRATION_METHOD_PERCENTILE);
  seeds.push_back(Seed(matrix, real));
  real.set_method(v1::CALIBRATION_METHOD_FIXED_RANGE);
  real.set_exclude_zero(true);
  real.add_scale_range_min(1);
  real.add_scale_range_max(3);
  seeds.push_back(Seed(scalar, real));
  v1::EncodingSpec symmetric;
  symmetric.set_format(v1::NUMBER_FORMAT_INT4);
  symmetric.set_symmetry(v1::SYMMETRY_HALF_STEP);
  symmetric.set_unsigned_if_non_negative(true);
  symmetric.set_power_of_two_scale(true);
  symmetric.set_scale_type(v1::SCALE_TYPE_FLOAT16);
  symmetric.set_method(v1::CALIBRATION_METHOD_ENTROPY);
  symmetric.set_entropy_bins(64);
  symmetric.set_search_steps(4);
  seeds.push_back(Seed(scalar, symmetric));
  symmetric.set_symmetry(v1::SYMMETRY_AIMET);
  symmetric.set_method(v1::CALIBRATION_METHOD_MSE);
  symmetric.set_mantissa_bits(4);
  seeds.push_back(Seed(matrix, symmetric));
  return seeds;
}

// After the rank, the shape and the kind of data.
size_t MessageAt(absl::Span<const uint8_t> input) {
  return input.empty() ? 0 : 2 + input[0] % 4;
}

}  // namespace
}  // namespace spec_target

FuzzTarget SpecTarget() {
  return {"spec", spec_target::Run, spec_target::Seeds, spec_target::MessageAt,
          &v1::EncodingSpec::default_instance()};
}

}  // namespace quantd::fuzz
