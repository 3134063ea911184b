"""Where a replica gets what it lacks for a microbatch (rule 6 of docs/protocol.md), and what it remembers for others.

It asks all replicas for a cached copy first; if none has one, it has it recomputed (inputs, from the stage before) or
executed (gradients, by the stage after). Nothing here is counted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.fetch.driver import first_answers
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Fetch, Fetched, Gradient, Rejected, Running
from swarmnet.pacing import doubled_s
from swarmnet.pipeline.host import PipelineHost
from swarmnet.pipeline.inputs import AnswerCheck, InputCheck
from swarmnet.pipeline.transfers import Transfers
from swarmnet.quorum import blocks
from swarmnet.transport import Transport, ask

Message = TypeVar("Message", bound=Answer)


class Recovery:
    """Fetches inputs for and gradients of microbatches of one stage.

    check, answers: raise BadMessage for an invalid input or answer. transfers: for one that its peer has not signed;
    None: payloads are unsigned. Then the next peer is asked, and the host is told the sender of the input.
    """

    def __init__(
        self,
        transport: Transport,
        stage: int,
        host: PipelineHost,
        *,
        check: InputCheck,
        answers: AnswerCheck,
        transfers: Transfers | None = None,
    ) -> None:
        self._transport, self._stage, self._host = transport, stage, host
        self._check, self._answers, self._transfers = check, answers, transfers

    async def input(self, step: int, index: int) -> Fetched:
        """What stage `stage` needs to run the microbatch. Tries for ever; cancel to give up.

        Raises Refused(OVERFLOWED) if half of the stage before computed it, and it is not finite.
        """
        discarded: set[PeerId] = set()
        # A replica that shows no sign of life for so long is passed over; twice as long in the next attempt.
        silent_s = self._host.timers.settle_s
        while True:
            if self._stage == 0:
                own = self._host.tokens(step, index)
                if own is not None:
                    return Fetched(own)
            peers = self._host.live(self._stage - 1)
            request = Fetch(step, self._stage - 1, index, "input", cached=True)
            found, answered = await self._first(peers, request, silent_s)
            # Forward is a pure function: any replica of the stage before can do it again (I1).
            if found is None and self._stage > 0:
                # One after the other is asked to recompute it. A hung replica comes last, because it only costs time.
                for peer in sorted(peers, key=lambda peer: peer not in answered):
                    request = Fetch(step, self._stage - 1, index, "input", cached=False)
                    try:
                        found = await self._ask(peer, request, silent_s)
                    except (PeerGone, PeerTimeout):
                        continue
                    except Refused as refused:
                        # A single answer may be false, and all replicas would accept it.
                        discarded.add(peer)
                        if blocks(discarded, frozenset(peers)):
                            raise refused
                    if found is not None:
                        break
            if found is not None:
                return found
            silent_s = doubled_s(silent_s, 1, self._host.timers.long_silence_s)
            await asyncio.sleep(self._host.timers.ask_s)

    async def gradient(self, step: int, index: int) -> Fetched | None:
        """The cached answer of stage `stage + 1`, if a replica there has it."""
        request = Fetch(step, self._stage + 1, index, "gradient", cached=True)
        found, _ = await self._first(self._host.live(self._stage + 1), request, self._host.timers.settle_s)
        return found

    async def _first(
        self, peers: Sequence[PeerId], request: Fetch, silent_s: float
    ) -> tuple[Fetched | None, frozenset[PeerId]]:
        """Ask all at once; the first copy wins. Returns it, and the replicas that have answered anything."""
        answered: set[PeerId] = set()

        async def ask_one(peer: PeerId) -> Fetched | None:
            try:
                found = await self._ask(peer, request, silent_s)
            except (PeerGone, PeerTimeout):
                return None
            answered.add(peer)
            return found

        asked = {peer: ask_one(peer) for peer in dict.fromkeys(peers)}
        answers, _ = await first_answers(asked, counts=lambda found: found is not None, grace_s=0.0)
        return next((found for found in answers.values() if found is not None), None), frozenset(answered)

    async def _ask(self, peer: PeerId, request: Fetch, silent_s: float) -> Fetched | None:
        """What this replica answers; None if it has none, or sent what is none. Raises PeerGone, PeerTimeout, and
        Refused(OVERFLOWED) where it was to recompute."""
        try:
            # Another peer may have a copy, whatever this one says meanwhile.
            answer = await ask(
                self._transport,
                peer,
                request,
                first_s=silent_s,
                patience=lambda: self._host.timers.long_silence_s,
                limit_s=self._host.timers.serve_s,
            )
            match answer:
                case Fetched():
                    if request.kind == "input":
                        self._check(request, answer.payload)
                    else:
                        self._answers.remembered(answer)
                    if self._transfers is not None:
                        await self._transfers.answered(peer, request, answer)
                    return answer
                case Rejected(RejectCode.OVERFLOWED) if not request.cached:
                    raise Refused(answer.code, answer.reason, peer=peer)
                case _:  # it has none, or what it says is no answer to Fetch
                    return None
        except BadMessage as error:
            if request.kind == "input":
                self._host.bad_input(peer, request.step, request.index, error)
            return None


# ---------------------------------------------------------------- what is remembered
#
# A cache: losing an entry costs recomputation, never correctness (docs/protocol.md, I1), so it is bounded in bytes and
# drops the oldest first. Entries are the bytes as they go over the wire.


class OutputCache:
    """For each index the output (input of the next stage) and the answer, within `cap_bytes`."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes, self.num_bytes = cap_bytes, 0
        self._kept: OrderedDict[tuple[type, int], Fetched | Gradient] = OrderedDict()

    def keep(self, index: int, message: Fetched | Gradient) -> None:
        """Remember what stage k sent to stage k + 1, as a `Fetched`; or the answer to `Process`, a `Gradient`."""
        key = type(message), index
        if (before := self._kept.pop(key, None)) is not None:
            self.num_bytes -= _size(before)
        if _size(message) > self.cap_bytes:
            return
        self._kept[key] = message
        self.num_bytes += _size(message)
        while self.num_bytes > self.cap_bytes:
            self.num_bytes -= _size(self._kept.popitem(last=False)[1])

    def output(self, index: int) -> Fetched | None:
        """What was sent to the next stage, if still known."""
        kept = self._kept.get((Fetched, index))
        return kept if isinstance(kept, Fetched) else None

    def answer(self, index: int) -> Gradient | None:
        """The answer, if still known."""
        kept = self._kept.get((Gradient, index))
        return kept if isinstance(kept, Gradient) else None

    def clear(self) -> None:
        """The step is applied."""
        self._kept.clear()
        self.num_bytes = 0


def _size(message: Fetched | Gradient) -> int:
    return sum(packed.num_bytes for packed in message.payload) + 64


# ---------------------------------------------------------------- signs of life


async def signs_until(outcome: asyncio.Future[Any], every_s: float) -> AsyncGenerator[Running, None]:
    """`Running` every `every_s` seconds until that is done."""
    while not outcome.done():
        await asyncio.wait([outcome], timeout=every_s)
        if not outcome.done():
            yield Running()


async def kept_alive(work: Coroutine[Any, Any, Message], every_s: float) -> AsyncGenerator[Running | Message, None]:
    """Do the work: `Running` every `every_s` seconds, then what it returns. Raises what it raises."""
    task = asyncio.ensure_future(work)
    # It may fail in the moment in which the caller leaves: then nothing reads its error.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        async for sign in signs_until(task, every_s):
            yield sign
        yield task.result()
    finally:
        task.cancel()
