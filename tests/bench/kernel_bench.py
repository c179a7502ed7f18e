#!/usr/bin/python3
"""The kernels beside their limits and their peers, interleaved.

  kernel_bench.py --build DIR --node-modules DIR [--quick] [--only TEXT]
                  [--json FILE]

Each cell of the table, an operation at a size on a number of threads, is
measured in rounds; in a round every side works for some milliseconds, one after
another, the first one changing. A ratio is the median over the rounds of
quantd's throughput over the reference's in the same round, so that a machine
that slows down for a second slows both. With one thread all sides are on the
same processor. Sides are processes that measure when they are told to
(kernel_sides.cc, peers/python_kernels.py, peers/onnxruntime_kernels.mjs).
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.realpath(__file__))
SIZES = {"64K": 64 << 10, "4M": 4 << 20, "256M": 256 << 20}
FROM_4M = ("4M", "256M")
NAMES = {
    "xnnpack": "XNNPACK", "onednn": "oneDNN", "onnxruntime": "ONNX Runtime",
    "torch": "torch", "numpy": "numpy", "read_and_sum": "read and sum",
    "read_ahead_and_sum": "read and sum, prefetching",
    "four_in_one_out": "4 bytes in, 1 out", "one_in_four_out":
    "1 byte in, 4 out", "memcpy": "memcpy", "quantd@avx2": "quantd at AVX-512",
}


@dataclasses.dataclass
class Row:
    """An operation, who else has it, and what is to be reached."""
    name: str
    operation: str
    format: str = "int8"
    block_size: tuple = ()
    type: str = "float32"
    data: str = "normal"
    # N(0, 1) over this one leaves 1 in 600 elements outside of int8.
    scale: float = 0.0247
    zero_point: int = 3
    mantissa_bits: int = 0
    # {side: ratio} or {side: {size: ratio, (size, threads): ratio}}; None
    # where there is no goal.
    references: dict = dataclasses.field(default_factory=dict)
    # GB/s on any machine, for {size}.
    floor: float = 0
    sizes: tuple = ("64K", "4M", "256M")
    # The AVX2 target beside the best.
    avx2: bool = True

    def goal(self, side, size, threads):
        goals = self.references[side]
        if not isinstance(goals, dict):
            return goals
        return goals.get((size, threads), goals.get(size))


def of_limit(g64k, g4m, g256m, g256m_t2=None):
    """Goals as parts of a limit loop. On two threads 64 KiB have none: what
    handing work over costs is no part of the limit."""
    goals = {"64K": g64k, ("64K", 2): None, "4M": g4m, "256M": g256m}
    if g256m_t2 is not None:
        goals[("256M", 2)] = g256m_t2
    return goals


ROWS = [
    Row("float32 to int8 per tensor", "quantize", references={
        "four_in_one_out": None,
        "xnnpack": {"64K": 0.75, "4M": 0.95, "256M": 1.0},
        "onnxruntime": {"64K": 3.0}}),
    Row("float32 to int8 per tensor, nothing clipped", "quantize",
        scale=0.05, references={"four_in_one_out": None, "xnnpack": None}),
    Row("int8 to float32 per tensor", "dequantize", references={
        "one_in_four_out": None,
        "xnnpack": {"64K": 1.0, "4M": 1.0, "256M": 1.05},
        "onnxruntime": None}),
    Row("min and max", "min_max", references={
        "read_and_sum": of_limit(0.70, 0.9, 0.9),
        "read_ahead_and_sum": None, "torch": None}, floor=4),
    Row("min and max, all equal", "min_max", data="equal", floor=4, avx2=False,
        references={"read_and_sum": None}),
    Row("min and max, ReLU", "min_max", data="relu", floor=4, avx2=False,
        references={"read_and_sum": None}),
    Row("histogram of 2,048 bins", "statistics", mantissa_bits=2, floor=3,
        references={"read_and_sum": None, "torch": 8.0, "numpy": 15.0}),
    Row("histogram of 2,048 bins, all equal", "statistics", mantissa_bits=2,
        data="equal", floor=3, avx2=False, references={"read_and_sum": None}),
    Row("histogram of 2,048 bins, ReLU", "statistics", mantissa_bits=2,
        data="relu", floor=3, avx2=False, references={"read_and_sum": None}),
    Row("int8 per channel, first axis", "quantize", block_size=(1, 0),
        references={"read_and_sum": of_limit(0.32, 0.72, 0.70, 0.76),
                    "onnxruntime": None, "torch": None}),
    Row("int8 per channel, last axis", "quantize", block_size=(0, 1),
        references={"four_in_one_out": None, "onednn": 1.4,
                    "onnxruntime": None}),
    Row("int8 per channel, last axis, symmetric", "quantize",
        block_size=(0, 1), zero_point=0, references={
            "four_in_one_out": None, "onednn": None}),
    Row("int4 groups of 32, scales found", "quantize_spec", "int4", (1, 32),
        zero_point=0,
        references={"read_and_sum": of_limit(12.0 / 107.8, 11.7 / 26.8,
                                             8.5 / 12.2, 16.6 / 23.8),
                    "numpy": None}),
    Row("int4 groups of 128, scales found", "quantize_spec", "int4", (1, 128),
        zero_point=0,
        references={"read_and_sum": of_limit(12.4 / 107.8, 12.2 / 26.8,
                                             7.65 / 12.2, 14.7 / 23.8),
                    "numpy": None}),
    Row("int4 groups of 128, scales given", "quantize", "int4", (1, 128),
        scale=0.4, zero_point=0,
        references={"read_and_sum": None, "onnxruntime": 2.0}),
    Row("bfloat16 to int8 per tensor", "quantize", type="bfloat16",
        references={"read_and_sum": None, "onednn": 1.6}),
    Row("float16 to int8 per tensor", "quantize", type="float16",
        references={"read_and_sum": None, "onnxruntime": 15.0}),
    Row("float32 to float8 E4M3", "quantize", "float8_e4m3fn",
        scale=0.0107, zero_point=0,
        references={"four_in_one_out": None, "onnxruntime": 20.0}),
    Row("evaluate int8 per tensor", "evaluate",
        references={"read_and_sum": of_limit(None, 0.85, 0.85),
                    "read_ahead_and_sum": None,
                    "onnxruntime": 5.0, "torch": None}),
    Row("statistics, m = 7", "statistics", mantissa_bits=7, floor=1.2,
        sizes=FROM_4M, references={"read_and_sum": None, "torch": 3.0}),
    Row("statistics, m = 7, all equal", "statistics", mantissa_bits=7,
        data="equal", floor=1.2, sizes=FROM_4M, avx2=False,
        references={"read_and_sum": None, "torch": 3.0}),
    Row("statistics, m = 7, ReLU", "statistics", mantissa_bits=7, data="relu",
        floor=1.2, sizes=FROM_4M, avx2=False,
        references={"read_and_sum": None, "torch": 3.0}),
]
# Limits beside nothing, once a size.
LIMITS = ("read_and_sum", "read_ahead_and_sum", "memcpy", "four_in_one_out", "one_in_four_out")


class Side:
    """A process that measures sides on request; starts when first asked."""

    def __init__(self, command, threads):
        self._command = command + ["--threads", str(threads)]
        self._threads = threads
        self._process = None

    def measure(self, side, cell, seconds):
        """GB/s, or None where the side does not have the operation."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, preexec_fn=self._pin)
        request = dict(cell, side=side, seconds=seconds)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._command} ended at {request}")
        return json.loads(answer).get("gb_per_s")

    def _pin(self):
        if self._threads == 1:
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    def stop(self):
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()


class Sides:
    """All processes for a number of threads; a context manager."""

    def __init__(self, arguments, threads):
        binary = os.path.join(arguments.build, "tests/bench/kernel_sides")
        self.threads = threads
        self._native = Side([binary], threads)
        self._python = Side(
            ["/usr/bin/python3", os.path.join(HERE, "peers/python_kernels.py")],
            threads)
        self._node = Side(
            ["node", "--max-old-space-size=4096",
             os.path.join(HERE, "peers/onnxruntime_kernels.mjs"),
             arguments.node_modules], threads) if arguments.node_modules \
            else None

    def measure(self, side, cell, seconds):
        if side == "onnxruntime":
            if self._node is None:
                return None
            return self._node.measure(side, cell, seconds)
        if side in ("torch", "numpy"):
            return self._python.measure(side, cell, seconds)
        # Threads of a peer's pool may still be waiting for work, busily.
        if self.threads > 1:
            time.sleep(0.003)
        return self._native.measure(side, cell, seconds)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        for side in (self._native, self._python, self._node):
            if side is not None:
                side.stop()


def measure_cell(sides, names, cell, rounds, seconds):
    """{side: [GB/s of each round]} of the sides that have the operation."""
    names = [name for name in names
             if sides.measure(name, cell, 0) is not None]
    values = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            values[name].append(sides.measure(name, cell, seconds))
    return values


def cell_of(row, size):
    return {"operation": row.operation, "type": row.type,
            "format": row.format, "block_size": list(row.block_size),
            "data": row.data, "scale": row.scale,
            "zero_point": row.zero_point, "mantissa_bits": row.mantissa_bits,
            "bytes": SIZES[size]}


def median_ratio(values, side, reference):
    return statistics.median(
        a / b for a, b in zip(values[side], values[reference]))


def rows_of(row, size, threads, values):
    """What the report shows of a measured cell."""
    value = statistics.median(values["quantd"])
    base = {"section": "Kernels", "row": row.name, "size": size,
            "threads": threads, "unit": "GB/s",
            "name": f"{row.name}, {size}, {threads} "
                    + ("thread" if threads == 1 else "threads")}
    result = []
    for side in row.references:
        if side not in values:
            result.append(dict(base, value=value, reference=NAMES[side],
                               reference_value=None, ratio=None, goal=None))
            continue
        result.append(dict(
            base, value=value, reference=NAMES[side],
            reference_value=statistics.median(values[side]),
            ratio=median_ratio(values, "quantd", side),
            goal=row.goal(side, size, threads)))
    if row.floor:
        result.append(dict(base, value=value, reference="a floor",
                           reference_value=row.floor, ratio=value / row.floor,
                           goal=1.0))
    if "quantd@avx2" in values:
        avx2 = statistics.median(values["quantd@avx2"])
        result.append(dict(
            base, name=base["name"] + ", AVX2", row=row.name + ", AVX2",
            value=avx2, reference=NAMES["quantd@avx2"], reference_value=value,
            ratio=median_ratio(values, "quantd@avx2", "quantd"),
            goal=0.8 if size in FROM_4M else None))
    return result


def limit_rows(sides, size, rounds, seconds):
    cell = cell_of(Row("", "quantize"), size)
    values = measure_cell(sides, LIMITS, cell, rounds, seconds)
    threads = sides.threads
    return [{"section": "Limits", "row": NAMES[name], "size": size,
             "threads": threads, "unit": "GB/s",
             "name": f"{NAMES[name]}, {size}, {threads} "
                     + ("thread" if threads == 1 else "threads"),
             "value": statistics.median(values[name]),
             "reference": NAMES["read_and_sum"],
             "reference_value": statistics.median(values["read_and_sum"]),
             "ratio": median_ratio(values, name, "read_and_sum"),
             "goal": None} for name in LIMITS]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--node-modules", help="folder with node_modules")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="rows with that in the name")
    parser.add_argument("--sizes", help="such as 64K,4M")
    parser.add_argument("--threads", help="such as 1,2")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    sizes = ["64K", "4M"] if arguments.quick else list(SIZES)
    if arguments.sizes:
        sizes = arguments.sizes.split(",")
    threads_list = [1] if arguments.quick else [1, 2]
    if arguments.threads:
        threads_list = [int(t) for t in arguments.threads.split(",")]
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    results = []
    for threads in threads_list:
        with Sides(arguments, threads) as sides:
            for size in sizes:
                large = SIZES[size] > 64 << 20
                count = min(rounds, 5) if large else rounds
                seconds = (0.1 if large else 0.01 if arguments.quick else 0.04)
                if not arguments.only:
                    results += limit_rows(sides, size, count, seconds)
                for row in ROWS:
                    if size not in row.sizes or arguments.only not in row.name:
                        continue
                    names = ["quantd", *row.references]
                    if row.avx2 and threads == 1:
                        names.append("quantd@avx2")
                    values = measure_cell(sides, names, cell_of(row, size),
                                          count, seconds)
                    shown = rows_of(row, size, threads, values)
                    results += shown
                    print(shown[0]["name"], f"{shown[0]['value']:.1f} GB/s:",
                          ", ".join(
                              f"{r['ratio']:.2f} of {r['reference']}"
                              + (f" (goal {r['goal']:.2f})" if r["goal"]
                                 else "")
                              for r in shown if r["ratio"] is not None),
                          file=sys.stderr, flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"rows": results}, file, indent=1)


if __name__ == "__main__":
    main()
