#include "client/cli/interchange.h"

#include <string>
#include <vector>

#include "client/cli/session.h"
#include "client/cpp/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd::cli {
namespace {

using ::testing::HasSubstr;

TEST(InterchangeFormatTest, EveryFormatOfTheProtoHasAName) {
  const auto* const formats = v1::InterchangeFormat_descriptor();
  EXPECT_EQ(InterchangeFormatNames().size(),
            static_cast<size_t>(formats->value_count() - 1));
  for (int i = 0; i < formats->value_count(); ++i) {
    const auto format =
        static_cast<v1::InterchangeFormat>(formats->value(i)->number());
    const auto parsed = ParseInterchangeFormat(InterchangeFormatName(format));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, format);
  }
  EXPECT_EQ(*ParseInterchangeFormat("auto"),
            v1::INTERCHANGE_FORMAT_UNSPECIFIED);
}

TEST(InterchangeFormatTest, OtherNamesAreErrorsThatSayWhichThereAre) {
  for (const char* name : {"", "JSON", "aimet", "json "}) {
    const auto parsed = ParseInterchangeFormat(name);
    EXPECT_EQ(ErrorReason(parsed.status()), "ARGUMENT_INVALID") << name;
    EXPECT_THAT(std::string(parsed.status().message()),
                HasSubstr("json, aimet-0.6.1"));
  }
}

std::vector<v1::InterchangeLoss> Losses() {
  std::vector<v1::InterchangeLoss> losses(2);
  losses[0].set_tensor("a");
  losses[0].set_what("qmin");
  losses[1].set_tensor("b\x1b");
  losses[1].set_what("nf4");
  losses[1].set_left_out(true);
  return losses;
}

TEST(LossesTest, TellWhatIsLeftOut) {
  EXPECT_EQ(LossesJson({}), Json::array());
  EXPECT_EQ(LossesJson(Losses())[1]["left_out"], true);
  EXPECT_EQ(LossesJson(Losses())[0]["what"], "qmin");
  EXPECT_TRUE(AnyLeftOut(Losses()));
  EXPECT_FALSE(AnyLeftOut({Losses()[0]}));
}

TEST(LossesTest, ArePrintedSafelyAndWhatIsLeftOutAlways) {
  Session session;
  ::testing::internal::CaptureStderr();
  PrintLosses(Losses(), session);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "quantctl: tensor a: not kept: qmin\n"
            "quantctl: tensor b\\x1b: left out: nf4\n");
  session.quiet = true;
  ::testing::internal::CaptureStderr();
  PrintLosses(Losses(), session);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "quantctl: tensor b\\x1b: left out: nf4\n");
}

}  // namespace
}  // namespace quantd::cli
