#include "server/rpc/call_registry.h"

#include <cstdint>
#include <deque>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "core/parallel/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/guard/limits.h"

namespace quantd::server {
namespace {

using ::testing::_;
using ::testing::HasSubstr;
using Kind = CallRegistry::Kind;

constexpr int64_t kLimit = 32;
constexpr core::ThreadPool::Group kCaller = 1;

class MockCall : public WatchedCall {
 public:
  MOCK_METHOD(void, EndIfOverdue, (const Limits&), (override));
  MOCK_METHOD(void, LookAfterMemory, (), (override));
  MOCK_METHOD(void, Drain, (), (override));
  MOCK_METHOD(void, EndNow, (), (override));
};

// Its end takes until it is told to go.
class SlowlyDeletedCall final : public MockCall {
 public:
  SlowlyDeletedCall(absl::Notification* begun, absl::Notification* go)
      : begun_(begun), go_(go) {}
  ~SlowlyDeletedCall() override {
    begun_->Notify();
    go_->WaitForNotification();
  }

 private:
  absl::Notification* const begun_;
  absl::Notification* const go_;
};

TEST(CallRegistryTest, HandsEverythingOnToEveryCall) {
  CallRegistry registry(kLimit);
  MockCall* const calls[] = {new MockCall, new MockCall};
  for (MockCall* call : calls) {
    EXPECT_CALL(*call, EndIfOverdue(_));
    EXPECT_CALL(*call, LookAfterMemory());
    EXPECT_CALL(*call, Drain());
    EXPECT_CALL(*call, EndNow());
    EXPECT_TRUE(registry.Enter(call, kCaller, Kind::kCall).ok());
  }
  registry.EndOverdue(Limits());
  registry.LookAfterMemory();
  EXPECT_FALSE(registry.draining());
  registry.Drain();
  EXPECT_TRUE(registry.draining());
  registry.EndAll();
  for (MockCall* call : calls) registry.Leave(call);
}

TEST(CallRegistryTest, ForgetsACallThatLeft) {
  CallRegistry registry(kLimit);
  auto* const call = new MockCall;
  EXPECT_CALL(*call, Drain()).Times(0);
  EXPECT_TRUE(registry.Enter(call, kCaller, Kind::kCall).ok());
  registry.Leave(call);
  registry.Drain();
}

TEST(CallRegistryTest, IsNotEmptyWhileACallIsBeingDeleted) {
  CallRegistry registry(kLimit);
  EXPECT_TRUE(registry.WaitUntilEmpty(absl::ZeroDuration()));
  absl::Notification begun;
  absl::Notification go;
  auto* const call = new SlowlyDeletedCall(&begun, &go);
  EXPECT_CALL(*call, LookAfterMemory()).Times(0);
  EXPECT_TRUE(registry.Enter(call, kCaller, Kind::kCall).ok());
  EXPECT_FALSE(registry.WaitUntilEmpty(absl::ZeroDuration()));
  std::thread leaving([&] { registry.Leave(call); });
  begun.WaitForNotification();
  EXPECT_FALSE(registry.WaitUntilEmpty(absl::ZeroDuration()));
  // Nobody waits for it with the mutex held.
  registry.LookAfterMemory();
  go.Notify();
  EXPECT_TRUE(registry.WaitUntilEmpty(absl::Seconds(120)));
  leaving.join();
}

TEST(CallRegistryTest, TellsWhenTheLastCallCame) {
  CallRegistry registry(kLimit);
  EXPECT_EQ(registry.last_arrival(), -absl::InfiniteDuration());
  auto* const call = new MockCall;
  const absl::Duration before = core::SteadyNow();
  EXPECT_TRUE(registry.Enter(call, kCaller, Kind::kCall).ok());
  const absl::Duration arrival = registry.last_arrival();
  EXPECT_GE(arrival, before);
  EXPECT_LE(arrival, core::SteadyNow());
  registry.Leave(call);
  EXPECT_EQ(registry.last_arrival(), arrival);
}

// Calls that are open, for as long as this is.
class OpenCalls {
 public:
  explicit OpenCalls(CallRegistry* registry) : registry_(registry) {}
  ~OpenCalls() {
    while (!calls_.empty()) LeaveOne();
  }

  absl::Status Enter(core::ThreadPool::Group caller, Kind kind) {
    calls_.push_back(new ::testing::NiceMock<MockCall>);
    return registry_->Enter(calls_.back(), caller, kind);
  }
  // How many are taken of that many.
  int Enter(core::ThreadPool::Group caller, Kind kind, int count) {
    int taken = 0;
    for (int i = 0; i < count; ++i) taken += Enter(caller, kind).ok() ? 1 : 0;
    return taken;
  }
  // The first of those that are there.
  void LeaveOne() {
    registry_->Leave(calls_.front());
    calls_.pop_front();
  }

 private:
  CallRegistry* const registry_;
  std::deque<WatchedCall*> calls_;
};

TEST(CallRegistryTest, TakesNoMoreCallsThanMayBeOpen) {
  CallRegistry registry(kLimit);
  OpenCalls calls(&registry);
  EXPECT_EQ(calls.Enter(1, Kind::kCall, kLimit), kLimit / 2);
  const absl::Status own = calls.Enter(1, Kind::kCall);
  EXPECT_EQ(own.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(core::ErrorReason(own), "CALL_LIMIT");
  EXPECT_THAT(std::string(own.message()), HasSubstr("16 calls of this caller"));
  EXPECT_GT(core::ErrorRetryAfter(own), absl::ZeroDuration());
  EXPECT_EQ(calls.Enter(2, Kind::kCall, kLimit / 2 - 1), kLimit / 2 - 1);
  EXPECT_EQ(calls.Enter(3, Kind::kCall, 2), 1);
  const absl::Status all = calls.Enter(4, Kind::kCall);
  EXPECT_EQ(core::ErrorReason(all), "CALL_LIMIT");
  EXPECT_THAT(std::string(all.message()), HasSubstr("32 calls are open"));
}

TEST(CallRegistryTest, TakesAnotherCallWhenOneHasGone) {
  CallRegistry registry(kLimit);
  OpenCalls calls(&registry);
  EXPECT_EQ(calls.Enter(1, Kind::kCall, kLimit / 2), kLimit / 2);
  calls.LeaveOne();
  EXPECT_EQ(calls.Enter(1, Kind::kCall, 2), 1);
  // Those that were refused leave nothing behind.
  for (int i = 0; i < kLimit / 2 + 1; ++i) calls.LeaveOne();
  EXPECT_EQ(calls.Enter(1, Kind::kCall, kLimit), kLimit / 2);
}

TEST(CallRegistryTest, LooksAfterACallThatIsRefused) {
  CallRegistry registry(kLimit);
  OpenCalls calls(&registry);
  EXPECT_EQ(calls.Enter(kCaller, Kind::kCall, kLimit / 2), kLimit / 2);
  auto* const call = new MockCall;
  EXPECT_CALL(*call, EndNow());
  EXPECT_FALSE(registry.Enter(call, kCaller, Kind::kCall).ok());
  registry.EndAll();
  registry.Leave(call);
}

TEST(CallRegistryTest, HasRoomOfItsOwnForThoseThatWatchTheHealth) {
  CallRegistry registry(kLimit);
  OpenCalls calls(&registry);
  EXPECT_EQ(calls.Enter(1, Kind::kWatch, kLimit), kLimit / 16);
  EXPECT_EQ(calls.Enter(2, Kind::kWatch, kLimit), kLimit / 16);
  EXPECT_EQ(calls.Enter(3, Kind::kWatch, kLimit), 0);
  EXPECT_EQ(calls.Enter(1, Kind::kCall, kLimit), kLimit / 2);
  EXPECT_EQ(calls.Enter(2, Kind::kCall, kLimit), kLimit / 2);
}

}  // namespace
}  // namespace quantd::server
