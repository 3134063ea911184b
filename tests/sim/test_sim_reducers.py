"""Members that lie about sums, beside honest ones of production classes: what is committed is right, and who lied is
left out; nobody honest is."""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from swarmnet.audit.pledge import statement
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Packed, Part, PartData, Pledge
from swarmnet.simulate.plan import Plan
from swarmnet.simulate.swarm import SimulatedSigner, Swarm
from tests.benchmark_modules import load

lies = load("strangers_lies")
LIAR = PeerId("liar")


def altered(answer: PartData, by: int = 1) -> PartData:
    """With another first number."""
    packed = answer.payload[0]
    (first,) = struct.unpack_from("<q", packed.data)
    data = struct.pack("<q", first + by) + bytes(packed.data)[8:]
    return replace(answer, payload=(Packed(packed.codec, packed.shape, data),))


def signed(pledge: Pledge, **changes: Any) -> Pledge:
    """Another pledge, signed by the same peer."""
    false = replace(pledge, **changes)
    return replace(false, signature=SimulatedSigner(pledge.peer).sign(statement(false)))


class Tells(lies.Lie):  # type: ignore[name-defined,misc]
    """Changes what its callers get. change: (caller, request, answer) -> answer."""

    change: Callable[[PeerId, Part, PartData], PartData]

    async def _changed(
        self, caller: PeerId, request: Part, honest: AsyncGenerator[Answer, None]
    ) -> AsyncGenerator[Answer, None]:
        async for answer in honest:
            yield type(self).change(caller, request, answer) if isinstance(answer, PartData) else answer

    def answers(self, caller: PeerId, request: Any, read: Any, honest: Any) -> Any:
        return self._changed(caller, request, honest) if isinstance(request, Part) else honest


class FalsePledge(Tells):
    """Pledges another product than its contribution has."""

    @staticmethod
    def change(caller: PeerId, request: Part, answer: PartData) -> PartData:
        told = [signed(each, product=each.product ^ 1) if each.peer == LIAR else each for each in answer.pledges]
        return replace(answer, pledges=tuple(told)) if request.kind == "pledges" else answer


class Both(FalsePledge):
    """Reduces falsely, and pledges falsely, too."""

    def bend(self, engine: Any) -> Any:
        return lies.LyingReducer.bend(self, engine)


class UnsignedPart(Tells):
    """Contributes something else than it signs."""

    @staticmethod
    def change(caller: PeerId, request: Part, answer: PartData) -> PartData:
        return altered(answer) if request.kind == "contribution" else answer


class Equivocates(Tells):
    """Signs to its reducers what it does not hand out later: a false contribution first, and to the others the true
    one. What it pledges is of the true one."""

    given: set[tuple[PeerId, int]] = set()

    @classmethod
    def change(cls, caller: PeerId, request: Part, answer: PartData) -> PartData:  # type: ignore[override]
        raise NotImplementedError
