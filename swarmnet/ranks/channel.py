"""The rank channel, between the peer process and one rank: JSON packets, and descriptors of shared memory with them.

A stream socket pair. A packet is its length (8 bytes) and JSON; numbers cross exactly, infinities and NaN too. Packets
are small and few are under way, so a rank that reads nothing does not hold up the peer process.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from swarmnet.errors import BadMessage, Overflow, Refused, RejectCode

Packet = Mapping[str, Any]


class ChannelClosed(Exception):
    """The other end is closed, and all it sent has been received: its process is gone."""


LENGTH_BYTES = 8


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


class RankChannel:
    """One end. Everything here blocks, on the peer process's end no longer than `limit_s`."""

    def __init__(self, end: socket.socket, *, limit_s: float | None = None) -> None:
        end.settimeout(limit_s)
        end.set_inheritable(False)
        self._end = end

    def fileno(self) -> int:
        """For select and poll."""
        return self._end.fileno()

    def send(self, data: bytes, descriptor: int | None = None) -> None:
        """Send what `packed` has made, and a descriptor with it. Raises ChannelClosed."""
        try:
            # The descriptor goes with the first byte.
            sent = 0 if descriptor is None else socket.send_fds(self._end, [data], [descriptor])
            self._end.sendall(data[sent:])
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> tuple[Packet, int | None]:
        """The next packet and the descriptor that came with it. Raises ChannelClosed."""
        try:
            # No more than the length: a descriptor comes with its own packet's first byte.
            head, descriptor = receive_with_descriptor(self._end, LENGTH_BYTES)
            head += self._exactly(LENGTH_BYTES - len(head)) if head else b""
            packet: Packet = json.loads(self._exactly(int.from_bytes(head, "big")) if head else b"")
        except (OSError, ValueError) as error:
            raise ChannelClosed from error
        return packet, descriptor

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._end.recv(count - len(data))
            if not part:
                raise ChannelClosed
            data += part
        return bytes(data)

    def close(self) -> None:
        """The other end finds the channel closed."""
        self._end.close()


# ---------------------------------------------------------------- what a rank's handler may raise and live

ALIKE = (BadMessage, Refused, Overflow)


def packet_of(error: BadMessage | Refused | Overflow) -> Packet:
    """What `error_of` makes the same error of; facts that are no JSON cross as text."""
    facts = {
        key: each if isinstance(each, str | int | float | None) else repr(each) for key, each in error.facts.items()
    }
    return {"class": type(error).__name__, "code": facts.pop("code", None), "reason": error.message, "facts": facts}


def error_of(packet: Packet) -> BadMessage | Refused | Overflow:
    """The error again."""
    if packet["class"] == "Overflow":
        return Overflow(packet["reason"], **packet["facts"])
    made: type[BadMessage] | type[Refused] = BadMessage if packet["class"] == "BadMessage" else Refused
    return made(RejectCode(packet["code"]), packet["reason"], **packet["facts"])


def disagreement(raised: Sequence[Packet | None]) -> str | None:
    """How ranks differ in what they raised (None: nothing), if they do. Words and facts may: each saw its own part."""
    kinds = [None if packet is None else (packet["class"], packet["code"]) for packet in raised]
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is None:
        return None
    words = ["was done" if packet is None else f"raised {error_of(packet)!r}" for packet in raised]
    return f"on rank 0 it {words[0]}; on rank {other} it {words[other]}"
