"""Quantized tensors of compressed-tensors models, read; see
client/models/compressed_tensors.h for the layouts."""

from __future__ import annotations

import math
import re
from typing import Any, Iterator, Mapping, Optional

import numpy as np

from quantd import _files, _layout, errors
from quantd._files import FileTensor
from quantd._scales import table
from quantd.encoding import Encoding, scales_of
from quantd.results import QuantizedTensor
from quantd.tensor import ELEMENT_DTYPES, Array, format_info

METHOD = "compressed-tensors"
# Metadata of a file that quantctl wrote: the element type of each tensor.
ELEMENT_TYPE_PREFIX = "quantctl.element_type."
_CLASSES = ("Linear", "Conv2d", "Conv1d")
_SUFFIXES = (".weight", ".weight_packed", ".weight_scale",
             ".weight_zero_point", ".weight_shape", ".weight_global_scale",
             ".weight_g_idx",
             ".input_scale", ".input_zero_point", ".input_global_scale")
# The scale of a cache, beside X.k_proj and X.v_proj.
_CACHE_SCALES = {".k_proj": ".k_scale", ".v_proj": ".v_scale"}


_SECTIONS = ("quantization_config", "compression_config")
# Sizes of a block as text.
_BLOCK = re.compile("[0-9]{1,9}x[0-9]{1,9}")
# Keys under which a config.json may have that of a language model.
_MODELS = ("text_config", "llm_config", "language_config")


def quantization_in(document: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The section of a config.json that says how the model is quantized, and
    its name: of the document, or else of the language model in it. Empty where
    there is none."""
    for place in (document, *map(document.get, _MODELS)):
        for key in _SECTIONS:
            found = place.get(key) if isinstance(place, dict) else None
            if isinstance(found, dict):
                return key, found
    return "", {}


def method_of(folder: str) -> str:
    """Method that config.json names for how a model is quantized, empty if it
    names none.

    Raises: FILE_UNREADABLE, FILE_MALFORMED.
    """
    key, config = quantization_in(_files.read_config(folder, "config.json"))
    method = config.get("quant_method")
    if method is None and key == "compression_config":
        # Its own.
        return "compressed-tensors"
    return method if isinstance(method, str) else key


class Model:
    """The quantized tensors of one model."""

    def __init__(self, folder: str, tensors: Mapping[str, FileTensor],
                 metadata: Mapping[str, str]) -> None:
        """Raises: FILE_MALFORMED, FILE_UNSUPPORTED."""
        self._path = folder
        self._tensors = tensors
        self._metadata = metadata
        document = _files.read_config(folder, "config.json")
        self._element_type = next(
            (place[key] for place in (document, *map(document.get, _MODELS))
             if isinstance(place, dict) for key in ("dtype", "torch_dtype")
             if place.get(key) in ELEMENT_DTYPES), None)
        end = len(".weight_scale")
        modules = [name[:-end] for name in tensors
                   if name.endswith(".weight_scale")]
        _, config = quantization_in(document)
        self._check_config(config)
        self._has_cache = bool(config.get("kv_cache_scheme"))
        self._schemes = _match(config, modules, self._path)
        for module in modules:
            if module not in self._schemes:
                raise self._malformed(module,
                                      "no group of config.json targets it")

    def _check_config(self, config: Mapping[str, Any]) -> None:
        """Checks that the codes stand for the weights as they were: not for
        rotated ones, and not for those that are not zero alone. Both sections
        may be there all the same."""
        transforms = config.get("transform_config")
        if transforms.get("config_groups") if isinstance(
                transforms, dict) else transforms is not None:
            raise _files.unsupported(
                self._path, "transform_config: weights that were transformed "
                "are not read")
        sparsity = config.get("sparsity_config")
        if isinstance(sparsity, dict) and (
                sparsity.get("format", "dense") != "dense"):
            raise _files.unsupported(
                self._path, "sparsity_config: weights that are stored sparsely "
                "are not read")

    def names(self) -> dict[str, list[str]]:
        """Names of the quantized tensors, and of what each is made of."""
        return {module + ".weight": [
            part for part in self._parts(module) if part in self._tensors]
                for module in self._schemes}

    def _parts(self, module: str) -> Iterator[str]:
        """Names of all that may belong to it."""
        for suffix in _SUFFIXES:
            yield module + suffix
        for suffix, scale in _CACHE_SCALES.items():
            if self._has_cache and module.endswith(suffix):
                yield module[:-len(suffix)] + scale

    def format_of(self, name: str) -> str:
        """Format of a quantized tensor."""
        module = name[:-len(".weight")]
        scheme = self._schemes[module]
        if scheme.get("type") == "float":
            if module + ".weight" in self._tensors:
                scale = self._tensors[module + ".weight_scale"]
                return ("mxfp8_e4m3" if scale.dtype in _files.POWERS
                        else "float8_e4m3fn")
            return ("nvfp4" if module + ".weight_global_scale" in self._tensors
                    else "mxfp4_e2m1")
        bits = scheme.get("num_bits", 8)
        if not isinstance(bits, int) or not 2 <= bits <= 8:
            raise self._malformed(module,
                                  f"num_bits is {bits}, expected 2 to 8")
        return f"int{bits}"

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a quantized tensor. Raises: FILE_MALFORMED."""
        module = name[:-len(".weight")]
        if name in self._tensors:
            return self._tensors[name].shape
        if self.format_of(name).startswith("int"):
            return self._shape(module)
        packed = self._tensors.get(name + "_packed")
        if packed is None or packed.dtype != "U8" or len(packed.shape) != 2:
            raise self._malformed(
                module, "expected a weight_packed of U8, a matrix")
        return packed.shape[0], packed.shape[1] * 2

    def read(self, name: str) -> QuantizedTensor:
        """One of names(). Raises: FILE_MALFORMED, FILE_UNSUPPORTED."""
        module = name[:-len(".weight")]
        plain = self._tensors.get(name)
        packed = self._tensors.get(name + "_packed")
        scale = self._tensors[name + "_scale"]
        if (plain is None) == (packed is None):
            raise self._malformed(module, "expected weight or weight_packed")
        self._check_matrix(module, plain, packed, scale)
        format_name = self.format_of(name)
        fields: dict[str, Any] = {}
        shape = self.shape_of(name)
        if packed is None:
            assert plain is not None
            codes = self._plain(module, plain, format_name)
            if format_name == "mxfp8_e4m3":
                fields = {"scale_code": scale.bytes()}
        elif format_name.startswith("int"):
            codes = self._packed(module, packed, format_name, shape)
        else:
            codes = packed.bytes()
            fields = self._codes_of_scales(module, scale, format_name)
        block = self._block_size(module, shape)
        dims = _layout.scale_shape(shape, block)
        if math.prod(dims) != math.prod(scale.shape):
            raise self._malformed(
                module, f"weight_scale has {math.prod(scale.shape)} elements, "
                f"expected {math.prod(dims)} for {list(shape)}")
        groups = self._column_groups(module, shape, block, dims)
        if not fields:
            fields = self._scales(module, scale, dims, groups)
        zero_point = self._tensors.get(name + "_zero_point")
        is_integer = format_name.startswith("int")
        if zero_point is None and is_integer and (
                self._schemes[module].get("symmetric") is False):
            raise self._malformed(
                module, f"expected {module}.weight_zero_point, as its scheme is "
                "not symmetric, got none")
        if zero_point is not None and not is_integer and (
                zero_point.bytes().any()):
            raise _files.unsupported(
                self._path, f"module {module!r}: expected a weight_zero_point "
                "of zeros for floats")
        if zero_point is not None and is_integer:
            zero_points = self._zero_points(
                module, zero_point, format_info(format_name).bits, shape, dims)
            fields["zero_point"] = (zero_points if groups is None else
                                    zero_points[:, groups])
        if groups is not None:
            # No larger blocks have their columns side by side.
            block, dims = (1, 1), shape
        encoding = Encoding(format_name, block_size=block, scale_shape=dims,
                            **fields)
        return _layout.loaded(
            name, _layout.as_codes(codes, format_name, shape), encoding, shape,
            self._type_of(name, scale, format_name))

    def _check_matrix(self, module: str, plain: Optional[FileTensor],
                      packed: Optional[FileTensor], scale: FileTensor) -> None:
        """Experts in one tensor have a dimension more, and a scale for each of
        their rows."""
        if packed is not None:
            is_stack = len(packed.shape) == 3
        else:
            assert plain is not None
            is_stack = len(plain.shape) == len(scale.shape) == 3 and (
                scale.shape[1] > 1)
        if is_stack:
            raise _files.unsupported(
                self._path, f"module {module!r}: expected a matrix for each "
                "expert, got all experts in a tensor of three dimensions")

    def _malformed(self, module: str, what: str) -> errors.QuantdError:
        return _files.malformed(self._path, f"module {module!r}: {what}")

    def _type_of(self, name: str, scale: FileTensor, format_name: str) -> str:
        told = self._metadata.get(ELEMENT_TYPE_PREFIX + name)
        if told is not None:
            if told not in ELEMENT_DTYPES:
                raise _files.malformed(self._path,
                                       f"unknown element type {told!r}")
            return told
        # Scales are often wider than what they came from.
        found = "float32" if format_name in ("nvfp4", "mxfp4_e2m1") else (
            scale.element_type or "float32")
        return found if found != "float32" else (
            self._element_type or "float32")

    def _plain(self, module: str, plain: FileTensor, format_name: str) -> Array:
        info = format_info(format_name)
        expected = "I8" if info.is_integer else "F8_E4M3"
        if plain.dtype != expected:
            raise self._malformed(module, f"expected a weight of {expected}")
        if not info.is_integer or info.bits == 8:
            return plain.bytes()
        values = plain.array().reshape(-1)
        half = 1 << info.bits - 1
        if ((values < -half) | (values >= half)).any():
            raise self._malformed(
                module, f"a weight does not fit in {info.bits} bits")
        return _pack(values, format_name)

    def _shape(self, module: str) -> tuple[int, ...]:
        found = self._tensors.get(module + ".weight_shape")
        if found is None or found.shape != (2,) or (
                found.dtype not in ("I64", "I32")):
            raise self._malformed(
                module, "expected a weight_shape of two integers")
        return tuple(int(size) for size in found.array())

    def _packed(self, module: str, packed: FileTensor, format_name: str,
                shape: tuple[int, ...]) -> Array:
        bits = format_info(format_name).bits
        is_packed = min(shape) >= 0 and packed.dtype == "I32"
        has_all = packed.shape == (shape[0], -(-shape[1] * bits // 32))
        if is_packed and _is_padded(packed, shape, bits, has_all):
            raise _files.unsupported(
                self._path, f"module {module!r}: weight_packed has {32 // bits}"
                f" codes of {bits} bits in each word and padding, as old "
                "versions of compressed-tensors packed them; only codes "
                "without gaps are read")
        if not is_packed or not has_all:
            raise self._malformed(
                module, f"expected a weight_packed of I32 that holds {bits} "
                f"bits for each of {list(shape)}")
        row_bytes, rest = divmod(shape[1] * bits, 8)
        if format_info(format_name).storage_bits == bits and not rest:
            # The bytes are those of a QuantizedTensor but for the sign: taking
            # away 2^(bits - 1) turns the highest bit of each code the other way
            # round.
            rows = packed.bytes().reshape(shape[0], 4 * packed.shape[1])
            signs = sum(1 << bits * n - 1 for n in range(1, 8 // bits + 1))
            codes: Array = rows[:, :row_bytes] ^ np.uint8(signs)
            return codes.reshape(-1)
        values = unpack_rows(packed.array(), bits, shape[1])
        return _pack(values.reshape(-1), format_name)

    def _codes_of_scales(self, module: str, scale: FileTensor,
                         format_name: str) -> dict[str, Any]:
        if format_name == "mxfp4_e2m1":
            if scale.dtype not in _files.POWERS:
                raise self._malformed(module, "expected a weight_scale of U8")
            return {"scale_code": scale.bytes()}
        outer = self._tensors[module + ".weight_global_scale"]
        if scale.dtype != "F8_E4M3" or outer.dtype != "F32" or (
                outer.size_bytes != 4):
            raise self._malformed(
                module, "expected a weight_scale of F8_E4M3 under one "
                "weight_global_scale of F32")
        divisor = outer.array().reshape(-1)
        e4m3 = table("float8_e4m3fn", np.empty(0, np.float32))
        assert e4m3 is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            # Other readers divide; what multiplying with the inverse gives may
            # differ in the last bit.
            return {"scale_code": scale.bytes(),
                    "scale": np.take(e4m3, scale.bytes()) / divisor,
                    "outer_scale": np.float32(1) / divisor}

    def _scales(self, module: str, scale: FileTensor, dims: tuple[int, ...],
                groups: Optional[Array]) -> dict[str, Any]:
        if scale.dtype not in ("F32", "F16", "BF16"):
            raise self._malformed(
                module, "expected a weight_scale of F32, F16 or BF16")
        array = scale.array().reshape(dims)
        if groups is not None:
            array = np.ascontiguousarray(array[:, groups])
        return {**scales_of(array),
                "scale_type": _files.ELEMENT_TYPES[scale.dtype]}

    def _column_groups(self, module: str, shape: tuple[int, ...],
                       block: tuple[int, ...], dims: tuple[int, ...]
                       ) -> Optional[Array]:
        """The group of each column, where groups are not one after the
        other; -1 stands for those that are."""
        found = self._tensors.get(module + ".weight_g_idx")
        if found is None:
            return None
        if len(shape) != 2 or block[0] != 1 or not block[1] or (
                found.dtype != "I32" or found.shape != (shape[1],)):
            raise self._malformed(
                module, "expected a weight_g_idx of I32, the group of each "
                "column of a matrix in groups")
        groups = found.array()
        wrong = groups[(groups < 0) | (groups >= dims[1])]
        # Zeros beside several groups are what nobody set.
        if (groups == -1).any() or (dims[1] > 1 and not groups.any()) or (
                np.array_equal(groups, np.arange(shape[1]) // block[1])):
            return None
        if wrong.size:
            raise self._malformed(
                module, f"expected a weight_g_idx of groups from 0 to "
                f"{dims[1] - 1}, got {wrong[0]}")
        return groups

    def _block_size(self, module: str, shape: tuple[int, ...]
                    ) -> tuple[int, ...]:
        scheme = self._schemes[module]
        strategy = scheme.get("strategy") or "tensor"
        sizes: Any = (0,) * len(shape)
        if strategy == "channel" and shape:
            sizes = (1, *sizes[1:])
        elif strategy in ("group", "tensor_group") and len(shape) == 2:
            sizes = (1, scheme.get("group_size"))
        elif strategy == "block" and len(shape) == 2:
            sizes = scheme.get("block_structure")
            # As older versions wrote it.
            if isinstance(sizes, str) and _BLOCK.fullmatch(sizes):
                sizes = [int(size) for size in sizes.split("x")]
        elif strategy != "tensor":
            raise _files.unsupported(
                self._path, f"module {module!r}: strategy {strategy!r} of a "
                f"tensor of {len(shape)} dimensions")
        if not isinstance(sizes, (tuple, list)) or len(sizes) != len(shape) or (
                not all(type(size) is int and size >= 0 for size in sizes)):
            raise self._malformed(
                module, f"expected sizes of blocks of {len(shape)} dimensions, "
                f"got {sizes}")
        return tuple(sizes)

    def _zero_points(self, module: str, found: FileTensor, bits: int,
                     shape: tuple[int, ...], dims: tuple[int, ...]) -> Array:
        count = math.prod(dims)
        if found.dtype == "I8" and math.prod(found.shape) == count:
            return found.array().astype(np.int32).reshape(dims)
        rows = shape[0] if shape else 0
        groups = count // rows if rows else 0
        if found.dtype != "I32" or groups * rows != count or (
                found.shape != (-(-rows * bits // 32), groups)):
            raise self._malformed(
                module, "expected a weight_zero_point as many as scales, I8 or "
                "packed in I32")
        columns = unpack_rows(np.ascontiguousarray(found.array().T), bits,
                               rows)
        return columns.T.astype(np.int32).reshape(dims)


def _match(config: Mapping[str, Any], modules: list[str], path: str
           ) -> dict[str, Mapping[str, Any]]:
    """The "weights" of the group that targets each module: of the first with
    its name, else with a regular expression, else with its class."""
    targets: list[tuple[str, Mapping[str, Any]]] = []
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and isinstance(group.get("targets"), list):
            targets += [(target, weights) for target in group["targets"]
                        if isinstance(target, str)]
    targets.sort(key=lambda pair: 2 if pair[0] in _CLASSES else
                 pair[0].startswith("re:"))
    found: dict[str, Mapping[str, Any]] = {}
    for target, weights in targets:
        for module in modules:
            if module not in found and _targets(target, module, path):
                found[module] = weights
    return {module: found[module] for module in modules if module in found}


def _targets(target: str, module: str, path: str) -> bool:
    if target.startswith("re:"):
        try:
            return re.match(target[3:], module) is not None
        except re.error as error:
            raise _files.unsupported(
                path, f"the target {target!r}: {error}") from error
    # The file does not say what class a module is.
    return target == module or target in _CLASSES


def _is_padded(packed: FileTensor, shape: tuple[int, ...], bits: int,
               fits: bool) -> bool:
    """True if no code lies in two words. `fits` says whether the shape is that
    of codes without gaps too: then the bits that would be padding tell."""
    per_word = 32 // bits
    if packed.shape != (shape[0], -(-shape[1] // per_word)):
        return False
    if not fits:
        return True
    code_bits = per_word * bits
    return code_bits < 32 and shape[0] > 0 and shape[1] > per_word and not (
        packed.array().view(np.uint32) >> code_bits).any()


def unpack_rows(words: Array, bits: int, count: int) -> Array:
    """First `count` values of so many bits of each row of int32, lowest bits
    first, less 2^(bits - 1)."""
    rows = len(words)
    offset = 1 << bits - 1
    values = np.empty((rows, count), np.int8)
    # A few rows at a time: bits take eight times the memory.
    step = max(1, (1 << 20) // max(1, count))
    for begin in range(0, rows, step):
        part = np.ascontiguousarray(words[begin:begin + step])
        flat = np.unpackbits(part.view(np.uint8), axis=1, bitorder="little")
        flat = flat[:, :count * bits].reshape(len(part), count, bits)
        numbers = np.packbits(flat, axis=2, bitorder="little")[..., 0]
        values[begin:begin + step] = numbers.astype(np.int16) - offset
    return values


def _pack(values: Array, format_name: str) -> Array:
    """int8 as the client has codes of a format, as bytes."""
    info = format_info(format_name)
    if not info.is_packed:
        return values.view(np.uint8)
    per_byte = 8 // info.storage_bits
    padded = np.zeros(info.size_bytes(values.size) * per_byte, np.uint8)
    padded[:values.size] = values.view(np.uint8) & ((1 << info.bits) - 1)
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(info.storage_bits)
    packed: Array = np.bitwise_or.reduce(
        padded.reshape(-1, per_byte) << shifts, axis=1)
    return packed.astype(np.uint8)
