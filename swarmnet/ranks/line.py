"""The pipe between the peer process and one rank: JSON packets, and descriptors of shared memory beside them.

A stream socket pair. A packet is its length (8 bytes) and JSON; numbers cross exactly, infinities and NaN too. The
peer's end never blocks, so a rank that reads nothing cannot hold it up; the rank's end always does. Knows no order.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from swarmnet.errors import BadMessage, Overflow, Refused, RejectCode

Packet = Mapping[str, Any]


class LineEnded(Exception):
    """The other end is closed, and all it said has been heard: its process is gone."""


LENGTH_BYTES = 8
CHUNK_BYTES = 1 << 18


def packed(packet: Packet) -> bytes:
    """The bytes of a packet. Raises TypeError, ValueError if it is not JSON."""
    body = json.dumps(packet, separators=(",", ":")).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def receive_with_descriptor(end: socket.socket, count: int) -> tuple[bytes, int | None]:
    """Up to `count` bytes and the descriptor sent with them, not to be inherited by what we start. Raises OSError."""
    data, descriptors, _, _ = socket.recv_fds(end, count, 1)  # it takes flags, and ignores them: CLOEXEC too
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return data, descriptors[0] if descriptors else None


class PeerEnd:
    """The peer process's end. Nothing here blocks."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._out: deque[tuple[memoryview, int | None]] = deque()
        self._read = bytearray()

    def fileno(self) -> int:
        """For select and poll."""
        return self._end.fileno()

    def queue(self, data: bytes, descriptor: int | None = None) -> None:
        """Send `packed` bytes with the next `flush`, after what is queued already, and a descriptor beside them."""
        self._out.append((memoryview(data), descriptor))

    def flush(self) -> bool:
        """Send what the line takes now; False while something is left. Raises LineEnded."""
        while self._out:
            data, descriptor = self._out.popleft()
            try:
                beside = [] if descriptor is None else [descriptor]
                sent = socket.send_fds(self._end, [data], beside) if beside else self._end.send(data)
            except BlockingIOError:
                self._out.appendleft((data, descriptor))
                return False
            except OSError as error:
                raise LineEnded from error
            if sent < len(data):  # the descriptor went with the first byte
                self._out.appendleft((data[sent:], None))
        return True

    def receive(self) -> Packet | None:
        """The next packet, None while it is not all there. Raises LineEnded."""
        while (packet := self._cut()) is None:
            try:
                chunk = self._end.recv(CHUNK_BYTES)
            except BlockingIOError:
                return None
            except OSError as error:
                raise LineEnded from error
            if not chunk:
                raise LineEnded
            self._read += chunk
        return packet

    def _cut(self) -> Packet | None:
        end = LENGTH_BYTES + int.from_bytes(self._read[:LENGTH_BYTES], "big")
        if len(self._read) < max(end, LENGTH_BYTES):
            return None
        packet: Packet = json.loads(self._read[LENGTH_BYTES:end])
        del self._read[:end]
        return packet

    def close(self) -> None:
        """A rank that still runs leaves."""
        self._end.close()
        self._out.clear()


class RankEnd:
    """A rank's end. Everything here blocks."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._end = end

    def fileno(self) -> int:
        """For select and poll."""
        return self._end.fileno()

    def say(self, packet: Packet) -> None:
        """Raises LineEnded; TypeError, ValueError if the packet is not JSON."""
        data = packed(packet)
        try:
            self._end.sendall(data)
        except OSError as error:
            raise LineEnded from error

    def hear(self) -> tuple[Packet, int | None]:
        """The next packet and the descriptor that came with it. Raises LineEnded."""
        try:
            # no more than the length: a descriptor comes with its own packet's first byte
            head, descriptor = receive_with_descriptor(self._end, LENGTH_BYTES)
            if not head:
                raise LineEnded
            head += self._exactly(LENGTH_BYTES - len(head))
            body = self._exactly(int.from_bytes(head, "big"))
        except OSError as error:
            raise LineEnded from error
        packet: Packet = json.loads(body)
        return packet, descriptor

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self._end.recv(min(count, CHUNK_BYTES))
            if not part:
                raise LineEnded
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


# ---------------------------------------------------------------- what a rank's handler may raise and live

ALIKE = (BadMessage, Refused, Overflow)


def packet_of(error: BadMessage | Refused | Overflow) -> Packet:
    """What `error_of` makes the same error of; facts that are no JSON cross as text."""
    kind = next(kind for kind in ALIKE if isinstance(error, kind))
    code = None if isinstance(error, Overflow) else error.code.value
    facts = {
        key: value if isinstance(value, str | int | float | None) else repr(value)
        for key, value in error.facts.items()
        if key != "code"
    }
    return {"class": kind.__name__, "code": code, "reason": error.message, "facts": facts}


def error_of(packet: Packet) -> BadMessage | Refused | Overflow:
    """The error again."""
    kind, facts = packet["class"], packet["facts"]
    if kind == "Overflow":
        return Overflow(packet["reason"], **facts)
    made: type[BadMessage] | type[Refused] = BadMessage if kind == "BadMessage" else Refused
    return made(RejectCode(packet["code"]), packet["reason"], **facts)


def disagreement(raised: Sequence[Any]) -> str | None:
    """How ranks differ in what they raised (None: nothing), if they do. Words and facts may: each saw its own part."""
    kinds = [None if packet is None else (packet["class"], packet["code"]) for packet in raised]
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    return None if other is None else f"{_short(0, raised[0])}; {_short(other, raised[other])}"


def _short(rank: int, packet: Packet | None) -> str:
    what = "was done" if packet is None else f"raised {error_of(packet)!r}"
    return f"on rank {rank} it {what}"
