#include "client/cli/message_json.h"

#include <string>

#include "absl/time/time.h"
#include "client/cli/session.h"
#include "google/protobuf/util/json_util.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {

Json MessageJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string text;
  // It fails only for Any of an unknown type, of which there is none.
  static_cast<void>(
      google::protobuf::util::MessageToJsonString(message, &text, options));
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

Json PredictionJson(const v1::Prediction& prediction) {
  return {{"count", prediction.count()},
          {"mean_squared_error", prediction.mean_squared_error()},
          {"mean_squared_error_low", prediction.mean_squared_error_low()},
          {"mean_squared_error_high", prediction.mean_squared_error_high()},
          {"sqnr_db", prediction.sqnr_db()},
          {"sqnr_db_low", prediction.sqnr_db_low()},
          {"sqnr_db_high", prediction.sqnr_db_high()},
          {"mantissa_bits", prediction.mantissa_bits()}};
}

Json StatisticsJson(const v1::TensorStatistics& statistics) {
  return {{"count", statistics.count()},
          {"min", statistics.min()},
          {"max", statistics.max()},
          {"nan_count", statistics.nan_count()},
          {"positive_infinity_count", statistics.positive_infinity_count()},
          {"negative_infinity_count", statistics.negative_infinity_count()},
          {"zero_count", statistics.zero_count()}};
}

std::string TimeText(const google::protobuf::Timestamp& time) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S",
                          absl::FromUnixSeconds(time.seconds()),
                          absl::UTCTimeZone());
}

}  // namespace quantd::cli
