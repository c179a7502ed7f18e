"""Folders that vLLM runs, and what compressed-tensors takes of their config.json."""

import json

import numpy as np

import quantd

# What compressed-tensors' classes have, and what each field can be.
STATIC = {"symmetric": True, "dynamic": False}
ARGUMENTS = {
    "num_bits": int, "type": ("int", "float"), "symmetric": bool,
    "group_size": (int, type(None)),
    "strategy": ("tensor", "channel", "group", "block", "token",
                 "tensor_group", "attn_head"),
    "block_structure": (list, type(None)), "dynamic": (bool, "local"),
    "actorder": (type(None), "group", "weight"),
    "scale_dtype": (type(None), "torch.uint8", "torch.float8_e4m3fn"),
    "zp_dtype": (type(None), "torch.int8"), "observer": (type(None), "minmax"),
    "observer_kwargs": dict}
GROUP = {"targets", "weights", "input_activations", "output_activations",
         "format"}
CONFIG = {"config_groups", "quant_method", "kv_cache_scheme", "format",
          "quantization_status", "global_compression_ratio", "ignore"}
FORMATS = {"int-quantized", "float-quantized", "pack-quantized",
           "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"}

# Its presets, without what has the default value.
INT8_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token",
              "symmetric": True, "dynamic": True}
FP8_TOKEN = {**INT8_TOKEN, "type": "float"}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group",
       "group_size": 16, **STATIC}
MX = {"type": "float", "strategy": "group", "group_size": 32, **STATIC}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128,
        **STATIC}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", **STATIC}
SCHEMES = {
    "W8A8": ("int-quantized", {
        "num_bits": 8, "type": "int", "strategy": "channel", **STATIC},
        INT8_TOKEN),
    "FP8": ("float-quantized", FP8, FP8),
    "FP8_DYNAMIC": ("float-quantized", {**FP8, "strategy": "channel"},
                    FP8_TOKEN),
    "FP8_BLOCK": ("float-quantized", {
        **FP8, "strategy": "block", "block_structure": [128, 128]},
        {**FP8_TOKEN, "strategy": "group", "group_size": 128}),
    "NVFP4": ("nvfp4-pack-quantized", FP4, {**FP4, "dynamic": "local"}),
    "NVFP4A16": ("nvfp4-pack-quantized", FP4, None),
    "MXFP4": ("mxfp4-pack-quantized", {**MX, "num_bits": 4},
              {**MX, "num_bits": 4, "dynamic": True}),
    "MXFP4A16": ("mxfp4-pack-quantized", {**MX, "num_bits": 4}, None),
    "MXFP8": ("mxfp8-quantized", {**MX, "num_bits": 8},
              {**MX, "num_bits": 8, "dynamic": True}),
    "MXFP8A16": ("mxfp8-quantized", {**MX, "num_bits": 8}, None),
    "W4A16": ("pack-quantized", INT4, None),
    "W4A16_ASYM": ("pack-quantized", {**INT4, "symmetric": False}, None),
    "W8A16": ("pack-quantized", {**INT4, "num_bits": 8}, None),
    "W4AFP8": ("pack-quantized", INT4, FP8_TOKEN)}


def fits(value, allowed):
    return any(isinstance(value, one) if isinstance(one, type)
               else value == one and isinstance(value, str)
               for one in (allowed if isinstance(allowed, tuple)
                           else (allowed,)))


def check_arguments(arguments):
    if arguments is None:
        return
    for key, value in arguments.items():
        assert fits(value, ARGUMENTS[key]), (key, value)
    strategy = arguments["strategy"]
    assert ("group_size" in arguments) == (strategy in ("group",
                                                        "tensor_group"))
    assert ("block_structure" in arguments) == (strategy == "block")
    if strategy == "token":
        assert arguments["dynamic"] is True
    if arguments["dynamic"] is True:
        assert strategy in ("token", "tensor", "group")
        assert arguments["observer"] is None
    assert arguments["dynamic"] != "local" or strategy == "tensor_group"


def check_config(folder):
    """Against what compressed-tensors takes."""
    with open(folder / "config.json", encoding="utf-8") as file:
        config = json.load(file)["quantization_config"]
    assert config.keys() == CONFIG
    assert config["quant_method"] == "compressed-tensors"
    assert config["quantization_status"] == "compressed"
    check_arguments(config["kv_cache_scheme"])
    for group in config["config_groups"].values():
        assert group.keys() <= GROUP
        assert group["format"] in FORMATS
        assert group["output_activations"] is None
        check_arguments(group["weights"])
        check_arguments(group["input_activations"])
        inputs = group["input_activations"]
        assert inputs is None or inputs["strategy"] in (
            "token", "tensor", "group", "tensor_group")
    formats = {group["format"] for group in config["config_groups"].values()}
    assert config["format"] == (formats.pop() if len(formats) == 1
                                else "mixed-precision")
    return config


def write_shards(folder, shards):
    """The two files of a model, their index and a configuration."""
    paths = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for path, tensors in zip(paths, shards):
        quantd.save(folder / path, tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({
        "metadata": {}, "weight_map": {
            name: path for path, tensors in zip(paths, shards)
            for name in tensors}}))
    (folder / "config.json").write_text('{"model_type": "test"}')
    return folder


def write_attention(folder, names=("q_proj", "k_proj", "v_proj"), norms=(),
                    more=()):
    """A layer in two shards."""
    folder.mkdir()
    rng = np.random.default_rng(2)
    shards = [{f"layers.0.attn.{name}.weight": rng.standard_normal(
        (32, 64), np.float32) for name in names},
        {**{f"layers.0.attn.{name}.weight": np.ones(32, np.float32)
            for name in norms},
         "layers.0.mlp.up.weight": rng.standard_normal((32, 64), np.float32),
         **{name: np.ones(3, np.float32) for name in more}}]
    return write_shards(folder, shards)


EXPERTS = "model.layers.0.mlp.experts"


def write_experts(folder, layout):
    """A layer of 3 experts in two shards: "apart" as matrices, otherwise in
    two tensors, "rows" as [experts, out, in]."""
    folder.mkdir()
    rng = np.random.default_rng(3)
    gate_up = rng.standard_normal((3, 256, 384), np.float32)
    gate_up[1, 128:] *= 8
    gate_up = gate_up.astype(np.float16)
    down = rng.standard_normal((3, 384, 128), np.float32)
    shards = [{f"{EXPERTS}.gate_up_proj": gate_up},
              {f"{EXPERTS}.down_proj": down,
               "model.layers.0.mlp.gate.weight": np.ones((3, 384), np.float32),
               "model.norm.weight": np.ones(384, np.float32)}]
    if layout == "columns":
        for shard in shards:
            shard.update({name: np.ascontiguousarray(array.swapaxes(1, 2))
                          for name, array in shard.items()
                          if array.ndim == 3})
    elif layout == "apart":
        del shards[0][f"{EXPERTS}.gate_up_proj"]
        del shards[1][f"{EXPERTS}.down_proj"]
        for n in range(3):
            shards[0][f"{EXPERTS}.{n}.gate_proj.weight"] = gate_up[n, :128]
            shards[0][f"{EXPERTS}.{n}.up_proj.weight"] = gate_up[n, 128:]
            shards[1][f"{EXPERTS}.{n}.down_proj.weight"] = down[n]
    return write_shards(folder, shards)


def write_modules(folder, shapes, dtype=np.float32):
    folder.mkdir()
    rng = np.random.default_rng(1)
    quantd.save(folder / "model.safetensors", {
        name + ".weight": rng.standard_normal(shape, np.float32).astype(dtype)
        for name, shape in shapes.items()})
    (folder / "config.json").write_text('{"model_type": "test"}')
    return folder
