"""What codes stand for, computed here: the definitions of
proto/quantd/v1/encoding.proto in numpy."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import numpy as np

from quantd import errors
from quantd.encoding import Encoding
from quantd.tensor import ELEMENT_DTYPES, Array, format_info, unpack

# (exponent bits, mantissa bits, bias, specials) by the end of the name.
# Specials: "": numbers, all of them; "nan": the largest pattern, with either
# sign, is NaN; "ieee": the largest exponent is infinity and NaN; "fnuz": what
# would be negative zero is NaN.
_FLOATS = {
    "e4m3fn": (4, 3, 7, "nan"), "e4m3": (4, 3, 7, "nan"),
    "e5m2": (5, 2, 15, "ieee"), "e4m3fnuz": (4, 3, 8, "fnuz"),
    "e5m2fnuz": (5, 2, 16, "fnuz"), "e2m3": (2, 3, 1, ""),
    "e3m2": (3, 2, 3, ""), "e2m1": (2, 1, 1, ""),
}
# The quantiles of QLoRA.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0)


def table(name: str, codebook: Array) -> Optional[Array]:
    """The value of each code before the scale, as float32; None for
    integers.

    Raises: ARGUMENT_INVALID for a format without a definition here.
    """
    if format_info(name).is_integer:
        return None
    if name == "nf4":
        return np.array(_NF4, np.float32)
    if name.startswith("codebook"):
        return codebook.astype(np.float32)
    suffix = "e2m1" if name == "nvfp4" else name.rpartition("_")[2]
    if suffix not in _FLOATS:
        raise errors.argument_invalid(
            f"expected a format whose codes are known here, got {name}; let "
            f"the server dequantize it", "encoding")
    exponent_bits, mantissa_bits, bias, specials = _FLOATS[suffix]
    codes = np.arange(1 << 1 + exponent_bits + mantissa_bits)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    is_normal = exponent > 0
    values = np.ldexp(
        mantissa + is_normal * float(1 << mantissa_bits),
        np.where(is_normal, exponent, 1) - bias - mantissa_bits)
    is_negative = codes >> exponent_bits + mantissa_bits == 1
    values[is_negative] *= -1
    if specials == "fnuz":
        values[is_negative & (exponent == 0) & (mantissa == 0)] = np.nan
    elif specials == "ieee":
        last = exponent == (1 << exponent_bits) - 1
        values[last] = np.where(mantissa[last] > 0, np.nan,
                                np.copysign(np.inf, values[last]))
    elif specials == "nan":
        values[(exponent == (1 << exponent_bits) - 1)
               & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    return values.astype(np.float32)


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
        elif encoding.zero_point.any():
            reals = (plain.astype(np.int32) - _spread(
                encoding.zero_point, encoding, shape)).astype(dtype)
        else:
            reals = plain.astype(dtype)
        reals = reals * _spread(encoding.scale, encoding, shape).astype(dtype)
        if element_type == "bfloat16":
            return _to_bfloat16(reals)
        return reals.astype(ELEMENT_DTYPES[element_type], copy=False)


def limits(encoding: Encoding) -> tuple[float, float]:
    """The smallest and the largest real that has a code, over all scales."""
    info = format_info(encoding.format)
    scale = encoding.scale.ravel().astype(np.float64)
    scale = scale[np.isfinite(scale)]
    if not scale.size:
        return 0.0, 0.0
    values = table(info.name, encoding.codebook)
    if values is not None:
        finite = values[np.isfinite(values)]
        ends = np.outer(scale, [finite.min(), finite.max()])
        return float(ends.min()), float(ends.max())
    lowest = -(1 << info.bits - 1) if info.is_signed else 0
    qmin = lowest if encoding.qmin is None else encoding.qmin
    qmax = (lowest + (1 << info.bits) - 1 if encoding.qmax is None
            else encoding.qmax)
    zero_point = encoding.zero_point.ravel().astype(np.float64)
    if zero_point.size != scale.size:
        zero_point = np.zeros_like(scale)
    return (float(((qmin - zero_point) * scale).min()),
            float(((qmax - zero_point) * scale).max()))
