#include "client/models/model_importance.h"

#include <string>
#include <vector>

#include "client/cpp/tensor.h"
#include "client/models/spec_syntax.h"
#include "gtest/gtest.h"

namespace quantd {
namespace {

EncodingSpec ImportanceSpec(const char* text) {
  return *ParseSpec(text)->SpecOf({8, 64});
}

EncodingSpec Applied(const ModelImportance& importance, const char* tensor,
                     const char* text) {
  EncodingSpec spec = ImportanceSpec(text);
  importance.Apply(tensor, &spec);
  return spec;
}

TEST(ModelImportanceTest, GivesSearchesTheWeightsOfTheirTensor) {
  ModelImportance importance;
  importance.SetWeights("a.weight", {1, 2.5});
  for (const char* const text : {"int4:mse", "int4:sqnr",
                                 "int4:best-of=mse,"
                                 "minmax"}) {
    const EncodingSpec spec = Applied(importance, "a.weight", text);
    EXPECT_EQ(std::vector<double>(spec.importance().weight().begin(),
                                  spec.importance().weight().end()),
              (std::vector<double>{1, 2.5}))
        << text;
    EXPECT_FALSE(spec.importance().has_inputs());
    EXPECT_FALSE(Applied(importance, "b.weight", text).has_importance());
  }
  EXPECT_FALSE(Applied(importance, "a.weight", "int4").has_importance());
  EXPECT_EQ(importance.WeightsOf("a.weight").size(), 2U);
  EXPECT_TRUE(importance.WeightsOf("b.weight").empty());
}

TEST(ModelImportanceTest, NamesStoredInputsInFull) {
  ModelImportance importance;
  importance.SetSource("net", "calibrated");
  importance.SetInputs("k.weight", "q.input");
  const auto inputs_of = [&](const char* tensor, const char* text) {
    const EncodingSpec spec = Applied(importance, tensor, text);
    const v1::TensorName& inputs = spec.importance().inputs();
    return inputs.model() + "@" + inputs.revision() + " " + inputs.tensor();
  };
  EXPECT_EQ(inputs_of("k.weight", "int4:mse:importance:importance-axis=1"),
            "net@calibrated q.input");
  EXPECT_EQ(
      Applied(importance, "k.weight", "int4:mse:importance:importance-axis=1")
          .importance()
          .axis(),
      1);
  // So does what a spec says in full.
  EXPECT_EQ(inputs_of("k.weight",
                      R"({"spec": {"format": 4, "importance": {"inputs": {
                          "model": "m", "revision": "r", "tensor": "t"}}}})"),
            "m@r t");
  EXPECT_EQ(Applied(importance, "k.weight",
                    R"({"spec": {"importance": {"weight": [3]}}})")
                .importance()
                .weight(0),
            3);
  // What a spec names stays.
  EXPECT_EQ(inputs_of("k.weight", "int4:mse:importance=other"),
            "net@calibrated other");
  // Without inputs there is no importance, and no spec gets one by itself.
  EXPECT_FALSE(
      Applied(importance, "v.weight", "int4:mse:importance").has_importance());
  EXPECT_FALSE(Applied(importance, "k.weight", "int4:mse").has_importance());
}

}  // namespace
}  // namespace quantd
