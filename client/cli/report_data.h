// The statistics of a tensor that the page of a report shows.

#ifndef QUANTD_CLIENT_CLI_REPORT_DATA_H_
#define QUANTD_CLIENT_CLI_REPORT_DATA_H_

#include <vector>

#include "absl/types/span.h"
#include "quantd/v1/statistics.pb.h"

namespace quantd::cli {

// Elements by linear bins between the smallest and the largest, and the ends
// between which all but a thousandth of them lie. Plain value.
struct Distribution {
  // The beginning of the first bin and the end of the last one.
  double first_edge = 0;
  double last_edge = 0;
  std::vector<double> counts;
  double low = 0;
  double high = 0;
};

// The distribution of all scale indices together. A bin of the state that lies
// in several of
// the result is shared out evenly. A state that is not sound gives one without
// counts.
Distribution DistributionOf(const v1::StatisticsState& state);

// A summary of the finite elements of all scale indices. Plain value.
struct Summary {
  // Exact up to the last bits. NaN where there is no element, or where a sum
  // of squares is not sound.
  double mean = 0;
  double deviation = 0;
  // Below which these parts of the elements lie, within the width of a bin; as
  // many as were asked for, or none.
  std::vector<double> quantiles;
};
Summary SummaryOf(const v1::StatisticsState& state,
                  absl::Span<const double> fractions);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_REPORT_DATA_H_
