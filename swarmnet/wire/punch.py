"""The messages of two unreachable peers before they dial each other (docs/nat.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarmnet.bounds import Between, Entries, Size
from swarmnet.messages import Busy, Rejected
from swarmnet.wire.convert import Envelope, GreetFirst, Ping, Pong

MOST_OUTSIDE = 2
"""As many members are asked."""

TOKEN_BYTES = 16

_MOST_ASK_BYTES = 1024


@dataclass(frozen=True, slots=True)
class SeenPort:
    """A TCP port as another peer observes it."""

    host: Annotated[str, Size(45)]
    port: Annotated[int, Between(1, 65535)]


@dataclass(frozen=True, slots=True)
class Offer:
    """From where I dial, as my own machine and members see it. Who comes there says `token`."""

    inside: SeenPort
    outside: Annotated[tuple[SeenPort, ...], Entries(MOST_OUTSIDE)]
    token: Annotated[bytes, Size(TOKEN_BYTES, least=TOKEN_BYTES)]


@dataclass(frozen=True, slots=True)
class Observe:
    """Where does this call come from?"""


@dataclass(frozen=True, slots=True)
class Now:
    """Dial. The caller does so when this is expected to have come."""


PunchAsk = Offer | Ping | Now | Observe
PunchReply = Offer | Pong | Busy | Rejected | GreetFirst | SeenPort

ASKS: Envelope[PunchAsk] = Envelope("PunchAsk", {1: Offer, 2: Ping, 3: Now, 4: Observe}, most_bytes=_MOST_ASK_BYTES)
REPLIES: Envelope[PunchReply] = Envelope(
    "PunchAnswer", {1: Offer, 2: Pong, 3: Busy, 4: Rejected, 5: GreetFirst, 6: SeenPort}, most_bytes=_MOST_ASK_BYTES
)
write_punch_ask, read_punch_ask = ASKS.write, ASKS.read
write_punch_reply, read_punch_reply = REPLIES.write, REPLIES.read
