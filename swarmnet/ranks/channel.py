"""The channel between a process and a child that it has started: JSON packets, and descriptors with them.

A SEQPACKET socket pair, so a packet arrives whole or not at all; numbers cross exactly, infinities and NaN too. Packets
are small and few are under way, so a child that reads nothing does not block the other end. The peer process has one to
each rank and one to the fork server.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from swarmnet.errors import BadMessage, Overflow, Refused, RejectCode

Packet = Mapping[str, Any]

MAX_PACKET = 1 << 17
"""Less than a socket holds. What is larger crosses in shared memory."""
MAX_DESCRIPTORS = 3


class ChannelClosed(Exception):
    """The other end is closed, and all it sent has been received: its process is gone."""


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def packed(packet: Packet) -> bytes:
    """The bytes of a packet. Raises TypeError, ValueError if it is not JSON, or longer than MAX_PACKET."""
    data = json.dumps(packet, separators=(",", ":")).encode()
    if len(data) > MAX_PACKET:
        raise ValueError(f"a packet of {len(data)} bytes, at most {MAX_PACKET} cross to a rank")
    return data


class ChildChannel:
    """One end. Everything here blocks, no longer than `limit_s` if that is given."""

    def __init__(self, end: socket.socket, *, limit_s: float | None = None) -> None:
        end.settimeout(limit_s)
        end.set_inheritable(False)
        self._end = end

    def fileno(self) -> int:
        """For select and poll."""
        return self._end.fileno()

    def send(self, data: bytes, *descriptors: int) -> None:
        """Send what `packed` has made, and these descriptors with it. If the other end is gone, `receive` says so."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._end, [data], descriptors)

    def receive(self) -> tuple[Packet, list[int]]:
        """The next packet and the descriptors that came with it, ours to close. Raises ChannelClosed."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, MAX_PACKET, MAX_DESCRIPTORS)
            for descriptor in descriptors:  # recv_fds takes flags and ignores them, CLOEXEC too
                os.set_inheritable(descriptor, False)
            return json.loads(data), descriptors
        except (OSError, ValueError) as error:  # of no byte, too
            raise ChannelClosed from error

    def shutdown(self) -> None:
        """Both ends find the channel closed, a thread that receives there now, too. Any thread."""
        with contextlib.suppress(OSError):  # the other end is closed
            self._end.shutdown(socket.SHUT_RDWR)

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
