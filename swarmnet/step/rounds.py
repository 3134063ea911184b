"""One replica's part in the rounds of a step: contribute, receive, collect a finished sum, or say why not. Pure.

It knows what its keeper asks for and what is being exchanged; what the replica counts it is told (rules 10, 14 to 16
of docs/protocol.md). A sum once finished is replaced only when the other is in hand. That others have finished first is
no reason to give up an exchange: what it still lacks is on its way, and a whole sum fetched instead is sent twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmnet.ids import PeerId, RoundId
from swarmnet.messages import Finished, Indexes, Round
from swarmnet.step import actions as act
from swarmnet.step.account import Account
from swarmnet.step.actions import Action


@dataclass(frozen=True, slots=True)
class Lacks:
    """The round names indexes that are not held here: release them."""

    indexes: Indexes


@dataclass(frozen=True, slots=True)
class Differs:
    """The round is not what the keeper would open if it knew what is here: report."""


class RoundPart:
    """What takes part for `me`. exchange: the sum being exchanged or collected; collecting: from whom it is fetched.

    stuck: the exchange cannot end by itself, as far as is known here. locked: who has signed a sum takes part in no
    other one of the step for a while, for the first may have become a certificate elsewhere. Both are said on
    every tick. aside: sums that were left for others all the same, and are still here, as (round, digest).
    """

    def __init__(self, me: PeerId, finished: Finished | None = None) -> None:
        self.me, self.finished = me, finished
        self.round: Round | None = None
        self.exchange: RoundId | None = None
        self.collecting: frozenset[PeerId] = frozenset()
        self.aside: set[tuple[RoundId, bytes]] = set()
        self.stuck = False
        self.locked = False

    def drop(self) -> list[Action]:
        """Forget the round; what is exchanged ends."""
        self.round = None
        if self.exchange is None:
            return []
        self.exchange = None
        return [act.StopSum()]

    def hear(self, message: Round) -> list[Action]:
        """The keeper's word on what is summed now. What it has given up ends: its set need not be mine any more."""
        dropped = self.drop() if self.exchange is not None and self.exchange != message.id else []
        self.round = message
        return dropped

    def join(self, account: Account) -> list[Action] | Lacks | Differs:
        """Contribute, receive or collect, as the current round asks; or what the keeper must hear first."""
        current = self.round
        if current is None or (self.finished is not None and self.finished.id == current.id):
            return []
        if self.exchange == current.id or not current.contributions or (self.finished is not None and self.locked):
            return []
        mine = [
            indexes
            for peer, generation, indexes in current.contributions
            if (peer, generation) == (self.me, account.generation)
        ]
        named = any(peer == self.me for peer, _, _ in current.contributions)
        if named and not mine:
            return []  # under a generation I have left: the keeper learns it from my report
        if mine:
            missing = mine[0] - account.owned
            if missing:
                return Lacks(missing)
            if not (account.summed == account.granted == mine[0]):
                return []
        elif account.owned:
            return Differs()  # I hold indexes this round gives to others: the keeper must decide
        return self._start(current.id, act.Sum(current))

    def collect(self, wanted: Round, digest: bytes, holders: Iterable[PeerId]) -> list[Action]:
        """Fetch the sum of `wanted` with that digest from one of these, unless one of them is being asked already.

        What I take part in goes on for as long as it can end. If it cannot, a contribution may be void by now or a
        reducer gone; and those it was collected from may all be gone: then start again with who holds it now.
        """
        found = sorted(holders)
        if not found:
            alone = (wanted.id, digest) in self.aside and self.exchange != wanted.id
            return self._start(wanted.id, act.CollectSum(wanted, digest)) if alone else []
        if self.exchange == wanted.id and not (self.collecting or self.stuck):
            return []
        if self.exchange == wanted.id and self.collecting & set(found):
            return []
        # Each of those who lack it begins with another holder, or all of them would share one line.
        lacking = sorted({*wanted.receivers, self.me} - set(found))
        first = lacking.index(self.me) % len(found)
        order = (*found[first:], *found[:first])
        asked = Round(wanted.stamp, wanted.ballot, wanted.id, (), (), order)
        return self._start(wanted.id, act.CollectSum(asked, digest))

    def _start(self, round_id: RoundId, action: act.Sum | act.CollectSum) -> list[Action]:
        stop: list[Action] = [act.StopSum()] if self.exchange is not None else []
        if isinstance(action, act.Sum) and self.finished is not None:
            self.aside.add((self.finished.id, self.finished.digest))  # what is summed now takes its place
            self.finished = None
        self.exchange, self.stuck = round_id, False
        self.collecting = frozenset(action.round.holders) if isinstance(action, act.CollectSum) else frozenset()
        return [*stop, action]
