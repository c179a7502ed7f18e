"""Slices of tensors, as processes have them that share a layer: the service
makes of them, to the byte, what it makes of the whole."""

import itertools

import numpy as np
import pytest

import quantd
import quantd.edge

RANKS = 4


def cuts(extent, parts, step=1):
    """Uneven [begin, end) of so many parts, at multiples of `step`."""
    weights = np.arange(1, parts + 1)[::-1]
    edges = np.round(np.cumsum(weights) / weights.sum() * (extent // step))
    edges = [0, *(int(edge) * step for edge in edges[:-1]), extent]
    return list(zip(edges[:-1], edges[1:]))


def take(array, axis, begin, end):
    """The part, and where it lies."""
    place = [slice(None)] * array.ndim
    place[axis] = slice(begin, end)
    offset = [0] * array.ndim
    offset[axis] = begin
    return np.ascontiguousarray(array[tuple(place)]), quantd.Slice(
        array.shape, offset)


def values(shape, seed=1, odd=True):
    random = np.random.default_rng(seed)
    found = (random.standard_normal(shape) *
             np.exp(random.standard_normal(shape[-1:]))).astype(np.float32)
    if odd:
        flat = found.reshape(-1)
        flat[random.permutation(flat.size)[:6]] = [
            np.nan, np.inf, -np.inf, 0, -0.0, 1e-40]
    return found


def stored(client, name):
    found = client.get_statistics(name, with_state=True, with_moments=True)
    return (found.statistics, found.state.SerializeToString(), None if
            found.moments is None else found.moments.state.SerializeToString(
                deterministic=True), found.gram and found.gram.rows)


def reason_of(call):
    with pytest.raises(quantd.QuantdError) as error:
        call()
    return error.value.reason


GRANULARITIES = {"tensor": (None, 1), "channel": (quantd.per_channel(1), 1),
                 "rows": (quantd.per_channel(0), 1),
                 "groups": (quantd.group(8), 8)}


@pytest.mark.parametrize("parallel", (1, 2, 4))
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_statistics_and_moments_are_those_of_the_whole(
        client, granularity, parallel):
    """Each rank has its part of the features of every batch: as data, in
    chunks, or as a state; ranks come in any order, and again."""
    kept, step = GRANULARITIES[granularity]
    batches = [values((6, 96), seed) for seed in range(3)]
    features = quantd.FeatureStatistics(moments=True)
    model = f"whole/{granularity}-{parallel}"
    whole = quantd.TensorName(model, "whole")
    for sequence, batch in enumerate(batches, 1):
        client.calibrate(batch, whole, contribution=quantd.Contribution(
            "job", sequence, kept, 5, features=features))
    expected = stored(client, whole)
    parts = cuts(96, parallel, step)
    random = np.random.default_rng(7)
    for order in [*itertools.permutations(range(parallel))][::5]:
        name = quantd.TensorName(model, "-".join(map(str, order)))
        for rank in order:
            begin, end = parts[rank]
            for sequence, batch in enumerate(batches, 1):
                part, where = take(batch, 1, begin, end)
                contribution = quantd.Contribution(
                    f"rank-{rank}", sequence, kept, 5, features=features)
                for _ in range(1 + (random.random() < .3)):
                    how = random.integers(3)
                    if how == 0:
                        client.calibrate(part, name, slice_of=where,
                                         contribution=contribution)
                    elif how == 1:
                        client.calibrate_chunks(
                            np.array_split(part.reshape(-1), 5), name,
                            shape=part.shape, slice_of=where,
                            contribution=contribution)
                    else:
                        state = quantd.edge.State(kept, 5, moments=True,
                                                  slice_of=where)
                        state.update(part)
                        client.calibrate(state, name,
                                         contribution=contribution)
        assert stored(client, name) == expected


@pytest.mark.parametrize("kind", ("numpy", "torch"))
def test_states_of_slices(client, kind):
    """Of several batches, cut along an axis in the middle."""
    as_kind = pytest.importorskip("torch").from_numpy if kind == "torch" else (
        lambda array: array)
    batches = [values((count, 10, 6), count) for count in (3, 1, 5)]
    granularity = quantd.blocks(0, 2, 0)
    model = "states/" + kind
    whole, made = (quantd.TensorName(model, name) for name in ("a", "b"))
    features = quantd.FeatureStatistics(moments=True, axis=1)
    for sequence, batch in enumerate(batches, 1):
        client.calibrate(batch, whole, contribution=quantd.Contribution(
            "job", sequence, granularity, features=features))
    for rank, (begin, end) in enumerate(((0, 2), (2, 8), (8, 10))):
        state = quantd.edge.State(
            granularity, moments=True, axis=1,
            slice_of=quantd.Slice((3, 10, 6), (0, begin, 0)))
        for batch in batches:
            state.update(as_kind(np.ascontiguousarray(batch[:, begin:end])))
        client.calibrate(state, made, contribution=quantd.Contribution(
            f"rank-{rank}", 1))
    assert stored(client, made) == stored(client, whole)


def test_encodings_wait_for_all_slices(client):
    batch = values((6, 96), odd=False)
    name = quantd.TensorName("missing", "x")
    kept = quantd.per_channel(1)
    for rank in (0, 2, 1):
        begin, end = cuts(96, 3)[rank]
        part, where = take(batch, 1, begin, end)
        client.calibrate(part, name, slice_of=where,
                         contribution=quantd.Contribution(
                             f"rank-{rank}", 1, kept,
                             features=quantd.FeatureStatistics(moments=True)))
        spec = quantd.EncodingSpec("int8", kept)
        if rank != 1:
            (answer,) = client.compute_encodings("missing", spec)
            assert answer.error.reason == "STATISTICS_INCOMPLETE"
            assert reason_of(lambda: client.quantize(
                batch, "int4:group:8:mse:importance=x",
                name=quantd.TensorName("missing", "w"))
                             ) == "STATISTICS_INCOMPLETE"
    (computed,) = client.compute_encodings("missing", spec)
    assert computed.stored_encoding.encoding.scale.tobytes() == client.quantize(
        batch, spec).encoding.scale.tobytes()
    client.quantize(batch, "int4:group:8:mse:importance=x",
                    name=quantd.TensorName("missing", "w"))


def unpacked(tensor):
    return quantd.unpack(tensor.codes, tensor.encoding.format,
                         int(np.prod(tensor.shape))).reshape(tensor.shape)


SPECS = ["int8", "int4:per-channel", "int4:group:32", "uint4:group:32",
         "nvfp4", "mxfp4_e2m1", "nf4:group:32", "int3:per-channel:mse",
         "float8_e4m3fn", "int4:group:32:mse"]


@pytest.mark.parametrize("parallel", (1, 2, 4))
@pytest.mark.parametrize("axis", (0, 1))
@pytest.mark.parametrize("spec", SPECS)
def test_codes_are_those_of_the_whole(client, spec, axis, parallel):
    """With the encoding of the whole, stored and inline."""
    weight = values((24, 256), odd=False)
    name = quantd.TensorName("codes", f"{spec}/{axis}-{parallel}/w".replace(
        ":", "-"))
    whole = client.quantize(weight, spec, name=name, store=True)
    restored = client.dequantize(whole)
    for begin, end in cuts(weight.shape[axis], parallel, 32 if axis else 1):
        part, where = take(weight, axis, begin, end)
        place = (slice(begin, end),) if axis == 0 else (
            slice(None), slice(begin, end))
        expected = unpacked(whole)[place]
        for source in (quantd.EncodingReference(name), whole.encoding):
            found = client.quantize(part, source, slice_of=where)
            assert (unpacked(found) == expected).all()
            np.testing.assert_array_equal(client.dequantize(found),
                                          restored[place])
            # The whole's encoding serves the codes as well.
            np.testing.assert_array_equal(
                client.dequantize(found.codes, source, shape=part.shape,
                                  slice_of=where), restored[place])
            (metrics,) = client.evaluate(part, [source], slice_of=where)
            (direct,) = client.evaluate(part, [found.encoding])
            assert metrics.overall == direct.overall
        # Rows are packed apart: the bytes are those of the whole's as well.
        if axis == 0 and (begin * 256) % 8 == 0:
            flat = whole.codes.reshape(-1).view(np.uint8)
            size = found.codes.nbytes
            first = flat.nbytes * begin // 24
            assert found.codes.tobytes() == flat[first:first + size].tobytes()


@pytest.mark.parametrize("spec", ["int4:group:32:mse", "int3:per-channel:mse",
                                  "mxfp4_e2m1", "int4:group:32:half-step"])
def test_specs_that_need_no_more_than_the_slice(client, spec):
    weight = values((24, 256), odd=False)
    whole = client.quantize(weight, spec)
    for begin, end in cuts(24, 4):
        part, where = take(weight, 0, begin, end)
        found = client.quantize(part, spec, slice_of=where)
        assert (unpacked(found) == unpacked(whole)[begin:end]).all()
        np.testing.assert_array_equal(
            found.encoding.scale.reshape(end - begin, -1),
            whole.encoding.scale.reshape(24, -1)[begin:end])


def test_ranges_and_maxima_of_the_whole(client):
    weight = values((24, 256), odd=False)
    largest = float(np.abs(weight).max())
    whole = client.quantize(weight, "int8")
    ranged = quantd.EncodingSpec("int8", method="fixed-range",
                                 range=(-largest, largest))
    outer = client.quantize(weight, "nvfp4")
    for begin, end in cuts(256, 4, 32):
        part, where = take(weight, 1, begin, end)
        found = client.quantize(part, ranged, slice_of=where)
        assert (found.codes == whole.codes[:, begin:end]).all()
        (found,) = client.quantize_many([quantd.QuantizeJob(
            part, "nvfp4", outer_maximum=[largest], slice_of=where)])
        assert (unpacked(found) == unpacked(outer)[:, begin:end]).all()
    # A range for each scale.
    low, high = weight.min(1), weight.max(1)
    spec = quantd.EncodingSpec(
        "uint8", quantd.per_channel(), method="fixed-range",
        range=(low.tolist(), high.tolist()))
    whole = client.quantize(weight, spec)
    for begin, end in cuts(24, 4):
        part, where = take(weight, 0, begin, end)
        found = client.quantize(part, spec, slice_of=where)
        assert (found.codes == whole.codes[begin:end]).all()


@pytest.fixture(scope="module")
def inputs(client):
    rows = values((400, 256), 5, odd=False)
    name = quantd.TensorName("layer", "fc.input")
    client.calibrate(rows, name, contribution=quantd.Contribution(
        "job", 1, features=quantd.FeatureStatistics(gram=True, moments=True)))
    return name


@pytest.mark.parametrize("spec", ["int4:group:32", "int3:per-channel:mse",
                                  "int4:group:32:mse:importance"])
def test_rows_are_rounded_as_in_the_whole(client, inputs, spec):
    weight = values((24, 256), odd=False)
    name = quantd.TensorName("layer", "fc.weight")
    rounding = quantd.Rounding(inputs)
    whole = client.quantize(weight, spec, name=name, rounding=rounding)
    for begin, end in cuts(24, 4):
        part, where = take(weight, 0, begin, end)
        found = client.quantize(part, spec, name=name, rounding=rounding,
                                slice_of=where)
        assert (unpacked(found) == unpacked(whole)[begin:end]).all()
        found = client.quantize(part, whole.encoding, rounding=rounding,
                                slice_of=where)
        assert (unpacked(found) == unpacked(whole)[begin:end]).all()
        (metrics,) = client.evaluate(part, [whole.encoding], slice_of=where,
                                     inputs=inputs)
        assert metrics.output_noise.noise_to_signal > 0
    part, where = take(weight, 1, 0, 128)
    assert reason_of(lambda: client.quantize(
        part, whole.encoding, rounding=rounding,
        slice_of=where)) == "SHAPE_INVALID"
    assert reason_of(lambda: client.evaluate(
        part, [whole.encoding], inputs=inputs,
        slice_of=where)) == "SHAPE_INVALID"


def test_weights_of_columns_are_cut(client, inputs):
    weight = values((24, 256), odd=False)
    name = quantd.TensorName("layer", "fc.weight")
    spec = "int4:group:32:mse:importance"
    inline = quantd.EncodingSpec(
        "int4", quantd.group(32), method="mse", importance=quantd.Importance(
            weight=np.arange(256) % 7 + .5))
    for source in (spec, inline):
        whole = client.quantize(weight, source, name=name)
        for begin, end in cuts(256, 4, 32):
            part, where = take(weight, 1, begin, end)
            found = client.quantize(part, source, name=name, slice_of=where)
            assert (unpacked(found) == unpacked(whole)[:, begin:end]).all()


def test_gram_takes_slices_of_rows(client):
    rows = values((40, 64), odd=False)
    steps = quantd.gram_steps(rows)
    features = quantd.FeatureStatistics(gram=True, step_exponent=steps)
    names = [quantd.TensorName("gram", name) for name in ("a", "b")]
    client.calibrate(rows, names[0], contribution=quantd.Contribution(
        "job", 1, features=features))
    for rank, (begin, end) in enumerate(cuts(40, 4)):
        part, where = take(rows, 0, begin, end)
        client.calibrate(part, names[1], slice_of=where,
                         contribution=quantd.Contribution(
                             f"rank-{rank}", 1, features=features))
    weight = values((8, 64), 3, odd=False)
    assert len({client.quantize(
        weight, "int4:per-channel",
        rounding=quantd.Rounding(name)).codes.tobytes() for name in names}) == 1
    part, where = take(rows, 1, 0, 32)
    with pytest.raises(quantd.QuantdError) as error:
        client.calibrate(part, names[1], slice_of=where,
                         contribution=quantd.Contribution(
                             "job", 2, features=quantd.FeatureStatistics()))
    assert error.value.reason == "CONTRIBUTION_INVALID"
    assert "32 of 64 features" in str(error.value)
    with pytest.raises(quantd.QuantdError) as error:
        quantd.edge.State(step_exponent=steps, slice_of=where).update(part)
    assert error.value.reason == "ARGUMENT_INVALID"


def test_what_does_not_fit_is_told(client):
    weight = values((24, 256), odd=False)
    name = quantd.TensorName("bad", "w")
    whole = client.quantize(weight, "int4:group:32", name=name, store=True)
    part, where = take(weight, 1, 0, 48)

    def quantize(source, place=where, **options):
        return reason_of(lambda: client.quantize(part, source, slice_of=place,
                                                 name=name, **options))

    # Cuts a block, or has a part of what a scale depends on.
    for source in (whole.encoding, quantd.EncodingReference(name),
                   "int4:group:32", "int8", "int8:per-channel"):
        assert quantize(source) == "BLOCK_SIZE_INVALID"
    (nested,) = [client.quantize(weight, "nvfp4").encoding]
    assert quantize("nvfp4") == "BLOCK_SIZE_INVALID"
    assert not isinstance(client.quantize(part, nested, slice_of=where), str)
    assert quantize("int4:per-channel", quantd.Slice((24, 48), (0, 0)),
                    store=True) == "SHAPE_INVALID"
    for place in (quantd.Slice((24, 256), (0, 209)),
                  quantd.Slice((24, 40), (0, 0)),
                  quantd.Slice((24,), (0,)),
                  quantd.Slice((24, 256, 1), (0, 0, 0)),
                  quantd.Slice((), (0, 0))):
        assert quantize(whole.encoding, place) == "SHAPE_INVALID"
    assert reason_of(lambda: quantd.Client.quantize(
        client, part, "int8", slice_of=(24, 256))) == "ARGUMENT_INVALID"
    assert quantize(quantd.EncodingSpec(
        "int4", quantd.per_channel(), unsigned_if_non_negative=True)
                    ) == "SYMMETRY_INVALID"
    assert reason_of(lambda: client.calibrate(
        part, name, "int8", slice_of=where)) == "SHAPE_INVALID"
    assert reason_of(lambda: client.calibrate(
        part, name, slice_of=where, contribution=quantd.Contribution(
            "job", 1, quantd.group(32)))) == "BLOCK_SIZE_INVALID"


class Placement:
    """Of torch 2."""

    def __init__(self, dim=None, partial=False):
        self.dim = dim
        self._is_partial = partial

    def is_shard(self):
        return self.dim is not None

    def is_replicate(self):
        return self.dim is None and not self._is_partial


class Mesh:

    def __init__(self, sizes, coordinate):
        self._sizes = sizes
        self._coordinate = coordinate

    def size(self, axis):
        return self._sizes[axis]

    def get_coordinate(self):
        return self._coordinate


def distributed(whole, sizes, coordinate, placements):
    """What a DTensor of torch 2 is, as torch.chunk cuts it."""
    torch = pytest.importorskip("torch")

    class DTensor(torch.Tensor):
        pass

    local = torch.from_numpy(whole)
    for size, rank, placement in zip(sizes, coordinate, placements):
        if placement.is_shard():
            parts = torch.chunk(local, size, placement.dim)
            local = parts[rank] if rank < len(parts) else local.narrow(
                placement.dim, 0, 0)
    found = torch.from_numpy(whole).as_subclass(DTensor)
    found.placements = placements
    found.device_mesh = Mesh(sizes, coordinate)
    found.to_local = lambda: local.contiguous()
    return found


def test_a_distributed_tensor_says_where_it_lies(client):
    """Uneven parts, along one dimension twice, and copies."""
    weight = values((10, 64), odd=False)
    whole = client.quantize(weight, "int8:per-channel")
    sizes = (2, 3)
    for placements in ((Placement(0), Placement(1)),
                       (Placement(0), Placement(0)),
                       (Placement(), Placement(-1)),
                       (Placement(), Placement())):
        placements = tuple(Placement(p.dim % 2) if p.is_shard() else p
                           for p in placements)
        model = "distributed/" + "-".join(str(p.dim) for p in placements)
        names = [quantd.TensorName(model, name) for name in ("a", "b")]
        kept = quantd.per_channel(0)
        client.calibrate(weight, names[0], contribution=quantd.Contribution(
            "job", 1, kept))
        for coordinate in itertools.product(*map(range, sizes)):
            part = distributed(weight, sizes, coordinate, placements)
            if part.to_local().numel():
                found = client.quantize(part, whole.encoding)
                local, where = quantd._sharding.part_of(part, None)
                offset = where.offset if where else (0, 0)
                place = tuple(slice(first, first + extent) for first, extent in
                              zip(offset, local.shape))
                assert (np.asarray(found.codes) == whole.codes[place]).all()
                (metrics,) = client.evaluate(part, [whole.encoding])
                assert metrics.overall.count == local.numel()
            if quantd._sharding.is_counted_here(part):
                client.calibrate(part, names[1],
                                 contribution=quantd.Contribution(
                                     "-".join(map(str, coordinate)), 1, kept))
        assert stored(client, names[1]) == stored(client, names[0])
    partial = distributed(weight, (2,), (0,), (Placement(partial=True),))
    with_slice = distributed(weight, (2,), (0,), (Placement(0),))
    absent = distributed(weight, (2,), (0,), (Placement(0),))
    absent.device_mesh = Mesh((2,), None)
    for bad in (lambda: client.quantize(partial, whole.encoding),
                lambda: client.quantize(absent, whole.encoding),
                lambda: client.quantize(with_slice, whole.encoding,
                                        slice_of=quantd.Slice((10, 64), (0, 0))),
                lambda: quantd.edge.State().update(with_slice)):
        assert reason_of(bad) == "ARGUMENT_INVALID"


def test_a_rank_may_have_nothing(client):
    batch = values((6, 3), odd=False)
    name = quantd.TensorName("nothing", "x")
    kept = quantd.per_channel(1)
    features = quantd.FeatureStatistics(moments=True)
    for rank, (begin, end) in enumerate(((0, 1), (1, 1), (1, 3), (3, 3))):
        part, where = take(batch, 1, begin, end)
        client.calibrate(part, name, slice_of=where,
                         contribution=quantd.Contribution(
                             f"rank-{rank}", 1, kept, features=features))
    whole = quantd.TensorName("nothing", "y")
    client.calibrate(batch, whole, contribution=quantd.Contribution(
        "job", 1, kept, features=features))
    assert stored(client, name) == stored(client, whole)


class Other(quantd.edge.State):
    """Says that it is of another place."""

    def serialized(self):
        found = super().serialized()
        self.slice_of = quantd.Slice((6, 96), (0, 20))
        return found


def test_refuses_a_state_of_another_slice(client):
    part, where = take(values((6, 96), odd=False), 1, 10, 40)
    name = quantd.TensorName("other", "x")
    for options in (dict(granularity=quantd.per_channel(1)),
                    dict(moments=True)):
        state = Other(slice_of=where, **options)
        state.update(part)
        assert reason_of(lambda state=state: client.calibrate(
            state, name, contribution=quantd.Contribution("job", 1))
                         ) == "STATISTICS_INVALID"
