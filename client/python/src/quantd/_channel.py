"""How a client of either kind connects."""

from __future__ import annotations

from typing import Any, Iterable

from quantd import errors
from quantd._stream import Options

# The answer to a chunk is to come in one frame.
_FRAME_BYTES = 2 << 20
# A whole number of elements, and of pairs of them, of every type.
_CHUNK_UNIT_BYTES = 64
_MAX_CHUNK_BYTES = 32 << 20
# In turn over the addresses that say SERVING for the whole server.
_BALANCING = """{"loadBalancingConfig": [{"round_robin": {}}],
                 "healthCheckConfig": {"serviceName": ""}}"""
_LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:", "unix-abstract:")


def check_options(target: str, timeout: float, chunk_bytes: int,
                  max_retries: int, initial_backoff: float,
                  max_backoff: float) -> Options:
    """Raises: ARGUMENT_INVALID."""
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
    return Options(target, timeout,
                   chunk_bytes // _CHUNK_UNIT_BYTES * _CHUNK_UNIT_BYTES,
                   max_retries, initial_backoff, max_backoff)


def channel_arguments(options: Options,
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
    if "," in options.target:
        arguments.append(("grpc.service_config", _BALANCING))
    if options.target.startswith(_LOOPBACK):
        arguments.append(("grpc.enable_http_proxy", 0))
    given = list(extra)
    names = {name for name, _ in given}
    return [item for item in arguments if item[0] not in names] + given
