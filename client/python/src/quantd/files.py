"""Tensors in files: load() reads what quantctl reads, save() writes what it
writes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Iterable, Iterator, Mapping, Optional, Union

import numpy as np

from quantd import (_arrays, _checkpoint, _compressed, _files, _gguf_output,
                    _layout, errors)
from quantd._files import FileTensor
from quantd.results import QuantizedTensor
from quantd.tensor import Array, naming

Path = Union[str, "os.PathLike[str]"]
# Value that a file has under a name: reals and other plain tensors as arrays of
# numpy or tensors of torch.
FileValue = Union[Any, QuantizedTensor]
# How names of safetensors begin for types of which arrays have the bits.
_NOT_OF_NUMPY = ("F4", "F6_", "F8", "BF")
# Dtypes of arrays in files, by what element_types says of them.
_SAVED_AS = {**_files.DTYPE_OF_ELEMENTS, "uint16": "U16", "uint8": "U8",
             "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
             "float8_e8m0fnu": "F8_E8M0"}
_ELEMENTS_OF = {dtype: name for name, dtype in _SAVED_AS.items()}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Facts about a tensor that a file tells.

    dtype: of the elements, as safetensors names it: "F32", "BF16", ...; of a
        quantized tensor that of its codes.
    size_bytes: with all that lies beside the codes.
    format: of the codes; None for a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    format: Optional[str] = None


class TensorFile(Mapping[str, FileValue]):
    """The tensors of a file or a folder, by name; see load().

    Reading a name gives a QuantizedTensor, or an array: memory of the file,
    read from it when it is first used, and not to be written; if the file is
    cut short before, the system ends the process. Tensors of torch are copies,
    with the element types that torch has. In numpy bfloat16 is uint16, float8
    uint8 (info() has the type); save() and others take these arrays, their
    slices and copies for what they are. Of what numpy makes of them otherwise,
    as with astype(), view() or np.stack, save() wants to be told what it is.
    Floats below a byte are bytes, which it refuses.
    A file that is replaced while it is open stays readable as it was; of one
    that was changed in its place names are not read any more (FILE_CHANGED).
    """

    def __init__(self, path: str, as_torch: bool) -> None:
        self.path = path
        self._as_torch = as_torch
        files = (_files.open_folder(path) if os.path.isdir(path)
                 else [_files.open_file(path)])
        self._tensors = {name: tensor for file in files
                         for name, tensor in file.tensors.items()}
        # Metadata of all shards; the first that has a key counts.
        self.metadata: dict[str, str] = {}
        for file in files:
            for key, value in file.metadata.items():
                self.metadata.setdefault(key, value)
        # Names of tensors of GGUF types that are not known.
        self.unread = [name for file in files for name in file.unread]
        self._model: Optional[_compressed.Model] = None
        # Errors of tensors that are codes in a way that is not read.
        self._errors: dict[str, errors.QuantdError] = {}
        # Names of the tensors that each quantized tensor is made of.
        self._parts = {
            key[len(_layout.KEY_PREFIX):]: [
                key[len(_layout.KEY_PREFIX):] + suffix
                for suffix in ("", *_layout.SUFFIXES)]
            for key in self.metadata if key.startswith(_layout.KEY_PREFIX)}
        folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
        if not self._parts and path.endswith((".npy", ".gguf")) is False and (
                _compressed.method_of(folder) == _compressed.METHOD):
            self._model = _compressed.Model(folder, self._tensors,
                                            self.metadata)
            self._parts = self._model.names()
            self._errors = _checkpoint.wrong_codes(path, self._tensors, {
                part for parts in self._parts.values() for part in parts})
        elif not self._parts and not path.endswith((".npy", ".gguf")):
            coded, self._errors = _checkpoint.read_each(path, self._tensors)
            if coded:
                _checkpoint.warn_of_notes(path, coded, 3)
                self._tensors = _checkpoint.decoded(self._tensors, coded)
            self._errors = {**_checkpoint.wrong_codes(path, self._tensors, ()),
                            **self._errors}
        hidden = {part for parts in self._parts.values() for part in parts}
        owners = {part: name for name, parts in self._parts.items()
                  for part in parts}
        # In the order of the file; a quantized tensor is where its first part
        # is.
        self._names = list(dict.fromkeys(
            owners.get(name, name) for name in self._tensors
            if name in owners or name not in hidden))

    def __repr__(self) -> str:
        return f"<quantd.TensorFile {self.path!r}, {len(self)} tensors>"

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._parts or (
            name in self._tensors and name in self._names)

    def __getitem__(self, name: str) -> FileValue:
        """Raises: KeyError; FILE_MALFORMED, FILE_UNSUPPORTED, FILE_CHANGED."""
        if name not in self:
            raise KeyError(name)
        if name in self._errors:
            raise self._errors[name]
        if name not in self._parts:
            return self._plain(self._tensors[name])
        tensor = (self._model.read(name) if self._model is not None else
                  _layout.read(self.path, self._tensors, name,
                               self.metadata[_layout.KEY_PREFIX + name]))
        if self._as_torch:
            return dataclasses.replace(tensor,
                                       codes=_arrays.to_torch(tensor.codes))
        tensor.codes.flags.writeable = False
        return tensor

    def _plain(self, tensor: FileTensor) -> Any:
        if self._as_torch:
            if tensor.dtype in _files.PACKED_BITS:
                raise _files.unsupported(
                    self.path, f"torch has no elements of {tensor.dtype}")
            return _arrays.to_torch(tensor.array(),
                                    _ELEMENTS_OF.get(tensor.dtype, ""))
        array = tensor.mapped()
        if tensor.dtype.startswith((*_NOT_OF_NUMPY, "U16")):
            array = _arrays.named(array, tensor.dtype)
        array.flags.writeable = False
        return array

    def info(self, name: str) -> TensorInfo:
        """Without reading the tensor.

        Raises: KeyError; FILE_MALFORMED.
        """
        if name not in self:
            raise KeyError(name)
        if name not in self._parts:
            tensor = self._tensors[name]
            return TensorInfo(name, tensor.shape, tensor.dtype,
                              tensor.size_bytes)
        size = sum(self._tensors[part].size_bytes
                   for part in self._parts[name] if part in self._tensors)
        if self._model is not None:
            shape, format_name = (self._model.shape_of(name),
                                  self._model.format_of(name))
        else:
            shape, format_name = _layout.describe(
                self.path, name, self.metadata[_layout.KEY_PREFIX + name])
        return TensorInfo(name, shape, _layout.code_dtype(format_name), size,
                          format_name)


def load(path: Path, *, as_torch: bool = False) -> TensorFile:
    """Opens a safetensors, .npy or .gguf file, or a folder with
    model.safetensors.index.json or model.safetensors, and reads nothing but
    what it says of its tensors:

        file = quantd.load("model.int4.safetensors")
        for name in file:
            reals = file[name]
            if isinstance(reals, quantd.QuantizedTensor):
                reals = reals.dequantize()

    Tensors that quantctl, save() or compressed-tensors quantized are
    QuantizedTensors. Blocks of GGUF are float32, as are FP8, NVFP4, MXFP4, GPTQ
    and AWQ of other programs, computed when a name is read.

    GPTQ without a configuration beside it is taken as of version 1, with a
    RuntimeWarning.

    as_torch: arrays, and codes, are tensors of torch.

    Raises: FILE_UNREADABLE, FILE_MALFORMED, FILE_UNSUPPORTED.
    """
    if as_torch:
        import torch  # pylint: disable=import-outside-toplevel,unused-import
    return TensorFile(os.fspath(path), as_torch)


def save(path: Path,
         tensors: Union[Mapping[str, FileValue],
                        Iterable[tuple[str, FileValue]]], *,
         overwrite: bool = False, metadata: Optional[Mapping[str, str]] = None,
         element_types: Optional[Mapping[str, str]] = None,
         gguf_metadata: Optional[Path] = None) -> int:
    """Writes a safetensors file as quantctl does, which appears complete or not
    at all; returns its size in bytes. A path that ends with .npy takes one
    plain tensor. One that ends with .gguf takes QuantizedTensors that have a
    type there; see "GGUF" in proto/README.md.

    tensors: by name, one after another: QuantizedTensors, arrays or tensors of
        torch. An iterator is asked for the next one when the last is on disk.
    overwrite: replace a file that is there.
    metadata: text that goes along.
    element_types: "bfloat16" or "uint16", by the names of arrays of uint16;
        "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu" or "uint8", by those of
        uint8. Those of load(), and uint8 that are not made of them, need none.
    gguf_metadata: of a .gguf file: another one, whose metadata it gets. Without
        metadata of a model llama.cpp does not load it.

    Raises: FILE_EXISTS, FILE_UNWRITABLE, ARGUMENT_INVALID; FILE_UNSUPPORTED for
        what GGUF has no place for.
    """
    path = os.fspath(path)
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    types = dict(element_types or {})
    if path.endswith(".npy"):
        return _save_npy(path, list(pairs), types, overwrite)
    if path.endswith(".gguf"):
        if metadata:
            raise errors.argument_invalid(
                "expected gguf_metadata in place of metadata for a .gguf file",
                "metadata")
        return _gguf_output.write(
            path, overwrite,
            _gguf_items(path, pairs, types),
            None if gguf_metadata is None else os.fspath(gguf_metadata))
    if gguf_metadata is not None:
        raise errors.argument_invalid(
            "expected gguf_metadata with a .gguf file", "path")
    _check_metadata(metadata or {})
    _files.check_extension(path, "path")
    with _files.SafetensorsWriter(path, overwrite) as writer:
        for number, (name, tensor) in enumerate(pairs):
            _check_name(name)
            with naming(name):
                if isinstance(tensor, QuantizedTensor):
                    _layout.write(writer, (number,), name, tensor)
                else:
                    array, dtype = _plain_array(tensor, types.pop(name, None))
                    writer.add((number, 0), name, dtype, array.shape, array)
        _check_types(types)
        writer.metadata.update(metadata or {})
        return writer.finish()


def _check_metadata(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise errors.argument_invalid(
                f"expected metadata of strings, got {value!r} for {key!r}",
                "metadata")
        if not _files.is_unicode(key + value):
            raise errors.argument_invalid(
                f"expected metadata in Unicode, got {value!r} for {key!r}",
                "metadata")
        if key.startswith(_layout.KEY_PREFIX):
            raise errors.argument_invalid(
                f"the key {key!r} is that of a quantized tensor", "metadata")


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise errors.argument_invalid(
            f"expected a name, got {type(name).__name__}", "tensors")
    if not _files.is_unicode(name):
        raise errors.argument_invalid(
            f"expected a name in Unicode, got {name!r}", "tensors")


def _gguf_items(path: str, pairs: Iterable[tuple[str, FileValue]],
                types: dict[str, str]) -> Iterator[_gguf_output.GgufItem]:
    for name, tensor in pairs:
        _check_name(name)
        if isinstance(tensor, QuantizedTensor):
            yield _gguf_output.quantized_item(name, tensor)
            continue
        with naming(name):
            array, dtype = _plain_array(tensor, types.pop(name, None))
        yield _gguf_output.plain_item(path, name, dtype, array)
    _check_types(types)


def _plain_array(tensor: Any, given: Optional[str]) -> tuple[Array, str]:
    """And its type, as safetensors names it. given: as element_types has it."""
    array, found = _arrays.to_numpy(tensor)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    # It makes one dimension of none.
    array = np.ascontiguousarray(array).reshape(array.shape)
    return array, _dtype_of(array, found, given,
                            isinstance(tensor, _arrays.FloatBits))


def _check_types(rest: Mapping[str, str]) -> None:
    """Checks that element_types are of tensors that take them. rest: those that
    none took."""
    if rest:
        raise errors.argument_invalid(
            "there are no plain tensors of the names " + ", ".join(rest),
            "element_types")


def _dtype_of(array: Array, found: Optional[str], given: Optional[str],
              was_bits: bool) -> str:
    """found: by what array it is. was_bits: it was made of FloatBits."""
    told = _arrays.name_of(array)
    if told in _files.PACKED_BITS:
        raise errors.argument_invalid(
            f"expected elements of whole bytes, got {told}, of which an array "
            "has bytes and no shape", "tensors")
    element_type = given or found
    if element_type is not None:
        dtype = _SAVED_AS.get(element_type)
        if dtype is None or _files.DTYPES[dtype] != array.dtype or (
                found not in (None, element_type)) or told not in (None, dtype):
            raise errors.argument_invalid(
                f"expected elements of {element_type}, got "
                f"{found or told or array.dtype}", "element_types")
        return dtype
    if told is not None:
        return told
    if array.dtype == np.uint16:
        raise errors.argument_invalid(
            "expected element_types to say whether uint16 are 'uint16' or the "
            "bits of 'bfloat16'", "element_types")
    if was_bits and array.dtype == np.uint8:
        raise errors.argument_invalid(
            "expected element_types to say whether uint8 are 'uint8' or the "
            "bits of 'float8_e4m3fn', 'float8_e5m2' or 'float8_e8m0fnu'",
            "element_types")
    for name, dtype_of in _files.DTYPES.items():
        if dtype_of == array.dtype and not name.startswith(_NOT_OF_NUMPY):
            return name
    raise errors.argument_invalid(
        "expected booleans, integers or floats of at most 8 bytes, got "
        f"{array.dtype}", "tensors")


def _save_npy(path: str, pairs: list[tuple[str, FileValue]],
              types: dict[str, str], overwrite: bool) -> int:
    if len(pairs) != 1 or isinstance(pairs[0][1], QuantizedTensor):
        raise errors.argument_invalid(
            f"expected one plain tensor for {path}, got "
            f"{len(pairs) if len(pairs) != 1 else 'a quantized one'}",
            "tensors")
    name, tensor = pairs[0]
    with naming(name):
        array, dtype = _plain_array(tensor, types.pop(name, None))
        _check_types(types)
        if dtype.startswith(_NOT_OF_NUMPY):
            raise _files.unsupported(path, f".npy has no type for {dtype}")
    with _files.AtomicFile(path, overwrite) as file:
        header = _npy_header(array)
        file.write(header)
        file.write(array.reshape(-1))
        file.commit()
    return len(header) + array.nbytes


def _npy_header(array: Array) -> bytes:
    text = (f"{{'descr': {array.dtype.str!r}, 'fortran_order': False, 'shape': "
            f"{array.shape}, }}")
    # With magic, version and length a multiple of 64.
    text += " " * (-(10 + len(text) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + (
        text.encode())
