// A streaming RPC whose tensors do what a test says, and an environment to run
// it in without a server.

#ifndef QUANTD_TESTS_SUPPORT_FAKE_TENSOR_RPC_H_
#define QUANTD_TESTS_SUPPORT_FAKE_TENSOR_RPC_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/parallel/thread_pool.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/guard/admission.h"
#include "server/guard/caller_share.h"
#include "server/guard/memory_budget.h"
#include "server/metrics/metrics.h"
#include "server/rpc/caller.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_job.h"
#include "server/wire/chunk_writer.h"
#include "server/wire/rpcs.h"

namespace quantd::testing {

// What a tensor does.
struct FakeTensor {
  server::TensorFrame frame{/*begin_bytes=*/0, /*end_bytes=*/8,
                            /*unit_bytes=*/4, /*granule_bytes=*/4,
                            /*quantum_bytes=*/8};
  bool light = false;
  server::StoreUse resolve_use = server::StoreUse::kNone;
  // Of each call of Finish.
  std::vector<server::StoreUse> finish_use = {server::StoreUse::kNone};
  bool finish_is_long = false;
  absl::Duration search_time;
  absl::Duration feed_search_time;
  // That Resolve finds, if it does.
  absl::Duration resolved_feed_search_time;
  bool feed_only_searches = true;
  // What the calls answer; Check answers for the whole job.
  absl::Status check;
  absl::Status resolve;
  absl::Status push_scales;
  absl::Status reserve;
  absl::Status feed;
  absl::Status finish;
  // Called with each of them.
  std::function<void()> on_push_scales = [] {};
};

// Answers Quantize with the bytes that came, and notes the calls of its jobs.
class FakeTensorRpc final : public server::TensorRpc {
 public:
  server::Rpc id() const override { return server::Rpc::kQuantize; }

  absl::StatusOr<std::unique_ptr<server::TensorJob>> Check(
      const std::string& header, const server::Caller& caller) override {
    headers.push_back(header);
    if (!tensor.check.ok()) return tensor.check;
    return std::make_unique<Job>(this, tensor);
  }

  // Of the next tensor; a job looks at the errors each time.
  FakeTensor tensor;
  std::vector<std::string> headers;
  std::vector<std::string> calls;
  // Bytes of each call of Feed.
  std::vector<size_t> fed;
  // The answer to the last quantum; valid until the next.
  absl::Span<const uint8_t> made;

 private:
  class Job final : public server::TensorJob {
   public:
    Job(FakeTensorRpc* rpc, const FakeTensor& tensor) : rpc_(rpc) {
      frame_ = tensor.frame;
      search_time_ = tensor.search_time;
      feed_search_time_ = tensor.feed_search_time;
      feed_only_searches_ = tensor.feed_only_searches;
    }
    ~Job() override { rpc_->calls.push_back("gone"); }

    server::StoreUse ResolveUse() const override {
      return rpc_->tensor.resolve_use;
    }
    server::StoreUse FinishUse() const override {
      return rpc_->tensor.finish_use[finished_];
    }
    bool FinishIsLong() const override { return rpc_->tensor.finish_is_long; }
    bool light() const override { return rpc_->tensor.light; }

    absl::Status Resolve(server::ChunkWriter* out) override {
      rpc_->calls.push_back("resolve");
      if (!rpc_->tensor.resolve.ok()) return rpc_->tensor.resolve;
      if (rpc_->tensor.resolved_feed_search_time > absl::ZeroDuration()) {
        feed_search_time_ = rpc_->tensor.resolved_feed_search_time;
      }
      out->SetHeader(v1::QuantizeResponseHeader());
      return absl::OkStatus();
    }
    absl::Status PushScales(absl::Span<const std::string> scales) override {
      rpc_->calls.push_back(absl::StrCat("scales ", scales.size()));
      rpc_->tensor.on_push_scales();
      return rpc_->tensor.push_scales;
    }
    absl::Status Reserve(int64_t bytes) override {
      return rpc_->tensor.reserve;
    }
    void BeginQuantum(int64_t offset_bytes, int64_t bytes,
                      server::ChunkWriter* out) override {
      rpc_->calls.push_back(absl::StrCat("quantum ", offset_bytes, "+", bytes));
      begin_bytes_ = offset_bytes;
      data_ = out->AddData(offset_bytes, bytes);
      rpc_->made = {data_, static_cast<size_t>(bytes)};
    }
    absl::Status Feed(int64_t offset_bytes,
                      absl::Span<const uint8_t> data) override {
      rpc_->fed.push_back(data.size());
      std::copy(data.begin(), data.end(), data_ + offset_bytes - begin_bytes_);
      return rpc_->tensor.feed;
    }
    absl::StatusOr<bool> Finish(server::ChunkWriter* out) override {
      rpc_->calls.push_back("finish");
      if (!rpc_->tensor.finish.ok()) return rpc_->tensor.finish;
      if (++finished_ < rpc_->tensor.finish_use.size()) return false;
      --finished_;
      out->SetSummary(v1::QuantizeSummary());
      return true;
    }

   private:
    FakeTensorRpc* const rpc_;
    size_t finished_ = 0;
    int64_t begin_bytes_ = 0;
    uint8_t* data_ = nullptr;
  };
};

// What handlers work with, for one caller.
class FakeEnvironment {
 public:
  FakeEnvironment() {
    env.authenticator = &authenticator;
    env.metrics = &metrics;
    env.budget = &budget;
    env.pool = &pool;
    env.store_pool = &store_pool;
    env.write_pool = &write_pool;
    env.long_write_pool = &long_write_pool;
    env.statistics_pool = &statistics_pool;
    env.long_pool = &long_pool;
  }

  static constexpr absl::Duration kQueueDelay = absl::Milliseconds(100);

  server::Metrics metrics;
  server::MemoryBudget budget{int64_t{1} << 20};
  core::ThreadPool pool{1};
  core::ThreadPool store_pool{1};
  core::ThreadPool write_pool{1};
  core::ThreadPool long_write_pool{1};
  core::ThreadPool statistics_pool{1};
  core::ThreadPool long_pool{1};
  server::Authenticator authenticator{nullptr, nullptr, nullptr,
                                      nullptr, nullptr, &metrics};
  server::Admission::OpenTensors open_tensors{16};
  const std::shared_ptr<server::CallerShare> share =
      std::make_shared<server::CallerShare>(/*group=*/1, /*threads=*/1,
                                            kQueueDelay, &open_tensors);
  server::RpcEnvironment env{};
};

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_FAKE_TENSOR_RPC_H_
