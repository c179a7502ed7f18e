"""A proxy in front of servers that halts in the midst of a tensor."""

import contextlib
import math
import socket
import threading


class HoldingProxy:
    """Passes on what clients send to servers until it is told to hold; a
    context manager. Has an address in front of each server."""

    def __init__(self, *servers):
        self._listeners = [socket.create_server(("127.0.0.1", 0))
                           for _ in servers]
        self.addresses = [f"127.0.0.1:{listener.getsockname()[1]}"
                          for listener in self._listeners]
        self.holds = threading.Event()
        # The place of the server to which nothing gets.
        self.held = None
        self._lock = threading.Lock()
        self._left = [math.inf] * len(servers)
        for place, server in enumerate(servers):
            threading.Thread(target=self._accept, args=(place, server),
                             daemon=True).start()

    @property
    def address(self):
        """That of the only server."""
        (address,) = self.addresses
        return address

    def hold_after(self, size_bytes):
        """From now on the first server to which more is sent gets so much at
        most; the rest never arrives."""
        with self._lock:
            self.holds.clear()
            self.held = None
            self._left = [size_bytes] * len(self._left)

    def _passes(self, place, size_bytes):
        with self._lock:
            self._left[place] -= size_bytes
            if self._left[place] < 0 and self.held is None:
                self.held = place
                self.holds.set()
            return self.held != place

    def _accept(self, place, server):
        host, port = server.rsplit(":", 1)
        while True:
            try:
                client, _ = self._listeners[place].accept()
            except OSError:
                return
            try:
                onward = socket.create_connection((host, int(port)))
            except OSError:
                # The server is away, and so is what is in front of it.
                client.close()
                continue
            for pump in ((client, onward, place), (onward, client, None)):
                threading.Thread(target=self._pump, args=pump,
                                 daemon=True).start()

    def _pump(self, source, target, place):
        """`place`: of the server that gets it; None for a client."""
        try:
            while data := source.recv(1 << 14):
                if place is None or self._passes(place, len(data)):
                    target.sendall(data)
        except OSError:
            # Of a server that was killed, for one.
            pass
        finally:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)
            source.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
