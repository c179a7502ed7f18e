"""The error of several specs on the tensors of a model, measured in one pass
over its files, and the mixtures of specs that they make."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Iterable, Mapping, Optional, Sequence, Union

from quantd import errors
from quantd._files import FileTensor
from quantd._input_squares import InputSquares
from quantd._mixture import NO_MIXTURE, MixtureUnits
from quantd._model_importance import InputsLike, ModelImportance, as_inputs
from quantd._model_rounding import StoredInputs
from quantd._plain import open_plain
from quantd._progress import Progress, ProgressLike
from quantd._specs import Filter, Template, template_of
from quantd._tables import ResultList, Tabular, to_html
from quantd._ties import Group, Ties, TiesLike, can_share
from quantd.client import Client
from quantd.encoding import Encoding, EncodingSpec
from quantd.files import Path
from quantd.results import (CandidateMetrics, ErrorMetrics, Evaluation,
                            SweepMixture, SweepTotal, TensorStatistics)
from quantd.tensor import TensorName

Spec = Union[str, EncodingSpec]
# Metrics of quantctl sweep.
_METRICS = ("sum_squared_error", "mean_squared_error", "max_absolute_error",
            "sqnr_db")
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
        exclude: Iterable[str] = (), min_rank: int = 2, streams: int = 4,
        ties: TiesLike = True, progress: ProgressLike = False,
        inputs: InputsLike = None,
        weights: Optional[Mapping[str, float]] = None,
        objective: str = "tensor",
        importance: Optional[Mapping[str, InputSquares]] = None) -> ModelSweep:
    """Measures 1 to 64 specs on the tensors of a file or of the folder of a
    model, in one pass over the data, and chooses a spec for each tensor;
    quantctl sweep FILE does the same:

        sweep = quantd.sweep_model("llm", ["int8:per-channel", "nvfp4"],
                                   max_bits_per_element=5, client=client)
        quantd.quantize_model("llm", "llm-mixed", sweep.mixtures[0].specs,
                              client=client)

    source: see quantize_model(). Nothing is stored or written.
    min_sqnr_db: choose the fewest bytes with at least this SQNR in every
        tensor; several figures make several mixtures.
    max_size_bytes, max_bits_per_element: choose the least noise with at most
        this many bytes, or bits for each element, of codes and scales.
    include, exclude: patterns of names; min_rank: see Client.quantize_many.
    streams: tensors on their way at once.
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
        FILE_UNSUPPORTED, FILE_CHANGED, ARGUMENT_INVALID.
    """
    specs = [specs] if isinstance(specs, (str, EncodingSpec)) else list(specs)
    templates = [template_of(spec) for spec in specs]
    if not 1 <= len(specs) <= 64 or streams < 1:
        raise errors.argument_invalid(
            f"expected 1 to 64 specs and at least one stream, got {len(specs)} "
            f"and {streams}", "specs")
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
    given = as_inputs(inputs)
    stored = None if given is None else StoredInputs(given, client)
    weighed = ModelImportance(importance, given)
    budgets = [(name, value) for name, values in (
        ("min_sqnr_db", min_sqnr_db), ("max_size_bytes", max_size_bytes),
        ("max_bits_per_element", max_bits_per_element))
        for value in (values if isinstance(values, Iterable) else [values])]
    files = open_plain(os.fspath(source))
    tensors = _measurable(Filter(tuple(include), tuple(exclude), min_rank
                                 ).select(
        tensor for file in files for tensor in file.tensors.values()))
    if budgets:
        _check_names(tensors)
    weighed.find([(tensor.name, tensor.shape) for tensor in tensors],
                 lambda _: [template.spec for template in templates], client)
    if objective == "output":
        assert stored is not None and weights is not None
        _check_weights(tensors, stored, weights)
    groups = Ties(ties).of_tensors(tensors)
    tied = [{tensor.name: group for group in groups
             if can_share(group, template) for tensor in group.tensors}
            for template in templates]
    measured = []
    pool = ThreadPoolExecutor(streams)
    try:
        with Progress(progress, "sweep", sum(
                tensor.size_bytes for tensor in tensors)) as shown:
            for tensor, candidates in zip(tensors, pool.map(
                    lambda tensor: _measure(tensor, specs, templates, tied,
                                            client, stored, weighed),
                    tensors)):
                measured.append(candidates)
                shown.add(tensor.size_bytes)
    finally:
        pool.shutdown(cancel_futures=True)
    return ModelSweep(
        tuple(specs), ResultList(
            MeasuredTensor(tensor.name, tensor.shape, tensor.dtype, tuple(
                sorted(candidates, key=_rank)))
            for tensor, candidates in zip(tensors, measured)),
        _totals(tensors, measured),
        _mixtures(tensors, measured, groups, specs,
                  budgets, client, weights if objective == "output" else None),
        tuple(name for file in files for name in file.unread))


def _check_names(tensors: Sequence[FileTensor]) -> None:
    """Checks that the tensors can be in a mixture, where names are patterns."""
    for tensor in tensors:
        if "*" in tensor.name or "?" in tensor.name:
            raise errors.argument_invalid(
                "expected names that stand for one tensor in a mixture, "
                f"without '*' and '?', got {tensor.name!r}; exclude it",
                "source")


def _measurable(tensors: Sequence[FileTensor]) -> list[FileTensor]:
    """Without those that have no elements, which it warns of."""
    for tensor in tensors:
        if 0 in tensor.shape:
            warnings.warn(f"quantd: tensor {tensor.name!r} has no elements: it "
                          "is left out", RuntimeWarning, stacklevel=3)
    measurable = [tensor for tensor in tensors if 0 not in tensor.shape]
    if not measurable:
        raise errors.argument_invalid(
            "expected tensors with elements, got none", "source")
    return measurable


def _check_weights(tensors: Sequence[FileTensor], stored: StoredInputs,
                   weights: Mapping[str, float]) -> None:
    for tensor in tensors:
        for field, what, has_it in (
                ("weights", "weight", tensor.name in weights),
                ("inputs", "Gram matrix of its inputs",
                 stored.of(tensor.name) is not None)):
            if not has_it:
                raise errors.argument_invalid(
                    f"{tensor.name} has no {what}, which objective 'output' "
                    "needs; exclude it, and give it a spec of its own", field)
        if not (math.isfinite(weights[tensor.name]) and
                weights[tensor.name] >= 0):
            raise errors.argument_invalid(
                f"expected a finite number of at least 0, got "
                f"{weights[tensor.name]} for {tensor.name}", "weights")


def _rank(candidate: MeasuredCandidate) -> tuple[bool, float, int]:
    return (candidate.error is not None, candidate.noise_to_signal,
            candidate.size_bytes)


def _measure(tensor: FileTensor, specs: Sequence[Spec],
             templates: Sequence[Template], tied: Sequence[dict[str, Group]],
             client: Client, stored: Optional[StoredInputs],
             weighed: ModelImportance) -> list[MeasuredCandidate]:
    """All specs on a tensor, in their order. tied: of each spec the groups that
    share a scale of it, by the names of their tensors."""
    found: dict[int, MeasuredCandidate] = {}
    wanted: dict[int, EncodingSpec] = {}

    def fail(index: int, error: errors.QuantdError) -> None:
        error.name = TensorName(tensor=tensor.name)
        found[index] = MeasuredCandidate(index, specs[index], error=error)

    for index, template in enumerate(templates):
        try:
            wanted[index] = weighed.apply(tensor.name,
                                          template.spec_of(tensor.shape))
        except errors.QuantdError as error:
            fail(index, error)
    array = tensor.array()
    rounding = None if stored is None else stored.of(tensor.name)

    def evaluate(indexes: Sequence[int]) -> None:
        ties = [tied[index][tensor.name].tie(wanted[index])
                if tensor.name in tied[index] else (wanted[index], None)
                for index in indexes]

        def measure(sources: Sequence[Union[EncodingSpec, Encoding]]
                    ) -> Evaluation:
            return client.evaluate(
                array, sources, encodings=False,
                element_type=tensor.element_type, metrics=_METRICS,
                inputs=None if rounding is None else rounding.inputs,
                outer_maxima=[None if maximum is None else maximum[0]
                              for _, maximum in ties])

        try:
            metrics = measure([spec for spec, _ in ties])
        except errors.QuantdError as error:
            if (len(ties) > 1 or error.reason != "MEMORY_BUDGET" or
                    ties[0][1] is not None or
                    ties[0][0].importance is not None):
                raise
            # The server need not hold the tensor where it is given the
            # encoding.
            try:
                calibrated = client.calibrate(
                    array, spec=ties[0][0], element_type=tensor.element_type)
            except errors.QuantdError as other:
                # Its scales do not fit a message.
                raise (error if other.reason == "SCALE_COUNT_LIMIT" else
                       other) from None
            metrics = measure([calibrated.encoding])
        for index, candidate in zip(indexes, metrics):
            found[index] = MeasuredCandidate(
                index, specs[index], candidate.overall, candidate.size_bytes,
                _noise_to_signal(candidate, metrics.statistics),
                output_noise=None if candidate.output_noise is None else
                candidate.output_noise.noise_to_signal,
                importance=wanted[index].importance is not None)

    # One that fails fails all: then each by itself.
    rounds: list[list[int]] = [list(wanted)] if wanted else []
    while rounds:
        indexes = rounds.pop()
        try:
            evaluate(indexes)
        except errors.QuantdError as error:
            if errors.ends_all(error):
                raise
            if len(indexes) == 1:
                fail(indexes[0], error)
            else:
                rounds = [[index] for index in indexes]
    return [found[index] for index in range(len(specs))]


def _noise_to_signal(candidate: CandidateMetrics, statistics: TensorStatistics
                     ) -> float:
    if candidate.overall.non_finite_count > (
            statistics.nan_count + statistics.positive_infinity_count +
            statistics.negative_infinity_count):
        return math.inf
    if not candidate.overall.count:
        return 0.0
    return math.pow(10, -candidate.overall.sqnr_db / 10)


def _totals(tensors: Sequence[FileTensor],
            measured: Sequence[Sequence[MeasuredCandidate]]
            ) -> tuple[SweepTotal, ...]:
    """The figures of each spec over all tensors."""
    totals = []
    for candidates in zip(*measured):
        good = [(tensor.name, candidate)
                for tensor, candidate in zip(tensors, candidates)
                if candidate.error is None]
        # Without finite elements there is none.
        measured_db = ((_sqnr_db(candidate), tensor)
                       for tensor, candidate in good)
        lowest, name = min((item for item in measured_db
                            if not math.isnan(item[0])),
                           key=lambda item: item[0], default=(math.nan, ""))
        totals.append(SweepTotal(
            candidates[0].spec_index,
            sum(candidate.size_bytes for _, candidate in good), lowest, name,
            sum(candidate.noise_to_signal for _, candidate in good),
            len(candidates) - len(good)))
    return tuple(sorted(totals, key=lambda total: (
        total.failed_count > 0, total.noise_to_signal_sum)))


def _sqnr_db(candidate: MeasuredCandidate) -> float:
    assert candidate.metrics is not None
    return (-math.inf if math.isinf(candidate.noise_to_signal)
            else candidate.metrics.sqnr_db)


def _mixtures(tensors: Sequence[FileTensor],
              measured: Sequence[Sequence[MeasuredCandidate]],
              groups: Sequence[Group], specs: Sequence[Spec],
              budgets: Sequence[tuple[str, float]], client: Client,
              weights: Optional[Mapping[str, float]]
              ) -> tuple[ModelMixture, ...]:
    """One for each budget, over the tensors on which a spec succeeded. The
    tensors of a group get one spec. weights: None for the noise of tensors."""
    def noise(candidate: MeasuredCandidate) -> float:
        if weights is None or math.isinf(candidate.noise_to_signal):
            return candidate.noise_to_signal
        assert candidate.output_noise is not None
        return candidate.output_noise

    units = MixtureUnits(
        {tensor.name: [None if candidate.error is not None else
                       (candidate.size_bytes, noise(candidate))
                       for candidate in candidates]
         for tensor, candidates in zip(tensors, measured)},
        ([tensor.name for tensor in group.tensors] for group in groups),
        weights)
    sizes = {tensor.name: math.prod(tensor.shape) for tensor in tensors}
    found: dict[tuple[str, float], ModelMixture] = {}
    for is_least in (True, False):
        alike = [budget for budget in budgets
                 if (budget[0] == "min_sqnr_db") == is_least]
        options = units.options(is_least)
        if not alike or not options:
            found.update({budget: _mixture(budget, NO_MIXTURE, specs)
                          for budget in alike})
            continue
        element_count = sum(sizes[name] for first in options
                            for name in units.members(first))
        chosen = client.choose_mixture(
            options, min_sqnr_db=[value for _, value in alike]) if (
                is_least) else client.choose_mixture(
                    options, max_size_bytes=[
                        int(value if name == "max_size_bytes"
                            else value * element_count / 8)
                        for name, value in alike])
        found.update({budget: _mixture(budget, units.whole(mixture), specs)
                      for budget, mixture in zip(alike, chosen)})
    return tuple(found[budget] for budget in budgets)


def _mixture(budget: tuple[str, float], mixture: SweepMixture,
             specs: Sequence[Spec]) -> ModelMixture:
    return ModelMixture(
        budget, {name: specs[index] for name, index in mixture.choices.items()},
        mixture.size_bytes, mixture.min_sqnr_db, mixture.noise_to_signal_sum,
        mixture.target_met)
