"""States that are made at the edge: what the service makes of them is to the
byte what it makes of the data."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

import live_server
import quantd
import quantd.edge
from quantd.v1 import statistics_pb2

torch = pytest.importorskip("torch")

FLOATS = ("float32", "float16", "bfloat16", "float64")


def tensor(shape, element_type="float32", seed=1, odd=True):
    """Of torch. odd: with elements that are not finite, zeros of both signs,
    subnormal ones and ones beyond float32."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * np.exp(
        random.standard_normal(shape[-1:]))
    if odd and values.size > 40:
        flat = values.reshape(-1)
        where = random.permutation(flat.size)[:12]
        flat[where] = [np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, -1e-40, 1e300,
                       -1e300, 6e-8, -6e-8, 3.4028235677973366e38]
    return torch.from_numpy(np.asarray(values)).to(getattr(torch, element_type))


def as_numpy(value):
    """The array and what client and State need to be told of it."""
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(np.uint16), "bfloat16"
    return value.numpy(), None


def state_of(tensors, kind, **options):
    state = quantd.edge.State(**options)
    for value in tensors:
        if kind == "torch":
            state.update(value)
        else:
            state.update(*as_numpy(value))
    return state


def steps_of(value):
    return quantd.gram_steps(*as_numpy(value))


def contribute(client, name, value, source="job", sequence=1, steps=None,
               **options):
    features = None if steps is None else quantd.FeatureStatistics(
        step_exponent=steps)
    return client.calibrate(value, name, contribution=quantd.Contribution(
        source, sequence, features=features, **options))


def stored(client, name):
    """What GetStatistics answers, without sources."""
    found = client.get_statistics(name, with_state=True)
    # What it takes depends on how many sources there are.
    gram = found.gram and dataclasses.replace(found.gram, size_bytes=0)
    return found.statistics, found.state.SerializeToString(), gram


@pytest.fixture(autouse=True)
def of_torch(monkeypatch):
    """Tensors of torch are worked on as on other devices."""
    monkeypatch.setattr(quantd.edge, "_DEVICES_OF_NUMPY", ())


@pytest.mark.parametrize("element_type", FLOATS)
def test_numpy_works_on_what_torch_has_on_the_cpu(element_type, monkeypatch):
    monkeypatch.undo()
    tensors = [tensor((600, 300), element_type, seed) for seed in range(2)]
    for options in {}, {"granularity": quantd.per_channel(0), "moments": True}:
        made = state_of(tensors, "torch", **options)
        assert made.serialized() == state_of(tensors, "numpy",
                                             **options).serialized()
        assert all(isinstance(row, np.ndarray) for row in made._bins.table)
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.edge.State().update(tensors[0], "float64" if element_type ==
                                   "float32" else "float32")
    assert caught.value.reason == "ARGUMENT_INVALID"


CASES = [
    ((3, 50), None, 0), ((3, 50), quantd.per_channel(1), 0),
    ((50, 3, 5), quantd.per_channel(0), 10), ((6, 70), quantd.group(32), 2),
    ((5, 7), (2, 3), 4), ((300, 9), quantd.per_channel(0), 0), ((70,), None, 3),
    ((), None, 0), ((4, 0), None, 0), ((600, 2048), None, 0)]


@pytest.mark.parametrize("kind", ("torch", "numpy"))
@pytest.mark.parametrize("element_type", FLOATS)
def test_a_state_is_worth_the_data(client, kind, element_type):
    for number, (shape, granularity, bits) in enumerate(CASES):
        model = f"worth/{kind}-{element_type}-{number}"
        data, made = (quantd.TensorName(model, name) for name in ("a", "b"))
        options = dict(granularity=granularity, mantissa_bits=bits)
        tensors = [tensor(shape, element_type, seed) for seed in range(2)]
        for sequence, value in enumerate(tensors, 1):
            contribute(client, data, value, sequence=sequence,
                       force_statistics=True, **options)
        result = contribute(client, made, state_of(tensors, kind, **options))
        assert stored(client, made) == stored(client, data), (shape, granularity)
        assert result.statistics == stored(client, data)[0]
        assert result.contribution.sequence == 1


def test_batches_differ_where_nothing_is_split(client):
    tensors = [tensor((rows, 40), seed=rows) for rows in (3, 1, 7)]
    options = dict(granularity=quantd.per_channel(1))
    for sequence, value in enumerate(tensors, 1):
        contribute(client, quantd.TensorName("batches", "a"), value,
                   sequence=sequence, **options)
    contribute(client, quantd.TensorName("batches", "b"),
               state_of(tensors, "torch", **options))
    assert stored(client, quantd.TensorName("batches", "a")) == stored(
        client, quantd.TensorName("batches", "b"))


def moments_of(client, name):
    found = client.get_statistics(name, with_moments=True).moments
    return found.state.SerializeToString(deterministic=True)


@pytest.mark.parametrize("kind", ("torch", "numpy"))
@pytest.mark.parametrize("element_type", FLOATS)
def test_moments_are_worth_the_data(client, kind, element_type):
    for number, (shape, axis) in enumerate((
            ((3, 50), -1), ((3, 50), 0), ((4, 5, 6, 2), 1), ((70,), 0),
            ((90, 400), 1), ((2, 3), -2))):
        model = f"moments/{kind}-{element_type}-{number}"
        data, made = (quantd.TensorName(model, name) for name in ("a", "b"))
        tensors = [tensor(shape, element_type, seed) for seed in range(3)]
        features = quantd.FeatureStatistics(moments=True, axis=axis)
        for sequence, value in enumerate(tensors, 1):
            client.calibrate(value, data, contribution=quantd.Contribution(
                "job", sequence, features=features))
        contribute(client, made, state_of(tensors[:2], kind, moments=True,
                                          axis=axis))
        result = contribute(client, made, state_of(
            tensors[2:], kind, moments=True, axis=axis), "other")
        assert stored(client, made) == stored(client, data), shape
        assert moments_of(client, made) == moments_of(client, data), shape
        assert result.contribution.moments.feature_count == shape[axis]


def test_moments_of_nothing_and_of_zeros(client):
    for number, values in enumerate((np.zeros((3, 4)), np.zeros((0, 4)),
                                     np.full((2, 4), np.nan))):
        name = quantd.TensorName("moments", f"zeros-{number}")
        state = state_of([torch.from_numpy(values).float()], "numpy",
                         moments=True)
        contribute(client, name, state)
        assert client.get_statistics(name).statistics.count == values.size


def codes(client, name):
    """Of a weight that is rounded for these inputs."""
    features = tuple(client.get_statistics(name, with_state=True).state.shape)[1]
    weight = tensor((16, features), seed=9, odd=False).numpy()
    return client.quantize(weight, "int4:group:32", rounding=quantd.Rounding(
        name), name=quantd.TensorName(name.model, "weight")).codes.tobytes()


@pytest.mark.parametrize("kind", ("torch", "numpy"))
@pytest.mark.parametrize("element_type", FLOATS)
def test_a_gram_state_is_worth_the_rows(client, kind, element_type):
    model = f"gram/{kind}-{element_type}"
    data, made = (quantd.TensorName(model, name) for name in ("a", "b"))
    tensors = [tensor((rows, 160), element_type, rows) for rows in (50, 1, 90)]
    # Some elements are limited.
    steps = steps_of(tensors[1])
    for sequence, value in enumerate(tensors, 1):
        found = contribute(client, data, value, sequence=sequence, steps=steps)
    result = contribute(client, made, state_of(tensors, kind,
                                               step_exponent=steps))
    assert stored(client, made) == stored(client, data)
    assert codes(client, made) == codes(client, data)
    gram = result.contribution.gram
    assert gram.rows + gram.left_out_rows == 141
    assert gram.left_out_rows > 0 and gram.clipped_count > 0
    assert found.contribution.gram.left_out_rows < gram.left_out_rows


def test_a_gram_state_in_parts(client):
    data, made = (quantd.TensorName("parts", name) for name in "ab")
    value = tensor((40, 300), odd=False)
    features = dict(step_exponent=steps_of(value), max_part=128)
    client.calibrate(value, data, contribution=quantd.Contribution(
        "job", 1, features=quantd.FeatureStatistics(**features)))
    contribute(client, made, state_of([value], "torch", **features))
    assert stored(client, made) == stored(client, data)
    assert codes(client, made) == codes(client, data)


def test_a_state_of_many_messages(client):
    """1,024 features are 4.2 MB."""
    value = tensor((64, 1024), odd=False)
    steps = steps_of(value)
    state = state_of([value], "torch", step_exponent=steps)
    assert len(state.serialized()) > 4 << 20
    data, made = (quantd.TensorName("many", name) for name in "ab")
    contribute(client, data, value, steps=steps)
    contribute(client, made, state)
    assert stored(client, made) == stored(client, data)
    assert codes(client, made) == codes(client, data)


def test_four_ranks_in_any_order_with_data_or_states(client):
    ranks = [[tensor((rows, 96), seed=10 * rank + rows, odd=rank == 2)
              for rows in (5, 30, 12)] for rank in range(4)]
    steps = steps_of(ranks[0][0])
    features = quantd.FeatureStatistics(gram=True, step_exponent=steps,
                                        moments=True)
    random = np.random.default_rng(3)
    seen = set()
    for number, order in enumerate([*itertools.permutations(range(4))][::4]):
        name = quantd.TensorName("ranks", f"x{number}")
        for rank in order:
            # Cut anywhere: what the batches of a rank are does not matter.
            rows = torch.cat(ranks[rank])
            cuts = np.sort(random.integers(1, len(rows), number))
            batches = [part for part in np.split(np.arange(len(rows)), cuts)
                       if len(part)]
            sequence = 0
            while batches:
                count = int(random.integers(1, len(batches) + 1))
                some = [rows[part] for part in batches[:count]]
                batches = batches[count:]
                sequence += 1
                if random.random() < .6:
                    value = state_of(some, "torch", step_exponent=steps,
                                     moments=True)
                else:
                    value = torch.cat(some)
                for _ in range(1 + (random.random() < .3)):
                    client.calibrate(value, name, contribution=(
                        quantd.Contribution(f"rank-{rank}", sequence,
                                            features=features)))
        statistics, state, gram = stored(client, name)
        message = statistics_pb2.StatisticsState.FromString(state)
        # The largest batch decides it.
        del message.shape[:]
        seen.add((statistics, message.SerializeToString(), gram,
                  moments_of(client, name), codes(client, name)))
    assert len(seen) == 1


def test_a_sequence_counts_once(client):
    name = quantd.TensorName("once", "x")
    state = state_of([tensor((4, 8))], "torch")
    assert not contribute(client, name, state).contribution.duplicate
    before = stored(client, name)
    assert contribute(client, name, state).contribution.duplicate
    assert stored(client, name) == before
    result = client.calibrate(state, name, "uint8:mse",
                              contribution=quantd.Contribution("job", 2))
    assert result.stored_encoding and not result.contribution.duplicate
    assert stored(client, name)[0].count == 64


class Changed(quantd.edge.State):
    """Says something else."""

    change = None

    def serialized(self):
        message = statistics_pb2.ContributionState.FromString(
            super().serialized())
        return self.change(message) or message.SerializeToString()


def add_one(sums):
    """To the lowest bit of the first feature."""
    first = int.from_bytes(sums.integers[:sums.width], "little", signed=True)
    sums.integers = (first + 1).to_bytes(sums.width, "little", signed=True
                                         ) + sums.integers[sums.width:]


def unknown(message):
    message.MergeFromString(b"\x7a\x00")


def widen(sums):
    count = len(sums.integers) // sums.width
    sums.integers = b"".join(
        sums.integers[i * sums.width:(i + 1) * sums.width] + b"\0"
        for i in range(count))
    sums.width += 1


def make_indefinite(message):
    """Each pair of features may be, three together may not."""
    gram = message.gram
    count = len(gram.step_exponent)
    squares = [gram.code_sum[i] for i in (0, count, 2 * count - 1)]
    for place, i, j, sign in ((1, 0, 1, 1), (2, 0, 2, 1), (count + 1, 1, 2, -1)):
        gram.code_sum[place] = sign * int(
            0.9 * math.sqrt(squares[i] * squares[j]))


CHANGES = {
    "count": lambda m: setattr(m.statistics.statistics, "count", 33),
    "other rows": lambda m: setattr(m.gram, "rows", 5),
    "left out": lambda m: setattr(m.gram, "left_out_rows", 1),
    "minimum": lambda m: m.statistics.min.__setitem__(0, -99),
    "bin": lambda m: m.statistics.histograms[0].count.__setitem__(0, 7),
    "key": lambda m: m.statistics.histograms[0].key_delta.__setitem__(
        0, 1 << 20),
    "moments": lambda m: m.statistics.histograms[0].low_sum.__setitem__(
        0, 1 << 40),
    "other index": lambda m: m.statistics.non_finite_scale_index.append(1),
    "shape": lambda m: m.statistics.shape.__setitem__(0, 5),
    "blocks": lambda m: m.statistics.block_size.__setitem__(1, 2),
    "bits": lambda m: setattr(m.statistics, "mantissa_bits", 6),
    "version": lambda m: setattr(m.statistics, "version", 2),
    "diagonal": lambda m: m.gram.code_sum.__setitem__(0, -1),
    "products": lambda m: m.gram.code_sum.__setitem__(1, 1 << 40),
    "indefinite": make_indefinite,
    "squares": lambda m: m.gram.code_sum.__setitem__(
        slice(None), [2 * s for s in m.gram.code_sum]),
    "large": lambda m: m.gram.code_sum.__setitem__(
        0, (2**20 - 1)**2 * 4 + 1),
    "width": lambda m: m.gram.step_exponent.append(0),
    "steps": lambda m: m.gram.step_exponent.__setitem__(0, 9),
    "part": lambda m: setattr(m.gram, "part_size", 4),
    "limited": lambda m: setattr(m.gram, "clipped_count", 33),
    "sums": lambda m: m.gram.code_sum.append(0),
    "no gram": lambda m: m.ClearField("gram"),
    "no statistics": lambda m: m.ClearField("statistics"),
    "unknown field": lambda m: m.SerializeToString() + b"\x7a\x00",
    "twice": lambda m: 2 * m.SerializeToString(),
    "no moments": lambda m: m.ClearField("moments"),
    "feature count": lambda m: m.moments.count.__setitem__(2, 3),
    "left out feature": lambda m: m.moments.left_out.__setitem__(2, 1),
    "one feature less": lambda m: m.moments.count.__delitem__(-1),
    "other axis": lambda m: setattr(m.moments, "axis", 0),
    "sum": lambda m: add_one(m.moments.sum),
    "square sum": lambda m: add_one(m.moments.square_sum),
    "width of sums": lambda m: setattr(m.moments.sum, "width", 99),
    "exponent": lambda m: setattr(m.moments.sum, "exponent", -150),
    "not the one form": lambda m: widen(m.moments.square_sum),
    "field in moments": lambda m: unknown(m.moments.sum),
    "cut": lambda m: m.SerializeToString()[:-3],
    "noise": lambda m: b"\xff" * 99,
}


@pytest.mark.parametrize("case", CHANGES)
def test_refuses_a_state_that_contradicts_itself(client, case):
    name = quantd.TensorName("changed", case.replace(" ", "-"))
    value = tensor((4, 8), odd=False)
    options = dict(step_exponent=steps_of(value), moments=True,
                   granularity=quantd.per_channel(1))
    contribute(client, name, state_of([value], "torch", **options))
    before = stored(client, name)
    state = Changed(**options)
    state.change = CHANGES[case]
    state.update(value)
    with pytest.raises(quantd.QuantdError) as error:
        contribute(client, name, state, sequence=2)
    assert error.value.reason == "STATISTICS_INVALID", error.value
    assert error.value.code.name == "INVALID_ARGUMENT"
    assert stored(client, name) == before
    # The sequence is free.
    assert not contribute(client, name, state_of(
        [value], "torch", **options), sequence=2).contribution.duplicate


def test_a_state_with_other_steps_hears_of_those_there_are(client):
    name = quantd.TensorName("steps", "x")
    value = tensor((4, 8), odd=False)
    steps = steps_of(value)
    contribute(client, name, value, steps=steps)
    other = list(steps)
    other[5] += 1
    with pytest.raises(quantd.QuantdError) as error:
        contribute(client, name, state_of([value], "torch",
                                          step_exponent=other), sequence=2)
    assert error.value.reason == "STATISTICS_MISMATCH"
    assert error.value.code.name == "FAILED_PRECONDITION"
    assert f"feature 5 has the step 2^{other[5]}, expected 2^{steps[5]}" in str(
        error.value)
    gram = client.get_statistics(name).gram
    assert gram.step_exponent == tuple(steps) and gram.part_size == 8
    contribute(client, name, state_of(
        [value], "torch", step_exponent=gram.step_exponent), sequence=2)
    with pytest.raises(quantd.QuantdError) as error:
        contribute(client, name, state_of(
            [value[:, :4]], "torch", step_exponent=steps[:4]), sequence=3)
    assert error.value.reason == "STATISTICS_MISMATCH"


def test_a_state_that_does_not_fit_is_refused_before_it_comes(request):
    value = tensor((8, 1024), odd=False)
    steps = steps_of(value)
    with live_server.LiveServer(
            request.config.getoption("--quantd"),
            flags=["--memory-budget-bytes", "32MiB"]) as live, quantd.Client(
                live.address) as client:
        small = state_of([value], "torch")
        contribute(client, quantd.TensorName("budget", "x"), small)
        with pytest.raises(quantd.QuantdError) as error:
            contribute(client, quantd.TensorName("budget", "y"), state_of(
                [tensor((8, 2304), odd=False)], "torch",
                step_exponent=steps + steps + steps[:256]))
        assert error.value.reason == "MEMORY_BUDGET"
        assert [entry.tensor for entry in client.list_statistics(
            "budget")] == ["x"]


def test_refuses_what_does_not_go_together(client):
    for make in (lambda: quantd.edge.State(mantissa_bits=1),
                 lambda: quantd.edge.State().serialized(),
                 lambda: state_of([tensor((4, 8))], "torch",
                                  step_exponent=[0] * 7),
                 lambda: state_of([tensor((4, 8)), tensor((4, 9))], "torch",
                                  granularity=quantd.per_channel(1)),
                 lambda: state_of([tensor((4, 8)), tensor((4,))], "numpy"),
                 lambda: state_of([tensor((4, 8)), tensor((4, 9))], "torch",
                                  moments=True),
                 lambda: state_of([tensor((4, 8))], "torch", moments=True,
                                  axis=2),
                 lambda: state_of([torch.ones(3, dtype=torch.int32)], "torch"),
                 lambda: client.calibrate(state_of([tensor((4,))], "torch"))):
        with pytest.raises(quantd.QuantdError) as error:
            make()
        assert error.value.reason == "ARGUMENT_INVALID"


def test_takes_little_of_the_network():
    """What goes up of 32 batches of 2,048 tokens, bfloat16."""
    steps = [-9] * 1024
    tokens, batches = 256, 2
    with_gram = quantd.edge.State(step_exponent=steps)
    without = quantd.edge.State()
    for seed in range(batches):
        value = tensor((tokens, 1024), "bfloat16", seed)
        with_gram.update(value)
        without.update(value)
    raw = 32 * 2048 * 1024 * 2
    small, large = len(without.serialized()), len(with_gram.serialized())
    print(f"\nof {raw} bytes: histograms {small} ({small / raw:.4%}), with the "
          f"Gram matrix {large} ({large / raw:.2%})")
    assert small < .001 * raw
    assert large < 4.3e6
