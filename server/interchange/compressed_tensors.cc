#include "server/interchange/compressed_tensors.h"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/types/encoding.h"
#include "server/interchange/entry_format.h"
#include "server/interchange/json_text.h"

namespace quantd::server {
namespace {

constexpr int kMaxPackedBits = 8;
constexpr int64_t kNvfp4Group = 16;
constexpr int64_t kMxfp4Group = 32;

// How a tensor is quantized, as the configuration says it.
struct Scheme {
  Json arguments;
  // For weights: how the codes lie in the safetensors.
  std::string format;
};

// Adds the strategy: which elements share a scale.
absl::Status AddStrategy(const core::Encoding& encoding, Json* arguments) {
  std::vector<size_t> split;
  for (size_t d = 0; d < encoding.block_size.size(); ++d) {
    if (!IsWhole(encoding, d)) split.push_back(d);
  }
  Json& json = *arguments;
  if (encoding.scale.size() == 1) {
    json["strategy"] = "tensor";
    return absl::OkStatus();
  }
  if (split.size() == 1 && split[0] == 0 && encoding.block_size[0] == 1) {
    json["strategy"] = "channel";
    return absl::OkStatus();
  }
  if (encoding.block_size.size() == 2) {
    const int64_t rows = encoding.block_size[0];
    const int64_t columns = encoding.block_size[1];
    if (rows == 1 && columns > 0) {
      json["strategy"] = "group";
      json["group_size"] = columns;
      return absl::OkStatus();
    }
    if (rows > 1 && columns > 1) {
      json["strategy"] = "block";
      json["block_structure"] = {rows, columns};
      return absl::OkStatus();
    }
  }
  return core::InterchangeUnsupportedError(
      "compressed-tensors has scales per tensor, per row, and of matrices in "
      "groups along rows or in blocks");
}

absl::StatusOr<Scheme> SchemeOf(const core::Encoding& encoding) {
  const core::FormatInfo& info = *core::FindFormat(encoding.format);
  Scheme scheme;
  Json& json = scheme.arguments;
  json = {{"num_bits", info.bits},
          {"symmetric", IsSymmetric(encoding)},
          {"dynamic", false},
          {"observer", "minmax"}};
  if (info.name == "nvfp4" || info.name == "mxfp4_e2m1") {
    const bool is_nvfp4 = info.name == "nvfp4";
    if (encoding.block_size.size() != 2 || encoding.block_size[0] != 1 ||
        encoding.block_size[1] != (is_nvfp4 ? kNvfp4Group : kMxfp4Group) ||
        encoding.outer_scale.size() > 1) {
      return core::InterchangeUnsupportedError(absl::StrCat(
          "compressed-tensors has ", info.name, " of matrices in groups of ",
          is_nvfp4 ? kNvfp4Group : kMxfp4Group));
    }
    json["type"] = "float";
    json["strategy"] = is_nvfp4 ? "tensor_group" : "group";
    json["group_size"] = is_nvfp4 ? kNvfp4Group : kMxfp4Group;
    scheme.format = is_nvfp4 ? "nvfp4-pack-quantized" : "mxfp4-pack-quantized";
    return scheme;
  }
  if (absl::Status s = AddStrategy(encoding, &json); !s.ok()) return s;
  if (info.name == "float8_e4m3fn") {
    json["type"] = "float";
    scheme.format = "float-quantized";
    return scheme;
  }
  absl::Status status = CheckIsInteger(encoding, "compressed-tensors");
  if (!status.ok()) return status;
  status = CheckZeroPointsAreCodes(encoding, "compressed-tensors");
  if (!status.ok()) return status;
  if (info.bits > kMaxPackedBits) {
    return core::InterchangeUnsupportedError(
        absl::StrCat("compressed-tensors has integers of at most ",
                     kMaxPackedBits, " bits, got ", info.bits));
  }
  json["type"] = "int";
  scheme.format =
      info.bits == kMaxPackedBits ? "int-quantized" : "pack-quantized";
  return scheme;
}

// In order of the keys of a group.
enum Role { kWeight, kInput, kOutput, kRoleCount };
constexpr const char* kRoleKeys[] = {"weights", "input_activations",
                                     "output_activations"};
constexpr absl::string_view kRoleNames[] = {".weight", ".input", ".output"};

// How the tensors of a module are quantized: indices of texts, -1 for none.
struct Module {
  int roles[kRoleCount] = {-1, -1, -1};
  int format = -1;

  friend bool operator<(const Module& a, const Module& b) {
    return std::tie(a.roles[kWeight], a.roles[kInput], a.roles[kOutput],
                    a.format) < std::tie(b.roles[kWeight], b.roles[kInput],
                                         b.roles[kOutput], b.format);
  }
};

class CompressedTensorsWriter final : public EncodingsWriter {
 public:
  void Begin(int, std::string*) override {}

  absl::Status Add(int, const std::string& tensor,
                   const core::Encoding& encoding, core::StopToken,
                   std::string*,
                   std::vector<InterchangeLoss>* losses) override {
    const size_t dot = tensor.rfind('.');
    const absl::string_view suffix =
        dot == std::string::npos ? "" : absl::string_view(tensor).substr(dot);
    const auto role = static_cast<size_t>(absl::c_find(kRoleNames, suffix) -
                                          std::begin(kRoleNames));
    if (role == kRoleCount) {
      losses->push_back({tensor,
                         "not named as the weight, the input or the output of "
                         "a module",
                         true});
      return absl::OkStatus();
    }
    absl::StatusOr<Scheme> scheme = SchemeOf(encoding);
    if (!scheme.ok()) {
      losses->push_back(
          {tensor, std::string(core::ErrorText(scheme.status())), true});
      return absl::OkStatus();
    }
    losses->push_back(
        {tensor, "scale and zero_point: those are in the safetensors", false});
    const core::FormatInfo& info = *core::FindFormat(encoding.format);
    if (info.kind == core::CodeKind::kInteger &&
        (encoding.qmin != info.qmin || encoding.qmax != info.qmax)) {
      losses->push_back(
          {tensor,
           absl::StrCat("qmin and qmax: the codes are all of the type, ",
                        info.qmin, " to ", info.qmax),
           false});
    }
    if (encoding.no_saturation) {
      losses->push_back({tensor, "no_saturation", false});
    }
    Module& module = ModuleOf(tensor.substr(0, dot));
    module.roles[role] = TextIndex(DumpJson(scheme->arguments));
    if (role == kWeight) module.format = TextIndex(scheme->format);
    ++encoding_count_;
    return absl::OkStatus();
  }

  absl::Status Finish(core::StopToken stop, std::string* out) override {
    // Indices of groups by scheme; groups are in order of their first module.
    std::map<Module, size_t> group_index;
    std::vector<Group> groups;
    std::set<int> formats;
    for (const auto& [name, module] : modules_) {
      if (stop.stopped()) return core::StoppedError();
      const auto [found, is_new] = group_index.emplace(module, groups.size());
      if (is_new) groups.push_back({module, {}});
      groups[found->second].modules.push_back(&name);
      if (module.format >= 0) formats.insert(module.format);
    }
    absl::StrAppend(out,
                    "{\n  \"quantization_config\": {\n"
                    "    \"quant_method\": \"compressed-tensors\",\n"
                    "    \"quantization_status\": \"compressed\",\n"
                    "    \"format\": \"",
                    formats.size() > 1 ? "mixed-precision"
                    : formats.empty()  ? "dense"
                                       : *text_of_[*formats.begin()],
                    "\",\n    \"global_compression_ratio\": null,\n"
                    "    \"kv_cache_scheme\": null,\n"
                    "    \"ignore\": [],\n    \"config_groups\": {");
    for (size_t i = 0; i < groups.size(); ++i) {
      const Module& scheme = groups[i].scheme;
      absl::StrAppend(out, i == 0 ? "" : ",", "\n      \"group_", i, "\": {\n");
      if (scheme.format >= 0) {
        absl::StrAppend(out, "        \"format\": \"", *text_of_[scheme.format],
                        "\",\n");
      }
      for (int role = 0; role < kRoleCount; ++role) {
        const int text = scheme.roles[role];
        absl::StrAppend(out, "        \"", kRoleKeys[role],
                        "\": ", text < 0 ? "null" : *text_of_[text], ",\n");
      }
      absl::StrAppend(out, "        \"targets\": [");
      bool is_first = true;
      for (const std::string* module : groups[i].modules) {
        if (stop.stopped()) return core::StoppedError();
        absl::StrAppend(out, is_first ? "" : ",", "\n          ",
                        DumpJson(Json(*module)));
        is_first = false;
      }
      absl::StrAppend(out, "\n        ]\n      }");
    }
    absl::StrAppend(out, groups.empty() ? "" : "\n    ", "}\n  }\n}\n");
    return absl::OkStatus();
  }

  int64_t memory_per_scale() const override { return 0; }
  int64_t memory_bytes() const override { return memory_bytes_; }

 private:
  struct Group {
    Module scheme;
    // Their names.
    std::vector<const std::string*> modules;
  };

  // Memory of a module or a text beside its bytes, in all that refers to it.
  static constexpr int64_t kModuleBytes = 400;
  static constexpr int64_t kTextBytes = 160;

  Module& ModuleOf(std::string name) {
    const auto size = static_cast<int64_t>(name.size());
    const auto [found, is_new] = modules_.emplace(std::move(name), Module());
    if (is_new) memory_bytes_ += kModuleBytes + size;
    return found->second;
  }

  int TextIndex(const std::string& text) {
    const auto [found, is_new] =
        texts_.emplace(text, static_cast<int>(text_of_.size()));
    if (is_new) {
      memory_bytes_ += kTextBytes + static_cast<int64_t>(text.size());
      text_of_.push_back(&found->first);
    }
    return found->second;
  }

  // In order of name.
  std::map<std::string, Module> modules_;
  // Arguments of schemes, and formats, each once.
  std::map<std::string, int> texts_;
  std::vector<const std::string*> text_of_;
  int64_t memory_bytes_ = 0;
};

}  // namespace

std::unique_ptr<EncodingsWriter> NewCompressedTensorsWriter() {
  return std::make_unique<CompressedTensorsWriter>();
}

}  // namespace quantd::server
