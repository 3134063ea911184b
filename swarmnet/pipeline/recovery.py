"""Where a replica gets what it lacks for a microbatch (rule 6 of docs/protocol.md), and what it remembers for others.

It asks everybody for a memoised copy first; if nobody has one, it has it recomputed (inputs, from the stage before) or
executed (gradients, by the stage after). Nothing here is counted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.fetch.driver import first_answers
from swarmnet.ids import PeerId
from swarmnet.messages import Fetch, Fetched, Gradient, Packed, Rejected, Running, Sent
from swarmnet.pipeline.inputs import InputCheck, OnBadInput
from swarmnet.quorum import blocks
from swarmnet.transport import Transport, ask

ASK_S = 10.0
"""Silence after which a replica that has begun to answer is given up."""

SILENT_S = 1.0
"""A replica that shows no sign of life for so long is passed over; twice as long in the next attempt, up to `ASK_S`."""

LIMIT_S = 60.0
"""The longest that one peer is asked, whatever it says meanwhile: another may have the copy."""

_PAUSE_S = 0.2


class Recovery:
    """Fetches inputs for and gradients of microbatches of one stage.

    before() and after() list live replicas of the neighbour stages; holders() lists peers that may have tokens (stage 0
    only); tokens(step, index) gives this peer's own data, None without data. check and check_answer raise BadMessage
    for an invalid input or answer, and signed(peer, request, answer) for one that its peer has not signed (None: nobody
    signs): then the next peer is asked, and on_bad_input hears whose input it was.
    """

    def __init__(
        self,
        transport: Transport,
        stage: int,
        *,
        before: Callable[[], Sequence[PeerId]],
        after: Callable[[], Sequence[PeerId]],
        holders: Callable[[], Sequence[PeerId]],
        tokens: Callable[[int, int], tuple[Packed, ...] | None],
        check: InputCheck,
        check_answer: Callable[[Fetched], None],
        on_bad_input: OnBadInput,
        signed: Callable[[PeerId, Fetch, Fetched], Awaitable[None]] | None = None,
    ) -> None:
        self._transport, self._stage = transport, stage
        self._before, self._after, self._holders = before, after, holders
        self._tokens, self._check, self._check_answer = tokens, check, check_answer
        self._on_bad_input, self._signed = on_bad_input, signed

    def own_tokens(self, step: int, index: int) -> tuple[Packed, ...] | None:
        """Tokens of a microbatch from this peer's own data."""
        return self._tokens(step, index)

    async def input(self, step: int, index: int) -> Fetched:
        """What stage `stage` needs to run the microbatch. Tries for ever; cancel to give up.

        Raises Refused(VOID) if half of the stage before computed it, and it is not finite.
        """
        void: set[PeerId] = set()
        silent_s = SILENT_S
        while True:
            if self._stage == 0:
                own = self._tokens(step, index)
                if own is not None:
                    return Fetched(own)
                peers = self._holders()
            else:
                peers = self._before()
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
                        # One alone may lie, and all mates would believe it.
                        void.add(peer)
                        if blocks(void, frozenset(peers)):
                            raise refused
                    if found is not None:
                        break
            if found is not None:
                return found
            silent_s = min(2 * silent_s, ASK_S)
            await asyncio.sleep(_PAUSE_S)

    async def gradient(self, step: int, index: int) -> Fetched | None:
        """The answer stage `stage + 1` has memoised, if anybody there has."""
        found, _ = await self._first(
            self._after(), Fetch(step, self._stage + 1, index, "gradient", cached=True), SILENT_S
        )
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
        Refused(VOID) where it was to recompute."""
        try:
            answer = await ask(
                self._transport, peer, request, first_s=silent_s, patience=lambda: ASK_S, limit_s=LIMIT_S
            )
            match answer:
                case Fetched():
                    if request.kind == "input":
                        self._check(request, answer.payload)
                    else:
                        self._check_answer(answer)
                    if self._signed is not None:
                        await self._signed(peer, request, answer)
                    return answer
                case Rejected(RejectCode.VOID) if not request.cached:
                    raise Refused(answer.code, answer.reason, peer=peer)
                case _:  # it has none, or what it says is no answer to Fetch
                    return None
        except BadMessage as error:
            if request.kind == "input":
                self._on_bad_input(peer, request.step, request.index, error)
            return None


# ---------------------------------------------------------------- what is remembered
#
# A cache: losing an entry costs recomputation, never correctness (docs/protocol.md, I1), so it is bounded in bytes and
# drops the oldest first. Entries are the bytes as they go over the wire.


class Memo:
    """index -> what went down (input of the next stage) and what went up (the answer), within `cap_bytes`."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[tuple[str, int], tuple[Packed, ...] | Gradient] = OrderedDict()
        self._sents: dict[int, tuple[Sent, ...]] = {}

    def keep_output(self, index: int, output: tuple[Packed, ...], sents: tuple[Sent, ...] = ()) -> None:
        """Remember what stage k sent to stage k + 1, and what was signed of that."""
        self._keep(("down", index), output)
        self._sents[index] = sents

    def keep_answer(self, index: int, answer: Gradient) -> None:
        """Remember the answer to `Process`."""
        self._keep(("up", index), answer)

    def output(self, index: int) -> tuple[Packed, ...] | None:
        """What was sent to the next stage, if still known."""
        entry = self._entries.get(("down", index))
        return entry if isinstance(entry, tuple) else None

    def sents(self, index: int) -> tuple[Sent, ...]:
        """What was signed of the output."""
        return self._sents.get(index, ())

    def answer(self, index: int) -> Gradient | None:
        """The answer, if still known."""
        entry = self._entries.get(("up", index))
        return entry if isinstance(entry, Gradient) else None

    def clear(self) -> None:
        """The step is applied."""
        self._entries.clear()
        self._sents.clear()
        self.num_bytes = 0

    def _keep(self, key: tuple[str, int], entry: tuple[Packed, ...] | Gradient) -> None:
        size = _size(entry)
        before = self._entries.pop(key, None)
        if before is not None:
            self.num_bytes -= _size(before)
        if size > self.cap_bytes:
            return
        self._entries[key] = entry
        self.num_bytes += size
        while self.num_bytes > self.cap_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= _size(dropped)


def _size(entry: tuple[Packed, ...] | Gradient) -> int:
    payload = entry.payload if isinstance(entry, Gradient) else entry
    return sum(packed.num_bytes for packed in payload) + 64


# ---------------------------------------------------------------- signs of life

T = TypeVar("T")

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task that somebody owns."""


class Keepalive(Generic[T]):
    """A coroutine in a task of its own; iterate `signs`, then take the `result`."""

    def __init__(self, spawn: Spawn, work: Coroutine[Any, Any, T]) -> None:
        self._outcome: asyncio.Future[tuple[T | None, SwarmError | None]] = asyncio.get_running_loop().create_future()
        self._task = spawn(self._run(work))

    async def signs(self, every_s: float) -> AsyncGenerator[Running, None]:
        """`Running` every `every_s` seconds until the work is done."""
        try:
            while not self._outcome.done():
                await asyncio.wait([self._outcome], timeout=every_s)
                if not self._outcome.done():
                    yield Running()
        finally:
            self._task.cancel()

    def result(self) -> T:
        """What the work returned. Raises the SwarmError it raised."""
        value, error = self._outcome.result()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # None only where T is None

    async def _run(self, work: Coroutine[Any, Any, T]) -> None:
        try:
            outcome: tuple[T | None, SwarmError | None] = (await work, None)
        except SwarmError as error:
            outcome = (None, error)
        except asyncio.CancelledError:
            self._outcome.cancel()
            raise
        if not self._outcome.done():
            self._outcome.set_result(outcome)
