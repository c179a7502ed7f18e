"""Whole models are the work of quantctl, which runs as a process of its own: a
file that is cut short, or a signal, does not end the job that asked for it, and
that may have threads, forks and another gRPC."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
from typing import Any, Iterator, Optional, Sequence

import grpc

from quantd import _credentials, errors
from quantd._progress import Progress, ProgressLike
from quantd._stream import Options

# Path of quantctl; otherwise that in the package, or in PATH.
_VARIABLE = "QUANTD_QUANTCTL"
_ERROR = re.compile(r"quantctl: ([A-Z][A-Z0-9_]*): (.*)")
# Options that texts of quantctl name, and the arguments that say the same.
_ARGUMENTS = {
    "--activations": "activations", "--exclude": "exclude",
    "--force": "overwrite=True", "--ignore": "ignore",
    "--importance": "importance", "--include": "include",
    "--inputs": "inputs", "--inputs-map": "ModelRounding.inputs",
    "--join": "join_model()", "--keep-going": "keep_going=True",
    "--kv-cache": "kv_cache", "--layout": "layout",
    "--metadata": "metadata", "--min-rank": "min_rank", "--all": "min_rank=0",
    "--model": "model", "--nan-policy": "nan_policy",
    "--no-store": "store=False", "--no-ties": "ties=False", "--part": "part",
    "--requantize": "requantize=True", "--restart": "restart=True",
    "--revision": "revision", "--rounding": "rounding", "--scheme": "scheme",
    "--server": "target", "--spec": "specs", "--store": "store=True",
    "--streams": "streams", "--tie": "ties", "--timeout": "timeout"}
_OPTION = re.compile(r"(?<![\w/.-])--[a-z]+(?:-[a-z]+)*(?![\w.-])")


@dataclasses.dataclass(frozen=True)
class Access:
    """How a client reaches its server."""

    options: Options
    credentials: Optional[grpc.ChannelCredentials]
    token_file: Optional[str]
    balance: bool

    def flags(self) -> list[str]:
        """Options of quantctl. Raises: ARGUMENT_INVALID."""
        options = self.options
        flags = [f"--server={options.target}",
                 f"--timeout={options.timeout:.9f}",
                 f"--retry-for={options.retry_for:.9f}"]
        if options.max_retries != math.inf:
            flags.append(f"--retries={options.max_retries:.0f}")
        if self.balance:
            flags.append("--balance")
        if self.token_file is not None:
            flags.append(f"--token-file={self.token_file}")
        if self.credentials is not None:
            flags += _credentials.flags_of(self.credentials)
        return flags


class Texts(contextlib.ExitStack):
    """Files without a name that quantctl reads."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptors: list[int] = []

    def add(self, content: bytes) -> str:
        """Path of a file with that content, in the process of quantctl."""
        file = self.enter_context(tempfile.TemporaryFile())
        file.write(content)
        file.flush()
        self.descriptors.append(file.fileno())
        return f"/dev/fd/{file.fileno()}"


def path_of(name: Any) -> str:
    """A path that quantctl does not take for an option or a pipe."""
    path: str = os.fspath(name)
    return f"./{path}" if path.startswith("-") else path


def run(access: Optional[Access], command: Sequence[str], texts: Texts,
        wanted: ProgressLike) -> tuple[dict[str, Any], list[str]]:
    """Runs a command of quantctl. Returns the document that it prints, and what
    it tells people on stderr.

    access: None for a command that calls no server.

    Raises: the error that ended it; ENGINE_MISSING. Ctrl-C ends it first.
    """
    engine = _find()
    read, write = os.pipe()
    with contextlib.ExitStack() as files:
        steps = files.enter_context(os.fdopen(read, "rb"))
        out = files.enter_context(tempfile.TemporaryFile())
        told = files.enter_context(tempfile.TemporaryFile())
        try:
            process = subprocess.Popen(  # pylint: disable=consider-using-with
                [engine, "--json", "--quiet", f"--progress-fd={write}",
                 *(access.flags() if access is not None else ()), *command],
                stdin=subprocess.DEVNULL, stdout=out, stderr=told,
                pass_fds=(write, *texts.descriptors),
                # What counts is what the client was told.
                env={name: value for name, value in os.environ.items()
                     if not name.startswith("QUANTD_")})
        except OSError as error:
            raise _missing(f"{engine}: {error.strerror}") from error
        finally:
            os.close(write)
        try:
            _show(steps, wanted, command[0])
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        out.seek(0)
        told.seek(0)
        lines = told.read().decode("utf-8", "replace").splitlines()
        try:
            document = json.loads(out.read())
        except ValueError:
            document = None
    lines = [_argument_names(line) for line in lines]
    if document is None:
        raise _ended(code, lines)
    if "error" in document:
        raise error_of(document["error"])
    return document, [line.partition("quantctl: ")[2] or line
                      for line in lines]


def error_of(document: dict[str, str]) -> errors.QuantdError:
    """The error of a tensor or a command in a document."""
    return errors.QuantdError(
        getattr(grpc.StatusCode, document["code"], grpc.StatusCode.UNKNOWN),
        document["reason"], _argument_names(document["message"]))


def _show(steps: Iterator[bytes], wanted: ProgressLike, what: str) -> None:
    """Shows the progress until the process closes the pipe."""
    done, shown = 0, None
    with contextlib.ExitStack() as stack:
        for line in steps:
            step = json.loads(line)
            if shown is None:
                shown = stack.enter_context(
                    Progress(wanted, what, step["total_bytes"]))
            if step["done_bytes"] > done:
                shown.add(step["done_bytes"] - done)
                done = step["done_bytes"]


def _ended(code: int, lines: Sequence[str]) -> errors.QuantdError:
    """Why quantctl ended without a document."""
    found = [match for match in map(_ERROR.match, lines) if match]
    if found:
        # A file that was cut short while quantctl read it.
        return errors.QuantdError(grpc.StatusCode.ABORTED, found[-1][1],
                                  found[-1][2])
    text = " ".join(line.partition("quantctl: ")[2] or line for line in lines)
    if code == 2:
        return errors.argument_invalid(text)
    how = (f"was ended by {signal.Signals(-code).name}" if code < 0 else
           f"ended with exit code {code}")
    return errors.QuantdError(
        grpc.StatusCode.CANCELLED if code < 0 else grpc.StatusCode.INTERNAL,
        "ENGINE_ENDED", f"quantctl {how}{': ' if text else ''}{text}")


def _argument_names(text: str) -> str:
    return _OPTION.sub(
        lambda match: _ARGUMENTS.get(match[0], match[0]), text)


def _find() -> str:
    """Path of quantctl. Raises: ENGINE_MISSING."""
    own = os.path.join(os.path.dirname(__file__), "bin", "quantctl")
    path = os.environ.get(_VARIABLE) or (
        own if os.path.exists(own) else shutil.which("quantctl"))
    if path is None:
        raise _missing("there is none")
    _check_version(path)
    return path


@functools.lru_cache(maxsize=None)
def _check_version(path: str) -> None:
    # pylint: disable-next=import-outside-toplevel,cyclic-import
    from quantd import __version__
    try:
        answer = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    except OSError as error:
        raise _missing(f"{path}: {error.strerror}") from error
    text = (answer.stdout or answer.stderr).decode("utf-8", "replace").strip()
    if answer.returncode or text != f"quantctl {__version__}":
        raise _missing(f"{path} is or says {text!r}, not quantctl "
                       f"{__version__}")


def _missing(what: str) -> errors.QuantdError:
    return errors.QuantdError(
        grpc.StatusCode.FAILED_PRECONDITION, "ENGINE_MISSING",
        "whole models are the work of quantctl, expected in the package, in "
        f"PATH or at {_VARIABLE}: {what}")
