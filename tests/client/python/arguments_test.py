#!/usr/bin/python3
"""What the Python client says of arguments that are none, how its objects
print and pickle, and what it does in a forked process and after Ctrl-C.

  arguments_test.py --quantd BINARY
"""

import argparse
import copy
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import unittest
from unittest import mock

import package  # pylint: disable=unused-import
# pylint: disable=wrong-import-order
import grpc
import numpy as np

import live_server
import quantd
import quantd.aio
from quantd import _channel, _retries

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

X = np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)
ENCODING = quantd.Encoding("int8", [0.1])
# Only what hangs waits so long.
WAIT_S = 120


class ArgumentsTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.server = live_server.LiveServer(options.quantd)
        cls.addClassCleanup(cls.server.stop)
        cls.client = quantd.Client(cls.server.address)
        cls.addClassCleanup(cls.client.close)

    def test_WhatIsNoArgumentIsAlwaysTheSameError(self):
        client, codes = self.client, np.zeros(3, np.int8)
        for name, call in {
                "no array": lambda: client.quantize(None, "int8"),
                "text": lambda: client.quantize("abc", "int8"),
                "ragged": lambda: client.quantize([[1.0], [1.0, 2.0]], "int8"),
                "integers": lambda: client.quantize(codes, "int8"),
                "complex": lambda: client.quantize(X.astype(complex), "int8"),
                "no spec": lambda: client.quantize(X, None),
                "an empty spec": lambda: client.quantize(X, ""),
                "a group without a size":
                    lambda: client.quantize(X, "int8:group"),
                "a group of text": lambda: quantd.group("a"),
                "an axis of text": lambda: client.quantize(
                    X, quantd.EncodingSpec("int8", quantd.per_channel("a"))),
                "an output of other elements": lambda: client.quantize(
                    X, "int8", out=np.empty(X.shape, np.float32)),
                "an output with gaps": lambda: client.quantize(
                    X, "int8", out=np.empty((6, 16), np.int8)[:, ::2]),
                "a read-only output": lambda: client.quantize(
                    X, "int8", out=np.frombuffer(bytes(48), np.int8)),
                "a shape that is a number": lambda: client.dequantize(
                    codes, ENCODING, shape=3),
                "a negative shape": lambda: client.dequantize(
                    codes, ENCODING, shape=(-3,)),
                "a shape of fractions": lambda: client.dequantize(
                    codes, ENCODING, shape=(3.0,)),
                "a negative shape of parts": lambda: client.quantize_chunks(
                    [X], ENCODING, shape=(-1,)),
                "another element type": lambda: client.dequantize_chunks(
                    [codes], ENCODING, shape=(3,), element_type="int8"),
                "an item that is none": lambda: list(
                    client.quantize_many([3], "int8")),
                "a mapping": lambda: list(
                    client.quantize_many({"a": X}, "int8")),
                "arrays without names": lambda: list(
                    client.calibrate_many([X])),
                "no tensors": lambda: list(client.dequantize_many([3])),
                "a scale of text": lambda: quantd.Encoding("int8", ["a"]),
                "no contribution": lambda: client.calibrate(
                    X, "t", contribution=3),
                "a sequence of text": lambda: client.calibrate(
                    X, "t", contribution=quantd.Contribution("s", "a")),
                "a model that is a number": lambda: list(
                    client.list_encodings(3)),
                "patterns that are numbers": lambda: client.sweep(
                    "m", ["int8"], patterns=[3]),
                "a limit of text": lambda: client.sweep(
                    "m", ["int8"], min_sqnr_db="a"),
                "an override that is none": lambda: list(
                    client.compute_encodings("m", overrides=[3])),
                "no encoding": lambda: client.put_encoding("t", 3),
                "a service that is a number": lambda: client.health(3),
                "no target": lambda: quantd.Client(None),
                "a target that is a number": lambda: quantd.Client(8430),
                "no timeout": lambda: quantd.Client("x", timeout=None),
                "chunks of text": lambda: quantd.Client("x", chunk_bytes="1"),
                "retries of text": lambda: quantd.aio.Client(
                    "x", max_retries="1"),
                "no time for retries": lambda: quantd.Client("x",
                                                             retry_for=-1),
                "negative pauses": lambda: quantd.Client(
                    "x", initial_backoff=-1)}.items():
            with self.subTest(name), self.assertRaises(
                    quantd.QuantdError) as caught:
                call()
            self.assertEqual(
                (caught.exception.code, caught.exception.reason),
                (grpc.StatusCode.INVALID_ARGUMENT, "ARGUMENT_INVALID"))

    def test_TargetsAreThoseOfTheOtherClients(self):
        with open(os.path.join(live_server.ROOT, "tests/data/targets.txt"),
                  encoding="utf-8") as file:
            lines = [line.rstrip("\n") for line in file if line[0] != "#"]
        self.assertGreater(len(lines), 30)
        for line in lines:
            text, expected = line.split(maxsplit=1)
            with self.subTest(line):
                if not expected.startswith("! "):
                    self.assertEqual(_channel.parse_target(text), expected)
                    with quantd.Client(text) as client:
                        self.assertIn(f" {expected}>", repr(client))
                    self.assertIn(f" {expected}>",
                                  repr(quantd.aio.Client(text)))
                    continue
                with self.assertRaises(quantd.QuantdError) as caught:
                    quantd.Client(text)
                self.assertIn(expected[2:],
                              caught.exception.message.replace("'", '"'))
                self.assertEqual(caught.exception.field, "target")
        for text in ("", " ", "localhost ", "local\nhost"):
            with self.assertRaises(quantd.QuantdError):
                quantd.Client(text)

    def test_RetriesEndWithTheirTime(self):
        # The clock of retries, which only their pauses move.
        clock = mock.Mock()
        pauses = []

        def pause(connection, seconds, error, channel=None):
            pauses.append(seconds)
            self.assertLess(len(pauses), 1000)
            clock.monotonic.return_value += seconds

        with tempfile.TemporaryDirectory() as folder, mock.patch.object(
                _retries, "time", clock), mock.patch.object(
                    quantd.client._Connection, "pause", pause):
            for retry_for in (0, 0.4):
                with quantd.Client(folder + "/nobody", retry_for=retry_for,
                                   max_backoff=0.05) as client:
                    for call in (lambda: client.quantize(X, "int8"),
                                 lambda: list(client.list_models()),
                                 lambda: client.sweep("m", ["int8"])):
                        clock.monotonic.return_value = 1000.0
                        pauses.clear()
                        with self.assertRaises(quantd.QuantdError) as caught:
                            call()
                        self.assertEqual(caught.exception.reason,
                                         "SERVER_UNREACHABLE")
                        self.assertAlmostEqual(sum(pauses), retry_for)

    def test_AWrongSpecIsToldWhatThereIs(self):
        for text in ("int8:per-chanel", "int8:mse:groups:32", "int8:"):
            with self.assertRaises(quantd.QuantdError) as caught:
                quantd.EncodingSpec.parse(text)
            for word in (repr(text), "per-tensor", "per-channel", "group:N",
                         "asymmetric", "minmax", "best-of", "power-of-two"):
                self.assertIn(word, str(caught.exception))

    def test_OddArraysAreArrays(self):
        want = self.client.quantize(X, "int8").codes
        for name, array in {"big-endian": X.astype(">f4"),
                            "Fortran's order": np.asfortranarray(X),
                            "a list": X.tolist(),
                            "read-only": np.frombuffer(
                                X.tobytes(), "<f4").reshape(6, 8)}.items():
            with self.subTest(name):
                np.testing.assert_array_equal(
                    self.client.quantize(array, "int8").codes, want)
        self.assertEqual(self.client.quantize(1.5, "int8").codes, 127)
        self.assertEqual(
            self.client.quantize(X[:0], "int8").codes.shape, (0, 8))
        # One spec or candidate is not one for each of its letters.
        self.assertEqual(len(self.client.evaluate(X, "int8")), 1)

    def test_ObjectsPrintInALineAndPickle(self):
        tensor = self.client.quantize(X, "int4:group:4", name="layer")
        self.assertEqual(repr(tensor),
                         "<QuantizedTensor 'layer' of int4, (6, 8) of float32, "
                         "12 scales, 24 bytes>")
        many = self.client.quantize(np.ones((1000, 1), np.float32),
                                    "int8:per-channel")
        self.assertLess(len(repr(many.encoding)), 200)
        self.assertEqual(repr(ENCODING),
                         "Encoding('int8', scale=[0.10000000149011612])")
        self.assertIn(self.server.address, repr(self.client))
        with quantd.Client("localhost:1") as client:
            pass
        self.assertIn("closed", repr(client))
        with self.assertRaises(TypeError):
            pickle.dumps(client)

        error = quantd.QuantdError(grpc.StatusCode.UNAVAILABLE, "A", "b",
                                   field="f", retry_after=1.5)
        for through in (lambda item: pickle.loads(pickle.dumps(item)),
                        copy.deepcopy):
            again = through(tensor)
            np.testing.assert_array_equal(again.codes, tensor.codes)
            np.testing.assert_array_equal(again.dequantize(),
                                          tensor.dequantize())
            again = through(error)
            self.assertEqual((str(again), again.code, again.retry_after),
                             (str(error), error.code, 1.5))
            for item in (tensor.encoding, tensor.summary, tensor.name,
                         self.client.calibrate(X),
                         self.client.evaluate(X, ["int8"])[0],
                         quantd.EncodingSpec("int8")):
                self.assertEqual(through(item), item)

    def test_AForkedProcessIsToldInsteadOfWaiting(self):
        self.client.quantize(X, "int8")
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            reasons = []
            # Should it wait after all.
            signal.alarm(WAIT_S)
            for call in (lambda: self.client.quantize(X, "int8"),
                         self.client.health,
                         lambda: list(self.client.list_models()),
                         lambda: self.client.sweep("m", ["int8"]),
                         lambda: list(self.client.quantize_chunks(
                             [X], ENCODING, shape=X.shape)),
                         lambda: quantd.Client(self.server.address)):
                try:
                    call()
                    reasons.append("")
                except quantd.QuantdError as error:
                    reasons.append(error.reason)
            self.client.close()
            os._exit(0 if reasons == ["PROCESS_FORKED"] * 6 else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        # The parent goes on.
        self.assertEqual(self.client.quantize(X, "int8").codes.shape, X.shape)

    def test_AnInterruptEndsACallAtOnceAndLeavesTheClientUsable(self):
        # Shells have what runs in their background ignore it.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        started, ended = threading.Event(), threading.Event()

        def interrupt():
            started.wait()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            # Until the call would end by itself.
            if not ended.wait(WAIT_S):
                os._exit(1)

        with quantd.Client("localhost:1", max_retries=10**6,
                           max_backoff=WAIT_S) as nobody:
            for client in (self.client, nobody):
                started.clear()
                ended.clear()
                thread = threading.Thread(target=interrupt)
                thread.start()
                with self.assertRaises(KeyboardInterrupt):
                    started.set()
                    while True:
                        client.quantize(np.ones(1 << 22, np.float32), ENCODING)
                ended.set()
                thread.join()
        self.assertEqual(self.client.quantize(X, "int8").codes.shape, X.shape)

    def test_AnInterruptInAWaitStaysOne(self):

        class InterruptedLock:
            """Ctrl-C comes right after the release."""

            def __init__(self):
                self._lock = threading.Lock()
                self.acquire = self._lock.acquire

            def __enter__(self):
                return self.acquire()

            def __exit__(self, *unused):
                self._lock.release()

            def release(self):
                self._lock.release()
                raise KeyboardInterrupt

        lock = InterruptedLock()
        condition = quantd._apart.Condition(lock)
        with self.assertRaises(KeyboardInterrupt):
            with condition:
                condition.wait()
        self.assertTrue(lock.acquire(blocking=False))

    def test_AnInterruptNeverComesInTheMidstOfGrpc(self):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        taken, ended = threading.Event(), threading.Event()
        self.addCleanup(ended.set)

        def chunks():
            yield X
            taken.set()
            ended.wait()

        silent = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(silent.close)
        nobody = quantd.Client(f"127.0.0.1:{silent.getsockname()[1]}")
        self.addCleanup(nobody.close)
        name = quantd.TensorName("m", "t")
        of_parts = quantd._chunks.ChunkedCall._read.__code__
        of_answers = quantd.Client._read.__code__

        def parts():
            list(nobody.quantize_chunks([X], ENCODING, shape=X.shape))

        def answers():
            nobody.sweep("m", ["int8"])

        for what, reader, call in (
                ("parts up", of_parts, lambda: list(self.client.quantize_chunks(
                    chunks(), ENCODING, shape=(12, 8)))),
                ("the start of parts", None, parts),
                ("parts", of_parts, parts),
                ("one answer", None, lambda: nobody.get_encoding(name)),
                ("the start of answers", None, answers),
                ("answers", of_answers, answers)):
            with self.subTest(what):
                if what != "parts up":
                    taken.set()
                over = threading.Event()
                thread = threading.Thread(
                    target=interrupt_where_it_waits,
                    args=(taken, over, reader), daemon=True)
                thread.start()
                try:
                    self.assertEqual(frames_of_interrupt(call, "grpc"), [])
                finally:
                    # It may wait for what never began, and must not interrupt
                    # what comes next.
                    over.set()
                    taken.set()
                    thread.join()
                    taken.clear()
        self.assertEqual(self.client.quantize(X, "int8").codes.shape, X.shape)
        self.assertEqual(self.client.health(), "SERVING")


def package_of(frame):
    return os.path.basename(os.path.dirname(frame.f_code.co_filename))


def waits_for_server(frame, reader):
    """Whether gRPC, or what waits for it, is at work there; for `reader`, the
    code that reads a stream, only where that waits for what comes down."""
    if package_of(frame) != "grpc" and (
            frame.f_code is not quantd._apart.run.__code__):
        return False
    caller = frame.f_back
    # A reader that also starts its call, `call`, has none until then.
    return reader is None or (caller.f_code is reader and
                              caller.f_locals.get("call", True) is not None)


def interrupt_where_it_waits(may_begin, is_over, reader):
    """Has Ctrl-C come when the main thread waits for the server; none after
    WAIT_S, or when it is over."""
    may_begin.wait(WAIT_S)
    end = time.monotonic() + WAIT_S
    while not is_over.is_set() and time.monotonic() < end:
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None:
            if waits_for_server(frame, reader):
                signal.pthread_kill(threading.main_thread().ident,
                                    signal.SIGINT)
                return
            frame = frame.f_back


def frames_of_interrupt(call, package_name):
    """What of a package was going on when the call was interrupted."""
    try:
        call()
    except KeyboardInterrupt as interrupt:
        return [frame.f_code.co_name
                for frame, _ in traceback.walk_tb(interrupt.__traceback__)
                if package_of(frame) == package_name]
    raise AssertionError("the call was not interrupted")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
