"""Encodings, and the specs that say how to compute them.

What the fields mean, and their limits, is in proto/quantd/v1/encoding.proto.
"""

from __future__ import annotations

import dataclasses
import re
from typing import (TYPE_CHECKING, Any, NoReturn, Optional, Sequence, Union)

import numpy as np

from quantd import _scales, errors
from quantd.tensor import (FORMATS, Array, EnumNames, TensorName, format_info,
                           format_options)
from quantd.v1 import encoding_pb2

_SYMMETRIES = EnumNames(encoding_pb2.Symmetry, "SYMMETRY_", "a symmetry",
                        symmetric="strict")
_METHODS = EnumNames(encoding_pb2.CalibrationMethod, "CALIBRATION_METHOD_",
                     "a method", minmax="min_max", fixed="fixed_range")
_TAILS = EnumNames(encoding_pb2.Tail, "TAIL_", "a tail")
_OBJECTIVES = EnumNames(encoding_pb2.Objective, "OBJECTIVE_", "an objective")
_SCALE_TYPES = EnumNames(encoding_pb2.ScaleType, "SCALE_TYPE_", "a scale type")
_MX_RULES = EnumNames(encoding_pb2.MxScaleRule, "MX_SCALE_RULE_", "a rule")


@dataclasses.dataclass(frozen=True)
class Granularity:
    """How a tensor is divided among scales; made by per_tensor, per_channel,
    group and blocks."""

    kind: str = "default"
    axis: int = 0
    group_size: int = 0
    block_size: tuple[int, ...] = ()


def per_tensor() -> Granularity:
    """One scale."""
    return Granularity("per_tensor")


def per_channel(axis: int = 0) -> Granularity:
    """A scale for each index of a dimension; -1 is the last. A tensor of fewer
    than two dimensions gets one scale."""
    return Granularity("per_channel", axis=axis)


def group(size: int, axis: int = -1) -> Granularity:
    """A scale for each `size` elements along a dimension, and for each index of
    the others. A tensor of fewer than two dimensions gets one scale."""
    if not isinstance(size, (int, np.integer)) or size < 1:
        raise errors.argument_invalid(
            f"expected groups of at least 1, got {size!r}", "size")
    return Granularity("group", axis=axis, group_size=int(size))


def blocks(*block_size: int) -> Granularity:
    """A scale for each block of so many elements in each dimension; 0 is the
    whole dimension."""
    return Granularity("blocks", block_size=tuple(block_size))


# A block size as a tuple is blocks(*it).
GranularityLike = Union[Granularity, Sequence[int], None]


def as_granularity(granularity: GranularityLike) -> Granularity:
    """Raises: ARGUMENT_INVALID."""
    if granularity is None:
        return Granularity()
    if isinstance(granularity, Granularity):
        return granularity
    try:
        return blocks(*(int(size) for size in granularity))
    except (TypeError, ValueError) as error:
        raise errors.argument_invalid(
            "expected a granularity such as per_channel() or a block size, got "
            f"{granularity!r}") from error


def block_size_of(granularity: Granularity, shape: Sequence[int]
                  ) -> tuple[int, ...]:
    """Block size of a tensor; empty for one scale, and for what the format has.
    Raises: ARGUMENT_INVALID."""
    rank = len(shape)
    if granularity.kind in ("per_channel", "group") and rank >= 2:
        axis = granularity.axis + (rank if granularity.axis < 0 else 0)
        if not 0 <= axis < rank:
            raise errors.argument_invalid(
                f"expected an axis below the rank {rank}, got "
                f"{granularity.axis}")
        is_group = granularity.kind == "group"
        sizes = [1 if is_group else 0] * rank
        sizes[axis] = granularity.group_size if is_group else 1
        return tuple(sizes)
    if granularity.kind == "blocks":
        if len(granularity.block_size) != rank:
            raise errors.argument_invalid(
                f"expected a tensor of rank {len(granularity.block_size)} for "
                f"the block size, got rank {rank}")
        return tuple(granularity.block_size)
    return ()


def set_granularity(granularity: Granularity, message: Any,
                    rank: Optional[int], has_blocks: bool = False) -> None:
    """Fills block_size or granularity of an EncodingSpec or a Contribution.
    `has_blocks`: nothing at all would stand for blocks.

    Raises: ARGUMENT_INVALID.
    """
    if granularity.kind == "blocks":
        message.block_size.extend(granularity.block_size)
    elif granularity.kind in ("per_channel", "group"):
        message.granularity.axis = granularity.axis
        message.granularity.group_size = granularity.group_size
    elif granularity.kind == "per_tensor" and has_blocks:
        if rank is None:
            raise errors.argument_invalid(
                "a format of blocks, per tensor, needs the tensor's rank: give "
                "blocks(0, ...)")
        message.block_size.extend([0] * rank)


@dataclasses.dataclass(frozen=True)
class Importance:
    """A weight for each index of one dimension of a tensor, such as the mean
    square of a layer's input for each column of its weight; see the Importance
    of proto/.

    inputs: the tensor whose stored statistics have the moments, or the Gram
        matrix, of features; a string is a tensor of the same model and
        revision. None: MODULE.input for a tensor MODULE.weight.
    weight: the weights themselves, in place of inputs.
    axis: the dimension; negative ones count from the end. Of the last one there
        may also be a weight for each element of a row: all dimensions but the
        first, as of a convolution whose inputs are unfolded.
    """

    inputs: Union[TensorName, str, None] = None
    weight: Optional[Sequence[float]] = None
    axis: int = -1

    def to_proto(self) -> encoding_pb2.Importance:
        """Raises: ARGUMENT_INVALID."""
        message = encoding_pb2.Importance()
        if self.axis != -1:
            message.axis = self.axis
        if self.weight is None:
            # Importance as quantctl writes it.
            message.inputs.SetInParent()
        if isinstance(self.inputs, TensorName):
            message.inputs.CopyFrom(self.inputs.to_proto())
        elif self.inputs is not None:
            message.inputs.tensor = self.inputs
        if self.weight is not None:
            message.weight.extend(
                np.asarray(self.weight, np.float64).ravel().tolist())
        return message


@dataclasses.dataclass(frozen=True)
class EncodingSpec:
    """How to compute an encoding from data.

    Words are those of proto/quantd/v1/encoding.proto in lower case, and those
    of quantctl: method "min_max" or "minmax", symmetry "strict", ... None is
    the default. `range` is (min, max) for the method "fixed", or
    two sequences with the ends for each scale in row-major order. `mantissa_bits`
    says how fine the histograms are that a range is searched on, 2 to 10.
    `real_zero_point` does not round zero points to a code, so that both ends of
    the range are met. `importance` says how much the squared error of each
    element counts, for "mse", "sqnr" and "best_of".
    """

    format: str
    granularity: GranularityLike = None
    symmetry: Optional[str] = None
    method: Optional[str] = None
    methods: Sequence[str] = ()
    objective: Optional[str] = None
    tail_fraction: Optional[float] = None
    tail: Optional[str] = None
    gamma: Optional[float] = None
    search_steps: int = 0
    entropy_bins: int = 0
    range: Optional[tuple[Union[float, Sequence[float]],
                          Union[float, Sequence[float]]]] = None
    exclude_zero: bool = False
    unsigned_if_non_negative: bool = False
    scale_type: Optional[str] = None
    mx_scale_rule: Optional[str] = None
    power_of_two_scale: bool = False
    outer_block_size: Sequence[int] = ()
    integer_scale_max: int = 0
    codebook: Sequence[float] = ()
    no_saturation: bool = False
    mantissa_bits: int = 0
    real_zero_point: bool = False
    importance: Optional[Importance] = None

    @classmethod
    def parse(cls, text: str) -> EncodingSpec:
        """From one word, FORMAT[:GRANULARITY][:SYMMETRY][:METHOD][:OPTION], as
        quantctl writes it: "int8:per-channel:mse", "int4:group:32:asymmetric",
        "uint8:percentile=0.999", "mxfp4_e2m1:rule=even".

        Raises: ARGUMENT_INVALID.
        """
        first, *parts = text.split(":")
        values: dict[str, object] = {
            "format": FORMATS.name(FORMATS.value(first))}

        def put(**items: object) -> None:
            for key, value in items.items():
                if key in values:
                    raise errors.argument_invalid(
                        f"expected one {key} in {text!r}, got two")
                values[key] = value

        axis: Optional[int] = None
        try:
            while parts:
                word, _, parameter = parts.pop(0).partition("=")
                if word == "importance-axis":
                    axis = int(parameter)
                    continue
                if word in ("group", "per-channel", "best-of", "fixed") and (
                        not parameter and parts and _is_parameter(word,
                                                                  parts[0])):
                    parameter = parts.pop(0)
                    if word == "group" and parts and (
                            _is_parameter("per-channel", parts[0])):
                        parameter += ":" + parts.pop(0)
                for key, value in _parse_part(word, parameter).items():
                    put(**{key: value})
        except (errors.QuantdError, ValueError, OSError) as error:
            raise errors.argument_invalid(
                f"expected a spec such as int8:per-channel:mse, got {text!r}: "
                f"{getattr(error, 'message', error)}") from error
        if axis is not None:
            values["importance"] = dataclasses.replace(
                values.get("importance", Importance()),
                axis=axis)
        return cls(**values)  # type: ignore[arg-type]

    def to_proto(self, rank: Optional[int] = None) -> encoding_pb2.EncodingSpec:
        """For tensors of `rank` dimensions, or of any.

        Raises: ARGUMENT_INVALID.
        """
        info = format_info(self.format)
        try:
            message = encoding_pb2.EncodingSpec(
                format=FORMATS.value(self.format),
                symmetry=_SYMMETRIES.value(self.symmetry),
                method=_METHODS.value(self.method),
                methods=[_METHODS.value(name) for name in self.methods],
                objective=_OBJECTIVES.value(self.objective),
                tail=_TAILS.value(self.tail),
                tail_fraction=self.tail_fraction, gamma=self.gamma,
                search_steps=self.search_steps,
                entropy_bins=self.entropy_bins,
                exclude_zero=self.exclude_zero,
                unsigned_if_non_negative=self.unsigned_if_non_negative,
                scale_type=_SCALE_TYPES.value(self.scale_type),
                mx_scale_rule=_MX_RULES.value(self.mx_scale_rule),
                power_of_two_scale=self.power_of_two_scale,
                outer_block_size=self.outer_block_size,
                integer_scale_max=self.integer_scale_max,
                codebook=self.codebook, no_saturation=self.no_saturation,
                mantissa_bits=self.mantissa_bits,
                real_zero_point=self.real_zero_point)
            if self.importance is not None:
                message.importance.CopyFrom(self.importance.to_proto())
            if self.range is not None:
                ends: tuple[Any, Any] = self.range
                low, high = ends
                if np.ndim(low) == 0:
                    message.range_min, message.range_max = low, high
                else:
                    message.scale_range_min.extend(np.ravel(low).tolist())
                    message.scale_range_max.extend(np.ravel(high).tolist())
            set_granularity(as_granularity(self.granularity), message, rank,
                            info.comes_in_blocks)
        except (TypeError, ValueError) as error:
            raise errors.argument_invalid(f"not a spec: {error}") from error
        return message


# Words as quantctl has them.
_SYMMETRY_WORDS = ("asymmetric", "strict", "full-range", "half-step", "aimet")
_METHOD_WORDS = ("minmax", "percentile", "mse", "sqnr", "entropy", "fixed",
                 "moving-average", "best-of")


def _is_parameter(word: str, text: str) -> bool:
    """True if the part after `word` belongs to it."""
    if word == "per-channel":
        return text.lstrip("-").isdigit()
    return word != "fixed" or "," in text


def _entries(text: str) -> tuple[float, ...]:
    """Entries of a codebook, or of a file that has them."""
    try:
        return tuple(float(entry) for entry in text.split(","))
    except ValueError:
        with open(text, encoding="utf-8") as file:
            return tuple(float(entry) for entry in
                         re.split(r"[], \t\r\n[]+", file.read()) if entry)


def _unescaped(name: str) -> str:
    """The name of a tensor in which %3A stands for a colon."""
    return re.sub("%(25|3[Aa])",
                  lambda found: "%" if found[1] == "25" else ":", name)


def _parse_part(word: str, parameter: str) -> dict[str, object]:
    """The fields of EncodingSpec that one part of a spec's word sets."""
    if word == "per-tensor":
        return {"granularity": per_tensor()}
    if word == "per-channel":
        return {"granularity": per_channel(int(parameter or 0))}
    if word == "group":
        return {"granularity": group(*map(int, parameter.split(":")))}
    if word in (*_SYMMETRY_WORDS, "symmetric"):
        return {"symmetry": word}
    if word == "power-of-two":
        return {"power_of_two_scale": True}
    if word == "no-saturation":
        return {"no_saturation": True}
    if word == "real-zero-point":
        return {"real_zero_point": True}
    if word == "mantissa-bits":
        return {"mantissa_bits": int(parameter)}
    if word == "scale":
        _SCALE_TYPES.value(parameter)
        return {"scale_type": parameter}
    if word == "rule":
        _MX_RULES.value(parameter)
        return {"mx_scale_rule": parameter}
    if word == "block":
        return {"granularity": blocks(*map(int, parameter.split(",")))}
    if word == "tail":
        _TAILS.value(parameter)
        return {"tail": parameter}
    if word == "steps":
        return {"search_steps": int(parameter)}
    if word == "bins":
        return {"entropy_bins": int(parameter)}
    if word == "entries":
        return {"codebook": _entries(parameter)}
    if word == "importance":
        return {"importance": Importance(_unescaped(parameter) or None)}
    try:
        _METHODS.value(word)
    except errors.QuantdError:
        raise ValueError(
            "expected a granularity (per-tensor, per-channel, per-channel:AXIS,"
            " group:N, group:N:AXIS), a symmetry "
            f"({', '.join(_SYMMETRY_WORDS)}), a method "
            f"({', '.join(_METHOD_WORDS)}) or an option (power-of-two, "
            "no-saturation, real-zero-point, scale=TYPE, rule=RULE, block=N,N, "
            "tail=SIDE, steps=N, bins=N, entries=N,N, mantissa-bits=N, "
            "importance=INPUTS, importance-axis=N), got "
            f"{word!r}") from None
    fields: dict[str, object] = {"method": word}
    if word == "best-of":
        fields["methods"] = tuple(parameter.split(","))
        for name in parameter.split(","):
            _METHODS.value(name)
    elif parameter and word == "percentile":
        # 1 - 0.999 is to be 0.001, as it was written.
        is_percent = parameter.endswith("%")
        kept = float(parameter[:-1]) / 100 if is_percent else float(parameter)
        if not 0 < kept <= 1:
            raise errors.argument_invalid(
                "expected the part that is kept, such as percentile=0.999 or "
                f"99.9%, got {parameter}")
        fields["tail_fraction"] = round(1 - kept, 12)
    elif parameter and word in ("mse", "entropy"):
        fields["search_steps"] = int(parameter)
    elif parameter and word == "sqnr":
        fields["gamma"] = float(parameter)
    elif parameter and word == "fixed":
        low, high = parameter.split(",")
        fields["range"] = (float(low), float(high))
    elif parameter:
        raise ValueError(f"{word} takes no parameter")
    return fields


def _brief(array: Array) -> str:
    if array.size > 8:
        return f"<{array.dtype} of {array.shape}>"
    return repr(array.tolist())


_STORED_SCALES: dict[str, Any] = {"float16": np.dtype("<f2"),
                                  "bfloat16": np.dtype("<u2")}


# Scales of these types are multiplied by outer ones.
OUTER_SCALE_TYPES = ("e4m3", "integer")
# An encoding with more scales goes up without them; see _scale_stream.
MOST_SCALES_IN_HEADER = 1 << 16


def scales_of(stored: Array) -> dict[str, Array]:
    """The field of an Encoding that such scales go to; the opposite of
    stored_scale."""
    if stored.dtype == np.uint8:
        return {"scale_code": stored}
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return {"scale": stored}


def scale_type_name(value: int) -> str:
    """Name of a ScaleType of proto/."""
    return _SCALE_TYPES.name(value)


def default_scale_type(format_name: str) -> str:
    """How a format stores its scales, "float32" where it does not say."""
    value = format_options(format_name).scale_type
    return _SCALE_TYPES.name(value) if value else "float32"


def _kind_of(zero_point: Any, is_real: Optional[bool]) -> Any:
    """float32 or int32. is_real: see Encoding.real_zero_point."""
    try:
        given = np.asarray(zero_point)
    except ValueError:
        return np.int32
    if is_real is None:
        is_real = given.dtype.kind == "f" and bool(
            np.any(given != np.rint(given)))
    return np.float32 if given.size and is_real else np.int32


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Encoding:
    """How codes stand for reals.

    scale: float32, in the shape of the scales where it is known, otherwise in
        one dimension and row-major order. Left empty for formats whose scales
        follow from scale_code and outer_scale: then it is computed when it is
        first asked for.
    zero_point: int32, as many as scales, or empty: all 0; float32 where they
        are real.
    scale_code: uint8; outer_scale, codebook: float32; empty where the format
        has none.
    block_size: elements per scale in each dimension, 0 the whole one; empty for
        one scale.
    real_zero_point: whether zero points are real, and may lie between codes.
        None: where at least one is no whole number.
    """

    format: str
    scale: Array = dataclasses.field(
        default_factory=lambda: np.empty(0, np.float32))
    zero_point: Array = dataclasses.field(
        default_factory=lambda: np.empty(0, np.int32))
    block_size: tuple[int, ...] = ()
    qmin: Optional[int] = None
    qmax: Optional[int] = None
    exclude_zero: bool = False
    scale_type: Optional[str] = None
    scale_code: Array = dataclasses.field(
        default_factory=lambda: np.empty(0, np.uint8))
    outer_scale: Array = dataclasses.field(
        default_factory=lambda: np.empty(0, np.float32))
    outer_block_size: tuple[int, ...] = ()
    codebook: Array = dataclasses.field(
        default_factory=lambda: np.empty(0, np.float32))
    no_saturation: bool = False
    scale_shape: tuple[int, ...] = ()
    degenerate_count: int = 0
    real_zero_point: Optional[bool] = None

    def __post_init__(self) -> None:
        for name, dtype in (("scale", np.float32),
                            ("zero_point", _kind_of(self.zero_point,
                                                    self.real_zero_point)),
                            ("scale_code", np.uint8),
                            ("outer_scale", np.float32),
                            ("codebook", np.float32)):
            given = getattr(self, name)
            # Arrays as from_proto() has them stay: there are five of them a
            # tensor.
            if type(given) is np.ndarray and given.ndim and (
                    given.dtype == dtype):
                continue
            try:
                given = np.asarray(given)
                is_float = np.dtype(dtype).kind == "f"
                kinds = "iuf" if is_float or name == "zero_point" else "iu"
                if given.size and given.dtype.kind not in kinds:
                    raise TypeError(f"got {given.dtype}")
                with np.errstate(invalid="ignore"):
                    array = np.atleast_1d(given.astype(dtype, copy=False))
                if not is_float and not np.array_equal(array.ravel(),
                                                       given.ravel()):
                    raise ValueError("got numbers beyond it")
            except (TypeError, ValueError) as error:
                raise errors.argument_invalid(
                    f"expected {np.dtype(dtype).name}: {error}", name
                ) from error
            object.__setattr__(self, name, array)
        if self.scale_code.size and not self.scale.size:
            object.__delattr__(self, "scale")

    if not TYPE_CHECKING:
        def __getattr__(self, name: str) -> Array:
            """The scales, where only what they follow from is given."""
            if name != "scale":
                raise AttributeError(name)
            scale = _scales.scales(self)
            object.__setattr__(self, "scale", scale)
            return scale

    @property
    def stored_scale(self) -> Array:
        """The scales in the type that they are stored in: float32, float16,
        the bits of bfloat16 as uint16, or uint8 as in scale_code."""
        if self.scale_code.size:
            return self.scale_code
        stored = _STORED_SCALES.get(self.scale_type or "")
        if stored == np.uint16:
            # Scales are values of the type: only zeros are cut.
            return (self.scale.view(np.uint32) >> 16).astype(np.uint16)
        return self.scale if stored is None else self.scale.astype(stored)

    @property
    def zero_points_are_real(self) -> bool:
        """True if the zero points are real, and may lie between codes."""
        return bool(self.zero_point.dtype.kind == "f")

    @property
    def has_zero_points(self) -> bool:
        """True if some zero points are not 0, or they are real."""
        return self.zero_points_are_real or bool(self.zero_point.any())

    @property
    def scale_count(self) -> int:
        """How many there are."""
        return self.scale_code.size or self.scale.size

    @property
    def stored_scale_type(self) -> str:
        """scale_type, or what the format has where that is not given."""
        return self.scale_type or default_scale_type(self.format)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Encoding):
            return NotImplemented
        # Bit by bit: a scale of NaN marks a block that is not finite.
        return bool(
            self._with_scales().SerializeToString(deterministic=True) ==
            other._with_scales().SerializeToString(deterministic=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Shows fields that are not as by default; of long arrays how long they
        are."""
        words = [repr(self.format)]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                if value.size:
                    words.append(f"{field.name}={_brief(value)}")
            elif value != field.default:
                words.append(f"{field.name}={value!r}")
        return f"Encoding({', '.join(words)})"

    def __array__(self, *unused: object, **unused_too: object) -> NoReturn:
        raise TypeError("an Encoding is no array: take its .scale or "
                        ".zero_point")

    def _with_scales(self) -> encoding_pb2.Encoding:
        return self._to_proto(self.scale)

    def _to_proto(self, scale: Array) -> encoding_pb2.Encoding:
        try:
            return encoding_pb2.Encoding(
                format=FORMATS.value(self.format), block_size=self.block_size,
                scale=scale.ravel().tolist(),
                zero_point=[] if self.zero_points_are_real else
                self.zero_point.ravel().tolist(),
                real_zero_point=self.zero_point.ravel().tolist()
                if self.zero_points_are_real else [],
                zero_points_are_real=self.zero_points_are_real,
                qmin=self.qmin, qmax=self.qmax, exclude_zero=self.exclude_zero,
                scale_type=_SCALE_TYPES.value(self.scale_type),
                scale_code=self.scale_code.tobytes(),
                outer_scale=self.outer_scale.ravel().tolist(),
                outer_block_size=self.outer_block_size,
                codebook=self.codebook.ravel().tolist(),
                no_saturation=self.no_saturation,
                scale_shape=self.scale_shape)
        except (TypeError, ValueError) as error:
            raise errors.argument_invalid(f"not an encoding: {error}"
                                          ) from error

    def to_proto(self) -> encoding_pb2.Encoding:
        """Raises: ARGUMENT_INVALID."""
        return self._to_proto(np.empty(0, np.float32) if self.scale_code.size
                              else self.scale)

    @property
    def goes_in_chunks(self) -> bool:
        """True if there are too many scales for a header."""
        return self.scale_count > MOST_SCALES_IN_HEADER

    def to_header_proto(self) -> encoding_pb2.Encoding:
        """For a header; without scales where they go up in chunks.

        Raises: ARGUMENT_INVALID.
        """
        if not self.goes_in_chunks:
            return self.to_proto()
        bare = self.with_scales(scale=np.empty(0, np.float32),
                                scale_code=np.empty(0, np.uint8),
                                outer_scale=np.empty(0, np.float32),
                                zero_point=np.empty(0, np.int32))
        message = bare.to_proto()
        message.scales_in_chunks = True
        message.chunks_have_zero_points = self.has_zero_points
        message.zero_points_are_real = self.zero_points_are_real
        return message

    def with_scales(self, **fields: Any) -> Encoding:
        """Returns the encoding with other scales: `scale`, or `scale_code`."""
        for name in ("scale", "scale_code"):
            if name not in fields:
                fields[name] = (
                    np.empty(0) if fields.keys() & {"scale", "scale_code"}
                    else self.__dict__.get(name, np.empty(0)))
                fields[name] = np.asarray(fields[name]).astype(
                    np.uint8 if name == "scale_code" else np.float32,
                    copy=False)
        return dataclasses.replace(self, **fields)

    @classmethod
    def from_proto(cls, message: encoding_pb2.Encoding) -> Encoding:
        """Makes the encoding of a message, as the server has it."""
        shape = tuple(message.scale_shape)

        def numbers(values: Any, dtype: Any, is_shaped: bool = True) -> Array:
            array = np.fromiter(values, dtype, len(values))
            # Otherwise what is said of the shape is not of these scales.
            fits = shape and np.prod(shape) == array.size
            return array.reshape(shape) if is_shaped and fits else array

        return cls(
            format=FORMATS.name(message.format),
            scale=numbers(message.scale, np.float32),
            zero_point=numbers(message.real_zero_point, np.float32)
            if message.real_zero_point else
            numbers(message.zero_point, np.int32),
            block_size=tuple(message.block_size),
            qmin=message.qmin if message.HasField("qmin") else None,
            qmax=message.qmax if message.HasField("qmax") else None,
            exclude_zero=message.exclude_zero,
            scale_type=_SCALE_TYPES.name(message.scale_type)
            if message.scale_type else None,
            scale_code=numbers(message.scale_code, np.uint8),
            outer_scale=numbers(message.outer_scale, np.float32, False),
            outer_block_size=tuple(message.outer_block_size),
            codebook=numbers(message.codebook, np.float32, False),
            no_saturation=message.no_saturation, scale_shape=shape,
            degenerate_count=message.degenerate_count,
            real_zero_point=message.zero_points_are_real or bool(
                message.real_zero_point) or None)


@dataclasses.dataclass(frozen=True)
class EncodingReference:
    """An encoding that the service has; by default that of the tensor itself.

    etag: if not empty, the encoding must have it.
    """

    name: Optional[TensorName] = None
    etag: str = ""

    def to_proto(self) -> encoding_pb2.EncodingReference:
        """Raises: ARGUMENT_INVALID."""
        return encoding_pb2.EncodingReference(
            name=self.name.to_proto() if self.name else None, etag=self.etag)


# Source of an encoding: the service, the caller, or the data. A string is a
# spec as EncodingSpec.parse takes it.
Source = Union[EncodingReference, Encoding, EncodingSpec, str]


def set_source(source: Source, message: Any, rank: int) -> None:
    """Fills the oneof encoding_source of a header or a candidate.

    Raises: ARGUMENT_INVALID.
    """
    if isinstance(source, str):
        source = EncodingSpec.parse(source)
    if isinstance(source, EncodingReference):
        message.reference.CopyFrom(source.to_proto())
    elif isinstance(source, Encoding):
        message.encoding.CopyFrom(source.to_header_proto())
    elif isinstance(source, EncodingSpec):
        message.spec.CopyFrom(source.to_proto(rank))
    else:
        raise errors.argument_invalid(
            "expected a spec, an Encoding or an EncodingReference, got "
            f"{type(source).__name__}", "source")
