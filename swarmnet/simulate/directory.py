"""A directory in memory that all simulated processes share. Records expire, as in the DHT."""

from __future__ import annotations

from swarmnet.ids import PeerId
from swarmnet.net.directory import Record
from swarmnet.simulate.clock import VirtualLoop


class MemoryDirectory:
    """A Directory. A dead peer's record stays until it expires."""

    def __init__(self, loop: VirtualLoop, *, ttl_s: float = 30.0) -> None:
        self._loop, self._ttl_s = loop, ttl_s
        self._records: dict[PeerId, tuple[float, Record]] = {}

    async def publish(self, record: Record) -> None:
        """See Directory.publish."""
        self._records[record.peer] = (self._loop.time() + self._ttl_s, record)

    async def records(self) -> tuple[Record, ...]:
        """See Directory.records."""
        now = self._loop.time()
        return tuple(record for expires, record in self._records.values() if expires > now)
