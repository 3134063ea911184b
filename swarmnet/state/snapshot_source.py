"""Hand a stage's state to other replicas: copies of it, described, signed and given out in pieces.

A copy is one consistent cut of weights and optimizer state (docs/protocol.md, rule 18), or a checkpoint that was read
back from disk. It is held while it is being fetched and freed when nobody has asked for a piece for a while. At most
two are in memory, one of them from disk. Whoever fetches a copy keeps it in its place, as long as one can still go on
from it and for no longer than fetching it can take. So nobody is kept out: without room for another one, who wants the
newest state is given the newest that is held, and who needs one from disk is told when to ask again. What happened
since a copy was taken is told by `averaging.replay_log`. It knows no steps; the step machine says what the version is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swarmnet.errors import RejectCode
from swarmnet.messages import Accepted, Answer, Busy, Packed, Rejected, Snapshot, SnapshotPiece, SnapshotRequest
from swarmnet.stage.seams import Compute
from swarmnet.state.header import StateHeader, consistent_copy, loop_time
from swarmnet.state.snapshot_index import LARGE, PIECE_BYTES, Seal, num_pieces, piece_digests, piece_size, span

MOST_COPIES = 2
"""In memory at once."""

KEEP_S = 30.0
"""How long a copy outlives the last call about it."""

LEASE_S = 5.0
"""A copy of which nobody has asked for a piece for so long may make room for another. One may be kept in its place for
KEEP_S and so long for each of its pieces: identities are free, and who asks does not tell how long fetching takes."""

WAIT_S, _LOOK_S = 30.0, 0.05
"""How long a caller is kept waiting for a version that is nearly there, and how often it is looked for."""

_NEARLY = 2


@dataclass(slots=True)
class _Copy:
    """One state in memory. live: of the weights that were here then, not from disk. made_at: since when it is here.

    asking: calls about it that are being answered; asked_at: when the last one ended. leased: until when it keeps its
    place.
    """

    header: StateHeader
    data: memoryview
    snapshot: Snapshot
    live: bool
    made_at: float
    asked_at: float
    leased: float
    asking: int = 0

    def renew(self) -> None:
        """A piece was asked for."""
        longest = KEEP_S + LEASE_S * num_pieces(self.snapshot)
        self.leased = min(loop_time() + LEASE_S, self.made_at + longest)


Stored = Callable[[int], Awaitable[tuple[StateHeader, memoryview] | None]]
"""This peer's checkpoint of a version, verified, if there is one."""


async def nothing_stored(version: int) -> None:
    """There is no disk."""
    return None


class Donor:
    """Serves snapshots of one (peer, stage). `where()` is None while not synced or applying.

    leads_on(header): is what happened since that state still remembered here?
    """

    def __init__(
        self,
        stage: int,
        engine: Compute,
        where: Callable[[], StateHeader | None],
        seal: Seal,
        *,
        leads_on: Callable[[StateHeader], bool],
        stored: Stored = nothing_stored,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._stage, self._engine, self._where, self._seal = stage, engine, where, seal
        self._leads_on, self._stored, self._piece_bytes = leads_on, stored, piece_bytes
        self._copies: dict[bytes, _Copy] = {}
        self._pasts = 0
        self._copying = asyncio.Lock()
        self._forgetting: asyncio.TimerHandle | None = None

    @property
    def num_copies(self) -> int:
        """Copies held in memory."""
        return len(self._copies)

    def forget(self) -> None:
        """The run has gone back: what is in memory, or on its way there, is of a past that was given up."""
        self._pasts += 1
        self._copies.clear()

    async def serve(self, request: SnapshotRequest) -> AsyncGenerator[Answer, None]:
        """Answer one call. Joiners of one version share one copy."""
        # A description came before: now the pieces of that copy are fetched.
        if request.piece >= 0:
            copy = self._copies.get(request.root)
            # It was freed, or the run has gone back: the caller asks for a description again.
            if copy is None:
                yield Rejected(RejectCode.NOT_FOUND, "that copy is gone")
                return
            with self._in_use(copy):
                try:
                    yield self._piece(copy, request.piece)
                finally:
                    copy.renew()
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

    @staticmethod
    def _piece(copy: _Copy, piece: int) -> Answer:
        if piece >= num_pieces(copy.snapshot):
            return Rejected(RejectCode.BAD_SHAPE, f"piece {piece} of {num_pieces(copy.snapshot)}")
        start, stop = span(copy.snapshot, piece)
        return SnapshotPiece((Packed("uint8", (stop - start,), copy.data[start:stop]),))

    # ------------------------------------------------------------ finding or taking a copy

    async def _find(self, request: SnapshotRequest) -> _Copy | Answer:
        if request.root and request.root in self._copies:
            return self._copies[request.root]
        until = loop_time() + (WAIT_S if request.version >= 0 else 1.0)
        while True:
            async with self._copying:
                found = await self._now_or_wait(request.version)
            if found is not None:
                return found
            # A version that is a step or two away is worth waiting for.
            if loop_time() >= until:
                return Rejected(RejectCode.NOT_READY, "no state of my own right now")
            await asyncio.sleep(_LOOK_S)

    async def _now_or_wait(self, version: int) -> _Copy | Answer | None:
        """A copy, why there is none, or None: it may be there in a moment."""
        where = self._where()
        if version >= 0:
            held = next((copy for copy in self._copies.values() if copy.header.version == version), None)
            if held is not None:
                return held
            # Not in memory: a disk may have it.
            if where is None or where.version != version:
                found = await self._copied(version, lambda: self._stored(version), live=False)
                if found is not None:
                    return found
            if where is not None and where.version > version:
                return Rejected(RejectCode.NOT_FOUND, "that version is past", where.version)
            if where is not None and where.version < version:
                return (
                    None
                    if version - where.version <= _NEARLY
                    else Rejected(RejectCode.NOT_READY, "that version is far ahead", where.version)
                )
        if where is None:
            return None
        held = next((copy for copy in self._copies.values() if copy.header == where), None)
        found = held or await self._copied(where.version, lambda: consistent_copy(self._engine, self._where), live=True)
        # No room for a new one: whoever wants the newest state goes on from one that others fetch.
        if isinstance(found, Busy) and version < 0:
            usable = [copy for copy in self._copies.values() if copy.live and not self._is_stale(copy)]
            return max(usable, key=lambda copy: copy.header.version, default=found)
        return found

    async def _copied(
        self, version: int, copy: Callable[[], Awaitable[tuple[StateHeader, bytes | memoryview] | None]], *, live: bool
    ) -> _Copy | Answer | None:
        # Memory for two copies is all that joiners get.
        if not self._has_room(live=live):
            return Busy(LEASE_S, version)
        past = self._pasts
        found = await copy()
        return None if found is None else await self._hold(past, *found, live=live)

    async def _hold(self, past: int, header: StateHeader, data: bytes | memoryview, *, live: bool) -> _Copy | None:
        """Keep a copy; None if the run has gone back since it was begun."""
        size = piece_size(len(data), self._piece_bytes)
        if len(data) <= LARGE:
            digests = piece_digests(data, size)
        else:
            digests = await asyncio.to_thread(piece_digests, data, size)
        # The run went back while this copy was taken.
        if past != self._pasts:
            return None
        snapshot = self._seal.describe(header, self._stage, num_bytes=len(data), piece_bytes=size, digests=digests)
        now = loop_time()
        # Whoever it was made for has a moment to ask for its first piece.
        made = _Copy(header, memoryview(data), snapshot, live, made_at=now, asked_at=now, leased=now + LEASE_S)
        copy = self._copies.setdefault(snapshot.root, made)
        self._forget_later(KEEP_S)
        return copy

    # ------------------------------------------------------------ memory

    def _is_stale(self, copy: _Copy) -> bool:
        return copy.live and not self._leads_on(copy.header)

    def _has_room(self, *, live: bool) -> bool:
        """If need be, give up the copy that has been idle longest of those that lead nowhere or have no lease."""
        rivals = [copy for copy in self._copies.values() if live or not copy.live]
        # One place is left to the weights that are here.
        if len(self._copies) < MOST_COPIES and (live or not rivals):
            return True
        rivals, now = rivals or [*self._copies.values()], loop_time()
        idle = [copy for copy in rivals if not copy.asking and (copy.leased <= now or self._is_stale(copy))]
        if idle:
            del self._copies[min(idle, key=lambda copy: copy.asked_at).snapshot.root]
        return bool(idle)

    @contextmanager
    def _in_use(self, copy: _Copy) -> Iterator[None]:
        """A call about this copy is being answered; some time after the last one it is freed."""
        copy.asking += 1
        try:
            yield
        finally:
            copy.asking -= 1
            copy.asked_at = loop_time()
            self._forget_later(KEEP_S)

    def _forget(self) -> None:
        self._forgetting = None
        oldest = loop_time() - KEEP_S
        self._copies = {root: copy for root, copy in self._copies.items() if copy.asking or copy.asked_at > oldest}
        resting = [copy.asked_at for copy in self._copies.values() if not copy.asking]
        if resting:
            self._forget_later(max(min(resting) + KEEP_S - loop_time(), _LOOK_S))

    def _forget_later(self, seconds: float) -> None:
        if self._forgetting is None:
            self._forgetting = asyncio.get_running_loop().call_later(seconds, self._forget)
