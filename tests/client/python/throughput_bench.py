#!/usr/bin/python3
"""How fast the Python client quantizes a large array, beside the C++ client on
the same server and a server in Python.

  throughput_bench.py --build DIR [--seconds N]

DIR is where quantd, quantctl and tests/bench were built. All sides take turns
on one quantd, TCP on loopback, float32 to int8 with one scale that is given:

  Python client      quantd.Client.quantize of 256 MiB into an array
  fresh output       the same without an array for the output
  C++ client         quantctl bench on tensors of 256 MiB
  all in Python      a server of grpcio and torch
                     (tests/bench/peers/python_server.py), and a client of
                     grpcio and numpy as most people would write it, on the same
                     array
  Python server      the same server driven by tests/bench/peers/plain_client:
                     of C++, and so to its favour

Goals: 0.6 of the C++ client, 3 times what is all in Python. Prints medians, and
medians of the ratios of each round.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time

import package
# pylint: disable=wrong-import-order
import grpc
import numpy as np

import live_server
import quantd
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import quantization_service_pb2_grpc as qs_grpc
from quantd.v1 import tensor_pb2

CHUNK_BYTES = 1 << 20
SIZE_BYTES = 256 << 20
PEERS = os.path.join(package.ROOT, "tests/bench/peers")


def rate_of(command):
    return json.loads(subprocess.run(
        command, stdout=subprocess.PIPE, check=True).stdout)[
            "gigabytes_per_second"]


def plainly(stub, x, encoding):
    """Quantizes as the README of gRPC teaches it."""
    def messages():
        data = x.tobytes()
        header = qs.QuantizeHeader(
            tensor=tensor_pb2.TensorDescription(
                element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32, shape=x.shape),
            encoding=encoding)
        for offset in range(0, len(data), CHUNK_BYTES):
            yield qs.QuantizeRequest(
                header=header if offset == 0 else None, offset=offset,
                data=data[offset:offset + CHUNK_BYTES])

    codes = b"".join(answer.data for answer in stub.Quantize(messages()))
    assert len(codes) == x.size
    return np.frombuffer(codes, np.int8)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--seconds", type=float, default=40)
    options = parser.parse_args()
    x = np.random.default_rng(0).standard_normal(SIZE_BYTES // 4, np.float32)
    out = np.zeros(x.shape, np.int8)
    encoding = quantd.Encoding("int8", [0.05], qmin=-128, qmax=127)

    with live_server.LiveServer(
            os.path.join(options.build, "server/quantd")) as server, (
                subprocess.Popen(
                    live_server.with_parent(
                        sys.executable,
                        os.path.join(PEERS, "python_server.py")),
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    text=True)
            ) as python, quantd.Client(server.address) as client:
        port = python.stdout.readline().strip()

        plain = qs_grpc.QuantizationServiceStub(
            grpc.insecure_channel(f"127.0.0.1:{port}"))

        def all_in_python():
            start = time.perf_counter()
            plainly(plain, x, encoding.to_proto())
            return SIZE_BYTES / (time.perf_counter() - start) / 1e9

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
            "all in Python": all_in_python,
            "Python server": lambda: rate_of(
                [os.path.join(options.build, "tests/bench/peers/plain_client"),
                 port, "quantize", "0.6"]),
        }
        rates = {name: [] for name in sides}
        quantize(out=out)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            # What ran before has its effect, so nobody is always the same's
            # neighbour.
            for name, measure in random.sample(list(sides.items()),
                                               len(sides)):
                rates[name].append(measure())
        python.terminate()
    for name, values in rates.items():
        print(f"{name:14s} {statistics.median(values):6.3f} GB/s", end="")
        for other in ("C++ client", "all in Python", "Python server"):
            ratio = statistics.median(
                a / b for a, b in zip(values, rates[other]))
            print(f"   {ratio:5.2f} of {other}", end="")
        print()


if __name__ == "__main__":
    main()
