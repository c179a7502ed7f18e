"""Credentials that a client shows to a server, and those that it wants to
see."""

from __future__ import annotations

import collections
import os
import re
import threading
import time
import weakref
from typing import Any, Callable, Optional

import grpc

from quantd import errors

_INTERVAL_S = 1.0
# Options of quantctl by what tls_credentials() made.
_FLAGS: weakref.WeakKeyDictionary[grpc.ChannelCredentials, list[str]] = (
    weakref.WeakKeyDictionary())
_LOCAL = re.compile(r"(127\.[0-9.]+|localhost|\[::1\])(:\d+)?$")


def tls_credentials(ca: Optional[str] = None, certificate: Optional[str] = None,
                    key: Optional[str] = None) -> grpc.ChannelCredentials:
    """TLS for Client(credentials=...), from paths of PEM files.

    ca: trusted CA certificates; None: gRPC's own.
    certificate, key: the client's own, both or neither.

    The files are read once: make another client for new ones. Calls on whole
    models read them again.
    """
    if (certificate is None) != (key is None):
        raise errors.argument_invalid(
            "expected a client's certificate together with its key, got one "
            "of them", "certificate")
    paths = {"ca": ca, "key": key, "certificate": certificate}
    credentials = grpc.ssl_channel_credentials(*(
        None if path is None else _read(path, field)
        for field, path in paths.items()))
    _FLAGS[credentials] = ["--tls", *(
        f"--tls-{field}={os.path.abspath(os.fsdecode(path))}"
        for field, path in paths.items() if path is not None)]
    return credentials


def flags_of(credentials: grpc.ChannelCredentials) -> list[str]:
    """Options of quantctl for the same TLS. Raises: ARGUMENT_INVALID."""
    flags = _FLAGS.get(credentials)
    if flags is None:
        raise errors.argument_invalid(
            "expected credentials of tls_credentials() for work on files, "
            "which another process does", "credentials")
    return flags


def _read(path: str, field: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise errors.argument_invalid(
            f"expected a file that can be read, got {path!r}: "
            f"{error.strerror}", field) from error


def is_local(target: str) -> bool:
    """True if everything behind a target is on this machine."""
    if target.startswith("unix:"):
        return True
    addresses = re.sub(r"^(dns:(///)?|ipv4:|ipv6:)", "", target).split(",")
    return all(_LOCAL.match(address) for address in addresses)


class TokenFile:
    """The token of a file, read again once a second. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._token = self._read()
        self._time = time.monotonic()

    def _read(self) -> str:
        token = _read(self._path, "token_file").decode("ascii", "replace")
        token = token.strip()
        if not re.fullmatch(r"[!-~]+", token):
            raise errors.argument_invalid(
                "expected one token of printable characters in "
                f"{self._path!r}", "token_file")
        return token

    def metadata(self) -> tuple[str, str]:
        with self._lock:
            now = time.monotonic()
            if now - self._time >= _INTERVAL_S:
                self._time = now
                try:
                    self._token = self._read()
                except errors.QuantdError:
                    # The token that was there stays.
                    pass
            return ("authorization", "Bearer " + self._token)


def token_of(path: Optional[str], target: str,
             credentials: Optional[grpc.ChannelCredentials]
             ) -> Optional[TokenFile]:
    """Token file of a client to a target. Raises: ARGUMENT_INVALID."""
    if path is None:
        return None
    if credentials is None and not is_local(target):
        raise errors.argument_invalid(
            "expected TLS for a token to leave the machine, got plaintext to "
            f"{target!r}", "token_file")
    return TokenFile(path)


class _CallDetails(
        collections.namedtuple(
            "_CallDetails", ("method", "timeout", "metadata", "credentials",
                             "wait_for_ready", "compression")),
        grpc.ClientCallDetails):  # type: ignore[misc]
    pass


class TokenSender(
        grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
        grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
        grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
        grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
    """Sends a token with every call."""

    def __init__(self, file: TokenFile) -> None:
        self._file = file

    def _send(self, call: Callable[..., Any], details: Any,
              request: Any) -> Any:
        return call(_CallDetails(
            details.method, details.timeout,
            (*(details.metadata or ()), self._file.metadata()),
            details.credentials, getattr(details, "wait_for_ready", None),
            getattr(details, "compression", None)), request)

    intercept_unary_unary = _send
    intercept_unary_stream = _send
    intercept_stream_unary = _send
    intercept_stream_stream = _send
