"""Quantized files into the parameters of a model of torch."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator, Optional

import numpy as np
import torch

from quantd import _scales, errors
from quantd._torch_blocks import EXTRA_STATE, LaidOut
from quantd.files import Path, TensorFile, load
from quantd.results import QuantizedTensor
from quantd.tensor import ELEMENT_DTYPES

# Types of float8 that files have without a scale: a tensor of bytes for
# quantd.load.
_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
# Most names in an error.
_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class LoadedNames:
    """Names of what load_into did.

    dequantized: names of the tensors that were codes. copied: of all others.
    missing: of the model, and not in the file. unexpected: of the file, and
        not in the model. Both are empty with strict=True.
    """

    dequantized: tuple[str, ...]
    copied: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_into(model: torch.nn.Module, path: Path, *, strict: bool = True
              ) -> LoadedNames:
    """Writes the tensors of a file or a folder over the parameters and buffers
    of a model that have their names, one tensor at a time.

        quantd.torch.load_into(model, "model.int4.safetensors")

    path: what quantd.load takes: what quantctl, quantize_model and save write,
        and compressed-tensors models with integer or float codes. Codes become
        reals in the dtype of the parameter, as QuantizedTensor.dequantize
        computes them for it; other tensors are converted to that dtype.
    strict: all names of the model's state_dict, and no others, are to be in the
        file. A parameter that the model has under several names needs one of
        them. False: other names stay as they are, and are told.

    Shapes have to agree in any case, and so do formats and block sizes of
    QuantizedWeight and FakeQuantize. Extra state may have any shape: it goes to
    set_extra_state() of its module. Other hooks of load_state_dict do not run.
    Nothing is written unless all of this is right. A file that breaks off, or
    is damaged within a tensor, leaves the model half loaded.

    Raises: STATE_MISMATCH with names and shapes; FILE_UNREADABLE,
    FILE_MALFORMED, FILE_UNSUPPORTED; ARGUMENT_INVALID for a model on the meta
    device, which holds nothing: model.to_empty(device=...) makes room; and for
    one whose state_dict() has copies in place of its tensors, as that of FSDP
    has.
    """
    file = load(path, as_torch=True)
    if isinstance(model, (torch.nn.DataParallel,
                          torch.nn.parallel.DistributedDataParallel)):
        model = model.module
    targets = _targets(model)
    takers = _takers_of_extra_state(model)
    missing, unexpected = _differences(file, targets, takers)
    _check(file, targets, takers,
           *((missing, unexpected) if strict else ((), ())))
    _check_memory(model, {name: targets[name] for name in file
                          if name in targets and name not in takers})
    dequantized: list[str] = []
    copied: list[str] = []
    with torch.no_grad():
        for name in file:
            if name not in targets:
                continue
            target = targets[name]
            if name in takers:
                target = torch.empty(file.info(name).shape, dtype=target.dtype,
                                     device=target.device)
            is_quantized = _copy(file, name, target)
            if name in takers:
                takers[name].set_extra_state(target)
            (dequantized if is_quantized else copied).append(name)
    return LoadedNames(tuple(dequantized), tuple(copied), missing, unexpected)


def _targets(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that the file is to fill; state that is no tensor is in no
    file."""
    found = {name: tensor for name, tensor in
             model.state_dict(keep_vars=True).items()
             if isinstance(tensor, torch.Tensor)}
    for name, tensor in found.items():
        if tensor.device.type == "meta":
            raise errors.argument_invalid(
                f"expected a model in memory, but {name!r} is on the meta "
                "device; model.to_empty(device=\"cpu\") makes room", "model")
    return found


def _takers_of_extra_state(model: torch.nn.Module
                           ) -> dict[str, torch.nn.Module]:
    """By the name of the state."""
    refuses = torch.nn.Module.set_extra_state
    return {f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE: module
            for prefix, module in model.named_modules(remove_duplicate=False)
            if getattr(module.set_extra_state, "__func__", None) is not refuses}


def _differences(file: TensorFile, targets: dict[str, torch.Tensor],
                 takers: dict[str, torch.nn.Module]
                 ) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that the file lacks, and those that the model does. Layouts
    may be missing: states did not have them once."""
    filled = {id(targets[name]) for name in file if name in targets}
    return (tuple(name for name, tensor in targets.items()
                  if name not in file and id(tensor) not in filled and
                  not isinstance(takers.get(name), LaidOut)),
            tuple(name for name in file if name not in targets))


def _check(file: TensorFile, targets: dict[str, torch.Tensor],
           takers: dict[str, torch.nn.Module], missing: tuple[str, ...],
           unexpected: tuple[str, ...]) -> None:
    shapes = [f"{name} is {list(found)} in the file, "
              f"{list(targets[name].shape)} in the model"
              for name in file if name in targets and
              name not in takers and
              (found := file.info(name).shape) != tuple(targets[name].shape)]
    types = [f"{name} is {targets[name].dtype}" for name in file
             if name in targets and file.info(name).format is not None and
             not targets[name].dtype.is_floating_point]
    layouts = [name[:-len(EXTRA_STATE)] + fault
               for name, module in takers.items()
               if name in file and isinstance(module, LaidOut)
               for fault in module.layout_faults(file[name])]
    faults = [*_some("not in the file", missing),
              *_some("not in the model", unexpected),
              *_some("of another shape", shapes),
              *_some("no floats, as codes would become", types),
              *_some("of another layout", layouts)]
    if faults:
        raise errors.state_mismatch(file.path, "; ".join(faults))


def _check_memory(model: torch.nn.Module, targets: dict[str, torch.Tensor]
                  ) -> None:
    """Checks that the model has what is written to the targets."""
    tensors = [*model.parameters(), *model.buffers()]
    ids, places = set(map(id, tensors)), set(map(_memory, tensors)) - {None}
    copies = [name for name, tensor in targets.items()
              if id(tensor) not in ids and tensor.numel() and
              _memory(tensor) not in places]
    if copies:
        (names,) = _some("of no parameter or buffer", copies)
        raise errors.argument_invalid(
            "expected a state_dict() with the memory of parameters and "
            f"buffers, as what is written to others is lost; {names}", "model")


def _memory(tensor: torch.Tensor) -> Optional[tuple[str, int]]:
    """Place where the storage of a tensor begins; None where it has none."""
    try:
        # torch before 2.0 has storages with types only.
        storage = getattr(tensor, "untyped_storage", tensor.storage)()
        begin = storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    return (str(tensor.device), begin) if begin else None


def _some(what: str, names: Any) -> Iterator[str]:
    if names:
        more = len(names) - _MOST_NAMED
        yield f"{what}: {', '.join(names[:_MOST_NAMED])}" + (
            f" and {more} more" if more > 0 else "")


def _copy(file: TensorFile, name: str, target: torch.Tensor) -> bool:
    """Copies a tensor of the file to the target. True if there were codes."""
    value = file[name]
    if isinstance(value, QuantizedTensor):
        # Types of torch beyond those of quantd get float32.
        found = str(target.dtype)[len("torch."):]
        target.copy_(dataclasses.replace(
            value, element_type=found if found in ELEMENT_DTYPES else "float32"
        ).dequantize())
        return True
    format_name = _FLOAT8.get(file.info(name).dtype)
    if format_name is not None:
        reals = _scales.table(format_name, np.empty(0, np.float32))
        value = torch.from_numpy(reals)[value.long()]
    target.copy_(value)
    return False
