"""Three replicas over one PostgreSQL, and nginx in front of them.

  fleet_test.py --quantd BINARY [unittest arguments]
"""

import argparse
import concurrent.futures
import glob
import itertools
import os
import shutil
import sys
import threading
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                "../../client/python"))
import package  # pylint: disable=unused-import,wrong-import-position
# pylint: disable=wrong-import-order,wrong-import-position
import grpc
import numpy as np

import fleet
import live_server
import quantd
from live_server import PATIENCE_S, eventually
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import quantization_service_pb2_grpc as qs_grpc
from quantd.v1 import tensor_pb2 as te

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

REPLICAS = 3


def data_of(count, seed):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


class FleetTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.store = fleet.PostgresqlCluster()
        cls.addClassCleanup(cls.store.__exit__)
        cls.replicas = []
        for _ in range(REPLICAS):
            server = live_server.LiveServer(
                options.quantd, store=cls.store.url,
                flags=["--drain-delay", "0"])
            cls.addClassCleanup(server.stop)
            cls.replicas.append(server)
        cls.clients = [quantd.Client(server.address, timeout=PATIENCE_S)
                       for server in cls.replicas]
        for client in cls.clients:
            cls.addClassCleanup(client.close)

    def test_ContributionsToDifferentReplicasMergeToTheBitsOfOneServer(self):
        name = quantd.TensorName("fleet", "layer.output")
        batches = [data_of(5000, seed) for seed in range(12)]

        def contribute(clients):
            for i, batch in enumerate(batches):
                contribution = quantd.Contribution(f"rank-{i % 4}", 1 + i // 4)
                # Twice, at two replicas: it is counted once.
                for client in itertools.islice(clients, 2):
                    client.calibrate(batch, name, contribution=contribution)

        def state_of(client):
            return client.get_statistics(name, with_state=True).state

        contribute(itertools.cycle(self.clients))
        with live_server.LiveServer(options.quantd) as single:
            with quantd.Client(single.address) as client:
                contribute(itertools.repeat(client))
                expected = state_of(client).SerializeToString(
                    deterministic=True)
        for client in self.clients:
            self.assertEqual(
                state_of(client).SerializeToString(deterministic=True),
                expected)

    def test_RangesQuantizedByDifferentReplicasJoinToTheSameBytes(self):
        array = data_of(1 << 18, 3)
        name = quantd.TensorName("fleet", "ranges")
        whole = self.clients[0].quantize(array, "int8", name=name, store=True)
        cuts = [0, 100_000, 400_000, array.nbytes]
        codes = b""
        for server, begin, end in zip(self.replicas, cuts, cuts[1:]):
            header = qs.QuantizeHeader(
                tensor=te.TensorDescription(
                    name=te.TensorName(model="fleet", tensor="ranges"),
                    element_type=te.ELEMENT_TYPE_FLOAT32, shape=array.shape),
                range=te.ByteRange(begin_bytes=begin, end_bytes=end))
            header.reference.SetInParent()
            with grpc.insecure_channel(server.address) as channel:
                stub = qs_grpc.QuantizationServiceStub(channel)
                request = qs.QuantizeRequest(
                    header=header, offset=begin,
                    data=array.tobytes()[begin:end])
                for response in stub.Quantize(iter([request]),
                                              timeout=PATIENCE_S):
                    self.assertFalse(response.HasField("error"), response)
                    codes += response.data
        self.assertEqual(codes, whole.codes.tobytes())

    def test_EachReplicaServesWhatAnotherOneWrote(self):
        first, second, third = self.clients
        name = quantd.TensorName("fleet", "shared")
        for value in (0.5, 0.25):
            etag = first.put_encoding(
                name, quantd.Encoding("int8", [value])).etag
            for client in (second, third):
                self.assertTrue(eventually(
                    lambda c=client: self.etag_of(c, name) == etag))
        second.delete_encoding(name)
        self.assertTrue(eventually(lambda: self.etag_of(first, name) is None))

    def test_CachedEncodingsServeWhileTheStoreIsAway(self):
        client = self.clients[0]
        name = quantd.TensorName("fleet", "cached")
        array = data_of(1000, 5)
        stored = client.put_encoding(name, quantd.Encoding("int8", [0.02]))
        reference = quantd.EncodingReference()
        before = client.quantize(array, reference, name=name)

        def asked_in_vain():
            return self.replicas[0].metric("quantd_store_errors_total",
                                           operation="get")

        with quantd.Client(self.replicas[0].address, timeout=PATIENCE_S,
                           max_retries=0) as once:

            def serves_what_is_cached():
                during = once.quantize(array, reference, name=name)
                self.assertEqual(during.etag, stored.etag)
                np.testing.assert_array_equal(during.codes, before.codes)
                return True

            self.store.stop()
            try:
                # Until what is cached was asked for again, more than once.
                asked = asked_in_vain()
                self.assertTrue(eventually(
                    lambda: serves_what_is_cached() and
                    asked_in_vain() > asked + 1))
                inline = once.quantize(array, quantd.Encoding("int8", [0.02]))
                np.testing.assert_array_equal(inline.codes, before.codes)
                with self.assertRaises(quantd.QuantdError) as caught:
                    once.put_encoding(name, quantd.Encoding("int8", [0.03]))
                self.assertEqual(caught.exception.reason, "STORE_UNAVAILABLE")
                # A write that failed has not thrown away what is cached.
                serves_what_is_cached()
            finally:
                self.store.start()
        # The client's retries see to the rest.
        client.put_encoding(name, quantd.Encoding("int8", [0.04]))

    def test_TheStoreMayRestartUnderLoad(self):
        name = quantd.TensorName("fleet", "outage")
        written = quantd.TensorName("fleet", "written")
        array = data_of(1000, 6)
        encoding = quantd.Encoding("int8", [0.02])
        clients = [quantd.Client(s.address, timeout=PATIENCE_S, max_retries=0)
                   for s in self.replicas]
        for client in clients:
            self.addCleanup(client.close)
        clients[0].put_encoding(name, encoding)
        clients[0].put_encoding(written, encoding)
        expected = clients[0].quantize(array, encoding).codes
        for client in clients:
            client.quantize(array, quantd.EncodingReference(name))
            client.get_encoding(written)
        is_over = threading.Event()
        failed, generations = [0] * REPLICAS, []

        def quantize(client):
            """What is cached, and what comes along: never fails."""
            for count in itertools.count(1):
                for source in (quantd.EncodingReference(name), encoding):
                    np.testing.assert_array_equal(client.quantize(
                        array, source, name=name).codes, expected)
                if is_over.is_set():
                    return count

        def write(i, client):
            """Fails, or is written; waits for no store."""
            while not is_over.is_set():
                try:
                    client.put_encoding(written, encoding)
                except quantd.QuantdError as error:
                    self.assertEqual(error.reason, "STORE_UNAVAILABLE")
                    failed[i] += 1

        def watch(client):
            """Sees no older version after a newer one. There may be none, where
            one was just replaced and the newer one can't be had."""
            last = 0
            while not is_over.is_set():
                try:
                    generation = client.get_encoding(written).generation
                except quantd.QuantdError as error:
                    self.assertEqual(error.reason, "STORE_UNAVAILABLE")
                    continue
                self.assertGreaterEqual(generation, last)
                last = generation
            generations.append(last)

        with concurrent.futures.ThreadPoolExecutor(3 * REPLICAS) as pool:
            workers = []
            for i, client in enumerate(clients):
                workers += [pool.submit(quantize, client),
                            pool.submit(write, i, client),
                            pool.submit(watch, client)]
            try:
                for _ in range(2):
                    self.store.stop()
                    try:
                        before = list(failed)
                        self.assertTrue(eventually(
                            lambda b=before: all(
                                now > then + 2
                                for now, then in zip(failed, b))), failed)
                    finally:
                        self.store.start()
                    # By themselves.
                    self.assertTrue(eventually(
                        lambda: self.is_written(clients, written, encoding)))
            finally:
                is_over.set()
            for worker in workers:
                worker.result()
        self.assertEqual(len(generations), REPLICAS)

    def is_written(self, clients, name, encoding):
        try:
            for client in clients:
                client.put_encoding(name, encoding)
        except quantd.QuantdError:
            return False
        return True

    @unittest.skipUnless(shutil.which("nginx", path="/usr/sbin:/usr/bin"),
                         "nginx is not installed")
    def test_NginxBalancesCallsOverTheReplicas(self):
        handled = [self.handled(server) for server in self.replicas]
        with fleet.Nginx([s.address for s in self.replicas]) as nginx:
            with open(nginx.certificate, "rb") as file:
                credentials = grpc.ssl_channel_credentials(file.read())
            array = data_of(1 << 20, 7)
            direct = self.clients[0].quantize(array, "int4:group:32")
            for _ in range(12):
                with quantd.Client(nginx.address,
                                   credentials=credentials) as client:
                    proxied = client.quantize(array, "int4:group:32")
                    np.testing.assert_array_equal(proxied.codes, direct.codes)
        for server, before in zip(self.replicas, handled):
            self.assertGreater(self.handled(server), before)

    def handled(self, server):
        return server.metric("grpc_server_started_total",
                             grpc_method="Quantize")

    def etag_of(self, client, name):
        try:
            return client.get_encoding(name).etag
        except quantd.QuantdError as error:
            self.assertEqual(error.reason, "ENCODING_NOT_FOUND")
            return None


if __name__ == "__main__":
    if not glob.glob("/usr/lib/postgresql/*/bin/postgres"):
        print("skipped: PostgreSQL is not installed")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
