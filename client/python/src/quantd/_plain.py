"""Files and folders of tensors that nobody has quantized yet."""

from __future__ import annotations

import os
from typing import Iterable, Mapping, Optional, Sequence

from quantd import _checkpoint, _compressed, _files, _layout, errors
from quantd._files import FileTensor, InputFile


# Ends of names of what lies beside codes.
_BESIDE = ("_scale", "_scale_inv", "_scale_2", ".scale", ".scales", "_scales",
           "_zero_point", "_absmax", ".absmax", "_quant_map", ".quant_map",
           ".SCB", "_global_scale", "_weight_scale", "_weight_scale_inv",
           "_weight_scale_2", ".codebooks", ".scale_weight", ".zero", ".s")
# How the name of codes goes on where that of what lies beside them ends.
_CODE_ENDS = ("", "_packed", ".weight", "_blocks", ".blocks", "_data",
              "_data._data", "_qdata", ".W_q", ".codes", ".B")
# Names that only codes have, and what lies beside them.
_OF_CODES = (".qweight", ".qzeros", ".weight_packed", ".weight_scale_inv",
             ".weight_scale_2", ".weight_global_scale", ".weight.absmax",
             "_weight_scale_inv", "_weight_scale_2", "_proj_weight_scale",
             "._weight_qdata", "._weight_scale", "._weight_zero_point",
             ".W_q", ".comfy_quant", ".Qidxs", ".q_weight", ".trellis", ".suh",
             ".svh")
_CODES = ("U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "I32")


def open_plain(path: str) -> list[InputFile]:
    """A file, or the shards of a folder.

    Raises: FILE_UNREADABLE, FILE_MALFORMED; FILE_UNSUPPORTED also for what is
        quantized already.
    """
    is_folder = os.path.isdir(path)
    files = (_files.open_folder(path) if is_folder
             else [_files.open_file(path)])
    # Codes and their scales may be in different shards.
    tensors = {name: tensor for file in files
               for name, tensor in file.tensors.items()}
    own = next((key[len(_layout.KEY_PREFIX):] for file in files
                for key in file.metadata
                if key.startswith(_layout.KEY_PREFIX)), None)
    what = own or _codes_in(tensors)
    if what is None and (is_folder or any(
            map(_is_code_matrix, tensors.values()))):
        method = _method_of(path)
        what = f"the model, by {method}" if method else None
    if what is not None:
        is_others = own is None and _is_read(path, tensors, files)
        raise _files.unsupported(
            path, f"expected plain tensors, but {what!r} is quantized "
            "already; begin with the model that it was made from, or with " + (
                "what `quantctl dequantize` makes of it"
                if is_others or own is not None else
                "floats that the program that quantized it makes of it; "
                "quantd does not read such codes"))
    return files


def _is_read(path: str, tensors: Mapping[str, FileTensor],
             files: Sequence[InputFile]) -> bool:
    """True if quantd reads what other programs have quantized. Raises: what is
    wrong with the configuration."""
    _method_of(path)
    try:
        return bool(_read_coded(path, tensors, files))
    except errors.QuantdError:
        return False


def _folder_of(path: str) -> str:
    return path if os.path.isdir(path) else os.path.dirname(path) or "."


def _method_of(path: str) -> str:
    """Method that the configuration of a folder, or beside a file, names for
    how the model is quantized, empty if it names none."""
    folder = _folder_of(path)
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


def _read_coded(path: str, tensors: Mapping[str, FileTensor],
                files: Sequence[InputFile]) -> list[_checkpoint.Part]:
    folder = _folder_of(path)
    if _compressed.method_of(folder) != _compressed.METHOD:
        return _checkpoint.read(path, tensors)
    metadata = {key: value for file in files
                for key, value in file.metadata.items()}
    return _checkpoint.read_compressed(folder, tensors, metadata)


def _is_code_matrix(tensor: FileTensor) -> bool:
    return tensor.dtype in _CODES and len(tensor.shape) >= 2


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


def _codes_in(tensors: Mapping[str, FileTensor]) -> Optional[str]:
    """A tensor that holds codes, or what lies beside codes, in the layouts of
    others; None where there is none."""
    for name in tensors:
        for suffix in _BESIDE:
            if not name.endswith(suffix):
                continue
            for end in _CODE_ENDS:
                codes = tensors.get(name[:-len(suffix)] + end)
                if codes is not None and codes.element_type is None:
                    return codes.name
    for name, tensor in tensors.items():
        if name.endswith(_OF_CODES) or (
                name.endswith(".weight_scale") and
                name[:-len("_scale")] not in tensors):
            return name
        # Without scales, or with scales of other names, as SmoothQuant's. Of
        # 32 bits it may be a table.
        if name.endswith(".weight") and _is_code_matrix(tensor) and (
                tensor.dtype != "I32"):
            return name
    return None
