#!/usr/bin/python3
"""Moments of features: quantd beside plain loops, in turns.

  feature_bench.py --build DIR [--rows N] [--columns N] [--threads N]
                   [--rounds N]

Of [rows, columns] in float32: exact moments of each feature (by data) beside
reading and beside a plain sum of squares in float32. Each figure is the best
of all rounds.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

MOMENTS = ["normal", "relu", "outliers", "softmax"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    with subprocess.Popen(
        [options.build / "tests/bench/feature_bench", str(options.rows),
         str(options.columns), str(options.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sides:

        def run(side: str) -> float:
            sides.stdin.write(side + "\n")
            sides.stdin.flush()
            return float(sides.stdout.readline())

        names = ["read", "squares"] + [f"moments {data}" for data in MOMENTS]
        best = {name: float("inf") for name in names}
        for _ in range(options.rounds):
            for name in names:
                best[name] = min(best[name], run(name))
        sides.stdin.close()

    size = options.rows * options.columns * 4
    for name in names:
        print(f"{name:18} {size / best[name] / 1e9:8.2f} GB/s "
              f"{best['read'] / best[name]:6.2f} of reading, "
              f"{best['squares'] / best[name]:5.2f} of plain squares")


if __name__ == "__main__":
    main()
