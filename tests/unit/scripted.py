"""A transport whose peers answer by script, and a loop on which waiting costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from swarmnet.errors import BadMessage, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Packed, Request
from swarmnet.testing.clock import VirtualLoop

T = TypeVar("T")
Says = Callable[[Request], Answer | SwarmError | None]
"""What a peer answers; None: it never does."""


class ScriptedTransport:
    """calls: (peer, request, virtual time) of every call, in order; payloads: what came with them.

    travels_s: how long an answer is on its way after a first sign of life.
    """

    def __init__(self, *, travels_s: float = 0.0, **peers: Says) -> None:
        self._peers, self._travels_s = peers, travels_s
        self.calls: list[tuple[str, Request, float]] = []
        self.payloads: list[tuple[Packed, ...]] = []

    def tell(self, peer: PeerId, message: object) -> None:
        raise AssertionError("nothing is told here")

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        self.calls.append((peer, request, asyncio.get_running_loop().time()))
        self.payloads.append(payload)
        await asyncio.sleep(0.01)
        said = self._peers[peer](request)
        if said is None:
            await asyncio.Event().wait()
        if isinstance(said, SwarmError):
            raise said
        assert said is not None
        if self._travels_s:
            yield Accepted()
            await asyncio.sleep(self._travels_s)
        yield said


PROOF = Packed("uint8", (1, 1, 32), b"proof".ljust(32))


class OneProof:
    """Implements Windows: all tokens have the same proof."""

    layout = ("uint8", (1, 1, 32))

    def check(self, step: int, index: int, tokens: Packed, proof: Packed) -> None:
        if proof.data != PROOF.data:
            raise BadMessage(RejectCode.MALFORMED, "not proven")


def on_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end, within an hour of its own time."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(asyncio.wait_for(main, 3600.0))
    finally:
        asyncio.set_event_loop(None)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
