"""Fetching what a replica lacks: no answer of one peer stops it, but for a value that nobody can compute."""

from __future__ import annotations

import math
import struct

import pytest
from test_execution import PROOF, OneProof

from swarmnet.errors import BadMessage, PeerGone, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Accepted, Fetch, Fetched, Packed, Rejected, Request
from swarmnet.pipeline.inputs import AnswerCheck, InputCheck
from swarmnet.pipeline.recovery import Recovery
from swarmnet.testing.doubles import FakeTransport

pytestmark = pytest.mark.virtual_time

LAYOUT = ("fp32", (1, 1, 1))


def hidden(value: float) -> Packed:
    return Packed("fp32", (1, 1, 1), struct.pack("<f", value))


TOKENS = Packed("int32", (1, 2), struct.pack("<ii", 3, 4))
INPUT = Fetched((TOKENS, hidden(1.0), PROOF))
ANSWER = Fetched((hidden(2.0),), 0.5, 1)


Named = list[tuple[str, int, int, RejectCode]]


class Host:
    """Implements what Recovery needs of PipelineHost."""

    def __init__(self, peers: tuple[str, ...], named: Named) -> None:
        self._peers, self._named, self.timers = peers, named, Timers()

    def live(self, stage: int) -> tuple[str, ...]:
        return self._peers

    def bad_input(self, peer: PeerId, step: int, index: int, error: BadMessage) -> None:
        self._named.append((peer, step, index, error.code))


def sources(transport: FakeTransport, *peers: str, named: Named | None = None) -> Recovery:
    host, check = Host(peers, [] if named is None else named), InputCheck((("int32", (1, 2)), LAYOUT), 8, OneProof())
    return Recovery(transport, 1, host, check=check, answers=AnswerCheck((LAYOUT,), 1))


def cached(request: Request) -> bool:
    assert isinstance(request, Fetch)
    return request.cached


async def test_a_hung_replica_costs_a_second_and_is_asked_to_recompute_last() -> None:
    transport = FakeTransport(
        hung=lambda request: None, up=lambda request: Rejected(RejectCode.NOT_FOUND) if cached(request) else INPUT
    )
    assert await sources(transport, "hung", "up").input(0, 0) == INPUT
    _, recomputed_at = next((peer, at) for peer, request, at in transport.calls if not cached(request))
    assert recomputed_at <= 1.1 and transport.calls[-1][0] == "up"


async def test_a_peer_that_shows_life_is_waited_for_while_its_copy_travels() -> None:
    transport = FakeTransport(slow=[Accepted(), 5.0, INPUT])
    assert await sources(transport, "slow").input(0, 0) == INPUT
    assert len(transport.calls) == 1


@pytest.mark.parametrize("code", RejectCode)
async def test_a_refused_copy_is_no_copy(code: RejectCode) -> None:
    transport = FakeTransport(
        a=lambda request: Rejected(code) if cached(request) else INPUT, b=lambda request: Rejected(RejectCode.NOT_FOUND)
    )
    assert await sources(transport, "a", "b").input(0, 0) == INPUT
    assert await sources(transport, "a", "b").gradient(0, 0) is None


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        ((TOKENS, hidden(math.nan), PROOF), RejectCode.NON_FINITE),
        ((TOKENS, hidden(1e20), PROOF), RejectCode.NON_FINITE),
        ((TOKENS,), RejectCode.BAD_SHAPE),
        ((Packed("int32", (1, 2), struct.pack("<ii", 3, 8)), hidden(1.0), PROOF), RejectCode.MALFORMED),
        ((TOKENS, hidden(1.0), Packed("uint8", (1, 1, 32), bytes(32))), RejectCode.MALFORMED),
        ((TOKENS, hidden(1.0)), RejectCode.BAD_SHAPE),
    ],
    ids=["nan", "huge", "shape", "vocabulary", "proof", "no proof"],
)
async def test_a_bad_input_is_asked_for_elsewhere_and_its_sender_named(
    payload: tuple[Packed, ...], code: RejectCode
) -> None:
    transport = FakeTransport(
        a=lambda request: Fetched(payload),
        b=lambda request: Rejected(RejectCode.NOT_FOUND) if cached(request) else INPUT,
    )
    named: Named = []
    assert await sources(transport, "a", "b", named=named).input(5, 3) == INPUT
    assert set(named) == {("a", 5, 3, code)}


@pytest.mark.parametrize(
    "bad",
    [Fetched((hidden(math.inf),), 0.5, 1), Fetched((), 0.5, 1), Fetched((hidden(2.0),), 0.5, 7)],
    ids=["infinity", "shape", "tokens"],
)
async def test_a_bad_memoised_answer_is_none(bad: Fetched) -> None:
    assert await sources(FakeTransport(a=lambda request: bad), "a").gradient(0, 0) is None
    both = FakeTransport(a=lambda request: bad, b=lambda request: ANSWER)
    assert await sources(both, "a", "b").gradient(0, 0) == ANSWER


def discard(request: Request) -> Rejected:
    return Rejected(RejectCode.NOT_FOUND if cached(request) else RejectCode.OVERFLOWED)


async def test_only_recomputations_of_half_a_stage_prove_that_the_input_is_not_finite() -> None:
    transport = FakeTransport(a=lambda request: PeerGone("broken"), b=discard, c=discard)
    with pytest.raises(Refused) as refused:
        await sources(transport, "a", "b", "c").input(0, 0)
    assert refused.value.code is RejectCode.OVERFLOWED
    honest = FakeTransport(
        a=discard,
        b=lambda request: PeerGone("broken"),
        c=lambda request: Rejected(RejectCode.NOT_FOUND) if cached(request) else INPUT,
    )
    assert await sources(honest, "a", "b", "c").input(0, 0) == INPUT
