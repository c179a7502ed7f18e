#!/usr/bin/python3
"""How fast the Python client quantizes a large array, beside the C++ client on
the same server and a server in Python.

  throughput_bench.py --build DIR [--seconds N]

DIR is where quantd, quantctl and tests/bench were built. All sides take turns
on one quantd, TCP on loopback, float32 to int8 with one scale that is given:

  Python client      quantd.Client.quantize of 256 MiB into an array
  fresh output       the same without an array for the output
  C++ client         quantctl bench on tensors of 256 MiB
  Python server      grpcio and torch (tests/bench/peers/python_server.py),
                     driven by tests/bench/peers/plain_client: of C++, and so
                     to the server's favour

Goals: 0.6 of the C++ client, 3 times the server in Python. Prints medians, and
medians of the ratios of each round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import package
# pylint: disable=wrong-import-order
import numpy as np

import live_server
import quantd

SIZE_BYTES = 256 << 20
PEERS = os.path.join(package.ROOT, "tests/bench/peers")


def rate_of(command):
    return json.loads(subprocess.run(
        command, stdout=subprocess.PIPE, check=True).stdout)[
            "gigabytes_per_second"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--seconds", type=float, default=40)
    options = parser.parse_args()
    x = np.random.default_rng(0).standard_normal(SIZE_BYTES // 4, np.float32)
    out = np.zeros(x.shape, np.int8)
    encoding = quantd.Encoding("int8", [0.05])

    with live_server.LiveServer(
            os.path.join(options.build, "server/quantd")) as server, (
                subprocess.Popen(
                    [sys.executable, os.path.join(PEERS, "python_server.py")],
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    text=True, preexec_fn=live_server.die_with_parent)
            ) as python, quantd.Client(server.address) as client:
        port = python.stdout.readline().strip()

        def quantize(**kwargs):
            start = time.perf_counter()
            client.quantize(x, encoding, **kwargs)
            return SIZE_BYTES / (time.perf_counter() - start) / 1e9

        sides = {
            "Python client": lambda: quantize(out=out),
            "fresh output": quantize,
            "C++ client": lambda: rate_of(
                [os.path.join(options.build, "client/cli/quantctl"),
                 "--server", server.address, "--json", "bench", "--op",
                 "quantize", "--tensor-bytes", str(SIZE_BYTES), "--warmup",
                 "0.2", "--duration", "0.6"]),
            "Python server": lambda: rate_of(
                [os.path.join(options.build, "tests/bench/peers/plain_client"),
                 port, "quantize", "0.6"]),
        }
        rates = {name: [] for name in sides}
        quantize(out=out)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            for name, measure in sides.items():
                rates[name].append(measure())
        python.terminate()
    for name, values in rates.items():
        print(f"{name:14s} {statistics.median(values):6.3f} GB/s", end="")
        for other in ("C++ client", "Python server"):
            ratio = statistics.median(
                a / b for a, b in zip(values, rates[other]))
            print(f"   {ratio:5.2f} of {other}", end="")
        print()


if __name__ == "__main__":
    main()
