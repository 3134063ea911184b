"""Takes part in rounds, collects sums that others have finished, and serves both.

A sum is made by a butterfly all-reduce (`butterfly`), or fetched whole from somebody who has it and checked against its
digest. Fetches are idempotent: a lost or repeated one changes nothing, and whoever gives up leaves accumulators
untouched.

It knows no ledger: which contributions belong to a round, and whether it goes on, is the step machine's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from swarmnet.averaging.butterfly import PAUSE_S, Butterfly, Losses, OnEvent
from swarmnet.averaging.meter import Meter
from swarmnet.averaging.trail import Trail
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.ids import PeerId, RoundId
from swarmnet.messages import (
    Accepted,
    Answer,
    Commit,
    Finished,
    Line,
    Packed,
    Part,
    PartData,
    Rejected,
    Round,
    Stamp,
    TrailRequest,
    TrailStep,
)
from swarmnet.net.ask import ask
from swarmnet.net.transport import Transport
from swarmnet.stage.engine import Engine

PIECE_ELEMENTS = 1 << 22
"""A finished sum travels in pieces of this many elements, so that no message grows with the model."""

_AT_ONCE = 4
"""Pieces asked for at a time."""


def pieces(start: int, stop: int, size: int = PIECE_ELEMENTS) -> list[tuple[int, int]]:
    """Cut [start, stop) into pieces of `size` elements; an empty range is one empty piece."""
    edges = [*range(start, stop, size), stop] if start < stop else [start, stop]
    return list(itertools.pairwise(edges))


class Exchange:
    """Takes part in rounds of one (peer, stage) and serves its parts to the others.

    finished(stamp, id) gives the description of a sum this replica has finished and not forgotten, or None. Round ids
    repeat from step to step: a round is named by stamp and id. num_tokens: of every microbatch of the run. on_event
    hears `clipped`: whom the run's reducer clipped in a round's part.
    """

    def __init__(
        self, me: PeerId, engine: Engine, transport: Transport, finished: Callable[[Stamp, RoundId], Finished | None],
        *, num_tokens: int, running_s: float = 0.5,
        on_event: OnEvent = lambda event, fields: None,
    ) -> None:
        self.me, self._engine, self._transport, self._finished = me, engine, transport, finished
        self._running_s, self._num_tokens, self._on_event = running_s, num_tokens, on_event
        self._held: tuple[Stamp, RoundId] | None = None
        self._open: tuple[Butterfly, ...] = ()
        self._opened = asyncio.Event()
        self._meter = Meter()
        self.trail = Trail(engine, lambda: pieces(0, engine.num_elements))

    # ------------------------------------------------------------ my part in a round

    async def sum(self, current: Round, losses: Mapping[int, tuple[float, int]]) -> Finished:
        """Take part until the whole sum is in the engine's sum buffer. Cancel to abandon.

        losses: of the indexes in my accumulator, which must not change meanwhile.
        """
        self.close()
        self._meter.begin()
        await self._engine.open_round(current.id)
        all_losses: Losses = {}
        for phase, span in enumerate(itertools.pairwise(itertools.accumulate(self._engine.phases, initial=0))):
            mine = Butterfly(
                self.me, current, losses, self._engine, self._transport, span=span, num_tokens=self._num_tokens,
                running_s=self._running_s, on_event=self._on_event, meter=self._meter,
            )
            if phase:
                await self._engine.next_phase()
            self._open = (*self._open, mine)     # others may still be at the phase before
            self._opened.set()
            self._opened = asyncio.Event()
            if not phase:
                await self._leave(current)
                await self._engine.open_sum()
            all_losses = await mine.run()
        digest, sq_norm = await self._engine.seal()
        self._held = (current.stamp, current.id)
        return _describe(current, digest, sq_norm, all_losses)

    async def collect(self, current: Round) -> Finished:
        """Fetch the finished sum `current.id` from one of its holders, whichever answers. Cancel to abandon."""
        while True:
            for holder in current.holders:
                try:
                    return await self.collect_from(current, holder)
                except (PeerGone, PeerTimeout, BadMessage, Refused):
                    continue
            await asyncio.sleep(PAUSE_S)

    async def collect_from(self, current: Round, *holders: PeerId) -> Finished:
        """Fetch the finished sum `current.id`, piece by piece from all these holders at once.

        Raises PeerGone, PeerTimeout, Refused, BadMessage: of the last holder that failed.
        """
        window = asyncio.Semaphore(_AT_ONCE * len(holders))
        ranges = pieces(0, self._engine.num_elements)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._sum_piece(current, [*holders[at:], *holders[:at]], *piece, window))
                    for place, piece in enumerate(ranges) for at in [place % len(holders)]
                ]
        except ExceptionGroup as error:
            raise error.exceptions[0] from error
        collected = [task.result() for task in tasks]
        finished = collected[0].finished
        if finished is None or any(data.finished != finished for data in collected) or finished.id != current.id:
            raise BadMessage(RejectCode.MALFORMED, "a sum without its description", peer=holders[0])
        digest, sq_norm = await self._install(current, [data.payload[0] for data in collected])
        if digest != finished.digest or sq_norm != finished.grad_sq_norm:
            raise BadMessage(RejectCode.MALFORMED, "the sum does not have its digest", peer=holders[0])
        self._held = (current.stamp, current.id)
        return finished

    @property
    def line(self) -> Line:
        """What the rounds so far have shown of my line."""
        return self._meter.line

    def holds(self, stamp: Stamp, round_id: RoundId) -> bool:
        """Is the sum buffer's content, whole and checked, the sum of that round?"""
        return self._held == (stamp, round_id)

    def applied(self, stamp: Stamp, finished: Finished, commits: tuple[Commit, ...]) -> None:
        """The sum in the buffer has been applied: remember it for who is on the way (`trail`)."""
        self.trail.applied(stamp, finished, commits)

    def forget(self) -> None:
        """The run has gone back: what is in the buffer and in the trail is of a past that was given up."""
        self.close()
        self.trail.forget()
        self._held = None

    def close(self) -> None:
        """The round is over or abandoned: serve its contribution no more."""
        self._meter.end()
        for phase in self._open:
            phase.close()
        self._open = ()

    # ------------------------------------------------------------ serving

    async def serve(self, request: Part) -> AsyncGenerator[Answer, None]:
        """Answer one `Part` call: wait for the round to open here, then for the part."""
        length = self._engine.num_elements if request.kind == "sum" else sum(self._engine.phases)
        if not 0 <= request.start <= request.stop <= length:
            raise BadMessage(RejectCode.BAD_SHAPE, f"part [{request.start}, {request.stop}) of {length} elements")
        if request.kind == "sum":
            kept = self.trail.piece(request)
            if kept is not None:
                self.trail.wanted()
                yield kept
                return
            finished = self._finished(request.stamp, request.id)
            if finished is None or not self.holds(request.stamp, request.id):
                yield Rejected(RejectCode.NOT_FOUND, "that sum is not here")
                return
            packed = await self._engine.finished_sum(request.start, request.stop)
            # Another sum may have come into the buffer while the compute thread was busy.
            if self.holds(request.stamp, request.id):
                yield PartData((packed,), finished=finished)
            else:
                yield Rejected(RejectCode.NOT_FOUND, "that sum is gone")
            return
        yield Accepted()
        current = self._opened_as(request)
        if current is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._running_s):
                    await self._opened.wait()
            current = self._opened_as(request)
        if current is None:
            yield Rejected(RejectCode.NOT_READY, "that round is not open here")
            return
        async with contextlib.aclosing(current.serve(request)) as answers:
            async for answer in answers:
                yield answer

    def follow(self, request: TrailRequest, here: Stamp | None, open_step: TrailStep) -> Answer:
        """Answer one `TrailRequest`. here, open_step: where I stand and what is known of that step; None: nowhere."""
        self.trail.wanted()
        kept = self.trail.step(request.stamp)
        if kept is not None:
            return kept
        if here is None:
            return Rejected(RejectCode.NOT_READY, "no state of my own right now")
        if here == request.stamp:
            return open_step
        if here.restart != request.stamp.restart:
            return Rejected(RejectCode.NOT_READY, "another restart of the run is followed here", here.step)
        if here.step < request.stamp.step:
            return Rejected(RejectCode.NOT_READY, "behind that step", here.step)
        return Rejected(RejectCode.NOT_FOUND, "that step is not remembered here", here.step)

    # ------------------------------------------------------------ inside

    async def _install(self, current: Round, parts: Sequence[Packed]) -> tuple[bytes, float]:
        """Put a collected sum into the buffer."""
        await self._leave(current)
        return await self._engine.install(parts)

    async def _leave(self, current: Round) -> None:
        """Another sum comes into the buffer; what was there goes to the trail."""
        if self._held is not None and self._held != (current.stamp, current.id):
            await self.trail.save(*self._held)
        self._held = None

    async def _sum_piece(
        self, current: Round, holders: Sequence[PeerId], start: int, stop: int, window: asyncio.Semaphore
    ) -> PartData:
        """One piece of a finished sum, from the first of these holders that has it."""
        async with window:
            for holder in holders[:-1]:
                with contextlib.suppress(PeerGone, PeerTimeout, Refused):
                    return await self._ask(holder, Part(current.stamp, current.id, "sum", start, stop))
            return await self._ask(holders[-1], Part(current.stamp, current.id, "sum", start, stop))

    def _opened_as(self, request: Part) -> Butterfly | None:
        return next((phase for phase in self._open if phase.is_of(request)), None)

    async def _ask(self, peer: PeerId, request: Part) -> PartData:
        answer = await ask(self._transport, peer, request)  # a piece on a slow line takes as long as it takes
        match answer:
            case Rejected():
                raise Refused(answer.code, answer.reason, peer=peer)
            case PartData() if len(answer.payload) == 1:
                shape = answer.payload[0].shape
                if shape != (request.stop - request.start,):
                    raise BadMessage(RejectCode.BAD_SHAPE, f"part of shape {shape}", peer=peer)
                return answer
            case _:
                raise BadMessage(RejectCode.MALFORMED, "not an answer to Part", peer=peer)


def _describe(current: Round, digest: bytes, sq_norm: float, losses: Losses) -> Finished:
    loss_sum, num_tokens = 0.0, 0
    for index in sorted(losses):  # in index order: the same fp64 bits everywhere
        loss_sum += losses[index][0]
        num_tokens += losses[index][1]
    return Finished(
        id=current.id,
        digest=digest,
        num_tokens=num_tokens,
        loss_sum=loss_sum,
        grad_sq_norm=sq_norm,
        contributions=current.contributions,
        voided=current.voided,
    )
