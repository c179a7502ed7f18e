"""Tensors of torch that several processes have parts of: DTensor, of torch 2.
Known by what they can do, as older versions have none."""

from __future__ import annotations

from typing import Any, Optional

from quantd import _arrays, errors
from quantd.tensor import Slice


def is_sharded(array: Any) -> bool:
    """True for a DTensor, however it is placed."""
    return _arrays.is_torch(array) and all(
        hasattr(array, name) for name in ("placements", "device_mesh",
                                          "to_local"))


def part_of(array: Any, slice_of: Optional[Slice]
            ) -> tuple[Any, Optional[Slice]]:
    """The part of a DTensor that is here, and where it lies; others as they
    are. Raises: ARGUMENT_INVALID."""
    if not is_sharded(array):
        return array, slice_of
    if slice_of is not None:
        raise errors.argument_invalid("a DTensor says itself where it lies",
                                      "slice_of")
    local = array.to_local()
    shape = [int(extent) for extent in array.shape]
    offset, extents = [0] * len(shape), list(shape)
    for placement, rank, count in _placements(array):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or hasattr(placement, "split_factor"):
            raise errors.argument_invalid(
                f"expected parts that follow each other, got {placement}; "
                "redistribute the tensor first", "array")
        # Cuts what the placements before this one have left, like torch.chunk.
        dimension = placement.dim % len(shape)
        most = -(-extents[dimension] // count)
        begin = min(rank * most, extents[dimension])
        extents[dimension] = min(most, extents[dimension] - begin)
        offset[dimension] += begin
    if extents != [int(extent) for extent in local.shape]:
        raise errors.argument_invalid(
            f"expected a part of {tuple(extents)} here, got "
            f"{tuple(local.shape)}", "array")
    return local, None if extents == shape else Slice(tuple(shape),
                                                      tuple(offset))


def is_counted_here(array: Any) -> bool:
    """True if this process is the first of those that have the same part."""
    return not is_sharded(array) or all(
        rank == 0 for placement, rank, _ in _placements(array)
        if placement.is_replicate())


def _placements(array: Any) -> list[tuple[Any, int, int]]:
    """Placement of the tensor along each dimension of the mesh, where this
    process is, and how many there are."""
    coordinate = array.device_mesh.get_coordinate()
    if coordinate is None:
        raise errors.argument_invalid(
            "this process has no part of the tensor", "array")
    return [(placement, int(coordinate[axis]),
             int(array.device_mesh.size(axis)))
            for axis, placement in enumerate(array.placements)]
