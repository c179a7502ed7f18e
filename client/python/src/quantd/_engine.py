"""Whole models are the work of quantctl, which runs as a process of its own: a
file that is cut short, or a signal, does not end the job that asked for it, and
that may have threads, forks and another gRPC."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
from typing import Any, Optional, Sequence

import grpc

from quantd import _credentials, errors
from quantd._progress import Progress, ProgressLike
from quantd._stream import Options

# Path of quantctl; otherwise that in the package, or in PATH.
_VARIABLE = "QUANTD_QUANTCTL"
_ERROR = re.compile(r"quantctl: ([A-Z][A-Z0-9_]*): (.*)")
# Options that texts of quantctl name, and the arguments that say the same.
_ARGUMENTS = {
    "--activations": "activations", "--all": "min_rank",
    "--column-order": "column_order", "--damping": "damping",
    "--exclude": "exclude", "--force": "overwrite=True", "--ignore": "ignore",
    "--importance": "importance", "--include": "include",
    "--inputs": "inputs", "--inputs-map": "ModelRounding(inputs=...)",
    "--join": "join_model()", "--keep-going": "keep_going=True",
    "--kv-cache": "kv_cache", "--layout": "layout",
    "--max-bits-per-element": "max_bits_per_element",
    "--max-bytes": "max_size_bytes", "--metadata": "gguf_metadata",
    "--min-rank": "min_rank", "--min-sqnr": "min_sqnr_db",
    "--model": "model", "--nan-policy": "nan_policy",
    "--no-store": "store=False", "--no-ties": "ties=False",
    "--output-weights": "weights", "--part": "part",
    "--requantize": "requantize=True", "--restart": "restart=True",
    "--retries": "max_retries", "--retry-for": "retry_for",
    "--revision": "revision", "--rounding": "rounding", "--scheme": "scheme",
    "--server": "the target of the client", "--spec": "specs",
    "--store": "store=True", "--streams": "streams", "--tie": "ties",
    "--timeout": "timeout"}
# Commands of quantctl stay what they are.
_WORDS = re.compile(r"`[^`]*`|quantctl [a-z]+ (?:[a-z]+ )*--?[a-z-]+[^;,.]*|"
                    r"(?<![\w/.-])--[a-z]+(?:-[a-z]+)*(?![\w.-])")
# What is of no use to who did not call quantctl himself.
_ASIDES = re.compile(r" Run quantctl .*? --help for more information\.|"
                     r"; --json has them all|^warning: ")
# A server that nobody calls.
_NOBODY = ["--server=unix:/dev/null", "--retry-for=0"]
_MOST_SECONDS = 1e9
_STOP_S = 15
_POLL_MS = 100


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
                 f"--timeout={min(options.timeout, _MOST_SECONDS):.9f}",
                 f"--retry-for={min(options.retry_for, _MOST_SECONDS):.9f}"]
        if options.max_retries < 1 << 31:
            flags.append(f"--retries={math.floor(options.max_retries)}")
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
        # Arguments by path.
        self._names: dict[str, str] = {}

    def add(self, content: bytes, name: str) -> str:
        """Path of a file with that content, in the process of quantctl. name:
        of the argument that has it."""
        file = tempfile.TemporaryFile()
        with file:
            file.write(content)
            file.flush()
            descriptor = _above_standard(file.fileno())
        self.callback(os.close, descriptor)
        self.descriptors.append(descriptor)
        path = f"/dev/fd/{descriptor}"
        self._names[path] = name
        return path

    def named(self, text: str) -> str:
        """A text of quantctl with arguments in place of files and options."""
        for path, name in self._names.items():
            text = re.sub(rf"{path}(?!\d)", name, text)
        return _ASIDES.sub("", _WORDS.sub(
            lambda match: _ARGUMENTS.get(match[0], match[0]), text))

    def error_of(self, document: dict[str, str]) -> errors.QuantdError:
        """The error of a tensor or a command in a document."""
        return errors.QuantdError(
            getattr(grpc.StatusCode, document["code"], grpc.StatusCode.UNKNOWN),
            document["reason"], self.named(document["message"]))


def path_of(name: Any, field: str) -> str:
    """A path that quantctl does not take for an option or a pipe. Raises:
    ARGUMENT_INVALID."""
    path: str = os.fsdecode(name)
    if not path:
        raise errors.argument_invalid("expected a path, got none", field)
    return f"./{path}" if path.startswith("-") else path


def run(access: Optional[Access], command: Sequence[str], texts: Texts,
        wanted: ProgressLike) -> tuple[dict[str, Any], list[str]]:
    """Runs a command of quantctl. Returns the document that it prints, and what
    it tells people on stderr.

    access: None for a command that need not call a server.

    Raises: the error that ended it; ENGINE_MISSING, ENGINE_ENDED. Ctrl-C ends
        it first.
    """
    engine = _find()
    words = ["--json", "--quiet",
             *(_NOBODY if access is None else access.flags()), *command]
    if any("\0" in word for word in words):
        raise errors.argument_invalid(
            "expected paths, names and patterns without NUL")
    with contextlib.ExitStack() as files:
        read, write = _pipe()
        steps = files.enter_context(os.fdopen(read, "rb", 0))
        out = files.enter_context(tempfile.TemporaryFile())
        told = files.enter_context(tempfile.TemporaryFile())
        words.insert(0, f"--progress-fd={write}")
        arguments = texts.add(
            b"".join(os.fsencode(word) + b"\0" for word in words), "arguments")
        try:
            process = subprocess.Popen(  # pylint: disable=consider-using-with
                [engine, "--arguments", arguments],
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
            _show(steps, process, wanted, command[0])
            code = process.wait()
        except BaseException:
            _stop(process, steps)
            raise
        out.seek(0)
        told.seek(0)
        lines = [texts.named(line) for line in
                 told.read().decode("utf-8", "replace").splitlines()]
        try:
            document = json.loads(out.read())
        except ValueError:
            document = None
    if document is None or (code not in (0, 1) and "error" not in document):
        raise _ended(code, lines)
    if "error" not in document:
        return document, [_without_name(line) for line in lines]
    found = texts.error_of(document["error"])
    if access is None and found.reason == "SERVER_UNREACHABLE":
        raise errors.argument_invalid(
            "expected a client, as something stored is read or published",
            "client")
    raise found


def _stop(process: subprocess.Popen[bytes], steps: Any) -> None:
    # It would wait for somebody who reads them.
    steps.close()
    # SIGINT may be ignored, as in what a shell runs in the background.
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()


def _above_standard(descriptor: int) -> int:
    """Another descriptor for the same file. A daemon may have closed stdin,
    stdout and stderr, whose numbers the process of quantctl takes."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    try:
        return _above_standard(read), _above_standard(write)
    finally:
        os.close(read)
        os.close(write)


def _show(steps: Any, process: subprocess.Popen[bytes], wanted: ProgressLike,
          what: str) -> None:
    """Shows the progress until the process ends. A process that was forked off
    this one meanwhile may hold the pipe open for longer."""
    done, rest = 0, b""
    shown: Optional[Progress] = None
    # select() takes no descriptors above 1023.
    poll = select.poll()
    poll.register(steps, select.POLLIN)
    with contextlib.ExitStack() as stack:
        has_ended = False
        while True:
            if not poll.poll(0 if has_ended else _POLL_MS):
                if has_ended:
                    return
                has_ended = process.poll() is not None
                continue
            data = steps.read(1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                step = json.loads(line)
                if shown is None:
                    shown = stack.enter_context(
                        Progress(wanted, what, step["total_bytes"]))
                if step["done_bytes"] > done:
                    shown.add(step["done_bytes"] - done)
                    done = step["done_bytes"]


def _without_name(line: str) -> str:
    return _ASIDES.sub("", line.partition("quantctl: ")[2] or line)


def _ended(code: int, lines: Sequence[str]) -> errors.QuantdError:
    """Why quantctl ended without a document, or in spite of it."""
    found = [match for match in map(_ERROR.match, lines) if match]
    if found:
        # A file that was cut short or changed while quantctl read it.
        return errors.QuantdError(grpc.StatusCode.ABORTED, found[-1][1],
                                  found[-1][2])
    text = " ".join(map(_without_name, lines))
    if "there is no option --arguments" in text:
        return _missing(f"it is of another state of quantd ({text})")
    if code == 2:
        return errors.argument_invalid(text)
    how = (f"was ended by {signal.strsignal(-code)}" if code < 0 else
           f"ended with exit code {code}")
    return errors.QuantdError(
        grpc.StatusCode.CANCELLED if code < 0 else grpc.StatusCode.INTERNAL,
        "ENGINE_ENDED", f"quantctl {how}{': ' if text else ''}{text}")


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
