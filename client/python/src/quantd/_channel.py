"""How a client of either kind connects."""

from __future__ import annotations

import math
import os
import re
from typing import Any, Iterable, Optional

from quantd import _credentials, errors
from quantd._stream import Options

# The answer to a chunk is to come in one frame.
_FRAME_BYTES = 2 << 20
# A whole number of elements, and of pairs of them, of every type.
_CHUNK_UNIT_BYTES = 64
_MAX_CHUNK_BYTES = 32 << 20
# In turn over the addresses that say SERVING for the whole server.
_BALANCING = """{"loadBalancingConfig": [{"round_robin": {}}],
                 "healthCheckConfig": {"serviceName": ""}}"""
# Metadata of a call whose server is to send an empty message every few seconds
# while it works on a tensor: a search may take longer than it may be silent.
PROGRESS = ("quantd-progress", "1")
# Port of a server that was told no other.
_PORT = "8430"

# gRPC's threads do not survive a fork, so that calls of the child would wait
# for ever; unless it was told to take care of that.
_SURVIVES_FORK = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in (
    "1", "t", "true", "y", "yes")


class _Process:
    """State of gRPC: if it runs here, and if it ran in the parent."""

    has_channel = False
    is_forked = False


def _after_fork() -> None:
    _Process.is_forked = _Process.has_channel


if hasattr(os, "register_at_fork") and not _SURVIVES_FORK:
    os.register_at_fork(after_in_child=_after_fork)


def is_forked() -> bool:
    """True if the channels that there are belong to another process."""
    return _Process.is_forked


def check_process() -> None:
    """Before a channel is made or used. Raises: PROCESS_FORKED."""
    if is_forked():
        raise errors.process_forked()
    _Process.has_channel = True


def _check_number(value: Any, least: float, what: str, field: str,
                  most: float = math.inf) -> None:
    try:
        if least <= value <= most:
            return
    except TypeError:
        pass
    raise errors.argument_invalid(f"expected {what}, got {value!r}", field)


def _host_and_port(address: str, text: str) -> str:
    """A host with its port."""
    host, port = address, _PORT
    is_bare_ipv6 = "]" not in address and address.count(":") > 1
    match = re.fullmatch(r"(.*):([^]]*)", address)
    if match and not is_bare_ipv6:
        host, port = match[1], match[2]
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not host or (re.search(r"[][]", host) and not is_bracketed):
        raise _invalid_target("HOST or HOST:PORT", text)
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise _invalid_target("HOST:PORT with a port of 1 to 65535", text)
    return f"[{host}]:{port}" if is_bare_ipv6 else f"{host}:{port}"


def _invalid_target(expected: str, text: Any) -> errors.QuantdError:
    return errors.argument_invalid(
        f"expected {expected} as the server, got {text!r}", "target")


def parse_target(text: Any) -> str:
    """The target as gRPC takes it; the rule is that of the C++ client, in
    client/cpp/target.h. Raises: ARGUMENT_INVALID."""
    expected = "HOST, HOST:PORT or unix:PATH"
    if not text or not isinstance(text, str) or (
            re.search(r"[\x00-\x20\x7f]", text)):
        raise _invalid_target(expected, text)
    if text[0] == "/":
        return "unix:" + text
    match = re.match(r"(unix|unix-abstract|vsock|xds):(.?)", text)
    if match:
        if not match[2]:
            raise _invalid_target(expected, text)
        return text
    match = re.match(r"(ipv4:|ipv6:|dns:(//[^/]*/)?)?", text)
    assert match is not None
    scheme, rest = match[0], text[match.end():]
    if scheme == "dns:" and rest.startswith("//"):
        raise _invalid_target("dns:///HOST:PORT", text)
    url = re.match(r"(.*?://)([^/]*)", rest)
    if url:
        tls = ", with TLS" if url[1].endswith("s://") else ""
        raise errors.argument_invalid(
            f"expected {expected} as the server, got the URL {text!r}; leave "
            f'out "{url[1]}": {url[2]}{tls}', "target")
    if "/" in rest:
        raise _invalid_target(expected, text)
    addresses = rest.split(",")
    if len(addresses) > 1 and scheme not in ("ipv4:", "ipv6:"):
        raise _invalid_target(
            "one server, or several as ipv4:HOST:PORT,HOST:PORT", text)
    return scheme + ",".join(_host_and_port(address, text)
                             for address in addresses)


def check_options(target: str, timeout: float, chunk_bytes: int,
                  retry_for: float, max_retries: Optional[int],
                  initial_backoff: float, max_backoff: float, has_tls: bool
                  ) -> Options:
    """Raises: ARGUMENT_INVALID."""
    target = parse_target(target)
    _check_number(timeout, 1e-9, "more than 0 s", "timeout")
    _check_number(retry_for, 0, "at least 0 s", "retry_for")
    if max_retries is not None:
        _check_number(max_retries, 0, "at least 0", "max_retries")
    _check_number(initial_backoff, 0, "at least 0 s", "initial_backoff")
    _check_number(max_backoff, 0, "at least 0 s", "max_backoff")
    _check_number(chunk_bytes, _CHUNK_UNIT_BYTES,
                  f"{_CHUNK_UNIT_BYTES} to {_MAX_CHUNK_BYTES} bytes",
                  "chunk_bytes", _MAX_CHUNK_BYTES)
    return Options(target, timeout,
                   chunk_bytes // _CHUNK_UNIT_BYTES * _CHUNK_UNIT_BYTES,
                   math.inf if max_retries is None else max_retries,
                   initial_backoff, max_backoff, retry_for, has_tls)


def channel_arguments(options: Options, balance: bool,
                      extra: Iterable[tuple[str, Any]]
                      ) -> list[tuple[str, Any]]:
    """Ours, and after them those of the caller, which count."""
    arguments: list[tuple[str, Any]] = [
        # The answer with an encoding is as large as its scales are many, and
        # only the server knows its limit of those.
        ("grpc.max_receive_message_length", -1),
        ("grpc.http2.max_frame_size", _FRAME_BYTES),
        # A connection per client: that is what several clients are for.
        ("grpc.use_local_subchannel_pool", 1),
        # Retries are made here; those of gRPC buffer what they send.
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # This one is the time to connect in.
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.max_reconnect_backoff_ms",
         max(50, int(1000 * min(options.max_backoff, 2))))]
    if balance or "," in options.target:
        arguments.append(("grpc.service_config", _BALANCING))
    if _credentials.is_local(options.target):
        arguments.append(("grpc.enable_http_proxy", 0))
    given = list(extra)
    names = {name for name, _ in given}
    return [item for item in arguments if item[0] not in names] + given
