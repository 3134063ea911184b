"""One aggregate in one group: a butterfly all-reduce over streams that the receiver pulls.

Each member reduces one part of the vector. It streams that part, chunk by chunk, from every contributor, sums a chunk
when it has the chunk from all of them, in the round's order, and streams the result to every member that asks. So a
chunk is received, decoded, summed, encoded and sent while other chunks travel. All members, including the reducer,
install the encoded result: they end up with equal bits under any codec.

In a grid (`averaging.grid`) a member runs one butterfly per hop, all at the same time: the result of one hop is its
contribution to the next, chunk by chunk, and the result of the last hop travels back through all hops to the others.

A member asks for a broken stream again from the first missing chunk; no chunk is ever taken twice. A contributor that
is a few chunks ahead of the slowest waits, so memory does not grow with the part. Knows no assignments: the step
machine decides which contributions a round needs and whether it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from swarmnet.averaging.grid import Group, cutting_of, groups, lone_group, partners
from swarmnet.averaging.parts import Range
from swarmnet.averaging.round_check import (
    PAUSE_S,
    Contradiction,
    Pledges,
    chunk_digest,
    part_key,
    says,
    sign_part,
    signed_part,
)
from swarmnet.averaging.watch import Meter, StreamWait, Watch
from swarmnet.bounds import is_loss
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.ids import PeerId, RoundId, Signer
from swarmnet.messages import (
    Accepted,
    Answer,
    Busy,
    Indexes,
    Packed,
    Part,
    PartData,
    PartKind,
    Pledge,
    Rejected,
    Round,
    Running,
    Stamp,
)
from swarmnet.stage.interfaces import Contribution, Summation
from swarmnet.telemetry.kinds import OnEvent
from swarmnet.telemetry.spans import SpanBook, SpanKind
from swarmnet.transport import LONGEST_S, Transport

Losses = dict[int, tuple[float, int]]

_AHEAD = 4
"""Chunks of one contributor that may wait here for those of the others."""


@dataclass(slots=True)
class ExchangeContext:
    """What a replica takes part with."""

    me: PeerId
    sums: Summation
    transport: Transport
    num_tokens: int
    """Of every microbatch of the run."""
    group_size: int = 16
    """Of the run, see `averaging.grid`."""
    running_s: float = 0.5
    """Between two signs of life."""
    on_event: OnEvent = lambda event, fields: None
    """Called with `clipped`: the member that the run's reducer clipped in a part; and, where reducers are checked, with
    `sum_checked`, `reducer_lied` and `pledge_lied`."""
    spans: SpanBook = field(default_factory=SpanBook)
    """Is told how long hops took."""
    signer: Signer | None = None
    """Signs the parts that are sent, where members check reducers (`averaging.round_check`); None: they do not."""
    incarnation: int | None = None
    """Of this process, which signs commitments only to what it contributed itself; None: to any contribution."""
    on_contradiction: Contradiction = lambda one, other: None
    """Called with two different commitments that one contributor signed for one aggregate."""
    meter: Meter = field(default_factory=Meter)
    watch: Watch = field(default_factory=Watch)


class Butterfly:
    """One member's part in one group's aggregate: `run` it once; `serve` others from the start, until `close`.

    given, signed: what each contributor signed of its part for this reducer, and each reducer of its result.

    losses: of the indexes in this member's accumulator, which must not change before `close`. below: in a later hop,
    this member's butterfly of the hop before; its results are the contribution here.

    Each chunk that I reduce has two values: its sum over this group (`_sums`), and its final value over the whole round
    (`_ends`). In the last hop they are the same.
    """

    def __init__(
        self, context: ExchangeContext, current: Round, group: Group, losses: Losses, below: Butterfly | None
    ) -> None:
        self._context, self.round, self.group, self._below = context, current, group, below
        self.me, self._summation = context.me, context.sums
        self._losses = losses
        self._indexes = {speaker.peer: speaker.indexes for speaker in group.speakers}
        self._chunks = dict(group.chunks)
        loop = asyncio.get_running_loop()
        mine = self._chunks.get(self.me, ())
        self._sums: dict[Range, asyncio.Future[Packed]] = {chunk: loop.create_future() for chunk in mine}
        self._summed: Losses = {}
        self._ends = self._sums if group.last else {chunk: loop.create_future() for chunk in mine}
        self._told: Losses = self._summed  # of the whole round, once an end is there
        # Where parts are signed: digests of the chunks that I contributed or reduced, and what was signed of parts.
        self._digests: dict[tuple[PartKind, Range], bytes] = {}
        self.given: dict[PeerId, Pledge] = {}
        self.signed: dict[PeerId, Pledge] = {}
        self._closed = False
        self._began_at = self._gathered_at = 0.0  # _gathered_at: the first chunk that another member reduced came

    def is_of(self, request: Part) -> bool:
        """Does this request belong to this group of this round?"""
        first, last = self.group.span
        inside = self.group.hop == request.hop and first <= request.start <= request.stop <= last
        return inside and self.is_in(request.stamp, request.id)

    def is_in(self, stamp: Stamp, round_id: RoundId) -> bool:
        """Is this group of that round?"""
        return (self.round.stamp, self.round.id) == (stamp, round_id)

    def close(self) -> None:
        """The round is over or abandoned: what the engine holds is no longer of this round."""
        self._closed = True

    # ------------------------------------------------------------ taking part

    async def run(self) -> list[tuple[PeerId, Losses]]:
        """Take part until all of this group's result is in the engine. Cancel to abandon.

        Returns (reducer, the round's losses as it tells them): all must be the same, or one reducer is wrong.
        """
        self._began_at = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            arriving = {peer: asyncio.Queue[tuple[Packed, Losses]](_AHEAD) for peer in self._indexes if peer != self.me}
            if self._sums:
                for peer, queue in arriving.items():
                    group.create_task(self._contributions(peer, queue))
            if self._sums and self.group.speakers:
                group.create_task(self._reduce(arriving))
            told = {peer: group.create_task(self._reduced(peer)) for peer in self._chunks if peer != self.me}
        if self._gathered_at:
            self._span("all_gather", self._gathered_at)
        mine = [(self.me, self._summed)] if self._sums and self.group.last else []
        return [*mine, *((peer, task.result()) for peer, task in told.items())]

    async def _contributions(self, peer: PeerId, queue: asyncio.Queue[tuple[Packed, Losses]]) -> None:
        digests: list[bytes] = []
        async for chunk, data in self._stream(peer, "contribution", [*self._sums]):
            if (pledge := self._checked(peer, "contribution", self.me, chunk, data, digests)) is not None:
                self.given[peer] = pledge
            await queue.put((data.payload[0], dict(data.losses)))

    async def _reduce(self, arriving: Mapping[PeerId, asyncio.Queue[tuple[Packed, Losses]]]) -> None:
        """Sum my part, one chunk after the other, always in the order of the group.

        A member weighs what the round gives it: it speaks for these indexes and for no other.
        """
        for number, (chunk, reduced) in enumerate(self._sums.items()):
            contributions: list[Contribution] = []
            for speaker in self.group.speakers:
                peer = speaker.peer
                reference = self._summation.reference
                packed, losses = await (self._mine(chunk, reference) if peer == self.me else arriving[peer].get())
                # Losses come with the first chunk of a stream.
                if not number:
                    with self.noted(peer):
                        check_losses(losses, self._indexes[peer], self._context.num_tokens, peer=peer)
                    self._summed |= losses
                contributions.append(Contribution(peer, speaker.weight, packed))
            with self.noted():
                result = await self._summation.reduce(contributions, *chunk, hop=self.group.hop)
            for clipped in result.clipped:
                facts = {"peer": clipped.peer, "factor": round(clipped.factor, 4), "part": list(chunk)}
                self._context.on_event("clipped", {"step": self.round.stamp.step, **facts, "hop": self.group.hop})
            reduced.set_result(result.packed)
            if self.group.last:
                self._ended(chunk, reduced.result(), self._summed)
                await self._summation.put(chunk[0], reduced.result())
        self._span("reduce_scatter", self._began_at)

    def _span(self, kind: SpanKind, began: float) -> None:
        """It is over now."""
        stamp, now = self.round.stamp, asyncio.get_running_loop().time()
        self._context.spans.add(kind, stamp.stage, stamp.step, self.group.hop, began, now)

    async def _mine(self, chunk: Range, reference: bytes) -> tuple[Packed, Losses]:
        """What I contribute. reference: of who asks."""
        if self._below is None:
            return await self._summation.contribution(*chunk, reference), self._losses
        # Others wait for the same sum: my end must not cancel it.
        return await asyncio.shield(self._below._sums[chunk]), self._below._summed

    async def _reduced(self, peer: PeerId) -> Losses:
        """Install what that member reduces; returns the losses it tells."""
        told: Losses = {}
        digests: list[bytes] = []
        async for chunk, data in self._stream(peer, "reduced", self._chunks[peer]):
            if (pledge := self._checked(peer, "reduced", peer, chunk, data, digests)) is not None:
                self.signed[peer] = pledge
            packed = data.payload[0]
            told |= data.losses
            self._gathered_at = self._gathered_at or asyncio.get_running_loop().time()
            self._ended(chunk, packed, told)
            with self.noted(peer):
                await self._summation.put(chunk[0], packed)
        return told

    def _checked(
        self,
        peer: PeerId,
        kind: Literal["contribution", "reduced"],
        reducer: PeerId,
        chunk: Range,
        data: PartData,
        digests: list[bytes],
    ) -> Pledge | None:
        """Check a chunk that arrived from that peer; with the last one of a part, return the commitment to the part.

        digests: of the part's chunks so far. Raises BadMessage: the peer signed something else.
        """
        if (signer := self._context.signer) is None:
            return None
        digests.append(chunk_digest(data.payload[0]))
        if chunk != self._chunks[reducer][-1]:
            return None
        key = part_key(kind, self.round, self.group, reducer)
        pledge = signed_part(signer, data.pledges, self.round.stamp, peer, key)
        with self.noted(peer):
            if not says(pledge, digests):
                raise BadMessage(RejectCode.MALFORMED, "a part that its sender has not signed", peer=peer)
        return pledge

    async def contribution_of(self, peer: PeerId, cut: Sequence[Range]) -> AsyncGenerator[Packed, None]:
        """These chunks of what a contributor adds to the round, from the contributor itself, not from their reducer."""
        if peer == self.me:
            for chunk in cut:
                yield (await self._mine(chunk, b""))[0]
            return
        async with contextlib.aclosing(self._stream(peer, "contribution", cut)) as stream:
            async for _, data in stream:
                yield data.payload[0]

    @contextlib.contextmanager
    def noted(self, peer: PeerId | None = None) -> Iterator[None]:
        """A refusal inside blames that member, or the one that it names: the next report tells the leader."""
        try:
            yield
        except (BadMessage, Refused) as error:
            sender = peer or error.facts.get("peer")
            if isinstance(sender, str) and error.code is not RejectCode.OVERFLOWED:
                self._context.watch.refused(PeerId(sender))
            raise

    def _ended(self, chunk: Range, packed: Packed, told: Losses) -> None:
        """The final value of this chunk is known. Hand it to the members of my earlier hops: they wait for it."""
        hop: Butterfly | None = self
        while hop is not None:
            if chunk in hop._ends:
                hop._told = told
                if not hop._ends[chunk].done():
                    hop._ends[chunk].set_result(packed)
            hop = hop._below

    async def _stream(
        self, peer: PeerId, kind: PartKind, wanted: Sequence[Range]
    ) -> AsyncGenerator[tuple[Range, PartData], None]:
        """These chunks of that member, in order, however often it takes: only the step machine gives a member up."""
        loop, hop = asyncio.get_running_loop(), self.group.hop
        place = 0
        with self._context.watch.stream(peer, owes=kind == "contribution" and not hop, now=loop.time()) as wait:
            while place < len(wanted):
                start, stop, reference = wanted[place][0], wanted[-1][1], self._summation.reference
                request = Part(self.round.stamp, self.round.id, kind, start, stop, hop, reference)
                # Whatever went wrong, ask again from the first missing chunk.
                with contextlib.suppress(PeerGone, PeerTimeout, BadMessage, Refused):
                    async with contextlib.aclosing(self._answers(peer, request, wait)) as answers:
                        async for data in answers:
                            start, stop = wanted[place]
                            with self.noted(peer):  # nothing innocent changes a shape: it is no matter of time
                                if len(data.payload) != 1 or data.payload[0].shape != (stop - start,):
                                    raise BadMessage(RejectCode.BAD_SHAPE, "not the next chunk", peer=peer)
                            wait.came(now=loop.time())
                            yield (start, stop), data
                            wait.wanted(now=loop.time())
                            place += 1
                            if place == len(wanted):
                                return
                wait.broke(now=loop.time())
                await asyncio.sleep(PAUSE_S)

    async def _answers(self, peer: PeerId, request: Part, wait: StreamWait) -> AsyncGenerator[PartData, None]:
        loop, meter = asyncio.get_running_loop(), self._context.meter
        heard = began = loop.time()
        deadline = began + LONGEST_S  # the watch ends calls, not their length
        async with contextlib.aclosing(self._context.transport.call(peer, request, deadline=deadline)) as answers:
            async for answer in answers:
                since, heard = heard, loop.time()
                match answer:
                    case Accepted():
                        meter.ping(peer, heard - began)
                    case Running():
                        continue
                    case Busy():
                        wait.excused()
                        raise Refused(RejectCode.NOT_READY, "still at an earlier phase", peer=peer)
                    case PartData():
                        meter.received(_num_bytes(answer), since=since, now=heard)
                        yield answer
                    case Rejected():
                        raise Refused(answer.code, answer.reason, peer=peer)
                    case _:
                        raise BadMessage(RejectCode.MALFORMED, "not an answer to Part", peer=peer)

    # ------------------------------------------------------------ serving

    async def serve(self, request: Part, caller: PeerId | None = None) -> AsyncGenerator[Answer, None]:
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
                finally:  # it has been taken; after the last one no member asks for more
                    if isinstance(answer, PartData):
                        self._context.meter.sent(_num_bytes(answer), since=since, now=loop.time())

    async def _serve_contribution(self, request: Part) -> AsyncGenerator[Answer, None]:
        wanted = _within(request, (chunk for cut in self._chunks.values() for chunk in cut))
        if not wanted or self.me not in self._indexes:
            yield Rejected(RejectCode.NOT_FOUND, "I contribute nothing to that")
            return
        for chunk in wanted:
            if self._closed:  # not one chunk more: what is encoded now counts as of the next round
                yield Rejected(RejectCode.NOT_READY, "that round was abandoned")
                return
            if self._below is not None:
                async for running in self._waited(self._below._sums[chunk]):
                    yield running
            packed, losses = await self._mine(chunk, request.reference)
            signed = self._sign("contribution", chunk, packed)
            yield PartData((packed,), losses if chunk is wanted[0] else {}, pledges=signed)

    async def _serve_reduced(self, request: Part) -> AsyncGenerator[Answer, None]:
        wanted = _within(request, self._ends)
        if not wanted:
            yield Rejected(RejectCode.NOT_FOUND, "I do not reduce that piece")
            return
        for chunk in wanted:
            async for running in self._waited(self._ends[chunk]):
                yield running
            packed, losses = self._ends[chunk].result(), self._told if chunk is wanted[0] else {}
            yield PartData((packed,), losses, pledges=self._sign("reduced", chunk, packed))

    def _sign(self, kind: Literal["contribution", "reduced"], chunk: Range, packed: Packed) -> Pledges:
        """I send this chunk. With the last one of a part, if I have sent all of it: what I sign of the part."""
        if (signer := self._context.signer) is None:
            return ()
        if (kind, chunk) not in self._digests:
            self._digests[kind, chunk] = chunk_digest(packed)
        reducer, cut = next((peer, cut) for peer, cut in self._chunks.items() if chunk in cut)
        digests = [self._digests[kind, each] for each in cut if (kind, each) in self._digests]
        if chunk != cut[-1] or len(digests) < len(cut):
            return ()
        return (sign_part(signer, self.me, self.round, part_key(kind, self.round, self.group, reducer), digests),)

    async def _waited(self, future: asyncio.Future[Packed]) -> AsyncGenerator[Running, None]:
        """Wait for it, with a sign of life now and then."""
        while not future.done():
            await asyncio.wait([future], timeout=self._context.running_s)
            if not future.done():
                yield Running()


def _within(request: Part, cut: Iterable[Range]) -> list[Range]:
    """The chunks that make up what is asked for; none if it begins or ends between chunks, or beyond these."""
    wanted = [chunk for chunk in cut if request.start <= chunk[0] and chunk[1] <= request.stop]
    whole = wanted and (wanted[0][0], wanted[-1][1]) == (request.start, request.stop)
    return wanted if whole else []


def _num_bytes(data: PartData) -> int:
    return sum(packed.num_bytes for packed in data.payload)


def check_losses(losses: Losses, indexes: Indexes, num_tokens: int, **facts: object) -> None:
    """Raise Refused(MALFORMED) unless these are losses of exactly these indexes, of so many tokens each."""
    if losses.keys() != indexes:
        raise Refused(RejectCode.MALFORMED, "the round's losses are not of the round's indexes", **facts)
    if any(found != num_tokens for _, found in losses.values()):
        raise Refused(RejectCode.MALFORMED, "tokens that the round's indexes do not have", **facts)
    if not all(is_loss(loss, found) for loss, found in losses.values()):
        raise Refused(RejectCode.MALFORMED, "a loss that no microbatch has", **facts)


def butterflies(
    context: ExchangeContext, current: Round, span: Range, losses: Losses, *, private: bool
) -> list[Butterfly]:
    """My butterflies that sum this span, hop by hop, each on the one below. private: my partners, random ones, and I
    among ourselves.

    Raises Refused if I came after the round was opened: then I have no partners and fetch the sum once a peer has it.
    """
    me, sums, members = context.me, context.sums, current.receivers
    if private and me not in members:
        raise Refused(RejectCode.NOT_FOUND, "no partner in a round that was opened before I came")
    if private:
        size, turn = sums.draw
        members = partners(me, members, size, current.stamp.stage, turn)
    cutting = cutting_of(current, members, span, context.group_size, sums.block, sums.element_bytes)
    planned = [lone_group(members, span, cutting)] if private else groups(me, current, span, cutting)
    made: list[Butterfly] = []
    for group in planned:
        below = next((hop for hop in reversed(made) if hop.group.hop == group.hop - 1), None)
        made.append(Butterfly(context, current, group, losses, below))
    return made
