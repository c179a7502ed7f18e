"""Checkpoints that other programs quantized: what quantctl and quantd.load make of
them is, bit for bit, what writers in numpy meant by them. The writers follow each format's
own description and share nothing with what reads."""

import json
import os
import struct
import warnings

import numpy as np
import pytest

import quantd
import requantizing

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


# Each gives tensors, config.json, files beside it, and what they stand for.


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


@pytest.mark.parametrize("name", CASES)
def test_FloatsAreWhatTheWriterMeant(name, quantctl, tmp_path):
    tensors, config, beside, reals = make(name)
    folder, restored = tmp_path / "model", tmp_path / "restored.safetensors"
    write_folder(folder, tensors, config, beside)
    assert "a.bias" in quantctl("dequantize", folder, "-o", restored)
    check(quantd.load(restored), reals)
    check(quantd.load(folder), reals)
    # A file is its own reference, before and after.
    for file, reference in ((folder, restored), (restored, folder)):
        assert "inf" in quantctl("evaluate", file, "--reference", reference)


@pytest.mark.parametrize("name, config, is_told", [
    ("gptq4", None, True), ("gptq4", {"dtype": "float16"}, True),
    ("gptq4", {"quantization_config": {"bits": 4}}, False),
    ("awq4", None, False)])
def test_GptqWithoutAConfigurationIsToldToBeOfVersion1(name, config, is_told,
                                                       quantctl, tmp_path):
    tensors, _, _, reals = make(name)
    folder, restored = tmp_path / "model", tmp_path / "restored.safetensors"
    write_folder(folder, tensors, config)
    text = "no configuration was found"
    assert (text in quantctl("dequantize", folder, "-o", restored)) == is_told
    check(quantd.load(restored), reals)
    (tmp_path / "again").mkdir()
    document = quantctl("dequantize", folder, "-o", tmp_path / "again/x",
                        "--json")
    assert [text in tensor.get("note", "") for tensor in document["tensors"]
            if tensor["name"] == "a.weight"] == [is_told]
    for more in ((), ("--json",)):
        quantize = quantctl("quantize", folder, "-o", tmp_path / f"out{more}",
                            "--requantize", *requantizing.ARGUMENTS, *more)
        evaluate = quantctl("evaluate", folder, "--reference", restored, *more)
        for said in (quantize, evaluate):
            assert (text in str(said["notes"] if more else said)) == is_told
    said = quantctl("import", folder, "--model", f"told/{name}/{is_told}")
    assert (text in said) == is_told
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(quantd.load(folder), reals)
    found = [warning for warning in caught if text in str(warning.message)]
    assert len(found) == is_told
    for warning in found:
        assert warning.filename == __file__
        assert "tensor 'a.weight'" in str(warning.message)


@pytest.mark.parametrize("name", CASES)
def test_WhatIsQuantizedIsQuantizedOnlyWhenAskedTo(name, quantctl, tmp_path):
    tensors, config, beside, _ = make(name)
    os.mkdir(tmp_path / "model")
    single = tmp_path / "model/x.safetensors"
    write(single, tensors, {"format": "pt"})
    for file, document in {"config.json": config, **beside}.items():
        if document is not None:
            (tmp_path / "model" / file).write_text(json.dumps(document))
    folder = tmp_path / "folder"
    write_folder(folder, tensors, config, beside)
    once, out = tmp_path / "once.safetensors", tmp_path / "out"
    refused = requantizing.check_file(single, tmp_path, quantctl)
    assert "FILE_UNSUPPORTED" in refused
    assert f"quantctl dequantize {single} -o FILE" in refused
    quantctl("quantize", folder, "-o", out, "--requantize",
             *requantizing.ARGUMENTS)
    check_quantized(out, once)


def test_AScaleForEachColumnOfASquareIsAmbiguous(quantctl, tmp_path):
    tensors, config, beside, _ = fp8_columns(np.random.default_rng(1), (24, 24))
    folder = tmp_path / "model"
    write_folder(folder, tensors, config, beside)
    said = quantctl("dequantize", folder, "-o", tmp_path / "out",
                    code=FILE_ERROR)
    assert "FILE_MALFORMED" in said and "a.weight_scale" in said
    with pytest.raises(quantd.QuantdError) as caught:
        dict(quantd.load(folder))
    assert caught.value.reason == "FILE_MALFORMED"


def test_AFolderThatIsQuantizedIsNamed(quantctl, tmp_path):
    tensors, config, beside, _ = make("gptq4")
    folder, out = tmp_path / "folder", tmp_path / "out"
    write_folder(folder, tensors, config, beside)
    refused = quantctl("quantize", folder, "-o", out, *requantizing.ARGUMENTS,
                       code=FILE_ERROR)
    assert f"quantctl dequantize {folder} -o FILE" in refused
    assert not out.exists()


def check_quantized(path, expected):
    found, file = quantd.load(path), quantd.load(expected)
    assert sorted(found) == sorted(file)
    for name, tensor in file.items():
        if isinstance(tensor, np.ndarray):
            assert np.array_equal(found[name], tensor), name
            continue
        assert np.array_equal(found[name].codes, tensor.codes), name
        assert np.array_equal(found[name].scale, tensor.scale), name


@pytest.mark.parametrize("name", CASES)
def test_EncodingsGoToTheServer(name, quantctl, client, tmp_path):
    tensors, config, beside, reals = make(name)
    folder = tmp_path / "model"
    write_folder(folder, tensors, config, beside)
    model = f"checkpoint/{name}"
    if name == "gptq_desc_act":
        said = quantctl("import", folder, "--model", model, code=1)
        assert "g_idx has the groups in another order" in said
        return
    quantctl("import", folder, "--model", model)
    tensor = next(iter(reals))
    # Quantized with it, reals that are those of codes stay.
    again = client.quantize(np.ascontiguousarray(reals[tensor]),
                            quantd.EncodingReference(
                                quantd.TensorName(model, tensor)))
    assert np.allclose(client.dequantize(again), reals[tensor], rtol=1e-6,
                       atol=0)


def drop(name):
    return lambda tensors, config: tensors.pop(name)


def put(name, value):
    return lambda tensors, config: tensors.update({name: value})


def say(**values):
    return lambda tensors, config: config["quantization_config"].update(values)


MALFORMED = [
    ("gptq4", drop("a.scales"), "FILE_MALFORMED", "a.scales"),
    ("gptq4", drop("a.qzeros"), "FILE_MALFORMED", "a.qzeros"),
    ("gptq4", put("a.scales", np.zeros((3, 64), np.int32)), "FILE_MALFORMED",
     "a.scales of F16"),
    ("gptq4", put("a.qzeros", np.zeros((3, 9), np.int32)), "FILE_MALFORMED",
     "a.qzeros packed"),
    ("gptq4", put("a.qweight", np.zeros((12, 64), np.uint8)),
     "FILE_UNSUPPORTED", "a.qweight of I32"),
    ("awq4", put("a.qweight", As("I16", np.zeros((32, 128), np.int16))),
     "FILE_UNSUPPORTED", "got I16 [32,128]"),
    ("gptq4", put("a.g_idx", np.full(96, 3, np.int32)), "FILE_MALFORMED",
     "a.g_idx between 0 and 2, got 3"),
    ("gptq4", put("a.g_idx", np.full(96, -1, np.int32)), "FILE_MALFORMED",
     "a.g_idx between 0 and 2, got -1"),
    ("gptq4", put("a.g_idx", np.zeros(95, np.int32)), "FILE_MALFORMED",
     "a.g_idx of I32 [96]"),
    ("gptq4", say(group_size=16), "FILE_MALFORMED", "groups of 16"),
    ("gptq_mixed", put("a.qzeros", np.zeros((6, 9), np.int32)),
     "FILE_UNSUPPORTED", "none of 2, 3, 4 and 8"),
    ("convolution", put("a.weight_scale", np.ones(9, np.float32)),
     "FILE_MALFORMED", "a.weight_scale with a scale"),
    ("gptq4", say(bits=5), "FILE_UNSUPPORTED", "2, 3, 4 or 8 bits"),
    ("gptq4", say(checkpoint_format="marlin"), "FILE_UNSUPPORTED", "marlin"),
    ("awq4", say(version="gemv"), "FILE_UNSUPPORTED", "gemv"),
    ("awq4", put("a.qweight", np.zeros((64, 5), np.int32)), "FILE_MALFORMED",
     "a.qweight packed along the outputs"),
    ("awq4", drop("a.qzeros"), "FILE_MALFORMED", "a.qzeros"),
    ("awq4_symmetric", put("a.qweight", np.zeros((64, 5), np.int32)),
     "FILE_MALFORMED", "a.qweight packed along the outputs"),
    ("awq4_symmetric", put("a.qzeros", np.zeros((2, 7), np.int32)),
     "FILE_MALFORMED", "a.qzeros packed along the outputs"),
    ("gptq4", lambda tensors, config: (
        drop("a.qzeros")(tensors, config),
        say(zero_point=False)(tensors, config)), "FILE_MALFORMED", "a.qzeros"),
    ("fp8_blocks", drop("a.weight_scale_inv"), "FILE_MALFORMED",
     "a.weight_scale_inv"),
    ("fp8_blocks", put("a.weight_scale_inv", np.zeros((3, 3), np.float32)),
     "FILE_MALFORMED", "each block of 128 x 128"),
    ("fp8_blocks", put("a.weight_scale_inv", np.zeros((2, 3), np.int32)),
     "FILE_MALFORMED", "got I32"),
    ("fp8_blocks", say(weight_block_size=[0, 128]), "FILE_MALFORMED",
     "weight_block_size"),
    ("modelopt_nvfp4", drop("a.weight_scale_2"), "FILE_MALFORMED",
     "a.weight_scale_2"),
    ("modelopt_nvfp4", put("a.weight_scale", As(
        "F8_E4M3", np.zeros((24, 5), np.uint8))), "FILE_MALFORMED", "[24,4]"),
    ("gpt_oss", drop("a.gate_up_proj_scales"), "FILE_MALFORMED",
     "a.gate_up_proj_scales"),
    ("gpt_oss", put("a.gate_up_proj_scales", np.zeros((3, 20, 3), np.uint8)),
     "FILE_MALFORMED", "[3,20,2]"),
    ("int8", put("a.weight_zero_point", np.zeros(9, np.int8)),
     "FILE_MALFORMED", "as many as scales"),
    # What lies beside what is read, in ways that are not.
    ("modelopt_fp8", put("c.gate_up_proj", As(
        "F8_E4M3", np.ones((2, 8, 8), np.uint8))), "FILE_UNSUPPORTED",
     "c.gate_up_proj"),
    ("modelopt_fp8", put("c.weight", np.ones((8, 8), np.uint8)),
     "FILE_UNSUPPORTED", "c.weight"),
    ("int8", put("c.codes", np.ones((8, 8), np.int32)), "FILE_UNSUPPORTED",
     "c.codes"),
    ("int8", put("c.trellis", As("I16", np.ones((2, 2, 64), np.int16))),
     "FILE_UNSUPPORTED", "c.trellis"),
    ("int8", put("c_weight_scale", np.ones(8, np.float32)), "FILE_UNSUPPORTED",
     "c_weight_scale"),
    ("mxfp8", put("c.weight", As("F8_E4M3", np.ones((8, 8), np.uint8))),
     "FILE_UNSUPPORTED", "c.weight"),
    ("modelopt_nvfp4", put("a.pre_quant_scale", np.ones(64, np.float32)),
     "FILE_UNSUPPORTED", "a.pre_quant_scale"),
    ("modelopt_fp8", put("a.comfy_quant", np.ones(9, np.uint8)),
     "FILE_UNSUPPORTED", "a.comfy_quant"),
    # As ComfyUI and TransformerEngine have their scales.
    ("modelopt_fp8", put("a.scale_weight", np.ones((), np.float32)),
     "FILE_UNSUPPORTED", "a.scale_weight"),
    ("modelopt_fp8", put("a._extra_state", np.ones(9, np.uint8)),
     "FILE_UNSUPPORTED", "a._extra_state"),
    ("fp8_blocks", put("a.weight_scale", np.ones((2, 3), np.float32)),
     "FILE_UNSUPPORTED", "got both"),
    ("modelopt_fp8", put("a.weight_zero_point", np.ones(1, np.int8)),
     "FILE_UNSUPPORTED", "a.weight_zero_point of zeros"),
    ("gpt_oss", put("a.gate_up_proj", np.ones((4, 4), np.float32)),
     "FILE_MALFORMED", "another tensor has this name"),
    ("gptq4", say(packing_format="auto_round:auto_awq"), "FILE_UNSUPPORTED",
     "packing_format"),
    ("gptq4", say(packing_format="auto_round:marlin"), "FILE_UNSUPPORTED",
     "auto_round:marlin"),
    ("awq4", say(packing_format="auto_round"), "FILE_UNSUPPORTED",
     "packing_format"),
    # Floats of eight bits beside what may be their scale.
    *((case, put(name, np.float32([.5])), "FILE_UNSUPPORTED",
       f"{name} may be one")
      for case in ("float8_e4m3", "float8_e5m2") for name in (
          "a.weights_scaling_factor", "a.qscale_weight", "a.scale",
          "a.weight.scale", "a.weight_quantizer.scale", "a.input_scale",
          "a.weight_quantizer._amax", "a.weight_quantizer.s", "a.s")),
    ("float8_module", put("c.scale_down", np.float32([.5])),
     "FILE_UNSUPPORTED", "c.scale_down may be one"),
    ("float8_module", put("c.down_s", np.float32([.5])),
     "FILE_UNSUPPORTED", "c.down_s may be one"),
]


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_MalformedCheckpointsAreRefused(number, quantctl, tmp_path):
    name, change, reason, text = MALFORMED[number]
    tensors, config, beside, _ = make(name)
    change(tensors, config)
    folder, output = tmp_path / "model", tmp_path / "x.safetensors"
    write_folder(folder, tensors, config, beside)
    for command in (("dequantize", folder, "-o", output),
                    ("import", folder, "--model", "malformed"),
                    ("quantize", folder, "-o", output, "--requantize",
                     "--spec", "int8"),
                    ("evaluate", folder, "--reference", folder)):
        said = quantctl(*command, code=FILE_ERROR)
        assert reason in said and text in said
        assert not output.exists()
    with pytest.raises(quantd.QuantdError) as caught:
        dict(quantd.load(folder))
    assert caught.value.reason == reason
    # Shapes have spaces here.
    assert text.replace(" ", "") in str(caught.value).replace(" ", "")


def test_CodesWithoutAConfigurationAreNotQuantized(quantctl, tmp_path):
    """Not even where their scales are in another file."""
    float_, code = np.ones((4, 32), np.float32), np.ones((4, 32), np.uint8)
    for i, tensors in enumerate((
            {"a.weight_packed": np.zeros((4, 4), np.int32),
             "a.weight_scale": float_},
            {"a.weight_packed": np.zeros((4, 4), np.int32)},
            {"a.weight_scale": float_},
            {"a.weight": code, "a.weight_scale": float_},
            {"a.weight": code, "a.weight.absmax": float_},
            {"a.weight": code.view(np.int8), "a.SCB": float_},
            {"a.weight_scale_inv": float_}, {"a.qzeros": float_},
            {"a.gate_up_proj": code, "a.gate_up_proj_weight_scale": float_},
            {"a.weight._data": code.view(np.int8), "a.weight._scale": float_},
            {"a._weight_qdata": code.view(np.int8), "a._weight_scale": float_,
             "a._weight_zero_point": float_},
            {"a._weight_qdata": As("I16", np.ones((4, 32), np.int16))},
            {"a._weight_scale": float_}, {"a._weight_zero_point": float_},
            {"a.weight_qdata": code, "a.weight_scale": float_},
            {"a.W_q": code, "a.scale": float_, "a.zero": float_},
            {"a.codes": code.view(np.int8), "a.codebooks": float_,
             "a.scales": float_},
            # Marlin, QuIP#, ExLlamaV2 and V3, and SmoothQuant.
            {"a.B": np.zeros((4, 4), np.int32), "a.s": float_},
            {"a.Qidxs": np.zeros((4, 4), np.int64)},
            {"a.q_weight": np.zeros((4, 4), np.int32)},
            {"a.trellis": As("I16", np.ones((2, 2, 64), np.int16)),
             "a.suh": float_[0], "a.svh": float_[0]},
            {"a.suh": float_[0]}, {"a.svh": float_[0]},
            {"a.weight": code.view(np.int8), "a.a": float_[0, :1]},
            {"a.weight": code},
            {"a.weight": As("I16", np.ones((4, 32), np.int16))})):
        path = tmp_path / f"{i}.safetensors"
        write(path, {**tensors, "b.weight": float_})
        for more in ((), ("--requantize",)):
            said = quantctl("quantize", path, "-o", tmp_path / "out", "--spec",
                            "int8", *more, code=FILE_ERROR)
            assert "FILE_UNSUPPORTED" in said and "quantized already" in said
            assert not (tmp_path / "out").exists()
    # Beside a weight of floats a scale is a tensor like another, and a table of
    # integers is no codes.
    write(tmp_path / "plain", {"a.weight": float_, "a.weight_scale": float_,
                               "table.weight": np.zeros((4, 4), np.int32)})
    quantctl("quantize", tmp_path / "plain", "-o", tmp_path / "out", "--spec",
             "int8", "--no-store")


@pytest.mark.parametrize("codes", [np.ones((4, 32), np.uint8),
                                   As("I16", np.ones((4, 32), np.int16))])
@pytest.mark.parametrize("name, document", [
    ("config.json", {"quantization_config": {"quant_method": "x"}}),
    ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A8_AWQ"}}),
    ("quantize_config.json", {"bits": 4}), ("quant_config.json", {"w_bit": 4})])
def test_ConfigurationsSayThatCodesAreCodes(name, document, codes, quantctl,
                                            tmp_path):
    tensors = {"a.data": codes, "b.weight": np.ones((4, 32), np.float32)}
    folder, out = tmp_path / "model", tmp_path / "out"
    write_folder(folder, tensors, None, {name: document})
    write(folder / "single.safetensors", tensors)
    write(folder / "plain.safetensors", {"b.weight": tensors["b.weight"]})
    for source in folder, folder / "single.safetensors":
        for more in ((), ("--requantize",)):
            said = quantctl("quantize", source, "-o", out, "--spec", "int8",
                            *more, code=FILE_ERROR)
            assert "FILE_UNSUPPORTED" in said
            # Neither would read it.
            assert "requantize" not in said and "dequantize" not in said
        assert not out.exists()
    quantctl("quantize", folder / "plain.safetensors", "-o", out, "--spec",
             "int8", "--no-store")


def test_TensorsWithoutElementsAreRead(quantctl, tmp_path):
    path, restored = tmp_path / "x.safetensors", tmp_path / "restored"
    plain = {"b.weight": np.ones((4, 4), np.float32)}
    write(path, {
        "a.weight": As("F8_E4M3", np.ones((0, 16), np.uint8)),
        "a.weight_scale": np.float32(.5),
        "a.weight_zero_point": np.zeros(1, np.int8),
        "e_blocks": np.ones((2, 0, 4, 16), np.uint8),
        "e_scales": np.ones((2, 0, 4), np.uint8), **plain})
    expected = {"a.weight": np.ones((0, 16), np.float32),
                "e": np.ones((2, 128, 0), np.float32), **plain}
    quantctl("dequantize", path, "-o", restored)
    check(quantd.load(restored), expected)
    check(quantd.load(path), expected)
    quantctl("quantize", path, "-o", tmp_path / "out", "--requantize",
             "--include", "b.*", "--spec", "int8", "--no-store")


def test_UnrelatedTensorsAreLoaded(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"img_blocks": np.ones((2, 3, 16), np.uint8),
               "b.weight": np.ones((4, 4), np.float32)}
    write(path, tensors)
    check(quantd.load(path), tensors)
    # One that cannot be read does not hide the others.
    write(path, {**tensors, "a.qweight": np.ones((4, 4), np.int32)})
    file = quantd.load(path)
    assert np.array_equal(file["b.weight"], tensors["b.weight"])
    with pytest.raises(quantd.QuantdError):
        file["a.qweight"]  # pylint: disable=pointless-statement


def test_ScalesElsewhereAndConfigurationsAreOfTheRun(quantctl, tmp_path):
    rng = np.random.default_rng(7)
    tensors, config, _, _ = gptq(rng)
    tensors = {f"a.{name}": tensors[f"a.{name}"]
               for name in ("qweight", "scales", "qzeros", "g_idx")}
    folder = tmp_path / "model"
    write_folder(folder, tensors, config)

    def quantize(out):
        quantctl("quantize", folder, "-o", out, "--requantize", "--spec",
                 "int8", "--no-store")

    kept, fresh = tmp_path / "kept", tmp_path / "fresh"
    quantize(kept)
    first = quantd.load(kept)["a.weight"].scale.copy()
    write(folder / "model-00002-of-00002.safetensors",
          {"a.scales": tensors["a.scales"] * np.float16(2),
           "a.g_idx": tensors["a.g_idx"]})
    quantize(kept)
    assert not np.array_equal(quantd.load(kept)["a.weight"].scale, first)
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (folder / "config.json").write_text(json.dumps(config))
    quantize(kept)
    quantize(fresh)
    check_quantized(kept, fresh)


@pytest.mark.parametrize("place", [
    ("compression_config",), ("text_config", "quantization_config"),
    ("llm_config", "compression_config")])
@pytest.mark.parametrize("made", [
    lambda rng: gptq(rng, group=40),
    lambda rng: (*int8(rng)[:1], {"quantization_config": scheme(
        type="int", num_bits=8, strategy="channel")["quantization_config"]},
                 {}, int8(np.random.default_rng(8))[3])])
def test_TheConfigurationIsFoundInAllPlaces(place, made, quantctl, tmp_path):
    tensors, config, _, reals = made(np.random.default_rng(8))
    section = config["quantization_config"]
    for key in reversed(place):
        section = {key: section}
    # The outermost one wins.
    outer = {"text_config": {"quantization_config": {"quant_method": "no"}},
             **section} if place == ("compression_config",) else section
    folder = tmp_path / "model"
    write_folder(folder, tensors, {"dtype": "float32", **outer})
    quantctl("dequantize", folder, "-o", tmp_path / "floats")
    check(quantd.load(tmp_path / "floats"), reals)
    loaded = quantd.load(folder)["a.weight"]
    if not isinstance(loaded, np.ndarray):
        loaded = loaded.dequantize()
    np.testing.assert_array_equal(loaded, reals["a.weight"])
    quantctl("import", folder, "--model", f"places/{'-'.join(place)}")
    said = quantctl("quantize", folder, "-o", tmp_path / "out", "--no-store",
                    "--spec", "int8", code=FILE_ERROR)
    assert "quantized already" in said
    quantctl("quantize", folder, "-o", tmp_path / "again", "--no-store",
             "--requantize", "--layout", "compressed-tensors", "--spec",
             "int4:group:16")
    written = json.loads((tmp_path / "again/config.json").read_text())
    assert written["quantization_config"]["quant_method"] == (
        "compressed-tensors")
    assert "compression_config" not in written
    assert all(not value.keys() & {"quantization_config", "compression_config"}
               for key, value in written.items()
               if key in ("text_config", "llm_config"))


@pytest.mark.parametrize("tensors, weights", [
    ({"weight": np.ones((3, 8, 32), np.int8),
      "weight_scale": np.ones((3, 8, 1), np.float32)},
     {"type": "int", "num_bits": 8, "strategy": "channel"}),
    ({"weight_packed": np.ones((3, 8, 4), np.int32),
      "weight_shape": np.array([3, 8, 32]),
      "weight_scale": np.ones((3, 8, 1), np.float16)},
     {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}),
    ({"weight_packed": np.ones((3, 8, 16), np.uint8),
      "weight_scale": As("F8_E4M3", np.ones((3, 8, 2), np.uint8)),
      "weight_global_scale": np.ones(3, np.float32)},
     {"type": "float", "num_bits": 4, "strategy": "tensor_group",
      "group_size": 16})])
def test_ExpertsInOneTensorAreNotRead(tensors, weights, quantctl, tmp_path):
    folder = tmp_path / "model"
    write_folder(folder, {f"mlp.experts.{name}": tensor
                          for name, tensor in tensors.items()},
                 scheme(**weights))
    said = quantctl("dequantize", folder, "-o", tmp_path / "x",
                    code=FILE_ERROR)
    assert "FILE_UNSUPPORTED" in said and "experts" in said
    with pytest.raises(quantd.QuantdError) as caught:
        dict(quantd.load(folder))
    assert caught.value.reason == "FILE_UNSUPPORTED"


def test_AConfigurationMayNotBeDeep(quantctl, tmp_path):
    folder = tmp_path / "model"
    write_folder(folder, {"a.weight": np.ones((4, 4), np.float32)})
    (folder / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000
                                        + "}")
    said = quantctl("dequantize", folder, "-o", tmp_path / "x",
                    code=FILE_ERROR)
    assert "FILE_MALFORMED" in said
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.load(folder)
    assert caught.value.reason == "FILE_MALFORMED"


@pytest.mark.parametrize("case, part, wrong", [
    ("fp8_blocks", "a.weight_scale_inv", np.float32(np.nan)),
    ("fp8_blocks", "a.weight_scale_inv", np.float32(-1)),
    ("modelopt_fp8_rows", "a.weight_scale", np.float32(np.inf)),
    ("modelopt_nvfp4", "a.weight_scale", 0x7F),
    ("modelopt_nvfp4", "a.weight_scale", 0x90),
    ("modelopt_nvfp4", "a.weight_scale_2", np.float32(np.nan)),
    ("gpt_oss", "a.gate_up_proj_scales", 255),
    ("mxfp8_powers", "a.weight_scale", 255),
    ("gptq4", "a.scales", np.float16(np.inf)),
    ("awq4", "a.scales", np.float16(-1))])
def test_ScalesThatAreNoneAreRefused(case, part, wrong, quantctl, tmp_path):
    rng = np.random.default_rng(7)
    tensors, config, beside, reals = CASES[case](rng)
    of_type = tensors[part]
    scale = np.array(of_type.array if isinstance(of_type, As) else of_type)
    scale.reshape(-1)[-1] = wrong
    tensors[part] = As(of_type.dtype, scale) if isinstance(
        of_type, As) else scale
    write_folder(tmp_path / "model", tensors, config, beside)
    said = quantctl("dequantize", tmp_path / "model", "-o", tmp_path / "x",
                    code=FILE_ERROR)
    (name,) = reals
    assert "finite scales of at least 0" in said and name in said
    assert not (tmp_path / "x").exists()
    with pytest.raises(quantd.QuantdError) as caught:
        np.asarray(quantd.load(tmp_path / "model")[name])
    assert caught.value.reason == "FILE_MALFORMED"


def scheme(**weights):
    return {"dtype": "bfloat16", "quantization_config": {
        "quant_method": "compressed-tensors", "format": "naive-quantized",
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"symmetric": True, **weights}}}}}


@pytest.mark.parametrize("spec", [
    "int4:group:32", "int4:group:32:asymmetric", "int3:per-channel",
    "int8:per-channel:asymmetric", "float8_e4m3fn:per-channel",
    "nvfp4", "mxfp4_e2m1"])
def test_CompressedTensorsAreRequantized(spec, quantctl, tmp_path):
    rng = np.random.default_rng(1)
    folder, compressed = tmp_path / "plain", tmp_path / "compressed"
    write_folder(folder, {
        f"{i}.weight": bfloat16(rng.integers(-99, 99, (32, 64)))
        for i in range(3)}, {"dtype": "bfloat16"})
    quantctl("quantize", folder, "-o", compressed, "--layout",
             "compressed-tensors", "--no-store", "--spec", spec)
    check_requantized(compressed, tmp_path, quantctl)


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


@pytest.mark.parametrize("tensors, config, reason, text", [
    ({"a.weight_packed": np.zeros((4, 16), np.uint8),
      "a.weight_scale": As("F8_E4M3", np.ones((4, 2), np.uint8)),
      "a.weight_global_scale": np.float32([3])}, None, "FILE_UNSUPPORTED",
     "of compressed-tensors, whose config.json is missing"),
    ({"a.weight_packed": np.zeros((4, 4), np.int32),
      "a.weight_scale": np.ones((4, 1), np.float32)}, None, "FILE_UNSUPPORTED",
     "of compressed-tensors, whose config.json is missing"),
    ({"a.weight_packed": np.zeros((4, 4), np.int32),
      "a.scale_packed": np.ones((4, 1), np.float16)},
     {"quantization_config": {"quant_method": "compressed-tensors",
                              "format": "marlin-24"}}, "FILE_UNSUPPORTED",
     "is quantized in a way that is not read"),
    # Beside a module that is read.
    ({"a.weight_packed": np.zeros((4, 4), np.int32),
      "a.scale_packed": np.ones((4, 1), np.float16),
      "c.weight": np.ones((4, 32), np.int8),
      "c.weight_scale": np.ones((4, 1), np.float32)},
     scheme(type="int", num_bits=8, strategy="channel"), "FILE_UNSUPPORTED",
     "is quantized in a way that is not read"),
    ({"a.Qidxs": As("I16", np.zeros((4, 4), np.int16)),
      "a.SU": np.ones(4, np.float32)}, {"quip_params": {}}, "FILE_UNSUPPORTED",
     "is quantized in a way that is not read")])
def test_CodesThatAreNotReadAreToldSo(tensors, config, reason, text, quantctl,
                                      tmp_path):
    folder = tmp_path / "model"
    write_folder(folder, {**tensors, "b.weight": np.ones((4, 4), np.float32)},
                 config)
    said = quantctl("dequantize", folder, "-o", tmp_path / "x", code=FILE_ERROR)
    assert reason in said and text in said
    file = quantd.load(folder)
    assert file["b.weight"].all()
    with pytest.raises(quantd.QuantdError) as caught:
        dict(file)
    assert caught.value.reason == reason and text in str(caught.value)


@pytest.mark.parametrize("sizes, is_read", [
    ([32, 16], True), ("32x16", True), ("32x", False), ("32x16x1", False),
    ("a32x16", False), ("-32x16", False)])
def test_SizesOfBlocksMayBeText(sizes, is_read, quantctl, tmp_path):
    rng = np.random.default_rng(3)
    codes = finite_codes(rng, (48, 64), E4M3)
    scales = (rng.integers(1, 99, (2, 4)) / 64).astype(np.float32)
    each = scales.repeat(32, 0)[:48].repeat(16, 1)
    folder = tmp_path / "model"
    write_folder(folder, {"a.weight": As("F8_E4M3", codes),
                          "a.weight_scale": scales},
                 {**scheme(type="float", num_bits=8, strategy="block",
                           block_structure=sizes), "dtype": "float32"})
    if is_read:
        quantctl("dequantize", folder, "-o", tmp_path / "x")
        check(quantd.load(tmp_path / "x"), {"a.weight": E4M3[codes] * each})
        check_requantized(folder, tmp_path, quantctl)
        return
    said = quantctl("dequantize", folder, "-o", tmp_path / "x", code=FILE_ERROR)
    assert "FILE_MALFORMED" in said
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.load(folder)["a.weight"].dequantize()
    assert caught.value.reason == "FILE_MALFORMED"


def test_NaiveMxfp8AndInt8AreRead(quantctl, tmp_path):
    rng = np.random.default_rng(2)
    for i, (made, weights) in enumerate((
            (mxfp8(rng), {"type": "float", "num_bits": 8, "strategy": "group",
                          "group_size": 32}),
            (mxfp8(rng, "F8_E8M0"), {
                "type": "float", "num_bits": 8, "strategy": "group",
                "group_size": 32}),
            (int8(rng), {"type": "int", "num_bits": 8,
                         "strategy": "channel"}))):
        tensors, _, _, reals = made
        place = tmp_path / str(i)
        write_folder(place / "model", tensors, {**scheme(**weights),
                                                "dtype": "float32"})
        quantctl("dequantize", place / "model", "-o", place / "floats")
        check(quantd.load(place / "floats"), reals)
        check_requantized(place / "model", place, quantctl)
        quantctl("import", place / "model", "--model", f"naive/{i}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ScalesAreDividedByTheGlobalScale(dtype, quantctl, tmp_path):
    """As other readers do: the inverse of it is rounded."""
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 16, (64, 128)).astype(np.uint8)
    scales = rng.integers(1, 127, (64, 8)).astype(np.uint8)
    divisor = np.float32([1563.765625])

    def reals(of_scales):
        found = E2M1[codes] * of_scales.astype(np.float32).repeat(16, 1)
        if dtype == "float32":
            return found
        bits = found.view(np.uint32)
        return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)

    expected = reals(E4M3[scales] / divisor)
    assert (expected != reals(E4M3[scales] * (np.float32(1) / divisor))).any()
    folder = tmp_path / "model"
    write_folder(folder, {"a.weight_packed": nibbles(codes),
                          "a.weight_scale": As("F8_E4M3", scales),
                          "a.weight_global_scale": divisor},
                 {**scheme(type="float", num_bits=4, strategy="tensor_group",
                           group_size=16), "dtype": dtype})
    said = quantctl("dequantize", folder, "-o", tmp_path / "x")
    assert "rounded" not in said
    check(quantd.load(tmp_path / "x"), {"a.weight": expected})
    check({"a.weight": quantd.load(folder)["a.weight"].dequantize()},
          {"a.weight": expected})
    check_requantized(folder, tmp_path, quantctl)
    assert "is rounded" in quantctl("import", folder, "--model", f"d/{dtype}")


def test_CompressedGroupsInAnotherOrderAreRead(quantctl, tmp_path):
    rng, tensors, reals = np.random.default_rng(4), {}, {}
    for name, groups in (("a", SHUFFLED // 32), ("b", np.full(96, -1))):
        codes = rng.integers(-8, 8, (40, 96))
        zeros = rng.integers(-8, 8, (40, 3)).astype(np.int8)
        scales = rng.random((40, 3), np.float32)
        columns = np.arange(96) // 32 if name == "b" else groups
        reals[name + ".weight"] = (codes - zeros[:, columns]).astype(
            np.float32) * scales[:, columns]
        tensors.update({
            name + ".weight_packed": stream(codes + 8, 4),
            name + ".weight_shape": np.array([40, 96]),
            name + ".weight_scale": scales,
            name + ".weight_zero_point": zeros,
            name + ".weight_g_idx": groups.astype(np.int32)})
    folder, restored = tmp_path / "model", tmp_path / "floats"
    config = {**scheme(type="int", num_bits=4, strategy="group",
                       group_size=32, actorder="group"), "dtype": "float32"}
    write_folder(folder, tensors, config)
    quantctl("dequantize", folder, "-o", restored)
    check(quantd.load(restored), reals)
    for name, tensor in quantd.load(folder).items():
        assert np.array_equal(tensor.dequantize(), reals[name])
    check_requantized(folder, tmp_path, quantctl)
    said = quantctl("import", folder, "--model", "compressed/order", code=1)
    assert "weight_g_idx has the groups in another order" in said
    tensors["b.weight_g_idx"] = np.full(96, 3, np.int32)
    write_folder(tmp_path / "wrong", tensors, config)
    said = quantctl("dequantize", tmp_path / "wrong", "-o", tmp_path / "x",
                    code=FILE_ERROR)
    assert "groups from 0 to 2, got 3" in said


def test_CompressedTensorsWithoutElementsAreRead(quantctl, tmp_path):
    reals = {"a.weight": np.ones((0, 16), np.float32),
             "b.weight": np.ones((4, 0), np.float32),
             "c.weight": np.ones((4, 32), np.float32)}
    write_folder(tmp_path / "model", {
        "a.weight": np.ones((0, 16), np.int8),
        "a.weight_scale": np.ones((0, 1), np.float32),
        "b.weight": np.ones((4, 0), np.int8),
        "b.weight_scale": np.ones((4, 1), np.float32),
        "c.weight": np.ones((4, 32), np.int8),
        "c.weight_scale": np.ones((4, 1), np.float32)}, {
            **scheme(type="int", num_bits=8, strategy="channel"),
            "dtype": "float32"})
    quantctl("dequantize", tmp_path / "model", "-o", tmp_path / "floats")
    check(quantd.load(tmp_path / "floats"), reals)
    # No spec has scales for those without elements.
    quantctl("quantize", tmp_path / "model", "-o", tmp_path / "out",
             "--requantize", "--include", "c.*", "--spec", "int8", "--no-store")


def test_TensorsThatShareAScaleAreRequantized(quantctl, tmp_path):
    """Their largest magnitude is found before any of them is sent."""
    rng, tensors = np.random.default_rng(3), {}
    for name in "qkv":
        made = modelopt_fp8(rng)[0]
        stem = f"layers.0.self_attn.{name}_proj"
        tensors[stem + ".weight"] = As("F8_E4M3", finite_codes(
            rng, (32, 64), E4M3))
        tensors[stem + ".weight_scale"] = made["a.weight_scale"]
    path, restored = tmp_path / "x.safetensors", tmp_path / "restored"
    once, twice = tmp_path / "once", tmp_path / "twice"
    write(path, tensors)
    spec = "--spec", "nvfp4", "--no-store"
    quantctl("dequantize", path, "-o", restored)
    quantctl("quantize", restored, "-o", twice, *spec)
    quantctl("quantize", path, "-o", once, "--requantize", *spec)
    assert once.read_bytes() == twice.read_bytes()


@pytest.mark.parametrize("section, value, is_read", [
    ("transform_config", {"config_groups": {"R1": {"type": "hadamard"}}},
     False),
    ("transform_config", ["hadamard"], False),
    ("transform_config", {"config_groups": {}}, True),
    ("transform_config", {}, True), ("transform_config", None, True),
    ("sparsity_config", {"format": "sparse-24-bitmask"}, False),
    ("sparsity_config", {"format": "dense"}, True),
    ("sparsity_config", {}, True)])
def test_WeightsThatWereTransformedAreNotRead(section, value, is_read,
                                              quantctl, tmp_path):
    tensors, _, _, reals = int8(np.random.default_rng(2))
    config = {**scheme(type="int", num_bits=8, strategy="channel"),
              "dtype": "float32", **NUMBERS}
    config["quantization_config"][section] = value
    folder, out = tmp_path / "model", tmp_path / "out"
    write_folder(folder, tensors, config)
    code = 0 if is_read else FILE_ERROR
    for command in (("dequantize", folder, "-o", out),
                    ("import", folder, "--model", "transformed")):
        said = quantctl(*command, code=code)
        assert is_read or "FILE_UNSUPPORTED" in said and section in said
    if is_read:
        check(quantd.load(out), reals)
        assert quantd.load(folder).keys() == reals.keys()
        return
    assert not out.exists()
    with pytest.raises(quantd.QuantdError) as caught:
        dict(quantd.load(folder))
    assert caught.value.reason == "FILE_UNSUPPORTED"
    assert section in str(caught.value)
    said = quantctl("quantize", folder, "-o", out, "--spec", "int8",
                    code=FILE_ERROR)
    assert "requantize" not in said


@pytest.mark.parametrize("tensors, weights, reason, what", [
    ({"weight": np.ones((8, 32), np.int8),
      "weight_scale": np.ones((8, 1), np.float32)},
     {"type": "int", "num_bits": 8, "strategy": "channel",
      "symmetric": False}, "FILE_MALFORMED", "a.weight_zero_point"),
    ({"weight_packed": np.ones((8, 4), np.int32),
      "weight_shape": np.array([8, 32]),
      "weight_scale": np.ones((8, 1), np.float16)},
     {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32,
      "symmetric": False}, "FILE_MALFORMED", "a.weight_zero_point"),
    ({"weight": As("F8_E4M3", np.ones((8, 32), np.uint8)),
      "weight_scale": np.ones((8, 1), np.float32),
      "weight_zero_point": As("F8_E4M3", np.ones((8, 1), np.uint8))},
     {"type": "float", "num_bits": 8, "strategy": "channel"},
     "FILE_UNSUPPORTED", "weight_zero_point")])
def test_ZeroPointsAreThoseOfTheScheme(tensors, weights, reason, what, quantctl,
                                       tmp_path):
    folder = tmp_path / "model"
    write_folder(folder, {f"a.{name}": tensor
                          for name, tensor in tensors.items()},
                 scheme(**weights))
    for command in (("dequantize", folder, "-o", tmp_path / "out"),
                    ("import", folder, "--model", "zero")):
        said = quantctl(*command, code=FILE_ERROR)
        assert reason in said and what in said
    with pytest.raises(quantd.QuantdError) as caught:
        dict(quantd.load(folder))
    assert caught.value.reason == reason and what in str(caught.value)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["gptq_v2", "auto_round_auto_gptq"])
def test_AConfigurationIsAsPythonReadsIt(name, mark, quantctl, tmp_path):
    tensors, config, beside, reals = make(name)
    folder, out = tmp_path / "model", tmp_path / "out"
    write_folder(folder, tensors, {**NUMBERS, **config}, beside)
    for file in "config.json", "model.safetensors.index.json":
        text = (folder / file).read_text()
        (folder / file).write_text(mark + text, encoding="utf-8")
    quantctl("dequantize", folder, "-o", tmp_path / "floats")
    check(quantd.load(tmp_path / "floats"), reals)
    check(quantd.load(folder), reals)
    quantctl("quantize", folder, "-o", out, "--requantize", "--no-store",
             "--scheme", "FP8_DYNAMIC")
    text = (out / "config.json").read_text()
    written = json.loads(text)
    assert repr({key: written[key] for key in NUMBERS}) == repr(NUMBERS)
    assert "\0" not in text and "\\u0000" not in text
    # What it wrote is read again, and taken away.
    assert len(quantd.load(out)) == len(reals)
    quantctl("quantize", folder, "-o", out, "--requantize", "--no-store",
             "--spec", "int8", "--force")
    assert not (out / "config.json").exists()


@pytest.mark.parametrize("name", ["config.json", "quantize_config.json",
                                  "quant_config.json", "hf_quant_config.json"])
def test_AConfigurationThatIsNoneIsToldFirst(name, quantctl, tmp_path):
    plain = {"a.q_proj.weight": np.ones((4, 32), np.float32),
             "b.weight": np.ones((4, 32), np.float32)}
    tensors, _, _, _ = make("gptq4")
    out = tmp_path / "out"
    for content in plain, tensors:
        folder = tmp_path / f"model{len(content)}"
        write_folder(folder, content)
        (folder / name).write_bytes(b'{"a": 1')
        for command in (
                ("quantize", folder, "-o", out, "--spec", "int8"),
                ("quantize", folder, "-o", out, "--scheme", "FP8_DYNAMIC"),
                ("quantize", folder, "-o", out, "--requantize", "--scheme",
                 "FP8_DYNAMIC"),
                ("dequantize", folder, "-o", out),
                ("evaluate", folder, "--spec", "int8"),
                ("sweep", folder, "--spec", "int8"),
                ("calibrate", folder, "--model", "m"),
                ("import", folder, "--model", "m"),
                ("report", folder, "-o", out)):
            check_no_configuration(folder / name,
                                   quantctl(*command, code=FILE_ERROR))
        assert not out.exists()


@pytest.mark.parametrize("text", [
    b'{"a": 1,}', '{"a": 1}'.encode("utf-16"), b"[]", b"", b'{"a": "\xff"}',
    b'{"a": -NaN}'])
def test_ConfigurationsAreObjectsInUtf8(text, quantctl, tmp_path):
    path = tmp_path / "model" / "config.json"
    write_folder(path.parent, make("gptq4")[0])
    path.write_bytes(text)
    check_no_configuration(path, quantctl(
        "dequantize", path.parent, "-o", tmp_path / "out", code=FILE_ERROR))


def check_no_configuration(path, said):
    assert "FILE_MALFORMED" in said and f"{path}: " in said
    assert "expected a JSON object in UTF-8" in said
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.load(path.parent)
    assert caught.value.reason == "FILE_MALFORMED"
    assert f"{path}: " in str(caught.value)


@pytest.mark.parametrize("bits, columns, words", [
    (3, 64, 7), (5, 64, 11), (6, 64, 13), (7, 64, 16),
    # As many words as without gaps.
    (3, 20, 2)])
def test_CodesWithPaddingAreNotRead(bits, columns, words, quantctl, tmp_path):
    folder = tmp_path / "model"
    write_folder(folder, {
        "a.weight_packed": np.full((8, words), (1 << 28) - 1, np.int32),
        "a.weight_shape": np.array([8, columns]),
        "a.weight_scale": np.ones((8, 1), np.float16)},
                 scheme(type="int", num_bits=bits, strategy="channel"))
    told = f"{32 // bits} codes of {bits} bits in each word and padding"
    said = quantctl("dequantize", folder, "-o", tmp_path / "x",
                    code=FILE_ERROR)
    assert "FILE_UNSUPPORTED" in said and told in said
    with pytest.raises(quantd.QuantdError) as caught:
        dict(quantd.load(folder))
    assert caught.value.reason == "FILE_UNSUPPORTED"
    assert told in str(caught.value)
