"""What a rank's handler may raise and live, as packets: the order failed alike on all ranks, nothing changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarmnet.errors import BadMessage, Overflow, Refused, RejectCode
from swarmnet.mesh.rank_line import Packet

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
