// A server that has quantized large tensors gives their memory back.

#include <gtest/gtest.h>
#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/metric_value.h"
#include "tests/support/paths.h"
#include "tests/support/sanitizers.h"
#include "tests/support/server_process.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tensor_streams.h"

namespace quantd::testing::idle_memory_test {
namespace {

constexpr int kClients = 4;
constexpr int64_t kRows = 2048;
constexpr int64_t kColumns = kSanitized ? 1024 : 16384;
// Beside what the server had in memory before.
constexpr int64_t kMoreBytes = int64_t{96} << 20;

// A line of /proc/PID/status; 0 when the process is gone.
int64_t StatusBytes(pid_t pid, const std::string& name) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  std::string word;
  while (file >> word && word != name) {
  }
  int64_t kib = 0;
  file >> kib;
  return kib << 10;
}

TEST(IdleMemoryTest, WhatLargeTensorsTookIsGivenBack) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer has an allocator of its own";
  const TemporaryDirectory directory;
  // It turns no client away, however busy the machine is.
  ServerProcess server(QuantdBinary(), directory.File("store.db"),
                       {"--drain-delay", "0s", "--queue-delay", "1h"});
  const int64_t before = StatusBytes(server.pid(), "VmRSS:");
  ASSERT_GT(before, 0);
  std::vector<float> elements(kRows * kColumns);
  for (size_t i = 0; i < elements.size(); ++i) {
    elements[i] = static_cast<float>(i % 1013) - 500;
  }
  const std::string data = ToBytes(elements);
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&] {
      // It has to hold all of the tensor, whose scales it chooses.
      v1::QuantizeHeader header;
      header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
      header.mutable_tensor()->add_shape(kRows);
      header.mutable_tensor()->add_shape(kColumns);
      header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
      header.mutable_spec()->mutable_granularity()->set_axis(0);
      const auto stub = v1::QuantizationService::NewStub(server.NewChannel());
      const auto answer = Quantize(*stub, header, data, 1 << 20);
      EXPECT_TRUE(answer.ok()) << answer.status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  const int64_t peak = StatusBytes(server.pid(), "VmHWM:");
  EXPECT_GT(peak, before + kMoreBytes);

  int64_t after = 0;
  PollUntil(absl::Minutes(2), [&] {
    after = StatusBytes(server.pid(), "VmRSS:");
    return after <= before + kMoreBytes;
  });
  EXPECT_GT(after, 0);
  EXPECT_LE(after, before + kMoreBytes);
  std::printf("%d MiB, at most %d MiB, then %d MiB\n",
              static_cast<int>(before >> 20), static_cast<int>(peak >> 20),
              static_cast<int>(after >> 20));
  EXPECT_EQ(server.Terminate(), 0);
}

}  // namespace
}  // namespace quantd::testing::idle_memory_test
