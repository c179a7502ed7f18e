#include "client/jobs/selection.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/files/dtype.h"
#include "client/files/safetensors.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd::jobs {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A file with a.weight and b.weight of two dimensions, a.bias of one, and
// a.index of integers.
class SelectionTest : public ::testing::Test {
 protected:
  SelectionTest() {
    const std::string path = directory_.File("m.safetensors");
    auto writer =
        files::SafetensorsWriter::Create(path, files::IfExists::kRefuse);
    const std::vector<uint8_t> data(16);
    const auto add = [&](const std::string& name, files::Dtype dtype,
                         const std::vector<int64_t>& shape) {
      EXPECT_TRUE(writer->Add(name, dtype, shape, data).ok());
    };
    add("a.weight", files::Dtype::kF32, {2, 2});
    add("b.weight", files::Dtype::kF32, {2, 2});
    add("a.bias", files::Dtype::kF32, {4});
    add("a.index", files::Dtype::kI32, {2, 2});
    EXPECT_TRUE(writer->Finish().ok());
    input_ = std::make_unique<TensorInput>(*TensorInput::Open(path));
  }

  std::vector<std::string> Select(const SpecSet* specs = nullptr) {
    const auto tensors = SelectTensors({input_.get()}, filter_, specs);
    error_ = std::string(tensors.status().message());
    std::vector<std::string> names;
    if (!tensors.ok()) return names;
    for (const files::FileTensor* const tensor : *tensors) {
      names.push_back(tensor->name);
    }
    return names;
  }

  static SpecSet Specs(const std::vector<std::string>& texts) {
    SpecSet set;
    bool has_base = false;
    for (const std::string& text : texts) {
      EXPECT_TRUE(AddSpec(text, &set, &has_base).ok()) << text;
    }
    set.has_base = has_base;
    return set;
  }

  const testing::TemporaryDirectory directory_;
  std::unique_ptr<TensorInput> input_;
  TensorFilter filter_;
  std::string error_;
};

TEST_F(SelectionTest, TakesWhatTheFilterTakes) {
  EXPECT_THAT(Select(), ElementsAre("a.weight", "b.weight"));
  filter_.all = true;
  EXPECT_THAT(Select(), ElementsAre("a.weight", "b.weight", "a.bias"));
  filter_.exclude = {"a.*"};
  EXPECT_THAT(Select(), ElementsAre("b.weight"));
}

TEST_F(SelectionTest, APatternHasToTakeSomething) {
  filter_.include = {"c.*"};
  EXPECT_THAT(Select(), ElementsAre());
  EXPECT_THAT(error_, HasSubstr("for --include \"c.*\", got none among 4"));
  filter_.include = {"*.bias"};
  Select();
  EXPECT_THAT(error_, HasSubstr("got 1, none of them of floats with at least "
                                "2 dimensions; --all takes"));
  filter_.include = {};
  filter_.exclude = {"c.*"};
  Select();
  EXPECT_THAT(error_, HasSubstr("for --exclude \"c.*\""));
}

TEST_F(SelectionTest, SaysThatNothingIsLeft) {
  filter_.exclude = {"*.weight"};
  Select();
  EXPECT_THAT(error_, HasSubstr("expected tensors of floats with at least 2 "
                                "dimensions, got none among 4"));
}

TEST_F(SelectionTest, ATensorWithoutASpecIsLeftOut) {
  const SpecSet specs = Specs({"a.*=int4"});
  EXPECT_THAT(Select(&specs), ElementsAre("a.weight"));
  const SpecSet with_base = Specs({"int8", "a.*=int4"});
  EXPECT_THAT(Select(&with_base), ElementsAre("a.weight", "b.weight"));
}

TEST_F(SelectionTest, ASpecThatNothingReachesIsAnError) {
  SpecSet specs = Specs({"int8", "*.weight=int4", "a.*=int2"});
  Select(&specs);
  EXPECT_THAT(error_, HasSubstr("--spec \"a.*\", got none: earlier patterns "
                                "take all 1 that it matches"));
  specs = Specs({"int8", "*.index=int4"});
  Select(&specs);
  EXPECT_THAT(error_, HasSubstr("--spec \"*.index\", got 1, which other"));
}

}  // namespace
}  // namespace quantd::jobs
