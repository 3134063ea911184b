"""Who keeps a stage's ledger: what one replica has promised, and when its own turn has come (rule 13). Pure.

Two replicas may keep at a time; the higher ballot wins wherever both are heard, and a wrong keeper only wastes time
(docs/protocol.md, I2).
"""

from __future__ import annotations

from swarmnet.ids import Ballot, Chain, PeerId
from swarmnet.messages import NONE, Indexes, Prepare
from swarmnet.step.actions import Note
from swarmnet.step.strikes import Strikes
from swarmnet.step.view import View


class Election:
    """Promises of one replica in one step. given: the promised keeper's word on what has an owner."""

    def __init__(self, view: View, strikes: Strikes, *, step: int, now: float) -> None:
        self._view, self._strikes, self._step = view, strikes, step
        self.notes: list[Note] = []          # for the log, until they are taken
        self.promised: Ballot | None = None
        self._began_at = self._promised_at = now
        self.given: Indexes = NONE

    def _level(self, peer: PeerId) -> bool:
        seen = self._view.get(peer)
        return seen is not None and seen.version >= self._step

    def promise(self, ballot: Ballot, *, now: float) -> bool:
        """Promise a ballot unless as high a one is promised already, or its keeper could not hear my reports."""
        if self.promised is not None and ballot <= self.promised:
            return False
        if ballot.peer != self._view.me and not self._view.answers(ballot.peer, now=now):
            return False
        self.promised, self._promised_at = ballot, now
        return True

    def heard(self, prepare: Prepare, *, now: float) -> None:
        """The promised keeper has spoken."""
        self._promised_at, self.given = now, prepare.given

    def due(self, term_chain: Chain, *, keeping: bool, now: float) -> Ballot | None:
        """The ballot to stand with now, or None.

        The first in order keeps; the next ones wait their turn when it is silent, and only a moment when it is dead.
        """
        view, limit = self._view, self._view.timers.suspect_s
        order = [
            peer for peer in view.keeper_order(term_chain, now=now)
            if peer == view.me or not self._strikes.sits(peer, now=now)
        ]
        place = order.index(view.me)
        if self.promised is None:
            waited_s = now - self._began_at
            if place and waited_s > view.timers.long_silence_s and self._level(order[0]):
                # It is heard, and its turn has come: whoever does not keep then is passed over from now on.
                self.notes += self._strikes.strike(order[0], "does not keep in its turn", cost_s=waited_s, now=now)
            return Ballot(0, view.me) if place == 0 or now - self._began_at > (2 + place) * limit else None
        higher = Ballot(self.promised.number + 1, view.me)
        keeper = self.promised.peer
        if keeper == view.me:
            # Promised by myself in a keeper object that was dropped: only a new ballot may keep again.
            return None if keeping else higher
        seen = view.get(keeper)
        if seen is not None and seen.dead:
            return higher if place == 0 else None
        if view.alive(keeper, now=now) and not view.answers(keeper, now=now):
            return higher if place == 0 else None    # heard, and nobody here can report to it
        if not view.alive(keeper, now=now):
            silent_since = seen.heard_at if seen is not None else self._promised_at
            if now - silent_since > (1 + place) * limit:
                return higher
        return None
