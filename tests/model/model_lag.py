"""How a replica gets level: it fell behind, lost a fork, was stopped, joins, or its run goes back (M17 to M20)."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from model_rules import Peer

if TYPE_CHECKING:
    from model_member import Member


class Lag:
    """Of one process. source: whom it fetches a snapshot from, and when that is there."""

    def __init__(self, of: Member) -> None:
        self.of = of
        self.source: tuple[Peer, int] | None = None
        self.keeps_old = False  # the old state serves until the new one is whole
        self.wakes_at: int | None = None
        self.behind_at: int | None = None
        self.empty_at: dict[int, int] = {}
        self.wants_back = False
        self.alone_at: int | None = None

    def stepped(self) -> None:
        """A step was applied."""
        self.behind_at = None

    # ------------------------------------------------------------ stopped, joining

    def wake(self, *, since: int) -> None:
        """M19: after a stop of more than TL, look before having a say."""
        of = self.of
        if of.synced and of.world.now - since > of.clock.long_silence:
            of.synced, self.wakes_at, self.source = False, of.world.now + of.clock.suspect, None

    def join(self) -> None:
        """I have no state, or none that I may speak for."""
        if self.wakes_at is not None:
            self._look_around()
        elif self.source is None:
            self._choose()
            self._go_back()
        elif self.of.world.now >= self.source[1]:
            self._restore()

    def _look_around(self) -> None:
        of = self.of
        assert self.wakes_at is not None
        if of.world.now < self.wakes_at:
            return
        self.wakes_at = None
        mates = [x for x in self._mates() if of.opinions.alive(x)]
        ahead = [x for x in mates if of.opinions.version(x) > of.version]
        if ahead and 2 * len(ahead) > len(mates):
            self.fetch(of.world.rng.choice(sorted(ahead)))
        else:
            of.synced = True

    def _mates(self) -> list[Peer]:
        of = self.of
        return [
            peer
            for peer in of.world.of_stage(of.stage)
            if peer != of.id
            and peer in of.opinions.beats
            and of.opinions.beats[peer].synced
            and peer not in of.convicted
        ]

    def _choose(self) -> None:
        of = self.of
        mates = [peer for peer in self._mates() if of.world.linked(of.id, peer)]
        version = of.opinions.version
        good = [x for x in mates if 2 * sum(version(y) >= version(x) for y in mates) > len(mates)]
        if good:
            self.source = (of.world.rng.choice(sorted(good)), of.world.now + of.clock.snapshot)

    def fetch(self, peer: Peer) -> None:
        """Take over its state; mine serves until then."""
        of = self.of
        other = of.world.members[peer]
        if other.lie and "nosnap" in other.lie.modes:
            return
        if other.lie and "ahead" in other.lie.modes:
            of.world.bad["believed a lie about the version"] += 1
            self.behind_at = None
            return
        if other.version < of.version or (other.version, other.chain) == (of.version, of.chain):
            return
        of.synced, self.keeps_old, of.keeper = False, True, None
        self.source = (peer, of.world.now + of.clock.snapshot)

    def _restore(self) -> None:
        of, world = self.of, self.of.world
        assert self.source is not None
        other, self.source = world.members[self.source[0]], None
        serves = other.up and (other.synced or other.lag.keeps_old)
        if self.keeps_old:
            self.keeps_old = False
            if not serves or other.version < of.version or (other.version, other.chain) == (of.version, of.chain):
                of.synced = True
                return
        elif not serves or not world.linked(of.id, other.id) or other.paused_until > world.now:
            return
        if other.lie and "nosnap" in other.lie.modes:
            return
        of.version, of.chain, of.synced = other.version, other.chain, True
        of.restart, of.disk = other.restart, other.version
        of.last_commits, of.last_sum = dict(other.last_commits), other.last_sum
        of.last_ack = None
        of.opinions.rosters = {k: set(roster) for k, roster in other.opinions.rosters.items()}
        of.opinions.given = {k: deque(given, given.maxlen) for k, given in other.opinions.given.items()}
        of.opinions.seated = {k: dict(seated) for k, seated in other.opinions.seated.items()}
        of.opinions.steps = dict(other.opinions.steps)
        of.opinions.earned = {k: Counter(earned) for k, earned in other.opinions.earned.items()}
        of.generation += 1
        of.begin()
        of.sum = None if of.lie else other.sum
        of.commits = dict(other.commits)
        world.snapshots += 1

    # ------------------------------------------------------------ behind, forked

    def look(self) -> None:
        """Am I behind (M17), on the losing side of a fork (M18), or is the run at its end (M20)?"""
        of = self.of
        self._go_back()
        if not of.synced:
            return
        others = of.opinions.live(of.stage) - {of.id}
        ahead = {x for x in others if self._speaks(x) and of.opinions.version(x) > of.version}
        good = [x for x in ahead if of.world.linked(of.id, x) and self._believed(x, ahead, others)]
        if not good and self._stages_ahead():  # my roster may know nobody who went on: others of my stage did
            good = [
                x
                for x in self._mates()
                if self._speaks(x) and of.opinions.version(x) > of.version and of.world.linked(of.id, x)
            ]
        if good:
            now = of.world.now
            self.behind_at = now if self.behind_at is None else self.behind_at
            company = of.world.stages > 1 or len(others) > 1
            if now - self.behind_at > (of.clock.suspect if company else of.clock.long_silence):
                self.fetch(of.world.rng.choice(sorted(good)))
            return
        self.behind_at = None
        self._heal(others)

    def _speaks(self, peer: Peer) -> bool:
        beat = self.of.opinions.beats.get(peer)
        return beat is not None and beat.synced and beat.restart == self.of.restart and self.of.opinions.alive(peer)

    def _stages_ahead(self) -> bool:
        """Is most of another stage past my version? It cannot be without my stage's commit."""
        of = self.of
        return any(
            2 * sum(of.opinions.version(x) > of.version for x in of.opinions.live(k)) > len(of.opinions.live(k))
            for k in range(of.world.stages)
            if k != of.stage
        )

    def _believed(self, peer: Peer, ahead: set[Peer], others: set[Peer] | frozenset[Peer]) -> bool:
        """More than half of the others are that far; or most of another stage; or for 2 TL no state has a majority."""
        of = self.of
        if not of.rules.most_ahead:
            return True
        version = of.opinions.version
        as_far = {x for x in ahead if version(x) >= version(peer)}
        if len(others) > 1:
            enough = 2 * len(as_far) > len(others)
        else:
            seen = any(
                version(x) > of.version and of.opinions.alive(x)
                for k in range(of.world.stages)
                if k != of.stage
                for x in of.opinions.live(k)
            )
            enough = len(as_far) == 1 and (seen or of.world.stages == 1)
        if enough or self._stages_ahead():
            return True
        waited = of.world.now - max(of.begun, of.opinions.born)
        chains = Counter([of.chain, *(of.opinions.beats[x].chain for x in others if x in of.opinions.beats)])
        split = waited > 2 * of.clock.long_silence and not any(2 * n > len(others) + 1 for n in chains.values())
        return split and version(peer) < of.version + 40

    def _heal(self, others: set[Peer] | frozenset[Peer]) -> None:
        """The chain that most hold wins, then the lower; who holds a commit does not yield."""
        of = self.of
        if of.stage in of.commits:
            return
        level = {x for x in others if self._speaks(x) and of.opinions.version(x) == of.version}
        chains = Counter(of.opinions.beats[x].chain for x in level)
        mine = 1 + chains.pop(of.chain, 0)
        if not chains:
            return
        chain, number = min(chains.items(), key=lambda item: (-item[1], item[0]))
        if number > mine or (number == mine and chain < of.chain):
            holders = [x for x in level if of.opinions.beats[x].chain == chain and of.world.linked(of.id, x)]
            if holders:
                self.fetch(of.world.rng.choice(sorted(holders)))

    # ------------------------------------------------------------ going back

    def _may_come_back(self, peer: Peer) -> bool:
        """Heard; or silent, and not known to be dead while its record lasts: its cable may be out."""
        opinions = self.of.opinions
        if not self.of.rules.records_hold:
            return opinions.recently(peer) and opinions.beats[peer].synced
        lasts = self.of.world.now - opinions.heard.get(peer, -(10**9)) <= self.of.world.record_ticks
        return lasts and peer not in opinions.refused

    def _go_back(self) -> None:
        """M20: a stage has nobody near the newest for TL, and most whose records last are heard and want it, too."""
        of, world = self.of, self.of.world
        if not of.rules.going_back:
            return
        now, beats = world.now, of.opinions.beats
        newest = max([of.version, *(beat.version for x, beat in beats.items() if x not in world.liars)])
        for stage in range(world.stages):
            near = stage == of.stage and of.synced and of.version >= newest - 1
            near = near or any(
                beat.stage == stage and beat.serves and beat.version >= newest - 1 and self._may_come_back(x)
                for x, beat in beats.items()
            )
            if near:
                self.empty_at.pop(stage, None)
            else:
                self.empty_at.setdefault(stage, now)
        self.wants_back = any(now - since > of.clock.long_silence for since in self.empty_at.values())
        records = {x for x in world.members if now - of.opinions.heard.get(x, of.opinions.born) <= world.record_ticks}
        records.add(of.id)
        wish = {x for x in records if x == of.id or (x in beats and of.opinions.recently(x) and beats[x].wants_back)}
        of_all = {beats[x].stage for x in wish if x in beats} | {of.stage}
        if self.wants_back and 2 * len(wish) > len(records) and len(of_all) == world.stages:
            world.went_back(of)
