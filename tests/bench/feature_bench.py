#!/usr/bin/python3
"""Statistics of features: quantd beside plain loops and a BLAS, in turns.

  feature_bench.py --build DIR [--rows N] [--columns N] [--threads N]
                   [--rounds N]

Of [rows, columns] in float32: exact moments of each feature (by data) beside
reading and beside a plain sum of squares in float32; the Gram state beside
x.T @ x of numpy, whose BLAS does that by ssyrk. Debian's numpy takes the BLAS
that libblas.so.3 is: with OpenBLAS elsewhere, set LD_LIBRARY_PATH to its
folder. Each figure is the best of all rounds, and its ratio to the peer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
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

    # Before numpy loads its BLAS.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = str(options.threads)
    import numpy as np

    x = np.random.default_rng(1).standard_normal(
        (options.rows, options.columns), np.float32)
    with subprocess.Popen(
        [options.build / "tests/bench/feature_bench", str(options.rows),
         str(options.columns), str(options.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sides:

        def run(side: str) -> float:
            if side == "numpy":
                begin = time.perf_counter()
                x.T @ x  # pylint: disable=pointless-statement
                return time.perf_counter() - begin
            sides.stdin.write(side + "\n")
            sides.stdin.flush()
            return float(sides.stdout.readline())

        names = (["read", "squares"] + [f"moments {data}" for data in MOMENTS]
                 + ["numpy", "gram"])
        best = {name: float("inf") for name in names}
        for _ in range(options.rounds):
            for name in names:
                best[name] = min(best[name], run(name))
        sides.stdin.close()

    size = options.rows * options.columns * 4
    for name in names[:-2]:
        print(f"{name:18} {size / best[name] / 1e9:8.2f} GB/s "
              f"{best['read'] / best[name]:6.2f} of reading, "
              f"{best['squares'] / best[name]:5.2f} of plain squares")
    work = options.rows * options.columns**2
    for name in names[-2:]:
        print(f"{name:18} {work / best[name] / 1e9:8.1f} GFLOP/s "
              f"{best['numpy'] / best[name]:6.2f} of numpy")


if __name__ == "__main__":
    main()
