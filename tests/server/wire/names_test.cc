#include "server/wire/names.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "core/errors.h"
#include "gtest/gtest.h"

namespace quantd::server {
namespace {

struct NameCase {
  std::string name;
  bool valid;
};

void ExpectVerdict(const NameCase& c, const absl::Status& status) {
  EXPECT_EQ(status.ok(), c.valid) << absl::CHexEscape(c.name) << status;
  if (status.ok()) return;
  EXPECT_EQ(core::ErrorReason(status), "NAME_INVALID");
  // A bad name is shown, but never more of it than tells it apart.
  EXPECT_LT(status.message().size(), 700u);
}

TEST(CheckPathNameTest, TakesTheAlphabetAndNoWayOutOfAFolder) {
  const std::vector<NameCase> cases = {
      {"a", true},
      {"acme/resnet50", true},
      {"A.b_c-d/9", true},
      {"-", true},
      {".", true},
      {"a/.b", true},
      {"a//b", true},
      {"a/", true},
      {std::string(256, 'x'), true},
      {"", false},
      {std::string(257, 'x'), false},
      {std::string(1 << 20, 'x'), false},
      {"/", false},
      {"/etc/passwd", false},
      {"..", false},
      {"../x", false},
      {"a/../b", false},
      {"a//../b", false},
      {"a..b", false},
      {"a/..", false},
      {"a b", false},
      {" a", false},
      {"a\n", false},
      {"a\\b", false},
      {"a:b", false},
      {"a%2e", false},
      {"a~", false},
      {"a*", false},
      {"caf\xc3\xa9", false},
      {"\xff", false},
      {std::string("a\0b", 3), false},
      {std::string("a\0", 2), false},
  };
  for (const NameCase& c : cases) {
    ExpectVerdict(c, CheckPathName("model", c.name));
  }
}

TEST(CheckPathNameTest, NamesTheKindInTheError) {
  EXPECT_TRUE(absl::StrContains(CheckPathName("revision", "").message(),
                                "revision is empty"));
}

TEST(CheckTensorNameTest, TakesUtf8WithoutControlCharacters) {
  const std::vector<NameCase> cases = {
      {"conv1.weight", true},
      {"../../etc", true},
      {"/layer 1:0", true},
      {"caf\xc3\xa9", true},
      {"\xe6\xbc\xa2", true},
      {"\xf0\x9f\x98\x80", true},
      {"\xf4\x8f\xbf\xbf", true},  // U+10FFFF
      {"\xc2\xa0", true},          // U+00A0
      {"\xed\x9f\xbf", true},      // U+D7FF
      {"\xee\x80\x80", true},      // U+E000
      {std::string(1024, 'x'), true},
      {"", false},
      {std::string(1025, 'x'), false},
      {std::string("a\0b", 3), false},
      {"a\nb", false},
      {"\t", false},
      {"\x1f", false},
      {"\x7f", false},
      {"\xc2\x80", false},          // U+0080, C1
      {"\xc2\x9f", false},          // U+009F, C1
      {"\x80", false},              // continuation
      {"\xc0\x80", false},          // overlong
      {"\xc1\xbf", false},          // overlong
      {"\xe0\x9f\xbf", false},      // overlong
      {"\xf0\x8f\xbf\xbf", false},  // overlong
      {"\xed\xa0\x80", false},      // surrogate
      {"\xf4\x90\x80\x80", false},  // above U+10FFFF
      {"\xf5\x80\x80\x80", false},
      {"\xff", false},
      {"a\xc3", false},  // cut off
      {"\xe6\xbc", false},
      {"\xf0\x9f\x98", false},
      {"\xe6\x28\xa2", false},
  };
  for (const NameCase& c : cases) ExpectVerdict(c, CheckTensorName(c.name));
}

v1::TensorName Name(const std::string& model, const std::string& revision,
                    const std::string& tensor) {
  v1::TensorName name;
  name.set_model(model);
  name.set_revision(revision);
  name.set_tensor(tensor);
  return name;
}

TEST(KeyFromProtoTest, AnEmptyRevisionIsMain) {
  absl::StatusOr<EncodingKey> key = KeyFromProto(Name("m", "", "t"));
  ASSERT_TRUE(key.ok()) << key.status();
  EXPECT_EQ(*key, (EncodingKey{"m", "main", "t"}));
  key = KeyFromProto(Name("m", "r/2", "t"));
  ASSERT_TRUE(key.ok()) << key.status();
  EXPECT_EQ(*key, (EncodingKey{"m", "r/2", "t"}));
}

TEST(KeyFromProtoTest, NamesTheFieldAtFault) {
  EXPECT_EQ(core::ErrorField(KeyFromProto(Name("", "r", "t")).status()),
            "model");
  EXPECT_EQ(core::ErrorField(KeyFromProto(Name("m", "/r", "t")).status()),
            "revision");
  EXPECT_EQ(core::ErrorField(KeyFromProto(Name("m", "", "")).status()),
            "tensor");
}

TEST(CheckOptionalNameTest, TakesNothingButNothingWrong) {
  EXPECT_TRUE(CheckOptionalName(Name("", "", "")).ok());
  EXPECT_TRUE(CheckOptionalName(Name("", "", "t")).ok());
  EXPECT_TRUE(CheckOptionalName(Name("m", "r", "t")).ok());
  EXPECT_EQ(core::ErrorField(CheckOptionalName(Name("..", "", ""))), "model");
  EXPECT_EQ(core::ErrorField(CheckOptionalName(Name("", "a b", ""))),
            "revision");
  EXPECT_EQ(core::ErrorField(CheckOptionalName(Name("", "", "\n"))), "tensor");
}

}  // namespace
}  // namespace quantd::server
