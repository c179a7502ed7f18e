"""Where calls into gRPC are safe from interrupts."""

from __future__ import annotations

import threading
from typing import Any, Callable


def run(function: Callable[[], Any]) -> Any:
    """Calls it on a thread of its own where this is the main thread.

    Ctrl-C raises KeyboardInterrupt in the main thread wherever that is, and in
    the midst of gRPC it would leave locks taken, on which later calls, and
    closing the channel, would wait for ever. Interrupted, this ends at once and
    the function goes on by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    results: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # pylint: disable=broad-except
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True, name="quantd-call")
    try:
        thread.start()
    except RuntimeError:
        # There are none any more while the interpreter ends.
        return function()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
