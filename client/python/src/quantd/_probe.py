"""Finds what a server that closes connections at once wanted; like
client/cpp/probe.h."""

from __future__ import annotations

import math
from typing import Any

import grpc

from quantd import _credentials, errors
from quantd._requests import HEALTH_METHOD

# With TLS it mostly wants a certificate, which no retry brings; but a proxy
# without a server behind it does so too.
_CERTIFICATE_PATIENCE_S = 5.0
_PROBE_S = 2.0


def closed_patience(target: str, has_tls: bool) -> float:
    """Seconds for which it is tried again, at most. Takes up to 2 s."""
    if has_tls:
        return _CERTIFICATE_PATIENCE_S
    return 0.0 if _speaks_tls(target) else math.inf


def _speaks_tls(target: str) -> bool:
    """True if what listens there shakes hands in TLS, whatever comes of it."""
    if target.startswith("unix"):
        return False
    arguments: list[tuple[str, Any]] = [
        ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    if _credentials.is_local(target):
        arguments.append(("grpc.enable_http_proxy", 0))
    with grpc.secure_channel(target, grpc.ssl_channel_credentials(),
                             arguments) as channel:
        try:
            channel.unary_unary(HEALTH_METHOD)(b"", timeout=_PROBE_S)
        except grpc.RpcError as failed:
            error = errors.from_rpc_error(failed, target, _PROBE_S)
            # Without its authority it is not believed.
            if error.reason == "SERVER_UNREACHABLE":
                return error.cause == errors.UNTRUSTED
            return error.reason != "TIMEOUT"
    return True
