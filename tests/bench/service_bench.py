#!/usr/bin/env python3
"""quantd's service beside its peers, interleaved in one run.

  service_bench.py --build DIR [--quick] --json FILE

DIR is where quantd, quantctl and tests/bench were built. The sides of a row
take turns; a ratio is the median of the rounds' ratios. Writes a list of

  {"name", "unit", "value", "reference", "ratio", "goal", "at_most"}

where `ratio` is value to reference, and `goal` what it should be at least, or
at most where `at_most` says so; null for none.

The throughput rows are one stream over TCP on loopback with chunks of 1 MiB, in
GB/s of float32; beside quantd's
  TCP      the same traffic over a bare connection (peers/tcp_echo)
  plain    a synchronous server and client with generated messages and quantd's
           kernels (peers/plain_server, peers/plain_client)
  Python   grpcio and torch (peers/python_server.py), driven by plain_client
The rows of shared memory are tensors of 256 MiB in memory shared with the
server, beside the same over TCP and beside the kernel in one process
(kernels_bench), on as many threads as there are processors.
The rows of TLS are 1, 2 and 4 streams, each on its own connection, beside the same
in plaintext: a connection encrypts on one thread at a time.
Small tensors are 1 KiB on an open stream, beside a gRPC stream that echoes
messages of that size (peers/grpc_echo).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.join(HERE, "../e2e/python"))
# pylint: disable=wrong-import-position
from live_server import with_parent

START_TIMEOUT_S = 60
CHUNK_BYTES = 1 << 20
SMALL_BYTES = 1 << 10
SERVER_MEMORY_GOAL_MIB = 256
LARGE_BYTES = 256 << 20
BULK_GOAL_PER_SECOND = 50000
# Bytes up and down of one message of float32 in chunks.
SHAPES = {
    "quantize": (CHUNK_BYTES, CHUNK_BYTES // 4),
    "dequantize": (CHUNK_BYTES, CHUNK_BYTES * 4),
    # A connection without any answer could not tell what has arrived.
    "calibrate": (CHUNK_BYTES, 1),
}


class Server:
    """A process that serves until the context ends."""

    def __init__(self, command):
        self.process = subprocess.Popen(
            with_parent(*command), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()

    def peak_mib(self):
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
        raise RuntimeError("no VmHWM")


class PeerServer(Server):
    """One that prints its port."""

    def __init__(self, command):
        super().__init__(command)
        line = self.process.stdout.readline()
        if not line.strip():
            raise RuntimeError(f"{command[0]} did not start")
        self.port = line.strip()


class Quantd(Server):
    """quantd on a free port, or at another address, with a store of its
    own."""

    def __init__(self, build, folder, listen="127.0.0.1:0", flags=()):
        ready = os.path.join(folder, "ready.json")
        super().__init__([
            os.path.join(build, "server/quantd"), "--listen", listen,
            "--metrics-listen", "off", "--store",
            "sqlite:" + os.path.join(folder, "store.db"), "--ready-file", ready,
            *flags
        ])
        deadline = time.monotonic() + START_TIMEOUT_S
        while not os.path.exists(ready):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("quantd did not start")
            time.sleep(0.01)
        with open(ready, encoding="utf-8") as file:
            self.address = json.load(file)["grpc"][0]


def run_json(command):
    result = subprocess.run(command, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, check=True)
    return json.loads(result.stdout)


def interleave(sides, rounds):
    """{name: [measurement per round]} of {name: function}."""
    results = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure in sides.items():
            results[name].append(measure())
    return results


def row(name, unit, values, references, goal, at_most=False):
    ratios = [value / reference for value, reference in zip(values, references)]
    return {
        "name": name,
        "unit": unit,
        "value": statistics.median(values),
        "reference": statistics.median(references),
        "ratio": statistics.median(ratios),
        "goal": goal,
        "at_most": at_most,
    }


def print_row(item):
    goal = "" if item["goal"] is None else (
        f"{'at most' if item['at_most'] else 'at least'} {item['goal']:g}")
    print(f"{item['name']:38s} {item['value']:11.3f} {item['unit']:10s}"
          f"{item['reference']:11.3f}  x{item['ratio']:.3f}  {goal}")


class Bench:
    """The rows, one method for each kind."""

    def __init__(self, build, quick):
        self.build = build
        self.rounds = 3 if quick else 7
        self.seconds = 0.25 if quick else 1.0
        self.rows = []

    def peer(self, name):
        return os.path.join(self.build, "tests/bench/peers", name)

    def drive_quantd(self, server, operation, *arguments):
        return run_json([
            os.path.join(self.build, "client/cli/quantctl"), "--server",
            server.address, "--json", "bench", "--op", operation, "--warmup",
            "0.2", "--duration", str(self.seconds), *map(str, arguments)
        ])

    def throughput(self, quantd, operation, plain, python):
        """One operation beside all three peers."""
        up, down = map(str, SHAPES[operation])
        seconds = str(self.seconds)

        def drive_plain(server):
            return run_json([self.peer("plain_client"), server.port, operation,
                             seconds])

        with PeerServer([self.peer("tcp_echo"), "serve", up, down]) as tcp:
            results = interleave({
                "quantd": lambda: self.drive_quantd(quantd, operation,
                                                    "--in-flight", 2),
                "TCP": lambda: run_json([self.peer("tcp_echo"), "drive",
                                         tcp.port, up, down, seconds]),
                "plain": lambda: drive_plain(plain),
                "Python": lambda: drive_plain(python),
            }, self.rounds)
        rates = {side: [item["gigabytes_per_second"] for item in items]
                 for side, items in results.items()}
        for side, goal in (("TCP", 0.65), ("plain", 1.3), ("Python", 5.0)):
            self.rows.append(row(f"{operation} / {side}", "GB/s",
                                 rates["quantd"], rates[side], goal))

    def evaluate(self, quantd):
        def drive_evaluate(metrics):
            return self.drive_quantd(quantd, "evaluate", "--in-flight", 2,
                                     "--candidates", 4, "--metrics", metrics)

        results = interleave({
            "all": lambda: drive_evaluate("all"),
            "sweep": lambda: drive_evaluate("sweep"),
            "calibrate": lambda: self.drive_quantd(quantd, "calibrate",
                                                   "--in-flight", 2),
        }, self.rounds)
        rates = {side: [item["gigabytes_per_second"] for item in items]
                 for side, items in results.items()}
        for metrics, goal in (("sweep", 0.5), ("all", None)):
            self.rows.append(row(
                f"evaluate, 4 candidates, {metrics} / calibrate", "GB/s",
                rates[metrics], rates["calibrate"], goal))

    def small(self, quantd):
        """Ping-pong and bulk of small tensors."""
        seconds = str(self.seconds)
        with PeerServer([self.peer("grpc_echo"), "serve",
                         str(SMALL_BYTES // 4)]) as echo:

            def drive_echo(in_flight):
                return run_json([self.peer("grpc_echo"), "drive", echo.port,
                                 str(SMALL_BYTES), str(in_flight), seconds])

            def drive_small(in_flight):
                return self.drive_quantd(quantd, "quantize", "--tensor-bytes",
                                         SMALL_BYTES, "--in-flight", in_flight)

            results = interleave({
                "quantd": lambda: drive_small(1),
                "echo": lambda: drive_echo(1),
                "quantd bulk": lambda: drive_small(1000),
                "echo bulk": lambda: drive_echo(1000),
            }, self.rounds)
        for share in ("p50", "p99"):
            self.rows.append(row(
                f"1 KiB ping-pong, {share} / gRPC echo", "us",
                [item[f"latency_{share}_ms"] * 1e3
                 for item in results["quantd"]],
                [item[f"{share}_us"] for item in results["echo"]], 1.25,
                at_most=True))
        rates = [item["tensors_per_second"] for item in results["quantd bulk"]]
        self.rows.append(row("1 KiB in bulk / goal", "tensors/s", rates,
                             [BULK_GOAL_PER_SECOND] * len(rates), 1.0))
        self.rows.append(row(
            "1 KiB in bulk / gRPC echo", "tensors/s", rates,
            [item["tensors_per_second"] for item in results["echo bulk"]],
            None))

    def shared_memory(self, quantd):
        """A large tensor by name, beside TCP and the kernel alone."""
        threads = os.cpu_count()

        def drive_kernel():
            result = run_json([
                os.path.join(self.build, "tests/bench/kernels_bench"),
                "--large", f"--benchmark_min_time={self.seconds / 2}",
                "--benchmark_format=json", "--benchmark_filter="
                f"^quantize/float32_int8_tensor/{LARGE_BYTES}/{threads}"])
            return {"gigabytes_per_second":
                    result["benchmarks"][0]["bytes_per_second"] / 1e9}

        with tempfile.TemporaryDirectory() as folder, Quantd(
                self.build, folder, "unix:" + os.path.join(folder, "socket"),
                ["--shared-memory"]) as shared:
            large = ("--tensor-bytes", LARGE_BYTES)
            results = interleave({
                "shared": lambda: self.drive_quantd(
                    shared, "quantize", "--shared-memory", *large),
                "TCP": lambda: self.drive_quantd(quantd, "quantize", *large),
                "kernel": drive_kernel,
            }, self.rounds)
        rates = {side: [item["gigabytes_per_second"] for item in items]
                 for side, items in results.items()}
        for side, goal in (("TCP", 5.0), ("kernel", 0.6)):
            self.rows.append(row(f"shared memory, 256 MiB / {side}", "GB/s",
                                 rates["shared"], rates[side], goal))

    def tls(self, quantd):
        """Encrypted streams beside the same in plaintext."""
        with tempfile.TemporaryDirectory() as folder:
            certificate = os.path.join(folder, "server.pem")
            key = os.path.join(folder, "server.key")
            subprocess.run(
                ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes",
                 "-subj", "/CN=localhost", "-addext",
                 "subjectAltName=IP:127.0.0.1", "-days", "1", "-keyout", key,
                 "-out", certificate], check=True, stderr=subprocess.DEVNULL)
            with Quantd(self.build, folder, flags=[
                    "--tls-certificate", certificate, "--tls-key",
                    key]) as encrypted:
                for count in (1, 2, 4):
                    streams = ("--in-flight", 2, "--streams", count,
                               "--connections", count)
                    results = interleave({
                        "TLS": lambda streams=streams: self.drive_quantd(
                            encrypted, "quantize", "--tls-ca", certificate,
                            *streams),
                        "plaintext": lambda streams=streams: self.drive_quantd(
                            quantd, "quantize", *streams),
                    }, self.rounds)
                    rates = {side: [item["gigabytes_per_second"]
                                    for item in items]
                             for side, items in results.items()}
                    self.rows.append(row(
                        f"TLS, {count} connections / plaintext", "GB/s",
                        rates["TLS"], rates["plaintext"], None))

    def many_streams(self, quantd):
        """Many streams, for what they take of the server's memory."""
        self.drive_quantd(quantd, "quantize", "--streams", 64, "--connections",
                          4)
        self.rows.append(row("server memory, peak / goal", "MiB",
                             [quantd.peak_mib()], [SERVER_MEMORY_GOAL_MIB], 1.0,
                             at_most=True))

    def run(self):
        with tempfile.TemporaryDirectory() as folder, \
                Quantd(self.build, folder) as quantd:
            with PeerServer([self.peer("plain_server")]) as plain, \
                    PeerServer(["/usr/bin/python3", os.path.join(
                        HERE, "peers/python_server.py")]) as python:
                for operation in SHAPES:
                    self.throughput(quantd, operation, plain, python)
            self.evaluate(quantd)
            self.tls(quantd)
            self.small(quantd)
            self.many_streams(quantd)
            self.shared_memory(quantd)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true",
                        help="rounds of a fraction of a second, and few")
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    bench = Bench(arguments.build, arguments.quick)
    bench.run()
    with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump(bench.rows, file, indent=1)
        file.write("\n")
    for item in bench.rows:
        print_row(item)


if __name__ == "__main__":
    sys.exit(main())
