"""Answers of the service. The fields are those of the messages of the same
names in proto/quantd/v1, where their meaning and units are."""

from __future__ import annotations

import dataclasses
import datetime
import math
from typing import (Any, Callable, Collection, Iterable, NoReturn, Optional,
                    Type, TypeVar)

import numpy as np

from quantd import _arrays, errors
from quantd._tables import ResultList, Tabular, to_html
from quantd._values import dequantize, warn_of_infinities
from quantd.encoding import Encoding
from quantd.tensor import FORMATS, Array, EnumNames, TensorName, unpack
from quantd.v1 import (encoding_pb2, encoding_service_pb2,
                       quantization_service_pb2, statistics_pb2, tensor_pb2)


_T = TypeVar("_T")

_ORIGINS = EnumNames(encoding_pb2.EncodingOrigin, "ENCODING_ORIGIN_",
                     "an origin")
_SOURCES = EnumNames(quantization_service_pb2.OutputNoiseSource,
                     "OUTPUT_NOISE_SOURCE_", "a source")
METRICS = EnumNames(quantization_service_pb2.ErrorMetric, "ERROR_METRIC_",
                    "a metric")


def _read(cls: Type[_T], message: Any, **fields: Any) -> _T:
    """A `cls` of the fields that it shares with the message, and of these."""
    for field in dataclasses.fields(cls):
        if field.name not in fields:
            fields[field.name] = getattr(message, field.name)
    return cls(**fields)


def _optional(message: Any, field: str, read: Callable[[Any], _T]
              ) -> Optional[_T]:
    """read(the field), or None where it is not set."""
    return read(getattr(message, field)) if message.HasField(field) else None


def _itself(message: Any) -> Any:
    return message


def _time(message: Any) -> datetime.datetime:
    """In UTC."""
    time: datetime.datetime = message.ToDatetime(tzinfo=datetime.timezone.utc)
    return time


@dataclasses.dataclass(frozen=True)
class TensorStatistics(Tabular):
    """Counts and extremes of the elements of a tensor."""

    count: int
    min: float
    max: float
    nan_count: int
    positive_infinity_count: int
    negative_infinity_count: int
    zero_count: int

    @classmethod
    def from_proto(cls, message: tensor_pb2.TensorStatistics
                   ) -> TensorStatistics:
        """Makes the statistics of a message, as the server has them."""
        return _read(cls, message)


@dataclasses.dataclass(frozen=True)
class Prediction(Tabular):
    """The error to expect of an encoding, with bounds that hold for certain."""

    count: int
    mean_squared_error: float
    mean_squared_error_low: float
    mean_squared_error_high: float
    sqnr_db: float
    sqnr_db_low: float
    sqnr_db_high: float
    mantissa_bits: int = 0

    @classmethod
    def from_proto(cls, message: encoding_pb2.Prediction) -> Prediction:
        """Makes the prediction of a message, as the server has it."""
        return _read(cls, message)


@dataclasses.dataclass(frozen=True)
class EncodingProvenance(Tabular):
    """Provenance of a stored encoding; see the EncodingProvenance of proto/.

    origin: "elements", "statistics", "client", "import", or "unspecified" where
        it is not known.
    spec, prediction: where the service computed the encoding.
    statistics_digest_xxh3: that of the statistics, 0 for others; see
        StoredStatistics.state_digest_xxh3.
    """

    origin: str
    spec: Optional[encoding_pb2.EncodingSpec]
    statistics_digest_xxh3: int
    prediction: Optional[Prediction]
    interchange_format: str
    quantd_version: str

    @classmethod
    def from_proto(cls, message: encoding_pb2.EncodingProvenance
                   ) -> EncodingProvenance:
        """Makes the provenance of a message, as the server has it."""
        return _read(
            cls, message, origin=_ORIGINS.name(message.origin),
            spec=_optional(message, "spec", _itself),
            prediction=_optional(message, "prediction", Prediction.from_proto))


@dataclasses.dataclass(frozen=True)
class StoredEncoding(Tabular):
    """An encoding as the service keeps it; `encoding` is None in lists.
    provenance: what made it; None in lists, and where it is not known; error:
    in lists, that the stored row is damaged, and nothing but the name is
    known."""

    name: TensorName
    encoding: Optional[Encoding]
    etag: str
    generation: int
    update_time: datetime.datetime
    format: str
    scale_count: int
    provenance: Optional[EncodingProvenance] = None
    error: Optional[errors.QuantdError] = None

    @classmethod
    def from_proto(cls, message: encoding_pb2.StoredEncoding
                   ) -> StoredEncoding:
        """Makes the stored encoding of a message, as the server has it."""
        return _read(
            cls, message, name=TensorName.from_proto(message.name),
            encoding=_optional(message, "encoding", Encoding.from_proto),
            update_time=_time(message.update_time),
            format=FORMATS.name(message.format or message.encoding.format),
            provenance=_optional(message, "provenance",
                                 EncodingProvenance.from_proto),
            error=_optional(message, "error", errors.from_tensor_error))


@dataclasses.dataclass(frozen=True)
class GramResult(Tabular):
    """Counts of what was added to a Gram matrix; see the GramResult of
    proto/."""

    rows: int
    left_out_rows: int
    clipped_count: int
    part_size: int

    @classmethod
    def from_proto(cls, message: quantization_service_pb2.GramResult
                   ) -> GramResult:
        """Makes the result of a message, as the server has it."""
        return _read(cls, message)


@dataclasses.dataclass(frozen=True)
class MomentsResult(Tabular):
    """Counts of what was added to the moments of features; see the
    MomentsResult of proto/."""

    feature_count: int
    count: int
    left_out: int

    @classmethod
    def from_proto(cls, message: quantization_service_pb2.MomentsResult
                   ) -> MomentsResult:
        """Makes the result of a message, as the server has it."""
        return _read(cls, message)


@dataclasses.dataclass(frozen=True)
class FeatureMoments(Tabular):
    """Moments of the features along one dimension. Sums are rounded to float64;
    `state` has them exactly."""

    axis: int
    count: tuple[int, ...]
    left_out: tuple[int, ...]
    sum: tuple[float, ...]
    square_sum: tuple[float, ...]
    state: statistics_pb2.FeatureMoments

    @classmethod
    def from_proto(cls, message: statistics_pb2.FeatureMoments
                   ) -> FeatureMoments:
        """Makes the moments of a message, as the server has them."""
        return cls(message.axis, tuple(message.count), tuple(message.left_out),
                   _exact_sums(message.sum, len(message.count)),
                   _exact_sums(message.square_sum, len(message.count)), message)


def _exact_sums(sums: statistics_pb2.ExactSums, count: int
                ) -> tuple[float, ...]:
    """To the nearest float64."""
    def number(index: int) -> float:
        integer = int.from_bytes(
            sums.integers[index * sums.width:(index + 1) * sums.width],
            "little", signed=True)
        # Integers divide with one rounding, however long they are.
        return (float(integer << sums.exponent) if sums.exponent >= 0
                else integer / (1 << -sums.exponent))

    return tuple(number(index) for index in range(count))


@dataclasses.dataclass(frozen=True)
class ContributionResult(Tabular):
    """Result of a contribution. duplicate: it was counted before; gram: where
    it has a Gram matrix; moments: where it has those."""

    sequence: int
    duplicate: bool
    gram: Optional[GramResult] = None
    moments: Optional[MomentsResult] = None

    @classmethod
    def from_proto(cls, message: quantization_service_pb2.ContributionResult
                   ) -> ContributionResult:
        """Makes the result of a message, as the server has it."""
        return _read(
            cls, message,
            gram=_optional(message, "gram", GramResult.from_proto),
            moments=_optional(message, "moments", MomentsResult.from_proto))


@dataclasses.dataclass(frozen=True)
class CalibrateResult(Tabular):
    """stored_encoding: with a spec; contribution: with one; prediction: where
    the method keeps a histogram, and with a contribution."""

    name: TensorName
    statistics: TensorStatistics
    stored_encoding: Optional[StoredEncoding]
    prediction: Optional[Prediction]
    contribution: Optional[ContributionResult]

    @property
    def encoding(self) -> Encoding:
        """Raises: ARGUMENT_INVALID when no spec was given."""
        stored = self.stored_encoding
        if stored is None or stored.encoding is None:
            raise errors.argument_invalid(
                "no encoding was computed: calibrate with a spec")
        return stored.encoding

    @classmethod
    def from_proto(cls, message: quantization_service_pb2.CalibrateSummary
                   ) -> CalibrateResult:
        """Makes the result of a message, as the server has it."""
        return cls(
            TensorName.from_proto(message.name),
            TensorStatistics.from_proto(message.statistics),
            _optional(message, "stored_encoding", StoredEncoding.from_proto),
            _optional(message, "prediction", Prediction.from_proto),
            _optional(message, "contribution", ContributionResult.from_proto))


@dataclasses.dataclass(frozen=True)
class QuantizeSummary(Tabular):
    """Counts over the elements of a quantized tensor. output_noise: what
    rounding makes of its layer's output, with Rounding.measure_output."""

    count: int
    clipped_low_count: int
    clipped_high_count: int
    nan_count: int
    positive_infinity_count: int
    negative_infinity_count: int
    output_noise: Optional[OutputNoise] = None

    @classmethod
    def from_proto(cls, message: quantization_service_pb2.QuantizeSummary
                   ) -> QuantizeSummary:
        """Makes the summary of a message, as the server has it."""
        return _read(cls, message,
                     output_noise=_optional(message, "output_noise",
                                            OutputNoise.from_proto))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor(Tabular):
    """Codes and how to read them.

    codes: in the tensor's shape, as int8, uint8, int16, uint16 or int32; the
        bits of floats as uint8; one dimension of packed bytes for formats of 2
        and 4 bits. A tensor of torch on the CPU where one was quantized, with int32
        for uint16; otherwise an array of numpy. It is the memory of the
        caller's `out` where one was given and that is not int32.
    encoding: None when it was asked to be left out.
    element_type: of the reals, "float32", "float16", "bfloat16" or "float64".
    etag: of the encoding when it came from the store or went there.
    summary: of a tensor from a file only its count: nothing else is kept there.
    mantissa_bits: of the histograms that a spec's encoding was found from, 0
        where it needed none.
    format: of the codes, also where the encoding was left out; "" where it is
        not known.
    """

    name: TensorName
    # An array of numpy or a tensor of torch.
    codes: Any
    encoding: Optional[Encoding]
    shape: tuple[int, ...]
    element_type: str
    etag: str
    summary: QuantizeSummary
    mantissa_bits: int = 0
    format: str = ""

    def __repr__(self) -> str:
        name = f" {self.name.tensor!r}" if self.name.tensor else ""
        format_name = "codes" if self.encoding is None else self.encoding.format
        scales = "" if self.encoding is None else (
            f", {self.encoding.scale_count:,} scales")
        return (f"<QuantizedTensor{name} of {format_name}, {self.shape} of "
                f"{self.element_type}{scales}, "
                f"{self._codes_bytes():,} bytes>")

    def __array__(self, *unused: object, **unused_too: object) -> NoReturn:
        raise TypeError(
            "a QuantizedTensor is no array: take its .codes, .unpacked() for "
            "one code per element, or .dequantize() for the reals")

    def _row(self) -> dict[str, Any]:
        row = super()._row()
        row["shape"] = str(self.shape)
        row["format"] = self._format() or ""
        if self.encoding is not None:
            row["scale_count"] = self.encoding.scale_count
        row["codes_bytes"] = self._codes_bytes()
        return row

    def unpacked(self) -> Any:
        """One code per element, in the tensor's shape; an array of numpy or a
        tensor of torch, as `codes`."""
        if self.encoding is None:
            raise errors.argument_invalid("the encoding was left out")
        count = int(np.prod(self.shape, dtype=np.int64))
        plain = unpack(self._numpy_codes(), self.encoding.format,
                       count).reshape(self.shape)
        return self._as_given(plain)

    @property
    def scale(self) -> Array:
        """float32, one per block in the shape of the scales; see Encoding.

        Raises: ARGUMENT_INVALID without the encoding.
        """
        if self.encoding is None:
            raise errors.argument_invalid("the encoding was left out")
        return self.encoding.scale

    @property
    def zero_point(self) -> Array:
        """int32, as many as scales, or empty: all 0; float32 where they lie
        between codes.

        Raises: ARGUMENT_INVALID without the encoding.
        """
        if self.encoding is None:
            raise errors.argument_invalid("the encoding was left out")
        return self.encoding.zero_point

    def dequantize(self, client: Any = None) -> Any:
        """The reals, in the tensor's shape and type; computed here, with the
        bits that Client.dequantize answers. A tensor of torch where `codes` is
        one, otherwise an array of numpy, bfloat16 as uint16.

        client: a Client whose server computes them.

        Raises: ARGUMENT_INVALID without the encoding; those of the client.
        """
        if self.encoding is None:
            raise errors.argument_invalid("the encoding was left out")
        if client is not None:
            return client.dequantize(self)
        reals = dequantize(self._numpy_codes(), self.encoding, self.shape,
                           self.element_type)
        warn_of_infinities(reals, self.element_type, self.name.tensor)
        return self._as_given(reals, self.element_type)

    def _numpy_codes(self) -> Array:
        if not _arrays.is_torch(self.codes):
            codes: Array = self.codes
            return codes
        found, _ = _arrays.to_numpy(self.codes)
        format_name = self._format()
        return (found if format_name is None else
                _arrays.narrowed(found, format_name))

    def _format(self) -> Optional[str]:
        return (self.format or None if self.encoding is None else
                self.encoding.format)

    def _codes_bytes(self) -> int:
        return int(self._numpy_codes().nbytes)

    def _as_given(self, array: Array, element_type: str = "") -> Any:
        if not _arrays.is_torch(self.codes):
            return array
        return _arrays.to_torch(np.asarray(array, order="C"), element_type)


@dataclasses.dataclass(frozen=True, eq=False)
class ErrorHistogram(Tabular):
    """Bin k counts errors of 2^(first_exponent + k) up to twice that;
    zero_count those without any."""

    zero_count: int
    count: Array
    first_exponent: int

    @classmethod
    def from_proto(cls, message: quantization_service_pb2.ErrorHistogram
                   ) -> ErrorHistogram:
        """Makes the histogram of a message, as the server has it."""
        return _read(cls, message, count=np.array(message.count, np.uint64))


@dataclasses.dataclass(frozen=True)
class ErrorMetrics(Tabular):
    """The error of quantizing and dequantizing. What was not asked for is nan;
    zero_flushed_count is None then."""

    count: int
    non_finite_count: int
    clipped_low_count: int
    clipped_high_count: int
    zero_flushed_count: Optional[int]
    sum_squared_error: float
    mean_squared_error: float
    mean_absolute_error: float
    max_absolute_error: float
    mean_relative_error: float
    max_relative_error: float
    sqnr_db: float
    cosine_similarity: float
    kl_divergence: Optional[float]
    error_histogram: Optional[ErrorHistogram]

    @classmethod
    def from_proto(cls, message: quantization_service_pb2.ErrorMetrics,
                   metrics: Collection[int] = ()) -> ErrorMetrics:
        """Makes the metrics of a message, as the server has them, with these
        metrics; with none of them, all."""
        left_out = {name: None if name == "zero_flushed_count" else math.nan
                    for name in METRICS
                    if metrics and METRICS.value(name) not in metrics}
        return _read(
            cls, message,
            kl_divergence=_optional(message, "kl_divergence", float),
            error_histogram=_optional(message, "error_histogram",
                                      ErrorHistogram.from_proto), **left_out)

    def _row(self) -> dict[str, Any]:
        return {name: value for name, value in super()._row().items()
                if not (name in METRICS and (
                    value is None or math.isnan(value)))}


@dataclasses.dataclass(frozen=True)
class OutputNoise(Tabular):
    """The error at the output of a layer.

    noise_to_signal: the squared error divided by the output's square.
    source: "gram", the Gram matrix of the inputs: exact for these.
    clipped_input_count: elements of the inputs that were larger than the Gram
        matrix holds: what they add to both is told too small.
    """

    noise_to_signal: float
    source: str
    clipped_input_count: int = 0

    @property
    def sqnr_db(self) -> float:
        """SQNR of the output; infinite if there is no error."""
        if self.noise_to_signal == 0:
            return math.inf
        return -10 * math.log10(self.noise_to_signal)

    @classmethod
    def from_proto(cls, message: quantization_service_pb2.OutputNoise
                   ) -> OutputNoise:
        """Makes the noise of a message, as the server has it."""
        return cls(message.noise_to_signal, _SOURCES.name(message.source),
                   message.clipped_input_count)


@dataclasses.dataclass(frozen=True)
class CandidateMetrics(Tabular):
    """One candidate of an evaluation. encoding: when it was a spec and was not
    left out; etag: when it was a reference; size_bytes: of codes and scales;
    output_noise: with inputs."""

    _INLINE = ("overall",)

    label: str
    overall: ErrorMetrics
    per_scale_index: tuple[ErrorMetrics, ...]
    encoding: Optional[Encoding]
    etag: str
    mantissa_bits: int = 0
    size_bytes: int = 0
    output_noise: Optional[OutputNoise] = None

    @classmethod
    def from_proto(cls, message: quantization_service_pb2.CandidateMetrics,
                   metrics: Collection[int] = ()) -> CandidateMetrics:
        """See ErrorMetrics.from_proto."""
        return _read(
            cls, message,
            overall=ErrorMetrics.from_proto(message.overall, metrics),
            per_scale_index=tuple(ErrorMetrics.from_proto(one, metrics)
                                  for one in message.per_scale_index),
            encoding=_optional(message, "encoding", Encoding.from_proto),
            output_noise=_optional(message, "output_noise",
                                   OutputNoise.from_proto))


class Evaluation(ResultList[CandidateMetrics]):
    """The metrics of the candidates, in their order. statistics: of the
    elements."""

    def __init__(self, candidates: Iterable[CandidateMetrics],
                 statistics: TensorStatistics) -> None:
        super().__init__(candidates)
        self.statistics = statistics

    @classmethod
    def from_proto(cls, message: quantization_service_pb2.EvaluateSummary
                   ) -> Evaluation:
        """Makes the evaluation of a message, as the server has it."""
        return cls((CandidateMetrics.from_proto(candidate, message.metrics)
                    for candidate in message.candidates),
                   TensorStatistics.from_proto(message.statistics))


@dataclasses.dataclass(frozen=True)
class Model(Tabular):
    """One model that has encodings or statistics. error: a stored row is
    damaged, and the counts are of what is intact."""

    model: str
    revision_count: int
    encoding_count: int
    statistics_count: int = 0
    error: Optional[errors.QuantdError] = None

    @classmethod
    def from_proto(cls, message: encoding_service_pb2.Model) -> Model:
        """Makes the model of a message, as the server has it."""
        return _read(
            cls, message,
            error=_optional(message, "error", errors.from_tensor_error))


@dataclasses.dataclass(frozen=True)
class Revision(Tabular):
    """One revision of a model that has encodings or statistics. error: a
    stored row is damaged, and the counts are of what is intact."""

    revision: str
    encoding_count: int
    statistics_count: int = 0
    error: Optional[errors.QuantdError] = None

    @classmethod
    def from_proto(cls, message: encoding_service_pb2.Revision) -> Revision:
        """Makes the revision of a message, as the server has it."""
        return _read(
            cls, message,
            error=_optional(message, "error", errors.from_tensor_error))


@dataclasses.dataclass(frozen=True)
class PublishedRevision(Tabular):
    """Result of publish_revision: encodings that the revision has now, and
    those that it had before and does not have any more."""

    encoding_count: int
    replaced_count: int


@dataclasses.dataclass(frozen=True)
class ComputedEncoding(Tabular):
    """One tensor of compute_encodings: either an encoding and the error to
    expect, or how it failed."""

    name: TensorName
    stored_encoding: Optional[StoredEncoding]
    prediction: Optional[Prediction]
    error: Optional[errors.QuantdError]
    done_count: int
    total_count: int

    @classmethod
    def from_proto(cls, message: encoding_service_pb2.ComputeEncodingsResponse
                   ) -> ComputedEncoding:
        """Makes the computed encoding of a message, as the server has it."""
        return _read(
            cls, message, name=TensorName.from_proto(message.name),
            stored_encoding=_optional(message, "stored_encoding",
                                      StoredEncoding.from_proto),
            prediction=_optional(message, "prediction", Prediction.from_proto),
            error=_optional(message, "error", errors.from_tensor_error))


@dataclasses.dataclass(frozen=True)
class SweepCandidate(Tabular):
    """One spec on one tensor; with an error there is nothing else."""

    _INLINE = ("prediction",)

    spec_index: int
    prediction: Optional[Prediction]
    size_bytes: int
    error: Optional[errors.QuantdError]

    @classmethod
    def from_proto(cls, message: encoding_service_pb2.SweepCandidate
                   ) -> SweepCandidate:
        """Makes the candidate of a message, as the server has it."""
        return _read(
            cls, message,
            prediction=_optional(message, "prediction", Prediction.from_proto),
            error=_optional(message, "error", errors.from_tensor_error))


@dataclasses.dataclass(frozen=True)
class SweepTensor(Tabular):
    """One tensor of a sweep: candidates, the best first, or how it failed."""

    name: TensorName
    candidates: tuple[SweepCandidate, ...]
    error: Optional[errors.QuantdError]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A row for each candidate, or one of the error."""
        own = self._row()
        return [{**own, **candidate._row()}
                for candidate in self.candidates] or [own]

    @classmethod
    def from_proto(cls, message: encoding_service_pb2.SweepResponse
                   ) -> SweepTensor:
        """Makes the tensor of a message, as the server has it."""
        return cls(TensorName.from_proto(message.name),
                   tuple(SweepCandidate.from_proto(candidate)
                         for candidate in message.candidates),
                   _optional(message, "error", errors.from_tensor_error))


@dataclasses.dataclass(frozen=True)
class SweepTotal(Tabular):
    """One spec on all tensors."""

    spec_index: int
    size_bytes: int
    min_sqnr_db: float
    min_sqnr_tensor: str
    noise_to_signal_sum: float
    failed_count: int

    @classmethod
    def from_proto(cls, message: encoding_service_pb2.SweepTotal
                   ) -> SweepTotal:
        """Makes the total of a message, as the server has it."""
        return _read(cls, message)


@dataclasses.dataclass(frozen=True)
class SweepMixture(Tabular):
    """One spec for each tensor: spec_index by tensor."""

    choices: dict[str, int]
    size_bytes: int
    min_sqnr_db: float
    noise_to_signal_sum: float
    target_met: bool

    @classmethod
    def from_proto(cls, message: encoding_service_pb2.SweepMixture
                   ) -> SweepMixture:
        """Makes the mixture of a message, as the server has it."""
        return _read(cls, message, choices={
            choice.tensor: choice.spec_index for choice in message.choices})


@dataclasses.dataclass(frozen=True)
class MixtureOption(Tabular):
    """Result of one spec on one tensor. spec_index: the caller's own numbering;
    size_bytes: of codes and scales; noise_to_signal: sum e^2 / sum x^2, where
    not finite is worse than any number."""

    spec_index: int
    size_bytes: int
    noise_to_signal: float


@dataclasses.dataclass(frozen=True)
class SweepResult(Tabular):
    """totals: the best first; mixture: only when a target was given."""

    tensors: tuple[SweepTensor, ...]
    totals: tuple[SweepTotal, ...]
    mixture: Optional[SweepMixture]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A row for each candidate on each tensor."""
        return [row for tensor in self.tensors for row in tensor.to_dicts()]

    def _repr_html_(self) -> str:
        """The totals; tensors may be many."""
        return to_html([row for total in self.totals
                        for row in total.to_dicts()])


@dataclasses.dataclass(frozen=True)
class StatisticsSource(Tabular):
    """One source of a tensor's statistics."""

    source: str
    sequence: int
    update_time: datetime.datetime

    @classmethod
    def from_proto(cls, message: encoding_service_pb2.StatisticsSource
                   ) -> StatisticsSource:
        """Makes the source of a message, as the server has it."""
        return _read(cls, message, update_time=_time(message.update_time))


@dataclasses.dataclass(frozen=True)
class StoredGram(Tabular):
    """A stored Gram matrix, without its sums; see the StoredGram of proto/."""

    feature_count: int
    part_size: int
    part_count: int
    rows: int
    left_out_rows: int
    clipped_count: int
    size_bytes: int
    step_exponent: tuple[int, ...] = ()

    @classmethod
    def from_proto(cls, message: encoding_service_pb2.StoredGram
                   ) -> StoredGram:
        """Makes the Gram matrix of a message, as the server has it."""
        return _read(cls, message, step_exponent=tuple(message.step_exponent))


@dataclasses.dataclass(frozen=True)
class StoredStatistics(Tabular):
    """Statistics over all contributions; state: the histograms when asked;
    gram: where a contribution has a Gram matrix; moments: those of features
    when asked, where there are some; state_digest_xxh3: tells the histograms
    and counts from others, see EncodingProvenance."""

    statistics: TensorStatistics
    sources: tuple[StatisticsSource, ...]
    state: Optional[statistics_pb2.StatisticsState]
    gram: Optional[StoredGram] = None
    moments: Optional[FeatureMoments] = None
    state_digest_xxh3: int = 0

    @classmethod
    def from_proto(cls, message: encoding_service_pb2.GetStatisticsResponse
                   ) -> StoredStatistics:
        """Makes the statistics of a message, as the server has them."""
        return cls(TensorStatistics.from_proto(message.statistics),
                   tuple(StatisticsSource.from_proto(source)
                         for source in message.sources),
                   _optional(message, "state", _itself),
                   _optional(message, "gram", StoredGram.from_proto),
                   _optional(message, "moments", FeatureMoments.from_proto),
                   message.state_digest_xxh3)


@dataclasses.dataclass(frozen=True)
class StatisticsEntry(Tabular):
    """One tensor that has statistics; gram_size_bytes: the part of size_bytes
    that is of Gram matrices; error: a stored row is damaged, and the rest is of
    the sources that are intact."""

    tensor: str
    source_count: int
    size_bytes: int
    update_time: datetime.datetime
    gram_size_bytes: int = 0
    error: Optional[errors.QuantdError] = None

    @classmethod
    def from_proto(cls, message: encoding_service_pb2.StatisticsEntry
                   ) -> StatisticsEntry:
        """Makes the entry of a message, as the server has it."""
        return _read(
            cls, message, update_time=_time(message.update_time),
            error=_optional(message, "error", errors.from_tensor_error))
