"""Scales that follow from codes, and what codes of floats stand for."""

from __future__ import annotations

from typing import Optional, Protocol

import numpy as np

from quantd import errors
from quantd.tensor import Array, format_options
from quantd.v1 import encoding_pb2 as pb


class CodedScales(Protocol):
    """Fields of an Encoding."""

    @property
    def format(self) -> str:
        """See Encoding."""

    @property
    def scale_code(self) -> Array:
        """See Encoding."""

    @property
    def outer_scale(self) -> Array:
        """See Encoding."""

    @property
    def stored_scale_type(self) -> str:
        """See Encoding."""

    @property
    def block_size(self) -> tuple[int, ...]:
        """See Encoding."""

    @property
    def outer_block_size(self) -> tuple[int, ...]:
        """See Encoding."""

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """See Encoding."""


def table(name: str, codebook: Array) -> Optional[Array]:
    """The value of each code before the scale, as float32; None for
    integers.

    Raises: ARGUMENT_INVALID for a format without a definition here.
    """
    options = format_options(name)
    if options.kind == pb.CODE_KIND_INTEGER:
        return None
    if options.kind == pb.CODE_KIND_CODEBOOK:
        return np.asarray(options.codebook or codebook, np.float32)
    layout = options.float_layout
    exponent_bits, mantissa_bits = layout.exponent_bits, layout.mantissa_bits
    codes = np.arange(1 << 1 + exponent_bits + mantissa_bits)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    is_normal = exponent > 0
    values = np.ldexp(
        mantissa + is_normal * float(1 << mantissa_bits),
        np.where(is_normal, exponent, 1) - layout.bias - mantissa_bits)
    is_negative = codes >> exponent_bits + mantissa_bits == 1
    values[is_negative] *= -1
    if layout.specials == pb.FLOAT_SPECIALS_FNUZ:
        values[is_negative & (exponent == 0) & (mantissa == 0)] = np.nan
    elif layout.specials == pb.FLOAT_SPECIALS_IEEE:
        last = exponent == (1 << exponent_bits) - 1
        values[last] = np.where(mantissa[last] > 0, np.nan,
                                np.copysign(np.inf, values[last]))
    elif layout.specials == pb.FLOAT_SPECIALS_NAN:
        values[(exponent == (1 << exponent_bits) - 1)
               & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    elif layout.specials != pb.FLOAT_SPECIALS_NONE:
        raise errors.argument_invalid(
            f"expected a format whose codes are known here, got {name}; let "
            f"the server dequantize it", "encoding")
    return values.astype(np.float32)


def scales(encoding: CodedScales) -> Array:
    """Scales that follow from scale_code and outer_scale, as float32; none
    where these do not go together."""
    code, outer = encoding.scale_code, encoding.outer_scale.reshape(-1)
    if encoding.stored_scale_type == "e8m0":
        exponent = (code.astype(np.int32) - 127 +
                    format_options(encoding.format).step_exponent)
        found: Array = np.ldexp(np.float32(1), exponent)
        found[code == 255] = np.nan
        return found.reshape(encoding.scale_shape or code.shape)
    values: Array = code.astype(np.float32)
    if encoding.stored_scale_type == "e4m3":
        e4m3 = table("float8_e4m3fn", np.empty(0, np.float32))
        assert e4m3 is not None
        values = np.take(e4m3, code)
    if outer.size == 1:
        values = values * outer
        return values
    shape = encoding.scale_shape
    if not shape or code.size != int(np.prod(shape, dtype=np.int64)):
        return np.empty(0, np.float32)
    values = values.reshape(shape)
    inner = encoding.block_size or (0,) * len(shape)
    sizes = encoding.outer_block_size or (0,) * len(shape)
    # Sizes of the outer blocks, in scales.
    blocks = [size // block if size and block else count
              for size, block, count in zip(sizes, inner, shape)]
    counts = [-(-count // max(block, 1)) for count, block in zip(shape, blocks)]
    if outer.size != int(np.prod(counts, dtype=np.int64)):
        return np.empty(0, np.float32)
    outer = outer.reshape(counts)
    for axis, block in enumerate(blocks):
        if counts[axis] > 1:
            outer = np.take(np.repeat(outer, block, axis), range(shape[axis]),
                            axis)
    values = values * outer
    return values
