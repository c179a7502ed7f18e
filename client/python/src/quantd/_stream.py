"""Tensors on a stream that outlives the calls it takes."""

from __future__ import annotations

import collections
import dataclasses
import math
import random
import threading
import time
from typing import Any, Callable, Iterator, Optional

import grpc
from google.protobuf.message import DecodeError

from quantd import _apart, _probe, _wire, errors
from quantd._exchange import Exchange
from quantd._retries import Retries

_FINISH_TIMEOUT_S = 1


@dataclasses.dataclass(frozen=True)
class Options:
    """How a client calls; see Client. Times in seconds."""

    target: str
    timeout: float
    chunk_bytes: int
    max_retries: float
    initial_backoff: float
    max_backoff: float
    retry_for: float = 60.0
    has_tls: bool = False

    def learn(self, retries: Retries, error: errors.QuantdError) -> None:
        """Before allows(): how long retries may help where the server closes
        connections at once. Takes up to 2 s."""
        if error.cause == errors.CLOSED and retries.patience == math.inf and (
                retries.left(self.retry_for) > 0):
            retries.limit(_apart.run(lambda: _probe.closed_patience(
                self.target, self.has_tls)), error)

    def allows(self, retries: Retries, error: errors.QuantdError) -> bool:
        """True if there is time for one more, after an error that it helps."""
        return (not retries.is_over and retries.count < self.max_retries and
                error.cause not in (errors.LASTING, errors.UNTRUSTED) and
                (error.retry_after or 0) < self._left(retries))

    def _left(self, retries: Retries) -> float:
        return retries.left(min(self.retry_for, retries.patience))

    def pause(self, retries: Retries, error: errors.QuantdError) -> float:
        """Counts one more retry and returns how long to wait before it."""
        pause = min(self.initial_backoff * 2.0 ** min(retries.count, 60),
                    self.max_backoff) * random.uniform(0.5, 1.5)
        pause = max(0.0, min(pause, self._left(retries)))
        retries.add()
        return max(pause, error.retry_after or 0)


class StreamCall:
    """One attempt of one bidirectional call.

    gRPC takes what goes up on a thread of its own, and what comes down is read
    on another: neither side can block the other, and an answer is read however
    late its caller asks for it. Thread-safe.
    """

    def __init__(self, method: Callable[..., Any], options: Options) -> None:
        self._options = options
        self._changed = _apart.Condition()
        # Not handed to gRPC, and not answered, oldest first.
        self._unsent: collections.deque[Exchange[Any]] = collections.deque()
        self._unanswered: collections.deque[Exchange[Any]] = collections.deque()
        self._no_more = False
        self._is_finished = False
        self._error: Optional[errors.QuantdError] = None
        self._moved_at = time.monotonic()
        try:
            self._call, self._reader = _apart.run(lambda: self._start(method))
        except BaseException:
            # Nobody will have it: what was started ends by itself.
            with self._changed:
                self._no_more = True
                self._changed.notify_all()
            raise

    def _start(self, method: Callable[..., Any]
               ) -> tuple[Any, threading.Thread]:
        call = method(self._messages())
        reader = threading.Thread(target=self._read, args=(call,), daemon=True,
                                  name="quantd-stream")
        reader.start()
        return call, reader

    def send(self, exchange: Exchange[Any]) -> None:
        """Queues what is not answered."""
        with self._changed:
            if not self._unanswered:
                self._moved_at = time.monotonic()
            self._unsent.append(exchange)
            self._unanswered.append(exchange)
            self._changed.notify_all()

    def wait(self, exchange: Exchange[Any]) -> bool:
        """Until the exchange is answered, the call has finished, or nothing has
        moved for the timeout: then False."""
        with self._changed:
            while not exchange.is_answered and not self._is_finished:
                left = (self._moved_at + self._options.timeout -
                        time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    @property
    def is_finished(self) -> bool:
        """True if nothing more will come."""
        with self._changed:
            return self._is_finished

    @property
    def error(self) -> errors.QuantdError:
        """Why the call has finished without an answer."""
        with self._changed:
            return self._error or errors.response_malformed(
                "the server ended the stream before it had answered")

    def finish(self) -> None:
        """Sends no more, and waits for the server to end the call; not for
        long, since everything is answered."""
        with self._changed:
            self._no_more = True
            self._changed.notify_all()
        self._reader.join(_FINISH_TIMEOUT_S)
        _apart.run(self._call.cancel)

    def cancel(self) -> None:
        """Ends the call; nothing touches the exchanges afterwards, except that
        gRPC may read a payload for one last message."""
        _apart.run(self._call.cancel)
        self._reader.join()

    def _messages(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                while not (self._unsent or self._no_more or self._is_finished):
                    self._changed.wait()
                if self._is_finished or not self._unsent:
                    return
                exchange = self._unsent.popleft()
            for message in exchange.messages(self._options.chunk_bytes):
                yield message
                # gRPC asks for the next when the last is on its way.
                self._moved_at = time.monotonic()
                if self._is_finished:
                    return
            # Not to be kept until there is another.
            del exchange, message

    def _read(self, call: Any) -> None:
        error = None
        try:
            for message in call:
                self._accept(message)
                del message
        except errors.QuantdError as malformed:
            error = malformed
        except (_wire.MalformedError, DecodeError, TypeError) as malformed:
            error = errors.response_malformed(str(malformed))
        except grpc.RpcError as ended:
            error = errors.from_rpc_error(ended, self._options.target,
                                          self._options.timeout)
        except Exception as fault:  # pylint: disable=broad-except
            # Otherwise nobody would be told, and the caller would wait.
            error = errors.QuantdError(grpc.StatusCode.INTERNAL, "",
                                       f"{type(fault).__name__}: {fault}")
        call.cancel()
        with self._changed:
            self._error = error
            self._is_finished = True
            self._changed.notify_all()

    def _accept(self, message: bytes) -> None:
        self._moved_at = time.monotonic()
        if not message:
            # The server tells that it is at work.
            return
        if not self._unanswered:
            raise errors.response_malformed("an answer that nobody asked for")
        exchange = self._unanswered[0]
        if exchange.accept(message):
            with self._changed:
                self._unanswered.popleft()
                exchange.is_answered = True
                self._changed.notify_all()


class RetryingStream:
    """Opens a call when there is something to send, opens another one when that
    breaks with UNAVAILABLE, and sends again what was not answered.

    Not thread-safe; retries go on while `receive` waits.
    """

    def __init__(self, method: Callable[..., Any], options: Options,
                 pause: Callable[[float, errors.QuantdError], None],
                 is_gone: Callable[[Exchange[Any]], bool]) -> None:
        """pause: waits for so many seconds after an error; is_gone: whether
        shared memory of an exchange is lost."""
        self._method = method
        self._options = options
        self._pause = pause
        self._is_gone = is_gone
        self._call: Optional[StreamCall] = None
        self._pending: collections.deque[Exchange[Any]] = collections.deque()
        # For calls that broke one after another without any answer.
        self._broken = Retries()

    @property
    def pending_count(self) -> int:
        """Sent and not received."""
        return len(self._pending)

    @property
    def is_ready(self) -> bool:
        """True if `receive` would not wait."""
        return bool(self._pending) and self._pending[0].is_answered and (
            not self._wants_retry(self._pending[0]))

    @property
    def is_open(self) -> bool:
        """True if a call waits for more."""
        return self._call is not None and not self._call.is_finished

    def send(self, exchange: Exchange[Any]) -> None:
        """Queues an exchange and does not wait."""
        self._pending.append(exchange)
        if exchange.is_answered:
            return
        if self._call is None:
            self._open()
        else:
            self._call.send(exchange)

    def receive(self) -> Exchange[Any]:
        """The oldest exchange, answered or failed. Requires: pending_count."""
        front = self._pending[0]
        # An exchange that was refused behind another one has its time from now
        # on.
        front.retries.restart_clock()
        while True:
            if front.is_answered:
                if not self._wants_retry(front):
                    break
                self._retry(front)
            if self._call is None:
                self._open()
                assert self._call is not None
            call = self._call
            in_time = call.wait(front)
            if front.is_answered:
                self._broken = Retries()
                continue
            call.cancel()
            self._call = None
            # It may have come in the meantime.
            if front.is_answered:
                continue
            self._pause_or_fail(call.error if in_time else errors.timed_out(
                self._options.target, self._options.timeout))
        self._pending.popleft()
        return front

    def close(self, cancel: bool) -> None:
        """Ends the call: cancel it with what is on its way, or leave it to the
        server to end."""
        if self._call is None:
            return
        if cancel:
            self._call.cancel()
        else:
            self._call.finish()
        self._call = None

    def abandon(self) -> None:
        """Gives up what was not received."""
        self.close(cancel=True)
        for exchange in self._pending:
            exchange.unshare()
        self._pending.clear()

    def _open(self) -> None:
        self._call = StreamCall(self._method, self._options)
        for exchange in self._pending:
            if not exchange.is_answered:
                self._call.send(exchange)

    def _pause_or_fail(self, error: errors.QuantdError) -> None:
        """After a call that broke."""
        unanswered = [exchange for exchange in self._pending
                      if not exchange.is_answered]
        self._options.learn(self._broken, error)
        if error.code != grpc.StatusCode.UNAVAILABLE or (
                not self._options.allows(self._broken, error)):
            error = self._broken.explained(error)
            self._broken = Retries()
            for exchange in unanswered:
                exchange.unshare()
                exchange.error = errors.QuantdError(
                    error.code, error.reason, error.message, field=error.field,
                    retry_after=error.retry_after)
                exchange.error.cause = error.cause
                exchange.is_answered = True
                exchange.retries.is_over = True
            return
        for exchange in unanswered:
            # The next server may be another.
            exchange.unshare()
            exchange.reset()
        self._pause(self._options.pause(self._broken, error), error)

    def _wants_retry(self, exchange: Exchange[Any]) -> bool:
        error = exchange.error
        if error is None or not self._options.allows(exchange.retries, error):
            return False
        return (error.code == grpc.StatusCode.UNAVAILABLE or
                error.retry_after is not None or
                (error.reason == "REGION_NOT_FOUND" and
                 self._is_gone(exchange)))

    def _retry(self, exchange: Exchange[Any]) -> None:
        error = exchange.error
        assert error is not None
        if error.reason == "REGION_NOT_FOUND":
            exchange.retries.add()
            exchange.unshare()
        else:
            self._pause(self._options.pause(exchange.retries, error), error)
        exchange.reset()
        if self._call is not None:
            self._call.send(exchange)
