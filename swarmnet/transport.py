"""How peers reach each other: one-way messages and streamed calls.

Three implementations: gRPC (`net`), memory (`testing.network`), and a peer's calls to itself (`peer.peer.Loopback`).

A transport knows who is calling (proved, not claimed) and nothing of what is said. `ask` is how most of its users call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from swarmnet.errors import PeerGone, PeerTimeout
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Control, Packed, Request, Running

TensorLayout = tuple[str, tuple[int, ...]]
"""(codec, shape) of a tensor."""

Layout = tuple[TensorLayout, ...]
"""The layouts of the tensors of a payload, in order."""


def layout_of(payload: Iterable[Packed]) -> Layout:
    """What a header declares of `payload`, lengths apart: codec and shape decide those."""
    return tuple((packed.codec, tuple(packed.shape)) for packed in payload)


@dataclass(frozen=True, slots=True)
class ReadPayload:
    """A caller's payload, which has not been read yet. Call it to read it, once; it raises BadMessage or PeerGone.

    A callee that refuses never calls it, so a refusal costs nothing. declared: the layout that the caller announced;
    nothing else can come.
    """

    declared: Layout
    read: Callable[[], Awaitable[tuple[Packed, ...]]]

    async def __call__(self) -> tuple[Packed, ...]:
        return await self.read()


class Transport(Protocol):
    """What a peer can do to another peer."""

    def tell(self, peer: PeerId, message: Control) -> None:
        """Send one way, best effort, in order per peer while the connection lasts. Never blocks, never raises."""
        ...

    def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        """Call and iterate over the answers; the last one carries the result. `deadline` is absolute loop time.

        While an answer's payload arrives, `Running` comes now and then. Leaving the iteration early cancels the call.
        Raises PeerGone (refused or broken), PeerTimeout (the deadline, or nothing moves and the callee's process shows
        no life), BadMessage (the answer is malformed).
        """
        ...

    async def dial(self, peer: PeerId, address: str, *, deadline: float) -> None:
        """Open a new connection to `peer` at `address` and close it again. `deadline` is absolute loop time.

        Raises PeerGone (it cannot be opened, or another peer answers there; the message says which), PeerTimeout
        (something answers and has not proved in time that it is `peer`).
        """
        ...

    def relayed(self, peer: PeerId) -> bool:
        """Do calls to `peer` cross a relay now?"""
        ...

    def carries(self, bytes_per_s: int) -> None:
        """What my line carries, as the last rounds have measured it: joiners have a share of that."""
        ...


class Service(Protocol):
    """What a peer does when others reach it. The caller's identity is proved by the transport."""

    def on_tell(self, caller: PeerId, message: Control) -> None:
        """Handle a one-way message. Must not block."""
        ...

    def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Answer a call. A raised BadMessage or Refused becomes `Rejected`; cancellation means the caller left."""
        ...

    def on_reached(self, peer: PeerId) -> None:
        """`peer` has just answered on a connection that I opened: it can be called, and its process runs.

        Said about once per heartbeat while one-way messages go to `peer`.
        """
        ...

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        """A connection to `peer` broke; `definite`: no process listens at its address (the process is gone)."""
        ...


LONGEST_S = 3600.0
"""The longest call, where only silence should end one."""


async def ask(
    transport: Transport,
    peer: PeerId,
    request: Request,
    payload: tuple[Packed, ...] = (),
    *,
    first_s: float | None = None,
    patience: Callable[[], float | None] = lambda: None,
    heard: Callable[[], None] = lambda: None,
    limit_s: float = LONGEST_S,
) -> Answer:
    """Call and return the first answer that is more than a sign of life. Cancel to give up.

    Silence, or an end without an answer, raises. A refusal is an answer like any other: the caller judges it.

    first_s: the seconds of silence before the first sign of life after which the peer is given up; None: `patience`
    says it. patience() is asked before every other wait: the same for later silence, which may be longer, because a
    payload on a slow line takes as long as it takes; None leaves that to the transport, which ends a call when nothing
    moves. heard() is called at every sign of life, the answer among them. limit_s: of the whole call, whatever the peer
    says meanwhile. Raises PeerTimeout (silent for too long, or over the limit), PeerGone, BadMessage.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + limit_s
    wait_s = patience if first_s is None else lambda: first_s
    async with contextlib.aclosing(transport.call(peer, request, payload, deadline=deadline)) as answers:
        while True:
            # Asked each time: how long silence is normal changes while one waits.
            patience_s = wait_s()
            try:
                async with asyncio.timeout_at(min(clock() + (patience_s or limit_s), deadline)):
                    answer = await anext(answers)
            except TimeoutError as error:
                # Which of the two limits it was decides what the caller does next.
                if clock() >= deadline:
                    raise PeerTimeout("no answer in time", peer=peer, limit_s=round(limit_s, 2)) from error
                raise PeerTimeout("silent", peer=peer, patience_s=round(patience_s or 0.0, 2)) from error
            # The callee has left without a word.
            except StopAsyncIteration as error:
                raise PeerGone("the call ended without an answer", peer=peer) from error
            heard()
            wait_s = patience
            if not isinstance(answer, Accepted | Running):
                return answer
