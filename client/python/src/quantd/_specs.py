"""Choice of the tensors of a model that get each spec, as quantctl's --spec
says it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any, Iterable, Mapping, Optional, Sequence, Union

from quantd import _files, _globs, errors
from quantd._files import FileTensor
from quantd.encoding import EncodingSpec, Granularity, as_granularity
from quantd.tensor import FORMATS, format_info
from quantd.v1 import encoding_pb2

# A spec of all, "PATTERN=SPEC" or "@FILE" with such lines as of quantctl sweep,
# several of them, or specs by pattern.
SpecsLike = Union[EncodingSpec, str, Sequence[str],
                  Mapping[str, Union[EncodingSpec, str]]]
_SPACES = " \t\n\v\f\r"
_KINDS = {"default": 0, "per_tensor": 1, "per_channel": 2, "group": 3,
          "blocks": 4}


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


def warn_of_one_scale(name: str, granularity: Granularity,
                      shape: Sequence[int], stacklevel: int) -> None:
    """Warns of a tensor of one dimension that was quantized."""
    if (len(shape) != 1 or shape[0] < 2 or
            granularity.kind not in ("per_channel", "group")):
        return
    warnings.warn(
        f"quantd: tensor {name!r}: one scale for all of it, not one for each " +
        (f"group of {granularity.group_size}; blocks of one dimension make "
         "such" if granularity.kind == "group" else
         "channel, as it has one dimension"),
        RuntimeWarning, stacklevel=stacklevel + 1)


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

    def text(self) -> bytes:
        """Text that tells specs apart, with the bytes that quantctl takes."""
        granularity = self.granularity
        blocks = ",".join(map(str, granularity.block_size))
        size = granularity.group_size
        axis = granularity.axis if granularity.kind == "per_channel" else 0
        spec: bytes = self._without_blocks.SerializeToString(
            deterministic=True)
        kind = _KINDS[granularity.kind]
        return spec + f" {kind} {axis} {size} {blocks}".encode()

    @functools.cached_property
    def _without_blocks(self) -> encoding_pb2.EncodingSpec:
        """Not to be changed."""
        return dataclasses.replace(self.spec, granularity=None).to_proto()


class SpecSet:
    """The first override whose pattern matches a name, otherwise the base."""

    def __init__(self, specs: SpecsLike) -> None:
        """Raises: ARGUMENT_INVALID, FILE_UNREADABLE."""
        self.base: Optional[Template] = None
        self.overrides: list[tuple[str, Template]] = []
        if isinstance(specs, Mapping):
            for pattern, spec in specs.items():
                self.overrides.append((pattern, template_of(spec)))
        elif isinstance(specs, EncodingSpec):
            self.base = template_of(specs)
        elif isinstance(specs, (str, list, tuple)):
            for text in [specs] if isinstance(specs, str) else specs:
                self._add(text)
        else:
            raise errors.argument_invalid(
                f"expected specs, got {type(specs).__name__}", "specs")
        if self.base is None and not self.overrides:
            raise errors.argument_invalid("expected a spec, got none", "specs")

    def _add(self, text: str) -> None:
        if not isinstance(text, str):
            raise errors.argument_invalid(
                f"expected SPEC or PATTERN=SPEC, got {type(text).__name__}",
                "specs")
        if text.startswith("@"):
            # Lines end as for quantctl: names may have other line breaks and
            # spaces.
            lines = [line.strip(_SPACES) for line in
                     _files.read_text(text[1:]).split("\n")
                     if line.strip(_SPACES)]
            if not lines or any(line.startswith("@") for line in lines):
                raise errors.argument_invalid(
                    f"expected specs in {text[1:]}", "specs")
            for line in lines:
                self._add(line)
            return
        pattern, equals, spec = text.partition("=")
        word = pattern.partition(":")[0]
        # Only a spec whose format is known can be meant without a pattern.
        if not equals or word.lower().replace("-", "_") in FORMATS:
            if self.base is not None:
                raise errors.argument_invalid(
                    f"expected one spec without a pattern, got {text!r} too",
                    "specs")
            self.base = template_of(text)
            return
        self.overrides.append((pattern, template_of(spec)))

    def of(self, name: str) -> Optional[Template]:
        """None: the tensor is left as it is."""
        for pattern, template in self.overrides:
            if _globs.matches(pattern, name):
                return template
        return self.base

    @property
    def has_importance(self) -> bool:
        """True if a spec takes importance from stored statistics."""
        return any(template is not None and
                   template.spec.importance is not None and
                   template.spec.importance.weight is None for template in (
                       self.base, *(spec for _, spec in self.overrides)))

    def text(self) -> bytes:
        """Text that tells sets apart, with the bytes that quantctl takes."""
        parts = [b"\n" + pattern.encode() + b"=" + template.text()
                 for pattern, template in self.overrides]
        if self.base is not None:
            parts.append(b"\n=" + self.base.text())
        return b"".join(parts)


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

    def select(self, tensors: Iterable[FileTensor],
               specs: Optional[SpecSet] = None) -> list[FileTensor]:
        """Tensors that are taken, and have a spec where there are specs.

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
        if specs is not None:
            _globs.check_each_takes(
                [pattern for pattern, _ in specs.overrides],
                [tensor.name for tensor in taken], what, "specs")
            taken = [tensor for tensor in taken
                     if specs.of(tensor.name) is not None]
        if not taken:
            raise errors.argument_invalid(
                f"expected {what}, got none among {len(names)}", "source")
        return taken

    def text(self) -> bytes:
        """Text that tells filters apart, with the bytes that quantctl takes."""
        return ("\n" + "\n+".join(self.include) + "\n" +
                "\n-".join(self.exclude) + f"\n{self.min_rank}").encode()


def _match_any(patterns: Iterable[str], name: str) -> bool:
    return any(_globs.matches(pattern, name) for pattern in patterns)
