"""Which members of fast stages move to slow ones (docs/routing.md). A run is as fast as its slowest stage.

Once a period each peer that may move checks whether its own move would help, and if so announces its destination. After
a delay, in which the announcements spread, every peer computes from the same records the same matching of the
announcing peers to the stages that need them (`winners`): the matched peers go, the others withdraw. Where a stage has
lost most of its rate no peer waits for its period.

An announcement or reservation may never be fulfilled: `Promises` counts each for a bounded time. Pure: the
announcements of all peers and `now` in, decisions out. `placement` has the rates, `moving` is the driver.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from swarmnet.bounds import Recent
from swarmnet.ids import PeerId
from swarmnet.peer.placement import LEAST_RATE, Serving, rated

_NEARLY = 0.7
"""Of what the move of the most useful peer would bring: who brings that much may go as well."""


_ALIKE = 0.25
"""Of a usual replica: moves that bring as much, rounded to that, are equal. Two that look at the same moment see rates
of different steps."""

_REMEMBERED = 4096

_FEW = 8
"""Replicas of a stage: of more, one that moves changes no measured rate by much."""

_LATER = 0.25
"""Of the seconds that it takes me to fetch a state: how much later than others I answer a stage in distress."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When a move is worth it. Seconds and shares."""

    period_s: float = 60.0
    """How often a peer looks whether it should move."""
    settle_s: float = 4.0
    """From an announcement to the matching: announcements in between count."""
    hurry_s: float = 6.0
    """The period while a stage is in distress."""
    promise_s: float = 120.0
    """How long it counts what a peer says it is about to do; after that for `forget_periods` periods not at all."""
    forget_periods: int = 10
    doubt: float = 0.1
    """By how much of one replica of the slowest stage the moves that are possible have to raise the run's rate: so far
    off may rates be that are measured."""
    fetch_s: float = 0.0
    """How long the state of a stage takes to come to me."""
    stay_s: float = 7200.0
    """How long a peer stays, about: what the move costs has to come back by then."""
    share: float = 1 / 8
    """Of all peers, how many may be on the move at a time; one may in any case."""
    leaves: float = 1 / 3
    """Of a stage's replicas, how many may leave it at a time; one may in any case."""
    distress: float = 0.5
    """Of the mean rate of stages: a stage that serves less is in distress."""
    settled_s: float = 3600.0
    """So long a small stage to which a replica has moved gives none away, unless it has two more than the slowest."""


class Promises:
    """Reservations that count: of peers that announce a move, or fetch the state of a stage and do not serve yet.

    A reservation that is fulfilled costs nothing. The time of all others is counted, and a peer that has used up its
    time cannot reserve for a while, whatever stage it names next.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._used: dict[PeerId, tuple[float, float, float]] = {}  # began, looked at last, used by then
        self._promised: dict[PeerId, int] = {}

    def believed(self, serving: Sequence[Serving], now: float) -> list[Serving]:
        """What they announce without what is not believed: who goes nowhere stays, who never serves is not there."""
        rules, found, promised = self._rules, [], dict[PeerId, int]()
        keep_s = rules.promise_s + rules.forget_periods * rules.period_s
        self._used = {peer: used for peer, used in self._used.items() if now - used[0] <= keep_s}
        for each in serving:
            # It serves where it said it would.
            if each.synced and each.going is None and self._promised.get(each.peer) == each.stage:
                self._used.pop(each.peer, None)
            to = each.stage if not each.synced and not each.choosing else each.going
            if to is None:
                found.append(each)
                continue
            began, last, used = self._used.get(each.peer, (now, now, 0.0))
            used += now - last if each.peer in self._promised else 0.0
            self._used[each.peer] = began, now, used
            promised[each.peer] = to
            if used <= rules.promise_s:
                found.append(each)
            elif each.synced:
                found.append(replace(each, going=None, surely=False))
        self._promised = promised
        return found


class RecentMoves:
    """When a replica last moved to each stage, as far as this peer has seen. It outlives the peer's own moves.

    Measured rates depend on how many replicas share a machine and a stage, so after a move the other stage may look
    slower. Without this, replicas would go to and fro once a period.
    """

    def __init__(self) -> None:
        self._stage: Recent[PeerId, int] = Recent(_REMEMBERED)
        self._at: dict[int, float] = {}

    def since(self, serves: Mapping[PeerId, int], now: float, within_s: float) -> frozenset[int]:
        """Stages to which a replica has moved within the last seconds. serves: the stage of each replica now."""
        for peer, stage in serves.items():
            if (before := self._stage.get(peer)) != stage:
                self._stage[peer] = stage
                if before is not None:
                    self._at[stage] = now
        return frozenset(stage for stage, at in self._at.items() if now - at < within_s)


class Picture:
    """All stages as one peer sees them: rates, and who could move. Who is surely on the way counts where it goes."""

    def __init__(self, num_stages: int, serving: Sequence[Serving], rules: Rules) -> None:
        self.rules, self.num_stages = rules, num_stages
        self.rates = [0.0] * num_stages
        self.served = [0.0] * num_stages
        self._staying = [0] * num_stages
        self._leaving = [0] * num_stages
        self.may: dict[PeerId, tuple[int, float]] = {}
        self.announced: dict[PeerId, int] = {}
        self.serves = {each.peer: each.stage for each in serving if each.synced and not each.choosing}
        self._moving = 0
        promised = [0.0] * num_stages
        people = rated(range(num_stages), [each for each in serving if not (each.choosing or each.paused)])
        self._usual = max(statistics.median([rate for _, rate in people]), LEAST_RATE) if people else 1.0
        for each, rate in people:
            to = each.going if each.going is not None and each.going < num_stages else None
            if each.surely and to is not None:
                self._moving += 1
                self._leaving[each.stage] += 1
                promised[to] += rate
            elif each.leaving:
                self._leaving[each.stage] += 1
            elif not each.synced:
                promised[each.stage] += rate
            else:
                self.served[each.stage] += rate
                self._staying[each.stage] += 1
                if each.may_move:
                    self.may[each.peer] = each.stage, rate
                    if to is not None and to != each.stage:
                        self.announced[each.peer] = to
        for stage in range(num_stages):
            # One of the peers that everything depends on here may be Byzantine.
            share = 1.0 if self._staying[stage] else 0.5
            self.rates[stage] = self.served[stage] + share * promised[stage]
        self._most = max(1, int(rules.share * len(people))) - self._moving

    @cached_property
    def in_distress(self) -> tuple[int, ...]:
        """Stages that serve much less than others."""
        mean = sum(self.served) / self.num_stages
        return tuple(stage for stage in range(self.num_stages) if self.served[stage] < self.rules.distress * mean)

    @cached_property
    def worth(self) -> bool:
        """Would the moves that are possible raise the rate of the run by enough?"""
        slowest, rules = min(range(self.num_stages), key=lambda stage: self.rates[stage]), self.rules
        gain = rules.doubt / max(self._staying[slowest], 1) + rules.fetch_s / rules.stay_s
        enough = self.rates[slowest] * (1 + gain)
        # No moves could do it: the slowest stage would be faster than all are on average.
        if sum(self.rates) / self.num_stages <= enough:
            return False
        after = list(self.rates)
        self._matching(dict.fromkeys(self.may), after, enough)
        return min(after) > enough

    @cached_property
    def winners(self) -> Mapping[PeerId, int]:
        """Who goes, of those that announced it, and to which stage."""
        return self._matching(dict(self.announced), list(self.rates))

    def wish(self, me: PeerId, fits: Collection[int], *, settled: Collection[int] = ()) -> int | None:
        """Where I would go; None: I stay. fits: the stages that this machine has memory for. settled: those to which a
        replica has moved lately."""
        # Most looks end here.
        if me not in self.may or self._most <= 0 or not self.worth:
            return None
        poor = min(range(self.num_stages), key=lambda stage: (self.rates[stage], stage))
        if poor not in fits:
            return None
        # A move between stages that differ by one replica makes the same picture the other way round.
        stage = self.may[me][0]
        small = self._staying[stage] <= _FEW
        if small and stage in settled and self._staying[stage] - self._staying[poor] < 2:
            return None
        best = max((self._value(peer, poor, self.rates) for peer in self.may), default=0.0)
        mine = self._value(me, poor, self.rates)
        # Others would do it with fewer moves.
        return poor if mine > 0.0 and mine >= _NEARLY * best and self._may_leave(self.may[me][0], Counter()) else None

    # ------------------------------------------------------------ inside

    def _matching(
        self, candidates: dict[PeerId, int] | dict[PeerId, None], rates: list[float], enough: float = math.inf
    ) -> dict[PeerId, int]:
        """Who goes where, the most useful first, each to the slowest stage that one of these helps; `rates` become what
        follows.

        candidates: where each would go; None: anywhere. enough: the rate of the slowest stage at which it ends.
        """
        taken, moves, open_stages = Counter[int](), dict[PeerId, int](), set(range(self.num_stages))
        while open_stages and len(moves) < self._most and min(rates) <= enough:
            poor = min(open_stages, key=lambda stage: (rates[stage], stage))
            best = max(
                (
                    (round(value / self._usual / _ALIKE), _lot(peer, poor), peer)
                    for peer, to in candidates.items()
                    if to in (None, poor)
                    and (value := self._value(peer, poor, rates)) > 0.0
                    and self._may_leave(self.may[peer][0], taken)
                ),
                default=None,
            )
            if best is None:
                # The slowest stage cannot be helped: then no voluntary move raises the run's rate.
                if None in candidates.values():
                    break
                open_stages.discard(poor)
                continue
            peer = best[2]
            stage, rate = self.may[peer]
            rates[stage] -= rate
            rates[poor] += rate
            taken[stage] += 1
            del candidates[peer]
            moves[peer] = poor
        return moves

    def _value(self, peer: PeerId, to: int, rates: Sequence[float]) -> float:
        """By how much the slower of the two stages would be faster."""
        stage, rate = self.may[peer]
        return min(rates[to] + rate, rates[stage] - rate) - rates[to]

    def _may_leave(self, stage: int, taken: Counter[int]) -> bool:
        """May one more leave a stage? Another that serves and stays has to be there after all who leave."""
        gone = taken[stage]
        most = max(1, int(self.rules.leaves * self._staying[stage]))
        return self._staying[stage] - gone >= 2 and self._leaving[stage] + gone < most


@dataclass(frozen=True, slots=True)
class Intent:
    """What to announce: to: the stage I would go to. surely: I go."""

    to: int | None = None
    surely: bool = False


class Rebalancer:
    """One peer's part in it."""

    def __init__(self, me: PeerId, rules: Rules, *, now: float, recent_moves: RecentMoves | None = None) -> None:
        self.rules, self._me = rules, me
        self._recent_moves = recent_moves if recent_moves is not None else RecentMoves()
        self._phase = int.from_bytes(_lot(me, -1)[:8]) / 2**64
        self.due = now + self._phase * rules.period_s
        """When there is something to decide, unless a stage comes into distress."""
        self._hurried = False
        self.intent = Intent()

    def decide(self, picture: Picture, fits: Collection[int], *, now: float) -> Intent:
        """Decide from the announcements of all peers. Once it returns `surely` there is nothing more to decide, but
        `stay`.

        fits: the stages that this machine has memory for.
        """
        hurried, settled = (
            bool(picture.in_distress),
            self._recent_moves.since(picture.serves, now, self.rules.settled_s),
        )
        every = self.rules.hurry_s if hurried else self.rules.period_s
        if hurried and not self._hurried and self.intent.to is None:
            # A peer that has the state sooner announces sooner.
            self.due = min(self.due, now + self._phase * every + _LATER * self.rules.fetch_s)
        self._hurried = hurried
        if now < self.due or self.intent.surely:
            return self.intent
        self.due = now + every
        if self.intent.to is not None:
            won = picture.winners.get(self._me) == self.intent.to
            self.intent = Intent(self.intent.to, surely=True) if won else Intent()
        elif (to := picture.wish(self._me, fits, settled=settled)) is not None:
            self.due = now + self.rules.settle_s
            self.intent = Intent(to)
        return self.intent

    def stay(self, *, now: float) -> None:
        """The move came to nothing: no other for a period."""
        self.intent, self.due, self._hurried = Intent(), now + self.rules.period_s, True


def _lot(peer: PeerId, stage: int) -> bytes:
    return hashlib.sha256(f"move/{peer}/{stage}".encode()).digest()
