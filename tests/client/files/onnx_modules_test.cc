#include "client/files/onnx_modules.h"

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/files/onnx_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/onnx_bytes.h"
#include "tests/support/temporary_directory.h"

namespace quantd::files {
namespace {

using quantd::testing::BytesField;
using quantd::testing::OnnxInitializer;
using quantd::testing::OnnxModelOf;

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Matrix(const std::string& name) {
  return OnnxInitializer(name, 1, {1, 1}, BytesField(9, "abcd"));
}

std::string Vector(const std::string& name) {
  return OnnxInitializer(name, 1, {1}, BytesField(9, "abcd"));
}

// A node with a name, as a field of a graph.
std::string NamedNode(const std::string& name, const std::string& op_type,
                      const std::vector<std::string>& inputs,
                      const std::string& output) {
  std::string node;
  for (const std::string& input : inputs) node += BytesField(1, input);
  return BytesField(
      1, absl::StrCat(node, BytesField(2, output), BytesField(3, name),
                      BytesField(4, op_type)));
}

// A product of x and a weight, and the sum with a bias.
std::string Linear(const std::string& folder, const std::string& weight,
                   const std::string& bias, const std::string& output) {
  return absl::StrCat(
      NamedNode(absl::StrCat(folder, "MatMul"), "MatMul", {"x", weight},
                absl::StrCat(output, "_product")),
      NamedNode(absl::StrCat(folder, "Add"), "Add",
                {bias, absl::StrCat(output, "_product")}, output));
}

class OnnxModulesTest : public ::testing::Test {
 protected:
  // The names of what is found.
  std::vector<std::string> Find(const std::string& graph,
                                const std::string& tensor) {
    const absl::StatusOr<OnnxModel> model =
        OnnxModel::Open(directory_.Write("model.onnx", OnnxModelOf(graph)));
    if (!model.ok()) return {model.status().ToString()};
    const OnnxModules modules(*model);
    const auto places = modules.Find(tensor);
    if (!places.ok()) return {places.status().ToString()};
    std::vector<std::string> names;
    for (const OnnxModules::Place& place : *places) names.push_back(place.name);
    return names;
  }

  const testing::TemporaryDirectory directory_;
};

TEST_F(OnnxModulesTest, ABiasTellsTheWeightBesideIt) {
  const std::string graph =
      absl::StrCat(Matrix("onnx::MatMul_1"), Vector("f1.bias"),
                   Linear("/other/", "onnx::MatMul_1", "f1.bias", "a"));
  EXPECT_THAT(Find(graph, "f1.weight"), ElementsAre("onnx::MatMul_1"));
  EXPECT_THAT(Find(graph, "f1.output"), ElementsAre("a"));
}

TEST_F(OnnxModulesTest, ALayerWithoutAnOutputIsNone) {
  const std::string node = absl::StrCat(
      BytesField(1, "x"), BytesField(1, "f1.weight"), BytesField(4, "MatMul"));
  const std::string graph =
      absl::StrCat(Matrix("f1.weight"), BytesField(1, node));
  EXPECT_THAT(Find(graph, "f1.output"), ElementsAre(HasSubstr("NOT_FOUND")));
}

TEST_F(OnnxModulesTest, OfASharedBiasTheNodesTellWhichModuleHasTheWeight) {
  const std::string graph = absl::StrCat(
      Matrix("onnx::MatMul_1"), Matrix("onnx::MatMul_2"), Vector("f2.bias"),
      Linear("/f1/", "onnx::MatMul_1", "f2.bias", "a"),
      Linear("/f2/", "onnx::MatMul_2", "f2.bias", "b"));
  EXPECT_THAT(Find(graph, "f2.weight"), ElementsAre("onnx::MatMul_2"));
  EXPECT_THAT(Find(graph, "f2.output"), ElementsAre("b"));
  EXPECT_THAT(Find(graph, "f1.weight"), ElementsAre("onnx::MatMul_1"));
}

TEST_F(OnnxModulesTest, OfASharedBiasNothingIsGuessed) {
  const std::string weights = absl::StrCat(
      Matrix("onnx::MatMul_1"), Matrix("onnx::MatMul_2"), Vector("f1.bias"));
  // The nodes tell no module, or they tell the same of two weights.
  for (const std::string folder : {"", "/f1/"}) {
    const std::string graph =
        absl::StrCat(weights, Linear(folder, "onnx::MatMul_1", "f1.bias", "a"),
                     Linear(folder, "onnx::MatMul_2", "f1.bias", "b"));
    EXPECT_THAT(Find(graph, "f1.weight"), ElementsAre(HasSubstr("use --map")))
        << folder;
  }
}

// The module runs twice.
TEST_F(OnnxModulesTest, ABiasOfOneWeightMayHaveSeveralLayers) {
  const std::string graph =
      absl::StrCat(Matrix("onnx::MatMul_1"), Vector("f1.bias"),
                   Linear("/one/", "onnx::MatMul_1", "f1.bias", "a"),
                   Linear("/two/", "onnx::MatMul_1", "f1.bias", "b"));
  EXPECT_THAT(Find(graph, "f1.weight"), ElementsAre("onnx::MatMul_1"));
}

}  // namespace
}  // namespace quantd::files
