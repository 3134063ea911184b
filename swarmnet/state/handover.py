"""Hand a stage's state to another replica, and take it over: one donor, one copy, one digest.

Served in one consistent cut: weights and optimizer state of a version, with the finished sum and the commits of that
step if they exist (docs/protocol.md, rule 18). The copy travels in pieces, so its size has no limit, and is freed when
nobody has asked for one for a while. It knows no steps; the step machine says what the version is.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import (
    Accepted,
    Answer,
    Commit,
    Finished,
    Packed,
    Rejected,
    Snapshot,
    SnapshotPiece,
    SnapshotRequest,
)
from swarmnet.net.ask import ask
from swarmnet.net.transport import Transport
from swarmnet.stage.engine import Engine
from swarmnet.state.cut import Cut

PIECE_BYTES = 32 << 20

KEEP_S = 30.0
"""How long a copy outlives the last piece that was asked for."""

_LARGE = 1 << 20


@dataclass(frozen=True, slots=True)
class _Copy:
    cut: Cut
    data: bytes | memoryview
    digest: bytes


class Donor:
    """Serves snapshots of one (peer, stage). `cut()` is None while not synced or applying."""

    def __init__(
        self,
        stage: int,
        engine: Engine,
        cut: Callable[[], Cut | None],
        finished: Callable[[], tuple[Finished | None, tuple[Commit, ...]]],
    ) -> None:
        self._stage, self._engine, self._cut, self._finished = stage, engine, cut, finished
        self._copy: _Copy | None = None
        self._copying = asyncio.Lock()
        self._asking = 0
        self._forgetting: asyncio.TimerHandle | None = None

    @property
    def keeps_copy(self) -> bool:
        """Does this donor hold a copy of the state in memory?"""
        return self._copy is not None

    async def serve(self, request: SnapshotRequest) -> AsyncGenerator[Answer, None]:
        """Answer one call. Joiners of the same version share one copy; a newer one replaces it."""
        with self._in_use():
            if request.digest:
                yield self._of_copy(request)
                return
            if self._cut() is None:
                yield Rejected(RejectCode.NOT_READY, "no state of my own right now")
                return
            yield Accepted()
            async with self._copying:
                copy = await self._take()
            if copy is None:
                yield Rejected(RejectCode.NOT_READY, "the weights moved while they were copied")
            else:
                yield self._describe(copy)

    def _of_copy(self, request: SnapshotRequest) -> Answer:
        copy = self._copy
        if copy is None or copy.digest != request.digest:
            return Rejected(RejectCode.NOT_FOUND, "that copy is gone")
        if request.start == request.stop:
            return self._describe(copy)
        if not 0 <= request.start < request.stop <= len(copy.data):
            return Rejected(RejectCode.BAD_SHAPE, f"[{request.start}, {request.stop}) of {len(copy.data)} bytes")
        data = memoryview(copy.data)[request.start : request.stop]
        return SnapshotPiece((Packed("uint8", (len(data),), data),))

    def _describe(self, copy: _Copy) -> Snapshot:
        finished: Finished | None = None
        commits: tuple[Commit, ...] = ()
        cut = copy.cut
        if self._cut() == cut:  # else a step further by now: the joiner learns its commits from heartbeats
            finished, commits = self._finished()
        return Snapshot(
            self._stage, cut.version, cut.chain, cut.term_chain, copy.digest, len(copy.data), finished, commits,
            cut.restart,
        )

    async def _take(self) -> _Copy | None:
        for _ in range(3):
            before = self._cut()
            if before is None:
                return None
            if self._copy is not None and self._copy.cut == before:
                return self._copy
            self._copy = None  # two at once would be too much memory
            data = await self._engine.snapshot()
            if self._cut() == before:
                self._copy = _Copy(before, data, await _digest(data))
                return self._copy
        return None

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """A call is being answered; some time after the last one the copy is freed."""
        self._asking += 1
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking and self._copy is not None:
                self._forgetting = asyncio.get_running_loop().call_later(KEEP_S, self._forget)

    def _forget(self) -> None:
        self._copy, self._forgetting = None, None


async def _digest(data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256; beside the event loop when it would hold it up."""
    if len(data) < _LARGE:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


async def fetch_snapshot(
    transport: Transport, donor: PeerId, stage: int, *, max_bytes: int
) -> tuple[Snapshot, bytearray]:
    """Fetch and verify one snapshot: what the donor says of it at the end, and its bytes.

    max_bytes: no state of this stage is larger. Raises PeerGone, PeerTimeout, Refused, BadMessage.
    """
    found = await _describe(transport, donor, SnapshotRequest(stage))
    if found.num_bytes > max_bytes:
        raise BadMessage(
            RejectCode.TOO_LARGE, "a snapshot larger than this stage", num_bytes=found.num_bytes, max_bytes=max_bytes,
            peer=donor,
        )
    data = bytearray(found.num_bytes)
    for start in range(0, found.num_bytes, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, found.num_bytes)
        data[start:stop] = await _piece(transport, donor, SnapshotRequest(stage, found.digest, start, stop))
    if await _digest(data) != found.digest:
        raise BadMessage(RejectCode.MALFORMED, "the snapshot does not have its digest", peer=donor)
    # A sum finished meanwhile belongs to it; without one that exists, the joiner would be no member (rule 18).
    latest = await _describe(transport, donor, SnapshotRequest(stage, found.digest))
    if (latest.version, latest.chain, latest.term_chain, latest.digest) != (
        found.version, found.chain, found.term_chain, found.digest
    ):
        raise BadMessage(RejectCode.MALFORMED, "another snapshot under the same digest", peer=donor)
    return latest, data


async def _describe(transport: Transport, donor: PeerId, request: SnapshotRequest) -> Snapshot:
    match answer := await ask(transport, donor, request):
        case Rejected():
            raise Refused(answer.code, answer.reason, peer=donor)
        case Snapshot() if answer.stage == request.stage:
            return answer
        case _:
            raise BadMessage(RejectCode.MALFORMED, "not an answer to SnapshotRequest", peer=donor)


async def _piece(transport: Transport, donor: PeerId, request: SnapshotRequest) -> bytes | bytearray | memoryview:
    match answer := await ask(transport, donor, request):
        case Rejected():
            raise Refused(answer.code, answer.reason, peer=donor)
        case SnapshotPiece((Packed(_, _, data),)) if len(data) == request.stop - request.start:
            return data
        case _:
            raise BadMessage(RejectCode.MALFORMED, "not the piece asked for", peer=donor)
