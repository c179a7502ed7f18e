"""Squares of inputs that importance matrices have of a weight."""

from __future__ import annotations

import dataclasses

import numpy as np

from quantd.encoding import Importance
from quantd.tensor import Array


@dataclasses.dataclass(frozen=True, eq=False)
class InputSquares:
    """The squares of the inputs of a weight's columns.

    sums: [matrices, columns], float32; one matrix, or one for each expert.
    counts: [matrices], float32: how many inputs were summed.
    """

    sums: Array
    counts: Array

    def mean(self, matrix: int = 0) -> Array:
        """The mean square of each column's inputs; 1 where none came, as
        llama.cpp has it."""
        count = float(self.counts[matrix])
        if count <= 0:
            return np.ones(self.sums.shape[1])
        means: Array = self.sums[matrix].astype(np.float64) / count
        return means

    def mean_squares(self) -> list[float]:
        """Mean square of each column, over the inputs of all matrices."""
        count = float(np.asarray(self.counts, np.float64).sum())
        if count <= 0:
            return [1.0] * int(self.sums.shape[1])
        means: list[float] = (np.asarray(self.sums, np.float64).sum(0) /
                              count).tolist()
        return means

    def importance(self, matrix: int = 0) -> Importance:
        """For the weight [rows, columns], or for one of its experts."""
        return Importance(weight=self.mean(matrix).tolist())
