"""The use of this peer's network link: priority between senders, bandwidth limits, and bytes by peer.

*Priority* divides the link between steps and the state that joiners fetch. A *bandwidth limit* holds tensors back to
the operator's rate: control messages pass immediately, and tensors wait for the bytes that those used. *Shares* divide
the bandwidth for strangers. All three are token buckets (`pacing.py`), and callers wait for tokens here.
*Traffic* counts what really crossed, headers and refusals included; gRPC's and TLS's own framing is not in it.
Bookkeeping in the event loop's thread; knows no carrier.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from swarmnet.bounds import Recent
from swarmnet.clock import loop_time, set_within
from swarmnet.ids import PeerId
from swarmnet.pacing import TokenBucket

# ---------------------------------------------------------------- who goes first


STATE_SHARE = 0.1
"""Of a line that never rests, this much is for state."""

RELAY_SHARE = STATE_SHARE
"""The share of its link that a peer relays for unreachable peers, if its operator sets none."""

UNMEASURED = 20 << 20
"""Bytes per second that a line is taken to carry before a round has measured it."""


class Priority:
    """Of one transport, both directions of calling.

    State passes at once while nothing urgent is being sent. During urgent traffic it has a tenth of the link, shared by
    all who fetch: otherwise a busy link would starve every joiner, and many joiners would starve the steps.
    """

    def __init__(self) -> None:
        self.bytes_per_s = UNMEASURED
        """What the line carries."""
        self._urgent = 0
        self._clear = asyncio.Event()
        self._clear.set()
        self._queue = asyncio.Lock()  # fair: first come, first served
        self._state = TokenBucket(STATE_SHARE * UNMEASURED)

    @contextlib.contextmanager
    def urgent(self) -> Iterator[None]:
        """Something that cannot wait is being sent."""
        self._urgent += 1
        self._clear.clear()
        try:
            yield
        finally:
            self._urgent -= 1
            # The last one to finish lets those wait no longer that can.
            if not self._urgent:
                self._clear.set()

    async def turn(self, num_bytes: int) -> None:
        """Return when so many bytes of state may be sent."""
        async with self._queue:
            while self._urgent and (wait_s := self._state.wait_s(loop_time(), 0.0)):
                await set_within(self._clear, wait_s)
            # Bytes on an idle link are not counted: they delay no other traffic.
            if self._urgent:
                self._state.per_s = STATE_SHARE * self.bytes_per_s
                self._state.take(loop_time(), num_bytes)


# ---------------------------------------------------------------- what the operator lends


class BandwidthLimit:
    """One direction of a link: a token bucket without credit. In a second at most the limit crosses, and one piece of a
    tensor more."""

    def __init__(self) -> None:
        self.total = 0
        """Bytes that have crossed."""
        self._bucket = TokenBucket(math.inf)
        self._queue = asyncio.Lock()  # fair: first come, first served
        self._changed = asyncio.Event()

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second; 0: unlimited."""
        return self._bucket.per_s if self._bucket.per_s < math.inf else 0.0

    def set_rate(self, bytes_per_s: float) -> None:
        """Set the limit; 0: unlimited. Waiting senders use the new rate, too."""
        self._bucket.set_rate(bytes_per_s or math.inf, loop_time())
        self._changed.set()

    def spend(self, num_bytes: int) -> None:
        """So many bytes cross."""
        self.total += num_bytes
        if self.bytes_per_s:
            self._bucket.take(loop_time(), num_bytes)

    async def turn(self) -> None:
        """Return when a piece of a tensor may cross; spend it before anything else is waited for."""
        if not self.bytes_per_s:
            return
        async with self._queue:
            while wait_s := self._bucket.wait_s(loop_time(), 0.0):
                self._changed.clear()
                await set_within(self._changed, wait_s)


# ---------------------------------------------------------------- strangers' bytes


_BURST_S = 0.25
_PIECE_BYTES = 32 << 10
_MOST_SHARERS = 1024


class Shares:
    """A rate that several share: of those who wait the one that has had least goes first, piece by piece.

    So one that floods delays others by a piece at a time, however many streams it has. bytes_per_s(): for all.
    """

    def __init__(self, bytes_per_s: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Event]] = []  # a heap
        self._had: Recent[str, float] = Recent(_MOST_SHARERS)
        """What each has had; one that comes back starts from what the last sender had when it was its turn."""
        self._least, self._bucket = 0.0, TokenBucket(1.0, _BURST_S)

    async def turn(self, who: str, num_bytes: int) -> None:
        """Return when so many bytes of theirs may cross."""
        for begin in range(0, num_bytes, _PIECE_BYTES):
            await self._piece(who, min(_PIECE_BYTES, num_bytes - begin))

    async def _piece(self, who: str, num_bytes: int) -> None:
        had = max(self._least, self._had.get(who, 0.0))
        self._had[who] = had + num_bytes
        mine = had, next(self._numbers), asyncio.Event()
        heapq.heappush(self._waiting, mine)
        try:
            while wait_s := self._bucket.wait_s(loop_time(), 0.0) if self._waiting[0] is mine else math.inf:
                await set_within(mine[2], wait_s if wait_s < math.inf else None)
                mine[2].clear()
            self._least = had
            self._bucket.per_s = max(self._bytes_per_s(), 1.0)
            self._bucket.take(loop_time(), num_bytes)
        finally:
            self._waiting.remove(mine)
            heapq.heapify(self._waiting)
            if self._waiting:
                self._waiting[0][2].set()


# ---------------------------------------------------------------- what has crossed


MAX_ROWS = 4096
"""Rows kept; beyond it those that have been idle longest are forgotten."""


@dataclass(slots=True)
class Flow:
    """Bytes of one kind of request between us and one peer, in either direction of calling."""

    sent: int = 0
    received: int = 0
    priority: Priority = field(default_factory=Priority)
    up: BandwidthLimit = field(default_factory=BandwidthLimit)
    down: BandwidthLimit = field(default_factory=BandwidthLimit)

    def sends(self, num_bytes: int) -> None:
        """So many bytes leave."""
        self.sent += num_bytes
        self.up.spend(num_bytes)

    def receives(self, num_bytes: int) -> None:
        """So many bytes have come."""
        self.received += num_bytes
        self.down.spend(num_bytes)


class Traffic:
    """The counters of one transport, and its bandwidth limits."""

    def __init__(self) -> None:
        self.priority = Priority()
        self.up, self.down = BandwidthLimit(), BandwidthLimit()
        self._flows: Recent[tuple[PeerId, str], Flow] = Recent(MAX_ROWS)

    def relays(self, bytes_per_s: float) -> float:
        """Bytes per second to relay for others: so many; if 0, a share of the link or of its bandwidth limit."""
        limit = min([line.bytes_per_s for line in (self.up, self.down) if line.bytes_per_s], default=math.inf)
        return min(bytes_per_s or RELAY_SHARE * min(self.priority.bytes_per_s, limit), limit)

    def flow(self, peer: PeerId, request: type) -> Flow:
        """The counter to add to for one call."""
        key = (peer, request.__name__)
        self._flows[key] = flow = self._flows.get(key) or Flow(priority=self.priority, up=self.up, down=self.down)
        return flow

    def rows(self) -> list[dict[str, object]]:
        """One row per peer and kind of request: peer, request, sent, received."""
        return [
            {"peer": peer, "request": request, "sent": flow.sent, "received": flow.received}
            for (peer, request), flow in sorted(self._flows.items())
        ]
