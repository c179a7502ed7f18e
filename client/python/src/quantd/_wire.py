"""Messages of the tensor streams, written and read in place.

They are ordinary protobuf: {1: header, 2: offset, 3: data, 4: shared, 5: scales} up and
{1: header, 2: offset, 3: data, 4: summary, 5: error, 6: scales} down. By hand the payload
is copied once each way; protobuf's own classes would do so three times.
"""

from __future__ import annotations

from typing import Iterator, Optional, Union

Buffer = Union[bytes, memoryview]


class MalformedError(Exception):
    """Bytes that are not protobuf, or not of the types expected."""


def varint(value: int) -> bytes:
    """A number of at least 0 in base 128, lowest digits first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def request(header: Optional[bytes], offset: int, data: Buffer = b"",
            shared: bytes = b"", scales: bytes = b"") -> bytes:
    """A message up. `offset` and the size of `data` are in bytes."""
    parts = []
    if header is not None:
        parts += [b"\x0a", varint(len(header)), header]
    if offset:
        parts += [b"\x10", varint(offset)]
    if len(data):
        parts += [b"\x1a", varint(len(data)), data]
    if shared:
        parts += [b"\x22", varint(len(shared)), shared]
    if scales:
        parts += [b"\x2a", varint(len(scales)), scales]
    return b"".join(parts)


def _read_varint(buffer: Buffer, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(buffer) or shift > 63:
            raise MalformedError("a number does not end")
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def fields(message: Buffer, only: int = 0
           ) -> Iterator[tuple[int, Union[int, memoryview]]]:
    """(number, value) of each field, or of those of one number: an int for
    wire types of numbers, a view for those of bytes.

    Raises: MalformedError.
    """
    view = memoryview(message)
    at = 0
    while at < len(view):
        key, at = _read_varint(view, at)
        wire_type = key & 7
        value: Union[int, memoryview]
        if wire_type == 0:
            value, at = _read_varint(view, at)
        else:
            if wire_type == 2:
                size, at = _read_varint(view, at)
            elif wire_type in (1, 5):
                size = 8 if wire_type == 1 else 4
            else:
                raise MalformedError(f"wire type {wire_type}")
            if size > len(view) - at:
                raise MalformedError("a field does not end")
            value = view[at:at + size]
            if wire_type != 2:
                value = int.from_bytes(value, "little")
            at += size
        if only in (0, key >> 3):
            yield key >> 3, value


class Response:
    """A message down; its views are into the message."""

    __slots__ = ("header", "offset", "data", "summary", "error", "scales")

    def __init__(self, message: bytes) -> None:
        """Raises: MalformedError."""
        self.header: Optional[memoryview] = None
        self.offset = 0
        self.data: Buffer = b""
        self.summary: Optional[memoryview] = None
        self.error: Optional[memoryview] = None
        self.scales: Optional[memoryview] = None
        for number, value in fields(message):
            if isinstance(value, int):
                if number == 2:
                    self.offset = value
                elif number in (1, 3, 4, 5, 6):
                    raise MalformedError(f"field {number} is a number")
            elif number == 1:
                self.header = value
            elif number == 3:
                self.data = value
            elif number == 4:
                self.summary = value
            elif number == 5:
                self.error = value
            elif number == 6:
                self.scales = value
