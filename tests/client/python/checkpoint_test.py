"""Checkpoints that other programs quantized: what quantctl and quantd.load make of
them is, bit for bit, what the writers meant by them."""

import json
import os
import warnings

import numpy as np
import pytest

import quantd
import requantizing
from foreign_checkpoints import (CASES, E4M3, FILE_ERROR, As, check,
                                 check_quantized, finite_codes, fp8_columns,
                                 gptq, make, modelopt_fp8, write, write_folder)


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
