"""What peers say to relays and relays to peers, before bytes flow (docs/nat.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarmnet.bounds import Between, Size
from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Busy, Rejected
from swarmnet.wire.convert import Envelope, GreetFirst, Ping, Pong

ID_BYTES = 16
"""Of the id of a waiting caller: it cannot be guessed."""

MAX_BYTES = 256 << 10
"""In one message of a joined stream."""

_MOST_ASK_BYTES = 1024

Place = Annotated[bytes, Size(ID_BYTES, least=ID_BYTES)]


@dataclass(frozen=True, slots=True)
class Reserve:
    """I am unreachable: send the connect-back requests of my callers on this stream."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a relay grants: its bytes per second for all, and the silence after which it takes me for gone."""

    bytes_per_s: Annotated[int, Between(0, 1 << 40)]
    silence_s: Annotated[float, Between(0.1, 3600.0)]


@dataclass(frozen=True, slots=True)
class Connect:
    """I want to speak to `peer`. reverse: it can dial me, so let it."""

    peer: PeerId
    id: Place
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class Summon:
    """`caller` wants to connect: connect back here, or with `reverse` to the caller itself."""

    caller: PeerId
    id: Place
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class Arrive:
    """I was summoned under this id. full: I do not come, all that I have for such callers is taken."""

    id: Place
    full: bool = False


Ask = Reserve | Connect | Arrive | Ping
Reply = Accepted | Reserved | Summon | Pong | Busy | Rejected | GreetFirst

ASKS: Envelope[Ask] = Envelope("RelayAsk", {1: Reserve, 2: Connect, 3: Arrive, 4: Ping}, most_bytes=_MOST_ASK_BYTES)
REPLIES: Envelope[Reply] = Envelope(
    "RelayAnswer", {1: Accepted, 2: Reserved, 3: Summon, 4: Pong, 5: Busy, 6: Rejected, 7: GreetFirst}
)
write_ask, read_ask = ASKS.write, ASKS.read
write_reply, read_reply = REPLIES.write, REPLIES.read


def checked(data: bytes) -> bytes:
    """Bytes of a joined stream. Raises BadMessage if there are too many of them at once."""
    if not 0 < len(data) <= MAX_BYTES:
        raise BadMessage(RejectCode.TOO_LARGE, "too many bytes at once, or none", num_bytes=len(data))
    return data
