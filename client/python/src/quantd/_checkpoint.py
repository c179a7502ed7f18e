"""Tensors that other programs quantized, as floats; see
client/models/quantized_checkpoint.h for the layouts."""

from __future__ import annotations

import bisect
import functools
import math
import os
import warnings
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

import numpy as np

from quantd import _compressed, _files, errors
from quantd._files import FileTensor
from quantd.tensor import Array

_E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], np.float32)
_PLACES = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
_FLOAT_SCALES = ("F32", "F16", "BF16")
_FLOATS = (*_FLOAT_SCALES, "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0")
_MX_GROUP = 32
_CONFIGS = ("quant_config.json", "quantize_config.json")
_CODES = ("I8", "U8", "I16", "I32")
_PACKINGS = ("auto_round", "auto_round:gptqmodel")
_NO_CONFIG_NOTE = (
    "no configuration was found beside the file: zero points are taken as of "
    "version 1 of GPTQ, which stores them less 1; those of gptq_v2 would be "
    "others")
# Names that only codes have, and what lies beside them.
_OF_CODES = (".qweight", ".qzeros", ".weight_packed", ".weight_scale_inv",
             ".weight_scale_2", ".weight_global_scale", ".weight.absmax",
             "_weight_scale_inv", "_weight_scale_2", "_proj_weight_scale",
             "._weight_qdata", "._weight_scale", "._weight_zero_point",
             ".W_q", ".comfy_quant", ".Qidxs", ".q_weight", ".trellis", ".suh",
             ".svh")


def _small_floats(exponent_bits: int, mantissa_bits: int) -> Array:
    bias = (1 << exponent_bits - 1) - 1
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, codes % (1 << mantissa_bits)
    fraction = mantissa + ((exponent > 0) << mantissa_bits)
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias - mantissa_bits)
    both: Array = np.concatenate([values, -values]).astype(np.float32)
    return both


def _tables() -> dict[str, Array]:
    e4m3, e5m2 = _small_floats(4, 3), _small_floats(5, 2)
    e4m3[[127, 255]] = np.nan
    e5m2[[124, 252]] = np.inf, -np.inf
    e5m2[[125, 126, 127, 253, 254, 255]] = np.nan
    return {"F8_E4M3": e4m3, "F8_E5M2": e5m2,
            "I8": np.arange(256).astype(np.uint8).view(np.int8).astype(
                np.float32),
            "E2M1": np.concatenate([_E2M1, -_E2M1])}


_TABLES = _tables()


def _reals(scale: FileTensor) -> Array:
    """The scales as float32."""
    array = scale.array()
    if scale.dtype == "BF16":
        wide: Array = array.astype(np.uint32) << 16
        return wide.view(np.float32)
    if scale.dtype in _files.POWERS:
        found = np.ldexp(np.float32(1), array.astype(np.int32) - 127)
        return np.where(array == 255, np.float32(np.nan), found)
    if scale.dtype == "F8_E4M3":
        return _TABLES["F8_E4M3"][array]
    return array.astype(np.float32)


class Part:
    """A tensor of floats, and the names of what it is made of, first its
    codes. note: for people, of what the file does not tell; mostly empty."""

    def __init__(self, name: str, shape: Sequence[int], parts: list[str],
                 decode: Callable[[], Array], dtype: str = "F32",
                 note: str = "") -> None:
        self.parts = parts
        self.note = note

        def make(_: Array) -> Array:
            return np.ascontiguousarray(decode()).reshape(-1).view(np.uint8)

        self.tensor = FileTensor(name, dtype, tuple(shape), None, make)


def read_each(path: str, tensors: Mapping[str, FileTensor]
              ) -> tuple[list[Part], dict[str, errors.QuantdError]]:
    """Reads like read(), and tells what is wrong of tensors that are not read,
    by name.

    Raises: FILE_MALFORMED for the configuration.
    """
    reader = _Reader(path, tensors)
    parts: list[Part] = []
    wrong: dict[str, errors.QuantdError] = {}
    names: set[str] = set()
    for tensor in tensors.values():
        try:
            part = reader.read_one(tensor, names)
        except errors.QuantdError as error:
            wrong[tensor.name] = error
            continue
        if part is not None:
            parts.append(part)
    known = {name for part in parts for name in part.parts}
    if known or reader.method:
        for name, tensor in tensors.items():
            if name not in known and _may_be_codes(tensor):
                wrong.setdefault(name, _files.unsupported(
                    path, f"tensor {name!r}, {_told(tensor)}, is quantized in "
                    "a way that is not read"))
    return parts, wrong


def warn_of_notes(path: str, parts: Sequence[Part], stacklevel: int) -> None:
    """Warns once of all tensors that have the same note."""
    names: dict[str, list[str]] = {}
    for part in parts:
        if part.note:
            names.setdefault(part.note, []).append(part.tensor.name)
    for note, found in names.items():
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warnings.warn(f"quantd: {path}: tensor {found[0]!r}{more}: {note}",
                      RuntimeWarning, stacklevel=stacklevel + 1)


def _config_of(path: str) -> dict[str, Any]:
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    config: dict[str, Any] = {}
    for name in _CONFIGS:
        config.update(_files.read_config(folder, name))
    config.update(_compressed.quantization_in(
        _files.read_config(folder, "config.json"))[1])
    if "quantization" in _files.read_config(folder, "hf_quant_config.json"):
        config.setdefault("quant_method", "modelopt")
    return config


def _may_be_codes(tensor: FileTensor) -> bool:
    """True if a tensor that nobody decoded has the type of codes, or the name
    of their scales."""
    if tensor.dtype in _CODES:
        # A bias of two dimensions is a mask.
        return len(tensor.shape) >= 2 and not tensor.name.endswith(".bias")
    return tensor.dtype in ("F8_E4M3", "F8_E5M2", "F8_E8M0") or (
        "weight_scale" in tensor.name)


def _is_of_scales(name: str) -> bool:
    """True if a name is one of scales, whoever wrote it. That of logits is a
    parameter."""
    return name != "logit_scale" and any(
        word in name.lower() for word in ("scal", "amax", "absmax", "quant"))


class _ScaleFinder:
    """Finds what beside a float of eight bits may be its scale under a name
    that is not known."""

    def __init__(self, tensors: Mapping[str, FileTensor]) -> None:
        self._tensors = tensors
        self._sorted = sorted(tensors)
        # By module.
        self._of_scales: dict[str, list[str]] = {}
        for name in tensors:
            module, dot, last = name.rpartition(".")
            if _is_of_scales(last):
                self._of_scales.setdefault(module + dot, []).append(name)

    def find(self, name: str) -> Optional[str]:
        """The name of the tensor that may be the scale of this one."""
        module, dot, last = name.rpartition(".")
        for found in self._of_scales.get(module + dot, ()):
            # A scale of norms is not the scale of their bias.
            if found != name and not last.endswith("bias"):
                return found
        # A weight has all of its module.
        is_weight = last == "weight"
        prefix = module + dot if is_weight else name
        for place in range(bisect.bisect_left(self._sorted, prefix),
                           len(self._sorted)):
            other = self._sorted[place]
            if not other.startswith(prefix):
                break
            rest = other[len(prefix):]
            if other != name and (is_weight or rest[:1] in (".", "_")) and (
                    self._may_be_scale(other, rest)):
                return other
        return None

    def _may_be_scale(self, name: str, rest: str) -> bool:
        """Other floats than those that modules without scales have."""
        last = rest.rpartition(".")[2]
        is_plain = last in ("weight", "running_mean", "running_var") or (
            last.endswith("bias"))
        return _is_of_scales(rest) or (
            not is_plain and self._tensors[name].dtype in _FLOATS)


def _told(tensor: Optional[FileTensor]) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "none"


class _Reader:
    """Reads the tensors of one input."""

    def __init__(self, path: str, tensors: Mapping[str, FileTensor]) -> None:
        self._path = path
        self._tensors = tensors
        config = _config_of(path)
        self.method = config.get("quant_method") or ""
        self._has_config = bool(config)
        self._bits = self._integer(config, "bits", "w_bit")
        self._group = self._integer(config, "group_size", "q_group_size")
        self._version = str(config.get("version") or "").lower()
        self._format = str(config.get("checkpoint_format") or "").lower()
        # Packing of AutoRound.
        self._packing = str(config.get("packing_format") or "").lower()
        # Exceptions of GPTQModel, by regular expressions, and of AutoRound, by
        # names: some modules have other bits and groups than these.
        self._is_mixed = any(isinstance(config.get(key), dict) and config[key]
                             for key in ("dynamic", "extra_config"))
        # AWQ without zero points.
        self._is_symmetric = config.get("zero_point") is False
        # If some floats have scales, one without them is not what it stands
        # for.
        self._has_scaled_floats = any(
            tensor.dtype in ("F8_E4M3", "F8_E5M2") and (
                name + "_scale" in tensors or name + "_scale_inv" in tensors)
            for name, tensor in tensors.items())
        block = config.get("weight_block_size")
        self._block = (block[0], block[1]) if isinstance(block, list) and (
            [type(size) for size in block] == [int, int]) else (128, 128)
        if min(self._block) <= 0:
            raise _files.malformed(
                path, "expected a weight_block_size of two positive numbers")

    @functools.cached_property
    def _scales_beside(self) -> _ScaleFinder:
        return _ScaleFinder(self._tensors)

    @staticmethod
    def _integer(config: Mapping[str, Any], *keys: str) -> int:
        return next((config[key] for key in keys
                     if type(config.get(key)) is int), 0)

    def read_one(self, tensor: FileTensor, names: set[str]
                 ) -> Optional[Part]:
        """Reads what the tensor is, if it has codes; `names` are those of the
        earlier ones."""
        part = self._read(tensor)
        if part is None:
            return None
        name = part.tensor.name
        for suffix in ("pre_quant_scale", "comfy_quant", "scale_weight",
                       "_extra_state"):
            other = name[:-len("weight")] + suffix
            if name.endswith(".weight") and other in self._tensors:
                raise self._unsupported(name, f"{other} is not read")
        if name in names or (name in self._tensors and name not in part.parts):
            raise self._malformed(name, "another tensor has this name")
        names.add(name)
        return part

    def _read(self, tensor: FileTensor) -> Optional[Part]:
        name = tensor.name
        if name.endswith(".qweight"):
            return self._integers(name[:-len(".qweight")], tensor)
        for suffix in ("_blocks", ".blocks"):
            if name.endswith(suffix) and tensor.dtype == "U8" and (
                    len(tensor.shape) >= 3 and tensor.shape[-1] == 16 and
                    self._has_block_scales(name[:-len("blocks")] + "scales")):
                return self._blocks(name[:-len(suffix)], suffix[0], tensor)
        if tensor.dtype in ("F8_E4M3", "F8_E5M2") or (
                tensor.dtype == "I8" and name + "_scale" in self._tensors):
            return self._bytes(tensor)
        if tensor.dtype == "U8" and name + "_scale" in self._tensors:
            return self._floats(tensor)
        return None

    def _has_block_scales(self, name: str) -> bool:
        """Images may be called blocks too, but have no scales."""
        scale = self._tensors.get(name)
        return bool(self.method) or (scale is not None and
                                     scale.dtype in _files.POWERS)

    def _malformed(self, name: str, what: str) -> errors.QuantdError:
        return _files.malformed(self._path,
                                f"quantized tensor {name!r}: {what}")

    def _unsupported(self, name: str, what: str) -> errors.QuantdError:
        return _files.unsupported(self._path,
                                  f"quantized tensor {name!r}: {what}")

    def _expected(self, name: str, what: str, got: Optional[FileTensor]
                  ) -> errors.QuantdError:
        return self._malformed(name, f"expected {what}, got {_told(got)}")

    def _scales(self, name: str, scale: FileTensor) -> Array:
        """Scales as float32. Raises: FILE_MALFORMED for one that is negative or
        not finite."""
        found = _reals(scale)
        wrong = np.flatnonzero(~((found >= 0) & np.isfinite(found)))
        if wrong.size:
            raise self._malformed(
                name, "expected finite scales of at least 0, got "
                f"{found.ravel()[wrong[0]]} for scale {wrong[0]} of "
                f"{scale.name}")
        return found

    def _parts(self, name: str, *tensors: Optional[FileTensor]) -> list[str]:
        """With what the module has for activations."""
        names = [tensor.name for tensor in tensors if tensor is not None]
        if name.endswith(".weight"):
            names += [found for found in (
                name[:-len("weight")] + suffix for suffix in
                ("input_scale", "input_scale_ub", "input_zero_point",
                 "input_global_scale"))
                if found in self._tensors]
        return names

    def _bytes(self, codes: FileTensor) -> Optional[Part]:
        """F8_E4M3, F8_E5M2 or I8, in the tensor's shape."""
        name, find = codes.name, self._tensors.get
        if name + "_scale_inv" in self._tensors and (
                name + "_scale" in self._tensors):
            raise self._unsupported(
                name, f"expected {name}_scale_inv or _scale, got both")
        scale = find(name + "_scale_inv") or find(name + "_scale")
        module = name.removesuffix(".weight_scale")
        if module != name and module + ".weight_packed" in self._tensors:
            raise self._unsupported(
                module + ".weight", "it is of compressed-tensors, whose "
                "config.json is missing")
        if scale is None:
            if not self.method and self._has_scaled_floats:
                # It is not what it stands for.
                return None
            if not self.method:
                beside = self._scales_beside.find(name)
                if beside is not None:
                    raise self._unsupported(
                        name, f"expected {name}_scale_inv or _scale, or "
                        f"numbers without a scale; {beside} may be one and is "
                        "not read")
                # The codes are the numbers themselves.
                return Part(name, codes.shape, self._parts(name, codes),
                            lambda: _TABLES[codes.dtype][codes.bytes()])
            if not name.endswith(".weight"):
                return None
            raise self._malformed(
                name, f"expected {name}_scale_inv or _scale, got none")
        expand = self._expansion(codes, scale)
        zero_point = find(name + "_zero_point")
        zeros = zero_point if codes.dtype == "I8" else None
        if zero_point is not None and zeros is None and (
                zero_point.bytes().any()):
            raise self._unsupported(
                name, f"expected {zero_point.name} of zeros for FP8")
        if zeros is not None and (zeros.dtype != "I8" or math.prod(
                zeros.shape) != math.prod(scale.shape)):
            raise self._expected(
                name, f"{zeros.name} of I8, as many as scales", zeros)

        def decode() -> Array:
            values = _TABLES[codes.dtype][codes.bytes()].reshape(codes.shape)
            if zeros is not None:
                values = values - expand(zeros.array().astype(np.float32))
            assert scale is not None
            reals: Array = values * expand(self._scales(name, scale))
            return reals

        return Part(name, codes.shape, self._parts(
            name, codes, scale, zero_point), decode)

    def _expansion(self, codes: FileTensor, scale: FileTensor
                   ) -> Callable[[Array], Array]:
        """From the scales to one for each element, or what broadcasts so."""
        shape, found = codes.shape, scale.shape
        rows = shape[-2] if len(shape) > 1 else 1
        columns = shape[-1] if shape else 1
        matrices = math.prod(shape[:-2])
        is_mx, count = scale.dtype == "U8", math.prod(found)
        is_power = scale.dtype in _files.POWERS
        wrong = self._expected(
            codes.name, f"{scale.name} with a scale for the tensor, for each "
            f"row or each block of {self._block[0]} x {self._block[1]}", scale)
        if not is_power and scale.dtype not in _FLOAT_SCALES:
            raise wrong
        if not math.prod(shape):
            return lambda array: np.zeros(shape, np.float32)
        if count == 1 and not is_mx:
            return lambda array: array.reshape(())
        if len(shape) > 3 and not is_power and count == shape[0] and (
                found[0] == count):
            # A convolution: its first dimension is that of its outputs.
            return lambda array: array.reshape(
                count, *(1 for _ in shape[1:]))
        if not count or count % matrices:
            raise wrong
        of_rows, of_columns = count // matrices, 1
        if len(found) == len(shape) and len(found) > 1:
            of_rows, of_columns = found[-2:]
            if found[:-2] != shape[:-2]:
                raise wrong
        elif len(found) not in (1, len(shape) - 1):
            raise wrong
        block = (1, columns)
        is_grouped = (of_rows, of_columns) == (rows, -(-columns // _MX_GROUP))
        # Bytes are always of groups.
        if is_mx or (is_power and is_grouped):
            block = (1, _MX_GROUP)
            if not is_grouped:
                raise wrong
        elif (of_rows, of_columns) == (1, 1):
            block = (rows, columns)
        elif (of_rows, of_columns) == (rows, 1):
            pass
        elif (of_rows, of_columns) == (-(-rows // self._block[0]),
                                       -(-columns // self._block[1])):
            block = (min(self._block[0], rows), min(self._block[1], columns))
        elif of_rows == rows and columns % of_columns == 0:
            block = (1, columns // of_columns)
        elif (len(shape) > 2 or rows != columns) and (
                of_rows, of_columns) == (1, columns):
            # As broadcast, such as of experts that lie [inputs, outputs]. Of a
            # square matrix others have written the scales of rows so.
            block = (rows, 1)
        else:
            raise wrong

        def expand(array: Array) -> Array:
            array = array.reshape(matrices, of_rows, of_columns)
            array = array.repeat(block[0], 1)[:, :rows]
            return array.repeat(block[1], 2)[..., :columns].reshape(shape)

        return expand

    def _floats(self, codes: FileTensor) -> Optional[Part]:
        """NVFP4 under a scale of the tensor, or MXFP4."""
        name = codes.name
        scale = self._tensors[name + "_scale"]
        outer = self._tensors.get(name + "_scale_2")
        if scale.dtype not in ("F8_E4M3", *_files.POWERS):
            return None
        if len(codes.shape) < 2:
            raise self._malformed(name, "expected a matrix of U8")
        group = 16 if scale.dtype == "F8_E4M3" else _MX_GROUP
        shape = (*codes.shape[:-1], codes.shape[-1] * 2)
        expected = (*shape[:-1], -(-shape[-1] // group))
        if scale.shape != expected:
            raise self._expected(name, f"{scale.name} of {list(expected)}",
                                 scale)
        matrices = math.prod(shape[:-2])
        if group == 16 and (outer is None or outer.dtype != "F32" or (
                math.prod(outer.shape) not in (1, matrices))):
            raise self._expected(name, f"{name}_scale_2, one scale of F32",
                                 outer)

        def decode() -> Array:
            scales = self._scales(name, scale)
            if group == 16 and outer is not None:
                scales = scales.reshape(matrices, math.prod(
                    expected[-2:])) * self._scales(name, outer).reshape(-1, 1)
            each = scales.reshape(expected).repeat(group, -1)
            reals: Array = _nibbles(codes) * each[..., :shape[-1]]
            return reals

        return Part(name, shape, self._parts(name, codes, scale, outer), decode)

    def _blocks(self, name: str, separator: str, blocks: FileTensor) -> Part:
        """Blocks of 16 bytes. With "_" the tensor lies transposed."""
        scale = self._tensors.get(f"{name}{separator}scales")
        expected = blocks.shape[:-1]
        if scale is None or scale.dtype not in _files.POWERS or (
                scale.shape != expected):
            raise self._expected(
                name, f"{name}{separator}scales of U8 {list(expected)}", scale)
        shape = (*expected[:-1], expected[-1] * _MX_GROUP)

        def decode() -> Array:
            assert scale is not None
            reals: Array = _nibbles(blocks) * self._scales(
                name, scale)[..., None]
            reals = reals.reshape(shape)
            return reals.swapaxes(-1, -2) if separator == "_" else reals

        if separator == "_":
            out = (*shape[:-2], shape[-1], shape[-2])
            return Part(name, out, self._parts(name, blocks, scale), decode)
        return Part(name, shape, self._parts(name, blocks, scale), decode)

    def _integers(self, module: str, codes: FileTensor) -> Part:
        """GPTQ or AWQ; the shapes tell which."""
        find, name = self._tensors.get, module + ".weight"
        scale, zeros = find(module + ".scales"), find(module + ".qzeros")
        order = find(module + ".g_idx")
        if name in self._tensors:
            raise self._malformed(name, f"{codes.name} is beside the weight")
        if codes.dtype != "I32" or len(codes.shape) != 2:
            # SVDQuant and LLM-AWQ have others under this name.
            raise self._unsupported(
                name, f"expected {codes.name} of I32, a matrix, as of GPTQ and "
                f"AWQ, got {_told(codes)}")
        if scale is None or scale.dtype not in _FLOAT_SCALES or (
                len(scale.shape) != 2 or 0 in scale.shape):
            raise self._expected(
                name, f"{module}.scales of F16, BF16 or F32, [groups,outputs]",
                scale)
        count, outputs = scale.shape
        is_awq = codes.shape[1] != outputs
        if zeros is not None or not is_awq or not self._is_symmetric:
            if zeros is None or zeros.dtype != "I32" or (
                    len(zeros.shape) != 2 or zeros.shape[0] != count):
                raise self._expected(
                    name, f"{module}.qzeros of I32 for the groups of .scales",
                    zeros)
        self._check_kind(name, is_awq)
        words = codes.shape[1] if zeros is None else zeros.shape[1]
        bits = self._bits or words * 32 // outputs
        if self._is_mixed:
            bits = self._bits_by_shapes(name, codes, words, outputs, order,
                                        is_awq)
        if bits not in ((4, 8) if is_awq else (2, 3, 4, 8)):
            raise self._unsupported(
                name, f"expected {'4 or 8' if is_awq else '2, 3, 4 or 8'} bits,"
                f" got {bits}")
        if zeros is not None and words != -(-outputs * bits // 32):
            raise self._expected(
                name, f"{module}.qzeros packed along the outputs", zeros)
        if is_awq and codes.shape[1] * 32 != outputs * bits:
            raise self._expected(
                name, f"{module}.qweight packed along the outputs", codes)
        inputs, rest = ((codes.shape[0], 0) if is_awq else
                        divmod(codes.shape[0] * 32, bits))
        if not inputs or rest:
            raise self._expected(
                name, f"{module}.qweight packed along the inputs", codes)
        groups = self._groups(name, inputs, count, None if is_awq else order)
        add = int(not is_awq and (self._packing.endswith(":auto_gptq")
                                  if self._packing else
                                  self._format != "gptq_v2"))

        def decode() -> Array:
            assert scale is not None
            # Without zero points it is in the middle of the codes.
            offsets = (np.full((count, outputs), 1 << bits - 1)
                       if zeros is None else
                       _unpack(zeros.array(), bits, outputs, is_awq) + add)
            if is_awq:
                values = _unpack(codes.array(), bits, outputs, True).T
            else:
                values = _unpack(np.ascontiguousarray(codes.array().T), bits,
                                 inputs, False)
            reals: Array = (values - offsets.T[:, groups]).astype(np.float32)
            reals *= self._scales(name, scale).T[:, groups]
            return reals

        return Part(name, (outputs, inputs),
                    self._parts(name, codes, zeros, scale, order), decode,
                    note="" if is_awq or self._has_config else _NO_CONFIG_NOTE)

    def _bits_by_shapes(self, name: str, codes: FileTensor,
                        words_of_outputs: int, outputs: int,
                        order: Optional[FileTensor], is_awq: bool) -> int:
        """The bits of a module whose shapes tell them. What says it in words
        are regular expressions with look-around."""
        words = codes.shape[0]
        fitting = [bits for bits in (2, 3, 4, 8)
                   if -(-outputs * bits // 32) == words_of_outputs and (
                       is_awq or (words * 32 % bits == 0 and (
                           order is None or
                           order.shape == (words * 32 // bits,))))]
        if len(fitting) == 1:
            return fitting[0]
        raise self._unsupported(
            name, "modules of this model have different bits, and shapes that "
            f"fit {' and '.join(map(str, fitting)) or 'none of 2, 3, 4 and 8'} "
            "do not tell those of this one")

    def _check_kind(self, name: str, is_awq: bool) -> None:
        """Others pack the same names in other ways."""
        if self._packing:
            if not (self._packing.endswith(":auto_awq") if is_awq else
                    self._packing in _PACKINGS or
                    self._packing.endswith(":auto_gptq")):
                raise self._unsupported(
                    name, f"codes of {'AWQ' if is_awq else 'GPTQ'} with "
                    f"packing_format {self._packing!r} are not read")
            return
        if is_awq and self._version not in ("", "gemm"):
            raise self._unsupported(
                name, f"expected version gemm of AWQ, got {self._version!r}")
        if not is_awq and self._format not in ("", "gptq", "gptq_v2"):
            raise self._unsupported(
                name, "expected checkpoint_format gptq or gptq_v2, got "
                f"{self._format!r}")

    def _groups(self, name: str, inputs: int, count: int,
                order: Optional[FileTensor]) -> Array:
        """The group of each input."""
        size = self._group
        if not size and inputs % count == 0:
            size = inputs // count
        size = inputs if size < 0 else size
        # Modules of their own size are known by what they have. A shorter last
        # group is no sign of one.
        fits = size and -(-inputs // size) == count
        if self._is_mixed and not fits and inputs % count == 0:
            size = inputs // count
        if not size or -(-inputs // size) != count:
            raise self._malformed(
                name, f"expected scales for groups of {size} of {inputs} "
                f"inputs, got {count} groups")
        if order is None:
            return np.arange(inputs) // size
        if order.dtype != "I32" or order.shape != (inputs,):
            raise self._expected(name, f"{order.name} of I32 [{inputs}]", order)
        found = order.array()
        if count > 1 and not found.any():
            # It has the zeros that it was allocated with.
            return np.arange(inputs) // size
        wrong = found[(found < 0) | (found >= count)]
        if wrong.size:
            raise self._malformed(
                name, f"expected {order.name} between 0 and {count - 1}, got "
                f"{wrong[0]}")
        return found


def _nibbles(codes: FileTensor) -> Array:
    """Reals of two codes a byte, the first in the lower half."""
    array = codes.array()
    both = np.stack([array & 15, array >> 4], -1)
    reals: Array = _TABLES["E2M1"][both.reshape(
        *array.shape[:-1], array.shape[-1] * 2)]
    return reals


def _unpack(words: Array, bits: int, count: int, is_awq: bool) -> Array:
    """First `count` codes of each row of int32."""
    codes = _compressed.unpack_rows(words, bits, count).astype(np.int16)
    codes += 1 << bits - 1
    if is_awq:
        places = np.array(_PLACES[bits])
        columns = np.arange(count)
        codes = codes[:, columns - columns % len(places) +
                      places[columns % len(places)]]
    return codes


def decoded(tensors: Mapping[str, FileTensor], parts: Sequence[Part]
            ) -> dict[str, FileTensor]:
    """The tensors of a file, or of all files, with floats in the place of the
    codes that it has, as they lie in the file that `quantctl dequantize` makes
    of it."""
    gone = {name for part in parts for name in part.parts}
    found = [part.tensor for part in parts if part.parts[0] in tensors]
    found += [tensor for name, tensor in tensors.items() if name not in gone]
    found.sort(key=lambda tensor: -_files.DTYPES[tensor.dtype].itemsize)
    return {tensor.name: tensor for tensor in found}


def _method_of(path: str) -> str:
    """Method that the configuration of a folder, or beside a file, names for
    how the model is quantized, empty if it names none."""
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    method = _compressed.method_of(folder)
    if method:
        return method
    for name in ("quantize_config.json", "quant_config.json"):
        config = _files.read_config(folder, name)
        if "bits" in config or "w_bit" in config:
            found = config.get("quant_method")
            return found if isinstance(found, str) else name
    # Without an algorithm it has the cache alone.
    modelopt = _files.read_config(folder, "hf_quant_config.json").get(
        "quantization")
    return "modelopt" if isinstance(modelopt, dict) and (
        modelopt.get("quant_algo") is not None) else ""


def wrong_codes(path: str, tensors: Mapping[str, FileTensor],
                known: Iterable[str]) -> dict[str, errors.QuantdError]:
    """An error for each tensor under a name that only codes have, but for the
    known ones."""
    is_bare = not _method_of(path)
    return {name: _files.unsupported(
        path, f"tensor {name!r} is " + (
            "of compressed-tensors, whose config.json is missing"
            if is_bare and name.endswith(".weight_packed") else
            "quantized in a way that is not read"))
            for name, tensor in tensors.items()
            if name.endswith(_OF_CODES) and tensor.element_type is None and
            name not in known}
