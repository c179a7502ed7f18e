"""How much statistics take, as quantctl calibrate guesses it."""

from __future__ import annotations

import math
from typing import Sequence

from quantd import errors
from quantd._scale_stream import counts
from quantd.encoding import Granularity, block_size_of

_HARMLESS_BYTES = 16 << 20
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class StatisticsSize:
    """Over the tensors of one call."""

    def __init__(self) -> None:
        self._data_bytes = 0
        # A tensor that is contributed to again has one set of statistics.
        self._statistics_bytes: dict[str, int] = {}

    def add(self, name: str, granularity: Granularity, shape: Sequence[int],
            size_bytes: int) -> None:
        """One more tensor.

        Raises: ARGUMENT_INVALID where statistics in blocks take more than the
            tensors, and more than a server should hold of what lies in a file.
        """
        self._data_bytes += size_bytes
        count = math.prod(shape)
        if granularity.kind not in ("group", "blocks") or not count:
            return
        try:
            blocks = math.prod(counts(shape, block_size_of(granularity, shape)))
        except (errors.QuantdError, ZeroDivisionError):
            # The server says what is wrong with it.
            return
        self._statistics_bytes[name] = blocks * _histogram_bytes(
            max(1, count // blocks))
        total = sum(self._statistics_bytes.values())
        if total > max(self._data_bytes, _HARMLESS_BYTES):
            raise errors.argument_invalid(
                "statistics in such small blocks would take about "
                f"{_bytes_text(total)}, more than the "
                f"{_bytes_text(self._data_bytes)} of the tensors; measure "
                "weights in their file with quantd.sweep_model or evaluate, "
                "keep statistics per tensor or per channel, or give "
                "force_statistics", "contribution")


def _histogram_bytes(block: int) -> int:
    """Bytes of the histogram of n elements that form a bell."""
    return 10 * block if block < 64 else int(250 * (math.log2(block) - 4))


def _bytes_text(size_bytes: int) -> str:
    if size_bytes < 10 * 1024:
        return f"{size_bytes:,} B"
    value, unit = size_bytes / 1024, 1
    while value >= 1023.95 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}"
