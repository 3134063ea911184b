"""One microbatch's call to the next stage, retried until it is answered. Trainers and replicas use the same one.

It chooses by the router, follows `MovedTo`, waits out `Busy`, and goes elsewhere when a callee dies, falls silent, or
says that it is at work for longer than any call has taken.
It does not know what the answer is for. A retry needs no permission: `Process` is idempotent (docs/protocol.md, I1).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Protocol

from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, NoReplica, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Busy, Gradient, MovedTo, Packed, Process, Rejected
from swarmnet.pipeline.inputs import AnswerCheck
from swarmnet.pipeline.router import Pick, Router
from swarmnet.pipeline.transfers import Transfers
from swarmnet.quorum import blocks
from swarmnet.transport import Transport, ask

_FINAL = frozenset({RejectCode.STALE, RejectCode.OVERFLOWED, RejectCode.FINISHED})
"""Refusals that no other replica would answer differently: believed when half of them agree."""

OF_PAYLOAD = frozenset({RejectCode.BAD_SHAPE, RejectCode.NON_FINITE, RejectCode.TOO_LARGE, RejectCode.MALFORMED})
"""Refusals of what was sent. Believed when all replicas agree: one alone may be the one that is wrong."""

_SHARES = 32
"""A replica is reported when the others have given so many results per candidate, and it none."""


class CalledStage(Protocol):
    """The stage that a caller calls, as its peer knows it."""

    def candidates(self) -> Mapping[PeerId, int]:
        """Live replicas, and the queues that they announced."""
        ...

    def leaving(self) -> Set[PeerId]:
        """Candidates about to leave: they answer for what they own, and get nothing new while others can."""
        ...

    def contributors(self) -> Set[PeerId]:
        """Peers that contribute to the commits of that stage, as far as that is known."""
        ...

    def left(self, step: int) -> int | None:
        """Microbatches of the step that this peer has yet to bring there; None: it cannot tell."""

    def rerouted(self, request: Process, peer: PeerId, reason: str) -> None:
        """A microbatch has left that replica, or it never does work itself."""


Outcome = Gradient | MovedTo | Busy | Rejected | PeerGone | PeerTimeout | BadMessage
"""Of one call to one replica."""


class _Attempt:
    """silence_s: the longest wait for a sign of life."""

    def __init__(self, now: float, limit_s: float) -> None:
        self.began_at = self.heard_at = now
        self.limit_s, self.silence_s = limit_s, 0.0

    def sign_of_life(self) -> None:
        now = loop_time()
        self.silence_s, self.heard_at = max(self.silence_s, now - self.heard_at), now


class Caller:
    """Calls `Process` on replicas of one stage.

    check: raises BadMessage if an answer is not valid. transfers: checks its signer; None: answers are unsigned.
    """

    def __init__(
        self,
        transport: Transport,
        router: Router,
        stage: CalledStage,
        check: AnswerCheck,
        transfers: Transfers | None = None,
    ) -> None:
        self._transport, self._router, self._stage = transport, router, stage
        self._check, self._transfers = check, transfers
        self._probe: asyncio.Task[None] | None = None
        self._unplaced = 0  # microbatches that no replica has
        self._open: dict[PeerId, set[asyncio.Timeout]] = {}  # calls
        self._idle: dict[PeerId, int] = {}  # who has given no result since it answered so -> those of others

    def gone(self, peer: PeerId) -> None:
        """The peer is definitely dead."""
        self._router.gone(peer)

    def leave(self, peer: PeerId) -> None:
        """No message of the peer arrives any more: calls to it end now, and go to others. It might work on them for
        ever."""
        self._router.gone(peer)
        for call in self._open.get(peer, ()):
            with contextlib.suppress(RuntimeError):  # it is ending by itself
                call.reschedule(loop_time())

    async def process(self, request: Process, payload: tuple[Packed, ...]) -> Gradient:
        """Return the answer of whichever replica gives it. Cancel to give up.

        Raises Refused with a code that is final everywhere, which half of the proven replicas gave: STALE, OVERFLOWED,
        FINISHED; or one that all of them gave for the payload.
        request.avoid: replicas that it asks only if there are no others. An evaluation's route begins with who
        answered.
        """
        began = loop_time()
        num_bytes = max(sum(packed.num_bytes for packed in payload), 1)
        owner: PeerId | None = None  # a replica that counts it, as another has said
        avoid: set[PeerId] = set()
        refused_by: set[PeerId] = set()
        ended_by: dict[RejectCode, set[PeerId]] = {code: set() for code in _FINAL}
        while True:
            self._router.update(self._stage.candidates(), self._stage.contributors())
            peer, pick, owner = owner, None, None
            # No replica is known to count it yet: the router chooses.
            if peer is None:
                try:
                    pick = self._pick(request, num_bytes, loop_time(), avoid)
                except NoReplica as none:
                    avoid.clear()
                    # Replicas that are banned, or busy for as long as a silent one is waited for, are no choice.
                    if not none.facts["busy"] or loop_time() - began >= self._router.patience_s():
                        request = replace(request, avoid=())
                    self._unplaced += 1
                    try:
                        await asyncio.sleep(max(self._router.next_chance(loop_time()) - loop_time(), 0.01))
                    finally:
                        self._unplaced -= 1
                    continue
                if request.purpose == "train":
                    self._start_probe(request, payload, num_bytes, avoid)
                peer = pick.peer
            answer = await self._call(peer, pick, request, payload)
            match answer:
                case Gradient():
                    self._note_result(request, peer)
                    # The caller names the replica that computed it: a replica cannot name another for itself.
                    evaluates = request.purpose == "eval"
                    return replace(answer, route=(peer, *answer.route)) if evaluates else answer
                case MovedTo():
                    self._idle.setdefault(peer, 0)
                    # To follow would lead back to a replica that gave nothing, or to a stranger.
                    if answer.owner in avoid or answer.owner not in self._stage.candidates():
                        # So another replica computes it, uncounted.
                        request = replace(request, hedge=True)
                        avoid.discard(peer)
                    else:
                        owner = answer.owner
                case Busy():
                    self._idle.setdefault(peer, 0)
                    # The router knows when to call one that it chose again.
                    if not pick:
                        await asyncio.sleep(self._router.pause_s(answer.retry_after_s))
                case Rejected(RejectCode.NOT_A_FEEDER):
                    # It does not know us yet, or not any more: our next heartbeat may tell it. Nothing is lost.
                    self._stage.rerouted(request, peer, answer.code.value)
                    if not pick:
                        await asyncio.sleep(self._router.timers.beat_s)
                case Rejected():
                    if answer.code in OF_PAYLOAD:
                        refused_by.add(peer)
                    agreeing = ended_by.get(answer.code, set())
                    agreeing.add(peer)
                    # Free identities must not outvote the replicas that answer.
                    live = self._stage.candidates().keys()
                    replicas = self._router.proven() & live or live
                    ended = answer.code in _FINAL and blocks(agreeing, replicas | agreeing)
                    # Where no replica is left, one refusal is no agreement of all.
                    if ended or (replicas and refused_by >= replicas):
                        raise Refused(answer.code, answer.reason, peer=peer, version=answer.version)
                    avoid.add(peer)
                    self._stage.rerouted(request, peer, answer.code.value)
                case _:
                    avoid.add(peer)
                    # The microbatch may have got far there, so the next replica asks who owns it before it computes.
                    request = replace(request, repair=True, hedge=request.hedge or isinstance(answer, PeerTimeout))
                    self._stage.rerouted(request, peer, type(answer).__name__)

    def _start_probe(self, request: Process, payload: tuple[Packed, ...], num_bytes: int, avoid: Set[PeerId]) -> None:
        """Give a copy of a microbatch to a replica that is not proven. Nothing waits for its answer."""
        exclude = avoid | self._stage.leaving() | frozenset(request.avoid)
        pick = self._router.probe(num_bytes=num_bytes, now=loop_time(), exclude=exclude)
        if pick is not None:
            self._probe = asyncio.create_task(self._try(pick, replace(request, hedge=True), payload))

    async def _try(self, pick: Pick, request: Process, payload: tuple[Packed, ...]) -> None:
        answer = await self._call(pick.peer, pick, request, payload)
        if isinstance(answer, SwarmError):
            self._stage.rerouted(request, pick.peer, type(answer).__name__)

    def _note_result(self, request: Process, peer: PeerId) -> None:
        candidates = self._stage.candidates()
        self._idle = {other: count + 1 for other, count in self._idle.items() if other in candidates and other != peer}
        for other, count in self._idle.items():
            if count == _SHARES * len(candidates):
                self._stage.rerouted(request, other, "always busy, or others have it: it gives no result")

    def _pick(self, request: Process, num_bytes: int, now: float, avoid: Set[PeerId]) -> Pick:
        leaving = self._stage.leaving()
        if leaving and not leaving >= self._stage.candidates().keys():
            avoid = avoid | leaving
        unwanted = avoid | frozenset(request.avoid)
        if not unwanted >= self._stage.candidates().keys():
            avoid = unwanted
        left = self._stage.left(request.step) if request.purpose == "train" else None
        if left is not None:
            left += self._unplaced
        return self._router.pick(
            num_bytes=num_bytes, now=now, exclude=frozenset(avoid), left=left, opens=not request.index
        )

    async def _call(self, peer: PeerId, pick: Pick | None, request: Process, payload: tuple[Packed, ...]) -> Outcome:
        """One call to one replica, and the router told of its outcome. pick: None when an owner was followed."""
        call = _Attempt(loop_time(), self._router.call_s())
        outcome: Outcome | None = None
        try:
            outcome = await self._answer(call, peer, request, payload)
            return outcome
        finally:
            if pick is not None:
                self._report(call, pick, outcome)

    def _report(self, call: _Attempt, pick: Pick, outcome: Outcome | None) -> None:
        """outcome: None: the caller lost interest."""
        now, beat_s = loop_time(), self._router.timers.beat_s
        match outcome:
            case Gradient(compute_s=compute_s):
                seconds = now - call.began_at
                self._router.done(pick, seconds=seconds, compute_s=compute_s, silence_s=call.silence_s, now=now)
            case Busy():
                self._router.busy(pick, retry_after_s=outcome.retry_after_s, now=now)
            case Rejected(RejectCode.NOT_A_FEEDER):
                self._router.busy(pick, retry_after_s=beat_s, now=now)
            case MovedTo() | Rejected() if pick.probe:
                self._router.busy(pick, retry_after_s=beat_s, now=now)
            case SwarmError():
                hung = isinstance(outcome, PeerTimeout)
                self._router.failed(pick, now=now, hung=hung, over=hung and now >= call.began_at + call.limit_s)
            case _:
                self._router.cancelled(pick)

    async def _answer(self, call: _Attempt, peer: PeerId, request: Process, payload: tuple[Packed, ...]) -> Outcome:
        calls = self._open.setdefault(peer, set())
        calls.add(shut_out := asyncio.timeout(None))
        try:
            async with shut_out:
                answer = await ask(
                    self._transport,
                    peer,
                    request,
                    payload,
                    patience=self._router.patience_s,
                    heard=call.sign_of_life,
                    limit_s=call.limit_s,
                )
            if isinstance(answer, Gradient):
                self._check(request, answer)
                if self._transfers is not None:
                    await self._transfers.answered(peer, request, answer)
        except TimeoutError:
            return PeerGone("it is shut out", peer=peer)
        except (PeerGone, PeerTimeout, BadMessage) as error:
            return error
        finally:
            calls.remove(shut_out)
            if not calls:
                self._open.pop(peer, None)
        if isinstance(answer, Gradient | MovedTo | Busy | Rejected):
            return answer
        return BadMessage(RejectCode.MALFORMED, "not an answer to Process", peer=peer)
