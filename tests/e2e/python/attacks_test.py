"""What attacks.py does to the shipped nginx hardly gets to the server behind
it, and nobody else notices.

  attacks_test.py --quantd BINARY [unittest arguments]

With QUANTD_ATTACKS_FULL=1 in the environment the attacks do more, mostly ten
times as much. Prints the server's processor time, and how soon it answered
others.
"""

import argparse
import json
import os
import shutil
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

import attacks
import certificates
import fleet
import live_server
import quantd
from live_server import PATIENCE_S

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

FULL = bool(os.environ.get("QUANTD_ATTACKS_FULL"))
SCALE = 10 if FULL else 1
MAX_THREADS = 64
# Of the health of the server on each way, during an attack.
LEAST_PROBES = 10
MOST_PROBES = 100
ATTACKS_PY = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                          "attacks.py")


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_count(pid):
    return len(os.listdir(f"/proc/{pid}/task"))


class HealthProbe:
    """Asks for health over channels until it is stopped, MOST_PROBES times at
    most; a context manager.

    One thread each, so that a slow way does not hide another one.
    """

    def __init__(self, channels, pid):
        self.seconds = {name: [] for name in channels}
        self.errors = []
        self.threads = 0
        self._pid = pid
        self._stop = threading.Event()
        self._workers = [
            threading.Thread(target=self._run, args=item)
            for item in channels.items()]

    def _run(self, name, channel):
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        for _ in range(MOST_PROBES):
            if self._stop.is_set():
                return
            begin = time.monotonic()
            try:
                # HealthCheckResponse.status = SERVING.
                if check(b"", timeout=PATIENCE_S) != b"\x08\x01":
                    self.errors.append(f"{name}: not serving")
            except grpc.RpcError as error:
                self.errors.append(f"{name}: {error.code()} {error.details()}")
            self.seconds[name].append(time.monotonic() - begin)
            self.threads = max(self.threads, thread_count(self._pid))
            self._stop.wait(0.02)

    def has_asked(self):
        """Whether that was often enough on every way."""
        return all(len(times) >= LEAST_PROBES
                   for times in self.seconds.values())

    def p99(self, name):
        times = sorted(self.seconds[name])
        return times[min(len(times) - 1, int(0.99 * len(times)))]

    def __enter__(self):
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *unused):
        self._stop.set()
        for worker in self._workers:
            worker.join()


class Attacked:
    """What is the same wherever the attacks go. Has `server`, and `channels`
    over which health is watched."""

    def attack(self, name, address, *flags):
        """Runs an attack and expects nobody to notice; what it did."""
        pid = self.server.process.pid
        cpu_before = cpu_seconds(pid)
        with HealthProbe(self.channels, pid) as probe, subprocess.Popen(
                [sys.executable, ATTACKS_PY, name, address, "--until-eof",
                 "--seconds", str(PATIENCE_S), *map(str, flags)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            live_server.eventually(probe.has_asked)
            # Which lets the attack end, once it has done all it should.
            done, _ = process.communicate()
        cpu = cpu_seconds(pid) - cpu_before
        print(f"{name}: {done.decode()}, server {cpu:.2f} s CPU, "
              f"{probe.threads} threads, health p99 "
              + ", ".join(f"{1000 * probe.p99(way):.1f} ms {way}"
                          for way in self.channels))
        self.assertEqual(process.returncode, 0)
        self.assertTrue(probe.has_asked())
        self.assertEqual(probe.errors, [])
        self.assertLessEqual(probe.threads, MAX_THREADS)
        return json.loads(done)

    def started(self):
        """The calls that have reached the server."""
        return self.server.metric("grpc_server_started_total")


class NginxTest(Attacked, unittest.TestCase):
    """Through nginx."""

    @classmethod
    def setUpClass(cls):
        cls.server = live_server.LiveServer(
            options.quantd, flags=["--drain-delay", "0"])
        cls.addClassCleanup(cls.server.stop)

    def setUp(self):
        self.use_nginx()

    def use_nginx(self, **options_):
        self.nginx = self.enterContext(fleet.Nginx([self.server.address],
                                                   **options_))
        with open(self.nginx.certificate, "rb") as file:
            self.credentials = grpc.ssl_channel_credentials(file.read())
        self.channels = {
            "through nginx": grpc.secure_channel(self.nginx.address,
                                                 self.credentials),
            "directly": grpc.insecure_channel(self.server.address)}
        for channel in self.channels.values():
            self.addCleanup(channel.close)
            grpc.channel_ready_future(channel).result(timeout=PATIENCE_S)

    def expect_serving(self):
        array = np.linspace(-3, 3, 4096, dtype=np.float32)
        codes = []
        for client in (quantd.Client(self.nginx.address,
                                     credentials=self.credentials),
                       quantd.Client(self.server.address)):
            with client:
                codes.append(client.quantize(array, "int8").codes)
        np.testing.assert_array_equal(codes[0], codes[1])

    def through_nginx(self, name, count, refusals=0):
        """What an attack did, and how many calls of it got to the server."""
        before = self.started()
        done = self.attack(name, self.nginx.address, "--tls", "--count", count,
                           "--refusals", refusals)
        reached = self.started() - before
        self.assertGreaterEqual(done["refused"], refusals)
        self.expect_serving()
        return done, reached

    def test_AnUnfinishedHeaderIsRefusedBeforeItIsWhole(self):
        done, reached = self.through_nginx("unfinished_header", 0, 20 * SCALE)
        self.assertEqual(done["done"], 0)
        self.assertEqual(reached, 0)

    def is_refused(self, flood):
        done, reached = self.through_nginx(flood, 1000 * SCALE, 2 * SCALE)
        self.assertGreaterEqual(done["done"], 1000 * SCALE)
        self.assertEqual(reached, 0)

    def test_AHeaderWithoutEndIsRefused(self):
        self.is_refused("continuation_flood")

    def test_OfCallsThatAreResetAtOnceNoMoreThanABurstReachesTheServer(self):
        # However long they take, hardly any comes on top of the burst of 500.
        self.use_nginx(calls_per_s=1)
        done, reached = self.through_nginx("rapid_resets", 2000 * SCALE)
        self.assertGreaterEqual(done["done"], 2000 * SCALE)
        self.assertLess(reached, 1000)

    def test_SettingsWithoutEndAreRefused(self):
        self.is_refused("settings_flood")

    def test_PingsWithoutEndAreRefused(self):
        self.is_refused("ping_flood")

    def test_CompressedMessagesDoNotReachTheServer(self):
        check = self.channels["through nginx"].unary_unary(
            "/grpc.health.v1.Health/Check")
        for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            with self.assertRaises(grpc.RpcError) as caught:
                check(bytes(1 << 20), timeout=PATIENCE_S,
                      compression=compression)
            self.assertEqual(caught.exception.code(),
                             grpc.StatusCode.UNIMPLEMENTED)
            self.assertEqual(caught.exception.details(),
                             "compressed messages are not taken")
        self.assertEqual(check(b"", timeout=PATIENCE_S), b"\x08\x01")

    def test_SlowConnectionsKeepNobodyOut(self):
        count = 400 if FULL else 100
        done, reached = self.through_nginx("slowloris", count)
        self.assertEqual(done["connections"], count)
        self.assertLessEqual(reached, count)

    def test_AnswersThatNobodyTakesKeepNobodyOut(self):
        count = 1000 if FULL else 400
        done, _ = self.through_nginx("zero_window", count)
        self.assertGreaterEqual(done["done"], count)


class MutualTlsTest(Attacked, unittest.TestCase):
    """Straight to a port that asks for a certificate, by who has none."""

    # A handshake that fails costs the server about a millisecond.
    CONNECTIONS = 100

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        authority = certificates.Authority("authority")
        certificate, key = authority.issue(
            "server", names=["localhost"]).write(folder.name, "server")
        client = authority.issue("client")
        cls.server = live_server.LiveServer(
            options.quantd, flags=[
                "--drain-delay", "0", "--tls-certificate", certificate,
                "--tls-key", key, "--tls-client-ca", certificates.replace(
                    os.path.join(folder.name, "ca.crt"),
                    authority.certificate)])
        cls.addClassCleanup(cls.server.stop)
        cls.credentials = grpc.ssl_channel_credentials(
            authority.certificate, client.key, client.certificate)
        cls.address = "localhost:" + cls.server.address.rsplit(":", 1)[1]
        cls.channels = {"with a certificate": grpc.secure_channel(
            cls.address, cls.credentials)}
        for channel in cls.channels.values():
            cls.addClassCleanup(channel.close)
            grpc.channel_ready_future(channel).result(timeout=PATIENCE_S)

    def test_NobodyGetsPastTheHandshake(self):
        for name in attacks.ATTACKS:
            with self.subTest(name):
                before = self.started()
                done = self.attack(name, self.address, "--tls", "--connections",
                                   self.CONNECTIONS, "--refusals",
                                   self.CONNECTIONS)
                self.assertEqual(done["refused"], self.CONNECTIONS)
                self.assertEqual(self.started(), before)
        with quantd.Client(self.address,
                           credentials=self.credentials) as client:
            client.quantize(np.ones(1000, np.float32), "int8")


if __name__ == "__main__":
    if not shutil.which("nginx", path="/usr/sbin:/usr/bin"):
        print("skipped: nginx is not installed")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
