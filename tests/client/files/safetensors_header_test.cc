#include "client/files/safetensors_header.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/files/dtype.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace quantd::files {
namespace {

using Json = nlohmann::json;

// The JSON of a header, if its length is that of what follows.
std::string TextOf(const std::string& header) {
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) {
    length = length << 8 | static_cast<uint8_t>(header[static_cast<size_t>(i)]);
  }
  EXPECT_EQ(length, header.size() - 8);
  EXPECT_EQ(header.size() % 8, 0u);
  return header.substr(8);
}

TEST(SafetensorsHeaderTest, TensorsLieOneBehindTheOther) {
  const absl::StatusOr<std::string> header =
      SafetensorsHeader("x",
                        {{"b", Dtype::kF16, {2, 3}, 12},
                         {"a", Dtype::kU8, {}, 1},
                         {"none", Dtype::kF32, {0}, 0}},
                        {{"key", "value"}}, 0);
  ASSERT_TRUE(header.ok());
  EXPECT_EQ(Json::parse(TextOf(*header)), Json::parse(R"({
      "__metadata__": {"key": "value"},
      "b": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]},
      "a": {"dtype": "U8", "shape": [], "data_offsets": [12, 13]},
      "none": {"dtype": "F32", "shape": [0], "data_offsets": [13, 13]}})"));
  // In the order of the data, as others read them.
  EXPECT_LT(header->find("\"b\""), header->find("\"a\""));
}

TEST(SafetensorsHeaderTest, HasNoMetadataUnlessThereAreSome) {
  EXPECT_EQ(TextOf(*SafetensorsHeader("x", {}, {}, 0)), "{}      ");
}

TEST(SafetensorsHeaderTest, FillsTheRoomWithSpaces) {
  const std::vector<SafetensorsEntry> entries = {{"a", Dtype::kU8, {1}, 1}};
  const std::string tight = *SafetensorsHeader("x", entries, {}, 0);
  for (const uint64_t room : {1, 8, 64, 65, 71, 72, 1000}) {
    const std::string header = *SafetensorsHeader("x", entries, {}, room);
    EXPECT_GE(header.size(), room);
    EXPECT_LT(header.size(), std::max<uint64_t>(room, tight.size()) + 8);
    EXPECT_EQ(Json::parse(TextOf(header)), Json::parse(TextOf(tight)));
  }
}

TEST(SafetensorsHeaderTest, ReplacesWhatIsNotUtf8) {
  const std::string header =
      *SafetensorsHeader("x", {{"\xFF", Dtype::kU8, {1}, 1}}, {}, 0);
  EXPECT_TRUE(Json::parse(TextOf(header)).contains("\xEF\xBF\xBD"));
}

}  // namespace
}  // namespace quantd::files
