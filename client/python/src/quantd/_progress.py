"""Tells how far a call is."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Optional, Union

from quantd import errors

# True shows a bar of tqdm on stderr; a function is called with the number of
# bytes that were done since its last call.
ProgressLike = Union[bool, Callable[[int], object]]


class Progress:
    """A context manager around a call. Not thread-safe."""

    def __init__(self, wanted: ProgressLike, what: str,
                 total_bytes: Optional[int]) -> None:
        """Raises: ARGUMENT_INVALID for True without tqdm."""
        self._bar: Any = None
        self._tell: Callable[[int], object] = lambda done: None
        if callable(wanted):
            self._tell = wanted
        elif wanted:
            try:
                # pylint: disable-next=import-outside-toplevel
                import tqdm
            except ImportError as error:
                raise errors.argument_invalid(
                    "a bar needs tqdm (on Debian python3-tqdm)", "progress"
                ) from error
            self._bar = tqdm.tqdm(
                desc=what, total=total_bytes, unit="B", unit_scale=True,
                unit_divisor=1024)
            self._tell = self._bar.update

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, size_bytes: int) -> None:
        """So much more is done."""
        self._tell(size_bytes)

    def leave_out(self, item: Any) -> None:
        """Takes one off those whose bytes were summed up: it is not done."""
        size = _bytes_of(item)
        if self._bar is not None and self._bar.total and size:
            self._bar.total -= size
            self._bar.refresh()


def _bytes_of(item: Any) -> Optional[int]:
    """Size of the array of an item; None where that has none."""
    array = item[1] if isinstance(item, tuple) else getattr(
        item, "array", getattr(item, "codes", None))
    size = getattr(array, "nbytes", None)
    if size is None and hasattr(array, "element_size"):
        # A tensor of torch before 2.0.
        size = array.element_size() * array.nelement()
    return None if size is None else int(size)


def total_bytes(items: Iterable[Any]) -> Optional[int]:
    """Size of all arrays, where they are all there already; otherwise None."""
    if not hasattr(items, "__len__"):
        return None
    total = 0
    for item in items:
        size = _bytes_of(item)
        if size is None:
            return None
        total += size
    return total
