#include "client/models/element_counter.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/cpp/element_bytes.h"
#include "client/files/dtype.h"
#include "gtest/gtest.h"

namespace quantd {
namespace {

// Bytes that show infinities where they are read out of step, and some that
// are there.
std::vector<uint16_t> Halves() {
  std::vector<uint16_t> halves(1000, 0x007C);
  for (size_t i = 3; i < halves.size(); i += 7) halves[i] = 0x7C00;
  halves.back() = 0xFC00;
  return halves;
}

ElementCounter InfinityCounter() {
  return {sizeof(uint16_t), [](absl::Span<const uint8_t> elements) {
            return files::CountInfinities(files::Dtype::kF16, elements);
          }};
}

TEST(ElementCounterTest, CountsTheSameInPiecesOfAnySize) {
  const std::vector<uint16_t> halves = Halves();
  const absl::Span<const uint8_t> bytes = BytesOf(halves);
  const uint64_t expected = files::CountInfinities(files::Dtype::kF16, bytes);
  ASSERT_EQ(expected, 144);
  for (const size_t size : {1, 2, 3, 5, 64, 333, 1999, 2000}) {
    ElementCounter counter = InfinityCounter();
    for (size_t at = 0; at < bytes.size(); at += size) {
      counter.Add(at, bytes.subspan(at, size));
    }
    EXPECT_EQ(counter.count(), expected) << size;
  }
}

TEST(ElementCounterTest, CountsElementsOfEightBytesOnceByteByByte) {
  const std::vector<uint64_t> doubles = {uint64_t{0x7FF} << 52, 0x7FF0,
                                         uint64_t{0xFFF} << 52};
  const absl::Span<const uint8_t> bytes = BytesOf(doubles);
  ElementCounter counter(
      sizeof(uint64_t), [](absl::Span<const uint8_t> elements) {
        return files::CountInfinities(files::Dtype::kF64, elements);
      });
  for (size_t at = 0; at < bytes.size(); ++at) {
    counter.Add(at, bytes.subspan(at, 1));
  }
  EXPECT_EQ(counter.count(), 2);
}

TEST(ElementCounterTest, CountsOnceWhatComesAgainAfterARetry) {
  const std::vector<uint16_t> halves = Halves();
  const absl::Span<const uint8_t> bytes = BytesOf(halves);
  ElementCounter counter = InfinityCounter();
  // Attempts that begin and end within an element, or where one began before.
  counter.Add(0, bytes.subspan(0, 701));
  counter.Add(0, bytes.subspan(0, 300));
  counter.Add(300, bytes.subspan(300, 633));
  counter.Add(701, bytes.subspan(701, 232));
  counter.Add(933, bytes.subspan(933));
  EXPECT_EQ(counter.count(), files::CountInfinities(files::Dtype::kF16, bytes));
}

}  // namespace
}  // namespace quantd
