"""Checkpoints as other programs quantize them, and what they stand for. The writers are
in numpy, follow each format's own description and share nothing with what reads."""

import json
import os
import struct

import numpy as np

import quantd

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
FILE_ERROR = 4


def small_floats(exponent_bits, mantissa_bits, bias):
    values = []
    for code in range(128):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        part = mantissa / (1 << mantissa_bits)
        values.append(part * 2. ** (1 - bias) if not exponent
                      else (1 + part) * 2. ** (exponent - bias))
    values = np.array(values, np.float32)
    return np.concatenate([values, -values])


E4M3 = small_floats(4, 3, 7)
E4M3[[127, 255]] = np.nan
E5M2 = small_floats(5, 2, 15)
E5M2[[124, 252]] = np.inf, -np.inf
E5M2[[125, 126, 127, 253, 254, 255]] = np.nan
NAMES = {np.dtype(np.uint8): "U8", np.dtype(np.int8): "I8",
         np.dtype(np.int32): "I32", np.dtype(np.int64): "I64",
         np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}


class As:
    """An array that a file has under another type."""

    def __init__(self, dtype, array):
        self.dtype, self.array = dtype, array


def bfloat16(array):
    """Those of float32 that have no more bits."""
    return As("BF16", (np.float32(array).view(np.uint32) >> 16)
              .astype(np.uint16))


def write(path, tensors, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, array in tensors.items():
        told = array.dtype if isinstance(array, As) else None
        array = array.array if isinstance(array, As) else np.asarray(array)
        content = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": told or NAMES[array.dtype],
                        "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def write_folder(folder, tensors, config=None, beside=None):
    """In two shards, the scales apart from the codes."""
    os.makedirs(folder)
    shards = {"model-00001-of-00002.safetensors": {},
              "model-00002-of-00002.safetensors": {}}
    names = list(shards)
    for i, (name, tensor) in enumerate(tensors.items()):
        shards[names[i % 2]][name] = tensor
    for name, content in shards.items():
        write(os.path.join(folder, name), content)
    index = {"metadata": {}, "weight_map": {
        tensor: name for name, content in shards.items() for tensor in content}}
    for name, document in {"model.safetensors.index.json": index,
                           "config.json": config, **(beside or {})}.items():
        if document is not None:
            with open(os.path.join(folder, name), "w",
                      encoding="utf-8") as file:
                json.dump(document, file)


def stream(values, bits):
    """Rows of codes as words of 32 bits, one code behind the other, the lowest
    bits first."""
    rows, count = values.shape
    each = (values[..., None].astype(np.uint32) >> np.arange(bits)) & 1
    flat = each.reshape(rows, count * bits).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return np.packbits(flat, axis=1, bitorder="little").view(np.int32)


def nibbles(codes):
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def halves(rng, shape):
    return (rng.integers(1, 2048, shape) / 65536).astype(np.float16)


# Numbers that Python's json has and JSON has not, and strings like them.
NUMBERS = {"time_step_limit": [0.0, float("inf")], "low": -float("inf"),
           "none": float("nan"), "said": '"Infinity", \\NaN', "eps": 1e-05}


def gptq(rng, bits=4, group=32, order=None, v2=False, inputs=96, outputs=64):
    count = -(-inputs // group)
    codes = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = rng.integers(1, 1 << bits, (count, outputs))
    scales = halves(rng, (count, outputs))
    groups = np.arange(inputs) // group
    if order is not None:
        groups = groups[order]
    reals = ((codes - zeros[groups]).astype(np.float32)
             * scales.astype(np.float32)[groups])
    tensors = {
        "a.qweight": np.ascontiguousarray(stream(codes.T, bits).T),
        "a.qzeros": stream(zeros - (0 if v2 else 1), bits),
        "a.scales": scales, "a.g_idx": groups.astype(np.int32)}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group,
              "desc_act": order is not None}
    if v2:
        config["checkpoint_format"] = "gptq_v2"
    return tensors, {"quantization_config": config}, {}, {"a.weight": reals.T}


def awq(rng, bits=4, group=32, inputs=64, outputs=48, symmetric=False):
    order = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    count = inputs // group
    codes = rng.integers(0, 1 << bits, (inputs, outputs))
    zeros = rng.integers(0, 1 << bits, (count, outputs))
    if symmetric:
        zeros[:] = 1 << bits - 1
    scales = halves(rng, (count, outputs))

    def pack(values):
        words = values.reshape(len(values), -1, len(order))[..., order]
        shifts = np.arange(len(order), dtype=np.uint64) * np.uint64(bits)
        return np.bitwise_or.reduce(words.astype(np.uint64) << shifts,
                                    axis=2).astype(np.uint32).view(np.int32)

    each = np.arange(inputs) // group
    reals = ((codes - zeros[each]).astype(np.float32)
             * scales.astype(np.float32)[each])
    tensors = {"a.qweight": pack(codes), "a.qzeros": pack(zeros),
               "a.scales": scales}
    if symmetric:
        del tensors["a.qzeros"]
    config = {"quant_method": "awq", "bits": bits, "group_size": group,
              "zero_point": not symmetric, "version": "gemm"}
    return tensors, {"quantization_config": config}, {}, {"a.weight": reals.T}


def awq_mixed(rng):
    """Without zero points, with other bits than the model."""
    tensors, config, beside, reals = awq(rng, 8, symmetric=True)
    config["quantization_config"].update(bits=4, dynamic={"+:a": {"bits": 8}})
    return tensors, config, beside, reals


def finite_codes(rng, shape, table):
    return rng.choice(np.flatnonzero(np.isfinite(table)), shape).astype(
        np.uint8)


def fp8_blocks(rng, dtype="F8_E4M3", table=E4M3, block=(128, 128)):
    rows, columns = 150, 260
    codes = finite_codes(rng, (rows, columns), table)
    scales = rng.random((-(-rows // block[0]), -(-columns // block[1])),
                        np.float32)
    whole = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)
    reals = table[codes] * whole[:rows, :columns]
    tensors = {"a.weight": As(dtype, codes), "a.weight_scale_inv": scales}
    return tensors, {"quantization_config": {
        "quant_method": "fp8", "weight_block_size": list(block)}}, {}, {
            "a.weight": reals}


def modelopt(algorithm):
    return {"hf_quant_config.json": {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": algorithm, "exclude_modules": []}}}


def modelopt_fp8(rng, per_row=False):
    codes = finite_codes(rng, (40, 24), E4M3)
    scale = rng.random(40 if per_row else (), np.float32)
    reals = E4M3[codes] * (scale[:, None] if per_row else scale)
    tensors = {"a.weight": As("F8_E4M3", codes),
               "a.weight_scale": np.float32(scale),
               "a.input_scale": np.float32(.5)}
    return tensors, None, modelopt("FP8"), {"a.weight": reals}


def fbgemm_fp8(rng):
    tensors, _, _, reals = modelopt_fp8(rng, per_row=True)
    del tensors["a.input_scale"]
    tensors["a.weight_scale"] = tensors["a.weight_scale"][:, None]
    tensors["a.input_scale_ub"] = np.full(1, 1200, np.float32)
    return tensors, {"quantization_config": {"quant_method": "fbgemm_fp8"}}, {
        }, reals


def modelopt_nvfp4(rng):
    codes = rng.integers(0, 16, (24, 64))
    scale = rng.integers(1, 126, (24, 4)).astype(np.uint8)
    outer = np.float32(.0123)
    reals = E2M1[codes] * np.repeat(E4M3[scale] * outer, 16, axis=1)
    tensors = {"a.weight": nibbles(codes),
               "a.weight_scale": As("F8_E4M3", scale),
               "a.weight_scale_2": outer, "a.input_scale": np.float32(.25)}
    return tensors, None, modelopt("NVFP4"), {"a.weight": reals}


def gpt_oss(rng, transposed=True):
    experts, outputs, groups = 3, 20, 2
    codes = rng.integers(0, 16, (experts, outputs, groups, 32))
    scales = rng.integers(110, 140, (experts, outputs, groups)).astype(np.uint8)
    reals = E2M1[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    reals = reals.reshape(experts, outputs, groups * 32).astype(np.float32)
    blocks = nibbles(codes)
    if not transposed:
        return {"a.w.blocks": blocks, "a.w.scales": scales}, None, {}, {
            "a.w": reals}
    return ({"a.gate_up_proj_blocks": blocks, "a.gate_up_proj_scales": scales},
            {"quantization_config": {"quant_method": "mxfp4"}}, {},
            {"a.gate_up_proj": reals.transpose(0, 2, 1)})


def mxfp8(rng, dtype="U8"):
    codes = finite_codes(rng, (10, 80), E4M3)
    scales = rng.integers(100, 150, (10, 3)).astype(np.uint8)
    each = np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=1)
    return {"a.weight": As("F8_E4M3", codes),
            "a.weight_scale": As(dtype, scales)}, None, {
                }, {"a.weight": E4M3[codes] * each[:, :80]}


def mxfp4_powers(rng):
    """With scales of the type that torch has for them."""
    codes = rng.integers(0, 16, (24, 64))
    scales = rng.integers(110, 140, (24, 2)).astype(np.uint8)
    each = np.exp2(scales.astype(np.float32) - 127)
    return {"a.weight": nibbles(codes),
            "a.weight_scale": As("F8_E8M0", scales)}, None, {}, {
                "a.weight": E2M1[codes] * np.repeat(each, 32, axis=1)}


def fp8_powers(rng):
    """Blocks of 128 x 128 under powers of two."""
    tensors, config, beside, _ = fp8_blocks(rng)
    codes = tensors["a.weight"].array
    scales = rng.integers(120, 130, (2, 3)).astype(np.uint8)
    whole = np.repeat(np.repeat(np.exp2(scales.astype(np.float32) - 127),
                                128, 0), 128, 1)
    return {**tensors, "a.weight_scale_inv": As("F8_E8M0", scales)}, config, (
        beside), {"a.weight": E4M3[codes] * whole[:150, :260]}


def convolution(rng, shape=(8, 4, 3, 3), whole=True):
    """A scale for each output, as broadcast or alone."""
    codes = finite_codes(rng, shape, E4M3)
    scale = rng.random((len(codes), *(1 for _ in shape[1:])), np.float32)
    return {"a.weight": As("F8_E4M3", codes),
            "a.weight_scale": scale if whole else scale.reshape(-1)}, None, (
                modelopt("FP8")), {"a.weight": E4M3[codes] * scale}


def fp8_columns(rng, shape):
    codes = finite_codes(rng, shape, E4M3)
    scales = (rng.integers(1, 99, (*shape[:-2], 1, shape[-1])) / 64).astype(
        np.float32)
    return ({"a.weight": As("F8_E4M3", codes), "a.weight_scale": scales},
            {"quantization_config": {"quant_method": "fp8"}}, {},
            {"a.weight": E4M3[codes] * scales})


def gptq_mixed(rng):
    """A module that has other bits and groups than the model."""
    tensors, config, beside, reals = gptq(rng, bits=8, group=16)
    config["quantization_config"].update(
        bits=4, group_size=32, dynamic={"+:.*a$": {"bits": 8,
                                                   "group_size": 16},
                                        "-:.*(?!a)b$": {}})
    return tensors, config, beside, reals


def gptq_mixed_ragged(rng):
    """A module whose last group is shorter, in a model with others."""
    tensors, config, beside, reals = gptq(rng, group=64)
    config["quantization_config"]["dynamic"] = {"+:.*b$": {"bits": 8}}
    return tensors, config, beside, reals


def int8(rng):
    codes = rng.integers(-128, 128, (10, 48)).astype(np.int8)
    scales = rng.random((10, 1), np.float32)
    zeros = rng.integers(-128, 128, (10, 1)).astype(np.int8)
    reals = (codes.astype(np.float32) - zeros.astype(np.float32)) * scales
    return {"a.weight": codes, "a.weight_scale": scales,
            "a.weight_zero_point": zeros}, None, {}, {"a.weight": reals}


def auto_round(rng, packing, v2):
    tensors, config, beside, reals = gptq(rng, v2=v2)
    config["quantization_config"] = {
        "quant_method": "auto-round", "bits": 4, "group_size": 32,
        "packing_format": packing}
    return tensors, config, beside, reals


def gptq_unset(rng):
    """Groups that nobody set."""
    tensors, config, beside, reals = gptq(rng)
    return {**tensors, "a.g_idx": np.zeros(96, np.int32)}, config, beside, reals


def float8(rng, dtype, table):
    """Numbers, without scales."""
    codes = finite_codes(rng, (10, 48), table)
    return {"a.weight": As(dtype, codes)}, None, {}, {"a.weight": table[codes]}


def float8_module(rng):
    """With what modules without scales have."""
    tensors, config, beside, reals = float8(rng, "F8_E4M3", E4M3)
    plain = {"a.running_mean": np.ones(10, np.float32),
             "a.num_batches_tracked": np.array([3]),
             "a.lora_A.default.weight": np.ones((2, 48), np.float32),
             "ab.scale": np.float32([.5])}
    codes = As("F8_E4M3", np.full(3, 0x38, np.uint8))
    plain["c.down_bias"] = np.ones(3, np.float32)
    plain["c.logit_scale"] = np.ones(1, np.float32)
    names = "c.down", "norm.scale", "norm.bias"
    return {**tensors, **plain, **dict.fromkeys(names, codes)}, config, beside, {
        **reals, **plain, **dict.fromkeys(names, np.ones(3, np.float32))}


SHUFFLED = np.random.default_rng(5).permutation(96)
CASES = {
    "gptq4": gptq,
    "fp8_expert_columns": lambda rng: fp8_columns(rng, (3, 40, 24)),
    "fp8_columns": lambda rng: fp8_columns(rng, (40, 24)),
    "gptq2": lambda rng: gptq(rng, 2),
    "gptq3": lambda rng: gptq(rng, 3),
    "gptq8": lambda rng: gptq(rng, 8),
    "gptq_v2": lambda rng: gptq(rng, v2=True),
    "gptq_ragged": lambda rng: gptq(rng, group=40),
    "gptq_desc_act": lambda rng: gptq(rng, order=SHUFFLED),
    "awq4": awq,
    "awq8": lambda rng: awq(rng, 8),
    "awq4_symmetric": lambda rng: awq(rng, symmetric=True),
    "awq8_symmetric": lambda rng: awq(rng, 8, symmetric=True),
    "awq_mixed": awq_mixed,
    "fp8_blocks": fp8_blocks,
    "fp8_blocks_of_64": lambda rng: fp8_blocks(rng, block=(64, 32)),
    "fp8_e5m2": lambda rng: fp8_blocks(rng, "F8_E5M2", E5M2),
    "modelopt_fp8": modelopt_fp8,
    "modelopt_fp8_rows": lambda rng: modelopt_fp8(rng, True),
    "fbgemm_fp8": fbgemm_fp8,
    "modelopt_nvfp4": modelopt_nvfp4,
    "gpt_oss": gpt_oss,
    "gpt_oss_original": lambda rng: gpt_oss(rng, False),
    "mxfp8": mxfp8,
    "int8": int8,
    "mxfp8_powers": lambda rng: mxfp8(rng, "F8_E8M0"),
    "mxfp4_powers": mxfp4_powers,
    "fp8_powers": fp8_powers,
    "convolution": convolution,
    "convolution_alone": lambda rng: convolution(rng, whole=False),
    "convolution_of_lines": lambda rng: convolution(rng, (6, 4, 5), False),
    "gptq_mixed": gptq_mixed,
    "gptq_mixed_ragged": gptq_mixed_ragged,
    "auto_round": lambda rng: auto_round(rng, "auto_round", True),
    "auto_round_gptqmodel": lambda rng: auto_round(
        rng, "auto_round:gptqmodel", True),
    "auto_round_auto_gptq": lambda rng: auto_round(
        rng, "auto_round:auto_gptq", False),
    "gptq_unset": gptq_unset,
    "float8_e4m3": lambda rng: float8(rng, "F8_E4M3", E4M3),
    "float8_e5m2": lambda rng: float8(rng, "F8_E5M2", E5M2),
    "float8_module": float8_module,
}


def make(name):
    rng = np.random.default_rng(list(CASES).index(name))
    tensors, config, beside, reals = CASES[name](rng)
    plain = {"a.bias": np.float16([1, 2]), "b.weight": rng.standard_normal(
        (8, 64), np.float32)}
    return {**tensors, **plain}, config, beside, {**reals, **plain}


def check(found, expected):
    """That a file has these tensors, and no others, bit for bit."""
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        array = np.ascontiguousarray(array)
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def check_quantized(path, expected):
    found, file = quantd.load(path), quantd.load(expected)
    assert sorted(found) == sorted(file)
    for name, tensor in file.items():
        if isinstance(tensor, np.ndarray):
            assert np.array_equal(found[name], tensor), name
            continue
        assert np.array_equal(found[name].codes, tensor.codes), name
        assert np.array_equal(found[name].scale, tensor.scale), name


def scheme(**weights):
    return {"dtype": "bfloat16", "quantization_config": {
        "quant_method": "compressed-tensors", "format": "naive-quantized",
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"symmetric": True, **weights}}}}}


def check_requantized(folder, tmp_path, quantctl):
    restored, out = tmp_path / "restored", tmp_path / "out"
    once, refused = tmp_path / "once.safetensors", tmp_path / "refused"
    quantize = "--spec", "int8:group:32", "--no-store"
    said = quantctl("quantize", folder, "-o", refused, *quantize,
                    code=FILE_ERROR)
    assert "compressed-tensors" in said and "--requantize" in said
    assert not refused.exists()
    quantctl("dequantize", folder, "-o", restored)
    quantctl("quantize", restored, "-o", once, *quantize)
    quantctl("quantize", folder, "-o", out, "--requantize", *quantize)
    check_quantized(out, once)
    assert "inf" in quantctl("evaluate", folder, "--reference", restored)
