"""The client for asyncio.

    import quantd.aio

    async with quantd.aio.Client("127.0.0.1:8430") as client:
        quantized = await client.quantize(weight, "int8:per-channel")

Calls, arguments and errors are those of quantd.Client, without shared memory.
"""

from __future__ import annotations

import asyncio
import collections
import collections.abc
import functools
import os
import time
import types
from typing import (Any, AsyncIterable, AsyncIterator, Awaitable, Callable,
                    Iterable, Literal, Mapping, Optional, Sequence, Union,
                    overload)

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from quantd import (_channel, _chunks, _credentials, _requests, _wire, errors,
                    interchange, results)
from quantd._exchange import Exchange, FailedExchange, OutputExchange
from quantd._output_memory import OutputMemory
from quantd._progress import Progress, ProgressLike, total_bytes
from quantd._requests import (HEALTH_METHOD, Attempts, CalibrateJob, Calls,
                              Contribution, Pages, QuantizeJob, Rounding,
                              SpecLike)
from quantd._retries import Retries
from quantd._ties import Ties, TiesLike
from quantd.encoding import Encoding, EncodingReference, Source
from quantd.tensor import (Array, NameLike, Slice, TensorName, as_name,
                           format_info)
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import encoding_service_pb2_grpc as es_grpc

_SERVICE = "/quantd.v1.QuantizationService/"
# Tensors on their way at once.
_WINDOW_BYTES = 64 << 20
_WINDOW_COUNT = 16

_Items = Union[Iterable[Any], AsyncIterable[Any]]


class _Call:
    """One attempt of a bidirectional call, whose sides move by themselves.
    Nothing that moves for the timeout is an error."""

    def __init__(self, method: Callable[..., Any], options: Any,
                 messages: AsyncIterator[bytes]) -> None:
        self._options = options
        self._moved_at = time.monotonic()
        # While the caller is asked for more, time does not count.
        self._is_producing = False
        self._call = method()
        self._writer = asyncio.ensure_future(self._write(messages))

    async def read(self) -> bytes:
        """The next message. Raises: QuantdError, and what the messages up
        raised."""
        while not (message := await self._read()):
            # The server tells that it is at work.
            pass
        return message

    async def _read(self) -> bytes:
        self._moved_at = time.monotonic()
        reading = asyncio.ensure_future(self._call.read())
        try:
            while True:
                left = (self._moved_at + self._options.timeout -
                        time.monotonic())
                done, _ = await asyncio.wait({reading}, timeout=max(left, 0))
                if done:
                    break
                if self._is_producing:
                    self._moved_at = time.monotonic()
                elif left <= 0:
                    raise errors.timed_out(self._options.target,
                                           self._options.timeout)
            self._moved_at = time.monotonic()
            message: Any = await reading
        except grpc.RpcError as error:
            self._raise_fault()
            raise errors.from_rpc_error(error, self._options.target,
                                        self._options.timeout) from None
        except asyncio.CancelledError:
            self._raise_fault()
            raise
        finally:
            reading.cancel()
        if message is grpc.aio.EOF:
            raise errors.response_malformed(
                "the server ended the stream before it had answered")
        return bytes(message)

    async def close(self) -> None:
        """Ends both sides."""
        self._writer.cancel()
        self._call.cancel()
        try:
            await self._writer
        except (asyncio.CancelledError, Exception):  # pylint: disable=W0718
            # Was raised where it mattered.
            pass

    def _raise_fault(self) -> None:
        """Raises the error of the messages up, if there is one."""
        if self._writer.done() and not self._writer.cancelled():
            fault = self._writer.exception()
            if fault is not None:
                raise fault

    async def _move(self, step: Awaitable[None]) -> bool:
        """One step up; False when the call is over: who reads finds out
        why."""
        # The time that the caller took for the message does not count.
        self._moved_at = time.monotonic()
        self._is_producing = False
        try:
            await step
        except (grpc.RpcError, asyncio.InvalidStateError):
            return False
        self._moved_at = time.monotonic()
        return True

    async def _write(self, messages: AsyncIterator[bytes]) -> None:
        try:
            self._is_producing = True
            async for message in messages:
                if not await self._move(self._call.write(message)):
                    return
                self._is_producing = True
            await self._move(self._call.done_writing())
        except Exception:
            self._call.cancel()
            raise
        finally:
            self._is_producing = False


class Chunks(_chunks.Parts[_chunks.Summary]):
    """The output of one tensor in parts, one dimension each, in row-major
    order; to be iterated over once with `async for`, or closed."""

    def __init__(self, data: AsyncIterator[Array],
                 download: _chunks.Download) -> None:
        super().__init__(download)
        self._data = data

    async def __aiter__(self) -> AsyncIterator[Array]:
        async for data in self._data:
            yield self._part(data)

    async def close(self) -> None:
        """Gives up what has not come."""
        await self._data.aclose()  # type: ignore[attr-defined]


class QuantizedChunks(_chunks.QuantizedParts,
                      Chunks[results.QuantizeSummary]):
    """Codes in parts."""


class DequantizedChunks(_chunks.DequantizedParts, Chunks[int]):
    """Reals in parts."""


class Client:
    """A connection to one server; see quantd.Client for the arguments. An
    async context manager. Each event loop that it is used on has its own
    connection."""

    def __init__(self, target: str = "127.0.0.1:8430", *,
                 timeout: float = 60.0, chunk_bytes: int = 2 << 20,
                 retry_for: float = 60.0, max_retries: Optional[int] = None,
                 initial_backoff: float = 0.05,
                 max_backoff: float = 5.0,
                 credentials: Optional[grpc.ChannelCredentials] = None,
                 channel_options: Iterable[tuple[str, Any]] = (),
                 token_file: Optional[str] = None,
                 balance: bool = False) -> None:
        self._options = _channel.check_options(
            target, timeout, chunk_bytes, retry_for, max_retries,
            initial_backoff, max_backoff, credentials is not None)
        target = self._options.target
        self._token = _credentials.token_of(token_file, target, credentials)
        self._arguments = _channel.channel_arguments(self._options, balance,
                                                     channel_options)
        self._credentials = credentials
        self._output_memory = OutputMemory()
        # By the loop that they belong to, each made by its first call.
        self._channels: dict[asyncio.AbstractEventLoop, Any] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<quantd.aio.Client of {self._options.target}{state}>"

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *unused: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connections; calls on their way fail with CLIENT_CLOSED."""
        self._is_closed = True
        self._output_memory.close()
        for loop, channel in list(self._channels.items()):
            if loop.is_running() and loop is not asyncio.get_running_loop():
                # The loop is of another thread, which alone may end its calls.
                asyncio.run_coroutine_threadsafe(channel.close(), loop)
            else:
                await channel.close()

    # Tensors.

    async def quantize(self, array: Any, source: Source, *,
                       name: NameLike = None, store: bool = False,
                       nan_policy: Optional[str] = None,
                       omit_encoding: bool = False, out: Any = None,
                       element_type: Optional[str] = None,
                       rounding: Optional[Rounding] = None,
                       slice_of: Optional[Slice] = None
                       ) -> results.QuantizedTensor:
        """Turns reals into codes; see quantd.Client.quantize."""
        tensor: results.QuantizedTensor = await self._one(
            "Quantize", _requests.quantize(QuantizeJob(
                array, source, name, store, nan_policy, omit_encoding, out,
                element_type, rounding=rounding, slice_of=slice_of)))
        return tensor

    def quantize_chunks(
            self, chunks: _Items, source: Source, *, shape: Sequence[int],
            element_type: str = "float32", name: NameLike = None,
            store: bool = False, nan_policy: Optional[str] = None,
            omit_encoding: bool = False) -> QuantizedChunks:
        """See quantd.Client.quantize_chunks; chunks may be async."""
        job = QuantizeJob(None, source, name, store, nan_policy, omit_encoding)
        header = _requests.quantize_header(
            _requests.describe(shape, element_type, name), job)
        large = _requests.large_encodings([source], header.tensor.shape)
        download = _chunks.quantize_download(header, large)
        return QuantizedChunks(self._chunked(
            "Quantize", header, element_type,
            _chunks.size_of(shape, element_type), chunks, download), download)

    @overload
    def quantize_many(
            self, tensors: _Items, source: _requests.Sources = None, *,
            model: str = "", revision: str = "", store: bool = False,
            nan_policy: Optional[str] = None, min_rank: int = 2,
            on_error: Literal["raise"] = "raise",
            progress: ProgressLike = False
    ) -> AsyncIterator[results.QuantizedTensor]:
        ...

    @overload
    def quantize_many(
            self, tensors: _Items, source: _requests.Sources = None, *,
            model: str = "", revision: str = "", store: bool = False,
            nan_policy: Optional[str] = None, min_rank: int = 2, on_error: str,
            progress: ProgressLike = False
    ) -> AsyncIterator[Union[results.QuantizedTensor, errors.QuantdError]]:
        ...

    def quantize_many(
            self, tensors: _Items, source: _requests.Sources = None, *,
            model: str = "", revision: str = "", store: bool = False,
            nan_policy: Optional[str] = None, min_rank: int = 2,
            on_error: str = "raise", progress: ProgressLike = False) -> AsyncIterator[Any]:
        """Quantizes many tensors at once and yields the results in their
        order; see quantd.Client.quantize_many. tensors may be async."""
        made = _requests.QuantizeItems(tensors, source, model, revision, store,
                                       nan_policy, min_rank)
        return self._many("Quantize", tensors, made.make, on_error, progress,
                          made.end)

    async def dequantize(
            self, codes: Any,
            source: Union[Encoding, EncodingReference, None] = None, *,
            shape: Optional[Sequence[int]] = None,
            element_type: Optional[str] = None, name: NameLike = None,
            out: Any = None, slice_of: Optional[Slice] = None) -> Any:
        """Turns codes into reals; see quantd.Client.dequantize."""
        return await self._one("Dequantize", _requests.dequantize(
            codes, source, shape, element_type, name, out, slice_of))

    def dequantize_chunks(
            self, chunks: _Items, source: Union[Encoding, EncodingReference],
            *, shape: Sequence[int], element_type: str = "float32",
            name: NameLike = None) -> DequantizedChunks:
        """See quantd.Client.dequantize_chunks; chunks may be async."""
        header = _requests.dequantize_header(
            _requests.describe(shape, element_type, name), source)
        size = None
        if isinstance(source, Encoding):
            count = _chunks.size_of(shape, "float32") // 4
            size = format_info(source.format).size_bytes(count)
        large = _requests.large_encodings([source], header.tensor.shape)
        download = _chunks.dequantize_download(header, large)
        return DequantizedChunks(self._chunked(
            "Dequantize", header, None, size, chunks, download), download)

    async def calibrate(self, array: Any, name: NameLike = None,
                        spec: Optional[SpecLike] = None,
                        contribution: Optional[Contribution] = None, *,
                        element_type: Optional[str] = None,
                        slice_of: Optional[Slice] = None
                        ) -> results.CalibrateResult:
        """Statistics of a tensor; see quantd.Client.calibrate."""
        result: results.CalibrateResult = await self._one(
            "Calibrate", _requests.calibrate(CalibrateJob(
                array, name, spec, contribution, element_type, slice_of)))
        return result

    async def calibrate_chunks(
            self, chunks: _Items, name: NameLike = None,
            spec: Optional[SpecLike] = None,
            contribution: Optional[Contribution] = None, *,
            shape: Sequence[int], element_type: str = "float32",
            slice_of: Optional[Slice] = None
    ) -> results.CalibrateResult:
        """See quantd.Client.calibrate_chunks; chunks may be async."""
        header = _requests.calibrate_header(
            _requests.describe(shape, element_type, name, slice_of), spec,
            contribution)
        return results.CalibrateResult.from_proto(await self._summary_of(
            "Calibrate", header, element_type, shape, chunks,
            _chunks.calibrate_download(header)))

    @overload
    def calibrate_many(
            self, tensors: _Items, spec: Optional[SpecLike] = None,
            contribution: Optional[Contribution] = None, *, model: str = "",
            revision: str = "", on_error: Literal["raise"] = "raise",
            progress: ProgressLike = False
    ) -> AsyncIterator[results.CalibrateResult]:
        ...

    @overload
    def calibrate_many(
            self, tensors: _Items, spec: Optional[SpecLike] = None,
            contribution: Optional[Contribution] = None, *, model: str = "",
            revision: str = "", on_error: str,
            progress: ProgressLike = False
    ) -> AsyncIterator[Union[results.CalibrateResult, errors.QuantdError]]:
        ...

    def calibrate_many(
            self, tensors: _Items, spec: Optional[SpecLike] = None,
            contribution: Optional[Contribution] = None, *, model: str = "",
            revision: str = "", on_error: str = "raise",
            progress: ProgressLike = False) -> AsyncIterator[Any]:
        """See quantd.Client.calibrate_many; tensors may be async."""
        return self._many(
            "Calibrate", tensors, _requests.calibrate_items(
                spec, contribution, model, revision), on_error, progress)

    async def evaluate(self, array: Any, candidates: Iterable[Source], *,
                       name: NameLike = None, labels: Sequence[str] = (),
                       per_scale_index: bool = False,
                       with_distribution: bool = False, encodings: bool = True,
                       element_type: Optional[str] = None,
                       inputs: NameLike = None,
                       outer_maxima: Sequence[Optional[float]] = (),
                       metrics: Iterable[str] = (),
                       slice_of: Optional[Slice] = None
                       ) -> results.Evaluation:
        """The error of candidates; see quantd.Client.evaluate."""
        return _requests.join_evaluations([
            (places, await self._one("Evaluate", exchange))
            for places, exchange in _requests.evaluate(
                array, candidates, name, labels, per_scale_index,
                with_distribution, encodings, element_type, inputs,
                outer_maxima, metrics, slice_of)])

    async def evaluate_chunks(
            self, chunks: _Items, candidates: Iterable[Source], *,
            shape: Sequence[int], element_type: str = "float32",
            name: NameLike = None, labels: Sequence[str] = (),
            per_scale_index: bool = False, with_distribution: bool = False,
            encodings: bool = True, inputs: NameLike = None,
            metrics: Iterable[str] = ()) -> results.Evaluation:
        """See quantd.Client.evaluate_chunks; chunks may be async."""
        if not isinstance(candidates, str):
            candidates = list(candidates)
        header = _requests.evaluate_header(
            _requests.describe(shape, element_type, name), candidates, labels,
            per_scale_index, with_distribution, encodings, inputs, metrics)
        summary = await self._summary_of(
            "Evaluate", header, element_type, shape, chunks,
            _chunks.evaluate_download(
                header, _requests.large_encodings(candidates, shape)))
        return results.Evaluation.from_proto(summary)

    async def compare(self, reference: Any, test: Any, *,
                      with_distribution: bool = False,
                      element_type: Optional[str] = None,
                      metrics: Iterable[str] = ()) -> results.ErrorMetrics:
        """The error of `test` against `reference`; see
        quantd.Client.compare."""
        found: results.ErrorMetrics = await self._one(
            "Evaluate", _requests.compare(reference, test, with_distribution,
                                          element_type, metrics))
        return found

    # Encodings.

    async def put_encoding(self, name: TensorName, encoding: Encoding, *,
                           if_match: str = "") -> results.StoredEncoding:
        """Stores an encoding; see quantd.Client.put_encoding."""
        stored: results.StoredEncoding = await self._run(
            _requests.put_encoding(name, encoding, if_match))
        return stored

    async def get_encoding(self, name: TensorName) -> results.StoredEncoding:
        """An encoding with its scales, however many there are."""
        proto = as_name(name).to_proto()
        try:
            answer = await self._call("GetEncoding",
                                      es.GetEncodingRequest(name=proto))
        except errors.QuantdError as error:
            if error.reason != "SCALE_COUNT_LIMIT":
                raise
            return _requests.stored_encoding([answer async for answer in (
                self._read("ReadEncoding", es.ReadEncodingRequest(
                    name=proto)))])
        return results.StoredEncoding.from_proto(answer.stored_encoding)

    async def delete_encoding(self, name: TensorName, *,
                              if_match: str = "") -> None:
        """Deletes an encoding. if_match: only the one that has this etag."""
        await self._run(_requests.delete_encoding(name, if_match))

    async def publish_revision(self, model: str, source_revision: str,
                               revision: str = "", *,
                               keep_others: bool = False
                               ) -> results.PublishedRevision:
        """See Client.publish_revision."""
        published: results.PublishedRevision = await self._run(
            _requests.publish_revision(model, source_revision, revision,
                                       keep_others))
        return published

    async def delete_revision(self, model: str, revision: str) -> None:
        """Deletes the encodings and statistics of a revision, all at once."""
        await self._run(_requests.delete_revision(model, revision))

    async def delete_model(self, model: str) -> None:
        """Deletes a model with all of its revisions, all at once."""
        await self._run(_requests.delete_model(model))

    def list_encodings(self, model: str, revision: str = ""
                       ) -> AsyncIterator[results.StoredEncoding]:
        """The encodings of a revision in order of tensor, without scales."""
        return self._pages(_requests.list_encodings(model, revision))

    def list_models(self) -> AsyncIterator[results.Model]:
        """The models that have encodings or statistics, in order of name."""
        return self._pages(_requests.list_models())

    def list_revisions(self, model: str) -> AsyncIterator[results.Revision]:
        """The revisions of a model that have encodings or statistics, in
        order of name."""
        return self._pages(_requests.list_revisions(model))

    async def export(self, model: str, format: str,
                     path: Union[str, os.PathLike[str], None] = None, *,
                     revision: str = "", patterns: Iterable[str] = (),
                     parameter_patterns: Iterable[str] = (),
                     overwrite: bool = False
                     ) -> interchange.ExportedEncodings:
        """A file of encodings; see quantd.Client.export."""
        request = _requests.export_encodings(model, format, revision, patterns,
                                             parameter_patterns)
        if request.patterns:
            names = [entry.name.tensor async for entry in
                     self.list_encodings(model, revision)]
            _requests.check_patterns(request.patterns, names, model, revision,
                                     "patterns", "an encoding")
        with _requests.export_download(request, path, overwrite) as download:
            async for answer in self._read("ExportEncodings", request):
                download.add(answer)
            return download.result()

    async def import_(self, source: interchange.ImportSource, model: str, *,
                      format: Optional[str] = None, revision: str = "",
                      hints: Iterable[interchange.TensorHint] = (),
                      tensors: Mapping[str, Any] = types.MappingProxyType({}),
                      dry_run: bool = False) -> interchange.ImportedEncodings:
        """Stores a file of encodings; see quantd.Client.import_."""
        imported: interchange.ImportedEncodings = await self._run(
            _requests.import_encodings(source, model, format, revision, hints,
                                       tensors, dry_run))
        return imported

    async def compute_encodings(
            self, model: str, spec: Optional[SpecLike] = None, *,
            revision: str = "", overrides: Iterable[tuple[str, SpecLike]] = (),
            dry_run: bool = False, ties: TiesLike = True
            ) -> AsyncIterator[results.ComputedEncoding]:
        """Encodings from statistics; see quantd.Client.compute_encodings."""
        request = _requests.compute_encodings(model, spec, revision, overrides,
                                              dry_run)
        await self._check_patterns(
            [override.pattern for override in request.overrides], model,
            revision, "overrides")
        tied = Ties(ties)
        if tied.matters(_requests.specs_of(request)):
            _requests.compute_ties(
                request, tied, await self._tied_names(tied, model, revision))
        async for answer in self._read("ComputeEncodings", request):
            yield results.ComputedEncoding.from_proto(answer)

    async def sweep(self, model: str, specs: Iterable[SpecLike], *,
                    revision: str = "", patterns: Iterable[str] = (),
                    min_sqnr_db: Optional[float] = None,
                    max_size_bytes: Optional[int] = None,
                    ties: TiesLike = True) -> results.SweepResult:
        """Ranks specs; see quantd.Client.sweep."""
        request = _requests.sweep(model, specs, revision, patterns)
        targets = _requests.sweep_targets(min_sqnr_db, max_size_bytes)
        await self._check_patterns(request.patterns, model, revision,
                                   "patterns")
        tied = Ties(ties)
        if tied.matters(request.specs):
            _requests.sweep_ties(
                request, tied, await self._tied_names(tied, model, revision))
        swept = _requests.sweep_result(
            [answer async for answer in self._read("Sweep", request)])
        if not targets:
            return swept
        choice = _requests.SweepChoice(swept, len(request.specs), tied, targets)
        return choice.result(choice.request and await self._call(
            "ChooseMixture", choice.request))

    async def choose_mixture(
            self, tensors: Mapping[str, Iterable[results.MixtureOption]], *,
            min_sqnr_db: Iterable[float] = (),
            max_size_bytes: Iterable[int] = ()) -> list[results.SweepMixture]:
        """Chooses specs; see quantd.Client.choose_mixture."""
        return _requests.mixtures(await self._call(
            "ChooseMixture", _requests.choose_mixture(
                tensors, min_sqnr_db, max_size_bytes)))

    async def _check_patterns(self, patterns: Sequence[str], model: str,
                              revision: str, field: str) -> None:
        if patterns:
            names = [entry.tensor async for entry in
                     self.list_statistics(model, revision)]
            _requests.check_patterns(patterns, names, model, revision, field)

    async def _tied_names(self, ties: Ties, model: str, revision: str
                          ) -> list[str]:
        try:
            return [entry.tensor async for entry in
                    self.list_statistics(model, revision)]
        except errors.QuantdError as error:
            ties.raise_unless_optional(error)
            return []

    # Statistics.

    async def get_statistics(self, name: TensorName, *,
                             with_state: bool = False,
                             per_tensor: bool = False,
                             with_moments: bool = False
                             ) -> results.StoredStatistics:
        """Statistics over all contributions. with_state: the histograms too,
        one for each scale index; per_tensor: one over all of them, which is
        small; with_moments: those of features."""
        return results.StoredStatistics.from_proto(await self._call(
            "GetStatistics", es.GetStatisticsRequest(
                name=as_name(name).to_proto(), with_state=with_state,
                per_tensor=per_tensor, with_moments=with_moments)))

    def list_statistics(self, model: str, revision: str = ""
                        ) -> AsyncIterator[results.StatisticsEntry]:
        """The tensors of a revision that have statistics, in order of name."""
        return self._pages(_requests.list_statistics(model, revision))

    async def delete_statistics(self, name: TensorName, *,
                                source: str = "") -> None:
        """Deletes statistics, of all sources or of one."""
        await self._run(_requests.delete_statistics(name, source))

    async def health(self, service: str = "") -> str:
        """See quantd.Client.health."""
        request = _requests.health(service)
        if request is None:
            return "SERVICE_UNKNOWN"
        try:
            answer = await self._attempt(
                self._open().unary_unary(HEALTH_METHOD), request)
        except errors.QuantdError as error:
            if error.code == grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise
        return _requests.health_result(answer)

    # How all of them are sent.

    def _open(self) -> Any:
        if self._is_closed:
            raise errors.client_closed()
        _channel.check_process()
        loop = asyncio.get_running_loop()
        if loop not in self._channels:
            for other in list(self._channels):
                if other.is_closed():
                    self._channels.pop(other, None)
            target = self._options.target
            self._channels[loop] = (
                grpc.aio.insecure_channel(target, self._arguments)
                if self._credentials is None else grpc.aio.secure_channel(
                    target, self._credentials, self._arguments))
        return self._channels[loop]

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return () if self._token is None else (self._token.metadata(),)

    def _begin(self, method: str, messages: AsyncIterator[bytes]) -> _Call:
        try:
            return _Call(functools.partial(
                self._open().stream_stream(_SERVICE + method),
                metadata=(_channel.PROGRESS, *self._metadata())),
                self._options, messages)
        except grpc.aio.UsageError as error:
            raise errors.client_closed() from error

    async def _one(self, method: str, exchange: Exchange[Any]) -> Any:
        if isinstance(exchange, OutputExchange):
            exchange.output_memory = self._output_memory
        for parts in exchange.rounds():
            for part in parts:
                await self._answer(method, part)
                exchange.join(part)
        return exchange.take_result()

    async def _answer(self, method: str, exchange: Exchange[Any]) -> None:
        """All attempts."""
        retries = Retries()
        while True:
            try:
                await self._exchange(method, exchange)
            except errors.QuantdError as error:
                error.name = exchange.name
                await self._pause(error, retries)
            else:
                if exchange.error is None:
                    return
                exchange.error.name = exchange.name
                await self._pause(exchange.error, retries)
            exchange.reset()

    async def _exchange(self, method: str, exchange: Exchange[Any]) -> None:
        """One attempt."""
        async def messages() -> AsyncIterator[bytes]:
            for message in exchange.messages(self._options.chunk_bytes):
                yield message

        call = self._begin(method, messages())
        try:
            while not exchange.accept(await call.read()):
                pass
        except (_wire.MalformedError, DecodeError, TypeError) as malformed:
            raise errors.response_malformed(str(malformed)) from malformed
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise
        finally:
            # The rest of a tensor that failed would be dropped.
            exchange.is_answered = True
            await call.close()

    def _raise_if_closed(self) -> None:
        """gRPC cancels what is on its way when a channel closes."""
        if self._is_closed:
            raise errors.client_closed()

    async def _many(self, method: str, items: _Items,
                    make: Callable[[Any], Optional[Exchange[Any]]],
                    on_error: str, wanted: ProgressLike,
                    end: Callable[[], None] = lambda: None
                    ) -> AsyncIterator[Any]:
        if on_error not in ("raise", "return"):
            raise errors.argument_invalid(
                f"expected 'raise' or 'return', got {on_error!r}", "on_error")
        pending: collections.deque[tuple[asyncio.Future[Any], Exchange[Any]]]
        pending = collections.deque()
        total = total_bytes(items) if wanted is True and isinstance(
            items, collections.abc.Iterable) else None

        async def receive() -> Any:
            task, exchange = pending[0]
            try:
                return await task
            except errors.QuantdError as error:
                if on_error == "raise":
                    raise
                return error
            finally:
                pending.popleft()
                progress.add(exchange.size_bytes)

        with Progress(wanted, method, total) as progress:
            try:
                async for item in _each(items):
                    exchange: Optional[Exchange[Any]]
                    try:
                        exchange = make(item)
                    except errors.QuantdError as error:
                        exchange = FailedExchange(error)
                    if exchange is None:
                        progress.leave_out(item)
                        continue
                    key = exchange.order_key
                    while len(pending) >= _WINDOW_COUNT or (
                            len(pending) > 1 and sum(
                                other.size_bytes for _, other in pending)
                            > _WINDOW_BYTES) or (
                                key is not None and any(
                                    other.order_key == key
                                    for _, other in pending)):
                        yield await receive()
                    pending.append((asyncio.ensure_future(
                        self._settle(method, exchange)), exchange))
                    while pending and pending[0][0].done():
                        yield await receive()
                while pending:
                    yield await receive()
                end()
            finally:
                for task, _ in pending:
                    task.cancel()
                await asyncio.gather(*(task for task, _ in pending),
                                     return_exceptions=True)

    async def _settle(self, method: str, exchange: Exchange[Any]) -> Any:
        if exchange.is_answered:
            return exchange.take_result()
        return await self._one(method, exchange)

    async def _chunked(self, method: str, header: Any,
                       element_type: Optional[str], size_bytes: Optional[int],
                       chunks: _Items, download: _chunks.Download
                       ) -> AsyncIterator[Array]:
        """The data down, as uint8."""
        upload = _chunks.Upload(header, element_type, size_bytes,
                                self._options.chunk_bytes,
                                download.encodings)

        async def messages() -> AsyncIterator[bytes]:
            async for array in _each(chunks):
                for message in upload.messages(array):
                    yield message
            for message in upload.end():
                yield message

        call = self._begin(method, messages())
        try:
            while download.summary is None:
                data = download.accept(await call.read())
                if data is not None:
                    yield data
        except (_wire.MalformedError, DecodeError, TypeError) as malformed:
            raise errors.response_malformed(str(malformed)) from malformed
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise
        except errors.QuantdError as error:
            error.name = upload.name
            raise
        finally:
            await call.close()

    async def _summary_of(self, method: str, header: Any, element_type: str,
                          shape: Sequence[int], chunks: _Items,
                          download: _chunks.Download) -> Any:
        async for _ in self._chunked(
                method, header, element_type,
                _chunks.size_of(shape, element_type), chunks, download):
            pass
        return download.summary

    async def _attempt(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return await method(_requests.messages_of(request),
                                timeout=_requests.timeout_of(
                                    request, self._options.timeout),
                                metadata=self._metadata())
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, self._options.target,
                                        self._options.timeout) from None
        except grpc.aio.UsageError as error:
            raise errors.client_closed() from error
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise

    def _encodings(self, method: str) -> Any:
        return getattr(es_grpc.EncodingServiceStub(  # type: ignore
            self._open()), method)

    async def _call(self, method: str, request: Any,
                    attempts: Optional[Attempts] = None) -> Any:
        retries = Retries()
        while True:
            try:
                return await self._attempt(self._encodings(method), request)
            except errors.QuantdError as error:
                await self._pause(error, retries)
                if attempts is not None:
                    attempts.add(error)

    async def _run(self, calls: Calls[Any]) -> Any:
        """Their result."""
        try:
            call = next(calls)
            while True:
                try:
                    answer = await self._call(call.method, call.request,
                                              call.attempts)
                except errors.QuantdError as error:
                    call = calls.throw(error)
                else:
                    call = calls.send(answer)
        except StopIteration as done:
            return done.value

    async def _pause(self, error: errors.QuantdError, retries: Retries) -> None:
        """Waits before the next attempt, or raises."""
        if error.cause == errors.CLOSED:
            await asyncio.get_running_loop().run_in_executor(
                None, self._options.learn, retries, error)
        if not self._options.allows(retries, error) or (
                error.code != grpc.StatusCode.UNAVAILABLE and
                error.retry_after is None):
            raise retries.explained(error)
        seconds = self._options.pause(retries, error)
        end = time.monotonic() + seconds
        if error.reason == "SERVER_UNREACHABLE":
            # gRPC goes on connecting only while a call waits for that,
            # otherwise every 5 s.
            try:
                await self._open().unary_unary(HEALTH_METHOD)(
                    b"", timeout=seconds, wait_for_ready=True)
            except grpc.RpcError:
                pass
            except grpc.aio.UsageError as closed:
                raise errors.client_closed() from closed
            except asyncio.CancelledError:
                self._raise_if_closed()
                raise
        await asyncio.sleep(max(0.0, end - time.monotonic()))

    async def _read(self, method: str, request: Any) -> AsyncIterator[Any]:
        """The answers of one call; not retried once there was one."""
        retries, has_answers = Retries(), False
        while True:
            call = None
            try:
                call = self._encodings(method)(
                    request, timeout=self._options.timeout,
                    metadata=self._metadata())
                async for answer in call:
                    has_answers = True
                    yield answer
                return
            except grpc.RpcError as ended:
                error = errors.from_rpc_error(ended, self._options.target,
                                              self._options.timeout)
                if has_answers:
                    raise error from None
                await self._pause(error, retries)
            except grpc.aio.UsageError as closed:
                raise errors.client_closed() from closed
            except asyncio.CancelledError:
                self._raise_if_closed()
                raise
            finally:
                if call is not None:
                    call.cancel()

    async def _pages(self, pages: Pages) -> AsyncIterator[Any]:
        token = ""
        while True:
            answer = await self._call(pages.method, pages.request(token))
            for item in getattr(answer, pages.field):
                yield pages.read(item)
            token = pages.next_token(answer, token)
            if not token:
                return


async def _each(items: _Items) -> AsyncIterator[Any]:
    """Yields the items of an iterable of either kind."""
    if isinstance(items, collections.abc.AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
