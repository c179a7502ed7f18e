"""Importance matrices of llama.cpp: for each weight the squares of the inputs of
its columns, summed. Reads and writes `imatrix.gguf` and the older `.dat`.

    from quantd import imatrix

    spec = quantd.EncodingSpec(
        "int4", quantd.group(32), method="mse",
        importance=imatrix.load("imatrix.gguf")["blk.0.ffn_up.weight"]
        .importance())
"""

from __future__ import annotations

import math
import os
import struct
from typing import Mapping, Sequence

import numpy as np

from quantd import _files, errors
from quantd._input_squares import InputSquares
from quantd.files import load as load_tensors
from quantd.tensor import Array

__all__ = ["InputSquares", "load", "save"]

_SUMS = ".in_sum2"
_COUNTS = ".counts"
_ALIGNMENT = 32
_UINT32, _STRING, _ARRAY = 4, 8, 9
_FLOAT32 = 0
# Far more than llama.cpp writes.
_MOST_NAME_BYTES = 4096


def load(path: str) -> dict[str, InputSquares]:
    """The weights' names and what the file has of them.

    Raises: FILE_UNREADABLE, FILE_MALFORMED, FILE_UNSUPPORTED.
    """
    path = os.fspath(path)
    if path.endswith(".gguf"):
        return _load_gguf(path)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise _files.unreadable(path, error) from error
    return _load_dat(path, data)


def _load_gguf(path: str) -> dict[str, InputSquares]:
    tensors = load_tensors(path)
    entries = {}
    for name in tensors:
        if not name.endswith(_SUMS):
            continue
        weight = name[:-len(_SUMS)]
        counts = (tensors[weight + _COUNTS] if weight + _COUNTS in tensors
                  else None)
        sums = np.asarray(tensors[name], np.float32)
        sums = sums.reshape(-1, sums.shape[-1] if sums.ndim else 1)
        if counts is None or np.size(counts) != len(sums):
            raise _files.unsupported(
                path, f"expected {len(sums)} counts of {weight!r}")
        entries[weight] = _checked(path, weight, sums,
                                   np.asarray(counts, np.float32).ravel())
    if not entries:
        raise _files.unsupported(
            path, f"expected tensors NAME{_SUMS} of an importance matrix")
    return entries


def _load_dat(path: str, data: bytes) -> dict[str, InputSquares]:
    at = 0

    def take(size: int, what: str) -> bytes:
        nonlocal at
        if size < 0 or size > len(data) - at:
            raise _files.malformed(
                path, f"expected an importance matrix, but {what} at byte {at} "
                "goes beyond the end")
        at += size
        return data[at - size:at]

    def number(what: str) -> int:
        value: int = struct.unpack("<i", take(4, what))[0]
        return value

    entries: dict[str, InputSquares] = {}
    for _ in range(number("the number of entries")):
        size = number("the size of a name")
        if size > _MOST_NAME_BYTES:
            raise _files.malformed(
                path, f"expected an importance matrix, got a name of {size} "
                "bytes")
        name = take(size, "a name").decode("utf-8", "replace")
        calls = number("a number of calls")
        count = number("a number of values")
        if count <= 0:
            raise _files.malformed(path, f"no values of {name!r}")
        # Means times calls.
        values = np.frombuffer(take(4 * count, "the values"), "<f4")
        entries[name] = _checked(path, name, values[None].astype(np.float32),
                                 np.array([calls], np.float32))
    if not entries:
        raise _files.malformed(path, "an importance matrix without entries")
    return entries


def _checked(path: str, name: str, sums: Array, counts: Array) -> InputSquares:
    if not (np.isfinite(sums).all() and (sums >= 0).all() and
            np.isfinite(counts).all() and (counts >= 0).all()):
        raise _files.malformed(
            path, f"{name!r} has a sum or count that is negative or not finite")
    return InputSquares(sums, counts)


def save(path: str, entries: Mapping[str, InputSquares], *,
         datasets: Sequence[str] = (), chunk_count: int = 0,
         chunk_size: int = 512, overwrite: bool = False) -> None:
    """Writes the older format if the name ends in ".dat", else GGUF.

    datasets, chunk_count, chunk_size: what llama.cpp is told of the data; it
        takes none of it into account when it quantizes.

    Raises: ARGUMENT_INVALID, FILE_EXISTS, FILE_UNWRITABLE.
    """
    path = os.fspath(path)
    _check(entries)
    content = (_dat(entries, datasets, chunk_count) if path.endswith(".dat")
               else _gguf(entries, datasets, chunk_count, chunk_size))
    try:
        with open(path, "wb" if overwrite else "xb") as file:
            file.write(content)
    except FileExistsError as error:
        raise _files.exists(path) from error
    except OSError as error:
        raise _files.unwritable(path, error) from error


def to_bytes(entries: Mapping[str, InputSquares]) -> bytes:
    """Content of the GGUF file that save() writes. Raises: ARGUMENT_INVALID."""
    _check(entries)
    return _gguf(entries, (), 0, 512)


def _check(entries: Mapping[str, InputSquares]) -> None:
    for name, entry in entries.items():
        if entry.sums.ndim != 2 or entry.counts.shape != entry.sums.shape[:1]:
            raise errors.argument_invalid(
                f"{name!r}: expected sums [matrices, columns] and as many "
                f"counts, got {entry.sums.shape} and {entry.counts.shape}",
                "entries")


def _dat(entries: Mapping[str, InputSquares], datasets: Sequence[str],
         chunk_count: int) -> bytes:
    parts = [struct.pack("<i", len(entries))]
    for name, entry in entries.items():
        text = name.encode()
        calls = max(1, round(float(entry.counts.max(initial=0))))
        # All matrices one after another, each as its mean times calls.
        values = np.concatenate([entry.mean(matrix) * calls
                                 for matrix in range(len(entry.sums))])
        parts += [struct.pack("<i", len(text)), text,
                  struct.pack("<ii", calls, values.size),
                  values.astype("<f4").tobytes()]
    dataset = (datasets[0] if datasets else "").encode()
    parts += [struct.pack("<ii", chunk_count, len(dataset)), dataset]
    return b"".join(parts)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _gguf(entries: Mapping[str, InputSquares], datasets: Sequence[str],
          chunk_count: int, chunk_size: int) -> bytes:
    tensors = []
    for name, entry in sorted(entries.items()):
        tensors += [(name + _SUMS, entry.sums),
                    (name + _COUNTS, entry.counts[:, None])]
    parts = [
        b"GGUF", struct.pack("<IQQ", 3, len(tensors), 4),
        _text("general.type"), struct.pack("<I", _STRING), _text("imatrix"),
        _text("imatrix.datasets"),
        struct.pack("<IIQ", _ARRAY, _STRING, len(datasets)),
        *map(_text, datasets),
        _text("imatrix.chunk_count"), struct.pack("<II", _UINT32, chunk_count),
        _text("imatrix.chunk_size"), struct.pack("<II", _UINT32, chunk_size)]
    offset = 0
    data = []
    for name, array in tensors:
        content = np.ascontiguousarray(array, "<f4").tobytes()
        parts += [_text(name), struct.pack("<I", array.ndim),
                  struct.pack(f"<{array.ndim}Q", *array.shape[::-1]),
                  struct.pack("<IQ", _FLOAT32, offset)]
        padded = math.ceil(len(content) / _ALIGNMENT) * _ALIGNMENT
        data.append(content.ljust(padded, b"\0"))
        offset += padded
    header = b"".join(parts)
    return b"".join([header, b"\0" * (-len(header) % _ALIGNMENT), *data])
