// Contributions, and what is computed from them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/statistics/statistics_state.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "prometheus/metric_family.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/metric_value.h"
#include "tests/support/raw_stream.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing::statistics_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kModel[] = "net";

v1::EncodingSpec Spec(
    v1::NumberFormat format,
    v1::CalibrationMethod method = v1::CALIBRATION_METHOD_MIN_MAX) {
  v1::EncodingSpec spec;
  spec.set_format(format);
  spec.set_method(method);
  return spec;
}

// A bell of `count` elements, the same each time.
std::vector<float> Bell(int count, float width = 1) {
  std::vector<float> values;
  for (int i = 0; i < count; ++i) {
    const double u = (i + 0.5) / count;
    values.push_back(static_cast<float>(width * std::log(u / (1 - u))));
  }
  return values;
}

class StatisticsRpcTest : public ::testing::Test {
 protected:
  explicit StatisticsRpcTest(server::ServerOptions options = {})
      : server_(std::move(options)) {}

  static v1::CalibrateHeader Header(const std::string& tensor, int64_t count,
                                    const std::string& source = "a",
                                    uint64_t sequence = 1) {
    v1::CalibrateHeader header;
    header.mutable_tensor()->mutable_name()->set_model(kModel);
    header.mutable_tensor()->mutable_name()->set_tensor(tensor);
    header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    header.mutable_tensor()->add_shape(count);
    header.mutable_contribution()->set_source(source);
    header.mutable_contribution()->set_sequence(sequence);
    return header;
  }

  v1::CalibrateSummary MustCalibrate(const v1::CalibrateHeader& header,
                                     const std::vector<float>& values,
                                     int64_t chunk_bytes = 4096) {
    const absl::StatusOr<v1::CalibrateSummary> summary =
        Calibrate(server_.quantization(), header, ToBytes(values), chunk_bytes);
    EXPECT_TRUE(summary.ok()) << summary.status();
    return summary.ok() ? *summary : v1::CalibrateSummary();
  }

  void Contribute(const std::string& tensor, const std::vector<float>& values,
                  const std::string& source = "a", uint64_t sequence = 1) {
    const v1::CalibrateSummary summary = MustCalibrate(
        Header(tensor, static_cast<int64_t>(values.size()), source, sequence),
        values);
    EXPECT_EQ(summary.contribution().sequence(), sequence);
    EXPECT_FALSE(summary.contribution().duplicate());
  }

  std::vector<v1::ComputeEncodingsResponse> Compute(
      v1::ComputeEncodingsRequest request) {
    grpc::ClientContext context;
    request.set_model(kModel);
    const auto stream = server_.encodings().ComputeEncodings(&context, request);
    std::vector<v1::ComputeEncodingsResponse> responses;
    v1::ComputeEncodingsResponse response;
    while (stream->Read(&response)) responses.push_back(response);
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return responses;
  }

  std::vector<v1::SweepResponse> Sweep(v1::SweepRequest request) {
    grpc::ClientContext context;
    request.set_model(kModel);
    const auto stream = server_.encodings().Sweep(&context, request);
    std::vector<v1::SweepResponse> responses;
    v1::SweepResponse response;
    while (stream->Read(&response)) responses.push_back(response);
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_FALSE(responses.empty());
    return responses;
  }

  absl::StatusOr<v1::StoredEncoding> GetEncoding(const std::string& tensor) {
    grpc::ClientContext context;
    v1::GetEncodingRequest request;
    request.mutable_name()->set_model(kModel);
    request.mutable_name()->set_tensor(tensor);
    v1::GetEncodingResponse response;
    const grpc::Status status =
        server_.encodings().GetEncoding(&context, request, &response);
    if (!status.ok()) return FromGrpcStatus(status);
    return response.stored_encoding();
  }

  absl::StatusOr<v1::GetStatisticsResponse> GetStatistics(
      const std::string& tensor, bool with_state, bool per_tensor = false) {
    grpc::ClientContext context;
    v1::GetStatisticsRequest request;
    request.mutable_name()->set_model(kModel);
    request.mutable_name()->set_tensor(tensor);
    request.set_with_state(with_state);
    request.set_per_tensor(per_tensor);
    v1::GetStatisticsResponse response;
    const grpc::Status status =
        server_.encodings().GetStatistics(&context, request, &response);
    if (!status.ok()) return FromGrpcStatus(status);
    return response;
  }

  // Contributes kLongSweepTensors tensors and asks for a sweep of all of them
  // that takes seconds.
  v1::SweepRequest MakeLongSweep() {
    for (int i = 0; i < kLongSweepTensors; ++i) {
      Contribute(absl::StrCat("t", i), Bell(200));
    }
    v1::SweepRequest request;
    request.set_model(kModel);
    for (int i = 0; i < 16; ++i) {
      *request.add_specs() =
          Spec(v1::NUMBER_FORMAT_UINT8, v1::CALIBRATION_METHOD_ENTROPY);
    }
    return request;
  }

  static constexpr int kLongSweepTensors = 200;

  double Metric(const std::string& name) {
    return MetricValue(server_.metrics(), name);
  }

  // How often the store was asked for statistics.
  uint64_t CountReads() {
    uint64_t count = 0;
    for (const prometheus::MetricFamily& family : server_.metrics().Collect()) {
      if (family.name != "quantd_store_seconds") continue;
      for (const prometheus::ClientMetric& metric : family.metric) {
        if (metric.label.at(0).value == "get_statistics") {
          count += metric.histogram.sample_count;
        }
      }
    }
    return count;
  }

  void ExpectNothingHeld() {
    EXPECT_TRUE(PollUntil(kLongEnough, [&] {
      return server_.server().memory_used_bytes() == 0;
    })) << server_.server().memory_used_bytes();
  }

  TestServer server_;
};

TEST_F(StatisticsRpcTest, AContributionWithASpecEncodesAllContributions) {
  v1::CalibrateHeader header = Header("x", 2, "a", 1);
  *header.mutable_spec() = Spec(v1::NUMBER_FORMAT_INT8);
  v1::CalibrateSummary summary = MustCalibrate(header, {-127, 3});
  EXPECT_THAT(summary.stored_encoding().encoding().scale(), ElementsAre(1));
  EXPECT_EQ(summary.prediction().count(), 2u);
  header.mutable_contribution()->set_source("b");
  summary = MustCalibrate(header, {5, 254});
  EXPECT_THAT(summary.stored_encoding().encoding().scale(), ElementsAre(2));
  EXPECT_EQ(summary.prediction().count(), 4u);
  // The summary's own statistics are those of the tensor that came.
  EXPECT_EQ(summary.statistics().count(), 2u);
  EXPECT_EQ(summary.statistics().min(), 5);
  // A duplicate is answered with what is there.
  summary = MustCalibrate(header, {1000, 1000});
  EXPECT_TRUE(summary.contribution().duplicate());
  EXPECT_THAT(summary.stored_encoding().encoding().scale(), ElementsAre(2));
  const absl::StatusOr<v1::StoredEncoding> stored = GetEncoding("x");
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->etag(), summary.stored_encoding().etag());
}

TEST_F(StatisticsRpcTest, TheMovingAverageNeedsASingleSource) {
  v1::CalibrateHeader header = Header("x", 2);
  header.mutable_contribution()->set_averaging_constant(0.5);
  MustCalibrate(header, {-1, 10});
  header.mutable_contribution()->set_sequence(2);
  *header.mutable_spec() =
      Spec(v1::NUMBER_FORMAT_INT8, v1::CALIBRATION_METHOD_MOVING_AVERAGE);
  const v1::CalibrateSummary summary = MustCalibrate(header, {0, 244});
  EXPECT_THAT(summary.stored_encoding().encoding().scale(), ElementsAre(1));
  header.mutable_contribution()->set_source("b");
  const absl::Status status =
      Calibrate(server_.quantization(), header, ToBytes<float>({1, 2}))
          .status();
  EXPECT_THAT(status.ToString(), HasSubstr("METHOD_INVALID"));
}

TEST_F(StatisticsRpcTest, EveryMethodWorksWithoutAContribution) {
  // Too many to be searched themselves.
  constexpr int kCount = 70000;
  const std::vector<float> values = Bell(kCount);
  for (int method = 1; method <= 8; ++method) {
    v1::EncodingSpec spec = Spec(v1::NUMBER_FORMAT_INT4,
                                 static_cast<v1::CalibrationMethod>(method));
    if (method == v1::CALIBRATION_METHOD_FIXED_RANGE) {
      spec.set_range_min(-3);
      spec.set_range_max(3);
    }
    if (method == v1::CALIBRATION_METHOD_BEST_OF) {
      spec.add_methods(v1::CALIBRATION_METHOD_MSE);
      spec.add_methods(v1::CALIBRATION_METHOD_MIN_MAX);
    }
    SCOPED_TRACE(spec.ShortDebugString());
    v1::CalibrateHeader header = Header("x", kCount);
    header.clear_contribution();
    *header.mutable_spec() = spec;
    const std::string calibrated = MustCalibrate(header, values)
                                       .stored_encoding()
                                       .encoding()
                                       .SerializeAsString();

    v1::QuantizeHeader quantize;
    *quantize.mutable_tensor() = header.tensor();
    *quantize.mutable_spec() = spec;
    const auto answer =
        Quantize(server_.quantization(), quantize, ToBytes(values), 4096);
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->header.encoding().SerializeAsString(), calibrated);

    // Beside one that takes its statistics along with it.
    v1::EvaluateHeader evaluate;
    *evaluate.mutable_tensor() = header.tensor();
    *evaluate.add_candidates()->mutable_spec() = Spec(v1::NUMBER_FORMAT_UINT8);
    *evaluate.add_candidates()->mutable_spec() = spec;
    const auto summary =
        Evaluate(server_.quantization(), evaluate, ToBytes(values), 4096);
    ASSERT_TRUE(summary.ok()) << summary.status();
    EXPECT_EQ(summary->candidates(1).encoding().SerializeAsString(),
              calibrated);
  }
}

TEST_F(StatisticsRpcTest, EvaluatesDistributionsAndComparisons) {
  v1::EvaluateHeader header;
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(3000);
  header.set_with_distribution(true);
  header.set_comparison(true);
  std::vector<float> pairs;
  for (const float x : Bell(3000)) {
    pairs.push_back(x);
    pairs.push_back(x + 0.25f);
  }
  for (const int64_t chunk_bytes : {4, 12288, 0}) {
    const auto summary =
        Evaluate(server_.quantization(), header, ToBytes(pairs), chunk_bytes);
    ASSERT_TRUE(summary.ok()) << summary.status();
    EXPECT_EQ(summary->statistics().count(), 3000u);
    EXPECT_EQ(summary->comparison().count(), 3000u);
    EXPECT_NEAR(summary->comparison().mean_squared_error(), 1.0 / 16, 1e-6);
    EXPECT_TRUE(summary->comparison().has_kl_divergence());
    EXPECT_EQ(summary->candidates_size(), 0);
  }
  header.set_comparison(false);
  *header.add_candidates()->mutable_spec() = Spec(v1::NUMBER_FORMAT_INT8);
  const auto summary =
      Evaluate(server_.quantization(), header, ToBytes(Bell(3000)));
  ASSERT_TRUE(summary.ok()) << summary.status();
  const v1::ErrorMetrics& metrics = summary->candidates(0).overall();
  EXPECT_TRUE(metrics.has_kl_divergence());
  uint64_t counted = metrics.error_histogram().zero_count();
  for (const uint64_t count : metrics.error_histogram().count()) {
    counted += count;
  }
  EXPECT_EQ(counted, 3000u);
}

TEST_F(StatisticsRpcTest, ComputesByTheFirstOverrideThatMatches) {
  for (const char* tensor : {"conv1.out", "conv2.out", "fc.in", "fc.out"}) {
    Contribute(tensor, {-127, 1});
  }
  v1::ComputeEncodingsRequest request;
  const auto override_with = [&](const std::string& pattern,
                                 v1::NumberFormat format) {
    v1::SpecOverride& o = *request.add_overrides();
    o.set_pattern(pattern);
    *o.mutable_spec() = Spec(format);
  };
  override_with("conv1.*", v1::NUMBER_FORMAT_INT4);
  override_with("conv?.out", v1::NUMBER_FORMAT_INT16);
  override_with("*.in", v1::NUMBER_FORMAT_UINT8);
  request.set_dry_run(true);
  std::vector<v1::ComputeEncodingsResponse> responses = Compute(request);
  // What nothing matches is left out.
  ASSERT_EQ(responses.size(), 3u);
  for (const auto& response : responses) {
    EXPECT_EQ(response.total_count(), 3u);
    EXPECT_FALSE(response.has_error());
    EXPECT_TRUE(response.has_prediction());
    EXPECT_EQ(response.stored_encoding().etag(), "");
    EXPECT_TRUE(
        absl::IsNotFound(GetEncoding(response.name().tensor()).status()));
  }
  EXPECT_EQ(responses[0].stored_encoding().format(), v1::NUMBER_FORMAT_INT4);
  EXPECT_EQ(responses[1].stored_encoding().format(), v1::NUMBER_FORMAT_INT16);
  EXPECT_EQ(responses[2].name().tensor(), "fc.in");
  EXPECT_EQ(responses[2].stored_encoding().format(), v1::NUMBER_FORMAT_UINT8);

  request.set_dry_run(false);
  *request.mutable_default_spec() = Spec(v1::NUMBER_FORMAT_INT8);
  responses = Compute(request);
  ASSERT_EQ(responses.size(), 4u);
  EXPECT_EQ(responses[3].stored_encoding().format(), v1::NUMBER_FORMAT_INT8);
  for (const auto& response : responses) {
    const auto stored = GetEncoding(response.name().tensor());
    ASSERT_TRUE(stored.ok()) << stored.status();
    EXPECT_EQ(stored->SerializeAsString(),
              response.stored_encoding().SerializeAsString());
  }
  EXPECT_EQ(responses[3].done_count(), 4u);
}

TEST_F(StatisticsRpcTest, ATensorThatFailsDoesNotEndTheCall) {
  Contribute("a", {1, 2});
  v1::CalibrateHeader header = Header("b", 2);
  header.mutable_contribution()->add_block_size(1);
  MustCalibrate(header, {1, 2});
  Contribute("c", {1, 2});
  v1::ComputeEncodingsRequest request;
  *request.mutable_default_spec() = Spec(v1::NUMBER_FORMAT_INT8);
  request.mutable_default_spec()->add_block_size(1);
  const auto responses = Compute(request);
  ASSERT_EQ(responses.size(), 3u);
  EXPECT_EQ(responses[0].error().reason(), "GRANULARITY_TOO_FINE");
  EXPECT_EQ(responses[0].error().field(), "default_spec.block_size");
  EXPECT_FALSE(responses[0].has_stored_encoding());
  EXPECT_FALSE(responses[1].has_error());
  EXPECT_EQ(responses[1].stored_encoding().scale_count(), 2u);
  EXPECT_EQ(responses[2].error().reason(), "GRANULARITY_TOO_FINE");
}

TEST_F(StatisticsRpcTest, ASweepRanksAndAddsUpAndMixes) {
  Contribute("small", Bell(1000));
  Contribute("wide", Bell(3000, 100));
  v1::SweepRequest request;
  *request.add_specs() = Spec(v1::NUMBER_FORMAT_INT4);
  *request.add_specs() = Spec(v1::NUMBER_FORMAT_INT8);
  *request.add_specs() =
      Spec(v1::NUMBER_FORMAT_INT4, v1::CALIBRATION_METHOD_MSE);
  // Statistics per tensor do not do for blocks.
  *request.add_specs() = Spec(v1::NUMBER_FORMAT_MXFP4_E2M1);
  request.set_max_size_bytes(1000 + 1500 + 2 * 8);
  const std::vector<v1::SweepResponse> responses = Sweep(request);
  ASSERT_EQ(responses.size(), 3u);
  double min_sqnr_db[3] = {1e9, 1e9, 1e9};
  double noise[3] = {};
  for (int i = 0; i < 2; ++i) {
    const v1::SweepResponse& response = responses[i];
    EXPECT_EQ(response.name().tensor(), i == 0 ? "small" : "wide");
    EXPECT_EQ(response.total_count(), 2u);
    ASSERT_EQ(response.candidates_size(), 4);
    std::vector<uint32_t> order;
    for (const v1::SweepCandidate& candidate : response.candidates()) {
      order.push_back(candidate.spec_index());
      if (candidate.has_error()) continue;
      const double sqnr_db = candidate.prediction().sqnr_db();
      min_sqnr_db[candidate.spec_index()] =
          std::min(min_sqnr_db[candidate.spec_index()], sqnr_db);
      noise[candidate.spec_index()] += std::pow(10, -sqnr_db / 10);
    }
    EXPECT_THAT(order, ElementsAre(1, 2, 0, 3));
    EXPECT_EQ(response.candidates(3).error().reason(), "GRANULARITY_TOO_FINE");
    EXPECT_EQ(response.candidates(3).error().field(), "specs[3].block_size");
    const uint64_t count = i == 0 ? 1000 : 3000;
    EXPECT_EQ(response.candidates(0).size_bytes(), count + 4);
    EXPECT_EQ(response.candidates(1).size_bytes(), count / 2 + 4);
  }
  const v1::SweepSummary& summary = responses[2].summary();
  EXPECT_FALSE(responses[2].has_name());
  EXPECT_EQ(responses[2].done_count(), 2u);
  ASSERT_EQ(summary.totals_size(), 4);
  std::vector<uint32_t> order;
  for (const v1::SweepTotal& total : summary.totals()) {
    order.push_back(total.spec_index());
    if (total.spec_index() == 3) {
      EXPECT_EQ(total.failed_count(), 2u);
      continue;
    }
    EXPECT_EQ(total.failed_count(), 0u);
    EXPECT_EQ(total.min_sqnr_db(), min_sqnr_db[total.spec_index()]);
    EXPECT_NEAR(total.noise_to_signal_sum(), noise[total.spec_index()],
                1e-9 * noise[total.spec_index()]);
  }
  EXPECT_THAT(order, ElementsAre(1, 2, 0, 3));
  EXPECT_EQ(summary.totals(0).size_bytes(), 4008u);
  // Eight bits for one tensor are all that fits.
  const v1::SweepMixture& mixture = summary.mixture();
  ASSERT_EQ(mixture.choices_size(), 2);
  EXPECT_EQ(mixture.choices(0).tensor(), "small");
  EXPECT_EQ(mixture.choices(0).spec_index(), 1u);
  EXPECT_EQ(mixture.choices(1).spec_index(), 2u);
  EXPECT_EQ(mixture.size_bytes(), 1004u + 1504u);
  EXPECT_TRUE(mixture.target_met());

  request.set_min_sqnr_db(200);
  request.add_patterns("w*");
  request.add_patterns("none");
  const std::vector<v1::SweepResponse> some = Sweep(request);
  ASSERT_EQ(some.size(), 2u);
  EXPECT_EQ(some[0].name().tensor(), "wide");
  EXPECT_FALSE(some[1].summary().mixture().target_met());
  EXPECT_EQ(some[1].summary().mixture().choices(0).spec_index(), 1u);
}

TEST_F(StatisticsRpcTest, GetsListsAndDeletesStatistics) {
  Contribute("x", {-1, 0, 5}, "b", 3);
  Contribute("x", {7}, "a", 9);
  Contribute("y", {1});
  const auto got = GetStatistics("x", true);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->statistics().count(), 4u);
  EXPECT_EQ(got->statistics().min(), -1);
  EXPECT_EQ(got->statistics().max(), 7);
  ASSERT_EQ(got->sources_size(), 2);
  EXPECT_EQ(got->sources(0).source(), "a");
  EXPECT_EQ(got->sources(0).sequence(), 9u);
  EXPECT_EQ(got->sources(1).sequence(), 3u);
  EXPECT_EQ(got->state().mantissa_bits(), 7u);
  EXPECT_FALSE(GetStatistics("x", false)->has_state());
  {
    grpc::ClientContext context;
    v1::ListStatisticsRequest request;
    request.set_model(kModel);
    request.set_page_size(1);
    v1::ListStatisticsResponse response;
    ASSERT_TRUE(
        server_.encodings().ListStatistics(&context, request, &response).ok());
    ASSERT_EQ(response.entries_size(), 1);
    EXPECT_EQ(response.entries(0).tensor(), "x");
    EXPECT_EQ(response.entries(0).source_count(), 2u);
    EXPECT_GT(response.entries(0).size_bytes(), 0u);
    EXPECT_NE(response.next_page_token(), "");
  }
  v1::DeleteStatisticsRequest request;
  request.mutable_name()->set_model(kModel);
  request.mutable_name()->set_tensor("x");
  v1::DeleteStatisticsResponse response;
  for (const char* source : {"a", ""}) {
    grpc::ClientContext context;
    request.set_source(source);
    ASSERT_TRUE(server_.encodings()
                    .DeleteStatistics(&context, request, &response)
                    .ok());
    if (*source != '\0') {
      EXPECT_EQ(GetStatistics("x", false)->statistics().count(), 3u);
    }
  }
  EXPECT_TRUE(absl::IsNotFound(GetStatistics("x", false).status()));
  EXPECT_TRUE(GetStatistics("y", false).ok());
}

// 40 channels of which each has thousands of bins.
TEST_F(StatisticsRpcTest, AStateThatFitsNoMessageIsRefused) {
  constexpr int kChannels = 40;
  constexpr int kPerChannel = 16384;
  v1::CalibrateHeader header = Header("x", kChannels);
  header.mutable_tensor()->add_shape(kPerChannel);
  header.mutable_contribution()->mutable_granularity();
  header.mutable_contribution()->set_mantissa_bits(10);
  std::vector<float> values;
  for (int i = 0; i < kChannels * kPerChannel; ++i) {
    values.push_back(std::ldexp(1.0f + (i % 1024) / 1024.0f, i / 1024 % 16) *
                     (1 + 1e-4f));
  }
  MustCalibrate(header, values, 1 << 20);
  EXPECT_TRUE(GetStatistics("x", false).ok());
  const absl::Status status = GetStatistics("x", true).status();
  EXPECT_THAT(status.ToString(), HasSubstr("STATISTICS_TOO_LARGE"));

  // One histogram over all channels fits, and is that of all elements.
  const auto merged = GetStatistics("x", false, /*per_tensor=*/true);
  ASSERT_TRUE(merged.ok()) << merged.status();
  EXPECT_THAT(merged->state().block_size(), ElementsAre());
  EXPECT_THAT(merged->state().shape(), ElementsAre(kChannels, kPerChannel));
  EXPECT_THAT(merged->state().min(), ElementsAre(values.front()));
  ASSERT_EQ(merged->state().histograms_size(), 1);
  const auto& counts = merged->state().histograms(0).count();
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), uint64_t{0}),
            values.size());
}

// A client that goes in the middle leaves nothing running. The answers of all
// tensors are more than it takes before it reads them.
TEST_F(StatisticsRpcTest, ACancelledSweepStops) {
  const v1::SweepRequest request = MakeLongSweep();
  uint64_t before = CountReads();
  v1::SweepRequest one = request;
  one.add_patterns("t0");
  EXPECT_EQ(Sweep(one).size(), 2u);
  const uint64_t reads_of_one = CountReads() - before;
  EXPECT_GT(reads_of_one, 0u);

  before = CountReads();
  grpc::ClientContext context;
  const auto stream = server_.encodings().Sweep(&context, request);
  v1::SweepResponse response;
  ASSERT_TRUE(stream->Read(&response));
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    return Metric("grpc_server_handled_total") ==
           Metric("grpc_server_started_total");
  }));
  ExpectNothingHeld();
  EXPECT_LT(CountReads() - before, kLongSweepTensors * reads_of_one);
}

TEST_F(StatisticsRpcTest, ADrainingServerEndsASweepBetweenTensors) {
  // A draining server of gRPC closes a connection with its last call, and what
  // a client still writes there fails that call. An open tensor keeps it open.
  grpc::ClientContext tensor_context;
  const auto tensor = server_.quantization().Quantize(&tensor_context);
  ASSERT_TRUE(tensor->Write(OpenTensorRequest()));
  v1::QuantizeResponse first;
  ASSERT_TRUE(tensor->Read(&first));

  grpc::ClientContext context;
  const auto stream = server_.encodings().Sweep(&context, MakeLongSweep());
  v1::SweepResponse response;
  ASSERT_TRUE(stream->Read(&response));
  // A call that waits for its client ends when the server begins to end calls.
  const double started = Metric("grpc_server_started_total");
  RawStream waiting(server_.NewChannel(),
                    "/quantd.v1.EncodingService/GetEncoding");
  ASSERT_TRUE(PollUntil(kLongEnough, [&] {
    return Metric("grpc_server_started_total") > started;
  }));
  std::thread drain([this] { server_.server().Drain(); });
  EXPECT_THAT(waiting.Finish().error_message(), HasSubstr("DRAINING"));
  // Most of the answers are still to come.
  int count = 1;
  while (stream->Read(&response)) ++count;
  const grpc::Status status = stream->Finish();
  tensor_context.TryCancel();
  EXPECT_FALSE(tensor->Finish().ok());
  drain.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE)
      << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("DRAINING"));
  EXPECT_LT(count, kLongSweepTensors);
}

server::ServerOptions ShortIdleTimeout() {
  server::ServerOptions options;
  options.limits.idle_timeout = absl::Seconds(1);
  return options;
}

class ShortIdleTimeoutTest : public StatisticsRpcTest {
 protected:
  ShortIdleTimeoutTest() : StatisticsRpcTest(ShortIdleTimeout()) {}
};

TEST_F(ShortIdleTimeoutTest, ASweepThatNobodyReadsIsEnded) {
  constexpr int kTensors = 100;
  // Not by calls, which may be idle on a busy machine.
  const std::vector<float> values = {1, 2, 3};
  core::StatisticsState state;
  state.shape = {3};
  state.statistics = core::TensorStatistics(1, 7);
  state.statistics.Update(
      *core::BlockLayout::Create(state.shape, {}), core::ElementType::kFloat32,
      0, 3, reinterpret_cast<const uint8_t*>(values.data()), nullptr);
  for (int i = 0; i < kTensors; ++i) {
    ASSERT_TRUE(
        server_.statistics()
            .Contribute({{kModel, "main", absl::StrCat("t", i)}, "a", 1}, state,
                        0.01)
            .ok());
  }
  v1::SweepRequest request;
  request.set_model(kModel);
  // Answers of half a megabyte in all, and a client that takes no more than the
  // first 64 KiB before it reads.
  for (int i = 0; i < 64; ++i) {
    *request.add_specs() = Spec(v1::NUMBER_FORMAT_INT8);
  }
  grpc::ClientContext context;
  const auto stream = server_.encodings().Sweep(&context, request);
  EXPECT_TRUE(PollUntil(
      kLongEnough, [&] { return Metric("grpc_server_handled_total") == 1; }));
  v1::SweepResponse response;
  int count = 0;
  while (stream->Read(&response)) ++count;
  EXPECT_LT(count, kTensors);
  EXPECT_FALSE(stream->Finish().ok());
}

server::ServerOptions SmallBudget() {
  server::ServerOptions options;
  options.limits.memory_budget_bytes = int64_t{2} << 20;
  options.limits.memory_wait = absl::Milliseconds(10);
  return options;
}

class SmallBudgetTest : public StatisticsRpcTest {
 protected:
  SmallBudgetTest() : StatisticsRpcTest(SmallBudget()) {}
};

// Each source takes a part of the budget, all of them far more than there is.
TEST_F(SmallBudgetTest, SourcesThatDoNotFitTogetherAreReadOneByOne) {
  constexpr int kSources = 128;
  std::vector<float> values(5000);
  for (int source = 0; source < kSources; ++source) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(i % 1000 + 1 + source);
    }
    Contribute("x", values, absl::StrCat("rank-", source));
    // The next waits for memory for a moment only.
    ExpectNothingHeld();
  }
  v1::ComputeEncodingsRequest request;
  *request.mutable_default_spec() = Spec(v1::NUMBER_FORMAT_INT8);
  const std::vector<v1::ComputeEncodingsResponse> responses = Compute(request);
  ASSERT_EQ(responses.size(), 1u);
  EXPECT_EQ(responses[0].error().message(), "");
  ExpectNothingHeld();
}

server::ServerOptions SmallChunks() {
  server::ServerOptions options;
  options.limits.chunk_bytes = 1 << 10;
  return options;
}

class SmallChunkTest : public StatisticsRpcTest {
 protected:
  SmallChunkTest() : StatisticsRpcTest(SmallChunks()) {}
};

TEST_F(SmallChunkTest, AnEncodingThatFitsNoMessageIsRefusedBeforeTheData) {
  constexpr int kCount = 2000;
  v1::CalibrateHeader header = Header("x", kCount);
  header.mutable_contribution()->add_block_size(2);
  *header.mutable_spec() = Spec(v1::NUMBER_FORMAT_INT8);
  header.mutable_spec()->add_block_size(2);
  const auto refused = Calibrate(server_.quantization(), header,
                                 ToBytes(Bell(kCount)), /*chunk_bytes=*/1024);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("SCALE_COUNT_LIMIT"));
  EXPECT_FALSE(GetStatistics("x", false).ok());
  // With so few scales it is served.
  header.mutable_spec()->set_block_size(0, 20);
  MustCalibrate(header, Bell(kCount), /*chunk_bytes=*/1024);
}

TEST_F(SmallChunkTest, ASweepTakesEncodingsThatFitNoMessage) {
  constexpr int kCount = 2000;
  v1::CalibrateHeader header = Header("x", kCount);
  header.mutable_contribution()->add_block_size(2);
  MustCalibrate(header, Bell(kCount), /*chunk_bytes=*/1024);
  v1::SweepRequest request;
  request.add_specs()->set_format(v1::NUMBER_FORMAT_INT8);
  request.mutable_specs(0)->add_block_size(2);
  const std::vector<v1::SweepResponse> responses = Sweep(request);
  ASSERT_EQ(responses.size(), 2u);
  ASSERT_EQ(responses[0].candidates_size(), 1);
  EXPECT_EQ(responses[0].candidates(0).error().message(), "");
  EXPECT_EQ(responses[0].candidates(0).size_bytes(), kCount + kCount / 2 * 4);
}

// What histograms take counts at once, not with the next chunk.
TEST_F(StatisticsRpcTest, HistogramsAreChargedAsTheyGrow) {
  constexpr int kCount = 256 << 10;
  std::vector<float> values;
  for (int i = 0; i < kCount; ++i) {
    values.push_back(std::ldexp(1.0f + (i % 997) / 997.0f, i % 200 - 100));
  }
  v1::CalibrateRequest request;
  *request.mutable_header() = Header("x", 2 * kCount);
  request.mutable_header()->mutable_contribution()->set_mantissa_bits(10);
  request.set_data(ToBytes(values));
  grpc::ClientContext context;
  const auto stream = server_.quantization().Calibrate(&context);
  ASSERT_TRUE(stream->Write(request));
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    return server_.server().memory_used_bytes() > 2 << 20;
  })) << server_.server().memory_used_bytes();
  context.TryCancel();
  stream->Finish();
}

// The data would fit; the histograms that grow out of them do not.
TEST_F(SmallBudgetTest, HistogramsThatGrowBeyondTheBudgetFailTheirTensor) {
  constexpr int kCount = 512 << 10;
  std::vector<float> values;
  for (int i = 0; i < kCount; ++i) {
    values.push_back(std::ldexp(1.0f + (i % 997) / 997.0f, i % 200 - 100) *
                     (i % 2 == 0 ? 1.0f : -1.0f));
  }
  v1::CalibrateHeader header = Header("x", kCount);
  header.mutable_contribution()->set_mantissa_bits(10);
  const absl::Status status =
      Calibrate(server_.quantization(), header, ToBytes(values), 1 << 20)
          .status();
  EXPECT_THAT(status.ToString(), HasSubstr("MEMORY_BUDGET"));
  EXPECT_THAT(status.ToString(), HasSubstr("fewer mantissa bits"));
  EXPECT_TRUE(absl::IsNotFound(GetStatistics("x", false).status()));
  ExpectNothingHeld();
  // Coarser bins, and there is room.
  header.mutable_contribution()->set_mantissa_bits(2);
  MustCalibrate(header, values, 1 << 20);
  ExpectNothingHeld();
}

}  // namespace
}  // namespace quantd::testing::statistics_test
