"""The client for asyncio with a live quantd, and with none."""

import asyncio
import concurrent.futures
import threading

import grpc
import numpy as np
import pytest

import live_server
import quantd
import quantd.aio
from quantd import _exchange


def data_of(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(server, body, **kwargs):
    """body(client) on a loop of its own."""
    async def main():
        async with quantd.aio.Client(server.address, **kwargs) as client:
            return await body(client)

    return asyncio.run(main())


async def reason_of(awaitable):
    with pytest.raises(quantd.QuantdError) as caught:
        await awaitable
    return caught.value.reason


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_ResultsAreThoseOfTheOtherClient(server, client, chunk_bytes):
    x = data_of(50, 300)
    want = client.quantize(x, "int8:per-channel")

    async def body(other):
        out = np.empty(x.shape, np.int8)
        got, int4 = await asyncio.gather(
            other.quantize(x, "int8:per-channel", out=out),
            other.quantize(x, "int4"))
        assert np.shares_memory(got.codes, out)
        np.testing.assert_array_equal(got.codes, want.codes)
        assert (got.encoding, got.summary) == (want.encoding, want.summary)
        assert int4.encoding.format == "int4"
        np.testing.assert_array_equal(await other.dequantize(got),
                                      client.dequantize(want))
        assert (await other.evaluate(x, ["nf4"]))[0].overall == (
            client.evaluate(x, ["nf4"])[0].overall)
        assert (await other.compare(x, x)).max_absolute_error == 0
        assert await other.health() == "SERVING"
        assert await other.health("?") == "SERVICE_UNKNOWN"

    run(server, body, chunk_bytes=chunk_bytes)


def test_ManyTensorsComeInOrderWithAnErrorInTheMiddle(server, client):
    tensors = [(f"t{n}", data_of(n + 1, 40, seed=n)) for n in range(60)]
    tensors[11] = ("t11", np.zeros(3, np.int32))

    async def slowly():
        for tensor in tensors:
            await asyncio.sleep(0)
            yield tensor

    async def body(other):
        for items in (tensors, slowly()):
            got = [tensor async for tensor in other.quantize_many(
                items, "int8", model="acme/aio", store=True, min_rank=0,
                on_error="return")]
            assert [tensor.name.tensor for tensor in got] == [
                name for name, _ in tensors]
            assert got[11].reason == "ARGUMENT_INVALID"
            np.testing.assert_array_equal(
                got[59].codes, client.quantize(tensors[59][1], "int8").codes)
        seen = 0
        with pytest.raises(quantd.QuantdError):
            async for _ in other.quantize_many(tensors, "int8", min_rank=0):
                seen += 1
        assert seen == 11
        # Left out.
        got = [tensor async for tensor in other.quantize_many(
            slowly(), "int8")]
        assert len(got) == 59
        got = [tensor async for tensor in other.quantize_many(
            tensors, {"t1?": "int8", "t2": "int4"})]
        assert len(got) == 10
        for source, items in (({"t99": "int8"}, tensors),
                              ({"*": "int8"}, slowly()),
                              ("int8", [tensors[11]])):
            with pytest.raises(quantd.QuantdError):
                async for _ in other.quantize_many(items, source):
                    pass
        # Left halfway.
        async for _ in other.quantize_many(tensors, "int8"):
            break
        listed = [stored async for stored in other.list_encodings("acme/aio")]
        assert len(listed) == 59

    run(server, body)


def test_PartsGiveTheBytesOfTheWhole(server, client):
    x = data_of(60, 500)
    want = client.quantize(x, "int8")

    async def chunks():
        for part in np.split(x.ravel(), [1, 1, 7000, 29000]):
            await asyncio.sleep(0)
            yield part

    async def broken():
        yield x[:3]
        raise KeyError("of the caller")

    async def body(other):
        for source in (chunks(), [x]):
            parts = other.quantize_chunks(source, want.encoding, shape=x.shape)
            codes = np.concatenate([part async for part in parts])
            np.testing.assert_array_equal(codes, want.codes.ravel())
            assert parts.summary == want.summary
        reals = other.dequantize_chunks([codes], want.encoding, shape=x.shape)
        np.testing.assert_array_equal(
            np.concatenate([part async for part in reals]),
            client.dequantize(want).ravel())
        got = await other.calibrate_chunks(chunks(), shape=x.shape)
        assert got.statistics.count == x.size
        metrics = await other.evaluate_chunks(chunks(), ["nf4"], shape=x.shape)
        assert metrics[0].overall == client.evaluate(x, ["nf4"])[0].overall
        with pytest.raises(KeyError):
            await other.calibrate_chunks(broken(), shape=x.shape)
        assert await reason_of(other.calibrate_chunks(
            [x], shape=(1, 2))) == "ARGUMENT_INVALID"
        with pytest.raises(quantd.QuantdError, match="tensor 'layer': "):
            await other.calibrate_chunks([x], "layer", shape=(1, 2))

    run(server, body, chunk_bytes=4096)


def test_WhatTheServiceKeepsIsReadAndWritten(server):
    async def body(client):
        name = quantd.TensorName("acme/kept", "t")
        for n in range(3):
            got = await client.calibrate(
                data_of(500, seed=n), name,
                contribution=quantd.Contribution("rank-0", n + 1))
            assert not got.contribution.duplicate
        many = [got async for got in client.calibrate_many(
            [("t", data_of(500))], model="acme/kept",
            contribution=quantd.Contribution("rank-0", 3))]
        assert many[0].contribution.duplicate
        stored = await client.get_statistics(name)
        assert stored.statistics.count == 1500
        computed = [one async for one in client.compute_encodings(
            "acme/kept", "int8:mse")]
        assert computed[0].stored_encoding.format == "int8"
        sweep = await client.sweep("acme/kept", ["int4", "int8"],
                                   min_sqnr_db=20)
        assert sweep.mixture.choices == {"t": 1}
        chosen = await client.choose_mixture(
            {"t": [quantd.MixtureOption(2, 100, 0.1)]}, max_size_bytes=[50])
        assert chosen[0].choices == {"t": 2} and not chosen[0].target_met
        put = await client.put_encoding(name, quantd.Encoding("int8", [0.5]))
        assert (await client.get_encoding(name)).etag == put.etag
        await client.delete_encoding(name, if_match=put.etag)
        assert await reason_of(
            client.get_encoding(name)) == "ENCODING_NOT_FOUND"
        assert [one.tensor async for one in
                client.list_statistics("acme/kept")] == ["t"]
        await client.delete_statistics(name)
        assert await reason_of(
            client.sweep("acme/kept", ["int8"])) == "STATISTICS_NOT_FOUND"

    run(server, body)


def test_WhatWasDoneThoughItsAnswerWasLostIsNotRefusedForItself(server):
    name = quantd.TensorName("acme/aio-lost", "t")
    encoding = quantd.Encoding("int8", [0.5])

    async def body(client):
        attempt = client._attempt  # pylint: disable=protected-access

        def break_next(reason="SERVER_UNREACHABLE", then=None):
            async def break_off(*args):
                client._attempt = attempt  # pylint: disable=protected-access
                if reason != "DRAINING":
                    await attempt(*args)
                if then is not None:
                    await then
                raise quantd.QuantdError(grpc.StatusCode.UNAVAILABLE, reason,
                                         "gone")

            client._attempt = break_off  # pylint: disable=protected-access

        break_next()
        put = await client.put_encoding(name, encoding, if_match="absent")
        assert put.encoding is None
        assert put.etag == (await client.get_encoding(name)).etag
        break_next("DRAINING")
        assert await reason_of(client.put_encoding(
            name, encoding, if_match="absent")) == "ETAG_MISMATCH"
        for then in (client.put_encoding(name, encoding),
                     client.delete_encoding(name)):
            put = await client.put_encoding(name, encoding)
            break_next(then=then)
            assert await reason_of(client.put_encoding(
                name, quantd.Encoding("int8", [1]), if_match=put.etag
            )) == "ETAG_MISMATCH"
        await client.put_encoding(name, encoding)
        break_next()
        await client.delete_encoding(name)
        break_next("DRAINING")
        assert await reason_of(
            client.delete_encoding(name)) == "ENCODING_NOT_FOUND"
        await client.calibrate(data_of(5), name,
                               contribution=quantd.Contribution("a", 1))
        break_next()
        await client.delete_statistics(name)
        break_next("DRAINING")
        assert await reason_of(
            client.delete_statistics(name)) == "STATISTICS_NOT_FOUND"

    run(server, body, initial_backoff=0.001)


@pytest.mark.parametrize("source", ["encoding", "reference"])
def test_LargeTensorsGoOnBehindThePartsThatWereAnswered(
        server, client, monkeypatch, source):
    x = data_of(70, 1001)
    x[5, 7], x[60, 8], x[65, 9] = np.nan, np.inf, 100
    name = quantd.TensorName("acme/aio-parts", "t")
    want = client.quantize(x, "int4", name=name, store=True)
    monkeypatch.setattr(_exchange, "_PART_BYTES", 64000)
    begins = []

    async def body(other):
        exchange_once = other._exchange  # pylint: disable=protected-access

        async def break_off(method, part):
            await exchange_once(method, part)
            begins.append(part.offset_bytes)
            if begins == [0, 64000]:
                raise quantd.QuantdError(grpc.StatusCode.UNAVAILABLE,
                                         "DRAINING", "about to stop")

        other._exchange = break_off  # pylint: disable=protected-access
        out = np.empty_like(want.codes)
        got = await other.quantize(
            x, want.encoding if source == "encoding" else
            quantd.EncodingReference(name), out=out)
        assert np.shares_memory(got.codes, out)
        np.testing.assert_array_equal(got.codes, want.codes)
        assert (got.summary, got.encoding) == (want.summary, want.encoding)
        assert begins == [0, 64000, *range(64000, x.nbytes, 64000)]
        np.testing.assert_array_equal(await other.dequantize(got),
                                      client.dequantize(want))
        assert await reason_of(other.quantize(
            x, want.encoding, nan_policy="reject")) == "NON_FINITE_REJECTED"

    run(server, body, initial_backoff=0.001)


def test_CallsEndWhenTheirTaskIsCancelled(server):
    async def body(client):
        started = asyncio.Event()

        async def never():
            yield data_of(10)
            started.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(
            client.calibrate_chunks(never(), shape=(1000,)))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.quantize(data_of(3), "int8")).codes.size == 3

    run(server, body)


def test_AClosedClientSaysSo(server):
    async def body(client):
        started = asyncio.Event()

        async def never():
            yield data_of(10)
            started.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(
            client.calibrate_chunks(never(), shape=(1000,)))
        await started.wait()
        await client.close()
        assert await reason_of(task) == "CLIENT_CLOSED"
        assert await reason_of(client.quantize(data_of(3), "int8")) == (
            "CLIENT_CLOSED")
        assert await reason_of(client.health()) == "CLIENT_CLOSED"

    run(server, body)


def test_AClientServesOneLoopAfterAnother(server):
    client = quantd.aio.Client(server.address)
    x = data_of(30, 40)

    async def body():
        got = await client.quantize(x, "int8")
        assert await client.health() == "SERVING"
        assert [one async for one in client.quantize_many([("t", x)], "int8")]
        assert not [one async for one in client.list_encodings("acme/loops")]
        return got.codes

    first = asyncio.run(body())
    np.testing.assert_array_equal(asyncio.run(body()), first)
    # Beside one that goes on.
    loop = asyncio.new_event_loop()
    try:
        for _ in range(2):
            np.testing.assert_array_equal(loop.run_until_complete(body()),
                                          first)
            np.testing.assert_array_equal(asyncio.run(body()), first)
        # Those of loops that ended are gone.
        assert len(client._channels) <= 2  # pylint: disable=protected-access
        asyncio.run(client.close())
        assert loop.run_until_complete(
            reason_of(client.health())) == "CLIENT_CLOSED"
    finally:
        loop.close()


def test_ClosingEndsTheCallsOfALoopInAnotherThread(server):
    client = quantd.aio.Client(server.address)
    started = threading.Event()

    async def never():
        yield data_of(10)
        started.set()
        await asyncio.Event().wait()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        reason = pool.submit(asyncio.run, reason_of(
            client.calibrate_chunks(never(), shape=(1000,))))
        assert started.wait(60)
        asyncio.run(client.close())
        assert reason.result(60) == "CLIENT_CLOSED"


def test_TensorsAreSentAgainToAServerThatComesBack(request, tmp_path):
    target = f"unix:{tmp_path}/socket"
    x = data_of(1000, 300)

    def start():
        return live_server.LiveServer(request.config.getoption("--quantd"),
                                      str(tmp_path), ["--listen", target])

    async def main():
        async with quantd.aio.Client(target, max_retries=10000,
                                     max_backoff=0.1) as client:
            first = start()
            want = await client.quantize(x, "int8")
            first.process.kill()
            first.process.wait()
            retrying = asyncio.Event()
            pause = client._pause  # pylint: disable=protected-access

            async def noted(*args):
                retrying.set()
                return await pause(*args)

            client._pause = noted  # pylint: disable=protected-access
            task = asyncio.ensure_future(client.quantize(x, "int8"))
            await asyncio.wait_for(retrying.wait(), 60)
            assert not task.done()
            # The loop goes on meanwhile: the server waits for the connection to
            # end.
            loop = asyncio.get_running_loop()
            second = await loop.run_in_executor(None, start)
            try:
                got = await asyncio.wait_for(task, 60)
                await client.close()
            finally:
                await loop.run_in_executor(None, second.stop)
            np.testing.assert_array_equal(got.codes, want.codes)

    asyncio.run(main())


def test_ClosingWhileItWaitsForAServerSaysSo(tmp_path):
    async def main(delay):
        client = quantd.aio.Client(
            f"unix:{tmp_path}/nobody", max_retries=10000,
            initial_backoff=delay, max_backoff=delay)
        tasks = [asyncio.ensure_future(call) for call in (
            client.quantize(data_of(3), "int8"),
            client.get_encoding(quantd.TensorName("m", "t")),
            client.sweep("m", ["int8"]))]
        pauses = asyncio.Semaphore(0)
        pause = client._pause  # pylint: disable=protected-access

        async def noted(*args):
            pauses.release()
            return await pause(*args)

        client._pause = noted  # pylint: disable=protected-access
        for _ in tasks:
            await asyncio.wait_for(pauses.acquire(), 60)
        await client.close()
        for task in tasks:
            assert await reason_of(asyncio.wait_for(task, 60)) == (
                "CLIENT_CLOSED")

    for delay in (0.001, 5):
        asyncio.run(main(delay))


def test_WithoutAServerTheErrorNamesIt(tmp_path):
    async def main():
        async with quantd.aio.Client(f"unix:{tmp_path}/nobody", max_retries=1,
                                     initial_backoff=0.001) as client:
            assert await reason_of(client.quantize(data_of(3), "int8")) == (
                "SERVER_UNREACHABLE")
            assert await reason_of(client.sweep("m", ["int8"])) == (
                "SERVER_UNREACHABLE")

    asyncio.run(main())
