"""How much errors in each column of a model's weights count; as
client/jobs/importance.h."""

from __future__ import annotations

import dataclasses
from typing import (TYPE_CHECKING, Callable, Iterable, Mapping, Optional,
                    Sequence, Union)

from quantd import errors
from quantd._input_squares import InputSquares
from quantd._llama_names import llama_name
from quantd._model_rounding import ModelRounding, StoredInputs
from quantd.encoding import EncodingSpec, Importance
from quantd.tensor import TensorName

if TYPE_CHECKING:
    from quantd.client import Client

# Methods that compare errors.
_SEARCHES = ("mse", "sqnr", "best_of")
# Model that has the stored inputs: its name, or a ModelRounding with more.
InputsLike = Union[str, ModelRounding, None]


class ModelImportance:
    """Weights of columns by tensor, or the stored inputs that they follow
    from."""

    def __init__(self, squares: Optional[Mapping[str, InputSquares]],
                 inputs: Optional[ModelRounding]) -> None:
        """squares: what imatrix.load() gives."""
        self._squares = squares
        self._inputs = inputs
        self._weights: dict[str, list[float]] = {}
        self._stored: Optional[StoredInputs] = None

    def find(self, tensors: Iterable[tuple[str, Sequence[int]]],
             specs_of: Callable[[str], Sequence[EncodingSpec]],
             client: Optional[Client]) -> None:
        """Finds the weights of tensors of those names and shapes, or the stored
        inputs that they follow from.

        Raises: ARGUMENT_INVALID for one of another number of columns, or that
            has both, and where there is importance of no tensor; those of
            Client.list_statistics.
        """
        tensors = list(tensors)
        wanted = [name for name, _ in tensors if any(
            spec.importance is not None for spec in specs_of(name))]
        if self._squares is not None:
            if wanted:
                raise errors.argument_invalid(
                    "expected an importance matrix or a spec with importance "
                    f"for {wanted[0]}, got both", "importance")
            self._find_weights(tensors, specs_of, self._squares)
        elif any(needs_source(spec) for name in wanted
                 for spec in specs_of(name)):
            self._find_inputs(wanted, specs_of, client)

    def _find_weights(self, tensors: Sequence[tuple[str, Sequence[int]]],
                      specs_of: Callable[[str], Sequence[EncodingSpec]],
                      squares: Mapping[str, InputSquares]) -> None:
        untaken = missing = ""
        for name, shape in tensors:
            if not any(spec.method in _SEARCHES for spec in specs_of(name)):
                untaken = untaken or name
                continue
            entry = squares.get(name) or squares.get(llama_name(name))
            if entry is None:
                missing = missing or name
                continue
            columns = shape[-1] if shape else 1
            if entry.sums.shape[1] != columns:
                raise errors.argument_invalid(
                    f"expected importance for the {columns} columns of {name}, "
                    f"got that of {entry.sums.shape[1]}", "importance")
            self._weights[name] = entry.mean_squares()
        if tensors and not self._weights:
            raise errors.argument_invalid(
                "expected weights to quantize in the importance matrix, such "
                f"as {missing}, got none of them" if missing else
                f"expected mse, sqnr or best-of in the spec of {untaken}",
                "importance")

    def _find_inputs(self, wanted: Sequence[str],
                     specs_of: Callable[[str], Sequence[EncodingSpec]],
                     client: Optional[Client]) -> None:
        if self._inputs is None:
            raise errors.argument_invalid(
                "expected inputs with a spec with importance: the model that "
                "has the moments of the inputs of layers", "inputs")
        assert client is not None
        self._stored = StoredInputs(self._inputs, client, needs_gram=False)
        self._stored.check_any(any(
            self.apply(name, spec).importance is not None
            for name in wanted for spec in specs_of(name)))

    def apply(self, name: str, spec: EncodingSpec) -> EncodingSpec:
        """The spec of a tensor as the server takes it: with the weights, if it
        searches; with the full name of the inputs; or without importance, where
        there is nothing."""
        if name in self._weights and spec.method in _SEARCHES:
            return dataclasses.replace(
                spec, importance=Importance(weight=self._weights[name]))
        importance = spec.importance
        if importance is None or importance.weight is not None or isinstance(
                importance.inputs, TensorName):
            return spec
        inputs = importance.inputs or (
            self._stored and self._stored.name_of(name))
        if not inputs or self._inputs is None:
            return dataclasses.replace(spec, importance=None)
        return dataclasses.replace(spec, importance=dataclasses.replace(
            importance, inputs=TensorName(self._inputs.model, inputs,
                                          self._inputs.revision)))


def needs_source(spec: EncodingSpec) -> bool:
    """True if the spec's importance says not all of where it comes from."""
    return (spec.importance is not None and spec.importance.weight is None and
            not isinstance(spec.importance.inputs, TensorName))


def as_inputs(inputs: InputsLike) -> Optional[ModelRounding]:
    """Raises: ARGUMENT_INVALID for what only rounding takes."""
    if isinstance(inputs, str):
        return ModelRounding(inputs)
    if isinstance(inputs, ModelRounding) and (
            inputs.damping is not None or inputs.column_order is not None):
        raise errors.argument_invalid(
            "expected inputs without damping and column_order, which are for "
            "rounding", "inputs")
    return inputs


def source_of(inputs: InputsLike, rounding: Optional[ModelRounding],
              model: str, revision: str, has_importance: bool,
              names_count: bool) -> Optional[ModelRounding]:
    """Model that has the inputs for importance: as it was said, or with the
    rest.

    names_count: whether something else is kept or found under the model and
        the revision.

    Raises: ARGUMENT_INVALID for inputs that no spec asks for, and for a model
        or a revision that nothing does.
    """
    is_default = inputs is None and rounding is None
    if (model or revision not in ("", "main")) and not names_count and not (
            has_importance and is_default):
        raise errors.argument_invalid(
            "expected store=True with a model or a revision, under which "
            "nothing is kept otherwise", "store")
    if inputs is not None and not has_importance:
        raise errors.argument_invalid(
            "expected inputs with a spec with importance, got none",
            "inputs")
    if not is_default:
        return as_inputs(inputs) or rounding
    return ModelRounding(model, revision or "main") if model else None
