#!/usr/bin/env python3
"""Searches of groups: quantd beside torch's grid of 20 ranges, on one thread.

    tests/bench/block_search_bench.py --build build/release

quantd searches on the elements of each group, on its histogram, and torch as
observers do: 20 ranges from the whole one down to 0.8 of it, the one with the
least squared error. All in turns, so that ratios hold on a busy machine; times
end with codes. The squared error is that beside the best of 1,000 ranges for
each group, over some of the groups. Prints a table; --json FILE keeps it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

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
    begin = time.perf_counter()
    fractions = [1 - 0.01 * k for k in range(TORCH_RANGES)]
    scales, _ = grid_error(groups, fractions, largest)
    torch.clamp(torch.round(groups / scales), -largest,
                largest).to(torch.int8)
    return time.perf_counter() - begin


class Quantd:
    """A process that answers one line for each."""

    def __init__(self, program: Path, data: Path) -> None:
        self._process = subprocess.Popen([str(program), str(data)], text=True,
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build/release"))
    parser.add_argument("--count", type=int, default=4 << 20,
                        help="elements; default 4 Mi")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", default="normal,heavy,uniform,outliers,sparse")
    parser.add_argument("--methods", default="mse,sqnr,percentile,entropy")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    largest = 7
    program = args.build / "tests/bench/block_search_bench"
    rng = np.random.default_rng(1)
    rows = []
    print(f"int4, groups of {args.group}, {args.count} float32 elements, one "
          "thread, milliseconds")
    print(f"{'data':10}{'method':12}{'elements':>10}{'histogram':>11}{'ratio':>7}"
          f"{'torch 20':>10}{'ratio':>7}{'error / best of 1,000':>23}")
    for name in args.data.split(","):
        x = draw(name, args.count, rng)
        groups = torch.from_numpy(x).view(-1, args.group)
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "data.f32"
            x.tofile(data)
            some = Path(folder) / "some.f32"
            x[: SOME_GROUPS * args.group].tofile(some)
            side = Quantd(program, data)
            for method in args.methods.split(","):
                line = ("int4", method, "default", args.group)
                seconds: dict[str, list[float]] = {
                    "direct": [], "histogram": [], "torch": []}
                for _ in range(args.rounds):
                    seconds["direct"].append(side.run("direct", *line)[0])
                    if method == "mse":
                        seconds["torch"].append(run_torch(groups, largest))
                    if len(seconds["histogram"]) < 1:
                        seconds["histogram"].append(
                            side.run("histogram", *line)[0])
                row: dict[str, object] = {"data": name, "method": method}
                for key, values in seconds.items():
                    row[key] = statistics.median(values) if values else None
                direct = statistics.median(seconds["direct"])
                old = statistics.median(seconds["histogram"])
                text = (f"{name:10}{method:12}{1e3 * direct:10.1f}"
                        f"{1e3 * old:11.0f}{old / direct:7.1f}")
                if method == "mse":
                    peer = statistics.median(seconds["torch"])
                    few = Quantd(program, some)
                    error = few.run("direct", *line)[1]
                    few.close()
                    fractions = [k / ALL_RANGES
                                 for k in range(1, ALL_RANGES + 1)]
                    _, best = grid_error(groups[:SOME_GROUPS].double(),
                                         fractions, largest)
                    row["error_ratio"] = error / float(best.sum())
                    text += (f"{1e3 * peer:10.0f}{peer / direct:7.1f}"
                             f"{row['error_ratio']:23.6f}")
                print(text, flush=True)
                rows.append(row)
            side.close()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
