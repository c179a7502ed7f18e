"""Layers whose inputs become Gram matrices: rows of as many features as a row
of the weight has elements; and layers that have their inputs in common."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Optional

import torch


def why_none(module: torch.nn.Module) -> str:
    """Why the inputs of a layer have no Gram matrix; empty where they have."""
    if isinstance(module, torch.nn.Conv2d):
        return "" if module.groups == 1 else "a grouped convolution"
    if isinstance(module, torch.nn.Linear):
        return ""
    return f"{type(module).__name__} is neither Linear nor Conv2d"


def rows(module: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The rows that the weight is multiplied with: [rows, features]."""
    if not isinstance(module, torch.nn.Conv2d):
        return inputs.reshape(-1, inputs.shape[-1])
    if inputs.dim() == 3:
        inputs = inputs.unsqueeze(0)
    if inputs.dtype in (torch.float16, torch.bfloat16):
        # The CPU does not unfold all of them.
        inputs = inputs.float()
    padding = module._reversed_padding_repeated_twice
    mode = module.padding_mode
    padded = torch.nn.functional.pad(
        inputs, padding, mode="constant" if mode == "zeros" else mode)
    windows = torch.nn.functional.unfold(
        padded, module.kernel_size, module.dilation, 0, module.stride)
    return windows.transpose(1, 2).reshape(-1, windows.shape[1])


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A tensor that went into a layer."""

    tensor: Any
    version: Optional[int]
    name: str


class SharedInputs:
    """Inputs that are those of an earlier layer: the same tensor, unchanged,
    with the same rows. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[Any, _Seen] = {}
        # By name of inputs, under which name they are counted.
        self.names: dict[str, str] = {}

    def name_of(self, name: str, module: torch.nn.Module,
                tensor: torch.Tensor) -> tuple[str, bool]:
        """Under which name the inputs of a module are counted, and whether that
        was another one before."""
        version = None if tensor.is_inference() else tensor._version
        key = (id(tensor), _geometry(module))
        seen = self._seen.get(key)
        if seen is None or seen.tensor() is not tensor or (
                seen.version != version):
            seen = _Seen(weakref.ref(tensor, lambda _: self._forget(key)),
                         version, name)
            self._seen[key] = seen
        known = self.names.setdefault(name, seen.name)
        if known in (name, seen.name):
            return known, False
        # From here on by itself: the other one's rows are not its own.
        self.names[name] = name
        return name, True

    def _forget(self, key: Any) -> None:
        self._seen.pop(key, None)


def _geometry(module: torch.nn.Module) -> Any:
    """Geometry that decides on the rows beside the tensor."""
    if not isinstance(module, torch.nn.Conv2d):
        return None
    return (module.kernel_size, module.stride, module.dilation,
            tuple(module._reversed_padding_repeated_twice),
            module.padding_mode)
