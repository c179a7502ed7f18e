#!/usr/bin/python3
"""How fast statistics are made where the data are, beside what an observer of torch
does: minimum, maximum and a histogram of 2,048 bins.

  edge_bench.py [--device cpu|cuda] [--rows N] [--columns N] [--rounds N]

Prints GB/s of elements that are read: medians of rounds in which each takes a turn.
"moments" and "gram" are states with these beside the histogram.
"""

import argparse
import os
import statistics
import sys
import time

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../.."))
sys.path.insert(0, os.path.join(ROOT, "tests/client/python"))

# pylint: disable=wrong-import-position
import package  # pylint: disable=unused-import
import torch
import quantd
import quantd.edge

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def observe(tensor):
    """As an observer does."""
    low, high = tensor.min(), tensor.max()
    return torch.histc(tensor.float(), 2048, float(low), float(high))


def seconds_of(call, device):
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(tensor, rounds, device):
    """GB/s by what was done."""
    steps = quantd.gram_steps(tensor[:256].float().cpu().numpy())
    states = {"state": quantd.edge.State(),
              "per channel": quantd.edge.State(quantd.per_channel(0)),
              "moments": quantd.edge.State(moments=True),
              "gram": quantd.edge.State(step_exponent=steps)}
    calls = {name: lambda state=state: state.update(tensor)
             for name, state in states.items()}
    calls["observer"] = lambda: observe(tensor)
    times = {name: [] for name in calls}
    # The first round is not counted.
    for number in range(rounds + 1):
        for name, call in calls.items():
            took = seconds_of(call, device)
            if number:
                times[name].append(took)
    size = tensor.numel() * tensor.element_size()
    return {name: size / 1e9 / statistics.median(took)
            for name, took in times.items()}


def main():
    arguments = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--rows", type=int, default=2048)
    arguments.add_argument("--columns", type=int, default=4096)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    data = torch.randn(options.rows, options.columns, device=options.device)
    for dtype in TYPES:
        rates = measure(data.to(dtype), options.rounds, options.device)
        if dtype == TYPES[0]:
            print(f"{'GB/s':10}" + "".join(f"{name:>13}" for name in rates))
        name = str(dtype).partition(".")[2]
        print(f"{name:10}" + "".join(f"{rate:13.3g}"
                                     for rate in rates.values()), flush=True)


if __name__ == "__main__":
    main()
