"""Performs what `fetch.plan` decides: calls to holders, checks of pieces, and the names of those that failed."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from swarmnet.bounds import LARGE_BYTES
from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.fetch.plan import FetchPlan, Holders, digest_of, num_pieces, span
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Content, Rejected, Request
from swarmnet.transport import Transport, ask

T = TypeVar("T")

GRACE_S = 1.0
"""How long after the first answer those of others are waited for; a holder that takes longer is late."""

MOST_S = 120.0
"""How long several are waited for while no answer counts: a Byzantine peer may say for ever that one is on the way."""

_TICK_S = 0.25
"""How often the driver looks for pieces that take too long."""


def expect(answer: Answer, kind: type[T], holder: PeerId) -> T:
    """An answer of that kind. Raises Refused for a refusal, BadMessage for anything else."""
    match answer:
        case Rejected():
            raise Refused(answer.code, answer.reason, peer=holder)
        case kind():
            return answer
        case _:
            raise BadMessage(RejectCode.MALFORMED, f"no answer of kind {kind.__name__}", peer=holder)


class HolderCalls:
    """Asks holders, and remembers which to leave out. failed(holder, error) is called for each one that did not
    help."""

    def __init__(self, transport: Transport, failed: Callable[[PeerId, SwarmError], None]) -> None:
        self.transport, self._failed, self._holders = transport, failed, Holders()

    def usable(self, holders: Iterable[PeerId]) -> list[PeerId]:
        """Those of these that are asked now."""
        return self._holders.to_ask(holders, now=loop_time())

    async def ask(self, holder: PeerId, request: Request, take: Callable[[Answer], T]) -> T | None:
        """What `take` makes of the answer; None if the holder gave none, or `take` raised BadMessage or Refused."""
        began = loop_time()
        try:
            answer = await ask(self.transport, holder, request)
            self._holders.answered(holder)
            return take(answer)
        except (BadMessage, Refused, PeerGone, PeerTimeout) as error:
            self.failed(holder, error, after_s=loop_time() - began)
            return None

    def failed(self, holder: PeerId, error: SwarmError, *, after_s: float = 0.0) -> None:
        """A holder did not deliver, `after_s` after it was asked."""
        if isinstance(error, BadMessage):
            self._holders.sent_false(holder, now=loop_time())
        elif isinstance(error, PeerGone | PeerTimeout) and after_s >= GRACE_S:
            self._holders.was_late(holder, now=loop_time())
        self._failed(holder, error)


async def first_answers(
    asked: Mapping[PeerId, Coroutine[Any, Any, T]],
    *,
    counts: Callable[[T], bool],
    grace_s: float = GRACE_S,
    most_s: float | None = None,
) -> tuple[dict[PeerId, T], list[PeerId]]:
    """Answers in the order in which they came, and the peers that took `grace_s` longer than the first that counts, or
    `most_s` in all. None: `MOST_S` if several are asked, else no limit."""
    answers: dict[PeerId, T] = {}
    if most_s is None:
        most_s = MOST_S if len(asked) > 1 else math.inf
    counted, until = False, loop_time() + most_s
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(work): peer for peer, work in asked.items()}
        waiting = set(tasks)
        while waiting and until > loop_time():
            done, waiting = await asyncio.wait(
                waiting, timeout=None if until == math.inf else until - loop_time(), return_when=asyncio.FIRST_COMPLETED
            )
            for task in [task for task in tasks if task in done]:
                answers[tasks[task]] = task.result()
                if not counted and counts(task.result()):
                    counted, until = True, min(until, loop_time() + grace_s)
        for task in waiting:
            task.cancel()
    return answers, [tasks[task] for task in waiting]


class PartialContent:
    """A content that is being put together."""

    def __init__(self, content: Content) -> None:
        self.content = content
        # Not a bytearray: that would first write every byte as zero.
        self.data: memoryview = np.empty(content.num_bytes, dtype=np.uint8).data
        self.done: set[int] = set()

    @property
    def done_bytes(self) -> int:
        return sum(stop - start for start, stop in (span(self.content, piece) for piece in self.done))

    @property
    def complete(self) -> bool:
        return len(self.done) == num_pieces(self.content)

    async def put(self, piece: int, data: bytes | bytearray | memoryview, holder: PeerId) -> None:
        """Take in a piece. Raises BadMessage if it is not the one described."""
        start, stop = span(self.content, piece)
        small = len(data) <= LARGE_BYTES
        # To hand a small piece to a thread costs more than to hash it.
        digest = hashlib.sha256(data) if small else await asyncio.to_thread(hashlib.sha256, data)
        if len(data) != stop - start or digest.digest() != digest_of(self.content, piece):
            raise BadMessage(RejectCode.MALFORMED, "a piece that does not have its digest", piece=piece, peer=holder)
        if small:
            self.data[start:stop] = data
        else:
            await asyncio.to_thread(self.data.__setitem__, slice(start, stop), data)
        self.done.add(piece)


class PieceFetch:
    """Fetches pieces from all holders at once, each from whichever is free.

    get(holder, piece): ask for that piece, check it and keep it. If it raises BadMessage, Refused, PeerGone or
    PeerTimeout, the holder is dropped, and `dropped` is called with the reason.
    """

    def __init__(
        self,
        num_pieces: int,
        get: Callable[[PeerId, int], Coroutine[Any, Any, None]],
        holders: Sequence[PeerId],
        *,
        done: Iterable[int] = (),
        dropped: Callable[[PeerId, SwarmError], None] = lambda holder, error: None,
    ) -> None:
        self.plan = FetchPlan(num_pieces, done=done)
        self._get, self._dropped = get, dropped
        for holder in holders:
            self.plan.add(holder)

    async def run(self) -> SwarmError | None:
        """None once every piece is here, else why the last holder was dropped. Holders may be added meanwhile."""
        plan, error = self.plan, None
        asking: dict[tuple[PeerId, int], asyncio.Task[SwarmError | None]] = {}
        try:
            while plan.holders and not plan.complete:
                wanted = plan.requests(now=loop_time())
                for at in asking.keys() - wanted:
                    asking.pop(at).cancel()
                for at in wanted:
                    if at not in asking:
                        asking[at] = asyncio.create_task(self._attempt(*at))
                done, _ = await asyncio.wait(asking.values(), timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                for (holder, piece), task in [*asking.items()]:
                    if task not in done:
                        continue
                    del asking[holder, piece]
                    failure = task.result()
                    # Another piece of the same holder may have failed just now, or another holder was faster.
                    if holder not in plan.holders or piece in plan.done:
                        continue
                    if failure is None:
                        plan.arrived(holder, piece, now=loop_time())
                    else:
                        plan.drop(holder)
                        self._dropped(holder, failure)
                        error = failure
        finally:
            for task in asking.values():
                task.cancel()
        return None if plan.complete else error

    async def _attempt(self, holder: PeerId, piece: int) -> SwarmError | None:
        try:
            await self._get(holder, piece)
        except (BadMessage, Refused, PeerGone, PeerTimeout) as error:
            return error
        return None
