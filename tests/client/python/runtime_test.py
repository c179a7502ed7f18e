"""Folders of compressed-tensors as vLLM runs them: what it reads of config.json
and of the files gives what the same arithmetic gives straight from the
weights."""

import os
import re

import numpy as np
import pytest

import quantd
import runtime_rules as rules
from runtime_folders import (EXPERTS, FP8, SCHEMES, check_config,
                             write_attention, write_experts, write_modules)

DATA = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../data")
MODEL = os.path.join(DATA, "char-lm/model.safetensors")
# Enough to tell one arithmetic from another; there are 128.
SEQUENCES = int(os.environ.get("QUANTD_RUNTIME_SEQUENCES", "1"))


def without_defaults(arguments):
    defaults = ("observer", "scale_dtype")
    return arguments and {key: value for key, value in arguments.items()
                          if key not in defaults}


@pytest.fixture(name="weights", scope="module")
def fixture_weights():
    return rules.read_tensors(MODEL)


@pytest.fixture(name="sequences", scope="module")
def fixture_sequences():
    tensors = rules.read_tensors(os.path.join(DATA,
                                              "char-lm/bytes.safetensors"))
    return (tensors["calibration"][:SEQUENCES],
            tensors["validation"][:SEQUENCES])


@pytest.fixture(name="plain", scope="module")
def fixture_plain(weights, sequences):
    """Bits per byte of the model as it is."""
    return rules.bits_per_byte(weights, sequences[1], lambda _, x: x)


@pytest.fixture(name="calibrated", scope="module")
def fixture_calibrated(weights, sequences, client):
    """The largest input of each layer, whose encodings models "float8" and
    "int8" have."""
    largest = {}
    outputs = {}

    def see(module, x):
        largest[module] = max(largest.get(module, 0), np.abs(x).max())
        if module.endswith(("k_proj", "v_proj")):
            outputs[module + ".output"] = x @ weights[module + ".weight"].T
        seen[module + ".input"] = x
        return x

    seen = {}
    rules.language_model(weights, sequences[0][:, :-1], see)
    for model, spec in (("float8", "float8_e4m3fn"), ("int8", "int8")):
        for name, array in {**seen, **outputs}.items():
            name = quantd.TensorName(model, name)
            client.calibrate(array, name, spec)
    return largest


def straight(scheme, module, weights):
    """A weight as the runtime has it, without quantd."""
    weight = weights[module + ".weight"]
    rows = np.abs(weight).max(1, keepdims=True)
    if scheme.startswith("W8A8"):
        scale = rows / np.float32(127)
        return np.round(weight / scale) * scale
    if scheme == "FP8":
        prefix, _, name = module.rpartition(".")
        names = ([f"{prefix}.{one}_proj.weight" for one in "qkv"]
                 if name[:2] in ("q_", "k_", "v_") else [module + ".weight"])
        # vLLM takes the largest for all, and has nothing to round again.
        scale = np.float32(max(np.abs(weights[one]).max()
                               for one in names)) / np.float32(448)
        return rules.e4m3(weight / scale) * scale
    if scheme == "FP8_DYNAMIC":
        scale = rows / np.float32(448)
        return rules.e4m3(weight / scale) * scale
    if scheme == "FP8_BLOCK":
        blocks = np.abs(weight).reshape(
            len(weight) // 128, 128, -1, 128).max((1, 3)) / np.float32(448)
        scale = rules.spread(blocks, weight.shape, [128, 128])
        return rules.e4m3(weight / scale) * scale
    if scheme.startswith("NVFP4"):
        prefix, _, name = module.rpartition(".")
        names = ([f"{prefix}.{one}_proj.weight" for one in "qkv"]
                 if name[:2] in ("q_", "k_", "v_") else [module + ".weight"])
        outer = max(np.abs(weights[one]).max() for one in names) / np.float32(
            6 * 448)
        block = rules.e4m3(rules.largest(weight, 16) / 6 / outer)
        return rules.e2m1(weight / (block * outer)) * (
            block / (np.float32(1) / outer))
    if scheme.startswith("MX"):
        small = scheme.startswith("MXFP4")
        step = rules.e8m0_for(rules.largest(weight, 32), 2 if small else 8)
        return (rules.e2m1 if small else rules.e4m3)(weight / step) * step
    bits = int(scheme[1])
    if scheme.endswith("ASYM"):
        groups = weight.reshape(len(weight), -1, 128)
        low, high = (np.repeat(end, 128, -1) for end in (
            np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)))
        scale = (high - low) / np.float32(2**bits - 1)
        zero = np.round(-low / scale)
        return (np.clip(np.round(weight / scale) + zero, 0, 2**bits - 1) -
                zero) * scale
    scale = rules.largest(weight, 128) / np.float32(2**(bits - 1) - 1)
    return np.round(weight / scale) * scale


def quantized(tmp_path, quantctl, *flags):
    folder = tmp_path / f"out{len(os.listdir(tmp_path))}"
    quantctl("quantize", MODEL, "-o", folder, "--no-store", "--include",
             "*_proj.weight", *flags)
    return folder


def test_AChannelOfOneRowIsAChannel(tmp_path, quantctl):
    """As the other layers, of which runtimes take one kind."""
    source, out = tmp_path / "model.safetensors", tmp_path / "out"
    row = np.linspace(-1, 1, 64, dtype=np.float32)
    quantd.save(source, {"a.weight": np.stack([row, row / 2]),
                         "b.weight": row[None]})
    quantctl("quantize", source, "-o", out, "--layout", "compressed-tensors",
             "--no-store", "--spec", "int8:per-channel")
    (group,) = check_config(out)["config_groups"].values()
    assert group["weights"]["strategy"] == "channel"
    tensors = rules.read_tensors(out / "model.safetensors")
    assert tensors["b.weight_scale"].shape == (1, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ASchemeRunsAsTheSameArithmetic(tmp_path, quantctl, weights, sequences,
                                        calibrated, plain, scheme):
    folder = quantized(tmp_path, quantctl, "--scheme", scheme, "--model",
                       "float8")
    config = check_config(folder)
    layout, of_weights, of_inputs = SCHEMES[scheme]
    (group,) = config["config_groups"].values()
    assert group["format"] == layout
    assert without_defaults(group["weights"]) == of_weights
    assert without_defaults(group["input_activations"]) == of_inputs
    assert config["ignore"] == ["embed", "head", "positions"]
    model = rules.Folder(folder)
    same = dict(weights)
    for module in group["targets"]:
        same[module + ".weight"] = straight(scheme, module, weights).astype(
            np.float32)
        np.testing.assert_allclose(model.weights[module + ".weight"],
                                   same[module + ".weight"], rtol=1e-6)

    def inputs(module, x):
        if module not in calibrated or module == "head":
            return x
        largest = np.float32(calibrated[module])
        return rules.quantize_inputs(
            x, group["input_activations"], largest / np.float32(448),
            global_scale=np.float32(6 * 448) / largest)

    expected = rules.bits_per_byte(same, sequences[1], inputs)
    found = rules.bits_per_byte(model.weights, sequences[1], model.inputs)
    print(f"{scheme}: {plain:.4f} to {found:.6f} bits per byte, straight "
          f"{expected:.6f}")
    assert found == pytest.approx(expected, abs=1e-6)
    assert abs(found - plain) < .5


@pytest.mark.parametrize("activations", ["static", "static=int8"])
def test_StaticInputsOfIntegers(tmp_path, quantctl, weights, sequences,
                                calibrated, activations):
    folder = quantized(tmp_path, quantctl, "--scheme", "W8A8", "--activations",
                       activations, "--model", "int8")
    (group,) = check_config(folder)["config_groups"].values()
    assert group["input_activations"] == {
        "num_bits": 8, "type": "int", "strategy": "tensor",
        "symmetric": True, "dynamic": False, "observer": "minmax"}
    model = rules.Folder(folder)
    same = {**weights, **{module + ".weight": straight(
        "W8A8", module, weights) for module in group["targets"]}}

    def inputs(module, x):
        return x if module == "head" else rules.quantize_inputs(
            x, group["input_activations"],
            np.float32(calibrated[module]) / np.float32(127))

    assert rules.bits_per_byte(model.weights, sequences[1], model.inputs) == (
        pytest.approx(rules.bits_per_byte(same, sequences[1], inputs),
                      abs=1e-6))


def sqnr_db(reference, other):
    return 10 * np.log10((reference.astype(np.float64)**2).sum() /
                         ((reference - other.astype(np.float64))**2).sum())


def test_TiesKeepTheQualityOfFusedTensors(tmp_path, quantctl, weights):
    losses = {}
    for flags in ((), ("--no-ties",)):
        folder = quantized(tmp_path, quantctl, "--layout",
                           "compressed-tensors", "--spec", "nvfp4", *flags)
        fused, apart = rules.Folder(folder), rules.Folder(folder, fuses=False)
        losses[flags] = {
            name: (sqnr_db(weights[name], fused.weights[name]),
                   sqnr_db(weights[name], apart.weights[name]))
            for name in weights if name.endswith(("q_proj.weight",
                                                  "k_proj.weight",
                                                  "v_proj.weight"))}
    for name, (fused, apart) in losses[()].items():
        best = losses[("--no-ties",)][name][1]
        print(f"{name}: {best:.2f} dB alone, tied {apart:.2f}, fused "
              f"{fused:.2f}; without ties "
              f"{losses[('--no-ties',)][name][0]:.2f}")
        assert fused >= best - .05
    assert min(fused - apart for fused, apart in
               losses[("--no-ties",)].values()) < -1


@pytest.mark.parametrize("spec", ["int8", "uint8"])
def test_DigitsRunFromTheFolderAlone(tmp_path, quantctl, spec):
    source = os.path.join(DATA, "digits-cnn")
    model = f"digits-{spec}"
    quantctl("calibrate", os.path.join(source, "activations.safetensors"),
             "--model", model, "--source", "x", "--sequence", "1")
    quantctl("encodings", "compute", "--model", model, "--spec", spec)
    quantctl("quantize", os.path.join(source, "model.safetensors"), "-o",
             tmp_path / "w8a8", "--scheme", "W8A8", "--activations", "static",
             "--model", model, "--no-store")
    config = check_config(tmp_path / "w8a8")
    assert {group["input_activations"]["symmetric"] for group in
            config["config_groups"].values()} == {spec == "int8"}
    folder = rules.Folder(tmp_path / "w8a8")
    test = rules.read_tensors(os.path.join(source, "test.safetensors"))
    logits = rules.digits(folder.weights, test["images"], folder.inputs)
    right = int((logits.argmax(1) == test["labels"]).sum())
    print(f"digits W8A8 static {spec}: {right} of 500")
    assert right >= 486


def test_TheCacheHasItsScales(tmp_path, quantctl, calibrated):
    del calibrated
    folder = quantized(tmp_path, quantctl, "--scheme", "W8A8", "--kv-cache",
                       "float8_e4m3fn", "--model", "float8")
    config = check_config(folder)
    assert without_defaults(config["kv_cache_scheme"]) == FP8
    tensors = rules.read_tensors(folder / "model.safetensors")
    found = {name for name in tensors if name.endswith(("k_scale", "v_scale"))}
    assert found == {f"layers.{layer}.attention.{which}_scale"
                     for layer in range(3) for which in "kv"}
    assert all(tensors[name].shape == (1,) for name in found)


@pytest.mark.parametrize("flags", [
    ("--ignore", "layers.0.*"), ("--exclude", "*v_proj*", "--no-ties"),
    ("--exclude", "*attention*")])
def test_TheCacheIsThatOfTheWholeModel(tmp_path, quantctl, calibrated, weights,
                                       flags):
    del calibrated
    flags = ("--scheme", "W8A8", "--kv-cache", "float8_e4m3fn", "--model",
             "float8", *flags)
    tensors = rules.read_tensors(quantized(tmp_path, quantctl, *flags) /
                                 "model.safetensors")
    for name in weights:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            cache = name[:-len("_proj.weight")]
            assert tensors[cache + "_scale"] > 0
    # A part has none of what is not quantized, the joined model has all.
    for more in ("--part", "0/2"), ("--part", "1/2"), ("--join",):
        quantctl("quantize", MODEL, "-o", tmp_path / "joined", "--no-store",
                 "--include", "*_proj.weight", *flags, *more)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "joined" / name).read_bytes() == (
            tmp_path / "out0" / name).read_bytes()
    # Nothing of the cache is a tensor of the model as it was.
    quantctl("dequantize", tmp_path / "out0", "-o", tmp_path / "back")
    assert rules.read_tensors(tmp_path / "back").keys() == weights.keys()
    quantctl("quantize", tmp_path / "out0", "-o", tmp_path / "again",
             "--requantize", "--scheme", "MXFP4", "--no-store", "--include",
             "*up_proj.weight")
    assert not [name for name in rules.read_tensors(
        tmp_path / "again/model.safetensors") if "_scale" in name and
                "up_proj" not in name]


def test_AModuleIsATargetOrIgnored(tmp_path, quantctl):
    source = write_experts(tmp_path / "plain", "apart")
    quantctl("quantize", source, "-o", tmp_path / "out", "--no-store",
             "--scheme", "W8A8", "--no-ties", "--ignore", "*.experts.0.*")
    config = check_config(tmp_path / "out")
    (group,) = config["config_groups"].values()
    assert f"{EXPERTS}.0.gate_proj" in config["ignore"]
    assert not set(group["targets"]) & set(config["ignore"])


def test_ANormBehindTheProjectionIsWhatIsCached(tmp_path, quantctl, client):
    flags = ("--scheme", "W8A8", "--kv-cache", "float8_e4m3fn", "--model",
             "norms", "--no-store")
    for k, module in enumerate(("k_proj", "v_proj")):
        client.calibrate(np.full(8, 448 * (k + 1), np.float32),
                         quantd.TensorName("norms",
                                           f"layers.0.attn.{module}.output"),
                         "float8_e4m3fn")
    source = write_attention(tmp_path / "plain")
    quantctl("quantize", source, "-o", tmp_path / "out", *flags)

    def scales(folder):
        found = rules.read_tensors(
            folder / "model-00001-of-00002.safetensors")
        return [found[f"layers.0.attn.{which}_scale"][0] for which in "kv"]

    assert scales(tmp_path / "out") == [1, 2]
    source = write_attention(tmp_path / "normed", norms=("q_norm", "k_norm"))
    said = quantctl("quantize", source, "-o", tmp_path / "none", *flags, code=2)
    assert '"layers.0.attn.k_norm.output" is not there' in said
    assert "'*.output=FORMAT' for --kv-cache" in said
    client.calibrate(np.full(8, 448 * 4, np.float32), quantd.TensorName(
        "norms", "layers.0.attn.k_norm.output"), "float8_e4m3fn")
    quantctl("quantize", source, "-o", tmp_path / "with", *flags)
    assert scales(tmp_path / "with") == [4, 2]
    for names, what in (
            (("q_proj", "k_proj"), "not there: layers.0.attn.v_proj.weight"),
            (("qkv_proj",), "layers.0.attn.qkv_proj.weight\", which has keys"),
            (("q_proj",), "got none")):
        source = write_attention(tmp_path / names[-1], names)
        said = quantctl("quantize", source, "-o", tmp_path / "none", *flags,
                        code=2)
        assert what in said
        assert not (tmp_path / "none").exists()


# What a group of fused layers is called in messages.
QKV = "layers.0.attention.{q,k,v}_proj.weight"


@pytest.mark.parametrize("flags, is_one", [
    (("--include", "*_proj.weight"), True),
    (("--include", "*o_proj.weight"), True),
    (("--include", "*_proj.weight", "--exclude", "layers.0*.k_proj*"), False),
    (("--include", "*_proj.weight", "--ignore", "layers.0*.v_proj"), False),
    (("--include", "*_proj.weight", "--spec",
      "layers.0*.q_proj.weight=int4:group:128"), False)])
def test_FusedTensorsOfSeveralSchemesAreRefused(tmp_path, quantctl, flags,
                                                is_one):
    command = ("quantize", MODEL, "-o", tmp_path / "out", "--no-store",
               "--layout", "compressed-tensors", "--spec", "int8:per-channel",
               *flags)
    said = quantctl(*command, code=0 if is_one else 2)
    if not is_one:
        assert f"expected one scheme for all tensors of {QKV}, got" in said
        assert not (tmp_path / "out").exists()
        quantctl(*command, "--no-ties")


@pytest.mark.parametrize("flag, budgets", [
    ("--max-bits-per-element", ("5", "6")), ("--min-sqnr", ("20", "26"))])
def test_AMixtureHasOneSpecForFusedTensors(tmp_path, quantctl, weights, flag,
                                           budgets):
    names = sorted(name for name in weights if name.endswith("_proj.weight"))
    specs = ("int8:per-channel", "int4:group:128", "nvfp4")
    swept = quantctl(
        "sweep", MODEL, "--include", "*_proj.weight", "--json",
        "-o", tmp_path / "mixture-{}.txt",
        *(word for spec in specs for word in ("--spec", spec)),
        *(word for budget in budgets for word in (flag, budget)))
    measured = {row["name"]: {candidate["spec"]: candidate
                              for candidate in row["candidates"]}
                for row in swept["tensors"]}
    for budget, mixture in zip(budgets, swept["mixtures"]):
        chosen = {choice["tensor"]: choice["spec"]
                  for choice in mixture["choices"]}
        assert sorted(chosen) == names
        for layer in range(3):
            assert len({chosen[f"layers.{layer}.attention.{which}_proj.weight"]
                        for which in "qkv"}) == 1
        found = [measured[name][spec] for name, spec in chosen.items()]
        assert mixture["target_met"]
        assert mixture["size_bytes"] == sum(row["size_bytes"] for row in found)
        assert mixture["min_sqnr_db"] == min(row["sqnr_db"] for row in found)
        assert mixture["noise_to_signal_sum"] == pytest.approx(
            sum(row["noise_to_signal"] for row in found))
        if flag == "--min-sqnr":
            assert mixture["min_sqnr_db"] >= float(budget)
        out = tmp_path / f"out-{budget}"
        quantctl("quantize", MODEL, "-o", out, "--layout",
                 "compressed-tensors", "--no-store", "--spec",
                 f"@{tmp_path / f'mixture-{budget}.txt'}")
        # What was measured is what is written.
        back = rules.Folder(out, fuses=False)
        for name, row in zip(chosen, found):
            assert sqnr_db(weights[name], back.weights[name]) == pytest.approx(
                row["sqnr_db"], abs=1e-3)


@pytest.mark.parametrize("spec", ["nvfp4", "float8_e4m3fn:per-tensor"])
def test_WhatIsMeasuredHasTheScalesOfFusedTensors(tmp_path, quantctl, weights,
                                                  spec):
    def measured(*command):
        rows = quantctl(*command, "--json")["tensors"]
        return {row["name"]: row["candidates"][0]["sqnr_db"] for row in rows}

    flags = ("--spec", spec, "--include", "*attention*_proj.weight")
    done = quantctl("quantize", MODEL, "-o", tmp_path / "x.safetensors",
                    "--no-store", "--evaluate", *flags, "--json")
    written = {row["name"]: row["sqnr_db"] for row in done["tensors"]
               if row["result"] == "quantized"}
    alone = measured("evaluate", MODEL, *flags, "--no-ties")
    assert alone != written
    for command in ("sweep", "evaluate"):
        assert measured(command, MODEL, *flags) == pytest.approx(written, 1e-9)
        assert measured(command, MODEL, *flags, "--no-ties") == alone
    said = quantctl("evaluate", MODEL, "--spec", "int8", "--tie",
                    "{layer}.{q,k}_proj.weight", code=2)
    assert "such as float8_e4m3fn, with --tie" in said
    if spec != "nvfp4":
        tensors = rules.read_tensors(tmp_path / "x.safetensors")
        for layer in range(3):
            names = [f"layers.{layer}.attention.{which}_proj.weight"
                     for which in "qkv"]
            largest = max(np.abs(weights[name]).max() for name in names)
            for name in names:
                assert tensors[name + ".scale"] == np.float32(largest) / 448
    said = quantctl("evaluate", MODEL, "--reference", MODEL, "--no-ties",
                    code=2)
    assert "with specs, got --reference" in said


@pytest.mark.parametrize("flags, warns", [
    (("--spec", "int8:per-channel"), True),
    (("--spec", "int8:group:128"), True),
    (("--spec", "int8:group:128", "--layout", "pack-quantized"), False),
    (("--spec", "int4:group:128"), False),
    (("--spec", "int3:group:128"), True),
    (("--spec", "float8_e4m3fn:group:128"), True),
    (("--spec", "float8_e4m3fn:per-channel"), False),
    (("--scheme", "W8A8", "--activations", "none"), True),
    (("--scheme", "W8A8", "--layout", "pack-quantized"), True),
    (("--scheme", "W8A8", "--activations", "dynamic=int8:per-tensor"), True),
    (("--scheme", "W8A8", "--activations", "dynamic"), False),
    (("--scheme", "W4A16", "--activations", "dynamic=int8"), True),
    (("--scheme", "W4AFP8"), False),
    (("--scheme", "W4AFP8", "--activations",
      "dynamic=float8_e4m3fn:per-tensor"), True),
    (("--scheme", "FP8_BLOCK", "--activations", "none"), False),
    (("--spec", "float8_e4m3fn:group:32", "--activations",
      "dynamic=float8_e4m3fn:group:32"), True),
    (("--scheme", "NVFP4A16"), False), (("--scheme", "MXFP4A16"), False),
    (("--scheme", "MXFP8"), False),
    (("--scheme", "MXFP8A16"), False), (("--scheme", "W4A16_ASYM"), False)])
def test_WhatNoRuntimeHasKernelsForIsSaid(tmp_path, quantctl, flags, warns):
    if "--scheme" not in flags and "--layout" not in flags:
        flags += ("--layout", "compressed-tensors")
    said = quantctl("quantize", MODEL, "-o", tmp_path / "out", "--no-store",
                    "--include", "*up_proj.weight", *flags)
    assert ("no kernels" in said) == warns


def test_WhatPackingGivesKernelsForIsSaid(tmp_path, quantctl):
    mixture = tmp_path / "mixture.txt"
    modules = [f"model.layers.{n}.{name}_proj" for n in (0, 1)
               for name in ("in", "out")]
    source = write_modules(tmp_path / "model", dict.fromkeys(modules,
                                                             (32, 128)))
    quantctl("sweep", source, "--spec", "int8:per-channel", "--spec",
             "int4:group:128", "--max-bits-per-element", 6, "-o", mixture)
    chosen = re.findall("=(int.)", mixture.read_text())
    assert set(chosen) == {"int8", "int4"}

    def said(layout, *flags):
        return quantctl("quantize", source, "-o", tmp_path / "out", "--force",
                        "--restart", "--no-store", "--layout", layout, *flags)

    of_mixture = ("--spec", f"@{mixture}")
    count = chosen.count("int8")
    assert (f"no kernels for the weights and inputs of {count} modules; with "
            f"--layout pack-quantized it has them for {count}, and with "
            "--activations dynamic where all weights are int8:per-channel"
            ) in said("compressed-tensors", *of_mixture)
    assert "no kernels" not in said("pack-quantized", *of_mixture)
    of_bytes = ("--spec", "int8:per-channel", "--activations", "dynamic")
    assert "no kernels" not in said("compressed-tensors", *of_bytes)
    # Packing helps no floats.
    assert "4 modules; see --scheme for what it has" in said(
        "compressed-tensors", "--spec", "float8_e4m3fn:group:64")


def test_EightBitsAlonePack(tmp_path, quantctl):
    folder = quantized(tmp_path, quantctl, "--scheme", "W8A16", "--layout",
                       "compressed-tensors")
    assert check_config(folder)["format"] == "pack-quantized"


def test_PartsOfOtherActivationsDoNotJoin(tmp_path, quantctl, client):
    """Where a part wrote its whole shard."""
    source = write_attention(tmp_path / "model")
    modules = [f"layers.0.{name}" for name in (
        "attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.up")]
    out = tmp_path / "out"
    flags = ("--scheme", "FP8", "--model", "changed", "--no-store")

    def calibrate(largest):
        for module in modules:
            client.calibrate(np.full(8, largest, np.float32), quantd.TensorName(
                "changed", module + ".input"), "float8_e4m3fn")

    calibrate(1)
    quantctl("quantize", source, "-o", out, *flags, "--part", "0/1")
    calibrate(2)
    said = quantctl("quantize", source, "-o", out, *flags, "--join", code=4)
    assert "or with other stored encodings or statistics" in said
    said = quantctl("quantize", source, "-o", out, *flags, "--exclude", "*up*",
                    "--ignore", "*v_proj", "--no-ties", "--part", "0/1",
                    code=4)
    assert "--activations, --kv-cache, --ignore, " in said


def test_PartsHaveWhatIsStoredToo(tmp_path, quantctl, calibrated):
    del calibrated
    flags = ("--scheme", "NVFP4", "--model", "float8", "--no-store",
             "--include", "*_proj.weight", "--kv-cache", "float8_e4m3fn")
    quantctl("quantize", MODEL, "-o", tmp_path / "one", *flags)
    for part in ("0/2", "1/2"):
        quantctl("quantize", MODEL, "-o", tmp_path / "two", *flags, "--part",
                 part)
    quantctl("quantize", MODEL, "-o", tmp_path / "two", *flags, "--join")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (
            tmp_path / "two" / name).read_bytes()
    assert sorted(os.listdir(tmp_path / "two")) == ["config.json",
                                                    "model.safetensors"]
    # What reads weights reads no more than these.
    loaded = quantd.load(tmp_path / "one")
    assert not [name for name in loaded if "input" in name]
    quantctl("dequantize", tmp_path / "one", "-o", tmp_path / "back")


@pytest.mark.parametrize("flags, what", [
    (("--scheme", "FP8"), "stored encodings of the activations"),
    (("--scheme", "FP8", "--model", "int8"), "is int8 with 1 scales"),
    (("--activations", "static"), "--layout compressed-tensors"),
    (("--kv-cache", "float8_e4m3fn"), "--layout compressed-tensors"),
    (("--ignore", "x"), "--layout compressed-tensors"),
    (("--scheme", "W8A8", "--spec", "int4"), "one"),
    (("--scheme", "W8A8", "--layout", "quantd"), "--layout compressed"),
    (("--scheme", "W8A8", "--activations", "sometimes"), "none, dynamic"),
    (("--scheme", "W8A8", "--activations", "dynamic=nvfp4"), "static=nvfp4"),
    (("--scheme", "W8A8", "--activations", "dynamic=int12"), "no words"),
    (("--scheme", "W8A8", "--kv-cache", "uint8"), "float8_e4m3fn or int8"),
    (("--scheme", "W8A8", "--ignore", "absent"), "--ignore")])
def test_WhatCannotBeIsRefused(tmp_path, quantctl, calibrated, flags, what):
    del calibrated
    said = quantctl("quantize", MODEL, "-o", tmp_path / "out", "--no-store",
                    *flags, "--include", "*_proj.weight", code=2)
    assert what in said
    assert not (tmp_path / "out").exists()
