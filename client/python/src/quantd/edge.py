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

from quantd import _arrays, errors
from quantd._edge_numpy import NumpyKernels
from quantd._scale_stream import counts
from quantd._specs import block_size_of
from quantd.encoding import GranularityLike, as_granularity
from quantd.v1 import statistics_pb2

__all__ = ["State"]

_VERSION = 1
_MANTISSA_BITS = range(2, 11)
# Elements that are worked on at once: what is made of them takes some tens of
# bytes for each, and the sum of squares of 21 bits must fit.
_AT_ONCE = 1 << 20
_LARGEST_CODE = 8191
# 32 bits.
_LOW = (1 << 32) - 1


def _kernels_of(array: Any) -> Any:
    """What works on it, and the array as that takes it."""
    if _arrays.is_torch(array):
        # pylint: disable-next=import-outside-toplevel
        from quantd._edge_torch import TorchKernels
        return TorchKernels, array.detach()
    return NumpyKernels, array


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

    Raises: ARGUMENT_INVALID.
    """

    def __init__(self, granularity: GranularityLike = None,
                 mantissa_bits: int = 0,
                 step_exponent: Optional[Sequence[int]] = None,
                 max_part: int = 0) -> None:
        if mantissa_bits and mantissa_bits not in _MANTISSA_BITS:
            raise errors.argument_invalid(
                f"expected 0 or 2 to 10, got {mantissa_bits}", "mantissa_bits")
        self.granularity = as_granularity(granularity)
        self.mantissa_bits = mantissa_bits
        self.step_exponent = None if step_exponent is None else tuple(
            int(exponent) for exponent in step_exponent)
        self.max_part = max_part
        self.element_type = "float32"
        # The largest extent of each dimension.
        self.shape: tuple[int, ...] = ()
        self._kernels: Any = None
        self._block_size: tuple[int, ...] = ()
        self._scale_shape: tuple[int, ...] = ()
        self._bits = 0
        # Of all elements; then NaN, +Inf, -Inf, zeros.
        self._counts = [0] * 5
        self._extremes: Any = None
        self._non_finite: Any = None
        # Of bins by scale index and key: rows of count, sum of low bits, and
        # sum of their squares in 32 low bits and the rest.
        self._keys: Any = None
        self._table: Any = None
        self._gram: list[Any] = []
        self._rows = [0, 0]
        self._clipped = 0

    @property
    def count(self) -> int:
        """Elements so far."""
        return self._counts[0]

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        arrays = [*self._gram, *(self._table or ())]
        return 8 * (len(arrays) and sum(
            math.prod(array.shape) for array in arrays)) + 64

    def update(self, array: Any, element_type: Optional[str] = None) -> None:
        """Takes in a tensor. element_type: "bfloat16" for uint16 of numpy.

        Raises: ARGUMENT_INVALID.
        """
        kernels, array = _kernels_of(array)
        array, found = kernels.floats(array, element_type)
        shape = tuple(int(extent) for extent in array.shape)
        self._begin(kernels, shape, found)
        if math.prod(shape) == 0:
            return
        self._counts[0] += math.prod(shape)
        finite = kernels.is_finite(array)
        is_whole = kernels.is_all(finite)
        if not is_whole:
            self._count_non_finite(array, finite)
        self._add_extremes(array, None if is_whole else finite)
        floats = kernels.to_float32(array)
        exact = found == "bfloat16" and self._bits >= 7 or (
            found == "float16" and self._bits >= 10)
        for begin in range(0, math.prod(shape), _AT_ONCE):
            self._add_bins(floats.reshape(-1)[begin:begin + _AT_ONCE], begin,
                           shape, exact,
                           None if is_whole else
                           finite.reshape(-1)[begin:begin + _AT_ONCE])
        if self.step_exponent is not None:
            self._add_rows(floats.reshape(-1, shape[-1]), None if is_whole else
                           finite.reshape(-1, shape[-1]))

    def _begin(self, kernels: Any, shape: tuple[int, ...], element_type: str
               ) -> None:
        """Checks that a tensor goes with those before it."""
        if self._kernels is None:
            self._open(kernels, shape, element_type)
            return
        if self._kernels is not kernels or len(shape) != len(self.shape) or any(
                block and extent != own for block, extent, own in zip(
                    self._block_size, shape, self.shape)) or (
                        self.step_exponent is not None and
                        shape[-1] != self.shape[-1]):
            raise errors.argument_invalid(
                f"expected a tensor like those before, of {self.shape}, got "
                f"one of {shape}: dimensions that are split, and the features, "
                "have to be the same", "array")
        self.shape = tuple(map(max, self.shape, shape))

    def _open(self, kernels: Any, shape: tuple[int, ...], element_type: str
              ) -> None:
        block_size = tuple(block_size_of(self.granularity, shape))
        if self.step_exponent is not None and (
                not shape or len(self.step_exponent) != shape[-1]):
            raise errors.argument_invalid(
                f"expected one for each feature of {shape}, got "
                f"{len(self.step_exponent)}", "step_exponent")
        self._block_size = block_size if any(block_size) else ()
        self._scale_shape = tuple(counts(shape, self._block_size)
                                  if self._block_size else (1,) * len(shape))
        scale_count = math.prod(self._scale_shape)
        self._bits = self.mantissa_bits or (
            7 if scale_count <= 1 else 5 if scale_count <= 256 else 3)
        self._kernels = kernels
        self.shape = shape
        self.element_type = element_type

    def _count_non_finite(self, array: Any, finite: Any) -> None:
        kernels = self._kernels
        for place, selected in enumerate(
                (array != array, array == math.inf, array == -math.inf), 1):
            self._counts[place] += kernels.count(selected)
        blocks = self._blocks(~finite, kernels.largest)
        self._non_finite = blocks if self._non_finite is None else (
            kernels.maximum(self._non_finite, blocks))

    def _add_extremes(self, array: Any, finite: Any) -> None:
        kernels = self._kernels
        self._counts[4] += kernels.count(array == 0)
        low = self._blocks(kernels.or_else(array, finite, math.inf),
                           kernels.smallest)
        high = self._blocks(kernels.or_else(array, finite, -math.inf),
                            kernels.largest)
        if self._extremes is not None:
            low = kernels.minimum(low, self._extremes[0])
            high = kernels.maximum(high, self._extremes[1])
        self._extremes = low, high

    def _blocks(self, array: Any, reduce: Any) -> Any:
        """Of each block one number."""
        if not self._block_size:
            return reduce(array.reshape(-1), 0, 0).reshape(1)
        for axis, block in enumerate(self._block_size):
            if block != 1:
                array = reduce(array, axis, block)
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
        self._merge_bins(found, sums)

    def _scale_index(self, offsets: Any, shape: tuple[int, ...]) -> Any:
        """Of elements by their offsets."""
        index = 0
        stride = math.prod(shape)
        for extent, block, scales in zip(shape, self._block_size,
                                         self._scale_shape):
            stride //= extent
            index = index * scales
            if block:
                index = index + offsets // stride % extent // block
        return index

    def _merge_bins(self, keys: Any, sums: list[Any]) -> None:
        """sums: counts, and where there are any, low bits and their squares,
        below 2^63."""
        kernels = self._kernels
        zeros = sums[0] * 0
        low, squares = sums[1:] if len(sums) > 1 else (zeros, zeros)
        table = [sums[0], low, squares & _LOW, squares >> 32]
        if self._keys is not None:
            joined = kernels.join(self._keys, keys)
            keys, table = kernels.sums_of_pairs(joined, [
                kernels.join(own, more)
                for own, more in zip(self._table, table)])
        # Neither half overflows.
        self._keys = keys
        self._table = [table[0], table[1], table[2] & _LOW,
                       table[3] + (table[2] >> 32)]

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
        at_once = max(1, _AT_ONCE // features)
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
        """As the service splits features."""
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
        serialized: bytes = message.SerializeToString()
        return serialized

    def _statistics(self) -> statistics_pb2.StatisticsState:
        kernels = self._kernels
        message = statistics_pb2.StatisticsState(
            version=_VERSION, mantissa_bits=self._bits,
            block_size=self._block_size, shape=self.shape)
        scale_count = math.prod(self._scale_shape)
        low, high = np.full(scale_count, np.inf), np.full(scale_count, -np.inf)
        if self._extremes is not None:
            # -0 counts as +0.
            low, high = (kernels.to_numpy(extreme).astype(np.float64) + 0.0
                         for extreme in self._extremes)
        message.min.extend(low.tolist())
        message.max.extend(high.tolist())
        total, nan, positive, negative, zero = self._counts
        statistics = message.statistics
        statistics.count, statistics.zero_count = total, zero
        statistics.nan_count = nan
        statistics.positive_infinity_count = positive
        statistics.negative_infinity_count = negative
        if scale_count and low.min() <= high.max():
            statistics.min, statistics.max = low.min(), high.max()
        if self._non_finite is not None:
            message.non_finite_scale_index.extend(np.flatnonzero(
                kernels.to_numpy(self._non_finite)).tolist())
        self._add_histograms(message, scale_count)
        return message

    def _add_histograms(self, message: statistics_pb2.StatisticsState,
                        scale_count: int) -> None:
        key_bits = 9 + self._bits
        if self._keys is None:
            keys, table = np.empty(0, np.int64), np.empty((4, 0), np.int64)
        else:
            keys = self._kernels.to_numpy(self._keys)
            table = np.stack([self._kernels.to_numpy(column)
                              for column in self._table])
        # The first bin of each scale index, and the end.
        edges = np.searchsorted(keys, np.arange(scale_count + 1) << key_bits)
        keys &= (1 << key_bits) - 1
        squares = (table[3].astype(np.uint64) << np.uint64(32)) | (
            table[2].astype(np.uint64))
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
