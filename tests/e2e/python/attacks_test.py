"""What attacks.py does to the shipped nginx costs the server behind it next to
nothing, and nobody else notices.

  attacks_test.py --quantd BINARY [unittest arguments]

With QUANTD_ATTACKS_FULL=1 in the environment each attack lasts 5 seconds and
has to keep the limits of the product, which a machine keeps that is not busy
with something else; otherwise it lasts a second, and has to keep limits that
hold under sanitizers too.
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

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

FULL = bool(os.environ.get("QUANTD_ATTACKS_FULL"))
ATTACK_S = 5 if FULL else 1
# Of CPU time of the server, for each attack.
MAX_CPU_S = 1 if FULL else 5
MAX_THREADS = 64
MAX_HEALTH_P99_S = 0.1 if FULL else 2
# For what an attack has left behind.
SETTLE_S = 20
ATTACKS_PY = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                          "attacks.py")


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_count(pid):
    return len(os.listdir(f"/proc/{pid}/task"))


class HealthProbe:
    """Asks for health over channels until it is stopped; a context manager.

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
        while not self._stop.is_set():
            begin = time.monotonic()
            try:
                # HealthCheckResponse.status = SERVING.
                if check(b"", timeout=30) != b"\x08\x01":
                    self.errors.append(f"{name}: not serving")
            except grpc.RpcError as error:
                self.errors.append(f"{name}: {error.code()} {error.details()}")
            self.seconds[name].append(time.monotonic() - begin)
            self.threads = max(self.threads, thread_count(self._pid))
            self._stop.wait(0.02)

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
        begin = time.monotonic()
        with HealthProbe(self.channels, pid) as probe:
            done = subprocess.run(
                [sys.executable, ATTACKS_PY, name, address, "--seconds",
                 str(ATTACK_S), *flags], check=True, capture_output=True,
                timeout=ATTACK_S + 60).stdout
            # Health is watched for as long with an attack that is over soon.
            time.sleep(max(0, begin + ATTACK_S - time.monotonic()))
            self.wait_until_quiet(pid)
        cpu = cpu_seconds(pid) - cpu_before
        print(f"{name}: {done.decode()}, server {cpu:.2f} s CPU, "
              f"{probe.threads} threads, health p99 "
              + ", ".join(f"{1000 * probe.p99(way):.1f} ms {way}"
                          for way in self.channels))
        self.assertEqual(probe.errors, [])
        self.assertLess(cpu, MAX_CPU_S)
        self.assertLessEqual(probe.threads, MAX_THREADS)
        for way in self.channels:
            self.assertLess(probe.p99(way), MAX_HEALTH_P99_S, way)
        return json.loads(done)

    def wait_until_quiet(self, pid):
        """Until the server does no more than answer the probes."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            before = cpu_seconds(pid)
            time.sleep(0.2)
            if cpu_seconds(pid) - before < 0.1:
                return


class NginxTest(Attacked, unittest.TestCase):
    """Through nginx."""

    @classmethod
    def setUpClass(cls):
        cls.server = live_server.LiveServer(
            options.quantd, flags=["--drain-delay", "0"])
        cls.addClassCleanup(cls.server.stop)
        cls.nginx = fleet.Nginx([cls.server.address])
        cls.addClassCleanup(cls.nginx.__exit__)
        with open(cls.nginx.certificate, "rb") as file:
            cls.credentials = grpc.ssl_channel_credentials(file.read())
        cls.channels = {
            "through nginx": grpc.secure_channel(cls.nginx.address,
                                                 cls.credentials),
            "directly": grpc.insecure_channel(cls.server.address)}
        for channel in cls.channels.values():
            cls.addClassCleanup(channel.close)
            grpc.channel_ready_future(channel).result(timeout=30)

    def expect_serving(self):
        array = np.linspace(-3, 3, 4096, dtype=np.float32)
        codes = []
        for client in (quantd.Client(self.nginx.address,
                                     credentials=self.credentials, timeout=30),
                       quantd.Client(self.server.address, timeout=30)):
            with client:
                codes.append(client.quantize(array, "int8").codes)
        np.testing.assert_array_equal(codes[0], codes[1])

    def through_nginx(self, name):
        done = self.attack(name, self.nginx.address, "--tls")
        self.expect_serving()
        return done

    def test_AnUnfinishedHeaderIsRefusedSoon(self):
        done = self.through_nginx("unfinished_header")
        self.assertEqual(done["done"], 0)
        self.assertGreater(done["refused"], 0)

    def test_AHeaderWithoutEndIsRefused(self):
        done = self.through_nginx("continuation_flood")
        self.assertGreater(done["done"], 1000)
        self.assertGreater(done["refused"], 0)

    def test_CallsThatAreResetAtOnceReachTheServerByThousandsNotMore(self):
        before = self.started()
        done = self.through_nginx("rapid_resets")
        if FULL:
            self.assertGreaterEqual(done["done"], 20000)
        self.assertGreater(done["done"], 1000)
        self.assertLess(self.started() - before, 500 + 1000 * 2 * ATTACK_S)

    def started(self):
        return self.server.metric("grpc_server_started_total",
                                  grpc_method="Quantize")

    def test_SettingsWithoutEndAreRefused(self):
        done = self.through_nginx("settings_flood")
        self.assertGreater(done["done"], 1000)
        self.assertGreater(done["refused"], 0)

    def test_PingsWithoutEndAreRefused(self):
        done = self.through_nginx("ping_flood")
        self.assertGreater(done["done"], 1000)
        self.assertGreater(done["refused"], 0)

    def test_CompressedMessagesDoNotReachTheServer(self):
        check = self.channels["through nginx"].unary_unary(
            "/grpc.health.v1.Health/Check")
        for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            with self.assertRaises(grpc.RpcError) as caught:
                check(bytes(1 << 20), timeout=30, compression=compression)
            self.assertEqual(caught.exception.code(),
                             grpc.StatusCode.UNIMPLEMENTED)
            self.assertEqual(caught.exception.details(),
                             "compressed messages are not taken")
        self.assertEqual(check(b"", timeout=30), b"\x08\x01")

    def test_SlowConnectionsKeepNobodyOut(self):
        done = self.through_nginx("slowloris")
        self.assertGreater(done["connections"], 100)

    def test_AnswersThatNobodyTakesKeepNobodyOut(self):
        done = self.through_nginx("zero_window")
        self.assertGreater(done["done"], 300)


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
            grpc.channel_ready_future(channel).result(timeout=30)

    def test_NobodyGetsPastTheHandshake(self):
        for name in attacks.ATTACKS:
            with self.subTest(name):
                before = self.server.metric("grpc_server_started_total")
                done = self.attack(name, self.address, "--tls", "--connections",
                                   str(self.CONNECTIONS))
                self.assertGreater(done["refused"], 0)
                self.assertEqual(
                    self.server.metric("grpc_server_started_total"), before)
        with quantd.Client(self.address, credentials=self.credentials,
                           timeout=30) as client:
            client.quantize(np.ones(1000, np.float32), "int8")


if __name__ == "__main__":
    if not shutil.which("nginx", path="/usr/sbin:/usr/bin"):
        print("skipped: nginx is not installed")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
