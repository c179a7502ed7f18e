// Every metric moves when what it counts happens: seen in scrapes of the
// binary.

#include <signal.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/http_get.h"
#include "tests/support/metric_value.h"
#include "tests/support/paths.h"
#include "tests/support/server_process.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing::metrics_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + kLongEnough));
}

class MetricsE2eTest : public ::testing::Test {
 protected:
  MetricsE2eTest() { Start({}); }

  // With a small cache in which nothing gets old.
  void Start(const std::vector<std::string>& more_flags,
             const std::string& drain_delay = "0s") {
    std::vector<std::string> flags = {"--cache-bytes",   "64KiB",
                                      "--cache-max-age", "1h",
                                      "--drain-delay",   drain_delay};
    flags.insert(flags.end(), more_flags.begin(), more_flags.end());
    server_ = std::make_unique<ServerProcess>(
        QuantdBinary(), directory_.path() + "/encodings.db", flags);
    const std::shared_ptr<grpc::Channel> channel = server_->NewChannel();
    quantization_ = v1::QuantizationService::NewStub(channel);
    encodings_ = v1::EncodingService::NewStub(channel);
  }

  // The value of a series, a name and all of its labels; 0 if there is none.
  double Scrape(const std::string& series) {
    const std::string response =
        HttpGet(server_->metrics_address(), "/metrics");
    EXPECT_THAT(response, StartsWith("HTTP/1.1 200 OK\r\n"));
    for (const absl::string_view line : absl::StrSplit(response, '\n')) {
      if (!absl::StartsWith(line, absl::StrCat(series, " "))) continue;
      double value = std::numeric_limits<double>::quiet_NaN();
      EXPECT_TRUE(absl::SimpleAtod(line.substr(series.size() + 1), &value));
      return value;
    }
    return 0;
  }

  // Expects a gauge to get to a value.
  void ExpectValue(const std::string& series, double expected) {
    double value = 0;
    PollUntil(kLongEnough, [&] {
      value = Scrape(series);
      return value == expected;
    });
    EXPECT_EQ(value, expected) << series;
  }

  using Steps = std::vector<std::pair<std::string, double>>;

  // Expects `act` to move every series by so much. What is counted when a call
  // is over may come a moment after its answer.
  template <typename Act>
  void ExpectSteps(const Steps& steps, Act act) {
    std::vector<double> before;
    for (const auto& [series, step] : steps) before.push_back(Scrape(series));
    act();
    if (HasFatalFailure()) return;
    for (size_t i = 0; i < steps.size(); ++i) {
      const std::string& series = steps[i].first;
      const double step = steps[i].second;
      double moved = 0;
      PollUntil(kLongEnough, [&] {
        moved = Scrape(series) - before[i];
        return moved == step;
      });
      EXPECT_EQ(moved, step) << series;
    }
  }

  // The three metrics of a call that ended so.
  static Steps CallSteps(const std::string& type, const std::string& service,
                         const std::string& method, const std::string& code) {
    const std::string rpc =
        absl::StrCat("grpc_type=\"", type, "\",grpc_service=\"quantd.v1.",
                     service, "\",grpc_method=\"", method, "\"");
    return {{absl::StrCat("grpc_server_started_total{", rpc, "}"), 1},
            {absl::StrCat("grpc_server_handled_total{", rpc, ",grpc_code=\"",
                          code, "\"}"),
             1},
            {absl::StrCat("grpc_server_handling_seconds_count{", rpc, "}"), 1}};
  }

  static Steps StreamSteps(const std::string& method, const std::string& code) {
    return CallSteps("bidi_stream", "QuantizationService", method, code);
  }

  static Steps UnarySteps(const std::string& method, const std::string& code) {
    return CallSteps("unary", "EncodingService", method, code);
  }

  // Six elements: NaN, both infinities, and with UnitEncoding a finite one
  // above the range.
  static std::string TensorData() {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return ToBytes<float>({1, -2, 500, kInfinity, -kInfinity,
                           std::numeric_limits<float>::quiet_NaN()});
  }

  static v1::TensorDescription Describe(const std::string& name) {
    v1::TensorDescription tensor;
    tensor.mutable_name()->set_model("metrics/net");
    tensor.mutable_name()->set_tensor(name);
    tensor.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    tensor.add_shape(6);
    return tensor;
  }

  static v1::Encoding UnitEncoding() {
    v1::Encoding encoding;
    encoding.set_format(v1::NUMBER_FORMAT_INT8);
    encoding.add_scale(1);
    return encoding;
  }

  void Put(const std::string& name, int scale_count = 1) {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::PutEncodingRequest request;
    *request.mutable_name() = Describe(name).name();
    *request.mutable_encoding() = UnitEncoding();
    if (scale_count > 1) request.mutable_encoding()->add_block_size(1);
    while (request.encoding().scale_size() < scale_count) {
      request.mutable_encoding()->add_scale(1);
    }
    v1::PutEncodingResponse response;
    const grpc::Status status =
        encodings_->PutEncoding(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }

  grpc::StatusCode Get(const std::string& name) {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::GetEncodingRequest request;
    *request.mutable_name() = Describe(name).name();
    v1::GetEncodingResponse response;
    return encodings_->GetEncoding(&context, request, &response).error_code();
  }

  TemporaryDirectory directory_;
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<v1::QuantizationService::Stub> quantization_;
  std::unique_ptr<v1::EncodingService::Stub> encodings_;
};

std::string TensorCount(const std::string& rpc, const std::string& result) {
  return absl::StrCat("quantd_tensor_seconds_count{rpc=\"", rpc, "\",result=\"",
                      result, "\"}");
}

std::string Elements(const std::string& rpc, const std::string& format) {
  return absl::StrCat("quantd_elements_total{rpc=\"", rpc, "\",format=\"",
                      format, "\"}");
}

std::string StoreCount(const std::string& operation) {
  return absl::StrCat("quantd_store_seconds_count{operation=\"", operation,
                      "\"}");
}

constexpr char kPayloadIn[] = "quantd_payload_bytes_total{direction=\"in\"}";
constexpr char kPayloadOut[] = "quantd_payload_bytes_total{direction=\"out\"}";

TEST_F(MetricsE2eTest, CalibrateCountsTheCallTheTensorAndItsElements) {
  Steps steps = StreamSteps("Calibrate", "OK");
  steps.insert(steps.end(), {{TensorCount("Calibrate", "ok"), 1},
                             {Elements("Calibrate", "none"), 6},
                             {kPayloadIn, 24},
                             {kPayloadOut, 0},
                             {"quantd_non_finite_elements_total", 3},
                             {"quantd_clipped_elements_total", 0},
                             {StoreCount("put"), 1}});
  ExpectSteps(steps, [&] {
    v1::CalibrateHeader header;
    *header.mutable_tensor() = Describe("weight");
    header.mutable_spec()->set_format(v1::NUMBER_FORMAT_UINT8);
    const auto summary = Calibrate(*quantization_, header, TensorData(), 8);
    ASSERT_TRUE(summary.ok()) << summary.status();
  });
}

TEST_F(MetricsE2eTest, QuantizeCountsCodesClippedAndNonFiniteElements) {
  Steps steps = StreamSteps("Quantize", "OK");
  steps.insert(steps.end(), {{TensorCount("Quantize", "ok"), 1},
                             {Elements("Quantize", "int8"), 6},
                             {kPayloadIn, 24},
                             {kPayloadOut, 6},
                             {"quantd_non_finite_elements_total", 3},
                             {"quantd_clipped_elements_total", 1}});
  ExpectSteps(steps, [&] {
    v1::QuantizeHeader header;
    *header.mutable_tensor() = Describe("weight");
    *header.mutable_encoding() = UnitEncoding();
    const auto answer = Quantize(*quantization_, header, TensorData(), 8);
    ASSERT_TRUE(answer.ok()) << answer.status();
  });
}

TEST_F(MetricsE2eTest, DequantizeCountsPayloadBothWays) {
  Steps steps = StreamSteps("Dequantize", "OK");
  steps.insert(steps.end(), {{TensorCount("Dequantize", "ok"), 1},
                             {Elements("Dequantize", "int8"), 6},
                             {kPayloadIn, 6},
                             {kPayloadOut, 24}});
  ExpectSteps(steps, [&] {
    v1::DequantizeHeader header;
    *header.mutable_tensor() = Describe("weight");
    *header.mutable_encoding() = UnitEncoding();
    const auto answer = Dequantize(*quantization_, header, "abcdef", 4);
    ASSERT_TRUE(answer.ok()) << answer.status();
  });
}

TEST_F(MetricsE2eTest, EvaluateCountsTheElementsOfEveryCandidate) {
  Steps steps = StreamSteps("Evaluate", "OK");
  steps.insert(steps.end(), {{TensorCount("Evaluate", "ok"), 1},
                             {Elements("Evaluate", "int8"), 6},
                             {Elements("Evaluate", "uint4"), 6},
                             {kPayloadIn, 24},
                             {kPayloadOut, 0}});
  ExpectSteps(steps, [&] {
    v1::EvaluateHeader header;
    *header.mutable_tensor() = Describe("weight");
    *header.add_candidates()->mutable_encoding() = UnitEncoding();
    header.add_candidates()->mutable_spec()->set_format(
        v1::NUMBER_FORMAT_UINT4);
    const auto summary = Evaluate(*quantization_, header, TensorData(), 8);
    ASSERT_TRUE(summary.ok()) << summary.status();
  });
}

TEST_F(MetricsE2eTest, AFailedTensorCountsAsOneAndItsCallAsOk) {
  Steps steps = StreamSteps("Quantize", "OK");
  steps.insert(steps.end(), {{TensorCount("Quantize", "ok"), 0},
                             {TensorCount("Quantize", "error"), 1}});
  ExpectSteps(steps, [&] {
    v1::QuantizeHeader header;
    *header.mutable_tensor() = Describe("weight");
    header.mutable_reference();
    const auto answer = Quantize(*quantization_, header, TensorData());
    EXPECT_EQ(answer.status().code(), absl::StatusCode::kNotFound);
  });
}

TEST_F(MetricsE2eTest, ABrokenStreamCountsByItsCode) {
  ExpectSteps(StreamSteps("Quantize", "InvalidArgument"), [&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    const auto stream = quantization_->Quantize(&context);
    v1::QuantizeRequest request;
    request.set_data("no header");
    EXPECT_TRUE(stream->Write(request));
    v1::QuantizeResponse response;
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_EQ(stream->Finish().error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
  });
}

TEST_F(MetricsE2eTest, ACancelledStreamCountsAsCancelled) {
  ExpectSteps(StreamSteps("Evaluate", "Canceled"), [&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    const auto stream = quantization_->Evaluate(&context);
    ExpectValue("quantd_active_streams", 1);
    context.TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  });
}

TEST_F(MetricsE2eTest, UnaryCallsCountByTheirCode) {
  Steps steps = UnarySteps("GetEncoding", "NotFound");
  steps.insert(steps.end(),
               {{StoreCount("get"), 1},
                {"quantd_store_errors_total{operation=\"get\"}", 0},
                {"quantd_cache_misses_total", 1}});
  ExpectSteps(steps,
              [&] { EXPECT_EQ(Get("nothing"), grpc::StatusCode::NOT_FOUND); });
  ExpectSteps(UnarySteps("PutEncoding", "OK"), [&] { Put("weight"); });
  steps = UnarySteps("ListModels", "OK");
  steps.push_back({StoreCount("list"), 1});
  ExpectSteps(steps, [&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::ListModelsResponse response;
    EXPECT_TRUE(encodings_->ListModels(&context, {}, &response).ok());
    EXPECT_EQ(response.models_size(), 1);
  });
  steps = UnarySteps("DeleteEncoding", "OK");
  steps.push_back({StoreCount("delete"), 1});
  ExpectSteps(steps, [&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::DeleteEncodingRequest request;
    *request.mutable_name() = Describe("weight").name();
    v1::DeleteEncodingResponse response;
    EXPECT_TRUE(encodings_->DeleteEncoding(&context, request, &response).ok());
  });
  // Calls that answer with a stream too.
  ExpectSteps(
      CallSteps("server_stream", "EncodingService", "Sweep", "InvalidArgument"),
      [&] {
        grpc::ClientContext context;
        SetDeadline(&context);
        const auto stream = encodings_->Sweep(&context, {});
        v1::SweepResponse response;
        EXPECT_FALSE(stream->Read(&response));
        EXPECT_EQ(stream->Finish().error_code(),
                  grpc::StatusCode::INVALID_ARGUMENT);
      });
}

TEST_F(MetricsE2eTest, ContributionsCountOnceAndWhatComesOfThemToo) {
  const auto contribute = [&] {
    v1::CalibrateHeader header;
    *header.mutable_tensor() = Describe("activation");
    header.mutable_contribution()->set_source("rank-0");
    header.mutable_contribution()->set_sequence(1);
    const auto summary = Calibrate(*quantization_, header, TensorData(), 8);
    ASSERT_TRUE(summary.ok()) << summary.status();
  };
  const auto merges = [](const std::string& result) {
    return absl::StrCat("quantd_calibration_merges_total{result=\"", result,
                        "\"}");
  };
  Steps steps = StreamSteps("Calibrate", "OK");
  steps.insert(steps.end(), {{merges("counted"), 1},
                             {merges("duplicate"), 0},
                             {StoreCount("contribute"), 1}});
  ExpectSteps(steps, contribute);
  ExpectSteps({{merges("counted"), 0}, {merges("duplicate"), 1}}, contribute);

  steps = UnarySteps("GetStatistics", "OK");
  steps.push_back({StoreCount("get_statistics"), 1});
  ExpectSteps(steps, [&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::GetStatisticsRequest request;
    *request.mutable_name() = Describe("activation").name();
    v1::GetStatisticsResponse response;
    EXPECT_TRUE(encodings_->GetStatistics(&context, request, &response).ok());
  });
  steps = UnarySteps("ListStatistics", "OK");
  steps.push_back({StoreCount("list_statistics"), 1});
  ExpectSteps(steps, [&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::ListStatisticsRequest request;
    request.set_model("metrics/net");
    v1::ListStatisticsResponse response;
    EXPECT_TRUE(encodings_->ListStatistics(&context, request, &response).ok());
  });
  steps = CallSteps("server_stream", "EncodingService", "Sweep", "OK");
  steps.insert(steps.end(), {{StoreCount("list_statistics"), 1},
                             {StoreCount("get_statistics"), 1}});
  ExpectSteps(steps, [&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::SweepRequest request;
    request.set_model("metrics/net");
    request.add_specs()->set_format(v1::NUMBER_FORMAT_INT8);
    const auto stream = encodings_->Sweep(&context, request);
    v1::SweepResponse response;
    int count = 0;
    while (stream->Read(&response)) ++count;
    EXPECT_EQ(count, 2);
    EXPECT_TRUE(stream->Finish().ok());
  });
  steps =
      CallSteps("server_stream", "EncodingService", "ComputeEncodings", "OK");
  steps.push_back({StoreCount("put"), 1});
  ExpectSteps(steps, [&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::ComputeEncodingsRequest request;
    request.set_model("metrics/net");
    request.mutable_default_spec()->set_format(v1::NUMBER_FORMAT_INT8);
    const auto stream = encodings_->ComputeEncodings(&context, request);
    v1::ComputeEncodingsResponse response;
    EXPECT_TRUE(stream->Read(&response));
    EXPECT_FALSE(response.has_error()) << response.error().message();
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_TRUE(stream->Finish().ok());
  });
  steps = UnarySteps("DeleteStatistics", "OK");
  steps.push_back({StoreCount("delete_statistics"), 1});
  ExpectSteps(steps, [&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::DeleteStatisticsRequest request;
    *request.mutable_name() = Describe("activation").name();
    v1::DeleteStatisticsResponse response;
    EXPECT_TRUE(
        encodings_->DeleteStatistics(&context, request, &response).ok());
  });
}

TEST_F(MetricsE2eTest, TheCacheCountsHitsEvictionsAndWhatItHolds) {
  ExpectSteps({{"quantd_cache_hits_total", 2},
               {"quantd_cache_misses_total", 0},
               {"quantd_cache_entries", 1},
               {StoreCount("get"), 0}},
              [&] {
                Put("weight");
                EXPECT_EQ(Get("weight"), grpc::StatusCode::OK);
                EXPECT_EQ(Get("weight"), grpc::StatusCode::OK);
              });
  const double resident = Scrape("quantd_cache_resident_bytes");
  EXPECT_GT(resident, 0);
  EXPECT_EQ(Scrape("quantd_cache_evictions_total"), 0);
  // Each takes more than half of its part of the cache, which has 16.
  for (int i = 0; i < 40; ++i) Put(absl::StrCat("large", i), 400);
  EXPECT_GT(Scrape("quantd_cache_evictions_total"), 0);
  EXPECT_GT(Scrape("quantd_cache_resident_bytes"), resident);
  EXPECT_LE(Scrape("quantd_cache_resident_bytes"), 64 * 1024);
}

TEST_F(MetricsE2eTest, OpenStreamsAndTensorsAndTheirMemoryShow) {
  ExpectValue("quantd_active_streams", 0);
  grpc::ClientContext context;
  SetDeadline(&context);
  const auto stream = quantization_->Quantize(&context);
  ExpectValue("quantd_active_streams", 1);
  ExpectValue("quantd_active_tensors", 0);

  // With a spec the tensor is held until it is complete.
  constexpr int64_t kHalf = 1 << 20;
  v1::QuantizeRequest request;
  v1::QuantizeHeader& header = *request.mutable_header();
  *header.mutable_tensor() = Describe("weight");
  header.mutable_tensor()->set_shape(0, kHalf / 2);
  header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  request.set_data(std::string(kHalf, '\0'));
  ASSERT_TRUE(stream->Write(request));
  ExpectValue("quantd_active_tensors", 1);
  EXPECT_GT(Scrape("quantd_memory_budget_bytes"), 0);
  double used = 0;
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    used = Scrape("quantd_memory_budget_used_bytes");
    return used >= kHalf;
  })) << used;

  request.clear_header();
  request.set_offset(kHalf);
  ASSERT_TRUE(stream->Write(request));
  stream->WritesDone();
  v1::QuantizeResponse response;
  while (stream->Read(&response)) {
    EXPECT_FALSE(response.has_error()) << response.error().message();
  }
  EXPECT_TRUE(stream->Finish().ok());
  ExpectValue("quantd_active_streams", 0);
  ExpectValue("quantd_active_tensors", 0);
  ExpectValue("quantd_memory_budget_used_bytes", 0);
}

TEST_F(MetricsE2eTest, WhatALimitTurnsAwayCountsByReason) {
  EXPECT_EQ(server_->Terminate(), 0);
  Start({"--tensor-bytes", "64MiB", "--memory-budget-bytes", "32MiB",
         "--memory-wait", "10ms", "--statistics-limit", "1KiB"});
  const auto rejections = [](const std::string& reason) {
    return absl::StrCat("quantd_limit_rejections_total{reason=\"", reason,
                        "\"}");
  };
  const auto quantize = [&](int64_t element_count, int64_t block) {
    v1::QuantizeHeader header;
    *header.mutable_tensor() = Describe("weight");
    header.mutable_tensor()->set_shape(0, element_count);
    header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
    header.mutable_spec()->add_block_size(block);
    // A tensor that is turned away by its header needs no data.
    const bool all = element_count * 4 <= (64 << 20) && block == 0;
    return Quantize(*quantization_, header,
                    std::string(all ? element_count * 4 : 0, '\0'), 1 << 20)
        .status();
  };
  ExpectSteps({{rejections("TENSOR_TOO_LARGE"), 1}}, [&] {
    EXPECT_THAT(quantize(int64_t{17} << 20, 0).ToString(),
                HasSubstr("TENSOR_TOO_LARGE"));
  });
  ExpectSteps({{rejections("SCALE_COUNT_LIMIT"), 1}}, [&] {
    EXPECT_THAT(quantize((1 << 20) + 1, 1).ToString(),
                HasSubstr("SCALE_COUNT_LIMIT"));
  });
  ExpectSteps({{rejections("STATISTICS_TOO_LARGE"), 1}}, [&] {
    v1::CalibrateHeader header;
    *header.mutable_tensor() = Describe("activation");
    header.mutable_tensor()->set_shape(0, 1000);
    header.mutable_contribution()->set_source("rank-0");
    header.mutable_contribution()->set_sequence(1);
    std::vector<float> values;
    for (int i = 0; i < 1000; ++i) values.push_back(1.01f * i);
    EXPECT_THAT(
        Calibrate(*quantization_, header, ToBytes(values)).status().ToString(),
        HasSubstr("STATISTICS_TOO_LARGE"));
  });
  ExpectSteps({{rejections("MEMORY_BUDGET"), 1}}, [&] {
    EXPECT_THAT(quantize(int64_t{12} << 20, 0).ToString(),
                HasSubstr("MEMORY_BUDGET"));
  });
}

TEST_F(MetricsE2eTest, BuildInfoNamesTheVersionAndTheSimdTarget) {
  const std::string metrics = HttpGet(server_->metrics_address(), "/metrics");
  EXPECT_THAT(metrics, HasSubstr("\nquantd_build_info{version=\""));
  EXPECT_EQ(server_->Terminate(), 0);
  Start({"--simd", "scalar"});
  EXPECT_THAT(HttpGet(server_->metrics_address(), "/metrics"),
              HasSubstr(",simd=\"scalar\"} 1\n"));
}

TEST_F(MetricsE2eTest, ProbesAnswerAndReadinessEndsWithDraining) {
  EXPECT_THAT(HttpGet(server_->metrics_address(), "/healthz"),
              StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(HttpGet(server_->metrics_address(), "/readyz"),
              StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_EQ(server_->Terminate(), 0);

  // Up for long after readiness has ended.
  Start({}, "10m");
  server_->Signal(SIGTERM);
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    return absl::StartsWith(HttpGet(server_->metrics_address(), "/readyz"),
                            "HTTP/1.1 503 ");
  }));
  EXPECT_THAT(HttpGet(server_->metrics_address(), "/readyz?exclude=store"),
              StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(HttpGet(server_->metrics_address(), "/healthz"),
              StartsWith("HTTP/1.1 200 OK\r\n"));
}

}  // namespace
}  // namespace quantd::testing::metrics_test
