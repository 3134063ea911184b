"""One round: sum the contributions of a group and end up, everywhere, with the same whole sum.

A direct all-reduce in one group, pulled by the receiver: member r of n reduces the r-th part (it fetches that part from
every contributor), then everybody fetches every reduced part from its reducer. Fetches are idempotent, so a lost or
repeated one changes nothing, and whoever gives up leaves accumulators untouched. Everybody, the reducer too, decodes
what was encoded, so replicas end up with equal bits under any codec.

It knows no ledger: which contributions belong to a round, and whether it goes on, is the step machine's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmnet.averaging.trail import Trail
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.ids import PeerId, RoundId
from swarmnet.messages import (
    Accepted,
    Answer,
    Commit,
    Finished,
    Indexes,
    Packed,
    Part,
    PartData,
    Rejected,
    Round,
    Running,
    Stamp,
    TrailRequest,
    TrailStep,
)
from swarmnet.net.ask import ask
from swarmnet.net.transport import Transport
from swarmnet.stage.engine import Contribution, Engine

Losses = dict[int, tuple[float, int]]

_PAUSE_S = 0.05

PIECE_ELEMENTS = 1 << 22
"""A part travels in pieces of this many elements, so that no message grows with the model."""

_AT_ONCE = 4
"""Pieces asked for at a time."""


def pieces(start: int, stop: int, size: int = PIECE_ELEMENTS) -> list[tuple[int, int]]:
    """Cut [start, stop) into pieces of `size` elements; an empty range is one empty piece."""
    edges = [*range(start, stop, size), stop] if start < stop else [start, stop]
    return list(itertools.pairwise(edges))


def even_parts(num_elements: int, num_members: int) -> list[tuple[int, int]]:
    """Cut [0, num_elements) into one contiguous part per member, sizes equal to within one."""
    edges = [num_elements * place // num_members for place in range(num_members + 1)]
    return list(itertools.pairwise(edges))


@dataclass(slots=True)
class _Open:
    """The round this replica takes part in, as others may see it."""

    round: Round
    losses: Losses
    contributes: bool
    reduced: dict[tuple[int, int], asyncio.Future[tuple[Packed, Losses]]] = field(default_factory=dict)


class Exchange:
    """Takes part in rounds of one (peer, stage) and serves its parts to the others.

    finished(stamp, id) gives the description of a sum this replica has finished and not forgotten, or None. Round ids
    repeat from step to step: a round is named by stamp and id. num_tokens: of every microbatch of the run. on_event
    hears `clipped`: whom the run's reducer clipped in a round's part.
    """

    def __init__(
        self, me: PeerId, engine: Engine, transport: Transport, finished: Callable[[Stamp, RoundId], Finished | None],
        *, num_tokens: int, running_s: float = 0.5,
        on_event: Callable[[str, dict[str, object]], None] = lambda event, fields: None,
    ) -> None:
        self.me, self._engine, self._transport, self._finished = me, engine, transport, finished
        self._running_s, self._num_tokens, self._on_event = running_s, num_tokens, on_event
        self._held: tuple[Stamp, RoundId] | None = None
        self._open: _Open | None = None
        self._opened = asyncio.Event()
        self.trail = Trail(engine, lambda: pieces(0, engine.num_elements))

    # ------------------------------------------------------------ my part in a round

    async def sum(self, current: Round, losses: Mapping[int, tuple[float, int]]) -> Finished:
        """Take part until the whole sum is in the engine's sum buffer. Cancel to abandon.

        losses: of the indexes in my accumulator, which must not change meanwhile.
        """
        contributors = {peer: indexes for peer, _, indexes in current.contributions if indexes}
        reducers = list(current.receivers)
        mine = _Open(current, dict(losses), self.me in contributors)
        parts = dict(zip(reducers, even_parts(self._engine.num_elements, len(reducers)), strict=True))
        loop = asyncio.get_running_loop()
        if self.me in parts:
            mine.reduced = {piece: loop.create_future() for piece in pieces(*parts[self.me])}
        self._open = mine
        self._opened.set()
        self._opened = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reduce(mine, contributors))
            window = asyncio.Semaphore(_AT_ONCE)
            tasks = [
                group.create_task(self._reduced_piece(mine, peer, piece, window))
                for peer in reducers for piece in pieces(*parts[peer])
            ]
        collected = [task.result() for task in tasks]
        all_losses = collected[0][1]
        self._check_losses(all_losses, frozenset().union(*contributors.values()))
        digest, sq_norm = await self._install(current, [packed for packed, _ in collected])
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
            await asyncio.sleep(_PAUSE_S)

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

    def holds(self, stamp: Stamp, round_id: RoundId) -> bool:
        """Is the sum buffer's content, whole and checked, the sum of that round?"""
        return self._held == (stamp, round_id)

    def applied(self, stamp: Stamp, finished: Finished, commits: tuple[Commit, ...]) -> None:
        """The sum in the buffer has been applied: remember it for who is on the way (`trail`)."""
        self.trail.applied(stamp, finished, commits)

    def close(self) -> None:
        """The round is over or abandoned: serve its contribution no more."""
        self._open = None

    # ------------------------------------------------------------ serving

    async def serve(self, request: Part) -> AsyncGenerator[Answer, None]:
        """Answer one `Part` call: wait for the round to open here, then for the part."""
        if not 0 <= request.start <= request.stop <= self._engine.num_elements:
            raise BadMessage(RejectCode.BAD_SHAPE, f"part [{request.start}, {request.stop}) of "
                             f"{self._engine.num_elements} elements")
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
        if request.kind == "contribution":
            if not current.contributes:
                yield Rejected(RejectCode.NOT_FOUND, "I contribute nothing to that round")
                return
            packed = await self._engine.contribution(request.start, request.stop)
            # The round may have been abandoned while the compute thread was busy: then this is another accumulator.
            if self._open is current:
                yield PartData((packed,), current.losses)
            else:
                yield Rejected(RejectCode.NOT_READY, "that round was abandoned")
            return
        reduced = current.reduced.get((request.start, request.stop))
        if reduced is None:
            yield Rejected(RejectCode.NOT_FOUND, "I do not reduce that piece")
            return
        while not reduced.done():
            await asyncio.wait([reduced], timeout=self._running_s)
            if not reduced.done():
                if self._open is not current:
                    yield Rejected(RejectCode.NOT_READY, "that round was abandoned")
                    return
                yield Running()
        packed, losses = reduced.result()
        yield PartData((packed,), losses)

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
        if here.step < request.stamp.step:
            return TrailStep(None, ())
        return Rejected(RejectCode.NOT_FOUND, "that step is not remembered here", here.step)

    # ------------------------------------------------------------ inside

    async def _install(self, current: Round, parts: Sequence[Packed]) -> tuple[bytes, float]:
        """Put a sum into the buffer; what was there goes to the trail."""
        if self._held is not None and self._held != (current.stamp, current.id):
            await self.trail.save(*self._held)
        self._held = None
        return await self._engine.install(parts)

    async def _sum_piece(
        self, current: Round, holders: Sequence[PeerId], start: int, stop: int, window: asyncio.Semaphore
    ) -> PartData:
        """One piece of a finished sum, from the first of these holders that has it."""
        async with window:
            for holder in holders[:-1]:
                with contextlib.suppress(PeerGone, PeerTimeout, Refused):
                    return await self._ask(holder, Part(current.stamp, current.id, "sum", start, stop))
            return await self._ask(holders[-1], Part(current.stamp, current.id, "sum", start, stop))

    def _opened_as(self, request: Part) -> _Open | None:
        current = self._open
        if current is None or (current.round.stamp, current.round.id) != (request.stamp, request.id):
            return None
        return current

    async def _reduce(self, mine: _Open, contributors: Mapping[PeerId, Indexes]) -> None:
        """Reduce my pieces, one after the other: each needs every contributor's piece in memory.

        A member weighs what the round gives it: it speaks for these indexes and for no other.
        """
        for (start, stop), reduced in mine.reduced.items():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._contribution(mine, peer, start, stop)) for peer in contributors]
            losses: Losses = {}
            contributions = []
            for (peer, indexes), task in zip(contributors.items(), tasks, strict=True):
                packed, theirs = task.result()
                self._check_losses(theirs, indexes, peer=peer)
                losses |= theirs
                contributions.append(Contribution(peer, len(indexes), packed))
            result = await self._engine.reduce(contributions, start, stop)
            for clipped in result.clipped:
                self._on_event("clipped", {
                    "step": mine.round.stamp.step, "peer": clipped.peer, "factor": round(clipped.factor, 4),
                    "part": [start, stop],
                })
            reduced.set_result((result.packed, losses))

    def _check_losses(self, losses: Losses, indexes: Indexes, **facts: object) -> None:
        if losses.keys() != indexes:
            raise Refused(RejectCode.MALFORMED, "the round's losses are not of the round's indexes", **facts)
        if any(num_tokens != self._num_tokens for _, num_tokens in losses.values()):
            raise Refused(RejectCode.MALFORMED, "tokens that the round's indexes do not have", **facts)

    async def _contribution(self, mine: _Open, peer: PeerId, start: int, stop: int) -> tuple[Packed, Losses]:
        if peer == self.me:
            return await self._engine.contribution(start, stop), mine.losses
        return await self._pull(mine, peer, "contribution", start, stop)

    async def _reduced_piece(
        self, mine: _Open, peer: PeerId, piece: tuple[int, int], window: asyncio.Semaphore
    ) -> tuple[Packed, Losses]:
        if peer == self.me:
            reduced = mine.reduced[piece]
            await asyncio.wait([reduced])  # others wait for it too: cancelling me must not cancel it
            return reduced.result()
        async with window:
            return await self._pull(mine, peer, "reduced", *piece)

    async def _pull(self, mine: _Open, peer: PeerId, kind: str, start: int, stop: int) -> tuple[Packed, Losses]:
        """Ask until the part is there: only the step machine (by cancelling) decides that a member is lost."""
        while True:
            try:
                data = await self._ask(peer, Part(mine.round.stamp, mine.round.id, kind, start, stop))
                return data.payload[0], dict(data.losses)
            except (PeerGone, PeerTimeout, BadMessage, Refused):
                await asyncio.sleep(_PAUSE_S)

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
