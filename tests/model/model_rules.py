"""The numbers of the membership model, and which rules are on: a test takes one away and looks what breaks.

The model is the design of membership without the product: no tensors, no sockets, no signatures (a key signs only for
itself). A tick is a tenth of a second, or half a second where only the order of things matters.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

Peer = str
Ballot = tuple[int, int, Peer]
"""View, place in that view's order, and who keeps."""


@dataclass(frozen=True, slots=True)
class Clock:
    """All in ticks. suspect: T, long_silence: TL. view_limit: of view 0, at least. work: of one microbatch."""

    suspect: int = 6
    long_silence: int = 30
    view_limit: int = 36
    beat: int = 1
    term_steps: int = 4
    delays: tuple[int, ...] = (1, 1, 1, 2, 3)
    work: tuple[int, int] = (1, 3)
    exchange: int = 2
    snapshot: int = 4


COARSE = Clock()
"""Half a second a tick: everything is slow beside the timers. For random faults."""

FINE = Clock(
    suspect=30,
    long_silence=150,
    view_limit=180,
    beat=5,
    term_steps=16,
    delays=(1, 1, 1, 1, 2),
    work=(1, 3),
    exchange=1,
    snapshot=10,
)
"""A tenth of a second a tick, the default timers: for what a lie costs."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is in force.

    Sitting out: `cost` seconds times `sit_factor`, doubled with each repetition, at most `sit_most` long silences; or
    2^k steps, where sit_by_cost is off. keeper_sit_apart: who has kept in vain is passed over as keeper, and nothing
    else; who has held up a step is granted last, and may keep.
    """

    contributors: bool = True  # a roster's members have contributed; nobody waits for others
    trials: bool = True  # what newcomers cost is bounded as what one member costs
    join_share: float = 0.25  # of an equal share of the work of the last `leave_steps`, to join
    few_young: bool = True  # of seats younger than `leave_steps`, one, or a third of the older
    cut_off_waits: bool = True  # who hears no other stage certifies nothing against a live roster
    dormant: bool = False  # who takes no part in a step for TL does not count in it: forks
    leave_steps: int = 32  # without a contribution
    credit: bool = True  # who has contributed for a short time is waited for a short time
    leave_guard: bool = True  # ... and nobody leaves while fewer than half of the roster contribute
    sit_by_cost: bool = True
    sit_factor: float = 16.0
    sit_each: bool = True  # ... times the other members of the live roster: each of them keeps at times
    sit_most: float = 64.0  # long silences
    sit_keeper_most: float = 64.0  # long silences
    keeper_sit_apart: bool = True
    pass_over_together: bool = True  # in view 0, whom most of the live roster pass over
    reach_together: bool = True  # ... and whom most of it cannot reach
    own_pace: bool = True  # patience follows my own pace, not that of steps a liar can stretch
    slow_keepers: bool = True  # a keeper whose term loses time is charged
    short_patience: bool = True  # a stalled owner: max(2 T, 4 median steps) instead of 6 T
    going_back: bool = True
    records_hold: bool = True  # a silent holder of the newest state holds a stage's place while its record lasts
    brief: bool = True  # a report of what has not changed names its revision alone
    # Taken away by mutations:
    asks: bool = True  # a keeper asks for the whole report that it lacks
    live_roster: bool = True  # M4
    only_my_views_first: bool = True  # M13
    leave_out: bool = True  # M11
    certified: bool = True  # M9
    locks: bool = True  # M10
    nonces: bool = True  # M2
    most_ahead: bool = True  # M17
    pairs: bool = True  # M8
    wait_for_all: bool = True  # M7
    silence_is_no_loss: bool = True  # M3
    sitting_ends: bool = True  # M16


ALL_RULES = Rules()


class Sum(NamedTuple):
    """A finished sum: round id, and what is in it. forged: nobody has made it."""

    number: int
    ballot: Ballot
    content: int = 0
    forged: Peer = ""

    @property
    def round(self) -> tuple[int, Ballot]:
        """What it is the sum of; one key's acks of two sums of one round convict it."""
        return self.number, self.ballot


class Ack(NamedTuple):
    """Signed: this peer holds that sum of its stage's step, and vouches for these."""

    peer: Peer
    stage: int
    step: int
    sum: Sum
    vouched: frozenset[Peer]


Certificate = frozenset[Ack]
Commit = tuple[Sum, Certificate]


@dataclass(slots=True)
class Beat:
    """A heartbeat."""

    stage: int
    version: int
    chain: bytes
    synced: bool
    incarnation: int
    view: int
    ack: Ack | None
    last_ack: Ack | None
    commits: dict[int, Commit]
    last_commits: dict[int, Commit]
    convicted: frozenset[Peer]
    restart: int = 0
    disk: int = 0
    wants_back: bool = False
    passes_over: frozenset[Peer] = frozenset()
    serves: bool = True  # its state is whole, though it may be fetching a newer one


@dataclass(slots=True)
class Round:
    """What is summed: whose microbatches, of which generation. receivers: who gets the sum. reducers: who adds up."""

    sum: Sum
    ballot: Ballot
    sets: dict[Peer, tuple[int, frozenset[int]]]
    receivers: frozenset[Peer]
    reducers: frozenset[Peer]


@dataclass(slots=True)
class Order:
    """A keeper to one replica: what is its own, what is closed, the round. deny: who hold no sum of their own."""

    version: int
    chain: bytes
    ballot: Ballot
    heard: bool
    closed: frozenset[int]
    generation: int | None
    grants: frozenset[int]
    round: Round | None
    deny: frozenset[Peer] = frozenset()
    adopt: Sum | None = None
    whole: bool = False  # I lack your last whole report
    restart: int = 0


@dataclass(slots=True)
class Report:
    """A replica to its keeper. missing: whose parts of the round have not come.

    If it is not whole, what it holds is as in the report of that revision, and left out.
    """

    version: int
    chain: bytes
    ballot: Ballot
    generation: int
    granted: frozenset[int]
    summed: frozenset[int]
    sum: Sum | None
    missing: frozenset[Peer]
    round: Sum | None
    restart: int = 0
    whole: bool = True
    revision: int = 0


Message = Beat | Order | Report


@functools.cache
def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def digest(*what: object) -> bytes:
    """The same in every process."""
    return _digest(repr(what))


def most(some: Collection[Peer], of: Collection[Peer]) -> bool:
    """More than half of them?"""
    return 2 * len(set(some) & set(of)) > len(of)


@dataclass(slots=True)
class Sitting:
    """How patient one member is with the others (M16): who sits out, for what they have cost. Touches no vote."""

    rules: Rules
    clock: Clock
    until: dict[Peer, float] = field(default_factory=dict)
    until_step: dict[Peer, int] = field(default_factory=dict)
    times: dict[Peer, int] = field(default_factory=dict)

    def charge(
        self, peer: Peer, cost: float, *, others: int, step: int, now: int, limit: float, offence: bool = True
    ) -> None:
        """It has held me up for that long. others: members beside it. limit: in long silences."""
        times = min(self.times.get(peer, 0), 5)
        if offence:
            self.times[peer] = times + 1
        elif not self.rules.sit_by_cost:
            return
        else:
            self.times.setdefault(peer, 0)
        cap = limit * self.clock.long_silence
        if self.rules.sit_by_cost:
            factor = self.rules.sit_factor * (max(others, 1) if self.rules.sit_each else 1)
            length = min(factor * max(cost, 1.0) * 2**times, cap)
        else:
            self.until_step[peer] = step + 2 ** (times + 1)
            length = 4 * self.clock.long_silence
        if not self.rules.sitting_ends:
            length = 10**9
        self.until[peer] = max(self.until.get(peer, 0.0), now + length)

    def out(self, peer: Peer, *, step: int, now: int) -> bool:
        """Does it sit out now?"""
        return now < self.until.get(peer, 0.0) and step <= self.until_step.get(peer, step)

    def fade(self, *, now: int) -> None:
        """A long silence after it has sat out, one repetition is forgotten."""
        for peer, until in list(self.until.items()):
            if now > until + 4 * self.clock.long_silence:
                self.times[peer] -= 1
                self.until[peer] = float(now)
                if self.times[peer] <= 0:
                    del self.times[peer], self.until[peer]
                    self.until_step.pop(peer, None)
