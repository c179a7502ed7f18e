"""Patterns over names of tensors, as the service and quantctl take them."""

from __future__ import annotations

from typing import Iterable

from quantd import errors


def matches(pattern: str, name: str) -> bool:
    """True if the whole name is what the pattern says: "*" stands for any
    characters, "?" for one, everything else for itself."""
    p = n = 0
    star = star_name = -1
    while n < len(name):
        if p < len(pattern) and pattern[p] == "*":
            star, star_name = p, n
            p += 1
        elif p < len(pattern) and pattern[p] in ("?", name[n]):
            p += 1
            n += 1
        elif star >= 0:
            # The last star takes one more: no earlier one can help.
            star_name += 1
            p, n = star + 1, star_name
        else:
            return False
    return not pattern[p:].strip("*")


def check_all_match(patterns: Iterable[str], names: Iterable[str],
                    what: str, field: str) -> None:
    """what: are the names of, e.g. "a tensor of acme/net, main".

    Raises: ARGUMENT_INVALID for the first pattern that matches none.
    """
    names = list(names)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise errors.argument_invalid(
                f"expected a pattern, got {type(pattern).__name__}", field)
        if not any(matches(pattern, name) for name in names):
            raise errors.argument_invalid(
                f"expected the pattern {pattern!r} to match the name of "
                f"{what}; it matches none of {len(names)}", field)


def check_each_takes(patterns: Iterable[str], names: Iterable[str],
                     what: str, field: str) -> None:
    """Like check_all_match, but for patterns of which the first that matches a
    name takes it.

    Raises: ARGUMENT_INVALID also for a pattern that takes none because earlier
        ones take all that it matches.
    """
    patterns, names = list(patterns), list(names)
    check_all_match(patterns, names, what, field)
    taking = {next((i for i, pattern in enumerate(patterns)
                    if matches(pattern, name)), -1) for name in names}
    for i, pattern in enumerate(patterns):
        if i not in taking:
            count = sum(matches(pattern, name) for name in names)
            raise errors.argument_invalid(
                f"expected the pattern {pattern!r} to take {what}; earlier "
                f"patterns take all {count} that it matches. The first pattern "
                "that matches counts, so put the narrower one first", field)
