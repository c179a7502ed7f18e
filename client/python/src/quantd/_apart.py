"""Work that is safe from interrupts: calls into gRPC, and waiting."""

from __future__ import annotations

import os
import queue
import sys
import threading
import types
from typing import Any, Callable, Optional

# Queue of the jobs that a thread takes: a function and where its result goes,
# as (value, None) or (None, error).
_Jobs = queue.SimpleQueue[tuple[Callable[[], Any], "queue.SimpleQueue[Any]"]]

# Queues of the threads that have nothing to do; one but for interrupts.
_idle: list[_Jobs] = []

if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork.
    os.register_at_fork(after_in_child=_idle.clear)


class Condition(threading.Condition):
    """One whose block ends with the interrupt that came in `wait`.

    It may come while the lock is not held; the plain one then ends with an
    error of its own, because it has nothing to release.
    """

    def __exit__(self, exception_type: Optional[type[BaseException]],
                 exception: Optional[BaseException],
                 traceback: Optional[types.TracebackType]) -> None:
        try:
            super().__exit__(exception_type, exception, traceback)
        except RuntimeError:
            if exception_type is None:
                raise


def run(function: Callable[[], Any]) -> Any:
    """Calls it on another thread where this is the main thread.

    Ctrl-C raises KeyboardInterrupt in the main thread wherever that is, and in
    the midst of gRPC it would leave locks taken, on which later calls, and
    closing the channel, would wait for ever. Interrupted, this ends at once and
    the function goes on by itself.
    """
    # Other threads stand still while the interpreter ends.
    if threading.current_thread() is not threading.main_thread() or (
            sys.is_finalizing()):
        return function()
    jobs = _take_thread()
    if jobs is None:
        return function()
    # A new one each time: what an interrupt left may still be answered.
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    jobs.put((function, results))
    value, error = results.get()
    try:
        if error is not None:
            raise error
        return value
    finally:
        # Or the error would hold this frame, and that the error.
        del error


def _take_thread() -> Optional[_Jobs]:
    """The jobs of a thread that is idle; None: there are no more threads."""
    try:
        return _idle.pop()
    except IndexError:
        pass
    jobs: _Jobs = queue.SimpleQueue()
    try:
        # A thread costs more than most calls: it is kept.
        threading.Thread(target=_work, args=(jobs,), daemon=True,
                         name="quantd-call").start()
    except RuntimeError:
        return None
    return jobs


def _work(jobs: _Jobs) -> None:
    while True:
        function, results = jobs.get()
        result: tuple[Any, Optional[BaseException]]
        try:
            result = function(), None
        except BaseException as error:  # pylint: disable=broad-except
            result = None, error
        # After an interrupt another one may have taken its place.
        is_kept = not _idle
        if is_kept:
            _idle.append(jobs)
        results.put(result)
        # Not to be kept until there is another.
        del function, results, result
        if not is_kept:
            return
