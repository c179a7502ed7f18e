"""Statistics that are made where the data are, and contributed in place of
them: they are small, and the service adds them to the same bits as if it had
seen the data. Tensors of torch are worked on where they are, such as a GPU.

    import quantd.edge

    state = quantd.edge.State()
    for batch in batches:
        state.update(batch)
    client.calibrate(state, quantd.TensorName("acme/net", "fc.input"),
                     contribution=quantd.Contribution("rank-0", 1))
"""

from __future__ import annotations

import math
from typing import Any, Iterator, Optional, Sequence

import numpy as np

from quantd import _arrays, _sharding, errors
from quantd._edge_numpy import NumpyKernels
from quantd._scale_stream import counts
from quantd.encoding import (GranularityLike, as_granularity,
                             block_size_of)
from quantd.tensor import Array, Slice
from quantd.v1 import statistics_pb2

__all__ = ["State"]

_VERSION = 1
_MANTISSA_BITS = range(2, 11)
# Elements that are worked on at once: what is made of them takes some tens of
# bytes for each, and the sum of squares of 21 bits must fit.
_AT_ONCE = 1 << 20
# Those whose tensors of torch numpy works on.
_DEVICES_OF_NUMPY = ("cpu",)
# Patterns of 16 bits, and the one of the upper bits of -0.
_PATTERNS = 1 << 16
_MINUS_ZERO = 1 << 15
# Most bits of mantissas for which the bins of float32 follow from its upper 16
# bits.
_MOST_HALF_BITS = 7
# Largest code of a Gram matrix, and the number of rows for which sums of
# products are exact.
_LARGEST_CODE = (1 << 20) - 1
_EXACT_ROWS = 1 << 13
# 32 bits.
_LOW = (1 << 32) - 1
# Upper bits of an element: the sign, and the power of two that its mantissa
# counts.
_POWER_BITS = 9
_EXPONENT_MASK = 0xFF
# Squares of mantissas have 48 bits.
_HALF_SQUARE = (1 << 24) - 1


def _kernels_of(array: Any, element_type: Optional[str], multiplies: bool
                ) -> tuple[Any, Any, Optional[str]]:
    """Kernels that work on the array, the array as those take it, and its
    element type where it does not tell. multiplies: a Gram matrix is made."""
    if _sharding.is_sharded(array):
        raise errors.argument_invalid(
            "expected the local part of a DTensor, and slice_of of the State",
            "array")
    if not _arrays.is_torch(array):
        return NumpyKernels, array, element_type
    # numpy counts several times faster, torch may multiply so.
    if array.device.type in _DEVICES_OF_NUMPY and not multiplies:
        array, found = _arrays.to_numpy(array)
        if element_type not in (None, found or array.dtype.name):
            raise errors.argument_invalid(
                f"expected elements of {element_type}, got "
                f"{found or array.dtype}", "array")
        return NumpyKernels, array, found
    # pylint: disable-next=import-outside-toplevel
    from quantd._edge_torch import TorchKernels
    return TorchKernels, array.detach(), element_type


class _Sums:
    """Integers by key: rows of a table, added up."""

    def __init__(self) -> None:
        self._keys: Any = None
        self.table: list[Any] = []
        # Rows that have a number for every key, and are not in the table yet.
        self._whole: list[Any] = []

    def add(self, kernels: Any, keys: Any, table: list[Any]) -> None:
        """keys: distinct and in order, of the numbers of each row; None: a row
        has a number for every key, and settle() has to follow."""
        if keys is None:
            for own, more in zip(self._whole, table):
                own += more
            self._whole = self._whole or table
            return
        if self._keys is not None:
            joined = kernels.join(self._keys, keys)
            keys, table = kernels.sums_of_pairs(joined, [
                kernels.join(own, more)
                for own, more in zip(self.table, table)])
        self._keys, self.table = keys, table

    def settle(self, kernels: Any) -> None:
        """Keeps the keys that came: whole rows take megabytes."""
        if self._whole:
            keys = kernels.places(self._whole[0])
            self.add(kernels, keys, [row[keys] for row in self._whole])
            self._whole = []

    def to_numpy(self, kernels: Any) -> tuple[Array, Array]:
        """Keys and the table."""
        if self._keys is None:
            return np.empty(0, np.int64), np.empty((4, 0), np.int64)
        return kernels.to_numpy(self._keys), np.stack(
            [kernels.to_numpy(row) for row in self.table])


class _Patterns:
    """How often elements of 16 bits have each pattern, which is all that
    statistics of a whole tensor need of them."""

    def __init__(self, element_type: str) -> None:
        self._element_type = element_type
        self.counts: Any = None

    def add(self, counts: Any) -> None:
        """Of each pattern."""
        self.counts = counts if self.counts is None else self.counts + counts

    def to_numpy(self, kernels: Any) -> tuple[Array, Array]:
        """The elements that came, as float32, and how often each did."""
        counts = kernels.to_numpy(self.counts)
        patterns = np.flatnonzero(counts)
        bits = patterns.astype(np.uint16)
        values = (bits.view(np.float16).astype(np.float32)
                  if self._element_type == "float16" else
                  (bits.astype(np.uint32) << 16).view(np.float32))
        return values, counts[patterns]


def _exact_sums(sums: Sequence[int], unit: int) -> statistics_pb2.ExactSums:
    """In the one form that they have; see ExactSums."""
    if not any(sums):
        return statistics_pb2.ExactSums()
    # Lowest bit that is set in any of the sums.
    lowest = min((total & -total).bit_length() - 1 for total in sums if total)
    bits = max((total if total >= 0 else ~total).bit_length() + 1
               for total in sums if total)
    width = (bits - lowest + 7) // 8
    return statistics_pb2.ExactSums(
        exponent=unit + lowest, width=width, integers=b"".join(
            (total >> lowest).to_bytes(width, "little", signed=True)
            for total in sums))


class State:
    """Statistics of tensors that were given to `update`, as those of one
    contribution. Goes where an array would in calibrate, calibrate_many and
    CalibrateJob; the contribution takes granularity, mantissa_bits and features
    from here.

    Not for several threads at once. It keeps what it gathers on the device of
    the tensors, which must be the same for all.

    granularity, mantissa_bits: see Contribution. Tensors may differ in the
        dimensions that the granularity does not divide.
    step_exponent: of each feature, which lie along the last dimension: gathers
        their Gram matrix X^T X as well, 8 bytes for each pair. Take those that
        the service has (StoredStatistics.gram), and otherwise gram_steps of a
        first batch: a state with other steps than the stored ones is refused.
    max_part: see FeatureStatistics.
    moments: count, sum and sum of squares of each feature as well, exactly;
        about 1 KiB for each. axis: that has the features; a Gram matrix takes
        the last one.
    slice_of: the tensors are all that part of tensors of that shape; see
        Client.calibrate. Along dimensions of which they have everything they
        may still differ. Features are those of the part, for step_exponent of
        the whole: a Gram matrix takes a part of the rows only.

    Raises: ARGUMENT_INVALID.
    """

    def __init__(self, granularity: GranularityLike = None,
                 mantissa_bits: int = 0,
                 step_exponent: Optional[Sequence[int]] = None,
                 max_part: int = 0, moments: bool = False, axis: int = -1,
                 slice_of: Optional[Slice] = None) -> None:
        if mantissa_bits and mantissa_bits not in _MANTISSA_BITS:
            raise errors.argument_invalid(
                f"expected 0 or 2 to 10, got {mantissa_bits}", "mantissa_bits")
        self.granularity = as_granularity(granularity)
        self.mantissa_bits = mantissa_bits
        self.step_exponent = None if step_exponent is None else tuple(
            int(exponent) for exponent in step_exponent)
        self.max_part = max_part
        self.moments = moments
        self.axis = axis
        self.element_type = "float32"
        # The largest extent of each dimension.
        self.shape: tuple[int, ...] = ()
        # Slice as it was given, and with the largest extents.
        self._given_slice = slice_of
        self.slice_of: Optional[Slice] = None
        self._kernels: Any = None
        self._block_size: tuple[int, ...] = ()
        self._scale_shape: tuple[int, ...] = ()
        self._bits = 0
        # Of tensors of 16 bits that the granularity does not divide, by element
        # type; what comes below is that of others.
        self._patterns: dict[str, _Patterns] = {}
        # Like _bins, of float32 that the granularity does not divide.
        self._halves = _Sums()
        # Counts of all elements; then of NaN, +Inf, -Inf and zeros.
        self._counts = [0] * 5
        self._extremes: Any = None
        self._non_finite: Any = None
        # Sums of bins by scale index and key: rows of count, sum of low bits,
        # and sum of their squares in 32 low bits and the rest.
        self._bins = _Sums()
        # Sums of moments, by feature and the upper bits of an element: rows of
        # count, sum of mantissas, and of their squares in 24 low bits and the
        # rest. Elements of each feature, finite or not, and those that are not.
        self._powers = _Sums()
        self._feature_counts: Any = None
        self._gram: list[Any] = []
        self._rows = [0, 0]
        self._clipped = 0

    @property
    def count(self) -> int:
        """Elements so far."""
        return self._counts[0]

    @property
    def size_bytes(self) -> int:
        """Bytes that the state takes in memory."""
        arrays = [*self._gram, *self._bins.table, *self._halves.table,
                  *self._powers.table, *(
                      patterns.counts for patterns in self._patterns.values())]
        return 8 * (len(arrays) and sum(
            math.prod(array.shape) for array in arrays)) + 64

    def update(self, array: Any, element_type: Optional[str] = None) -> None:
        """Takes in a tensor. element_type: "bfloat16" for uint16 of numpy.

        Raises: ARGUMENT_INVALID.
        """
        kernels, array, element_type = _kernels_of(
            array, element_type, self.step_exponent is not None)
        array, shape, found = kernels.elements(array, element_type)
        self._begin(kernels, shape, found)
        if math.prod(shape) == 0:
            return
        self._counts[0] += math.prod(shape)
        is_undivided = math.prod(self._scale_shape) == 1
        has_patterns = is_undivided and found in ("bfloat16", "float16")
        if has_patterns:
            self._patterns.setdefault(found, _Patterns(found)).add(
                kernels.counts_of_patterns(array, _PATTERNS))
            if not self.moments and self.step_exponent is None:
                return
        has_halves = is_undivided and found == "float32" and (
            self._bits <= _MOST_HALF_BITS)
        is_whole = has_halves and self._add_halves(array)
        array = kernels.floats(array, shape, found)
        finite: Any = None
        if not is_whole or self.moments:
            finite = kernels.is_finite(array)
            is_whole = kernels.is_all(finite)
        floats = kernels.to_float32(array)
        if self.moments:
            self._add_moments(floats, shape, finite)
        if not has_patterns:
            if not is_whole:
                self._count_non_finite(array, finite)
            self._add_extremes(array, None if is_whole else finite)
        if not has_patterns and not has_halves:
            exact = found == "bfloat16" and self._bits >= 7 or (
                found == "float16" and self._bits >= 10)
            for begin in range(0, math.prod(shape), _AT_ONCE):
                self._add_bins(floats.reshape(-1)[begin:begin + _AT_ONCE],
                               begin, shape, exact,
                               None if is_whole else
                               finite.reshape(-1)[begin:begin + _AT_ONCE])
            self._bins.settle(kernels)
        if self.step_exponent is not None:
            self._add_rows(floats.reshape(-1, shape[-1]), None if is_whole else
                           finite.reshape(-1, shape[-1]))

    def _begin(self, kernels: Any, shape: tuple[int, ...], element_type: str
               ) -> None:
        """Checks that a tensor goes with those before it."""
        if self._kernels is None:
            self._open(kernels, shape, element_type)
            return
        fixed = [bool(block) for block in self._block_size or (
            0 for _ in self.shape)]
        if self.slice_of is not None:
            fixed = [is_fixed or extent != whole for is_fixed, extent, whole in
                     zip(fixed, self.shape, self.slice_of.global_shape)]
        if self.step_exponent is not None:
            fixed[-1] = True
        if self.moments:
            fixed[self.axis] = True
        if self._kernels is not kernels or len(shape) != len(self.shape) or any(
                is_fixed and extent != own for is_fixed, extent, own in zip(
                    fixed, shape, self.shape)):
            raise errors.argument_invalid(
                f"expected a tensor like those before, of {self.shape}, got "
                f"one of {shape}: dimensions that are split, and the features, "
                "have to be the same", "array")
        if self.slice_of is not None:
            self.slice_of = Slice(tuple(
                whole if own != whole else max(whole, extent)
                for own, whole, extent in zip(
                    self.shape, self.slice_of.global_shape, shape)),
                self.slice_of.offset)
        self.shape = tuple(map(max, self.shape, shape))

    @property
    def _global_shape(self) -> tuple[int, ...]:
        return self.shape if self.slice_of is None else tuple(
            self.slice_of.global_shape)

    def _open(self, kernels: Any, shape: tuple[int, ...], element_type: str
              ) -> None:
        self.slice_of = self._checked_slice(shape)
        if self.moments and not -len(shape) <= self.axis < len(shape):
            raise errors.argument_invalid(
                f"expected one of {len(shape)} dimensions, got {self.axis}",
                "axis")
        whole = shape if self.slice_of is None else tuple(
            self.slice_of.global_shape)
        block_size = tuple(block_size_of(self.granularity, whole))
        if self.step_exponent is not None and (
                not shape or len(self.step_exponent) != shape[-1]):
            raise errors.argument_invalid(
                f"expected one for each feature of {shape}, got "
                f"{len(self.step_exponent)}", "step_exponent")
        self._block_size = block_size if any(block_size) else ()
        self._scale_shape = tuple(counts(whole, self._block_size)
                                  if self._block_size else (1,) * len(shape))
        self._check_blocks(shape)
        scale_count = math.prod(self._scale_shape)
        self._bits = self.mantissa_bits or (
            7 if scale_count <= 1 else 5 if scale_count <= 256 else 3)
        self._kernels = kernels
        self.shape = shape
        self.element_type = element_type

    def _checked_slice(self, shape: tuple[int, ...]) -> Optional[Slice]:
        given = self._given_slice
        if given is None:
            return None
        whole = tuple(int(extent) for extent in given.global_shape)
        offset = tuple(int(first) for first in given.offset)
        if not len(whole) == len(offset) == len(shape) or any(
                first < 0 or first + extent > full
                for first, extent, full in zip(offset, shape, whole)):
            raise errors.argument_invalid(
                f"expected a part of {whole} at {offset}, got one of {shape}",
                "slice_of")
        if self.step_exponent is not None and shape[-1] != whole[-1]:
            raise errors.argument_invalid(
                "a Gram matrix needs all features of a row; gather them, or "
                "keep moments", "slice_of")
        return Slice(whole, offset)

    def _check_blocks(self, shape: tuple[int, ...]) -> None:
        """A part of a tensor cuts no block."""
        if self.slice_of is None:
            return
        for extent, block, first, whole in zip(
                shape, self._block_size, self.slice_of.offset,
                self.slice_of.global_shape):
            end = first + extent
            if 0 < block < whole and (
                    first % block or (end % block and end != whole)):
                raise errors.argument_invalid(
                    f"[{first}, {end}) of {whole} cuts a block of {block}",
                    "slice_of")

    def _count_non_finite(self, array: Any, finite: Any) -> None:
        kernels = self._kernels
        for place, selected in enumerate(
                (array != array, array == math.inf, array == -math.inf), 1):
            self._counts[place] += kernels.count(selected)
        blocks = self._blocks(~finite, kernels.largest, False)
        self._non_finite = blocks if self._non_finite is None else (
            kernels.maximum(self._non_finite, blocks))

    def _add_extremes(self, array: Any, finite: Any) -> None:
        kernels = self._kernels
        self._counts[4] += kernels.count(array == 0)
        low = self._blocks(kernels.or_else(array, finite, math.inf),
                           kernels.smallest, math.inf)
        high = self._blocks(kernels.or_else(array, finite, -math.inf),
                            kernels.largest, -math.inf)
        if self._extremes is not None:
            low = kernels.minimum(low, self._extremes[0])
            high = kernels.maximum(high, self._extremes[1])
        self._extremes = low, high

    def _blocks(self, array: Any, reduce: Any, none: Any) -> Any:
        """One number of each block; `none` of those of other parts."""
        if not self._block_size:
            return reduce(array.reshape(-1), 0, 0).reshape(1)
        for axis, block in enumerate(self._block_size):
            if block != 1:
                array = reduce(array, axis, block)
        if self.slice_of is not None:
            array = self._kernels.embedded(array, self._scale_shape, [
                first // block if block else 0 for first, block in zip(
                    self.slice_of.offset, self._block_size)], none)
        return array.reshape(-1)

    def _add_bins(self, floats: Any, begin: int, shape: tuple[int, ...],
                  exact: bool, finite: Any) -> None:
        """exact: no element has low bits."""
        kernels = self._kernels
        keys, low = kernels.keys(floats, self._bits)
        key_bits = 9 + self._bits
        scale_count = math.prod(self._scale_shape)
        if scale_count > 1:
            keys += self._scale_index(kernels.arange(
                begin, begin + len(keys), keys), shape) << key_bits
        if finite is not None:
            keys, low = keys[finite], low[finite]
        values = [] if exact else [low, low * low]
        found, sums = kernels.sums(keys, values, scale_count << key_bits)
        zeros = sums[0] * 0
        low, squares = sums[1:] if len(sums) > 1 else (zeros, zeros)
        # Neither half overflows.
        self._bins.add(kernels, found, [sums[0], low, squares & _LOW,
                                        squares >> 32])

    def _add_halves(self, array: Any) -> bool:
        """Adds the bins of float32. Returns True if all of it is finite."""
        kernels = self._kernels
        times, low, squares = map(kernels.to_numpy, kernels.sums_of_halves(
            array, _PATTERNS))
        if times[_MINUS_ZERO]:
            zeros = kernels.count_of_minus_zeros(array)
            times[_MINUS_ZERO] -= zeros
            times[0] += zeros
        bits = np.arange(_PATTERNS, dtype=np.uint32) << 16
        finite = np.isfinite(bits.view(np.float32))
        is_whole = not times[~finite].any()
        kept = np.flatnonzero(times * finite)
        # With a lower bit, so that none is -0.
        keys, _ = NumpyKernels.keys((bits[kept] | 1).view(np.float32),
                                    self._bits)
        times, low, squares = times[kept], low[kept], squares[kept]
        # Low bits of a bin are these, 2^16 * upper, and the lower half.
        upper = kept & (1 << _MOST_HALF_BITS - self._bits) - 1
        products = 2 * upper * low
        self._halves.add(NumpyKernels, *NumpyKernels.sums_of_pairs(keys, [
            times, (upper * times << 16) + low,
            (squares & _LOW) + ((products & 0xFFFF) << 16),
            (squares >> 32) + (products >> 16) + upper * upper * times]))
        return is_whole

    def _scale_index(self, offsets: Any, shape: tuple[int, ...]) -> Any:
        """Scale index of elements by their offsets."""
        index = 0
        stride = math.prod(shape)
        firsts = self.slice_of.offset if self.slice_of else (0,) * len(shape)
        for extent, block, scales, first in zip(
                shape, self._block_size, self._scale_shape, firsts):
            stride //= extent
            index = index * scales
            if block:
                index = index + (offsets // stride % extent + first) // block
        return index

    def _add_moments(self, floats: Any, shape: tuple[int, ...], finite: Any
                     ) -> None:
        kernels = self._kernels
        axis = self.axis % len(shape)
        features, inner = shape[axis], math.prod(shape[axis + 1:])
        by_feature = finite.reshape(-1, features, inner)
        left_out = kernels.not_of_columns(by_feature)
        count = left_out * 0 + math.prod(shape) // features
        self._feature_counts = [count, left_out] if (
            self._feature_counts is None) else [
                own + more for own, more in zip(self._feature_counts,
                                                (count, left_out))]
        flat, is_finite = floats.reshape(-1), finite.reshape(-1)
        for begin in range(0, math.prod(shape), _AT_ONCE):
            some = flat[begin:begin + _AT_ONCE]
            powers, mantissas = kernels.powers(some)
            feature = kernels.arange(begin, begin + len(some), powers
                                     ) // inner % features
            keys = (feature << _POWER_BITS) + powers
            kept = is_finite[begin:begin + _AT_ONCE]
            keys, mantissas = keys[kept], mantissas[kept]
            squares = mantissas * mantissas
            self._powers.add(kernels, *kernels.sums(
                keys, [mantissas, squares & _HALF_SQUARE, squares >> 24],
                features << _POWER_BITS))
        self._powers.settle(kernels)

    def _add_rows(self, rows: Any, finite: Any) -> None:
        kernels = self._kernels
        left_out = 0
        if finite is not None:
            whole = kernels.all_of_rows(finite)
            kept = rows[whole]
            left_out = len(rows) - len(kept)
            rows = kept
        self._rows[0] += len(rows)
        self._rows[1] += left_out
        assert self.step_exponent is not None
        features = len(self.step_exponent)
        at_once = max(1, min(_AT_ONCE // features, _EXACT_ROWS))
        for begin in range(0, max(1, len(rows)), at_once):
            scaled = kernels.scaled(rows[begin:begin + at_once],
                                    self.step_exponent)
            self._clipped += kernels.count(abs(scaled) >= _LARGEST_CODE + .5)
            codes = kernels.rounded(scaled, _LARGEST_CODE)
            for part, (first, end) in enumerate(self._parts()):
                product = kernels.product(codes[:, first:end])
                if part == len(self._gram):
                    self._gram.append(product)
                else:
                    self._gram[part] += product

    def _part_size(self) -> int:
        """Size of the parts that the service splits features into."""
        assert self.step_exponent is not None
        features = len(self.step_exponent)
        most = self.max_part or 8192
        if features <= most:
            return features
        parts = -(-features // most)
        return -(-(-(-features // parts)) // 128) * 128

    def _parts(self) -> Iterator[tuple[int, int]]:
        assert self.step_exponent is not None
        features, size = len(self.step_exponent), self._part_size()
        for first in range(0, features, size):
            yield first, min(first + size, features)

    def serialized(self) -> bytes:
        """The ContributionState of proto/ that goes up.

        Raises: ARGUMENT_INVALID, before the first tensor.
        """
        if self._kernels is None:
            raise errors.argument_invalid("a state of no tensor", "array")
        message = statistics_pb2.ContributionState(
            statistics=self._statistics())
        if self.step_exponent is not None and self.count:
            message.gram.CopyFrom(self._gram_state())
        if self.moments and self.count:
            message.moments.CopyFrom(self._moments())
        serialized: bytes = message.SerializeToString()
        return serialized

    def _statistics(self) -> statistics_pb2.StatisticsState:
        kernels = self._kernels
        message = statistics_pb2.StatisticsState(
            version=_VERSION, mantissa_bits=self._bits,
            block_size=self._block_size, shape=self._global_shape)
        scale_count = math.prod(self._scale_shape)
        low, high = np.full(scale_count, np.inf), np.full(scale_count, -np.inf)
        if self._extremes is not None:
            low, high = (kernels.to_numpy(extreme).astype(np.float64)
                         for extreme in self._extremes)
        non_finite = np.zeros(scale_count, bool)
        if self._non_finite is not None:
            non_finite |= kernels.to_numpy(self._non_finite)
        count, *special = self._counts
        bins = [self._bins.to_numpy(kernels),
                self._halves.to_numpy(NumpyKernels)]
        for patterns in self._patterns.values():
            values, times = patterns.to_numpy(kernels)
            finite = np.isfinite(values)
            for place, selected in enumerate((
                    np.isnan(values), values == np.inf, values == -np.inf,
                    values == 0)):
                special[place] += int(times[selected].sum())
            non_finite |= not finite.all()
            values, times = values[finite], times[finite]
            low = np.minimum(low, values.min(initial=np.inf))
            high = np.maximum(high, values.max(initial=-np.inf))
            bins.append(self._bins_of(values, times))
        keys, rows = NumpyKernels.sums_of_pairs(
            np.concatenate([some for some, _ in bins]),
            list(np.concatenate([table for _, table in bins], axis=1)))
        # -0 counts as +0.
        low, high = low + 0.0, high + 0.0
        message.min.extend(low.tolist())
        message.max.extend(high.tolist())
        statistics = message.statistics
        statistics.count = count
        (statistics.nan_count, statistics.positive_infinity_count,
         statistics.negative_infinity_count, statistics.zero_count) = special
        if scale_count and low.min() <= high.max():
            statistics.min, statistics.max = low.min(), high.max()
        message.non_finite_scale_index.extend(
            np.flatnonzero(non_finite).tolist())
        self._add_histograms(message, scale_count, keys, np.stack(rows))
        return message

    def _bins_of(self, values: Array, times: Array) -> tuple[Array, Array]:
        """Keys and rows of the bins of values that came so many times. A key
        may come more than once."""
        keys, low = NumpyKernels.keys(values, self._bits)
        squares = low * low
        # In two parts, so that no product overflows, as those of 32 bits.
        small = (squares & _HALF_SQUARE) * times
        large = (squares >> 24) * times
        return keys, np.stack([times, low * times,
                               small + ((large & 0xFF) << 24), large >> 8])

    def _add_histograms(self, message: statistics_pb2.StatisticsState,
                        scale_count: int, keys: Array, table: Array) -> None:
        key_bits = 9 + self._bits
        # The first bin of each scale index, and the end.
        edges = np.searchsorted(keys, np.arange(scale_count + 1) << key_bits)
        keys &= (1 << key_bits) - 1
        table[3] += table[2] >> 32
        squares = (table[3].astype(np.uint64) << np.uint64(32)) | (
            table[2] & _LOW).astype(np.uint64)
        high = table[3] >> 32
        for begin, end in zip(edges[:-1], edges[1:]):
            histogram = message.histograms.add()
            histogram.key_delta.extend(
                np.diff(keys[begin:end], prepend=0).tolist())
            histogram.count.extend(table[0, begin:end].tolist())
            histogram.low_sum.extend(table[1, begin:end].tolist())
            histogram.low_square_sum.extend(squares[begin:end].tolist())
            if high[begin:end].any():
                histogram.low_square_sum_high.extend(high[begin:end].tolist())

    def _moments(self) -> statistics_pb2.FeatureMoments:
        axis = self.axis % len(self.shape)
        features, whole = self.shape[axis], self._global_shape[axis]
        first = 0 if self.slice_of is None else self.slice_of.offset[axis]
        seen, left_out = (self._kernels.to_numpy(counted).tolist()
                          for counted in self._feature_counts)
        sums, square_sums = [0] * whole, [0] * whole
        keys, table = self._powers.to_numpy(self._kernels)
        for key, (_, total, low, high) in zip(keys.tolist(), table.T.tolist()):
            feature = first + (key >> _POWER_BITS)
            power = key & _EXPONENT_MASK
            is_negative = key >> 8 & 1
            sums[feature] += (-total if is_negative else total) << power
            square_sums[feature] += (low + (high << 24)) << 2 * power
        before, behind = [0] * first, [0] * (whole - first - features)
        return statistics_pb2.FeatureMoments(
            axis=axis,
            count=before + [a - b for a, b in zip(seen, left_out)] + behind,
            left_out=before + left_out + behind,
            sum=_exact_sums(sums, -149), square_sum=_exact_sums(
                square_sums, -298))

    def _gram_state(self) -> statistics_pb2.GramState:
        message = statistics_pb2.GramState(
            step_exponent=self.step_exponent, part_size=self._part_size(),
            rows=self._rows[0], left_out_rows=self._rows[1],
            clipped_count=self._clipped)
        for product in self._gram:
            sums = self._kernels.to_numpy(product)
            message.code_sum.extend(
                sums[np.triu_indices(len(sums))].tolist())
        return message
