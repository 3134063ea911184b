"""Bytes of calls, by peer, direction and kind of request: what really crossed, headers and refusals included.

Counts the messages a transport hands to its carrier (gRPC's and TLS's own framing is not in it), and carries to every
call who goes first on this peer's line. Bookkeeping in the event loop's thread; knows no carrier.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from swarmnet.ids import PeerId
from swarmnet.net.precedence import Precedence

MAX_ROWS = 4096
"""Rows kept; beyond it those that have been idle longest are forgotten."""


@dataclass(slots=True)
class Flow:
    """Bytes of one kind of request between us and one peer, whoever called."""

    sent: int = 0
    received: int = 0
    precedence: Precedence = field(default_factory=Precedence)


class Traffic:
    """The counters of one transport."""

    def __init__(self) -> None:
        self._precedence = Precedence()
        self._flows: OrderedDict[tuple[PeerId, str], Flow] = OrderedDict()

    def flow(self, peer: PeerId, request: type) -> Flow:
        """The counter to add to for one call."""
        key = (peer, request.__name__)
        flow = self._flows.setdefault(key, Flow(precedence=self._precedence))
        self._flows.move_to_end(key)
        if len(self._flows) > MAX_ROWS:
            self._flows.popitem(last=False)
        return flow

    def rows(self) -> list[dict[str, object]]:
        """One row per peer and kind of request: peer, request, sent, received."""
        return [
            {"peer": peer, "request": request, "sent": flow.sent, "received": flow.received}
            for (peer, request), flow in sorted(self._flows.items())
        ]
