"""Replicas that are restarted while they have long tensors, and clients from
generated code that make each call once.

  fleet_drain_test.py --quantd BINARY [unittest arguments]

QUANTD_DRAIN_CALLS (default 200) calls are made at least, and QUANTD_DRAIN_S
(default 0) is how many seconds tensors stay open on a replica that drains. The
whole is 10000 and 12.
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
from live_server import PATIENCE_S
from quantd.v1 import encoding_pb2 as en
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import encoding_service_pb2_grpc as es_grpc
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import quantization_service_pb2_grpc as qs_grpc
from quantd.v1 import tensor_pb2 as te

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

CALLS = int(os.environ.get("QUANTD_DRAIN_CALLS", "200"))
OPEN_S = float(os.environ.get("QUANTD_DRAIN_S", "0"))
REPLICAS = 3
WORKERS = 4
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


def messages(may_end):
    """A tensor, the second half of which comes when it may end."""
    header = qs.QuantizeHeader(
        tensor=te.TensorDescription(
            element_type=te.ELEMENT_TYPE_FLOAT32, shape=[ELEMENTS]),
        encoding=en.Encoding(format=en.NUMBER_FORMAT_INT8, scale=[0.5]))
    half = bytes(2 * ELEMENTS)
    yield qs.QuantizeRequest(header=header, data=half)
    may_end.wait()
    yield qs.QuantizeRequest(data=half, offset=len(half))


NOW = threading.Event()
NOW.set()


def quantize(channel, may_end=NOW):
    """Raises grpc.RpcError when the call fails."""
    codes = b""
    for response in qs_grpc.QuantizationServiceStub(channel).Quantize(
            messages(may_end), timeout=PATIENCE_S):
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
        # However long tensors are kept open.
        self.flags = ["--idle-timeout", "10m", *flags]
        self.servers = [self.start("127.0.0.1:0") for _ in range(REPLICAS)]
        self.addresses = [server.address for server in self.servers]
        self.addCleanup(lambda: fleet.stop_all(self.servers))

    def start(self, address):
        return fleet.start_at(lambda: live_server.LiveServer(
            options.quantd, listen=address, flags=self.flags))

    def check(self, new_channel, is_balanced):
        """Restarts replicas, one after the other, under calls on channels that
        `new_channel` makes; `is_balanced`: each of them to all replicas."""
        outcomes = collections.Counter()
        lock = threading.Lock()
        is_over = threading.Event()
        # Of the tensors that are open now.
        self.may_end = threading.Event()

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
                        stack.close()
                        channel = stack.enter_context(new_channel())
                    count(list_models if i % 4 == 0 else quantize, channel)
                    time.sleep(PAUSE_S)

        def keep_open():
            with new_channel() as channel:
                while not is_over.is_set():
                    count(quantize, channel, self.may_end)
                    time.sleep(PAUSE_S)

        with concurrent.futures.ThreadPoolExecutor(2 * WORKERS) as pool:
            workers = [pool.submit(work, i) for i in range(WORKERS)]
            workers += [pool.submit(keep_open) for _ in range(WORKERS)]
            try:
                for i in itertools.cycle(range(REPLICAS)):
                    self.wait_for_use(workers, is_balanced)
                    if sum(outcomes.values()) >= CALLS and i == 0:
                        break
                    self.drain(self.servers[i])
                    self.servers[i] = self.start(self.addresses[i])
            finally:
                is_over.set()
                self.let_end()
            for worker in workers:
                worker.result()
        print(dict(outcomes), file=sys.stderr)
        self.assertEqual(set(outcomes), {"ok"}, outcomes)

    def wait_for_use(self, workers, is_balanced):
        """Until all replicas are in use, so that the next one may go."""

        def is_used(server):
            if is_balanced:
                # Each channel has a connection to it.
                return server.metric("quantd_connections") >= len(workers)
            return server.metric("grpc_server_started_total") > 0

        for server in self.servers:
            self.assertTrue(live_server.eventually(
                lambda s=server: is_used(s) or any(
                    worker.done() for worker in workers)), "no calls came")

    def let_end(self):
        """The tensors that are open now, and those that come, at once."""
        may_end, self.may_end = self.may_end, NOW
        may_end.set()

    def drain(self, server):
        """Stops a replica; tensors stay open until it drains."""
        server.begin_stop()
        self.assertTrue(live_server.eventually(
            lambda: server.metric("quantd_draining") == 1))
        time.sleep(OPEN_S)
        self.let_end()
        server.stop()
        self.may_end = threading.Event()

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

            self.check(new_channel, is_balanced=False)

    def balanced(self, *more, credentials=None):
        target = "ipv4:" + ",".join(self.addresses)
        arguments = [("grpc.use_local_subchannel_pool", 1),
                     # A replica that is back is found soon.
                     ("grpc.initial_reconnect_backoff_ms", 100),
                     ("grpc.max_reconnect_backoff_ms", 100), *more]
        if credentials is not None:
            return lambda: grpc.secure_channel(target, credentials, arguments)
        return lambda: grpc.insecure_channel(target, arguments)

    def test_RoundRobinTakesEveryCallElsewhere(self):
        self.start_replicas()
        self.check(self.balanced(("grpc.lb_policy_name", "round_robin")),
                   is_balanced=True)

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
                    authority.certificate)), is_balanced=True)

    def test_TheServiceConfigOfTheManualSeesToTheRest(self):
        # Connections end as soon as a replica is told to stop.
        self.start_replicas(["--drain-delay", "0"])
        self.check(self.balanced(("grpc.service_config", service_config())),
                   is_balanced=True)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
