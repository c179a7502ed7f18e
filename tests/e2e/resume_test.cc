// Tensors whose connection breaks, again and again, at random places: the
// results are those of one that never broke.

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "gtest/gtest.h"
#include "tests/support/cutting_proxy.h"
#include "tests/support/sanitizers.h"
#include "tests/support/test_server.h"

namespace quantd {
namespace {

constexpr int64_t kRows = 64;
constexpr int64_t kColumns = 1 << (testing::kSanitized ? 13 : 15);
constexpr int64_t kPartBytes = 1 << (testing::kSanitized ? 18 : 20);
constexpr int kCuts = 4;

std::vector<uint8_t> RandomReals(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(kRows * kColumns);
  for (float& value : values) value = normal(random);
  // To be counted.
  values[7] = std::numeric_limits<float>::infinity();
  values[values.size() / 2] = std::numeric_limits<float>::quiet_NaN();
  values.back() = -std::numeric_limits<float>::infinity();
  const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
  return std::vector<uint8_t>(bytes, bytes + values.size() * sizeof(float));
}

std::vector<uint8_t> ToVector(absl::Span<const uint8_t> bytes) {
  return std::vector<uint8_t>(bytes.begin(), bytes.end());
}

class ResumeTest : public ::testing::Test {
 protected:
  std::unique_ptr<Client> Connect(const std::string& target) {
    ClientOptions options;
    options.target = target;
    options.chunk_bytes = 64 << 10;
    options.part_bytes = kPartBytes;
    options.max_retries = 2 * kCuts;
    options.initial_backoff = absl::Milliseconds(1);
    options.max_backoff = absl::Milliseconds(100);
    options.on_retry = [this](const Retry&) { ++retries_; };
    return std::move(Client::Connect(options)).value();
  }

  QuantizeJob JobOf(v1::NumberFormat format, int64_t group) {
    QuantizeJob job;
    job.tensor.name.set_model("m");
    job.tensor.name.set_tensor("t");
    job.tensor.shape = {kRows, kColumns};
    job.tensor.data = reals_;
    EncodingSpec spec;
    spec.set_format(format);
    spec.add_block_size(1);
    spec.add_block_size(group);
    job.source = spec;
    return job;
  }

  // The result over a connection that breaks is the one over another.
  void ExpectSame(const QuantizeJob& job, uint32_t seed) {
    const absl::StatusOr<QuantizeResult> expected = direct_->Quantize(job);
    ASSERT_TRUE(expected.ok()) << expected.status();
    testing::CuttingProxy proxy(server_.address(), kCuts, 3 * kPartBytes, seed);
    const absl::StatusOr<QuantizeResult> got =
        Connect(proxy.address())->Quantize(job);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(ToVector(got->codes) == ToVector(expected->codes));
    EXPECT_EQ(got->summary.SerializeAsString(),
              expected->summary.SerializeAsString());
    EXPECT_EQ(got->header.encoding().SerializeAsString(),
              expected->header.encoding().SerializeAsString());
    EXPECT_EQ(got->header.size_bytes(), expected->header.size_bytes());
    EXPECT_EQ(proxy.cuts_left(), 0);
  }

  void ExpectSame(const DequantizeJob& job, uint32_t seed) {
    const absl::StatusOr<DequantizeResult> expected = direct_->Dequantize(job);
    ASSERT_TRUE(expected.ok()) << expected.status();
    testing::CuttingProxy proxy(server_.address(), kCuts, kPartBytes / 4, seed);
    const absl::StatusOr<DequantizeResult> got =
        Connect(proxy.address())->Dequantize(job);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(ToVector(got->elements) == ToVector(expected->elements));
    EXPECT_EQ(got->summary.SerializeAsString(),
              expected->summary.SerializeAsString());
    EXPECT_EQ(proxy.cuts_left(), 0);
  }

  testing::TestServer server_;
  int retries_ = 0;
  const std::vector<uint8_t> reals_ = RandomReals(1);
  const std::unique_ptr<Client> direct_ = Connect(server_.address());
};

TEST_F(ResumeTest, BrokenTensorsHaveTheResultsOfWholeOnes) {
  uint32_t seed = 0;
  for (const v1::NumberFormat format :
       {v1::NUMBER_FORMAT_INT8, v1::NUMBER_FORMAT_UINT4,
        v1::NUMBER_FORMAT_FLOAT8_E4M3FN}) {
    QuantizeJob job = JobOf(format, format == v1::NUMBER_FORMAT_INT8 ? 0 : 128);
    job.store = true;
    const absl::StatusOr<QuantizeResult> made = direct_->Quantize(job);
    ASSERT_TRUE(made.ok()) << made.status();
    SCOPED_TRACE(format);
    // The encoding found on the way, given, and by name.
    ExpectSame(job, ++seed);
    job.source = made->header.encoding();
    ExpectSame(job, ++seed);
    job.store = false;
    job.source = v1::EncodingReference();
    ExpectSame(job, ++seed);
    DequantizeJob back;
    back.tensor = job.tensor;
    back.tensor.data = made->codes;
    back.source = made->header.encoding();
    ExpectSame(back, ++seed);
    back.source = v1::EncodingReference();
    ExpectSame(back, ++seed);
  }
  EXPECT_GE(retries_, kCuts);
}

TEST_F(ResumeTest, NamesTheFirstElementThatIsRejectedWhereverItsPartBegins) {
  QuantizeJob job = JobOf(v1::NUMBER_FORMAT_INT8, 0);
  const absl::StatusOr<QuantizeResult> made = direct_->Quantize(job);
  ASSERT_TRUE(made.ok()) << made.status();
  job.source = made->header.encoding();
  job.nan_policy = v1::NAN_POLICY_REJECT;
  std::vector<uint8_t> reals = reals_;
  std::memset(&reals[7 * sizeof(float)], 0, sizeof(float));
  job.tensor.data = reals;
  const absl::Status in_parts = direct_->Quantize(job).status();
  ClientOptions options;
  options.target = server_.address();
  const absl::Status whole =
      std::move(Client::Connect(options)).value()->Quantize(job).status();
  EXPECT_EQ(in_parts, whole);
  EXPECT_TRUE(absl::IsInvalidArgument(whole)) << whole;
}

}  // namespace
}  // namespace quantd
