// ChooseMixture, over a connection.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cpp/errors.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing::choose_mixture_test {
namespace {

using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

absl::StatusOr<v1::ChooseMixtureResponse> Choose(
    TestServer* server, const v1::ChooseMixtureRequest& request) {
  grpc::ClientContext context;
  v1::ChooseMixtureResponse response;
  const grpc::Status status =
      server->encodings().ChooseMixture(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

void AddOption(uint32_t spec_index, uint64_t size_bytes, double noise_to_signal,
               v1::MixtureTensor* tensor) {
  v1::MixtureOption* const option = tensor->add_options();
  option->set_spec_index(spec_index);
  option->set_size_bytes(size_bytes);
  option->set_noise_to_signal(noise_to_signal);
}

// More bytes, less noise, for tensors of many sizes.
v1::ChooseMixtureRequest RandomRequest(int tensors, int options) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> factor(0.5, 2);
  v1::ChooseMixtureRequest request;
  for (int i = 0; i < tensors; ++i) {
    v1::MixtureTensor* const tensor = request.add_tensors();
    tensor->set_tensor(absl::StrCat("t", i));
    const double elements = 1000 * std::exp2(4 * factor(random));
    for (int k = 0; k < options; ++k) {
      AddOption(k, static_cast<uint64_t>(elements * (k + 2) / 8),
                factor(random) * std::exp2(-2 * k) * 0.1, tensor);
    }
  }
  return request;
}

struct Figures {
  uint64_t size_bytes = 0;
  double noise = 0;
};

// Of the option that each digit of `number` says, in base of their count.
Figures FiguresOf(const v1::ChooseMixtureRequest& request, int64_t number) {
  Figures figures;
  for (const v1::MixtureTensor& tensor : request.tensors()) {
    const v1::MixtureOption& option =
        tensor.options(static_cast<int>(number % tensor.options_size()));
    number /= tensor.options_size();
    figures.size_bytes += option.size_bytes();
    figures.noise += option.noise_to_signal();
  }
  return figures;
}

TEST(ChooseMixtureTest, IsAsGoodAsTheBestOfAllChoices) {
  TestServer server;
  v1::ChooseMixtureRequest request = RandomRequest(12, 3);
  int64_t combinations = 1;
  uint64_t most_bytes = 0;
  for (const v1::MixtureTensor& tensor : request.tensors()) {
    combinations *= 3;
    most_bytes += tensor.options(2).size_bytes();
  }
  const std::vector<double> parts = {0.55, 0.7, 0.85, 1};
  for (const double part : parts) {
    request.add_targets()->set_max_size_bytes(
        static_cast<uint64_t>(part * static_cast<double>(most_bytes)));
  }
  request.add_targets()->set_min_sqnr_db(18);
  const auto response = Choose(&server, request);
  ASSERT_TRUE(response.ok()) << response.status();
  ASSERT_EQ(response->mixtures_size(), 5);

  std::vector<double> least(parts.size(), kInfinity);
  for (int64_t number = 0; number < combinations; ++number) {
    const Figures figures = FiguresOf(request, number);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (figures.size_bytes <=
          request.targets(static_cast<int>(i)).max_size_bytes()) {
        least[i] = std::min(least[i], figures.noise);
      }
    }
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const v1::SweepMixture& mixture = response->mixtures(static_cast<int>(i));
    EXPECT_TRUE(mixture.target_met());
    EXPECT_NEAR(mixture.noise_to_signal_sum(), least[i], 1e-12 * least[i]);
    EXPECT_LE(mixture.size_bytes(),
              request.targets(static_cast<int>(i)).max_size_bytes());
    ASSERT_EQ(mixture.choices_size(), 12);
    EXPECT_EQ(mixture.choices(11).tensor(), "t11");
  }

  const v1::SweepMixture& quiet = response->mixtures(4);
  Figures figures;
  for (int i = 0; i < 12; ++i) {
    const v1::MixtureOption& option = request.tensors(i).options(
        static_cast<int>(quiet.choices(i).spec_index()));
    figures.size_bytes += option.size_bytes();
    EXPECT_LE(option.noise_to_signal(), std::pow(10, -1.8));
    // A smaller one would not do.
    if (quiet.choices(i).spec_index() > 0) {
      EXPECT_GT(request.tensors(i).options(0).noise_to_signal(),
                std::pow(10, -1.8));
    }
  }
  EXPECT_EQ(quiet.size_bytes(), figures.size_bytes);
  EXPECT_GE(quiet.min_sqnr_db(), 18);
}

TEST(ChooseMixtureTest, TakesNoiseThatIsNotFiniteForTheWorst) {
  TestServer server;
  v1::ChooseMixtureRequest request;
  v1::MixtureTensor* const tensor = request.add_tensors();
  AddOption(4, 100, NAN, tensor);
  AddOption(5, 100, kInfinity, tensor);
  AddOption(9, 200, 1e-3, tensor);
  request.add_targets()->set_max_size_bytes(300);
  request.add_targets()->set_max_size_bytes(100);
  request.add_targets()->set_min_sqnr_db(40);
  const auto response = Choose(&server, request);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->mixtures(0).choices(0).spec_index(), 9u);
  EXPECT_NEAR(response->mixtures(0).min_sqnr_db(), 30, 1e-9);
  EXPECT_EQ(response->mixtures(1).min_sqnr_db(), -kInfinity);
  EXPECT_TRUE(response->mixtures(1).target_met());
  EXPECT_EQ(response->mixtures(2).choices(0).spec_index(), 9u);
  EXPECT_FALSE(response->mixtures(2).target_met());
}

TEST(ChooseMixtureTest, SaysWhatIsWrong) {
  TestServer server;
  v1::ChooseMixtureRequest good = RandomRequest(2, 2);
  good.add_targets()->set_max_size_bytes(1 << 20);
  ASSERT_TRUE(Choose(&server, good).ok());
  const auto expect = [&](const v1::ChooseMixtureRequest& request,
                          const std::string& reason, const std::string& text) {
    const absl::Status status = Choose(&server, request).status();
    EXPECT_EQ(ErrorReason(status), reason) << status;
    EXPECT_THAT(status.message(), HasSubstr(text));
  };
  v1::ChooseMixtureRequest request = good;
  request.clear_tensors();
  expect(request, "CANDIDATES_INVALID", "0 tensors");
  request = good;
  request.mutable_tensors(1)->clear_options();
  expect(request, "CANDIDATES_INVALID", "0 options, expected 1 to 64");
  for (int i = 0; i < 65; ++i) AddOption(i, 1, 1, request.mutable_tensors(1));
  expect(request, "CANDIDATES_INVALID", "65 options");
  request = good;
  AddOption(2, 1, -0.5, request.mutable_tensors(0));
  expect(request, "CANDIDATES_INVALID", "noise_to_signal is -0.5");
  request = good;
  AddOption(uint32_t{1} << 31, 1, 0.5, request.mutable_tensors(0));
  expect(request, "CANDIDATES_INVALID", "spec_index is 2147483648");
  request = good;
  AddOption(2, uint64_t{1} << 62, 0.5, request.mutable_tensors(0));
  AddOption(2, uint64_t{1} << 62, 0.5, request.mutable_tensors(1));
  expect(request, "CANDIDATES_INVALID", "add up to more than");
  request = good;
  request.clear_targets();
  expect(request, "TARGET_INVALID", "0 targets, expected 1 to 64");
  for (int i = 0; i < 65; ++i) request.add_targets()->set_min_sqnr_db(i);
  expect(request, "TARGET_INVALID", "65 targets");
  request = good;
  request.add_targets();
  expect(request, "TARGET_INVALID", "got neither");
  request.mutable_targets(1)->set_min_sqnr_db(NAN);
  expect(request, "TARGET_INVALID", "min_sqnr_db is nan");
  request.mutable_targets(1)->set_max_size_bytes(0);
  expect(request, "TARGET_INVALID", "max_size_bytes is 0");
}

// The choices for 64 targets take 64 times the memory of those for one, though
// few bytes go over the wire.
TEST(ChooseMixtureTest, ChargesWhatItAnswers) {
  server::ServerOptions options;
  options.limits.memory_budget_bytes = 256 << 10;
  options.limits.memory_wait = absl::Milliseconds(1);
  TestServer server(options);
  v1::ChooseMixtureRequest request = RandomRequest(100, 2);
  request.add_targets()->set_min_sqnr_db(10);
  ASSERT_TRUE(Choose(&server, request).ok());
  for (int i = 1; i < 64; ++i) request.add_targets()->set_min_sqnr_db(i);
  EXPECT_EQ(ErrorReason(Choose(&server, request).status()), "MEMORY_BUDGET");
}

}  // namespace
}  // namespace quantd::testing::choose_mixture_test
