#include "client/cli/output_options.h"

#include "absl/status/status.h"
#include "client/cli/session.h"
#include "client/jobs/output.h"
#include "gtest/gtest.h"

namespace quantd::cli {
namespace {

TEST(OutputOptionsTest, DataOnStandardOutputKeepOtherTextOffIt) {
  Session session;
  // Text may go to a terminal, too.
  const jobs::OutputOptions output{"-", false};
  EXPECT_FALSE(session.stdout_is_data);
  EXPECT_TRUE(CheckOutputFile(output, {}, ".json", &session).ok());
  EXPECT_TRUE(session.stdout_is_data);
}

}  // namespace
}  // namespace quantd::cli
