"""When a run cannot go on, from which version it does; and where one replica takes its state from. Pure.

A stage that lost every replica with its state takes the run's newest weights with it. An exact state is left further
back: the newest version that every stage has on a disk or in a replica (docs/checkpoints.md). All peers continue from
there, under a higher `Restart`.

One rule decides, and only the version differs: more than half of the voters want a restart, or are under one. The
voters are the contributors to commits with unexpired records, because other identities are free. A peer wants

| version | when |
|---|---|
| the newest that every stage has | a stage is without the newest weights, and nothing moves |
| the same, or an older one of its own stage | the same, where the run has `allow_drop` |
| the newest on disk in every stage up to proven false work | the run asks for that (docs/trust.md) |

A peer that went back and finds that most voters have not, for example because its network was partitioned, returns to
its earlier state. For false work each case costs an identity, and the run returns to one version twice at most. A peer
that waits alone for a restart for `GIVE_UP` times `lost_s` gives up: the step stays applied.

Knows no peer, no disk and no clock; its caller passes in what peers hold and report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from swarmnet.bounds import Recent
from swarmnet.ids import NO_RESTART, OnDisk, PeerId, Restart
from swarmnet.quorum import reached_by_half, reached_by_most

MAX_RESTARTS_AHEAD = 1024
"""A restart far ahead of all others is not the next one."""

MOST_RETURNS = 2
"""So often the run goes back to one version for false work."""

GIVE_UP = 2

_YOUNG = 64
"""Up to this version a run is young: it gives way to later disks, and all peers vote. Later, both may be made up."""

MAX_VOTERS = 256
"""Of more contributors so many decide where the run goes on, equally many of each stage."""

_MOST_TAINTED = 256

_GOES_ON = "the run is about to go on from its newest common checkpoint"
_BEGUN_ANEW = (
    "the others have begun again at an earlier step, and here is step {step} on disk: waiting for peers that have the "
    "other stages of it, or until the others have got as far"
)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one live peer has of one stage."""

    peer: PeerId
    stage: int
    restart: Restart = NO_RESTART
    version: int | None = None
    """Of the weights it serves, None while it serves none."""
    disk: tuple[int, ...] = ()
    """Versions it has on disk."""

    def has(self, version: int, under: Restart) -> bool:
        """Can it serve exactly that version?"""
        return version in self.disk or (self.version == version and self.restart == under)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a replica takes its state from.

    | from | what |
    |---|---|
    | replicas | what `peers` serve, the newest first; with a `version`, their checkpoint of it |
    | here | the weights that are here are the ones to go on from |
    | disk | this peer's own checkpoint of `version`; below the restart's version, everything after it is dropped |
    | seed | version 0, as every engine is built |
    | nowhere | there is nothing to begin with; `words`: what is missing and what to do, for a person |
    """

    kind: Literal["replicas", "here", "disk", "seed", "nowhere"]
    version: int = -1
    peers: tuple[PeerId, ...] = ()
    words: str = ""


@dataclass(frozen=True, slots=True)
class RestartReport:
    """Of a peer with an unexpired record: the restart that it is under, and the one it wants."""

    restart: Restart = NO_RESTART
    wants: Restart = NO_RESTART
    heard: bool = True
    """Is it in touch?"""
    holds: bool = True
    """Does it serve state, or is it under a restart?"""
    peer: PeerId | None = None

    @property
    def vote(self) -> Restart:
        """The highest restart that it goes under, as far as it is in touch."""
        return max(self.restart, self.wants) if self.heard else NO_RESTART


class Move(Enum):
    """How to go under `Rollbacks.current`, which has changed."""

    GO_BACK = "go back"
    """Go on from its version."""
    KEEP = "keep"
    """Take its number and keep the state: this side lacks nothing and has got further. Others catch up with it."""
    TAKE_BACK = "take back"
    """Too few have come along: go on with those who have not."""


@dataclass(slots=True)
class Rollbacks:
    """One peer's view of whether the run has to go back, or has gone back."""

    num_stages: int
    last_version: int = 2**53
    settle_s: float = 0.0
    """How long nothing must have changed before a run that no peer serves begins again, and how long the others are
    waited for under a higher number."""
    lost_s: float = 0.0
    """How long nothing must have changed before the run goes back for a stage that is without its newest state. As long
    as any stage moves, it waits."""
    allow_drop: bool = False
    """May a stage take an older state of its own instead?"""
    seed_until: int = 0
    """Up to this version the seed is as good as a checkpoint."""
    current: Restart = NO_RESTART
    floor: int = 0
    """The highest number of a restart that a disk remembers."""
    wanted: Restart | None = None
    """What this peer would go under, if most want that."""
    me: PeerId | None = None
    voters: Recent[PeerId, int] = field(default_factory=lambda: Recent(MAX_VOTERS))
    """Peers that have a vote in the steps of a stage, the latest last, and the stage; -1: a disk remembers them."""
    undoes: bool = False
    """Does the run go back before false work?"""
    in_vain: bool = False
    """Did those who serve under `current` not hand over their state?"""
    _tainted: Recent[tuple[Restart, int, int], bool] = field(default_factory=lambda: Recent(_MOST_TAINTED))
    """(restart, stage, step): does this peer want it undone?"""
    _alleged: int = -1
    """The highest step under `current` that a peer is banned for, applied here or not."""
    _been: list[Restart] = field(default_factory=list)
    """Where this peer has gone back to; of a restart under which it kept its state nothing."""
    _returned: list[int] = field(default_factory=list)
    """Versions it has gone back to for false work."""
    _spoilt_since: tuple[int, float] | None = None
    _facts: object = None
    _since: float | None = field(default=None)
    _alone_since: float | None = field(default=None)

    def decide(
        self, holdings: Sequence[Holding], reports: Collection[RestartReport], *, serving: bool, now: float
    ) -> Move | None:
        """Look at who holds and reports what. If that moves me, `current` is where to. serving: have I state?"""
        self.want(holdings, now=now)
        trusted = self._trusted(holdings)
        if self.wanted is not None:
            # A part of the run may have gone on from that version already: it has one number for all.
            highest = max(self.current.number, self.floor) + MAX_RESTARTS_AHEAD
            there = [r.restart for r in reports if r.heard and (not trusted or r.peer in trusted)]
            there = [r for r in there if self.current < r and r.number <= highest]
            self.wanted = max((r for r in there if r.version == self.wanted.version), default=self.wanted)
        # Of all who speak some may be made up: the state is proven by certificates, and they name the contributors.
        if not (serving or trusted or self.in_vain) and self._can_fetch(holdings):
            return None
        mine = RestartReport(self.current, self.wanted or NO_RESTART, holds=serving or self.current > NO_RESTART)
        votes = [replace(mine, peer=self.me), *reports]
        votes = [report for report in votes if report.peer in trusted] or votes
        heard = [report for report in votes if report.heard and report.holds]
        most = self._most([report.restart for report in heard], holdings)
        # Of a version that no replica serves or has on its disk, or of one beyond, there is nothing to go on from.
        furthest = max((v for held in holdings for v in (held.version or 0, *held.disk)), default=self.last_version)
        if most > self.current and most.version <= min(self.last_version, furthest):
            # A peer that could not see the false work must not bring it back to those that gave it up.
            keeps = serving and self._alleged < most.version and self._whole_and_further(most, holdings)
            return self._go(most, Move.KEEP if keeps else Move.GO_BACK)
        # Most must want it: one peer alone never sends the run back.
        if self.wanted is not None:
            agreed = reached_by_most([report.vote for report in votes])
            if self.spoilt is not None:
                # The run moves on meanwhile: only who wants to go back spares what is that old on its disk.
                others = {report.peer for report in reports if report.vote < agreed}
                holdings = [held for held in holdings if held.peer not in others]
            if agreed > self.current and self._reachable(agreed, holdings):
                return self._go(agreed, Move.GO_BACK)
        if (most := reached_by_most([report.vote for report in heard] or [self.current])) >= self.current:
            self._alone_since = None
            return None
        self._alone_since = now if self._alone_since is None else self._alone_since
        return self._go(most, Move.TAKE_BACK) if now - self._alone_since >= self.settle_s else None

    def _trusted(self, holdings: Iterable[Holding]) -> Collection[PeerId]:
        """The contributors: other identities are free. None while all that this peer has is a young run, because
        newcomers who begin at the seed contribute to that, too."""
        mine = (v for held in holdings if held.peer == self.me for v in (held.version or 0, *held.disk))
        return self.voters if max(mine, default=0) > _YOUNG else ()

    def _can_fetch(self, holdings: Sequence[Holding]) -> bool:
        """Is what this peer lacks served under `current`, by a run that is not young?"""
        others = [held for held in holdings if held.peer != self.me]
        sources = (self.source(held, others) for held in holdings if held.peer == self.me)
        return (self._newest_served(others) or 0) > _YOUNG and any(of.kind == "replicas" for of in sources)

    def learn(self, *stages: Sequence[PeerId]) -> None:
        """These peers have a vote, by stage, the latest last. Of a large run equally many of each stage decide.

        Who has none there any more has none here: keys that contributed once and left would decide for ever. Of a stage
        of which nothing is known, as after a restart, those of before stay.
        """
        most = max(MAX_VOTERS // len(stages), 1)
        for stage, voters in enumerate(stages):
            if voters:
                for peer in [peer for peer, of in self.voters.items() if of == stage and peer not in voters]:
                    del self.voters[peer]
            self.voters.update(dict.fromkeys(voters[-most:], stage))

    def recall(self, voters: Sequence[PeerId]) -> None:
        """A disk remembers these."""
        self.voters.update(dict.fromkeys(voters, -1))

    def remember(self, number: int) -> None:
        """A disk, mine or another's, remembers a restart of that number: the next one is higher."""
        # An invented number must not use up the numbers of later restarts.
        if number <= max(self.current.number, self.floor) + MAX_RESTARTS_AHEAD:
            self.floor = max(self.floor, number)

    def taint(self, restart: Restart, stage: int, step: int, *, applied: bool) -> None:
        """A peer is banned for its work of that step. applied: is it known that its sum was applied here?"""
        if applied and (restart, stage, step) not in self._tainted:
            self._tainted[restart, stage, step] = self.undoes
        if self.undoes and restart == self.current:
            self._alleged = max(self._alleged, step)

    @property
    def tainted(self) -> tuple[tuple[int, int], ...]:
        """(stage, step) of proven false work that is in the weights, in the order in which it became known."""
        return tuple((stage, step) for restart, stage, step in self._tainted if not self._undone(restart, step))

    @property
    def spoilt(self) -> int | None:
        """Versions above it hold false work that this peer wants undone."""
        steps = (step for (at, _, step), undo in self._tainted.items() if undo and not self._undone(at, step))
        return min(steps, default=None)

    def before(self, spoilt: int, holdings: Sequence[Holding]) -> int | None:
        """The newest version up to that one which every stage has on some disk, if the run may go back to it."""
        least = max((v for v in self._returned if self._returned.count(v) >= MOST_RETURNS), default=-1)
        # What is in memory alone moves on while others come to want the same.
        kept = [replace(held, version=None) for held in holdings]
        version = self.common(kept, among=range(least + 1, spoilt + 1))
        return version if version is not None and self._everywhere(version, holdings) else None

    def want(self, holdings: Sequence[Holding], *, now: float) -> None:
        """Bring `wanted` up to date: the restart this run needs, if it cannot go on by itself.

        Once wanted it is wanted until the run can go on, however things move while others come to see it as well.
        """
        spoilt = self.spoilt
        if spoilt is not None and self._wants_before(spoilt, holdings, now=now):
            return
        newest, missing = self._newest_served(holdings), self.uncovered(holdings)
        # The run goes on by itself, has nothing to lose yet, or is just going back.
        if not missing or not self._begun(holdings) or self._under_way(newest, holdings):
            self._since = self.wanted = None
            return
        fresh = newest is None or self._started_over(newest, holdings)
        version = self.common(holdings)
        facts = version if fresh else (missing, self._standing(holdings))
        # As long as something changes it may still come right.
        if self._since is None or (facts != self._facts and self.wanted is None):
            self._facts, self._since = facts, now
        if now - self._since < (self.settle_s if fresh else self.lost_s):
            return
        if version is not None and not self.last_version >= version > (newest if fresh and newest is not None else -1):
            version = None  # of what was there before they began again, some stage is still missing
        if self.wanted is not None and (version or -1) < self.wanted.version and self._reachable(self.wanted, holdings):
            return  # some are there already, and have taken along what it needs
        number = max(self.current.number, self.floor) + 1
        self.wanted = None if version is None else Restart(number, version)

    def uncovered(self, holdings: Sequence[Holding]) -> tuple[int, ...]:
        """Stages in which no peer serves the weights that the run has got to."""
        newest = self._newest_served(holdings)
        # No peer serves what the run had got to.
        if newest is None or self._started_over(newest, holdings):
            return tuple(range(self.num_stages))
        near = {h.stage for h in self._serving(holdings) if h.version is not None and h.version >= newest - 1}
        return tuple(stage for stage in range(self.num_stages) if stage not in near)

    def common(self, holdings: Sequence[Holding], *, among: range = range(2**53)) -> int | None:
        """The newest version that every stage can begin from."""
        candidates = {0} | {v for h in holdings for v in h.disk} | {h.version for h in self._serving(holdings)}
        fit = [v for v in candidates if v is not None and v in among and self._everywhere(v, holdings)]
        if self.num_stages > 1:  # what one peer alone claims to have of all stages, while several have less, is a word
            having = {v: {h.peer for h in holdings if v == h.version or v in h.disk} for v in fit}
            fit = [v for v in fit if len(having[v]) != 1 or not any(len(peers) > 1 for peers in having.values())]
        return max(fit, default=None)

    def words(self, holdings: Sequence[Holding]) -> str:
        """Why nothing goes on, and what to do."""
        if self.common(holdings) is not None:
            return _GOES_ON
        found = "; ".join(self._held(stage, holdings) for stage in range(self.num_stages))
        return (
            f"the peers that are up have no version of the weights in every stage ({found}): start more of the run's "
            "peers again, each with the --stage and --dir that it had, until one has a version that the other stages "
            "have"
        )

    def source(
        self,
        mine: Holding,
        others: Iterable[Holding],
        *,
        held: int | None = None,
        beyond: int | None = None,
        no_seed: str = "",
    ) -> Source:
        """Where a replica that serves nothing takes its state from.

        Args:
            held: the version of what is in its memory all the same.
            beyond: under this restart only later versions help.
            no_seed: why it cannot begin at the seed by itself, in words; empty: it can.
        """
        others = tuple(others)
        everyone = (mine, *others)
        replicas = [h for h in others if h.stage == mine.stage]
        version = self.current.version
        live = [h for h in replicas if h.restart == self.current and h.version is not None]
        newest = self._newest_served(everyone)
        if beyond is not None and newest is not None and newest <= beyond:
            beyond = None  # the peer that was ahead has gone back: what is here is as good as what others have
        if beyond is None and newest is not None:
            kept = max(mine.disk, default=0)
            # Their older state would overwrite the newer one on this disk.
            if kept > newest + 1 and not self.current.number:
                return Source("nowhere", words=_BEGUN_ANEW.format(step=kept))
            if self._started_over(newest, everyone):
                return Source("nowhere", words=_GOES_ON)
        ahead = [h for h in live if h.version is not None and h.version > (version if beyond is None else beyond)]
        # The run went back to exactly what is in memory here.
        if self.current.number and beyond is None and not ahead and held == version:
            return Source("here")
        if ahead or (live and self.current.number and beyond is None):
            ranked = sorted(ahead or live, key=lambda h: (-(h.version or 0), h.peer))
            return Source("replicas", peers=tuple(h.peer for h in ranked))
        seed = Source("seed")
        if no_seed:
            serving = tuple(sorted(h.peer for h in live))
            seed = Source("replicas", peers=serving) if serving else Source("nowhere", words=no_seed)
        # A new run: all peers begin at the seed.
        if not self._begun(everyone):
            return seed
        if beyond is None and newest in mine.disk and not live:
            return Source("disk", newest)  # the very state that the others have got to
        moved_on = newest > version + 1 if newest is not None else self._outlived(everyone)
        if beyond is not None or not self.current.number or moved_on:
            return Source("nowhere", words=self.words(everyone))  # a decision has to come first
        # The own disk is faster than a network link.
        if version in mine.disk:
            return Source("disk", version)
        holders = tuple(sorted(h.peer for h in replicas if version in h.disk))
        if holders:
            return Source("replicas", version, holders)
        if version == 0:
            return seed
        earlier = max((v for h in (mine, *replicas) for v in h.disk if v < version), default=None)
        if self.allow_drop and earlier is not None and earlier in mine.disk:
            return Source("disk", earlier)
        return Source("nowhere", words=self.words(everyone))

    # ------------------------------------------------------------ inside

    def _serving(self, holdings: Iterable[Holding]) -> list[Holding]:
        return [h for h in holdings if h.version is not None and h.restart == self.current]

    def _standing(self, holdings: Sequence[Holding]) -> dict[int, int]:
        """By stage: the version that most of those who serve it have reached; of contributors, if any serves."""
        served: dict[int, list[int]] = {}
        serving, trusted = self._serving(holdings), self._trusted(holdings)
        for held in [held for held in serving if held.peer in trusted] or serving:
            served.setdefault(held.stage, []).append(held.version or 0)
        return {stage: reached_by_most(versions) for stage, versions in served.items()}

    def _newest_served(self, holdings: Sequence[Holding]) -> int | None:
        return max(self._standing(holdings).values(), default=None)

    def _started_over(self, newest: int, holdings: Sequence[Holding]) -> bool:
        """Have new peers started from the seed before they knew what others have on disk?"""
        # After a restart they follow a decision, and have not started by themselves.
        if self.current.number or newest > _YOUNG:
            return False
        beyond = {h.peer for h in holdings if any(v > (newest + 1 if newest else 0) for v in h.disk)}
        if len(beyond) < len({h.peer for h in self._serving(holdings)} - beyond):
            return False  # those who serve are more: what the others say they have is no reason to begin again
        on_disk = newest_on_disk(holdings, self.num_stages)
        return (newest == 0 and bool(beyond)) or (on_disk is not None and on_disk > newest + 1)

    def _wants_before(self, spoilt: int, holdings: Sequence[Holding], *, now: float) -> bool:
        """Want to go back before false work. False: there is nowhere to go, or too few have come along."""
        if self._spoilt_since is None or self._spoilt_since[0] != spoilt:
            self._spoilt_since = spoilt, now
        if now - self._spoilt_since[1] >= GIVE_UP * self.lost_s:
            self._tainted.update(dict.fromkeys(self._tainted, False))
            return False
        version = self.before(spoilt, holdings)
        if version is None:
            return False
        self.wanted = Restart(max(self.current.number, self.floor) + 1, version)
        return True

    def _undone(self, restart: Restart, step: int) -> bool:
        """Has this peer gone back to before that step since?"""
        return abandoned(step + 1, restart, self._been)

    def _go(self, restart: Restart, move: Move) -> Move:
        spoilt = self.spoilt
        self._been = [been for been in self._been if been <= restart]
        if move is Move.GO_BACK:
            self._been.append(restart)
            self._returned += [restart.version] if spoilt is not None and restart.version <= spoilt else []
        self._alleged, self._spoilt_since, self.in_vain = -1, None, False
        self.current, self.wanted, self._since, self._alone_since = restart, None, None, None
        return move

    def _most(self, under: Sequence[Restart], holdings: Sequence[Holding]) -> Restart:
        """The highest restart that more than half are under, or beyond; mine if no peer has a say.

        Of two sides of equal size the lower one stays, unless it lacks a stage and the other does not.
        """
        # No peer has a say.
        if not under:
            return self.current
        low, high = reached_by_most(under), reached_by_half(under)
        if low != high and self._lacks(low, holdings) and not self._lacks(high, holdings):
            return high
        return low

    def _lacks(self, restart: Restart, holdings: Sequence[Holding]) -> bool:
        """Is a stage missing to those who are under that restart?"""
        return bool(replace(self, current=restart).uncovered(holdings))

    def _whole_and_further(self, restart: Restart, holdings: Sequence[Holding]) -> bool:
        """Does my side lack nothing and stand no lower? Those of it that have taken the number already still count."""
        newest = self._newest_served(holdings)
        # The others stand further, so there is nothing here to keep.
        if newest is None or newest < restart.version or self._started_over(newest, holdings):
            return False
        # A peer that stands where the others went back to has gone along: what brought me one further is lost.
        taken_along = newest - 1 == restart.version
        least = {self.current: newest - 1, restart: newest if taken_along else newest - 1}
        near = {h.stage for h in holdings if h.version is not None and h.version >= least.get(h.restart, newest + 1)}
        return len(near) == self.num_stages

    def _reachable(self, restart: Restart, holdings: Sequence[Holding]) -> bool:
        """Is there something to go on from in every stage, at that restart's version or beyond it?"""
        beyond = {h.stage for h in holdings if h.restart == restart and h.version is not None}
        return self._everywhere(restart.version, holdings, but=beyond)

    def _under_way(self, newest: int | None, holdings: Sequence[Holding]) -> bool:
        """Has the last restart been decided so lately that those who can follow it are still loading?"""
        return (
            bool(self.current.number)
            and (newest <= self.current.version if newest is not None else not self._outlived(holdings))
            and self._everywhere(self.current.version, holdings)
        )

    def _outlived(self, holdings: Sequence[Holding]) -> bool:
        """Did the run get further under this restart, before all peers died? What it gave up is no holding."""
        return (self.common(holdings) or 0) > self.current.version

    def _begun(self, holdings: Iterable[Holding]) -> bool:
        """Does a peer hold more than the seed?"""
        return bool(self.current.number) or any(held.version or any(held.disk) for held in holdings)

    def _everywhere(self, version: int, holdings: Sequence[Holding], *, but: Set[int] = frozenset()) -> bool:
        """Can every stage, but for these, begin at that version, by the run's rules?"""
        missing = set(range(self.num_stages)) - but - {h.stage for h in holdings if h.has(version, self.current)}
        if not missing:
            return True
        if version == 0:
            # Not even one checkpoint further: also when only some stages have it.
            furthest = max(self._newest_served(holdings) or 0, *(v for h in holdings for v in h.disk), 0)
            return furthest <= self.seed_until and missing <= {h.stage for h in holdings}
        earlier = {h.stage for h in holdings if any(0 < v < version for v in h.disk)}
        return self.allow_drop and missing <= earlier

    def _held(self, stage: int, holdings: Sequence[Holding]) -> str:
        served = {h.version for h in self._serving(holdings) if h.stage == stage and h.version}
        disk = {version for h in holdings if h.stage == stage for version in h.disk if version}
        both = [f"{how} {', '.join(map(str, sorted(v)))}" for how, v in (("served", served), ("on disk", disk)) if v]
        return f"stage {stage}: {' and '.join(both)}" if both else f"no peer has the state of stage {stage}"


def newest_on_disk(holdings: Iterable[Holding], num_stages: int) -> int | None:
    """The newest version that every stage has on some disk."""
    versions: list[set[int]] = [set() for _ in range(num_stages)]
    for held in holdings:
        # A record may name stages that the run does not have.
        if held.stage < num_stages:
            versions[held.stage].update(held.disk)
    return max(set.intersection(*versions), default=None)


# ---------------------------------------------------------------- which checkpoints are of one lineage

# A run that goes back leaves checkpoints of later versions behind, on disks of peers that do not know of it. Combined
# with those of the repeated steps, they would make a model of stages with different histories. So every checkpoint is
# announced with the restart that it descends from, and a restart that one peer names shows all peers which checkpoints
# were given up.

Announced = tuple[Holding, tuple[OnDisk, ...]]
"""What a peer has of a stage, and every checkpoint it announces of it."""


def of_one_lineage(announced: Sequence[Announced], rules: Rollbacks) -> list[Holding]:
    """The holdings, with the versions on disk that may be put together.

    While a peer serves under the current restart, no later restart of another gives anything up. While none does,
    the latest that any disk remembers counts; if it leaves nothing to go on from (see `Rollbacks.common`), it was known
    to too few, and the one before it counts. The seed is nothing to go on from while any disk has more.
    """
    current = rules.current
    furthest = max((kept.version for _, disk in announced for kept in disk), default=0)
    known = sorted({current, NO_RESTART, *(kept.restart for _, disk in announced for kept in disk)}, reverse=True)
    # A peer goes on under the current restart: a later one was never decided here.
    if any(held.version is not None and held.restart == current for held, _ in announced):
        return _filtered(announced, [restart for restart in known if restart <= current], current)
    for latest in (restart for restart in known if restart >= current):
        found = _filtered(announced, [restart for restart in known if restart <= latest], current, latest=latest)
        version = rules.common(found)
        if version or (version == 0 and (latest.number or furthest <= rules.seed_until)):
            return found
    return _filtered(announced, known, current)


def abandoned(version: int, under: Restart, restarts: Collection[Restart]) -> bool:
    """Has the run gone back to before `version`, a state of restart `under`, at one of these restarts?"""
    return any(restart.number > under.number and restart.version < version for restart in restarts)


def _filtered(
    announced: Sequence[Announced], restarts: Collection[Restart], current: Restart, *, latest: Restart | None = None
) -> list[Holding]:
    def sound(kept: OnDisk) -> bool:
        return (latest is None or kept.restart <= latest) and not _given_up(kept, restarts)

    decided = {
        held.stage for held, disk in announced for kept in disk if kept.version == current.version and sound(kept)
    }

    def usable(stage: int, kept: OnDisk) -> bool:
        # Where a stage has the version of `current` from another lineage only, the run has decided to go on from that.
        return sound(kept) or bool(current.number and kept.version == current.version and stage not in decided)

    return [
        replace(held, disk=tuple(kept.version for kept in disk if usable(held.stage, kept))) if disk else held
        for held, disk in announced
    ]


def _given_up(kept: OnDisk, restarts: Collection[Restart]) -> bool:
    # Of two restarts of one number the higher one has won.
    mine, won = kept.restart, {restart.number: restart for restart in sorted(restarts)}
    # Two sides that were cut apart may each have decided a restart of one number: the lower one's steps are given up.
    lost = won.get(mine.number, mine) != mine
    return abandoned(kept.version, mine, won.values()) or (lost and kept.version > mine.version)
