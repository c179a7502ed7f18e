"""Makes blocks of q4_K, q5_K and q6_K, the same bytes as
client/files/gguf_encoders.cc, which says more: sums and roundings are in the
same order, in float32 but for what a super-block shares."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from quantd.tensor import Array

# Operators of numpy have no type.
_Reals = Any

MOST_ELEMENT = 2.0 ** 21
_SUPER_BLOCK = 256
# Super-blocks at once, so that temporary arrays stay small.
_BATCH = 256
_LANES = 8
_ROUNDER = np.float32(1.5 * 2 ** 23)
_LEAST_RANGE = np.float32(2.0 ** -60)
_MOST_HALF = 65504
_ROUNDS = 4
_LINE_BLOCK = 32
_SCALE_BLOCK = 16
_MOST_SIX_BITS = 63


def _sum(terms: _Reals) -> _Reals:
    """Of each row."""
    lanes = terms.reshape(len(terms), -1, _LANES)
    total = np.zeros((len(terms), _LANES), np.float32)
    for n in range(lanes.shape[1]):
        total = total + lanes[:, n]
    a, b, c, d, e, f, g, h = total.T
    return ((a + e) + (c + g)) + ((b + f) + (d + h))


def _code(value: _Reals, low: float, high: float) -> _Reals:
    clamped = np.minimum(np.maximum(value, np.float32(low)), np.float32(high))
    return clamped + _ROUNDER - _ROUNDER


def _inverse(scale: _Reals) -> _Reals:
    return np.where(scale == 0, np.float32(0),
                    np.float32(1) / np.where(scale == 0, np.float32(1), scale))


def _to_half(value: _Reals) -> _Reals:
    clamped = np.clip(value, -_MOST_HALF, _MOST_HALF).astype(np.float32)
    return clamped.astype(np.float16).astype(np.float32)


def _to_half_above(value: _Reals) -> _Reals:
    nearest = _to_half(value)
    above = (nearest.astype(np.float16).view(np.uint16) + 1).astype(
        np.uint16).view(np.float16).astype(np.float32)
    return np.where((nearest < value) & (nearest != _MOST_HALF), above, nearest)


def _half_bytes(value: _Reals) -> Array:
    # With one sign of zero.
    half: Array = (value + 0).astype(np.float16)[:, None].view(np.uint8)
    return half


def _largest(reals: _Reals) -> _Reals:
    """Of each row the first of the largest magnitude."""
    return reals[np.arange(len(reals)), np.abs(reals).argmax(axis=1)]


class _Lines:
    """q4_K and q5_K: x' = scale * code - minimum, of rows of blocks."""

    def __init__(self, x: _Reals, most: int) -> None:
        self._x = x.reshape(-1, _LINE_BLOCK)
        self._most = most

    def codes(self, scale: _Reals, minimum: _Reals) -> _Reals:
        return _code((self._x + minimum[:, None]) * _inverse(scale)[:, None],
                     0, self._most)

    def _error(self, scale: _Reals, minimum: _Reals) -> _Reals:
        code = self.codes(scale, minimum)
        error = self._x - (scale[:, None] * code - minimum[:, None])
        return _sum(error * error)

    def _sums(self, scale: _Reals, minimum: _Reals) -> tuple[_Reals, ...]:
        code = self.codes(scale, minimum)
        return (_sum(code), _sum(code * code), _sum(self._x),
                _sum(self._x * code))

    def _fit(self, scale: _Reals, minimum: _Reals) -> tuple[_Reals, _Reals]:
        q, qq, x, xq = self._sums(scale, minimum)
        count = np.float32(_LINE_BLOCK)
        determinant = count * qq - q * q
        with np.errstate(all="ignore"):
            fit = xq / qq
            free = (count * xq - q * x) / determinant
            free_minimum = (q * xq - qq * x) / determinant
        is_free = (determinant > 0) & (free_minimum > 0)
        fit = np.where(is_free, free, fit)
        stays = (qq == 0) | ~(fit > _LEAST_RANGE)
        return (np.where(stays, scale, fit), np.where(
            stays, minimum, np.where(is_free, free_minimum, np.float32(0))))

    def _find(self) -> tuple[_Reals, _Reals]:
        """The line of each block with the least error."""
        low = np.minimum(self._x.min(axis=1), np.float32(0))
        high = np.maximum(self._x.max(axis=1), low)
        has_range = high - low > _LEAST_RANGE
        best = [np.zeros_like(low), np.zeros_like(low)]
        least = np.full_like(low, np.inf)

        def attempt(scale: _Reals, minimum: _Reals) -> None:
            nonlocal least
            error = self._error(scale, minimum)
            better = error < least
            least = np.where(better, error, least)
            best[0] = np.where(better, scale, best[0])
            best[1] = np.where(better, minimum, best[1])

        span = np.where(has_range, high - low, np.float32(1))
        for n in range(33):
            codes = np.float32(self._most - 1) + np.float32(0.125) * np.float32(
                n)
            attempt(*self._fit(span / codes, -low))
        for _ in range(4):
            attempt(*self._fit(*best))
        return (np.where(has_range, best[0], np.float32(0)),
                np.where(has_range, best[1], -low))

    def _choose(self, lines: tuple[_Reals, _Reals], d: _Reals, dmin: _Reals
                ) -> tuple[_Reals, ...]:
        """Integers of each block, and errors of super-blocks."""
        parts = _SUPER_BLOCK // _LINE_BLOCK
        d, dmin = np.repeat(d, parts), np.repeat(dmin, parts)
        scale = _code(lines[0] * _inverse(d), 0, _MOST_SIX_BITS)
        minimum = _code(lines[1] * _inverse(dmin), 0, _MOST_SIX_BITS)
        least = np.full_like(scale, np.inf)
        chosen = [np.zeros_like(scale), np.zeros_like(scale)]
        for by in (-1, 0, 1):
            for and_by in (-1, 0, 1):
                s, m = scale + np.float32(by), minimum + np.float32(and_by)
                error = self._error(d * s, dmin * m)
                better = (error < least) & (s >= 0) & (s <= _MOST_SIX_BITS) & (
                    m >= 0) & (m <= _MOST_SIX_BITS)
                least = np.where(better, error, least)
                chosen[0] = np.where(better, s, chosen[0])
                chosen[1] = np.where(better, m, chosen[1])
        return chosen[0], chosen[1], _total(least, parts)

    def _fit_shared(self, scale: _Reals, minimum: _Reals, d: _Reals,
                    dmin: _Reals) -> tuple[_Reals, _Reals]:
        parts = _SUPER_BLOCK // _LINE_BLOCK
        q, qq, x, xq = (one.astype(np.float64) for one in self._sums(
            np.repeat(d, parts) * scale, np.repeat(dmin, parts) * minimum))
        s, m = scale.astype(np.float64), minimum.astype(np.float64)
        aa, ab, bb = (_total(one, parts) for one in (
            s * s * qq, s * m * q, m * m * float(_LINE_BLOCK)))
        xa, xb = _total(s * xq, parts), _total(m * x, parts)
        determinant = aa * bb - ab * ab
        with np.errstate(all="ignore"):
            alone = xa / aa
            free_d = (xa * bb - xb * ab) / determinant
            free_dmin = (xa * ab - xb * aa) / determinant
        is_alone = (bb == 0) & (aa > 0) & (xa > 0)
        is_free = (bb != 0) & (determinant > 0) & (free_d > 0) & (free_dmin > 0)
        return (np.where(is_alone, _to_half(alone), np.where(
            is_free, _to_half(free_d), d)),
                np.where(is_free, _to_half(free_dmin), dmin))

    def find(self) -> tuple[_Reals, ...]:
        """d, dmin of super-blocks; scale, minimum of blocks."""
        parts = _SUPER_BLOCK // _LINE_BLOCK
        lines = self._find()
        d, dmin = (_to_half_above(line.reshape(-1, parts).max(axis=1) /
                                  np.float32(_MOST_SIX_BITS))
                   for line in lines)
        best = [np.zeros_like(d), np.zeros_like(d),
                np.zeros_like(lines[0]), np.zeros_like(lines[0])]
        least = np.full(len(d), np.inf)
        goes_on = np.ones(len(d), bool)
        for _ in range(_ROUNDS):
            scale, minimum, error = self._choose(lines, d, dmin)
            goes_on = goes_on & (error < least)
            least = np.where(goes_on, error, least)
            in_blocks = np.repeat(goes_on, parts)
            best = [np.where(goes_on, d, best[0]),
                    np.where(goes_on, dmin, best[1]),
                    np.where(in_blocks, scale, best[2]),
                    np.where(in_blocks, minimum, best[3])]
            next_d, next_dmin = self._fit_shared(scale, minimum, d, dmin)
            goes_on = goes_on & ((next_d != d) | (next_dmin != dmin))
            d, dmin = next_d, next_dmin
        return tuple(best)


def _total(terms: _Reals, parts: int) -> _Reals:
    """float64, of so many terms each, one after another."""
    columns = terms.astype(np.float64).reshape(-1, parts)
    total = np.zeros(len(columns))
    for n in range(parts):
        total = total + columns[:, n]
    return total


def _encode_lines(x: _Reals, most: int) -> list[Array]:
    lines = _Lines(x, most)
    d, dmin, scale, minimum = lines.find()
    parts = _SUPER_BLOCK // _LINE_BLOCK
    codes = lines.codes(np.repeat(d, parts) * scale,
                        np.repeat(dmin, parts) * minimum).astype(
                            np.uint8).reshape(-1, parts, _LINE_BLOCK)
    s, m = (of.astype(np.uint8).reshape(-1, parts) for of in (scale, minimum))
    high_s, high_m = s[:, 4:], m[:, 4:]
    packed = [_half_bytes(d), _half_bytes(dmin),
              s[:, :4] | high_s >> 4 << 6, m[:, :4] | high_m >> 4 << 6,
              high_s & 15 | (high_m & 15) << 4]
    if most > 15:
        high = np.zeros((len(codes), _LINE_BLOCK), np.uint8)
        for n in range(parts):
            high |= codes[:, n] >> 4 << n
        packed.append(high)
    low = codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4
    packed.append(low.reshape(len(codes), -1))
    return packed


def _encode_q4_k(x: _Reals) -> list[Array]:
    return _encode_lines(x, 15)


def _encode_q5_k(x: _Reals) -> list[Array]:
    return _encode_lines(x, 31)


class _Scales:
    """q6_K: x' = scale * code, of rows of blocks."""

    def __init__(self, x: _Reals) -> None:
        self._x = x.reshape(-1, _SCALE_BLOCK)

    def codes(self, scale: _Reals) -> _Reals:
        return _code(self._x * _inverse(scale)[:, None], -32, 31)

    def _error(self, scale: _Reals) -> _Reals:
        error = self._x - scale[:, None] * self.codes(scale)
        return _sum(error * error)

    def _sums(self, scale: _Reals) -> tuple[_Reals, _Reals]:
        code = self.codes(scale)
        return _sum(code * code), _sum(self._x * code)

    def _find(self) -> _Reals:
        largest = _largest(self._x)
        has_scale = np.abs(largest) > _LEAST_RANGE
        largest = np.where(has_scale, largest, np.float32(1))
        best = np.zeros_like(largest)
        least = np.full_like(largest, np.inf)
        for sign in (-1, 1):
            for n in range(21):
                codes = np.float32(29) + np.float32(0.25) * np.float32(n)
                qq, xq = self._sums(np.float32(sign) * largest / codes)
                with np.errstate(all="ignore"):
                    scale = np.where(has_scale, xq / qq, np.float32(1))
                error = self._error(scale)
                better = error < least
                least = np.where(better, error, least)
                best = np.where(better, scale, best)
        return np.where(has_scale, best, np.float32(0))

    def find(self) -> tuple[_Reals, _Reals]:
        """d of super-blocks; scale of blocks."""
        parts = _SUPER_BLOCK // _SCALE_BLOCK
        scales = self._find()
        largest = _largest(scales.reshape(-1, parts))
        d = _to_half_above(np.abs(largest) / np.float32(128))
        d = np.where(largest > 0, -d, d)
        best = [np.zeros_like(d), np.zeros_like(scales)]
        least = np.full(len(d), np.inf)
        goes_on = np.ones(len(d), bool)
        for _ in range(_ROUNDS):
            scale, error = self._choose(scales, d)
            goes_on = goes_on & (error < least)
            least = np.where(goes_on, error, least)
            best = [np.where(goes_on, d, best[0]),
                    np.where(np.repeat(goes_on, parts), scale, best[1])]
            qq, xq = (one.astype(np.float64) for one in self._sums(
                np.repeat(d, parts) * scale))
            s = scale.astype(np.float64)
            aa, xa = _total(s * s * qq, parts), _total(s * xq, parts)
            with np.errstate(all="ignore"):
                fit = np.where(aa > 0, _to_half(xa / aa), d)
            goes_on = goes_on & (fit != d)
            d = fit
        return best[0], best[1]

    def _choose(self, scales: _Reals, d: _Reals) -> tuple[_Reals, _Reals]:
        parts = _SUPER_BLOCK // _SCALE_BLOCK
        d = np.repeat(d, parts)
        scale = _code(scales * _inverse(d), -128, 127)
        least = np.full_like(scale, np.inf)
        chosen = np.zeros_like(scale)
        for by in (-1, 0, 1):
            s = scale + np.float32(by)
            error = self._error(d * s)
            better = (error < least) & (s >= -128) & (s <= 127)
            least = np.where(better, error, least)
            chosen = np.where(better, s, chosen)
        return chosen, _total(least, parts)


def _encode_q6_k(x: _Reals) -> list[Array]:
    scales = _Scales(x)
    d, scale = scales.find()
    parts = _SUPER_BLOCK // _SCALE_BLOCK
    codes = (scales.codes(np.repeat(d, parts) * scale) + 32).astype(
        np.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    high = np.zeros((len(codes), 2, 32), np.uint8)
    for n in range(4):
        high |= codes[:, :, n] >> 4 << 2 * n
    return [low.reshape(len(codes), -1), high.reshape(len(codes), -1),
            scale.astype(np.int8).view(np.uint8).reshape(-1, parts),
            _half_bytes(d)]


ENCODERS: dict[str, Callable[[_Reals], list[Array]]] = {
    "q4_K": _encode_q4_k, "q5_K": _encode_q5_k, "q6_K": _encode_q6_k}


def encode(elements: Array, kind: str) -> Array:
    """Blocks, a row each, of float32 elements in rows of whole blocks, finite
    and at most MOST_ELEMENT in magnitude."""
    rows = elements.reshape(-1, _SUPER_BLOCK)
    return np.concatenate([
        np.concatenate(ENCODERS[kind](rows[begin:begin + _BATCH]), axis=1)
        for begin in range(0, len(rows), _BATCH)])
