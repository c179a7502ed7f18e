"""Files of other projects that carry encodings: what Client.export and
Client.import_ take and answer."""

from __future__ import annotations

import dataclasses
import operator
import os
import re
import stat
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence, Union

import grpc

from quantd import _files, errors
from quantd._tables import ResultList, Tabular
from quantd.files import TensorFile
from quantd.tensor import EnumNames
from quantd.v1 import encoding_service_pb2 as es

# A path, or the bytes of the file.
ImportSource = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview]

_PIECE_BYTES = 1 << 20
# Hints may be many: they are spread over the messages.
_HINTS_OF_MESSAGE = 1000
# Most losses that an error names.
_MOST_NAMED = 5

_FORMATS = EnumNames(es.InterchangeFormat, "INTERCHANGE_FORMAT_",
                     "a file format")


def format_value(name: Optional[str]) -> Any:
    """Number of a format's name as quantctl has it; 0 for None. Raises:
    ARGUMENT_INVALID."""
    if name is None:
        return 0
    key = str(name).lower().replace(".", "_").replace("-", "_")
    if key not in _FORMATS:
        raise errors.argument_invalid(
            f"expected one of {', '.join(map(_spelled, _FORMATS))}, got "
            f"{name!r}", "format")
    return _FORMATS.value(key)


def format_name(value: int) -> str:
    """Name of a format as quantctl has it: "aimet-1.0.0"."""
    return _spelled(_FORMATS.name(value))


def _spelled(key: str) -> str:
    """aimet_1_0_0 is aimet-1.0.0."""
    return re.sub(r"(?<=\d)_(?=\d)", ".", key).replace("_", "-")


@dataclasses.dataclass(frozen=True)
class InterchangeLoss(Tabular):
    """Loss of an export or an import: what it could not carry over.

    what: for people: which field, and what became of it; or why the encoding is
        left out.
    left_out: the tensor's encoding is not there at all.
    """

    tensor: str
    what: str
    left_out: bool

    @classmethod
    def from_proto(cls, message: es.InterchangeLoss) -> InterchangeLoss:
        """Makes the loss of a message, as the server has it."""
        return cls(message.tensor, message.what, message.left_out)


@dataclasses.dataclass(frozen=True)
class ExportedEncodings(Tabular):
    """A file of encodings.

    format: as it was asked for, e.g. "aimet-1.0.0".
    encoding_count: encodings in the file.
    size_bytes: of the file.
    losses: what the format could not hold, in order of tensor.
    data: the file; empty where it went to a path.
    """

    format: str
    encoding_count: int
    size_bytes: int
    losses: ResultList[InterchangeLoss]
    data: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def left_out(self) -> list[str]:
        """The tensors whose encodings are not in the file."""
        return [loss.tensor for loss in self.losses if loss.left_out]


@dataclasses.dataclass(frozen=True)
class ImportedEncodings(Tabular):
    """Result of importing a file of encodings.

    format: of the file, e.g. "aimet-1.0.0".
    encoding_count: encodings stored, or that would be.
    dry_run: nothing was stored.
    losses: what was not carried over, in the order of the file. The server
        sends at most 1 MiB of them; those of tensors that are left out go
        first.
    loss_count: of all losses.
    """

    format: str
    encoding_count: int
    dry_run: bool
    losses: ResultList[InterchangeLoss]
    loss_count: int

    @property
    def left_out(self) -> list[str]:
        """The tensors whose encodings are not stored; all of them unless
        `losses` are fewer than `loss_count` and all of tensors left out."""
        return [loss.tensor for loss in self.losses if loss.left_out]


@dataclasses.dataclass(frozen=True)
class TensorHint:
    """Facts about its tensors that a file does not tell; see the TensorHint of
    proto/.

    pattern: glob over names of tensors, with * and ?.
    shape: in elements. block_size: elements per scale in each dimension, 0 the
        whole one. Empty: not known.
    axis: dimension of the channels, negative from the end; None: the only one
        that fits.
    """

    pattern: str
    shape: Sequence[int] = ()
    block_size: Sequence[int] = ()
    axis: Optional[int] = None

    def to_proto(self) -> es.TensorHint:
        """Raises: ARGUMENT_INVALID."""
        try:
            return es.TensorHint(
                pattern=self.pattern,
                shape=[operator.index(size) for size in self.shape],
                block_size=[operator.index(size) for size in self.block_size],
                axis=self.axis)
        except (TypeError, ValueError) as error:
            raise errors.argument_invalid(f"not a hint: {error}",
                                          "hints") from error


def _shapes(tensors: Mapping[str, Any]) -> Iterator[TensorHint]:
    """The shape of each; a file is not read for that."""
    for name in tensors:
        shape = (tensors.info(name).shape if isinstance(tensors, TensorFile)
                 else getattr(tensors[name], "shape", None))
        if shape is None:
            raise errors.argument_invalid(
                f"expected a tensor with a shape as {name!r}, got "
                f"{type(tensors[name]).__name__}", "tensors")
        yield TensorHint(name, tuple(shape))


class ImportUpload:
    """The messages of one ImportEncodings; made anew for every attempt.

    error: what ended the last attempt here, if anything did.
    """

    def __init__(self, first: es.ImportEncodingsRequest, source: ImportSource,
                 hints: Iterable[TensorHint], tensors: Mapping[str, Any]
                 ) -> None:
        """Raises: ARGUMENT_INVALID, FILE_UNREADABLE, FILE_UNSUPPORTED."""
        self.error: Optional[errors.QuantdError] = None
        self._first = first
        self._hints = [hint.to_proto()
                       for hint in (*hints, *_shapes(tensors))]
        self._data: Optional[memoryview] = None
        self._path = ""
        if isinstance(source, (bytes, bytearray, memoryview)):
            self._data = memoryview(source).cast("B")
            self.size_bytes = self._data.nbytes
            return
        try:
            self._path = os.fspath(source)
            status = os.stat(self._path)
        except TypeError as error:
            raise errors.argument_invalid(
                f"expected a path or bytes, got {type(source).__name__}",
                "source") from error
        except OSError as error:
            raise _files.unreadable(str(source), error) from error
        # An attempt may be repeated, and so the reading.
        if not stat.S_ISREG(status.st_mode):
            raise _files.unsupported(self._path, "expected a regular file")
        self.size_bytes = status.st_size

    def __iter__(self) -> Iterator[es.ImportEncodingsRequest]:
        self.error = None
        message = es.ImportEncodingsRequest()
        message.CopyFrom(self._first)
        hints = (self._hints[first:first + _HINTS_OF_MESSAGE] for first in
                 range(0, len(self._hints), _HINTS_OF_MESSAGE))
        for some in hints:
            message.hints.extend(some)
            yield message
            message = es.ImportEncodingsRequest()
        for piece in self._pieces():
            message.data = piece
            yield message
            message = es.ImportEncodingsRequest()

    def _pieces(self) -> Iterator[bytes]:
        """Pieces of the file; one that is empty, of an empty file."""
        if self._data is not None:
            yield bytes(self._data[:_PIECE_BYTES])
            for first in range(_PIECE_BYTES, self._data.nbytes, _PIECE_BYTES):
                yield bytes(self._data[first:first + _PIECE_BYTES])
            return
        try:
            with open(self._path, "rb") as file:
                yield file.read(_PIECE_BYTES)
                while piece := file.read(_PIECE_BYTES):
                    yield piece
        except OSError as error:
            # gRPC tells nobody what ends its messages.
            self.error = _files.unreadable(self._path, error)
            raise

    def result(self, answer: es.ImportEncodingsResponse) -> ImportedEncodings:
        """Result of the server's answer."""
        return ImportedEncodings(
            format_name(answer.format), answer.encoding_count,
            self._first.dry_run,
            ResultList(map(InterchangeLoss.from_proto, answer.losses)),
            answer.loss_count)


class ExportDownload:
    """Takes the messages of one ExportEncodings. A context manager."""

    def __init__(self, request: es.ExportEncodingsRequest,
                 path: Optional[str], overwrite: bool) -> None:
        """Raises: FILE_EXISTS, FILE_UNWRITABLE."""
        self._format = format_name(request.format)
        self._file = (None if path is None else
                      _files.AtomicFile(path, overwrite))
        self._data = bytearray()
        self._size_bytes = 0
        self._encoding_count = 0
        self._losses: ResultList[InterchangeLoss] = ResultList()

    def __enter__(self) -> ExportDownload:
        if self._file is not None:
            self._file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._file is not None:
            self._file.__exit__(*exception)

    def add(self, answer: es.ExportEncodingsResponse) -> None:
        """The next message. Raises: FILE_UNWRITABLE."""
        if self._file is None:
            self._data += answer.data
        else:
            self._file.write(answer.data)
        self._size_bytes += len(answer.data)
        self._encoding_count = answer.encoding_count
        self._losses.extend(map(InterchangeLoss.from_proto, answer.losses))

    def result(self) -> ExportedEncodings:
        """After the last one; the file appears.

        Raises: EXPORT_EMPTY, FILE_UNWRITABLE, FILE_EXISTS.
        """
        if not self._encoding_count:
            raise _export_empty(self._losses)
        if self._file is not None:
            self._file.commit()
        return ExportedEncodings(
            self._format, self._encoding_count, self._size_bytes, self._losses,
            bytes(self._data))


def _export_empty(losses: Sequence[InterchangeLoss]) -> errors.QuantdError:
    """An export from which everything is left out."""
    named = "; ".join(f"{loss.tensor}: {loss.what}"
                      for loss in losses[:_MOST_NAMED])
    more = len(losses) - _MOST_NAMED
    return errors.QuantdError(
        grpc.StatusCode.FAILED_PRECONDITION, "EXPORT_EMPTY",
        "the format takes none of the encodings: " + named +
        (f"; and {more} more" if more > 0 else ""))
