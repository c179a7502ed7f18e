"""One tensor on its way up and its answer on its way down."""

from __future__ import annotations

import copy
from typing import (TYPE_CHECKING, Any, Callable, Generic, Iterator, Mapping,
                    Optional, Protocol, TypeVar)

import grpc
import numpy as np

from quantd import _answers, _arrays, _wire, errors
from quantd._retries import Retries
from quantd._scale_stream import (ScaleFeed, ScaleFeeding, ScaleSink,
                                  outer_maximum, wants_chunks, xxh3_64)
from quantd._values import warn_of_infinities
from quantd.encoding import Encoding
from quantd.results import (CalibrateResult, ErrorMetrics, Evaluation,
                            QuantizedTensor, QuantizeSummary)
from quantd.tensor import (ELEMENT_DTYPES, ELEMENT_TYPES, FORMATS, Array,
                           TensorName, format_info)
from quantd.v1 import quantization_service_pb2 as service_pb2
from quantd.v1 import tensor_pb2

if TYPE_CHECKING:
    from quantd._output_memory import OutputMemory

Result = TypeVar("Result")

# A tensor whose encoding is known goes up in ranges of this, so that a retry
# does not send all of it again; more where the header is large.
_PART_BYTES = 64 << 20
_PART_BYTES_PER_HEADER_BYTE = 32
# From this size on the outer maxima of a spec are found here, so that the
# server need not hold the tensor to find them.
_OUTER_MAXIMUM_BYTES = 16 << 20


class Placement(Protocol):
    """Place of the bytes of one exchange in shared memory."""

    # Memory that the server writes to, as uint8.
    output: Optional[Array]
    # True if the output is copied to the caller's memory then.
    output_is_staged: bool

    @property
    def has_payload(self) -> bool:
        """True if the payload goes up by name."""

    @property
    def has_output(self) -> bool:
        """True if the output comes down by name."""

    @property
    def is_lost(self) -> bool:
        """True if the server does not know the memory any more."""

    def send(self, payload: Array) -> Iterator[tuple[int, bytes]]:
        """(offset in the tensor, serialized span) of one part after another."""

    def release(self, is_over: bool) -> None:
        """The exchange is done with the memory. is_over: so is the server."""


def scale_messages(encodings: Mapping[int, Encoding], header: Any,
                   element_type: Optional[str], first_bytes: int = 0
                   ) -> Callable[[int], Iterator[bytes]]:
    """Says what serialized scales go up before the payload has come so many
    bytes far.

    encodings: by candidate, those whose scales do. element_type: of reals;
        None: codes go up. first_bytes: where the payload begins.
    """
    has_candidates = "candidates" in header.DESCRIPTOR.fields_by_name
    feedings = []
    for index, encoding in encodings.items():
        bits = (format_info(encoding.format).storage_bits
                if element_type is None
                else ELEMENT_DTYPES[element_type].itemsize * 8)
        feed = ScaleFeed(encoding, tuple(header.tensor.shape),
                         first_bytes * 8 // bits)
        feedings.append((index, bits, ScaleFeeding(feed)))

    def until(end_bytes: int) -> Iterator[bytes]:
        for index, bits, feeding in feedings:
            for scales in feeding.until(-(-end_bytes * 8 // bits)):
                # CandidateScales{1: candidate, 2: scales}
                yield scales if not has_candidates else (
                    b"\x08" + _wire.varint(index) + b"\x12" +
                    _wire.varint(len(scales)) + scales)
    return until


class Exchange(Generic[Result]):
    """One tensor's way up and down. What goes up is fixed at birth. What comes
    down is gathered by `accept`, on the thread that reads the stream, until
    that says that the tensor is answered; the rest is for the thread that waits
    for it."""

    # Type of the answer's summary.
    SUMMARY: Any = None
    # True if codes go up, and not reals.
    SENDS_CODES = False

    def __init__(self, header: Any, payload: Array) -> None:
        """header: that of the RPC; payload: the tensor's bytes, as uint8."""
        self.header = header
        self.payload = payload
        # Offset of the payload in the whole tensor.
        self.offset_bytes = 0
        # Encodings whose scales go up beside the payload, by candidate; without
        # candidates there is at most number 0.
        self.large_encodings: Mapping[int, Encoding] = {}
        # Place of the bytes in shared memory; None: on the stream.
        self.placement: Optional[Placement] = None
        self.error: Optional[errors.QuantdError] = None
        # Answered, on the stream that it is on now.
        self.is_answered = False
        self.retries = Retries()
        self._summary: Any = None

    @property
    def name(self) -> TensorName:
        """Name of the tensor."""
        return TensorName.from_proto(self.header.tensor.name)

    @property
    def order_key(self) -> Any:
        """Two exchanges that share one other than None must not be on their way
        at once."""
        return None

    @property
    def size_bytes(self) -> int:
        """Size of the payload in bytes."""
        return self.payload.nbytes

    def rounds(self) -> Iterator[list[Exchange[Any]]]:
        """Exchanges to be sent for it, in rounds: before the next one, all of
        them must be answered and handed to `join`, in their order."""
        yield [self]

    def join(self, part: Exchange[Any]) -> None:
        """Adds what was sent for it and is answered. Raises: QuantdError, how
        that failed, unless that is this exchange itself."""

    def messages(self, chunk_bytes: int) -> Iterator[bytes]:
        """The messages up. Requires: chunk_bytes is a multiple of 64."""
        header: Optional[bytes] = self._serialized_header()
        scales = self._scales()
        base = self.offset_bytes
        if self.placement is not None and self.placement.has_payload:
            for part in scales(base + self.payload.nbytes):
                yield _wire.request(header, base, scales=part)
                header = None
            for offset, span in self.placement.send(self.payload):
                yield _wire.request(header, offset, shared=span)
                header = None
            return
        view = memoryview(self.payload.data)
        for offset in range(0, max(1, len(view)), chunk_bytes):
            # The rest of a tensor that failed would be dropped.
            if offset and self.is_answered:
                return
            part = view[offset:offset + chunk_bytes]
            for scale in scales(base + offset + len(part)):
                yield _wire.request(header, base + offset, scales=scale)
                header = None
            yield _wire.request(header, base + offset, part)
            header = None

    def _scales(self) -> Callable[[int], Iterator[bytes]]:
        """See scale_messages."""
        element_type = None if self.SENDS_CODES else ELEMENT_TYPES.name(
            self.header.tensor.element_type)
        return scale_messages(self.large_encodings, self.header, element_type,
                              self.offset_bytes)

    def _serialized_header(self) -> bytes:
        """Header that goes up before the bytes."""
        header: bytes = self.header.SerializeToString()
        return header

    def accept(self, message: bytes) -> bool:
        """Takes one message down; True when it was the tensor's last.

        Raises: RESPONSE_MALFORMED, which ends the stream; MalformedError and
        DecodeError likewise.
        """
        response = _wire.Response(message)
        if response.error is not None:
            self.error = errors.from_tensor_error(
                tensor_pb2.TensorError.FromString(bytes(response.error)))
            return True
        self._accept_parts(response)
        if response.summary is None:
            return False
        self._summary = self.SUMMARY.FromString(bytes(response.summary))
        self._on_summary()
        return True

    def _accept_parts(self, response: _wire.Response) -> None:
        """Takes header and data."""

    def _on_summary(self) -> None:
        """Looks whether the answer is whole."""

    def reset(self) -> None:
        """Forgets the answer, for a retry."""
        self.is_answered = False
        self.error = None
        self._summary = None

    def unshare(self) -> None:
        """Leaves shared memory, which the server does not know any more."""
        if self.placement is not None:
            self.placement.release(is_over=False)
            self.placement = None
            if "output" in self.header.DESCRIPTOR.fields_by_name:
                self.header.ClearField("output")

    def take_result(self) -> Result:
        """Result that the tensor was answered with.

        Raises: QuantdError, how it failed.
        """
        try:
            self._raise_error()
            return self._result()
        finally:
            if self.placement is not None:
                # After an error parts may still be on their way.
                self.placement.release(is_over=self.error is None)

    def _raise_error(self) -> None:
        if self.error is not None:
            if self.error.name is None:
                self.error.name = self.name
            raise self.error

    def _result(self) -> Result:
        raise NotImplementedError


class FailedExchange(Exchange[Any]):
    """A tensor that can not be sent, in its place among others."""

    def __init__(self, error: errors.QuantdError) -> None:
        super().__init__(service_pb2.CalibrateHeader(), np.empty(0, np.uint8))
        self.error = error
        self.is_answered = True


class OutputExchange(Exchange[Result]):
    """An answer of a header, data and a summary."""

    HEADER: Any = None

    def __init__(self, header: Any, payload: Array,
                 out: Optional[Array], most_output_bytes: int) -> None:
        """out: the caller's memory for the output, as uint8, or None."""
        super().__init__(header, payload)
        self.caller_out = out
        # True if the output is to be a tensor of torch.
        self.is_torch = False
        # Exchange of which this is a part.
        self.joined: Optional[OutputExchange[Result]] = None
        # Headers of a part: fields that all parts have, serialized, and those
        # that only its own has.
        self._common_header = b""
        self._own_header: Any = None
        # Memory that the output comes from without caller_out; None: numpy.
        self.output_memory: Optional[OutputMemory] = None
        self._most_output_bytes = most_output_bytes
        self._forget()

    def output_bytes(self) -> Optional[int]:
        """Size of the output, where it is known before it comes."""
        raise NotImplementedError

    @property
    def most_output_bytes(self) -> int:
        """Size of the output, or a bound of it."""
        known = self.output_bytes()
        return self._most_output_bytes if known is None else known

    def rounds(self) -> Iterator[list[Exchange[Any]]]:
        """In parts where that is possible."""
        part_bytes = self._part_bytes()
        source = self.header.WhichOneof("encoding_source")
        if self.placement is not None or self.size_bytes <= part_bytes or (
                source == "spec") or (source == "reference" and
                                      self.header.omit_encoding):
            yield [self]
        elif source != "reference":
            yield [*self.parts(part_bytes)]
        else:
            # The answer to the first says what goes by the name now.
            yield [*self.parts(part_bytes)[:1]]
            self._fix_encoding()
            yield [*self.parts(self._part_bytes(), part_bytes)]

    def _part_bytes(self) -> int:
        """Size of the ranges that it goes up in."""
        header_bytes: int = self.header.ByteSize()
        wanted = max(_PART_BYTES, header_bytes * _PART_BYTES_PER_HEADER_BYTE)
        return -(-wanted // 64) * 64

    def parts(self, part_bytes: int, begin_bytes: int = 0
              ) -> list[OutputExchange[Result]]:
        """One exchange for each range of so many bytes from there on, whose
        outputs are joined by `join`: a retry sends only those again that were
        not answered. They share what is large, the header and the payload.

        Requires: part_bytes is a multiple of 64.
        """
        make = type(self.header)
        common, first = make(), make(omit_encoding=self.header.omit_encoding)
        common.CopyFrom(self.header)
        common.ClearField("omit_encoding")
        if "store" in make.DESCRIPTOR.fields_by_name:
            first.store = self.header.store
            common.ClearField("store")
        common_header = common.SerializeToString()
        found = []
        for begin in range(begin_bytes, self.payload.nbytes, part_bytes):
            part = copy.copy(self)
            part.retries = Retries()
            part.payload = self.payload[begin:begin + part_bytes]
            part.offset_bytes = begin
            part.joined = self
            part._common_header = common_header
            # The encoding comes down, and is stored, with the first.
            part._own_header = make(omit_encoding=True) if begin else first
            part._own_header.range.begin_bytes = begin
            part._own_header.range.end_bytes = begin + part.payload.nbytes
            part.reset()
            found.append(part)
        return found

    def _serialized_header(self) -> bytes:
        if self.joined is None:
            return super()._serialized_header()
        # Messages one after another are their union.
        own: bytes = self._own_header.SerializeToString()
        return self._common_header + own

    def _fix_encoding(self) -> None:
        """Takes the encoding that the first part was answered with for all
        others: by now another one may go by its name."""
        if self.header.HasField("reference"):
            self.header.encoding.CopyFrom(self._response_header.encoding)

    def join(self, part: Exchange[Any]) -> None:
        if part is self:
            return
        part._raise_error()
        if self._summary is None:
            self._summary = self.SUMMARY()
        for field in self._summary.DESCRIPTOR.fields:
            # Tensors in parts have no output_noise.
            if field.message_type is None:
                setattr(self._summary, field.name, getattr(
                    self._summary, field.name) +
                    getattr(part._summary, field.name)
                    if field.name != "checksum_xxh3" else 0)

    def reset(self) -> None:
        super().reset()
        self._forget()

    def _forget(self) -> None:
        self._response_header: Any = None
        self._out: Optional[Array] = None
        self._view: Optional[memoryview] = None
        self._received_bytes = 0
        self._hash = xxh3_64() if xxh3_64 is not None else None
        self._sink: Optional[ScaleSink] = None

    def _accept_parts(self, response: _wire.Response) -> None:
        if response.header is not None:
            if self._response_header is not None:
                raise errors.response_malformed("a second header for a tensor")
            self._open(self.HEADER.FromString(bytes(response.header)))
        if response.scales is not None:
            if self._sink is None:
                raise errors.response_malformed("scales that were not asked")
            self._sink.add(response.scales)
        if not len(response.data):
            return
        if self._response_header is None:
            raise errors.response_malformed("data before the header")
        if self._view is None:
            # Failed here; what still comes is dropped.
            return
        begin = self._received_bytes
        end = begin + len(response.data)
        base = self._response_header.range.begin_bytes
        if response.offset != base + begin or end > len(self._view):
            raise errors.response_malformed(
                f"expected bytes from {base + begin} up to "
                f"{base + len(self._view)}, got {len(response.data)} from "
                f"{response.offset}")
        self._view[begin:end] = response.data
        self._received_bytes = end
        if self._hash is not None:
            self._hash.update(response.data)

    def _open(self, header: Any) -> None:
        """Makes room for the output."""
        wants_encoding = not (self.offset_bytes or self.header.omit_encoding)
        _answers.check_header(self.header, wants_encoding, header)
        if self.joined is None:
            _answers.check_whole(header)
        self._response_header = header
        if wants_encoding and header.encoding.scales_in_chunks and getattr(
                self.header, "scales_in_chunks", False):
            self._sink = ScaleSink(header.encoding,
                                   tuple(self.header.tensor.shape))
        size = header.size_bytes
        whole = self.joined or self
        if not self.offset_bytes:
            whole._response_header = header
        # The part that is answered first need not be the first one, and another
        # try of a reference may find an encoding of another size.
        if whole._out is None or self.header.HasField("reference"):
            whole._make_room(size)
            self.error = whole.error
        if self.error is not None:
            return
        assert whole._out is not None
        self._out = whole._out
        if self.joined is not None:
            span = header.range
            if whole._out.nbytes != size or not (
                    span.begin_bytes <= span.end_bytes <= size):
                raise errors.response_malformed(
                    f"expected a part of {whole._out.nbytes} bytes, got "
                    f"[{span.begin_bytes}, {span.end_bytes}) of {size}")
            self._out = whole._out[span.begin_bytes:span.end_bytes]
        self._view = memoryview(self._out.data)

    def _make_room(self, size: int) -> None:
        """For the whole output."""
        if self._out is not None and self._out.nbytes == size:
            return
        if self.placement is not None and self.placement.output is not None:
            out = self.placement.output
            if self.placement.output_is_staged:
                out = out[:size]
        elif self.caller_out is not None:
            out = self.caller_out
        else:
            try:
                out = (np.empty(size, np.uint8) if self.output_memory is None
                       else self.output_memory.take(size))
            except MemoryError:
                self.error = errors.QuantdError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, "ARGUMENT_INVALID",
                    f"no memory for an output of {size} bytes")
                return
        if out.nbytes != size:
            self.error = errors.argument_invalid(
                f"expected an array of {size} bytes, got {out.nbytes}", "out")
            return
        self._out = out

    def _on_summary(self) -> None:
        if self._response_header is None:
            raise errors.response_malformed("a summary before the header")
        if self.error is not None:
            return
        if self.placement is not None and self.placement.has_output:
            # Written in place: nothing was on its way.
            return
        if self._received_bytes != len(self._view or b""):
            raise errors.response_malformed(
                f"expected {len(self._view or b'')} bytes, got "
                f"{self._received_bytes}")
        if self._hash is not None:
            expected, got = self._summary.checksum_xxh3, self._hash.intdigest()
            if expected != got:
                self.error = errors.checksum_mismatch(expected, got)

    def _take_output(self) -> Array:
        """The output in memory that stays."""
        assert self._out is not None
        if self.placement is None or not self.placement.output_is_staged:
            return self._out if self.caller_out is None else self.caller_out
        if self.caller_out is None:
            return self._out.copy()
        np.copyto(self.caller_out, self._out)
        return self.caller_out


class QuantizeExchange(OutputExchange[QuantizedTensor]):
    """Exchange of Quantize."""

    HEADER = service_pb2.QuantizeResponseHeader
    SUMMARY = service_pb2.QuantizeSummary

    def __init__(self, header: service_pb2.QuantizeHeader,
                 payload: Array, out: Optional[Array]) -> None:
        self.element_type = ELEMENT_TYPES.name(header.tensor.element_type)
        self._count = (payload.nbytes //
                       ELEMENT_DTYPES[self.element_type].itemsize)
        super().__init__(header, payload, out, 4 * self._count)
        ask_for_chunks(header, payload)

    def output_bytes(self) -> Optional[int]:
        source = self.header.WhichOneof("encoding_source")
        if source == "reference":
            return None
        value = getattr(self.header, source).format
        name = FORMATS.name(value)
        if name not in FORMATS:
            return None
        return format_info(name).size_bytes(self._count)

    def _result(self) -> QuantizedTensor:
        header = self._response_header
        encoding = self._encoding()
        shape = tuple(self.header.tensor.shape)
        codes = self._take_output()
        source = self.header.WhichOneof("encoding_source")
        name = encoding.format if encoding is not None else (
            "" if source == "reference"
            else FORMATS.name(getattr(self.header, source).format))
        format_name = ""
        # Without the encoding the sign is not known where it may depend on the
        # data, and of a format that is not known here nothing is.
        if name in FORMATS and not (
                encoding is None and source == "spec" and
                self.header.spec.unsigned_if_non_negative):
            info = format_info(name)
            format_name = info.name
            if not info.is_packed:
                codes = codes.view(info.dtype).reshape(shape)
        return QuantizedTensor(
            self.name, _arrays.to_torch(codes) if self.is_torch else codes,
            encoding, shape, self.element_type,
            header.etag or self._summary.etag,
            QuantizeSummary.from_proto(self._summary), header.mantissa_bits,
            format_name)


    def _encoding(self) -> Optional[Encoding]:
        """The one that was used, None where it was left out."""
        header = self._response_header
        if not header.HasField("encoding"):
            return None
        if self._sink is not None:
            return self._sink.take(self._summary)
        return with_given_scales(header.encoding, self.large_encodings.get(0))


def with_given_scales(message: Any, given: Optional[Encoding]) -> Encoding:
    """The encoding of an answer, which lacks the scales that went up in
    chunks."""
    encoding = Encoding.from_proto(message)
    if given is None or not message.scales_in_chunks:
        return encoding
    scales = ({"scale_code": given.scale_code} if given.scale_code.size else
              {"scale": given.scale})
    return encoding.with_scales(zero_point=given.zero_point,
                                real_zero_point=(
                                    given.zero_points_are_real or None),
                                outer_scale=given.outer_scale, **scales)


def ask_for_chunks(header: Any, payload: Optional[Array] = None) -> None:
    """Sets what makes the scales of a large spec come beside the codes."""
    if header.WhichOneof("encoding_source") != "spec":
        return
    header.scales_in_chunks = not header.omit_encoding and wants_chunks(
        header.spec, tuple(header.tensor.shape))
    if payload is not None:
        find_outer_maximum(header, header.tensor, payload)


def find_outer_maximum(message: Any, tensor: Any, payload: Array) -> None:
    """Sets that of a message with a spec, where the server would hold a large
    tensor to find it."""
    if payload.nbytes < _OUTER_MAXIMUM_BYTES or message.outer_maximum or (
            message.WhichOneof("encoding_source") != "spec"):
        return
    found = outer_maximum(message.spec, tuple(tensor.shape),
                          ELEMENT_TYPES.name(tensor.element_type), payload)
    if found is not None:
        message.outer_maximum.extend(found)


class DequantizeExchange(OutputExchange[Any]):
    """Exchange of Dequantize."""

    SENDS_CODES = True
    HEADER = service_pb2.DequantizeResponseHeader
    SUMMARY = service_pb2.DequantizeSummary

    def __init__(self, header: service_pb2.DequantizeHeader,
                 payload: Array, out: Optional[Array],
                 most_output_bytes: int) -> None:
        self._element_type = ELEMENT_TYPES.name(header.tensor.element_type)
        super().__init__(header, payload, out, most_output_bytes)

    def output_bytes(self) -> Optional[int]:
        return self._most_output_bytes

    def _result(self) -> Any:
        reals = self._take_output()
        warn_of_infinities(reals, self._element_type, self.name.tensor)
        reals = reals.view(ELEMENT_DTYPES[self._element_type]).reshape(
            tuple(self.header.tensor.shape))
        return (_arrays.to_torch(reals, self._element_type) if self.is_torch
                else reals)


class CalibrateExchange(Exchange[CalibrateResult]):
    """Exchange of Calibrate."""

    SUMMARY = service_pb2.CalibrateSummary

    def _on_summary(self) -> None:
        _answers.check_calibrate(self.header, self._summary)

    @property
    def order_key(self) -> Any:
        if not self.header.HasField("contribution"):
            return None
        # The service takes an empty revision for "main".
        return (self.name.model, self.name.revision or "main",
                self.name.tensor, self.header.contribution.source)

    def _result(self) -> CalibrateResult:
        return CalibrateResult.from_proto(self._summary)


class EvaluateExchange(Exchange[Evaluation]):
    """Exchange of Evaluate with candidates."""

    SUMMARY = service_pb2.EvaluateSummary

    def __init__(self, header: service_pb2.EvaluateHeader, payload: Array
                 ) -> None:
        super().__init__(header, payload)
        if header.omit_encodings:
            for candidate in header.candidates:
                find_outer_maximum(candidate, header.tensor, payload)

    def _on_summary(self) -> None:
        _answers.check_evaluate(self.header, self._summary)

    def _result(self) -> Evaluation:
        return Evaluation.from_proto(self._summary)


class CompareExchange(Exchange[ErrorMetrics]):
    """Exchange of Evaluate with a pair of tensors."""

    SUMMARY = service_pb2.EvaluateSummary

    def _on_summary(self) -> None:
        _answers.check_evaluate(self.header, self._summary)

    def _result(self) -> ErrorMetrics:
        return ErrorMetrics.from_proto(self._summary.comparison,
                                       self._summary.metrics)
