// What became of the elements of a tensor that was quantized.

#ifndef QUANTD_CLIENT_JOBS_CODES_OUTCOME_H_
#define QUANTD_CLIENT_JOBS_CODES_OUTCOME_H_

#include <cstdint>
#include <optional>
#include <string>

#include "quantd/v1/quantization_service.pb.h"

namespace quantd::jobs {

// Plain value.
struct CodesOutcome {
  // Format of the codes; an encoding may have turned to the unsigned format.
  std::string format;
  // Elements that were out of range, ...
  uint64_t clipped_low_count = 0;
  uint64_t clipped_high_count = 0;
  // ... and that were not finite.
  uint64_t nan_count = 0;
  uint64_t infinity_count = 0;
  // Float16 scales below 2^-20, where that has few numbers.
  uint64_t coarse_scale_count = 0;
  // See v1::QuantizeResponseHeader.
  uint64_t mantissa_bits = 0;
  // True if rounded for the output of the layer, not each element by itself.
  bool is_compensated = false;
  // What that makes of the output.
  std::optional<v1::OutputNoise> output_noise;
  // The errors, with QuantizeOptions::evaluate.
  std::optional<v1::ErrorMetrics> metrics;
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_CODES_OUTCOME_H_
