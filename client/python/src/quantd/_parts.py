"""Shares of one quantize_model() that different processes do, as quantctl
shares them out: see client/jobs/quantize_parts.h."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from typing import Any, Sequence

from quantd import errors
from quantd._files import FileTensor

# Metadata of a part's file: "I/N".
PART_KEY = "quantctl.part"
_MOST_PARTS = 100_000
# Whole shards are shared out if no part gets more than this many times the
# mean.
_MOST_OF_MEAN = 1.25


@dataclasses.dataclass(frozen=True, order=True)
class Part:
    """Part `index` of `count`, from 0 on."""

    count: int
    index: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def path(self, output_path: str) -> str:
        """Path of its file for a shard that it shares with others."""
        return f"{output_path}.part-{self.index:05d}-of-{self.count:05d}"


def as_part(part: Any) -> Part:
    """Part of (i, n) or "I/N". Raises: ARGUMENT_INVALID."""
    try:
        index, count = (map(int, part.split("/")) if isinstance(part, str)
                        else part)
        if type(index) is int and type(count) is int and (
                0 <= index < count <= _MOST_PARTS):
            return Part(count, index)
    except (TypeError, ValueError):
        pass
    raise errors.argument_invalid(
        "expected a part (i, n) with i from 0 to n - 1, such as (0, 8) for the "
        f"first of 8 parts, got {part!r}", "part")


@dataclasses.dataclass(frozen=True)
class Share:
    """Work that one part does of one shard."""

    part: int
    tensors: Sequence[FileTensor]


def share_out(selected: Sequence[Sequence[FileTensor]], count: int
              ) -> list[list[Share]]:
    """For the selected tensors of each shard the parts that do them, in order.
    A shard without any belongs to a part all the same."""
    sizes = [sum(tensor.size_bytes for tensor in tensors)
             for tensors in selected]
    total = sum(sizes)
    loads, parts = [0] * count, [0] * len(sizes)
    # The largest first, to the part that has least.
    for shard in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        parts[shard] = loads.index(min(loads))
        loads[parts[shard]] += sizes[shard]
    mean = total / count
    if max(loads) <= _MOST_OF_MEAN * mean or not total:
        return [[Share(part, tensors)]
                for part, tensors in zip(parts, selected)]
    shares: list[list[Share]] = []
    before = part = 0
    for tensors in selected:
        found: dict[int, list[FileTensor]] = {}
        for tensor in tensors:
            # It belongs to the part in whose stretch its middle is.
            middle = before + tensor.size_bytes / 2
            part = min(max(int(middle / mean), part), count - 1)
            found.setdefault(part, []).append(tensor)
            before += tensor.size_bytes
        shares.append([Share(*item) for item in found.items()] or
                      [Share(part, [])])
    return shares


def find_parts(output_path: str) -> list[Part]:
    """The parts of a shard for which there are files, whatever is in them."""
    found = []
    prefix = os.path.basename(output_path) + ".part-"
    for path in glob.glob(glob.escape(output_path) + ".part-*"):
        match = re.fullmatch(r"(\d+)-of-(\d+)",
                             os.path.basename(path)[len(prefix):])
        if match and 0 <= int(match[1]) < int(match[2]) <= _MOST_PARTS:
            found.append(Part(int(match[2]), int(match[1])))
    return sorted(found)
