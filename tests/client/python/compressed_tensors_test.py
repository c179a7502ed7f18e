"""Folders of compressed-tensors models: quantctl and quantd.load read the same of
them, and refuse the same."""

import numpy as np
import pytest

import quantd
from foreign_checkpoints import (E2M1, E4M3, FILE_ERROR, NUMBERS, SHUFFLED, As,
                                 bfloat16, check, check_requantized,
                                 finite_codes, int8, mxfp8, nibbles, scheme,
                                 stream, write_folder)


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
