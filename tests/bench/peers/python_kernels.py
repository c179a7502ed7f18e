#!/usr/bin/python3
"""torch and numpy as sides of the kernel benchmarks.

Histograms find their range themselves, as quantd's do.

Speaks the protocol of kernel_sides.cc on stdin and stdout, for the sides
"torch" and "numpy". Outputs are preallocated wherever the call takes one.

  python_kernels.py --threads 2
"""

import argparse
import json
import sys
import time

import numpy as np
import torch

COLUMNS = 4096
BINS = 2048
TYPES = {"float32": torch.float32, "float16": torch.float16,
         "bfloat16": torch.bfloat16}


def reals(cell):
    """The data of the cell, [count / 4096, 4096]."""
    count = cell["bytes"] // 4
    random = np.random.default_rng(1)
    period = random.standard_normal(min(count, 1 << 20)).astype(np.float32)
    if cell["data"] == "relu":
        period = np.maximum(period, 0)
    elif cell["data"] == "equal":
        period = np.full_like(period, 0.3)
    x = np.resize(period, count).reshape(-1, COLUMNS)
    # Not numpy's memory, which is of huge pages where that of the others is not.
    return torch.empty(x.shape, dtype=TYPES[cell["type"]]).copy_(
        torch.from_numpy(x))


def torch_min_max(x, unused_cell):
    return lambda: torch.aminmax(x)


def torch_statistics(x, cell):
    if cell["mantissa_bits"] == 2:
        out = torch.empty(BINS)
        return lambda: torch.histc(x, BINS, out=out)
    observer = torch.ao.quantization.HistogramObserver()
    return lambda: observer(x)


def torch_quantize(x, cell):
    if cell["format"] != "int8" or cell["type"] != "float32":
        return None
    if not cell["block_size"]:
        return lambda: torch.quantize_per_tensor(
            x, cell["scale"], cell["zero_point"], torch.qint8)
    if cell["block_size"] == [1, 0]:
        rows = x.shape[0]
        scale = torch.full((rows,), cell["scale"])
        zero = torch.full((rows,), cell["zero_point"])
        return lambda: torch.quantize_per_channel(x, scale, zero, 0,
                                                  torch.qint8)
    return None


def torch_evaluate(x, cell):
    if cell["block_size"]:
        return None
    scale, zero = cell["scale"], cell["zero_point"]
    y = torch.empty_like(x)

    def run():
        torch.div(x, scale, out=y)
        y.round_().add_(zero).clamp_(-128, 127).sub_(zero).mul_(scale).sub_(x)
        return (torch.dot(y.view(-1), y.view(-1)),
                torch.dot(x.view(-1), x.view(-1)), y.abs_().max())
    return run


def numpy_statistics(x, cell):
    if cell["mantissa_bits"] != 2:
        return None
    return lambda: np.histogram(x.numpy(), BINS)


def numpy_quantize_spec(x, cell):
    """int4 of groups, two codes a byte, scales found."""
    group = cell["block_size"][1]
    blocks = x.numpy().reshape(-1, group)
    scaled = np.empty_like(blocks)
    codes = np.empty(blocks.shape, np.int8)

    def run():
        np.abs(blocks, out=scaled)
        scale = scaled.max(axis=1, keepdims=True) / 7
        np.divide(blocks, scale, out=scaled)
        np.rint(scaled, out=scaled)
        np.copyto(codes, scaled, casting="unsafe")
        return scale, (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    return run


SIDES = {
    "torch": {"min_max": torch_min_max, "statistics": torch_statistics,
              "quantize": torch_quantize, "evaluate": torch_evaluate},
    "numpy": {"statistics": numpy_statistics,
              "quantize_spec": numpy_quantize_spec},
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    torch.set_grad_enabled(False)
    key, x, bodies = None, None, {}
    for line in sys.stdin:
        cell = json.loads(line)
        side, seconds = cell.pop("side"), cell.pop("seconds")
        if cell != key:
            key, bodies = cell, {}
            x = reals(cell)
        if side not in bodies:
            make = SIDES[side].get(cell["operation"])
            bodies[side] = make(x, cell) if make else None
        body = bodies[side]
        answer = {}
        if body is not None:
            size = x.element_size() * x.nelement()
            # Long calls warm up once, in the round that asks for no time.
            if size < 64 << 20 or not seconds:
                body()
            begin, calls, elapsed = time.perf_counter(), 0, 0
            while calls == 0 or elapsed < seconds:
                body()
                calls += 1
                elapsed = time.perf_counter() - begin
            answer = {"gb_per_s": size * calls / elapsed * 1e-9}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
