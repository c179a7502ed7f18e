"""Functions that states at the edge are made of, for tensors of torch on their
device; see _edge_numpy. Integers are added, so that no order of additions
shows."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import numpy as np
import torch

from quantd import errors

_ELEMENT_TYPES = {torch.float32: "float32", torch.float64: "float64",
                  torch.float16: "float16", torch.bfloat16: "bfloat16"}
_DENSE_COUNT = 1 << 20
# Four bytes of memory for each, while they are counted.
_PATTERNS_AT_ONCE = 1 << 24
# Some 32 bytes for each.
_HALVES_AT_ONCE = 1 << 22
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_SIGN = 1 << 31


class TorchKernels:
    """See NumpyKernels."""

    @staticmethod
    def elements(array: torch.Tensor, element_type: Optional[str]
                 ) -> tuple[torch.Tensor, tuple[int, ...], str]:
        """See NumpyKernels."""
        found = _ELEMENT_TYPES.get(array.dtype)
        if found is None or element_type not in (None, found):
            raise errors.argument_invalid(
                f"expected elements of {element_type or 'floating point'}, got "
                f"{array.dtype}", "array")
        return array, tuple(array.shape), found

    @staticmethod
    def counts_of_patterns(elements: torch.Tensor, count: int) -> torch.Tensor:
        """See NumpyKernels."""
        bits = elements.contiguous().view(-1).view(torch.int16)
        found = torch.zeros(count, dtype=torch.int64, device=bits.device)
        for some in bits.split(_PATTERNS_AT_ONCE):
            found += torch.bincount(some.int() & (count - 1), minlength=count)
        return found

    @staticmethod
    def sums_of_halves(elements: torch.Tensor, count: int
                       ) -> list[torch.Tensor]:
        """See NumpyKernels."""
        bits = elements.contiguous().view(-1).view(torch.int32)
        found = [torch.zeros(count, dtype=torch.int64, device=bits.device)
                 for _ in range(3)]
        for some in bits.split(_HALVES_AT_ONCE):
            upper = (some >> 16 & (count - 1)).long()
            lower = (some & (count - 1)).long()
            for own, value in zip(found, (torch.ones_like(lower), lower,
                                          lower * lower)):
                own.index_add_(0, upper, value)
        return found

    @staticmethod
    def count_of_minus_zeros(elements: torch.Tensor) -> int:
        """See NumpyKernels."""
        return int((elements.contiguous().view(torch.int32) == -_SIGN).sum())

    @staticmethod
    def floats(elements: torch.Tensor, shape: Sequence[int], element_type: str
               ) -> torch.Tensor:
        """See NumpyKernels."""
        del shape
        # Exact, and everything works on it on every device.
        return elements.float() if element_type in (
            "float16", "bfloat16") else elements

    @staticmethod
    def to_float32(array: torch.Tensor) -> torch.Tensor:
        """Converts to float32. Elements beyond its range become its largest."""
        if array.dtype == torch.float64:
            array = array.clamp(-_FLOAT32_MAX, _FLOAT32_MAX).float()
        return array.contiguous()

    is_finite = staticmethod(torch.isfinite)
    minimum = staticmethod(torch.minimum)
    maximum = staticmethod(torch.maximum)

    @staticmethod
    def is_all(mask: torch.Tensor) -> bool:
        """True if all of the mask is true."""
        return bool(mask.all())

    @staticmethod
    def count(mask: torch.Tensor) -> int:
        """How many are true."""
        return int(mask.sum())

    @staticmethod
    def or_else(array: torch.Tensor, finite: Optional[torch.Tensor],
                other: float) -> torch.Tensor:
        """Replaces what is not finite by `other`."""
        return array if finite is None else array.masked_fill(~finite, other)

    @staticmethod
    def smallest(array: torch.Tensor, axis: int, block: int) -> torch.Tensor:
        """Smallest element of each block along the axis; 0: of all."""
        return _in_blocks(array, axis, block).amin(axis + 1)

    @staticmethod
    def largest(array: torch.Tensor, axis: int, block: int) -> torch.Tensor:
        """Largest element of each block along the axis; 0: of all."""
        return _in_blocks(array, axis, block).amax(axis + 1)

    @staticmethod
    def keys(floats: torch.Tensor, mantissa_bits: int
             ) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and low bits of each element; see Histogram."""
        bits = floats.view(torch.int32).long() & (2 * _SIGN - 1)
        bits = bits.masked_fill(bits == _SIGN, 0)
        shift = 23 - mantissa_bits
        keys = torch.where(bits >= _SIGN, ~bits & (2 * _SIGN - 1),
                           bits | _SIGN)
        return keys >> shift, bits & ((1 << shift) - 1)

    @staticmethod
    def powers(floats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See NumpyKernels."""
        bits = floats.view(torch.int32).long() & (2 * _SIGN - 1)
        exponent = bits >> 23 & 0xFF
        mantissa = (bits & 0x7FFFFF) + ((exponent > 0).long() << 23)
        return (bits >> 31 << 8) + (exponent.clamp(1) - 1), mantissa

    @staticmethod
    def not_of_columns(mask: torch.Tensor) -> torch.Tensor:
        """See NumpyKernels."""
        return (~mask).sum((0, 2))

    @staticmethod
    def embedded(array: torch.Tensor, shape: Sequence[int],
                 offset: Sequence[int], none: Any) -> torch.Tensor:
        """See NumpyKernels."""
        found = torch.full(tuple(shape), none, dtype=array.dtype,
                           device=array.device)
        found[tuple(slice(first, first + extent) for first, extent in
                    zip(offset, array.shape))] = array
        return found

    @staticmethod
    def arange(begin: int, end: int, like: torch.Tensor) -> torch.Tensor:
        """Integers."""
        return torch.arange(begin, end, device=like.device)

    @staticmethod
    def sums(keys: torch.Tensor, values: Sequence[torch.Tensor],
             key_count: int
             ) -> tuple[Optional[torch.Tensor], list[torch.Tensor]]:
        """See NumpyKernels."""
        if key_count <= _DENSE_COUNT:
            return None, [torch.bincount(keys, minlength=key_count), *(
                _sums(keys, value, key_count) for value in values)]
        found, places, counts = torch.unique(
            keys, return_inverse=True, return_counts=True)
        return found, [counts, *(_sums(places, value, len(found))
                                 for value in values)]

    @staticmethod
    def places(counts: torch.Tensor) -> torch.Tensor:
        """See NumpyKernels."""
        return counts.nonzero().reshape(-1)

    @staticmethod
    def sums_of_pairs(keys: torch.Tensor, values: Sequence[torch.Tensor]
                      ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The distinct keys in order, and the sums by them."""
        found, places = torch.unique(keys, return_inverse=True)
        return found, [_sums(places, value, len(found)) for value in values]

    @staticmethod
    def join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """One behind the other."""
        return torch.cat([first, second])

    @staticmethod
    def all_of_rows(mask: torch.Tensor) -> torch.Tensor:
        """True for each row that is true throughout."""
        return mask.all(1)

    @staticmethod
    def scaled(rows: torch.Tensor, exponents: Sequence[int]) -> torch.Tensor:
        """By 2^-exponent of each column."""
        # No float32 is as large as those of tiny steps.
        dtype = torch.float32 if min(exponents) >= -126 else torch.float64
        return rows * torch.tensor([2.0**-exponent for exponent in exponents],
                                   dtype=dtype, device=rows.device)

    @staticmethod
    def rounded(array: torch.Tensor, limit: int) -> torch.Tensor:
        """Integers in float64, ties to even."""
        return array.clamp(-limit, limit).round().double()

    @staticmethod
    def product(codes: torch.Tensor) -> torch.Tensor:
        """The sum over rows of the products of two codes. Requires: so few
        rows that float64 is exact."""
        return (codes.T @ codes).long()

    @staticmethod
    def to_numpy(array: torch.Tensor) -> Any:
        """A copy."""
        return np.array(array.cpu().numpy())


def _in_blocks(array: torch.Tensor, axis: int, block: int) -> torch.Tensor:
    """With the axis split in blocks and what is in them; the last one has its
    first element again for those that it lacks."""
    extent = array.shape[axis]
    block = min(block or extent, extent)
    count = -(-extent // block)
    missing = count * block - extent
    if missing:
        first = array.narrow(axis, (count - 1) * block, 1)
        array = torch.cat([array, first.repeat_interleave(missing, axis)], axis)
    return array.reshape(*array.shape[:axis], count, block,
                         *array.shape[axis + 1:])


def _sums(places: torch.Tensor, values: torch.Tensor, count: int
          ) -> torch.Tensor:
    """By place."""
    return torch.zeros(count, dtype=torch.int64, device=values.device
                       ).index_add_(0, places, values)
