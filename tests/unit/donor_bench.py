"""Sources without a swarm, and a network between them and one joining replica whose every answer can be changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from swarmnet.errors import PeerGone
from swarmnet.ids import Chain, PeerId
from swarmnet.messages import Answer, Packed, Request, SnapshotRequest, StateHeader
from swarmnet.state.snapshot_source import SnapshotSource
from swarmnet.testing.clock import VirtualLoop

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


class Line:
    """A transport to some sources; `before` sees every request, `change` every answer (or raises instead)."""

    def __init__(self, *mates: Mate) -> None:
        self.mates = {mate.peer: mate for mate in mates}
        self.slow_s: dict[PeerId, float] = {}
        self.asked: list[tuple[PeerId, SnapshotRequest]] = []
        self.before: Callable[[PeerId, SnapshotRequest], None] = lambda peer, request: None
        self.change: Callable[[PeerId, SnapshotRequest, Answer], Answer] = lambda peer, request, answer: answer

    def tell(self, peer: PeerId, message: object) -> None:
        raise AssertionError("nothing is told")

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        assert isinstance(request, SnapshotRequest)
        self.asked.append((peer, request))
        self.before(peer, request)
        if peer not in self.mates:
            raise PeerGone("refused", definite=True, peer=peer)
        async for answer in self.mates[peer].source.serve(request):
            await asyncio.sleep(self.slow_s.get(peer, 0.0))
            if peer not in self.mates:
                raise PeerGone("broken", peer=peer)
            yield self.change(peer, request, answer)

    def pieces(self, peer: PeerId | None = None) -> list[int]:
        return [request.piece for at, request in self.asked if request.piece >= 0 and peer in (None, at)]


def play(story: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story)
