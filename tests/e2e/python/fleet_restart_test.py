"""Replicas of a fleet that are restarted, and that die, under load.

  fleet_restart_test.py --quantd BINARY --quantctl BINARY [unittest arguments]

QUANTD_FLEET_ROUNDS (default 1) rolling restarts of all replicas, over which
QUANTD_FLEET_CALLS (default 300) calls are made at least; QUANTD_FLEET_UPLOADS
(default 8, at least) uploads during which a replica is killed. The whole is 8,
20000 and 100.
"""

import argparse
import concurrent.futures
import contextlib
import glob
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
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
from holding_proxy import HoldingProxy
from live_server import PATIENCE_S

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()

ROUNDS = int(os.environ.get("QUANTD_FLEET_ROUNDS", "1"))
CALLS = int(os.environ.get("QUANTD_FLEET_CALLS", "300"))
UPLOADS = int(os.environ.get("QUANTD_FLEET_UPLOADS", "8"))
REPLICAS = 3
UPLOAD_ELEMENTS = 1 << 18
RANKS = 4


def data_of(count, seed):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def wait_for(condition, what):
    if not live_server.eventually(condition):
        raise AssertionError(f"it never came: {what}")


class Replica:
    """One place of the fleet, with one server after another on its address."""

    def __init__(self, store):
        self._store = store
        self.server = None
        self.address = "127.0.0.1:0"
        self.start()

    def start(self):
        self.server = fleet.start_at(lambda: live_server.LiveServer(
            options.quantd, store=self._store, listen=self.address))
        self.address = self.server.address

    def stop(self):
        self.server.stop()

    def kill(self):
        self.server.kill()

    def restart(self):
        self.stop()
        self.start()

    def received_bytes(self):
        return self.server.metric("quantd_payload_bytes_total",
                                  direction="in")

    def started(self):
        return self.server.metric("grpc_server_started_total")


def save_safetensors(path, tensors):
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape),
                        "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(array.tobytes())


class FleetRestartTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.store = fleet.PostgresqlCluster()
        cls.addClassCleanup(cls.store.__exit__)
        cls.replicas = []
        cls.addClassCleanup(lambda: fleet.stop_all(
            [replica.server for replica in cls.replicas]))
        for _ in range(REPLICAS):
            cls.replicas.append(Replica(cls.store.url))
        addresses = [replica.address for replica in cls.replicas]
        cls.balanced = "ipv4:" + ",".join(addresses)
        cls.nginx = fleet.Nginx(addresses)
        cls.addClassCleanup(cls.nginx.__exit__)
        with open(cls.nginx.certificate, "rb") as file:
            cls.certificate = file.read()

    def client(self, through_nginx, **more):
        if not through_nginx:
            return quantd.Client(self.balanced, retry_for=PATIENCE_S, **more)
        return quantd.Client(
            self.nginx.address, retry_for=PATIENCE_S,
            credentials=grpc.ssl_channel_credentials(self.certificate), **more)

    def test_RollingRestartsFailNoCall(self):
        name = quantd.TensorName("fleet", "rolling")
        array = data_of(4096, 1)
        encoding = quantd.Encoding("int8", [0.05])
        with self.client(False) as client:
            etag = client.put_encoding(name, encoding).etag
            expected = client.quantize(array, encoding).codes
        is_over = threading.Event()
        counts = [0] * 4

        def load(worker):
            """Calls of all kinds, on new streams and on old ones."""
            done = 0
            client = self.client(worker % 2 == 0)
            try:
                for i in itertools.count():
                    if is_over.is_set():
                        return done
                    if worker >= 2 and i % 64 == 63:
                        client.close()
                        client = self.client(worker % 2 == 0)
                    kind = i % 8
                    if kind == 0:
                        self.assertEqual(client.get_encoding(name).etag, etag)
                    elif kind == 1:
                        client.calibrate(
                            array, quantd.TensorName("fleet", "counted"),
                            contribution=quantd.Contribution(
                                f"worker-{worker}", 1 + i // 8))
                    elif kind < 5:
                        np.testing.assert_array_equal(client.quantize(
                            array, quantd.EncodingReference(name)).codes,
                            expected)
                    else:
                        np.testing.assert_array_equal(
                            client.quantize(array, encoding).codes, expected)
                    done += 1
                    counts[worker] = done
            finally:
                client.close()

        with concurrent.futures.ThreadPoolExecutor(len(counts)) as pool:
            workers = [pool.submit(load, i) for i in range(len(counts))]
            try:
                for _ in range(ROUNDS):
                    for replica in self.replicas:
                        replica.restart()
                        # Back in use before the next one goes.
                        wait_for(lambda r=replica: r.started() > 0 or any(
                            worker.done() for worker in workers),
                            "calls to a replica that was restarted")
                wait_for(lambda: sum(counts) >= CALLS or any(
                    worker.done() for worker in workers), "calls")
            finally:
                is_over.set()
            # Raises what failed.
            total = sum(worker.result() for worker in workers)
        self.assertGreaterEqual(total, CALLS)
        with self.client(False) as client:
            statistics = client.get_statistics(
                quantd.TensorName("fleet", "counted")).statistics
        # Every contribution was counted, and none twice.
        contributions = sum((count + 6) // 8 for count in counts)
        self.assertEqual(statistics.count, contributions * array.size)
        print(f"{ROUNDS} rounds, {total} calls, none failed", file=sys.stderr)

    def test_UploadsOutliveAReplicaThatIsKilled(self):
        for through_nginx in (True, False):
            with self.subTest(through_nginx=through_nginx):
                self.upload_while_one_dies(through_nginx)

    def upload_while_one_dies(self, through_nginx):
        arrays = [data_of(UPLOAD_ELEMENTS, seed) for seed in range(UPLOADS)]
        encoding = quantd.Encoding("int8", [0.03])
        model = f"killed-{through_nginx}"

        def upload(client, i, tensor):
            codes = client.quantize(arrays[i], encoding)
            client.calibrate(
                arrays[i], quantd.TensorName(model, tensor),
                contribution=quantd.Contribution(f"rank-{i % RANKS}",
                                                1 + i // RANKS))
            return codes.codes.tobytes(), codes.summary

        def state(client, tensor):
            return client.get_statistics(
                quantd.TensorName(model, tensor),
                with_state=True).state.SerializeToString(deterministic=True)

        with self.client(through_nginx) as client:
            undisturbed = [upload(client, i, "undisturbed")
                           for i in range(UPLOADS)]
            before = [replica.received_bytes() for replica in self.replicas]
            is_killed = threading.Event()

            def ranks(rank):
                results = []
                for i in range(rank, UPLOADS, RANKS):
                    # The last ones come afterwards, if not more of them.
                    if i + RANKS >= UPLOADS:
                        is_killed.wait()
                    results.append(upload(client, i, "disturbed"))
                return results

            with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:
                workers = [pool.submit(ranks, rank) for rank in range(RANKS)]
                victim = []

                def finds_victim():
                    for replica, bytes_before in zip(self.replicas, before):
                        if replica.received_bytes() > (
                                bytes_before + arrays[0].nbytes):
                            victim.append(replica)
                    return victim

                try:
                    wait_for(finds_victim, "a replica that takes uploads")
                    victim[0].kill()
                finally:
                    is_killed.set()
                disturbed = [worker.result() for worker in workers]
            victim[0].start()
            for i, expected in enumerate(undisturbed):
                self.assertEqual(disturbed[i % RANKS][i // RANKS], expected)
            self.assertEqual(state(client, "disturbed"),
                             state(client, "undisturbed"))

    def test_QuantctlOutlivesAReplicaThatIsKilled(self):
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            proxy = stack.enter_context(HoldingProxy(
                *(replica.address for replica in self.replicas)))
            path = os.path.join(folder, "model.safetensors")
            save_safetensors(path, {
                f"layer{i}": data_of(UPLOAD_ELEMENTS, i).reshape(512, -1)
                for i in range(UPLOADS)})

            def start(command, *more):
                return subprocess.Popen(
                    [options.quantctl, command, path, "--server",
                     "ipv4:" + ",".join(proxy.addresses), "--json", *more],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

            def finish(process):
                output, _ = process.communicate()
                self.assertEqual(process.returncode, 0, output)
                return json.loads(output)

            for command in ("quantize", "calibrate"):
                flags = [] if command == "quantize" else [
                    "--source", "rank-0", "--sequence", "1"]
                results = []
                for run in ("undisturbed", "disturbed"):
                    output = os.path.join(folder, run)
                    if command == "quantize":
                        more = ["--spec", "int8", "--model", "quantctl",
                                "-o", output]
                    else:
                        more = flags + ["--model", "quantctl-" + run]
                    if run == "disturbed":
                        # Some replica gets more than a quarter of all bytes.
                        proxy.hold_after(UPLOADS * UPLOAD_ELEMENTS)
                    process = start(command, *more)
                    if run == "disturbed":
                        self.kill_the_one_that_works(process, proxy)
                    document = finish(process)
                    if run == "disturbed":
                        self.assertGreater(document["retries"], 0)
                    if command == "quantize":
                        with open(output, "rb") as file:
                            results.append(file.read())
                    else:
                        results.append(self.states("quantctl-" + run))
                self.assertEqual(results[0], results[1], command)

    def kill_the_one_that_works(self, process, proxy):
        """The replica in front of which the file has come to a halt."""
        wait_for(lambda: proxy.holds.is_set() or process.poll() is not None,
                 "a part of the file")
        self.assertTrue(proxy.holds.is_set())
        victim = self.replicas[proxy.held]
        victim.kill()
        proxy.hold_after(math.inf)
        victim.start()

    def states(self, model):
        with self.client(False) as client:
            return {entry.tensor: client.get_statistics(
                quantd.TensorName(model, entry.tensor),
                with_state=True).state.SerializeToString(deterministic=True)
                    for entry in client.list_statistics(model)}


if __name__ == "__main__":
    if not glob.glob("/usr/lib/postgresql/*/bin/postgres") or not os.path.exists(
            "/usr/sbin/nginx"):
        print("skipped: PostgreSQL or nginx is not installed")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
