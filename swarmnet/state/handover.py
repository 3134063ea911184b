"""Hand a stage's state to another replica, and take it over: one donor, one stream, one digest.

Served in one consistent cut: weights and optimizer state of a version, with the finished sum and the commits of that
step if they exist (docs/protocol.md, rule 18). It knows no steps; the step machine says what the version is.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import Chain, PeerId
from swarmnet.messages import (
    Accepted,
    Answer,
    Commit,
    Finished,
    Packed,
    Rejected,
    Snapshot,
    SnapshotRequest,
)
from swarmnet.net.ask import ask
from swarmnet.net.transport import Transport
from swarmnet.stage.engine import Engine

STALL_S = 20.0
"""Silence after which a donor is given up."""

_LARGE = 1 << 20


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a donor stands: equal before and after the copy means the copy is consistent."""

    version: int
    chain: Chain
    term_chain: Chain


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
        self._copy: tuple[Cut, bytes, bytes] | None = None
        self._copying = asyncio.Lock()

    async def serve(self, running_s: float) -> AsyncGenerator[Answer, None]:
        """Answer one `SnapshotRequest`. Joiners of the same version share one copy."""
        cut = self._cut()
        if cut is None:
            yield Rejected(RejectCode.NOT_READY, "no state of my own right now")
            return
        yield Accepted()
        async with self._copying:
            copy = await self._take()
        if copy is None:
            yield Rejected(RejectCode.NOT_READY, "the weights moved while they were copied")
            return
        cut, data, digest = copy
        if self._cut() == cut:
            finished, commits = self._finished()
        else:
            finished, commits = None, ()  # a step further by now: the joiner learns its commits from heartbeats
        payload = (Packed("uint8", (len(data),), data),)
        yield Snapshot(self._stage, cut.version, cut.chain, cut.term_chain, digest, finished, commits, payload)

    async def _take(self) -> tuple[Cut, bytes, bytes] | None:
        for _ in range(3):
            before = self._cut()
            if before is None:
                return None
            if self._copy is not None and self._copy[0] == before:
                return self._copy
            data = await self._engine.snapshot()
            if self._cut() == before:
                digest = await _digest(data)
                self._copy = (before, data, digest)
                return self._copy
        return None


async def _digest(data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256; beside the event loop when it would hold it up."""
    if len(data) < _LARGE:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


async def fetch_snapshot(transport: Transport, donor: PeerId, stage: int) -> Snapshot:
    """Fetch and verify one snapshot. Raises PeerGone, PeerTimeout, Refused, BadMessage."""
    answer = await ask(transport, donor, SnapshotRequest(stage), patience=lambda: STALL_S)
    match answer:
        case Rejected():
            raise Refused(answer.code, answer.reason, peer=donor)
        case Snapshot() if len(answer.payload) == 1 and answer.stage == stage:
            if await _digest(answer.payload[0].data) != answer.digest:
                raise BadMessage(RejectCode.MALFORMED, "the snapshot does not have its digest", peer=donor)
            return answer
        case _:
            raise BadMessage(RejectCode.MALFORMED, "not an answer to SnapshotRequest", peer=donor)
