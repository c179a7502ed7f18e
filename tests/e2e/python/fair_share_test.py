"""What a caller gets beside another one whose tensors take long.

  fair_share_test.py --quantd BINARY [unittest arguments]

QUANTD_FAIR_TENSORS (default 20) tensors are sent alone, and as many beside the
others. The whole is 1000. Prints how many a second were served.
"""

import argparse
import collections
import concurrent.futures
import hashlib
import os
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                "../../client/python"))
import package  # pylint: disable=unused-import,wrong-import-position
# pylint: disable=wrong-import-order,wrong-import-position
import grpc
import numpy as np

import live_server
from quantd.v1 import encoding_pb2 as en
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import quantization_service_pb2_grpc as qs_grpc
from quantd.v1 import tensor_pb2 as te

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

TENSORS = int(os.environ.get("QUANTD_FAIR_TENSORS", "20"))
TIMEOUT_S = 600
THREADS = 2
GREEDY_TENSORS = 12
SHAPE = (64, 256)
DATA = np.random.default_rng(1).standard_normal(SHAPE).astype(
    np.float32).tobytes()
# Every scale has an own range, and both of its ends are searched for.
GREEDY = en.EncodingSpec(
    format=en.NUMBER_FORMAT_INT8, symmetry=en.SYMMETRY_ASYMMETRIC,
    block_size=[1, 4], method=en.CALIBRATION_METHOD_BEST_OF,
    methods=[en.CALIBRATION_METHOD_MIN_MAX, en.CALIBRATION_METHOD_PERCENTILE,
             en.CALIBRATION_METHOD_MSE, en.CALIBRATION_METHOD_SQNR,
             en.CALIBRATION_METHOD_ENTROPY],
    search_steps=128, entropy_bins=16384)
MODEST = en.EncodingSpec(format=en.NUMBER_FORMAT_INT8, block_size=[1, 0])


class Caller:
    """Sends tensors of one spec; counts what becomes of them."""

    def __init__(self, address, token, spec):
        self.token = token
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._quantize = qs_grpc.QuantizationServiceStub(self._channel).Quantize
        self._metadata = [("authorization", f"Bearer {token}")]
        self._request = qs.QuantizeRequest(
            header=qs.QuantizeHeader(
                tensor=te.TensorDescription(
                    element_type=te.ELEMENT_TYPE_FLOAT32, shape=SHAPE),
                spec=spec, omit_encoding=True),
            data=DATA)
        self._lock = threading.Lock()
        self.outcomes = collections.Counter()
        self.is_over = threading.Event()

    def close(self):
        self._channel.close()

    def send(self):
        """One tensor; what became of it, and how long to wait then."""
        for response in self._quantize(iter([self._request]), timeout=TIMEOUT_S,
                                       metadata=self._metadata):
            if response.HasField("error"):
                return (response.error.reason,
                        response.error.retry_after_ms / 1000)
        return "ok", 0

    def send_on(self, served=sys.maxsize):
        """One tensor after the other, until so many were served."""
        while self.outcomes["ok"] < served and not self.is_over.is_set():
            outcome, wait_s = self.send()
            with self._lock:
                self.outcomes[outcome] += 1
            self.is_over.wait(wait_s)

    def goodput(self):
        """Has TENSORS served; how many a second."""
        self.outcomes.clear()
        begin = time.monotonic()
        self.send_on(TENSORS)
        return TENSORS / (time.monotonic() - begin)


class FairShareTest(unittest.TestCase):

    def setUp(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        path = os.path.join(folder, "access.txt")
        with open(path, "w", encoding="utf-8") as file:
            for name in ("greedy", "modest"):
                digest = hashlib.sha256(name.encode()).hexdigest()
                file.write(f"{name} sha256:{digest} quantize *\n")
        self.server = self.enterContext(live_server.LiveServer(
            options.quantd, flags=["--access-file", path, "--threads",
                                   str(THREADS)]))

    def caller(self, token, spec):
        caller = Caller(self.server.address, token, spec)
        self.addCleanup(caller.close)
        return caller

    def beside(self, greedy, measure):
        """What `measure` returns while GREEDY_TENSORS of the other caller are
        open or come back as often as they may; how many of these ended."""
        with concurrent.futures.ThreadPoolExecutor(GREEDY_TENSORS) as pool:
            workers = [pool.submit(greedy.send_on)
                       for _ in range(GREEDY_TENSORS)]
            try:
                # All workers are at it, and there is no room for more.
                self.assertTrue(live_server.eventually(
                    lambda: greedy.outcomes["OVERLOADED"] > 0 and
                    self.server.metric("quantd_active_tensors") >= THREADS))
                before = greedy.outcomes["ok"]
                result = measure()
                return result, greedy.outcomes["ok"] - before
            finally:
                greedy.is_over.set()
                # What runs ends with its channel.
                greedy.close()
                for worker in workers:
                    worker.exception()

    def serve_beside_long_ones(self, token):
        """Has the tensors of a caller served alone, and beside the long tensors
        of another, or of its own: what became of them then, and how many long
        ones ended meanwhile."""
        greedy = self.caller("greedy", GREEDY)
        modest = self.caller(token, MODEST)
        self.assertEqual(modest.send(), ("ok", 0))
        alone = modest.goodput()
        self.assertEqual(set(modest.outcomes), {"ok"})
        beside, ended = self.beside(greedy, modest.goodput)
        print(f"{alone:.1f} tensors a second alone, {beside:.1f} beside "
              f"{GREEDY_TENSORS} long ones of {greedy.token} "
              f"({100 * beside / alone:.0f}%): {dict(modest.outcomes)}; the "
              f"others: {dict(greedy.outcomes)}, {ended} ended meanwhile",
              file=sys.stderr)
        self.assertLessEqual(set(greedy.outcomes), {"ok", "OVERLOADED"})
        return modest.outcomes, ended

    def test_LongTensorsOfOneCallerLeaveTheOthersTheirShare(self):
        outcomes, ended = self.serve_beside_long_ones("modest")
        # Whose load it is not is never turned away.
        self.assertEqual(outcomes, {"ok": TENSORS})
        # Had each waited for a worker to be done with a long one, as many of
        # those would have ended.
        self.assertLess(ended, TENSORS)

    def test_LongTensorsLeaveTheSameCallerTime(self):
        outcomes, _ = self.serve_beside_long_ones("greedy")
        self.assertEqual(outcomes["ok"], TENSORS)
        self.assertLessEqual(set(outcomes), {"ok", "OVERLOADED"})


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
