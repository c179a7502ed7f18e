"""Choice of the spec that each tensor gets, where those that runtimes fuse get
the same one; like ChooseMixtures of client/models/model_sweep.h."""

from __future__ import annotations

import dataclasses
import math
from typing import Iterable, Mapping, Optional, Sequence

from quantd.results import MixtureOption, SweepMixture

# Size in bytes and noise-to-signal ratio of a spec on a tensor; None where it
# failed.
Measured = Optional[tuple[int, float]]
# Mixture where no spec succeeded on any tensor.
NO_MIXTURE = SweepMixture({}, 0, 0.0, 0.0, False)


class MixtureUnits:
    """Tensors, and groups of those that get one spec, each by the name of its
    first tensor."""

    def __init__(self, measured: Mapping[str, Sequence[Measured]],
                 groups: Iterable[Iterable[str]]) -> None:
        """measured: by tensor, each spec in order. groups: those that have a
        tensor in common are one."""
        self._measured = measured
        unit_of: dict[str, list[str]] = {}
        for group in groups:
            whole = list(dict.fromkeys(
                name for member in group
                for name in unit_of.get(member, [member])))
            unit_of.update(dict.fromkeys(whole, whole))
        self._units = {unit[0]: unit for unit in (
            unit_of.get(name, [name]) for name in measured)}

    def members(self, first: str) -> Sequence[str]:
        """The tensors of a unit."""
        return self._units[first]

    def options(self, is_least: bool) -> dict[str, list[MixtureOption]]:
        """The specs that succeeded on all tensors of a unit; of units without
        one nothing. is_least: each tensor has to reach an SQNR by itself, so
        that the worst counts."""
        found = {first: [self._option(unit, index, is_least)
                         for index in range(len(self._measured[first]))
                         if all(self._measured[name][index] is not None
                                for name in unit)]
                 for first, unit in self._units.items()}
        return {first: own for first, own in found.items() if own}

    def whole(self, mixture: SweepMixture) -> SweepMixture:
        """Mixture of all tensors, from that of the units."""
        choices = {name: index for first, index in mixture.choices.items()
                   for name in self._units[first]}
        if len(choices) == len(mixture.choices):
            return mixture
        largest = max(self._noise(*choice) for choice in choices.items())
        return dataclasses.replace(
            mixture, choices=choices, min_sqnr_db=math.inf if largest == 0 else
            -10 * math.log10(largest),
            noise_to_signal_sum=self._total(choices))

    def _option(self, unit: Sequence[str], index: int, is_least: bool
                ) -> MixtureOption:
        choices = dict.fromkeys(unit, index)
        return MixtureOption(
            index, sum(self._of(name, index)[0] for name in unit),
            max(self._noise(name, index) for name in unit) if is_least
            else self._total(choices))

    def _total(self, choices: Mapping[str, int]) -> float:
        return math.fsum(self._noise(name, index)
                         for name, index in choices.items())

    def _noise(self, name: str, index: int) -> float:
        return self._of(name, index)[1]

    def _of(self, name: str, index: int) -> tuple[int, float]:
        found = self._measured[name][index]
        assert found is not None
        return found
