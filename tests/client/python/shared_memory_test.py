"""Shared memory of the Python client: with a live quantd, and with a control
socket that refuses, lies or goes away.

  shared_memory_test.py --quantd BINARY
"""

# pylint: disable=protected-access

import argparse
import gc
import os
import socket
import sys
import tempfile
import threading
import unittest
import unittest.mock

import package  # pylint: disable=unused-import
# pylint: disable=wrong-import-order
import numpy as np

import live_server
import quantd
from quantd import _shared_memory
from quantd._exchange import QuantizeExchange
from quantd._stream import Options
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import shared_memory_pb2 as sm
from quantd.v1 import tensor_pb2 as te

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

# Staged, and of more than one chunk of staging.
LARGE = (5 << 20) + 3
SMALL = 1000


def data_of(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def shared_copy(client, array):
    shared = client.empty_shared(array.shape, array.dtype)
    shared[...] = array
    return shared


class Server(live_server.LiveServer):
    """With shared memory on a unix socket in its folder."""

    def __init__(self, folder, *flags):
        self.target = "unix:" + os.path.join(folder, "socket")
        super().__init__(options.quantd, folder,
                         ["--listen", self.target, "--shared-memory", *flags])


class SpanCounter:
    """Counts how the tensors of a client go up and come down."""

    def __init__(self, client):
        self.by_name = self.on_stream = self.outputs = self.staged = 0
        shared = client._connection.shared
        place = shared.place

        def counting(exchange):
            place(exchange)
            placement = exchange.placement
            if placement is not None and placement.has_payload:
                self.by_name += 1
            else:
                self.on_stream += 1
            if placement is not None and placement.has_output:
                self.outputs += 1
            if placement is not None and placement.output_is_staged:
                self.staged += 1

        shared.place = counting

    def take(self):
        """(by name, on the stream, outputs in place, of those staged)."""
        counts = (self.by_name, self.on_stream, self.outputs, self.staged)
        self.by_name = self.on_stream = self.outputs = self.staged = 0
        return counts


class LiveTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.server = Server(folder.name)
        cls.addClassCleanup(cls.server.stop)
        cls.plain = quantd.Client(cls.server.target)
        cls.addClassCleanup(cls.plain.close)

    def setUp(self):
        self.client = quantd.Client(self.server.target, shared_memory=True)
        self.addCleanup(self.client.close)
        self.counter = SpanCounter(self.client)

    def test_CodesOfInt32FindRoomUnderAReference(self):
        name = quantd.TensorName("acme/int32", "w")
        self.client.put_encoding(name, quantd.Encoding("int32", [0.5]))
        x = np.resize(np.float32([0.5, -1, 1e5]), LARGE)
        got = self.client.quantize(x, quantd.EncodingReference(name))
        np.testing.assert_array_equal(got.codes, x * 2)

    def test_SharedArraysGoByNameAndGiveTheSameBytes(self):
        for size in (1, SMALL, LARGE):
            with self.subTest(size=size):
                x = shared_copy(self.client, data_of(size))
                codes = self.client.empty_shared(size, np.int8)
                back = self.client.empty_shared(size)
                want = self.plain.quantize(np.array(x), "int8")
                got = self.client.quantize(x, "int8", out=codes)
                self.assertTrue(np.shares_memory(got.codes, codes))
                np.testing.assert_array_equal(codes, want.codes)
                self.assertEqual(got.encoding, want.encoding)
                self.assertEqual(got.summary, want.summary)
                codes[:] = 0
                self.client.quantize(x, got.encoding, out=codes)
                np.testing.assert_array_equal(codes, want.codes)
                self.client.dequantize(got, out=back)
                np.testing.assert_array_equal(back,
                                              self.plain.dequantize(want))
                self.assertEqual(self.counter.take(), (3, 0, 3, 0))
                self.assertEqual(
                    self.client.calibrate(x).statistics,
                    self.plain.calibrate(np.array(x)).statistics)
                self.assertEqual(
                    self.client.evaluate(x, ["int4"])[0].overall,
                    self.plain.evaluate(np.array(x), ["int4"])[0].overall)
                self.assertEqual(self.counter.take()[:2], (2, 0))

    def test_OtherArraysAreCopiedOnceWhenTheyAreLarge(self):
        x = data_of(LARGE)
        want = self.plain.quantize(x, "uint8:per-tensor")
        for source in ("uint8:per-tensor", want.encoding):
            got = self.client.quantize(x, source)
            np.testing.assert_array_equal(got.codes, want.codes)
        out = np.empty(LARGE, np.uint8)
        self.client.quantize(x, want.encoding, out=out)
        np.testing.assert_array_equal(out, want.codes)
        np.testing.assert_array_equal(self.client.dequantize(want),
                                      self.plain.dequantize(want))
        self.assertEqual(self.counter.take(), (4, 0, 4, 4))
        # The result is not the staging that the next tensor uses.
        got = self.client.quantize(x, want.encoding)
        self.client.quantize(-x, want.encoding)
        np.testing.assert_array_equal(got.codes, want.codes)
        self.client.quantize(x[:SMALL], want.encoding)
        self.assertEqual(self.counter.take(), (2, 1, 2, 2))

    def test_AnEncodingByReferenceMayTurnOutSmaller(self):
        x = data_of(LARGE)
        name = quantd.TensorName("m", "nibbles")
        want = self.client.quantize(x, "int4", name=name, store=True)
        got = self.client.quantize(x, quantd.EncodingReference(name))
        np.testing.assert_array_equal(got.codes, want.codes)
        self.assertEqual(got.codes.nbytes, (LARGE + 1) // 2)

    def test_PartsOfSharedArraysGoByNameWhereTheyAreAligned(self):
        x = shared_copy(self.client, data_of(50, 1001))
        want = self.plain.quantize(np.array(x[10:20]), "int8:per-channel")
        got = self.client.quantize(x[10:20], "int8:per-channel")
        np.testing.assert_array_equal(got.codes, want.codes)
        self.assertEqual(self.counter.take()[:2], (1, 0))
        # 1,001 floats are no multiple of 8 bytes, and columns not contiguous.
        for part in (x[11, :100], x[:, :3]):
            got = self.client.quantize(part, "int8")
            np.testing.assert_array_equal(
                got.codes, self.plain.quantize(np.array(part), "int8").codes)
        self.assertEqual(self.counter.take()[:2], (0, 2))

    def test_ManyTensorsOfAllKindsShareAStream(self):
        x = [data_of(size, seed=n) for n, size in enumerate(
            [SMALL, 300000, 40000, SMALL, LARGE, 50000] * 2)]
        tensors = [(f"t{n}", shared_copy(self.client, array) if n % 3 == 0
                    else array) for n, array in enumerate(x)]
        tensors[5] = ("t5", x[5].astype(np.int64))
        got = list(self.client.quantize_many(tensors, "int8", min_rank=0,
                                             on_error="return"))
        for n, result in enumerate(got):
            if n == 5:
                self.assertIsInstance(result, quantd.QuantdError)
                continue
            np.testing.assert_array_equal(
                result.codes, self.plain.quantize(x[n], "int8").codes)

    def test_MemoryComesBackWithTheLastViewOfIt(self):
        first = self.client.empty_shared(100)
        address = first.ctypes.data
        view = first[50:].reshape(5, 10)
        del first
        gc.collect()
        self.assertNotEqual(self.client.empty_shared(100).ctypes.data, address)
        del view
        gc.collect()
        addresses = [self.client.empty_shared(100) for _ in range(1024)]
        self.assertIn(address, [array.ctypes.data for array in addresses])

    def test_ShapesAndTypesAreThoseOfNumpy(self):
        for shape, dtype in (((3, 4), np.float32), (7, np.int8), ((), "f8"),
                             ((2, 0, 3), np.float16), ([5], np.uint16)):
            array = self.client.empty_shared(shape, dtype)
            like = np.empty(shape, dtype)
            self.assertEqual((array.shape, array.dtype),
                             (like.shape, like.dtype))
            array[...] = 1
        for shape, dtype in (((-1,), "f4"), ("x", "f4"), (3, object),
                             (3, "nothing"), (None, "f4")):
            with self.assertRaises(quantd.QuantdError) as caught:
                self.client.empty_shared(shape, dtype)
            self.assertEqual(caught.exception.reason, "ARGUMENT_INVALID")

    def test_AnOutputOfTheWrongSizeIsRefused(self):
        x = shared_copy(self.client, data_of(SMALL))
        codes = self.client.empty_shared(SMALL + 8, np.int8)
        with self.assertRaises(quantd.QuantdError) as caught:
            self.client.quantize(x, "int8", out=codes)
        self.assertEqual(caught.exception.field, "out")
        name = quantd.TensorName("m", "wrong")
        self.client.calibrate(x, name, "int8")
        for size in (SMALL - 8, SMALL + 8):
            with self.assertRaises(quantd.QuantdError):
                self.client.quantize(x, quantd.EncodingReference(name),
                                     out=codes[:size])
        self.client.quantize(x, quantd.EncodingReference(name),
                             out=codes[:SMALL])

    def test_TensorsBeyondTheStagingGoOnTheStream(self):
        x = data_of(LARGE)
        with unittest.mock.patch.object(_shared_memory, "_MAX_STAGING_BYTES",
                                        1 << 20):
            got = self.client.quantize(x, "int8")
        np.testing.assert_array_equal(got.codes,
                                      self.plain.quantize(x, "int8").codes)
        self.assertEqual(self.counter.take(), (0, 1, 0, 0))

    def test_StagingOfATensorThatTheServerRefusedIsNotUsedAgain(self):
        shared = self.client._connection.shared
        x = data_of(LARGE)
        x[0] = np.nan
        for policy, usable in (("zero_point", 1), ("reject", 0)):
            try:
                self.client.quantize(x, quantd.Encoding("int8", [0.1]),
                                     nan_policy=policy)
            except quantd.QuantdError as error:
                self.assertEqual(error.reason, "NON_FINITE_REJECTED")
            self.assertEqual(len(shared._free_staging), usable)

    def test_ThreadsDoNotShareStaging(self):
        x = [data_of(300000, seed=n) for n in range(4)]
        want = [self.plain.quantize(array, "int8").codes for array in x]
        failures = []

        def run(n):
            for _ in range(10):
                got = self.client.quantize(x[n], "int8").codes
                if not np.array_equal(got, want[n]):
                    failures.append(n)

        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_ArraysOutliveTheirClient(self):
        array = shared_copy(self.client, data_of(SMALL))
        self.client.close()
        np.testing.assert_array_equal(array, data_of(SMALL))
        with self.assertRaises(quantd.QuantdError) as caught:
            self.client.empty_shared(3)
        self.assertEqual(caught.exception.reason, "CLIENT_CLOSED")


class ServerTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_AfterARestartArraysAreOrdinaryMemory(self):
        small, large = data_of(SMALL), data_of(LARGE)
        server = Server(self.folder)
        client = quantd.Client(server.target, shared_memory=True,
                               max_retries=1000, initial_backoff=0.02,
                               max_backoff=0.1)
        x, y = shared_copy(client, small), shared_copy(client, large)
        codes = client.empty_shared(SMALL, np.int8)
        want = [client.quantize(array, "int8").codes for array in (x, large)]
        server.process.kill()
        server.process.wait()
        with Server(self.folder), client:
            counter = SpanCounter(client)
            client.quantize(x, "int8", out=codes)
            np.testing.assert_array_equal(codes, want[0])
            for array in (y, large):
                np.testing.assert_array_equal(
                    client.quantize(array, "int8").codes, want[1])
            counter.take()
            # And new ones are shared.
            x = shared_copy(client, small)
            np.testing.assert_array_equal(client.quantize(x, "int8").codes,
                                          want[0])
            client.quantize(large, "int8")
            self.assertEqual(counter.take()[:2], (2, 0))

    def test_WithoutSharedMemoryTheServerIsToldApart(self):
        target = "unix:" + os.path.join(self.folder, "socket")
        with live_server.LiveServer(options.quantd, self.folder,
                                    ["--listen", target]):
            with quantd.Client(target, shared_memory=True) as client:
                for call in (lambda: client.empty_shared(5),
                             lambda: client.quantize(data_of(LARGE), "int8")):
                    with self.assertRaises(quantd.QuantdError) as caught:
                        call()
                    self.assertEqual(caught.exception.reason,
                                     "SHARED_MEMORY_UNAVAILABLE")
                    self.assertIn("--shared-memory", str(caught.exception))
                self.assertEqual(client.quantize(data_of(3), "int8").codes.size,
                                 3)

    def test_WithoutRoomForRegionsTensorsGoOnTheStream(self):
        x = data_of(LARGE)
        with Server(self.folder, "--memory-budget-bytes", str(32 << 20),
                    ) as server, quantd.Client(
                        server.target, shared_memory=True,
                        max_retries=0) as client:
            held = client.empty_shared(LARGE)
            with self.assertRaises(quantd.QuantdError) as caught:
                client.empty_shared(LARGE)
            self.assertEqual(caught.exception.reason, "MEMORY_BUDGET")
            counter = SpanCounter(client)
            encoding = quantd.Encoding("int8", [0.1])
            codes = client.quantize(x, encoding).codes
            self.assertEqual(counter.take(), (0, 1, 0, 0))
            np.testing.assert_array_equal(
                codes, np.clip(np.rint(x / np.float32(0.1)), -128, 127))
            del held
            # The region is gone as soon as the server saw its connection close.
            self.assertTrue(live_server.eventually(
                lambda: client.quantize(x, encoding).codes is not None and
                counter.take()[0] > 0))


class FakeControl:
    """A control socket that answers each request with what `reply` returns:
    (RegionReply or bytes, bytes of a file to send along or None), or None to
    close the connection."""

    def __init__(self, folder, reply):
        self.path = os.path.join(folder, "socket.memory")
        self.connections = []
        self._reply = reply
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.path)
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections.append(connection)
            request = sm.RegionRequest.FromString(connection.recv(4096))
            answer = self._reply(request.size_bytes)
            if answer is None:
                connection.close()
                continue
            message, file_bytes = answer
            if not isinstance(message, bytes):
                message = message.SerializeToString()
            files = []
            if file_bytes is not None:
                files = [os.memfd_create("region")]
                os.truncate(files[0], file_bytes)
            socket.send_fds(connection, [message], files)
            for file in files:
                os.close(file)

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self.connections:
            connection.close()


class FakeControlTest(unittest.TestCase):

    def start(self, reply, max_retries=0):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        control = FakeControl(folder.name, reply)
        self.addCleanup(control.close)
        shared = _shared_memory.SharedMemory(control.path, Options(
            "unix:fake", 120, 1 << 20, max_retries, 0.001, 0.002))
        self.addCleanup(shared.close)
        return control, shared

    @staticmethod
    def grant(size):
        return sm.RegionReply(region_id=b"r" * 16, size_bytes=size), size

    @staticmethod
    def refuse(reason, retry_after_ms=0):
        return sm.RegionReply(error=te.TensorError(
            code=8, reason=reason, message="no", retry_after_ms=retry_after_ms)
        ), None

    @staticmethod
    def exchange(payload):
        header = qs.QuantizeHeader()
        header.tensor.element_type = te.ELEMENT_TYPE_FLOAT32
        header.spec.format = 8
        return QuantizeExchange(header, payload.view(np.uint8), None)

    def place(self, shared, payload):
        exchange = self.exchange(payload)
        shared.place(exchange)
        self.addCleanup(exchange.unshare)
        return exchange

    def test_AnswersThatAreNoRegionAreErrors(self):
        for name, reason, reply in (
                ("closed", "SHARED_MEMORY_UNAVAILABLE", lambda size: None),
                ("no protobuf", "RESPONSE_MALFORMED", lambda size: (b"\xff",
                                                                    None)),
                ("no file", "RESPONSE_MALFORMED",
                 lambda size: (self.grant(size)[0], None)),
                ("too small", "RESPONSE_MALFORMED",
                 lambda size: self.grant(size // 2)),
                ("a short file", "SHARED_MEMORY_UNAVAILABLE",
                 lambda size: (self.grant(size)[0], size // 2)),
                ("refused", "REGION_LIMIT",
                 lambda size: self.refuse("REGION_LIMIT"))):
            with self.subTest(name=name):
                _, shared = self.start(reply)
                files = len(os.listdir("/proc/self/fd"))
                with self.assertRaises(quantd.QuantdError) as caught:
                    shared.allocate(10 << 20)
                self.assertEqual(caught.exception.reason, reason)
                del caught
                gc.collect()
                # None of ours is left; the other end of the connection is, and
                # for a moment the file that it sent.
                self.assertTrue(live_server.eventually(
                    lambda: len(os.listdir("/proc/self/fd")) <= files + 1))

    def test_ARegionThatComesLaterIsWaitedFor(self):
        replies = [self.refuse("MEMORY_BUDGET", 1)] * 2

        def reply(size):
            return replies.pop() if replies else self.grant(size)

        _, shared = self.start(reply, max_retries=2)
        self.assertEqual(shared.allocate(10 << 20).nbytes, 10 << 20)

    def test_SmallArraysShareARegionAndLargeOnesHaveTheirOwn(self):
        control, shared = self.start(self.grant)
        small = [shared.allocate(5000) for _ in range(100)]
        self.assertEqual(len(control.connections), 1)
        spans = sorted((array.ctypes.data, array.nbytes) for array in small)
        for (begin, size), (following, _) in zip(spans, spans[1:]):
            self.assertLessEqual(begin + size, following)
        large = shared.allocate(3 << 20)
        self.assertEqual(len(control.connections), 2)
        control.connections[1].setblocking(False)
        with self.assertRaises(BlockingIOError):
            control.connections[1].recv(1)
        del large
        gc.collect()
        # The server sees that it may forget the region.
        self.assertEqual(control.connections[1].recv(1), b"")

    def test_StagingIsUsedAgainAndGrowsIntoOneRegion(self):
        control, shared = self.start(self.grant)
        for size in (1 << 20, 1 << 20, 6 << 20, 1 << 20):
            exchange = self.place(shared, np.zeros(size // 4, np.float32))
            self.assertTrue(exchange.placement.has_payload)
            self.assertTrue(exchange.placement.output_is_staged)
            exchange.placement.release(is_over=True)
        self.assertEqual(len(control.connections), 2)
        # Two at once have each its own.
        for _ in range(2):
            self.place(shared, np.zeros(1 << 18, np.float32))
        self.assertEqual(len(control.connections), 3)

    def test_StagingOfATensorThatFailedIsNotUsedAgain(self):
        control, shared = self.start(self.grant)
        exchange = self.place(shared, np.zeros(1 << 18, np.float32))
        exchange.unshare()
        self.assertFalse(exchange.header.HasField("output"))
        self.assertEqual(control.connections[0].recv(1), b"")
        shared.place(exchange)
        self.assertEqual(len(control.connections), 2)

    def test_SpansNameTheBytesOfTheArray(self):
        _, shared = self.start(self.grant)
        array = shared.allocate(100000)
        exchange = self.place(shared, array[800:80800])
        ((offset, span),) = exchange.placement.send(exchange.payload)
        span = sm.SharedSpan.FromString(span)
        base = shared._regions[0].address
        self.assertEqual((offset, span.offset_bytes, span.size_bytes),
                         (0, array.ctypes.data + 800 - base, 80000))

    def test_AStagedTensorIsCopiedPartByPart(self):
        _, shared = self.start(self.grant)
        payload = data_of((9 << 20) // 4)
        exchange = self.place(shared, payload)
        region = exchange.placement._staging
        end = 0
        for offset, span in exchange.placement.send(exchange.payload):
            span = sm.SharedSpan.FromString(span)
            self.assertEqual(offset, end)
            end += span.size_bytes
            np.testing.assert_array_equal(region.memory[:end],
                                          exchange.payload[:end])
        self.assertEqual(end, payload.nbytes)
        self.assertGreaterEqual(exchange.header.output.offset_bytes, end)

    def test_ALostConnectionIsNoticed(self):
        control, shared = self.start(self.grant)
        exchange = self.place(shared, shared.allocate(80000))
        self.assertFalse(exchange.placement.is_lost)
        for connection in control.connections:
            connection.close()
        self.assertTrue(exchange.placement.is_lost)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
