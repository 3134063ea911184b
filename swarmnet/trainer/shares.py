"""Which microbatches of a step one trainer feeds: its share, and what others do not bring. Pure.

Trainers share a step by rendezvous hashing over the trainers that announce in their records that they feed. A record
costs nothing, and a dead trainer's share stays its own for a while: when a step takes twice as long as usual, all
trainers feed what is missing, and a trainer that left its share in two steps in a row has none for a minute, then for
twice as long.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import deque
from collections.abc import Collection, Iterable

from swarmnet.bounds import Recent
from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.pacing import Backoff

_KEPT_STEPS, _MISSES, _LONGEST = 9, 2, 32
_MOST_TRAINERS = 256


def feeder(trainers: Iterable[PeerId], step: int, index: int) -> PeerId:
    """The trainer that feeds microbatch (step, index): rendezvous hashing (Thaler and Ravishankar, 1998).

    Trainers need not agree on who is alive: an index fed twice is counted once, an index that no trainer feeds is
    executed on the leader's order.
    """
    return max(trainers, key=lambda peer: hashlib.sha256(f"{peer}/{step}/{index}".encode()).digest())


class FedShares:
    """One trainer's. Times are seconds of one clock."""

    def __init__(self, me: PeerId, timers: Timers) -> None:
        self._me, self._timers = me, timers
        self._steps_s: deque[float] = deque(maxlen=_KEPT_STEPS)  # of those in which every trainer brought its share
        # Identities cost nothing.
        self._misses: Recent[PeerId, int] = Recent(_MOST_TRAINERS)  # steps in a row
        self._left_out: Recent[PeerId, Backoff] = Recent(_MOST_TRAINERS)

    def feeding(self, trainers: Collection[PeerId], *, now: float) -> list[PeerId]:
        """Me, and who is trusted to bring its share."""
        return [self._me, *(each for each in trainers if each != self._me and not self._is_left_out(each, now))]

    def of(self, trainers: Collection[PeerId], step: int, num_microbatches: int, *, now: float) -> list[int]:
        """The indexes that I feed: first mine if all trainers fed, then those of the trainers that do not feed."""
        whole, feeding = {self._me, *trainers}, self.feeding(trainers, now=now)
        mine = [index for index in range(num_microbatches) if feeder(feeding, step, index) == self._me]
        # Who is left out wrongly begins with its own, too: seldom do two of us feed the same at once.
        return sorted(mine, key=lambda index: feeder(whole, step, index) != self._me)

    def patience_s(self) -> float:
        """How long after its beginning a step is late."""
        if not self._steps_s:
            return self._timers.suspect_s
        # Less than it takes until a leader orders what no trainer brings, or such steps would be usual.
        return max(2 * statistics.median_low(self._steps_s), self._timers.beat_s)

    def brought(self, others: Iterable[PeerId], *, took_s: float) -> None:
        """A step is over, and they have brought their shares."""
        self._steps_s.append(took_s)
        for peer in others:
            self._misses.pop(peer, None)
            if peer in self._left_out:
                self._left_out[peer].reset()

    def missed(self, others: Iterable[PeerId], *, now: float) -> list[PeerId]:
        """A step is late: one of them has not brought its share, who knows which. Returns who has none for a while."""
        found = []
        for peer in others:
            if self._is_left_out(peer, now):
                continue  # of a step that was begun before
            self._misses[peer] = self._misses.get(peer, 0) + 1
            if self._misses[peer] >= _MISSES:
                self._left_out.setdefault(peer, Backoff(self._timers.serve_s, _LONGEST * self._timers.serve_s)).failed(
                    now
                )
                found.append(peer)
        return found

    def _is_left_out(self, peer: PeerId, now: float) -> bool:
        return peer in self._left_out and self._left_out[peer].wait_s(now) > 0.0
