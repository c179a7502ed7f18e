#include "client/cli/message_json.h"

#include <limits>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd::cli {
namespace {

TEST(MessageJsonTest, HasTheNamesOfTheProto) {
  v1::Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  encoding.add_zero_point(3);
  const Json json = MessageJson(encoding);
  EXPECT_EQ(json["format"], "NUMBER_FORMAT_INT8");
  EXPECT_EQ(json["scale"], Json::array({0.5}));
  EXPECT_EQ(json["zero_point"], Json::array({3}));
  EXPECT_EQ(MessageJson(v1::Encoding()), Json::object());
}

TEST(PredictionJsonTest, HasEveryNumberUnderItsName) {
  v1::Prediction prediction;
  prediction.set_count(1);
  prediction.set_mean_squared_error(2);
  prediction.set_mean_squared_error_low(3);
  prediction.set_mean_squared_error_high(4);
  prediction.set_sqnr_db(5);
  prediction.set_sqnr_db_low(6);
  prediction.set_sqnr_db_high(7);
  prediction.set_mantissa_bits(8);
  EXPECT_EQ(PredictionJson(prediction).dump(),
            R"({"count":1,"mean_squared_error":2.0,)"
            R"("mean_squared_error_low":3.0,"mean_squared_error_high":4.0,)"
            R"("sqnr_db":5.0,"sqnr_db_low":6.0,"sqnr_db_high":7.0,)"
            R"("mantissa_bits":8})");
  prediction.set_sqnr_db(std::numeric_limits<double>::infinity());
  EXPECT_NE(PredictionJson(prediction).dump().find(R"("sqnr_db":null)"),
            std::string::npos);
}

TEST(StatisticsJsonTest, HasEveryNumberUnderItsName) {
  v1::TensorStatistics statistics;
  statistics.set_count(1);
  statistics.set_min(-2);
  statistics.set_max(3);
  statistics.set_nan_count(4);
  statistics.set_positive_infinity_count(5);
  statistics.set_negative_infinity_count(6);
  statistics.set_zero_count(7);
  EXPECT_EQ(StatisticsJson(statistics).dump(),
            R"({"count":1,"min":-2.0,"max":3.0,"nan_count":4,)"
            R"("positive_infinity_count":5,"negative_infinity_count":6,)"
            R"("zero_count":7})");
}

TEST(TimeTextTest, IsOfUtc) {
  google::protobuf::Timestamp time;
  EXPECT_EQ(TimeText(time), "1970-01-01 00:00:00");
  time.set_seconds(1'769'903'999);
  time.set_nanos(999'999'999);
  EXPECT_EQ(TimeText(time), "2026-01-31 23:59:59");
}

}  // namespace
}  // namespace quantd::cli
