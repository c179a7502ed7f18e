"""The retries of a call."""

from __future__ import annotations

import time


class Retries:
    """The retries of a call since something was answered.

    is_over: there are to be no more.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_over = False
        self._since = 0.0

    def restart_clock(self) -> None:
        """Its time begins now, if it has not begun."""
        self._since = time.monotonic()

    def left(self, seconds: float) -> float:
        """Of that time."""
        if not self.count:
            return seconds
        return self._since + seconds - time.monotonic()

    def add(self) -> None:
        """One more."""
        if not self.count:
            self.restart_clock()
        self.count += 1
