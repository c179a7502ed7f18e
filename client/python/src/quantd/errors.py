"""The one exception of the package, and where it comes from."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Iterator, Optional, Protocol

import grpc

from quantd import _wire

if TYPE_CHECKING:
    from quantd.v1 import tensor_pb2

# Characters that control a terminal: C0, DEL and C1, and those that turn the
# direction of writing.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Causes of SERVER_UNREACHABLE, as in client/cpp/errors.h: what only a person
# can mend, of that a certificate that is not trusted, and a server that closes
# connections at once.
LASTING = "lasting"
UNTRUSTED = "untrusted"
CLOSED = "closed"
# Words of gRPC 1.51, the text to say, and the cause.
_UNTRUSTED_TEXT = (
    "the TLS handshake with {target} failed: its certificate is of no "
    "authority that this client knows, or for another name; check ca of "
    "tls_credentials(), and the address")
_NO_TLS_TEXT = (
    "the TLS handshake with {target} failed: what listens there does not "
    "speak TLS; leave out credentials")
_CLOSED_TEXT = (
    "{target} closes connections at once, as a server does that wants TLS, or "
    "a client's certificate, or another one; check credentials, and the "
    "arguments of tls_credentials()")
_NOT_QUANTD_TEXT = "what listens at {target} is no gRPC server"
_SYMPTOMS = (
    # It makes no connection of such credentials, and has none to tell of.
    (("empty address list",),
     "the TLS handshake with {target} cannot begin: the key is not that of the "
     "certificate, or a file holds something else than PEM of its kind; check "
     "the arguments of tls_credentials()", LASTING),
    (("certificate verify failed",), _UNTRUSTED_TEXT, UNTRUSTED),
    (("is not in peer certificate",), _UNTRUSTED_TEXT, UNTRUSTED),
    (("Hostname Verification Check failed",), _UNTRUSTED_TEXT, UNTRUSTED),
    (("wrong version number",), _NO_TLS_TEXT, LASTING),
    (("packet length too long",), _NO_TLS_TEXT, LASTING),
    (("Failed parsing HTTP/2",), _NOT_QUANTD_TEXT, LASTING),
    (("Trying to connect an http1.x server",), _NOT_QUANTD_TEXT, LASTING),
    (("Expected SETTINGS frame",), _NOT_QUANTD_TEXT, LASTING),
    # Later it was closed while it was in use.
    (("last error: ", "Socket closed"), _CLOSED_TEXT, CLOSED),
    (("last error: ", "Connection reset by peer"), _CLOSED_TEXT, CLOSED),
)
_REASON = re.compile(r"([A-Z][A-Z0-9_]*): ")
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Name(Protocol):
    """Parts of a TensorName that errors know."""

    @property
    def model(self) -> str:
        """Model of the tensor."""

    @property
    def revision(self) -> str:
        """Revision of the model."""

    @property
    def tensor(self) -> str:
        """The name itself."""


class QuantdError(Exception):
    """A call, or one tensor of a stream, failed.

    code: canonical code of gRPC.
    reason: stable upper-case word to program against, e.g. "CHUNK_OFFSET":
        those of the server are listed in proto/; those of the client are
        ARGUMENT_INVALID, SERVER_UNREACHABLE, TIMEOUT, RESPONSE_MALFORMED,
        CHECKSUM_MISMATCH, SHARED_MEMORY_UNAVAILABLE, CLIENT_CLOSED,
        PROCESS_FORKED, EXPORT_EMPTY, STATE_MISMATCH, ENGINE_MISSING,
        ENGINE_ENDED, and FILE_... of files.
        Empty where gRPC itself gives none.
    message: for people.
    field: path of the request field or the argument at fault, or empty.
    retry_after: seconds to wait before a retry, None where none helps.
    name: the TensorName of the tensor, where one failed.
    cause: of SERVER_UNREACHABLE, "lasting" and "untrusted" where only a person
        can mend it, such as TLS on one side alone, and "closed" where the
        server closes connections at once; otherwise empty.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, *,
                 field: str = "", retry_after: Optional[float] = None) -> None:
        super().__init__(code, reason, message)
        self.code = code
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.name: Optional[Name] = None
        self.cause = ""

    def __str__(self) -> str:
        tensor = self.name.tensor if self.name is not None else ""
        message = f"tensor {tensor!r}: {self.message}" if tensor else (
            self.message)
        text = f"{self.reason or self.code.name}: {message}"
        return _printable(f"{text} ({self.field})" if self.field else text)


def _printable(text: str) -> str:
    """Text of a server made safe for a terminal: control characters become
    \\xNN or \\uNNNN."""
    return _CONTROLS.sub(lambda match: ascii(match.group())[1:-1], text)


def argument_invalid(message: str, field: str = "") -> QuantdError:
    """A call that can not be sent."""
    return QuantdError(grpc.StatusCode.INVALID_ARGUMENT, "ARGUMENT_INVALID",
                       message, field=field)


def response_malformed(message: str) -> QuantdError:
    """An answer that breaks the protocol."""
    return QuantdError(grpc.StatusCode.INTERNAL, "RESPONSE_MALFORMED", message)


def checksum_mismatch(expected: int, got: int) -> QuantdError:
    """Error of data that arrived otherwise than they were sent."""
    return QuantdError(
        grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH",
        f"XXH3 of the data received is {got:016x}, the server sent "
        f"{expected:016x}")


def timed_out(target: str, timeout: float) -> QuantdError:
    """The server did not go on in time."""
    return QuantdError(grpc.StatusCode.DEADLINE_EXCEEDED, "TIMEOUT",
                       f"{target} did not go on within {timeout:g} s")


def client_closed() -> QuantdError:
    """A call of a client after close(), or while it closes."""
    return QuantdError(grpc.StatusCode.CANCELLED, "CLIENT_CLOSED",
                       "the client was closed")


def process_forked() -> QuantdError:
    """A call in a process that was forked off one with a client."""
    return QuantdError(
        grpc.StatusCode.FAILED_PRECONDITION, "PROCESS_FORKED",
        "this process was forked off one that had a client, and gRPC does not "
        "survive that; start processes with 'spawn', or fork them before there "
        "is a client")


def state_mismatch(path: str, what: str) -> QuantdError:
    """A file and a model that do not belong together."""
    return QuantdError(grpc.StatusCode.FAILED_PRECONDITION, "STATE_MISMATCH",
                       f"{path} does not fit the model: {what}")


def shared_memory_unavailable(path: str, what: str) -> QuantdError:
    """No connection for shared memory."""
    return QuantdError(
        grpc.StatusCode.UNAVAILABLE, "SHARED_MEMORY_UNAVAILABLE",
        f"no shared memory at {path} (is quantd running with "
        f"--shared-memory?): {what}")


def from_tensor_error(error: tensor_pb2.TensorError) -> QuantdError:
    """How one tensor failed."""
    return QuantdError(
        _CODES.get(error.code) if error.code > 0 and error.code in _CODES
        else grpc.StatusCode.UNKNOWN,
        error.reason or "UNKNOWN", error.message, field=error.field,
        retry_after=error.retry_after_ms / 1000 or None)


def from_rpc_error(error: grpc.RpcError, target: str,
                   timeout: float) -> QuantdError:
    """How a call failed, with the details that its status carries."""
    code = error.code()
    message = error.details() or ""
    match = _REASON.match(message)
    if match is None:
        # A proxy whose server went away in the middle resets the stream, and a
        # server that ends just when a call comes cancels it unseen. What was
        # cancelled here has another message.
        if code == grpc.StatusCode.UNAVAILABLE or (
                code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)
                and ("RST_STREAM" in message or message == "CANCELLED")):
            return _unreachable(target, message)
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return timed_out(target, timeout)
        return QuantdError(code, "", message)
    field, retry_after = "", None
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            field, retry_after = _read_details(value)
    return QuantdError(code, match.group(1), message[match.end():],
                       field=field, retry_after=retry_after)


def _unreachable(target: str, message: str) -> QuantdError:
    text, cause = f"no answer from {target}: {message}", ""
    for symptoms, meaning, told in _SYMPTOMS:
        if all(symptom in message for symptom in symptoms):
            text, cause = f"{meaning.format(target=target)} ({message})", told
            break
    error = QuantdError(grpc.StatusCode.UNAVAILABLE, "SERVER_UNREACHABLE", text)
    error.cause = cause
    return error


def _read_details(status: bytes) -> tuple[str, Optional[float]]:
    """Field of BadRequest and delay of RetryInfo in a google.rpc.Status, whose
    Python stubs are not everywhere."""
    field, retry_after = "", None

    def parts(message: Any, number: int) -> Iterator[Any]:
        return (value for _, value in _wire.fields(message, number))

    try:
        for detail in parts(status, 3):
            # google.protobuf.Any{1: type_url, 2: value}.
            url = b"".join(bytes(text) for text in parts(detail, 1))
            for value in parts(detail, 2):
                if url.endswith(b"/google.rpc.BadRequest"):
                    for violation in parts(value, 1):
                        for path in parts(violation, 1):
                            field = field or bytes(path).decode("utf-8",
                                                                "replace")
                elif url.endswith(b"/google.rpc.RetryInfo"):
                    for delay in parts(value, 1):
                        time: dict[int, Any] = dict(_wire.fields(delay))
                        retry_after = (time.get(1, 0) +
                                       time.get(2, 0) / 1e9) or None
    except (_wire.MalformedError, TypeError):
        # The status itself says what matters.
        pass
    return field, retry_after
