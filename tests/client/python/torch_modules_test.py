"""quantize_: models of torch that run on codes."""

import copy
import math
import pickle

import pytest

torch = pytest.importorskip("torch")

# pylint: disable=wrong-import-position
import quantd
import quantd.torch
from quantd.tensor import FORMATS

# Started before gRPC has threads.
pytestmark = pytest.mark.usefixtures("server")

SPECS = ["int8:per-channel", "int8", "int4:group:16:asymmetric", "uint8",
         "uint16:asymmetric", "int32:per-channel",
         "int4:group:8:asymmetric:real-zero-point", "int2:group:16",
         "int3:group:7", "nvfp4",
         "mxfp4_e2m1", "mxint8", "lpbq", "nf4", "float8_e4m3fn:per-channel",
         "float8_e5m2", "int8:block=8,8", "int8:scale=bfloat16",
         "codebook4:entries=" + ",".join(map(str, range(-8, 8)))]


def raised(call, *arguments, **keywords):
    with pytest.raises(quantd.QuantdError) as caught:
        call(*arguments, **keywords)
    return caught.value


class Layers(torch.nn.Module):
    """One of each kind that is replaced."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(20, 48, padding_idx=3)
        self.linear = torch.nn.Linear(48, 48)
        self.conv1 = torch.nn.Conv1d(4, 6, 3, padding=2,
                                     padding_mode="circular")
        self.conv2 = torch.nn.Conv2d(6, 4, (3, 1), stride=2, groups=2)
        self.conv3 = torch.nn.Conv3d(1, 2, 2, dilation=1, bias=False)

    def forward(self, tokens):
        x = self.linear(self.embed(tokens))
        x = self.conv1(x.reshape(-1, 4, 12))
        x = self.conv2(x.reshape(-1, 6, 7, 2))
        return self.conv3(x.reshape(-1, 1, 4, 3, 1).repeat(1, 1, 1, 1, 2))


TOKENS = torch.arange(20).reshape(4, 5)


def with_reals(client, model, specs):
    """The model with what the codes of its weights stand for."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if parameter.dim() > 1:
                spec = specs.get(name) if isinstance(specs, dict) else specs
                parameter.copy_(quantd.torch.dequantize(
                    client.quantize(parameter, spec)))
    return twin


@pytest.mark.parametrize("spec", SPECS)
def test_OutputsAreThoseOfTheReals(client, spec):
    model = Layers()
    specs = {"linear.weight": spec, "embed.weight": spec,
             "conv1.weight": "int8:per-channel", "conv2.weight": "uint8",
             "conv3.weight": "float8_e4m3fn"}
    twin = with_reals(client, model, specs)
    before = model(TOKENS)
    done = quantd.torch.quantize_(model, specs, client=client)
    for name, parameter in twin.named_parameters():
        if parameter.dim() > 1:
            assert torch.equal(model.get_submodule(
                name[:-len(".weight")]).weight, parameter), name
    got = model(TOKENS)
    assert torch.equal(got, twin(TOKENS)) and not torch.equal(got, before)
    assert [(row.name, row.module) for row in done.replaced] == [
        ("embed.weight", "Embedding"), ("linear.weight", "Linear"),
        ("conv1.weight", "Conv1d"), ("conv2.weight", "Conv2d"),
        ("conv3.weight", "Conv3d")]
    assert not done.left_out


@pytest.mark.parametrize("name", ["int", "float"])
def test_EveryFormatHasItsReals(client, name):
    """In each type of elements, also of formats that no spec above has."""
    formats = [format_name for format_name in FORMATS if
               quantd.format_info(format_name).is_integer == (name == "int")
               and not format_name.startswith("codebook")]
    assert len(formats) > 6
    for format_name in formats:
        for dtype in (torch.float32, torch.bfloat16, torch.float16,
                      torch.float64):
            model = torch.nn.Linear(64, 8).to(dtype)
            want = quantd.torch.dequantize(client.quantize(model.weight,
                                                           format_name))
            quantd.torch.quantize_(model, format_name, client=client)
            assert model.weight.dtype == want.dtype == dtype
            assert torch.equal(model.weight, want), (format_name, dtype)


def test_SqnrIsThatOfTheService(client):
    model = Layers()
    weights = {name: parameter.detach().clone()
               for name, parameter in model.named_parameters()}
    done = quantd.torch.quantize_(model, "int4:per-channel", client=client)
    assert len(done.replaced) == 5
    for row in done.replaced:
        (want,) = client.evaluate(weights[row.name], ["int4:per-channel"])
        assert math.isclose(row.sqnr_db, want.overall.sqnr_db, rel_tol=1e-9)
        assert row.bytes_before == 4 * weights[row.name].numel()
        assert row.shape == tuple(weights[row.name].shape)
        # A byte for each code, and a scale for each channel.
        assert row.bytes_after == row.bytes_before // 4 + 4 * row.shape[0]
    assert done.replaced.to_dicts()[0]["format"] == "int4"
    exact = torch.nn.Linear(4, 4)
    with torch.no_grad():
        exact.weight.copy_(torch.full((4, 4), 127))
    assert quantd.torch.quantize_(exact, "int8", client=client).replaced[
        0].sqnr_db == math.inf


def test_WhatIsNotFiniteIsWarnedOf(client):
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2),
                                torch.nn.Linear(2, 2)).half()
    with torch.no_grad():
        model[0].weight[1, :3] = torch.tensor([math.nan, math.nan, -math.inf])
        model[1].weight.fill_(math.nan)
        # With a scale that is a power of two, 127 steps are more than that.
        model[2].weight.fill_(65504)
    with pytest.warns(RuntimeWarning) as told:
        done = quantd.torch.quantize_(
            model, {"2*": "int8:power-of-two:scale=float16", "*": "int8"},
            client=client)
    assert [str(one.message) for one in told] == [
        "quantd: tensor '0.weight' has 2 NaN and 1 infinities",
        "quantd: tensor '1.weight' has 8 NaN and 0 infinities",
        "quantd: tensor '2.weight': 4 elements are infinite: their codes are "
        "infinity, or beyond float16, which has at most 65504 in magnitude"]
    blocks = torch.nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        blocks.weight[0, 3] = math.inf
    with pytest.warns(RuntimeWarning) as told:
        quantd.torch.quantize_(blocks, "mxfp8_e4m3", client=client)
    assert [str(one.message) for one in told] == [
        "quantd: tensor 'weight' has 0 NaN and 1 infinities: all elements of "
        "their blocks become NaN"]
    assert blocks.weight.isnan().sum() == 32
    small = torch.nn.Linear(32, 3, bias=False)
    with torch.no_grad():
        small.weight.mul_(1e-7)
    with pytest.warns(RuntimeWarning) as told:
        quantd.torch.quantize_(small, "int8:per-channel:scale=float16",
                               client=client)
    assert [str(one.message) for one in told] == [
        "quantd: tensor 'weight': 3 scales are below 2^-20, where float16 has "
        "few numbers: their elements lose much"]
    assert told[0].filename == __file__
    first, second, third = done.replaced
    assert (first.nan_count, first.infinity_count) == (2, 1)
    assert math.isfinite(first.sqnr_db)
    assert second.nan_count == 8 and math.isnan(second.sqnr_db)
    assert (third.infinity_count, third.overflow_count) == (0, 4)
    other = torch.nn.Linear(4, 4)
    with pytest.raises(quantd.QuantdError) as caught:
        with torch.no_grad():
            other.weight[0, 0] = math.nan
        quantd.torch.quantize_(other, "int8", client=client,
                               nan_policy="reject")
    assert caught.value.reason == "NON_FINITE_REJECTED"


def test_StateAndTypeMoveAsTheyShould(client, tmp_path):
    model, other = Layers(), Layers()
    quantd.torch.quantize_(model, "int4:group:16:asymmetric", client=client)
    state = model.state_dict()
    assert state["linear.quantized_weight.codes"].dtype == torch.int8
    assert state["linear.quantized_weight.scale"].shape == (48, 3)
    assert state["linear.quantized_weight.zero_point"].dtype == torch.int32
    assert "linear.weight" not in state and "linear.bias" in state
    assert "linear.weight" not in dict(model.named_parameters())
    # Into a model that was quantized in the same way, from other weights.
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-2)
    quantd.torch.quantize_(other, "int4:group:16:asymmetric", client=client)
    assert not torch.equal(other(TOKENS), model(TOKENS))
    torch.save(state, tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(other(TOKENS), model(TOKENS))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(TOKENS), model(TOKENS))

    reals = model.linear.weight
    for change, dtype in ((lambda m: m.half(), torch.float16),
                          (lambda m: m.to(torch.bfloat16), torch.bfloat16),
                          (lambda m: m.type(torch.float64), torch.float64),
                          (lambda m: m.float(), torch.float32)):
        change(other)
        buffers = other.linear.quantized_weight
        assert (buffers.codes.dtype, buffers.scale.dtype,
                buffers.zero_point.dtype) == (torch.int8, torch.float32,
                                              torch.int32)
        assert other.linear.weight.dtype == other.linear.bias.dtype == dtype
        # Rounded once, and not for good.
        assert torch.equal(other.linear.weight, reals.to(dtype)) or (
            dtype == torch.float64)
    assert torch.equal(other.linear.weight, reals)
    meta = other.to("meta")
    assert meta.linear.weight.device.type == "meta"
    assert all(buffer.device.type == "meta" for buffer in meta.buffers())


class Tied(torch.nn.Module):
    """One parameter as the weight of two modules, and a module twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = torch.nn.Embedding(20, 16)
        self.first = torch.nn.Linear(16, 16)
        self.second = self.first
        self.head = torch.nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.second(self.first(self.embed(tokens))))


@pytest.mark.parametrize("specs", [
    "int4:group:8", {"head*": "int4:group:8", "second*": "int4:group:8"}])
def test_WhatIsSharedStaysShared(client, specs):
    model = Tied()
    twin = with_reals(client, model, "int4:group:8")
    done = quantd.torch.quantize_(model, specs, client=client)
    assert model.head.quantized_weight is model.embed.quantized_weight
    assert model.second is model.first
    assert isinstance(model.first, quantd.torch.QuantizedLinear)
    assert [set(row.names) for row in done.replaced] == [
        {"embed.weight", "head.weight"}, {"first.weight", "second.weight"}]
    assert torch.equal(model(TOKENS), twin(TOKENS))
    again = copy.deepcopy(model)
    assert again.head.quantized_weight is again.embed.quantized_weight
    assert torch.equal(again(TOKENS), twin(TOKENS))


class Other(torch.nn.Linear):
    """May use its weight as it likes."""


def test_WhatCannotBeReplacedIsTold(client):
    model = torch.nn.ModuleDict({
        "other": Other(8, 8), "attention": torch.nn.MultiheadAttention(8, 2),
        "linear": torch.nn.Linear(8, 8), "part": torch.nn.Linear(8, 8),
        "norm": torch.nn.LayerNorm(8),
        "tied": torch.nn.Linear(8, 8)})
    model["part"].register_parameter("also", model["tied"].weight)
    done = quantd.torch.quantize_(model, {"*linear*": "int8", "att*": "int8"},
                                  client=client)
    assert [row.name for row in done.replaced] == [
        "attention.out_proj.weight", "linear.weight"]
    assert done.left_out == {
        "other.weight": "other.weight is of a Other",
        "attention.in_proj_weight":
            "attention.in_proj_weight is of a MultiheadAttention",
        "part.weight": "no pattern matches it",
        "part.also": "part.also is of a Linear"}
    x = torch.randn(3, 2, 8)
    y, _ = model["attention"](x, x, x)
    assert y.shape == x.shape
    for specs in ({"other*": "int8"}, {"*": "int8", "part*": "int8"},
                  {"none": "int8"}):
        assert "specs" in raised(quantd.torch.quantize_, model, specs,
                                 client=client).field
    assert raised(quantd.torch.quantize_, torch.nn.LayerNorm(8), "int8",
                  client=client).field == "model"


def test_AModelStaysAsItWasWhereATensorFails(client):
    model = Layers()
    with torch.no_grad():
        model.conv3.weight[0] = math.nan
    before = model.state_dict()
    error = raised(quantd.torch.quantize_, model, "int8", client=client,
                   nan_policy="reject")
    assert error.name.tensor == "conv3.weight"
    assert model.state_dict().keys() == before.keys()
    assert type(model.linear) is torch.nn.Linear


def test_CodesOfAnotherTypeAreNotLoaded(client):
    """They would wrap around."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    wide, narrow = copy.deepcopy(model), copy.deepcopy(model)
    quantd.torch.quantize_(wide, "int16:per-channel", client=client)
    quantd.torch.quantize_(narrow, "int8:per-channel", client=client)
    codes = narrow[0].quantized_weight.codes.clone()
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="0.quantized_weight.codes: "
                           "expected torch.int8 of int8, got torch.int16"):
            narrow.load_state_dict(wide.state_dict(), strict=strict)
    assert torch.equal(narrow[0].quantized_weight.codes, codes)
    # What is not there is told as ever.
    with pytest.raises(RuntimeError, match="Missing key.*codes"):
        narrow.load_state_dict(model.state_dict())


LAYOUT = "0.quantized_weight._extra_state"


def layer_of(client, spec):
    """Other spec, other weights."""
    torch.manual_seed(len(spec))
    model = torch.nn.Sequential(torch.nn.Linear(33, 10))
    quantd.torch.quantize_(model, spec, client=client)
    return model


@pytest.mark.parametrize("spec,fault", [
    ("int4:group:16", "block_size: expected [1, 11], got [1, 16]"),
    ("int3:group:11", "format: expected int4, got int3")])
def test_AStateWithAnotherLayoutIsNotLoaded(client, tmp_path, spec, fault):
    """Though its codes and scales have the shapes and types of the module's."""
    model, other = layer_of(client, "int4:group:11"), layer_of(client, spec)
    reals = model[0].weight.clone()
    for strict in (True, False):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(other.state_dict(), strict=strict)
        assert f"0.quantized_weight.{fault}" in str(caught.value)
    path = tmp_path / "net.safetensors"
    quantd.save(path, other.state_dict())
    error = raised(quantd.torch.load_into, model, path)
    assert error.reason == "STATE_MISMATCH"
    assert f"0.quantized_weight.{fault}" in error.message
    assert torch.equal(model[0].weight, reals)
    quantd.torch.load_into(other, path)


def test_StatesWithoutALayoutAreLoaded(client, tmp_path):
    """They are older."""
    model = layer_of(client, "int4:group:11")
    old = {name: tensor for name, tensor in model.state_dict().items()
           if name != LAYOUT}
    path = tmp_path / "old.safetensors"
    quantd.save(path, old)
    for load in (lambda module: module.load_state_dict(old),
                 lambda module: quantd.torch.load_into(module, path)):
        other = layer_of(client, "int4:group:11")
        with torch.no_grad():
            other[0].quantized_weight.scale.mul_(2)
        load(other)
        assert torch.equal(other[0].weight, model[0].weight)


def test_OneLayoutMayBeWrittenInTwoWays(client):
    model = layer_of(client, "int4:group:33")
    other = layer_of(client, "int4:per-channel")
    assert (model[0].quantized_weight.block_size !=
            other[0].quantized_weight.block_size)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("layout", [
    None, {"format": "int4"}, torch.tensor([1.5]),
    torch.tensor([300]), torch.tensor([255, 255]), torch.tensor([91, 49, 93])])
def test_ALayoutThatIsNoneIsRefused(client, layout):
    model = layer_of(client, "int4:group:11")
    with pytest.raises(RuntimeError, match="expected what state_dict"):
        model.load_state_dict({**model.state_dict(), LAYOUT: layout})
    error = raised(model[0].quantized_weight.set_extra_state, layout)
    assert (error.reason, error.field) == ("ARGUMENT_INVALID", "state")


def test_HooksGradientsAndTheCalibrationGoOn(client):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(),
                                torch.nn.Linear(8, 3))
    seen = []
    model[0].register_forward_hook(lambda *given: seen.append(given))
    bias = model[0].bias
    quantd.torch.quantize_(model, "int8:per-channel", client=client,
                           model_name="m/q", store=True)
    assert [entry.name.tensor for entry in client.list_encodings("m/q")] == [
        "0.weight", "2.weight"]
    x = torch.randn(4, 8, requires_grad=True)
    with quantd.torch.calibrate(model, client, model_name="m/hook",
                                source="s") as block:
        model(x).sum().backward()
    assert block.sequences == {"0.input": 1, "2.input": 1}
    assert len(seen) == 1 and model[0].bias is bias
    assert x.grad.abs().sum() > 0 and bias.grad is not None
    assert "QuantizedWeight" in repr(model) and "int8, (8, 8)" in repr(model)
    for names in ({"model_name": "m/q"}, {"revision": "v2"}):
        with pytest.raises(quantd.QuantdError, match="store=True") as caught:
            quantd.torch.quantize_(torch.nn.Linear(8, 3), "int8", client=client,
                                   **names)
        assert caught.value.reason == "ARGUMENT_INVALID"
    # Stored encodings, of the names of the weights.
    again = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(),
                                torch.nn.Linear(8, 3))
    quantd.torch.quantize_(again, quantd.EncodingReference(), client=client,
                           model_name="m/q")
    assert torch.equal(again[0].quantized_weight.scale,
                       model[0].quantized_weight.scale)


def test_ScriptsSayWhatCompilesCodes(client):
    model, x = torch.nn.Sequential(torch.nn.Linear(6, 4)), torch.randn(2, 6)
    quantd.torch.quantize_(model, "int8:per-channel", client=client)
    fake = quantd.torch.FakeQuantize(quantd.Encoding("int8", [0.5]))
    for module, what in ((model, "torch.jit.trace(model, inputs)"),
                         (model[0], "torch.jit.trace(model, inputs)"),
                         (fake, "take it out")):
        error = raised(torch.jit.script, module)
        assert error.reason == "ARGUMENT_INVALID" and what in error.message
    traced = torch.jit.trace(model, x)
    x = torch.randn(5, 6)
    assert torch.equal(traced(x), model(x))
