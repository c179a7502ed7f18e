#include "server/rpc/steps.h"

#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "core/parallel/thread_pool.h"
#include "server/rpc/rpc_environment.h"
#include "tests/support/fake_tensor_rpc.h"

namespace quantd::server {
namespace {

constexpr core::ThreadPool::Group kGroup = 7;
constexpr StepKind kKinds[] = {StepKind::kLight, StepKind::kQuantum,
                               StepKind::kStore, StepKind::kStatistics,
                               StepKind::kWrite, StepKind::kLongWrite,
                               StepKind::kLong};

// What runs on a pool keeps it busy until it is let go.
class StepsTest : public ::testing::Test {
 protected:
  core::ThreadPool* PoolOf(StepKind kind) {
    switch (kind) {
      case StepKind::kStore:
        return &fake_.store_pool;
      case StepKind::kStatistics:
        return &fake_.statistics_pool;
      case StepKind::kWrite:
        return &fake_.write_pool;
      case StepKind::kLongWrite:
        return &fake_.long_write_pool;
      case StepKind::kLong:
        return &fake_.long_pool;
      default:
        return &fake_.pool;
    }
  }

  testing::FakeEnvironment fake_;
};

TEST_F(StepsTest, EachKindHasThreadsOfItsOwn) {
  // A step that has ended may keep its thread for a moment: another group each
  // time.
  core::ThreadPool::Group group = kGroup;
  for (const StepKind kind : kKinds) {
    ++group;
    absl::Notification begun;
    absl::Notification let_go;
    absl::Notification ended;
    {
      const core::ThreadPool::GroupScope scope(group);
      Schedule(fake_.env, kind, [&] {
        begun.Notify();
        let_go.WaitForNotification();
        ended.Notify();
      });
    }
    begun.WaitForNotification();
    for (const StepKind other : kKinds) {
      EXPECT_EQ(PoolOf(other)->BusyThreads(group),
                PoolOf(other) == PoolOf(kind) ? 1 : 0)
          << static_cast<int>(kind) << " " << static_cast<int>(other);
    }
    EXPECT_EQ(ComputingThreads(fake_.env, group), MayWait(kind) ? 0 : 1);
    EXPECT_EQ(ComputingThreads(fake_.env, group + 1), 0);
    let_go.Notify();
    ended.WaitForNotification();
  }
}

TEST_F(StepsTest, AStepRunsInTheGroupOfTheThreadThatSchedulesIt) {
  for (const StepKind kind : kKinds) {
    core::ThreadPool::Group group = 0;
    absl::Notification done;
    {
      const core::ThreadPool::GroupScope scope(kGroup);
      Schedule(fake_.env, kind, [&] {
        group = core::ThreadPool::CurrentGroup();
        done.Notify();
      });
    }
    done.WaitForNotification();
    EXPECT_EQ(group, kGroup) << static_cast<int>(kind);
  }
}

// A kernel must not keep a thread of the store, nor a store a worker.
TEST(MayDoTest, OnlyAWorkerDoesAlsoWhatIsLight) {
  for (const StepKind there : kKinds) {
    for (const StepKind next : kKinds) {
      const bool expected = there == next || (there == StepKind::kQuantum &&
                                              next == StepKind::kLight);
      EXPECT_EQ(MayDo(there, next), expected)
          << static_cast<int>(there) << " " << static_cast<int>(next);
    }
  }
}

}  // namespace
}  // namespace quantd::server
