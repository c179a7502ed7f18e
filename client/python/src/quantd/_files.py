"""Files of tensors: read when a tensor is asked for, written so that they
appear complete or not at all."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import mmap
import os
import stat
import string
import struct
import tempfile
import tokenize
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

import grpc
import numpy as np

from quantd import _gguf, errors
from quantd.tensor import Array

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Extensions of files that are read.
_TENSOR_EXTENSIONS = (".safetensors", ".npy", ".gguf")
_OTHER_EXTENSIONS = (".npy", ".npz", ".gguf", ".onnx", ".pt", ".pth", ".bin",
                     ".h5", ".pkl", ".json", ".html", ".csv", ".zip")
_METADATA = "__metadata__"
_MOST_HEADER_BYTES = 100_000_000
_COPY_BYTES = 1 << 24
# Bytes of what comes before the data of GGUF that are read at a time.
_WINDOW_BYTES = 1 << 16
_MOST_NAMES = 100

# By safetensors' name. numpy has no bfloat16 and no float8: their bits.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8), "F8_E5M2": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(np.uint8), "F8_E8M0": np.dtype(np.uint8),
    "I16": np.dtype("<i2"), "U16": np.dtype("<u2"), "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"), "I32": np.dtype("<i4"), "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"), "C64": np.dtype("<c8"),
    # Elements below a byte, without gaps.
    "F4": np.dtype(np.uint8), "F6_E2M3": np.dtype(np.uint8),
    "F6_E3M2": np.dtype(np.uint8),
}
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
# Dtypes of .npy files.
_NUMPY_DTYPES = {dtype: name for name, dtype in DTYPES.items()
                 if name not in PACKED_BITS and
                 name[:2] not in ("F8", "BF", "C6")}
# Dtypes of scales that are powers of two, 2^(byte - 127).
POWERS = ("U8", "F8_E8M0")
# Element types of the dtypes that quantd quantizes.
ELEMENT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16",
                 "F64": "float64"}
DTYPE_OF_ELEMENTS = {name: dtype for dtype, name in ELEMENT_TYPES.items()}
# Alignment of the data of GGUF, where the metadata do not say another, and the
# alignments that there are: from the format's least to ggml's most.
GGUF_ALIGNMENT = 32
_GGUF_ALIGNMENTS = [1 << bits for bits in range(3, 21)]
_GGUF_VALUE_BYTES = {0: 1, 1: 1, 7: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 10: 8,
                     11: 8, 12: 8}


def unreadable(path: str, error: OSError) -> errors.QuantdError:
    """A file that the system does not give."""
    return _of_system("FILE_UNREADABLE", path, error)


def unwritable(path: str, error: OSError) -> errors.QuantdError:
    """A file that the system does not take."""
    return _of_system("FILE_UNWRITABLE", path, error)


def _of_system(reason: str, path: str, error: OSError) -> errors.QuantdError:
    code = {errno.ENOENT: grpc.StatusCode.NOT_FOUND,
            errno.EACCES: grpc.StatusCode.PERMISSION_DENIED,
            errno.EPERM: grpc.StatusCode.PERMISSION_DENIED,
            errno.ENOSPC: grpc.StatusCode.RESOURCE_EXHAUSTED}.get(
                error.errno or 0, grpc.StatusCode.FAILED_PRECONDITION)
    return errors.QuantdError(code, reason, f"{path}: {error.strerror}")


def malformed(path: str, what: str) -> errors.QuantdError:
    """A file that breaks its format."""
    return errors.QuantdError(grpc.StatusCode.INVALID_ARGUMENT,
                              "FILE_MALFORMED", f"{path}: {what}")


def unsupported(path: str, what: str) -> errors.QuantdError:
    """A file of a kind that is not read."""
    return errors.QuantdError(grpc.StatusCode.UNIMPLEMENTED,
                              "FILE_UNSUPPORTED", f"{path}: {what}")


def changed(path: str, tensor: str) -> errors.QuantdError:
    """A file that is not what it was; `tensor` may be empty."""
    of_tensor = f"tensor {tensor!r}: " if tensor else ""
    return errors.QuantdError(
        grpc.StatusCode.ABORTED, "FILE_CHANGED",
        f"{path}: {of_tensor}the file was changed while it was read")


def exists(path: str, more: str = "") -> errors.QuantdError:
    """A file that nobody asked to replace."""
    return errors.QuantdError(
        grpc.StatusCode.ALREADY_EXISTS, "FILE_EXISTS",
        f"{path} is there already{more}")


def size_of(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; -1 where its elements fill no whole bytes."""
    bits = PACKED_BITS.get(dtype, 8 * DTYPES[dtype].itemsize)
    size, rest = divmod(math.prod(shape) * bits, 8)
    return -1 if rest else size


def is_unicode(text: str) -> bool:
    """True if files can have the text: no half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_text(path: str) -> str:
    """Raises: FILE_UNREADABLE, FILE_MALFORMED for text that is not UTF-8."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise malformed(path, f"expected text in UTF-8: {error}") from error


def read_json(path: str) -> dict[str, Any]:
    """A JSON object. Raises: FILE_UNREADABLE, FILE_MALFORMED."""
    try:
        document = json.loads(read_text(path).removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise malformed(
            path, f"expected a JSON object in UTF-8: {error}") from error
    if not isinstance(document, dict):
        raise malformed(path, "expected a JSON object in UTF-8")
    return document


def read_config(folder: str, name: str) -> dict[str, Any]:
    """A JSON object beside tensors; an empty one where there is no such file.

    Raises: FILE_UNREADABLE, FILE_MALFORMED.
    """
    path = os.path.join(folder, name)
    return read_json(path) if os.path.exists(path) else {}


def to_json(document: Any, indent: Optional[int] = None) -> str:
    """Text as quantctl writes it."""
    return json.dumps(document, ensure_ascii=False, indent=indent,
                      separators=(",", ": " if indent else ":"))


# Reading.


class _Source:
    """A file that is open for reading. Thread-safe. What is read is a copy: to
    touch a mapping of a file that was cut short would end the process."""

    def __init__(self, path: str) -> None:
        """Raises: FILE_UNREADABLE, FILE_MALFORMED for an empty one."""
        self._fd = -1
        self._path = path
        self._mapped: Optional[Array] = None
        try:
            with open(path, "rb") as file:
                self._fd = os.dup(file.fileno())
            self._state = self._state_now()
        except OSError as error:
            raise unreadable(path, error) from error
        if not self.size_bytes:
            raise malformed(path, "the file is empty")

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._state[0]

    def _state_now(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns

    def check(self, tensor: str = "") -> None:
        """Raises: FILE_CHANGED. A file that another one took the place of has
        not changed."""
        if self._state_now() != self._state:
            raise changed(self._path, tensor)

    def read(self, begin: int, size: int, tensor: str = "") -> Array:
        """Raises: FILE_CHANGED, FILE_UNREADABLE."""
        data = np.empty(size, np.uint8)
        view = memoryview(data.data)
        try:
            while len(view):
                count = os.preadv(self._fd, [view[:_COPY_BYTES]],
                                  begin + size - len(view))
                if not count:
                    raise changed(self._path, tensor)
                view = view[count:]
        except OSError as error:
            raise unreadable(self._path, error) from error
        self.check(tensor)
        return data

    def map(self) -> Array:
        """The whole file in memory of a mapping, which lives as long as it
        does. Changing it does not change the file. Raises: FILE_UNREADABLE."""
        if self._mapped is None:
            try:
                self._mapped = np.frombuffer(mmap.mmap(
                    self._fd, 0, access=mmap.ACCESS_COPY), np.uint8)
            except OSError as error:
                raise unreadable(self._path, error) from error
        return self._mapped


@dataclasses.dataclass(frozen=True, eq=False)
class FileBytes:
    """Bytes of a file, from `begin` on; not read yet."""

    source: _Source
    begin: int
    nbytes: int

    def read(self, tensor: str = "") -> Array:
        """Raises: FILE_CHANGED, FILE_UNREADABLE."""
        return self.source.read(self.begin, self.nbytes, tensor)

    def map(self, tensor: str = "") -> Array:
        """In memory of the file. Raises: FILE_CHANGED, FILE_UNREADABLE."""
        self.source.check(tensor)
        return self.source.map()[self.begin:self.begin + self.nbytes]


@dataclasses.dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor of a file.

    dtype: safetensors' name, F32 for blocks of GGUF.
    data: its bytes; None where `decode` needs none.
    decode: makes the bytes of `dtype` of those; None: they are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Optional[FileBytes]
    decode: Optional[Callable[[Array], Array]] = None

    @property
    def size_bytes(self) -> int:
        """Size of its elements."""
        return size_of(self.dtype, self.shape)

    @property
    def element_type(self) -> Optional[str]:
        """Element type of reals; None for anything else."""
        return ELEMENT_TYPES.get(self.dtype)

    def bytes(self) -> Array:
        """Its elements as uint8. Raises: FILE_CHANGED, FILE_UNREADABLE."""
        data = (np.empty(0, np.uint8) if self.data is None else
                self.data.read(self.name))
        return data if self.decode is None else self.decode(data)

    def array(self) -> Array:
        """Its elements in its shape; those below a byte as bytes. Raises:
        FILE_CHANGED, FILE_UNREADABLE."""
        return self._shaped(self.bytes())

    def mapped(self) -> Array:
        """Elements as of array(), in memory of the file, unless they are
        decoded."""
        if self.data is None or self.decode is not None:
            return self.array()
        return self._shaped(self.data.map(self.name))

    def _shaped(self, data: Array) -> Array:
        if self.dtype in PACKED_BITS:
            return data
        return data.view(DTYPES[self.dtype]).reshape(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class InputFile:
    """Contents of a file.

    tensors: in the order of their data.
    unread: names of tensors of types that are not read.
    pairs, alignment: of GGUF, the metadata: keys, and pairs as they lie there.
    """

    path: str
    tensors: Mapping[str, FileTensor]
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unread: Sequence[str] = ()
    pairs: Sequence[tuple[bytes, bytes]] = ()
    alignment: int = GGUF_ALIGNMENT


def open_gguf(path: str) -> InputFile:
    """Raises: FILE_UNREADABLE, FILE_MALFORMED, FILE_UNSUPPORTED."""
    return _GgufParser(path).parse()


def _check_whole(file: InputFile) -> None:
    """Raises: FILE_UNSUPPORTED for a GGUF file that is one of several of a
    model."""
    numbers = {}
    for key, pair in file.pairs:
        # The key with its length, and the type.
        value = pair[8 + len(key) + 4:]
        if key in (b"split.count", b"split.no") and len(value) <= 8:
            numbers[key] = int.from_bytes(value, "little")
    count = numbers.get(b"split.count", 1)
    if count > 1:
        raise unsupported(
            file.path, f"expected a whole model, got file "
            f"{numbers.get(b'split.no', 0) + 1} of {count}; merge them first, "
            "as `llama-gguf-split --merge` does")


def _got_instead(source: _Source) -> str:
    """For a file that does not begin as its format demands: ", got " and what
    it is, where that can be told; otherwise empty."""
    begin = source.read(0, min(source.size_bytes, 40)).tobytes()
    if begin.startswith(b"version https://git-lfs"):
        return ", got a pointer of git-lfs; `git lfs pull` gets the file"
    return f", got text that begins with {begin.decode()!r}" if (
        begin.isascii() and set(begin.decode()) <= set(string.printable)
        ) else ""


def open_file(path: str) -> InputFile:
    """A safetensors file; .npy and .gguf are known by their names.

    Raises: FILE_UNREADABLE, FILE_MALFORMED, FILE_UNSUPPORTED.
    """
    if path.endswith(".npy"):
        return _open_npy(path)
    if path.endswith(".gguf"):
        file = open_gguf(path)
        _check_whole(file)
        return file
    return open_safetensors(path)


def _unique(path: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise malformed(path, "a name occurs twice in the header")
        return found
    return make


def open_safetensors(path: str) -> InputFile:
    """Raises: FILE_UNREADABLE, FILE_MALFORMED."""
    source = _Source(path)
    size = source.size_bytes
    length = int.from_bytes(source.read(0, min(size, 8)).tobytes(), "little")
    if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
        raise malformed(
            path, "expected a safetensors file; .npy and .gguf files are known "
            "by their names" + _got_instead(source))
    text = source.read(8, length).tobytes()
    if not text.startswith(b"{"):
        raise malformed(path, "expected a header that begins with {")
    try:
        header = json.loads(text.decode("utf-8"),
                            object_pairs_hook=_unique(path))
    except (ValueError, RecursionError) as error:
        raise malformed(path, f"expected a header of JSON: {error}") from error
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()):
        raise malformed(path, "expected metadata of strings")
    if not is_unicode("".join([*header, *metadata, *metadata.values()])):
        raise malformed(path, "expected names and metadata in Unicode")
    first = 8 + length
    tensors = sorted((_entry(path, name, entry)
                      for name, entry in header.items()),
                     key=lambda entry: entry[2:])
    found, end = {}, 0
    for name, (dtype, shape), begin, stop in tensors:
        if begin != end or stop - begin != size_of(dtype, shape) or (
                stop > size - first):
            raise malformed(
                path, f"tensor {name!r}: expected {size_of(dtype, shape)} bytes"
                f" from {end}, without hole or overlap, got [{begin}, {stop}) "
                f"of {size - first}")
        end = stop
        found[name] = FileTensor(name, dtype, shape, FileBytes(
            source, first + begin, stop - begin))
    if end != size - first:
        raise malformed(
            path, f"expected {end} bytes of data, got {size - first}")
    return InputFile(path, found, metadata)


def _entry(path: str, name: str, entry: Any
           ) -> tuple[str, tuple[str, tuple[int, ...]], int, int]:
    try:
        if entry.keys() - {"dtype", "shape", "data_offsets"}:
            raise KeyError
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if isinstance(dtype, str) and dtype not in DTYPES:
            raise unsupported(path, f"tensor {name!r}: unknown dtype {dtype!r}")
        if dtype in DTYPES and all(
                type(size) is int and size >= 0
                for size in (*shape, begin, end)):
            return name, (dtype, shape), begin, end
    except (AttributeError, TypeError, KeyError, ValueError):
        pass
    raise malformed(path, f"tensor {name!r}: expected dtype, shape and "
                    f"data_offsets, got {str(entry)[:200]}")


def _no_npy_type(path: str, got: str) -> errors.QuantdError:
    return unsupported(
        path, "expected little-endian booleans, integers or floats of 1 to 8 "
        f"bytes, got {got}")


def _open_npy(path: str) -> InputFile:
    source = _Source(path)
    begin = source.read(0, min(source.size_bytes, 6)).tobytes()
    if begin != b"\x93NUMPY":
        raise malformed(path, "expected a file that begins with \\x93NUMPY" +
                        _got_instead(source))
    try:
        mapped = np.load(path, mmap_mode="c", allow_pickle=False)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, SyntaxError, EOFError, TypeError, IndexError,
            RecursionError, MemoryError, tokenize.TokenError) as error:
        if "Python objects" in str(error):
            raise _no_npy_type(path, "type '|O'") from error
        # numpy reads the header as Python.
        raise malformed(path, str(error)) from error
    dtype = _NUMPY_DTYPES.get(mapped.dtype)
    if dtype is None:
        raise _no_npy_type(path, f"type {mapped.dtype.str!r}"
                           if mapped.dtype.names is None else
                           f'fields "{mapped.dtype.descr}"')
    if not mapped.flags.c_contiguous:
        raise unsupported(path, "expected C order, got fortran_order; save "
                          "numpy.ascontiguousarray(array)")
    name = os.path.basename(path)[:-len(".npy")]
    size = source.size_bytes - mapped.offset
    if size != mapped.nbytes:
        raise malformed(
            path, f"expected {mapped.nbytes} bytes of data, got {size}")
    data = FileBytes(source, mapped.offset, size)
    return InputFile(path, {name: FileTensor(name, dtype, mapped.shape, data)})


class _GgufParser:
    """Reads what comes before the data; see client/files/gguf.h."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._source = _Source(path)
        self._size = self._source.size_bytes
        # Bytes that were read last, and where in the file they begin.
        self._window = b""
        self._begin = 0
        self._at = 0
        self._pairs: list[tuple[bytes, bytes]] = []

    def parse(self) -> InputFile:
        """Raises: FILE_MALFORMED, FILE_UNSUPPORTED."""
        if self._take(4) != b"GGUF":
            raise self._malformed("expected a file that begins with GGUF" +
                                  _got_instead(self._source))
        version = self._number("<I")
        if version not in (2, 3):
            raise unsupported(
                self._path, "expected a little-endian file, got a big-endian "
                "one" if version and not version & 0xFFFF else
                f"expected version 2 or 3, got {version}")
        count, pairs = self._number("<Q"), self._number("<Q")
        found = [alignment for alignment in
                 (self._recorded_pair() for _ in range(pairs)) if alignment]
        keys = [key for key, _ in self._pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None) if (
            len(set(keys)) < len(keys)) else None
        if twice is not None:
            raise self._malformed(f"{twice.decode('utf-8', 'replace')!r} occurs "
                                  "twice in the metadata")
        alignment = found[0] if found else GGUF_ALIGNMENT
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._take(self._number("<Q")).decode("utf-8", "replace")
            rank = self._number("<I")
            if rank > 4 or name in entries:
                raise self._malformed(
                    f"tensor {name!r}: expected at most 4 dimensions and a name"
                    " of its own")
            shape = tuple(self._number("<Q") for _ in range(rank))[::-1]
            entries[name] = shape, self._number("<I"), self._number("<Q")
        first = min(-(-self._at // alignment) * alignment, self._size)
        rest = self._size - first
        tensors, unread, places = {}, [], []
        for name, (shape, number, offset) in entries.items():
            kind = _gguf.TYPES.get(number)
            if kind is None:
                unread.append(name)
                continue
            if kind.decode_blocks is not None and (
                    not shape or shape[-1] % kind.block_elements):
                raise self._malformed(
                    f"tensor {name!r}: expected an innermost dimension of "
                    f"blocks of {kind.block_elements}, as {kind.name} has")
            # The size of what it decodes to has to fit, too.
            if size_of(kind.dtype, [size or 1 for size in shape]) >> 63:
                raise self._malformed(
                    f"tensor {name!r}: its size does not fit in 63 bits")
            size = math.prod(shape) // kind.block_elements * kind.block_bytes
            if offset % alignment or offset + size > rest:
                raise self._malformed(
                    f"tensor {name!r}: expected {size} bytes of data at a "
                    f"multiple of {alignment}, got {offset} of {rest}")
            tensors[name] = FileTensor(
                name, kind.dtype, shape,
                FileBytes(self._source, first + offset, size),
                kind.decode if kind.decode_blocks is not None else None)
            if size:
                places.append((offset, size, name))
        self._check_apart(places)
        # Sorted as they lie in the file that `quantctl dequantize` makes of
        # them.
        ordered = sorted(tensors.items(),
                         key=lambda item: -DTYPES[item[1].dtype].itemsize)
        return InputFile(self._path, dict(ordered), {}, unread,
                         pairs=self._pairs, alignment=alignment)

    def _check_apart(self, places: list[tuple[int, int, str]]) -> None:
        """Else a small file could have many large tensors, all of the same
        bytes."""
        end, before = 0, ""
        for begin, size, name in sorted(places):
            if begin < end:
                raise self._malformed(f"tensor {name!r}: its data overlap those"
                                      f" of {before!r}")
            end, before = begin + size, name

    def _malformed(self, what: str) -> errors.QuantdError:
        return malformed(self._path, what)

    def _take(self, size: int) -> bytes:
        if size > self._size - self._at:
            raise self._malformed(
                f"the file of {self._size} bytes ends within what comes "
                "before the data")
        self._at += size
        return self._bytes(self._at - size, self._at)

    def _bytes(self, begin: int, end: int) -> bytes:
        window_end = self._begin + len(self._window)
        if not self._begin <= begin <= end <= window_end:
            self._begin = begin
            self._window = self._source.read(begin, min(
                max(end - begin, _WINDOW_BYTES), self._size - begin)).tobytes()
        return self._window[begin - self._begin:end - self._begin]

    def _number(self, kind: str) -> int:
        value: int = struct.unpack(kind, self._take(struct.calcsize(kind)))[0]
        return value

    def _recorded_pair(self) -> int:
        begin = self._at
        size = self._number("<Q")
        key = self._take(size)
        self._at = begin
        alignment = self._pair()
        self._pairs.append((key, self._bytes(begin, self._at)))
        return alignment

    def _pair(self) -> int:
        """The alignment, where the pair is that; otherwise 0."""
        key, kind = self._take(self._number("<Q")), self._number("<I")
        if key == b"general.alignment":
            alignment = self._number("<I") if kind == 4 else 0
            if alignment not in _GGUF_ALIGNMENTS:
                raise self._malformed(
                    "expected general.alignment to be a uint32 that is a power "
                    f"of two from {_GGUF_ALIGNMENTS[0]} to "
                    f"{_GGUF_ALIGNMENTS[-1]}")
            return alignment
        count = 1
        if kind == 9:
            kind, count = self._number("<I"), self._number("<Q")
        if kind == 8:
            for _ in range(count):
                self._take(self._number("<Q"))
        elif kind in _GGUF_VALUE_BYTES:
            self._take(count * _GGUF_VALUE_BYTES[kind])
        else:
            raise self._malformed("expected a type of metadata from 0 to 12 "
                                  f"and no array of arrays, got {kind}")
        return 0


def _tensor_files(folder: str) -> list[str]:
    """In a folder and in the folders in it, by their paths from there."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."] if (
            parent == folder) else []
        found += [os.path.relpath(os.path.join(parent, name), folder)
                  for name in names if name[0] != "." and
                  name.lower().endswith(_TENSOR_EXTENSIONS)]
    return sorted(found)


def _check_single(folder: str) -> None:
    """Checks a folder without an index, which one that is being written lacks,
    too."""
    if os.path.exists(os.path.join(folder, SINGLE_NAME)):
        return
    names = _tensor_files(folder)
    raise malformed(
        folder, f"expected {SINGLE_NAME}, or {INDEX_NAME}, which tells the "
        "files of a model, got " + (
            f"{len(names)} other files of tensors, such as {names[0]}; to take "
            "one, give the file itself" if names else
            f"no {', '.join(_TENSOR_EXTENSIONS)} file"))


def _read_weight_map(folder: str) -> dict[str, str]:
    """The shard of each tensor; empty for a folder without an index.

    Raises: FILE_UNREADABLE, FILE_MALFORMED.
    """
    path = os.path.join(folder, INDEX_NAME)
    if not os.path.exists(path):
        _check_single(folder)
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise malformed(path, "expected a weight_map of tensors")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or (
                "/" in name or "\0" in name or name.startswith(".")):
            raise malformed(path, f"weight_map[{tensor!r}]: expected the name "
                            "of a .safetensors file in the folder")
    return weight_map


def open_folder(folder: str) -> list[InputFile]:
    """The shards of a model.

    Raises: FILE_UNREADABLE, FILE_MALFORMED.
    """
    weight_map = _read_weight_map(folder)
    files = [open_safetensors(os.path.join(folder, name)) for name in
             sorted(set(weight_map.values())) or [SINGLE_NAME]]
    seen: set[str] = set()
    for file in files:
        for tensor in file.tensors:
            if tensor in seen:
                raise malformed(folder,
                                f"tensor {tensor!r} is in two of its files")
            seen.add(tensor)
    for tensor, name in weight_map.items():
        if tensor not in seen:
            raise malformed(folder, f"the index has tensor {tensor!r} in "
                            f"{name}, where it is not")
    return files


# Writing.


def _folder_of(path: str) -> str:
    return os.path.dirname(path) or "."


def stands_for_another_format(path: str) -> bool:
    """True if the name of a file says that it is not of safetensors."""
    return path.lower().endswith(_OTHER_EXTENSIONS)


def check_extension(path: str, field: str) -> None:
    """Checks the name of a safetensors file. Raises: ARGUMENT_INVALID."""
    if stands_for_another_format(path):
        raise errors.argument_invalid(
            "expected a name that ends with .safetensors, got " + repr(path),
            field)


def check_writable(path: str, overwrite: bool) -> None:
    """Raises: FILE_EXISTS, FILE_UNWRITABLE."""
    try:
        if not os.access(_folder_of(path), os.W_OK | os.X_OK):
            os.stat(_folder_of(path))
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not os.path.lexists(path):
            return
        if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
    except OSError as error:
        raise unwritable(path, error) from error
    if not overwrite:
        raise exists(path)


def _write_all(fd: int, data: Any) -> None:
    view = memoryview(data)
    # One without elements cannot be cast.
    view = view.cast("B") if view.nbytes else view[:0]
    while len(view):
        view = view[os.write(fd, view):]


class AtomicFile:
    """Has no name in its folder until commit(): a process that is killed leaves
    nothing behind. Where the file system has no such files it is
    PATH.tmp-PID-N meanwhile. A context manager; not thread-safe."""

    def __init__(self, path: str, overwrite: bool) -> None:
        """Raises: FILE_EXISTS, FILE_UNWRITABLE."""
        check_writable(path, overwrite)
        self._path = path
        self._overwrite = overwrite
        self._temporary: Optional[str] = None
        self._fd = -1
        try:
            self._open()
        except OSError as error:
            raise unwritable(path, error) from error

    def _open(self) -> None:
        try:
            self._fd = os.open(_folder_of(self._path),
                               os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
            if os.path.exists(self._descriptor()):
                return
            os.close(self._fd)
        except OSError:
            pass
        self._fd = -1
        self._temporary = self._first_free(lambda name: setattr(
            self, "_fd", os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR |
                                 os.O_CLOEXEC, 0o666)))

    def _descriptor(self) -> str:
        return f"/proc/self/fd/{self._fd}"

    def _first_free(self, make: Callable[[str], None]) -> str:
        for n in range(_MOST_NAMES):
            name = f"{self._path}.tmp-{os.getpid()}-{n}"
            try:
                make(name)
                return name
            except FileExistsError:
                continue
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def write(self, data: Any) -> None:
        """Raises: FILE_UNWRITABLE."""
        try:
            _write_all(self._fd, data)
        except OSError as error:
            raise unwritable(self._path, error) from error

    def write_from(self, fd: int, offset: int, size: int) -> None:
        """Bytes of another open file. Raises: FILE_UNWRITABLE."""
        try:
            while size > 0:
                try:
                    copied = os.copy_file_range(fd, self._fd, size, offset)
                except OSError as error:
                    if error.errno not in (errno.EXDEV, errno.EINVAL,
                                           errno.ENOSYS, errno.EOPNOTSUPP):
                        raise
                    part = os.pread(fd, min(size, _COPY_BYTES), offset)
                    _write_all(self._fd, part)
                    copied = len(part)
                if not copied:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                offset += copied
                size -= copied
        except OSError as error:
            raise unwritable(self._path, error) from error

    def _link(self, name: str) -> None:
        # With a descriptor of a folder Python takes the call that follows
        # links; the path is absolute.
        os.link(self._descriptor(), name, src_dir_fd=self._fd,
                follow_symlinks=True)

    def commit(self) -> None:
        """Makes the file durable and visible.

        Raises: FILE_EXISTS, where one came meanwhile; FILE_UNWRITABLE.
        """
        try:
            os.fsync(self._fd)
            if self._temporary is None:
                try:
                    return self._link(self._path)
                except FileExistsError:
                    if not self._overwrite:
                        raise
                # A link replaces nothing; a rename does.
                self._temporary = self._first_free(self._link)
            elif not self._overwrite and os.path.lexists(self._path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            os.rename(self._temporary, self._path)
            self._temporary = None
        except FileExistsError as error:
            raise exists(self._path) from error
        except OSError as error:
            raise unwritable(self._path, error) from error

    def close(self) -> None:
        """Without a commit nothing stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary is not None:
            try:
                os.unlink(self._temporary)
            except OSError:
                pass
            self._temporary = None

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def header_text(path: str,
                entries: Iterable[tuple[str, str, Sequence[int]]],
                metadata: Mapping[str, str]) -> bytes:
    """Text that a safetensors file begins with.

    entries: name, type and shape, in the order of their data.

    Raises: FILE_MALFORMED for a header over the limit.
    """
    header: dict[str, Any] = {}
    if metadata:
        header[_METADATA] = dict(sorted(metadata.items()))
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [begin, end]}
    text = to_json(header).encode("utf-8", "replace")
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER_BYTES:
        raise malformed(path, f"the header would take {len(text)} bytes, the "
                        f"format allows {_MOST_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    # Where the bytes are in the spool.
    offset: int


class SafetensorsWriter:
    """Writes what quantctl writes: tensors with wider elements first, among
    equals in the order of their keys. What is added goes to a file without a
    name, because the header, whose size is not known before the last tensor,
    comes first. A context manager; not thread-safe."""

    def __init__(self, path: str, overwrite: bool) -> None:
        """Raises: FILE_EXISTS, FILE_UNWRITABLE."""
        check_writable(path, overwrite)
        self._path = path
        self._overwrite = overwrite
        self._entries: dict[str, tuple[Any, _Entry]] = {}
        self._spool_bytes = 0
        self.metadata: dict[str, str] = {}
        try:
            # Not in the temporary folder, which may be too small for it.
            self._spool = tempfile.TemporaryFile(dir=_folder_of(path))
        except OSError as error:
            raise unwritable(path, error) from error

    def add(self, key: Any, name: str, dtype: str, shape: Sequence[int],
            data: Array) -> None:
        """Copies the bytes to disk.

        Raises: FILE_MALFORMED for a name that is taken, FILE_UNWRITABLE.
        """
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        offset = self._spool_bytes
        self._spool_bytes += len(view)
        self._put(key, _Entry(name, dtype, tuple(shape), len(view), offset))
        try:
            at = offset
            while len(view):
                written = os.pwrite(self._spool.fileno(), view, at)
                at += written
                view = view[written:]
        except OSError as error:
            raise unwritable(self._path, error) from error

    def _put(self, key: Any, entry: _Entry) -> None:
        if entry.size_bytes != size_of(entry.dtype, entry.shape):
            raise malformed(
                self._path, f"tensor {entry.name!r}: the data have "
                f"{entry.size_bytes} bytes, the shape "
                f"{size_of(entry.dtype, entry.shape)}")
        if entry.name == _METADATA or entry.name in self._entries:
            raise malformed(self._path, f"the name {entry.name!r} is taken")
        self._entries[entry.name] = key, entry

    def finish(self) -> int:
        """Writes the file; says how large it is.

        Raises: FILE_EXISTS, FILE_UNWRITABLE, FILE_MALFORMED for a header over
        the limit.
        """
        entries = [entry for _, entry in sorted(
            self._entries.values(),
            key=lambda item: (-DTYPES[item[1].dtype].itemsize, item[0]))]
        text = header_text(
            self._path, [(entry.name, entry.dtype, entry.shape)
                         for entry in entries], self.metadata)
        with AtomicFile(self._path, self._overwrite) as file:
            file.write(text)
            for entry in entries:
                if entry.size_bytes:
                    file.write_from(self._spool.fileno(), entry.offset,
                                    entry.size_bytes)
            file.commit()
        return len(text) + sum(entry.size_bytes for entry in entries)

    def close(self) -> None:
        """Without finish() nothing stays."""
        self._spool.close()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
