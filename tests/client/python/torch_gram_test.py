"""Gram matrices of the inputs of a model's layers, from the hook of torch to
files whose weights are rounded with them."""

import copy
import json
import os
import warnings

import pytest

torch = pytest.importorskip("torch")

# pylint: disable=wrong-import-position
import numpy as np

import networks
import package
import quantd
import quantd.torch
import runtime_rules as rules

DATA = os.path.join(package.ROOT, "tests/data")
DIGITS = os.path.join(DATA, "digits-cnn/model.safetensors")
CHAR_LM = os.path.join(DATA, "char-lm/model.safetensors")

pytestmark = pytest.mark.usefixtures("server")


def rounded(client, model, weight, inputs):
    """With the Gram matrix under that name."""
    return client.quantize(
        weight, "int4:per-channel", name=quantd.TensorName(model, "w"),
        rounding=quantd.Rounding(inputs)).codes.numpy().tobytes()


def rounded_with(client, model, weight, rows):
    """With one of these rows."""
    client.calibrate(
        rows, quantd.TensorName(model, "own"),
        contribution=quantd.Contribution(
            "own", 1, features=quantd.FeatureStatistics()))
    return rounded(client, model, weight, "own")


@pytest.mark.parametrize("options", [
    {}, dict(stride=2, padding=1), dict(padding="same", dilation=2),
    dict(padding=(0, 2), padding_mode="circular")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_is_a_product_of_rows(client, options, dtype):
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 8, (3, 2), bias=False, **options).to(dtype)
    x = torch.randn(4, 3, 9, 10).to(dtype)
    rows = quantd.torch._torch_gram.rows(layer, x).to(dtype)
    # Processors round sums of bfloat16 in different places.
    wide = copy.deepcopy(layer).double()
    with torch.no_grad():
        want = wide(x.double())
        got = rows.double() @ wide.weight.reshape(8, -1).T
    torch.testing.assert_close(
        got.reshape(4, *want.shape[2:], 8).permute(0, 3, 1, 2), want)
    name = f"gram/conv-{len(str(options))}-{dtype}".replace("torch.", "")
    with quantd.torch.calibrate(layer, client, model_name=name, source="s",
                                features="gram") as calibration:
        layer(x)
    assert calibration.inputs == {"weight": "input"}
    weight = layer.weight.detach().float()
    assert rounded(client, name, weight, "input") == rounded_with(
        client, name, weight, rows)


class Block(torch.nn.Module):

    def __init__(self):
        super().__init__()
        for name in "qkv":
            setattr(self, name + "_proj", torch.nn.Linear(16, 16))
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)
        self.depthwise = torch.nn.Conv1d(4, 4, 1, groups=4)

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        mixed = self.q_proj(x) * self.k_proj(memory) + self.v_proj(memory)
        hidden = self.up(mixed)
        return self.down(torch.nn.functional.relu_(hidden))


def test_inputs_of_several_layers_are_counted_once(client):
    torch.manual_seed(0)
    model = Block()
    batches = [torch.randn(2, 5, 16) for _ in range(3)]
    with pytest.warns(RuntimeWarning, match=r"depthwise \(Conv1d is neither"):
        block = quantd.torch.calibrate(
            model, client, model_name="gram/shared", source="s",
            features="gram")
    with block as calibration:
        for x in batches:
            model(x)
        # Of an input that stays at hand each run counts.
        model(batches[0])
        calibration.flush()
        assert calibration.sequences == {
            "q_proj.input": 4, "up.input": 4, "down.input": 4}
    assert calibration.inputs == {
        "q_proj.weight": "q_proj.input", "k_proj.weight": "q_proj.input",
        "v_proj.weight": "q_proj.input", "up.weight": "up.input",
        "down.weight": "down.input"}
    assert list(calibration.left_out) == ["depthwise"]
    rows = torch.cat([*batches, batches[0]]).reshape(-1, 16)
    weight = model.k_proj.weight.detach()
    # The first batch sets the steps.
    for sequence, part in enumerate((rows[:10], rows[10:]), 1):
        client.calibrate(
            part, quantd.TensorName("gram/shared", "own"),
            contribution=quantd.Contribution(
                "own", sequence, features=quantd.FeatureStatistics()))
    assert rounded(client, "gram/shared", weight, "q_proj.input") == rounded(
        client, "gram/shared", weight, "own")


def test_inputs_that_part_are_told(client):
    model = Block()
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    with quantd.torch.calibrate(
            model, client, model_name="gram/parted", source="s",
            modules=["*_proj"], features="gram") as calibration:
        model(x)
        with pytest.warns(RuntimeWarning, match="k_proj.input was counted"):
            model(x, memory)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x, memory)
    assert calibration.inputs == {
        "q_proj.weight": "q_proj.input", "k_proj.weight": "k_proj.input",
        "v_proj.weight": "v_proj.input"}
    assert calibration.sequences == {
        "q_proj.input": 3, "k_proj.input": 2, "v_proj.input": 2}


def test_a_tensor_that_changed_is_another(client):

    class Model(torch.nn.Module):

        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(4, 4)
            self.b = torch.nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return y + self.b(x.add_(1))

    model = Model()
    with quantd.torch.calibrate(
            model, client, model_name="gram/changed", source="s",
            features="gram") as calibration, torch.no_grad():
        model(torch.ones(3, 4))
    assert calibration.inputs == {"a.weight": "a.input", "b.weight": "b.input"}


def test_what_has_no_room_is_told(client):
    model = torch.nn.Linear(4, 4)
    with pytest.warns(RuntimeWarning, match="input: 12 elements of a batch"):
        with quantd.torch.calibrate(
                model, client, model_name="gram/clipped", source="s",
                features="gram"):
            for factor in (1, 100, 1000):
                model(factor * torch.ones(3, 4))


@pytest.mark.parametrize("options,match", [
    (dict(features="grams"), "expected one of"),
    (dict(features="gram", record=("output",)), "inputs only"),
    (dict(features="gram", modules=["depthwise"]), "Linear or Conv2d")])
def test_what_cannot_be_is_refused(client, options, match):
    with pytest.raises(quantd.QuantdError, match=match):
        quantd.torch.calibrate(Block(), client, model_name="gram/no",
                               source="s", **options)


def sqnr_db(values, others):
    error = np.square(others.astype(np.float64) - values).sum()
    return 10 * np.log10(np.square(values.astype(np.float64)).sum() / error)


@pytest.fixture(name="digits", scope="module")
def fixture_digits(client):
    """Calibrated as model "gram/digits"; its weights, and data for a test."""
    weights = rules.read_tensors(DIGITS)
    images = rules.read_tensors(os.path.join(
        DATA, "digits-cnn/activations.safetensors"))["conv1.input"]
    network = networks.Digits(weights)
    with quantd.torch.calibrate(
            network, client, model_name="gram/digits", source="s",
            features="gram"), torch.no_grad():
        for batch in torch.from_numpy(images.copy()).split(64):
            network(batch)
    return weights, rules.read_tensors(os.path.join(
        DATA, "digits-cnn/test.safetensors"))


def digits_sqnr_db(quantctl, folder, test, *flags):
    out = folder / "out.safetensors"
    quantctl("quantize", DIGITS, "-o", out, "--force", *flags)
    quantctl("dequantize", out, "-o", folder / "back.safetensors", "--force")
    logits = rules.digits(rules.read_tensors(folder / "back.safetensors"),
                          test["images"], lambda _, x: x)
    return sqnr_db(test["logits_fp32"], logits)


def test_digits_keep_their_logits(tmp_path, quantctl, digits):
    _, test = digits
    spec = ("--spec", "int4:per-channel")
    nearest = digits_sqnr_db(quantctl, tmp_path, test, *spec)
    compensated = digits_sqnr_db(
        quantctl, tmp_path, test, *spec, "--rounding", "compensated",
        "--inputs", "gram/digits")
    print(f"int4 per channel: {nearest:.1f} dB, {compensated:.1f} dB")
    assert compensated > 36
    assert compensated > nearest + 8
    other = digits_sqnr_db(
        quantctl, tmp_path, test, *spec, "--rounding", "compensated",
        "--inputs", "gram/digits@main", "--damping", "100",
        "--column-order", "natural")
    assert nearest - 1 < other < compensated - 5


def test_a_language_model_goes_to_a_folder_for_vllm(tmp_path, quantctl, client):
    weights = rules.read_tensors(CHAR_LM)
    sequences = rules.read_tensors(os.path.join(
        DATA, "char-lm/bytes.safetensors"))
    network = networks.LanguageModel(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = quantd.torch.calibrate(
            network, client, model_name="gram/lm", source="s", features="gram",
            modules=["*_proj", "head"])
    with block as calibration, torch.no_grad():
        ids = torch.from_numpy(sequences["calibration"][:48, :-1].astype(
            np.int64))
        for batch in ids.split(16):
            network(batch)
    assert calibration.inputs["layers.1.attention.v_proj.weight"] == (
        "layers.1.attention.q_proj.input")
    (tmp_path / "inputs.json").write_text(json.dumps(calibration.inputs))
    ids = sequences["validation"][:8, :-1]
    want = rules.language_model(weights, ids, lambda _, x: x)
    found = {}
    for name, flags in (
            ("nearest", ()),
            ("compensated", ("--rounding", "compensated", "--inputs",
                             "gram/lm")),
            ("mapped", ("--rounding", "compensated", "--inputs", "gram/lm",
                        "--inputs-map", tmp_path / "inputs.json"))):
        report = quantctl(
            "quantize", CHAR_LM, "-o", tmp_path / name, "--layout",
            "compressed-tensors", "--spec", "*_proj.weight=int4:per-channel",
            "--json", *flags)
        roundings = {tensor["rounding"] for tensor in report["tensors"]
                     if tensor["result"] == "quantized"}
        assert roundings == {"nearest" if name == "nearest" else "compensated"}
        folder = rules.Folder(tmp_path / name)
        found[name] = sqnr_db(want, rules.language_model(
            folder.weights, ids, folder.inputs))
    print(found)
    assert found["compensated"] > found["nearest"] + 4
    # What runtimes fuse is found without the map.
    assert (tmp_path / "mapped/model.safetensors").stat().st_size == (
        tmp_path / "compensated/model.safetensors").stat().st_size
    assert found["mapped"] == found["compensated"]


def test_the_noise_at_the_output_is_told(tmp_path, quantctl, client, digits):
    weights, _ = digits
    out = tmp_path / "out"
    out.mkdir()
    flags = ("quantize", DIGITS, "-o", out / "a.safetensors", "--spec",
             "int4:per-channel", "--rounding", "compensated", "--inputs",
             "gram/digits")
    table = quantctl(*flags)
    assert "OUTPUT DB" in table
    report = quantctl(*flags, "--force", "--json")
    told = {tensor["name"]: tensor["output_noise"]["sqnr_db"]
            for tensor in report["tensors"] if "output_noise" in tensor}
    assert set(told) == {name for name in weights if name.endswith("weight")}
    model = quantd.quantize_model(
        DIGITS, out / "b.safetensors", "int4:per-channel", client=client,
        rounding=quantd.ModelRounding("gram/digits"))
    for tensor in model.tensors:
        if tensor.name in told:
            assert tensor.output_noise.sqnr_db == pytest.approx(
                told[tensor.name])
    # One input is limited: the first contribution had none like it.
    for sequence, large in ((1, 1), (2, 1000)):
        x = np.ones((4, 128), np.float32)
        x[0, 0] = large
        client.calibrate(x, quantd.TensorName("gram/limited", "fc2.input"),
                         contribution=quantd.Contribution(
                             "s", sequence,
                             features=quantd.FeatureStatistics()))
    for command in (
            ("quantize", DIGITS, "-o", out / "c.safetensors", "--spec",
             "fc2*=int4:per-channel", "--rounding", "compensated"),
            ("evaluate", DIGITS, "--include", "fc2.weight", "--spec", "int4")):
        said = quantctl(*command, "--inputs", "gram/limited")
        assert ("fc2.weight has inputs that are larger than its Gram matrix "
                "holds, and count as smaller: 1;") in said


def codes_of(path):
    return {name: tensor.codes.tobytes()
            for name, tensor in quantd.load(path).items()
            if isinstance(tensor, quantd.QuantizedTensor)}


def test_what_has_no_inputs_is_told(tmp_path, quantctl, client, digits):
    del digits
    out = tmp_path / "out.safetensors"
    flags = ("quantize", DIGITS, "-o", out, "--force", "--rounding",
             "compensated", "--inputs", "gram/part")
    said = quantctl(*flags, "--spec", "int4", code=2)
    assert "got none for the tensors" in said and not out.exists()
    client.calibrate(
        np.ones((3, 128), np.float32),
        quantd.TensorName("gram/part", "fc2.input"),
        contribution=quantd.Contribution(
            "s", 1, features=quantd.FeatureStatistics()))
    # Statistics alone do not help.
    client.calibrate(np.ones((3, 1024), np.float32),
                     quantd.TensorName("gram/part", "fc1.input"),
                     contribution=quantd.Contribution("s", 1))
    said = quantctl(*flags, "--spec", "int4")
    assert "is stored: conv1.weight, conv2.weight, fc1.weight" in said
    assert "int4, compensated" in said
    said = quantctl(*flags, "--spec", "conv1*=int4", "--spec", "int4", code=1)
    assert "asked for, but rounded to the nearest" in said
    # No matrix, or one of other features, fails the tensor.
    client.calibrate(
        np.ones((3, 4), np.float32),
        quantd.TensorName("gram/part", "conv2.input"),
        contribution=quantd.Contribution(
            "s", 1, features=quantd.FeatureStatistics()))
    out.unlink()
    said = quantctl(*flags, "--spec", "int4", code=1)
    assert "GRAM_INVALID" in said and not out.exists()


@pytest.mark.parametrize("flags,match", [
    (("--inputs", "gram/digits"), "with --rounding compensated"),
    (("--damping", "1"), "with --rounding compensated"),
    (("--rounding", "compensated"), "expected --inputs or --model"),
    (("--rounding", "compensated", "--model", "gram/digits", "--evaluate"),
     "without --evaluate"),
    (("--rounding", "compensated", "--model", "gram/digits", "--damping=-1"),
     "at least 0")])
def test_quantctl_refuses_what_does_not_go_together(tmp_path, quantctl, digits,
                                                    flags, match):
    del digits
    out = tmp_path / "out.safetensors"
    assert match in quantctl("quantize", DIGITS, "-o", out, *flags, code=2)
    assert not out.exists()


def test_gguf_rounds_what_the_server_quantizes(tmp_path, quantctl, digits):
    del digits
    out = tmp_path / "out.gguf"
    flags = ("--rounding", "compensated", "--inputs", "gram/digits",
             "--include", "fc2.weight")
    said = quantctl("quantize", DIGITS, "-o", out, *flags, "--spec", "q4_K",
                    code=2)
    assert "quantctl makes its blocks itself" in said and not out.exists()
    said = quantctl("quantize", DIGITS, "-o", out, *flags, "--spec",
                    "int4:group:32:scale=float16")
    assert "compensated" in said


def test_parts_and_later_runs_have_the_same_codes(tmp_path, quantctl, client,
                                                  digits):
    del digits
    source = tmp_path / "model"
    source.mkdir()
    os.symlink(DIGITS, source / "model.safetensors")
    flags = ("--spec", "int4:group:32", "--rounding", "compensated",
             "--inputs", "gram/digits")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    quantctl("quantize", source, "-o", whole, *flags)
    assert "kept" in quantctl("quantize", source, "-o", whole, *flags)
    said = quantctl("quantize", source, "-o", whole, *flags, "--damping", ".1",
                    code=4)
    assert "--rounding" in said
    for part in ("0/2", "1/2"):
        quantctl("quantize", source, "-o", parts, *flags, "--part", part)
    quantctl("quantize", source, "-o", parts, *flags, "--join")
    assert codes_of(whole) == codes_of(parts)
    # More inputs make other codes: nothing of an earlier run is kept.
    client.calibrate(
        np.ones((1, 128), np.float32),
        quantd.TensorName("gram/digits", "fc2.input"),
        contribution=quantd.Contribution(
            "late", 1, features=quantd.FeatureStatistics()))
    assert "kept" not in quantctl("quantize", source, "-o", whole, *flags)


def test_python_writes_what_quantctl_writes(tmp_path, quantctl, client, digits):
    weights, test = digits
    source = tmp_path / "model"
    source.mkdir()
    os.symlink(DIGITS, source / "model.safetensors")
    out = tmp_path / "out"
    inputs = {"fc2.weight": "not-there"}
    (tmp_path / "inputs.json").write_text(json.dumps(inputs))
    quantctl("quantize", source, "-o", out, "--spec", "int4:per-channel",
             "--rounding", "compensated", "--inputs", "gram/digits",
             "--inputs-map", tmp_path / "inputs.json", "--damping", "0.02",
             "--column-order", "natural")
    rounding = quantd.ModelRounding("gram/digits", inputs=inputs, damping=.02,
                                    column_order="natural")
    # With the same keys: it goes on with what quantctl has begun.
    kept = quantd.quantize_model(source, out, "int4:per-channel",
                                 client=client, rounding=rounding)
    want = {"conv1.weight": "compensated", "conv2.weight": "compensated",
            "fc1.weight": "compensated", "fc2.weight": "nearest"}
    for done in (kept, quantd.quantize_model(
            DIGITS, tmp_path / "one.safetensors", "int4:per-channel",
            client=client, rounding=rounding)):
        assert {tensor.name: tensor.rounding for tensor in done.tensors
                if tensor.rounding} == want
    assert {tensor.result for tensor in kept.tensors} == {"kept"}
    assert codes_of(tmp_path / "one.safetensors") == codes_of(out)

    network = networks.Digits(weights)
    done = quantd.torch.quantize_(network, "int4:per-channel", client=client,
                                  rounding=rounding)
    assert {weight.name: weight.rounding for weight in done.replaced} == want
    done = quantd.torch.quantize_(
        network := networks.Digits(weights), "int4:per-channel", client=client,
        rounding=quantd.ModelRounding("gram/digits"))
    with torch.no_grad():
        logits = network(torch.from_numpy(test["images"].copy())).numpy()
    assert sqnr_db(test["logits_fp32"], logits) > 36
    for quantize in (quantd.torch.quantize_, quantd.quantize_model):
        first = ((networks.Digits(weights),) if quantize is
                 quantd.torch.quantize_ else (DIGITS, tmp_path / "no"))
        with pytest.raises(quantd.QuantdError, match="got none for"):
            quantize(*first, "int4", client=client,
                     rounding=quantd.ModelRounding("gram/none"))
