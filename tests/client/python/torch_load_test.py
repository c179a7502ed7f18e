"""load_into: quantized files into models of torch."""

import json
import weakref

import pytest

torch = pytest.importorskip("torch")

# pylint: disable=wrong-import-position
import numpy as np

import quantd
import quantd.torch
from quantd import _files

# Started before gRPC has threads.
pytestmark = pytest.mark.usefixtures("server")


class Net(torch.nn.Module):
    """Layers of every kind, a buffer, and two names for one parameter."""

    def __init__(self, seed=0, tied=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(40, 64)
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.up = torch.nn.Linear(64, 96)
        self.head = torch.nn.Linear(64, 40, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.norm.running_mean.normal_()


def state_of(model, without=()):
    return {name: tensor for name, tensor in model.state_dict().items()
            if name not in without}


def raised(call, *arguments, **keywords):
    with pytest.raises(quantd.QuantdError) as caught:
        call(*arguments, **keywords)
    return caught.value


@pytest.mark.parametrize("spec", [
    "int8:per-channel", "int4:group:16:asymmetric", "uint8", "nvfp4", "nf4",
    "mxfp4_e2m1", "float8_e4m3fn:per-channel", "int16:per-channel", "lpbq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16,
                                   torch.float16, torch.float64])
def test_ParametersAreWhatTheCodesStandFor(tmp_path, client, spec, dtype):
    source, target = Net(1).to(dtype), Net(2).to(dtype)
    state = state_of(source, ["head.weight"])
    specs = {"*up.weight": spec, "*": "int8"}
    quantized = {tensor.name.tensor: tensor for tensor in
                 client.quantize_many(state.items(), specs)}
    assert len(quantized) == 3
    path = tmp_path / "net.safetensors"
    quantd.save(path, {**state, **quantized})
    parameters = dict(target.named_parameters())
    done = quantd.torch.load_into(target, path)
    assert sorted(done.dequantized) == ["conv.weight", "embed.weight",
                                        "up.weight"]
    assert len(done.copied) == len(state) - 3
    assert (done.missing, done.unexpected) == ((), ())
    # In place: an optimizer that has them goes on.
    assert all(parameter is parameters[name]
               for name, parameter in target.named_parameters())
    assert target.head.weight is target.embed.weight
    for name, tensor in target.state_dict().items():
        if name == "head.weight":
            name = "embed.weight"
        want = (client.dequantize(quantized[name]) if name in quantized else
                state[name])
        assert tensor.dtype == want.dtype
        assert torch.equal(tensor, want), name


def test_CodesBecomeTheTypeOfTheParameter(tmp_path, client):
    """Whatever the weight was before it was quantized."""
    weight = torch.randn(40, 64).bfloat16()
    quantized = client.quantize(weight, "int8:per-channel:scale=float16")
    assert quantized.element_type == "bfloat16"
    path = tmp_path / "net.safetensors"
    quantd.save(path, {"weight": quantized})
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        layer = torch.nn.Linear(64, 40, bias=False).to(getattr(torch, dtype))
        quantd.torch.load_into(layer, path)
        want = client.dequantize(quantized, element_type=dtype)
        assert torch.equal(layer.weight, want)
    # Rounded once only.
    assert not torch.equal(client.dequantize(quantized).float(),
                           client.dequantize(quantized, element_type="float32"))


def test_AFolderOfQuantctlIsLoaded(tmp_path, quantctl):
    source = Net(1)
    state = state_of(source, ["head.weight"])
    folder = tmp_path / "model"
    folder.mkdir()
    names = list(state)
    shards = {}
    for n, part in enumerate((names[:4], names[4:])):
        shard = f"model-0000{n + 1}-of-00002.safetensors"
        quantd.save(folder / shard, {name: state[name] for name in part})
        shards.update(dict.fromkeys(part, shard))
    (folder / _files.INDEX_NAME).write_text(json.dumps(
        {"metadata": {}, "weight_map": shards}))
    quantctl("quantize", folder, "-o", tmp_path / "q", "--no-store", "--spec",
             "*embed*=nvfp4", "--spec", "*=int4:group:4:scale=float16",
             "--exclude", "norm*")
    target = Net(2)
    quantd.torch.load_into(target, tmp_path / "q")
    file = quantd.load(tmp_path / "q")
    for name in state:
        want = file[name]
        if isinstance(want, quantd.QuantizedTensor):
            want = want.dequantize()
            assert not np.array_equal(want, state[name].numpy())
        np.testing.assert_array_equal(target.state_dict()[name].numpy(), want)


@pytest.mark.parametrize("spec", ["int4:group:32:scale=float16",
                                  "int8:per-channel", "float8_e4m3fn",
                                  "nvfp4"])
def test_CompressedTensorsAreLoaded(tmp_path, quantctl, spec):
    source = torch.nn.Sequential(torch.nn.Linear(64, 32),
                                 torch.nn.Linear(32, 64, bias=False))
    folder = tmp_path / "model"
    folder.mkdir()
    quantd.save(folder / "model.safetensors",
                {name: tensor.bfloat16()
                 for name, tensor in source.state_dict().items()})
    (folder / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    quantctl("quantize", folder, "-o", tmp_path / "ct", "--no-store", "--spec",
             spec, "--layout", "compressed-tensors")
    done = quantd.torch.load_into(source, tmp_path / "ct")
    assert sorted(done.dequantized) == ["0.weight", "1.weight"]
    assert done.copied == ("0.bias",)
    file = quantd.load(tmp_path / "ct")
    for name in done.dequantized:
        want = file[name].dequantize()
        assert file.info(name).format == spec.split(":")[0]
        np.testing.assert_array_equal(
            source.state_dict()[name].bfloat16().view(torch.int16).numpy(),
            want.view(np.int16))


def test_NamesAndShapesHaveToAgree(tmp_path, client):
    model = Net(1)
    state = state_of(model)
    before = {name: tensor.clone() for name, tensor in state.items()}
    path = tmp_path / "net.safetensors"

    def write(**changes):
        tensors = {name: tensor for name, tensor in
                   {**state, **changes}.items() if tensor is not None}
        quantd.save(path, {
            name: client.quantize(tensor + 1, "int8")
            if name == "up.weight" else tensor + 1
            for name, tensor in tensors.items()}, overwrite=True)

    for changes, texts in [
            ({"up.bias": None}, ["not in the file: up.bias"]),
            ({"more": torch.ones(3)}, ["not in the model: more"]),
            ({"up.weight": torch.ones(96, 60), "conv.bias": torch.ones(5)},
             ["up.weight is [96, 60] in the file, [96, 64] in the model",
              "conv.bias is [5] in the file, [4] in the model"]),
            ({f"x{n}": torch.ones(1) for n in range(20)}, ["and 12 more"])]:
        write(**changes)
        error = raised(quantd.torch.load_into, model, path)
        assert error.reason == "STATE_MISMATCH"
        assert all(text in error.message for text in texts), error.message
    # Shapes in any case.
    write(**{"up.weight": torch.ones(96, 60)})
    assert raised(quantd.torch.load_into, model, path, strict=False
                  ).reason == "STATE_MISMATCH"
    # Nothing was written.
    assert all(torch.equal(tensor, before[name])
               for name, tensor in model.state_dict().items())

    write(**{"up.bias": None, "more": torch.ones(3)})
    done = quantd.torch.load_into(model, path, strict=False)
    assert (done.missing, done.unexpected) == (("up.bias",), ("more",))
    assert torch.equal(model.up.bias, before["up.bias"])
    assert torch.equal(model.conv.bias, before["conv.bias"] + 1)


def test_EitherNameOfASharedParameterIsEnough(tmp_path):
    path = tmp_path / "net.safetensors"
    for absent in ("head.weight", "embed.weight"):
        source, target = Net(1), Net(2)
        quantd.save(path, state_of(source, [absent]), overwrite=True)
        quantd.torch.load_into(target, path)
        assert torch.equal(target.head.weight, source.embed.weight)
        # Without the tie both are needed.
        error = raised(quantd.torch.load_into, Net(2, tied=False), path)
        assert f"not in the file: {absent}" in error.message


def test_OtherElementsBecomeThoseOfTheModel(tmp_path):
    model = torch.nn.BatchNorm1d(4)
    model.register_buffer("eighth", torch.zeros(4))
    model.register_buffer("count", torch.zeros(4, dtype=torch.int64))
    path = tmp_path / "net.safetensors"
    weight = torch.tensor([1.5, -2, 3, 4])
    with open(path, "wb") as file:
        # F8_E4M3 without scales: 1, 2, -1, 0.5.
        arrays = {"weight": ("BF16", weight.bfloat16().view(
                      torch.int16).numpy().tobytes()),
                  "bias": ("F64", weight.double().numpy().tobytes()),
                  "running_mean": ("F16", weight.half().numpy().tobytes()),
                  "running_var": ("I32", weight.int().numpy().tobytes()),
                  "eighth": ("F8_E4M3", bytes([0x38, 0x40, 0xb8, 0x30])),
                  "count": ("U32", np.arange(4, dtype="<u4").tobytes()),
                  "num_batches_tracked": ("I64", bytes([7] + [0] * 7))}
        header, offset = {}, 0
        for name, (dtype, data) in arrays.items():
            header[name] = {
                "dtype": dtype, "data_offsets": [offset, offset + len(data)],
                "shape": [] if name == "num_batches_tracked" else [4]}
            offset += len(data)
        text = json.dumps(header).encode()
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(data for _, data in arrays.values())
    quantd.torch.load_into(model, path)
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.bias, weight)
    assert torch.equal(model.running_mean, weight)
    assert torch.equal(model.running_var, weight.int().float())
    assert model.eighth.tolist() == [1, 2, -1, 0.5]
    assert model.count.tolist() == [0, 1, 2, 3]
    assert int(model.num_batches_tracked) == 7


def test_WhatHasNoRoomForRealsIsRefused(tmp_path, client):
    path = tmp_path / "net.safetensors"
    quantd.save(path, {"weight": client.quantize(torch.ones(4, 4), "int8")})
    meta = torch.nn.Linear(4, 4, bias=False, device="meta")
    assert "to_empty" in raised(quantd.torch.load_into, meta, path).message
    integers = torch.nn.Module()
    integers.register_buffer("weight", torch.zeros(4, 4, dtype=torch.int8))
    assert "weight is torch.int8" in raised(quantd.torch.load_into, integers,
                                            path).message
    assert raised(quantd.torch.load_into, meta, tmp_path / "no").reason == (
        "FILE_UNREADABLE")


def test_WhatModelsHaveInCopiesIsRefused(tmp_path, client):
    """What is written to a copy is lost."""
    def copy_weight(_, state, prefix, *unused):
        del unused
        state[prefix + "weight"] = state[prefix + "weight"].clone()

    layer = torch.nn.Linear(4, 4)
    layer._register_state_dict_hook(copy_weight)
    model = torch.nn.Sequential(layer)
    path, bias = tmp_path / "net.safetensors", layer.bias.detach().clone()
    weight = torch.ones(4, 4)
    for value in (weight, client.quantize(weight, "int8")):
        quantd.save(path, {"0.weight": value, "0.bias": torch.ones(4)},
                    overwrite=True)
        for strict in (True, False):
            error = raised(quantd.torch.load_into, model, path, strict=strict)
            assert (error.reason, error.field) == ("ARGUMENT_INVALID", "model")
            assert "0.weight" in error.message
            assert "0.bias" not in error.message
    assert torch.equal(layer.bias, bias)
    # A file that lacks it does not write it.
    quantd.save(path, {"0.bias": torch.ones(4)}, overwrite=True)
    done = quantd.torch.load_into(model, path, strict=False)
    assert done.missing == ("0.weight",)
    assert torch.equal(layer.bias, torch.ones(4))


def test_PartsOfParametersAreLoaded(tmp_path):
    """Of models whose state_dict has views."""
    def split(_, state, prefix, *unused):
        del unused
        for name, part in zip("qkv", state.pop(prefix + "weight").split(4)):
            state[f"{prefix}{name}.weight"] = part

    layer = torch.nn.Linear(3, 12, bias=False)
    layer._register_state_dict_hook(split)
    want = torch.randn(12, 3)
    path = tmp_path / "net.safetensors"
    quantd.save(path, {f"{name}.weight": part
                       for name, part in zip("qkv", want.split(4))})
    quantd.torch.load_into(layer, path)
    assert torch.equal(layer.weight, want)
    # Empty tensors have no memory to share.
    empty = torch.nn.Linear(0, 0)
    quantd.save(path, empty.state_dict(), overwrite=True)
    assert len(quantd.torch.load_into(empty, path).copied) == 2


class Counting(torch.nn.Linear):
    """Has state beside its tensors."""

    def __init__(self, count=()):
        super().__init__(4, 4)
        self.count = torch.tensor(count, dtype=torch.int64)

    def get_extra_state(self):
        return self.count.clone()

    def set_extra_state(self, state):
        self.count = state


class Unsettable(torch.nn.Linear):
    """Its state can only be read."""

    def get_extra_state(self):
        return torch.tensor([7])


def test_ExtraStateIsHandedToItsModule(tmp_path):
    path = tmp_path / "net.safetensors"
    source = torch.nn.Sequential(Counting((3, 4)), Counting((5,)))
    quantd.save(path, source.state_dict())
    # Its shape is the module's own business.
    target = torch.nn.Sequential(Counting((0, 0)), Counting())
    done = quantd.torch.load_into(target, path)
    assert sorted(done.copied) == sorted(source.state_dict())
    assert [layer.count.tolist() for layer in target] == [[3, 4], [5]]
    assert torch.equal(target[1].weight, source[1].weight)
    # It is no memory of the file.
    target[0].count += 1
    assert quantd.load(path)["0._extra_state"].tolist() == [3, 4]

    layer = Unsettable(4, 4)
    bias = layer.bias.detach().clone()
    quantd.save(path, {name: tensor + 1 for name, tensor
                       in layer.state_dict().items()}, overwrite=True)
    error = raised(quantd.torch.load_into, layer, path)
    assert error.reason == "ARGUMENT_INVALID"
    assert "_extra_state" in error.message
    assert torch.equal(layer.bias, bias)


def test_AFolderWithScalesOfACacheIsLoaded(tmp_path, quantctl, client):
    names = ["a.k_proj", "a.q_proj", "a.v_proj"]

    class Attention(torch.nn.Module):
        """Its projections."""

        def __init__(self):
            super().__init__()
            for name in names:
                self.add_module(name[2:], torch.nn.Linear(8, 8, bias=False))

    target = torch.nn.ModuleDict({"a": Attention()})
    quantd.save(tmp_path / "plain.safetensors", target.state_dict())
    for name in names:
        client.put_encoding(quantd.TensorName("l/kv", f"{name}.output"),
                            quantd.Encoding("float8_e4m3fn", [0.25]))
    quantctl("quantize", tmp_path / "plain.safetensors", "-o", tmp_path / "q",
             "--no-store", "--scheme", "W8A16", "--kv-cache", "float8_e4m3fn",
             "--model", "l/kv")
    done = quantd.torch.load_into(target, tmp_path / "q")
    assert sorted(done.dequantized) == [f"{name}.weight" for name in names]
    assert done.copied == ()


def test_OneTensorAtATimeIsInMemory(tmp_path, client, monkeypatch):
    """What is read of one is gone before the next one is."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False)
                                   for _ in range(5)))
    path = tmp_path / "net.safetensors"
    quantd.save(path, {name: client.quantize(tensor, "int8") for name, tensor
                       in layers.state_dict().items()})
    alive, most = set(), []
    dequantize = quantd.QuantizedTensor.dequantize

    def watched(self):
        reals = dequantize(self)
        alive.add(id(reals))
        weakref.finalize(reals, alive.discard, id(reals))
        most.append(len(alive))
        return reals

    monkeypatch.setattr(quantd.QuantizedTensor, "dequantize", watched)
    quantd.torch.load_into(layers, path)
    assert most == [1] * 5
