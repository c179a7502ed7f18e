#include "client/jobs/spec_options.h"

#include "absl/status/statusor.h"
#include "client/models/spec_syntax.h"
#include "gtest/gtest.h"

namespace quantd::jobs {
namespace {

TEST(SpecOptionsTest, TypesOfGgufAreForThoseThatWriteThem) {
  SpecOptions options;
  options.specs = {"a*=q4_K", "int8"};
  EXPECT_FALSE(options.ParseSet().ok());
  options.takes_gguf_types = true;
  const absl::StatusOr<SpecSet> specs = options.ParseSet();
  ASSERT_TRUE(specs.ok()) << specs.status();
  EXPECT_EQ(specs->For("a")->gguf_type, "q4_K");
  options.specs = {"q5_K"};
  EXPECT_TRUE(options.ParseSet().ok());
  options.takes_gguf_types = false;
  EXPECT_FALSE(options.ParseSet().ok());
}

}  // namespace
}  // namespace quantd::jobs
