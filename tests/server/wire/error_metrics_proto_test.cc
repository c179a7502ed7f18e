#include "server/wire/error_metrics_proto.h"

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "core/evaluate/evaluate.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "gtest/gtest.h"

namespace quantd::server {
namespace {

// Every figure is another one, and none is 0.
core::ErrorSums SomeSums() {
  core::ErrorSums sums;
  sums.count = 2;
  sums.non_finite = 3;
  sums.clipped_low = 4;
  sums.clipped_high = 5;
  sums.zero_flushed = 6;
  sums.squared_error = 7;
  sums.absolute_error = 8;
  sums.relative_error = 9;
  sums.signal = 100;
  sums.reconstructed = 110;
  sums.product = 90;
  sums.max_absolute_error = 12;
  sums.max_relative_error = 13;
  return sums;
}

MetricSet SetOf(const std::vector<v1::ErrorMetric>& metrics) {
  v1::EvaluateHeader header;
  for (const v1::ErrorMetric metric : metrics) header.add_metrics(metric);
  const absl::StatusOr<MetricSet> set = MetricSet::Of(header);
  EXPECT_TRUE(set.ok()) << set.status();
  return *set;
}

std::vector<std::string> FieldsOf(const v1::ErrorMetrics& metrics) {
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  metrics.GetReflection()->ListFields(metrics, &fields);
  std::vector<std::string> names;
  for (const auto* field : fields) names.push_back(field->name());
  return names;
}

TEST(ErrorMetricsProtoTest, EveryMetricIsTheFieldOfItsNameAndNumber) {
  const auto& metrics = *v1::ErrorMetric_descriptor();
  for (int i = 1; i < metrics.value_count(); ++i) {
    const auto& metric = *metrics.value(i);
    const auto* field =
        v1::ErrorMetrics::descriptor()->FindFieldByNumber(metric.number());
    ASSERT_NE(field, nullptr) << metric.name();
    EXPECT_EQ(
        absl::StrCat("ERROR_METRIC_", absl::AsciiStrToUpper(field->name())),
        metric.name());
  }
}

TEST(ErrorMetricsProtoTest, OneMetricIsAnsweredWithTheCountsAlone) {
  v1::ErrorMetrics all;
  MetricsToProto(SomeSums(), MetricSet(), &all);
  const auto& metrics = *v1::ErrorMetric_descriptor();
  EXPECT_EQ(FieldsOf(all).size(), 4 + metrics.value_count() - 1);
  for (int i = 1; i < metrics.value_count(); ++i) {
    const auto metric =
        static_cast<v1::ErrorMetric>(metrics.value(i)->number());
    SCOPED_TRACE(metrics.value(i)->name());
    const auto* field =
        v1::ErrorMetrics::descriptor()->FindFieldByNumber(metric);
    v1::ErrorMetrics one;
    MetricsToProto(SomeSums(), SetOf({metric}), &one);
    EXPECT_EQ(FieldsOf(one),
              (std::vector<std::string>{"count", "non_finite_count",
                                        "clipped_low_count",
                                        "clipped_high_count", field->name()}));
    one.MergeFrom(all);
    EXPECT_EQ(one.SerializeAsString(), all.SerializeAsString());
  }
}

TEST(ErrorMetricsProtoTest, OnlyWhatNeedsAllSumsHasThemAddedUp) {
  const std::vector<v1::ErrorMetric> noise = {
      v1::ERROR_METRIC_SQNR_DB, v1::ERROR_METRIC_MAX_ABSOLUTE_ERROR,
      v1::ERROR_METRIC_SUM_SQUARED_ERROR, v1::ERROR_METRIC_MEAN_SQUARED_ERROR};
  EXPECT_EQ(MetricSet().sums(), core::ErrorSumSet::kAll);
  EXPECT_EQ(SetOf(noise).sums(), core::ErrorSumSet::kNoise);
  // What a metric needs can be seen where the other sums are nonsense.
  core::ErrorSums nonsense = SomeSums();
  nonsense.zero_flushed = -1;
  nonsense.absolute_error = nonsense.relative_error = -1;
  nonsense.reconstructed = nonsense.product = nonsense.max_relative_error = -1;
  const auto& metrics = *v1::ErrorMetric_descriptor();
  for (int i = 1; i < metrics.value_count(); ++i) {
    const auto metric =
        static_cast<v1::ErrorMetric>(metrics.value(i)->number());
    SCOPED_TRACE(metrics.value(i)->name());
    const MetricSet set = SetOf({metric});
    v1::ErrorMetrics want;
    MetricsToProto(SomeSums(), set, &want);
    v1::ErrorMetrics got;
    MetricsToProto(nonsense, set, &got);
    const bool has_what_it_needs =
        got.SerializeAsString() == want.SerializeAsString();
    EXPECT_EQ(set.sums() == core::ErrorSumSet::kNoise, has_what_it_needs);
  }
}

TEST(ErrorMetricsProtoTest, TheAnswerListsThemOnceAndInOrder) {
  v1::EvaluateSummary summary;
  SetOf({v1::ERROR_METRIC_SQNR_DB, v1::ERROR_METRIC_SUM_SQUARED_ERROR,
         v1::ERROR_METRIC_SQNR_DB})
      .ListIn(&summary);
  ASSERT_EQ(summary.metrics_size(), 2);
  EXPECT_EQ(summary.metrics(0), v1::ERROR_METRIC_SUM_SQUARED_ERROR);
  EXPECT_EQ(summary.metrics(1), v1::ERROR_METRIC_SQNR_DB);
  v1::EvaluateSummary of_all;
  MetricSet().ListIn(&of_all);
  EXPECT_EQ(of_all.metrics_size(), 0);
}

TEST(ErrorMetricsProtoTest, NamesAMetricThatThereIsNot) {
  for (const int value : {0, 1, 14, 31, 32, -1}) {
    SCOPED_TRACE(value);
    v1::EvaluateHeader header;
    header.add_metrics(v1::ERROR_METRIC_SQNR_DB);
    header.add_metrics(static_cast<v1::ErrorMetric>(value));
    const absl::Status status = MetricSet::Of(header).status();
    EXPECT_EQ(core::ErrorReason(status), "ENUM_UNKNOWN");
    EXPECT_EQ(core::ErrorField(status), "metrics[1]");
  }
}

}  // namespace
}  // namespace quantd::server
