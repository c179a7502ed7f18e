"""Arrays and tensors of others as bytes, without a copy where that is
possible."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Optional

import numpy as np

from quantd import errors
from quantd.tensor import ELEMENT_DTYPES, ELEMENT_TYPES, Array, format_info

# Metadata of dtypes.
_DTYPE = "quantd.dtype"
# Elements that numpy has as uint8, and torch from 2.1 or 2.7 on as they are.
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


@dataclasses.dataclass(frozen=True, eq=False)
class Reals:
    """A real-valued tensor. data: its elements as uint8 in one dimension,
    little-endian and row-major; the caller's memory unless that was laid out
    otherwise."""

    data: Array
    shape: tuple[int, ...]
    element_type: str


class FloatBits(np.ndarray[Any, Any]):
    """Bits of float8 or smaller floats, as uint8: what numpy makes of them is
    of this class too, even where it lost which floats they are; see named()."""

    # Before that of plain arrays.
    __array_priority__ = 1.


def as_bytes(array: Array) -> Array:
    """The memory of a contiguous array as uint8 in one dimension."""
    return array.reshape(-1).view(np.uint8)


def named(array: Array, dtype: str) -> Array:
    """Returns the same memory as bits of a type that numpy does not have, by
    the name of safetensors. Slices and copies keep it, others of numpy do
    not."""
    # Types of numpy leave out the metadata.
    dtype_of: Any = np.dtype
    bits: Array = array.view(dtype_of(array.dtype.str,
                                      metadata={_DTYPE: dtype}))
    return bits.view(FloatBits) if bits.dtype == np.uint8 else bits


def name_of(array: Array) -> Optional[str]:
    """The name that named() gave, if it did."""
    metadata: Any = array.dtype.metadata
    name: Optional[str] = metadata.get(_DTYPE) if metadata else None
    return name


def is_torch(array: Any) -> bool:
    """True for a tensor of torch, which nobody has who did not import that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def to_torch(array: Array, element_type: str = "") -> Any:
    """A tensor of torch, of the same memory; bits of bfloat16 and float8 become
    elements of it. Other uint16 are copied into int32, uint32 and uint64 into
    int64: torch does little with them, and before 2.3 has none.

    Raises: ARGUMENT_INVALID for float8 that this torch does not have.
    """
    torch = sys.modules["torch"]
    if element_type in _FLOAT8:
        if not hasattr(torch, element_type):
            raise errors.argument_invalid(
                f"torch {torch.__version__} has no {element_type}: load it "
                "without as_torch", "as_torch")
        return torch.from_numpy(array).view(getattr(torch, element_type))
    if element_type == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype == np.uint16:
        array = array.astype(np.int32)
    elif array.dtype in (np.uint32, np.uint64):
        array = array.astype(np.int64)
    return torch.from_numpy(array)


def to_numpy(array: Any) -> tuple[Array, Optional[str]]:
    """An array of what may be a tensor of torch, and the element type where
    numpy has none of its own. Shares memory on the CPU.

    Raises: ARGUMENT_INVALID.
    """
    torch = sys.modules.get("torch")
    try:
        if torch is not None and is_torch(array):
            tensor = array.detach().cpu()
            if tensor.dtype == torch.bfloat16:
                return tensor.view(torch.int16).numpy().view(np.uint16), (
                    "bfloat16")
            name = str(tensor.dtype).partition(".")[2]
            if name in _FLOAT8:
                return tensor.view(torch.uint8).numpy(), name
            return tensor.numpy(), None
        array = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise errors.argument_invalid(f"expected an array: {error}", "array"
                                      ) from error
    # The bfloat16 of ml_dtypes, which JAX uses.
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16), "bfloat16"
    return array, "bfloat16" if name_of(array) == "BF16" else None


def reals(array: Any, element_type: Optional[str] = None) -> Reals:
    """A tensor to send. `element_type` says what elements are, where their
    dtype does not: "bfloat16" for uint16.

    Raises: ARGUMENT_INVALID.
    """
    array, found = to_numpy(array)
    if found is None:
        found = element_type if element_type == "bfloat16" and (
            array.dtype == np.uint16) else array.dtype.name
    if found not in ELEMENT_DTYPES:
        raise errors.argument_invalid(
            f"expected elements of {', '.join(ELEMENT_DTYPES)}, got "
            f"{found} (bfloat16 is uint16 with element_type='bfloat16')",
            "array")
    if element_type not in (None, found):
        raise errors.argument_invalid(
            f"expected elements of {element_type}, got {found}", "array")
    shape = array.shape
    array = np.ascontiguousarray(array, ELEMENT_DTYPES[found])
    return Reals(as_bytes(array), shape, found)


def _fits_uint16(array: Array) -> bool:
    return bool(0 <= array.min(initial=0) and array.max(initial=0) <= 0xFFFF)


def narrowed(array: Array, format_name: str) -> Array:
    """Codes of torch in the type that the format has: int32 may stand for
    uint16, see to_torch."""
    if array.dtype != np.int32 or format_info(
            format_name).storage_bits == 32 or not _fits_uint16(array):
        return array
    return array.astype(np.uint16)


def codes(array: Any, format_name: Optional[str] = None) -> Array:
    """Codes to send, as uint8 in one dimension.

    format_name: of the codes. None: not known.

    Raises: ARGUMENT_INVALID, also for int32 of torch that may be uint16.
    """
    is_tensor = is_torch(array)
    array, _ = to_numpy(array)
    if is_tensor and format_name is not None:
        array = narrowed(array, format_name)
    elif is_tensor and array.size and array.dtype == np.int32 and (
            _fits_uint16(array)):
        raise errors.argument_invalid(
            "int32 of torch may be codes of uint16 or of int32, and a reference "
            "does not say which: give the encoding, or an array of numpy",
            "codes")
    if array.dtype.kind not in "iu" or (
            array.dtype.itemsize > 2 and array.dtype != np.int32):
        raise errors.argument_invalid(
            "expected codes of 8 or 16 bits, or int32, got "
            f"{array.dtype}", "codes")
    return as_bytes(np.ascontiguousarray(array,
                                         array.dtype.newbyteorder("<")))


def output(out: Any) -> Optional[Array]:
    """The memory of an array to write, as uint8 in one dimension.

    Raises: ARGUMENT_INVALID.
    """
    if out is None:
        return None
    array, _ = to_numpy(out)
    is_elsewhere = not isinstance(out, np.ndarray) and not (
        is_torch(out) and out.device.type == "cpu")
    if is_elsewhere or not array.flags.c_contiguous or (
            not array.flags.writeable):
        raise errors.argument_invalid(
            "expected an array that is contiguous and can be written", "out")
    return as_bytes(array)


def element_type_of(name: str) -> Any:
    """Number of an element type in proto/. Raises: ARGUMENT_INVALID."""
    return ELEMENT_TYPES.value(name)
