"""Scores microbatches by the weights of a live swarm, as somebody who takes no part in it.

Each is computed on one version of the weights in every stage, the newest that is known. When they move on meanwhile it
is sent again at once, for the version that whoever refuses it has: announcements are a step or several behind in a fast
run. A version cannot be held on to: replicas keep none but the newest. So while a run trains, different microbatches
are scored by different versions, and the tally says which. Holds no weights, announces nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from swarmnet.data.heldout import Tally
from swarmnet.errors import NoReplica, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Control, Gradient, Packed, Rejected, Request
from swarmnet.trainer.first_stage import FirstStage
from swarmnet.trainer.window import Window
from swarmnet.transport import ReadPayload

LOOK_S = 0.5
GIVE_UP_S = 60.0
"""How long nothing may be scored before it is given up: nobody may be left to ask."""

UNSEEN_S = 10.0
"""How long a version that one replica alone has told of is waited for: if it is true, it is announced by then."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One microbatch. num_bytes: of the text it stands for, if that is known."""

    tokens: tuple[Packed, ...]
    num_bytes: int | None


class Evaluation:
    """One evaluation of `count` microbatches. Implements Service: nothing is served here.

    piece(number) of microbatch `number` < count; heard() after each that was scored, and whenever somebody's
    announcements were read. tally: what was scored so far is in it, at any moment.
    """

    def __init__(
        self,
        stage: FirstStage,
        piece: Callable[[int], Piece],
        count: int,
        *,
        tally: Tally,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self._stage, self._piece, self._count = stage, piece, count
        self._tally, self._heard = tally, heard
        self._moved = asyncio.Event()
        self._reached = 0  # the version by which a microbatch was scored last, of this restart

    async def run(self) -> None:
        """Score all. Cancel to stop with what there is.

        Raises Refused if all replicas refuse a microbatch, NoReplica if none was answered for GIVE_UP_S.
        """
        await self._look()
        window = Window(self._stage.room)
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._looking())
            waiting = group.create_task(self._in_vain())
            async with asyncio.TaskGroup() as scoring:
                for number in range(self._count):
                    await window.take()
                    scoring.create_task(self._score(number, window))
            looking.cancel()
            waiting.cancel()

    async def _score(self, number: int, window: Window) -> None:
        piece = self._piece(number)
        answer, version = await self._answer(number, piece)
        self._tally.add(answer.loss_sum, answer.num_tokens, piece.num_bytes, version)
        self._reached = version
        window.give()
        self._heard()

    async def _answer(self, number: int, piece: Piece) -> tuple[Gradient, int]:
        """By the newest version that somebody still has; and which that was."""
        version, moved = max(self._stage.newest_version(), self._reached), self._moved
        while True:
            unseen = version > self._stage.newest_version()
            with contextlib.suppress(TimeoutError):
                try:
                    async with asyncio.timeout(UNSEEN_S if unseen else None):
                        return await self._stage.evaluate(version, number, piece.tokens), version
                except Refused as refused:
                    if refused.code not in (RejectCode.STALE, RejectCode.VOID, RejectCode.FINISHED):
                        raise
                    if refused.code is RejectCode.STALE:
                        version = self._stage.version_after(version, refused)
                        continue
            await moved.wait()
            version, moved = self._stage.newest_version(), self._moved

    async def _look(self) -> None:
        if await self._stage.refresh():
            self._reached = 0
        self._moved.set()
        self._moved = asyncio.Event()
        self._heard()

    async def _looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def _in_vain(self) -> None:
        scored = -1
        while scored < self._tally.num_microbatches:
            scored = self._tally.num_microbatches
            await asyncio.sleep(GIVE_UP_S)
        stands = (
            "nobody announces the run any more"
            if not self._stage.records
            else "nobody serves stage 0"
            if not self._stage.candidates()
            else "a stage may lack replicas"
        )
        raise NoReplica(f"no microbatch was scored for {GIVE_UP_S:g} s: {stands}; `swarmnet status` says more")

    # ------------------------------------------------------------ Service

    def on_tell(self, caller: PeerId, message: Control) -> None:
        """Nobody knows us."""

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Refuse."""
        yield Rejected(RejectCode.NOT_SERVED, "this one only asks")

    def on_reached(self, peer: PeerId) -> None:
        """It is asked, not told."""

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        if definite:
            self._stage.gone(peer)
