"""The world of the membership model: replicas of all stages, directed links, delays, losses, faults, and what is wrong.

Parts of a round travel by direct links, or through one third member of it. The model sees what no replica sees: sums
that were never made, two sums of one step applied, versions given up.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass

from model_liars import LIES, Lie
from model_member import Member
from model_rules import ALL_RULES, COARSE, Clock, Message, Peer, Round, Rules, Sum, digest


@dataclass(frozen=True, slots=True)
class Setup:
    """A pipeline. liars: of one stage; None as modes: drawn, and drawn again as the run goes on."""

    stages: int = 2
    replicas: int = 3
    liars: int = 0
    modes: tuple[str, ...] | None = None
    microbatches: int = 4
    clock: Clock = COARSE
    rules: Rules = ALL_RULES
    loss: float = 0.0
    faults: tuple[str, ...] = ()
    fault_every: int = 12
    joins: int = 0
    stranger_every: int = 0
    stranger_modes: tuple[str, ...] = ("silent",)
    stranger_stays: int = 10**9


@dataclass(frozen=True, slots=True)
class _Applied:
    member: Member
    incarnation: int
    chain: int
    sum: Sum
    full: bool


class World:
    """One run of one seed."""

    disk_steps = 4

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.seed, self.rng = setup, seed, random.Random(seed)
        self.rules, self.clock, self.stages = setup.rules, setup.clock, setup.stages
        self.microbatches, self.loss, self.now = setup.microbatches, setup.loss, 0
        self.record_ticks = 4 * self.clock.long_silence
        self.founders = {k: [f"{k}.{i}" for i in range(setup.replicas)] for k in range(setup.stages)}
        self.lying_stage = self.rng.randrange(setup.stages)
        self.liars: set[Peer] = set(self.rng.sample(self.founders[self.lying_stage], setup.liars))
        self.members: dict[Peer, Member] = {}
        self.cut: set[tuple[Peer, Peer]] = set()
        self.cut_for_ever: frozenset[tuple[Peer, Peer]] = frozenset()
        self._due: dict[int, list[tuple[Peer, Peer, Message]]] = defaultdict(list)
        self._later: dict[int, list[tuple[str, Peer, Peer]]] = defaultdict(list)
        self._contributors: dict[Sum, dict[Peer, int]] = {}
        self._receivers: dict[Sum, frozenset[Peer]] = {}
        self._restarts: dict[int, int] = {}
        self._applied: dict[tuple[int, int, int], dict[Peer, _Applied]] = defaultdict(dict)
        self.committed_at: dict[int, int] = {}
        self.bad: Counter[str] = Counter()
        self.charges: Counter[tuple[bool, bool]] = Counter()
        self.charged_ticks: Counter[tuple[bool, bool]] = Counter()
        self.returns: list[tuple[int, Peer, int, int]] = []
        self.snapshots = self.strangers = 0
        self.joins = setup.joins
        for stage, peers in self.founders.items():
            for peer in peers:
                self._add(peer, stage, self._lie(setup.modes) if peer in self.liars else None)

    def _add(self, peer: Peer, stage: int, lie: Lie | None, *, synced: bool = True) -> Member:
        member = self.members[peer] = Member(self, peer, stage, lie, synced=synced)
        return member

    def _lie(self, modes: tuple[str, ...] | None) -> Lie:
        rng = random.Random(self.rng.random())
        if modes is None:
            return Lie(rng, rng.sample(sorted(LIES), rng.randint(1, 3)), redraw=True)
        return Lie(rng, list(modes))

    # ------------------------------------------------------------ what replicas may ask

    def of_stage(self, stage: int) -> list[Peer]:
        """Everybody there is of a stage."""
        return [peer for peer, member in self.members.items() if member.stage == stage]

    def honest(self, stage: int) -> list[Member]:
        """Of a stage, those that run and do not lie."""
        return [member for member in self.members.values() if member.stage == stage and member.up and not member.lie]

    def shuffled(self, *what: object) -> bytes:
        """A number that nobody chose."""
        return digest(self.seed, *what)

    def reaches(self, one: Peer, other: Peer) -> bool:
        """Does what one sends arrive?"""
        return (one, other) not in self.cut

    def linked(self, one: Peer, other: Peer) -> bool:
        """Can one fetch from the other?"""
        return self.reaches(one, other) and self.reaches(other, one) and self.members[other].up

    def serves(self, peer: Peer, version: int, sum_: Sum) -> bool:
        """Would it hand out this sum?"""
        member = self.members[peer]
        if not member.up or member.paused_until > self.now:
            return False
        if member.lie:
            held = (member.version, member.sum) == (version, sum_) and "falseack" not in member.lie.modes
            return held or not self.rules.certified
        return (member.version, member.sum) == (version, sum_) or member.last_sum == (version, sum_)

    def part_came(self, peer: Peer, to: Member, current: Round) -> bool:
        """Has that member's part of the round come through?"""
        member = self.members[peer]
        if not member.up or member.paused_until > self.now or member.version != to.version:
            return False
        if member.lie:
            goes = member.synced and member.lie.sends_parts(to.id, self.of_stage(to.stage))
        else:
            same = member.round is not None and member.round.sum == current.sum and member.round.sets == current.sets
            goes = same or member.sum == current.sum
        through = (
            other not in (peer, to.id) and self.linked(peer, other) and self.linked(other, to.id)
            for other in current.receivers
        )
        return not (not goes or not (self.linked(peer, to.id) or any(through)))

    def contributors(self, sum_: Sum) -> dict[Peer, int]:
        """Whose work is in it, and how much. Who holds a sum knows."""
        return self._contributors.get(sum_, {})

    def named(self, sum_: Sum) -> frozenset[Peer]:
        """Who was to get it: its round says so, to everybody alike."""
        return self._receivers.get(sum_, frozenset())

    def made(self, current: Round) -> None:
        """A round is whole somewhere."""
        self._receivers[current.sum] = current.receivers
        self._contributors[current.sum] = {peer: len(indexes) for peer, (_, indexes) in current.sets.items()}

    # ------------------------------------------------------------ what the model watches

    def charged(self, by: Member, peer: Peer, cost: float) -> None:
        """Somebody sits out. Counted: is the charger honest, is the charged."""
        self.charges[by.lie is None, self.members[peer].lie is None] += 1
        self.charged_ticks[by.lie is None, self.members[peer].lie is None] += int(cost)

    def applied(self, member: Member, sum_: Sum, *, full: bool) -> None:
        """An honest replica applies a step."""
        if any(commit.forged for commit, _ in member.commits.values()):
            self.bad["forged sum" if sum_.forged else "forged commit"] += 1
        step = self._applied[member.restart, member.stage, member.version]
        for other in step.values():
            lives = other.member.up and other.member.incarnation == other.incarnation
            if lives and other.chain == member.chain and other.sum != sum_:
                self.bad["fork of two majorities" if full and other.full else "fork"] += 1
                break
        step[member.id] = _Applied(member, member.incarnation, member.chain, sum_, full)
        self.committed_at.setdefault(member.version, self.now)

    def went_back(self, member: Member) -> None:
        """M20: a replica gives its version up. Was there a majority of each stage that had it, and could go on?"""
        known = max(other.restart for other in self.members.values())
        follows = known > member.restart  # somebody has gone back already: a hint that I agree with
        number = known if follows else known + 1
        disks = min(other.disk for other in self.members.values() if other.up and not other.lie)
        to = self._restarts.setdefault(number, disks)
        newest = max(other.version for other in self.members.values() if other.up and not other.lie)
        able = all(
            any(m.synced and m.version >= newest - 1 and m.paused_until <= self.now for m in self.honest(k))
            for k in range(self.stages)
        )
        self.returns.append((self.now, member.id, member.version, to))
        if able and not follows:
            self.bad["gave up a version that lives"] += 1
        for other in self.members.values():
            if other is member or (other.restart < number and other.up and not other.lie and other.lag.wants_back):
                other.restart, other.version, other.synced = number, to, True
                other.chain = digest("restart", number, to)
                other.disk = to
                other.lag.source, other.lag.wakes_at, other.lag.keeps_old = None, None, False
                other.lag.wants_back, other.lag.empty_at = False, {}
                other.opinions.rosters = {k: set() for k in range(self.stages)}
                other.last_commits, other.last_sum, other.last_ack = {}, None, None
                other.generation += 1
                other.begin()

    # ------------------------------------------------------------ time

    def send(self, sender: Peer, to: Peer, message: Message) -> None:
        """It arrives after a while, or never."""
        if not self.loss or self.rng.random() >= self.loss:
            self._due[self.now + self.rng.choice(self.clock.delays)].append((sender, to, message))

    def step(self) -> None:
        """One tick."""
        self.now += 1
        for what, peer, other in self._later.pop(self.now, ()):
            if what == "heal":
                if (peer, other) not in self.cut_for_ever:
                    self.cut.discard((peer, other))
            elif what == "quit":
                self.members[peer].up = False
            else:
                self._boot(self.members[peer])
        for sender, to, message in self._due.pop(self.now, ()):
            self._deliver(sender, to, message)
        if self.setup.stranger_every and self.now % self.setup.stranger_every == 0:
            self._stranger()
        order = sorted(self.members)
        self.rng.shuffle(order)
        for peer in order:
            member = self.members[peer]
            if member.up and member.paused_until <= self.now:
                member.tick()

    def _deliver(self, sender: Peer, to: Peer, message: Message) -> None:
        member, origin = self.members.get(to), self.members.get(sender)
        if member is None or origin is None or not member.up or not self.reaches(sender, to):
            return
        if not origin.up and self.rng.random() < 0.5:
            return  # it died with the message half out
        if member.paused_until > self.now:
            self._due[member.paused_until + 1].append((sender, to, message))
        elif not (member.lie and member.lie.only_beats):
            member.receive(sender, message)

    def _stranger(self) -> None:
        """A fresh identity, with the newest state."""
        self.strangers += 1
        peer = f"{self.lying_stage}.s{self.strangers:03}"
        self.liars.add(peer)
        member = self._add(peer, self.lying_stage, self._lie(self.setup.stranger_modes), synced=False)
        if member.lie and member.lie.only_beats:
            member.synced = True
        if self.setup.stranger_stays < 10**9:
            self._later[self.now + self.setup.stranger_stays].append(("quit", peer, peer))

    def _boot(self, member: Member) -> None:
        member.up, member.synced, member.generation = True, False, 0
        member.incarnation += 1
        member.start()

    def cut_off(self, peer: Peer, ticks: int, *, inward: bool = True, outward: bool = True) -> None:
        """Nothing comes through to (from) this peer for a while."""
        for other in self.members:
            if other != peer:
                pairs = [(other, peer)] * inward + [(peer, other)] * outward
                self.cut |= set(pairs)
                self._later[self.now + ticks] += [("heal", *pair) for pair in pairs]

    def kill(self, peer: Peer, *, restarts_after: int = 0) -> None:
        """A crash; it starts again after so many ticks, or never."""
        self.members[peer].up = False
        if restarts_after:
            self._later[self.now + restarts_after].append(("boot", peer, peer))

    def join(self, stage: int, peer: Peer, *, slow: int = 1) -> Member:
        """An honest newcomer without state."""
        member = self._add(peer, stage, None, synced=False)
        member.slow = slow
        return member

    # ------------------------------------------------------------ faults at random

    def fault(self) -> None:
        """One of the setup's."""
        rng, unit = self.rng, self.clock.suspect
        kind, peer = rng.choice(self.setup.faults), rng.choice(sorted(self.members))
        member, other = self.members[peer], rng.choice(sorted(self.members))
        match kind:
            case "crash" if member.up and not member.lie and self._spare(peer):
                self.kill(peer, restarts_after=rng.randint(unit, 10 * unit) if rng.random() < 0.7 else 0)
            case "pause" if member.up:
                least, most = (unit // 2, 4 * unit) if rng.random() < 0.8 else (5 * unit, 12 * unit)
                member.paused_until = self.now + rng.randint(least, most)
            case "one way" if other != peer:
                self.cut.add((other, peer))
                self._later[self.now + rng.randint(2 * unit, 15 * unit)].append(("heal", other, peer))
            case "pair" if other != peer:
                self.cut |= {(peer, other), (other, peer)}
                at = self.now + rng.randint(2 * unit, 15 * unit)
                self._later[at] += [("heal", peer, other), ("heal", other, peer)]
            case "uncallable" if not self.cut:
                self.cut_off(peer, 13 * unit, outward=False)
            case "cable" if not self.cut:
                self.cut_off(peer, 7 * unit)
            case "slow":
                member.slow = rng.choice((1, 1, 3, 5))
            case "all but one":
                self._kill_all_but_one(rng.randrange(self.stages))
            case "join" if self.joins:
                self.joins -= 1
                stage = rng.randrange(self.stages)
                self.join(stage, f"{stage}.{len(self.of_stage(stage))}j")

    def _spare(self, peer: Peer) -> bool:
        """Would somebody with the newest state, and the sum if it is committed, survive? And an honest majority?"""
        member = self.members[peer]
        stage = member.stage
        rest = self._worthy(stage, [other for other in self.honest(stage) if other is not member])
        if self.liars and stage == self.lying_stage:
            return bool(rest) and sum(m.synced for m in self.honest(stage)) > len(self.liars) + 1
        return bool(rest)

    def _worthy(self, stage: int, rest: list[Member]) -> list[Member]:
        honest = self.honest(stage)
        top = max((member.version for member in honest if member.synced), default=0)
        everybody = [member for member in self.members.values() if member.up and not member.lie]
        committed = [m.commits[stage][0] for m in everybody if m.version == top and stage in m.commits]
        committed += [m.last_commits[stage][0] for m in everybody if m.version == top + 1 and stage in m.last_commits]
        held = any(member.sum for member in honest if member.version == top)
        level = [m for m in rest if m.synced and m.paused_until <= self.now and m.version == top]
        if committed:
            return [member for member in level if member.sum == committed[0]]
        return [member for member in level if member.sum is not None or not held]

    def _kill_all_but_one(self, stage: int) -> None:
        if self.liars and stage == self.lying_stage:
            return
        worthy = self._worthy(stage, self.honest(stage))
        if worthy:
            spared = self.rng.choice(sorted(worthy, key=lambda member: member.id))
            for member in self.honest(stage):
                if member is not spared:
                    member.up = False
