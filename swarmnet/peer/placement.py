"""Which stage a newcomer takes: where a replica is missed most (cf. block selection in Petals, arXiv:2209.01188).

The stage with the least rate first, those that are still fetching their state included: they will serve in a moment. A
replica's rate is what the other replicas have measured (`rates`); one without a measurement counts as its stage's
median, so where nothing is measured the fewest replicas are the least rate. Among equals the stage that is loaded most,
and what is then still equal is drawn by peer id, so that newcomers do not move as one.

Newcomers who look at the same moment see the same swarm and would all choose the same stage. So each first announces
that it is *choosing*, looks again, and takes what is its own in one sharing out of stages among all who are choosing:
each computes the same one from what it sees. Two who see different things may crowd a stage by one.

Knows no directory and no clock; `joining` turns records into `Serving`.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnet.config import plug_in
from swarmnet.errors import UsageError
from swarmnet.ids import PeerId

_LOAD_STEP = 0.25
"""Loads that round to the same multiple count as equal: they are samples, seconds old."""

_RATE_STEP = 0.25
"""Of a usual replica: rates of stages that round to the same multiple count as equal."""

LEAST_RATE = 1e-9


@dataclass(frozen=True, slots=True)
class Serving:
    """One replica of one stage, as it announces itself.

    has_state: synced, or a checkpoint on disk. leaving: draining. load: microbatches in flight per slot.
    choosing: announced only to say that it is choosing now. synced: it serves now. rate: microbatches per second that
    it computes, as other replicas have measured; None: none has. may_move: it moves where it is needed. going: the
    stage to which it would move; surely: it is on the way there.
    """

    peer: PeerId
    stage: int
    has_state: bool
    leaving: bool = False
    load: float = 0.0
    choosing: bool = False
    rate: float | None = None
    going: int | None = None
    surely: bool = False
    may_move: bool = False
    synced: bool = True
    paused: bool = False
    """It has the state, computes nothing, and neither leaves nor moves."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A stage, and why in words."""

    stage: int
    reason: str


class PlacementRule(Protocol):
    """Decides which stage a joiner serves."""

    def __call__(
        self, me: PeerId, stages: Sequence[int], serving: Sequence[Serving], *, held: Collection[int] = ()
    ) -> Choice:
        """The stage that `me` takes. It is asked twice: before and after others know that `me` is choosing.

        Args:
            stages: those that fit the memory of this machine; one at least.
            serving: what all peers announce, `me` perhaps included; also of other stages.
            held: stages with a checkpoint on my disk.
        """
        ...


def placement_rule(name: str) -> PlacementRule:
    """The rule by its name in a peer's config. Raises UsageError if no installed distribution brings it."""
    # The built-in rule needs no plug-in.
    if name == "most_under_replicated":
        return choose
    rule: PlacementRule = plug_in.load("placement rule", name, field="placement")[0]

    def checked(me: PeerId, stages: Sequence[int], serving: Sequence[Serving], *, held: Collection[int] = ()) -> Choice:
        choice = rule(me, stages, serving, held=held)
        # A plug-in is foreign code.
        if choice.stage not in stages:
            fit = ", ".join(map(str, stages))
            raise UsageError(f"placement: {name} chose stage {choice.stage!r}: of the run these fit here: {fit}")
        return choice

    return checked


def choose(me: PeerId, stages: Sequence[int], serving: Sequence[Serving], *, held: Collection[int] = ()) -> Choice:
    """The stage that `me` takes, as one of all who are choosing. `me` in `serving` is passed over.

    stages: those that fit here. It is not known what fits the others that are choosing: they are assumed to choose
    among the same. held: stages with a checkpoint on my disk; where no other peer has that state it decides, else it
    breaks ties.
    """
    tally = _Tally(stages, [each for each in serving if not each.choosing and each.peer != me])
    for peer in sorted({each.peer for each in serving if each.choosing and each.peer != me}, key=_rank):
        # Those before me choose first, in the order that all compute.
        if _rank(peer) < _rank(me):
            tally.add(tally.choice(peer, ()).stage)
    return tally.choice(me, held)


def rated(stages: Container[int], serving: Iterable[Serving]) -> list[tuple[Serving, float]]:
    """All replicas of these stages, with a rate.

    Without a measurement it is the median of the stage; without one of the stage, of all; else 1.
    """
    there = [each for each in serving if each.stage in stages]  # a record may name any stage
    measured: dict[int, list[float]] = {}
    for each in there:
        if each.rate is not None:
            measured.setdefault(each.stage, []).append(each.rate)
    usual = statistics.median([rate for rates in measured.values() for rate in rates]) if measured else 1.0
    medians = {stage: statistics.median(rates) for stage, rates in measured.items()}
    return [(each, medians.get(each.stage, usual) if each.rate is None else each.rate) for each in there]


class _Tally:
    """Replicas, rates and load by stage."""

    def __init__(self, stages: Sequence[int], serving: Sequence[Serving]) -> None:
        self.replicas, self.rates = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0.0)
        self.stateless = set(stages)
        loads: dict[int, list[float]] = {stage: [] for stage in stages}
        replicas = rated(stages, serving)
        self._usual = max(statistics.median([rate for _, rate in replicas]), LEAST_RATE) if replicas else 1.0
        for each, rate in replicas:
            if each.has_state:
                self.stateless.discard(each.stage)
            # Who is on the way to another stage counts there.
            to = each.going if each.surely and each.going is not None else each.stage
            if not (each.leaving and to == each.stage) and to in self.replicas:
                self.add(to, rate)
                if each.has_state and to == each.stage:
                    loads[each.stage].append(each.load)
        self.load = {stage: sum(found) / len(found) if found else 0.0 for stage, found in loads.items()}

    def add(self, stage: int, rate: float | None = None) -> None:
        self.replicas[stage] += 1
        self.rates[stage] += self._usual if rate is None else rate

    def choice(self, me: PeerId, held: Collection[int]) -> Choice:
        rescued = [stage for stage in sorted(held) if stage in self.stateless]
        # This state may exist nowhere else in the world.
        if rescued:
            stage = min(rescued, key=lambda stage: (self._rate(stage), _lot(me, stage)))
            return Choice(stage, f"its checkpoint is here, and no other peer has the state of stage {stage}")
        stage = min(
            self.replicas, key=lambda stage: (self._rate(stage), stage not in held, self._load(stage), _lot(me, stage))
        )
        return Choice(stage, self._reason(stage, held))

    def _rate(self, stage: int) -> float:
        return round(self.rates[stage] / self._usual / _RATE_STEP)

    def _load(self, stage: int) -> float:
        return -round(self.load[stage] / _LOAD_STEP)

    def _reason(self, stage: int, held: Collection[int]) -> str:
        count = self.replicas[stage]
        if not count:
            return f"no peer serves stage {stage}"
        equals = [other for other in self.replicas if self._rate(other) == self._rate(stage)]
        if len(equals) == 1 and count > min(self.replicas.values()):
            return f"stage {stage} is the slowest, with {count} replicas"
        number = f"{count} replica{'s' if count > 1 else ''}"
        if len(equals) == 1:
            return f"stage {stage} has the fewest replicas, {count}" if len(self.replicas) > 1 else "the only stage"
        if stage in held:
            return f"its checkpoint is here, and no stage has fewer replicas than its {count}"
        if all(self._load(stage) < self._load(other) for other in equals if other != stage):
            return f"no stage has fewer replicas than its {count}, and it has most to do"
        return f"drawn from {len(equals)} stages with {number} each"


def _rank(peer: PeerId) -> bytes:
    """The order in which newcomers are served."""
    return hashlib.sha256(f"placement/{peer}".encode()).digest()


def _lot(peer: PeerId, stage: int) -> bytes:
    return hashlib.sha256(f"placement/{peer}/{stage}".encode()).digest()
