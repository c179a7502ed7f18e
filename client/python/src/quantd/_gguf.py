"""The types of ggml's tensors. client/files/gguf_types.cc has the same table,
and says how a block lies in its bytes."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from typing import Any, Callable, Optional, Sequence

import numpy as np

from quantd.tensor import Array

# An Array; operators of numpy have no type.
_Reals = Any
# Blocks that are decoded at once, so that temporary arrays stay small.
_BATCH = 4096
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
                np.float32)
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53,
                 69, 89, 113], np.float32)
_IQ1 = (-1, 0, 1)
_IQ2 = (8, 25, 43)
_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)
_IQ1_DELTA = np.float32(0.125)
# Signs of 8 elements by their bits, and by the first 7 where the number of
# negative ones is even.
_SIGNS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, -1,
                  1).astype(np.float32)
_EVEN_SIGNS = np.where(np.arange(8) == 7,
                       _SIGNS[:128].prod(axis=1, keepdims=True), _SIGNS[:128])
# Halves of FP8 E4M3 without their sign, where NaN is 0.
_NVFP4_SCALES = np.array(
    [0 if bits == 0x7F else
     np.ldexp(bits & 7, -10) if not bits >> 3 & 15 else
     np.ldexp(8 + (bits & 7), (bits >> 3 & 15) - 11) for bits in range(256)],
    np.float32)


def _real(codes: Array) -> Array:
    return codes.astype(np.float32)


def _half(block: Array, at: int) -> Array:
    return _real(block[:, at:at + 2].copy().view("<f2"))


def _words(block: Array, begin: int, end: int, kind: str) -> Array:
    return block[:, begin:end].copy().view(kind)


def _fields(data: Array, bits: int) -> Array:
    """Fields of so many bits: of all bytes the lowest, then of all the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields: Array = data[..., None, :] >> shifts & (2 ** bits - 1)
    return fields


def _flat(fields: Array) -> Array:
    return fields.reshape(len(fields), -1)


def _split(data: Array, shifts: Sequence[int], mask: int) -> Array:
    """Fields word by word."""
    return _flat(data[..., None] >> np.array(shifts, data.dtype) & mask)


def _nibbles(data: Array) -> Array:
    return _split(data, (0, 4), 15)


def _spread(scale: Array, codes: Array) -> tuple[Array, Array]:
    """Scales with an axis more, and codes in as many parts."""
    return scale[..., None], _real(codes).reshape(*scale.shape, -1)


@functools.lru_cache(maxsize=None)
def _grid(begin: int, count: int, values: tuple[int, ...]) -> Array:
    """The points of a grid; client/files/gguf_grids.h says how they lie."""
    text = importlib.resources.files("quantd").joinpath(
        "gguf_grids.txt").read_text(encoding="utf-8")
    points = np.frombuffer(bytes.fromhex(text), ">u2")
    shifts = range(0, 12, 3) if len(values) == 8 else range(0, 16, 2)
    digits = _split(points[begin:begin + count, None], shifts,
                    7 if len(values) == 8 else 3)
    return np.array(values, np.float32)[digits]


def _q1_0(block: Array) -> _Reals:
    d = _half(block, 0)
    return np.where(np.unpackbits(block[:, 2:], axis=1, bitorder="little"), d,
                    -d)


def _q2_0(block: Array) -> _Reals:
    return (_real(_split(block[:, 2:], (0, 2, 4, 6), 3)) - 1) * _half(block, 0)


def _q4_0(block: Array) -> _Reals:
    return (_real(_flat(_fields(block[:, 2:], 4))) - 8) * _half(block, 0)


def _q4_1(block: Array) -> _Reals:
    return (_real(_flat(_fields(block[:, 4:], 4))) * _half(block, 0) +
            _half(block, 2))


def _five_bits(high: Array, low: Array) -> Array:
    bits = np.unpackbits(high, axis=1, bitorder="little")
    return _real(_flat(_fields(low, 4)) | bits << 4)


def _q5_0(block: Array) -> _Reals:
    return (_five_bits(block[:, 2:6], block[:, 6:]) - 16) * _half(block, 0)


def _q5_1(block: Array) -> _Reals:
    return (_five_bits(block[:, 4:8], block[:, 8:]) * _half(block, 0) +
            _half(block, 2))


def _q8_0(block: Array) -> _Reals:
    return _real(block[:, 2:].view(np.int8)) * _half(block, 0)


def _q8_1(block: Array) -> _Reals:
    return _real(block[:, 4:].view(np.int8)) * _half(block, 0)


def _q8_k(block: Array) -> _Reals:
    return _real(block[:, 4:260].view(np.int8)) * _words(block, 0, 4, "<f4")


def _crumbs(block: Array, begin: int) -> Array:
    return _fields(block[:, begin:begin + 64].reshape(-1, 2, 32), 2)


def _q2_k(block: Array) -> _Reals:
    scale, codes = _spread(_half(block, 80) * _real(block[:, :16] & 15),
                           _crumbs(block, 16))
    minimum = _half(block, 82) * _real(block[:, :16] >> 4)
    return scale * codes - minimum[..., None]


def _q3_k(block: Array) -> _Reals:
    bits = (_flat(_fields(block[:, 96:104], 4)) |
            _flat(_fields(block[:, 104:108], 2)) << 4)
    high = _flat(_fields(block[:, :32], 1))
    scale, codes = _spread(_half(block, 108) * (_real(bits) - 32),
                           _flat(_crumbs(block, 32)) | high << 2)
    return scale * (codes - 4)


def _scales_and_minima(block: Array) -> tuple[Array, Array]:
    scales, minima, both = (block[:, begin:begin + 4] for begin in (4, 8, 12))
    return (
        _half(block, 0) * _real(np.hstack(
            [scales & 63, both & 15 | scales >> 6 << 4])),
        _half(block, 2) * _real(np.hstack(
            [minima & 63, both >> 4 | minima >> 6 << 4])))


def _q4_k(block: Array) -> _Reals:
    scale, minimum = _scales_and_minima(block)
    scale, codes = _spread(scale, _fields(block[:, 16:].reshape(-1, 4, 32), 4))
    return scale * codes - minimum[..., None]


def _q5_k(block: Array) -> _Reals:
    scale, minimum = _scales_and_minima(block)
    low = _flat(_fields(block[:, 48:].reshape(-1, 4, 32), 4))
    high = _flat(_fields(block[:, 16:48], 1))
    scale, codes = _spread(scale, low | high << 4)
    return scale * codes - minimum[..., None]


def _q6_k(block: Array) -> _Reals:
    low = _flat(_fields(block[:, :128].reshape(-1, 2, 64), 4))
    scale, codes = _spread(
        _half(block, 208) * _real(block[:, 192:208].view(np.int8)),
        low | _flat(_crumbs(block, 128)) << 4)
    return scale * (codes - 32)


def _tq1_0(block: Array) -> _Reals:
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    rest = np.hstack([_flat(block[:, None, begin:end] * powers[:count])
                      for begin, end, count in ((0, 32, 5), (32, 48, 5),
                                                (48, 52, 4))])
    return (_real(rest.astype(np.uint16) * 3 >> 8) - 1) * _half(block, 52)


def _tq2_0(block: Array) -> _Reals:
    return (_real(_flat(_crumbs(block, 0))) - 1) * _half(block, 64)


def _mxfp4(block: Array) -> _Reals:
    scale = np.ldexp(np.float32(1), block[:, :1].astype(np.int32) - 128)
    return _FP4[_flat(_fields(block[:, 1:], 4))] * scale


def _nvfp4(block: Array) -> _Reals:
    codes = _fields(block[:, 4:].reshape(-1, 4, 8), 4).reshape(-1, 4, 16)
    return _FP4[codes] * _NVFP4_SCALES[block[:, :4]][..., None]


def _iq4_nl(block: Array) -> _Reals:
    return _half(block, 0) * _IQ4[_flat(_fields(block[:, 2:], 4))]


def _iq4_xs(block: Array) -> _Reals:
    high = _split(_words(block, 2, 4, "<u2"), range(0, 16, 2), 3)
    bits = _nibbles(block[:, 4:8]) | high << 4
    codes = _fields(block[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 8, 32)
    return (_half(block, 0) * (_real(bits) - 32))[..., None] * _IQ4[codes]


def _middle(d: Array, codes: Array, factor: float) -> _Reals:
    return d * (np.float32(0.5) + _real(codes)) * np.float32(factor)


def _on_grid(scale: Array, points: Array, signs: Array) -> _Reals:
    """scale: for as many elements each as there are scales to 256."""
    scale = np.repeat(scale, 32 // scale.shape[1], axis=1)[..., None]
    return scale * points.reshape(-1, 32, 8) * signs.reshape(-1, 32, 8)


def _iq2_xxs(block: Array) -> _Reals:
    parts = block[:, 2:].reshape(-1, 8, 8)
    bits = parts[..., 4:].copy().view("<u4")[..., 0]
    return _on_grid(_middle(_half(block, 0), bits >> 28, 0.25),
                    _grid(2048, 256, _IQ2)[parts[..., :4]],
                    _EVEN_SIGNS[_split(bits, (0, 7, 14, 21), 127)])


def _iq2_xs(block: Array) -> _Reals:
    bits = _words(block, 2, 66, "<u2")
    return _on_grid(_middle(_half(block, 0), _nibbles(block[:, 66:]), 0.25),
                    _grid(2304, 512, _IQ2)[bits & 511], _EVEN_SIGNS[bits >> 9])


def _iq2_s(block: Array) -> _Reals:
    high = _split(block[:, 66:74], (0, 2, 4, 6), 3).astype(np.uint16)
    return _on_grid(_middle(_half(block, 0), _nibbles(block[:, 74:]), 0.25),
                    _grid(2816, 1024, _IQ2)[block[:, 2:34] | high << 8],
                    _SIGNS[block[:, 34:66]])


def _iq3_xxs(block: Array) -> _Reals:
    bits = _words(block, 66, 98, "<u4")
    return _on_grid(_middle(_half(block, 0), bits >> 28, 0.5),
                    _grid(3840, 256, _IQ3_XXS)[block[:, 2:66]],
                    _EVEN_SIGNS[_split(bits, (0, 7, 14, 21), 127)])


def _iq3_s(block: Array) -> _Reals:
    high = np.unpackbits(block[:, 66:74], axis=1,
                         bitorder="little").astype(np.uint16)
    scale = _half(block, 0) * (1 + 2 * _real(_nibbles(block[:, 106:])))
    return _on_grid(scale, _grid(4096, 512, _IQ3_S)[block[:, 2:66] | high << 8],
                    _SIGNS[block[:, 74:106]])


def _on_iq1_grid(scale: Array, indices: Array, is_down: Array) -> _Reals:
    delta = np.where(is_down, -_IQ1_DELTA, _IQ1_DELTA)
    return (np.repeat(scale, 32 // scale.shape[1], axis=1)[..., None] *
            (_grid(0, 2048, _IQ1)[indices] + delta[..., None]))


def _iq1_s(block: Array) -> _Reals:
    bits = _words(block, 34, 50, "<u2")
    high = _split(bits, (0, 3, 6, 9), 7)
    return _on_iq1_grid(_half(block, 0) * (2 * _real(bits >> 12 & 7) + 1),
                        block[:, 2:34] | high << 8,
                        np.repeat(bits >> 15, 4, axis=1))


def _iq1_m(block: Array) -> _Reals:
    scales = _words(block, 48, 56, "<u2")
    nibbles = _nibbles(block[:, 32:48]).astype(np.uint16)
    half = (scales >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(
        axis=1, keepdims=True, dtype=np.uint16)
    scale = 2 * _real(_split(scales, (0, 3, 6, 9), 7)) + 1
    return _on_iq1_grid(_real(half.view("<f2")) * scale,
                        block[:, :32] | (nibbles & 7) << 8, nibbles >> 3)


@dataclasses.dataclass(frozen=True)
class Type:
    """A type. Elements lie in blocks along the innermost dimension.

    name: as ggml spells it.
    dtype: safetensors' name of a plain type; F32 for blocks.
    decode_blocks: makes rows of elements of rows of bytes; None for a plain
        type.
    """

    name: str
    block_elements: int
    block_bytes: int
    dtype: str = "F32"
    decode_blocks: Optional[Callable[[Array], _Reals]] = None

    def decode(self, data: Array) -> Array:
        """The bytes of float32 of the bytes of blocks, the same bits as ggml
        makes of them."""
        assert self.decode_blocks is not None
        blocks = data.reshape(-1, self.block_bytes)
        reals = np.empty((len(blocks), self.block_elements), np.float32)
        # An infinite scale is no error.
        with np.errstate(invalid="ignore", over="ignore"):
            for begin in range(0, len(blocks), _BATCH):
                batch = slice(begin, begin + _BATCH)
                reals[batch] = _flat(self.decode_blocks(blocks[batch]))
        return reals.reshape(-1).view(np.uint8)


TYPES = {
    0: Type("f32", 1, 4, "F32"), 1: Type("f16", 1, 2, "F16"),
    2: Type("q4_0", 32, 18, decode_blocks=_q4_0),
    3: Type("q4_1", 32, 20, decode_blocks=_q4_1),
    6: Type("q5_0", 32, 22, decode_blocks=_q5_0),
    7: Type("q5_1", 32, 24, decode_blocks=_q5_1),
    8: Type("q8_0", 32, 34, decode_blocks=_q8_0),
    9: Type("q8_1", 32, 36, decode_blocks=_q8_1),
    10: Type("q2_K", 256, 84, decode_blocks=_q2_k),
    11: Type("q3_K", 256, 110, decode_blocks=_q3_k),
    12: Type("q4_K", 256, 144, decode_blocks=_q4_k),
    13: Type("q5_K", 256, 176, decode_blocks=_q5_k),
    14: Type("q6_K", 256, 210, decode_blocks=_q6_k),
    15: Type("q8_K", 256, 292, decode_blocks=_q8_k),
    16: Type("iq2_xxs", 256, 66, decode_blocks=_iq2_xxs),
    17: Type("iq2_xs", 256, 74, decode_blocks=_iq2_xs),
    18: Type("iq3_xxs", 256, 98, decode_blocks=_iq3_xxs),
    19: Type("iq1_s", 256, 50, decode_blocks=_iq1_s),
    20: Type("iq4_nl", 32, 18, decode_blocks=_iq4_nl),
    21: Type("iq3_s", 256, 110, decode_blocks=_iq3_s),
    22: Type("iq2_s", 256, 82, decode_blocks=_iq2_s),
    23: Type("iq4_xs", 256, 136, decode_blocks=_iq4_xs),
    24: Type("i8", 1, 1, "I8"), 25: Type("i16", 1, 2, "I16"),
    26: Type("i32", 1, 4, "I32"), 27: Type("i64", 1, 8, "I64"),
    28: Type("f64", 1, 8, "F64"),
    29: Type("iq1_m", 256, 56, decode_blocks=_iq1_m),
    30: Type("bf16", 1, 2, "BF16"),
    34: Type("tq1_0", 256, 54, decode_blocks=_tq1_0),
    35: Type("tq2_0", 256, 66, decode_blocks=_tq2_0),
    39: Type("mxfp4", 32, 17, decode_blocks=_mxfp4),
    40: Type("nvfp4", 64, 36, decode_blocks=_nvfp4),
    41: Type("q1_0", 128, 18, decode_blocks=_q1_0),
    42: Type("q2_0", 64, 18, decode_blocks=_q2_0),
}
