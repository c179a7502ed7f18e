#!/usr/bin/python3
"""What people write with torch to quantize a checkpoint: int4, groups of 128.

  torch_quantize.py SOURCE TARGET [--ranges N]

Uses all processors. Loads one tensor after the other from the safetensors files
of the folder SOURCE, finds a scale for each group, rounds, packs two codes in a
byte, and saves a file of codes and scales for each. With --ranges it looks for
the range with the least squared error, as llm-compressor's observer does: N of
them, from the largest magnitude down in steps of a hundredth.

Prints {"seconds", "cpu_seconds", "output_bytes"} as JSON; without the time that
Python takes to start and to import torch.
"""

import argparse
import json
import mmap
import os
import sys
import time

import torch

GROUP = 128
LEAST, MOST = -8, 7
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NAMES = {torch.bfloat16: "BF16", torch.uint8: "U8"}


def tensors_of(path):
    """(name, tensor) of a safetensors file, mapped."""
    with open(path, "rb") as file:
        # torch warns of memory that may not be written to.
        data = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    for name, info in header.items():
        first, end = info["data_offsets"]
        yield name, torch.frombuffer(
            data, dtype=torch.uint8, count=end - first, offset=begin + first
        ).view(DTYPES[info["dtype"]]).reshape(info["shape"])


def round_to(groups, scale):
    return (groups / scale).round_().clamp_(LEAST, MOST)


def quantize(weight, ranges):
    """Returns packed codes and a scale for each group."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    full = groups.abs().amax(dim=-1, keepdim=True).div_((MOST - LEAST) / 2)
    full.clamp_(min=torch.finfo(torch.float32).tiny)
    scale = full
    if ranges:
        best = torch.full_like(full, float("inf"))
        scale = full.clone()
        for step in range(ranges):
            candidate = full * (1 - step / 100)
            error = round_to(groups, candidate).mul_(candidate).sub_(
                groups).square_().sum(dim=-1, keepdim=True)
            better = error < best
            scale = torch.where(better, candidate, scale)
            best = torch.where(better, error, best)
    codes = round_to(groups, scale).sub_(LEAST).to(torch.uint8).view(
        rows, columns)
    packed = codes[:, 1::2].bitwise_left_shift(4).bitwise_or_(codes[:, 0::2])
    return packed, scale.squeeze(-1).to(torch.bfloat16)


def save(path, tensors):
    header, offset = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype],
                        "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)
    return offset


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--ranges", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    begin, begin_cpu = time.monotonic(), time.process_time()
    os.makedirs(arguments.target)
    size = 0
    for name in sorted(os.listdir(arguments.source)):
        if not name.endswith(".safetensors"):
            continue
        results = {}
        for tensor_name, tensor in tensors_of(
                os.path.join(arguments.source, name)):
            if tensor.dim() != 2 or tensor.shape[1] % GROUP:
                results[tensor_name] = tensor
                continue
            codes, scales = quantize(tensor, arguments.ranges)
            results[tensor_name + ".codes"] = codes
            results[tensor_name + ".scales"] = scales
        size += save(os.path.join(arguments.target, name), results)
    json.dump({"seconds": time.monotonic() - begin,
               "cpu_seconds": time.process_time() - begin_cpu,
               "output_bytes": size}, sys.stdout)


if __name__ == "__main__":
    main()
