#include "client/models/llama_names.h"

#include "gtest/gtest.h"

namespace quantd {
namespace {

TEST(LlamaNamesTest, KnowsWhatLlamaHas) {
  EXPECT_EQ(LlamaName("model.layers.0.self_attn.q_proj.weight"),
            "blk.0.attn_q.weight");
  EXPECT_EQ(LlamaName("model.layers.31.self_attn.o_proj.weight"),
            "blk.31.attn_output.weight");
  EXPECT_EQ(LlamaName("model.layers.12.mlp.gate_proj.weight"),
            "blk.12.ffn_gate.weight");
  EXPECT_EQ(LlamaName("model.layers.12.mlp.down_proj.weight"),
            "blk.12.ffn_down.weight");
  EXPECT_EQ(LlamaName("lm_head.weight"), "output.weight");
}

TEST(LlamaNamesTest, LeavesOtherNamesAlone) {
  for (const char* const name :
       {"", "weight", ".weight", "blk.0.attn_q.weight", "model.layers.0.weight",
        "model.layers..self_attn.q_proj.weight",
        "model.layers.x.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias", "model.layers.0.",
        "model.layers.0.mlp.experts.1.up_proj.weight",
        "encoder.layers.0.self_attn.q_proj.weight"}) {
    EXPECT_EQ(LlamaName(name), "") << name;
  }
}

}  // namespace
}  // namespace quantd
