#!/usr/bin/python3
"""Every other format, type and granularity, beside the limit of reading.

  format_bench.py --build DIR [--quick] [--json FILE]

Runs the programs of Google Benchmark in this folder, their rows in random
order, several times over. A ratio is that of medians, to the program's own row
that reads and sums as many bytes.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys

PROGRAMS = ("kernels_bench", "evaluate_bench", "statistics_bench")
SIZES = {64 << 10: "64K", 1 << 20: "1M", 4 << 20: "4M",
         256 << 20: "256M"}
# operation/variant/<bytes>/<threads>
ROW = re.compile(r"(?P<row>.*)/(?P<bytes>\d+)/(?P<threads>\d+)")


def run(program, min_time, repetitions):
    """{(row, bytes, threads): GB/s of the elements}, medians."""
    result = subprocess.run(
        [program, f"--benchmark_min_time={min_time}",
         f"--benchmark_repetitions={repetitions}",
         "--benchmark_enable_random_interleaving=true",
         "--benchmark_format=json"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    values = {}
    for entry in json.loads(result.stdout)["benchmarks"]:
        if entry.get("run_type") != "iteration":
            continue
        match = ROW.match(entry["run_name"])
        rate = entry.get("in", entry.get("bytes_per_second"))
        if match is None or rate is None:
            continue
        key = (match["row"], int(match["bytes"]), int(match["threads"]))
        values.setdefault(key, []).append(rate * 1e-9)
    return {key: statistics.median(rates) for key, rates in values.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    min_time, repetitions = (0.005, 1) if arguments.quick else (0.03, 3)
    rows = []
    for name in PROGRAMS:
        program = os.path.join(arguments.build, "tests/bench", name)
        if not os.access(program, os.X_OK):
            continue
        values = run(program, min_time, repetitions)
        for (row, size, threads), value in sorted(values.items()):
            limit = values.get(("read_and_sum", size, 1))
            rows.append({
                "section": "Formats", "row": row,
                "size": SIZES.get(size, f"{size} B"), "threads": threads,
                "name": f"{row}, {SIZES.get(size, size)}, {threads} "
                        + ("thread" if threads == 1 else "threads"),
                "unit": "GB/s", "value": value,
                "reference": "read and sum on 1 thread" if limit else None,
                "reference_value": limit,
                "ratio": value / limit if limit else None, "goal": None})
        print(f"{name}: {len(values)} rows", file=sys.stderr, flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
