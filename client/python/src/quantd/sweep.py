"""The error of several specs on the tensors of a model, measured in one pass
over its files, and the mixtures of specs that they make."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from typing import Any, Iterable, Mapping, Optional, Sequence, Union

from quantd import _engine, errors
from quantd._engine_flags import (importance_flags, input_flags, spec_text,
                                  tie_flags)
from quantd._input_squares import InputSquares
from quantd._model_importance import InputsLike
from quantd._progress import ProgressLike
from quantd._tables import ResultList, Tabular, to_html
from quantd._ties import TiesLike
from quantd.client import Client
from quantd.encoding import EncodingSpec
from quantd.files import Path
from quantd.results import ErrorMetrics, SweepTotal
from quantd.tensor import TensorName

Spec = Union[str, EncodingSpec]
_METRICS = ("sum_squared_error", "mean_squared_error", "max_absolute_error")
# Options of quantctl by budget.
_FLAGS = {"min_sqnr_db": "min-sqnr", "max_size_bytes": "max-bytes",
          "max_bits_per_element": "max-bits-per-element"}
# One figure, or several.
Targets = Union[float, Iterable[float]]


@dataclasses.dataclass(frozen=True)
class MeasuredCandidate(Tabular):
    """One spec on one tensor; with an error there is nothing else.

    metrics: counts, sum_squared_error, mean_squared_error, max_absolute_error
        and sqnr_db; the rest, which Client.evaluate has, is nan.
    size_bytes: of codes and scales.
    noise_to_signal: sum e^2 / sum x^2; infinity where finite elements came back
        as others, 0 where none are finite.
    output_noise: the same at the output of the layer; with `inputs`, where
        those of the tensor are stored.
    importance: whether it weighed the errors in the search for scales, not
        those that were measured.
    """

    _INLINE = ("metrics",)

    spec_index: int
    spec: Spec
    metrics: Optional[ErrorMetrics] = None
    size_bytes: int = 0
    noise_to_signal: float = math.inf
    error: Optional[errors.QuantdError] = None
    output_noise: Optional[float] = None
    importance: bool = False


@dataclasses.dataclass(frozen=True)
class MeasuredTensor(Tabular):
    """One tensor of a sweep. candidates: the best first, failures last."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    candidates: tuple[MeasuredCandidate, ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A row for each candidate."""
        return [{"name": self.name, "shape": str(self.shape),
                 "dtype": self.dtype, **candidate._row()}
                for candidate in self.candidates]


@dataclasses.dataclass(frozen=True)
class ModelMixture(Tabular):
    """One spec for each tensor.

    budget: the argument of sweep_model() that it is for, and its value.
    specs: by tensor, as quantize_model() takes them. A tensor on which all
        specs failed has none.
    min_sqnr_db, noise_to_signal_sum: with objective="output" of the outputs of
        layers, and the sum is weighed: it is an estimate of the noise-to-signal
        ratio at the end of the model.
    """

    budget: tuple[str, float]
    specs: dict[str, Spec]
    size_bytes: int
    min_sqnr_db: float
    noise_to_signal_sum: float
    target_met: bool


@dataclasses.dataclass(frozen=True, eq=False)
class ModelSweep(Tabular):
    """Result of sweep_model().

    tensors: in the order of the files, with to_dicts() for a table.
    totals: of each spec, the best first.
    mixtures: in the order of the budgets, those of min_sqnr_db first.
    unread: names of tensors of types of GGUF that are not read.
    """

    specs: tuple[Spec, ...]
    tensors: ResultList[MeasuredTensor]
    totals: tuple[SweepTotal, ...]
    mixtures: tuple[ModelMixture, ...]
    unread: tuple[str, ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A row for each candidate on each tensor."""
        return self.tensors.to_dicts()

    def _repr_html_(self) -> str:
        """The totals; tensors may be many."""
        return to_html([
            {"spec": str(self.specs[total.spec_index]), **row}
            for total in self.totals for row in total.to_dicts()])


def sweep_model(
        source: Path, specs: Sequence[Spec], *, client: Client,
        min_sqnr_db: Targets = (), max_size_bytes: Targets = (),
        max_bits_per_element: Targets = (), include: Iterable[str] = (),
        exclude: Iterable[str] = (), min_rank: int = 2,
        ties: TiesLike = True, progress: ProgressLike = False,
        inputs: InputsLike = None,
        weights: Optional[Mapping[str, float]] = None,
        objective: str = "tensor",
        importance: Optional[Mapping[str, InputSquares]] = None) -> ModelSweep:
    """Measures specs on the tensors of a file or of the folder of a model, in
    one pass over the data, and chooses a spec for each tensor; quantctl sweep
    FILE does the work, see quantize_model():

        sweep = quantd.sweep_model("llm", ["int8:per-channel", "nvfp4"],
                                   max_bits_per_element=5, client=client)
        quantd.quantize_model("llm", "llm-mixed", sweep.mixtures[0].specs,
                              client=client)

    source, client: see quantize_model(). Nothing is stored or written.
    specs: also blocks of GGUF, such as "q4_K".
    min_sqnr_db: choose the fewest bytes with at least this SQNR in every
        tensor; several figures make several mixtures.
    max_size_bytes, max_bits_per_element: choose the least noise with at most
        this many bytes, or bits for each element, of codes and scales.
    include, exclude: patterns of names; min_rank: see Client.quantize_many.
    ties: tensors that share one outer scale, and get one spec in a mixture, as
        runtimes need that fuse them; see quantize_model(). With the defaults
        the matrices of all experts of a layer get one spec too.
    progress: see Client.quantize_many.
    inputs: the model whose stored statistics have the Gram matrices of the
        layers' inputs, or a ModelRounding that says which: output_noise as
        well. Specs with importance take these, or moments.
    weights: by tensor, how much of the noise at its layer's output reaches the
        end of the model; see quantd.torch.output_weights.
    objective: what mixtures keep small. "tensor": the sum over tensors of their
        noise. "output": the sum of the layers' output noise, weighed, which
        needs `inputs` and `weights` of all tensors. Without weights that sum
        chooses worse mixtures than the tensors' noise.
    importance: see quantize_model().

    A spec that fails on a tensor is an error of that candidate; the others are
    measured all the same. Tensors without elements are left out, with a
    warning.

    Raises: that the server is away; FILE_UNREADABLE, FILE_MALFORMED,
        FILE_UNSUPPORTED, FILE_CHANGED, ARGUMENT_INVALID; ENGINE_MISSING,
        ENGINE_ENDED.
    """
    specs = [specs] if isinstance(specs, (str, EncodingSpec)) else list(specs)
    if not specs:
        raise errors.argument_invalid("expected a spec, got none", "specs")
    if objective not in ("tensor", "output"):
        raise errors.argument_invalid(
            f"expected 'tensor' or 'output', got {objective!r}", "objective")
    if objective == "output" and (inputs is None or weights is None):
        raise errors.argument_invalid(
            "expected inputs and weights with objective 'output'",
            "inputs" if inputs is None else "weights")
    if objective == "tensor" and weights is not None:
        raise errors.argument_invalid(
            "expected weights with objective 'output'", "weights")
    for name, weight in (weights or {}).items():
        if not 0 <= weight < math.inf:
            raise errors.argument_invalid(
                f"expected a finite number of at least 0, got {weight} for "
                f"{name}", "weights")
    budgets = [(name, value) for name, values in (
        ("min_sqnr_db", min_sqnr_db), ("max_size_bytes", max_size_bytes),
        ("max_bits_per_element", max_bits_per_element))
        for value in (values if isinstance(values, Iterable) else [values])]
    flags = [f"--min-rank={min_rank}", *tie_flags(ties)]
    flags += [f"--spec={spec_text(spec)}" for spec in specs]
    for option, patterns in (("include", include), ("exclude", exclude)):
        flags += [f"--{option}={pattern}" for pattern in patterns]
    with _engine.Texts() as texts:
        flags += input_flags(None, inputs, texts)
        if weights is not None:
            path = texts.add(json.dumps(dict(weights)).encode(), "weights")
            flags.append(f"--output-weights={path}")
        flags += importance_flags(importance, texts)
        document, told = _engine.run(
            client.access(),
            ["sweep", _engine.path_of(source, "source"), *flags, *(
                f"--{_FLAGS[name]}={value!r}" for name, value in budgets)],
            texts, progress)
    for text in told:
        warnings.warn(f"quantd: {text}", RuntimeWarning, stacklevel=2)
    tensors = ResultList(MeasuredTensor(
        tensor["name"], tuple(tensor["shape"]), tensor["dtype"],
        tuple(_candidate(tensor["name"], candidate, specs, texts)
              for candidate in tensor["candidates"]))
                         for tensor in document["tensors"])
    for tensor in tensors if budgets else ():
        if "*" in tensor.name or "?" in tensor.name:
            raise errors.argument_invalid(
                "expected names that stand for one tensor in a mixture, "
                f"without '*' and '?', got {tensor.name!r}; exclude it",
                "source")
    return ModelSweep(
        tuple(specs), tensors,
        tuple(_total(total) for total in document["totals"]),
        tuple(ModelMixture(
            budget, {choice["tensor"]: specs[choice["spec_index"]]
                     for choice in mixture["choices"]},
            mixture["size_bytes"],
            _decibels(mixture["min_sqnr_db"], mixture["noise_to_signal_sum"]),
            _or_infinite(mixture["noise_to_signal_sum"]),
            mixture["target_met"])
              for budget, mixture in zip(budgets, document["mixtures"])),
        tuple(document["unread"]))


def _or_infinite(value: Optional[float]) -> float:
    """A number that is null if it is infinite."""
    return math.inf if value is None else value


def _decibels(value: Optional[float], noise_to_signal: Optional[float]
              ) -> float:
    """An SQNR that is null if it is infinite."""
    if value is not None:
        return value
    return -math.inf if noise_to_signal is None else math.inf


def _candidate(name: str, document: dict[str, Any], specs: Sequence[Spec],
               texts: _engine.Texts) -> MeasuredCandidate:
    index = document["spec_index"]
    if "error" in document:
        error = texts.error_of(document["error"])
        error.name = TensorName(tensor=name)
        return MeasuredCandidate(index, specs[index], error=error)
    has_any = document["count"] > 0

    def number(key: str) -> float:
        value: Optional[float] = document[key]
        return (value if value is not None else
                math.inf if has_any else math.nan)

    noise = document.get("output_noise")
    return MeasuredCandidate(
        index, specs[index], ErrorMetrics(
            count=document["count"],
            non_finite_count=document["non_finite_count"],
            clipped_low_count=document["clipped_low_count"],
            clipped_high_count=document["clipped_high_count"],
            zero_flushed_count=None,
            **{key: number(key) for key in _METRICS},
            mean_absolute_error=math.nan, mean_relative_error=math.nan,
            max_relative_error=math.nan, cosine_similarity=math.nan,
            sqnr_db=_decibels(document["sqnr_db"], document["noise_to_signal"])
            if has_any else math.nan,
            kl_divergence=None, error_histogram=None),
        document["size_bytes"], _or_infinite(document["noise_to_signal"]),
        output_noise=None if noise is None else
        _or_infinite(noise["noise_to_signal"]),
        importance=document["importance"])


def _total(document: dict[str, Any]) -> SweepTotal:
    noise, tensor = document["noise_to_signal_sum"], document["min_sqnr_tensor"]
    return SweepTotal(
        document["spec_index"], document["size_bytes"],
        _decibels(document["min_sqnr_db"], noise) if tensor else math.nan,
        tensor, _or_infinite(noise), document["failed_count"])
