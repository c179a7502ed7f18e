"""Names, number formats and element types, as proto/quantd/v1 has them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Iterator, Optional, Sequence, Union

import numpy as np
from numpy.typing import NDArray

from quantd import errors
from quantd.v1 import encoding_pb2, tensor_pb2


# Array of any elements.
Array = NDArray[Any]


class EnumNames:
    """The values of an enum of the protos by lower-case name: "mxfp4_e2m1" for
    NUMBER_FORMAT_MXFP4_E2M1. "-" may stand for "_"."""

    def __init__(self, enum: Any, prefix: str, what: str,
                 **aliases: str) -> None:
        self._what = what
        self._aliases = aliases
        self._values = {
            name[len(prefix):].lower(): number for name, number in enum.items()
            if not name.endswith("_UNSPECIFIED")}
        self._names = {number: name for name, number in self._values.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def value(self, name: Optional[str]) -> Any:
        """0, the default, for None. Raises: ARGUMENT_INVALID."""
        if name is None:
            return 0
        key = str(name).lower().replace("-", "_")
        key = self._aliases.get(key, key)
        if key not in self._values:
            raise errors.argument_invalid(
                f"expected {self._what} of {', '.join(self._values)}; got "
                f"{name!r}")
        return self._values[key]

    def name(self, value: int) -> str:
        """A number in words for what is not known here."""
        return self._names.get(value, f"{self._what} {value}")


FORMATS = EnumNames(encoding_pb2.NumberFormat, "NUMBER_FORMAT_", "a format")
ELEMENT_TYPES = EnumNames(tensor_pb2.ElementType, "ELEMENT_TYPE_",
                          "an element type")

# numpy has no bfloat16: their bits are kept as uint16.
ELEMENT_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"), "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"), "float64": np.dtype("<f8"),
}


@dataclasses.dataclass(frozen=True)
class FormatInfo:
    """Layout of the codes of a format.

    bits: of a code.
    storage_bits: that a code takes in memory; fewer than 8 are packed, lowest
        bits first.
    is_integer: codes are integers, and not of floats or codebooks.
    is_signed: codes are two's complement integers.
    comes_in_blocks: a spec that names no granularity has blocks along the last
        dimension, and not one scale.
    dtype: of an array of codes; uint8 where they are packed or no integers.
    """

    name: str
    bits: int
    storage_bits: int
    is_integer: bool
    is_signed: bool
    comes_in_blocks: bool
    dtype: np.dtype[Any]

    @property
    def is_packed(self) -> bool:
        """True if a byte holds several codes."""
        return self.storage_bits < 8

    def size_bytes(self, count: int) -> int:
        """Size of `count` codes; the last byte is padded with zeros."""
        if self.is_packed:
            return -(-count * self.storage_bits // 8)
        return count * self.dtype.itemsize


def format_options(name: str) -> encoding_pb2.NumberFormatInfo:
    """Options that the descriptor has of a format. Raises: ARGUMENT_INVALID."""
    value = encoding_pb2.NumberFormat.DESCRIPTOR.values_by_number[
        FORMATS.value(name)]
    options: encoding_pb2.NumberFormatInfo = value.GetOptions().Extensions[
        encoding_pb2.number_format]
    if options.kind == encoding_pb2.CODE_KIND_UNSPECIFIED:
        raise errors.argument_invalid("expected a format, got none")
    return options


@functools.lru_cache(maxsize=None)
def format_info(name: str) -> FormatInfo:
    """Raises: ARGUMENT_INVALID."""
    options = format_options(name)
    is_signed = options.is_signed
    if options.storage_bits < 8:
        dtype: np.dtype[Any] = np.dtype(np.uint8)
    elif options.storage_bits > 8:
        dtype = np.dtype(
            f"<{'i' if is_signed else 'u'}{options.storage_bits // 8}")
    else:
        dtype = np.dtype(np.int8 if is_signed else np.uint8)
    return FormatInfo(FORMATS.name(FORMATS.value(name)), options.bits,
                      options.storage_bits,
                      options.kind == encoding_pb2.CODE_KIND_INTEGER,
                      is_signed, options.default_group > 0, dtype)


def unpack(codes: Array, format_name: str, count: int) -> Array:
    """One code per entry: `count` codes of packed bytes, as int8 where they are
    signed integers, otherwise uint8. Codes that are not packed stay as they
    are, in one dimension."""
    info = format_info(format_name)
    if not info.is_packed:
        return codes.reshape(-1)[:count]
    flat = codes.reshape(-1).view(np.uint8)
    per_byte = 8 // info.storage_bits
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(info.storage_bits)
    mask = np.uint8((1 << info.bits) - 1)
    values = (flat[:, None] >> shifts & mask).reshape(-1)[:count]
    if not info.is_signed:
        return values
    sign = np.uint8(1 << info.bits - 1)
    return ((values ^ sign) - sign).view(np.int8)


@dataclasses.dataclass(frozen=True)
class TensorName:
    """One tensor of one revision of one model; see the TensorName of proto/.

    model and tensor are required wherever something is looked up or stored;
    the revision is "main" by default.
    """

    model: str = ""
    tensor: str = ""
    revision: str = ""

    def to_proto(self) -> tensor_pb2.TensorName:
        """Raises: ARGUMENT_INVALID for text that is not UTF-8."""
        try:
            return tensor_pb2.TensorName(model=self.model, tensor=self.tensor,
                                         revision=self.revision)
        except (TypeError, ValueError) as error:
            raise errors.argument_invalid(
                f"expected names of valid UTF-8: {error}") from error

    @classmethod
    def from_proto(cls, message: tensor_pb2.TensorName) -> TensorName:
        """Makes the name of a message, as the server has it."""
        return cls(message.model, message.tensor, message.revision)


@dataclasses.dataclass(frozen=True)
class Slice:
    """Place of an array in a tensor that several processes have parts of, as
    with tensor parallelism.

    global_shape: of the whole tensor.
    offset: of the array's first element, in each dimension.
    """

    global_shape: Sequence[int]
    offset: Sequence[int]


# A string is the name of a tensor without a model.
NameLike = Union[TensorName, str, None]


def as_name(name: NameLike) -> TensorName:
    """Raises: ARGUMENT_INVALID."""
    if isinstance(name, TensorName):
        return name
    if name is None or isinstance(name, str):
        return TensorName(tensor=name or "")
    raise errors.argument_invalid(
        f"expected a TensorName or a string, got {type(name).__name__}", "name")


@contextlib.contextmanager
def naming(name: NameLike) -> Iterator[None]:
    """Errors within are those of that tensor."""
    name = as_name(name)
    try:
        yield
    except errors.QuantdError as error:
        error.name = name
        raise
