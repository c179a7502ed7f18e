#!/usr/bin/python3
"""Error-compensated rounding beside numpy, on as many threads.

  compensated_rounding_bench.py --build DIR [--quick] [--rounds N]
                                [--threads N] [--targets NAME,...]
                                [--json FILE]

A float32 weight [4096, 4096] (or [1024, 1024] with --quick) becomes int4 in
groups of 128, with the Gram matrix of correlated inputs: quantd, and the
published algorithm in numpy with blocks of 128 columns (arXiv 2210.17323): two
Cholesky factorizations and an inverse in float64, columns and updates in
float32. Both sides take turns, so that ratios hold on a busy machine. Times
begin with the Gram matrix and end with codes, those of numpy not packed. Rows
are as those of service_bench.py. The last rows are the error at the output
beside numpy's and beside that of rounding to nearest.

numpy should have OpenBLAS; what it has is printed. Debian's takes that of the
package libopenblas0-pthread, also from an unpacked one:

  LD_LIBRARY_PATH=.../usr/lib/x86_64-linux-gnu/openblas-pthread
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

BLOCK = 128
GROUP = 128
DAMPING = 0.01
# Of int4.
SMALLEST, LARGEST = -8, 7


def blas_name() -> str:
    """Of the library that this process has loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found = re.search(r"openblas|libmkl|libblis", maps)
    return found.group() if found else "no fast BLAS"


def make_layer(size, rng):
    """A weight, its scales [rows, groups], and the Gram matrix of inputs."""
    import numpy as np
    tokens = 2 * size
    signals = rng.standard_normal((tokens, size // 3), np.float32)
    inputs = signals @ rng.standard_normal((size // 3, size), np.float32)
    inputs += rng.standard_normal((tokens, size), np.float32)
    inputs *= np.exp(rng.standard_normal(size, np.float32))
    gram = (inputs.T @ inputs).astype(np.float64)
    gram = (gram + gram.T) / 2
    weight = rng.standard_normal((size, size), np.float32)
    groups = weight.reshape(size, -1, GROUP)
    scales = np.abs(groups).max(axis=2) / np.float32(LARGEST + 0.5)
    return weight, scales, gram


def published(weight, scales, gram):
    """The codes, by columns in their order, and the order."""
    import numpy as np
    columns = len(gram)
    diagonal = np.diag(gram)
    order = np.argsort(-diagonal, kind="stable")
    h = gram[order][:, order]
    h[np.diag_indices(columns)] += DAMPING * diagonal.mean()
    np.linalg.cholesky(h)  # the check that it is positive definite
    u = np.linalg.cholesky(np.linalg.inv(h)).T.astype(np.float32)
    # Columns of a row-major array of columns: each is consecutive.
    w = np.ascontiguousarray(weight[:, order].T)
    scale_of = np.ascontiguousarray(scales.T)
    codes = np.empty(w.shape, np.int8)
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        errors = np.empty((end - begin, w.shape[1]), np.float32)
        for k in range(begin, end):
            scale = scale_of[order[k] // GROUP]
            code = np.clip(np.rint(w[k] / scale), SMALLEST, LARGEST)
            codes[k] = code
            error = (w[k] - code * scale) / u[k, k]
            w[k + 1:end] -= np.outer(u[k, k + 1:end], error)
            errors[k - begin] = error
        w[end:] -= u[begin:end, end:].T @ errors
    return codes, order


def output_error(gram, weight, quantized) -> float:
    import numpy as np
    error = (weight - quantized).astype(np.float64)
    return float(((error @ gram) * error).sum())


class Quantd:
    """A process that answers one line for each."""

    def __init__(self, build: str, folder: Path, size: int,
                 threads: int) -> None:
        self._codes = folder / "codes"
        self._size = size
        self._process = subprocess.Popen(
            [os.path.join(build, "tests/bench/compensated_rounding_bench"),
             folder / "gram", folder / "weight", folder / "scales", str(size),
             str(GROUP), str(threads), self._codes],
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, target: str) -> list[float]:
        assert self._process.stdin and self._process.stdout
        print(target, file=self._process.stdin, flush=True)
        return [float(word) for word in self._process.stdout.readline().split()]

    def codes(self):
        import numpy as np
        packed = np.fromfile(self._codes, np.uint8)
        codes = np.stack([packed & 15, packed >> 4], axis=1).astype(np.int8)
        return ((codes ^ 8) - 8).reshape(self._size, self._size)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def run(build: str, size: int, rounds: int, threads: int,
        targets: list[str]) -> list[dict[str, object]]:
    import numpy as np

    import service_bench
    print(f"numpy with {blas_name()}, {threads} threads")
    weight, scales, gram = make_layer(size, np.random.default_rng(1))
    spread = np.repeat(scales, GROUP, axis=1)
    times: dict[str, list[list[float]]] = {name: [] for name in targets}
    by_numpy: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gram.tofile(folder / "gram")
        weight.tofile(folder / "weight")
        scales.tofile(folder / "scales")
        side = Quantd(build, folder, size, threads)
        for _ in range(rounds):
            for target in targets:
                times[target].append(side.run(target))
            begin = time.perf_counter(), time.process_time()
            codes, order = published(weight, scales, gram)
            by_numpy.append((time.perf_counter() - begin[0],
                             time.process_time() - begin[1]))
        ours = side.codes() * spread
        side.close()
    theirs = np.empty_like(weight)
    theirs[:, order] = codes.T
    theirs *= spread
    nearest = np.clip(np.rint(weight / spread), SMALLEST, LARGEST) * spread
    rows = []
    for target in targets:
        seconds = [t[0] + t[2] for t in times[target]]
        cpu = [t[1] + t[3] for t in times[target]]
        rows += [
            service_bench.row(f"{target} / numpy, time", "s", seconds,
                              [t[0] for t in by_numpy], 1.5, at_most=True),
            service_bench.row(f"{target} / numpy, CPU", "s", cpu,
                              [t[1] for t in by_numpy], 1.5, at_most=True),
            service_bench.row(f"{target}, factor / rounding, CPU", "s",
                              [t[1] for t in times[target]],
                              [t[3] for t in times[target]], None),
        ]
    error = output_error(gram, weight, ours)
    rows.append(service_bench.row(
        "output error / numpy", "error", [error],
        [output_error(gram, weight, theirs)], 1.01, at_most=True))
    rows.append(service_bench.row(
        "output error / nearest", "error", [error],
        [output_error(gram, weight, nearest)], None))
    for item in rows:
        service_bench.print_row(item)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true",
                        help="a smaller layer and fewer rounds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--targets", default="auto")
    parser.add_argument("--json")
    args = parser.parse_args()
    # Before numpy is imported, which starts its threads.
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = str(args.threads)
    rows = run(args.build, 1024 if args.quick else 4096,
               args.rounds or (2 if args.quick else 3), args.threads,
               args.targets.split(","))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
