"""The client: tensors to codes and back, and what the service keeps."""

from __future__ import annotations

import collections
import functools
import itertools
import os
import threading
import time
import types
import weakref
from typing import (Any, Callable, Iterable, Iterator, Literal, Mapping,
                    Optional, Sequence, Union, overload)

import grpc
import numpy as np

from quantd import (_apart, _channel, _chunks, _credentials, _requests,
                    errors, interchange, results)
from quantd._engine import Access
from quantd._exchange import Exchange, FailedExchange, OutputExchange
from quantd._output_memory import OutputMemory
from quantd._progress import Progress, ProgressLike, total_bytes
from quantd._requests import (HEALTH_METHOD, Attempts, CalibrateJob, Calls,
                              Contribution, Pages, QuantizeJob, Rounding,
                              SpecLike)
from quantd._retries import Retries
from quantd._shared_memory import SharedMemory
from quantd._stream import RetryingStream
from quantd._ties import Ties, TiesLike
from quantd.encoding import Encoding, EncodingReference, Source
from quantd.tensor import (Array, NameLike, Slice, TensorName, as_name,
                           format_info)
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import encoding_service_pb2_grpc as es_grpc

_SERVICE = "/quantd.v1.QuantizationService/"
# Tensors on their way at once on one stream: two, and more while they are
# small.
_WINDOW_BYTES = 64 << 20
_WINDOW_COUNT = 64
# gRPC encrypts what goes over one on one thread at a time.
_TLS_CHANNELS = 4


class _Connection:
    """Resources that a client holds while it is open."""

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        # Channel of calls that are no streams.
        self.channel = channels[0]
        self._channels = channels
        self._turns = itertools.cycle(channels)
        self.lock = threading.Lock()
        self.shared: Optional[SharedMemory] = None
        self.output_memory = OutputMemory()
        # Open streams without a tensor on them, by method; None: closed.
        self.idle: Optional[dict[str, list[RetryingStream]]] = {}

    def stream_channel(self) -> grpc.Channel:
        """For another stream."""
        with self.lock:
            return next(self._turns)

    def pause(self, seconds: float, error: errors.QuantdError,
              channel: Optional[grpc.Channel] = None) -> None:
        """Waits after an error of a call of the channel, by default of
        self.channel; longer if the error says so."""
        waits = self.channel if channel is None else channel
        end = time.monotonic() + max(seconds, error.retry_after or 0)
        if error.reason == "SERVER_UNREACHABLE":
            # gRPC goes on connecting only while a call waits for that,
            # otherwise every 5 s.
            try:
                _apart.run(lambda: waits.unary_unary(HEALTH_METHOD)(
                    b"", timeout=seconds, wait_for_ready=True))
            except (grpc.RpcError, ValueError):
                pass
        time.sleep(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Ends idle streams, and breaks those that are in use."""
        if _channel.is_forked():
            return
        with self.lock:
            idle, self.idle = self.idle, None
        for streams in (idle or {}).values():
            for stream in streams:
                stream.close(cancel=False)
        for channel in self._channels:
            _apart.run(channel.close)
        self.output_memory.close()
        if self.shared is not None:
            self.shared.close()


class Client:
    """A connection to one server; with TLS, up to four over which concurrent
    tensors are spread.

    target: "host", "host:port", "unix:/path/to/socket", or several replicas as
        "ipv4:10.0.0.1:8430,10.0.0.2:8430"; the port is 8430 where none is
        given.
    balance: calls go to all addresses of the target in turn, and to none that
        does not report itself healthy: for replicas without a proxy in front
        of them. Always so when the target lists several. A name that stands
        for several is "dns:///name:port".
    timeout: seconds; the deadline of a call, and of a tensor the longest time
        in which nothing moves either way.
    chunk_bytes: payload of a message, 64 bytes to 32 MiB; a server takes 4 MiB
        by default.
    retry_for: seconds for which a call without an answer is tried again, on
        UNAVAILABLE and where the server asks for a retry: long enough for a
        server to be started again, also elsewhere; 0 for not at all. What only
        a person can mend, such as TLS on one side alone, is told at once, and
        after 5 s where a server seems to want a certificate. Every call may be
        repeated without harm; quantize() and dequantize() of more than
        64 MiB with an Encoding or an EncodingReference go on behind what was
        answered.
    max_retries: the most attempts after the first in that time; None: any
        number.
    initial_backoff, max_backoff: seconds before the first retry; the pause
        doubles up to the second and varies by half.
    credentials: for TLS, see tls_credentials(); None: plaintext.
    token_file: path of a file with the token that every call brings; read again
        when it changes. Needs TLS, but to loopback and unix sockets.
    channel_options: (name, value) of gRPC, e.g. ("grpc.keepalive_time_ms",
        20000); they come before those that are set here.
    shared_memory: tensors in arrays of empty_shared() go up by name, and others
        of 64 KiB and more are copied into shared memory once, up to 256 MiB of
        them at a time. Takes a unix socket as target, and a server with
        --shared-memory on the same machine.

    Does not wait for the server: the first call finds out. A context manager;
    thread-safe, but for one process: those that are forked off later have no
    use for any client (start them with "spawn").

    From the main thread all calls but those of tensors, and each part of what
    quantize_chunks() and dequantize_chunks() yield, go over another thread, so
    that Ctrl-C does not come in the midst of gRPC. That takes 20 to 80 us more,
    mostly to wake an idle CPU; where it matters, call from another thread, or
    use quantd.aio: both go straight.

    All calls raise QuantdError. Arrays are those of numpy, tensors of torch,
    or what numpy.asarray takes; of float32, float16, float64, and bfloat16 as a
    tensor of torch or as uint16 with element_type="bfloat16". Memory that is
    contiguous is sent from where it is. What comes out is what went in, a
    tensor of torch for a tensor of torch. `out` is written in place; after an
    error its content is undefined.
    """

    def __init__(self, target: str = "127.0.0.1:8430", *,
                 timeout: float = 60.0, chunk_bytes: int = 2 << 20,
                 retry_for: float = 60.0, max_retries: Optional[int] = None,
                 initial_backoff: float = 0.05,
                 max_backoff: float = 5.0,
                 credentials: Optional[grpc.ChannelCredentials] = None,
                 channel_options: Iterable[tuple[str, Any]] = (),
                 shared_memory: bool = False,
                 token_file: Optional[str] = None,
                 balance: bool = False) -> None:
        self._options = _channel.check_options(
            target, timeout, chunk_bytes, retry_for, max_retries,
            initial_backoff, max_backoff, credentials is not None)
        target = self._options.target
        if shared_memory and not target.startswith("unix:"):
            raise errors.argument_invalid(
                f"expected a target unix:PATH, got {target!r}",
                "shared_memory")
        token = _credentials.token_of(token_file, target, credentials)
        self._access = Access(
            self._options, credentials, None if token_file is None else
            os.path.abspath(os.fsdecode(token_file)), balance)
        arguments = _channel.channel_arguments(self._options, balance,
                                               channel_options)
        _channel.check_process()
        channels = ([grpc.insecure_channel(target, arguments)]
                    if credentials is None else
                    [grpc.secure_channel(target, credentials, arguments)
                     for _ in range(_TLS_CHANNELS)])
        if token is not None:
            sender = _credentials.TokenSender(token)
            channels = [grpc.intercept_channel(channel, sender)
                        for channel in channels]
        self._connection = _Connection(channels)
        if shared_memory:
            path = target[len("unix:"):]
            if path.startswith("///"):
                path = path[2:]
            self._connection.shared = SharedMemory(path + ".memory",
                                                   self._options)
        self._encodings: Any = es_grpc.EncodingServiceStub(  # type: ignore
            self._connection.channel)
        self._finalizer = weakref.finalize(self, self._connection.close)

    def access(self) -> Access:
        """How another process reaches the server. Raises: CLIENT_CLOSED."""
        if self._connection.idle is None:
            raise errors.client_closed()
        return self._access

    @property
    def target(self) -> str:
        """The server, as it was given."""
        return self._options.target

    def __repr__(self) -> str:
        state = ", closed" if self._connection.idle is None else ""
        return f"<quantd.Client of {self._options.target}{state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a client is for one process: make another where it is "
                        "unpickled")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; calls in other threads fail with CLIENT_CLOSED
        or CANCELLED. Arrays of shared memory stay readable."""
        self._finalizer()

    # Tensors.

    def quantize(self, array: Any, source: Source, *, name: NameLike = None,
                 store: bool = False, nan_policy: Optional[str] = None,
                 omit_encoding: bool = False, out: Any = None,
                 element_type: Optional[str] = None,
                 rounding: Optional[Rounding] = None,
                 slice_of: Optional[Slice] = None
                 ) -> results.QuantizedTensor:
        """Turns reals into codes.

        source: a spec to calibrate on this very tensor ("int8:per-channel" or
            an EncodingSpec), an Encoding, or an EncodingReference to one that
            the service has.
        store: keep the encoding that was given or computed under `name`.
        nan_policy: "zero_point", "qmin" or "reject"; None: the format's code of
            NaN, or else that of 0. In a block of MX with NaN or an infinity all
            elements become NaN, unless rejected.
        out: contiguous array of as many bytes as there are codes.
        rounding: how elements become codes; None: each by itself. The server
            holds the tensor otherwise.
        slice_of: where the array lies in a tensor that it is a part of. What
            the source says is then of the whole: the codes are those that the
            whole has there, and the answer's encoding is that of the part.
            A DTensor of torch 2 says itself where its local part lies.
        """
        tensor: results.QuantizedTensor = self._one(
            "Quantize", _requests.quantize(QuantizeJob(
                array, source, name, store, nan_policy, omit_encoding, out,
                element_type, rounding=rounding, slice_of=slice_of)))
        return tensor

    def quantize_chunks(
            self, chunks: Iterable[Any], source: Source, *,
            shape: Sequence[int], element_type: str = "float32",
            name: NameLike = None, store: bool = False,
            nan_policy: Optional[str] = None, omit_encoding: bool = False
    ) -> _chunks.QuantizedChunks:
        """Turns reals that do not fit in memory into codes, part by part:

            parts = client.quantize_chunks(chunks, encoding, shape=shape)
            for codes in parts:
                file.write(codes)
            print(parts.summary.clipped_high_count)

        chunks: arrays whose elements, one array after another, are those of the
            tensor in row-major order. Taken on another thread.
        source: best an Encoding or an EncodingReference: with a spec the server
            has to hold the whole tensor (see calibrate_chunks).
        shape, element_type: of the tensor.

        Not tried again when the server goes away: the chunks are gone. An
        np.memmap, with another as `out`, is tried again by quantize().
        """
        job = QuantizeJob(None, source, name, store, nan_policy, omit_encoding)
        header = _requests.quantize_header(
            _requests.describe(shape, element_type, name), job)
        large = _requests.large_encodings([source], header.tensor.shape)
        download = _chunks.quantize_download(header, large)
        return _chunks.QuantizedChunks(self._chunked(
            "Quantize", header, element_type,
            _chunks.size_of(shape, element_type), chunks, download), download)

    @overload
    def quantize_many(
            self, tensors: Iterable[Union[QuantizeJob, tuple[str, Any]]],
            source: _requests.Sources = None, *, model: str = "",
            revision: str = "", store: bool = False,
            nan_policy: Optional[str] = None, min_rank: int = 2,
            on_error: Literal["raise"] = "raise",
            progress: ProgressLike = False
    ) -> Iterator[results.QuantizedTensor]:
        ...

    @overload
    def quantize_many(
            self, tensors: Iterable[Union[QuantizeJob, tuple[str, Any]]],
            source: _requests.Sources = None, *, model: str = "",
            revision: str = "", store: bool = False,
            nan_policy: Optional[str] = None, min_rank: int = 2,
            on_error: str, progress: ProgressLike = False
    ) -> Iterator[Union[results.QuantizedTensor, errors.QuantdError]]:
        ...

    def quantize_many(
            self, tensors: Iterable[Union[QuantizeJob, tuple[str, Any]]],
            source: _requests.Sources = None, *, model: str = "",
            revision: str = "", store: bool = False,
            nan_policy: Optional[str] = None, min_rank: int = 2,
            on_error: str = "raise", progress: ProgressLike = False) -> Iterator[Any]:
        """Quantizes one tensor after another on one stream, and yields the
        results in the same order, while the next ones are on their way.

        tensors: jobs, or (name, array) with the `source` of all, such as
            state_dict.items(). Taken in the caller's thread, as many ahead as
            there is room for: two, or more while they are small.
        source: see quantize, or by pattern, such as {"*_proj.weight":
            "int4:group:128", "*head*": "int8"}: a tensor has that of the first
            pattern (with * and ?) that matches its name, and only those that
            one matches are quantized. A pattern that matches none, or only
            what earlier ones take, is an error before anything is sent; for
            this the names must be known, as those of a list or of
            state_dict.items() are.
        model, revision: of names that are strings.
        min_rank: pairs are left out where the array has fewer dimensions, or
            elements that are no reals, such as biases and counters. Where all
            are, that is an error. 0: none is left out.
        on_error: "raise" the error of a tensor, which ends the rest, or
            "return" it in its place.
        progress: True for a bar of tqdm, or a function that is called with the
            bytes of each tensor that is done.
        """
        made = _requests.QuantizeItems(tensors, source, model, revision, store,
                                       nan_policy, min_rank)
        return self._many("Quantize", tensors, made.make, on_error, progress,
                          made.end)

    def dequantize(self, codes: Any,
                   source: Union[Encoding, EncodingReference, None] = None, *,
                   shape: Optional[Sequence[int]] = None,
                   element_type: Optional[str] = None, name: NameLike = None,
                   out: Any = None, slice_of: Optional[Slice] = None
                   ) -> Any:
        """Turns codes into reals: an array of numpy, bfloat16 as uint16, or
        where the codes are a tensor of torch, one of torch on the CPU.

        codes: a QuantizedTensor, which knows the rest, or an array of codes.
        source: an Encoding, or an EncodingReference.
        shape: of the tensor; default that of `codes`. Required where they are
            packed.
        element_type: default that of the QuantizedTensor, or "float32".
        out: contiguous array of as many bytes as there are reals.
        slice_of: where the codes lie in a tensor that they are a part of; the
            source is that of the whole. The encoding of a QuantizedTensor is
            that of the part, and needs none.
        """
        return self._one("Dequantize", _requests.dequantize(
            codes, source, shape, element_type, name, out, slice_of))

    def dequantize_chunks(
            self, chunks: Iterable[Any],
            source: Union[Encoding, EncodingReference], *,
            shape: Sequence[int], element_type: str = "float32",
            name: NameLike = None) -> _chunks.DequantizedChunks:
        """Turns codes that do not fit in memory into reals, part by part; see
        quantize_chunks.

        chunks: arrays of codes, those of 2 and 4 bits as packed bytes.
        shape: of the tensor. element_type: of the reals.
        """
        header = _requests.dequantize_header(
            _requests.describe(shape, element_type, name), source)
        size = None
        if isinstance(source, Encoding):
            count = _chunks.size_of(shape, "float32") // 4
            size = format_info(source.format).size_bytes(count)
        large = _requests.large_encodings([source], header.tensor.shape)
        download = _chunks.dequantize_download(header, large)
        return _chunks.DequantizedChunks(self._chunked(
            "Dequantize", header, None, size, chunks, download), download)

    @overload
    def dequantize_many(
            self, tensors: Iterable[results.QuantizedTensor], *,
            element_type: Optional[str] = None,
            on_error: Literal["raise"] = "raise",
            progress: ProgressLike = False) -> Iterator[Any]:
        ...

    @overload
    def dequantize_many(
            self, tensors: Iterable[results.QuantizedTensor], *,
            element_type: Optional[str] = None, on_error: str,
            progress: ProgressLike = False
    ) -> Iterator[Any]:
        ...

    def dequantize_many(
            self, tensors: Iterable[results.QuantizedTensor], *,
            element_type: Optional[str] = None, on_error: str = "raise",
            progress: ProgressLike = False) -> Iterator[Any]:
        """Dequantizes one tensor after another on one stream; see
        quantize_many."""
        return self._many(
            "Dequantize", tensors,
            lambda tensor: _requests.dequantize_of(tensor, element_type),
            on_error, progress)

    def calibrate(self, array: Any, name: NameLike = None,
                  spec: Optional[SpecLike] = None,
                  contribution: Optional[Contribution] = None, *,
                  element_type: Optional[str] = None,
                  slice_of: Optional[Slice] = None
                  ) -> results.CalibrateResult:
        """Statistics of a tensor; with a spec also an encoding, which is stored
        under `name`; with a contribution the tensor is added to the statistics
        that the service keeps under `name`. With a contribution `array` may be a
        quantd.edge.State in its place. Statistics in blocks that would take
        more than the tensor, and more than 16 MiB, are refused unless the
        contribution has force_statistics.

        slice_of: where the array lies in a tensor that it is a part of, with a
            contribution: the statistics are those of the whole.
        """
        result: results.CalibrateResult = self._one(
            "Calibrate", _requests.calibrate(CalibrateJob(
                array, name, spec, contribution, element_type, slice_of)))
        return result

    def calibrate_chunks(
            self, chunks: Iterable[Any], name: NameLike = None,
            spec: Optional[SpecLike] = None,
            contribution: Optional[Contribution] = None, *,
            shape: Sequence[int], element_type: str = "float32",
            slice_of: Optional[Slice] = None
    ) -> results.CalibrateResult:
        """calibrate() of a tensor that does not fit in memory, see
        quantize_chunks for `chunks`. Not tried again when the server goes away;
        with a contribution it is safe to call it again."""
        header = _requests.calibrate_header(
            _requests.describe(shape, element_type, name, slice_of), spec,
            contribution)
        return results.CalibrateResult.from_proto(self._summary_of(
            "Calibrate", header, element_type, shape, chunks,
            _chunks.calibrate_download(header)))

    @overload
    def calibrate_many(
            self, tensors: Iterable[Union[CalibrateJob, tuple[str, Any]]],
            spec: Optional[SpecLike] = None,
            contribution: Optional[Contribution] = None, *, model: str = "",
            revision: str = "", on_error: Literal["raise"] = "raise",
            progress: ProgressLike = False
    ) -> Iterator[results.CalibrateResult]:
        ...

    @overload
    def calibrate_many(
            self, tensors: Iterable[Union[CalibrateJob, tuple[str, Any]]],
            spec: Optional[SpecLike] = None,
            contribution: Optional[Contribution] = None, *, model: str = "",
            revision: str = "", on_error: str,
            progress: ProgressLike = False
    ) -> Iterator[Union[results.CalibrateResult, errors.QuantdError]]:
        ...

    def calibrate_many(
            self, tensors: Iterable[Union[CalibrateJob, tuple[str, Any]]],
            spec: Optional[SpecLike] = None,
            contribution: Optional[Contribution] = None, *, model: str = "",
            revision: str = "", on_error: str = "raise",
            progress: ProgressLike = False) -> Iterator[Any]:
        """Calibrates jobs, or (name, array), one after another on one stream;
        see quantize_many. Without contributions of their own that of all is
        that of each tensor. A tensor that comes twice waits until the first one
        is answered: were that one tried again after the second, it would look
        like one that was counted."""
        return self._many(
            "Calibrate", tensors, _requests.calibrate_items(
                spec, contribution, model, revision), on_error, progress)

    def evaluate(self, array: Any, candidates: Iterable[Source], *,
                 name: NameLike = None, labels: Sequence[str] = (),
                 per_scale_index: bool = False,
                 with_distribution: bool = False, encodings: bool = True,
                 element_type: Optional[str] = None, inputs: NameLike = None,
                 outer_maxima: Sequence[Optional[float]] = (),
                 metrics: Iterable[str] = (),
                 slice_of: Optional[Slice] = None) -> results.Evaluation:
        """The error of quantizing and dequantizing with each of 1 to 64
        candidates.

        labels: come back with the metrics; default the candidates that are
            strings.
        per_scale_index: the metrics of each scale as well.
        with_distribution: kl_divergence and error_histogram as well.
        encodings: those of specs as well, but for encodings with more than
            65,536 scales. Specs of which some have more and some fewer are
            measured apart: the tensor is sent twice. False: the server
            measures specs as the tensor arrives, and does not hold it.
        inputs: name of the inputs of the layer that the tensor is the weight
            of, as in Rounding: output_noise as well, the error that each
            candidate makes at the layer's output.
        outer_maxima: of each candidate, where its outer scale is one for
            several tensors, the largest magnitude of all; None where not.
        metrics: what to measure besides counts, by the names of the fields of
            ErrorMetrics; the others are nan. Only sum_squared_error,
            mean_squared_error, max_absolute_error and sqnr_db take about half
            of the time. Default: all.
        slice_of: see quantize.
        """
        return _requests.join_evaluations([
            (places, self._one("Evaluate", exchange))
            for places, exchange in _requests.evaluate(
                array, candidates, name, labels, per_scale_index,
                with_distribution, encodings, element_type, inputs,
                outer_maxima, metrics, slice_of)])

    def evaluate_chunks(
            self, chunks: Iterable[Any], candidates: Iterable[Source], *,
            shape: Sequence[int], element_type: str = "float32",
            name: NameLike = None, labels: Sequence[str] = (),
            per_scale_index: bool = False, with_distribution: bool = False,
            encodings: bool = True, inputs: NameLike = None,
            metrics: Iterable[str] = ()) -> results.Evaluation:
        """evaluate() of a tensor that does not fit in memory; see
        quantize_chunks for `chunks`, and for candidates that are specs.

        encodings: those of specs as well, unless one of them has more than
            65,536 scales.
        """
        if not isinstance(candidates, str):
            candidates = list(candidates)
        header = _requests.evaluate_header(
            _requests.describe(shape, element_type, name), candidates, labels,
            per_scale_index, with_distribution, encodings, inputs, metrics)
        summary = self._summary_of("Evaluate", header, element_type, shape,
                                   chunks, _chunks.evaluate_download(
                header, _requests.large_encodings(candidates, shape)))
        return results.Evaluation.from_proto(summary)

    def compare(self, reference: Any, test: Any, *,
                with_distribution: bool = False,
                element_type: Optional[str] = None,
                metrics: Iterable[str] = ()) -> results.ErrorMetrics:
        """The error of `test` against `reference`, of the same shape and
        type. metrics: see evaluate()."""
        found: results.ErrorMetrics = self._one(
            "Evaluate", _requests.compare(reference, test, with_distribution,
                                          element_type, metrics))
        return found

    # Shared memory.

    def empty_shared(self, shape: Union[int, Sequence[int]],
                     dtype: Any = np.float32) -> Array:
        """An array in memory that the server sees too, of undefined content.
        Tensors and outputs in it, or in contiguous parts of it that begin at a
        multiple of 8 bytes, are never copied. Make few and use them again: the
        server counts them against its memory until they are gone.

        Raises: ARGUMENT_INVALID without shared_memory=True;
        SHARED_MEMORY_UNAVAILABLE, MEMORY_BUDGET, REGION_LIMIT.
        """
        shared = self._connection.shared
        if shared is None:
            raise errors.argument_invalid(
                "expected a client with shared_memory=True")
        try:
            dtype = np.dtype(dtype)
            shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(
                int(size) for size in shape)
            if dtype.hasobject or any(size < 0 for size in shape):
                raise ValueError(f"got {dtype} of {shape}")
        except (TypeError, ValueError) as error:
            raise errors.argument_invalid(
                f"expected a shape and a dtype of numbers: {error}") from error
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        memory = shared.allocate(size)
        array: Array = memory.view(dtype).reshape(shape) if size else (
            np.empty(shape, dtype))
        return array

    # Encodings.

    def put_encoding(self, name: TensorName, encoding: Encoding, *,
                     if_match: str = "") -> results.StoredEncoding:
        """Stores an encoding, however many scales it has; the answer leaves it
        out. if_match: the etag to replace, or "absent"."""
        stored: results.StoredEncoding = self._run(
            _requests.put_encoding(name, encoding, if_match))
        return stored

    def get_encoding(self, name: TensorName) -> results.StoredEncoding:
        """An encoding with its scales, however many there are."""
        proto = as_name(name).to_proto()
        try:
            answer = self._call(self._encodings.GetEncoding,
                                es.GetEncodingRequest(name=proto))
        except errors.QuantdError as error:
            if error.reason != "SCALE_COUNT_LIMIT":
                raise
            return _requests.stored_encoding(list(self._read(
                self._encodings.ReadEncoding,
                es.ReadEncodingRequest(name=proto))))
        return results.StoredEncoding.from_proto(answer.stored_encoding)

    def delete_encoding(self, name: TensorName, *, if_match: str = "") -> None:
        """Deletes an encoding. if_match: only the one that has this etag."""
        self._run(_requests.delete_encoding(name, if_match))

    def publish_revision(self, model: str, source_revision: str,
                         revision: str = "", *, keep_others: bool = False
                         ) -> results.PublishedRevision:
        """Makes the encodings of source_revision those of revision, by default
        "main", all at once: readers see all that was there before, or all that
        is there after. The source is then empty. When an answer was lost, the
        retry finds that and raises REVISION_NOT_FOUND.

        keep_others: the revision keeps its encodings of tensors that the source
            does not have; otherwise they are deleted."""
        published: results.PublishedRevision = self._run(
            _requests.publish_revision(model, source_revision, revision,
                                       keep_others))
        return published

    def delete_revision(self, model: str, revision: str) -> None:
        """Deletes the encodings and statistics of a revision, all at once."""
        self._run(_requests.delete_revision(model, revision))

    def delete_model(self, model: str) -> None:
        """Deletes a model with all of its revisions, all at once."""
        self._run(_requests.delete_model(model))

    def list_encodings(self, model: str, revision: str = ""
                       ) -> Iterator[results.StoredEncoding]:
        """The encodings of a revision in order of tensor, without scales."""
        return self._pages(_requests.list_encodings(model, revision))

    def list_models(self) -> Iterator[results.Model]:
        """The models that have encodings or statistics, in order of name."""
        return self._pages(_requests.list_models())

    def list_revisions(self, model: str) -> Iterator[results.Revision]:
        """The revisions of a model that have encodings or statistics, in
        order of name."""
        return self._pages(_requests.list_revisions(model))

    def export(self, model: str, format: str,
               path: Union[str, os.PathLike[str], None] = None, *,
               revision: str = "", patterns: Iterable[str] = (),
               parameter_patterns: Iterable[str] = (), overwrite: bool = False
               ) -> interchange.ExportedEncodings:
        """Writes the encodings of a revision as a file of another project.

            done = client.export("acme/net", "aimet-1.0.0", "net.encodings")
            print(done.encoding_count, done.losses)

        format: "json" (quantd's own, which holds everything), "aimet-0.6.1",
            "aimet-1.0.0", "aimet-2.0.0", "aimet-2.1.0", "aimet-torch",
            "onnx-qdq" or "compressed-tensors" (its quantization_config); what
            each holds is in proto/.
        path: where the file appears, complete or not at all, while it is never
            in memory; None: it is the answer's `data`.
        patterns: globs over names of tensors; default all. One that matches
            none is an error.
        parameter_patterns: of the tensors that AIMET lists as parameters;
            default names that end with "weight" or "bias", and tensors with
            more than one scale.
        overwrite: replace a file that is there.

        The answer's `losses` say what the format could not hold, and which
        tensors are left out. An encoding that is put meanwhile may be written
        in either form. A call that breaks off in the midst of the file is not
        tried again.

        Raises: ENCODING_NOT_FOUND for a revision without encodings;
        EXPORT_EMPTY where all are left out, and then there is no file;
        FILE_EXISTS, FILE_UNWRITABLE.
        """
        request = _requests.export_encodings(model, format, revision, patterns,
                                             parameter_patterns)
        if request.patterns:
            _requests.check_patterns(
                request.patterns, [entry.name.tensor for entry in
                                   self.list_encodings(model, revision)],
                model, revision, "patterns", "an encoding")
        with _requests.export_download(request, path, overwrite) as download:
            for answer in self._read(self._encodings.ExportEncodings, request):
                download.add(answer)
            return download.result()

    def import_(self, source: interchange.ImportSource, model: str, *,
                format: Optional[str] = None, revision: str = "",
                hints: Iterable[interchange.TensorHint] = (),
                tensors: Mapping[str, Any] = types.MappingProxyType({}),
                dry_run: bool = False) -> interchange.ImportedEncodings:
        """Stores the encodings of a file of another project, or of quantd, of
        at most 256 MiB. Nothing is stored unless the whole file is sound;
        entries of AIMET that are not sound are left out, and told.

            done = client.import_("net.encodings", "acme/net",
                                  tensors=model.state_dict())
            print(done.encoding_count, done.left_out)

        source: a path, which is read as it is sent, or the bytes of the file.
        format: see export(); None: recognized from the file. The scales of
            compressed-tensors are in its tensors: read those with quantd.load.
        hints: what the file does not say of its tensors. Each field comes from
            the first hint that matches the tensor and has it.
        tensors: by name, such as a state_dict or what quantd.load opens, for
            the shapes alone: hints after those.
        dry_run: check the file, and store nothing.

        Raises: INTERCHANGE_INVALID, whose text names the place; AXIS_UNKNOWN
        where neither file nor hints say along which dimension scales lie;
        INTERCHANGE_UNSUPPORTED, INTERCHANGE_TOO_LARGE; FILE_UNREADABLE,
        FILE_UNSUPPORTED.
        """
        imported: interchange.ImportedEncodings = self._run(
            _requests.import_encodings(source, model, format, revision, hints,
                                       tensors, dry_run))
        return imported

    def compute_encodings(
            self, model: str, spec: Optional[SpecLike] = None, *,
            revision: str = "",
            overrides: Iterable[tuple[str, SpecLike]] = (),
            dry_run: bool = False, ties: TiesLike = True
            ) -> Iterator[results.ComputedEncoding]:
        """Computes encodings from stored statistics, and stores them unless
        dry_run; yields one tensor after another in order of name.

        overrides: (pattern, spec); the first whose glob matches the name of a
            tensor counts, then `spec`. Tensors without either are left out;
            a pattern that matches none, or only what earlier ones take, is an
            error.
        ties: tensors that share one outer scale, such as nvfp4 has; patterns
            as of quantd.quantize_model. With a spec that has no outer scale
            those of a pattern share one encoding, and those of the defaults
            nothing.
        """
        request = _requests.compute_encodings(model, spec, revision, overrides,
                                              dry_run)
        self._check_patterns(
            [override.pattern for override in request.overrides], model,
            revision, "overrides")
        tied = Ties(ties)
        if tied.matters(_requests.specs_of(request)):
            _requests.compute_ties(request, tied,
                                   self._tied_names(tied, model, revision))
        for answer in self._read(self._encodings.ComputeEncodings, request):
            yield results.ComputedEncoding.from_proto(answer)

    def sweep(self, model: str, specs: Iterable[SpecLike], *,
              revision: str = "", patterns: Iterable[str] = (),
              min_sqnr_db: Optional[float] = None,
              max_size_bytes: Optional[int] = None, ties: TiesLike = True
              ) -> results.SweepResult:
        """Ranks 1 to 64 specs by the error that stored statistics predict.

        patterns: globs over names of tensors; default all. One that matches
            none is an error.
        min_sqnr_db, max_size_bytes: at most one; chooses a spec for each
            tensor: the fewest bytes with that SQNR in each, or the least noise
            within that size. What runtimes fuse gets one spec.
        ties: as of compute_encodings(); in a mixture they get one spec in any
            case. With the defaults the matrices of all experts of a layer get
            one, too.
        """
        request = _requests.sweep(model, specs, revision, patterns)
        targets = _requests.sweep_targets(min_sqnr_db, max_size_bytes)
        self._check_patterns(request.patterns, model, revision, "patterns")
        tied = Ties(ties)
        if tied.matters(request.specs):
            _requests.sweep_ties(request, tied,
                                 self._tied_names(tied, model, revision))
        swept = _requests.sweep_result(
            list(self._read(self._encodings.Sweep, request)))
        if not targets:
            return swept
        choice = _requests.SweepChoice(swept, len(request.specs), tied, targets)
        return choice.result(choice.request and self._call(
            self._encodings.ChooseMixture, choice.request))

    def choose_mixture(
            self, tensors: Mapping[str, Iterable[results.MixtureOption]], *,
            min_sqnr_db: Iterable[float] = (),
            max_size_bytes: Iterable[int] = ()) -> list[results.SweepMixture]:
        """Chooses one spec for each tensor from measured errors, by the rule of
        sweep(); a mixture for each target.

        tensors: 1 to 64 options of each, by its name.
        min_sqnr_db, max_size_bytes: 1 to 64 targets; the mixtures of the first
            come first.
        """
        return _requests.mixtures(self._call(
            self._encodings.ChooseMixture, _requests.choose_mixture(
                tensors, min_sqnr_db, max_size_bytes)))

    def _check_patterns(self, patterns: Sequence[str], model: str,
                        revision: str, field: str) -> None:
        if patterns:
            _requests.check_patterns(
                patterns, [entry.tensor for entry in
                           self.list_statistics(model, revision)],
                model, revision, field)

    def _tied_names(self, ties: Ties, model: str, revision: str) -> list[str]:
        """Names of tensors with statistics; none where the caller may not list
        them and nothing but defaults is tied."""
        try:
            return [entry.tensor for entry in
                    self.list_statistics(model, revision)]
        except errors.QuantdError as error:
            ties.raise_unless_optional(error)
            return []

    # Statistics.

    def get_statistics(self, name: TensorName, *, with_state: bool = False,
                       per_tensor: bool = False,
                       with_moments: bool = False
                       ) -> results.StoredStatistics:
        """Statistics over all contributions. with_state: the histograms too,
        one for each scale index; per_tensor: one over all of them, which is
        small; with_moments: those of features."""
        return results.StoredStatistics.from_proto(self._call(
            self._encodings.GetStatistics, es.GetStatisticsRequest(
                name=as_name(name).to_proto(), with_state=with_state,
                per_tensor=per_tensor, with_moments=with_moments)))

    def list_statistics(self, model: str, revision: str = ""
                        ) -> Iterator[results.StatisticsEntry]:
        """The tensors of a revision that have statistics, in order of name."""
        return self._pages(_requests.list_statistics(model, revision))

    def delete_statistics(self, name: TensorName, *, source: str = "") -> None:
        """Deletes statistics, of all sources or of one."""
        self._run(_requests.delete_statistics(name, source))

    def health(self, service: str = "") -> str:
        """"SERVING", "NOT_SERVING", "UNKNOWN" or "SERVICE_UNKNOWN" of the whole
        server or of one service. Not retried."""
        request = _requests.health(service)
        if request is None:
            return "SERVICE_UNKNOWN"
        check = self._connection.channel.unary_unary(HEALTH_METHOD)
        try:
            answer = self._attempt(check, request)
        except errors.QuantdError as error:
            if error.code == grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise
        return _requests.health_result(answer)

    # How all of them are sent.

    def _placed(self, exchange: Exchange[Any]) -> Exchange[Any]:
        """Says where its bytes go."""
        if self._connection.shared is not None:
            self._connection.shared.place(exchange)
        if isinstance(exchange, OutputExchange):
            exchange.output_memory = self._connection.output_memory
        return exchange

    def _chunked(self, method: str, header: Any, element_type: Optional[str],
                 size_bytes: Optional[int], chunks: Iterable[Any],
                 download: _chunks.Download) -> _chunks.ChunkedCall:
        _channel.check_process()
        upload = _chunks.Upload(header, element_type, size_bytes,
                                self._options.chunk_bytes,
                                download.encodings)
        return _chunks.ChunkedCall(
            self._method(self._connection.stream_channel(), method),
            self._options, upload, chunks, download)

    @staticmethod
    def _method(channel: grpc.Channel, method: str) -> Callable[..., Any]:
        return functools.partial(channel.stream_stream(_SERVICE + method),
                                 metadata=(_channel.PROGRESS,))

    def _summary_of(self, method: str, header: Any, element_type: str,
                    shape: Sequence[int], chunks: Iterable[Any],
                    download: _chunks.Download) -> Any:
        call = self._chunked(method, header, element_type,
                             _chunks.size_of(shape, element_type), chunks,
                             download)
        for _ in call.read():
            pass
        return download.summary

    def _take_stream(self, method: str) -> RetryingStream:
        _channel.check_process()
        connection = self._connection
        with connection.lock:
            if connection.idle is None:
                raise errors.client_closed()
            streams = connection.idle.get(method, [])
            while streams:
                stream = streams.pop()
                if stream.is_open:
                    return stream
                stream.close(cancel=True)
        channel = connection.stream_channel()
        return RetryingStream(
            self._method(channel, method), self._options,
            functools.partial(connection.pause, channel=channel),
            lambda exchange: exchange.placement is not None and
            exchange.placement.is_lost)

    def _give_back(self, method: str, stream: RetryingStream) -> None:
        connection = self._connection
        if stream.pending_count:
            stream.abandon()
            return
        with connection.lock:
            if connection.idle is not None and stream.is_open:
                connection.idle.setdefault(method, []).append(stream)
                return
        stream.close(cancel=True)

    def _one(self, method: str, exchange: Exchange[Any]) -> Any:
        exchange = self._placed(exchange)
        try:
            stream = self._take_stream(method)
        except errors.QuantdError:
            exchange.unshare()
            raise
        try:
            for parts in exchange.rounds():
                for part in parts:
                    stream.send(part)
                for part in parts:
                    stream.receive()
                    exchange.join(part)
        except ValueError as error:
            # gRPC says this of a channel that another thread has closed.
            raise errors.client_closed() from error
        finally:
            self._give_back(method, stream)
        return exchange.take_result()

    def _many(self, method: str, items: Iterable[Any],
              make: Callable[[Any], Optional[Exchange[Any]]], on_error: str,
              progress: ProgressLike,
              end: Callable[[], None] = lambda: None) -> Iterator[Any]:
        """make: None leaves an item out. end: called after the last one."""
        if on_error not in ("raise", "return"):
            raise errors.argument_invalid(
                f"expected 'raise' or 'return', got {on_error!r}", "on_error")
        return self._run_many(method, items, make, on_error == "raise",
                              progress, end)

    def _run_many(self, method: str, items: Iterable[Any],
                  make: Callable[[Any], Optional[Exchange[Any]]], raises: bool,
                  wanted: ProgressLike, end: Callable[[], None]
                  ) -> Iterator[Any]:
        total = total_bytes(items) if wanted is True else None
        with Progress(wanted, method, total) as progress:
            yield from self._send_many(method, items, make, raises, progress)
            end()

    def _send_many(self, method: str, items: Iterable[Any],
                   make: Callable[[Any], Optional[Exchange[Any]]], raises: bool,
                   progress: Progress) -> Iterator[Any]:
        stream = self._take_stream(method)
        sizes: collections.deque[int] = collections.deque()
        # Order keys of exchanges that must be answered before another one like
        # them is sent.
        pending: dict[Any, None] = {}

        def receive() -> Any:
            exchange = stream.receive()
            progress.add(sizes.popleft())
            pending.pop(exchange.order_key, None)
            try:
                return exchange.take_result()
            except errors.QuantdError as error:
                if raises:
                    raise
                return error

        try:
            for item in items:
                exchange: Optional[Exchange[Any]]
                try:
                    exchange = make(item)
                    if exchange is None:
                        progress.leave_out(item)
                        continue
                    exchange = self._placed(exchange)
                except errors.QuantdError as error:
                    exchange = FailedExchange(error)
                key = exchange.order_key
                while key is not None and key in pending:
                    yield receive()
                if key is not None:
                    pending[key] = None
                stream.send(exchange)
                sizes.append(exchange.size_bytes)
                # Nothing of it is to stay here until the next one comes.
                del item, exchange
                while stream.is_ready or len(sizes) > _WINDOW_COUNT or (
                        len(sizes) > 1 and sum(sizes) > _WINDOW_BYTES):
                    yield receive()
            while sizes:
                yield receive()
        finally:
            self._give_back(method, stream)

    def _attempt(self, method: Callable[..., Any], request: Any) -> Any:
        """One attempt of a call with one answer."""
        _channel.check_process()
        try:
            return _apart.run(
                lambda: method(_requests.messages_of(request),
                               timeout=_requests.timeout_of(
                                   request, self._options.timeout)))
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, self._options.target,
                                        self._options.timeout) from None
        except ValueError as error:
            raise errors.client_closed() from error

    def _call(self, method: Callable[..., Any], request: Any,
              attempts: Optional[Attempts] = None) -> Any:
        retries = Retries()
        while True:
            try:
                return self._attempt(method, request)
            except errors.QuantdError as error:
                self._pause(error, retries)
                if attempts is not None:
                    attempts.add(error)

    def _run(self, calls: Calls[Any]) -> Any:
        """Their result."""
        try:
            call = next(calls)
            while True:
                try:
                    answer = self._call(getattr(self._encodings, call.method),
                                        call.request, call.attempts)
                except errors.QuantdError as error:
                    call = calls.throw(error)
                else:
                    call = calls.send(answer)
        except StopIteration as done:
            return done.value

    def _pause(self, error: errors.QuantdError, retries: Retries) -> None:
        """Waits before the next attempt, or raises."""
        self._options.learn(retries, error)
        if not self._options.allows(retries, error) or (
                error.code != grpc.StatusCode.UNAVAILABLE and
                error.retry_after is None):
            raise retries.explained(error)
        self._connection.pause(self._options.pause(retries, error), error)

    def _read(self, method: Callable[..., Any], request: Any
              ) -> Iterator[Any]:
        """The answers of one call; not retried once there was one."""
        retries, has_answers = Retries(), False
        _channel.check_process()
        while True:
            call = None
            try:
                call = _apart.run(
                    lambda: method(request, timeout=self._options.timeout))
                take = functools.partial(next, call, None)
                while (answer := _apart.run(take)) is not None:
                    has_answers = True
                    yield answer
                return
            except grpc.RpcError as ended:
                error = errors.from_rpc_error(ended, self._options.target,
                                              self._options.timeout)
                if has_answers:
                    raise error from None
                self._pause(error, retries)
            except ValueError as closed:
                raise errors.client_closed() from closed
            finally:
                if call is not None:
                    _apart.run(call.cancel)

    def _pages(self, pages: Pages) -> Iterator[Any]:
        token = ""
        while True:
            answer = self._call(getattr(self._encodings, pages.method),
                                pages.request(token))
            for item in getattr(answer, pages.field):
                yield pages.read(item)
            token = pages.next_token(answer, token)
            if not token:
                return
