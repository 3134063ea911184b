"""When a run cannot go on, from which version it does; and where one replica takes its state from. Pure.

A stage that lost every replica with its state takes the run's newest weights with it. What is left is exact all the
same, further back: the newest version that every stage has somewhere, on a disk or in a replica (docs/checkpoints.md).
All go on from there, under a higher `Restart`. The highest one heard wins, so peers that decide at once on different
grounds agree as soon as they hear of each other; a step is a pure function, so a choice can waste time and no more.

Knows no peer, no disk and no clock; it is told who holds what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from swarmnet.ids import NO_RESTART, PeerId, Restart

MAX_RESTARTS_AHEAD = 1024
"""A restart far ahead of all others is nobody's next."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one live peer has of one stage. version: of the weights it serves, None while it has none. disk: versions
    it has on disk. reseed: its operator lets the stage be made anew."""

    peer: PeerId
    stage: int
    restart: Restart = NO_RESTART
    version: int | None = None
    disk: tuple[int, ...] = ()
    reseed: bool = False

    def has(self, version: int, under: Restart) -> bool:
        """Can it serve exactly that version?"""
        return version in self.disk or (self.version == version and self.restart == under)


@dataclass(frozen=True, slots=True)
class Live:
    """Fetch the newest state from replicas that serve it."""

    donors: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class InPlace:
    """The weights that are here are the ones to go on from."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Load this peer's own checkpoint of `version`; below the restart's version, everything after it is dropped."""

    version: int


@dataclass(frozen=True, slots=True)
class MateDisk:
    """Fetch a checkpoint of `version` from these replicas' disks."""

    version: int
    donors: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Reseed:
    """Make the stage from its neighbours: replicas that serve stage - 1 and stage + 1 at the restart's version."""

    before: tuple[PeerId, ...]
    after: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Seed:
    """Version 0, as every engine is built."""


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to begin with. words: what is missing and what to do, for a person."""

    words: str


class Heard(Enum):
    """What to do about a restart somebody is under."""

    IGNORE = "ignore"
    FOLLOW = "follow"
    """Go back to its version."""
    ADOPT = "adopt"
    """Take its number and keep the state: this side lacks nothing and has got further. Others catch up with it."""


Source = Live | InPlace | Disk | MateDisk | Reseed | Seed | Wait


@dataclass(slots=True)
class Restarts:
    """One peer's view of the run's restarts.

    settle_s: how long nothing must have changed before a run that nobody serves begins again. lost_s: how long, before
    the rest of a run goes back for a stage that is without its newest state; as long as anybody moves, it waits.
    allow_drop: a stage takes an older state of its own instead. seed_until: up to this version the seed is as good as a
    checkpoint. floor: the highest number of a restart that a disk remembers.
    """

    num_stages: int
    last_version: int
    settle_s: float
    lost_s: float
    allow_drop: bool = False
    seed_until: int = 0
    current: Restart = NO_RESTART
    floor: int = 0
    _facts: object = None
    _since: float | None = field(default=None)

    def hear(self, restart: Restart, holdings: Sequence[Holding], *, serving: bool) -> Heard:
        """A restart somebody is under; unless it is ignored, it is `current` from now on. serving: do I have state?

        A partition heals this way: the side that lacks no stage and has got further goes back for nobody. While a run
        goes on, restarts without anything to go on from are followed by nobody, so a word alone stops no run.
        """
        if not self.current < restart or restart.version > self.last_version:
            return Heard.IGNORE
        if restart.number > max(self.current.number, self.floor) + MAX_RESTARTS_AHEAD:
            return Heard.IGNORE
        if not serving:
            alone = self._lacks_nothing_below(restart, holdings) and not self._reachable(restart, holdings)
            heard = Heard.IGNORE if alone else Heard.FOLLOW
        elif self._whole_and_further(restart, holdings):
            heard = Heard.ADOPT
        elif self._reachable(restart, holdings):
            heard = Heard.FOLLOW
        else:
            heard = Heard.IGNORE
        if heard is not Heard.IGNORE:
            self.current, self._since = restart, None
        return heard

    def remember(self, number: int) -> None:
        """A disk, mine or another's, remembers a restart of that number: the next one is higher."""
        if number <= max(self.current.number, self.floor) + MAX_RESTARTS_AHEAD:
            self.floor = max(self.floor, number)

    def advance(self, holdings: Sequence[Holding], *, now: float) -> Restart | None:
        """A new restart, already followed, if the run cannot go on by itself; None otherwise."""
        newest = self._newest_served(holdings)
        missing = self.uncovered(holdings)
        anew = newest is None or self._begun_anew(newest, holdings)
        facts = _on_disk_beyond(newest or 0, holdings) if anew else frozenset(holdings)
        if not missing or not self._begun(holdings) or self._under_way(newest, holdings):
            self._since = None
            return None
        if self._since is None or facts != self._facts:
            self._facts, self._since = facts, now
        if now - self._since < (self.settle_s if anew else self.lost_s):
            return None
        version = self.common(holdings)
        if version is None or (anew and newest is not None and version <= newest):
            return None  # of what was there before they began again, some stage is still missing
        self.current, self._since = Restart(max(self.current.number, self.floor) + 1, version), None
        return self.current

    def uncovered(self, holdings: Sequence[Holding]) -> tuple[int, ...]:
        """Stages in which nobody serves the weights the run has got to."""
        newest = self._newest_served(holdings)
        if newest is None or self._begun_anew(newest, holdings):
            return tuple(range(self.num_stages))
        near = {h.stage for h in self._serving(holdings) if h.version is not None and h.version >= newest - 1}
        return tuple(stage for stage in range(self.num_stages) if stage not in near)

    def common(self, holdings: Sequence[Holding]) -> int | None:
        """The newest version that every stage can begin from."""
        candidates = {0} | {v for h in holdings for v in h.disk} | {h.version for h in self._serving(holdings)}
        fit = [
            v for v in candidates
            if v is not None and all(self._available(stage, v, holdings) for stage in range(self.num_stages))
        ]
        return max(fit, default=None)

    def words(self, holdings: Sequence[Holding]) -> str:
        """Why nothing goes on, and what to do."""
        without = [s for s in self.uncovered(holdings) if not self._has_any(s, holdings)]
        if without:
            stages = _stages(without)
            return (f"the run has started, and nobody has the state of {stages}: start a peer that has its checkpoint "
                    f"(--stage {','.join(map(str, without))} with its --dir), or as a last resort any peer with "
                    "--reseed-from-neighbours")
        if self.common(holdings) is not None:
            return "the run is about to go on from its newest common checkpoint"
        lines = "; ".join(f"stage {s}: {self._held(s, holdings)}" for s in range(self.num_stages))
        return (f"no version of the weights exists in every stage ({lines}): start a peer that has an older checkpoint "
                "of the stages that lack it, or start the peers of the stage that has none with "
                "--reseed-from-neighbours")

    def source(
        self, mine: Holding, others: Iterable[Holding], *, held: int | None = None, beyond: int | None = None
    ) -> Source:
        """Where a replica that serves nothing takes its state from.

        held: the version of what is in its memory all the same. beyond: under this restart only later versions help.
        """
        others = tuple(others)
        everyone = (mine, *others)
        mates = [h for h in others if h.stage == mine.stage]
        version = self.current.version
        live = [h for h in mates if h.restart == self.current and h.version is not None]
        newest = self._newest_served(everyone)
        if beyond is None and newest is not None and self._left_behind(newest, mine, everyone):
            return Wait(self._words_anew(newest, mine))
        ahead = [h for h in live if h.version is not None and h.version > (version if beyond is None else beyond)]
        if self.current.number and beyond is None and not ahead and held == version:
            return InPlace()
        if ahead or (live and self.current.number and beyond is None):
            ranked = sorted(ahead or live, key=lambda h: (-(h.version or 0), h.peer))
            return Live(tuple(h.peer for h in ranked))
        if not self._begun(everyone):
            return Seed()
        if beyond is not None or not self.current.number or (newest is not None and newest > version + 1):
            return Wait(self.words(everyone))  # a decision has to come first
        if version in mine.disk:
            return Disk(version)
        holders = tuple(sorted(h.peer for h in mates if version in h.disk))
        if holders:
            return MateDisk(version, holders)
        if version == 0:
            return Seed()
        return self._inexact(mine, mates, others) or Wait(self.words(everyone))

    def _inexact(self, mine: Holding, mates: Sequence[Holding], others: Sequence[Holding]) -> Source | None:
        """What is left when nobody has the stage's state of this version."""
        version = self.current.version
        if any(h.has(version, self.current) for h in mates):
            return None  # a mate is about to serve it
        newest_of = {h.peer: max((v for v in h.disk if v < version), default=None) for h in (mine, *mates)}
        best = max((v for v in newest_of.values() if v is not None), default=None)
        if self.allow_drop and best is not None:
            return Disk(best) if newest_of[mine.peer] == best else None
        if not mine.reseed:
            return None
        beside = {
            near: tuple(sorted(h.peer for h in others if h.stage == near and h.version == version
                               and h.restart == self.current))
            for near in (mine.stage - 1, mine.stage + 1)
        }
        ready = all(beside[near] for near in beside if 0 <= near < self.num_stages)
        return Reseed(beside[mine.stage - 1], beside[mine.stage + 1]) if ready and self.num_stages > 1 else None

    # ------------------------------------------------------------ inside

    def _serving(self, holdings: Iterable[Holding]) -> list[Holding]:
        return [h for h in holdings if h.version is not None and h.restart == self.current]

    def _newest_served(self, holdings: Iterable[Holding]) -> int | None:
        return max((h.version for h in self._serving(holdings) if h.version is not None), default=None)

    def _begun_anew(self, newest: int, holdings: Sequence[Holding]) -> bool:
        """Have newcomers begun at the seed before they heard of what others have on disk?"""
        if self.current.number:
            return False
        on_disk = newest_on_disk(holdings, self.num_stages)
        return (newest == 0 and any(any(h.disk) for h in holdings)) or (on_disk is not None and on_disk > newest + 1)

    def _left_behind(self, newest: int, mine: Holding, holdings: Sequence[Holding]) -> bool:
        """Do those who serve stand before what is on disk here? With their state it would be overwritten in time."""
        beyond = not self.current.number and max(mine.disk, default=0) > newest + 1
        return beyond or self._begun_anew(newest, holdings)

    def _words_anew(self, newest: int, mine: Holding) -> str:
        held = max(mine.disk, default=0)
        if held <= newest + 1:
            return "the run is about to go on from its newest common checkpoint"
        return (f"the others have begun again at an earlier step, and here is step {held} on disk: waiting for peers "
                "that have the other stages of it, or until the others have got as far")

    def _lacks_nothing_below(self, restart: Restart, holdings: Sequence[Holding]) -> bool:
        """Is there a run under a lower restart that goes on?"""
        return any(
            not replace(self, current=lower).uncovered(holdings)
            for lower in {h.restart for h in holdings if h.restart < restart and h.version is not None}
        )

    def _whole_and_further(self, restart: Restart, holdings: Sequence[Holding]) -> bool:
        """Does my side lack nothing and stand no lower? Those of it that have taken the number already still count."""
        mine = [replace(h, restart=self.current) if h.restart == restart else h for h in holdings]
        return not self.uncovered(mine) and (self._newest_served(mine) or 0) >= restart.version

    def _reachable(self, restart: Restart, holdings: Sequence[Holding]) -> bool:
        """Is there something to go on from in every stage, at that restart's version or beyond it?"""
        beyond = {h.stage for h in holdings if h.restart == restart and h.version is not None}
        return all(
            stage in beyond or self._available(stage, restart.version, holdings) for stage in range(self.num_stages)
        )

    def _under_way(self, newest: int | None, holdings: Sequence[Holding]) -> bool:
        """Has the last restart been decided so lately that those who can follow it are still loading?"""
        return (
            bool(self.current.number)
            and (newest is None or newest <= self.current.version)
            and all(self._available(stage, self.current.version, holdings) for stage in range(self.num_stages))
        )

    def _begun(self, holdings: Iterable[Holding]) -> bool:
        """Does anybody hold more than the seed?"""
        return bool(self.current.number) or any(h.version or any(h.disk) for h in holdings)

    @staticmethod
    def _has_any(stage: int, holdings: Iterable[Holding]) -> bool:
        """Does anybody have anything of this stage that is more than the seed?"""
        return any(h.stage == stage and (h.version or any(h.disk) or h.reseed) for h in holdings)

    def _available(self, stage: int, version: int, holdings: Sequence[Holding]) -> bool:
        """Can somebody begin this stage at that version, by the run's rules and the operators' leave?"""
        mates = [h for h in holdings if h.stage == stage]
        if any(h.has(version, self.current) for h in mates):
            return True
        furthest = max(self._newest_served(holdings) or 0, *(v for h in holdings for v in h.disk), 0)
        if version == 0 and mates and furthest <= self.seed_until:
            return True  # not even one checkpoint further: also when only some stages have it
        on_disk = [v for h in mates for v in h.disk]
        if self.allow_drop and any(0 < v < version for v in on_disk):
            return True
        lost = not any(on_disk) and not any(h.version and h.restart == self.current for h in mates)
        return lost and self.num_stages > 1 and any(h.reseed for h in mates)

    def _held(self, stage: int, holdings: Sequence[Holding]) -> str:
        mates = [h for h in holdings if h.stage == stage]
        served = sorted({h.version for h in self._serving(mates) if h.version is not None})
        disk = sorted({v for h in mates for v in h.disk})
        found = [f"served {', '.join(map(str, served))}"] if served else []
        found += [f"on disk {', '.join(map(str, disk))}"] if disk else []
        return " and ".join(found) or "none"


def _on_disk_beyond(version: int, holdings: Iterable[Holding]) -> frozenset[tuple[PeerId, int, tuple[int, ...]]]:
    """Who has which later versions on disk: what those who have begun again do meanwhile does not matter."""
    return frozenset((h.peer, h.stage, tuple(v for v in h.disk if v > version + 1)) for h in holdings)


def newest_on_disk(holdings: Iterable[Holding], num_stages: int) -> int | None:
    """The newest version that every stage has on some disk."""
    versions: list[set[int]] = [set() for _ in range(num_stages)]
    for held in holdings:
        versions[held.stage].update(held.disk)
    return max(set.intersection(*versions), default=None)


def _stages(numbers: Sequence[int]) -> str:
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
