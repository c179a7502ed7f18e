"""What the modules of torch share: scales of blocks, and numbers that keep
their type."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch

from quantd import errors


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
