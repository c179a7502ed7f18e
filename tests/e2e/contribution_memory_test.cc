// Many ranks contribute large statistics, or large Gram matrices with a full
// cache, at the same time to a server that has the memory of deploy/systemd's
// unit: it is not killed, and counts all.
//
// QUANTD_CONTRIBUTION_RANKS sets how many; the promise is one of 64.
// QUANTD_CONTRIBUTION_FEATURES is the number of features of the matrices; with
// fewer than 8,192 the server has less memory, too.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/count.h"
#include "tests/support/paths.h"
#include "tests/support/sanitizers.h"
#include "tests/support/server_process.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tensor_streams.h"

namespace quantd::testing::contribution_memory_test {
namespace {

constexpr int64_t kMemoryBytes = int64_t{1536} << 20;
constexpr int kDefaultRanks = 4;
// The second one merges with what the first has left.
constexpr int kContributions = 2;
constexpr int64_t kChannels = kSanitized ? 64 : 512;
constexpr int64_t kColumns = kSanitized ? 1024 : 8192;
constexpr char kModel[] = "decoder";
constexpr char kTensor[] = "layers.0.up";

bool WriteText(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << std::flush;
  return file.good();
}

// A control group of kMemoryBytes, where this process may make one.
class MemoryGroup {
 public:
  MemoryGroup() {
    const std::string name = absl::StrCat("quantd-test-", getpid());
    for (const auto& [root, limit] :
         {std::pair<const char*, const char*>{"/sys/fs/cgroup/memory",
                                              "memory.limit_in_bytes"},
          {"/sys/fs/cgroup", "memory.max"}}) {
      const std::string folder = absl::StrCat(root, "/", name);
      if (mkdir(folder.c_str(), 0700) != 0) continue;
      if (WriteText(absl::StrCat(folder, "/", limit),
                    absl::StrCat(kMemoryBytes))) {
        folder_ = folder;
        return;
      }
      rmdir(folder.c_str());
    }
  }
  // Requires: who was added is gone.
  ~MemoryGroup() {
    if (!folder_.empty()) rmdir(folder_.c_str());
  }
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;

  // Whether the process is held to the limit from now on.
  bool Add(pid_t pid) const {
    return !folder_.empty() &&
           WriteText(absl::StrCat(folder_, "/cgroup.procs"), absl::StrCat(pid));
  }

 private:
  std::string folder_;
};

// The most that the process had in memory; 0 when it is gone.
int64_t PeakBytes(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  std::string word;
  while (file >> word && word != "VmHWM:") {
  }
  int64_t kib = 0;
  file >> kib;
  return kib << 10;
}

// [kChannels, kColumns] with thousands of bins per channel at 7 bits.
std::string MakeData(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0, 0.02f);
  std::vector<float> elements(kChannels * kColumns);
  for (float& element : elements) element = distribution(random);
  return ToBytes(elements);
}

v1::CalibrateHeader MakeHeader(int64_t rows, int64_t columns, int rank,
                               uint64_t sequence) {
  v1::CalibrateHeader header;
  v1::TensorDescription& tensor = *header.mutable_tensor();
  tensor.mutable_name()->set_model(kModel);
  tensor.mutable_name()->set_tensor(kTensor);
  tensor.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor.add_shape(rows);
  tensor.add_shape(columns);
  v1::Contribution& contribution = *header.mutable_contribution();
  contribution.set_source(absl::StrCat("rank-", rank));
  contribution.set_sequence(sequence);
  contribution.set_mantissa_bits(7);
  return header;
}

// Sends a contribution again, as documented, until it is counted.
void MustContribute(v1::QuantizationService::Stub& stub,
                    const v1::CalibrateHeader& header, const std::string& data,
                    absl::Duration deadline, std::atomic<int>* retries) {
  while (true) {
    const absl::StatusOr<v1::CalibrateSummary> summary =
        Calibrate(stub, header, data, 1 << 20);
    if (summary.ok()) {
      EXPECT_EQ(summary->contribution().sequence(),
                header.contribution().sequence());
      return;
    }
    ASSERT_TRUE(absl::IsResourceExhausted(summary.status()) ||
                absl::IsUnavailable(summary.status()))
        << summary.status();
    ASSERT_LT(core::SteadyNow(), deadline) << summary.status();
    retries->fetch_add(1);
    absl::SleepFor(absl::Seconds(1));
  }
}

// The contributions of all ranks at a time. Answers how many were sent again.
// `make_header`  of a rank and the number of one of its contributions, from 0.
// `data_of`      of that number.
template <typename MakeHeader, typename DataOf>
int ContributeAll(const ServerProcess& server, int ranks,
                  absl::Duration patience_per_rank,
                  const MakeHeader& make_header, const DataOf& data_of) {
  const absl::Duration deadline =
      core::SteadyNow() + absl::Minutes(2) + ranks * patience_per_rank;
  std::atomic<int> retries{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto stub = v1::QuantizationService::NewStub(server.NewChannel());
      for (int i = 0; i < kContributions && !::testing::Test::HasFailure();
           ++i) {
        MustContribute(*stub, make_header(rank, i), data_of(i), deadline,
                       &retries);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return retries.load();
}

TEST(ContributionMemoryTest, ManyRanksFitTheMemoryOfTheUnit) {
  const int ranks = Count("QUANTD_CONTRIBUTION_RANKS", kDefaultRanks);
  const std::vector<std::string> data = {MakeData(1), MakeData(2)};
  const TemporaryDirectory directory;
  const MemoryGroup group;
  ServerProcess server(QuantdBinary(), directory.File("store.db"),
                       {"--drain-delay", "0s"});
  const bool is_held = group.Add(server.pid());

  const absl::Duration begin = core::SteadyNow();
  const auto make_header = [](int rank, int i) {
    v1::CalibrateHeader header = MakeHeader(kChannels, kColumns, rank, i + 1);
    header.mutable_contribution()->mutable_granularity()->set_axis(0);
    return header;
  };
  const int retries =
      ContributeAll(server, ranks, absl::Seconds(15), make_header,
                    [&](int i) -> const std::string& { return data[i]; });
  const absl::Duration took = core::SteadyNow() - begin;
  const int64_t peak_bytes = PeakBytes(server.pid());

  const auto stub = v1::EncodingService::NewStub(server.NewChannel());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::seconds(120));
  v1::GetStatisticsRequest request;
  request.mutable_name()->set_model(kModel);
  request.mutable_name()->set_tensor(kTensor);
  v1::GetStatisticsResponse response;
  const grpc::Status status = stub->GetStatistics(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(
      response.statistics().count(),
      static_cast<uint64_t>(ranks * kContributions * kChannels * kColumns));
  EXPECT_EQ(response.sources_size(), ranks);
  for (const v1::StatisticsSource& source : response.sources()) {
    EXPECT_EQ(source.sequence(), uint64_t{kContributions}) << source.source();
  }
  EXPECT_GT(peak_bytes, 0);
  // A sanitizer has memory of its own.
  if (!kSanitized) {
    EXPECT_LT(peak_bytes, kMemoryBytes);
  }
  EXPECT_EQ(server.Terminate(), 0);
  std::printf(
      "%d ranks, %s: %d contributions in %.1f s, at most %.0f MiB, %d sent "
      "again\n",
      ranks, is_held ? "in a control group" : "watched only",
      ranks * kContributions, absl::ToDoubleSeconds(took),
      static_cast<double>(peak_bytes) / (1 << 20), retries);
}

// Puts encodings of so many bytes together, and reads them.
void FillCache(v1::EncodingService::Stub& stub, int64_t bytes) {
  constexpr int kScales = 900'000;
  v1::PutEncodingRequest request;
  request.mutable_name()->set_model("cached");
  v1::Encoding& encoding = *request.mutable_encoding();
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_block_size(1);
  encoding.set_qmin(-127);
  encoding.set_qmax(127);
  for (int i = 0; i < kScales; ++i) encoding.add_scale(0.5f);
  for (int i = 0; i * int64_t{kScales} * 4 < bytes; ++i) {
    request.mutable_name()->set_tensor(absl::StrCat(i));
    {
      grpc::ClientContext context;
      v1::PutEncodingResponse response;
      const grpc::Status status =
          stub.PutEncoding(&context, request, &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
    }
    grpc::ClientContext context;
    v1::GetEncodingRequest get;
    *get.mutable_name() = request.name();
    v1::GetEncodingResponse response;
    const grpc::Status status = stub.GetEncoding(&context, get, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
}

TEST(ContributionMemoryTest, GramMatricesFitTheMemoryOfTheUnit) {
  constexpr int64_t kDefaultGramRanks = 3;
  constexpr int64_t kMostRanks = 16;
  const auto ranks = static_cast<int>(std::min(
      Count("QUANTD_CONTRIBUTION_RANKS", kDefaultGramRanks), kMostRanks));
  const int64_t features =
      Count("QUANTD_CONTRIBUTION_FEATURES", kSanitized ? 1024 : 2048);
  constexpr int64_t kFeatures = 8192;
  constexpr int64_t kRows = 4;
  // As of the defaults and their matrices.
  const int64_t budget_bytes =
      (int64_t{1} << 30) * features / kFeatures * features / kFeatures;
  const int64_t cache_bytes = budget_bytes / 4;
  const TemporaryDirectory directory;
  ServerProcess server(
      QuantdBinary(), directory.File("store.db"),
      {"--drain-delay", "0s", "--memory-budget-bytes",
       absl::StrCat(budget_bytes), "--cache-bytes", absl::StrCat(cache_bytes)});
  const auto encodings = v1::EncodingService::NewStub(server.NewChannel());
  FillCache(*encodings, cache_bytes);
  const int64_t bytes_before = PeakBytes(server.pid());
  const std::string data =
      ToBytes(std::vector<float>(static_cast<size_t>(kRows * features), 1));
  const absl::Duration begin = core::SteadyNow();
  const auto make_header = [&](int rank, int i) {
    v1::CalibrateHeader header = MakeHeader(kRows, features, rank, i + 1);
    v1::Contribution& contribution = *header.mutable_contribution();
    contribution.mutable_features()->set_gram(true);
    for (int64_t k = 0; k < features; ++k) {
      contribution.mutable_features()->add_step_exponent(-10);
    }
    return header;
  };
  const int retries =
      ContributeAll(server, ranks, absl::Seconds(60), make_header,
                    [&](int /*i*/) -> const std::string& { return data; });
  const int64_t peak_bytes = PeakBytes(server.pid());
  EXPECT_GT(peak_bytes, 0);
  if (!kSanitized) {
    EXPECT_LT(peak_bytes, budget_bytes + cache_bytes + (int64_t{256} << 20));
    EXPECT_LT(peak_bytes - bytes_before, budget_bytes + (int64_t{64} << 20));
  }
  std::printf(
      "%d ranks of %lld features: %.1f s, at most %.0f MiB of %lld and 256, %d "
      "sent again\n",
      ranks, static_cast<long long>(features),
      absl::ToDoubleSeconds(core::SteadyNow() - begin),
      static_cast<double>(peak_bytes) / (1 << 20),
      static_cast<long long>((budget_bytes + cache_bytes) >> 20), retries);
  EXPECT_EQ(server.Terminate(), 0);
}

}  // namespace
}  // namespace quantd::testing::contribution_memory_test
