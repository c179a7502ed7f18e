"""Tensors that do not fit in memory: parts up and parts down."""

from __future__ import annotations

import threading
import time
from typing import (Any, Callable, Generator, Generic, Iterable, Iterator,
                    Mapping, Optional, TypeVar)

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from quantd import _answers, _apart, _arrays, _wire, errors
from quantd._exchange import (ask_for_chunks, scale_messages,
                              with_given_scales)
from quantd._scale_stream import ScaleSink, xxh3_64
from quantd._stream import Options
from quantd._values import warn_of_infinities
from quantd.encoding import Encoding
from quantd.results import QuantizeSummary
from quantd.tensor import (ELEMENT_DTYPES, ELEMENT_TYPES, FORMATS, Array,
                           TensorName, format_info)
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import tensor_pb2

Summary = TypeVar("Summary")
# How often, in a timeout, it is looked whether that has passed.
_LOOKS = 8


class Upload:
    """The messages up of one tensor, from arrays that hold its elements one
    after another."""

    def __init__(self, header: Any, element_type: Optional[str],
                 size_bytes: Optional[int], chunk_bytes: int,
                 encodings: Mapping[int, Encoding]) -> None:
        """element_type: of reals; None: codes. size_bytes: of the tensor;
        None: only the server knows. encodings: see scale_messages."""
        self.name = TensorName.from_proto(header.tensor.name)
        self._header: Optional[bytes] = header.SerializeToString()
        self._element_type = element_type
        self._format = (
            FORMATS.name(header.encoding.format) if element_type is None and
            header.WhichOneof("encoding_source") == "encoding" else None)
        self._size_bytes = size_bytes
        self._chunk_bytes = chunk_bytes
        self._sent_bytes = 0
        self._scales = scale_messages(encodings, header, element_type)

    def messages(self, array: Any) -> Iterator[bytes]:
        """Messages of the next array. Raises: ARGUMENT_INVALID."""
        data = (_arrays.codes(array, self._format)
                if self._element_type is None else
                _arrays.reals(array, self._element_type).data)
        if self._size_bytes is not None and (
                self._sent_bytes + data.nbytes > self._size_bytes):
            raise errors.argument_invalid(
                f"expected {self._size_bytes} bytes in all, got "
                f"{self._sent_bytes + data.nbytes} or more", "chunks")
        view = memoryview(data.data)
        for begin in range(0, len(view), self._chunk_bytes):
            part = view[begin:begin + self._chunk_bytes]
            for scales in self._scales(self._sent_bytes + len(part)):
                yield _wire.request(self._header, self._sent_bytes,
                                    scales=scales)
                self._header = None
            yield _wire.request(self._header, self._sent_bytes, part)
            self._header = None
            self._sent_bytes += len(part)

    def end(self) -> Iterator[bytes]:
        """Messages that are left to send after the last array. Raises:
        ARGUMENT_INVALID."""
        if self._size_bytes is not None and (
                self._sent_bytes != self._size_bytes):
            raise errors.argument_invalid(
                f"expected {self._size_bytes} bytes in all, got "
                f"{self._sent_bytes}", "chunks")
        if self._header is not None:
            yield _wire.request(self._header, 0)
            self._header = None


class Download:
    """The messages down of one tensor."""

    def __init__(self, asked: Any, header_type: Any, summary_type: Any,
                 check_summary: Optional[Callable[[Any, Any], None]] = None,
                 encodings: Optional[Mapping[int, Encoding]] = None) -> None:
        """asked: the request's header. header_type: None where the answer is
        only a summary, which check_summary then compares with it. encodings:
        see scale_messages."""
        self._asked = asked
        self.name: str = asked.tensor.name.tensor
        self.encodings = encodings or {}
        self._check_summary = check_summary
        self._header_type = header_type
        self._summary_type = summary_type
        self._received_bytes = 0
        self._hash = xxh3_64() if xxh3_64 is not None else None
        self._sink: Optional[ScaleSink] = None
        self.header: Any = None
        # Whose scales came in chunks, once all are there.
        self.encoding: Optional[Encoding] = None
        self.summary: Any = None

    def accept(self, message: bytes) -> Optional[Array]:
        """The data of one message, as uint8.

        Raises: QuantdError, how the tensor failed; MalformedError and
        DecodeError.
        """
        response = _wire.Response(message)
        if response.error is not None:
            raise errors.from_tensor_error(
                tensor_pb2.TensorError.FromString(bytes(response.error)))
        if self.summary is not None:
            raise errors.response_malformed("more after the summary")
        if response.header is not None and self._header_type is not None:
            if self.header is not None:
                raise errors.response_malformed("a second header for a tensor")
            header = self._header_type.FromString(bytes(response.header))
            _answers.check_header(
                self._asked, not self._asked.omit_encoding, header)
            _answers.check_whole(header)
            self.header = header
            if header.encoding.scales_in_chunks and getattr(
                    self._asked, "scales_in_chunks", False):
                self._sink = ScaleSink(header.encoding,
                                       tuple(self._asked.tensor.shape))
        if response.scales is not None:
            if self._sink is None:
                raise errors.response_malformed("scales that were not asked")
            self._sink.add(response.scales)
        data = None
        if len(response.data):
            if self.header is None:
                raise errors.response_malformed("data before the header")
            end = self._received_bytes + len(response.data)
            if response.offset != self._received_bytes or (
                    end > self.header.size_bytes):
                raise errors.response_malformed(
                    f"expected bytes from {self._received_bytes} up to "
                    f"{self.header.size_bytes}, got {len(response.data)} from "
                    f"{response.offset}")
            self._received_bytes = end
            if self._hash is not None:
                self._hash.update(response.data)
            data = np.frombuffer(response.data, np.uint8)
        if response.summary is not None:
            self.summary = self._summary_type.FromString(
                bytes(response.summary))
            self._check()
        return data

    def _check(self) -> None:
        if self._check_summary is not None:
            self._check_summary(self._asked, self.summary)
            return
        if self.header is None or (
                self.header.size_bytes != self._received_bytes):
            raise errors.response_malformed(
                f"the summary after {self._received_bytes} bytes")
        if self._hash is not None and (
                self._hash.intdigest() != self.summary.checksum_xxh3):
            raise errors.checksum_mismatch(self.summary.checksum_xxh3,
                                           self._hash.intdigest())
        if self._sink is not None:
            self.encoding = self._sink.take(self.summary)


class ChunkedCall:
    """One tensor on a call of its own, which begins with the first read. gRPC
    takes what goes up on a thread of its own; what comes down is read by who
    iterates, and while nobody does the server waits. For one thread."""

    def __init__(self, method: Callable[..., Any], options: Options,
                 upload: Upload, chunks: Iterable[Any],
                 download: Download) -> None:
        self._method = method
        self._options = options
        self._upload = upload
        self._chunks = chunks
        self._download = download
        self._call: Any = None
        self._fault: Optional[BaseException] = None
        self._is_late = False
        self._is_over = threading.Event()
        # Only while both sides wait for the server does time count.
        self._is_waiting = False
        self._is_producing = False
        self._moved_at = time.monotonic()
        self._has_call = threading.Event()

    def close(self) -> None:
        """Gives up what has not come."""
        self._is_over.set()
        if self._call is not None:
            _apart.run(self._call.cancel)

    def read(self) -> Iterator[Array]:
        """The data down, as uint8; afterwards there is a summary.

        Raises: QuantdError, and what the caller's chunks raised.
        """
        try:
            yield from self._read()
        except errors.QuantdError as error:
            error.name = self._upload.name
            raise

    def _read(self) -> Iterator[Array]:
        if self._is_over.is_set():
            return
        try:
            self._begin()
            while True:
                self._moved_at = time.monotonic()
                self._is_waiting = True
                message = _apart.run(lambda: next(self._call, None))
                self._is_waiting = False
                if message is None:
                    break
                if not message:
                    # The server tells that it is at work.
                    continue
                data = self._download.accept(message)
                if data is not None:
                    yield data
                if self._download.summary is not None:
                    return
            raise errors.response_malformed(
                "the server ended the stream before it had answered")
        except (_wire.MalformedError, DecodeError, TypeError) as malformed:
            raise errors.response_malformed(str(malformed)) from malformed
        except grpc.RpcError as ended:
            if self._fault is not None:
                raise self._fault  # pylint: disable=raise-missing-from
            if self._is_late:
                raise errors.timed_out(self._options.target,
                                       self._options.timeout) from None
            raise errors.from_rpc_error(ended, self._options.target,
                                        self._options.timeout) from None
        finally:
            self.close()

    def _begin(self) -> None:
        try:
            _apart.run(self._start)
        except ValueError as error:
            raise errors.client_closed() from error
        threading.Thread(target=self._watch, daemon=True,
                         name="quantd-chunks").start()

    def _start(self) -> None:
        self._call = self._method(self._messages(self._upload, self._chunks))
        self._has_call.set()
        # Interrupted, nobody else would end it.
        if self._is_over.is_set():
            self._call.cancel()

    def _messages(self, upload: Upload, chunks: Iterable[Any]
                  ) -> Iterator[bytes]:
        try:
            self._is_producing = True
            for array in chunks:
                # The time that the caller took does not count.
                self._moved_at = time.monotonic()
                self._is_producing = False
                for message in upload.messages(array):
                    if self._is_over.is_set():
                        return
                    yield message
                    self._moved_at = time.monotonic()
                self._is_producing = True
            self._moved_at = time.monotonic()
            self._is_producing = False
            yield from upload.end()
        except GeneratorExit:
            raise
        except BaseException as fault:  # pylint: disable=broad-except
            # For who iterates, and not for the thread of gRPC.
            self._fault = fault
            self._has_call.wait()
            self._call.cancel()

    def _watch(self) -> None:
        while not self._is_over.wait(self._options.timeout / _LOOKS):
            if self._is_waiting and not self._is_producing and (
                    time.monotonic() - self._moved_at > self._options.timeout):
                self._is_late = True
                self._call.cancel()
                return


class Parts(Generic[Summary]):
    """Facts that are known of an output that comes in parts."""

    def __init__(self, download: Download) -> None:
        self._download = download
        # The caller's own, where its scales went up in chunks.
        self._given = download.encodings.get(0)

    @property
    def encoding(self) -> Optional[Encoding]:
        """The one that was used; None before the first part, or with more than
        65,536 scales before the last one, and when it was asked to be left
        out."""
        header = self._download.header
        if self._download.encoding is not None:
            return self._download.encoding
        if header is None or not header.HasField("encoding"):
            return None
        if header.encoding.scales_in_chunks:
            return (None if self._given is None else
                    with_given_scales(header.encoding, self._given))
        return Encoding.from_proto(header.encoding)

    @property
    def etag(self) -> str:
        """Etag of the encoding when it came from the store or went there; empty
        before the first part."""
        header = self._download.header
        return str(header.etag) if header is not None else ""

    @property
    def summary(self) -> Summary:
        """Raises: ARGUMENT_INVALID before the last part."""
        if self._download.summary is None:
            raise errors.argument_invalid("the tensor is not done yet")
        return self._read_summary(self._download.summary)

    def _part(self, data: Array) -> Array:
        dtype = self._dtype(self._download.header)
        if data.nbytes % dtype.itemsize:
            raise errors.response_malformed("a part of an element")
        return data.view(dtype)

    def _dtype(self, header: Any) -> np.dtype[Any]:
        raise NotImplementedError

    def _read_summary(self, summary: Any) -> Summary:
        raise NotImplementedError


class QuantizedParts(Parts[QuantizeSummary]):
    """Codes; those of formats of 2 and 4 bits as packed bytes, and without the
    encoding all as bytes."""

    def _dtype(self, header: Any) -> np.dtype[Any]:
        name = FORMATS.name(header.encoding.format)
        return (format_info(name).dtype if name in FORMATS
                else np.dtype(np.uint8))

    def _read_summary(self, summary: Any) -> QuantizeSummary:
        return QuantizeSummary.from_proto(summary)


class DequantizedParts(Parts[int]):
    """Reals, bfloat16 as uint16. summary: how many."""

    def _dtype(self, header: Any) -> np.dtype[Any]:
        return ELEMENT_DTYPES[ELEMENT_TYPES.name(header.element_type)]

    def _part(self, data: Array) -> Array:
        reals = super()._part(data)
        warn_of_infinities(
            reals, ELEMENT_TYPES.name(self._download.header.element_type),
            self._download.name)
        return reals

    def _read_summary(self, summary: Any) -> int:
        return int(summary.count)


class Chunks(Parts[Summary]):
    """The output of one tensor in parts, one dimension each, in row-major
    order; to be iterated over once, or closed. For one thread."""

    def __init__(self, call: ChunkedCall, download: Download) -> None:
        super().__init__(download)
        self._call = call
        self._parts = self._read()

    def __iter__(self) -> Iterator[Array]:
        return self._parts

    def __next__(self) -> Array:
        return next(self._parts)

    def __enter__(self) -> Chunks[Summary]:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives up what has not come."""
        self._parts.close()
        self._call.close()

    def _read(self) -> Generator[Array, None, None]:
        for data in self._call.read():
            yield self._part(data)


class QuantizedChunks(QuantizedParts, Chunks[QuantizeSummary]):
    """Codes in parts; see QuantizedParts and Chunks."""


class DequantizedChunks(DequantizedParts, Chunks[int]):
    """Reals in parts; see DequantizedParts and Chunks."""


def quantize_download(asked: Any, encodings: Mapping[int, Encoding]
                      ) -> Download:
    """Download of Quantize, which is asked for a large encoding in chunks."""
    ask_for_chunks(asked)
    return Download(asked, qs.QuantizeResponseHeader, qs.QuantizeSummary,
                    encodings=encodings)


def dequantize_download(asked: Any, encodings: Mapping[int, Encoding]
                      ) -> Download:
    """Download of Dequantize."""
    return Download(asked, qs.DequantizeResponseHeader, qs.DequantizeSummary,
                    encodings=encodings)


def calibrate_download(asked: Any) -> Download:
    """Download of Calibrate."""
    return Download(asked, None, qs.CalibrateSummary,
                    _answers.check_calibrate)


def evaluate_download(asked: Any, encodings: Mapping[int, Encoding]
                      ) -> Download:
    """Download of Evaluate."""
    return Download(asked, None, qs.EvaluateSummary,
                    _answers.check_evaluate, encodings)


def size_of(shape: Iterable[int], element_type: str) -> int:
    """Bytes of a tensor of reals."""
    size = ELEMENT_DTYPES[element_type].itemsize
    for extent in shape:
        size *= extent
    return size
