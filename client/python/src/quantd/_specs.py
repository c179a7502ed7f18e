"""Choice of the tensors of a model that get each spec, as quantctl's --spec
says it."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from typing import Any, Iterable, Mapping, Sequence, Union

from google.protobuf import json_format

from quantd import _globs, errors
from quantd._files import FileTensor
from quantd.encoding import EncodingSpec, Granularity, as_granularity
from quantd.tensor import format_info
from quantd.v1 import encoding_pb2

# A spec of all, "PATTERN=SPEC" or "@FILE" with such lines as of quantctl sweep,
# several of them, or specs by pattern.
SpecsLike = Union[EncodingSpec, str, Sequence[str],
                  Mapping[str, Union[EncodingSpec, str]]]


def block_size_of(granularity: Granularity, shape: Sequence[int]
                  ) -> tuple[int, ...]:
    """Block size of a tensor; empty for one scale, and for what the format has.
    Raises: ARGUMENT_INVALID."""
    rank = len(shape)
    if granularity.kind in ("per_channel", "group") and rank >= 2:
        axis = granularity.axis + (rank if granularity.axis < 0 else 0)
        if not 0 <= axis < rank:
            raise errors.argument_invalid(
                f"expected an axis below the rank {rank}, got "
                f"{granularity.axis}")
        is_group = granularity.kind == "group"
        sizes = [1 if is_group else 0] * rank
        sizes[axis] = granularity.group_size if is_group else 1
        return tuple(sizes)
    if granularity.kind == "blocks":
        if len(granularity.block_size) != rank:
            raise errors.argument_invalid(
                f"expected a tensor of rank {len(granularity.block_size)} for "
                f"the block size, got rank {rank}")
        return tuple(granularity.block_size)
    return ()


@dataclasses.dataclass(frozen=True)
class Template:
    """A spec, whatever the shape of the tensor."""

    spec: EncodingSpec

    @functools.cached_property
    def granularity(self) -> Granularity:
        """Granularity of the spec."""
        return as_granularity(self.spec.granularity)

    def of(self, shape: Sequence[int]) -> encoding_pb2.EncodingSpec:
        """For a tensor of that shape. Raises: ARGUMENT_INVALID."""
        message = encoding_pb2.EncodingSpec()
        message.CopyFrom(self._without_blocks)
        message.block_size.extend(self._block_size(shape))
        return message

    def spec_of(self, shape: Sequence[int]) -> EncodingSpec:
        """Like of(), but as an EncodingSpec. Raises: ARGUMENT_INVALID."""
        # Raises where the spec has no message.
        assert self._without_blocks is not None
        return dataclasses.replace(
            self.spec, granularity=self._block_size(shape) or None)

    def _block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        block_size = block_size_of(self.granularity, shape)
        if not block_size and self.granularity.kind != "default" and (
                format_info(self.spec.format).comes_in_blocks):
            # Without entries it would take its own blocks.
            return (0,) * len(shape)
        return block_size

    def text(self) -> str:
        """The spec as the JSON that quantctl takes. Raises: ARGUMENT_INVALID."""
        granularity = self.granularity
        kind = granularity.kind.replace("_", "-")
        if kind == "group":
            kind = f"group:{granularity.group_size}:{granularity.axis}"
        elif kind == "per-channel":
            kind = f"per-channel:{granularity.axis}"
        elif kind == "blocks":
            kind = "block=" + ",".join(map(str, granularity.block_size))
        return json.dumps({
            "spec": json_format.MessageToDict(self._without_blocks),
            "granularity": kind})

    @functools.cached_property
    def _without_blocks(self) -> encoding_pb2.EncodingSpec:
        """Not to be changed."""
        return dataclasses.replace(self.spec, granularity=None).to_proto()


def template_of(spec: Any) -> Template:
    """Raises: ARGUMENT_INVALID."""
    if isinstance(spec, str):
        spec = EncodingSpec.parse(spec)
    if not isinstance(spec, EncodingSpec):
        raise errors.argument_invalid(
            f"expected a spec, got {type(spec).__name__}", "specs")
    return Template(spec)


@dataclasses.dataclass(frozen=True)
class Filter:
    """Choice of the tensors that are taken: reals of at least so many
    dimensions whose name matches one of `include`, or any without, and none of
    `exclude`."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    min_rank: int = 2

    def takes(self, tensor: FileTensor) -> bool:
        """True if the tensor is taken."""
        return self._is_of_kind(tensor) and (
            not self.include or _match_any(self.include, tensor.name)
        ) and not _match_any(self.exclude, tensor.name)

    def _is_of_kind(self, tensor: FileTensor) -> bool:
        return tensor.element_type is not None and (
            len(tensor.shape) >= self.min_rank)

    def select(self, tensors: Iterable[FileTensor]) -> list[FileTensor]:
        """Tensors that are taken.

        Raises: ARGUMENT_INVALID for a pattern that takes none, or where none is
            left.
        """
        tensors = list(tensors)
        names = [tensor.name for tensor in tensors]
        taken = [tensor for tensor in tensors if self.takes(tensor)]
        what = ("a tensor of floats" + (
            f" with at least {self.min_rank} dimensions (see min_rank)"
            if self.min_rank > 0 else ""))
        _globs.check_all_match(
            self.include, [tensor.name for tensor in tensors
                           if self._is_of_kind(tensor)], what, "include")
        _globs.check_all_match(self.exclude, names, "a tensor", "exclude")
        if not taken:
            raise errors.argument_invalid(
                f"expected {what}, got none among {len(names)}", "source")
        return taken


def _match_any(patterns: Iterable[str], name: str) -> bool:
    return any(_globs.matches(pattern, name) for pattern in patterns)
