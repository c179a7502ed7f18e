"""Folders of compressed-tensors as vLLM runs them: what it reads of config.json
and of the files gives what the same arithmetic gives straight from the
weights."""

import json
import os
import re
import shutil

import numpy as np
import pytest

import quantd
import runtime_rules as rules

DATA = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../data")
MODEL = os.path.join(DATA, "char-lm/model.safetensors")
# Enough to tell one arithmetic from another; there are 128.
SEQUENCES = int(os.environ.get("QUANTD_RUNTIME_SEQUENCES", "1"))

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
    paths = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for path, tensors in zip(paths, shards):
        quantd.save(folder / path, tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({
        "metadata": {}, "weight_map": {
            name: path for path, tensors in zip(paths, shards)
            for name in tensors}}))
    (folder / "config.json").write_text('{"model_type": "test"}')
    return folder


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
    paths = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for path, tensors in zip(paths, shards):
        quantd.save(folder / path, tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({
        "metadata": {}, "weight_map": {
            name: path for path, tensors in zip(paths, shards)
            for name in tensors}}))
    (folder / "config.json").write_text('{"model_type": "test"}')
    return folder


def read_folder(folder):
    """The configuration and the tensors of all shards."""
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = {path: rules.read_tensors(folder / path)
              for path in set(index["weight_map"].values())}
    return config, {name: shards[path][name]
                    for name, path in index["weight_map"].items()}


def vllm_finds(name, targets):
    return [target for target in targets if (
        re.match(target[3:], name) if target.startswith("re:") else
        target == name)]


@pytest.mark.parametrize("scheme", [name for name in SCHEMES
                                    if name not in ("FP8", "NVFP4")])
def test_ExpertsInOneTensorAreMatrices(tmp_path, quantctl, scheme):
    results = {}
    for layout in ("apart", "rows", "columns"):
        source = write_experts(tmp_path / layout, layout)
        target = tmp_path / f"{layout}-out"
        said = quantctl("quantize", source, "-o", target, "--scheme", scheme,
                        "--no-store")
        assert ("one matrix for each expert" in said) == (layout != "apart")
        assert ("(3 experts, transposed)" in said) == (layout == "columns")
        # The router and what has no kernels for experts.
        assert "left as they are: model.layers.0.mlp.gate" in said
        assert ("no kernels" in said) == (
            scheme in ("MXFP8", "MXFP8A16", "W4A16_ASYM")), said
        results[layout] = read_folder(target)
    config, expected = results["apart"]
    targets = [target for group in config["quantization_config"][
        "config_groups"].values() for target in group["targets"]]
    # What vLLM looks a layer of experts up by, and did up to 0.11.0.
    assert {f"{EXPERTS}.0.{name}_proj" for name in ("gate", "up", "down")
            } < set(targets)
    for name in ("down", "gate", "up"):
        assert vllm_finds(f"re:.*{name}_proj.*", targets)
    assert not vllm_finds("model.layers.0.mlp.up_proj", targets)
    assert len(targets) == 10
    for layout in ("rows", "columns"):
        found_config, found = results[layout]
        assert found_config == config
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, name)
    if scheme == "NVFP4A16":
        # vLLM takes the maximum of an expert's gate and up for both.
        for n in range(3):
            scales = [expected[f"{EXPERTS}.{n}.{which}_proj."
                               "weight_global_scale"]
                      for which in ("gate", "up")]
            assert scales[0] == scales[1]


def test_AMixtureHasTheNamesOfExpertsInOneTensor(tmp_path, quantctl):
    source = write_experts(tmp_path / "rows", "rows")
    mixture = tmp_path / "mixture.txt"
    quantctl("sweep", source, "--spec", "int8", "--spec",
             "int4:group:32", "--max-bits-per-element", "8.5", "-o", mixture)
    names = [f"{EXPERTS}.gate_up_proj=", f"{EXPERTS}.down_proj="]
    specs = mixture.read_text()
    for name in names:
        assert name in specs
    mixture.write_text("".join(f"{name}int4:group:32\n" for name in names))
    quantctl("quantize", source, "-o", tmp_path / "out", "--layout",
             "compressed-tensors", "--no-store", "--spec", f"@{mixture}")
    _, tensors = read_folder(tmp_path / "out")
    for name, groups in (("gate", 12), ("up", 12), ("down", 4)):
        for n in range(3):
            scale = tensors[f"{EXPERTS}.{n}.{name}_proj.weight_scale"]
            assert scale.shape[1] == groups, name
    assert "model.layers.0.mlp.gate.weight" in tensors


@pytest.mark.parametrize("layout, flags", [
    ("apart", ("--spec", "*.down_proj.weight=int4:group:32")),
    ("rows", ("--spec", "*.2.down_proj.weight=int4:group:32")),
    ("apart", ("--exclude", "*.experts.1.*")),
    # The rows of down_proj have less columns than a group.
    ("columns", ("--spec", "*proj*=int4:group:192"))])
def test_ExpertsOfSeveralSchemesAreRefused(tmp_path, quantctl, layout, flags):
    command = ("quantize", write_experts(tmp_path / "plain", layout), "-o",
               tmp_path / "out", "--no-store", "--layout", "compressed-tensors",
               "--spec", "int8:per-channel", *flags)
    said = quantctl(*command, code=2)
    assert f"expected one scheme for all tensors of {EXPERTS}.*, got" in said
    assert not (tmp_path / "out").exists()
    quantctl(*command, "--no-ties")


def test_AModuleIsATargetOrIgnored(tmp_path, quantctl):
    source = write_experts(tmp_path / "plain", "apart")
    quantctl("quantize", source, "-o", tmp_path / "out", "--no-store",
             "--scheme", "W8A8", "--no-ties", "--ignore", "*.experts.0.*")
    config = check_config(tmp_path / "out")
    (group,) = config["config_groups"].values()
    assert f"{EXPERTS}.0.gate_proj" in config["ignore"]
    assert not set(group["targets"]) & set(config["ignore"])


@pytest.mark.parametrize("layout", ["apart", "rows"])
def test_AMixtureHasOneSpecForTheExpertsOfALayer(tmp_path, quantctl, client,
                                                 layout):
    source, mixture = write_experts(tmp_path / "plain", layout), tmp_path / "m"
    specs = ("int8:per-channel", "int4:group:32")
    sweep = ("sweep", source, *(word for spec in specs
                                for word in ("--spec", spec)),
             "--include", "*.experts.*", "--max-bits-per-element", "7")
    quantctl(*sweep, "-o", mixture)
    chosen = dict(line.split("=", 1)
                  for line in mixture.read_text().splitlines())
    assert len(chosen) == (9 if layout == "apart" else 2)
    assert set(chosen.values()) == {"int4:group:32"}
    here = quantd.sweep_model(source, specs, client=client,
                              include=["*.experts.*"], max_bits_per_element=7)
    assert here.mixtures[0].specs == chosen
    quantctl("quantize", source, "-o", tmp_path / "out", "--layout",
             "compressed-tensors", "--no-store", "--spec", f"@{mixture}")
    # Alone some of them had more bits.
    quantctl(*sweep, "--no-ties", "-o", mixture, "--force")
    assert "int8:per-channel" in mixture.read_text()
    here = quantd.sweep_model(source, specs, client=client, ties=False,
                              include=["*.experts.*"], max_bits_per_element=7)
    assert set(here.mixtures[0].specs.values()) == set(specs)


MIXTRAL = "model.layers.{}.block_sparse_moe.experts"


@pytest.mark.parametrize("names", [("w1", "w2", "w3"),
                                   ("up_proj", "down_proj")])
def test_ExpertsAreFoundUnderTheNamesThatVllmLooksUp(tmp_path, quantctl,
                                                     names):
    source = tmp_path / "plain"
    source.mkdir()
    rng = np.random.default_rng(3)
    layers = [MIXTRAL.format(layer) for layer in range(3)]
    tensors = {f"{layer}.{n}.{name}.weight": rng.standard_normal(
        (64, 64), np.float32) for layer in layers for n in (1, 2)
               for name in names}
    quantd.save(source / "model.safetensors", tensors)
    (source / "config.json").write_text("{}")
    out = tmp_path / "out"
    flags = ("--layout", "compressed-tensors", "--no-store", "--spec",
             "int8:per-channel")
    report = quantctl("quantize", source, "-o", out, *flags, "--spec",
                      "model.layers.0.*=int4:group:32", "--exclude",
                      "model.layers.2.*", "--json")
    (warning,) = [text for text in report["warnings"] if "0.11.0" in text]
    assert f"{layers[1]}.*, {layers[2]}.*" in warning
    config = json.loads((out / "config.json").read_text())[
        "quantization_config"]
    bits = {target: group["weights"]["num_bits"]
            for group in config["config_groups"].values()
            for target in group["targets"]}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        looked_up = [f"{layer}.0.{projection}" for layer in layers]
        assert [bits.get(name) for name in looked_up] == [4, 8, None]
        assert [name in config["ignore"] for name in looked_up] == [
            False, False, True]
    assert not vllm_finds("re:.*up_proj.*", bits)
    quantctl("dequantize", out, "-o", tmp_path / "floats")
    assert quantd.load(tmp_path / "floats").keys() == tensors.keys()
    assert set(quantd.load(out)) == tensors.keys()
    # Of one scheme there is nothing to tell.
    report = quantctl("quantize", source, "-o", tmp_path / "one", *flags,
                      "--json")
    assert not [text for text in report["warnings"] if "0.11.0" in text]
    quantctl("dequantize", tmp_path / "one", "-o", tmp_path / "of_one")
    assert set(quantd.load(tmp_path / "one")) == tensors.keys()


def test_PartsShareExpertsOut(tmp_path, quantctl):
    source = write_experts(tmp_path / "plain", "columns")
    flags = ("--scheme", "NVFP4A16", "--no-store")
    quantctl("quantize", source, "-o", tmp_path / "whole", *flags)
    for more in (*(("--part", f"{n}/3") for n in range(3)), ("--join",)):
        quantctl("quantize", source, "-o", tmp_path / "joined", *flags, *more)
    for name in os.listdir(tmp_path / "whole"):
        assert (tmp_path / "joined" / name).read_bytes() == (
            tmp_path / "whole" / name).read_bytes()
    # Nothing is left to do.
    quantctl("quantize", source, "-o", tmp_path / "whole", *flags)


def test_ExpertsWithBiasesAreRefused(tmp_path, quantctl):
    source = write_experts(tmp_path / "plain", "columns")
    quantd.save(source / "model-00001-of-00002.safetensors", {
        f"{EXPERTS}.gate_up_proj": np.ones((3, 384, 256), np.float32),
        f"{EXPERTS}.gate_up_proj_bias": np.ones((3, 256), np.float32)},
                overwrite=True)
    said = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                    "W4A16", "--no-store", code=1)
    assert "without biases" in said
    # A file of quantd has the tensor as it is.
    quantctl("quantize", source, "-o", tmp_path / "own", "--spec", "int8",
             "--no-store")


GRANITE = "model.layers.0.block_sparse_moe"


def write_granite(folder, model_type, names=("input_linear", "output_linear")):
    folder.mkdir()
    rng = np.random.default_rng(3)
    stacks = {"input_linear": rng.standard_normal((3, 256, 128), np.float32),
              "output_linear": rng.standard_normal((3, 128, 128), np.float32)}
    quantd.save(folder / "model.safetensors", {
        **{f"{GRANITE}.{name}.weight": stacks[name] for name in names},
        f"{GRANITE}.router.layer.weight": np.ones((3, 128), np.float32),
        **{f"model.layers.0.mamba.{name}_proj.weight": stacks[
            "output_linear"][0] for name in ("in", "out")}})
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return stacks


@pytest.mark.parametrize("model_type, names", [
    ("granitemoe", ("w1", "w3", "w2")),
    ("granitemoehybrid", ("gate_proj", "up_proj", "down_proj"))])
def test_ExpertsOfGraniteAreMatrices(tmp_path, quantctl, model_type, names):
    stacks = write_granite(tmp_path / "plain", model_type)
    said = quantctl("quantize", tmp_path / "plain", "-o", tmp_path / "out",
                    "--scheme", "FP8_DYNAMIC", "--no-store", "--ignore",
                    "*.router.*", "--ignore", "*.out_proj")
    assert "one matrix for each expert" in said
    tensors = rules.read_tensors(tmp_path / "out" / "model.safetensors")
    halves = [*np.split(stacks["input_linear"], 2, axis=1),
              stacks["output_linear"]]
    for name, weights in zip(names, halves):
        for n, weight in enumerate(weights):
            module = f"{GRANITE}.experts.{n}.{name}.weight"
            reals = rules.decode_e4m3(tensors[module]) * tensors[
                module + "_scale"]
            np.testing.assert_allclose(reals, weight, rtol=.07, atol=.01)
    config = check_config(tmp_path / "out")
    (group,) = config["config_groups"].values()
    looked_up = {f"{GRANITE}.experts.0.{name}_proj"
                 for name in ("gate", "up", "down")}
    assert looked_up < set(group["targets"])
    # vLLM has a mixer by this name.
    assert "model.layers.0.mixer.in_proj" in group["targets"]
    assert config["ignore"] == [
        f"{GRANITE}.router.layer", "model.layers.0.mamba.out_proj",
        "model.layers.0.mixer.out_proj"]
    quantctl("quantize", tmp_path / "plain", "-o", tmp_path / "without",
             "--scheme", "FP8_DYNAMIC", "--no-store", "--exclude",
             "*experts*")
    assert looked_up < set(check_config(tmp_path / "without")["ignore"])


def test_AStackOfExpertsIsNoMatrix(tmp_path, quantctl):
    write_granite(tmp_path / "plain", "granitemoe", ["input_linear"])
    command = ("quantize", tmp_path / "plain", "--scheme", "FP8_DYNAMIC",
               "--no-store")
    said = quantctl(*command, "-o", tmp_path / "out")
    assert (f"as no matrices MODULE.weight: {GRANITE}.input_linear.weight\n"
            in said)
    assert f"{GRANITE}.experts.0.up_proj" in check_config(tmp_path / "out")[
        "ignore"]
    for more in (("--spec", "*=float8_e4m3fn:per-channel"),
                 ("--include", "*input_linear*")):
        said = quantctl(*command, "-o", tmp_path / "named", *more, code=1)
        assert f"{GRANITE}.input_linear.weight" in said
        assert "matrices that are named MODULE.weight" in said


def write_mixture(folder, spec, arrays):
    path = folder / "mixture.txt"
    path.write_text("".join(f"{name}={spec}\n" for name in arrays))
    return f"@{path}"


@pytest.mark.parametrize("which", ["scheme", "spec", "mixture"])
def test_OnlyTheWeightsOfLinearsAreTaken(tmp_path, quantctl, which):
    source = tmp_path / "plain"
    source.mkdir()
    (source / "config.json").write_text("{}")
    matrix = np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)
    others = {
        "visual.patch_embed.proj.weight": np.ones((8, 3, 2, 4, 4), np.float32),
        "layers.0.mixer.conv1d.weight": np.ones((64, 1, 4), np.float32),
        "layers.0.mixer.A_log": matrix, "pos_embed": matrix[None],
        "layers.0.mlp.experts.down_proj_bias": matrix}
    embeddings = {
        "visual.pos_embed.weight": matrix, "shared.weight": matrix,
        "encoder.0.attention.relative_attention_bias.weight": matrix,
        "token_embedding.weight": matrix}
    arrays = {"layers.0.mixer.in_proj.weight": matrix, **others, **embeddings}
    quantd.save(source / "model.safetensors", arrays)
    spec = "int8:per-channel"
    flags = ["--no-store", *{
        "scheme": ("--scheme", "W8A8"), "spec": ("--spec", spec),
        "mixture": ("--spec", write_mixture(tmp_path, spec, arrays))}[which]]
    if which != "scheme":
        flags += ["--layout", "compressed-tensors"]
    report = quantctl("quantize", source, "-o", tmp_path / "out", *flags,
                      "--json")
    assert report["quantized_count"] == 1
    assert sorted(report["no_linear"]) == sorted(others)
    assert sorted(report["ignored"]) == sorted(
        name.removesuffix(".weight") for name in embeddings)
    tensors = rules.read_tensors(tmp_path / "out" / "model.safetensors")
    for name, value in (others | embeddings).items():
        np.testing.assert_array_equal(tensors[name], value)
    # Somebody who names one gets it.
    for name in "conv1d.weight", "A_log":
        said = quantctl("quantize", source, "-o", tmp_path / name, "--spec",
                        f"*{name}=int4", *flags, code=1)
        assert name in said


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


@pytest.mark.parametrize("taken, flags, code", [
    ("layers.0.attn.k_proj.weight_zero_point", (), 1),
    ("layers.0.attn.k_proj.weight_shape", ("--layout", "pack-quantized"), 1),
    ("layers.0.attn.k_proj.input_scale", ("--activations", "static=int8"), 2),
    ("layers.0.attn.k_scale", ("--kv-cache", "float8_e4m3fn"), 2)])
def test_NamesThatAreTakenAreFoundBeforeAnythingIsWritten(
        tmp_path, quantctl, client, taken, flags, code):
    for module in ("q_proj", "k_proj", "v_proj"):
        client.calibrate(np.ones(8, np.float32), quantd.TensorName(
            "taken", f"layers.0.attn.{module}.output"), "float8_e4m3fn")
        client.calibrate(np.ones(8, np.float32), quantd.TensorName(
            "taken", f"layers.0.attn.{module}.input"), "int8")
    flags = ("--scheme", "W8A8", "--model", "taken", "--no-store", "--include",
             "*attn*_proj.weight", *flags)
    quantctl("quantize", write_attention(tmp_path / "free"), "-o",
             tmp_path / "out", *flags)
    written = {name: (tmp_path / "out" / name).read_bytes()
               for name in os.listdir(tmp_path / "out")}
    source = write_attention(tmp_path / "other", more=(taken,))
    said = quantctl("quantize", source, "-o", tmp_path / "out", *flags,
                    "--force", code=code)
    assert f'the file has a tensor "{taken}" of its own' in said
    assert written == {name: (tmp_path / "out" / name).read_bytes()
                       for name in os.listdir(tmp_path / "out")}


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
        said = quantctl("quantize", MODEL, "-o", out, "--layout",
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


def test_HeadEmbeddingsAndRoutersStay(tmp_path, quantctl):
    source = tmp_path / "model"
    source.mkdir()
    rng = np.random.default_rng(1)
    kept = ["embed_out", "gpt_neox.embed_in", "lm_head",
            "model.decoder.embed_positions", "model.embed_tokens",
            "model.layers.0.mlp.router", "net.embed", "wpe", "wte"]
    taken = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"]
    quantd.save(source / "model.safetensors", {
        name + ".weight": rng.standard_normal((32, 64), np.float32)
        for name in kept + taken})
    (source / "config.json").write_text('{"model_type": "test"}')

    def targets(*flags):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        said = quantctl("quantize", source, "-o", tmp_path / "out", "--no-store",
                        "--scheme", "W8A8", *flags)
        config = check_config(tmp_path / "out")
        (group,) = config["config_groups"].values()
        assert sorted(group["targets"] + config["ignore"]) == sorted(
            kept + taken)
        return sorted(group["targets"]), said

    found, said = targets()
    assert found == sorted(taken)
    assert "left as they are: embed_out, gpt_neox.embed_in, lm_head, " in said
    found, said = targets("--ignore", "")
    assert found == sorted(kept + taken)
    assert "left as they are" not in said
    assert targets("--ignore", "*.gate*")[0] == sorted(
        name for name in kept + taken if ".gate" not in name)
    # Who names one takes it.
    assert targets("--spec", "lm_head*=int8:per-channel")[0] == sorted(
        ["lm_head", *taken])
    # No runtime has kernels for all that can be written.
    _, said = targets("--activations", "dynamic=mxfp4_e2m1")
    assert "no kernels" in said
    # A model of nothing but these would have no scheme.
    for flags in ("--exclude", "*mlp*"), ("--ignore", "*"):
        said = quantctl("quantize", source, "-o", tmp_path / "none",
                        "--no-store", "--scheme", "W8A8", *flags, code=2)
        assert "--ignore '' takes them" in said
        assert not (tmp_path / "none").exists()


def write_modules(folder, shapes, dtype=np.float32):
    folder.mkdir()
    rng = np.random.default_rng(1)
    quantd.save(folder / "model.safetensors", {
        name + ".weight": rng.standard_normal(shape, np.float32).astype(dtype)
        for name, shape in shapes.items()})
    (folder / "config.json").write_text('{"model_type": "test"}')
    return folder


def test_WhatVllmHasNoQuantizedLayersForStays(tmp_path, quantctl):
    kept = ["head", "proj_out", "model.layers.61.eh_proj", "text_model.head",
            "model.layers.61.shared_head.head", "model.mtp_linear_proj",
            "model.mtp_layers.0.input_proj",
            *(f"backbone.layers.0.mixer.{name}_proj"
              for name in ("in", "x", "dt", "out"))]
    # Mamba 2 has no x_proj, and others have their own.
    taken = ["backbone.layers.1.mixer.in_proj",
             "backbone.layers.1.mixer.out_proj", "blocks.0.attn.out_proj",
             "vision.input_proj", "blocks.0.proj_out"]
    source = write_modules(tmp_path / "model", dict.fromkeys(
        kept + taken, (32, 64)))
    flags = ("--scheme", "W8A8", "--no-store")
    report = quantctl("quantize", source, "-o", tmp_path / "out", *flags,
                      "--json")
    assert sorted(report["ignored"]) == sorted(kept)
    (group,) = check_config(tmp_path / "out")["config_groups"].values()
    assert sorted(group["targets"]) == sorted(taken)
    report = quantctl("quantize", source, "-o", tmp_path / "named", *flags,
                      "--json", "--spec", "*mixer.x_proj*=int8:per-channel")
    assert "backbone.layers.0.mixer.x_proj" not in report["ignored"]


LLAMA4_VISION = ["vision_model.patch_embedding.linear",
                 "vision_model.model.layers.0.self_attn.q_proj",
                 "vision_model.vision_adapter.mlp.fc1",
                 "multi_modal_projector.linear_1"]


@pytest.mark.parametrize("kept, taken", [
    (LLAMA4_VISION, ["language_model.model.layers.0.self_attn.q_proj"]),
    # Of other models vLLM quantizes modules of these names.
    ([], LLAMA4_VISION[1:3]),
    (["mlp1.1", "mlp1.3", "vision_model.encoder.layers.0.attn.qkv"],
     ["language_model.model.layers.0.mlp1_proj"]),
    (["model.audio_tower.conformer.0.attention.attn.q_proj",
      "model.embed_audio.embedding_projection"],
     ["model.language_model.layers.0.self_attn.q_proj"]),
    (["audio_tower.layers.0.fc1", "multi_modal_projector.linear"],
     ["language_model.model.layers.0.mlp.up_proj"]),
    (["model.vision_tower.encoder.layers.0.self_attn.q_proj.linear",
      "model.vision_tower.patch_embedder.input_proj"],
     ["model.vision_tower.encoder.layers.0.self_attn.q_proj",
      "model.layers.0.linear"]),
    # Of SigLIP, with sizes that are no multiples of 64.
    (["vision_tower.vision_model.encoder.layers.0.mlp.fc1",
      "vision_model.head.mlp.fc2"],
     ["vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
      "model.decoder.layers.0.fc1"]),
    # That of RWKV is no router.
    ([], ["blocks.0.attention.gate"]),
    (["model.multi_modal_projector.patch_merger.merging_layer",
      "model.multi_modal_projector.linear_1"],
     ["model.vision_tower.transformer.layers.0.attention.q_proj"]),
    # In Mistral's own files, and of DeepSeek-VL2.
    (["output", "patch_merger.merging_layer", "vision_language_adapter.w_in",
      "vision_encoder.transformer.layers.0.attention.wq"],
     ["layers.0.attention.wq"]),
    (["projector.layers.0", "vision.blocks.0.attn.qkv"],
     ["language.model.layers.0.self_attn.q_proj"]),
    (["model.layers.0.conv.in_proj", "model.layers.0.conv.out_proj"],
     ["model.layers.1.self_attn.out_proj", "model.layers.2.mixer.in_proj"]),
    (["model.layers.0.mlp.gate.wg"], ["model.layers.0.mlp.shared_mlp.up_proj"]),
    (["model.layers.0.attn.Wqkv", "model.layers.0.attn.Wo",
      "model.layers.0.mlp.Wi", "model.layers.0.mlp.Wo", "decoder",
      "head.dense"],
     # Of Nomic's BERT.
     ["encoder.layers.0.attn.Wqkv", "encoder.layers.0.mlp.fc11"]),
    # Heads.
    (["language_model.output", "transformer.output_layer",
      "model.transformer.ff_out", "score", "classifier.dense",
      "v_head.summary",
      "cls.predictions.transform.dense", "lm_head.dense", "bert.pooler.dense"],
     ["model.transformer.blocks.0.ff_out",
      "encoder.layer.0.attention.output.dense"]),
    (["model.emb", "model.query_embed"], ["blocks.0.attention.output"]),
    (["model.layers.0.self_attn.indexer.weights_proj",
      "model.layers.0.self_attn.indexer.wk"],
     ["model.layers.0.self_attn.indexer.wq_b"])])
def test_WhatVllmBuildsWithoutQuantizationStays(tmp_path, quantctl, kept,
                                                taken):
    source = write_modules(tmp_path / "model", dict.fromkeys(
        kept + taken, (32, 64)))
    report = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                      "W8A8", "--no-store", "--json")
    assert sorted(report["ignored"]) == sorted(kept)
    config = check_config(tmp_path / "out")
    assert sorted(config["ignore"]) == sorted(kept)
    (group,) = config["config_groups"].values()
    assert sorted(group["targets"]) == sorted(taken)


def test_HeadsAndEmbeddingsThatAreAskedForAreTold(tmp_path, quantctl):
    source = write_modules(tmp_path / "model", dict.fromkeys((
        "model.embed_tokens", "lm_head", "score",
        "model.layers.0.self_attn.o_proj"), (128, 128)))
    flags = ("--layout", "compressed-tensors", "--no-store", "--json",
             "--spec", "*o_proj*=int4:group:128")

    def warnings_of(*more):
        return quantctl("quantize", source, "-o", tmp_path / "out", "--force",
                        *flags, *more)["warnings"]

    embeddings = "vLLM has no quantized embeddings: model.embed_tokens.weight;"
    heads = ("vLLM before mid-2026 has no quantized heads, and later ones not "
             "for all schemes: lm_head.weight;")
    assert warnings_of() == []
    (told,) = warnings_of("--spec", "*embed_tokens*=int4:group:128")
    assert told.startswith(embeddings)
    (told,) = warnings_of("--spec", "lm_head*=int4:group:128")
    assert told.startswith(heads)
    assert warnings_of("--spec", "score*=int4:group:128") == []
    told = warnings_of("--ignore", "", "--spec", "int4:group:128")
    assert [text.split(";")[0] + ";" for text in told] == [heads, embeddings]


def test_WeightsOfConv1dStay(tmp_path, quantctl):
    conv1d = {"h.0.attn.c_attn": (64, 192), "h.0.attn.c_proj": (64, 64),
              "h.0.mlp.c_fc": (64, 256), "h.0.mlp.c_proj": (256, 64)}
    flags = ("--scheme", "W8A8", "--no-store")
    source = write_modules(tmp_path / "gpt2", {"wte": (96, 64), **conv1d})
    said = quantctl("quantize", source, "-o", tmp_path / "none", *flags, code=2)
    assert "expected modules to quantize" in said and "Conv1D" in said
    assert not (tmp_path / "none").exists()
    source = write_modules(tmp_path / "both", {
        "encoder.0.q_proj": (64, 64), **{"decoder." + name: shape
                                         for name, shape in conv1d.items()}})
    for more in (flags, ("--layout", "compressed-tensors", "--no-store")):
        out = tmp_path / more[0]
        report = quantctl("quantize", source, "-o", out, *more, "--json")
        assert report["conv1d"] == sorted(
            f"decoder.{name}.weight" for name in conv1d)
        (group,) = check_config(out)["config_groups"].values()
        assert group["targets"] == ["encoder.0.q_proj"]
    said = quantctl("quantize", source, "-o", tmp_path / "told", *flags)
    assert "left as they are: decoder.h.0.attn.c_attn.weight, " in said
    said = quantctl("quantize", source, "-o", tmp_path / "named", *flags,
                    "--include", "*c_fc*", code=1)
    assert "decoder.h.0.mlp.c_fc.weight" in said and "Conv1D" in said
    # Of others it lies [out, in].
    source = write_modules(tmp_path / "qwen", {
        name: shape[::-1] for name, shape in conv1d.items()})
    report = quantctl("quantize", source, "-o", tmp_path / "out", *flags,
                      "--json")
    assert report["quantized_count"] == 4 and not report["conv1d"]


def test_WhatFitsOrIsNotOfTorchIsTaken(tmp_path, quantctl):
    source = write_modules(tmp_path / "model", {
        "vision_model.encoder.layers.0.mlp.fc1": (128, 64),
        "attn.out_proj": (64, 64), "resampler.attn.out_proj": (64, 64)})
    tensors = dict(quantd.load(source / "model.safetensors"))
    quantd.save(source / "model.safetensors", {
        **tensors, "resampler.attn.in_proj_weight": np.ones(
            (192, 64), np.float32)}, overwrite=True)
    report = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                      "W8A8", "--no-store", "--json")
    assert report["ignored"] == ["resampler.attn.out_proj"]
    assert report["quantized_count"] == 2


@pytest.mark.parametrize("more, others", [
    ({"experts.0.up_proj": (64, 64), "experts.0.down_proj": (64, 64)},
     ["experts.0.down_proj", "experts.0.up_proj"]),
    ({"experts.gate_up_proj": (4, 128, 64), "experts.down_proj": (4, 64, 64)},
     [f"experts.{n}.{name}_proj" for n in range(4)
      for name in ("down", "gate", "up")]),
    # Without "experts", a stack of as many matrices.
    ({"up_proj": (4, 64, 64), "o_proj": (64, 64)}, ["o_proj"])])
def test_ARouterIsAGateBesideExperts(tmp_path, quantctl, more, others):
    source = write_modules(tmp_path / "model", {"mlp.gate": (4, 64), **{
        "mlp." + name: shape for name, shape in more.items()}})
    report = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                      "W8A8", "--no-store", "--json")
    assert report["ignored"] == ["mlp.gate"]
    quantized = [row["name"] for row in report["tensors"]
                 if row["result"] == "quantized"]
    assert sorted(quantized) == [f"mlp.{name}.weight" for name in others]


@pytest.mark.parametrize("shapes, flags, told", [
    ({"o_proj": (64, 128), "down": (128, 256)}, (), None),
    ({"o_proj": (96, 128), "down": (64, 128)}, (), "o_proj.weight"),
    ({"o_proj": (64, 192)}, ("--spec", "int4:group:64"), "o_proj.weight"),
    ({"o_proj": (64, 192)}, ("--spec", "int4:per-channel"), "o_proj.weight"),
    ({"o_proj": (64, 128)}, ("--spec", "int4:group:16"), "o_proj.weight"),
    ({"o_proj": (64, 128)}, ("--spec", "int4:group:64"), None),
    ({"o_proj": (64, 128)}, ("--spec", "int4:per-channel"), None),
    ({"o_proj": (96, 128)}, ("--scheme", "W8A16"), "o_proj.weight"),
    ({"o_proj": (96, 128)}, ("--scheme", "W4A16_ASYM"), "o_proj.weight"),
    ({"o_proj": (96, 128)}, ("--scheme", "W8A8"), None),
    ({"o_proj": (96, 128)}, ("--scheme", "FP8_DYNAMIC"), None),
    # Of fused matrices the sum counts.
    ({"q_proj": (64, 128), "k_proj": (32, 128), "v_proj": (32, 128)}, (), None),
    ({"gate_proj": (80, 128), "up_proj": (80, 128)}, (),
     "{gate,up}_proj.weight"),
    # Of floats, Marlin has two tiles.
    *(({"o_proj": shape}, flags, told)
      for flags in [("--spec", "float8_e4m3fn:per-channel"),
                    ("--scheme", "NVFP4A16"), ("--scheme", "MXFP4A16"),
                    ("--scheme", "MXFP8A16")]
      for shape, told in [((64, 128), None), ((128, 64), None),
                          ((64, 64), "o_proj.weight"),
                          ((96, 128), "o_proj.weight")]),
    ({"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64)},
     ("--scheme", "NVFP4A16"), None),
    # CUTLASS has one for groups of int4.
    ({"o_proj": (128, 256), "down": (256, 128)}, ("--scheme", "W4AFP8"), None),
    ({"o_proj": (64, 128)}, ("--scheme", "W4AFP8"), "o_proj.weight"),
    ({"q_proj": (64, 128), "k_proj": (32, 128), "v_proj": (32, 128)},
     ("--scheme", "W4AFP8"), None),
    # Machete alone has zero points of eight bits.
    ({"o_proj": (128, 128)}, ("--spec", "uint8:group:128", "--layout",
                              "pack-quantized"), "o_proj.weight"),
    ({"o_proj": (128, 128)}, ("--spec", "int8:group:128", "--layout",
                              "pack-quantized"), None),
    # Experts have other kernels too.
    ({"experts.0.up_proj": (96, 128), "experts.0.down_proj": (128, 128)}, (),
     None)])
def test_ShapesThatKernelsDoNotTakeAreTold(tmp_path, quantctl, shapes, flags,
                                           told):
    source = write_modules(tmp_path / "model", {
        "mlp." + name: shape for name, shape in shapes.items()})
    if "--spec" in flags and "--layout" not in flags:
        flags += ("--layout", "compressed-tensors")
    command = ("quantize", source, "-o", tmp_path / "out", "--no-store",
               *(flags or ("--scheme", "W4A16")))
    warnings = [text for text in quantctl(*command, "--json")["warnings"]
                if "vLLM's" in text]
    if told is None:
        assert not warnings
        return
    (warning,) = warnings
    assert f": mlp.{told}; --exclude" in warning
    for words, kernels in {"float8": "floats", "A16": "Marlin",
                           "W4AFP8": "float8 inputs",
                           "uint8": "Hopper"}.items():
        assert words not in "".join(flags[1:2]) or kernels in warning
    assert f"quantctl: warning: {warning}" in quantctl(*command)


@pytest.mark.parametrize("rows, label", [
    ((256, 128, 128, 256, 256), None), ((256, 64, 64, 256, 256), "attn"),
    ((256, 128, 128, 192, 192), "mlp"), ((256, 64, 128, 256, 256), "attn"),
    ((192, 128, 128, 256, 256), "attn"),
    # Only the last of fused matrices may end within a block.
    ((256, 128, 64, 256, 256), None), ((256, 128, 128, 256, 192), None)])
def test_FusedRowsThatAreNoWholeBlocksAreTold(tmp_path, quantctl, rows, label):
    names = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj",
             "mlp.up_proj")
    source = write_modules(tmp_path / "model", {
        "attn.o_proj": (192, 256),
        **{name: (count, 256) for name, count in zip(names, rows)}})
    said = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                    "FP8_BLOCK", "--no-store")
    assert ("no whole blocks" in said) == (label is not None), said
    if label:
        assert f"whole blocks: {label}.{{" in said


@pytest.mark.parametrize("shape, config, is_told", [
    # 16 heads of 16; 256, 64 and 64 rows.
    ((384, 128), {"num_key_value_heads": 4}, True),
    ((512, 128), {"num_key_value_heads": 8}, False),
    ((768, 128), {}, False), ((960, 128), {"head_dim": 20}, True),
    ((384, 128), {"num_key_value_heads": 4, "head_dim": None}, True),
    # Nobody knows which parts these are.
    ((320, 128), {}, False)])
def test_MatricesInOneWithoutWholeBlocksAreTold(tmp_path, quantctl, shape,
                                                config, is_told):
    source = write_modules(tmp_path / "model", {
        "attn.qkv_proj": shape, "mlp.gate_up_proj": (512, 128)})
    heads = {"num_attention_heads": 16, "head_dim": 16, "hidden_size": 256}
    (source / "config.json").write_text(json.dumps(
        {"text_config": {**heads, **config}}))
    warnings = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                        "FP8_BLOCK", "--no-store", "--json")["warnings"]
    assert len(warnings) == is_told
    assert not warnings or "whole blocks: attn.qkv_proj.weight; take" in (
        warnings[0])


def test_HalvesInOneWithoutWholeBlocksAreTold(tmp_path, quantctl):
    source = write_modules(tmp_path / "model", {
        "mlp.gate_up_proj": (384, 128), "mlp.down_proj": (128, 192)})
    said = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                    "FP8_BLOCK", "--no-store", "--exclude", "*.down_proj.*")
    assert "whole blocks: mlp.gate_up_proj.weight; take" in said


@pytest.mark.parametrize("model_dtype", ["BF16", "F16"])
@pytest.mark.parametrize("scheme", [name for name in SCHEMES
                                    if name not in ("FP8", "NVFP4")])
def test_ScalesThatRuntimesHoldInTheTypeOfTheModelAreWrittenSo(
        tmp_path, quantctl, scheme, model_dtype):
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((8, 256), np.float32)
    # So small that float16 has few numbers for the scale.
    weight[0] *= 2. ** -19
    if model_dtype == "BF16":
        halves = (weight.view(np.uint32) >> 16).astype(np.uint16)
        weight = (halves.astype(np.uint32) << 16).view(np.float32)
    else:
        halves = weight.astype(np.float16)
        weight = halves.astype(np.float32)
    with open(source / "model.safetensors", "wb") as file:
        header = json.dumps({name: {
            "dtype": dtype, "shape": [8, 256], "data_offsets": [begin, end]}
            for name, dtype, begin, end in (
                ("a.weight", model_dtype, 0, 4096),
                ("b.weight", "F32", 4096, 12288))}).encode()
        file.write(len(header).to_bytes(8, "little") + header +
                   halves.tobytes() + weight.tobytes())
    said = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                    scheme, "--no-store")
    with open(tmp_path / "out" / "model.safetensors", "rb") as file:
        data = file.read()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    dtype = header["a.weight_scale"]["dtype"]
    is_model_scale = scheme in ("W4A16", "W4A16_ASYM", "W8A16")
    assert (dtype == model_dtype) == is_model_scale
    assert ("a.weight: 2 scales are below 2^-20" in said) == (
        is_model_scale and model_dtype == "F16")
    assert "b.weight: 2 scales" not in said
    assert header["b.weight_scale"]["dtype"] == (
        "F32" if is_model_scale else dtype)
    if not is_model_scale:
        return

    def part(name, dtype):
        info = header[f"a.weight_{name}"]
        return np.frombuffer(data[start:][slice(*info["data_offsets"])],
                             dtype).reshape(info["shape"])

    # The codes are the nearest with the scales that are written.
    scale = part("scale", np.uint16)
    scale = ((scale.astype(np.uint32) << 16).view(np.float32)
             if model_dtype == "BF16" else
             scale.view(np.float16).astype(np.float32))
    bits = 8 if scheme == "W8A16" else 4
    codes = rules.unpack_words(part("packed", np.int32), bits, 256)
    zeros, half = np.zeros((8, 2)), 1 << bits - 1
    if scheme == "W4A16_ASYM":
        zeros = rules.unpack_words(np.ascontiguousarray(
            part("zero_point", np.int32).T), bits, 8).T
    zeros, scale = np.repeat(zeros, 128, 1), np.repeat(scale, 128, 1)
    exact = np.clip(np.round(weight / scale) + zeros, -half, half - 1)
    np.testing.assert_array_equal(codes, exact)
