"""Memory shared with a server on the same machine; see
proto/quantd/v1/shared_memory.proto."""

from __future__ import annotations

import collections
import mmap
import os
import socket
import threading
import time
from typing import Any, Iterator, Optional

import numpy as np
from google.protobuf.message import DecodeError

from quantd import errors
from quantd._exchange import Exchange, OutputExchange
from quantd._retries import Retries
from quantd._stream import Options
from quantd.tensor import Array
from quantd.v1 import shared_memory_pb2

# Offsets of spans must be multiples of this.
_SPAN_ALIGNMENT = 8
# Arrays up to half of this share regions of this size, in slots of a power of
# two; larger ones have a region of their own.
_SLOT_REGION_BYTES = 4 << 20
_MIN_SLOT_BYTES = 4096
# Below this a tensor is sooner on the stream than copied and named.
_MIN_STAGED_BYTES = 64 << 10
# All staging of a client; the server counts it against its memory budget.
_MAX_STAGING_BYTES = 256 << 20
_STAGING_UNIT_BYTES = 4 << 20
# Copied while the server works on what was copied before.
_STAGED_CHUNK_BYTES = 8 << 20
_REPLY_BYTES = 4096


class Region:
    """A mapping, and the connection that it lives as long as. Thread-safe."""

    def __init__(self, connection: socket.socket, region_id: bytes,
                 memory: Array) -> None:
        self._connection = connection
        self._id = region_id
        self.memory = memory
        self.address = memory.ctypes.data
        self.is_closed = False

    def close(self) -> None:
        """The server forgets it; the mapping stays while there are arrays."""
        self.is_closed = True
        self._connection.close()

    def is_lost(self) -> bool:
        """True if the server is gone; closes it then."""
        try:
            if not self.is_closed and self._connection.recv(1) == b"":
                self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        return self.is_closed

    def span(self, offset: int, size: int) -> shared_memory_pb2.SharedSpan:
        """Names bytes [offset, offset + size) to the server."""
        return shared_memory_pb2.SharedSpan(
            region_id=self._id, offset_bytes=offset, size_bytes=size)


# Free ones of one size: (region, offset).
_Slots = collections.deque[tuple[Region, int]]


class _Slot:
    """Object that an array of shared memory holds on to, so that its memory
    comes back with the last view of it."""

    def __init__(self, region: Region, offset: int, size: int,
                 free: Optional[_Slots]) -> None:
        self._region = region
        self._offset = offset
        self._free = free
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (size,),
            "data": (region.address + offset, False)}

    def __del__(self) -> None:
        # May run at any point of any thread, hence without a lock.
        if self._free is None:
            self._region.close()
        else:
            self._free.append((self._region, self._offset))


class RegionPlacement:
    """Place of the bytes of one exchange in regions: a Placement."""

    def __init__(self, pool: SharedMemory) -> None:
        self._pool = pool
        self._staging: Optional[Region] = None
        # (region, offset) of what is there already.
        self._payload: Optional[tuple[Region, int]] = None
        self._payload_is_staged = False
        self.output_is_staged = False
        # Memory that the server writes to, as uint8.
        self.output: Optional[Array] = None
        self._output_region: Optional[Region] = None

    @property
    def has_payload(self) -> bool:
        """True if the payload goes up by name."""
        return self._payload is not None

    @property
    def has_output(self) -> bool:
        """True if the output comes down by name."""
        return self.output is not None

    @property
    def is_lost(self) -> bool:
        """True if the server does not know the memory any more."""
        regions = [self._payload[0] if self._payload else None,
                   self._output_region]
        return any(region is not None and region.is_lost()
                   for region in regions)

    def name_payload(self, region: Region, offset: int) -> None:
        """The payload lies there."""
        self._payload = (region, offset)

    def name_output(self, region: Region, offset: int, size: int,
                    exchange: Exchange[Any]) -> None:
        """The output is to go there."""
        self._output_region = region
        self.output = region.memory[offset:offset + size]
        exchange.header.output.CopyFrom(region.span(offset, size))

    def stage(self, region: Region, payload_bytes: int, output_bytes: int,
              exchange: Exchange[Any]) -> None:
        """Takes a region for the payload, the output or both; 0 for not."""
        self._staging = region
        if payload_bytes:
            self._payload = (region, 0)
            self._payload_is_staged = True
        if output_bytes:
            self.output_is_staged = True
            self.name_output(region, _aligned(payload_bytes), output_bytes,
                             exchange)

    def send(self, payload: Array) -> Iterator[tuple[int, bytes]]:
        """(offset in the tensor, serialized span) of one part after another."""
        assert self._payload is not None
        region, begin = self._payload
        step = (_STAGED_CHUNK_BYTES if self._payload_is_staged
                else payload.nbytes)
        for offset in range(0, payload.nbytes, step):
            part = payload[offset:offset + step]
            at = begin + offset
            if self._payload_is_staged:
                region.memory[at:at + part.nbytes] = part
            yield offset, region.span(at, part.nbytes).SerializeToString()

    def release(self, is_over: bool) -> None:
        """Gives the staging region back. is_over: neither side uses it any
        more; otherwise it can not serve another tensor."""
        region, self._staging = self._staging, None
        if region is not None:
            self._pool.give_back(region, is_over)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


class SharedMemory:
    """The regions of one client. Thread-safe."""

    def __init__(self, path: str, options: Options) -> None:
        """path: of the socket that hands regions out."""
        self._path = path
        self._options = options
        self._lock = threading.Lock()
        # Regions of arrays; those that were closed are dropped now and then.
        self._regions: list[Region] = []
        self._free_slots: dict[int, _Slots] = {}
        self._free_staging: list[Region] = []
        self._staging_bytes = 0
        self._is_known_to_work = False
        self._is_closed = False

    def close(self) -> None:
        """The server forgets all regions; arrays stay readable."""
        with self._lock:
            self._is_closed = True
            for region in self._regions + self._free_staging:
                region.close()
            self._regions.clear()
            self._free_staging.clear()
            self._free_slots.clear()

    def allocate(self, size: int) -> Array:
        """An array of `size` bytes, as uint8; zeros, or what was there before.

        Raises: SHARED_MEMORY_UNAVAILABLE, and those of RegionReply.
        """
        if 2 * size > _SLOT_REGION_BYTES:
            region = self._request(size)
            with self._lock:
                self._add(region)
            return np.asarray(_Slot(region, 0, size, None))
        slot = max(_MIN_SLOT_BYTES, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free_slots.setdefault(slot, collections.deque())
        while True:
            try:
                region, offset = free.popleft()
            except IndexError:
                region = self._request(_SLOT_REGION_BYTES)
                with self._lock:
                    self._add(region)
                free.extend((region, offset) for offset in
                            range(0, _SLOT_REGION_BYTES, slot))
                continue
            if not region.is_lost():
                return np.asarray(_Slot(region, offset, size, free))

    def place(self, exchange: Exchange[Any]) -> None:
        """Gives an exchange a placement where that helps.

        Raises: SHARED_MEMORY_UNAVAILABLE when the server never had any.
        """
        placement = RegionPlacement(self)
        payload = exchange.payload
        staged_payload = staged_output = 0
        found = self._find(payload)
        if found is not None:
            placement.name_payload(*found)
        elif payload.nbytes >= _MIN_STAGED_BYTES:
            staged_payload = payload.nbytes
        if isinstance(exchange, OutputExchange):
            out = exchange.caller_out
            found = self._find(out) if out is not None else None
            if out is not None and found is not None:
                placement.name_output(*found, out.nbytes, exchange)
            elif exchange.most_output_bytes >= _MIN_STAGED_BYTES:
                staged_output = exchange.most_output_bytes
        if staged_payload or staged_output:
            region = self._take_staging(_aligned(staged_payload) +
                                        staged_output)
            if region is not None:
                placement.stage(region, staged_payload, staged_output,
                                exchange)
        if placement.has_payload or placement.has_output:
            exchange.placement = placement

    def give_back(self, region: Region, is_usable: bool) -> None:
        """The end of a staging region's use."""
        with self._lock:
            if is_usable and not self._is_closed:
                self._free_staging.append(region)
                return
            self._staging_bytes -= region.memory.nbytes
        region.close()

    def _add(self, region: Region) -> None:
        self._regions = [known for known in self._regions
                         if not known.is_closed]
        self._regions.append(region)
        if self._is_closed:
            region.close()

    def _find(self, data: Array) -> Optional[tuple[Region, int]]:
        """Region and offset of an array's bytes, if the server can see them."""
        if not data.nbytes:
            return None
        address = data.ctypes.data
        with self._lock:
            for region in self._regions:
                offset = address - region.address
                if 0 <= offset <= region.memory.nbytes - data.nbytes:
                    usable = not region.is_closed and (
                        offset % _SPAN_ALIGNMENT == 0)
                    return (region, offset) if usable else None
        return None

    def _take_staging(self, size: int) -> Optional[Region]:
        """A region of at least `size` bytes; None: the stream must do."""
        size = -(-size // _STAGING_UNIT_BYTES) * _STAGING_UNIT_BYTES
        with self._lock:
            fitting = [region for region in self._free_staging
                       if region.memory.nbytes >= size]
            if fitting:
                region = min(fitting, key=lambda fit: fit.memory.nbytes)
                self._free_staging.remove(region)
                if not region.is_lost():
                    return region
                self._staging_bytes -= region.memory.nbytes
            # One that is large enough takes the place of those that were not.
            for region in self._free_staging:
                self._staging_bytes -= region.memory.nbytes
                region.close()
            self._free_staging.clear()
            if self._staging_bytes + size > _MAX_STAGING_BYTES:
                return None
            self._staging_bytes += size
        try:
            return self._request(size, may_wait=False)
        except errors.QuantdError as error:
            with self._lock:
                self._staging_bytes -= size
            # Without room for a region there is room for chunks.
            if error.reason in ("MEMORY_BUDGET", "REGION_LIMIT") or (
                    error.reason == "SHARED_MEMORY_UNAVAILABLE" and
                    self._is_known_to_work):
                return None
            raise

    def _request(self, size: int, may_wait: bool = True) -> Region:
        """A region of the server, asked for again where that may help."""
        retries = Retries()
        while True:
            try:
                if self._is_closed:
                    raise errors.client_closed()
                region = self._request_once(size)
                self._is_known_to_work = True
                return region
            except errors.QuantdError as error:
                helps = error.retry_after is not None or (
                    error.reason == "SHARED_MEMORY_UNAVAILABLE" and
                    self._is_known_to_work)
                if not (helps and may_wait) or (
                        not self._options.allows(retries, error)):
                    raise
                time.sleep(self._options.pause(retries, error))

    def _request_once(self, size: int) -> Region:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files: list[int] = []
        try:
            connection.settimeout(self._options.timeout)
            connection.connect(self._path)
            connection.sendall(shared_memory_pb2.RegionRequest(
                size_bytes=size).SerializeToString())
            packet, files, _, _ = socket.recv_fds(connection, _REPLY_BYTES, 1)
            if not packet:
                raise errors.shared_memory_unavailable(
                    self._path, "the server closed the connection")
            reply = shared_memory_pb2.RegionReply.FromString(packet)
            if reply.HasField("error"):
                raise errors.from_tensor_error(reply.error)
            if not files or reply.size_bytes < size:
                raise errors.response_malformed(
                    f"expected a region of {size} bytes and its file, got "
                    f"{reply.size_bytes} and {len(files)} files")
            mapping = mmap.mmap(
                files[0], reply.size_bytes,
                mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            connection.setblocking(False)
            return Region(connection, reply.region_id,
                          np.frombuffer(mapping, np.uint8))
        except errors.QuantdError:
            connection.close()
            raise
        except DecodeError as error:
            connection.close()
            raise errors.response_malformed(str(error)) from error
        except (OSError, ValueError) as error:
            connection.close()
            raise errors.shared_memory_unavailable(self._path, str(error)
                                                   ) from error
        finally:
            for file in files:
                os.close(file)
