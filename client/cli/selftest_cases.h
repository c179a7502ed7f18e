// The tensors that `quantctl selftest` sends: the same on every machine.

#ifndef QUANTD_CLIENT_CLI_SELFTEST_CASES_H_
#define QUANTD_CLIENT_CLI_SELFTEST_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/cpp/tensor.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::cli {

enum class SelftestData {
  kOrdinary,  // nearly normal, with some outliers
  kStrange,   // with NaN, infinities, zeros and tiny numbers among them
  kLarge      // ordinary, and more than fits one chunk
};

// A tensor and what to do with it. Plain value.
struct SelftestCase {
  // "int8:per-channel bfloat16": one of its own for each case.
  std::string name;
  // A spec for ParseSpec.
  std::string spec;
  ElementType type = ElementType::kFloat32;
  SelftestData data = SelftestData::kOrdinary;
  v1::NanPolicy nan_policy = v1::NAN_POLICY_UNSPECIFIED;
};

// All formats in several granularities, all methods, types and policies.
std::vector<SelftestCase> SelftestCases();

std::vector<int64_t> SelftestShape(SelftestData data);
// The elements, by integer arithmetic alone.
std::vector<uint8_t> SelftestElements(SelftestData data, ElementType type);

// Lines "NAME: HASH HASH HASH HASH", one for each case, of the hashes that
// every server has to give: of encoding, codes, restored elements and metrics.
// client/cli/selftest_hashes.txt.
extern const absl::string_view kSelftestHashes;

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_SELFTEST_CASES_H_
