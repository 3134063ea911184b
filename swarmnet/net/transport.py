"""How peers reach each other: one-way messages and streamed calls. Two implementations: gRPC and memory.

A transport knows who is calling (proved, not claimed) and nothing of what is said.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Control, Packed, Request

TensorLayout = tuple[str, tuple[int, ...]]
"""(codec, shape) of a tensor."""

Layout = tuple[TensorLayout, ...]
"""Of each tensor of a payload."""


def layout_of(payload: Iterable[Packed]) -> Layout:
    """What a header declares of `payload`, lengths apart: codec and shape decide those."""
    return tuple((packed.codec, tuple(packed.shape)) for packed in payload)


@dataclass(frozen=True, slots=True)
class ReadPayload:
    """A caller's payload, which has not been read yet. Call it to read it, once; it raises BadMessage or PeerGone.

    Not calling it is how a refusal costs nothing. declared: what the caller says it sends; nothing else can come.
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

        Raises PeerGone (it cannot be opened, or somebody else answers there; the message says which), PeerTimeout
        (something answers and has not proved in time that it is `peer`).
        """
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
        """A connection to `peer` broke; `definite`: nobody listens at its address any more (the process is gone)."""
        ...
