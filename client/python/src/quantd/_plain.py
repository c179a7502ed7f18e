"""Files and folders of tensors that nobody has quantized yet."""

from __future__ import annotations

import os
from typing import Mapping, Optional

from quantd import _compressed, _files, _layout
from quantd._files import FileTensor, InputFile


def open_plain(path: str) -> list[InputFile]:
    """A file, or the shards of a folder.

    Raises: FILE_UNREADABLE, FILE_MALFORMED; FILE_UNSUPPORTED also for what is
        quantized already.
    """
    is_folder = os.path.isdir(path)
    files = (_files.open_folder(path) if is_folder
             else [_files.open_file(path)])
    for file in files:
        what = next((key[len(_layout.KEY_PREFIX):] for key in file.metadata
                     if key.startswith(_layout.KEY_PREFIX)),
                    _codes_in(file.tensors))
        if what is None and is_folder:
            method = _compressed.method_of(path)
            what = f"the model, by {method}" if method else None
        if what is not None:
            raise _files.unsupported(
                path, f"expected plain tensors, but {what!r} is quantized "
                "already; begin with the model that it was made from")
    return files


def _codes_in(tensors: Mapping[str, FileTensor]) -> Optional[str]:
    """The tensor that holds codes in the layouts of others; None where there is
    none."""
    for name in tensors:
        if name.endswith(".qweight"):
            return name
        for suffix in ("_scale", ".scale", "_scale_inv", ".scales"):
            if not name.endswith(suffix):
                continue
            stem = name[:-len(suffix)]
            codes = tensors.get(stem) or tensors.get(stem + "_packed")
            if codes is not None and codes.element_type is None:
                return codes.name
    return None
