"""FakeQuantize: its reals are those of the service, its gradients those that
were published."""

import copy
import dataclasses
import math
import pickle

import pytest

torch = pytest.importorskip("torch")

# pylint: disable=wrong-import-position
import numpy as np

import quantd
import quantd.torch
from quantd.tensor import FORMATS
from torch.nn.utils import parametrize

# Started before gRPC has threads.
pytestmark = pytest.mark.usefixtures("server")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LEARNED = ["scale", "log2_scale", "range"]
GRANULARITIES = [":per-tensor", ":per-channel", ":per-channel:1", ":group:7",
                 ":block=3,8"]


def raised(call, *arguments, **keywords):
    with pytest.raises(quantd.QuantdError) as caught:
        call(*arguments, **keywords)
    return caught.value


def data_of(dtype=torch.float32, shape=(10, 33)):
    """Some of it clipped by the encodings of encoding_of, with ties, infinities
    and NaN."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, generator=generator) * 1.5
    x.view(-1)[:20] = torch.arange(20) / 8 - 1
    x.view(-1)[20:24] = torch.tensor([math.inf, -math.inf, math.nan, -0.0])
    return x.to(dtype)


def encoding_of(client, spec):
    generator = torch.Generator().manual_seed(4)
    return client.quantize(torch.randn(10, 33, generator=generator) + 0.3,
                           spec).encoding


def there_and_back(client, x, encoding):
    return client.dequantize(client.quantize(x, encoding))


def same(got, want):
    """Bit by bit: zeros have signs."""
    return torch.equal(got, want) and torch.equal(torch.signbit(got),
                                                  torch.signbit(want))


@pytest.mark.parametrize("learn", [None, *LEARNED])
@pytest.mark.parametrize("spec", [
    f"{name}{granularity}{symmetry}"
    for name in ("int8", "uint4", "uint16")
    for granularity in GRANULARITIES for symmetry in ("", ":asymmetric")])
def test_RealsAreThoseOfTheService(client, spec, learn):
    encoding = encoding_of(client, spec)
    for dtype in DTYPES:
        x = data_of(dtype)
        fake = quantd.torch.FakeQuantize(encoding, learn=learn)
        assert fake.encoding.scale.tobytes() == encoding.scale.tobytes()
        got = fake(x)
        want = there_and_back(client, x, encoding)
        assert got.dtype == want.dtype == dtype
        assert same(got, want), dtype
        # And of other scales and zero points.
        with torch.no_grad():
            for parameter in fake.parameters():
                parameter.mul_(1.07)
        assert same(fake(x), there_and_back(client, x, fake.encoding))


def test_EveryIntegerFormatIsTheService(client):
    formats = [name for name in FORMATS
               if quantd.format_info(name).is_integer]
    assert len(formats) > 20
    for name in formats:
        encoding = encoding_of(client, name)
        x = data_of()
        got = quantd.torch.FakeQuantize(encoding)(x)
        assert same(got, there_and_back(client, x, encoding)), name
        # Without limits it has those of the service, too.
        encoding = dataclasses.replace(encoding, qmin=None, qmax=None)
        fake = quantd.torch.FakeQuantize(encoding)
        assert same(fake(x), there_and_back(client, x, encoding)), name


def test_ARangeWithoutZeroIsThatOfTheService(client):
    x = torch.linspace(3, 5, 90)
    spec = quantd.EncodingSpec("uint8", symmetry="asymmetric",
                               exclude_zero=True)
    encoding = client.quantize(x, spec).encoding
    assert encoding.zero_point.item() < 0
    with_nan = torch.cat([x, torch.tensor([0.0, math.nan, 9.0])])
    for learn in (None, "scale", "range"):
        fake = quantd.torch.FakeQuantize(encoding, learn=learn)
        assert fake.encoding.zero_point.item() == encoding.zero_point.item()
        assert same(fake(with_nan), there_and_back(client, with_nan, encoding))


def plain(x, scale, zero_point, qmin, qmax, clips_first):
    """The reals by functions of torch, straight through the rounding."""
    def through(v):
        return v + (v.round() - v).detach()

    steps = x / scale
    zero_point = through(zero_point)
    if clips_first:
        codes = through((steps + zero_point).clamp(qmin, qmax))
    else:
        codes = (through(steps) + zero_point).clamp(qmin, qmax)
    return (codes - zero_point) * scale


def on_the_axis(encoding, numbers, shape):
    """One for each element of a tensor."""
    index = torch.arange(math.prod(encoding.scale.shape)).reshape(
        encoding.scale.shape)
    sizes = encoding.block_size or (0,) * len(shape)
    for axis, (size, extent) in enumerate(zip(sizes, shape)):
        if index.dim() == len(shape):
            index = index.index_select(
                axis, torch.arange(extent) // (size or extent))
    return numbers.reshape(-1)[index.reshape(-1).expand(
        math.prod(shape)).reshape(shape)]


@pytest.mark.parametrize("learn", [None, *LEARNED])
@pytest.mark.parametrize("spec", [
    f"{name}{granularity}" for name in ("int4", "uint4:asymmetric",
                                        "int8:asymmetric")
    for granularity in GRANULARITIES])
def test_GradientsAreThoseOfThePlainFormula(client, spec, learn):
    encoding = encoding_of(client, spec)
    # Of float64, so that rounding does not matter; not on the ends of ranges.
    torch.manual_seed(6)
    x = torch.randn(10, 33, dtype=torch.float64) * 2
    weights = torch.randn(10, 33, dtype=torch.float64)
    fake = quantd.torch.FakeQuantize(encoding, learn=learn,
                                     scale_gradient=False)
    given = x.clone().requires_grad_()
    (fake(given) * weights).sum().backward()

    want_x = x.clone().requires_grad_()
    leaves = {name: parameter.detach().double().requires_grad_()
              for name, parameter in fake.named_parameters()}
    zero_point = torch.from_numpy(
        encoding.zero_point.ravel() if encoding.zero_point.size else
        np.zeros(encoding.scale.size)).double()
    if learn == "log2_scale":
        scale = 2 ** leaves["log2_scale"]
    elif learn == "range":
        scale = (leaves["max"] - leaves["min"]) / (fake.qmax - fake.qmin)
        if "zero_point" not in fake.state_dict():
            zero_point = fake.qmin - leaves["min"] / scale
    elif learn == "scale":
        scale = leaves["scale"]
        zero_point = leaves.get("zero_point", zero_point)
    else:
        scale = torch.from_numpy(encoding.scale).double()
    # The service rounds scales to float32.
    scale = scale + (scale.float().double() - scale).detach()
    out = plain(want_x, on_the_axis(encoding, scale, x.shape),
                on_the_axis(encoding, zero_point, x.shape), fake.qmin,
                fake.qmax, learn == "scale")
    assert torch.allclose(out, fake(x), rtol=1e-12, atol=1e-12)
    (out * weights).sum().backward()
    assert torch.allclose(given.grad, want_x.grad, rtol=1e-12)
    assert torch.equal(given.grad == 0, want_x.grad == 0)
    assert 0 < int((given.grad == 0).sum()) < x.numel()
    assert len(leaves) == {None: 0, "scale": 1 + bool(
        encoding.zero_point.any()), "log2_scale": 1, "range": 2}[learn]
    for name, parameter in fake.named_parameters():
        want = leaves[name].grad
        assert parameter.grad.shape == encoding.scale.shape
        assert torch.allclose(parameter.grad.double(), want, rtol=1e-5,
                              atol=1e-4), name
        assert want.abs().max() > 0.01


def test_GradientsAreThoseOfFiniteDifferences():
    """Of elements that are clipped, where the function is smooth; and of
    others, with the same rounding on both sides."""
    x = torch.tensor([9.0, -9.0, 7.0], dtype=torch.float64)
    weights = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)

    def difference(parameter):
        values = []
        for step in (1e-3, -1e-3):
            with torch.no_grad():
                parameter.add_(step)
            values.append(float((fake(x) * weights).sum()))
            with torch.no_grad():
                parameter.sub_(step)
        return (values[0] - values[1]) / 2e-3

    encoding = quantd.Encoding("int4", [0.25], zero_point=[2])
    for learn in LEARNED:
        fake = quantd.torch.FakeQuantize(encoding, learn=learn,
                                         scale_gradient=False)
        (fake(x) * weights).sum().backward()
        for name, parameter in fake.named_parameters():
            if name == "zero_point" or learn == "range":
                # They move by whole codes only.
                continue
            assert math.isclose(difference(parameter), parameter.grad.item(),
                                rel_tol=1e-4), name
    # Without a zero point both ends of a range move smoothly.
    fake = quantd.torch.FakeQuantize(quantd.Encoding("int4", [0.25]),
                                     learn="range", learn_zero_point=False)
    (fake(x) * weights).sum().backward()
    for name, parameter in fake.named_parameters():
        assert math.isclose(difference(parameter), parameter.grad.item(),
                            rel_tol=1e-4), name


def test_GradientsAreThoseThatTorchHas():
    """Of torch.fake_quantize_per_tensor_affine and its learnable kin."""
    x = torch.randn(500, generator=torch.Generator().manual_seed(7)) * 2
    encoding = quantd.Encoding("uint8", [0.02], zero_point=[100])
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    fake = quantd.torch.FakeQuantize(encoding)
    got = fake(mine)
    want = torch.fake_quantize_per_tensor_affine(theirs, 0.02, 100, 0, 255)
    # It multiplies by the reciprocal.
    assert float((got - want).abs().max()) < 0.021
    got.sum().backward()
    want.sum().backward()
    assert float((mine.grad != theirs.grad).sum()) <= 1


@pytest.mark.parametrize("shape", [(10, 33), (4, 10, 33)])
def test_TheFactorOfLsqIsThatOfThePaper(shape):
    x = torch.randn(*shape)
    channels = quantd.Encoding(
        "int4", np.full(shape[-2], 0.1, np.float32),
        block_size=(0,) * (len(shape) - 2) + (1, 0))
    for encoding, count in ((quantd.Encoding("int4", [0.1]), x.numel()),
                            (channels, x.numel() // shape[-2])):
        gradients = []
        for scale_gradient in (True, False):
            fake = quantd.torch.FakeQuantize(encoding, learn="scale",
                                             scale_gradient=scale_gradient)
            fake(x).square().sum().backward()
            gradients.append(fake.scale.grad)
        assert torch.allclose(gradients[0] * math.sqrt(count * 7),
                              gradients[1])


def test_ElementsHalfACodeBeyondTheEndAreClippedByLsqAlone():
    x = torch.tensor([7.3, 7.7, 7.0, -8.4], dtype=torch.float64)
    want = {None: [1, 0, 1, 1], "scale": [0, 0, 1, 0],
            "log2_scale": [1, 0, 1, 1], "range": [1, 0, 1, 1]}
    for learn, gradient in want.items():
        fake = quantd.torch.FakeQuantize(quantd.Encoding("int4", [1.0]),
                                         learn=learn, scale_gradient=False)
        given = x.clone().requires_grad_()
        fake(given).sum().backward()
        assert given.grad.tolist() == gradient
        if learn == "scale":
            assert fake.scale.grad.item() == 7 + 7 + 0 - 8


def test_PowersOfTwoAreRoundedUp(client):
    encoding = quantd.Encoding("int8", [0.3])
    fake = quantd.torch.FakeQuantize(encoding, learn="log2_scale",
                                     power_of_two=True)
    assert fake.encoding.scale.item() == 0.5
    x = data_of()
    assert same(fake(x), there_and_back(client, x, fake.encoding))
    fake(torch.tensor([1e9])).sum().backward()
    # qmax * s * ln 2.
    assert math.isclose(fake.log2_scale.grad.item(), 127 * 0.5 * math.log(2),
                        rel_tol=1e-6)


def test_ARangeIsThatOfAimet(client):
    """From -1 to 1 in uint8, in blocks of (1, 5)."""
    fake = quantd.torch.FakeQuantize(quantd.Encoding(
        "uint8", np.full((5, 2), 0.1, np.float32), block_size=(1, 5),
        zero_point=np.zeros((5, 2), np.int32)), learn="range",
        learn_zero_point=True)
    with torch.no_grad():
        fake.min.fill_(-1)
        fake.max.fill_(1)
    encoding = fake.encoding
    assert (encoding.scale == np.float32(2 / 255)).all()
    assert (encoding.zero_point == 128).all()
    x = torch.randn(5, 10)
    assert same(fake(x), there_and_back(client, x, encoding))
    # A range without zero gets it.
    with torch.no_grad():
        fake.min.fill_(0.5)
    assert not fake.encoding.zero_point.any()
    assert same(fake(x), there_and_back(client, x, fake.encoding))
    # The zero point is held where it is; x' = max - min for what is clipped.
    fake(torch.full((5, 10), 9.0)).sum().backward()
    assert torch.allclose(fake.min.grad, torch.full((5, 2), -5.0).double())
    assert torch.allclose(fake.max.grad, torch.full((5, 2), 5.0).double())


@pytest.mark.parametrize("learn", LEARNED)
@pytest.mark.parametrize("spec", ["int4", "uint4:asymmetric",
                                  "int4:per-channel"])
def test_TrainingFindsABetterRange(client, spec, learn):
    """From a range twice too large, on data with long tails."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(8, 500, generator=generator) ** 3
    encoding = client.quantize(x, spec).encoding
    fake = quantd.torch.FakeQuantize(encoding, learn=learn,
                                     scale_gradient=False)
    optimizer = torch.optim.Adam(fake.parameters(), lr=0.03)

    def loss():
        return (fake(x) - x).square().mean()

    before = loss().item()
    for _ in range(200):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.9 * before
    (metrics,) = client.evaluate(x, [fake.encoding])
    assert math.isclose(metrics.overall.mean_squared_error, loss().item(),
                        rel_tol=1e-4)


def test_ScalesStayPositive(client):
    fake = quantd.torch.FakeQuantize(quantd.Encoding("int8", [0.5]),
                                     learn="scale")
    with torch.no_grad():
        fake.scale.fill_(-3)
    x = data_of()
    assert fake.encoding.scale.item() == np.float32(2.0 ** -126)
    assert same(fake(x), there_and_back(client, x, fake.encoding))
    # And find back.
    (fake(torch.ones(4)) - 1).square().sum().backward()
    assert fake.scale.grad.item() < 0


@pytest.mark.parametrize("learn", [None, *LEARNED])
def test_TypesStateAndCopiesKeepTheReals(client, learn):
    encoding = encoding_of(client, "int8:per-channel:asymmetric")
    x = data_of()
    fake = quantd.torch.FakeQuantize(encoding, learn=learn)
    with torch.no_grad():
        for parameter in fake.parameters():
            parameter.mul_(1.1)
    want = fake(x)
    for other in (copy.deepcopy(fake), pickle.loads(pickle.dumps(fake)),
                  copy.deepcopy(fake).half(),
                  copy.deepcopy(fake).to(torch.bfloat16),
                  copy.deepcopy(fake).type(torch.float64)):
        assert torch.equal(other(x), want)
        assert other.encoding == fake.encoding
    other = quantd.torch.FakeQuantize(encoding, learn=learn)
    other.load_state_dict(fake.state_dict())
    assert torch.equal(other(x), want)
    assert "int8, 10 scales" in repr(fake)


@pytest.mark.parametrize("learn", [None, *LEARNED])
@pytest.mark.parametrize("spec", [
    "int8:per-channel:asymmetric", "int8:per-channel",
    "int4:group:11:scale=float16", "int4:group:11:scale=bfloat16"])
def test_TheEncodingIsThatOfTheStateThatWasLoaded(client, spec, learn):
    x = data_of()
    trained, fake = (quantd.torch.FakeQuantize(
        client.quantize(data, spec).encoding, learn=learn)
        for data in (torch.rand(10, 33) * 7 - 2, torch.rand(10, 33) - 0.7))
    fake.load_state_dict(trained.state_dict())
    want = there_and_back(client, x, trained.encoding)
    assert same(fake(x), want)
    assert same(there_and_back(client, x, fake.encoding), want)
    client.put_encoding(quantd.TensorName("f/loaded", "weight"), fake.encoding)
    stored = client.get_encoding(quantd.TensorName("f/loaded", "weight"))
    assert same(there_and_back(client, x, stored.encoding), want)


@pytest.mark.parametrize("spec", ["lpbq", "mxint8"])
def test_ScalesThatFollowFromOthersAreNotLoaded(client, spec):
    shape = (8, 64)
    fake, other = (quantd.torch.FakeQuantize(
        client.quantize(torch.rand(shape) * factor, spec).encoding)
        for factor in (1, 30))
    initial = fake.encoding
    fake.load_state_dict(copy.deepcopy(fake).state_dict())
    assert fake.encoding == initial
    fake.load_state_dict(other.state_dict())
    error = raised(lambda: fake.encoding)
    assert error.reason == "ARGUMENT_INVALID"
    assert initial.stored_scale_type in error.message


@pytest.mark.parametrize("learn", [None, *LEARNED])
@pytest.mark.parametrize("spec,fault", [
    ("int4:group:16", "block_size: expected [1, 11], got [1, 16]"),
    ("int4:group:11:full-range", "qmin: expected -7, got -8"),
    ("int3:group:11", "format: expected int4, got int3")])
def test_AStateWithAnotherLayoutIsNotLoaded(client, spec, fault, learn):
    """Though its scales have the shape of the module's."""
    fake, other = (quantd.torch.FakeQuantize(encoding_of(client, name),
                                             learn=learn)
                   for name in ("int4:group:11", spec))
    before = fake(data_of())
    for strict in (True, False):
        with pytest.raises(RuntimeError) as caught:
            fake.load_state_dict(other.state_dict(), strict=strict)
        assert fault in str(caught.value)
    assert torch.equal(fake(data_of()), before)
    # States without a layout are older.
    old = fake.state_dict()
    del old["_extra_state"]
    fake.load_state_dict(old)
    assert torch.equal(fake(data_of()), before)


def test_APowerOfTwoIsLoadedAsSuch(client):
    encoding = encoding_of(client, "int4:group:11")
    fake, other = (quantd.torch.FakeQuantize(
        encoding, learn="log2_scale", power_of_two=power_of_two)
        for power_of_two in (True, False))
    with pytest.raises(RuntimeError,
                       match="power_of_two: expected True, got False"):
        fake.load_state_dict(other.state_dict())


def test_ItIsAParametrizationOfAWeight(client):
    layer = torch.nn.Linear(33, 10).to(torch.bfloat16)
    weight = layer.weight.detach().clone()
    encoding = client.quantize(weight, "int4:group:11:scale=float16").encoding
    fake = quantd.torch.FakeQuantize(encoding, learn="scale")
    parametrize.register_parametrization(layer, "weight", fake)
    assert same(layer.weight, there_and_back(client, weight, encoding))
    layer(torch.randn(4, 33).bfloat16()).sum().backward()
    assert layer.parametrizations.weight.original.grad.dtype == torch.bfloat16
    assert fake.scale.grad.shape == (10, 3)
    assert fake.encoding.scale_type == "float32"
    client.put_encoding(quantd.TensorName("f/net", "weight"), fake.encoding)
    stored = client.get_encoding(quantd.TensorName("f/net", "weight")).encoding
    np.testing.assert_array_equal(stored.scale, encoding.scale)


def test_WhatIsNoneIsRefused(client):
    int8 = quantd.Encoding("int8", [0.1])
    for arguments, keywords in [
            (("int8",), {}), ((quantd.Encoding("float8_e4m3fn", [1.0]),), {}),
            ((int8,), {"learn": "lsq"}),
            ((int8,), {"learn_zero_point": True}),
            ((int8,), {"learn": "log2_scale", "learn_zero_point": True}),
            ((int8,), {"learn": "scale", "power_of_two": True}),
            ((encoding_of(client, "lpbq"),), {"learn": "scale"}),
            ((encoding_of(client, "mxint8"),), {"learn": "range"})]:
        assert raised(quantd.torch.FakeQuantize, *arguments, **keywords
                      ).reason == "ARGUMENT_INVALID"
    channels = quantd.torch.FakeQuantize(encoding_of(client,
                                                     "int8:per-channel"))
    for x in (torch.ones(11, 33), torch.ones(10, 33, 2),
              torch.ones(10, 33, dtype=torch.int64)):
        assert raised(channels, x).field == "array"
    # Other sizes along a whole dimension are fine.
    assert channels(torch.ones(10, 99)).shape == (10, 99)
