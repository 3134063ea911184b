"""Hand a stage's state to other replicas: copies of it, described, signed and given out in pieces.

A copy is one consistent cut of weights and optimizer state (docs/protocol.md, rule 18). It is held while it is being
fetched and freed when nobody has asked for a piece for a while; a newer copy never takes its place. At most two are in
memory; whoever needs a third is told when to ask again. Versions that lie on this peer's disk are served from there.
What happened since the copy was taken is told by `averaging.trail`. It knows no steps; the step machine says what the
version is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from swarmnet.errors import RejectCode
from swarmnet.messages import Accepted, Answer, Busy, Packed, Rejected, Snapshot, SnapshotPiece, SnapshotRequest
from swarmnet.stage.engine import Engine
from swarmnet.state.copies import LARGE, PIECE_BYTES, Seal, num_pieces, piece_digests, piece_size, span
from swarmnet.state.cut import Cut, consistent_copy

MOST_COPIES = 2
"""In memory at once."""

KEEP_S = 30.0
"""How long a copy outlives the last piece that was asked for."""

LEASE_S = 5.0
"""A copy that nobody has asked for so long may make room for another."""

WAIT_S, _LOOK_S = 30.0, 0.05
"""How long a caller is kept waiting for a version that is nearly there, and how often it is looked for."""

_NEARLY = 2


class Stored(Protocol):
    """A checkpoint on disk, open. Its bytes are those `Engine.snapshot` gave at that version."""

    cut: Cut
    num_bytes: int

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop). Blocks. Raises OSError."""
        ...

    def close(self) -> None:
        """Nobody reads it any more."""
        ...


class Shelf(Protocol):
    """Where this peer keeps checkpoints of one stage."""

    def open(self, version: int) -> Stored | None:
        """The checkpoint of that version, if there is a sound one. Blocks."""
        ...


@dataclass(slots=True)
class _Copy:
    """data: the bytes in memory, or where they lie on disk."""

    cut: Cut
    data: bytes | bytearray | Stored
    snapshot: Snapshot
    asking: int = 0
    asked_at: float = 0.0

    @property
    def in_memory(self) -> bool:
        return isinstance(self.data, bytes | bytearray)

    async def read(self, start: int, stop: int) -> bytes | memoryview:
        if isinstance(self.data, bytes | bytearray):
            return memoryview(self.data)[start:stop]
        return await asyncio.to_thread(self.data.read, start, stop)


class Donor:
    """Serves snapshots of one (peer, stage). `where()` is None while not synced or applying."""

    def __init__(
        self, stage: int, engine: Engine, where: Callable[[], Cut | None], seal: Seal, *, shelf: Shelf | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._stage, self._engine, self._where, self._seal = stage, engine, where, seal
        self._shelf, self._piece_bytes = shelf, piece_bytes
        self._copies: dict[bytes, _Copy] = {}
        self._copying = asyncio.Lock()
        self._forgetting: asyncio.TimerHandle | None = None

    @property
    def num_copies(self) -> int:
        """Copies held in memory."""
        return sum(copy.in_memory for copy in self._copies.values())

    async def serve(self, request: SnapshotRequest) -> AsyncGenerator[Answer, None]:
        """Answer one call. Joiners of one version share one copy."""
        if request.piece >= 0:
            copy = self._copies.get(request.root)
            if copy is None:
                yield Rejected(RejectCode.NOT_FOUND, "that copy is gone")
                return
            with self._in_use(copy):
                yield await self._piece(copy, request.piece)
            return
        yield Accepted()
        found = await self._find(request)
        if not isinstance(found, _Copy):
            yield found
        elif request.root and found.snapshot.root != request.root:
            yield Rejected(RejectCode.NOT_FOUND, "that copy is not here")
        else:
            with self._in_use(found):
                yield found.snapshot

    async def _piece(self, copy: _Copy, piece: int) -> Answer:
        if piece >= num_pieces(copy.snapshot):
            return Rejected(RejectCode.BAD_SHAPE, f"piece {piece} of {num_pieces(copy.snapshot)}")
        try:
            data = await copy.read(*span(copy.snapshot, piece))
        except OSError as error:
            self._copies.pop(copy.snapshot.root, None)
            return Rejected(RejectCode.NOT_FOUND, f"the checkpoint cannot be read: {error.strerror}")
        return SnapshotPiece((Packed("uint8", (len(data),), data),))

    # ------------------------------------------------------------ finding or taking a copy

    async def _find(self, request: SnapshotRequest) -> _Copy | Answer:
        if request.root and request.root in self._copies:
            return self._copies[request.root]
        until = self._now() + (WAIT_S if request.version >= 0 else 1.0)
        while True:
            async with self._copying:
                found = await self._now_or_wait(request.version)
            if found is not None:
                return found
            if self._now() >= until:
                return Rejected(RejectCode.NOT_READY, "no state of my own right now")
            await asyncio.sleep(_LOOK_S)

    async def _now_or_wait(self, version: int) -> _Copy | Answer | None:
        """A copy, why there is none, or None: it may be there in a moment."""
        where = self._where()
        if version >= 0:
            held = next((copy for copy in self._copies.values() if copy.cut.version == version), None)
            held = held or await self._from_disk(version)
            if held is not None:
                return held
            if where is not None and where.version > version:
                return Rejected(RejectCode.NOT_FOUND, "that version is past", where.version)
            if where is not None and where.version < version:
                return None if version - where.version <= _NEARLY else Rejected(
                    RejectCode.NOT_READY, "that version is far ahead", where.version
                )
        if where is None:
            return None
        held = next((copy for copy in self._copies.values() if copy.cut == where), None)
        return held or await self._take(where)

    async def _take(self, where: Cut) -> _Copy | Answer | None:
        if self.num_copies >= MOST_COPIES and not self._make_room():
            return Busy(LEASE_S, where.version)
        taken = await consistent_copy(self._engine, self._where)
        if taken is None:
            return None
        cut, data = taken
        size = piece_size(len(data), self._piece_bytes)
        if len(data) <= LARGE:
            return self._hold(cut, data, len(data), size, piece_digests(data, size))
        return self._hold(cut, data, len(data), size, await asyncio.to_thread(piece_digests, data, size))

    async def _from_disk(self, version: int) -> _Copy | None:
        if self._shelf is None:
            return None
        stored = await asyncio.to_thread(self._shelf.open, version)
        if stored is None:
            return None
        size = piece_size(stored.num_bytes, self._piece_bytes)
        try:
            digests = await asyncio.to_thread(_digests_of_stored, stored, size)
        except OSError:
            stored.close()
            return None
        return self._hold(stored.cut, stored, stored.num_bytes, size, digests)

    def _hold(
        self, cut: Cut, data: bytes | bytearray | Stored, num_bytes: int, piece_bytes: int, digests: bytes
    ) -> _Copy:
        snapshot = self._seal.describe(
            cut, self._stage, num_bytes=num_bytes, piece_bytes=piece_bytes, digests=digests
        )
        copy = self._copies[snapshot.root] = _Copy(cut, data, snapshot)
        return copy

    # ------------------------------------------------------------ memory

    def _make_room(self) -> bool:
        """Give up the copy that has been idle longest, if its lease is over."""
        idle = [copy for copy in self._copies.values() if copy.in_memory and self._idle(copy, LEASE_S)]
        if not idle:
            return False
        self._drop(min(idle, key=lambda copy: copy.asked_at))
        return True

    def _idle(self, copy: _Copy, seconds: float) -> bool:
        return not copy.asking and self._now() - copy.asked_at >= seconds

    def _drop(self, copy: _Copy) -> None:
        del self._copies[copy.snapshot.root]
        if not isinstance(copy.data, bytes | bytearray):
            copy.data.close()

    @contextmanager
    def _in_use(self, copy: _Copy) -> Iterator[None]:
        """A call about this copy is being answered; some time after the last one it is freed."""
        copy.asking += 1
        try:
            yield
        finally:
            copy.asking -= 1
            copy.asked_at = self._now()
            if self._forgetting is None:
                self._forgetting = asyncio.get_running_loop().call_later(KEEP_S, self._forget)

    def _forget(self) -> None:
        self._forgetting = None
        for copy in [copy for copy in self._copies.values() if self._idle(copy, KEEP_S)]:
            self._drop(copy)
        if self._copies:
            due = min((copy.asked_at for copy in self._copies.values() if not copy.asking), default=self._now())
            again = max(due + KEEP_S - self._now(), _LOOK_S)
            self._forgetting = asyncio.get_running_loop().call_later(again, self._forget)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _digests_of_stored(stored: Stored, piece_bytes: int) -> bytes:
    """Of a checkpoint's pieces, read one after the other."""
    starts = range(0, stored.num_bytes, piece_bytes)
    return b"".join(
        piece_digests(stored.read(start, min(start + piece_bytes, stored.num_bytes)), piece_bytes) for start in starts
    )
