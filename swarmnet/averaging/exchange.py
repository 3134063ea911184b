"""Takes part in rounds, collects sums that others have finished, and serves both.

A member makes an aggregate by a butterfly all-reduce (`butterfly`), or fetches the complete aggregate from a peer that
holds it and checks it against its digest. Fetches are idempotent: a lost or repeated one changes nothing, and a member
that gives up leaves its accumulators untouched.

Knows no assignments: the step machine decides which contributions belong to a round and whether it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarmnet.averaging.butterfly import Butterfly, ExchangeContext, Losses, butterflies, check_losses
from swarmnet.averaging.grid import circles, grid_of
from swarmnet.averaging.parts import chunk_elements, shares
from swarmnet.averaging.replay_log import ReplayLog
from swarmnet.averaging.round_check import NOTHING, PAUSE_S, RoundCheck, Said
from swarmnet.averaging.watch import allowance_s, needs_s, odd_ones
from swarmnet.bounds import Recent
from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode, leaves
from swarmnet.fetch.driver import PieceFetch, expect
from swarmnet.fetch.plan import WINDOW, Holders
from swarmnet.ids import PeerId, RoundId
from swarmnet.messages import (
    NONE,
    Accepted,
    Answer,
    Busy,
    Commit,
    Finished,
    Packed,
    Part,
    PartData,
    PartKind,
    Pledge,
    Rejected,
    Round,
    Stamp,
    TrailRequest,
    TrailStep,
    Trouble,
)
from swarmnet.pacing import Backoff
from swarmnet.stage.interfaces import Summation
from swarmnet.transport import LONGEST_S, ask

PIECE_ELEMENTS = 1 << 22
"""A finished sum travels in pieces of this many elements, so that no message grows with the model."""

_MOST_ELEMENT_BYTES = 8
"""Bytes of the largest element that travels: int64 sums."""

_CHECKED_STEPS = 4
"""The number of past steps whose commitments are remembered."""

SILENT_S, _MOST_SILENT_S = 1.0, 16.0
"""A holder of a finished sum that shows no sign of life for so long is passed over; twice as long in the next turn."""


def pieces(start: int, stop: int, size: int = PIECE_ELEMENTS) -> list[tuple[int, int]]:
    """Cut [start, stop) into pieces of `size` elements; an empty range is one empty piece."""
    edges = [*range(start, stop, size), stop] if start < stop else [start, stop]
    return list(itertools.pairwise(edges))


class Meeting(Protocol):
    """Where members of simulated rounds meet, instead of streams between them."""

    async def sum(self, me: PeerId, sums: Summation, current: Round, losses: Mapping[int, tuple[float, int]]) -> Losses:
        """Bring my contribution, and return once the whole sum is in my sum buffer: the losses of the round."""
        ...


@dataclass(slots=True)
class CheckedStep:
    """The checks of reducers in one step. said: what I have pledged in it."""

    said: Said = field(default_factory=dict)
    checks: dict[RoundId, RoundCheck] = field(default_factory=dict)
    """Of the open round, and those that have passed: they are served."""
    ended: dict[RoundId, Finished] = field(default_factory=dict)
    """What came of rounds: I have signed it, and a peer that signs two of one round has lied."""
    refuted: set[RoundId] = field(default_factory=set)
    """Rounds that failed the check here."""


class Exchange:
    """Takes part in rounds of one (peer, stage) and serves its parts to the others.

    A round is named by stamp and id. A correct leader uses no id twice (`step.ledger`), but an id is only the leader's
    claim. piece_elements: of a complete aggregate's pieces. meeting: of a simulation of many peers, which makes the
    aggregate without streams and checks no reducers.
    """

    def __init__(
        self, context: ExchangeContext, *, piece_elements: int = PIECE_ELEMENTS, meeting: Meeting | None = None
    ) -> None:
        self._context, self._meeting, self._piece_elements = context, meeting, piece_elements
        self.meter, self.watch = context.meter, context.watch
        self.me, self._sums = context.me, context.sums
        self._checked: Recent[Stamp, CheckedStep] = Recent(_CHECKED_STEPS)
        self._open: tuple[Butterfly, ...] = ()
        self._opened = asyncio.Event()
        self._holders = Holders()
        self._patience_s: dict[RoundId, float] = {}  # of the sum that was collected last
        self._sent_bytes = 0
        self.collected_bytes = self._last_bytes = 0  # of sums that were fetched: of all, and of the last one
        self.replay_log = ReplayLog(self._sums)

    # ------------------------------------------------------------ my part in a round

    async def sum(
        self, current: Round, losses: Mapping[int, tuple[float, int]], work_root: bytes = NOTHING
    ) -> Finished:
        """Take part until the whole sum is in the sum buffer, and checked. Cancel to abandon.

        losses: of the indexes in my accumulator, which must not change meanwhile. work_root: of my works; signed.
        """
        # Its leader knows who lied. Others look at what I contributed until it opens another round.
        checked = self._checked.get(current.stamp) or CheckedStep()
        if current.id in checked.refuted:
            raise Refused(RejectCode.MALFORMED, "the sum of this round was refuted")
        self.close()
        if self._meeting is not None:
            await self.replay_log.leave(current.stamp)
            await self._sums.open_sum()
            met = await self._meeting.sum(self.me, self._sums, current, losses)
            return self._hold(current, _describe(current, *await self._sums.seal(), met))
        self.meter.begin()
        self.watch.begin(current.id, *self._allowances(current))
        all_losses: Losses = {}
        check: RoundCheck | None = None
        spans = itertools.pairwise(itertools.accumulate(self._sums.phases, initial=0))
        for phase, span in enumerate(spans):
            private = phase < self._sums.private_phases
            mine = butterflies(self._context, current, span, {} if private else dict(losses), private=private)
            if not phase:
                await self._sums.open_round(current.id)
            self._open = (*self._open, *mine)  # others may still be at the phase before
            if (signer := self._context.signer) is not None:
                check = RoundCheck(self._context, signer, current, mine, work_root, checked.said)
                checked.checks[current.id], self._checked[current.stamp] = check, checked
            self._opened.set()
            self._opened = asyncio.Event()
            if not phase:
                await self.replay_log.leave(current.stamp)
                await self._sums.open_sum()
            told = await self._run(mine)
            if not private:
                check_losses(
                    told, NONE.union(*(found for _, _, found in current.contributions)), self._context.num_tokens
                )
                all_losses = told
        digest, sq_norm = await self._sums.seal()
        finished = _describe(current, digest, sq_norm, all_losses)
        if check is not None:
            await self._check_sum(check, digest, checked)
            if checked.ended.setdefault(current.id, finished) != finished:
                raise Refused(RejectCode.NOT_READY, "another sum of that round was held before")
        return self._hold(current, finished)

    async def _check_sum(self, check: RoundCheck, digest: bytes, checked: CheckedStep) -> None:
        loop, current = asyncio.get_running_loop(), check.round
        began = loop.time()
        try:
            await check.run(digest)
        except ExceptionGroup as error:
            raise ExceptionGroup(error.message, list(leaves(error))) from error
        except Refused as error:
            # A peer sent false data, and no repetition of the check will change that.
            if error.code is RejectCode.MALFORMED:
                checked.refuted.add(current.id)
            raise
        self._context.on_event("sum_checked", {"step": current.stamp.step, "seconds": loop.time() - began})

    def commitments(self, stamp: Stamp) -> tuple[Pledge, ...]:
        """Of all contributors to the aggregate of that step that was checked here last; () of a fetched one, and of
        one more than four steps ago."""
        checks = self._checked.get(stamp, CheckedStep()).checks.values()
        return next((check.commitments for check in reversed(checks) if check.passed), ())

    def pledged_root(self, stamp: Stamp, finished: Finished) -> bytes | None:
        """The root of the computation records that this process has committed to for that aggregate; None: none."""
        pledge = self._checked.get(stamp, CheckedStep()).said.get((finished.id, finished.digest))
        return None if pledge is None else pledge.work_root

    async def collect(self, current: Round, digest: bytes) -> Finished:
        """Fetch the aggregate of `current.id` with that digest from one of its holders. Cancel to abandon.

        A holder that describes other bits, or does not deliver, is skipped. A superseded aggregate that was set aside
        here comes back into the buffer if its digest is this one.

        Raises:
            Refused: it is not here, and there is no peer to ask; or all were asked, and some lack it (`lacking`).
        """
        here = self.replay_log.held(current.stamp, current.id)
        # Another round was about to take the buffer, and was called off before it did.
        if here is not None and here.digest == digest:
            return here
        mine = self.replay_log.aside(current.stamp, current.id)
        if mine is not None and mine[0].digest == digest:
            await self._install(current, mine[1])
            return self._hold(current, mine[0])
        if not current.holders:
            raise Refused(RejectCode.NOT_FOUND, "no peer has that sum")
        pause, lacking = Backoff(PAUSE_S, SILENT_S), set[PeerId]()
        while not lacking:
            patience_s = self._patience_s.get(current.id, SILENT_S)
            usual = self._holders.to_ask(current.holders, now=loop_time())
            usual.sort(key=lambda holder: holder in self.watch.overdue)
            for holder in dict.fromkeys((*usual, *current.holders)):
                try:
                    finished = await self.collect_from(current, digest, holder, patience_s=patience_s)
                # Silence costs time, a refused connection does not.
                except PeerTimeout:
                    self._holders.was_late(holder, now=loop_time())
                    self._patience_s = {current.id: min(2 * patience_s, _MOST_SILENT_S)}
                # It has another sum or none: the next holder may have this one.
                except (PeerGone, BadMessage, Refused) as error:
                    if isinstance(error, Refused) and error.code is RejectCode.NOT_FOUND:
                        lacking.add(holder)
                    elif isinstance(error, BadMessage):
                        self._holders.sent_false(holder, now=loop_time())
                else:
                    self._holders.answered(holder)
                    self._patience_s.clear()
                    return finished
            await asyncio.sleep(pause.failed(loop_time()))
        raise Refused(RejectCode.NOT_FOUND, "no holder hands over that sum", lacking=tuple(sorted(lacking)))

    async def collect_from(
        self, current: Round, digest: bytes, *holders: PeerId, patience_s: float | None = None, kind: PartKind = "sum"
    ) -> Finished:
        """Fetch the sum of `current.id` with that digest, piece by piece from all these holders at once.

        patience_s: how long a holder may show no sign of life; None: the transport's. kind: "replay" for what may wait.

        Raises:
            PeerGone, PeerTimeout, Refused, BadMessage: of the last holder that failed. Before anything is installed,
                unless a holder describes the right sum and sends other bits.
        """
        ranges, before = pieces(*self._finished_span, self._piece_elements), self.collected_bytes
        at_once = self.sum_bytes * min(WINDOW / len(ranges), 1.0)
        # A Byzantine holder may promise a piece for ever: another one is asked, with more time in the next turn.
        piece_s = allowance_s(at_once, 0, at_once) * (patience_s or SILENT_S) / SILENT_S
        limit_s = piece_s if len(current.holders) > 1 else LONGEST_S

        described: set[tuple[PeerId, Finished]] = set()
        found: dict[int, Packed] = {}

        async def get(holder: PeerId, piece: int) -> None:
            request = Part(current.stamp, current.id, kind, *ranges[piece])
            finished, packed = await self._ask(holder, request, digest, patience_s, limit_s)
            self.collected_bytes += packed.num_bytes
            found[piece] = packed
            described.add((holder, finished))

        fetch = PieceFetch(len(ranges), get, self._holders.to_ask(holders, now=loop_time()) or holders)
        if (error := await fetch.run()) is not None:
            raise error
        for holder in fetch.plan.overtaken:
            self._holders.was_late(holder, now=loop_time())
        self._last_bytes = self.collected_bytes - before
        senders = sorted({holder for holder, _ in described})
        finished, *others = {finished for _, finished in described}
        if others:
            raise BadMessage(RejectCode.MALFORMED, "two descriptions of a sum", peers=senders)
        held, sq_norm = await self._install(current, [found[piece] for piece in range(len(ranges))])
        # Only the complete aggregate shows that bits are wrong; it does not show which holder sent them.
        if held != digest or sq_norm != finished.grad_sq_norm:
            raise BadMessage(RejectCode.MALFORMED, "the sum does not have its digest", peers=senders)
        return self._hold(current, finished)

    @property
    def trouble(self) -> Trouble | None:
        """What holds me up in the round I take part in."""
        return self.watch.trouble(now=loop_time())

    def holds(self, stamp: Stamp, round_id: RoundId) -> bool:
        """Is the sum buffer's content, whole and checked, the sum of that round?"""
        return self.replay_log.held(stamp, round_id) is not None

    @property
    def sum_bytes(self) -> float:
        """In about how many bytes a finished sum travels."""
        return self._last_bytes or self._sums.travel_bytes

    def take_sent(self) -> int:
        """Bytes that I have sent in rounds since this was asked last; without the messages around them, and without
        the finished aggregates that latecomers have fetched."""
        sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    def applied(self, commits: tuple[Commit, ...]) -> None:
        """The sum in the buffer has been applied: keep it in the replay log, for joiners."""
        self.replay_log.applied(commits)
        self.watch.forget()

    def forget(self) -> None:
        """The run has gone back: drop the buffer and the replay log, which belong to the past that was given up."""
        self.close()
        self.replay_log.forget()
        self.watch.forget()
        for checked in self._checked.values():
            checked.checks = {}

    def close(self) -> None:
        """The round is over or abandoned: serve its contribution no more."""
        self.meter.end()
        self.watch.end()
        for checked in self._checked.values():
            for check in checked.checks.values():
                check.close()
            checked.checks = {number: check for number, check in checked.checks.items() if check.passed}
        for phase in self._open:
            phase.close()
        self._open = ()

    # ------------------------------------------------------------ serving

    async def serve(self, request: Part, caller: PeerId | None = None) -> AsyncGenerator[Answer, None]:
        """Answer one `Part` call: wait for the round to open here, then for the part."""
        async with contextlib.aclosing(self._serve(request, caller)) as answers:
            async for answer in answers:
                # A finished aggregate is fetched by who comes late, whenever that is: it is no part of averaging.
                if isinstance(answer, PartData) and request.kind not in ("sum", "replay"):
                    self._sent_bytes += sum(packed.num_bytes for packed in answer.payload)
                yield answer

    async def _serve(self, request: Part, caller: PeerId | None) -> AsyncGenerator[Answer, None]:
        if request.kind in ("sum", "replay"):
            self.replay_log.wanted()
            kept = self.replay_log.piece(request)
            if kept is not None:
                yield kept
                return
            finished = self.replay_log.held(request.stamp, request.id)
            if finished is None:
                yield Rejected(RejectCode.NOT_FOUND, "that sum is not here")
                return
            yield Accepted()  # the compute thread may be busy for long
            packed = await self._sums.finished_sum(request.start, request.stop)
            # Another sum may have come into the buffer while the compute thread was busy.
            if self.holds(request.stamp, request.id):
                yield PartData((packed,), finished=finished)
            else:
                yield Rejected(RejectCode.NOT_FOUND, "that sum is gone")
            return
        yield Accepted()
        server = self._server(request)
        if server is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._context.running_s):
                    await self._opened.wait()
            server = self._server(request)
        # I still wait for others in an earlier phase or hop: `Busy` tells the caller not to blame me.
        if server is None and self._waits_before(request):
            yield Busy(PAUSE_S, request.stamp.step)
        elif server is None:
            yield Rejected(RejectCode.NOT_READY, "that round is not open here")
        else:
            async with contextlib.aclosing(server.serve(request, caller)) as answers:
                async for answer in answers:
                    yield answer

    def _server(self, request: Part) -> Butterfly | RoundCheck | None:
        """What answers it; None if that round is not open here."""
        if request.kind != "pledges":
            return next((hop for hop in self._open if hop.is_of(request)), None)
        return self._checked.get(request.stamp, CheckedStep()).checks.get(request.id)

    def follow(self, request: TrailRequest, here: Stamp | None, open_step: TrailStep) -> Answer:
        """Answer one `TrailRequest`. here, open_step: where I stand and what is known of that step; None: nowhere."""
        self.replay_log.wanted()
        kept = self.replay_log.step(request.stamp)
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

    async def _run(self, hops: Sequence[Butterfly]) -> Losses:
        """Take part in all of them; the losses of the round. Raises an ExceptionGroup of whatever failed in any."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(hop.run()) for hop in hops]
        except ExceptionGroup as error:
            raise ExceptionGroup(error.message, list(leaves(error))) from error
        told = [each for task in tasks for each in task.result()]
        for peer in set(odd_ones(told)) - {self.me}:
            self.watch.refused(peer)
        if any(losses != told[0][1] for _, losses in told):
            raise Refused(RejectCode.MALFORMED, "reducers tell different losses")
        return told[0][1]

    def _allowances(self, current: Round) -> tuple[dict[PeerId, float], dict[PeerId, float]]:
        """How long members' streams may stand still, and what a chunk needs: by what each moves, in all and at once,
        and its bandwidth."""
        n = len(current.receivers)
        bandwidths = current.bandwidths or (0,) * n
        more = [1.0] * n if current.rows else [float(max(n - 2, 0) * share) for share in shares(bandwidths)]
        whole = _MOST_ELEMENT_BYTES * sum(self._sums.phases)
        chunk = _MOST_ELEMENT_BYTES * max(
            min(chunk_elements(size, n, self._sums.element_bytes, current.bandwidths), size)
            for size in self._sums.phases
        )
        streams = Counter[PeerId]()  # one contribution to each peer that it exchanges with, and one aggregate
        for circle in circles(grid_of(current), self._context.group_size):
            streams.update(dict.fromkeys(circle, 2 * (len(circle) - 1)))
        at_once = {peer: float(chunk * streams[peer]) for peer in current.receivers}
        return {
            peer: allowance_s((1.0 + extra) * whole, bandwidth, at_once[peer])
            for peer, bandwidth, extra in zip(current.receivers, bandwidths, more, strict=True)
        }, {
            peer: needs_s(bandwidth, at_once[peer])
            for peer, bandwidth in zip(current.receivers, bandwidths, strict=True)
        }

    def _hold(self, current: Round, finished: Finished) -> Finished:
        """The sum of that round is in the buffer, whole."""
        self.replay_log.hold(current.stamp, finished, pieces(*self._finished_span, self._piece_elements))
        return finished

    async def _install(self, current: Round, parts: Sequence[Packed]) -> tuple[bytes, float]:
        """Put a collected sum into the buffer. parts: in order."""
        await self.replay_log.leave(current.stamp)
        start, _ = self._finished_span
        await self._sums.open_sum()
        for packed in parts:
            await self._sums.put(start, packed)
            start += packed.shape[0]
        return await self._sums.seal()

    @property
    def _finished_span(self) -> tuple[int, int]:
        """The positions of what all members hold in the end."""
        phases = self._sums.phases
        return sum(phases[: self._sums.private_phases]), sum(phases)

    def _waits_before(self, request: Part) -> bool:
        """Am I still at an earlier phase of that round?"""
        reached = max((hop.group.span[1] for hop in self._open if hop.is_in(request.stamp, request.id)), default=None)
        return reached is not None and reached <= request.start < request.stop <= sum(self._sums.phases)

    async def _ask(
        self, peer: PeerId, request: Part, digest: bytes, patience_s: float | None, limit_s: float
    ) -> tuple[Finished, Packed]:
        answer = await ask(self._context.transport, peer, request, first_s=patience_s, limit_s=limit_s)
        data = expect(answer, PartData, peer)
        shapes = [packed.shape for packed in data.payload]
        if shapes != [(request.stop - request.start,)]:
            raise BadMessage(RejectCode.BAD_SHAPE, f"parts of shapes {shapes}", peer=peer)
        finished = data.finished
        if finished is None or (finished.id, finished.digest) != (request.id, digest):
            raise BadMessage(RejectCode.MALFORMED, "another sum than the one asked for", peer=peer)
        return finished, data.payload[0]


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
        discarded=current.discarded,
        notice=current.notice,
        late=current.late,
        bans=current.bans,
    )
