#include "client/jobs/quantize_parts.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "client/files/safetensors.h"
#include "client/jobs/quantize_outcome.h"
#include "client/models/tensor_input.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd::jobs {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(ParsePartTest, ReadsWhatItWrites) {
  for (const char* text : {"0/1", "7/8", "99999/100000"}) {
    const auto part = ParsePart(text);
    ASSERT_TRUE(part.ok()) << text;
    EXPECT_EQ(PartText(*part), text);
  }
  for (const char* text :
       {"", "1", "1/1", "8/8", "-1/8", "0/0", "0/-1", "0/100001", "a/8", "1/b",
        "1/2/3", "/8", "1/", "1.0/8"}) {
    EXPECT_EQ(ErrorReason(ParsePart(text).status()), "ARGUMENT_INVALID")
        << text;
  }
}

class PartsTest : public ::testing::Test {
 protected:
  // A shard whose selected tensors have so many bytes.
  void AddShard(const std::vector<size_t>& sizes) {
    const std::string path = directory_.File(std::to_string(shards_.size()));
    auto writer =
        files::SafetensorsWriter::Create(path, files::IfExists::kReplace);
    const std::vector<uint8_t> bytes(
        sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end()));
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_TRUE(writer
                      ->Add("t" + std::to_string(i), files::Dtype::kU8,
                            {static_cast<int64_t>(sizes[i])},
                            absl::MakeConstSpan(bytes.data(), sizes[i]))
                      .ok());
    }
    EXPECT_TRUE(writer->Finish().ok());
    auto shard = std::make_unique<Shard>(path, *TensorInput::Open(path));
    for (const files::FileTensor& tensor : shard->input.tensors()) {
      shard->selected.push_back(&tensor);
    }
    shards_.push_back(std::move(shard));
  }

  // Bytes by part; checks that each tensor has one part, and that the parts of
  // a shard come in order.
  std::vector<uint64_t> LoadsOf(int64_t part_count) const {
    std::vector<uint64_t> loads(static_cast<size_t>(part_count));
    const auto shares = ShareOut(shards_, part_count);
    EXPECT_EQ(shares.size(), shards_.size());
    for (size_t i = 0; i < shares.size(); ++i) {
      EXPECT_FALSE(shares[i].empty());
      std::vector<const files::FileTensor*> tensors;
      int64_t before = -1;
      for (const Share& share : shares[i]) {
        EXPECT_GT(share.part, before);
        before = share.part;
        EXPECT_LT(share.part, part_count);
        for (const files::FileTensor* const tensor : share.tensors) {
          tensors.push_back(tensor);
          loads[static_cast<size_t>(share.part)] += tensor->data.size();
        }
      }
      EXPECT_EQ(tensors, shards_[i]->selected);
    }
    return loads;
  }

  const testing::TemporaryDirectory directory_;
  std::vector<std::unique_ptr<Shard>> shards_;
};

TEST_F(PartsTest, PartsHaveWholeShardsWhereTheseAreEven) {
  for (int i = 0; i < 4; ++i) AddShard({10, 10});
  EXPECT_THAT(LoadsOf(2), ElementsAre(40, 40));
  EXPECT_THAT(LoadsOf(4), ElementsAre(20, 20, 20, 20));
  for (const auto& shares : ShareOut(shards_, 2)) EXPECT_EQ(shares.size(), 1u);
}

TEST_F(PartsTest, TheLargestShardGoesToThePartWithLeast) {
  AddShard({10});
  AddShard({40});
  AddShard({30});
  EXPECT_THAT(LoadsOf(2), ElementsAre(40, 40));
}

TEST_F(PartsTest, PartsShareAShardThatIsTooLargeForOne) {
  AddShard({10, 10, 10, 10, 10, 10});
  AddShard({10, 10});
  EXPECT_THAT(LoadsOf(4), ElementsAre(20, 20, 20, 20));
  EXPECT_EQ(ShareOut(shards_, 4)[0].size(), 3u);
  // A tensor is not cut.
  EXPECT_THAT(LoadsOf(16),
              ::testing::Each(::testing::AnyOf(uint64_t{0}, uint64_t{10})));
}

TEST_F(PartsTest, AShardWithoutTensorsHasAPartAllTheSame) {
  AddShard({10, 10, 10, 10, 10, 10});
  AddShard({});
  LoadsOf(4);
  shards_.clear();
  AddShard({});
  LoadsOf(3);
}

TEST_F(PartsTest, FindsTheFilesOfParts) {
  AddShard({1});
  Shard& shard = *shards_[0];
  shard.output_path = directory_.File("model.safetensors");
  EXPECT_EQ(PartPath(shard, {1, 12}),
            directory_.File("model.safetensors.part-00001-of-00012"));
  EXPECT_THAT(FindParts(shard), IsEmpty());
  for (const Part& part : {Part{11, 12}, Part{2, 12}, Part{1, 2}}) {
    ASSERT_EQ(std::fclose(std::fopen(PartPath(shard, part).c_str(), "w")), 0);
  }
  for (const char* other :
       {"model.safetensors.part-00002-of-00002", "model.safetensors.part-1",
        "model.safetensors.part-a-of-b", "model.safetensors.part-0-of-200000",
        "model.safetensors.part-0-of-1.x",
        "other.safetensors.part-00000-of-00002", "model.safetensors"}) {
    directory_.Write(other, "");
  }
  std::vector<std::string> found;
  for (const Part& part : FindParts(shard)) found.push_back(PartText(part));
  EXPECT_THAT(found, ElementsAre("1/2", "2/12", "11/12"));
  shard.output_path = directory_.File("missing/model.safetensors");
  EXPECT_THAT(FindParts(shard), IsEmpty());
}

}  // namespace
}  // namespace quantd::jobs
