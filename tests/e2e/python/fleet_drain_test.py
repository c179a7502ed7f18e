"""Replicas that are restarted while they have long tensors, and clients from
generated code that make each call once.

  fleet_drain_test.py --quantd BINARY [unittest arguments]

QUANTD_DRAIN_CALLS (default 1000) calls are made at least, and QUANTD_DRAIN_S
(default 2) is how long tensors are open. The whole is 10000 and 12.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import re
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

import certificates
import fleet
import live_server
from quantd.v1 import encoding_pb2 as en
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import encoding_service_pb2_grpc as es_grpc
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import quantization_service_pb2_grpc as qs_grpc
from quantd.v1 import tensor_pb2 as te

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

CALLS = int(os.environ.get("QUANTD_DRAIN_CALLS", "1000"))
OPEN_S = float(os.environ.get("QUANTD_DRAIN_S", "2"))
REPLICAS = 3
WORKERS = 4
PATIENCE_S = 60
ELEMENTS = 1024
# nginx lets one address make 1,000 calls a second.
PAUSE_S = 0.01


def service_config():
    """The one that deploy/README.md prints."""
    with open(os.path.join(live_server.ROOT, "deploy/README.md"),
              encoding="utf-8") as file:
        text = re.search(r"```json\n(\{\s*\"loadBalancingConfig\".*?)```",
                         file.read(), re.DOTALL)[1]
    return json.dumps(json.loads(text))


def messages(pause_s):
    """A tensor, the second half of which comes that much later."""
    header = qs.QuantizeHeader(
        tensor=te.TensorDescription(
            element_type=te.ELEMENT_TYPE_FLOAT32, shape=[ELEMENTS]),
        encoding=en.Encoding(format=en.NUMBER_FORMAT_INT8, scale=[0.5]))
    half = bytes(2 * ELEMENTS)
    yield qs.QuantizeRequest(header=header, data=half)
    if pause_s:
        time.sleep(pause_s)
    yield qs.QuantizeRequest(data=half, offset=len(half))


def quantize(channel, pause_s=0):
    """Raises grpc.RpcError when the call fails."""
    codes = b""
    for response in qs_grpc.QuantizationServiceStub(channel).Quantize(
            messages(pause_s), timeout=PATIENCE_S):
        if response.HasField("error"):
            raise AssertionError(response)
        codes += response.data
    if codes != bytes(ELEMENTS):
        raise AssertionError("other codes")


def list_models(channel):
    es_grpc.EncodingServiceStub(channel).ListModels(
        es.ListModelsRequest(), timeout=PATIENCE_S)


class FleetDrainTest(unittest.TestCase):

    def start_replicas(self, flags=()):
        self.flags = list(flags)
        self.servers = [self.start("127.0.0.1:0") for _ in range(REPLICAS)]
        self.addresses = [server.address for server in self.servers]
        self.addCleanup(lambda: [server.stop() for server in self.servers])

    def start(self, address):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return live_server.LiveServer(
                    options.quantd, listen=address, flags=self.flags)
            except RuntimeError:
                # Another connection may have the port for a moment.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def check(self, new_channel):
        """Restarts replicas, one after the other, under calls on channels that
        `new_channel` makes."""
        outcomes = collections.Counter()
        lock = threading.Lock()
        is_over = threading.Event()

        def count(call, *more):
            try:
                call(*more)
                outcome = "ok"
            except grpc.RpcError as error:
                outcome = f"{error.code().name}: {error.details()}"
            with lock:
                outcomes[outcome] += 1

        def work(worker):
            with contextlib.ExitStack() as stack:
                channel = stack.enter_context(new_channel())
                for i in itertools.count():
                    if is_over.is_set():
                        return
                    if worker % 2 and i % 100 == 99:
                        channel = stack.enter_context(new_channel())
                    count(list_models if i % 4 == 0 else quantize, channel)
                    time.sleep(PAUSE_S)

        def keep_open():
            with new_channel() as channel:
                while not is_over.is_set():
                    count(quantize, channel, OPEN_S)

        with concurrent.futures.ThreadPoolExecutor(2 * WORKERS) as pool:
            workers = [pool.submit(work, i) for i in range(WORKERS)]
            workers += [pool.submit(keep_open) for _ in range(WORKERS)]
            try:
                for i in itertools.cycle(range(REPLICAS)):
                    time.sleep(0.5)
                    if sum(outcomes.values()) >= CALLS and i == 0:
                        break
                    self.servers[i].stop()
                    self.servers[i] = self.start(self.addresses[i])
                    self.wait_for_calls(self.servers[i], workers)
            finally:
                is_over.set()
            for worker in workers:
                worker.result()
        print(dict(outcomes), file=sys.stderr)
        self.assertEqual(set(outcomes), {"ok"}, outcomes)

    def wait_for_calls(self, server, workers):
        """Until the replica is in use again, so that the next one may go."""
        deadline = time.monotonic() + PATIENCE_S
        while server.metric("grpc_server_started_total") == 0:
            if any(worker.done() for worker in workers):
                return
            self.assertLess(time.monotonic(), deadline, "no calls came")
            time.sleep(0.02)

    @unittest.skipUnless(os.path.exists("/usr/sbin/nginx"),
                         "nginx is not installed")
    def test_NginxSendsEveryCallOn(self):
        self.start_replicas()
        with fleet.Nginx(self.addresses) as nginx:
            with open(nginx.certificate, "rb") as file:
                certificate = file.read()

            def new_channel():
                return grpc.secure_channel(
                    nginx.address, grpc.ssl_channel_credentials(certificate),
                    options=[("grpc.use_local_subchannel_pool", 1)])

            self.check(new_channel)

    def balanced(self, *more, credentials=None):
        target = "ipv4:" + ",".join(self.addresses)
        arguments = [("grpc.use_local_subchannel_pool", 1), *more]
        if credentials is not None:
            return lambda: grpc.secure_channel(target, credentials, arguments)
        return lambda: grpc.insecure_channel(target, arguments)

    def test_RoundRobinTakesEveryCallElsewhere(self):
        self.start_replicas()
        self.check(self.balanced(("grpc.lb_policy_name", "round_robin")))

    def test_SoItDoesOverTls(self):
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            authority = certificates.Authority("authority")
            pair = authority.issue("localhost", names=["localhost"])
            paths = [
                certificates.replace(os.path.join(folder, name), content)
                for name, content in (("tls.crt", pair.certificate),
                                      ("tls.key", pair.key))]
            self.start_replicas(["--tls-certificate", paths[0],
                                 "--tls-key", paths[1]])
            self.check(self.balanced(
                ("grpc.lb_policy_name", "round_robin"),
                ("grpc.ssl_target_name_override", "localhost"),
                credentials=grpc.ssl_channel_credentials(
                    authority.certificate)))

    def test_TheServiceConfigOfTheManualSeesToTheRest(self):
        # Between two restarts there is no time for a connection.
        self.start_replicas(["--drain-delay", "0"])
        self.check(self.balanced(("grpc.service_config", service_config())))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
