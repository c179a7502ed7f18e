"""Tensors that share a scale, because a runtime fuses them: it reads the scale
of one of them for all. As client/models/tie_groups.h."""

import dataclasses
import re
from typing import Any, Iterable, Optional, Sequence, Union

import grpc

from quantd import errors
from quantd._scale_stream import scale_type_of
from quantd.encoding import OUTER_SCALE_TYPES
from quantd.tensor import FORMATS

# True: what runtimes fuse, by the usual names; False: none; patterns, such as
# "{layer}.self_attn.{q,k,v}_proj.weight", come before those of True.
TiesLike = Union[bool, Iterable[str]]

DEFAULTS = (
    "{module}.{q,k,v}_proj.weight",
    "{module}.{q_a_proj,kv_a_proj_with_mqa}.weight",
    "{module}.{query,key,value}.weight",
    "{module}.{wq,wk,wv}.weight",
    "{module}.{gate,up}_proj.weight",
    "{module}.{w1,w3}.weight",
)

# The weights of the experts of a layer: of each, or of all in two tensors.
_EXPERTS = re.compile(
    r"((?:.*?\.)?experts)\.(?:[0-9]+\..+\.weight|"
    r"(?:gate_up_proj|down_proj)(?:\.weight)?)", re.DOTALL)

_PIECE = re.compile(r"(\*)|\{([^{}]+)\}|([^*{}]+)")


class Pattern:
    """{A,B} is one of these texts; {NAME} is one or more characters, the same
    in a group; * is any characters."""

    def __init__(self, text: str) -> None:
        """Raises: ARGUMENT_INVALID."""
        pieces = list(_PIECE.finditer(text))
        if "".join(piece.group() for piece in pieces) != text:
            raise _error(text, "{A,B} or {NAME} in braces")
        self.text = text
        self._label: list[Optional[str]] = []
        regex = ""
        ties = False
        for piece in pieces:
            star, braces, plain = piece.groups()
            is_choice = braces is not None and "," in braces
            ties = ties or star is not None or is_choice
            self._label.append(None if braces is not None and not is_choice
                               else piece.group())
            if star is not None:
                regex += ".*"
            elif plain is not None:
                regex += re.escape(plain)
            elif is_choice:
                regex += f"(?:{'|'.join(map(re.escape, braces.split(',')))})"
            else:
                regex += "(.+)"
        if not ties:
            raise _error(text, "{A,B,...} or * in it, such as "
                         "{layer}.self_attn.{q,k,v}_proj.weight")
        self._regex = re.compile(regex, re.DOTALL)

    def label_of(self, name: str) -> Optional[str]:
        """Label of a name, the same for all names of a group; None for one that
        does not match."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        captures = iter(match.groups())
        return "".join(next(captures) if piece is None else piece
                       for piece in self._label)


def _error(text: str, what: str) -> errors.QuantdError:
    return errors.argument_invalid(f"tie {text!r}: expected {what}", "ties")


@dataclasses.dataclass
class NamedTies:
    """A group of tensors whose statistics are stored. With one_encoding they
    share one encoding where the spec has no outer scale."""

    tensors: list[str]
    one_encoding: bool


class Ties:
    """Patterns, the first of which takes a name."""

    def __init__(self, ties: TiesLike) -> None:
        """Raises: ARGUMENT_INVALID."""
        if isinstance(ties, str):
            raise errors.argument_invalid(
                f"expected True, False or a list of patterns, got {ties!r}",
                "ties")
        self._has_defaults = ties is not False
        given = [] if isinstance(ties, bool) else list(ties)
        self._given = [Pattern(text) for text in given]
        self._patterns = self._given + (
            [Pattern(text) for text in DEFAULTS] if self._has_defaults
            else [])

    def _groups(self, names: Sequence[str]) -> list[tuple[int, str, list[int]]]:
        """The groups of two or more: indices of their pattern and of their
        tensors."""
        found: dict[tuple[int, str], list[int]] = {}
        for number, name in enumerate(names):
            for index, pattern in enumerate(self._patterns):
                label = pattern.label_of(name)
                if label is not None:
                    found.setdefault((index, label), []).append(number)
                    break
        tied = {index for (index, _), members in found.items()
                if len(members) > 1}
        for index, pattern in enumerate(self._given):
            if index not in tied:
                raise errors.argument_invalid(
                    "expected two tensors or more to tie by "
                    f"{pattern.text!r}, got none that are quantized", "ties")
        return [(index, label, members) for (index, label), members
                in found.items() if len(members) > 1]

    def matters(self, specs: Iterable[Any]) -> bool:
        """True if there may be groups where these are all specs."""
        return bool(self._given) or (self._has_defaults and any(
            map(self.matters_of, specs)))

    @staticmethod
    def matters_of(spec: Any) -> bool:
        """True if a spec has outer scales."""
        return scale_type_of(spec) in OUTER_SCALE_TYPES

    def raise_unless_optional(self, error: errors.QuantdError) -> None:
        """Takes the error of names that could not be listed: the defaults are
        left out for a caller who may not list them."""
        if self._given or error.code != grpc.StatusCode.PERMISSION_DENIED:
            raise error

    def find_named(self, candidates: Sequence[tuple[str, Any]]
                   ) -> list[NamedTies]:
        """The groups among names and their specs, in the order of their first
        tensors. Those of given patterns share one encoding where their spec has
        no outer scale; those of the defaults are not tied then, nor if their
        specs differ.

        Raises: ARGUMENT_INVALID for a given pattern that ties none, or some of
            different specs.
        """
        groups = []
        for index, label, members in self._groups(
                [name for name, _ in candidates]):
            first, spec = candidates[members[0]]
            is_given = index < len(self._given)
            other = next((candidates[member] for member in members
                          if candidates[member][1] is not spec
                          and candidates[member][1] != spec), None)
            if other is not None and is_given:
                raise errors.argument_invalid(
                    f"{label}: tied tensors share a scale; expected "
                    + _different_specs(first, spec, *other), "ties")
            if other is None and (is_given or self.matters_of(spec)):
                groups.append(NamedTies(
                    [candidates[member][0] for member in members], is_given))
        return groups

    def of_names(self, names: Sequence[str]) -> list[list[str]]:
        """The groups of two or more among names of matrices, whatever becomes
        of them. With the defaults, groups that share no scale follow: the
        matrices of all experts of a layer, which runtimes take as one module.

        Raises: ARGUMENT_INVALID for a given pattern that ties none.
        """
        groups = [[names[member] for member in members]
                  for _, _, members in self._groups(names)]
        layers: dict[str, list[str]] = {}
        for name in names if self._has_defaults else ():
            match = _EXPERTS.fullmatch(name)
            if match is not None:
                layers.setdefault(match.group(1), []).append(name)
        return groups + [members for members in layers.values()
                         if len(members) > 1]


def _different_specs(name: str, spec: Any, other: str, other_spec: Any) -> str:
    return (f"one spec for all, got different ones for {name!r} "
            f"({FORMATS.name(spec.format)}) and {other!r} "
            f"({FORMATS.name(other_spec.format)})")
