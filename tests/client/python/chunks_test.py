"""Tensors in parts, results without the server, and progress, with a live
quantd."""

import concurrent.futures
import dataclasses
import math
import threading
import warnings

import grpc
import numpy as np
import pytest

import quantd
from quantd.tensor import FORMATS
from quantd.v1 import quantization_service_pb2 as qs


def data_of(*shape, seed=1, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def fails(reason, call, *args, **kwargs):
    with pytest.raises(quantd.QuantdError) as caught:
        call(*args, **kwargs)
    assert caught.value.reason == reason, caught.value
    return caught.value


def parts_of(array, *sizes):
    """Its elements in arrays of these sizes and one of the rest."""
    return np.split(array.reshape(-1), np.cumsum(sizes))


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 1 << 20])
def test_PartsGiveTheBytesOfTheWhole(server, chunk_bytes):
    x = data_of(60, 500)
    with quantd.Client(server.address, chunk_bytes=chunk_bytes) as client:
        whole = client.quantize(x, "int8:per-channel")
        with client.quantize_chunks(
                parts_of(x, 1, 0, 7, 11111), whole.encoding,
                shape=x.shape) as parts:
            codes = np.concatenate(list(parts))
            assert parts.summary == whole.summary
            assert parts.encoding == whole.encoding
        np.testing.assert_array_equal(codes.reshape(x.shape), whole.codes)
        assert codes.dtype == np.int8
        back = client.dequantize_chunks(parts_of(codes, 3, 5000),
                                        whole.encoding, shape=x.shape)
        np.testing.assert_array_equal(np.concatenate(list(back)).reshape(
            x.shape), client.dequantize(whole))
        assert back.summary == x.size
        got = client.calibrate_chunks(iter(parts_of(x, 29999)),
                                      shape=x.shape, spec="int8:per-channel",
                                      name=quantd.TensorName("m", "parts"))
        assert got.encoding == whole.encoding
        by_name = client.quantize_chunks(
            [x], quantd.EncodingReference(got.name), shape=x.shape)
        np.testing.assert_array_equal(
            np.concatenate(list(by_name)), codes)
        assert by_name.etag == got.stored_encoding.etag
        metrics = client.evaluate_chunks(parts_of(x, 5), ["int8", "nf4"],
                                         shape=x.shape)
        assert [m.overall for m in metrics] == [
            m.overall for m in client.evaluate(x, ["int8", "nf4"])]


def test_PartsOfOtherTypesAndPackedCodesComeBack(client):
    bits = (data_of(9, 51).view(np.uint32) >> 16).astype(np.uint16)
    whole = client.quantize(bits, "int4", element_type="bfloat16")
    parts = client.quantize_chunks(parts_of(bits, 100), whole.encoding,
                                   shape=bits.shape, element_type="bfloat16")
    codes = np.concatenate(list(parts))
    np.testing.assert_array_equal(codes, whole.codes)
    back = client.dequantize_chunks([codes], whole.encoding, shape=bits.shape,
                                    element_type="bfloat16")
    np.testing.assert_array_equal(
        np.concatenate(list(back)), client.dequantize(whole).ravel())
    empty = client.quantize_chunks([], whole.encoding, shape=(0, 3))
    assert not list(empty) and empty.summary.count == 0


def test_NoMoreThanAFewPartsAreHeld(client):
    """What is not read yet keeps what is not sent yet from being made."""
    made, most_ahead, seen = 0, 0, 0
    part = data_of(1 << 18)

    def chunks():
        nonlocal made
        for _ in range(200):
            made += 1
            yield part

    encoding = quantd.Encoding("int8", [0.1])
    for codes in client.quantize_chunks(chunks(), encoding,
                                        shape=(200 << 18,)):
        seen += codes.size
        most_ahead = max(most_ahead, made - (seen >> 18))
    assert (made, seen) == (200, 200 << 18)
    assert most_ahead < 64


def test_ErrorsOfPartsSayWhatIsWrong(client):
    encoding = quantd.Encoding("int8", [0.1])

    def whole(chunks, **kwargs):
        return list(client.quantize_chunks(
            chunks, kwargs.pop("source", encoding), shape=(100,), **kwargs))

    assert fails("ARGUMENT_INVALID", whole, [data_of(99)]).field == "chunks"
    assert fails("ARGUMENT_INVALID", whole,
                 [data_of(99), data_of(2)]).field == "chunks"
    error = fails("ARGUMENT_INVALID", whole, [np.zeros(100, np.int32)],
                  name="layer")
    assert ": tensor 'layer': expected" in str(error)
    error = fails("ENCODING_NOT_FOUND", whole, [data_of(100)],
                  source=quantd.EncodingReference(),
                  name=quantd.TensorName("acme/none", "layer"))
    assert ": tensor 'layer': " in str(error)
    fails("ARGUMENT_INVALID", whole, [data_of(100)], source=8)
    fails("ENCODING_NOT_FOUND", whole, [data_of(100)],
          source=quantd.EncodingReference(quantd.TensorName("m", "none")))
    fails("NON_FINITE_REJECTED", whole, [np.full(100, np.nan, np.float32)],
          nan_policy="reject")
    parts = client.quantize_chunks([data_of(100)], encoding, shape=(100,))
    fails("ARGUMENT_INVALID", lambda: parts.summary)
    parts.close()

    def broken():
        yield data_of(10)
        raise KeyError("of the caller")

    with pytest.raises(KeyError):
        whole(broken())
    with pytest.raises(KeyError):
        client.calibrate_chunks(broken(), shape=(100,))
    assert client.quantize(data_of(3), "int8").codes.size == 3


def threads_of_parts():
    return [thread for thread in threading.enumerate()
            if thread.name == "quantd-chunks"]


def test_PartsThatNobodyReadsTakeNothing(client):
    taken, before = [], threads_of_parts()

    def chunks():
        taken.append(1)
        yield data_of(10)

    parts = client.quantize_chunks(chunks(), quantd.Encoding("int8", [0.1]),
                                   shape=(10,))
    assert set(threads_of_parts()) <= set(before)
    parts.close()
    assert not list(parts) and not taken


def test_ThreadsOfPartsEndWithThem(client):
    encoding = quantd.Encoding("int8", [0.1])
    parts = client.quantize_chunks((data_of(1000) for _ in range(1000)),
                                   encoding, shape=(1000000,))
    next(parts)
    assert threads_of_parts()
    parts.close()
    for thread in threads_of_parts():
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("name", FORMATS)
def test_ResultsDequantizeHereAsTheServerDoes(client, name):
    x = np.concatenate([data_of(5, 37), 1000 * data_of(2, 37)])
    x[1, 3], x[2, 4], x[3, 5] = np.nan, np.inf, 0
    codebook = (-1, -0.25, 0.25, 1) if "codebook" in name else ()
    granularities = [None, quantd.per_channel(1)]
    if name.startswith(("int", "uint", "float", "code")):
        granularities += [quantd.group(8), quantd.blocks(2, 16)]
    for element_type in ("float32", "float16", "bfloat16", "float64"):
        reals = x
        if element_type == "bfloat16":
            reals = (x.view(np.uint32) >> 16).astype(np.uint16)
        elif element_type != "float32":
            reals = x.astype(element_type)
        for granularity in granularities:
            got = client.quantize(
                reals, quantd.EncodingSpec(name, granularity,
                                           codebook=codebook),
                element_type=element_type)
            want, here = client.dequantize(got), got.dequantize()
            assert (here.dtype, here.shape) == (want.dtype, want.shape)
            if element_type == "bfloat16":
                want, here = ((bits.astype(np.uint32) << 16).view(np.float32)
                              for bits in (want, here))
            np.testing.assert_array_equal(here, want)
            assert got.scale is got.encoding.scale


@pytest.mark.parametrize("element_type,largest,most", [
    ("float16", 65600, "65504"), ("bfloat16", 3.4e38, "3.38953e+38"),
    # Codes that are infinity.
    ("float32", math.inf, "3.40282e+38"), ("float64", math.inf, "1.79769e+308")
])
def test_InfinitiesAreWarnedOf(client, element_type, largest, most):
    x = np.full((2, 4), largest, np.float32)
    x[0, 0] = 1
    wide = client.quantize(
        x, "int8" if math.isfinite(largest) else "float8_e5m2:no-saturation",
        name=quantd.TensorName("m", "w"))
    narrow = dataclasses.replace(wide, element_type=element_type)
    for call in (narrow.dequantize, lambda: client.dequantize(narrow),
                 lambda: client.dequantize(wide, element_type=element_type),
                 lambda: list(client.dequantize_many([narrow])),
                 lambda: list(client.dequantize_chunks(
                     [wide.codes], wide.encoding, shape=(2, 4),
                     element_type=element_type, name=wide.name))):
        with pytest.warns(RuntimeWarning) as told:
            call()
        assert [str(one.message) for one in told] == [
            "quantd: tensor 'w': 7 elements are infinite: their codes are "
            f"infinity, or beyond {element_type}, which has at most {most} in "
            "magnitude"]
    small = client.quantize(np.nan_to_num(x, posinf=4) / 4, "int8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.dequantize(small, element_type=element_type)


def test_WithoutAnEncodingNothingIsDequantizedHere(client):
    got = client.quantize(data_of(3), "int8", omit_encoding=True)
    fails("ARGUMENT_INVALID", got.dequantize)
    fails("ARGUMENT_INVALID", lambda: got.scale)


class BusyService(grpc.GenericRpcHandler):
    """Calibrate of a server without room for what comes first."""

    def __init__(self):
        self.sequences = []

    def service(self, handler_call_details):
        return grpc.stream_stream_rpc_method_handler(
            self._run, qs.CalibrateRequest.FromString,
            qs.CalibrateResponse.SerializeToString)

    def _run(self, requests, context):
        for request in requests:
            contribution = request.header.contribution
            self.sequences.append(contribution.sequence)
            answer = qs.CalibrateResponse()
            if len(self.sequences) == 1:
                answer.error.code = 8
                answer.error.reason = "MEMORY_BUDGET"
                answer.error.retry_after_ms = 1
            else:
                answer.summary.name.CopyFrom(request.header.tensor.name)
                answer.summary.contribution.sequence = contribution.sequence
            yield answer


def test_ContributionsToOneTensorAreOneAtATime():
    """Were the first tried again after the second, it would not be counted."""
    service = BusyService()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with quantd.Client(f"127.0.0.1:{port}",
                           initial_backoff=0.001) as client:
            answers = list(client.calibrate_many(
                [quantd.CalibrateJob(
                    data_of(10), "t", contribution=quantd.Contribution(
                        "rank-0", n + 1)) for n in range(4)]))
    finally:
        server.stop(0).wait()
    assert [answer.contribution.sequence for answer in answers] == [1, 2, 3, 4]
    assert service.sequences == [1, 1, 2, 3, 4]


def test_ProgressCountsEveryByte(client, capsys):
    tensors = {f"t{n}": data_of(n + 1, 100) for n in range(30)}
    total = sum(array.nbytes for array in tensors.values())
    done = []
    list(client.quantize_many(tensors.items(), "int8", progress=done.append))
    assert (sum(done), len(done)) == (total, 30)
    pytest.importorskip("tqdm")
    list(client.quantize_many(tensors.items(), "int8", progress=True))
    assert "100%" in capsys.readouterr().err
