"""Numbers that codes stand for, computed here: the definitions of
proto/quantd/v1/encoding.proto in numpy."""

from __future__ import annotations

import warnings
from typing import Any, Sequence

import numpy as np

from quantd import errors
from quantd._scales import table
from quantd.encoding import Encoding
from quantd.tensor import ELEMENT_DTYPES, Array, format_info, unpack


def _spread(numbers: Array, encoding: Encoding, shape: Sequence[int]) -> Array:
    """One entry per scale, so that it goes with an array of `shape`."""
    if numbers.size == 1 or not shape:
        return numbers.reshape(-1)[:1].reshape((1,) * len(shape))
    sizes = encoding.block_size or (0,) * len(shape)
    if len(sizes) != len(shape):
        raise errors.argument_invalid(
            f"expected block sizes for {len(shape)} dimensions, got {sizes}",
            "encoding")
    blocks = [size or max(extent, 1) for size, extent in zip(sizes, shape)]
    counts = [-(-extent // block) for extent, block in zip(shape, blocks)]
    try:
        numbers = numbers.reshape(counts)
    except ValueError as error:
        raise errors.argument_invalid(
            f"expected {counts} scales for a tensor of {tuple(shape)}, got "
            f"{numbers.size}", "encoding") from error
    for axis, block in enumerate(blocks):
        if block > 1 and counts[axis] > 1:
            numbers = np.repeat(numbers, block, axis)
            numbers = np.take(numbers, range(shape[axis]), axis)
    return numbers


def _to_bfloat16(reals: Array) -> Array:
    """The upper half of float32, to nearest even."""
    bits = reals.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1)
    # Rounding would carry a NaN over into another number.
    rounded = np.where(np.isnan(reals), bits | np.uint32(0x400000), rounded)
    return (rounded >> 16).astype(np.uint16)


# The bits of an element as an integer, those of infinity, and the largest
# number.
_INFINITIES: dict[str, tuple[Any, int, float]] = {
    "float16": (np.uint16, 0x7C00, 65504.),
    "bfloat16": (np.uint16, 0x7F80, float.fromhex("0x1.FEp127")),
    "float32": (np.uint32, 0x7F800000, float(np.finfo(np.float32).max)),
    "float64": (np.uint64, 0x7FF << 52, float(np.finfo(np.float64).max))}
# Elements that are looked at at a time.
_PIECE = 1 << 20


def infinities_text(count: int, element_type: str) -> str:
    """Why elements are infinite that codes stand for."""
    largest = _INFINITIES[element_type][2]
    return (f"{count} elements are infinite: their codes are infinity, or "
            f"beyond {element_type}, which has at most {largest:g} in "
            "magnitude")


def warn_of_infinities(reals: Array, element_type: str, name: str) -> None:
    """reals: those of a tensor; bfloat16 as uint16."""
    kind, infinity, _ = _INFINITIES[element_type]
    bits = reals.reshape(-1).view(kind)
    # Without signs.
    count = sum(np.count_nonzero(
        bits[begin:begin + _PIECE] << kind(1) == kind(infinity << 1))
                for begin in range(0, bits.size, _PIECE))
    if count:
        warnings.warn(f"quantd: {f'tensor {name!r}: ' if name else ''}"
                      f"{infinities_text(count, element_type)}",
                      RuntimeWarning, stacklevel=3)


def warn_of_not_finite(name: str, format_name: str, nan_count: int,
                       infinity_count: int, stacklevel: int) -> None:
    """Warns of a tensor that was quantized; the codes do not tell."""
    if nan_count or infinity_count:
        warnings.warn(
            f"quantd: tensor {name!r} has {nan_count} NaN and {infinity_count} "
            "infinities" + (": all elements of their blocks become NaN"
                            if format_name.startswith("mx") else ""),
            RuntimeWarning, stacklevel=stacklevel + 1)


def coarse_scale_count(encoding: Encoding) -> int:
    """How many float16 scales are so small, below 2^-20, that rounding them up
    to the next one makes them larger by a sixteenth or more."""
    if encoding.stored_scale_type != "float16":
        return 0
    return int(np.count_nonzero(encoding.scale < 2**-20))


def warn_of_coarse_scales(name: str, count: int, stacklevel: int) -> None:
    """Warns of a tensor that was quantized."""
    if count:
        warnings.warn(
            f"quantd: tensor {name!r}: {count} scales are below 2^-20, where "
            "float16 has few numbers: their elements lose much",
            RuntimeWarning, stacklevel=stacklevel + 1)


def dequantize(codes: Array, encoding: Encoding, shape: Sequence[int],
               element_type: str) -> Array:
    """x' of every code, in `shape`, with the bits that the service answers;
    bfloat16 as uint16.

    Raises: ARGUMENT_INVALID.
    """
    count = int(np.prod(shape, dtype=np.int64))
    plain = unpack(codes, encoding.format, count).reshape(shape)
    info = format_info(encoding.format)
    if info.bits > 8 and plain.dtype.itemsize == 1:
        plain = plain.view(info.dtype)
    dtype: Any = np.float64 if element_type == "float64" else np.float32
    values = table(info.name, encoding.codebook)
    with np.errstate(over="ignore", invalid="ignore"):
        if values is not None:
            reals = np.take(values, plain.view(np.uint8), mode="clip").astype(
                dtype, copy=False)
        elif encoding.zero_points_are_real:
            reals = plain.astype(dtype) - _spread(
                encoding.zero_point, encoding, shape).astype(dtype)
        elif encoding.zero_point.any():
            reals = (plain.astype(np.int32) - _spread(
                encoding.zero_point, encoding, shape)).astype(dtype)
        else:
            reals = plain.astype(dtype)
        reals = reals * _spread(encoding.scale, encoding, shape).astype(dtype)
        if element_type == "bfloat16":
            return _to_bfloat16(reals)
        return reals.astype(ELEMENT_DTYPES[element_type], copy=False)
