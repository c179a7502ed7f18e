"""Replicas of a fleet that are restarted, and that die, under load.

  fleet_restart_test.py --quantd BINARY --quantctl BINARY [unittest arguments]

QUANTD_FLEET_ROUNDS (default 1) rolling restarts of all replicas, over which
QUANTD_FLEET_CALLS (default 1000) calls are made at least; QUANTD_FLEET_UPLOADS
(default 20) uploads during which a replica is killed. The whole is 8, 20000 and
100.
"""

import argparse
import concurrent.futures
import glob
import itertools
import json
import os
import subprocess
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

import fleet
import live_server
import quantd

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()

ROUNDS = int(os.environ.get("QUANTD_FLEET_ROUNDS", "1"))
CALLS = int(os.environ.get("QUANTD_FLEET_CALLS", "1000"))
UPLOADS = int(os.environ.get("QUANTD_FLEET_UPLOADS", "20"))
REPLICAS = 3
PATIENCE_S = 60
UPLOAD_ELEMENTS = 1 << 19


def data_of(count, seed):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def wait_for(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {PATIENCE_S} s: {what}")
        time.sleep(0.01)


class Replica:
    """One place of the fleet, with one server after another on its address."""

    def __init__(self, store):
        self._store = store
        self.server = None
        self.address = "127.0.0.1:0"
        self.start()

    def start(self):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.server = live_server.LiveServer(
                    options.quantd, store=self._store, listen=self.address)
                break
            except RuntimeError:
                # Another connection may have the port for a moment.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
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
        for _ in range(REPLICAS):
            replica = Replica(cls.store.url)
            cls.addClassCleanup(replica.stop)
            cls.replicas.append(replica)
        addresses = [replica.address for replica in cls.replicas]
        cls.balanced = "ipv4:" + ",".join(addresses)
        cls.nginx = fleet.Nginx(addresses)
        cls.addClassCleanup(cls.nginx.__exit__)
        with open(cls.nginx.certificate, "rb") as file:
            cls.certificate = file.read()

    def client(self, through_nginx, **more):
        if not through_nginx:
            return quantd.Client(self.balanced, **more)
        return quantd.Client(
            self.nginx.address, credentials=grpc.ssl_channel_credentials(
                self.certificate), **more)

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
                contribution=quantd.Contribution(f"rank-{i % 4}", 1 + i // 4))
            return codes.codes.tobytes(), codes.summary

        def state(client, tensor):
            return client.get_statistics(
                quantd.TensorName(model, tensor),
                with_state=True).state.SerializeToString(deterministic=True)

        with self.client(through_nginx) as client:
            undisturbed = [upload(client, i, "undisturbed")
                           for i in range(UPLOADS)]
            before = [replica.received_bytes() for replica in self.replicas]

            def ranks(rank):
                return [upload(client, i, "disturbed")
                        for i in range(rank, UPLOADS, 4)]

            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                workers = [pool.submit(ranks, rank) for rank in range(4)]
                victim = []

                def finds_victim():
                    for replica, bytes_before in zip(self.replicas, before):
                        if replica.received_bytes() > (
                                bytes_before + arrays[0].nbytes):
                            victim.append(replica)
                    return victim

                wait_for(finds_victim, "a replica that takes uploads")
                victim[0].kill()
                still_running = not all(worker.done() for worker in workers)
                disturbed = [worker.result() for worker in workers]
            victim[0].start()
            self.assertTrue(still_running, "killed after the last upload")
            for i, expected in enumerate(undisturbed):
                self.assertEqual(disturbed[i % 4][i // 4], expected)
            self.assertEqual(state(client, "disturbed"),
                             state(client, "undisturbed"))

    def test_QuantctlOutlivesAReplicaThatIsKilled(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.safetensors")
            save_safetensors(path, {
                f"layer{i}": data_of(UPLOAD_ELEMENTS, i).reshape(512, -1)
                for i in range(UPLOADS)})

            def start(command, *more):
                return subprocess.Popen(
                    [options.quantctl, command, path, "--server",
                     self.balanced, "--json", *more],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

            def finish(process):
                output, _ = process.communicate(timeout=600)
                self.assertEqual(process.returncode, 0, output)
                return json.loads(output)

            for command in ("quantize", "calibrate"):
                flags = [] if command == "quantize" else [
                    "--source", "rank-0", "--sequence", "1"]
                results = []
                for run in ("undisturbed", "disturbed"):
                    output = os.path.join(folder, run)
                    if command == "quantize":
                        more = ["--format", "int8", "--model", "quantctl",
                                "-o", output]
                    else:
                        more = flags + ["--model", "quantctl-" + run]
                    before = [r.received_bytes() for r in self.replicas]
                    process = start(command, *more)
                    if run == "disturbed":
                        self.kill_the_one_that_works(process, before)
                    document = finish(process)
                    if run == "disturbed":
                        self.assertGreater(document["retries"], 0)
                    if command == "quantize":
                        with open(output, "rb") as file:
                            results.append(file.read())
                    else:
                        results.append(self.states("quantctl-" + run))
                self.assertEqual(results[0], results[1], command)

    def kill_the_one_that_works(self, process, before):
        while process.poll() is None:
            for replica, bytes_before in zip(self.replicas, before):
                if replica.received_bytes() > bytes_before:
                    replica.kill()
                    replica.start()
                    return
        self.fail("over before a replica was killed")

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
