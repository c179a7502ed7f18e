#include "client/models/llama_names.h"

#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace quantd {
namespace {

struct LlamaModule {
  // Behind the number of the layer.
  absl::string_view module;
  absl::string_view llama;
};

constexpr LlamaModule kLlamaModules[] = {
    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},
    {"self_attn.v_proj", "attn_v"},
    {"self_attn.o_proj", "attn_output"},
    {"self_attn.qkv_proj", "attn_qkv"},
    {"mlp.gate_proj", "ffn_gate"},
    {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"},
    // Gate and up in one.
    {"mlp.gate_up_proj", "ffn_up"},
};

}  // namespace

std::string LlamaName(absl::string_view weight) {
  absl::string_view rest = weight;
  if (!absl::ConsumeSuffix(&rest, ".weight")) return "";
  if (rest == "lm_head") return "output.weight";
  if (!absl::ConsumePrefix(&rest, "model.layers.")) return "";
  size_t digits = 0;
  while (digits < rest.size() &&
         absl::ascii_isdigit(static_cast<unsigned char>(rest[digits]))) {
    ++digits;
  }
  const absl::string_view layer = rest.substr(0, digits);
  rest.remove_prefix(digits);
  if (layer.empty() || !absl::ConsumePrefix(&rest, ".")) return "";
  for (const LlamaModule& row : kLlamaModules) {
    if (rest == row.module) {
      return absl::StrCat("blk.", layer, ".", row.llama, ".weight");
    }
  }
  return "";
}

}  // namespace quantd
