// Tied tensors by stored statistics: what they share is what their elements
// give as one tensor, bit for bit.

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/metric_value.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing::ties_test {
namespace {

using ::testing::HasSubstr;

constexpr char kModel[] = "net";
constexpr int64_t kColumns = 64;

// Without a pattern that repeats, the same each time; about +-`width`.
std::vector<float> Noise(int64_t count, uint32_t seed, float width) {
  std::vector<float> values;
  uint32_t state = seed;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const double u = (state >> 8) / 16777216.0 + 1e-9;
    values.push_back(static_cast<float>(width * std::log(u / (1 - u))));
  }
  return values;
}

v1::EncodingSpec Spec(v1::NumberFormat format, int method) {
  v1::EncodingSpec spec;
  spec.set_format(format);
  spec.set_method(static_cast<v1::CalibrationMethod>(method));
  if (method == v1::CALIBRATION_METHOD_FIXED_RANGE) {
    spec.set_range_min(-3);
    spec.set_range_max(3);
  }
  if (method == v1::CALIBRATION_METHOD_PERCENTILE) spec.set_tail_fraction(0.01);
  if (method == v1::CALIBRATION_METHOD_BEST_OF) {
    spec.add_methods(v1::CALIBRATION_METHOD_MSE);
    spec.add_methods(v1::CALIBRATION_METHOD_MIN_MAX);
  }
  return spec;
}

// The field at fault is among the details.
absl::Status WithDetails(const grpc::Status& status) {
  return absl::Status(
      static_cast<absl::StatusCode>(status.error_code()),
      absl::StrCat(status.error_message(), status.error_details()));
}

class TiesTest : public ::testing::Test {
 protected:
  using Responses = std::map<std::string, v1::ComputeEncodingsResponse>;

  explicit TiesTest(server::ServerOptions options = {})
      : server_(std::move(options)) {}

  // A contribution of a tensor of kColumns columns.
  void Contribute(const std::string& tensor, const std::vector<float>& values,
                  const std::vector<int64_t>& block_size = {},
                  uint64_t sequence = 1, int mantissa_bits = 0) {
    v1::CalibrateHeader header;
    header.mutable_tensor()->mutable_name()->set_model(kModel);
    header.mutable_tensor()->mutable_name()->set_tensor(tensor);
    header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    header.mutable_tensor()->add_shape(static_cast<int64_t>(values.size()) /
                                       kColumns);
    header.mutable_tensor()->add_shape(kColumns);
    v1::Contribution& contribution = *header.mutable_contribution();
    contribution.set_source("a");
    contribution.set_sequence(sequence);
    contribution.mutable_block_size()->Add(block_size.begin(),
                                           block_size.end());
    contribution.set_mantissa_bits(mantissa_bits);
    const absl::StatusOr<v1::CalibrateSummary> summary =
        Calibrate(server_.quantization(), header, ToBytes(values));
    ASSERT_TRUE(summary.ok()) << summary.status();
  }

  // q, k and v of different heights, and "whole", which is all of them.
  void ContributeParts(const std::vector<int64_t>& block_size) {
    std::vector<float> whole;
    const auto add = [&](const std::string& tensor, int64_t rows, float width) {
      const std::vector<float> part =
          Noise(rows * kColumns, static_cast<uint32_t>(rows), width);
      whole.insert(whole.end(), part.begin(), part.end());
      Contribute(tensor, part, block_size);
    };
    add("q", 12, 1);
    add("k", 4, 300);
    add("v", 5, 0.01f);
    Contribute("whole", whole, block_size);
  }

  absl::StatusOr<Responses> TryCompute(v1::ComputeEncodingsRequest request) {
    request.set_model(kModel);
    request.set_dry_run(true);
    grpc::ClientContext context;
    const auto stream = server_.encodings().ComputeEncodings(&context, request);
    Responses responses;
    v1::ComputeEncodingsResponse response;
    while (stream->Read(&response)) {
      EXPECT_TRUE(responses.emplace(response.name().tensor(), response).second);
      EXPECT_EQ(response.done_count(), responses.size());
    }
    const grpc::Status status = stream->Finish();
    if (!status.ok()) return WithDetails(status);
    return responses;
  }

  Responses Compute(const v1::ComputeEncodingsRequest& request) {
    absl::StatusOr<Responses> responses = TryCompute(request);
    EXPECT_TRUE(responses.ok()) << responses.status();
    return responses.ok() ? *std::move(responses) : Responses();
  }

  absl::StatusOr<std::vector<v1::SweepResponse>> TrySweep(
      v1::SweepRequest request) {
    request.set_model(kModel);
    grpc::ClientContext context;
    const auto stream = server_.encodings().Sweep(&context, request);
    std::vector<v1::SweepResponse> responses;
    v1::SweepResponse response;
    while (stream->Read(&response)) responses.push_back(response);
    const grpc::Status status = stream->Finish();
    if (!status.ok()) return WithDetails(status);
    return responses;
  }

  TestServer server_;
};

void Tie(const std::vector<std::string>& tensors, bool one_encoding,
         google::protobuf::RepeatedPtrField<v1::TiedTensors>* ties) {
  v1::TiedTensors& group = *ties->Add();
  group.mutable_tensors()->Add(tensors.begin(), tensors.end());
  group.set_one_encoding(one_encoding);
}

const v1::Encoding& EncodingOf(const v1::ComputeEncodingsResponse& response) {
  EXPECT_FALSE(response.has_error()) << response.error().ShortDebugString();
  return response.stored_encoding().encoding();
}

TEST_F(TiesTest, AnOuterScaleIsThatOfAllElements) {
  ContributeParts({1, 16});
  for (int method = 1; method <= 8; ++method) {
    v1::ComputeEncodingsRequest request;
    *request.mutable_default_spec() = Spec(v1::NUMBER_FORMAT_NVFP4, method);
    SCOPED_TRACE(request.ShortDebugString());
    const Responses untied = Compute(request);
    Tie({"v", "k", "q"}, /*one_encoding=*/method % 2 == 0,
        request.mutable_ties());
    const Responses tied = Compute(request);
    ASSERT_EQ(tied.size(), 4u);
    const v1::Encoding& whole = EncodingOf(tied.at("whole"));
    EXPECT_EQ(whole.SerializeAsString(),
              EncodingOf(untied.at("whole")).SerializeAsString());
    std::string codes;
    double squared_error = 0;
    for (const char* tensor : {"q", "k", "v"}) {
      const v1::Encoding& encoding = EncodingOf(tied.at(tensor));
      EXPECT_EQ(encoding.outer_scale_size(), 1);
      EXPECT_EQ(encoding.outer_scale(0), whole.outer_scale(0)) << tensor;
      codes += encoding.scale_code();
      const v1::Prediction& prediction = tied.at(tensor).prediction();
      squared_error += prediction.mean_squared_error() *
                       static_cast<double>(prediction.count());
    }
    EXPECT_TRUE(codes == whole.scale_code());
    const v1::Prediction& prediction = tied.at("whole").prediction();
    EXPECT_NEAR(squared_error,
                prediction.mean_squared_error() *
                    static_cast<double>(prediction.count()),
                1e-9 * squared_error);
    if (method == v1::CALIBRATION_METHOD_FIXED_RANGE) continue;
    EXPECT_NE(EncodingOf(untied.at("v")).outer_scale(0), whole.outer_scale(0));
  }
}

TEST_F(TiesTest, OneEncodingIsThatOfAllElements) {
  ContributeParts({0, 16});
  // For each tensor, for each column group, for blocks of two groups.
  for (const std::vector<int64_t>& block_size :
       {std::vector<int64_t>{}, {0, 16}, {0, 32}}) {
    for (const v1::NumberFormat format :
         {v1::NUMBER_FORMAT_INT8, v1::NUMBER_FORMAT_UINT4,
          v1::NUMBER_FORMAT_FLOAT8_E4M3FN}) {
      for (int method = 1; method <= 8; ++method) {
        if (method == v1::CALIBRATION_METHOD_MOVING_AVERAGE) continue;
        v1::ComputeEncodingsRequest request;
        v1::EncodingSpec& spec = *request.mutable_default_spec();
        spec = Spec(format, method);
        spec.mutable_block_size()->Add(block_size.begin(), block_size.end());
        SCOPED_TRACE(request.ShortDebugString());
        const Responses untied = Compute(request);
        // Without one_encoding such specs share nothing.
        Tie({"q", "k", "v"}, /*one_encoding=*/false, request.mutable_ties());
        const Responses apart = Compute(request);
        request.mutable_ties(0)->set_one_encoding(true);
        const Responses tied = Compute(request);
        ASSERT_EQ(tied.size(), 4u);
        const std::string whole =
            EncodingOf(untied.at("whole")).SerializeAsString();
        for (const char* tensor : {"q", "k", "v"}) {
          EXPECT_EQ(EncodingOf(tied.at(tensor)).SerializeAsString(), whole);
          EXPECT_EQ(EncodingOf(apart.at(tensor)).SerializeAsString(),
                    EncodingOf(untied.at(tensor)).SerializeAsString());
          // It is its own error that is expected of a tensor.
          EXPECT_EQ(tied.at(tensor).prediction().count(),
                    untied.at(tensor).prediction().count());
        }
        if (method == v1::CALIBRATION_METHOD_FIXED_RANGE) continue;
        EXPECT_NE(EncodingOf(apart.at("v")).SerializeAsString(), whole);
      }
    }
  }
}

TEST_F(TiesTest, OneEncodingForEachChannelIsThatOfContributionsToOneTensor) {
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    const std::vector<float> values =
        Noise(6 * kColumns, static_cast<uint32_t>(sequence), 1.0f / sequence);
    Contribute(absl::StrCat("t", sequence), values, {1, 16});
    Contribute("whole", values, {1, 16}, sequence);
  }
  for (const v1::NumberFormat format :
       {v1::NUMBER_FORMAT_INT8, v1::NUMBER_FORMAT_LPBQ,
        v1::NUMBER_FORMAT_MXFP4_E2M1}) {
    v1::ComputeEncodingsRequest request;
    *request.mutable_default_spec() = Spec(format, v1::CALIBRATION_METHOD_MSE);
    request.mutable_default_spec()->add_block_size(1);
    request.mutable_default_spec()->add_block_size(
        format == v1::NUMBER_FORMAT_INT8 ? 0 : 32);
    SCOPED_TRACE(request.ShortDebugString());
    Tie({"t1", "t2", "t3"}, /*one_encoding=*/true, request.mutable_ties());
    const Responses tied = Compute(request);
    ASSERT_EQ(tied.size(), 4u);
    for (const char* tensor : {"t1", "t2", "t3"}) {
      EXPECT_EQ(EncodingOf(tied.at(tensor)).SerializeAsString(),
                EncodingOf(tied.at("whole")).SerializeAsString());
    }
  }
}

TEST_F(TiesTest, ASweepPredictsWhatTiedTensorsGet) {
  ContributeParts({1, 16});
  v1::SweepRequest sweep;
  *sweep.add_specs() =
      Spec(v1::NUMBER_FORMAT_NVFP4, v1::CALIBRATION_METHOD_MSE);
  *sweep.add_specs() =
      Spec(v1::NUMBER_FORMAT_INT8, v1::CALIBRATION_METHOD_MIN_MAX);
  *sweep.add_specs() =
      Spec(v1::NUMBER_FORMAT_INT4, v1::CALIBRATION_METHOD_ENTROPY);
  *sweep.add_specs() =
      Spec(v1::NUMBER_FORMAT_NVFP4, v1::CALIBRATION_METHOD_MIN_MAX);
  // Per channel: tensors of different heights cannot have one encoding.
  *sweep.add_specs() =
      Spec(v1::NUMBER_FORMAT_INT8, v1::CALIBRATION_METHOD_MIN_MAX);
  sweep.mutable_specs(4)->add_block_size(1);
  sweep.mutable_specs(4)->add_block_size(0);
  Tie({"k", "q", "v"}, /*one_encoding=*/true, sweep.mutable_ties());
  // What no pattern takes counts in its group.
  for (const bool with_pattern : {false, true}) {
    if (with_pattern) sweep.add_patterns("q");
    const auto swept = TrySweep(sweep);
    ASSERT_TRUE(swept.ok()) << swept.status();
    ASSERT_EQ(swept->size(), with_pattern ? 2u : 5u);
    for (const v1::SweepResponse& response : *swept) {
      if (response.has_summary()) continue;
      const std::string& tensor = response.name().tensor();
      ASSERT_EQ(response.candidates_size(), 5) << tensor;
      for (const v1::SweepCandidate& candidate : response.candidates()) {
        SCOPED_TRACE(absl::StrCat(tensor, " ", candidate.spec_index()));
        if (candidate.spec_index() == 4 && tensor != "whole") {
          EXPECT_EQ(candidate.error().reason(), "STATISTICS_MISMATCH");
          EXPECT_EQ(candidate.error().field(), "ties[0].tensors[1]");
          continue;
        }
        v1::ComputeEncodingsRequest request;
        *request.mutable_default_spec() = sweep.specs(candidate.spec_index());
        *request.mutable_ties() = sweep.ties();
        const Responses responses = Compute(request);
        EXPECT_EQ(candidate.prediction().SerializeAsString(),
                  responses.at(tensor).prediction().SerializeAsString());
      }
    }
  }
}

TEST_F(TiesTest, WhatIsWrongWithARequest) {
  ContributeParts({});
  v1::ComputeEncodingsRequest request;
  *request.mutable_default_spec() =
      Spec(v1::NUMBER_FORMAT_INT8, v1::CALIBRATION_METHOD_MIN_MAX);
  const auto expect = [&](const std::string& reason, const std::string& field,
                          const std::string& text) {
    v1::SweepRequest sweep;
    *sweep.add_specs() = request.default_spec();
    *sweep.mutable_ties() = request.ties();
    const std::string computed = TryCompute(request).status().ToString();
    const std::string swept = TrySweep(sweep).status().ToString();
    for (const std::string& status : {computed, swept}) {
      EXPECT_THAT(status, HasSubstr(reason));
      EXPECT_THAT(status, HasSubstr(text));
      EXPECT_THAT(status, HasSubstr(field));
    }
    request.clear_ties();
  };
  Tie({"q"}, false, request.mutable_ties());
  expect("TIE_INVALID", "ties[0]", "1 tensors, expected at least 2");
  Tie({"q", "k"}, false, request.mutable_ties());
  Tie({}, false, request.mutable_ties());
  expect("TIE_INVALID", "ties[1]", "0 tensors, expected at least 2");
  Tie({"q", "k"}, false, request.mutable_ties());
  Tie({"whole", "v", "k"}, true, request.mutable_ties());
  expect("TIE_INVALID", "ties[1].tensors[2]", "\"k\" is tied twice");
  Tie({"q", "q"}, false, request.mutable_ties());
  expect("TIE_INVALID", "ties[0].tensors[1]", "\"q\" is tied twice");
  Tie({"q", ""}, false, request.mutable_ties());
  expect("NAME_INVALID", "ties[0].tensors[1]", "");
  Tie({"q", "k"}, false, request.mutable_ties());
  Tie({"v", "nobody"}, false, request.mutable_ties());
  expect("STATISTICS_NOT_FOUND", "ties[1].tensors[1]", "nobody");
  std::vector<std::string> many;
  for (int i = 0; i <= 65536; ++i) many.push_back(absl::StrCat(i));
  Tie(many, false, request.mutable_ties());
  expect("TIE_INVALID", "ties",
         "65537 tensors, expected at most 65536 in all groups together");
}

TEST_F(TiesTest, AllOfAGroupHaveOneSpec) {
  ContributeParts({1, 16});
  v1::ComputeEncodingsRequest request;
  const auto add = [&](const std::string& pattern, v1::NumberFormat format) {
    v1::SpecOverride& added = *request.add_overrides();
    added.set_pattern(pattern);
    *added.mutable_spec() = Spec(format, v1::CALIBRATION_METHOD_MIN_MAX);
  };
  add("q", v1::NUMBER_FORMAT_NVFP4);
  add("k", v1::NUMBER_FORMAT_INT8);
  Tie({"v", "q", "k"}, false, request.mutable_ties());
  const std::string refused = TryCompute(request).status().ToString();
  EXPECT_THAT(refused, HasSubstr("TIE_INVALID"));
  EXPECT_THAT(refused, HasSubstr("\"q\" has another spec"));
  EXPECT_THAT(refused, HasSubstr("ties[0].tensors[1]"));
  // Equal ones are one, and a tensor without one counts all the same.
  request.mutable_overrides(1)->mutable_spec()->set_format(
      v1::NUMBER_FORMAT_NVFP4);
  const Responses some = Compute(request);
  ASSERT_EQ(some.size(), 2u);
  *request.mutable_default_spec() = request.overrides(0).spec();
  request.clear_overrides();
  const Responses all = Compute(request);
  for (const char* tensor : {"q", "k"}) {
    EXPECT_EQ(EncodingOf(some.at(tensor)).SerializeAsString(),
              EncodingOf(all.at(tensor)).SerializeAsString());
  }
}

TEST_F(TiesTest, WhatOneTensorOfAGroupCannotFailsAllOfThem) {
  Contribute("a", Noise(4 * kColumns, 1, 1), {1, 0});
  Contribute("b", Noise(4 * kColumns, 2, 1), {1, 0}, 1, /*mantissa_bits=*/8);
  Contribute("c", Noise(4 * kColumns, 3, 1));
  Contribute("d", Noise(5 * kColumns, 4, 1), {1, 0});
  Contribute("e", Noise(4 * kColumns, 5, 1), {1, 16});
  const v1::EncodingSpec per_tensor =
      Spec(v1::NUMBER_FORMAT_INT8, v1::CALIBRATION_METHOD_MIN_MAX);
  v1::EncodingSpec per_channel = per_tensor;
  per_channel.add_block_size(1);
  per_channel.add_block_size(0);
  const v1::EncodingSpec searched =
      Spec(v1::NUMBER_FORMAT_INT8, v1::CALIBRATION_METHOD_MSE);
  v1::EncodingSpec no_sign = per_tensor;
  no_sign.set_scale_type(v1::SCALE_TYPE_INTEGER);
  no_sign.set_unsigned_if_non_negative(true);
  struct Case {
    std::vector<std::string> tensors;
    v1::EncodingSpec spec;
    std::string reason;
    int index;
  };
  const std::vector<Case> cases = {
      {{"a", "b"}, searched, "STATISTICS_MISMATCH", 1},
      {{"a", "c"}, per_channel, "GRANULARITY_TOO_FINE", 1},
      {{"e", "a", "d"}, per_channel, "STATISTICS_MISMATCH", 2},
      {{"a", "e"},
       Spec(v1::NUMBER_FORMAT_INT8, v1::CALIBRATION_METHOD_MOVING_AVERAGE),
       "METHOD_INVALID",
       0},
      {{"e", "a"}, no_sign, "TIE_INVALID", 0},
      {{"e", "d"},
       Spec(v1::NUMBER_FORMAT_NVFP4, v1::CALIBRATION_METHOD_MIN_MAX),
       "GRANULARITY_TOO_FINE",
       1}};
  for (const Case& wrong : cases) {
    v1::ComputeEncodingsRequest request;
    *request.mutable_default_spec() = wrong.spec;
    Tie(wrong.tensors, /*one_encoding=*/true, request.mutable_ties());
    SCOPED_TRACE(request.ShortDebugString());
    Responses responses = Compute(request);
    ASSERT_EQ(responses.size(), 5u);
    for (const std::string& tensor : wrong.tensors) {
      EXPECT_EQ(responses[tensor].error().reason(), wrong.reason);
      EXPECT_EQ(responses[tensor].error().field(),
                absl::StrCat("ties[0].tensors[", wrong.index, "]"));
    }
  }
  // Tensors of one group have nothing to do with those of another.
  v1::ComputeEncodingsRequest request;
  *request.mutable_default_spec() = searched;
  Tie({"a", "b"}, /*one_encoding=*/true, request.mutable_ties());
  Tie({"d", "e"}, /*one_encoding=*/true, request.mutable_ties());
  const Responses searches = Compute(request);
  EXPECT_TRUE(searches.at("b").has_error());
  EXPECT_EQ(EncodingOf(searches.at("d")).SerializeAsString(),
            EncodingOf(searches.at("e")).SerializeAsString());
  // Without a search, histograms do not matter.
  *request.mutable_default_spec() = per_tensor;
  const Responses plain = Compute(request);
  EXPECT_EQ(EncodingOf(plain.at("a")).SerializeAsString(),
            EncodingOf(plain.at("b")).SerializeAsString());
}

server::ServerOptions SmallBudget() {
  server::ServerOptions options;
  options.limits.memory_budget_bytes = int64_t{4} << 20;
  return options;
}

class TiesMemoryTest : public TiesTest {
 protected:
  TiesMemoryTest() : TiesTest(SmallBudget()) {}
};

// Statistics that are put together are charged: each of the group has room
// alone, but all at once have not.
TEST_F(TiesMemoryTest, WhatTiedTensorsHoldIsChargedAndGivenBack) {
  std::vector<std::string> tensors;
  for (int i = 0; i < 40; ++i) {
    tensors.push_back(absl::StrCat("t", 10 + i));
    // Each in bins of its own.
    Contribute(tensors.back(),
               Noise(128 * kColumns, static_cast<uint32_t>(i),
                     std::ldexp(1.0f, 6 * i - 120)),
               {}, 1, 10);
  }
  v1::ComputeEncodingsRequest request;
  *request.mutable_default_spec() =
      Spec(v1::NUMBER_FORMAT_INT8, v1::CALIBRATION_METHOD_PERCENTILE);
  for (const auto& [tensor, response] : Compute(request)) {
    EXPECT_FALSE(response.has_error()) << tensor << response.error().message();
  }
  Tie(tensors, /*one_encoding=*/true, request.mutable_ties());
  const Responses tied = Compute(request);
  ASSERT_EQ(tied.size(), tensors.size());
  for (const auto& [tensor, response] : tied) {
    EXPECT_EQ(response.error().reason(), "MEMORY_BUDGET") << tensor;
    EXPECT_THAT(response.error().message(), HasSubstr("tie fewer tensors"));
    EXPECT_THAT(response.error().field(), HasSubstr("ties[0].tensors["));
  }
  request.clear_ties();
  Tie({tensors[0], tensors[1]}, /*one_encoding=*/true, request.mutable_ties());
  for (const auto& [tensor, response] : Compute(request)) {
    EXPECT_FALSE(response.has_error()) << tensor << response.error().message();
  }
  EXPECT_TRUE(PollUntil(absl::Minutes(2), [&] {
    return server_.server().memory_used_bytes() == 0;
  })) << server_.server().memory_used_bytes();
}

}  // namespace
}  // namespace quantd::testing::ties_test
