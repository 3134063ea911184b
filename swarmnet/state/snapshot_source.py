"""Hand a stage's state to other replicas: snapshots of it, described and given out in pieces.

A snapshot is one consistent cut of weights and optimizer state (docs/protocol.md, rule 18), or a checkpoint that was
read back from disk. At most two are in memory: the newest state, and one that was asked for by its version. A snapshot
is kept while joining replicas fetch it, and freed when no piece was asked for in a while.

Identities are free, so a snapshot stays in memory no longer than it takes to fetch it. Until then, a replica that wants
the newest state gets the one that is held, as long as it can catch up from there.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import dataclass

from swarmnet.bounds import LARGE_BYTES
from swarmnet.clock import loop_time
from swarmnet.errors import RejectCode
from swarmnet.fetch.plan import PIECE_BYTES, address, num_pieces, piece_size, span
from swarmnet.messages import (
    Accepted,
    Answer,
    Busy,
    Content,
    Packed,
    Rejected,
    Snapshot,
    SnapshotPiece,
    SnapshotRequest,
    StateHeader,
)
from swarmnet.stage.interfaces import Compute

KEEP_S = 30.0
"""How long a snapshot outlives the last call about it."""

LEASE_S = 5.0
"""A snapshot of which no piece was asked for in so long may be replaced. It stays in memory at most KEEP_S and so long
for each of its pieces."""

WAIT_S, _LOOK_S = 30.0, 0.05
"""How long a caller waits for a version that is nearly there, and how often the source looks."""

State = tuple[StateHeader, bytes | memoryview]


async def _nothing(version: int) -> None:
    return None


async def consistent_copy(
    engine: Compute, where: Callable[[], StateHeader | None], *, attempts: int = 3
) -> State | None:
    """The state and its header; None while `where()` is None, or if the state moved during every attempt."""
    for _ in range(attempts):
        before = where()
        if before is None:
            return None
        data = await engine.snapshot()
        # The optimizer may step while the copy is awaited: only a state that has not moved is one state.
        if where() == before:
            return before, data
    return None


def described(content: bytes | memoryview, piece_bytes: int) -> Content:
    """The description of these bytes."""
    view = memoryview(content)
    pieces = (view[start : start + piece_bytes] for start in range(0, len(view), piece_bytes))
    return Content(len(view), piece_bytes, b"".join(hashlib.sha256(piece).digest() for piece in pieces))


def _piece(content: Content, data: memoryview, piece: int) -> Answer:
    if piece >= num_pieces(content):
        return Rejected(RejectCode.BAD_SHAPE, f"piece {piece} of {num_pieces(content)}")
    start, stop = span(content, piece)
    return SnapshotPiece((Packed("uint8", (stop - start,), data[start:stop]),))


class KeptContent:
    """A content that stays: data are its bytes, which may be a file that is mapped."""

    def __init__(self, content: Content, data: memoryview) -> None:
        self.content, self.data, self.address = content, data, address(content)


@dataclass(slots=True)
class _Held:
    """A snapshot in memory. lasts: how long it may stay at most; leased: how long it stays if no piece is asked for.
    calls: being answered."""

    snapshot: Snapshot
    data: memoryview
    lasts: float
    leased: float
    calls: int = 0
    freeing: asyncio.TimerHandle | None = None


class SnapshotSource:
    """Serves snapshots of one (peer, stage).

    Args:
        where: the header of the state that may be copied now; None while there is none.
        leads_on: can a replica that has this state still learn here what happened since?
        on_disk: the versions of which this peer has a checkpoint.
        load: reads one of them; None if it cannot be used.
        kept: what is handed out beside: the frozen weights of a run with adapters.
    """

    def __init__(
        self,
        stage: int,
        engine: Compute,
        where: Callable[[], StateHeader | None],
        *,
        leads_on: Callable[[StateHeader], bool],
        on_disk: Callable[[], Collection[int]] = tuple,
        load: Callable[[int], Awaitable[State | None]] = _nothing,
        piece_bytes: int = PIECE_BYTES,
        kept: KeptContent | None = None,
    ) -> None:
        self._stage, self._engine, self._where = stage, engine, where
        self._leads_on, self._on_disk, self._load, self._piece_bytes = leads_on, on_disk, load, piece_bytes
        self._kept = kept
        self._places: dict[bool, _Held] = {}  # was the newest state asked for? -> the snapshot
        self._times_back = 0
        self._copying = asyncio.Lock()

    def forget(self) -> None:
        """The run has gone back: every snapshot, also one that is being taken, is of a past that was given up."""
        self._times_back += 1
        self._places.clear()

    async def serve(self, request: SnapshotRequest) -> AsyncGenerator[Answer, None]:
        """Answer one call. Replicas that want one version share one snapshot."""
        if self._kept is not None and request.content == self._kept.address:
            content, data = self._kept.content, self._kept.data
            yield content if request.piece < 0 else _piece(content, data, request.piece)
            return
        if request.content and request.piece < 0:
            yield Rejected(RejectCode.NOT_FOUND, "that content is not here")
            return
        if request.piece < 0:
            yield Accepted()
            found = await self._find(request.version)
        else:
            named = (held for held in self._places.values() if address(held.snapshot.content) == request.content)
            found = next(named, None) or Rejected(RejectCode.NOT_FOUND, "that snapshot is gone")
        if not isinstance(found, _Held):
            yield found
            return
        found.calls += 1
        try:
            yield found.snapshot if request.piece < 0 else _piece(found.snapshot.content, found.data, request.piece)
        finally:
            found.calls -= 1
            if request.piece >= 0:
                found.leased = min(loop_time() + LEASE_S, found.lasts)
            self._free_later(found)

    # ------------------------------------------------------------ finding or taking a snapshot

    async def _find(self, version: int) -> _Held | Answer:
        until = loop_time() + (WAIT_S if version >= 0 else 1.0)
        while True:
            async with self._copying:
                found = await self._held_or_taken(version)
            if found is not None:
                return found
            if loop_time() >= until:
                return Rejected(RejectCode.NOT_READY, "no state of my own right now")
            await asyncio.sleep(_LOOK_S)

    async def _held_or_taken(self, version: int) -> _Held | Answer | None:
        """A snapshot of that version, -1: the newest; why there is none; or None: it may be there in a moment."""
        where, newest = self._where(), version < 0
        for held in self._places.values():
            at = held.snapshot.header
            if at == where if newest else at.version == version:
                return held
        if where is not None and version in (-1, where.version):
            # Another replica fetches it. This one can catch up from there as well.
            if newest and not self._may_replace(newest) and self._leads_on(self._places[newest].snapshot.header):
                return self._places[newest]
            # While one version is copied the state may move on: another version would be a false answer.
            same = self._where if newest else lambda: where if self._where() == where else None
            return await self._take(where.version, lambda: consistent_copy(self._engine, same), newest=newest)
        if version in self._on_disk():
            return await self._take(version, lambda: self._load(version), newest=False)
        if where is not None and where.version > version:
            return Rejected(RejectCode.NOT_FOUND, "that version is past", where.version)
        return None

    async def _take(
        self, version: int, copy: Callable[[], Awaitable[State | None]], *, newest: bool
    ) -> _Held | Answer | None:
        if not self._may_replace(newest):
            return Busy(LEASE_S, version)
        self._places.pop(newest, None)
        times_back = self._times_back
        found = await copy()
        if found is None:
            return None
        header, data = found
        size = piece_size(len(data), self._piece_bytes)
        content = described(data, size) if len(data) <= LARGE_BYTES else await asyncio.to_thread(described, data, size)
        # The run went back while the snapshot was taken.
        if times_back != self._times_back:
            return None
        now = loop_time()
        lasts = now + KEEP_S + LEASE_S * num_pieces(content)
        # The joining replica that it is made for needs a moment to ask for its first piece.
        held = _Held(Snapshot(self._stage, header, content), memoryview(data), lasts, leased=now + LEASE_S)
        self._places[newest] = held
        self._free_later(held)
        return held

    # ------------------------------------------------------------ memory

    def _may_replace(self, newest: bool) -> bool:
        held = self._places.get(newest)
        if held is None:
            return True
        leads_nowhere = newest and not self._leads_on(held.snapshot.header)
        return not held.calls and (held.leased <= loop_time() or leads_nowhere)

    def _free_later(self, held: _Held) -> None:
        if held.freeing is not None:
            held.freeing.cancel()
        held.freeing = asyncio.get_running_loop().call_later(KEEP_S, self._free, held)

    def _free(self, held: _Held) -> None:
        if not held.calls:
            self._places = {newest: other for newest, other in self._places.items() if other is not held}
