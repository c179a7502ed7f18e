"""The retries of a call."""

from __future__ import annotations

import math
import time
from typing import Optional

from quantd import errors


class Retries:
    """The retries of a call since something was answered.

    is_over: there are to be no more.
    patience: seconds after which there are no more, whatever the caller allows.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_over = False
        self.patience = math.inf
        self._closed: Optional[errors.QuantdError] = None
        self._since = 0.0

    def restart_clock(self) -> None:
        """Its time begins now, if it has not begun."""
        self._since = time.monotonic()

    def left(self, seconds: float) -> float:
        """Seconds that are left of `seconds`."""
        if not self.count:
            return seconds
        return self._since + seconds - time.monotonic()

    def limit(self, patience: float, error: errors.QuantdError) -> None:
        """The server closes connections at once: less patience, if it is
        less."""
        if patience < self.patience:
            self.patience = patience
            self._closed = error

    def explained(self, error: errors.QuantdError) -> errors.QuantdError:
        """Returns the error, or one that tells more of why nobody answers."""
        return (error if self._closed is None or
                error.reason != "SERVER_UNREACHABLE" else self._closed)

    def add(self) -> None:
        """One more."""
        if not self.count:
            self.restart_clock()
        self.count += 1
