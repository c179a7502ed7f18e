"""Scales in chunks: every call answers as with scales in a header."""

import asyncio
import contextlib
import math
import os
import sqlite3

import numpy as np
import pytest

import quantd
import quantd.aio
import quantd.v1.encoding_pb2
import quantd.v1.quantization_service_pb2
from quantd import _answers, _scale_stream, encoding as encoding_module

SPECS = ["int8:group:4", "uint4:group:8:asymmetric", "int16:group:4:asymmetric",
         "uint8:group:4:real-zero-point", "int32:group:4",
         "int4:group:8:scale=float16", "int8:group:8:scale=bfloat16",
         "mxfp4_e2m1", "mxint8", "nvfp4", "lpbq", "nf4", "float8_e4m3fn:group:8",
         "int8:per-channel:1", "int8:block=3,8", "int4:group:8:mse",
         "codebook4:group:8:entries=" + ",".join(map(str, range(-8, 8)))]


@pytest.fixture(name="in_chunks")
def fixture_in_chunks(monkeypatch):
    """Nothing is small enough for a header."""
    def set_most(count):
        for module in (encoding_module, _scale_stream):
            monkeypatch.setattr(module, "MOST_SCALES_IN_HEADER", count)
    return set_most


@pytest.fixture(name="weight", scope="module")
def fixture_weight():
    return np.random.default_rng(2).standard_normal((50, 192), np.float32)


@pytest.fixture(name="small", scope="module")
def fixture_small(server):
    """Sends little in a message."""
    with quantd.Client(server.address, chunk_bytes=1024) as client:
        yield client


def assert_same(got, expected):
    assert got == expected
    np.testing.assert_array_equal(got.scale.ravel(), expected.scale.ravel())
    np.testing.assert_array_equal(got.stored_scale.ravel(),
                                  expected.stored_scale.ravel())
    assert got.zero_point.any() == expected.zero_point.any()
    assert got.zero_points_are_real == expected.zero_points_are_real


@pytest.mark.parametrize("spec", SPECS)
def test_ItIsAsWithScalesInAHeader(small, in_chunks, weight, spec):
    weight = weight.copy()
    weight[3, :8] = 0
    expected = small.quantize(weight, spec)
    reals = small.dequantize(expected)
    metrics = small.evaluate(weight, [expected.encoding, spec])
    in_chunks(0)
    got = small.quantize(weight, spec)
    assert got.codes.tobytes() == expected.codes.tobytes()
    assert_same(got.encoding, expected.encoding)
    assert got.encoding.degenerate_count == expected.encoding.degenerate_count
    np.testing.assert_array_equal(small.dequantize(got), reals)
    again = small.quantize(weight, got.encoding)
    assert again.codes.tobytes() == expected.codes.tobytes()
    assert_same(again.encoding, expected.encoding)
    for one, other in zip(metrics, small.evaluate(
            weight, [got.encoding, spec])):
        assert one.overall == other.overall
        assert other.encoding is None

    parts = small.quantize_chunks(np.split(weight, 5), spec,
                                  shape=weight.shape)
    assert b"".join(part.tobytes() for part in parts) == (
        expected.codes.tobytes())
    assert_same(parts.encoding, expected.encoding)
    parts = small.quantize_chunks(np.split(weight, 5), got.encoding,
                                  shape=weight.shape)
    assert b"".join(part.tobytes() for part in parts) == (
        expected.codes.tobytes())
    assert_same(parts.encoding, expected.encoding)
    parts = small.dequantize_chunks([got.codes.ravel()], got.encoding,
                                    shape=weight.shape)
    assert np.concatenate(list(parts)).tobytes() == reals.tobytes()
    assert small.evaluate_chunks(
        np.split(weight, 5), iter([got.encoding, spec]), shape=weight.shape
    )[0].overall == metrics[0].overall


def test_OnlyLargeEncodingsAreLeftOutOfAnEvaluation(server, client, in_chunks,
                                                    weight):
    specs = ["nvfp4", "int8", client.quantize(weight, "nvfp4").encoding,
             "uint4:group:8:asymmetric", "int8:per-channel"]
    labels = ["a", "b", "c", "d", "e"]
    expected = client.evaluate(weight, specs, labels=labels)
    in_chunks(100)

    async def run():
        async with quantd.aio.Client(server.address) as other:
            return await other.evaluate(weight, specs, labels=labels)
    for found in (client.evaluate(weight, specs, labels=labels),
                  asyncio.run(run())):
        assert [item.overall for item in found] == [
            item.overall for item in expected]
        assert [item.size_bytes for item in found] == [
            item.size_bytes for item in expected]
        assert [item.label for item in found] == labels
        assert found.statistics == expected.statistics
        assert found.statistics.count == weight.size
        assert [item.encoding is not None for item in found] == [
            False, True, False, False, True]
        for place in (1, 4):
            assert_same(found[place].encoding, expected[place].encoding)
    for found in (client.evaluate(weight, specs, encodings=False),
                  client.evaluate_chunks([weight], specs, shape=weight.shape)):
        assert [item.overall for item in found] == [
            item.overall for item in expected]
        assert [item.encoding for item in found] == [None] * 5
    in_chunks(1 << 16)
    assert client.evaluate_chunks([weight], specs, shape=weight.shape,
                                  encodings=False)[1].encoding is None


@pytest.mark.parametrize("spec", ["uint4:group:8:asymmetric", "nvfp4"])
def test_AioDoesTheSame(server, in_chunks, weight, spec):
    async def run():
        async with quantd.aio.Client(server.address) as client:
            expected = await client.quantize(weight, spec)
            in_chunks(0)
            got = await client.quantize(weight, spec)
            assert_same(got.encoding, expected.encoding)
            assert (await client.dequantize(got)).tobytes() == (
                expected.dequantize().tobytes())
            again = await client.quantize(weight, got.encoding)
            assert again.codes.tobytes() == expected.codes.tobytes()
            parts = client.dequantize_chunks(
                [got.codes.ravel()], got.encoding, shape=weight.shape)
            assert np.concatenate([part async for part in parts]).tobytes() == (
                expected.dequantize().tobytes())
            assert (await client.evaluate(weight, [got.encoding]))[
                0].overall == (await client.evaluate(
                    weight, [expected.encoding]))[0].overall
    asyncio.run(run())


@pytest.mark.parametrize("spec", ["uint4:group:8:asymmetric", "nvfp4",
                                  "int8:per-channel:1", "lpbq"])
def test_PartsOfATensorBringTheirOwnScales(client, in_chunks, weight, spec,
                                           monkeypatch):
    # What goes up in ranges, for retries.
    monkeypatch.setattr("quantd._exchange._PART_BYTES", 4096)
    monkeypatch.setattr("quantd._exchange._PART_BYTES_PER_HEADER_BYTE", 1)
    expected = client.quantize(weight, spec)
    in_chunks(0)
    firsts = []
    make = _scale_stream.ScaleFeed.__init__

    def note(feed, encoding, shape, first=0):
        firsts.append(first)
        make(feed, encoding, shape, first)
    monkeypatch.setattr(_scale_stream.ScaleFeed, "__init__", note)
    got = client.quantize(weight, expected.encoding)
    assert got.codes.tobytes() == expected.codes.tobytes()
    assert_same(got.encoding, expected.encoding)
    assert set(firsts) == set(range(0, weight.size, 1024))
    assert client.dequantize(got).tobytes() == expected.dequantize().tobytes()


@pytest.mark.parametrize("spec", ["nvfp4", "lpbq"])
@pytest.mark.parametrize("element_type", ["float32", "float16", "bfloat16"])
def test_OuterMaximaAreThoseOfTheServer(client, weight, spec, element_type,
                                        monkeypatch):
    array = weight.copy()
    array[0, 0], array[1, 1], array[2, 2] = np.inf, np.nan, -np.inf
    if element_type == "float16":
        array = array.astype(np.float16)
    if element_type == "bfloat16":
        array = (array.view(np.uint32) >> 16).astype(np.uint16)
    expected = client.quantize(array, spec, element_type=element_type)
    monkeypatch.setattr("quantd._exchange._OUTER_MAXIMUM_BYTES", 0)
    got = client.quantize(array, spec, element_type=element_type)
    assert got.codes.tobytes() == expected.codes.tobytes()
    assert_same(got.encoding, expected.encoding)


def test_ALargeEncodingIsWrittenAndReadWithoutAList(client, tmp_path):
    weight = np.random.default_rng(1).standard_normal((1 << 11, 1 << 11),
                                                      np.float32)
    got = client.quantize(weight, "int4:group:32")
    assert got.encoding.scale_count == 1 << 17
    quantd.save(tmp_path / "x.safetensors", {"a": got})
    tensor = quantd.load(tmp_path / "x.safetensors")["a"]
    assert_same(tensor.encoding, got.encoding)
    assert client.dequantize(tensor).tobytes() == got.dequantize().tobytes()


def test_OtherScalesThanTheShapeHasAreRefused(client, in_chunks):
    in_chunks(0)
    encoding = quantd.Encoding("int8", np.ones(3), block_size=(1, 0))
    with pytest.raises(quantd.QuantdError) as caught:
        client.quantize(np.ones((4, 4), np.float32), encoding)
    assert caught.value.reason == "ARGUMENT_INVALID"


@pytest.mark.parametrize("shape,block", [
    ((50, 192), (1, 8)), ((50, 192), (0, 8)), ((7, 6, 5), (2, 3, 2)),
    ((1, 1000), (1, 10)), ((1000,), (7,)), ((4, 5), (0, 0)), ((4, 5), ()),
    ((3, 4, 5), (0, 1, 0))])
def test_ScalesComeBeforeTheElementsThatUseThem(shape, block):
    dims = _scale_stream.counts(shape, block)
    index = np.arange(np.prod(dims)).reshape(dims)
    of_element = index[np.ix_(*(
        np.arange(size) // (step or size)
        for size, step in zip(shape, block or (0,) * len(shape))))].ravel()
    encoding = quantd.Encoding("int8", np.ones(dims), block_size=block)
    rows = next(d for d, size in enumerate(shape) if size > 1)
    band = math.prod(dims[rows + 1:])
    for first in (0, 3, 19, len(of_element) - 1):
        feed = _scale_stream.ScaleFeed(encoding, shape, first)
        # No more than those of the rows that share a block with the first.
        assert feed.first == of_element[first] // band * band
        assert feed.first <= of_element[first:].min()
        for element in range(first + 1, len(of_element) + 1):
            assert feed.end(element) > of_element[first:element].max()
        assert feed.end(len(of_element)) == index.size


def test_ChunksThatAreNotAllThereOrNotAsSentAreErrors():
    pb = quantd.v1.encoding_pb2
    qs = quantd.v1.quantization_service_pb2
    message = pb.Encoding(format=pb.NUMBER_FORMAT_INT8, block_size=[1, 0],
                          scales_in_chunks=True)
    scale = np.arange(1, 5, dtype=np.float32)

    def take(*chunks, checksum=None):
        sink = _scale_stream.ScaleSink(message, (4, 3))
        for chunk in chunks:
            sink.add(chunk.SerializeToString())
        return sink.take(qs.QuantizeSummary(
            scale_checksum_xxh3=_scale_stream.xxh3_64(
                scale.tobytes()).intdigest() if checksum is None else checksum))

    whole = pb.ScaleChunk(scale=scale.tobytes())
    first = pb.ScaleChunk(scale=scale[:1].tobytes())
    rest = pb.ScaleChunk(first=1, scale=scale[1:].tobytes())
    np.testing.assert_array_equal(take(whole).scale.ravel(), scale)
    np.testing.assert_array_equal(take(first, rest).scale.ravel(), scale)
    for chunks, reason in (
            ([], "RESPONSE_MALFORMED"), ([first], "RESPONSE_MALFORMED"),
            ([rest], "RESPONSE_MALFORMED"),
            ([rest, first], "RESPONSE_MALFORMED"),
            ([whole, first], "RESPONSE_MALFORMED"),
            ([pb.ScaleChunk(scale=b"abc")], "RESPONSE_MALFORMED"),
            ([pb.ScaleChunk(scale=scale[::-1].tobytes())],
             "CHECKSUM_MISMATCH"),
            ([whole, pb.ScaleChunk(outer_scale=b"1234")],
             "RESPONSE_MALFORMED"),
            ([whole, pb.ScaleChunk(zero_point=b"1")], "RESPONSE_MALFORMED")):
        with pytest.raises(quantd.QuantdError) as caught:
            take(*chunks)
        assert caught.value.reason == reason, chunks


@pytest.mark.parametrize("spec", ["uint4:group:8:asymmetric", "nvfp4", "lpbq",
                                  "int8:group:8:scale=bfloat16"])
def test_ChunksOfAStoredEncodingMakeIt(client, weight, spec, monkeypatch):
    # Many chunks, also of outer scales.
    monkeypatch.setattr(_scale_stream, "_CHUNK_BYTES", 40)
    encoding = client.quantize(weight, spec).encoding
    feed = _scale_stream.ScaleFeed(encoding, weight.shape)
    message = encoding.to_proto()
    for field in ("scale", "scale_code", "zero_point", "outer_scale"):
        message.ClearField(field)
    chunks = [quantd.v1.encoding_pb2.ScaleChunk.FromString(chunk)
              for begin in (0, 100) for chunk in feed.chunks(
                  begin, 100 if begin == 0 else encoding.scale_count, begin)]
    assert_same(_scale_stream.join_chunks(message, chunks), encoding)
    for damaged in ([], chunks[:-1], chunks[::-1]):
        with pytest.raises(quantd.QuantdError):
            _scale_stream.join_chunks(message, damaged)


def test_WhatChunksCannotHoldIsRefused(client, in_chunks):
    in_chunks(0)
    name = quantd.TensorName("acme/exact", "x")
    ones = np.ones(4, np.float32)
    for fields in ({"scale": ones * 0.1, "scale_type": "float16"},
                   {"scale": ones * 0.1, "scale_type": "bfloat16"},
                   {"scale": ones, "zero_point": [1, 2, 3]},
                   {"scale": ones, "zero_point": [1, 2, 3, 300]}):
        encoding = quantd.Encoding("uint8", block_size=(1, 0), **fields)
        with pytest.raises(quantd.QuantdError) as caught:
            client.put_encoding(name, encoding)
        assert caught.value.reason == "ARGUMENT_INVALID", fields
    assert "acme/exact" not in [model.model for model in client.list_models()]


def test_ScalesInChunksThatNobodyAskedForAreRefused():
    qs = quantd.v1.quantization_service_pb2
    asked = qs.QuantizeHeader()
    asked.tensor.shape.extend([4, 3])
    asked.tensor.element_type = 1
    asked.spec.format = quantd.v1.encoding_pb2.NUMBER_FORMAT_INT8
    got = qs.QuantizeResponseHeader(shape=[4, 3], size_bytes=12)
    got.encoding.format = asked.spec.format
    got.encoding.scales_in_chunks = True
    with pytest.raises(quantd.QuantdError) as caught:
        _answers.check_header(asked, True, got)
    assert caught.value.reason == "RESPONSE_MALFORMED"
    assert "unasked" in caught.value.message
    asked.scales_in_chunks = True
    _answers.check_header(asked, True, got)


def test_ListsTellWhatIsDamaged(server, client):
    encoding = quantd.Encoding("int8", [0.5])
    for revision in ("a", "b"):
        client.put_encoding(quantd.TensorName("damaged", "x", revision),
                            encoding)
        client.calibrate(
            np.ones(4, np.float32),
            name=quantd.TensorName("damaged", "x", revision),
            contribution=quantd.Contribution("rank-0", 1))
    with contextlib.closing(sqlite3.connect(
            os.path.join(server.folder, "store.db"))) as store, store:
        (damaged,) = store.execute(
            "SELECT set_id FROM row_sets WHERE revision = 'b' AND kind = 0"
        ).fetchone()
        for sql in (f"UPDATE row_sets SET generation = 7 "
                    f"WHERE set_id = {damaged}",
                    f"UPDATE encodings SET scale_count = 2 "
                    f"WHERE set_id = {damaged}",
                    "UPDATE statistics SET size_bytes = 7 WHERE set_id IN "
                    "(SELECT set_id FROM row_sets WHERE model = 'damaged' "
                    "AND revision = 'b')"):
            store.execute(sql)
    (model,) = [model for model in client.list_models()
                if model.model == "damaged"]
    assert (model.revision_count, model.encoding_count,
            model.statistics_count) == (2, 1, 2)
    whole, revision = client.list_revisions("damaged")
    assert (whole.revision, whole.encoding_count) == ("a", 1)
    (stored,) = client.list_encodings("damaged", "b")
    (entry,) = client.list_statistics("damaged", "b")
    assert (stored.name.tensor, entry.tensor) == ("x", "x")
    for told in (model, revision, stored, entry):
        assert told.error.reason == "STORE_CORRUPT"
        assert "checksum" in told.to_dicts()[0]["error"]
    for told in (whole, *client.list_encodings("damaged", "a"),
                 *client.list_statistics("damaged", "a")):
        assert told.error is None
