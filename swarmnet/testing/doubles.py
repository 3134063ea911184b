"""Doubles of a transport, a service and a directory that answer by script, and the loop on which waiting costs nothing.

A script is an answer to give, seconds to wait, an error to raise, or any number of scripts one after another; None is
silence until the deadline. `MemoryNetwork` is the double of a whole network.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar

from swarmnet.directory import Record
from swarmnet.errors import PeerGone, PeerTimeout, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Control, Packed, Rejected, Request
from swarmnet.testing.clock import VirtualLoop
from swarmnet.transport import ReadPayload

T = TypeVar("T")
Script = Any
"""Answer | Exception | float | None | list[Script] | AsyncGenerator[Answer, None]"""


def run_virtual(work: Coroutine[Any, Any, T], *, limit_s: float = 1e6) -> T:
    """Run `work` to its end on virtual time. Raises TimeoutError when it takes longer than `limit_s` of it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(work, limit_s))


async def play(script: Script, *, deadline: float | None = None) -> AsyncGenerator[Answer, None]:
    """The answers of a script, in time; its errors are raised. Silence ends in PeerTimeout at the deadline."""
    if script is None:
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.Event().wait()
        except TimeoutError:
            raise PeerTimeout("no answer in time") from None
    elif isinstance(script, float):
        await asyncio.sleep(script)
    elif isinstance(script, Exception):
        raise script
    elif isinstance(script, AsyncGenerator):
        # Closed with this one: the callee's `finally` runs when the caller leaves.
        async with contextlib.aclosing(script):
            async for answer in script:
                yield answer
    elif isinstance(script, list):
        for part in script:
            async for answer in play(part, deadline=deadline):
                yield answer
    else:
        yield script


def in_turn(*scripts: Script) -> Callable[[Request], Script]:
    """The first script for the first call, and so on; the last one for all that follow."""
    left = list(scripts)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def refused(peer: PeerId, request: Request) -> Script:
    """Nothing listens there."""
    return PeerGone("refused", definite=True, peer=peer)


class Transmission(NamedTuple):
    """A message or request that was sent, at which loop time."""

    peer: PeerId
    message: Any
    at_s: float


class FakeTransport:
    """A transport with peers that answer by script. It remembers what it was asked for.

    Set `intercept` to change what arrives: it is given (peer, request, answer) and returns a script to play instead of
    the answer.
    """

    def __init__(
        self, answer: Callable[[PeerId, Any], Script] = refused, **peers: Callable[[Any], Script] | Answer
    ) -> None:
        """answer: the script of a peer's answer to a request; peers: those of single peers, by name."""
        self.answer, self.peers = answer, peers
        self.intercept: Callable[[PeerId, Any, Any], Script] = lambda peer, request, answer: answer
        self.dials: Callable[[PeerId, str], Script] = lambda peer, address: []
        self.calls: list[Transmission] = []
        self.payloads: list[tuple[Packed, ...]] = []
        self.told: list[Transmission] = []
        self.dialled: list[tuple[PeerId, str]] = []

    @property
    def asked(self) -> list[PeerId]:
        """Which peers were called, in order."""
        return [call.peer for call in self.calls]

    @property
    def requests(self) -> list[tuple[PeerId, Any]]:
        """What they were asked for."""
        return [call[:2] for call in self.calls]

    def tell(self, peer: PeerId, message: Control) -> None:
        self.told.append(Transmission(peer, message, asyncio.get_running_loop().time()))

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        self.calls.append(Transmission(peer, request, asyncio.get_running_loop().time()))
        self.payloads.append(payload)
        says = self.peers.get(peer, lambda request: self.answer(peer, request))
        async for answer in play(says(request) if callable(says) else says, deadline=deadline):
            async for instead in play(self.intercept(peer, request, answer), deadline=deadline):
                yield instead

    async def dial(self, peer: PeerId, address: str, *, deadline: float) -> None:
        self.dialled.append((peer, address))
        async for _ in play(self.dials(peer, address), deadline=deadline):
            pass

    def relayed(self, peer: PeerId) -> bool:
        return False

    def carries(self, bytes_per_s: int) -> None: ...


class FakeService:
    """A service that answers by script and remembers its messages. It serves nothing if not told otherwise."""

    def __init__(
        self,
        answering: Callable[[PeerId, Any, ReadPayload], Script] = lambda *_: Rejected(
            RejectCode.NOT_SERVED, "no script"
        ),
    ) -> None:
        self.answering = answering
        self.told: asyncio.Queue[tuple[PeerId, Control]] = asyncio.Queue()
        self.reached: asyncio.Queue[PeerId] = asyncio.Queue()
        self.gone: asyncio.Queue[tuple[PeerId, bool]] = asyncio.Queue()

    def on_tell(self, caller: PeerId, message: Control) -> None:
        self.told.put_nowait((caller, message))

    def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        return play(self.answering(caller, request, payload))

    def on_reached(self, peer: PeerId) -> None:
        self.reached.put_nowait(peer)

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        self.gone.put_nowait((peer, definite))


class FakeDirectory:
    """A complete directory with records that a function gives. It remembers what is published."""

    def __init__(self, records: Callable[[], Iterable[Record]] = tuple) -> None:
        self.given, self.published = records, list[Record]()

    async def publish(self, record: Record) -> None:
        self.published.append(record)

    def complete(self) -> bool:
        return True

    async def records(self, near: object = None, *, at_once: bool = False) -> tuple[Record, ...]:
        return tuple(self.given())
