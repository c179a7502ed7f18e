"""Makes blocks of GGUF in numpy, the same bytes as client/files/gguf_encoders.cc,
which says more: sums and roundings are in the same order, in float32 but for
what a super-block shares."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Sequence

import numpy as np

from quantd.tensor import Array

# Operators of numpy have no type.
_Reals = Any

_SUPER_BLOCK = 256
# Elements at once, so that temporary arrays stay small.
_BATCH = 256 * _SUPER_BLOCK
_LANES = 8
_ROUNDER = np.float32(1.5 * 2 ** 23)
_LEAST_RANGE = np.float32(2.0 ** -60)
_MOST_HALF = 65504
_ROUNDS = 4
# Beyond so many times the error that blocks have by themselves, other numbers
# are tried for what a super-block shares.
_SHARED_SHARE = 4
# Least weight: elements that count nothing are not to become anything.
_LEAST_WEIGHT = 1e-6
_LINE_BLOCK = 32
_SCALE_BLOCK = 16
_MOST_SIX_BITS = 63
# Steps and fits of searches whose scales are stored in float16.
_HALF_STEPS = 7
_HALF_STEP = np.float32(0.5)
_HALF_FITS = 2


def _sum(terms: _Reals) -> _Reals:
    """Sum of each row."""
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
    """First number of the largest magnitude in each row."""
    return reals[np.arange(len(reals)), np.abs(reals).argmax(axis=1)]


class _Best:
    """Values with the least error of each row, out of those that were
    offered."""

    def __init__(self, error: _Reals, *values: _Reals) -> None:
        self._error = error
        self.values = values

    def offer(self, error: _Reals, *values: _Reals) -> None:
        better = error < self._error
        self._error = np.where(better, error, self._error)
        self.values = tuple(np.where(better, new, old)
                            for new, old in zip(values, self.values))


def packed_codes(codes: Array, bits: int) -> list[Array]:
    """Bytes of blocks of 32 codes of 4, 5 or 8 bits."""
    if bits == 8:
        return [codes]
    high = [np.packbits(codes >> 4, axis=1, bitorder="little")]
    half = _LINE_BLOCK // 2
    return (high if bits == 5 else []) + [
        codes[:, :half] & 15 | (codes[:, half:] & 15) << 4]


class _Lines:
    """x' = scale * code - minimum, of rows of blocks; weights of errors."""

    def __init__(self, x: _Reals, weights: _Reals, most: int) -> None:
        self._x = x.reshape(-1, _LINE_BLOCK)
        self._weights = weights.reshape(-1, _LINE_BLOCK)
        self._most = most

    def codes(self, scale: _Reals, minimum: _Reals) -> _Reals:
        return _code((self._x + minimum[:, None]) * _inverse(scale)[:, None],
                     0, self._most)

    def _error(self, scale: _Reals, minimum: _Reals) -> _Reals:
        code = self.codes(scale, minimum)
        error = self._x - (scale[:, None] * code - minimum[:, None])
        return _sum(error * error * self._weights)

    def _sums(self, scale: _Reals, minimum: _Reals) -> tuple[_Reals, ...]:
        code = self.codes(scale, minimum)
        q = code * self._weights
        return (_sum(self._weights), _sum(q), _sum(code * q),
                _sum(self._x * self._weights), _sum(self._x * q))

    def _fit(self, scale: _Reals, minimum: _Reals) -> tuple[_Reals, _Reals]:
        one, q, qq, x, xq = self._sums(scale, minimum)
        determinant = one * qq - q * q
        with np.errstate(all="ignore"):
            fit = xq / qq
            free = (one * xq - q * x) / determinant
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
        none = np.zeros_like(low)
        best = _Best(np.full_like(low, np.inf), none, none)

        def attempt(scale: _Reals, minimum: _Reals) -> None:
            best.offer(self._error(scale, minimum), scale, minimum)

        span = np.where(has_range, high - low, np.float32(1))
        for n in range(33):
            codes = np.float32(self._most - 1) + np.float32(0.125) * np.float32(
                n)
            attempt(*self._fit(span / codes, -low))
        for _ in range(4):
            attempt(*self._fit(*best.values))
        scale, minimum = best.values
        return (np.where(has_range, scale, np.float32(0)),
                np.where(has_range, minimum, -low))

    def _end(self, code: int) -> tuple[_Reals, _Reals]:
        """The line of each block whose upper end has that code."""
        low = np.minimum(self._x.min(axis=1), np.float32(0))
        high = np.maximum(self._x.max(axis=1), low)
        scale = (high - low) / np.float32(code)
        return np.where(high - low > _LEAST_RANGE, scale, np.float32(0)), -low

    def _fit_halves(self, scale: _Reals, minimum: _Reals
                    ) -> tuple[_Reals, _Reals]:
        one, q, qq, x, xq = self._sums(scale, minimum)
        determinant = one * qq - q * q
        with np.errstate(all="ignore"):
            minimum = _to_half(np.where(
                determinant > 0, (q * xq - qq * x) / determinant, minimum))
            return _to_half(np.where(
                qq > 0, (xq + minimum * q) / qq, scale)), minimum

    def find_halves(self) -> tuple[_Reals, ...]:
        """scale, minimum of each block, as float16 has them."""
        low = self._x.min(axis=1)
        span = self._x.max(axis=1) - low
        none = np.zeros_like(low), _to_half(-low)
        best = _Best(self._error(*none), *none)

        def attempt(scale: _Reals, minimum: _Reals) -> None:
            best.offer(self._error(scale, minimum), scale, minimum)

        has_range = span > _LEAST_RANGE
        span = np.where(has_range, span, np.float32(1))
        least = span / np.float32(self._most)
        even = span / np.float32((self._most + 1) // 2)
        for scale in (_to_half(least), _to_half_above(least), _to_half(even)):
            attempt(scale, _to_half(-low))
        for n in range(_HALF_STEPS):
            codes = np.float32(self._most - 2) + _HALF_STEP * np.float32(n)
            attempt(*self._fit_halves(span / codes, -low))
        for _ in range(_HALF_FITS):
            attempt(*self._fit_halves(*best.values))
        return tuple(np.where(has_range, found, flat)
                     for found, flat in zip(best.values, none))

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
        one, q, qq, x, xq = (sums.astype(np.float64) for sums in self._sums(
            np.repeat(d, parts) * scale, np.repeat(dmin, parts) * minimum))
        s, m = scale.astype(np.float64), minimum.astype(np.float64)
        aa, ab, bb = (_total(terms, parts) for terms in (
            s * s * qq, s * m * q, m * m * one))
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

        def shared(lines: tuple[_Reals, _Reals], most: int
                   ) -> tuple[_Reals, ...]:
            return tuple(_to_half_above(line.reshape(-1, parts).max(axis=1) /
                                        np.float32(most)) for line in lines)

        even = self._end((self._most + 1) // 2)
        even_d, even_dmin = shared(even, (_MOST_SIX_BITS + 1) // 2)
        even_scale, even_minimum, even_error = self._choose(
            even, even_d, even_dmin)
        is_even = _total(self._error(*even), parts) == 0
        lines = self._find()
        d, dmin = shared(lines, _MOST_SIX_BITS)
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
        is_even &= even_error <= least
        in_blocks = np.repeat(is_even, parts)
        least = np.where(is_even, even_error, least)
        best = [np.where(is_even, even_d, best[0]),
                np.where(is_even, even_dmin, best[1]),
                np.where(in_blocks, even_scale, best[2]),
                np.where(in_blocks, even_minimum, best[3])]
        rows = np.flatnonzero(
            least > _SHARED_SHARE * _total(self._error(*lines), parts))
        if len(rows):
            self._retry(rows, lines, least, best)
        return tuple(best)

    def _retry(self, rows: Array, lines: tuple[_Reals, _Reals], least: _Reals,
               best: list[_Reals]) -> None:
        """Tries other d and dmin for these super-blocks."""
        parts = _SUPER_BLOCK // _LINE_BLOCK
        own = _Lines(self._x.reshape(-1, _SUPER_BLOCK)[rows],
                     self._weights.reshape(-1, _SUPER_BLOCK)[rows], self._most)
        for found in (tuple(line.reshape(-1, parts)[rows].ravel()
                            for line in lines), own._end(self._most)):
            largest = [line.reshape(-1, parts).max(axis=1) for line in found]
            for most in range(_MOST_SIX_BITS, _MOST_SIX_BITS // 2, -1):
                d, dmin = (_to_half(one / np.float32(most)) for one in largest)
                *integers, error = own._choose((found[0], found[1]), d, dmin)
                better = error < least[rows]
                least[rows[better]] = error[better]
                best[0][rows[better]] = d[better]
                best[1][rows[better]] = dmin[better]
                for kept, new in zip(best[2:], integers):
                    kept.reshape(-1, parts)[rows[better]] = new.reshape(
                        -1, parts)[better]


def _total(terms: _Reals, parts: int) -> _Reals:
    """float64, of so many terms each, one after another."""
    columns = terms.astype(np.float64).reshape(-1, parts)
    total = np.zeros(len(columns))
    for n in range(parts):
        total = total + columns[:, n]
    return total


def _encode_lines(x: _Reals, weights: _Reals, most: int) -> list[Array]:
    lines = _Lines(x, weights, most)
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


def _encode_q4_k(x: _Reals, weights: _Reals) -> list[Array]:
    return _encode_lines(x, weights, 15)


def _encode_q5_k(x: _Reals, weights: _Reals) -> list[Array]:
    return _encode_lines(x, weights, 31)


def _encode_half_lines(x: _Reals, weights: _Reals, bits: int) -> list[Array]:
    lines = _Lines(x, weights, (1 << bits) - 1)
    scale, minimum = lines.find_halves()
    return [_half_bytes(scale), _half_bytes(-minimum), *packed_codes(
        lines.codes(scale, minimum).astype(np.uint8), bits)]


def _encode_q4_1(x: _Reals, weights: _Reals) -> list[Array]:
    return _encode_half_lines(x, weights, 4)


def _encode_q5_1(x: _Reals, weights: _Reals) -> list[Array]:
    return _encode_half_lines(x, weights, 5)


class _Scales:
    """x' = scale * code, of rows of blocks; codes of two's complement; weights
    of errors."""

    def __init__(self, x: _Reals, weights: _Reals, block: int, bits: int
                 ) -> None:
        self._x = x.reshape(-1, block)
        self._weights = weights.reshape(-1, block)
        # Lowest code.
        self._least = -(1 << bits - 1)

    def codes(self, scale: _Reals) -> _Reals:
        return _code(self._x * _inverse(scale)[:, None], self._least,
                     -self._least - 1)

    def _error(self, scale: _Reals) -> _Reals:
        error = self._x - scale[:, None] * self.codes(scale)
        return _sum(error * error * self._weights)

    def _sums(self, scale: _Reals) -> tuple[_Reals, _Reals]:
        code = self.codes(scale)
        return (_sum(code * code * self._weights),
                _sum(self._x * code * self._weights))

    def _find(self) -> _Reals:
        largest = _largest(self._x)
        has_scale = np.abs(largest) > _LEAST_RANGE
        largest = np.where(has_scale, largest, np.float32(1))
        best = _Best(np.full_like(largest, np.inf), np.zeros_like(largest))
        for sign in (-1, 1):
            for n in range(21):
                codes = np.float32(29) + np.float32(0.25) * np.float32(n)
                qq, xq = self._sums(np.float32(sign) * largest / codes)
                with np.errstate(all="ignore"):
                    scale = np.where(has_scale, xq / qq, np.float32(1))
                best.offer(self._error(scale), scale)
        return np.where(has_scale, best.values[0], np.float32(0))

    def find_halves(self, of_ggml: int) -> _Reals:
        """The scale of each block, as float16 has it; of_ggml: the code that
        the largest element has there."""
        largest = _largest(self._x)
        has_scale = np.abs(largest) > _LEAST_RANGE
        largest = np.where(has_scale, largest, np.float32(1))
        none = np.zeros_like(largest)
        best = _Best(self._error(none), none)

        def attempt(scale: _Reals) -> None:
            best.offer(self._error(scale), scale)

        least = np.abs(largest) / np.float32(-self._least - 1)
        even = largest / np.float32(-self._least // 2)
        for scale in (_to_half(largest / np.float32(of_ggml)),
                      _to_half_above(least), _to_half(even)):
            attempt(scale)
        for sign in (-1, 1):
            for n in range(_HALF_STEPS):
                codes = (np.float32(-self._least - 2) +
                         _HALF_STEP * np.float32(n))
                qq, xq = self._sums(np.float32(sign) * largest / codes)
                with np.errstate(all="ignore"):
                    attempt(_to_half(xq / qq))
        return np.where(has_scale, best.values[0], none)

    def find(self) -> tuple[_Reals, _Reals]:
        """d of super-blocks; scale of blocks."""
        parts = _SUPER_BLOCK // _SCALE_BLOCK

        def shared(scales: _Reals) -> _Reals:
            largest = _largest(scales.reshape(-1, parts))
            d = _to_half_above(np.abs(largest) / np.float32(128))
            return np.where(largest > 0, -d, d)

        largest = np.abs(self._x).max(axis=1)
        even = np.where(largest > _LEAST_RANGE,
                        largest / np.float32(-self._least // 2), np.float32(0))
        even_d = shared(even)
        even_scale, even_error = self._choose(even, even_d)
        is_even = _total(self._error(even), parts) == 0
        scales = self._find()
        d = shared(scales)
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
        is_even &= even_error <= least
        least = np.where(is_even, even_error, least)
        best = [np.where(is_even, even_d, best[0]),
                np.where(np.repeat(is_even, parts), even_scale, best[1])]
        rows = np.flatnonzero(
            least > _SHARED_SHARE * _total(self._error(scales), parts))
        if len(rows):
            self._retry(rows, scales, least, best)
        return best[0], best[1]

    def _retry(self, rows: Array, scales: _Reals, least: _Reals,
               best: list[_Reals]) -> None:
        """Tries other d for these super-blocks."""
        parts = _SUPER_BLOCK // _SCALE_BLOCK
        own = _Scales(self._x.reshape(-1, _SUPER_BLOCK)[rows],
                      self._weights.reshape(-1, _SUPER_BLOCK)[rows],
                      _SCALE_BLOCK, 6)
        for found in (scales.reshape(-1, parts)[rows].ravel(),
                      _largest(own._x) / np.float32(self._least)):
            largest = _largest(found.reshape(-1, parts))
            for integer in range(-128, -64):
                d = _to_half(largest / np.float32(integer))
                chosen, error = own._choose(found, d)
                better = error < least[rows]
                least[rows[better]] = error[better]
                best[0][rows[better]] = d[better]
                best[1].reshape(-1, parts)[rows[better]] = chosen.reshape(
                    -1, parts)[better]

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


def _encode_q6_k(x: _Reals, weights: _Reals) -> list[Array]:
    scales = _Scales(x, weights, _SCALE_BLOCK, 6)
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


def _encode_half_scales(x: _Reals, weights: _Reals, bits: int, of_ggml: int
                        ) -> list[Array]:
    scales = _Scales(x, weights, _LINE_BLOCK, bits)
    scale = scales.find_halves(of_ggml)
    # Two's complement becomes a distance from the lowest code, but for 8 bits.
    codes = scales.codes(scale).astype(np.int16) + (
        1 << bits - 1 if bits < 8 else 0)
    return [_half_bytes(scale), *packed_codes(codes.astype(np.uint8), bits)]


def _encode_q4_0(x: _Reals, weights: _Reals) -> list[Array]:
    return _encode_half_scales(x, weights, 4, -8)


def _encode_q5_0(x: _Reals, weights: _Reals) -> list[Array]:
    return _encode_half_scales(x, weights, 5, -16)


def _encode_q8_0(x: _Reals, weights: _Reals) -> list[Array]:
    return _encode_half_scales(x, weights, 8, 127)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """most_element: the largest magnitude that it takes."""

    block: int
    most_element: float
    encode: Callable[[_Reals, _Reals], list[Array]]


ENCODERS = {
    "q4_0": Encoder(_LINE_BLOCK, 8 * _MOST_HALF, _encode_q4_0),
    "q4_1": Encoder(_LINE_BLOCK, _MOST_HALF, _encode_q4_1),
    "q5_0": Encoder(_LINE_BLOCK, 16 * _MOST_HALF, _encode_q5_0),
    "q5_1": Encoder(_LINE_BLOCK, _MOST_HALF, _encode_q5_1),
    "q8_0": Encoder(_LINE_BLOCK, 2 ** 21, _encode_q8_0),
    "q4_K": Encoder(_SUPER_BLOCK, 2 ** 21, _encode_q4_k),
    "q5_K": Encoder(_SUPER_BLOCK, 2 ** 21, _encode_q5_k),
    "q6_K": Encoder(_SUPER_BLOCK, 2 ** 21, _encode_q6_k)}


def encode(elements: Array, kind: str, importance: Sequence[float] = ()
           ) -> Array:
    """Blocks, a row each, of float32 elements in rows of whole blocks, finite
    and at most most_element in magnitude. importance: how much errors count in
    each column; empty: all the same."""
    encoder = ENCODERS[kind]
    rows = elements.reshape(-1, encoder.block)
    count = _BATCH // encoder.block
    weights = _weights(importance or [1.0] * encoder.block, encoder.block)
    return np.concatenate([
        np.concatenate(encoder.encode(
            rows[begin:begin + count],
            weights[np.arange(begin, min(begin + count, len(rows))) %
                    len(weights)]), axis=1)
        for begin in range(0, len(rows), count)])


def _weights(importance: Sequence[float], block: int) -> _Reals:
    """Weights of the blocks of a row of elements; the largest of each is 1."""
    rows = np.asarray(importance, np.float64).reshape(-1, block)
    largest = rows.max(axis=1, keepdims=True)
    shares = np.maximum(rows / np.where(largest > 0, largest, 1), _LEAST_WEIGHT)
    return np.where(largest > 0, shares, 1).astype(np.float32)
