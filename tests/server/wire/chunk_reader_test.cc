#include "server/wire/chunk_reader.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "gtest/gtest.h"

namespace quantd::server::chunk_reader_test {
namespace {

std::vector<uint8_t> RandomBytes(int64_t size, std::mt19937_64& random) {
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// A chunk of tensor[begin, end) in pieces of up to `most_piece` bytes, empty
// ones among them.
RequestEnvelope Chunk(absl::Span<const uint8_t> tensor, int64_t begin,
                      int64_t end, int64_t most_piece,
                      std::mt19937_64& random) {
  RequestEnvelope chunk;
  chunk.offset_bytes = begin;
  chunk.data_bytes = end - begin;
  while (begin < end) {
    const int64_t size = std::min<int64_t>(
        end - begin, static_cast<int64_t>(random() % (most_piece + 1)));
    chunk.data.push_back(tensor.subspan(begin, size));
    begin += size;
  }
  return chunk;
}

RequestEnvelope Chunk(absl::Span<const uint8_t> tensor, int64_t begin,
                      int64_t end) {
  RequestEnvelope chunk;
  chunk.offset_bytes = begin;
  chunk.data_bytes = end - begin;
  chunk.data.push_back(tensor.subspan(begin, end - begin));
  return chunk;
}

// Takes all that is ready in portions of up to `quantum` bytes and retains the
// rest; it is appended to `out`, which starts at `begin`.
void TakeAll(ChunkReader& reader, int64_t quantum, int64_t granule,
             int64_t begin, int64_t end, std::vector<uint8_t>* out) {
  while (reader.ready_bytes() > 0) {
    const int64_t bytes = std::min(reader.ready_bytes(), quantum);
    const int64_t stop_bytes = reader.position_bytes() + bytes;
    while (reader.position_bytes() < stop_bytes) {
      const int64_t offset = reader.position_bytes();
      ASSERT_EQ(offset, begin + static_cast<int64_t>(out->size()));
      const absl::Span<const uint8_t> data = reader.Next(stop_bytes - offset);
      ASSERT_FALSE(data.empty());
      const int64_t stop = offset + static_cast<int64_t>(data.size());
      EXPECT_TRUE(stop % granule == 0 || stop == end) << stop;
      out->insert(out->end(), data.begin(), data.end());
    }
    EXPECT_EQ(reader.position_bytes(),
              begin + static_cast<int64_t>(out->size()));
  }
  reader.Retain();
}

TEST(ChunkReaderTest, GivesTheSameBytesWhereverChunksAndPiecesAreCut) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 3000; ++round) {
    const int64_t unit = int64_t{1} << random() % 4;
    const int64_t granule = unit * (1 + random() % 20);
    const int64_t begin = granule * (random() % 4);
    // The last granule is short more often than not.
    const int64_t end = begin + unit * (1 + random() % 300);
    const int64_t quantum = granule * (1 + random() % 10);
    const int64_t most_chunk = 1 + random() % 100;
    const int64_t most_piece = 1 + random() % 50;
    const std::vector<uint8_t> tensor = RandomBytes(end, random);
    ChunkReader reader(begin, end, unit, granule, unit * most_chunk);
    std::vector<uint8_t> out;
    for (int64_t at = begin; at < end;) {
      EXPECT_EQ(core::ErrorReason(reader.CheckComplete()), "TENSOR_INCOMPLETE");
      EXPECT_FALSE(reader.complete());
      // Now and then a chunk of nothing.
      const int64_t size =
          std::min<int64_t>(end - at, unit * (random() % (most_chunk + 1)));
      ASSERT_TRUE(
          reader.Push(Chunk(tensor, at, at + size, most_piece, random)).ok());
      ASSERT_NO_FATAL_FAILURE(
          TakeAll(reader, quantum, granule, begin, end, &out));
      at += size;
    }
    EXPECT_TRUE(reader.complete());
    EXPECT_TRUE(reader.CheckComplete().ok());
    ASSERT_EQ(out, std::vector<uint8_t>(tensor.begin() + begin, tensor.end()));
  }
}

TEST(ChunkReaderTest, GivesInPlaceWhatDoesNotStraddle) {
  std::mt19937_64 random(2);
  const std::vector<uint8_t> tensor = RandomBytes(64, random);
  ChunkReader reader(0, 64, 4, 8, 64);
  ASSERT_TRUE(reader.Push(Chunk(tensor, 0, 20)).ok());
  EXPECT_EQ(reader.ready_bytes(), 16);
  const absl::Span<const uint8_t> whole = reader.Next(16);
  EXPECT_EQ(whole.data(), tensor.data());
  EXPECT_EQ(whole.size(), 16u);
  reader.Retain();
  // 4 bytes were kept: one granule is put together, the rest is in place.
  ASSERT_TRUE(reader.Push(Chunk(tensor, 20, 40)).ok());
  const absl::Span<const uint8_t> joined = reader.Next(24);
  EXPECT_EQ(joined, absl::MakeSpan(tensor).subspan(16, 8));
  const absl::Span<const uint8_t> rest = reader.Next(16);
  EXPECT_EQ(rest.data(), tensor.data() + 24);
  EXPECT_EQ(rest.size(), 16u);
  EXPECT_EQ(reader.ready_bytes(), 0);
}

TEST(ChunkReaderTest, HoldsBackAGranuleThatIsNotWhole) {
  std::mt19937_64 random(3);
  const std::vector<uint8_t> tensor = RandomBytes(20, random);
  ChunkReader reader(0, 20, 4, 16, 64);
  ASSERT_TRUE(reader.Push(Chunk(tensor, 0, 12)).ok());
  EXPECT_EQ(reader.ready_bytes(), 0);
  reader.Retain();
  ASSERT_TRUE(reader.Push(Chunk(tensor, 12, 20)).ok());
  // With the last byte the short granule at the end is ready too.
  EXPECT_EQ(reader.ready_bytes(), 20);
  std::vector<uint8_t> out;
  TakeAll(reader, 16, 16, 0, 20, &out);
  EXPECT_EQ(out, tensor);
}

TEST(ChunkReaderTest, AnEmptyTensorIsCompleteFromTheStart) {
  ChunkReader reader(0, 0, 4, 4, 64);
  EXPECT_TRUE(reader.complete());
  EXPECT_TRUE(reader.CheckComplete().ok());
  EXPECT_EQ(reader.ready_bytes(), 0);
}

struct ErrorCase {
  const char* reason;
  int64_t offset;
  int64_t size;
};

TEST(ChunkReaderTest, NamesWhatIsWrongWithAChunk) {
  // The tensor is bytes [16, 48) of elements of 4; 8 of them have come.
  const std::vector<ErrorCase> cases = {
      {"", 24, 8},
      {"", 24, 24},
      // A chunk of nothing has no place to be wrong about.
      {"", 0, 0},
      {"CHUNK_OFFSET", 28, 4},  // gap
      {"CHUNK_OFFSET", 20, 8},  // overlap
      {"CHUNK_OFFSET", 0, 8},
      {"CHUNK_OFFSET", -8, 8},  // 2^64 - 8
      {"TENSOR_TOO_LONG", 24, 28},
      {"TENSOR_TOO_LONG", 24, 25},
      {"CHUNK_ALIGNMENT", 24, 7},
      {"CHUNK_ALIGNMENT", 24, 1},
      {"CHUNK_TOO_LARGE", 24, 36},
      // The size comes first: offset and end don't matter any more.
      {"CHUNK_TOO_LARGE", 0, 33},
  };
  std::mt19937_64 random(5);
  const std::vector<uint8_t> tensor = RandomBytes(128, random);
  for (const ErrorCase& c : cases) {
    ChunkReader reader(16, 48, 4, 4, 32);
    ASSERT_TRUE(reader.Push(Chunk(tensor, 16, 24)).ok());
    std::vector<uint8_t> out;
    TakeAll(reader, 32, 4, 16, 48, &out);
    RequestEnvelope chunk = Chunk(tensor, 0, c.size);
    chunk.offset_bytes = static_cast<uint64_t>(c.offset);
    EXPECT_EQ(core::ErrorReason(reader.Push(chunk)), c.reason)
        << c.offset << " " << c.size;
  }
}

}  // namespace
}  // namespace quantd::server::chunk_reader_test
