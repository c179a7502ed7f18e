#!/usr/bin/python3
"""How long it takes to read the statistics of a tensor that many sources have
contributed to, and what that costs another caller.

  statistics_read_bench.py --quantd BINARY [--other BINARY] [--sources N]
      [--channels N] [--readers N] [--seconds N]

Contributes one batch per source with a histogram per channel, and reads them:

  first       GetStatistics of a server that has just started
  again       the median of the following ones, which nothing has changed
  other       GetEncoding of another caller while nobody reads statistics, and
              while --readers processes read them: the median and the 99th
              percentile
  reads       GetStatistics of these readers, per second

With --other a second binary reads the same store, for a comparison.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../.."))
sys.path.insert(0, os.path.join(ROOT, "tests/client/python"))

# pylint: disable=wrong-import-position
import package  # pylint: disable=unused-import
import live_server
import numpy as np
import quantd

NAME = quantd.TensorName("bench", "layer.input")
STORED = quantd.TensorName("bench", "layer.weight")


def contribute(client, sources, channels):
    random = np.random.default_rng(1)
    for source in range(sources):
        batch = random.standard_normal((256, channels), dtype=np.float32)
        client.calibrate(batch, NAME, contribution=quantd.Contribution(
            f"rank-{source}", 1, granularity=[0, 1], force_statistics=True))
    client.put_encoding(STORED, quantd.Encoding("int8", [0.5]))


def timed(call):
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def latencies(call, seconds):
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        times.append(timed(call))
        time.sleep(0.002)
    return np.percentile(times, [50, 99])


def read_for_ever(address):
    """What a reader process does."""
    client = quantd.Client(address, timeout=600)
    print("ready", flush=True)
    while True:
        client.get_statistics(NAME)
        print("read", flush=True)


def measure(binary, folder, arguments):
    socket = os.path.join(folder, "socket")
    with live_server.LiveServer(
            binary, folder=folder,
            listen=f"127.0.0.1:0,unix:{socket}") as server:
        address = server.addresses[0]
        client = quantd.Client(address, timeout=600)
        # A caller of its own: callers are told apart by their addresses.
        other = quantd.Client(f"unix:{socket}", timeout=600)
        first = timed(lambda: client.get_statistics(NAME))
        again = np.median([timed(lambda: client.get_statistics(NAME))
                           for _ in range(7)])
        get = lambda: other.get_encoding(STORED)
        alone = latencies(get, arguments.seconds)
        readers = [subprocess.Popen(
            live_server.with_parent(sys.executable, os.path.realpath(__file__),
                                    "--read", address),
            stdout=subprocess.PIPE)
            for _ in range(arguments.readers)]
        try:
            for reader in readers:
                reader.stdout.readline()
            for reader in readers:
                os.set_blocking(reader.stdout.fileno(), False)
            beside = latencies(get, arguments.seconds)
            reads = sum((reader.stdout.read() or b"").count(b"read\n")
                        for reader in readers)
        finally:
            for reader in readers:
                reader.kill()
                reader.wait()
        print(f"{first:9.1f} {again:9.1f} {alone[0]:9.2f} {alone[1]:9.2f} "
              f"{beside[0]:9.2f} {beside[1]:9.2f} "
              f"{reads / arguments.seconds:9.1f}  {binary}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantd")
    parser.add_argument("--other")
    parser.add_argument("--sources", type=int, default=60)
    parser.add_argument("--channels", type=int, default=1024)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read_for_ever(arguments.read)
    with tempfile.TemporaryDirectory() as folder:
        with live_server.LiveServer(arguments.quantd, folder=folder) as server:
            contribute(quantd.Client(server.address, timeout=600),
                       arguments.sources, arguments.channels)
        print("milliseconds                  other alone         beside readers"
              "     reads\n    first     again       p50       p99       p50"
              "       p99     per s")
        for binary in (arguments.quantd, arguments.other):
            if binary:
                measure(binary, folder, arguments)


if __name__ == "__main__":
    main()
