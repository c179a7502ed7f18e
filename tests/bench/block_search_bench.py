#!/usr/bin/python3
"""Searches of groups: quantd beside torch's grid of 20 ranges, on one thread.

  block_search_bench.py --build DIR [--quick] [--count N] [--group N]
                        [--data NAME,...] [--methods NAME,...] [--json FILE]

quantd searches on the elements of each group, on its histogram, and torch as
observers do: 20 ranges from the whole one down to 0.8 of it, the one with the
least squared error. All in turns, so that ratios hold on a busy machine; times
end with codes. The squared error is that beside the best of 1,000 ranges for
each group, over some of the groups. At the end quantd's other specs are beside
each other. Times are of the processor. Rows are as those of service_bench.py, in
millions of elements a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import service_bench

# Of int4.
LARGEST = 7
# Pairs of specs: format, method, symmetry, elements of a group.
BESIDE = [
    (("nvfp4", "minmax", "default", 16),
     ("mxfp4_e2m1", "minmax", "default", 32)),
    (("nvfp4", "mse", "default", 16), ("int4", "mse", "default", 16)),
    (("uint4", "mse", "asymmetric", 128), ("int4", "mse", "default", 128)),
    (("int8", "mse", "asymmetric", 128), ("int8", "mse", "default", 128)),
    (("int8", "entropy", "default", 128), ("int4", "entropy", "default", 128)),
    (("nf4", "entropy", "default", 64), ("int4", "entropy", "default", 64)),
]
TORCH_RANGES = 20
ALL_RANGES = 1000
# Groups that are tried with all ranges.
SOME_GROUPS = 2048


def draw(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    if name == "normal":
        return rng.standard_normal(count, np.float32)
    if name == "heavy":
        return rng.standard_t(3, count).astype(np.float32)
    if name == "uniform":
        return rng.uniform(-1, 1, count).astype(np.float32)
    if name == "outliers":
        x = rng.standard_normal(count, np.float32)
        x[:: 97] *= 20
        return x
    if name == "sparse":
        x = rng.standard_normal(count, np.float32)
        x[rng.random(count) < 0.9] = 0
        return x
    raise ValueError(name)


def grid_error(groups: torch.Tensor, fractions: list[float],
               largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best scale of each group, and its squared error."""
    whole = groups.abs().amax(1, keepdim=True)
    best = torch.full_like(whole, float("inf"))
    scales = whole / largest
    for fraction in fractions:
        scale = (whole * fraction / largest).clamp_min(1e-30)
        codes = torch.clamp(torch.round(groups / scale), -largest, largest)
        error = (codes * scale - groups).square_().sum(1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, scale, scales)
    return scales, best


def run_torch(groups: torch.Tensor, largest: int) -> float:
    begin = time.process_time()
    fractions = [1 - 0.01 * k for k in range(TORCH_RANGES)]
    scales, _ = grid_error(groups, fractions, largest)
    torch.clamp(torch.round(groups / scales), -largest,
                largest).to(torch.int8)
    return time.process_time() - begin


class Quantd:
    """A process that answers one line for each."""

    def __init__(self, program: str, data: Path) -> None:
        self.program = program
        self._process = subprocess.Popen([program, str(data)], text=True,
                                         stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE)

    def run(self, *words: object) -> tuple[float, float]:
        assert self._process.stdin and self._process.stdout
        print(*words, file=self._process.stdin, flush=True)
        seconds, error = self._process.stdout.readline().split()
        return float(seconds), float(error)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def method_rows(side: Quantd, some: Path, groups: torch.Tensor, data: str,
                method: str, rounds: int) -> list[dict[str, object]]:
    """Rows of one method on the elements of `data`, in groups."""
    line = ("int4", method, "default", groups.shape[1])
    million = groups.numel() / 1e6
    direct, by_torch = [], []
    for _ in range(rounds):
        direct.append(million / side.run("direct", *line)[0])
        if method == "mse":
            by_torch.append(million / run_torch(groups, LARGEST))
    histogram = million / side.run("histogram", *line)[0]
    rows = [service_bench.row(f"{data}, {method} / histogram", "M/s", direct,
                              [histogram] * rounds, None)]
    if by_torch:
        rows.append(service_bench.row(
            f"{data}, {method} / torch, {TORCH_RANGES} ranges", "M/s", direct,
            by_torch, 8.0))
        few = Quantd(side.program, some)
        error = few.run("direct", *line)[1]
        few.close()
        _, best = grid_error(groups[:SOME_GROUPS].double(),
                             [k / ALL_RANGES for k in range(1, ALL_RANGES + 1)],
                             LARGEST)
        rows.append(service_bench.row(
            f"{data}, {method}, error / best of {ALL_RANGES:,}", "error",
            [error], [float(best.sum())], 1.0005, at_most=True))
    return rows


def spec_rows(side: Quantd, data: str, rounds: int) -> list[dict[str, object]]:
    """Specs beside another that is as large or has as much to search."""
    rows = []
    for spec, other in BESIDE:
        seconds: dict[tuple[str, str, str, int], list[float]] = {spec: [],
                                                                 other: []}
        for _ in range(rounds):
            for one in (spec, other):
                seconds[one].append(side.run("direct", *one)[0])
        names = [" ".join(map(str, one)) for one in (spec, other)]
        rows.append(service_bench.row(
            f"{data}, {names[0]} / {names[1]}", "1/s",
            [1 / x for x in seconds[spec]], [1 / x for x in seconds[other]],
            None))
    return rows


def run(build: str, count: int, group: int, names: list[str],
        methods: list[str], rounds: int) -> list[dict[str, object]]:
    rows = []
    rng = np.random.default_rng(1)
    program = os.path.join(build, "tests/bench/block_search_bench")
    for name in names:
        x = draw(name, count, rng)
        groups = torch.from_numpy(x).view(-1, group)
        with tempfile.TemporaryDirectory() as folder:
            whole, some = Path(folder) / "data.f32", Path(folder) / "some.f32"
            x.tofile(whole)
            x[:SOME_GROUPS * group].tofile(some)
            side = Quantd(program, whole)
            for method in methods:
                for row in method_rows(side, some, groups, name, method,
                                       rounds):
                    service_bench.print_row(row)
                    rows.append(row)
            for row in spec_rows(side, name, rounds):
                service_bench.print_row(row)
                rows.append(row)
            side.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true",
                        help="fewer data, elements and rounds")
    parser.add_argument("--count", type=int,
                        help="elements; default 4 Mi, or 1 Mi with --quick")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--data", help="some of normal, heavy, uniform, "
                                       "outliers, sparse")
    parser.add_argument("--methods", default="mse,sqnr,percentile,entropy")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.data or ("normal,outliers" if args.quick else
                          "normal,heavy,uniform,outliers,sparse")
    rows = run(args.build, args.count or (1 if args.quick else 4) << 20,
               args.group, names.split(","), args.methods.split(","),
               3 if args.quick else 5)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
