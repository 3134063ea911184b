"""A directory in memory that all simulated processes share. Records expire, as in the DHT."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

from swarmnet.directory import SMALL_RUN, ReadPace, Record
from swarmnet.ids import PeerId
from swarmnet.net.admission import Admissions, admits
from swarmnet.testing.clock import VirtualLoop
from swarmnet.testing.links import SimulatedLinks

_TRAINERS = -1
"""The key of their records, next to those of the stages."""


class MemoryDirectory:
    """A Directory. A dead peer's record stays until it expires.

    Every peer sees all records, as in a DHT that has more paths than any pair of peers, until `split`.
    """

    def __init__(self, loop: VirtualLoop, *, ttl_s: float = 30.0) -> None:
        self.serves: Callable[[PeerId], Collection[int]] = lambda peer: ()
        self._loop, self._ttl_s = loop, ttl_s
        self._records: dict[PeerId, tuple[float, Record]] = {}
        self._at: dict[int, dict[PeerId, tuple[float, Record]]] = {}  # by stage; trainers are at _TRAINERS
        self._before: dict[PeerId, tuple[float, Record]] | None = None

    async def publish(self, record: Record) -> None:
        # One record a peer: a process that comes back replaces what it said before.
        before, entry = self._records.get(record.peer), (self._loop.time() + self._ttl_s, record)
        if before is not None:
            for stage in _places(before[1]):
                self._at[stage].pop(record.peer)
        self._records[record.peer] = entry
        for stage in _places(record):
            self._at.setdefault(stage, {})[record.peer] = entry

    async def records(self) -> tuple[Record, ...]:
        return tuple(record for _, record in self._fresh(self._records))

    def now(self) -> float:
        """The time on every wall."""
        return self._loop.time()

    def split(self) -> None:
        """From now on no peer sees what is published beyond a cut: only what was there before, until it expires."""
        self._before = dict(self._records)

    def unite(self) -> None:
        """Every peer sees all records again."""
        self._before = None

    def seen_by(
        self, reader: PeerId, lines: SimulatedLinks, near: Collection[int] | None
    ) -> list[tuple[float, Record]]:
        """The records that one peer can see, and when they expire; near: only of these stages and of trainers."""
        if near is not None:
            wanted = {*near, _TRAINERS}
            if self._before is not None:
                seen = self.seen_by(reader, lines, None)
                return [entry for entry in seen if not wanted.isdisjoint(_places(entry[1]))]
            found: dict[PeerId, tuple[float, Record]] = {}
            for place in sorted(wanted):
                found.update(self._at.get(place, {}))
            return self._fresh(found)
        if self._before is None:
            return self._fresh(self._records)
        # A record of before the cut stays where it was, as in a DHT with nodes on both sides.
        here = {peer: entry for peer, entry in self._records.items() if lines.connected(peer, reader)}
        return self._fresh({**self._before, **here})

    def seen_of(self, peer: PeerId, reader: PeerId, lines: SimulatedLinks) -> tuple[float, Record] | None:
        """One of these."""
        entry = self._records.get(peer)
        if self._before is not None and (entry is None or not lines.connected(peer, reader)):
            entry = self._before.get(peer)
        return entry if entry is not None and entry[0] > self._loop.time() else None

    def _fresh(self, records: dict[PeerId, tuple[float, Record]]) -> list[tuple[float, Record]]:
        now = self._loop.time()
        return [entry for entry in records.values() if entry[0] > now]


class DirectoryAt:
    """The Directory as one peer sees it, who reads no records of those that are not admitted.

    It remembers what it has read until that expires, and reads as seldom as in production. only: the stages of which it
    ever reads records; None: of all.
    """

    def __init__(
        self,
        me: PeerId,
        directory: MemoryDirectory,
        lines: SimulatedLinks,
        admissions: Admissions,
        least_s: float,
        only: Collection[int] | None = None,
    ) -> None:
        self._only = only
        self.serves: Callable[[PeerId], Collection[int]] = lambda peer: ()
        self._me, self._directory, self._lines, self._admissions = me, directory, lines, admissions
        self._pace, self._rng = ReadPace(least_s), random.Random(me)
        self._known: dict[PeerId, tuple[float, Record]] = {}
        self._expires = math.inf  # the first of them
        self._open: tuple[Record, ...] = ()  # their records
        self._counted: dict[frozenset[int], int] = {}  # how many of them serve these stages, or feed

    async def publish(self, record: Record) -> None:
        await self._directory.publish(record)

    async def records(self, near: Collection[int] | None = None, *, at_once: bool = False) -> tuple[Record, ...]:
        now = self._directory.now()
        near = self._only if near is None else near
        if self._expires <= now:
            self._known = {peer: entry for peer, entry in self._known.items() if entry[0] > now}
            self._look()
        whole = near is None or (self._only is None and len(self._known) <= SMALL_RUN)
        if self._pace.may_read(whole=whole, at_once=at_once, records=self._count(near, whole), now=now):
            for entry in self._directory.seen_by(self._me, self._lines, None if whole else near):
                self._known[entry[1].peer] = entry
            self._look()
            jitter = self._rng.uniform(0.8, 1.2)
            self._pace.has_read(whole=whole, records=self._count(near, whole), jitter=jitter, now=now)
        if self._admissions.owner is None:
            return self._open
        return tuple(record for record in self._open if admits(self._admissions, record, now=now))

    def complete(self) -> bool:
        return self._pace.complete(self._directory.now())

    async def find(self, peer: PeerId, stages: Collection[int]) -> None:
        entry = self._directory.seen_of(peer, self._me, self._lines)
        if entry is not None:
            self._known[peer] = entry
            self._look()

    def _look(self) -> None:
        """Something has changed."""
        self._expires = min((expires for expires, _ in self._known.values()), default=math.inf)
        self._open = tuple(record for _, record in self._known.values())
        self._counted.clear()

    def _count(self, near: Collection[int] | None, whole: bool) -> int:
        if whole or near is None:
            return len(self._open)
        # It is asked at each look, and changes when something is read.
        if (stages := frozenset(near)) not in self._counted:
            wanted = {*stages, _TRAINERS}
            self._counted[stages] = sum(not wanted.isdisjoint(_places(record)) for record in self._open)
        return self._counted[stages]


def _places(record: Record) -> list[int]:
    return [*(status.stage for status in record.stages), *([_TRAINERS] if record.trainer else [])]
