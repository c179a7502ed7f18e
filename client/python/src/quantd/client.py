"""The client: tensors to codes and back, and what the service keeps."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
import weakref
from typing import (Any, Callable, Iterable, Iterator, Optional, Sequence,
                    Union)

import grpc
import numpy as np

from quantd import _arrays, errors, results
from quantd._exchange import (CalibrateExchange, CompareExchange,
                              DequantizeExchange, EvaluateExchange, Exchange,
                              FailedExchange, QuantizeExchange)
from quantd._shared_memory import SharedMemory
from quantd._stream import Options, RetryingStream
from quantd.encoding import (Encoding, EncodingReference, EncodingSpec,
                             GranularityLike, Source, as_granularity,
                             set_granularity, set_source)
from quantd.tensor import (EnumNames, NameLike, TensorName, as_name,
                           format_info)
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import encoding_service_pb2_grpc as es_grpc
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import tensor_pb2

_SERVICE = "/quantd.v1.QuantizationService/"
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_HEALTH = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}
_MAX_RECEIVE_BYTES = 64 << 20
# A whole number of elements, and of pairs of them, of every type.
_CHUNK_UNIT_BYTES = 64
_MAX_CHUNK_BYTES = 32 << 20
_PAGE_SIZE = 1000
# Tensors on their way at once on one stream: two, and more while they are
# small.
_WINDOW_BYTES = 64 << 20
_WINDOW_COUNT = 64
_LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:", "unix-abstract:")

_NAN_POLICIES = EnumNames(qs.NanPolicy, "NAN_POLICY_", "a policy")


@dataclasses.dataclass(frozen=True)
class Contribution:
    """One part of a calibration that many sources feed, counted exactly once;
    see the Contribution of proto/. `granularity` is what the statistics are
    kept for, the same in all contributions to a tensor."""

    source: str
    sequence: int
    granularity: GranularityLike = None
    mantissa_bits: int = 0
    averaging_constant: Optional[float] = None

    def to_proto(self) -> qs.Contribution:
        """Raises: ARGUMENT_INVALID."""
        try:
            message = qs.Contribution(
                source=self.source, sequence=self.sequence,
                mantissa_bits=self.mantissa_bits,
                averaging_constant=self.averaging_constant)
        except (TypeError, ValueError) as error:
            raise errors.argument_invalid(f"not a contribution: {error}"
                                          ) from error
        set_granularity(as_granularity(self.granularity), message, None)
        return message


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizeJob:
    """One tensor of quantize_many; the fields are the arguments of quantize.
    source: None is that of all."""

    array: Any
    source: Optional[Source] = None
    name: NameLike = None
    store: Optional[bool] = None
    nan_policy: Optional[str] = None
    omit_encoding: bool = False
    out: Any = None
    element_type: Optional[str] = None


class _Connection:
    """What a client holds while it is open."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.lock = threading.Lock()
        self.shared: Optional[SharedMemory] = None
        # Open streams without a tensor on them, by method; None: closed.
        self.idle: Optional[dict[str, list[RetryingStream]]] = {}

    def pause(self, seconds: float, error: errors.QuantdError) -> None:
        """Waits after an error, longer if that says so."""
        end = time.monotonic() + max(seconds, error.retry_after or 0)
        if error.reason == "SERVER_UNREACHABLE":
            # gRPC goes on connecting only while a call waits for that,
            # otherwise every 5 s.
            try:
                self.channel.unary_unary(_HEALTH_METHOD)(
                    b"", timeout=seconds, wait_for_ready=True)
            except (grpc.RpcError, ValueError):
                pass
        time.sleep(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Ends idle streams, and breaks those that are in use."""
        with self.lock:
            idle, self.idle = self.idle, None
        for streams in (idle or {}).values():
            for stream in streams:
                stream.close(cancel=False)
        self.channel.close()
        if self.shared is not None:
            self.shared.close()


class Client:
    """A connection to one server.

    target: "host:port", or "unix:/path/to/socket".
    timeout: seconds; the deadline of a call, and of a tensor the longest time
        in which nothing moves either way.
    chunk_bytes: payload of a message, 64 bytes to 32 MiB; a server takes 4 MiB
        by default.
    max_retries: attempts after the first, on UNAVAILABLE and where the server
        asks for a retry. Every call may be repeated without harm.
    initial_backoff, max_backoff: seconds before the first retry; the pause
        doubles up to the second and varies by half.
    credentials: for TLS; None: plaintext.
    shared_memory: tensors in arrays of empty_shared() go up by name, and others
        of 64 KiB and more are copied into shared memory once, up to 256 MiB of
        them at a time. Takes a unix socket as target, and a server with
        --shared-memory on the same machine.

    Does not wait for the server: the first call finds out. A context manager;
    thread-safe, but for one process: after a fork make another.

    All calls raise QuantdError. Arrays are those of numpy, tensors of torch,
    or what numpy.asarray takes; of float32, float16, float64, and bfloat16 as a
    tensor of torch or as uint16 with element_type="bfloat16". Memory that is
    contiguous is sent from where it is. `out` is written in place; after an
    error its content is undefined.
    """

    def __init__(self, target: str = "127.0.0.1:8430", *,
                 timeout: float = 60.0, chunk_bytes: int = 1 << 20,
                 max_retries: int = 4, initial_backoff: float = 0.05,
                 max_backoff: float = 5.0,
                 credentials: Optional[grpc.ChannelCredentials] = None,
                 shared_memory: bool = False) -> None:
        if not target:
            raise errors.argument_invalid("expected a server", "target")
        if not timeout > 0:
            raise errors.argument_invalid(
                f"expected more than 0 s, got {timeout}", "timeout")
        if not _CHUNK_UNIT_BYTES <= chunk_bytes <= _MAX_CHUNK_BYTES:
            raise errors.argument_invalid(
                f"expected {_CHUNK_UNIT_BYTES} to {_MAX_CHUNK_BYTES}, got "
                f"{chunk_bytes}", "chunk_bytes")
        if max_retries < 0:
            raise errors.argument_invalid(
                f"expected at least 0, got {max_retries}", "max_retries")
        if shared_memory and not target.startswith("unix:"):
            raise errors.argument_invalid(
                f"expected a target unix:PATH, got {target!r}",
                "shared_memory")
        self._options = Options(
            target, timeout, chunk_bytes // _CHUNK_UNIT_BYTES *
            _CHUNK_UNIT_BYTES, max_retries, initial_backoff, max_backoff)
        channel_options = [
            ("grpc.max_receive_message_length", _MAX_RECEIVE_BYTES),
            # A connection per client: that is what several clients are for.
            ("grpc.use_local_subchannel_pool", 1),
            # Retries are made here; those of gRPC buffer what they send.
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms",
             max(50, int(1000 * min(max_backoff, 2))))]
        if target.startswith(_LOOPBACK):
            channel_options.append(("grpc.enable_http_proxy", 0))
        channel = (grpc.insecure_channel(target, channel_options)
                   if credentials is None else
                   grpc.secure_channel(target, credentials, channel_options))
        self._connection = _Connection(channel)
        if shared_memory:
            path = target[len("unix:"):]
            if path.startswith("///"):
                path = path[2:]
            self._connection.shared = SharedMemory(path + ".memory",
                                                   self._options)
        self._encodings = es_grpc.EncodingServiceStub(channel)
        self._finalizer = weakref.finalize(self, self._connection.close)

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
                 element_type: Optional[str] = None
                 ) -> results.QuantizedTensor:
        """Turns reals into codes.

        source: a spec to calibrate on this very tensor ("int8:per-channel" or
            an EncodingSpec), an Encoding, or an EncodingReference to one that
            the service has.
        store: keep the encoding that was given or computed under `name`.
        nan_policy: "zero_point" (the default), "reject" or "qmin".
        out: contiguous array of as many bytes as there are codes.
        """
        return self._one("Quantize", self._quantize_exchange(QuantizeJob(
            array, source, name, store, nan_policy, omit_encoding, out,
            element_type)))

    def quantize_many(
            self, tensors: Iterable[Union[QuantizeJob, tuple[str, Any]]],
            source: Optional[Source] = None, *, model: str = "",
            revision: str = "", store: bool = False,
            nan_policy: Optional[str] = None, on_error: str = "raise"
    ) -> Iterator[Union[results.QuantizedTensor, errors.QuantdError]]:
        """Quantizes one tensor after another on one stream, and yields the
        results in the same order, while the next ones are on their way.

        tensors: jobs, or (name, array) with the `source` of all, such as
            state_dict.items(). Taken in the caller's thread, as many ahead as
            there is room for: two, or more while they are small.
        model, revision: of names that are strings.
        on_error: "raise" the error of a tensor, which ends the rest, or
            "return" it in its place.
        """
        def exchange(item: Union[QuantizeJob, tuple[str, Any]]) -> Exchange:
            job = item if isinstance(item, QuantizeJob) else QuantizeJob(
                name=item[0], array=item[1])
            name = _full_name(job.name, model, revision)
            with _naming(name):
                return self._quantize_exchange(dataclasses.replace(
                    job, name=name,
                    source=source if job.source is None else job.source,
                    store=store if job.store is None else job.store,
                    nan_policy=job.nan_policy or nan_policy))

        return self._many("Quantize", tensors, exchange, on_error)

    def dequantize(self, codes: Any,
                   source: Union[Encoding, EncodingReference, None] = None, *,
                   shape: Optional[Sequence[int]] = None,
                   element_type: Optional[str] = None, name: NameLike = None,
                   out: Any = None) -> np.ndarray:
        """Turns codes into reals; bfloat16 as uint16.

        codes: a QuantizedTensor, which knows the rest, or an array of codes.
        source: an Encoding, or an EncodingReference.
        shape: of the tensor; default that of `codes`. Required where they are
            packed.
        element_type: default that of the QuantizedTensor, or "float32".
        out: contiguous array of as many bytes as there are reals.
        """
        return self._one("Dequantize", self._dequantize_exchange(
            codes, source, shape, element_type, name, out))

    def dequantize_many(
            self, tensors: Iterable[results.QuantizedTensor], *,
            element_type: Optional[str] = None, on_error: str = "raise"
    ) -> Iterator[Union[np.ndarray, errors.QuantdError]]:
        """Dequantizes one tensor after another on one stream; see
        quantize_many."""
        def exchange(tensor: results.QuantizedTensor) -> Exchange:
            with _naming(tensor.name):
                return self._dequantize_exchange(tensor, None, None,
                                                 element_type, None, None)

        return self._many("Dequantize", tensors, exchange, on_error)

    def calibrate(self, array: Any, name: NameLike = None,
                  spec: Union[EncodingSpec, str, None] = None,
                  contribution: Optional[Contribution] = None, *,
                  element_type: Optional[str] = None
                  ) -> results.CalibrateResult:
        """Statistics of a tensor; with a spec also an encoding, which is stored
        under `name`; with a contribution the tensor is added to the statistics
        that the service keeps under `name`."""
        return self._one("Calibrate", self._calibrate_exchange(
            array, name, spec, contribution, element_type))

    def calibrate_many(
            self, tensors: Iterable[tuple[str, Any]],
            spec: Union[EncodingSpec, str, None] = None,
            contribution: Optional[Contribution] = None, *, model: str = "",
            revision: str = "", on_error: str = "raise"
    ) -> Iterator[Union[results.CalibrateResult, errors.QuantdError]]:
        """Calibrates (name, array) after another on one stream; see
        quantize_many. The contribution is that of each tensor."""
        def exchange(item: tuple[str, Any]) -> Exchange:
            name = _full_name(item[0], model, revision)
            with _naming(name):
                return self._calibrate_exchange(item[1], name, spec,
                                                contribution, None)

        return self._many("Calibrate", tensors, exchange, on_error)

    def evaluate(self, array: Any, candidates: Iterable[Source], *,
                 name: NameLike = None, labels: Sequence[str] = (),
                 per_scale_index: bool = False,
                 with_distribution: bool = False,
                 element_type: Optional[str] = None
                 ) -> list[results.CandidateMetrics]:
        """The error of quantizing and dequantizing with each of 1 to 64
        candidates.

        labels: come back with the metrics; default the candidates that are
            strings.
        per_scale_index: the metrics of each scale as well.
        with_distribution: kl_divergence and error_histogram as well.
        """
        reals = _arrays.reals(array, element_type)
        header = qs.EvaluateHeader(
            tensor=_describe(reals, name), per_scale_index=per_scale_index,
            with_distribution=with_distribution)
        candidates = list(candidates)
        if labels and len(labels) != len(candidates):
            raise errors.argument_invalid(
                f"expected {len(candidates)}, got {len(labels)}", "labels")
        for i, candidate in enumerate(candidates):
            added = header.candidates.add()
            set_source(candidate, added, len(reals.shape))
            added.label = labels[i] if labels else (
                candidate if isinstance(candidate, str) else "")
        return self._one("Evaluate",
                         self._placed(EvaluateExchange(header, reals.data)))

    def compare(self, reference: Any, test: Any, *,
                with_distribution: bool = False,
                element_type: Optional[str] = None) -> results.ErrorMetrics:
        """The error of `test` against `reference`, of the same shape and
        type."""
        left = _arrays.reals(reference, element_type)
        right = _arrays.reals(test, element_type)
        if (left.shape, left.element_type) != (right.shape,
                                               right.element_type):
            raise errors.argument_invalid(
                f"expected {left.element_type} of {left.shape}, got "
                f"{right.element_type} of {right.shape}", "test")
        header = qs.EvaluateHeader(
            tensor=_describe(left, None), comparison=True,
            with_distribution=with_distribution)
        dtype = _arrays.ELEMENT_DTYPES[left.element_type]
        pairs = np.stack([left.data.view(dtype), right.data.view(dtype)],
                         axis=-1)
        return self._one("Evaluate", self._placed(
            CompareExchange(header, _arrays.as_bytes(pairs))))

    # Shared memory.

    def empty_shared(self, shape: Union[int, Sequence[int]],
                     dtype: Any = np.float32) -> np.ndarray:
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
        return memory.view(dtype).reshape(shape) if size else np.empty(shape,
                                                                       dtype)

    # Encodings.

    def put_encoding(self, name: TensorName, encoding: Encoding, *,
                     if_match: str = "") -> results.StoredEncoding:
        """Stores an encoding; the answer leaves it out. if_match: the etag to
        replace, or "absent"."""
        answer = self._call(self._encodings.PutEncoding, es.PutEncodingRequest(
            name=as_name(name).to_proto(), encoding=encoding.to_proto(),
            if_match=if_match))
        return results.StoredEncoding.from_proto(answer.stored_encoding)

    def get_encoding(self, name: TensorName) -> results.StoredEncoding:
        """An encoding with its scales."""
        answer = self._call(self._encodings.GetEncoding, es.GetEncodingRequest(
            name=as_name(name).to_proto()))
        return results.StoredEncoding.from_proto(answer.stored_encoding)

    def delete_encoding(self, name: TensorName, *, if_match: str = "") -> None:
        """Deletes an encoding. if_match: only the one that has this etag."""
        self._call(self._encodings.DeleteEncoding, es.DeleteEncodingRequest(
            name=as_name(name).to_proto(), if_match=if_match))

    def list_encodings(self, model: str, revision: str = ""
                       ) -> Iterator[results.StoredEncoding]:
        """The encodings of a revision in order of tensor, without scales."""
        return self._pages(
            self._encodings.ListEncodings,
            lambda token: es.ListEncodingsRequest(
                model=model, revision=revision, page_size=_PAGE_SIZE,
                page_token=token),
            "encodings", results.StoredEncoding.from_proto)

    def list_models(self) -> Iterator[results.Model]:
        """The models that have encodings, in order of name."""
        return self._pages(
            self._encodings.ListModels,
            lambda token: es.ListModelsRequest(page_size=_PAGE_SIZE,
                                               page_token=token),
            "models", results.Model.from_proto)

    def list_revisions(self, model: str) -> Iterator[results.Revision]:
        """The revisions of a model that have encodings, in order of name."""
        return self._pages(
            self._encodings.ListRevisions,
            lambda token: es.ListRevisionsRequest(
                model=model, page_size=_PAGE_SIZE, page_token=token),
            "revisions", results.Revision.from_proto)

    def compute_encodings(
            self, model: str, spec: Union[EncodingSpec, str, None] = None, *,
            revision: str = "",
            overrides: Iterable[tuple[str, Union[EncodingSpec, str]]] = (),
            dry_run: bool = False) -> Iterator[results.ComputedEncoding]:
        """Computes encodings from stored statistics, and stores them unless
        dry_run; yields one tensor after another in order of name.

        overrides: (pattern, spec); the first whose glob matches the name of a
            tensor counts, then `spec`. Tensors without either are left out.
        """
        request = es.ComputeEncodingsRequest(model=model, revision=revision,
                                             dry_run=dry_run)
        if spec is not None:
            request.default_spec.CopyFrom(_spec(spec))
        for pattern, override in overrides:
            request.overrides.add(pattern=pattern, spec=_spec(override))
        for answer in self._read(self._encodings.ComputeEncodings, request):
            yield results.ComputedEncoding.from_proto(answer)

    def sweep(self, model: str, specs: Iterable[Union[EncodingSpec, str]], *,
              revision: str = "", patterns: Iterable[str] = (),
              min_sqnr_db: Optional[float] = None,
              max_size_bytes: Optional[int] = None) -> results.SweepResult:
        """Ranks 1 to 64 specs by the error that stored statistics predict.

        patterns: globs over names of tensors; default all.
        min_sqnr_db, max_size_bytes: at most one; chooses a spec for each
            tensor: the fewest bytes with that SQNR in each, or the least noise
            within that size.
        """
        if min_sqnr_db is not None and max_size_bytes is not None:
            raise errors.argument_invalid(
                "expected min_sqnr_db or max_size_bytes, got both")
        request = es.SweepRequest(
            model=model, revision=revision, specs=[_spec(s) for s in specs],
            patterns=patterns, min_sqnr_db=min_sqnr_db,
            max_size_bytes=max_size_bytes)
        tensors = []
        for answer in self._read(self._encodings.Sweep, request):
            if not answer.HasField("summary"):
                tensors.append(results.SweepTensor.from_proto(answer))
                continue
            summary = answer.summary
            return results.SweepResult(
                tuple(tensors),
                tuple(results.SweepTotal.from_proto(total)
                      for total in summary.totals),
                results.SweepMixture.from_proto(summary.mixture)
                if summary.HasField("mixture") else None)
        raise errors.response_malformed("a sweep without a summary")

    # Statistics.

    def get_statistics(self, name: TensorName, *, with_state: bool = False
                       ) -> results.StoredStatistics:
        """Statistics over all contributions. with_state: the histograms too."""
        return results.StoredStatistics.from_proto(self._call(
            self._encodings.GetStatistics, es.GetStatisticsRequest(
                name=as_name(name).to_proto(), with_state=with_state)))

    def list_statistics(self, model: str, revision: str = ""
                        ) -> Iterator[results.StatisticsEntry]:
        """The tensors of a revision that have statistics, in order of name."""
        return self._pages(
            self._encodings.ListStatistics,
            lambda token: es.ListStatisticsRequest(
                model=model, revision=revision, page_size=_PAGE_SIZE,
                page_token=token),
            "entries", results.StatisticsEntry.from_proto)

    def delete_statistics(self, name: TensorName, *, source: str = "") -> None:
        """Deletes statistics, of all sources or of one."""
        self._call(self._encodings.DeleteStatistics,
                   es.DeleteStatisticsRequest(name=as_name(name).to_proto(),
                                              source=source))

    def health(self, service: str = "") -> str:
        """"SERVING", "NOT_SERVING", "UNKNOWN" or "SERVICE_UNKNOWN" of the whole
        server or of one service. Not retried."""
        # HealthCheckRequest{1: service}, HealthCheckResponse{1: status}: the
        # stubs are not everywhere.
        text = service.encode()
        if len(text) > 127:
            return "SERVICE_UNKNOWN"
        check = self._connection.channel.unary_unary(_HEALTH_METHOD)
        try:
            answer = self._attempt(
                check, b"\x0a" + bytes([len(text)]) + text)
        except errors.QuantdError as error:
            if error.code == grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise
        return _HEALTH.get(answer[1] if len(answer) > 1 else 0, "UNKNOWN")

    # How all of them are sent.

    def _quantize_exchange(self, job: QuantizeJob) -> QuantizeExchange:
        reals = _arrays.reals(job.array, job.element_type)
        header = qs.QuantizeHeader(
            tensor=_describe(reals, job.name), store=bool(job.store),
            nan_policy=_NAN_POLICIES.value(job.nan_policy),
            omit_encoding=job.omit_encoding)
        if job.source is None:
            raise errors.argument_invalid(
                "expected a spec, an Encoding or an EncodingReference",
                "source")
        set_source(job.source, header, len(reals.shape))
        exchange = QuantizeExchange(header, reals.data,
                                    _arrays.output(job.out))
        _check_out(exchange)
        return self._placed(exchange)

    def _dequantize_exchange(
            self, codes: Any, source: Union[Encoding, EncodingReference, None],
            shape: Optional[Sequence[int]], element_type: Optional[str],
            name: NameLike, out: Any) -> DequantizeExchange:
        if isinstance(codes, results.QuantizedTensor):
            source = codes.encoding if source is None else source
            shape = codes.shape if shape is None else shape
            element_type = element_type or codes.element_type
            name = codes.name if name is None else name
            codes = codes.codes
        if not isinstance(source, (Encoding, EncodingReference)):
            raise errors.argument_invalid(
                "expected an Encoding or an EncodingReference, got "
                f"{type(source).__name__}", "source")
        data = _arrays.codes(codes)
        shape = tuple(np.shape(codes) if shape is None else shape)
        element_type = element_type or "float32"
        header = qs.DequantizeHeader(
            tensor=_describe_parts(shape, element_type, name))
        count = 1
        for size in shape:
            count *= size
        if isinstance(source, Encoding):
            expected = format_info(source.format).size_bytes(count)
            if data.nbytes != expected:
                raise errors.argument_invalid(
                    f"expected {expected} bytes of {source.format} for a "
                    f"tensor of {shape}, got {data.nbytes}", "codes")
        set_source(source, header, len(shape))
        exchange = DequantizeExchange(
            header, data, _arrays.output(out),
            count * _arrays.ELEMENT_DTYPES[element_type].itemsize)
        _check_out(exchange)
        return self._placed(exchange)

    def _calibrate_exchange(
            self, array: Any, name: NameLike,
            spec: Union[EncodingSpec, str, None],
            contribution: Optional[Contribution],
            element_type: Optional[str]) -> CalibrateExchange:
        reals = _arrays.reals(array, element_type)
        header = qs.CalibrateHeader(tensor=_describe(reals, name))
        if spec is not None:
            header.spec.CopyFrom(_spec(spec, len(reals.shape)))
        if contribution is not None:
            header.contribution.CopyFrom(contribution.to_proto())
        return self._placed(CalibrateExchange(header, reals.data))

    def _placed(self, exchange: Any) -> Any:
        if self._connection.shared is not None:
            self._connection.shared.place(exchange)
        return exchange

    def _take_stream(self, method: str) -> RetryingStream:
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
        return RetryingStream(
            connection.channel.stream_stream(_SERVICE + method),
            self._options, connection.pause,
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
        try:
            stream = self._take_stream(method)
        except errors.QuantdError:
            exchange.unshare()
            raise
        try:
            stream.send(exchange)
            stream.receive()
        except ValueError as error:
            # What gRPC says of a channel that another thread has closed.
            raise errors.client_closed() from error
        finally:
            self._give_back(method, stream)
        return exchange.take_result()

    def _many(self, method: str, items: Iterable[Any],
              make: Callable[[Any], Exchange[Any]],
              on_error: str) -> Iterator[Any]:
        if on_error not in ("raise", "return"):
            raise errors.argument_invalid(
                f"expected 'raise' or 'return', got {on_error!r}", "on_error")
        return self._run_many(method, items, make, on_error == "raise")

    def _run_many(self, method: str, items: Iterable[Any],
                  make: Callable[[Any], Exchange[Any]],
                  raises: bool) -> Iterator[Any]:
        stream = self._take_stream(method)
        sizes: collections.deque[int] = collections.deque()

        def receive() -> Any:
            exchange = stream.receive()
            sizes.popleft()
            try:
                return exchange.take_result()
            except errors.QuantdError as error:
                if raises:
                    raise
                return error

        try:
            for item in items:
                try:
                    exchange = make(item)
                except errors.QuantdError as error:
                    exchange = FailedExchange(error)
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
        """One attempt of a unary call."""
        try:
            return method(request, timeout=self._options.timeout)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, self._options.target,
                                        self._options.timeout) from None
        except ValueError as error:
            raise errors.client_closed() from error

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        attempt = 0
        while True:
            try:
                return self._attempt(method, request)
            except errors.QuantdError as error:
                attempt = self._pause(error, attempt)

    def _pause(self, error: errors.QuantdError, attempt: int) -> int:
        """Waits before the next attempt and returns its number, or raises."""
        if attempt >= self._options.max_retries or (
                error.code != grpc.StatusCode.UNAVAILABLE and
                error.retry_after is None):
            raise error
        self._connection.pause(self._options.backoff(attempt + 1), error)
        return attempt + 1

    def _read(self, method: Callable[..., Any], request: Any
              ) -> Iterator[Any]:
        """The answers of one call; not retried once there was one."""
        attempt, has_answers = 0, False
        while True:
            call = None
            try:
                call = method(request, timeout=self._options.timeout)
                for answer in call:
                    has_answers = True
                    yield answer
                return
            except grpc.RpcError as ended:
                error = errors.from_rpc_error(ended, self._options.target,
                                              self._options.timeout)
                if has_answers:
                    raise error from None
                attempt = self._pause(error, attempt)
            except ValueError as closed:
                raise errors.client_closed() from closed
            finally:
                if call is not None:
                    call.cancel()

    def _pages(self, method: Callable[..., Any],
               request: Callable[[str], Any], field: str,
               read: Callable[[Any], Any]) -> Iterator[Any]:
        token = ""
        while True:
            answer = self._call(method, request(token))
            for item in getattr(answer, field):
                yield read(item)
            if not answer.next_page_token:
                return
            # Otherwise a faulty server would keep the caller here for ever.
            if answer.next_page_token == token:
                raise errors.response_malformed(
                    "a page whose next page is itself")
            token = answer.next_page_token


def _full_name(name: NameLike, model: str, revision: str) -> TensorName:
    return name if isinstance(name, TensorName) else TensorName(
        model, as_name(name).tensor, revision)


@contextlib.contextmanager
def _naming(name: TensorName) -> Iterator[None]:
    """Errors within are those of that tensor."""
    try:
        yield
    except errors.QuantdError as error:
        error.name = name
        raise


def _describe_parts(shape: Sequence[int], element_type: str, name: NameLike
                    ) -> tensor_pb2.TensorDescription:
    try:
        return tensor_pb2.TensorDescription(
            name=as_name(name).to_proto(),
            element_type=_arrays.element_type_of(element_type), shape=shape)
    except (TypeError, ValueError) as error:
        raise errors.argument_invalid(
            f"expected a shape, got {shape!r}: {error}", "shape") from error


def _describe(reals: _arrays.Reals, name: NameLike
              ) -> tensor_pb2.TensorDescription:
    return _describe_parts(reals.shape, reals.element_type, name)


def _spec(spec: Union[EncodingSpec, str], rank: Optional[int] = None) -> Any:
    if isinstance(spec, str):
        spec = EncodingSpec.parse(spec)
    if not isinstance(spec, EncodingSpec):
        raise errors.argument_invalid(
            f"expected a spec, got {type(spec).__name__}", "spec")
    return spec.to_proto(rank)


def _check_out(exchange: Union[QuantizeExchange, DequantizeExchange]) -> None:
    """Before anything is sent, where the size is known by then."""
    size = exchange.output_bytes()
    out = exchange.caller_out
    if out is not None and size is not None and out.nbytes != size:
        raise errors.argument_invalid(
            f"expected an array of {size} bytes, got {out.nbytes}", "out")
