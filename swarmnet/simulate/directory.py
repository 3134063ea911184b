"""A directory in memory that all simulated processes share. Records expire, as in the DHT."""

from __future__ import annotations

from swarmnet.directory import Record
from swarmnet.ids import PeerId
from swarmnet.net.admission import Admissions, admits
from swarmnet.simulate.clock import VirtualLoop
from swarmnet.simulate.links import SimulatedLinks


class MemoryDirectory:
    """A Directory. A dead peer's record stays until it expires.

    Everybody sees all records, as in a DHT that has more paths than any pair of peers, until `split`.
    """

    def __init__(self, loop: VirtualLoop, *, ttl_s: float = 30.0) -> None:
        self._loop, self._ttl_s = loop, ttl_s
        self._records: dict[PeerId, tuple[float, Record]] = {}
        self._before: dict[PeerId, tuple[float, Record]] | None = None

    async def publish(self, record: Record) -> None:
        # One record a peer: a process that comes back replaces what it said before.
        self._records[record.peer] = (self._loop.time() + self._ttl_s, record)

    async def records(self) -> tuple[Record, ...]:
        return self._fresh(self._records)

    def now(self) -> float:
        """The time on every wall."""
        return self._loop.time()

    def split(self) -> None:
        """From now on nobody sees what is published beyond a cut: only what was there before, until it expires."""
        self._before = dict(self._records)

    def unite(self) -> None:
        """Everybody sees everything again."""
        self._before = None

    def seen_by(self, reader: PeerId, lines: SimulatedLinks) -> tuple[Record, ...]:
        """The records that one peer can see."""
        if self._before is None:
            return self._fresh(self._records)
        # A record of before the cut stays where it was, as in a DHT whose nodes are on both sides.
        near = {peer: entry for peer, entry in self._records.items() if lines.connected(peer, reader)}
        return self._fresh({**self._before, **near})

    def _fresh(self, records: dict[PeerId, tuple[float, Record]]) -> tuple[Record, ...]:
        now = self._loop.time()
        return tuple(record for expires, record in records.values() if expires > now)


class DirectoryAt:
    """The Directory as one peer sees it, who reads no records of those that are not admitted."""

    def __init__(self, me: PeerId, directory: MemoryDirectory, lines: SimulatedLinks, admissions: Admissions) -> None:
        self._me, self._directory, self._lines, self._admissions = me, directory, lines, admissions

    async def publish(self, record: Record) -> None:
        await self._directory.publish(record)

    async def records(self) -> tuple[Record, ...]:
        found, now = self._directory.seen_by(self._me, self._lines), self._directory.now()
        return tuple(record for record in found if admits(self._admissions, record, now=now))
