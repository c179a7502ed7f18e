"""Checkpoints that other programs quantized, with parts or configurations that are
missing, wrong or elsewhere."""

import json

import numpy as np
import pytest

import quantd
from foreign_checkpoints import (CASES, FILE_ERROR, NUMBERS, As, check, gptq,
                                 int8, make, scheme, write, write_folder)


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
