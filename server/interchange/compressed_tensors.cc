#include "server/interchange/compressed_tensors.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

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
  // Of weights: how the codes lie in the safetensors.
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

class CompressedTensorsWriter final : public EncodingsWriter {
 public:
  void Begin(int, std::string*) override {}

  void Add(int, const std::string& tensor, const core::Encoding& encoding,
           std::string*, std::vector<InterchangeLoss>* losses) override {
    const size_t dot = tensor.rfind('.');
    const absl::string_view role =
        dot == std::string::npos ? "" : absl::string_view(tensor).substr(dot);
    const char* const key = role == ".weight"   ? "weights"
                            : role == ".input"  ? "input_activations"
                            : role == ".output" ? "output_activations"
                                                : nullptr;
    if (key == nullptr) {
      losses->push_back({tensor,
                         "not named as the weight, the input or the output of "
                         "a module",
                         true});
      return;
    }
    absl::StatusOr<Scheme> scheme = SchemeOf(encoding);
    if (!scheme.ok()) {
      losses->push_back(
          {tensor, std::string(core::ErrorText(scheme.status())), true});
      return;
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
    Json& module = modules_[tensor.substr(0, dot)];
    module[key] = std::move(scheme->arguments);
    if (role == ".weight") module["format"] = scheme->format;
    ++encoding_count_;
  }

  void Finish(std::string* out) override {
    // Modules by scheme; schemes in order of their first module.
    std::map<std::string, size_t> index;
    std::vector<std::pair<Json, std::vector<std::string>>> groups;
    std::set<std::string> formats;
    for (const auto& [module, scheme] : modules_) {
      const auto [found, is_new] = index.emplace(scheme.dump(), groups.size());
      if (is_new) groups.push_back({scheme, {}});
      groups[found->second].second.push_back(module);
      if (scheme.contains("format")) formats.insert(scheme["format"]);
    }
    Json config_groups = Json::object();
    for (size_t i = 0; i < groups.size(); ++i) {
      Json group = {{"weights", nullptr},
                    {"input_activations", nullptr},
                    {"output_activations", nullptr}};
      group.update(groups[i].first);
      group["targets"] = groups[i].second;
      config_groups[absl::StrCat("group_", i)] = std::move(group);
    }
    const std::string format = formats.empty()       ? "dense"
                               : formats.size() == 1 ? *formats.begin()
                                                     : "mixed-precision";
    const Json document = {{"quantization_config",
                            {{"quant_method", "compressed-tensors"},
                             {"quantization_status", "compressed"},
                             {"format", format},
                             {"global_compression_ratio", nullptr},
                             {"kv_cache_scheme", nullptr},
                             {"ignore", Json::array()},
                             {"config_groups", std::move(config_groups)}}}};
    absl::StrAppend(
        out, document.dump(2, ' ', false, Json::error_handler_t::replace),
        "\n");
  }

 private:
  // In order of name.
  std::map<std::string, Json> modules_;
};

}  // namespace

std::unique_ptr<EncodingsWriter> NewCompressedTensorsWriter() {
  return std::make_unique<CompressedTensorsWriter>();
}

}  // namespace quantd::server
