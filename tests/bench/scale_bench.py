#!/usr/bin/python3
"""Throughput, latency and memory against the number of things.

  scale_bench.py --build DIR [--quick] --json FILE

Streams from 1 to 256; tensors of one model from 1 to 100,000; cached encodings
from 1 to 1,000,000 under a cap that holds them. Series are what the report
draws; rows are the figures that have goals. Encodings are put into the stores
straight, before a server opens them; how many a server takes in a second is
measured beside it.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.join(HERE, "../e2e/python"))
# pylint: disable=wrong-import-position
import live_server

CACHE_BYTES = "4GiB"
LATENCY_GOAL = 2.0
MEMORY_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
# Of one model, far above what any has.
ONE_MODEL = 1 << 40


def memory_of(pid, key="VmRSS"):
    """In bytes."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) << 10
    return 0


def forget_peak(pid):
    with open(f"/proc/{pid}/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def run(command):
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(result.stdout)


class Bench:
    """The programs of a build."""

    def __init__(self, build):
        self.quantd = os.path.join(build, "server/quantd")
        self._quantctl = os.path.join(build, "client/cli/quantctl")
        self._scale = os.path.join(build, "tests/bench/scale_bench")

    def scale(self, command, *arguments, **flags):
        words = [self._scale, command, *map(str, arguments)]
        for name, value in flags.items():
            words += ["--" + name.replace("_", "-"), str(value)]
        return run(words)

    def throughput(self, server, streams, seconds):
        """GB/s of float32 of quantizing on that many streams at once."""
        return run([self._quantctl, "--server", server.address, "--json",
                    "bench", "--op", "quantize", "--streams", str(streams),
                    "--connections", str(min(streams, 4)),
                    "--tensor-bytes", "1MiB", "--chunk-bytes", "256KiB",
                    "--duration", str(seconds), "--warmup", "0.3"])

    def fill(self, folder, first, last, **flags):
        """Adds encodings to the store that a server in `folder` opens.

        In memory, because every put waits for the disk.
        """
        kept = os.path.join(folder, "store.db")
        with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as fast:
            store = os.path.join(fast, "store.db")
            if os.path.exists(kept):
                shutil.copyfile(kept, store)
            self.scale("fill", store=store, first=first, last=last, **flags)
            shutil.copyfile(store, kept)


def log(text):
    print(text, file=sys.stderr, flush=True)


def bench_streams(bench, quick, folder):
    counts = [1, 16] if quick else [1, 2, 4, 8, 16, 32, 64, 128, 256]
    rounds, seconds = (1, 0.4) if quick else (3, 1)
    throughput = {count: [] for count in counts}
    memory = {count: [] for count in counts}
    with live_server.LiveServer(bench.quantd, folder) as server:
        pid = server.process.pid
        for _ in range(rounds):
            for count in counts:
                forget_peak(pid)
                answer = bench.throughput(server, count, seconds)
                throughput[count].append(answer["gigabytes_per_second"])
                memory[count].append(memory_of(pid, "VmHWM"))
                log(f"{count} streams: {throughput[count][-1]:.2f} GB/s, "
                    f"{memory[count][-1] >> 20} MiB")
    best = {c: statistics.median(v) for c, v in throughput.items()}
    peak = {c: max(v) / 2**20 for c, v in memory.items()}
    last = counts[-1]
    rows = [
        {"name": f"Quantize on {last} streams beside 1", "unit": "GB/s",
         "value": best[last], "reference": "1 stream",
         "reference_value": best[1],
         "ratio": statistics.median(
             a / b for a, b in zip(throughput[last], throughput[1])),
         "goal": None},
        {"name": f"server memory, up to {last} streams", "unit": "MiB",
         "value": max(peak.values()), "reference": "a ceiling",
         "reference_value": 256, "ratio": max(peak.values()) / 256,
         "goal": 1.0, "at_most": True},
    ]
    series = [
        {"title": "Quantize, 1 MiB tensors", "x": "streams", "y": "GB/s",
         "lines": [{"name": "throughput", "points": sorted(best.items())}]},
        {"title": "Server memory while quantizing", "x": "streams", "y": "MiB",
         "lines": [{"name": "peak resident", "points": sorted(peak.items())}]},
    ]
    return rows, series


def bench_tensors(bench, quick, folder):
    """One model that grows: contributions to statistics, lists, encodings."""
    counts = [1, 10, 100, 1000]
    if not quick:
        counts += [10_000, 100_000]
    contributed, listed, memory = [], [], []
    for last, first in zip(counts, [0] + counts):
        bench.fill(folder, first, last, per_model=ONE_MODEL)
        with live_server.LiveServer(
                bench.quantd, folder,
                ["--cache-bytes", CACHE_BYTES]) as server:
            # Statistics of every tensor up to 10,000; of as many again beyond.
            begin = max(first, last - 10_000)
            answer = bench.scale("contribute", target=server.address,
                                 first=begin, last=last, per_model=ONE_MODEL)
            contributed.append((last, answer["per_second"]))
            seconds = statistics.median(
                bench.scale("list", target=server.address,
                            per_model=ONE_MODEL)["seconds"]
                for _ in range(3))
            listed.append((last, last / seconds))
            memory.append((last, memory_of(server.process.pid, "VmHWM") / 2**20))
        log(f"{last} tensors: {contributed[-1][1]:.0f} contributions/s, "
            f"{listed[-1][1]:.0f} listed/s, {memory[-1][1]:.0f} MiB")
    at = dict(listed)
    half = counts[-2]
    rows = [
        {"name": f"entries listed a second, {counts[-1]:,} tensors in a model",
         "unit": "1/s", "value": at[counts[-1]],
         "reference": f"{half:,} tensors", "reference_value": at[half],
         "ratio": at[counts[-1]] / at[half], "goal": None},
    ]
    series = [
        {"title": "Durable contributions to one model", "x": "tensors",
         "y": "1/s",
         "lines": [{"name": "contributions", "points": contributed}]},
        {"title": "Entries listed", "x": "tensors in the model", "y": "1/s",
         "lines": [{"name": "entries", "points": listed}]},
        {"title": "Server memory by tensors of a model", "x": "tensors",
         "y": "MiB", "lines": [{"name": "peak resident", "points": memory}]},
    ]
    return rows, series


def bench_encodings(bench, quick, folder):
    """Servers with more and more encodings side by side, all of them cached."""
    counts = [1, 100, 1000, 10_000]
    if not quick:
        counts += [100_000, 1_000_000]
    rounds, calls = (3, 200) if quick else (15, 1000)
    memory, touched, put = [], [], []
    with contextlib.ExitStack() as stack:
        servers = {}
        for count in counts:
            own = os.path.join(folder, str(count))
            os.mkdir(own)
            bench.fill(own, 0, count)
            server = stack.enter_context(live_server.LiveServer(
                bench.quantd, own, ["--cache-bytes", CACHE_BYTES]))
            servers[count] = server
            answer = bench.scale("touch", target=server.address, last=count)
            touched.append((count, answer["per_second"]))
            memory.append((count, memory_of(server.process.pid) / 2**20))
            log(f"{count} encodings: {memory[-1][1]:.0f} MiB, "
                f"{touched[-1][1]:.0f} quantized by reference a second")
        lookups = bench.scale(
            "lookup", *(f"--target={server.address}={count}"
                        for count, server in servers.items()),
            rounds=rounds, calls=calls)
        for count, server in servers.items():
            answer = bench.scale("put", target=server.address, first=count,
                                 last=count + (200 if quick else 2000),
                                 streams=16)
            put.append((count, answer["per_second"]))
    by_count = {entry["count"]: entry for entry in lookups}
    last = counts[-1]
    rows = []
    for what, name in (("get", "GetEncoding"),
                       ("quantize", "Quantize by reference")):
        for share in ("p50", "p99"):
            key = f"{what}_{share}_us"
            few, many = by_count[1000][key], by_count[last][key]
            rows.append({
                "name": f"{name}, {share}, {last:,} encodings", "unit": "us",
                "value": statistics.median(many),
                "reference": "1,000 encodings",
                "reference_value": statistics.median(few),
                "ratio": statistics.median(a / b for a, b in zip(many, few)),
                "goal": LATENCY_GOAL if share == "p99" else None,
                "at_most": True})
    rows.append({
        "name": f"server memory, {last:,} cached encodings", "unit": "B each",
        "value": (memory[-1][1] - memory[0][1]) * 2**20 / last,
        "reference": None, "reference_value": None, "ratio": None,
        "goal": None})
    series = [
        {"title": f"Lookup latency, {share}", "x": "cached encodings",
         "y": "us", "lines": [
             {"name": name, "points": [
                 (entry["count"], statistics.median(entry[f"{what}_{share}_us"]))
                 for entry in lookups]}
             for what, name in (("get", "GetEncoding"),
                                ("quantize", "Quantize by reference"))]}
        for share in ("p50", "p99")]
    series += [
        {"title": "Server memory by cached encodings", "x": "cached encodings",
         "y": "MiB", "lines": [{"name": "resident", "points": memory}]},
        {"title": "Encodings read and cached for the first time",
         "x": "encodings", "y": "1/s",
         "lines": [{"name": "quantized by reference", "points": touched}]},
        {"title": "Durable puts, 16 at a time", "x": "encodings before",
         "y": "1/s", "lines": [{"name": "puts", "points": put}]},
    ]
    return rows, series


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["streams", "tensors", "encodings"])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    bench = Bench(arguments.build)
    rows, series = [], []
    for name, function in (("streams", bench_streams),
                           ("tensors", bench_tensors),
                           ("encodings", bench_encodings)):
        if arguments.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            some_rows, some_series = function(bench, arguments.quick, folder)
        rows += [dict(row, section="Scale") for row in some_rows]
        series += some_series
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows, "series": series}, file, indent=1)
    for row in rows:
        log(f"{row['name']}: {row['value']:.4g} {row['unit']}"
            + (f", {row['ratio']:.2f} of {row['reference']}"
               if row["ratio"] is not None else ""))


if __name__ == "__main__":
    main()
