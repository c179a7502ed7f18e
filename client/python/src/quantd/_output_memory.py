"""Memory for outputs, used again.

Pages that come fresh from the system cost more than the copy into them, several
times as much where a hypervisor has to find them first.
"""

from __future__ import annotations

import collections
import mmap
import threading
from typing import Optional

import numpy as np

from quantd.tensor import Array

# Below this the allocator of the process is as good.
_MIN_BYTES = 1 << 20
# Most bytes that are kept while nobody uses them.
_MOST_FREE_BYTES = 256 << 20
# Sizes are multiples of this, which is that of a huge page.
_UNIT_BYTES = 2 << 20
# A block serves an array that is smaller than itself by at most one part in so
# many, and a unit: it stays for as long as the array does.
_MOST_SLACK = 8


class _Use:
    """Object that an array holds on to, so that its block comes back with the
    last view of it."""

    def __init__(self, block: mmap.mmap, size: int, owner: OutputMemory
                 ) -> None:
        self._block = block
        self._owner = owner
        memory = np.frombuffer(block, np.uint8)
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (size,),
            "data": (memory.ctypes.data, False)}

    def __del__(self) -> None:
        # May run at any point of any thread, hence without waiting for a lock.
        freed = self._owner.freed
        if freed is not None:
            freed.append(self._block)
            self._owner.trim()


class OutputMemory:
    """Hands out arrays, and keeps up to 256 MiB of what came back for the next
    ones. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Came back since somebody last looked; None: closed.
        self.freed: Optional[collections.deque[mmap.mmap]]
        self.freed = collections.deque()
        # The one that came back last at the end.
        self._blocks: list[mmap.mmap] = []

    def take(self, size: int) -> Array:
        """An array of so many bytes, as uint8, of undefined content.

        Raises: MemoryError.
        """
        if size < _MIN_BYTES:
            return np.empty(size, np.uint8)
        rounded = -(-size // _UNIT_BYTES) * _UNIT_BYTES
        with self._lock:
            self._collect()
            fitting = [block for block in self._blocks if rounded <= len(block)
                       <= rounded + rounded // _MOST_SLACK]
            block = min(fitting, key=len) if fitting else None
            if block is not None:
                self._blocks.remove(block)
        self.trim()
        if block is None:
            block = _new_block(rounded)
        return np.asarray(_Use(block, size, self))

    def close(self) -> None:
        """Keeps nothing; what comes back later goes with its last array."""
        with self._lock:
            self.freed = None
            self._blocks.clear()

    def trim(self) -> None:
        """Takes what came back, unless a thread is at it: that looks again when
        it is done."""
        while self.freed and self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        """Takes what came back; the oldest goes to the system."""
        while self.freed:
            self._blocks.append(self.freed.popleft())
        total = sum(map(len, self._blocks))
        while total > _MOST_FREE_BYTES:
            total -= len(self._blocks.pop(0))


def _new_block(size: int) -> mmap.mmap:
    try:
        block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(str(error)) from error
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        try:
            block.madvise(advice)
        except OSError:
            # A system without them.
            pass
    return block
