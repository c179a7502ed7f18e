"""Functions that states at the edge are made of, for arrays of numpy. The
counterpart for torch has the same functions."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import numpy as np

from quantd import _arrays
from quantd.tensor import ELEMENT_DTYPES, Array

# Sums of so many numbers below 2^32 are exact in float64.
_EXACT_COUNT = 1 << 20
# Bins are counted in an array up to this number of them.
_DENSE_COUNT = 1 << 20
_IN_CACHE = 1 << 18
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_SIGN = 1 << 31


class NumpyKernels:
    """All are functions. Where there is a place for `finite`, None means that
    all elements are."""

    @staticmethod
    def elements(array: Any, element_type: Optional[str]
                 ) -> tuple[Array, tuple[int, ...], str]:
        """The elements as they are, their shape and their type."""
        reals = _arrays.reals(array, element_type)
        return (reals.data.view(ELEMENT_DTYPES[reals.element_type]),
                reals.shape, reals.element_type)

    @staticmethod
    def counts_of_patterns(elements: Array, count: int) -> Array:
        """How often elements of 16 bits have each pattern."""
        bits = elements.reshape(-1).view(np.uint16)
        found = np.zeros(count, np.int64)
        # What numpy makes of them in between stays in the cache.
        for begin in range(0, len(bits), _IN_CACHE):
            found += np.bincount(bits[begin:begin + _IN_CACHE],
                                 minlength=count)
        return found

    @staticmethod
    def sums_of_halves(elements: Array, count: int) -> list[Array]:
        """Of float32, by their upper 16 bits: how often they come, and sums of
        the lower 16 bits and of their squares."""
        halves = elements.reshape(-1).view(np.uint16).reshape(-1, 2)
        found = [np.zeros(count, np.int64) for _ in range(3)]
        for begin in range(0, len(halves), _IN_CACHE):
            some = halves[begin:begin + _IN_CACHE]
            upper, lower = some[:, 1].astype(np.intp), some[:, 0].astype(float)
            found[0] += np.bincount(upper, minlength=count)
            # Exact: below 2^53.
            found[1] += np.bincount(upper, lower, count).astype(np.int64)
            found[2] += np.bincount(upper, lower * lower, count).astype(np.int64)
        return found

    @staticmethod
    def count_of_minus_zeros(elements: Array) -> int:
        """Of float32."""
        return int(np.count_nonzero(elements.view(np.uint32) == _SIGN))

    @staticmethod
    def floats(elements: Array, shape: Sequence[int], element_type: str
               ) -> Array:
        """Floats of numpy, of any size."""
        if element_type == "bfloat16":
            elements = (elements.astype(np.uint32) << 16).view(np.float32)
        return elements.reshape(shape)

    @staticmethod
    def to_float32(array: Array) -> Array:
        """Converts to float32. Elements beyond its range become its largest;
        others that are not finite may become anything."""
        if array.dtype == np.float64:
            array = np.clip(array, -_FLOAT32_MAX, _FLOAT32_MAX)
        return array.astype(np.float32, copy=False)

    is_finite = staticmethod(np.isfinite)
    minimum = staticmethod(np.minimum)
    maximum = staticmethod(np.maximum)

    @staticmethod
    def is_all(mask: Array) -> bool:
        """True if all of the mask is true."""
        return bool(mask.all())

    @staticmethod
    def count(mask: Array) -> int:
        """How many are true."""
        return int(np.count_nonzero(mask))

    @staticmethod
    def or_else(array: Array, finite: Optional[Array], other: float) -> Array:
        """Replaces what is not finite by `other`."""
        return array if finite is None else np.where(
            finite, array, array.dtype.type(other))

    @staticmethod
    def smallest(array: Array, axis: int, block: int) -> Array:
        """Smallest element of each block along the axis; 0: of all."""
        return np.minimum.reduceat(
            array, np.arange(0, array.shape[axis], block or array.shape[axis]),
            axis=axis)

    @staticmethod
    def largest(array: Array, axis: int, block: int) -> Array:
        """Largest element of each block along the axis; 0: of all."""
        return np.maximum.reduceat(
            array, np.arange(0, array.shape[axis], block or array.shape[axis]),
            axis=axis)

    @staticmethod
    def keys(floats: Array, mantissa_bits: int) -> tuple[Array, Array]:
        """Key and low bits of each element; see Histogram."""
        bits = floats.view(np.uint32).astype(np.int64)
        bits[bits == _SIGN] = 0
        shift = 23 - mantissa_bits
        keys = np.where(bits >= _SIGN, ~bits & (2 * _SIGN - 1), bits | _SIGN)
        return keys >> shift, bits & ((1 << shift) - 1)

    @staticmethod
    def powers(floats: Array) -> tuple[Array, Array]:
        """Sign and power of two that the mantissa is multiplied with, counted
        from 2^-149, and the mantissa, of each element."""
        bits = floats.view(np.uint32).astype(np.int64)
        exponent = bits >> 23 & 0xFF
        mantissa = bits & 0x7FFFFF
        mantissa += (exponent > 0) << 23
        return bits >> 31 << 8 | np.maximum(exponent, 1) - 1, mantissa

    @staticmethod
    def not_of_columns(mask: Array) -> Array:
        """Number of elements that are false in each column of [rows, columns,
        inner]."""
        found: Array = np.count_nonzero(~mask, axis=(0, 2))
        return found

    @staticmethod
    def embedded(array: Array, shape: Sequence[int], offset: Sequence[int],
                 none: Any) -> Array:
        """At that place in one of `shape` that is `none` elsewhere."""
        found = np.full(shape, none, array.dtype)
        found[tuple(slice(first, first + extent) for first, extent in
                    zip(offset, array.shape))] = array
        return found

    @staticmethod
    def arange(begin: int, end: int, like: Array) -> Array:
        """Integers."""
        del like
        return np.arange(begin, end)

    @staticmethod
    def sums(keys: Array, values: Sequence[Array], key_count: int
             ) -> tuple[Optional[Array], list[Array]]:
        """The distinct keys in order, and by them how many there are and the
        sums of values below 2^42. None in place of the keys: by all of them."""
        if key_count <= _DENSE_COUNT:
            return None, [np.bincount(keys, minlength=key_count), *(
                _sums(keys, value, key_count) for value in values)]
        found, places, counts = np.unique(keys, return_inverse=True,
                                          return_counts=True)
        return found, [counts, *(_sums(places, value, len(found))
                                 for value in values)]

    @staticmethod
    def places(counts: Array) -> Array:
        """Of those that are not 0."""
        return np.flatnonzero(counts)

    @staticmethod
    def sums_of_pairs(keys: Array, values: Sequence[Array]
                      ) -> tuple[Array, list[Array]]:
        """The distinct keys in order, and the sums by them."""
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        firsts = np.flatnonzero(np.diff(keys, prepend=-1))
        return keys[firsts], [np.add.reduceat(value[order], firsts)
                              if len(firsts) else value for value in values]

    @staticmethod
    def join(first: Array, second: Array) -> Array:
        """One behind the other."""
        return np.concatenate([first, second])

    @staticmethod
    def all_of_rows(mask: Array) -> Array:
        """True for each row that is true throughout."""
        found: Array = mask.all(1)
        return found

    @staticmethod
    def scaled(rows: Array, exponents: Sequence[int]) -> Array:
        """By 2^-exponent of each column."""
        # No float32 is as large as those of tiny steps.
        is_tiny = min(exponents, default=0) < -126
        one: Array = np.ones(1, np.float64 if is_tiny else np.float32)
        with np.errstate(over="ignore", under="ignore"):
            found: Array = rows * np.ldexp(
                one, -np.array(exponents, np.int32))
        return found

    @staticmethod
    def rounded(array: Array, limit: int) -> Array:
        """Integers in float64, ties to even."""
        found: Array = np.rint(np.clip(array, -limit, limit))
        return found.astype(np.float64)

    @staticmethod
    def product(codes: Array) -> Array:
        """The sum over rows of the products of two codes. Requires: so few
        rows that float64 is exact."""
        return (codes.T @ codes).astype(np.int64)

    @staticmethod
    def to_numpy(array: Array) -> Array:
        """A copy."""
        return np.array(array)


def _sums(places: Array, values: Array, count: int) -> Array:
    """By place. values: below 2^42."""
    found = np.zeros(count, np.int64)
    for begin in range(0, len(values), _EXACT_COUNT):
        at = slice(begin, begin + _EXACT_COUNT)
        for shift in (0, 32):
            part = values[at] >> shift & 0xFFFFFFFF
            if shift == 0 or part.any():
                found += np.bincount(places[at], part, count).astype(
                    np.int64) << shift
    return found
