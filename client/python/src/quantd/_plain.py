"""Files and folders of tensors that nobody has quantized yet."""

from __future__ import annotations

import dataclasses
import os
from typing import Mapping, Optional, Sequence

from quantd import _checkpoint, _compressed, _files, _layout
from quantd._files import FileTensor, InputFile


# What lies beside codes.
_BESIDE = ("_scale", "_scale_inv", "_scale_2", ".scale", ".scales", "_scales",
           "_zero_point", "_absmax", ".absmax", "_quant_map", ".quant_map",
           ".SCB", "_global_scale")
# Names that only codes have, and what lies beside them.
_OF_CODES = (".qweight", ".qzeros", ".weight_packed", ".weight_scale_inv",
             ".weight_scale_2", ".weight_global_scale", ".weight.absmax")


def open_plain(path: str, requantize: Optional[bool] = None
               ) -> list[InputFile]:
    """A file, or the shards of a folder.

    requantize: take what other programs quantized for floats; None where the
        caller has no such parameter.

    Raises: FILE_UNREADABLE, FILE_MALFORMED; FILE_UNSUPPORTED also for what is
        quantized already.
    """
    is_folder = os.path.isdir(path)
    files = (_files.open_folder(path) if is_folder
             else [_files.open_file(path)])
    # Codes and their scales may be in different shards.
    tensors = {name: tensor for file in files
               for name, tensor in file.tensors.items()}
    what = next((key[len(_layout.KEY_PREFIX):] for file in files
                 for key in file.metadata
                 if key.startswith(_layout.KEY_PREFIX)), None)
    if what is None and requantize and not path.endswith((".npy", ".gguf")):
        coded = _read_coded(path, tensors, files)
        if coded:
            files = [dataclasses.replace(
                file, tensors=_checkpoint.decoded(file.tensors, coded),
                metadata={key: value for key, value in file.metadata.items()
                          if not key.startswith("quantctl.")})
                     for file in files]
            tensors = _checkpoint.decoded(tensors, coded)
            is_folder = False
    what = what or _codes_in(tensors)
    if what is None and is_folder:
        method = _compressed.method_of(path)
        what = f"the model, by {method}" if method else None
    if what is not None:
        raise _files.unsupported(
            path, f"expected plain tensors, but {what!r} is quantized "
            "already; begin with the model that it was made from, or with what "
            "`quantctl dequantize` makes of it" + (
                ", or take requantize=True, which does both"
                if requantize is False else ""))
    return files


def _read_coded(path: str, tensors: Mapping[str, FileTensor],
                files: Sequence[InputFile]) -> list[_checkpoint.Part]:
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    if _compressed.method_of(folder) != _compressed.METHOD:
        return _checkpoint.read(path, tensors)
    metadata = {key: value for file in files
                for key, value in file.metadata.items()}
    return _checkpoint.read_compressed(folder, tensors, metadata)


def _codes_in(tensors: Mapping[str, FileTensor]) -> Optional[str]:
    """A tensor that holds codes, or what lies beside codes, in the layouts of
    others; None where there is none."""
    for name in tensors:
        for suffix in _BESIDE:
            if not name.endswith(suffix):
                continue
            for end in ("", "_packed", ".weight", "_blocks", ".blocks"):
                codes = tensors.get(name[:-len(suffix)] + end)
                if codes is not None and codes.element_type is None:
                    return codes.name
    for name in tensors:
        if name.endswith(_OF_CODES) or (
                name.endswith(".weight_scale") and
                name[:-len("_scale")] not in tensors):
            return name
    return None
