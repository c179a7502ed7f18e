"""Rounding of all weights of a model for the outputs of their layers; as
client/jobs/quantize_rounding.h."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Mapping, Optional

from quantd import _ties, errors
from quantd._requests import Rounding
from quantd.results import StatisticsEntry
from quantd.tensor import TensorName

if TYPE_CHECKING:
    from quantd.client import Client

_WEIGHT = ".weight"
_INPUT = ".input"


@dataclasses.dataclass(frozen=True)
class ModelRounding:
    """Error-compensated rounding, known as GPTQ, of the weights of a model; see
    Rounding.

    model, revision: whose stored statistics have the Gram matrices of inputs.
    inputs: name of the inputs by weight, such as Calibration.inputs of
        quantd.torch. Otherwise those of MODULE.weight are MODULE.input, or what
        layers have that runtimes fuse with it.
    damping, column_order: see Rounding.
    """

    model: str
    revision: str = "main"
    inputs: Optional[Mapping[str, str]] = None
    damping: Optional[float] = None
    column_order: Optional[str] = None


class StoredInputs:
    """Weights that have the Gram matrix of their inputs in the store, or at
    least moments."""

    def __init__(self, rounding: ModelRounding, client: Client,
                 needs_gram: bool = True) -> None:
        """Raises: those of Client.list_statistics."""
        if not isinstance(rounding, ModelRounding):
            raise errors.argument_invalid(
                f"expected a ModelRounding, got {type(rounding).__name__}",
                "rounding")
        self._rounding = rounding
        self._needs_gram = needs_gram
        self._entries: dict[str, StatisticsEntry] = {
            entry.tensor: entry for entry in client.list_statistics(
                rounding.model, rounding.revision)}
        self._usable = {
            name for name, entry in self._entries.items()
            if entry.gram_size_bytes or
            not needs_gram and self._has_moments(name, client)}
        self._patterns = [_ties.Pattern(text) for text in _ties.DEFAULTS]
        # Names of inputs by label.
        self._fused: dict[str, list[str]] = {}
        for name in sorted(self._usable):
            label = name.endswith(_INPUT) and self._label_of(
                name[:-len(_INPUT)] + _WEIGHT)
            if label:
                self._fused.setdefault(label, []).append(name)

    def of(self, weight: str) -> Optional[Rounding]:
        """None where there are none."""
        name = self.name_of(weight)
        return None if name is None else Rounding(
            TensorName(self._rounding.model, name, self._rounding.revision),
            self._rounding.damping, self._rounding.column_order)

    def check_any(self, has_any: bool) -> None:
        """Raises: ARGUMENT_INVALID where no weight has inputs."""
        if not has_any:
            what = "" if self._needs_gram else "moments or "
            raise errors.argument_invalid(
                f"expected {what}Gram matrices of inputs in model "
                f"{self._rounding.model!r}, revision {self._rounding.revision},"
                " got none for the tensors that are quantized; "
                "quantd.torch.calibrate with features=\"gram\" stores them",
                "rounding" if self._needs_gram else "inputs")

    def _has_moments(self, name: str, client: Client) -> bool:
        """True if what a weight may have as its inputs has moments."""
        inputs = self._rounding.inputs or {}
        if not ("." + name).endswith(_INPUT) and name not in inputs.values():
            return False
        return client.get_statistics(
            TensorName(self._rounding.model, name, self._rounding.revision),
            with_moments=True).moments is not None

    def name_of(self, weight: str) -> Optional[str]:
        """None where there are none."""
        inputs = self._rounding.inputs or {}
        if weight in inputs:
            return inputs[weight] if inputs[weight] in self._usable else None
        own = weight[:-len("weight")] + "input"
        if not ("." + weight).endswith(_WEIGHT):
            return None
        if own in self._usable:
            return own
        fused = self._fused.get(self._label_of(weight) or "", [])
        return fused[0] if len(fused) == 1 else None

    def _label_of(self, weight: str) -> Optional[str]:
        for pattern in self._patterns:
            label = pattern.label_of(weight)
            if label is not None:
                return label
        return None
