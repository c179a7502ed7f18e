"""Helpers that the modules of torch share: scales of blocks, numbers that keep
their type, and a state that tells how codes are laid out."""

from __future__ import annotations

import json
import math
from typing import Any, Callable, Mapping, Sequence

import torch

from quantd import errors

# Key that state_dict() has for what a module says in get_extra_state().
EXTRA_STATE = "_extra_state"


def spread(numbers: torch.Tensor, block_size: Sequence[int],
           shape: Sequence[int]) -> torch.Tensor:
    """One entry per scale, so that it goes with a tensor of `shape`. Gradients
    of a block add up.

    Raises: ARGUMENT_INVALID where they do not go together.
    """
    if numbers.numel() == 1 or not shape:
        return numbers.reshape(-1)[:1].reshape((1,) * len(shape))
    sizes = block_size or (0,) * len(shape)
    if len(sizes) != len(shape):
        raise errors.argument_invalid(
            f"expected a tensor of {len(sizes)} dimensions, as the block size "
            f"{tuple(sizes)} has, got {tuple(shape)}", "array")
    blocks = [size or max(extent, 1) for size, extent in zip(sizes, shape)]
    counts = [-(-extent // block) for extent, block in zip(shape, blocks)]
    total = 1
    for count in counts:
        total *= count
    if numbers.numel() != total:
        raise errors.argument_invalid(
            f"expected a tensor for {numbers.numel()} scales, got "
            f"{tuple(shape)} with {counts}", "array")
    numbers = numbers.reshape(counts)
    for axis, block in enumerate(blocks):
        if block > 1 and counts[axis] > 1:
            sizes = [*numbers.shape[:axis + 1], block,
                     *numbers.shape[axis + 1:]]
            numbers = numbers.unsqueeze(axis + 1).expand(sizes).flatten(
                axis, axis + 1).narrow(axis, 0, shape[axis])
    return numbers


def keeping_types(convert: Callable[[torch.Tensor], torch.Tensor],
                  others: Sequence[torch.Tensor]
                  ) -> Callable[[torch.Tensor], torch.Tensor]:
    """For Module._apply: `convert` without its change of type, such as that of
    half(), but for the tensors in `others`. Scales are no weights: rounding
    them changes every real."""
    def kept(tensor: torch.Tensor) -> Any:
        converted = convert(tensor)
        if converted.dtype == tensor.dtype or any(
                tensor is other for other in others):
            return converted
        return tensor.to(converted.device)

    return kept


def plain_block_size(block_size: Sequence[int], scale_shape: Sequence[int]
                     ) -> list[int]:
    """Block size that is the same for all block sizes that lay these scales out
    alike: 0 for a dimension with one block, and nothing for one scale."""
    if math.prod(scale_shape) == 1:
        return []
    if len(block_size) != len(scale_shape):
        return [int(size) for size in block_size]
    return [0 if count == 1 else int(size)
            for size, count in zip(block_size, scale_shape)]


class LaidOut(torch.nn.Module):  # type: ignore[misc]
    """A module whose reals depend on more than its tensors.

    Its state_dict() has the rest, too. A state with another layout is not
    loaded. One without any, from before states had it, is.
    """

    # Advice for a module that torch.jit.script does not compile.
    in_place_of_scripts: str

    def __prepare_scriptable__(self) -> Any:
        """Called by torch.jit.script. Raises: ARGUMENT_INVALID."""
        raise errors.argument_invalid(
            f"torch.jit.script does not compile {type(self).__name__}; "
            f"{self.in_place_of_scripts}", "model")

    def layout(self) -> dict[str, Any]:
        """Facts that the reals depend on beside the tensors, as JSON has
        them."""
        raise NotImplementedError

    def layout_faults(self, state: Any) -> list[str]:
        """Faults of `state`, what get_extra_state() of a module gave, that
        differ from the layout."""
        try:
            got = dict(json.loads(bytes(state.tolist())))
        except (AttributeError, TypeError, ValueError):
            return [f"{EXTRA_STATE}: expected what state_dict() has, got "
                    f"{type(state).__name__}"]
        return [f"{name}: expected {value}, got {got[name]}"
                for name, value in self.layout().items()
                if got.get(name, value) != value]

    def get_extra_state(self) -> torch.Tensor:
        """The layout as text in a tensor, which all files can hold."""
        return torch.tensor(list(json.dumps(self.layout()).encode()),
                            dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Raises: ARGUMENT_INVALID for another layout."""
        faults = self.layout_faults(state)
        if faults:
            raise errors.argument_invalid("; ".join(faults), "state")

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str,
                              *arguments: Any) -> None:
        key = prefix + EXTRA_STATE
        _, _, missing, _, faults = arguments
        found = self.layout_faults(state[key]) if key in state else []
        if found:
            faults.extend(prefix + fault for fault in found)
            return
        super()._load_from_state_dict(state, prefix, *arguments)
        if key in missing:
            missing.remove(key)
