#include "client/cli/weight_fit.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::cli {
namespace {

// Scales of one weight in two float types differ by no more: half a unit in the
// last place of bfloat16.
constexpr float kRounding = 1.0F / 256;
// How much worse an encoding may be than another one of its own method, which
// may have seen a histogram in place of the elements.
constexpr double kMethodLossDb = 6;
// Beyond this the loss is none.
constexpr double kGoodDb = 60;
// How much of a weight an encoding that a client made may clip.
constexpr double kMostClipped = 0.01;

bool IsFromExtremes(const v1::EncodingProvenance& provenance) {
  const v1::CalibrationMethod method = provenance.spec().method();
  return provenance.has_spec() &&
         (method == v1::CALIBRATION_METHOD_UNSPECIFIED ||
          method == v1::CALIBRATION_METHOD_MIN_MAX);
}

// True if the same encoding can be computed again from the elements alone.
bool IsFromElements(const v1::EncodingProvenance& provenance) {
  const v1::CalibrationMethod method = provenance.spec().method();
  return method == v1::CALIBRATION_METHOD_PERCENTILE ||
         method == v1::CALIBRATION_METHOD_MSE ||
         method == v1::CALIBRATION_METHOD_SQNR ||
         method == v1::CALIBRATION_METHOD_ENTROPY;
}

// The largest ratio of two scales of the same index, at least 1; infinite if
// the encodings differ in more than their scales and zero points.
float LargestRatio(const Encoding& a, const Encoding& b) {
  float ratio = 1;
  if (a.format() != b.format() || a.scale_size() != b.scale_size()) {
    return INFINITY;
  }
  for (int i = 0; i < a.scale_size(); ++i) {
    if (a.scale(i) == b.scale(i)) continue;
    const float quotient = std::abs(a.scale(i) / b.scale(i));
    if (!(quotient > 0)) return INFINITY;
    ratio = std::max({ratio, quotient, 1 / quotient});
  }
  return ratio;
}

// True if no two zero points of the same index are further apart.
bool AreZeroPointsWithin(int distance, const Encoding& a, const Encoding& b) {
  return std::equal(a.zero_point().begin(), a.zero_point().end(),
                    b.zero_point().begin(), b.zero_point().end(),
                    [distance](int32_t one, int32_t other) {
                      return std::abs(one - other) <= distance;
                    });
}

absl::StatusOr<QuantizeResult> QuantizeAs(const Tensor& weight,
                                          EncodingSource source,
                                          Client* client) {
  QuantizeJob job;
  job.tensor = weight;
  job.source = std::move(source);
  return client->Quantize(job);
}

// Errors: ARGUMENT_INVALID: the encoding is worse than its method allows.
absl::Status CheckLoss(const Tensor& weight, const v1::StoredEncoding& stored,
                       Client* client) {
  EncodingSpec spec = stored.provenance().spec();
  spec.clear_importance();
  EvaluateJob job;
  job.tensor = weight;
  job.candidates = {{stored.encoding(), ""}, {spec, ""}};
  job.omit_encodings = true;
  job.metrics = {v1::ERROR_METRIC_SQNR_DB};
  const absl::StatusOr<v1::EvaluateSummary> summary = client->Evaluate(job);
  if (!summary.ok()) return summary.status();
  const double got_db = summary->candidates(0).overall().sqnr_db();
  const double expected_db =
      std::min(summary->candidates(1).overall().sqnr_db(), kGoodDb);
  if (!(got_db < expected_db - kMethodLossDb)) return absl::OkStatus();
  return ArgumentInvalidError(absl::StrFormat(
      "its encoding was computed from another weight than the model has: "
      "expected an SQNR of about %.1f dB, got %.1f dB; compute it from the "
      "weights of the .onnx file",
      expected_db, got_db));
}

// Checks an encoding whose making is not known.
// Errors: ARGUMENT_INVALID: it clips much.
absl::Status CheckClipped(const v1::QuantizeSummary& summary) {
  const uint64_t clipped =
      summary.clipped_low_count() + summary.clipped_high_count();
  if (static_cast<double>(clipped) <=
      kMostClipped * static_cast<double>(summary.count())) {
    return absl::OkStatus();
  }
  return ArgumentInvalidError(absl::StrCat(
      "its encoding clips ", clipped, " of ", summary.count(),
      " elements of the weight that the model has; compute it from the weights "
      "of the .onnx file"));
}

}  // namespace

absl::StatusOr<FittedWeight> QuantizeFitted(const Tensor& weight,
                                            const v1::StoredEncoding& stored,
                                            Client* client) {
  const Encoding& encoding = stored.encoding();
  FittedWeight fitted{encoding, {}, ""};
  // Outer scales may be those of a group of tensors.
  if (IsFromExtremes(stored.provenance()) && encoding.outer_scale_size() == 0) {
    absl::StatusOr<QuantizeResult> own =
        QuantizeAs(weight, stored.provenance().spec(), client);
    if (!own.ok()) return own.status();
    const Encoding& own_encoding = own->header.encoding();
    const float ratio = LargestRatio(own_encoding, encoding);
    const bool is_alike = ratio <= 1 + kRounding &&
                          AreZeroPointsWithin(1, own_encoding, encoding);
    const bool is_same =
        ratio == 1 && AreZeroPointsWithin(0, own_encoding, encoding);
    if (!is_alike) {
      fitted.encoding = own_encoding;
      fitted.note = absl::StrFormat(
          "the weight of the model is not the one that its encoding was "
          "computed from: scales are up to %.3g times as large or small; "
          "computed again from the model",
          ratio);
    }
    if (is_same || !is_alike) {
      fitted.result = *std::move(own);
      return fitted;
    }
  } else if (IsFromElements(stored.provenance())) {
    const absl::Status status = CheckLoss(weight, stored, client);
    if (!status.ok()) return status;
  }
  absl::StatusOr<QuantizeResult> result = QuantizeAs(weight, encoding, client);
  if (!result.ok()) return result.status();
  if (!stored.provenance().has_spec()) {
    const absl::Status status = CheckClipped(result->summary);
    if (!status.ok()) return status;
  }
  fitted.result = *std::move(result);
  return fitted;
}

}  // namespace quantd::cli
