// Many more tensors than the server can quantize: some are served, the others
// hear when to try again, and nothing fails. The server has 512 MiB of address
// space, a memory budget of 256 MiB, and is as it is by default.
//
// QUANTD_OVERLOAD_SECONDS=60 also loads it for that long with ten times as many
// as it can serve, and prints how many it serves, and how fast. On a machine
// that is quiet these should be as many as without overload, and about as fast.
//
// That load comes from this program. Of tensors that take long to compute it
// sends ten times as many in a second as are served. Those that take longer to
// send than to compute cost it as much as the server: of these ten times as
// many are under way as keep the server busy, and one that is turned away is
// followed by the next at once.

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/quantization_service.pb.h"
#include "tests/support/paths.h"
#include "tests/support/sanitizers.h"
#include "tests/support/server_process.h"
#include "tests/support/temporary_directory.h"

namespace quantd::testing::overload_test {
namespace {

constexpr char kQuantize[] = "/quantd.v1.QuantizationService/Quantize";
constexpr int kThreads = 2;
constexpr int kConnections = 4;
// As many under way as keep both sides busy when sending takes the time.
constexpr int kTransfers = 8;
constexpr int64_t kRows = 8;

// 0 unless the environment asks for figures.
int FigureSeconds() {
  const char* const text = std::getenv("QUANTD_OVERLOAD_SECONDS");
  int seconds = 0;
  return text != nullptr && absl::SimpleAtoi(text, &seconds) ? seconds : 0;
}

// A tensor of kRows rows.
v1::QuantizeRequest TensorOf(int64_t elements) {
  v1::QuantizeRequest request;
  v1::TensorDescription& tensor = *request.mutable_header()->mutable_tensor();
  tensor.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor.add_shape(kRows);
  tensor.add_shape(elements / kRows);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::string* const data = request.mutable_data();
  for (int64_t i = 0; i < elements; ++i) {
    const float value = normal(random);
    data->append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  return request;
}

// Takes long to compute: for every row, the search for the two ends of the
// range with the least error. Rows of so many elements are searched by their
// histograms under few bits.
v1::QuantizeRequest HardTensor() {
  v1::QuantizeRequest request = TensorOf(kRows * 4224);
  v1::EncodingSpec& spec = *request.mutable_header()->mutable_spec();
  spec.set_format(v1::NUMBER_FORMAT_UINT3);
  spec.set_method(v1::CALIBRATION_METHOD_MSE);
  spec.set_search_steps(128);
  spec.add_block_size(1);
  spec.add_block_size(0);
  return request;
}

// Takes longer to send than to compute.
v1::QuantizeRequest LargeTensor() {
  v1::QuantizeRequest request = TensorOf(64 << 10);
  v1::QuantizeHeader& header = *request.mutable_header();
  header.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
  header.mutable_encoding()->add_scale(0.02f);
  return request;
}

grpc::ByteBuffer ToBuffer(const v1::QuantizeRequest& request) {
  const grpc::Slice slice(request.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

// What came of tensors. Thread-safe.
class Outcomes {
 public:
  void Served(absl::Duration latency) {
    absl::MutexLock lock(&mutex_);
    served_.push_back(latency);
  }
  void Refused(absl::Duration latency, absl::Duration retry_after) {
    absl::MutexLock lock(&mutex_);
    refused_.push_back(latency);
    retry_after_.push_back(retry_after);
  }
  void Failed(const std::string& what) {
    absl::MutexLock lock(&mutex_);
    ++failed_;
    last_failure_ = what;
  }

  struct Summary {
    int64_t served = 0;
    int64_t refused = 0;
    int64_t failed = 0;
    std::string last_failure;
    absl::Duration served_p50;
    absl::Duration served_p99;
    absl::Duration refused_p50;
    absl::Duration refused_p99;
    absl::Duration least_retry_after;
    absl::Duration most_retry_after;
  };
  Summary Take() {
    absl::MutexLock lock(&mutex_);
    Summary summary;
    summary.served = static_cast<int64_t>(served_.size());
    summary.refused = static_cast<int64_t>(refused_.size());
    summary.failed = failed_;
    summary.last_failure = last_failure_;
    summary.served_p50 = Quantile(&served_, 0.5);
    summary.served_p99 = Quantile(&served_, 0.99);
    summary.refused_p50 = Quantile(&refused_, 0.5);
    summary.refused_p99 = Quantile(&refused_, 0.99);
    summary.least_retry_after = Quantile(&retry_after_, 0);
    summary.most_retry_after = Quantile(&retry_after_, 1);
    return summary;
  }

 private:
  static absl::Duration Quantile(std::vector<absl::Duration>* values,
                                 double quantile) {
    if (values->empty()) return absl::ZeroDuration();
    std::sort(values->begin(), values->end());
    return (*values)[static_cast<size_t>(
        std::ceil(quantile * static_cast<double>(values->size() - 1)))];
  }

  absl::Mutex mutex_;
  std::vector<absl::Duration> served_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Duration> refused_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Duration> retry_after_ ABSL_GUARDED_BY(mutex_);
  int64_t failed_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string last_failure_ ABSL_GUARDED_BY(mutex_);
};

class Generator;

// One tensor on a stream of its own; deletes itself.
class OneTensor final
    : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  OneTensor(Generator* generator, const std::shared_ptr<grpc::Channel>& channel,
            const grpc::ByteBuffer& message);

  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  Generator* const generator_;
  grpc::ClientContext context_;
  grpc::GenericStub stub_;
  grpc::ByteBuffer message_;
  grpc::ByteBuffer answer_;
  const absl::Time start_;
  bool answered_ = false;
};

// Sends tensors. Thread-safe.
class Generator {
 public:
  Generator(const ServerProcess& server, const v1::QuantizeRequest& tensor)
      : message_(ToBuffer(tensor)) {
    for (int i = 0; i < kConnections; ++i) {
      channels_.push_back(server.NewChannel());
      channels_.back()->WaitForConnected(std::chrono::system_clock::now() +
                                         std::chrono::seconds(120));
    }
  }
  ~Generator() { AwaitAtMost(0); }

  void Send() {
    {
      absl::MutexLock lock(&mutex_);
      ++under_way_;
    }
    new OneTensor(this, channels_[next_++ % kConnections], message_);
  }
  // Waits until no more than that are under way.
  void AwaitAtMost(int64_t count) {
    absl::MutexLock lock(&mutex_);
    const auto reached = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return under_way_ <= count;
    };
    mutex_.Await(absl::Condition(&reached));
  }
  void Ended() {
    absl::MutexLock lock(&mutex_);
    --under_way_;
  }
  Outcomes& outcomes() { return *outcomes_; }

  // `count` tensors, so many at a time.
  Outcomes::Summary SendAll(int count, int at_once) {
    Begin();
    for (int i = 0; i < count; ++i) {
      AwaitAtMost(at_once - 1);
      Send();
    }
    AwaitAtMost(0);
    return outcomes_->Take();
  }
  // `count` tensors at a time, for that long.
  Outcomes::Summary ClosedLoop(int count, absl::Duration time) {
    Begin();
    const absl::Time end = absl::Now() + time;
    while (absl::Now() < end) {
      Send();
      AwaitAtMost(count - 1);
    }
    AwaitAtMost(0);
    return outcomes_->Take();
  }
  // So many a second, whatever comes of them.
  Outcomes::Summary OpenLoop(double per_second, absl::Duration time) {
    Begin();
    const absl::Time start = absl::Now();
    for (int64_t i = 0;; ++i) {
      const absl::Time next =
          start + absl::Seconds(1) * (static_cast<double>(i) / per_second);
      if (next >= start + time) break;
      absl::SleepFor(next - absl::Now());
      Send();
    }
    AwaitAtMost(0);
    return outcomes_->Take();
  }

 private:
  void Begin() { outcomes_ = std::make_unique<Outcomes>(); }

  const grpc::ByteBuffer message_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  int64_t next_ = 0;
  std::unique_ptr<Outcomes> outcomes_;
  absl::Mutex mutex_;
  int64_t under_way_ ABSL_GUARDED_BY(mutex_) = 0;
};

OneTensor::OneTensor(Generator* generator,
                     const std::shared_ptr<grpc::Channel>& channel,
                     const grpc::ByteBuffer& message)
    : generator_(generator),
      stub_(channel),
      message_(message),
      start_(absl::Now()) {
  stub_.PrepareBidiStreamingCall(&context_, kQuantize, {}, this);
  StartWriteLast(&message_, grpc::WriteOptions());
  StartRead(&answer_);
  StartCall();
}

void OneTensor::OnReadDone(bool ok) {
  if (!ok) return;
  const absl::Duration latency = absl::Now() - start_;
  grpc::Slice slice;
  v1::QuantizeResponse response;
  if (!answer_.DumpToSingleSlice(&slice).ok() ||
      !response.ParseFromArray(slice.begin(), static_cast<int>(slice.size()))) {
    generator_->outcomes().Failed("not a response");
    answered_ = true;
  } else if (response.error().reason() == "OVERLOADED") {
    generator_->outcomes().Refused(
        latency, absl::Milliseconds(response.error().retry_after_ms()));
    EXPECT_EQ(response.error().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    answered_ = true;
  } else if (response.has_error()) {
    generator_->outcomes().Failed(response.error().reason());
    answered_ = true;
  } else if (response.has_summary()) {
    generator_->outcomes().Served(latency);
    answered_ = true;
  }
  StartRead(&answer_);
}

void OneTensor::OnDone(const grpc::Status& status) {
  if (!answered_) {
    generator_->outcomes().Failed(absl::StrCat("status ", status.error_code(),
                                               " ", status.error_message()));
  } else {
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  generator_->Ended();
  delete this;
}

double CpuSeconds(int who) {
  rusage usage{};
  getrusage(who, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * time.tv_usec;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Runs quantd with little address space, which sanitizers cannot do with.
std::string ConfinedQuantd(const TemporaryDirectory& directory) {
  if (kSanitized) return QuantdBinary();
  const std::string path = directory.File("quantd");
  std::ofstream(path) << "#!/bin/sh\nulimit -v 524288\nexec '" << QuantdBinary()
                      << "' \"$@\"\n";
  chmod(path.c_str(), 0700);
  return path;
}

void Print(const char* what, const Outcomes::Summary& summary,
           absl::Duration time) {
  const auto ms = [](absl::Duration duration) {
    return absl::ToDoubleMilliseconds(duration);
  };
  std::printf(
      "[          ] %s: %.1f served a second, p50 %.1f ms, p99 %.1f ms; %lld "
      "refused, p50 %.2f ms, p99 %.2f ms, told to retry after %.0f to %.0f ms; "
      "%lld failed %s\n",
      what, static_cast<double>(summary.served) / absl::ToDoubleSeconds(time),
      ms(summary.served_p50), ms(summary.served_p99),
      static_cast<long long>(summary.refused), ms(summary.refused_p50),
      ms(summary.refused_p99), ms(summary.least_retry_after),
      ms(summary.most_retry_after), static_cast<long long>(summary.failed),
      summary.last_failure.c_str());
}

// How a load is measured out: so many a second, or so many at once.
enum class Load { kASecond, kAtOnce };

void PrintFigures(Generator& generator, Load kind, absl::Duration load_time) {
  const absl::Duration calm_time = std::min(load_time / 3, absl::Seconds(20));
  generator.ClosedLoop(1, calm_time / 4);
  Print("one at a time", generator.ClosedLoop(1, calm_time), calm_time);
  double peak = 0;
  const std::vector<int> counts = kind == Load::kASecond
                                      ? std::vector<int>{kThreads, kThreads + 1}
                                      : std::vector<int>{kThreads, kTransfers};
  for (const int count : counts) {
    const Outcomes::Summary busy = generator.ClosedLoop(count, calm_time);
    Print("as many as it can", busy, calm_time);
    peak = std::max(peak, static_cast<double>(busy.served) /
                              absl::ToDoubleSeconds(calm_time));
  }
  ASSERT_GT(peak, 0);

  const double cpu_seconds = CpuSeconds(RUSAGE_SELF);
  const Outcomes::Summary load =
      kind == Load::kASecond ? generator.OpenLoop(10 * peak, load_time)
                             : generator.ClosedLoop(10 * kTransfers, load_time);
  Print("ten times as many", load, load_time);
  std::printf("[          ] the generator took %.1f%% of a core\n",
              100 * (CpuSeconds(RUSAGE_SELF) - cpu_seconds) /
                  absl::ToDoubleSeconds(load_time));
}

// `count` tensors, `at_once` of which are under way at a time.
void OverloadWith(const v1::QuantizeRequest& tensor, Load kind, int count,
                  int at_once) {
  TemporaryDirectory directory;
  ServerProcess server(
      ConfinedQuantd(directory), directory.File("encodings.db"),
      {"--threads", absl::StrCat(kThreads), "--memory-budget-bytes", "256MiB",
       "--log-level", "warning"});
  Generator generator(server, tensor);
  const auto expect_all_served_one_at_a_time = [&] {
    constexpr int kCalm = 3;
    const Outcomes::Summary calm = generator.SendAll(kCalm, /*at_once=*/1);
    EXPECT_EQ(calm.served, kCalm) << calm.last_failure;
  };
  expect_all_served_one_at_a_time();
  if (const int seconds = FigureSeconds(); seconds > 0) {
    PrintFigures(generator, kind, absl::Seconds(seconds));
  }
  const Outcomes::Summary load = generator.SendAll(count, at_once);
  std::printf("[          ] %lld of %d served\n",
              static_cast<long long>(load.served), count);
  EXPECT_EQ(load.failed, 0) << load.last_failure;
  EXPECT_EQ(load.served + load.refused, count);
  EXPECT_GT(load.served, 0);
  if (load.refused > 0) {
    EXPECT_GT(load.least_retry_after, absl::ZeroDuration());
  }
  if (kind == Load::kASecond) {
    // Each takes long to compute, and next to nothing to send.
    EXPECT_GT(load.refused, load.served);
    EXPECT_GT(load.most_retry_after, 1.5 * load.least_retry_after);
  }
  // And all is as before.
  expect_all_served_one_at_a_time();
  EXPECT_EQ(server.Terminate(), 0);
}

TEST(OverloadTest, TurnsAwayWhatItCanNotCompute) {
  constexpr int kBurst = 200;
  OverloadWith(HardTensor(), Load::kASecond, kBurst, kBurst);
}

TEST(OverloadTest, LosesNothingThatItCanNotTransfer) {
  OverloadWith(LargeTensor(), Load::kAtOnce, /*count=*/400, 10 * kTransfers);
}

}  // namespace
}  // namespace quantd::testing::overload_test
