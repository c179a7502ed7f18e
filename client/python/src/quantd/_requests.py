"""Requests that go up, checked and in the messages of the protocol; for clients
of either kind. Everything here raises ARGUMENT_INVALID."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import os
from typing import (Any, Callable, Collection, Generator, Iterable, Iterator,
                    Mapping, Optional, Sequence, TypeVar, Union)

import grpc
import numpy as np

from quantd import _arrays, _globs, _sharding, errors, results
from quantd._exchange import (CalibrateExchange, CompareExchange,
                              DequantizeExchange, EvaluateExchange,
                              QuantizeExchange)
from quantd._mixture import NO_MIXTURE, Measured, MixtureUnits
from quantd._scale_stream import ScaleFeed, join_chunks, wants_chunks
from quantd._statistics_size import StatisticsSize
from quantd._ties import NamedTies, Ties
from quantd.edge import State
from quantd.encoding import (Encoding, EncodingReference, EncodingSpec,
                             GranularityLike, Source, as_granularity,
                             set_granularity, set_source)
from quantd.interchange import (ExportDownload, ImportedEncodings,
                                ImportSource, ImportUpload, TensorHint,
                                format_value)
from quantd.tensor import (ELEMENT_DTYPES, ELEMENT_TYPES, EnumNames, NameLike,
                           Slice, TensorName, as_name, format_info,
                           naming)
from quantd.v1 import encoding_pb2
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import tensor_pb2

PAGE_SIZE = 1000

_NAN_POLICIES = EnumNames(qs.NanPolicy, "NAN_POLICY_", "a policy")
_COLUMN_ORDERS = EnumNames(qs.ColumnOrder, "COLUMN_ORDER_", "an order")

SpecLike = Union[EncodingSpec, str]
# Source of quantize_many: one for all, or by pattern.
Sources = Union[Source, Mapping[str, Source], None]
Result = TypeVar("Result")


def gram_steps(array: Any, element_type: Optional[str] = None) -> list[int]:
    """Exponents for the steps of a Gram matrix of arrays like this one; see
    FeatureStatistics. 256 times the largest magnitude of a feature still fits.

    Raises: ARGUMENT_INVALID.
    """
    reals = _arrays.reals(array, element_type)
    features = reals.shape[-1] if reals.shape else 0
    if not features:
        raise errors.argument_invalid(
            f"expected a last dimension of at least 1, got {reals.shape}",
            "array")
    values = reals.data.view(ELEMENT_DTYPES[reals.element_type])
    if reals.element_type == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    # The service rounds float64 as well.
    with np.errstate(over="ignore"):
        values = np.abs(values.reshape(-1, features).astype(np.float32))
    largest = np.where(np.isfinite(values), values, 0).max(0, initial=0)
    seen = np.where(largest > 0, largest, largest.max() or 1)
    exponents = np.frexp(seen)[1] - 1 - 11
    return [int(e) for e in np.clip(exponents, -149, 116)]


@dataclasses.dataclass(frozen=True)
class FeatureStatistics:
    """Choice of what a contribution keeps of feature vectors, whose elements
    lie along one dimension; see the FeatureStatistics of proto/.

    gram: the Gram matrix X^T X of the rows X, for Rounding; by default unless
        moments are kept.
    step_exponent: the step of each feature is 2^step_exponent; see gram_steps.
        None: those that fit the array of the contribution; calibrate_chunks
        has none and needs them. The first contribution to a tensor sets them;
        later ones take those.
    max_part: the most features that are seen together, a multiple of 128;
        0: the server's limit, 8,192 by default.
    moments: count, sum and sum of squares of each feature, for Importance.
    axis: the dimension that has the features; a Gram matrix takes the last.
    """

    gram: Optional[bool] = None
    step_exponent: Optional[Sequence[int]] = None
    max_part: int = 0
    moments: bool = False
    axis: int = -1

    @property
    def keeps_gram(self) -> bool:
        """True if a Gram matrix is kept."""
        return not self.moments if self.gram is None else self.gram

    def to_proto(self) -> qs.FeatureStatistics:
        """Raises: ARGUMENT_INVALID."""
        try:
            return qs.FeatureStatistics(
                gram=self.keeps_gram, moments=self.moments,
                axis=self.axis if self.keeps_gram or self.moments else None,
                step_exponent=() if self.step_exponent is None else
                [int(exponent) for exponent in self.step_exponent],
                max_part=self.max_part)
        except (TypeError, ValueError) as error:
            raise errors.argument_invalid(
                f"not feature statistics: {error}", "features") from error


@dataclasses.dataclass(frozen=True)
class Contribution:
    """One part of a calibration that many sources feed, counted exactly once;
    see the Contribution of proto/.

    source: who sends, e.g. "rank-3".
    sequence: from 1 on; one that is not larger than the last of the source is
        acknowledged and not counted again.
    granularity: what the statistics are kept for, the same in all contributions
        to a tensor.
    mantissa_bits: 2 to 10, of the histogram's bins; 0: as many as fit.
    averaging_constant: weight in a moving average, above 0 and at most 1.
    features: what to keep of the last dimension; None: nothing.
    force_statistics: also where statistics in blocks will take more than the
        tensors of the call, and more than 16 MiB. This is refused otherwise.
    """

    source: str
    sequence: int
    granularity: GranularityLike = None
    mantissa_bits: int = 0
    averaging_constant: Optional[float] = None
    force_statistics: bool = False
    features: Optional[FeatureStatistics] = None

    def to_proto(self) -> qs.Contribution:
        """Raises: ARGUMENT_INVALID."""
        try:
            message = qs.Contribution(
                source=self.source, sequence=self.sequence,
                mantissa_bits=self.mantissa_bits,
                averaging_constant=self.averaging_constant,
                features=self.features.to_proto() if self.features else None)
        except (TypeError, ValueError) as error:
            raise errors.argument_invalid(f"not a contribution: {error}"
                                          ) from error
        set_granularity(as_granularity(self.granularity), message, None)
        return message


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Error-compensated rounding, known as GPTQ: each column of a weight makes
    up for the errors of those before it, so that the layer's outputs change
    little. See the Rounding of proto/.

    inputs: name of the layer's inputs, whose stored statistics have a Gram
        matrix: a feature for each element of a row of the weight. Model and
        revision are those of the weight where it names none.
    damping: what is added to the diagonal of the Gram matrix, as a fraction of
        its mean; None: 0.01.
    column_order: "activation" (the default), by falling power of the input, or
        "natural".
    measure_output: whether the summary tells what rounding makes of the
        layer's output, which takes about half as long again.
    """

    inputs: NameLike
    damping: Optional[float] = None
    column_order: Optional[str] = None
    measure_output: bool = True

    def to_proto(self) -> qs.Rounding:
        """Raises: ARGUMENT_INVALID."""
        try:
            return qs.Rounding(
                method=qs.ROUNDING_METHOD_COMPENSATED,
                inputs=as_name(self.inputs).to_proto(), damping=self.damping,
                column_order=_COLUMN_ORDERS.value(self.column_order),
                measure_output=self.measure_output)
        except (TypeError, ValueError) as error:
            raise errors.argument_invalid(f"not a rounding: {error}",
                                          "rounding") from error


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizeJob:
    """One tensor of quantize_many; the fields are the arguments of quantize.
    source: None is that of all.
    outer_maximum: of a spec with outer scales, what these follow from; see
        QuantizeHeader in proto/. None: the tensor's own. For tensors that
        share their outer scales.
    slice_of: see quantize."""

    array: Any
    source: Optional[Source] = None
    name: NameLike = None
    store: Optional[bool] = None
    nan_policy: Optional[str] = None
    omit_encoding: bool = False
    out: Any = None
    element_type: Optional[str] = None
    outer_maximum: Optional[Sequence[float]] = None
    rounding: Optional[Rounding] = None
    slice_of: Optional[Slice] = None


@dataclasses.dataclass(frozen=True, eq=False)
class CalibrateJob:
    """One tensor of calibrate_many; the fields are the arguments of calibrate.
    array: or a quantd.edge.State. spec, contribution: None is that of all."""

    array: Any
    name: NameLike = None
    spec: Optional[SpecLike] = None
    contribution: Optional[Contribution] = None
    element_type: Optional[str] = None
    slice_of: Optional[Slice] = None


def full_name(name: NameLike, model: str, revision: str) -> TensorName:
    """A string is a tensor of that model and revision."""
    return name if isinstance(name, TensorName) else TensorName(
        model, as_name(name).tensor, revision)


# The tensor streams.


def as_shape(shape: Any) -> tuple[int, ...]:
    """Shape of whole numbers of at least 0."""
    try:
        sizes = tuple(operator.index(size) for size in shape)
        if min(sizes, default=0) >= 0:
            return sizes
    except TypeError:
        pass
    raise errors.argument_invalid(
        f"expected a shape, a tuple of whole numbers, got {shape!r}", "shape")


def describe(shape: Sequence[int], element_type: str, name: NameLike,
             slice_of: Optional[Slice] = None) -> tensor_pb2.TensorDescription:
    """Description of a header's tensor."""
    try:
        description = tensor_pb2.TensorDescription(
            name=as_name(name).to_proto(),
            element_type=_arrays.element_type_of(element_type),
            shape=as_shape(shape))
        if slice_of is not None:
            if not isinstance(slice_of, Slice):
                raise errors.argument_invalid(
                    f"expected a Slice, got {type(slice_of).__name__}",
                    "slice_of")
            description.global_shape.extend(as_shape(slice_of.global_shape))
            description.offset.extend(as_shape(slice_of.offset))
        return description
    except ValueError as error:
        raise errors.argument_invalid(
            f"expected a shape, got {shape!r}: {error}", "shape") from error


def quantize_header(tensor: tensor_pb2.TensorDescription,
                    job: QuantizeJob) -> qs.QuantizeHeader:
    """Header of a job; its array is not looked at."""
    if job.source is None:
        raise errors.argument_invalid(
            "expected a spec, an Encoding or an EncodingReference", "source")
    header = qs.QuantizeHeader(
        tensor=tensor, store=bool(job.store),
        nan_policy=_NAN_POLICIES.value(job.nan_policy),
        omit_encoding=job.omit_encoding, outer_maximum=job.outer_maximum or (),
        rounding=job.rounding.to_proto() if job.rounding else None)
    set_source(job.source, header, len(tensor.shape))
    return header


def quantize(job: QuantizeJob) -> QuantizeExchange:
    """See Client.quantize."""
    with naming(job.name):
        return _quantize(job)


def _quantize(job: QuantizeJob) -> QuantizeExchange:
    array, slice_of = _sharding.part_of(job.array, job.slice_of)
    reals = _arrays.reals(array, job.element_type)
    exchange = QuantizeExchange(
        quantize_header(describe(reals.shape, reals.element_type, job.name,
                                 slice_of),
                        job), reals.data, _arrays.output(job.out))
    exchange.large_encodings = large_encodings([job.source], reals.shape,
                                               slice_of)
    exchange.is_torch = _arrays.is_torch(job.array)
    _check_out(exchange)
    return exchange


def large_encodings(sources: Iterable[Any], shape: Sequence[int],
                    slice_of: Optional[Slice] = None) -> dict[int, Encoding]:
    """Encodings whose scales go up in chunks, by index.

    Raises: ARGUMENT_INVALID for other scales than the shape has, or those of
    the whole for a slice.
    """
    found = {index: source for index, source in enumerate(sources)
             if isinstance(source, Encoding) and source.goes_in_chunks}
    if found and slice_of is not None:
        raise errors.argument_invalid(
            "expected an encoding with fewer scales, or an EncodingReference "
            "to one that put_encoding has stored", "source")
    for source in found.values():
        ScaleFeed(source, shape)
    return found


def _named_array(item: Any, job: str) -> dict[str, Any]:
    """Arguments that an item (name, array) gives."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise errors.argument_invalid(
            f"expected (name, array), as of state_dict().items(), or {job}, "
            f"got {type(item).__name__}", "tensors")
    return {"name": item[0], "array": item[1]}


def _is_left_out(array: Any, min_rank: int) -> bool:
    """True if quantize_many leaves out a pair of a name and this: where the
    elements are no reals, or with fewer dimensions than that. What is meant for
    reals and cannot be sent is not: that is an error."""
    if min_rank <= 0:
        return False
    if _arrays.is_torch(array):
        return bool(array.dim() < min_rank or not (
            array.is_floating_point() or array.is_complex() or
            array.is_quantized))
    try:
        if not hasattr(array, "dtype") or not hasattr(array, "ndim"):
            array = np.asarray(array)
        # Elements of uint16 may be bfloat16.
        return bool(array.ndim < min_rank or (
            np.dtype(array.dtype).kind in "biuOSUmM" and
            array.dtype != np.uint16))
    except (TypeError, ValueError):
        return False


class QuantizeItems:
    """Jobs that quantize_many makes of its items. For one thread."""

    def __init__(self, items: Any, source: Sources, model: str, revision: str,
                 store: bool, nan_policy: Optional[str], min_rank: int) -> None:
        """Raises: ARGUMENT_INVALID for patterns that match nothing."""
        self._source = None if isinstance(source, Mapping) else source
        self._patterns = dict(source) if isinstance(source, Mapping) else None
        self._model = model
        self._revision = revision
        self._store = store
        self._nan_policy = nan_policy
        self._min_rank = min_rank
        self._taken_count = 0
        self._left_out_count = 0
        if self._patterns is not None:
            self._check_patterns(self._patterns, items)

    def make(self, item: Union[QuantizeJob, tuple[str, Any]]
             ) -> Optional[QuantizeExchange]:
        """None: it is left out."""
        is_job = isinstance(item, QuantizeJob)
        job = item if isinstance(item, QuantizeJob) else QuantizeJob(
            **_named_array(item, "a QuantizeJob"))
        name = full_name(job.name, self._model, self._revision)
        source = self._source_of(job, name)
        if (self._patterns is not None and source is None) or (
                not is_job and _is_left_out(job.array, self._min_rank)):
            self._left_out_count += 1
            return None
        self._taken_count += 1
        return quantize(dataclasses.replace(
            job, name=name, source=source,
            store=self._store if job.store is None else job.store,
            nan_policy=job.nan_policy or self._nan_policy))

    def end(self) -> None:
        """After the last item. Raises: ARGUMENT_INVALID where all were left
        out."""
        if self._left_out_count and not self._taken_count:
            raise errors.argument_invalid(
                f"expected tensors of reals with {self._min_rank} dimensions "
                f"or more, and none of {self._left_out_count} is one; "
                "min_rank=0 takes every tensor", "tensors")

    def _source_of(self, job: QuantizeJob, name: TensorName
                   ) -> Optional[Source]:
        if job.source is not None or self._patterns is None:
            return self._source if job.source is None else job.source
        for pattern, source in self._patterns.items():
            if _globs.matches(pattern, name.tensor):
                return source
        return None

    def _check_patterns(self, patterns: Mapping[str, Source], items: Any
                        ) -> None:
        if not isinstance(items, Collection):
            raise errors.argument_invalid(
                "patterns take all names before anything is sent: expected a "
                "list of tensors, or a view such as state_dict().items(), got "
                f"{type(items).__name__}", "tensors")
        names = []
        for item in items:
            if isinstance(item, QuantizeJob):
                # With a source of its own it needs no pattern.
                if item.source is None:
                    names.append(as_name(item.name).tensor)
                continue
            pair = _named_array(item, "a QuantizeJob")
            if not _is_left_out(pair["array"], self._min_rank):
                names.append(as_name(pair["name"]).tensor)
        _globs.check_each_takes(
            patterns, names, "a tensor of reals" + (
                f" with {self._min_rank} dimensions or more (see min_rank)"
                if self._min_rank > 0 else ""), "source")
        for source in patterns.values():
            if isinstance(source, str):
                EncodingSpec.parse(source)


def dequantize_header(tensor: tensor_pb2.TensorDescription, source: Any
                      ) -> qs.DequantizeHeader:
    """With an encoding, or a reference to one."""
    if not isinstance(source, (Encoding, EncodingReference)):
        raise errors.argument_invalid(
            "expected an Encoding or an EncodingReference, got "
            f"{type(source).__name__}", "source")
    header = qs.DequantizeHeader(tensor=tensor)
    set_source(source, header, len(tensor.shape))
    return header


def dequantize(codes: Any,
               source: Union[Encoding, EncodingReference, None] = None,
               shape: Optional[Sequence[int]] = None,
               element_type: Optional[str] = None, name: NameLike = None,
               out: Any = None, slice_of: Optional[Slice] = None
               ) -> DequantizeExchange:
    """See Client.dequantize."""
    format_name = None
    if isinstance(codes, results.QuantizedTensor):
        format_name = codes._format()
        source = codes.encoding if source is None else source
        shape = codes.shape if shape is None else shape
        element_type = element_type or codes.element_type
        name = codes.name if name is None else name
        codes = codes.codes
    with naming(name):
        return _dequantize(codes, format_name, source, shape,
                           element_type or "float32", name, out, slice_of)


def _dequantize(codes: Any, format_name: Optional[str],
                source: Union[Encoding, EncodingReference, None],
                shape: Optional[Sequence[int]], element_type: str,
                name: NameLike, out: Any, slice_of: Optional[Slice]
                ) -> DequantizeExchange:
    data = _arrays.codes(
        codes, source.format if isinstance(source, Encoding) else format_name)
    shape = as_shape(np.shape(codes) if shape is None else shape)
    header = dequantize_header(describe(shape, element_type, name, slice_of),
                               source)
    count = 1
    for size in shape:
        count *= size
    if isinstance(source, Encoding):
        expected = format_info(source.format).size_bytes(count)
        if data.nbytes != expected:
            raise errors.argument_invalid(
                f"expected {expected} bytes of {source.format} for a "
                f"tensor of {shape}, got {data.nbytes}", "codes")
    exchange = DequantizeExchange(
        header, data, _arrays.output(out),
        count * ELEMENT_DTYPES[element_type].itemsize)
    exchange.large_encodings = large_encodings([source], shape, slice_of)
    exchange.is_torch = _arrays.is_torch(codes)
    _check_out(exchange)
    return exchange


def dequantize_of(tensor: results.QuantizedTensor,
                  element_type: Optional[str]) -> DequantizeExchange:
    """One item of dequantize_many."""
    if not isinstance(tensor, results.QuantizedTensor):
        raise errors.argument_invalid(
            f"expected a QuantizedTensor, got {type(tensor).__name__}",
            "tensors")
    return dequantize(tensor, element_type=element_type)


def calibrate_header(tensor: tensor_pb2.TensorDescription,
                     spec: Optional[SpecLike],
                     contribution: Optional[Contribution],
                     size: Optional[StatisticsSize] = None
                     ) -> qs.CalibrateHeader:
    """With either, both, or none. size: of the tensors before."""
    header = qs.CalibrateHeader(tensor=tensor)
    if spec is not None:
        header.spec.CopyFrom(_spec(spec, len(tensor.shape)))
    if contribution is not None:
        if not isinstance(contribution, Contribution):
            raise errors.argument_invalid(
                f"expected a Contribution, got {type(contribution).__name__}",
                "contribution")
        header.contribution.CopyFrom(contribution.to_proto())
        if not contribution.force_statistics:
            dtype = ELEMENT_DTYPES[ELEMENT_TYPES.name(tensor.element_type)]
            (size or StatisticsSize()).add(
                tensor.name.tensor, as_granularity(contribution.granularity),
                tensor.global_shape or tensor.shape,
                math.prod(tensor.global_shape or tensor.shape) *
                dtype.itemsize)
    return header


def calibrate(job: CalibrateJob, size: Optional[StatisticsSize] = None
              ) -> CalibrateExchange:
    """See Client.calibrate and calibrate_header."""
    with naming(job.name):
        if isinstance(job.array, State):
            return _calibrate_state(job, job.array)
        array, slice_of = _sharding.part_of(job.array, job.slice_of)
        job = dataclasses.replace(job, array=array, slice_of=slice_of)
        reals = _arrays.reals(job.array, job.element_type)
        return CalibrateExchange(
            calibrate_header(
                describe(reals.shape, reals.element_type, job.name,
                         job.slice_of), job.spec, _with_steps(job), size),
            reals.data)


def _calibrate_state(job: CalibrateJob, state: State) -> CalibrateExchange:
    """Adds to the contribution what the state says of itself."""
    contribution = job.contribution
    if not isinstance(contribution, Contribution):
        raise errors.argument_invalid("a state needs a contribution",
                                      "contribution")
    if job.slice_of is not None:
        raise errors.argument_invalid("expected that of the State", "slice_of")
    features = None
    if state.step_exponent is not None or state.moments:
        # Parts of the state's size, also where the server would make larger
        # ones.
        features = FeatureStatistics(
            gram=state.step_exponent is not None,
            step_exponent=state.step_exponent, max_part=state.max_part or (
                8192 if len(state.step_exponent or ()) > 8192 else 0),
            moments=state.moments, axis=state.axis)
    serialized = state.serialized()
    header = calibrate_header(
        describe(state.shape, state.element_type, job.name, state.slice_of),
        job.spec,
        dataclasses.replace(
            contribution, granularity=state.granularity,
            mantissa_bits=state.mantissa_bits, features=features,
            force_statistics=True))
    header.contribution.state_bytes = len(serialized)
    return CalibrateExchange(header, np.frombuffer(serialized, np.uint8))


def _with_steps(job: CalibrateJob) -> Optional[Contribution]:
    """The job's contribution, with steps of its Gram matrix."""
    contribution = job.contribution
    if not isinstance(contribution, Contribution) or (
            contribution.features is None) or not contribution.features.keeps_gram or (
                contribution.features.step_exponent is not None):
        return contribution
    return dataclasses.replace(contribution, features=dataclasses.replace(
        contribution.features,
        step_exponent=gram_steps(job.array, job.element_type)))


def calibrate_items(spec: Optional[SpecLike],
                    contribution: Optional[Contribution], model: str,
                    revision: str) -> Callable[[Any], CalibrateExchange]:
    """Function that makes exchanges of the items of one calibrate_many."""
    size = StatisticsSize()

    def make(item: Any) -> CalibrateExchange:
        job = item if isinstance(item, CalibrateJob) else CalibrateJob(
            **_named_array(item, "a CalibrateJob"))
        return calibrate(dataclasses.replace(
            job, name=full_name(job.name, model, revision),
            spec=spec if job.spec is None else job.spec,
            contribution=contribution if job.contribution is None
            else job.contribution), size)
    return make


def metric_values(metrics: Iterable[str]) -> list[Any]:
    """Values of names of fields of ErrorMetrics."""
    if isinstance(metrics, str):
        # Otherwise each of its letters were one.
        metrics = [metrics]
    return [results.METRICS.value(metric) for metric in metrics]


def evaluate_header(tensor: tensor_pb2.TensorDescription,
                    candidates: Iterable[Source], labels: Sequence[str],
                    per_scale_index: bool, with_distribution: bool,
                    encodings: bool, inputs: NameLike,
                    metrics: Iterable[str]) -> qs.EvaluateHeader:
    """Labels are those given, or the candidates that are strings. Where one
    encoding is too large for an answer, all of specs are left out."""
    header = qs.EvaluateHeader(
        tensor=tensor, per_scale_index=per_scale_index,
        with_distribution=with_distribution,
        inputs=None if inputs is None else as_name(inputs).to_proto(),
        metrics=metric_values(metrics))
    if isinstance(candidates, str):
        # Otherwise each of its letters were one.
        candidates = [candidates]
    candidates = list(candidates)
    if labels and len(labels) != len(candidates):
        raise errors.argument_invalid(
            f"expected {len(candidates)}, got {len(labels)}", "labels")
    for i, candidate in enumerate(candidates):
        added = header.candidates.add()
        set_source(candidate, added, len(tensor.shape))
        added.label = labels[i] if labels else (
            candidate if isinstance(candidate, str) else "")
    header.omit_encodings = not encodings or bool(_large_specs(header))
    return header


def _large_specs(header: qs.EvaluateHeader) -> list[int]:
    """Candidates whose encodings are too large for an answer."""
    shape = tuple(header.tensor.shape)
    return [index for index, candidate in enumerate(header.candidates)
            if candidate.WhichOneof("encoding_source") == "spec" and
            wants_chunks(candidate.spec, shape)]


# Exchanges of an evaluation, each with the candidates that it has, by their
# place among all.
Evaluations = list[tuple[list[int], EvaluateExchange]]


def evaluate(array: Any, candidates: Iterable[Source], name: NameLike,
             labels: Sequence[str], per_scale_index: bool,
             with_distribution: bool, encodings: bool,
             element_type: Optional[str], inputs: NameLike,
             outer_maxima: Sequence[Optional[float]], metrics: Iterable[str],
             slice_of: Optional[Slice] = None) -> Evaluations:
    """See Client.evaluate. In two exchanges where only some of the encodings
    that are asked for are too large for an answer."""
    with naming(name):
        array, slice_of = _sharding.part_of(array, slice_of)
        reals = _arrays.reals(array, element_type)
        candidates = [candidates] if isinstance(candidates, str) else (
            list(candidates))
        whole = evaluate_header(
            describe(reals.shape, reals.element_type, name, slice_of),
            candidates, labels, per_scale_index, with_distribution, encodings,
            inputs, metrics)
        if outer_maxima and len(outer_maxima) != len(candidates):
            raise errors.argument_invalid(
                f"expected {len(candidates)}, got {len(outer_maxima)}",
                "outer_maxima")
        for candidate, maximum in zip(whole.candidates, outer_maxima):
            if maximum is not None:
                candidate.outer_maximum.append(maximum)
        places = [[*range(len(candidates))]]
        if encodings:
            large = _large_specs(whole)
            small = [place for place in places[0] if place not in large]
            places = [some for some in (small, large) if some] or places
        found: Evaluations = []
        for some in places:
            header = qs.EvaluateHeader()
            header.CopyFrom(whole)
            del header.candidates[:]
            header.candidates.extend(whole.candidates[place] for place in some)
            header.omit_encodings = not encodings or bool(_large_specs(header))
            exchange = EvaluateExchange(header, reals.data)
            exchange.large_encodings = large_encodings(
                [candidates[place] for place in some], reals.shape, slice_of)
            found.append((some, exchange))
        return found


def join_evaluations(found: Sequence[tuple[list[int], results.Evaluation]]
                     ) -> results.Evaluation:
    """All candidates in their places."""
    metrics = sorted(((place, candidate) for places, evaluation in found
                      for place, candidate in zip(places, evaluation)),
                     key=lambda item: item[0])
    return results.Evaluation((candidate for _, candidate in metrics),
                              found[0][1].statistics)


def compare(reference: Any, test: Any, with_distribution: bool,
            element_type: Optional[str], metrics: Iterable[str]
            ) -> CompareExchange:
    """See Client.compare."""
    left = _arrays.reals(reference, element_type)
    right = _arrays.reals(test, element_type)
    if (left.shape, left.element_type) != (right.shape, right.element_type):
        raise errors.argument_invalid(
            f"expected {left.element_type} of {left.shape}, got "
            f"{right.element_type} of {right.shape}", "test")
    header = qs.EvaluateHeader(
        tensor=describe(left.shape, left.element_type, None), comparison=True,
        with_distribution=with_distribution, metrics=metric_values(metrics))
    dtype = ELEMENT_DTYPES[left.element_type]
    pairs = np.stack([left.data.view(dtype), right.data.view(dtype)], axis=-1)
    return CompareExchange(header, _arrays.as_bytes(pairs))


def _check_out(exchange: Union[QuantizeExchange, DequantizeExchange]) -> None:
    """Before anything is sent, where the size is known by then."""
    size = exchange.output_bytes()
    out = exchange.caller_out
    if out is not None and size is not None and out.nbytes != size:
        raise errors.argument_invalid(
            f"expected an array of {size} bytes, got {out.nbytes}", "out")


def _spec(spec: SpecLike, rank: Optional[int] = None) -> Any:
    if isinstance(spec, str):
        spec = EncodingSpec.parse(spec)
    if not isinstance(spec, EncodingSpec):
        raise errors.argument_invalid(
            f"expected a spec, got {type(spec).__name__}", "spec")
    return spec.to_proto(rank)


# The calls of EncodingService.


@contextlib.contextmanager
def _arguments() -> Iterator[None]:
    """Makes a bad argument of what does not go into the messages of
    protobuf."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        raise errors.argument_invalid(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Pages:
    """A call that answers in pages. make: a request of the page's token; field,
    read: of an answer's items."""

    method: str
    make: Callable[[str], Any]
    field: str
    read: Callable[[Any], Any]

    def request(self, token: str) -> Any:
        """Request of a page; the first has no token. Raises:
        ARGUMENT_INVALID."""
        with _arguments():
            return self.make(token)

    def next_token(self, answer: Any, token: str) -> str:
        """Empty after the last page. Raises: RESPONSE_MALFORMED."""
        # Otherwise a faulty server would keep the caller here for ever.
        if answer.next_page_token and answer.next_page_token == token:
            raise errors.response_malformed("a page whose next page is itself")
        return str(answer.next_page_token)


def list_encodings(model: str, revision: str) -> Pages:
    """See Client.list_encodings."""
    return Pages("ListEncodings", lambda token: es.ListEncodingsRequest(
        model=model, revision=revision, page_size=PAGE_SIZE, page_token=token),
                 "encodings", results.StoredEncoding.from_proto)


def list_models() -> Pages:
    """See Client.list_models."""
    return Pages("ListModels", lambda token: es.ListModelsRequest(
        page_size=PAGE_SIZE, page_token=token), "models",
                 results.Model.from_proto)


def list_revisions(model: str) -> Pages:
    """See Client.list_revisions."""
    return Pages("ListRevisions", lambda token: es.ListRevisionsRequest(
        model=model, page_size=PAGE_SIZE, page_token=token), "revisions",
                 results.Revision.from_proto)


def list_statistics(model: str, revision: str) -> Pages:
    """See Client.list_statistics."""
    return Pages("ListStatistics", lambda token: es.ListStatisticsRequest(
        model=model, revision=revision, page_size=PAGE_SIZE, page_token=token),
                 "entries", results.StatisticsEntry.from_proto)


class Attempts:
    """Outcome of the earlier attempts of a call that puts or deletes.

    may_be_done: one may have been done, and only its answer was lost.
    """

    def __init__(self) -> None:
        self.may_be_done = False

    def add(self, error: errors.QuantdError) -> None:
        """One that is followed by another."""
        # A server that is about to stop says so before it begins.
        if error.code == grpc.StatusCode.UNAVAILABLE and (
                error.reason != "DRAINING"):
            self.may_be_done = True

    def may_have_put(self, error: errors.QuantdError) -> bool:
        """True if the error of the last may come from what an earlier one
        stored."""
        return self.may_be_done and error.reason == "ETAG_MISMATCH"

    def may_have_deleted(self, error: errors.QuantdError) -> bool:
        """True if the error of the last may come from what an earlier one
        deleted."""
        return self.may_be_done and error.code == grpc.StatusCode.NOT_FOUND


def is_stored_from(put: encoding_pb2.Encoding, stored: encoding_pb2.Encoding
                   ) -> bool:
    """True if `stored` is what the service makes of `put`: that fills in what
    was left out, and counts the degenerate scales itself."""
    whole = encoding_pb2.Encoding()
    whole.CopyFrom(put)
    for field in ("qmin", "qmax"):
        if not put.HasField(field):
            setattr(whole, field, getattr(stored, field))
    for field in ("scale", "scale_shape"):
        if not getattr(put, field):
            getattr(whole, field).extend(getattr(stored, field))
    if not put.scale_type:
        whole.scale_type = stored.scale_type
    whole.degenerate_count = stored.degenerate_count
    # Bit by bit: scales may be NaN.
    return bool(whole.SerializeToString(deterministic=True) ==
                stored.SerializeToString(deterministic=True))


class ScaleUpload:
    """The messages of one WriteEncoding; made anew for every attempt."""

    def __init__(self, first: es.WriteEncodingRequest, encoding: Encoding
                 ) -> None:
        """Raises: ARGUMENT_INVALID for scales that are not of their type."""
        self._first = first
        self._count = encoding.scale_count
        field = "scale_code" if encoding.scale_code.size else "scale"
        # The scales as a tensor whose blocks are single elements.
        self._feed = ScaleFeed(
            encoding.with_scales(block_size=(1,),
                                 **{field: getattr(encoding, field)}),
            (self._count,))
        self._feed.check_exact()

    def __iter__(self) -> Iterator[es.WriteEncodingRequest]:
        yield self._first
        for chunk in self._feed.chunks(0, self._count, 0):
            yield es.WriteEncodingRequest(scales=encoding_pb2.ScaleChunk.FromString(
                chunk))


def messages_of(request: Any) -> Any:
    """Messages that gRPC takes for a call's request."""
    return iter(request) if isinstance(request, (ScaleUpload, ImportUpload)
                                       ) else request


def timeout_of(request: Any, timeout: float) -> float:
    """Time for one attempt: a file has longer for each 16 MiB of it."""
    return timeout * (1 + (request.size_bytes >> 24) if isinstance(
        request, ImportUpload) else 1)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call with one answer that may be tried again. attempts: is told of
    each."""

    method: str
    request: Any
    attempts: Optional[Attempts] = None


# Calls to make, one after another: the answer to each, or its error, is handed
# back before the next one.
Calls = Generator[Call, Any, Result]


def put_encoding(name: NameLike, encoding: Encoding, if_match: str
                 ) -> Calls[results.StoredEncoding]:
    """See Client.put_encoding."""
    with _arguments():
        proto, header = as_name(name).to_proto(), encoding.to_header_proto()
        request: Any
        if encoding.goes_in_chunks:
            method = "WriteEncoding"
            request = ScaleUpload(es.WriteEncodingRequest(
                name=proto, encoding=header, if_match=if_match), encoding)
        else:
            method = "PutEncoding"
            request = es.PutEncodingRequest(name=proto, encoding=header,
                                            if_match=if_match)
    attempts = Attempts()
    try:
        answer = yield Call(method, request, attempts)
    except errors.QuantdError as refused:
        if not attempts.may_have_put(refused):
            raise
        try:
            answer = yield Call("GetEncoding", es.GetEncodingRequest(name=proto))
        except errors.QuantdError:
            raise refused from None
        if not is_stored_from(encoding.to_proto(),
                              answer.stored_encoding.encoding):
            raise
        answer.stored_encoding.ClearField("encoding")
    return results.StoredEncoding.from_proto(answer.stored_encoding)


def stored_encoding(answers: Sequence[Any]) -> results.StoredEncoding:
    """Stored encoding of all messages of one ReadEncoding. Raises:
    RESPONSE_MALFORMED."""
    if not answers or not answers[0].HasField("stored_encoding"):
        raise errors.response_malformed("no encoding in the first message")
    stored = answers[0].stored_encoding
    found = results.StoredEncoding.from_proto(stored)
    if not stored.encoding.scales_in_chunks:
        return found
    return dataclasses.replace(found, encoding=join_chunks(
        stored.encoding, [answer.scales for answer in answers]))


def delete_encoding(name: NameLike, if_match: str) -> Calls[None]:
    """See Client.delete_encoding."""
    with _arguments():
        request = es.DeleteEncodingRequest(name=as_name(name).to_proto(),
                                           if_match=if_match)
    return _delete("DeleteEncoding", request)


def publish_revision(model: str, source_revision: str, revision: str,
                     keep_others: bool) -> Calls[results.PublishedRevision]:
    """See Client.publish_revision."""
    answer = yield Call("PublishRevision", es.PublishRevisionRequest(
        model=model, source_revision=source_revision, revision=revision,
        keep_others=keep_others))
    return results.PublishedRevision(answer.encoding_count,
                                     answer.replaced_count)


def delete_revision(model: str, revision: str) -> Calls[None]:
    """See Client.delete_revision."""
    return _delete("DeleteRevision", es.DeleteRevisionRequest(
        model=model, revision=revision))


def delete_model(model: str) -> Calls[None]:
    """See Client.delete_model."""
    return _delete("DeleteModel", es.DeleteModelRequest(model=model))


def delete_statistics(name: NameLike, source: str) -> Calls[None]:
    """See Client.delete_statistics."""
    with _arguments():
        request = es.DeleteStatisticsRequest(name=as_name(name).to_proto(),
                                             source=source)
    return _delete("DeleteStatistics", request)


def _delete(method: str, request: Any) -> Calls[None]:
    attempts = Attempts()
    try:
        yield Call(method, request, attempts)
    except errors.QuantdError as error:
        if not attempts.may_have_deleted(error):
            raise


@_arguments()
def export_encodings(model: str, format_name: str, revision: str,
                     patterns: Iterable[str],
                     parameter_patterns: Iterable[str]
                     ) -> es.ExportEncodingsRequest:
    """See Client.export."""
    return es.ExportEncodingsRequest(
        model=model, revision=revision, format=format_value(format_name),
        patterns=_listed(patterns, "patterns"),
        parameter_patterns=_listed(parameter_patterns, "parameter_patterns"))


def _listed(patterns: Iterable[str], field: str) -> list[str]:
    if isinstance(patterns, str):
        # Otherwise each of its letters were one.
        raise errors.argument_invalid("expected a list of patterns, got one",
                                      field)
    return list(patterns)


def export_download(request: es.ExportEncodingsRequest, path: Any,
                    overwrite: bool) -> ExportDownload:
    """See Client.export."""
    with _arguments():
        return ExportDownload(
            request, None if path is None else os.fspath(path), overwrite)


def import_encodings(source: ImportSource, model: str, format_name:
                     Optional[str], revision: str, hints: Iterable[TensorHint],
                     tensors: Mapping[str, Any], dry_run: bool
                     ) -> Calls[ImportedEncodings]:
    """See Client.import_."""
    with _arguments():
        upload = ImportUpload(es.ImportEncodingsRequest(
            model=model, revision=revision, dry_run=dry_run,
            format=format_value(format_name)), source, hints, tensors)
    try:
        answer = yield Call("ImportEncodings", upload)
    except errors.QuantdError:
        if upload.error is not None:
            raise upload.error from None
        raise
    return upload.result(answer)


@_arguments()
def compute_encodings(model: str, spec: Optional[SpecLike], revision: str,
                      overrides: Iterable[tuple[str, SpecLike]], dry_run: bool
                      ) -> es.ComputeEncodingsRequest:
    """See Client.compute_encodings."""
    request = es.ComputeEncodingsRequest(model=model, revision=revision,
                                         dry_run=dry_run)
    if spec is not None:
        request.default_spec.CopyFrom(_spec(spec))
    for pattern, override in overrides:
        request.overrides.add(pattern=pattern, spec=_spec(override))
    return request


def compute_ties(request: es.ComputeEncodingsRequest, ties: Ties,
                 names: Sequence[str]) -> None:
    """Adds the groups among the names of tensors that have statistics."""
    candidates = []
    for name in names:
        spec = next((override.spec for override in request.overrides
                     if _globs.matches(override.pattern, name)),
                    request.default_spec
                    if request.HasField("default_spec") else None)
        if spec is not None:
            candidates.append((name, spec))
    _add_ties(request, ties.find_named(candidates))


def sweep_ties(request: es.SweepRequest, ties: Ties, names: Sequence[str]
               ) -> None:
    """Adds the groups to a sweep; specs with outer scales make groups of the
    defaults matter."""
    spec = next((spec for spec in request.specs if ties.matters_of(spec)),
                request.specs[0])
    _add_ties(request, ties.find_named([(name, spec) for name in names]))


def _add_ties(request: Any, groups: Sequence[NamedTies]) -> None:
    for group in groups:
        request.ties.add(tensors=group.tensors, one_encoding=group.one_encoding)


def specs_of(request: es.ComputeEncodingsRequest) -> list[Any]:
    """All specs of a request."""
    return [*(override.spec for override in request.overrides),
            *([request.default_spec] if request.HasField("default_spec")
              else [])]


@_arguments()
def sweep(model: str, specs: Iterable[SpecLike], revision: str,
          patterns: Iterable[str]) -> es.SweepRequest:
    """See Client.sweep."""
    if isinstance(specs, str):
        # Otherwise each of its letters were one.
        specs = [specs]
    return es.SweepRequest(
        model=model, revision=revision, specs=[_spec(s) for s in specs],
        patterns=patterns)


@_arguments()
def sweep_targets(min_sqnr_db: Optional[float], max_size_bytes: Optional[int]
                  ) -> list[es.MixtureTarget]:
    """One or none. See Client.sweep."""
    if min_sqnr_db is not None and max_size_bytes is not None:
        raise errors.argument_invalid(
            "expected min_sqnr_db or max_size_bytes, got both")
    if min_sqnr_db is None and max_size_bytes is None:
        return []
    return [es.MixtureTarget(min_sqnr_db=min_sqnr_db,
                             max_size_bytes=max_size_bytes)]


@_arguments()
def choose_mixture(tensors: Mapping[str, Iterable[results.MixtureOption]],
                   min_sqnr_db: Iterable[float], max_size_bytes: Iterable[int]
                   ) -> es.ChooseMixtureRequest:
    """See Client.choose_mixture."""
    return es.ChooseMixtureRequest(
        tensors=[es.MixtureTensor(tensor=tensor, options=[
            es.MixtureOption(spec_index=option.spec_index,
                             size_bytes=option.size_bytes,
                             noise_to_signal=option.noise_to_signal)
            for option in options]) for tensor, options in tensors.items()],
        targets=[*(es.MixtureTarget(min_sqnr_db=target)
                   for target in min_sqnr_db),
                 *(es.MixtureTarget(max_size_bytes=target)
                   for target in max_size_bytes)])


def mixtures(answer: Any) -> list[results.SweepMixture]:
    """Mixtures of an answer of ChooseMixture."""
    return [results.SweepMixture.from_proto(mixture)
            for mixture in answer.mixtures]


def check_patterns(patterns: Iterable[str], names: Sequence[str], model: str,
                   revision: str, field: str, what: str = "statistics"
                   ) -> None:
    """Each matches one of the tensors that have `what`, and takes one where
    they are of overrides. Where none has, the service says so."""
    if names:
        check = (_globs.check_each_takes if field == "overrides" else
                 _globs.check_all_match)
        check(patterns, names,
              f"a tensor that has {what} in {model}, {revision or 'main'}",
              field)


def sweep_result(answers: Sequence[Any]) -> results.SweepResult:
    """Result of all messages of one sweep. Raises: RESPONSE_MALFORMED."""
    if not answers or not answers[-1].HasField("summary"):
        raise errors.response_malformed("a sweep without a summary")
    return results.SweepResult(
        tuple(results.SweepTensor.from_proto(answer)
              for answer in answers[:-1]),
        tuple(results.SweepTotal.from_proto(total)
              for total in answers[-1].summary.totals), None)


class SweepChoice:
    """The mixture of a sweep, which is chosen here and not in the sweep: what
    runtimes fuse gets one spec, whether it shares a scale or not."""

    def __init__(self, swept: results.SweepResult, spec_count: int, ties: Ties,
                 targets: Sequence[es.MixtureTarget]) -> None:
        """targets: those of sweep_targets(), one.

        Raises: ARGUMENT_INVALID for a given tie that ties none of the tensors.
        """
        self._swept = swept
        measured = {}
        for tensor in swept.tensors:
            found: list[Measured] = [None] * spec_count
            for candidate in tensor.candidates:
                if candidate.prediction is not None:
                    found[candidate.spec_index] = (
                        candidate.size_bytes,
                        math.pow(10, -candidate.prediction.sqnr_db / 10))
            measured[tensor.name.tensor] = found
        # What runtimes fuse are matrices; statistics tell no shape.
        self._units = MixtureUnits(measured, ties.of_names(list(measured)))
        options = self._units.options(targets[0].HasField("min_sqnr_db"))
        # Request of ChooseMixture; None where there is nothing to choose.
        self.request: Optional[es.ChooseMixtureRequest] = None
        if options:
            self.request = choose_mixture(options, (), ())
            self.request.targets.extend(targets)

    def result(self, answer: Any) -> results.SweepResult:
        """The sweep with its mixture. answer: None without a request."""
        (mixture,) = [NO_MIXTURE] if answer is None else mixtures(answer)
        return dataclasses.replace(self._swept,
                                   mixture=self._units.whole(mixture))


# grpc.health.v1 by hand: the stubs are not everywhere.

HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_HEALTH = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}


@_arguments()
def health(service: str) -> Optional[bytes]:
    """HealthCheckRequest{1: service}; None: no service has such a name."""
    text = service.encode()
    if len(text) > 127:
        return None
    return b"\x0a" + bytes([len(text)]) + text


def health_result(answer: bytes) -> str:
    """Status in a HealthCheckResponse{1: status}."""
    return _HEALTH.get(answer[1] if len(answer) > 1 else 0, "UNKNOWN")
