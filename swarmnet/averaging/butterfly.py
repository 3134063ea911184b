"""One round in one group: a butterfly all-reduce over streams, pulled by the receiver.

Each member reduces one part of the vector. It streams that part, chunk by chunk, from every contributor; sums a chunk
when it has it from all of them, in the round's order; and streams the result to whoever asks. So a chunk is received,
decoded, summed, encoded and sent while others are on the way. Everybody, the reducer too, installs what was encoded:
members end up with equal bits under any codec.

A broken stream is asked for again from the first chunk that is missing; nothing is ever taken twice. A contributor that
is a few chunks ahead of the slowest waits: memory does not grow with the part. Knows no ledger: whom a round needs, and
whether it goes on, is the step machine's word.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from swarmnet.averaging.meter import Meter
from swarmnet.averaging.parts import Range, chunk_elements, chunks, parts
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Indexes, Packed, Part, PartData, Rejected, Round, Running
from swarmnet.net.transport import Transport
from swarmnet.stage.engine import Contribution, Engine

Losses = dict[int, tuple[float, int]]
OnEvent = Callable[[str, dict[str, object]], None]

PAUSE_S = 0.05
"""Before a broken stream is asked for again."""

_AHEAD = 4
"""Chunks of one contributor that wait for the others'."""

_DEADLINE_S = 3600.0

_LEAST_PATIENCE_S, _PATIENCE = 10.0, 20.0
"""A contributor owes the next chunk without waiting for anybody: a stream silent for so many times its slowest chunk so
far, and for so many seconds, is stuck. It is asked for again, and who it was is said."""


class _Pace:
    """How long a stream may be silent. owes: the callee waits for nobody else. Its first chunk may take any time."""

    def __init__(self, *, owes: bool) -> None:
        self._owes = owes
        self._slowest_s: float | None = None

    def came(self, seconds: float) -> None:
        """A chunk has come, so long after the last sign of life."""
        if self._owes:
            self._slowest_s = max(self._slowest_s or 0.0, seconds)

    @property
    def patience_s(self) -> float | None:
        """Seconds until the next sign of life at the latest; None: however long it takes."""
        if not self._owes or self._slowest_s is None:
            return None
        return max(_LEAST_PATIENCE_S, _PATIENCE * self._slowest_s)


class Butterfly:
    """One member's part in one phase of a round: `run` it once; `serve` others meanwhile and after, until `close`.

    span: the positions of the engine's vectors that this phase sums.
    losses: of the indexes in my accumulator, which must not change before `close`. num_tokens: of every microbatch.
    """

    def __init__(
        self, me: PeerId, current: Round, losses: Mapping[int, tuple[float, int]], engine: Engine,
        transport: Transport, *, span: Range, num_tokens: int, running_s: float, on_event: OnEvent,
        meter: Meter,
    ) -> None:
        self.me, self.round, self._span = me, current, span
        self._losses, self._engine, self._transport = dict(losses), engine, transport
        self._num_tokens, self._running_s, self._on_event = num_tokens, running_s, on_event
        self._meter = meter
        self._contributors: dict[PeerId, Indexes] = {
            peer: indexes for peer, _, indexes in current.contributions if indexes
        }
        first, last = span
        cut = parts(last - first, current.bandwidths or [0] * len(current.receivers), block=engine.block)
        self._size = chunk_elements(last - first, len(cut), current.bandwidths)
        self._chunks = {
            peer: chunks(first + start, first + stop, self._size)
            for peer, (start, stop) in zip(current.receivers, cut, strict=True) if start < stop
        }
        loop = asyncio.get_running_loop()
        self._mine: dict[Range, asyncio.Future[Packed]] = {
            chunk: loop.create_future() for chunk in self._chunks.get(me, ())
        }
        self._summed: Losses = {}
        self._closed = False

    def is_of(self, request: Part) -> bool:
        """Does this request belong to this phase of this round?"""
        inside = self._span[0] <= request.start <= request.stop <= self._span[1]
        return inside and (self.round.stamp, self.round.id) == (request.stamp, request.id)

    def close(self) -> None:
        """The round is over or abandoned: what the engine holds is no longer of this round."""
        self._closed = True

    # ------------------------------------------------------------ taking part

    async def run(self) -> Losses:
        """Return when all of the sum was put into the engine: the losses of everybody's indexes. Cancel to abandon."""
        async with asyncio.TaskGroup() as group:
            arriving = {
                peer: asyncio.Queue[tuple[Packed, Losses]](_AHEAD) for peer in self._contributors if peer != self.me
            }
            if self._mine:
                for peer, queue in arriving.items():
                    group.create_task(self._contributions(peer, queue))
                group.create_task(self._reduce(arriving))
            told = [group.create_task(self._reduced(peer)) for peer in self._chunks if peer != self.me]
        everybodys = [*([self._summed] if self._mine else []), *(task.result() for task in told)]
        if any(losses != everybodys[0] for losses in everybodys):
            raise Refused(RejectCode.MALFORMED, "reducers tell different losses")
        self._check_losses(everybodys[0], frozenset[int]().union(*self._contributors.values()))
        return everybodys[0]

    async def _contributions(self, peer: PeerId, queue: asyncio.Queue[tuple[Packed, Losses]]) -> None:
        async for _, packed, losses in self._stream(peer, "contribution", self._chunks[self.me]):
            await queue.put((packed, losses))

    async def _reduce(self, arriving: Mapping[PeerId, asyncio.Queue[tuple[Packed, Losses]]]) -> None:
        """Sum my part, one chunk after the other, always in the order of the round.

        A member weighs what the round gives it: it speaks for these indexes and for no other.
        """
        for number, ((start, stop), reduced) in enumerate(self._mine.items()):
            contributions: list[Contribution] = []
            for peer, indexes in self._contributors.items():
                if peer == self.me:
                    packed, losses = await self._engine.contribution(start, stop), self._losses
                else:
                    packed, losses = await arriving[peer].get()
                if not number:
                    self._check_losses(losses, indexes, peer=peer)
                    self._summed |= losses
                contributions.append(Contribution(peer, len(indexes), packed))
            result = await self._engine.reduce(contributions, start, stop)
            for clipped in result.clipped:
                self._on_event("clipped", {
                    "step": self.round.stamp.step, "peer": clipped.peer, "factor": round(clipped.factor, 4),
                    "part": [start, stop],
                })
            reduced.set_result(result.packed)
            await self._engine.put(start, result.packed)

    async def _reduced(self, peer: PeerId) -> Losses:
        """Install what that member reduces; returns the losses it tells."""
        told: Losses = {}
        async for (start, _), packed, losses in self._stream(peer, "reduced", self._chunks[peer]):
            told |= losses
            await self._engine.put(start, packed)
        return told

    async def _stream(
        self, peer: PeerId, kind: str, wanted: Sequence[Range]
    ) -> AsyncGenerator[tuple[Range, Packed, Losses], None]:
        """These chunks of that member, in order, however often it takes: only the step machine gives a member up."""
        place, pace = 0, _Pace(owes=kind == "contribution")
        while place < len(wanted):
            request = Part(self.round.stamp, self.round.id, kind, wanted[place][0], wanted[-1][1])
            with contextlib.suppress(PeerGone, PeerTimeout, BadMessage, Refused):
                async with contextlib.aclosing(self._answers(peer, request, pace)) as answers:
                    async for data in answers:
                        start, stop = wanted[place]
                        if len(data.payload) != 1 or data.payload[0].shape != (stop - start,):
                            raise BadMessage(RejectCode.BAD_SHAPE, "not the next chunk", peer=peer)
                        yield (start, stop), data.payload[0], dict(data.losses)
                        place += 1
                        if place == len(wanted):
                            return
            await asyncio.sleep(PAUSE_S)

    async def _answers(self, peer: PeerId, request: Part, pace: _Pace) -> AsyncGenerator[PartData, None]:
        loop = asyncio.get_running_loop()
        heard = began = loop.time()
        deadline = began + _DEADLINE_S           # silence ends calls, not their length
        async with contextlib.aclosing(self._transport.call(peer, request, deadline=deadline)) as answers:
            while True:
                asked = loop.time()
                try:
                    async with asyncio.timeout(pace.patience_s):
                        answer = await anext(answers, None)
                except TimeoutError as error:
                    self._on_event("stuck", {"step": self.round.stamp.step, "peer": peer, "part": request.start})
                    raise PeerTimeout("no progress", peer=peer) from error
                since, heard = heard, loop.time()
                match answer:
                    case None:
                        return
                    case Accepted():
                        self._meter.ping(peer, heard - began)
                    case Running():
                        continue
                    case PartData():
                        self._meter.received(_num_bytes(answer), since=since, now=heard)
                        pace.came(heard - asked)
                        yield answer
                    case Rejected():
                        raise Refused(answer.code, answer.reason, peer=peer)
                    case _:
                        raise BadMessage(RejectCode.MALFORMED, "not an answer to Part", peer=peer)

    def _check_losses(self, losses: Losses, indexes: Indexes, **facts: object) -> None:
        if losses.keys() != indexes:
            raise Refused(RejectCode.MALFORMED, "the round's losses are not of the round's indexes", **facts)
        if any(num_tokens != self._num_tokens for _, num_tokens in losses.values()):
            raise Refused(RejectCode.MALFORMED, "tokens that the round's indexes do not have", **facts)

    # ------------------------------------------------------------ serving

    async def serve(self, request: Part) -> AsyncGenerator[Answer, None]:
        """Stream the chunks of [start, stop), of my own accumulator or of what I reduce; losses come with the first."""
        loop = asyncio.get_running_loop()
        serve = self._serve_contribution if request.kind == "contribution" else self._serve_reduced
        async with contextlib.aclosing(serve(request)) as answers:
            async for answer in answers:
                # The round may have been abandoned while the compute thread was busy: then this is something else.
                if self._closed:
                    yield Rejected(RejectCode.NOT_READY, "that round was abandoned")
                    return
                since = loop.time()
                try:
                    yield answer
                finally:                         # it has been taken; after the last one nobody asks for more
                    if isinstance(answer, PartData):
                        self._meter.sent(_num_bytes(answer), since=since, now=loop.time())

    async def _serve_contribution(self, request: Part) -> AsyncGenerator[Answer, None]:
        if self.me not in self._contributors:
            yield Rejected(RejectCode.NOT_FOUND, "I contribute nothing to that round")
            return
        losses = self._losses
        for chunk in chunks(request.start, request.stop, self._size):
            if self._closed:                     # not one chunk more: what is encoded now counts as of the next round
                yield Rejected(RejectCode.NOT_READY, "that round was abandoned")
                return
            yield PartData((await self._engine.contribution(*chunk),), losses)
            losses = {}

    async def _serve_reduced(self, request: Part) -> AsyncGenerator[Answer, None]:
        wanted = [chunk for chunk in self._mine if chunk[0] >= request.start]
        if not wanted or (wanted[0][0], wanted[-1][1]) != (request.start, request.stop):
            yield Rejected(RejectCode.NOT_FOUND, "I do not reduce that piece")
            return
        for chunk in wanted:
            reduced = self._mine[chunk]
            while not reduced.done():
                await asyncio.wait([reduced], timeout=self._running_s)
                if not reduced.done():
                    yield Running()
            yield PartData((reduced.result(),), self._summed if chunk is wanted[0] else {})


def _num_bytes(data: PartData) -> int:
    return sum(packed.num_bytes for packed in data.payload)
