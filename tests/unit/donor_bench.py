"""Sources without a swarm, and a network between them and one joining replica whose every answer can be changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from swarmnet.errors import PeerGone
from swarmnet.ids import Chain, PeerId
from swarmnet.messages import Answer, SnapshotRequest, StateHeader
from swarmnet.state.snapshot_source import SnapshotSource
from swarmnet.testing.doubles import FakeTransport

STAGE = 2
PIECE = 10
SIZE = 147


def header_at(version: int) -> StateHeader:
    return StateHeader(version, Chain(f"{version:064x}"), Chain("0b" * 32), Chain("00" * 32))


def state_at(version: int | None, size: int = SIZE) -> bytes:
    return bytes((17 * at + at // 7 + (version or 0)) % 256 for at in range(size))


class Mate:
    """A replica as its source sees it: `version` may move while it is copied. Stands for engine and step machine."""

    def __init__(self, name: str = "d", version: int | None = 5, *, size: int = SIZE) -> None:
        self.peer, self.version, self.size = PeerId(name), version, size
        self.copies = 0
        self.copy_s = 1.0
        self.while_copying: Callable[[], None] = lambda: None
        self.disk: dict[int, bytes] = {}
        self.remembers = 64
        """How many steps back it can say what happened."""
        self.source = SnapshotSource(
            STAGE,
            self,
            self.header,
            leads_on=self.leads_on,
            on_disk=lambda: self.disk,
            load=self.stored,
            piece_bytes=PIECE,
        )

    def header(self) -> StateHeader | None:
        return None if self.version is None else header_at(self.version)

    def leads_on(self, header: StateHeader) -> bool:
        return self.version is not None and header.version >= self.version - self.remembers

    async def snapshot(self) -> bytes:
        self.copies += 1
        data = state_at(self.version, self.size)
        await asyncio.sleep(self.copy_s)
        self.while_copying()
        return data

    async def stored(self, version: int) -> tuple[StateHeader, memoryview]:
        return header_at(version), memoryview(self.disk[version])


class Line(FakeTransport):
    """To some sources; `before` sees every request, `intercept` every answer."""

    def __init__(self, *mates: Mate) -> None:
        super().__init__(self._serve)
        self.mates = {mate.peer: mate for mate in mates}
        self.slow_s: dict[PeerId, float] = {}
        self.before: Callable[[PeerId, SnapshotRequest], None] = lambda peer, request: None

    async def _serve(self, peer: PeerId, request: SnapshotRequest) -> AsyncGenerator[Answer, None]:
        self.before(peer, request)
        if peer not in self.mates:
            raise PeerGone("refused", definite=True, peer=peer)
        async for answer in self.mates[peer].source.serve(request):
            await asyncio.sleep(self.slow_s.get(peer, 0.0))
            if peer not in self.mates:
                raise PeerGone("broken", peer=peer)
            yield answer

    def pieces(self, peer: PeerId | None = None) -> list[int]:
        return [request.piece for at, request in self.requests if request.piece >= 0 and peer in (None, at)]
