"""How peers reach each other: one-way messages and streamed calls. Two implementations: gRPC and memory.

A transport knows who is calling (proved, not claimed) and nothing of what is said.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Control, Packed, Request

ReadPayload = Callable[[], Awaitable[tuple[Packed, ...]]]
"""Reads the caller's payload; not calling it is how a refusal costs nothing. Raises BadMessage or PeerGone."""


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


class Service(Protocol):
    """What a peer does when others reach it. The caller's identity is proved by the transport."""

    def on_tell(self, caller: PeerId, message: Control) -> None:
        """Handle a one-way message. Must not block."""
        ...

    def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Answer a call. A raised BadMessage or Refused becomes `Rejected`; cancellation means the caller left."""
        ...

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        """A connection to `peer` broke; `definite`: nobody listens at its address any more (the process is gone)."""
        ...
