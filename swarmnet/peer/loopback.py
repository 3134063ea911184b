"""A peer that serves several stages calls itself without the network."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from swarmnet.errors import BadMessage, Refused
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Control, Packed, Rejected, Request
from swarmnet.transport import ReadPayload, Service, Transport, layout_of


class Loopback:
    """A Transport that hands calls to `me` straight to my own service, all else to the network."""

    def __init__(self, me: PeerId, service: Service, network: Transport) -> None:
        self._me, self._service, self._network = me, service, network

    def tell(self, peer: PeerId, message: Control) -> None:
        if peer == self._me:
            self._service.on_tell(self._me, message)
        else:
            self._network.tell(peer, message)

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        if peer != self._me:
            answers = self._network.call(peer, request, payload, deadline=deadline)
        else:
            answers = self._call_me(request, payload)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                yield answer

    async def dial(self, peer: PeerId, address: str, *, deadline: float) -> None:
        await self._network.dial(peer, address, deadline=deadline)

    async def _call_me(self, request: Request, payload: tuple[Packed, ...]) -> AsyncGenerator[Answer, None]:
        async def read() -> tuple[Packed, ...]:
            return payload

        try:
            async for answer in self._service.on_call(self._me, request, ReadPayload(layout_of(payload), read)):
                yield answer
        except (BadMessage, Refused) as error:
            yield Rejected(error.code, error.reason)
