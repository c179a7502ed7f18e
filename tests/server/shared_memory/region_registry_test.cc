#include "server/shared_memory/region_registry.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "gtest/gtest.h"
#include "server/guard/memory_budget.h"
#include "server/metrics/metrics.h"
#include "server/net/file_descriptor.h"
#include "server/shared_memory/peer_process.h"
#include "server/shared_memory/region.h"

namespace quantd::server {
namespace {

class RegionRegistryTest : public ::testing::Test {
 protected:
  RegionRegistryTest() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    here_ = FileDescriptor(ends[0]);
    there_ = FileDescriptor(ends[1]);
  }

  std::shared_ptr<const Region> NewRegion() {
    return Region::Create(4096, &budget_, &metrics_)->region;
  }
  // What a call of this process may name.
  SharedMemoryAccess Access() const {
    return SharedMemoryAccess(&registry_, absl::StrCat("fd:", here_.get()));
  }
  static v1::SharedSpan Span(const Region& region, uint64_t offset,
                             uint64_t size) {
    v1::SharedSpan span;
    span.set_region_id(region.id());
    span.set_offset_bytes(offset);
    span.set_size_bytes(size);
    return span;
  }

  Metrics metrics_;
  MemoryBudget budget_{1 << 20};
  RegionRegistry registry_;
  FileDescriptor here_;
  FileDescriptor there_;
};

TEST_F(RegionRegistryTest, OnlyTheOwnerFindsARegion) {
  const auto region = NewRegion();
  registry_.Add(region, {10, 1000});
  EXPECT_EQ(registry_.Find(region->id(), {10, 1000}), region);
  EXPECT_EQ(registry_.Find(region->id(), {11, 1000}), nullptr);
  EXPECT_EQ(registry_.Find(region->id(), {10, 1001}), nullptr);
  EXPECT_EQ(registry_.Find("", {10, 1000}), nullptr);
  registry_.Remove(*region);
  EXPECT_EQ(registry_.Find(region->id(), {10, 1000}), nullptr);
  registry_.Remove(*region);
}

TEST_F(RegionRegistryTest, WhoUsesARegionKeepsIt) {
  auto region = NewRegion();
  const std::weak_ptr<const Region> watched = region;
  registry_.Add(region, {10, 1000});
  auto used = registry_.Find(region->id(), {10, 1000});
  registry_.Remove(*std::exchange(region, nullptr));
  EXPECT_FALSE(watched.expired());
  used->bytes()[0] = 7;
  used.reset();
  EXPECT_TRUE(watched.expired());
  EXPECT_EQ(budget_.used_bytes(), 0);
}

TEST_F(RegionRegistryTest, ACallNamesWhatItsProcessHas) {
  const auto region = NewRegion();
  registry_.Add(region, {getpid(), getuid()});
  const auto bytes = Access().Find(Span(*region, 8, 100));
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(bytes->bytes.data(), region->bytes().data() + 8);
  EXPECT_EQ(bytes->bytes.size(), 100u);
  EXPECT_TRUE(Access().Find(Span(*region, 4096, 0)).ok());
}

TEST_F(RegionRegistryTest, NoWordTellsThatARegionIsAnothers) {
  const auto region = NewRegion();
  registry_.Add(region, {getpid() + 1, getuid()});
  const absl::Status foreign = Access().Find(Span(*region, 0, 8)).status();
  registry_.Remove(*region);
  EXPECT_EQ(foreign, Access().Find(Span(*region, 0, 8)).status());
  EXPECT_EQ(core::ErrorReason(foreign), "REGION_NOT_FOUND");
  // Nor has a call over TCP any, or one without a registry.
  registry_.Add(region, {getpid(), getuid()});
  EXPECT_FALSE(SharedMemoryAccess(&registry_, "ipv4:127.0.0.1:1")
                   .Find(Span(*region, 0, 8))
                   .ok());
  EXPECT_FALSE(SharedMemoryAccess().Find(Span(*region, 0, 8)).ok());
}

TEST_F(RegionRegistryTest, RefusesSpansThatAreNotWithin) {
  const auto region = NewRegion();
  registry_.Add(region, {getpid(), getuid()});
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  const struct {
    uint64_t offset;
    uint64_t size;
    const char* field;
  } cases[] = {{4, 8, "offset_bytes"},      {0, 4097, "size_bytes"},
               {4088, 9, "size_bytes"},     {4104, 0, "size_bytes"},
               {8, kMost, "size_bytes"},    {kMost - 7, 8, "size_bytes"},
               {kMost - 7, 0, "size_bytes"}};
  for (const auto& c : cases) {
    const absl::Status status =
        Access().Find(Span(*region, c.offset, c.size)).status();
    EXPECT_EQ(core::ErrorReason(status), "REGION_INVALID")
        << c.offset << " " << c.size;
    EXPECT_EQ(core::ErrorField(status), c.field);
  }
}

TEST_F(RegionRegistryTest, TheKernelSaysWhoIsThere) {
  const auto peer = PeerOfSocket(here_.get());
  ASSERT_TRUE(peer.has_value());
  EXPECT_EQ(peer->pid, getpid());
  EXPECT_EQ(peer->uid, getuid());
  const FileDescriptor tcp(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_FALSE(PeerOfSocket(tcp.get()).has_value());
  EXPECT_FALSE(PeerOfCall(absl::StrCat("fd:", tcp.get())).has_value());
  for (const char* name :
       {"", "fd:", "fd:-1", "fd:x", "unix:", "ipv4:127.0.0.1:80"}) {
    EXPECT_FALSE(PeerOfCall(name).has_value()) << name;
  }
  EXPECT_FALSE(PeerOfCall(absl::StrCat("unix:", here_.get())).has_value());
}

}  // namespace
}  // namespace quantd::server
