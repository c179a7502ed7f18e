"""How llama.cpp calls the weights of a model; as client/models/llama_names.h."""

from __future__ import annotations

import re

_MODULES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    # Gate and up in one.
    "mlp.gate_up_proj": "ffn_up"}


def llama_name(weight: str) -> str:
    """Name in GGUF of a weight that has its usual name in transformers; empty
    for others."""
    if weight == "lm_head.weight":
        return "output.weight"
    found = re.fullmatch(r"model\.layers\.([0-9]+)\.(.*)\.weight", weight)
    module = _MODULES.get(found[2]) if found else None
    return f"blk.{found[1]}.{module}.weight" if found and module else ""
