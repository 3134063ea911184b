"""Where a replica gets what it lacks for a microbatch: inputs from the stage before, gradients from the one after.

Rule 6 of docs/protocol.md: ask everybody for a memoised copy first; if nobody has one, have it recomputed (inputs) or
executed (gradients). Nothing here is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Fetch, Fetched, Packed, Rejected
from swarmnet.pipeline.payload import InputCheck, OnBadInput
from swarmnet.transport import Transport, ask

ASK_S = 10.0
"""Silence after which somebody asked for a memoised copy is given up."""

LIMIT_S = 60.0
"""The same, whatever it says meanwhile: another one may have it."""

_PAUSE_S = 0.2


class Sources:
    """Fetches inputs for and gradients of microbatches of one stage.

    before() and after() list live replicas of the neighbour stages; holders() whoever may have tokens (stage 0 only);
    tokens(step, index) is this peer's own data, or None without data. check and check_answer raise BadMessage for an
    input or an answer that is none: then the next one is asked, and on_bad_input hears whose input it was.
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
    ) -> None:
        self._transport, self._stage = transport, stage
        self._before, self._after, self._holders = before, after, holders
        self._tokens, self._check, self._check_answer = tokens, check, check_answer
        self._on_bad_input = on_bad_input

    def own_tokens(self, step: int, index: int) -> tuple[Packed, ...] | None:
        """Tokens of a microbatch from this peer's own data."""
        return self._tokens(step, index)

    async def input(self, step: int, index: int) -> tuple[Packed, ...]:
        """What stage `stage` needs to run the microbatch. Tries for ever; cancel to give up.

        Raises Refused(VOID) if the stage before computed it and it is not finite.
        """
        while True:
            if self._stage == 0:
                own = self._tokens(step, index)
                if own is not None:
                    return own
                peers = self._holders()
            else:
                peers = self._before()
            request = Fetch(step, self._stage - 1, index, "input", cached=True)
            found = await self._first(peers, request)
            if found is None and self._stage > 0:
                # Nobody remembers: one after the other is asked to recompute it.
                for peer in peers:
                    found = await self._ask(peer, Fetch(step, self._stage - 1, index, "input", cached=False))
                    if found is not None:
                        break
            if found is not None:
                return found.payload
            await asyncio.sleep(_PAUSE_S)

    async def gradient(self, step: int, index: int) -> Fetched | None:
        """The answer stage `stage + 1` has memoised, if anybody there has."""
        return await self._first(self._after(), Fetch(step, self._stage + 1, index, "gradient", cached=True))

    async def _first(self, peers: Sequence[PeerId], request: Fetch) -> Fetched | None:
        """Ask all at once; the first copy wins."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(peer, request)) for peer in peers]
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task in done]:
                    found = task.result()
                    if found is not None:
                        for other in tasks:
                            other.cancel()
                        return found
        return None

    async def _ask(self, peer: PeerId, request: Fetch) -> Fetched | None:
        try:
            answer = await ask(self._transport, peer, request, patience=lambda: ASK_S, limit_s=LIMIT_S)
            match answer:
                case Fetched():
                    if request.kind == "input":
                        self._check(request, answer.payload)
                    else:
                        self._check_answer(answer)
                    return answer
                case Rejected(RejectCode.VOID) if not request.cached:
                    raise Refused(answer.code, answer.reason, peer=peer)
                case _:  # it has none, or what it says is no answer to Fetch
                    return None
        except (PeerGone, PeerTimeout):
            return None
        except BadMessage as error:
            if request.kind == "input":
                self._on_bad_input(peer, request.step, request.index, error)
            return None
