"""How a quantized tensor lies in a safetensors file; see "File layouts" in
proto/README.md."""

from __future__ import annotations

import json
import math
from typing import Any, Mapping, Optional, Sequence

from quantd import _files, _scale_stream, errors
from quantd._files import FileTensor, SafetensorsWriter
from quantd.encoding import OUTER_SCALE_TYPES, Encoding, scales_of
from quantd.results import QuantizedTensor, QuantizeSummary
from quantd.tensor import (ELEMENT_DTYPES, Array, TensorName, format_info,
                           format_options)
from quantd.v1 import encoding_pb2 as pb

KEY_PREFIX = "quantd."
SUFFIXES = (".scale", ".zero_point", ".outer_scale", ".codebook")
_SCALE_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16",
                 "e8m0": "U8", "integer": "U8", "e4m3": "F8_E4M3"}


def scale_shape(shape: Sequence[int], block_size: Sequence[int]
                ) -> tuple[int, ...]:
    """Scales along each dimension. Raises: ARGUMENT_INVALID."""
    if block_size and (len(block_size) != len(shape) or min(block_size) < 0):
        raise errors.argument_invalid(
            f"expected a block size of {len(shape)} entries of at least 0, got "
            f"{tuple(block_size)}")
    return tuple(_scale_stream.counts(shape, block_size))


def code_dtype(format_name: str) -> str:
    """Dtype of codes in a file."""
    info, layout = format_info(format_name), format_options(
        format_name).float_layout
    if info.bits == 8 and not info.is_integer:
        if layout.exponent_bits == 4 and (
                layout.specials == pb.FLOAT_SPECIALS_NAN):
            return "F8_E4M3"
        if layout.exponent_bits == 5 and (
                layout.specials == pb.FLOAT_SPECIALS_IEEE):
            return "F8_E5M2"
    return {"int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32"}.get(
        info.dtype.name, "U8")


def code_limits(format_name: str) -> tuple[int, int]:
    """The smallest and the largest code."""
    info, options = format_info(format_name), format_options(format_name)
    lowest = -(1 << info.bits - 1) if info.is_signed else 0
    qmin = options.qmin if options.HasField("qmin") else lowest
    return qmin, lowest + (1 << info.bits) - 1


def write(writer: SafetensorsWriter, key: Any, name: str,
          tensor: QuantizedTensor) -> None:
    """Adds a tensor and all that lies beside its codes.

    key: its place among others.

    Raises: ARGUMENT_INVALID for an encoding that is none of the shape; those of
        SafetensorsWriter.
    """
    encoding = tensor.encoding
    if encoding is None:
        raise errors.argument_invalid("the encoding was left out")
    info = format_info(encoding.format)
    scale_dims = scale_shape(tensor.shape, encoding.block_size)
    codes = tensor._numpy_codes()
    dtype = code_dtype(encoding.format)
    dims = (codes.nbytes,) if info.is_packed else tensor.shape
    if codes.nbytes != info.size_bytes(math.prod(tensor.shape)):
        raise errors.argument_invalid(
            f"expected {info.size_bytes(math.prod(tensor.shape))} bytes of "
            f"{encoding.format}, got {codes.nbytes}")
    scale_type = encoding.stored_scale_type
    writer.add((*key, 0), name, dtype, dims, codes)
    writer.add((*key, 1), name + ".scale", _SCALE_DTYPES[scale_type],
               scale_dims, encoding.stored_scale)
    if scale_type in OUTER_SCALE_TYPES:
        writer.add((*key, 2), name + ".outer_scale", "F32",
                   scale_shape(tensor.shape, encoding.outer_block_size),
                   encoding.outer_scale)
    if encoding.codebook.size:
        writer.add((*key, 3), name + ".codebook", "F32",
                   (encoding.codebook.size,), encoding.codebook)
    if encoding.zero_point.any():
        writer.add((*key, 4), name + ".zero_point",
                   "F32" if encoding.zero_points_are_real else "I32",
                   scale_dims, encoding.zero_point)
    writer.metadata[KEY_PREFIX + name] = _record_text(
        encoding, tensor.shape, tensor.element_type)


def _record_text(encoding: Encoding, shape: Sequence[int],
                 element_type: str) -> str:
    """The metadata of a quantized tensor."""
    qmin, qmax = code_limits(encoding.format)
    record: dict[str, Any] = {
        "version": 1, "format": encoding.format, "shape": shape,
        "block_size": encoding.block_size,
        "qmin": qmin if encoding.qmin is None else encoding.qmin,
        "qmax": qmax if encoding.qmax is None else encoding.qmax,
        "exclude_zero": encoding.exclude_zero, "element_type": element_type}
    if encoding.stored_scale_type != "float32":
        record["scale_type"] = encoding.stored_scale_type
    if encoding.outer_block_size:
        record["outer_block_size"] = encoding.outer_block_size
    if encoding.no_saturation:
        record["no_saturation"] = True
    return _files.to_json(record)


def loaded(name: str, codes: Array, encoding: Encoding, shape: Sequence[int],
           element_type: str) -> QuantizedTensor:
    """A tensor of a file, which does not say what was clipped."""
    return QuantizedTensor(
        TensorName(tensor=name), codes, encoding, tuple(shape), element_type,
        "", QuantizeSummary(math.prod(shape), 0, 0, 0, 0, 0))


def as_codes(data: Array, format_name: str, shape: Sequence[int]) -> Array:
    """Bytes of codes as the client has them."""
    info = format_info(format_name)
    return data if info.is_packed else data.view(info.dtype).reshape(shape)


class _Record:
    """The JSON of a tensor, of whoever wrote the file."""

    def __init__(self, path: str, name: str, text: str) -> None:
        self._path = path
        self._name = name
        try:
            self._fields = json.loads(text)
        except (ValueError, RecursionError):
            self._fields = None
        if not isinstance(self._fields, dict):
            raise self.malformed("the metadata are not an object")
        if self._fields.get("version") != 1:
            raise self.malformed("expected version 1")

    def malformed(self, what: str) -> errors.QuantdError:
        """An error of this tensor."""
        return _files.malformed(self._path,
                                f"quantized tensor {self._name!r}: {what}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Without a default the field is required."""
        value = self._fields.get(key, default)
        if type(value) is not kind:
            raise self.malformed(f"expected a JSON {kind.__name__} for {key!r}")
        return value

    def sizes(self, key: str, default: Any = None) -> tuple[int, ...]:
        """Numbers of at least 0."""
        values = self.get(key, list, default)
        if not all(type(size) is int and size >= 0 for size in values):
            raise self.malformed(f"expected sizes of at least 0 for {key!r}")
        return tuple(values)


def describe(path: str, name: str, text: str) -> tuple[tuple[int, ...], str]:
    """Shape and format of the tensor that `text` describes; see read().

    Raises: FILE_MALFORMED.
    """
    record = _Record(path, name, text)
    shape, format_name = record.sizes("shape"), record.get("format", str)
    try:
        format_info(format_name)
    except errors.QuantdError as error:
        raise record.malformed(error.message) from error
    return shape, format_name


def read(path: str, tensors: Mapping[str, FileTensor], name: str, text: str
         ) -> QuantizedTensor:
    """The tensor that `text`, the metadata of "quantd.NAME", describes.

    Raises: FILE_MALFORMED.
    """
    record = _Record(path, name, text)
    shape, block_size = record.sizes("shape"), record.sizes("block_size")
    outer_block_size = record.sizes("outer_block_size", [])
    format_name = record.get("format", str)
    element_type = record.get("element_type", str)
    scale_type = record.get("scale_type", str, "float32")
    try:
        info, dtype = format_info(format_name), code_dtype(format_name)
        scale_dims = scale_shape(shape, block_size)
        outer_dims = scale_shape(shape, outer_block_size)
        scale_dtype = _SCALE_DTYPES[scale_type]
        ELEMENT_DTYPES[element_type]  # pylint: disable=pointless-statement
    except errors.QuantdError as error:
        raise record.malformed(error.message) from error
    except KeyError as error:
        raise record.malformed(f"unknown type {error}") from error

    def take(suffix: str, dtype: str, dims: Optional[tuple[int, ...]],
             is_required: bool) -> Optional[FileTensor]:
        found = tensors.get(name + suffix)
        if found is None and not is_required:
            return None
        if found is None or found.dtype != dtype or (
                dims is not None and found.shape != dims):
            raise record.malformed(
                f"expected {name + suffix!r}, {dtype}" +
                (f" of {list(dims)}" if dims is not None else ""))
        return found

    codes = take("", dtype, None, True)
    assert codes is not None
    if codes.size_bytes != info.size_bytes(math.prod(shape)):
        raise record.malformed(
            f"expected {info.size_bytes(math.prod(shape))} bytes of codes, got "
            f"{codes.size_bytes}")
    scale = take(".scale", scale_dtype, scale_dims, True)
    assert scale is not None
    fields: dict[str, Any] = {}
    if scale_type in OUTER_SCALE_TYPES:
        outer = take(".outer_scale", "F32", outer_dims, True)
        assert outer is not None
        fields["outer_scale"] = outer.array().reshape(-1)
        fields["outer_block_size"] = outer_block_size
    beside = tensors.get(name + ".zero_point")
    zero_point = take(
        ".zero_point", "F32" if beside is not None and beside.dtype == "F32"
        else "I32", scale_dims, False)
    if zero_point is not None:
        fields["zero_point"] = zero_point.array()
        fields["real_zero_point"] = zero_point.dtype == "F32"
    if format_options(format_name).kind == pb.CODE_KIND_CODEBOOK:
        codebook = take(".codebook", "F32", None, False)
        if codebook is not None:
            fields["codebook"] = codebook.array().reshape(-1)
    fields.update(scales_of(scale.array()))
    encoding = Encoding(
        format_name, block_size=block_size, qmin=record.get("qmin", int),
        qmax=record.get("qmax", int),
        exclude_zero=record.get("exclude_zero", bool), scale_type=scale_type,
        no_saturation=record.get("no_saturation", bool, False),
        scale_shape=scale_dims, **fields)
    return loaded(name, as_codes(codes.bytes(), format_name, shape), encoding,
                  shape, element_type)
