"""Checks that an answer is one to what was asked."""

from __future__ import annotations

import math
from typing import Any, Optional, Sequence

from quantd import errors
from quantd._scale_stream import counts
from quantd.tensor import (ELEMENT_DTYPES, ELEMENT_TYPES, FORMATS, format_info)
from quantd.v1 import encoding_pb2

# From an integer format to the unsigned one of its width.
_TO_UNSIGNED = 20
_OUTER_SCALE_TYPES = (encoding_pb2.SCALE_TYPE_E4M3,
                      encoding_pb2.SCALE_TYPE_INTEGER)
_CODED_SCALE_TYPES = (encoding_pb2.SCALE_TYPE_E8M0, *_OUTER_SCALE_TYPES)
_CODEBOOKS = {encoding_pb2.NUMBER_FORMAT_CODEBOOK2: 4,
              encoding_pb2.NUMBER_FORMAT_CODEBOOK4: 16,
              encoding_pb2.NUMBER_FORMAT_CODEBOOK8: 256}


def _expect(what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise errors.response_malformed(
            f"expected {what} {expected}, got {got}")


def _name_text(name: Any) -> str:
    return repr((name.model, name.revision, name.tensor))


def check_name(expected: Any, got: Any) -> None:
    """Checks one of two TensorNames of proto/ against the other. Raises:
    RESPONSE_MALFORMED."""
    _expect("tensor", _name_text(expected), _name_text(got))


def _scale_count(shape: Sequence[int], block_size: Sequence[int]) -> int:
    if block_size and (len(block_size) != len(shape) or min(block_size) < 0):
        raise errors.response_malformed(
            f"expected a block size of {len(shape)} entries of at least 0, got "
            f"{list(block_size)}")
    return math.prod(counts(shape, block_size))


def check_encoding(source: Any, shape: Sequence[int], got: Any) -> None:
    """The encoding is of the format that was asked for, and has as many scales
    as the tensor has blocks. source: what has the oneof encoding_source, or a
    spec. Raises: RESPONSE_MALFORMED."""
    asked = _asked(source)
    if asked is not None and not (
            getattr(asked, "unsigned_if_non_negative", False) and
            asked.format + _TO_UNSIGNED == got.format):
        _expect("format", FORMATS.name(asked.format), FORMATS.name(got.format))
    if FORMATS.name(got.format) not in FORMATS:
        raise errors.response_malformed(
            f"expected a format that is known here, got {got.format}")
    _check_codebook(got)
    count = _scale_count(shape, got.block_size)
    if got.scales_in_chunks:
        if got.outer_block_size:
            _scale_count(shape, got.outer_block_size)
        return
    _expect("scales:", count, len(got.scale))
    if got.zero_point:
        _expect("zero points:", count, len(got.zero_point))
    if got.real_zero_point:
        _expect("zero points:", count, len(got.real_zero_point))
    # The server says what the default is.
    is_coded = got.scale_type in _CODED_SCALE_TYPES
    _expect("scale codes:", count if is_coded else 0, len(got.scale_code))
    outer_count = 0
    if got.scale_type in _OUTER_SCALE_TYPES:
        # A block of a whole dimension has one outer scale, whatever its size.
        outer_count = _scale_count(shape, got.block_size and [
            outer if block else 0
            for outer, block in zip(got.outer_block_size, got.block_size)])
    _expect("outer scales:", outer_count, len(got.outer_scale))


def _check_codebook(got: Any) -> None:
    most = _CODEBOOKS.get(got.format, 0)
    if not min(2, most) <= len(got.codebook) <= most:
        raise errors.response_malformed(
            f"expected a codebook of {min(2, most)} to {most} entries, got "
            f"{len(got.codebook)}")


def _asked(source: Any) -> Optional[Any]:
    """The encoding or the spec; None under a reference."""
    if "encoding_source" not in source.DESCRIPTOR.oneofs_by_name:
        return source
    which = source.WhichOneof("encoding_source")
    return None if which == "reference" else getattr(source, which)


def check_header(asked: Any, wants_encoding: bool, got: Any) -> None:
    """The header of an answer to Quantize or Dequantize has the tensor's name
    and shape, the size in bytes that these give, and a sound encoding.

    Raises: RESPONSE_MALFORMED.
    """
    tensor = asked.tensor
    shape = list(tensor.shape)
    check_name(tensor.name, got.name)
    _expect("shape", shape, list(got.shape))
    if wants_encoding and not got.HasField("encoding"):
        raise errors.response_malformed("expected an encoding, got none")
    if got.HasField("encoding"):
        if got.encoding.scales_in_chunks and not may_be_in_chunks(asked):
            raise errors.response_malformed("scales in chunks unasked")
        check_encoding(asked, shape, got.encoding)
    element_type = ELEMENT_TYPES.name(tensor.element_type)
    count = math.prod(shape)
    sizes = [count * ELEMENT_DTYPES[element_type].itemsize]
    if "element_type" in got.DESCRIPTOR.fields_by_name:
        _expect("element type", element_type,
                ELEMENT_TYPES.name(got.element_type))
    else:
        sizes = sorted(_codes_sizes(asked, got, count))
    if got.size_bytes not in sizes:
        raise errors.response_malformed(
            f"expected {' or '.join(map(str, sizes))} bytes, got "
            f"{got.size_bytes}")


def may_be_in_chunks(asked: Any) -> bool:
    """True if an answer to that header may leave out the scales."""
    return bool(getattr(asked, "scales_in_chunks", False)) or (
        asked.WhichOneof("encoding_source") == "encoding" and
        asked.encoding.scales_in_chunks)


def check_whole(got: Any) -> None:
    """The header is that of all bytes. Raises: RESPONSE_MALFORMED."""
    if got.HasField("range"):
        _expect("bytes", (0, got.size_bytes),
                (got.range.begin_bytes, got.range.end_bytes))


def _codes_sizes(asked: Any, got: Any, count: int) -> set[int]:
    """How large the codes may be."""
    used = got.encoding if got.HasField("encoding") else _asked(asked)
    names = (FORMATS.name(used.format),) if used is not None else (
        "int2", "int4", "int8", "int16", "int32")
    return {format_info(name).size_bytes(count) for name in names}


def check_calibrate(asked: Any, got: Any) -> None:
    """Raises: RESPONSE_MALFORMED."""
    check_name(asked.tensor.name, got.name)
    if asked.HasField("spec"):
        check_encoding(asked.spec, asked.tensor.shape,
                       got.stored_encoding.encoding)


def check_evaluate(asked: Any, got: Any) -> None:
    """The metrics are those of the candidates, in their order.

    Raises: RESPONSE_MALFORMED.
    """
    check_name(asked.tensor.name, got.name)
    _expect("candidates", [candidate.label for candidate in asked.candidates],
            [metrics.label for metrics in got.candidates])
    for candidate, metrics in zip(asked.candidates, got.candidates):
        if candidate.HasField("spec") and not asked.omit_encodings:
            check_encoding(candidate, asked.tensor.shape, metrics.encoding)
