"""How near a run stays to its best while peers come and go: our placement, SWARM's rule and GWTF's on one seeded trace.

    python benchmarks/rebalance.py [--json FILE]         32 hours, about 200 peers, 8 stages: a minute
    python benchmarks/rebalance.py --hours 4 --peers 80  a shorter look

The trace: preemptible machines of four speeds (1 to 2) and of lines of 100 Mbit/s to 1 Gbit/s arrive in a Poisson
process whose rate follows the hour of the day, and stay sixteen hours on average. Every eight hours, about, a zone is
preempted (a quarter of all peers), and every four a stage loses all its replicas but one. Whoever starts, or moves,
has to fetch 300 MB at 0.8 of its line (from 25 donors, of which each gives a tenth), and takes a few seconds to begin.

Played on it, a second at a time:

ours      the production classes: `peer.placement.choose` for newcomers; `Promises`, `Picture` and `Rebalancer` of
          `peer.rebalance` for each member. They see records two seconds old; one of a dead peer stays for 30 s, and
          for one second with the stages beside it. Rates are measured, 1 % off; of a newcomer after half a minute.
swarm_t   SWARM's (arXiv:2301.11913): every T seconds one peer of the least loaded stage goes to the most loaded one,
          and fetches the state there, having left. Here it sees true rates at once, and moves nobody in vain.
gwtf      GWTF's (arXiv:2509.21221): newcomers are added where the flow is narrowest, by true rates; members stay.

The rate of the run is that of its slowest stage. It is compared with a bound of what any assignment of those who could
serve at that moment reaches: the sum of their rates over the stages. overall, last_hour and the others: what was
computed, over what would have been. moves: per peer and hour. back: seconds until a wiped stage serves half of the
stages' mean rate again, or as much as it did before.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from harness import Benchmark, write

from swarmnet.ids import PeerId
from swarmnet.peer.placement import Serving, choose
from swarmnet.peer.rebalance import Picture, Promises, Rebalancer, RecentMoves, Rules

STATE_BITS, START_S, LEAVE_S = 300e6 * 8, 5.0, 3.0
"""The state of a stage; what it takes to begin; and what a peer takes to leave in good order."""

SEEN_S, GHOST_S, NEAR_S, MEASURED_S = 2.0, 30.0, 1.0, 30.0
LIFE_S, ZONES, ZONE_S, WIPE_S, OFF = 16 * 3600.0, 4, 8 * 3600.0, 4 * 3600.0, 0.01
SPEEDS = (1.0, 1.25, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A machine of the trace."""

    at: float
    peer: PeerId
    rate: float
    seen_rate: float
    fetch_s: float
    ends: float
    zone: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What happens, whoever places. wipes: (when, stage). preemptions: (when, zone)."""

    arrivals: tuple[Arrival, ...]
    wipes: tuple[tuple[float, int], ...]
    preemptions: tuple[tuple[float, int], ...]
    seconds: int
    stages: int


def trace_of(seed: int, hours: float, peers: int, stages: int) -> Trace:
    """Peers are there from the first second on; the mean of those there is about `peers`."""
    rng, seconds = random.Random(seed), int(hours * 3600)
    arrivals: list[Arrival] = []

    def arrive(at: float) -> None:
        rate, line = rng.choice(SPEEDS), 10 ** rng.uniform(8, 9)
        life = rng.expovariate(1 / LIFE_S)
        peer = PeerId(f"p{len(arrivals)}")
        seen = rate * math.exp(rng.gauss(0.0, OFF))
        arrivals.append(Arrival(at, peer, rate, seen, STATE_BITS / (0.8 * line), at + life, rng.randrange(ZONES)))

    for _ in range(peers):
        arrive(0.0)
    at = 0.0
    # Wipes and preemptions take peers, too: about as many again as are given for them here.
    lost = 1 / LIFE_S + 0.25 / ZONE_S + 1 / (stages * WIPE_S)
    while True:
        day = 1 + 0.3 * math.sin(2 * math.pi * at / 86400)
        at += rng.expovariate(peers * lost * day)
        if at >= seconds:
            break
        arrive(at)

    def every(mean_s: float, choices: int) -> tuple[tuple[float, int], ...]:
        when, found = 0.0, []
        while (when := when + mean_s * rng.uniform(0.5, 1.5)) < seconds - 300:
            found.append((when, rng.randrange(choices)))
        return tuple(found)

    return Trace(tuple(arrivals), every(WIPE_S, stages), every(ZONE_S, ZONES), seconds, stages)


@dataclass(eq=False)
class Member:
    """One peer in the simulation. serves: does it compute now? going: the stage to which it moves."""

    who: Arrival
    stage: int
    serves: bool = False
    could: bool = False
    leaving: bool = False
    going: int | None = None
    rebalancer: Rebalancer | None = None
    moves: RecentMoves = field(default_factory=RecentMoves)
    up: bool = True
    served_at: float = field(default=0.0)


@dataclass
class Found:
    """What came of one rule."""

    done: list[float]
    best: list[float]
    moves: int
    peer_hours: float
    back: list[float]
    lasting: int
    """Wiped stages that were not back when they were wiped again, or at the end."""

    def share(self, last: int | None = None) -> float:
        done, best = (self.done[-last:], self.best[-last:]) if last else (self.done, self.best)
        return sum(done) / sum(best)


class Simulation:
    """A trace under one rule. place: the stage of a newcomer; every: called each second."""

    def __init__(self, trace: Trace, seed: int) -> None:
        self.trace, self.rng, self.now = trace, random.Random(seed), 0.0
        self.members: dict[PeerId, Member] = {}
        self.rates = [0.0] * trace.stages
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.moves = 0
        self._wiped: dict[int, tuple[float, float]] = {}
        self._back: list[float] = []
        self._lasting = 0
        for arrival in trace.arrivals:
            self.at(arrival.at, lambda arrival=arrival: self._arrive(arrival))
        for when, stage in trace.wipes:
            self.at(when, lambda stage=stage: self._wipe(stage))
        for when, zone in trace.preemptions:
            self.at(when, lambda zone=zone: self._preempt(zone))

    def place(self, arrival: Arrival) -> int:
        """By true rates; a fetching replica counts already."""
        counted = [0.0] * self.trace.stages
        for member in self.members.values():
            counted[member.stage if member.going is None else member.going] += member.who.rate
        return min(range(self.trace.stages), key=lambda stage: counted[stage])

    def every(self) -> None:
        """Nothing: members stay."""

    def changed(self, member: Member) -> None:
        """What a member announces is another thing now."""

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, what))

    def run(self) -> Found:
        done, best, hours = [], [], 0.0
        sums, stale = (0.0, 0.0), True
        for second in range(self.trace.seconds):
            self.now = float(second)
            while self._events and self._events[0][0] <= second:
                heapq.heappop(self._events)[2]()
                stale = True
            moves = self.moves
            self.every()
            if stale or moves != self.moves:
                self.rates = [0.0] * self.trace.stages
                could = 0.0
                for member in self.members.values():
                    if member.serves:
                        self.rates[member.stage] += member.who.rate
                    if member.could:
                        could += member.who.rate
                sums, stale = (min(self.rates), could / self.trace.stages), False
                self._look_back()
            done.append(sums[0])
            best.append(sums[1])
            hours += len(self.members) / 3600
        return Found(done, best, self.moves, hours, self._back, self._lasting + len(self._wiped))

    def begin(self, member: Member, after_s: float) -> None:
        """It serves its stage after a while."""

        def serve() -> None:
            if member.up:
                member.serves = member.could = True
                member.served_at = self.now
                self.changed(member)

        self.at(self.now + after_s, serve)

    def leave(self, member: Member) -> None:
        if member.up:
            member.up = False
            del self.members[member.who.peer]
            self.changed(member)

    # ------------------------------------------------------------ what happens

    def _arrive(self, arrival: Arrival) -> None:
        # The run begins with peers that hold its weights.
        member = Member(arrival, self.place(arrival))
        self.members[arrival.peer] = member
        self.begin(member, arrival.fetch_s + START_S if arrival.at else 0.0)
        self.at(arrival.ends, lambda: self.leave(member))
        self.changed(member)

    def _wipe(self, stage: int) -> None:
        there = [each for each in self.members.values() if each.stage == stage and each.serves]
        if stage in self._wiped:
            self._lasting += 1
        self._wiped[stage] = self.now, self.rates[stage]
        for member in self.rng.sample(there, max(len(there) - 1, 0)):
            self.leave(member)

    def _preempt(self, zone: int) -> None:
        for member in [each for each in self.members.values() if each.who.zone == zone]:
            # One replica of each stage is spared: its state would be gone.
            if sum(each.stage == member.stage and each.serves for each in self.members.values()) > 1:
                self.leave(member)

    def _look_back(self) -> None:
        mean = sum(self.rates) / self.trace.stages
        for stage, (when, before) in list(self._wiped.items()):
            if self.rates[stage] >= min(mean / 2, before) and self.now > when:
                self._back.append(self.now - when)
                del self._wiped[stage]


class Swarm(Simulation):
    """SWARM's rule."""

    def __init__(self, trace: Trace, seed: int, period_s: int) -> None:
        super().__init__(trace, seed)
        self._period_s = period_s

    def every(self) -> None:
        if self.now == 0 or self.now % self._period_s:
            return
        poor = min(range(self.trace.stages), key=lambda stage: self.rates[stage])
        rich = max(range(self.trace.stages), key=lambda stage: self.rates[stage])
        there = [each for each in self.members.values() if each.stage == rich and each.serves]
        useful = [each for each in there if self.rates[rich] - each.who.rate > self.rates[poor]]
        if useful and len(there) > 1:
            mover = self.rng.choice(useful)
            self.moves += 1
            mover.serves, mover.stage = False, poor
            self.begin(mover, mover.who.fetch_s + START_S)


class Ours(Simulation):
    """The production classes, and what they see."""

    def __init__(self, trace: Trace, seed: int, rules: Rules) -> None:
        self._rules = rules
        self._stages = range(trace.stages)
        self._records: dict[PeerId, Serving] = {}
        self._gone: list[set[PeerId]] = [set() for _ in self._stages]  # whose death a stage knows of already
        self._promises = Promises(rules)
        self._pictures: dict[frozenset[PeerId], Picture] = {}
        self._believed: list[Serving] = []
        super().__init__(trace, seed)

    def place(self, arrival: Arrival) -> int:
        return choose(arrival.peer, self._stages, tuple(self._records.values())).stage

    def changed(self, member: Member) -> None:
        peer = member.who.peer
        if not member.up:
            near = [self._gone[stage] for stage in self._stages if abs(stage - member.stage) <= 1]
            self.at(self.now + NEAR_S, lambda: [each.add(peer) for each in near])
            self.at(self.now + GHOST_S, lambda: self._see(peer, None))
            return
        intent = member.rebalancer.intent if member.rebalancer else None
        record = Serving(
            peer,
            member.stage,
            member.could,
            member.leaving,
            synced=member.serves,
            rate=member.who.seen_rate if self.now - member.served_at >= MEASURED_S and member.serves else None,
            may_move=True,
            going=intent.to if intent else None,
            surely=bool(intent and intent.surely),
        )

        def seen() -> None:
            if member.up:
                self._see(peer, record)

        # The first peers know each other from the start; a newcomer says what it has chosen before it begins.
        self.at(self.now + (SEEN_S if self.now else 0.0), seen)

    def begin(self, member: Member, after_s: float) -> None:
        super().begin(member, after_s)

        def serves() -> None:
            if member.up and member.rebalancer is None:
                rules = replace(self._rules, fetch_s=member.who.fetch_s)
                member.rebalancer = Rebalancer(member.who.peer, rules, now=self.now, recent_moves=member.moves)

        # Only by then the records of those who died before it came have ended.
        self.at(self.now + after_s + (GHOST_S if self.now else 0.0), serves)
        self.at(self.now + after_s + MEASURED_S, lambda: self.changed(member))

    def every(self) -> None:
        # Promises grow old while nothing is said.
        if not self._pictures or self.now % 10 == 0:
            self._believed = self._promises.believed(tuple(self._records.values()), self.now)
            self._pictures = {}
        pictures = [self._picture(frozenset(gone)) for gone in self._gone]
        for member in list(self.members.values()):
            rebalancer, picture = member.rebalancer, pictures[member.stage]
            if rebalancer is None or not member.serves or rebalancer.intent.surely:
                continue
            if self.now < rebalancer.due and not picture.in_distress:
                continue
            before = rebalancer.intent
            intent = rebalancer.decide(picture, self._stages, now=self.now)
            if intent != before:
                self.changed(member)
            if intent.surely and intent.to is not None:
                self.at(self.now + member.who.fetch_s, lambda member=member, to=intent.to: self._go(member, to))

    def _go(self, member: Member, to: int) -> None:
        """Its state is here: leave in good order, and begin there."""
        if not member.up:
            return
        member.leaving, member.serves, member.going = True, False, to
        self.changed(member)
        self.moves += 1

        def arrive() -> None:
            if member.up:
                member.stage, member.going, member.leaving, member.rebalancer = to, None, False, None
                self.changed(member)
                self.begin(member, START_S)

        self.at(self.now + LEAVE_S, arrive)

    def _see(self, peer: PeerId, record: Serving | None) -> None:
        self._pictures = {}
        if record is not None:
            self._records[peer] = record
            return
        self._records.pop(peer, None)
        for each in self._gone:
            each.discard(peer)

    def _picture(self, gone: frozenset[PeerId]) -> Picture:
        if gone not in self._pictures:
            serving = [each for each in self._believed if each.peer not in gone]
            self._pictures[gone] = Picture(self.trace.stages, serving, self._rules)
        return self._pictures[gone]


def main() -> int:
    parser = Benchmark(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=32.0)
    parser.add_argument("--peers", type=int, default=200)
    parser.add_argument("--stages", type=int, default=8)
    options = parser.asked()
    trace = trace_of(options.seed, options.hours, options.peers, options.stages)
    began = time.monotonic()
    rules = replace(Rules(), fetch_s=10.0)
    found = {
        "ours": Ours(trace, options.seed, rules).run(),
        "swarm_t60": Swarm(trace, options.seed, 60).run(),
        "swarm_t300": Swarm(trace, options.seed, 300).run(),
        "gwtf": Simulation(trace, options.seed).run(),
    }
    print(
        f"{options.hours:g} hours, {len(trace.arrivals)} peers, {found['ours'].peer_hours / options.hours:.0f} at a "
        f"time, {len(trace.wipes)} wiped stages, {len(trace.preemptions)} preempted zones"
    )
    print(
        f"{'rule':12} {'overall':>8} {'last hour':>10} {'moves':>7} {'back (s): median':>17} {'worst':>6} {'never':>6}"
    )
    for name, each in found.items():
        back = sorted(each.back) or [math.nan]
        print(
            f"{name:12} {each.share():8.3f} {each.share(3600):10.3f} {each.moves / each.peer_hours:7.2f} "
            f"{statistics.median(back):17.0f} {back[-1]:6.0f} {each.lasting:6d}"
        )
    print(f"took {time.monotonic() - began:.0f} s")
    ours = found["ours"]
    result = {"overall": ours.share(), "last_hour": ours.share(3600)}
    result |= {name: each.share() for name, each in found.items() if name != "ours"}
    result |= {"moves_per_peer_hour": ours.moves / ours.peer_hours, "back_s": sorted(ours.back)}
    write(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
