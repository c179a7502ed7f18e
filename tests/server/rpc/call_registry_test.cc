#include "server/rpc/call_registry.h"

#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/guard/limits.h"

namespace quantd::server {
namespace {

using ::testing::_;

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
  CallRegistry registry;
  MockCall* const calls[] = {new MockCall, new MockCall};
  for (MockCall* call : calls) {
    EXPECT_CALL(*call, EndIfOverdue(_));
    EXPECT_CALL(*call, LookAfterMemory());
    EXPECT_CALL(*call, Drain());
    EXPECT_CALL(*call, EndNow());
    registry.Enter(call);
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
  CallRegistry registry;
  auto* const call = new MockCall;
  EXPECT_CALL(*call, Drain()).Times(0);
  registry.Enter(call);
  registry.Leave(call);
  registry.Drain();
}

TEST(CallRegistryTest, IsNotEmptyWhileACallIsBeingDeleted) {
  CallRegistry registry;
  EXPECT_TRUE(registry.WaitUntilEmpty(absl::ZeroDuration()));
  absl::Notification begun;
  absl::Notification go;
  auto* const call = new SlowlyDeletedCall(&begun, &go);
  EXPECT_CALL(*call, LookAfterMemory()).Times(0);
  registry.Enter(call);
  EXPECT_FALSE(registry.WaitUntilEmpty(absl::ZeroDuration()));
  std::thread leaving([&] { registry.Leave(call); });
  begun.WaitForNotification();
  EXPECT_FALSE(registry.WaitUntilEmpty(absl::ZeroDuration()));
  // Nobody waits for it with the mutex held.
  registry.LookAfterMemory();
  go.Notify();
  EXPECT_TRUE(registry.WaitUntilEmpty(absl::Seconds(20)));
  leaving.join();
}

TEST(CallRegistryTest, WaitsUntilNoCallComes) {
  CallRegistry registry;
  auto* const call = new MockCall;
  registry.Enter(call);
  const absl::Duration start = core::SteadyNow();
  registry.WaitUntilQuiet(absl::Milliseconds(20), absl::Seconds(20));
  EXPECT_GE(core::SteadyNow() - start, absl::Milliseconds(20));
  registry.WaitUntilQuiet(absl::InfiniteDuration(), absl::Milliseconds(1));
  registry.Leave(call);
}

}  // namespace
}  // namespace quantd::server
